"""What a CUDA graph owns: the memory that its collectives read and write, until it is reset or dies (S6).

A graph writes to the addresses that were captured at each replay, whatever they hold by then. What a capture allocates
lies in the graph's own pool, which torch keeps for it. Arguments from outside do not, so they are *leased*: held from
the capture on. Captures are seen while they are watched, as ``patch()``, ``avoid_record_streams()``, ``graph()`` and
``low_latency()`` do, also those of other code. Of all others it is known where they were made, from torch 2.14 on.

What each end does with what is held:

====================  ==========================================  ===================================================
end                   arguments from outside                      works and uses of the capture
====================  ==========================================  ===================================================
it ends well          leased                                      released
a work is unjoined    released as by a reset, which is done       joined and released, and an error names them; if
                                                                  tolerant, a warning does, and the capture ends well
it fails, is over     released as by a reset                      released
it fails, goes on     kept: it can be ended later                 kept, but for those joined before an interrupt came
the graph replays     checked; its stream is noted                none are left
reset, or death       become a use on each stream of a replay,    none are left
                      on the current one if there was none
not seen              the program's to keep                       released by the next sweep that finds it over
====================  ==========================================  ===================================================

A use of a capture that only the ledger still refers to is released before its end, by an edge of the graph (rule 3).

torch 2.14 has hooks of captures (https://docs.pytorch.org/docs/stable/generated/torch.cuda.CUDAGraph.html). They would
stand beside what is replaced here, and not in its place. None runs before a capture begins, when the arena has to be
ready, or before it ends, when works have to be joined. The end hooks do not run where a capture fails. The destroy
callback of a reset runs before torch has reset the graph, which could be replayed if that fails. So only the place of
each capture is from a hook.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from safecomm import _torch
from safecomm.core.call_site import called_from, outside, place
from safecomm.core.drain import BEFORE_WAITING
from safecomm.core.holds import Hold
from safecomm.core.ledger import LEDGER, Ledger
from safecomm.errors import CaptureBoundaryError, LiveGraphError, StaleGraphError

log: logging.Logger = logging.getLogger("safecomm")

RECORDING: dict[int, CapturedGraph] = LEDGER.recording
"""The captures that are going on, by their id."""

BEFORE: list[Callable[[int], None]] = []
"""Called with the index of the device, before a capture begins there."""

DURING: list[Callable[[], AbstractContextManager[object]]] = []
"""Contexts that are open while a capture is recorded."""

_live: dict[int, CapturedGraph] = {}
_tolerant = False
# Of the captures of all graphs.
_places: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, str] = weakref.WeakKeyDictionary()

_UNJOINED = "unjoined work"
"""What is in CUDA's error of a capture that ends while a stream that it has taken in goes on."""


@dataclass(frozen=True)
class Lease:
    """The memory of one argument of one captured collective."""

    op: str
    """The call, such as ``"all_reduce"``."""
    nbytes: int
    """Bytes of the argument's storage."""
    leased: bool
    """Whether the graph holds it; else it is in the graph's own pool, which torch keeps for it."""
    group: str
    """c10d's name of the group."""
    site: str
    """File, line and function of the call."""


class _Argument(Hold):
    """A storage that a captured collective uses, and one of the tensors over it."""

    storage: torch.UntypedStorage | None  # None if it is the pool's
    pointer: int
    tensor: weakref.ref[torch.Tensor]
    tensor_pointer: int
    bytes: int


