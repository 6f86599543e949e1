"""A leak hunt: memory grows from step to step, and ``leaks.watch()`` finds the line that keeps it.

    torchrun --nproc-per-node 2 examples/leak_hunt.py    (or python examples/leak_hunt.py; --cpu)

A layer that has its weight in parts, one on each rank, gathers it for the forward and needs it in the backward. It was
written in a hurry: an attribute of ``ctx`` instead of ``save_for_backward``. When backward is over, autograd drops what
``save_for_backward`` kept; of attributes it does not know. And the loop keeps its losses, each with its graph, for a
plot. So every weight that was ever gathered stays, and a snapshot of the memory would only say who allocated it.

The last line is what four steps leave behind, before and after both lines are fixed. It is the same on a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from start import start

import safecomm as dist
from safecomm import functional, leaks

FEATURES, STEPS = 256, 4


class Gathered(torch.autograd.Function):
    """``x @ weight``, where each rank has a part of the weight's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor, fixed: bool) -> torch.Tensor:
        weight = functional.all_gather(part)
        if fixed:
            ctx.save_for_backward(x, weight)
        else:
            ctx.tensors = x, weight  # the line to be found
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors or ctx.tensors
        return grad @ weight.t(), functional.reduce_scatter(x.t() @ grad), None


class Layer(torch.nn.Module):
    """A layer of which this rank has a part."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.part = torch.nn.Parameter(torch.randn(FEATURES // dist.get_world_size(), FEATURES) / FEATURES**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gathered.apply(x, self.part, self.fixed)


def train(device: torch.device, *, fixed: bool) -> leaks.watch:
    """Take four steps, and return what watched them."""
    model = Layer(fixed=fixed).to(device)
    losses: list[Any] = []  # for a plot
    with leaks.watch(model, log_leaks=False) as watched:
        for _ in range(STEPS):
            loss = model(torch.randn(32, FEATURES, device=device)).square().mean()
            loss.backward()
            losses.append(loss.item() if fixed else loss)
    return watched


def main() -> int:
    device = start()
    before, after = train(device, fixed=False), train(device, fixed=True)
    kept_before, kept_after = (sum(leak.nbytes for leak in watched.leaks) // 1024 for watched in (before, after))
    if dist.get_rank() == 0:
        print(before)
        print("still held by safecomm:", dist.pending() or "nothing")
        print(f"leaked {kept_before} KiB -> {kept_after} KiB (attributes of ctx -> save_for_backward)")
    dist.destroy_process_group()
    return 0 if kept_before > 0 == kept_after else 1


if __name__ == "__main__":
    sys.exit(main())
