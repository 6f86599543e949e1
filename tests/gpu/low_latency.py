"""low_latency(): results, order, graphs, and a peer that does not come, on real GPUs."""

import contextlib
import itertools
import random
import time
from datetime import timedelta

import torch
import torch.distributed as stock
from harness import LIBRARIES, MIB, case, held, rank, require, settle, slow

import safecomm
from safecomm.collectives import backends
from safecomm.peers import low_latency as module
from safecomm.peers import staging

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = (stock.ReduceOp.SUM, stock.ReduceOp.AVG, stock.ReduceOp.MAX, stock.ReduceOp.MIN)
SIZES = (1, 3, 16, 100, 4096, 4097, 20_000, 65_536, 100_001, 500_000, 900_001, 2_000_000)
LIMITS = safecomm.LowLatencyLimits(one_shot=MIB // 8, two_shot=4 * MIB, scatter=2 * MIB, gather=2 * MIB)
"""So that both kernels run, on any number of ranks."""
LARGE = safecomm.LowLatencyLimits(one_shot=MIB // 8, two_shot=8 * MIB, scatter=4 * MIB, gather=4 * MIB)
"""Up to the largest by default, of which each program has several chunks."""


@contextlib.contextmanager
def switched_on(limits=LIMITS, **how):
    with safecomm.low_latency(limits=limits, **how) as on:
        require(on.reason == "", on.reason)
        yield on


def sent(peer, count, dtype, seed=0):
    """What a rank sends: small multiples of 1/4, whose sums every type holds exactly."""
    generator = torch.Generator("cuda").manual_seed(1000 * peer + seed)
    return (torch.randint(-20, 20, (count,), generator=generator, device="cuda") / 4).to(dtype)


def expected_of_all(op, number):
    """The result where rank r sends ``number + r``: exact in every type."""
    world = stock.get_world_size()
    if op in (stock.ReduceOp.MAX, stock.ReduceOp.MIN):
        return number + (world - 1 if op == stock.ReduceOp.MAX else 0)
    total = world * number + sum(range(world))
    return total if op == stock.ReduceOp.SUM else total / world


def expected_of(op, tensors):
    stacked = torch.stack([tensor.float() for tensor in tensors])
    if op == stock.ReduceOp.MAX:
        return stacked.amax(0)
    if op == stock.ReduceOp.MIN:
        return stacked.amin(0)
    total = stacked.sum(0)
    if op == stock.ReduceOp.SUM:
        return total
    return total / torch.full_like(total, len(tensors))  # by a number torch multiplies by its reciprocal, rounded


@case(120, ranks=2)
def low_latency_results():
    """Every operation, type and size, in place, out of place, at odd addresses: wrong results."""
    world = stock.get_world_size()
    wrong = []
    with switched_on(LARGE) as on:
        for dtype in DTYPES:
            for count in SIZES:
                tensors = [sent(peer, count, dtype) for peer in range(world)]
                for op in OPS:
                    for offset in (0, 1):
                        tensor = torch.empty(count + 1, dtype=dtype, device="cuda")[offset : offset + count]
                        tensor.copy_(tensors[rank()])
                        safecomm.all_reduce(tensor, op=op)
                        if not torch.equal(tensor.float(), expected_of(op, tensors).to(dtype).float()):
                            wrong.append(f"all_reduce {op} {dtype} {count} {offset}")
                whole = torch.empty(world * count, dtype=dtype, device="cuda")
                safecomm.all_gather_into_tensor(whole, tensors[rank()])
                if not torch.equal(whole, torch.cat(tensors)):
                    wrong.append(f"all_gather {dtype} {count}")
                wholes = [sent(peer, world * count, dtype, seed=1) for peer in range(world)]
                mine = wholes[rank()].clone()
                part = mine[rank() * count : (rank() + 1) * count]
                safecomm.reduce_scatter_tensor(part, mine)
                total = expected_of(stock.ReduceOp.SUM, wholes)[rank() * count : (rank() + 1) * count]
                if not torch.equal(part.float(), total.to(dtype).float()):
                    wrong.append(f"reduce_scatter {dtype} {count}")
        calls = on.calls
    require(not wrong, wrong[:5], len(wrong))
    require(calls == 358, calls)  # all but a gather and a scatter of 2 million elements of fp32
    return {"calls": calls, "wrong": 0}


@case(60, ranks=2)
def low_latency_bit_for_bit():
    """Exchanges and gathers of any type, at odd addresses, eager and replayed, by ranks that are late: wrong bits."""
    world = stock.get_world_size()
    gather = getattr(safecomm, "all_gather_single", None) or safecomm.all_gather_into_tensor
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    own = random.Random(rank())
    limits = safecomm.LowLatencyLimits(one_shot=0, two_shot=0, scatter=0, gather=0, exact=MIB // 8, exchange=MIB // 8)
    replays = 0
    with safecomm.low_latency(limits=limits) as on:
        require(on.reason == "", on.reason)
        for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64):
            for count in (1, 16, 1000, 4097):
                for offset in (0, 1):
                    shape = (world, world * count * dtype.itemsize)
                    generator = torch.Generator("cuda").manual_seed(count)
                    largest = 2 if dtype is torch.bool else 256
                    bits = torch.randint(0, largest, shape, generator=generator, device="cuda", dtype=torch.uint8)
                    given = torch.empty(world * count + 1, dtype=dtype, device="cuda")[offset:][: world * count]
                    given.copy_(bits[rank()].view(dtype))
                    out, whole = (torch.empty(world * count + 1, dtype=dtype, device="cuda")[offset:][: world * count]
                                  for _ in range(2))  # fmt: skip

                    def look(bits=bits, out=out, whole=whole, nbytes=count * dtype.itemsize):
                        parts = bits.view(world, world, nbytes)
                        for found, right in ((out, parts[:, rank()]), (whole, parts[:, 0])):
                            wrong.add_((found.clone().view(torch.uint8) != right.reshape(-1)).sum())
                            found.zero_()

                    graph = torch.cuda.CUDAGraph()
                    with safecomm.graph(graph):
                        safecomm.all_to_all_single(out, given)
                        gather(whole, given[:count])
                    for _ in range(20):
                        if own.random() < 0.2:
                            slow(own.random() * 1e-4)
                        safecomm.all_to_all_single(out, given)
                        gather(whole, given[:count], async_op=True).wait()
                        look()
                        graph.replay()
                        replays += 1
                        look()
                    torch.cuda.synchronize()
                    graph.reset()
                    del graph
        calls = on.calls
        settle()
    require(wrong.item() == 0, wrong.item())
    require(calls == 42 * 40, calls)
    return {"calls": calls, "replays": replays, "wrong bytes": wrong.item()}


@case(60, ranks=2)
def low_latency_error_and_bits():
    """Error against fp64 of random data, ours and NCCL's; ranks and runs whose bits differ."""
    world = stock.get_world_size()
    worst = {}
    differing = 0
    with switched_on():
        for count in (4096, 300_000):
            generator = torch.Generator("cuda").manual_seed(rank())
            data = torch.randn(count, generator=generator, device="cuda").to(torch.bfloat16)
            everyones = [torch.empty_like(data) for _ in range(world)]
            stock.all_gather(everyones, data)
            exact = torch.stack([one.double() for one in everyones]).sum(0)
            found = {}
            for name, library in (("stock", stock), ("safecomm", safecomm)):
                found[name] = data.clone()
                library.all_reduce(found[name])
                worst[f"{name}, {count}"] = (found[name].double() - exact).abs().mean().item()
            for _ in range(100):
                again = data.clone()
                safecomm.all_reduce(again)
                differing += not torch.equal(again, found["safecomm"])
            others = [torch.empty_like(data) for _ in range(world)]
            stock.all_gather(others, found["safecomm"])
            differing += sum(not torch.equal(other, found["safecomm"]) for other in others)
            require(worst[f"safecomm, {count}"] <= worst[f"stock, {count}"] * 1.0001, worst)
        differing += any_bits()
    require(differing == 0, differing)
    return {"mean error": worst, "differing": differing}


def any_bits():
    """Return how many words ranks have otherwise than others, of results of words of any bits: all sorts of NaN."""
    differing = 0
    generator = torch.Generator("cuda").manual_seed(50 + rank())
    for words, dtype, op in itertools.product((1, 900, 70_000), DTYPES, OPS):
        bits = torch.randint(-(1 << 31), 1 << 31, (words,), dtype=torch.int64, generator=generator, device="cuda").int()
        chosen = torch.randint(0, 4, (words,), generator=generator, device="cuda")
        bits = torch.where(chosen == 0, staging.FREE, torch.where(chosen == 1, staging.OTHER, bits)).int()
        tensor = bits.view(dtype)
        safecomm.all_reduce(tensor, op=op)
        whole = torch.empty(stock.get_world_size() * words, dtype=torch.int32, device="cuda").view(dtype)
        safecomm.all_gather_into_tensor(whole, bits.view(dtype))
        for found in (tensor, whole):
            everyones = [torch.empty_like(found.view(torch.int32)) for _ in range(stock.get_world_size())]
            stock.all_gather(everyones, found.view(torch.int32))
            differing += sum(int((one != everyones[0]).sum()) for one in everyones)
    return differing


@case(120, ranks=2)
def low_latency_graphs_and_streams():
    """1,000 replays of a graph of several calls, on several streams, between eager calls and NCCL's: wrong elements."""
    world = stock.get_world_size()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    dice = random.Random(5)  # the same on every rank
    with switched_on() as on:
        static = torch.zeros(40_000, dtype=torch.bfloat16, device="cuda")
        part = torch.zeros(1000, device="cuda")
        whole = torch.zeros(1000 * world, device="cuda")
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with safecomm.graph(graph):
            safecomm.all_reduce(static)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                safecomm.all_gather_into_tensor(whole, part)
            torch.cuda.current_stream().wait_stream(side)
            safecomm.all_reduce(static, op=stock.ReduceOp.MAX)
        taken = on.calls
        require(taken == 3, taken)
        for number in range(1000):
            stream = dice.choice(streams)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if dice.random() < 0.2:
                    slow(dice.random() * 1e-4 * (rank() + 1))
                static.fill_(number % 7 + rank())
                part.fill_(number % 5 + rank())
                graph.replay()
                total = world * (number % 7) + sum(range(world))
                wrong += (static != total).sum()
                gathered = torch.arange(world, device="cuda") + number % 5
                wrong += (whole.view(world, -1) != gathered[:, None]).sum()
                eager = torch.full((dice.choice((5, 3000, 100_000)),), float(rank()), device="cuda")
                (stock if dice.random() < 0.2 else safecomm).all_reduce(eager)
                wrong += (eager != sum(range(world))).sum()
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph.reset()
        del graph
        settle()
    require(wrong.item() == 0, wrong.item())
    return {"replays": 1000, "wrong": wrong.item()}


@case(150, ranks=2)
def low_latency_stress():
    """A million random calls, ranks delayed at random, eager, replayed, NCCL's, poisoned buffers: wrong elements."""
    world = stock.get_world_size()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    dice = random.Random(11)  # the same on every rank
    own = random.Random(rank())
    calls = replays = 0
    with switched_on() as on:
        graphs = []
        for count in (100, 5000, 200_000):
            static = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with safecomm.graph(graph):
                for _ in range(20):
                    safecomm.all_reduce(static, op=stock.ReduceOp.MAX)
            graphs.append((graph, static))
        while calls + replays < 1_000_000:
            for _ in range(1000):
                if own.random() < 0.02:
                    slow(own.random() * 2e-4)
                kind = dice.randrange(10)
                dtype = dice.choice(DTYPES)
                count = int(2 ** dice.uniform(0, 18))
                number = dice.randrange(8)
                op = dice.choice(OPS)
                if kind == 0:
                    graph, static = dice.choice(graphs)
                    static.fill_(number + rank())
                    graph.replay()
                    wrong += (static != number + world - 1).sum()
                    replays += 20
                elif kind == 1:
                    tensor = torch.full((count,), float(number + rank()), dtype=dtype, device="cuda")
                    stock.all_reduce(tensor, op=op)
                    wrong += (tensor != expected_of_all(op, number)).sum()
                elif kind == 2:
                    whole = torch.full((count * world,), float("nan"), dtype=dtype, device="cuda")
                    safecomm.all_gather_into_tensor(
                        whole, torch.full((count,), float(number + rank()), dtype=dtype, device="cuda")
                    )
                    gathered = torch.arange(world, device="cuda") + number
                    wrong += (whole.view(world, -1) != gathered[:, None]).sum()
                elif kind == 3:
                    part = torch.full((count,), float("nan"), dtype=dtype, device="cuda")
                    given = torch.full((count * world,), float(number + rank()), dtype=dtype, device="cuda")
                    safecomm.reduce_scatter_tensor(part, given, op=op)
                    wrong += (part != expected_of_all(op, number)).sum()
                elif kind == 4:  # up to twice through the staging, and beyond
                    count *= dice.choice((1, 1, 1, 1, 1, 1, 1, 16))
                    part = torch.full((count,), float("nan"), dtype=dtype, device="cuda")
                    given = torch.full((world, count), float(number + rank()), dtype=dtype, device="cuda")
                    safecomm.reduce_scatter(part, list(given.unbind()), op=op)
                    wrong += (part != expected_of_all(op, number)).sum()
                else:
                    count *= dice.choice([1] * 31 + [8])  # now and then so much that a program has several chunks
                    tensor = torch.full((count,), float(number + rank()), dtype=dtype, device="cuda")
                    safecomm.all_reduce(tensor, op=op)
                    wrong += (tensor != expected_of_all(op, number)).sum()
                calls += 1
        taken = on.calls
        for graph, _ in graphs:
            graph.reset()
        del graphs, graph, static
        settle()
    require(wrong.item() == 0, wrong.item())
    return {"calls": calls, "taken": taken, "replayed": replays, "wrong elements": wrong.item()}


@case(60, ranks=2)
def low_latency_a_peer_that_does_not_come():
    """One rank stays away: seconds until the others have an error, and whether the process is usable after it."""
    on = safecomm.low_latency(limits=LIMITS, timeout=timedelta(seconds=2)).enable()
    require(on.reason == "", on.reason)
    tensor = torch.ones(5000, device="cuda")
    took = 0.0
    if rank() == 0:
        start = time.monotonic()
        safecomm.all_reduce(tensor)
        torch.cuda.synchronize()
        took = time.monotonic() - start
        require(tensor.isnan().all().item(), "the result is not NaN")
        try:
            safecomm.all_reduce(torch.ones(1, device="cuda"))
            require(False, "no error")
        except safecomm.PeerTimeoutError as error:
            require("all_reduce called at" in str(error) and "low_latency.py" in str(error), error)
        require(took < 10, took)
    stock.barrier()  # NCCL's, which goes on
    on._leave(timedelta())()
    require(len(module._KEPT) == 1)
    module._KEPT.clear()
    tensor = torch.ones(2, device="cuda")
    safecomm.all_reduce(tensor)
    require((tensor == stock.get_world_size()).all().item(), tensor)
    return {"seconds": round(took, 2)}


@case(60, ranks=2)
def low_latency_ranks_that_differ():
    """check=True names the call when one rank's size differs; nothing is launched."""
    with switched_on(check=True):
        try:
            safecomm.all_reduce(torch.ones(3 + rank(), device="cuda"))
            require(False, "no error")
        except safecomm.LowLatencyError as error:
            require("rank 0: all_reduce of 3" in str(error), error)
        tensor = torch.ones(2, device="cuda")
        safecomm.all_reduce(tensor)
        require((tensor == stock.get_world_size()).all().item(), tensor)
    return {}


@case(90, ranks=2)
def low_latency_lists():
    """List forms in the region: every type, size and way to lie, on three streams, in graphs: wrong elements."""
    world, me = stock.get_world_size(), rank()
    large = 3_000_000  # elements, more than the kernel of a reduce_scatter takes
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    dice = random.Random(6)  # the same on every rank
    mine = random.Random(7 + me)  # how a rank's lists lie is its own
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    # ProcessGroupNCCL2's own reduce_scatter of large tensors, which takes none that are strided.
    left, own = 0, not backends.of(stock.group.WORLD, "cuda").stages_lists

    def laid_out(tensors, ways=("pieces", "slices", "strided", "odd")):
        how = mine.choice(ways)
        if how == "slices":
            return list(torch.stack(tensors).unbind())
        if how == "strided":
            return [torch.stack([one, one], -1)[..., 0] for one in tensors]
        offset = how == "odd"
        return [torch.cat([one[:1], one])[1:] if offset else one.clone() for one in tensors]

    def gather(dtype, count, asynchronous, seed):
        lists = [sent(peer, count, dtype, seed) for peer in range(world)]
        out = laid_out([torch.zeros_like(one) for one in lists])
        return safecomm.all_gather(out, lists[me].clone(), async_op=asynchronous), out, lists

    def scatter(dtype, count, asynchronous, seed):
        op = dice.choice(OPS)
        lists = [[sent(world * peer + to, count, dtype, seed) for to in range(world)] for peer in range(world)]
        out = torch.full((count,), float("nan"), device="cuda").to(dtype)
        expected = expected_of(op, [one[me] for one in lists]).to(dtype)  # before the call, which is waited for
        nonlocal left
        if own and count == large:
            left += 1
            given = laid_out(lists[me], ("pieces", "slices", "odd"))
        else:
            given = laid_out(lists[me])
        return safecomm.reduce_scatter(out, given, op=op, async_op=asynchronous), [out], [expected]

    with switched_on() as on:
        for number in range(400):
            call = dice.choice((gather, scatter))
            work, count = dice.random() < 0.5, dice.choice((1, 16, 4097, 20_000, 700_001, large))
            launched, waited = dice.choice(streams), dice.choice(streams)
            dtype = dice.choice(DTYPES)
            launched.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(launched):
                if mine.random() < 0.2:
                    slow(mine.random() * 1e-4)
                work, out, expected = call(dtype, count, work, number)
            # What the call was given is dropped by now, and must not be had by anybody yet.
            poison = [torch.full((count + 1,), 77.0, device="cuda").to(dtype) for _ in range(world)]
            if work is None:
                waited.wait_stream(launched)
            with torch.cuda.stream(waited):
                if work is not None:
                    work.wait()
                for one, right in zip(out, expected, strict=True):
                    wrong += (one != right).sum()
            torch.cuda.current_stream().wait_stream(waited)
            del work, out, expected, poison
        require(on.calls == 400 - left, on.calls, left)
        torch.cuda.synchronize()
        require(wrong.item() == 0, wrong.item(), "eager")

        out = [torch.zeros(3, 5, device="cuda") for _ in range(world)]
        versions = [one._version for one in out]
        safecomm.all_gather(out, torch.ones(3, 5, device="cuda"))
        require(all(one._version > before for one, before in zip(out, versions, strict=True)), versions)
        for asynchronous in (False, True):  # what raises in the copies, after the launch, leaves nothing behind
            leaves = [torch.zeros(1000, device="cuda", requires_grad=True) for _ in range(world)]
            try:
                safecomm.all_gather(leaves, torch.ones(1000, device="cuda"), async_op=asynchronous)
                require(False, "no error")
            except RuntimeError as error:
                require("leaf" in str(error), error)
        require(not safecomm.pending(), safecomm.pending())

        part = torch.zeros(50_000, device="cuda")
        out = [torch.zeros_like(part) for _ in range(world)]
        total = torch.zeros_like(part)
        graph = torch.cuda.CUDAGraph()
        with safecomm.graph(graph):
            safecomm.all_gather(out, part, async_op=True).wait()
            safecomm.reduce_scatter(total, out)
        for number in range(200):
            part.fill_(number + me)
            graph.replay()
            wrong += sum((one != number + peer).sum() for peer, one in enumerate(out))
            wrong += (total != world * (number + me)).sum()
        torch.cuda.synchronize()
        graph.reset()
        del graph, part, out, total
        require(wrong.item() == 0, wrong.item(), "replayed")

        # Memory: a gather needs none, a reduce_scatter less than stock's.
        peaks = {}
        for name, library in LIBRARIES.items():
            given = [torch.ones(4 * MIB, dtype=torch.bfloat16, device="cuda") for _ in range(world)]
            output = torch.empty_like(given[0])
            for collective, arguments in (("all_gather", (given, output)), ("reduce_scatter", (output, given))):
                launch = getattr(library, collective)
                launch(*arguments)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = held()
                launch(*arguments)
                torch.cuda.synchronize()
                peaks[f"{name}, {collective}"] = (torch.cuda.max_memory_allocated() - before) / MIB
            del given, output, arguments
    settle()
    require(not safecomm.pending(), safecomm.pending())
    require(peaks["safecomm, all_gather"] == 0, peaks)
    require(peaks["safecomm, reduce_scatter"] <= peaks["stock, reduce_scatter"] * (world - 1) / world, peaks)
    return {"calls": 400, "replays": 200, "wrong": 0, "MiB beyond the arguments": peaks}


@case(60, ranks=2)
def low_latency_memory_comes_back():
    """MiB in use after ten times on and off, against once."""

    def once():
        with switched_on() as on:
            safecomm.all_reduce(torch.ones(10, device="cuda"))
            nbytes = on.nbytes
        settle()
        torch.cuda.synchronize()
        return nbytes, torch.cuda.mem_get_info()[0]

    nbytes, before = once()
    for _ in range(10):
        _, after = once()
    require(before - after < nbytes, before, after, nbytes)
    return {"MiB of one": round(nbytes / MIB, 2), "MiB lost in ten": round((before - after) / MIB, 2)}
