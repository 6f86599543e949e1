"""python -m safecomm tune --low-latency: up to which sizes the kernels are faster than NCCL, on the GPUs at hand.

Each size is timed as a model uses it: 20 calls in a CUDA graph, and behind each an elementwise kernel, which counts,
from its output to the next one's input. Back to back NCCL's small calls take twice as long (seen with NCCL 2.28 on H100
and H200). NCCL and the kernels take turns, and the figure of each is the median of its turns, of the slowest rank.
A kernel gets the sizes up to the first at which it is slower. The ring gets those up to the first at which it is not
faster than NCCL by 1 %, if it is by 3 % at one of them. Sizes whose staging would take more than 64 MiB are not tried.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as stock

from safecomm.collectives import gates
from safecomm.collectives.table import EXCHANGE, GATHER, REDUCE, ROWS, SCATTER
from safecomm.diagnostics.table import laid_out
from safecomm.peers.limits import EXACT, ONE_SHOT, RING, TWO_SHOT, KiB, LowLatencyLimits, MiB
from safecomm.peers.low_latency import low_latency

CALLS = 20
"""Calls in a graph."""

LEAD = 3
"""Replays of it before the one that is timed. The ranks meet in them, and the host launches the last meanwhile."""

SIZES = tuple(KiB << power for power in range(1, 14))
"""Bytes that are tried: 2 KiB to 8 MiB."""

RING_SIZES = tuple(MiB << power for power in range(9))
"""Bytes that are tried of the ring: 1 to 256 MiB."""

STAGING = 64 * MiB
"""Bytes that the staging of all kernels together may take."""

SLACK = 1.02
"""How much slower a kernel may be than what else there is."""

GAIN, FASTER = 0.97, 0.99
"""How long the ring may take, of NCCL's time, at one size and at all. What is gained is worth the memory then.

