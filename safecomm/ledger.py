"""What is held, by which call, since when, until what: the only place that decides a release.

Three kinds of entry. A *work* holds what a running asynchronous collective reads and writes. A *trail* holds
what was used on another stream than the one it was allocated on, until the device has passed an event there.
A *record* holds what ``record_stream`` was called for: while others use it too it only waits, and from then on
it is a trail. An entry is let go by one of three rules, and each of them leaves every stream in whose order the
memory can be given out again after its last use (S1):

1. *Waited at home.* ``wait()`` ordered the very stream that the memory was allocated on: at once (S2). What it
   does not cover, because it was allocated on another stream, becomes a trail. For trails and records, that
   stream waited for the one that they are about.
2. *Over.* The work, or the event, is complete: at the next call of safecomm, of any group (S3).
3. *Too much behind.* More than ``LAG`` entries and ``BUDGET`` bytes have piled up behind the host, and nobody is
   going to wait for the oldest: its allocation stream is ordered after it. Inside a graph capture nothing can be
   queried, so there this rule, as an edge of the graph, takes what only the ledger still refers to (S5).

What fails goes to the quarantine, and leaves it only when the device is known to be idle (S4). Entries are
dropped on the thread that called safecomm, never in a destructor or a callback: the ledger's references are
strong, so that a dropped handle frees nothing.

Entries that end in the order in which they were made share a ``Lane``. The asynchronous collectives of one NCCL
group do, so waiting for one of them settles all before it; Megatron and DeepSpeed wait only for the last of many.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import operator
import threading
import time
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from sys import getrefcount
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from safecomm import _torch
from safecomm.errors import CaptureBoundaryError, PendingWorkError
from safecomm.streams import HOST, CudaStreams, Streams

log = logging.getLogger("safecomm")
_now = time.perf_counter

LAG = 4
"""Entries of one lane that rule 3 leaves alone however large they are, to keep communication and compute overlapped."""

UNORDERED = 8
"""Running works of a lane without an order that one call looks at."""

BUDGET = 256 << 20
"""Bytes of a group's abandoned works that rule 3 leaves alone however many they are."""

LOOK = 64
"""Entries of a lane of records that one call looks at."""

TRAIL_SHARE = 64
"""The share of the device's memory, one part in this many, that rule 3 leaves alone in the trails of a stream.

More than for works: a trail is what overlapped compute leaves, and ordering the allocation stream after it can delay
it.
"""


@dataclass(frozen=True)
class Pending:
    """One entry of the ledger, as :func:`safecomm.pending` shows it."""

    op: str
    """The call, such as ``"all_reduce"``."""
    nbytes: int
    """Bytes of the storages that the entry holds."""
    state: str
    """``"in flight"``: a work that nobody has waited for; ``"recorded"``: ``record_stream`` was called for it, and
    others still use it; ``"trailing"``: used on another stream than it was allocated on, which has not got there;
    ``"quarantined"``: its work failed."""
    group: str
    """c10d's name of the group."""
    device: str
    """``"cpu"``, or such as ``"cuda:0"``."""
    site: str
    """File, line and function of the call."""
    seconds: float
    """Seconds since the call."""

    def __str__(self) -> str:
        held = f"{self.nbytes} bytes on {self.device}, {self.state} for {self.seconds:.3f} s"
        return f"{self.op} of {held}, from {self.site}"


