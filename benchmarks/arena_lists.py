"""List forms with an arena in use against stock's: time on the device and peak memory.

    torchrun --nproc-per-node 2 benchmarks/arena_lists.py --out FILE

"slices": the list is the consecutive slices of one buffer. "pieces": each tensor is an allocation of its own, which
the ranks exchange inside of ``low_latency()``. Time is that of CUDA events around a burst
of calls, in turns, and the ratio is the median over rounds of the ratio of the two. Peak memory is what the caching
allocator hands out in one call beyond what was there before, and what the arena does.
"""

import argparse
import contextlib
import os
import sys

import torch
import torch.distributed as stock
from measured import row, setting, write

import safecomm

MIB = 1 << 20
ROUNDS, BURST = 40, 10


def programs(library, made, nbytes):
    world = stock.get_world_size()
    numel = nbytes // 2

    def lists():
        whole = torch.ones(world, numel, device="cuda", dtype=torch.bfloat16)
        return list(whole.unbind()) if made == "slices" else [one.clone() for one in whole]

    part = torch.ones(numel, device="cuda", dtype=torch.bfloat16)
    out, given = lists(), lists()
    result = torch.empty_like(part)
    return {
        "all_gather": lambda: library.all_gather(out, part),
        "reduce_scatter": lambda: library.reduce_scatter(result, given),
    }


def burst(call):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stock.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(BURST):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / BURST * 1e3


def compare(theirs, ours):
    times = {"stock": [], "safecomm": []}
    for round_ in range(ROUNDS + 5):
        order = [("stock", theirs), ("safecomm", ours)]
        for library, call in order if round_ % 2 else order[::-1]:
            times[library].append(burst(call))
    return {library: values[5:] for library, values in times.items()}


def peak(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    stock.init_process_group("nccl", device_id=torch.device("cuda", local))
    results = {
        **setting("torchrun benchmarks/arena_lists.py"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "unit": "us a call, medians; ratio: median of the rounds' ratios; MiB beyond what was there",
        "rows": {},
    }
    for size in (1, 4, 16, 64):
        for made, region in (("slices", False), ("pieces", True)):
            theirs, ours = programs(stock, made, size * MIB), programs(safecomm, made, size * MIB)
            for name in theirs:
                where = f"{name}, {size} MiB a rank, {made}{', low_latency()' if region else ''}"
                inside = safecomm.low_latency() if region else contextlib.nullcontext()
                with safecomm.use_arena(1 << 28) as arena, inside:
                    found = row(compare(theirs[name], ours[name]), 1)
                    torch.cuda.empty_cache()
                    found["stock MiB"] = peak(theirs[name]) / MIB
                    found["safecomm MiB"] = peak(ours[name]) / MIB
                    found["in the arena MiB"] = arena.stats().high_water / MIB
                results["rows"][where] = found
                if local == 0:
                    print(f"{where}:", found, flush=True)
            del theirs, ours
    write(arguments.out, results)
    stock.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
