"""invariant() against NCCL as it is, and pinned, in CUDA graphs with a kernel between the calls; and beside a GEMM.

    torchrun --nproc-per-node 2 benchmarks/invariance.py --out FILE
    NCCL_ALGO=Tree NCCL_PROTO=Simple NCCL_MAX_NCHANNELS=1 torchrun ... benchmarks/invariance.py --out FILE --pinned
    NCCL_P2P_DISABLE=1 torchrun ... benchmarks/invariance.py --out FILE --without-links

The first run is for the others' ratios. All calls of one size take turns, and what counts is the median of the slowest
rank. "moved" is a call of torch's own function inside of invariant(), which no kernel of low_latency() takes.
``--pinned`` times NCCL alone, as its variables make it; ``--without-links`` the moved form beside NCCL, where GPUs do
not reach each other's memory.
"""

import argparse
import contextlib
import functools
import json
from pathlib import Path

import torch
import torch.distributed as stock
from low_latency import beside
from measured import begin, setting, write

import safecomm
from safecomm.tools.tune_low_latency import NCCL, calls, prepare, slowest

OURS, MOVED, AGAIN = "invariant()", "invariant(), moved", "NCCL again"
SIZES = {"all_reduce": [1 << power for power in range(13, 29)], "reduce_scatter": [1 << p for p in range(13, 26, 3)]}
LARGE = 4 << 20


def in_graphs(device, rounds, kinds):
    """Return the us of the calls of ``kinds``, by collective and bytes."""
    tables = {}
    for collective, sizes in SIZES.items():
        rows = tables[collective] = {}
        for size in sizes:
            theirs, ours = calls(collective, size, torch.bfloat16, device)
            runs = {}
            for name in kinds:
                with safecomm.invariant() if name in (OURS, MOVED) else contextlib.nullcontext():
                    runs[name] = prepare(ours if name == OURS else theirs, device)
            us = slowest(runs, rounds if size < LARGE else min(rounds, 16), device)
            rows[size] = {name: round(took, 2) for name, took in us.items()}
            for name in kinds:
                if name not in (NCCL, AGAIN):
                    rows[size][f"ratio of {name}"] = round(us[name] / us[NCCL], 3)
            del runs, theirs, ours
    return tables


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--without-links", action="store_true")
    arguments = parser.parse_args()
    device = begin()
    results = json.loads(Path(arguments.out).read_text()) if Path(arguments.out).exists() else {}
    if arguments.pinned:
        results["us of NCCL, pinned"] = in_graphs(device, 8, (NCCL,))
    elif arguments.without_links:
        results["us without links"] = in_graphs(device, arguments.rounds, (NCCL, MOVED, AGAIN))
    else:
        results |= setting("torchrun benchmarks/invariance.py")
        with safecomm.low_latency() as on:
            results["low_latency()"] = on.reason or f"{on.nbytes} bytes of staging"
            results["us"] = in_graphs(device, arguments.rounds, (NCCL, OURS, MOVED, AGAIN))
            group = stock.new_group()
            with safecomm.invariant(group):
                results |= beside(device, arguments.rounds, functools.partial(safecomm.all_reduce, group=group))
    write(arguments.out, results)
    if not stock.get_rank():
        print(json.dumps(results)[:3000], flush=True)
    safecomm.destroy_process_group()


if __name__ == "__main__":
    main()
