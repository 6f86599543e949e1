"""invariant() on real GPUs: the bits that a model on the CPU gives, by kernels and by what NCCL moves (S11)."""

import contextlib
import itertools
import random
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as stock
from harness import MIB, case, rank, require, settle, slow

import safecomm
from safecomm import _torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the model is
import same_bits

THERE = not _torch.why_not_replaced()
KERNELS = {
    "one-shot": safecomm.LowLatencyLimits(one_shot=MIB, two_shot=0, scatter=MIB, gather=0),
    "two-shot": safecomm.LowLatencyLimits(one_shot=0, two_shot=MIB, scatter=MIB, gather=0),
    "in pieces of both": safecomm.LowLatencyLimits(one_shot=2048, two_shot=MIB, scatter=MIB, gather=0),
}


def tried(seeds, ways):
    """Return what was wrong, and of how many sets of elements torch alone gives other bits."""
    wrong, differs = [], 0
    for seed in seeds:
        found, torchs = same_bits.try_all(seed, ways, device="cuda")
        wrong, differs = wrong + found, differs + torchs
    require(not wrong, len(wrong), wrong[:3])
    return {"sets of elements": len(seeds), "ways": len(ways), "wrong": 0, "torch alone differs": differs}


@case(90, ranks=2, there=THERE)
def invariant_kernels_give_the_bits_of_a_cpu():
    """Random elements, NaN, zeros and subnormal numbers too, by each kernel of low_latency(): wrong elements."""
    ways = (same_bits.whole, same_bits.scattered)
    found = {}
    for name, limits in KERNELS.items():
        with (
            safecomm.low_latency(limits=limits) as on,
            mock.patch.object(same_bits, "DTYPES", (torch.bfloat16, torch.float16, torch.float32)),
            mock.patch.object(same_bits, "OPS", ("SUM", "AVG", "MAX", "MIN")),
        ):
            require(on.reason == "", on.reason)
            before = on.calls
            found[name] = tried(range(40), ways)
            found[name]["calls of kernels"] = on.calls - before
            require(on.calls - before >= 80, on.calls - before)  # none was moved
        settle()
    return found


