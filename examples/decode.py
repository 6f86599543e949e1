"""A decode loop: eager, in a CUDA graph, and in a CUDA graph with ``low_latency()``.

    torchrun --nproc-per-node 2 examples/decode.py    (or python examples/decode.py; --cpu)

A tensor-parallel model makes one token after the other. Each token is little work and many small all_reduces. In an
eager loop, launching kernels takes the time; in a graph, the ranks' waiting for each other does. ``safecomm.graph()``
captures a step with its collectives. Inside of ``low_latency()`` each small all_reduce is one kernel over the memory of
the other GPUs, in which each rank waits once.

The last line is the time of a token. On one rank there is nothing to communicate, and ``low_latency()`` says so: what
is left is what a graph saves. A CPU has no graphs, and gloo's groups stay as they are: there both loops are eager, and
the last line is the last token. ``low_latency()`` does not round as NCCL, so beyond two ranks tokens may differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from start import start

import safecomm as dist

TOKENS = 32


class Model:
    """An MLP of many layers, whose hidden features are divided among the ranks; every rank has the same token."""

    def __init__(self, device: torch.device) -> None:
        width, layers, dtype = (1024, 32, torch.bfloat16) if device.type == "cuda" else (64, 2, torch.float32)
        hidden = 4 * width // dist.get_world_size()

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype) / rows**0.5

        torch.manual_seed(0)
        self.embedding, self.head = weight(256, width) * 16, weight(width, 256)
        torch.manual_seed(1 + dist.get_rank())
        self.layers = [(weight(width, hidden), weight(hidden, width)) for _ in range(layers)]
        self.token = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> None:
        """Replace the token by the next one."""
        x = self.embedding[self.token]
        for up, down in self.layers:
            part = F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down
            dist.all_reduce(part)
            x = x + part
        self.token.copy_((x @ self.head).argmax(-1))

    def decode(self, step: Callable[[], None]) -> tuple[list[int], float]:
        """Return the tokens that ``step`` makes after token 0, and the microseconds of each."""
        for _ in range(2):  # The first pass makes workspaces and the communicator.
            self.token.zero_()
            dist.barrier()
            begun, tokens = time.perf_counter(), []
            for _ in range(TOKENS):
                step()
                tokens.append(self.token.clone())
            made = torch.cat(tokens).tolist()  # waits for the GPU
            taken = time.perf_counter() - begun
        return made, taken / TOKENS * 1e6

    def decode_in_a_graph(self) -> tuple[list[int], float]:
        """Return the same of a graph of one step, with its all_reduces in it."""
        graph = torch.cuda.CUDAGraph()
        with dist.graph(graph):
            self.step()
        decoded = self.decode(graph.replay)
        graph.reset()  # low_latency() can't be left, nor the group destroyed, while a graph has their kernels.
        return decoded


def main() -> int:
    device = start()
    model = Model(device)
    ways = {"eager": model.decode(model.step)}
    if device.type == "cuda":
        ways["CUDA graph"] = model.decode_in_a_graph()
    with dist.low_latency() as low:
        if device.type == "cpu":
            ways["eager in low_latency()"] = model.decode(model.step)
        elif not low.reason:
            ways["CUDA graph in low_latency()"] = model.decode_in_a_graph()

    (_, (tokens, before)), *_, (last, (others, after)) = ways.items()
    same = sum(one == other for one, other in zip(tokens, others, strict=True))
    if dist.get_rank() == 0:
        print("low_latency():", f"the group stays as it is: {low.reason}" if low.reason else "on")
        for way, (made, taken) in ways.items():
            print(f"{way}:", *([f"{taken:.0f} us a token,"] if device.type == "cuda" else []), f"tokens {made[:8]} ...")
        print(f"{same} of {TOKENS} tokens are the same")
        if device.type == "cuda":
            print(f"a token {before:.0f} us -> {after:.0f} us (eager -> {last})")
        else:
            print(f"last token {tokens[-1]} -> {others[-1]} (eager -> {last}; times and graphs need a GPU)")
    dist.destroy_process_group()
    return 0 if same == TOKENS or dist.get_world_size() > 2 else 1


if __name__ == "__main__":
    sys.exit(main())
