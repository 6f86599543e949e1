"""Operations on lists of tensors, in one call or a few kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from safecomm._torch.modes import probing
from safecomm._torch.names import look_up


def _unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _copy_all(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for one, other in zip(to, source, strict=True):
        one.copy_(other)


def _unflattens(found: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]]) -> bool:
    with probing():
        like = [torch.empty(2, 1, device="cpu"), torch.empty(3, device="cpu")]
        parts = found(torch.empty(5, device="cpu"), like)
        return [(part.shape, part.storage_offset()) for part in parts] == [((2, 1), 0), ((3,), 2)]


def _copies_all(found: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]) -> bool:
    with probing():
        to, source = torch.zeros(3, device="cpu"), torch.ones(3, device="cpu")
        found([to[:1], to[2:]], [source[:1], source[2:]])
        return to.tolist() == [1, 0, 1]


unflatten: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = look_up(
    "torch._C._nn.unflatten_dense_tensors", _unflatten, "bucketed() takes 2 us more for each tensor", _unflattens
)
"""Return consecutive parts of a flat tensor, shaped like those of a list."""

copy_all: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = look_up(
    "torch._foreach_copy_", _copy_all, "bucketed() copies tensors one by one, a kernel each", _copies_all
)
"""Copy a list of tensors into another one, by a few kernels in place of one for each tensor."""
