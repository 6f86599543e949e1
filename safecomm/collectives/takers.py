"""Who may take a call before the backend does, and in which order they are asked: here and nowhere else.

1. A *coalescing region* of the group: it collects the calls that c10d's own would collect.
2. The *buckets* of :func:`safecomm.bucketed`: they defer synchronous calls, and whatever else is called on the group
   runs after what they have deferred.
3. The *engine* of :func:`safecomm.low_latency`: it runs small calls by kernels of its own.

All ranks that make the same calls ask the same takers: what differs between ranks, such as a profiler, a mode, a
gradient that is recorded or where a tensor lies, changes nothing about who is asked. A capture that has to see each
call takes none: while it goes on there are no routes, so that every call goes the general way, which tells it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives.holding import SPAN, Call, caller, counter, finish, span
from safecomm.collectives.regions import REGIONS, Region
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import OP_IDS, ROWS, Row
from safecomm.collectives.tensors import all_on_current_stream, flatten, with_memory
from safecomm.core import captures
from safecomm.core.holds import Pending
from safecomm.core.ledger import LEDGER
from safecomm.errors import SafecommError

_COLLECTED = {
    row: getattr(c10d, row.name)
    for row in ROWS.values()
    if row.collected and row.launch is not None and _torch.is_torchs(getattr(c10d, row.name, None))
}
_COUNT = {name: counter(row.name) for name, row in ROWS.items()}
_routes = ROUTES.fast
_has_torch_function = _torch.has_torch_function
_modes = _torch.dispatch_modes
_inflight = _torch.inflight_as_graph_input
_profiler = _torch.profiler
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream
_compiling = torch.compiler.is_dynamo_compiling
_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
default_group = _torch.default_group


class Deferring(Protocol):
    """What defers the calls of a group."""

    def defer(self, row: Row, op: object, output: Any, given: Any = None) -> bool:
        """Defer a call that can be deferred; return False if it has to run now."""

    def closed(self) -> contextlib.AbstractContextManager[None]:
        """Launch what was deferred, and defer nothing inside."""

    def pending(self) -> list[Pending]:
        """Return what is deferred, as :func:`safecomm.pending` shows it."""


BUCKETS: dict[object, Deferring] = LEDGER.deferring
"""What ``bucketed()`` defers, by group."""

ENGINES: dict[object, Any] = {}
"""What ``low_latency()`` has put before the backend, by group; under None, what does so for groups without one."""


class Answer:
    """What becomes of a call that was offered."""

    __slots__ = ("result",)

    def __init__(self, result: object) -> None:
        self.result = result  # what the caller gets, of a call that was taken


DECLINED = Answer(None)
"""The call is not taken. Also what an engine answers for a call that is the backend's."""

GENERAL = Answer(None)
"""The call is c10d's function's: it collects it, or runs after what was deferred."""

DONE = Answer(None)
"""The call was taken, and its caller gets nothing."""


def offer(row: Row, group: object, tensors: tuple[Any, ...], op: object, asynchronous: object) -> Answer:
    """Offer a call of ``row`` to who may take it.

    ``tensors``: what is given as the output, and as the input where that is another. ``op``: the reduce operation, or
    what :func:`splits` has found.
    """
    flag = asynchronous
    if asynchronous is not False and asynchronous is not True:
        asynchronous = is_true(asynchronous)
    if REGIONS and (region := REGIONS.get(group)) is not None:
        # c10d refuses some flags that are no bool, and None for an operation where it takes one.
        wanted = flag is asynchronous and (op is None) is ("op" not in row.given)
        if type(region) is Region and wanted and (function := _COLLECTED.get(row)) is not None and id(op) in OP_IDS:
            route = _routes.get(id(group))
            if route is not None and _ordinary(route, tensors, asynchronous):
                other = None if len(tensors) == 1 else tensors[0]
                if not row.pollable and route.index < 0:
                    region.ordered = False
                return Answer(region.collect(function, tensors[-1], other, op, asynchronous))
        return GENERAL
    if BUCKETS and (buckets := BUCKETS.get(group)) is not None:
        if row.collected and not asynchronous and buckets.defer(row, op, *tensors):
            return DONE
        with buckets.closed():
            taken = _run(row, group, tensors, op, asynchronous)
        return GENERAL if taken is DECLINED else taken
    return _run(row, group, tensors, op, asynchronous) if ENGINES else DECLINED


