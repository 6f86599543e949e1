"""python -m safecomm compare: what communication costs a program, without safecomm and with it.

The program runs unpatched and patched in turns. Each of its ranks is observed (``diagnostics/observer.py``) and writes
a file; this process only starts, waits and reads, and imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from safecomm.diagnostics import inspector
from safecomm.diagnostics.collective_log import LoggedCall, late, table_of
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.observed import Observed, all_done, read_run
from safecomm.diagnostics.peaks import Peak, peak_of
from safecomm.diagnostics.report import ROWS, SHARE, WORTH, Advice, Report
from safecomm.diagnostics.snapshot import read_snapshot
from safecomm.diagnostics.table import Table
from safecomm.diagnostics.units import mib
from safecomm.errors import SafecommError
from safecomm.patching import children

VERSION = 1
"""Of ``compare.json``."""

UNPATCHED, PATCHED, AVOIDING = "unpatched", "patch()", "avoid_record_streams()"
CALLS = 20_000
"""That torch's flight recorder keeps."""
PATIENCE = 40.0
"""Seconds that a program has to end by itself when it is told to. Torchrun gives its ranks 30 of them."""
TAIL = 1 << 16
"""Bytes of what a program has printed that are looked at."""
ASKED_EVERY = 0.5
"""Seconds between looks at a program that runs."""
LINES = 20
"""Of them that are shown."""
_ONE_RUN = " Peaks differ from run to run where the host runs ahead of the device: --turns 3 tells."
_EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?[\w.]+(Error|Exception)\b")
"""The last line of a stack, as Python writes it, or torch for a rank."""
_FIGURES = {
    "active": "peak, active",
    "reserved": "peak, reserved",
    "unusable": "freed but unusable",
    "held": "held by collectives",
    "outside": "outside of the allocator",
    "nccl": "  NCCL",
    "staging": "  staging of low_latency()",
    "context": "  CUDA's context, kernels, other processes",
    "unattributed": "  not put down to any of these",
}

_BARE_RANK = """
import os, torch, torch.distributed as dist
from safecomm.diagnostics.outside import outside
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
dist.all_reduce(x @ x)
torch.cuda.synchronize()
before = outside().total
dist.all_reduce(x, group=dist.new_group())
torch.cuda.synchronize()
group = outside().total - before
print(f"bytes {before - group} {group}\\n", end="", flush=True)
dist.destroy_process_group()
"""
"""Prints what a device uses with nothing of the program on it, and what a group of NCCL adds.

The driver takes memory that no group counts with NCCL's first call that has a peer: 182 MiB on H200.
"""


@dataclass
class Run:
    """One run of the program in one way."""

    ranks: list[Observed]
    report: Report | None = None
    """What the snapshots of its ranks say; None where there are none."""
    peak: Peak | None = None
    """That of the window, of the rank with the most; None without snapshots."""
    inspected: list[LoggedCall] = field(default_factory=list)
    """What NCCL's Inspector has written of all of the run, if the program is run with it."""

    @property
    def seconds(self) -> list[float]:
        """Return how long the steps took, each on its slowest rank."""
        return [max(step) for step in zip(*(one.seconds for one in self.ranks), strict=False)]


