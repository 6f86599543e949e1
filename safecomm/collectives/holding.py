"""The one end of a call: what it has left running is held, whatever it answered: nothing, a work, or a future.

The gates of single tensors write out the ends of ordinary calls, and come here with what fails.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm._torch import index_of
from safecomm.collectives import backends
from safecomm.collectives.backends import Kind
from safecomm.collectives.regions import REGIONS, Region
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import Row
from safecomm.collectives.tensors import common_alloc_stream, storages_of
from safecomm.core.call_site import outside, program
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.core.work import StagedWork, Work, member, waited_for_once

_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream

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


def holds_itself(group: object) -> bool:
    """Return whether what a call on ``group`` uses will be held by safecomm, so that c10d need not hold it."""
    return isinstance(group, c10d.ProcessGroup) and type(REGIONS.get(group)) in (Region, type(None))


def needs_aliases(group: object, tensors: list[torch.Tensor]) -> bool:
    """Return whether the backend that ``tensors`` go to has more hold them than need be, unless it is given aliases."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (index := index_of(tensor)) >= 0:
            return kind_for(group, index).needs_aliases
    return False


class Call:
    """A call that was launched, and what it uses. An ordinary one of a gate needs none, unless it fails."""

    __slots__ = ("aliases", "frame", "group", "index", "ordered", "region", "row", "staged", "tensors")

    def __init__(
        self, row: Row, group: object, tensors: list[torch.Tensor], index: int, frame: types.FrameType, *,
        staged: bool = False, ordered: bool = True, aliases: Sequence[torch.Tensor] = (),
        region: object = None,
    ) -> None:  # fmt: skip
        self.row = row
        self.group = group
        self.tensors = tensors
        self.index = index  # of the device that it runs on
        self.frame = frame  # the call site
        self.staged = staged  # c10d copies through memory of its own
        self.ordered = ordered  # its work ends after those that were launched on the group before it
        self.aliases = aliases  # what c10d was given in place of the tensors
        self.region = region  # the open one that collects it


def of_c10d(row: Row, group: object, tensors: list[torch.Tensor], frame: types.FrameType | None = None) -> Call:
    """Return a call of c10d's function of ``row``, which has returned, or raised."""
    index = index_of(tensors[0]) if tensors else _torch.ELSEWHERE
    region = REGIONS.get(group) if REGIONS else None
    return Call(
        row, group, tensors, index, frame or caller(), staged=row.staged, ordered=row.ordered, region=region
    )  # fmt: skip


def wait_for(
    route: Route, inner: c10d.Work, row: Row, group: object, tensors: list[torch.Tensor], frame: types.FrameType
) -> None:
    """Wait for the work of a synchronous call on the backend of ``route``, with what else it takes than ``wait()``.

    One that fails may still be running, on the current stream: what that does not order is held (S4).
    """
    try:
        route.wait_for(inner)
    except Exception as error:
        finish(Call(row, group, tensors, route.index, frame), error)
        raise


def finish_read(row: Row, group: object, tensor: torch.Tensor) -> None:
    """End an operator that has read ``tensor`` on the current stream, which may not be the memory's (S1)."""
    index = index_of(tensor)
    if index >= 0 and _alloc_stream(tensor.data_ptr()) != _current(index):
        finish(Call(row, group, [tensor], index, program()), None)


