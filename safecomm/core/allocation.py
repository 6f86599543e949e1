"""Which stream memory was allocated on: in that stream's order the allocator will give the memory out again.

Every call of a collective asks. The driver answers: it tells which of its own buffers an address is part of. Such a
buffer is a *segment* of torch's caching allocator, and a segment keeps its stream for life, so the answer is kept.
Three cases stand beside that:

- A *claim*: somebody hands out pieces of a segment, as an arena does, and knows their streams.
- An *anchor*: a byte of ours in a small segment. The segment can't be unmapped any more, so the address is the answer.
  The driver need not be asked, which takes a twentieth of a small call.
- An unknown stream: memory of another allocator, or of one that keeps no record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from safecomm import _torch
from safecomm._torch import BUFFER_ID, new_question, pointer_attribute, questions

Segment = tuple[int | None, int, int, object]
"""What is known of a piece of memory: its stream, the first address, the one past the last, the allocator's pool."""

_UNKNOWN: Segment = (None, 0, 0, None)
"""The segment of memory whose stream is unknown."""

GRANULE = 21
"""Binary logarithm of what the driver maps at least: 2 MiB, which is also what the allocator's small segments have."""

ANCHORS = 16
"""Small segments at most that a byte of ours keeps mapped."""

_take, _give = questions.pop, questions.append

_CLAIMED = -2
"""In place of a segment's stream: somebody hands out pieces of it, and knows their streams."""


