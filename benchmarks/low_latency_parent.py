"""The kernels of low_latency() of two trees, which take turns on the same GPUs: this one's, and those of a parent.

    python benchmarks/low_latency_parent.py --parent FOLDER --out FILE

FOLDER is another checkout. Each tree has two processes of its own, and while those of one replay their graphs the
others wait. 20 calls in a graph, which is replayed twice, and the second replay is timed; in each of 30 turns the
median of three, of the slowest rank.
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

from measured import setting, write

HERE = Path(__file__).resolve()
SIZES = {
    "all_reduce": [512, *(1 << power for power in (11, *range(13, 23)))],
    "all_gather": [8 << 10, 64 << 10, 1 << 20],
    "reduce_scatter": [8 << 10, 64 << 10, 1 << 20],
}
TURNS = 30
THIS, PARENT = "this", "parent"


class Turns:
    """What the two trees take turns by: a store of their own. ``side``: 0 or 1."""

    def __init__(self, stock, path, side, world):
        self.store = stock.FileStore(path, -1)
        self.store.set_timeout(timedelta(seconds=120))
        self.world, self.turn = world, side
        if not side:
            self.store.set("go0", "")

    def __enter__(self):
        self.store.wait([f"go{self.turn}"])

    def __exit__(self, *_):
        if self.store.add(f"done{self.turn}", 1) == self.world:
            self.store.set(f"go{self.turn + 1}", "")
        self.turn += 2


def one_side(side, turns_path, out):
    """Run on each rank of a tree; rank 0 writes the times, by collective and bytes."""
    import torch
    import torch.distributed as stock

    import safecomm
    from safecomm.tools.tune_low_latency import calls, prepare

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    stock.init_process_group("nccl", device_id=device)
    turns = Turns(stock, turns_path, side, stock.get_world_size())
    on = safecomm.low_latency().enable()
    if on.reason:
        raise SystemExit(on.reason)
    with turns:
        runs = {
            f"{name}, {size}": prepare(calls(name, size, torch.bfloat16, device)[1], device)
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
        trees = (HERE.parent.parent, Path(arguments.parent).resolve())
        outs = [f"{folder}/{side}.json" for side in range(2)]
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
            raise SystemExit("one of the trees has failed")
        Path(arguments.out).write_text(json.dumps(compared(*outs), indent=1) + "\n", encoding="utf-8")


def compared(this, parent):
    """Return the results of both files side by side."""
    mine, theirs = (json.loads(Path(path).read_text(encoding="utf-8")) for path in (this, parent))
    times = {THIS: mine.pop("times"), PARENT: theirs["times"]}
    rows = {}
    for name, taken in times[THIS].items():
        ratios = sorted(a / b for a, b in zip(taken, times[PARENT][name], strict=True))
        tenth = len(ratios) // 10
        rows[name] = {
            THIS: round(statistics.median(taken), 2),
            PARENT: round(statistics.median(times[PARENT][name]), 2),
        }
        rows[name] |= {"ratio": round(statistics.median(ratios), 3)}
        rows[name] |= {"from": round(ratios[tenth], 3), "to": round(ratios[-1 - tenth], 3)}
    return mine | {"us": rows}


if __name__ == "__main__":
    main()
