"""Which bucket size to use: many small all_reduces under bucketed(), measured on the machine at hand."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from safecomm.arena import use_arena
from safecomm.bucketing import bucketed
from safecomm.collectives import reduce
from safecomm.errors import SafecommError

SIZES = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
"""Bucket sizes in MiB that are tried."""

TOLERANCE = 1.03
"""The smallest size is recommended that is at most this much slower than the fastest: a small bucket starts earlier."""


@dataclass(frozen=True)
class Tuning:
    """What :func:`run_tune` has measured."""

    device: str
    """The device, in words."""
    world: int
    """Ranks."""
    tensors: int
    """How many tensors were reduced."""
    tensor_kb: float
    """KiB of each."""
    one_by_one: float
    """Milliseconds without buckets."""
    milliseconds: dict[float, float]
    """By bucket size in MiB."""
    bucket_mb: float
    """The size to use."""

    def table(self) -> str:
        """Return the figures as text."""
        lines = [
            f"{self.tensors} tensors of {self.tensor_kb:g} KiB, {self.world} ranks, {self.device}",
            "",
            f"{'bucket MiB':>10} {'ms':>9} {'of one by one':>14}",
            f"{'none':>10} {self.one_by_one:>9.3f} {1:>14.2f}",
        ]
        for size, value in self.milliseconds.items():
            mark = "  <- use this" if size == self.bucket_mb else ""
            lines.append(f"{size:>10g} {value:>9.3f} {value / self.one_by_one:>14.2f}{mark}")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write the file that ``bucketed()`` reads."""
        content = {**vars(self), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
        path.write_text(json.dumps(content, indent=1) + "\n")

    def plot(self, path: Path) -> None:
        """Draw the figures into a file. Raises SafecommError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise SafecommError("a plot takes matplotlib: pip install 'safecomm[plot]'") from None
        figure = Figure(figsize=(6, 4))
        axes = figure.add_subplot()
        axes.plot(list(self.milliseconds), list(self.milliseconds.values()), marker="o", label="bucketed()")
        axes.axhline(self.one_by_one, linestyle="--", color="gray", label="one by one")
        axes.axvline(self.bucket_mb, linestyle=":", color="green", label=f"{self.bucket_mb:g} MiB")
        axes.set(xscale="log", yscale="log", xlabel="bucket size, MiB", ylabel="ms", title=f"{self.world} ranks")
        axes.legend()
        figure.savefig(path)


def run_tune(
    *,
    device: str = "auto",
    world: int | None = None,
    tensors: int = 200,
    tensor_kb: float = 64,
    sizes: Sequence[float] = SIZES,
    passes: int = 10,
) -> Tuning:
    """Measure bucket sizes on this machine, with ``world`` processes that it starts; progress goes to stderr.

    Raises
    ------
    ValueError
        For numbers that are none.
    SafecommError
        If a process fails.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: expected auto, cpu or cuda")
    world = world or (torch.cuda.device_count() if device == "cuda" else 2)
    if world < 1 or (device == "cuda" and world > torch.cuda.device_count()):
        raise ValueError(f"world={world}: there are {torch.cuda.device_count()} GPUs here")
    for name, number in (
        ("tensors", tensors),
        ("tensor_kb", tensor_kb),
        ("passes", passes),
        *(("size", s) for s in sizes),
    ):
        if number <= 0:
            raise ValueError(f"{name}={number}: expected more than 0")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, device, folder, tensors, int(tensor_kb * 1024) // 4 or 1, tuple(sizes), passes)
        try:
            torch.multiprocessing.spawn(_measure, arguments, nprocs=world)  # type: ignore[attr-defined, no-untyped-call]
        except Exception as error:
            raise SafecommError(f"tune: a process failed: {error}") from error
        one_by_one, times = json.loads((Path(folder) / "times.json").read_text())
    best = min(times)
    return Tuning(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        world=world,
        tensors=tensors,
        tensor_kb=tensor_kb,
        one_by_one=one_by_one,
        milliseconds=dict(zip(sizes, times, strict=True)),
        bucket_mb=next(size for size, value in zip(sizes, times, strict=True) if value <= best * TOLERANCE),
    )


def _measure(
    rank: int, world: int, device: str, folder: str, count: int, numel: int, sizes: Sequence[float], passes: int
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(str(Path(folder) / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    given = [torch.ones(numel, device=device) for _ in range(count)]
    with use_arena(4 * sum(tensor.nbytes for tensor in given) + (64 << 20), device):
        one_by_one = _time(None, given, passes, device)
        times = []
        for size in sizes:
            times.append(_time(size, given, passes, device))
            if rank == 0:
                print(f"tune: {size:g} MiB: {times[-1]:.3f} ms", file=sys.stderr, flush=True)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps([one_by_one, times]))
    dist.barrier()
    dist.destroy_process_group()


def _time(size: float | None, tensors: list[torch.Tensor], passes: int, device: str) -> float:
    """Return the median of the slowest rank's milliseconds."""
    taken = []
    for turn in range(passes + 2):
        for tensor in tensors:
            tensor.fill_(1.0)
        dist.barrier()
        start = _now(device)
        if size is None:
            _reduce(tensors)
        else:
            with bucketed(size):
                _reduce(tensors)
        if turn > 1:  # the others warm up
            taken.append((_now(device) - start) * 1e3)
    slowest: Any = torch.tensor(statistics.median(taken), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _reduce(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        reduce.all_reduce(tensor)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
