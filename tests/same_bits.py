"""Random reductions of the same elements, by all ways there are: python tests/same_bits.py --cases 20000 --out FILE

A case is one way to reduce a set of elements on real processes: in other messages, at other places, by another call.
What each has to give is computed here, element by element, by numpy and by this file's own rounding. The same elements
are reduced without invariant() too: where torch never differs from what is expected, the cases prove nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
import torch.multiprocessing

import safecomm

SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPS = ("SUM", "SUM", "AVG", "PRODUCT", "MAX", "MIN")
COUNTS = (1, 2, 5, 64, 333, 2048, 5000, 40_000)
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-39, -1e-41, 65504.0, 1e-7, 3e38)


# --- what is expected ---------------------------------------------------------------------------------------


def expected(rows, op):
    """Return what ``rows``, one of each rank, give: reduced in their order, in fp32 or fp64, and rounded once."""
    dtype = rows[0].dtype
    wide = np.float64 if dtype is torch.float64 else np.float32
    values = [row.to(torch.float64 if wide is np.float64 else torch.float32).numpy() for row in rows]
    with np.errstate(all="ignore"):
        total = values[0].copy()
        for value in values[1:]:
            total = _combined(total, value, op)
        if op == "AVG":
            total = (total / wide(len(rows))).astype(wide)
        return _rounded(total, dtype)


def _combined(total, value, op):
    if op in ("SUM", "AVG"):
        return total + value
    if op == "PRODUCT":
        return total * value
    sign = np.signbit(total).astype(int) - np.signbit(value).astype(int)  # 1 where only the value is above
    better = (value > total) | ((value == total) & (sign > 0))
    if op == "MIN":
        better = (value < total) | ((value == total) & (sign < 0))
    return np.where(np.isnan(total) | (better & ~np.isnan(value)), value, total)


def _rounded(total, dtype):
    if dtype is torch.bfloat16:
        bits = total.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = np.where(np.isnan(total), 0x7FC0, bits).astype(np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    with np.errstate(all="ignore"):
        return torch.from_numpy(total.astype(np.float16) if dtype is torch.float16 else total)


def differing(found, right):
    """Return how many elements differ in a bit; one NaN is like another."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    found = found.cpu()
    same = found.contiguous().view(words) == right.contiguous().view(words)
    return int((~(same | (found.isnan() & right.isnan()))).sum())


