"""Memory snapshots of the forum's program, with record_stream and under safecomm, for the demo and the report.

    torchrun --nproc-per-node 2 benchmarks/record_snapshots.py --out benchmarks/results/snapshots
    python -m safecomm report benchmarks/results/snapshots/*.pickle --html page.html

Eight layers by five iterations of a matmul and an all_reduce on a side stream, as in the forum thread that the library
began with. ``stock`` calls record_stream; ``safecomm`` is the same program inside of ``avoid_record_streams()``. Rank 0
writes both, trimmed (the history of its device, the lines of Python, no folders), ``figures.json`` with what the
allocator itself counted, and what the demo draws of them.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as stock

import safecomm
from safecomm.diagnostics.snapshot import read_snapshot
from safecomm.tools.demo import program as of_demo
from safecomm.tools.demo import show

LAYERS, ITERATIONS = 8, 5
ROWS, COLS = 4096, 8192
FOLDER = Path(__file__).resolve().parents[1]


def layer(x, weight, side, library):
    main = torch.cuda.current_stream()
    y = x @ weight  # the line that the report is to name
    side.wait_stream(main)
    with torch.cuda.stream(side):
        library.all_reduce(y)
    y.record_stream(side)
    main.wait_stream(side)
    return y


LINE = layer.__code__.co_firstlineno + 2


def program(x, weights, side, library):
    for _ in range(ITERATIONS):
        y = x
        for weight in weights:
            y = layer(y, weight, side, library)


def short(filename):
    """Return the name of a file without the folders of the machine: of the repository, or of a library."""
    path = Path(filename)
    if path.is_relative_to(FOLDER):
        return str(path.relative_to(FOLDER))
    parts = path.parts
    for place, part in enumerate(parts):
        if part in ("site-packages", "dist-packages"):
            return "/".join(parts[place + 1 :])
    return path.name


def trimmed(snapshot, device):
    """Return what the report reads of ``snapshot``, of one device."""
    stacks = {}

    def frames(found):
        key = tuple((frame["filename"], frame["line"], frame["name"]) for frame in found or ())
        if key not in stacks:
            python = [one for one in key if one[0].endswith(".py")]
            stacks[key] = [{"filename": short(file), "line": line, "name": name} for file, line, name in python]
        return stacks[key]

    def of(entry, *names):
        return {**{name: entry[name] for name in names if name in entry}, "frames": frames(entry.get("frames"))}

    segments = []
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            kept = of(segment, "address", "total_size", "stream", "segment_type", "is_expandable", "active_size")
            blocks = [of(block, "address", "size", "requested_size", "state") for block in segment["blocks"]]
            segments.append({**kept, "device": 0, "blocks": blocks})
    trace = [of(entry, "action", "addr", "size", "stream", "time_us") for entry in snapshot["device_traces"][device]]
    return {"segments": segments, "device_traces": [trace]}


def measure(name, x, weights, side, path):
    """Run the program with its history recorded, write its snapshot, and return what the allocator counted."""
    library = safecomm if name == "safecomm" else stock
    with safecomm.avoid_record_streams() if name == "safecomm" else contextlib.nullcontext():
        program(x, weights, side, library)  # once to warm up
        torch.cuda.synchronize()
        safecomm.drain(wait=True)
        gc.collect()
        torch.cuda.empty_cache()
        stock.barrier()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(stacks="python")
        program(x, weights, side, library)
        # Without synchronising before: the stripes that are there at this moment are part of the picture.
        stats = torch.cuda.memory_stats()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
    if stock.get_rank() == 0:
        with open(path, "wb") as file:
            pickle.dump(trimmed(snapshot, torch.cuda.current_device()), file)
    return {
        "active_peak": stats["active_bytes.all.peak"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "active": stats["active_bytes.all.current"],
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
    }


def drawn(folder):
    """Return what the demo draws of the snapshots in ``folder``, as its own run on GPUs returns it."""
    figures = json.loads((folder / "figures.json").read_text())
    found = {name: figures[name] for name in ("device", "torch", "date")}
    pictures = []
    for name, title in zip(("stock", "safecomm"), of_demo.TITLES, strict=True):
        (trace,) = read_snapshot(folder / f"{name}.pickle").traces
        steps = [list(step) for step in zip(trace.times, trace.allocated, trace.unusable, strict=True)]
        pictures.append({"title": title, "steps": steps})
    return {**found, "rows": ROWS, "pictures": pictures}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    stock.init_process_group("nccl", device_id=torch.device("cuda", local))
    arguments.out.mkdir(parents=True, exist_ok=True)
    side = torch.cuda.Stream()
    x = torch.full((ROWS, COLS), 1e-3, device="cuda", dtype=torch.bfloat16)
    weights = [torch.full((COLS, COLS), 1e-5, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    figures = {
        "command": "torchrun benchmarks/record_snapshots.py",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "world": stock.get_world_size(),
        "date": datetime.date.today().isoformat(),
        "line": f"{short(__file__)}:{LINE} in layer",
    }
    for name in ("stock", "safecomm"):
        figures[name] = measure(name, x, weights, side, arguments.out / f"{name}.pickle")
    if stock.get_rank() == 0:
        (arguments.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        show.RECORDED.write_text(json.dumps(drawn(arguments.out)) + "\n")
        total = sum(path.stat().st_size for path in arguments.out.iterdir())
        print(json.dumps(figures, indent=1), f"\n{total} bytes in {arguments.out}", flush=True)
    safecomm.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
