"""Reports as one page that needs nothing else: no network, no other file. ``page.js`` draws the timelines.

The page has all blocks, so that what it draws adds up to what is active at each moment, however far one zooms in.
"""

from __future__ import annotations

import array
import base64
import hashlib
import html
import json
import re
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

from safecomm.diagnostics import colours
from safecomm.diagnostics.comparison import difference, headline
from safecomm.diagnostics.report import Report
from safecomm.diagnostics.snapshot import NOWHERE
from safecomm.diagnostics.table import Table
from safecomm.diagnostics.timeline import OTHERS, Series, Timeline
from safecomm.diagnostics.units import mib

_SCRIPT = Path(__file__).with_name("page.js")
_STYLE = Path(__file__).with_name("page.css")

_MOMENTS = 10
"""Rows of the table that stands for a picture."""

_COLUMNS = 4
"""Columns of a table that a phone has room for."""

_STROKES = {
    "active": ("--ink", "solid", "active: in use, or freed but unusable"),
    "reserved": ("--soft", "dotted", "reserved from the device"),
    "unusable": ("--unusable", "dashed", "freed but unusable"),
    "arena": ("--accent", "solid", "arenas in use"),
}
"""Of each line its colour, how it is drawn, and what it says. ``page.js`` has the same."""


def make_page(reports: Sequence[Report], title: str = "") -> str:
    """Return the page of ``reports``: the timelines of all of them side by side, and then the words of each.

    ``title``: of the page, where it is not to name the files.

    Nothing of what the files say can become a part of the page, or run: it is escaped, and of scripts the page permits
    its own alone.
    """
    timelines = [timeline for report in reports for timeline in report.timelines]
    numbers = colours.coloured(timelines)
    # "<" can't end the script element, or begin a comment, when it is not there.
    data = json.dumps([_plain(one, numbers) for one in timelines], separators=(",", ":"), allow_nan=False)
    script = _SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    told = headline(reports)
    table = difference(reports)
    ran = ", ".join(dict.fromkeys(report.program for report in reports if report.program))
    files = ", ".join(Path(report.title).name for report in reports)
    what = title or "Memory of " + (f"{ran}: {files}" if ran else files)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{html.escape(what.removeprefix('Memory of '))} - safecomm report</title>",
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_variables()}{_STYLE.read_text(encoding='utf-8')}</style></head><body>",
            f"<h1>{_text(what)}</h1>",
            f'<p class="headline"><strong>{html.escape(told.replace("->", "→"))}</strong></p>' if told else "",
            _pictures(timelines, numbers)
            if timelines
            else "<p>The files have no history, so there is no timeline.</p>",
            _table(table) if table is not None else "",
            f'<div class="beside words">{"".join(map(_section, reports))}</div>',
            f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>',
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


def _text(text: str) -> str:
    """Return what the page shows of ``text``. A name may end a line where it has a mark, and only there."""
    return re.sub(r"((?<=\w)[/\\_]|(?<=[^\W\d])[.:])(?=\w)", r"\1<wbr>", html.escape(text))


def _variables() -> str:
    named = {"other": colours.OTHER, "small": colours.SMALL, "unusable": colours.UNUSABLE, "hatch": colours.HATCH}
    named |= {f"line{number}": colour for number, colour in enumerate(colours.LINES)}
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in named.items())} }}\n"


# --- pictures -----------------------------------------------------------------------------------------------------


