"""What a program's events order is back at once, with nothing but the import: memory, time, captures, compiling."""

import ctypes
import itertools
import statistics
import time

import torch
import torch.distributed as stock
from collectives import launch
from harness import MIB, case, rank, require, settle, slow

import safecomm
from safecomm.core.ledger import LEDGER
from safecomm.core.uses import Events
from safecomm.diagnostics.replaced import replaced
from safecomm.interception import stream_methods

BUFFER = 4096 * 8192 * 2
METHODS = [f"torch.cuda.streams.{name}" for name in ("Event.record", "Event.wait", "Stream.wait_stream")]


def order(waiting, other, how, between):
    """Let ``waiting`` wait for ``other``, by what a program does that."""
    if how == "wait_stream":
        waiting.wait_stream(other)
    elif how == "events":
        waiting.wait_event(other.record_event())
    else:  # through a third stream, with an event that is recorded twice
        event = torch.cuda.Event()
        event.record(between)
        event.record(other)
        event.wait(between)
        with torch.cuda.stream(between):
            event.record()
        with torch.cuda.stream(waiting):
            event.wait()


def forum(library, how, by, layers=8, iterations=5, record=False):
    """The forum's program with its all_reduces on a side stream. Returns bytes at the peak, and seconds."""
    main, side, between = torch.cuda.current_stream(), *THREE[1:]
    x = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
    y = x
    torch.matmul(x, w)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_stats()["active_bytes.all.current"]
    start = time.perf_counter()
    for _ in range(iterations):
        y = x
        for _ in range(layers):
            y = torch.matmul(y, w)
            if how == "none":
                continue
            order(side, main, by, between)
            with torch.cuda.stream(side):
                if how == "sync":
                    library.all_reduce(y)
                else:
                    library.all_reduce(y, async_op=True).wait()
            if record:
                y.record_stream(side)
            order(main, side, by, between)
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - base
    torch.cuda.synchronize()
    return peak, time.perf_counter() - start


THREE = []


def streams():
    if not THREE:
        THREE.extend((torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()))
    return THREE


@case(240)
def s2_forum_program_on_a_side_stream():
    """Plain import: sync, async + wait, ordered by wait_stream, events and a third stream: the peak, and the time."""
    streams()
    result, before = {}, set(replaced())  # what another case left by an exception stays
    settle()
    without = max(forum(safecomm, "none", "")[0] for _ in range(3))
    for by, how in itertools.product(("wait_stream", "events", "a third stream"), ("sync", "async")):
        peaks, times = [], {"ours": [], "torch's": []}
        for turn in range(7):
            for name, library in sorted({"ours": safecomm, "torch's": stock}.items(), reverse=turn % 2):
                settle()
                peak, seconds = forum(library, how, by)
                times[name].append(seconds)
                if name == "ours":
                    peaks.append(peak)
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times["torch's"], strict=True))
        above = (max(peaks) - without) / BUFFER
        result[f"{how}, {by}"] = {"buffers above no communication": above, "time to torch's": round(ratio, 4)}
        require(above <= 2, by, how, result)
        safecomm.drain()
        require(safecomm.pending() == [], safecomm.pending())
    for by in ("wait_stream", "events", "a third stream"):
        settle()
        with safecomm.avoid_record_streams():
            peak = max(forum(safecomm, "sync", by, record=True)[0] for _ in range(3))
        above = (peak - without) / BUFFER
        result[f"record_stream avoided, {by}"] = {"buffers above no communication": above}
        require(above <= 2, by, result)
    require(set(replaced()) == before | set(METHODS), replaced())
    return result


