"""Which engine runs a call: the same answer on every rank, from what the ranks have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from safecomm.arguments import shown
from safecomm.collectives.table import EXCHANGE, GATHER, REDUCE, SCATTER
from safecomm.peers.staging import StagingLayout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Others go to NCCL: of integers, every bit pattern is data, and complex numbers are rare."""

COPIED = frozenset((*DTYPES, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool))
"""What is only copied may have any type that NCCL sums up. Others go on to c10d, which says what is wrong."""

ONE_SHOT, TWO_SHOT, EXACT, RING = "one_shot", "two_shot", "exact", "ring"

KiB, MiB = 1 << 10, 1 << 20


LARGEST = 64 * MiB
"""Bytes of the largest limit of a kernel whose staging grows with it; and of the others, whose counts have 32 bits."""
RING_LARGEST = 1 << 30

ASYNCHRONOUS = {REDUCE: 4 * MiB, SCATTER: MiB, GATHER: MiB}
"""Bytes of the largest asynchronous call that is taken, as the limits count them; any that is exact is.

Calls run on the current stream, so what shall run beside one begins after it. A larger call's time would be missed.
"""


@dataclass(frozen=True)
class LowLatencyLimits:
    """Up to how many bytes a call is taken: of the tensor of ``all_reduce``, else of one rank's part of the larger one.

    0: never. What is larger goes to NCCL. So does an asynchronous or functional call above 4 MiB of ``all_reduce``, or
    above 1 MiB of ``scatter`` and ``gather``, whatever these limits are.
    """

    one_shot: int
    """``all_reduce`` by the one-shot kernel."""
    two_shot: int
    """``all_reduce`` above that by the two-shot kernel."""
    scatter: int
    """``reduce_scatter_tensor``."""
    gather: int
    """``all_gather_into_tensor``."""
    exact: int = 0
    """``all_gather_into_tensor`` up to that bit for bit, in any type."""
    exchange: int = 0
    """``all_to_all_single`` of equal parts, bit for bit, in any type."""
    ring: int = 0
    """``all_reduce`` above ``one_shot`` and ``two_shot`` by the ring, if it is synchronous."""
    ring_scatter: int = 0
    """``reduce_scatter_tensor`` above ``scatter`` by the ring, if it is synchronous."""
    ring_gather: int = 0
    """``all_gather_into_tensor`` above ``gather`` by the ring, if it is synchronous."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            largest = RING_LARGEST if name.startswith(RING) else LARGEST
            if type(value) is not int or not 0 <= value <= largest:
                raise ValueError(f"LowLatencyLimits({name}={shown(value)}): expected bytes, from 0 to {largest}")

    def layout(self, world: int) -> StagingLayout:
        """Return where the staging of a group of ``world`` ranks has what."""
        one_shot = max(self.one_shot, self.scatter, self.gather)
        ring = max(self.ring, self.ring_scatter, self.ring_gather) > 0
        return StagingLayout(world, one_shot, self.two_shot, max(self.exact, self.exchange), ring)

    @property
    def most_asynchronous(self) -> int:
        """Bytes of the largest call of an operator that is taken, of those that may be asynchronous."""
        largest = {REDUCE: max(self.one_shot, self.two_shot), SCATTER: self.scatter, GATHER: self.gather}
        return max(self.exact, *(min(most, ASYNCHRONOUS[collective]) for collective, most in largest.items()))

    def nbytes(self, world: int) -> int:
        """Return the bytes of staging that each of ``world`` ranks needs.

        Examples
        --------
        >>> LowLatencyLimits(one_shot=65536, two_shot=0, scatter=0, gather=0).nbytes(2) == 3 * 65536 + 4096
        True
        """
        return self.layout(world).nbytes

    def kernel(self, collective: str, nbytes: int) -> str | None:
        """Return the kernel that runs a call of ``nbytes``; None: NCCL does.

        Examples
        --------
        >>> LowLatencyLimits(one_shot=65536, two_shot=1 << 20, scatter=0, gather=0).kernel("all_reduce", 100_000)
        'two_shot'
        """
        if collective == EXCHANGE:
            return EXACT if nbytes <= self.exchange else None
        if collective == GATHER and nbytes <= self.exact:
            return EXACT
        least, more, most = {
            REDUCE: (self.one_shot, self.two_shot, self.ring),
            SCATTER: (self.scatter, 0, self.ring_scatter),
            GATHER: (self.gather, 0, self.ring_gather),
        }[collective]
        if nbytes <= least:
            return ONE_SHOT
        return TWO_SHOT if nbytes <= more else RING if nbytes <= most else None


DEFAULTS = {
    2: LowLatencyLimits(
        one_shot=2 * MiB, two_shot=8 * MiB, scatter=8 * MiB, gather=8 * MiB, exact=32 * KiB, exchange=256 * KiB,
        ring=128 * MiB, ring_scatter=32 * MiB, ring_gather=32 * MiB,
    ),
    4: LowLatencyLimits(
        one_shot=256 * KiB, two_shot=8 * MiB, scatter=4 * MiB, gather=4 * MiB, exact=32 * KiB, exchange=128 * KiB,
        ring=64 * MiB, ring_scatter=32 * MiB, ring_gather=32 * MiB,
    ),
    8: LowLatencyLimits(
        one_shot=192 * KiB, two_shot=4 * MiB, scatter=256 * KiB, gather=256 * KiB, exact=16 * KiB, exchange=32 * KiB
    ),
}  # fmt: skip
"""By the largest number of ranks, for Hopper GPUs with NVLink.

Those for 8 follow from a model of what has been measured on fewer. They were not measured, nor was the ring on
more than 4.
"""


def defaults(world: int) -> LowLatencyLimits | None:
    """Return the limits for ``world`` ranks where none were measured; None for too many ranks."""
    fitting = [ranks for ranks in DEFAULTS if world <= ranks]
    return DEFAULTS[min(fitting)] if fitting else None


def read(path: str | Path, world: int) -> LowLatencyLimits | None:
    """Return the limits that ``python -m safecomm tune --low-latency`` has written for ``world`` ranks.

    None if there are none for that many. Raises ValueError if the file is not one of those, OSError if it can't be
    read.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["low_latency"].get(str(world))
        return None if found is None else LowLatencyLimits(**found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has no limits of low_latency(): {str(error)[:200]}") from None
