"""Where is memory at home: the stream that it was allocated on, in whose order it will be given out again.

Every call asks, so the answer is the driver's and is kept: the driver tells which of its own buffers an address is part
of, and such a buffer, a *segment* of torch's caching allocator, keeps its stream for life. Three things stand beside:

- A *claim*: somebody hands out pieces of a segment, as an arena does, and knows their streams.
- A *pin*: a small segment in which a byte of ours lies. It can't be unmapped any more, so its address is the answer and
  the driver need not be asked, which takes a twentieth of a small call.
- Memory of which nobody knows the stream: of another allocator, or of one that keeps no record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from safecomm import _torch
from safecomm._torch import BUFFER_ID, new_question, pointer_attribute, questions

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


class Homes:
    """The memory of NVIDIA GPUs, as torch's caching allocator hands it out."""

    def __init__(self) -> None:
        # By the driver's buffer id and not by address: a segment keeps its stream for life, but once it is
        # unmapped its address can come back as a segment of another stream (it did, in the first program tried).
        self._segments: dict[int, Segment] = {}
        self._known = self._segments.get
        self._claims: dict[int, tuple[int, Callable[[int], int | None]]] = {}
        # The streams of segments that stay mapped because a pin lies in them, by the number of the granule.
        self._pinned: dict[int, int] = {}
        self._pinned_at = self._pinned.get
        self._pins: dict[int, torch.UntypedStorage] = {}
        self._claiming = threading.RLock()  # a finalizer can run inside, and ask

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
        argument, answer, reference = question
        argument.value = pointer
        failed = pointer_attribute(reference, BUFFER_ID, argument)
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
            for segment in _torch.segments()
            if tuple(segment.get("segment_pool_id", (0, 0))) == pool
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def all_at_home(self, stream: int, pointers: list[int]) -> bool:
        known = 0
        for pointer in pointers:
            # In the segment of one before it, which the driver has just confirmed; or where it need not be asked.
            if pointer < known or self._pinned_at(pointer >> GRANULE) == stream:
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
        argument, answer, reference = question
        argument.value = pointer
        failed = pointer_attribute(reference, BUFFER_ID, argument)
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
            segments = _torch.segments()
        except RuntimeError:
            return None  # an allocator that keeps no record, such as a pluggable one
        # Only for this pointer, whose memory the caller keeps alive: any other segment of the snapshot may by now
        # have been unmapped by another thread, and its address given to a segment of another stream.
        for segment in segments:
            if segment["address"] <= pointer < segment["address"] + segment["total_size"]:
                return segment
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
            or _torch.current_raw_stream(device) != stream  # on which we allocate
            or (stream and _torch.capture_id(stream))
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


def _described(segment: dict[str, Any] | None) -> Segment:
    """Return what is known of a segment of the allocator's snapshot."""
    if segment is None:
        return _NOBODYS
    start = segment["address"]
    # An expandable segment has an id for each part that is mapped, and we don't know where this part ends.
    end = 0 if segment.get("is_expandable") else start + segment["total_size"]
    return (segment["stream"], start, end, tuple(segment.get("segment_pool_id", (0, 0))))
