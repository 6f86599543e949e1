"""Where are we: the current stream, the stream that memory was allocated on, captures, and events.

The ledger asks these questions and no others. ``CudaStreams`` answers them for real GPUs; the tests answer
them with a simulated device, so that the ledger's own code is what is checked. Streams are raw handles
(``cudaStream_t`` as an int), never objects: ``torch.cuda.Stream()`` hands out 32 pooled streams round robin,
so two objects can be one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from safecomm import _torch
from safecomm._torch import new_question, pointer_attribute, questions

HOST = -1
"""The device index of memory that no stream orders: the CPU's."""


Segment = tuple[int | None, int, int, Any]
"""What is known of a piece of memory: its stream, the first address, the one past the last, the allocator's pool."""

_NOBODYS: Segment = (None, 0, 0, None)
"""The segment of memory of which nobody knows the stream."""

GRANULE = 21
"""Binary logarithm of what the driver maps at least: 2 MiB, which is also what the allocator's small segments have."""

PINS = 16
"""Small segments at most that a tensor of ours keeps mapped."""

_take, _give = questions.pop, questions.append

_CLAIMED = -2
"""In place of a segment's stream: somebody hands out pieces of it, and knows their streams."""


class Streams(Protocol):
    """The questions that the ledger asks of a device."""

    def current(self, index: int, /) -> int:
        """Return the current stream of device ``index``."""

    def home(self, pointer: int, other: int | None = None, /) -> int | None:
        """Return the stream that the memory at ``pointer`` was allocated on, and that at ``other`` if it is given.

        None if nobody knows, or if these are two. An allocator gives freed memory out again in the order of this
        stream and of no other.
        """

    def all_at_home(self, stream: int, pointers: list[int], /) -> bool:
        """Return whether the memory at all of ``pointers``, in ascending order, was surely allocated on ``stream``."""

    def claim(self, start: int, end: int, home: Callable[[int], int | None], /) -> None:
        """From now on ask ``home`` where the memory from address ``start`` to ``end`` was allocated."""

    def unclaim(self, start: int, /) -> None:
        """Undo the claim that begins at ``start``."""

    def pool(self, pointer: int, /) -> Any:
        """Return the allocator's pool, such as that of a graph, that the memory at ``pointer`` is part of."""

    def allocated(self, pool: Any, /) -> list[tuple[int, int]]:
        """Return the pieces of memory of ``pool`` that are in use, as pairs of first address and the one past the last.

        Takes time; not for the hot path.
        """

    def capture(self, stream: int, /) -> int:
        """Return the id of the graph capture that ``stream`` is part of; 0 if it is not capturing."""

    def is_capturing(self, index: int, stream: int, /) -> bool:
        """Return whether ``stream``, the current one of device ``index``, is capturing."""

    def mark(self, index: int, stream: int, /) -> Any:
        """Return an event recorded on ``stream``."""

    def reached(self, event: Any, /) -> bool:
        """Return whether the device has passed ``event``. Illegal for events of a capture."""

    def recycle(self, index: int, event: Any, /) -> None:
        """Take back an event that nobody uses any more."""

    def order(self, index: int, stream: int, event: Any, /) -> None:
        """Let all later work on ``stream`` start after ``event``."""

    def using(self, index: int, stream: int, /) -> AbstractContextManager[Any]:
        """Return a context manager under which ``stream`` is the current one."""

    def lenient(self) -> AbstractContextManager[Any]:
        """Return a context manager under which events may be queried while another thread captures."""

    def synchronize(self, index: int, /) -> None:
        """Block the host until device ``index`` is idle."""

    def capacity(self, index: int, /) -> int:
        """Return the bytes of memory that device ``index`` has."""


def capture_of(streams: Streams, stream: int) -> int:
    """Return the graph capture that ``stream`` is part of; 0 if it is not capturing."""
    return streams.capture(stream) if stream else 0  # 0 is the legacy default stream, which can't capture


def home_of(streams: Streams, storage: Any, nowhere: int) -> int | None:
    """Return the stream that ``storage`` was allocated on; ``nowhere`` if it has no memory, None if nobody knows."""
    # A tensor subclass without memory of its own is held as an object, and has no address.
    pointer = storage.data_ptr() if type(storage) is torch.UntypedStorage else 0
    return streams.home(pointer) if pointer else nowhere


