"""The direct way of the list forms: plain calls past c10d's Python, and a hold of all that they were given.

An ordinary call, of plain tensors on a group that has a route, goes to what c10d's own function calls in C++. What is
not ordinary is c10d's function's, which raises what it raises and does the rest.

c10d's C++ side stages an ``all_gather`` or ``reduce_scatter`` of a list through memory of its own, twice the size of
the result, and copies tensor by tensor. With an arena in use there is a better way: a list that is the consecutive
*slices* of one buffer is that buffer, and nothing is staged or copied, however small it is: each copy costs the host
more than finding that out. On NCCL this and c10d's way run the same ncclAllGather or ncclReduceScatter and count as one
call of the group, so ranks that go different ways take part in one collective. c10d's flight recorder shows the name of
the way that each rank went. The list forms of gloo and of ProcessGroupNCCL2 (torch 2.15) are other algorithms, and stay
c10d's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn import Parameter as _Parameter

from safecomm import _torch
from safecomm.arena.use import IN_USE, may_be_used, would_be_used
from safecomm.collectives.general import forwarded, prepared, prepared_by_root, prepared_for_all
from safecomm.collectives.holding import counter, hold_launched, hold_list, span
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES, RootOptions, Route
from safecomm.collectives.table import ROWS, Row
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, offer
from safecomm.collectives.tensors import storages_of
from safecomm.core import captures
from safecomm.core.ledger import LEDGER
from safecomm.core.work import Work
from safecomm.guards import ListGuards

# Bound once: each of these is read on every call.
_compiling = torch.compiler.is_dynamo_compiling
_nonempty = LEDGER.nonempty
_can_skip_sweep = LEDGER.can_skip_sweep
_current = LEDGER.streams.current
_all_allocated_on = LEDGER.streams.all_allocated_on
_getframe = sys._getframe
_has_torch_function = _torch.has_torch_function
_groups = _torch.groups
_DEFAULT = _torch.DEFAULT
_names = _torch.c10d_vars
_WORLD = _torch.WORLD
_world = _torch.world
_routes = ROUTES.fast
_modes = _torch.dispatch_modes
_profiler = _torch.profiler
_inflight = _torch.inflight_as_graph_input
_HOOKS = _torch.HOOKS
_recording = captures.RECORDING
_Tensor = torch.Tensor
_transform = _torch.transform
_has_plain_keys = _torch.has_plain_keys
_index_of = _torch.index_of
_inference = torch.is_inference_mode_enabled
_NCCL = _torch.NCCL
_NOTHING = contextlib.nullcontext()


# --- an ordinary call ---


class _Way:
    """How the calls of one row are launched, and what is said of them."""

    __slots__ = ("count", "function", "row")

    def __init__(self, row: Row, function: Callable[..., c10d.Work | None]) -> None:
        self.row = row
        self.function = function
        self.count = counter(row.name)


def _route_of(group: object, tensors: list[torch.Tensor], asynchronous: object) -> Route | None:
    """Return the route of an ordinary call of ``tensors``; None for a call that is c10d's function's."""
    route = _routes.get(id(group))
    try:
        if route is None or _has_torch_function(*tensors):  # a subclass, or a TorchFunctionMode is active
            return None
        for tensor in tensors:
            if tensor.is_nested:  # the guards must not be asked
                return None
        if (
            not route.guards.all(tensors)
            or _modes()
            or _profiler._is_profiler_enabled
            or not (asynchronous is False or (asynchronous is True and not _inflight()))
        ):
            return None
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        return None
    return route


def _given(route: Route, tensors: list[torch.Tensor], asynchronous: bool) -> list[torch.Tensor]:
    """Return what the backend is given in place of ``tensors``; see ``tensors.host_alias``."""
    if not asynchronous or route.stream_ordered:
        return tensors
    for tensor in tensors:
        if tensor.requires_grad:
            return tensors
    return [tensor.detach() for tensor in tensors]


def _run(
    way: _Way, route: Route, group: object, outputs: Sequence[torch.Tensor | list[torch.Tensor]],
    inputs: Sequence[torch.Tensor | list[torch.Tensor]], options: object,
    tensors: list[torch.Tensor], asynchronous: bool,
) -> Work | None:  # fmt: skip
    """Launch an ordinary call, hold ``tensors``, and return what the caller gets."""
    launcher = group if _HOOKS else route.backend
    index = route.index
    way.count()
    try:
        if route.asks_in_wait:
            inner = route.launch(way.function, launcher, outputs, inputs, options)
        else:
            inner = way.function(launcher, outputs, inputs, options)
        if asynchronous:
            return inner and hold_list(way.row, inner, route, group, tensors, _getframe(3))
        if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
            if route.asks_in_wait:
                route.wait_for(inner)
            else:
                inner.wait()
    except Exception as error:
        # What was launched before that may still be running.
        if index >= 0 and (route.asks_in_wait or isinstance(error, torch.distributed.DistBackendError)):
            LEDGER.hand_off(way.row.name, group, index, storages_of(tensors), _getframe(3))
        raise
    if index >= 0 and not _all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in tensors])):
        LEDGER.hand_off(way.row.name, group, index, storages_of(tensors), _getframe(3))
    return None


# --- slices of one buffer ---

_SLICES: ListGuards = ListGuards()


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


def _flat_route(tensors: list[torch.Tensor], tensor: torch.Tensor, group: object, asynchronous: object) -> Route | None:
    """Return the route of a call that goes flat if its list can; None for one that is not to."""
    if (
        type(asynchronous) is not bool
        or _has_torch_function(tensor)  # a TorchFunctionMode is active
        or (type(tensor) is not _Tensor and type(tensor) is not _Parameter)
        or type(tensors) is not list
    ):
        return None
    index = _index_of(tensor)
    route = _routes.get(id(group))
    if route is None or route.index != index:  # the group's first call on this device, or one that is diverted
        if type(group) is not c10d.ProcessGroup:
            return None
        route = ROUTES.of(group, index)
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


def _run_flat(
    way: _Way, function: Callable[..., c10d.Work | None], route: Route, group: object, output: torch.Tensor,
    source: torch.Tensor, options: object, tensors: list[torch.Tensor], asynchronous: bool,
) -> c10d.Work | None:  # fmt: skip
    """Launch a flat collective by ``function``, hold what it uses, and return what the caller gets."""
    op = way.row.name
    way.count()
    if _recording:
        captures.check_group(op, group, tensors)
    launcher = group if _HOOKS else route.backend
    with span(op) if _profiler._is_profiler_enabled else _NOTHING:
        inner = function(launcher, output, source, options)
    if _recording:
        # Not the buffer, which is gone in a moment: a replay looks whether the caller's own tensors have moved.
        captures.note(op, group, tensors, _getframe(3))
    return hold_launched(op, inner, route, group, [output, source], asynchronous, _getframe(3))


# --- all_gather ---

_row_all_gather = ROWS["all_gather"]
_c10d_all_gather = c10d.all_gather
_general_all_gather = forwarded(_row_all_gather, asks=False)
_launch_all_gather, _flat_options = prepared_for_all(_torch.all_gather)
_function, _gather_options = prepared_for_all(_row_all_gather.launch)
_ALL_GATHER = _Way(_row_all_gather, _function)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    if _compiling():
        return _c10d_all_gather(tensor_list, tensor, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_all_gather, to, (tensor_list, tensor), None, async_op)
    else:
        taken = DECLINED
    if taken is DECLINED:
        taken = _run_all_gather(tensor_list, tensor, to, async_op)
    if taken is GENERAL:
        return _general_all_gather(tensor_list, tensor, group=group, async_op=async_op)
    return taken


def _run_all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: object, asynchronous: bool) -> object:
    route = _flat_route(tensor_list, tensor, group, asynchronous) if _launch_all_gather and may_be_used() else None
    if route is not None and (whole := whole_of(tensor_list, tensor, route.backend)) is not None:
        # c10d's copies would say so to autograd, and raise for tensors of inference mode outside of it.
        if not whole.is_inference():
            _torch.increment_versions(tensor_list)
        elif not _inference():
            return GENERAL
        return _run_flat(
            _ALL_GATHER, _launch_all_gather, route, group, whole, tensor, _flat_options[asynchronous],
            [*tensor_list, tensor], asynchronous,
        )  # fmt: skip
    if type(tensor_list) is not list or not tensor_list:
        return GENERAL
    tensors = [*tensor_list, tensor]
    route = _route_of(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    given = _given(route, tensors, asynchronous)
    return _run(
        _ALL_GATHER, route, group, [given[:-1]], given[-1:], _gather_options[asynchronous], tensors, asynchronous
    )


# --- reduce_scatter ---

_row_reduce_scatter = ROWS["reduce_scatter"]
_c10d_reduce_scatter = c10d.reduce_scatter
_general_reduce_scatter = forwarded(_row_reduce_scatter, asks=False)
_launch_reduce_scatter, *_flat_reduce_options = prepared(_torch.reduce_scatter)
_function, *_reduce_options = prepared(_row_reduce_scatter.launch)
_REDUCE_SCATTER = _Way(_row_reduce_scatter, _function)


def reduce_scatter(
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
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_reduce_scatter, to, (output, input_list), op, async_op)
    else:
        taken = DECLINED
    if taken is DECLINED:
        taken = _run_reduce_scatter(output, input_list, op, to, async_op)
    if taken is GENERAL:
        return _general_reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    return taken


def _run_reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: object, group: object, asynchronous: bool
) -> object:
    route = _flat_route(input_list, output, group, asynchronous) if may_be_used() else None
    if (
        route is not None
        and (flat := _flat_reduce_options[asynchronous].get(id(op))) is not None
        and (whole := whole_of(input_list, output, route.backend)) is not None
    ):
        return _run_flat(
            _REDUCE_SCATTER, _launch_reduce_scatter, route, group, output, whole, flat, [output, *input_list],
            asynchronous,
        )  # fmt: skip
    if type(input_list) is not list or not input_list:
        return GENERAL
    tensors = [output, *input_list]
    route = _route_of(group, tensors, asynchronous)
    if route is None or (options := _reduce_options[asynchronous].get(id(op))) is None:
        return GENERAL
    given = _given(route, tensors, asynchronous)
    return _run(_REDUCE_SCATTER, route, group, given[:1], [given[1:]], options, tensors, asynchronous)


# --- all_to_all ---

_row_all_to_all = ROWS["all_to_all"]
_c10d_all_to_all = c10d.all_to_all
_general_all_to_all = forwarded(_row_all_to_all, asks=False)
_function, _all_to_all_options = prepared_for_all(_row_all_to_all.launch)
_ALL_TO_ALL = _Way(_row_all_to_all, _function)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    if _compiling():
        return _c10d_all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_all_to_all, to, (output_tensor_list, input_tensor_list), None, async_op)
    else:
        taken = DECLINED
    if taken is DECLINED:
        taken = _run_all_to_all(output_tensor_list, input_tensor_list, to, async_op)
    if taken is GENERAL:
        return _general_all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    return taken


def _run_all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: object, asynchronous: bool
) -> object:
    if type(outputs) is not list or type(inputs) is not list or not inputs:
        return GENERAL
    tensors = [*outputs, *inputs]
    route = _route_of(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    given = _given(route, tensors, asynchronous)
    count = len(outputs)
    options = _all_to_all_options[asynchronous]
    return _run(_ALL_TO_ALL, route, group, given[:count], given[count:], options, tensors, asynchronous)


# --- gather and scatter ---

_row_gather, _row_scatter = ROWS["gather"], ROWS["scatter"]
_c10d_gather, _c10d_scatter = c10d.gather, c10d.scatter
_general_gather, _general_scatter = forwarded(_row_gather, asks=False), forwarded(_row_scatter, asks=False)
_function, _gather_root = prepared_by_root(_row_gather)
_GATHER = _Way(_row_gather, _function)
_function, _scatter_root = prepared_by_root(_row_scatter)
_SCATTER = _Way(_row_scatter, _function)


def gather(
    tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, dst: int | None = None,
    group: c10d.ProcessGroup | None = None, async_op: bool = False, group_dst: int | None = None,
) -> object:  # fmt: skip
    if _compiling():
        return _c10d_gather(tensor, gather_list, dst, group, async_op, group_dst)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_gather, to, (tensor, gather_list), None, async_op)
    else:
        taken = DECLINED
    if taken is DECLINED:
        taken = _run_by_root(_GATHER, _gather_root, tensor, gather_list, to, dst, group_dst, async_op)
    if taken is GENERAL:
        return _general_gather(tensor, gather_list, dst=dst, group=group, async_op=async_op, group_dst=group_dst)
    return taken


def scatter(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, src: int | None = None,
    group: c10d.ProcessGroup | None = None, async_op: bool = False, group_src: int | None = None,
) -> object:  # fmt: skip
    if _compiling():
        return _c10d_scatter(tensor, scatter_list, src, group, async_op, group_src)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_scatter, to, (tensor, scatter_list), None, async_op)
    else:
        taken = DECLINED
    if taken is DECLINED:
        taken = _run_by_root(_SCATTER, _scatter_root, tensor, scatter_list, to, src, group_src, async_op)
    if taken is GENERAL:
        return _general_scatter(tensor, scatter_list, src=src, group=group, async_op=async_op, group_src=group_src)
    return taken


def _run_by_root(
    way: _Way, options_of: Callable[..., RootOptions | None], tensor: torch.Tensor, parts: list[torch.Tensor] | None,
    group: object, root: int | None, group_root: int | None, asynchronous: bool,
) -> object:  # fmt: skip
    if parts is None:
        parts = []
    elif type(parts) is not list:
        return GENERAL
    tensors = [*parts, tensor]
    route = _route_of(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    if root is None and group_root is None:
        root = 0
    options = options_of(route, group, root, group_root, None, asynchronous)
    # The root has the list, and no other rank has.
    if options is None or (options.rootRank == route.rank) is not bool(parts):
        return GENERAL
    given = _given(route, tensors, asynchronous)
    lists, one = [given[:-1]] if parts else [], given[-1:]
    if way is _GATHER:
        return _run(way, route, group, lists, one, options, tensors, asynchronous)
    return _run(way, route, group, one, lists, options, tensors, asynchronous)
