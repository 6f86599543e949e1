"""Functional collectives, DTensor and compiled code under low_latency(): which kernels run, bits, times, a soak.

    torchrun --nproc-per-node 2 benchmarks/functional_low_latency.py --out FILE [case ...]

Cases: ``kernels`` (which kernels run, as the profiler sees, and what ``low.calls`` counts), ``bits`` (random calls,
against the wrapped ones), ``times`` (host and device time of a functional all_reduce of 8 KiB), ``gradients``
(DTensor and functional collectives, with and without), ``llama`` (a Llama of transformers with ``tp_plan="auto"``: a
decode step in a CUDA graph, with and without, in turns), ``soak`` (mixed calls, each verified on the device).
Each writes the file when it is done. A case that fails writes its error, and the next one runs.
"""

import argparse
import datetime
import gc
import inspect
import random
import statistics
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as funcol
from measured import begin, setting, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import safecomm

TORCHS = torch.ops._c10d_functional
OPS = {"sum": stock.ReduceOp.SUM, "avg": stock.ReduceOp.AVG, "max": stock.ReduceOp.MAX, "min": stock.ReduceOp.MIN}
OURS = ("one_shot", "two_shot", "scatter_pieces", "combine")


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def name():
    return stock.group.WORLD.group_name


# --- kernels -----------------------------------------------------------------------------------------------------


def step(x):
    """What is compiled: a functional collective, one of torch.distributed's, and a gather and a scatter."""
    y = funcol.all_reduce(x * 2, "sum", name())
    z = x * 3
    stock.all_reduce(z)
    whole = TORCHS.wait_tensor(TORCHS.all_gather_into_tensor(y + z, stock.get_world_size(), name()))
    return TORCHS.wait_tensor(TORCHS.reduce_scatter_tensor(whole, "sum", stock.get_world_size(), name()))


def kernels_of(call, device):
    """Return how many kernels of ours and of NCCL's run in a call."""
    call()
    synchronize(device)
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CUDA if device.type == "cuda" else kind.CPU]) as profiled:
        call()
        synchronize(device)
    names = [event.name for event in profiled.events()]
    return {
        "ours": sum(any(own in one for own in OURS) for one in names),
        "the backend's": sum("nccl" in one.lower() or one.startswith("gloo:") for one in names),
    }


def kernels(device, low):
    mesh = init_device_mesh(device.type, (stock.get_world_size(),))
    x = torch.full((64, 8), 1.0, device=device)
    weights = distribute_tensor(torch.ones(8, 16, device=device), mesh, [Shard(1)])
    back = distribute_tensor(torch.ones(16, 8, device=device), mesh, [Shard(0)])
    rows = distribute_tensor(x, mesh, [Replicate()])

    def dtensor():
        return ((rows @ weights) @ back).redistribute(placements=[Replicate()]).to_local() + 0

    with torch.no_grad(), safecomm.patched():  # so that torch.distributed's all_reduce is safecomm's in eager code too
        ways = {"eager": lambda: step(x), "DTensor": dtensor}
        for mode in ("default", "reduce-overhead"):
            compiled = torch.compile(step, mode=mode, fullgraph=True)
            for _ in range(4):
                compiled(x)
            ways[f"compiled, {mode}"] = lambda compiled=compiled: compiled(x)
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(x)
            ways["CUDA graph"] = graph.replay
        table = {}
        for way, call in ways.items():
            before = low.calls
            table[way] = kernels_of(call, device) | {"low.calls, of two calls": low.calls - before}
    ways.clear()
    if device.type == "cuda":
        graph.reset()
    torch._dynamo.reset()
    gc.collect()
    return table


# --- bits --------------------------------------------------------------------------------------------------------


