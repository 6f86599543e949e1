"""What each tuning constant of the core is worth: programs with the constant as it is, and with others.

    torchrun --nproc-per-node 2 benchmarks/constants.py --out FILE [--rounds 15]

On GPUs, NCCL; the programs of ``gloo`` run on the CPU beside it. In each round each program runs once with each value,
in turns. The figures are medians over the rounds, as ratios to the same round's run with the constant as it is: the
host's time until the last call has returned, the time until the device is idle, and the peak of the allocator's active
bytes beyond what was there before the step.
"""

import argparse
import logging
import statistics
import time

import torch
import torch.distributed as stock
from measured import begin, setting, write

import safecomm
from safecomm.collectives.routes import ROUTES
from safecomm.core import ledger, uses
from safecomm.core.ledger import LEDGER

MIB, NEVER = 1 << 20, 1 << 60
clock = time.perf_counter


def tensor(mib):
    return torch.empty(int(mib * MIB) // 4, device="cuda")


# --- programs: each is a step of so many calls ------------------------------------------------------------------------


def waited(device, count=8):
    """Eight calls in flight, then each is waited for."""
    works = [safecomm.all_reduce(given, async_op=True) for given in device.small[:count]]
    for work in works:
        work.wait()


def crowd(device):
    """Two hundred calls in flight, then each is waited for."""
    waited(device, 200)


def dropped(device, mib=32, count=24, size=4096):
    """Temporary tensors of 32 MiB, whose handles are dropped, behind compute that the host runs ahead of."""
    for _ in range(count):
        device.compute(size)
        safecomm.all_reduce(tensor(mib), async_op=True)


def futures(device):
    """Eight calls, of which only the futures are kept and waited for."""
    for future in [safecomm.all_reduce(given, async_op=True).get_future() for given in device.small[:8]]:
        future.wait()


def side(device, order=None, mib=32, count=24, size=4096):
    """Temporary tensors of 32 MiB on a side stream, which the main stream never waits for."""
    main = torch.cuda.current_stream()
    for _ in range(count):
        device.compute(size)
        given = tensor(mib)
        device.side.wait_stream(main)
        with torch.cuda.stream(device.side):
            safecomm.all_reduce(given)
        if order == "event":
            main.wait_event(device.side.record_event())
        del given


def side_host_bound(device):
    """The same, with so little compute that the host is not ahead."""
    side(device, size=512, mib=1)


def side_events(device):
    """The same with an event that the main stream waits for."""
    side(device, "event", mib=1, size=512)


def side_large(device):
    """Tensors of 512 MiB on a side stream, which the main stream never waits for."""
    side(device, mib=512, count=12)


def side_small(device):
    """Tensors of 64 KiB on a side stream, which the main stream never waits for."""
    side(device, mib=1 / 16, count=64, size=512)


def offload(device, count=24):
    """Activations of 32 MiB that a side stream copies to the host, with matmuls that take half as long."""
    main = torch.cuda.current_stream()
    with safecomm.avoid_record_streams():
        for _ in range(count):
            given = tensor(32)
            device.compute(4096)
            device.side.wait_stream(main)
            with torch.cuda.stream(device.side):
                device.pinned.copy_(given, non_blocking=True)
            given.record_stream(device.side)
            del given
            safecomm.all_reduce(device.small[0])
        for _ in range(4):
            device.compute(8192)
            safecomm.all_reduce(device.small[0])


def overlapped(device):
    """Tensors of 256 MiB on a side stream, for which ``record_stream`` is called, beside matmuls of 1.5 ms."""
    main = torch.cuda.current_stream()
    with safecomm.avoid_record_streams():
        for _ in range(12):
            given = tensor(256)
            device.side.wait_stream(main)
            with torch.cuda.stream(device.side):
                safecomm.all_reduce(given)
            given.record_stream(device.side)
            del given
            device.compute(8192)
    main.wait_stream(device.side)


def activations(device):
    """``record_stream`` for 300 tensors of 1 MiB, freed from the last to the first, with calls in between."""
    with safecomm.avoid_record_streams():
        kept = []
        for number in range(300):
            kept.append(tensor(1))
            kept[-1].record_stream(device.side)
            if number % 10 == 0:
                safecomm.all_reduce(device.small[0])
        for number in range(300):
            kept.pop()
            tensor(1)
            if number % 10 == 0:
                safecomm.all_reduce(device.small[0])


def gloo(device):
    """Sixty-four calls on gloo whose handles are dropped."""
    for given in device.on_host:
        safecomm.all_reduce(given, group=device.group, async_op=True)


class Device:
    def __init__(self, group):
        self.group = group
        self.side = torch.cuda.Stream()
        self.small = [torch.ones(1024, device="cuda") for _ in range(200)]
        self.on_host = [torch.ones(1024) for _ in range(64)]
        self.pinned = torch.empty(32 * MIB // 4, pin_memory=True)
        self.left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.left)

    def compute(self, size):
        """Multiply two matrices of ``size`` rows and columns: 0.2 ms for 4096 on an H200, 1.5 ms for 8192."""
        left = self.left[:size, :size]
        torch.matmul(left, left, out=self.out[:size, :size])


def attribute(owner, name):
    """Return what sets a constant of a module, or of the ledger; without a value, what it is."""
    return lambda *value: setattr(owner, name, *value) if value else getattr(owner, name)


def work_budget(*value):
    """Set the bytes of each group's works that rule 3 leaves alone; tell what they are."""
    if value:
        LEDGER.budget = value[0]
        for route in ROUTES.all.values():
            route.budget = value[0]
    return LEDGER.budget


def use_budget(*value):
    """Set the bytes of each stream's uses that rule 3 leaves alone; tell what they are."""
    if value:
        LEDGER.uses.budget = value[0]
        for queue in LEDGER.uses.queues.values():
            queue.budget = value[0]
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // uses.BUDGET_SHARE


CASES = {
    "LAG": (attribute(LEDGER, "lag"), (0, 16), (dropped, side, side_small)),
    "BUDGET": (work_budget, (0, NEVER), (dropped,)),
    "BUDGET_SHARE": (use_budget, (0, 512 * MIB, NEVER), (side_large, offload, overlapped)),
    "PATIENCE": (attribute(LEDGER, "_patience"), (0, NEVER), (waited, crowd)),
    "INTERVAL": (attribute(LEDGER, "interval"), (0, 1), (side, side_host_bound, side_events, futures, activations)),
    "UNORDERED": (attribute(ledger, "UNORDERED"), (1, NEVER), (gloo,)),
}


def step(program, device):
    """Return the host's time, the time in all, in us, and the bytes at the peak."""
    safecomm.drain(wait=True)
    stock.barrier()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    begun = clock()
    program(device)
    host = clock() - begun
    torch.cuda.synchronize()
    took = clock() - begun
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
    return host * 1e6, took * 1e6, peak


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    begin()
    device = Device(stock.new_group(backend="gloo"))
    logging.getLogger("safecomm").setLevel(logging.ERROR)  # a dropped handle is what is asked for here
    results = {**setting("torchrun --nproc-per-node 2 benchmarks/constants.py"), "constants": {}}
    for name in arguments.only:
        constant, others, programs = CASES[name]
        value = constant()
        results["constants"][name] = {"value": value, "programs": {}}
        for program in programs:
            took = {one: [] for one in (value, *others)}
            for number in range(arguments.rounds + 2):
                for one in sorted(took, reverse=number % 2):
                    constant(one)
                    figures = step(program, device)
                    if number >= 2:
                        took[one].append(figures)
                constant(value)
            results["constants"][name]["programs"][program.__name__] = told = {}
            for one, figures in took.items():
                host, total, peak = (statistics.median(column) for column in zip(*figures, strict=True))
                told[str("never" if one == NEVER else one)] = {
                    "host us": round(host, 1),
                    "us": round(total, 1),
                    "peak MiB": round(peak / MIB, 2),
                    "host ratio": ratio(took, one, value, 0),
                    "ratio": ratio(took, one, value, 1),
                }
            if stock.get_rank() == 0:
                print(name, program.__name__, *(f"{one}: {row}" for one, row in told.items()), sep="\n    ", flush=True)
    write(arguments.out, results)
    stock.destroy_process_group()


def ratio(took, one, value, column):
    ratios = [new[column] / old[column] for new, old in zip(took[one], took[value], strict=True)]
    return round(statistics.median(ratios), 3)


if __name__ == "__main__":
    main()
