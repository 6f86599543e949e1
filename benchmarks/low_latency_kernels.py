"""Each kernel of low_latency() against NCCL, at sizes that its limits may leave to another: what limits are chosen by.

    torchrun --nproc-per-node 4 benchmarks/low_latency_kernels.py --out FILE

In graphs, in both ways of low_latency.py: with an elementwise kernel from each call's output to the next one's input,
which counts, and back to back. All engines of a size take turns, in both ways, with several graphs of each; NCCL is
also timed against itself. One group has the staging of all kernels, and limits that let only one of them run while its
graphs are captured. Each graph's results are compared to NCCL's, bit for bit, before and after it is timed: numbers are
small integers times powers of two, so sums are exact in any order.
"""

import argparse
import functools
import itertools
from dataclasses import replace

import torch
import torch.distributed as stock
from measured import begin, setting, write

import safecomm
from safecomm.collectives.table import GATHER, REDUCE, SCATTER
from safecomm.collectives.takers import ENGINES
from safecomm.peers.limits import ONE_SHOT, RING, TWO_SHOT, LowLatencyLimits, MiB
from safecomm.tools.tune_low_latency import NCCL, prepare, slowest

AGAIN, GRAPHS = "NCCL again", 4
WAYS = {"a kernel between": True, "back to back": False}
# What torch 2.13 calls them, because their older names warn there.
NAMES = {
    REDUCE: "all_reduce",
    SCATTER: "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor",
    GATHER: "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor",
}
NONE = LowLatencyLimits(one_shot=0, two_shot=0, scatter=0, gather=0)
LARGEST = 1 << 30
KERNELS = {
    ONE_SHOT: replace(NONE, one_shot=8 * MiB, scatter=16 * MiB, gather=16 * MiB),
    TWO_SHOT: replace(NONE, two_shot=64 * MiB),
    RING: replace(NONE, ring=LARGEST, ring_scatter=LARGEST, ring_gather=LARGEST),
}
ALL = LowLatencyLimits(
    one_shot=8 * MiB, two_shot=64 * MiB, scatter=16 * MiB, gather=16 * MiB,
    ring=LARGEST, ring_scatter=LARGEST, ring_gather=LARGEST,
)  # fmt: skip
SMALLEST = 2.0**-120
"""What back to back sums are multiples of, which grow by the number of ranks with each of 80 calls."""


def by(kernel, engine, call):
    """Return ``call``, of ours, run by one kernel alone."""

    def run():
        engine.limits, taken = KERNELS[kernel], engine.taken
        engine._plans.clear()
        call()
        if engine.taken == taken:
            raise SystemExit(f"{kernel} has not run a call")
        engine.limits = ALL
        engine._plans.clear()

    return run


class Calls:
    """Calls of a collective on tensors of ``nbytes`` a part, each followed by an elementwise kernel if ``between``."""

    def __init__(self, collective, nbytes, device, between):
        self.collective, self.between = collective, between
        self.world, self.rank = stock.get_world_size(), stock.get_rank()
        part = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        whole = part if collective == REDUCE else part.new_zeros(self.world * part.numel())
        self.output, self.given = (whole, part) if collective == GATHER else (part, whole)
        self.rows = self.given.view(-1, min(self.output.numel(), self.given.numel()))
        self.source = self.output[: self.rows.shape[1]]
        self.factor = 1 if collective == GATHER else 1 / self.world  # so that sums stay what they are

    def of(self, library):
        function = getattr(library, NAMES[self.collective])
        tensors = (self.output,) if self.collective == REDUCE else (self.output, self.given)

        def call():
            function(*tensors)
            if self.between:
                torch.mul(self.source.expand_as(self.rows), self.factor, out=self.rows)

        return call

    def result(self, run):
        """Return what the calls of a graph make of numbers that are the same each time."""
        generator = torch.Generator(self.given.device).manual_seed(self.rank)
        self.output.fill_(float("nan"))
        self.given.copy_(torch.randint(0, 8, self.given.shape, generator=generator, device=self.given.device))
        self.given.mul_(SMALLEST if self.collective == REDUCE and not self.between else 1)
        run()
        return self.output.clone()


def in_turns(call, device):
    """Return what runs the next of several graphs of ``call``, and tells the us of it."""
    graphs = itertools.cycle([prepare(call, device) for _ in range(GRAPHS)])
    return lambda: next(graphs)()


def wrong(made, runs):
    """Return by engine how many elements of its graphs' results are not NCCL's."""
    found = {}
    for (way, name), run in runs.items():
        expected = made[way].result(runs[way, NCCL])
        found[name] = found.get(name, 0)
        for _ in range(GRAPHS):
            found[name] += int((made[way].result(run).view(torch.int16) != expected.view(torch.int16)).sum())
    if any(not made[way].result(runs[way, NCCL]).isfinite().all() for way in made):
        raise SystemExit("a result that is not finite proves nothing")
    for one in made.values():
        one.given.zero_()
        one.output.zero_()
    return found


def measured(collective, size, engine, device, rounds):
    """Return the us of each engine at one size, by way, and how many elements were wrong."""
    made = {way: Calls(collective, size, device, between) for way, between in WAYS.items()}
    runs = {}
    for way, calls in made.items():
        runs |= {(way, name): in_turns(calls.of(stock), device) for name in (NCCL, AGAIN)}
        for kernel, limits in KERNELS.items():
            if limits.kernel(collective, size) == kernel:
                runs[way, kernel] = in_turns(by(kernel, engine, calls.of(safecomm)), device)
    before = wrong(made, runs)
    us = slowest(runs, rounds, device)
    after = wrong(made, runs)
    rows = {"wrong": {name: before[name] + after[name] for name in before}}
    for (way, name), took in us.items():
        rows.setdefault(way, {})[name] = [round(took, 2), round(took / us[way, NCCL], 3)]
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--sizes", type=int, nargs="*", default=[MiB << power for power in range(7)])
    parser.add_argument("--collectives", nargs="*", choices=tuple(NAMES), default=tuple(NAMES))
    arguments = parser.parse_args()
    device = begin()
    results = setting("torchrun benchmarks/low_latency_kernels.py")
    with safecomm.low_latency(limits=ALL) as on:
        if on.reason:
            raise SystemExit(on.reason)
        run = functools.partial(measured, engine=ENGINES[stock.group.WORLD], device=device, rounds=arguments.rounds)
        for collective, size in itertools.product(arguments.collectives, arguments.sizes):
            rows = run(collective, size)
            found = torch.tensor(sum(rows["wrong"].values()), device=device)
            stock.all_reduce(found)
            results.setdefault("us and ratio to NCCL", {}).setdefault(collective, {})[size] = rows
            results["wrong elements"] = results.get("wrong elements", 0) + int(found)
            write(arguments.out, results)
            if stock.get_rank() == 0:
                print(collective, size, rows, flush=True)
    safecomm.destroy_process_group()
    if results["wrong elements"]:
        raise SystemExit("some elements were wrong")


if __name__ == "__main__":
    main()
