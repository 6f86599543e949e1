"""A transformer under FSDP2 (fully_shard), each layer of which prefetches two others, forwards and backwards."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
width, layers, batch, length = (1536, 6, 8, 256) if cuda else (32, 4, 2, 8)
AHEAD = 2

torch.manual_seed(1)
model = torch.nn.Sequential(
    *(
        torch.nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, dropout=0, batch_first=True)
        for _ in range(layers)
    )
).to(device)
bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
for layer in model:
    fully_shard(layer, mp_policy=bf16)
fully_shard(model, mp_policy=bf16)
chain = list(model)
for i, layer in enumerate(chain):
    layer.set_modules_to_forward_prefetch(chain[i + 1 : i + 1 + AHEAD])
    layer.set_modules_to_backward_prefetch(chain[max(0, i - AHEAD) : i][::-1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

torch.manual_seed(7 + dist.get_rank())
for _ in range(14):
    x = torch.randn(batch, length, width, device=device)
    loss = (model(x).float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
dist.destroy_process_group()
