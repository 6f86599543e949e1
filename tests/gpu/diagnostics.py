"""Diagnostics on real GPUs: record_memory(), reports of real snapshots, leaks.watch() and the doctor."""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as stock
from harness import MIB, case, rank, require, settle, slow

import safecomm
from safecomm import leaks
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.recording import read_recording
from safecomm.diagnostics.snapshot import read_snapshot
from safecomm.diagnostics.snapshot_report import lines_of
from safecomm.tools.doctor import diagnose


def layers(library, x, count, side):
    main = torch.cuda.current_stream()
    y = x
    slow(0.2)  # so that the device is behind the host for all layers, however fast it is
    for _ in range(count):
        y = y * 0.5  # the line that the report names
        side.wait_stream(main)
        with torch.cuda.stream(side):
            library.all_reduce(y)
        y.record_stream(side)
        main.wait_stream(side)
    return y


LINE = layers.__code__.co_firstlineno + 5


@case(120)
def diagnostics_snapshots_of_a_program_with_stripes():
    """Peak MiB as the report tells them against the allocator's, and what it finds, stock and under safecomm."""
    figures = {}
    side = torch.cuda.Stream()
    x = torch.ones(16 * MIB, device="cuda")
    for name in ("stock", "safecomm"):
        settle()
        avoided = safecomm.avoid_record_streams() if name == "safecomm" else torch.no_grad()
        cached = [torch.empty_like(x) for _ in range(42)]  # cudaMalloc would let the device catch up
        del cached
        with tempfile.TemporaryDirectory() as folder, avoided:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(stacks="python")
            layers(safecomm if name == "safecomm" else stock, x, 40, side)
            stats = torch.cuda.memory_stats()
            torch.cuda.memory._dump_snapshot(f"{folder}/{name}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
            path = Path(folder) / f"{name}.pickle"
            snapshot = read_snapshot(path)
            (trace,) = [one for one in snapshot.traces if one.device == torch.cuda.current_device()]
            (report,) = make_reports([path])
        active = [one + two for one, two in zip(trace.allocated, trace.unusable, strict=True)]
        for told, counted in (
            (max(active), stats["active_bytes.all.peak"]),
            (active[-1], stats["active_bytes.all.current"]),
            (trace.allocated[-1], stats["allocated_bytes.all.current"]),
        ):
            require(abs(told - counted) <= 0.01 * counted, name, told, counted)
        stripes = lines_of(trace, snapshot.stacks, waited=True)
        if name == "stock":
            require(max(trace.unusable) >= 10 * 64 * MIB, max(trace.unusable))
            require(stripes[0].sites[0].endswith(f"diagnostics.py:{LINE} in layers"), stripes[0])
            require(any("avoid_record_streams" in text for text in report.advice), report.advice)
        else:
            require(max(trace.unusable) < MIB, max(trace.unusable))
        figures[name] = {
            "active_peak": max(active) // MIB,
            "allocator": stats["active_bytes.all.peak"] // MIB,
            "unusable_peak": max(trace.unusable) // MIB,
        }
    return figures


@case(120)
def diagnostics_a_recording_sees_the_stripes():
    """Most MiB that were freed but unusable, as recorded, stock and under safecomm."""
    figures = {}
    side = torch.cuda.Stream()
    x = torch.ones(16 * MIB, device="cuda")
    for name in ("stock", "safecomm"):
        settle()
        avoided = safecomm.avoid_record_streams() if name == "safecomm" else torch.no_grad()
        with tempfile.TemporaryDirectory() as folder, avoided:
            with safecomm.record_memory(f"{folder}/run.jsonl", interval=0.0005) as recording:
                for _ in range(5):
                    layers(safecomm if name == "safecomm" else stock, x, 40, side)
                torch.cuda.synchronize()
            found = read_recording(recording.path)
        require(found.rank == rank(), found.rank)
        unusable = max(sample.get("unusable", 0) for sample in found.samples)
        figures[name] = unusable // MIB
        if name == "stock":
            require(unusable >= 64 * MIB, unusable)
        else:
            require(unusable < MIB, unusable)
            require({site["op"] for site in found.sites.values()} >= {"record_stream"}, found.sites)
    return figures


@case(60)
def diagnostics_a_recording_does_not_break_a_capture():
    """Samples that were taken while a graph was captured and replayed."""
    settle()
    x = torch.ones(MIB, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        with safecomm.record_memory(f"{folder}/run.jsonl", interval=0.0002) as recording:
            graph = torch.cuda.CUDAGraph()
            with safecomm.graph(graph):
                for _ in range(200):
                    safecomm.all_reduce(x * 0.5, async_op=True).wait()
            graph.replay()
            torch.cuda.synchronize()
        found = read_recording(recording.path)
    graph.reset()
    require(len(found.samples) > 2, len(found.samples))
    require(found.samples[-1]["held"] == 0, found.samples[-1])
    return len(found.samples)


class Keeps(torch.autograd.Function):
    """Puts what it saved back on its context, as Transformer Engine #1935."""

    mended = False

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 1.5)
        ctx.tensor_objects = [None]
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.tensor_objects[0] = ctx.saved_tensors[0]
        if Keeps.mended:
            ctx.tensor_objects = None
        return grad * 2


@case(120)
def diagnostics_leaks_on_a_gpu():
    """Backward runs in another thread there: what it makes is seen, and the context that keeps it is named."""
    settle()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    found = {}
    for mended in (False, True):
        Keeps.mended = mended
        with leaks.watch(model, log_leaks=False) as watched:
            for _ in range(5):
                out = torch.utils.checkpoint.checkpoint(
                    lambda x: Keeps.apply(model(x)), torch.ones(64, 256, device="cuda"), use_reentrant=False
                )
                loss = out.sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found[mended] = [(leak.kind, leak.nbytes) for leak in watched.leaks]
        if mended:
            require(watched.leaks == [], str(watched))
        else:
            require([leak.kind for leak in watched.leaks] == ["autograd context"], str(watched))
            require("'tensor_objects'" in " ".join(watched.leaks[0].chain), watched.leaks[0].chain)
    with leaks.watch(log_leaks=False) as watched:
        buffer = torch.ones(MIB, device="cuda")
        work = safecomm.all_reduce(buffer, async_op=True)
        del buffer
    require([leak.kind for leak in watched.leaks] == ["unwaited work"], str(watched))
    work.wait()
    return found[False]


@case(60)
def diagnostics_doctor():
    """The machine, and what is red."""
    found = diagnose()
    require(len(found.machine.gpus) == torch.cuda.device_count(), found.machine.gpus)
    require(found.machine.nccl == tuple(torch.cuda.nccl.version()), found.machine.nccl)
    streams = [check for check in found.checks if check.name == "allocation streams"]
    require(streams and streams[0].ok, streams)
    return {"links": list(found.machine.links), "red": [check.name for check in found.checks if not check.ok]}


@case(60, ranks=2)
def diagnostics_outside_is_accounted_for():
    """MiB outside of the allocator: torch's tensors are not of it; the staging of low_latency() and NCCL's are."""
    settle()

    def look():
        torch.cuda.synchronize()
        found = safecomm.memory_report().outside
        require(found is not None, "no context")
        return found

    def shown(found):
        parts = {name: round(nbytes / MIB, 1) for name, nbytes in found.parts.items()}
        figures = {name: getattr(found, name) // MIB for name in ("used", "reserved", "unattributed")}
        return {**figures, "parts": parts}

    before = look()
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    during = look()
    require(during.reserved - before.reserved >= tensor.nbytes, before, during)
    require(abs(during.total - before.total) <= 4 * MIB, before, during)
    del tensor
    settle()
    before = look()
    with safecomm.low_latency() as on:
        require(on.reason == "", on.reason)
        after = look()
        name, staging = next(item for item in after.parts.items() if item[0].startswith("low_latency() staging"))
        require(0 < staging <= on.nbytes, staging, on.nbytes)
        require(after.total - before.total >= staging - 4 * MIB, before, after)
    left = look()
    require(name not in left.parts, left)
    data = torch.ones(16 * MIB, device="cuda")
    before = look()
    group = stock.new_group()
    for _ in range(3):
        stock.all_reduce(data, group=group)
    after = look()
    told = sum(after.parts.values()) - sum(before.parts.values())
    jump = after.total - before.total
    has = hasattr(stock.group.WORLD._get_backend(torch.device("cuda")), "memory_stats")
    stock.destroy_process_group(group)
    stock.barrier()  # a buffer goes once the peer, which has it mapped, has ended the group too
    gone = look()
    require(gone.total < after.total - jump // 2, before, after, gone)
    require(set(gone.parts) == set(before.parts), before, gone)
    require(not told or abs(told - jump) <= 0.03 * jump, told, jump)
    nccl = {"torch tells it": has, "MiB told": round(told / MIB, 1), "MiB by the driver": round(jump / MIB, 1)}
    return {"a group of NCCL": nccl, "before": shown(before), "with it": shown(after), "left": shown(gone)}


@case(240)
def diagnostics_cost_of_a_recording():
    """Time of a step of eight layers with a recording against without, the median of the ratios of 15 rounds."""
    settle()
    x = torch.full((4096, 8192), 1e-3, device="cuda", dtype=torch.bfloat16)
    weights = [torch.full((8192, 8192), 1e-3, device="cuda", dtype=torch.bfloat16) for _ in range(8)]

    def timed():
        stock.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            for weight in weights:
                y = x @ weight
                safecomm.all_reduce(y, async_op=True).wait()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(15):
            off = timed()
            with safecomm.record_memory(f"{folder}/run.jsonl"):
                on = timed()
            ratios.append(on / off)
    return round(statistics.median(ratios), 4)
