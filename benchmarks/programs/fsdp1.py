"""A transformer under FSDP1, prefetching forwards and backwards, with as many all-gathers in flight as it likes."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
width, layers, batch, length = (1536, 6, 8, 256) if cuda else (32, 3, 2, 8)
Layer = torch.nn.TransformerEncoderLayer

torch.manual_seed(1)
model = torch.nn.Sequential(
    *(Layer(width, width // 64 or 1, 4 * width, dropout=0, batch_first=True) for _ in range(layers))
)
model = FullyShardedDataParallel(
    model.to(device),
    auto_wrap_policy=ModuleWrapPolicy({Layer}),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if cuda else None,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch=True,
    limit_all_gathers=False,
    device_id=device if cuda else None,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

torch.manual_seed(7 + dist.get_rank())
for _ in range(14):
    x = torch.randn(batch, length, width, device=device)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
dist.destroy_process_group()