def take(
    row: Row, group: object, tensors: tuple[Any, ...], op: object, site: Callable[[], types.FrameType],
    *, unshared: bool = False,
) -> bool:  # fmt: skip
    """Offer a call of one of torch's operators to the engine; return whether it has run it, on the current stream.

    Such a call runs now: what the buckets have deferred is launched before it. Its caller waits for it later, so other
    kernels may be meant to run beside it, if it is not ``unshared``. ``site`` tells the call site.
    """
    if REGIONS and group in REGIONS:
        return False
    if BUCKETS and group in BUCKETS:
        with at_once(group):
            return take(row, group, tensors, op, site, unshared=unshared)
    return _run(row, group, tensors, op, False, site, unshared=unshared) is not DECLINED


def _ordinary(route: Route, tensors: tuple[Any, ...], asynchronous: bool) -> bool:
    """Return whether a gate would launch a call of ``tensors`` on ``route`` itself."""
    guards = route.guards
    try:
        if len(tensors) == 1:
            (tensor,) = tensors
            if _has_torch_function(tensor) or tensor.is_nested or not (guards.guard1(tensor) or guards.plain(tensor)):
                return False
        else:
            output, given = tensors
            if _has_torch_function(output, given) or given.is_nested or output.is_nested:
                return False
            if not (guards.guard2(output, given) or guards.guard2_before(output, given) or guards.plain(output, given)):
                return False
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with attributes of its own
        return False
    return not _modes() and not _profiler._is_profiler_enabled and not (asynchronous and _inflight())


def _run(
    row: Row, group: object, tensors: tuple[Any, ...], op: object, asynchronous: bool,
    site: Callable[[], types.FrameType] = caller, *, unshared: bool = True,
) -> Answer:  # fmt: skip
    """Offer a call to the engine."""
    engine = ENGINES.get(group) or ENGINES.get(None) if row.kind and row.engine else None
    if engine is None:  # of another group; or it was switched off in another thread since
        return DECLINED
    if _profiler._is_profiler_enabled and not SPAN.open:
        with span(row.name):
            return _run(row, group, tensors, op, asynchronous, site, unshared=unshared)
    given = list(tensors)
    recording = captures.RECORDING
    flat = list(flatten(given)) if recording or asynchronous or row.staged else given
    if recording:
        captures.check_group(row.name, group, flat)
    result: object = engine.run(group, row.name, given, op, asynchronous, unshared=unshared)
    if result is DECLINED:
        return DECLINED
    _COUNT[row.key]()
    if recording:
        captures.note(row.name, group, with_memory(flat), site())
    index = _torch.index_of(flat[0])
    if result is None and (
        index < 0
        or (
            all_on_current_stream(flat)
            if row.staged
            else _alloc_stream(flat[0].data_ptr(), flat[-1].data_ptr()) == _current(index)
        )
    ):
        return DONE
    return Answer(finish(Call(row, group, flat, index, site(), staged=row.staged), result))


def splits(outputs: object, inputs: object) -> object:
    """Return the sizes that an all_to_all_single is given; None if its parts are equal. Its operation, to an engine."""
    given = (outputs, inputs)
    return next((sizes for sizes in given if sizes is not None and (type(sizes) is not list or sizes)), None)


def is_true(flag: object) -> bool:
    """Return whether c10d takes ``flag`` for true; what it refuses is left to it."""
    try:
        return bool(flag)
    except (RuntimeError, TypeError, ValueError):  # such as an array of several
        return False


def at_once(group: object) -> contextlib.AbstractContextManager[object]:
    """Return a context in which calls on ``group`` are not deferred, also inside of :func:`safecomm.bucketed`.

    What was deferred is launched as it is entered.
    """
    buckets = BUCKETS.get(group or default_group()) if BUCKETS else None
    return _NOTHING if buckets is None else buckets.closed()


def now(what: str, group: object) -> contextlib.AbstractContextManager[object]:
    """Begin a call whose result is complete in the order of the current stream when it returns.

    To be entered before any argument is read: what was deferred on ``group`` is launched first, and nothing is
    deferred inside. Raises ValueError if this rank is not in the group, and SafecommError inside of a coalescing region
    of the group, ours or torch's: what it has collected has not run yet, and the call would be collected too.
    """
    if _compiling():  # what is traced are torch's functional collectives, which no region and no bucket sees
        return _NOTHING
    group = group or default_group()
    if group is None:
        c10d.get_rank()  # raises what torch raises before init_process_group
    if not isinstance(group, c10d.ProcessGroup):
        raise ValueError(f"{what}: this rank is not in the group. Call it on the ranks that are.")
    if REGIONS and group in REGIONS:
        raise SafecommError(
            f"{what}: its group has an open coalescing region, whose calls have not run yet. "
            "Call it before the region or after it. Nothing was done."
        )
    return at_once(group)
