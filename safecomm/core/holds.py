"""What is held, the queues that holds wait in, and the one ``release()``.

Two kinds of holds are in queues. A *work* (``work.py``) holds what a running asynchronous collective uses. A *use*
(``uses.py``) holds what was used on another stream than its allocation stream, until the device has passed an event
that was recorded there behind the last use. Which of them is released when is decided elsewhere: see the rules at the
head of ``ledger.py``. All of it comes to :class:`Holds` to release, and shares what is the same for every hold: on
which streams the memory can be given out again, and whether it would come back at all.

The works of a group, and the uses of a stream, share a :class:`Queue`, in the order in which they were made.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from safecomm import _torch
from safecomm.core.call_site import line_of
from safecomm.core.streams import HOST, Streams, alloc_stream_of, capture_of

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Pending:
    """One hold of the ledger, as :func:`safecomm.pending` shows it."""

    op: str
    """The call, such as ``"all_reduce"``."""
    nbytes: int
    """Bytes of the storages that are held."""
    state: str
    """``"in flight"``: a work that was not waited for; ``"recorded"``: ``record_stream`` was called for the memory,
    and others still use it; ``"handed off"``: used on another stream than its allocation stream, which has not waited
    for that yet; ``"quarantined"``: its work failed; ``"deferred"``: ``bucketed()`` has not launched it yet."""
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


def distinct_bytes(storages: Iterable[object]) -> int:
    """Return the bytes of ``storages``, each counted once."""
    found = [one for one in storages if isinstance(one, torch.UntypedStorage)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


class Hold:
    """What is kept alive, for which call, and what ends it. A ``safecomm.Work`` is one.

    A work is its own hold, because one object more for each asynchronous call would cost as much as all the rest.
    """

    op: str
    queue: Queue
    storages: tuple[object, ...]
    since: float
    code: types.CodeType  # with instruction, the call site: cheap to take, and a line number when it is asked for
    instruction: int
    alloc_stream: int | None = None  # the one stream that all of the memory was allocated on, if that is known
    serial: int = sys.maxsize  # the later of two events on a stream has the higher one; the highest: no event yet
    event: object = None  # of a use: behind the last one; None while others may still use the memory
    stream: int = 0  # of the use; of a staged or captured work: the stream of its launch
    group: weakref.ref[object] | None = None  # of a use; a work's is its queue's
    aliases: tuple[torch.Tensor, ...] = ()  # what c10d was given in place of the caller's tensors; emptied at release
    staged: bool = False  # c10d has staging memory of the launch stream, which it gives back at the first wait anywhere
    in_a_table: bool = False  # it is found by its storage in a table, and taken out of it at release
    # Set once drain()'s call has returned, where only a call that blocks tells when the hold is complete.
    waiter: threading.Event | None = None

    def on_release(self) -> None:
        """Empty the aliases of the memory, or leave the table that it is found by. For ``Holds.release()`` alone."""

    def in_use(self) -> bool:
        """Return whether others still use the memory: it waits for them, and the device has nothing to do for it."""
        return False

    @property
    def state(self) -> str:
        """What :attr:`Pending.state` says."""
        return "handed off"

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held, each counted once."""
        return distinct_bytes(self.storages)

    @property
    def site(self) -> str:
        """Where the call was made, as ``file:line in function``."""
        return line_of(self.code, self.instruction)

    def belongs_to(self, group: object) -> bool:
        """Return whether this is a hold of ``group``; of any, if that is None."""
        return group is None or group is self.of_group()

    def of_group(self) -> object:
        """Return the group whose call this is of; None if there is none, or if it is gone."""
        reference = self.group or self.queue.group
        return None if reference is None else reference()

    def describe(self, state: str = "") -> Pending:
        """Return this hold as :func:`safecomm.pending` shows it."""
        return Pending(
            op=self.op,
            nbytes=self.nbytes,
            state=state or self.state,
            group=_torch.group_name(self.of_group()),
            device="cpu" if self.queue.index == HOST else f"cuda:{self.queue.index}",
            site=self.site,
            seconds=time.perf_counter() - self.since,
        )


