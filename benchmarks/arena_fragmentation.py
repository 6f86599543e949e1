"""Memory lost to fragmentation in 300 steps whose sequence length changes every step: arena against none.

    python benchmarks/arena_fragmentation.py --out FILE [--ranks 2] [--programs tiled recompute keep]

Starts one torchrun for each program, and combination of arena or none and allocator settings, because the settings are
read once a process. The programs are the same: layers with sequence parallelism, of which each gathers its input,
multiplies, and scatters its output, and a backward that goes the same way back. They differ in what else changes its
size with the length. "tiled" works on 2048 tokens at a time, holds only the inputs of the layers, which were scattered,
and computes the rest again: nothing does but the buffers of the communication. "recompute" is that without tiles, so
that the activations inside of a layer do; "keep" holds those to the backward. With "arena" the buffers of the
communication, what is gathered and what is scattered, come from an arena whose size passes over all lengths have found
to be enough. "overhead" is the peak of what is reserved, minus the peak of what the program has in use without an
arena. An existing FILE keeps the programs that are not run again.
"""

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as stock

import safecomm

MIB = 1 << 20
SETTINGS = {"default": "", "expandable": "expandable_segments:True"}
TILE = 2048
LENGTHS = [512 * n for n in range(1, 33)]
PROGRAMS = ("tiled", "recompute", "keep")


