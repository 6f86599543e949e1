"""Staging: the memory of a group that its ranks store into, at the same places on all of them.

One block a rank, made and exchanged once, before anything is captured, and never grown. It begins free: full of the
bits of negative zero, which the kernels know as "nothing has arrived" (``kernels.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from safecomm import _torch

SLOT = 4 << 10
"""Bytes that one program sends to one peer at a time: 16 for each of its 256 threads."""

MOST = 8
"""Ranks that a kernel knows addresses for."""

SECTIONS = 3
"""Sections of a chunk, which take turns."""

WIDTHS = {2: torch.int16, 4: torch.int32}
"""Bytes of an element, and the integers of that width. Each has staging of its own: their negative zeros differ."""


def free(width: int) -> int:
    """Return the bits of negative zero of floating-point numbers of ``width`` bytes, as a signed integer."""
    return int(torch.iinfo(WIDTHS[width]).min)


class _Lane(NamedTuple):
    begin: int  # bytes from the beginning of the block
    end: int
    turns: int  # the number of chunks of the lanes before


@dataclass(frozen=True)
class Layout:
    """What lies where in a block: for each width, a lane of the one-shot kernel and one of the two-shot kernel.

    ``one_shot``: the largest number of bytes that a rank sends to a peer in one call. ``two_shot``: the largest tensor
    of the two-shot kernel, in bytes.
    """

    world: int
    one_shot: int
    two_shot: int

    def chunks(self, two_shot: bool) -> int:
        """Return the number of chunks of a lane."""
        if two_shot:
            return -(-self.two_shot // (SLOT * self.world))
        return -(-self.one_shot // SLOT)

    def _lanes(self) -> dict[tuple[int, bool], _Lane]:
        """Return the lanes, by the width and whether it is the two-shot kernel's, in their order."""
        lanes = {}
        begin = turns = 0
        for width in WIDTHS:
            for two_shot in (False, True):
                chunks = self.chunks(two_shot)
                nbytes = chunks * SECTIONS * self.world * SLOT * (2 if two_shot else 1)
                lanes[width, two_shot] = _Lane(begin, begin + nbytes, turns)
                begin += nbytes
                turns += chunks
        return lanes

    def area(self, width: int, two_shot: bool) -> int:
        """Return where a lane begins, in bytes from the beginning of the block."""
        return self._lanes()[width, two_shot].begin

    def turns(self, width: int, two_shot: bool) -> int:
        """Return the number of chunks of the lanes before this one."""
        return self._lanes()[width, two_shot].turns

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's block: ``2 x 3 x world x (one_shot + 2 x two_shot / world)``, rounded up to whole slots."""
        return max(lane.end for lane in self._lanes().values())

    @property
    def all_chunks(self) -> int:
        """The number of chunks of all lanes."""
        return len(WIDTHS) * (self.chunks(False) + self.chunks(True))

    def clear(self, block: torch.Tensor) -> None:
        """Make all of ``block`` free."""
        for (width, _), lane in self._lanes().items():
            block[lane.begin : lane.end].view(WIDTHS[width]).fill_(free(width))


class SymmetricStaging:
    """A rank's block, in symmetric memory, and once it has met its peers, where their blocks are mapped here.

    Raises RuntimeError if torch or the machine can't.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.block: Any = _torch.symmetric_memory().empty(layout.nbytes, dtype=torch.uint8, device=device)
        layout.clear(self.block)
        self.bases: list[int] = []

    def meet(self, group: Any) -> None:
        """Exchange the blocks, on all ranks of ``group`` together."""
        self._handle = _torch.symmetric_memory().rendezvous(self.block, group)  # keeps the peers' memory mapped
        self.bases = list(self._handle.buffer_ptrs)
