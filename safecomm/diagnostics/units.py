"""Bytes and seconds as text."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 1 << 20


def each(counts: Mapping[str, int]) -> str:
    """Return how many calls there were, and how many of each name, the most first, as people read them."""
    names = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{sum(counts.values())} calls of collectives ({names or 'none'})"


def mib(nbytes: float) -> str:
    """Return ``nbytes`` as people read it."""
    if abs(nbytes) < MIB:
        return f"{nbytes / 1024:.1f} KiB" if abs(nbytes) >= 1024 else f"{nbytes:.0f} B"
    return f"{nbytes / MIB:.1f} MiB"


def span(seconds: float) -> str:
    """Return ``seconds`` as people read them."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
