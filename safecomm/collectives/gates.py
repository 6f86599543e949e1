"""All wrapped collectives but batches and ends of groups.

Made by ``python -m safecomm.collectives.generate`` of ``gate.py.in`` and ``table.py``, which are what to change.

A gate asks, in this order: whether something that is held may be over; whether a taker takes the call before the
backend does (``takers.py``); whether it is an ordinary call, of plain tensors on a group that has a route. Then it
launches, and holds. What is not ordinary goes the general way, which is c10d's own function with a hold around it; so
does a call that leaves its group to c10d where ranks are threads. The gates of lists are in ``lists.py``.
"""

# ruff: noqa: E501

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import lists
from safecomm.collectives.general import (
    by_way_of,
    direct,
    forwarded,
    prepared,
    prepared_by_root,
    prepared_for_all,
    split_sizes,
)
from safecomm.collectives.holding import counter, wait_for
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, offer, splits
from safecomm.collectives.tensors import storages_of
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.core.work import Work, waited_for_once

# Bound once: each of these is read on every call.
_compiling = torch.compiler.is_dynamo_compiling
_nonempty = LEDGER.nonempty
_can_skip_sweep = LEDGER.can_skip_sweep
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream
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
_HERE = globals()


def _caller(frame: types.FrameType) -> types.FrameType:
    """Return the call site: what called us, or what called the earlier name that did."""
    return frame.f_back if frame.f_globals is _HERE and frame.f_back is not None else frame

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]

# --- all_reduce ---

_row_all_reduce = ROWS["all_reduce"]
_name_all_reduce = _row_all_reduce.name
_c10d_all_reduce = getattr(c10d, _name_all_reduce)
_count_all_reduce = counter(_name_all_reduce)
_general_all_reduce = forwarded(_row_all_reduce, asks=False)
_launch_all_reduce, _options_all_reduce = prepared(_row_all_reduce.launch)


