"""What comes out of a file, checked as it is read: whatever is in it, what is made of it is small, finite and harmless.

Each function raises ValueError, which says what is wrong and shows nothing that could be large.
"""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any, NoReturn

MOST = 1 << 62
"""Above any number of bytes."""

LONGEST = float(1 << 48) / 1e6
"""Seconds of a run: nine years. Pages draw with microseconds, which are exact in a browser up to there."""

LETTERS = 1000
"""Of a text that are kept: paths have up to 4096, of which the end tells more."""


def whole(value: object, least: int = 0, most: int = MOST) -> int:
    """Return ``value`` if it is a whole number within limits.

    Examples
    --------
    >>> whole(3)
    3
    """
    if type(value) is not int:
        raise ValueError(f"{type(value).__name__} instead of a whole number")
    if not least <= value <= most:
        raise ValueError("a number is out of range")
    return value


def seconds(value: Any) -> float:
    """Return ``value`` if it is a time from the start of a run."""
    if type(value) not in (int, float):
        raise ValueError(f"{type(value).__name__} instead of seconds")
    if not 0 <= value <= LONGEST:
        raise ValueError("a time is out of range")
    return float(value)


def finite(value: Any) -> float:
    """Return ``value`` if it is a number."""
    if type(value) not in (int, float):
        raise ValueError(f"{type(value).__name__} instead of a number")
    if not -MOST <= value <= MOST or math.isnan(value):
        raise ValueError("a number is out of range")
    return float(value)


def text(value: object) -> str:
    """Return ``value``, as it can be printed, if it is text."""
    if type(value) is not str:
        raise ValueError(f"{type(value).__name__} instead of text")
    return printable(value if len(value) <= LETTERS else "..." + value[-LETTERS:])


def printable(value: str) -> str:
    r"""Return ``value`` with what steers a terminal, or turns the direction of what follows, shown as it is escaped.

    Examples
    --------
    >>> print(printable("a \x1b[2J b"))
    a \x1b[2J b
    """
    if value.isascii() and value.isprintable():
        return value
    # Control, format, surrogate and private characters, and separators of lines: all categories that begin with C or Z.
    return "".join(
        one if one == " " or unicodedata.category(one)[0] not in "CZ" else one.encode("unicode_escape").decode()
        for one in value
    )


def loads(line: str) -> Any:
    """Return the JSON in ``line``. Infinity and NaN, which are no JSON, are refused."""
    try:
        return json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