class Observer(Protocol):
    """Who is told of each hold, such as a recording. Mostly None."""

    def held(self, hold: Hold, /) -> None:
        """Note that ``hold`` holds its storages from now on."""

    def released(self, hold: Hold, /) -> None:
        """Note that ``hold`` was released, perhaps again."""


class Queue:
    """Holds of one origin, in the order in which they were made: a group's works, or the uses on a stream."""

    __slots__ = (
        "budget", "capture", "defer_polling", "group", "holds", "index", "key", "ledger", "look_beyond", "next_look",
        "nonempty", "stream", "table",
    )  # fmt: skip

    waits_for_others: bool = False  # its holds end when other holds of the same memory have
    eventless: Collection[Hold] = ()  # of uses: those without an event as yet

    def __init__(
        self, ledger: Any, table: dict[K, Any], key: K, index: int, stream: int = 0, capture: int = 0, budget: int = 0
    ) -> None:
        self.ledger: Any = ledger  # the Ledger that the holds are part of
        self.nonempty: dict[Queue, object] = ledger.nonempty  # the queues of it that have holds
        self.table: dict[Any, Any] = table  # where this queue is found under its key
        self.key: Hashable = key
        # The device index, or HOST; the stream of the uses, or of the first launch; the graph capture that all of it is
        # part of, 0 for none; the bytes that rule 3 leaves alone.
        self.index, self.stream, self.capture, self.budget = index, stream, capture, budget
        self.defer_polling: bool = False  # handles are out: a sweep may skip this queue while its works are young
        # Until when the holds are left alone, if there are not more than so many before.
        self.next_look, self.look_beyond = 0.0, 0
        # Weak, because a group that is still referred to when the interpreter ends can take the process down (gloo,
        # torch 2.13). None for uses.
        self.group: weakref.ref[object] | None = None
        # Not a plain dict: finding its first key takes longer with every key deleted before it.
        self.holds: OrderedDict[Any, None] = OrderedDict()

    def sweep(self, capturing: int, *, thorough: bool) -> None:
        """Release what rules 2 and 3 allow; ``capturing``: a current stream is part of this capture."""
        raise NotImplementedError

    def look_later(self, now: float) -> None:
        """Leave the holds alone for the ledger's ``interval``, while at most ``lag`` of them come."""
        self.next_look, self.look_beyond = now + self.ledger.interval, len(self.holds) + self.ledger.lag

    def record_events(self) -> None:
        """Record events behind those that are :attr:`eventless`."""
        raise NotImplementedError

    def oldest(self, count: int) -> tuple[Any, ...]:
        """Return the ``count`` oldest holds, also while other threads put holds in and take them out."""
        return first_of(self.holds, count)

    def newest(self, count: int) -> tuple[Any, ...]:
        """Return the ``count`` newest holds, the last first, as :meth:`oldest` does."""
        return first_of(self.holds, count, reversed)

    def first(self) -> Any:
        """Return the oldest hold, also while other threads take holds out; None if there is none."""
        while self.holds:
            try:
                return next(iter(self.holds))
            except (RuntimeError, StopIteration):
                continue
        return None

    def note_empty(self) -> None:
        """See whether a hold that was taken out was the last."""
        if not self.holds:
            if self.capture and self.table.get(self.key) is self:  # a capture comes only once
                self.table.pop(self.key, None)
            self.nonempty.pop(self, None)
            if self.holds:  # another thread came in between
                self.nonempty[self] = None

    def too_far_behind(self) -> bool:
        """Return whether more holds, and more bytes, have piled up behind the host than rule 3 leaves alone."""
        if len(self.holds) <= self.ledger.lag:
            return False
        # Told from the oldest, so that it takes constant time.
        sample = self.oldest(8)
        nbytes: int = sum(hold.nbytes for hold in sample)
        return nbytes * len(self.holds) // max(len(sample), 1) > self.budget


