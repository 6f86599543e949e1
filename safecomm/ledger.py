"""What is held, by which call, since when, until what: here, and in ``trails.py``, every release is decided.

An entry is a work, a trail or a record: ``entries.py`` says what they are, and ``trails.py`` has the latter two. It
is let go by one of three rules, and each of them leaves every stream in whose order the memory can be given out
again after its last use (S1):

1. *Waited at home.* ``wait()`` ordered the very stream that the memory was allocated on: at once (S2). What it
   does not cover, because it was allocated on another stream, becomes a trail. For trails and records, that
   stream waited for the one that they are about.
2. *Over.* The work, or the event, is complete: at the next call of safecomm, of any group (S3). Works whose handles
   somebody still has are asked only when they are ``PATIENCE`` old.
3. *Too much behind.* More than ``LAG`` entries and ``BUDGET`` bytes have piled up behind the host, and nobody is
   going to wait for the oldest: its allocation stream is ordered after it. Inside a graph capture nothing can be
   queried, so there this rule, as an edge of the graph, takes what only the ledger still refers to (S5).

What fails goes to the quarantine, and leaves it only when the device is known to be idle (S4). Entries are
dropped on the thread that called safecomm, never in a destructor or a callback: the ledger's references are
strong, so that a dropped handle frees nothing.

An exception of a signal handler can come anywhere, so an entry stays in its lane until all is done for it that it
takes, and is looked at again if that was not the end. Of two threads that come to one work at the same time each
orders what it needs, and whoever is first releases it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import operator
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from torch.distributed import ProcessGroup

from safecomm import _torch, backends
from safecomm.entries import Entry, Lane, Pending, W, WorkLane, keys_of, leave_all_empty
from safecomm.errors import CaptureBoundaryError, PendingWorkError
from safecomm.refcounts import COUNTED, QUEUED, getrefcount
from safecomm.streams import HOST, CudaStreams, Streams, capture_of, home_of
from safecomm.trails import Trails

log = logging.getLogger("safecomm")
_now = time.perf_counter

LAG = 4
"""Entries of one lane that rule 3 leaves alone however large they are, to keep communication and compute overlapped."""

UNORDERED = 8
"""Running works of a lane that one call looks at, where it can't stop at the first."""

CROWD = 64
"""Works of a lane beyond which each call asks whether they are over, whoever has their handles."""

NEWEST = 4
"""Works of a lane of which one call sees whether their handles were dropped."""

PATIENCE = 0.1
"""Seconds for which a work is not asked whether it is over while somebody has its handle, and so is about to wait.

Asking takes longer than the rest of a call, and a program that overlaps has works in flight at each of them.
"""

BUDGET = 256 << 20
"""Bytes of a group's abandoned works that rule 3 leaves alone however many they are."""


