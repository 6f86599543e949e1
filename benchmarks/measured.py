"""What the benchmarks that run under torchrun share: their start, graphs that are timed, ratios, and their file."""

import datetime
import json
import os
import statistics

import torch
import torch.distributed as stock


def begin():
    """Join the default group, NCCL where there are GPUs and gloo where there are none; return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    stock.init_process_group("nccl" if cuda else "gloo")
    return device


def machine(command, world):
    """Return what a file of results begins with, of a process that starts the ranks and has no group itself."""
    return {
        "command": command,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world": world,
        "date": datetime.date.today().isoformat(),
    }


def setting(command):
    """Return what a file of results begins with."""
    return {**machine(command, stock.get_world_size()), "backend": stock.get_backend()}


def captured(call, calls, lead):
    """Return what runs a graph of ``calls`` calls, and tells the us of one; ``lead``: replays before the timed one."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(_call=call):  # the tensors of the call live as long as its graph
        for _ in range(lead):
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    return replay


def row(times, digits):
    """Return the medians of both libraries' ``times``, and of the rounds' ratios of ours to theirs with quartiles."""
    ratios = [ours / theirs for theirs, ours in zip(times["stock"], times["safecomm"], strict=True)]
    medians = {library: round(statistics.median(values), digits) for library, values in times.items()}
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {**medians, "ratio": round(statistics.median(ratios), 3), "quartiles": [round(q, 3) for q in quartiles[::2]]}


def write(path, results):
    """Write ``results``, on rank 0."""
    if stock.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
