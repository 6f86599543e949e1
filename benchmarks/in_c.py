"""Host time of calls whose questions are asked in C, and by ctypes, beside torch's own, interleaved in one process.

    torchrun --nproc-per-node 2 benchmarks/in_c.py --out FILE [--rounds 60] [--kib 4096]

Needs GPUs, and safecomm built with its C file. *Warm*: calls in a loop. *Cold*: one call after 4 MiB of other
memory were read, as between the calls of a program. Tensors are too large for a segment that has an anchor, so that the
driver is asked. Ratios are medians over rounds, with quartiles.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as stock
from host_time import calls
from measured import begin, setting, write

import safecomm
from safecomm._torch import native, segment_table, streams
from safecomm.collectives import coalesced, gates, holding, lists, takers, tensors
from safecomm.core.allocation import Allocations
from safecomm.core.ledger import LEDGER

NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce", "all_to_all_single")
BURST = 30


def ask_by(found, is_capturing):
    """Let all calls ask ``found``."""
    for module in (coalesced, gates, holding, lists, takers, tensors):
        for name in ("alloc_stream", "all_allocated_on"):
            if hasattr(module, f"_{name}"):
                setattr(module, f"_{name}", getattr(found, name))
    LEDGER.streams.alloc_stream, LEDGER.streams.all_allocated_on = found.alloc_stream, found.all_allocated_on
    LEDGER.streams.is_capturing = is_capturing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kib", type=int, default=4096)
    arguments = parser.parse_args()
    device = begin()
    if native.WHY_CTYPES and device.type == "cuda":
        sys.exit(f"nothing asks in C here, because {native.WHY_CTYPES}")
    by = {
        "C": (Allocations(), native.is_capturing),
        "ctypes": (Allocations(segment_table.SegmentTable), streams.is_capturing),
    }
    group = stock.new_group()
    made = {
        "stock": calls(stock, device, group, arguments.kib),
        "safecomm": calls(safecomm, device, group, arguments.kib),
    }
    walked = torch.ones(1 << 20)
    results = {
        **setting(f"torchrun benchmarks/in_c.py --kib {arguments.kib}"),
        "unit": "us of host time a call, medians; ratios: medians of the rounds' ratios, with quartiles",
        "rows": {},
    }

    def burst(call):
        for _ in range(10):
            call()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        return (time.perf_counter() - start) / BURST * 1e6

    def single(call):
        walked.sum()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    torch.set_num_threads(1)
    for name in [f"{one}, {how}" for one in NAMES for how in ("sync", "async + wait")]:
        for cold in (False, True):
            times = {"stock": [], "ctypes": [], "C": []}
            for turn in range(arguments.rounds + 5):
                order = list(times)[turn % 3 :] + list(times)[: turn % 3]
                for way in order:
                    if way != "stock":
                        ask_by(*by[way])
                    call = made["stock" if way == "stock" else "safecomm"][name]
                    stock.barrier()
                    taken = statistics.median(single(call) for _ in range(9)) if cold else burst(call)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    if turn >= 5:
                        times[way].append(taken)

            def ratio(over, under, times=times):
                ratios = [one / other for one, other in zip(times[over], times[under], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                return {"ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}

            found = {way: round(statistics.median(values), 2) for way, values in times.items()}
            found |= {"C to ctypes": ratio("C", "ctypes"), "C to stock": ratio("C", "stock")}
            found["ctypes to stock"] = ratio("ctypes", "stock")
            results["rows"][f"{name}, {'cold' if cold else 'warm'}"] = found
            if stock.get_rank() == 0:
                print(name, "cold" if cold else "warm", found, flush=True)
            write(arguments.out, results)
    stock.destroy_process_group()


if __name__ == "__main__":
    main()
