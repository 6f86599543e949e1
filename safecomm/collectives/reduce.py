"""all_reduce, reduce, reduce_scatter_tensor and their relatives."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives.call import (
    BUCKETS,
    DIRECT,
    ENGINES,
    Region,
    by_engine,
    counter,
    direct,
    forwarded,
    plain,
    prepared,
    stand_in,
    storages_of,
    wait_for,
)
from safecomm.ledger import LEDGER
from safecomm.streams import HOST
from safecomm.work import Work, handle

# Bound once: each of these is read on every call.
_compiling = torch.compiler.is_dynamo_compiling
_busy = LEDGER.busy
_awaited = LEDGER.awaited
_current = LEDGER.streams.current
_home = LEDGER.streams.home
_trail = LEDGER.trail
_getframe = sys._getframe
has_torch_function = _torch.has_torch_function
_HERE = globals()
_groups = _torch.groups
_DEFAULT = _torch.DEFAULT
_direct = LEDGER.direct
_modes = _torch.dispatch_modes
_profiler = _torch.profiler
_inflight = _torch.inflight_as_graph_input
_HOOKS = _torch.HOOKS

# --- all_reduce ------------------------------------------------------------------------------------------

_launch_all_reduce, _sync_all_reduce, _async_all_reduce = prepared(_torch.all_reduce)
if _launch_all_reduce is not None:
    DIRECT["all_reduce"] = (
        lambda launcher, tensor, options: _launch_all_reduce(launcher, [tensor], options),
        _sync_all_reduce,
        _async_all_reduce,
    )
_c10d_all_reduce = c10d.all_reduce
_count_all_reduce = counter("all_reduce")
_forward_all_reduce = forwarded("all_reduce", "tensor", coalesced=True)
_after_engine_all_reduce = forwarded("all_reduce", "tensor", coalesced=True, asks=False)


def all_reduce(tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    if _compiling():
        return _c10d_all_reduce(tensor, op, group, async_op)
    if _busy and not _awaited():
        LEDGER.sweep()
    to = _groups[_DEFAULT] if group is None else group
    forward = _forward_all_reduce
    if ENGINES and (to in ENGINES or None in ENGINES):
        if async_op is not False:
            return _forward_all_reduce(tensor, op=op, group=group, async_op=async_op)
        taken = by_engine("all_reduce", to, [tensor], op)
        if taken:
            _count_all_reduce()
            return None
        if taken is None:
            return _forward_all_reduce(tensor, op=op, group=group, async_op=async_op)
        forward = _after_engine_all_reduce
    lane: Any = _direct.get(id(to))
    try:
        ordinary = (
            lane is not None
            and not has_torch_function(tensor)  # a subclass, or a TorchFunctionMode is active
            and not tensor.is_nested  # like_one() must not be asked
            and (lane.like_one(tensor) or plain(lane, tensor))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := (_async_all_reduce if async_op else _sync_all_reduce).get(id(op))) is None:
        # Asked here, because there are no lanes while there are buckets.
        if BUCKETS and async_op is False and (buckets := BUCKETS.get(to)) and buckets.put_off("all_reduce", op, tensor):
            return None
        return forward(tensor, op=op, group=group, async_op=async_op)
    if lane.regions and (region := lane.regions.get(to)) is not None:
        if type(region) is not Region:  # torch's own
            return forward(tensor, op=op, group=group, async_op=async_op)
        return region.collect(_c10d_all_reduce, tensor, None, op, async_op)
    launcher = to if _HOOKS else lane.backend
    index = lane.index
    home = _home(tensor.data_ptr()) if index >= 0 else HOST
    _count_all_reduce()
    if async_op:
        storages = (tensor.untyped_storage(),)
        one = tensor if lane.streamed or tensor.requires_grad else tensor.detach()  # see call.host_alias
        if lane.queries:
            inner = lane.launch(_launch_all_reduce, launcher, [one], options)
        else:
            inner = _launch_all_reduce(launcher, [one], options)
        return inner and lane.hold(Work(), "all_reduce", inner, storages, home, _getframe(1))
    if lane.queries:
        inner = lane.launch(_launch_all_reduce, launcher, [tensor], options)
    else:
        inner = _launch_all_reduce(launcher, [tensor], options)
    if inner is not None:  # None where ProcessGroupNCCL ran it on the current stream (torch 2.8 and later)
        if lane.queries:
            wait_for(lane, inner, "all_reduce", to, [tensor], _getframe(1))
        else:
            inner.wait()
    if index >= 0 and home != _current(index):
        _trail("all_reduce", to, index, storages_of([tensor]), _getframe(1))
    return None


all_reduce = direct(all_reduce, _c10d_all_reduce, _forward_all_reduce, _launch_all_reduce)

# --- reduce_scatter_tensor, which torch 2.13 calls reduce_scatter_single ------------------------------------

_RENAMED = hasattr(c10d, "reduce_scatter_single")
_NAME = "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor"
_launch_reduce_scatter, _sync_reduce_scatter, _async_reduce_scatter = prepared(_torch.reduce_scatter)
if _launch_reduce_scatter is not None:
    DIRECT[_NAME] = (_launch_reduce_scatter, _sync_reduce_scatter, _async_reduce_scatter)
_c10d_reduce_scatter = getattr(c10d, _NAME)
_count_reduce_scatter = counter(_NAME)
_forward_reduce_scatter = forwarded(_NAME, "output", "input", coalesced=True, unpolled=True)
_after_engine_reduce_scatter = forwarded(_NAME, "output", "input", coalesced=True, unpolled=True, asks=False)


def _caller(frame: types.FrameType) -> types.FrameType:
    """Return the call site: what called us, or what called the older name that did."""
    return frame.f_back if frame.f_globals is _HERE and frame.f_back is not None else frame


def _reduce_scatter(
    output: Any, input: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    if _compiling():
        return _c10d_reduce_scatter(output, input, op, group, async_op)
    if _busy and not _awaited():
        LEDGER.sweep()
    to = _groups[_DEFAULT] if group is None else group
    forward = _forward_reduce_scatter
    if ENGINES and (to in ENGINES or None in ENGINES):
        if async_op is not False:
            return _forward_reduce_scatter(output, input, op=op, group=group, async_op=async_op)
        taken = by_engine(_NAME, to, [output, input], op)
        if taken:
            _count_reduce_scatter()
            return None
        if taken is None:
            return _forward_reduce_scatter(output, input, op=op, group=group, async_op=async_op)
        forward = _after_engine_reduce_scatter
    lane: Any = _direct.get(id(to))
    try:
        ordinary = (
            lane is not None
            and not has_torch_function(output, input)
            and not input.is_nested  # like_two() must not be asked
            and not output.is_nested
            and (lane.like_two(output, input) or lane.like_two_before(output, input) or plain(lane, output, input))
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary or (options := (_async_reduce_scatter if async_op else _sync_reduce_scatter).get(id(op))) is None:
        if BUCKETS and async_op is False and (buckets := BUCKETS.get(to)) and buckets.put_off(_NAME, op, output, input):
            return None
        return forward(output, input, op=op, group=group, async_op=async_op)
    if lane.regions and (region := lane.regions.get(to)) is not None:
        if type(region) is not Region:  # torch's own
            return forward(output, input, op=op, group=group, async_op=async_op)
        return region.collect(_c10d_reduce_scatter, input, output, op, async_op)
    launcher = to if _HOOKS else lane.backend
    index = lane.index
    home = _home(output.data_ptr(), input.data_ptr()) if index >= 0 else HOST
    _count_reduce_scatter()
    if async_op:
        storages = (output.untyped_storage(), input.untyped_storage())
        if lane.streamed:
            if lane.queries:
                inner = lane.launch(_launch_reduce_scatter, launcher, output, input, options)
            else:
                inner = _launch_reduce_scatter(launcher, output, input, options)
            frame = _caller(_getframe(1)) if _RENAMED else _getframe(1)
            return inner and lane.hold(Work(), _NAME, inner, storages, home, frame)
        # gloo's; see call.host_alias. It can't be polled, as point-to-point calls can't.
        to_write, to_read = output, input
        if not (output.requires_grad or input.requires_grad):
            to_write, to_read = output.detach(), input.data
        inner = _launch_reduce_scatter(launcher, to_write, to_read, options)
        frame = _caller(_getframe(1)) if _RENAMED else _getframe(1)
        return inner and LEDGER.hold(handle(once=True), _NAME, inner, to, index, storages, frame, p2p=True)
    if lane.queries:
        inner = lane.launch(_launch_reduce_scatter, launcher, output, input, options)
    else:
        inner = _launch_reduce_scatter(launcher, output, input, options)
    if inner is not None:
        if lane.queries:
            wait_for(lane, inner, _NAME, to, [output, input], _caller(_getframe(1)))
        else:
            inner.wait()
    if index >= 0 and home != _current(index):
        frame = _caller(_getframe(1)) if _RENAMED else _getframe(1)
        _trail(_NAME, to, index, storages_of([output, input]), frame)
    return None


_reduce_scatter = direct(_reduce_scatter, _c10d_reduce_scatter, _forward_reduce_scatter, _launch_reduce_scatter)

reduce_scatter_single: Any = _reduce_scatter if _RENAMED else None
reduce_scatter_tensor: Any = None if _RENAMED else _reduce_scatter
if _RENAMED and hasattr(c10d, "reduce_scatter_tensor"):
    # torch 2.13 and 2.14 warn of the older name; since 2.15 it is an alias that does not.
    _DEPRECATED = getattr(c10d.reduce_scatter_tensor, "__deprecated__", None)

    def _older_name(
        output: Any, input: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if _DEPRECATED is not None and not _compiling():
            warnings.warn(_DEPRECATED, FutureWarning, stacklevel=2)
        return _reduce_scatter(output, input, op, group, async_op)

    reduce_scatter_tensor = stand_in(_older_name, c10d.reduce_scatter_tensor)

# --- the rest ------------------------------------------------------------------------------------------

_reduce_scatter_base = forwarded("_reduce_scatter_base", "output", "input", coalesced=True, unpolled=True)
all_reduce_coalesced = forwarded("all_reduce_coalesced", "tensors")
reduce = forwarded("reduce", "tensor")
