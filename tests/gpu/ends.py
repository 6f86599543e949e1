"""How processes end, with graphs alive and after captures that failed (S5, S7): each program has a process of its own.

``python ends.py PROGRAM LIBRARY RANK WORLD FOLDER`` is such a process. Its last line of output says what came of it.
"""

import concurrent.futures
import datetime
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d

LIMIT = 5
"""Seconds that the group of each program has as its timeout, when it comes to its end."""


# --- the programs ----------------------------------------------------------------------------------------------------


def captured(library, x):
    """Capture outside of all contexts, replay, and end with the graph alive."""
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    library.all_to_all_single(out, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        library.all_reduce(x)
        library.all_to_all_single(out, x)  # NCCL captures no kernel of its own for an all_reduce of one rank
    graph.replay()
    torch.cuda.synchronize()
    return graph, {}


def compiled(library, x):
    """Call a wrapped collective in compiled code that captures graphs, and end with them alive."""

    @torch.compile(mode="reduce-overhead")
    def step(x):
        y = x * 2
        library.all_reduce(y)
        return y + 1

    wrong = 0
    for n in range(8):
        given = torch.full_like(x, n)
        torch.compiler.cudagraph_mark_step_begin()
        wrong += bool((step(given) != 2 * n * stock.get_world_size() + 1).any())
    graphs = sum(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())
    return step, {"wrong": wrong, "graphs": graphs}


def functional_in_a_graph(library, x):
    """Launch a functional collective in a graph, and wait for it outside."""

    def launch_and_wait():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = functional.all_reduce(x * 2, "sum", stock.group.WORLD)
        graph.replay()
        return functional.wait_tensor(y)

    return None, outcome_of(launch_and_wait, x)


def functional_after_another(library, x):
    """Likewise, with one after it that is waited for inside, so that the capture ends well."""

    def launch_and_wait():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = functional.all_reduce(x * 2, "sum", stock.group.WORLD)
            functional.wait_tensor(functional.all_reduce(x * 3, "sum", stock.group.WORLD))
        graph.replay()
        return functional.wait_tensor(y)

    return None, outcome_of(launch_and_wait, x)


def functional_with_a_graph_break(library, x):
    """Likewise, in compiled code that captures graphs, with a graph break between the two."""

    @torch.compile(mode="reduce-overhead")
    def step(x):
        y = torch.ops._c10d_functional.all_reduce.default(x * 2, "sum", stock.group.WORLD.group_name)
        torch._dynamo.graph_break()
        return torch.ops._c10d_functional.wait_tensor.default(y)

    def launch_and_wait():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            result = step(x)
        return result

    return step, outcome_of(launch_and_wait, x)


def outcome_of(launch_and_wait, x):
    """Return what came of it, and whether the device and the group go on after that."""
    stream = torch.cuda.current_stream()
    try:
        result = launch_and_wait()
        torch.cuda.synchronize()
        outcome = "right" if bool((result == 2 * stock.get_world_size()).all()) else "WRONG"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}".splitlines()[0]
    torch.cuda.set_stream(stream)  # a capture that ends with an error leaves its own the current one
    y = x + 1
    stock.all_reduce(y)
    torch.cuda.synchronize()
    return {"outcome": outcome, "goes on": bool((y == 2 * stock.get_world_size()).all())}


