"""Functional collectives under low_latency(): other streams, captures, compiled graphs, threads, and the end."""

import datetime
import gc
import random
import threading

import torch
import torch.distributed as stock
from harness import case, rank, require, settle, slow
from low_latency import switched_on

import safecomm
from safecomm.diagnostics.replaced import replaced
from safecomm.peers import low_latency as module

TORCHS = torch.ops._c10d_functional


def name(group=None):
    return (group or stock.group.WORLD).group_name


def reduced(x, group=None):
    return TORCHS.all_reduce(x, "sum", name(group))


def operators_replaced():
    """What of torch's operators has a kernel of ours; events are replaced since the first use on another stream."""
    return [one for one in replaced() if "::" in one]


def total(number):
    world = stock.get_world_size()
    return world * number + sum(range(world))


@case(90, ranks=2)
def operators_on_other_streams():
    """2,000 calls on random streams, of memory of others, waited for on others, then poisoned: wrong elements."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    dice, own = random.Random(3), random.Random(30 + rank())  # the first is the same on every rank
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    main = streams[0]
    with switched_on() as on:
        for number in range(2000):
            made, launched, waited = (dice.choice(streams) for _ in range(3))
            count, way = dice.choice((7, 4096, 100_000)), dice.randrange(6)
            if way == 5:
                count = dice.choice((7, 3_000_000))  # the larger is the backend's
            made.wait_stream(main)
            with torch.cuda.stream(made):
                x = torch.full((count,), float(number % 50 + rank()), device="cuda")
                if way >= 4:  # not contiguous
                    x = torch.stack([x, x], -1)[..., 0]
            launched.wait_stream(made)
            with torch.cuda.stream(launched):
                if own.random() < 0.2:
                    slow(own.random() * 2e-4)
                if way == 0:
                    result = TORCHS.all_reduce_(x, "sum", name())
                elif way == 1:
                    result = TORCHS.all_gather_into_tensor(x, stock.get_world_size(), name())
                elif way == 2:  # nobody waits for it
                    reduced(x)
                    result = reduced(x)
                elif way == 5:  # which needs no wait
                    result = torch.ops.safecomm.all_reduce(x, "sum", name())
                    waited.wait_stream(launched)
                else:
                    result = reduced(x)
            if way != 0:
                del x  # its stream may have it again as soon as it is safe, and not before
                with torch.cuda.stream(made):
                    poison = [torch.full((count,), -1e6, device="cuda") for _ in range(3)]
                del poison
            with torch.cuda.stream(waited):
                result = TORCHS.wait_tensor(result)
                if way == 1:
                    gathered = torch.arange(stock.get_world_size(), device="cuda") + number % 50
                    wrong += (result.view(-1, count) != gathered[:, None]).sum()
                else:
                    wrong += (result != total(number % 50)).sum()
            for stream in streams[1:]:
                main.wait_stream(stream)  # of what the program itself has used on them
            x = result = None
        torch.cuda.synchronize()
        taken = on.calls
        settle()
    require(wrong.item() == 0, wrong.item())
    require(taken >= 1500, taken)
    require(not safecomm.pending(), safecomm.pending())
    return {"calls taken": taken, "wrong elements": wrong.item()}


@case(90, ranks=2)
def operators_across_captures():
    """Launched before a capture and waited for inside, the reverse, and on other streams inside: wrong elements."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with switched_on():
        static = torch.zeros(5000, device="cuda")
        before = torch.full((5000,), 1.0 + rank(), device="cuda")
        reduced(static), reduced(before)
        torch.cuda.synchronize()
        slow(0.01 * (1 + rank()))
        early = reduced(before)  # which is not complete when the capture begins
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()  # which does not wait for the device, as torch.cuda.graph() does
            first = TORCHS.wait_tensor(early) + static
            inside = reduced(static)
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                second = TORCHS.wait_tensor(inside) + 0
            stream.wait_stream(side)
            unwaited = reduced(static)
            third = reduced(reduced(static)) + 0  # nobody waits: it is in the order of the stream
            graph.capture_end()
        for number in range(200):
            static.fill_(number + rank())
            replaying = stream if number % 2 else side
            replaying.wait_stream(main)
            with torch.cuda.stream(replaying):
                graph.replay()
            main.wait_stream(replaying)
            wrong += (first != total(1) + number + rank()).sum()
            wrong += (second != total(number)).sum()
            wrong += (third != stock.get_world_size() * total(number)).sum()
            wrong += (TORCHS.wait_tensor(unwaited) != total(number)).sum()
            wrong += (reduced(static) != total(number)).sum()
        torch.cuda.synchronize()
        graph.reset()
        del graph
        settle()
    require(wrong.item() == 0, wrong.item())
    return {"replays": 200, "wrong elements": wrong.item()}


