"""What a memory snapshot of torch says: who held memory, who kept it from others, and how it lies in pieces."""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.report import ROWS, WORTH, Advice, Report, Waiting, caption
from safecomm.diagnostics.snapshot import UNKNOWN, Segment, Snapshot, Stacks, Trace
from safecomm.diagnostics.table import Table
from safecomm.diagnostics.timeline import Drawn, Timeline, thinned
from safecomm.diagnostics.units import MIB, mib, span

_GATHERS = re.compile(r"all_?gather|reduce_?scatter|all_?to_?all|_coalesc", re.IGNORECASE)
_DIGITS = re.compile(r"\d+(?=.*:\d+ in )")


def report_snapshot(snapshot: Snapshot) -> Report:
    """Return what ``snapshot`` says. Of its run it tells nothing: see ``files.py``."""
    stacks = snapshot.stacks
    summary: list[str] = []
    tables: list[Table] = []
    advice: list[Advice] = []
    timelines = []
    figures: dict[str, int] = {}
    for trace in snapshot.traces:
        where = f"device {trace.device}" if len(snapshot.traces) > 1 else ""
        of_trace: list[Advice] = []
        if trace.blocks:
            waits = Waiting(trace.active, trace.unusable)
            peak, unusable, reserved = max(waits.active), max(trace.unusable), max(trace.reserved)
            of_device = {"active": peak, "freed but unusable": unusable, "reserved": reserved}
            summary.append(
                f"device {trace.device}: {len(trace.blocks)} allocations in {trace.duration:.3f} s; active {mib(peak)} "
                f"at the most, freed but unusable {mib(unusable)}, reserved {mib(reserved)}"
            )
            if unusable:
                summary.append(f"{where}: {waits.told()}" if where else waits.told())
            lines = lines_of(trace, stacks, waited=True)
            tables += [_holders(trace, stacks, where), _stripes(trace, lines, where)]
            of_trace += [*_advice_on_stripes(trace, waits, lines), *_advice_on_gathers(trace, stacks)]
            holders = {line.sites[0]: line.most for line in lines_of(trace, stacks, waited=False, folded=False)}
            shown = caption(f"{len(trace.blocks)} allocations in {span(trace.duration)}", of_device)
            timelines.append(_timeline(snapshot, trace, waits.active, where, holders, shown))
            if not figures or of_device["active"] > figures["active"]:
                figures = of_device
        tables.append(_fragmentation(trace.segments, where))
        of_trace += _advice_on_fragmentation(trace.segments)
        advice += [one._replace(text=f"{where}: {one.text}") if where else one for one in of_trace]
    if not any(len(trace.times) > 1 for trace in snapshot.traces):
        summary.append(
            "no history: call torch.cuda.memory._record_memory_history() before what you want to look at, "
            "for the lines of the program and the time"
        )
    program = printable(_program(snapshot))
    return Report(printable(str(snapshot.path)), summary, tables, advice, timelines, figures, program=program)


def _program(snapshot: Snapshot) -> str:
    """Return the file that most blocks were allocated from in the end: the script that ran."""
    counts = Counter(block.made_at for trace in snapshot.traces for block in trace.blocks)
    files: Counter[str] = Counter()
    for stack, count in counts.items():
        files[snapshot.stacks.programs[stack]] += count
    del files[""]
    return re.split(r"[/\\]", files.most_common(1)[0][0])[-1] if files else ""


def _titled(title: str, where: str) -> str:
    return f"{title}, {where}" if where else title


@dataclass
class _Line:
    """The blocks of one line of the program, or of lines that differ in digits of their files only."""

    found: dict[tuple[str, ...], None] = field(default_factory=dict)
    count: int = 0
    now: int = 0
    most: int = 0
    total: int = 0
    byte_seconds: float = 0.0
    longest: float = 0.0
    longest_of: int = 0
    labels: dict[str, None] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[str, ...]:
        """Where they were allocated, and freed: each one text, with ``*`` for the digits that differ."""
        return tuple(_common(list(dict.fromkeys(sites))) for sites in zip(*self.found, strict=True))


def _common(sites: list[str]) -> str:
    if len(sites) == 1:
        return sites[0]
    pieces = zip(*(re.split(r"(\d+)", site) for site in sites), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces) + f" ({len(sites)} files)"


