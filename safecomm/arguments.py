"""What arguments of public functions have to be, and the one form in which others are refused.

``drain(timeout='soon'): expected seconds or a timedelta, not str``: TypeError for a wrong type, ValueError for a wrong
value. Checking changes nothing, and asks no device. The arguments of wrapped collectives are torch's to check.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import GroupMember, ProcessGroup


class Rule(NamedTuple):
    """What an argument has to be, in words and as a test, and what is raised for another one."""

    expected: str
    fits: Callable[[object], bool]
    error: type[Exception] = TypeError


def is_a(expected: str, *kinds: type) -> Rule:
    """Return the rule of what is an instance of one of ``kinds``; True and False are no numbers."""
    return Rule(expected, lambda value: isinstance(value, kinds) and (type(value) is not bool or bool in kinds))


def one_of(names: Collection[str]) -> Rule:
    """Return the rule of a text that is one of ``names``."""
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names, ValueError)


_NONE = type(None)
_OUTSIDE: object = GroupMember.NON_GROUP_MEMBER  # a number, or an object

FLAG = is_a("True or False", bool)
TEXT = is_a("text", str)
PATH = is_a("a path", str, os.PathLike)
TENSOR = Rule(
    "a dense tensor",
    lambda value: isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested,
)
WHOLE = Rule(
    "a whole number", lambda value: hasattr(type(value), "__index__") and not isinstance(value, (bool, torch.Tensor))
)
SECONDS = is_a("seconds or a timedelta", int, float)
TIME = is_a("what c10d takes for a time", timedelta, float, _NONE)
MEMBER = is_a("a process group that this rank is in, or None", ProcessGroup, _NONE)
GROUP = Rule(
    "a process group of torch.distributed, or None",
    lambda value: MEMBER.fits(value) or (type(value) is type(_OUTSIDE) and value == _OUTSIDE),
)


def shown(value: object) -> str:
    """Return how a message shows ``value``: in a few characters, and asking no device and no code of the program's."""
    short = isinstance(value, (float, str, bytes, _NONE)) or (isinstance(value, int) and value.bit_length() < 100)
    return f"{value!r:.60}" if short else f"<{type(value).__name__}>"


def check(call: str, rule: Rule, **given: object) -> None:
    """Raise what ``rule`` says for the first of the arguments ``given`` to ``call`` that does not fit it."""
    for name, value in given.items():
        if not rule.fits(value):
            kind = f", not {type(value).__name__}" if rule.error is TypeError else ""
            raise rule.error(f"{call}({name}={shown(value)}): expected {rule.expected}{kind}")


def seconds(call: str, *, timeout: timedelta | float | None) -> timedelta | None:
    """Return a time that is given in seconds or as a timedelta; None stays None."""
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if number is None:
        return None
    check(call, SECONDS, timeout=number)
    if not 0 <= number <= threading.TIMEOUT_MAX:
        raise ValueError(f"{call}(timeout={shown(number)}): expected seconds, 0 or more, and finite")
    return timedelta(seconds=number)
