"""Hold what a call has left running, whatever it answered: nothing, a work, or a future."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, backends
from safecomm._torch import index_of
from safecomm.backends import Kind
from safecomm.collectives.regions import REGIONS, Region
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import Row
from safecomm.collectives.tensors import alloc_stream_of_few, storages_of
from safecomm.core.call_site import outside, program
from safecomm.core.holds import leave_all_empty
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.core.work import RegionWork, StagedWork, Work, member, waited_for_once

_NOTHING = contextlib.nullcontext()
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream
_all_allocated_on = LEDGER.streams.all_allocated_on

_counts: dict[str, itertools.count[int]] = {}


def counter(name: str) -> Callable[[], int]:
    """Return a function that counts a call of ``name``: one C call, because every collective makes it."""
    return _counts.setdefault(name, itertools.count()).__next__


def counted() -> dict[str, int]:
    """Return how often each function was called in this process, those that never were left out."""
    counts = {name: int(repr(count)[len("count(") : -1]) for name, count in _counts.items()}
    return {name: count for name, count in sorted(counts.items()) if count}


def caller() -> types.FrameType:
    """Return the innermost frame outside of this package: the call site."""
    return outside(("safecomm.collectives.",))


def hold_read(op: str, group: object, tensor: torch.Tensor) -> None:
    """Hold ``tensor``, which an operator has read on the current stream, if it was allocated on another one (S1)."""
    index = index_of(tensor)
    if index >= 0 and _alloc_stream(tensor.data_ptr()) != _current(index):
        LEDGER.hand_off(op, group, index, storages_of([tensor]), program())


class _Span(threading.local):
    open = False


SPAN = _Span()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Show a call as ``safecomm::NAME`` in a profile, and as an NVTX range where torch emits those."""
    SPAN.open = True
    try:
        with torch.profiler.record_function(f"safecomm::{name}"):
            yield
    finally:
        SPAN.open = False


def kind_for(group: object, index: int) -> Kind:
    """Return what serves device ``index`` in ``group``."""
    return ROUTES.of(group, index).kind if isinstance(group, c10d.ProcessGroup) else backends.UNKNOWN


def relaxed(group: object, tensors: list[torch.Tensor]) -> AbstractContextManager[object]:
    """Return the context for a function of c10d's that may wait for what it launches; see ``Route.relaxed``."""
    if not backends.SOME_ASK_IN_WAIT or not isinstance(group, c10d.ProcessGroup):
        return _NOTHING
    index = HOST
    if tensors:
        index = index_of(tensors[0])
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = _torch.current_device()
    return _NOTHING if index < 0 else ROUTES.of(group, index).relaxed()


def wait_for(
    route: Route, inner: c10d.Work, op: str, group: object, tensors: list[torch.Tensor], frame: types.FrameType
) -> None:
    """Wait for the work of a synchronous call on the backend of ``route``, with what else it takes than ``wait()``.

    One that fails may still be running, on the current stream: what that does not order is held (S4).
    """
    try:
        route.wait_for(inner)
    except Exception:
        if route.index >= 0:
            LEDGER.hand_off(op, group, route.index, storages_of(tensors), frame)
        raise


def holds_itself(group: object) -> bool:
    """Return whether what a call on ``group`` uses will be held by safecomm, so that c10d need not hold it."""
    return isinstance(group, c10d.ProcessGroup) and type(REGIONS.get(group)) in (Region, type(None))


