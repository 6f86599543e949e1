"""``torch.ops.safecomm``: an all_reduce as an operator, for those who write code for ``torch.compile``.

    safecomm::all_reduce(Tensor x, str op, str group_name) -> Tensor
    safecomm::all_reduce_(Tensor(a!) x, str op, str group_name) -> ()

Both guarantee what the wrapped ``all_reduce`` does: the result is complete in the order of the current stream, so there
is nothing to wait for, and what they use is held. Inside of ``low_latency()`` a call that its engine takes is one
kernel, without a copy; anything else is the backend's, here as there. A compiler sees one operator, whatever runs it.

``op`` is ``"sum"``, ``"avg"``, ``"product"``, ``"min"``, ``"max"``, ``"band"``, ``"bor"`` or ``"bxor"``, and
``group_name`` is ``group.group_name``. ``all_reduce`` returns new contiguous memory of the shape and type of ``x``;
sums and averages have a gradient, of the sum of all ranks' losses. ``all_reduce_`` writes to ``x``, and has none.

Raises ValueError for another ``op``, for a gradient that there is not and on a rank that is not in the group,
SafecommError inside of a coalescing region of the group, and what ``torch.distributed`` raises.

    >>> total = torch.ops.safecomm.all_reduce(tensor, "sum", torch.distributed.group.WORLD.group_name)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import gates as _gates
from safecomm.collectives.holding import finish_read
from safecomm.collectives.table import OPS_BY_NAME as _OPS
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import ENGINES, now, take
from safecomm.core.call_site import program

_ROW = ROWS["all_reduce"]


class _Call(Protocol):
    """What autograd keeps of a call for its backward."""

    call: tuple[str, str]


_WHAT = "torch.ops.safecomm"


def _meant(op: str, group_name: str) -> tuple[Any, Any]:
    """Return the reduce operation and the group that are meant."""
    if op not in _OPS:
        raise ValueError(f"torch.ops.safecomm: the operation {op!r} is none of {', '.join(_OPS)}")
    group: object
    try:
        group = _torch.group_named(group_name)
    except (RuntimeError, ValueError):  # c10d knows none of the name
        group = c10d.GroupMember.NON_GROUP_MEMBER
    if group is None:
        raise ValueError(f"torch.ops.safecomm: torch {torch.__version__} does not tell which group is {group_name!r}")
    return _OPS[op], group


def _new(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _all_reduce(x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    operation, group = _meant(op, group_name)
    with now(_WHAT, group):
        out = _new(x)
        if not ENGINES or not take(_ROW, group, (out, x.detach().contiguous()), operation, program):
            _gates.all_reduce(out.copy_(x), operation, group)
        if x.numel():
            finish_read(_ROW, group, x)
        return out


def _all_reduce_(x: torch.Tensor, op: str, group_name: str) -> None:
    _refuse_gradient(x)
    operation, group = _meant(op, group_name)
    with now(_WHAT, group):
        _gates.all_reduce(x, operation, group)
    if not x.is_inference():
        _torch.increment_versions([x])


# Of a tensor that is conjugated or negated by a bit of its own, and not in its memory. Torch's own fallback would read
# its values before the call begins, and write none back.


def _all_reduce_lazy(x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    with now(_WHAT, _meant(op, group_name)[1]):
        return torch.ops.safecomm.all_reduce(x.resolve_conj().resolve_neg(), op, group_name)  # type: ignore[no-any-return]


def _all_reduce_lazy_(x: torch.Tensor, op: str, group_name: str) -> None:
    with now(_WHAT, _meant(op, group_name)[1]):
        values = x.resolve_conj().resolve_neg()
        torch.ops.safecomm.all_reduce_(values, op, group_name)
        x.copy_(values)


def _refuse_gradient(x: torch.Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("torch.ops.safecomm.all_reduce_ has no gradient; call all_reduce, or detach() the tensor")


def _fake_all_reduce(x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    return _new(x)


def _fake_all_reduce_(x: torch.Tensor, op: str, group_name: str) -> None:
    _refuse_gradient(x)


def _keep(ctx: _Call, inputs: tuple[torch.Tensor, str, str], output: torch.Tensor) -> None:
    ctx.call = inputs[1:]


def _backward(ctx: _Call, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    op, group_name = ctx.call
    if op not in ("sum", "avg"):
        raise ValueError(f"torch.ops.safecomm.all_reduce: {op} has no gradient, only sums and averages have")
    return torch.ops.safecomm.all_reduce(gradient, op, group_name), None, None


def _define() -> None:
    """Define the operators, for the life of the process; what an earlier import has defined, stays."""
    namespace: Any = torch.ops.safecomm
    if hasattr(namespace, "all_reduce"):
        return
    library: Any = torch.library.Library("safecomm", "DEF")  # type: ignore[no-untyped-call]
    namespace.library = library  # its death would take the operators away
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define("all_reduce(Tensor x, str op, str group_name) -> Tensor", tags=tags)
    library.define("all_reduce_(Tensor(a!) x, str op, str group_name) -> ()", tags=tags)
    library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
    library.impl("all_reduce_", _all_reduce_, "CompositeExplicitAutograd")
    for key in ("Conjugate", "Negative"):
        library.impl("all_reduce", _all_reduce_lazy, key)
        library.impl("all_reduce_", _all_reduce_lazy_, key)
    torch.library.register_fake("safecomm::all_reduce", _fake_all_reduce, lib=library)
    torch.library.register_fake("safecomm::all_reduce_", _fake_all_reduce_, lib=library)
    torch.library.register_autograd("safecomm::all_reduce", _backward, setup_context=_keep, lib=library)


_define()
