"""What a recording or a snapshot says: tables, a timeline, and advice, each piece with the figure that it rests on."""

from __future__ import annotations

import functools
import itertools
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.record import Recording, mib, read_recording
from safecomm.diagnostics.snapshot import UNKNOWN, Snapshot, Stacks, Trace, read_snapshot, without_collection
from safecomm.diagnostics.table import Table

MIB = 1 << 20
ROWS = 15
"""Rows of a table."""
POINTS = 1500
"""Points of a line."""
WORTH = MIB
"""Bytes from which on something is worth advice."""
OTHERS = "other call sites"
"""The band of those that have none of their own."""

_GATHERS = re.compile(r"all_?gather|reduce_?scatter|all_?to_?all|_coalesc", re.IGNORECASE)

_RANK = re.compile(r"[._-]?(rank|pid)[._-]?(\d+)")
_DIGITS = re.compile(r"\d+(?=.*:\d+ in )")
_FILES = (".jsonl", ".pickle", ".pkl")
"""Of a folder that are read."""

Series = list[tuple[float, int]]


@dataclass(slots=True)
class Drawn:
    """One block of a timeline, from when it was allocated until the allocator could give it out again."""

    start: float
    freed: float | None
    """When the program gave it back; None if it had not at the end."""
    end: float | None
    """When it could be given out again; None if it could not at the end."""
    nbytes: int
    stack: int
    freed_by: int
    label: str = ""
    """What the program has attached to it, as torch's ``user_metadata``."""


@dataclass
class Timeline:
    """What is drawn of one device or rank. Bytes, and seconds from the start."""

    title: str
    duration: float
    lines: dict[str, Series]
    """Such as ``"active"``, ``"reserved"``: some ``POINTS`` of each, and of what is left out the largest."""
    bands: dict[str, Series] = field(default_factory=dict)
    """What collectives held, by call site, to be stacked."""
    blocks: list[Drawn] = field(default_factory=list)
    """All of them, by ``start``: at each moment their sum is what is active."""
    stacks: list[tuple[str, ...]] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    """Of each stack the line of the program."""
    holders: dict[str, int] = field(default_factory=dict)
    """Of each line of the program, or band, the bytes that it had at the most."""
    caption: str = ""
    """What it shows, in figures."""


@dataclass
class Report:
    """What one file says."""

    title: str
    summary: list[str]
    tables: list[Table]
    advice: list[str]
    timelines: list[Timeline]
    figures: dict[str, int] = field(default_factory=dict)
    """Bytes at the most, by what they are: what reports are compared by."""
    run: tuple[str, str, int | None] | None = None
    """The same for all ranks of a run: folder, name and number of ranks; None for a file that is of no rank."""
    rank: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.title}\n{'=' * len(self.title)}", "\n".join(self.summary), *map(str, self.tables)]
        advice = [f"  {number}. {text}" for number, text in enumerate(self.advice, 1)] or ["  nothing stands out"]
        return "\n\n".join([*parts, "\n".join(["advice", *advice])])


# --- files --------------------------------------------------------------------------------------------------------


def make_reports(paths: Sequence[Path], progress: Callable[[str], None] = lambda line: None) -> list[Report]:
    """Read files of ``record_memory()`` and memory snapshots of torch, and return what each says.

    A recording may be named as it was to ``record_memory``: then the files of all its ranks are read, and each must be
    there. Of a folder, all recordings and snapshots in it are read. The ranks of one run are one report. Nothing that
    is in a file is executed.

    Raises
    ------
    ValueError
        If a file is missing, can't be read, or is neither; or if ranks are missing.
    """
    found: list[Recording | Report] = []
    files = dict.fromkeys(itertools.chain.from_iterable(map(_files_of, paths)))
    for number, path in enumerate(files, 1):
        named = f"{path} ({number} of {len(files)})" if len(files) > 1 else str(path)
        content = _read(path, named, progress)
        # A snapshot is told at once, so that there is only one of them at a time.
        with without_collection():
            found.append(content if isinstance(content, Recording) else _of_snapshot(content))
    _check_ranks([one for one in found if isinstance(one, Recording)])
    runs: dict[Any, list[Report]] = {}
    for one in found:
        report = _of_recording(one) if isinstance(one, Recording) else one
        runs.setdefault(report.run or id(report), []).append(report)
    return [ranks[0] if len(ranks) == 1 else _of_ranks(ranks) for ranks in runs.values()]