@case(240)
def s1_every_combination_of_streams_ordered_by_events():
    """Each of three streams allocating, launching, waiting; four collectives, sync and async; four trials each."""
    bad, programs = {"safecomm": 0, "stock": 0}, 0
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_gather_list"):
        for allocating, launching, waiting in itertools.product(streams(), streams(), (*streams(), None)):
            programs += 1
            for trial in range(4):
                late = rank() == trial % stock.get_world_size()
                bad["safecomm"] += corrupted(safecomm, op, allocating, launching, waiting, late)
                if not trial:
                    bad["stock"] += corrupted(stock, op, allocating, launching, waiting, late)
    settle()
    require(bad["safecomm"] == 0, bad)
    return {"programs": programs, "trials each": 4, **{f"{name} corrupted": count for name, count in bad.items()}}


def corrupted(library, op, allocating, launching, waiting, late, numel=4 << 20):
    """Run one trial in which streams are ordered by events; return whether the collective has written to a victim."""
    world = stock.get_world_size()
    with torch.cuda.stream(allocating):
        memory = [torch.full((numel,), 1.0, device="cuda")]
        if op != "all_reduce":
            memory.append(torch.full((numel // world,), 1.0, device="cuda"))
    early, behind = torch.cuda.Event(), torch.cuda.Event()
    early.record(allocating)
    launching.wait_event(early)
    early.record(launching)
    with torch.cuda.stream(launching):
        if late:
            slow()
        work = launch(library, op, memory, waiting is not None)
    allocating.wait_event(early)  # of before the launch
    if waiting is not None:
        with torch.cuda.stream(waiting):
            work.wait()
    del work
    memory.clear()
    with torch.cuda.stream(allocating):
        victims = [torch.full((numel,), -7.0, device="cuda"), torch.full((numel // world,), -7.0, device="cuda")]
    behind.record(launching)
    allocating.wait_event(behind)
    torch.cuda.synchronize()
    wrong = any(bool((victim != -7.0).any()) for victim in victims)
    del victims
    if library is safecomm:
        safecomm.drain(wait=True)
        require(safecomm.pending() == [], safecomm.pending())
    return wrong


@case(60)
def s1_an_event_recorded_again_past_python():
    """By the C++ class's own method, on a stream that is behind nothing: nothing is given out too early."""
    main, side, other = streams()
    wrong = 0
    for _ in range(20):
        part = torch.full((4 << 20,), 1.0, device="cuda")
        whole = torch.empty(stock.get_world_size() * (4 << 20), device="cuda")
        side.wait_stream(main)
        event = torch.cuda.Event()
        with torch.cuda.stream(side):
            slow()
            safecomm.all_gather_into_tensor(whole, part)
        event.record(side)
        torch.cuda.Event.__mro__[1].record(event, other)
        main.wait_event(event)
        victim = torch.full_like(whole, -7.0)
        del part, whole
        victim = [victim, torch.full_like(victim, -7.0)][1]
        torch.cuda.synchronize()
        wrong += bool((victim != -7.0).any())
        del victim
        safecomm.drain(wait=True)
    require(wrong == 0, wrong)
    return {"corrupted": wrong, "of": 20}


@case(60)
def s1_external_streams_and_events_recorded_again():
    """Streams of others by their handles, and one event for all iterations, as programs with buffers have it."""
    _, side, _ = streams()
    external = torch.cuda.ExternalStream(side.cuda_stream)
    settle()
    done, ready = torch.cuda.Event(), torch.cuda.Event()
    base = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    wrong = 0
    for step in range(40):
        tensor = torch.full((16 << 20,), float(step), device="cuda")
        ready.record()
        external.wait_event(ready)
        with torch.cuda.stream(external):
            safecomm.all_reduce(tensor)
            done.record()
        done.wait()
        wrong += bool((tensor != step * stock.get_world_size()).any()) if step % 10 == 0 else 0
        del tensor
    peak = (torch.cuda.memory_stats()["active_bytes.all.peak"] - base) / (64 * MIB)
    torch.cuda.synchronize()
    require(wrong == 0, wrong)
    require(peak <= 3, peak)
    return {"wrong": wrong, "buffers at the peak": round(peak, 2)}


@case(60)
def s1_uses_that_have_no_event_of_their_own():
    """On streams that last: released by wait_stream, events, a drain after a synchronize, and across a capture."""
    _, side, _ = streams()
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    require(driver.cuStreamCreate(ctypes.byref(handle), 1) == 0, "cuStreamCreate")
    external = torch.cuda.ExternalStream(handle.value)
    main, x = torch.cuda.current_stream(), torch.ones(1 << 20, device="cuda")
    index = x.device.index
    lasting = {}
    for name, stream in (("of torch's pool", side), ("external", external), ("default", main)):
        with torch.cuda.stream(stream):
            lasting[name] = LEDGER.streams.is_lasting(index, stream.cuda_stream)
    require(lasting == {"of torch's pool": True, "external": False, "default": False}, lasting)

    def use(stream):
        """Use ``x`` on ``stream``; return how many uses there have no event, and how many holds there are."""
        with torch.cuda.stream(stream):
            safecomm.all_reduce(x)
        return counts(stream)

    def counts(stream):
        return len(LEDGER.uses.queues[Events, stream.cuda_stream, index, 0].eventless), len(safecomm.pending())

    settle()
    require(use(side) == (1, 1), "a use", counts(side))
    torch.cuda.synchronize()
    require(safecomm.drain() == 0 and counts(side) == (0, 0), "drain() of an idle device", counts(side))
    use(side)
    main.wait_stream(side)
    require(counts(side) == (0, 0), "wait_stream", counts(side))
    use(side)
    event = side.record_event()
    require(counts(side) == (0, 1), "an event behind it", counts(side))
    main.wait_event(event)
    require(counts(side) == (0, 0), "wait_event", counts(side))
    require(use(external) == (0, 1), "a stream that can be destroyed", counts(external))
    torch.cuda.synchronize()
    require(safecomm.drain() == 0, safecomm.pending())
    # A capture that begins on the stream of an eventless use: the use is not part of the graph, and the graph is well.
    use(side)
    graph, y = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    side.wait_stream(main)
    with torch.cuda.graph(graph, stream=side):
        y.mul_(2)
        safecomm.all_reduce(y)
    graph.replay()
    torch.cuda.synchronize()
    safecomm.drain()
    require(counts(side) == (0, 0), "after the capture", counts(side))
    require(bool((y == 2 * stock.get_world_size()).all()), y)
    with safecomm.avoid_record_streams():
        for _ in range(20):
            recorded = torch.ones(1 << 20, device="cuda")
            with torch.cuda.stream(side):
                recorded.mul_(2)
                recorded.record_stream(side)
            del recorded
        main.wait_stream(side)
        require(safecomm.pending() == [], safecomm.pending())
    graph.reset()
    torch.cuda.synchronize()
    require(safecomm.drain() == 0, safecomm.pending())
    LEDGER.uses.queues.pop((Events, external.cuda_stream, index, 0), None)
    driver.cuStreamDestroy_v2(handle)
    return lasting


@case(60)
def s5_captures_ordered_by_events_are_flat():
    """A side stream in a capture that forks and joins by events: bytes of the graph at 4, 16 and 64 layers; results."""
    _, side, _ = streams()
    sizes = []
    for layers in (4, 16, 64):
        settle()
        x = torch.ones(16 * MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            y = x
            for _ in range(layers):
                y = y * 0.5
                order(side, main, "events", None)
                with torch.cuda.stream(side):
                    safecomm.all_reduce(y)
                order(main, side, "events", None)
        sizes.append((torch.cuda.memory_reserved() - before) // MIB)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        scale = (0.5 * stock.get_world_size()) ** layers
        require(bool((y == scale).all()), layers, float(y[0]), scale)
        safecomm.drain()
        require(safecomm.pending() == [], safecomm.pending())
        graph.reset()
        del graph, y, x
    require(sizes[2] <= sizes[0] + 64, sizes)
    return {"MiB at 4, 16 and 64 layers": sizes}


@case(180)
def s9_compiled_code_with_streams_and_events():
    """Graph breaks and results of compiled code that uses streams and events: as with torch's own methods."""
    _, side, _ = streams()

    def program(x):
        event = torch.cuda.Event()
        x = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
            event.record(side)
        event.wait(torch.cuda.current_stream())
        return y * 3

    def explained():
        torch._dynamo.reset()
        told = torch._dynamo.explain(program)(torch.ones(1024, device="cuda"))
        torch._dynamo.reset()
        try:
            out = torch.compile(program, backend="eager")(torch.ones(1024, device="cuda"))
            torch.cuda.synchronize()
            value = float(out[0])
        except Exception as error:  # this torch can't compile it: the same error on both sides
            value = type(error).__name__
        return told.graph_break_count, told.graph_count, value

    stream_methods.forget_uses()
    others = set(replaced())
    require(others.isdisjoint(METHODS), others)
    before = explained()
    stream_methods.see(explained)
    require(set(replaced()) == others | set(METHODS), replaced())
    after = explained()
    stream_methods.unsee(explained)
    torch._dynamo.reset()
    require(before == after, before, after)
    return {"graph breaks, graphs, result": before}


def median_us(function, count=2000):
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count * 1e6


@case(120)
def host_time_of_what_orders_streams():
    """Microseconds more of Event.record, wait_event and wait_stream: nothing held, and with a use on the stream."""
    main, side, other = streams()
    event = torch.cuda.Event()
    event.record(side)
    held = torch.full((1 << 20,), 1.0, device="cuda")

    def use():
        with torch.cuda.stream(side):
            safecomm.all_reduce(held)

    calls = {
        "Event.record": lambda: event.record(side),
        "wait_event": lambda: other.wait_event(event),
        "wait_stream": lambda: other.wait_stream(side),
    }
    result = {}
    for state in ("nothing held", "a use on the stream is held"):
        for name, call in calls.items():
            times = {"torch's": [], "ours": []}
            for turn in range(21):
                for whose in sorted(times, reverse=turn % 2):
                    torch.cuda.synchronize()
                    safecomm.drain(wait=True)
                    if state != "nothing held":
                        with torch.cuda.stream(side):
                            slow(0.2)
                        use()
                    stream_methods.forget_uses()
                    if whose == "ours":
                        stream_methods.see(host_time_of_what_orders_streams)
                    event.record(side)
                    times[whose].append(median_us(call))
                    stream_methods.unsee(host_time_of_what_orders_streams)
            more = sorted(a - b for a, b in zip(times["ours"], times["torch's"], strict=True))
            result[f"{name}, {state}"] = {
                "us more": round(statistics.median(more), 2),
                "quartiles": [round(more[5], 2), round(more[15], 2)],
                "torch's us": round(statistics.median(times["torch's"]), 2),
            }
    torch.cuda.synchronize()
    safecomm.drain(wait=True)
    # The use, and the waits that bring its memory back; against the same unseen, where sweeps look for it.
    for by in ("wait_stream", "events"):
        times = {"torch's": [], "unseen": [], "ours": []}
        for turn in range(21):
            for whose in sorted(times, reverse=turn % 2):
                torch.cuda.synchronize()
                safecomm.drain(wait=True)
                stream_methods.forget_uses()
                LEDGER.uses.on_use = None
                if whose == "ours":
                    stream_methods.see(host_time_of_what_orders_streams)

                def step(library=stock if whose == "torch's" else safecomm, by=by):
                    order(side, main, by, None)
                    with torch.cuda.stream(side):
                        library.all_reduce(held)
                    order(main, side, by, None)

                times[whose].append(median_us(step, 500))
                stream_methods.unsee(host_time_of_what_orders_streams)
        stream_methods.forget_uses()
        result[f"all_reduce on a side stream and {by}"] = {
            f"us more than {than}": round(
                statistics.median(a - b for a, b in zip(times["ours"], times[than], strict=True)), 2
            )
            for than in ("torch's", "unseen")
        } | {"torch's us": round(statistics.median(times["torch's"]), 2)}
    if rank() == 0:
        print(result, flush=True)
    return result
