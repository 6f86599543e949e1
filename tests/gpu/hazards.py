"""Which hazards of docs/hazards.md happen on NCCL with two ranks, with torch alone, by import, and under patch():

    torchrun --nproc-per-node 2 tests/gpu/hazards.py --library stock --backend nccl --out FILE.json

``--library`` is stock, safecomm or patched, ``--backend`` nccl or nccl4py. Each hazard says whether it happened. They
run in processes of their own: those that may end the process or hang by themselves, all others in one. A process that
dies or hangs loses the hazard that did it; another one goes on with the next. What calls record_stream is run inside of
``avoid_record_streams()`` where that is safecomm's to do. What a backend does not have is "not in this backend".
"""

import argparse
import concurrent.futures
import contextlib
import faulthandler
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading

import torch
import torch.distributed as stock
from paths import without_directories
from python_backend import MIB, captured, dropped, lists_on_another_stream, register, until_nothing_is_watched

HAZARDS = {}
LIBRARY = "stock"
LIMIT = 30
"""Seconds that a hazard may take."""
NUMEL = 16 << 20
TRIALS = 5


def hazard(alone=False):
    """Register a hazard: a function of the library that returns whether it happened, and figures."""

    def register_it(function):
        HAZARDS[function.__name__] = (function, alone)
        return function

    return register_it


# --- what the hazards share ------------------------------------------------------------------------------------------


def slow():
    torch.cuda._sleep(40_000_000)


def ones(numel=NUMEL, value=1.0):
    return torch.full((numel,), value, device="cuda")


def held():
    return torch.cuda.memory_allocated()


def avoided(dist):
    """The context that keeps record_stream away, where there is one."""
    return contextlib.nullcontext() if LIBRARY == "stock" else sys.modules["safecomm"].avoid_record_streams()


def capture(dist, graph):
    return dist.graph(graph) if LIBRARY == "safecomm" else torch.cuda.graph(graph)


def gather(dist, *arguments, **options):
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(*arguments, **options)


def scatter(dist, *arguments, **options):
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(*arguments, **options)


