"""Weights gathered one layer ahead: asynchronous all_gather_into_tensor on a side stream, recorded on the main one."""

import os

import torch
import torch.distributed as dist

import safecomm

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.get_device_module(device).set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rows, width, layers = (16384, 4096, 24) if cuda else (16, 32, 4)
dtype = torch.bfloat16 if cuda else torch.float32
world = dist.get_world_size()
streams = torch.get_device_module(device)
main, side = streams.current_stream(), streams.Stream()

torch.manual_seed(0)
x = torch.randn(rows, width, device=device, dtype=dtype)
torch.manual_seed(1 + dist.get_rank())
shards = [torch.randn(width // world, width, device=device, dtype=dtype) / width**0.5 for _ in range(layers)]


def gather(layer):
    """Begin to gather a layer's weight. The output is the side stream's memory, and the main one's to use."""
    side.wait_stream(main)
    with streams.stream(side):
        weight = torch.empty(width, width, device=device, dtype=dtype)
        return weight, dist.all_gather_into_tensor(weight, shards[layer], async_op=True)


for _ in range(14):
    y, ahead = x, gather(0)
    for layer in range(layers):
        weight, work = ahead
        ahead = gather(layer + 1) if layer + 1 < layers else None
        with streams.stream(side):
            work.wait()
            gathered = side.record_event() if cuda else None
        if cuda:
            main.wait_event(gathered)
            weight.record_stream(main)
        y = torch.matmul(y, weight)
        del weight, work
    result = float(y[:16].float().square().mean())
    del y
    safecomm.mark_step()
print("result", result)
dist.destroy_process_group()
