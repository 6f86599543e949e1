"""low_latency() against NCCL and torch's own symmetric memory, in CUDA graphs; host time; a decode step.

    torchrun --nproc-per-node 2 benchmarks/low_latency.py --out FILE

In graphs: 20 calls each, in two ways. As in a model, an elementwise kernel makes the next call's input of each call's
output, and counts; and back to back, where NCCL's small calls take twice as long. The engines take turns, and what
counts is the median of the slowest rank; each graph is replayed four times, and the last replay is timed, so that the
ranks begin it together and no host is late with it. Of large calls several graphs of each take turns, because two
graphs of one call can differ for good by a few percent, and NCCL is also timed against itself. Then every operation and
type, at fewer sizes, and NCCL against itself where a call is NCCL's. Host time: bursts of eager calls in turns. The
decode step: a tensor-parallel transformer, hidden size 4096, 32 layers, bf16, one token for each sequence of the batch,
two all_reduces a layer, captured into one graph. Beside a GEMM: asynchronous all_reduces and a product of two matrices
on the current stream, how long the product takes, and all of it. With ``PEERS=FOLDER`` SGLang's kernels are timed too
(``sglang_kernels.py``). ``--parts`` runs some of these, and keeps the others' figures in FILE.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as stock
from measured import begin, setting, write
from sglang_kernels import Kernels

import safecomm
from safecomm.collectives.table import EXCHANGE, GATHER, REDUCE, SCATTER
from safecomm.tools.tune_low_latency import NCCL, calls, prepare, slowest

OURS, ONE_SHOT, COPIED, TWO_SHOT = "safecomm", "torch one-shot", "torch one-shot, copied", "torch two-shot"
ALONE = "kernel alone"
WAYS = {"us in graphs, a kernel between": True, "us in graphs, back to back": False}
SIZES = {
    REDUCE: [512, *(1 << power for power in range(11, 29))],
    SCATTER: [1 << power for power in range(13, 27)],
    GATHER: [1 << power for power in range(13, 27)],
    EXCHANGE: [1 << power for power in range(9, 19)],
}
SYMMETRIC_MOST = 4 << 20  # bytes up to which torch's own are timed
PEERS_MOST = 64 << 20  # and SGLang's
LARGE = 4 << 20  # bytes from which on several graphs take turns
AGAIN, GRAPHS = "NCCL again", 4
KINDS = [(op, dtype) for op in ("SUM", "AVG", "MAX", "MIN") for dtype in ("bfloat16", "float16", "float32")]
RINGS_TYPES = ("int8", "uint8", "int32", "int64", "float64")  # below the ring's sizes they are NCCL's
KINDS += [("SUM", dtype) for dtype in RINGS_TYPES]
FEW_SIZES = (512, 16 << 10, 256 << 10, 2 << 20, 4 << 20, 32 << 20)
BESIDE, MATRIX = 32 << 20, 8192


def symmetric(nbytes, device, between):
    """Return torch's all_reduces of symmetric memory: of a tensor that lies there, and of one that is copied there."""
    import torch.distributed._symmetric_memory as memory

    tensor = memory.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
    memory.rendezvous(tensor, stock.group.WORLD)
    tensor.zero_()
    elsewhere, name = torch.zeros_like(tensor), stock.group.WORLD.group_name

    def then(result, given):
        if between:
            torch.mul(result, 1, out=given)

    return {
        ONE_SHOT: lambda: then(torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name), tensor),
        COPIED: lambda: then(torch.ops.symm_mem.one_shot_all_reduce_copy(tensor, elsewhere, "sum", name), elsewhere),
        TWO_SHOT: lambda: then(torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name), tensor),
    }


def in_turns(call, device):
    """Return what runs the next of several graphs of ``call``, and tells the us of it."""
    graphs = itertools.cycle([prepare(call, device) for _ in range(GRAPHS)])
    return lambda: next(graphs)()


def rounds_of(size, rounds):
    """Return in how many rounds calls of ``size`` bytes are timed."""
    return rounds if size < LARGE else max(rounds, 40) if size <= 4 * LARGE else min(rounds, 16)


