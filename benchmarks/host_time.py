"""Host time of one call, ours against stock, interleaved in one process.

    torchrun --nproc-per-node 2 benchmarks/host_time.py --out FILE [--kib 1024] [--only all_reduce broadcast]

Runs on NCCL where there are GPUs and on gloo where there are none. Each round times a burst of calls of one library
and then of the other, in turns, and the figure is the median over rounds of the ratio of the two, with its quartiles,
so that what else the machine does falls on both. Tensors of 1 KiB, or of ``--kib``; before each burst a few calls warm
up, and the device is synchronised between bursts, outside of the timing. On gloo the time is the CPU time of the
calling thread: the rest is mostly waiting for another thread to wake up.
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


def calls(library, device, group, kib):
    world, rank = stock.get_world_size(), stock.get_rank()
    full = torch.ones(256 * kib, device=device)
    part = torch.ones(256 * kib // world, device=device)
    parts = [torch.ones_like(part) for _ in range(world)]
    others = [torch.ones_like(part) for _ in range(world)]

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

    def reduce(async_op=False):
        return library.reduce(full, 0, async_op=async_op)

    def all_to_all_single_of_sizes(async_op=False):
        sizes = [part.numel()] * world
        return library.all_to_all_single(full, other, sizes, sizes, async_op=async_op)

    def all_gather(async_op=False):
        return library.all_gather(parts, part, async_op=async_op)

    def reduce_scatter(async_op=False):
        return library.reduce_scatter(part, parts, async_op=async_op)

    def all_to_all(async_op=False):
        return library.all_to_all(others, parts, async_op=async_op)

    def gather(async_op=False):
        return library.gather(part, None if rank else parts, 0, async_op=async_op)

    def scatter(async_op=False):
        return library.scatter(part, None if rank else parts, 0, async_op=async_op)

    def barrier(async_op=False):
        return library.barrier(async_op=async_op)

    def region_of_four(async_op=False):
        with library._coalescing_manager(async_ops=async_op) as region:
            for one in four:
                library.all_reduce(one)
        return region

    other = torch.ones_like(full)
    four = [torch.ones(64 * kib, device=device) for _ in range(4)]
    table = {}
    for call in (
        all_reduce,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_reduce_in_a_group,
        broadcast,
        reduce,
        all_to_all_single,
        all_to_all_single_of_sizes,
        all_gather,
        reduce_scatter,
        all_to_all,
        gather,
        scatter,
        barrier,
        region_of_four,
    ):
        if device.type == "cpu" and call is region_of_four:
            continue  # gloo has none
        table[f"{call.__name__}, sync"] = call
        table[f"{call.__name__}, async + wait"] = waited(call)
    return table


def burst(call, device):
    for _ in range(WARM):  # the turns evict each other's code and data from the caches, which a program does not
        call()
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    start = clock()
    for _ in range(BURST):
        call()
    seconds = clock() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return seconds / BURST * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kib", type=int, default=1)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = begin()
    results = {
        **setting(f"torchrun benchmarks/host_time.py --kib {arguments.kib}"),
        "unit": "us of host time a call (gloo: of CPU time), medians; ratio: median of the rounds' ratios",
        "rows": {},
    }
    group = stock.new_group()
    for where in ("default stream", "side stream") if device.type == "cuda" else ("cpu",):
        stream = torch.cuda.Stream() if where == "side stream" else None
        with torch.cuda.stream(stream):
            theirs, ours = (calls(library, device, group, arguments.kib) for library in (stock, safecomm))
            for name in theirs:
                if arguments.only and name.split(",")[0] not in arguments.only:
                    continue
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
