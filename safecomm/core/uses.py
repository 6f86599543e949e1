"""Uses: memory that was used on another stream than its allocation stream.

A use holds such memory until the device has passed an *event* behind the last use, or until the allocation stream was
ordered after that event. Of a collective, or of a wait, the event is recorded at the next call of safecomm at the
latest: what the program itself runs there later is the program's to order, as with any tensor. So is that of a CUDA
graph, once the graph is reset or dead. They are in a queue for each stream, in the order of their events
(:class:`Events`). Of ``record_stream``, the event is recorded once the last use is over, when no other reference is
left. Until then they wait in queues of their own (:class:`Waiting`). The rules are at the head of ``ledger.py``.
"""

from __future__ import annotations

import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from safecomm._torch import KEPT, cdata_of, only_holder
from safecomm.core.call_site import called_from
from safecomm.core.holds import Hold, Holds, Queue, keys_of
from safecomm.core.refcounts import COUNTED, HELD_ONCE, getrefcount
from safecomm.core.streams import alloc_stream_of, capture_of

# What it is worth: see ledger.py.
BUDGET_SHARE = 64
"""The share of the device's memory, one part in this many, that rule 3 leaves alone in the uses of a stream.

More than for works: a use is what overlapped compute leaves, and ordering the allocation stream after it can delay that
compute.
"""

_now = time.perf_counter

StreamKey = tuple[int, int]
"""A stream, by its handle and its device index."""

Q = TypeVar("Q", bound="UseQueue")


class Use(Hold):
    """Memory that was used on another stream than its allocation stream."""

    queue: UseQueue
    storages: tuple[Any, ...]
    pointer: int = 0  # of the memory for which record_stream was called last, which alloc_stream is of
    release_by: str = "auto"  # "order": by rule 3 however little has piled up; "defer": never by rule 3
    unordered: bool = False  # the allocation stream does not matter: it is deferred

    def on_release(self) -> None:
        if self.storages:
            by_storage = self.queue.uses.by_storage
            cdata = cdata_of(self.storages[0])
            recorded = by_storage.get(cdata, {})
            key = self.stream, self.queue.index, self.queue.capture
            if recorded.get(key) is self:
                # At once, because what counts as a recorded use of the storage has to refer to it: else a program's use
                # is taken for a recorded one.
                self.storages = ()
                del recorded[key]
                if not recorded:
                    del by_storage[cdata]

    def in_use(self) -> bool:
        with self.queue.ledger.lock:
            return self.event is None and self.in_a_table and not self.queue.uses.only_recorded(self)

    @property
    def state(self) -> str:
        return "recorded" if self.event is None and self.in_a_table else "handed off"


class UseQueue(Queue):
    """Uses of one stream, in one capture or in none."""

    __slots__ = ("eventless", "lasting", "uses")

    def __init__(self, uses: Uses, stream: int, index: int, capture: int = 0) -> None:
        key = type(self), stream, index, capture
        budget = uses.ledger.streams.capacity(index) // BUDGET_SHARE if uses.budget is None else uses.budget
        super().__init__(uses.ledger, uses.queues, key, index, stream, capture, budget)
        self.uses: Uses = uses
        self.eventless: dict[Use, None] = {}  # those of Events that have no event as yet
        self.lasting: bool | None = None  # asked at the first use, when the stream is the current one


