"""Tables as text: columns under their heads, numbers to the right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"|-|none|[+\u2212-]?\d[\d.,]*( ?([KMGT]iB|B|%|x|us|ms|s|min))?( \(\w+ \d+\))?")


@dataclass
class Table:
    """A table of a report: its text is that of :func:`laid_out`, under a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.title}: none"
        lines = [f"  {line}" for line in laid_out(self.columns, self.rows)]
        return "\n".join([self.title, *lines, *([f"  {self.note}"] if self.note else [])])

    def numeric(self) -> list[bool]:
        """Return of each column whether it has nothing but numbers."""
        return _numeric(self.rows, len(self.columns))


def laid_out(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    r"""Return the lines of a table: heads, a rule, and the rows. A column of numbers is flush right.

    Examples
    --------
    >>> print(*laid_out(["way", "peak"], [["torch", "9.0 MiB"], ["safecomm", "12.0 MiB"]]), sep="\n")
    way           peak
    --------  --------
    torch      9.0 MiB
    safecomm  12.0 MiB
    """
    cells = [columns, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = _numeric(rows, len(columns))
    lines = [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _numeric(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    return [all(_NUMBER.fullmatch(row[i]) for row in rows) and any(row[i] for row in rows) for i in range(columns)]
