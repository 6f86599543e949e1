"""Reports as one page that needs nothing else: no network, no other file. ``page.js`` draws the timelines."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safecomm.diagnostics.report import Report, Table, Timeline

_SCRIPT = Path(__file__).with_name("page.js")

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; overflow-wrap: anywhere; } h3 { font-size: 1em; }
#timelines { display: flex; flex-wrap: wrap; gap: 1.5em; }
figure { flex: 1 1 540px; min-width: 0; margin: 0; } figcaption { font-weight: 600; overflow-wrap: anywhere; }
canvas { width: 100%; height: 420px; display: block; cursor: crosshair; border: 1px solid #ccc; touch-action: none; }
#hover { position: fixed; display: none; pointer-events: none; background: #fffffff2; border: 1px solid #888;
  padding: .5em .7em; font: 12px/1.35 ui-monospace, monospace; white-space: pre-wrap; max-width: 46em; z-index: 1; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .2em .8em .2em 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #e5e5e5; overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
.advice li { margin: .4em 0; } .key { font-size: 12px; color: #555; }
"""


def make_page(reports: Sequence[Report]) -> str:
    """Return the page of ``reports``: the timelines of all of them side by side, and then the words of each."""
    timelines = [_plain(timeline) for report in reports for timeline in report.timelines]
    # "<" can't end the script element, or begin a comment, when it is not there.
    data = json.dumps(timelines, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    figures = "".join(
        f'<figure><figcaption>{html.escape(one["title"])}</figcaption><canvas tabindex="0"></canvas></figure>'
        for one in timelines
    )
    key = (
        '<p class="key">Wheel: zoom. Drag: move. Double click: all of it. Each colour is a line of the program; red is '
        "memory that was freed and could not be given out again yet. Lines: active (black), reserved (dotted).</p>"
    )
    empty = "<p>The files have no history, so there is no timeline.</p>"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>safecomm report</title>',
            f"<style>{_STYLE}</style></head><body>",
            "<h1>Communication memory</h1>",
            f'<div id="timelines">{figures}</div>{key}' if timelines else empty,
            '<div id="hover"></div>',
            *map(_section, reports),
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{_SCRIPT.read_text()}</script>",
            "</body></html>\n",
        ]
    )


def _plain(timeline: Timeline) -> dict[str, Any]:
    """Return what the script is given: times in microseconds, as whole numbers."""

    def microseconds(seconds: float | None) -> int | None:
        return None if seconds is None else round(seconds * 1e6)

    def points(series: list[tuple[float, int]]) -> list[list[int | None]]:
        return [[microseconds(time), value] for time, value in series]

    numbers: dict[str, int] = {}
    stacks = [[numbers.setdefault(text, len(numbers)) for text in stack] for stack in timeline.stacks]
    blocks = [
        [
            *(microseconds(b.start), microseconds(b.freed), microseconds(b.end), b.bottom, b.nbytes, b.stack),
            *(b.freed_by, numbers.setdefault(b.label, len(numbers)) if b.label else None),
        ]
        for b in timeline.blocks
    ]
    return {
        "title": timeline.title + (f" ({timeline.hidden} small or short blocks not drawn)" if timeline.hidden else ""),
        "duration": microseconds(timeline.duration),
        "lines": {name: points(series) for name, series in timeline.lines.items()},
        "bands": {name: points(series) for name, series in timeline.bands.items()},
        "blocks": blocks,
        # Each text once: a snapshot may have thousands of stacks that differ in one line.
        "texts": list(numbers),
        "stacks": stacks,
    }


def _section(report: Report) -> str:
    advice = "".join(f"<li>{html.escape(text)}</li>" for text in report.advice) or "<li>Nothing stands out.</li>"
    return "\n".join(
        [
            f"<section><h2>{html.escape(report.title)}</h2>",
            *(f"<p>{html.escape(line)}</p>" for line in report.summary),
            f'<h3>Advice</h3><ol class="advice">{advice}</ol>',
            *map(_table, report.tables),
            "</section>",
        ]
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    body = f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>' if table.rows else "<p>None.</p>"
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return f"<h3>{html.escape(table.title[:1].upper() + table.title[1:])}</h3>{body}{note}"
