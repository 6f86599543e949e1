"""Buffers of safecomm's own calls: from the arena in use, or ordinary memory where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from safecomm.arena.use import in_use


def buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory of ``shape``, with the type of ``like`` and on its device."""
    arena = in_use(like.get_device())
    if arena is None or 0 in shape:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return arena.empty(tuple(shape), dtype=like.dtype)  # type: ignore[no-any-return]


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a contiguous copy of it."""
    return tensor if tensor.is_contiguous() else buffer(tensor.shape, tensor).copy_(tensor)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the one tensor that ``tensors`` are the slices of, in their order along a new first dimension, or None.

    They are when all are contiguous, of one shape and type, and follow each other in one storage.
    """
    first = tensors[0]
    numel, offset = first.numel(), first.storage_offset()
    storage = first.untyped_storage()
    pointer = storage.data_ptr()
    for place, tensor in enumerate(tensors):
        if (
            tensor.shape != first.shape
            or tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != pointer
            or tensor.storage_offset() != offset + place * numel
        ):
            return None
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    return whole.set_(storage, offset, (len(tensors), *first.shape))  # type: ignore[call-overload, no-any-return]
