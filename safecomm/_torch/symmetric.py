"""Torch's symmetric memory, which peers can write to."""

from __future__ import annotations

from typing import Any

from safecomm._torch.names import C_C10D, look_up


def symmetric_memory() -> Any:
    """Return torch's module of symmetric memory; None if torch has none that works."""
    if not _SYMMETRIC:
        return None
    try:
        import torch.distributed._symmetric_memory as module
    except ImportError:
        return None
    return module if hasattr(module, "empty") and hasattr(module, "rendezvous") else None


_SYMMETRIC = (
    look_up(f"{C_C10D}._SymmetricMemory", None, "low_latency() leaves groups as they are", since="2.5") is not None
)
