"""What is held, by which call, since when, until what: the three rules by which memory is released.

A hold is released by one of three rules. The allocator gives memory out again in the order of its allocation stream. So
before a release each rule makes sure that this stream is ordered after the last use of the memory, or that this use is
complete (S1):

1. *Waited for.* ``wait()`` ordered the very stream that the memory was allocated on: release at once (S2). Memory that
   was allocated on another stream becomes a use. For uses: the allocation stream waited for an event that the program
   recorded behind the use (``stream_order.py``).
2. *Complete.* The event is complete, or the work says that it is: release by the next sweep, which a call of safecomm
   makes, of any group (S3). A work is then waited for as the program could have, on the streams that its memory was
   allocated on, or on the current one where these may not be made to wait, and rule 1 says what follows.
3. *Too far behind.* More than ``LAG`` holds and more bytes than the queue's budget, estimated from the eight oldest,
   have piled up behind the host, and the oldest can't be waited for any more. The budget is ``BUDGET`` for works and a
   share of the device's memory for uses (``uses.py``). A work is waited for as by rule 2. The allocation streams of a
   use are ordered after it; while another thread captures a graph, only the current stream may be. Inside a graph
   capture nothing can be polled. There uses that only the ledger still refers to are released by this rule at once, as
   an edge of the graph (S5); works wait for their wait, or for the end of the capture.

A call makes a sweep, of all queues, as soon as one queue wants it. Works do not while their handles are kept and they
are younger than ``PATIENCE``. Uses do not for ``INTERVAL`` after they were last looked at, while at most ``LAG`` of
them have come. The first future of a work, which stands for the handle, gives the works of its queue the same respite.
What ``record_stream`` was called for wants a sweep at each call where it is more than rule 3 leaves alone.

A work that fails goes to the quarantine, and leaves it when the device is known to be idle, or when a second wait
succeeds, if the first one timed out and the work did not fail (S4). Every release is made by ``Holds.release()``
(``holds.py``), on the thread that called safecomm, never in a destructor or a callback. The ledger's references are
strong, so that a dropped handle frees nothing; only of backends whose works never end, such as torch's fake one, they
are weak. What exceptions and threads can do in between is said at the head of the package.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import time
import types
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

from safecomm import _torch
from safecomm.core.call_site import called_from
from safecomm.core.holds import Hold, Holds, Pending, Queue, keys_of
from safecomm.core.refcounts import QUEUED, getrefcount
from safecomm.core.stream_order import StreamOrder
from safecomm.core.streams import HOST, CudaStreams, Streams, capture_of
from safecomm.core.uses import Uses
from safecomm.errors import CaptureBoundaryError

log: logging.Logger = logging.getLogger("safecomm")
_now = time.perf_counter
_NOTHING = contextlib.nullcontext()

# What each is worth stands in docs/benchmarks.md, made of benchmarks/results/constants.json.
LAG = 4
"""Holds of one queue that rule 3 leaves alone however large, to keep communication and compute overlapped."""

UNORDERED = 2
"""Works that run, of a queue whose works end in no order, at which a call looks: one may never end."""

PATIENCE = 0.1
"""Seconds for which a work wants no sweep while its handle is kept, and so a wait can be expected.

Polling takes longer than the rest of a call, and a program that overlaps has works in flight at each of them.
"""

INTERVAL = 0.01
"""Seconds for which uses, and works with futures, want no sweep after the last one, while at most ``LAG`` come.

A look takes longer than the rest of a call, and a program orders its streams by itself, which gives the memory back.
"""

BUDGET = 256 << 20
"""Bytes of a group's works that rule 3 leaves alone however many they are."""


