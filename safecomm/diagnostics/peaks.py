"""The peak of a snapshot, from some moment on: its lines, and what it would be without what was freed but unusable."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from safecomm.diagnostics.report import Waiting
from safecomm.diagnostics.snapshot import Snapshot


@dataclass
class Peak:
    """What was active when most was, on the device with the most. Bytes."""

    active: int
    unusable: int
    """Freed but unusable, at the most."""
    gain: int
    """Bytes by which the peak would be lower with every block usable as soon as it was freed."""
    lines: dict[str, int]
    """Of the blocks that were active at the peak, by the line that allocated them: their sum is ``active``."""


def peak_of(snapshot: Snapshot, since: float = 0.0) -> Peak | None:
    """Return the peak of ``snapshot`` from the unix time ``since`` on; None if it has no history of that."""
    peaks = []
    for trace in snapshot.traces:
        # What was active as it began counts too.
        start = max(bisect_right(trace.times, since - trace.began) - 1, 0) if trace.began else 0
        active, unusable = trace.active, trace.unusable[start:]
        waits = Waiting(active[start:], unusable)
        at = active.index(max(waits.active), start)
        lines: Counter[str] = Counter()
        for block in trace.blocks:
            if block.made <= at and (block.completed is None or block.completed > at):
                lines[snapshot.stacks.sites[block.made_at]] += block.size
        if trace.blocks:
            peaks.append(Peak(active[at], max(unusable), waits.gain, dict(lines)))
    return max(peaks, key=lambda one: one.active, default=None)
