"""all_gather and reduce_scatter of lists: as one flat collective, of the list's own buffer or of one of the arena.

c10d's C++ side stages a list through memory of its own, twice the size of the result, and copies tensor by tensor. With
an arena in use there are two better ways:

- A list that is the consecutive *slices* of one buffer is that buffer, and nothing is staged or copied, however small
  it is: each copy costs the host more than finding that out.
- A list in *pieces*, each with memory of its own, is staged in a slot of the arena, and copied by few kernels. Only if
  the call is synchronous, because else the copies out would have to run on a stream that is not ours, and only if the
  arena has room.

On NCCL these two and c10d's way run the same ncclAllGather or ncclReduceScatter and count as one call of the group, so
ranks that go different ways take part in one collective. c10d's flight recorder shows the name of the way that each
rank went. The list forms of gloo and of ProcessGroupNCCL2 (torch 2.15) are other algorithms, and stay c10d's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn import Parameter as _Parameter

from safecomm import _torch
from safecomm.arena.use import IN_USE, in_use, may_be_used, would_be_used
from safecomm.collectives.general import direct, forwarded, prepared, prepared_for_all
from safecomm.collectives.holding import counter, hold_launched, launch, span
from safecomm.collectives.list_gates import run_all_gather, run_reduce_scatter
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, default_group, offer
from safecomm.collectives.tensors import storages_of
from safecomm.core import captures
from safecomm.core.ledger import LEDGER
from safecomm.core.work import Work
from safecomm.guards import KINDS

__all__ = ["all_gather", "reduce_scatter"]

# Bound once: each of these is read on every call.
_compiling = torch.compiler.is_dynamo_compiling
_nonempty = LEDGER.nonempty
_can_skip_sweep = LEDGER.can_skip_sweep
_current = LEDGER.streams.current
_all_allocated_on = LEDGER.streams.all_allocated_on
_routes = ROUTES.fast
_getframe = sys._getframe
_recording = captures.RECORDING
_has_torch_function = _torch.has_torch_function
_Tensor = torch.Tensor
_modes = _torch.dispatch_modes
_transform = _torch.transform
_index_of = _torch.index_of
_has_plain_keys = _torch.has_plain_keys
_profiler = _torch.profiler
_forward_ad = _torch.forward_ad
_inflight = _torch.inflight_as_graph_input
_inference = torch.is_inference_mode_enabled
_NCCL = _torch.NCCL

_launch_all_gather, _gather_options = prepared_for_all(_torch.all_gather)
_launch_reduce_scatter, *_scatter_options = prepared(_torch.reduce_scatter)
_c10d_all_gather, _c10d_reduce_scatter = c10d.all_gather, c10d.reduce_scatter
_count_all_gather, _count_reduce_scatter = counter("all_gather"), counter("reduce_scatter")
_ALL_GATHER, _REDUCE_SCATTER = ROWS["all_gather"], ROWS["reduce_scatter"]
_general_all_gather = forwarded(_ALL_GATHER, asks=False)
_general_reduce_scatter = forwarded(_REDUCE_SCATTER, asks=False)

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
STAGED = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool))
"""The types that NCCL sums up and that all of torch's copies know. What c10d says of others, it is to say."""


_LARGE = 8 << 20
"""Bytes of a piece beyond which each is copied out on its own.

That is the driver's copy, at the full speed of the memory, which one kernel for all of them does not reach: with it,
64 MiB a piece took 9 % longer than c10d's call (2 x H200). What it saves is launches, of which small copies consist.
"""


def whole_of(tensors: list[torch.Tensor], tensor: torch.Tensor, backend: Any) -> torch.Tensor | None:
    """Return the buffer that ``tensors`` are the slices of, as a tensor of one dimension; None if they are not.

    They are if all are like ``tensor`` and follow each other in one storage. ``tensor`` must lie outside of them, or
    where NCCL runs in place: at the slice of ``backend``'s own rank.
    """
    count = len(tensors)
    try:
        first, last = tensors[0], tensors[-1]
        if type(first) is not _Tensor or type(last) is not _Tensor:
            return None
        start, nbytes = first.data_ptr(), tensor.nbytes
        # First what tells pieces from slices at once: neighbours in memory can be two allocations, and often are.
        if last.data_ptr() != start + (count - 1) * nbytes or last.untyped_storage() is not first.untyped_storage():
            return None
        if not start or not nbytes or count != backend.size():
            return None
        place = tensor.data_ptr()
        if start - nbytes < place < start + count * nbytes and place != start + backend.rank() * nbytes:
            return None
        inference = first.is_inference()
        for one, place in zip(tensors, range(start, start + count * nbytes, nbytes), strict=True):
            if (
                type(one) is not _Tensor
                or one.is_nested  # like() must not be asked
                or one.data_ptr() != place
                or one.is_inference() is not inference  # in that mode, like() can't tell
            ):
                return None
        together = [*tensors, tensor]
        if tensor.is_nested or not _SLICES.match(together):
            if not _are_slices(tensors, tensor):
                return None
            _SLICES.add_guard(together)
        return first.as_strided((count * tensor.numel(),), (1,), first.storage_offset())
    except (RuntimeError, IndexError):  # none there, or tensors without memory or shape: c10d says what it says of them
        return None


