"""Run every example, and write the line that each ends with: ``python benchmarks/examples.py [--ranks N] [--cpu]``.

The results go to ``benchmarks/results/examples.json``, in which a run replaces the one before on as many ranks of the
same device, and the tables of ``examples/README.md`` are made of it. ``--table`` only makes the tables, and ``--check``
only compares them with the file. An example that fails, or takes longer than ``--limit`` seconds, is written as such,
and the exit status is 1.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "gpu"))
from paths import without_directories  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "examples.json"
README = ROOT / "examples" / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
CALLS_TORCHRUN = {"megatron.py"}
"""Examples that call torchrun themselves."""

LAST = re.compile(
    r"(?P<what>\S.*?) (?P<before>-?[\d.]+(?: \w+)?) -> (?P<after>-?[\d.]+(?: .+?)?) \((?P<ways>.+ -> .+)\)"
)
"""The line that an example ends with."""


def examples():
    return sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name != "start.py")


def command(name, ranks, cpu):
    """Return how a person starts an example."""
    script = [f"examples/{name}", *(["--cpu"] if cpu else [])]
    if name in CALLS_TORCHRUN or ranks == 1:
        return ["python", *script]
    return ["torchrun", "--nproc-per-node", str(ranks), *script]


def run(name, ranks, cpu, limit):
    """Return what is written of one example."""
    shown = command(name, ranks, cpu)
    interpreter = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    process = subprocess.Popen(
        [*interpreter[shown[0]], *shown[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"command": " ".join(shown), "failed": f"not over after {limit} s"}
    found = {"command": " ".join(shown), "seconds": round(time.perf_counter() - start, 1)}
    lines = out.strip().splitlines() or [""]
    ended = LAST.fullmatch(lines[-1])
    if process.returncode == 0 and lines[-1].startswith("skipped: "):
        return {**found, "skipped": lines[-1].removeprefix("skipped: ")}
    if process.returncode == 0 and ended:
        return {**found, "line": lines[-1], **ended.groupdict(), "output": lines[:-1]}
    return {**found, "failed": f"status {process.returncode}", "output": lines, "error": error.splitlines()[-20:]}


def said(row):
    """Return one line of what came of an example."""
    return row.get("line") or next(f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row)


def tables(results):
    """Return the text between the markers of README.md."""
    parts = []
    for measured in results["runs"]:
        ranks = "one rank" if measured["ranks"] == 1 else f"{measured['ranks']} ranks"
        parts.append(f"On {ranks}, {measured['device']}, torch {measured['torch']}, {measured['date']}:\n")
        parts.append("| example | ends with |\n| --- | --- |")
        for name, row in measured["examples"].items():
            parts.append(f"| [{name}]({name}) | {said(row)} |")
        parts.append("")
    return "\n".join(parts)


def write_readme(results, *, check):
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{before}{BEGIN}\n{tables(results)}{END}{after}"
    if check and made != text:
        sys.exit("examples/README.md is not what benchmarks/examples.py makes of the results")
    README.write_text(made)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, help="by default as many as there are GPUs, or 2 on the CPU")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, even where there are GPUs")
    parser.add_argument("--limit", type=float, default=180, help="seconds that an example may take (180)")
    parser.add_argument("--table", action="store_true", help="run nothing, and write the tables of examples/README.md")
    parser.add_argument("--check", action="store_true", help="run nothing, and compare the tables with the results")
    parser.add_argument("--only", help="run this example alone, and keep what an earlier run has of the others")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    if arguments.table or arguments.check:
        return write_readme(results, check=arguments.check)
    gpus = 0 if arguments.cpu else torch.cuda.device_count()
    ranks = arguments.ranks or gpus or 2
    cpu = gpus < ranks
    measured = {
        "device": "CPU" if cpu else torch.cuda.get_device_name(),
        "ranks": ranks,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "examples": {},
    }
    mine = [one for one in results["runs"] if (one["device"], one["ranks"]) == (measured["device"], ranks)]
    if arguments.only and mine:
        measured["examples"] |= mine[0]["examples"]
        measured["date"] = mine[0]["date"]  # of the others
    kept = [one for one in results["runs"] if (one["device"], one["ranks"]) != (measured["device"], ranks)]
    for name in [arguments.only] if arguments.only else examples():
        row = measured["examples"][name] = run(name, ranks, cpu, arguments.limit)
        print(f"{name}: {said(row)}", *row.get("error", []), sep="\n  ", flush=True)
        # GPUs first; after each example, so that what was measured is not lost when the machine is.
        measured["examples"] = dict(sorted(measured["examples"].items()))
        results["runs"] = sorted([*kept, measured], key=lambda one: (one["device"] == "CPU", -one["ranks"]))
        RESULTS.write_text(without_directories(json.dumps(results, indent=1)) + "\n")
    write_readme(results, check=False)
    return any("failed" in row for row in measured["examples"].values())


if __name__ == "__main__":
    sys.exit(main())
