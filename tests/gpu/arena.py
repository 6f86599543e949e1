"""The arena on real GPUs: order between streams, captures, list forms, functional, registration, allocator calls."""

import datetime
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as stock
from harness import MIB, case, rank, require, settle, slow

import safecomm
from safecomm import functional
from safecomm.collectives import backends, lists
from safecomm.core.ledger import LEDGER

ROOT = Path(__file__).parents[2]


def streams(count=3):
    return [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(count - 1))]


@case(60)
def arena_is_one_segment_of_its_own():
    """One allocation in a pool of its own; no device allocation after it; the block is gone after close()."""
    settle()
    before = torch.cuda.memory_stats()
    arena = safecomm.Arena(256 * MIB)
    made = torch.cuda.memory_stats()
    require(made["allocation.all.allocated"] - before["allocation.all.allocated"] == 1, "more than one allocation")
    base = arena._block.data_ptr()
    (segment,) = [s for s in torch.cuda.memory_snapshot() if s["address"] <= base < s["address"] + s["total_size"]]
    require(len([b for b in segment["blocks"] if b["state"] == "active_allocated"]) == 1, segment["blocks"])
    for _ in range(3):
        kept = [arena.empty(n * MIB, dtype=torch.uint8) for n in (1, 7, 64)]
        require([tensor.data_ptr() for tensor in kept] == [base, base + MIB, base + 8 * MIB], "places moved")
        del kept
    after = torch.cuda.memory_stats()
    require(after["allocation.all.allocated"] == made["allocation.all.allocated"], "an allocation on the hot path")
    arena.close()
    settle()
    require(torch.cuda.memory_allocated() < 256 * MIB, torch.cuda.memory_allocated())
    return {"segment MiB": segment["total_size"] // MIB, "expandable": bool(segment.get("is_expandable"))}


@case(60)
def arena_tells_the_ledger_the_stream_of_a_slot():
    """The home of a slot is the stream that it was handed out on, also inside of it and after it has moved."""
    main, side, _ = streams()
    ledger = LEDGER
    with safecomm.use_arena(8 * MIB) as arena:
        asked = {}
        outside = []
        for stream in (main, side):
            with torch.cuda.stream(stream):
                outside.append(torch.empty(1024, device="cuda"))
        for stream in (main, side, main, side):
            with torch.cuda.stream(stream):
                tensor = arena.empty(6 * MIB, dtype=torch.uint8)  # only one fits
                for place in (0, MIB, 6 * MIB - 1):
                    home = ledger.streams.alloc_stream(tensor.data_ptr() + place)
                    asked[place] = home
                    require(home == stream.cuda_stream, home, stream.cuda_stream)
                    both = ledger.streams.alloc_stream(tensor.data_ptr(), tensor.data_ptr() + place)
                    require(both == stream.cuda_stream, "both of one slot", both)
                strangers = ledger.streams.alloc_stream(tensor.data_ptr(), outside[stream is main].data_ptr())
                require(strangers is None, "a slot and memory of another stream", strangers)
            del tensor
        require(ledger.streams.alloc_stream(outside[0].data_ptr()) == main.cuda_stream, "the allocator's")
    return {"pointers": len(asked)}


def handed_out_again(arena, allocating, launching, waiting, numel):
    """Run one trial with a slow peer; return how many elements of later slots the collective has written."""
    with torch.cuda.stream(allocating):
        memory = arena.empty(numel).fill_(1.0)
    launching.wait_stream(allocating)
    with torch.cuda.stream(launching):
        if rank() == 0:
            slow()
        work = safecomm.all_reduce(memory, async_op=waiting is not None)
    if waiting is not None:
        with torch.cuda.stream(waiting):
            work.wait()
    del work, memory
    victims = []
    for stream in (allocating, launching):
        with torch.cuda.stream(stream):
            victims.append(arena.empty(numel).fill_(-7.0))
    torch.cuda.synchronize()
    wrong = sum(int((victim != -7.0).sum()) for victim in victims)
    del victims
    safecomm.drain(wait=True)
    return wrong


@case(180)
def arena_s1_every_combination_of_streams():
    """Each of three streams allocating, launching and waiting, with a slow peer: no slot is handed out too early."""
    count = bad = reused = 0
    numel = 4 * MIB
    with safecomm.use_arena(64 * MIB) as arena:
        for allocating in (every := streams()):
            for launching in every:
                for waiting in (*every, None):
                    for _ in range(3):
                        stock.barrier()
                        bad += handed_out_again(arena, allocating, launching, waiting, numel) > 0
                        count += 1
        reused = arena.stats().high_water < count * numel * 4
        settle()
    require(bad == 0, bad, "of", count)
    require(reused, "no slot was ever handed out again: the programs do not bite")
    return {"programs": count, "corrupted": bad}


@case(150)
def arena_stress_with_a_slow_peer():
    """60 s of random programs: slots go around between streams while one rank lags; none is written by others."""
    draw = random.Random(11)  # the same on all ranks
    every = streams(4)
    group = stock.group.WORLD
    other = stock.new_group()
    world = stock.get_world_size()
    bad = torch.zeros(1, dtype=torch.int64, device="cuda")
    marks = []  # what was handed out, its stream, and what it must say
    works = []
    programs = steps = 0
    sizes = [MIB // 4, MIB // 2, MIB, 2 * MIB, 3 * MIB]
    counters = {stream.cuda_stream: torch.zeros(1, dtype=torch.int64, device="cuda") for stream in every}
    torch.cuda.synchronize()
    end = time.monotonic() + 60
    with safecomm.use_arena(48 * MIB) as arena:
        while True:
            # All ranks stop at the same program.
            go = torch.tensor(int(time.monotonic() < end), device="cuda")
            stock.all_reduce(go, stock.ReduceOp.MIN)
            if not int(go):
                break
            programs += 1
            lagging = draw.randrange(world)
            for _ in range(40):
                steps += 1
                home, launching, waiting = (draw.choice(every) for _ in range(3))
                numel, value = draw.choice(sizes), float(draw.randrange(1, 100))
                how = draw.choice(["async", "async", "dropped", "sync", "mark"])
                on, lag = draw.choice([group, other]), draw.random() < 0.15
                with torch.cuda.stream(home):
                    tensor = arena.empty(numel)
                    tensor.fill_(value)
                if how == "mark":
                    marks.append((tensor, home, value))
                    if len(marks) > 4:
                        kept, stream, mark = marks.pop(draw.randrange(len(marks)))
                        with torch.cuda.stream(stream):
                            counters[stream.cuda_stream] += (kept != mark).sum()
                        del kept
                    del tensor  # else the last one of all is in use at the end
                    continue
                launching.wait_stream(home)
                with torch.cuda.stream(launching):
                    if lag and rank() == lagging:
                        slow(0.003)
                    work = safecomm.all_reduce(tensor, group=on, async_op=how != "sync")
                if how == "async":
                    works.append((work, waiting))
                del work, tensor
                if len(works) > 3:
                    work, stream = works.pop(draw.randrange(len(works)))
                    with torch.cuda.stream(stream):
                        work.wait()
                    del work
            while works:
                work, stream = works.pop()
                with torch.cuda.stream(stream):
                    work.wait()
                del work
            while marks:
                kept, stream, mark = marks.pop()
                with torch.cuda.stream(stream):
                    counters[stream.cuda_stream] += (kept != mark).sum()
                del kept
            if programs % 20 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        for count in counters.values():
            bad += count
        settle()
        stats = arena.stats()
        require(stats.in_use == 0, arena)
    safecomm.destroy_process_group(other)
    require(int(bad) == 0, int(bad), "elements written by others")
    return {"programs": programs, "steps": steps, "elements written by others": int(bad), "fallbacks": stats.fallbacks,
            "high water MiB": stats.high_water // MIB}  # fmt: skip


@case(120)
def arena_s6_slots_of_a_graph_are_its_own():
    """What a capture was handed out is nobody else's until the reset, and comes back after it; replays are right."""
    world = stock.get_world_size()
    numel = 2 * MIB
    x = torch.ones(numel, device="cuda")
    with safecomm.use_arena(64 * MIB) as arena:
        held = []
        for layers in (4, 16):
            graph = torch.cuda.CUDAGraph()
            with safecomm.graph(graph, groups=[stock.group.WORLD]) as captured:
                y = x
                for _ in range(layers):
                    h = arena.empty(numel)
                    torch.mul(y, 1.0 / world, out=h)
                    y = functional.all_reduce(h)
                    del h
            held.append(arena.stats().captured)
            require(captured.nbytes >= arena.stats().captured > 0, captured.nbytes, arena)
            own = {y.data_ptr()}
            out = y
            del y
            bad = 0
            for _ in range(5):
                graph.replay()
                victims = [arena.empty(numel).fill_(-7.0) for _ in range(2)]
                require(not own & {victim.data_ptr() for victim in victims}, "a slot of the graph was handed out")
                graph.replay()
                torch.cuda.synchronize()
                bad += sum(int((victim != -7.0).sum()) for victim in victims)
                bad += int((out != 1.0).sum())
                del victims
            require(bad == 0, bad)
            graph.reset()
            del out, graph
            safecomm.drain(wait=True)
            require(arena.stats().in_use == 0, arena)
        require(held[0] == held[1], "the graph grows with its layers", held)
        with torch.cuda.stream(torch.cuda.Stream()):
            plain = torch.cuda.CUDAGraph()
            with torch.cuda.graph(plain):
                outside = arena.empty(numel)
            require(not arena.owns(outside), "a capture that safecomm does not see was handed out a slot")
            del outside, plain
    return {"MiB of a graph with 4 and 16 layers": [one // MIB for one in held]}


def flat_launches():
    """Count the list calls that go flat, from now on: in what is returned, by name."""
    counts = {"_launch_all_gather": 0, "_launch_reduce_scatter": 0}

    def counting(name, launch):
        def call(*arguments):
            counts[name] += 1
            return launch(*arguments)

        return call

    for name in counts:
        setattr(lists, name, counting(name, getattr(lists, name)))
    return counts


def memory_of(made, arena, world, numel, dtype):
    """Return a list of tensors to gather into or to scatter from, and whether it is one buffer."""
    whole = torch.zeros(world, numel, dtype=dtype, device="cuda")
    if made == "arena":
        whole = arena.empty(world, numel, dtype=dtype).zero_()
    pieces = made == "pieces" or (made == "mixed" and rank() % 2)
    return [one.clone() for one in whole] if pieces else list(whole.unbind()), not pieces


@case(240, ranks=2)
def arena_list_forms_against_stock():
    """The same bits as stock's, 20 B to 64 MiB a slice: in slices, in pieces, mixed between ranks, sync and async.

    On ProcessGroupNCCL slices go flat, and pieces are c10d's.
    """
    world = stock.get_world_size()
    goes = backends.of(stock.group.WORLD, "cuda").stages_lists  # else lists are c10d's, and take no memory
    checked = 0
    sizes = (20, 1 << 10, 64 << 10, (1 << 20) + 12, 4 << 20, (16 << 20) + 32, 64 << 20)
    side = torch.cuda.Stream()
    launches = flat_launches()
    expected = 0
    with safecomm.use_arena(world << 29) as arena:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            for nbytes in sizes:
                numel = -(-nbytes // dtype.itemsize)
                generator = torch.Generator("cuda").manual_seed(rank() * 7 + numel)
                given = (torch.rand(world, numel, device="cuda", generator=generator) * 9).to(dtype)
                for made in ("slices", "pieces", "arena", "mixed"):
                    for how in ("sync", "async", "side stream"):
                        asynchronous = how == "async"
                        results = []
                        for library in (stock, safecomm):
                            out, one_buffer = memory_of(made, arena, world, numel, dtype)
                            sent, _ = memory_of(made, arena, world, numel, dtype)
                            for one, other in zip(sent, given, strict=True):
                                one.copy_(other)
                            part = torch.zeros(numel, dtype=dtype, device="cuda")
                            stream = side if how == "side stream" else torch.cuda.current_stream()
                            stream.wait_stream(torch.cuda.current_stream())
                            with torch.cuda.stream(stream):
                                versions = [one._version for one in out]
                                works = [library.all_gather(out, given[0], async_op=asynchronous)]
                                # Slices are views of one tensor, and stock's copies count for each: only whether.
                                versions = [
                                    int(one._version > before) if one_buffer else one._version - before
                                    for one, before in zip(out, versions, strict=True)
                                ]
                                if works[0] is not None:
                                    works[0].wait()
                                gathered = torch.cat(out)
                                if not dtype.is_complex:
                                    works.append(library.reduce_scatter(part, sent, async_op=asynchronous))
                                works.append(library.all_to_all(out, sent, async_op=asynchronous))
                                for work in works:
                                    if work is not None:
                                        work.wait()
                                exchanged = torch.cat(out)
                            torch.cuda.current_stream().wait_stream(stream)
                            torch.cuda.synchronize()
                            results.append((gathered, part, exchanged, torch.tensor(versions)))
                            if library is safecomm:
                                expected += goes and one_buffer and not dtype.is_complex
                            del works, work, out, sent, one, other  # a handle keeps its outputs
                        for theirs, ours in zip(*results, strict=True):
                            require(torch.equal(ours, theirs), dtype, nbytes, made, how, ours, theirs)
                            checked += 1
                        require(list(launches.values()) == [expected] * 2, launches, expected, dtype, nbytes, made, how)
                        del results, ours, theirs, part, gathered, exchanged
        safecomm.drain(wait=True)
        require(safecomm.pending() == [], safecomm.pending())
        settle()
        stats = arena.stats()
        require(stats.in_use == 0, arena)
    return {"compared": checked, "flat": expected, "fallbacks": stats.fallbacks}


def pieces_handed_out_again(allocating, launching, numel):
    """Run one trial with a slow rank 0; return how many elements are wrong, and whether memory was handed out again."""
    world = stock.get_world_size()
    with torch.cuda.stream(allocating):
        out = [torch.zeros(numel, device="cuda") for _ in range(world)]
        given = [torch.full((numel,), 1.0 + place, device="cuda") for place in range(world)]
        mine = torch.full((numel,), 1.0, device="cuda")
        part = torch.zeros(numel, device="cuda")
    launching.wait_stream(allocating)
    with torch.cuda.stream(launching):
        if rank() == 0:
            slow()
        safecomm.all_gather(out, mine)
        safecomm.reduce_scatter(part, given)
    places = {one.data_ptr() for one in (*out, *given, mine)}
    del out, given, mine
    # What is written here would be in the sum if it were given's memory, and be written over if it were out's.
    with torch.cuda.stream(allocating):
        victims = [torch.full((numel,), -7.0, device="cuda") for _ in places]
    torch.cuda.synchronize()
    wrong = sum(int((victim != -7.0).sum()) for victim in victims) + int((part != world * (1.0 + rank())).sum())
    again = bool(places & {victim.data_ptr() for victim in victims})
    del victims, part
    safecomm.drain(wait=True)
    return wrong, again


@case(120)
def arena_s1_pieces_of_another_stream():
    """Pieces of one stream, in calls on another with a slow peer: their memory is not handed out too early."""
    count = bad = reused = 0
    numel = MIB
    launches = flat_launches()
    with safecomm.use_arena(256 * MIB) as arena:
        for allocating in (every := streams()):
            for launching in every:
                for _ in range(3):
                    stock.barrier()
                    wrong, again = pieces_handed_out_again(allocating, launching, numel)
                    bad += wrong > 0
                    reused += again
                    count += 1
        settle()
        stats = arena.stats()
        require(stats.in_use == 0, arena)
    require(bad == 0, bad, "of", count)
    require(list(launches.values()) == [0] * 2, launches, "pieces are c10d's")
    require(reused, "no memory was ever handed out again: the programs do not bite")
    return {"programs": count, "corrupted": bad, "handed out again": reused, "high water MiB": stats.high_water // MIB}


@case(120, ranks=2)
def arena_list_forms_in_a_capture():
    """Captured in slices, in pieces and mixed between ranks: each replay gives stock's bits, and leases the list."""
    world = stock.get_world_size()
    goes = backends.of(stock.group.WORLD, "cuda").stages_lists  # else lists are c10d's, and take no memory
    checked = 0
    leases = {}
    launches = flat_launches()
    with safecomm.use_arena(512 * MIB) as arena:
        for nbytes in (64 << 10, 1 << 20, 16 << 20):
            numel = nbytes // 4
            for made in ("slices", "pieces", "mixed"):
                for asynchronous in (False, True):
                    given = torch.zeros(world, numel, device="cuda")
                    out, one_buffer = memory_of(made, arena, world, numel, torch.float32)
                    sent, _ = memory_of(made, arena, world, numel, torch.float32)
                    part = torch.zeros(numel, device="cuda")
                    before = dict(launches)
                    graph = torch.cuda.CUDAGraph()
                    with safecomm.graph(graph, groups=[stock.group.WORLD]) as captured:
                        for work in (
                            safecomm.all_gather(out, given[0], async_op=asynchronous),
                            safecomm.reduce_scatter(part, sent, async_op=asynchronous),
                        ):
                            if work is not None:
                                work.wait()
                    del work
                    flat = [launches[name] - before[name] for name in launches]
                    require(flat == [int(goes and one_buffer)] * 2, flat, made, nbytes)
                    leases[made] = len(captured.leases())
                    require(leases[made] == 2 * (world + 1), captured.leases())
                    stranger = arena.empty(world, numel).fill_(-7.0)
                    for trial in range(3):
                        given.uniform_(generator=torch.Generator("cuda").manual_seed(trial * 10 + rank()))
                        for one, other in zip(sent, given, strict=True):
                            one.copy_(other)
                        graph.replay()
                        expected = [torch.empty(numel, device="cuda") for _ in out]
                        stock.all_gather(expected, given[0])
                        total = torch.empty(numel, device="cuda")
                        stock.reduce_scatter(total, list(given.unbind()))
                        for ours, theirs in zip([*out, part], [*expected, total], strict=True):
                            require(torch.equal(ours, theirs), made, nbytes, asynchronous)
                            checked += 1
                    torch.cuda.synchronize()
                    require(bool((stranger == -7.0).all()), "a replay wrote to another slot", made, nbytes)
                    graph.reset()
                    del graph, captured, out, sent, one, other, ours, theirs, expected, total, stranger
        safecomm.drain(wait=True)
        settle()
        require(arena.stats().in_use == 0, arena)
    return {"compared": checked, "leases": leases}


class Layer:
    """The communication of a Megatron layer with sequence parallelism, with products into memory that is there."""

    def __init__(self, rows, hidden):
        self.world = world = stock.get_world_size()
        self.part = torch.ones(rows // world, hidden, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.eye(hidden, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16)
        self.norm = torch.ones(hidden, device="cuda")
        self.whole = torch.ones_like(self.product)

    def products(self, layers):
        for _ in range(layers):
            torch.mm(self.whole, self.weight, out=self.product)

    def step(self, layers):
        for _ in range(layers):
            whole = functional.gather_from_sequence_parallel_region(self.part)
            torch.mm(whole, self.weight, out=self.product)
            del whole
            self.part.copy_(functional.reduce_scatter_to_sequence_parallel_region(self.product))
            self.part.div_(self.world)
            self.norm.copy_(functional.all_reduce(self.norm)).div_(self.world)


@case(120)
def arena_allocator_calls_per_step():
    """After the first step, none: neither cudaMalloc nor allocations for communication buffers.

    What a product takes by itself is counted apart: from torch 2.15 on its workspace is allocated at each call.
    """
    layer = Layer(4096, 4096)
    counts = {}
    for name in ("products alone", "ordinary memory", "arena"):
        settle()
        use = safecomm.use_arena(256 * MIB) if name == "arena" else None
        if use is not None:
            use.__enter__()
        for step in range(6):
            torch.cuda.synchronize()
            if step == 1:
                before = torch.cuda.memory_stats()
            layer.products(8) if name == "products alone" else layer.step(8)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        counts[name] = {
            "allocations a step": (after["allocation.all.allocated"] - before["allocation.all.allocated"]) / 5,
            "cudaMalloc a step": (after.get("num_device_alloc", 0) - before.get("num_device_alloc", 0)) / 5,
        }
        if use is not None:
            require(use.arena.stats().fallbacks == 0, use.arena)
            use.__exit__(None, None, None)
    require(bool((layer.part == 1.0).all()), "wrong result")
    require(counts["arena"] == counts["products alone"], counts)
    require(counts["arena"]["cudaMalloc a step"] == 0, counts)
    require(
        counts["ordinary memory"]["allocations a step"] > counts["arena"]["allocations a step"],
        "the count does not bite", counts,
    )  # fmt: skip
    return counts


@case(90, ranks=2)
def arena_same_places_on_all_ranks():
    """The check of places across ranks passes for a program, and names the call where one rank differs."""
    arena = safecomm.Arena(256 * MIB, check=stock.group.WORLD)
    layer = Layer(2048, 1024)
    with safecomm.use_arena(arena):
        for _ in range(3):
            layer.step(4)
        arena.check()
        tensor = arena.empty(100 + rank())
        try:
            arena.check()
            message = ""
        except safecomm.ArenaError as error:
            message = str(error)
        require("rank 0: 400 bytes" in message and "rank 1: 404 bytes" in message, message)
        del tensor
    arena.close()
    return {"message": message.partition(", from ")[0]}


@case(120, ranks=2)
def arena_registered_with_nccl():
    """Plain registration: right results, also after other memory; refused where it can corrupt; clean close()."""
    group = stock.new_group()
    stock.all_reduce(torch.ones(1, device="cuda"), group=group)
    arena = safecomm.Arena(64 * MIB, register=group, full="raise")
    with safecomm.use_arena(arena):
        for numel in (1000, MIB, 4 * MIB):
            result = functional.all_reduce(torch.ones(numel, device="cuda"), group=group)
            require(bool((result == stock.get_world_size()).all()), numel)
            del result
        try:
            arena.empty(100 * MIB)
            require(False, "nothing was raised")
        except safecomm.ArenaFullError:
            pass
    settle()
    arena.close()
    refused = ""
    if torch.cuda.nccl.version() < (2, 30, 7):
        try:
            safecomm.Arena(MIB, register=group, symmetric=True, full="raise")
        except safecomm.ArenaError as error:
            refused = str(error)
        require("2.30.7" in refused, refused)
    safecomm.destroy_process_group(group)
    return {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "symmetric refused": bool(refused)}


@case(540)
def arena_300_steps_of_32_lengths():
    """Reserved minus peak in use, in processes of their own for each setting of the allocator."""
    figures = [None]
    store = stock.distributed_c10d._get_default_store()
    settle()
    if rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "fragmentation.json"
            done = subprocess.run(
                [sys.executable, str(ROOT / "benchmarks/arena_fragmentation.py"), "--out", str(out),
                 "--ranks", str(stock.get_world_size()), "--programs", "tiled"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            figures[0] = json.loads(out.read_text())["programs"]["tiled"] if out.exists() else done.stdout + done.stderr
        store.set("fragmentation", "measured")
    else:  # not in a collective, which would keep this GPU busy
        store.wait(["fragmentation"], datetime.timedelta(seconds=520))
    stock.broadcast_object_list(figures)
    rows = figures[0]
    require(isinstance(rows, dict), str(rows)[-2000:])
    arena, plain = rows["arena, default"]["overhead MiB"], rows["stock, default"]["overhead MiB"]
    require(arena <= 0.25 * plain, rows)
    # Torch's own expandable segments may need less: the arena has an idle place for each size that has come.
    require(rows["arena, expandable"]["overhead MiB"] <= 0.25 * plain, rows)
    return rows
