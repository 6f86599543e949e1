"""Which collectives still go past safecomm, and from where."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

from torch.distributed import ProcessGroup

from safecomm.sites import outside, place

log = logging.getLogger("safecomm")

_METHODS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast",
    "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""The collectives of a group, which every call from Python ends in."""

_BETWEEN = (
    f"{__name__}.", "torch.distributed.distributed_c10d.", "torch.distributed.c10d_logger.", "contextlib.",
    "typing_extensions.",
)  # fmt: skip


class Strict:
    """Looks at each collective that Python asks a group for, and tells those that did not come by safecomm.

    ``past`` counts them, by method and call site. Calls that C++ makes are not seen: functional collectives, DDP's
    reducer, symmetric memory.
    """

    def __init__(self) -> None:
        self.past: Counter[str] = Counter()
        self._originals = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}
        self._replacements = {name: self._watched(name) for name in self._originals}
        for name, replacement in self._replacements.items():
            setattr(ProcessGroup, name, replacement)

    def remove(self) -> None:
        """Put the group's own methods back. What somebody has put over ours since stays, and goes on to them."""
        for name, original in self._originals.items():
            if vars(ProcessGroup).get(name) is self._replacements[name]:
                setattr(ProcessGroup, name, original)

    def _watched(self, name: str) -> Any:
        bare = getattr(ProcessGroup, name)

        @functools.wraps(bare)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            frame = outside(_BETWEEN)
            if not str(frame.f_globals.get("__name__")).startswith("safecomm."):
                where = f"{name} at {place(frame)}"
                self.past[where] += 1
                if self.past[where] == 1:
                    log.warning("a collective went past safecomm: %s (reported once for this line)", where)
            return bare(group, *args, **kwargs)

        return method
