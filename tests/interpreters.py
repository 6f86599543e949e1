"""Pythons whose counts of references can't be relied on, simulated: what each does to ``sys`` before safecomm comes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

_count = sys.getrefcount


def no_gil() -> None:
    """Free threads: counts are split among them."""
    sys._is_gil_enabled = lambda: False


def one_too_many() -> None:
    """Each count is one more than it should be."""
    sys.getrefcount = lambda thing: _count(thing) + 1


def one_too_few_later() -> None:
    """Counts are right at first, and one less once the code that counts has been specialised."""
    calls = itertools.count()
    real = _as_called_from_python()
    sys.getrefcount = lambda thing: _count(thing) - real - (next(calls) > 100)


def immortal() -> None:
    """Objects are not counted at all."""
    sys.getrefcount = lambda thing: (1 << 32) - 1


def shared_once() -> None:
    """A second reference is not counted, as if it were borrowed or deferred."""
    sys.getrefcount = lambda thing: min(_count(thing), 3)


def none() -> None:
    """There are no counts."""
    del sys.getrefcount


def _as_called_from_python() -> int:
    """Return how many references a function of Python adds to a count."""
    (thing,) = only = [object()]
    real, found = _count(thing), (lambda thing: _count(thing))(thing)
    del only
    return found - real


PYTHONS: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (no_gil, one_too_many, one_too_few_later, immortal, shared_once, none)
}
