"""The ring of low_latency(): results, order, graphs, groups, and a peer that does not come, on real GPUs."""

import contextlib
import itertools
import random
import time
from datetime import timedelta

import torch
import torch.distributed as stock
from harness import MIB, case, rank, require, settle, slow

import safecomm
from safecomm.peers import low_latency as module

FLOATS = (torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int32, torch.int64)
OPS = (stock.ReduceOp.SUM, stock.ReduceOp.AVG, stock.ReduceOp.MAX, stock.ReduceOp.MIN)
LIMITS = safecomm.LowLatencyLimits(
    one_shot=4096, two_shot=MIB, scatter=4096, gather=4096,
    ring=256 * MIB, ring_scatter=256 * MIB, ring_gather=256 * MIB,
)  # fmt: skip


@contextlib.contextmanager
def switched_on(group=None, **how):
    with safecomm.low_latency(group, limits=LIMITS, **how) as on:
        require(on.reason == "", on.reason)
        yield on


def sent(peer, count, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(1000 * peer + seed)
    return torch.randint(0, 20, (count,), generator=generator, device="cuda").to(dtype)


def expected_of(op, tensors):
    if op in (stock.ReduceOp.MAX, stock.ReduceOp.MIN):
        stacked = torch.stack(tensors)
        return stacked.amax(0) if op == stock.ReduceOp.MAX else stacked.amin(0)
    total = sum(one.double() for one in tensors)
    if op == stock.ReduceOp.AVG:
        total = total / torch.full_like(total, len(tensors))  # by a number torch multiplies by its reciprocal, rounded
    return total.to(tensors[0].dtype)


@case(90, ranks=2)
def ring_results():
    """Every operation and many types, in place and not, at odd addresses: wrong results. Asynchronous: NCCL's."""
    world, me = stock.get_world_size(), rank()
    wrong = []
    with switched_on() as on:
        made = 0
        for dtype, nbytes in itertools.product(FLOATS + INTEGERS, (MIB + 64, 3 * MIB + 4096, 33 * MIB)):
            count = nbytes // dtype.itemsize
            tensors = [sent(peer, count, dtype) for peer in range(world)]
            for op, offset in itertools.product(OPS, (0, 1)):
                if dtype.itemsize == 1 or (op == stock.ReduceOp.AVG and not dtype.is_floating_point):
                    continue
                tensor = torch.empty(count + 1, dtype=dtype, device="cuda")[offset : offset + count]
                tensor.copy_(tensors[me])
                safecomm.all_reduce(tensor, op=op)
                made += 1
                if not torch.equal(tensor, expected_of(op, tensors)):
                    wrong.append(f"all_reduce {op} {dtype} {nbytes} {offset}")
            whole = torch.empty(world * count, dtype=dtype, device="cuda")
            safecomm.all_gather_into_tensor(whole, tensors[me])
            if not torch.equal(whole, torch.cat(tensors)):
                wrong.append(f"all_gather {dtype} {nbytes}")
            made += 1
            if dtype.itemsize == 1:  # its sums are NCCL's
                continue
            wholes = [sent(peer, world * count, dtype, seed=1) for peer in range(world)]
            mine = wholes[me].clone()
            part = mine[me * count : (me + 1) * count]
            safecomm.reduce_scatter_tensor(part, mine)
            total = sum(one[me * count : (me + 1) * count].double() for one in wholes).to(dtype)
            if not torch.equal(part, total):
                wrong.append(f"reduce_scatter {dtype} {nbytes}")
            made += 1
        taken = on.calls
        safecomm.all_reduce(part, async_op=True).wait()
        require(on.calls == taken, "an asynchronous call was taken")
    require(not wrong, wrong[:5], len(wrong))
    require(taken == made, taken, made)
    return {"calls": made, "wrong": 0}


@case(60, ranks=2)
def ring_bits():
    """Negative zero and the payloads of NaN through gathers: elements that differ, also in the ranks' sums."""
    world, me = stock.get_world_size(), rank()
    differing = 0
    with switched_on():
        for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32), (torch.float64, torch.int64)):
            limits = torch.iinfo(bits)
            generator = torch.Generator("cuda").manual_seed(me)
            part = torch.randint(limits.min, limits.max, (3 * MIB,), generator=generator, device="cuda", dtype=bits)
            part[::7] = limits.min  # negative zero
            whole, right = (torch.empty(world * part.numel(), dtype=bits, device="cuda") for _ in range(2))
            safecomm.all_gather_into_tensor(whole.view(dtype), part.view(dtype))
            stock.all_gather_into_tensor(right.view(torch.uint8), part.view(torch.uint8))
            differing += int((whole != right).sum())
        total = torch.randn(5 * MIB, device="cuda", generator=torch.Generator("cuda").manual_seed(me)).bfloat16()
        safecomm.all_reduce(total)
        others = [torch.empty_like(total) for _ in range(world)]
        stock.all_gather(others, total)
        differing += sum(not torch.equal(other, total) for other in others)
    require(differing == 0, differing)
    return {"differing": differing}


