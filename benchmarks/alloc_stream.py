"""What it takes to ask on which stream memory was allocated: in C and by ctypes, with warm caches and with cold ones.

    python benchmarks/alloc_stream.py --out FILE [--rounds 400]

A function that does nothing stands in the place of the driver's where there is no GPU; where there is one, the driver
is asked about memory of its own. Before each call so many MiB of other memory are read as the row says, which is what a
program does between two collectives. Each round asks each way once, in turns. Times are nanoseconds without those of
the timer. The C file is compiled into a folder of its own; on a machine without Python.h, give one that was compiled
elsewhere: ``--built _driver.abi3.so``.
"""

import argparse
import ctypes
import datetime
import functools
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import compiled

import safecomm
from safecomm._torch import driver, native, segment_table

MIB = (0, 1, 3, 8, 96)
START = 64 << 30
NOTHING = """
int cuPointerGetAttribute(unsigned long long *answer, int attribute, unsigned long long pointer) {
    *answer = pointer >> 27; return 0;
}
"""


def dummy(folder):
    """Return a function in place of the driver's: each 128 MiB are one allocation."""
    (folder / "nothing.c").write_text(NOTHING)
    compiled.subprocess.run(["cc", "-O2", "-fPIC", "-shared", "nothing.c", "-o", "nothing.so"], cwd=folder, check=True)
    return ctypes.PyDLL(str(folder / "nothing.so")).cuPointerGetAttribute


def empty(pointer, other):
    return None


def ways(ask, module, first, end, elsewhere):
    """Return the questions by name: each knows a segment from ``first`` to ``end``, and one at ``elsewhere``."""
    segment_table.pointer_attribute = ask

    def missed(pointer, identity):
        raise AssertionError("both segments are known")

    asked = {}
    for name, make in (
        ("ctypes", segment_table.SegmentTable),
        ("C", functools.partial(module.Table, native.address_of(ask))),
    ):
        table = make(missed)
        for pointer, past in ((first, end), (elsewhere, elsewhere + 1)):
            table.keep(segment_table.buffer_id(pointer), 5, pointer, past)
        asked[f"one segment, {name}"] = functools.partial(table.alloc_stream, first, first + 512)
        asked[f"two segments, {name}"] = functools.partial(table.alloc_stream, first, elsewhere)
        anchored = make(missed)
        anchored.anchor(first >> segment_table.GRANULE, 5)
        asked[f"anchored, {name}"] = functools.partial(anchored.alloc_stream, first)
    asked["an empty function of Python"] = functools.partial(empty, first, elsewhere)
    return asked


def measure(asked, mib, rounds):
    """Return the median and the quartiles of each way in ns, ``mib`` MiB having been read before each call."""
    walked = torch.ones((mib << 20) // 4) if mib else None
    clock = time.perf_counter_ns
    times = {name: [] for name in asked}
    timer = []
    names = list(asked)
    for turn in range(rounds + 20):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call = asked[name]
            if walked is None:
                call(), call()
                begin = clock()
                for _ in range(20):
                    call()
                took = (clock() - begin) / 20
            else:
                walked.sum()
                begin = clock()
                call()
                took = clock() - begin
            times[name].append(took)
        if walked is not None:
            walked.sum()
        begin = clock()
        timer.append(clock() - begin)
    net = 0 if walked is None else statistics.median(timer[20:])
    return {
        name: [round(one - net) for one in statistics.quantiles(values[20:], n=4)] for name, values in times.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--built", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        module = compiled.load(arguments.built) if arguments.built else compiled.compiled()
        if torch.cuda.is_available():
            ask = driver.pointer_attribute
            memory = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
            first, elsewhere = (tensor.data_ptr() for tensor in memory)
        else:
            ask, (first, elsewhere) = dummy(Path(folder)), (START, START + (1 << 30))
        asked = ways(ask, module, first, first + 4096, elsewhere)
        gc.freeze()
        results = {
            "command": "python benchmarks/alloc_stream.py",
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "driver": torch.cuda.get_device_name() if torch.cuda.is_available() else "a function that does nothing",
            "processor": platform.machine(),
            "safecomm": safecomm.__version__,
            "date": datetime.date.today().isoformat(),
            "unit": "ns a call: lower quartile, median, upper quartile",
            "MiB read before": {},
        }
        for mib in MIB:
            found = results["MiB read before"][mib] = measure(
                asked, mib, arguments.rounds if mib < 50 else arguments.rounds // 4
            )
            for name, quartiles in found.items():
                print(f"{mib:3} MiB {name:30} {quartiles}", flush=True)
            Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
