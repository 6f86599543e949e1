"""Room on a device: programs that wait for their peers must all fit at once, those of all groups together.

A program that has no room begins when another ends. If that one waits for a peer whose own program has no room, because
programs of another group are in its way there, all wait without end. So what each group's kernels need is counted when
low_latency() is switched on. What other kernels take does not matter where they end by themselves. NCCL's wait for
peers too and are not counted: what those and ours keep each other from ends by the timeout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from safecomm.peers.staging import BESIDE, PROGRAMS, SLOT, StagingLayout

FINE = 1 << 20
"""Up to how many bytes a call has small pieces, so that it is many small programs."""

RING_THREADS = 512
"""Of a program of the ring. With 256, calls of 16 MiB took 55.4 us on two H100, with 512 they take 54.8."""

_REGISTERS = 1 << 16  # of a multiprocessor, of every GPU since 2012


def registers(world: int) -> int:
    """Return how many registers the kernels of a group of ``world`` ranks may use in each thread.

    What more than that they would like to have differs between kernels, so the compiler is told.
    """
    return 32 if world == 2 else 64 if world <= 4 else 128


def most_threads(world: int) -> int:
    """Return how many threads all programs of a kernel for small calls have at most: half of what an H100 has room for.

    For five ranks and more, which have twice the registers: nearly all of it.
    """
    return 1 << 17 if world == 2 else 1 << 16


def ring_registers(world: int) -> int:
    """Return how many registers the ring's kernels may use in each thread."""
    return 64 if world <= 4 else 128


def _largest_fine(slots: int, most: int) -> int:
    """Return up to how many bytes a call has small pieces: no more than half of the threads may be theirs."""
    return min(FINE, most // 2 * 16 * slots)


def _small_piece(world: int) -> int:
    """Return the bytes of a small piece.

    2 KiB in place of 4 made all_reduce on two H200 2 to 4 % faster from 64 KiB to 1 MiB, and slower above. 1 KiB did
    not help more there, and made it up to 12 % faster on four H100.
    """
    return 2 << 10 if world == 2 else 1 << 10


def dealt(nbytes: int, world: int, slots: int, most: int) -> tuple[int, int, bool]:
    """Return the bytes of a piece of a call, how many programs its chunks are dealt out to, and whether one to each.

    ``slots``: the pieces of a chunk. ``most``: how many threads all programs may have, one for 16 bytes of a piece.
    """
    piece = _small_piece(world) if nbytes <= _largest_fine(slots, most) else SLOT
    chunks = -(-nbytes // (piece * slots))
    programs = min(PROGRAMS, most // (piece // 16))
    return piece, min(programs, chunks), chunks <= programs


def larger_forms(slots: int, most: int) -> set[int]:
    """Return the bytes of the smallest calls of fp32 that have large pieces, and several chunks in a program."""
    return {_largest_fine(slots, most) + 4, most * 16 * slots + 4}


@dataclass(frozen=True)
class Room:
    """What the kernels of a group need, of which one runs at a time.

    ``kernels``: of small pieces, and of large ones, which part of the device all programs take, and which part of a
    multiprocessor one of them does. ``ring``: which part of a multiprocessor a program of the ring takes. Of those no
    more than one has to fit, by its tickets.
    """

    kernels: tuple[tuple[float, float], ...]
    ring: float


def needed(layout: StagingLayout, most: int, multiprocessors: int, threads: int) -> Room:
    """Return what the kernels of a group need whose small calls have ``most`` threads at the most.

    ``threads``: how many of them a multiprocessor has room for, however few registers they have.
    """
    world = layout.world
    kernels: dict[int, int] = {}  # how many programs, by the bytes of a piece
    for nbytes, slots in ((max(layout.one_shot, layout.exact), 1), (layout.two_shot, world)):
        for largest in (min(nbytes, _largest_fine(slots, most)), nbytes):  # of small pieces, and of all
            piece, programs, _ = dealt(largest, world, slots, most)
            kernels[piece] = max(kernels.get(piece, 0), programs)
    thread = max(registers(world) / _REGISTERS, 1 / threads)  # of a multiprocessor
    parts = {piece: piece // 16 * thread for piece in kernels}
    waiting = {piece: (count + BESIDE) / multiprocessors for piece, count in kernels.items() if count}
    ring = RING_THREADS * max(ring_registers(world) / _REGISTERS, 1 / threads) if layout.ring else 0.0
    return Room(tuple((parts[piece] * count, parts[piece]) for piece, count in waiting.items()), ring)


def fit(groups: Sequence[Room]) -> bool:
    """Return whether what the groups may run at once has room, wherever on the device the programs of others are.

    Programs of one size fill each multiprocessor. Where the smallest are in the way of the largest, a multiprocessor
    that has no room for one of the latter may have as much left as they are larger. And if all groups but one together
    have no more than a multiprocessor has beside a program of the ring, one of them has no more.
    """
    most = [max((part for part, _ in group.kernels), default=0.0) for group in groups]
    total = sum(most)
    if total > 1 or any(group.ring and total - own + group.ring > 1 for group, own in zip(groups, most, strict=True)):
        return False
    for one, other in itertools.permutations(range(len(groups)), 2):
        beside = total - most[one] - most[other]
        for (part, small), (another, large) in itertools.product(groups[one].kernels, groups[other].kernels):
            if large > small and beside + part + another + large - small > 1:
                return False
    return True
