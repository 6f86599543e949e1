"""A tensor-parallel MLP, trained for a few steps and checked against the same MLP on one rank.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py    (or python examples/tensor_parallel.py; --cpu)

The backward of a column-parallel layer starts an all_reduce, computes another gradient meanwhile, and waits. Written
with ``torch.distributed`` it is the same but for one import. What it shows is that this is right: the last line is the
loss after the last step, of the whole MLP on one rank and of its parts. It shows no memory: its calls are on one stream
and are waited for, and that torch does well itself since 2.8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from start import start

import safecomm as dist  # the only line that differs from a program that uses torch.distributed

FEATURES, HIDDEN, BATCH, STEPS = 64, 256, 32, 5


class ColumnParallel(torch.autograd.Function):
    """A linear layer whose outputs are split over the ranks; the input is the same on each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, async_op=True)  # runs while the other gradient is computed
        grad_weight = grad.t() @ x
        work.wait()
        return grad_x, grad_weight


class RowParallel(torch.autograd.Function):
    """A linear layer whose inputs are split over the ranks; the output is summed, so that each rank has all of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def whole(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the MLP's output, from all of its weights."""
    return F.gelu(x @ up.t()) @ down.t()


def sharded(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the same from this rank's part of the weights."""
    y: torch.Tensor = RowParallel.apply(F.gelu(ColumnParallel.apply(x, up)), down)
    return y


def train(
    forward: Callable[..., torch.Tensor], up: torch.Tensor, down: torch.Tensor, batches: list[torch.Tensor]
) -> list[list[float]]:
    """Fit the MLP to its own input; return each step's loss and the norm of the input's gradient."""
    up, down = up.clone().requires_grad_(), down.clone().requires_grad_()
    optimizer = torch.optim.SGD([up, down], lr=2.0)
    steps = []
    for batch in batches:
        x = batch.clone().requires_grad_()  # as the output of a layer before it would
        loss = F.mse_loss(forward(x, up, down), batch)
        optimizer.zero_grad()
        loss.backward()
        assert x.grad is not None
        optimizer.step()
        steps.append([float(loss.detach()), float(x.grad.norm())])
    return steps


def main() -> int:
    """Train both, compare the losses, and return the exit status."""
    device = start()
    rank, world = dist.get_rank(), dist.get_world_size()

    generator = torch.Generator().manual_seed(0)
    up = torch.randn(HIDDEN, FEATURES, generator=generator).mul_(FEATURES**-0.5).to(device)
    down = torch.randn(FEATURES, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).to(device)
    batches = [torch.randn(BATCH, FEATURES, generator=generator).to(device) for _ in range(STEPS)]

    steps = train(sharded, up.chunk(world, 0)[rank], down.chunk(world, 1)[rank], batches)
    expected = train(whole, up, down, batches)
    right = torch.allclose(torch.tensor(steps), torch.tensor(expected), rtol=1e-3)
    if rank == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss, _ in steps))
        print("as on one rank" if right else f"WRONG, on one rank they are {expected}")
        print("still held by safecomm:", dist.pending() or "nothing")
        print(f"loss {expected[-1][0]:.4f} -> {steps[-1][0]:.4f} (the whole MLP on one rank -> its parts on {world})")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
