"""What a wrapped call does around c10d's own function.

Most calls are *forwarded*: c10d's function runs with the caller's arguments, so argument checks, exceptions, warnings
and results are its own (S8), and what it leaves running is held. The three that tensor parallelism lives on have a
*direct* way beside it, for plain arguments, which skips c10d's Python and pays for the holding with that (S10); see
``reduce.py`` and ``gather.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch.nn import Parameter

from safecomm import _torch, backends, captures
from safecomm.backends import Kind
from safecomm.collectives import effects
from safecomm.entries import WorkLane
from safecomm.ledger import LEDGER
from safecomm.sites import outside
from safecomm.streams import HOST
from safecomm.work import MemberWork, Work, handle, member

log = logging.getLogger("safecomm")

F = TypeVar("F", bound=Callable[..., Any])

PLAIN = frozenset({torch.Tensor, Parameter})
"""Tensor types that behave like tensors; a subclass may do anything, so it goes through c10d's own function."""

_NOTHING = contextlib.nullcontext()

COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
"""What c10d passes on as pairs of real numbers."""


class Region(list[Any]):
    """A coalescing region of ours that is open: the calls that c10d is to launch at its end, and what that holds."""

    __slots__ = ("aliases", "p2p", "plain", "staged", "tensors", "works")

    def __init__(self) -> None:  # a list's own has nothing to do
        self.tensors: list[Any] = []
        self.aliases: list[torch.Tensor] = []
        self.works: list[MemberWork] = []
        self.plain: Any = None  # the last call that was collected here, of plain tensors on a direct lane
        self.staged = False
        self.p2p = False

    def alias(self, tensor: Any) -> Any:
        """Return what c10d is to launch in place of ``tensor``: another tensor of the same memory.

        ProcessGroupNCCL keeps a reference to a coalesced tensor until the group's next collective, because it puts it
        on another work than the one that is waited for (pytorch #187565). The alias is left without memory at the
        release.
        """
        if type(tensor) not in PLAIN or not _torch.has_plain_keys(tensor):
            return tensor  # what c10d would refuse, it is to refuse
        if tensor.is_inference() != torch.is_inference_mode_enabled() or _torch.transform() is not None:
            return tensor
        alias = tensor.detach()
        self.aliases.append(alias)
        return alias

    def collect(self, function: Any, tensor: torch.Tensor, other: torch.Tensor | None, op: Any, async_op: bool) -> Any:
        """Do what c10d's ``function`` does here: note the call, which the end of the region launches and holds."""
        self.plain = _CollOp(function, tensor, other, op, None)
        self.append(self.plain)
        return _torch.IllegalWork() if async_op else None


_CollOp = _torch.CollOp
SUM = c10d.ReduceOp.SUM
OPS = tuple(getattr(c10d.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))
"""The reduce operations that are members of an enum. A premultiplied sum is another object."""
_current = LEDGER.streams.current
_home = LEDGER.streams.home
_all_at_home = LEDGER.streams.all_at_home


_counts: dict[str, itertools.count[int]] = {}


def counter(name: str) -> Callable[[], int]:
    """Return a function that counts a call of ``name``: one C call, because every collective makes it."""
    return _counts.setdefault(name, itertools.count()).__next__


def counted() -> dict[str, int]:
    """Return how often each function was called in this process, those that never were left out."""
    counts = {name: int(repr(count)[len("count(") : -1]) for name, count in _counts.items()}
    return {name: count for name, count in sorted(counts.items()) if count}


class _Inside(threading.local):
    """What this thread is in the middle of. c10d calls its own functions, which are ours while they are patched."""

    batch = False  # batch_isend_irecv, which holds what its parts are given


inside = _Inside()

REGIONS: dict[Any, list[Any]] = _torch.world.pg_coalesce_state
"""c10d's table of the coalescing regions that are open, by group: what each has collected. Ours are :class:`Region`."""

BUCKETS: dict[Any, Any] = {}
"""What ``bucketed()`` puts off, by group. While there is any, all calls are forwarded."""


REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"

COLLECTIVE_OF = {
    "all_reduce": REDUCE,
    "reduce_scatter_tensor": SCATTER,
    "reduce_scatter_single": SCATTER,
    "_reduce_scatter_base": SCATTER,
    "all_gather_into_tensor": GATHER,
    "all_gather_single": GATHER,
    "_all_gather_base": GATHER,
}
"""The collectives that can be put off or run by an engine, by the names of c10d's functions."""