@dataclass
class Way:
    """All runs in one way."""

    name: str
    runs: list[Run] = field(default_factory=list)

    def of_runs(self, name: str) -> list[int]:
        """Return a figure of memory of each run that knows it, of the rank with the most."""
        values = []
        for run in self.runs:
            of_ranks = [one.memory[name] for one in run.ranks if name in one.memory]
            if name == "unusable" and run.peak is not None:
                of_ranks = [run.peak.unusable]
            values += [max(of_ranks)] if of_ranks else []
        return values

    def nbytes(self, name: str) -> int | None:
        """Return a figure of memory, the median over runs; None if it is not known."""
        values = self.of_runs(name)
        return round(statistics.median(values)) if values else None

    @property
    def seconds(self) -> list[float]:
        """Return how long the steps took, of all runs."""
        return [seconds for run in self.runs for seconds in run.seconds]

    @property
    def spread(self) -> tuple[float, float]:
        """Return between what a step takes: the quartiles of one run, or the medians of several."""
        if len(self.runs) == 1:
            return quartiles(self.seconds)
        medians = [statistics.median(run.seconds) for run in self.runs if run.seconds]
        return min(medians), max(medians)

    @property
    def exposed(self) -> dict[str, float]:
        """Return the ms of collectives in a step, and of those the ms beside nothing else.

        Of the rank with the least: what others have more is waiting for a rank that is late.
        """
        found = [one.exposed for run in self.runs for one in run.ranks if one.exposed]
        return min(found, key=lambda one: one.get("exposed ms", 0.0)) if found else {}


def compare(
    command: Sequence[str],
    out: Path,
    *,
    window: tuple[int, int, bool],
    turns: int,
    limit: float | None,
    arena: str,
    progress: Callable[[str], None],
) -> tuple[list[Report], dict[str, object]]:
    """Run ``command`` unpatched and patched ``turns`` times, in turns; return a report, and what it rests on.

    A third way, inside of ``avoid_record_streams()``, is run too where patching alone left memory unusable. What the
    program prints goes to files in ``out``. ``window``: the first and the last step to look at, or in seconds its
    beginning and end, and whether it is in seconds.

    Raises
    ------
    SafecommError
        If a run fails, takes longer than ``limit`` seconds, or is seen by no rank. All that it started has ended then.
    """
    ways = {name: Way(name) for name in (UNPATCHED, PATCHED)}

    def run_once(turn: int, way: Way) -> None:
        progress(f"turn {turn} of {turns}: {way.name}")
        way.runs.append(_run(command, out / f"{turn}.{way.name.removesuffix('()')}", way.name, window, limit, arena))

    for turn in range(1, turns + 1):
        for way in ways.values() if turn % 2 else reversed(ways.values()):
            run_once(turn, way)
    if (ways[PATCHED].nbytes("unusable") or 0) >= WORTH:
        ways[AVOIDING] = Way(AVOIDING)
        for turn in range(1, turns + 1):
            run_once(turn, ways[AVOIDING])
    on_devices = [rank for way in ways.values() for run in way.runs for rank in run.ranks if "outside" in rank.memory]
    if on_devices and (bare := _bare(min(len(ways[UNPATCHED].runs[0].ranks), 2), out / "bare.txt", progress)):
        for one in on_devices:
            nccl = one.memory.get("nccl") or bare[1] * len({row.group for row in one.collectives})
            left = one.memory["outside"] - bare[0] - nccl - one.memory.get("staging", 0)
            one.memory |= {"context": bare[0], "nccl": nccl, "unattributed": max(left, 0)}
    return _told(command, list(ways.values()))


