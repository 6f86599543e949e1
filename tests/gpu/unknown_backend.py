"""nccl4py, a backend of Python that calls record_stream: dropped handles, waits, and a capture (S1, S3, S5).

The cases make a group of it beside that of the run. ``python_backend.py`` measures the same without safecomm.
"""

import functools
import operator

import torch
import torch.distributed as stock
from harness import LIBRARIES, MIB, case, require
from python_backend import captured, dropped, is_there, lists_on_another_stream, register, written_after_it_was_dropped

import safecomm


@functools.cache
def group_of_nccl4py():
    register()
    return stock.new_group(backend="nccl4py")


@case(180, ranks=2, there=is_there())
def s3_dropped_on_a_backend_of_python():
    """40 works of 64 MiB that are dropped, on nccl4py: MiB at the peak and after drain(), at most torch's.

    What is reserved depends on when record_stream's events are looked at: for torch alone 320 to 3,840 MiB.
    """
    group = group_of_nccl4py()
    figures = {}
    for name, library in LIBRARIES.items():
        figures[name] = dropped(library, (lambda: 0) if name == "stock" else safecomm.drain, group)
    for call, torchs in figures["stock"].items():
        ours = figures["safecomm"][call]
        require(all(ours[what] <= torchs[what] for what in ours if what != "peak reserved"), figures)
    figures["corrupted of 10"] = {n: written_after_it_was_dropped(lib, group) for n, lib in LIBRARIES.items()}
    require(not figures["corrupted of 10"]["safecomm"], figures)
    safecomm.drain(wait=True, timeout=60)
    return figures


@case(120, ranks=2, there=is_there())
def s1_waits_on_a_backend_of_python():
    """A list form waited for on a side stream, on nccl4py, and a work that drain() has waited for first."""
    group = group_of_nccl4py()
    require(lists_on_another_stream(safecomm, group), "the outputs were not there yet")
    tensor = torch.ones(16 * MIB, device="cuda")
    torch.cuda._sleep(20_000_000)
    work = safecomm.all_reduce(tensor, group=group, async_op=True)
    require(safecomm.drain(wait=True, timeout=60) == 0, safecomm.pending())
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
        last = float(tensor[-1])
    require(last == stock.get_world_size(group), last)
    return {"right": 2}


@case(180, ranks=2, there=is_there())
def s5_a_capture_on_a_backend_of_python():
    """Layers of 32 MiB captured on nccl4py: MiB at 4, 16 and 32 layers; flat inside avoid_record_streams()."""
    group, figures = group_of_nccl4py(), {}
    for name, library in LIBRARIES.items():
        figures[name] = [captured(library, layers, group) for layers in (4, 16, 32)]
    with safecomm.avoid_record_streams():
        flat = [captured(safecomm, layers, group) for layers in (4, 16, 32)]
    figures["safecomm, avoid_record_streams()"] = flat
    require(max(flat) <= 96, figures)
    require(all(map(operator.le, figures["safecomm"], figures["stock"])), figures)
    return figures
