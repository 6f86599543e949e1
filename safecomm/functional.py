"""Out-of-place, autograd-aware collectives, and the regions of tensor parallelism that are made of them.

Guarantees, for all of them:

- What they return is new memory, of the arena in use (``use_arena``) where there is one. The argument is not changed.
- Gradients are those of the sum of all ranks' losses, as ``torch.distributed.nn.functional``'s are; they can be
  differentiated again. All ranks have to run the backward, in the same order, because it is made of collectives too.
- Nothing is kept for the backward, which needs no tensor of the forward. What they stage through goes back as soon as
  the collective is ordered.

Each takes ``group`` (default: the default group). With ``async_op`` a collective returns an :class:`AsyncResult`, whose
``wait()`` gives the tensor; its backward is not asynchronous. Tensors are held as by the wrapped collectives, and
ordered against the stream that is current at the call, or at the wait.

Arguments that no collective takes raise what ``torch.distributed`` raises; sizes that can't be divided by the size of
the group, and dimensions that are none, raise ValueError or IndexError before anything is launched.

    >>> from safecomm import functional
    >>> h = functional.copy_to_tensor_parallel_region(x, group)
    >>> y = functional.reduce_from_tensor_parallel_region(h @ w, group)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import torch
import torch.distributed as dist

from safecomm import _torch, arguments
from safecomm.arena.staging import buffer, contiguous
from safecomm.collectives import gates as _gates
from safecomm.collectives import holding as _holding
from safecomm.collectives.table import ROWS, Row
from safecomm.collectives.takers import default_group as _default_group
from safecomm.collectives.takers import now
from safecomm.core.work import Work

__all__ = [
    "AsyncResult", "all_gather", "all_reduce", "all_to_all", "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region", "gather_from_tensor_parallel_region", "reduce_from_tensor_parallel_region",
    "reduce_scatter", "reduce_scatter_to_sequence_parallel_region", "scatter_to_tensor_parallel_region",
]  # fmt: skip

_LINEAR = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)

# The name that torch 2.13 knows them by, and does not warn of.
_gather_into = getattr(_gates, ROWS["all_gather_single"].name)
_scatter_into = getattr(_gates, ROWS["reduce_scatter_single"].name)
_COPY = Row("functional.all_gather", ())

_OP = arguments.is_a("a torch.distributed.ReduceOp", dist.ReduceOp, dist.ReduceOp.RedOpType)
_ROWS = arguments.Rule(
    "a list of numbers of rows, 0 or more",
    lambda splits: (
        isinstance(splits, Collection)
        and not isinstance(splits, (str, bytes))
        and all(arguments.WHOLE.fits(n) and n >= 0 for n in splits)
    ),
)

_Finish = Callable[[], None]
_Launched = tuple[torch.Tensor, Work | None, _Finish | None]
"""The output, the work if the call was asynchronous, and what is left to do after the wait."""

if TYPE_CHECKING:
    _Group = dist.ProcessGroup | None
    _Op = dist.ReduceOp | dist.ReduceOp.RedOpType
    _Running = list[Work | _Finish | None]
    _Given = TypeVar("_Given")

    class _Call(Protocol[_Given]):
        """What autograd keeps of a call for its backward."""

        call: _Given

    class _OfGroup(Protocol):
        """As :class:`_Call`, where the group is all."""

        group: _Group


class AsyncResult:
    """A running collective and its result.

    Made by the functions of this module. Keeps the result alive, and what the collective uses until it is ordered.

    Examples
    --------
    >>> result = functional.all_reduce(tensor, async_op=True)
    >>> total = result.wait()
    """

    __slots__ = ("_finish", "_output", "work")

    work: Work | None
    """The handle of the collective."""

    def __init__(self, output: torch.Tensor, work: Work | None, finish: _Finish | None) -> None:
        self._output = output
        self.work = work
        self._finish = finish

    def __repr__(self) -> str:
        return f"<AsyncResult of {'a call that is over' if self.work is None else self.work}>"

    def wait(self) -> torch.Tensor:
        """Order the current stream after the collective (CUDA), or block until it is over (CPU); return the result.

        May be called again. Raises as :meth:`safecomm.Work.wait` does.
        """
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._output


def __dir__() -> list[str]:
    return sorted(__all__)


# --- what is launched ----------------------------------------------------------------------------------------
#
# Detached, because gloo's threads record what they make of a tensor that requires a gradient, and the functions below
# are what autograd has to see.


def _launch_all_reduce(tensor: torch.Tensor, op: _Op, group: _Group, asynchronous: bool) -> _Launched:
    output = buffer(tensor.shape, tensor).copy_(tensor)
    return output, _gates.all_reduce(output, op, group, asynchronous), None


def _launch_all_gather(tensor: torch.Tensor, dim: int, group: _Group, asynchronous: bool) -> _Launched:
    world = dist.get_world_size(group)
    shape = list(tensor.shape)
    shape[dim] *= world
    output = buffer(shape, tensor)
    source = contiguous(tensor.detach())
    if dim == 0 or world == 1:
        return output, _gather_into(output, source, group, asynchronous), None
    staged = buffer((world * tensor.shape[0], *tensor.shape[1:]), tensor)
    work = _gather_into(staged, source, group, asynchronous)
    # Not the output itself, which autograd is about to make part of a graph.
    inner = output.detach()
    part = tuple(tensor.shape)

    def finish() -> None:
        inner.view(*part[:dim], world, *part[dim:]).copy_(staged.view(world, *part).movedim(0, dim))
        if (index := _torch.index_of(staged)) >= 0:  # maybe on another stream than they are of
            # A frame that was taken outside would be part of a cycle, and keep all of it.
            call = _holding.Call(_COPY, group or _default_group(), [staged, inner], index, sys._getframe())
            _holding.finish(call, None)

    if asynchronous:
        return output, work, finish
    finish()
    return output, work, None


def _launch_reduce_scatter(tensor: torch.Tensor, dim: int, op: _Op, group: _Group, asynchronous: bool) -> _Launched:
    world = dist.get_world_size(group)
    shape = list(tensor.shape)
    shape[dim] //= world
    output = buffer(shape, tensor)
    if dim == 0 or world == 1:
        source = contiguous(tensor.detach())
    else:
        parts = tensor.unflatten(dim, (world, shape[dim])).movedim(dim, 0)  # type: ignore[no-untyped-call]
        source = buffer(parts.shape, tensor).copy_(parts).view(world * shape[0], *shape[1:])
    return output, _scatter_into(output, source, op, group, asynchronous), None


def _launch_all_to_all(
    tensor: torch.Tensor, output_splits: list[int] | None, input_splits: list[int] | None, group: _Group,
    asynchronous: bool,
) -> _Launched:  # fmt: skip
    rows = tensor.shape[0] if output_splits is None else sum(output_splits)
    output = buffer((rows, *tensor.shape[1:]), tensor)
    source = contiguous(tensor.detach())
    return output, _gates.all_to_all_single(output, source, output_splits, input_splits, group, asynchronous), None


def _part(tensor: torch.Tensor, dim: int, group: _Group) -> torch.Tensor:
    """Return a copy of this rank's part of ``tensor``."""
    size = tensor.shape[dim] // dist.get_world_size(group)
    mine = tensor.narrow(dim, dist.get_rank(group) * size, size)
    return buffer(mine.shape, tensor).copy_(mine)


