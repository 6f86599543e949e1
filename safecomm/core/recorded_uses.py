"""Recorded uses: memory that ``record_stream`` was called for, while it is converted.

A recorded use holds the memory while others use it too. When nobody else does, it records an event on the stream of
the use, and is a handoff from then on. The rules are at the head of ``ledger.py``.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from safecomm._torch import KEPT, cdata_of, only_holder
from safecomm.core.handoffs import Handoffs
from safecomm.core.holds import SHARE, Hold, Queue, _pile_up, first_of, keys_of
from safecomm.core.refcounts import COUNTED, HELD_ONCE, getrefcount
from safecomm.core.rules import Rules
from safecomm.core.streams import alloc_stream_of, capture_of

SCAN = 64
"""Holds of a queue that one call looks at in a capture, and where a stream is about to wait."""

FEW = 4
"""Elsewhere a look is at all that have come since the last one, at the ``FEW`` newest in any case, and then at the rest
in turn, until too many were still used.

What was recorded last is mostly freed first, because backward frees in the opposite order. A program that records
every activation has hundreds, at which no call can look. Too many are ``FEW``, and twice as many as have come since the
last look: unused ones must not become more than are found.
"""

_now = time.perf_counter


class RecordedUse(Hold):
    """Memory that ``record_stream`` was called for."""

    op: str = "record_stream"
    in_a_table: bool = True
    queue: RecordedUseQueue
    storages: tuple[torch.UntypedStorage, ...]
    pointer: int  # of the memory for which record_stream was called last, which alloc_stream is of
    release_by: str  # "auto", or the one way to give it back: "order" or "defer"
    unordered: bool  # the allocation stream does not matter: it is deferred

    def on_release(self) -> None:
        if self.storages:
            by_storage = self.queue.sweeper.by_storage
            cdata = cdata_of(self.storages[0])
            uses = by_storage.get(cdata, {})
            key = self.stream, self.queue.index, self.queue.capture
            if uses.get(key) is self:
                # At once, because what counts as a recorded use of the storage has to refer to it: else somebody's use
                # is taken for a recorded one.
                self.storages = ()
                del uses[key]
                if not uses:
                    del by_storage[cdata]
        self.queue.unused.pop(self, None)

    def surely_used(self) -> bool:
        """Return whether others still use the memory, where the count of C++ alone tells that, without the lock."""
        storages = self.storages  # with a reference of ours, because another thread may release it just now
        return self.event is None and bool(storages) and not only_holder(storages[0])

    def waits_for_others(self) -> bool:
        return self.queue.sweeper.in_use(self)

    @property
    def state(self) -> str:
        return "recorded" if self.event is None else super().state


class RecordedUseQueue(Queue):
    """The recorded uses of one stream."""

    __slots__ = ("fresh", "scan", "unseen", "unused")

    sweeper: RecordedUses

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Those that nobody else uses any more, in the order of their events.
        self.unused: OrderedDict[RecordedUse, None] = OrderedDict()
        self.scan: list[RecordedUse] = []  # the rest of those that next() gives
        # How many came since the newest were last looked at, and since others were.
        self.fresh, self.unseen = 0, 0

    def next(self) -> RecordedUse | None:
        """Return one hold, call after call all that there are; it may have been released since."""
        while self.holds:
            try:
                return self.scan.pop()
            except IndexError:
                self.scan = list(self.holds)
        self.scan = []
        return None

    def too_far_behind(self, lag: int) -> bool:
        return _pile_up(self.unused, lag, self.budget)


class RecordedUses:
    """The recorded uses of the process, each in the queue of the stream that ``record_stream`` was called with.

    Parameters
    ----------
    rules
        The rules that are shared with works.
    handoffs
        What recorded uses become.
    """

    def __init__(self, rules: Rules, handoffs: Handoffs) -> None:
        # Then by stream, device index and capture: each device has a default stream of the handle 0.
        self.by_storage: dict[int, dict[tuple[int, int, int], RecordedUse]] = {}
        self.sweep_due: bool = False  # what has come since a sweep is of a capture, or so much that rule 3 might apply
        self._rules, self._streams, self._handoffs = rules, rules.streams, handoffs

    def add(
        self,
        storage: torch.UntypedStorage,
        index: int,
        stream: int,
        frame: types.FrameType,
        release_by: str = "auto",
        *,
        unordered: bool = False,
    ) -> bool:
        """Hold ``storage``, used on ``stream`` until nobody refers to it, as ``record_stream`` asks for.

        Returns whether the memory is safe: held, or used on its allocation stream. If not, ``record_stream`` is the
        allocator's, also where nobody can tell when others let go of the storage.

        Parameters
        ----------
        storage, index, stream, frame
            What ``record_stream`` was called for, the device index, the stream, and where.
        release_by
            How the memory comes back. ``"order"``: the allocation stream is ordered after ``stream``, as soon as nobody
            else refers to the storage. ``"defer"``: once the device has passed that point of ``stream``. ``"auto"``:
            whatever comes first, but the former only when too much has piled up, or in a capture.
        unordered
            Also hold memory whose allocation stream is unknown or of another device. It can only be deferred then.
        """
        if not COUNTED:
            return False
        pointer = storage.data_ptr()
        allocated_on = None if unordered else self._streams.alloc_stream(pointer) if pointer else stream
        if allocated_on == stream or (allocated_on is None and not unordered):
            return allocated_on is not None
        capture = capture_of(self._streams, stream)
        rules, cdata, key = self._rules, cdata_of(storage), (stream, index, capture)
        with rules.lock:
            hold = self.by_storage.get(cdata, {}).get(key)
            if hold is not None and hold.event is None:
                hold.pointer, hold.alloc_stream = pointer, allocated_on
                return True
            queue = self._handoffs.queue(("recorded", *key), index, stream, capture, RecordedUseQueue, self)
            hold = RecordedUse()
            hold.code, hold.instruction, hold.since = frame.f_code, frame.f_lasti, _now()
            hold.stream, hold.alloc_stream, hold.pointer = stream, allocated_on, pointer
            hold.release_by, hold.unordered = "defer" if unordered else release_by, unordered
            hold.queue, hold.storages = queue, (storage,)
            if not (queue.holds or capture):
                queue.next_look, queue.unseen_bytes = hold.since + rules.interval, 0
            uses = self.by_storage.get(cdata, {})
            queue.holds[hold] = None
            queue.nonempty[queue] = None
            uses[key] = hold
            self.by_storage[cdata] = uses
            queue.fresh += 1
            queue.unseen += 1
            queue.unseen_bytes += storage.nbytes()
            self.sweep_due |= capture != 0 or SHARE * queue.unseen_bytes > queue.budget
            if (observer := rules.observer) is not None:
                observer.held(hold)
        return True

    def in_use(self, hold: RecordedUse) -> bool:
        """Return whether others still use the memory of ``hold``."""
        with self._rules.lock:
            return hold.event is None and not self._only_recorded(hold)

    def _only_recorded(self, hold: RecordedUse) -> bool:
        """Return whether nobody but recorded uses refers to the storage of ``hold``, neither in C++ nor in Python."""
        if not hold.storages:
            return False  # another thread has released it
        (storage,) = hold.storages
        cdata = cdata_of(storage)
        shared = max(len(self.by_storage.get(cdata, ())) - 1, 0) + len(KEPT.get(cdata, ()))
        return getrefcount(storage) - shared <= HELD_ONCE and only_holder(storage)

    def _alloc_stream(self, hold: RecordedUse, storage: torch.UntypedStorage) -> int | None:
        """Return the stream that ``storage``, which ``hold`` has, was allocated on; None if it is unknown."""
        # Each call of record_stream has asked. Other memory it can have got since, where nobody saw it (C++).
        same = hold.alloc_stream is not None and storage.data_ptr() == hold.pointer
        return hold.alloc_stream if same else alloc_stream_of(self._streams, storage, hold.stream)

    # --- rule 1: ordered ------------------------------------------------------------------------------------

    def queue_of(self, stream: int, index: int, capture: int) -> RecordedUseQueue | None:
        """Return the queue of the uses on that stream of device ``index``, in that capture; None if there are none."""
        queue = self._handoffs.queues.get(("recorded", stream, index, capture)) if self.by_storage else None
        return queue if isinstance(queue, RecordedUseQueue) and queue.holds else None

    def look(self, queue: RecordedUseQueue, *, at_newest: bool = False) -> None:
        """Record events for those of ``queue`` that nobody else uses any more, as far as a few looks find them.

        ``at_newest``: looks at the newest alone, but in a capture.
        """
        if queue.capture:
            for hold in queue.oldest(SCAN):
                if not self._see(queue, hold):
                    with contextlib.suppress(KeyError):
                        queue.holds.move_to_end(hold)
            return
        newest, queue.fresh = min(max(FEW, queue.fresh), SCAN), 0
        for hold in queue.newest(newest):
            self._see(queue, hold)
        if not at_newest:
            self._see_others(queue)

    # --- rules 2 and 3: complete, or too far behind -----------------------------------------------------------

    def sweep_queue(self, queue: RecordedUseQueue, capturing: int, *, thorough: bool) -> None:
        capture = capture_of(self._streams, queue.stream)
        if queue.capture and capture != queue.capture:
            self._rules.release_all(queue.holds)  # the capture is over: what it has recorded runs when the graph does
        elif capture == queue.capture == capturing:
            if capture:
                self.look(queue)
                return
            # All of it can fall unused in a moment, and nobody tells. Where that would be too much, each call looks.
            much = _pile_up(queue.holds, self._rules.lag, queue.budget)
            self.sweep_due, queue.unseen_bytes = False, 0
            queue.next_look = 0.0 if much else _now() + self._rules.interval
            if thorough:
                for hold in keys_of(queue.holds):
                    self._see(queue, hold)
            else:
                self.look(queue)
            self._sweep_unused(queue)

    def _see_others(self, queue: RecordedUseQueue) -> None:
        """Look at holds in turn, until too many are still used."""
        in_vain, enough = 0, FEW + 2 * queue.unseen
        queue.unseen = 0
        for _ in range(min(max(SCAN, enough), len(queue.holds) + len(queue.scan))):
            if in_vain >= enough or (hold := queue.next()) is None:
                return
            if hold.event is None or not hold.storages:
                self._see(queue, hold)
                in_vain += hold.event is None

    def _see(self, queue: RecordedUseQueue, hold: RecordedUse) -> bool:
        """Note if nobody else uses the memory of ``hold``, and in a capture release it; return whether it is gone."""
        if hold.surely_used():
            return False
        with self._rules.lock:
            if not hold.storages:
                self._rules.release(hold)  # another thread is about to
                return True
            if hold.event is None:
                if not self._only_recorded(hold):
                    return False
                stream = self._alloc_stream(hold, hold.storages[0])
                if capture_of(self._streams, stream or 0) != queue.capture:
                    return False  # allocated outside of this capture, or inside of one that is going on elsewhere
                event = self._streams.record_event(queue.index, queue.stream)
                if capture_of(self._streams, queue.stream) != queue.capture:
                    return False  # another thread has begun a capture in between, and the event may be of it
                serial, alloc_stream = next(self._rules.serials), None if hold.unordered else stream
                hold.event, hold.serial, hold.alloc_stream = event, serial, alloc_stream
                if not queue.capture:
                    queue.unused[hold] = None
                    with contextlib.suppress(KeyError):
                        queue.holds.move_to_end(hold, last=False)  # out of the way of those that are still used
            at_once = queue.capture or hold.release_by == "order"
            # Memory that came unseen (C++) can be of a stream that is unknown: nothing can be ordered then.
            if not at_once or None in self._rules.alloc_streams(hold) or self._rules.captured_now(hold):
                return False
            self._handoffs.order_and_release(hold)
            return True

    def _sweep_unused(self, queue: RecordedUseQueue) -> None:
        """Give back what nobody else uses any more, in the order in which the device gets there, and by rule 3."""
        unused = queue.unused
        while unused:
            with self._rules.lock:
                hold = next(iter(first_of(unused, 1)), None)
                if hold is None or not self._streams.query_event(hold.event):
                    break
                self._handoffs.order_and_release(hold, complete=True)
                unused.pop(hold, None)  # if another thread has taken it
        if queue.too_far_behind(self._rules.lag):
            for hold in keys_of(unused):
                with self._rules.lock:
                    if hold in unused and hold.release_by == "auto" and not self._rules.captured_now(hold):
                        if not self._handoffs.too_far_behind(queue, hold):
                            return
                        self._handoffs.order_and_release(hold)

    # --- memory that frees itself, and the end ----------------------------------------------------------------

    def freeing(self, storage: torch.UntypedStorage, *, order: bool = True) -> list[tuple[int, int]]:
        """Make it safe that ``storage`` is about to free its memory by itself, which no reference can keep.

        Orders the allocation stream after those that ``record_stream`` was called with. Returns those with which that
        can't be done, or with ``order=False`` all of them, as pairs of device index and stream: they are the
        allocator's to keep in order. Once the memory is gone, :meth:`freed` is to be called.
        """
        left = []
        with self._rules.lock:
            for (stream, _, _), hold in tuple(self.by_storage.get(cdata_of(storage), {}).items()):
                queue = hold.queue
                allocated_on = None if hold.unordered else self._alloc_stream(hold, storage)
                captures = {capture_of(self._streams, stream), capture_of(self._streams, allocated_on or 0)}
                if order and captures == {queue.capture} and allocated_on is not None:
                    event = self._streams.record_event(queue.index, stream)
                    self._streams.wait_event(queue.index, allocated_on, event)
                    if not queue.capture:
                        self._streams.recycle_event(queue.index, event)
                else:
                    left.append((queue.index, stream))
        return left

    def freed(self, storage: torch.UntypedStorage) -> None:
        """Forget what ``storage`` was recorded for: that memory is gone, after :meth:`freeing`."""
        with self._rules.lock:
            self._rules.release_all(self.by_storage.get(cdata_of(storage), {}).values())

    def hand_over(self, give: Callable[[Any, int, int], object]) -> None:
        """Release recorded uses after ``give`` was called with what each holds, the device index, and the stream.

        But for those of captures, and of memory that an arena keeps, for which the allocator would do nothing. Those go
        on as they are, at the next calls of safecomm.
        """
        for queue in keys_of(self._rules.nonempty):
            if isinstance(queue, RecordedUseQueue) and not queue.capture:
                for hold in keys_of(queue.holds):
                    with self._rules.lock:
                        for storage in hold.storages:
                            if cdata_of(storage) not in KEPT:
                                give(storage, queue.index, queue.stream)
                                self._rules.release(hold)
