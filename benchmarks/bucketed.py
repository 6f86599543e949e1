"""200 small all_reduces under bucketed(), against stock one by one and against stock's _coalescing_manager.

    torchrun --nproc-per-node 2 benchmarks/bucketed.py --out FILE

Tensors of 4 KiB to 256 KiB, seeded. The time is from the first call until the device is idle, medians of interleaved
rounds; the ratios are medians of the rounds' ratios.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time

import torch
import torch.distributed as stock

import safecomm

ROUNDS = 60


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    stock.init_process_group("nccl", device_id=device)
    draw = random.Random(1)
    tensors = [torch.ones(draw.randrange(1024, 65536 + 1), device="cuda") for _ in range(200)]

    def one_by_one():
        for tensor in tensors:
            stock.all_reduce(tensor)

    def coalesced():
        with stock.distributed_c10d._coalescing_manager(device=device):
            for tensor in tensors:
                stock.all_reduce(tensor)

    def bucketed():
        with safecomm.bucketed():
            for tensor in tensors:
                safecomm.all_reduce(tensor)

    def bucketed_small():
        with safecomm.bucketed(4):
            for tensor in tensors:
                safecomm.all_reduce(tensor)

    ways = {
        "stock, one by one": one_by_one,
        "stock, _coalescing_manager": coalesced,
        "bucketed()": bucketed,
        "bucketed(4)": bucketed_small,
    }
    times = {name: [] for name in ways}
    with safecomm.use_arena("256MiB"):
        for round_ in range(ROUNDS + 10):
            for name, way in ways.items() if round_ % 2 else reversed(ways.items()):
                for tensor in tensors:
                    tensor.fill_(1.0)
                stock.barrier()
                torch.cuda.synchronize()
                start = time.perf_counter()
                way()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - start) * 1e6)
                assert all(bool((tensor == stock.get_world_size()).all()) for tensor in tensors[:3])
    for values in times.values():
        del values[:10]
    rows = {name: {"us": round(statistics.median(values), 1)} for name, values in times.items()}
    for name in ("bucketed()", "bucketed(4)"):
        for other in ("stock, one by one", "stock, _coalescing_manager"):
            ratios = [a / b for a, b in zip(times[name], times[other], strict=True)]
            rows[name][f"ratio to {other}"] = round(statistics.median(ratios), 3)
    if local == 0:
        print(json.dumps(rows, indent=1))
        results = {
            "command": "torchrun benchmarks/bucketed.py",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "device": torch.cuda.get_device_name(),
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
