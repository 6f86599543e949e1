"""_coalescing_manager: many calls launched as one.

A region of a single call on NCCL, such as Megatron makes for each of its buckets, is launched as that call. The NCCL
operation is the same and counts as one call of the group either way, so ranks that differ in it match all the same
(``Route.single_call_equivalent``: where they would not, the region is c10d's).
c10d's flight recorder shows the name of the way that each rank went.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm._torch import index_of
from safecomm.collectives.block import Block
from safecomm.collectives.general import DIRECT, SUM, TOGETHER, inside, stand_in
from safecomm.collectives.guards import PLAIN
from safecomm.collectives.holding import (
    Call,
    counter,
    finish,
    kind_for,
    relaxed,
    wait_for,
)
from safecomm.collectives.regions import REGIONS, PlainCall, Region
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import COLLECTIVE_OF, GATHER, REGION
from safecomm.collectives.takers import BUCKETS, at_once, default_group
from safecomm.core import captures
from safecomm.core.ledger import LEDGER

_original = _torch.coalescing_manager
_NAME = "_coalescing_manager"
_count = counter(_NAME)
# Bound once: each of these is read in every region.
_compiling = torch.compiler.is_dynamo_compiling
_getframe = sys._getframe
_partial = functools.partial
_pop = REGIONS.pop
_Group = c10d.ProcessGroup
_Collected = _torch.CoalescingManager
_routes = ROUTES.fast
_modes = _torch.dispatch_modes
_profiler = _torch.profiler
_recorded = torch.is_grad_enabled
_recording = captures.RECORDING
_inflight = _torch.inflight_as_graph_input
_names = _torch.c10d_vars
_WORLD = _torch.WORLD
_world = _torch.world
_HOOKS = _torch.HOOKS
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream
_all_allocated_on = LEDGER.streams.all_allocated_on

_NO_WAY: tuple[Any, tuple[dict[int, object], dict[int, object]]] = (None, ({}, {}))
# Whether it is torch's own, and not other code's, which expects to see the end of a region.
_ORDINARY = _original is not None and _torch.is_torchs(_original)


def _coalescing_manager(
    group: c10d.ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Any:
    # A rank outside of the group has nothing to hold. What c10d opens for a batch is for a device.
    if _compiling() or (device is not None and inside.batch) or not (group is None or isinstance(group, _Group)):
        return _original(group, device, async_ops)
    _count()
    return _Manager(group, device, async_ops, _getframe(1))


_coalescing_manager = None if _original is None else stand_in(_coalescing_manager, _original)  # type: ignore[assignment]


class _Manager(Block):
    """The context of one region: c10d's own manager, and what its end has to hold."""

    # Not a generator as c10d's is: making and ending one takes as long as all the rest.

    _open: Any = None  # what is open: c10d's two, the region, and buckets that are closed meanwhile

    def __init__(
        self, group: c10d.ProcessGroup | None, device: torch.device | None, async_ops: bool, frame: types.FrameType
    ) -> None:
        self._arguments = (group, device, async_ops)
        self._caller: types.FrameType | None = frame

    def _recreate_cm(self) -> _Manager:  # of a decorator, for each call
        return _Manager(*self._arguments, self._caller)  # type: ignore[arg-type]

    def __enter__(self) -> Any:
        frame, self._caller = self._caller, None
        if frame is None:
            raise AttributeError("_coalescing_manager(): a region can be entered only once; make another one")
        group, device, async_ops = self._arguments
        group = group or default_group()
        self._arguments = group, device, async_ops
        region = Region()
        simple = device is None and _names[_WORLD] is _world
        if simple and _ORDINARY and not BUCKETS and isinstance(group, _Group) and group not in REGIONS:
            # This is how c10d's begins. It comes at the end, if there is more than one call to launch.
            cm = _Collected()
            self._open = cm, region, None, frame, None
            self._close_by(_partial(_pop, group))
            REGIONS[group] = region
            return cm
        beside = at_once(group)
        beside.__enter__()
        table = _torch.open_regions()
        was_open = group in table
        if not was_open:
            self._close_by(functools.partial(_pop, group) if simple else self._abandoned)
        try:
            manager = _original(*self._arguments)
            cm = manager.__enter__()
            self._open = cm, region, manager, frame, beside
            REGIONS[group] = table[group] = region
        except BaseException as error:
            if not was_open:  # c10d would go on collecting the group's calls without running them
                _forget(group)
            if isinstance(error, TypeError):  # of C++, which has begun nothing on a device that is none
                self._watch = None
            beside.__exit__(None, None, None)
            raise
        return cm

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._open is None:
            if self._caller is not None:
                raise RuntimeError("_coalescing_manager(): a region was left that had not been entered")
            return  # a second time
        cm, region, manager, frame, beside = self._open
        self._open = None  # a kept region keeps nothing of it
        try:
            if kind is not None or len(region) != 1 or not self._end_single(cm, region, frame):
                self._end(kind is not None, cm, region, manager, frame)
        finally:
            if beside is not None:
                REGIONS.pop(self._arguments[0], None)  # c10d has taken its own, which may be another table's
                beside.__exit__(None, None, None)
        self._watch = None

    def _end_single(self, cm: Any, region: Region, frame: types.FrameType) -> bool:
        """End a region of one call as that call; return False, with nothing done, if it has to be ended otherwise."""
        group, device, async_ops = self._arguments
        if device or region.used is not None or REGIONS.get(group) is not region or _names[_WORLD] is not _world:
            return False
        ready = _single_call(group, region[0], async_ops)
        if ready is None:
            return False
        REGIONS.pop(group)
        if len(region) != 1:  # another thread may have made another call since
            REGIONS[group] = region
            return False
        # c10d's manager, if there is one, is left where it is: it would launch the call again.
        function, route, options, tensors = ready
        inner = function(group if _HOOKS else route.backend, *tensors, options)
        index = route.index
        if inner is not None and not async_ops:
            inner.wait()
            inner = None
        if inner is not None or (
            index >= 0 and _alloc_stream(tensors[0].data_ptr(), tensors[-1].data_ptr()) != _current(index)
        ):
            work = finish(Call(REGION, group, tensors, index, frame), inner)
            if work is not None:
                cm.works.append(work)
        return True

    def _abandoned(self, _: object) -> None:
        _abandon(self._arguments[0], self._arguments[1])

    def _end(self, failed: bool, cm: Any, region: Region, manager: Any, frame: types.FrameType) -> None:
        group, device, async_ops = self._arguments
        if failed:
            cm.works = _abandon(group, device)
            _finish(cm, group, region, frame)
            return
        # Also what was called through torch's own functions. KeyError, as of c10d's, if the region is closed already.
        calls = REGIONS[group] if manager is None else REGIONS.get(group, [])
        if manager is None and region.used is None and (together := _together(region, group, calls, async_ops)):
            taken = REGIONS.pop(group)
            if len(taken) == len(together.given):  # as in _end_single()
                cm.append(together.launch(group, async_ops, region.ordered, frame))
                return
            calls = REGIONS[group] = taken
        uses = region.uses
        index = index_of(calls[0].tensor) if calls else _torch.HOST
        kept = index < 0 or kind_for(group, index).needs_aliases
        for call in calls:
            tensor, other = call.tensor, call.dst_tensor
            # Else what is done to them is recorded, or raises.
            if kept and not (tensor.requires_grad or (other is not None and other.requires_grad)):
                tensor = call.tensor = uses.alias(tensor)
                if other is not None:
                    other = call.dst_tensor = uses.alias(other)
            uses.tensors.append(tensor)
            if other is not None:
                uses.tensors.append(other)
            # c10d tells calls apart by the function that its module has under the name, which a patch may have changed.
            call.op = getattr(c10d, call.op.__name__, call.op)
        theirs = cm
        if manager is None:
            REGIONS.pop(group)
            manager = _original(*self._arguments)
            theirs = manager.__enter__()
            REGIONS[group].extend(calls)
        before = len(theirs.works)
        with relaxed(group, uses.tensors):
            manager.__exit__(None, None, None)
        launched = theirs.works[before:]
        own = cm.works[:before] if theirs is cm else cm.works  # callers may have put works of their own in
        cm.works = launched
        try:
            _finish(cm, group, region, frame)
        finally:
            cm.works[:0] = own


