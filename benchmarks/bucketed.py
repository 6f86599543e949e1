"""200 small all_reduces under bucketed(), against stock one by one and against stock's _coalescing_manager.

    torchrun --nproc-per-node 2 benchmarks/bucketed.py --out FILE

Tensors of 4 KiB to 256 KiB, seeded. The time is from the first call until the device is idle, on the slowest rank,
medians of interleaved rounds; the ratios are medians of the rounds' ratios. ``python -m safecomm tune`` runs the same.
"""

import argparse
import json
import statistics
import sys

import torch.distributed as stock
from measured import begin, setting, write

import safecomm
from safecomm.tools.tune import MANAGER, ONE_BY_ONE, SIZES, measure, ways_of, workload


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    device = begin()
    tensors = workload(device)
    with safecomm.use_arena("128MiB", device=device):
        times = measure(tensors, ways_of(tensors, SIZES), arguments.rounds, lambda _: None)
    rows = {}
    for name, values in times.items():
        rows[name] = {"us": round(statistics.median(values), 1)}
        for other in (ONE_BY_ONE, MANAGER):
            if name not in (ONE_BY_ONE, MANAGER):
                ratios = [one / two for one, two in zip(values, times[other], strict=True)]
                rows[name][f"ratio to {other}"] = round(statistics.median(ratios), 3)
    if stock.get_rank() == 0:
        print(json.dumps(rows, indent=1))
        results = {
            **setting("torchrun benchmarks/bucketed.py"),
            "MiB in all": round(sum(tensor.nbytes for tensor in tensors) / (1 << 20), 1),
            "rows": rows,
        }
        write(arguments.out, results)
    stock.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
