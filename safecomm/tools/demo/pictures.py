"""Memory over time, drawn with letters: two runs of one program beside each other, on one scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
_ROWS = 10
_MARGIN = 12
"""Letters to the left of a picture: a figure, and the axis."""
_SMALLEST = 24
"""Columns of a picture, below which one is drawn under the other."""
_LARGEST = 60


@dataclass(frozen=True)
class Letters:
    """What a picture is made of."""

    used: str
    waiting: str
    axis: str
    corner: str
    floor: str

    def fit(self, encoding: str) -> bool:
        """Return whether a terminal of this ``encoding`` has them."""
        try:
            "".join((self.used, self.waiting, self.axis, self.corner, self.floor)).encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


BLOCKS = Letters("█", "░", "│", "└", "─")
PLAIN = Letters("#", ".", "|", "+", "-")


@dataclass(frozen=True)
class Picture:
    """What one run had of a GPU's memory."""

    title: str
    steps: list[tuple[float, int, int]]
    """Since how many seconds so many bytes were in use, and so many freed that could not be given out again yet."""

    @property
    def peak(self) -> int:
        """Bytes that were in use or could not be given out again, at most."""
        return max(used + waiting for _, used, waiting in self.steps)

    @property
    def most_waiting(self) -> int:
        """Bytes that were freed and could not be given out again, at most."""
        return max(waiting for _, _, waiting in self.steps)

    def columns(self, count: int) -> list[tuple[int, int]]:
        """Return, for each of ``count`` equal pieces of the time, the moment of it with the most memory."""
        found: list[tuple[int, int]] = []
        place, now = 0, (0, 0)
        for number in range(count):
            end = self.steps[-1][0] * (number + 1) / count
            most = now
            while place < len(self.steps) and (self.steps[place][0] < end or number == count - 1):
                now = self.steps[place][1:]
                most = max(most, now, key=sum)
                place += 1
            found.append(most)
        return found


def draw(pictures: Sequence[Picture], width: int, letters: Letters = BLOCKS, *, colour: bool = False) -> str:
    """Return the ``pictures`` on one scale, beside each other where ``width`` columns are enough for that."""
    top = max(one.peak for one in pictures)
    peaks = {
        max(1, int(one.peak * _ROWS / top + 0.5)): one.peak for one in pictures
    }  # by the highest row that it fills
    beside = (width - _MARGIN) // len(pictures) - 3
    if beside >= _SMALLEST:
        parts = [_drawn(pictures, min(beside, _LARGEST), top, peaks, letters)]
    else:
        cells = max(_SMALLEST, min(width - _MARGIN - 1, _LARGEST))
        parts = [_drawn([one], cells, top, peaks, letters) for one in pictures]
    parts.append(f"{'':{_MARGIN}}{letters.used} in use   {letters.waiting} freed, and not reusable yet")
    text = "\n\n".join(parts)
    return re.sub(f"{re.escape(letters.waiting)}+", "\x1b[31m\\g<0>\x1b[0m", text) if colour else text


def _drawn(pictures: Sequence[Picture], cells: int, top: int, peaks: dict[int, int], letters: Letters) -> str:
    columns = [one.columns(cells) for one in pictures]
    lines = [f"{'':{_MARGIN}}" + "   ".join(f"{one.title[:cells]:{cells}}" for one in pictures)]
    for row in range(_ROWS, 0, -1):
        level = (row - 0.5) / _ROWS * top
        label = f"{peaks[row] // MIB} MiB" if row in peaks else ""
        drawn = [
            letters.axis
            + "".join(
                letters.used if used >= level else letters.waiting if used + waiting >= level else " "
                for used, waiting in columns_of_one
            )
            for columns_of_one in columns
        ]
        lines.append(f"{label:>{_MARGIN - 2}} " + "  ".join(drawn))
    lines.append(f"{'0':>{_MARGIN - 2}} " + "  ".join(letters.corner + letters.floor * cells for _ in pictures))
    return "\n".join(line.rstrip() for line in lines)