class CapturedGraph:
    """What a CUDA graph does with memory. :class:`graph` makes it, as does each capture that is watched.

    Guarantees that the memory which its collectives read and write is not given out until :meth:`reset`, or until the
    ``torch.cuda.CUDAGraph`` dies. While it is alive, that graph's own ``replay`` and ``reset`` are the ones here.

    Not made by callers.
    """

    def __init__(
        self, ledger: Ledger, graph: Any, pool: Any, shared_ranges: list[tuple[int, int]], index: int, stream: int,
        capture: int, frame: types.FrameType,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self.index = index
        self.stream = stream
        self.capture = capture
        self.site: str = place(frame)
        self._code, self._instruction = frame.f_code, frame.f_lasti
        self._graph = weakref.ref(graph)
        self._pool = tuple(pool)
        self._shared_ranges = shared_ranges  # memory of the pool that other graphs have, which share it
        self._arguments: list[_Argument] = []
        self._slots: dict[int, torch.UntypedStorage] = {}  # of an arena, by address
        self._groups: dict[int, weakref.ref[object]] = {}
        self._replayed: dict[int, None] = {}  # the streams that it was replayed on
        self.before_replay: list[Callable[[int], None]] = []  # called with the stream of a replay that is about to be
        # The method that ends the capture and nothing else, from torch 2.14 on. torch.cuda.graph calls it alone for a
        # capture that it gives up as it begins; capture_end() calls it, and then makes the graph one that is replayed.
        self._end_method = "capture_end_pre" if hasattr(graph, "capture_end_pre") else "capture_end"
        self._during = contextlib.ExitStack()
        self._finalizer: weakref.finalize[[], torch.cuda.CUDAGraph] | None = None

    def __repr__(self) -> str:
        if RECORDING.get(self.capture) is self:
            state = "being captured"
        elif self._graph() is None:
            state = "dead"
        else:
            state = "ready" if _live.get(id(self)) is self else "reset"
        calls = len({(one.code, one.instruction) for one in list(self._arguments)})
        return f"<CapturedGraph from {self.site}: {state}, {self.nbytes} bytes held for {calls} lines with collectives>"

    def __dir__(self) -> list[str]:
        """Return what is for users, for completion."""
        return sorted({*object.__dir__(self)} - {"add", "before_replay", "begin", "goes_on", "lease", "seal"})

    # --- what it holds -----------------------------------------------------------------------------------

    def leases(self) -> list[Lease]:
        """Return what the graph's collectives read and write, in the order of the calls."""
        return [
            Lease(
                one.op,
                one.bytes,
                one.storage is not None or one.pointer in self._slots,
                _torch.group_name(one.of_group()),
                one.site,
            )
            for one in self._arguments
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that the graph holds outside of its own pool."""
        # Of copies, because another thread may be capturing.
        held = {pointer: storage.nbytes() for pointer, storage in list(self._slots.items())}
        held.update({one.pointer: one.bytes for one in list(self._arguments) if one.storage is not None})
        return sum(held.values())

    def uses(self, group: object) -> bool:
        """Return whether a collective of ``group`` (None: of any group) was captured."""
        if group is None:
            return bool(self._groups)
        reference = self._groups.get(id(group))
        return reference is not None and reference() is group

    def add(self, op: str, group: object, tensor: torch.Tensor, frame: types.FrameType) -> None:
        """Note that ``tensor`` is an argument of a captured collective."""
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if not pointer:
            return
        inside = pointer in self._slots or (
            self._ledger.streams.pool(pointer) == self._pool
            and not any(start <= pointer < end for start, end in self._shared_ranges)
        )
        one = _Argument()
        one.op = op
        one.storage = None if inside else storage
        one.pointer = pointer
        one.bytes = storage.nbytes()
        one.tensor = weakref.ref(tensor)
        one.tensor_pointer = tensor.data_ptr()
        one.group = weakref.ref(group)
        one.code, one.instruction = called_from(frame)
        self._arguments.append(one)
        self._groups[id(group)] = weakref.ref(group)

    def lease(self, storage: torch.UntypedStorage) -> None:
        """Hold a slot of an arena, which was handed out in the capture, for as long as the graph may write to it."""
        pointer = storage.data_ptr()
        kept = _torch.KEPT.get(_torch.cdata_of(storage))  # None where references are not counted
        if pointer not in self._slots:
            self._slots[pointer] = storage
            if kept is not None:
                kept += (None,)

    def _leave_slots(self) -> None:
        for pointer, storage in tuple(self._slots.items()):
            kept = _torch.KEPT.get(_torch.cdata_of(storage))
            if pointer in self._slots:
                del self._slots[pointer]
                if kept:
                    del kept[-1]

    def check(self) -> None:
        """Raise StaleGraphError if an argument was freed or moved since the capture. :meth:`replay` begins with it."""
        for one in self._arguments:
            if one.storage is None:
                continue
            if one.storage.data_ptr() != one.pointer or one.storage.nbytes() < one.bytes:
                happened = "was resized, which freed it"
            elif (tensor := one.tensor()) is not None and tensor.data_ptr() != one.tensor_pointer:
                happened = "was given other memory (t.data = ...), which the graph does not know"
            else:
                continue
            raise StaleGraphError(
                f"replay of the graph captured at {self.site}: an argument of {one.op} at {one.site} {happened}. "
                "Nothing was replayed. Keep the arguments of captured collectives where they are, or capture again."
            )

    # --- its life ------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Replay the graph on the current stream. Raises StaleGraphError as :meth:`check` does."""
        graph = self._graph()
        if graph is None or _live.get(id(self)) is not self:
            raise StaleGraphError(f"the graph captured at {self.site} is no longer there, or was reset since")
        self.check()
        stream = self._ledger.current(self.index)
        for prepare in self.before_replay:
            prepare(stream)
        self._replayed[stream] = None  # before, because an exception can come as the replay returns
        type(graph).replay(graph)

    def reset(self) -> None:
        """Reset the graph, and give back what it holds once its last replay is over."""
        graph = self._graph()
        if graph is not None:
            type(graph).reset(graph)
        self._end()
        self._ledger.sweep()

    def goes_on(self) -> bool:
        """Return whether the capture has begun, and not ended or been given up by CUDA."""
        return self._ledger.streams.capture(self.stream) == self.capture

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Record what is captured into ``graph`` from now on, until its capture ends, or until it dies."""
        try:
            self._finalizer = weakref.finalize(graph, self._end)
            self._finalizer.atexit = False
            for context in DURING:
                self._during.enter_context(context())
            # On the object, so that it ends with the capture.
            graph.__dict__[self._end_method] = functools.partial(_end_capture, self)
            # Before the capture can end, because a replay that is not seen would leave no trace of its stream.
            graph.__dict__["replay"] = self.replay
            graph.__dict__["reset"] = self.reset
            RECORDING[self.capture] = self
        except BaseException:
            self._end()
            raise

    def seal(self) -> None:
        """Begin the life of the graph: its capture has ended well."""
        _live[id(self)] = self
        self._shared_ranges.clear()
        self._leave_capture()

    def _leave_capture(self) -> None:
        if RECORDING.get(self.capture) is self:  # without a driver all captures have one id
            RECORDING.pop(self.capture, None)
        self._during.close()
        graph = self._graph()
        if graph is not None:
            graph.__dict__.pop(self._end_method, None)

    def _end(self) -> None:
        """Leave nothing behind: the graph is reset or dead, or its capture has failed. Again, it does nothing.

        The garbage collector may call it, so no memory is let go here, and no event is asked.
        """
        self._give_back()
        self._leave_capture()
        _live.pop(id(self), None)
        graph = self._graph()
        if graph is not None:
            graph.__dict__.pop("replay", None)
            graph.__dict__.pop("reset", None)
        if self._finalizer is not None:
            self._finalizer.detach()

    def _give_back(self) -> None:
        held = {one.pointer: one.storage for one in self._arguments if one.storage is not None}
        storages = (*held.values(), *self._slots.values())
        if storages:
            self._ledger.uses.add_of_graph(self.index, tuple(self._replayed), storages, self._code, self._instruction)
        self._leave_slots()
        self._arguments.clear()
        self._groups.clear()
        self.before_replay.clear()


# --- seeing captures -----------------------------------------------------------------------------------------


def watch(who: object) -> None:
    """See the captures that begin from now on, until :func:`unwatch` is called for all who want it."""
    _SHARED.enter(who)


def unwatch(who: object) -> None:
    """Undo :func:`watch` for ``who``."""
    _SHARED.leave(who)


def _install(replaced: _torch.Replaced, _: object) -> None:
    replaced.attribute(torch.cuda.CUDAGraph, "capture_begin", _around_begin(torch.cuda.CUDAGraph.capture_begin))


_SHARED = _torch.Shared(_install)


def _end_dead() -> None:
    """End what is left of graphs that have died, if an exception came as they did."""
    for captured in list(_live.values()):
        if captured._graph() is None:
            captured._end()


BEFORE_WAITING.append(_end_dead)


def capturing() -> bool:
    """Return whether the current stream is part of a CUDA graph capture."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raise CaptureBoundaryError inside a CUDA graph capture, where ``what`` can't be done."""
    if capturing():
        raise CaptureBoundaryError(
            f"{what} inside a CUDA graph capture: it has to wait for the device. Do it before or after. "
            "Nothing was done, and the capture is unharmed."
        )


def _around_begin(original: Callable[..., object]) -> Callable[..., None]:
    """Return what stands in for ``torch.cuda.CUDAGraph.capture_begin``."""

    @functools.wraps(original)
    def capture_begin(graph: torch.cuda.CUDAGraph, pool: Any = None, *args: object, **kwargs: object) -> None:
        pool = getattr(pool, "id", pool)  # of a MemPool, which torch 2.14 takes as well
        # A pool by its name, because a graph does not tell its pool before the capture has ended.
        shared_ranges = [] if pool is None or _is_of_trees() else LEDGER.streams.allocated(tuple(pool))
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        if _SHARED.users:
            for prepare in BEFORE:
                prepare(torch.cuda.current_device())
        original(graph, pool, *args, **kwargs)
        index = torch.cuda.current_device()
        stream = LEDGER.current(index)
        capture = LEDGER.streams.capture(stream)
        # Where other code's wrapper is between two of ours, the inner one has begun already.
        if capture and _SHARED.users and capture not in RECORDING:
            CapturedGraph(LEDGER, graph, pool, shared_ranges, index, stream, capture, _caller()).begin(graph)

    return capture_begin


def _end_capture(captured: CapturedGraph) -> None:
    """Stand in for the method that ends the capture of a graph, of one that is recorded."""
    graph = captured._graph()
    unjoined: list[str] = []
    try:
        # Else CUDA has given the capture up, or torch is about to refuse, because this is not its stream.
        if captured.goes_on() and LEDGER.current(torch.cuda.current_device()) == captured.stream:
            LEDGER.sweep()
            unjoined = LEDGER.join_unwaited(captured.capture, captured.stream)
            if unjoined and _tolerant:
                where = captured.site, "; ".join(unjoined)
                log.warning("the capture at %s ended with works that were not waited for, and waits for: %s", *where)
                unjoined = []
        getattr(type(graph), captured._end_method)(graph)
    except BaseException as error:
        if captured.goes_on():  # and can be ended later, with all that it has
            raise
        if _has_ended(graph):  # a signal handler has raised: the graph is one that can be replayed
            captured.seal()
            raise
        try:
            captured._end()
        finally:
            _torch.end_allocation_to_pool(captured.index, captured._pool)
        if isinstance(error, RuntimeError) and _UNJOINED in str(error):
            raise CaptureBoundaryError(
                f"CUDA gave up the capture at {captured.site}, because a stream that it had taken in was not joined. "
                "No work of safecomm's is left, so wait for something else in the capture: a functional "
                "collective, in compiled code one after which the graph is broken, or what C++ has launched."
            ) from error
        raise
    else:
        if not unjoined:
            captured.seal()
    finally:
        if not captured.goes_on():
            LEDGER.end_capture(captured.capture)
    if not unjoined:
        return
    graph.reset()  # type: ignore[union-attr]
    raise CaptureBoundaryError(
        f"the capture at {captured.site} ended with works that were not waited for: {'; '.join(unjoined)}. "
        "Wait for each inside the capture. The graph was reset; nothing else was harmed."
    )


def _is_of_trees() -> bool:
    """Return whether our caller's capture is made by ``torch.compile(mode="reduce-overhead")``.

    Its graphs share a pool, in which torch keeps what each needs of the others, and refuses memory that others keep.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._inductor.cudagraph_trees":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _has_ended(graph: torch.cuda.CUDAGraph | None) -> bool:
    """Return whether the capture into ``graph`` has ended well. Asks no device."""
    try:
        return graph is not None and graph.pool() is not None  # which a graph tells from then on
    except Exception:
        return False


def note(op: str, group: object, tensors: list[torch.Tensor], frame: types.FrameType) -> None:
    """Note the ``tensors``, each with memory of its own, of a collective that was just called, if it was captured."""
    for tensor in tensors:
        index = _torch.index_of(tensor)
        if index >= 0 and tensor.layout is torch.strided:
            captured = _here(index)
            if captured is not None:
                captured.add(op, group, tensor, frame)


def check_group(op: str, group: object, tensors: list[torch.Tensor]) -> None:
    """Raise CaptureBoundaryError if a collective that is about to be captured would have to make a communicator."""
    if _tolerant:  # torch says so, or makes one all the same
        return
    indices = {_torch.index_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
    captured = any(index >= 0 and _here(index) is not None for index in indices)
    if captured and not _torch.is_initialized(group, "cuda"):
        raise CaptureBoundaryError(
            f"{op} inside a CUDA graph capture is the first call of group {_torch.group_name(group) or group!r}, which "
            "has no communicator yet, and can't make one now. Call something on it before the capture, or name it in "
            "graph(..., groups=[...]). Nothing was done, and the capture is unharmed."
        )


def set_tolerant(on: bool) -> None:
    """Say whether the program is one that can't be edited to leave nothing behind at the end of a group."""
    global _tolerant
    _tolerant = on


def tolerant() -> bool:
    """Return whether :func:`set_tolerant` has said so."""
    return _tolerant


def refuse_live(group: object) -> None:
    """Raise LiveGraphError if graphs are alive that run collectives of ``group``; None: of any group.

    In a program that can't be edited, reset them.
    """
    alive = tuple(one for one in list(_live.values()) if one._graph() is not None and one.uses(group))
    if _tolerant:
        for captured in alive:
            log.warning("the graph captured at %s was reset, because its group is being destroyed", captured.site)
            captured.reset()
    elif alive:
        raise LiveGraphError(
            f"{len(alive)} CUDA graphs are alive that run collectives of the group, captured at "
            f"{'; '.join(sorted({captured.site for captured in alive}))}. NCCL would wait for them without end. Reset "
            "them first, which the graphs of this error let you do. Nothing was destroyed.",
            alive,
        )


def alive() -> list[torch.cuda.CUDAGraph]:
    """Return the CUDA graphs that are there, of any code, but for those that ``gc.freeze()`` has hidden."""
    # The type and not isinstance(), which asks proxies for what they stand for.
    return [one for one in gc.get_objects() if issubclass(type(one), torch.cuda.CUDAGraph)]


def places_of(graphs: list[torch.cuda.CUDAGraph]) -> list[str]:
    """Return where ``graphs`` were captured, as far as that was seen."""
    seen = {id(graph): captured.site for captured in list(_live.values()) if (graph := captured._graph()) is not None}
    unseen = "places that were not seen, without patch()"
    return sorted({seen.get(id(graph)) or _places.get(graph, unseen) for graph in graphs})


def _note_place(graph: torch.cuda.CUDAGraph) -> None:
    """Note where a capture begins: torch calls this for each."""
    _places[graph] = place(_caller())


if register := getattr(torch.cuda.graphs, "register_graph_capture_start_hook", None):  # torch 2.14
    register(_note_place)


def _here(index: int) -> CapturedGraph | None:
    """Return the capture that the current stream of device ``index`` is part of, if it is one that is recorded."""
    return RECORDING.get(LEDGER.streams.capture(LEDGER.current(index)))


def _caller() -> types.FrameType:
    """Return the innermost frame that is neither ours nor of torch's graphs."""
    return outside((f"{__name__}.", "torch.cuda.graphs.", "safecomm.interception.graphs.", "contextlib."))