That does not grow with the calls, so once it is there, less has to be gained than NCCL's own spread.
"""

NCCL = "NCCL"

# What torch 2.13 calls them, because their older names warn there.
_GATHER = ROWS["all_gather_single"].name
_SCATTER = ROWS["reduce_scatter_single"].name

KERNELS = {
    REDUCE: {"one_shot": ONE_SHOT, "two_shot": TWO_SHOT, "ring": RING},
    SCATTER: {"scatter": ONE_SHOT, "ring_scatter": RING},
    GATHER: {"gather": ONE_SHOT, "ring_gather": RING},
}
"""By collective, the limits that there are for it, from the smallest calls on, and of which kernel they are."""

Call = Callable[[], None]


def calls(
    collective: str, nbytes: int, dtype: torch.dtype, device: torch.device, *, between: bool = True
) -> tuple[Call, Call]:
    """Return a call of torch.distributed's and the same of ours, on one pair of tensors of ``nbytes`` a part.

    ``between``: each is followed by a kernel that makes the next call's input of its output, element by element.
    """
    world = stock.get_world_size()
    part = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    whole = part if collective == REDUCE else torch.zeros(world * part.numel(), dtype=dtype, device=device)
    name, output, given = {
        REDUCE: ("all_reduce", part, part),
        SCATTER: (_SCATTER, part, whole),
        GATHER: (_GATHER, whole, part),
        EXCHANGE: ("all_to_all_single", whole, torch.zeros_like(whole) if collective == EXCHANGE else whole),
    }[collective]
    tensors = (part,) if collective == REDUCE else (output, given)
    rows = given.view(-1, min(output.numel(), given.numel()))  # of as many elements as the smaller has
    source = output[: rows.shape[1]]

    def of(library: types.ModuleType) -> Call:
        function = getattr(library, name)

        def call() -> None:
            function(*tensors)
            if between:
                torch.mul(source.expand_as(rows), 1, out=rows)

        return call

    return of(stock), of(gates)


def prepare(call: Call, device: torch.device) -> Callable[[], float]:
    """Return what runs ``call`` several times, in a graph where there are graphs, and tells the us of each."""
    if device.type == "cpu":

        def run() -> float:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6

        return run
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay(_call: Call = call) -> float:  # the tensors of the call live as long as its graph
        for _ in range(LEAD):  # so that the next one is on the device, and the ranks begin it together
            graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / CALLS

    return replay


def slowest(runs: Mapping[str, Callable[[], float]], rounds: int, device: torch.device) -> dict[str, float]:
    """Run each in turns, and return the median us of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 else reversed(tuple(runs)):
            stock.barrier()
            times[name].append(runs[name]())
    medians = torch.tensor([statistics.median(taken) for taken in times.values()], device=device)
    stock.all_reduce(medians, op=stock.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def limit(sizes: Iterable[int], kernel: Mapping[int, float], other: Mapping[int, float], slack: float = SLACK) -> int:
    """Return the largest of ``sizes`` up to which ``kernel`` takes at no size more than ``slack`` of ``other``.

    Examples
    --------
    >>> limit([1, 2, 4], {1: 3.0, 2: 5.0, 4: 9.0}, {1: 9.0, 2: 9.0, 4: 8.0})
    2
    """
    largest = 0
    for size in sizes:
        if kernel[size] > other[size] * slack:
            break
        largest = size
    return largest


def limits_of(us: Mapping[str, Mapping[str, Mapping[int, float]]]) -> LowLatencyLimits:
    """Return the limits that follow from the times, by collective, engine and bytes."""
    limits = {}
    for collective, kernels in KERNELS.items():
        times, taken = us[collective], 0
        engines = [*kernels.values(), NCCL]
        for number, (name, engine) in enumerate(kernels.items()):
            others = [times[other] for other in engines[number + 1 :] if other in times]
            above = [size for size in sorted(times.get(engine, ())) if size > taken]
            best = {size: min(other[size] for other in others if size in other) for size in above}
            limits[name] = limit(above, times.get(engine, {}), best, FASTER if engine == RING else SLACK)
            if engine == RING and all(times[RING][size] > GAIN * best[size] for size in above if size <= limits[name]):
                limits[name] = 0
            taken = max(taken, limits[name])
    gathers, exchanges = us[GATHER], us[EXCHANGE]
    # A gather that is exact is not to be slower than one that is not.
    fastest = {size: min(gathers[name][size] for name in (NCCL, ONE_SHOT)) for size in gathers[EXACT]}
    exact = limit(gathers[EXACT], gathers[EXACT], fastest)
    exchange = limit(exchanges[EXACT], exchanges[EXACT], exchanges[NCCL])
    return LowLatencyLimits(**limits, exact=exact, exchange=exchange)


def fitting(sizes: Iterable[int], world: int, limits: Callable[[int], LowLatencyLimits]) -> list[int]:
    """Return those of ``sizes`` for whose ``limits`` the staging is not too large.

    Examples
    --------
    >>> fitting([MiB, 64 * MiB], 4, lambda size: LowLatencyLimits(one_shot=size, two_shot=0, scatter=0, gather=0))
    [1048576]
    """
    return [size for size in sizes if limits(size).nbytes(world) <= STAGING]


def measure(
    device: torch.device, sizes: Iterable[int], ring_sizes: Iterable[int], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, dict[int, float]]]:
    """Return the us of each size, by collective and engine; ``ring_sizes``: those of the ring.

    Raises RuntimeError where low_latency() can't be switched on.
    """
    sizes, ring_sizes = list(sizes), list(ring_sizes)
    none = LowLatencyLimits(one_shot=0, two_shot=0, scatter=0, gather=0)
    world, longest = stock.get_world_size(), max(ring_sizes)
    rings = replace(none, ring=longest, ring_scatter=longest, ring_gather=longest)
    everything: tuple[str, ...] = (REDUCE, SCATTER, GATHER)
    us: dict[str, dict[str, dict[int, float]]] = {}

    # Each as large as fits beside the ring; packets, which do not share the channels, beside the largest of those too.
    one = fitting(sizes, world, lambda size: replace(rings, one_shot=size))
    two = fitting(sizes, world, lambda size: replace(rings, two_shot=size)) if world > 2 else []
    channels = replace(rings, one_shot=max(one), two_shot=max(two, default=0))
    packets = fitting(sizes, world, lambda size: replace(channels, exact=size))
    kernels: list[tuple[str, LowLatencyLimits, tuple[str, ...], list[int]]] = [
        (ONE_SHOT, replace(none, one_shot=max(one), scatter=max(one), gather=max(one)), everything, one),
        (EXACT, replace(none, exact=max(packets), exchange=max(packets)), (GATHER, EXCHANGE), packets),
        (TWO_SHOT, replace(none, two_shot=max(two, default=0)), (REDUCE,), two),
        (RING, rings, everything, ring_sizes),
    ]
    for kernel, limits, collectives, tried in [one for one in kernels if one[-1]]:
        with low_latency(limits=limits) as on:
            if on.reason:
                raise RuntimeError(f"there is nothing to tune: {on.reason}")
            for collective in collectives:
                of_collective = us.setdefault(collective, {})
                for size in tried:
                    say(f"{collective}, {kernel}, {size} bytes")
                    stocks, ours = calls(collective, size, torch.bfloat16, device)
                    runs = {NCCL: prepare(stocks, device), kernel: prepare(ours, device)}
                    for name, took in slowest(runs, rounds, device).items():
                        of_collective.setdefault(name, {})[size] = took
                    del runs  # graphs, before the group is given back what they use
    return us


def tune(
    device: torch.device, out: Path, rounds: int, say: Callable[[str], None], sizes: Iterable[int] = SIZES,
    ring_sizes: Iterable[int] = RING_SIZES,
) -> None:  # fmt: skip
    """Measure on the ranks of the default group, and write and say what was found, on rank 0.

    Raises RuntimeError where low_latency() can't be switched on.
    """
    first, world = stock.get_rank() == 0, stock.get_world_size()
    us = measure(device, sizes, ring_sizes, rounds, say if first else lambda _: None)
    if not first:
        return
    found = limits_of(us)
    print("us of one call and an elementwise kernel in a graph, bf16, on the slowest rank, median\n")
    for collective, engines in us.items():
        rows = [
            (_readable(size), *(f"{took[size]:.1f}" if size in took else "" for took in engines.values()))
            for size in sorted({size for took in engines.values() for size in took})
        ]
        print(*laid_out((collective, *engines), rows), sep="\n")
        print()
    written = kept(out)
    written.setdefault("low_latency", {})[str(world)] = asdict(found)
    written["low_latency_measured"] = {
        "us": us,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "world": world,
        "date": datetime.date.today().isoformat(),
    }
    out.write_text(json.dumps(written, indent=1) + "\n")
    print(f"{found}\nwritten to {out}: low_latency(limits={str(out)!r}) uses it, on all ranks")


def kept(out: Path) -> dict[str, Any]:
    """Return what the file ``out`` has, to be added to; ValueError if it is not of ``tune``."""
    if not os.path.exists(out):
        return {}
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{out} is there, and is not a file of python -m safecomm tune: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("low_latency", {}), dict):
        raise ValueError(f"{out} is there, and is not a file of python -m safecomm tune")
    return found


def _readable(nbytes: int) -> str:
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"
