"""FreeList: the free ranges of one bucket, and the live slots between them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

from safecomm.arena.size_class import NO_STREAMS, Slot

Range = tuple[int, int, frozenset[int]]
"""A free range: its start, its end, and the streams that used a part of it last."""


class FreeList:
    """The bytes of one bucket, from ``start`` to ``end``.

    Guarantees that each byte is either in one free range or in one live slot. The caller has the lock of the layout.

    Parameters
    ----------
    start, end
        The bytes of the block that the bucket consists of.
    live
        The live slots of the whole block by their start, which all buckets share: most look-ups know the start.
    """

    def __init__(self, start: int, end: int, live: dict[int, Slot]) -> None:
        self.start = start
        self.end = end
        self.ranges: list[Range] = [(start, end, NO_STREAMS)]  # ascending; no two of them touch
        self.live = live
        self.starts: list[int] = []  # of the bucket's own live slots, ascending
        self.live_bytes: int = 0
        self.high_water: int = 0
        self.fragmented = False  # from when no range was large enough until a step begins anew
        self._last_busy = 0  # the start of the slot that was in use when :meth:`all_idle` looked last

    def find(self, nbytes: int, usable: Callable[[frozenset[int]], bool]) -> int | None:
        """Return the number of the first range of ``nbytes`` or more whose streams are ``usable``; None if none is."""
        for number, (start, end, after) in enumerate(self.ranges):
            if end - start >= nbytes and usable(after):
                return number
        return None

    def split(self, number: int, slot: Slot) -> None:
        """Make ``slot`` live, at the start of the range with this ``number``."""
        start, end, after = self.ranges[number]
        rest = [(slot.end, end, after)] if slot.end < end else []
        index, only = bisect.bisect(self.starts, start), [start]
        live_bytes = self.live_bytes + slot.end - start
        high_water = max(self.high_water, live_bytes)
        # No call from here on, so no exception comes in between, not even one of a signal handler.
        self.ranges[number : number + 1] = rest
        self.live[start] = slot
        self.starts[index:index] = only
        self.live_bytes = live_bytes
        self.high_water = high_water

    def coalesce(self, slot: Slot) -> None:
        """Make a live ``slot`` free, in one range with its free neighbours."""
        first, last, whole = self.merged(slot.start, slot.end, slot.after | {slot.size_class.alloc_stream})
        index, only = bisect.bisect_left(self.starts, slot.start), [whole]
        # As in split().
        del self.starts[index]
        del self.live[slot.start]
        self.ranges[first:last] = only
        self.live_bytes -= slot.end - slot.start

    def merged(self, start: int, end: int, after: frozenset[int]) -> tuple[int, int, Range]:
        """Return which ranges become one with a range that is freed, from one number to another, and this one range."""
        ranges = self.ranges
        first = last = bisect.bisect(ranges, (start,))
        if last < len(ranges) and ranges[last][0] == end:
            _, end, other = ranges[last]
            after |= other
            last += 1
        if first and ranges[first - 1][1] == start:
            first -= 1
            start, _, other = ranges[first]
            after |= other
        return first, last, (start, end, after)

    def forget_streams(self) -> None:
        """Order nothing after the streams of the free ranges: the device has completed all that ran on them."""
        # Ranges that touch are one already, so none becomes one with another now.
        self.ranges = [(start, end, NO_STREAMS) for start, end, _ in self.ranges]

    @property
    def streams(self) -> frozenset[int]:
        """The streams that used a part of a free range last."""
        return NO_STREAMS.union(*[after for _, _, after in self.ranges])

    @property
    def largest(self) -> int:
        """Bytes of the largest range."""
        return max((end - start for start, end, _ in self.ranges), default=0)

    @property
    def tail(self) -> int:
        """Bytes of the range at the end of the bucket; 0 if a slot ends there."""
        return next((last - first for first, last, _ in self.ranges if last == self.end), 0)

    def in_use(self, is_idle: Callable[[Slot, bool], bool]) -> list[Slot]:
        """Return the slots of the bucket that are in use, in ascending order."""
        return [slot for start in self.starts if not is_idle(slot := self.live[start], False)]

    def all_idle(self, is_idle: Callable[[Slot, bool], bool]) -> bool:
        """Return whether no slot of the bucket is in use."""
        starts = self.starts
        # The slot that was in use at the last look most often still is, or else the next one is.
        middle = bisect.bisect_left(starts, self._last_busy)
        for place in itertools.chain(range(middle, len(starts)), range(middle)):
            if not is_idle(self.live[starts[place]], False):
                self._last_busy = starts[place]
                return False
        return True

    def at(self, place: int) -> Slot | None:
        """Return the slot that the byte at ``place`` is in; None if it is free."""
        index = bisect.bisect(self.starts, place) - 1
        slot = self.live[self.starts[index]] if index >= 0 else None
        return slot if slot is not None and place < slot.end else None
