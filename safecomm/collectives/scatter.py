"""broadcast and scatter."""

from __future__ import annotations

from safecomm.collectives.call import forwarded

broadcast = forwarded("broadcast", "tensor")
scatter = forwarded("scatter", "tensor", "scatter_list")
