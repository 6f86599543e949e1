"""A mixture of experts: asynchronous all_to_all_single of ragged sizes, there and back, beside a shared expert."""

import os

import torch
import torch.distributed as dist
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
width, layers, tokens = (1024, 6, 4096) if cuda else (16, 2, 32)
dtype = torch.bfloat16 if cuda else torch.float32


class Exchange(torch.autograd.Function):
    """Rows to the ranks; the caller waits for what is appended to ``works``."""

    @staticmethod
    def forward(ctx, x, send, receive, works):
        ctx.send, ctx.receive = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        works.append(dist.all_to_all_single(out, x, receive, send, async_op=True))
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, async_op=True).wait()
        return out, None, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(width, dist.get_world_size())
        self.shared, self.own = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )

    def forward(self, x):
        weight, rank = self.router(x).softmax(-1).max(-1)
        order, works = rank.argsort(), []
        counts = rank.bincount(minlength=dist.get_world_size())
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        send, receive = counts.tolist(), received.tolist()
        there = Exchange.apply(x[order], send, receive, works)
        shared = x + self.shared(x)
        works.pop().wait()
        back = Exchange.apply(self.own(there), receive, send, works)
        works.pop().wait()
        return shared.index_add(0, order, back * weight[order, None])


torch.manual_seed(1)
model = nn.Sequential(*(Experts() for _ in range(layers))).to(device, dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

torch.manual_seed(7 + dist.get_rank())
for _ in range(14):
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    loss = (model(x) - x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())
dist.destroy_process_group()
