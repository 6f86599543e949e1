"""A transformer under torch's tensor parallelism (parallelize_module), with sequence parallel norms and residuals."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
width, layers, batch, length = (2048, 4, 4, 1024) if cuda else (32, 2, 2, 8)
head, dtype = (64, torch.bfloat16) if cuda else (8, torch.float32)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


mesh = init_device_mesh(device.type, (dist.get_world_size(),))
torch.manual_seed(1)
model = nn.Sequential(*(Layer() for _ in range(layers))).to(device, dtype)
gathered = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
plan = dict.fromkeys(("norm1", "norm2"), parallel.SequenceParallel()) | dict.fromkeys(("attention", "mlp"), gathered)
plan |= dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.up"), parallel.ColwiseParallel())
plan |= dict.fromkeys(("attention.out", "mlp.down"), parallel.RowwiseParallel(output_layouts=Shard(1)))
for layer in model:
    parallel.parallelize_module(layer, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

torch.manual_seed(7 + dist.get_rank())  # every rank has its part of the sequence
for _ in range(14):
    x = torch.randn(batch, length // mesh.size(), width, device=device, dtype=dtype)
    loss = (model(x) - x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
dist.destroy_process_group()
