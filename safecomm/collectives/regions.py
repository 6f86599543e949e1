"""The coalescing regions that are open: what each has collected."""

from __future__ import annotations

from typing import Any

import torch

from safecomm import _torch
from safecomm.collectives.guards import PLAIN
from safecomm.core.work import MemberWork

_Illegal = _torch.IllegalWork


class PlainCall(_torch.CollOp or object):  # type: ignore[misc]
    """A call that was collected here: of plain tensors, on a direct route."""


class Uses:
    """What a region has used before its end, and what its end makes to hold it."""

    __slots__ = ("aliases", "staged", "tensors", "works")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.aliases: list[torch.Tensor] = []
        self.works: list[MemberWork] = []
        self.staged: bool = False

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what c10d launches in place of ``tensor``: another tensor of the same memory.

        ProcessGroupNCCL keeps a reference to a coalesced tensor until the group's next collective, because it puts it
        on another work than the one that is waited for (pytorch #187565). The alias is left without memory at the
        release.
        """
        if type(tensor) not in PLAIN or not _torch.has_plain_keys(tensor):
            return tensor  # what c10d would refuse is left to c10d
        if tensor.is_inference() != torch.is_inference_mode_enabled() or _torch.transform() is not None:
            return tensor
        alias = tensor.detach()
        self.aliases.append(alias)
        return alias


class Region(list[Any]):
    """A coalescing region of ours that is open: the calls that c10d launches at its end, and what that holds."""

    # Of the class and without an __init__: a region of one call, which is what Megatron makes for each bucket, needs
    # nothing of its own, and making it is a good part of what it costs.
    ordered: bool = True
    used: Uses | None = None

    @property
    def uses(self) -> Uses:
        """What it has used so far, to be added to."""
        used = self.used
        if used is None:
            used = self.used = Uses()
        return used

    def collect(
        self, function: object, tensor: torch.Tensor, other: torch.Tensor | None, op: object, async_op: bool
    ) -> object:
        """Do what c10d's ``function`` does here: note the call, which the end of the region launches and holds."""
        self.append(PlainCall(function, tensor, other, op, None))
        return _Illegal() if async_op else None


REGIONS: dict[Any, list[Any]] = _torch.world.pg_coalesce_state
"""c10d's table of the coalescing regions that are open, by group: what each has collected. Ours are :class:`Region`.

Where ranks are threads, each of these has a table of c10d's own. There ours are in both, so that a gate asks one.
"""
