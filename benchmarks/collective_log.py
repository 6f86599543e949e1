"""collective_log(): its bandwidths against the same calls timed apart, and what recording costs the host.

    python benchmarks/collective_log.py --out FILE [--ranks 2] [--parent DIR]

First a program with the times of NCCL runs calls of each size in loops, once with the card kept busy until the host has
made all calls, and once as they come. Their log is held against a program without the recorder, which does the same
with events of its own: around the loop, as nccl-tests time theirs, and around each call.

Then programs without the flight recorder, with it, and with it and the times of NCCL stand side by side and take turns
of fifty calls, of torch's and of safecomm's. ``--parent``: another checkout of safecomm, without the recorder, in the
same turns.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import time

import torch
from measured import begin, machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDED = {"TORCH_FR_BUFFER_SIZE": "20000"}
TIMED = {**RECORDED, "TORCH_NCCL_ENABLE_TIMING": "1"}
WAYS = {"off": {}, "on": RECORDED, "on, timed": TIMED}
OPS = {"gather": "all_gather_into_tensor", "scatter": "reduce_scatter_tensor", "": "all_reduce"}
"""By what is in torch's name of the operation."""
PROGRAMS, ROUNDS, BURST, CALLS = 6, 60, 50, 20
SIZES = 1, 2, 4, 8, 16, 32, 64, 128, 256
MIB = 1 << 20
BUSY = 20_000_000
"""Cycles, some 10 ms: in which the host makes more calls than are timed."""


def rank_main():
    """Run in each rank: do what each line of the input asks for, and print what was found."""
    import torch.distributed as stock

    import safecomm

    device = begin()
    small = torch.ones(256, device=device)
    libraries = {"torch": stock, "safecomm": safecomm}
    for library in libraries.values():
        library.all_reduce(small)
    for line in sys.stdin:
        found = {}
        if line.strip() == "us":
            for name in random.sample(sorted(libraries), 2):
                call = libraries[name].all_reduce
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(BURST):
                    call(small)
                found[name] = (time.perf_counter() - start) * 1e6 / BURST
            torch.cuda.synchronize()
        elif line.strip() == "logged":
            found = logged()
        else:
            found = loops(device, line.strip() == "busy")
        print(json.dumps(found), flush=True)
    stock.destroy_process_group()


def loops(device, busy):
    """Return by operation and MiB the us of a call, by events around loops of them and by events around each.

    ``busy``: with the card at work until all calls of a loop are made.
    """
    import torch.distributed as stock

    world = stock.get_world_size()
    found = {}
    for mib in SIZES:
        whole = torch.ones(mib * MIB // 4, device=device)
        part = whole.chunk(world)[stock.get_rank()].clone()
        calls = {
            "all_reduce": lambda whole=whole: stock.all_reduce(whole),
            "all_gather_into_tensor": lambda whole=whole, part=part: stock.all_gather_into_tensor(whole, part),
            "reduce_scatter_tensor": lambda whole=whole, part=part: stock.reduce_scatter_tensor(part, whole),
        }
        for name, call in calls.items():
            runs = [timed(call, busy, each) for each in (False, True) for _ in range(5)]
            whole.fill_(1)
            found[f"{name}, {mib} MiB"] = [statistics.median(runs[:5]), statistics.median(runs[5:])]
    return found


def timed(call, busy, each):
    """Return the us of a call, by events around a loop of them, or the median by events around each."""
    import torch.distributed as stock

    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * CALLS)]
    stock.barrier()
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(BUSY)
    for _ in range(3):
        call()
    for number in range(CALLS):
        if each or number == 0:
            events[2 * number].record()
        call()
        if each or number == CALLS - 1:
            events[2 * number + 1].record()
    torch.cuda.synchronize()
    if not each:
        return events[0].elapsed_time(events[-1]) * 1e3 / CALLS
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in zip(events[::2], events[1::2], strict=True))


def logged():
    """Return by operation and MiB the bus bandwidth by the log, and that of a call that took 1 us."""
    import torch.distributed as stock

    import safecomm
    from safecomm.diagnostics.collective_log import factor

    time.sleep(2)  # NCCL's watchdog asks the events of complete calls, ten times a second
    found = {}
    for row in safecomm.collective_log().rows:
        op = next(name for part, name in OPS.items() if part in row.op)
        found[f"{op}, {row.nbytes // MIB} MiB"] = (
            row.bus_bandwidth,
            row.nbytes / 1e3 * factor(op, stock.get_world_size()),
        )
    return found


def bandwidths(ranks, what):
    """Return the bus bandwidth of each operation and size, GB/s, by the log and timed apart."""
    with Program(ranks, {}, ROOT) as program:
        apart = program.ask(what)
    with Program(ranks, TIMED, ROOT) as program:
        program.ask(what)
        log = program.ask("logged")
    found = {}
    for name, times in apart.items():
        told, of_one = log[name]
        loop, each = (of_one / us for us in times)
        found[name] = {
            "log": round(told, 1), "loop": round(loop, 1), "each": round(each, 1),
            "of loop": round(told / loop, 3), "of each": round(told / each, 3),
        }  # fmt: skip
    return found


class Program:
    """Ranks that wait for what they are asked to do."""

    def __init__(self, ranks, environment, checkout):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{ranks}", "PYTHONPATH": path}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank"],
                env={**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", **environment},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def ask(self, what):
        """Return what rank 0 has found; all ranks have done it then."""
        for rank in self.ranks:
            rank.stdin.write(f"{what}\n")
            rank.stdin.flush()
        answers = [json.loads(rank.stdout.readline()) for rank in self.ranks]
        return answers[0]

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            if raised[0]:
                rank.kill()
            rank.wait()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=pathlib.Path)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--parent", type=pathlib.Path)
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.rank:
        rank_main()
        return
    results = machine(f"python benchmarks/collective_log.py --ranks {options.ranks}", options.ranks)

    def write():
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    for what in ("busy", "as they come"):
        results[f"bus bandwidth, GB/s, {what}"] = bandwidths(options.ranks, what)
        write()
        print(what, results[f"bus bandwidth, GB/s, {what}"], flush=True)
    ways = {name: (environment, ROOT) for name, environment in WAYS.items()}
    if options.parent:
        ways["off, parent"] = {}, options.parent
    with contextlib.ExitStack() as stack:
        programs = {
            (name, number): stack.enter_context(Program(options.ranks, *way))
            for number in range(PROGRAMS)
            for name, way in ways.items()
        }
        us = {key: {"torch": [], "safecomm": []} for key in programs}
        for _ in range(ROUNDS):
            for key in random.sample(sorted(programs), len(programs)):
                for library, found in programs[key].ask("us").items():
                    us[key][library].append(found)
        results["us a call, median of each program"] = {
            name: {
                library: [round(statistics.median(us[name, number][library]), 2) for number in range(PROGRAMS)]
                for library in ("torch", "safecomm")
            }
            for name in ways
        }
        write()
        print(results["us a call, median of each program"], flush=True)


if __name__ == "__main__":
    main()