def _are_slices(tensors: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Return whether ``tensors``, which follow each other in memory, are like ``tensor`` and of one storage."""
    first = tensors[0]
    shape, dtype, storage = tensor.shape, tensor.dtype, first.untyped_storage()
    return not (
        dtype.is_complex  # c10d makes pairs of real numbers of them
        or tensor.requires_grad
        or not _has_plain_keys(tensor)
        or not tensor.is_contiguous()
        or _index_of(first) != _index_of(tensor)
    ) and all(
        one.untyped_storage() is storage
        and one.shape == shape
        and one.dtype is dtype
        and not one.requires_grad
        and not one.is_neg()
        and one.is_contiguous()
        for one in tensors
    )


class _ListGuards:
    """The lists that one way was found to do: whether tensors are like those of any, in one call of C++ for each."""

    def __init__(self) -> None:
        self._known: dict[int, list[Callable[..., bool]]] = {}  # by the number of tensors
        self._met: list[tuple[int, torch.Size, torch.dtype]] = []  # the last that were like none of them

    def match(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether ``tensors`` are like those of any list that is known. None of them may be nested."""
        for like in self._known.get(len(tensors), ()):  # noqa: SIM110 (a generator takes longer than the question)
            if like(*tensors):
                return True
        return False

    def add_guard(self, tensors: list[torch.Tensor]) -> None:
        """Know ``tensors`` from now on, if there were such ones already: to know lists that never come again costs."""
        kind = len(tensors), tensors[-1].shape, tensors[-1].dtype
        if kind not in self._met:
            self._met = [kind, *self._met[: KINDS - 1]]
        elif len({id(tensor) for tensor in tensors}) == len(tensors):  # nothing is like one tensor given twice
            known = self._known.get(len(tensors), [])
            self._known[len(tensors)] = [_torch.look_alike(*tensors, shaped=True), *known[: KINDS - 1]]


_SLICES, _READ, _WRITTEN = _ListGuards(), _ListGuards(), (_ListGuards(), _ListGuards())
"""Lists that are slices; in pieces that are read; in pieces that are written to, outside and inside of inference mode,
of whose tensors ``like()`` inside of it can't tell others."""


def addresses_of(pieces: list[Any], tensor: torch.Tensor, size: int, *, written: bool) -> list[int] | None:
    """Return where ``pieces`` and ``tensor`` lie, in ascending order; None if our copies would not do what c10d's do.

    They do if there are ``size`` of them, all like ``tensor``. c10d writes to one after the other, so those that are
    ``written`` to must lie apart. They may overlap ``tensor``, which is read before any is written to, or written to
    after all were read, there as here.
    """
    if (
        len(pieces) != size
        or _forward_ad._current_level >= 0  # which our copies don't know, and c10d's do
        or tensor.is_nested  # like() must not be asked
    ):
        return None
    for one in pieces:
        if type(one) is not _Tensor or one.is_nested:
            return None
    guards, together = _WRITTEN[_inference()] if written else _READ, [*pieces, tensor]
    if not guards.match(together):
        if not _can_be_copied(pieces, tensor, written):
            return None
        guards.add_guard(together)
    nbytes = tensor.nbytes
    found = sorted([one.data_ptr() for one in pieces])
    if not nbytes or not found[0]:
        return None
    if written:
        for one, following in pairwise(found):
            if following - one < nbytes:
                return None
    found.append(tensor.data_ptr())
    found.sort()
    return found


def _can_be_copied(pieces: list[torch.Tensor], tensor: torch.Tensor, written: bool) -> bool:
    """Return whether ``pieces`` are like ``tensor``, and our copies do with them what c10d's would."""
    if (
        tensor.dtype not in STAGED
        or not _has_plain_keys(tensor)
        or tensor.requires_grad
        or not tensor.is_contiguous()
        or not tensor.dim()  # torch.cat knows no scalars
    ):
        return False
    shape, dtype, index = tensor.shape, tensor.dtype, _index_of(tensor)
    fixed = written and not _inference()
    return all(
        _has_plain_keys(one)
        and one.shape == shape
        and one.dtype is dtype
        and _index_of(one) == index
        and not one.requires_grad
        and one.is_contiguous()
        and not (fixed and one.is_inference())  # c10d raises when it copies
        for one in pieces
    )


def _found(tensors: list[torch.Tensor], tensor: torch.Tensor, group: object, asynchronous: bool) -> Route | None:
    """Return the route of a call that goes flat if its list can; None for one that is c10d's."""
    if (
        _has_torch_function(tensor)  # a TorchFunctionMode is active
        or (type(tensor) is not _Tensor and type(tensor) is not _Parameter)
        or type(tensors) is not list
    ):
        return None
    index = _index_of(tensor)
    route = _routes.get(id(group))
    if (route is None or route.index != index) and (route := _route_of(group, index)) is None:
        return None
    backend = route.backend
    if (
        # DETAIL's wrapper compares the names of what the ranks call, which differ. ProcessGroupNCCL2's list forms are
        # other collectives than the flat ones, and how a rank's list lies is not known to the others.
        type(backend) is not _NCCL
        or not would_be_used(index)  # slices need none of its memory
        # NCCL's symmetric kernels are for buffers that lie in the window on all ranks, and c10d stages outside of it.
        or ((arena := IN_USE.get(index)) is not None and arena.symmetric)
        or _modes()
        or _transform() is not None
        or (asynchronous and _inflight())
    ):
        return None
    return route


def _route_of(group: object, index: int) -> Route | None:
    """Return the route of a group that has not been called on this device yet, or whose calls are diverted."""
    if type(group) is not c10d.ProcessGroup:
        return None
    return ROUTES.of(group, index)


def _run(
    op: str, function: Callable[..., c10d.Work | None], options: object, route: Route, group: object,
    output: torch.Tensor, source: torch.Tensor, arguments: list[torch.Tensor], asynchronous: bool,
) -> c10d.Work | None:  # fmt: skip
    """Launch a flat collective, hold what it uses, and return what the caller gets."""
    if _recording:
        captures.check_group(op, group, arguments)
    if _profiler._is_profiler_enabled:
        with span(op):
            inner = launch(function, route, group, output, source, options)
    else:
        inner = launch(function, route, group, output, source, options)
    if _recording:
        # Not the buffer, which is gone in a moment: a replay looks whether the caller's own tensors have moved.
        captures.note(op, group, arguments, _getframe(2))
    return hold_launched(op, inner, route, group, [output, source], asynchronous, _getframe(2))


def _staged(
    op: str, run: Callable[..., None], options: object, route: Route, group: object, pieces: list[torch.Tensor],
    tensor: torch.Tensor, count: Callable[[], int], *, written: bool,
) -> bool:  # fmt: skip
    """Run a synchronous call of a list in pieces through a slot of the arena; False for one that is c10d's."""
    addresses = addresses_of(pieces, tensor, route.backend.size(), written=written)
    if addresses is None:
        return False
    arguments = [*pieces, tensor] if _recording else pieces
    if _recording:
        captures.check_group(op, group, arguments)  # before a graph is given a slot
    index, number, shape = route.index, len(pieces), tensor.shape
    arena = in_use(index)
    if arena is None:
        return False
    slot = arena.if_room((number, *shape) if written else (number * shape[0], *shape[1:]), tensor.dtype)
    if slot is None:
        return False
    count()
    try:
        if _profiler._is_profiler_enabled:
            with span(op):
                run(route, group, slot, pieces, tensor, options)
        else:
            run(route, group, slot, pieces, tensor, options)
        if _recording:
            captures.note(op, group, arguments, _getframe(2))  # the slot is the graph's already
    finally:  # what has failed may still be running
        if index >= 0 and not _all_allocated_on(_current(index), addresses):
            LEDGER.hand_off(op, group, index, storages_of([*pieces, tensor]), _getframe(2))
    return True


def _gather(
    route: Route, group: object, slot: torch.Tensor, pieces: list[torch.Tensor], tensor: torch.Tensor, options: object
) -> None:
    inner = launch(_launch_all_gather, route, group, slot, tensor, options)
    if inner is not None:
        inner.wait()
    if tensor.nbytes > _LARGE:
        torch.unbind_copy(slot, out=pieces)
    else:
        _torch.copy_all(pieces, slot.unbind())


def _scatter(
    route: Route, group: object, slot: torch.Tensor, pieces: list[torch.Tensor], tensor: torch.Tensor, options: object
) -> None:
    torch.cat(pieces, out=slot)
    inner = launch(_launch_reduce_scatter, route, group, tensor, slot, options)
    if inner is not None:
        inner.wait()


def _all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    if _compiling():
        return _c10d_all_gather(tensor_list, tensor, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group or default_group()
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_ALL_GATHER, to, (tensor_list, tensor), None, async_op)
        if taken is GENERAL:
            return _general_all_gather(tensor_list, tensor, group=group, async_op=async_op)
        if taken is not DECLINED:
            return taken
    route = _found(tensor_list, tensor, to, async_op) if may_be_used() and type(async_op) is bool else None
    whole = None if route is None else whole_of(tensor_list, tensor, route.backend)
    if route is None or whole is None:
        if (
            route is not None
            and not async_op
            and _staged(
                "all_gather", _gather, _gather_options[async_op], route, to, tensor_list, tensor, _count_all_gather,
                written=True,
            )
        ):  # fmt: skip
            return None
        taken = run_all_gather(tensor_list, tensor, to, async_op)
        return _general_all_gather(tensor_list, tensor, group=group, async_op=async_op) if taken is GENERAL else taken
    # c10d's copies would say so to autograd, and raise for tensors of inference mode outside of it.
    if not whole.is_inference():
        _torch.increment_versions(tensor_list)
    elif not _inference():
        return _general_all_gather(tensor_list, tensor, group=group, async_op=async_op)
    _count_all_gather()
    arguments = [*tensor_list, tensor] if _recording else tensor_list
    return _run(
        "all_gather", _launch_all_gather, _gather_options[async_op], route, to, whole, tensor, arguments, async_op
    )


def _reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: c10d.ReduceOp | c10d.ReduceOp.RedOpType = c10d.ReduceOp.SUM,
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    if _compiling():
        return _c10d_reduce_scatter(output, input_list, op, group, async_op)  # pyright: ignore[reportArgumentType]
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group or default_group()
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_REDUCE_SCATTER, to, (output, input_list), op, async_op)
        if taken is GENERAL:
            return _general_reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        if taken is not DECLINED:
            return taken
    options = _scatter_options[async_op].get(id(op)) if may_be_used() and type(async_op) is bool else None
    route = None if options is None else _found(input_list, output, to, async_op)
    whole = None if route is None else whole_of(input_list, output, route.backend)
    if route is None or whole is None:
        if (
            route is not None
            and not async_op
            and _staged(
                "reduce_scatter", _scatter, options, route, to, input_list, output, _count_reduce_scatter, written=False
            )
        ):
            return None
        taken = run_reduce_scatter(output, input_list, op, to, async_op)
        if taken is GENERAL:
            return _general_reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        return taken
    _count_reduce_scatter()
    arguments = [output, *input_list] if _recording else input_list
    return _run("reduce_scatter", _launch_reduce_scatter, options, route, to, output, whole, arguments, async_op)


