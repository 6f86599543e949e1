"""The colours of the page and of the plot: the same in both, and told apart by people who are colour-blind.

They are those of Okabe and Ito. Memory that is freed but unusable is hatched besides, so that it needs no colour.
"""

from __future__ import annotations

from collections.abc import Iterable

from safecomm.diagnostics.snapshot import NOWHERE
from safecomm.diagnostics.timeline import OTHERS, Timeline

LINES = ("#0072b2", "#009e73", "#56b4e9", "#cc79a7", "#f0e442", "#e69f00")
"""Of the lines of the program that have the most, or of the call sites."""
OTHER = "#8292a8"
"""Of all other lines, and of what no line is known of."""
SMALL = "#cfd3d9"
"""Of what is too small to draw."""
UNUSABLE, HATCH = "#d55e00", "#f5b183"
"""Of what is freed but unusable."""


def coloured(timelines: Iterable[Timeline]) -> dict[str, int]:
    """Return the lines of the program that have a colour of their own in all ``timelines``, with its number."""
    most: dict[str, int] = {}
    for timeline in timelines:
        for site, nbytes in timeline.holders.items():
            if site not in (OTHERS, *NOWHERE):
                most[site] = max(most.get(site, 0), nbytes)
    return {site: number for number, site in enumerate(sorted(most, key=lambda site: -most[site])[: len(LINES)])}
