"""What is replaced, and by what: the patch as data."""

from __future__ import annotations

import types
from typing import Any

import torch.distributed
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import coalesced, gates, groups, objects, point_to_point
from safecomm.collectives.table import ROWS

MODULES = (torch.distributed, c10d)
"""Where the names are replaced. c10d looks its own up by name, and compares some by identity: both get one object."""

NAMES = tuple(
    sorted(
        {
            "_abort_process_group", "_coalescing_manager", "_reconfigure", "destroy_process_group", "shrink_group",
            *objects.NAMES, *(name for row in ROWS.values() for name in (row.key, row.alias) if name),
        }
    )
)  # fmt: skip
"""The names that are replaced, where this torch has them."""


def _ours(name: str) -> Any:
    for module in (gates, coalesced, groups, objects, point_to_point):
        if hasattr(module, name):
            return getattr(module, name)
    return None


def _clone(function: types.FunctionType, original: types.FunctionType) -> types.FunctionType:
    """Return another function object that does the same.

    It tells what came by the patch from what came by ``import safecomm``, so that undoing the first is exact. It has
    the module of the one that it replaces, which is where pickle and Dynamo look for it.
    """
    same = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    same.__dict__.update(function.__dict__)
    same.__doc__ = function.__doc__
    same.__qualname__ = function.__qualname__
    same.__module__ = original.__module__
    return same


ORIGINALS: dict[str, types.FunctionType] = {
    name: ours.__wrapped__
    for name in NAMES
    if (ours := _ours(name)) is not None and hasattr(ours, "__wrapped__") and _torch.is_torchs(ours.__wrapped__)
}
"""torch's functions. What other code had replaced when safecomm was imported is left out, and stays its own."""

REPLACEMENTS: dict[str, types.FunctionType] = {
    name: _clone(_ours(name), original) for name, original in ORIGINALS.items()
}
"""What stands in their places while the patch is on."""
