"""Where slots lie in a block: free ranges, shelves, and the policy that places a request.

Nothing here knows of tensors or devices, so that a plan can be tried out without memory. What it needs to know is
whether a slot is still in use, which it is told by a function.

A slot that is no longer in use stays on its *shelf*, with the others of the same shape, type and stream, where the next
request of that kind finds it: no search, and the same addresses in every step. Only when a request fits nowhere else
are all unused slots taken from their shelves and merged into free ranges. Both depend on nothing but which slots are in
use when a request is made, so the same program gets the same places on every rank and in every run.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
import threading
from collections.abc import Callable
from typing import Any

from safecomm.refcounts import COUNTED, HELD_ONCE, getrefcount

ALIGNMENT = 512
"""Bytes to which slots are aligned: what the caching allocator aligns to, and more than any kernel asks for."""

PROBES = 4
"""Slots of a shelf, the last handed out first, that are looked at before all of them are."""

LIMIT = 1 << 12
"""Kinds of requests, and slots that are not cut out, that are remembered."""

NOBODY: frozenset[int] = frozenset()


def rounded(nbytes: int) -> int:
    """Return ``nbytes``, or the next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Shelf:
    """The slots of one kind of request."""

    __slots__ = ("first", "ready", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot] = []  # handed out, and maybe idle again; the last at the end
        self.ready: list[Slot] = []  # known to be idle, the lowest at the end
        # The one that was handed out first since all were looked at. When it is idle again, a step begins anew: all
        # are looked at, and handed out from the lowest on, so that each step gets the places of the one before.
        self.first: Slot | None = None


class Slot:
    """A range of the block that is handed out as one storage, again and again."""

    __slots__ = (
        "after",
        "asked",
        "bucket",
        "capture",
        "cdata",
        "end",
        "home",
        "identity",
        "key",
        "pointer",
        "shelf",
        "site",
        "start",
        "storage",
        "template",
    )

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.after = NOBODY  # the streams that it has to be ordered after before it is put on its shelf
        self.asked = 0  # bytes that its tensors have
        self.home = 0  # the stream that it was handed out on
        self.capture = 0  # the capture that it was handed out in; 0 for none
        self.bucket = ""
        self.key: Any = None
        self.identity: Any = None
        self.shelf = _NO_SHELF
        self.site = ""
        self.storage: Any = None
        self.template: Any = None  # a tensor of the shelf's shape and type, which others are copied from
        self.cdata = 0
        self.pointer = 0


_NO_SHELF = Shelf()
_start_of = operator.attrgetter("start")


class Space:
    """The free ranges of a bucket, each with the streams that used a part of it last, in ascending order."""

    def __init__(self, start: int, end: int) -> None:
        self.ranges: list[tuple[int, int, frozenset[int]]] = [(start, end, NOBODY)]

    def find(self, nbytes: int, usable: Callable[[frozenset[int]], bool]) -> int | None:
        """Return which range is the first that has ``nbytes`` and whose streams are ``usable``: can be waited for."""
        for place, (start, end, after) in enumerate(self.ranges):
            if end - start >= nbytes and usable(after):
                return place
        return None

    def merged(self, start: int, end: int, after: frozenset[int]) -> tuple[int, int, tuple[int, int, frozenset[int]]]:
        """Return which ranges, from one to another, a range becomes one with that is given back, and what that is."""
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

    @property
    def largest(self) -> int:
        """Bytes of the largest range."""
        return max((end - start for start, end, _ in self.ranges), default=0)


