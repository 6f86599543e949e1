"""What a recording or a snapshot says: tables, a timeline, and advice, each piece with the figure that it rests on."""

from __future__ import annotations

import functools
import itertools
import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.record import Recording, mib, read_recording
from safecomm.diagnostics.snapshot import UNKNOWN, Block, Snapshot, Stacks, Trace, read_snapshot

MIB = 1 << 20
ROWS = 15
"""Rows of a table."""
DRAWN = 2000
"""Blocks of a timeline that are drawn one by one; the lines count all."""
POINTS = 1500
"""Points of a line."""
WORTH = MIB
"""Bytes from which on something is worth advice."""

_GATHERS = re.compile(r"all_?gather|reduce_?scatter|all_?to_?all|_coalesc", re.IGNORECASE)

Series = list[tuple[float, int]]


@dataclass
class Table:
    """A table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.title}: none"
        cells: list[tuple[str, ...]] = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *(f"  {line}" for line in lines), *([f"  {self.note}"] if self.note else [])])


@dataclass
class Drawn:
    """One block of the timeline: a rectangle, hatched from when it was freed."""

    start: float
    freed: float | None
    """When the program gave it back; None if it had not at the end."""
    end: float
    bottom: int
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
    """Such as ``"active"``, ``"reserved"``."""
    bands: dict[str, Series] = field(default_factory=dict)
    """What collectives held, by call site, to be stacked."""
    blocks: list[Drawn] = field(default_factory=list)
    stacks: list[tuple[str, ...]] = field(default_factory=list)
    hidden: int = 0
    """Blocks that are not drawn, because there are so many."""


@dataclass
class Report:
    """What one file says."""

    title: str
    summary: list[str]
    tables: list[Table]
    advice: list[str]
    timelines: list[Timeline]

    def __str__(self) -> str:
        parts = [f"{self.title}\n{'=' * len(self.title)}", "\n".join(self.summary), *map(str, self.tables)]
        advice = [f"  {number}. {text}" for number, text in enumerate(self.advice, 1)] or ["  nothing stands out"]
        return "\n\n".join([*parts, "\n".join(["advice", *advice])])


# --- files --------------------------------------------------------------------------------------------------------


def make_reports(paths: Sequence[Path], progress: Callable[[str], None] = lambda line: None) -> list[Report]:
    """Read files of ``record_memory()`` and memory snapshots of torch, and return what each says.

    A recording may be named as it was to ``record_memory``: then the files of all its ranks are read, and each must be
    there. Nothing that is in a file is executed.

    Raises
    ------
    ValueError
        If a file is missing, can't be read, or is neither; or if ranks are missing.
    """
    found: list[Recording | Snapshot] = []
    for path in paths:
        found.extend(_read(one, progress) for one in _ranks_of(path))
    _check_ranks([one for one in found if isinstance(one, Recording)])
    return [_of_recording(one) if isinstance(one, Recording) else _of_snapshot(one) for one in found]


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


def _read(path: Path, progress: Callable[[str], None]) -> Recording | Snapshot:
    try:
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not an ordinary file")  # a pipe can be read only once, and can wait for ever
        with path.open("rb") as file:
            first = file.read(1)
        if first == b"\x80":

            def told(done: int, size: int) -> None:
                progress(f"reading {path}: {done // MIB} of {size // MIB} MiB")

            snapshot = read_snapshot(path, told)
            progress(f"reading {path}: done, {sum(len(trace.blocks) for trace in snapshot.traces)} allocations")
            return snapshot
        if first == b"{":
            return read_recording(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    if not first:
        raise ValueError(f"{path} is empty")
    raise ValueError(f"{path} is neither a recording of safecomm nor a memory snapshot of torch")


def _check_ranks(recordings: list[Recording]) -> None:
    """Raise ValueError if several ranks of one run are there, but not all."""
    runs: dict[tuple[Path, str, int | None], set[int]] = {}
    for one in recordings:
        if one.rank is not None:
            base = re.sub(r"\.(rank|pid)\d+", "", one.path.name)
            runs.setdefault((one.path.parent, base, one.world), set()).add(one.rank)
    for (_, base, world), ranks in runs.items():
        missing = (world or 0) - len(ranks)  # a rank is less than its world, or the file is refused
        if len(ranks) > 1 and missing > 0:
            first = itertools.islice((rank for rank in range(world or 0) if rank not in ranks), 10)
            raise ValueError(
                f"{base}: of {world} ranks, {missing} are missing ({', '.join(map(str, first))}). "
                "Give the files of all, or of one."
            )


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
    bands: dict[int, Series] = {}
    changed: set[int] = set()  # since when the last point of a band may tell a peak, and no longer what is held
    for sample in samples:
        for site in sample["sites"]:
            number = site[0]
            last[number] = site
            most[number] = max(most.get(number, 0), site[2])
            bands.setdefault(number, [(0.0, 0)]).append((sample["t"], site[2]))
            changed.add(number)
        for number in [number for number in changed if bands[number][-1][0] != sample["t"]]:
            if bands[number][-1][1] != last[number][1]:
                bands[number].append((sample["t"], last[number][1]))
            changed.discard(number)
    rows = []
    for number in sorted(last, key=lambda number: -most[number])[:ROWS]:
        named = recording.sites.get(number, {"op": "?", "group": "", "at": "?"})
        _, nbytes, _, _, count, total, longest = last[number]
        figures = (mib(most[number]), mib(nbytes), str(count), mib(total), _time(longest))
        rows.append((named["op"], *figures, named["group"], named["at"]))
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
    timeline = Timeline(
        printable(f"{recording.path.name}{rank}"),
        duration,
        {name: _thinned(points) for name, points in lines.items()},
        {_label(recording, number): _thinned(bands[number]) for number in sorted(bands, key=lambda n: -most[n])[:ROWS]},
    )
    return Report(printable(f"{recording.path}{rank}"), summary, tables, advice, [timeline])


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
    for trace in snapshot.traces:
        where = f"device {trace.device}" if len(snapshot.traces) > 1 else ""
        if trace.blocks:
            active = [one + two for one, two in zip(trace.allocated, trace.unusable, strict=True)]
            peak, unusable = max(active), max(trace.unusable)
            summary.append(
                f"{where or 'device 0'}: {len(trace.blocks)} allocations in {trace.duration:.3f} s; active {mib(peak)} "
                f"at the most, freed but unusable {mib(unusable)}, reserved {mib(max(trace.reserved))}"
            )
            tables += [_holders(trace, stacks, where), _stripes(trace, stacks, where)]
            advice += [*_advice_on_stripes(trace, stacks), *_advice_on_gathers(snapshot, trace, stacks)]
            timelines.append(_timeline(snapshot, trace, stacks, where))
    if not any(len(trace.times) > 1 for trace in snapshot.traces):
        summary.append(
            "no history: call torch.cuda.memory._record_memory_history() before what is to be looked at, "
            "for the lines of the program and the time"
        )
    tables.append(_fragmentation(snapshot))
    advice += _advice_on_fragmentation(snapshot)
    return Report(printable(str(snapshot.path)), summary, tables, advice, timelines)


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
    stack: int = 0
    longest_of: int = 0
    labels: dict[str, None] = field(default_factory=dict)


def _in_order(changes: list[tuple[float, int, _Line]]) -> None:
    """Follow what lines have at each moment. At one moment what is given back goes first."""
    changes.sort(key=lambda change: (change[0], change[1]))
    for _, nbytes, line in changes:
        line.now += nbytes
        line.most = max(line.most, line.now)


def _by_line(trace: Trace, stacks: Stacks) -> list[_Line]:
    """Return what each line allocated, from the allocation until the allocator could give it out again."""
    lines: dict[str, _Line] = {}
    changes: list[tuple[float, int, _Line]] = []
    for block in trace.blocks:
        number = stacks.number(block.made_at)
        line = lines.setdefault(stacks.sites[number], _Line(stacks.sites[number], stack=number))
        end = trace.duration if block.completed is None else block.completed
        line.count += 1
        line.total += block.size
        line.longest = max(line.longest, end - block.made)
        if block.label:
            line.labels[block.label] = None
        changes.append((block.made, block.size, line))
        if block.completed is not None:
            changes.append((block.completed, -block.size, line))
    _in_order(changes)
    return sorted(lines.values(), key=lambda line: -line.most)


def _holders(trace: Trace, stacks: Stacks, where: str) -> Table:
    lines = _by_line(trace, stacks)[:ROWS]
    rows = [(mib(line.most), str(line.count), mib(line.total), _time(line.longest), line.site) for line in lines]
    columns = ("most at a time", "allocations", "in all", "held longest", "allocated at")
    return _labelled(Table(_titled("top holders", where), columns, rows), lines)


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
        made, freed = stacks.number(block.made_at), stacks.number(block.freed_at)
        key = stacks.sites[made], stacks.sites[freed]
        line = lines.setdefault(key, _Line(key[0], stack=freed))
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


def _stripes(trace: Trace, stacks: Stacks, where: str) -> Table:
    rows = []
    found = waiting(trace, stacks)[:ROWS]
    for made, freed, line in found:
        mean = line.seconds / max(trace.duration, 1e-9)
        rows.append((mib(line.most), mib(mean), str(line.count), _time(line.longest), made, freed))
    columns = ("most at a time", "on average", "blocks", "waited longest", "allocated at", "freed at")
    return _labelled(Table(_titled("freed but unusable", where), columns, rows), [line for _, _, line in found])


def _advice_on_stripes(trace: Trace, stacks: Stacks) -> list[str]:
    found = waiting(trace, stacks)
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
    numbers = [stacks.number(block.made_at) for block in trace.blocks]
    named = functools.cache(lambda text: bool(_GATHERS.search(text.rsplit(" in ", 1)[-1])))
    gathers = {number for number, stack in enumerate(stacks.stacks) if any(map(named, stack))}
    buffers = [block for block, number in zip(trace.blocks, numbers, strict=True) if number in gathers]
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
        if len(segments) > 1:
            worst = sorted(segments, key=lambda one: -one.free)[: ROWS // 3]
            rows.extend(_row(f"  segment {segment.address:#x}", [segment]) for segment in worst)
    columns = ("where", "segments", "reserved", "active", "awaiting free", "free", "largest free block", "blocks")
    note = "of each stream, the segments with the most free memory" if len(rows) > len(by_stream) else ""
    return Table("fragmentation, at the moment of the snapshot", columns, rows, note)


def _row(name: str, segments: list[Any]) -> tuple[str, ...]:
    def total(what: str) -> int:
        return sum(getattr(one, what) for one in segments)

    figures = (mib(total(what)) for what in ("size", "active", "awaiting", "free"))
    largest = mib(max(one.largest_free for one in segments))
    return (name, str(len(segments)), *figures, largest, str(total("blocks")))


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


def _timeline(snapshot: Snapshot, trace: Trace, stacks: Stacks, where: str) -> Timeline:
    def weight(block: Block) -> float:
        end = trace.duration if block.completed is None else block.completed
        waited = 0.0 if block.requested is None else end - block.requested
        return block.size * ((end - block.made) + 10 * waited)

    chosen = sorted(trace.blocks, key=weight, reverse=True)[:DRAWN]
    drawn = _placed(chosen, trace, stacks)
    active: Series = [
        (time, one + two) for time, one, two in zip(trace.times, trace.allocated, trace.unusable, strict=True)
    ]
    lines = {
        "active": active,
        "unusable": list(zip(trace.times, trace.unusable, strict=True)),
        "reserved": list(zip(trace.times, trace.reserved, strict=True)),
    }
    lines = {name: _thinned([*points, (trace.duration, points[-1][1])]) for name, points in lines.items()}
    used = sorted({0} | {one.stack for one in drawn} | {one.freed_by for one in drawn})
    renumbered = {old: new for new, old in enumerate(used)}
    for one in drawn:
        one.stack, one.freed_by = renumbered[one.stack], renumbered[one.freed_by]
    shown = [stacks.stacks[number] or (UNKNOWN,) for number in used]
    hidden = len(trace.blocks) - len(drawn)
    return Timeline(printable(_titled(snapshot.path.name, where)), trace.duration, lines, {}, drawn, shown, hidden)


def _placed(blocks: list[Block], trace: Trace, stacks: Stacks) -> list[Drawn]:
    """Stack the blocks: each gets the lowest place that is free for as long as it lives."""
    drawn = []
    placed: list[tuple[int, int, float]] = []  # bottom, top, end of those that may still be there, from below
    for block in sorted(blocks, key=lambda block: (block.made, -(block.completed or trace.duration))):
        placed = [one for one in placed if one[2] > block.made]
        bottom = 0
        for below, top, _ in placed:
            if below - bottom >= block.size:
                break
            bottom = max(bottom, top)
        end = trace.duration if block.completed is None else block.completed
        insort(placed, (bottom, bottom + block.size, end))
        freed_by = stacks.number(block.freed_at) if block.requested is not None else 0
        requested = block.requested
        made_by = stacks.number(block.made_at)
        drawn.append(Drawn(block.made, requested, end, bottom, block.size, made_by, freed_by, block.label))
    return drawn


def _thinned(points: Iterable[tuple[float, int]]) -> Series:
    """Return about ``POINTS`` of them, and of each piece the largest."""
    points = list(points)
    if len(points) <= POINTS:
        return points
    start, end = points[0][0], points[-1][0]
    width = (end - start) / POINTS or 1.0
    kept: Series = []
    for time, value in points:
        if kept and int((time - start) / width) == int((kept[-1][0] - start) / width):
            if value > kept[-1][1]:
                kept[-1] = (time, value)
        else:
            kept.append((time, value))
    return kept


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
