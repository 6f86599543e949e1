"""Tensor parallelism of Hugging Face transformers under ``safecomm.patch()``: which of its collectives are safecomm's.

    torchrun --nproc-per-node 2 examples/transformers_tp.py    (--cpu; needs transformers 5.16 or later)

A small Llama with random weights is divided among the ranks, as ``from_pretrained(..., distributed_config=...)`` does
it with one that is on disk. For each forward transformers calls ``all_reduce`` twice a layer, and the patch makes these
calls safecomm's. What transformers leaves to DTensor goes past safecomm: the embedding, the head, and in training all.
The logits are the same bit for bit. Expect no less memory: all of it is on one stream, which torch does well itself
since 2.8. What the patch is good for: these all_reduces are safe on side streams and in ``safecomm.graph()``, and
``low_latency()`` takes them.

The last line is how many collectives of a forward are safecomm's, the same on GPUs and on the CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from start import forget_peak, peak, start
from torch.profiler import ProfilerActivity, profile

import safecomm

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    parallel = LlamaForCausalLM.prepare_distribute_model, LlamaForCausalLM.maybe_distribute_model
except (ImportError, AttributeError):
    print("skipped: needs transformers 5.16 or later")
    sys.exit()

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGER: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
}


def main() -> int:
    device = start()
    world = dist.get_world_size()
    if world == 1:
        print("skipped: a model on one rank has no collectives; use torchrun --nproc-per-node 2")
        dist.destroy_process_group()
        return 0
    llama = LlamaConfig(vocab_size=512, max_position_embeddings=512, **(LARGER if device.type == "cuda" else SMALL))
    prepare, distribute = parallel
    config, _, mesh = prepare(DistributedConfig(tp_size=world))
    torch.manual_seed(0)
    with device:
        model = distribute(LlamaForCausalLM(llama).eval(), config, mesh)
    tokens = torch.arange(256, device=device).view(1, -1)

    @torch.no_grad()
    def forward() -> tuple[torch.Tensor, str, list[str]]:
        base = forget_peak(device)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            logits = model(tokens).logits
        return logits.cpu(), peak(device, base), [event.name for event in profiled.events() or ()]

    forward()
    before, memory_before, names = forward()
    collectives = sum(name.startswith(f"{dist.get_backend()}:") for name in names)
    with safecomm.patched():
        after, memory_after, names = forward()
    ours = sum(name.startswith("safecomm::") for name in names)

    same = torch.equal(before, after)
    if dist.get_rank() == 0:
        print("logits:", "the same bit for bit" if same else "DIFFERENT")
        print(f"peak of a forward: {memory_before}, patched {memory_after}")
        print("still held by safecomm:", safecomm.pending() or "nothing")
        print(f"by safecomm 0 -> {ours} of {collectives} collectives (transformers -> under safecomm.patch())")
    dist.destroy_process_group()
    return 0 if same and ours else 1


if __name__ == "__main__":
    sys.exit(main())
