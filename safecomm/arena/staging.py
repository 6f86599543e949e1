"""Buffers for safecomm's own calls: from the arena in use, or ordinary memory where no arena is in use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from safecomm import _torch
from safecomm.arena.use import in_use


def buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory of ``shape``, with the type of ``like`` and on its device."""
    arena = in_use(_torch.index_of(like))
    if arena is None or 0 in shape:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return arena.empty(tuple(shape), dtype=like.dtype)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a contiguous copy of it; a copy, too, where a bit says that its memory is conjugated."""
    as_it_is = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor if as_it_is else buffer(tensor.shape, tensor).copy_(tensor)
