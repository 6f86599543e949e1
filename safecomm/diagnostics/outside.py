"""Memory outside of the allocator: what a device uses beyond what torch's caching allocator has reserved.

The driver tells how much of a device is used, and not by what. Here the difference is put down to what safecomm or
torch can name: the memory of NCCL's communicators, and the staging of ``low_latency()``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from safecomm import _torch
from safecomm.collectives.takers import ENGINES
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST

NCCL = "NCCL, "
"""How the names of the parts begin that NCCL has told."""

_REST = "CUDA's context, other processes"


@dataclass(frozen=True)
class Outside:
    """What the devices use on which this process has started CUDA, in bytes, all of them together."""

    used: int
    """As the driver counts it: with CUDA's context, and with what other processes use on the same devices."""
    reserved: int
    """What torch's caching allocator has of it."""
    # Without it a report would have no hash, because a dict has none.
    parts: dict[str, int] = field(default_factory=dict, hash=False)
    """What the rest is known to be, by what uses it.

    NCCL's by group, as NCCL counts it: torch 2.12 and later tells it, with NCCL 2.29.7 and later. The staging of
    ``low_latency()`` by group, without what the driver rounds it up by.
    """

    @property
    def total(self) -> int:
        """What the devices use and the caching allocator has not reserved."""
        return self.used - self.reserved

    @property
    def unattributed(self) -> int:
        """What is left of that once the parts are taken off.

        CUDA's contexts and kernels, other processes, and NCCL's memory where torch does not tell it.
        """
        return self.total - sum(self.parts.values())

    def figures(self) -> dict[str, int]:
        """Return the figures of a table by their names: the whole, and indented what it is made of."""
        told = any(name.startswith(NCCL) for name in self.parts)
        rest = _REST if told else f"NCCL (not told by this torch), {_REST}"
        of_it = {**self.parts, rest: self.unattributed}
        return {"outside of the allocator": self.total} | {f"  {name}": nbytes for name, nbytes in of_it.items()}


def outside() -> Outside | None:
    """Return what the devices of this process use outside of the caching allocator; None where CUDA is not started.

    Waits for no device, starts CUDA on none, and may be called during a capture. It costs a call of the driver for
    each device. None, too, where the driver does not answer, as after an illegal access.

    Examples
    --------
    >>> outside() is None or outside().used > 0
    True
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    used = reserved = 0
    try:
        # The driver would start CUDA on any other device that it is asked about.
        devices = [index for index in range(torch.cuda.device_count()) if _torch.has_context(index)]
        with LEDGER.streams.relaxed_capture_mode():
            for index in devices:
                free, total = torch.cuda.mem_get_info(index)
                used += total - free
                reserved += torch.cuda.memory_reserved(index)
    except RuntimeError:
        return None
    return Outside(used, reserved, _parts()) if devices else None


def _parts() -> dict[str, int]:
    """Return the bytes of what is known to be outside of the caching allocator, by what uses them."""
    found: dict[str, int] = {}
    for group in _torch.all_groups():
        nbytes = _torch.nccl_memory_of(group)
        if nbytes is not None:
            _add(found, f"{NCCL}{_named(group)}", nbytes)
    for of, engine in tuple(ENGINES.items()):
        # What stands in for an engine has no staging, and that of an engine on the host is not on a device.
        layout = getattr(engine, "layout", None)
        if layout is not None and engine.index != HOST:
            # Not what the engine says that it takes, because its table is of the caching allocator.
            _add(found, f"low_latency() staging, {_named(of)}", layout.nbytes)
    return found


def _add(found: dict[str, int], name: str, nbytes: int) -> None:
    found[name] = found.get(name, 0) + nbytes


def _named(group: object) -> str:
    return f"group {_torch.group_name(group) or 'without a name'}"


__all__ = ["Outside", "outside"]
