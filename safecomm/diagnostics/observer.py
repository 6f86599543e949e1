"""What ``safecomm compare`` has each rank of a program write down: its steps, its peaks, a snapshot, its collectives.

It changes nothing of the program. The window begins at the end of one step, of the optimizer or marked, and ends with
another; of a program without steps it is all of the run. Then a further step is traced on GPUs, for how long
collectives run beside nothing else.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

# As it is imported its functions take the default group as a default, which keeps that group alive. Torch imports it,
# with all of torch.compile, as the flight recorder tells stacks; here it is imported before there is a group.
import torch.distributed.nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from safecomm import _torch
from safecomm.core.holds import Hold
from safecomm.core.ledger import LEDGER
from safecomm.diagnostics.collective_log import group_sizes, rows_of
from safecomm.diagnostics.exports import write_object
from safecomm.diagnostics.exposed import exposed
from safecomm.diagnostics.observed import VERSION
from safecomm.diagnostics.outside import NCCL, outside
from safecomm.diagnostics.snapshots import begin_history, write_snapshot
from safecomm.diagnostics.steps import LISTENERS

if TYPE_CHECKING:
    from torch.profiler import profile as Profile  # noqa: N812

CREATED = 20_000
"""Calls whose times are kept, for how late ranks are."""


class Observer:
    """Observes this process, and writes ``rank0.json`` and, on GPUs, ``rank0.pickle`` into ``directory``.

    ``first``, ``last``: the steps of the window, counted from 1; or in ``seconds`` when it begins and ends, from the
    start of the process. ``rank``: returns this process's rank and how many there are, or None and None while it has no
    group; a process that never has one writes nothing. ``patched``: returns whether it is patched.
    """

    def __init__(
        self, directory: str, first: int, last: int, rank: Callable[[], tuple[int | None, int | None]],
        *, how: str, patched: Callable[[], bool], seconds: bool = False,
    ) -> None:  # fmt: skip
        self._directory = Path(directory)
        self._first, self._last = first, last
        self._rank = rank
        self._how = how
        self._patched = patched
        self._process = os.getpid()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._marked = False
        self._steps = 0
        self._ends: list[_End] = []  # of the steps of the window, the end of the one before first
        self._began = 0.0  # the window, in unix time, as the allocator's history has it
        self._found: dict[str, object] | None = None
        self._profile: Profile | None = None
        self._hook = register_optimizer_step_post_hook(self._stepped)
        LISTENERS.append(self._stepped)
        self._watched = _Held()
        self._seconds = seconds
        self._done = False
        self._timers: list[threading.Timer] = []
        begin_history(every_stack=False)
        if seconds:
            self._after(first, self._begin_window)
            self._after(last, self._end_window, "seconds")
        elif first == 1:
            self._begin_window()
        atexit.register(self._at_end)

    def _guarded(self, call: Callable[..., None], *given: object) -> None:
        """Call, and if that fails observe no more: the program goes on as it would without."""
        try:
            call(*given)
        except Exception as error:
            self._done = True  # and not the hook removed, while torch calls its hooks
            print(f"safecomm: process {os.getpid()} is observed no more: {error!r}", file=sys.stderr, flush=True)

    def _stepped(self, optimizer: Optimizer | None = None, *_: object) -> None:
        self._guarded(self._count, optimizer)

    def _count(self, optimizer: Optimizer | None) -> None:
        """Count a step, which the program has marked, or else its first optimizer ends."""
        if self._done or self._seconds or (_has_device() and torch.cuda.is_current_stream_capturing()):
            return
        if optimizer is None and not self._marked:
            self._marked, self._steps, self._ends = True, 0, []
        elif optimizer is not None:
            known = self._optimizer and self._optimizer()
            if known is None:  # the first, or the one that has taken its place: of several one counts
                known, self._optimizer = optimizer, weakref.ref(optimizer)
            if optimizer is not known or self._marked:
                return
        if self._rank()[0] is None or os.getpid() != self._process:
            return
        self._steps += 1
        if self._steps == self._first - 1:
            self._begin_window()
        elif self._first <= self._steps <= self._last:
            self._ends.append(_now())
            if self._steps == self._last:
                self._end_window("steps")
        elif self._steps == self._last + 1:  # a step in which ranks wait for those that were still writing
            self._profile = _profile()
        elif self._profile is not None:
            self._end_profile()

    def _after(self, seconds: int, call: Callable[..., None], *given: str) -> None:
        timer = threading.Timer(seconds, self._guarded, (call, *given))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _begin_window(self) -> None:
        for index in _devices():
            torch.cuda.reset_peak_memory_stats(index)
        self._watched.peak = self._watched.now
        self._began = time.time()
        self._ends = [_now()] if self._steps else []  # what comes before the first step is none

    def _end_window(self, ended: str) -> None:
        rank, world = self._rank()
        if rank is None:  # a launcher
            return
        memory: dict[str, int] = {"held": self._watched.peak}
        each = [torch.cuda.memory_stats(index) for index in _devices()]
        if each:
            stats = max(each, key=lambda one: one.get("active_bytes.all.peak", 0))
            memory |= {name: stats.get(f"{name}_bytes.all.peak", 0) for name in ("active", "allocated", "reserved")}
        elsewhere = outside()
        if elsewhere is not None:
            memory["outside"] = elsewhere.total
            memory["nccl"] = sum(nbytes for name, nbytes in elsewhere.parts.items() if name.startswith(NCCL))
            memory["staging"] = sum(elsewhere.parts.values()) - memory["nccl"]
        began = self._began * 1e9
        entries = [one for one in _torch.flight_entries() or [] if one["time_created_ns"] >= began]
        rows = rows_of(entries, group_sizes())
        self._found = {
            "safecomm_observed": VERSION,
            "rank": rank,
            "world": world,
            "how": self._how,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if each else "cpu",
            "patched": self._patched(),
            "ended": ended,
            "window": [self._first, self._last if self._seconds else max(self._first, min(self._steps, self._last))],
            "began": self._began,
            "seconds": _between(self._ends),
            "memory": memory,
            "collectives": [[*vars(row).values()] for row in rows[:1000]],
            "created": [
                [entry["process_group"][0], entry["collective_seq_id"], entry["time_created_ns"]]
                for entry in entries[-CREATED:]
                if not entry.get("is_p2p")
            ],
            "exposed": None,
        }
        try:
            write_snapshot(self._directory / f"rank{rank}.pickle")
        finally:
            self._write()  # the last, because it tells that this rank is done

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None or self._found is None:
            return
        torch.cuda.synchronize()
        profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._found["exposed"] = exposed(profile.events())  # type: ignore[no-untyped-call]
        self._write()
        self._done = True

    def _at_end(self) -> None:
        if os.getpid() != self._process or self._rank()[0] is None:
            return
        self._profile = None
        for timer in self._timers:
            timer.cancel()
            timer.join()  # which may be writing
        if self._found is None:
            self._guarded(self._end_window, "end")

    def _write(self) -> None:
        try:
            write_object("compare", self._directory / f"rank{self._rank()[0]}.json", self._found or {})
        except ValueError as error:  # a full disk must not end the program
            print(f"safecomm: {error}", file=sys.stderr, flush=True)


def _has_device() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _devices() -> list[int]:
    """Return the devices that this process uses, whatever this thread's current one is."""
    count = torch.cuda.device_count() if _has_device() else 0
    return [index for index in range(count) if torch.cuda.memory_reserved(index)]


