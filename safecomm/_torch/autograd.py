"""What autograd keeps and counts: saved tensors, version counters, and the level of forward mode."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from safecomm._torch.names import exactly, look_up


def saved_by(node: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what an autograd node keeps for the backward pass, by name; nothing once torch has freed that.

    Runs no unpack hook where torch tells what is packed (``SavedTensor.data``, 2.9 and later).
    """
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    found = []
    for name in names:
        shown = name.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, name)
            for packed in raw if isinstance(raw, (list, tuple)) else (raw,):
                value = packed.data if hasattr(packed, "data") else None
                if isinstance(value, torch.Tensor):
                    found.append((shown, value))
                elif not hasattr(packed, "data"):
                    value = node.saved_tensors if shown == "tensors" else getattr(node, f"_saved_{shown}")
                    values = value if isinstance(value, (list, tuple)) else (value,)
                    found.extend((shown, one) for one in values if isinstance(one, torch.Tensor))
                    break
        except (RuntimeError, AttributeError):
            # A backward pass has freed what was saved.
            continue
    return found


look_up(
    "torch._C._autograd.SavedTensor.data", None, "the search for leaks runs the program's unpack hooks",
    lambda found: True, since="2.9",
)  # fmt: skip

_saved_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


class _NoForwardAD:
    _current_level = 0


forward_ad: types.ModuleType | type[_NoForwardAD] = torch.autograd.forward_ad

if look_up("torch.autograd.forward_ad._current_level", None, "low_latency() copies lists", exactly(int)) is None:
    forward_ad = _NoForwardAD
"""``forward_ad._current_level`` is -1 where no tensor can have a tangent. Copies into given memory refuse tangents."""


def _increment_each(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


increment_versions: Callable[[Sequence[torch.Tensor]], None] = _increment_each
"""Tell autograd that tensors were written to. None of them may be of inference mode."""

# Torch 2.4 takes one tensor at a time.
with contextlib.suppress(TypeError, RuntimeError):
    torch.autograd.graph.increment_version([])
    increment_versions = torch.autograd.graph.increment_version
