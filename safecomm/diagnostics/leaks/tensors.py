"""The tensors in what operations take and give, and the storage of each by its address."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from safecomm import _torch


def cdata_of_tensor(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``; 0 if it has none of its own."""
    try:
        return _torch.cdata_of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return 0


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
