"""What ``safecomm compare`` tells of ten programs: peaks, what it predicted, and steps, one program after another.

    python benchmarks/gains.py --out FILE [--ranks 2] [--turns 1] [--only forum fsdp1]

The file is written after each program, so a run that is cut short has what it has seen. A program whose libraries are
not installed has its error there. ``history`` is the peak as the allocator's history has it, the sum of compare's
lines; ``active`` the allocator's own figure.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from measured import machine

from safecomm.tools.compare import changes_by_line

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = {
    "forum": ("forum.py",),
    "overlap": ("overlap.py",),
    "fsdp2 with prefetch": ("fsdp2_prefetch.py",),
    "Megatron combined 1F1B": ("megatron_1f1b.py", "combined"),
    "fsdp1": ("fsdp1.py",),
    "all-to-all": ("all_to_all.py",),
    "ddp with a hook": ("ddp_hook.py",),
    "tensor parallel": ("tensor_parallel.py",),
    "transformers tensor parallel": ("hf_tensor_parallel.py",),
    "zero 3": ("zero3.py",),
    "Megatron 1F1B": ("megatron_1f1b.py",),
}
LIMIT = 75
"""Seconds that a run of a program may take."""
LINES = 6
"""Of a program that are kept: those that differ the most."""


def compared(command, ranks, turns):
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        program = [str(ROOT / "benchmarks" / "programs" / command[0]), *command[1:]]
        options = ["--limit", f"{LIMIT}", "--turns", f"{turns}", "--out", folder, "--"]
        start = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "safecomm", "compare", *options, *launch, *program],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        found = {"seconds in all": round(time.monotonic() - start, 1)}
        if run.returncode:
            return {**found, "error": run.stderr[-2000:]}
        return {**found, **told(json.loads(pathlib.Path(folder, "compare.json").read_text(encoding="utf-8")))}


def told(found):
    """Return the part of ``compare.json`` that is kept."""
    ways = {}
    for name, way in found["ways"].items():
        calls = [row["nbytes"] * row["calls"] for row in way["collectives"]]
        ways[name] = {
            "bytes": {**way["bytes"], "history": sum(way["lines"].values())},
            "active of runs": way["active of runs"],
            "ms": [round(1e3 * seconds, 2) for seconds in way["seconds"]],
            "exposed": way["exposed"],
            "collectives": len(calls),
            "bytes of collectives": sum(calls),
        }
    patched = [name for name in ways if name != "unpatched"]
    lowest = min(patched, key=lambda name: ways[name]["bytes"]["active"] or 0)
    best, predicted = ways[lowest]["bytes"]["active"], found["predicted active"]
    changes = changes_by_line(*(found["ways"][name]["lines"] for name in ("unpatched", lowest)))
    return {
        "ranks": found["ranks"],
        "ways": ways,
        "predicted active": predicted,
        "best active": best,
        "off by": round(predicted / best - 1, 4) if best else None,
        "lines": {at.rpartition("/")[2]: change for at, change in list(changes.items())[:LINES] if change},
        "advice": found["advice"],
    }


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--turns", type=int, default=1)
    options.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    options = options.parse_args()
    path = pathlib.Path(options.out)
    command = f"python benchmarks/gains.py --ranks {options.ranks} --turns {options.turns}"
    results = {**machine(command, options.ranks), "programs": {}}
    for name in options.only:
        results["programs"][name] = one = compared(PROGRAMS[name], options.ranks, options.turns)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(one)[:600], flush=True)


if __name__ == "__main__":
    main()
