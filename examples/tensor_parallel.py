"""A tensor-parallel MLP, trained for a few steps and checked against the same MLP on one rank.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Runs with NCCL if there is a GPU for each process, and with gloo on the CPU otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

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
        optimizer.step()
        steps.append([float(loss.detach()), float(x.grad.norm())])
    return steps


def main() -> int:
    """Train both, compare the losses, and return the exit status."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world and dist.is_nccl_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    generator = torch.Generator().manual_seed(0)
    up = torch.randn(HIDDEN, FEATURES, generator=generator).mul_(FEATURES**-0.5).to(device)
    down = torch.randn(FEATURES, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).to(device)
    batches = [torch.randn(BATCH, FEATURES, generator=generator).to(device) for _ in range(STEPS)]

    steps = train(sharded, up.chunk(world, 0)[rank], down.chunk(world, 1)[rank], batches)
    expected = train(whole, up, down, batches)
    right = torch.allclose(torch.tensor(steps), torch.tensor(expected), rtol=1e-3)
    if rank == 0:
        print(f"{world} ranks on {device.type}, losses:", " ".join(f"{loss:.4f}" for loss, _ in steps))
        print("as on one rank" if right else f"WRONG, on one rank they are {expected}")
        print("still held by safecomm:", dist.pending() or "nothing")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
