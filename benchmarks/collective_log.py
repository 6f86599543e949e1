"""collective_log(): its bandwidths against the same calls timed apart, and what recording costs the host.

    python benchmarks/collective_log.py --out FILE [--ranks 2] [--parent DIR]

Ranks are started in turns without the flight recorder, with it, and with it and the times of NCCL. Each tells the host
time of a call of torch's and of safecomm's; with the times each also runs calls in a loop, whose log is held against a
CUDA graph of such calls, which is timed as nccl-tests time their loop. ``--parent``: another checkout of safecomm,
whose host time without the recorder is measured in the same turns.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from measured import begin, captured, machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDED = {"TORCH_FR_BUFFER_SIZE": "20000"}
WAYS = {"off": {}, "on": RECORDED, "on, timed": {**RECORDED, "TORCH_NCCL_ENABLE_TIMING": "1"}}
OPS = {"gather": "all_gather_into_tensor", "scatter": "reduce_scatter_tensor", "": "all_reduce"}
"""By what is in torch's name of the operation."""
TURNS, ROUNDS, BURST, CALLS = 3, 60, 50, 20
MIB = 1 << 20


def ranks_main(out, bandwidth):
    """Run in each rank: the host time of a call, and the bandwidths if they are asked for."""
    import torch.distributed as stock

    import safecomm

    device = begin()
    small = torch.ones(256, device=device)
    found = {"us": {}}
    for name, call in (("torch", stock.all_reduce), ("safecomm", safecomm.all_reduce)):
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BURST):
                call(small)
            times.append((time.perf_counter() - start) * 1e6 / BURST)
        found["us"][name] = round(statistics.median(times), 2)
    if bandwidth:
        from safecomm.diagnostics.collective_log import factor  # a parent may be without it

        world = stock.get_world_size()
        found["bandwidth"] = {}
        apart = {}
        for mib in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            whole = torch.ones(mib * MIB // 4, device=device)
            part = whole.chunk(world)[stock.get_rank()].clone()
            calls = {
                "all_reduce": lambda whole=whole: stock.all_reduce(whole),
                "all_gather_into_tensor": lambda whole=whole, part=part: stock.all_gather_into_tensor(whole, part),
                "reduce_scatter_tensor": lambda whole=whole, part=part: stock.reduce_scatter_tensor(part, whole),
            }
            for name, call in calls.items():
                replay = captured(call, CALLS, 1)
                apart[name, mib] = statistics.median(replay() for _ in range(5))
                stock.barrier()
                torch.cuda.synchronize()
                for _ in range(3 * CALLS):
                    call()
                torch.cuda.synchronize()
                whole.fill_(1)
                del replay  # NCCL waits for its graphs as the group is destroyed
        time.sleep(2)  # NCCL's watchdog asks the events of complete calls, ten times a second
        for row in safecomm.collective_log().rows:
            op = next(name for part, name in OPS.items() if part in row.op)
            us = apart.get((op, row.nbytes // MIB))
            if us is not None and row.nbytes >= MIB and row.us is not None:
                bus = row.nbytes / us / 1e3 * factor(op, world)
                found["bandwidth"][f"{op}, {row.nbytes // MIB} MiB"] = {
                    "log": round(row.bus_bandwidth, 1), "apart": round(bus, 1),
                    "ratio": round(row.bus_bandwidth / bus, 4), "calls": row.calls,
                }  # fmt: skip
    if stock.get_rank() == 0:
        pathlib.Path(out).write_text(json.dumps(found), encoding="utf-8")
    stock.destroy_process_group()


def started(environment, ranks, bandwidth, checkout):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rank0.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        path = {"PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
        command = [*launch, "--out", out, "--rank", *(["--bandwidth"] if bandwidth else [])]
        subprocess.run(command, env={**os.environ, **path, **environment}, check=True, timeout=120)
        return json.loads(pathlib.Path(out).read_text(encoding="utf-8"))


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--parent", type=pathlib.Path)
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--bandwidth", action="store_true", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.rank:
        ranks_main(options.out, options.bandwidth)
        return
    ways = {name: (environment, ROOT) for name, environment in WAYS.items()}
    if options.parent:
        ways["off, parent"] = {}, options.parent
    results = {
        **machine(f"python benchmarks/collective_log.py --ranks {options.ranks}", options.ranks),
        "us a call, of each process": {name: {} for name in ways},
        "bus bandwidth, GB/s": {},
    }
    times, bandwidth = results["us a call, of each process"], results["bus bandwidth, GB/s"]
    for turn in range(TURNS):
        for name in list(ways) if turn % 2 else reversed(ways):
            environment, checkout = ways[name]
            found = started(environment, options.ranks, name == "on, timed" and not bandwidth, checkout)
            bandwidth.update(found.get("bandwidth", {}))
            for library, us in found["us"].items():
                times[name].setdefault(library, []).append(us)
            # After each process, so that a run that is cut short has what it has seen.
            pathlib.Path(options.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(name, found, flush=True)


if __name__ == "__main__":
    main()
