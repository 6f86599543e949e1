"""send, recv, isend, irecv, and batches of them.

ProcessGroupNCCL calls ``record_stream`` for each of these, on every version, so that the memory would come back later
than it could: it is given tensors that don't own their memory, for which that does nothing, and the ledger holds the
memory. It does so for ProcessGroupNCCL2 too, where nothing else holds what is received (torch 2.15), and for gloo,
where a handle that is dropped takes its buffer with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm.collectives.general import forwarded, inside, stand_in
from safecomm.collectives.holding import caller, counter, finish, holds_itself, needs_aliases, of_c10d
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import at_once, default_group
from safecomm.collectives.tensors import device_alias, with_memory
from safecomm.core import captures
from safecomm.core.ledger import LEDGER
from safecomm.core.work import Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

if TYPE_CHECKING:
    _Group = c10d.ProcessGroup | None
    _Rank = int | None
    _Tensor = torch.Tensor

    def isend(
        tensor: _Tensor, dst: _Rank = ..., group: _Group = ..., tag: int = ..., group_dst: _Rank = ...
    ) -> Work: ...
    def irecv(
        tensor: _Tensor, src: _Rank = ..., group: _Group = ..., tag: int = ..., group_src: _Rank = ...
    ) -> Work: ...
    def send(
        tensor: _Tensor, dst: _Rank = ..., group: _Group = ..., tag: int = ..., group_dst: _Rank = ...
    ) -> None: ...
    def recv(tensor: _Tensor, src: _Rank = ..., group: _Group = ..., tag: int = ..., group_src: _Rank = ...) -> int: ...

else:
    isend = forwarded(ROWS["isend"])
    irecv = forwarded(ROWS["irecv"])
    send = forwarded(ROWS["send"])
    recv = forwarded(ROWS["recv"])

_SENDS: dict[Callable[..., object], str] = {c10d.isend: "isend", c10d.irecv: "irecv", isend: "isend", irecv: "irecv"}
_c10d_batch = c10d.batch_isend_irecv
_count = counter("batch_isend_irecv")
_BATCH = ROWS["batch_isend_irecv"]
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


def _given(op: c10d.P2POp, alias: bool) -> c10d.P2POp:
    """Return ``op`` with c10d's own function, and if ``alias`` on a tensor that does not own its memory."""
    tensor, function = device_alias(op.tensor) if alias else op.tensor, _c10d_op(op.op)
    if tensor is op.tensor and function is op.op:
        return op
    same = object.__new__(type(op))
    same.__dict__.update(op.__dict__, tensor=tensor, op=function)
    return same


def batch_isend_irecv(p2p_op_list: list[c10d.P2POp]) -> list[Any]:
    if _compiling():
        return _c10d_batch(p2p_op_list)
    _count()
    if LEDGER.nonempty:
        LEDGER.sweep()
    operations = p2p_op_list if isinstance(p2p_op_list, list) else []
    operations = [op for op in operations if isinstance(op, c10d.P2POp)]  # what is none, c10d refuses
    group = (operations[0].group if operations else None) or default_group()
    tensors = [op.tensor for op in operations]
    given = p2p_op_list
    if operations and len(operations) == len(p2p_op_list) and holds_itself(group):
        alias = needs_aliases(group, tensors)
        given = [_given(op, alias) for op in operations]
    if captures.RECORDING:
        captures.check_group("batch_isend_irecv", group, tensors)
    inside.batch = True
    try:
        with at_once(group):
            works = _c10d_batch(given)
    except torch.distributed.DistBackendError as error:
        finish(of_c10d(_BATCH, group, tensors), error)
        raise
    finally:
        inside.batch = False
    if captures.RECORDING:
        captures.note("batch_isend_irecv", group, with_memory(tensors), caller())
    # NCCL answers with one work for all; where each operation has its own, each holds its own tensor.
    shares = [[tensor] for tensor in tensors] if len(works) == len(tensors) else [tensors] * len(works)
    frame = caller()
    return [finish(of_c10d(_BATCH, group, share, frame), work) for work, share in zip(works, shares, strict=True)]


batch_isend_irecv = stand_in(batch_isend_irecv, _c10d_batch)