def bits(device, low, calls=600):
    """Compare random calls of the operators, eager and compiled, with the wrapped calls, bit for bit."""
    dice = random.Random(1)  # the same on every rank
    world = stock.get_world_size()
    generator = torch.Generator(device).manual_seed(stock.get_rank())
    gather = getattr(safecomm, "all_gather_single", None) or safecomm.all_gather_into_tensor
    scatter = getattr(safecomm, "reduce_scatter_single", None) or safecomm.reduce_scatter_tensor
    wait = TORCHS.wait_tensor
    if device.type == "cpu":
        calls = 12
    compiled = {
        "all_reduce": torch.compile(lambda x: wait(TORCHS.all_reduce(x, "sum", name())), dynamic=True),
        "all_gather": torch.compile(lambda x: wait(TORCHS.all_gather_into_tensor(x, world, name())), dynamic=True),
        "reduce_scatter": torch.compile(
            lambda x: wait(TORCHS.reduce_scatter_tensor(x, "sum", world, name())), dynamic=True
        ),
    }
    different = taken = 0
    for number in range(calls):
        dtype = dice.choice((torch.bfloat16, torch.float16, torch.float32))
        count = world * dice.choice(
            (1, 3, 17, 512, 4096, 5000) if device.type == "cpu" else (1, 17, 4096, 60_000, 250_000)
        )
        kind, op = dice.choice(list(compiled)), dice.choice(list(OPS))
        x = torch.randn(count, generator=generator, device=device).to(dtype)
        before = low.calls
        if kind == "all_reduce":
            expected = x.clone()
            safecomm.all_reduce(expected, op=OPS[op])
            found = [wait(TORCHS.all_reduce(x, op, name())), wait(TORCHS.all_reduce_(x.clone(), op, name()))]
        elif kind == "all_gather":
            expected = torch.empty(world * count, dtype=dtype, device=device)
            gather(expected, x)
            out = torch.empty_like(expected)
            found = [wait(TORCHS.all_gather_into_tensor(x, world, name()))]
            found.append(wait(TORCHS.all_gather_into_tensor_out(x, world, name(), out=out)))
        else:
            expected = torch.empty(count // world, dtype=dtype, device=device)
            scatter(expected, x, op=OPS[op])
            found = [wait(TORCHS.reduce_scatter_tensor(x, op, world, name()))]
            found.append(wait(TORCHS.reduce_scatter_tensor_out(x, op, world, name(), out=torch.empty_like(expected))))
        if number % 10 == 0 and (op == "sum" or kind == "all_gather"):
            found.append(compiled[kind](x))
        width = torch.int32 if dtype.itemsize == 4 else torch.int16
        different += sum(not torch.equal(one.view(width), expected.view(width)) for one in found)
        taken += low.calls - before == len(found) + 1
    torch._dynamo.reset()
    return {"calls": calls, "taken in all their forms": taken, "different": different}


# --- times -------------------------------------------------------------------------------------------------------


def host_us(call, device, rounds):
    """Return the us of the host for each of 50 calls, of the fastest of the rounds and the median."""
    taken = []
    for _ in range(rounds):
        for _ in range(10):
            call()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(50):
            call()
        taken.append((time.perf_counter() - begun) / 50 * 1e6)
        synchronize(device)
    return taken


def device_us(call, device):
    """Return the us of the device for a call that waits behind a kernel, so that it is not the host that is timed."""
    if device.type == "cpu":
        return 0.0
    taken = []
    for _ in range(5):
        torch.cuda._sleep(60_000_000)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(200):
            call()
        events[1].record()
        events[1].synchronize()
        taken.append(events[0].elapsed_time(events[1]) / 200 * 1e3)
    return round(statistics.median(taken), 2)


def times(device, low, rounds=40):
    """Return host and device us of an all_reduce of 8 KiB, with its wait: torch's before, ours inside, in turns."""
    x = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    rounds = 2 if device.type == "cpu" else rounds
    side = torch.cuda.Stream() if device.type == "cuda" else None

    def functional():
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", stock.group.WORLD))

    def operator():
        return TORCHS.wait_tensor(TORCHS.all_reduce(x, "sum", name()))

    def elsewhere():
        result = TORCHS.all_reduce(x, "sum", name())
        with torch.cuda.stream(side):
            TORCHS.wait_tensor(result)

    ways = {"functional and wait": functional, "operator and wait": operator}
    ways["operator, in place, and wait"] = lambda: TORCHS.wait_tensor(TORCHS.all_reduce_(x, "sum", name()))
    if side is not None:
        ways["operator and wait on another stream"] = elsewhere
    taken = {}
    low.disable()
    for turn in range(4):
        for where in ("torch's", "ours")[:: 1 if turn % 2 else -1]:
            again = safecomm.low_latency().enable() if where == "ours" else None
            for way, call in ways.items():
                taken.setdefault((way, where), []).extend(host_us(call, device, rounds // 4 or 1))
            if where == "ours":
                for way, call in {"wrapped": lambda: safecomm.all_reduce(x), "own operator": own(x)}.items():
                    if call is not None:
                        taken.setdefault((way, where), []).extend(host_us(call, device, rounds // 4 or 1))
            if again is not None:
                again.disable()
    before = device_us(operator, device)
    low.enable()
    table = {f"host us, {way}, {where}": round(statistics.median(values), 2) for (way, where), values in taken.items()}
    table["device us, operator and wait, torch's"] = before
    table["device us, operator and wait, ours"] = device_us(operator, device)
    table["device us, wrapped"] = device_us(lambda: safecomm.all_reduce(x), device)
    return table


def own(x):
    """Return a call of safecomm's own operator."""
    operator = getattr(torch.ops.safecomm, "all_reduce", None)
    return None if operator is None else lambda: operator(x, "sum", name())


# --- gradients ---------------------------------------------------------------------------------------------------


def train(mesh, device):
    """Return what a step of a tensor-parallel model gives, and one through functional collectives."""
    torch.manual_seed(0)
    first, second = (torch.randn(shape, device=device) / 8 for shape in ((64, 256), (256, 64)))
    data = torch.randn(32, 64, device=device)
    up = distribute_tensor(first, mesh, [Shard(1)]).requires_grad_()
    down = distribute_tensor(second, mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(data, mesh, [Replicate()]).requires_grad_()
    y = (torch.relu(x @ up) @ down).redistribute(placements=[Replicate()])
    y.square().sum().backward()
    found = [y.full_tensor(), up.grad.full_tensor(), down.grad.full_tensor(), x.grad.full_tensor()]
    local = data.clone().requires_grad_()
    whole = funcol.all_gather_tensor_autograd(local, 0, stock.group.WORLD)
    part = funcol.reduce_scatter_tensor_autograd(whole * 3, "sum", 0, stock.group.WORLD)
    part.square().sum().backward()
    return [one.detach().clone() for one in (*found, part, local.grad)]


def gradients(device, low):
    mesh = init_device_mesh(device.type, (stock.get_world_size(),))
    low.disable()
    before = train(mesh, device)
    low.enable()
    after = train(mesh, device)
    calls = low.calls
    worst = max(float(((a - b).abs() / (1e-3 + b.abs())).max()) for a, b in zip(after, before, strict=True))
    return {"calls taken": calls, "largest relative difference": worst, "equal": worst < 1e-3}


# --- a Llama of transformers ---------------------------------------------------------------------------------------


class Llama:
    """A Llama with random weights and a static cache, divided by ``tp_plan="auto"``."""

    CONTEXT = 512  # more than the tokens that are made, of which each takes a place

    def __init__(self, device):
        import transformers
        from transformers import LlamaConfig, LlamaForCausalLM

        self.device = device
        self.version = transformers.__version__
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
        shape |= {"head_dim": 64, "num_hidden_layers": 8, "vocab_size": 32_000}  # of Llama 3.2 1B, half of its layers
        if device.type == "cpu":
            shape |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
            shape |= {"head_dim": 16, "num_hidden_layers": 2, "vocab_size": 128}
        self.config = LlamaConfig(max_position_embeddings=self.CONTEXT, **shape)
        where = [None]
        if stock.get_rank() == 0:
            where = [tempfile.mkdtemp()]
            torch.manual_seed(0)
            with device:
                LlamaForCausalLM(self.config).to(torch.bfloat16).save_pretrained(where[0])
        stock.broadcast_object_list(where, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = LlamaForCausalLM.from_pretrained(where[0], dtype=torch.bfloat16, tp_plan="auto").eval()
        self.words = {"cache": "cache"} if "cache" in inspect.signature(self.model.forward).parameters else {}

    def decoder(self, batch):
        """Return a function that makes the logits of the next token of ``batch`` sequences."""
        from transformers import StaticCache

        device = self.device
        cache = StaticCache(config=self.config, max_cache_len=self.CONTEXT)
        tokens = torch.ones(batch, 1, dtype=torch.int64, device=device)
        position = torch.full((1,), 7, dtype=torch.int64, device=device)
        mask = torch.zeros(batch, 1, 1, self.CONTEXT, dtype=torch.bfloat16, device=device)
        mask[..., 8:] = torch.finfo(torch.bfloat16).min
        given = {"attention_mask": mask, "position_ids": position[None].expand(batch, 1), "use_cache": True}
        given[self.words.get("cache", "past_key_values")] = cache
        given["cache_position"] = position

        def decode(model=None):
            return (self.model if model is None else model)(tokens, **given).logits

        decode.begin = cache.reset
        return decode


def replayed(graph):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # so that the ranks begin the next one together
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def llama(device, low, rounds=50):
    model = Llama(device)
    table = {"transformers": model.version, "layers": model.config.num_hidden_layers}
    compiled = torch.compile(model.model)
    with torch.no_grad():
        for batch, way in ((1, "eager"), (8, "eager"), (8, "compiled"), (1, "compiled")):
            decode = model.decoder(batch)
            run = decode if way == "eager" else lambda decode=decode, model=compiled: decode(model)
            graphs, logits, row = {}, {}, {}
            low.disable()
            for where in ("without", "with"):
                if where == "with":
                    low.enable()
                    safecomm.patch()
                begun = time.perf_counter()
                decode.begin()
                for _ in range(2):
                    logits[where] = run().float()
                synchronize(device)
                row[f"seconds of the first calls, {where}"] = round(time.perf_counter() - begun, 1)
                before = low.calls
                if device.type == "cuda":
                    graphs[where] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs[where]):
                        logits[where] = run()
                    decode.begin()
                    graphs[where].replay()
                    synchronize(device)
                    logits[where] = logits[where].float().clone()
                    row[f"captured calls of low_latency(), {where}"] = low.calls - before
                else:
                    run()
                    row[f"calls of low_latency(), {where}"] = low.calls - before
            safecomm.unpatch()
            taken = {where: [] for where in graphs}
            for number in range(rounds):
                for where in sorted(graphs, reverse=bool(number % 2)):
                    us = torch.tensor([replayed(graphs[where])], device=device)
                    stock.all_reduce(us, op=stock.ReduceOp.MAX)
                    taken[where].append(us.item())
            row |= {f"us, {where}": round(statistics.median(values), 1) for where, values in taken.items()}
            if taken:
                pairs = zip(taken["with"], taken["without"], strict=True)
                row["ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
                row["kernels"] = {where: kernels_of(graphs[where].replay, device) for where in graphs}
            row["largest difference of logits"] = float((logits["with"] - logits["without"]).abs().max())
            row["largest logit"] = float(logits["without"].abs().max())
            for graph in graphs.values():
                graph.reset()
            table[f"{way}, batch {batch}"] = row
            KEPT["llama"] = table
            write(OUT[0], KEPT)
    del compiled, model
    torch._dynamo.reset()
    gc.collect()
    return table


# --- soak --------------------------------------------------------------------------------------------------------


def soak(device, low, total=1_000_000, seconds=100):
    """Make mixed calls, eager, waited for on other streams, and in replayed graphs; verify each on the device."""
    cuda = device.type == "cuda"
    if not cuda:
        total, seconds = 400, 30
    world, rank = stock.get_world_size(), stock.get_rank()
    dice, own_dice = random.Random(2), random.Random(100 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    wait = TORCHS.wait_tensor
    side = torch.cuda.Stream() if cuda else None
    compiled = torch.compile(lambda x: wait(TORCHS.all_reduce(x * 2, "sum", name())) / 2, dynamic=False)
    sizes = (1, 100, 4096, 40_000) if cuda else (1, 100)

    def expect(result, number):
        """Count what is wrong where each rank has sent ``number`` (or a tensor of it) plus its rank."""
        wrong.add_((result != world * number + sum(range(world))).sum())

    def wrapped(x):
        x = x.clone()
        safecomm.all_reduce(x)
        return x

    def functional(x):
        return funcol.all_reduce(x, "sum", stock.group.WORLD) + 0

    def in_place(x):
        return wait(TORCHS.all_reduce_(x.clone(), "sum", name()))

    def by_gather(x):
        return wait(TORCHS.all_gather_into_tensor(x, world, name())).view(world, -1).sum(0)

    def by_scatter(x):
        return wait(TORCHS.reduce_scatter_tensor(x.repeat(world), "sum", world, name()))

    def on_a_side_stream(x):
        result = TORCHS.all_reduce(x, "sum", name())
        if side is None:
            return wait(result)
        with torch.cuda.stream(side):
            out = wait(result) + 0
        torch.cuda.current_stream().wait_stream(side)
        return out + 0

    def dropped(x):
        TORCHS.all_reduce(x, "sum", name())  # nobody waits
        return functional(x)

    def nccls(x):
        x = x.clone()
        stock.all_reduce(x)
        return x

    def nccls_functional(x):
        return wait(TORCHS.all_reduce(x.double(), "sum", name()))

    ways = [wrapped, functional, in_place, by_gather, by_scatter, on_a_side_stream, dropped, nccls, nccls_functional]
    ways += [compiled]
    two = (dropped,)  # which make two calls
    for size in sizes:
        compiled(torch.ones(size, device=device))
    made, begun = 0, time.monotonic()
    counts = dict.fromkeys(["eager", "replayed"], 0)
    graphs = []
    if cuda:
        counter = torch.zeros((), device=device)
        for _ in range(4):
            order = [(dice.choice(ways), dice.choice(sizes)) for _ in range(32)]
            graph = torch.cuda.CUDAGraph()
            synchronize(device)
            with torch.cuda.graph(graph):
                for way, size in order:
                    expect(way(torch.zeros(size, device=device) + (counter + rank)), counter)
                    counter.add_(1).remainder_(1000)
            graphs.append((graph, sum(1 + (way in two) for way, _ in order)))
    finished = True
    for turn in range(1 << 30):
        if made >= total:
            break
        for _ in range(20):
            way, size, number = dice.choice(ways), dice.choice(sizes), dice.randrange(1000)
            expect(way(torch.full((size,), float(number + rank), device=device)), number)
            counts["eager"] += 1 + (way in two)
        if cuda and own_dice.random() < 0.1:
            torch.cuda._sleep(own_dice.randrange(200_000))
        for graph, calls in [dice.choice(graphs) for _ in range(12)] if graphs else []:
            graph.replay()
            counts["replayed"] += calls
        made = sum(counts.values())
        if turn % 20 == 19:  # at the same turn on all ranks
            over = torch.tensor([float(time.monotonic() - begun > seconds)], device=device)
            stock.all_reduce(over)
            if over.item():
                finished = False
                break
    synchronize(device)
    everyones = wrong.clone()
    stock.all_reduce(everyones)
    for graph, _ in graphs:
        graph.reset()
    torch._dynamo.reset()
    return {
        "calls": made, **counts, "taken outside of replays": low.calls, "wrong elements": int(everyones),
        "stuck": 0, "all of them made": finished, "seconds": round(time.monotonic() - begun, 1),
        "left in torch's registry": safecomm._torch.unwaited(),
    }  # fmt: skip


KEPT, OUT = {}, []
"""The results, which a case that takes long writes in between too, and where."""

CASES = {"kernels": kernels, "bits": bits, "gradients": gradients, "times": times, "soak": soak, "llama": llama}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("cases", nargs="*", default=[])
    arguments = parser.parse_args()
    device = begin()
    warnings.simplefilter("ignore", FutureWarning)  # the names of torch 2.13
    results = KEPT
    results |= setting("torchrun benchmarks/functional_low_latency.py")
    OUT.append(arguments.out)
    for case in arguments.cases or CASES:
        begun = time.monotonic()
        low = safecomm.low_latency().enable()
        if low.reason:
            raise SystemExit(low.reason)
        try:
            results[case] = CASES[case](device, low)
        except Exception:
            results[case] = {"failed": traceback.format_exc()[-3000:]}
        gc.collect()
        try:
            low.disable()
        except safecomm.SafecommError as error:
            results[f"{case}, on leaving"] = str(error)[:500]
            low._leave(datetime.timedelta())()
        results[f"seconds of {case}"] = round(time.monotonic() - begun, 1)
        write(arguments.out, results)
        if stock.get_rank() == 0:
            print(case, results[case], flush=True)
    safecomm.destroy_process_group()


if __name__ == "__main__":
    main()