def in_graphs(device, rounds):
    tables = {}
    peers = Kernels(os.environ["PEERS"], device) if "PEERS" in os.environ else None
    for way, between in WAYS.items():
        for collective, sizes in SIZES.items():
            rows = tables.setdefault(way, {}).setdefault(collective, {})
            for size in sizes:
                theirs, ours = calls(collective, size, torch.bfloat16, device, between=between)
                prepared = in_turns if size >= LARGE else prepare
                runs = {NCCL: prepared(theirs, device), OURS: prepared(ours, device)}
                if size >= LARGE:
                    runs[AGAIN] = prepared(theirs, device)
                if collective == REDUCE and 2048 <= size <= SYMMETRIC_MOST:
                    runs |= {name: prepare(call, device) for name, call in symmetric(size, device, between).items()}
                if collective == REDUCE and peers is not None and 8192 <= size <= PEERS_MOST:
                    others = peers.calls(size, device, between=between)
                    runs |= {name: prepared(call, device) for name, call in others.items()}
                if collective == REDUCE and between:
                    tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
                    runs[ALONE] = prepare(functools.partial(torch.mul, tensor, 1, out=tensor), device)
                us = slowest(runs, rounds_of(size, rounds), device)
                rows[size] = {name: round(took, 2) for name, took in us.items()}
                rows[size]["ratio"] = round(us[OURS] / us[NCCL], 3)
                if AGAIN in us:
                    rows[size]["NCCL to itself"] = round(us[AGAIN] / us[NCCL], 3)
                del runs, theirs, ours
    return tables


def every_kind(device, rounds):
    """Return by operation and type the ratios of ours to NCCL, for an all_reduce of few sizes; and NCCL's to itself.

    A kernel lies between the calls, as in the first way of :func:`in_graphs`.
    """
    table, itself = {}, {}
    for op, name in KINDS:
        ratios = table[f"{op}, {name}"] = {}
        for size in FEW_SIZES:
            dtype = getattr(torch, name)
            tensor = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
            operation = getattr(stock.ReduceOp, op)

            def call(library, tensor=tensor, operation=operation):
                def run():
                    library.all_reduce(tensor, op=operation)
                    torch.mul(tensor, 1, out=tensor)

                return run

            prepared = in_turns if name in RINGS_TYPES or size >= LARGE else prepare
            runs = {NCCL: prepared(call(stock), device), OURS: prepared(call(safecomm), device)}
            if name in RINGS_TYPES:
                runs[AGAIN] = prepared(call(stock), device)
            us = slowest(runs, rounds_of(size, max(rounds, 40) if name in RINGS_TYPES else rounds), device)
            ratios[size] = round(us[OURS] / us[NCCL], 3)
            if AGAIN in us:
                itself.setdefault(f"{op}, {name}", {})[size] = round(us[AGAIN] / us[NCCL], 3)
            del runs
    return {"ratio by operation and type": table, "NCCL to itself by operation and type": itself}


def host_time(device, rounds):
    """Return the us of the host for a call of 8 KiB, of each library, and the median ratio of the rounds."""
    tensor = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    times = {"stock": [], "safecomm": []}
    for number in range(rounds):
        for name, library in (("stock", stock), ("safecomm", safecomm))[:: 1 if number % 2 else -1]:
            for _ in range(20):
                library.all_reduce(tensor)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                library.all_reduce(tensor)
            times[name].append((time.perf_counter() - start) / 50 * 1e6)
            torch.cuda.synchronize()
    ratio = statistics.median(a / b for a, b in zip(times["safecomm"], times["stock"], strict=True))
    us = {name: round(statistics.median(taken), 2) for name, taken in times.items()}
    return {"host us, 8 KiB": us | {"ratio": round(ratio, 3)}}