class Holds:
    """What is held in the process, of both kinds, and what lets go of it.

    Parameters
    ----------
    streams
        Answers for the device.
    lag
        Holds of one queue that rule 3 leaves alone, however large they are.
    interval
        Seconds in which a queue is looked at once, while at most ``lag`` holds come.
    """

    def __init__(self, streams: Streams, lag: int, interval: float = 0.0) -> None:
        self.streams, self.lag, self.interval = streams, lag, interval
        self.nonempty: dict[Queue, object] = {}  # the queues that have holds
        self.quarantine: dict[Hold, None] = {}  # what has failed
        self.recording: dict[int, Any] = {}  # the captures that are seen and go on, by their id; see captures.py
        self.observer: Observer | None = None
        self.serials: Iterator[int] = itertools.count()  # of the holds that have events
        # Around whatever polls an event of a hold or looks at uses, which takes several steps: another thread must not
        # recycle the event in between. No collective takes the lock while there are only works.
        self.lock: threading.RLock = threading.RLock()

    def release(self, hold: Hold) -> None:
        """Let go of the memory of ``hold``: every release of the package is made here.

        The caller has made sure that each stream in whose order the memory can be given out again is ordered after the
        last use, or that the last use is complete. Releasing again does nothing. For a hold with an event under
        :attr:`lock`.
        """
        queue = hold.queue
        if hold.aliases or hold.in_a_table:
            hold.on_release()
        hold.storages = ()
        if (observer := self.observer) is not None:
            observer.released(hold)
        if self.quarantine:
            self.quarantine.pop(hold, None)
        # The thread that takes the hold out of its queue recycles the event: it could be recycled twice else.
        if queue.holds.pop(hold, queue) is not queue:
            if not queue.holds:
                queue.note_empty()
            if (event := hold.event) is not None:  # never a work's, for which setting it would make a dictionary
                # Taken from the hold first: it is recycled once, also where the hold comes into a queue again.
                hold.event = None
                if not queue.capture:  # an event of a capture stays the graph's
                    self.streams.recycle_event(queue.index, event)

    def release_all(self, holds: Iterable[Hold]) -> None:
        """Release ``holds``, whose allocation streams were ordered after their last use, or whose capture is over."""
        for hold in list(holds):
            with self.lock:
                self.release(hold)

    def alloc_streams(self, hold: Hold) -> set[int | None]:
        """Return the streams that the memory of ``hold`` was allocated on; None among them if one is unknown."""
        # Of what record_stream was called for, the memory can have changed as long as others use it.
        if hold.alloc_stream is not None and (hold.event is not None or not hold.in_a_table):
            streams: set[int | None] = {hold.alloc_stream}
        else:
            streams = {alloc_stream_of(self.streams, storage, HOST) for storage in hold.storages}
        return streams - {HOST}

    def capturing(self, queues: Iterable[Queue] = ()) -> int:
        """Return the capture that a current stream of a device of anything held, or of ``queues``, is part of, or 0."""
        indices = {queue.index for queue in (*keys_of(self.nonempty), *queues)}
        indices.update(hold.queue.index for hold in keys_of(self.quarantine))
        for index in indices - {HOST}:
            if capture := capture_of(self.streams, self.streams.current(index)):
                return capture
        return 0

    def records_capture(self) -> bool:
        """Return whether a capture that is seen goes on, of any thread."""
        return any(one.goes_on() for one in list(self.recording.values()))

    def only_holder(self, hold: Hold) -> bool:
        """Return whether the memory of ``hold`` would come back if it was released."""
        return all(_torch.only_holder(storage) for storage in hold.storages)


def first_of(
    holds: OrderedDict[K, None], count: int, order: Callable[[OrderedDict[K, None]], Iterator[K]] = iter
) -> tuple[K, ...]:
    """Return the first ``count`` of ``holds``, also while other threads, or finalizers, change them."""
    while True:
        try:
            return tuple(itertools.islice(order(holds), count))
        except RuntimeError:
            continue


def keys_of(table: Mapping[K, object]) -> list[K]:
    """Return the keys of ``table``, which other threads and dying graphs and groups change at any time.

    A list: making a tuple of a dictionary can run the garbage collector in the middle (before Python 3.12), and the
    finalizer of a graph adds to what is being looked at.
    """
    return list(table)
