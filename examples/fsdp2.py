"""FSDP2 with prefetch, with and without ``safecomm.patch()``: what safecomm does there, and what it does not.

    torchrun --nproc-per-node 2 examples/fsdp2.py    (or python examples/fsdp2.py; --cpu)

``fully_shard`` gathers a layer's weights on a stream of its own while the layer before computes, and scatters the
gradients on another one. The patch makes these collectives safecomm's, with not a line of the model edited. Expect the
same losses, bit for bit, and no less memory: FSDP2 keeps each buffer in a variable until the streams are in order, and
never calls ``record_stream``. What the patch is good for is the code around it that is not as careful, such as tensor
parallelism inside of the layers, and that safecomm can say which line holds how much (``memory_report()``).

The last line is the peak of memory above the sharded model, without and with. On a CPU, where that can't be seen, it is
the loss of the last step.
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.distributed as dist
from start import forget_peak, peak, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import safecomm

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    sys.exit(print("skipped: FSDP2 needs torch 2.6 or later"))

LAYERS, STEPS = 6, 5


def build(device: torch.device, features: int) -> nn.Sequential:
    """Return a model whose layers are divided among the ranks, and gather the weights of the next one ahead."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(*blocks).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded = [fully_shard(block, mesh=mesh) for block in blocks]
    fully_shard(model, mesh=mesh)
    for block, following in itertools.pairwise(sharded):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return model


def train(device: torch.device) -> tuple[list[float], str]:
    """Return the loss of each step, and the peak of memory above the model and its optimizer."""
    features, batch = (2048, 4096) if device.type == "cuda" else (16, 8)
    model = build(device, features)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = torch.randn(batch, features, device=device)
        if step == 1:  # The first step makes what stays.
            base = forget_peak(device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], peak(device, base)


def main() -> int:
    device = start()
    before, memory_before = train(device)
    with safecomm.patched(strict=True, avoid_record_streams=True):
        after, memory_after = train(device)
        bypassed = safecomm.bypassed()
    if dist.get_rank() == 0:
        print("losses:", "the same bit for bit" if before == after else "DIFFERENT", *(f"{loss:.4f}" for loss in after))
        print("collectives that went past safecomm:", bypassed or "none")
        print("still held by safecomm:", safecomm.pending() or "nothing")
        if device.type == "cuda":
            print(f"peak {memory_before} -> {memory_after} (FSDP2 -> FSDP2 under safecomm.patch())")
        else:
            print(
                f"loss {before[-1]:.4f} -> {after[-1]:.4f} (FSDP2 -> FSDP2 under safecomm.patch(); memory needs a GPU)"
            )
    dist.destroy_process_group()
    return 0 if before == after else 1


if __name__ == "__main__":
    sys.exit(main())
