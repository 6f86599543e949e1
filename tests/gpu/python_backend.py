"""What dropped handles and captures take on nccl4py, torch's backend of Python, with torch alone and with safecomm:

    torchrun --nproc-per-node 2 tests/gpu/python_backend.py --library stock --out FILE.json
    torchrun --nproc-per-node 2 tests/gpu/python_backend.py --library safecomm --out FILE.json

It calls record_stream for each asynchronous collective: the memory of a captured graph grows with each layer.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import os
import sys
import time

import torch
import torch.distributed as stock

MIB = 1 << 20
WORKS = 40
NBYTES = 64 * MIB


def is_there():
    """Return whether this torch has nccl4py, and NCCL's bindings for Python are installed."""
    found = importlib.util.find_spec("torch.distributed._nccl4py"), importlib.util.find_spec("nccl")
    return all(found) and torch.cuda.is_available()


def register():
    """Make nccl4py known by its name, which torch 2.15.0's own entry point fails to do."""
    importlib.import_module("torch.distributed._nccl4py.backend")._register_nccl4py_backend()


def settled():
    """Wait for the device, and have the allocator take back what record_stream has kept."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def dropped(library, drain, group=None):
    """Drop the handles and tensors of 40 works of 64 MiB: MiB at the peak, and left after drain()."""
    gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
    world = stock.get_world_size(group)

    def all_reduce():
        library.all_reduce(torch.empty(NBYTES, dtype=torch.uint8, device="cuda"), group=group, async_op=True)

    def all_gather():
        output = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
        gather(output, output[: NBYTES // world].clone(), group=group, async_op=True)

    def send_and_receive():
        tensor = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
        call = library.isend if stock.get_rank(group) == 0 else library.irecv
        call(tensor, 1 - stock.get_rank(group), group=group)

    figures = {}
    for call in (all_reduce, all_gather) + ((send_and_receive,) if world == 2 else ()):
        call()  # the communicator and what it takes
        drain()
        settled()
        drain()
        base, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WORKS):
            call()
        peaks = torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved() - reserved
        torch.cuda.synchronize()
        held = drain()
        settled()
        figures[call.__name__] = {
            "peak allocated": peaks[0] // MIB,
            "peak reserved": peaks[1] // MIB,
            "held after drain()": held // MIB,
            "left": (torch.cuda.memory_allocated() - base) // MIB,
        }
    return figures


def written_after_it_was_dropped(library, group=None, tries=10):
    """Of ``tries`` calls whose handle and output are dropped, how many wrote to the next owner's memory."""
    gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
    given = torch.ones(256 * MIB // stock.get_world_size(group), dtype=torch.uint8, device="cuda")
    corrupted = 0
    for _ in range(tries):
        output = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(2_000_000)
        gather(output, given, group=group, async_op=True)
        del output
        mine = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        mine[-4096:].fill_(7)
        torch.cuda.synchronize()
        corrupted += not bool((mine[-4096:] == 7).all())
        del mine
    return corrupted


def lists_on_another_stream(library, group=None):
    """Wait for a list form on another stream than its launch's, and return whether the result was there."""
    world, side = stock.get_world_size(group), torch.cuda.Stream()
    given = torch.full((16 * MIB,), stock.get_rank(group) + 1.0, device="cuda")
    outputs = [torch.zeros_like(given) for _ in range(world)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    work = library.all_gather(outputs, given, group=group, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        ends = torch.stack([output[-1] for output in outputs])
    torch.cuda.synchronize()
    return ends.tolist() == [number + 1.0 for number in range(world)]


def until_nothing_is_watched():
    """Wait until torch's watchdog asks no events any more, as it does once a second: that ends a capture.

    It asks those of works that were not waited for, until it finds them complete.
    """
    module = sys.modules.get("torch.distributed._watchdog")
    while module and module._get_watchdog()._stream_monitors:
        time.sleep(0.05)


def captured(library, layers, group=None):
    """Capture layers of 32 MiB with an asynchronous all_reduce in each: MiB of the graph; check what it replays."""
    x = torch.ones(8 * MIB, device="cuda")
    library.all_reduce(x.clone(), group=group, async_op=True).wait()
    settled()
    until_nothing_is_watched()
    before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(layers):
            y = y * 0.5
            library.all_reduce(y, group=group, async_op=True).wait()
    nbytes = torch.cuda.memory_reserved() - before
    graph.replay()
    torch.cuda.synchronize()
    right = bool((y == (0.5 * stock.get_world_size(group)) ** layers).all())
    graph.reset()
    del graph, y
    settled()
    if not right:
        raise AssertionError("the graph replays something else")
    return nbytes // MIB


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["stock", "safecomm"], required=True)
    parser.add_argument("--backend", default="nccl4py")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    if arguments.backend == "nccl4py":
        register()
    stock.init_process_group(arguments.backend, device_id=torch.device("cuda", local))
    library, drain, avoided = stock, (lambda: 0), None
    if arguments.library == "safecomm":
        import safecomm as library  # torch alone runs without it

        drain, avoided = library.drain, library.avoid_record_streams
    figures = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "ranks": stock.get_world_size(),
        "backend": arguments.backend,
        "library": arguments.library,
        "MiB of 40 dropped works of 64 MiB": dropped(library, drain),
        "corrupted of 10": written_after_it_was_dropped(library),
        "a list waited for on a side stream is right": lists_on_another_stream(library),
        "MiB of a capture of 4, 16, 32 layers of 32 MiB": [captured(library, layers) for layers in (4, 16, 32)],
    }
    if avoided:
        with avoided():
            flat = [captured(library, layers) for layers in (4, 16, 32)]
        figures["the same inside of avoid_record_streams()"] = flat
    if stock.get_rank() == 0:
        print(json.dumps(figures, indent=1), flush=True)
        with open(arguments.out, "w") as file:
            file.write(json.dumps(figures, indent=1) + "\n")
    torch.cuda.synchronize()
    library.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
