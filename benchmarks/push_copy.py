"""How fast kernels store into a peer's memory, in both directions at once: what a ring can reach, and in what shape.

    torchrun --nproc-per-node 2 benchmarks/push_copy.py --out FILE

An all_reduce of n bytes on two GPUs sends n bytes each way. ``push``: a kernel that copies n bytes to the peer, in many
shapes, to a place of its own for each byte, and to a few tiles a program that are stored again and again, as a ring's
staging is. ``moves``: all loads and stores of such a ring, also those of this rank's own memory, without its waiting.
``copy engine``: cudaMemcpyAsync. All in CUDA graphs, in turns with NCCL's all_reduce; medians of the slowest rank.
"""

import argparse
import gc
import itertools
import statistics
import time

import torch
import torch.distributed as stock
import triton
import triton.language as tl
from measured import begin, captured, setting, write

from safecomm import _torch

MIB, KIB = 1 << 20, 1 << 10
SIZES = (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
SWEPT = (8 * MIB, 32 * MIB, 128 * MIB)
PROGRAMS = (16, 24, 32, 48, 64, 96)
SHAPES = [(warps, tile * KIB) for warps in (8, 16, 32) for tile in (4, 8, 16, 32) if tile * KIB >= 16 * 32 * warps]
"""Warps and bytes of a tile, of which each thread has 16 or more."""
PHASES = 3
"""Tiles that a program stores to in turn, where it does so."""


@triton.jit
def push(
    source, target, nbytes, TILE: tl.constexpr, PHASES: tl.constexpr, STAGES: tl.constexpr, MODIFIER: tl.constexpr
):
    """Copy ``nbytes``, a multiple of a tile; to ``PHASES`` tiles of each program in turn, or with 0 all apart."""
    within = tl.arange(0, TILE // 4)
    own = tl.program_id(0) * PHASES
    tiles = nbytes // TILE
    turn = 0
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        place = own + turn if PHASES else tile
        turn = tl.where(turn == PHASES - 1, 0, turn + 1) if PHASES else 0
        values = tl.load(source + tile * (TILE // 4) + within)
        tl.store(target + place * (TILE // 4) + within, values, cache_modifier=MODIFIER)


@triton.jit
def moves(data, staging, peers, nbytes, ME: tl.constexpr, TILE: tl.constexpr, PHASES: tl.constexpr):
    """Move what an all_reduce of two ranks does, in place, a piece of ``TILE`` bytes for each of them at a time.

    ``nbytes``: a multiple of two pieces. Of bf16, summed in fp32. What it computes means nothing.
    """
    count: tl.constexpr = TILE // 2
    within = tl.arange(0, count)
    turn = 0
    for chunk in range(tl.program_id(0), nbytes // (2 * TILE), tl.num_programs(0)):
        own = (chunk * 2 + ME) * count + within
        others = (chunk * 2 + 1 - ME) * count + within
        first = ((tl.program_id(0) * PHASES + turn) * 2) * count + within
        second = first + count
        tl.store(peers + first, tl.load(data + others))
        arrived = tl.load(staging + first, volatile=True)
        total = (tl.load(data + own).to(tl.float32) + arrived.to(tl.float32)).to(tl.bfloat16)
        tl.store(data + own, total)
        tl.store(peers + second, total)
        tl.store(data + others, tl.load(staging + second, volatile=True))
        turn = tl.where(turn == PHASES - 1, 0, turn + 1)


def begun_together(call, calls):
    """Return what runs a graph of ``calls`` calls, which the ranks begin together, and tells the us of one."""
    replay = captured(call, calls, lead=1)
    together = torch.zeros(1, device="cuda")

    def run():
        stock.all_reduce(together)
        torch.cuda._sleep(500_000)  # the ranks go on together, and until then all that follows is launched
        return replay()

    return run


def slowest(runs, rounds):
    """Run each in turns; return the median us of the slowest rank."""
    times = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 else reversed(tuple(runs)):
            times[name].append(runs[name]())
    medians = torch.tensor([statistics.median(taken) for taken in times.values()], device="cuda")
    stock.all_reduce(medians, op=stock.ReduceOp.MAX)
    return {name: round(us, 2) for name, us in zip(times, medians.tolist(), strict=True)}


class Peers:
    """Tensors of each rank: one of its own, and symmetric memory, of this rank and of the other."""

    def __init__(self, device):
        memory = _torch.symmetric_memory()
        most = max(SIZES)
        self.data = torch.randn(most // 2, dtype=torch.bfloat16, device=device).view(torch.int32)
        self.mine = memory.empty(most, dtype=torch.uint8, device=device).zero_()
        handle = memory.rendezvous(self.mine, stock.group.WORLD)
        self.rank = stock.get_rank()
        peer = handle.get_buffer(1 - self.rank, (most,), torch.uint8)
        self.mine, self.theirs = self.mine.view(torch.int32), peer.view(torch.int32)

    def push(self, nbytes, programs, warps, tile, phases, stages=1, modifier=""):
        """Return a call of the copy kernel."""
        return lambda: push[(programs,)](
            self.data, self.theirs, nbytes, TILE=tile, PHASES=phases, STAGES=stages, MODIFIER=modifier,
            num_warps=warps,
        )  # fmt: skip

    def moves(self, nbytes, programs, warps, tile):
        """Return a call of the kernel that moves what a ring does."""
        tensors = [one.view(torch.bfloat16) for one in (self.data, self.mine, self.theirs)]
        return lambda: moves[(programs,)](*tensors, nbytes, ME=self.rank, TILE=tile, PHASES=PHASES, num_warps=warps)

    def engine(self, nbytes):
        """Return a call of the copy engine."""
        source, target = self.data[: nbytes // 4], self.theirs[: nbytes // 4]
        return lambda: target.copy_(source)

    def nccl(self, nbytes):
        """Return NCCL's all_reduce."""
        tensor = self.data[: nbytes // 4].view(torch.bfloat16)
        return lambda: stock.all_reduce(tensor)


def named(programs, warps, tile, *more):
    return ", ".join([f"{programs} programs", f"{32 * warps} threads", f"{tile // KIB} KiB", *more])


def calls_for(nbytes):
    return max(10, min(40, 640 * MIB // nbytes))


def timed(calls, nbytes, rounds=5):
    return slowest({name: begun_together(call, calls_for(nbytes)) for name, call in calls.items()}, rounds)


def right(peers):
    """Return whether the kernels copy what they are to."""
    count = 4 * MIB // 4
    sent = torch.arange(count, dtype=torch.int32, device="cuda") + peers.rank
    peers.data[:count] = sent
    for stages in (1, 3):
        peers.theirs[:count] = 0
        stock.barrier()
        peers.push(4 * MIB, 24, 8, 8 * KIB, 0, stages)()
        stock.barrier()
        torch.cuda.synchronize()
        if not torch.equal(peers.mine[:count], torch.arange(count, dtype=torch.int32, device="cuda") + 1 - peers.rank):
            return False
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=75, help="after which nothing more is begun")
    arguments = parser.parse_args()
    began = time.monotonic()
    device = begin()
    peers = Peers(device)
    results = setting("torchrun benchmarks/push_copy.py")
    results["right"] = right(peers)
    gc.collect()
    gc.freeze()  # torch collects garbage at each capture

    def over():
        late = torch.tensor(float(time.monotonic() - began > arguments.seconds), device=device)
        stock.all_reduce(late)
        return bool(late)

    def note(part, nbytes, found):
        results.setdefault(part, {}).setdefault(str(nbytes), {}).update(found)
        write(arguments.out, results)
        if stock.get_rank() == 0:
            fastest = sorted(found.items(), key=lambda item: item[1])[:6]
            print(f"{time.monotonic() - began:5.1f} s, {part}, {nbytes // MIB} MiB: {fastest}", flush=True)

    for nbytes in SIZES:
        note("reference", nbytes, timed({"NCCL": peers.nccl(nbytes), "copy engine": peers.engine(nbytes)}, nbytes, 9))
    for nbytes, part in itertools.product(SWEPT[1:2] + SWEPT[:1] + SWEPT[2:], ("push", "moves")):
        if over():
            break
        for warps, tile in SHAPES:
            calls = {}
            for programs in PROGRAMS:
                if part == "push":
                    calls[named(programs, warps, tile, "apart")] = peers.push(nbytes, programs, warps, tile, 0)
                    calls[named(programs, warps, tile, "staging")] = peers.push(nbytes, programs, warps, tile, PHASES)
                else:
                    calls[named(programs, warps, tile)] = peers.moves(nbytes, programs, warps, tile)
            if calls:
                note(part, nbytes, timed(calls, nbytes, 3))
    nbytes = 32 * MIB
    calls = {
        named(programs, 16, 16 * KIB, f"{stages} stages", f"store {modifier or 'as usual'}"): peers.push(
            nbytes, programs, 16, 16 * KIB, PHASES, stages, modifier
        )
        for programs, stages, modifier in itertools.product((16, 32, 64), (1, 3), ("", ".cg", ".cs", ".wt"))
    }
    if not over():
        note("pipelined and modified", nbytes, timed(calls, nbytes, 3))
    for nbytes in SIZES:
        if over():
            break
        again = {"NCCL": peers.nccl(nbytes), "copy engine": peers.engine(nbytes)}
        for part, prepared in (("push", peers.push), ("moves", peers.moves)):
            for name in best_of(results.get(part, {})):
                programs, threads, tile = (int(one.split()[0]) for one in name.split(", ")[:3])
                more = () if part == "moves" else (PHASES if name.endswith("staging") else 0,)
                again[f"{part}: {name}"] = prepared(nbytes, programs, threads // 32, tile * KIB, *more)
        note("fastest shapes, in turns", nbytes, timed(again, nbytes, 9))
    if stock.get_rank() == 0:
        print(f"{time.monotonic() - began:.1f} s in all", flush=True)
    stock.destroy_process_group()


def best_of(by_size):
    """Return the names of a few shapes that are the fastest over the sizes; the same on every rank."""
    names = set.intersection(*(set(found) for found in by_size.values())) if by_size else set()
    total = {name: sum(found[name] / min(found.values()) for found in by_size.values()) for name in names}
    return sorted(sorted(names), key=total.__getitem__)[:4]


if __name__ == "__main__":
    main()
