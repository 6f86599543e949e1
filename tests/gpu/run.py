"""What only real GPUs show: ``torchrun --nproc-per-node 2 tests/gpu/run.py --out FILE.json``.

Every case runs on all ranks under a time limit, with ``torch.distributed`` beside safecomm where the case is about
what goes wrong without it: a program that corrupts nothing under either proves nothing. Rank 0 writes the results
after each case, so that a hang loses only the case that hung.
"""

import argparse
import datetime
import faulthandler
import json
import os
import sys
import time
import traceback

import arena  # noqa: F401
import backends  # noqa: F401
import collectives  # noqa: F401
import diagnostics  # noqa: F401
import ends  # noqa: F401
import graphs  # noqa: F401
import invariance  # noqa: F401
import low_latency  # noqa: F401
import one_gpu
import operators  # noqa: F401
import python_backend
import ring  # noqa: F401
import stream_order  # noqa: F401
import torch
import torch.distributed as stock
import unknown_backend  # noqa: F401
import version_counters  # noqa: F401
from harness import CASES, rank, settle
from paths import without_directories

import safecomm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(safecomm.__file__))) + os.sep


def versions():
    return {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "backend": type(stock.group.WORLD._get_backend(torch.device("cuda"))).__name__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(),
        "world": stock.get_world_size(),
        "date": datetime.date.today().isoformat(),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="run the cases with one of these in their names")
    parser.add_argument("--share", default="0/1", help="run every n-th case from the k-th on, as k/n")
    parser.add_argument("--backend", default="nccl", help="of the group that the cases run on")
    parser.add_argument("--skip", nargs="*", default=[], help="leave these cases out")
    parser.add_argument("--one-gpu", action="store_true", help="the ranks share a GPU: some cases of low_latency()")
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    index = 0 if arguments.one_gpu else local
    torch.cuda.set_device(index)
    if arguments.backend == "nccl4py":
        python_backend.register()
    if arguments.one_gpu:
        one_gpu.share()
        stock.init_process_group("gloo")
    else:
        stock.init_process_group(arguments.backend, device_id=torch.device("cuda", index))
    stock.all_reduce(torch.ones(1, device="cuda"))
    command = f"torchrun --nproc-per-node {stock.get_world_size()} tests/gpu/run.py"
    if arguments.backend != "nccl":
        command += f" --backend {arguments.backend}"
    if arguments.one_gpu:
        command += " --one-gpu"
    if arguments.only != [""]:
        command += f" --only {' '.join(arguments.only)}"
    if arguments.skip:
        command += f" --skip {' '.join(arguments.skip)}"
    first, step = map(int, arguments.share.split("/"))
    if step > 1:
        command += f" --share {arguments.share}"
    results = {"command": command, **versions(), "cases": {}}
    failures = 0
    for name, (function, limit, ranks) in list(CASES.items())[first::step]:
        if name in arguments.skip or not any(part in name for part in arguments.only):
            continue
        if stock.get_world_size() < ranks:
            results.setdefault("not run: they take more ranks", []).append(name)
            continue
        faulthandler.dump_traceback_later(limit * (one_gpu.TURNS if arguments.one_gpu else 1), exit=True)
        start = time.perf_counter()
        try:
            settle()
            outcome = {"passed": True, "figures": function()}
        except Exception as error:
            outcome = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        verdicts = [None] * stock.get_world_size()
        stock.all_gather_object(verdicts, outcome["passed"])
        outcome["passed"] = all(verdicts)
        faulthandler.cancel_dump_traceback_later()
        failures += not outcome["passed"]
        outcome["seconds"] = round(time.perf_counter() - start, 2)
        results["cases"][name] = outcome
        if rank() == 0:
            print("passed" if outcome["passed"] else "FAILED", name, json.dumps(outcome), flush=True)
            with open(arguments.out, "w") as file:
                file.write(without_directories(json.dumps(results, indent=1).replace(ROOT, "")) + "\n")
    settle()  # graphs that are garbage would keep the group alive
    safecomm.destroy_process_group()
    if local == 0:
        print(f"{len(results['cases']) - failures} passed, {failures} failed", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