class WorkHold(Hold):
    """An asynchronous collective as the ledger sees it. ``safecomm.Work`` is this, with its handle's methods."""

    queue: WorkQueue
    inner: Any  # the backend's Work
    # wait() takes the long way: captured, staged, with aliases, seen complete, or to be waited for only once.
    full: bool = False
    aliases_emptied: bool = False
    host_waited: bool = False  # the host has waited for it before a capture
    is_future_done: Callable[[], bool] | None = None  # asked of a dropped handle that can't be polled
    turn: threading.Lock | None = None  # to wait for a backend that can be waited for only once, and has not failed
    over: bool = False  # such a backend was waited for
    has_future: bool = False  # a future stands for the call as well, so the handle may be dropped before a wait

    def on_release(self) -> None:
        if self.aliases:  # another thread may have asked for the outputs since release() looked, and has them now
            self.aliases_emptied = True
            _torch.leave_all_empty(self.aliases)
            self.aliases: tuple[Any, ...] = ()

    @property
    def state(self) -> str:
        return "in flight"

    def finish(self) -> None:
        """Wait for the backend, and release nothing."""
        index, streams = self.queue.index, self.queue.ledger.streams
        if index == HOST or self.queue.pollable:
            self.inner.wait()
            return
        # A wait orders the current stream, and with some backends only the first wait for a work does. The caller's own
        # wait may still come, and finds the stream of this one. So the host waits.
        with streams.using(index, streams.spare(index)), streams.relaxed_capture_mode():
            self.inner.wait()
            event = streams.record_event(index, streams.spare(index))
            while not streams.query_event(event):
                time.sleep(1e-4)


W = TypeVar("W", bound=WorkHold)


class WorkQueue(Queue):
    """The works of one group on one device, in one capture or in none."""

    __slots__ = (
        "asks_in_wait",
        "current",
        "held_by_handles",
        "hides_failures",
        "ordered",
        "pollable",
        "stream_ordered",
        "wait_is_stream_order",
    )  # fmt: skip

    def __init__(
        self, ledger: Ledger, table: dict[Any, Any], key: Hashable, index: int, stream: int, capture: int
    ) -> None:
        super().__init__(ledger, table, key, index, stream, capture, ledger.budget)
        self.current: Callable[[int], int] = ledger.streams.current
        # Set by who makes the queue (``collectives/routes.py``), and never after its first hold.
        # Waiting for a work orders a stream; with other backends than NCCL it blocks the host.
        self.stream_ordered: bool = False
        self.ordered: bool = False  # works end in the order in which they were made
        self.pollable: bool = True  # the backend tells when a work is complete
        self.held_by_handles: bool = False  # and by nothing else: ``holds`` are weak
        self.asks_in_wait: bool = False  # launches and waits ask the device: they are made by launch() and wait_for()
        # The backend's synchronize() says nothing of a failure, and its future orders streams.
        self.hides_failures: bool = False
        # block_current_stream() does what the backend's first wait() for a work does.
        self.wait_is_stream_order: bool = False

    def hold(
        self,
        work: W,
        op: str,
        inner: object,
        storages: tuple[object, ...],
        alloc_stream: int | None,
        frame: types.FrameType,
    ) -> W:
        """Make ``work`` the hold of ``inner``, which was just launched from ``frame``, and return it.

        ``storages`` were allocated on ``alloc_stream``: None if that is not one and known, ``HOST`` on the CPU.
        """
        queue = self
        index = self.index
        if index >= 0 and (stream := self.current(index)) and self.ledger.streams.is_capturing(index, stream):
            queue = self.of_capture(stream)
            work.stream = stream
            work.full = True
        work.op = op
        work.inner = inner
        work.alloc_stream = alloc_stream
        work.code, work.instruction = called_from(frame)
        work.since = _now()
        work.queue = queue
        work.storages = storages
        queue.holds[work] = None
        queue.nonempty[queue] = None
        if (observer := self.ledger.observer) is not None and not queue.held_by_handles:
            observer.held(work)
        return work

    def of_capture(self, stream: int) -> WorkQueue:
        """Return the queue for the same works in the capture that ``stream`` is part of."""
        raise NotImplementedError

    def sweep(self, capturing: int, *, thorough: bool) -> None:
        if self.capture:
            if self.capture != capturing and self.ledger.streams.capture(self.stream) != self.capture:
                # The capture is over. Its works can't be waited for any more. What they use is in the pool of the
                # graph, or the graph has leased it.
                self.ledger.release_all(self.holds)
        elif not (capturing or self.held_by_handles):  # polling a work inside a capture would break the capture
            poll = self.ledger.poll if self.pollable else self.ledger.ask_future
            # In order the first that runs is the end. Else one that never ends must not keep the others: a running one
            # goes to the back, and the next call looks on.
            running, most = 0, 1 if self.ordered else len(self.holds) if thorough else UNORDERED
            while running < min(most, len(self.holds)) and (work := self.first()) is not None:
                dropped = getrefcount(work) <= QUEUED
                if not poll(work, dropped):
                    running += 1
                    if not self.ordered:
                        with contextlib.suppress(KeyError):
                            self.holds.move_to_end(work)
            self.next_look = 0.0

    def relaxed(self) -> AbstractContextManager[object]:
        """Return the context for a launch that may ask the device, so that it ends no other thread's capture (S5).

        For backends whose ``wait()`` asks: they ask for earlier works as they launch one too (torch 2.15). Not in a
        capture of this thread: there nothing is asked, and what CUDA does not allow has to be an error.
        """
        if not self.asks_in_wait:
            return _NOTHING
        stream = self.current(self.index)
        capturing = stream and self.ledger.streams.is_capturing(self.index, stream)
        return _NOTHING if capturing else self.ledger.streams.relaxed_capture_mode()

    def launch(self, function: Callable[..., Any], *given: object) -> Any:
        """Launch by ``function(*given)``, and end no other thread's capture by it; see :meth:`relaxed`."""
        with self.relaxed():
            return function(*given)

    def wait_for(self, inner: Any, timeout: timedelta | None = None) -> bool:
        """Wait for the backend's ``inner``, and end no other thread's capture by it (S5).

        In the relaxed capture mode always, and not only where a capture is known to go on: a capture that another
        thread begins is known of only when it has begun.
        """
        with self.ledger.streams.relaxed_capture_mode() if self.asks_in_wait else _NOTHING:
            return inner.wait() if timeout is None else inner.wait(timeout)  # type: ignore[no-any-return]


