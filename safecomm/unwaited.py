"""Functional collectives that nobody waited for: torch keeps their tensors for the life of the process.

A functional collective gives out a wrapper (``AsyncCollectiveTensor``) of the tensor that it writes to, and torch keeps
the work, which refers to its tensors, in a registry, until somebody waits for one of that storage. Whoever drops the
wrapper has waited for nothing. :class:`Unwaited` notes what was wrapped (``patching/functional.py`` tells it), and
after the last wrapper of a storage has died the next call of safecomm waits in the program's place (S3, S4).

A wait takes the work out of the registry, and a later one finds nothing to wait for. So nobody else may have the
tensor: as long as a wrapper lives, or somebody has taken the tensor out of one, it is left alone. Who has it is
counted: Python's references to the tensor, and those of C++ to its storage, compared with when it was wrapped.

On the host a wait blocks until the peers have come, which may be after the program's next call. There, a thread waits,
and does nothing else: what is freed, is freed by the next call. On a GPU a wait orders the stream that the collective
was launched on. What the collective reads may be another stream's memory, and becomes a trail.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from safecomm import _torch
from safecomm.entries import Entry, Lane, keys_of
from safecomm.refcounts import COUNTED, HELD_ONCE, getrefcount
from safecomm.streams import HOST, Streams, capture_of
from safecomm.trails import Trails

log = logging.getLogger("safecomm")

LOOK = 16
"""Results that one call looks at: those of one step of a model, and few where somebody keeps many."""


class Result(Entry):
    """What a functional collective writes to, for as long as wrappers of it live; an entry once the last has died."""

    lane: ResultLane
    key: int  # of the storage
    tensor: Any  # until somebody has waited for it
    uses: int  # references to its storage in C++ when nobody else had it
    wrappers: dict[Any, None]  # weak references to those that live
    given: tuple[Any, ...] | None = None  # weak references to the storages that it reads; None: nothing is known of it
    waiter: threading.Thread | None = None  # who waits for it, on the host

    @property
    def nbytes(self) -> int:
        """Bytes of what it keeps in memory."""
        tensor = self.tensor
        return super().nbytes + (0 if tensor is None else int(tensor.untyped_storage().nbytes()))

    def finish(self) -> None:
        """Block until the collective is over. On a GPU, and where torch keeps works by thread, :meth:`wait` has to."""
        waiter = self.waiter
        if waiter is not None:
            waiter.join()
        elif self.lane.index == HOST and self.tensor is not None:
            self.waiter = threading.current_thread()
            self.lane.unwaited.wait_for(self.tensor)

    def wait(self) -> None:
        """Wait for it in the thread of the caller, and let go of it."""
        self.lane.unwaited.take(self)

    def release(self) -> None:
        """Let go of it: the collective is over, or its stream is ordered after it."""
        self.storages = ()
        self.tensor = None
        self.lane.take(self)


class ResultLane(Lane):
    """The results on one device that nobody has waited for."""

    __slots__ = ("unwaited",)

    unwaited: Unwaited


class Unwaited:
    """The results of functional collectives in this process. ``busy`` and ``fail`` are the ledger's."""

    def __init__(
        self, streams: Streams, busy: dict[Lane, None], trails: Trails, fail: Callable[[Entry, BaseException], None]
    ) -> None:
        self.wait_for: Callable[[Any], Any] = _nothing  # torch's wait_tensor, from the first patch on
        self._fail = fail
        self._streams = streams
        self._busy = busy
        self._trails = trails
        self._lanes: dict[int, ResultLane] = {}
        self._results: dict[int, Result] = {}  # by storage, of which a wrapper lives
        self._waiter: threading.Thread | None = None

    # --- what comes ---------------------------------------------------------------------------------------

    def wrapped(self, wrapper: Any, tensor: torch.Tensor, frame: types.FrameType) -> None:
        """Note that ``wrapper`` is one of ``tensor``, before the program has either."""
        if not COUNTED or _torch.tensor_use_count is None or type(tensor) is not torch.Tensor:
            return
        if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
            return
        key = _torch.cdata_of(tensor.untyped_storage())
        result = self._results.get(key)
        if result is None:
            result = Result()
            index = tensor.get_device() if tensor.is_cuda else HOST
            result.lane = self._lane(index)
            result.stream = 0 if index == HOST else self._streams.current(index)
            result.op = "a functional collective"
            result.code, result.instruction = frame.f_code, frame.f_lasti
            result.since = time.perf_counter()
            result.key = key
            result.uses = _torch.storage_use_count(key)
            result.wrappers = {}
            result.storages = ()
            result.tensor = tensor
            self._results[key] = result
        result.wrappers[weakref.ref(wrapper, functools.partial(self._ended, result))] = None

    def launched(
        self, tensor: torch.Tensor, op: str, given: Iterable[torch.Tensor], frame: types.FrameType, *, orders: bool
    ) -> None:
        """Note that ``op``, called in ``frame``, reads ``given``, and writes to the ``tensor`` that was wrapped.

        ``orders``: a wait for it orders a stream, and does not block the host.
        """
        result = self._results.get(_torch.cdata_of(tensor.untyped_storage()))
        if result is not None and result.tensor is not None:
            result.op = op
            result.code, result.instruction = frame.f_code, frame.f_lasti
            result.uses = min(result.uses, _torch.storage_use_count(result.key))
            if _torch.WEAK_STORAGES and (orders or result.lane.index == HOST):
                result.given = tuple(_torch.StorageWeakRef(one.untyped_storage()) for one in given)

    def waited(self, tensor: torch.Tensor) -> None:
        """Note that somebody has waited for ``tensor``: it is his from now on, and his alone."""
        result = self._results.get(_torch.cdata_of(tensor.untyped_storage()))
        if result is not None:
            result.tensor = None

    def _ended(self, result: Result, reference: Any) -> None:
        """Queue ``result`` if that was its last wrapper. In any thread, also within the garbage collector."""
        result.wrappers.pop(reference, None)
        if result.wrappers:
            return
        if self._results.get(result.key) is result:
            del self._results[result.key]
        if result.tensor is None:
            return
        if result.lane.index != HOST and result.given is None:
            # A wait might block the host, or give back too early what the collective reads. Torch keeps it.
            result.tensor = None
            return
        result.lane.entries[result] = None
        self._busy[result.lane] = None

    def _lane(self, index: int) -> ResultLane:
        lane = self._lanes.get(index)
        if lane is None:
            lane = ResultLane(self._busy, self._lanes, index, index)
            lane.blind = True  # nobody has the works, so they can't be asked whether they are over
            lane.unwaited = self
            self._lanes[index] = lane
        return lane

    # --- what goes ----------------------------------------------------------------------------------------

    def in_use(self, entry: Entry) -> bool:
        """Return whether ``entry`` is a result that somebody has who may still wait for it."""
        return isinstance(entry, Result) and entry.waiter is None and not (self._over(entry) or self._alone(entry))

    def _alone(self, result: Result) -> bool:
        """Return whether nobody but the work has what the collective writes to."""
        tensor = result.tensor
        if tensor is None:
            return True
        uses = _torch.storage_use_count(result.key)
        result.uses = min(result.uses, uses)
        shared = _torch.LONE.shared if _torch.tensor_use_count(tensor) > 1 else 0  # type: ignore[misc]
        return getrefcount(tensor) - shared <= HELD_ONCE and uses <= result.uses

    def _over(self, result: Result) -> bool:
        """Return whether there is no work any more: somebody has waited."""
        tensor = result.tensor
        return tensor is None or (
            _torch.tensor_use_count(tensor) == 1  # type: ignore[misc]
            and _torch.storage_use_count(result.key) <= _torch.LONE.storage
        )

    def sweep(self, lane: ResultLane, *, thorough: bool = False) -> None:
        """Wait for what was dropped, and release what is over, without blocking. Not inside of a capture."""
        ready: list[Result] = []
        for result in keys_of(lane.entries) if thorough else lane.oldest(LOOK):
            assert isinstance(result, Result)
            if self._over(result) and (result.waiter is None or not result.waiter.is_alive()):
                result.release()
            elif result.waiter is None and self._alone(result):
                ready.append(result)
            elif not thorough and result in lane.entries:
                lane.entries.move_to_end(result)  # the next call looks at others
        if lane.index == HOST:
            self._wait_in_a_thread(ready)
            return
        for result in ready:
            if not capture_of(self._streams, result.stream):
                self.take(result)

    def _wait_in_a_thread(self, results: list[Result]) -> None:
        if not results or (self._waiter is not None and self._waiter.is_alive()):
            return
        if not threading.main_thread().is_alive():  # the interpreter ends, and no thread can be started
            return
        for result in results:
            result.storages = _read_by(result)  # the thread drops the work, which has them too
        self._waiter = threading.Thread(
            target=self._wait_for_each, args=([result.tensor for result in results],), daemon=True
        )
        for result in results:
            result.waiter = self._waiter
        self._waiter.start()

    def _wait_for_each(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            try:
                self.wait_for(tensor)
            except Exception as error:  # over, too
                log.warning("a functional collective that nobody waited for failed (%s)", error)

    def take(self, result: Result) -> None:
        """Wait for ``result`` in this thread, and let go of it."""
        tensor = result.tensor
        if tensor is None:
            return  # another thread has done so
        index = result.lane.index
        if index == HOST:
            self._wait_undisturbed(tensor)
            result.release()
            return
        storages = (tensor.untyped_storage(), *_read_by(result))
        with self._streams.lenient(), self._streams.using(index, result.stream):
            try:
                self._wait_undisturbed(tensor)
            except Exception as error:
                result.storages = storages
                result.tensor = None
                self._fail(result, error)
                return
            self._trails.leave(result.op, None, index, storages, result.code, result.instruction, result.since)
        result.release()

    def _wait_undisturbed(self, tensor: Any) -> None:
        with _torch.probing():  # a mode of the program would see the wait, or refuse it
            self.wait_for(tensor)


def _nothing(tensor: Any) -> None:
    pass


def _read_by(result: Result) -> tuple[Any, ...]:
    """Return the storages that the collective reads, as far as they are still there."""
    return tuple(storage for weak in result.given or () if (storage := _torch.alive(weak)) is not None)