def settle():
    """Leave nothing that the next hazard could count; on both ranks, so that they begin it together."""
    gc.collect()
    if LIBRARY != "stock":
        sys.modules["safecomm"].drain(wait=True)
    for _ in range(100):
        stock.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def corrupted(program):
    """Run ``program(late)`` with one rank late, then write to new memory: how often something else wrote there."""
    bad = 0
    for trial in range(TRIALS):
        settle()
        program(stock.get_rank() == trial % 2)
        victims = [ones(value=-7.0), ones(NUMEL // 2, -7.0)]
        torch.cuda.synchronize()
        bad += any(bool((victim != -7.0).any()) for victim in victims)
        del victims
    return bad > 0, f"corrupted {bad} of {TRIALS}"


@functools.cache
def other_group():
    return stock.new_group()


def kept(dist, program):
    """Run ``program``, then a call on another group: MiB that are held by then, of tensors that nobody has."""
    program()  # communicators, and what they take
    for _ in range(2):
        settle()
        dist.all_reduce(torch.ones(1, device="cuda"), group=other_group())
    torch.cuda.synchronize()
    base = held()
    program()
    torch.cuda.synchronize()
    dist.all_reduce(torch.ones(1, device="cuda"), group=other_group())
    torch.cuda.synchronize()
    left = (held() - base) // MIB
    return left > 0, f"held {left} MiB"


# --- held too short --------------------------------------------------------------------------------------------------


@hazard()
def wait_on_another_stream(dist):
    """Allocated and launched on main, waited for on a side stream, dropped."""
    side = torch.cuda.Stream()

    def program(late):
        part, whole = ones(NUMEL // 2), ones()
        if late:
            slow()
        work = gather(dist, whole, part, async_op=True)
        with torch.cuda.stream(side):
            work.wait()

    return corrupted(program)


def on_a_side_stream(dist, async_op):
    side = torch.cuda.Stream()

    def program(late):
        tensor = ones()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if late:
                slow()
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()

    return corrupted(program)


@hazard()
def launched_and_waited_for_on_a_side_stream(dist):
    """torch's issue 188655."""
    return on_a_side_stream(dist, True)


@hazard()
def synchronous_on_a_side_stream(dist):
    """A synchronous call under a side stream, with a tensor of main."""
    return on_a_side_stream(dist, False)


@hazard()
def read_by_a_second_group_on_a_third_stream(dist):
    """A synchronous call under a side stream; main waits for that, and not for a second group that reads on a third."""
    main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    stock.all_reduce(torch.ones(1, device="cuda"), group=other_group())  # makes the communicator
    wrong = 0
    for trial in range(TRIALS):
        settle()
        tensor = ones(NUMEL // 2)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            dist.all_reduce(tensor)
        third.wait_stream(side)
        with torch.cuda.stream(third):
            whole = torch.empty(NUMEL, device="cuda")
            if stock.get_rank() == trial % 2:
                slow()
            gather(dist, whole, tensor, group=other_group())
        main.wait_stream(side)
        del tensor
        victim = ones(NUMEL // 2, -7.0)
        torch.cuda.synchronize()
        wrong += bool((whole != 2.0).any())
        del whole, victim
    return wrong > 0, f"gathered what came later {wrong} of {TRIALS}"


def dropped_with_its_output(dist, call):
    """The handle and the output are dropped at once, and the memory is used again."""
    bad, given = 0, torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(10):
        settle()
        output = torch.empty_like(given)
        torch.cuda._sleep(2_000_000)
        work = call(dist, output, given)
        end = given.numel() // 2 if call is CALLS["reduce_scatter"] else given.numel()
        del output, work
        mine = torch.empty_like(given)
        tail = mine[end - 4096 : end]
        tail.fill_(7)
        torch.cuda.synchronize()
        bad += not bool((tail == 7).all())
        del mine, tail
    return bad > 0, f"corrupted {bad} of 10"


def exchange(dist, output, given):
    calls = [(dist.isend, given), (dist.irecv, output)]
    return [call(tensor, 1 - stock.get_rank()) for call, tensor in (calls if stock.get_rank() == 0 else calls[::-1])]


def exchange_in_a_batch(dist, output, given):
    peer = 1 - stock.get_rank()
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, given, peer), dist.P2POp(dist.irecv, output, peer)])


CALLS = {
    "all_gather": lambda dist, output, given: gather(dist, output, given[: given.numel() // 2], async_op=True),
    "reduce_scatter": lambda dist, output, given: scatter(dist, output[: given.numel() // 2], given, async_op=True),
    "all_to_all_single": lambda dist, output, given: dist.all_to_all_single(output, given, async_op=True),
    "irecv": exchange,
    "batch_isend_irecv": exchange_in_a_batch,
}
for name, call in CALLS.items():
    HAZARDS[f"dropped_with_its_output_{name}"] = (functools.partial(dropped_with_its_output, call=call), False)


@hazard()
def data_swapped_under_a_collective(dist):
    """``t.data = ...`` while it runs, as pipeline schedules do; waited for on a side stream."""
    side = torch.cuda.Stream()

    def program(late):
        tensor = ones()
        if late:
            slow()
        work = dist.all_reduce(tensor, async_op=True)
        tensor.data = torch.empty(1, device="cuda")
        with torch.cuda.stream(side):
            work.wait()

    return corrupted(program)


@hazard()
def record_stream_then_resized(dist):
    """record_stream, then ``untyped_storage().resize_(0)``, under a collective on a side stream."""
    side = torch.cuda.Stream()

    def program(late):
        tensor = ones()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if late:
                slow()
            dist.all_reduce(tensor)
        tensor.record_stream(side)
        tensor.untyped_storage().resize_(0)

    with avoided(dist):
        return corrupted(program)


@hazard()
def lists_waited_for_on_another_stream(dist):
    """The outputs of a list form on the stream that waited."""
    right = lists_on_another_stream(dist)
    return not right, "right" if right else "read too early"


def read_on_a_side_stream(dist, wait):
    wrong, side = 0, torch.cuda.Stream()
    for _ in range(TRIALS):
        settle()
        tensor = ones()
        torch.cuda.synchronize()
        slow()
        work = dist.all_reduce(tensor, async_op=True)
        wait(work, side)
        with torch.cuda.stream(side):
            seen = tensor[-1:].clone()
        torch.cuda.synchronize()
        wrong += float(seen) != 2.0
    return wrong > 0, f"read too early {wrong} of {TRIALS}"


@hazard()
def second_wait_on_another_stream(dist):
    """A work that is waited for on main, and then on the stream that reads."""

    def wait(work, side):
        work.wait()
        with torch.cuda.stream(side):
            work.wait()

    return read_on_a_side_stream(dist, wait)


@hazard()
def block_current_stream_after_get_future(dist):
    """The stream that reads is blocked after the future was asked for."""

    def wait(work, side):
        work.get_future()
        with torch.cuda.stream(side):
            work.block_current_stream()

    return read_on_a_side_stream(dist, wait)


@hazard()
def version_counters_of_lists(dist):
    """A backward that saved what all_gather has written to since must be refused."""
    outputs = [ones(1024) for _ in range(2)]
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    loss = (weight * outputs[0]).sum()
    dist.all_gather(outputs, ones(1024, 3.0))
    try:
        loss.backward()
    except RuntimeError as error:
        return False, f"refused: {str(error)[:60]}"
    return True, f"a gradient of {float(weight.grad[0])} for 1.0"


# --- held too long ---------------------------------------------------------------------------------------------------


@hazard()
def works_that_nobody_waits_for(dist):
    """16 handles of 32 MiB dropped: held after they are done, and a call on another group."""
    return kept(dist, lambda: [dist.all_reduce(ones(8 * MIB), async_op=True) for _ in range(16)].clear())


@hazard()
def get_future_waited_for(dist):
    """Waiting for the future instead of the work."""
    return kept(dist, lambda: dist.all_reduce(ones(), async_op=True).get_future().wait() and None)


@hazard()
def coalesced(dist):
    """A region with async_ops=True, waited for and deleted."""

    def program():
        tensors = [ones(4 * MIB) for _ in range(4)]
        device = torch.device("cuda", torch.cuda.current_device())
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()

    return kept(dist, program)


@hazard()
def functional_results_that_nobody_waits_for(dist):
    """20 functional all_reduces of 16 MiB, whose results are dropped."""
    import torch.distributed._functional_collectives as functional

    given = ones(4 * MIB)

    def program():
        for _ in range(20):
            functional.all_reduce(given, "sum", stock.group.WORLD)
            dist.all_reduce(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()

    return kept(dist, program)


@hazard()
def dropped_in_a_loop(dist):
    """The peak of 40 works of 64 MiB, or 96, whose handles are dropped; above six and the call's own."""
    figures = dropped(dist, (lambda: 0) if LIBRARY == "stock" else sys.modules["safecomm"].drain)
    nbytes = {"all_reduce": 64, "all_gather": 96, "send_and_receive": 64}
    crowded = any(figure["peak allocated"] > 7 * nbytes[call] for call, figure in figures.items())
    return crowded or any(figure["left"] for figure in figures.values()), figures


@hazard()
def point_to_point_leaves_memory_unusable(dist):
    """20 batches of 64 MiB each way, waited for: MiB that were freed and can't be used."""
    peak = 0
    for _ in range(20):
        output, given = torch.empty(NUMEL, device="cuda"), ones()
        for work in exchange_in_a_batch(dist, output, given):
            work.wait()
        del output, given, work
        stats = torch.cuda.memory_stats()
        peak = max(peak, stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"])
    return peak > 0, f"unusable {peak // MIB} MiB"


@hazard()
def peak_with_record_stream(dist):
    """Layers of matmul, and all_reduce on a side stream with record_stream: the peak without it, in buffers."""
    x = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def peak(record):
        settle()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_stats()["active_bytes.all.current"]
        y = x
        for _ in range(40):
            y = torch.matmul(y, w)
            if record is not None:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    dist.all_reduce(y)
                if record:
                    y.record_stream(side)
                main.wait_stream(side)
        return (torch.cuda.memory_stats()["active_bytes.all.peak"] - base) / x.nbytes

    peak(False)
    without = peak(None)
    with avoided(dist):
        buffers = max(peak(True) for _ in range(3)) - without
    return buffers > 2, f"{buffers:.2f} buffers above no communication"


# --- captures --------------------------------------------------------------------------------------------------------


@hazard()
def a_capture_grows_by_layer(dist):
    """Layers of 32 MiB with an asynchronous all_reduce each: MiB of the graph at 4, 16, 32."""
    with avoided(dist):
        sizes = [captured(dist, layers) for layers in (4, 16, 32)]
    return sizes[2] > sizes[0] + 64, sizes


@hazard()
def record_stream_in_a_capture(dist):
    """Layers of 32 MiB, each on a side stream with record_stream: MiB of the graph at 4, 16, 32."""
    sizes = []
    for layers in (4, 16, 32):
        settle()
        x, side, graph = ones(8 * MIB), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        until_nothing_is_watched()
        with avoided(dist), torch.cuda.graph(graph):
            main, y = torch.cuda.current_stream(), x
            for _ in range(layers):
                y = y * 0.5
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    dist.all_reduce(y)
                y.record_stream(side)
                main.wait_stream(side)
        sizes.append((torch.cuda.memory_reserved() - before) // MIB)
        graph.replay()
        torch.cuda.synchronize()
        right = bool((y == 1).all())
        graph.reset()
        del graph, y, x
        if not right:
            return True, "wrong"
    return sizes[2] > sizes[0] + 64, sizes


@hazard(alone=True)
def dropped_in_a_capture(dist):
    """A work is dropped in a capture, and a later one waited for: replays write to what was allocated since."""
    source, graph, wrong = ones(), torch.cuda.CUDAGraph(), 0
    with capture(dist, graph):
        first = source * 1
        dist.all_reduce(first, async_op=True)
        del first
        between = ones(value=-7.0)
        dist.all_reduce(torch.ones(1024, device="cuda"), async_op=True).wait()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        wrong += bool((between != -7.0).any())
    graph.reset()
    return wrong > 0, f"wrong replays {wrong} of 20"


@hazard(alone=True)
def freed_argument_of_a_captured_collective(dist):
    """Memory from outside of a graph is freed, given to somebody else, and the graph replayed."""
    outside, graph = ones(), torch.cuda.CUDAGraph()
    with capture(dist, graph):
        dist.all_reduce(outside)
    graph.replay()
    torch.cuda.synchronize()
    del outside
    victim = ones(value=-7.0)
    graph.replay()
    torch.cuda.synchronize()
    bad = bool((victim != -7.0).any())
    graph.reset()
    return bad, "corrupted" if bad else "ok"


def across(outcome):
    """Run ``outcome()``: an error of safecomm's before it touches CUDA is fine, if the device and the group go on."""
    main = torch.cuda.current_stream()
    try:
        right, said = outcome(), ""
    except Exception as error:
        right = type(error).__module__.startswith("safecomm")
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    torch.cuda.set_stream(main)
    y = ones(1024)
    stock.all_reduce(y)
    torch.cuda.synchronize()
    goes_on = bool((y == 2).all())
    return not (right and goes_on), said or ("right" if right else "wrong")


@hazard(alone=True)
def eager_work_waited_for_in_a_capture(dist):
    """B1, into a capture."""
    x, y, graph = ones(1024), ones(1024), torch.cuda.CUDAGraph()

    def outcome():
        work = dist.all_reduce(x, async_op=True)
        with torch.cuda.graph(graph):
            work.wait()
            z = x + y
        graph.replay()
        torch.cuda.synchronize()
        return bool((z == 3).all())

    return across(outcome)


@hazard(alone=True)
def captured_work_waited_for_outside(dist):
    """B1, out of a capture; a later one is waited for inside, so that the capture ends well."""
    x, y, graph = ones(1024), ones(1024), torch.cuda.CUDAGraph()

    def outcome():
        with torch.cuda.graph(graph):
            work = dist.all_reduce(x, async_op=True)
            dist.all_reduce(y, async_op=True).wait()
        graph.replay()
        work.wait()
        torch.cuda.synchronize()
        return bool((x == 2).all())

    return across(outcome)


@hazard(alone=True)
def launches_beside_a_capture(dist):
    """A thread captures in torch's default mode, while another one waits for works and launches them."""
    began, go_on, said = threading.Event(), threading.Event(), []
    device, tensor, inner = torch.cuda.current_device(), ones(1 << 20), ones(8)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def capturing():
        torch.cuda.set_device(device)
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                try:
                    inner.add_(1)
                    began.set()
                    go_on.wait()
                    inner.add_(1)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
        finally:
            began.set()

    work = dist.all_reduce(tensor, async_op=True)
    thread = threading.Thread(target=capturing)
    thread.start()
    began.wait()
    try:
        work.wait()
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    except RuntimeError as error:
        said.append(str(error).splitlines()[0])
    finally:
        go_on.set()
        thread.join()
    return bool(said), said or "the capture ended well"


@hazard(alone=True)
def an_exception_leaves_a_coalescing_region(dist):
    """The next call must run, and not be collected."""
    device, x = torch.device("cuda", torch.cuda.current_device()), ones(1024)
    with contextlib.suppress(KeyError), dist._coalescing_manager(device=device, async_ops=True):
        dist.all_reduce(ones(1024))
        raise KeyError
    dist.all_reduce(x)
    torch.cuda.synchronize()
    right = bool((x == 2).all())
    return not right, "right" if right else "the next call did not run"


@hazard(alone=True)
def a_handle_outlives_its_group(dist):
    """A work is asked and dropped after its group was destroyed."""
    works = [dist.all_reduce(ones(1024), async_op=True) for _ in range(4)]
    works[0].wait()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    asked = [work.is_completed() for work in works]
    del works
    gc.collect()
    return False, f"completed: {asked}"


@hazard(alone=True)
def group_destroyed_while_a_graph_lives(dist):
    """It must end, or be refused by an error that names the graph."""
    x, out, graph = ones(1024), ones(1024), torch.cuda.CUDAGraph()
    dist.all_to_all_single(out, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        dist.all_to_all_single(out, x)
    graph.replay()
    torch.cuda.synchronize()
    try:
        dist.destroy_process_group()
    except Exception as error:
        if not type(error).__module__.startswith("safecomm"):
            raise
        for one in error.graphs:
            one.reset()
        dist.destroy_process_group()
        return False, f"refused: {type(error).__name__}"
    return False, "destroyed"


# --- the processes ---------------------------------------------------------------------------------------------------

LACKING = ("not support", "not implement", "notimplemented", "unsupported", "has no attribute")


def outcome_of(function, dist):
    """Run one hazard: whether it happened, None if this backend has no such call, and what came of it."""
    try:
        happened, figures = function(dist)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if not isinstance(error, TypeError) and any(words in said.lower() for words in LACKING):
            return {"happened": None, "outcome": f"not in this backend: {said}"}
        return {"happened": True, "outcome": f"error: {said}"}
    return {"happened": happened, "outcome": figures}


def child(backend, names, file):
    """Run these hazards, and write a line when one begins and when it ends."""
    dist = stock
    if LIBRARY != "stock":
        import safecomm  # torch alone runs without it

        dist = safecomm if LIBRARY == "safecomm" else stock
        if LIBRARY == "patched":
            safecomm.patch()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend == "nccl4py":
        register()
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    stock.init_process_group(backend, device_id=torch.device("cuda", torch.cuda.current_device()))

    def tell(line):
        file.write(json.dumps(line) + "\n")
        file.flush()

    found = stock.group.WORLD._get_backend(torch.device("cuda"))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    tell({"about": {"class": type(found).__name__, "nccl": nccl, "device": torch.cuda.get_device_name()}})
    for name in names:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        settle()
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        tell({"begun": name})
        tell({"name": name, **outcome_of(HAZARDS[name][0], dist)})
    if stock.is_initialized():
        with contextlib.suppress(Exception):
            settle()  # the other rank may still be in the last one
    # What is left of the hazards may keep the end of a process from coming: it is no part of them.
    os._exit(0)


def run_children(batches, arguments):
    """Run a process of this rank for each batch of names, all at once; return the lines of each, and how it ended."""
    ports = []
    for _ in batches:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    stock.broadcast_object_list(ports)

    def run(names, port):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, "--library", arguments.library, "--backend", arguments.backend]
        with tempfile.NamedTemporaryFile("r") as file, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*command, "--out", file.name, "--child", *names], env=environment, stdout=errors, stderr=errors
            )
            try:
                ended = process.wait(timeout=(LIMIT + 10) * (len(names) + 1))
            except subprocess.TimeoutExpired:
                process.kill()
                ended = process.wait()
            errors.seek(0)
            return [json.loads(line) for line in file], f"status {ended}: {errors.read()[-1200:] if ended else ''}"

    with concurrent.futures.ThreadPoolExecutor(len(batches)) as threads:
        return list(threads.map(run, batches, ports))


def verdicts(batches, arguments):
    """Run batches of hazards on both ranks: what came of those that were begun, and what the backend is."""
    everyone = [None] * stock.get_world_size()
    stock.all_gather_object(everyone, run_children(batches, arguments))
    found, about = {}, {}
    for number, names in enumerate(batches):
        for lines, ended in (ranks[number] for ranks in everyone):
            outcomes = {line["name"]: line for line in lines if "name" in line}
            # Without a group none can begin; with one, what died before it began is the first.
            begun = [line["begun"] for line in lines if "begun" in line] or (names[:1] if lines else names)
            about.update(lines[0]["about"] if lines else {})
            for name in begun:
                died = {"happened": True, "outcome": f"hung or died: {ended}"}
                found.setdefault(name, []).append(outcomes.get(name, died))
    return found, about


def main():
    global LIBRARY
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["stock", "safecomm", "patched"], required=True)
    parser.add_argument("--backend", choices=["nccl", "nccl4py"], default="nccl")
    parser.add_argument("--only", nargs="*", default=[""], help="run the hazards with one of these in their names")
    parser.add_argument("--out", required=True)
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    LIBRARY = arguments.library
    if arguments.child:
        with open(arguments.out, "w") as file:
            child(arguments.backend, arguments.child, file)
    stock.init_process_group("gloo")
    names = [name for name in HAZARDS if any(part in name for part in arguments.only)]
    alone = [[name] for name in names if HAZARDS[name][1]]
    rest = [name for name in names if not HAZARDS[name][1]]
    command = f"torchrun --nproc-per-node 2 tests/gpu/hazards.py --library {LIBRARY} --backend {arguments.backend}"
    results = {"command": command, "torch": torch.__version__, "hazards": {}}
    while rest or alone:
        found, about = verdicts([rest], arguments) if rest else verdicts(alone, arguments)
        rest, alone = [name for name in rest if name not in found], alone if rest else []
        results.update(about)
        for name, ranks in found.items():
            happened = [said["happened"] for said in ranks]
            worst = next((said for said in ranks if said["happened"]), ranks[0])
            results["hazards"][name] = {"happened": True if True in happened else happened[0], "on": happened}
            results["hazards"][name]["outcome"] = worst["outcome"]
            if stock.get_rank() == 0:
                what = {True: "HAPPENED", False: "no", None: "not there"}[results["hazards"][name]["happened"]]
                print(f"{what:9} {name}: {json.dumps(worst['outcome'])[-400:]}", flush=True)
        if stock.get_rank() == 0:
            with open(arguments.out, "w") as file:
                file.write(without_directories(json.dumps(results, indent=1)) + "\n")
    if stock.get_rank() == 0:
        happened = sum(said["happened"] is True for said in results["hazards"].values())
        print(f"{happened} of {len(results['hazards'])} hazards happened", flush=True)
    stock.destroy_process_group()


if __name__ == "__main__":
    main()
