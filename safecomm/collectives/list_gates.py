"""The direct way of the list forms: plain calls past c10d's Python, and a hold of all that they were given.

An ordinary call, of plain tensors on a group that has a route, goes to what c10d's own function calls in C++. What is
not ordinary is c10d's function's, which raises what it raises and does the rest. ``all_gather`` and ``reduce_scatter``
have ways of their own before this one: see ``lists.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives.general import forwarded, prepared, prepared_by_root, prepared_for_all
from safecomm.collectives.holding import counter, hold_list
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES, RootOptions, Route
from safecomm.collectives.table import ROWS, Row
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, offer
from safecomm.collectives.tensors import storages_of
from safecomm.core.ledger import LEDGER
from safecomm.core.work import Work

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


# --- all_gather and reduce_scatter, as lists.py leaves them ---

_function, _gather_options = prepared_for_all(ROWS["all_gather"].launch)
_ALL_GATHER = _Way(ROWS["all_gather"], _function)


def run_all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: object, asynchronous: bool) -> object:
    """Run an ordinary ``all_gather``, and return what its caller gets; GENERAL for a call that is c10d's function's."""
    if type(tensor_list) is not list or not tensor_list or _ALL_GATHER.function is None:
        return GENERAL
    tensors = [*tensor_list, tensor]
    route = _route_of(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    given = _given(route, tensors, asynchronous)
    return _run(
        _ALL_GATHER, route, group, [given[:-1]], given[-1:], _gather_options[asynchronous], tensors, asynchronous
    )


_function, *_reduce_options = prepared(ROWS["reduce_scatter"].launch)
_REDUCE_SCATTER = _Way(ROWS["reduce_scatter"], _function)


def run_reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: object, group: object, asynchronous: bool
) -> object:
    """As :func:`run_all_gather`, of a ``reduce_scatter``."""
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
