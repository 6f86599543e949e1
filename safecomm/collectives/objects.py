"""Collectives of objects, and ``monitored_barrier``: torch's own, which :func:`safecomm.bucketed` does not overtake.

c10d makes them of collectives of tensors, whose memory it keeps to itself, so there is nothing to hold. What was
deferred is launched before they read their arguments, which may be deferred tensors.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm.collectives.general import stand_in
from safecomm.collectives.takers import BUCKETS, at_once

NAMES = (
    "all_gather_object", "broadcast_object_list", "gather_object", "monitored_barrier", "recv_object_list",
    "scatter_object_list", "send_object_list",
)  # fmt: skip

if TYPE_CHECKING:
    from torch.distributed import all_gather_object as all_gather_object
    from torch.distributed import broadcast_object_list as broadcast_object_list
    from torch.distributed import gather_object as gather_object
    from torch.distributed import monitored_barrier as monitored_barrier
    from torch.distributed import recv_object_list as recv_object_list
    from torch.distributed import scatter_object_list as scatter_object_list
    from torch.distributed import send_object_list as send_object_list


def _after_buckets(name: str) -> Any:
    """Return c10d's function ``name``, which launches first what is deferred on its group."""
    original = getattr(c10d, name)
    place = list(inspect.signature(original).parameters).index("group")
    compiling = torch.compiler.is_dynamo_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        if not BUCKETS or compiling():
            return original(*args, **kwargs)
        with at_once(args[place] if place < len(args) else kwargs.get("group")):
            return original(*args, **kwargs)

    return stand_in(call, original)


for _name in NAMES:
    globals()[_name] = _after_buckets(_name)
