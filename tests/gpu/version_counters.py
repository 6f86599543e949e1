"""The version counters of tensors on NCCL, by the table that the tests without a GPU run on gloo (S8)."""

import contextlib
import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as stock
from harness import case, require

import safecomm
from safecomm.collectives import backends

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the table is
counters = importlib.import_module("counters")

# NCCL can't receive from any rank.
ROWS = tuple(name for name in counters.ROWS if name != "recv_from_any")
LISTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def contexts(device):
    """Return the contexts that change no version, by name."""
    found = {
        "none": contextlib.nullcontext,
        "arena": lambda: safecomm.use_arena("64MiB", device=device),
        "avoid_record_streams": safecomm.avoid_record_streams,
    }
    if device == "cuda":
        found["low_latency"] = lambda: safecomm.low_latency()
    return found


def compared(device):
    """Return what differs from torch, by context, over the whole table: direct, forwarded, lists, regions, p2p.

    The list forms of ProcessGroupNCCL2 raise no version (torch 2.15), which ``low_latency()`` does not do without.
    """
    different = {}
    at_least = device == "cuda" and backends.of(stock.group.WORLD, "cuda") is backends.NCCL2
    for name, context in contexts(device).items():
        with context():
            for asynchronous in (False, True):
                if found := counters.differences(
                    stock, safecomm, device, ROWS, at_least=at_least, asynchronous=asynchronous
                ):
                    different[f"{name}, async_op={asynchronous}"] = found
            if found := slices(device, at_least):
                different[f"{name}, slices"] = found
    return different


def slices(device, at_least):
    """Return what differs from torch for lists that are slices of one buffer, which share its version."""
    world = stock.get_world_size()
    different = []
    for asynchronous in (False, True):
        for name in LISTS:
            outcomes = []
            for module in (stock, safecomm):
                buffer, given = torch.zeros(4 * world, device=device), torch.ones(4 * world, device=device)
                parts, pieces, root = list(buffer.chunk(world)), list(given.chunk(world)), stock.get_rank() == 0
                arguments = {
                    "all_gather": (parts, pieces[0]),
                    "reduce_scatter": (parts[0], pieces),
                    "all_to_all": (parts, pieces),
                    "gather": (pieces[0], parts if root else None),
                    "scatter": (parts[0], pieces if root else None),
                }[name]
                work = getattr(module, name)(*arguments, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                outcomes.append((buffer._version, given._version))
            theirs, ours = outcomes
            if theirs != ours and not (at_least and theirs[0] == 0 < ours[0] and theirs[1] == ours[1]):
                different.append((name, asynchronous, *outcomes))
    return different


@case(120)
def s8_version_counters_are_torchs():
    """Every collective, sync and async: versions of outputs and inputs, and a backward that saved them.

    They are torch's; where torch leaves the version of what it has written to, at least that.
    """
    different = compared("cuda")
    safecomm.drain(wait=True)
    require(not different, different)
    return {"calls": len(ROWS), "differing": 0}


@case(60)
def s8_copies_out_of_a_bucket_count_as_changes():
    """Calls that share a bucket in bucketed(): outputs whose version did not rise, backwards that were not refused."""
    hidden = accepted = 0
    world = stock.get_world_size()
    # The elements of the output, and of the input if there is another one.
    for name, size, given in (
        ("all_reduce", 4, None),
        (counters.GATHER, 2 * world, 2),
        (counters.SCATTER, 4, 4 * world),
    ):
        outputs = [torch.full((size,), 3.0, device="cuda") for _ in range(3)]
        weights = [torch.ones_like(output, requires_grad=True) for output in outputs]
        losses = [(weight * output).sum() for weight, output in zip(weights, outputs, strict=True)]
        with safecomm.bucketed():
            for output in outputs:
                getattr(safecomm, name)(output, *([] if given is None else [torch.ones(given, device="cuda")]))
        hidden += sum(output._version == 0 for output in outputs)
        for loss in losses:
            with contextlib.suppress(RuntimeError):  # of autograd, which has seen that it was written to
                loss.backward()
                accepted += 1
    require(hidden == accepted == 0, hidden, accepted)
    return {"versions that did not rise": hidden, "backwards that were not refused": accepted}
