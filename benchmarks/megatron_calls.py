"""The time of each call in the steps of the real megatron-core, patched and not: ``megatron.py`` runs this by torchrun.

    torchrun --nproc-per-node 2 benchmarks/megatron_calls.py --device cuda --compare 20 ...

The options are those of ``tests/frameworks/megatron_gpt.py``. In a loop everything that a call touches is in the cache;
in a program, where half a millisecond of other work lies between two calls, little is, and a call takes three times as
long. Whole steps differ by more than all calls together can gain or lose, so the calls are timed one by one: blocks of
steps in turns, in one process, with torch's functions and with safecomm's.

Rank 0 prints one line of JSON: by name, how often a step calls it, and the median time in microseconds with each; and
of both the sum over a step.
"""

import contextlib
import functools
import statistics
import time

import megatron_script
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import safecomm

NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "batch_isend_irecv")
KINDS = ("unpatched", "patched")
STEPS = 5  # of a block


class Timed:
    """What has been timed: of the kind of calls that is on, by name, the nanoseconds of each."""

    kind = KINDS[0]
    counts = False
    times = {kind: {} for kind in KINDS}  # noqa: RUF012

    @classmethod
    def add(cls, name, start):
        if cls.counts:
            cls.times[cls.kind].setdefault(name, []).append(time.perf_counter_ns() - start)


def timed(name, unpatched, patched):
    calls = dict(zip(KINDS, (unpatched, patched), strict=True))

    @functools.wraps(unpatched)
    def call(*args, **kwargs):
        chosen = calls[Timed.kind]
        start = time.perf_counter_ns()
        result = chosen(*args, **kwargs)
        Timed.add(name, start)
        return result

    return call


class Region:
    def __init__(self, manager):
        self.manager = manager

    def __enter__(self):
        start = time.perf_counter_ns()
        self.leave = self.manager.__exit__  # before it is entered, as a with statement does
        entered = self.manager.__enter__()
        Timed.add("region, begin", start)
        return entered

    def __exit__(self, *error):
        start = time.perf_counter_ns()
        leave, self.leave = self.leave, None
        leave(*error)
        del leave
        Timed.add("region, end", start)


def compare(step, in_turns):
    """Return the figures of the head of this file, of what ``step`` calls."""

    @contextlib.contextmanager
    def of_kind(kind):
        Timed.kind = kind
        yield
        Timed.kind = KINDS[0]

    def block(kind):
        Timed.counts = True
        for _ in range(STEPS):
            step()
        Timed.counts = False
        torch.cuda.synchronize()

    steps, calls = in_turns(step, KINDS, of_kind, block) * STEPS, {}
    for name in sorted(set().union(*Timed.times.values())):
        both = [Timed.times[kind].get(name, []) for kind in KINDS]
        calls[name] = {"a step": len(both[0]) / steps}
        for kind, found in zip(KINDS, both, strict=True):
            calls[name][kind] = round(statistics.median(found) / 1e3, 2) if found else None
    # Without a tenth of each, the longest: those are the machine's doing.
    sums = {
        kind: sum(sum(sorted(found)[: len(found) * 9 // 10]) for found in times.values()) / steps / 0.9e3
        for kind, times in Timed.times.items()
    }
    ratio = round(sums["patched"] / sums["unpatched"], 4)
    return {"calls": calls, "us a step": {kind: round(us) for kind, us in sums.items()}, "ratio": ratio}


def main():
    for name in NAMES:  # before Megatron binds them
        setattr(dist, name, timed(name, getattr(dist, name), getattr(safecomm, name)))
    regions = dict(zip(KINDS, (dist._coalescing_manager, safecomm._coalescing_manager), strict=True))
    make = timed("region, make", *regions.values())
    dist._coalescing_manager = lambda *args, **kwargs: Region(make(*args, **kwargs))
    unpatched_wait, patched_wait = c10d.Work.wait, safecomm.Work.wait

    def wait(self, *args):  # also what safecomm's waits for
        start = time.perf_counter_ns()
        done = unpatched_wait(self, *args)
        if Timed.kind == "unpatched":
            Timed.add("wait", start)
        return done

    c10d.Work.wait = wait
    safecomm.Work.wait = timed("wait", patched_wait, patched_wait)

    megatron_script.measure(lambda step, script: compare(step, script.in_turns))


if __name__ == "__main__":
    main()
