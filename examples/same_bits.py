"""A tensor-parallel layer whose output for a row has the same bits at batch 1, 7 and 64.

    torchrun --nproc-per-node 4 examples/same_bits.py    (or python examples/same_bits.py; --cpu)

A server batches what comes together, so a row of a request lies at another place, in a message of another size, each
time. For the same bits its matmuls must not depend on the batch: here each has tiles of 16 rows, whatever the batch.
And its all_reduce must not: NCCL and gloo choose the order in which they add by the size and the place. The last line
counts the values of the batch of 64 that differ from those at batch 1 or 7, without invariant() and inside of it. Two
ranks have one order, so that it takes three or more to see it.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from start import start

import safecomm as dist

FEATURES, TILE, BATCHES = 192, 16, (1, 7, 64)


def tiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.t()``, in tiles of as many rows, which a GEMM does in one way."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % TILE))
    return torch.cat([tile @ weight.t() for tile in padded.split(TILE)])[: len(x)]


def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return an MLP's output, of which this rank has a part of the weights."""
    y = tiled(torch.relu(tiled(x, up)), down)
    dist.all_reduce(y)
    return y


def by_batches(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the outputs of all rows of ``x``, so many at once."""
    return torch.cat([layer(rows, up, down) for rows in x.split(batch)])


def differing(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> int:
    """Return how many values of the largest batch differ from those of a smaller one."""
    whole = by_batches(x, up, down, len(x))
    return sum(int((by_batches(x, up, down, batch) != whole).sum()) for batch in BATCHES)


def in_a_graph(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the layer's output, replayed from a CUDA graph; on the CPU, eager."""
    if x.device.type == "cpu":
        return layer(x, up, down)
    layer(x, up, down)
    graph = torch.cuda.CUDAGraph()
    with dist.graph(graph):
        y = layer(x, up, down)
    graph.replay()
    return y.clone()


def main() -> int:
    """Count what differs, and return the exit status."""
    device = start()
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    hidden = 48 * world
    x = torch.randn(max(BATCHES), FEATURES, generator=generator).to(device)
    up = torch.randn(hidden, FEATURES, generator=generator).chunk(world, 0)[rank].to(device)
    down = torch.randn(FEATURES, hidden, generator=generator).chunk(world, 1)[rank].contiguous().to(device)

    found = []
    for context in (contextlib.nullcontext(), dist.invariant()):
        with context:
            found.append(differing(x, up, down))
    with dist.invariant():
        eager, graph = layer(x[:7], up, down), in_a_graph(x[:7], up, down)
    right = found[1] == 0 and torch.equal(eager, graph)
    if rank == 0:
        print("eager and in a graph:", "the same bits" if torch.equal(eager, graph) else "DIFFERENT bits")
        print(f"values that differ {found[0]} -> {found[1]} (as it is -> inside of invariant(), on {world})")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
