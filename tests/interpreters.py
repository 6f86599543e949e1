"""Pythons whose counts of references can't be relied on, simulated: what each does to ``sys`` before safecomm comes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

_count = sys.getrefcount
_users = torch._C._storage_Use_Count


def no_gil() -> None:
    """Free threads: counts are split among them."""
    sys._is_gil_enabled = lambda: False


def one_too_many() -> None:
    """Each count is one more than it should be."""
    sys.getrefcount = lambda thing: _count(thing) + 1


def one_too_many_later() -> None:
    """Counts are right at first, and one more once the code that counts has been specialised."""
    calls = itertools.count()
    real = _as_called_from_python()
    sys.getrefcount = lambda thing: _count(thing) - real + (next(calls) > 100)


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


def free_threaded_build() -> None:
    """The GIL is on, in an interpreter that can do without."""
    sys.abiflags = "t"


def storages_always_unused() -> None:
    """torch says of each storage that only a slot has it."""
    torch._C._storage_Use_Count = lambda cdata: 2


def storages_counted_once_more() -> None:
    """torch says of each storage that one more has it."""
    torch._C._storage_Use_Count = lambda cdata: _users(cdata) + 1


def tensors_not_counted() -> None:
    """torch does not count the third user of a storage, nor any after it."""
    torch._C._storage_Use_Count = lambda cdata: min(_users(cdata), 2)


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
    one.__name__: one
    for one in (
        no_gil,
        free_threaded_build,
        one_too_many,
        one_too_many_later,
        one_too_few_later,
        immortal,
        shared_once,
        none,
        storages_always_unused,
        storages_counted_once_more,
        tensors_not_counted,
    )
}

if sys.version_info >= (3, 14):
    # A call takes no reference of its own there, so that one more in each count is what earlier versions have, to which
    # the calibration makes no difference.
    del PYTHONS["one_too_many"]
