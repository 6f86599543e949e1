"""Arena: communication buffers out of one contiguous block."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from safecomm import _torch, arguments
from safecomm.arena.arguments import Full, bytes_of, device_of, options_of, shape_of
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import SizeClass, Slot, idle, rounded
from safecomm.arena.stats import ArenaStats, bucket_stats, lines_of
from safecomm.arena.stats import BucketStats as BucketStats
from safecomm.core import captures
from safecomm.core.call_site import outside, place
from safecomm.core.ledger import LEDGER
from safecomm.core.refcounts import COUNTED, KEEPING, UNUSED, getrefcount
from safecomm.core.streams import HOST, Streams
from safecomm.errors import ArenaError, ArenaFullError

if TYPE_CHECKING:
    from safecomm.arena.registration import Registration

log: logging.Logger = logging.getLogger("safecomm")

LIMIT = 1 << 13
"""How many requests that say different things are known to an arena by their size class."""

PATIENCE = 5.0
"""Seconds for which :meth:`Arena.close` waits for slots in use, while there are groups."""

# Bound once: every request reads each of these.
_compiling = torch.compiler.is_dynamo_compiling
_modes = _torch.dispatch_modes
_transform = _torch.transform
_use_count = _torch.storage_use_count
_default_dtype = torch.get_default_dtype


def call_site() -> str:
    """Return the innermost line outside of this package, as ``file:line in function``."""
    return place(outside(("safecomm.",)))


def taken() -> int:
    """Return the bytes in slots of all open arenas, in use or cached. It reads plain counters, so any thread may."""
    return sum(free.live_bytes for arena in tuple(OPEN.values()) for free in arena._layout.buckets.values())


OPEN: dict[int, Arena] = {}
"""The arenas that are open, by the index of their device. They keep the blocks alive, which slots do not."""


class Arena:
    """Communication buffers out of one contiguous block, which is allocated once and never grows.

    Guarantees:

    - :meth:`empty` allocates nothing after the first time that a step asks for a buffer, and costs no more host time
      than ``torch.empty``.
    - A buffer is not handed out again for as long as anything refers to its storage: a view, a detached alias, a tensor
      that is saved for backward, a running collective. Nothing else keeps it.
    - Reuse is ordered. A buffer belongs to the stream that was current when it was handed out, as in the caching
      allocator. Before its memory goes to another stream, this stream waits for all work on the former one.
    - The same program gets the same places on every rank and in every run.
    - A buffer that is handed out in a CUDA graph capture is the graph's until the graph is reset or dies. Only captures
      that safecomm sees (inside of :class:`safecomm.graph` or :class:`safecomm.avoid_record_streams`) get buffers of
      the arena. Others get ordinary memory of the graph's own pool.

    ``record_stream`` does nothing for the memory of an arena, except inside of ``avoid_record_streams()``. Storages
    can't be resized, also not to 0.

    The arena is open until :meth:`close`, and keeps the block until then. Any thread may use it.

    Parameters
    ----------
    nbytes
        Size of the block: bytes, or text such as ``"256MiB"``.
    device
        Default: the current CUDA device, or the CPU where there is none. One arena a device may be open.
    full
        What happens to a request that finds no room. ``"fallback"``: it gets ordinary memory, which is counted in
        :meth:`stats` and logged once, with the size that would have been enough. ``"raise"``: ArenaFullError.
    buckets
        Names and bytes of parts of the block that :meth:`empty` uses only by name. They lie at the start of the block.
        What they leave is the bucket ``""``.
    check
        A process group, on all ranks of which the places have to be the same: see :meth:`check`. For debugging: each
        request takes a few microseconds longer.
    register
        An NCCL group with which the block is registered. All ranks of the group make and :meth:`close` the arena
        together then, and ``full`` must be ``"raise"``.
    symmetric
        Whether the block is registered as a symmetric window (NCCL 2.30.7 or later).

    Raises
    ------
    ValueError, TypeError
        For a size, a device or a policy that is not one.
    ArenaError
        If an arena is open on the device, inside a CUDA graph capture, or if it can't be registered.

    Examples
    --------
    >>> arena = Arena("1MiB", device="cpu")
    >>> buffer = arena.empty(128, 256, dtype=torch.bfloat16)
    >>> arena.stats().in_use
    65536
    >>> del buffer
    >>> arena.close()
    """

    symmetric = False
    """Whether the block is registered as a symmetric window."""
    index: int
    _backing: Registration | None = None
    _pool: torch.cuda.MemPool | None = None

    def __init__(
        self,
        nbytes: int | str,
        device: torch.device | str | int | None = None,
        *,
        full: Full = "fallback",
        buckets: Mapping[str, int | str] | None = None,
        check: ProcessGroup | None = None,
        register: ProcessGroup | None = None,
        symmetric: bool = False,
    ) -> None:
        self._device, self.index = device_of(device)
        capacity = rounded(bytes_of(nbytes, "Arena: nbytes"))
        sizes = options_of(full, buckets, check, register, symmetric)
        self.symmetric = symmetric and register is not None
        if not all(isinstance(name, str) and name for name in sizes) or sum(map(rounded, sizes.values())) > capacity:
            raise ValueError(f"Arena: the buckets {sizes} need names, and must fit into {capacity} bytes")
        if not _torch.MAKES_STORAGES:
            raise ArenaError(f"Arena: torch {torch.__version__} can't make slots, which are storages over given memory")
        if self.index in OPEN:
            raise ArenaError(f"Arena: {OPEN[self.index]!r} is open on this device; close() it first, or use it")
        streams = LEDGER.streams
        if self.index != HOST and (here := streams.current(self.index)) and streams.capture(here):
            raise ArenaError("Arena: can't be made inside a CUDA graph capture; make it before")
        if register is not None:
            from safecomm.arena.registration import Registration

            self._backing = Registration(capacity, self._device, register, symmetric=symmetric)
            block = self._backing.block
        else:
            self._pool, block = _allocate(capacity, self._device)
        self._start(block, self.index, streams, full, sizes, check)
        OPEN[self.index] = self

    def _start(
        self, block: torch.Tensor, index: int, streams: Streams, full: Full, buckets: dict[str, int],
        check: ProcessGroup | None,
    ) -> None:  # fmt: skip
        self._block = block
        self._device = block.device
        self.index = index
        self._base = block.data_ptr()
        self._streams = streams
        self._current = streams.current
        self._capture = streams.capture
        self._is_capturing = streams.is_capturing
        self._full = full
        self._group = check
        self._ended = ""
        self._fallbacks = self._fallback_bytes = self._enough = 0
        self._warned = False
        # The ordinary memory that requests got for want of room, and the bytes that each lacked.
        self._outside: list[tuple[_torch.WeakStorage, int]] = []
        self._log: list[tuple[str, int, int]] = []  # call site, bytes and place of each request since the last check
        self._layout = Layout(block.numel(), buckets, idle)
        # By the arguments and the stream of a request. Requests that are logged are not here, nor those of captures.
        self._size_classes: dict[object, SizeClass] = {}
        if index != HOST:
            self._alloc_stream = streams.current(index)  # of the block itself
            streams.claim(self._base, self._base + block.numel(), self._alloc_stream_of)

    # --- handing out ------------------------------------------------------------------------------------

    def empty(self, *size: Any, dtype: torch.dtype | None = None, bucket: str = "") -> torch.Tensor:
        """Return a contiguous tensor of uninitialised memory of the arena, as ``torch.empty`` does of any memory.

        The tensor belongs to the current stream: work on this stream needs no further order, and the memory is reused
        in the order of this stream. The tensor keeps its memory, and the arena keeps the block.

        It is ordinary memory under ``torch.compile``, in a ``TorchDispatchMode``, and in a transform of ``torch.func``.

        Parameters
        ----------
        size
            Integers, or one tuple or list of integers.
        dtype
            Default: torch's default type.
        bucket
            The name of the bucket that the tensor comes from.

        Raises
        ------
        ValueError, TypeError
            For a shape without elements, and for what is no shape or no type.
        ArenaFullError
            If there is no room, with ``full="raise"``.
        ArenaError
            After :meth:`close`, and in a process that was forked.

        Examples
        --------
        >>> with use_arena("1MiB", device="cpu") as arena:
        ...     arena.empty(2, 3).shape
        torch.Size([2, 3])
        """
        if dtype is None:
            dtype = _default_dtype()
        if _compiling() or _modes() or _transform() is not None:
            return torch.empty(*size, dtype=dtype, device=self._device)
        index = self.index
        stream = self._current(index) if index >= 0 else index
        try:
            size_class = self._size_classes[size, dtype, stream, bucket]
        except (KeyError, TypeError):  # the first request of its kind; or a list, which can't be a key
            size_class = None
        if size_class is None or (stream > 0 and self._is_capturing(index, stream)):
            return self._empty(size, dtype, stream, bucket)
        # Take the next slot that a search has found, or the last that was handed out, as "In hand" in layout.py allows.
        # ``idle(slot, False)`` is written out twice: one call of a Python function is a twentieth of the request.
        slots, ready, first = size_class.slots, size_class.ready, size_class.first
        slot: Slot | None
        try:
            if ready and first is not None and (_use_count(first.cdata) != 2 or getrefcount(first.storage) != UNUSED):
                slot = ready.pop()
            else:
                slot = slots.pop()
                if (
                    _use_count(slot.cdata) != 2
                    or getrefcount(slot.storage) != UNUSED
                    or (slot is not first and (first is None or idle(first, False)))
                ):
                    slots.append(slot)
                    slot = None
        except IndexError:  # there is none, or another thread was faster
            slot = None
        if slot is None:
            slot = self._layout.reuse(size_class)
            if slot is None:
                return self._empty(size, dtype, stream, bucket)
        tensor: torch.Tensor = slot.template.data
        slots.append(slot)
        return tensor

    def _empty(self, size: Any, dtype: torch.dtype, stream: int, bucket: str, last: bool = False) -> torch.Tensor:
        self._refuse_ended("Arena.empty()")
        shape = shape_of(size, dtype)
        arguments.check("Arena.empty", arguments.one_of(self._layout.buckets), bucket=bucket)
        with self._layout.lock:
            self._refuse_ended("Arena.empty()")  # another thread may have closed the arena meanwhile
            tensor = self._take(size, shape, dtype, stream, bucket)
            if tensor is not None or last or self._layout.changing or not LEDGER.nonempty:
                return self._fall_back(shape, dtype, stream, bucket) if tensor is None else tensor
        LEDGER.sweep(thorough=True)  # what is over may be held still, because it was looked at a moment ago
        return self._empty(size, dtype, stream, bucket, True)

    def if_room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return what :meth:`empty` does if that is a slot, and None if not, for callers that can do without.

        Unlike :meth:`empty` it counts no fallback, logs nothing and does not raise. None also of a registered arena,
        whose memory the ranks must not mix with ordinary memory: one may have room where another has none.
        """
        if self._ended or self._backing is not None:
            return None
        layout = self._layout
        stream = self._current(self.index) if self.index >= 0 else self.index
        size_class = self._size_classes.get((shape, dtype, stream, ""))
        if size_class is not None and not self._capturing(stream):
            slot = layout.reuse(size_class)
            if slot is not None:
                tensor: torch.Tensor = slot.template.data
                size_class.slots.append(slot)
                return tensor
        with layout.lock:
            return None if self._ended else self._take(shape, shape, dtype, stream, "", needed=False)

    def _take(
        self, size: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype, stream: int, bucket: str, *,
        needed: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return a tensor of a slot, ordered after all earlier uses of its memory; None if there is no slot for it.

        That is so if there is no room, or in a capture that safecomm does not see, whose graph could not own the slot.

        Parameters
        ----------
        size
            The size as the request gave it, by which the next one finds its size class at once.
        shape, dtype
            What the tensor becomes.
        stream
            The current stream.
        bucket
            The name of the bucket.
        needed
            Whether idle slots of other kinds are freed even where this makes no room.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        capture = self._capture(stream) if stream > 0 else 0
        graph = captures.RECORDING.get(capture) if capture else None
        if capture and graph is None:
            return None

        def usable(after: frozenset[int]) -> bool:
            # A graph can't wait for what runs, nor can what runs wait for a stream that is being captured.
            return not after if capture else all(one == stream or not self._capturing(one) for one in after)

        found = self._layout.take((shape, dtype), nbytes, stream, capture, bucket, usable, needed=needed)
        if found is None:
            return None
        slot, after = found
        try:
            furnished = COUNTED and slot.storage is not None
            template = slot.template if furnished else self._furnish(slot)
            tensor: torch.Tensor = template.data
            self._order(stream, after)
            if graph is not None:
                graph.lease(tensor.untyped_storage())
        except BaseException:
            if not COUNTED:  # else the layout finds the slot
                self._layout.free(slot)
            raise
        self._layout.push(slot)
        if self._group is not None:
            slot.site = call_site()
            self._log.append((slot.site, nbytes, slot.start))
        elif not capture and COUNTED:
            if len(self._size_classes) > LIMIT:
                self._size_classes.clear()
            with contextlib.suppress(TypeError):  # a list can't be a key
                self._size_classes[size, dtype, stream, bucket] = slot.size_class
        return tensor

    def _order(self, stream: int, after: frozenset[int]) -> None:
        """Make ``stream`` wait for all that was put on the streams ``after``."""
        for other in after:
            event = self._streams.record_event(self.index, other)
            self._streams.wait_event(self.index, stream, event)
            self._streams.recycle_event(self.index, event)

    def _furnish(self, slot: Slot, behind: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Give ``slot`` a storage, and return a tensor of this storage to copy.

        The slot keeps both. Where references are not counted it keeps a weak reference, which tells when the storage
        has died.

        Parameters
        ----------
        slot
            A slot that is in the caller's hand.
        behind
            The storage that the slot had. While that lives, the slot is in use.
        """
        shape, dtype = slot.size_class.identity
        pointer = self._base + slot.start
        storage: Any = _torch.storage_over(pointer, self._device, slot.asked)
        # What is made inside of a transform is dead outside of it. What is made in inference mode can never be saved
        # for a backward pass.
        with _torch.undisturbed(), _torch.inference_mode(False):
            template = torch.empty(0, dtype=dtype, device=self._device)
            template.set_(storage, 0, shape)  # type: ignore[call-overload]
        if COUNTED or self.index != HOST:
            _torch.before_sharing(storage, functools.partial(_share, weakref.ref(self), slot.start))
        cdata = _torch.cdata_of(storage)
        if not COUNTED:
            slot.pointer = pointer
            slot.storage = _torch.StorageWeakRef(storage)
            return template
        weakref.finalize(storage, _torch.KEPT.pop, cdata, None).atexit = False
        _torch.KEPT[cdata] = [None] * KEEPING
        if behind is not None:
            behind._behind = storage  # type: ignore[attr-defined]
            _torch.KEPT.pop(_torch.cdata_of(behind), None)
        slot.pointer = pointer
        slot.template = template
        slot.cdata = cdata
        slot.storage = storage
        return template

    def _share(self, start: int, storage: torch.UntypedStorage) -> None:
        """Replace ``storage`` of the slot at ``start``, which is about to be moved out of the block.

        Raises ArenaError on a GPU, where sharing would leave it in the block.
        """
        if self.index != HOST:
            raise ArenaError(
                f"{self!r}: its memory can't be shared with other processes, which are not asked whether it may be "
                "reused. Send a copy: tensor.clone()"
            )
        with self._layout.lock:
            slot = self._layout.live.get(start)
            if slot is not None and slot.storage is storage:
                self._furnish(slot, storage)

    def before_capture(self) -> None:
        """Block the host until nothing runs that uses free memory, so that a graph can be given it without any order.

        Called before each capture that safecomm sees; torch waits for the device there too.
        """
        self._layout.reclaim(lambda: self._streams.synchronize(self.index))

    def _capturing(self, stream: int) -> bool:
        return stream > 0 and bool(self._capture(stream))

    def _fall_back(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int, bucket: str) -> torch.Tensor:
        """Return ordinary memory for a request that got no slot, or raise ArenaFullError, as ``full`` says."""
        nbytes = math.prod(shape) * dtype.itemsize
        lacking = 0
        capture = self._capture(stream) if stream > 0 else 0
        unseen, held_off = capture and capture not in captures.RECORDING, self._layout.changing
        if unseen:
            why = "a CUDA graph capture that safecomm does not see"
        elif held_off:
            why = "asked for by a finalizer, in the middle of another request"
        else:
            free = self._layout.buckets[bucket]
            self._outside = [one for one in self._outside if not one[0].expired()]
            # What else found no room and still lives would have the end of the block.
            lacking = rounded(nbytes) - (0 if self._outside else free.tail)
            enough = self._layout.nbytes + sum(one[1] for one in self._outside) + lacking
            self._enough = max(self._enough, enough)
            where = f"{free.end - free.start} bytes"
            where = f"bucket {bucket!r} of {where}" if bucket else where
            why = f"no room in {where}, of which {free.live_bytes} are in use; {enough} would be enough"
        if self._full == "raise" and not unseen:
            raise ArenaFullError(f"Arena.empty({list(shape)}, {dtype}) at {call_site()}: {nbytes} bytes: {why}")
        self._fallbacks += 1
        self._fallback_bytes += nbytes
        if not self._warned and (unseen or not held_off):  # a finalizer's says nothing of the room that there is
            self._warned = True
            log.warning(
                "%r: %d bytes at %s are ordinary memory: %s (reported once, counted in stats())",
                self, nbytes, call_site(), why,
            )  # fmt: skip
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if lacking > 0:
            self._outside.append((_torch.StorageWeakRef(tensor.untyped_storage()), lacking))
        return tensor

    def _alloc_stream_of(self, pointer: int) -> int | None:
        place = pointer - self._base
        slot = self._layout.live.get(place) or self._layout.at(place)  # most tensors begin where their slot does
        return self._alloc_stream if slot is None else slot.size_class.alloc_stream

    # --- what is where ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self._layout.nbytes

    @property
    def device(self) -> torch.device:
        """The device of the block."""
        return self._device

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of ``tensor`` is the arena's."""
        arguments.check("Arena", arguments.TENSOR, tensor=tensor)
        return self._base <= tensor.untyped_storage().data_ptr() < self._base + self._layout.nbytes

    def offset(self, tensor: torch.Tensor) -> int:
        """Return the bytes between the start of the block and the first element of ``tensor``.

        Raises ValueError if its memory is not the arena's.
        """
        if not self.owns(tensor):
            raise ValueError("Arena.offset(): the tensor's memory is not the arena's")
        return tensor.data_ptr() - self._base

    def stats(self) -> ArenaStats:
        """Return what is in use, how much was, and what did not fit. Frees the idle slots, so not for the hot path."""
        self._refuse_ended("Arena.stats()")
        layout = self._layout
        with layout.lock:
            buckets = bucket_stats(layout)
            return ArenaStats(
                capacity=layout.nbytes,
                in_use=sum(bucket.in_use for bucket in buckets),
                high_water=sum(bucket.high_water for bucket in buckets),
                waste=sum(bucket.waste for bucket in buckets),
                captured=sum(slot.end - slot.start for slot in layout.in_use() if slot.size_class.capture),
                fallbacks=self._fallbacks,
                fallback_bytes=self._fallback_bytes,
                enough=max(self._enough, layout.nbytes),
                buckets=buckets,
            )

    def map(self) -> str:
        """Return a table of the slots in use: place, size, shape and type, stream, and what holds each.

        Holders are calls that have not completed, CUDA graphs, and the tensors of the program. The call site of the
        request is known with ``check=``.
        """
        stats = self.stats()
        holders: dict[int, list[str]] = {}
        for hold in [*LEDGER.holds(), *LEDGER.quarantine]:
            for storage in hold.storages:
                if isinstance(storage, torch.UntypedStorage):
                    holders.setdefault(storage.data_ptr(), []).append(f"{hold.op} from {hold.site}")
        head = (
            f"{self!r}: {stats.in_use} bytes in use of {stats.capacity}, high water {stats.high_water}, "
            f"waste {stats.waste}, fallbacks {stats.fallbacks} ({stats.fallback_bytes} bytes)"
        )
        return "\n".join([head, *lines_of(self._layout, stats.buckets, holders)])

    def __str__(self) -> str:
        return repr(self) if self._ended else self.map()

    def __dir__(self) -> list[str]:
        """Return the public names, for completion."""
        return sorted({*object.__dir__(self)} - {"before_capture", "if_room", "index", "symmetric"})

    def __repr__(self) -> str:
        return f"<Arena of {self._layout.nbytes} bytes on {self._device}>"

    # --- the same on all ranks ------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the places of all requests since the last check with the other ranks of the group ``check=``.

        All ranks of the group must call it at the same point of the program. It blocks the host.

        Raises
        ------
        ArenaError
            If places differ. The message has the first request that differs, as each rank saw it. Also if the arena
            was made without ``check=``.
        """
        self._refuse_ended("Arena.check()")
        if self._group is None:
            raise ArenaError("Arena.check(): nothing was written down; make the arena with check=group")
        dist = torch.distributed
        mine, self._log = self._log, []
        digest = hashlib.blake2b(repr([(nbytes, place) for _, nbytes, place in mine]).encode()).hexdigest()
        digests: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(digests, digest, group=self._group)
        if len(set(digests)) == 1:
            return
        logs: list[Any] = [None] * len(digests)
        dist.all_gather_object(logs, mine, group=self._group)
        for number in range(max(map(len, logs))):
            seen = [log[number] if number < len(log) else None for log in logs]
            if len({request and request[1:] for request in seen}) > 1:
                break
        shown = "; ".join(
            f"rank {rank}: "
            + ("no more requests" if one is None else f"{one[1]} bytes at place {one[2]}, from {one[0]}")
            for rank, one in enumerate(seen)
        )
        raise ArenaError(f"Arena.check(): request {number} since the last check differs between ranks: {shown}")

    # --- the end ----------------------------------------------------------------------------------------------

    def _refuse_ended(self, operation: str) -> None:
        if self._ended:
            raise ArenaError(f"{operation}: {self._ended}")

    def close(self) -> None:
        """Free the block, in the order of all streams that its slots were used on.

        Does nothing if the arena is closed. While there are groups, it waits up to 5 seconds for slots in use: the
        threads of gloo drop their tensors a moment after a work counts as complete (torch 2.13).

        Raises
        ------
        ArenaError
            If slots are in use. The message names what holds them. Nothing was done.
        """
        deadline = time.monotonic() + (PATIENCE if torch.distributed.is_initialized() else 0)
        pause = 1e-5
        while not self._closed():
            if time.monotonic() >= deadline:
                layout = self._layout
                with layout.lock:
                    count = len(layout.in_use()) or len(layout.live)
                    raise ArenaError(f"Arena.close(): {count} slots are in use. Nothing was done.\n{self.map()}")
            time.sleep(pause)
            pause = min(2 * pause, 1e-2)

    def _closed(self) -> bool:
        """Close the arena if no slot is in use; return whether it is closed."""
        if self._ended:
            if OPEN.get(self.index) is self:  # an exception has ended _free_block()
                self._free_block()
            return True
        LEDGER.sweep(thorough=True)
        layout = self._layout
        with layout.lock:
            if layout.changing:
                raise ArenaError("Arena.close(): called by a finalizer, in the middle of a request. Nothing was done.")
            layout.changing = True
            known, self._size_classes = self._size_classes, {}  # other threads now need the lock
            try:
                if not layout.in_use():
                    layout.coalesce_free()
                if layout.live:  # also a slot in the hand of another thread
                    return False
                if self.index != HOST:
                    for free in layout.buckets.values():
                        self._order(self._alloc_stream, free.streams - {self._alloc_stream})
                self._ended = f"{self!r} was closed"
            finally:
                layout.changing = False
                if not self._ended:
                    self._size_classes = known
        self._free_block()
        return True

    def _free_block(self) -> None:
        """Free the block. May begin again, where an exception has ended it."""
        if self.index != HOST:
            self._streams.unclaim(self._base)
        self._layout.forget()
        backing, self._backing = self._backing, None
        if backing is not None:  # once and never again, because the other ranks take part
            backing.close()
        self._block = torch.empty(0)
        self._pool = None
        if OPEN.get(self.index) is self:
            del OPEN[self.index]


def _share(arena: weakref.ref[Arena], start: int, storage: torch.UntypedStorage) -> None:
    there = arena()
    if there is not None:
        there._share(start, storage)


def _allocate(nbytes: int, device: torch.device) -> tuple[torch.cuda.MemPool | None, torch.Tensor]:
    """Return a block, and the pool of its own that it must be kept with: no other memory lies in its segment then."""
    if device.type == "cpu" or not hasattr(torch.cuda, "MemPool"):
        return None, torch.empty(nbytes, dtype=torch.uint8, device=device)
    pool = torch.cuda.MemPool()
    with torch.cuda.device(device), torch.cuda.use_mem_pool(pool):
        return pool, torch.empty(nbytes, dtype=torch.uint8, device=device)


def _before_capture(index: int) -> None:
    if index in OPEN:
        OPEN[index].before_capture()


captures.BEFORE.append(_before_capture)


def _keep_until_exit() -> None:
    # A pool that is torn down with the modules aborts the process, if a capture has failed before (torch 2.11).
    for arena in tuple(OPEN.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(arena))


atexit.register(_keep_until_exit)


def _end_in_child() -> None:
    for arena in tuple(OPEN.values()):
        arena._size_classes = {}
        arena._ended = f"{arena!r} was made before the fork of this process, and is the parent's; make another one here"
        _parents.append(arena)
    OPEN.clear()


_parents: list[Arena] = []  # arenas that the child of a fork has from its parent, and must not free
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)