if TYPE_CHECKING:
    _List = list[torch.Tensor]
    _T = torch.Tensor
    _Group = c10d.ProcessGroup | None
    _Op = c10d.ReduceOp | c10d.ReduceOp.RedOpType

    @overload
    def all_gather(tensor_list: _List, tensor: _T, group: _Group = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def all_gather(tensor_list: _List, tensor: _T, group: _Group = ..., *, async_op: Literal[True]) -> Work: ...
    @overload
    def all_gather(tensor_list: _List, tensor: _T, group: _Group = ..., async_op: bool = ...) -> Work | None: ...
    def all_gather(*args: object, **kwargs: object) -> object: ...

    @overload
    def reduce_scatter(
        output: _T, input_list: _List, op: _Op = ..., group: _Group = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def reduce_scatter(
        output: _T, input_list: _List, op: _Op = ..., group: _Group = ..., *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def reduce_scatter(
        output: _T, input_list: _List, op: _Op = ..., group: _Group = ..., async_op: bool = ...
    ) -> Work | None: ...
    def reduce_scatter(*args: object, **kwargs: object) -> object: ...

else:
    all_gather = direct(_all_gather, _ALL_GATHER, _launch_all_gather)
    reduce_scatter = direct(_reduce_scatter, _REDUCE_SCATTER, _launch_reduce_scatter)