def main(program, library_name, rank, world, folder):
    rank, world = int(rank), int(world)
    said = {"began": time.time()}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    library = stock
    if library_name != "stock":
        import safecomm

        library = safecomm if library_name.startswith("plain") else stock
        if library_name == "patched":
            safecomm.patch()
    store = stock.FileStore(f"{folder}/{program}-{library_name}", world)
    device = torch.device("cuda", torch.cuda.current_device())
    stock.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=device)
    x = torch.ones(1 << 10, device="cuda")
    stock.all_reduce(x.clone())
    kept, found = globals()[program](library, x)
    said.update(found)
    torch.cuda.synchronize()
    stock.barrier()
    torch.cuda.synchronize()
    c10d._set_pg_timeout(datetime.timedelta(seconds=LIMIT), stock.group.WORLD)
    faulthandler.dump_traceback_later(30 if library_name != "stock" else 8, exit=True)
    print(json.dumps({**said, "seconds": "for ever"}), flush=True)
    start = time.perf_counter()
    error = None
    try:
        library.destroy_process_group()
    except RuntimeError as caught:
        error = caught
    if library_name == "stock":
        faulthandler.cancel_dump_traceback_later()
    said["seconds"] = round(time.perf_counter() - start, 2)
    said["error"] = "" if error is None else f"{type(error).__name__}: {error}"
    if error is not None and library_name == "plain, reset":
        for graph in error.graphs:
            graph.reset()
        start = time.perf_counter()
        library.destroy_process_group()
        said["seconds after reset"] = round(time.perf_counter() - start, 2)
        error = None
    said["ended"] = time.time()
    print(json.dumps(said), flush=True)
    if error is not None:
        raise error
    del kept


# --- the cases -------------------------------------------------------------------------------------------------------


def run_all(programs):
    """Run each program with each library, all at once; return what each said, with its status and its last seconds."""
    from harness import rank

    folder = [tempfile.mkdtemp() if rank() == 0 else None]
    stock.broadcast_object_list(folder)

    def run(program, library):
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, program, library, str(rank()), str(stock.get_world_size()), folder[0]]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        gone = time.time()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said = json.loads(lines[-1]) if lines else {}
        said["status"] = process.returncode
        said["seconds to exit"] = round(gone - said.pop("ended"), 2) if "ended" in said else None
        said["seconds in all"] = round(gone - said.pop("began"), 2) if "began" in said else None
        if process.returncode and rank() == 0:
            print(program, library, err[-4000:], file=sys.stderr, flush=True)
        return said

    with concurrent.futures.ThreadPoolExecutor(len(programs)) as threads:
        results = list(threads.map(run, *zip(*programs, strict=True)))
    return {f"{program}, {library}": said for (program, library), said in zip(programs, results, strict=True)}


def check_end(require, said, *, cleanly):
    """Check that a process has ended cleanly, or with an error within the time limits."""
    require(said.get("seconds", "for ever") != "for ever", said)
    require(said["seconds"] <= LIMIT + 2, said)
    require(said["seconds to exit"] <= 10, said)
    if not said["error"] or "seconds after reset" in said:
        require(said["status"] == 0, said)
    else:
        require(not cleanly and "LiveGraphError" in said["error"] and said["status"] == 1, said)


def register():
    """Register the cases. The programs are run by this file too, and have no use for them."""
    from harness import case, require

    @case(60)
    def s7_graphs_alive_at_the_end():
        """torch.cuda.graph outside of all contexts: patched ends cleanly, plain with an error, torch's hangs."""
        libraries = ("stock", "patched", "plain", "plain, reset")
        result = run_all([("captured", library) for library in libraries])
        for library in libraries[1:]:
            check_end(require, result[f"captured, {library}"], cleanly=library == "patched")
        return result

    @case(110)
    def s7_compiled_graphs_alive_at_the_end():
        """torch.compile(mode="reduce-overhead") around a wrapped call: right results, and an end."""
        libraries = ("stock", "patched", "plain", "plain, reset")
        result = run_all([("compiled", library) for library in libraries])
        for library in libraries[1:]:
            said = result[f"compiled, {library}"]
            require(said.get("wrong") == 0, said)
            check_end(require, said, cleanly=library == "patched")
        return result

    @case(110)
    def s5_functional_waited_for_outside():
        """A functional collective launched in a graph, waited for outside: right, or an error that harms nothing."""
        programs = ("functional_in_a_graph", "functional_after_another", "functional_with_a_graph_break")
        result = run_all([(program, library) for program in programs for library in ("stock", "patched", "plain")])
        for name, said in result.items():
            if "stock" not in name:
                require(said.get("outcome", "WRONG") != "WRONG" and said["goes on"], name, said)
                check_end(require, said, cleanly="patched" in name)
        return result


if __name__ == "__main__":
    main(*sys.argv[1:])
else:
    register()
