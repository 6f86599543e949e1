"""What one file says: tables, timelines, and advice, each piece with the figure that it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field

from safecomm.diagnostics.table import Table
from safecomm.diagnostics.timeline import Timeline
from safecomm.diagnostics.units import MIB, mib

ROWS = 15
"""Rows of a table."""
WORTH = MIB
"""Bytes from which on something is worth advice."""


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


def caption(what: str, figures: dict[str, int]) -> str:
    """Return what is written under a timeline: ``what`` it is of, and its figures."""
    return f"{what}; at the most " + ", ".join(f"{name} {mib(value)}" for name, value in figures.items())
