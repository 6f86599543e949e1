"""What one file says: tables, timelines, and advice, each piece with the figure that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from safecomm.diagnostics.table import Table
from safecomm.diagnostics.timeline import Timeline
from safecomm.diagnostics.units import MIB, mib

ROWS = 15
"""Rows of a table."""
WORTH = MIB
"""Bytes from which on something is worth advice."""
SHARE = 100
"""A gain of less than this part of a peak is none: two runs of one program differ by as much."""


class Advice(NamedTuple):
    """What could be done, and the bytes that it rests on: what it can gain at the most, or what is held."""

    nbytes: int
    text: str
    measurable: bool = False
    """Whether ``compare`` can try it out, and knows better what it gains."""


@dataclass
class Report:
    """What one file says."""

    title: str
    summary: list[str]
    tables: list[Table]
    advised: list[Advice]
    timelines: list[Timeline]
    figures: dict[str, int] = field(default_factory=dict)
    """Bytes at the most, by what they are: what reports are compared by."""
    run: tuple[str, str, int | None] | None = None
    """The same for all ranks of a run: folder, name and number of ranks; None for a file that is of no rank."""
    rank: int | None = None
    program: str = ""
    """The script or module that ran, if that is known."""

    @property
    def advice(self) -> list[str]:
        """What is advised, that of the most bytes first."""
        return [one.text for one in sorted(self.advised, key=lambda one: -one.nbytes)]

    def __str__(self) -> str:
        parts = [f"{self.title}\n{'=' * len(self.title)}", "\n".join(self.summary), *map(str, self.tables)]
        advice = [f"  {number}. {text}" for number, text in enumerate(self.advice, 1)] or ["  nothing stands out"]
        return "\n\n".join([*parts, "\n".join(["advice", *advice])])


@dataclass
class Waiting:
    """What record_stream kept from the allocator, of what was active at each of some moments."""

    active: Sequence[int]
    unusable: Sequence[int]

    @property
    def gain(self) -> int:
        """Bytes by which the peak would be lower if all had been usable when it was freed: nothing can gain more."""
        used = (one - two for one, two in zip(self.active, self.unusable, strict=True))
        return max(self.active) - max(used)

    def told(self) -> str:
        """Return what there is to gain."""
        least, gain = max(self.active) - self.gain, f"at most {mib(self.gain)} to gain" if self.gain else "no gain"
        return f"with every block usable as soon as it was freed, active {mib(least)}: {gain}"

    def advised(self, what: str, more: str) -> list[Advice]:
        """Return the advice on it, if the gain is worth one. ``what`` was unusable; ``more`` says where."""
        if self.gain < max(WORTH, max(self.active) // SHARE):
            return []
        text = (
            f"{what} freed but unusable, {mib(max(self.unusable))} at the most: record_stream was called for them, so "
            f"they waited until the host saw another stream pass. {more} At most {mib(self.gain)} of the peak of "
            f"{mib(max(self.active))} can be gained. How much of it safecomm.avoid_record_streams() gains, only a run "
            "with it tells: compare the files of both. Where the host waits for its streams anyway, as in FSDP1 and "
            "DeepSpeed's ZeRO 3, the peak can rise."
        )
        return [Advice(self.gain, text, measurable=True)]


def caption(what: str, figures: dict[str, int]) -> str:
    """Return what is written under a timeline: ``what`` it is of, and its figures."""
    return f"{what}; at the most " + ", ".join(f"{name} {mib(value)}" for name, value in figures.items())
