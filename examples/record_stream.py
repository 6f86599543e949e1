"""A side stream and record_stream, written by hand: what it costs, and two ways to get rid of it.

    torchrun --nproc-per-node 2 examples/record_stream.py    (or python examples/record_stream.py; --cpu)

Layers of a matrix product, each followed by an all_reduce on a stream of its own. ``record_stream`` tells the allocator
that the stream uses the memory; after that, freed memory comes back only when the host happens to see that the stream
got there. The host is far ahead of a GPU, so each layer takes new memory. The same layers run

1. as they were written by hand;
2. unedited, inside of ``safecomm.avoid_record_streams()``, which keeps the promise of record_stream in another way;
3. converted: ``async_op=True`` and ``wait()`` are all that the side stream was for, because NCCL has one itself.

The last line is the peak of memory, above weights and input, of 1 and of 3. A CPU has neither streams nor a caching
allocator: there the memory can't be seen, and the last line is a result, which all three share bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from start import forget_peak, peak, start

import safecomm as dist

LAYERS, ITERATIONS = 8, 5
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_hand(streams: Any) -> Layer:
    """Return a layer with a side stream; ``streams`` is torch.cuda, or torch.cpu, whose streams do nothing."""
    main, side = streams.current_stream(), streams.Stream()

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        side.wait_stream(main)
        with streams.stream(side):
            torch.distributed.all_reduce(y)
        if y.is_cuda:
            y.record_stream(side)
        main.wait_stream(side)
        return y

    return layer


def converted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what the other layer returns; what is to run meanwhile goes between the call and the wait."""
    y = torch.tanh(x @ weight)
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return y


def main() -> int:
    device = start()
    rows, columns, dtype = (4096, 8192, torch.bfloat16) if device.type == "cuda" else (32, 64, torch.float32)
    torch.manual_seed(0)
    weights = [torch.randn(columns, columns, device=device, dtype=dtype) / columns**0.5 for _ in range(LAYERS)]
    x = torch.randn(rows, columns, device=device, dtype=dtype)

    def measured(layer: Layer) -> tuple[torch.Tensor, str]:
        layer(x, weights[0])  # makes the communicator and the workspaces
        base = forget_peak(device)
        for _ in range(ITERATIONS):
            y = x
            for weight in weights:
                y = layer(y, weight)
        return y.cpu(), peak(device, base)

    layer = by_hand(getattr(torch, device.type))
    before, memory_before = measured(layer)
    with dist.avoid_record_streams() as avoided:
        unedited, memory_unedited = measured(layer)
    after, memory_after = measured(converted)

    same = torch.equal(before, unedited) and torch.equal(before, after)
    if dist.get_rank() == 0:
        print("results:", "the same bit for bit" if same else "DIFFERENT")
        print(f"unedited, in avoid_record_streams(): {avoided.calls} calls of record_stream, peak {memory_unedited}")
        if device.type == "cuda":
            print(f"peak {memory_before} -> {memory_after} (record_stream by hand -> safecomm)")
        else:
            print(f"sum {before.sum():.4f} -> {after.sum():.4f} (by hand -> safecomm; memory needs a GPU)")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
