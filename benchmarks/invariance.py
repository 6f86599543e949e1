"""invariant() against NCCL as it is, and pinned, in CUDA graphs with a kernel between the calls; and beside GEMMs.

    torchrun --nproc-per-node 2 benchmarks/invariance.py --out FILE
    NCCL_ALGO=Tree NCCL_PROTO=Simple NCCL_MAX_NCHANNELS=1 torchrun ... benchmarks/invariance.py --out FILE --pinned
    NCCL_P2P_DISABLE=1 torchrun ... benchmarks/invariance.py --out FILE --without-links

The first run is for the others' ratios. All calls of one size take turns, and what counts is the median of the slowest
rank. "moved" is without low_latency(): NCCL moves, and torch adds. ``--pinned`` times NCCL alone, as its variables make
it; ``--without-links`` the moved form beside NCCL, where GPUs do not reach each other's memory. Beside GEMMs: one of
8192 cubed, as ``low_latency.py`` times it; and products in a row, an asynchronous all_reduce after every few, all of
them waited for at the end, as a backward makes them.
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
MIB = 1 << 20
SIZES = {"all_reduce": [1 << power for power in range(13, 29)], "reduce_scatter": [1 << p for p in range(13, 26, 3)]}
WITHOUT_LINKS = {"all_reduce": [1 << power for power in range(20, 27, 2)]}
LARGE = 4 * MIB
BACKWARDS = ((3, 4096, 12), (2, 8192, 6), (8, 2048, 12))  # products for each bucket, of that squared, and buckets
BUCKET = 25 * MIB  # as DDP's


def in_graphs(device, rounds, kinds, chosen=SIZES):
    """Return the us of the calls of ``kinds``, by collective and bytes."""
    tables = {}
    for collective, sizes in chosen.items():
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


def backward(device, rounds, ours):
    """Return the us of products in a row with NCCL's asynchronous all_reduces, and with ``ours``."""
    rows = {}
    for products, side, buckets in BACKWARDS:
        left, right, product = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(3))
        tensors = [torch.zeros(BUCKET // 2, device=device, dtype=torch.bfloat16) for _ in range(buckets)]

        def run(all_reduce, products=products, left=left, right=right, product=product, tensors=tensors):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(30_000_000)  # until then all that follows is launched, also on a slow host
            start.record()
            works = []
            for tensor in tensors:
                for _ in range(products):
                    torch.mm(left, right, out=product)
                if all_reduce is not None:
                    works.append(all_reduce(tensor, async_op=True))
            for work in works:
                work.wait()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3

        functions = {"products alone": None, NCCL: stock.all_reduce, "ours": ours, AGAIN: stock.all_reduce}
        us = slowest({name: functools.partial(run, one) for name, one in functions.items()}, rounds, device)
        name = f"{buckets} times {products} products of {side}^3 and 25 MiB"
        rows[name] = {name: round(took) for name, took in us.items()} | {"ratio": round(us["ours"] / us[NCCL], 3)}
    return rows


def beside_products(device, rounds, group):
    """Return what asynchronous all_reduces of ``group`` inside of invariant() do to products, and these to them."""
    with safecomm.invariant(group):
        ours = functools.partial(stock.all_reduce, group=group)
        return beside(device, rounds, ours) | {"us of products and buckets": backward(device, rounds, ours)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--without-links", action="store_true")
    arguments = parser.parse_args()
    device, rounds = begin(), arguments.rounds
    results = json.loads(Path(arguments.out).read_text()) if Path(arguments.out).exists() else {}
    group = stock.new_group()
    if arguments.pinned:  # a tree is NCCL's for all_reduce alone
        results["us of NCCL, pinned"] = in_graphs(device, 8, (NCCL,), {"all_reduce": SIZES["all_reduce"]})
    elif arguments.without_links:
        results["us without links"] = in_graphs(device, 8, (NCCL, MOVED, AGAIN), WITHOUT_LINKS)
        results["without links"] = beside_products(device, 8, group)
    else:
        results |= setting("torchrun benchmarks/invariance.py")
        with safecomm.low_latency() as on:
            results["low_latency()"] = on.reason or f"{on.nbytes} bytes of staging"
            results["us"] = in_graphs(device, rounds, (NCCL, OURS, AGAIN))
        results["us, moved"] = in_graphs(device, rounds, (NCCL, MOVED))
        with safecomm.low_latency(group):
            results["by kernels"] = beside_products(device, rounds, group)
        results["moved"] = beside_products(device, rounds, group)
    write(arguments.out, results)
    if not stock.get_rank():
        print(json.dumps(results)[:3000], flush=True)
    safecomm.destroy_process_group()


if __name__ == "__main__":
    main()
