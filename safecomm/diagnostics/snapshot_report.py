"""What a memory snapshot of torch says: who held memory, who kept it from others, and how it lies in pieces."""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.report import ROWS, WORTH, Report, caption
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
            told = caption(f"{len(trace.blocks)} allocations in {span(trace.duration)}", of_device)
            holders = {line.site: line.most for line in by_line}
            timelines.append(_timeline(snapshot, trace, active, where, holders, told))
            if not figures or peak > figures["active"]:
                figures = of_device
    if not any(len(trace.times) > 1 for trace in snapshot.traces):
        summary.append(
            "no history: call torch.cuda.memory._record_memory_history() before what is to be looked at, "
            "for the lines of the program and the time"
        )
    tables.append(_fragmentation(snapshot))
    advice += _advice_on_fragmentation(snapshot)
    return Report(printable(str(snapshot.path)), summary, tables, advice, timelines, figures)


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
        rows.append((_each(line, count), str(line.count), mib(line.total), span(line.longest), site))
    columns = ("most at a time", "allocations", "in all", "held longest", "allocated at")
    return _labelled(Table(_titled("top holders", where), columns, rows), [line for _, line, _ in folded])


_Sited = tuple[tuple[str, ...], _Line]


def _folded(lines: Iterable[_Sited]) -> list[tuple[tuple[str, ...], _Line, int]]:
    """Return ``lines`` with their number; those are one that differ in digits of their files only, as 32 layers' do."""
    alike: dict[object, list[_Sited]] = {}
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
        rows.append((_each(line, count), mib(mean), str(line.count), span(line.longest), made, freed))
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
        f"{span(line.longest)}. With safecomm.avoid_record_streams() the peak would be near {mib(needed)}, and it is "
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
    by_stream: dict[int, list[Segment]] = {}
    for segment in snapshot.segments:
        by_stream.setdefault(segment.stream, []).append(segment)
    rows = []
    for stream, segments in sorted(by_stream.items(), key=lambda item: -sum(one.size for one in item[1])):
        rows.append(_row(f"stream {stream:#x}" if stream else "default stream", segments))
        by_size: dict[int, list[Segment]] = {}
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


def _row(name: str, segments: list[Segment]) -> tuple[str, ...]:
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
        {name: thinned(list(zip(trace.times, values, strict=True)), trace.duration) for name, values in lines.items()},
        {},
        drawn,
        [stacks.stacks[number] or (UNKNOWN,) for number in used],
        [stacks.sites[number] for number in used],
        holders,
        caption,
    )