@case(120, ranks=2)
def ring_stress():
    """Random calls of all kinds and sizes on streams, delayed at random, replayed, between NCCL's: wrong elements."""
    world, me = stock.get_world_size(), rank()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    dice, own = random.Random(11), random.Random(me)  # the first is the same on every rank
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    base = torch.arange(8 * MIB, dtype=torch.int32, device="cuda")
    calls = replays = 0
    with switched_on() as on:
        graphs = []
        for count in (300_000, 2 * MIB):
            static = torch.zeros(count, dtype=torch.int32, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with safecomm.graph(graph):
                safecomm.all_reduce(static)
                safecomm.all_reduce(static, op=stock.ReduceOp.MAX, async_op=True).wait()
            graphs.append((graph, static))
        began = time.monotonic()
        over = torch.zeros(1, device="cuda")
        while not over.item():
            for number in range(200):
                if own.random() < 0.1:
                    slow(own.random() * 2e-4)
                kind, count = dice.randrange(8), int(2 ** dice.uniform(4, 21))
                stream = dice.choice(streams)
                asynchronous = dice.random() < 0.5
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    work = None
                    if kind == 0:
                        graph, static = dice.choice(graphs)
                        torch.add(base[: static.numel()], me + number, out=static)
                        graph.replay()
                        replays += 2
                        found, right = static, world * (base[: static.numel()] + number) + sum(range(world))
                    elif kind == 1:
                        found = torch.empty(count * world, dtype=torch.int32, device="cuda")
                        work = safecomm.all_gather_into_tensor(found, base[:count] + me + number, async_op=asynchronous)
                        right = (base[:count] + number).repeat(world) + base[:world].repeat_interleave(count)
                    elif kind == 2:
                        found = torch.empty(count, dtype=torch.int32, device="cuda")
                        given = base[: count * world] + me + number
                        work = safecomm.reduce_scatter_tensor(found, given, async_op=asynchronous)
                        right = world * (base[me * count : (me + 1) * count] + number) + sum(range(world))
                    else:
                        found = base[:count] + me + number
                        (stock if kind == 3 else safecomm).all_reduce(found)
                        right = world * (base[:count] + number) + sum(range(world))
                    if work is not None:
                        work.wait()
                    wrong += (found != right).sum()
                torch.cuda.current_stream().wait_stream(stream)
                calls += 1
            over.fill_(time.monotonic() - began > 8)
            stock.all_reduce(over)
        taken = on.calls
        for graph, _ in graphs:
            graph.reset()
        del graphs, graph, static
        settle()
    require(wrong.item() == 0, wrong.item())
    return {"calls": calls, "taken": taken, "replayed": replays, "wrong elements": wrong.item()}


@case(60, ranks=2)
def ring_of_two_groups_at_once():
    """Two groups on two streams, one of them replayed while the other runs eagerly: wrong elements."""
    world, me = stock.get_world_size(), rank()
    other = stock.new_group(list(range(world)))
    stock.all_reduce(torch.ones(1, device="cuda"), group=other)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    static = torch.zeros(4 * MIB, dtype=torch.int32, device="cuda")
    eager = torch.zeros(3 * MIB, dtype=torch.int32, device="cuda")
    took = time.monotonic()
    with switched_on() as on, switched_on(other):
        graph = torch.cuda.CUDAGraph()
        with safecomm.graph(graph):
            for _ in range(3):
                safecomm.all_reduce(static, op=stock.ReduceOp.MAX)
        for number in range(150):
            if (number + me) % 3 == 0:
                slow(2e-4)
            with torch.cuda.stream(first):
                static.fill_(number + me)
                graph.replay()
            with torch.cuda.stream(second):
                eager.fill_(number + me)
                safecomm.all_reduce(eager, group=other)
                work = safecomm.all_reduce(eager, group=other, op=stock.ReduceOp.MAX, async_op=True)
                work.wait()
                wrong += (eager != world * number + sum(range(world))).sum()
            with torch.cuda.stream(first):
                wrong += (static != number + world - 1).sum()
        torch.cuda.synchronize()
        require(on.calls == 3, on.calls)
        graph.reset()
        del graph
        settle()
    require(wrong.item() == 0, wrong.item())
    return {"calls and replays": 300, "wrong": 0, "seconds": round(time.monotonic() - took, 1)}


@case(60, ranks=2)
def ring_a_rank_that_is_slow_and_one_that_stops():
    """One rank comes late, then not at all: right results, then NaN and an error in time; NCCL goes on."""
    world, me = stock.get_world_size(), rank()
    on = safecomm.low_latency(limits=LIMITS, timeout=timedelta(seconds=2)).enable()
    require(on.reason == "", on.reason)
    for late in range(world):
        tensor = torch.full((20 * MIB,), me + 1.0, dtype=torch.bfloat16, device="cuda")
        if me == late:
            slow(0.3)
        safecomm.all_reduce(tensor)
        require((tensor == world * (world + 1) // 2).all().item(), "a slow rank", late)
    took = 0.0
    if me == 0:
        start = time.monotonic()
        safecomm.all_reduce(tensor)
        torch.cuda.synchronize()
        took = time.monotonic() - start
        require(tensor.isnan().all().item(), "the result is not NaN")
        try:
            safecomm.all_reduce(tensor)
            require(False, "no error")
        except safecomm.PeerTimeoutError as error:
            require("all_reduce called at" in str(error) and "ring.py" in str(error), error)
        require(took < 10, took)
    stock.barrier()  # NCCL's, which goes on
    on._leave(timedelta())()
    module._KEPT.clear()
    tensor = torch.ones(2 * MIB, device="cuda")
    safecomm.all_reduce(tensor)
    require((tensor == world).all().item(), tensor)
    return {"seconds": round(took, 2)}


@case(60, ranks=2)
def ring_that_is_left_in_the_middle():
    """A rank whose kernel is in the middle of a ring when its peer's gives up: no hang, and no result that is wrong.

    One rank makes a smaller call than the others, so that it is through while they wait for the rest.
    """
    world, me = stock.get_world_size(), rank()
    on = safecomm.low_latency(limits=LIMITS, timeout=timedelta(seconds=1)).enable()
    require(on.reason == "", on.reason)
    tensor = torch.full((32 * MIB if me else 8 * MIB,), me + 1.0, dtype=torch.bfloat16, device="cuda")
    start = time.monotonic()
    safecomm.all_reduce(tensor)
    torch.cuda.synchronize()
    took = time.monotonic() - start
    right = tensor == world * (world + 1) // 2
    require((right | tensor.isnan()).all().item(), "neither right nor NaN")
    if me:
        require(not right.all().item(), "a result of what was not sent")
        try:
            safecomm.all_reduce(tensor)
            require(False, "no error")
        except safecomm.PeerTimeoutError:
            pass
    require(took < 10, took)
    stock.barrier()
    on._leave(timedelta())()
    module._KEPT.clear()
    return {"seconds": round(took, 2)}