class Events(UseQueue):
    """The uses of a stream that are over, in the order of their events.

    The newest may be *eventless* as yet. Mostly the program lets the allocation stream wait behind a use at once. What
    it waits for is behind the use as well, and an event of ours would only take time (``StreamOrder.wait_stream``).
    Else ours is recorded before the next event of the program there, or as the next call of safecomm begins. A stream
    that can be destroyed before that is not :attr:`lasting`, and its uses have events at once, as those of captures do.
    What a graph has left has none before the next call, because a destructor records no event.
    """

    __slots__ = ()

    def has_before(self, serial: int) -> bool:
        """Return whether the event of the oldest is below ``serial``."""
        oldest = self.first()
        return oldest is not None and oldest.serial < serial

    def allocated_on(self, stream: int) -> list[Use]:
        """Return the eventless whose memory comes back once ``stream`` waits for this one; none in captures."""
        # Nothing is known of a stream that may have been destroyed since.
        if not self.lasting or capture_of(self.ledger.streams, stream) or capture_of(self.ledger.streams, self.stream):
            return []
        both, alloc_streams = {stream, self.stream}, self.ledger.alloc_streams
        return [
            use
            for use in keys_of(self.eventless)
            if use.alloc_stream == stream or (alloc_streams(use) <= both and not use.unordered)
        ]

    def record_events(self) -> None:
        """Record an event behind each of the eventless, unless the stream is captured elsewhere."""
        ledger, stream, capture = self.ledger, self.stream, self.capture
        capture_now: Callable[[int], int] = ledger.streams.capture if stream else int  # as capture_of(), and sooner
        if capture_now(stream) != capture:
            return
        with ledger.lock:
            if not capture and len(self.holds) <= len(self.eventless):
                self.look_later(_now())
            for use in list(self.eventless):
                if (event := use.event) is None and use in self.holds:  # else it was released, or an exception has come
                    event = ledger.streams.record_event(self.index, stream)
                    if capture_now(stream) != capture:
                        return  # another thread has begun a capture in between, and the event may be of it
                    use.event, use.serial = event, next(ledger.serials)
                self.eventless.pop(use, None)

    def sweep(self, capturing: int, *, thorough: bool) -> None:
        ledger, uses, streams = self.ledger, self.uses, self.ledger.streams
        if self.capture:
            if self.capture == capturing:
                for use in keys_of(self.holds):
                    if use.event and ledger.only_holder(use) and (known := uses.orderable(use)) is not None:
                        uses.order_and_release(use, known)
            elif streams.capture(self.stream) != self.capture:
                ledger.release_all(self.holds)  # the capture is over: what it uses, its graph has, or has leased
            return
        if capturing:
            return  # polling an event inside a capture would break the capture
        if self.eventless:
            self.record_events()
        while (use := self.first()) is not None:
            with ledger.lock:
                if use in self.holds:  # else another thread has released it, and may have recorded its event again
                    if use.event is None and use.storages:
                        self.eventless[use] = None  # an exception may have come before
                        break
                    if use.event is not None and not streams.query_event(use.event):
                        break
                    uses.order_and_release(use, ())  # its event is complete, or an exception came as it was released
        self.look_later(_now())
        self._order_oldest()

    def _order_oldest(self) -> None:
        """Release what is too far behind, from the oldest on, by rule 3."""
        ledger, behind = self.ledger, self.too_far_behind()
        for use in keys_of(self.holds):
            with ledger.lock:
                if use not in self.holds or use.release_by == "defer":
                    continue
                if use.release_by == "auto" and not behind:
                    break
                # What the caller still refers to would not come back by ordering anything.
                if (
                    use.event is not None
                    and (use.release_by == "order" or ledger.only_holder(use))
                    and (streams := self.uses.orderable(use)) is not None
                ):
                    self.uses.order_and_release(use, streams)
                    behind = self.too_far_behind()  # asked here alone, because it takes longer than the rest


