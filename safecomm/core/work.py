"""The handle that an asynchronous call returns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.distributed_c10d import Work as C10dWork

from safecomm import _torch, arguments
from safecomm.core.ledger import WorkHold
from safecomm.core.streams import HOST
from safecomm.errors import SafecommError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Work as _Base
else:
    # Not a subclass at runtime: a pybind object more for each call takes 0.6 to 1.2 us, a fifth of all that holding
    # costs. isinstance() asks __class__ when the type says no.
    _Base = object

_NOTHING = contextlib.nullcontext()
_profiler = _torch.profiler  # bound once, because each wait reads it


class Work(WorkHold, _Base):
    """A running collective, and the hold on the memory that it reads and writes.

    It guarantees that this memory is not given out again while the collective may touch it, whichever stream or thread
    waits, and if no wait comes or the handle is dropped. Where the stream that waits is the one that the memory was
    allocated on, the hold ends at :meth:`wait`.

    Everything else is ``torch.distributed.Work``'s: each method forwards to the handle that the backend made. That
    handle refers to the outputs of the collective, because ``result()`` returns them, so keeping a ``Work`` keeps
    them alive, as in torch.

    Made by the collectives, not by callers. May be used from any thread. ``isinstance(work, torch.distributed.Work)``
    is true, but torch's C++ takes only the backend's own handle, which is :attr:`inner`. Under ``patch()`` it gets one.

    Examples
    --------
    >>> work = dist.all_reduce(tensor, async_op=True)
    >>> work.wait()
    True
    """

    # What is rarely set goes into the dictionary of Hold, which is only made when something is put into it.
    __slots__ = ("alloc_stream", "code", "inner", "instruction", "op", "queue", "since", "storages")

    inner: C10dWork
    """The backend's handle."""

    if not TYPE_CHECKING:
        __class__ = property(lambda self: C10dWork)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the collective (CUDA), or block the host until it is complete (CPU).

        May be called again, also on another stream.

        Parameters
        ----------
        timeout
            As torch's: with one, the host blocks on CUDA as well.

        Raises
        ------
        CaptureBoundaryError
            If the launch was inside a CUDA graph capture and the wait is not, or the other way round. CUDA has not seen
            the call, so the capture goes on unharmed.
        """
        queue = self.queue
        index = queue.index
        full = self.full
        if full and self.turn is not None:
            return self._wait_once(timeout)
        stream = HOST
        done: bool
        if index >= 0:
            stream = queue.current(index)
            # The default stream, which is 0, can't capture.
            if full or (stream and queue.ledger.streams.is_capturing(index, stream)):
                if queue.ledger.check_boundary(self):
                    return True
                if queue.capture:
                    timeout = None  # with one, the backend would ask the device, which would break the capture
        try:
            if full:
                queue.ledger.guard_staging(self)
            if (
                timeout is None
                and queue.wait_is_stream_order
                and not full
                and self in queue.holds  # otherwise it was waited for or failed before, and must raise again
                and not _profiler._is_profiler_enabled
            ):
                self.inner.block_current_stream()
                done = True
            elif queue.asks_in_wait:
                done = queue.wait_for(self.inner, timeout)
            else:
                done = self.inner.wait() if timeout is None else self.inner.wait(timeout)
        except Exception as error:
            if arguments.TIME.fits(timeout):  # else torch has refused the argument, and the work goes on
                queue.ledger.fail(self, error)
            raise
        if done and self.storages:
            # The ordinary program waits for the oldest work of its queue, on the stream that its memory was allocated
            # on. All else is the ledger's.
            if full or self.alloc_stream != stream or (len(queue.holds) != 1 and queue.first() is not self):
                queue.ledger.waited(self)
            else:
                queue.ledger.release(self)
        return done

    def _wait_once(self, timeout: timedelta | None) -> bool:
        try:
            self.finish(timeout)
        except Exception as error:
            # Else another thread is waiting, a signal handler has raised, or drain() finds out.
            if self.inner.is_completed() and not self.inner.is_success():
                self.queue.ledger.fail(self, error)
            raise
        if self.storages:
            self.queue.ledger.waited(self)
        return True

    def finish(self, timeout: timedelta | None = None) -> None:
        """Wait for the backend, and release nothing. For one that can be waited for only once, unless that was done."""
        turn = self.turn
        if turn is None:
            super().finish()
            return
        if not arguments.TIME.fits(timeout):
            self.inner.wait(timeout)  # type: ignore[arg-type]  # raises what torch raises, before it waits
        if self._was_waited_for():  # also where a signal handler asks as a wait of its thread returns
            return
        seconds = (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout) or -1  # in C++ 0 is no limit
        if not turn.acquire(timeout=seconds if 0 < seconds <= threading.TIMEOUT_MAX else -1):
            raise TimeoutError(f"{self.op} launched at {self.site} is not over after {timeout}")
        try:
            if not self._was_waited_for():
                self.inner.wait(*([timeout] if timeout else []))
                self.over = True
        finally:
            turn.release()

    def _was_waited_for(self) -> bool:
        # gloo's sends and receives tell that a wait has returned, also where a signal handler has raised then.
        return self.over or (self.inner.is_completed() and self.inner.is_success())

    def synchronize(self) -> None:
        """Order the current stream after the collective, as torch's does. Raises as :meth:`wait` does."""
        self._order(self.inner.synchronize)

    def block_current_stream(self) -> None:
        """Order the current stream after the collective without blocking the host. Raises as :meth:`wait` does."""
        inner = self.inner
        # The base class's, which NCCL2 has, orders nothing once the future has been asked for (torch 2.15).
        self._order(inner.synchronize if self.queue.hides_failures else inner.block_current_stream)

    def _order(self, order: Callable[[], None]) -> None:
        queue = self.queue
        ledger = queue.ledger
        if queue.index >= 0:
            if ledger.check_boundary(self):
                return
            ledger.guard_staging(self)
        order()
        if queue.hides_failures and not self.inner.is_success():
            ledger.fail(self, RuntimeError("it has failed, and nothing was ordered after it"))
        elif queue.stream_ordered:  # elsewhere the work may still be running on the host: the ledger looks again later
            ledger.waited(self)

    def is_completed(self) -> bool:
        """Return whether the collective is complete; if so, its memory is given back as by a wait on this stream.

        Raises CaptureBoundaryError for a work that was captured into a CUDA graph, which is not a work that ever runs,
        and inside a capture, which asking would break.
        """
        queue = self.queue
        ledger, on_device = queue.ledger, queue.index >= 0
        if on_device:
            ledger.refuse_query_in_capture(self)
        with ledger.streams.relaxed_capture_mode() if on_device else _NOTHING:
            done = self.inner.is_completed()
            if done:
                self.full: bool = True  # it may have failed
                ledger.completed(self)
        return done

    def get_future(self) -> torch.futures.Future[Any]:
        """Return torch's future of the collective. The memory stays held until the collective is complete.

        Raises SafecommError where :meth:`result` does, and CaptureBoundaryError where :meth:`wait` does if the backend
        orders the current stream by it.
        """
        queue = self.queue
        if queue.hides_failures and queue.index >= 0:
            queue.ledger.check_boundary(self)
        self._keep_results()
        self.has_future = True  # the future stands for the handle from now on
        if not queue.next_look:
            queue.look_later(time.perf_counter())
        return self.inner.get_future()

    def _asking(self) -> AbstractContextManager[object]:
        """Return the context for what may ask the device, so that it ends no other thread's capture."""
        return self.queue.ledger.streams.relaxed_capture_mode() if self.queue.asks_in_wait else _NOTHING

    def get_future_result(self) -> Any:
        """Return torch's future of the collective's status."""
        with self._asking():
            return self.inner.get_future_result()  # type: ignore[attr-defined]

    def is_success(self) -> bool:
        """Forward to the backend's handle."""
        return self.inner.is_success()

    def exception(self) -> Any:
        """Forward to the backend's handle."""
        return self.inner.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs, from the backend's handle.

        Raises SafecommError for a coalescing region that was waited for, unless it was of one call on NCCL: c10d would
        keep its outputs until the group's next collective, so the wait takes them from it. Asked before the wait, they
        stay with the handle, as in torch.
        """
        self._keep_results()
        return self.inner.result()

    def _keep_results(self) -> None:
        if self.aliases_emptied:
            raise SafecommError(
                f"the outputs of {self.op} launched at {self.site} are no longer with its handle: it was released. "
                "Ask for result() or get_future() before wait(), or use the tensors that the calls were given."
            )
        self.aliases: tuple[torch.Tensor, ...] = ()

    def source_rank(self) -> int:
        """Return the rank that a receive from any source was served by."""
        return self.inner.source_rank()

    def _source_rank(self) -> int:
        return self.inner._source_rank()

    def _get_op_type(self) -> object:
        return self.inner._get_op_type()  # type: ignore[attr-defined]

    def _get_duration(self) -> float:
        with self._asking():
            return self.inner._get_duration()  # type: ignore[attr-defined, no-any-return]

    def _get_sequence_number(self) -> int:
        return self.inner._get_sequence_number()  # type: ignore[attr-defined, no-any-return]

    @property
    def timeout(self) -> timedelta:
        """The backend's time limit for the collective (torch 2.15 and later)."""
        return self.inner.timeout  # type: ignore[attr-defined, no-any-return]

    def boxed(self) -> torch.ScriptObject:
        """Return the backend's handle as a TorchScript object, which the compiler's operators pass around."""
        return self.inner.boxed()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("a safecomm.Work can't be copied or pickled: it holds the memory of one running collective")

    def __dir__(self) -> list[str]:
        """Return torch's names and those that say what is held, for completion."""
        return sorted({*dir(C10dWork), "inner", "nbytes", "op", "site"})

    def __repr__(self) -> str:
        """Tell from the ledger's side alone: no backend and no device is asked, so it is safe anywhere."""
        storages = getattr(self, "storages", None)  # the last thing that a launch sets
        if storages is None:
            return "<safecomm.Work that is being launched>"
        if not storages:
            return f"<safecomm.Work {self.op} from {self.site}: nothing is held>"
        if self in self.queue.ledger.quarantine:
            state = "quarantined"
        else:
            state = "in a CUDA graph capture" if self.queue.capture else "in flight"
        return f"<safecomm.Work {self.op} from {self.site}: {self.nbytes} bytes held, {state}>"


