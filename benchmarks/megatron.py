"""The real megatron-core on GPUs, patched and not: ``python benchmarks/megatron.py --out FILE [--world 2]``.

Each way of training runs unpatched, patched early, patched late, by the runner, and by the runner with
``--avoid-record-streams``, also with ``--arena``, side by side: losses, weights and each process's memory are compared.
Then the time of a step is measured alone, patched and unpatched in turns, in several processes one after the other:
with the microbatches of the memory's runs, where the host is what takes the time, and with such that the device is.
Last, the calls in a step one by one (``megatron_calls.py``), and what safecomm's own parts take in it
(``megatron_parts.py``). Needs megatron-core.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "frameworks" / "megatron_gpt.py"
CALLS = ROOT / "benchmarks" / "megatron_calls.py"
PARTS = ROOT / "benchmarks" / "megatron_parts.py"
WAYS = {
    "TP": [],
    "TP, SP, DDP, overlapped": ["--sp", "--ddp", "--overlap", "--dist-opt"],
    "MoE, EP": ["--moe", "4", "--tp", "1", "--ep", "2"],
    "MoE, EP, combined 1F1B": ["--moe", "4", "--tp", "1", "--ep", "2", "--combined", "--micro", "8"],
    "PP": ["--tp", "1", "--pp", "2"],
}
HOW = {
    "stock": ([], []),
    "early": ([], ["--patch", "safecomm"]),
    "late": ([], ["--patch", "safecomm", "--patch-late"]),
    "runner": (["-m", "safecomm", "run"], []),
    "runner, avoid": (["-m", "safecomm", "run", "--avoid-record-streams"], []),
    "runner, arena, avoid": (["-m", "safecomm", "run", "--arena", "64MiB", "--avoid-record-streams"], []),
}
TIMED = {  # what is added to the options, and processes
    "microbatches of 2": (["--mbs", "2"], 8),
    "microbatches of 64": (["--mbs", "64"], 2),  # the device takes the time, and that differs little
}
CALLED = ["TP", "TP, SP, DDP, overlapped"]
IN_PARTS = [*CALLED, "MoE, EP, combined 1F1B"]
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]  # Student's, of 1 degree of freedom and more
SIZE = ["--dtype", "bf16", "--hidden", "1024", "--layers", "4", "--seq", "512", "--steps", "6"]


def run(world, before, after, limit=90, strict=False, script=SCRIPT):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SAFECOMM_STRICT": str(int(strict)),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, *before, str(script), "--device", "cuda", *after],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return {"ended": f"not within {limit} s"}, ""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        said = [line for line in error.splitlines() if "Error" in line and "elastic" not in line]
        return {"ended": f"status {process.returncode}", "error": said[:4]}, error
    found = json.loads(lines[-1])
    found["ended"] = f"by itself, {time.perf_counter() - start:.0f} s"
    return found, error


def in_line(world, commands, limit):
    """Run ``commands``, pairs of a script and its options, and yield what each found; only one has the GPUs at a time.

    All begin at once, because most of what a process takes is the import of torch and Megatron.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=len(commands) or 1) as together:
        turns = [Path(folder, str(number)) for number in range(len(commands))]
        started = [
            together.submit(run, world, [], [*options, "--after", str(turn)], limit * len(commands), script=script)
            for (script, options), turn in zip(commands, turns, strict=True)
        ]
        for turn, ended in zip(turns, started, strict=True):
            turn.touch()
            yield ended.result()[0]