def _bare(ranks: int, log: Path, progress: Callable[[str], None]) -> list[int]:
    """Return what a device uses without the program and what a group of NCCL adds, in bytes; [] if it does not tell."""
    progress("what a device uses without the program")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(("SAFECOMM_", "NCCL_INSPECTOR"))}
    # The mark by which these are ended, and those of another compare are not.
    theirs[children.VARIABLE] = children.variables({"patch": False, "parent": os.getpid()})[children.VARIABLE]
    _ended([*start, sys.executable, "-c", _BARE_RANK], theirs, log, 3 * PATIENCE, lambda: False)
    found = re.findall(r"^bytes (\d+) (\d+)$", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return max(([int(nbytes) for nbytes in line] for line in found), default=[])


def _run(
    command: Sequence[str], directory: Path, how: str, window: tuple[int, int, bool], limit: float | None, arena: str
) -> Run:
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("rank*.*"):
        old.unlink()
    first, last, seconds = window
    observe = str(directory.absolute()), first, last, how, seconds
    options: dict[str, object] = {"observe": observe, "patch": how != UNPATCHED}
    if how != UNPATCHED:
        options |= {"avoid_record_streams": how == AVOIDING, "arena": arena}
    # Torch warns of the old name from the moment that it has the new one.
    renamed = tuple(map(int, re.findall(r"\d+", metadata.version("torch"))[:2])) >= (2, 9)
    name = "TORCH_FR_BUFFER_SIZE" if renamed else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    recorded = {name: f"{CALLS}", "TORCH_NCCL_ENABLE_TIMING": "1"}
    theirs = dict(os.environ)
    if how == UNPATCHED:
        # Before torch 2.8 safecomm, which observes, sets it as it is imported; and its own variables would act.
        recorded["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "0"
        theirs = {name: value for name, value in theirs.items() if not name.startswith("SAFECOMM_")}
    # A folder for each run: in that of the user those of all would mix.
    inspected = directory / "inspector"
    shutil.rmtree(inspected, ignore_errors=True)
    environment = {**recorded, **theirs, **children.variables(options), inspector.VARIABLE: str(inspected.absolute())}
    log = directory / "output.txt"
    over = time.monotonic() + last + PATIENCE  # where a rank writes nothing
    status = _ended(
        command, environment, log, limit, lambda: seconds and (all_done(directory) or time.monotonic() > over)
    )
    if status != 0:
        what = f"did not end within {limit:g} seconds" if status is None else f"ended with status {status}"
        head = f"the program, {how}, {what}; {log} has what it printed, which ends so:"
        raise SafecommError("\n".join([head, *_last_lines(log)]))
    try:
        ranks = read_run(directory)
        if any(one.patched for one in ranks) is (how == UNPATCHED):
            raise ValueError(f"the program patches by itself, or undoes it: this run was to be {how}")
        with_most = max(ranks, key=lambda one: one.memory.get("active", 0))
        run = Run(ranks, inspected=inspector.read_inspector(inspected))
        if with_most.snapshot is not None:
            run.report = make_reports([directory])[0]
            run.peak = peak_of(read_snapshot(with_most.snapshot), with_most.began)
        return run
    except ValueError as error:
        raise SafecommError("\n".join([f"{error}. The program printed last:", *_last_lines(log)])) from None


def _last_lines(log: Path) -> list[str]:
    """Return the end of what was printed; of torchrun's report of a rank that failed, what that rank printed last."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - TAIL, 0))
        lines = file.read().decode("utf-8", "replace").splitlines()
    reported = next((number for number, line in enumerate(lines) if "ChildFailedError" in line), 0)
    ends = [number for number, line in enumerate(lines[:reported], 1) if _EXCEPTION.match(line)]
    return lines[: ends[-1] if ends else None][-LINES:]


def _ended(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float | None, enough: Callable[[], bool]
) -> int | None:
    """Run ``command`` to its end, and return its status; None if it took longer than ``limit`` seconds.

    A program that goes on as ``enough`` returns True, such as a server, is ended, and its status is 0.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise ValueError(f"{command[0]} can't be run: {error.strerror}") from None
        with _ending(process, environment[children.VARIABLE]):
            deadline = math.inf if limit is None else time.monotonic() + limit
            while time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(ASKED_EVERY, deadline - time.monotonic()))
                if enough():
                    return 0
            return None


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes], options: str) -> Iterator[None]:
    """End the process at the end, with all of its session, and what has left that and began with ``options``."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second one would leave what the first has begun to end
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        mark = f"{children.VARIABLE}={options}".encode()
        for found in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # another user's, or gone
                if mark in found.read_bytes().split(b"\0"):
                    os.kill(int(found.parent.name), signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what is told ---------------------------------------------------------------------------------------------------


def _told(command: Sequence[str], ways: list[Way]) -> tuple[list[Report], dict[str, object]]:
    first = ways[0].runs[0].ranks
    lines = _difference_by_line(ways)
    advice = advised(ways)
    world = max(one.world for one in first)
    took_part = {way.name: min(len(run.ranks) for run in way.runs) for way in ways}
    window = first[0].window
    steps = f"steps {window[0]} to {window[1]}" if first[0].seconds else "all of the run"
    if first[0].ended == "seconds":
        steps = f"seconds {window[0]} to {window[1]}"
    elif first[0].ended == "end":
        steps += ", which had less than was asked for"
    summary = [
        f"{min(took_part.values())} of {world} ranks took part; {steps}; {first[0].device}, torch {first[0].torch}"
    ]
    if first[0].device == "cpu":
        summary += ["without a GPU there is no caching allocator and no stream: peaks and exposure are not seen here"]
    tables = [Table("the program", ("", *(way.name for way in ways)), _rows(ways)), *([lines] if lines else [])]
    tables.append(table_of(first[0].collectives, ROWS))
    if inspected := ways[0].runs[0].inspected:
        tables.append(
            replace(table_of(inspected, ROWS), title="collectives of the whole run, all ranks, by NCCL's Inspector")
        )
    if behind := late([one.created for one in first]):
        rows = [(f"rank {rank}", str(count), f"{ms:.2f} ms") for rank, (count, ms) in behind.items()]
        tables.append(Table("the last to call, unpatched", ("rank", "calls", "after the first, median"), rows))
    title = f"What communication costs: {' '.join(command)}"[:200]
    reports = [Report(title, summary, tables, advice, [], {}, program=command[-1])]
    for way in ways:
        if (report := way.runs[0].report) is not None:
            report.title = f"{way.name}, all of the run"
            for timeline in report.timelines:
                timeline.title = f"{way.name}: {timeline.title}"
            reports.append(report)
    found: dict[str, object] = {
        "safecomm_compare": VERSION,
        "command": list(command),
        "ranks": took_part,
        "world": world,
        "window": list(window),
        "ways": {
            way.name: {
                "bytes": {name: way.nbytes(name) for name in _FIGURES},
                "active of runs": way.of_runs("active"),
                "seconds": way.seconds,
                "exposed": way.exposed,
                "lines": peak.lines if (peak := way.runs[0].peak) is not None else {},
                "collectives": [vars(row) for row in way.runs[0].ranks[0].collectives],
                "inspector": [vars(row) for row in way.runs[0].inspected],
            }
            for way in ways
        },
        "predicted active": predicted(ways[0]),
        "advice": [one.text for one in advice],
    }
    return reports, found


def predicted(unpatched: Way) -> int | None:
    """Return the peak of active bytes that would be left with every block usable as soon as it was freed."""
    active = unpatched.nbytes("active")
    gains = [run.peak.gain for run in unpatched.runs if run.peak is not None]
    return None if active is None or not gains else active - min(gains)


def _rows(ways: list[Way]) -> list[tuple[str, ...]]:
    rows = []
    for name, told in _FIGURES.items():
        values = [way.nbytes(name) for way in ways]
        if any(value is not None for value in values):
            rows.append((told, *("-" if value is None else mib(value) for value in values)))
    if any(way.seconds for way in ways):
        rows.append(("ms a step, median (quartiles)", *(_spread(way.seconds) for way in ways)))
    for key, told in (("ms", "collectives, ms of a step"), ("exposed ms", "exposed, ms of a step")):
        if any(way.exposed for way in ways):
            rows.append((told, *(f"{way.exposed[key]:.2f}" if key in way.exposed else "-" for way in ways)))
    if (least := predicted(ways[0])) is not None:
        rows.append(("peak, active, if all were usable when freed", mib(least), *["" for _ in ways[1:]]))
    return rows


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    first, last = quartiles(seconds)
    return f"{1e3 * statistics.median(seconds):.2f} ({1e3 * first:.2f} to {1e3 * last:.2f})"


def _difference_by_line(ways: list[Way]) -> Table | None:
    """Return by line what was active at the peak, unpatched and in the best way; None without snapshots."""
    best = min(ways[1:], key=lambda way: way.nbytes("active") or 0)
    peaks = [way.runs[0].peak for way in (ways[0], best)]
    found = [peak.lines for peak in peaks if peak is not None]
    if len(found) != len(peaks):
        return None
    before, after = found
    changes = changes_by_line(before, after)
    ordered = list(changes)
    rows = [
        (_signed(changes[site]), mib(before.get(site, 0)), mib(after.get(site, 0)), site) for site in ordered[:ROWS]
    ]
    if len(ordered) > ROWS:
        rest = ordered[ROWS:]
        sums = [sum(one.get(site, 0) for site in rest) for one in found]
        rows.append((_signed(sums[1] - sums[0]), mib(sums[0]), mib(sums[1]), f"{len(rest)} other lines"))
    whole = [sum(one.values()) for one in found]
    rows.append((_signed(whole[1] - whole[0]), mib(whole[0]), mib(whole[1]), "all lines"))
    columns = ("change", ways[0].name, best.name, "allocated at")
    return Table("active at the peak, by line of the program", columns, rows)


def changes_by_line(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return by line how many bytes more are active in ``after``, those that differ the most first."""
    changes = {site: after.get(site, 0) - before.get(site, 0) for site in {**before, **after}}
    return dict(sorted(changes.items(), key=lambda change: -abs(change[1])))