class Ledger:
    """The entries of the process, and the rules of the module's docstring.

    ``streams`` answers for the device; ``lag``, ``budget`` and ``trail_budget`` are rule 3's, ``patience`` rule 2's.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        lag: int = LAG,
        budget: int = BUDGET,
        trail_budget: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.streams = streams
        self.current = streams.current
        self.busy: dict[Lane, None] = {}  # the lanes that hold anything: none in a program that waits for its works
        self.quarantine: dict[Entry, None] = {}  # what has failed
        self._lag = lag
        self._budget = budget
        self._patience = patience
        self.trails = Trails(streams, self.busy, lag=lag, budget=trail_budget)
        self.direct: dict[int, WorkLane] = {}  # by the id of a group that is c10d's own: the lane of its ordinary calls
        self._diverted: dict[int, WorkLane] = {}  # the same while they take the long way
        self._diverting: dict[object, None] = {}  # who wants them to
        # One that its thread can take again: the collector can run inside, and end the capture of a graph that died.
        self._diverting_lock = threading.RLock()
        self._lanes: dict[Any, WorkLane] = {}
        self._reported: set[tuple[types.CodeType, int]] = set()
        self.failures = 0

    # --- entries ----------------------------------------------------------------------------------------

    def hold(
        self,
        work: W,
        op: str,
        inner: Any,
        group: Any,
        index: int,
        storages: tuple[Any, ...],
        frame: types.FrameType,
        *,
        aliases: tuple[torch.Tensor, ...] = (),
        staged: bool = False,
        unordered: bool = False,
        home: int | None = None,
    ) -> W:
        """Make ``work`` the entry of ``inner``, which was just launched from ``frame``, and return it.

        ``storages`` is what it holds, on device ``index``, and ``home`` the one stream that all of it was allocated on,
        if that is known. For the rest see :class:`Entry` and :class:`Lane`. For any call; ordinary ones take
        ``WorkLane.hold``.
        """
        work.op = op
        work.inner = inner
        work.code = frame.f_code
        work.instruction = frame.f_lasti
        work.since = _now()
        stream = capture = 0
        if index >= 0:
            stream = self.current(index)
            if stream:  # 0 is the legacy default stream, which can't capture
                capture = self.streams.capture(stream)
        lane = self.direct.get(id(group))
        if lane is None or lane.index != index or capture or unordered:
            lane = self.lane_of(group, index, stream, capture, unordered=unordered)
        work.lane = lane
        work.storages = storages
        work.home = home
        work.rare = True
        work.aliases = aliases
        work.staged = staged
        work.stream = stream
        lane.entries[work] = None
        self.busy[lane] = None
        return work

    def lane_of(
        self,
        group: Any,
        index: int,
        stream: int = 0,
        capture: int = 0,
        *,
        unordered: bool = False,
        results: bool = False,
    ) -> WorkLane:
        """Return the lane of works of ``group`` on device ``index``, and make it if there is none.

        ``results``: the one of functional collectives, which are let go when they are complete, and in no other case.
        """
        if self._diverted and not self._diverting:
            self._restore()  # an exception has kept the last one who wanted it from that
        key = (id(group), index, capture, unordered, results)
        lane = self._lanes.get(key)
        if lane is None:
            device_type = "cpu" if index == HOST else "cuda"
            kind = backends.of(group, device_type)
            lane = WorkLane(self, self._lanes, key, index, stream, capture, self._budget)
            lane.group = weakref.ref(group, lambda _: self._group_died(key))
            lane.kind = kind
            lane.streamed = kind.streamed and not results
            lane.ordered = lane.streamed and not unordered  # point-to-point may have a communicator for each peer
            # A gloo send or receive does not tell that it is over before somebody has waited for it (is_completed()
            # stays False, torch 2.13), and a second wait for it hangs. So it is never polled, and waited for once.
            lane.blind = kind.blind and unordered
            lane.queries = kind.queries and not capture  # where the current stream is captured, nothing is asked
            # Where a dropped handle goes unnoticed, any work may be one that nobody is going to wait for.
            lane.patient = not capture and not lane.blind and not results and COUNTED
            self._lanes[key] = lane
            if type(group) is ProcessGroup and kind.direct and not (capture or unordered or results):
                backend = _torch.backend_of(group, device_type)
                if isinstance(backend, _torch.Backend):
                    lane.backend = backend
                    lane.world = group.size()
                    lane.rank = group.rank()
                    # What wraps another compares the names of what the ranks call, which differ.
                    short = kind.short and _torch.unwrapped(backend) is backend
                    lane.alone = short and not _torch.regions_differ()
                    lane.brief = short and _torch.waits_only_block_streams()
                    with self._diverting_lock:
                        direct = self._diverted if self._diverting else self.direct
                        direct.setdefault(id(group), lane)  # a group may have a lane for each of two devices
        return lane

    @contextlib.contextmanager
    def diverted(self) -> Iterator[None]:
        """Let every call take the long way, past whatever has to see all of them."""
        who = object()
        try:
            with self._diverting_lock:
                self._diverting[who] = None
                self._move(self.direct, self._diverted)
            yield
        finally:
            self._diverting.pop(who, None)  # at once, because an exception of a signal handler can come
            self._restore()

    def _restore(self) -> None:
        """Let calls take the short way, if nobody wants them to take the long one."""
        with self._diverting_lock:
            if not self._diverting:
                self._move(self._diverted, self.direct)

    @staticmethod
    def _move(lanes: dict[int, WorkLane], to: dict[int, WorkLane]) -> None:
        for key in keys_of(lanes):
            lane = lanes.get(key)  # its group may have died since
            if lane is not None:
                to[key] = lane
                lanes.pop(key, None)
                if lane.group is None or lane.group() is None:  # it did in between, and another may get its id
                    to.pop(key, None)

    def _group_died(self, key: tuple[int, int, int, bool, bool]) -> None:
        # A group has died. What its lane holds stays in busy, and is swept.
        lane = self._lanes.pop(key, None)
        if lane is not None:
            lane.backend = None  # a handle that is kept would keep it
        self.direct.pop(key[0], None)
        self._diverted.pop(key[0], None)

    def trail(self, op: str, group: Any, index: int, storages: tuple[Any, ...], frame: types.FrameType) -> None:
        """Hold those of ``storages``, used on the current stream of ``index``, that were allocated on another (S1)."""
        self.trails.leave(op, group, index, storages, frame.f_code, frame.f_lasti, time.perf_counter())

    def _release(self, entry: Entry) -> None:
        """Let go of a work after whose end all streams that can reuse its memory are ordered."""
        if entry.aliases:
            entry.emptied = True
            leave_all_empty(entry.aliases)
            entry.aliases = ()
        entry.storages = ()
        self.quarantine.pop(entry, None)
        entry.lane.take(entry)

    def let_go(self, entry: Entry) -> None:
        """Release ``entry``, of which somebody else has made sure that nothing touches it unordered, if it is held."""
        if entry in entry.lane.entries:
            self._release(entry)

    def _release_all(self, entries: Iterable[Entry]) -> None:
        for entry in list(entries):
            self._release(entry)

    # --- rule 1: waited ---------------------------------------------------------------------------------

    def check_boundary(self, entry: Entry) -> bool:
        """Raise CaptureBoundaryError if the current stream is not in the capture that ``entry`` was launched in.

        Returns whether there is nothing to wait for: the host has waited for the work before the capture.
        """
        lane = entry.lane
        stream = self.current(lane.index)
        now = capture_of(self.streams, stream)
        if entry.staged and now == lane.capture and stream != entry.stream:
            now = self.streams.capture(entry.stream)  # guard_staging will order that one as well
        if now == lane.capture:
            return False
        if entry.settled and now and not lane.capture:
            return True
        if now and lane.capture:
            what = "was captured into another CUDA graph than the one that is being captured"
            mend = "wait for it in the capture that it was launched in"
        elif now:
            what = "was launched before the CUDA graph capture that is going on"
            mend = "wait for it before the capture begins, or call settle_before_capture()"
        else:
            what = "was captured into a CUDA graph"
            mend = "wait for it inside the capture: outside, the stream that replays the graph is what orders it"
        raise CaptureBoundaryError(
            f"wait() for {entry.op} launched at {entry.site}: it {what}. To mend it, {mend}. "
            "Nothing was done, and the capture is unharmed."
        )

    def refuse_query_in_capture(self, entry: Entry) -> None:
        """Raise CaptureBoundaryError where asking whether a work is complete would break a capture."""
        stream = self.current(entry.lane.index)
        if entry.lane.capture or (stream and self.streams.capture(stream)):
            raise CaptureBoundaryError(
                f"is_completed() for {entry.op} launched at {entry.site}: a work can't be asked inside a CUDA graph "
                "capture, nor one that was captured, which does not run. Nothing was done, and the capture is unharmed."
            )

    def waited(self, entry: Entry) -> None:
        """Settle ``entry``, whose work the current stream (or the host) has just waited for, and what that settles."""
        lane = entry.lane
        entries = lane.entries
        if lane.ordered and len(entries) > 1:
            # All before it are over with it, and waiting for them is free.
            while entry in entries and (earlier := lane.first()) is not entry and earlier is not None:
                if earlier.staged and self._blocked(earlier, {earlier.stream}):
                    break
                if self._wait_here(earlier):
                    self._settle(earlier)
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Release a work that the current stream (or the host) has waited for; what that can't cover is a trail."""
        index = entry.lane.index
        if index >= 0 and entry.home != (stream := self.current(index)):
            for storage in entry.storages:
                if home_of(self.streams, storage, stream) != stream:
                    self._leave_trail(entry)
                    break
        self._release(entry)

    def _leave_trail(self, entry: Entry) -> None:
        lane = entry.lane
        group = lane.group() if lane.group is not None else None
        self.trails.leave(entry.op, group, lane.index, entry.storages, entry.code, entry.instruction, entry.since)

    def _wait_here(self, entry: Entry) -> bool:
        """Order the current stream after a work; on failure quarantine it and return False.

        This is also what makes c10d let go: both classes of NCCL keep references of their own until a work is first
        waited for or, if nobody does, until the next collective of the same group (torch 2.8 and later).
        """
        lane: WorkLane = entry.lane  # type: ignore[assignment]
        try:
            self.guard_staging(entry)
            lane.wait_for(entry.inner)
        except BaseException as error:
            self.fail(entry, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def guard_staging(self, entry: Entry) -> None:
        """Order the stream of the launch after a work, if c10d would otherwise give its staging back to it too early.

        The list forms copy through memory that c10d allocates on the stream of the launch and gives back at the first
        wait, on whatever stream that is.
        """
        lane: WorkLane = entry.lane  # type: ignore[assignment]
        index = lane.index
        if entry.staged and entry.storages and index != HOST and self.streams.current(index) != entry.stream:
            with self.streams.using(index, entry.stream):
                lane.wait_for(entry.inner)

    def fail(self, entry: Entry, error: BaseException) -> None:
        """Quarantine an entry whose work failed: a kernel may still be touching its memory (S4)."""
        if entry in entry.lane.entries:
            self._quarantine(entry, error)

    def _quarantine(self, entry: Entry, error: BaseException) -> None:
        self.failures += 1
        if self._idle(entry):
            self._release(entry)
            return
        self.quarantine[entry] = None
        entry.lane.take(entry)
        log.warning(
            "%s failed (%s); its memory is kept until drain(wait=True)",
            entry.describe("quarantined"),
            error,
        )

    def _idle(self, entry: Entry) -> bool:
        """Return whether it is known that nothing touches the memory of a failed work any more."""
        # On the host, complete means that no thread of the backend does, whether the work failed or not.
        over = entry.lane.index == HOST and not entry.lane.blind and bool(entry.inner.is_completed())
        return over or entry.used

    # --- rules 2 and 3: over, or too much behind ----------------------------------------------------------

    def over(self, entry: Entry) -> None:
        """Release ``entry``, whose work has just been seen to be complete, if that can be relied on."""
        if not entry.lane.blind and not self._capturing([entry.lane]) and not self._blocked(entry):
            self._take(entry)

    def sweep(self, *, thorough: bool = False) -> None:
        """Release what rules 2 and 3 allow, without blocking. Every wrapped call begins with it if anything is held.

        It looks at the oldest entry of each lane, and on while they are released; ``thorough``: at every entry.
        """
        if not thorough and self.awaited():
            return
        if self.trails.orphanage in self.busy and not self._capturing(keys_of(self.busy)):
            self.trails.adopt()
        # Not those that another thread adds from here on: a current stream of their device may be capturing.
        lanes = keys_of(self.busy)
        capturing = self._capturing(lanes)
        for entry in keys_of(self.quarantine):
            if self._idle(entry):
                self._release(entry)
        with self.streams.lenient():
            for lane in lanes:
                if not lane.entries and lane is not self.trails.orphanage:
                    lane.emptied()  # an exception has kept it from that
                elif not isinstance(lane, WorkLane):
                    self.trails.sweep(lane, capturing, thorough=thorough)
                elif lane.capture:
                    self._sweep_captured(lane, capturing)
                elif lane.blind:
                    self._sweep_blind(lane)
                elif not capturing:  # querying an event inside a capture would break the capture
                    if lane.ordered:
                        self._sweep_ordered(lane)
                    else:
                        self._sweep_unordered(lane, len(lane.entries) if thorough else UNORDERED)

    def awaited(self) -> bool:
        """Return whether all that a sweep would look at are young works, for which somebody is going to wait.

        The oldest of each lane is looked at, and the :data:`NEWEST` ones: a handle that is dropped at once is theirs.
        Every call asks while anything is in flight, and most go on without a sweep.
        """
        if self.quarantine or self.trails.orphans or self.trails.dead:
            return False
        young = _now() - self._patience
        try:
            for lane in self.busy:
                entries = lane.entries
                if not lane.patient or len(entries) > CROWD:
                    return False
                entry = next(iter(entries))
                if entry.since <= young or getrefcount(entry) <= QUEUED:
                    return False
                if len(entries) > 1:
                    for entry in islice(reversed(entries), NEWEST):
                        if getrefcount(entry) <= QUEUED:
                            return False
        except (RuntimeError, StopIteration):  # another thread, or a finalizer, has changed one in between
            return False
        return True

    def _capturing(self, lanes: list[Lane]) -> int:
        """Return the capture that a current stream of the device of anything in ``lanes`` is part of; 0 if none is."""
        indices = {lane.index for lane in lanes}
        if self.quarantine:
            indices.update([entry.lane.index for entry in keys_of(self.quarantine)])
        if self.trails.orphans:
            indices.update([orphan[0] for orphan in list(self.trails.orphans.values())])
        for index in indices:
            if index != HOST and (stream := self.current(index)) and (capture := self.streams.capture(stream)):
                return capture
        return 0

    def _sweep_ordered(self, lane: WorkLane) -> None:
        while (entry := lane.first()) is not None:
            dropped = getrefcount(entry) <= QUEUED
            if not self._sweep_first(lane, entry, dropped):
                return

    def _sweep_unordered(self, lane: WorkLane, count: int) -> None:
        # One that never ends must not keep the others: what is not over goes to the back, and the next call looks on.
        running = 0
        while running < min(count, len(lane.entries)) and (entry := lane.first()) is not None:
            dropped = getrefcount(entry) <= QUEUED
            if not self._sweep_first(lane, entry, dropped):
                running += 1
                with contextlib.suppress(KeyError):
                    lane.entries.move_to_end(entry)

    def _sweep_first(self, lane: WorkLane, entry: Entry, dropped: bool) -> bool:
        """Release ``entry`` if rule 2 or 3 allows; return whether they do."""
        dropped = dropped and not entry.awaited
        over = entry.inner.is_completed()
        if not over and not self._behind(lane, entry, dropped):
            return False
        if self._blocked(entry):
            entry.rare = entry.rare or over
            return False
        self._take(entry, dropped=dropped)
        return True

    def _blocked(self, entry: Entry, streams: set[int | None] | None = None) -> bool:
        """Return whether a stream that the release of an eager entry would order is being captured just now."""
        if entry.lane.index == HOST or entry.lane.capture:
            return False
        if streams is None:
            streams = {home_of(self.streams, storage, 0) for storage in entry.storages}
            if entry.staged:
                streams.add(entry.stream)
        return any(stream and self.streams.capture(stream) for stream in streams)

    def _sweep_blind(self, lane: WorkLane) -> None:
        entry = lane.first()
        if entry is not None and not entry.storages:
            self._release(entry)  # an exception has come as it was taken out
        elif entry is not None and getrefcount(entry) <= QUEUED:
            self._report(entry)

    def _behind(self, lane: WorkLane, entry: Entry, dropped: bool) -> bool:
        """Return whether rule 3 applies: too much, nobody will wait, and the host need not block to order a stream."""
        return (
            lane.streamed
            and dropped
            and lane.behind(self._lag)
            and all(home_of(self.streams, storage, 0) is not None for storage in entry.storages)
        )

    def _take(self, entry: Entry, *, dropped: bool = False) -> None:
        """Order the streams that can reuse the memory of a work after its end, and release it."""
        lane = entry.lane
        if entry not in lane.entries:
            return  # another thread has released it
        if dropped:
            self._report(entry)
        # Also for a work that is over: it can have failed, c10d's own references must go, and one that ends on the
        # host (gloo) may still be copying to the device.
        if lane.index != HOST and not self._order(entry):
            return
        self._release(entry)

    def _order(self, entry: Entry) -> bool:
        """Order each stream that can reuse the memory of a work after it; False if it failed, and is quarantined."""
        lane = entry.lane
        stream = self.current(lane.index)
        homes = {home_of(self.streams, storage, stream) for storage in entry.storages} or {stream}
        nobodys = None in homes
        if nobodys:  # nobody knows the stream of some of it: wait here, and leave a trail for it
            homes = (homes - {None}) | {stream}
        for home in homes:
            # Making another stream the current one takes longer than all the rest.
            there: Any = contextlib.nullcontext() if home == stream else self.streams.using(lane.index, home)  # type: ignore[arg-type]
            with there:
                if not self._wait_here(entry):
                    return False
        if nobodys:
            self._leave_trail(entry)
        return True

    def _sweep_captured(self, lane: WorkLane, capturing: int) -> None:
        if lane.capture != capturing and self.streams.capture(lane.stream) != lane.capture:
            # The capture is over. Its works can't be waited for any more, and its memory is the graph's.
            self._release_all(lane.entries)

    # --- captures -------------------------------------------------------------------------------------------

    def join_unwaited(self, capture: int, stream: int) -> list[str]:
        """Order ``stream`` after all works of ``capture`` that nobody has waited for there; describe each."""
        left = []
        for lane in keys_of(self.busy):
            if lane.capture == capture and isinstance(lane, WorkLane):
                for entry in keys_of(lane.entries):
                    left.append(f"{entry.op} launched at {entry.site}")
                    with self.streams.using(lane.index, stream):
                        if entry in lane.entries and self._wait_here(entry):
                            self._release(entry)
        return left

    def end_capture(self, capture: int) -> None:
        """Release what is held for ``capture``, which is over."""
        for lane in keys_of(self.busy):
            if lane.capture == capture:
                release = self._release_all if isinstance(lane, WorkLane) else self.trails.release
                release(lane.entries)

    def await_before_capture(self, timeout: timedelta | None) -> None:
        """Block the host until all works are over, so that there is nothing to wait for in a capture."""
        works = [entry for entry in self._unsettled() if entry.inner is not None]
        self.await_works(timeout, None)
        for entry in works:
            entry.settled = True

    def _report(self, entry: Entry) -> None:
        where = (entry.code, entry.instruction)
        if where in self._reported:
            return
        self._reported.add(where)
        if entry.lane.blind:
            fate = "its memory is held until drain(wait=True) or the end of its group, as gloo does not tell before"
        else:
            fate = "its memory was held until it was over, but nothing has ordered your streams after it"
        log.warning(
            "the handle of %s launched at %s was dropped without wait(): %s (reported once for this line)",
            entry.op,
            entry.site,
            fate,
        )

    def dropped(self) -> int:
        """Return at how many call sites handles were dropped without a wait."""
        return len(self._reported)

    # --- all of it ------------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[Entry]:
        """All that is held, quarantined entries last."""
        return self._entries() + list(self.quarantine)

    def pending(self) -> list[Pending]:
        """Return what is held, oldest first, quarantined entries last."""
        entries = sorted(self._entries(), key=operator.attrgetter("since"))
        failed = [entry.describe("quarantined") for entry in keys_of(self.quarantine)]
        return [entry.describe() for entry in entries] + failed

    def drain(self, *, wait: bool = False, timeout: timedelta | None = None, group: Any = None) -> int:
        """Release what is safe, or with ``wait`` all of it, once it is over; return the bytes that are still held."""
        if wait:
            self._finish(timeout, group)
        else:
            self.sweep(thorough=True)
        quarantined = [entry for entry in keys_of(self.quarantine) if entry.belongs_to(group)]
        return sum(entry.nbytes for entry in self._unsettled(group) + quarantined)

    def _finish(self, timeout: timedelta | None, group: Any) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self.sweep()  # takes over what graphs that died have left
        self.await_works(timeout, group)
        self._empty_quarantine(group, deadline)
        self._await_all(group, deadline)  # what a record holds may have been held by one of those too

    def _empty_quarantine(self, group: Any, deadline: float | None) -> None:
        for entry in keys_of(self.quarantine):
            if entry.belongs_to(group):
                if entry.lane.index != HOST:
                    self._synchronize(entry, deadline)
                elif not entry.lane.blind:  # the threads of a work that timed out go on
                    self._await([entry], self._idle, deadline)
                self._release(entry)

    def _synchronize(self, entry: Entry, deadline: float | None) -> None:
        """Block the host until the device is idle; a kernel whose peer is gone can keep it busy, so in a thread."""
        if deadline is None:
            self.streams.synchronize(entry.lane.index)
            return
        thread = threading.Thread(target=self.streams.synchronize, args=(entry.lane.index,), daemon=True)
        thread.start()
        thread.join(max(deadline - time.monotonic(), 0))
        if thread.is_alive():
            raise _late([entry])

    def _await(self, entries: list[Entry], over: Callable[[Entry], bool], deadline: float | None) -> None:
        """Block the host until all ``entries`` are ``over``; raise PendingWorkError at the deadline."""
        pause = 1e-5
        while left := [entry for entry in entries if not over(entry)]:
            if deadline is not None and time.monotonic() > deadline:
                raise _late(left)
            time.sleep(pause)
            pause = min(pause * 2, 1e-2)

    def await_works(self, timeout: timedelta | None, group: Any, *, blind: bool = True) -> None:
        """Block the host until all works of ``group`` (None: of all groups) are over, and release them.

        Those that fail go to the quarantine. Not ``blind``: but for those of which the backend does not tell, which may
        never be. Raises PendingWorkError if others are not over in time.
        """
        if self._capturing(keys_of(self.busy)):
            raise CaptureBoundaryError(
                "the host can't wait for works inside a CUDA graph capture, where they are only recorded. "
                "Nothing was done, and the capture is unharmed."
            )
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        if blind:
            for entry in [entry for entry in self._entries(group) if entry.lane.blind]:
                self._wait_blind(entry, deadline)
        self._await_all(group, deadline, blind=blind)

    def _await_all(self, group: Any, deadline: float | None, *, blind: bool = True) -> None:
        def gone(entry: Entry) -> bool:
            self.sweep(thorough=True)
            return entry.used or entry not in entry.lane.entries

        # Again and again, because a work can leave a trail.
        while entries := [entry for entry in self._unsettled(group) if blind or not entry.lane.blind]:
            self._await(entries, gone, deadline)

    def _entries(self, group: Any = None) -> list[Entry]:
        """Return the entries of ``group`` (None: of all groups), without the quarantine."""
        return [entry for lane in keys_of(self.busy) for entry in keys_of(lane.entries) if entry.belongs_to(group)]

    def _unsettled(self, group: Any = None) -> list[Entry]:
        """Return the entries that the device will be over with: not those that wait for others who still use them."""
        return [
            entry
            for entry in self._entries(group)
            # What a capture holds is over with the capture, which may be another thread's.
            if not entry.lane.capture and not entry.used and not self.trails.in_use(entry)
        ]

    def _wait_blind(self, entry: Entry, deadline: float | None) -> None:
        # In a thread, because a wait that times out would close the connection (gloo, torch 2.13). The thread only
        # waits; what is released, is released here.
        def wait() -> None:
            with contextlib.suppress(Exception):  # which the wait below raises again
                entry.finish()  # type: ignore[attr-defined]

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(None if deadline is None else max(deadline - time.monotonic(), 0))
        if thread.is_alive():
            raise _late([entry])
        with contextlib.suppress(Exception):  # it is in the quarantine by then
            entry.wait()  # type: ignore[attr-defined]

    def close(self, group: Any, reason: str) -> None:
        """Forget the lanes of ``group`` (None: of all groups), which is gone, and quarantine what they still hold."""
        for key in keys_of(self._lanes):
            lane = self._lanes.get(key)
            if lane is not None and lane.group is not None and (group is None or lane.group() is group):
                for entry in keys_of(lane.entries):
                    self.fail(entry, RuntimeError(reason))
                self._group_died(key)

    def leave(self) -> None:
        """At interpreter exit: release what is over, and keep the rest out of the interpreter's reach for good."""
        try:
            self.sweep(thorough=True)
        except Exception as error:  # the device may be gone
            log.debug("sweep at exit: %r", error)
        # A backend that goes only when modules are torn down can take the process down (gloo, torch 2.13).
        self.direct.clear()
        self._diverted.clear()
        for lane in list(self._lanes.values()):
            lane.backend = None
        left = self._entries() + list(self.quarantine)
        if left:
            # Tearing down modules would free it in some order while a kernel or a gloo thread may be using it. The
            # process is about to give it all back anyway.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))


def _late(entries: list[Entry]) -> PendingWorkError:
    shown = "; ".join(str(entry.describe()) for entry in entries[:8])
    return PendingWorkError(
        f"{len(entries)} works are not over in time: {shown}{'; ...' if len(entries) > 8 else ''}. "
        "Their memory is still held. Wait for them, or abort their group."
    )


LEDGER = Ledger(CudaStreams())
"""The process's ledger."""

atexit.register(LEDGER.leave)


def pending() -> list[Pending]:
    """Return what safecomm holds now, oldest first: a :class:`Pending` for each call whose memory can't be reused yet.

    Asks no device and releases nothing, so an entry can already be over; :func:`drain` looks. Bytes are those of the
    storages held, whether or not the caller still refers to them too. Empty in a program that waits for its works.

    Examples
    --------
    >>> pending()
    []
    """
    return LEDGER.pending()


def drain(*, wait: bool = False, timeout: timedelta | None = None, group: Any = None) -> int:
    """Give back the memory of all works that are over; with ``wait``, of all works, once they are over.

    Every call of a collective does the first by itself, for the oldest works of each group; this is for the end of a
    phase, or before a measurement. Without ``wait`` it never blocks. With ``wait`` it blocks the host, until
    ``timeout`` if one is given, and then also gives back what failed works hold, after the device has become idle.

    Returns the bytes that are still held, by works of ``group`` if one is given: 0 if all is back.

    Raises
    ------
    PendingWorkError
        With ``wait``, if works are not over in time. Their memory is still held.
    CaptureBoundaryError
        With ``wait``, inside a CUDA graph capture.

    Examples
    --------
    >>> drain()
    0
    """
    return LEDGER.drain(wait=wait, timeout=timeout, group=group)
