"""Host time of what memory of another stream takes: ``record_stream``, handoffs, and the methods that are replaced.

    python benchmarks/recorded_use.py --out FILE [--rounds 40]

On one GPU, one rank. In each round each case runs with torch's functions and with ours, in turns; the figures are
medians over the rounds, in microseconds a call. "converted": inside of ``avoid_record_streams()``. "whole": a tensor
is allocated, recorded and freed, with all that gives it back; "cold": 4 MiB of other memory are read before each call,
because in a program little of what a call touches is in the cache.

Where there is no GPU, ``record_stream`` is timed with the simulated device of the tests: what Python takes of it.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as stock

import safecomm
from safecomm.core.ledger import LEDGER, Ledger
from safecomm.interception import stream_methods

CUDA = torch.cuda.is_available()
CALLS = 50
KIB = 64
clock = time.perf_counter
times: dict[str, dict[str, list[float]]] = {}


def note(case, whose, seconds):
    times.setdefault(case, {}).setdefault(whose, []).append(seconds * 1e6)


def simulated():
    """Let ``record_stream`` of the CPU's tensors be converted, for the tests' simulated device."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from simulated import INDEX, SimulatedDevice

    from safecomm.interception import record_stream

    device = SimulatedDevice()
    ledger = Ledger(device)
    device.alloc_stream = lambda pointer, other=None: 0
    record_stream._intercept = lambda: record_stream._Interception(ledger, "CPU", lambda stream: stream.stream_id)
    return torch.Stream(stream_id=1, device_index=INDEX, device_type=1), ledger, device


if CUDA:
    SIDE, HELD_BY, DEVICE = torch.cuda.Stream(), LEDGER, "cuda"
else:
    SIDE, HELD_BY, FAKE = simulated()
    DEVICE = "cpu"


def settle():
    """Wait for the device, and give back all that nobody uses."""
    if CUDA:
        torch.cuda.synchronize()
    else:
        FAKE.finish()
    HELD_BY.sweep(thorough=True)


def tensors(count=CALLS):
    return [torch.empty(KIB << 10, dtype=torch.uint8, device=DEVICE) for _ in range(count)]


def by_method(tensor):
    tensor.record_stream(SIDE)


def by_operator(tensor, operator=torch.ops.aten.record_stream.default):
    operator(tensor, SIDE)


def each(call, given):
    start = clock()
    for one in given:
        call(one)
    return (clock() - start) / len(given)


def evicting(call, given, other=torch.ones(1 << 20)):  # noqa: B008
    spent = 0.0
    for one in given:
        other.sum()
        start = clock()
        call(one)
        spent += clock() - start
    return spent / len(given)


def recorded(call, whose, name):
    """Time calls of ``record_stream`` for memory that is then freed, and what gives it back."""
    for one in tensors(4):
        call(one)
    settle()
    for held in (0, 100):
        kept = tensors(held)
        for one in kept:
            call(one)
        given = tensors()
        note(f"{name}, {held} held", whose, each(call, given))
        note(f"{name}, {held} held, of the same memory again", whose, each(call, given))
        start = clock()
        del given
        if CUDA:
            torch.cuda.current_stream().wait_stream(SIDE)
        else:
            HELD_BY.sweep()
        note(f"{name}, {held} held: freeing all and wait_stream, of {CALLS}", whose, (clock() - start) / CALLS)
        settle()
        start = clock()
        for _ in range(CALLS):
            one = torch.empty(KIB << 10, dtype=torch.uint8, device=DEVICE)
            call(one)
            del one
        note(f"{name}, {held} held: whole", whose, (clock() - start) / CALLS)
        settle()
        if CUDA:
            start = clock()
            for _ in range(CALLS):
                one = torch.empty(KIB << 10, dtype=torch.uint8, device=DEVICE)
                call(one)
                one.untyped_storage().resize_(0)
            note(f"{name}, {held} held: whole, freed by resize_(0)", whose, (clock() - start) / CALLS)
            settle()
        given = tensors()
        note(f"{name}, {held} held, cold", whose, evicting(call, given))
        del kept, given
        settle()


def record_stream_cases():
    for name, call in (("Tensor.record_stream", by_method), ("aten::record_stream", by_operator)):
        if CUDA:
            recorded(call, "torch", name)
        with safecomm.avoid_record_streams():
            recorded(call, "converted", name)
        settle()


def without_cases():
    """What the cases called "whole" take without ``record_stream``."""
    start = clock()
    for _ in range(CALLS):
        one = torch.empty(KIB << 10, dtype=torch.uint8, device=DEVICE)
        del one
    note("whole, without record_stream", "torch", (clock() - start) / CALLS)
    start = clock()
    for _ in range(CALLS):
        one = torch.empty(KIB << 10, dtype=torch.uint8, device=DEVICE)
        one.untyped_storage().resize_(0)
    note("whole, without record_stream, freed by resize_(0)", "torch", (clock() - start) / CALLS)


