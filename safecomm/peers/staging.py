"""Staging: the memory of a group that its ranks store into, at the same places on all of them.

One block a rank, made and exchanged once, before anything is captured, and never grown. It begins free: full of the
bits of negative zero, which the kernels know as "nothing has arrived" (``kernels.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from safecomm import _torch

SLOT = 4 << 10
"""Bytes that one program sends to one peer at a time: 16 for each of its 256 threads."""

SECTIONS = 3
"""Sections of a chunk, which take turns."""

WIDTHS = {2: torch.int16, 4: torch.int32}
"""Bytes of an element, and the integers of that width. Each has staging of its own: their negative zeros differ."""


def free(width: int) -> int:
    """Return the bits of negative zero of floating-point numbers of ``width`` bytes, as a signed integer."""
    return int(torch.iinfo(WIDTHS[width]).min)


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

    def _lanes(self) -> Iterator[tuple[tuple[int, bool], int, int]]:
        """Yield the key of each lane, its bytes, and its chunks."""
        for width in WIDTHS:
            for two_shot in (False, True):
                chunks = self.chunks(two_shot)
                yield (width, two_shot), chunks * SECTIONS * self.world * SLOT * (2 if two_shot else 1), chunks

    def area(self, width: int, two_shot: bool) -> int:
        """Return where a lane begins, in bytes from the beginning of the block."""
        before = 0
        for key, nbytes, _ in self._lanes():
            if key == (width, two_shot):
                break
            before += nbytes
        return before

    def turns(self, width: int, two_shot: bool) -> int:
        """Return the number of chunks of the lanes before this one."""
        before = 0
        for key, _, chunks in self._lanes():
            if key == (width, two_shot):
                break
            before += chunks
        return before

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's block: ``2 x 3 x world x (one_shot + 2 x two_shot / world)``, rounded up to whole slots."""
        return sum(nbytes for _, nbytes, _ in self._lanes())

    @property
    def all_chunks(self) -> int:
        """The number of chunks of all lanes."""
        return sum(chunks for _, _, chunks in self._lanes())

    def clear(self, block: torch.Tensor) -> None:
        """Make all of ``block`` free."""
        for (width, two_shot), nbytes, _ in self._lanes():
            begin = self.area(width, two_shot)
            block[begin : begin + nbytes].view(WIDTHS[width]).fill_(free(width))


class SymmetricStaging:
    """A rank's block, in symmetric memory, and once it has met its peers, where their blocks are mapped here.

    Raises RuntimeError if torch or the machine can't.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.block = _torch.symmetric_memory().empty(layout.nbytes, dtype=torch.uint8, device=device)
        layout.clear(self.block)
        self.bases: list[int] = []

    def meet(self, group: Any) -> None:
        """Exchange the blocks, on all ranks of ``group`` together."""
        self._handle = _torch.symmetric_memory().rendezvous(self.block, group)  # keeps the peers' memory mapped
        self.bases = list(self._handle.buffer_ptrs)