def needs_aliases(group: object, tensors: list[torch.Tensor]) -> bool:
    """Return whether the backend that ``tensors`` go to has more hold them than need be, unless it is given aliases."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (index := index_of(tensor)) >= 0:
            return kind_for(group, index).needs_aliases
    return False


def hold_launched(
    op: str, inner: c10d.Work | None, route: Route, group: object, tensors: list[torch.Tensor], asynchronous: bool,
    frame: types.FrameType,
) -> c10d.Work | None:  # fmt: skip
    """Hold what a launch on ``route`` uses, one or two plain tensors, on NCCL; return what the caller gets."""
    index = route.index
    first, last = tensors[0], tensors[-1]
    alloc_stream = HOST if index < 0 else _alloc_stream(first.data_ptr(), last.data_ptr())
    if asynchronous:
        memory = first.untyped_storage()
        storages = (memory,) if len(tensors) == 1 else (memory, last.untyped_storage())
        return inner and route.hold(Work(), op, inner, storages, alloc_stream, frame)
    if inner is not None:
        inner.wait()
    if index >= 0 and alloc_stream != _current(index):
        LEDGER.hand_off(op, group, index, storages_of(tensors), frame)
    return None


def hold_list(
    row: Row, inner: c10d.Work, route: Route, group: object, tensors: list[torch.Tensor], frame: types.FrameType
) -> Work:
    """Hold the plain ``tensors`` of an asynchronous call that was launched on ``route``, and return its handle."""
    index = route.index
    storages = tuple([tensor.untyped_storage() for tensor in tensors])
    if index < 0:
        if row.pollable:
            return route.hold(Work(), row.name, inner, storages, HOST, frame)
        return route.unordered(group).hold(waited_for_once(), row.name, inner, storages, HOST, frame)
    stream = _current(index)
    alloc_stream = stream if _all_allocated_on(stream, sorted([tensor.data_ptr() for tensor in tensors])) else None
    if not row.staged:
        return route.hold(Work(), row.name, inner, storages, alloc_stream, frame)
    if stream and LEDGER.streams.is_capturing(index, stream):
        return ROUTES.hold(
            Work(), row.name, inner, group, index, storages, frame, staged=True, alloc_stream=alloc_stream
        )
    work = StagedWork()
    work.stream = stream
    return route.hold(work, row.name, inner, storages, alloc_stream, frame)


def hold_together(
    inner: c10d.Work | None, route: Route, group: object, tensors: list[torch.Tensor], aliases: list[torch.Tensor],
    asynchronous: bool, ordered: bool, frame: types.FrameType,
) -> Work | None:  # fmt: skip
    """Hold the plain ``tensors`` of a region, of which c10d has ``aliases``; return what the region's caller gets."""
    op, index = "_coalescing_manager", route.index
    stream = _current(index) if index >= 0 else HOST
    local = index < 0 or _all_allocated_on(stream, sorted([tensor.data_ptr() for tensor in tensors]))
    if not asynchronous or inner is None:
        if inner is not None:
            route.wait_for(inner)
        leave_all_empty(aliases)
        if not local:
            LEDGER.hand_off(op, group, index, storages_of(tensors), frame)
        return None
    # gloo does not tell the end of a reduce-scatter, and its work copies from the aliases at each wait.
    work = RegionWork() if ordered else waited_for_once()
    work.aliases = tuple(aliases)
    storages = tuple([tensor.untyped_storage() for tensor in tensors])
    to = route if ordered else route.unordered(group)
    return to.hold(work, op, inner, storages, stream if local else None, frame)


def finish(row: Row, result: object, group: object, tensors: list[torch.Tensor], frame: types.FrameType) -> object:
    """Hold what a call of ``row`` on ``group`` left running, and return what its caller gets for ``result``."""
    if type(result) is _torch.FakeWork:
        return result
    if isinstance(result, Work) or not tensors:  # c10d's function came back through a wrapper, which holds already
        return result
    region = REGIONS.get(group) if REGIONS else None
    if region is not None:
        # Of torch's own c10d has launched nothing yet, and holds what it launches.
        return _collect(row, result, group, region, tensors) if type(region) is Region else result
    index = index_of(tensors[0])
    if index < HOST or not isinstance(group, c10d.ProcessGroup) or type(result) is _torch.IllegalWork:
        return result
    if isinstance(result, c10d.Work):
        return _hold_work(row, result, group, index, tensors, frame)
    if isinstance(result, torch.Future):
        _hold_future(row.name, result, group, index, tensors, frame)
    else:
        _hold_used(row.name, group, index, storages_of(tensors), frame)
    return result


def _collect(row: Row, result: object, group: object, region: Region, tensors: list[torch.Tensor]) -> object:
    """Leave what a call uses to the end of the region that it is in."""
    uses = region.uses
    uses.tensors.extend(tensors)
    uses.staged |= row.staged
    region.ordered = region.ordered and _ends_in_order(row, group, index_of(tensors[0]))
    if isinstance(result, c10d.Work) and type(result) is not _torch.IllegalWork:
        result = member(result)
        uses.works.append(result)
    return result


