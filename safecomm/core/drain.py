"""What the ledger holds, and waiting until it holds nothing: ``pending()``, ``drain()``, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from safecomm import arguments
from safecomm.core.holds import Hold, Pending, Queue, keys_of
from safecomm.core.ledger import LEDGER, Ledger, WorkHold
from safecomm.core.streams import HOST
from safecomm.errors import CaptureBoundaryError, PendingWorkError

log: logging.Logger = logging.getLogger("safecomm")

H = TypeVar("H", bound=Hold)

BEFORE_WAITING: list[Callable[[], None]] = []
"""Called by ``drain(wait=True)`` first: each gives the ledger what an exception has kept from it."""


def pending() -> list[Pending]:
    """Return what safecomm holds now, oldest first: a :class:`Pending` for each call whose memory can't be reused yet.

    What :func:`bucketed` has deferred comes last, as one of state ``"deferred"`` for each group.

    Asks no device and releases nothing, so a hold can already be complete; :func:`drain` looks. Bytes are those of the
    storages held, whether or not the caller still refers to them too. Empty in a program that waits for its works, and
    whose allocation streams wait for what other streams use.

    Examples
    --------
    >>> pending()
    []
    """
    return LEDGER.pending()


def drain(*, wait: bool = False, timeout: timedelta | float | None = None, group: ProcessGroup | None = None) -> int:
    """Give back the memory of all works that are complete; with ``wait``, of all works, once they are complete.

    Every call of a collective does the first by itself, for the oldest works of each group; this is for the end of a
    phase, or before a measurement. Returns the bytes that are still held (twice, what two calls hold), but for what
    captures and others who use the memory too keep: 0 if all is back. It launches nothing, because ranks need not call
    it together: the bytes of calls that :func:`bucketed` has deferred count as held until its block ends.

    Parameters
    ----------
    wait
        Block the host until all works are complete. What failed works hold is given back too, after the device has
        become idle. Without it, the host never blocks.
    timeout
        Of ``wait``, in seconds or as a timedelta. None: there is no limit.
    group
        Wait for the works of this group, and count its bytes. None: of all groups.

    Raises
    ------
    PendingWorkError
        With ``wait``, if works are not complete in time. Their memory is still held.
    CaptureBoundaryError
        With ``wait``, inside a CUDA graph capture; where works have failed, also while another thread captures one.

    Examples
    --------
    >>> drain()
    0
    """
    arguments.check("drain", arguments.FLAG, wait=wait)
    arguments.check("drain", arguments.GROUP, group=group)
    return drain_ledger(LEDGER, wait=wait, timeout=arguments.seconds("drain", timeout=timeout), group=group)


def drain_ledger(
    ledger: Ledger, *, wait: bool = False, timeout: timedelta | None = None, group: ProcessGroup | None = None
) -> int:
    """Do for ``ledger`` what :func:`drain` does."""
    if wait:
        deadline = deadline_of(timeout)
        for give in BEFORE_WAITING:
            give()
        await_works(ledger, deadline, group)
        _empty_quarantine(ledger, group, deadline)
        _await_all(ledger, group, deadline)  # what a recorded use holds may have been held by one of those too
    else:
        ledger.sweep(thorough=True)
    quarantined = [hold for hold in keys_of(ledger.quarantine) if hold.belongs_to(group)]
    return sum(one.nbytes for one in _unfinished(ledger, group) + quarantined + ledger.deferred(group))


def await_works(ledger: Ledger, deadline: float | None, group: object, *, unpollable: bool = True) -> None:
    """Block the host until all works of ``group`` (None: of all groups) are complete, and release them.

    Works that fail go to the quarantine. Without ``unpollable`` not for works of which the backend does not tell, which
    may never end. Raises PendingWorkError if others are not complete in time, and CaptureBoundaryError if the current
    stream of a device of anything held is part of a capture.
    """
    _refuse_in_capture(ledger, ())
    _await_all(ledger, group, deadline, unpollable=unpollable)


def await_before_capture(ledger: Ledger, timeout: timedelta | None) -> None:
    """Block the host until all works are complete, so that there is nothing to wait for in a capture."""
    deadline = deadline_of(timeout)
    await_works(ledger, deadline, None)
    # The program may still wait for those that were released before because a stream had waited for them: the host has
    # not, and the ledger does not know them any more.
    works: list[WorkHold] = [
        work
        for work in gc.get_objects()
        if issubclass(type(work), WorkHold)
        and getattr(work, "storages", None) == ()  # else it is a member of a region, or is held
        and work.queue.ledger is ledger
        and work.queue.index != HOST
        and not work.queue.capture
    ]
    _refuse_in_capture(ledger, [work.queue for work in works])
    with ledger.streams.relaxed_capture_mode():
        _await(works, lambda work: not work.queue.pollable or work.inner.is_completed(), deadline)
        for work in works:
            with contextlib.suppress(Exception):  # a wait for a failed one has to raise the error
                work.finish()
                work.host_waited = True


def _refuse_in_capture(ledger: Ledger, queues: Iterable[Queue]) -> None:
    if ledger.capturing(queues):
        raise CaptureBoundaryError(
            "the host can't wait for works inside a CUDA graph capture, where they are only recorded. "
            "Nothing was done, and the capture is unharmed."
        )


def deadline_of(timeout: timedelta | None) -> float | None:
    """Return the moment at which ``timeout`` from now is over, by ``time.monotonic()``."""
    return None if timeout is None else time.monotonic() + timeout.total_seconds()


def _is_unpollable(hold: Hold) -> bool:
    return isinstance(hold, WorkHold) and not hold.queue.pollable


def _unfinished(ledger: Ledger, group: object = None) -> list[Hold]:
    """Return the holds that the device will be done with: not those that wait for others who still use the memory."""
    # What a capture holds ends with the capture, which may be another thread's.
    return [hold for hold in ledger.holds(group) if not hold.queue.capture and not hold.in_use()]


def _await_all(ledger: Ledger, group: object, deadline: float | None, *, unpollable: bool = True) -> None:
    def gone(hold: Hold) -> bool:
        ledger.sweep(thorough=True)
        return hold.in_use() or hold not in hold.queue.holds

    # Again and again, because a work can become a use, and another thread can launch one.
    while holds := [hold for hold in _unfinished(ledger, group) if unpollable or not _is_unpollable(hold)]:
        for hold in filter(_is_unpollable, holds):
            _await_unpollable(ledger, hold, deadline)
        _await(holds, gone, deadline)


def _await(holds: list[H], done: Callable[[H], bool], deadline: float | None) -> None:
    """Block the host until all ``holds`` are ``done``; raise PendingWorkError at the deadline."""
    pause = 1e-5
    while left := [hold for hold in holds if not done(hold)]:
        if deadline is not None and time.monotonic() > deadline:
            raise _pending_error(left)
        time.sleep(pause)
        pause = min(pause * 2, 1e-2)


def _await_in_thread(ledger: Ledger, wait: Callable[[], object], hold: Hold, deadline: float | None) -> None:
    """Block the host until ``wait``, called in a thread, has returned; raise PendingWorkError at the deadline.

    A hold has one such thread, however many wait for it: ``wait`` is called again only once it has returned.
    """
    with ledger.lock:
        over = hold.waiter
        if over is None or over.is_set():
            # Not the thread: an interrupted join() of a thread marks it as ended (Python up to 3.12).
            over = hold.waiter = threading.Event()
            told = (wait, over)
            threading.Thread(target=_without_return_at_exit, args=told, name="safecomm.drain", daemon=True).start()
    if not over.wait(None if deadline is None else max(deadline - time.monotonic(), 0)):
        raise _pending_error([hold])


def _without_return_at_exit(wait: Callable[[], object], over: threading.Event) -> None:
    """Call ``wait``, then set ``over``. If the interpreter ends meanwhile, the process ends without this thread.

    Up to version 3.13 Python makes such a thread exit when it asks for the GIL, which unwinds its stack, and C++
    terminates the process at the first destructor on it. The C library calls what is pushed here before it unwinds.
    """
    libc: Any = ctypes.pythonapi  # calls of which keep the GIL, so that no thread can exit in the one that pops
    entry = ctypes.create_string_buffer(64)  # twice the size of a _pthread_cleanup_buffer
    on_linux = hasattr(libc, "_pthread_cleanup_push")
    if on_linux:
        libc._pthread_cleanup_push(entry, libc.pause, None)
    try:
        wait()
    finally:
        if on_linux:
            libc._pthread_cleanup_pop(entry, 0)
        over.set()


def _await_unpollable(ledger: Ledger, hold: Any, deadline: float | None) -> None:
    # In a thread, because a wait that times out would close the connection (gloo, torch 2.13). The thread only waits;
    # what is released, is released here.
    def wait() -> None:
        try:
            hold.finish()
        except Exception:  # the backend's, because signal handlers run in the main thread; the wait below raises it too
            hold.turn = None

    _await_in_thread(ledger, wait, hold, deadline)
    with contextlib.suppress(Exception):  # it is in the quarantine by then
        hold.wait()
        ledger.release(hold)  # an exception may have come in the middle of that before


def _empty_quarantine(ledger: Ledger, group: object, deadline: float | None) -> None:
    for hold in keys_of(ledger.quarantine):
        if not hold.belongs_to(group):
            continue
        if hold.queue.index != HOST:
            if ledger.records_capture():  # which would end with an error, and so would the wait
                raise CaptureBoundaryError(
                    "the host can't wait for the device, as it has to for memory of works that have failed, while "
                    "another thread captures a CUDA graph. That memory is still held, and the capture is unharmed."
                )
            # A kernel whose peer is gone can keep the device busy without end.
            synchronize = functools.partial(ledger.streams.synchronize, hold.queue.index)
            if deadline is None:
                synchronize()
            else:
                _await_in_thread(ledger, synchronize, hold, deadline)
        elif not _is_unpollable(hold):  # a thread of the backend may still copy for a work that timed out
            _await([hold], ledger.is_idle, deadline)
        ledger.release(hold)


def _pending_error(holds: Sequence[Hold]) -> PendingWorkError:
    return PendingWorkError(
        f"{len(holds)} works are not over in time: "
        f"{'; '.join(str(hold.describe()) for hold in holds[:8])}{'; ...' if len(holds) > 8 else ''}. "
        "Their memory is still held. Wait for them, or abort their group."
    )


def _at_exit(ledger: Ledger) -> None:
    """Release what is complete, and keep the rest out of the interpreter's reach for good."""
    try:
        ledger.sweep(thorough=True)
    except Exception as error:  # the device may be gone
        log.debug("sweep at exit: %r", error)
    if left := [*ledger.holds(), *ledger.quarantine]:
        # Tearing down modules would free it in some order while a kernel or a gloo thread may be using it. The process
        # is about to give it all back anyway.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))


atexit.register(_at_exit, LEDGER)