LISTS = {"reduce_scatter": SCATTER, "all_gather": GATHER}
"""The list forms that an engine can run, likewise."""


def fits(collective: str, output: torch.Tensor, given: torch.Tensor, world: int) -> bool:
    """Return whether the larger of the two has a part like the smaller for each of ``world`` ranks, as c10d wants."""
    if collective == REDUCE:
        return True
    part, whole = (given, output) if collective == GATHER else (output, given)
    return whole.numel() == world * part.numel()


ENGINES: dict[Any, Any] = {}
"""What ``low_latency()`` has put before the backend, by group; under None, what does so for groups that are not there.

``forwarded`` asks them, and before it, for the calls that have a direct way, :func:`by_engine`.
"""

NOT_TAKEN: Any = object()
"""What an engine answers for a call that is the backend's."""


def by_engine(name: str, group: Any, given: list[Any], op: Any) -> bool | None:
    """Let the engine of ``group`` run a synchronous call of c10d's function ``name``; return whether it has.

    ``given``: what is given as the output, and as the input where that is another. None where something else has to see
    the call: it is to be forwarded then, and the engine is asked there. False where the engine does not want it, and is
    not to be asked again: with ``check`` the ranks compare what they ask.
    """
    if BUCKETS or captures.RECORDING or _torch.profiler._is_profiler_enabled or group in REGIONS:
        return None
    engine = ENGINES.get(group) or ENGINES.get(None)
    if engine is None:  # it was switched off in another thread since
        return None
    if engine.run(group, name, given, op, False) is NOT_TAKEN:
        return False
    if name in LISTS:
        tensors = [*given[0], given[1]] if isinstance(given[0], list) else [given[0], *given[1]]
        index = tensors[0].get_device()
        if index >= 0 and not all_at_home(tensors):
            LEDGER.trail(name, group, index, storages_of(tensors), caller())
        return True
    index = given[0].get_device()
    if index >= 0 and _home(given[0].data_ptr(), given[-1].data_ptr()) != _current(index):
        LEDGER.trail(name, group, index, storages_of(given), caller())
    return True


