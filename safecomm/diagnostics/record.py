"""record_memory(): the communication memory of a run over time, as a file for each rank; memory_report(): now.

What safecomm holds is counted where it is taken and given back, on the thread that does so. Another thread writes the
counters down a few times a second, with those of the caching allocator. It touches no tensor, no work and no event, so
nothing is ever freed there (S4).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import torch.distributed

from safecomm import _torch, arguments
from safecomm.arena.arena import OPEN, taken
from safecomm.collectives.holding import counted
from safecomm.core.holds import Hold, Pending
from safecomm.core.ledger import LEDGER
from safecomm.diagnostics.outside import Outside, outside
from safecomm.diagnostics.recording import VERSION
from safecomm.diagnostics.table import laid_out
from safecomm.diagnostics.units import mib
from safecomm.errors import SafecommError

log: logging.Logger = logging.getLogger("safecomm")

INTERVAL = 0.1
"""Seconds between two lines of the file."""

MOST_SITES = 1000
"""Call sites that are told apart; what comes after is counted as one."""

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_OTHER_DEVICES = 100  # samples after which devices that were not in use are asked again


class _Site:
    """What one line of the program holds by one kind of call in one group."""

    __slots__ = ("changed", "count", "group", "holds", "longest", "nbytes", "number", "op", "peak", "place", "total")

    def __init__(self, number: int, op: str, group: str, place: str) -> None:
        self.number = number
        self.op = op
        self.group = group
        self.place = place
        self.nbytes = 0  # held now
        self.peak = 0  # the most since the last sample
        self.holds = 0  # that hold it
        self.count = 0  # calls so far
        self.total = 0  # bytes of these
        self.longest = 0.0  # seconds that one of them was held
        self.changed = True


class _Counters:
    """What is held, by site. Counted on the threads that call safecomm, and read by another."""

    def __init__(self) -> None:
        # Reentrant: an allocation inside of it can start the garbage collector, and with it any destructor.
        self.lock = threading.RLock()
        self.sites: dict[object, _Site] = {}
        self.nbytes = 0
        self.peak = 0

    def held(self, hold: Hold) -> None:
        noted = vars(hold).get("noted_by")
        if noted is not None and noted[0] is self:  # it came while those that were there were counted
            return
        nbytes = hold.nbytes
        group = _torch.group_name(hold.of_group())
        key: object = (hold.op, hold.code, hold.instruction, group)
        with self.lock:
            site = self.sites.get(key)
            if site is None:
                if len(self.sites) < MOST_SITES:
                    site = _Site(len(self.sites), hold.op, group, hold.site)
                else:
                    site = self.sites.get(None) or _Site(MOST_SITES, "others", "", f"more than {MOST_SITES} lines")
                    key = None
                self.sites[key] = site
            site.changed = True
            site.holds += 1
            site.count += 1
            site.total += nbytes
            site.nbytes += nbytes
            site.peak = max(site.peak, site.nbytes)
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
        vars(hold)["noted_by"] = (self, site, nbytes)

    def released(self, hold: Hold) -> None:
        noted = vars(hold).pop("noted_by", None)
        if noted is None or noted[0] is not self:
            return
        _, site, nbytes = noted
        with self.lock:
            site.changed = True
            site.holds -= 1
            site.nbytes -= nbytes
            site.longest = max(site.longest, time.perf_counter() - hold.since)
            self.nbytes -= nbytes


def _program() -> str:
    """Return the name of the script or module that runs."""
    path = Path(sys.argv[0] if sys.argv else "")
    return path.parent.name if path.name == "__main__.py" else path.name


def _install(counters: _Counters) -> None:
    """Have ``counters`` told of each hold of the ledger that comes or goes, and of those that are there."""
    LEDGER.observer = counters
    for hold in [*LEDGER.holds(), *LEDGER.quarantine]:
        counters.held(hold)


def _remove() -> None:
    """Undo what ``_install`` has done, or as much of it as it has got to."""
    LEDGER.observer = None


class record_memory(contextlib.ContextDecorator):  # noqa: N801
    """Write down, a few times a second, where the communication memory of this process is: one file a rank.

    The file has JSON lines: what collectives hold, by call site and group, at that moment and the most since the line
    before; what is freed but unusable (``active_bytes - allocated_bytes`` of the caching allocator, which is what
    ``record_stream`` causes); what the allocator has active and reserved; what of the arena is in use. Bytes.
    ``python -m safecomm report FILE`` reads it. Each line is on disk when it is written, so a process that is killed
    leaves all but the last.

    It holds no tensor, waits for nothing, asks no event, and orders no stream. It costs 2 to 5 us for each call that
    holds something. Memory and the rate of writing are bounded: about 1 KiB a line, and a line each ``interval``.

    A context manager, a decorator, or :meth:`start` and :meth:`stop`. The environment variable ``SAFECOMM_RECORD=PATH``
    does the same for a whole process. One at a time. The child of a fork is not recorded, and may begin a recording of
    its own, into another file.

    Parameters
    ----------
    path
        ``run.jsonl`` becomes ``run.rank0.jsonl`` and so on, by torch.distributed's rank if the default group is there,
        by the launcher's (``RANK``) if not, and by the process id if there is none yet. What is there is replaced.
    interval
        Seconds between two lines.

    Attributes
    ----------
    path
        The file that is written, from :meth:`start` on.

    Raises
    ------
    TypeError, ValueError
        If ``path`` names no file, or ``interval`` is not a positive number.
    OSError
        At the start, if the file can't be written.
    SafecommError
        At the start, if another recording is on, or the file is that of the process that this one was forked from.

    Examples
    --------
    >>> with record_memory("run.jsonl") as recording:
    ...     pass
    >>> recording.path.exists()
    True
    """

    def __init__(self, path: str | os.PathLike[str] = "safecomm-memory.jsonl", *, interval: float = INTERVAL) -> None:
        arguments.check("record_memory", arguments.is_a("seconds", int, float), interval=interval)
        if not 0 < interval <= threading.TIMEOUT_MAX:
            shown = arguments.shown(interval)
            raise ValueError(f"record_memory(interval={shown}): expected seconds, more than 0, and finite")
        arguments.check("record_memory", arguments.PATH, path=path)
        if Path(path).name in ("", "..") or "\0" in os.fspath(path):
            raise ValueError(f"record_memory({os.fspath(path)!r}): expected the path of a file")
        self.path: Path = Path(path)
        self._base = Path(path)
        self._interval = interval
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def _recreate_cm(self) -> record_memory:
        return record_memory(self._base, interval=self._interval)

    def __repr__(self) -> str:
        return f"<record_memory({str(self._base)!r}): {'not recording' if self._thread is None else 'recording'}>"

    def __enter__(self) -> record_memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to record, into a new file."""
        with _lock:
            if _on:
                raise SafecommError("record_memory(): a recording is on already. Stop it first.")
            rank, world = _rank()
            self.path = _path_of(self._base, rank)
            if self.path.resolve() in _of_parents:
                raise SafecommError(
                    f"record_memory(): {self.path} is the file of the process that this one was forked from. "
                    "Give another one."
                )
            # Without a buffer: what is in one at a fork would be written by the child, too.
            self._file = self.path.open("wb", buffering=0)
            self._counters = _Counters()
            self._allocator = _Allocator()
            self._sent = 0
            self._counts, self._calls = counted(), {}
            self._rank: int | None = None
            self._begin = time.perf_counter()
            self._stopping = threading.Event()  # not the one before, which a fork may have left locked
            versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
            header = {
                "safecomm_record": VERSION,
                "started": time.time(),
                "interval": self._interval,
                "pid": os.getpid(),
            }
            self._write({**header, "rank": rank, "world": world, "program": _program(), "versions": versions})
            self._rank = rank
            _on.append(self)
            _install(self._counters)
            self._thread = threading.Thread(target=self._run, name="safecomm-record", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    @staticmethod
    def give_way() -> None:
        """End the recording that is on, if one is, and remove its file: another one takes its place from the start."""
        for recording in tuple(_on):
            recording.stop()
            recording.path.unlink()

    def stop(self) -> None:
        """Write the last line, with what is still held, and close the file. Does nothing when it has stopped."""
        thread = self._thread
        if thread is None:
            return
        self._thread = None
        self._stopping.set()
        thread.join()
        with _lock:
            _remove()
            _on.remove(self)
        atexit.unregister(self.stop)
        with self._file:
            self._sample()
            left = [_shown(pending) for pending in LEDGER.pending()]
            self._write({"end": self._now(), "left": left[:MOST_SITES]})

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self._sample()
            except Exception as error:  # a full disk must not end the program
                log.warning("record_memory(): %s can't be written to any more: %r", self.path, error)
                return

    def _now(self) -> float:
        return round(time.perf_counter() - self._begin, 6)

    def _sample(self) -> None:
        rank, world = _rank()
        if rank != self._rank:
            self._write({"rank": rank, "world": world})
            self._rank = rank
        counters = self._counters
        with counters.lock:
            held, peak = counters.nbytes, counters.peak
            counters.peak = held
            changed = []
            new = []
            for site in counters.sites.values():
                if site.number >= self._sent:
                    new.append({"site": site.number, "op": site.op, "group": site.group, "at": site.place})
                if site.changed:
                    changed.append(
                        [
                            site.number,
                            site.nbytes,
                            site.peak,
                            site.holds,
                            site.count,
                            site.total,
                            round(site.longest, 6),
                        ]
                    )
                    site.peak = site.nbytes
                    site.changed = False
            self._sent = len(counters.sites)
        for line in new:
            self._write(line)
        counts, before = counted(), self._counts
        calls = {name: count - before.get(name, 0) for name, count in counts.items() if count != before.get(name)}
        if calls != self._calls:
            self._calls = calls
            self._write({"calls": [*calls.items()]})
        sample = {"t": self._now(), "held": held, "peak": peak, "sites": changed, **self._allocator.read()}
        arena = _arena_in_use()
        if arena is not None:
            sample["arena"] = arena
        self._write(sample)

    def _write(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[self._file.write(data) :]

    def _end_in_child(self) -> None:
        """Forget the recording, which is the parent's and goes on there."""
        self._thread = None
        atexit.unregister(self.stop)
        self._counters.lock = threading.RLock()
        self._file.close()
        _of_parents.add(self.path.resolve())

    _file: FileIO
    _calls: dict[str, int]


_lock = threading.Lock()
_on: list[record_memory] = []  # the recording that is on, if one is
_of_parents: set[Path] = set()  # files that processes write, or wrote, which this one was forked from


def _none_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have had it
    _remove()
    for recording in _on:
        recording._end_in_child()
    _on.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_none_in_child)


class _Allocator:
    """The caching allocators of the devices that this process uses. Only counters are read."""

    def __init__(self) -> None:
        self._devices: list[int] = []
        self._samples_taken = 0

    def read(self) -> dict[str, int]:
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        devices = self._devices if self._samples_taken % _OTHER_DEVICES else list(range(torch.cuda.device_count()))
        self._samples_taken += 1
        found = {"active": 0, "allocated": 0, "reserved": 0}
        used = []
        for index in devices:
            stats = torch.cuda.memory_stats_as_nested_dict(index)
            one = {name: stats.get(f"{name}_bytes", {}).get("all", {}).get("current", 0) for name in found}
            if one["reserved"]:
                used.append(index)
            for name, nbytes in one.items():
                found[name] += nbytes
        self._devices = used or devices
        return {**found, "unusable": found["active"] - found["allocated"]}


def _arena_in_use() -> int | None:
    """Return the bytes that arenas have in slots; None where there is no arena."""
    return taken() if OPEN else None


def _rank() -> tuple[int | None, int | None]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return launched_as()


@functools.cache
def launched_as() -> tuple[int | None, int | None]:
    for rank, world in _RANK_VARIABLES:
        number = _number(rank)
        if number is not None:
            size = _number(world)
            return number, size if size is not None and size > number else None
    return None, None


def _number(name: str) -> int | None:
    """Return the number that a variable is; None if it is none that a launcher would give."""
    text = os.environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _path_of(path: Path, rank: int | None) -> Path:
    return path.with_name(f"{path.stem}.{f'pid{os.getpid()}' if rank is None else f'rank{rank}'}{path.suffix}")


def _shown(pending: Pending) -> dict[str, object]:
    return {
        "op": pending.op,
        "group": pending.group,
        "at": pending.site,
        "state": pending.state,
        "nbytes": pending.nbytes,
        "seconds": round(pending.seconds, 6),
    }


# --- now ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryReport:
    """Where communication memory is, as :func:`memory_report` found it. Bytes; ``str()`` is a table."""

    held: tuple[Pending, ...]
    """What safecomm holds, oldest first."""
    active: int
    """Bytes of the caching allocator's blocks that are in use or not usable yet, on all devices; 0 without a GPU."""
    allocated: int
    """Those of them that the program has."""
    reserved: int
    """Bytes that the caching allocator has from the driver."""
    arena: int | None
    """Bytes of arenas that are in use; None without an arena."""
    unwaited: int = 0
    """Functional collectives of this thread that were not waited for: torch keeps their tensors until they are.
    0 if torch does not say."""
    outside: Outside | None = None
    """What the devices use that the caching allocator has not reserved; None where CUDA is not started."""

    @property
    def unusable(self) -> int:
        """Bytes that the program has freed and the allocator can't give out yet, because of ``record_stream``."""
        return self.active - self.allocated

    def __str__(self) -> str:
        figures = {
            "held by collectives": sum(one.nbytes for one in self.held),
            "freed but unusable": self.unusable,
            "allocator, active": self.active,
            "allocator, reserved": self.reserved,
        } | ({} if self.arena is None else {"arena in use": self.arena})
        figures |= {} if self.outside is None else self.outside.figures()
        lines = laid_out(("memory", "now"), [(name, mib(nbytes)) for name, nbytes in figures.items()])
        if self.unwaited:
            lines.append(unwaited_for(self.unwaited))
        lines += [f"  {one}" for one in self.held]
        return "\n".join(lines)


def unwaited_for(count: int) -> str:
    """Return a sentence about ``count`` functional collectives that were not waited for."""
    return f"{count} functional collectives that were not waited for: torch keeps their tensors until they are"


def memory_report() -> MemoryReport:
    """Return where communication memory is now: what safecomm holds, the allocator's figures, and what is beside them.

    Asks no event, releases nothing, orders no stream and waits for no device. Where CUDA is started it costs a call of
    the driver for each device, which :func:`record_memory` does not make.

    Examples
    --------
    >>> memory_report().held
    ()
    """
    figures = _Allocator().read()
    return MemoryReport(
        held=tuple(LEDGER.pending()),
        active=figures.get("active", 0),
        allocated=figures.get("allocated", 0),
        reserved=figures.get("reserved", 0),
        arena=_arena_in_use(),
        unwaited=_torch.unwaited() or 0,
        outside=outside(),
    )


__all__ = ["MemoryReport", "memory_report", "record_memory"]