class Entry:
    """What is kept alive, for which call, and what ends it. A ``safecomm.Work`` is one, and so is a :class:`Trail`.

    A work is its own entry, because an object more for each asynchronous call would cost as much as all the rest.
    """

    op: str
    lane: Lane
    storages: tuple[Any, ...]
    pointers: tuple[int, ...]  # what an ordinary call was given: an address in each storage
    since: float
    code: types.CodeType  # with instruction, the call site: cheap to take, and a line number when somebody asks
    instruction: int
    inner: Any = None  # c10d's Work; None for trails and records
    event: Any = None  # a trail's event; a record has one from when nobody else uses it
    group: weakref.ref[Any] | None = None  # a trail's group; a work's is its lane's
    stream: int = 0  # the stream of a trail's event, or of the launch of a work that is staged
    staged: bool = False  # c10d has staging memory of the launch stream, which it gives back at the first wait anywhere
    aliases: tuple[torch.Tensor, ...] = ()  # what c10d was given in place of the caller's tensors; emptied at release
    emptied: bool = False  # the aliases were
    settled: bool = False  # the host has waited for it before a capture
    awaited: bool = False  # something else than the handle stands for the call, so nobody has forgotten it
    rare: bool = False  # a work that did not come by Lane.hold: it may be staged, have aliases, be of a capture

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held, each counted once."""
        storages = [s for s in self.storages if isinstance(s, torch.UntypedStorage)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def site(self) -> str:
        """Where the call was made, as ``file:line in function``."""
        line = self.code.co_firstlineno
        for start, end, number in self.code.co_lines():
            if start <= self.instruction < end and number is not None:
                line = number
        return f"{self.code.co_filename}:{line} in {self.code.co_name}"

    def belongs_to(self, group: Any) -> bool:
        """Return whether this is an entry of ``group``; of any, if that is None."""
        return group is None or group is self._group()

    def _group(self) -> Any:
        reference = self.group or self.lane.group
        return None if reference is None else reference()

    def describe(self, state: str = "") -> Pending:
        """Return this entry as :func:`safecomm.pending` shows it."""
        return Pending(
            op=self.op,
            nbytes=self.nbytes,
            state=state or ("trailing" if self.event else "recorded" if self.lane.records else "in flight"),
            group=_torch.group_name(self._group()),
            device="cpu" if self.lane.index == HOST else f"cuda:{self.lane.index}",
            site=self.site,
            seconds=time.perf_counter() - self.since,
        )


class Launched(Entry):
    """An asynchronous collective. ``safecomm.Work`` is this, with the rest of ``torch.distributed.Work``."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the collective (CUDA), or block the host until it is complete (CPU).

        May be called again, also on another stream. ``timeout`` is torch's: with one, the host blocks on CUDA as well.

        Raises
        ------
        CaptureBoundaryError
            If the launch was inside a CUDA graph capture and the wait is not, or the other way round. CUDA has not seen
            the call, so the capture goes on unharmed.
        """
        lane = self.lane
        index = lane.index
        rare = self.rare
        stream = HOST
        if index >= 0:
            stream = lane.current(index)
            if stream or rare:  # the default stream, which is 0, can't capture
                if lane.ledger.check_boundary(self):
                    return True
                if lane.capture:
                    timeout = None  # with one, the backend would ask the device, which would break the capture
        try:
            if rare:
                lane.ledger.guard_staging(self)
            done: bool = self.inner.wait() if timeout is None else self.inner.wait(timeout)
        except Exception as error:
            lane.ledger.fail(self, error)
            raise
        if done and self.storages:
            entries = lane.entries
            if (
                rare
                or len(entries) != 1
                or not (index < 0 or lane.at_home(stream, self.pointers[0], self.pointers[-1]))
                or entries.pop(self, lane) is lane
            ):
                lane.ledger.waited(self)
            else:
                # This is ledger.waited(self), written out for the ordinary program: a work that is alone in its lane,
                # and was waited for on the stream that its memory was allocated on.
                self.storages = ()
                busy = lane.busy
                busy.pop(lane, None)
                if entries:  # another thread came in between
                    busy[lane] = None
        return done


class Trail(Entry):
    """Memory that was used on another stream than it was allocated on."""


class Record(Entry):
    """Memory that ``record_stream`` was called for."""

    order: str  # "auto", or the one way to give it back: "order" or "defer"
    homeless: bool  # where it was allocated does not matter: it is deferred


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def leave_empty(alias: torch.Tensor) -> None:
    """Take its memory from ``alias``, which c10d may keep until the group's next collective."""
    key = alias.dtype, alias.device
    empty = _EMPTY.get(key)
    if empty is None:
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=alias.dtype, device=alias.device)
        if type(empty) is torch.Tensor and _torch.has_plain_keys(empty):  # and not a mode's
            _EMPTY[key] = empty
    alias.data = empty


W = TypeVar("W", bound=Entry)


