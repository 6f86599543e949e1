"""send, recv, isend, irecv, and batches of them.

On NCCL, c10d's C++ side still calls ``record_stream`` for each of these (torch 2.13), so that the memory comes back
later than it could; what safecomm adds is the hold, also for gloo, where a handle that is dropped takes its buffer with
it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm.collectives.call import caller, default_group, finish, forwarded, stand_in
from safecomm.ledger import LEDGER

isend = forwarded("isend", "tensor", p2p=True)
irecv = forwarded("irecv", "tensor", p2p=True)
send = forwarded("send", "tensor", p2p=True)
recv = forwarded("recv", "tensor", p2p=True)

_c10d_op = {isend: c10d.isend, irecv: c10d.irecv}
_c10d_batch = c10d.batch_isend_irecv
_compiling = torch.compiler.is_dynamo_compiling


def _with_c10d_op(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_c10d_op.get(args[0], args[0]), *args[1:]), kwargs
    if "op" in kwargs:
        return args, {**kwargs, "op": _c10d_op.get(kwargs["op"], kwargs["op"])}
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


def batch_isend_irecv(p2p_op_list: Any) -> Any:
    if _compiling():
        return _c10d_batch(p2p_op_list)
    if LEDGER.busy:
        LEDGER.sweep()
    works = _c10d_batch(p2p_op_list)
    tensors = [op.tensor for op in p2p_op_list]
    group = p2p_op_list[0].group or default_group()
    # NCCL answers with one work for all; where each operation has its own, each holds its own tensor.
    shares = [[tensor] for tensor in tensors] if len(works) == len(tensors) else [tensors] * len(works)
    frame = caller()
    return [
        finish("batch_isend_irecv", work, group, share, frame, staged=False, p2p=True)
        for work, share in zip(works, shares, strict=True)
    ]


batch_isend_irecv = stand_in(batch_isend_irecv, _c10d_batch)
