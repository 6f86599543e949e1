"""python -m safecomm tune --low-latency: up to which sizes the kernels are faster than NCCL, on the GPUs at hand.

Each size is timed as it is used: 20 calls in a CUDA graph. NCCL and the kernels take turns, and the figure of each is
the median of its turns, of the slowest rank. A kernel gets the sizes up to the first at which it is slower.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as stock

from safecomm.collectives import gates
from safecomm.collectives.table import EXCHANGE, GATHER, REDUCE, ROWS, SCATTER
from safecomm.diagnostics.table import laid_out
from safecomm.peers.limits import EXACT, ONE_SHOT, TWO_SHOT, KiB, LowLatencyLimits, MiB
from safecomm.peers.low_latency import low_latency

CALLS = 20
"""Calls in a graph."""

SIZES = tuple(KiB << power for power in range(1, 14))
"""Bytes that are tried: 2 KiB to 8 MiB."""

SLACK = 1.02
"""How much slower than NCCL a kernel may be."""

NCCL = "NCCL"

# What torch 2.13 calls them, because their older names warn there.
_GATHER = ROWS["all_gather_single"].name
_SCATTER = ROWS["reduce_scatter_single"].name

Call = Callable[[], None]


def calls(collective: str, nbytes: int, dtype: torch.dtype, device: torch.device) -> tuple[Call, Call]:
    """Return a call of torch.distributed's and the same of ours, on one pair of tensors of ``nbytes`` a part."""
    world = stock.get_world_size()
    part = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    whole = torch.zeros(world * part.numel(), dtype=dtype, device=device)
    if collective == REDUCE:
        return lambda: stock.all_reduce(part), lambda: gates.all_reduce(part)
    if collective == EXCHANGE:
        given = torch.zeros_like(whole)
        return lambda: stock.all_to_all_single(whole, given), lambda: gates.all_to_all_single(whole, given)
    name = _SCATTER if collective == SCATTER else _GATHER
    theirs, ours = getattr(stock, name), getattr(gates, name)
    tensors = (part, whole) if collective == SCATTER else (whole, part)
    return lambda: theirs(*tensors), lambda: ours(*tensors)


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

    def replay(_: Call = call) -> float:  # the tensors of the call live as long as its graph
        graph.replay()  # the ranks begin the next one together, and with it waiting for them on the device
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


def limit(sizes: Iterable[int], kernel: Mapping[int, float], other: Mapping[int, float]) -> int:
    """Return the largest of ``sizes`` up to which ``kernel`` is at no size slower than ``other``, but for the slack.

    Examples
    --------
    >>> limit([1, 2, 4], {1: 3.0, 2: 5.0, 4: 9.0}, {1: 9.0, 2: 9.0, 4: 8.0})
    2
    """
    largest = 0
    for size in sizes:
        if kernel[size] > other[size] * SLACK:
            break
        largest = size
    return largest


def limits_of(us: Mapping[str, Mapping[str, Mapping[int, float]]], sizes: Iterable[int]) -> LowLatencyLimits:
    """Return the limits that follow from the times, by collective, engine and bytes."""
    sizes = list(sizes)
    reducing = us[REDUCE]
    best = {size: min(reducing[NCCL][size], reducing.get(TWO_SHOT, reducing[NCCL])[size]) for size in sizes}
    one_shot = limit(sizes, reducing[ONE_SHOT], best)
    two_shot = 0
    if TWO_SHOT in reducing:
        above = [size for size in sizes if size > one_shot]
        two_shot = limit(above, reducing[TWO_SHOT], reducing[NCCL])
    others = (NCCL, ONE_SHOT)
    return LowLatencyLimits(
        one_shot=one_shot,
        two_shot=two_shot,
        scatter=limit(sizes, us[SCATTER][ONE_SHOT], us[SCATTER][NCCL]),
        gather=limit(sizes, us[GATHER][ONE_SHOT], us[GATHER][NCCL]),
        # A gather that is exact is not to be slower than one that is not.
        exact=limit(sizes, us[GATHER][EXACT], {size: min(us[GATHER][name][size] for name in others) for size in sizes}),
        exchange=limit(sizes, us[EXCHANGE][EXACT], us[EXCHANGE][NCCL]),
    )


def measure(
    device: torch.device, sizes: Iterable[int], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, dict[int, float]]]:
    """Return the us of each size, by collective and engine.

    Raises RuntimeError where low_latency() can't be switched on.
    """
    sizes = list(sizes)
    largest = max(sizes)
    us: dict[str, dict[str, dict[int, float]]] = {}
    kernels = [
        (ONE_SHOT, LowLatencyLimits(one_shot=largest, two_shot=0, scatter=largest, gather=largest)),
        (EXACT, LowLatencyLimits(one_shot=0, two_shot=0, scatter=0, gather=0, exact=largest, exchange=largest)),
    ]
    measured = {ONE_SHOT: (REDUCE, SCATTER, GATHER), TWO_SHOT: (REDUCE,), EXACT: (GATHER, EXCHANGE)}
    if stock.get_world_size() > 2:
        kernels.append((TWO_SHOT, LowLatencyLimits(one_shot=0, two_shot=largest, scatter=0, gather=0)))
    for kernel, limits in kernels:
        with low_latency(limits=limits) as on:
            if on.reason:
                raise RuntimeError(f"there is nothing to tune: {on.reason}")
            for collective in measured[kernel]:
                of_collective = us.setdefault(collective, {})
                for size in sizes:
                    say(f"{collective}, {kernel}, {size} bytes")
                    stocks, ours = calls(collective, size, torch.bfloat16, device)
                    runs = {NCCL: prepare(stocks, device), kernel: prepare(ours, device)}
                    for name, took in slowest(runs, rounds, device).items():
                        of_collective.setdefault(name, {})[size] = took
                    del runs  # graphs, before the group is given back what they use
    return us


def tune(
    device: torch.device, out: Path, rounds: int, say: Callable[[str], None], sizes: Iterable[int] = SIZES
) -> None:
    """Measure on the ranks of the default group, and write and say what was found, on rank 0.

    Raises RuntimeError where low_latency() can't be switched on.
    """
    sizes = list(sizes)
    first, world = stock.get_rank() == 0, stock.get_world_size()
    us = measure(device, sizes, rounds, say if first else lambda _: None)
    if not first:
        return
    found = limits_of(us, sizes)
    print("us of one call in a graph, bf16, on the slowest rank, median\n")
    for collective, engines in us.items():
        rows = [(_readable(size), *(f"{took[size]:.1f}" for took in engines.values())) for size in sizes]
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