class Waiting(UseQueue):
    """The uses of ``record_stream`` on a stream whose memory others still have."""

    __slots__ = ("events", "fresh", "scan", "unseen")

    waits_for_others = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.events: Events = self.uses.queue(Events, *given[1:4])  # that they go on to
        self.scan: list[Use] = []  # the rest of those that next() gives
        # How many came since the newest were last looked at, and since others were.
        self.fresh, self.unseen = 0, 0

    def look(self, *, at_newest: bool = False) -> None:
        """Record events for those that are unused by now, as far as a few looks find them.

        What was recorded last is mostly freed first, because backward frees in the opposite order. A program that
        records every activation has hundreds, at which no call can look. So a look is at those that have come since the
        last one, which mostly are still in use, and at as many before, or at the newest. Then it is at the rest in
        turn, until as many were in vain as keep what is unused from piling up: twice as many as have come.

        ``at_newest``: looks at the newest alone.
        """
        see = self.uses.see
        newest, self.fresh = max(2 * self.fresh, 1), 0
        for use in self.newest(newest):
            see(self, use)
        if at_newest:
            return
        in_vain, enough = 0, 1 + 2 * self.unseen
        self.unseen = 0
        for _ in range(len(self.holds) + len(self.scan)):
            if in_vain >= enough:
                return
            with self.ledger.lock:  # another thread may take the last one
                self.scan = self.scan or keys_of(self.holds)
                found = self.scan.pop() if self.scan else None
            in_vain += found is not None and not see(self, found)

    def sweep(self, capturing: int, *, thorough: bool) -> None:
        capture = capture_of(self.ledger.streams, self.stream)
        if self.capture and capture != self.capture:
            self.ledger.release_all(self.holds)  # the capture is over: what it has recorded runs when the graph does
            for use in keys_of(self.holds):  # left by an exception, and released
                self.uses.see(self, use)
        elif capture == self.capture == capturing:
            # All of it can fall unused in a moment, without a sign. Where that would be too much, each call looks.
            much = self.too_far_behind()
            if thorough:
                for use in keys_of(self.holds):
                    self.uses.see(self, use)
            else:
                self.look()
            self.look_later(0.0 if much or capture else _now())
            if self.events.holds:
                self.events.sweep(capturing, thorough=thorough)