class _End(NamedTuple):
    """The end of a step: on the host, and on a GPU where the current stream has got to, which the host is ahead of."""

    host: float
    event: torch.cuda.Event | None


def _now() -> _End:
    event = None
    if _has_device():
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    return _End(time.perf_counter(), event)


def _between(ends: list[_End]) -> list[float]:
    """Return the seconds between the ends of steps; on a GPU waits for the last."""
    seconds = []
    for before, after in itertools.pairwise(ends):
        took = after.host - before.host
        if before.event is not None and after.event is not None:
            after.event.synchronize()
            took = 1e-3 * before.event.elapsed_time(after.event)
        seconds.append(round(took, 9))
    return seconds


class _Held:
    """What collectives hold, as the ledger tells of each hold that comes or goes."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        LEDGER.observer = self

    def held(self, hold: Hold) -> None:
        vars(hold)["observed"] = nbytes = hold.nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def released(self, hold: Hold) -> None:
        self.now -= vars(hold).pop("observed", 0)


def _profile() -> Profile | None:
    """Return a profile that has begun, of what the device runs; None where there is none."""
    if not _has_device() or _torch.profiler._is_profiler_enabled:  # the program's own would end
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # what came before is no part of the step
    found = profile(activities=[ProfilerActivity.CUDA])
    found.__enter__()  # type: ignore[no-untyped-call]
    return found