def _pictures(timelines: Sequence[Timeline], numbers: dict[str, int]) -> str:
    return "\n".join(
        [
            f'<div class="beside" id="timelines">{"".join(map(_figure, timelines))}</div>',
            _legend(timelines, numbers),
            '<div class="bar"><button id="in">Zoom in</button><button id="out">Zoom out</button>'
            '<button id="all">All of it</button>'
            '<button id="copy" disabled>Copy what is pinned</button><button id="unpin" disabled>Unpin</button></div>',
            '<p id="details" tabindex="0" role="status" aria-live="polite" aria-label="What is pointed at">'
            "Point at the picture: what is there is told here. A click pins it.</p>",
            '<p class="help" id="help">Drag over a chart to zoom into a span of time, and once zoomed, to move. '
            "<kbd>Ctrl</kbd> and the wheel zoom, with <kbd>Shift</kbd> the axis of memory; a double click shows all. "
            "All charts go together. Keys, on a chart: <kbd>+</kbd> <kbd>-</kbd> <kbd>0</kbd> zoom, <kbd>←</kbd> "
            "<kbd>→</kbd> move, <kbd>m</kbd> <kbd>M</kbd> zoom the axis of memory, <kbd>↑</kbd> <kbd>↓</kbd> move it, "
            "<kbd>n</kbd> <kbd>p</kbd> the next and the previous block by size, <kbd>c</kbd> copy, <kbd>Esc</kbd> "
            "unpin.</p>",
            '<div id="tip"></div>',
        ]
    )


def _figure(timeline: Timeline) -> str:
    label = f"Memory over time of {timeline.title}. {timeline.caption}."
    return (
        f"<figure><figcaption><strong>{_text(timeline.title)}</strong><span>{_text(timeline.caption)}</span>"
        f'</figcaption><div class="chart"><canvas class="picture" tabindex="0" role="img" aria-describedby="help" '
        f'aria-label="{html.escape(label)}">{html.escape(label)}</canvas><canvas class="marks" aria-hidden="true">'
        f"</canvas></div><details><summary>The same as a table</summary>{_moments(timeline)}</details></figure>"
    )


def _moments(timeline: Timeline) -> str:
    """Return what stands for the picture where it can't be seen: the values at some moments."""
    series = {**timeline.lines, **timeline.bands}
    rows = []
    for number in range(_MOMENTS + 1):
        time = timeline.duration * number / _MOMENTS
        rows.append((f"{time * 1e3:.1f} ms", *(mib(_at(points, time)) for points in series.values())))
    return _rows(Table("", ("time", *series), rows))


def _at(points: Series, time: float) -> int:
    place = bisect_right(points, time, key=lambda point: point[0])
    return points[place - 1][1] if place else 0


def _legend(timelines: Sequence[Timeline], numbers: dict[str, int]) -> str:
    """Return what each colour and each line means, of those that there are."""
    entries = []
    for site, number in numbers.items():
        most = ", ".join(mib(one.holders[site]) if site in one.holders else "none" for one in timelines)
        entries.append((f'<i style="background: var(--line{number})"></i>', site, f"{most} at the most"))
    others = {site for one in timelines for site in one.holders} - numbers.keys()
    named = sorted(others & {OTHERS, *NOWHERE})
    if others:
        count = len(others) - len(named)
        what = ", ".join([*([f"{count} other lines of the program"] if count else []), *named])
        entries.append(('<i style="background: var(--other)"></i>', what, ""))
    keys = []
    if any(one.blocks for one in timelines):
        if any(one.hatched for one in timelines):
            keys.append(('<i class="hatched"></i>', "freed, and not reusable yet"))
        keys.append(('<i style="background: var(--small)"></i>', "blocks too small to draw at this zoom"))
    for name, (colour, stroke, text) in _STROKES.items():
        # Where there are blocks, what is unusable is hatched.
        if any(
            value for one in timelines if name != "unusable" or not one.blocks for _, value in one.lines.get(name, [])
        ):
            keys.append((f'<i class="stroke" style="border-top: 2px {stroke} var({colour})"></i>', text))
    lines = "".join(
        f"<li>{swatch}{_text(text)} <small>{html.escape(more)}</small></li>" for swatch, text, more in entries
    )
    return f'<ul class="legend">{lines}</ul><ul class="key">{"".join(f"<li>{a}{b}</li>" for a, b in keys)}</ul>'


# --- what the script is given -------------------------------------------------------------------------------------


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _points(series: Series) -> list[list[int]]:
    return [[_microseconds(time), value] for time, value in series]


