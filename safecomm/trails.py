"""What was used on another stream than the one it was allocated on: trails, and what ``record_stream`` was called for.

The part of the ledger that is about streams and not about works. It decides by the rules at the head of
``safecomm/ledger.py``, and knows nothing of groups: what it needs of the device, it asks ``Streams``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from safecomm import _torch
from safecomm.entries import Entry, Lane, Record, Trail, keys_of
from safecomm.refcounts import COUNTED, HELD_ONCE, getrefcount
from safecomm.streams import HOST, Streams, capture_of, home_of

LOOK = 64
"""Entries of a lane of records that one call looks at in a capture, and where a stream is about to wait."""

FEW = 4
"""Elsewhere: so many of the newest, and of all in turn until twice as many were still used.

What was recorded last is mostly freed first, because backward frees in the opposite order; and a program that records
every activation has hundreds, at which no call can look. Only looks in vain are counted: records are made as often as
``record_stream`` sweeps, or four times so, and those that nobody uses must not become more than one sweep finds.
"""

TRAIL_SHARE = 64
"""The share of the device's memory, one part in this many, that rule 3 leaves alone in the trails of a stream.

More than for works: a trail is what overlapped compute leaves, and ordering the allocation stream after it can delay
it.
"""


class Trails:
    """The trails and records of the process, each in the lane of the stream of its use.

    ``busy`` is the ledger's: the lanes that hold anything, of whatever kind. ``lag`` and ``budget`` are rule 3's;
    ``budget=None`` is a share of the device's memory.
    """

    def __init__(self, streams: Streams, busy: dict[Lane, None], *, lag: int, budget: int | None = None) -> None:
        self.count = 0  # how often memory was used on another stream than its own
        self.due = False  # so many bytes of records have come since a sweep that rule 3 might apply to them
        self.recorded: dict[int, dict[tuple[int, int], Record]] = {}  # by storage; by stream and capture
        self._streams = streams
        self._busy = busy
        self._lag = lag
        self._budget = budget
        self._lanes: dict[Any, Lane] = {}
        # Around whatever looks at records or releases anything, which takes several steps: an event must not be used
        # after another thread has given it back. No collective takes it while there is nothing here.
        self._releasing = threading.RLock()
        # What graphs have left: the device index, the streams, the storages, and the call site.
        self.orphans: dict[object, tuple[int, tuple[int, ...], tuple[Any, ...], types.CodeType, int]] = {}
        # What is to be done because a graph has died, or a block has ended, if an exception kept it from being done.
        self.dead: dict[Callable[[], None], Any] = {}
        self.orphanage = Lane(busy, self._lanes, "orphans", HOST)  # is busy while there are any of these

    # --- what comes ---------------------------------------------------------------------------------------

    def leave(
        self,
        op: str,
        group: Any,
        index: int,
        storages: tuple[Any, ...],
        code: types.CodeType,
        instruction: int,
        since: float,
    ) -> None:
        """Hold those of ``storages``, used on the current stream of ``index``, that were allocated on another (S1).

        ``since`` is when, and the rest where, ``op`` was called.
        """
        stream = self._streams.current(index)
        astray = tuple(s for s in storages if home_of(self._streams, s, stream) != stream)
        if not astray:
            return
        capture = capture_of(self._streams, stream)
        lane = self._lane((stream, index, capture), index, stream, capture)
        self.count += 1
        entry = Trail()
        entry.op = op
        entry.code = code
        entry.instruction = instruction
        entry.since = since
        entry.event = self._streams.mark(index, stream)
        entry.stream = stream
        entry.group = None if group is None else weakref.ref(group)
        entry.lane = lane
        entry.storages = astray
        lane.entries[entry] = None
        self._busy[lane] = None

    def record(
        self,
        storage: torch.UntypedStorage,
        index: int,
        stream: int,
        frame: types.FrameType,
        order: str = "auto",
        *,
        homeless: bool = False,
    ) -> bool:
        """Hold ``storage``, used on ``stream`` until nobody refers to it, as ``record_stream`` asks for.

        ``order``: how it comes back. ``"order"``: the stream that it was allocated on is ordered after ``stream``, as
        soon as nobody else refers to it. ``"defer"``: once the device has passed that point of ``stream``. ``"auto"``:
        whatever comes first, but the former only when too much has piled up, or in a capture. ``homeless``: also if
        nobody knows where it was allocated, or that was on another device; it can only be deferred then. False if it is
        not held: ``record_stream`` is the allocator's then, also where nobody can tell when others let go of it.
        """
        if not COUNTED:
            return False
        home = None if homeless else home_of(self._streams, storage, stream)
        if home == stream:
            return True
        if home is None:
            if not homeless:
                return False
            order = "defer"
        capture = capture_of(self._streams, stream)
        with self._releasing:
            of_storage = self.recorded.setdefault(_torch.cdata_of(storage), {})
            entry = of_storage.get((stream, capture))
            if entry is not None and entry.event is None:
                return True
            lane = self._lane(("records", stream, index, capture), index, stream, capture)
            lane.records = True
            entry = Record()
            entry.op = "record_stream"
            entry.code = frame.f_code
            entry.instruction = frame.f_lasti
            entry.since = time.perf_counter()
            entry.stream = stream
            entry.order = order
            entry.homeless = home is None
            entry.lane = lane
            entry.storages = (storage,)
            lane.entries[entry] = None
            self._busy[lane] = None
            of_storage[stream, capture] = entry  # last, because from then on the storage counts as held
            lane.unseen += storage.nbytes()
            self.due |= 8 * lane.unseen > lane.budget
        return True

    def orphan(
        self, index: int, streams: tuple[int, ...], storages: tuple[Any, ...], code: types.CodeType, instruction: int
    ) -> None:
        """Take over ``storages``, which only graphs have used, on ``streams``. May be called from a destructor."""
        self.orphans[object()] = index, streams, storages, code, instruction
        self._busy[self.orphanage] = None

    def adopt(self) -> None:
        """Make trails of the orphans, as far as the streams that they were used on are not being captured."""
        for end in keys_of(self.dead):
            end()
            self.dead.pop(end, None)
        for key in keys_of(self.orphans):
            orphan = self.orphans.get(key)
            if orphan is not None and self._adopt(*orphan):  # two threads leave two trails
                self.orphans.pop(key, None)
        if not (self.orphans or self.dead):
            self._busy.pop(self.orphanage, None)
            if self.orphans or self.dead:  # a graph died in between
                self._busy[self.orphanage] = None

    def _adopt(
        self, index: int, streams: tuple[int, ...], storages: tuple[Any, ...], code: types.CodeType, instruction: int
    ) -> bool:
        # Graphs are replayed through their object, which notes the stream; for one that was not, the stream that is
        # current now is the best guess.
        streams = streams or (self._streams.current(index),)
        if any(capture_of(self._streams, stream) for stream in streams):
            return False
        for stream in streams:
            with self._streams.using(index, stream):
                self.leave("a CUDA graph", None, index, storages, code, instruction, time.perf_counter())
        return True

    def _lane(self, key: Any, index: int, stream: int, capture: int) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            budget = self._budget
            if budget is None:
                budget = self._streams.capacity(index) // TRAIL_SHARE
            lane = self._lanes[key] = Lane(self._busy, self._lanes, key, index, stream, capture, budget)
        return lane

    # --- what is still used -------------------------------------------------------------------------------

    def in_use(self, entry: Entry) -> bool:
        """Return whether ``entry`` is a record of what others still use, so that it only waits for them."""
        if not entry.lane.records:
            return False
        with self._releasing:
            return entry.event is None and not self._alone(entry)

    def _alone(self, entry: Entry) -> bool:
        """Return whether nobody but records refers to what a record holds, neither in C++ nor in Python."""
        if not entry.storages:
            return False  # another thread has released it
        (storage,) = entry.storages
        cdata = _torch.cdata_of(storage)
        others = max(len(self.recorded.get(cdata, ())) - 1, 0)
        shared = others + len(_torch.KEPT.get(cdata, ()))
        return getrefcount(storage) - shared <= HELD_ONCE and _torch.only_holder(storage)

    # --- what goes: rule 1, ordered -----------------------------------------------------------------------

    def only_used_on(self, index: int, stream: int, other: int) -> list[Entry]:
        """Return what was allocated on ``stream``, and nothing but ``other`` uses any more.

        To be asked before ``stream`` is ordered after ``other``, and given to :meth:`release` after it: in between,
        other threads can use more there.
        """
        capture = capture_of(self._streams, stream)
        if capture_of(self._streams, other) != capture:
            return []  # the wait takes one of them into the other's capture, and orders nothing that ran before
        found = []
        for key in ((other, index, capture), ("records", other, index, capture)):
            lane = self._lanes.get(key)
            for entry in lane.oldest(LOOK) if lane is not None else ():
                at_home = all(home_of(self._streams, storage, stream) == stream for storage in entry.storages)
                if at_home and not self.in_use(entry):
                    found.append(entry)
        return found

    def release(self, entries: Iterable[Entry]) -> None:
        """Release ``entries``, whose allocation stream was ordered after their last use, or whose capture is over."""
        for entry in list(entries):
            with self._releasing:
                self._release(entry)

    def _release(self, entry: Entry) -> None:
        lane = entry.lane
        if lane.records:
            self._forget_record(entry)
        entry.storages = ()
        # The event last, and by whoever takes the entry out: else it could be given back twice.
        if lane.take(entry) and entry.event is not None and not lane.capture:  # one of a capture stays the graph's
            self._streams.recycle(lane.index, entry.event)

    def _forget_record(self, entry: Entry) -> None:
        if entry.storages:
            cdata = _torch.cdata_of(entry.storages[0])
            of_storage = self.recorded.get(cdata, {})
            if of_storage.get((entry.stream, entry.lane.capture)) is entry:
                # Without a call in between, where an exception of a signal handler could come: what is counted as a
                # record of the storage has to refer to it, or somebody's use is taken for a record.
                entry.storages = ()
                del of_storage[entry.stream, entry.lane.capture]
                if not of_storage:
                    del self.recorded[cdata]
        entry.lane.passing.pop(entry, None)

    # --- rules 2 and 3: over, or too much behind ----------------------------------------------------------

    def sweep(self, lane: Lane, capturing: int, *, thorough: bool = False) -> None:
        """Release what rules 2 and 3 allow of ``lane``; ``capturing``: a current stream is part of this capture."""
        if lane.records:
            self._sweep_records(lane, capturing, thorough)
        elif lane.capture:
            self._sweep_captured(lane, capturing)
        elif not capturing:  # querying an event inside a capture would break the capture
            self._sweep_eager(lane)

    def _sweep_eager(self, lane: Lane) -> None:
        while (entry := lane.first()) is not None:
            over = self._streams.reached(entry.event)
            if not over and (not self._behind(lane, entry) or self._blocked(entry)):
                return
            self._take(entry, over=over, pause=True)

    def _sweep_captured(self, lane: Lane, capturing: int) -> None:
        if lane.capture == capturing:
            for entry in keys_of(lane.entries):
                if self._forgotten(entry):
                    self._take(entry, over=False)
        elif self._streams.capture(lane.stream) != lane.capture:
            self.release(lane.entries)  # the capture is over, and its memory is the graph's

    def _forgotten(self, entry: Entry) -> bool:
        """Return whether only the ledger still refers to what a captured trail holds, and all of it can be ordered."""
        for storage in entry.storages:
            home = home_of(self._streams, storage, entry.stream)
            if home is None or not _torch.only_holder(storage) or self._streams.capture(home) != entry.lane.capture:
                return False
        return True

    def _sweep_records(self, lane: Lane, capturing: int, thorough: bool) -> None:
        capture = capture_of(self._streams, lane.stream)
        if lane.capture and capture != lane.capture:
            self.release(lane.entries)  # the capture is over: what it has recorded runs when the graph does
        elif capture == lane.capture == capturing:
            if capture:
                for entry in lane.oldest(LOOK):
                    if not self._see(lane, entry):
                        with contextlib.suppress(KeyError):
                            lane.entries.move_to_end(entry)
                return
            lane.unseen, self.due = 0, False
            for entry in keys_of(lane.entries) if thorough else lane.newest(FEW):
                self._see(lane, entry)
            if not thorough:
                self._see_others(lane)
            self._sweep_passing(lane)

    def _see_others(self, lane: Lane) -> None:
        """Look at records in turn, until too many are still used."""
        in_vain = 0
        for _ in range(min(LOOK, len(lane.entries) + len(lane.round))):
            if in_vain == 2 * FEW or (entry := lane.next()) is None:
                return
            if entry.event is None or not entry.storages:
                self._see(lane, entry)
                in_vain += entry.event is None

    def _see(self, lane: Lane, entry: Entry) -> bool:
        """Mark a record that nobody else uses any more, and in a capture give it back; return whether it is."""
        with self._releasing:
            if not entry.storages:
                self._release(entry)  # another thread has, or was about to when an exception came
                return True
            if entry.event is None:
                if not self._alone(entry):
                    return False
                home = home_of(self._streams, entry.storages[0], lane.stream)
                if lane.capture if home is None else capture_of(self._streams, home) != lane.capture:
                    return False  # allocated outside of this capture, or inside of one that is going on elsewhere
                try:
                    entry.event = self._streams.mark(lane.index, lane.stream)
                    if not lane.capture:
                        lane.passing[entry] = None
                        with contextlib.suppress(KeyError):
                            lane.entries.move_to_end(entry, last=False)  # out of the way of those that are still used
                except BaseException:  # an interrupt: nobody would look at it again
                    lane.passing.pop(entry, None)
                    entry.event = None
                    raise
            at_once = lane.capture or entry.order == "order"  # type: ignore[attr-defined]
            if not at_once or self._blocked(entry):
                return False
            self._take(entry, over=False)
            return True

    def _sweep_passing(self, lane: Lane) -> None:
        """Give back what nobody else uses any more, in the order in which the device gets there, and by rule 3."""
        passing = lane.passing
        while passing:
            with self._releasing:
                entry = lane.first_passing()
                if entry is None or not self._streams.reached(entry.event):
                    break
                self._take(entry, over=True)
                passing.pop(entry, None)  # if another thread has taken it
        if lane.behind(self._lag):
            for entry in keys_of(passing):
                with self._releasing:
                    if entry in passing and entry.order == "auto" and not self._blocked(entry):  # type: ignore[attr-defined]
                        if not self._behind(lane, entry):
                            return
                        self._take(entry, over=False)

    def _behind(self, lane: Lane, entry: Entry) -> bool:
        """Return whether rule 3 applies: too much has piled up, and ordering a stream would bring ``entry`` back."""
        return (
            lane.behind(self._lag)
            # What the caller still refers to would not come back by ordering anything.
            and all(_torch.only_holder(storage) for storage in entry.storages)
            and all(home_of(self._streams, storage, 0) is not None for storage in entry.storages)
        )

    def _blocked(self, entry: Entry) -> bool:
        """Return whether a stream that the release of an eager entry would order is being captured just now."""
        if entry.lane.capture:
            return False
        homes = {home_of(self._streams, storage, 0) for storage in entry.storages}
        return any(home and self._streams.capture(home) for home in homes)

    def _take(self, entry: Entry, *, over: bool, pause: bool = False) -> None:
        """Release ``entry``; unless it is ``over``, order the streams that can reuse its memory after its event.

        ``pause``: they go on where a collective ends, which is where the next one begins. Whatever large kernel they
        start first is in the way of that one, up to 0.14 ms for a matmul of 0.25 ms, so they let it go first.
        """
        lane = entry.lane
        with self._releasing:
            if entry not in lane.entries:
                return  # another thread has released it
            homes = set() if over else {home_of(self._streams, storage, entry.stream) for storage in entry.storages}
            for home in homes - {entry.stream, None}:
                self._streams.order(lane.index, home, entry.event)  # type: ignore[arg-type]
                if pause:
                    self._streams.pause(lane.index, home)  # type: ignore[arg-type]
            self._release(entry)

    # --- what frees itself, and the end -------------------------------------------------------------------

    def freeing(self, storage: torch.UntypedStorage, *, order: bool = True) -> list[tuple[int, int]]:
        """Make it safe that ``storage`` is about to free its memory by itself, which no reference can keep.

        Orders the stream that it was allocated on after those that ``record_stream`` was called with. Returns those
        with which that can't be done, or with ``order=False`` all of them, as pairs of device index and stream: they
        are the allocator's to keep in order. Once the memory is gone, :meth:`freed` is to be called.
        """
        left = []
        with self._releasing:
            for (stream, _), entry in tuple(self.recorded.get(_torch.cdata_of(storage), {}).items()):
                lane = entry.lane
                home = None if entry.homeless else home_of(self._streams, storage, stream)
                captures = {capture_of(self._streams, stream), capture_of(self._streams, home or 0)}
                if order and captures == {lane.capture} and home is not None:
                    event = self._streams.mark(lane.index, stream)
                    self._streams.order(lane.index, home, event)
                    if not lane.capture:
                        self._streams.recycle(lane.index, event)
                else:
                    left.append((lane.index, stream))
        return left

    def freed(self, storage: torch.UntypedStorage) -> None:
        """Forget what ``storage`` was recorded for: that memory is gone, after :meth:`freeing`."""
        with self._releasing:
            self.release(self.recorded.get(_torch.cdata_of(storage), {}).values())

    def hand_over(self, give: Callable[[torch.UntypedStorage, int, int], Any]) -> None:
        """Let go of records after ``give`` was called with what each holds, the device index, and the stream.

        But for those of captures, and of memory that an arena keeps, for which the allocator would do nothing. Those go
        on as they are, at the next calls of safecomm.
        """
        for lane in keys_of(self._busy):
            for entry in keys_of(lane.entries) if lane.records and not lane.capture else ():
                with self._releasing:
                    for storage in entry.storages:
                        if _torch.cdata_of(storage) not in _torch.KEPT:
                            give(storage, lane.index, lane.stream)
                            self.release((entry,))
