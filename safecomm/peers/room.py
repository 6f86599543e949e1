"""Room on a device: programs that wait for their peers must all fit at once, those of all groups together.

A program that has no room begins when another ends. If that one waits for a peer whose own program has no room, because
programs of another group are in its way there, all wait without end. So each group's largest kernel is counted when
low_latency() is switched on. What other kernels take does not matter where they end by themselves. NCCL's wait for
peers too and are not counted: what those and ours keep each other from ends by the timeout.
"""

from __future__ import annotations

import torch

from safecomm.core.streams import HOST

THREADS = 256
"""Of a program of the small kernels, which is what is counted."""

_REGISTERS = 1 << 16  # of a multiprocessor, of every GPU since 2012


def registers(world: int) -> int:
    """Return how many registers the kernels of a group of ``world`` ranks may use in each thread.

    What more than that they would like to have differs between kernels, so the compiler is told. For the most ranks,
    half as many programs fit.
    """
    return 64 if world <= 4 else 128


def part(index: int, programs: int, world: int) -> float:
    """Return which part of the room on device ``index`` so many programs of a group of ``world`` ranks take."""
    if index == HOST:
        return 0.0
    on_each = _REGISTERS // (registers(world) * THREADS)
    return programs / (on_each * int(torch.cuda.get_device_properties(index).multi_processor_count))
