"""c10d's coalescing regions: what it takes to open and end one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from safecomm._torch.names import C10D, Never, is_class, look_up

_WITHOUT_REGIONS = "coalescing regions are torch's own, and hold their memory as torch does"
IllegalWork: type = look_up(f"{C10D}._IllegalWork", Never, _WITHOUT_REGIONS, is_class)
"""The class of what a collective returns inside a coalescing region: any use of that raises ValueError."""

CollOp: Any = look_up(
    f"{C10D}._CollOp", None, _WITHOUT_REGIONS,
    lambda found: found(print, None, None, None, None).op is print,
)  # fmt: skip
"""A call that a coalescing region has collected, and launches when it ends."""

CoalescingManager: Any = look_up(
    f"{C10D}._CoalescingManager", None, _WITHOUT_REGIONS, lambda found: found().works == []
)
"""What a coalescing region yields: the list of its works."""

coalescing_manager: Any = look_up(f"{C10D}._coalescing_manager", None, _WITHOUT_REGIONS)
"""c10d's coalescing region; None where torch lacks something that safecomm needs to open a region itself."""

if IllegalWork is Never or CollOp is None or CoalescingManager is None:
    coalescing_manager = None

_end_coalescing: Callable[[ProcessGroup, torch.device], Work | None] | None = look_up(
    f"{C10D}.ProcessGroup._end_coalescing", None, "a coalescing region with device= that fails leaves NCCL in it"
)


def end_coalescing(group: Any, device: torch.device) -> Work | None:
    """End the region that C++ has begun, and return the work of what was launched; None if nothing was."""
    return None if _end_coalescing is None else _end_coalescing(group, device)
