"""Which stream memory was allocated on: in that stream's order the allocator will give the memory out again.

Every call of a collective asks. The driver answers: it tells which of its own buffers an address is part of. Such a
buffer is a *segment* of torch's caching allocator, and a segment keeps its stream for life, so the answer is kept.
Three cases stand beside that:

- A *claim*: other code hands out pieces of a segment, as an arena does, and knows their streams.
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
from safecomm._torch import GRANULE, UNKNOWN, Segment

ANCHORS = 16
"""Small segments at most that a byte of ours keeps mapped."""

LIMIT = 1 << 16
"""Segments at most of which anything is kept."""


class Allocations:
    """The memory of NVIDIA GPUs, as torch's caching allocator hands it out.

    ``table`` makes the table that answers; the methods that the hot path calls are the table's own.
    """

    def __init__(self, table: Callable[..., Any] = _torch.new_segment_table) -> None:
        self._table = table(self._missed)
        self.alloc_stream: Callable[..., int | None] = self._table.alloc_stream
        self.all_allocated_on: Callable[[int, list[int]], bool] = self._table.all_allocated_on
        self._pools: dict[int, object] = {}  # of segments, by the driver's id
        self._claimed: set[int] = set()  # ids of segments that are handed out in pieces: none is in the table
        self._claims: dict[int, tuple[int, Callable[[int], int | None]]] = {}
        self._anchors: dict[int, torch.UntypedStorage] = {}  # by the number of the granule
        # Reentrant, because a finalizer can run inside, and ask.
        self._claiming = threading.RLock()

    def claim(self, start: int, end: int, stream_of: Callable[[int], int | None]) -> None:
        with self._claiming:
            self._claims[start] = (end, stream_of)
            self._forget()
            for granule in tuple(self._anchors):
                if granule << GRANULE < end and start < (granule + 1) << GRANULE:
                    self._table.anchor(granule, None)
                    self._anchors.pop(granule, None)

    def unclaim(self, start: int) -> None:
        self._claims.pop(start, None)
        self._forget()

    def pool(self, pointer: int) -> object:
        identity = _torch.buffer_id(pointer)
        if identity is not None and identity not in self._pools:
            self._missed(pointer, identity)
        return self._pools.get(identity) if identity is not None else None

    def allocated(self, pool: object) -> list[tuple[int, int]]:
        return [
            (block["address"], block["address"] + block["size"])
            for segment in _torch.segments()
            if _pool(segment) == pool
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def _forget(self) -> None:
        self._pools.clear()
        self._claimed.clear()
        self._table.clear()

    def _claimed_stream(self, pointer: int) -> int | None:
        for start, (end, stream_of) in tuple(self._claims.items()):
            if start <= pointer < end:
                return stream_of(pointer)
        return _described(_search(pointer))[0]  # the segment is larger than the claim

    def _missed(self, pointer: int, identity: int) -> Segment:
        """Return what the table does not have: the segment at ``pointer``, or the piece of it that is claimed."""
        if identity in self._claimed:
            return (self._claimed_stream(pointer), 0, 0)
        if len(self._pools) > LIMIT:
            self._forget()  # segments come and go, and their ids never come back
        segment = _search(pointer)
        found = _described(segment)
        # All of an expandable segment: one id may be of a part of it that a claim begins or ends in.
        start = pointer if segment is None else segment["address"]
        end = pointer + 1 if segment is None else start + segment["total_size"]
        with self._claiming:  # a claim that comes now forgets what is known
            self._pools[identity] = _pool(segment)
            claimed = any(first < end and start < last for first, (last, _) in tuple(self._claims.items()))
            if claimed:
                self._claimed.add(identity)
            else:
                self._table.keep(identity, *found)
        if claimed:
            return (self._claimed_stream(pointer), 0, 0)
        if segment is not None:
            self._anchor(segment)
        return found

    def _anchor(self, segment: dict[str, Any]) -> None:
        """Keep ``segment`` mapped, if it is a small one and the allocator has room there for the next byte.

        A snapshot has described ``segment``, and memory of the caller's in it is alive.
        """
        start, device, stream = segment["address"], segment["device"], segment["stream"]
        end, granule = start + segment["total_size"], start >> GRANULE
        if (
            segment.get("segment_type") != "small"
            or segment.get("is_expandable")  # parts of it come and go
            or tuple(segment.get("segment_pool_id", ())) != (0, 0)  # its owner gives it back as a whole
            or (start, end) != (granule << GRANULE, (granule + 1) << GRANULE)
            or granule in self._anchors
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
                    self._anchors[granule] = anchor
                    self._table.anchor(granule, stream)


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
        return UNKNOWN
    start = segment["address"]
    # An expandable segment has an id for each part that is mapped, and where this part ends is unknown.
    return (segment["stream"], start, 0 if segment.get("is_expandable") else start + segment["total_size"])


def _pool(segment: dict[str, Any] | None) -> object:
    """Return the allocator's pool that a segment is in; None where no segment was found."""
    return None if segment is None else tuple(segment.get("segment_pool_id", (0, 0)))