def stream_object(index: int, stream: int) -> torch.cuda.Stream:
    """Return torch's object for the raw ``stream`` of device ``index``."""
    if stream:
        return torch.cuda.ExternalStream(stream, device=index)  # type: ignore[no-untyped-call]
    return torch.cuda.default_stream(index)


def _described(segment: dict[str, Any] | None) -> Segment:
    """Return what is known of a segment of the allocator's snapshot."""
    if segment is None:
        return _NOBODYS
    start = segment["address"]
    # An expandable segment has an id for each part that is mapped, and we don't know where this part ends.
    end = 0 if segment.get("is_expandable") else start + segment["total_size"]
    return (segment["stream"], start, end, tuple(segment.get("segment_pool_id", (0, 0))))


class _Lenient:
    """Relaxes this thread's capture mode for a few queries, and puts it back."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = _torch.swap_capture_mode()

    def __exit__(self, *_: object) -> None:
        _torch.swap_capture_mode(self._mode)


class CudaStreams:
    """Streams of NVIDIA GPUs, as torch and its caching allocator use them."""

    def __init__(self) -> None:
        # By the driver's buffer id and not by address: a segment keeps its stream for life, but once it is
        # unmapped its address can come back as a segment of another stream (it did, in the first program tried).
        self._segments: dict[int, Segment] = {}
        self._known = self._segments.get
        self._claims: dict[int, tuple[int, Callable[[int], int | None]]] = {}
        # The streams of segments that stay mapped because a storage of ours lies in them, by the number of the granule.
        # Of memory there the driver need not be asked, which takes a twentieth of a small call.
        self._pinned: dict[int, int] = {}
        self._pinned_at = self._pinned.get
        self._pins: dict[int, torch.UntypedStorage] = {}
        self._claiming = threading.RLock()  # a finalizer can run inside, and ask
        self._streams: dict[tuple[int, int], Any] = {}
        self._events: dict[int, list[Any]] = {}

    current = staticmethod(_torch.current_raw_stream)
    capture = staticmethod(_torch.capture_id)
    is_capturing = staticmethod(_torch.is_capturing)

    def home(self, pointer: int, other: int | None = None) -> int | None:
        pinned = self._pinned_at(pointer >> GRANULE)
        if pinned is not None and (other is None or self._pinned_at(other >> GRANULE) == pinned):
            return pinned
        # This is _segment(pointer), written out: it is asked on every call.
        if pointer_attribute is None:
            return None
        try:
            question = _take()
        except IndexError:
            question = new_question()
        argument, answer, answer_reference, attribute = question
        argument.value = pointer
        failed = pointer_attribute(answer_reference, attribute, argument)
        identity = answer.value
        _give(question)
        if failed:
            return None
        home, start, end, _ = self._known(identity) or self._look_up(pointer, identity)
        if home == _CLAIMED:
            home = self._claimed_home(pointer)
        # Where both lie in one segment, which the driver has just confirmed for the first, it need not be asked again.
        if other is None or start <= other < end or self.home(other) == home:
            return home
        return None

    def claim(self, start: int, end: int, home: Callable[[int], int | None]) -> None:
        with self._claiming:
            self._claims[start] = (end, home)
            self._segments.clear()
            for granule in tuple(self._pinned):
                if granule << GRANULE < end and start < (granule + 1) << GRANULE:
                    self._pinned.pop(granule, None)
                    self._pins.pop(granule, None)

    def unclaim(self, start: int) -> None:
        self._claims.pop(start, None)
        self._segments.clear()

    def _claimed_home(self, pointer: int) -> int | None:
        for start, (end, home) in tuple(self._claims.items()):
            if start <= pointer < end:
                return home(pointer)
        return _described(self._search(pointer))[0]  # the segment is larger than the claim

    def pool(self, pointer: int) -> Any:
        return self._segment(pointer)[3]

    def allocated(self, pool: Any) -> list[tuple[int, int]]:
        return [
            (block["address"], block["address"] + block["size"])
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment.get("segment_pool_id", (0, 0))) == pool
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def all_at_home(self, stream: int, pointers: list[int]) -> bool:
        known = 0
        for pointer in pointers:
            if pointer < known:  # in the segment of one before it, which the driver has just confirmed
                continue
            home, _, known, _ = self._segment(pointer)
            if home != stream and not (home == _CLAIMED and self._claimed_home(pointer) == stream):
                return False
        return True

    def _segment(self, pointer: int) -> Segment:
        if pointer_attribute is None:
            return _NOBODYS
        try:
            question = _take()
        except IndexError:
            question = new_question()
        argument, answer, answer_reference, attribute = question
        argument.value = pointer
        failed = pointer_attribute(answer_reference, attribute, argument)
        identity = answer.value
        _give(question)
        return _NOBODYS if failed else self._known(identity) or self._look_up(pointer, identity)

    def _look_up(self, pointer: int, identity: int) -> Segment:
        if len(self._segments) > 1 << 16:
            self._segments.clear()  # segments come and go, their ids never come back
        segment = self._search(pointer)
        found = _described(segment)
        _, start, end, pool = found
        for first, (last, _) in tuple(self._claims.items()):
            if first <= pointer < last or (first < end and start < last):
                found = (_CLAIMED, 0, 0, pool)
        self._segments[identity] = found
        if segment is not None and found[0] != _CLAIMED:
            self._pin(segment)
        return found

    def _search(self, pointer: int) -> dict[str, Any] | None:
        """Return the allocator's description of the segment at ``pointer``; None if that is not this allocator's."""
        try:
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None  # an allocator that keeps no record, such as a pluggable one
        # Only for this pointer, whose memory the caller keeps alive: any other segment of the snapshot may by now
        # have been unmapped by another thread, and its address given to a segment of another stream.
        for segment in segments:
            if segment["address"] <= pointer < segment["address"] + segment["total_size"]:
                return segment  # type: ignore[no-any-return]
        return None

    def _pin(self, segment: dict[str, Any]) -> None:
        """Keep ``segment`` mapped, if it is a small one and the allocator has room there for the next byte.

        It is described by a snapshot, and somebody's memory in it is alive.
        """
        start, device, stream = segment["address"], segment["device"], segment["stream"]
        end = start + segment["total_size"]
        if (
            segment.get("segment_type") != "small"
            or segment.get("is_expandable")  # parts of it come and go
            or tuple(segment.get("segment_pool_id", ())) != (0, 0)  # its owner gives it back as a whole
            or (start | end) % (1 << GRANULE)
            or start >> GRANULE in self._pinned
            or len(self._pins) >= PINS
            or not any(block["state"] == "inactive" for block in segment["blocks"])  # full: another would be mapped
            or self.current(device) != stream  # on which we allocate
            or (stream and self.capture(stream))
        ):
            return
        try:
            pin = torch.UntypedStorage(1, device=torch.device("cuda", device))  # type: ignore[no-untyped-call]
        except RuntimeError:  # out of memory
            return
        if start <= pin.data_ptr() < end:
            with self._claiming:
                if not any(first < end and start < last for first, (last, _) in self._claims.items()):
                    self._pins[start >> GRANULE] = pin
                    for granule in range(start >> GRANULE, end >> GRANULE):
                        self._pinned[granule] = stream

    def _stream(self, index: int, stream: int) -> Any:
        known = self._streams.get((index, stream))
        if known is None:
            known = self._streams[index, stream] = stream_object(index, stream)
        return known

    def mark(self, index: int, stream: int) -> Any:
        pool = self._events.get(index)
        event = pool.pop() if pool else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(index, stream))
        return event

    def reached(self, event: Any) -> bool:
        return bool(event.query())

    def recycle(self, index: int, event: Any) -> None:
        self._events.setdefault(index, []).append(event)

    def order(self, index: int, stream: int, event: Any) -> None:
        self._stream(index, stream).wait_event(event)

    def using(self, index: int, stream: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream(index, stream))

    def lenient(self) -> AbstractContextManager[Any]:
        return _Lenient()

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)

    def capacity(self, index: int) -> int:
        return int(torch.cuda.get_device_properties(index).total_memory)
