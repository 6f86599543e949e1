"""python -m safecomm tune: which size of a bucket is the best for bucketed(), on the machines at hand.

``--low-latency`` is in ``tune_low_latency.py``.

The program is 200 all_reduces of 4 KiB to 256 KiB. Its time is that from the first call until the device has got
through, on the slowest rank; the ways of running it take turns, and the figure of each is its median.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d

from safecomm.arena.use import use_arena
from safecomm.collectives.bucketed import bucketed
from safecomm.collectives.gates import all_reduce
from safecomm.diagnostics.table import laid_out

SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""MiB of a bucket that are tried."""

LARGEST = float(1 << 20)
"""MiB of a bucket that may be tried."""

ONE_BY_ONE, MANAGER = "one by one", "torch's _coalescing_manager"
NEAR = 1.03
"""A smaller bucket is better than a larger one that is not faster by more than this: it takes less memory."""


def workload(device: torch.device) -> list[torch.Tensor]:
    """Return the tensors of the program."""
    dice = random.Random(1)
    return [torch.ones(dice.randrange(1024, 65537), device=device) for _ in range(200)]


def ways_of(tensors: list[torch.Tensor], sizes: Sequence[float]) -> dict[str, Callable[[], None]]:
    """Return the ways to run the program: torch's two, and a bucket of each of ``sizes`` MiB."""

    def one_by_one() -> None:
        for tensor in tensors:
            stock.all_reduce(tensor)

    def manager() -> None:
        with c10d._coalescing_manager():
            for tensor in tensors:
                stock.all_reduce(tensor)

    def in_buckets_of(size: float) -> Callable[[], None]:
        def run() -> None:
            with bucketed(size):
                for tensor in tensors:
                    all_reduce(tensor)

        return run

    return {ONE_BY_ONE: one_by_one, MANAGER: manager} | {_name(size): in_buckets_of(size) for size in sizes}


def _name(size: float) -> str:
    return f"bucketed({size:g})"


def measure(
    tensors: list[torch.Tensor], ways: dict[str, Callable[[], None]], rounds: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Run ``ways`` in turns, and return the us of each round for each.

    Raises RuntimeError if a result is wrong.
    """
    device = tensors[0].device
    world = stock.get_world_size()
    times: dict[str, list[float]] = {name: [] for name in ways}
    warm = 5
    for number in range(rounds + warm):
        progress(f"round {number + 1} of {rounds + warm}")
        for name, way in ways.items() if number % 2 else reversed(ways.items()):
            for tensor in tensors:
                tensor.fill_(1.0)
            stock.barrier()
            _synchronize(device)
            start = time.perf_counter()
            way()
            _synchronize(device)
            took = torch.tensor((time.perf_counter() - start) * 1e6, device=device)
            stock.all_reduce(took, op=stock.ReduceOp.MAX)
            if not all(bool((tensor == world).all()) for tensor in tensors[:: len(tensors) // 4]):
                raise RuntimeError(f"{name} gave wrong results")
            if number >= warm:
                times[name].append(took.item())
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best(times: dict[float, float]) -> float:
    """Return the size, of those with their times, to use: the smallest one that is about as fast as the fastest.

    Examples
    --------
    >>> best({4.0: 900.0, 16.0: 500.0, 32.0: 495.0})
    16.0
    """
    fastest = min(times.values())
    return min(size for size, took in times.items() if took <= NEAR * fastest)


@contextlib.contextmanager
def group() -> Iterator[torch.device]:
    """Join the ranks that torchrun has started; yields this rank's device."""
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    stock.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        stock.destroy_process_group()


def tune(sizes: Sequence[float], out: Path, png: Path | None, rounds: int, say: Callable[[str], None]) -> None:
    """Measure on the ranks that torchrun has started, and write and say what was found, on rank 0."""
    with group() as device:
        first = stock.get_rank() == 0
        tensors = workload(device)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with use_arena(2 * nbytes, device=device):
            times = measure(tensors, ways_of(tensors, sizes), rounds, say if first else lambda _: None)
        if first:
            _tell({name: statistics.median(values) for name, values in times.items()}, sizes, device, out, png)


def _milliseconds(us: float) -> str:
    """Return ``us`` in ms, with three digits that say something.

    Examples
    --------
    >>> [_milliseconds(us) for us in (3.21, 4567.8, 234567.8)]
    ['0.00321', '4.57', '235']
    """
    ms = us / 1e3
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def _tell(us: dict[str, float], sizes: Sequence[float], device: torch.device, out: Path, png: Path | None) -> None:
    chosen = best({size: us[_name(size)] for size in sizes})
    print("200 all_reduces of 4 KiB to 256 KiB: time on the slowest rank, median\n")
    rows = [
        (name, f"{_milliseconds(took)} ms", f"{took / us[ONE_BY_ONE]:.2f}", "<- use this" * (name == _name(chosen)))
        for name, took in us.items()
    ]
    print("\n".join(laid_out(("way", "time", "of one by one", ""), rows)))
    found = {
        "bucket_mb": chosen,
        "us": us,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "world": stock.get_world_size(),
        "date": datetime.date.today().isoformat(),
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nwritten to {out}: with bucketed({str(out)!r}) the program uses it, on all ranks")
    if png is not None:
        _plot(us, sizes, png)
        print(f"a plot is in {png}")


def _plot(us: dict[str, float], sizes: Sequence[float], png: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(sizes, [us[_name(size)] for size in sizes], "o-", label="bucketed()")
    for name, style in ((ONE_BY_ONE, "--"), (MANAGER, ":")):
        axes.axhline(us[name], linestyle=style, color="0.4", label=name)
    axes.set(xscale="log", xlabel="MiB of a bucket", ylabel="us", ylim=(0, None))
    axes.set_title("200 all_reduces of 4 KiB to 256 KiB")
    axes.legend()
    figure.savefig(png, dpi=120, bbox_inches="tight")
    plt.close(figure)


def launch(world: int | None, arguments: Sequence[str]) -> int:
    """Start ``tune`` on ``world`` ranks of this machine, and return the exit status of the first that failed, or 0.

    Torch's elastic launcher starts them, so that they are what torchrun starts on several machines. A rank says itself
    what is wrong: what torchrun would add, a traceback of its own, is left out.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = world or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    logging.disable(logging.ERROR)
    try:
        torchrun.main(["--standalone", "--nproc-per-node", str(ranks), "-m", "safecomm_shell", "tune", *arguments])
    except ChildFailedError as error:
        return max(1, error.get_first_failure()[1].exitcode)
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        logging.disable(logging.NOTSET)
    return 0
