"""all_gather and reduce_scatter of lists: as one flat collective where that pays.

c10d's C++ side stages a list through memory of its own, twice the size of the result, and copies tensor by tensor. With
an arena in use, a list that is the consecutive slices of one buffer is that buffer, and nothing is staged or copied. On
NCCL both ways run the same collective, so a rank whose list is in pieces, and goes c10d's way, takes part in it all the
same. For small lists c10d's way is the faster one (``benchmarks/arena_lists.py``), and gloo has another one for each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, captures
from safecomm.arena.staging import joined
from safecomm.arena.use import in_use, may_be_used
from safecomm.collectives.call import PLAIN, REGIONS, caller, counter, default_group, finish, forwarded, stand_in
from safecomm.ledger import LEDGER

PAYS = 16 << 20
"""Bytes of each tensor of the list from which on one flat collective is faster."""

_compiling = torch.compiler.is_dynamo_compiling
_count_all_gather, _count_reduce_scatter = counter("all_gather"), counter("reduce_scatter")
_gather_into = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor
_scatter_into = getattr(c10d, "reduce_scatter_single", None) or c10d.reduce_scatter_tensor

_forward_all_gather = forwarded("all_gather", "tensor_list", "tensor", staged=True)
_forward_reduce_scatter = forwarded("reduce_scatter", "output", "input_list", staged=True, unpolled=True)


def whole_of(tensors: Any, tensor: Any, group: Any) -> torch.Tensor | None:
    """Return the buffer that ``tensors`` are the slices of; None if a call on them and ``tensor`` is to be c10d's."""
    if (
        type(tensor) not in PLAIN
        or not tensor.is_cuda
        or tensor.layout is not torch.strided
        or tensor.nbytes < PAYS
        or in_use(tensor.get_device()) is None
        or not isinstance(tensors, list)
        or not isinstance(group, c10d.ProcessGroup)
        or _torch.backend_name(group, "cuda") != "nccl"
        or len(tensors) != group.size()
        or group in REGIONS
        or group in _torch.world.pg_coalesce_state
        or tensor.dtype.is_complex
        or not tensor.is_contiguous()
        or _torch.dispatch_modes()
        or torch.overrides.has_torch_function((tensor, *tensors))
        # With it c10d compares the names of what the ranks call, which differ.
        or _torch.calls_are_compared()
    ):
        return None
    for one in (tensor, *tensors):
        if type(one) not in PLAIN or one.requires_grad or one.is_neg():
            return None
        if one.shape != tensor.shape or one.dtype is not tensor.dtype or one.device != tensor.device:
            return None
    whole = joined(tensors)
    return whole if whole is not None and apart(tensor, whole, group.rank()) else None


def apart(tensor: torch.Tensor, whole: torch.Tensor, rank: int) -> bool:
    """Return whether ``tensor`` lies outside of ``whole``, or where NCCL runs in place: at the rank's own slice."""
    start, place = whole.data_ptr(), tensor.data_ptr()
    if place == start + rank * tensor.nbytes:
        return True
    return place + tensor.nbytes <= start or start + whole.nbytes <= place


def _run(op: str, launch: Any, output: torch.Tensor, source: torch.Tensor, *arguments: Any, async_op: bool,
         group: Any) -> Any:  # fmt: skip
    """Launch a flat collective, hold what it uses, and return what the caller gets."""
    tensors = [output, source]
    if captures.RECORDING:
        captures.check_group(op, group, tensors)
    result = launch(output.view(-1), source.view(-1), *arguments, group=group, async_op=async_op)
    frame = caller()
    if captures.RECORDING:
        captures.note(op, group, tensors, frame)
    return finish(op, result, group, tensors, frame)


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    to = group or default_group()
    if _compiling() or not may_be_used() or (whole := whole_of(tensor_list, tensor, to)) is None:
        return _forward_all_gather(tensor_list, tensor, group=group, async_op=async_op)
    _count_all_gather()
    if LEDGER.busy:
        LEDGER.sweep()
    return _run("all_gather", _gather_into, whole, tensor, async_op=async_op, group=to)


def reduce_scatter(
    output: Any, input_list: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    to = group or default_group()
    if _compiling() or not may_be_used() or (whole := whole_of(input_list, output, to)) is None:
        return _forward_reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    _count_reduce_scatter()
    if LEDGER.busy:
        LEDGER.sweep()
    return _run("reduce_scatter", _scatter_into, output, whole, op, async_op=async_op, group=to)


all_gather = stand_in(all_gather, c10d.all_gather)
reduce_scatter = stand_in(reduce_scatter, c10d.reduce_scatter)