def finish(call: Call, answer: object) -> object:
    """End ``call``: hold what it has left running, and return what its caller gets.

    ``answer``: a work or a future; None, or what it has raised, if what runs is in the order of the current stream.
    """
    row, group, index, region = call.row, call.group, call.index, call.region
    if type(answer) is _torch.FakeWork:
        return answer
    if isinstance(answer, Work) or not call.tensors:  # c10d's function came back through a wrapper, which holds already
        return answer
    if region is not None:
        # Of torch's own c10d has launched nothing yet, and holds what it launches.
        return _collect(call, region, answer) if type(region) is Region else answer
    if group is None and index >= 0 and not isinstance(answer, (c10d.Work, torch.Future)):
        # The default group was destroyed since the call was launched.
        LEDGER.hand_off(row.name, None, index, storages_of(call.tensors), call.frame)
        return answer
    if index < HOST or not isinstance(group, c10d.ProcessGroup) or type(answer) is _torch.IllegalWork:
        return answer
    route = ROUTES.fast.get(id(group))
    direct = route is not None and route.index == index
    if route is None or route.index != index:
        route = ROUTES.of(group, index)
    storages = storages_of(call.tensors)
    alloc_stream = HOST if index < 0 else common_alloc_stream(index, storages)
    future: torch.Future[object] | None = None
    result = answer
    if isinstance(answer, c10d.Work):
        ordered = call.ordered and (row.pollable or index >= 0 or route.kind.pollable_p2p)
        stream = _current(index) if call.staged and index >= 0 else HOST
        captured = stream > 0 and LEDGER.streams.is_capturing(index, stream)
        # On a device, what has aliases or ends in no order is waited for in full.
        if direct and (index < 0 or (ordered and not call.aliases and not captured)):
            work = waited_for_once() if not ordered else Work() if stream < 0 else StagedWork()
            if stream >= 0:
                work.stream = stream
            if call.aliases:
                work.aliases = tuple(call.aliases)
            queue = route if ordered else route.unordered(group)
            queue.hold(work, row.name, answer, storages, alloc_stream, call.frame)
            if type(answer) is not c10d.Work:  # other code's class, of which only wait() need be what it says
                work.full = True
            return work
        work, among = _handle(route.kind, index, storages, ordered)
        result = ROUTES.hold(
            work, row.name, answer, group, index, storages, call.frame, aliases=tuple(call.aliases),
            staged=call.staged, unordered=not among, alloc_stream=alloc_stream,
        )  # fmt: skip
        if ordered or not route.kind.records:
            return result
        # A send or receive of such a backend runs on the current stream.
    elif isinstance(answer, torch.Future):  # of the coalesced ones, which torch has deprecated
        future = answer
        if index == HOST:
            held = ROUTES.hold(Work(), row.name, _FutureAsWork(future), group, index, storages, call.frame)
            held.has_future = True
            return answer
    elif answer is None:  # threads of gloo may still come to what has failed
        _torch.leave_all_empty(call.aliases)
    if index != HOST and (future is not None or alloc_stream != _current(index)):
        # On the device a future is done when the call is launched, and waiting for it orders the current stream: one
        # that the program does not use, so that its streams are not delayed.
        there = _NOTHING if future is None else LEDGER.streams.using(index, LEDGER.streams.spare(index))
        with there:
            if future is not None:
                future.wait()
            LEDGER.hand_off(row.name, group, index, storages, call.frame, alloc_stream)
    return result


def _collect(call: Call, region: Region, answer: object) -> object:
    """Leave what a call uses to the end of the region that it is in."""
    uses = region.uses
    uses.tensors.extend(call.tensors)
    uses.staged |= call.staged
    ends_in_order = call.row.pollable or call.index != HOST or kind_for(call.group, HOST).pollable_p2p
    region.ordered = region.ordered and call.ordered and ends_in_order
    if isinstance(answer, c10d.Work) and type(answer) is not _torch.IllegalWork:
        answer = member(answer)
        uses.works.append(answer)
    return answer


def _handle(kind: Kind, index: int, storages: tuple[object, ...], ordered: bool) -> tuple[Work, bool]:
    """Return a handle for a work of any backend, and whether the work is kept with the others of its group.

    It is not, of a backend that relies on ``record_stream``, where that does nothing: for memory that is not the
    allocator's. The handle waits only once where a second wait may hang or copy again.
    """
    if kind.records:
        ordered = all(type(one) is torch.UntypedStorage and one.resizable() for one in storages)
    once = not (kind.tells or index != HOST) or not (ordered or kind.pollable_p2p)
    return waited_for_once() if once else Work(), ordered


class _FutureAsWork:
    """What the ledger asks of a work, answered by a future."""

    def __init__(self, future: torch.Future[object]) -> None:
        self.wait = future.wait
        self.is_completed = future.done
