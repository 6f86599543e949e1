"""Host time of one call, ours against stock, interleaved in one process.

    torchrun --nproc-per-node 2 benchmarks/host_time.py --out FILE

Runs on NCCL where there are GPUs and on gloo where there are none. Each round times a burst of calls of one library
and then of the other, in turns, and the figure is the median over rounds of the ratio of the two, so that what else
the machine does falls on both. 1 KiB tensors; before each burst a few calls warm up, and the device is synchronised
between bursts, outside of the timing.
"""

import argparse
import sys
import time
import warnings

import torch
import torch.distributed as stock
from measured import begin, row, setting, write

import safecomm

ROUNDS, BURST, WARM = 200, 50, 20


def calls(library, device, group):
    world = stock.get_world_size()
    full = torch.ones(256, device=device)
    part = torch.ones(256 // world, device=device)

    def waited(call):
        return lambda: call(async_op=True).wait()

    def all_reduce(async_op=False):
        return library.all_reduce(full, async_op=async_op)

    def all_gather_into_tensor(async_op=False):
        return library.all_gather_into_tensor(full, part, async_op=async_op)

    def reduce_scatter_tensor(async_op=False):
        return library.reduce_scatter_tensor(part, full, async_op=async_op)

    def all_reduce_in_a_group(async_op=False):
        return library.all_reduce(full, group=group, async_op=async_op)

    def broadcast(async_op=False):
        return library.broadcast(full, 0, async_op=async_op)

    def all_to_all_single(async_op=False):
        return library.all_to_all_single(full, other, async_op=async_op)

    other = torch.ones(256, device=device)
    table = {}
    for call in (
        all_reduce,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_reduce_in_a_group,
        broadcast,
        all_to_all_single,
    ):
        table[f"{call.__name__}, sync"] = call
        table[f"{call.__name__}, async + wait"] = waited(call)
    return table


def burst(call, device):
    for _ in range(WARM):  # the turns evict each other's code and data from the caches, which a program does not
        call()
    start = time.perf_counter()
    for _ in range(BURST):
        call()
    seconds = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return seconds / BURST * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = begin()
    results = {
        **setting("torchrun benchmarks/host_time.py"),
        "unit": "us of host time a call, medians; ratio: median of the rounds' ratios",
        "rows": {},
    }
    group = stock.new_group()
    for where in ("default stream", "side stream") if device.type == "cuda" else ("cpu",):
        stream = torch.cuda.Stream() if where == "side stream" else None
        with torch.cuda.stream(stream):
            theirs, ours = calls(stock, device, group), calls(safecomm, device, group)
            for name in theirs:
                times = {"stock": [], "safecomm": []}
                for round_ in range(arguments.rounds + 10):
                    order = [("stock", theirs[name]), ("safecomm", ours[name])]
                    for library, call in order if round_ % 2 else order[::-1]:
                        stock.barrier()
                        times[library].append(burst(call, device))
                for values in times.values():
                    del values[:10]  # warm-up
                found = results["rows"][f"{name}, {where}"] = row(times, 2)
                if stock.get_rank() == 0:
                    print(f"{name}, {where}:", found, flush=True)
    write(arguments.out, results)
    stock.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
