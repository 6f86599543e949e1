"""What the parts of safecomm take in the steps of the real megatron-core: ``megatron.py`` runs this by torchrun.

    torchrun --nproc-per-node 2 benchmarks/megatron_parts.py --device cuda --compare 15 ...

The options are those of ``tests/frameworks/megatron_gpt.py``. All is patched, and one part after the other is timed for
a few steps, so that no timer runs inside of another. A timer's own time is the row "nothing": one call of C. What the
question where memory was allocated takes without the driver is shown by another table, whose driver is a function of
the C library; it is asked in front of the real one, with the same arguments. That needs safecomm's C file.

Rank 0 prints one line of JSON: by part, how often a step calls it, the median and the mean in microseconds without a
tenth of the calls, the longest, and the sum over a step.
"""

import contextlib
import ctypes
import functools
import statistics
import time

import megatron_script
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import safecomm
from safecomm._torch import native, segment_table
from safecomm.collectives import coalesced, gates, holding
from safecomm.core.ledger import Ledger, WorkQueue
from safecomm.core.streams import CudaStreams
from safecomm.core.uses import Uses
from safecomm.interception import record_stream

STEPS = 3  # of a part, in a turn


def named(module, start):
    return [(module, name) for name in vars(module) if name.startswith(start) and callable(vars(module)[name])]


WHERE = [(module, "_alloc_stream") for module in (gates, holding, coalesced)]
PARTS = {
    "nothing": named(gates, "_count_"),
    "launch, by torch's backend": named(gates, "_launch_"),
    "where memory was allocated": WHERE,
    "of that, without the driver": WHERE * (not native.WHY_CTYPES),
    "is a sweep needed": [(gates, "_can_skip_sweep")],
    "sweep": [(Ledger, "sweep")],
    "hold": [(WorkQueue, "hold")],
    "release": [(Ledger, "release")],
    "wait": [(safecomm.Work, "wait")],
    "of that, torch's": [(c10d.Work, "wait"), (c10d.Work, "block_current_stream")],
    "hand off": [(Uses, "add")],
    "order and release": [(Uses, "order_and_release")],
    "record an event": [(CudaStreams, "record_event")],
    "record_stream": [(record_stream._Interception, "record_stream")],
    "region, begin": [(coalesced._Manager, "__enter__")],
    "region, end": [(coalesced._Manager, "_leave")],
}
WITHOUT_DRIVER = "of that, without the driver"


def without_driver():
    """Return what asks a table whose driver knows nothing."""
    if native.WHY_CTYPES:
        return None
    address = native.address_of(ctypes.PyDLL(None)["labs"])
    return native._native.Table(address, lambda pointer, identity: segment_table.UNKNOWN).alloc_stream


def timed(function, times, instead=None):
    clock, add = time.perf_counter_ns, times.append

    if instead is not None:

        def call(*args):
            start = clock()
            instead(*args)
            add(clock() - start)
            return function(*args)

        return call

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            add(clock() - start)

    return call


@contextlib.contextmanager
def timing(part, times):
    undo = []
    for owner, name in PARTS[part]:
        own = vars(owner).get(name)
        if getattr(owner, name, None) is None:
            continue
        undo.append((owner, name, own))
        setattr(owner, name, timed(getattr(owner, name), times, without_driver() if part == WITHOUT_DRIVER else None))
    try:
        yield
    finally:
        for owner, name, own in undo:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def measure(step, seconds, combined):
    times = {part: [] for part in PARTS}
    steps = dict.fromkeys(PARTS, 0)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    turns = [max(2, int(seconds / (time.perf_counter() - start) / len(PARTS)))]
    dist.broadcast_object_list(turns)
    for _ in range(turns[0]):
        for part in PARTS:
            known = len(times[part])
            # Patched anew, because what is patched refers to functions that a part replaces.
            with timing(part, times[part]), safecomm.patched(avoid_record_streams=combined):
                step()
                torch.cuda.synchronize()
                dist.barrier()
                del times[part][known:]
                for _ in range(STEPS):
                    step()
                torch.cuda.synchronize()
            steps[part] += STEPS
    found = {}
    for part, took in times.items():
        if took:
            kept = sorted(took)[: max(1, len(took) * 9 // 10)]
            found[part] = {
                "a step": round(len(took) / steps[part], 1),
                "median us": round(statistics.median(took) / 1e3, 2),
                "mean us": round(statistics.fmean(kept) / 1e3, 2),
                "us a step": round(sum(kept) / 0.9e3 / steps[part], 1),
            }
    return {"asked by": "ctypes" if native.WHY_CTYPES else "C", "parts": found, "turns": turns[0]}


if __name__ == "__main__":
    megatron_script.measure(lambda step, script: measure(step, script.A.compare, script.A.combined))
