"""Every private name of torch and of the CUDA driver that safecomm leans on, each with what stands in when it is gone.

Nothing else in the package touches a private name. Each is looked up by :func:`_private`, which also tries whether it
still is what safecomm takes it for. Where it is not, a slower way stands in, :data:`LACKING` says so, and the doctor
repeats it: nothing private can break the import, but for the few names of :data:`REQUIRED`, without which a call of
c10d can't be held. ``tests/test_private_names.py`` takes away each of them in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import operator
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
import typing_extensions
from torch.torch_version import TorchVersion

log = logging.getLogger("safecomm")

# --- looking names up --------------------------------------------------------------------------------


class Name(NamedTuple):
    """One private name."""

    costs: str
    """What is worse without it, as the end of a sentence that begins with the name; ``""`` for nothing."""
    since: str
    """The first version of torch that has it, where 2.4 does not."""


NAMES: dict[str, Name] = {}
"""The private names that were looked up, by their path from torch."""

LACKING: dict[str, str] = {}
"""Those that are not what they should be, and what is the matter with them."""

_GONE: Any = object()


def _private(path: str, otherwise: Any, costs: str, check: Callable[[Any], Any] = callable, since: str = "2.4") -> Any:
    """Return what torch has at ``path``, if it passes ``check``, or else ``otherwise``, which ``costs`` something.

    ``check`` tries it out where that is cheap: a name can be there and mean something else. Whatever it raises counts
    as a no.
    """
    NAMES[path] = Name(costs, since)
    found: Any = torch
    try:
        for name in path.split(".")[1:]:
            found = getattr(found, name, _GONE)
        if found is _GONE:
            LACKING[path] = "is not there"
        elif check(found):
            return found
        else:
            LACKING[path] = "is something else than it was"
    except Exception as error:  # of a name that means something else now, so of any kind
        LACKING[path] = f"does not do what it did ({error!r})"
    return otherwise


def _a(*types: type) -> Callable[[Any], bool]:
    """Return a check for a value of exactly one of ``types``."""
    return lambda found: type(found) in types


def _answers(*types: type) -> Callable[[Any], bool]:
    """Return a check for a function of no arguments that returns a value of exactly one of ``types``."""
    return lambda found: type(found()) in types


def _is_class(found: Any) -> bool:
    return isinstance(found, type)


_C10D = "torch.distributed.distributed_c10d"
_C_C10D = "torch._C._distributed_c10d"

# --- c10d ------------------------------------------------------------------------------------------

REQUIRED = (f"{_C10D}._world", f"{_C10D}._world.pg_coalesce_state")
"""The names without which nothing works: without them a call inside of a coalescing region can't be told from others,
and would be taken for over before it was launched."""

world: Any = _private(REQUIRED[0], None, "safecomm can't be imported", lambda found: True)
"""c10d's registry of groups."""

_private(REQUIRED[1], None, "safecomm can't be imported", _a(dict))

for _path in REQUIRED:
    if _path in LACKING:
        raise ImportError(
            f"safecomm can't work with torch {torch.__version__}: it needs {_path}, which {LACKING[_path]}. A newer "
            "safecomm may know what has taken its place."
        )


class _Asked(dict[str, Any]):
    def __missing__(self, _: str) -> Any:
        return c10d.GroupMember.WORLD


DEFAULT = "_default_pg"
_private(f"{_C10D}._world.{DEFAULT}", None, "each call asks c10d's property for the default group", lambda found: True)
groups: dict[str, Any] = vars(world) if DEFAULT in getattr(world, "__dict__", ()) else _Asked()
"""``groups[DEFAULT]`` is c10d's default group, None before ``init_process_group``. A property is a call of Python."""


def _of(table: str, group: Any) -> Any:
    """Return what c10d's ``table`` of groups says of ``group``; None if there is no such table, or nothing in it."""
    found = getattr(world, table, None)
    return found.get(group) if isinstance(found, dict) else None


_private(f"{_C10D}._world.pg_names", None, "pending() shows no group", _a(dict))
_private(
    f"{_C10D}._world.pg_map", None,
    "low_latency() leaves groups as they are, and patch(strict=True) sees only the default group", _a(dict),
)  # fmt: skip


def all_groups() -> list[Any]:
    """Return all groups of this process; none if torch does not say."""
    found = getattr(world, "pg_map", None)
    return list(found) if isinstance(found, dict) else []


_WITHOUT_REGIONS = "coalescing regions are torch's own, and hold their memory as torch does"


class _Never:
    """No work is of this class."""


IllegalWork: type = _private(f"{_C10D}._IllegalWork", _Never, _WITHOUT_REGIONS, _is_class)
"""What a collective returns inside a coalescing region: any use of it raises ValueError."""

CollOp: Any = _private(
    f"{_C10D}._CollOp", None, _WITHOUT_REGIONS,
    lambda found: found(print, None, None, None, None).op is print,
)  # fmt: skip
"""A call that a coalescing region has collected, and launches at its end."""

CoalescingManager: Any = _private(
    f"{_C10D}._CoalescingManager", None, _WITHOUT_REGIONS, lambda found: found().works == []
)
"""What a coalescing region yields: the list of its works."""

coalescing_manager: Any = _private(f"{_C10D}._coalescing_manager", None, _WITHOUT_REGIONS)
"""c10d's coalescing region, where all that safecomm needs to open one itself is there; None elsewhere."""

if IllegalWork is _Never or CollOp is None or CoalescingManager is None:
    coalescing_manager = None