@case(120, ranks=2)
def operators_in_graphs_of_torch_compile():
    """Training by reduce-overhead, with a graph break, beside the same without: gradients, kernels, and the end."""
    world = stock.get_world_size()

    def run(rounds):
        torch.manual_seed(0)
        weights = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2)]

        def block(x, weight):
            return TORCHS.wait_tensor(reduced(torch.relu(x @ weight))) / world

        def model(x):
            x = block(x, weights[0])
            torch._dynamo.graph_break()
            return block(x, weights[1])

        compiled = torch.compile(model, mode="reduce-overhead")
        found = []
        for number in range(rounds):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.full((16, 64), 0.01 * (1 + number % 5), device="cuda") * (1 + rank())
            for weight in weights:
                weight.grad = None
            loss = compiled(x).square().mean()
            loss.backward()
            found.append([loss.detach().clone(), *(weight.grad.clone() for weight in weights)])
        return found

    without = run(8)
    torch.compiler.reset()
    gc.collect()
    on = safecomm.low_latency().enable()
    within = run(8)
    calls = on.calls
    refused = ""
    try:
        on.disable()
    except safecomm.LiveGraphError as error:
        refused = str(error)[:60]
    torch.compiler.reset()
    gc.collect()
    on.disable()
    worst = max(
        float(((one - other).abs() / (1e-6 + other.abs().max())).max())
        for ours, theirs in zip(within, without, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    require(worst < 1e-4, worst)
    require(calls >= 4, calls)
    require(not operators_replaced(), operators_replaced())
    return {"calls, of which those in graphs count once": calls, "largest difference": worst, "left alive": refused}


@case(60, ranks=2)
def operators_in_threads():
    """Two threads, each with a group and a stream of its own: wrong elements."""
    device = torch.cuda.current_device()
    groups = [stock.new_group(list(range(stock.get_world_size()))) for _ in range(2)]
    for group in groups:
        stock.all_reduce(torch.ones(1, device="cuda"), group=group)
    wrong, errors = [], []

    def call(group):
        try:
            torch.cuda.set_device(device)
            bad = torch.zeros((), dtype=torch.int64, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                for number in range(500):
                    result = reduced(torch.full((3000,), float(number + rank()), device="cuda"), group)
                    bad += (TORCHS.wait_tensor(result) != total(number)).sum()
                wrong.append(bad.item())
        except Exception as error:
            errors.append(repr(error))

    with switched_on(group=groups[0]) as first, switched_on(group=groups[1]) as second:
        threads = [threading.Thread(target=call, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        calls = first.calls, second.calls
        settle()
    require(not errors, errors)
    require(wrong == [0, 0], wrong)
    require(calls == (500, 500), calls)
    return {"calls": sum(calls), "wrong elements": 0}


@case(60, ranks=2)
def operators_and_an_exception():
    """Left by an exception, what is running is still waited for on another stream; then torch's kernels."""
    before = torch._C._dispatch_dump_table("_c10d_functional::all_reduce")
    side = torch.cuda.Stream()
    try:
        with switched_on():
            slow(0.02 * (1 + rank()))
            result = reduced(torch.full((5000,), 1.0 + rank(), device="cuda"))
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    with torch.cuda.stream(side):
        wrong = int((TORCHS.wait_tensor(result) != total(1)).sum())
    left = operators_replaced()
    require(torch._C._dispatch_dump_table("_c10d_functional::all_reduce") == before)
    torch.cuda.synchronize()
    stock.barrier()
    module._KEPT.clear()
    later = reduced(torch.full((5000,), 1.0 + rank(), device="cuda"))
    require(int((TORCHS.wait_tensor(later) != total(1)).sum()) == 0)
    require(wrong == 0, wrong)
    return {"wrong elements": wrong, "left in place": left}


@case(60, ranks=2)
def operators_a_peer_that_does_not_come():
    """A wait for a functional collective raises, and names the line."""
    on = safecomm.low_latency(timeout=datetime.timedelta(seconds=2)).enable()
    if rank() == 0:
        result = reduced(torch.ones(5000, device="cuda"))
        torch.cuda.synchronize()
        try:
            TORCHS.wait_tensor(result)
            require(False, "no error")
        except safecomm.PeerTimeoutError as error:
            require("operators.py" in str(error), error)
        require(result.isnan().all().item(), "the result is not NaN")
    stock.barrier()
    on._leave(datetime.timedelta())()
    module._KEPT.clear()
    return {}
