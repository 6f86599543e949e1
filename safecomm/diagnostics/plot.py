"""The timelines of reports as an image, by matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safecomm.diagnostics.report import MIB, Report, Series, Timeline

STYLES = {"active": "k-", "reserved": "k:", "unusable": "r-", "arena": "b-"}


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
    highest = max((value for one in timelines for points in one.lines.values() for _, value in points), default=0)
    for number, timeline in enumerate(timelines, 1):
        axes = figure.add_subplot(rows, columns, number)
        _draw(axes, timeline)
        axes.set_title(timeline.title, parse_math=False)  # a "$" in a name is one
        axes.set(xlabel="ms", ylabel="MiB", xlim=(0, timeline.duration * 1e3 or 1))
        if highest:
            axes.set_ylim(0, highest / MIB * 1.05)
        if axes.get_legend_handles_labels()[0]:
            for text in axes.legend(loc="upper left", fontsize="small").get_texts():
                text.set_parse_math(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of letters that the font has not
            figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--png: {path} can't be written: {error}") from None


def _draw(axes: Any, timeline: Timeline) -> None:
    from matplotlib.collections import PolyCollection

    for hatched in (False, True):
        corners, colours = [], []
        for one in timeline.blocks:
            freed = one.end if one.freed is None else one.freed
            left, right = (freed, one.end) if hatched else (one.start, freed)
            if right > left:
                low, high = one.bottom / MIB, (one.bottom + one.nbytes) / MIB
                corners.append([(left * 1e3, low), (right * 1e3, low), (right * 1e3, high), (left * 1e3, high)])
                colours.append("#d9333399" if hatched else f"C{one.stack % 10}")
        if corners:
            pattern = "//" if hatched else None
            axes.add_collection(
                PolyCollection(corners, facecolors=colours, linewidths=0.2, edgecolors="white", hatch=pattern)
            )
    if timeline.bands:
        times = sorted({time for points in timeline.bands.values() for time, _ in points})
        heights = [[value / MIB for value in _stepped(points, times)] for points in timeline.bands.values()]
        labels = [name[-60:] for name in timeline.bands]
        axes.stackplot([time * 1e3 for time in times], heights, labels=labels, step="post")
    for name, points in timeline.lines.items():
        times, values = [time * 1e3 for time, _ in points], [value / MIB for _, value in points]
        axes.step(times, values, STYLES.get(name, "-"), where="post", label=name, linewidth=1)


def _stepped(points: Series, times: list[float]) -> list[int]:
    """Return the value at each of ``times`` of what changes at ``points``."""
    values, place, value = [], 0, 0
    for time in times:
        while place < len(points) and points[place][0] <= time:
            value = points[place][1]
            place += 1
        values.append(value)
    return values