# --- autograd --------------------------------------------------------------------------------------------------
#
# Contexts get no tensors and no works, so that no graph keeps memory for them. What the caller of an asynchronous call
# has to wait for leaves the forward through a list.


def _result(launched: _Launched, running: _Running | None) -> torch.Tensor:
    output, work, finish = launched
    if running is not None:
        running += [work, finish]
    return output


class _Function(torch.autograd.Function):
    """A function whose first arguments are the tensor and the group; each call begins as :func:`now` says."""

    @classmethod
    def apply(cls, tensor: torch.Tensor, group: _Group, *given: Any) -> torch.Tensor:
        with now("safecomm.functional", group):
            return super().apply(tensor, group, *given)  # type: ignore[no-untyped-call, no-any-return]


class _AllReduce(_Function):
    @staticmethod
    def forward(
        ctx: _Call[tuple[_Group, _Op]], tensor: torch.Tensor, group: _Group, op: _Op, running: _Running | None
    ) -> torch.Tensor:
        ctx.call = group, op
        return _result(_launch_all_reduce(tensor, op, group, running is not None), running)

    @staticmethod
    def backward(ctx: _Call[tuple[_Group, _Op]], *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllReduce.apply(gradients[0], *ctx.call, None), None, None, None


class _AllGather(_Function):
    @staticmethod
    def forward(
        ctx: _Call[tuple[_Group, int]], tensor: torch.Tensor, group: _Group, dim: int, running: _Running | None
    ) -> torch.Tensor:
        ctx.call = group, dim
        return _result(_launch_all_gather(tensor, dim, group, running is not None), running)

    @staticmethod
    def backward(ctx: _Call[tuple[_Group, int]], *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, dim = ctx.call
        scattered = _ReduceScatter.apply(gradients[0], group, dim, dist.ReduceOp.SUM, None)
        return scattered, None, None, None


class _ReduceScatter(_Function):
    @staticmethod
    def forward(
        ctx: _Call[tuple[_Group, int, _Op]],
        tensor: torch.Tensor,
        group: _Group,
        dim: int,
        op: _Op,
        running: _Running | None,
    ) -> torch.Tensor:
        ctx.call = group, dim, op
        return _result(_launch_reduce_scatter(tensor, dim, op, group, running is not None), running)

    @staticmethod
    def backward(ctx: _Call[tuple[_Group, int, _Op]], *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, dim, op = ctx.call
        gathered = _AllGather.apply(gradients[0], group, dim, None)
        if op == dist.ReduceOp.AVG:
            gathered = gathered / dist.get_world_size(group)
        return gathered, None, None, None, None


class _AllToAll(_Function):
    @staticmethod
    def forward(
        ctx: _Call[tuple[_Group, list[int] | None, list[int] | None]],
        tensor: torch.Tensor,
        group: _Group,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        running: _Running | None,
    ) -> torch.Tensor:
        ctx.call = group, input_splits, output_splits  # the other way round
        return _result(_launch_all_to_all(tensor, output_splits, input_splits, group, running is not None), running)

    @staticmethod
    def backward(
        ctx: _Call[tuple[_Group, list[int] | None, list[int] | None]], *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(gradients[0], *ctx.call, None), None, None, None, None


class _CopyTo(_Function):
    @staticmethod
    def forward(ctx: _OfGroup, tensor: torch.Tensor, group: _Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _OfGroup, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ReduceFrom.apply(gradients[0], ctx.group, None), None


class _ReduceFrom(_Function):
    @staticmethod
    def forward(ctx: _OfGroup, tensor: torch.Tensor, group: _Group, running: _Running | None) -> torch.Tensor:
        ctx.group = group
        return _result(_launch_all_reduce(tensor, dist.ReduceOp.SUM, group, running is not None), running)

    @staticmethod
    def backward(ctx: _OfGroup, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _CopyTo.apply(gradients[0], ctx.group), None, None


class _GatherFrom(_Function):
    @staticmethod
    def forward(
        ctx: _Call[tuple[_Group, int]], tensor: torch.Tensor, group: _Group, dim: int, running: _Running | None
    ) -> torch.Tensor:
        ctx.call = group, dim
        return _result(_launch_all_gather(tensor, dim, group, running is not None), running)

    @staticmethod
    def backward(ctx: _Call[tuple[_Group, int]], *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ScatterTo.apply(gradients[0], *ctx.call), None, None, None


class _ScatterTo(_Function):
    @staticmethod
    def forward(ctx: _Call[tuple[_Group, int]], tensor: torch.Tensor, group: _Group, dim: int) -> torch.Tensor:
        ctx.call = group, dim
        return _part(tensor, dim, group)

    @staticmethod
    def backward(ctx: _Call[tuple[_Group, int]], *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _GatherFrom.apply(gradients[0], *ctx.call, None), None, None


def _run(function: type[_Function], async_op: bool, *arguments: Any) -> torch.Tensor | AsyncResult:
    if not async_op:
        return function.apply(*arguments, None)
    running: list[Any] = []
    output = function.apply(*arguments, running)
    return AsyncResult(output, *running)


def _check(name: str, tensor: torch.Tensor, group: _Group, async_op: bool = False, op: _Op = dist.ReduceOp.SUM) -> str:
    """Refuse arguments that no collective of this module takes; return what messages call it."""
    call = f"functional.{name}"
    arguments.check(call, arguments.TENSOR, tensor=tensor)
    arguments.check(call, arguments.GROUP, group=group)
    arguments.check(call, arguments.FLAG, async_op=async_op)
    arguments.check(call, _OP, op=op)
    if op not in _LINEAR and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{call}(op={op}): only sums and averages have a gradient; detach() the tensor")
    return call


def _dim_of(
    name: str,
    tensor: torch.Tensor,
    group: _Group,
    dim: int,
    async_op: bool = False,
    op: _Op = dist.ReduceOp.SUM,
    *,
    cut: bool = False,
) -> int:
    """As :func:`_check`; return ``dim`` counted from the front, which with ``cut`` each rank gets a part of."""
    call = _check(name, tensor, group, async_op, op)
    arguments.check(call, arguments.WHOLE, dim=dim)
    parts = dist.get_world_size(group) if cut else 1
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"{call}(dim={arguments.shown(dim)}): the tensor has {tensor.dim()} dimensions")
    if tensor.shape[dim] % parts:
        raise ValueError(f"{call}(dim={dim}): the size {tensor.shape[dim]} can't be divided by the {parts} ranks")
    return dim % tensor.dim()


# --- collectives -----------------------------------------------------------------------------------------------


@overload
def all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = ...,
    group: dist.ProcessGroup | None = ...,
    *,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = ...,
    group: dist.ProcessGroup | None = ...,
    *,
    async_op: Literal[True],
) -> AsyncResult: ...
def all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | AsyncResult:
    """Return the sum of all ranks' ``tensor``, or what ``op`` makes of them. Its gradient is reduced in the same way.

    Raises ValueError for an ``op`` without a gradient on a tensor that requires one.

    Examples
    --------
    >>> total = functional.all_reduce(tensor)
    """
    _check("all_reduce", tensor, group, async_op, op)
    return _run(_AllReduce, async_op, tensor, group, op)


@overload
def all_gather(
    tensor: torch.Tensor, dim: int = ..., group: dist.ProcessGroup | None = ..., *, async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def all_gather(
    tensor: torch.Tensor, dim: int = ..., group: dist.ProcessGroup | None = ..., *, async_op: Literal[True]
) -> AsyncResult: ...
def all_gather(
    tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> torch.Tensor | AsyncResult:
    """Return all ranks' ``tensor``, joined along ``dim``. Its gradient is summed, and each rank gets its part.

    Examples
    --------
    >>> whole = functional.all_gather(part, dim=-1)
    """
    return _run(_AllGather, async_op, tensor, group, _dim_of("all_gather", tensor, group, dim, async_op))


@overload
def reduce_scatter(
    tensor: torch.Tensor,
    dim: int = ...,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = ...,
    group: dist.ProcessGroup | None = ...,
    *,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    tensor: torch.Tensor,
    dim: int = ...,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = ...,
    group: dist.ProcessGroup | None = ...,
    *,
    async_op: Literal[True],
) -> AsyncResult: ...
def reduce_scatter(
    tensor: torch.Tensor,
    dim: int = 0,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | AsyncResult:
    """Return this rank's part, cut along ``dim``, of the sum of all ranks' ``tensor``. Its gradient is gathered.

    Raises ValueError for a size that can't be divided by the size of the group, and for an ``op`` without a gradient
    on a tensor that requires one.

    Examples
    --------
    >>> part = functional.reduce_scatter(whole, dim=-1)
    """
    dim = _dim_of("reduce_scatter", tensor, group, dim, async_op, op, cut=True)
    return _run(_ReduceScatter, async_op, tensor, group, dim, op)


@overload
def all_to_all(
    tensor: torch.Tensor, output_splits: Sequence[int] | None = ..., input_splits: Sequence[int] | None = ...,
    group: dist.ProcessGroup | None = ..., *, async_op: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_to_all(
    tensor: torch.Tensor, output_splits: Sequence[int] | None = ..., input_splits: Sequence[int] | None = ...,
    group: dist.ProcessGroup | None = ..., *, async_op: Literal[True],
) -> AsyncResult: ...  # fmt: skip
def all_to_all(
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> torch.Tensor | AsyncResult:
    """Send each rank its rows of ``tensor``, and return what they sent, joined in the order of the ranks.

    ``input_splits`` and ``output_splits`` are numbers of rows, by rank; without them all are the same. The gradient
    goes back to where its rows came from.

    Examples
    --------
    >>> tokens = functional.all_to_all(tokens, output_splits=received, input_splits=sent)
    """
    _dim_of("all_to_all", tensor, group, 0, async_op, cut=input_splits is None)
    if (output_splits is None) != (input_splits is None):
        raise ValueError("functional.all_to_all(): give both output_splits and input_splits, or neither")
    if output_splits is not None:
        arguments.check("functional.all_to_all", _ROWS, output_splits=output_splits, input_splits=input_splits)
    splits = [None if one is None else list(one) for one in (output_splits, input_splits)]
    return _run(_AllToAll, async_op, tensor, group, *splits)


# --- tensor parallelism ------------------------------------------------------------------------------------------


def copy_to_tensor_parallel_region(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return ``tensor``, which all ranks have, for use in a part of the model that each has a share of.

    The gradients of all ranks' shares are summed. The result is a view of the argument.

    Examples
    --------
    >>> h = functional.copy_to_tensor_parallel_region(x, group)
    """
    _check("copy_to_tensor_parallel_region", tensor, group)
    return _CopyTo.apply(tensor, group)


@overload
def reduce_from_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., *, async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def reduce_from_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., *, async_op: Literal[True]
) -> AsyncResult: ...
def reduce_from_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> torch.Tensor | AsyncResult:
    """Return the sum of all ranks' shares. The gradient, which all ranks have, is passed on as it is.

    Examples
    --------
    >>> y = functional.reduce_from_tensor_parallel_region(h @ w, group)
    """
    _check("reduce_from_tensor_parallel_region", tensor, group, async_op)
    return _run(_ReduceFrom, async_op, tensor, group)


@overload
def gather_from_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., dim: int = ..., *, async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def gather_from_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., dim: int = ..., *, async_op: Literal[True]
) -> AsyncResult: ...
def gather_from_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -1, *, async_op: bool = False
) -> torch.Tensor | AsyncResult:
    """Return all ranks' shares, joined along ``dim``. Of the gradient, which all ranks have, each takes its part.

    Examples
    --------
    >>> logits = functional.gather_from_tensor_parallel_region(part, group)
    """
    dim = _dim_of("gather_from_tensor_parallel_region", tensor, group, dim, async_op)
    return _run(_GatherFrom, async_op, tensor, group, dim)


def scatter_to_tensor_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -1
) -> torch.Tensor:
    """Return this rank's part, cut along ``dim``, of what all ranks have. The gradients of the parts are joined.

    Examples
    --------
    >>> part = functional.scatter_to_tensor_parallel_region(x, group)
    """
    dim = _dim_of("scatter_to_tensor_parallel_region", tensor, group, dim, cut=True)
    return _ScatterTo.apply(tensor, group, dim)


@overload
def gather_from_sequence_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., dim: int = ..., *, async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def gather_from_sequence_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., dim: int = ..., *, async_op: Literal[True]
) -> AsyncResult: ...
def gather_from_sequence_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor | AsyncResult:
    """Return the whole sequence, of which each rank has a part along ``dim``, for use in a tensor-parallel region.

    The gradients of all ranks are summed, and each gets its part.

    Examples
    --------
    >>> h = functional.gather_from_sequence_parallel_region(x, group)
    """
    dim = _dim_of("gather_from_sequence_parallel_region", tensor, group, dim, async_op)
    return _run(_AllGather, async_op, tensor, group, dim)


@overload
def reduce_scatter_to_sequence_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., dim: int = ..., *, async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def reduce_scatter_to_sequence_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = ..., dim: int = ..., *, async_op: Literal[True]
) -> AsyncResult: ...
def reduce_scatter_to_sequence_parallel_region(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor | AsyncResult:
    """Return this rank's part of the sequence, along ``dim``, of the sum of all ranks' shares. Gradients are gathered.

    Raises ValueError for a size that can't be divided by the size of the group.

    Examples
    --------
    >>> y = functional.reduce_scatter_to_sequence_parallel_region(h @ w, group)
    """
    dim = _dim_of("reduce_scatter_to_sequence_parallel_region", tensor, group, dim, async_op, cut=True)
    return _run(_ReduceScatter, async_op, tensor, group, dim, dist.ReduceOp.SUM)
