"""What has a right to live: parameters, gradients, buffers, and what optimizers and the like keep."""

from __future__ import annotations

import gc

import torch

from safecomm.diagnostics.leaks.tensors import cdata_of_tensor, tensors_in


def kept_by(owners: tuple[object, ...]) -> set[int]:
    """Return the storages of parameters, gradients, buffers, and of what optimizers and the like keep."""
    kept: set[int] = set()

    def keep(value: object) -> None:
        for tensor in tensors_in(value):
            kept.add(cdata_of_tensor(tensor))
            grad = tensor.grad if tensor.is_leaf else None
            if grad is not None:
                kept.add(cdata_of_tensor(grad))

    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.nn.Parameter):
            keep(thing)
        elif issubclass(kind, torch.nn.Module):
            keep(list(vars(thing).get("_buffers", {}).values()))
            keep(list(vars(thing).get("_parameters", {}).values()))
        elif issubclass(kind, (torch.optim.Optimizer, torch.amp.GradScaler)):
            keep(list(vars(thing).values()))
    for owner in owners:
        if not isinstance(owner, torch.nn.Module):
            keep(list(getattr(owner, "__dict__", {}).values()))
    kept.discard(0)
    return kept
