"""What of torch's safecomm has replaced just now, found by looking at torch."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safecomm import _torch

_OURS = str(Path(__file__).parents[1])


def replaced() -> list[str]:
    """Return the functions, methods and operators of torch's that are safecomm's just now, wherever torch keeps them.

    Empty after ``import safecomm``, and after ``unpatch()`` and the end of all contexts.

    Examples
    --------
    >>> replaced()
    []
    """
    found = {f"{where}.{name}" for where, names in _namespaces() for name, one in names.items() if _is_ours(one)}
    return sorted({*found, *_torch.OVERRIDDEN.values()})


def _namespaces() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what torch's modules and classes have, with their names."""
    classes: dict[int, type] = {}
    for name, module in tuple(sys.modules.items()):
        if f"{name}.".startswith("torch.") and isinstance(module, types.ModuleType):
            names = dict(vars(module))
            yield name, names
            classes |= {id(one): one for one in names.values() if issubclass(type(one), type)}
    for one in classes.values():
        if f"{one.__module__}.".startswith("torch."):
            yield f"{one.__module__}.{one.__qualname__}", dict(vars(one))


def _is_ours(thing: Any) -> bool:
    # By its real type: some of torch's objects warn when isinstance() asks them for their class.
    function = thing.__func__ if type(thing) in (staticmethod, classmethod) else thing
    return type(function) is types.FunctionType and function.__code__.co_filename.startswith(_OURS)
