"""What a device answers: the current stream, captures, events, and which stream memory was allocated on.

The core asks these questions and no others. ``CudaStreams`` answers them for real GPUs. The tests answer them with a
simulated device, so that the core's own code is what is checked. Streams are raw handles (``cudaStream_t`` as an int),
never objects: ``torch.cuda.Stream()`` hands out 32 pooled streams round robin, so two objects can be one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from safecomm import _torch
from safecomm.core.allocation import Allocations

HOST = _torch.HOST
"""The device index of memory that no stream orders: the CPU's."""


_EVENT: Any = torch.cuda.Event.__mro__[1]
"""The C++ class of events. What stands in the place of torch.cuda.Event's methods is for the program's events alone."""


class Streams(Protocol):
    """The questions that the core asks of a device."""

    def current(self, index: int, /) -> int:
        """Return the current stream of device ``index``."""

    def alloc_stream(self, pointer: int, other: int | None = None, /) -> int | None:
        """Return the stream that the memory at ``pointer`` was allocated on, and that at ``other`` if it is given.

        None if the stream is unknown, or if the two streams differ. An allocator gives freed memory out again in the
        order of this stream and of no other.
        """

    def all_allocated_on(self, stream: int, pointers: list[int], /) -> bool:
        """Return whether the memory at all of ``pointers``, in ascending order, was surely allocated on ``stream``."""

    def claim(self, start: int, end: int, stream_of: Callable[[int], int | None], /) -> None:
        """From now on ask ``stream_of`` for the allocation stream of the memory from address ``start`` to ``end``."""

    def unclaim(self, start: int, /) -> None:
        """Undo the claim that begins at ``start``."""

    def pool(self, pointer: int, /) -> object:
        """Return the allocator's pool, such as that of a graph, that the memory at ``pointer`` is part of."""

    def allocated(self, pool: object, /) -> list[tuple[int, int]]:
        """Return the pieces of memory of ``pool`` that are in use, as pairs of first address and the one behind.

        Takes time; not for the hot path.
        """

    def capture(self, stream: int, /) -> int:
        """Return the id of the graph capture that ``stream`` is part of; 0 if it is not capturing."""

    def is_capturing(self, index: int, stream: int, /) -> bool:
        """Return whether ``stream``, the current one of device ``index``, is capturing."""

    def is_lasting(self, index: int, stream: int, /) -> bool:
        """Return whether ``stream``, the current one of device ``index``, is of torch's pool, and never destroyed."""

    def record_event(self, index: int, stream: int, /) -> object:
        """Return an event recorded on ``stream``."""

    def query_event(self, event: Any, /) -> bool:
        """Return whether ``event`` is complete. Illegal for events of a capture."""

    def recycle_event(self, index: int, event: Any, /) -> None:
        """Take back an event that is no longer in use."""

    def wait_event(self, index: int, stream: int, event: Any, /) -> None:
        """Let all later work on ``stream`` start after ``event``."""

    def spare(self, index: int, /) -> int:
        """Return the stream of device ``index`` that safecomm's own waits order, so that the program's do not wait."""

    def using(self, index: int, stream: int, /) -> AbstractContextManager[object]:
        """Return a context manager under which ``stream`` is the current one."""

    def relaxed_capture_mode(self) -> AbstractContextManager[object]:
        """Return a context manager under which events may be queried while another thread captures."""

    def synchronize(self, index: int, /) -> None:
        """Block the host until device ``index`` is idle."""

    def capacity(self, index: int, /) -> int:
        """Return the bytes of memory that device ``index`` has."""


def capture_of(streams: Streams, stream: int) -> int:
    """Return the graph capture that ``stream`` is part of; 0 if it is not capturing."""
    return streams.capture(stream) if stream else 0  # 0 is the legacy default stream, which can't capture


def alloc_stream_of(streams: Streams, storage: object, no_memory: int) -> int | None:
    """Return the stream that ``storage`` was allocated on; None if unknown, ``no_memory`` if it has no memory."""
    # A tensor subclass without memory of its own is held as an object, and has no address.
    pointer = storage.data_ptr() if type(storage) is torch.UntypedStorage else 0
    return streams.alloc_stream(pointer) if pointer else no_memory


def stream_object(index: int, stream: int) -> torch.cuda.Stream:
    """Return torch's object for the raw ``stream`` of device ``index``."""
    if stream:
        return torch.cuda.ExternalStream(stream, device=index)  # type: ignore[no-untyped-call]
    return torch.cuda.default_stream(index)


class _Relaxed:
    """Relaxes this thread's capture mode for a few queries, and puts it back."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = _torch.swap_capture_mode()

    def __exit__(self, *_: object) -> None:
        _torch.swap_capture_mode(self._mode)


class CudaStreams(Allocations):
    """Streams of NVIDIA GPUs, as torch and its caching allocator use them."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._events: dict[int, list[torch.cuda.Event]] = {}
        self._spare: dict[int, torch.cuda.Stream] = {}

    current = staticmethod(_torch.current_raw_stream)
    capture = staticmethod(_torch.capture_id)
    is_capturing = staticmethod(_torch.is_capturing)

    def _stream(self, index: int, stream: int) -> torch.cuda.Stream:
        return self._streams.setdefault((index, stream), stream_object(index, stream))

    def is_lasting(self, index: int, stream: int) -> bool:
        # The id of a stream that other code has made is its handle. The default one lasts too, but a record on it ends
        # the captures of streams that wait for it.
        return stream != 0 and torch.cuda.current_stream(index).stream_id != stream

    def record_event(self, index: int, stream: int) -> torch.cuda.Event:
        pool = self._events.get(index)
        event = pool.pop() if pool else torch.cuda.Event()  # type: ignore[no-untyped-call]
        _EVENT.record(event, self._streams.get((index, stream)) or self._stream(index, stream))
        return event

    def query_event(self, event: Any) -> bool:
        return bool(event.query())

    def recycle_event(self, index: int, event: torch.cuda.Event) -> None:
        self._events.setdefault(index, []).append(event)

    def wait_event(self, index: int, stream: int, event: torch.cuda.Event) -> None:
        _EVENT.wait(event, self._streams.get((index, stream)) or self._stream(index, stream))

    def spare(self, index: int) -> int:
        if index not in self._spare:
            self._spare[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        return int(self._spare[index].cuda_stream)

    def using(self, index: int, stream: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams.get((index, stream)) or self._stream(index, stream))

    def relaxed_capture_mode(self) -> AbstractContextManager[object]:
        return _Relaxed()

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)

    def capacity(self, index: int) -> int:
        return int(torch.cuda.get_device_properties(index).total_memory)
