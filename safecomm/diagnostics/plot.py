"""The timelines of reports as an image, by matplotlib."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safecomm.diagnostics import colours
from safecomm.diagnostics.report import Report
from safecomm.diagnostics.snapshot import NOWHERE, UNKNOWN
from safecomm.diagnostics.timeline import Drawn, Series, Timeline
from safecomm.diagnostics.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

DRAWN = 2000
"""Blocks that are drawn one by one; the others are the grey on top of them."""
STYLES: dict[str, dict[str, str]] = {
    "reserved": {"linestyle": ":"},
    "unusable": {"linestyle": "--", "color": colours.UNUSABLE},
    "arena": {"color": colours.LINES[3]},
}


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw the timelines of ``reports`` side by side into the image ``path``.

    Raises
    ------
    ValueError
        If matplotlib is not installed, there is nothing to draw, or ``path`` can't be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--png needs matplotlib: pip install 'safecomm[plot]'") from None
    timelines = [timeline for report in reports for timeline in report.timelines]
    if not timelines:
        raise ValueError("--png: there is no timeline to draw: the files have no history")
    rows, columns = -(-len(timelines) // 2), min(len(timelines), 2)
    figure = Figure(figsize=(8 * columns, 4.5 * rows), layout="constrained")
    numbers = colours.coloured(timelines)
    highest = max((value for one in timelines for points in one.lines.values() for _, value in points), default=0)
    for number, timeline in enumerate(timelines, 1):
        axes = figure.add_subplot(rows, columns, number)
        _draw(axes, timeline, numbers)
        axes.set_title(timeline.title, parse_math=False)  # a "$" in a name is one
        axes.set(xlabel="ms", ylabel="MiB", xlim=(0, timeline.duration * 1e3 or 1))
        if highest:
            axes.set_ylim(0, highest / MIB * 1.05)
        if axes.get_legend_handles_labels()[0]:
            for text in axes.legend(loc="upper left", fontsize="small").get_texts():
                text.set_parse_math(False)
    if any(timeline.blocks for timeline in timelines):
        entries = _legend(timelines, numbers)
        for text in figure.legend(handles=entries, loc="outside lower center", ncols=2, fontsize="small").get_texts():
            text.set_parse_math(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of letters that the font has not
            figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--png: {path} can't be written: {error}") from None


def _legend(timelines: Sequence[Timeline], numbers: dict[str, int]) -> list[Patch]:
    """Return what each colour means, of those that there are."""
    from matplotlib.patches import Patch

    sites = {site for one in timelines if one.blocks for site in one.holders}
    entries = [
        Patch(color=colours.LINES[number], label=re.sub(r"^.*[/\\]", "", site)[-60:])
        for site, number in numbers.items()
        if site in sites
    ]
    if len(sites) > len(entries):
        known = sites - numbers.keys() - {*NOWHERE}
        entries.append(Patch(color=colours.OTHER, label="other lines of the program" if known else UNKNOWN))
    if any(one.hatched for one in timelines):
        hatched: dict[str, Any] = {"facecolor": colours.UNUSABLE, "edgecolor": colours.HATCH, "hatch": "////"}
        entries.append(Patch(linewidth=0, label="freed, and not reusable yet", **hatched))
    if any(len(one.blocks) > DRAWN for one in timelines):
        entries.append(Patch(color=colours.SMALL, label="blocks too small to draw"))
    return entries


def _draw(axes: Axes, timeline: Timeline, numbers: dict[str, int]) -> None:
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection, PolyCollection

    def colour(site: str) -> str:
        return colours.LINES[numbers[site]] if site in numbers else colours.OTHER

    if timeline.blocks:
        active = timeline.lines["active"]
        times, values = [time * 1e3 for time, _ in active], [value / MIB for _, value in active]
        axes.fill_between(times, values, step="post", color=colours.SMALL, linewidth=0)
        drawn = _stacked(timeline)
        for hatched in (False, True):
            corners, fills = [], []
            for block, start, end, bottom in drawn:
                freed = min(max(end if block.freed is None else block.freed, start), end)
                left, right = (freed, end) if hatched else (start, freed)
                if right > left:
                    low, high = bottom / MIB, (bottom + block.nbytes) / MIB
                    corners.append([(left * 1e3, low), (right * 1e3, low), (right * 1e3, high), (left * 1e3, high)])
                    fills.append(colours.UNUSABLE if hatched else colour(timeline.sites[block.stack]))
            if corners:
                look: dict[str, Any] = (
                    {"hatch": "////", "edgecolors": colours.HATCH} if hatched else {"edgecolors": "face"}
                )
                axes.add_collection(PolyCollection(corners, facecolors=fills, linewidths=0, **look))
        # A thin line tells a block from the next, where there is room for one.
        least = max(values) / 100
        apart = [one for one in drawn if one[0].nbytes / MIB > least]
        lines = [[(start * 1e3, bottom / MIB), (end * 1e3, bottom / MIB)] for _, start, end, bottom in apart]
        axes.add_collection(LineCollection(lines, colors="white", linewidths=0.5))
    if timeline.bands:
        times = sorted({time for points in timeline.bands.values() for time, _ in points})
        heights = [[value / MIB for value in _stepped(points, times)] for points in timeline.bands.values()]
        fills = [colour(name) for name in timeline.bands]
        labels = [name[-60:] for name in timeline.bands]
        axes.stackplot([time * 1e3 for time in times], heights, labels=labels, colors=fills, step="post")
    for name, points in timeline.lines.items():
        if name == "unusable" and timeline.blocks:  # it is hatched
            continue
        times, values = [time * 1e3 for time, _ in points], [value / MIB for _, value in points]
        drawn_as = {"linestyle": "-", "color": rcParams["text.color"], **STYLES.get(name, {})}
        axes.step(times, values, where="post", label=name, linewidth=1, **drawn_as)


def _stacked(timeline: Timeline) -> list[tuple[Drawn, float, float, int]]:
    """Return pieces of the largest blocks, each with its start, end and bottom.

    The blocks are stacked in the order in which they were allocated, and the stack closes where one goes, as on a page.
    """

    def end_of(block: Drawn) -> float:
        return timeline.duration if block.end is None else block.end

    def area(block: Drawn) -> float:
        return (end_of(block) - block.start) * block.nbytes

    largest = sorted((block for block in timeline.blocks if area(block) > 0), key=area)[-DRAWN:]
    chosen = sorted(largest, key=lambda block: block.start)
    pieces: list[tuple[Drawn, float, float, int]] = []
    live: list[tuple[float, int, int, Drawn]] = []  # since when each is where it is, its bottom and number, from below
    goes = sorted(range(len(chosen)), key=lambda number: end_of(chosen[number]))
    place = 0

    def close(until: float) -> None:
        nonlocal place
        while place < len(goes) and end_of(chosen[goes[place]]) <= until:
            number, time = goes[place], end_of(chosen[goes[place]])
            at = next(at for at, one in enumerate(live) if one[2] == number)
            for above in range(at, len(live)):
                since, bottom, other, block = live[above]
                if time > since:
                    pieces.append((block, since, time, bottom))
                live[above] = (max(since, time), bottom - chosen[number].nbytes, other, block)
            del live[at]
            place += 1

    for number, block in enumerate(chosen):
        close(block.start)
        top = live[-1][1] + live[-1][3].nbytes if live else 0
        live.append((block.start, top, number, block))
    close(timeline.duration)
    return pieces


def _stepped(points: Series, times: list[float]) -> list[int]:
    """Return the value at each of ``times`` of what changes at ``points``."""
    values, place, value = [], 0, 0
    for time in times:
        while place < len(points) and points[place][0] <= time:
            value = points[place][1]
            place += 1
        values.append(value)
    return values
