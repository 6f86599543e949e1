"""The direct way of the list forms: plain calls without c10d's Python, and a hold of all that they were given.

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

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn import Parameter as _Parameter

from safecomm import _torch
from safecomm.arena.use import IN_USE, may_be_used, would_be_used
from safecomm.collectives.general import forwarded, prepared, prepared_by_root, prepared_for_all
from safecomm.collectives.guards import ListGuards
from safecomm.collectives.holding import Call, counter, finish, span
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, offer
from safecomm.core import captures
from safecomm.core.ledger import LEDGER

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
_requires_grad = operator.attrgetter("requires_grad")
_NEITHER: tuple[None, list[torch.Tensor]] = None, []
_NCCL = _torch.NCCL


# --- an ordinary call ---


class _Way:
    """How the calls of one row go."""

    __slots__ = ("count", "function", "general", "names", "options", "original", "row", "run")

    def __init__(self, key: str, run: Callable[..., object]) -> None:
        self.row = row = ROWS[key]
        self.original: Callable[..., object] = getattr(c10d, key)
        self.general = forwarded(row, asks=False)
        self.names = (*row.given, *row.last)
        self.run = run  # launches an ordinary call, and answers GENERAL to what is none
        how = prepared_by_root(row) if row.last else prepared(row.launch) if row.given else prepared_for_all(row.launch)
        self.function: Callable[..., Any] = how[0]
        self.options: Any = how[1]
        self.count = counter(row.name)


def _call(way: _Way, given: tuple[object, ...], group: object, asynchronous: object, *more: object) -> object:
    """Make a call, as the gates of ``gates.py`` do. ``more``: its arguments that are no tensors."""
    if _compiling():
        return way.original(*given, group=group, async_op=asynchronous, **dict(zip(way.names, more, strict=True)))
    if _nonempty and not _can_skip_sweep():
        LEDGER.sweep()
    to = group if group is not None or _names[_WORLD] is not _world else _groups[_DEFAULT]
    if ENGINES or BUCKETS or REGIONS:
        taken = offer(way.row, to, given, more[0] if "op" in way.names else None, asynchronous)
    else:
        taken = DECLINED
    if taken is DECLINED:
        result = way.run(way, to, asynchronous, *given, *more)
        if result is not GENERAL:
            return result
    elif taken is not GENERAL:
        return taken.result
    return way.general(*given, group=group, async_op=asynchronous, **dict(zip(way.names, more, strict=True)))


def _ordinary(
    group: object, tensors: list[torch.Tensor], asynchronous: object
) -> tuple[Route | None, list[torch.Tensor]]:
    """Return the route of an ordinary call of ``tensors``, and what the backend is given in their place.

    No route of a call that is c10d's function's.
    """
    route = _routes.get(id(group))
    try:
        if route is None or _has_torch_function(*tensors):  # a subclass, or a TorchFunctionMode is active
            return _NEITHER
        for tensor in tensors:
            if tensor.is_nested:  # the guards must not be asked
                return _NEITHER
        if (
            not route.guards.all(tensors)
            or _modes()
            or _profiler._is_profiler_enabled
            or not (asynchronous is False or (asynchronous is True and not _inflight()))
        ):
            return _NEITHER
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        return _NEITHER
    if not asynchronous or route.stream_ordered or True in map(_requires_grad, tensors):
        return route, tensors
    return route, [tensor.detach() for tensor in tensors]  # see tensors.host_alias


def _run(
    way: _Way, function: Callable[..., c10d.Work | None], route: Route, group: object, output: object, source: object,
    options: object, tensors: list[torch.Tensor], asynchronous: bool, flat: list[torch.Tensor] | None = None,
) -> object:  # fmt: skip
    """Launch an ordinary call of ``tensors``, hold them, and return what the caller gets.

    ``flat``: the two tensors that go in their place.
    """
    row, index = way.row, route.index
    launcher = group if _HOOKS else route.backend
    way.count()
    if _recording:
        captures.check_group(row.name, group, tensors)
    used = flat or tensors
    inner = None
    try:
        if _profiler._is_profiler_enabled:
            with span(row.name):
                inner = function(launcher, output, source, options)
        elif route.asks_in_wait:
            inner = route.launch(function, launcher, output, source, options)
        else:
            inner = function(launcher, output, source, options)
        if inner is not None and not asynchronous:  # None where ProcessGroupNCCL ran it on the current stream
            if route.asks_in_wait:
                route.wait_for(inner)
            else:
                inner.wait()
            inner = None
    except Exception as error:
        # What was launched before that may still be running.
        finish(Call(row, group, used, index, _getframe(4)), error)
        raise
    if _recording:
        # Not the buffer, which is gone in a moment: a replay looks whether the caller's own tensors have moved.
        captures.note(row.name, group, tensors, _getframe(4))
    if inner is None and (
        index < 0 or _all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in used]))
    ):
        return None
    return finish(Call(row, group, used, index, _getframe(4), staged=row.staged and flat is None), inner)


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


# --- the calls ---


def _run_all_gather(
    way: _Way, group: object, asynchronous: bool, tensor_list: list[torch.Tensor], tensor: torch.Tensor
) -> object:
    route = _flat_route(tensor_list, tensor, group, asynchronous) if _launch_all_gather and may_be_used() else None
    if route is not None and (whole := whole_of(tensor_list, tensor, route.backend)) is not None:
        # c10d's copies would say so to autograd, and raise for tensors of inference mode outside of it.
        if not whole.is_inference():
            _torch.increment_versions(tensor_list)
        elif not _inference():
            return GENERAL
        return _run(
            way, _launch_all_gather, route, group, whole, tensor, _flat_options[asynchronous],
            [*tensor_list, tensor], asynchronous, [whole, tensor],
        )  # fmt: skip
    if type(tensor_list) is not list or not tensor_list:
        return GENERAL
    tensors = [*tensor_list, tensor]
    route, given = _ordinary(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    options = way.options[asynchronous]
    return _run(way, way.function, route, group, [given[:-1]], given[-1:], options, tensors, asynchronous)


_launch_all_gather, _flat_options = prepared_for_all(_torch.all_gather)
_ALL_GATHER = _Way("all_gather", _run_all_gather)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    return _call(_ALL_GATHER, (tensor_list, tensor), group, async_op)


def _run_reduce_scatter(
    way: _Way, group: object, asynchronous: bool, output: torch.Tensor, input_list: list[torch.Tensor], op: object
) -> object:
    route = _flat_route(input_list, output, group, asynchronous) if may_be_used() else None
    if (
        route is not None
        and (options := _flat_reduce_options[asynchronous].get(id(op))) is not None
        and (whole := whole_of(input_list, output, route.backend)) is not None
    ):
        return _run(
            way, _launch_reduce_scatter, route, group, output, whole, options, [output, *input_list],
            asynchronous, [output, whole],
        )  # fmt: skip
    if type(input_list) is not list or not input_list:
        return GENERAL
    tensors = [output, *input_list]
    route, given = _ordinary(group, tensors, asynchronous)
    if route is None or (options := way.options[asynchronous].get(id(op))) is None:
        return GENERAL
    return _run(way, way.function, route, group, given[:1], [given[1:]], options, tensors, asynchronous)


_launch_reduce_scatter, _flat_reduce_options = prepared(_torch.reduce_scatter)
_REDUCE_SCATTER = _Way("reduce_scatter", _run_reduce_scatter)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: c10d.ReduceOp | c10d.ReduceOp.RedOpType = c10d.ReduceOp.SUM,
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    return _call(_REDUCE_SCATTER, (output, input_list), group, async_op, op)


def _run_all_to_all(
    way: _Way, group: object, asynchronous: bool, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> object:
    if type(outputs) is not list or type(inputs) is not list or not inputs:
        return GENERAL
    tensors = [*outputs, *inputs]
    route, given = _ordinary(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    count, options = len(outputs), way.options[asynchronous]
    return _run(way, way.function, route, group, given[:count], given[count:], options, tensors, asynchronous)


_ALL_TO_ALL = _Way("all_to_all", _run_all_to_all)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: c10d.ProcessGroup | None = None,
    async_op: bool = False,
) -> object:
    return _call(_ALL_TO_ALL, (output_tensor_list, input_tensor_list), group, async_op)


def _run_by_root(
    way: _Way, group: object, asynchronous: bool, tensor: torch.Tensor, parts: list[torch.Tensor] | None,
    root: int | None, group_root: int | None,
) -> object:  # fmt: skip
    if parts is None:
        parts = []
    elif type(parts) is not list:
        return GENERAL
    tensors = [*parts, tensor]
    route, given = _ordinary(group, tensors, asynchronous)
    if route is None:
        return GENERAL
    if root is None and group_root is None:
        root = 0
    options = way.options(route, group, root, group_root, None, asynchronous)
    # The root has the list, and no other rank has.
    if options is None or (options.rootRank == route.rank) is not bool(parts):
        return GENERAL
    lists, one = [given[:-1]] if parts else [], given[-1:]
    output, source = (lists, one) if way is _GATHER else (one, lists)
    return _run(way, way.function, route, group, output, source, options, tensors, asynchronous)


_GATHER = _Way("gather", _run_by_root)
_SCATTER = _Way("scatter", _run_by_root)


def gather(
    tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, dst: int | None = None,
    group: c10d.ProcessGroup | None = None, async_op: bool = False, group_dst: int | None = None,
) -> object:  # fmt: skip
    return _call(_GATHER, (tensor, gather_list), group, async_op, dst, group_dst)


def scatter(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, src: int | None = None,
    group: c10d.ProcessGroup | None = None, async_op: bool = False, group_src: int | None = None,
) -> object:  # fmt: skip
    return _call(_SCATTER, (tensor, scatter_list), group, async_op, src, group_src)