class Layout:
    """The slots of a block of ``nbytes``, in which each of ``buckets`` has its own range, from the start on.

    What they leave is the bucket ``""``. ``idle`` tells whether a slot is no longer in use, by anybody, or by anybody
    but the graph that was captured with it.
    """

    def __init__(self, nbytes: int, buckets: dict[str, int], idle: Callable[[Slot, bool], bool]) -> None:
        self.nbytes = nbytes
        self._idle = idle
        self.bounds: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in buckets.items():
            self.bounds[name] = (start, start + rounded(size))
            start += rounded(size)
        self.bounds[""] = (start, nbytes)
        self.spaces = {name: Space(*bounds) for name, bounds in self.bounds.items()}
        self._shelves: dict[Any, Shelf] = {}  # by kind of request
        self.cut: dict[int, Slot] = {}  # by start: all slots that there are
        self._starts: list[int] = []  # sorted
        self._spare: dict[Any, Slot] = {}  # slots that are not cut out now, to be cut out again as they were
        self.taken = dict.fromkeys(self.bounds, 0)  # bytes that are cut out
        self.high_water = dict.fromkeys(self.bounds, 0)
        self.exact = False  # there is no more room than a plan needs, where each step begins with all of it
        self._witness: dict[str, int] = {}  # where a slot of a bucket was in use, when all were looked at last
        self.tight: set[str] = set()  # buckets that had no room before what was idle was gathered
        self.lock = threading.RLock()
        # What is above is being changed or looked through, by who has the lock. Whoever finds it set is a finalizer or
        # a signal handler in the middle of that, on its thread.
        self.changing = False

    def take(
        self, identity: Any, nbytes: int, stream: int, capture: int, bucket: str,
        usable: Callable[[frozenset[int]], bool] = lambda _: True, *, needed: bool = True,
    ) -> tuple[Slot, frozenset[int]] | None:  # fmt: skip
        """Return a slot for a request, and the streams that its use has to be ordered after; None if there is no room.

        Also None for what a finalizer or a signal handler asks for in the middle of another request on its thread.

        ``identity`` is what requests must have in common to be given the same slot, besides stream, bucket and
        capture. ``usable`` tells whether a range can be used that some streams used last. Where a request is not
        ``needed``, the shelves of others are taken apart for it only if enough of them is idle. The caller makes the
        slot's storage, if it has none, and puts it on its shelf.
        """
        key = (*identity, stream, bucket, capture) if capture else (*identity, stream, bucket)
        with self.lock:
            if self.changing:
                return None
            self.changing = True
            try:
                shelf = self._shelves.get(key)
                if self.exact or bucket in self.tight:
                    self._begin_anew(bucket, shelf, usable)
                slot = None if shelf is None else self.from_shelf(shelf)
                if slot is not None:
                    return slot, NOBODY
                size = rounded(nbytes)
                space = self.spaces[bucket]
                place = space.find(size, usable)
                if place is None:
                    if not needed and not self._has_idle(size, bucket):
                        return None
                    self.gather()
                    self.tight.add(bucket)
                    place = space.find(size, usable)
                    if place is None:
                        return None
                start, end, after = space.ranges[place]
                slot = self._spare.pop((start, identity), None)
                if slot is None:
                    slot = Slot(start, start + size)
                    slot.identity = identity
                if shelf is None:
                    if len(self._shelves) > LIMIT:
                        self._shelves = {k: one for k, one in self._shelves.items() if one.slots or one.ready}
                    shelf = self._shelves.setdefault(key, Shelf())
                slot.after = after - {stream}
                slot.asked = nbytes
                slot.home = stream
                slot.capture = capture
                slot.bucket = bucket
                slot.key = key
                slot.shelf = shelf
                index, only = bisect.bisect(self._starts, start), [start]
                rest = [(start + size, end, after)] if start + size < end else []
                # No call from here on: a signal handler that raises comes before all of it, or after.
                space.ranges[place : place + 1] = rest
                self.cut[start] = slot
                self._starts[index:index] = only
                self.taken[bucket] += size
                if shelf.first is None:
                    shelf.first = slot
                self.high_water[bucket] = max(self.high_water[bucket], self.taken[bucket])
                return slot, slot.after
            finally:
                self.changing = False

    def _has_idle(self, size: int, bucket: str) -> bool:
        """Return whether ``size`` bytes of ``bucket`` are not in use, be it in many places."""
        start, end = self.bounds[bucket]
        room = end - start - size
        return room >= 0 and sum([slot.end - slot.start for slot in self.in_use() if slot.bucket == bucket]) <= room

    def _begin_anew(self, bucket: str, shelf: Shelf | None, usable: Callable[[frozenset[int]], bool]) -> None:
        """Gather the slots of ``bucket`` if a step begins, with a request for ``shelf``, that is to go another way.

        Nobody uses any of them now. And the last step had to use places that it could not have begun with; or the block
        is ``exact``, and the request would not get its first place, but one behind it that is then in the way of the
        rest. Only then: what is gathered has to wait for all streams that used a part of it, and is on no shelf any
        more. And only if it is ``usable`` then, which it is not in a capture.
        """
        idle, cut, starts = self._idle, self.cut, self._starts
        first, last = self.bounds[bucket]
        begin, end = bisect.bisect_left(starts, first), bisect.bisect_left(starts, last)
        # From the one on that was in use when this was asked last: it most often still is, or else the next one is.
        middle = min(max(bisect.bisect_left(starts, self._witness.get(bucket, 0)), begin), end)
        for place in itertools.chain(range(middle, end), range(begin, middle)):
            if not idle(cut[starts[place]], False):
                self._witness[bucket] = starts[place]
                return
        if bucket not in self.tight and shelf is not None and first in [s.start for s in (*shelf.slots, *shelf.ready)]:
            return
        if begin != end and usable(frozenset([cut[starts[place]].home for place in range(begin, end)])):
            self.tight.discard(bucket)
            self.gather()

    def put(self, slot: Slot) -> None:
        """Put a slot on its shelf, as the last that was handed out, now that it is ordered after what it has to be."""
        slot.after = NOBODY
        slot.shelf.slots.append(slot)

    def take_back(self, slot: Slot) -> None:
        """Make a free range of a slot that was taken, and that nobody was given."""
        with self.lock:
            self.changing = True
            try:
                self._give_back(slot)
            finally:
                self.changing = False

    def from_shelf(self, shelf: Shelf) -> Slot | None:
        """Take an idle slot from a shelf: one of the last handed out, or else look at all of them.

        The first finds the buffer that comes and goes beside many that stay, the second pays once for all that have
        become idle. What is popped is nobody else's: other threads pop from the same lists without the lock.
        """
        with self.lock:
            slots, ready, idle = shelf.slots, shelf.ready, self._idle
            anew = shelf.first is None or idle(shelf.first, shelf.first.capture > 0)
            if not anew:
                with contextlib.suppress(IndexError):
                    return ready.pop()
                for slot in slots[: -PROBES - 1 : -1]:
                    graphs = slot.capture > 0
                    if idle(slot, graphs) and self._pop(slot, graphs):
                        return slot
                if len(slots) <= PROBES:
                    return None
            busy: list[Slot] = []
            try:
                while slots:
                    slot = slots.pop()
                    (ready if idle(slot, slot.capture > 0) else busy).append(slot)
            except IndexError:  # another thread was faster
                pass
            finally:
                # Not by a call, after which a signal handler could raise, and all of them were lost.
                slots[:0] = busy[::-1]
            ready.sort(key=_start_of, reverse=True)
            try:
                lowest: Slot | None = ready.pop()
            except IndexError:
                lowest = None
            if anew:
                shelf.first = lowest
            return lowest

    def _pop(self, slot: Slot, but_for_graph: bool) -> bool:
        """Take ``slot`` from its shelf; False if it is in use, or another thread was faster."""
        if not self._idle(slot, but_for_graph):
            return False
        try:
            slot.shelf.slots.remove(slot)
        except ValueError:
            return False
        if self._idle(slot, but_for_graph):
            return True
        slot.shelf.slots.append(slot)
        return False

    def harvest(self, synchronize: Callable[[], None] | None = None) -> None:
        """Make free ranges of all slots that are no longer in use.

        With ``synchronize``, which blocks the host until the device is idle, such as nobody has to be waited for.
        """
        with self.lock:
            if self.changing:
                return
            self.changing = True
            try:
                self.gather()
                spaces = self.spaces.values()
                if synchronize is not None and any(after for space in spaces for _, _, after in space.ranges):
                    synchronize()
                    for space in spaces:
                        # Ranges that only their streams kept apart do not exist: what touches was merged.
                        space.ranges = [(start, end, NOBODY) for start, end, _ in space.ranges]
            finally:
                self.changing = False

    def gather(self) -> None:
        """Do what :meth:`harvest` does, for who has set ``changing``."""
        for slot in tuple(self.cut.values()):
            shelf = slot.shelf
            if slot in shelf.ready:
                if self._idle(slot, False):
                    with contextlib.suppress(ValueError):  # another thread was faster
                        shelf.ready.remove(slot)
                        self._give_back(slot)
            # A slot that is on no list, and in nobody's hands who could put it back: an exception of a signal handler
            # came between its being taken and put: only the tuple that is looked through has it, and ``cut``. The
            # count is last: what comes after it could change the other.
            elif self._pop(slot, False) or (
                COUNTED and HELD_ONCE + 1 + (shelf.first is slot) == getrefcount(slot) and self._idle(slot, False)
            ):
                self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        space, size = self.spaces[slot.bucket], slot.end - slot.start
        index = bisect.bisect_left(self._starts, slot.start)
        first, last, merged = space.merged(slot.start, slot.end, slot.after | {slot.home})
        only = [merged]
        # No call from here on, as in take().
        del self._starts[index]
        del self.cut[slot.start]
        space.ranges[first:last] = only
        self.taken[slot.bucket] -= size
        shelf = slot.shelf
        if shelf.first is slot:
            shelf.first = None
        if slot.capture and not (shelf.slots or shelf.ready):  # a capture comes only once
            self._shelves.pop(slot.key, None)
        if len(self._spare) > LIMIT:
            self._spare.clear()
        self._spare[slot.start, slot.identity] = slot

    def forget(self) -> None:
        """Let go of all slots: the block is about to go."""
        with self.lock:
            self._shelves.clear()
            self._spare.clear()

    def in_use(self) -> list[Slot]:
        """Return the slots that are in use, in the order of their places."""
        with self.lock:
            before, self.changing = self.changing, True
            try:
                return [slot for start in self._starts if not self._idle(slot := self.cut[start], False)]
            finally:
                self.changing = before

    def at(self, place: int) -> Slot | None:
        """Return the slot that ``place`` lies in."""
        with self.lock:
            before, self.changing = self.changing, True
            try:
                index = bisect.bisect(self._starts, place) - 1
                slot = self.cut[self._starts[index]] if index >= 0 else None
                return slot if slot is not None and place < slot.end else None
            finally:
                self.changing = before

    def largest(self, bucket: str) -> int:
        """Return the bytes of the largest request that would find room in ``bucket`` now."""
        with self.lock:
            self.harvest()
            return self.spaces[bucket].largest
