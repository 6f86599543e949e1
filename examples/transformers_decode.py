"""Decoding with Hugging Face transformers on several GPUs: CUDA graphs, with and without ``low_latency()``.

    torchrun --nproc-per-node 2 examples/transformers_decode.py    (--cpu; needs transformers 5.16 or later)

A Llama with random weights and the layers of Llama 3.2 1B is divided among the ranks, as ``from_pretrained(...)`` with
``tp_plan="auto"`` does it with one that is on disk. Nothing of transformers is edited: ``patched()`` makes the
``all_reduce`` that its layers call safecomm's, what compiled code and DTensor call are operators of torch, and inside
of ``low_latency()`` all of them are kernels over the memory of the other GPUs.

The last line is the time of a token in a CUDA graph. A CPU has no graphs, and gloo's groups stay as they are: there
both loops are eager, and the last line is the last token. ``low_latency()`` does not round as NCCL, so tokens may
differ.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from start import start

import safecomm

try:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
    from transformers.distributed.configuration_utils import DistributedConfig

    parallel = LlamaForCausalLM.prepare_distribute_model, LlamaForCausalLM.maybe_distribute_model
except (ImportError, AttributeError):
    print("skipped: needs transformers 5.16 or later")
    sys.exit()

TOKENS = 32
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
LAYERS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "vocab_size": 32_000,
    **HEADS,
}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class Decoder:
    """The model, its cache, and the token that it makes the next one of."""

    def __init__(self, device: torch.device) -> None:
        llama = LlamaConfig(max_position_embeddings=64, **(LAYERS if device.type == "cuda" else SMALL))
        prepare, distribute = parallel
        config, _, mesh = prepare(DistributedConfig(tp_size=dist.get_world_size()))
        torch.manual_seed(0)
        with device:
            model = LlamaForCausalLM(llama).eval()
            # Torch's own to(): the one of transformers has no types.
            torch.nn.Module.to(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
            self.model: Any = distribute(model, config, mesh)
        self.compiled: Any = torch.compile(self.model) if device.type == "cuda" else None
        self.cache = StaticCache(config=llama, max_cache_len=64)
        self.place = torch.arange(64, device=device)
        self.token = torch.ones(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.word = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def step(self, model: Any) -> None:
        """Replace the token by the next one."""
        mask = (self.place <= self.position).view(1, 1, 1, -1)
        where = {"position_ids": self.position[None], "cache_position": self.position, self.word: self.cache}
        logits = model(self.token, attention_mask=mask, use_cache=True, **where).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)

    @torch.no_grad()
    def decode(self, step: Callable[[], None]) -> tuple[list[int], float]:
        """Return the tokens that ``step`` makes after token 1, and the microseconds of each."""
        for _ in range(2):  # The first pass makes workspaces, compiles, and connects the ranks.
            self.cache.reset()
            self.token.fill_(1)
            self.position.zero_()
            dist.barrier()
            begun, tokens = time.perf_counter(), []
            for _ in range(TOKENS):
                step()
                tokens.append(self.token.clone())
            made = torch.cat(tokens).flatten().tolist()  # waits for the GPU
            taken = time.perf_counter() - begun
        return made, taken / TOKENS * 1e6

    @torch.no_grad()
    def decode_in_a_graph(self, model: Any) -> tuple[list[int], float]:
        """Return the same of a graph of one step, with its collectives in it."""
        self.decode(lambda: self.step(model))
        self.cache.reset()
        graph = torch.cuda.CUDAGraph()
        with safecomm.graph(graph):
            self.step(model)
        decoded = self.decode(graph.replay)
        graph.reset()
        return decoded

    def ways(self, where: str) -> dict[str, tuple[list[int], float]]:
        """Return what is made and how long a token takes, by the way to make it."""
        if not self.token.is_cuda:
            return {f"eager{where}": self.decode(lambda: self.step(self.model))}
        return {
            f"compiled, CUDA graph{where}": self.decode_in_a_graph(self.compiled),
            f"CUDA graph{where}": self.decode_in_a_graph(self.model),
        }


def main() -> int:
    device = start()
    if dist.get_world_size() == 1:
        print("skipped: a model on one rank has no collectives; use torchrun --nproc-per-node 2")
        dist.destroy_process_group()
        return 0
    decoder = Decoder(device)
    ways = decoder.ways("")
    with safecomm.patched(), safecomm.low_latency() as low:
        ways |= decoder.ways(" in low_latency()")
        reason, calls = low.reason, low.calls
        torch.compiler.reset()

    before, after = list(ways)[len(ways) // 2 - 1], list(ways)[-1]
    (tokens, slow), (others, fast) = ways[before], ways[after]
    same = sum(one == other for one, other in zip(tokens, others, strict=True))
    if dist.get_rank() == 0:
        print("low_latency():", f"the group stays as it is: {reason}" if reason else f"on, {calls} calls")
        for way, (made, taken) in ways.items():
            print(f"{way}:", *([f"{taken:.0f} us a token,"] if device.type == "cuda" else []), f"tokens {made[:8]} ...")
        print(f"{same} of {TOKENS} tokens are the same")
        if device.type == "cuda":
            print(f"a token {slow:.0f} us -> {fast:.0f} us ({before} -> {after})")
        else:
            print(f"last token {tokens[-1]} -> {others[-1]} ({before} -> {after}; times and graphs need a GPU)")
    dist.destroy_process_group()
    return 0 if reason == "" or same == TOKENS else 1


if __name__ == "__main__":
    sys.exit(main())
