"""all_to_all_single."""

from __future__ import annotations

from safecomm.collectives.call import forwarded

all_to_all_single = forwarded("all_to_all_single", "output", "input")
