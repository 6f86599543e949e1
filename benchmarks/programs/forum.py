"""The forum's program: layers of a matmul and an all_reduce on a side stream, each result recorded there and dropped.

Memory that was recorded on another stream isn't reused before the GPU has passed its free there, and the host is ahead.
"""

import os

import torch
import torch.distributed as dist

import safecomm

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rows, width, layers = (4096, 8192, 24) if cuda else (16, 32, 4)
dtype = torch.bfloat16 if cuda else torch.float32
streams = torch.get_device_module(device)
main, side = streams.current_stream(), streams.Stream()

torch.manual_seed(0)
x = torch.randn(rows, width, device=device, dtype=dtype)
weight = torch.randn(width, width, device=device, dtype=dtype) / (width**0.5 * dist.get_world_size())

for _ in range(14):
    y = x
    for _ in range(layers):
        y = torch.matmul(y, weight)
        side.wait_stream(main)
        with streams.stream(side):
            dist.all_reduce(y, async_op=True).wait()
        if cuda:
            y.record_stream(side)
        main.wait_stream(side)
    result = float(y[:16].float().square().mean())
    del y
    safecomm.mark_step()
print("result", result)
dist.destroy_process_group()
