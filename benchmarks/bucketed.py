"""200 small all_reduces under bucketed(), against stock one by one and against stock's _coalescing_manager.

    torchrun --nproc-per-node 2 benchmarks/bucketed.py --out FILE

Tensors of 4 KiB to 256 KiB, seeded. The time is from the first call until the device is idle, on the slowest rank,
medians of interleaved rounds; the ratios are medians of the rounds' ratios. ``python -m safecomm tune`` runs the same.
"""

import argparse
import datetime
import json
import os
import statistics
import sys

import torch
import torch.distributed as stock

import safecomm
from safecomm.tune import MANAGER, ONE_BY_ONE, SIZES, measure, ways_of, workload


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(local)
    stock.init_process_group("nccl" if cuda else "gloo")
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
            "command": "torchrun benchmarks/bucketed.py",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "world": stock.get_world_size(),
            "date": datetime.date.today().isoformat(),
            "MiB in all": round(sum(tensor.nbytes for tensor in tensors) / (1 << 20), 1),
            "rows": rows,
        }
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
    stock.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