class StagedWork(Work):
    """A :class:`Work` of which c10d stages memory on the stream of the launch, and gives it back at the first wait."""

    __slots__ = ("stream",)

    staged = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        queue = self.queue
        if queue.current(queue.index) != self.stream:
            self.full = True  # the stream of the launch has to be ordered as well
        return super().wait(timeout)


class MemberWork(Work):
    """A :class:`Work` of one call in a coalescing region: waiting for it is waiting for the region.

    The event of such a call's own work is never recorded (torch 2.11), so that waiting for that orders nothing; and
    DeepSpeed waits for the last of these and not for the region.
    """

    __slots__ = ("_region",)

    _region: C10dWork  # the region's Work once it has ended, until then the call's own

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._region.wait() if timeout is None else self._region.wait(timeout)

    def synchronize(self) -> None:
        self._region.synchronize()

    def block_current_stream(self) -> None:
        self._region.block_current_stream()

    def is_completed(self) -> bool:
        return self._region.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._region.get_future()

    def _asking(self) -> AbstractContextManager[object]:
        return _NOTHING  # it has no event

    def __repr__(self) -> str:
        region = self._region if isinstance(self._region, WorkHold) else "a coalescing region"
        return f"<safecomm.Work of a call in {region}>"


def waited_for_once() -> Work:
    """Return a handle for a work whose backend can be waited for only once."""
    work = Work()
    work.turn = threading.Lock()
    work.full = True
    return work


def member(inner: C10dWork) -> MemberWork:
    """Return the caller's handle of one call in a coalescing region."""
    work = MemberWork()
    work.inner = work._region = inner
    return work
