"""Layout: where the slots of a block lie, and which slot a request gets.

Nothing here knows of tensors or devices, so that it can be tried out without memory. A function tells the layout
whether a slot is in use.

An idle slot stays in its *size class*, where the next request of the same kind finds it: no search, and the same
addresses in every step. Only a request that fits nowhere else frees all idle slots and coalesces their ranges. Both
depend on nothing but which slots are in use at each request, so the same program gets the same places on every rank and
in every run.

How it stays whole
------------------
Finalizers run in the middle of a request, on its thread, and may ask for a buffer. Other threads may ask at any time.

- **Lock.** All changes of ranges and of the table of live slots are made by the holder of ``lock``. The lock is
  reentrant, so it does not keep out a finalizer on its holder's thread. ``changing`` does: the holder sets it for as
  long as it reads or changes these fields. Code that finds it set gets no slot and frees none.
- **In hand.** The lists of a size class are changed without the lock, each by single calls into C. A slot that was
  popped is on no list, so it is the popper's alone until the popper pushes it again. The slot must be ordered after
  ``slot.after`` before the push.
- **Exceptions.** One that comes before a push leaves a slot that is live, idle, on no list and in no hand. Its
  reference count tells that, and :meth:`Layout.coalesce_free` frees it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from safecomm.arena.free_list import FreeList
from safecomm.arena.size_class import NO_STREAMS, SizeClass, Slot, rounded
from safecomm.core.refcounts import COUNTED, HELD_ONCE, getrefcount

LIMIT = 1 << 12
"""How many size classes without slots are kept, and how many retired slots."""


class Layout:
    """The slots of a block, in which each bucket has a range of its own, from the start on.

    Guarantees that no two slots that are in use share a byte, that no slot is lost, and that places depend on nothing
    but the requests and the slots in use at each of them.

    Parameters
    ----------
    nbytes
        Bytes of the block.
    buckets
        Names and bytes of the buckets. What they leave is the bucket ``""``.
    is_idle
        Tells whether nothing refers to a slot, or nothing but the graph that was captured with it.
    """

    def __init__(self, nbytes: int, buckets: dict[str, int], is_idle: Callable[[Slot, bool], bool]) -> None:
        self.nbytes = nbytes
        self._is_idle = is_idle
        self.live: dict[int, Slot] = {}  # by start
        self.buckets: dict[str, FreeList] = {}
        start = 0
        for name, size in buckets.items():
            self.buckets[name] = FreeList(start, start + rounded(size), self.live)
            start += rounded(size)
        self.buckets[""] = FreeList(start, nbytes, self.live)
        self._size_classes: dict[object, SizeClass] = {}  # by kind of request
        self._retired: dict[
            object, Slot
        ] = {}  # slots that were freed, to be live again with the storage that they have
        self.lock: AbstractContextManager[object] = threading.RLock()
        self.changing: bool = False

    # --- a slot for a request -------------------------------------------------------------------------------

    def take(
        self, identity: object, nbytes: int, stream: int, capture: int, bucket: str,
        usable: Callable[[frozenset[int]], bool] = lambda _: True, *, needed: bool = True,
    ) -> tuple[Slot, frozenset[int]] | None:  # fmt: skip
        """Return a slot for a request, and the streams that its use must be ordered after; None if there is no room.

        Also None for a request of a finalizer in the middle of another one on its thread. The caller makes the slot's
        storage, if the slot has none, and calls :meth:`push`.

        Parameters
        ----------
        identity
            What requests must have in common to get the same slot, besides stream, bucket and capture.
        nbytes
            Bytes that are asked for.
        stream
            The stream that the slot is handed out on.
        capture
            The CUDA graph capture that the slot is handed out in; 0 for none.
        bucket
            The name of the bucket.
        usable
            Tells whether a range can be used that some streams used last.
        needed
            Whether idle slots of other kinds are freed even where this makes no room.
        """
        key = identity, stream, bucket, capture
        with self.lock:
            if self.changing:
                return None
            self.changing = True
            try:
                free = self.buckets[bucket]
                size_class = self._size_classes.get(key)
                if free.fragmented:
                    self._coalesce_for_step(free, usable)
                slot = None if size_class is None else size_class.search(self._is_idle)
                if slot is not None:
                    return slot, NO_STREAMS
                size = rounded(nbytes)
                number = free.find(size, usable)
                if number is None:
                    if not needed and not self._has_room(free, size):
                        return None
                    self.coalesce_free()
                    free.fragmented = True
                    number = free.find(size, usable)
                    if number is None:
                        return None
                if size_class is None:
                    if len(self._size_classes) > LIMIT:
                        self._size_classes = {k: one for k, one in self._size_classes.items() if one.slots or one.ready}
                    size_class = self._size_classes.setdefault(key, SizeClass(*key))
                start, _, after = free.ranges[number]
                slot = self._retired.pop((start, identity), None) or Slot(start, start + size, size_class)
                slot.size_class = size_class
                slot.after = after - {stream}
                slot.asked = nbytes
                free.split(number, slot)
                if size_class.first is None:
                    size_class.first = slot
                return slot, slot.after
            finally:
                self.changing = False

    def reuse(self, size_class: SizeClass) -> Slot | None:
        """Take an idle slot of ``size_class``; None if all are in use, or where only :meth:`take` may say which one.

        Where the room is short, a step may have to begin at other places than the last one.
        """
        if self.buckets[size_class.bucket].fragmented:
            return None
        with self.lock:
            return size_class.search(self._is_idle)

    def push(self, slot: Slot) -> None:
        """Put ``slot`` back as the last that was handed out, now that it is ordered after ``slot.after``."""
        slot.after = NO_STREAMS
        slot.size_class.slots.append(slot)

    def _has_room(self, free: FreeList, size: int) -> bool:
        """Return whether ``size`` bytes of a bucket are not in use, be it in many places."""
        room = free.end - free.start - size
        return room >= 0 and sum([slot.end - slot.start for slot in free.in_use(self._is_idle)]) <= room

    def _coalesce_for_step(self, free: FreeList, usable: Callable[[frozenset[int]], bool]) -> None:
        """Free the slots of a bucket if a step begins, whose last one needed places that it could not have begun with.

        A step begins when no slot of the bucket is in use. Otherwise the slots stay: a freed range has to be ordered
        after all streams that used a part of it, and is in no size class any more. They also stay where they would not
        be ``usable``, as in a capture.
        """
        if (
            free.starts
            and free.all_idle(self._is_idle)
            and usable(frozenset([self.live[start].size_class.alloc_stream for start in free.starts]))
        ):
            free.fragmented = False
            self.coalesce_free()

    # --- back to free ranges --------------------------------------------------------------------------------

    def free(self, slot: Slot) -> None:
        """Free ``slot``, which was taken and not pushed."""
        with self.lock:
            self.changing = True
            try:
                self._retire(slot)
            finally:
                self.changing = False

    def reclaim(self, synchronize: Callable[[], None] | None = None) -> None:
        """Free all idle slots, and coalesce their ranges.

        With ``synchronize``, which blocks the host until the device is idle, their memory needs no order any more.
        """
        with self.lock:
            if self.changing:
                return
            self.changing = True
            try:
                self.coalesce_free()
                if synchronize is not None and any(free.streams for free in self.buckets.values()):
                    synchronize()
                    for free in self.buckets.values():
                        free.forget_streams()
            finally:
                self.changing = False

    def coalesce_free(self) -> None:
        """Do what :meth:`reclaim` does. The caller has the lock and has set ``changing``."""
        is_idle = self._is_idle
        for slot in tuple(self.live.values()):
            size_class = slot.size_class
            if slot in size_class.ready:
                if is_idle(slot, False):
                    with contextlib.suppress(ValueError):  # another thread was faster
                        size_class.ready.remove(slot)
                        self._retire(slot)
            # Or else an exception has left it: only ``live`` and the tuple refer to it, and maybe ``first`` of its
            # class, which must be read before the count.
            elif size_class.remove(slot, is_idle, of_graph=False) or (
                COUNTED and HELD_ONCE + 1 + (size_class.first is slot) == getrefcount(slot) and is_idle(slot, False)
            ):
                self._retire(slot)

    def _retire(self, slot: Slot) -> None:
        """Free ``slot``, which is on no list, and keep it with its storage for a request at the same place."""
        size_class = slot.size_class
        if size_class.first is slot:
            size_class.first = None
        self.buckets[size_class.bucket].coalesce(slot)
        if size_class.capture and not (size_class.slots or size_class.ready):  # a capture comes only once
            self._size_classes.pop(size_class.key, None)
        if len(self._retired) > LIMIT:
            self._retired.clear()
        self._retired[slot.start, size_class.identity] = slot

    def forget(self) -> None:
        """Drop all slots: the block is about to be freed."""
        with self.lock:
            self._size_classes.clear()
            self._retired.clear()

    # --- what is where --------------------------------------------------------------------------------------

    def in_use(self) -> list[Slot]:
        """Return the slots that are in use, in ascending order."""
        with self.lock:
            before, self.changing = self.changing, True
            try:
                found = [slot for free in self.buckets.values() for slot in free.in_use(self._is_idle)]
            finally:
                self.changing = before
            return found

    def at(self, place: int) -> Slot | None:
        """Return the slot that the byte at ``place`` is in; None if it is free."""
        with self.lock:
            before, self.changing = self.changing, True
            try:
                for free in self.buckets.values():
                    if free.start <= place < free.end:
                        return free.at(place)
                return None
            finally:
                self.changing = before

    def largest(self, bucket: str) -> int:
        """Return the bytes of the largest request that would find room in ``bucket`` now."""
        with self.lock:
            self.reclaim()
            return self.buckets[bucket].largest