class Lane:
    """Entries of one origin: the works of a group, device and capture, or the trails of a stream."""

    __slots__ = (
        "at_home", "backend", "blind", "budget", "busy", "capture", "current", "entries", "group", "index", "key",
        "ledger", "like_one", "like_two", "likes", "ordered", "records", "regions", "stream", "streamed",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, key: Any, index: int, stream: int, capture: int, budget: int) -> None:
        self.ledger = ledger
        self.key = key
        self.busy = ledger.busy
        self.current = ledger.streams.current
        self.at_home = ledger.streams.at_home
        self.index = index  # device index, or HOST
        self.stream = stream  # that of the trails, or of the first launch
        self.capture = capture  # the graph capture that all of it is part of; 0 for none
        self.budget = budget
        # Weak, because a group that is still referred to when the interpreter ends can take the process down (gloo,
        # torch 2.13). None for trails.
        self.group: weakref.ref[Any] | None = None
        self.backend: Any = None  # of an ordinary lane: the C++ side of the group's backend, which direct calls go to
        self.regions: dict[Any, Any] = {}  # c10d's open coalescing regions, by group
        # Whether one tensor, or two, are like those of an earlier direct call; see look_alike().
        self.like_one: Callable[..., bool] = _torch.unlike
        self.like_two: Callable[..., bool] = _torch.unlike
        self.likes: dict[Any, Callable[..., bool]] = {}
        self.streamed = False  # waiting for a work orders a stream; with other backends than NCCL it blocks the host
        self.ordered = True  # entries end in the order in which they were made
        self.blind = False  # the backend does not tell when a work is over
        self.records = False  # entries are records
        # Not a plain dict: finding its first entry takes longer with every entry deleted before it.
        self.entries: OrderedDict[Entry, None] = OrderedDict()

    def oldest(self, count: int) -> tuple[Entry, ...]:
        """Return the ``count`` oldest entries, also while other threads put entries in and take them out."""
        while True:
            try:
                return tuple(itertools.islice(self.entries, count))
            except RuntimeError:
                continue

    def first(self) -> Entry | None:
        """Return the oldest entry, also while other threads take entries out."""
        while self.entries:
            with contextlib.suppress(RuntimeError, StopIteration):
                return next(iter(self.entries))
        return None

    def take(self, entry: Entry) -> bool:
        """Take ``entry`` out; False if another thread did."""
        if self.entries.pop(entry, self) is self:
            return False
        self.emptied()
        return True

    def emptied(self) -> None:
        """See whether an entry that was taken out was the last."""
        if not self.entries:
            busy = self.busy
            busy.pop(self, None)
            if self.entries:  # another thread came in between
                busy[self] = None
            elif self.capture:  # a capture comes only once
                self.ledger.forget(self)

    def hold(
        self,
        work: W,
        op: str,
        inner: Any,
        storages: tuple[torch.UntypedStorage, ...],
        pointers: tuple[int, ...],
        frame: types.FrameType,
    ) -> W:
        """Make ``work`` the entry of ``inner``, which was just launched from ``frame``, and return it.

        For an ordinary call, of one or two ``storages``, with a pointer into each, on the group and device of this
        lane. For others see ``Ledger.hold``.
        """
        index = self.index
        if index >= 0 and (stream := self.current(index)) and self.ledger.streams.capture(stream):
            group = self.group() if self.group is not None else None
            return self.ledger.hold(work, op, inner, group, index, storages, frame)
        work.op = op
        work.inner = inner
        work.pointers = pointers
        work.code = frame.f_code
        work.instruction = frame.f_lasti
        work.since = _now()
        work.lane = self
        work.storages = storages  # last, as in each place: record_memory() looks at the rest when it is set
        self.entries[work] = None
        self.busy[self] = None
        return work

    def learn(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Remember what ``tensors`` of a direct call are like, because those of the next one will be like them."""
        now = self.like_one if len(tensors) == 1 else self.like_two
        key = tuple((type(tensor), tensor.dtype, tensor.dim()) for tensor in tensors)
        like = self.likes.get(key)
        if like is None or like is now:  # or it has just said no: inside a mode, tensors are like others
            like = self.likes[key] = _torch.look_alike(*tensors)
        if len(tensors) == 1:
            self.like_one = like
        else:
            self.like_two = like

    def nbytes(self) -> int:
        """Return about how many bytes the entries hold: from the oldest ones, so that it takes constant time."""
        sample = self.oldest(8)
        return sum(entry.nbytes for entry in sample) * len(self.entries) // max(len(sample), 1)


class Ledger:
    """The entries of the process, and the rules of the module's docstring.

    ``streams`` answers for the device; ``lag``, ``budget`` and ``trail_budget`` are rule 3's.
    """

    def __init__(
        self, streams: Streams, *, lag: int = LAG, budget: int = BUDGET, trail_budget: int | None = None
    ) -> None:
        self.streams = streams
        self.current = streams.current
        self.busy: dict[Lane, None] = {}  # the lanes that hold anything: none in a program that waits for its works
        self.quarantine: dict[Entry, None] = {}  # what has failed
        self._lag = lag
        self._budget = budget
        self._trail_budget = trail_budget
        self.direct: dict[int, Lane] = {}  # by the id of a group that is c10d's own: the lane of its ordinary calls
        self._diverted: dict[int, Lane] = {}  # the same while all calls take the long way
        self._diverting: Counter[int] = Counter()  # how often all calls are, as 0, and those of a group, by its id
        self._lanes: dict[Any, Lane] = {}
        # Around whatever touches records: they are looked at, marked and released in several steps, and torch lets
        # other threads run in some. No collective takes it while there are none.
        self._of_records = threading.RLock()
        self.recorded: dict[int, dict[tuple[int, int], Record]] = {}  # by storage; by stream and capture
        self._reported: set[tuple[types.CodeType, int]] = set()
        self.trails = 0  # how often memory was used on another stream than its own
        self.failures = 0
        self._orphans: deque[tuple[int, tuple[int, ...], tuple[Any, ...], types.CodeType, int]] = deque()
        self._orphanage = Lane(self, "orphans", HOST, 0, 0, 0)  # is busy while there are any

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
        p2p: bool = False,
    ) -> W:
        """Make ``work`` the entry of ``inner``, which was just launched from ``frame``, and return it.

        ``storages`` is what it holds, on device ``index``. For the rest see :class:`Entry` and :class:`Lane`. For any
        call; ordinary ones take ``Lane.hold``.
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
        if lane is None or lane.index != index or capture or p2p:
            lane = self.lane_of(group, index, stream, capture, p2p=p2p)
        work.lane = lane
        work.storages = storages
        work.rare = True
        work.aliases = aliases
        work.staged = staged
        work.stream = stream
        lane.entries[work] = None
        self.busy[lane] = None
        return work

    def lane_of(self, group: Any, index: int, stream: int = 0, capture: int = 0, *, p2p: bool = False) -> Lane:
        """Return the lane of works of ``group`` on device ``index``, and make it if there is none."""
        key = (id(group), index, capture, p2p)
        lane = self._lanes.get(key)
        if lane is None:
            backend = _torch.backend_name(group, "cpu" if index == HOST else "cuda")
            lane = Lane(self, key, index, stream, capture, self._budget)
            lane.group = weakref.ref(group, lambda _: self._group_died(key))
            lane.regions = _torch.world.pg_coalesce_state
            lane.streamed = backend == "nccl"
            lane.ordered = backend == "nccl" and not p2p  # point-to-point may have a communicator for each peer
            # A gloo send or receive does not tell that it is over before somebody has waited for it (is_completed()
            # stays False, torch 2.13), and a second wait for it hangs. So it is never polled, and waited for once.
            lane.blind = backend == "gloo" and p2p
            self._lanes[key] = lane
            direct = self._diverted if self._is_diverted(id(group)) else self.direct
            known = backend in ("nccl", "gloo")  # the works of others may be something else: the fake one's never end
            if type(group) is ProcessGroup and known and not capture and not p2p and id(group) not in direct:
                lane.backend = _torch.backend_of(group, "cpu" if index == HOST else "cuda")
                if lane.backend is not None:
                    direct[id(group)] = lane
        return lane

    @contextlib.contextmanager
    def diverted(self, group: Any = None) -> Iterator[None]:
        """Let every call of ``group`` (None: of any group) take the long way, past whatever has to see all of them."""
        key = 0 if group is None else id(group)
        self._diverting[key] += 1
        for known in tuple(self.direct) if group is None else (key,):
            lane = self.direct.pop(known, None)
            if lane is not None:
                self._diverted[known] = lane
        try:
            yield
        finally:
            self._diverting -= Counter((key,))  # which keeps no zeros
            for known in tuple(self._diverted) if group is None else (key,):
                if not self._is_diverted(known) and (lane := self._diverted.pop(known, None)) is not None:
                    self.direct[known] = lane

    def _is_diverted(self, key: int) -> bool:
        return self._diverting[0] > 0 or self._diverting[key] > 0

    def forget(self, lane: Lane) -> None:
        """Forget a lane that nothing will go to again."""
        self._lanes.pop(lane.key, None)

    def _group_died(self, key: tuple[int, int, int, bool]) -> None:
        # A group has died. What its lane holds stays in busy, and is swept.
        lane = self._lanes.pop(key, None)
        if lane is not None:
            lane.backend = None  # a handle that is kept would keep it
        self.direct.pop(key[0], None)
        self._diverted.pop(key[0], None)

    def trail(self, op: str, group: Any, index: int, storages: tuple[Any, ...], frame: types.FrameType) -> None:
        """Hold those of ``storages``, used on the current stream of ``index``, that were allocated on another (S1)."""
        self._trail(op, group, index, storages, frame.f_code, frame.f_lasti, time.perf_counter())

    def _trail(
        self,
        op: str,
        group: Any,
        index: int,
        storages: tuple[Any, ...],
        code: types.CodeType,
        instruction: int,
        since: float,
    ) -> None:
        stream = self.streams.current(index)
        astray = tuple(s for s in storages if self.home(s, stream) != stream)
        if not astray:
            return
        capture = self._capture_of(stream)
        lane = self._lane_of_stream((stream, index, capture), index, stream, capture)
        self.trails += 1
        entry = Trail()
        entry.op = op
        entry.code = code
        entry.instruction = instruction
        entry.since = since
        entry.event = self.streams.mark(index, stream)
        entry.stream = stream
        entry.group = None if group is None else weakref.ref(group)
        entry.lane = lane
        entry.storages = astray
        lane.entries[entry] = None
        self.busy[lane] = None

    def _lane_of_stream(self, key: Any, index: int, stream: int, capture: int) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            budget = self._trail_budget
            if budget is None:
                budget = self.streams.capacity(index) // TRAIL_SHARE
            lane = self._lanes[key] = Lane(self, key, index, stream, capture, budget)
        return lane

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
        not held.
        """
        home = None if homeless else self.home(storage, stream)
        if home == stream:
            return True
        if home is None:
            if not homeless:
                return False
            order = "defer"
        capture = self._capture_of(stream)
        with self._of_records:
            of_storage = self.recorded.setdefault(storage._cdata, {})
            entry = of_storage.get((stream, capture))
            if entry is not None and entry.event is None:
                return True
            lane = self._lane_of_stream(("records", stream, index, capture), index, stream, capture)
            lane.records = True
            entry = of_storage[stream, capture] = Record()
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
            self.busy[lane] = None
        return True

    def home(self, storage: Any, nowhere: int) -> int | None:
        """Return the stream that ``storage`` was allocated on, and ``nowhere`` if it has no memory."""
        # A tensor subclass without memory of its own is held as an object, and has no address.
        pointer = storage.data_ptr() if type(storage) is torch.UntypedStorage else 0
        return self.streams.home(pointer) if pointer else nowhere

    def _release(self, entry: Entry) -> None:
        if entry.aliases:
            for alias in entry.aliases:
                leave_empty(alias)
            entry.aliases = ()
            entry.emptied = True
        if entry.lane.records:
            self._forget_record(entry)
        entry.storages = ()
        if entry.event is not None and not entry.lane.capture:  # an event of a capture stays the graph's
            self.streams.recycle(entry.lane.index, entry.event)

    def _forget_record(self, entry: Entry) -> None:
        with self._of_records:  # who asks whether a record is alone must find all of it, or nothing
            if entry.storages:
                cdata = entry.storages[0]._cdata
                of_storage = self.recorded.get(cdata, {})
                if of_storage.get((entry.stream, entry.lane.capture)) is entry:
                    del of_storage[entry.stream, entry.lane.capture]
                if not of_storage:
                    self.recorded.pop(cdata, None)
            entry.storages = ()

    def _take_and_release(self, entries: Iterable[Entry]) -> None:
        for entry in tuple(entries):
            if entry.lane.take(entry):  # else another thread has
                self._release(entry)

    # --- rule 1: waited ---------------------------------------------------------------------------------

    def check_boundary(self, entry: Entry) -> bool:
        """Raise CaptureBoundaryError if the current stream is not in the capture that ``entry`` was launched in.

        Returns whether there is nothing to wait for: the host has waited for the work before the capture.
        """
        lane = entry.lane
        stream = self.current(lane.index)
        now = self._capture_of(stream)
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
                if lane.take(earlier) and self._wait_here(earlier):
                    self._settle(earlier)
        if lane.take(entry) or (self.quarantine and self._pardon(entry)):
            self._settle(entry)

    def _pardon(self, entry: Entry) -> bool:
        """Take ``entry`` out of the quarantine; False if another thread did."""
        return self.quarantine.pop(entry, self) is None

    def _settle(self, entry: Entry) -> None:
        """Release a work that the current stream (or the host) has waited for; what that can't cover is a trail."""
        index = entry.lane.index
        if index >= 0:
            stream = self.current(index)
            for storage in entry.storages:
                if self.home(storage, stream) != stream:
                    self._leave_trail(entry)
                    break
        if entry.aliases:
            self._release(entry)
        else:
            entry.storages = ()

    def _leave_trail(self, entry: Entry) -> None:
        lane = entry.lane
        group = lane.group() if lane.group is not None else None
        self._trail(entry.op, group, lane.index, entry.storages, entry.code, entry.instruction, entry.since)

    def only_used_on(self, index: int, stream: int, other: int) -> list[Entry]:
        """Return what was allocated on ``stream``, and nothing but ``other`` uses any more.

        To be asked before ``stream`` is ordered after ``other``, and given to :meth:`release_ordered` after it: in
        between, other threads can use more there.
        """
        capture = self._capture_of(stream)
        if self._capture_of(other) != capture:
            return []  # the wait takes one of them into the other's capture, and orders nothing that ran before
        found = []
        for key in ((other, index, capture), ("records", other, index, capture)):
            lane = self._lanes.get(key)
            for entry in lane.oldest(LOOK) if lane is not None else ():
                if all(self.home(storage, stream) == stream for storage in entry.storages):
                    with self._of_records:
                        if entry.event is not None or self._alone(entry):
                            found.append(entry)
        return found

    def release_ordered(self, entries: list[Entry]) -> None:
        """Release ``entries``, whose allocation stream was just ordered after their last use."""
        self._take_and_release(entries)

    def _wait_here(self, entry: Entry) -> bool:
        """Order the current stream after a work; on failure quarantine it and return False.

        This is also what makes c10d let go: ProcessGroupNCCL keeps references of its own until a work is first waited
        for or, if nobody does, until the next collective of the same group (torch 2.8 and later).
        """
        try:
            self.guard_staging(entry)
            entry.inner.wait()
        except BaseException as error:
            self._quarantine(entry, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def guard_staging(self, entry: Entry) -> None:
        """Order the stream of the launch after a work, if c10d would otherwise give its staging back to it too early.

        The list forms copy through memory that c10d allocates on the stream of the launch and gives back at the first
        wait, on whatever stream that is.
        """
        index = entry.lane.index
        if entry.staged and entry.storages and index != HOST and self.streams.current(index) != entry.stream:
            with self.streams.using(index, entry.stream):
                entry.inner.wait()

    def fail(self, entry: Entry, error: BaseException) -> None:
        """Quarantine an entry whose work failed: a kernel may still be touching its memory (S4)."""
        if entry.lane.take(entry):
            self._quarantine(entry, error)

    def _quarantine(self, entry: Entry, error: BaseException) -> None:
        self.failures += 1
        if self._idle(entry):
            self._release(entry)
            return
        self.quarantine[entry] = None
        log.warning(
            "%s failed (%s); its memory is kept until drain(wait=True)",
            entry.describe("quarantined"),
            error,
        )

    def _idle(self, entry: Entry) -> bool:
        """Return whether it is known that nothing touches the memory of a failed work any more."""
        # On the host, complete means that no thread of the backend does, whether the work failed or not.
        return entry.lane.index == HOST and not entry.lane.blind and bool(entry.inner.is_completed())

    # --- rules 2 and 3: over, or too much behind ----------------------------------------------------------

    def over(self, entry: Entry) -> None:
        """Release ``entry``, whose work has just been seen to be complete, if that can be relied on."""
        if not entry.lane.blind and not self._capturing() and not self._blocked(entry):
            self._take(entry)

    def sweep(self, *, thorough: bool = False) -> None:
        """Release what rules 2 and 3 allow, without blocking. Every wrapped call begins with it if anything is held.

        It looks at the oldest entry of each lane, and on while they are released; ``thorough``: at every entry.
        """
        capturing = self._capturing()
        if self._orphans and not capturing:
            self._adopt()
        for entry in tuple(self.quarantine):
            if self._idle(entry) and self._pardon(entry):
                self._release(entry)
        with self.streams.lenient():
            for lane in tuple(self.busy):
                if lane.records:
                    self._sweep_records(lane, capturing)
                elif lane.capture:
                    self._sweep_captured(lane, capturing)
                elif lane.blind:
                    self._sweep_blind(lane)
                elif not capturing:  # querying an event inside a capture would break the capture
                    if lane.ordered:
                        self._sweep_ordered(lane)
                    else:
                        self._sweep_unordered(lane, len(lane.entries) if thorough else UNORDERED)

    def _capture_of(self, stream: int) -> int:
        return self.streams.capture(stream) if stream else 0  # 0 is the legacy default stream, which can't capture

    def _capturing(self) -> int:
        """Return the capture that a current stream is part of; 0 if none is."""
        others = {entry.lane.index for entry in tuple(self.quarantine)} | {orphan[0] for orphan in tuple(self._orphans)}
        for index in ({lane.index for lane in tuple(self.busy)} | others) - {HOST}:
            stream = self.streams.current(index)
            if stream and (capture := self.streams.capture(stream)):
                return capture
        return 0

    def _sweep_ordered(self, lane: Lane) -> None:
        while (entry := lane.first()) is not None:
            dropped = getrefcount(entry) <= _UNSHARED
            if not self._sweep_first(lane, entry, dropped):
                return

    def _sweep_unordered(self, lane: Lane, count: int) -> None:
        # One that never ends must not keep the others: what is not over goes to the back, and the next call looks on.
        running = 0
        while running < min(count, len(lane.entries)) and (entry := lane.first()) is not None:
            dropped = getrefcount(entry) <= _UNSHARED
            if not self._sweep_first(lane, entry, dropped):
                running += 1
                with contextlib.suppress(KeyError):
                    lane.entries.move_to_end(entry)

    def _sweep_first(self, lane: Lane, entry: Entry, dropped: bool) -> bool:
        """Release ``entry`` if rule 2 or 3 allows; return whether they do."""
        dropped = dropped and not entry.awaited
        over = self._over(entry)
        if not over and not self._behind(lane, entry, dropped):
            return False
        if not (over and entry.inner is None) and self._blocked(entry):
            return False
        self._take(entry, over=over, dropped=dropped)
        return True

    def _blocked(self, entry: Entry, streams: set[int | None] | None = None) -> bool:
        """Return whether a stream that the release of an eager entry would order is being captured just now."""
        if entry.lane.index == HOST or entry.lane.capture:
            return False
        if streams is None:
            streams = {self.home(storage, 0) for storage in entry.storages}
            if entry.staged:
                streams.add(entry.stream)
        return any(stream and self.streams.capture(stream) for stream in streams)

    def _sweep_blind(self, lane: Lane) -> None:
        entry = lane.first()
        if entry is not None and getrefcount(entry) <= _UNSHARED:
            self._report(entry)

    def _over(self, entry: Entry) -> bool:
        return self.streams.reached(entry.event) if entry.inner is None else bool(entry.inner.is_completed())

    def _behind(self, lane: Lane, entry: Entry, dropped: bool) -> bool:
        """Return whether rule 3 applies: too much, nobody will wait, and the host need not block to order a stream."""
        if len(lane.entries) <= self._lag:
            return False
        if entry.inner is None:
            # What the caller still refers to would not come back by ordering anything.
            if not all(_torch.only_holder(storage) for storage in entry.storages):
                return False
        elif not (lane.streamed and dropped):
            return False
        return lane.nbytes() > lane.budget and all(self.home(s, 0) is not None for s in entry.storages)

    def _take(self, entry: Entry, *, over: bool = True, dropped: bool = False) -> None:
        """Order the streams that can reuse the memory of ``entry`` after its end, and release it."""
        lane = entry.lane
        if not lane.take(entry):
            return
        if entry.inner is None:
            for home in set() if over else {self.home(s, entry.stream) for s in entry.storages} - {entry.stream, None}:
                self.streams.order(lane.index, home, entry.event)  # type: ignore[arg-type]
        else:
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
        homes = {self.home(storage, stream) for storage in entry.storages} or {stream}
        if None in homes:  # memory of nobody knows which stream: wait here, and leave a trail for it
            homes = (homes - {None}) | {stream}
        for home in homes:
            with self.streams.using(lane.index, home):  # type: ignore[arg-type]
                if not self._wait_here(entry):
                    return False
        if any(self.home(storage, stream) is None for storage in entry.storages):
            self._leave_trail(entry)
        return True

    def _sweep_captured(self, lane: Lane, capturing: int) -> None:
        if lane.capture == capturing:
            for entry in tuple(lane.entries):
                if entry.inner is None and self._forgotten(entry):
                    self._take(entry, over=False)
        elif self.streams.capture(lane.stream) != lane.capture:
            # The capture is over. Its works can't be waited for any more, and its memory is the graph's.
            self._take_and_release(lane.entries)

    def _sweep_records(self, lane: Lane, capturing: int) -> None:
        capture = self._capture_of(lane.stream)
        if capture == lane.capture == capturing:
            for entry in lane.oldest(LOOK):
                with self._of_records:
                    done = not entry.storages or self._sweep_record(lane, entry)
                if not done:
                    with contextlib.suppress(KeyError):
                        lane.entries.move_to_end(entry)
        elif lane.capture and capture != lane.capture:
            # The capture is over: what it has recorded runs when the graph does.
            self._take_and_release(lane.entries)

    def _sweep_record(self, lane: Lane, entry: Entry) -> bool:
        """Give back a record that nobody else refers to, if its turn has come; return whether it had."""
        if entry.event is None:
            if not self._alone(entry):
                return False
            home = self.home(entry.storages[0], lane.stream)
            if lane.capture if home is None else self._capture_of(home) != lane.capture:
                return False  # allocated outside of this capture, or inside of one that is going on elsewhere
            entry.event = self.streams.mark(lane.index, lane.stream)
        order = "order" if lane.capture else entry.order  # type: ignore[attr-defined]
        over = not lane.capture and self.streams.reached(entry.event)
        if over or order == "order" or (order == "auto" and self._behind(lane, entry, False)):
            if over or not self._blocked(entry):
                self._take(entry, over=over)
            return True
        return False

    def _alone(self, entry: Entry) -> bool:
        """Return whether nobody but records refers to what a record holds, neither in C++ nor in Python."""
        with self._of_records:
            if not entry.storages:
                return False  # another thread has released it
            (storage,) = entry.storages
            shared = len(self.recorded[storage._cdata]) - 1 + _torch.KEPT.get(storage._cdata, 0)
            return getrefcount(storage) - shared <= _UNSHARED_STORAGE and _torch.only_holder(storage)

    def freeing(self, storage: torch.UntypedStorage, *, order: bool = True) -> list[tuple[int, int]]:
        """Make it safe that ``storage`` is about to free its memory by itself, which no reference can keep.

        Orders the stream that it was allocated on after those that ``record_stream`` was called with. Returns those
        with which that can't be done, or with ``order=False`` all of them, as pairs of device index and stream: they
        are the allocator's to keep in order. Once the memory is gone, :meth:`freed` is to be called.
        """
        left = []
        with self._of_records:
            for (stream, _), entry in tuple(self.recorded.get(storage._cdata, {}).items()):
                lane = entry.lane
                home = None if entry.homeless else self.home(storage, stream)
                captures = {self._capture_of(stream), self._capture_of(home or 0)}
                if order and captures == {lane.capture} and home is not None:
                    event = self.streams.mark(lane.index, stream)
                    self.streams.order(lane.index, home, event)
                    if not lane.capture:
                        self.streams.recycle(lane.index, event)
                else:
                    left.append((lane.index, stream))
        return left

    def freed(self, storage: torch.UntypedStorage) -> None:
        """Forget what ``storage`` was recorded for: that memory is gone, after :meth:`freeing`."""
        with self._of_records:
            self._take_and_release(self.recorded.get(storage._cdata, {}).values())

    def hand_over(self) -> list[tuple[torch.UntypedStorage, int, int]]:
        """Let go of all records but those of captures; return what they held, the device index, and the stream."""
        handed = []
        for lane in tuple(self.busy):
            for entry in tuple(lane.entries) if lane.records and not lane.capture else ():
                with self._of_records:
                    if lane.take(entry):
                        handed.append((entry.storages[0], lane.index, lane.stream))
                        self._release(entry)
        return handed

    # --- captures -------------------------------------------------------------------------------------------

    def join_unwaited(self, capture: int, stream: int) -> list[str]:
        """Order ``stream`` after all works of ``capture`` that nobody has waited for there; describe each."""
        left = []
        for lane in tuple(self.busy):
            if lane.capture == capture:
                for entry in tuple(lane.entries):
                    if entry.inner is not None:
                        left.append(f"{entry.op} launched at {entry.site}")
                        with self.streams.using(lane.index, stream):
                            if lane.take(entry) and self._wait_here(entry):
                                self._release(entry)
        return left

    def end_capture(self, capture: int) -> None:
        """Release what is held for ``capture``, which is over."""
        for lane in tuple(self.busy):
            if lane.capture == capture:
                self._take_and_release(lane.entries)

    def orphan(
        self, index: int, streams: tuple[int, ...], storages: tuple[Any, ...], code: types.CodeType, instruction: int
    ) -> None:
        """Take over ``storages``, which only graphs have used, on ``streams``. May be called from a destructor."""
        self._orphans.append((index, streams, storages, code, instruction))
        self.busy[self._orphanage] = None

    def _adopt(self) -> None:
        for _ in range(len(self._orphans)):
            try:
                orphan = self._orphans.popleft()
            except IndexError:  # another thread was faster
                break
            index, streams, storages, code, instruction = orphan
            # Graphs are replayed through their object, which notes the stream; for one that was not, the stream that is
            # current now is the best guess.
            streams = streams or (self.streams.current(index),)
            if any(self._capture_of(stream) for stream in streams):
                self._orphans.append(orphan)
                continue
            for stream in streams:
                with self.streams.using(index, stream):
                    self._trail("a CUDA graph", None, index, storages, code, instruction, time.perf_counter())
        if not self._orphans:
            self.busy.pop(self._orphanage, None)
            if self._orphans:  # a graph died in between
                self.busy[self._orphanage] = None

    def await_before_capture(self, timeout: timedelta | None) -> None:
        """Block the host until all works are over, so that there is nothing to wait for in a capture."""
        works = [entry for entry in self._unsettled() if entry.inner is not None]
        self.await_works(timeout, None)
        for entry in works:
            entry.settled = True

    def _forgotten(self, entry: Entry) -> bool:
        """Return whether only the ledger still refers to what a captured trail holds, and all of it can be ordered."""
        for storage in entry.storages:
            home = self.home(storage, entry.stream)
            if home is None or not _torch.only_holder(storage) or self.streams.capture(home) != entry.lane.capture:
                return False
        return True

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
        failed = [entry.describe("quarantined") for entry in tuple(self.quarantine)]
        return [entry.describe() for entry in entries] + failed

    def drain(self, *, wait: bool = False, timeout: timedelta | None = None, group: Any = None) -> int:
        """Release what is safe, or with ``wait`` all of it, once it is over; return the bytes that are still held."""
        if wait:
            self._finish(timeout, group)
        else:
            self.sweep(thorough=True)
        quarantined = [entry for entry in tuple(self.quarantine) if entry.belongs_to(group)]
        return sum(entry.nbytes for entry in self._unsettled(group) + quarantined)

    def _finish(self, timeout: timedelta | None, group: Any) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self.sweep()  # takes over what graphs that died have left
        self.await_works(timeout, group)
        self._empty_quarantine(group, deadline)
        self._await_all(group, deadline)  # what a record holds may have been held by one of those too

    def _empty_quarantine(self, group: Any, deadline: float | None) -> None:
        for entry in tuple(self.quarantine):
            if entry.belongs_to(group):
                if entry.lane.index != HOST:
                    self._synchronize(entry, deadline)
                elif not entry.lane.blind:  # the threads of a work that timed out go on
                    self._await([entry], self._idle, deadline)
                if self._pardon(entry):
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

    def await_works(self, timeout: timedelta | None, group: Any) -> None:
        """Block the host until all works of ``group`` (None: of all groups) are over, and release them.

        Those that fail go to the quarantine. Raises PendingWorkError if others are not over in time.
        """
        if self._capturing():
            raise CaptureBoundaryError(
                "the host can't wait for works inside a CUDA graph capture, where they are only recorded. "
                "Nothing was done, and the capture is unharmed."
            )
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for entry in [entry for entry in self._entries(group) if entry.lane.blind]:
            self._wait_blind(entry, deadline)

        self._await_all(group, deadline)

    def _await_all(self, group: Any, deadline: float | None) -> None:
        def gone(entry: Entry) -> bool:
            self.sweep(thorough=True)
            return entry not in entry.lane.entries

        while entries := self._unsettled(group):  # a work can leave a trail
            self._await(entries, gone, deadline)

    def _entries(self, group: Any = None) -> list[Entry]:
        """Return the entries of ``group`` (None: of all groups), without the quarantine."""
        return [entry for lane in tuple(self.busy) for entry in tuple(lane.entries) if entry.belongs_to(group)]

    def _unsettled(self, group: Any = None) -> list[Entry]:
        """Return the entries that the device will be over with: not the records of what others still use."""
        return [
            entry
            for entry in self._entries(group)
            # What a capture holds is over with the capture, which may be another thread's.
            if not entry.lane.capture and (not entry.lane.records or entry.event is not None or self._alone(entry))
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
        for key, lane in tuple(self._lanes.items()):
            if lane.group is not None and (group is None or lane.group() is group):
                for entry in tuple(lane.entries):
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
        for lane in self._lanes.values():
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


def _references_to_a_dropped_entry() -> int:
    entry = Entry()
    lane = OrderedDict({entry: None})
    references = getrefcount(entry)
    del lane
    return references


_UNSHARED = _references_to_a_dropped_entry()
"""References to an entry whose handle is gone: its lane's, and those of one variable and of the call that counts.

Counted once, because versions of Python differ. Where it is compared, the count must be taken directly, on the only
variable: how many references an argument of a Python function is worth changes as the interpreter specialises the call.
"""


def _references_to_an_unshared_storage() -> int:
    entry = Entry()
    entry.storages = (torch.empty(0).untyped_storage(),)
    (storage,) = entry.storages
    return getrefcount(storage)


_UNSHARED_STORAGE = _references_to_an_unshared_storage()
"""The same of a storage: its entry's, and those of one variable and of the call that counts."""


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