def _ends_in_order(row: Row, group: object, index: int) -> bool:
    """Return whether the works of ``row`` are kept with the others of their group; else they are kept apart."""
    return row.ordered and (row.pollable or index != HOST or kind_for(group, HOST).pollable_p2p)


def _handle_for(
    op: str, group: object, index: int, storages: tuple[object, ...], ordered: bool, frame: types.FrameType
) -> tuple[Work, bool]:
    """Return a handle for a work of any backend, and whether the work is kept with the others of its group.

    It is not, of a backend that relies on ``record_stream``, where that does nothing: for memory that is not the
    allocator's. The handle waits only once where a second wait may hang or copy again.
    """
    kind = kind_for(group, index)
    if kind.records:
        if not ordered:  # a send or receive is among them, which runs on the current stream
            LEDGER.hand_off(op, group, index, storages, frame)
        ordered = all(type(one) is torch.UntypedStorage and one.resizable() for one in storages)
    once = not (kind.tells or index != HOST) or not (ordered or kind.pollable_p2p)
    return waited_for_once() if once else Work(), ordered


def _hold_work(
    row: Row, inner: c10d.Work, group: object, index: int, tensors: list[torch.Tensor], frame: types.FrameType
) -> Work:
    ordered = _ends_in_order(row, group, index)
    storages = storages_of(tensors)
    route = ROUTES.fast.get(id(group))
    if route is not None and route.index == index and route.stream_ordered and ordered and not row.staged:
        work = route.hold(Work(), row.name, inner, storages, alloc_stream_of_few(index, storages), frame)
        if type(inner) is not c10d.Work:  # somebody's own, of which only wait() need be what it says
            work.full = True
        return work
    work, ordered = _handle_for(row.name, group, index, storages, ordered, frame)
    return ROUTES.hold(work, row.name, inner, group, index, storages, frame, staged=row.staged, unordered=not ordered)


def _hold_used(op: str, group: object, index: int, storages: tuple[object, ...], frame: types.FrameType) -> None:
    """Hold what was used by a call that is in the order of the current stream, or over."""
    if id(group) not in ROUTES.fast:
        ROUTES.of(group, index)
    if index != HOST:
        LEDGER.hand_off(op, group, index, storages, frame)


class _FutureAsWork:
    """What the ledger asks of a work, answered by a future."""

    def __init__(self, future: torch.Future[object]) -> None:
        self.wait = future.wait
        self.is_completed = future.done


def _hold_future(
    op: str,
    future: torch.Future[object],
    group: object,
    index: int,
    tensors: list[torch.Tensor],
    frame: types.FrameType,
) -> None:
    """Hold the tensors of a call that answers with a future: the coalesced ones, which torch has deprecated."""
    storages = storages_of(tensors)
    if index == HOST:
        ROUTES.hold(Work(), op, _FutureAsWork(future), group, index, storages, frame).has_future = True
        return
    # On the device a future is done when the call is launched, and waiting for it orders the current stream: one that
    # the program does not use, so that its streams are not delayed.
    with LEDGER.streams.using(index, LEDGER.streams.spare(index)):
        future.wait()
        LEDGER.hand_off(op, group, index, storages, frame)


def hold_region(cm: Any, group: object, region: Region, frame: types.FrameType) -> None:
    """Hold what ``region`` has launched, whose work is in c10d's ``cm``, and make that the handle."""
    uses = region.uses
    index = index_of(uses.tensors[0]) if uses.tensors else _torch.ELSEWHERE
    if index < HOST:
        return
    storages = storages_of(uses.tensors)
    if cm.works:
        (inner,) = cm.works
        op = "_coalescing_manager"
        work, ordered = _handle_for(op, group, index, storages, region.ordered, frame)
        ROUTES.hold(
            work, op, inner, group, index, storages, frame, aliases=tuple(uses.aliases),
            staged=uses.staged, unordered=not ordered, alloc_stream=alloc_stream_of_few(index, storages),
        )  # fmt: skip
        cm.works[:] = [work]
        for call in uses.works:
            call._region = work
        return
    leave_all_empty(uses.aliases)
    _hold_used("_coalescing_manager", group, index, storages, frame)
