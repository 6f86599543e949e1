"""How collectives are launched directly, without c10d's own functions, where those are torch's."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
import typing_extensions

from safecomm._torch.names import C10D, C_C10D, NOT_DIRECT, is_class, look_up
from safecomm._torch.registry import HOOKS

_LAYERS = (os.path.dirname(torch.__file__) + os.sep, contextlib.__file__, typing_extensions.__file__)


def is_torchs(function: object) -> bool:
    """Return whether ``function`` is torch's own, and not what other code has put in its place before us.

    What a function wraps must be torch's, too.
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_LAYERS):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


ASYNC_OPTION: bool = look_up(
    f"{C10D}.AllreduceOptions.asyncOp", None, "every call counts as asynchronous, as before torch 2.7",
    lambda found: type(c10d.AllreduceOptions().asyncOp) is bool, since="2.7",
) is not None  # fmt: skip
"""Whether the options say that a call is asynchronous (torch 2.7 and later).

Before, each call was asynchronous, and c10d's function waited for its work. The reasons for the change are in
https://github.com/pytorch/pytorch/pull/150398.
"""


class Launch(NamedTuple):
    """A collective, and the class of its options.

    The collective is a method of a group where groups have :data:`HOOKS` and in :data:`COALESCED`, and of a backend
    elsewhere.
    """

    function: Any
    options: Any


def _launch(
    method: str, tensors: int, options: str, newer: str = "", sizes: int = 0, *, by_group: bool = HOOKS
) -> Launch | None:
    if by_group and hasattr(c10d.ProcessGroup, newer):
        # c10d's own function calls the newer method, too.
        method = newer
    owner = "ProcessGroup" if by_group else "Backend"
    # pybind writes a method's arguments into its docstring. There must be so many tensors, or lists of tensors or of
    # such lists, then so many lists of sizes, and then the options.
    given = rf"(, \w+: \S*Tensor\]*){{{tensors}}}(, \w+: [^,]*\]){{{sizes}}}, opts: \S+\.{options} = "
    signature = re.compile(rf"\(self: \S+\.{owner}{given}")
    function = look_up(
        f"{C_C10D}.{owner}.{method}", None, NOT_DIRECT,
        lambda found: callable(found) and signature.search(found.__doc__ or "") is not None,
    )  # fmt: skip
    kind = look_up(f"{C10D}.{options}", None, NOT_DIRECT, _takes_what_it_took)
    return None if function is None or kind is None else Launch(function, kind)


def _takes_what_it_took(kind: object) -> bool:
    if not is_class(kind):
        return False
    options = kind()
    if hasattr(options, "reduceOp"):
        options.reduceOp = c10d.ReduceOp.SUM
    if ASYNC_OPTION:
        options.asyncOp = True
    return True


all_reduce: Launch | None = _launch("allreduce", 1, "AllreduceOptions")
all_gather: Launch | None = _launch("_allgather_base", 2, "AllgatherOptions", "all_gather_single")
reduce_scatter: Launch | None = _launch("_reduce_scatter_base", 2, "ReduceScatterOptions", "reduce_scatter_single")
all_to_all: Launch | None = _launch("alltoall", 2, "AllToAllOptions")
all_to_all_single: Launch | None = _launch("alltoall_base", 2, "AllToAllOptions", "all_to_all_single", sizes=2)
broadcast: Launch | None = _launch("broadcast", 1, "BroadcastOptions")
reduce: Launch | None = _launch("reduce", 1, "ReduceOptions")
all_gather_list: Launch | None = _launch("allgather", 2, "AllgatherOptions")
reduce_scatter_list: Launch | None = _launch("reduce_scatter", 2, "ReduceScatterOptions")
gather: Launch | None = _launch("gather", 2, "GatherOptions")
scatter: Launch | None = _launch("scatter", 2, "ScatterOptions")
"""How each of these collectives is launched directly; None where torch lacks what that takes."""

COALESCED: dict[str, Launch | None] = {
    "all_reduce": _launch("allreduce_coalesced", 1, "AllreduceCoalescedOptions", by_group=True),
    "all_gather": _launch(
        "allgather_into_tensor_coalesced", 2, "AllgatherOptions", "all_gather_single_coalesced", by_group=True
    ),
    "reduce_scatter": _launch(
        "reduce_scatter_tensor_coalesced", 2, "ReduceScatterOptions", "reduce_scatter_single_coalesced", by_group=True
    ),
}
"""How many calls are launched as one. A group launches them everywhere, because backends lack some of these methods."""