_end_coalescing: Any = _private(
    f"{_C10D}.ProcessGroup._end_coalescing", None, "a coalescing region with device= that fails leaves NCCL in it"
)


def end_coalescing(group: Any, device: Any) -> Any:
    """End what C++ has begun to coalesce, and return the work of what was launched; None for none."""
    return None if _end_coalescing is None else _end_coalescing(group, device)


FakeWork: type | None = _private(
    f"{_C_C10D}.FakeWork", None, "what the fake backend returns is taken for a work", _is_class, since="2.8"
)
"""What the fake backend and meta tensors are answered with: it stands for no work, and is never complete."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` only pretends to have memory."""
    subclasses = sys.modules.get("torch._subclasses.fake_tensor")
    return tensor.is_meta or (subclasses is not None and isinstance(tensor, subclasses.FakeTensor))


ASYNC_OPTION: bool = _private(
    f"{_C10D}.AllreduceOptions.asyncOp", _GONE, "every call counts as asynchronous, as before torch 2.7",
    lambda found: type(c10d.AllreduceOptions().asyncOp) is bool, since="2.7",
) is not _GONE  # fmt: skip
"""Whether the options say that a call is asynchronous (2.7 and later). Before, each call was, and its caller waited."""


_LAYERS = (os.path.dirname(torch.__file__) + os.sep, contextlib.__file__, typing_extensions.__file__)


def is_torchs(function: Any) -> bool:
    """Return whether ``function`` is torch's own, and not what somebody has put in its place before us."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_LAYERS):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class _Overrides:
    """Something that wants to see torch's functions."""

    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        return NotImplemented


has_torch_function: Callable[..., bool] = _private(
    "torch.overrides.has_torch_function_variadic", lambda *tensors: torch.overrides.has_torch_function(tensors),
    "looking for subclasses of tensors takes longer", lambda found: found(1, _Overrides()) is True,
)  # fmt: skip
"""Whether a tensor is of a subclass that has ``__torch_function__``, or a ``TorchFunctionMode`` is active."""

_NOT_DIRECT = "calls go through c10d's own function, which takes the host longer"

Backend: Any = _private(f"{_C_C10D}.Backend", _Never, _NOT_DIRECT, _is_class)
"""The C++ side of one backend of a group. Calling its collectives skips the dispatcher, 1 to 2.5 us of each call."""

HOOKS = hasattr(c10d.ProcessGroup, "register_pre_hook")
"""Whether groups have hooks (torch 2.14 and later): they see the calls of a group, and not those of its backend."""


_register_group: Any = _private(
    f"{_C10D}._register_process_group", None, "patch(strict=True) does not see groups that are made later"
)
"""What c10d calls with the name of each group that it makes, and the group."""


