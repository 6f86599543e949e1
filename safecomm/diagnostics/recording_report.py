"""What a recording of ``record_memory()`` says: what collectives held, by call site."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.recording import Recording
from safecomm.diagnostics.report import ROWS, Advice, Report, Waiting, caption
from safecomm.diagnostics.table import Table
from safecomm.diagnostics.timeline import OTHERS, Series, Timeline, thinned
from safecomm.diagnostics.units import each, mib, span


def report_recording(recording: Recording) -> Report:
    """Return what ``recording`` says. Of its run it tells nothing: see ``files.py``."""
    samples = recording.samples
    duration = samples[-1]["t"] if samples else 0.0
    rank = (
        ""
        if recording.rank is None
        else f", rank {recording.rank}" + (f" of {recording.world}" if recording.world else "")
    )
    last: dict[int, list[Any]] = {}
    most: dict[int, int] = {}
    steps: dict[int, dict[float, int]] = {}
    before = 0.0
    for sample in samples:
        for site in sample["sites"]:
            number = site[0]
            last[number] = site
            most[number] = max(most.get(number, 0), site[2])
            # The peak was between two lines: it is drawn over all that time, and what is held from the later one on.
            steps.setdefault(number, {0.0: 0}).update({before: site[2], sample["t"]: site[1]})
        before = sample["t"]
    series = {number: list(points.items()) for number, points in steps.items()}
    rows = []
    for number in sorted(last, key=lambda number: -most[number])[:ROWS]:
        named = recording.sites.get(number, {"op": "?", "group": "", "at": "?"})
        _, nbytes, _, _, count, total, longest = last[number]
        told = (mib(most[number]), mib(nbytes), str(count), mib(total), span(longest))
        rows.append((named["op"], *told, named["group"], named["at"]))
    columns = ("call", "most", "at the end", "holds", "in all", "held longest", "group", "call site")
    names = ("active", "reserved", "unusable", "arena")
    lines = {name: [(one["t"], one[name]) for one in samples if name in one] for name in names}
    lines = {name: points for name, points in lines.items() if points}
    peak = max((one["peak"] for one in samples), default=0)
    summary = [f"{len(samples)} samples in {duration:.1f} s; collectives held {mib(peak)} at the most"]
    if recording.calls:
        why = "" if peak else ": they left nothing to hold, as synchronous calls on one stream do"
        summary.append(each(recording.calls) + why)
    for name, points in lines.items():
        summary.append(
            f"{'freed but unusable' if name == 'unusable' else name}: {mib(max(v for _, v in points))} at the most"
        )
    tables = [Table("held by collectives, by call site", columns, rows)]
    advice: list[Advice] = []
    by_site: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in recording.left or []:
        if one["state"] == "in flight":
            by_site.setdefault((one["op"], one["at"]), []).append(one)
    by_bytes = sorted(by_site.items(), key=lambda item: -sum(one["nbytes"] for one in item[1]))
    for (op, at), ones in by_bytes[:ROWS]:
        nbytes, longest = sum(one["nbytes"] for one in ones), max(one["seconds"] for one in ones)
        text = (
            f"{len(ones)} {op} launched at {at} were never waited for: at the end {mib(nbytes)} were still held for "
            f"them, the first for {span(longest)}. Call wait() on their handles."
        )
        advice.append(Advice(nbytes, text))
    if len(by_bytes) > ROWS:
        advice.append(Advice(0, f"The same goes for {len(by_bytes) - ROWS} other lines."))
    if any(one.get("unusable") for one in samples):
        both = [one for one in samples if "unusable" in one]
        waits = Waiting([one["active"] for one in both], [one["unusable"] for one in both])
        summary.append(waits.told())
        advice += waits.advised("Blocks were", "That is of samples: a memory snapshot of torch has all, and the lines.")
    by_most = sorted(series, key=lambda number: -most[number])
    bands: dict[str, Series] = {}
    for number in by_most[:ROWS]:
        bands[_label(recording, number)] = summed([bands.get(_label(recording, number), []), series[number]])
    if by_most[ROWS:]:
        bands[OTHERS] = summed([series[number] for number in by_most[ROWS:]])
    figures = {"held by collectives": peak} | {
        "freed but unusable" if name == "unusable" else name: max(value for _, value in points)
        for name, points in lines.items()
    }
    timeline = Timeline(
        printable(f"{recording.path.name}{rank}"),
        duration,
        {name: thinned(points) for name, points in lines.items()},
        {name: thinned(points) for name, points in bands.items()},
        holders={name: max(value for _, value in points) for name, points in bands.items()},
        caption=caption(f"{duration:.1f} s", figures),
        began=recording.started,
    )
    title = printable(f"{recording.path}{rank}")
    return Report(title, summary, tables, advice, [timeline], figures, program=printable(recording.program))


def summed(all_of_them: Iterable[Series]) -> Series:
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
