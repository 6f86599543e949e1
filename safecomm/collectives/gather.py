"""all_gather_into_tensor, gather and their relatives."""

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
from safecomm.work import Work

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

# --- all_gather_into_tensor, which torch 2.13 calls all_gather_single -----------------------------------------

_RENAMED = hasattr(c10d, "all_gather_single")
_NAME = "all_gather_single" if _RENAMED else "all_gather_into_tensor"
_SUM = id(c10d.ReduceOp.SUM)  # a gather has no reduce operation; any key of the table does
_launch, *_tables = _prepared = prepared(_torch.all_gather)
_sync_options, _async_options = (table.get(_SUM) for table in _tables)
if _launch is not None:
    DIRECT[_NAME] = _prepared
_c10d_all_gather = getattr(c10d, _NAME)
_count = counter(_NAME)
_forward_all_gather = forwarded(_NAME, "output_tensor", "input_tensor", coalesced=True)
_after_engine_all_gather = forwarded(_NAME, "output_tensor", "input_tensor", coalesced=True, asks=False)


def _caller(frame: types.FrameType) -> types.FrameType:
    """Return the call site: what called us, or what called the older name that did."""
    return frame.f_back if frame.f_globals is _HERE and frame.f_back is not None else frame


def _all_gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    if _compiling():
        return _c10d_all_gather(output_tensor, input_tensor, group, async_op)
    if _busy and not _awaited():
        LEDGER.sweep()
    to = _groups[_DEFAULT] if group is None else group
    forward = _forward_all_gather
    if ENGINES and (to in ENGINES or None in ENGINES):
        if async_op is not False:
            return _forward_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        taken = by_engine(_NAME, to, [output_tensor, input_tensor], None)
        if taken:
            _count()
            return None
        if taken is None:
            return _forward_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        forward = _after_engine_all_gather
    lane: Any = _direct.get(id(to))
    try:
        ordinary = (
            lane is not None
            and not has_torch_function(output_tensor, input_tensor)  # a subclass, or a TorchFunctionMode is active
            and not input_tensor.is_nested  # like_two() must not be asked
            and not output_tensor.is_nested
            and (
                lane.like_two(output_tensor, input_tensor)
                or lane.like_two_before(output_tensor, input_tensor)
                or plain(lane, output_tensor, input_tensor)
            )
            and not _modes()
            and not _profiler._is_profiler_enabled
            and (async_op is False or (async_op is True and not _inflight()))
        )
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        ordinary = False
    if not ordinary:
        if (
            BUCKETS
            and async_op is False
            and (buckets := BUCKETS.get(to))
            and buckets.put_off(_NAME, None, output_tensor, input_tensor)
        ):
            return None
        return forward(output_tensor, input_tensor, group=group, async_op=async_op)
    if lane.regions and (region := lane.regions.get(to)) is not None:
        if type(region) is not Region:  # torch's own
            return forward(output_tensor, input_tensor, group=group, async_op=async_op)
        return region.collect(_c10d_all_gather, input_tensor, output_tensor, None, async_op)
    launcher = to if _HOOKS else lane.backend
    index = lane.index
    home = _home(output_tensor.data_ptr(), input_tensor.data_ptr()) if index >= 0 else HOST
    _count()
    if async_op:
        if lane.streamed:
            storages = (output_tensor.untyped_storage(), input_tensor.untyped_storage())
            if lane.queries:
                inner = lane.launch(_launch, launcher, output_tensor, input_tensor, _async_options)
            else:
                inner = _launch(launcher, output_tensor, input_tensor, _async_options)
        else:  # see call.host_alias; what comes after the launch takes no time, because gloo runs in threads of its own
            to_write, to_read = output_tensor, input_tensor
            if not (to_write.requires_grad or to_read.requires_grad):
                to_write, to_read = to_write.detach(), to_read.data
            inner = _launch(launcher, to_write, to_read, _async_options)
            storages = (output_tensor.untyped_storage(), input_tensor.untyped_storage())
        frame = _caller(_getframe(1)) if _RENAMED else _getframe(1)
        return inner and lane.hold(Work(), _NAME, inner, storages, home, frame)
    if lane.queries:
        inner = lane.launch(_launch, launcher, output_tensor, input_tensor, _sync_options)
    else:
        inner = _launch(launcher, output_tensor, input_tensor, _sync_options)
    if inner is not None:
        if lane.queries:
            wait_for(lane, inner, _NAME, to, [output_tensor, input_tensor], _caller(_getframe(1)))
        else:
            inner.wait()
    if index >= 0 and home != _current(index):
        frame = _caller(_getframe(1)) if _RENAMED else _getframe(1)
        _trail(_NAME, to, index, storages_of([output_tensor, input_tensor]), frame)
    return None


_all_gather = direct(_all_gather, _c10d_all_gather, _forward_all_gather, _launch)

all_gather_single: Any = _all_gather if _RENAMED else None
all_gather_into_tensor: Any = None if _RENAMED else _all_gather
if _RENAMED and hasattr(c10d, "all_gather_into_tensor"):
    # torch 2.13 and 2.14 warn of the older name; since 2.15 it is an alias that does not.
    _DEPRECATED = getattr(c10d.all_gather_into_tensor, "__deprecated__", None)

    def _older_name(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if _DEPRECATED is not None and not _compiling():
            warnings.warn(_DEPRECATED, FutureWarning, stacklevel=2)
        return _all_gather(output_tensor, input_tensor, group, async_op)

    all_gather_into_tensor = stand_in(_older_name, c10d.all_gather_into_tensor)

# --- the rest ------------------------------------------------------------------------------------------

_all_gather_base = forwarded("_all_gather_base", "output_tensor", "input_tensor", coalesced=True)
all_gather_coalesced = forwarded("all_gather_coalesced", "output_tensor_lists", "input_tensor_list", staged=True)
gather = forwarded("gather", "tensor", "gather_list")
# These two are new in torch 2.14.
gather_single = forwarded("gather_single", "tensor", "gather_tensor")
gather_into_tensor = forwarded("gather_into_tensor", "tensor", "gather_tensor")
