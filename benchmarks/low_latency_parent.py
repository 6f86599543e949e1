"""The kernels of low_latency() of two trees, which take turns on the same GPUs: this one's, and those of a parent.

    python benchmarks/low_latency_parent.py --parent FOLDER --out FILE

FOLDER is another checkout, and has its commit's name. Each side has two processes of its own, and while those of one
replay their graphs the others wait. 20 calls in a graph, which is replayed four times, and the last replay is timed; in
each of 30 turns the median of three, of the slowest rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from measured import captured, setting, write

HERE = Path(__file__).resolve()
SIZES = {
    "all_reduce": [512, *(1 << power for power in (11, *range(13, 26)))],
    "all_gather": [1 << power for power in range(13, 25)],
    "reduce_scatter": [1 << power for power in range(13, 25)],
}
CALLS, LEAD, TURNS = 20, 3, 30
THIS, PARENT = SIDES = ("this", "parent")


class Turns:
    """What the sides take turns by: a store of their own. ``side``: the number of one."""

    def __init__(self, stock, path, side, world):
        self.store = stock.FileStore(path, -1)
        self.store.set_timeout(timedelta(seconds=400))
        self.world, self.turn = world, side
        if not side:
            self.store.set("go0", "")

    def __enter__(self):
        self.store.wait([f"go{self.turn}"])

    def __exit__(self, *_):
        if self.store.add(f"done{self.turn}", 1) == self.world:
            self.store.set(f"go{self.turn + 1}", "")
        self.turn += len(SIDES)


def one_side(side, turns_path, out):
    """Run on each rank of a tree; rank 0 writes the times, by collective and bytes."""
    import torch
    import torch.distributed as stock

    import safecomm
    from safecomm.tools.tune_low_latency import calls

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    stock.init_process_group("nccl", device_id=device)
    turns = Turns(stock, turns_path, side, stock.get_world_size())
    with turns:
        on = safecomm.low_latency().enable()
        if on.reason:
            raise SystemExit(on.reason)
        runs = {
            f"{name}, {size}": captured(calls(name, size, torch.bfloat16, device, between=False)[1], CALLS, LEAD)
            for name, sizes in SIZES.items()
            for size in sizes
        }
    times = {name: [] for name in runs}
    for _ in range(TURNS):
        with turns:
            for name, run in runs.items():
                taken = []
                for _ in range(3):
                    stock.barrier()
                    taken.append(run())
                times[name].append(statistics.median(taken))
    worst = torch.tensor(list(times.values()), device=device)
    with turns:
        stock.all_reduce(worst, op=stock.ReduceOp.MAX)
        if stock.get_rank() == 0:
            results = setting("python benchmarks/low_latency_parent.py")
            write(out, results | {"times": dict(zip(times, worst.tolist(), strict=True))})
    os._exit(0)  # the graphs of a rank would keep the other's group


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent")
    parser.add_argument("--out", required=True)
    parser.add_argument("--side", type=int)
    parser.add_argument("--turns")
    arguments = parser.parse_args()
    if arguments.side is not None:
        one_side(arguments.side, arguments.turns, arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(arguments.parent).resolve()
        trees = (HERE.parent.parent, parent)
        outs = [f"{folder}/{side}.json" for side in range(len(SIDES))]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE)]
        running = [
            subprocess.Popen(
                [*launch, "--side", str(side), "--turns", f"{folder}/turns", "--out", outs[side]],
                env={**os.environ, "PYTHONPATH": str(tree)},
            )
            for side, tree in enumerate(trees)
        ]
        statuses = [one.wait() for one in running]
        if any(statuses):
            raise SystemExit("one of the sides has failed")
        Path(arguments.out).write_text(json.dumps(compared(parent.name, outs), indent=1) + "\n", encoding="utf-8")


def compared(parent, paths):
    """Return the results of the files of all sides side by side."""
    found = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    times = {side: one.pop("times") for side, one in zip(SIDES, found, strict=True)}
    rows = {}
    for name, parents in times[PARENT].items():
        rows[name] = {side: round(statistics.median(times[side][name]), 2) for side in SIDES}
        ratios = sorted(a / b for a, b in zip(times[THIS][name], parents, strict=True))
        tenth = len(ratios) // 10
        rows[name] |= {"ratio": round(statistics.median(ratios), 3)}
        rows[name] |= {"from": round(ratios[tenth], 3), "to": round(ratios[-1 - tenth], 3)}
    return found[0] | {"parent": parent, "us": rows}


if __name__ == "__main__":
    main()
