"""A transformer under DistributedDataParallel, whose gradients a communication hook reduces in bfloat16."""

import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
width, layers, batch, length = (1024, 6, 8, 256) if cuda else (32, 3, 2, 8)

torch.manual_seed(1)
model = torch.nn.Sequential(
    *(
        torch.nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, dropout=0, batch_first=True)
        for _ in range(layers)
    )
).to(device)
model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=25)
hook = default_hooks.bf16_compress_hook if cuda else default_hooks.fp16_compress_hook  # gloo may only have the latter
model.register_comm_hook(dist.group.WORLD, hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

torch.manual_seed(7 + dist.get_rank())
for _ in range(14):
    x = torch.randn(batch, length, width, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = model(x)
    loss = (y.float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
dist.destroy_process_group()