def at_once(group: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which calls on ``group`` are not put off, also inside of :func:`safecomm.bucketed`."""
    buckets = BUCKETS.get(group or default_group()) if BUCKETS else None
    return contextlib.nullcontext() if buckets is None else buckets.closed()


def default_group() -> Any:
    """Return c10d's default group, None before ``init_process_group``."""
    return _torch.groups[_torch.DEFAULT]


def index_of(tensor: Any) -> int | None:
    """Return the device index that the ledger knows ``tensor``'s device by; None for devices that it does not know."""
    if type(tensor) not in PLAIN and _torch.is_fake(tensor):
        return None
    if tensor.is_cuda:
        return int(tensor.get_device())
    return HOST if tensor.device.type == "cpu" else None


def storages_of(tensors: list[Any]) -> tuple[Any, ...]:
    """Return what keeps the memory of ``tensors`` alive.

    Storages and not the tensors: ``t.data = ...`` leaves a held tensor with other memory (Megatron and DeepSpeed free
    that way). A subclass is made of other tensors, and those are what counts; it is held itself as well.
    """
    found: list[Any] = []
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            found.append(tensor)
            if hasattr(tensor, "__tensor_flatten__"):
                names, _ = tensor.__tensor_flatten__()
                found.extend(storages_of([getattr(tensor, name) for name in names]))
                continue
        try:
            found.append(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # sparse
            found.append(tensor)
    return tuple(found)


def home_of_few(index: int, storages: tuple[Any, ...]) -> int | None:
    """Return the one stream that all of ``storages`` were allocated on; None if it is not known, or they are many."""
    if index == HOST:
        return HOST
    pointers = [storage.data_ptr() for storage in storages if type(storage) is torch.UntypedStorage]
    return _home(*pointers) if 1 <= len(storages) == len(pointers) <= 2 else None


def with_memory(tensors: list[Any]) -> list[torch.Tensor]:
    """Return ``tensors``, with the tensors that a subclass is made of in its place."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if type(tensor) in PLAIN:
            found.append(tensor)
        elif hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            found.extend(with_memory([getattr(tensor, name) for name in names]))
    return found


def flatten(arguments: Any) -> Iterator[Any]:
    """Yield the tensors in arbitrarily nested lists and tuples."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from flatten(argument)


def all_at_home(arguments: list[Any]) -> bool:
    """Return whether a synchronous call need hold none of these: on the CPU, or allocated on the current stream."""
    pointers = []
    index = HOST
    for argument in arguments:
        if type(argument) not in PLAIN:
            return False
        if argument.is_cuda and argument.layout is torch.strided:
            device = argument.get_device()
            if index not in (HOST, device):
                return False
            index = device
            pointers.append(argument.data_ptr())
        elif not argument.is_cpu:
            return False
    if len(pointers) <= 2:
        return not pointers or _home(*pointers) == _current(index)
    return _all_at_home(_current(index), sorted(pointers))  # one question to the driver for each segment


def host_alias(argument: Any) -> Any:
    """Return what an asynchronous call is to be given in place of a CPU tensor, or of a list of them.

    gloo's threads look the memory up in the tensor when they come to it, so ``t.data = ...`` after the launch would
    have them use other memory, and gather then takes the process down (torch 2.13). NCCL gets addresses at the launch.

    The threads copy into most outputs, and autograd is to be told of that: an alias shares the tensor's version
    counter. Not for calls of which any tensor requires a gradient: there what they do is recorded, or raises.
    """
    if isinstance(argument, list):
        return [host_alias(one) for one in argument]
    if type(argument) is tuple:
        return tuple(map(host_alias, argument))
    if (
        type(argument) not in PLAIN
        or not argument.is_cpu
        or argument.layout is not torch.strided
        or _torch.transform() is not None  # in a transform of torch.func, an alias would be without memory
    ):
        return argument
    with _torch.undisturbed() if _torch.dispatch_modes() else _NOTHING:  # a mode would see an operation more
        if argument.is_inference() and not torch.is_inference_mode_enabled():
            return argument.view_as(argument)  # what is detached there could be written to, which torch refuses
        return argument.detach()


def _as_they_are(tensors: list[Any]) -> bool:
    """Return whether an asynchronous call is to be given ``tensors`` themselves; see :func:`host_alias`."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes longer than the question)
        if tensor.is_cuda or tensor.requires_grad:
            return True
    return False


def kind_for(group: Any, index: int) -> Kind:
    """Return what serves device ``index`` in ``group``."""
    return LEDGER.lane_of(group, index).kind if isinstance(group, c10d.ProcessGroup) else backends.UNKNOWN


def relaxed(group: Any, tensors: list[Any]) -> AbstractContextManager[Any]:
    """Return the context for a function of c10d's that may wait for what it launches; see ``WorkLane.relaxed``."""
    if not backends.SOME_QUERY or not isinstance(group, c10d.ProcessGroup):
        return _NOTHING
    index = None
    if tensors:
        index = index_of(tensors[0])
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = _torch.current_device()
    return _NOTHING if index is None or index < 0 else LEDGER.lane_of(group, index).relaxed()


def wait_for(
    lane: WorkLane, inner: Any, op: str, group: Any, tensors: list[torch.Tensor], frame: types.FrameType
) -> None:
    """Wait for the work of a synchronous call on the backend of ``lane``, with what else it takes than ``wait()``.

    One that fails may still be running, on the current stream: what that does not order is held (S4).
    """
    try:
        lane.wait_for(inner)
    except Exception:
        if lane.index >= 0:
            LEDGER.trail(op, group, lane.index, storages_of(tensors), frame)
        raise


def holds_itself(group: Any) -> bool:
    """Return whether what a call on ``group`` uses will be held by safecomm, so that c10d need not hold it."""
    return isinstance(group, c10d.ProcessGroup) and type(REGIONS.get(group)) in (Region, type(None))


def shelves(group: Any, tensors: list[Any]) -> bool:
    """Return whether the backend that ``tensors`` go to has more hold them than need be, unless it is given aliases."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return kind_for(group, tensor.get_device()).shelves
    return False


def device_alias(argument: Any) -> Any:
    """Return what a send or receive is to be given in place of a tensor of a GPU.

    ProcessGroupNCCL calls the allocator's ``record_stream`` for each (torch 2.13), which does nothing for memory that
    the tensor does not own. The ledger holds it.
    """
    if type(argument) in PLAIN and argument.is_cuda and argument.layout is torch.strided:
        return _torch.unowned(argument)
    return argument


def caller() -> types.FrameType:
    """Return the innermost frame outside of this package: the call site."""
    return outside(("safecomm.collectives.",))


def finish(
    op: str,
    result: Any,
    group: Any,
    tensors: list[Any],
    frame: types.FrameType,
    *,
    staged: bool = False,
    p2p: bool = False,
    unpolled: bool = False,
) -> Any:
    """Hold what a forwarded call left running, and return what the caller gets for ``result``."""
    if type(result) is _torch.FakeWork:
        return result
    if isinstance(result, Work) or not tensors:  # c10d's function came back through a wrapper, which holds already
        return result
    index = index_of(tensors[0])
    p2p = p2p or (unpolled and index == HOST and kind_for(group, HOST).blind)
    region = REGIONS.get(group) if REGIONS else None
    if type(region) is Region:
        region.tensors.extend(tensors)
        region.staged |= staged
        region.p2p |= p2p
        if isinstance(result, c10d.Work) and type(result) is not _torch.IllegalWork:
            result = member(result)
            region.works.append(result)
        return result
    if region is not None:
        return result  # a region of torch's own: c10d has launched nothing yet, and holds what it launches
    if index is None or not isinstance(group, c10d.ProcessGroup) or type(result) is _torch.IllegalWork:
        return result
    if isinstance(result, c10d.Work):
        lane = LEDGER.direct.get(id(group))
        storages = storages_of(tensors)
        if lane is not None and lane.index == index and lane.streamed and not (staged or p2p):
            work = lane.hold(Work(), op, result, storages, home_of_few(index, storages), frame)
            if type(result) is not c10d.Work:  # somebody's own, of which only wait() need be what it says
                work.rare = True
            return work
        work = handle(once=p2p and kind_for(group, index).blind)
        return LEDGER.hold(work, op, result, group, index, storages, frame, staged=staged, p2p=p2p)
    if isinstance(result, torch.Future):
        _hold_future(op, result, group, index, tensors, frame)
        return result
    if id(group) not in LEDGER.direct:
        LEDGER.lane_of(group, index)
    if index != HOST:
        LEDGER.trail(op, group, index, storages_of(tensors), frame)
    return result


class _FutureAsWork:
    """What the ledger asks of a work, answered by a future."""

    def __init__(self, future: Any) -> None:
        self.wait = future.wait
        self.is_completed = future.done


def _hold_future(op: str, future: Any, group: Any, index: int, tensors: list[Any], frame: types.FrameType) -> None:
    """Hold the tensors of a call that answers with a future: the coalesced ones, which torch has deprecated."""
    storages = storages_of(tensors)
    if index == HOST:
        LEDGER.hold(Work(), op, _FutureAsWork(future), group, index, storages, frame).awaited = True
        return
    # On the device a future is done when the call is launched, and waiting for it orders the current stream: one of its
    # own, so that the caller's are not delayed.
    with torch.cuda.stream(torch.cuda.Stream(index)):  # type: ignore[no-untyped-call]
        future.wait()
        LEDGER.trail(op, group, index, storages, frame)


def _is_true(flag: Any) -> bool:
    """Return whether c10d takes ``flag`` for true; what it refuses, it is to refuse."""
    try:
        return bool(flag)
    except (RuntimeError, TypeError, ValueError):  # such as an array of several
        return False


class _Span(threading.local):
    open = False


_SPAN = _Span()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Show a call as ``safecomm::NAME`` in a profile, and as an NVTX range where torch emits those."""
    _SPAN.open = True
    try:
        with torch.profiler.record_function(f"safecomm::{name}"):
            yield
    finally:
        _SPAN.open = False


def forwarded(
    name: str,
    *tensor_arguments: str,
    staged: bool = False,
    p2p: bool = False,
    unpolled: bool = False,
    coalesced: bool = False,
    asks: bool = True,
) -> Any:
    """Return c10d's function ``name`` with a hold around it, on what it is given as ``tensor_arguments``.

    None if this torch has no such function: then safecomm has none either.

    ``staged``: c10d copies through memory of its own. ``p2p``: point-to-point. ``unpolled``: gloo's does not tell when
    it is over, as its point-to-point (torch 2.13). ``coalesced``: inside a coalescing region c10d collects the tensors
    and launches them at its end. ``asks``: whether an engine is asked; else it has been, and has said no.
    """
    original = getattr(c10d, name, None)
    if original is None:
        return None
    names = list(inspect.signature(original).parameters)
    if not {*tensor_arguments, "group"} <= set(names):
        log.warning("%s was replaced by %r before safecomm was imported, and stays that", name, original)
        return original
    places = [(names.index(argument), argument) for argument in tensor_arguments]
    group_place = names.index("group")
    async_place = names.index("async_op") if "async_op" in names else None
    op_place = names.index("op") if "op" in names else None
    compiling = torch.compiler.is_dynamo_compiling
    busy = LEDGER.busy
    recording = captures.RECORDING
    count = counter(name)
    profiler = _torch.profiler
    deprecated = getattr(original, "__deprecated__", None)
    # A deprecated function's warning is its own.
    takeable = asks and (coalesced or name in LISTS) and deprecated is None
    after = [frozenset(names[count:]) for count in range(len(names) + 1)]

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling() or (p2p and inside.batch):
            return original(*args, **kwargs)
        group, tensors = _arguments(args, kwargs)
        asynchronous = async_place is not None and (
            args[async_place] if async_place < len(args) else kwargs.get("async_op", False)
        )
        if asynchronous is not False and asynchronous is not True:
            asynchronous = _is_true(asynchronous)
        if BUCKETS:  # before anything that can differ between ranks, such as a profiler
            buckets = BUCKETS.get(group)
            if buckets is not None:
                op, given = _operation(args, kwargs)
                if not asynchronous and coalesced and _binds(args, kwargs) and buckets.put_off(name, op, *given):
                    if deprecated is not None:
                        warnings.warn(deprecated, FutureWarning, stacklevel=2)
                    return None
                with buckets.closed():
                    return call(*args, **kwargs)
        if profiler._is_profiler_enabled and not _SPAN.open:
            with span(name):
                return call(*args, **kwargs)
        collected = coalesced and bool(REGIONS) and type(REGIONS.get(group)) is Region
        count()
        if busy:
            LEDGER.sweep()
        positional, named = args, kwargs
        if asynchronous and not collected and not _as_they_are(tensors):
            positional, named = _mapped(host_alias, args, kwargs)
        if p2p and holds_itself(group) and shelves(group, tensors):
            positional, named = _mapped(device_alias, positional, named)
        if recording:
            captures.check_group(name, group, tensors)
        try:
            result = NOT_TAKEN
            if ENGINES and takeable and group not in REGIONS and _binds(args, kwargs):
                engine = ENGINES.get(group) or ENGINES.get(None)
                if engine is not None:
                    op, given = _operation(args, kwargs)
                    result = engine.run(group, name, given, op, asynchronous)
            if result is NOT_TAKEN:
                if backends.SOME_QUERY:
                    with relaxed(group, tensors):
                        result = original(*positional, **named)
                else:
                    result = original(*positional, **named)
        except torch.distributed.DistBackendError:
            finish(name, None, group, tensors, caller(), staged=staged, p2p=p2p, unpolled=unpolled)
            raise
        if recording:
            captures.note(name, group, with_memory(tensors), caller())
        if result is None and not coalesced and not REGIONS and all_at_home(tensors):
            return None  # the ordinary program: nothing to hold
        return finish(name, result, group, tensors, caller(), staged=staged, p2p=p2p, unpolled=unpolled)

    def _binds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether there is none of the arguments too many; c10d is to say so where there is."""
        return len(args) < len(after) and after[len(args)].issuperset(kwargs)

    def _operation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Return the reduce operation, if there is one, and what is given as the tensors."""
        op = None if op_place is None else args[op_place] if op_place < len(args) else kwargs.get("op", SUM)
        return op, [args[place] if place < len(args) else kwargs.get(argument) for place, argument in places]

    def _mapped(
        function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = list(args)
        for place, argument in places:
            if place < len(args):
                positional[place] = function(args[place])
            elif argument in kwargs:
                kwargs = {**kwargs, argument: function(kwargs[argument])}
        return tuple(positional), kwargs

    def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        tensors: list[Any] = []
        for place, argument in places:
            value = args[place] if place < len(args) else kwargs.get(argument)
            if type(value) in PLAIN:
                tensors.append(value)
            elif type(value) is list and PLAIN.issuperset(map(type, value)):
                tensors += value
            else:
                tensors.extend(flatten(value))
        group = args[group_place] if group_place < len(args) else kwargs.get("group")
        return group or default_group(), tensors

    return stand_in(call, original)


def hold_launched(
    op: str, inner: Any, lane: WorkLane, group: Any, tensors: list[torch.Tensor], asynchronous: bool,
    frame: types.FrameType,
) -> Work | None:  # fmt: skip
    """Hold what a launch on ``lane``'s ProcessGroupNCCL uses, one or two plain tensors; return what the caller gets."""
    index = lane.index
    home = HOST if index < 0 else _home(tensors[0].data_ptr(), tensors[-1].data_ptr())
    if asynchronous:
        storages = tuple([tensor.untyped_storage() for tensor in tensors])
        return inner and lane.hold(Work(), op, inner, storages, home, frame)
    if inner is not None:
        inner.wait()
    if index >= 0 and home != _current(index):
        LEDGER.trail(op, group, index, storages_of(tensors), frame)
    return None


def plain(lane: WorkLane, *tensors: Any) -> bool:
    """Return whether the direct call of ``lane``'s backend does with ``tensors`` what the dispatcher's would.

    Asked where ``lane.like_one`` and ``lane.like_two`` say no. The dispatcher does more with tensors that record a
    gradient, with negative views, nested and quantized tensors; c10d does with complex ones. gloo refuses to write to
    tensors of inference mode outside of it, which an alias of ours has to as well (:func:`host_alias`).
    """
    if lane.recall(tensors):
        return True
    index = lane.index
    for tensor in tensors:
        if (
            type(tensor) not in PLAIN
            or tensor.get_device() != index
            or (index == HOST and not tensor.is_cpu)
            or tensor.dtype in COMPLEX
            or tensor.dtype is not tensors[0].dtype
            or not _torch.has_plain_keys(tensor)
            or (tensor.requires_grad and torch.is_grad_enabled())
            or (index == HOST and tensor.is_inference() and not torch.is_inference_mode_enabled())
        ):
            return False
    if _torch.dispatch_modes() or _torch.transform() is not None:
        return False
    lane.learn(tensors)
    return True


def prepared(launch: _torch.Launch | None) -> tuple[Any, dict[int, Any], dict[int, Any]]:
    """Return what launches, and its options for synchronous and for asynchronous calls, by the id of the operation.

    Members of an enum live for ever, so an id in the table is theirs. None and empty tables where torch has no such
    launch.
    """
    if launch is None:
        return None, {}, {}
    tables: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for asynchronous, table in enumerate(tables):
        for op in OPS:
            options = launch.options()
            if hasattr(options, "reduceOp"):
                options.reduceOp = op
            if _torch.ASYNC_OPTION:
                options.asyncOp = bool(asynchronous)
            table[id(op)] = options
    return launch.function, *tables


DIRECT: dict[str, tuple[Callable[..., Any], dict[int, Any], dict[int, Any]]] = {}
"""How the calls that have a direct way are launched, by the names of c10d's functions.

What to call with the group, or its backend where groups have no hooks, the tensors and options; and the two tables of
:func:`prepared`.
"""


def stand_in(wrapper: F, original: Any) -> F:
    """Give ``wrapper`` the name, signature and documentation of ``original``, with what safecomm does beside it."""
    functools.update_wrapper(wrapper, original)
    wrapper.__doc__ = effects.help_of(original.__name__, original.__doc__)
    # For pickle, which looks a function up by its module and name, and for Dynamo, which asks the code for it.
    wrapper.__module__ = "safecomm"
    wrapper.__code__ = wrapper.__code__.replace(co_name=original.__name__)
    return wrapper


def direct(wrapper: F, original: Callable[..., Any], otherwise: F, launch: Any) -> F:
    """Return ``wrapper``, which calls ``launch``, as the stand-in for ``original``.

    Return ``otherwise`` if torch has no such launch, or if ``original`` is somebody's own, which is to be called.
    """
    return stand_in(wrapper, original) if launch is not None and _torch.is_torchs(original) else otherwise