def interval(ratios):
    """Return the 95 % interval of the mean of ``ratios``, taken of their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    middle, spread = statistics.fmean(logs), statistics.stdev(logs)
    half = T_975[len(logs) - 2] * spread / math.sqrt(len(logs))
    return [round(math.exp(middle + side * half), 4) for side in (-1, 0, 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="which of them to run")
    parser.add_argument(
        "--how", nargs="*", default=list(HOW), choices=list(HOW), help="patched how; always unpatched too"
    )
    parser.add_argument("--times", nargs="*", default=list(WAYS), choices=list(WAYS), help="of which to time the steps")
    parser.add_argument("--microbatches", nargs="*", default=list(TIMED), choices=list(TIMED), help="with which")
    parser.add_argument("--seconds", type=int, default=12, help="time of a process in which they are timed")
    parser.add_argument("--calls", nargs="*", default=CALLED, choices=list(WAYS), help="of which to time the calls")
    parser.add_argument("--parts", nargs="*", default=IN_PARTS, choices=list(WAYS), help="of which to time the parts")
    parser.add_argument("--processes", type=int, default=0, help="how many for each way, in place of those of TIMED")
    parser.add_argument("--no-control", dest="control", action="store_false", help="do not time unpatched steps twice")
    parser.add_argument("--graph", choices=("both", "ours", "none"), default="both", help="full-iteration CUDA graphs")
    arguments = parser.parse_args()
    results = {"command": "python benchmarks/megatron.py", "date": datetime.date.today().isoformat(), "ways": {}}
    if os.path.exists(arguments.out):  # what is not run again stays
        with open(arguments.out) as file:
            results = json.load(file)
    wrong = 0

    def save():
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")

    for way in arguments.ways:
        options, rows, started = WAYS[way], {}, {}
        with ThreadPoolExecutor() as side_by_side:
            for how, (before, after) in HOW.items():
                if how == "stock" or how in arguments.how:
                    command = [*SIZE, *options, *after]
                    started[how] = side_by_side.submit(run, arguments.world, before, command, strict=how == "early")
        for how, ended in started.items():
            found, said = ended.result()
            if how == "stock" and found.get("losses") is None:
                sys.exit(f"{way} does not run without a patch: {found}")
            rows[how] = {key: found.get(key) for key in ("ended", "losses", "grad_norms", "hashes", "mem", "error")}
            rows[how]["past"] = said.count("bypassed safecomm")
            for key in ("torch", "mcore"):
                results.setdefault(key, found.get(key))
        stock = rows["stock"]
        for row in rows.values():
            row["same"] = all(row[key] == stock[key] for key in ("losses", "grad_norms", "hashes"))
            wrong += not row["same"] or bool(row["past"])
            if row["mem"] and stock["mem"]:
                row["reserved minus allocated KiB"] = row["mem"]["peak_reserved_kib"] - row["mem"]["peak_alloc_kib"]
                for key in ("peak_alloc_kib", "peak_reserved_kib"):
                    row[f"{key} ratio"] = round(row["mem"][key] / stock["mem"][key], 4)
        results["ways"].setdefault(way, {}).update(rows)
        shown = {how: [row["ended"], row["same"], row["past"], row["error"]] for how, row in rows.items()}
        print(way, shown, {how: row.get("peak_reserved_kib ratio") for how, row in rows.items()}, flush=True)
        save()
    for way in arguments.times:
        for size in arguments.microbatches:
            microbatches, processes = TIMED[size]
            processes = arguments.processes or processes
            options = [*SIZE, *WAYS[way], *microbatches, "--compare", str(arguments.seconds)]
            options += ["--no-control"] * (not arguments.control)
            found = list(in_line(arguments.world, [(SCRIPT, options)] * processes, arguments.seconds + 30))
            times = [one["compare"] for one in found if one.get("compare")]
            row = {"processes": times or found}
            for key in times[0] if times else ():
                row[key] = round(statistics.median(one[key] for one in times), 4)
                if key in ("ratio", "avoid", "control") and len(times) > 1:
                    row[f"{key}, 95 %"] = interval([one[key] for one in times])
            results.setdefault("step time", {}).setdefault(way, {})[size] = row
            print("step time", way, size, row, flush=True)
            save()
    asked = [("calls", CALLS, way) for way in arguments.calls] + [("parts", PARTS, way) for way in arguments.parts]
    timing = ["--mbs", "2", "--compare", str(arguments.seconds)]
    commands = [(script, [*SIZE, *WAYS[way], *timing]) for _, script, way in asked]
    for (name, _, way), found in zip(asked, in_line(arguments.world, commands, arguments.seconds + 30), strict=True):
        results.setdefault(name, {})[way] = found
        print(name, way, found, flush=True)
        save()
    graph = ["--graph", "--steps", "6", "--dtype", "bf16"]
    if arguments.graph == "both":
        found, _ = run(arguments.world, [], graph, limit=45)
        results.setdefault("graph", {})["stock"] = {"ended": found["ended"]}
    if arguments.graph != "none":
        ours, said = run(arguments.world, ["-m", "safecomm", "run", "--avoid-record-streams"], graph, limit=60)
        row = {key: ours.get(key) for key in ("ended", "losses", "hashes", "error")}
        row["said"] = [line for line in said.splitlines() if line.startswith("safecomm")]
        results.setdefault("graph", {})["runner, avoid"] = row
    print("graph", results.get("graph"), flush=True)
    save()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
