"""What each collective does to the version counters of its tensors, and what autograd makes of that.

The table is ``calls.ALL``, on any device, so that the tests run it on gloo and the GPU cases on NCCL. Each row is
called with torch.distributed and with safecomm on equal new tensors, and what can be seen afterwards is compared.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as stock
from calls import ALL, Setting, finish, invoke

# The names that torch 2.13 does not warn of.
GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"

ROWS = tuple(name for name in ALL if name not in ("mixed_region", "empty_region"))
"""The calls, but for the regions that torch refuses or that have no tensors."""

Hook = Callable[[torch.Tensor, bool], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Made(Setting):
    """A setting whose tensors are made on ``device``, and then given to ``hook``, with whether they are room only."""

    device: str = "cpu"
    hook: Hook = lambda tensor, written: tensor

    def data(self, seed: int = 0, times: int = 1) -> torch.Tensor:
        return self.hook(self._plain.data(seed, times).to(self.device), False)

    def room(self, times: int = 1) -> torch.Tensor:
        return self.hook(self._plain.room(times).to(self.device), True)

    @property
    def _plain(self) -> Setting:
        return Setting(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)})


def version(tensor: torch.Tensor) -> int | None:
    """Return the version of ``tensor``; None for those of inference mode, which have none."""
    return None if tensor.is_inference() else tensor._version


def seen(module: Any, name: str, setting: Setting) -> tuple[Any, ...]:
    """Return what the call ``name`` leaves: what it raises, or the versions and the gradients' functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            returned, tensors = invoke(module, name, setting)
            finish(returned)
        except Exception as error:
            return type(error), str(error)
    return [version(tensor) for tensor in tensors], [tensor.grad_fn and tensor.grad_fn.name() for tensor in tensors]


def backward(module: Any, name: str, device: str = "cpu", **setting: Any) -> Any:
    """Return the gradients of a loss that saved what the call ``name`` was given, before the call, or its refusal.

    There is a loss for each tensor. Autograd compares versions: a tensor that was written to behind its back gives a
    wrong gradient, silently.
    """
    losses = []

    def save(tensor: torch.Tensor, _: bool) -> torch.Tensor:
        weight = torch.ones_like(tensor, requires_grad=True)
        losses.append((weight, (weight * tensor).sum()))
        return tensor

    outcome = seen(module, name, Made(device=device, hook=save, **setting))
    if isinstance(outcome[0], type):
        return outcome
    gradients = []
    for weight, loss in losses:
        try:
            loss.backward()
            gradients.append(weight.grad.flatten().tolist())
        except RuntimeError as error:
            gradients.append(str(error))
    return gradients


def differences(
    theirs: Any, ours: Any, device: str = "cpu", rows: tuple[str, ...] = ROWS, *, at_least: bool = False, **setting: Any
) -> list[tuple[Any, ...]]:
    """Return what differs between two modules: the row, what is compared, what each of them has.

    ``at_least``: ours may raise a version that torch leaves, and refuse a backward that is silently wrong there.
    """
    found = []
    for name in rows:
        expected, got = (seen(module, name, Made(device=device, **setting)) for module in (theirs, ours))
        higher = at_least and not isinstance(expected[0], type) and not isinstance(got[0], type)
        if expected != got and not (higher and expected[1] == got[1] and _not_lower(expected[0], got[0])):
            found.append((name, "versions", expected, got))
        refused = higher and expected != got
        expected, got = (backward(module, name, device, **setting) for module in (theirs, ours))
        if not _alike(expected, got, refused):
            found.append((name, "gradients", expected, got))
    return found


def _not_lower(expected: list[int | None], got: list[int | None]) -> bool:
    return all(ours == their or (their == 0 and ours > 0) for their, ours in zip(expected, got, strict=True))


def _close(ours: list[Any], their: list[Any]) -> bool:
    return len(ours) == len(their) and torch.allclose(torch.tensor(ours), torch.tensor(their), rtol=1e-5, atol=1e-12)


def _alike(expected: Any, got: Any, refused: bool) -> bool:
    """Return whether gradients are alike, and refusals the same; another order of a sum rounds elsewhere."""
    if isinstance(expected, tuple) or len(expected) != len(got):
        return bool(expected == got)
    return all(
        their == ours
        or (refused and isinstance(ours, str))
        or (not isinstance(their, str) and not isinstance(ours, str) and _close(ours, their))
        for their, ours in zip(expected, got, strict=True)
    )