def _plain(timeline: Timeline, numbers: dict[str, int]) -> dict[str, object]:
    """Return what the script is given: times in microseconds, as whole numbers."""
    texts: dict[str, int] = {}
    stacks = [[texts.setdefault(text, len(texts)) for text in stack] for stack in timeline.stacks]
    sites = [texts.setdefault(site, len(texts)) for site in timeline.sites]
    columns: dict[str, object] = {}
    if timeline.blocks:
        starts = [_microseconds(one.start) for one in timeline.blocks]
        frees = [None if one.freed is None else _microseconds(one.freed) for one in timeline.blocks]
        ends = [None if one.end is None else _microseconds(one.end) for one in timeline.blocks]
        # Differences are small, and so are the columns. What is 0 has not happened; what was at once is 1.
        columns = _packed(
            start=[after - before for before, after in zip([0, *starts], starts, strict=False)],
            held=[0 if freed is None else freed - start + 1 for start, freed in zip(starts, frees, strict=True)],
            waited=[
                0 if end is None else end - (start if freed is None else freed) + 1
                for start, freed, end in zip(starts, frees, ends, strict=True)
            ],
            size=[one.nbytes for one in timeline.blocks],
            stack=[one.stack for one in timeline.blocks],
            freed_by=[one.freed_by for one in timeline.blocks],
            label=[texts.setdefault(one.label, len(texts)) + 1 if one.label else 0 for one in timeline.blocks],
        )
    return {
        "duration": _microseconds(timeline.duration),
        # What blocks add up to, the page counts itself, at each moment.
        "lines": {
            name: _points(series)
            for name, series in timeline.lines.items()
            if not timeline.blocks or name not in ("active", "unusable")
        },
        "bands": [[name, numbers.get(name, -1), _points(series)] for name, series in timeline.bands.items()],
        "columns": columns,
        # Each text once: a snapshot may have thousands of stacks that differ in one line.
        "texts": list(texts),
        "stacks": stacks,
        "sites": sites,
        "colours": [numbers.get(site, -1) for site in timeline.sites],
    }


def _packed(**columns: Iterable[int]) -> dict[str, object]:
    """Return columns of numbers as one text, each in the smallest type that has room for its largest."""
    parts, described = [], []
    for name, values in columns.items():
        numbers = list(values)
        most = max(numbers)
        code = next((code for code, bits in (("B", 8), ("H", 16), ("I", 32)) if most < 1 << bits), "d")
        column = array.array(code, numbers)
        if sys.byteorder == "big":
            column.byteswap()
        parts.append(column.tobytes())
        described.append([name, code, len(numbers)])
    data = base64.b64encode(zlib.compress(b"".join(parts), 6)).decode()
    return {"described": described, "data": data}


# --- words --------------------------------------------------------------------------------------------------------


def _section(report: Report) -> str:
    advice = "".join(f"<li>{_text(text)}</li>" for text in report.advice) or "<li>Nothing stands out.</li>"
    return "\n".join(
        [
            f"<section><h2>{_text(report.title)}</h2>",
            *(f"<p>{_text(line)}</p>" for line in report.summary),
            f'<h3>Advice</h3><ol class="advice">{advice}</ol>',
            *map(_table, report.tables),
            "</section>",
        ]
    )


def _table(table: Table) -> str:
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return f"<h3>{html.escape(table.title[:1].upper() + table.title[1:])}</h3>{_rows(table)}{note}"


def _rows(table: Table) -> str:
    if not table.rows:
        return "<p>None.</p>"
    classes = [' class="n"' if number else "" for number in table.numeric()]
    names = [html.escape(name) for name in table.columns]
    head = "".join(f'<th scope="col"{one}>{name}</th>' for name, one in zip(names, classes, strict=True))
    wide = len(names) > _COLUMNS
    # On a phone each row of a wide table is a list, and each cell has the name of its column before it.
    marks = [f'{one} data-is="{name}"' if wide else one for name, one in zip(names, classes, strict=True)]
    rows = "".join(
        f"<tr>{''.join(f'<td{mark}>{_text(cell)}</td>' for cell, mark in zip(row, marks, strict=True))}</tr>"
        for row in table.rows
    )
    kind = ' class="wide"' if wide else ""
    return f'<div class="scroll" tabindex="0"><table{kind}><tr>{head}</tr>{rows}</table></div>'
