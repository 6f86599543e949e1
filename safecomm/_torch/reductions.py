"""The operators by which a reduction reaches its backend, whoever calls it, and how they are replaced.

c10d's functions in Python, its functional collectives and DDP's reducer in C++ all come down to them. What calls a
backend itself does not, as safecomm's own direct calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm._torch.kernels import Override
from safecomm._torch.names import C_C10D, is_class, look_up

F = TypeVar("F", bound=Callable[..., object])


class Signature(NamedTuple):
    """What an operator is given beside the group, the operation, a flag and a timeout; and what it returns."""

    before: int
    """How many arguments come before the group: tensors, or lists of them."""
    between: int = 0
    """How many come between the operation and the flag."""
    returns_first: bool = False
    """It returns its first argument and the work, and not the work alone."""


REDUCTIONS: dict[str, Signature] = {
    "allreduce_": Signature(1, between=1, returns_first=True),
    "allreduce_coalesced_": Signature(1),
    "reduce_": Signature(1, between=2),
    "reduce_scatter_": Signature(2, returns_first=True),
    "_reduce_scatter_base_": Signature(2, returns_first=True),
    "reduce_scatter_tensor_coalesced_": Signature(2),
}
"""The operators of ``c10d`` that reduce."""

_ABOVE_ALL_DEVICES = "BackendSelect"
"""The key of a kernel that is asked before that of any device, and that c10d has none at."""

_COSTS = "invariant() can't be used"

_unbox_group: Any = look_up(f"{C_C10D}.ProcessGroup.unbox", None, _COSTS)
_box_work: Any = look_up(f"{C_C10D}.Work.boxed", None, _COSTS)
_make_work: Any = look_up(f"{C_C10D}._create_work_from_future", None, _COSTS)
_schemas: Any = look_up("torch._C._jit_get_all_schemas", None, _COSTS)
_without: Any = look_up("torch._C.DispatchKeySet.remove", None, _COSTS)
_implement: Any = look_up(
    "torch.library.Library.impl", None, _COSTS, lambda found: "with_keyset" in inspect.signature(found).parameters
)  # fmt: skip
_redispatch: Any = look_up("torch._ops.OpOverload.redispatch", None, _COSTS)
_FRAMES = "torch._C._dynamo.eval_frame"
_UNFOLLOWED = "torch.compile follows what invariant() does in code that it runs as it is, and may fail in it"
_Strategy: Any = look_up(f"{_FRAMES}._FrameExecStrategy", None, _UNFOLLOWED, is_class, since="2.7")
_Action: Any = look_up(f"{_FRAMES}._FrameAction", None, _UNFOLLOWED, is_class, since="2.7")
_set_strategy: Any = look_up(f"{_FRAMES}.set_code_exec_strategy", None, _UNFOLLOWED, since="2.7")
_OPERATIONS: Any = c10d.ReduceOp.RedOpType
_BY_NUMBER = {int(op): op for op in _OPERATIONS.__members__.values()}


@functools.cache
def why_not_replaced() -> str:
    """Return why the reductions can't be replaced in this torch; ``""`` if they can."""
    if None in (_unbox_group, _box_work, _make_work, _schemas, _without, _implement, _redispatch):
        return f"torch {torch.__version__} does not let its kernels be replaced, or make works that they return"
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


def replace_reduction(name: str, ours: Callable[..., object]) -> Override:
    """Let ``ours`` be asked for an operator, on all devices; it is given torch's kernel, and the arguments.

    Torch's kernel is called without the interpreter's lock, which a thread may need that the call waits for.
    """
    redispatch = getattr(torch.ops.c10d, name).default.redispatch
    key = getattr(torch._C.DispatchKey, _ABOVE_ALL_DEVICES)

    def kernel(keys: Any, *args: Any) -> object:
        return ours(functools.partial(redispatch, keys.remove(key)), *args)

    return Override(f"c10d::{name}", _ABOVE_ALL_DEVICES, unfollowed(kernel), wants_keys=True)


def unfollowed(function: F) -> F:
    """Let ``torch.compile`` follow neither ``function`` nor what it calls, in code that it runs as it is."""
    if None not in (_Strategy, _Action, _set_strategy):
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    return function


def unboxed(group: Any, op: Any) -> tuple[c10d.ProcessGroup, Any]:
    """Return the group and the operation that an operator was given; the operation is one of ``ReduceOp.RedOpType``."""
    return _unbox_group(group), _BY_NUMBER.get(op.op())


def boxed(work: c10d.Work) -> Any:
    """Return ``work`` as an operator returns it."""
    return _box_work(work)


def complete_work() -> c10d.Work:
    """Return the work of a synchronous call that is complete in the order of the current stream."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    work: c10d.Work = _make_work(future)
    return work
