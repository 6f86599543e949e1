"""send, recv, isend, irecv, and batches of them.

ProcessGroupNCCL calls ``record_stream`` for each of these, on every version, so that the memory would come back later
than it could: it is given tensors that don't own their memory, for which that does nothing, and the ledger holds the
memory. It does so for ProcessGroupNCCL2 too, where nothing else holds what is received (torch 2.15), and for gloo,
where a handle that is dropped takes its buffer with it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import captures
from safecomm.collectives.call import (
    at_once,
    caller,
    counter,
    default_group,
    device_alias,
    finish,
    forwarded,
    holds_itself,
    inside,
    shelves,
    stand_in,
    with_memory,
)
from safecomm.ledger import LEDGER

isend = forwarded("isend", "tensor", p2p=True)
irecv = forwarded("irecv", "tensor", p2p=True)
send = forwarded("send", "tensor", p2p=True)
recv = forwarded("recv", "tensor", p2p=True)

_SENDS = {isend.__wrapped__: "isend", irecv.__wrapped__: "irecv", isend: "isend", irecv: "irecv"}
_c10d_batch = c10d.batch_isend_irecv
_count = counter("batch_isend_irecv")
_compiling = torch.compiler.is_dynamo_compiling


def _c10d_op(op: Any) -> Any:
    """Return c10d's own ``isend`` or ``irecv`` for ours or torch's: what its module has under the name just now."""
    name = _SENDS.get(op)
    return op if name is None else getattr(c10d, name)


def _with_c10d_op(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_c10d_op(args[0]), *args[1:]), kwargs
    if "op" in kwargs:
        return args, {**kwargs, "op": _c10d_op(kwargs["op"])}
    return args, kwargs


class P2POp(c10d.P2POp):
    """One send or receive of a batch: ``torch.distributed.P2POp``, made with safecomm's functions or with torch's.

    c10d tells sends from receives by the identity of its own functions, so those are what ``op`` is.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> P2POp:
        args, kwargs = _with_c10d_op(args, kwargs)
        return super().__new__(cls, *args, **kwargs)  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _with_c10d_op(args, kwargs)
        super().__init__(*args, **kwargs)


P2POp.__signature__ = inspect.signature(c10d.P2POp)  # type: ignore[attr-defined]
P2POp.__module__ = "safecomm"


def _given(op: Any, alias: bool) -> Any:
    """Return ``op`` with c10d's own function, and if ``alias`` on a tensor that does not own its memory."""
    tensor, function = device_alias(op.tensor) if alias else op.tensor, _c10d_op(op.op)
    if tensor is op.tensor and function is op.op:
        return op
    same = object.__new__(type(op))
    same.__dict__.update(op.__dict__, tensor=tensor, op=function)
    return same


def batch_isend_irecv(p2p_op_list: Any) -> Any:
    if _compiling():
        return _c10d_batch(p2p_op_list)
    _count()
    if LEDGER.busy:
        LEDGER.sweep()
    operations = p2p_op_list if isinstance(p2p_op_list, list) else []
    operations = [op for op in operations if isinstance(op, c10d.P2POp)]  # what is none, c10d refuses
    group = (operations[0].group if operations else None) or default_group()
    tensors = [op.tensor for op in operations]
    given = p2p_op_list
    if operations and len(operations) == len(p2p_op_list) and holds_itself(group):
        alias = shelves(group, tensors)
        given = [_given(op, alias) for op in operations]
    if captures.RECORDING:
        captures.check_group("batch_isend_irecv", group, tensors)
    inside.batch = True
    try:
        with at_once(group):
            works = _c10d_batch(given)
    except torch.distributed.DistBackendError:
        finish("batch_isend_irecv", None, group, tensors, caller(), p2p=True)
        raise
    finally:
        inside.batch = False
    if captures.RECORDING:
        captures.note("batch_isend_irecv", group, with_memory(tensors), caller())
    # NCCL answers with one work for all; where each operation has its own, each holds its own tensor.
    shares = [[tensor] for tensor in tensors] if len(works) == len(tensors) else [tensors] * len(works)
    frame = caller()
    return [
        finish("batch_isend_irecv", work, group, share, frame, staged=False, p2p=True)
        for work, share in zip(works, shares, strict=True)
    ]


batch_isend_irecv = stand_in(batch_isend_irecv, _c10d_batch)