class Allocations:
    """The memory of NVIDIA GPUs, as torch's caching allocator hands it out."""

    def __init__(self) -> None:
        # By the driver's buffer id and not by address. Once a segment is unmapped, its address can come back as a
        # segment of another stream: it did, in the first program tried.
        self._segments: dict[int, Segment] = {}
        self._known = self._segments.get
        self._claims: dict[int, tuple[int, Callable[[int], int | None]]] = {}
        # The streams of segments that stay mapped because an anchor lies in them, by the number of the granule.
        self._anchored: dict[int, int] = {}
        self._anchored_at = self._anchored.get
        self._anchors: dict[int, torch.UntypedStorage] = {}
        # Reentrant, because a finalizer can run inside, and ask.
        self._claiming = threading.RLock()

    def alloc_stream(self, pointer: int, other: int | None = None) -> int | None:
        anchored = self._anchored_at(pointer >> GRANULE)
        if anchored is not None and (other is None or self._anchored_at(other >> GRANULE) == anchored):
            return anchored
        stream, start, end, _ = self._segment(pointer)
        if stream == _CLAIMED:
            stream = self._claimed_stream(pointer)
        # Where both lie in one segment, which the driver has just confirmed for the first, it need not be asked again.
        if other is None or start <= other < end or self.alloc_stream(other) == stream:
            return stream
        return None

    def all_allocated_on(self, stream: int, pointers: list[int]) -> bool:
        known = 0
        for pointer in pointers:
            # In the segment of one before it, which the driver has just confirmed; or where it need not be asked.
            if pointer < known or self._anchored_at(pointer >> GRANULE) == stream:
                continue
            found, _, known, _ = self._segment(pointer)
            if found != stream and not (found == _CLAIMED and self._claimed_stream(pointer) == stream):
                return False
        return True

    def claim(self, start: int, end: int, stream_of: Callable[[int], int | None]) -> None:
        with self._claiming:
            self._claims[start] = (end, stream_of)
            self._segments.clear()
            for granule in tuple(self._anchored):
                if granule << GRANULE < end and start < (granule + 1) << GRANULE:
                    self._anchored.pop(granule, None)
                    self._anchors.pop(granule, None)

    def unclaim(self, start: int) -> None:
        self._claims.pop(start, None)
        self._segments.clear()

    def pool(self, pointer: int) -> object:
        return self._segment(pointer)[3]

    def allocated(self, pool: object) -> list[tuple[int, int]]:
        return [
            (block["address"], block["address"] + block["size"])
            for segment in _torch.segments()
            if tuple(segment.get("segment_pool_id", (0, 0))) == pool
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def _segment(self, pointer: int) -> Segment:
        if pointer_attribute is None:
            return _UNKNOWN
        try:
            question = _take()
        except IndexError:
            question = new_question()
        argument, answer, reference = question
        argument.value = pointer
        failed = pointer_attribute(reference, BUFFER_ID, argument)
        identity = answer.value
        _give(question)
        return _UNKNOWN if failed else self._known(identity) or self._look_up(pointer, identity)

    def _claimed_stream(self, pointer: int) -> int | None:
        for start, (end, stream_of) in tuple(self._claims.items()):
            if start <= pointer < end:
                return stream_of(pointer)
        return _described(_search(pointer))[0]  # the segment is larger than the claim

    def _look_up(self, pointer: int, identity: int) -> Segment:
        if len(self._segments) > 1 << 16:
            self._segments.clear()  # segments come and go, and their ids never come back
        segment = _search(pointer)
        found = _described(segment)
        # All of an expandable segment: one id may be of a part of it that a claim begins or ends in.
        start = pointer if segment is None else segment["address"]
        end = pointer + 1 if segment is None else start + segment["total_size"]
        with self._claiming:  # a claim that comes now forgets what is known
            for first, (last, _) in tuple(self._claims.items()):
                if first < end and start < last:
                    found = (_CLAIMED, 0, 0, found[3])
            self._segments[identity] = found
        if segment is not None and found[0] != _CLAIMED:
            self._anchor(segment)
        return found

    def _anchor(self, segment: dict[str, Any]) -> None:
        """Keep ``segment`` mapped, if it is a small one and the allocator has room there for the next byte.

        A snapshot has described ``segment``, and memory of the caller's in it is alive.
        """
        start, device, stream = segment["address"], segment["device"], segment["stream"]
        end = start + segment["total_size"]
        if (
            segment.get("segment_type") != "small"
            or segment.get("is_expandable")  # parts of it come and go
            or tuple(segment.get("segment_pool_id", ())) != (0, 0)  # its owner gives it back as a whole
            or (start | end) % (1 << GRANULE)
            or start >> GRANULE in self._anchored
            or len(self._anchors) >= ANCHORS
            or not any(block["state"] == "inactive" for block in segment["blocks"])  # full: another would be mapped
            or _torch.current_raw_stream(device) != stream  # on which we allocate
            or (stream and _torch.capture_id(stream))
        ):
            return
        try:
            anchor = torch.UntypedStorage(1, device=torch.device("cuda", device))  # type: ignore[no-untyped-call]
        except RuntimeError:  # out of memory
            return
        if start <= anchor.data_ptr() < end:
            with self._claiming:
                if not any(first < end and start < last for first, (last, _) in self._claims.items()):
                    self._anchors[start >> GRANULE] = anchor
                    for granule in range(start >> GRANULE, end >> GRANULE):
                        self._anchored[granule] = stream


def _search(pointer: int) -> dict[str, Any] | None:
    """Return the allocator's description of the segment at ``pointer``; None if that is not this allocator's."""
    try:
        segments = _torch.segments()
    except RuntimeError:
        return None  # an allocator that keeps no record, such as a pluggable one
    # Only for this pointer, whose memory the caller keeps alive. Another thread may by now have unmapped any other
    # segment of the snapshot, and its address may be part of a segment of another stream.
    for segment in segments:
        if segment["address"] <= pointer < segment["address"] + segment["total_size"]:
            return segment
    return None


def _described(segment: dict[str, Any] | None) -> Segment:
    """Return what is known of a segment of the allocator's snapshot."""
    if segment is None:
        return _UNKNOWN
    start = segment["address"]
    # An expandable segment has an id for each part that is mapped, and where this part ends is unknown.
    end = 0 if segment.get("is_expandable") else start + segment["total_size"]
    return (segment["stream"], start, end, tuple(segment.get("segment_pool_id", (0, 0))))
