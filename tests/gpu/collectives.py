"""The collectives themselves: S1, S2, S3, S5 and S8, beside ``torch.distributed`` where it goes wrong."""

import contextlib
import ctypes
import functools
import itertools
import random
import threading
import time

import torch
import torch.distributed as stock
from harness import LIBRARIES, MIB, case, held, rank, require, settle, slow

import safecomm
from safecomm._torch import driver, native, segment_table
from safecomm._torch.segment_table import GRANULE
from safecomm.collectives.routes import ROUTES
from safecomm.core.allocation import Allocations
from safecomm.core.ledger import LEDGER, PATIENCE

# --- S1: corruption -------------------------------------------------------------------------------------------------


def launch(library, op, memory, asynchronous):
    if op == "all_reduce":
        return library.all_reduce(memory[0], async_op=asynchronous)
    if op == "all_gather":
        return library.all_gather_into_tensor(memory[0], memory[1], async_op=asynchronous)
    if op == "reduce_scatter":
        return library.reduce_scatter_tensor(memory[1], memory[0], async_op=asynchronous)
    if op == "all_gather_list":
        return library.all_gather(list(memory[0].chunk(stock.get_world_size())), memory[1], async_op=asynchronous)
    raise AssertionError(op)


def corrupted(library, op, allocating, launching, waiting, late, numel=16 << 20):
    """Run one trial and return how many elements of a later tensor the collective has written."""
    world = stock.get_world_size()
    with torch.cuda.stream(allocating):
        memory = [torch.full((numel,), 1.0, device="cuda")]
        if op != "all_reduce":
            memory.append(torch.full((numel // world,), 1.0, device="cuda"))
    launching.wait_stream(allocating)
    with torch.cuda.stream(launching):
        if late:
            slow()
        work = launch(library, op, memory, waiting is not None)
    if waiting is not None:
        with torch.cuda.stream(waiting):
            work.wait()
    del work
    memory.clear()
    with torch.cuda.stream(allocating):
        victims = [torch.full((numel,), -7.0, device="cuda"), torch.full((numel // world,), -7.0, device="cuda")]
    torch.cuda.synchronize()
    wrong = sum(int((victim != -7.0).sum()) for victim in victims)
    del victims
    if library is safecomm:
        safecomm.drain(wait=True)
        require(safecomm.pending() == [], safecomm.pending())
    return wrong


def trials(library, op, allocating, launching, waiting, count):
    wrong = 0
    for trial in range(count):
        stock.barrier()
        torch.cuda.synchronize()
        wrong += corrupted(library, op, allocating, launching, waiting, late=rank() == trial % 2) > 0
    everywhere = torch.tensor([wrong], device="cuda")
    stock.all_reduce(everywhere)
    return int(everywhere)


@case(120, ranks=2)
def s1_corruption_programs():
    """The three programs that stock corrupts, roles exchanged, and three streams: 10 trials each with a slow peer."""
    main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    programs = {
        "wait on a side stream": ("all_gather", main, main, side),
        "launch and wait on a side stream": ("all_reduce", main, side, side),
        "sync call under a side stream": ("all_reduce", main, side, None),
        "exchanged: wait on main": ("all_gather", side, side, main),
        "exchanged: launch and wait on main": ("all_reduce", side, main, main),
        "exchanged: sync call on main": ("all_reduce", side, main, None),
        "three streams: one each": ("all_gather", side, third, main),
        "three streams: launch and wait on the third": ("all_reduce", side, third, third),
        "three streams: sync, allocated on the third": ("reduce_scatter", third, side, None),
    }
    result = {}
    for name, (op, allocating, launching, waiting) in programs.items():
        result[name] = {
            "stock": trials(stock, op, allocating, launching, waiting, 3),
            "safecomm": trials(safecomm, op, allocating, launching, waiting, 10),
        }
    require(all(row["safecomm"] == 0 for row in result.values()), result)
    require(
        sum(row["stock"] for row in result.values()) > 0, "stock corrupts nothing: the programs do not bite", result
    )
    return result


@case(180)
def s1_every_combination_of_streams():
    """Each of three streams allocating, launching and waiting, four collectives, sync and async: no corruption."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    count = bad = stock_bad = 0
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_gather_list"):
        for allocating in streams:
            for launching in streams:
                for waiting in (*streams, None):
                    bad += trials(safecomm, op, allocating, launching, waiting, 2)
                    stock_bad += trials(stock, op, allocating, launching, waiting, 2)
                    count += 1
    require(bad == 0, bad, "of", count)
    return {"programs": count, "trials each": 2, "safecomm corrupted": bad, "stock corrupted": stock_bad}


@case(60)
def s1_address_reused_by_another_stream():
    """A segment that was unmapped and whose address came back on another stream is not taken for the old one."""
    side = torch.cuda.Stream()
    same = bad = 0
    for trial in range(10):
        memory = torch.full((16 << 20,), 1.0, device="cuda")
        safecomm.all_reduce(memory)  # the ledger has now met this segment
        address = memory.data_ptr()
        del memory
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(side):
            probe = torch.empty(16 << 20, device="cuda")
        same += probe.data_ptr() == address
        del probe
        torch.cuda.synchronize()
        bad += corrupted(safecomm, "all_reduce", side, torch.cuda.current_stream(), None, late=rank() == trial % 2) > 0
        torch.cuda.empty_cache()
    require(bad == 0, bad)
    return {"address came back": same, "corrupted": bad}


@case(60)
def s1_a_wait_that_only_blocks_the_stream_blocks_it():
    """A late peer, and a copy right after the wait, on a stream that nothing else has ordered after the collective."""
    kind = ROUTES.of(stock.group.WORLD, torch.cuda.current_device()).kind
    side, wrong, brief = (
        torch.cuda.Stream(),
        0,
        kind.wait_is_stream_order and hasattr(stock.Work, "block_current_stream"),
    )
    for trial in range(20):
        memory = torch.full((4 * MIB,), float(rank() + 1), device="cuda")
        torch.cuda.synchronize()
        if rank() == trial % 2:
            slow()
        work = safecomm.all_reduce(memory, async_op=True)
        require(
            type(work.inner) is stock.Work and work.queue.wait_is_stream_order == brief,
            type(work.inner),
            work.queue.wait_is_stream_order,
        )
        with torch.cuda.stream(side):
            require(work.wait() is True)
            seen = memory.clone()
        torch.cuda.synchronize()
        wrong += int((seen != sum(range(1, stock.get_world_size() + 1))).any())
    require(wrong == 0, wrong)
    return {"brief": brief, "wrong": wrong}


def counting(asked):
    """Return what makes tables that ask the driver as this process does, by way of a function that counts."""
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    ask = segment_table.pointer_attribute

    @kind
    def counts(answer, attribute, pointer):
        asked.append(pointer)
        return ask(ctypes.c_void_p(answer), attribute, ctypes.c_uint64(pointer))

    asking.append(counts)
    if native.WHY_CTYPES:
        segment_table.pointer_attribute = counts
        return segment_table.SegmentTable
    return functools.partial(native._native.Table, native.address_of(counts))


asking = []  # what the tables have the addresses of


@case(60)
def s1_small_segments_that_were_met_stay_mapped():
    """Where small tensors were allocated is known without the driver, because their segment can't go."""
    streams, asked = LEDGER.streams, []
    side = torch.cuda.Stream()
    make, table_of_process = counting(asked), segment_table.pointer_attribute
    try:
        found = Allocations(make)  # as if this were the first that it meets
        small = [torch.ones(256, device="cuda") for _ in range(4)]
        address = small[0].data_ptr()
        for tensor in small:
            safecomm.all_reduce(tensor)
            require(found.alloc_stream(tensor.data_ptr()) == streams.alloc_stream(tensor.data_ptr()))
        first = len(asked)
        for tensor in small:
            found.alloc_stream(tensor.data_ptr(), tensor.data_ptr() + 512)
            require(found.all_allocated_on(streams.alloc_stream(tensor.data_ptr()), [tensor.data_ptr()]))
        unasked = len(asked) == first
        del small, tensor
        settle()
        with torch.cuda.stream(side):
            others = [torch.ones(256, device="cuda") for _ in range(10_000)]
            torch.cuda.synchronize()
            stray = sum(one.data_ptr() >> GRANULE == address >> GRANULE for one in others)
            wrong = sum(streams.alloc_stream(one.data_ptr()) != side.cuda_stream for one in others[::100])
            wrong += sum(found.alloc_stream(one.data_ptr()) != side.cuda_stream for one in others[::100])
    finally:
        segment_table.pointer_attribute = table_of_process
    segments = [(s["address"], s["address"] + s["total_size"], s["stream"]) for s in torch.cuda.memory_snapshot()]
    pins = [pin.data_ptr() for pin in (*streams._anchors.values(), *found._anchors.values())]
    kept = [any(a <= pin < b and streams.alloc_stream(pin) == stream for a, b, stream in segments) for pin in pins]
    pinned = address >> GRANULE in found._anchors  # not where the allocator had room for it elsewhere
    require((unasked or not pinned) and stray * pinned == 0 and wrong == 0, pinned, unasked, stray, wrong)
    require(first > 0 and pins and all(kept), first, kept)
    return {"pinned": pinned, "pins": len(pins), "asked by": "ctypes" if native.WHY_CTYPES else "C"}


def ways_to_ask():
    """Return allocations by the name of who asks the driver: ctypes, and C where this process has it."""
    ways = {"ctypes": Allocations(segment_table.SegmentTable)}
    if not native.WHY_CTYPES:
        ways["C"] = Allocations(native.new_segment_table)
    return ways


@case(90)
def s1_streams_are_told_while_segments_come_and_go():
    """Whatever was unmapped and mapped again meanwhile, an address is of the stream that it was allocated on now."""
    chance, ways = random.Random(7 + rank()), ways_to_ask()
    on = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    met, live, wrong, came_back, asked = {}, [], [], 0, 0
    for expandable in (False, True, False):
        settings(f"expandable_segments:{expandable}")
        for step in range(400):
            if len(live) > 24 or (live and chance.random() < 0.45):
                live.pop(chance.randrange(len(live)))
            else:
                stream = chance.choice(on)
                with torch.cuda.stream(stream):
                    numel = chance.choice((1 << 10, 1 << 18, 3 << 20, 20 << 20, 48 << 20))
                    live.append((torch.empty(numel, dtype=torch.uint8, device="cuda"), stream.cuda_stream))
                address = live[-1][0].data_ptr()
                came_back += met.get(address, stream.cuda_stream) != stream.cuda_stream
                met[address] = stream.cuda_stream
            if step % 5 == 0:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            for tensor, stream in live:
                first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
                other, of_other = chance.choice(live)
                for name, found in ways.items():
                    told = found.alloc_stream(first), found.alloc_stream(first, last)
                    told += (found.alloc_stream(last, other.data_ptr()), found.all_allocated_on(stream, [first, last]))
                    if told != (stream, stream, stream if of_other == stream else None, True):
                        wrong.append((name, expandable, step, told, stream, of_other))
                    asked += 4
        live.clear()
    require(not wrong, len(wrong), wrong[:3])
    require(came_back > 0, "no address came back on another stream")
    return {"asked by": sorted(ways), "questions": asked, "addresses that came back on another stream": came_back}


@case(60)
def s1_s5_a_thread_that_has_not_called_cuda_is_told_the_same():
    """A thread without a context of CUDA's asks about memory and captures of others."""
    side, told = torch.cuda.Stream(), {}
    with torch.cuda.stream(side):
        tensor = torch.empty(8 << 20, device="cuda")

    def ask(name):
        captured = [LEDGER.streams.capture(side.cuda_stream) != 0, driver.capture_id(side.cuda_stream) != 0]
        told[name] = {by: found.alloc_stream(tensor.data_ptr()) for by, found in ways_to_ask().items()}, captured

    def in_a_thread(name):
        thread = threading.Thread(target=ask, args=(name,))
        thread.start()
        thread.join()

    in_a_thread("eager")
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph, stream=side, capture_error_mode="thread_local"):
        torch.ones(1, device="cuda")
        here = [LEDGER.streams.capture(side.cuda_stream) != 0, driver.capture_id(side.cuda_stream) != 0]
        here.append(LEDGER.streams.is_capturing(torch.cuda.current_device(), side.cuda_stream))
        in_a_thread("in a capture")
    require(here == [True] * 3, here)
    require(all({*streams.values()} == {side.cuda_stream} for streams, _ in told.values()), told)
    require(told["eager"][1] == [False, False] and told["in a capture"][1] == [True, True], told)
    return {"asked by": sorted(told["eager"][0])}


@case(60)
def s1_data_swapped_and_resized_views():
    """``t.data = ...`` while a collective runs frees nothing under it."""
    side = torch.cuda.Stream()
    bad = 0
    for trial in range(10):
        stock.barrier()
        torch.cuda.synchronize()
        tensor = torch.full((16 << 20,), 1.0, device="cuda")
        if rank() == trial % 2:
            slow()
        work = safecomm.all_reduce(tensor, async_op=True)
        tensor.data = torch.empty(1, device="cuda")
        with torch.cuda.stream(side):
            work.wait()
        victim = torch.full((16 << 20,), -7.0, device="cuda")
        torch.cuda.synchronize()
        bad += bool((victim != -7.0).any())
        del victim, tensor, work
    require(bad == 0, bad)
    return {"corrupted": bad}


@case(60)
def s1_wait_in_another_thread():
    """Waiting in a thread with its own current stream."""
    side = torch.cuda.Stream()
    device = torch.cuda.current_device()
    bad = 0
    for trial in range(10):
        stock.barrier()
        torch.cuda.synchronize()
        tensor = torch.full((16 << 20,), 1.0, device="cuda")
        if rank() == trial % 2:
            slow()
        work = safecomm.all_reduce(tensor, async_op=True)
        del tensor

        def wait(work=work):
            torch.cuda.set_device(device)
            with torch.cuda.stream(side):
                work.wait()

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        del work, wait, thread
        victim = torch.full((16 << 20,), -7.0, device="cuda")
        torch.cuda.synchronize()
        bad += bool((victim != -7.0).any())
        del victim
    require(bad == 0, bad)
    return {"corrupted": bad}


# --- S2, S3: given back ----------------------------------------------------------------------------------------------


def until_given_back(base):
    """Wait until c10d's watchdog has seen the end of what torch's calls used: the next call of the group lets it go."""
    for _ in range(1000):
        settle()
        late = torch.tensor(held() - base >= MIB, device="cuda", dtype=torch.int32)
        stock.all_reduce(late, op=stock.ReduceOp.MAX)
        if not late.item():
            return
    require(False, "still held")


@case(60)
def s3_dropped_handles():
    """16 handles of 32 MiB dropped: what is held after completion, and after drain() or a call on another group."""
    other = stock.new_group()
    stock.all_reduce(torch.ones(1, device="cuda"), group=other)
    result = {}
    settle()
    base = held()
    for name, library in LIBRARIES.items():
        for how in ("drain", "another group"):
            until_given_back(base)
            for _ in range(16):
                library.all_reduce(torch.ones(32 * MIB // 4, device="cuda"), async_op=True)
            torch.cuda.synchronize()
            if library is safecomm and how == "drain":
                safecomm.drain()
            elif how == "another group":
                library.barrier(group=other)
                torch.cuda.synchronize()
            result[f"{name}, {how}: MiB held"] = (held() - base) // MIB
    settle()
    stock.destroy_process_group(other)
    require(all(v == 0 for k, v in result.items() if k.startswith("safecomm")), result)
    return result


@case(60)
def s3_kept_handles():
    """Handles kept in a list and not waited for in time: c10d's handle keeps the output, the ledger nothing."""
    settle()
    works = [safecomm.all_reduce(torch.ones(MIB, device="cuda"), async_op=True) for _ in range(8)]
    torch.cuda.synchronize()
    while time.perf_counter() - works[-1].since < PATIENCE:
        pass
    safecomm.barrier()
    entries = safecomm.pending()
    require(entries == [], entries)
    base = held()
    works.clear()
    return {"entries": 0, "MiB freed with the handles": (base - held()) // MIB}


@case(120)
def s3_dropped_in_a_loop():
    """40 x (matmul, async all_reduce, handle dropped), 64 MiB each: the peak above the base, in buffers.

    Not counted: the workspace of a matmul, which torch 2.15 allocates at each call.
    """
    a = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.matmul(a, b)
    settle()
    base = held()
    torch.cuda.reset_peak_memory_stats()
    torch.matmul(a, b)
    torch.cuda.synchronize()
    workspace = torch.cuda.max_memory_allocated() - base - 64 * MIB
    result = {"workspace of a matmul: MiB": workspace // MIB}
    for name, library in LIBRARIES.items():
        for _ in range(2):  # the first warms cuBLAS and the allocator
            settle()
            base = held()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(40):
                library.all_reduce(torch.matmul(a, b), async_op=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated() - base - workspace
        result[f"{name}: buffers above base"] = round(peak / (64 * MIB), 2)
        result[f"{name}: ms"] = round(seconds * 1e3, 2)
    settle()
    require(result["safecomm: buffers above base"] <= 6, result)
    return result


@case(60)
def s3_coalesced():
    """A coalescing region with async_ops=True, waited for and deleted: what is still held."""
    result = {}
    for name, library in LIBRARIES.items():
        for device in (None, torch.device("cuda", torch.cuda.current_device())):
            settle()
            base = held()
            tensors = [torch.ones(16 * MIB // 4, device="cuda") for _ in range(4)]
            with library._coalescing_manager(device=device, async_ops=True) as manager:
                for tensor in tensors:
                    library.all_reduce(tensor)
            manager.wait()
            del manager, tensor
            require(float(tensors[0][0]) == stock.get_world_size(), "wrong sum")
            tensors.clear()
            result[f"{name}, device={device is not None}: MiB held"] = (held() - base) // MIB
    settle()
    require(all(v == 0 for k, v in result.items() if k.startswith("safecomm")), result)
    return result


@case(60)
def s1_coalesced_on_side_streams():
    """A coalescing region waited for on another stream; and only the last of its calls waited for (DeepSpeed)."""
    side = torch.cuda.Stream()
    device = torch.device("cuda", torch.cuda.current_device())
    bad = 0
    for trial in range(10):
        stock.barrier()
        torch.cuda.synchronize()
        tensors = [torch.full((8 << 20,), 1.0, device="cuda") for _ in range(2)]
        if rank() == trial % 2:
            slow()
        with safecomm._coalescing_manager(device=device, async_ops=True) as manager:
            works = [safecomm.broadcast(tensor, 0, async_op=True) for tensor in tensors]
        if trial % 4 < 2:
            with torch.cuda.stream(side):
                manager.wait()
        else:
            works[-1].wait()
            copies = [tensor.clone() for tensor in tensors]  # on main, which the wait has to have ordered
            del copies
        del works, manager
        tensors.clear()
        victims = [torch.full((8 << 20,), -7.0, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        bad += any(bool((victim != -7.0).any()) for victim in victims)
        victims.clear()
        safecomm.drain(wait=True)
    require(bad == 0, bad)
    return {"corrupted": bad}


@case(60)
def s1_regions_of_one_call():
    """A region of one call: launched, allocated and waited for on main and side streams; ranks that go c10d's way."""
    world = stock.get_world_size()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    bad = wrong = 0
    places = list(itertools.product((main, side), repeat=3))
    for trial, (allocating, launching, waiting) in enumerate(places * 3):
        name = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")[trial % 3]
        stock.barrier()
        torch.cuda.synchronize()
        with torch.cuda.stream(allocating):
            part = torch.full((4 << 20,), float(rank()), device="cuda")
            whole = torch.full((world * (4 << 20),), float(rank()), device="cuda")
        launching.wait_stream(allocating)
        if rank() == trial % world:
            slow()
        aside = ROUTES.off() if trial % 4 == 3 and rank() == 0 else contextlib.nullcontext()
        with torch.cuda.stream(launching), aside, safecomm._coalescing_manager(async_ops=trial % 5 != 0) as manager:
            if name == "all_reduce":
                safecomm.all_reduce(whole)
            elif name == "all_gather_into_tensor":
                safecomm.all_gather_into_tensor(whole, part)
            else:
                safecomm.reduce_scatter_tensor(part, whole)
        with torch.cuda.stream(waiting):
            manager.wait()
            waiting.wait_stream(launching)
            read = (part if name == "reduce_scatter_tensor" else whole).clone()
        del manager, part, whole
        with torch.cuda.stream(allocating):
            victims = [torch.full((n << 22,), -7.0, device="cuda") for n in (1, world)]
        torch.cuda.synchronize()
        bad += any(bool((victim != -7.0).any()) for victim in victims)
        expected = torch.arange(world, device="cuda").float().repeat_interleave(4 << 20)
        if name != "all_gather_into_tensor":
            expected = torch.full_like(read, float(sum(range(world))))
        wrong += not torch.equal(read, expected)
        del victims, read, expected
        safecomm.drain(wait=True)
    require(bad == 0, bad)
    require(wrong == 0, wrong)
    return {"corrupted": bad, "wrong": wrong, "programs": len(places) * 3}


@case(60)
def s2_a_region_keeps_nothing():
    """Regions of four calls, sync and async + wait: bytes that are left when the program has dropped its tensors."""
    world = stock.get_world_size()
    result = {}
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        for async_ops in (False, True):
            settle()
            base = held()
            parts = [torch.full((1 << 20,), float(rank()), device="cuda") for _ in range(4)]
            wholes = [torch.full((world << 20,), float(rank()), device="cuda") for _ in range(4)]
            with safecomm._coalescing_manager(async_ops=async_ops) as manager:
                for part, whole in zip(parts, wholes, strict=True):
                    if name == "all_reduce":
                        safecomm.all_reduce(whole)
                    elif name == "all_gather_into_tensor":
                        safecomm.all_gather_into_tensor(whole, part)
                    else:
                        safecomm.reduce_scatter_tensor(part, whole)
            if async_ops:
                manager.wait()
            del manager, part, whole
            checked = parts[3] if name == "reduce_scatter_tensor" else wholes[3]
            expected = float(rank()) if name == "all_gather_into_tensor" else float(sum(range(world)))
            position = rank() << 20 if name == "all_gather_into_tensor" else 0
            require(float(checked[position]) == expected, name, float(checked[position]), expected)
            parts.clear(), wholes.clear()
            del checked
            left = held() - base
            result[f"{name}, {'async' if async_ops else 'sync'}: bytes left"] = left
            require(left == 0, result)
            require(safecomm.pending() == [], safecomm.pending())
    return result


def forum(library, how, layers=8, iterations=5):
    """The forum's program on the current stream: layers of matmul, each followed by an all_reduce. Peak in bytes."""
    x = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
    y = x
    torch.matmul(x, w)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_stats()["active_bytes.all.current"]
    for _ in range(iterations):
        y = x
        for _ in range(layers):
            y = torch.matmul(y, w)
            if how == "sync":
                library.all_reduce(y)
            elif how == "async":
                work = library.all_reduce(y, async_op=True)
                work.wait()
                del work
            elif how == "async, handle kept":
                work = library.all_reduce(y, async_op=True)
                work.wait()
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - base
    torch.cuda.synchronize()
    return peak


@case(120)
def s2_forum_program():
    """One stream, the default one or not, sync and async + wait: the peak is that without communication; 5 runs."""
    buffer = 4096 * 8192 * 2
    result = {}
    for where in ("default stream", "side stream"):
        stream = torch.cuda.current_stream() if where == "default stream" else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            settle()
            without = forum(safecomm, "none")
            for how in ("sync", "async", "async, handle kept"):
                peaks = []
                for _ in range(5):
                    settle()
                    peaks.append(forum(safecomm, how))
                everyone = [None] * stock.get_world_size()
                stock.all_gather_object(everyone, peaks)
                distinct = {peak for ranks in everyone for peak in ranks}
                result[f"{where}, {how}: buffers above no communication"] = (max(distinct) - without) / buffer
                require(len(distinct) == 1, where, how, "differs between runs or ranks", everyone)
                require(max(distinct) - without <= buffer, where, how, max(distinct), without)
                require(safecomm.pending() == [], safecomm.pending())
    return result


@case(60)
def s2_no_events_in_the_ordinary_program():
    """Allocated, launched and waited for on one stream: no event is recorded or queried, nothing is left."""
    counts = {"record_event": 0, "query_event": 0, "wait_event": 0}
    streams = LEDGER.streams
    originals = {name: getattr(streams, name) for name in counts}

    def counting(name):
        def counted(*args):
            counts[name] += 1
            return originals[name](*args)

        return counted

    for name in counts:
        setattr(streams, name, counting(name))
    try:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for _ in range(20):
                    safecomm.all_reduce(torch.ones(1024, device="cuda"))
                    safecomm.all_reduce(torch.ones(1024, device="cuda"), async_op=True).wait()
                    require(not LEDGER.nonempty, safecomm.pending())
    finally:
        for name in counts:
            delattr(streams, name)
    require(not any(counts.values()), counts)
    return counts


# --- overlap ----------------------------------------------------------------------------------------------------------


def overlapped(library, steps, size, products, a, b):
    """Compute on main while collectives on main's tensors run on a side stream; returns milliseconds on the device."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    stock.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        gradient = torch.ones(size, device="cuda", dtype=torch.bfloat16)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            library.all_reduce(gradient)
        if library is stock:
            gradient.record_stream(side)
        del gradient
        for _ in range(products):
            torch.matmul(a, b)
    main.wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@case(120, ranks=2)
def overlap_is_kept():
    """Side-stream collectives under compute on main, against stock with record_stream: time ratio, interleaved."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    result = {}
    for name, (size, products) in {
        "64 MiB, compute bound": (32 * MIB, 8),
        "256 MiB, balanced": (128 * MIB, 6),
        "256 MiB, communication bound": (128 * MIB, 2),
    }.items():
        times = {library: [] for library in LIBRARIES}
        for turn in range(12):
            for library, module in sorted(LIBRARIES.items(), reverse=turn % 2):
                times[library].append(overlapped(module, 48, size, products, a, b))
        times = {library: values[2:] for library, values in times.items()}
        median = {library: sorted(values)[len(values) // 2] for library, values in times.items()}
        result[name] = {"ratio": round(median["safecomm"] / median["stock"], 4), "stock ms": round(median["stock"], 3)}
    settle()
    require(all(row["ratio"] <= 1.02 for row in result.values()), result)
    return result


# --- S5: capture -----------------------------------------------------------------------------------------------------


@case(90)
def s5_capture_is_flat():
    """async + wait, sync, and sync on a side stream inside a capture: bytes of the graph at 4, 16 and 64 layers."""
    result = {}
    for how in ("async", "sync", "sync on a side stream", "async waited on a side stream"):
        sizes = []
        for layers in (4, 16, 64):
            settle()
            x = torch.ones(16 * MIB, device="cuda")
            side = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            before = torch.cuda.memory_reserved()
            with torch.cuda.graph(graph):
                main = torch.cuda.current_stream()
                y = x
                for _ in range(layers):
                    y = y * 0.5
                    if how == "async":
                        safecomm.all_reduce(y, async_op=True).wait()
                    elif how == "sync":
                        safecomm.all_reduce(y)
                    else:
                        side.wait_stream(main)
                        with torch.cuda.stream(side):
                            if how == "sync on a side stream":
                                safecomm.all_reduce(y)
                            else:
                                safecomm.all_reduce(y, async_op=True).wait()
                        main.wait_stream(side)
            sizes.append((torch.cuda.memory_reserved() - before) // MIB)
            graph.replay()
            torch.cuda.synchronize()
            scale = (0.5 * stock.get_world_size()) ** layers
            require(bool((y == scale).all()), how, layers, float(y[0]), scale)
            safecomm.drain()
            require(safecomm.pending() == [], how, safecomm.pending())
            graph.reset()
            del graph, y, x
        result[how] = sizes
        require(sizes[2] <= sizes[0] + 64, how, sizes)
    return result


@case(60)
def s5_first_work_dropped_in_capture():
    """The first work dropped, a second one waited for, a tensor allocated in between: it must not alias the first."""
    result = {}
    for name, library in LIBRARIES.items():
        settle()
        source = torch.ones(16 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = source * 1
            library.all_reduce(first, async_op=True)
            del first
            between = torch.full((16 << 20,), -7.0, device="cuda")
            second = torch.ones(1024, device="cuda")
            library.all_reduce(second, async_op=True).wait()
        wrong = 0
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            wrong += bool((between != -7.0).any())
        result[f"{name}: wrong replays of 20"] = wrong
        graph.reset()
        del graph, between, second
    settle()
    require(result["safecomm: wrong replays of 20"] == 0, result)
    require(safecomm.pending() == [], safecomm.pending())
    return result


@case(60)
def s5_waits_across_a_capture():
    """An eager work waited for inside a capture, and a captured one outside: an error, and the process goes on."""
    settle()
    x = torch.ones(1 << 20, device="cuda")
    eager = safecomm.all_reduce(x.clone(), async_op=True)
    graph = torch.cuda.CUDAGraph()
    refused = 0
    with torch.cuda.graph(graph):
        try:
            eager.wait()
        except safecomm.CaptureBoundaryError as error:
            refused += "before the CUDA graph capture" in str(error) and "collectives.py" in str(error)
        y = x * 2
        captured = safecomm.all_reduce(y, async_op=True)
        captured.wait()
    try:
        captured.wait()
    except safecomm.CaptureBoundaryError as error:
        refused += "was captured" in str(error)
    eager.wait()
    graph.replay()
    torch.cuda.synchronize()
    require(refused == 2, refused)
    require(bool((y == 2 * stock.get_world_size()).all()), float(y[0]))
    del captured
    graph.reset()
    del graph
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        z = x * 3
        safecomm.all_reduce(z)
    again.replay()
    torch.cuda.synchronize()
    require(bool((z == 3 * stock.get_world_size()).all()), float(z[0]))
    again.reset()
    return {"refused": refused, "captures afterwards": 1}


@case(60)
def s5_a_sweep_while_another_thread_captures():
    """Works end and are swept in one thread while another captures in the global mode: the capture survives."""
    settle()
    device = torch.cuda.current_device()
    group = stock.new_group()
    stock.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    capturing, swept = threading.Event(), threading.Event()
    outcome = []

    def capture():
        torch.cuda.set_device(device)
        x = torch.ones(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = x * 2
            capturing.set()
            require(swept.wait(30))
            y = y * 2
        graph.replay()
        torch.cuda.synchronize()
        outcome.append(bool((y == 4).all()))
        graph.reset()

    work = safecomm.all_reduce(torch.ones(1 << 20, device="cuda"), group=group, async_op=True)
    del work
    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    require(capturing.wait(30))
    safecomm.drain()
    left = safecomm.pending()
    swept.set()
    thread.join()
    stock.destroy_process_group(group)
    require(outcome == [True], outcome)
    require(left == [], left)
    return {"capture survived": True}


# --- S8: the same bits -----------------------------------------------------------------------------------------------


def collectives(library, make, world):
    """Yield (name, function of async_op that returns (work, outputs)) for every collective, on fresh tensors."""
    me = rank()

    def all_reduce(asynchronous):
        t = make(17, 3)
        return library.all_reduce(t, async_op=asynchronous), [t]

    def reduce(asynchronous):
        t = make(17, 3)
        work = library.reduce(t, 0, async_op=asynchronous)
        return work, [t] if me == 0 else []

    def broadcast(asynchronous):
        t = make(33)
        return library.broadcast(t, 1, async_op=asynchronous), [t]

    def all_gather(asynchronous):
        outs = [make(5, 3) for _ in range(world)]
        return library.all_gather(outs, make(5, 3), async_op=asynchronous), outs

    def all_gather_into_tensor(asynchronous):
        out = make(world * 7, 3)
        return library.all_gather_into_tensor(out, make(7, 3), async_op=asynchronous), [out]

    def reduce_scatter(asynchronous):
        out = make(5, 3)
        return library.reduce_scatter(out, [make(5, 3) for _ in range(world)], async_op=asynchronous), [out]

    def reduce_scatter_tensor(asynchronous):
        out = make(7, 3)
        return library.reduce_scatter_tensor(out, make(world * 7, 3), async_op=asynchronous), [out]

    def all_to_all(asynchronous):
        outs = [make(3) for _ in range(world)]
        return library.all_to_all(outs, [make(3) for _ in range(world)], async_op=asynchronous), outs

    def all_to_all_single(asynchronous):
        out = make(world * 3)
        return library.all_to_all_single(out, make(world * 3), async_op=asynchronous), [out]

    def gather(asynchronous):
        outs = [make(5) for _ in range(world)] if me == 0 else None
        return library.gather(make(5), outs, 0, async_op=asynchronous), outs or []

    def scatter(asynchronous):
        out = make(5)
        parts = [make(5) for _ in range(world)] if me == 0 else None
        return library.scatter(out, parts, 0, async_op=asynchronous), [out]

    def empty(asynchronous):
        t = make(0)
        return library.all_reduce(t, async_op=asynchronous), [t]

    def coalesced(asynchronous):
        ts = [make(9), make(4, 4)]
        with library._coalescing_manager(async_ops=asynchronous) as manager:
            for t in ts:
                library.all_reduce(t)
        return (manager if asynchronous else None), ts

    def batch(asynchronous):
        out = make(11)
        peer = (me + 1) % world, (me - 1) % world
        ops = [library.P2POp(library.isend, make(11), peer[0]), library.P2POp(library.irecv, out, peer[1])]
        works = library.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        return None, [out]

    def send_recv(asynchronous):
        t = make(11)
        if me == 0:
            library.send(t, 1)
        elif me == 1:
            library.recv(t, 0)
        return None, [t]

    def isend_irecv(asynchronous):
        t = make(11)
        if me == 0:
            return library.isend(t, 1), [t]
        if me == 1:
            return library.irecv(t, 0), [t]
        return None, []

    def non_contiguous(asynchronous):
        t = make(6, 4).t()
        return library.broadcast(t, 0, async_op=asynchronous), [t]

    return [
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor,
        all_to_all, all_to_all_single, gather, scatter, empty, coalesced, batch, send_recv, isend_irecv, non_contiguous,
    ]  # fmt: skip


@case(120)
def s8_same_bits():
    """Every collective against torch.distributed: results or exceptions, sync and async, over dtypes."""
    world = stock.get_world_size()
    compared = refused = 0
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8]
    for dtype in [*dtypes, torch.complex64]:
        for index in range(17):
            for asynchronous in (False, True):
                outcomes = []
                for library in (stock, safecomm):
                    generator = torch.Generator("cuda").manual_seed(rank() + 1)

                    def make(*shape, generator=generator, dtype=dtype):
                        if dtype.is_floating_point or dtype.is_complex:
                            return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(
                                dtype
                            )
                        return torch.randint(0, 50, shape, device="cuda", generator=generator).to(dtype)

                    function = collectives(library, make, world)[index]
                    try:
                        work, outputs = function(asynchronous)
                        if work is not None:
                            work.wait()
                        outcomes.append([output.clone() for output in outputs])
                    except Exception as error:
                        outcomes.append((type(error), str(error).split("\n")[0]))
                torch.cuda.synchronize()
                theirs, ours = outcomes
                if isinstance(theirs, tuple):
                    refused += 1
                    require(theirs == ours, function.__name__, dtype, asynchronous, theirs, ours)
                else:
                    compared += 1
                    require(not isinstance(ours, tuple), function.__name__, dtype, ours)
                    same = all(
                        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
                        for x, y in zip(theirs, ours, strict=True)
                        if x.numel()
                    )
                    require(same, function.__name__, dtype, asynchronous, "differ")
    safecomm.drain(wait=True)
    require(safecomm.pending() == [], safecomm.pending())
    return {"compared": compared, "refused alike": refused}


# --- bucketed() -------------------------------------------------------------------------------------------------------


def put_off_and_dropped(allocating, calling, ending, numel):
    """Return how many elements of later tensors the buckets wrote: allocated, called and ended on three streams."""
    with torch.cuda.stream(allocating):
        tensors = [torch.full((numel,), 1.0, device="cuda") for _ in range(12)]
    calling.wait_stream(allocating)
    block = safecomm.bucketed(4)
    with torch.cuda.stream(calling):
        slow()
        block.__enter__()
        for tensor in tensors:
            safecomm.all_reduce(tensor)
    with torch.cuda.stream(ending):
        block.__exit__(None, None, None)
    with torch.cuda.stream(calling):
        right = sum((tensor == stock.get_world_size()).all().int() for tensor in tensors)
        right.record_stream(allocating)
    del tensor
    tensors.clear()
    with torch.cuda.stream(allocating):
        victims = [torch.full((numel,), -7.0, device="cuda") for _ in range(14)]
    torch.cuda.synchronize()
    require(int(right) == 12, int(right))
    return sum(int((victim != -7.0).sum()) for victim in victims)


@case(120)
def bucketed_on_every_combination_of_streams():
    """S1: elements of later tensors that buckets wrote; results on the stream of the calls."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    corrupted = programs = 0
    with safecomm.use_arena(256 * MIB):
        for allocating in streams:
            for calling in streams:
                for ending in streams:
                    for numel in (1000, MIB // 8):
                        corrupted += put_off_and_dropped(allocating, calling, ending, numel) > 0
                        programs += 1
        safecomm.drain(wait=True)
    require(corrupted == 0, corrupted, "of", programs)
    require(safecomm.pending() == [], safecomm.pending())
    return {"programs": programs, "corrupted": corrupted}


@case(60)
def bucketed_in_a_capture():
    """Replays of a graph with buckets against one by one: wrong ones."""
    tensors = [torch.ones(1000 + 10 * n, device="cuda") for n in range(30)]
    whole, part = torch.zeros(2000 * stock.get_world_size(), device="cuda"), torch.ones(2000, device="cuda")

    def step():
        with safecomm.bucketed():
            for tensor in tensors:
                safecomm.all_reduce(tensor, op=stock.ReduceOp.AVG)
            for start in range(0, 2000, 500):
                world = stock.get_world_size()
                safecomm.all_gather_into_tensor(whole[start * world : (start + 500) * world], part[start : start + 500])

    step()
    graph = torch.cuda.CUDAGraph()
    with safecomm.graph(graph):
        step()
    wrong = 0
    for turn in range(50):
        for tensor in tensors:
            tensor.fill_(float(turn + rank()))
        part.fill_(float(turn))
        graph.replay()
        mean = turn + (stock.get_world_size() - 1) / 2
        right = all(bool((tensor == mean).all()) for tensor in tensors) and bool((whole == turn).all())
        wrong += not right
    graph.reset()
    require(wrong == 0, wrong)
    return {"replays": 50, "wrong": wrong}
