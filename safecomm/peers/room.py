"""Room on a device: programs that wait for their peers must all fit at once, those of all groups together.

A program that has no room begins when another ends. If that one waits for a peer whose own program has no room, because
programs of another group are in its way there, all wait without end. So each group's largest kernel is counted when
low_latency() is switched on. What other kernels take does not matter where they end by themselves. NCCL's wait for
peers too and are not counted: what those and ours keep each other from ends by the timeout.
"""

from __future__ import annotations

import torch

from safecomm.core.streams import HOST

WIDEST = 256
"""Threads of the widest program of a kernel for small calls."""

RING_THREADS = 512
"""Of a program of the ring. With 256, calls of 16 MiB took 55.4 us on two H100, with 512 they take 54.8."""

_REGISTERS = 1 << 16  # of a multiprocessor, of every GPU since 2012


def registers(world: int) -> int:
    """Return how many registers the kernels of a group of ``world`` ranks may use in each thread.

    What more than that they would like to have differs between kernels, so the compiler is told. For the most ranks,
    half as many programs fit.
    """
    return 32 if world == 2 else 64 if world <= 4 else 128


def most_threads(world: int) -> int:
    """Return how many threads the largest kernel for small calls of a group of ``world`` ranks has, in all programs.

    A program waits for the peers' program of its number, so all must fit on the device at once.
    """
    return 1 << 17 if world == 2 else 1 << 16


def ring_registers(world: int) -> int:
    """Return how many registers the ring's kernels may use in each thread."""
    return 64 if world <= 4 else 128


def part(index: int, threads: int, world: int, *, ring: bool) -> float:
    """Return which part of the room on device ``index`` so many threads of a group of ``world`` ranks take.

    Of the ring no more than one program has to fit, by its tickets. What all other groups have leaves room for that on
    some multiprocessor, wherever their programs are, if they have no more than what is left of a multiprocessor beside
    it.
    """
    if index == HOST:
        return 0.0
    everywhere = _REGISTERS * int(torch.cuda.get_device_properties(index).multi_processor_count)
    small = threads * registers(world) / everywhere
    return max(small, RING_THREADS * ring_registers(world) / _REGISTERS) if ring else small