def on_each_group(call: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``call`` with each group that there is, and from now on with each that is made; return what ends that."""
    module: Any = c10d
    before = getattr(module, "_register_process_group", None)
    ended: list[bool] = []

    @functools.wraps(_register_group)
    def register(name: str, group: Any) -> None:
        before(name, group)  # type: ignore[misc]
        if not ended:
            call(group)

    def end() -> None:
        ended.append(True)
        if getattr(module, "_register_process_group", None) is register:
            module._register_process_group = before  # else somebody has put theirs over ours, which goes on to torch's

    if _register_group is not None:
        module._register_process_group = register
    for group in {*all_groups(), groups[DEFAULT]} - {None}:
        call(group)
    return end


class Launch(NamedTuple):
    """A collective of a group where groups have :data:`HOOKS`, else of a :data:`Backend`; the class of its options."""

    function: Any
    options: Any


def _launch(
    method: str, tensors: int, options: str, newer: str = "", sizes: int = 0, *, by_group: bool = HOOKS
) -> Launch | None:
    if by_group and hasattr(c10d.ProcessGroup, newer):
        method = newer  # what c10d's own function calls
    owner = "ProcessGroup" if by_group else "Backend"
    # What pybind writes down of a method's arguments: so many of tensors or lists of them, of sizes, and the options.
    given = rf"(, \w+: \S*Tensor\]*){{{tensors}}}(, \w+: [^,]*\]){{{sizes}}}, opts: \S+\.{options} = "
    signature = re.compile(rf"\(self: \S+\.{owner}{given}")
    function = _private(
        f"{_C_C10D}.{owner}.{method}", None, _NOT_DIRECT,
        lambda found: callable(found) and signature.search(found.__doc__) is not None,
    )  # fmt: skip
    kind = _private(f"{_C10D}.{options}", None, _NOT_DIRECT, _takes_what_it_took)
    return None if function is None or kind is None else Launch(function, kind)


def _takes_what_it_took(kind: Any) -> bool:
    if not _is_class(kind):
        return False
    options = kind()
    if hasattr(options, "reduceOp"):
        options.reduceOp = c10d.ReduceOp.SUM
    if ASYNC_OPTION:
        options.asyncOp = True
    return True


all_reduce: Launch | None = _launch("allreduce", 1, "AllreduceOptions")
all_gather: Launch | None = _launch("_allgather_base", 2, "AllgatherOptions", "all_gather_single")
reduce_scatter: Launch | None = _launch("_reduce_scatter_base", 2, "ReduceScatterOptions", "reduce_scatter_single")
all_to_all: Launch | None = _launch("alltoall", 2, "AllToAllOptions")
all_to_all_single: Launch | None = _launch("alltoall_base", 2, "AllToAllOptions", "all_to_all_single", sizes=2)
broadcast: Launch | None = _launch("broadcast", 1, "BroadcastOptions")
reduce: Launch | None = _launch("reduce", 1, "ReduceOptions")
all_gather_list: Launch | None = _launch("allgather", 2, "AllgatherOptions")
reduce_scatter_list: Launch | None = _launch("reduce_scatter", 2, "ReduceScatterOptions")
gather: Launch | None = _launch("gather", 2, "GatherOptions")
scatter: Launch | None = _launch("scatter", 2, "ScatterOptions")
"""How collectives are launched directly; None where torch does not have what that takes."""

COALESCED: dict[str, Launch | None] = {
    "all_reduce": _launch("allreduce_coalesced", 1, "AllreduceCoalescedOptions", by_group=True),
    "all_gather": _launch(
        "allgather_into_tensor_coalesced", 2, "AllgatherOptions", "all_gather_single_coalesced", by_group=True
    ),
    "reduce_scatter": _launch(
        "reduce_scatter_tensor_coalesced", 2, "ReduceScatterOptions", "reduce_scatter_single_coalesced", by_group=True
    ),
}
"""How many calls are launched as one, by a group, always: backends do not have all of these."""


def _perhaps() -> bool:
    return True  # every call then goes through c10d's own function


dispatch_modes: Callable[[], int] = _private("torch._C._len_torch_dispatch_stack", _perhaps, _NOT_DIRECT, _answers(int))
"""How many ``TorchDispatchMode``s are active. They see the dispatcher's calls and no others."""


class _Unknown:
    _is_profiler_enabled = True


profiler: Any = torch.autograd.profiler
if _private("torch.autograd.profiler._is_profiler_enabled", None, _NOT_DIRECT, _a(bool)) is None:
    profiler = _Unknown
"""``profiler._is_profiler_enabled`` says whether one is on, which shows the dispatcher's calls too.

Torch keeps it "for fast python checks": asking C++ takes a tenth of a microsecond more of each call. What is started
past ``torch.profiler`` and ``torch.autograd.profiler`` sees the kernels of a direct call, not its name nor any wait.
"""


def unlike(*_: Any) -> bool:
    """Say that no tensors are like any."""
    return False


def look_alike(*tensors: torch.Tensor, shaped: bool = False) -> Callable[..., bool]:
    """Return a function that says whether as many other tensors are like ``tensors``, in one call of C++.

    It compares the types, dtypes, devices, numbers of dimensions (``shaped``: shapes and strides), ``requires_grad``
    and dispatch keys, those that the thread adds included, but not those of ``FakeTensorMode`` (torch 2.13): what
    Dynamo guards its graphs with. Two arguments that are one tensor are like nothing. Not to be asked about strided
    nested tensors, which take the process down.
    """
    return unlike if _TensorGuards is None else _guards_of(_TensorGuards, tensors, shaped)


def _guards_of(kind: Any, tensors: Sequence[torch.Tensor], shaped: bool) -> Callable[..., bool]:
    sizes: Any = [[*tensor.shape] if shaped else [None] * tensor.dim() for tensor in tensors]
    strides: Any = [[*tensor.stride()] if shaped else [None] * tensor.dim() for tensor in tensors]
    check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _tell_apart(kind: Any) -> bool:
    with probing():
        one, other = torch.empty(2, device="cpu"), torch.empty(2, dtype=torch.int8, device="cpu")
        like, same = _guards_of(kind, [one], False), _guards_of(kind, [one], True)
        longer = torch.empty(3, device="cpu")
        return like(longer) is True and like(other) is False and same(longer) is False


def _plain_keys() -> frozenset[str]:
    found = set()
    for inference in (False, True):
        with probing(), torch.inference_mode(inference):
            found.add(str(_dispatch_keys(torch.empty(0, device="cpu"))))
    return frozenset(found)


def has_plain_keys(tensor: torch.Tensor) -> bool:
    """Return whether the dispatcher sees an ordinary tensor of the CPU or of CUDA.

    That is a dense one, no view that is written out first, no wrapper of a transform, not quantized, nested or named.
    False if torch does not tell.
    """
    if _PLAIN_KEYS is None:
        return False
    keys: Any = _dispatch_keys(tensor)
    number = keys.raw_repr() if _NUMBERED else None
    if number in _plain_numbers:
        return True
    found = str(keys).replace("CUDA", "CPU") in _PLAIN_KEYS
    if found and number is not None:
        _plain_numbers.add(number)
    return found


def _no_transform() -> None:
    return None


transform: Callable[[], Any] = _private(
    "torch._C._functorch.peek_interpreter_stack", _no_transform, "calls inside of torch.func may fail",
    lambda found: found() is None or hasattr(found(), "level"),
)  # fmt: skip
"""The transform of ``torch.func`` that runs, and wraps what is made of tensors; None for none."""

_without_transforms: Any = _private(
    "torch._C._DisableFuncTorch", contextlib.nullcontext, "groups that are first used inside of torch.func may fail"
)
_without_modes: Any = _private(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext,
    "what is set up inside of a TorchDispatchMode is seen by it",
)  # fmt: skip


_without_functions: Any = _private(
    "torch._C.DisableTorchFunction", contextlib.nullcontext,
    "an import inside of a TorchFunctionMode that raises finds names missing",
)  # fmt: skip


def _sets_inference_mode(guard: Any) -> bool:
    before = torch.is_inference_mode_enabled()
    with guard(not before):
        inside = torch.is_inference_mode_enabled()
    return inside is not before and torch.is_inference_mode_enabled() is before


inference_mode: Any = _private(
    "torch._C._InferenceMode", torch.inference_mode,
    "a signal handler that raises as a bucket is launched may leave inference mode on until the exception is freed",
    _sets_inference_mode,
)  # fmt: skip
"""The guard inside of :class:`torch.inference_mode`. No exception comes between it and its block: it is all C++."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the transforms and modes that are active, for what is not part of them."""
    with contextlib.ExitStack() as stack:
        if transform() is not None:
            stack.enter_context(_without_transforms())
        if dispatch_modes():
            stack.enter_context(_without_modes())
        yield


def _tells_devices(keys_of: Any) -> bool:
    with probing():
        dense, other = torch.empty(0, device="cpu"), torch.empty(0, device="meta")
        return "CPU" in str(keys_of(dense)) and "CPU" not in str(keys_of(other))


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Leave what the program has active, such as a mode that sees or refuses operations, for what tries torch out."""
    with _without_functions(), torch.inference_mode(False), undisturbed():
        yield


def _is_numbered() -> bool:
    with probing():
        return type(_dispatch_keys(torch.empty(0, device="cpu")).raw_repr()) is int


_dispatch_keys: Any = _private("torch._C._dispatch_keys", None, _NOT_DIRECT, _tells_devices)
_PLAIN_KEYS = None if _dispatch_keys is None else _plain_keys()
_NUMBERED = _PLAIN_KEYS is not None and (
    _private(
        "torch._C.DispatchKeySet.raw_repr", None, "a tensor of a kind not seen before takes a microsecond more",
        lambda _: _is_numbered(), since="2.5",
    ) is not None
)  # fmt: skip
_plain_numbers: set[int | None] = set()

_TensorGuards: Any = _private(
    "torch._C._dynamo.guards.TensorGuards", None, "every call looks at its tensors one by one, 0.5 us more", _tell_apart
)


def _never() -> bool:
    return False


inflight_as_graph_input: Callable[[], bool] = _private(
    f"{_C_C10D}._allow_inflight_collective_as_graph_input", _never,
    "a graph that is given tensors still in flight does not find their works", _answers(bool), since="2.6",
)  # fmt: skip
"""Whether the dispatcher's calls register their works, for graphs that are given tensors still in flight."""


def backend_of(group: Any, device_type: str) -> Any:
    """Return the C++ side of ``group``'s backend for ``device_type``; None if it has none, or torch does not say."""
    try:
        return group._get_backend(torch.device(device_type))
    except (AttributeError, RuntimeError, TypeError):
        return None


_private(
    f"{_C10D}.ProcessGroup._get_backend", None,
    "no group is known to be NCCL's or gloo's, so calls go c10d's own way, memory comes back later, and the end of a "
    "group waits 30 s at most",
)  # fmt: skip

NCCL: Any = getattr(c10d, "ProcessGroupNCCL", None)
NCCL2: Any = getattr(c10d, "ProcessGroupNCCL2", None)
NCCL_LAZY: Any = getattr(c10d, "ProcessGroupNCCLLazy", None)
GLOO: Any = getattr(c10d, "ProcessGroupGloo", None)
"""The classes of backends; None where torch was built without, and the second and third before torch 2.15."""

_Wrapper: type = _Never
if GLOO is not None:
    _Wrapper = _private(
        f"{_C10D}._ProcessGroupWrapper", _Never,
        "with TORCH_DISTRIBUTED_DEBUG=DETAIL no group is known to be NCCL's or gloo's",
        lambda found: _is_class(found) and hasattr(found, "wrapped_pg"),
    )  # fmt: skip


def unwrapped(backend: Any) -> Any:
    """Return ``backend``, or what is inside of it where TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped it."""
    while isinstance(backend, _Wrapper):
        backend = backend.wrapped_pg  # type: ignore[attr-defined]
    return backend


def regions_differ() -> bool:
    """Return whether a coalescing region of one call may do something else than that call, as these variables ask for.

    The coalesced calls of ProcessGroupNCCL know neither torch's own one-shot all_reduce nor its check for NaN. Groups
    read the variables when they are made.
    """
    return _any_set("ENABLE_INTRA_NODE_COMM", "TORCH_NCCL_NAN_CHECK")


def waits_only_block_streams() -> bool:
    """Return whether ``block_current_stream()`` does what the first ``wait()`` for a work of ProcessGroupNCCL does.

    But for what that tells a profiler, which takes half of its time. A work that is known to have failed by then,
    because it was asked or waited for before, raises in ``wait()`` alone (``WorkNCCL::wait``, torch 2.9 and later). Not
    where these variables ask it to block the host; groups read them when they are made.
    """
    known = hasattr(c10d.Work, "block_current_stream")
    return known and not _any_set("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def _any_set(*names: str) -> bool:
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def group_name(group: Any) -> str:
    """Return the name under which c10d knows ``group``; ``""`` if it does not."""
    return str(_of("pg_names", group) or "")


def is_initialized(group: Any, device_type: str) -> bool:
    """Return whether ``group`` has made its communicators for ``device_type``; True if torch does not say."""
    backend = backend_of(group, device_type)
    try:
        return bool(backend._is_initialized())
    except (AttributeError, RuntimeError, TypeError):
        return True


def group_timeout(group: Any, device_type: str) -> timedelta | None:
    """Return the timeout of ``group``'s backend for ``device_type``; None if torch does not say."""
    try:
        timeout = backend_of(group, device_type).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def store_of(group: Any, prefix: str) -> Any:
    """Return a store that the ranks of ``group`` share, for keys of our own; None if torch does not give it out."""
    found = _of("pg_map", group)
    return None if found is None else c10d.PrefixStore(prefix, found[1])


def symmetric_memory() -> Any:
    """Return torch's module of memory that peers can write to; None if it has none."""
    if not _SYMMETRIC:
        return None
    try:
        import torch.distributed._symmetric_memory as module
    except ImportError:
        return None
    return module if hasattr(module, "empty") and hasattr(module, "rendezvous") else None


_SYMMETRIC = (
    _private(f"{_C_C10D}._SymmetricMemory", None, "low_latency() leaves groups as they are", since="2.5") is not None
)

# --- tensors and streams ---------------------------------------------------------------------------


_HAS_CUDA = bool(torch.version.cuda or torch.version.hip)


def _of_cuda(name: str, otherwise: Any, costs: str) -> Any:
    """Return ``torch._C.name``; where torch was built without CUDA, ``otherwise``, which costs nothing there."""
    return _private(f"torch._C.{name}", otherwise, costs) if _HAS_CUDA else otherwise


def _no_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


current_raw_stream: Callable[[int], int] = _of_cuda(
    "_cuda_getCurrentRawStream", _no_raw_stream, "asking for the current stream takes 5 us in place of 0.1"
)
"""The handle of a device's current stream: 0.1 us, where ``torch.cuda.current_stream()`` takes 5."""


current_device: Callable[[], int] = _of_cuda(
    "_cuda_getDevice", torch.cuda.current_device, "asking for the current device takes 0.1 us more"
)
"""The index of the current device: 0.1 us, where ``torch.cuda.current_device()`` takes 0.2."""

_is_current_capturing: Callable[[], bool] = _of_cuda(
    "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing,
    "asking whether a stream is being captured takes 0.1 us more",
)  # fmt: skip


spin: Callable[[int], None] = _of_cuda(
    "_cuda_sleep", lambda cycles: None,
    "compute can hold up the collectives that it overlaps, where the host runs far ahead",
)  # fmt: skip
"""Keep one thread of the device busy for so many cycles, on the current stream; nothing where torch can't."""


def raw_stream(stream: torch.Stream) -> int:
    """Return the handle of ``stream``, which C++ gives to Python as a ``torch.Stream`` that does not tell it."""
    if isinstance(stream, torch.cuda.Stream):
        return int(stream.cuda_stream)
    of_device = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(of_device.cuda_stream)


_WITHOUT_COUNTS = "references are not counted: dropped handles go unnoticed, and record_stream stays torch's"


def _small_storage() -> torch.UntypedStorage:
    with probing():
        return torch.empty(4, dtype=torch.uint8, device="cpu").untyped_storage()


cdata_of: Callable[[Any], int] = operator.attrgetter("_cdata")
"""The address of the C++ side of a storage: the same for all of its Python objects."""

if _private("torch.UntypedStorage._cdata", None, _WITHOUT_COUNTS, lambda _: type(cdata_of(_small_storage())) is int):
    _storage_use_count: Callable[[int], int] | None = _private(
        "torch._C._storage_Use_Count",
        None,
        _WITHOUT_COUNTS,
        lambda found: type(found(cdata_of(_small_storage()))) is int,
    )
else:
    cdata_of, _storage_use_count = id, None

USE_COUNT = _storage_use_count is not None
"""Whether torch tells how many references there are to a storage in C++."""

storage_use_count: Callable[[int], int] = _storage_use_count or (lambda _: 0)
"""How many references there are in C++ to the storage at an address; nobody knows without ``USE_COUNT``."""

KEPT: dict[int, list[None]] = {}
"""Storages that something keeps for good without using them, by ``_cdata``: an item for each reference in Python.

In C++ it has one. An arena keeps its slots so.
"""


def only_holder(storage: Any) -> bool:
    """Return whether the caller's reference to ``storage`` is the only one left; False if torch does not say.

    Not counting what is :data:`KEPT`.
    """
    if _storage_use_count is None or not isinstance(storage, torch.UntypedStorage):
        return False
    cdata = cdata_of(storage)
    return _storage_use_count(cdata) == (2 if cdata in KEPT else 1)


def _makes_storages(construct: Any) -> bool:
    whole = _small_storage()
    with probing():
        made = construct(whole.data_ptr(), torch.device("cpu"), 4)
        return type(made) is torch.UntypedStorage and (made.data_ptr(), made.nbytes()) == (whole.data_ptr(), 4)


_construct_storage: Callable[..., Any] | None = _private(
    "torch._C._construct_storage_from_data_pointer", None,
    "there is no Arena, and sends and receives on NCCL call record_stream", _makes_storages,
)  # fmt: skip

MAKES_STORAGES = _construct_storage is not None
"""Whether torch makes storages over given memory."""


class _NeverDead:
    """A weak reference to a storage that does not notice its death."""

    def __init__(self, storage: Any) -> None:
        pass

    def expired(self) -> bool:
        return False


def _notices_death(kind: Any) -> bool:
    storage = _small_storage()
    weak = kind(storage)
    before = weak.expired()
    with probing():
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    del storage
    meanwhile = weak.expired()
    del tensor
    return (before, meanwhile, weak.expired()) == (False, False, True)


StorageWeakRef: Any = _private(
    "torch.multiprocessing.reductions.StorageWeakRef", _NeverDead,
    "record_plan() takes every buffer for needed to the end, leaks.watch() may take one for another, and where "
    "references are not counted, an arena takes no buffer back",
    _notices_death,
)  # fmt: skip
"""A weak reference to a storage, whose ``expired()`` says whether that has died."""


def storage_over(pointer: int, device: torch.device, nbytes: int) -> torch.UntypedStorage | None:
    """Return a storage of memory that it does not own; None if torch can't make one."""
    return None if _construct_storage is None else _construct_storage(pointer, device, nbytes)


_SHARE = tuple(
    name
    for name in ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
    if _private(
        f"torch.UntypedStorage.{name}", None, "memory of an arena must not be shared with other processes", callable
    ) is not None
)  # fmt: skip
"""The methods of a storage that all ways of sharing it with other processes come to."""


def before_sharing(storage: Any, call: Callable[[Any], None]) -> None:
    """Have ``call`` called with ``storage`` each time before that is shared with other processes.

    Sharing moves a storage of the CPU to other memory, under the tensors that it has. One of a GPU stays, and is kept
    until the others let go of it, if the memory is torch's own.
    """
    for name in _SHARE:
        setattr(storage, name, functools.partial(_share, weakref.ref(storage), name, call))


def _share(reference: weakref.ref[Any], name: str, call: Callable[[Any], None], *args: Any, **kwargs: Any) -> Any:
    storage = reference()  # not the storage itself, which has this function, and would never die
    call(storage)
    return getattr(type(storage), name)(storage, *args, **kwargs)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory whose storage does not own it; ``tensor`` itself if torch can't make one.

    The caching allocator's C++ ``recordStream`` does nothing for memory whose deleter is not its own. The memory lives
    as long as the tensor does, all the same: the tensor refers to the storage that owns it.
    """
    storage = tensor.untyped_storage()
    if _construct_storage is None or not storage.nbytes() or tensor.is_neg() or tensor.is_conj():
        return tensor
    same = _construct_storage(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
    # A handle gives what it was given out again, as result() and by its future: who keeps that, keeps the memory.
    alias._memory = storage  # type: ignore[attr-defined]
    return alias


# --- autograd --------------------------------------------------------------------------------------


def saved_by(node: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what an autograd node keeps for the backward pass, by name; nothing once that is freed.

    Runs no unpack hook where torch tells what is packed (``SavedTensor.data``, 2.9 and later).
    """
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    found = []
    for name in names:
        shown = name.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, name)
            for packed in raw if isinstance(raw, (list, tuple)) else (raw,):
                value = packed.data if hasattr(packed, "data") else None
                if isinstance(value, torch.Tensor):
                    found.append((shown, value))
                elif not hasattr(packed, "data"):
                    value = node.saved_tensors if shown == "tensors" else getattr(node, f"_saved_{shown}")
                    values = value if isinstance(value, (list, tuple)) else (value,)
                    found.extend((shown, one) for one in values if isinstance(one, torch.Tensor))
                    break
        except (RuntimeError, AttributeError):
            continue  # freed by a backward pass
    return found


_private(
    "torch._C._autograd.SavedTensor.data", None, "the search for leaks runs the program's unpack hooks",
    lambda found: True, since="2.9",
)  # fmt: skip

_saved_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


class _NoForwardAD:
    _current_level = 0


forward_ad: Any = torch.autograd.forward_ad
if _private("torch.autograd.forward_ad._current_level", None, "lists in pieces are c10d's", _a(int)) is None:
    forward_ad = _NoForwardAD
"""``forward_ad._current_level`` is -1 where no tensor can have a tangent, which copies into given memory refuse."""


# --- functional collectives ----------------------------------------------------------------------------


_size_of_registry: Callable[[], int] | None = _private(
    f"{_C_C10D}._get_work_registry_size", None, "nobody is told of functional collectives that nobody waited for",
    _answers(int), since="2.6",
)  # fmt: skip


def unwaited() -> int | None:
    """Return how many functional collectives of this thread nobody has waited for; None if torch does not say."""
    return None if _size_of_registry is None else _size_of_registry()


_STAYS = "functional collectives that nobody waited for stay until the process ends, also under patch()"
_works_are_told = _private(f"{_C_C10D}.PostHookArgs.work", None, _STAYS, lambda found: True, since="2.14") is not None


def functional_collectives() -> Any:
    """Return torch's module of functional collectives; None where no hook tells their works."""
    if not HOOKS or not _works_are_told:
        return None
    try:
        import torch.distributed._functional_collectives as module
    except ImportError:
        return None
    return module if hasattr(getattr(module, "AsyncCollectiveTensor", None), "elem") else None


_group_named: Any = _private(f"{_C_C10D}._resolve_process_group", None, f"where a group is given by its name, {_STAYS}")


def group_named(name: str) -> Any:
    """Return the group that C++ knows under ``name``; None if torch does not give it out. Raises if it knows none."""
    return None if _group_named is None else _group_named(name)


# --- the dispatcher --------------------------------------------------------------------------------

try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:
    TorchDispatchMode = None  # type: ignore[assignment, misc]
"""The base of what sees every operation of torch; None if this torch has none, and then leaks can't be watched for."""

if not _private("torch.utils._python_dispatch.TorchDispatchMode", None, "leaks.watch() can't watch", _is_class):
    TorchDispatchMode = None  # type: ignore[assignment, misc]


OVERRIDDEN: weakref.WeakKeyDictionary[Override, str] = weakref.WeakKeyDictionary()
"""The operators that have another kernel than torch's, by what has put it there, whose death puts torch's back."""


class Override:
    """A Python function in place of torch's own kernel of ``operator`` (such as ``"aten::record_stream"``).

    ``original`` is called as the operator is; None if this torch does not give it out (before 2.9). Nothing is replaced
    then if the function ``needs_original``.
    """

    def __init__(self, operator: str, key: str, function: Callable[..., Any], *, needs_original: bool = False) -> None:
        namespace, name = operator.split("::")
        self.original: Callable[..., Any] | None = None
        try:
            kernel = None if _get_kernel is None else _get_kernel(operator, key)
            if kernel is not None:
                keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                self.original = functools.partial(kernel.call_boxed, keys)
        except (RuntimeError, AttributeError, TypeError):
            pass  # this device type has none, or torch does not give it out
        self._library: Any = None
        if needs_original and self.original is None:
            return
        self._library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
            self._library.impl(name, function, key)
        OVERRIDDEN[self] = operator

    def remove(self) -> None:
        """Put torch's own kernel back."""
        OVERRIDDEN.pop(self, None)
        library, self._library = self._library, None
        if library is not None and _destroys:
            library._destroy()  # else it does so by itself, now that nobody refers to it


_get_kernel: Any = _private(
    "torch.library.get_kernel", None,
    "inside of avoid_record_streams() every record_stream is converted, in each thread, and stays so", since="2.9",
)  # fmt: skip
_destroys = _private("torch.library.Library._destroy", None, "kernels of torch are put back a bit later") is not None


# --- many tensors in one call ------------------------------------------------------------------------------


def _unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _copy_all(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for one, other in zip(to, source, strict=True):
        one.copy_(other)


def _unflattens(found: Any) -> bool:
    with probing():
        like = [torch.empty(2, 1, device="cpu"), torch.empty(3, device="cpu")]
        parts = found(torch.empty(5, device="cpu"), like)
        return [(part.shape, part.storage_offset()) for part in parts] == [((2, 1), 0), ((3,), 2)]


def _copies_all(found: Any) -> bool:
    with probing():
        to, source = torch.zeros(3, device="cpu"), torch.ones(3, device="cpu")
        found([to[:1], to[2:]], [source[:1], source[2:]])
        return to.tolist() == [1, 0, 1]


unflatten: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = _private(
    "torch._C._nn.unflatten_dense_tensors", _unflatten, "bucketed() takes 2 us more for each tensor", _unflattens
)
"""Return consecutive parts of a flat tensor, shaped like those of a list."""

copy_all: Callable[[Any, Any], None] = _private(
    "torch._foreach_copy_", _copy_all, "bucketed() copies tensors one by one, a kernel each", _copies_all
)
"""Copy a list of tensors into another: a few kernels in place of one for each."""


def _increment_each(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


increment_versions: Callable[[Sequence[torch.Tensor]], None] = _increment_each
"""Tell autograd that tensors have been written to, none of which may be of inference mode."""

with contextlib.suppress(TypeError, RuntimeError):  # torch 2.4 takes one at a time
    torch.autograd.graph.increment_version([])
    increment_versions = torch.autograd.graph.increment_version


# --- the CUDA driver -------------------------------------------------------------------------------
#
# Questions that torch does not answer, and a launch without Triton. PyDLL and not CDLL for the questions: releasing
# the GIL would cost more than any of them. The argument objects are kept, which halves the cost of a call (0.35 us
# against 0.7), and whoever asks must have some of his own, because another thread may run between a call and the
# reading of its answer. What fits into an int is given as Python's: in a program, where an object is a cache miss or
# two, that takes a fifth less.

BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class _Arguments(threading.local):
    def __init__(self) -> None:
        self.pointer = ctypes.c_uint64()
        self.answer = ctypes.c_uint64()
        self.status = ctypes.c_int()
        self.capturing = (self.pointer, self.status, ctypes.byref(self.status))
        self.mode = ctypes.c_int()


arguments = _Arguments()


Question = tuple[Any, Any, Any]
"""What ``pointer_attribute`` is called with: the pointer, the answer, and a reference to it."""

questions: list[Question] = []
"""Where whoever asks takes a question from, and puts it back: cheaper than one for each thread, and a signal handler
that asks in the middle takes another."""


def new_question() -> Question:
    """Return a question that nobody has asked yet."""
    answer = ctypes.c_uint64()
    return ctypes.c_uint64(), answer, ctypes.byref(answer)


def _driver_function(name: str, *, waits: bool = False) -> Any:
    try:
        library = (ctypes.CDLL if waits else ctypes.PyDLL)("libcuda.so.1")
    except OSError:
        return None
    return library[name] if hasattr(library, name) else None


pointer_attribute = _driver_function("cuPointerGetAttribute")
"""Called with a :data:`Question` and ``BUFFER_ID``: answers with the driver's id of a pointer's allocation.

Unlike an address, an id is never used again in the life of the process ("subsequent allocations do not reuse IDs",
CUDA driver API). That holds for ``cudaMalloc`` and for each mapping of an expandable segment. None without a driver.
"""
_is_capturing = _driver_function("cuStreamIsCapturing")
_capture_info = _driver_function("cuStreamGetCaptureInfo_v2")
_exchange_capture_mode = _driver_function("cuThreadExchangeStreamCaptureMode")
_current_context = _driver_function("cuCtxGetCurrent")
_set_context = _driver_function("cuCtxSetCurrent")
_launch_kernel = _driver_function("cuLaunchKernel", waits=True)


def capture_id(stream: int) -> int:
    """Return the id of the CUDA graph capture that the raw ``stream`` is part of; 0 if it is not capturing."""
    if _is_capturing is None or _capture_info is None:
        # Without the driver only the current stream can be asked, and one capture can't be told from another.
        return int(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    handle, status, status_reference = arguments.capturing
    handle.value = stream
    if _is_capturing(handle, status_reference) or status.value != _CAPTURE_ACTIVE:
        return 0
    identity = arguments.answer
    failed = _capture_info(handle, status_reference, ctypes.byref(identity), None, None, None)
    return 0 if failed else int(identity.value)


def is_capturing(index: int, stream: int) -> bool:
    """Return whether the raw ``stream``, the current one of device ``index``, is part of a CUDA graph capture.

    Where that device is the current one torch answers, in half the time of :func:`capture_id`.
    """
    return _is_current_capturing() if current_device() == index else capture_id(stream) != 0


def swap_capture_mode(mode: int = _CAPTURE_RELAXED) -> int:
    """Set this thread's stream-capture mode and return the one it had.

    In the relaxed mode a thread may query events although another thread is capturing in the global
    mode, which is torch's default; in any other mode the query fails and takes that capture with it.
    """
    if _exchange_capture_mode is None:
        return mode
    argument = arguments.mode
    argument.value = mode
    _exchange_capture_mode(ctypes.byref(argument))
    return argument.value


_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def kernel_launcher(
    function: int, grid: int, threads: int, shared: int, kinds: Sequence[Any]
) -> Callable[..., None] | None:
    """Return what launches ``function``, a kernel of the current device: ``launch(stream, *arguments)``.

    ``kinds`` are the types of ctypes of its parameters; those that no argument is given for are 0. ``shared``: bytes of
    shared memory. What is returned is not to be called by two threads at once. None without a driver.
    """
    if _launch_kernel is None or _current_context is None or _set_context is None:
        return None
    context = ctypes.c_void_p()
    _current_context(ctypes.byref(context))
    values = [kind() for kind in kinds]
    addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    handle = ctypes.c_void_p()
    one = ctypes.c_uint(1)
    call = (
        ctypes.c_void_p(function), ctypes.c_uint(grid), one, one, ctypes.c_uint(threads), one, one,
        ctypes.c_uint(shared), handle, addresses, None,
    )  # fmt: skip

    def launch(stream: int, *arguments: int) -> None:
        handle.value = stream
        for value, argument in zip(values, arguments):  # noqa: B905
            value.value = argument
        error = _launch_kernel(*call)
        if error == _INVALID_CONTEXT:  # of a thread that has not called CUDA yet
            _set_context(context)
            error = _launch_kernel(*call)
        if error:
            raise RuntimeError(f"cuLaunchKernel failed with error {error} of the CUDA driver")

    return launch


# --- the caching allocator --------------------------------------------------------------------------


def segments() -> list[dict[str, Any]]:
    """Return what the caching allocator has from the driver, with the blocks in it, but for its history.

    The history, which diagnostics switch on, takes torch up to 0.7 s to convert for 100,000 entries (torch #172672).
    Versions that can't leave it out convert it. Raises RuntimeError where the allocator keeps no record.
    """
    snapshot = torch.cuda.memory_snapshot
    found: list[dict[str, Any]] = snapshot(**_without_history(snapshot))  # type: ignore[no-untyped-call]
    return found


@functools.cache
def _without_history(snapshot: Any) -> dict[str, bool]:
    """Return the arguments that make ``snapshot`` leave the history out; none if it can't."""
    return {"include_traces": False} if "include_traces" in inspect.signature(snapshot).parameters else {}


def end_allocation_to_pool(index: int, pool: tuple[int, int]) -> None:
    """Tell the caching allocator that a capture with memory of ``pool`` is over, whose ``capture_end()`` has failed.

    Where CUDA gives a capture up, torch's raises before it does that (2.13). For the allocator the capture then goes on
    for ever: ``empty_cache()`` and running out of memory free nothing any more, ``record_stream`` keeps memory for
    good, and the end of a ``MemPool`` aborts the process.
    """
    if _end_allocation is None or _release_pool is None:
        return
    with contextlib.suppress(RuntimeError):  # it was told, and something later has failed
        _end_allocation(index, pool)
        _release_pool(index, pool)


_AFTER_FAILURE = "after a capture that CUDA gave up, the allocator frees nothing any more"

_EARLIER = "_cuda_endAllocateCurrentStreamToPool"  # its name in torch 2.4
_end_allocation: Any = _of_cuda(
    _EARLIER if hasattr(torch._C, _EARLIER) else "_cuda_endAllocateToPool", None, _AFTER_FAILURE
)
_release_pool: Any = _of_cuda("_cuda_releasePool", None, _AFTER_FAILURE)
_WITHOUT_HISTORY = "the demo writes no snapshots, and demo --html says so"
_record_history: Any = _private("torch.cuda.memory._record_memory_history", None, _WITHOUT_HISTORY)
_dump_snapshot: Any = _private("torch.cuda.memory._dump_snapshot", None, _WITHOUT_HISTORY)


@contextlib.contextmanager
def memory_history(path: Path) -> Iterator[None]:
    """Record what the caching allocator does inside, with the lines of Python, and write the snapshot to ``path``.

    Writes nothing if this torch keeps no history.
    """
    if _record_history is None or _dump_snapshot is None:
        yield
        return
    _record_history(stacks="python")
    try:
        yield
        _dump_snapshot(str(path))
    finally:
        _record_history(enabled=None)


# --- what is not there -----------------------------------------------------------------------------


def missing(*, expected: bool = False) -> list[str]:
    """Return a sentence for each private name that this torch lacks, or has as something else than it was.

    ``expected``: for those that only later versions of torch have, and for no others.
    """
    return [
        f"{path} {lack}: {NAMES[path].costs}."
        for path, lack in LACKING.items()
        if (TorchVersion(torch.__version__) < NAMES[path].since) is expected
    ]


for _sentence in missing():
    log.warning("torch %s: %s", torch.__version__, _sentence)
