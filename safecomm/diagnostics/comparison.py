"""Several reports: the ranks of one run as one, and how two runs differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.report import Advice, Report
from safecomm.diagnostics.table import Table
from safecomm.diagnostics.units import mib


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


def of_ranks(ranks: list[Report]) -> Report:
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
    alike: dict[str, list[tuple[Advice, int | None]]] = {}
    for one in by_most:
        for advice in one.advised:
            alike.setdefault(re.sub(r"[\d.]+ ?([KM]i)?B?", "", advice.text), []).append((advice, one.rank))
    told = []
    for same in alike.values():
        advice, rank = max(same, key=lambda item: item[0].nbytes)
        count = len({one for _, one in same}) - 1
        others = f"; {count} other ranks: the like" if count else ""
        told.append(advice._replace(text=f"{advice.text} (Rank {rank}{others}.)"))
    folder, name, _ = ranks[0].run or ("", "", None)
    what = f"{len(ranks)} ranks; what follows the first table is rank {worst.rank}'s, which has the most"
    title = printable(f"{Path(folder) / name}, {len(ranks)} ranks")
    tables = [table, *worst.tables]
    return Report(title, [what, *worst.summary], tables, told, timelines, figures, program=worst.program)
