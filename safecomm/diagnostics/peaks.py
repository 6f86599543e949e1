"""The peak of a snapshot, from some moment on: its lines, and what it would be without what was freed but unusable."""

from __future__ import annotations

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
    """Return the peak of ``snapshot`` from the unix time ``since`` on; None if it has none.

    The snapshot forgets what was before.
    """
    peaks = []
    for trace in snapshot.traces:
        if since and trace.began:
            trace.keep(max(since - trace.began, 0.0), trace.duration)
        waits = Waiting(trace.active, trace.unusable)
        at = waits.active.index(max(waits.active))
        lines: Counter[str] = Counter()
        for block in trace.blocks:
            if block.made <= at and (block.completed is None or block.completed > at):
                lines[snapshot.stacks.sites[block.made_at]] += block.size
        if trace.blocks:
            peaks.append(Peak(waits.active[at], max(trace.unusable), waits.gain, dict(lines)))
    return max(peaks, key=lambda one: one.active, default=None)
