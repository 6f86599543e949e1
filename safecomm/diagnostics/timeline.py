"""What is drawn of one device or rank: memory over time, by what has it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import itemgetter

POINTS = 1500
"""Points of a line."""
OTHERS = "other call sites"
"""The band of those that have none of their own."""

Series = list[tuple[float, int]]


@dataclass(slots=True)
class Drawn:
    """One block of a timeline, from when it was allocated until the allocator could give it out again."""

    start: float
    freed: float | None
    """When the program gave it back; None if it had not at the end."""
    end: float | None
    """When it could be given out again; None if it could not at the end."""
    nbytes: int
    stack: int
    freed_by: int
    label: str = ""
    """What the program has attached to it, as torch's ``user_metadata``."""

    @property
    def waited(self) -> bool:
        """Whether it was freed some time before the allocator could give it out."""
        return self.freed is not None and (self.end is None or self.freed < self.end)


@dataclass
class Timeline:
    """What is drawn of one device or rank. Bytes, and seconds from the start."""

    title: str
    duration: float
    lines: dict[str, Series]
    """Such as ``"active"``, ``"reserved"``: some ``POINTS`` of each, and of what is left out the largest."""
    bands: dict[str, Series] = field(default_factory=dict)
    """What collectives held, by call site, to be stacked."""
    blocks: list[Drawn] = field(default_factory=list)
    """All of them, by ``start``: at each moment their sum is what is active."""
    stacks: list[tuple[str, ...]] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    """Of each stack the line of the program."""
    holders: dict[str, int] = field(default_factory=dict)
    """Of each line of the program, or band, the bytes that it had at the most."""
    caption: str = ""
    """What it shows, in figures."""
    began: float = 0.0
    """Unix seconds of the start; 0 if the file does not tell."""

    @property
    def hatched(self) -> bool:
        """Whether a block of it was freed some time before the allocator could give it out."""
        return any(one.waited for one in self.blocks)


def thinned(points: Series, end: float | None = None) -> Series:
    """Return about ``POINTS`` of them, of each piece the largest; and the last again at ``end``."""
    kept = points
    if len(points) > POINTS:
        kept = []
        width = (points[-1][0] - points[0][0]) / POINTS or 1.0
        place = 0
        while place < len(points):
            edge = points[place][0] + width
            after = max(bisect_left(points, (edge,), place), place + 1)
            kept.append(max(points[place:after], key=itemgetter(1)))
            place = after
    return kept if end is None else [*kept, (end, points[-1][1])]
