"""The list forms as one flat collective, through the arena in use.

c10d's C++ side stages a list through memory of the caching allocator, and copies tensor by tensor. With an arena in
use, a list that is the consecutive slices of one buffer is that buffer, and nothing is copied; another one is staged
through the arena, in one copy.

Whether a call goes this way depends on its types and sizes and on the arena being in use, which have to be the same on
all ranks anyway: the ranks of a call must not run different collectives. So a list that one rank has in one piece and
another has not is no difference. What is unusual goes c10d's own way: uneven sizes, strided tensors, subclasses,
complex or sparse tensors, tensors that require gradients, coalescing regions, dispatch modes, and captures that
safecomm does not see. On NCCL that runs the same collective, or is refused.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, captures
from safecomm.arena.staging import buffer, joined
from safecomm.arena.use import in_use, may_be_used
from safecomm.collectives.call import (
    PLAIN,
    REGIONS,
    caller,
    counter,
    default_group,
    finish,
    forwarded,
    host_alias,
    stand_in,
    storages_of,
)
from safecomm.ledger import LEDGER
from safecomm.streams import HOST

_compiling = torch.compiler.is_dynamo_compiling
_counts = {name: counter(name) for name in ("all_gather", "reduce_scatter", "all_to_all")}

_gather_into = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor
_scatter_into = getattr(c10d, "reduce_scatter_single", None) or c10d.reduce_scatter_tensor

_forward_all_gather = forwarded("all_gather", "tensor_list", "tensor", staged=True)
_forward_reduce_scatter = forwarded("reduce_scatter", "output", "input_list", staged=True, unpolled=True)
_forward_all_to_all = forwarded("all_to_all", "output_tensor_list", "input_tensor_list")


def _flat(group: Any, *tensors: Any) -> bool:
    """Return whether a call on ``tensors``, lists and the tensor that goes with them, can be one flat collective."""
    if not isinstance(group, c10d.ProcessGroup) or group in REGIONS or group in _torch.world.pg_coalesce_state:
        return False
    every: list[Any] = []
    for one in tensors:
        if isinstance(one, list):
            if len(one) != group.size():
                return False
            every += one
        else:
            every.append(one)
    first = every[0]
    if type(first) not in PLAIN or first.layout is not torch.strided or first.dtype.is_complex or not first.numel():
        return False
    if _torch.dispatch_modes() or torch.overrides.has_torch_function(every):
        return False
    device, dtype, shape = first.device, first.dtype, first.shape
    for one in every:
        if (
            type(one) not in PLAIN
            or one.requires_grad
            or one.dtype is not dtype
            or one.shape != shape
            or one.device != device
            or one.layout is not torch.strided
            or not one.is_contiguous()
        ):
            return False
    index = first.get_device()
    if device.type not in ("cpu", "cuda") or in_use(index) is None:
        return False
    if index != HOST and (stream := LEDGER.current(index)):
        capture = LEDGER.streams.capture(stream)
        return not capture or capture in captures.RECORDING
    return True


def _run(op: str, launch: Any, output: torch.Tensor, source: torch.Tensor, *arguments: Any, async_op: bool,
         group: Any) -> Any:  # fmt: skip
    """Launch a flat collective, hold what it uses, and return what the caller gets."""
    _counts[op]()
    if captures.RECORDING:
        captures.check_group(op, group, [output, source])
    given = (host_alias(output), host_alias(source)) if async_op else (output, source)
    result = launch(*given, *arguments, group=group, async_op=async_op)
    frame = caller()
    _note(op, group, [output, source], frame)
    return finish(op, result, group, [output, source], frame, p2p=_unpolled(op, group, output))


def _copied(op: str, group: Any, tensors: list[Any]) -> None:
    """Hold ``tensors``, which were copied from or into on the current stream, as long as that can still happen."""
    frame = caller()
    _note(op, group, tensors, frame)
    index = tensors[0].get_device()
    if index != HOST:
        LEDGER.trail(op, group, index, storages_of(tensors), frame)


def _note(op: str, group: Any, tensors: list[Any], frame: types.FrameType) -> None:
    if captures.RECORDING:
        captures.note(op, group, tensors, frame)


def _unpolled(op: str, group: Any, tensor: torch.Tensor) -> bool:
    """Return whether the backend does not tell when the call is over: gloo's reduce_scatter does not (torch 2.13)."""
    return op == "reduce_scatter" and tensor.is_cpu and _torch.backend_name(group, "cpu") == "gloo"


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    to = group or default_group()
    if _compiling() or not may_be_used() or not _flat(to, tensor, tensor_list):
        return _forward_all_gather(tensor_list, tensor, group=group, async_op=async_op)
    if LEDGER.busy:
        LEDGER.sweep()
    whole = joined(tensor_list)
    if async_op and (whole is None or tensor.is_cpu):
        # Whoever waits, and whenever, the results have to be in the list by then: c10d copies on its own stream. NCCL
        # runs the same for both, which gloo does not.
        return _forward_all_gather(tensor_list, tensor, group=group, async_op=async_op)
    output = buffer((len(tensor_list), *tensor.shape), tensor) if whole is None else whole
    work = _run("all_gather", _gather_into, output.view(-1), tensor.view(-1), async_op=async_op, group=to)
    if whole is None:
        _torch.foreach_copy(tensor_list, list(output.unbind()))
        _copied("all_gather", to, tensor_list)
    return work


def reduce_scatter(
    output: Any, input_list: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    to = group or default_group()
    if (
        _compiling()
        or not may_be_used()
        or not _flat(to, output, input_list)
        or (output.is_cpu and output.dtype.is_floating_point)  # gloo adds in another order for one flat tensor
    ):
        return _forward_reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    if LEDGER.busy:
        LEDGER.sweep()
    source = joined(input_list)
    if source is None:
        source = buffer((len(input_list), *output.shape), output)
        _torch.foreach_copy(list(source.unbind()), input_list)
        _copied("reduce_scatter", to, input_list)
    return _run("reduce_scatter", _scatter_into, output.view(-1), source.view(-1), op, async_op=async_op, group=to)


def all_to_all(output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> Any:
    # In pieces it is c10d's, which sends from and receives into the lists themselves: staging could only be slower. The
    # ranks may differ in that, because one flat call sends and receives the same.
    to = group or default_group()
    if (
        _compiling()
        or not may_be_used()
        or not _flat(to, output_tensor_list, input_tensor_list)
        or (output := joined(output_tensor_list)) is None
        or (source := joined(input_tensor_list)) is None
    ):
        return _forward_all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    if LEDGER.busy:
        LEDGER.sweep()
    return _run("all_to_all", _all_to_all_single, output, source, async_op=async_op, group=to)


def _all_to_all_single(output: Any, source: Any, *, group: Any, async_op: bool) -> Any:
    return c10d.all_to_all_single(output, source, None, None, group, async_op)


all_gather = stand_in(all_gather, c10d.all_gather)
reduce_scatter = stand_in(reduce_scatter, c10d.reduce_scatter)
all_to_all = stand_in(all_to_all, c10d.all_to_all)