def _signed(nbytes: int) -> str:
    return ("-" if nbytes < 0 else "+" if nbytes else "") + mib(abs(nbytes))


def advised(ways: list[Way]) -> list[Advice]:
    """Return what to do: what was measured to be better, with its price; or that there is no gain."""
    before = ways[0]
    caveat = _ONE_RUN if len(before.runs) == 1 else ""
    found = []
    for way in ways[1:]:
        gains = {name: _gain(before, way, name) for name in ("active", "reserved")}
        if told := [f"the peak of {name} bytes by {mib(gain)}" for name, gain in gains.items() if gain > 0]:
            text = f"{way.name} lowers {' and '.join(told)}. {_price(before, way)}"
            found.append(Advice(max(gains.values()), text if "--turns" in text else text + caveat))
        if worse := [f"{name} bytes by {mib(-gain)}" for name, gain in gains.items() if gain < 0]:
            found.append(Advice(0, f"{way.name} raises the peak of {' and '.join(worse)}.{caveat}"))
    if not any(one.nbytes for one in found):
        known = before.nbytes("active") is not None
        why = "no way lowers a peak by more than 1 % in all runs" if known else "memory is not seen here"
        found.append(Advice(1, f"No gain: {why}. {_price(before, ways[1])}"))
    report = before.runs[0].report
    return found + [one for one in (report.advised if report is not None else []) if not one.measurable]


def _gain(before: Way, after: Way, name: str) -> int:
    """Return the bytes by which a peak is lower; 0 if that is within 1 %, or within what runs in one way differ by."""
    one, two = before.nbytes(name), after.nbytes(name)
    of_ways = before.of_runs(name), after.of_runs(name)
    unknown = len(before.runs) + len(after.runs) - sum(map(len, of_ways))
    if one is None or two is None or unknown or abs(one - two) < max(WORTH, one // SHARE):
        return 0
    lower, higher = sorted(of_ways, key=min)
    return one - two if max(lower) < min(higher) else 0


def _price(before: Way, after: Way) -> str:
    if not before.seconds or not after.seconds:
        return "Steps were not timed."
    ratio = statistics.median(after.seconds) / statistics.median(before.seconds)
    (least, most), (least_before, most_before) = after.spread, before.spread
    told = f"A step takes {ratio:.2f} of its time unpatched"
    if least <= most_before and least_before <= most:
        return f"{told}, which is within the spread of both."
    more = "; the machine may have changed meanwhile: --turns 3 tells" if len(before.runs) == 1 else ""
    return f"{told}{more}."


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the first and the last quartile."""
    found = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [*seconds] * 3
    return found[0], found[2]