class Decode:
    """A token's way through the layers of a transformer, of which this rank has its part; attention over 512 tokens."""

    HIDDEN, LAYERS, HEAD, CONTEXT = 4096, 32, 128, 512

    def __init__(self, device):
        world = stock.get_world_size()
        heads = self.HIDDEN // self.HEAD // world

        def weight(rows, columns):
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / rows**0.5

        self.heads = heads
        self.layers = [
            (
                weight(self.HIDDEN, 3 * heads * self.HEAD),
                weight(heads * self.HEAD, self.HIDDEN),
                weight(self.HIDDEN, 4 * self.HIDDEN // world),
                weight(4 * self.HIDDEN // world, self.HIDDEN),
            )
            for _ in range(self.LAYERS)
        ]
        self.cache = torch.randn(2, 64, heads, self.CONTEXT, self.HEAD, device=device, dtype=torch.bfloat16)

    def step(self, x, library):
        batch = x.shape[0]
        keys, values = self.cache[:, :batch]
        for to_qkv, to_out, up, down in self.layers:
            normed = torch.nn.functional.rms_norm(x, (self.HIDDEN,))
            query = (normed @ to_qkv).view(batch, 3, self.heads, 1, self.HEAD)[:, 0]
            seen = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
            out = seen.reshape(batch, -1) @ to_out
            library.all_reduce(out)
            x = x + out
            hidden = torch.nn.functional.gelu(torch.nn.functional.rms_norm(x, (self.HIDDEN,)) @ up) @ down
            library.all_reduce(hidden)
            x = x + hidden
        return x


def decode(device, rounds):
    """Return the us of a step on NCCL and on ours, by batch."""
    torch.manual_seed(1)
    model = Decode(device)
    table = {}
    for batch in (1, 2, 4, 8, 16, 32, 64):
        x = torch.randn(batch, Decode.HIDDEN, device=device, dtype=torch.bfloat16)
        runs = {}
        for name, library in ((NCCL, stock), (OURS, safecomm)):

            def run(library=library, x=x):
                return model.step(x, library)

            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()

            def replay(graph=graph):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                return start.elapsed_time(end) * 1e3

            runs[name] = replay
        us = slowest(runs, rounds, device)
        table[batch] = {name: round(took, 1) for name, took in us.items()} | {"ratio": round(us[OURS] / us[NCCL], 3)}
        del runs, run, replay, graph
    return {"decode step us": table}


def beside(device, rounds, ours=safecomm.all_reduce):
    """Return the us of a GEMM beside asynchronous all_reduces, NCCL's and ``ours``, and of all, by their number."""
    left, right, product = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(3))
    tensor = torch.zeros(BESIDE // 2, device=device, dtype=torch.bfloat16)
    table = {}
    for many in (1, 4, 8):
        all_of_it = {}

        def run(name, all_reduce, many=many, all_of_it=all_of_it):
            start, multiplied, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda._sleep(4_000_000)  # until then all that follows is launched, also on a slow host
            start.record()
            works = [all_reduce(tensor, async_op=True) for _ in range(many)] if all_reduce is not None else []
            torch.mm(left, right, out=product)
            multiplied.record()
            for work in works:
                work.wait()
            end.record()
            end.synchronize()
            all_of_it.setdefault(name, []).append(start.elapsed_time(end) * 1e3)
            return start.elapsed_time(multiplied) * 1e3

        functions = {"alone": None, NCCL: stock.all_reduce, OURS: ours, AGAIN: stock.all_reduce}
        runs = {name: functools.partial(run, name, all_reduce) for name, all_reduce in functions.items()}
        us = slowest(runs, max(rounds, 20), device)
        table[many] = {f"GEMM, {name}": round(took, 1) for name, took in us.items()}
        table[many] |= {f"both, {name}": round(statistics.median(took), 1) for name, took in all_of_it.items()}
    return {f"us of a GEMM of {MATRIX}^3 beside asynchronous all_reduces of {BESIDE >> 20} MiB": table}


PARTS = {one.__name__: one for one in (in_graphs, every_kind, host_time, decode, beside)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--limits", help="a file of tune --low-latency")
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=tuple(PARTS))
    arguments = parser.parse_args()
    device = begin()
    warnings.simplefilter("ignore", FutureWarning)  # the names of torch 2.13
    results = json.loads(Path(arguments.out).read_text()) if Path(arguments.out).exists() else {}
    results |= setting("torchrun benchmarks/low_latency.py")
    with safecomm.low_latency(limits=arguments.limits) as on:
        if on.reason:
            raise SystemExit(on.reason)
        results["bytes of staging"] = on.nbytes
        for part in arguments.parts:
            found = PARTS[part](device, arguments.rounds)
            results |= found
            write(arguments.out, results)
            if stock.get_rank() == 0:
                print(found, flush=True)
    safecomm.destroy_process_group()


if __name__ == "__main__":
    main()