def step(length, weights, library, program):
    """One forward and backward for sequences of ``length``; all buffers of the communication come from empty()."""
    world = stock.get_world_size()
    hidden = weights[0][0].shape[0]
    dtype = torch.bfloat16
    gather = getattr(library, "all_gather_single", library.all_gather_into_tensor)
    scatter = getattr(library, "reduce_scatter_single", library.reduce_scatter_tensor)

    def gathered(x):
        whole = safecomm.empty(length, hidden, dtype=dtype, device="cuda")
        gather(whole, x)
        return whole

    def scattered(product):
        x = safecomm.empty(length // world, hidden, dtype=dtype, device="cuda")
        scatter(x, product)
        return x

    def tiles(*tensors):
        return zip(*[tensor.split(TILE) for tensor in tensors], strict=True)

    def forward(x, first, second):
        """Return what is to be scattered, and what is kept for the backward."""
        if program != "tiled":
            inner = torch.nn.functional.gelu(gathered(x) @ first)
            return inner @ second, None if program == "recompute" else inner
        whole = gathered(x)
        product = safecomm.empty(length, hidden, dtype=dtype, device="cuda")
        for tile, out in tiles(whole, product):
            torch.mm(torch.nn.functional.gelu(tile @ first), second, out=out)
        return product, None

    def backward(x, kept, inner, first, second):
        """Return what is to be scattered."""
        if program != "tiled":
            if inner is None:
                inner = torch.nn.functional.gelu(gathered(kept) @ first)
            gradient = gathered(x) @ second.T
            gradient *= inner
            return gradient @ first.T
        whole, gradient = gathered(kept), gathered(x)
        product = safecomm.empty(length, hidden, dtype=dtype, device="cuda")
        for tile, other, out in tiles(whole, gradient, product):
            torch.mm(torch.nn.functional.gelu(tile @ first) * (other @ second.T), first.T, out=out)
        return product

    x = safecomm.empty(length // world, hidden, dtype=dtype, device="cuda").fill_(1)
    saved = []
    for first, second in weights:
        product, inner = forward(x, first, second)
        saved.append((x, inner))
        x = scattered(product)
        del product, inner
    for first, second in reversed(weights):
        kept, inner = saved.pop()
        product = backward(x, kept, inner, first, second)
        x = scattered(product)
        del product, inner, kept


def enough(lengths, weights, program):
    """Return the bytes of an arena in which steps of these lengths find room on all ranks, by trial."""
    nbytes, lacking = MIB, True
    while lacking:
        with safecomm.use_arena(nbytes) as arena:
            for length in lengths:
                step(length, weights, safecomm, program)
            torch.cuda.synchronize()
            stats = arena.stats()
        torch.cuda.empty_cache()
        found = torch.tensor([stats.fallbacks, stats.enough], device="cuda")
        stock.all_reduce(found, stock.ReduceOp.MAX)
        lacking, nbytes = found.tolist()
    return nbytes


def run(way, program, out):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    stock.init_process_group("nccl", device_id=torch.device("cuda", local))
    world = stock.get_world_size()
    hidden, layers = 2048, 24
    weights = [
        (
            torch.zeros(hidden, 4 * hidden // world, device="cuda", dtype=torch.bfloat16),
            torch.zeros(4 * hidden // world, hidden, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(2)
    ] * (layers // 2)  # what the weights take is no matter here
    draw = random.Random(5)
    order = [draw.choice(LENGTHS) for _ in range(300)]
    step(512, weights, safecomm, program)
    arena = None
    if way == "arena":
        lengths = sorted(set(order)) * 3
        random.Random(6).shuffle(lengths)
        arena = safecomm.Arena(enough(lengths, weights, program))
        safecomm.use_arena(arena).__enter__()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_stats()
    library = stock if way == "stock" else safecomm
    for length in order:
        step(length, weights, library, program)
    torch.cuda.synchronize()
    end = torch.cuda.memory_stats()
    if local == 0:
        figures = {
            "reserved peak": end["reserved_bytes.all.peak"],
            "allocated peak": end["allocated_bytes.all.peak"],
            "arena": 0 if arena is None else arena.nbytes,
            "fallbacks": 0 if arena is None else arena.stats().fallbacks,
            "cudaMalloc": end.get("num_device_alloc", 0) - start.get("num_device_alloc", 0),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
        }
        Path(out).write_text(json.dumps(figures))
    stock.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", nargs="*", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--way", choices=("stock", "arena"), help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.way:
        run(arguments.way, *arguments.programs, arguments.out)
        return
    out = Path(arguments.out)
    results = json.loads(out.read_text()) if out.exists() else {"programs": {}}
    for program in arguments.programs:
        found = measure(program, arguments.ranks)
        rows = {}
        for name, figures in found.items():
            # The same program has the same in use, whoever hands it out: what stock's allocator counts.
            in_use = found["stock, default"]["allocated peak"]
            rows[name] = {
                "reserved MiB": figures["reserved peak"] // MIB,
                "in use MiB": in_use // MIB,
                "overhead MiB": (figures["reserved peak"] - in_use) // MIB,
                "arena MiB": figures["arena"] // MIB,
                "fallbacks": figures["fallbacks"],
                "cudaMalloc": figures["cudaMalloc"],
            }
            print(program, name, rows[name], flush=True)
        results |= {
            "command": "python benchmarks/arena_fragmentation.py",
            "torch": found["stock, default"]["torch"],
            "device": found["stock, default"]["device"],
            "ranks": arguments.ranks,
            "date": datetime.date.today().isoformat(),
        }
        results["programs"][program] = rows
        out.write_text(json.dumps(results, indent=1) + "\n")


def measure(program, ranks):
    """Run ``program`` in each way, in processes of their own."""
    found = {}
    for name, setting in SETTINGS.items():
        for way in ("stock", "arena"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "figures.json"
                # Without what torchrun sets, if this runs under one.
                theirs = ("TORCHELASTIC", "MASTER_", "GROUP_", "ROLE_", "RANK", "LOCAL_", "WORLD_SIZE", "OMP_")
                environment = {key: value for key, value in os.environ.items() if not key.startswith(theirs)}
                environment["PYTORCH_CUDA_ALLOC_CONF"] = setting
                subprocess.run(
                    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                     __file__, "--way", way, "--programs", program, "--out", str(path)],
                    check=True, env=environment,
                )  # fmt: skip
                found[f"{way}, {name}"] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    main()
