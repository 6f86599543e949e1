"""What record_memory() costs: a step of a tensor-parallel block with it on against off, interleaved in one process.

    torchrun --nproc-per-node 2 benchmarks/record_memory.py --out FILE

Runs on NCCL where there are GPUs and on gloo where there are none. A step is eight layers of a matmul and an
asynchronous all_reduce that is waited for. Rounds with and without a recording take turns, each with a barrier and an
idle device before it, and the figure is the median over rounds of the ratio of the two.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as stock
from measured import begin, setting, write

import safecomm

LAYERS = 8


def step(x, weights):
    for weight in weights:
        y = x @ weight
        safecomm.all_reduce(y, async_op=True).wait()
    return y


def timed(x, weights, steps):
    stock.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step(x, weights)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--cols", type=int)
    arguments = parser.parse_args()
    device = begin()
    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    rows, cols = arguments.rows or (4096 if cuda else 512), arguments.cols or (8192 if cuda else 512)
    dtype = torch.bfloat16 if cuda else torch.float32
    x = torch.full((rows, cols), 1e-3, device=device, dtype=dtype)
    weights = [torch.full((cols, cols), 1e-3, device=device, dtype=dtype) for _ in range(LAYERS)]
    times = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(arguments.rounds + 3):
            for name in ("off", "on") if round_ % 2 else ("on", "off"):
                if name == "on":
                    with safecomm.record_memory(f"{folder}/run.jsonl"):
                        times["on"].append(timed(x, weights, arguments.steps))
                else:
                    times["off"].append(timed(x, weights, arguments.steps))
    for values in times.values():
        del values[:3]  # warm-up
    ratios = [on / off for off, on in zip(times["off"], times["on"], strict=True)]
    results = {
        **setting("torchrun benchmarks/record_memory.py"),
        "step": f"{LAYERS} x ({rows} x {cols} @ {cols} x {cols}, all_reduce)",
        "unit": "ms a step, medians; ratio: median of the rounds' ratios",
        "off": round(statistics.median(times["off"]), 4),
        "on": round(statistics.median(times["on"]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    if stock.get_rank() == 0:
        print(json.dumps({key: value for key, value in results.items() if key != "ratios"}, indent=1), flush=True)
    write(arguments.out, results)
    safecomm.destroy_process_group()


if __name__ == "__main__":
    main()
