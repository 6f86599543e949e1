"""How long collectives ran on a device while nothing else did."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

_COMMUNICATION = re.compile(r"nccl|^one_shot|^two_shot|^ring_|^scatter_pieces|^combine", re.IGNORECASE)
"""Kernels of NCCL, and of safecomm's peers."""


def exposed(events: Iterable[FunctionEvent]) -> dict[str, float] | None:
    """Return ms of collectives, and of those the ms beside no other kernel, of the kernels that a profile has.

    ``events``: as ``torch.profiler.profile.events()`` has them. None if no kernel is among them.
    """
    communication: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in events:
        if event.device_type.name == "CUDA":
            span = event.time_range.start, event.time_range.end
            (communication if _COMMUNICATION.search(event.name) else others).append(span)
    if not communication and not others:
        return None
    ours = _union(communication)
    beside = _overlap(ours, _union(others))
    whole = sum(end - start for start, end in ours)
    return {"ms": round(whole / 1e3, 3), "exposed ms": round((whole - beside) / 1e3, 3)}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return ``spans``, of which none overlaps another."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _overlap(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return how long two lists of spans overlap, each in order."""
    total, place = 0.0, 0
    for start, end in ones:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(start, others[at][0])
            at += 1
    return total