def lines_of(trace: Trace, stacks: Stacks, *, waited: bool, folded: bool = True) -> list[_Line]:
    """Return the blocks by lines of the program, those with the most bytes at a time first.

    ``waited``: what they had freed, until it could be given out again, by the lines that allocated and freed it;
    else what was allocated, until it could be given out again. ``folded``: lines that differ in digits of their files
    only, as those of 32 layers do, are one.
    """
    pattern = functools.cache(lambda site: _DIGITS.sub("*", site) if folded else site)
    lines: dict[tuple[str, ...], _Line] = {}
    changes: list[tuple[int, int, _Line]] = []
    for block in trace.blocks:
        start = block.requested if waited else block.made
        if start is None or start == block.completed:
            continue
        sites = tuple(
            stacks.sites[place] for place in ((block.made_at, block.freed_at) if waited else (block.made_at,))
        )
        line = lines.setdefault(tuple(map(pattern, sites)), _Line())
        line.found[sites] = None
        line.count += 1
        line.total += block.size
        seconds = trace.seconds(start, block.completed)
        line.byte_seconds += seconds * block.size
        if seconds >= line.longest:
            line.longest, line.longest_of = seconds, block.size
        if block.label:
            line.labels[block.label] = None
        changes.append((start, block.size, line))
        if block.completed is not None:
            changes.append((block.completed, -block.size, line))
    _follow(changes)
    return sorted(lines.values(), key=lambda line: -line.most)


def _follow(changes: list[tuple[int, int, _Line]]) -> None:
    """Follow what lines have, from change to change of a history."""
    changes.sort(key=itemgetter(0, 1))
    for _, nbytes, line in changes:
        line.now += nbytes
        if line.now > line.most:
            line.most = line.now


def _holders(trace: Trace, stacks: Stacks, where: str) -> Table:
    lines = lines_of(trace, stacks, waited=False)[:ROWS]
    rows = [(mib(one.most), str(one.count), mib(one.total), span(one.longest), *one.sites) for one in lines]
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


def _stripes(trace: Trace, lines: list[_Line], where: str) -> Table:
    rows = []
    for one in lines[:ROWS]:
        mean = one.byte_seconds / max(trace.duration, 1e-9)
        rows.append((mib(one.most), mib(mean), str(one.count), span(one.longest), *one.sites))
    columns = ("most at a time", "on average", "blocks", "waited longest", "allocated at", "freed at")
    return _labelled(Table(_titled("freed but unusable", where), columns, rows), lines[:ROWS])


def _advice_on_stripes(trace: Trace, waits: Waiting, lines: list[_Line]) -> list[Advice]:
    if not lines:
        return []
    count = sum(line.count for line in lines)
    ends = sum(block.requested is not None and block.completed is None for block in trace.blocks)
    more = f"A block of {mib(lines[0].longest_of)} allocated at {lines[0].sites[0]} waited {span(lines[0].longest)}."
    if ends:
        more += f" {ends} of them were still waiting at the end, as inside a CUDA graph capture."
    return waits.advised(f"{count} blocks were", more)