def _files_of(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        return _ranks_of(path)
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in _FILES and one.is_file())
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    if not files:
        raise ValueError(f"{path}: no recording or snapshot is in it: no file that ends in {', '.join(_FILES)}")
    return sorted(files, key=lambda one: (_RANK.sub("", one.name), _rank_of(one.name) or 0))


def _rank_of(name: str) -> int | None:
    """Return the rank that the name of a file tells."""
    match = _RANK.search(name)
    return int(match[2]) if match and match[1] == "rank" else None


def _ranks_of(path: Path) -> list[Path]:
    if os.path.exists(path):  # Path's own raises for a name that is too long, and in a directory that is not readable
        return [path]
    pattern = re.compile(re.escape(path.stem) + r"\.(rank(\d+)|pid\d+)" + re.escape(path.suffix))
    try:
        matches = {one: pattern.fullmatch(one.name) for one in path.parent.iterdir()}
    except OSError:
        matches = {}
    ranks = [(int(match[2] or 0), one) for one, match in matches.items() if match]
    if not ranks:
        raise ValueError(f"{path}: no such file")
    return [one for _, one in sorted(ranks)]


def _read(path: Path, named: str, progress: Callable[[str], None]) -> Recording | Snapshot:
    try:
        if not path.is_file():
            raise ValueError(f"{path} is not an ordinary file")  # a pipe can be read only once, and can wait for ever
        with path.open("rb") as file:
            first = file.read(1)
        if first == b"\x80":

            def told(done: int, size: int) -> None:
                progress(f"reading {named}: {done // MIB} of {size // MIB} MiB")

            snapshot = read_snapshot(path, told)
            progress(f"reading {named}: done, {sum(len(trace.blocks) for trace in snapshot.traces)} allocations")
            return snapshot
        if first == b"{":
            progress(f"reading {named}")
            return read_recording(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    if not first:
        raise ValueError(f"{path} is empty")
    raise ValueError(f"{path} is neither a recording of safecomm nor a memory snapshot of torch")


def _check_ranks(recordings: list[Recording]) -> None:
    """Raise ValueError if several ranks of one run are there, but not all."""
    runs: dict[tuple[str, str, int | None], set[int]] = {}
    for one in recordings:
        if one.rank is not None:
            runs.setdefault(_run_of(one.path, one.world), set()).add(one.rank)
    for (_, base, world), ranks in runs.items():
        missing = (world or 0) - len(ranks)  # a rank is less than its world, or the file is refused
        if len(ranks) > 1 and missing > 0:
            first = itertools.islice((rank for rank in range(world or 0) if rank not in ranks), 10)
            raise ValueError(
                f"{base}: of {world} ranks, {missing} are missing ({', '.join(map(str, first))}). "
                "Give the files of all, or of one."
            )


def _run_of(path: Path, world: int | None) -> tuple[str, str, int | None]:
    return str(path.parent), _RANK.sub("", path.name), world


# --- several ------------------------------------------------------------------------------------------------------


def difference(reports: Sequence[Report]) -> Table | None:
    """Return how the second of two reports differs from the first; None if they are not two that can be compared."""
    if len(reports) != 2:
        return None
    one, two = reports
    rows = [
        (name, mib(value), mib(two.figures[name]), *_change(value, two.figures[name]))
        for name, value in one.figures.items()
        if name in two.figures
    ]
    names = [_short(report) for report in reports]
    return Table("difference", ("at the most", *names, "change", "in percent"), rows) if rows else None


def compared(reports: Sequence[Report]) -> str:
    """Return the text of ``reports``, and before it how two of them differ."""
    table = difference(reports)
    texts = list(map(str, reports))
    return "\n\n\n".join(texts if table is None else [f"{headline(reports)}\n\n{table}", *texts])


def _short(report: Report) -> str:
    return Path(report.title).name


def _change(one: int, two: int) -> tuple[str, str]:
    sign = "-" if two < one else "+" if two > one else ""
    return f"{sign}{mib(abs(two - one))}", f"{sign}{100 * abs(two - one) / one:.0f} %" if one else "-"


def headline(reports: Sequence[Report]) -> str:
    """Return in one line what two reports differ in the most, by the bytes of it; empty if they are not two."""
    table = difference(reports)
    if table is None:
        return ""
    told = []
    for name, before, after, _, percent in table.rows:
        if name in ("active", "held by collectives", "freed but unusable") and before != after:
            told.append(
                f"{'peak' if name == 'active' else name} {before} -> {after}"
                + (f" ({percent})" if percent != "-" else "")
            )
    text = "; ".join(told) or "no difference in active memory"
    return text[0].upper() + text[1:]


def _of_ranks(ranks: list[Report]) -> Report:
    """Return what the ranks of a run say together: the range of each figure, and all of the rank with the most."""
    first = next(iter(ranks[0].figures), "")
    by_most = sorted(ranks, key=lambda one: -one.figures.get(first, 0))
    worst, middle = by_most[0], by_most[len(ranks) // 2]
    rows = []
    figures = {}
    for name in ranks[0].figures:
        values = sorted((one.figures.get(name, 0), -(one.rank or 0)) for one in ranks)
        figures[name] = values[-1][0]
        of = f"rank {-values[-1][1]}" if values[0][0] < values[-1][0] else "all"
        rows.append((name, mib(values[0][0]), mib(values[len(values) // 2][0]), mib(figures[name]), of))
    table = Table(f"{len(ranks)} ranks", ("at the most", "least", "median", "most", "on"), rows)
    timelines = list(worst.timelines)
    for timeline in timelines:
        timeline.title += ", the most of all ranks"
    if middle.figures.get(first, 0) < 0.99 * worst.figures.get(first, 0):
        for timeline in middle.timelines:
            timeline.title += ", the median of all ranks"
        timelines += middle.timelines
    # What several ranks are told is much the same, with other figures.
    advice: dict[str, list[str]] = {}
    for one in by_most:
        for text in one.advice:
            advice.setdefault(re.sub(r"[\d.]+ ?([KM]i)?B?", "", text), []).append(text)
    told = [
        texts[0] + (f" (Rank {worst.rank}; {len(texts) - 1} other ranks: the like.)" if len(texts) > 1 else "")
        for texts in advice.values()
    ]
    folder, name, _ = ranks[0].run or ("", "", None)
    what = f"{len(ranks)} ranks; what follows the first table is rank {worst.rank}'s, which has the most"
    title = printable(f"{Path(folder) / name}, {len(ranks)} ranks")
    return Report(title, [what, *worst.summary], [table, *worst.tables], told, timelines, figures)


# --- recordings ---------------------------------------------------------------------------------------------------


def _of_recording(recording: Recording) -> Report:
    samples = recording.samples
    duration = samples[-1]["t"] if samples else 0.0
    rank = (
        ""
        if recording.rank is None
        else f", rank {recording.rank}" + (f" of {recording.world}" if recording.world else "")
    )
    last: dict[int, list[Any]] = {}
    most: dict[int, int] = {}
    series: dict[int, Series] = {}
    changed: set[int] = set()  # since when the last point of a band may tell a peak, and no longer what is held
    for sample in samples:
        for site in sample["sites"]:
            number = site[0]
            last[number] = site
            most[number] = max(most.get(number, 0), site[2])
            series.setdefault(number, [(0.0, 0)]).append((sample["t"], site[2]))
            changed.add(number)
        for number in [number for number in changed if series[number][-1][0] != sample["t"]]:
            if series[number][-1][1] != last[number][1]:
                series[number].append((sample["t"], last[number][1]))
            changed.discard(number)
    rows = []
    for number in sorted(last, key=lambda number: -most[number])[:ROWS]:
        named = recording.sites.get(number, {"op": "?", "group": "", "at": "?"})
        _, nbytes, _, _, count, total, longest = last[number]
        told = (mib(most[number]), mib(nbytes), str(count), mib(total), _time(longest))
        rows.append((named["op"], *told, named["group"], named["at"]))
    columns = ("call", "most", "at the end", "calls", "in all", "held longest", "group", "call site")
    names = ("active", "reserved", "unusable", "arena")
    lines = {name: [(one["t"], one[name]) for one in samples if name in one] for name in names}
    lines = {name: points for name, points in lines.items() if points}
    peak = max((one["peak"] for one in samples), default=0)
    summary = [f"{len(samples)} samples in {duration:.1f} s; collectives held {mib(peak)} at the most"]
    for name, points in lines.items():
        summary.append(
            f"{'freed but unusable' if name == 'unusable' else name}: {mib(max(v for _, v in points))} at the most"
        )
    tables = [Table("held by collectives, by call site", columns, rows)]
    advice = []
    by_site: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in recording.left or []:
        if one["state"] == "in flight":
            by_site.setdefault((one["op"], one["at"]), []).append(one)
    by_bytes = sorted(by_site.items(), key=lambda item: -sum(one["nbytes"] for one in item[1]))
    for (op, at), ones in by_bytes[:ROWS]:
        nbytes, longest = sum(one["nbytes"] for one in ones), max(one["seconds"] for one in ones)
        advice.append(
            f"{len(ones)} {op} launched at {at} were never waited for: at the end {mib(nbytes)} were still held for "
            f"them, the first for {_time(longest)}. Call wait() on their handles."
        )
    if len(by_bytes) > ROWS:
        advice.append(f"The same goes for {len(by_bytes) - ROWS} other lines.")
    unusable = max((value for _, value in lines.get("unusable", [])), default=0)
    if unusable >= WORTH:
        active = max(value for _, value in lines["active"])
        advice.append(
            f"Up to {mib(unusable)} of {mib(active)} active were freed but unusable, because record_stream was called "
            "for them: use safecomm.avoid_record_streams(). A memory snapshot of torch tells the lines."
        )
    by_most = sorted(series, key=lambda number: -most[number])
    bands: dict[str, Series] = {}
    for number in by_most[:ROWS]:
        bands[_label(recording, number)] = _summed([bands.get(_label(recording, number), []), series[number]])
    if by_most[ROWS:]:
        bands[OTHERS] = _summed([series[number] for number in by_most[ROWS:]])
    figures = {"held by collectives": peak} | {
        "freed but unusable" if name == "unusable" else name: max(value for _, value in points)
        for name, points in lines.items()
    }
    timeline = Timeline(
        printable(f"{recording.path.name}{rank}"),
        duration,
        {name: _thinned(points) for name, points in lines.items()},
        {name: _thinned(points) for name, points in bands.items()},
        holders={name: max(value for _, value in points) for name, points in bands.items()},
        caption=_caption(f"{duration:.1f} s", figures),
    )
    title = printable(f"{recording.path}{rank}")
    run = None if recording.rank is None else _run_of(recording.path, recording.world)
    return Report(title, summary, tables, advice, [timeline], figures, run, recording.rank)


def _caption(what: str, figures: dict[str, int]) -> str:
    return f"{what}; at the most " + ", ".join(f"{name} {mib(value)}" for name, value in figures.items())


def _summed(all_of_them: Iterable[Series]) -> Series:
    """Return the sum of several series at each moment at which one of them changes."""
    changes: dict[float, int] = {}
    for points in all_of_them:
        before = 0
        for time, value in points:
            changes[time] = changes.get(time, 0) + value - before
            before = value
    times = sorted(changes)
    return list(zip(times, itertools.accumulate(changes[time] for time in times), strict=True))


def _label(recording: Recording, number: int) -> str:
    site = recording.sites.get(number, {"op": "?", "at": "?"})
    return f"{site['op']} at {site['at']}"


# --- snapshots ----------------------------------------------------------------------------------------------------


def _of_snapshot(snapshot: Snapshot) -> Report:
    stacks = snapshot.stacks
    summary: list[str] = []
    tables: list[Table] = []
    advice: list[str] = []
    timelines = []
    figures: dict[str, int] = {}
    for trace in snapshot.traces:
        where = f"device {trace.device}" if len(snapshot.traces) > 1 else ""
        if trace.blocks:
            active = [one + two for one, two in zip(trace.allocated, trace.unusable, strict=True)]
            peak, unusable = max(active), max(trace.unusable)
            summary.append(
                f"{where or 'device 0'}: {len(trace.blocks)} allocations in {trace.duration:.3f} s; active {mib(peak)} "
                f"at the most, freed but unusable {mib(unusable)}, reserved {mib(max(trace.reserved))}"
            )
            by_line, stripes = _by_line(trace, stacks), waiting(trace, stacks)
            tables += [_holders(by_line, where), _stripes(trace, stripes, where)]
            advice += [*_advice_on_stripes(trace, stripes), *_advice_on_gathers(snapshot, trace, stacks)]
            of_device = {"active": peak, "freed but unusable": unusable, "reserved": max(trace.reserved)}
            caption = _caption(f"{len(trace.blocks)} allocations in {_time(trace.duration)}", of_device)
            holders = {line.site: line.most for line in by_line}
            timelines.append(_timeline(snapshot, trace, active, where, holders, caption))
            if not figures or peak > figures["active"]:
                figures = of_device
    if not any(len(trace.times) > 1 for trace in snapshot.traces):
        summary.append(
            "no history: call torch.cuda.memory._record_memory_history() before what is to be looked at, "
            "for the lines of the program and the time"
        )
    tables.append(_fragmentation(snapshot))
    advice += _advice_on_fragmentation(snapshot)
    rank = _rank_of(snapshot.path.name)
    run = None if rank is None else _run_of(snapshot.path, None)
    return Report(printable(str(snapshot.path)), summary, tables, advice, timelines, figures, run, rank)


def _titled(title: str, where: str) -> str:
    return f"{title}, {where}" if where else title


@dataclass
class _Line:
    """The allocations of one line of the program."""

    site: str
    count: int = 0
    now: int = 0
    most: int = 0
    total: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    longest_of: int = 0
    labels: dict[str, None] = field(default_factory=dict)


def _in_order(changes: list[tuple[float, int, _Line]]) -> None:
    """Follow what lines have at each moment. At one moment what is given back goes first."""
    changes.sort(key=itemgetter(0, 1))
    for _, nbytes, line in changes:
        line.now += nbytes
        if line.now > line.most:
            line.most = line.now


def _by_line(trace: Trace, stacks: Stacks) -> list[_Line]:
    """Return what each line allocated, from the allocation until the allocator could give it out again."""
    lines: dict[str, _Line] = {}
    changes: list[tuple[float, int, _Line]] = []
    for block in trace.blocks:
        site = stacks.sites[block.made_at]
        line = lines.get(site)
        if line is None:
            line = lines[site] = _Line(site)
        end = trace.duration if block.completed is None else block.completed
        line.count += 1
        line.total += block.size
        if end - block.made > line.longest:
            line.longest = end - block.made
        if block.label:
            line.labels[block.label] = None
        changes.append((block.made, block.size, line))
        if block.completed is not None:
            changes.append((block.completed, -block.size, line))
    _in_order(changes)
    return sorted(lines.values(), key=lambda line: -line.most)


def _holders(by_line: list[_Line], where: str) -> Table:
    rows = []
    folded = _folded([((line.site,), line) for line in by_line])[:ROWS]
    for (site,), line, count in folded:
        rows.append((_each(line, count), str(line.count), mib(line.total), _time(line.longest), site))
    columns = ("most at a time", "allocations", "in all", "held longest", "allocated at")
    return _labelled(Table(_titled("top holders", where), columns, rows), [line for _, line, _ in folded])


_Sited = tuple[tuple[str, ...], _Line]


def _folded(lines: Iterable[_Sited]) -> list[tuple[tuple[str, ...], _Line, int]]:
    """Return ``lines`` with their number; those are one that differ in digits of their files only, as 32 layers' do."""
    alike: dict[Any, list[_Sited]] = {}
    for sites, line in lines:
        pattern = tuple(_DIGITS.sub("*", site) for site in sites)
        alike.setdefault((pattern, line.most, line.count), []).append((sites, line))
    folded = []
    for same in alike.values():
        sites = tuple(_common([sites[i] for sites, _ in same]) for i in range(len(same[0][0])))
        line = max((line for _, line in same), key=lambda line: line.longest)
        folded.append((sites, line, len(same)))
    return folded


def _common(sites: list[str]) -> str:
    """Return texts that differ in digits only as one, with ``*`` where they differ."""
    pieces = zip(*(re.split(r"(\d+)", site) for site in sites), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def _each(line: _Line, count: int) -> str:
    return mib(line.most) if count == 1 else f"{count} x {mib(line.most)}"


def _labelled(table: Table, lines: Sequence[_Line]) -> Table:
    """Add to a table of ``lines`` what the program has attached to their blocks, if it has to any."""
    if any(line.labels for line in lines):
        table.columns += ("user_metadata",)
        table.rows = [(*row, _labels(line)) for row, line in zip(table.rows, lines, strict=True)]
    return table


def _labels(line: _Line) -> str:
    shown = list(itertools.islice(line.labels, 3))
    more = len(line.labels) - len(shown)
    return ", ".join([*shown, *([f"and {more} others"] if more else [])])


def waiting(trace: Trace, stacks: Stacks) -> list[tuple[str, str, _Line]]:
    """Return what was freed but unusable, by the lines that allocated and that freed it, the most first."""
    lines: dict[tuple[str, str], _Line] = {}
    changes: list[tuple[float, int, _Line]] = []
    for block in trace.blocks:
        if block.requested is None:
            continue
        end = trace.duration if block.completed is None else block.completed
        if block.completed == block.requested:
            continue
        key = stacks.sites[block.made_at], stacks.sites[block.freed_at]
        line = lines.setdefault(key, _Line(key[0]))
        line.count += 1
        if block.label:
            line.labels[block.label] = None
        if end - block.requested >= line.longest:
            line.longest, line.longest_of = end - block.requested, block.size
        line.seconds += (end - block.requested) * block.size
        changes.append((block.requested, block.size, line))
        if block.completed is not None:
            changes.append((block.completed, -block.size, line))
    _in_order(changes)
    return sorted(((*key, line) for key, line in lines.items()), key=lambda one: -one[2].most)


def _stripes(trace: Trace, stripes: list[tuple[str, str, _Line]], where: str) -> Table:
    rows = []
    folded = _folded([((made, freed), line) for made, freed, line in stripes])[:ROWS]
    for (made, freed), line, count in folded:
        mean = line.seconds / max(trace.duration, 1e-9)
        rows.append((_each(line, count), mib(mean), str(line.count), _time(line.longest), made, freed))
    columns = ("most at a time", "on average", "blocks", "waited longest", "allocated at", "freed at")
    return _labelled(Table(_titled("freed but unusable", where), columns, rows), [line for _, line, _ in folded])


def _advice_on_stripes(trace: Trace, found: list[tuple[str, str, _Line]]) -> list[str]:
    most = max(trace.unusable)
    if not found or most < WORTH:
        return []
    made, _, line = found[0]
    active = max(one + two for one, two in zip(trace.allocated, trace.unusable, strict=True))
    needed = max(trace.allocated)
    ends = sum(block.requested is not None and block.completed is None for block in trace.blocks)
    count = sum(line.count for _, _, line in found)
    return [
        f"{count} blocks were freed but unusable, {mib(most)} at the most: record_stream was called for them, so they "
        f"waited until the host saw another stream pass. A block of {mib(line.longest_of)} allocated at {made} waited "
        f"{_time(line.longest)}. With safecomm.avoid_record_streams() the peak would be near {mib(needed)}, and it is "
        f"{mib(active)}."
        + (f" {ends} of them were still waiting at the end, as inside a CUDA graph capture." if ends else "")
    ]


def _advice_on_gathers(snapshot: Snapshot, trace: Trace, stacks: Stacks) -> list[str]:
    """Communication buffers of many sizes that lie in segments which are split."""
    named = functools.cache(lambda text: bool(_GATHERS.search(text.rsplit(" in ", 1)[-1])))
    gathers = {number for number, stack in enumerate(stacks.stacks) if any(map(named, stack))}
    buffers = [block for block in trace.blocks if block.made_at in gathers]
    sizes = {block.size for block in buffers}
    changes: list[tuple[float, int, _Line]] = []
    all_of_them = _Line("")
    for block in buffers:
        changes.append((block.made, block.size, all_of_them))
        if block.completed is not None:
            changes.append((block.completed, -block.size, all_of_them))
    _in_order(changes)
    addresses = sorted(block.address for block in buffers)
    split = [
        segment
        for segment in snapshot.segments
        if segment.blocks > 1
        and segment.free
        and bisect_left(addresses, segment.address) < bisect_left(addresses, segment.address + segment.size)
    ]
    lost = sum(segment.free for segment in split)
    if len(sizes) < 4 or not split or lost < WORTH:
        return []
    arena = -(-all_of_them.most // (2 * MIB)) * 2
    return [
        f"{len(buffers)} buffers of collectives, of {len(sizes)} different sizes, split {len(split)} segments, in "
        f"which {mib(lost)} are free in pieces: an arena of {arena} MiB would hold them, which is what they have at "
        "the most at a time."
    ]


def _fragmentation(snapshot: Snapshot) -> Table:
    by_stream: dict[int, list[Any]] = {}
    for segment in snapshot.segments:
        by_stream.setdefault(segment.stream, []).append(segment)
    rows = []
    for stream, segments in sorted(by_stream.items(), key=lambda item: -sum(one.size for one in item[1])):
        rows.append(_row(f"stream {stream:#x}" if stream else "default stream", segments))
        by_size: dict[int, list[Any]] = {}
        for one in segments:
            by_size.setdefault(one.size, []).append(one)
        if len(by_size) > 1:
            worst = sorted(by_size.items(), key=lambda item: -sum(one.free for one in item[1]))[: ROWS // 3]
            rows.extend(_row(f"  in {mib(size)}", ones) for size, ones in worst if any(one.free for one in ones))
    columns = (
        *("where", "segments", "reserved", "active", "awaiting free", "free", "largest free block", "blocks"),
        "free in percent",
    )
    note = (
        "of each stream, the sizes of segments that have free memory, the most first"
        if len(rows) > len(by_stream)
        else ""
    )
    return Table("fragmentation, at the moment of the snapshot", columns, rows, note)


def _row(name: str, segments: list[Any]) -> tuple[str, ...]:
    def total(what: str) -> int:
        return sum(getattr(one, what) for one in segments)

    figures = (mib(total(what)) for what in ("size", "active", "awaiting", "free"))
    largest = mib(max(one.largest_free for one in segments))
    share = f"{100 * total('free') / max(total('size'), 1):.0f} %"
    return (name, str(len(segments)), *figures, largest, str(total("blocks")), share)


def _advice_on_fragmentation(snapshot: Snapshot) -> list[str]:
    reserved = sum(one.size for one in snapshot.segments)
    split = [one for one in snapshot.segments if one.active and one.free]
    free = sum(one.free for one in split)
    largest = max((one.largest_free for one in snapshot.segments), default=0)
    if not reserved or free < max(64 * MIB, reserved // 5) or any(one.expandable for one in snapshot.segments):
        return []
    return [
        f"{mib(free)} of {mib(reserved)} reserved are free in pieces between blocks in use, in {len(split)} segments, "
        f"and no free block is larger than {mib(largest)}: allocate buffers of one size, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where no CUDA graph or registered buffer needs the addresses."
    ]


def _timeline(
    snapshot: Snapshot, trace: Trace, active: list[int], where: str, holders: dict[str, int], caption: str
) -> Timeline:
    stacks = snapshot.stacks
    lines = {"active": active, "unusable": trace.unusable, "reserved": trace.reserved}
    drawn = [
        Drawn(one.made, one.requested, one.completed, one.size, one.made_at, one.freed_at, one.label)
        for one in sorted(trace.blocks, key=lambda block: block.made)
    ]
    used = sorted({0} | {one.stack for one in drawn} | {one.freed_by for one in drawn})
    renumbered = {old: new for new, old in enumerate(used)}
    for one in drawn:
        one.stack, one.freed_by = renumbered[one.stack], renumbered[one.freed_by]
    return Timeline(
        printable(_titled(snapshot.path.name, where)),
        trace.duration,
        {name: _thinned(list(zip(trace.times, values, strict=True)), trace.duration) for name, values in lines.items()},
        {},
        drawn,
        [stacks.stacks[number] or (UNKNOWN,) for number in used],
        [stacks.sites[number] for number in used],
        holders,
        caption,
    )


def _thinned(points: Series, end: float | None = None) -> Series:
    """Return about ``POINTS`` of them, of each piece the largest; and the last again at ``end``."""
    kept = points
    if len(points) > POINTS:
        kept = []
        width = (points[-1][0] - points[0][0]) / POINTS or 1.0
        place = 0
        while place < len(points):
            edge = points[place][0] + width
            after = max(bisect_left(points, (edge,), place), place + 1)
            kept.append(max(points[place:after], key=itemgetter(1)))
            place = after
    return kept if end is None else [*kept, (end, points[-1][1])]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