class Ledger(Holds):
    """The holds of the process, and the rules of the module's docstring for works.

    Parameters
    ----------
    streams
        Answers for the device.
    lag, budget, use_budget
        Rule 3's: holds of a queue, bytes of a group's works, and bytes of a stream's uses that are left alone.
    patience
        Rule 2's, in seconds: see :data:`PATIENCE`.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        lag: int = LAG,
        budget: int = BUDGET,
        use_budget: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(streams, lag, INTERVAL)
        self.current: Callable[[int], int] = streams.current
        self.budget, self._patience = budget, patience
        self.uses: Uses = Uses(self, use_budget)
        self.hand_off = self.uses.use
        self.stream_order: StreamOrder = StreamOrder(self, self.uses)
        # What bucketed() defers, by group: neither held nor launched by the ledger, which only tells of it.
        self.deferring: dict[object, Any] = {}
        self.dropped_at: set[tuple[types.CodeType, int]] = set()  # the call sites of dropped handles
        self.failures: int = 0

    # --- rule 1: waited for ---------------------------------------------------------------------------------

    def check_boundary(self, work: WorkHold) -> bool:
        """Raise CaptureBoundaryError if the current stream is not in the capture that ``work`` was launched in.

        Returns whether there is nothing to wait for: the host has waited for the work before the capture.
        """
        queue = work.queue
        stream = self.current(queue.index)
        now = capture_of(self.streams, stream)
        if work.staged and now == queue.capture and stream != work.stream:
            now = self.streams.capture(work.stream)  # guard_staging will order that one as well
        if now == queue.capture:
            return False
        if work.host_waited and now and not queue.capture:
            return True
        if now and queue.capture:
            what = "was captured into another CUDA graph than the one that is being captured"
            mend = "wait for it in the capture that it was launched in"
        elif now:
            what = "was launched before the CUDA graph capture that is going on"
            mend = "wait for it before the capture begins, or call settle_before_capture()"
        else:
            what = "was captured into a CUDA graph"
            mend = "wait for it inside the capture: outside, the stream that replays the graph is what orders it"
        raise CaptureBoundaryError(
            f"wait() for {work.op} launched at {work.site}: it {what}. To mend it, {mend}. "
            "Nothing was done, and the capture is unharmed."
        )

    def refuse_query_in_capture(self, work: WorkHold) -> None:
        """Raise CaptureBoundaryError where asking whether a work is complete would break a capture."""
        if work.queue.capture or capture_of(self.streams, self.current(work.queue.index)):
            raise CaptureBoundaryError(
                f"is_completed() for {work.op} launched at {work.site}: a work can't be asked inside a CUDA graph "
                "capture, nor one that was captured, which does not run. Nothing was done, and the capture is unharmed."
            )

    def waited(self, work: WorkHold) -> None:
        """Release ``work``, which the current stream (or the host) has just waited for, and what that makes safe."""
        queue = work.queue
        holds = queue.holds
        if queue.ordered and len(holds) > 1:
            # All before it end before it does, so that to wait for them takes no longer.
            while work in holds and (earlier := queue.first()) is not work and earlier is not None:
                if self._staging_is_captured(earlier):
                    break
                if self._wait_here(earlier):
                    self._release_waited(earlier)
        self._release_waited(work)

    def _release_waited(self, work: WorkHold) -> None:
        """Release what the current stream (or the host) has waited for; what that can't cover becomes a use."""
        index = work.queue.index
        elsewhere = index >= 0 and work.alloc_stream != (stream := self.current(index))
        if elsewhere and not self.alloc_streams(work) <= {stream}:
            self.uses.use(work.op, work.of_group(), index, work.storages, work, work.alloc_stream)
        self.release(work)

    def _wait_here(self, work: WorkHold) -> bool:
        """Order the current stream after a work; on failure quarantine it and return False.

        This is also what makes c10d let go: both classes of NCCL keep references of their own until a work is first
        waited for or, if that never comes, until the next collective of the same group (torch 2.8 and later).
        """
        try:
            self.guard_staging(work)
            work.queue.wait_for(work.inner)
        except Exception as error:  # not an interrupt, which says nothing about the work
            self.fail(work, error)
            return False
        return True

    def guard_staging(self, work: WorkHold) -> None:
        """Order the stream of the launch after a work, if c10d would otherwise give its staging back to it too early.

        The list forms copy through memory that c10d allocates on the stream of the launch and gives back at the first
        wait, on whatever stream that is.
        """
        index = work.queue.index
        if work.staged and work.storages and index != HOST and self.current(index) != work.stream:
            with self.streams.using(index, work.stream):
                work.queue.wait_for(work.inner)

    def _staging_is_captured(self, work: WorkHold) -> bool:
        """Return whether :meth:`guard_staging` can't order the stream of the launch, which is captured elsewhere."""
        return work.staged and not work.queue.capture and capture_of(self.streams, work.stream) != 0

    def fail(self, hold: Hold, error: BaseException) -> None:
        """Quarantine a hold whose work failed: a kernel may still be touching its memory (S4)."""
        if hold not in hold.queue.holds:
            return
        self.failures += 1
        with contextlib.suppress(Exception):  # of a backend that does not know
            if self.is_idle(hold):
                self.release(hold)
                return
        self.quarantine[hold] = None
        hold.queue.holds.pop(hold, None)
        hold.queue.note_empty()
        if not hold.storages:  # another thread has released it since: its wait has succeeded
            self.quarantine.pop(hold, None)
            return
        log.warning(
            "%s failed (%s); its memory is kept until the device is known to be idle, as by drain(wait=True)",
            hold.describe("quarantined"),
            error,
        )

    def is_idle(self, hold: Any) -> bool:
        """Return whether it is known that nothing touches the memory of a failed work any more."""
        # On the host, complete means that no thread of the backend does, whether the work failed or not.
        # What others still use, such as a kept result of a functional collective, the device is done with.
        return hold.in_use() or (hold.queue.index == HOST and hold.queue.pollable and bool(hold.inner.is_completed()))

    # --- rules 2 and 3: complete, or too far behind -----------------------------------------------------------

    def completed(self, work: WorkHold) -> None:
        """Release ``work``, which has just been seen to be complete, if that can be relied on."""
        queue = work.queue
        if (
            queue.pollable
            and not self.capturing([queue])
            and not self._staging_is_captured(work)
            # Not what would become a use: a wait of the program, which may come, releases a work and not a use.
            and self.uses.orderable(work) is not None
        ):
            self._release_over(work)

    def sweep(self, *, thorough: bool = False, again: bool = True) -> None:
        """Release what rules 2 and 3 allow, without blocking. Every wrapped call begins with it if anything is held.

        It looks at the oldest hold of each queue, and on while they are released; of what was recorded, at the newest
        and at some more (:class:`Waiting`). ``thorough``: at all holds of queues whose holds end in no order.
        """
        if not thorough and self.can_skip_sweep():
            return
        # Not the queues that another thread adds from here on: a current stream of their device may be capturing.
        queues, uses = keys_of(self.nonempty), self.uses.count
        capturing = self.capturing(queues)
        if thorough:
            queues.sort(key=operator.attrgetter("waits_for_others"))  # which the other queues may be
        for hold in keys_of(self.quarantine):
            with contextlib.suppress(Exception):  # as in fail()
                if self.is_idle(hold):
                    self.release(hold)
        with self.streams.relaxed_capture_mode():
            for queue in queues:
                if queue.holds:
                    queue.sweep(capturing, thorough=thorough)
                else:
                    queue.note_empty()  # another thread has released the last hold as it came
        if thorough and again and self.uses.count > uses:
            # Once, for what works have become: another thread may go on making uses.
            self.sweep(thorough=True, again=False)

    def can_skip_sweep(self) -> bool:
        """Record events that are due, and return whether a sweep would find nothing to do.

        That is so where all that is held are young works with handles that are kept, or what was looked at just now.
        The oldest of each queue is looked at, and the newest, as most handles that are dropped are dropped at once.
        Every call asks while anything is in flight, and most go on without a sweep.
        """
        if self.quarantine:
            return False
        now = _now()
        young = now - self._patience
        try:
            for queue in self.nonempty:
                # Not on the default stream, which may wait for one that is captured: a sweep asks about that first.
                if queue.eventless and queue.stream:
                    queue.record_events()
                    now = _now()
                if queue.next_look > now and len(queue.holds) <= queue.look_beyond:
                    continue
                if not queue.defer_polling:
                    return False
                hold = next(iter(queue.holds))
                if hold.since <= young or getrefcount(hold) <= QUEUED:
                    return False
                hold = next(reversed(queue.holds))
                if getrefcount(hold) <= QUEUED:
                    return False
        except (RuntimeError, StopIteration):  # another thread, or a finalizer, has changed one in between
            return False
        return True

    def ask_future(self, work: WorkHold, dropped: bool) -> bool:
        """Release ``work``, which can't be polled, if its handle was dropped and its future is done; return whether."""
        if not work.storages:
            self.release(work)  # an exception has come as it was taken out
            return True
        if not dropped:
            return False
        self.report(work)
        index = work.queue.index
        # It can be done as soon as the work is launched, and the backend can order streams as it is asked: no stream of
        # the program's may wait for that.
        with _NOTHING if index == HOST else self.streams.using(index, self.streams.spare(index)):
            done = False
            with contextlib.suppress(Exception):  # it has none
                if work.is_future_done is None:
                    work.is_future_done = bool  # which says False
                    work.is_future_done = work.inner.get_future().done
                done = work.is_future_done()  # pyright: ignore[reportOptionalCall]
            if done:
                self._wait_and_release(work)
        return done

    def poll(self, work: WorkHold, dropped: bool) -> bool:
        """Release ``work`` if rule 2 or 3 allows; return whether they do."""
        queue, dropped = work.queue, dropped and not work.has_future
        try:
            complete = work.inner.is_completed()
        except Exception as error:  # not the caller's, which may call for another group
            self.fail(work, error)
            return True
        # Rule 3 wants that no wait can come, and that the host need not block to order a stream.
        ahead = queue.stream_ordered and dropped and queue.too_far_behind() and None not in self.alloc_streams(work)
        if not (complete or ahead):
            return False
        if self._staging_is_captured(work):
            if complete:
                work.full = True  # it may have failed
            return False
        if dropped:
            self.report(work)
        self._release_over(work)
        return True

    def _release_over(self, work: WorkHold) -> None:
        """Order the streams that the memory of ``work`` was allocated on after it, and release it.

        Where they may not be made to wait, the current stream is, and rule 1 says what follows.
        """
        queue, streams = work.queue, self.uses.orderable(work)
        if not streams or streams == {self.current(queue.index)}:
            self._wait_and_release(work)
            return
        for stream in streams:
            with self.streams.using(queue.index, stream):
                if work not in queue.holds or not self._wait_here(work):
                    return
        self.release(work)

    def _wait_and_release(self, work: WorkHold) -> None:
        """Wait for ``work`` on the current stream, if it is a device's, and release it by rule 1.

        Also if it is complete. With an error NCCL's say that they are, while the kernel may still run
        (WorkNCCL::isCompleted), and their wait() need not raise; then the wait is what protects the memory. Also c10d's
        own references must go, and what ends on the host (gloo) may still be copying to the device.
        """
        if work in work.queue.holds and (work.queue.index == HOST or self._wait_here(work)):
            self._release_waited(work)

    def report(self, work: WorkHold) -> None:
        where = (work.code, work.instruction)
        if where in self.dropped_at:
            return
        self.dropped_at.add(where)
        if work.queue.pollable:
            fate = "its memory was held until it was over, but nothing has ordered your streams after it"
        else:
            fate = "its memory may be held until drain(wait=True) or the end of its group, as gloo does not tell before"
        log.warning(
            "the handle of %s launched at %s was dropped without wait(): %s (reported once for this line)",
            work.op,
            work.site,
            fate,
        )

    # --- captures -------------------------------------------------------------------------------------------

    def join_unwaited(self, capture: int, stream: int) -> list[str]:
        """Order ``stream`` after all works of ``capture`` that were not waited for there; describe each.

        They are released whatever their allocation streams: the capture ends now, and its memory is the graph's.
        """
        left = []
        for queue in keys_of(self.nonempty):
            if queue.capture == capture and isinstance(queue, WorkQueue):
                for work in keys_of(queue.holds):
                    left.append(f"{work.op} launched at {work.site}")
                    with self.streams.using(queue.index, stream):
                        if work in queue.holds and self._wait_here(work):
                            self.release(work)
        return left

    def end_capture(self, capture: int) -> None:
        """Release what is held for ``capture``, which is over."""
        for queue in keys_of(self.nonempty):
            if queue.capture == capture:
                self.release_all(queue.holds)

    # --- all of it ------------------------------------------------------------------------------------------

    def holds(self, group: object = None) -> list[Any]:
        """Return the holds of ``group`` (None: of all groups), without the quarantine."""
        return [hold for queue in keys_of(self.nonempty) for hold in keys_of(queue.holds) if hold.belongs_to(group)]

    def pending(self) -> list[Pending]:
        """Return what is held, oldest first, quarantined holds and what is deferred last."""
        holds = sorted(self.holds(), key=operator.attrgetter("since"))
        failed = [hold.describe("quarantined") for hold in keys_of(self.quarantine)]
        return [hold.describe() for hold in holds] + failed + self.deferred()

    def deferred(self, group: object = None) -> list[Pending]:
        """Return what ``bucketed()`` has deferred on ``group`` (None: on all groups)."""
        return [one for to, each in tuple(self.deferring.items()) if group in (None, to) for one in each.pending()]


LEDGER = Ledger(CudaStreams())
"""The process's ledger."""
