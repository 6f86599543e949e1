"""Reports as files for other programs: JSON of a fixed schema, and a trace for Perfetto. ``docs/exports.md`` has both.

The trace has the JSON format of Chrome's trace events. Its times are whole microseconds after
``baseTimeNanoseconds``, which is unix time, as in what ``torch.profiler`` exports since torch 2.4. The base is the one
that torch takes, the start of a quarter of a year, so the times of both files are on one clock as they stand.
"""

from __future__ import annotations

import heapq
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safecomm._version import __version__
from safecomm.diagnostics.recording_report import summed
from safecomm.diagnostics.report import Report
from safecomm.diagnostics.timeline import Drawn, Timeline

VERSION = 1
"""Of the schema of the JSON: it changes when a key goes or means something else, and not when one is added."""

SPANS = 20_000
"""Blocks that get a span in a trace, the largest."""

FIRST_PROCESS = 1 << 24
"""The process id of the first timeline: above those of Linux, and the numbers of GPUs, which torch's traces have."""

_BASE = 7_889_238
"""Seconds: the base of torch's traces is a multiple of it. See ``torch/profiler/_chrome_trace_export.py``."""

_LATEST = 1 << 33
"""Unix seconds, in the year 2242. A clock beyond is not known: its microseconds would not be exact in a browser."""

_WAITING, _HELD = "freed but unusable", "held by collectives"

_OF_REPORT = ("title", "program", "rank", "figures", "summary")
_OF_TIMELINE = ("title", "duration", "lines", "holders", "caption")

_Event = dict[str, object]


def write_json(reports: Sequence[Report], path: Path) -> None:
    """Write ``reports`` to ``path``, all or nothing; ValueError if it can't be written."""
    write_object("--json", path, {"safecomm_report": VERSION, "reports": [_plain(report) for report in reports]})


def write_perfetto(reports: Sequence[Report], path: Path) -> None:
    """Write the timelines of ``reports`` to ``path``, all or nothing; ValueError if there is none, or it can't be."""
    timelines = [timeline for report in reports for timeline in report.timelines]
    if not timelines:
        raise ValueError("--perfetto: there is no timeline to write: the files have no history")
    write_object("--perfetto", path, make_trace(timelines))


def write_object(option: str, path: Path, content: Mapping[str, object]) -> None:
    """Write ``content`` to ``path`` as JSON, all or nothing; ValueError, which names ``option``, if it can't be."""
    text = json.dumps(content, allow_nan=False) + "\n"
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe takes what is written, and must not become an ordinary file.
            path.write_text(text, encoding="ascii")
            return
        place = Path(os.path.realpath(path))
        part = place.with_name(f".safecomm-{secrets.token_hex(8)}")
        try:
            with part.open("x", encoding="ascii") as file:
                file.write(text)
            os.replace(part, place)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"{option}: {path} can't be written: {error.strerror or error}") from None


def _plain(report: Report) -> dict[str, object]:
    advised = sorted(report.advised, key=lambda one: -one.nbytes)
    return {name: getattr(report, name) for name in _OF_REPORT} | {
        "advice": [{"nbytes": one.nbytes, "text": one.text} for one in advised],
        "tables": [asdict(table) for table in report.tables],
        "timelines": [{name: getattr(one, name) for name in _OF_TIMELINE} for one in report.timelines],
    }


