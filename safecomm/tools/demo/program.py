"""The program of the demo: layers of a matmul, and an all_reduce of each result on a side stream, on two GPUs."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from safecomm.collectives.gates import all_reduce
from safecomm.collectives.groups import destroy_process_group
from safecomm.core.drain import drain
from safecomm.errors import SafecommError
from safecomm.interception.record_stream import avoid_record_streams

RANKS = 2
LAYERS, ITERATIONS = 8, 5
ROWS, COLS = 4096, 8192
LIMIT = 120.0
"""Seconds that all of it may take."""

TITLES = "record_stream", "safecomm.avoid_record_streams()"
"""What the two runs of the program are called: with ``torch.distributed``, and with safecomm."""

Step = tuple[float, int, int]
"""Since how many seconds so many bytes were in use, and so many freed that could not be given out again yet."""


def rows_for(free: int) -> int:
    """Return the rows of a layer's result with which a rank needs no more than ``free`` bytes.

    Raises ValueError if no number of rows is small enough.
    """
    # At most nothing that is communicated is given back during a run.
    for rows in (ROWS >> power for power in range(7)):
        if 2 * COLS * (LAYERS * COLS + (LAYERS * ITERATIONS + 4) * rows) <= free:
            return rows
    raise ValueError(f"the demo finds no room on a GPU: {free >> 20} MiB are free; --device cpu needs none")


def run_program(
    x: torch.Tensor, weights: list[torch.Tensor], side: torch.cuda.Stream, reduce: Callable[[torch.Tensor], object]
) -> tuple[torch.Tensor, list[Step]]:
    """Run the program; return its result, and what the allocator counted at each change of what is in use."""
    steps: list[Step] = []
    start = time.perf_counter()

    def look() -> None:
        counted = torch.cuda.memory_stats()
        used, active = (counted[f"{what}_bytes.all.current"] for what in ("allocated", "active"))
        steps.append((time.perf_counter() - start, used, active - used))

    main = torch.cuda.current_stream()
    for _ in range(ITERATIONS):
        h = x
        for weight in weights:
            y = h @ weight
            look()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                reduce(y)
            y.record_stream(side)
            main.wait_stream(side)
            h = y
            del y
            look()
    return h, steps


def _rank(rank: int, rows: int, folder: str) -> None:
    """Run one rank; the first one writes what was found to ``folder``."""
    dist = torch.distributed
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=LIMIT), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    # The input is the same on both ranks, the weights are each rank's own. The scale keeps the values near 1.
    common, own = (torch.Generator("cuda").manual_seed(seed) for seed in (0, 1 + rank))
    x = torch.randn((rows, COLS), dtype=torch.bfloat16, device="cuda", generator=common)
    scale = (COLS * RANKS) ** -0.5
    weights = [
        torch.randn((COLS, COLS), dtype=torch.bfloat16, device="cuda", generator=own).mul_(scale) for _ in range(LAYERS)
    ]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pictures, results = [], []
    for title, reduce in zip(TITLES, (dist.all_reduce, all_reduce), strict=True):
        ours: AbstractContextManager[object] = avoid_record_streams()
        with ours if reduce is all_reduce else contextlib.nullcontext():
            run_program(x, weights, side, reduce)  # once to warm up
            torch.cuda.synchronize()
            drain(wait=True)
            gc.collect()
            dist.barrier()
            torch.cuda.synchronize()
            result, steps = run_program(x, weights, side, reduce)
        results.append(result.cpu())
        del result
        pictures.append({"title": title, "steps": steps})
    # Of two ranks the sums do not depend on their order.
    if not torch.equal(*results):
        raise SafecommError("the program has computed something else with safecomm than with torch.distributed")
    if rank == 0:
        found = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat(),
            "rows": rows, "pictures": pictures,
        }  # fmt: skip
        (Path(folder) / "found.json").write_text(json.dumps(found))
    destroy_process_group()


def launch(work: Callable[..., None], *arguments: object, limit: float = LIMIT) -> None:
    """Run ``work(rank, *arguments)`` in two processes, which end before this returns, and with this process.

    Raises SafecommError if a rank fails, or if they are not done after ``limit`` seconds.
    """
    multiprocessing: Any = torch.multiprocessing
    ranks = multiprocessing.spawn(work, arguments, nprocs=RANKS, join=False)
    deadline = time.monotonic() + limit
    try:
        while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise SafecommError(f"the ranks were not done after {limit:g} s, and were ended")
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
        raise SafecommError(f"rank {error.error_index} did not end well:{error}") from None
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def run() -> dict[str, Any]:
    """Run the program on two GPUs, with ``torch.distributed`` and with safecomm; return what was found.

    That is what ``recorded.json`` has: the GPU's name, torch's version, the date, the rows of a layer's result, and of
    each run a title and its steps on the first rank.

    Raises
    ------
    ValueError
        If the GPUs have no room for it.
    SafecommError
        If a rank fails or is not done in time, or if the two runs do not compute the same numbers.
    """
    rows = rows_for(int(0.9 * min(torch.cuda.mem_get_info(rank)[0] for rank in range(RANKS))))
    with tempfile.TemporaryDirectory(prefix="safecomm-demo-", ignore_cleanup_errors=True) as folder:
        launch(_rank, rows, folder)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found
