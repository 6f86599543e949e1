"""Which buffers of collectives come and go in the real megatron-core, and what that costs.

    python benchmarks/megatron_buffers.py --out FILE [--world 2]

Each way of training of ``megatron.py`` runs unpatched, under torch's recording of the allocator, while each collective
notes the memory that it reads and writes. Written down are, for each rank: the memory that collectives use in a step,
by call; what was free when the most was allocated, and who had been there in the steps before; and what torch would
have reserved without the outputs that come and go, from a model of its allocator (``allocator_model.py``). That plus
what they take at once is the least that any arena could do. Beside it, each way by the runner with ``--arena``, and
unpatched with torch's expandable segments.
"""

import argparse
import bisect
import datetime
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "tests" / "frameworks" / "megatron_gpt.py"
INTO = "MEGATRON_BUFFERS"  # the variable with the path into which a rank writes what it recorded
READ_AND_WRITTEN = {  # by name, the position and keyword of what is read, and of what is written
    "all_reduce": ((0, "tensor"), (0, "tensor")),
    "broadcast": ((0, "tensor"), (0, "tensor")),
    "all_gather_into_tensor": ((1, "input_tensor"), (0, "output_tensor")),
    "reduce_scatter_tensor": ((1, "input"), (0, "output")),
    "all_to_all_single": ((1, "input"), (0, "output")),
    "all_gather": ((1, "tensor"), (0, "tensor_list")),
    "reduce_scatter": ((1, "input_list"), (0, "output")),
}
OUTPUT, IN_PLACE, INPUT = "output", "in place", "input"
BESIDE = {  # what is before the script, and variables
    "by the runner, --arena 8MiB": (["-m", "safecomm", "run", "--arena", "8MiB"], {}),
    "expandable segments": ([], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
}


def of_megatron(frames):
    """Name the innermost two of Megatron's ``frames``, of ``(path, line, name)``."""
    return [
        f"{path.rpartition('megatron/core/')[2]}:{line} {name}"
        for path, line, name in frames
        if "megatron/core" in path
    ][:2]


# --- in each rank ---------------------------------------------------------------------------------------------------


def allocations():
    """Return how many allocations there were."""
    import torch

    return torch.cuda.memory_stats().get("allocation.all.allocated", 0) if torch.cuda.is_available() else 0


class Calls:
    """The collectives: after how many allocations, which, where, and the addresses that it reads and writes."""

    def __init__(self):
        self.of, self.steps = [], []

    def note(self, name, read, written):
        frame, frames = sys._getframe(2), []
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        addresses = [[tensor.untyped_storage().data_ptr() for tensor in tensors] for tensors in (read, written)]
        self.of.append((allocations(), name, of_megatron(frames), *addresses))

    def wrap(self, name, function):
        def tensors(which, args, kwargs):
            place, keyword = which
            value = args[place] if len(args) > place else kwargs[keyword]
            return value if isinstance(value, (list, tuple)) else [value]

        @functools.wraps(function)
        def call(*args, **kwargs):
            self.note(name, *(tensors(which, args, kwargs) for which in READ_AND_WRITTEN[name]))
            return function(*args, **kwargs)

        return call

    def wrap_all(self):
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        for name in READ_AND_WRITTEN:
            setattr(dist, name, self.wrap(name, getattr(dist, name)))
        batch = dist.batch_isend_irecv

        def batched(ops):  # isend and irecv themselves are compared by identity
            for op in ops:
                sent = op.op is c10d.isend
                self.note(op.op.__name__, [op.tensor] if sent else [], [] if sent else [op.tensor])
            return batch(ops)

        dist.batch_isend_irecv = batched


def rank(path):
    """Train one way, and write what was recorded."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1_000_000)
    calls = Calls()
    calls.wrap_all()
    sys.path = [place for place in sys.path if Path(place or ".").resolve() != HERE]  # megatron.py is another one
    spec = importlib.util.spec_from_file_location("megatron_gpt", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.argv[0] = str(SCRIPT)
    spec.loader.exec_module(script)
    get = script.get_forward_backward_func

    def of_a_step():
        forward_backward = get()

        def step(*args, **kwargs):
            calls.steps.append((allocations(), len(calls.of)))
            return forward_backward(*args, **kwargs)

        return step

    script.get_forward_backward_func = of_a_step
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("nccl" if cuda else "gloo")
    script.train()
    found = {"steps": calls.steps, "calls": calls.of, "events": []}
    if cuda:
        found["device"] = torch.cuda.get_device_name()
        stats = torch.cuda.memory_stats()
        found["torch"] = [stats[f"{what}_bytes.all.peak"] for what in ("reserved", "allocated")]
        for event in torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]:
            frames = [(frame["filename"], frame["line"], frame["name"]) for frame in event.get("frames", ())]
            event = [event["action"], event["addr"], event["size"], event["stream"], of_megatron(frames)]
            found["events"].append(event)
    with open(f"{path}.{dist.get_rank()}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


# --- of what a rank recorded ----------------------------------------------------------------------------------------


def uses(calls, events):
    """Return of allocations, by number, how collectives use them: ``(how, name, where)`` of the first that does."""
    found, living, number, calls = {}, {}, 0, iter(calls)
    call = next(calls, None)
    for action, address, *_ in events:
        if action != "alloc":
            continue
        living[address] = number
        number += 1
        while call is not None and call[0] <= number:
            _, name, where, read, written = call
            for how, addresses in (
                (IN_PLACE, {*read} & {*written}),
                (OUTPUT, {*written} - {*read}),
                (INPUT, {*read} - {*written}),
            ):
                for one in addresses & living.keys():
                    found.setdefault(living[one], (how, name, where))
            call = next(calls, None)
    return found


def mib(nbytes):
    return round(nbytes / 2**20, 2)


def overlapped(free, places):
    """Return of the ``free`` ranges the parts that ``places`` overlap, as a sorted list without overlaps."""
    parts = []
    for start, end in sorted((max(a, c), min(b, d)) for a, b in free for c, d in places if max(a, c) < min(b, d)):
        if parts and start <= parts[-1][1]:
            parts[-1][1] = max(parts[-1][1], end)
        else:
            parts.append([start, end])
    return parts


def bytes_in(ranges):
    return sum(end - start for start, end in ranges)


def analyse(recorded):
    """Return what the head of this file says of one rank's recording."""
    from allocator_model import Replayed, rounded

    events, marks = recorded["events"], [count for count, _ in recorded["steps"]]
    since = marks[len(marks) // 2]  # where megatron_gpt.py begins to count the peaks
    made = [event for event in events if event[0] == "alloc"]
    used = uses(recorded["calls"], events)
    real = Replayed(events, since)

    def step(number):
        return bisect.bisect_right(marks, number)

    def comes_and_goes(number):
        _, freed = real.lives[number]
        return freed is not None and step(freed) - step(number) <= 1

    last = range(marks[-2], marks[-1])
    rows = {}
    for number in last:
        if number in used:
            how, name, where = used[number]
            nbytes = rounded(made[number][2])
            row = rows.setdefault((how, name, *where[:1]), {"sizes": set(), "made": set(), "all": [], "freed": 0})
            row["all"].append(nbytes)
            row["sizes"].add(nbytes)
            row["made"].add((made[number][4] or ["by autograd"])[0])
            row["freed"] += comes_and_goes(number)
    outputs = {number for number in used if used[number][0] == OUTPUT and comes_and_goes(number)}
    without = Replayed(events, since, outputs)
    theirs = overlapped(real.free, [real.places[number] for number in outputs if number >= since])
    others = [place for number, place in real.places.items() if number >= since and number not in outputs]
    others = overlapped(real.free, others)
    free, both = bytes_in(real.free), bytes_in(overlapped(theirs, others))
    beyond, least = real.reserved - real.allocated, without.reserved - without.allocated
    return {
        "reserved MiB": mib(real.reserved),
        "allocated MiB": mib(real.allocated),
        "the model agrees with torch": [real.reserved, real.allocated] == recorded["torch"],
        "allocations a step": len(last),
        "used by collectives": [
            {
                "how": how,
                "call": name,
                "where": where,
                "made": sorted(row["made"]),
                "a step": len(row["all"]),
                "of them come and go": row["freed"],
                "MiB": mib(sum(row["all"])),
                "largest MiB": mib(max(row["all"])),
                "sizes": len(row["sizes"]),
            }
            for (how, name, *where), row in sorted(rows.items(), key=lambda item: -sum(item[1]["all"]))
        ],
        "outputs that come and go": {
            "a step": sum(number in outputs for number in last),
            "at once MiB": mib(without.beside),
        },
        "free when the most was allocated": {
            "MiB": mib(free),
            "where only such outputs had been": mib(bytes_in(theirs) - both),
            "where they and others had been": mib(both),
            "where only others had been": mib(bytes_in(others) - both),
            "where nobody had been": mib(free - bytes_in(theirs) - bytes_in(others) + both),
        },
        "with them in a perfect arena": {
            "reserved MiB": mib(without.reserved),
            "allocated MiB": mib(without.allocated),
            "reserved beyond allocated, ratio": round(least / beyond, 3),
        },
    }


# --- all of them ----------------------------------------------------------------------------------------------------


def run(arguments, way, *command, **environment):
    """Run ``command`` on all ranks; return the line of JSON that rank 0 prints, or what it said instead."""
    from megatron import SIZE, WAYS

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.world)]
    try:
        done = subprocess.run(
            [*torchrun, *command, "--device", arguments.device, *SIZE, *WAYS[way], *arguments.options],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=arguments.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"ended": f"not within {arguments.limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"ended": f"status {done.returncode}", "error": done.stderr.splitlines()[-40:]}
    said = [line for line in done.stderr.splitlines() if line.startswith("safecomm: ") and "arena" in line]
    return {"ended": "by itself", **json.loads(lines[-1]), "said": said}


def main():
    if INTO in os.environ and "RANK" in os.environ:
        return rank(os.environ[INTO])
    sys.path.insert(0, str(HERE))
    from megatron import WAYS

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--raw", help="a folder in which to keep what was recorded")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--at-once", type=int, default=10, help="how many runs side by side")
    parser.add_argument("--limit", type=int, default=90, help="seconds until a run counts as hanging")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("options", nargs="*", help="more options of megatron_gpt.py, after --")
    arguments = parser.parse_args()
    results = {
        "command": "python benchmarks/megatron_buffers.py",
        "date": datetime.date.today().isoformat(),
        "ways": {},
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as side_by_side:
        folder = Path(arguments.raw or folder)
        folder.mkdir(exist_ok=True)
        started = {}
        for number, way in enumerate(arguments.ways):
            begin = functools.partial(side_by_side.submit, run, arguments, way)
            path = str(folder / str(number))
            beside = {how: begin(*before, str(SCRIPT), **variables) for how, (before, variables) in BESIDE.items()}
            started[way] = path, begin(__file__, **{INTO: path}), beside
        for way, (path, recorded, beside) in started.items():
            recorded = recorded.result()
            row = results["ways"][way] = {"ended": recorded["ended"]}
            for key in ("torch", "mcore"):
                results.setdefault(key, recorded.get(key))
            for how, ended in beside.items():
                found = ended.result()
                row[how] = {"ended": found["ended"], "same": found.get("hashes") == recorded.get("hashes")}
                if found.get("mem"):
                    row[how]["reserved MiB"] = mib(found["mem"]["peak_reserved_kib"] << 10)
                    row[how]["allocated MiB"] = mib(found["mem"]["peak_alloc_kib"] << 10)
                row[how].update({key: found[key] for key in ("said", "error") if found.get(key)})
            if "error" in recorded:
                print(way, *recorded["error"], sep="\n", flush=True)
            for one in range(arguments.world if recorded["ended"] == "by itself" else 0):
                found = json.loads(Path(f"{path}.{one}").read_text())
                if found["events"]:
                    results["device"] = found["device"]
                    row[f"rank {one}"] = analyse(found)
                else:  # the calls are all that there is on a CPU
                    begin, end = (count for _, count in found["steps"][-2:])
                    row[f"rank {one}"] = {"calls a step": end - begin}
            print(way, json.dumps({key: row[key] for key in row if key != "rank 1"})[:600], flush=True)
            with open(arguments.out, "w") as file:
                json.dump(results, file, indent=1)
                file.write("\n")
    return sys.exit(any(row["ended"] != "by itself" for row in results["ways"].values()))


if __name__ == "__main__":
    main()