@case(90, ranks=2, there=THERE)
def invariant_kernels_run_what_torch_calls_and_in_turns():
    """All of one group by kernels of up to 1 MiB, whoever calls, asynchronous and captured ones too: wrong elements."""
    world, wrong, made = stock.get_world_size(), 0, 0
    with safecomm.low_latency(limits=KERNELS["two-shot"]) as on, safecomm.invariant():
        for count, dtype in itertools.product((1000, 300_001, 3 * MIB), (torch.bfloat16, torch.float32)):
            generator = torch.Generator().manual_seed(count)
            rows = [torch.randn(count, generator=generator).to(dtype) for _ in range(world)]
            right, given = same_bits.expected(rows, "SUM"), rows[rank()].cuda()
            for library, asynchronous, captured in itertools.product((safecomm, stock), (False, True), (False, True)):
                before, tensor = on.calls, given.clone()
                graph = torch.cuda.CUDAGraph()
                with safecomm.graph(graph) if captured else contextlib.nullcontext():
                    work = library.all_reduce(tensor, async_op=asynchronous)
                    if work is not None:
                        work.wait()
                if captured:
                    graph.replay()
                wrong += same_bits.differing(tensor, right)
                made += 1
                require(on.calls - before == -(-given.nbytes // MIB), on.calls - before, count, dtype)
                graph.reset()
        before = on.calls
        model = torch.nn.Linear(400_000, 1, bias=False).cuda()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        inputs = [torch.randn(400_000, generator=generator) for _ in range(world)]
        wrapped(inputs[rank()].cuda().view(1, -1)).sum().backward()
        divided = same_bits.expected([one * (1 / world) for one in inputs], "SUM")
        wrong += same_bits.differing(model.weight.grad.view(-1), divided)
        require(on.calls - before == 2, on.calls - before)
        del wrapped, model
    settle()
    require(wrong == 0, wrong)
    return {"calls": made + 1, "wrong": wrong}


@case(120, ranks=2, there=THERE)
def invariant_ways_give_the_bits_of_a_cpu():
    """Random elements by all ways there are, moved by NCCL: wrong elements. Integers stay NCCL's."""
    found = tried(range(60), same_bits.WAYS)
    world = stock.get_world_size()
    with safecomm.invariant():
        for asynchronous in (False, True):
            integers = torch.full((1000,), rank(), device="cuda")
            work = safecomm.all_reduce(integers, async_op=asynchronous)
            if work is not None:
                work.wait()
            require((integers == sum(range(world))).all().item(), integers)
        with torch.autograd.profiler.profile():  # which sees each operator
            safecomm.all_reduce(integers)
    settle()
    return found


@case(90, ranks=2, there=THERE)
def invariant_in_graphs_and_turns():
    """Replays of captured calls, synchronous and not, and of tensors reduced in turns: wrong elements."""
    world, wrong = stock.get_world_size(), 0
    for count, asynchronous in ((100, False), (5000, True), (300_001, False), (300_001, True), (20 * MIB, False)):
        generator = torch.Generator().manual_seed(count)
        rows = [torch.randn(count, generator=generator) for _ in range(world)]
        right = same_bits.expected(rows, "SUM")
        static = torch.empty(count, device="cuda")
        given = rows[rank()].cuda()
        with safecomm.invariant():
            safecomm.all_reduce(static)
            graph = torch.cuda.CUDAGraph()
            with safecomm.graph(graph):
                static.copy_(given)
                work = safecomm.all_reduce(static, async_op=asynchronous)
                if work is not None:
                    work.wait()
        for _ in range(3):
            static.zero_()
            graph.replay()  # outside: what was captured is in the graph
            wrong += same_bits.differing(static, right)
        graph.reset()
        del graph
        settle()
    require(wrong == 0, wrong)
    return {"wrong": wrong}


@case(60, ranks=2, there=THERE)
def invariant_holds_what_an_asynchronous_call_reads():
    """Inputs dropped right after an asynchronous call, whose memory is taken and overwritten: wrong elements."""
    world, wrong, dice = stock.get_world_size(), 0, random.Random(3)
    scatter = getattr(safecomm, same_bits.SCATTER)
    torchs = getattr(stock, same_bits.SCATTER)
    for number in range(200):
        count = dice.choice((1000, 50_000, 400_000))
        call = (scatter, torchs)[number % 2]
        with safecomm.invariant():
            out = torch.empty(count, device="cuda")
            if rank() == number % world:
                slow(2e-3)
            given = torch.full((world * count,), rank() + 1.0, device="cuda")
            work = call(out, given, async_op=True)
            del given
            poison = torch.full((world * count,), float("nan"), device="cuda")
            work.wait()
            wrong += int((out != world * (world + 1) / 2).sum())
            del poison
    settle()
    require(wrong == 0, wrong)
    require(safecomm.pending() == [], safecomm.pending())
    return {"calls": 200, "wrong": wrong}


@case(60, ranks=2, there=THERE)
def invariant_of_ddp_and_compiled_code():
    """Gradients of DDP, whose reducer is C++, and of compiled code: wrong elements."""
    world = stock.get_world_size()
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(4097, generator=generator) for _ in range(world)]
    with safecomm.invariant():
        model = torch.nn.Linear(4097, 1, bias=False).cuda()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(rows[rank()].cuda().view(1, -1)).sum().backward()

        def program(x):
            return stock._functional_collectives.all_reduce(x * 1, "sum", stock.group.WORLD) * 1

        compiled = torch.compile(program)(rows[rank()].cuda())
    divided = same_bits.expected([row * (1 / world) for row in rows], "SUM")
    wrong = same_bits.differing(model.weight.grad.view(-1), divided)
    wrong += same_bits.differing(compiled, same_bits.expected(rows, "SUM"))
    del wrapped, model
    settle()
    require(wrong == 0, wrong)
    return {"wrong": wrong}