def _all_reduce(tensor: torch.Tensor, op: c10d.ReduceOp | c10d.ReduceOp.RedOpType = c10d.ReduceOp.SUM, group: c10d.ProcessGroup | None = None, async_op: bool = False) -> object:
    if _compiling():
        return _c10d_all_reduce(tensor, op, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_all_reduce, to, (tensor,), op, async_op)
        if taken is not DECLINED:
            return _general_all_reduce(tensor, op=op, group=group, async_op=async_op) if taken is GENERAL else taken.result
    route: Route = _routes.get(id(to))  # type: ignore[assignment]
    try:
        ordinary = (
            route is not None
            and not _has_torch_function(tensor)  # a subclass, or a TorchFunctionMode is active
            and not tensor.is_nested  # the guards must not be asked
            and (route.guards.guard1(tensor) or route.guards.plain(tensor))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := _options_all_reduce[async_op].get(id(op))) is None:
        return _general_all_reduce(tensor, op=op, group=group, async_op=async_op)
    launcher = to if _HOOKS else route.backend
    index = route.index
    alloc_stream = _alloc_stream(tensor.data_ptr()) if index >= 0 else HOST
    _count_all_reduce()
    if async_op:
        storages = (tensor.untyped_storage(),)
        alias = tensor if route.stream_ordered or tensor.requires_grad else tensor.detach()
        if route.asks_in_wait:
            inner = route.launch(_launch_all_reduce, launcher, [alias], options)
        else:
            inner = _launch_all_reduce(launcher, [alias], options)
        return inner and route.hold(Work(), _name_all_reduce, inner, storages, alloc_stream, _getframe(1))
    if route.asks_in_wait:
        inner = route.launch(_launch_all_reduce, launcher, [tensor], options)
    else:
        inner = _launch_all_reduce(launcher, [tensor], options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if route.asks_in_wait:
            wait_for(route, inner, _row_all_reduce, to, [tensor], _getframe(1))
        else:
            inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(_name_all_reduce, to, index, storages_of([tensor]), _getframe(1), alloc_stream)
    return None


all_reduce = direct(_all_reduce, _row_all_reduce, _launch_all_reduce)

# --- all_gather_single ---

_row_all_gather_single = ROWS["all_gather_single"]
_name_all_gather_single = _row_all_gather_single.name
_c10d_all_gather_single = getattr(c10d, _name_all_gather_single)
_count_all_gather_single = counter(_name_all_gather_single)
_general_all_gather_single = forwarded(_row_all_gather_single, asks=False)
_launch_all_gather_single, _options_all_gather_single = prepared_for_all(_row_all_gather_single.launch)


def _all_gather_single(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: c10d.ProcessGroup | None = None, async_op: bool = False) -> object:
    if _compiling():
        return _c10d_all_gather_single(output_tensor, input_tensor, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_all_gather_single, to, (output_tensor, input_tensor,), None, async_op)
        if taken is not DECLINED:
            return _general_all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op) if taken is GENERAL else taken.result
    route: Route = _routes.get(id(to))  # type: ignore[assignment]
    try:
        ordinary = (
            route is not None
            and not _has_torch_function(output_tensor, input_tensor)  # a subclass, or a TorchFunctionMode is active
            and not input_tensor.is_nested and not output_tensor.is_nested  # the guards must not be asked
            and (route.guards.guard2(output_tensor, input_tensor) or route.guards.guard2_before(output_tensor, input_tensor) or route.guards.plain(output_tensor, input_tensor))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := _options_all_gather_single[async_op]) is None:
        return _general_all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
    launcher = to if _HOOKS else route.backend
    index = route.index
    alloc_stream = _alloc_stream(output_tensor.data_ptr(), input_tensor.data_ptr()) if index >= 0 else HOST
    _count_all_gather_single()
    if async_op:
        storages = (output_tensor.untyped_storage(), input_tensor.untyped_storage(),)
        to_write, to_read = output_tensor, input_tensor
        if not (route.stream_ordered or output_tensor.requires_grad or input_tensor.requires_grad):
            to_write, to_read = output_tensor.detach(), input_tensor.data
        if route.asks_in_wait:
            inner = route.launch(_launch_all_gather_single, launcher, to_write, to_read, options)
        else:
            inner = _launch_all_gather_single(launcher, to_write, to_read, options)
        return inner and route.hold(Work(), _name_all_gather_single, inner, storages, alloc_stream, _caller(_getframe(1)))
    if route.asks_in_wait:
        inner = route.launch(_launch_all_gather_single, launcher, output_tensor, input_tensor, options)
    else:
        inner = _launch_all_gather_single(launcher, output_tensor, input_tensor, options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if route.asks_in_wait:
            wait_for(route, inner, _row_all_gather_single, to, [output_tensor, input_tensor], _caller(_getframe(1)))
        else:
            inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(_name_all_gather_single, to, index, storages_of([output_tensor, input_tensor]), _caller(_getframe(1)), alloc_stream)
    return None


all_gather_single: Any = direct(_all_gather_single, _row_all_gather_single, _launch_all_gather_single)

if _name_all_gather_single == "all_gather_into_tensor":
    all_gather_into_tensor, all_gather_single = all_gather_single, None
else:
    # torch 2.13 and 2.14 warn of the earlier name; since 2.15 it is an alias that does not.
    _deprecated_all_gather_single = getattr(getattr(c10d, "all_gather_into_tensor", None), "__deprecated__", None)

    def _all_gather_into_tensor(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: c10d.ProcessGroup | None = None, async_op: bool = False) -> object:
        if _deprecated_all_gather_single is not None and not _compiling():
            warnings.warn(_deprecated_all_gather_single, FutureWarning, stacklevel=2)
        return all_gather_single(output_tensor, input_tensor, group, async_op)

    all_gather_into_tensor = by_way_of(_all_gather_into_tensor, _row_all_gather_single)

# --- reduce_scatter_single ---

_row_reduce_scatter_single = ROWS["reduce_scatter_single"]
_name_reduce_scatter_single = _row_reduce_scatter_single.name
_c10d_reduce_scatter_single = getattr(c10d, _name_reduce_scatter_single)
_count_reduce_scatter_single = counter(_name_reduce_scatter_single)
_general_reduce_scatter_single = forwarded(_row_reduce_scatter_single, asks=False)
_launch_reduce_scatter_single, _options_reduce_scatter_single = prepared(_row_reduce_scatter_single.launch)


def _reduce_scatter_single(output: torch.Tensor, input: torch.Tensor, op: c10d.ReduceOp | c10d.ReduceOp.RedOpType = c10d.ReduceOp.SUM, group: c10d.ProcessGroup | None = None, async_op: bool = False) -> object:
    if _compiling():
        return _c10d_reduce_scatter_single(output, input, op, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_reduce_scatter_single, to, (output, input,), op, async_op)
        if taken is not DECLINED:
            return _general_reduce_scatter_single(output, input, op=op, group=group, async_op=async_op) if taken is GENERAL else taken.result
    route: Route = _routes.get(id(to))  # type: ignore[assignment]
    try:
        ordinary = (
            route is not None
            and not _has_torch_function(output, input)  # a subclass, or a TorchFunctionMode is active
            and not input.is_nested and not output.is_nested  # the guards must not be asked
            and (route.guards.guard2(output, input) or route.guards.guard2_before(output, input) or route.guards.plain(output, input))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := _options_reduce_scatter_single[async_op].get(id(op))) is None:
        return _general_reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)
    launcher = to if _HOOKS else route.backend
    index = route.index
    alloc_stream = _alloc_stream(output.data_ptr(), input.data_ptr()) if index >= 0 else HOST
    _count_reduce_scatter_single()
    if async_op:
        storages = (output.untyped_storage(), input.untyped_storage(),)
        to_write, to_read = output, input
        if not (route.stream_ordered or output.requires_grad or input.requires_grad):
            to_write, to_read = output.detach(), input.data
        if route.asks_in_wait:
            inner = route.launch(_launch_reduce_scatter_single, launcher, to_write, to_read, options)
        else:
            inner = _launch_reduce_scatter_single(launcher, to_write, to_read, options)
        if not route.stream_ordered:
            route, work = route.unordered(to), waited_for_once()
            return inner and route.hold(work, _name_reduce_scatter_single, inner, storages, alloc_stream, _caller(_getframe(1)))
        return inner and route.hold(Work(), _name_reduce_scatter_single, inner, storages, alloc_stream, _caller(_getframe(1)))
    if route.asks_in_wait:
        inner = route.launch(_launch_reduce_scatter_single, launcher, output, input, options)
    else:
        inner = _launch_reduce_scatter_single(launcher, output, input, options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if route.asks_in_wait:
            wait_for(route, inner, _row_reduce_scatter_single, to, [output, input], _caller(_getframe(1)))
        else:
            inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(_name_reduce_scatter_single, to, index, storages_of([output, input]), _caller(_getframe(1)), alloc_stream)
    return None


reduce_scatter_single: Any = direct(_reduce_scatter_single, _row_reduce_scatter_single, _launch_reduce_scatter_single)

if _name_reduce_scatter_single == "reduce_scatter_tensor":
    reduce_scatter_tensor, reduce_scatter_single = reduce_scatter_single, None
else:
    # torch 2.13 and 2.14 warn of the earlier name; since 2.15 it is an alias that does not.
    _deprecated_reduce_scatter_single = getattr(getattr(c10d, "reduce_scatter_tensor", None), "__deprecated__", None)

    def _reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, op: c10d.ReduceOp | c10d.ReduceOp.RedOpType = c10d.ReduceOp.SUM, group: c10d.ProcessGroup | None = None, async_op: bool = False) -> object:
        if _deprecated_reduce_scatter_single is not None and not _compiling():
            warnings.warn(_deprecated_reduce_scatter_single, FutureWarning, stacklevel=2)
        return reduce_scatter_single(output, input, op, group, async_op)

    reduce_scatter_tensor = by_way_of(_reduce_scatter_tensor, _row_reduce_scatter_single)