def _advice_on_gathers(trace: Trace, stacks: Stacks) -> list[Advice]:
    """Communication buffers of many sizes that lie in segments which are split."""
    named = functools.cache(lambda text: bool(_GATHERS.search(text.rsplit(" in ", 1)[-1])))
    gathers = {number for number, stack in enumerate(stacks.stacks) if any(map(named, stack))}
    buffers = [block for block in trace.blocks if block.made_at in gathers]
    sizes = {block.size for block in buffers}
    of_them = _Line()
    _follow(
        [(block.made, block.size, of_them) for block in buffers]
        + [(block.completed, -block.size, of_them) for block in buffers if block.completed is not None]
    )
    places = sorted((block.address, block.size if block.completed is None else 0) for block in buffers)
    free = there = count = 0
    for one in trace.segments:
        inside = places[bisect_left(places, (one.address,)) : bisect_left(places, (one.address + one.size,))]
        if inside and one.blocks > 1 and one.free:
            count += 1
            free += one.free
            there += sum(nbytes for _, nbytes in inside)
    arena = -(-of_them.most // (2 * MIB)) * 2 * MIB
    gain = free + there - arena
    if len(sizes) < 4 or gain < WORTH:
        return []
    text = (
        f"{len(buffers)} buffers of collectives, of {len(sizes)} different sizes, split {count} segments, in "
        f"which {mib(free)} are free in pieces and {mib(there)} are theirs. An arena of {arena // MIB} MiB would hold "
        f"what they have at the most at a time, in place of that: at most {mib(gain)} to gain of what is reserved."
    )
    return [Advice(gain, text)]


def _fragmentation(segments: list[Segment], where: str) -> Table:
    by_stream: dict[int, list[Segment]] = {}
    for segment in segments:
        by_stream.setdefault(segment.stream, []).append(segment)
    rows = []
    for stream, ones in sorted(by_stream.items(), key=lambda item: -sum(one.size for one in item[1])):
        rows.append(_row(f"stream {stream:#x}" if stream else "default stream", ones))
        by_size: dict[int, list[Segment]] = {}
        for one in ones:
            by_size.setdefault(one.size, []).append(one)
        if len(by_size) > 1:
            worst = sorted(by_size.items(), key=lambda item: -sum(one.free for one in item[1]))[: ROWS // 3]
            rows.extend(_row(f"  in {mib(size)}", same) for size, same in worst if any(one.free for one in same))
    columns = (
        *("where", "segments", "reserved", "active", "awaiting free", "free", "largest free block", "blocks"),
        "free in percent",
    )
    note = (
        "of each stream, the sizes of segments that have free memory, the most first"
        if len(rows) > len(by_stream)
        else ""
    )
    return Table(_titled("fragmentation, at the moment of the snapshot", where), columns, rows, note)


def _row(name: str, segments: list[Segment]) -> tuple[str, ...]:
    def total(what: str) -> int:
        return sum(getattr(one, what) for one in segments)

    figures = (mib(total(what)) for what in ("size", "active", "awaiting", "free"))
    largest = mib(max(one.largest_free for one in segments))
    share = f"{100 * total('free') / max(total('size'), 1):.0f} %"
    return (name, str(len(segments)), *figures, largest, str(total("blocks")), share)


def _advice_on_fragmentation(segments: list[Segment]) -> list[Advice]:
    reserved = sum(one.size for one in segments)
    split = [one for one in segments if one.active and one.free]
    free = sum(one.free for one in split)
    largest = max((one.largest_free for one in segments), default=0)
    if not reserved or free < max(64 * MIB, reserved // 5) or any(one.expandable for one in segments):
        return []
    text = (
        f"{mib(free)} of {mib(reserved)} reserved are free in pieces between blocks in use, in {len(split)} segments, "
        f"and no free block is larger than {mib(largest)}: allocate buffers of one size, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where no CUDA graph or registered buffer needs the addresses."
    )
    return [Advice(free, text)]


def _timeline(
    snapshot: Snapshot, trace: Trace, active: Sequence[int], where: str, holders: dict[str, int], caption: str
) -> Timeline:
    stacks = snapshot.stacks
    lines = {"active": active, "unusable": trace.unusable, "reserved": trace.reserved}
    times = trace.times
    drawn = [
        Drawn(
            times[one.made],
            None if one.requested is None else times[one.requested],
            None if one.completed is None else times[one.completed],
            *(one.size, one.made_at, one.freed_at, one.label),
        )
        for one in sorted(trace.blocks, key=lambda block: block.made)
    ]
    used = sorted({0} | {one.stack for one in drawn} | {one.freed_by for one in drawn})
    renumbered = {old: new for new, old in enumerate(used)}
    for one in drawn:
        one.stack, one.freed_by = renumbered[one.stack], renumbered[one.freed_by]
    return Timeline(
        printable(_titled(snapshot.path.name, where)),
        trace.duration,
        {name: thinned(list(zip(trace.times, values, strict=True)), trace.duration) for name, values in lines.items()},
        {},
        drawn,
        [stacks.stacks[number] or (UNKNOWN,) for number in used],
        [stacks.sites[number] for number in used],
        holders,
        caption,
        trace.began,
    )
