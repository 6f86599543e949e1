"""Handoffs: memory that was used on another stream than its allocation stream.

A handoff holds such memory from the use until the device has passed an event behind it, or until the allocation stream
was ordered after that event. The event is recorded when the use was launched or waited for: what the program itself
runs there later is the program's to order, as with any tensor. It knows nothing of groups. The rules are at the head of
``ledger.py``.
"""

from __future__ import annotations

import time
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from safecomm.core.holds import Hold, Queue, Sweeper, keys_of, nbytes_of
from safecomm.core.rules import Rules
from safecomm.core.streams import HOST, alloc_stream_of, capture_of

HANDOFF_SHARE = 64
"""The share of the device's memory, one part in this many, that rule 3 leaves alone in the handoffs of a stream.

More than for works: a handoff is what overlapped compute leaves, and ordering the allocation stream after it can delay
that compute.
"""


StreamKey = tuple[int, int]
"""A stream, by its handle and its device index."""


class Handoff(Hold):
    """Memory that was used on another stream than its allocation stream."""


class Handoffs:
    """The handoffs of the process, each in the queue of the stream of its use.

    Parameters
    ----------
    rules
        The rules that are shared with works.
    budget
        Bytes of one stream's handoffs that rule 3 leaves alone. None: a share of the device's memory.
    """

    def __init__(self, rules: Rules, budget: int | None = None) -> None:
        self.count: int = 0  # how often memory was used on another stream than its own
        self.queues: dict[Hashable, Queue] = {}
        self.used_on: set[StreamKey] = set()  # the streams that have, or had, queues here
        self.on_use: Callable[[], None] | None = None  # called at each use, such as to see from then on what orders it
        self._rules, self._streams, self._budget = rules, rules.streams, budget
        # What dead graphs have left: the device index, the streams, the storages, and the call site.
        self.leftovers: dict[object, tuple[int, tuple[int, ...], tuple[object, ...], types.CodeType, int]] = {}
        # Is nonempty while there are any of these, so that the next call looks after them.
        self.leftover_queue: Queue = Queue(self, rules.nonempty, self.queues, "leftovers", HOST)

    def add(
        self,
        op: str,
        group: object,
        index: int,
        storages: tuple[object, ...],
        code: types.CodeType,
        instruction: int,
        since: float,
        alloc_stream: int | None = None,
    ) -> None:
        """Hold those of ``storages`` whose allocation stream is not the current one of ``index``, where they were used.

        Parameters
        ----------
        op, code, instruction, since
            The call, where it was made, and when.
        group
            Of the call; None if there is none.
        index
            Of the device on whose current stream the storages were used.
        storages
            What the call has used.
        alloc_stream
            The one stream that all of it was allocated on, if the caller knows: asking the driver takes a while.
        """
        stream = self._streams.current(index)
        foreign: list[object] = []
        if alloc_stream is None:
            found = [(storage, alloc_stream_of(self._streams, storage, stream)) for storage in storages]
            foreign = [storage for storage, allocated_on in found if allocated_on != stream]
            known = {allocated_on for _, allocated_on in found} - {stream}
            alloc_stream = known.pop() if len(known) == 1 else None
        elif alloc_stream != stream:
            foreign = list(storages)
        if not foreign:
            return
        # To ask about the current stream takes torch less than the driver.
        capture = self._streams.capture(stream) if stream and self._streams.is_capturing(index, stream) else 0
        key = stream, index, capture
        queue = self.queues.get(key) or self.queue(key, index, stream, capture)
        self.count += 1
        hold = Handoff()
        hold.op, hold.code, hold.instruction, hold.since = op, code, instruction, since
        hold.group = None if group is None else weakref.ref(group)
        hold.queue, hold.stream, hold.alloc_stream = queue, stream, alloc_stream
        hold.storages = tuple(foreign)
        # Threads may use one stream. The order of the queue is that of the events, and of the serials.
        with self._rules.lock:
            hold.event, hold.serial = self._streams.record_event(index, stream), next(self._rules.serials)
            if not (queue.holds or capture):
                queue.next_look, queue.unseen_bytes = since + self._rules.interval, 0
            queue.holds[hold] = None
            queue.nonempty[queue] = None
        queue.unseen_bytes += nbytes_of(foreign)
        if (observer := self._rules.observer) is not None:
            observer.held(hold)
        if (on_use := self.on_use) is not None:  # read once, because another thread's use may take it away
            on_use()

    def queue(
        self,
        key: Hashable,
        index: int,
        stream: int,
        capture: int,
        make: Callable[..., Queue] = Queue,
        by: Sweeper | None = None,
    ) -> Any:
        """Return the queue under ``key``, made by ``make`` if there is none, whose holds ``by`` decides about."""
        queue = self.queues.get(key)
        if queue is None:
            budget = self._budget
            if budget is None:
                budget = self._streams.capacity(index) // HANDOFF_SHARE
            self.used_on.add((stream, index))
            nonempty = self._rules.nonempty
            queue = self.queues[key] = make(by or self, nonempty, self.queues, key, index, stream, capture, budget)
        return queue

    # --- what graphs leave ------------------------------------------------------------------------------------

    def add_leftover(
        self, index: int, streams: tuple[int, ...], storages: tuple[object, ...], code: types.CodeType, instruction: int
    ) -> None:
        """Take over ``storages``, which only graphs have used, on ``streams``. May be called from a destructor."""
        self.leftovers[object()] = index, streams, storages, code, instruction
        self._rules.nonempty[self.leftover_queue] = None

    def convert_leftovers(self) -> None:
        """Make handoffs of what graphs have left, as far as the streams of its use are not being captured."""
        for key in keys_of(self.leftovers):
            leftover = self.leftovers.get(key)
            if leftover is not None and self._convert(*leftover):  # two threads make two handoffs
                self.leftovers.pop(key, None)
        if not self.leftovers:
            self._rules.nonempty.pop(self.leftover_queue, None)
            if self.leftovers:  # a graph died in between
                self._rules.nonempty[self.leftover_queue] = None

    def _convert(
        self, index: int, streams: tuple[int, ...], storages: tuple[object, ...], code: types.CodeType, instruction: int
    ) -> bool:
        # A graph is replayed through its object, which notes the stream. For a graph that was not, the stream that is
        # current now is the best guess.
        streams = streams or (self._streams.current(index),)
        if any(capture_of(self._streams, stream) for stream in streams):
            return False
        for stream in streams:
            with self._streams.using(index, stream):
                self.add("a CUDA graph", None, index, storages, code, instruction, time.perf_counter())
        return True

    # --- what goes ----------------------------------------------------------------------------------------------

    def sweep_queue(self, queue: Queue, capturing: int, *, thorough: bool) -> None:
        if queue.capture:
            if queue.capture == capturing:
                for hold in keys_of(queue.holds):
                    if self._can_be_ordered(hold):
                        self.order_and_release(hold)
            elif self._streams.capture(queue.stream) != queue.capture:
                self._rules.release_all(queue.holds)  # the capture is over, and its memory is the graph's
        elif not capturing:  # polling an event inside a capture would break the capture
            queue.next_look, queue.unseen_bytes = time.perf_counter() + self._rules.interval, 0
            # Ordered streams pause once, behind the last wait. They go on where a collective ends, which is where the
            # next one begins. A large kernel that they start first would hold that one up, by up to 0.14 ms for a
            # matmul of 0.25 ms.
            for stream in self._release_oldest(queue):
                # Another thread may have begun to capture it since, and each replay would pause.
                if not capture_of(self._streams, stream):
                    self._streams.pause(queue.index, stream)

    def _release_oldest(self, queue: Queue) -> set[int]:
        """Release what is complete or too far behind, from the oldest on; return the streams that were made to wait."""
        ordered: set[int] = set()
        while (hold := queue.first()) is not None:
            with self._rules.lock:
                if hold not in queue.holds:
                    continue  # another thread has released it, and may have recorded its event in a capture
                complete = self._streams.query_event(hold.event)
                if not complete and (not self.too_far_behind(queue, hold) or self._rules.captured_now(hold)):
                    break
                ordered |= self.order_and_release(hold, complete=complete)
        return ordered

    def _can_be_ordered(self, hold: Handoff) -> bool:
        """Return whether only the ledger keeps what a captured handoff holds, and an edge of the graph can order it."""
        capture = hold.queue.capture
        streams = self._rules.alloc_streams(hold)
        in_capture = all(stream is not None and self._streams.capture(stream) == capture for stream in streams)
        return in_capture and self._rules.only_holder(hold)

    def too_far_behind(self, queue: Queue, hold: Hold) -> bool:
        """Return whether rule 3 applies: too much has piled up, and ordering a stream would bring the memory back."""
        # What the caller still refers to would not come back by ordering anything.
        return (
            queue.too_far_behind(self._rules.lag)
            and self._rules.only_holder(hold)
            and None not in self._rules.alloc_streams(hold)
        )

    def order_and_release(self, hold: Hold, *, complete: bool = False) -> set[int]:
        """Order the streams that the memory can be given out again on after the event of ``hold``, and release it.

        Returns the streams that were made to wait.

        Parameters
        ----------
        hold
            A handoff, or a recorded use that nobody else uses any more.
        complete
            The event is complete, so that nothing has to be ordered.
        """
        index = hold.queue.index
        with self._rules.lock:
            if hold not in hold.queue.holds:
                return set()  # another thread has released it
            streams = () if complete else self._rules.alloc_streams(hold)
            ordered = {stream for stream in streams if stream is not None and stream != hold.stream}
            for stream in ordered:
                self._streams.wait_event(index, stream, hold.event)
            self._rules.release(hold)
        return ordered