def make_trace(timelines: Sequence[Timeline]) -> dict[str, object]:
    """Return ``timelines`` as a trace: a process for each, with counters of bytes, and spans that do not overlap.

    The spans are what call sites of a recording held, and of snapshots the ``SPANS`` largest of the blocks that were
    freed and could not be given out again. All times are after ``baseTimeNanoseconds``, which is 0 if no clock is
    known. A timeline whose clock is not known begins with the first of the others, and is named in ``otherData``.
    """
    first = min((one.began for one in timelines if _known(one)), default=0.0)
    base = int(first) // _BASE * _BASE
    waiting = [(number, block) for number, one in enumerate(timelines) for block in one.blocks if block.waited]
    chosen: dict[int, list[Drawn]] = {}
    for number, block in heapq.nlargest(SPANS, waiting, key=lambda item: item[1].nbytes):
        chosen.setdefault(number, []).append(block)
    named: list[_Event] = []
    events: list[tuple[int, _Event]] = []
    for number, timeline in enumerate(timelines):
        start = _micros(timeline.began if _known(timeline) else first) - base * 1_000_000
        process = _Process(FIRST_PROCESS + number, start, named, events)
        process.name("process_name", timeline.title, 1)
        _add_counters(process, timeline)
        _add_holds(process, timeline)
        _add_waiting(process, timeline, chosen.get(number, []))
    events.sort(key=lambda item: item[0])
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base * 1_000_000_000,
        "otherData": {
            "writer": f"safecomm {__version__}",
            "spans": f"at most {SPANS}: the largest of {len(waiting)} blocks that were {_WAITING}",
            "clock not known": [one.title for one in timelines if not _known(one)],
        },
        "traceEvents": [*named, *(event for _, event in events)],
    }


def _known(timeline: Timeline) -> bool:
    return 0 < timeline.began < _LATEST


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


@dataclass
class _Process:
    """One timeline as a process of a trace: adds to the names of the trace, and to its events by their times."""

    pid: int
    start: int
    named: list[_Event]
    events: list[tuple[int, _Event]]
    threads: int = 0

    def name(self, what: str, name: str, thread: int) -> None:
        self.named.append({"ph": "M", "name": what, "pid": self.pid, "tid": thread, "args": {"name": name}})

    def thread(self, name: str) -> int:
        """Return a new thread. They begin with 1: Perfetto takes 0 for the idle one of the kernel."""
        self.threads += 1
        self.name("thread_name", name, self.threads)
        return self.threads

    def add(self, time: int, event: _Event) -> None:
        self.events.append((self.start + time, {**event, "pid": self.pid, "ts": self.start + time}))

    def span(self, category: str, name: str, thread: int, start: int, end: int, args: _Event) -> None:
        self.add(start, {"ph": "X", "cat": category, "name": name, "tid": thread, "dur": end - start, "args": args})


def _add_counters(process: _Process, timeline: Timeline) -> None:
    counters = {_WAITING if name == "unusable" else name: points for name, points in timeline.lines.items()}
    if timeline.bands:
        # The most that call sites held between two samples they need not have held at the same moment.
        counters[f"{_HELD}, at most"] = summed(timeline.bands.values())
    counters |= {f"{_HELD}: {name}": points for name, points in timeline.bands.items()}
    thread = process.thread("counters")
    for name, points in counters.items():
        counter: _Event = {"ph": "C", "cat": "memory", "name": name, "tid": thread}
        for seconds, nbytes in points:
            process.add(_micros(seconds), {**counter, "args": {"bytes": nbytes}})


def _add_holds(process: _Process, timeline: Timeline) -> None:
    """Add a span for each time in which a call site of a recording held something."""
    for name, points in timeline.bands.items():
        thread = process.thread(f"{_HELD}: {name}")
        since, most = 0, 0
        for seconds, nbytes in [*points, (timeline.duration, 0)]:
            now = _micros(seconds)
            if nbytes and not most:
                since = now
            elif most and not nbytes and since < now:
                process.span(_HELD, name, thread, since, now, {"bytes at the most": most})
            most = max(most, nbytes) if nbytes else 0


def _add_waiting(process: _Process, timeline: Timeline, blocks: Sequence[Drawn]) -> None:
    """Add a span for each block. Those of one thread do not overlap, since Perfetto leaves out one that does."""
    spans = [(one.freed or 0.0, timeline.duration if one.end is None else one.end, one) for one in blocks]
    ends: list[tuple[int, int]] = []
    for freed, usable, block in sorted(spans, key=lambda span: span[0]):
        start, end = _micros(freed), _micros(usable)
        if ends and ends[0][0] <= start:
            thread = heapq.heappop(ends)[1]
        else:
            thread = process.thread(f"{_WAITING}, {len(ends) + 1}")
        heapq.heappush(ends, (end, thread))
        args: _Event = {"bytes": block.nbytes, "freed at": timeline.sites[block.freed_by]}
        args |= {"user_metadata": block.label} if block.label else {}
        process.span(_WAITING, timeline.sites[block.stack], thread, start, end, args)
