"""The general way: c10d's own function with the caller's arguments, and a hold around it.

Argument checks, exceptions, warnings and results are c10d's own (S8), and what the call leaves running is held. Plain
calls of some collectives have a *direct* way beside it, which skips c10d's Python and pays for the holding with that
(S10): see ``gates.py``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import backends, effects
from safecomm.collectives.guards import PLAIN
from safecomm.collectives.holding import (
    SPAN,
    caller,
    counter,
    finish,
    holds_itself,
    needs_aliases,
    of_c10d,
    relaxed,
    span,
)
from safecomm.collectives.regions import REGIONS, Region
from safecomm.collectives.routes import ROUTES, RootOptions, Route
from safecomm.collectives.table import OP_IDS, OPS, ROWS, Row
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, default_group, is_true, offer, splits
from safecomm.collectives.tensors import (
    all_on_current_stream,
    as_they_are,
    device_alias,
    flatten,
    host_alias,
    with_memory,
)
from safecomm.core import captures
from safecomm.core.ledger import LEDGER

log: logging.Logger = logging.getLogger("safecomm")

F = TypeVar("F", bound=Callable[..., object])

SUM = c10d.ReduceOp.SUM


class _Inside(threading.local):
    """What this thread is in the middle of. c10d calls its own functions, which are ours while they are patched."""

    batch = False  # batch_isend_irecv, which holds what its parts are given
    counted = False  # a call of point-to-point: send and recv are an isend or irecv of c10d's


inside: _Inside = _Inside()


def forwarded(row: Row, *, asks: bool = True) -> Any:
    """Return c10d's function of ``row`` with a hold around it; None if this torch has no such function.

    ``asks``: whether who may take a call first is asked; else a gate has done so.
    """
    name = row.name
    original = getattr(c10d, name, None)
    if original is None:
        return None
    names = list(inspect.signature(original).parameters)
    if not {*row.tensors, "group"} <= set(names):
        log.warning("%s was replaced by %r before safecomm was imported, and stays that", name, original)
        return original
    places = [(names.index(argument), argument) for argument in row.tensors]
    group_place = names.index("group")
    async_place = names.index("async_op") if "async_op" in names else None
    op_place = names.index("op") if "op" in names else None
    split_places = [(names.index(name), name) for name in row.given if name.endswith("split_sizes")]
    compiling = torch.compiler.is_dynamo_compiling
    busy = LEDGER.nonempty
    recording = captures.RECORDING
    count = counter(name)
    successor = row.successor and ROWS[row.successor].name
    profiler = _torch.profiler
    deprecated = getattr(original, "__deprecated__", None)
    point_to_point = not row.ordered
    # A barrier has nothing to hold, and no engine takes it: unless a taker has to see it, it is c10d's at once.
    of_the_host = not row.tensors and not row.kind and not backends.SOME_ASK_IN_WAIT
    after = [frozenset(names[count:]) for count in range(len(names) + 1)]

    def call(*args: object, **kwargs: object) -> object:
        if compiling() or (point_to_point and inside.batch):
            return original(*args, **kwargs)
        if of_the_host and not (BUCKETS or recording or profiler._is_profiler_enabled):
            count()
            if busy:
                LEDGER.sweep()
            return original(*args, **kwargs)
        group, tensors = _arguments(args, kwargs)
        asynchronous = async_place is not None and (
            args[async_place] if async_place < len(args) else kwargs.get("async_op", False)
        )
        if asynchronous is not False and asynchronous is not True:
            asynchronous = is_true(asynchronous)
        # Before anything that can differ between ranks, such as a profiler.
        if asks and (ENGINES or BUCKETS or REGIONS) and _binds(args, kwargs):
            op, given = _operation(args, kwargs)
            taken = offer(row, group, given, op, asynchronous)
            if taken is not DECLINED and taken is not GENERAL:
                if deprecated is not None:  # its warning is its own
                    warnings.warn(deprecated, FutureWarning, stacklevel=2)
                return taken.result
        if BUCKETS and (buckets := BUCKETS.get(group)) is not None:
            with buckets.closed():
                return general(args, kwargs, group, tensors, asynchronous)
        return general(args, kwargs, group, tensors, asynchronous)

    def general(
        args: tuple[object, ...],
        kwargs: dict[str, object],
        group: object,
        tensors: list[torch.Tensor],
        asynchronous: bool,
    ) -> object:
        if profiler._is_profiler_enabled and not SPAN.open:
            with span(name):
                return general(args, kwargs, group, tensors, asynchronous)
        if not inside.counted and (not successor or _torch.is_torchs(getattr(c10d, successor))):
            count()
        if busy:
            LEDGER.sweep()
        collected = row.collected and bool(REGIONS) and type(REGIONS.get(group)) is Region
        if asynchronous and not collected and not as_they_are(tensors):
            args, kwargs = _mapped(host_alias, args, kwargs)
        if point_to_point and holds_itself(group) and needs_aliases(group, tensors):
            args, kwargs = _mapped(device_alias, args, kwargs)
        if recording:
            captures.check_group(name, group, tensors)
        inside.counted = point_to_point
        try:
            if backends.SOME_ASK_IN_WAIT:
                with relaxed(group, tensors):
                    result = original(*args, **kwargs)
            else:
                result = original(*args, **kwargs)
        except torch.distributed.DistBackendError as error:
            finish(of_c10d(row, group, tensors), error)
            raise
        finally:
            inside.counted = False
        if recording:
            captures.note(name, group, with_memory(tensors), caller())
        if not tensors:
            return result
        if (
            result is None
            and not row.collected
            and not REGIONS
            and (row.launch is None or id(group) in ROUTES.fast)  # else finish() makes the route of the next call
            and all_on_current_stream(tensors)
        ):
            return None  # the ordinary program: nothing to hold
        return finish(of_c10d(row, group, tensors), result)

    def _binds(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Return whether there is none of the arguments too many; c10d says so where there is."""
        return len(args) < len(after) and after[len(args)].issuperset(kwargs)

    def _operation(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, tuple[object, ...]]:
        """Return the reduce operation, if there is one, and what is given as the tensors."""
        op = None if op_place is None else args[op_place] if op_place < len(args) else kwargs.get("op", SUM)
        if split_places:
            op = splits(*[args[at] if at < len(args) else kwargs.get(argument) for at, argument in split_places])
        return op, tuple([args[place] if place < len(args) else kwargs.get(argument) for place, argument in places])

    def _mapped(
        function: Callable[[object], object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        positional = list(args)
        for place, argument in places:
            if place < len(args):
                positional[place] = function(args[place])
            elif argument in kwargs:
                kwargs = {**kwargs, argument: function(kwargs[argument])}
        return tuple(positional), kwargs

    def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        for place, argument in places:
            value: Any = args[place] if place < len(args) else kwargs.get(argument)
            if type(value) in PLAIN:
                tensors.append(value)
            elif type(value) is list and PLAIN.issuperset(map(type, value)):
                tensors += value
            else:
                tensors.extend(flatten(value))
        group = args[group_place] if group_place < len(args) else kwargs.get("group")
        return group or default_group(), tensors

    return stand_in(call, original)


def _options(launch: _torch.Launch, op: object, asynchronous: bool) -> Any:
    options = launch.options()
    if hasattr(options, "reduceOp"):
        options.reduceOp = op
    if _torch.ASYNC_OPTION:
        options.asyncOp = asynchronous
    return options


def prepared(launch: _torch.Launch | None) -> tuple[Any, tuple[dict[int, object], dict[int, object]]]:
    """Return what launches, and its options for synchronous and for asynchronous calls, by the id of the operation.

    None and empty tables where torch has no such launch.
    """
    if launch is None:
        return None, ({}, {})
    synchronous, asynchronous = ({id(op): _options(launch, op, which) for op in OPS} for which in (False, True))
    return launch.function, (synchronous, asynchronous)


def prepared_for_all(launch: _torch.Launch | None) -> tuple[Any, tuple[object, object]]:
    """As :func:`prepared`, of a collective that has no reduce operation."""
    if launch is None:
        return None, (None, None)
    return launch.function, (_options(launch, SUM, False), _options(launch, SUM, True))


def prepared_by_root(
    row: Row,
) -> tuple[Any, Callable[[Route, object, Any, int | None, object, bool], RootOptions | None]]:
    """Return what launches calls of ``row``, which has a root, and what gives their options.

    The function that gives options takes the route, the group, the root as a rank of all and as one of the group (c10d
    wants one of the two), the operation, and whether the call is asynchronous. It gives None if the call is c10d's to
    look at.
    """
    name, launch = row.name, row.launch

    def options(
        route: Route, group: object, root: Any, group_root: int | None, op: object, asynchronous: bool
    ) -> RootOptions | None:
        # Before anything is looked up: an array is no key, a root of 1.0 is as good a key as 1, and c10d takes the one
        # and refuses the other.
        if (type(root), type(group_root)) not in _ONE_ROOT:
            return None
        key = name, root, group_root, id(op), asynchronous
        found: RootOptions | None = route.root_options.get(key)
        # A rank of all means something only in a group that c10d knows: it may have been destroyed without safecomm.
        if found is not None and (root is None or _torch.group_name(group)):
            return found
        if launch is None or id(op) not in OP_IDS:
            return None
        try:
            rank = c10d.get_group_rank(group, root) if group_root is None else group_root  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            return None
        if not 0 <= rank < route.world:
            return None
        made: RootOptions = _options(launch, op, asynchronous)
        made.rootRank = rank
        route.root_options[key] = made
        return made

    return launch and launch.function, options


_ONE_ROOT = {(int, type(None)), (type(None), int)}
_EQUAL: list[int] = []
_LARGEST = 1 << 62


def split_sizes(sizes: Any) -> list[int] | None:
    """Return what a backend is given for the sizes of an all_to_all's parts; None if they are c10d's to look at."""
    if sizes is None:
        return _EQUAL
    if getattr(getattr(sizes, "dtype", None), "kind", "") in ("i", "u"):  # numpy's array, such as Megatron gives
        sizes = sizes.tolist()
    if type(sizes) is not list or not _INTEGERS.issuperset(map(type, sizes)):
        return None
    return sizes if not sizes or (min(sizes) >= 0 and max(sizes) < _LARGEST) else None


_INTEGERS = frozenset({int})


def _flat(function: Callable[..., c10d.Work | None]) -> Callable[..., c10d.Work | None]:
    return lambda launcher, tensor, options: function(launcher, [tensor], options)


_Prepared = tuple[Callable[..., c10d.Work | None], tuple[dict[int, object], dict[int, object]]]

DIRECT: dict[str, _Prepared] = {
    row.name: (_flat(row.launch.function) if row.one else row.launch.function, prepared(row.launch)[1])
    for row in ROWS.values()
    if row.collected and row.launch is not None
}
"""How the only call of a coalescing region is launched, by the names of c10d's functions.

What to call with the group, or its backend where groups have no hooks, the tensors and options; and the two tables of
:func:`prepared`.
"""


TOGETHER: dict[str, _Prepared] = {
    row.name: prepared(_torch.COALESCED[row.kind])
    for row in ROWS.values()
    if row.collected and row.launch is not None and _torch.COALESCED[row.kind] is not None
}
"""How several calls of a coalescing region are launched by its group, as :data:`DIRECT`."""


def stand_in(wrapper: F, original: Callable[..., object]) -> F:
    """Give ``wrapper`` the name, signature and documentation of ``original``, with what safecomm does beside it."""
    functools.update_wrapper(wrapper, original)
    wrapper.__doc__ = effects.help_of(original.__name__, original.__doc__)
    # For pickle, which looks a function up by its module and name, and for Dynamo, which asks the code for it.
    wrapper.__module__ = "safecomm"
    wrapper.__code__ = wrapper.__code__.replace(co_name=original.__name__)
    return wrapper


def direct(gate: Callable[..., object], row: Row, launch: object) -> Any:
    """Return ``gate`` as the stand-in for c10d's function of ``row``.

    Return that function with a hold around it if nothing launches its calls directly, if it takes other arguments in
    this torch, or if it is other code's function, which has to be called.
    """
    original = getattr(c10d, row.name, None)
    if launch is None or original is None or not _torch.is_torchs(original):
        return forwarded(row)
    if _names(original) != _names(gate):
        return forwarded(row)
    return stand_in(gate, original)


def _names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def by_way_of(earlier: F, row: Row) -> F | None:
    """Return ``earlier``, which calls what ``row`` is now, as the stand-in for c10d's function of its earlier name."""
    original = getattr(c10d, row.alias, None)
    return None if original is None else stand_in(earlier, original)
