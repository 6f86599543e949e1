"""What the classes of backends differ in: how long they hold what they use, and what they ask of the device."""

import gc
import threading

import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
from harness import LIBRARIES, MIB, case, held, rank, require

import safecomm
from safecomm import _torch

TRIES = 10
TAIL = 4096
"""Bytes at the end of an output, which a collective writes last."""


def _gather(library, output, given):
    call = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
    return call(output, given[: output.numel() // stock.get_world_size()], async_op=True)


def _scatter(library, output, given):
    call = getattr(library, "reduce_scatter_single", None) or library.reduce_scatter_tensor
    part = output[: given.numel() // stock.get_world_size()]
    return call(part, given, async_op=True)


def _all_to_all(library, output, given):
    return library.all_to_all_single(output, given, async_op=True)


def _exchange(library, output, given):
    world = stock.get_world_size()
    return library.batch_isend_irecv(
        [
            library.P2POp(library.isend, given, (rank() + 1) % world),
            library.P2POp(library.irecv, output, (rank() - 1) % world),
        ]
    )


CALLS = {"all_gather": _gather, "reduce_scatter": _scatter, "all_to_all": _all_to_all, "irecv": _exchange}


def _written_after_it_was_dropped(library, call, given):
    """Drop the handle and the output of a call, and use memory of the same size; return if the call wrote to that."""
    output = torch.empty_like(given)
    torch.cuda._sleep(2_000_000)
    work = call(library, output, given)
    written = slice(0, given.numel() // stock.get_world_size()) if call is _scatter else slice(None)
    del output, work
    mine = torch.empty_like(given)
    tail = mine[written][-TAIL:]
    tail.fill_(7)
    torch.cuda.synchronize()
    return not bool((tail == 7).all())


@case(120)
def s1_dropped_with_their_outputs():
    """Calls whose handle and output are dropped at once: how many wrote to the next owner's memory."""
    corrupted = {}
    for name, call in CALLS.items():
        for label, library in LIBRARIES.items():
            given = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
            corrupted[f"{name}, {label}: of {TRIES}"] = sum(
                _written_after_it_was_dropped(library, call, given) for _ in range(TRIES)
            )
            del given
            safecomm.drain(wait=True)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    require(not any(count for name, count in corrupted.items() if "safecomm" in name), corrupted)
    return corrupted


@case(60)
def s5_launches_and_waits_beside_a_capture():
    """A thread captures in torch's default mode, while another waits for a work and launches the next.

    Not with torch.distributed: where that ends the capture, as ProcessGroupNCCL2 does, it ends the process too.
    """
    began, go_on, outcome = threading.Event(), threading.Event(), []
    device = torch.cuda.current_device()
    tensor, captured = torch.ones(1 << 20, device="cuda"), torch.ones(8, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def capture():
        torch.cuda.set_device(device)
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                try:
                    captured.add_(1)
                    began.set()
                    go_on.wait()
                    captured.add_(1)
                finally:
                    graph.capture_end()
            outcome.append("survived")
        except RuntimeError as error:
            outcome.append(str(error).splitlines()[0])
        finally:
            began.set()

    work = safecomm.all_reduce(tensor, async_op=True)
    thread = threading.Thread(target=capture)
    thread.start()
    began.wait()
    try:
        work.wait()
        safecomm.all_reduce(tensor)
        safecomm.all_reduce(tensor, async_op=True).wait()
        safecomm.broadcast(tensor, 0)
    finally:
        go_on.set()
        thread.join()
    require(outcome == ["survived"], outcome)
    graph.replay()
    torch.cuda.synchronize()
    require(captured.tolist() == [3] * 8, captured)
    return {"captures that survived": 1}


@case(60)
def s3_functional_results_nobody_waited_for():
    """40 functional collectives of 16 MiB that are dropped: MiB that stay, and what is right of one that is used."""
    tensor, small, figures = torch.ones(4 * MIB, device="cuda"), torch.ones(1, device="cuda"), {}
    world, group = stock.get_world_size(), stock.group.WORLD
    gathering = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"

    def gather(*arguments):
        return getattr(functional, gathering)(*arguments)  # the module's own, which patch() has replaced by then

    part = tensor[: 4 * MIB // world]
    finishes = _torch.functional_collectives() is not None  # from torch 2.14 on
    for label in ("patched", "plain"):
        gc.collect()
        torch.cuda.synchronize()
        before, waiting = held(), (_torch.unwaited() or 0)
        highest = 0
        if label == "patched":
            safecomm.patch()
        try:
            for _ in range(20):
                functional.all_reduce(tensor, "sum", group)
                gather(part, 0, group)
                stock.all_reduce(small)
                torch.cuda.synchronize()  # a program that never does has as many in flight as it runs ahead
                highest = max(highest, held() - before)
            kept = functional.all_reduce(tensor * 3, "sum", group).elem
            view = gather(part * 2, 0, group).elem[1:]
            if label == "patched":
                safecomm.drain(wait=True)
            require((_torch.unwaited() or 2) >= 2, "the wait of somebody who has the tensor was taken")
            require(bool((functional.wait_tensor(kept) == 3 * world).all()), "what is used is wrong")
            require(bool((functional.wait_tensor(view) == 2).all()), "what is used is wrong")
            del kept, view
            safecomm.drain(wait=True)
            torch.cuda.synchronize()
        finally:
            safecomm.unpatch()
        stock.all_reduce(small)
        torch.cuda.synchronize()
        figures[f"{label}: MiB more, highest, works that wait"] = [
            (held() - before) // MIB,
            highest // MIB,
            (_torch.unwaited() or 0) - waiting,
        ]
    more, highest, works = figures["patched: MiB more, highest, works that wait"]
    figures["finished"] = finishes
    if finishes:
        require(works == 0 and more <= 64 and highest <= 64, figures)
    return figures
