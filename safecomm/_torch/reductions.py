"""The operators by which a reduction reaches its backend, whoever calls it, and how they are replaced.

c10d's functions in Python, its functional collectives and DDP's reducer in C++ all come down to them. What calls a
backend itself does not, as safecomm's own direct calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm._torch.kernels import Override
from safecomm._torch.names import C_C10D, look_up

REDUCTIONS: dict[str, int] = {
    "allreduce_": 1,
    "allreduce_coalesced_": 1,
    "reduce_": 1,
    "reduce_scatter_": 2,
    "_reduce_scatter_base_": 2,
    "reduce_scatter_tensor_coalesced_": 2,
}
"""The operators of ``c10d`` that reduce, with how many arguments they have before the group."""

REDUCTION_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA")

_COSTS = "invariant() can't be used"

_unbox_group: Any = look_up(f"{C_C10D}.ProcessGroup.unbox", None, _COSTS)
_box_work: Any = look_up(f"{C_C10D}.Work.boxed", None, _COSTS)
_make_work: Any = look_up(f"{C_C10D}._create_work_from_future", None, _COSTS)
_schemas: Any = look_up("torch._C._jit_get_all_schemas", None, _COSTS)
_get_kernel: Any = look_up("torch.library.get_kernel", None, _COSTS, since="2.9")
_OPERATIONS: Any = c10d.ReduceOp.RedOpType
_BY_NUMBER = {int(op): op for op in _OPERATIONS.__members__.values()}


@functools.cache
def why_not_replaced() -> str:
    """Return why the reductions can't be replaced in this torch; ``""`` if they can."""
    if None in (_unbox_group, _box_work, _make_work, _schemas, _get_kernel):
        return f"torch {torch.__version__} does not give out its kernels, or the works that they return"
    try:
        if torch.classes.c10d.ReduceOp().op() != int(_OPERATIONS.SUM):
            raise ValueError("it has another number")
    except Exception as error:
        return f"torch {torch.__version__} does not tell which operation a reduction is asked for: {error}"
    found = {
        schema.name.removeprefix("c10d::")
        for schema in _schemas()
        if schema.name.startswith("c10d::") and any(str(one.type).endswith(".ReduceOp") for one in schema.arguments)
    }
    other = sorted(found - set(REDUCTIONS))
    return f"torch {torch.__version__} has reductions that safecomm does not know: {', '.join(other)}" if other else ""


def replace_reduction(name: str, key: str, ours: Callable[..., object]) -> Override:
    """Let ``ours`` be the kernel of an operator for a dispatch key; it is given torch's kernel, and its arguments."""

    def kernel(*args: Any) -> object:
        return ours(override.original, *args)

    override = Override(f"c10d::{name}", key, kernel, needs_original=True)
    return override


def unboxed(group: Any, op: Any) -> tuple[c10d.ProcessGroup, Any]:
    """Return the group and the operation that an operator was given; the operation is one of ``ReduceOp.RedOpType``."""
    return _unbox_group(group), _BY_NUMBER.get(op.op())


def boxed(work: c10d.Work) -> Any:
    """Return ``work`` as an operator returns it."""
    return _box_work(work)


def complete_work(tensors: list[torch.Tensor]) -> c10d.Work:
    """Return the work of a call that is complete in the order of the current stream, whose results are ``tensors``."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    work: c10d.Work = _make_work(future)
    return work