def elements(dice, world):
    """Return what each rank has, of one random set of elements."""
    dtype, count = dice.choice(DTYPES), dice.choice(COUNTS)
    generator = torch.Generator().manual_seed(dice.getrandbits(40))
    shape = (world, count)
    scale = torch.exp2(torch.randint(-8, 9, shape, generator=generator).double())
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    chosen = special[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    often = dice.choice((0.0, 0.02, 0.5))
    values = torch.where(torch.rand(shape, generator=generator) < often, chosen, values)
    return list(values.to(dtype))


# --- the ways: each gives the whole result on every rank, or None where it has none ---------------------------


def _in_pieces(call, mine, dice):
    """Make ``call`` of pieces of ``mine``, each at some place in another tensor; return all of the results."""
    found, at = torch.empty_like(mine), 0
    while at < len(mine):
        size = min(dice.choice((1, 3, 50, 1000, 20_000)), len(mine) - at)
        before = dice.randrange(9)
        around = mine.new_zeros(before + size + dice.randrange(5))
        piece = around[before : before + size]
        piece.copy_(mine[at : at + size])
        call(piece)
        found[at : at + size] = piece
        at += size
    return found


def _scattered(mine, call):
    """Return all of what ``call`` scatters of ``mine``, which is padded to a part for each rank."""
    world, rank = stock.get_world_size(), stock.get_rank()
    part = -(-len(mine) // world)
    padded = mine.new_zeros(part * world)
    padded[: len(mine)] = mine
    out = call(mine.new_empty(part), padded)
    whole = torch.empty_like(padded)
    stock.all_gather(list(whole.chunk(world)), out)
    assert torch.equal(whole.view(world, part)[rank].view(torch.uint8), out.view(torch.uint8))
    return whole[: len(mine)]


def whole(mine, op, dice):
    safecomm.all_reduce(mine, op)
    return mine


def torchs(mine, op, dice):
    stock.all_reduce(mine, op)
    return mine


def asynchronous(mine, op, dice):
    safecomm.all_reduce(mine, op, async_op=True).wait()
    return mine


def pieces(mine, op, dice):
    return _in_pieces(lambda piece: safecomm.all_reduce(piece, op), mine, dice)


def asynchronous_pieces(mine, op, dice):
    parts = mine.split(1 + len(mine) // dice.choice((3, 11, 40)))
    for work in [safecomm.all_reduce(piece, op, async_op=True) for piece in parts]:
        work.wait()
    return mine


def permuted(mine, op, dice):
    order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(dice.getrandbits(40))).to(mine.device)
    moved = mine[order]
    safecomm.all_reduce(moved, op)
    return torch.empty_like(mine).scatter_(0, order, moved)


def strided(mine, op, dice):
    apart = mine.new_zeros(len(mine), 3)[:, 1].copy_(mine)
    safecomm.all_reduce(apart, op)
    return apart


def bucketed(mine, op, dice):
    with safecomm.bucketed(dice.choice((0.001, 1.0))):
        return _in_pieces_at_once(mine, op, dice)


def _in_pieces_at_once(mine, op, dice):
    for piece in mine.split(dice.choice((1 + len(mine) // 9, 1 + len(mine) // 2))):
        safecomm.all_reduce(piece, op)
    return mine


def region(mine, op, dice):
    with safecomm._coalescing_manager(async_ops=dice.random() < 0.5) as manager:
        _in_pieces_at_once(mine, op, dice)
    manager.wait()
    return mine


def coalesced(mine, op, dice):
    options = stock.AllreduceCoalescedOptions()
    options.reduceOp = op
    stock.group.WORLD.allreduce_coalesced(list(mine.split(1 + len(mine) // 4)), options).wait()
    return mine


def by_the_group(mine, op, dice):
    options = stock.AllreduceOptions()
    options.reduceOp = op
    stock.group.WORLD.allreduce([mine], options).wait()
    return mine


def _name(op):
    """Return what functional collectives call an operation."""
    return str(op).rpartition(".")[2].lower()


def as_a_functional_collective(mine, op, dice):
    return functional.wait_tensor(functional.all_reduce(mine, _name(op), stock.group.WORLD))


def of_another_group(mine, op, dice):
    safecomm.all_reduce(mine, op, other_group())
    return mine


def to_one_rank(mine, op, dice):
    root = dice.randrange(stock.get_world_size())
    before = mine.clone()
    safecomm.reduce(mine, root, op)
    if stock.get_rank() != root:
        assert torch.equal(mine.view(torch.uint8), before.view(torch.uint8))
    stock.broadcast(mine, root)
    return mine


def scattered(mine, op, dice):
    def call(out, padded):
        work = getattr(safecomm, SCATTER)(out, padded, op, async_op=dice.random() < 0.5)
        if work is not None:
            work.wait()
        return out

    return _scattered(mine, call)


def scattered_from_a_list(mine, op, dice):
    def call(out, padded):
        safecomm.reduce_scatter(out, [one.clone() for one in padded.split(len(out))], op)
        return out

    return _scattered(mine, call)


def scattered_functionally(mine, op, dice):
    reduce_scatter = getattr(functional, SCATTER)
    return _scattered(
        mine, lambda out, padded: functional.wait_tensor(reduce_scatter(padded, _name(op), 0, stock.group.WORLD))
    )


WAYS = (
    whole, torchs, asynchronous, pieces, asynchronous_pieces, permuted, strided, bucketed, region, coalesced,
    by_the_group, as_a_functional_collective, of_another_group, to_one_rank, scattered, scattered_from_a_list,
    scattered_functionally,
)  # fmt: skip

_OTHER = []


def other_group():
    """Return another group of all ranks."""
    if not _OTHER:
        _OTHER.append(stock.new_group(list(range(stock.get_world_size()))))
    return _OTHER[0]


def try_all(seed, ways=WAYS, context=safecomm.invariant, device="cpu"):
    """Reduce one random set of elements in all ``ways``; return those that were wrong, and whether torch differs."""
    rank, world = stock.get_rank(), stock.get_world_size()
    dice = random.Random(seed)
    rows, op = elements(dice, world), dice.choice(OPS)
    right = expected(rows, op)
    wrong = []
    other_group()
    for way in ways:
        with context():
            found = way(rows[rank].to(device, copy=True), getattr(stock.ReduceOp, op), random.Random(seed))
        if number := differing(found, right):
            wrong.append(f"{way.__name__}: {number} of {len(right)} elements of {rows[0].dtype}, {op}, seed {seed}")
    alone = rows[rank].to(device, copy=True)
    if op != "AVG":  # which gloo does not have
        stock.all_reduce(alone, getattr(stock.ReduceOp, op))
    return wrong, op != "AVG" and differing(alone, right) > 0


# --- as a program -------------------------------------------------------------------------------------------


def _rank(rank, world, port, cases, first, path):
    torch.set_num_threads(1)
    stock.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    wrong, torch_differs, tried, seed, shown = [], 0, 0, first, time.monotonic()
    while tried < cases:
        found, differs = try_all(seed)
        wrong, torch_differs, tried, seed = wrong + found, torch_differs + differs, tried + len(WAYS), seed + 1
        if not rank and sys.stderr.isatty() and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{world} ranks: {tried} of {cases} cases, {len(wrong)} wrong", end="", file=sys.stderr)
    everyones = [None] * world
    stock.all_gather_object(everyones, wrong)
    if not rank:
        wrong = sorted({one for found in everyones for one in found})
        told = {
            "cases": tried,
            "sets of elements": seed - first,
            "wrong": len(wrong),
            "torch alone differs": torch_differs,
        }
        Path(path).write_text(json.dumps(told | {"the wrong ones": wrong[:20]}))
    stock.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, nargs="*", default=[3, 4, 5, 8])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    results = {"command": "python tests/same_bits.py", "torch": torch.__version__, "backend": "gloo"}
    results |= {"date": date.today().isoformat(), "seed": arguments.seed, "ways": [way.__name__ for way in WAYS]}
    results["by ranks"] = {}
    part = Path(arguments.out).with_suffix(".part")
    for world in arguments.ranks:
        store = stock.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, cases = store.port, -(-arguments.cases // len(arguments.ranks))
        del store
        given = world, port, cases, arguments.seed * 1_000_000, str(part)
        torch.multiprocessing.spawn(_rank, given, world)
        results["by ranks"][world] = found = json.loads(part.read_text())
        print(f"{world} ranks: {found}", flush=True)
        Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
    part.unlink()
    bad = [found for found in results["by ranks"].values() if found["wrong"] or not found["torch alone differs"]]
    sys.exit(bool(bad))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