def _finish(cm: Any, group: object, region: Region, frame: types.FrameType) -> None:
    """Hold what ``region`` has launched, whose work is in c10d's ``cm``, and make the handle that."""
    uses = region.uses
    index = index_of(uses.tensors[0]) if uses.tensors else _torch.ELSEWHERE
    call = Call(
        REGION, group, uses.tensors, index, frame, staged=uses.staged, ordered=region.ordered, aliases=uses.aliases
    )
    (inner,) = cm.works or (None,)
    work: Any = finish(call, inner)
    if work is not inner:
        cm.works[:] = [work]
        for member in uses.works:
            member._region = work


def _single_call(
    group: object, call: Any, async_ops: bool
) -> tuple[Callable[..., c10d.Work | None], Route, object, list[torch.Tensor]] | None:
    """Return what it takes to launch the only ``call`` of a region as it is; None where that is c10d's to do."""
    route = _routes.get(id(group))
    if route is None or not route.single_call_equivalent or not _ORDINARY:
        return None
    name = getattr(call.op, "__name__", "")
    function, tables = DIRECT.get(name, _NO_WAY)
    options = tables[bool(async_ops)].get(id(SUM if call.redop is None else call.redop))
    if options is None:
        return None
    given, other = call.tensor, call.dst_tensor
    tensors = [given] if other is None else [other, given]
    # That one has been found to be so when it was collected, where perhaps no gradient was recorded.
    records = _recorded() and (given.requires_grad or (other is not None and other.requires_grad))
    if records or type(call) is not PlainCall:
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.is_nested:
                return None
        if not route.guards.plain(*tensors):
            return None
    if other is not None:
        part, whole = (given, other) if COLLECTIVE_OF[name] == GATHER else (other, given)
        if whole.numel() != route.world * part.numel() or not other.is_contiguous():
            return None
    if (
        # c10d's coalesced calls take one that is not contiguous as it comes, and the others refuse it.
        not given.is_contiguous()
        or _modes()
        or _profiler._is_profiler_enabled
        or _recording
        or (async_ops and _inflight())
    ):
        return None
    return function, route, options, tensors


