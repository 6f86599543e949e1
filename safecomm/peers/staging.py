"""Staging: the memory of a group that its ranks store into, at the same places on all of them.

One block a rank, made and exchanged once, before anything is captured, and never grown. It begins free: full of words
that the kernels know as "nothing has arrived" (``kernels.py``), but for what is sent bit for bit and by the ring, which
has numbers of its own (``ring.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from safecomm import _torch

SLOT = 4 << 10
"""Bytes of the largest piece that one program sends to one peer at a time: 16 for each of its threads."""

PROGRAMS = 1 << 10
"""Programs of the largest grid of a kernel for small calls."""

RING_PROGRAMS = 256
"""Programs of the ring's kernels, each with staging of its own."""

RING_PHASES = 2
"""Phases of a program's staging of the ring, which take turns."""

FLAG = 32
"""Bytes of a flag of the ring, of which it uses four: a sector of the cache for each."""

MOST = 8
"""Ranks that a kernel knows addresses for."""

BESIDE = 2
"""Programs of a kernel that touch no data: one tells the peers that a call has begun, one sees that theirs have."""

PHASES = 3
"""Phases of a channel: each call uses the slots of one of them, in turn."""

FREE = 0xFFE55A5A - (1 << 32)
"""The word of 4 bytes that stands where nothing has arrived, as a signed integer.

It is a quiet NaN in fp32, and its upper half is one in bf16 and in fp16, with a payload that no operation makes.
"""

OTHER = FREE ^ (1 << 16)
"""What is sent in its place: another NaN, of another payload. So nothing but the payload of a NaN is ever changed."""


@dataclass(frozen=True)
class StagingLayout:
    """What lies where in a block: channels, which serve all small calls; packets; and the places of the ring.

    A channel has room for a large piece of every peer in each of its phases. The one-shot kernel sends a large piece
    through each, and the two-shot kernel through two of them one for every rank; small ones, as many as are as large.

    ``one_shot``: the largest number of bytes that a rank sends to a peer in one call. ``two_shot``: the largest tensor
    of the two-shot kernel, in bytes. ``exact``: the largest number of bytes that a rank sends to a peer bit for bit.
    ``ring``: whether behind them there are the places and the flags of the ring, as many for tensors of any size.
    """

    world: int
    one_shot: int
    two_shot: int
    exact: int = 0
    ring: bool = False

    @property
    def ring_piece(self) -> int:
        """Bytes of a place: what a program of the ring sends to a peer at a time."""
        return 16 << 10 if self.world == 2 else 8 << 10 if self.world <= 4 else 4 << 10

    @property
    def _ring_places(self) -> int:
        return RING_PROGRAMS * RING_PHASES * (self.world - 1) * 2 if self.ring else 0

    @property
    def ring_area(self) -> int:
        """Where the places of the ring begin, in bytes from the beginning of the block."""
        return self.begun + SLOT

    @property
    def ring_flags(self) -> int:
        """Where the flags of the ring begin."""
        return self.ring_area + self._ring_places * self.ring_piece

    def chunks(self, two_shot: bool) -> int:
        """Return the number of chunks of the largest call of one of the kernels."""
        if two_shot:
            return -(-self.two_shot // (SLOT * self.world))
        return -(-self.one_shot // SLOT)

    @property
    def channels(self) -> int:
        """The number of channels, which lie at the beginning of the block."""
        return max(self.chunks(False), 2 * self.chunks(True))

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's block: ``3 x (world - 1) x max(one_shot, 2 x two_shot / world)``.

        For bit for bit copies ``6 x (world - 1) x exact`` more, and a slot.

        And of the ring ``256 x 2 x 2 x (world - 1)`` places of 16 KiB for two ranks, 8 for four, 4 for eight, and as
        many flags of 32 bytes.
        """
        return self.ring_flags + self._ring_places * FLAG

    @property
    def stride(self) -> int:
        """Bytes of a phase, of which the first begins where the block does."""
        return self.channels * (self.world - 1) * SLOT

    @property
    def exact_stride(self) -> int:
        """Bytes of a phase of packets, which are twice as long as what they carry."""
        return -(-self.exact // SLOT) * (self.world - 1) * 2 * SLOT

    @property
    def exact_area(self) -> int:
        """Where packets begin, in bytes from the beginning of the block."""
        return PHASES * self.stride

    @property
    def begun(self) -> int:
        """Where the number of calls lies that the rank has begun, in bytes from the beginning of the block."""
        return self.exact_area + PHASES * self.exact_stride

    @property
    def counters(self) -> int:
        """The number of counters of calls: of each program of the largest grid, and of the one that tells."""
        return PROGRAMS + 1

    def clear(self, block: torch.Tensor) -> None:
        """Make all of ``block`` free, and all flags those of no iteration."""
        block[: self.exact_area].view(torch.int32).fill_(FREE)
        block[self.exact_area :].zero_()  # no call that is exact has the number 0


class Staging(Protocol):
    """A rank's block that its peers can store into, and once it has met them, the addresses of all their blocks."""

    block: torch.Tensor
    bases: list[int]

    def meet(self, group: ProcessGroup) -> None:
        """Exchange the blocks, on all ranks of ``group`` together."""


class SymmetricStaging:
    """A rank's block, in symmetric memory, and once it has met its peers, where their blocks are mapped here.

    Raises RuntimeError if torch or the machine can't.
    """

    def __init__(self, layout: StagingLayout, device: torch.device) -> None:
        self.block: torch.Tensor = _torch.symmetric_memory().empty(layout.nbytes, dtype=torch.uint8, device=device)
        layout.clear(self.block)
        self.bases: list[int] = []

    def meet(self, group: ProcessGroup) -> None:
        """Exchange the blocks, on all ranks of ``group`` together."""
        self._handle = _torch.symmetric_memory().rendezvous(self.block, group)  # keeps the peers' memory mapped
        self.bases = list(self._handle.buffer_ptrs)