def part_cases():
    """What the device is asked for a recorded use."""
    streams, side, (given,) = LEDGER.streams, SIDE.cuda_stream, tensors(1)
    large = torch.empty(8 << 20, dtype=torch.uint8, device=DEVICE)
    small, pointer = given.data_ptr(), large.data_ptr()
    event = streams.record_event(0, side)
    for name, call in {
        "a small segment's stream": lambda _: streams.alloc_stream(small),
        "a large segment's stream": lambda _: streams.alloc_stream(pointer),
        "capture of a stream": lambda _: streams.capture(side),
        "current stream": lambda _: streams.current(0),
        "record and recycle an event": lambda _: streams.recycle_event(0, streams.record_event(0, side)),
        "query an event": lambda _: streams.query_event(event),
        "wait for an event": lambda _: streams.wait_event(0, 0, event),
        "raw handle": lambda _: SIDE.cuda_stream,
        "storage object": lambda _: given.untyped_storage(),
        "sweep of nothing": lambda _: LEDGER.sweep(),
    }.items():
        note(f"part: {name}", "safecomm", each(call, range(CALLS)))
        note(f"part: {name}, cold", "safecomm", evicting(call, range(CALLS)))
    streams.recycle_event(0, event)


def method_cases():
    """The streams' methods: torch's, seen by safecomm with nothing held, and with a use on the stream that is held."""
    main, event = torch.cuda.current_stream(), torch.cuda.Event()
    buffer = torch.ones(256, device=DEVICE)
    calls = {
        "Event.record": lambda _: event.record(SIDE),
        "Event.wait": lambda _: event.wait(main),
        "wait_stream": lambda _: main.wait_stream(SIDE),
        "wait_stream, another stream": lambda _: OTHER.wait_stream(SIDE),
    }

    def use():
        with torch.cuda.stream(SIDE):
            safecomm.all_reduce(buffer)

    for name, call in calls.items():
        stream_methods.forget_uses()
        note(name, "torch", each(call, range(CALLS)))
        stream_methods.see(name)
        note(name, "nothing held", each(call, range(CALLS)))
        seconds = 0.0
        for _ in range(CALLS):
            use()
            if name == "Event.wait":
                event.record(SIDE)
            start = clock()
            call(None)
            seconds += clock() - start
        note(name, "a use is held", seconds / CALLS)
        stream_methods.unsee(name)
        settle()


def communicated_cases():
    """A synchronous or asynchronous collective on a side stream, of memory of another, and the wait that orders it."""
    main = torch.cuda.current_stream()
    buffer, output = torch.ones(1 << 14, device=DEVICE), torch.ones(1 << 14, device=DEVICE)

    def step(library, how):
        with torch.cuda.stream(SIDE):
            if how == "all_reduce":
                library.all_reduce(buffer)
            elif how == "all_to_all_single":
                library.all_to_all_single(output, buffer)
            else:
                library.all_to_all_single(output, buffer, async_op=True).wait()

    for how in ("all_reduce", "all_to_all_single", "all_to_all_single, async"):
        for whose in ("torch", "safecomm"):
            library = stock if whose == "torch" else safecomm
            if whose == "torch":
                stream_methods.forget_uses()
            for _ in range(5):
                step(library, how)
            main.wait_stream(SIDE)
            settle()
            called = waited = 0.0
            for _ in range(CALLS):
                start = clock()
                step(library, how)
                middle = clock()
                main.wait_stream(SIDE)
                waited += clock() - middle
                called += middle - start
            note(f"{how} on a side stream", whose, called / CALLS)
            note(f"{how} on a side stream: wait_stream", whose, waited / CALLS)
            settle()


OTHER = torch.cuda.Stream() if CUDA else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60, help="no round begins later than this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # or reading other memory takes as long as threads take to wake up
    if CUDA:
        stock.init_process_group(
            "nccl", store=stock.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
    began = clock()
    results = {
        "command": "python benchmarks/recorded_use.py",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "simulated",
        "date": datetime.date.today().isoformat(),
        "unit": "us of host time a call: medians of the rounds",
        "safecomm": os.path.basename(os.path.dirname(os.path.dirname(safecomm.__file__))),
    }
    for round_ in itertools.count():
        if round_ >= arguments.rounds or clock() - began > arguments.seconds:
            break
        for cases in (
            record_stream_cases,
            without_cases,
            *((part_cases, method_cases, communicated_cases) if CUDA else ()),
        ):
            start = clock()
            cases()
            if round_ == 0:
                print(f"{cases.__name__}: {clock() - start:.2f} s", flush=True)
        if round_ == 1:
            times.clear()  # warm-up
        results["rounds"] = max(round_ - 1, 0)
        results["rows"] = {
            case: {whose: round(statistics.median(values), 2) for whose, values in by.items()}
            for case, by in times.items()
        }
        if round_ != 1:
            with open(arguments.out, "w") as file:
                json.dump(results, file, indent=1)
                file.write("\n")
        if round_ in (0, 5, 20):
            print("rounds", round_, json.dumps(results["rows"]), flush=True)
    for case, row in results["rows"].items():
        print(f"{case}: {row}", flush=True)
    if CUDA:
        stock.destroy_process_group()


if __name__ == "__main__":
    main()