class Uses:
    """The uses of the process.

    Parameters
    ----------
    ledger
        The holds that they are part of.
    budget
        Bytes of one stream's uses that rule 3 leaves alone. None: a share of the device's memory.
    """

    def __init__(self, ledger: Holds, budget: int | None = None) -> None:
        self.count: int = 0  # how often use() has held memory
        self.queues: dict[Hashable, Any] = {}
        self.used_on: set[StreamKey] = set()  # the streams that have, or had, queues here
        # Called at each use() of a stream, such as to see from then on what orders it.
        self.on_use: Callable[[], None] | None = None
        # What record_stream was called for: by the storage's address in C++, then by stream, device index (each device
        # has a default stream 0) and capture.
        self.by_storage: dict[int, dict[tuple[int, int, int], Use]] = {}
        self.ledger: Holds = ledger
        self._streams, self.budget = ledger.streams, budget

    def queue(self, kind: type[Q], stream: int, index: int, capture: int = 0) -> Q:
        """Return the queue of that kind for uses on ``stream`` of device ``index``, made if there is none."""
        queue: Q | None = self.queues.get((kind, stream, index, capture))
        if queue is None:
            self.used_on.add((stream, index))
            made = kind(self, stream, index, capture)
            # Once it is complete, because other threads find it there, which may also have made one.
            queue = self.queues.setdefault(made.key, made)
        return queue

    # --- used, and over -----------------------------------------------------------------------------------------

    def use(
        self,
        op: str,
        group: object,
        index: int,
        storages: tuple[object, ...],
        call: types.FrameType | Hold,
        alloc_stream: int | None = None,
    ) -> None:
        """Hold those of ``storages``, used on the current stream of ``index``, that were allocated on another (S1).

        Parameters
        ----------
        op, group
            The call, and its group, None if there is none.
        index
            Of the device on whose current stream the storages were used.
        storages
            What the call has used.
        call
            Where it was made: its frame, or a hold of it.
        alloc_stream
            The one stream that all of it was allocated on, if the caller knows: asking the driver takes a while.
        """
        streams = self._streams
        stream = streams.current(index)
        if alloc_stream == stream:
            return
        if alloc_stream is None:
            # What was allocated on this stream needs no hold.
            found = [(storage, alloc_stream_of(streams, storage, stream)) for storage in storages]
            storages = tuple([storage for storage, allocated_on in found if allocated_on != stream])
            known = {allocated_on for _, allocated_on in found} - {stream}
            alloc_stream = known.pop() if len(known) == 1 else None
            if not storages:
                return
        # To ask about the current stream takes torch less than the driver.
        capture = streams.capture(stream) if stream and streams.is_capturing(index, stream) else 0
        queue = self.queues.get((Events, stream, index, capture)) or self.queue(Events, stream, index, capture)
        if (lasting := queue.lasting) is None:
            lasting = queue.lasting = not capture and streams.is_lasting(index, stream)
        use = Use()
        if isinstance(call, Hold):
            use.code, use.instruction, use.since = call.code, call.instruction, call.since
        else:
            (use.code, use.instruction), use.since = called_from(call), _now()
        use.op, use.group = op, None if group is None else weakref.ref(group)
        use.queue, use.stream, use.storages, use.alloc_stream = queue, stream, storages, alloc_stream
        self.count += 1
        # In this order, which needs no lock: what is held and has no event yet, a sweep takes for eventless.
        queue.holds[use] = queue.nonempty[queue] = queue.eventless[use] = None
        if not lasting:
            queue.record_events()
        if (observer := self.ledger.observer) is not None:
            observer.held(use)
        if (on_use := self.on_use) is not None:  # read once, because another thread's use may take it away
            on_use()

    def add_of_graph(
        self,
        index: int,
        replayed: tuple[int, ...],
        storages: tuple[object, ...],
        code: types.CodeType,
        instruction: int,
    ) -> None:
        """Take over ``storages``, which only a graph has used, on ``replayed``. May be called from a destructor."""
        # A graph is replayed through its object, which notes the stream. For a graph that was not, the stream that is
        # current now is the best guess.
        for stream in replayed or (self._streams.current(index),):
            use, queue = Use(), self.queue(Events, stream, index)
            use.op, use.code, use.instruction, use.since = "a CUDA graph", code, instruction, _now()
            use.queue, use.stream, use.storages = queue, stream, storages
            queue.holds[use] = queue.nonempty[queue] = queue.eventless[use] = None

    def orderable(self, hold: Hold) -> set[int] | None:
        """Return the streams that the memory of ``hold`` was allocated on; None if they may not be made to wait now."""
        capture, streams = hold.queue.capture, self.ledger.alloc_streams(hold)
        if None in streams:
            return None
        known = {stream for stream in streams if stream is not None}
        if capture:
            return known if all(self._streams.capture(stream) == capture for stream in known) else None
        # Another thread that captures may take any other stream in before the wait, which would end its capture.
        elsewhere = known and known - {self._streams.current(hold.queue.index)}
        captured = elsewhere and (
            self.ledger.records_capture() or any(capture_of(self._streams, stream) for stream in elsewhere)
        )
        return None if captured else known

    def order_and_release(self, use: Use, streams: Iterable[int]) -> None:
        """Order ``streams`` after the event of ``use``, and release it.

        They are all that the memory can be given out again on; none need be ordered where the event is complete.
        """
        with self.ledger.lock:
            if use in use.queue.holds:  # else another thread has released it
                for stream in streams:
                    self._streams.wait_event(use.queue.index, stream, use.event)
                self.ledger.release(use)

    # --- recorded, and used by others ---------------------------------------------------------------------------

    def record(
        self,
        storage: torch.UntypedStorage,
        index: int,
        stream: int,
        frame: types.FrameType,
        release_by: str = "auto",
        *,
        unordered: bool = False,
    ) -> bool:
        """Hold ``storage``, used on ``stream`` until no reference is left, as ``record_stream`` asks for.

        Returns whether the memory is safe: held, or used on its allocation stream. If not, ``record_stream`` is the
        allocator's, also where it can't be told when others let go of the storage.

        Parameters
        ----------
        storage, index, stream, frame
            What ``record_stream`` was called for, the device index, the stream, and where.
        release_by
            How the memory comes back. ``"order"``: the allocation stream is ordered after ``stream``, once nothing
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
        cdata, key = cdata_of(storage), (stream, index, capture)
        with self.ledger.lock:
            queue = self.queue(Waiting, *key)
            use = self.by_storage.get(cdata, {}).get(key)
            if use is not None and use.queue is queue:
                use.pointer, use.alloc_stream = pointer, allocated_on
                return True
            use = Use()
            use.op, use.in_a_table = "record_stream", True
            use.code, use.instruction, use.since = frame.f_code, frame.f_lasti, _now()
            use.stream, use.alloc_stream, use.pointer = stream, allocated_on, pointer
            use.release_by, use.unordered = "defer" if unordered else release_by, unordered
            use.queue, use.storages = queue, (storage,)
            recorded = self.by_storage.get(cdata, {})
            queue.holds[use] = queue.nonempty[queue] = None
            if len(queue.holds) == 1 and not capture:
                queue.look_later(use.since)
            recorded[key] = use
            self.by_storage[cdata] = recorded
            queue.fresh += 1
            queue.unseen += 1
            if (observer := self.ledger.observer) is not None:
                observer.held(use)
        return True

    def only_recorded(self, use: Use) -> bool:
        """Return whether recorded uses alone refer to the storage of ``use``, neither in C++ nor in Python."""
        if not use.storages:
            return False  # another thread has released it
        (storage,) = use.storages
        cdata = cdata_of(storage)
        shared = max(len(self.by_storage.get(cdata, ())) - 1, 0) + len(KEPT.get(cdata, ()))
        return getrefcount(storage) - shared <= HELD_ONCE and only_holder(storage)

    def see(self, queue: Waiting, use: Use) -> bool:
        """Record the event of ``use`` if no other reference is left; return whether it is no longer in ``queue``.

        In a capture, and of ``release_by="order"``, its allocation stream is then ordered and the use released, if that
        stream may be made to wait.
        """
        storages, events = use.storages, queue.events  # with a reference, as another thread may release it just now
        # Where the count of C++ alone tells that others use the memory, the lock is not needed.
        if use.queue is queue and storages and not only_holder(storages[0]):
            return False
        with self.ledger.lock:
            if use not in queue.holds:
                return True
            if not use.storages:
                # Another thread is about to, or an exception has come as the use left this queue.
                self.ledger.release(use)
            else:
                if use.queue is queue:
                    if not self.only_recorded(use):
                        return False
                    stream = self._alloc_stream(use, use.storages[0])
                    if capture_of(self._streams, stream or 0) != queue.capture:
                        return False  # allocated outside of this capture, or inside of one that goes on elsewhere
                    use.alloc_stream = None if use.unordered else stream
                # First into the one, then out of the other: an exception in between leaves it in both.
                use.queue = events
                events.holds[use] = events.nonempty[events] = events.eventless[use] = None
            queue.holds.pop(use, None)
            queue.note_empty()
            events.record_events()
            at_once = use.event is not None and (queue.capture or use.release_by == "order")
            if at_once and (streams := self.orderable(use)) is not None:
                self.order_and_release(use, streams)
            return True

    def _alloc_stream(self, use: Use, storage: torch.UntypedStorage) -> int | None:
        """Return the stream that ``storage``, which ``use`` has, was allocated on; None if it is unknown."""
        # Each call of record_stream has asked. Other memory it can have got since, where it was not seen (C++).
        same = use.alloc_stream is not None and storage.data_ptr() == use.pointer
        return use.alloc_stream if same else alloc_stream_of(self._streams, storage, use.stream)

    # --- memory that frees itself, and the end ------------------------------------------------------------------

    def freeing(self, storage: torch.UntypedStorage, *, order: bool = True) -> list[tuple[int, int]]:
        """Make it safe that ``storage`` is about to free its memory by itself, which no reference can keep.

        Orders the allocation stream after those that ``record_stream`` was called with. Returns those with which that
        can't be done, or with ``order=False`` all of them, as pairs of device index and stream: they are the
        allocator's to keep in order. Once the memory is gone, the caller calls :meth:`freed`.
        """
        left = []
        with self.ledger.lock:
            for (stream, _, _), use in tuple(self.by_storage.get(cdata_of(storage), {}).items()):
                queue = use.queue
                allocated_on = None if use.unordered else self._alloc_stream(use, storage)
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
        with self.ledger.lock:
            self.ledger.release_all(self.by_storage.get(cdata_of(storage), {}).values())

    def hand_over(self, give: Callable[[Any, int, int], object]) -> None:
        """Release recorded uses after ``give`` was called with what each holds, the device index, and the stream.

        But for those of captures, and of memory that an arena keeps, for which the allocator would do nothing. Those go
        on as they are, at the next calls of safecomm.
        """
        for queue in keys_of(self.ledger.nonempty):
            for use in [] if queue.capture else keys_of(queue.holds):
                with self.ledger.lock:
                    for storage in use.storages if use.in_a_table else ():
                        if cdata_of(storage) not in KEPT:
                            give(storage, queue.index, queue.stream)
                            self.ledger.release(use)