# --- broadcast ---

_row_broadcast = ROWS["broadcast"]
_name_broadcast = _row_broadcast.name
_c10d_broadcast = getattr(c10d, _name_broadcast)
_count_broadcast = counter(_name_broadcast)
_general_broadcast = forwarded(_row_broadcast, asks=False)
_launch_broadcast, _options_broadcast = prepared_by_root(_row_broadcast)


def _broadcast(tensor: torch.Tensor, src: int | None = None, group: c10d.ProcessGroup | None = None, async_op: bool = False, group_src: int | None = None) -> object:
    if _compiling():
        return _c10d_broadcast(tensor, src, group, async_op, group_src)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_broadcast, to, (tensor,), None, async_op)
        if taken is not DECLINED:
            return _general_broadcast(tensor, src=src, group=group, async_op=async_op, group_src=group_src) if taken is GENERAL else taken.result
    route: Route = _routes.get(id(to))  # type: ignore[assignment]
    try:
        ordinary = (
            route is not None
            and not _has_torch_function(tensor)  # a subclass, or a TorchFunctionMode is active
            and not tensor.is_nested  # the guards must not be asked
            and (route.guards.guard1(tensor) or route.guards.plain(tensor))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := _options_broadcast(route, to, src, group_src, None, async_op)) is None:
        return _general_broadcast(tensor, src=src, group=group, async_op=async_op, group_src=group_src)
    launcher = to if _HOOKS else route.backend
    index = route.index
    alloc_stream = _alloc_stream(tensor.data_ptr()) if index >= 0 else HOST
    _count_broadcast()
    if async_op:
        storages = (tensor.untyped_storage(),)
        alias = tensor if route.stream_ordered or tensor.requires_grad else tensor.detach()
        if route.asks_in_wait:
            inner = route.launch(_launch_broadcast, launcher, [alias], options)
        else:
            inner = _launch_broadcast(launcher, [alias], options)
        return inner and route.hold(Work(), _name_broadcast, inner, storages, alloc_stream, _getframe(1))
    if route.asks_in_wait:
        inner = route.launch(_launch_broadcast, launcher, [tensor], options)
    else:
        inner = _launch_broadcast(launcher, [tensor], options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if route.asks_in_wait:
            wait_for(route, inner, _row_broadcast, to, [tensor], _getframe(1))
        else:
            inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(_name_broadcast, to, index, storages_of([tensor]), _getframe(1), alloc_stream)
    return None


broadcast = direct(_broadcast, _row_broadcast, _launch_broadcast)

# --- reduce ---

_row_reduce = ROWS["reduce"]
_name_reduce = _row_reduce.name
_c10d_reduce = getattr(c10d, _name_reduce)
_count_reduce = counter(_name_reduce)
_general_reduce = forwarded(_row_reduce, asks=False)
_launch_reduce, _options_reduce = prepared_by_root(_row_reduce)


def _reduce(tensor: torch.Tensor, dst: int | None = None, op: c10d.ReduceOp | c10d.ReduceOp.RedOpType = c10d.ReduceOp.SUM, group: c10d.ProcessGroup | None = None, async_op: bool = False, group_dst: int | None = None) -> object:
    if _compiling():
        return _c10d_reduce(tensor, dst, op, group, async_op, group_dst)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_reduce, to, (tensor,), op, async_op)
        if taken is not DECLINED:
            return _general_reduce(tensor, dst=dst, op=op, group=group, async_op=async_op, group_dst=group_dst) if taken is GENERAL else taken.result
    route: Route = _routes.get(id(to))  # type: ignore[assignment]
    try:
        ordinary = (
            route is not None
            and not _has_torch_function(tensor)  # a subclass, or a TorchFunctionMode is active
            and not tensor.is_nested  # the guards must not be asked
            and (route.guards.guard1(tensor) or route.guards.plain(tensor))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := _options_reduce(route, to, dst, group_dst, op, async_op)) is None:
        return _general_reduce(tensor, dst=dst, op=op, group=group, async_op=async_op, group_dst=group_dst)
    launcher = to if _HOOKS else route.backend
    index = route.index
    alloc_stream = _alloc_stream(tensor.data_ptr()) if index >= 0 else HOST
    _count_reduce()
    if async_op:
        storages = (tensor.untyped_storage(),)
        alias = tensor if route.stream_ordered or tensor.requires_grad else tensor.detach()
        if route.asks_in_wait:
            inner = route.launch(_launch_reduce, launcher, [alias], options)
        else:
            inner = _launch_reduce(launcher, [alias], options)
        return inner and route.hold(Work(), _name_reduce, inner, storages, alloc_stream, _getframe(1))
    if route.asks_in_wait:
        inner = route.launch(_launch_reduce, launcher, [tensor], options)
    else:
        inner = _launch_reduce(launcher, [tensor], options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if route.asks_in_wait:
            wait_for(route, inner, _row_reduce, to, [tensor], _getframe(1))
        else:
            inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(_name_reduce, to, index, storages_of([tensor]), _getframe(1), alloc_stream)
    return None


reduce = direct(_reduce, _row_reduce, _launch_reduce)

# --- all_to_all_single ---

_row_all_to_all_single = ROWS["all_to_all_single"]
_name_all_to_all_single = _row_all_to_all_single.name
_c10d_all_to_all_single = getattr(c10d, _name_all_to_all_single)
_count_all_to_all_single = counter(_name_all_to_all_single)
_general_all_to_all_single = forwarded(_row_all_to_all_single, asks=False)
_launch_all_to_all_single, _options_all_to_all_single = prepared_for_all(_row_all_to_all_single.launch)


def _all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: list[int] | None = None, input_split_sizes: list[int] | None = None, group: c10d.ProcessGroup | None = None, async_op: bool = False) -> object:
    if _compiling():
        return _c10d_all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(_row_all_to_all_single, to, (output, input,), splits(output_split_sizes, input_split_sizes), async_op)
        if taken is not DECLINED:
            return _general_all_to_all_single(output, input, output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes, group=group, async_op=async_op) if taken is GENERAL else taken.result
    route: Route = _routes.get(id(to))  # type: ignore[assignment]
    try:
        ordinary = (
            route is not None
            and not _has_torch_function(output, input)  # a subclass, or a TorchFunctionMode is active
            and not input.is_nested and not output.is_nested  # the guards must not be asked
            and (route.guards.guard2(output, input) or route.guards.guard2_before(output, input) or route.guards.plain(output, input))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := _options_all_to_all_single[async_op]) is None or (outputs := split_sizes(output_split_sizes)) is None or (inputs := split_sizes(input_split_sizes)) is None:
        return _general_all_to_all_single(output, input, output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes, group=group, async_op=async_op)
    launcher = to if _HOOKS else route.backend
    index = route.index
    alloc_stream = _alloc_stream(output.data_ptr(), input.data_ptr()) if index >= 0 else HOST
    _count_all_to_all_single()
    if async_op:
        storages = (output.untyped_storage(), input.untyped_storage(),)
        to_write, to_read = output, input
        if not (route.stream_ordered or output.requires_grad or input.requires_grad):
            to_write, to_read = output.detach(), input.data
        if route.asks_in_wait:
            inner = route.launch(_launch_all_to_all_single, launcher, to_write, to_read, outputs, inputs, options)
        else:
            inner = _launch_all_to_all_single(launcher, to_write, to_read, outputs, inputs, options)
        return inner and route.hold(Work(), _name_all_to_all_single, inner, storages, alloc_stream, _getframe(1))
    if route.asks_in_wait:
        inner = route.launch(_launch_all_to_all_single, launcher, output, input, outputs, inputs, options)
    else:
        inner = _launch_all_to_all_single(launcher, output, input, outputs, inputs, options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if route.asks_in_wait:
            wait_for(route, inner, _row_all_to_all_single, to, [output, input], _getframe(1))
        else:
            inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(_name_all_to_all_single, to, index, storages_of([output, input]), _getframe(1), alloc_stream)
    return None


all_to_all_single = direct(_all_to_all_single, _row_all_to_all_single, _launch_all_to_all_single)

# --- the rest ---

_all_gather_base = forwarded(ROWS["_all_gather_base"])
_reduce_scatter_base = forwarded(ROWS["_reduce_scatter_base"])
all_gather = direct(lists.all_gather, ROWS["all_gather"], ROWS["all_gather"].launch)
reduce_scatter = direct(lists.reduce_scatter, ROWS["reduce_scatter"], ROWS["reduce_scatter"].launch)
all_gather_coalesced = forwarded(ROWS["all_gather_coalesced"])
all_reduce_coalesced = forwarded(ROWS["all_reduce_coalesced"])
all_to_all = direct(lists.all_to_all, ROWS["all_to_all"], ROWS["all_to_all"].launch)
gather = direct(lists.gather, ROWS["gather"], ROWS["gather"].launch)
scatter = direct(lists.scatter, ROWS["scatter"], ROWS["scatter"].launch)
gather_single = forwarded(ROWS["gather_single"])
gather_into_tensor = forwarded(ROWS["gather_into_tensor"])
barrier = forwarded(ROWS["barrier"])
