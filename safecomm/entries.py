"""What is held: entries, and the lanes that they are kept in.

Three kinds of entry. A *work* holds what a running asynchronous collective reads and writes. A *trail* holds
what was used on another stream than the one it was allocated on, until the device has passed an event there.
A *record* holds what ``record_stream`` was called for: while others use it too it only waits, and from then on
it is a trail. When they are let go is not decided here: see the rules at the head of ``safecomm/ledger.py``.

Entries that end in the order in which they were made share a ``Lane``. The asynchronous collectives of one NCCL
group do, so waiting for one of them settles all before it; Megatron and DeepSpeed wait only for the last of many.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from safecomm import _torch, backends
from safecomm.guards import Guards
from safecomm.sites import line_of
from safecomm.streams import HOST, Streams

# Bound once: each of these is read on every call.
_now = time.perf_counter
_profiler = _torch.profiler

_NOTHING = contextlib.nullcontext()


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
    home: int | None  # of a work: the one stream that all its storages were allocated on, if that is known
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
    used: bool = False  # its work is complete, and somebody else may still wait for it: until then it only waits
    awaited: bool = False  # something else than the handle stands for the call, so nobody has forgotten it
    # A work that did not come by WorkLane.hold: it may be staged, have aliases, be of a capture. Or one that was seen
    # to be over, perhaps because it has failed; or whose handle is not the backend's own.
    rare: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held, each counted once."""
        storages = [s for s in self.storages if isinstance(s, torch.UntypedStorage)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def site(self) -> str:
        """Where the call was made, as ``file:line in function``."""
        return line_of(self.code, self.instruction)

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

    lane: WorkLane

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
        done: bool
        if index >= 0:
            stream = lane.current(index)
            # The default stream, which is 0, can't capture.
            if rare or (stream and lane.ledger.streams.is_capturing(index, stream)):
                if lane.ledger.check_boundary(self):
                    return True
                if lane.capture:
                    timeout = None  # with one, the backend would ask the device, which would break the capture
        try:
            if rare:
                lane.ledger.guard_staging(self)
            if (
                timeout is None
                and lane.brief
                and not rare
                and self in lane.entries  # else it has been waited for, or has failed, which a wait tells again
                and not _profiler._is_profiler_enabled
            ):
                self.inner.block_current_stream()
                done = True
            elif lane.queries:
                done = lane.wait_for(self.inner, timeout)
            else:
                done = self.inner.wait() if timeout is None else self.inner.wait(timeout)
        except Exception as error:
            lane.ledger.fail(self, error)
            raise
        if done and self.storages:
            entries = lane.entries
            if (
                rare
                or self.home != stream
                or (len(entries) != 1 and lane.first() is not self)
                or entries.pop(self, lane) is lane
            ):
                lane.ledger.waited(self)
            else:
                # This is ledger.waited(self), written out for the ordinary program: the oldest work of its lane, waited
                # for on the stream that its memory was allocated on.
                self.storages = ()
                if not entries:
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
        with _torch.inference_mode(False):
            empty = torch.empty(0, dtype=alias.dtype, device=alias.device)
        if type(empty) is torch.Tensor and _torch.has_plain_keys(empty):  # and not a mode's
            _EMPTY[key] = empty
    alias.data = empty


def leave_all_empty(aliases: Iterable[torch.Tensor]) -> None:
    """Take their memory from ``aliases``, of which most are of one type and device."""
    like: torch.Tensor | None = None
    for alias in aliases:
        if like is None or alias.dtype is not like.dtype or alias.get_device() != like.get_device():
            leave_empty(alias)
            like = alias
        else:
            alias.data = like


W = TypeVar("W", bound=Entry)
K = TypeVar("K")


def keys_of(table: Mapping[K, Any]) -> list[K]:
    """Return the keys of ``table``, which other threads and dying graphs and groups change at any time.

    A list: making a tuple of a dictionary can run the garbage collector in the middle (before Python 3.12), and the
    finalizer of a graph adds to what is being looked at.
    """
    return list(table)


class Rules(Protocol):
    """What a work and its lane ask of the ledger, which is above them."""

    streams: Streams
    """Who answers for the device."""
    busy: dict[Lane, None]
    """The lanes that hold anything."""
    quarantine: dict[Entry, None]
    """What has failed."""

    def hold(
        self, work: W, op: str, inner: Any, group: Any, index: int, storages: tuple[Any, ...], frame: types.FrameType, /
    ) -> W:
        """Make ``work`` the entry of ``inner``, whatever kind of call that is of."""

    def lane_of(self, group: Any, index: int, *, unordered: bool) -> WorkLane:
        """Return the lane of works of ``group`` on device ``index``."""

    def check_boundary(self, entry: Entry, /) -> bool:
        """Raise CaptureBoundaryError if a wait would cross a capture's boundary; return whether there is none to do."""

    def refuse_query_in_capture(self, entry: Entry, /) -> None:
        """Raise CaptureBoundaryError where asking whether a work is complete would break a capture."""

    def guard_staging(self, entry: Entry, /) -> None:
        """See that c10d gives its staging back to the stream of the launch only after the work."""

    def waited(self, entry: Entry, /) -> None:
        """Settle a work that the current stream, or the host, has just waited for."""

    def over(self, entry: Entry, /) -> None:
        """Release a work that has just been seen to be complete."""

    def fail(self, entry: Entry, error: BaseException, /) -> None:
        """Quarantine a work that failed."""


class Lane:
    """Entries of one origin, in the order in which they were made: the works of a group, or the trails of a stream."""

    __slots__ = (
        "blind", "budget", "busy", "capture", "entries", "group", "index", "key", "ordered", "passing", "patient",
        "records", "round", "stream", "table", "unseen",
    )  # fmt: skip

    def __init__(
        self,
        busy: dict[Lane, None],
        table: dict[Any, Any],
        key: Any,
        index: int,
        stream: int = 0,
        capture: int = 0,
        budget: int = 0,
    ) -> None:
        self.busy = busy  # the lanes that hold anything
        self.table = table  # where this lane is found under its key
        self.key = key
        self.index = index  # device index, or HOST
        self.stream = stream  # that of the trails, or of the first launch
        self.capture = capture  # the graph capture that all of it is part of; 0 for none
        self.budget = budget
        # Weak, because a group that is still referred to when the interpreter ends can take the process down (gloo,
        # torch 2.13). None for trails.
        self.group: weakref.ref[Any] | None = None
        self.ordered = True  # entries end in the order in which they were made
        self.blind = False  # the backend does not tell when a work is over
        self.patient = False  # entries are works that can be asked later: somebody is going to wait for them
        self.records = False  # entries are records
        # Records that nobody else uses any more, in the order of their events.
        self.passing: OrderedDict[Entry, None] = OrderedDict()
        self.round: list[Entry] = []  # the rest of those that next() gives
        self.unseen = 0  # bytes of the records that came since some were last looked at
        # Not a plain dict: finding its first entry takes longer with every entry deleted before it.
        self.entries: OrderedDict[Entry, None] = OrderedDict()

    def oldest(self, count: int) -> tuple[Entry, ...]:
        """Return the ``count`` oldest entries, also while other threads put entries in and take them out."""
        return _first(self.entries, count)

    def newest(self, count: int) -> tuple[Entry, ...]:
        """Return the ``count`` newest entries, the last first, as :meth:`oldest` does."""
        return _first(self.entries, count, reversed)

    def first_passing(self) -> Entry | None:
        """Return the first of the records that nobody else uses any more."""
        return next(iter(_first(self.passing, 1)), None)

    def next(self) -> Entry | None:
        """Return one entry, call after call all that there are; it may have been taken out since."""
        while self.entries:
            try:
                return self.round.pop()
            except IndexError:
                self.round = list(self.entries)
        self.round = []
        return None

    def first(self) -> Entry | None:
        """Return the oldest entry, also while other threads take entries out."""
        while self.entries:
            try:
                return next(iter(self.entries))
            except (RuntimeError, StopIteration):
                continue
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
            if self.capture:  # a capture comes only once
                self.table.pop(self.key, None)
            busy.pop(self, None)
            if self.entries:  # another thread came in between
                busy[self] = None

    def behind(self, lag: int) -> bool:
        """Return whether more than ``lag`` entries, and more than ``budget`` bytes, have piled up.

        Of records, those that nobody else uses any more. The bytes are about those: told from the oldest entries, so
        that it takes constant time.
        """
        entries = self.passing if self.records else self.entries
        if len(entries) <= lag:
            return False
        sample = _first(entries, 8)
        return sum(entry.nbytes for entry in sample) * len(entries) // max(len(sample), 1) > self.budget


def _first(entries: OrderedDict[Entry, None], count: int, order: Callable[[Any], Any] = iter) -> tuple[Entry, ...]:
    while True:
        try:
            return tuple(itertools.islice(order(entries), count))
        except RuntimeError:  # another thread, or a finalizer, has changed them in between
            continue


class WorkLane(Lane):
    """The works of a group on one device, in one capture or in none, and what its direct calls need to know."""

    __slots__ = (
        "_unordered", "alone", "backend", "brief", "current", "guards", "kind", "ledger", "queries", "rank",
        "root_options", "streamed", "world",
    )  # fmt: skip

    def __init__(
        self, ledger: Rules, table: dict[Any, Any], key: Any, index: int, stream: int, capture: int, budget: int
    ) -> None:
        super().__init__(ledger.busy, table, key, index, stream, capture, budget)
        self.ledger = ledger
        self.current = ledger.streams.current
        self.kind = backends.UNKNOWN  # what the backend is
        self.backend: Any = None  # of an ordinary lane: the C++ side of the group's backend, which direct calls go to
        self.world = 0  # ranks of the group
        self.rank = 0  # that of this process among them
        self.alone = False  # a region of one call does what that call does
        self.brief = False  # block_current_stream() does what the backend's first wait() for a work does
        self.queries = False  # launches and waits ask the device, and are to be made by launch() and wait_for()
        self.guards = Guards(index)  # of the tensors of direct calls
        self.root_options: dict[Any, Any] = {}  # options of direct calls that have a root, by what they are given
        self._unordered: WorkLane | None = None
        self.streamed = False  # waiting for a work orders a stream; with other backends than NCCL it blocks the host

    def hold(
        self,
        work: W,
        op: str,
        inner: Any,
        storages: tuple[torch.UntypedStorage, ...],
        home: int | None,
        frame: types.FrameType,
    ) -> W:
        """Make ``work`` the entry of ``inner``, which was just launched from ``frame``, and return it.

        For an ordinary call on the group and device of this lane, of ``storages`` that were allocated on the stream
        ``home``: None if that is not one and known, ``HOST`` on the CPU. For others see ``Ledger.hold``.
        """
        index = self.index
        if index >= 0 and (stream := self.current(index)) and self.ledger.streams.is_capturing(index, stream):
            group = self.group() if self.group is not None else None
            return self.ledger.hold(work, op, inner, group, index, storages, frame)
        work.op = op
        work.inner = inner
        work.home = home
        work.code = frame.f_code
        work.instruction = frame.f_lasti
        work.since = _now()
        work.lane = self
        work.storages = storages  # last, as in each place: record_memory() looks at the rest when it is set
        self.entries[work] = None
        self.busy[self] = None
        return work

    def unordered(self, group: Any) -> WorkLane:
        """Return the lane for works of ``group`` on this device that end in no order, and that gloo tells no end of."""
        if self._unordered is None:
            self._unordered = self.ledger.lane_of(group, self.index, unordered=True)
        return self._unordered

    def relaxed(self) -> AbstractContextManager[Any]:
        """Return the context for a launch that may ask the device, so that it ends no other thread's capture (S5).

        For backends whose ``wait()`` asks: they ask for earlier works as they launch one too (torch 2.15). Not in a
        capture of this thread: there nothing is asked, and what CUDA does not allow is an error, as it is to be.
        """
        if not self.queries:
            return _NOTHING
        stream = self.current(self.index)
        capturing = stream and self.ledger.streams.is_capturing(self.index, stream)
        return _NOTHING if capturing else self.ledger.streams.lenient()

    def launch(self, function: Callable[..., Any], *given: Any) -> Any:
        """Launch by ``function(*given)``, and end no other thread's capture by it; see :meth:`relaxed`."""
        with self.relaxed():
            return function(*given)

    def wait_for(self, inner: Any, timeout: timedelta | None = None) -> bool:
        """Wait for the backend's ``inner``, and end no other thread's capture by it (S5).

        In the relaxed capture mode always, and not only where a capture is known to go on: one that another thread
        begins is known of only when it has begun.
        """
        if not self.queries:
            return inner.wait() if timeout is None else inner.wait(timeout)  # type: ignore[no-any-return]
        with self.ledger.streams.lenient():
            return inner.wait() if timeout is None else inner.wait(timeout)  # type: ignore[no-any-return]