class _Together(NamedTuple):
    """What it takes to launch the calls of a region as one."""

    function: Callable[..., c10d.Work | None]
    options: object
    route: Route
    given: list[torch.Tensor]
    others: list[torch.Tensor]
    """The outputs, where the calls have an output and an input."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.given, *self.others]

    def launch(self, group: object, async_ops: bool, ordered: bool, frame: types.FrameType) -> object:
        """Launch them as c10d does at the end of a region, and return what the region's caller gets."""
        function, options, route, given, others = self
        aliases: list[torch.Tensor] = []
        # The calls that take lists keep their tensors with their own work, and so do not need aliases on NCCL: #187565
        # is of what c10d's manager ends. gloo's work keeps them for as long as its handle is there.
        if route.index < 0:
            given, others = _aliases(given, aliases), _aliases(others, aliases)
        to_launch = (others, given) if others else (given,)
        if route.asks_in_wait:
            inner = route.launch(function, group, *to_launch, options)
        else:
            inner = function(group, *to_launch, options)
        tensors, index = self.tensors, route.index
        if inner is not None and not async_ops:
            wait_for(route, inner, REGION, group, tensors, frame)
            inner = None
        if inner is None and (
            index < 0 or _all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in tensors]))
        ):
            _torch.leave_all_empty(aliases)
            return None
        return finish(Call(REGION, group, tensors, index, frame, aliases=aliases, ordered=ordered), inner)


def _together(region: Region, group: object, calls: list[Any], async_ops: bool) -> _Together | None:
    """Return what it takes to launch all ``calls`` of a region without c10d's manager; None where they are c10d's."""
    route = _routes.get(id(group))
    if (
        route is None
        or not _ORDINARY
        or not calls
        or not all(type(call) is PlainCall for call in calls)  # each was found to be plain when it was collected
    ):
        return None
    op, redop = calls[0].op, calls[0].redop
    function, tables = TOGETHER.get(op.__name__, _NO_WAY)
    options = tables[bool(async_ops)].get(id(SUM if redop is None else redop))
    if options is None:
        return None
    given, others = [], []
    for call in calls:
        tensor, other = call.tensor, call.dst_tensor
        # Where a gradient is recorded torch does more; and calls of several kinds c10d refuses.
        if call.op is not op or tensor.requires_grad or (other is not None and other.requires_grad):
            return None
        given.append(tensor)
        if other is not None:
            others.append(other)
    if (
        _modes()
        or _torch.transform() is not None
        or _profiler._is_profiler_enabled
        or _recording
        or (async_ops and _inflight())
    ):
        return None
    return _Together(function, options, route, given, others)


def _aliases(tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what c10d is given in place of plain ``tensors``, and put it into ``aliases``; see ``Region.alias``."""
    inference = torch.is_inference_mode_enabled()
    found = []
    for tensor in tensors:
        if tensor.is_inference() is inference:
            aliases.append(tensor.detach())
            found.append(aliases[-1])
        else:
            found.append(tensor)
    return found


def _forget(group: object) -> None:
    """Take the region of ``group`` out of the tables, without launching anything."""
    REGIONS.pop(group, None)
    _torch.open_regions().pop(group, None)


def _abandon(group: object, device: torch.device | None) -> list[Any]:
    """End a region that an exception left, and return the work of what it had launched, if any.

    c10d does not: the group would go on collecting calls without running them, and with ``device`` the thread would
    stay inside of an NCCL group.
    """
    _forget(group)
    if device is None:
        return []  # nothing was launched yet
    work = _torch.end_coalescing(group, device)
    return [] if work is None else [work]
