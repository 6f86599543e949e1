"""A process whose GPU is the simulated device: from safecomm's public calls down, only the device is not real.

Importing this module is what puts the device there, so it has to come before ``safecomm`` is imported: modules bind
what they find. In torch's place stand the answers of ``core.streams.Streams``, the place of a tensor, the launches of a
backend, its works, and streams, events and graphs of ``torch.cuda``. Gates, routes, guards, c10d's own functions, the
ledger and all else are the ones that users have.

A process is one rank. What its peers do reaches it as the moment at which a kernel can complete: see :class:`Peer`.

It has two threads, of which one runs at a time (``turns.py``). The other one may get its turn wherever safecomm asks
the device or the backend, or takes or leaves a lock. Time passes when the program says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d

assert "safecomm" not in sys.modules, "front is to be imported before safecomm"

clock = time.perf_counter
"""The time that really passes."""


class Clock:
    """The time that safecomm sees."""

    now = 0.0


time.perf_counter = lambda: Clock.now

# A package of that name without its modules, so that two of them can be changed before any other is there.
_spec = importlib.util.find_spec("safecomm")
assert _spec is not None
_bare = types.ModuleType("safecomm")
_bare.__path__ = list(_spec.submodule_search_locations or ())
sys.modules["safecomm"] = _bare

import fakes  # noqa: E402
from device import INDEX, Block, Operation, Violation  # noqa: E402
from fakes import (  # noqa: E402
    ArenaDevice,
    FakeGraph,
    FakeGroup,
    FakeHostWork,
    FakeStream,
    FakeWork,
    Tenant,
    events_of_torch,
)
from turns import TurnLock, Turns  # noqa: E402

import safecomm._torch as _torch  # noqa: E402
from safecomm.core import streams as _streams  # noqa: E402

HOST = _torch.HOST


class Loss(AssertionError):
    """Something did not come back."""


class Peer:
    """Another rank of a group: a script of how many calls of the group it has come to."""

    def __init__(self) -> None:
        self.calls = 0
        self.dead = False


class Device(ArenaDevice):
    """A device whose kernels of a group complete once each peer has come to them, and that knows ``record_stream``."""

    def __init__(self) -> None:
        self.host = False  # memory that no stream orders is the host's
        self.idle = 0  # how often in succession the host has slept although nothing runs
        self.waits: dict[int, list[tuple[Peer, int]]] = {}  # by the bit of a kernel: what of its peers it waits for
        self.upcoming = 0
        self.arena = (0, 0, 0)  # the first address of its block, the one past the last, and the stream
        super().__init__()
        self.recorded: dict[Block, set[int]] = {}  # the streams that the allocator was told of
        self.deferred: list[tuple[int, Block]] = []  # until when memory that has died is not given out

    def met(self, op: Operation) -> bool:
        """Return whether all peers have come to the call of ``op``."""
        return all(peer.calls >= number for peer, number in self.waits.get(op.bit, ()))

    def run(self, pick: int = 0) -> bool:
        ready = [op for op in self.pending if not op.stuck and not op.after & ~self.done and self.met(op)]
        if ready:
            op = ready[pick % len(ready)]
            self.pending.remove(op)
            self.done |= op.bit
        return bool(ready)

    def claim(self, start: int, end: int, stream_of: Any) -> None:
        super().claim(start, end, stream_of)
        self.arena = (start, end, self._current)

    def unclaim(self, start: int) -> None:
        """The block of an arena is the allocator's again: check that it can be (S1)."""
        super().unclaim(start)
        first, end, stream = self.arena
        self.arena = (0, 0, 0)
        for tenant in [one for one in self.history if first <= one.start < end]:
            self.history.remove(tenant)
            unsafe = tenant.touched[0] & ~self.done & ~self.streams[stream].eager
            if unsafe:
                raise Violation(f"the block is given back while operations {unsafe:b} may touch it (S1)")
        for pointer in [one for one in self.tenants if first <= one < end]:
            del self.tenants[pointer]

    def received(self, tensor: torch.Tensor) -> None:
        """Note that somebody was given a buffer on the current stream, and check that it could be (S1)."""
        first, end, _ = self.arena
        if first <= tensor.data_ptr() < end:
            self.hand_out(tensor, self._current)
            if CAPTURING and self.here().capture:
                CAPTURING[0].touch(self.blocks_of([tensor]))
        elif tensor.nbytes and not self.has(tensor):
            self.track(tensor, None if self.host else self._current)

    def _start(self, pointer: int) -> int:
        """Return where the block begins that ``pointer`` lies in, as the driver does."""
        tenant = self.tenants.get(pointer)
        if pointer in self._live or (tenant is not None and not tenant.gone):
            return pointer
        # What was handed out since may begin before a tenant that is gone.
        tenants = sorted(self.tenants.items(), key=lambda one: one[1].gone)
        blocks = [*((start, block) for start, (_, block) in self._live.items()), *tenants]
        inside = (start for start, block in blocks if start <= pointer < start + block.nbytes)
        return next(inside, pointer)

    def alloc_stream(self, pointer: int, other: int | None = None) -> int | None:
        if self._start(pointer) not in (*self._live, *self.tenants):
            raise Violation("memory that safecomm holds was given back (S1)")
        return super().alloc_stream(self._start(pointer), None if other is None else self._start(other))

    def pool(self, pointer: int) -> object:
        return super().pool(self._start(pointer))

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Do what the caching allocator does, which is nothing for memory that is not its own."""
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._live:
            self.recorded.setdefault(self._live[pointer][1], set()).add(stream)

    def settle(self) -> None:
        for pointer, (alive, block) in tuple(self._live.items()):
            if alive.expired() and block in self.recorded:
                del self._live[pointer]
                past = 0
                for stream in self.recorded.pop(block):
                    past |= self.streams[stream].eager
                self.deferred.append((past, block))
        for past, block in tuple(self.deferred):
            if not past & ~self.done:
                self.deferred.remove((past, block))
                self.check_free(block)
                self._free.append(block)
        super().settle()

    def begin_capture(self, stream: int) -> None:
        self._next_capture = lambda: self.upcoming
        super().begin_capture(stream)

    def freed(self, pointer: int) -> None:
        """Note that the memory at ``pointer`` was freed under whoever refers to it."""
        _, block = self._live.pop(pointer)
        past = 0
        for stream in self.recorded.pop(block, ()):
            past |= self.streams[stream].eager
        self.deferred.append((past, block))
        self.settle()

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of ``tensor`` is the device's, or is used by threads of the host in its place."""
        pointer = tensor.untyped_storage().data_ptr()
        live = self._live.get(pointer)
        first, end, _ = self.arena
        return (live is not None and not live[0].expired()) or first <= pointer < end

    def index_of(self, tensor: torch.Tensor) -> int:
        """Return the index of the device whose memory ``tensor`` has."""
        live = self._live.get(tensor.untyped_storage().data_ptr())
        host = self.host and live is not None and live[1].alloc_stream is None
        return INDEX if self.has(tensor) and not host else HOST


class Alone:
    """The turns of a program with one thread."""

    second = underway = False
    left = resumed = 0

    def point(self) -> None:
        """Nothing happens here."""

    finish = close = point


class Answers:
    """What ``core.streams`` asks of a GPU, answered by the device of the program that is running."""

    device: Device
    turns: Turns | Alone = Alone()

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            Answers.turns.point()
            return getattr(Answers.device, name)(*given)

        return ask


class Lock(TurnLock):
    """A lock of safecomm's, of the two threads of the program that is running."""

    def __init__(self) -> None:
        self._depth = 0
        self._second = False

    @property
    def _turns(self) -> Any:  # type: ignore[override]
        return Answers.turns

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        Answers.turns.point()
        return super().acquire()

    def release(self) -> None:
        super().release()
        Answers.turns.point()


class Waiter(threading.Thread):
    """A thread of safecomm's, which has come to its end when whoever has started it goes on."""

    def start(self) -> None:
        left, Answers.turns.left = Answers.turns.left, 0
        super().start()
        self.join()
        Answers.turns.left = left


class Threading(types.ModuleType):
    """``threading``, with locks and threads of the program that is running where safecomm makes them."""

    OURS = types.MappingProxyType({"Lock": Lock, "RLock": Lock, "Thread": Waiter})

    def __getattr__(self, name: str) -> Any:
        ours = sys._getframe(1).f_globals["__name__"].startswith("safecomm") and name in self.OURS
        return self.OURS[name] if ours else getattr(threading, name)


class Graph(FakeGraph):
    """``torch.cuda.CUDAGraph``: what its collectives touch, at each replay."""

    def __init__(self) -> None:
        super().__init__(Answers.device)
        self.capture = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        device = Answers.device
        device.upcoming += not pool  # a pool is named before its capture begins
        device.begin_capture(device._current)
        self.capture = device.capturing
        CAPTURING.append(self)

    def capture_end(self) -> None:
        CAPTURING.remove(self)
        Answers.device.end_capture()
        self.ended = True

    def touch(self, blocks: list[Block]) -> None:
        self.touches += [(one, one.tenancy) for one in blocks if isinstance(one, Tenant) or one.capture != self.capture]

    def replay(self) -> None:
        for block, tenancy in self.touches:
            taken = block.gone if isinstance(block, Tenant) else block.tenancy != tenancy or self.device.is_free(block)
            if taken:
                raise Violation("a replay touches memory that is somebody else's (S6)")
        self.device.launch(self.device.here(), [block for block, _ in self.touches])


CAPTURING: list[Graph] = []
"""The graph that is being captured."""


class Capture:
    """``torch.cuda.graph``."""

    def __init__(self, cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> None:
        self.graph, self.pool = cuda_graph, pool
        self.stream_ctx = stream_context(stream or FakeStream(Answers.device, 2))

    def __enter__(self) -> None:
        self.stream_ctx.__enter__()
        self.graph.capture_begin(*(() if self.pool is None else (self.pool,)))

    def __exit__(self, *error: object) -> None:
        self.graph.capture_end()
        self.stream_ctx.__exit__(*error)


class stream_context:
    """``torch.cuda.stream``."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = Answers.device._current
        Answers.device.switch(self.stream.cuda_stream)

    def __exit__(self, *_: object) -> None:
        Answers.device.switch(self.before)


# --- a backend ------------------------------------------------------------------------------------------------------


class HostWork(FakeHostWork, FakeWork):
    """A work of gloo."""


class Backend:
    """The C++ side of a group: each of its launches is a kernel of the device, or runs on threads of the host.

    ``fate``: what becomes of the next asynchronous call; see ``FakeGroup.launch``.
    """

    supports_coalescing = True

    def __init__(self, device: Device, kind: str, peers: int, *, shelved: bool = False) -> None:
        self.group = FakeGroup(device, kind, shelved=shelved)
        self.peers = [Peer() for _ in range(peers)]
        self.calls = 0
        self.fate = ""
        self.region: list[torch.Tensor] | None = None

    def call(self, name: str, given: tuple[Any, ...]) -> Any:
        """Launch what a method of the group launches."""
        Answers.turns.point()
        device = Answers.device
        tensors = list(_flatten(given))
        asynchronous = all(getattr(one, "asyncOp", True) for one in given)
        p2p = name in ("send", "recv", "recv_anysource")
        if self.region is not None:
            self.region += tensors
            return None
        device.settle()
        self.calls += 1
        fate, self.fate = self.fate, ""
        before = {op.bit for op in device.pending}
        work = self._launch(name, tensors, asynchronous, p2p, fate)
        for op in device.pending:
            if op.bit not in before:
                device.waits[op.bit] = [(peer, self.calls) for peer in self.peers]
        if CAPTURING and device.here().capture:
            CAPTURING[0].touch(device.blocks_of(tensors))
        Answers.turns.point()
        return work

    def _launch(self, name: str, tensors: list[torch.Tensor], asynchronous: bool, p2p: bool, fate: str) -> Any:
        if not tensors:
            return None
        if HOST in map(Answers.device.index_of, tensors):
            return HostWork(self.group, tensors, p2p, fate if asynchronous else "")
        staged = name in STAGED
        if asynchronous or p2p:
            return self.group.launch(tensors, staged=staged, p2p=p2p, receives=name.startswith("recv"), fate=fate)
        staging = [Answers.device.allocate(Answers.device._current, 64)] if staged else []
        return self.group.run(tensors + staging)

    def _is_initialized(self) -> bool:
        return True


class Nccl(Backend):
    """Stands for ProcessGroupNCCL."""


class Nccl2(Backend):
    """Stands for ProcessGroupNCCL2."""


class Gloo(Backend):
    """Stands for ProcessGroupGloo, on the host's memory."""

    supports_coalescing = False


BACKENDS: dict[int, Backend] = {}
"""By the id of a group, its backend."""

STAGED = ("allgather", "reduce_scatter")
"""The calls of lists whose tensors the backend copies to memory of its own."""


def _flatten(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _flatten(one)


def _method(name: str) -> Callable[..., Any]:
    def launch(to: Any, *given: Any) -> Any:
        backend = to if isinstance(to, Backend) else BACKENDS[id(to)]
        return backend.call(name, given)

    return launch


def _start_coalescing(group: Any, device: Any) -> None:
    BACKENDS[id(group)].region = []


def _end_coalescing(group: Any, device: Any) -> Any:
    backend = BACKENDS[id(group)]
    tensors, backend.region = backend.region, None
    return backend.call("coalesced", (tensors,)) if tensors else None


METHODS = (
    "allreduce", "broadcast", "reduce", "_allgather_base", "all_gather_single", "_reduce_scatter_base",
    "reduce_scatter_single", "allgather", "reduce_scatter", "alltoall", "alltoall_base", "all_to_all_single", "gather",
    "scatter", "send", "recv", "recv_anysource", "allreduce_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "barrier",
)  # fmt: skip
"""What c10d's own functions launch with."""


def group_of(backend: Backend) -> Any:
    """Return a process group of c10d's with ``backend``, which is rank 0 of it and of the world."""
    group = stock.ProcessGroup(0, 1 + len(backend.peers))
    BACKENDS[id(group)] = backend
    world = c10d._world
    world.pg_map[group] = ("nccl", None)
    world.pg_names[group] = f"front {len(BACKENDS)}"
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    return group


def forget(groups: list[Any]) -> None:
    """Let go of ``groups``, as the end of a process does."""
    for group in groups:
        for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
            table.pop(group, None)
        BACKENDS.pop(id(group), None)


def forked(ask: Callable[[], Any]) -> Any:
    """Return what ``ask`` returns in a fork of this process, as JSON has it; None if it has died."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told) if told else None


# --- in torch's place -----------------------------------------------------------------------------------------------

sys.modules["threading"] = _torch.replaced.threading = Threading("threading")  # type: ignore[attr-defined]
_inside = contextlib.ExitStack()  # until the process ends
_inside.enter_context(events_of_torch())
_streams.CudaStreams = Answers  # type: ignore[assignment, misc]
_torch.index_of = lambda tensor: Answers.device.index_of(tensor)
_torch.Backend = Backend
_torch.backend_of = lambda group, kind: BACKENDS.get(id(group))
_torch.current_device = lambda: INDEX
_torch.end_allocation_to_pool = lambda *_: None
for _name, _launch in list(vars(_torch).items()):
    if isinstance(_launch, _torch.Launch):
        _of = getattr(_launch.function, "__name__", _name)
        setattr(_torch, _name, _launch._replace(function=_method(_of)))
for _kind, _launch in _torch.COALESCED.items():
    if _launch is not None:
        _torch.COALESCED[_kind] = _launch._replace(function=_method("coalesced"))
for _name in METHODS:
    if hasattr(c10d.ProcessGroup, _name):
        setattr(c10d.ProcessGroup, _name, _method(_name))
c10d.ProcessGroup._start_coalescing = _start_coalescing  # type: ignore[method-assign]
c10d.ProcessGroup._end_coalescing = _end_coalescing  # type: ignore[method-assign, assignment]
c10d.ProcessGroup._get_backend = lambda group, _: BACKENDS[id(group)]  # type: ignore[method-assign, assignment, return-value]
c10d.Work = stock.Work = FakeWork  # type: ignore[misc, assignment]
_cuda: Any = torch.cuda
_cuda.CUDAGraph, _cuda.graph, _cuda.Stream, _cuda.stream = Graph, Capture, FakeStream, stream_context
_torch.launches._LAYERS += (fakes.__file__,)
_cuda.current_device = lambda: INDEX
_cuda.current_stream = lambda device=None: FakeStream(Answers.device, Answers.device._current)
_cuda.is_initialized = lambda: True
_cuda.synchronize = lambda device=None: Answers.device.synchronize(INDEX)


def _kernel(function: Any) -> Any:
    """Return ``function``, which copies tensors, as a kernel of the current stream."""

    def launch(*given: Any, **how: Any) -> Any:
        device = Answers.device
        tensors = [one for one in _flatten([*given, how.get("out")]) if device.index_of(one) == INDEX]
        if tensors:
            device.launch(device.here(), device.blocks_of(tensors))
        return function(*given, **how)

    return launch


_torch.copy_all = _kernel(_torch.copy_all)
torch.cat, torch.split_with_sizes_copy = _kernel(torch.cat), _kernel(torch.split_with_sizes_copy)


def in_place() -> str:
    """Return what of torch's is not as it was, where nobody wants it replaced; "" if all is."""
    now = {
        "capture_begin": vars(_cuda.CUDAGraph)["capture_begin"] is not _BEGIN,
        "resize_": "resize_" in vars(torch.UntypedStorage),
        "record_stream": "record_stream" in vars(torch.Tensor),
    }
    return ", ".join(name for name, changed in now.items() if changed)


_BEGIN = vars(Graph)["capture_begin"]


def _sleep(_: float) -> None:
    """The device goes on while the host waits for it."""
    device = Answers.device
    if device.pending:
        device.idle = 0
        if not device.run():
            device.finish()  # peers come, too
    elif device.idle > 100:
        raise Loss("the host waits for what is over (S3)")
    device.idle += 1


time.sleep = _sleep


def _pool_handle() -> tuple[int]:
    Answers.device.upcoming += 1
    return (Answers.device.upcoming,)


_cuda.graph_pool_handle = _pool_handle

# What safecomm allocates itself. Its module is the last that is bound before it is changed.
from safecomm.arena import staging as _staging  # noqa: E402

_buffer = _staging.buffer


def _tracked_buffer(shape: Any, like: torch.Tensor) -> torch.Tensor:
    made = _buffer(shape, like)
    device = Answers.device
    if device.has(like):
        device.received(made)
    return made


_staging.buffer = _tracked_buffer

del sys.modules["safecomm"]
import safecomm  # noqa: E402

sys.modules["threading"] = threading

assert sys.modules["safecomm._torch"] is _torch
# --- record_stream and the arena --------------------------------------------------------------------------------------

from safecomm.arena import arena as _arena  # noqa: E402
from safecomm.interception import record_stream as _record_stream  # noqa: E402


class _Kernel(_torch.Override):
    """torch's kernel of an operator: that of ``record_stream`` tells the allocator of the device."""

    def __init__(self, operator: str, key: str, function: Any, **how: Any) -> None:
        super().__init__(operator, key, function, **how)
        if operator == "aten::record_stream":
            self.original = lambda tensor, stream: Answers.device.record_stream(
                getattr(tensor, "tensor", tensor), stream.stream_id
            )


class _Over:
    """A tensor over a storage, for what the allocator is told."""

    def __init__(self, storage: Any) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8).set_(storage)

    def record_stream(self, stream: FakeStream) -> None:
        Answers.device.record_stream(self.tensor, stream.cuda_stream)


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """``torch.Tensor.record_stream`` of a tensor of a GPU."""
    if "record_stream" in vars(torch.Tensor):
        tensor.record_stream(stream)
    elif _record_stream.policy() is not None:  # where references are not counted, the operator alone is replaced
        _interceptions[0].record_stream(tensor, stream)
    else:
        Answers.device.record_stream(tensor, stream.stream_id)


def leave_alone(nbytes: int) -> None:
    """Let ``nbytes`` of each queue be what is not too far behind the host."""
    ledger = _record_stream.LEDGER
    ledger.budget = ledger.uses.budget = nbytes
    for queue in ledger.uses.queues.values():
        queue.budget = nbytes


def stream_of_torch(number: int) -> torch.Stream:
    """Return torch's object for a stream of the device, as its operators take it."""
    return torch.Stream(stream_id=number, device_index=INDEX, device_type=1)


def _block(nbytes: int, device: torch.device) -> tuple[None, torch.Tensor]:
    whole = torch.zeros(nbytes + 512, dtype=torch.uint8)
    return None, whole[-whole.data_ptr() % 512 :][:nbytes]


_torch.Override = _Kernel  # type: ignore[misc]
_interceptions: list[Any] = []  # the last one


def _intercept() -> Any:
    made = _record_stream._Interception(_record_stream.LEDGER, "CPU", lambda stream: int(stream.stream_id))
    _interceptions[:] = [made]
    return made


_record_stream._intercept = _intercept
_record_stream._tensor_of = _Over  # type: ignore[assignment]
_record_stream.stream_object = lambda index, stream: FakeStream(Answers.device, stream)  # type: ignore[assignment, return-value]
_arena._allocate = _block
_arena.device_of = lambda device: (torch.device("cpu"), INDEX)

_CLASSES = safecomm.collectives.backends.CLASSES  # type: ignore[attr-defined]
_KINDS = safecomm.collectives.backends  # type: ignore[attr-defined]
_CLASSES.update({Nccl: _KINDS.NCCL, Nccl2: _KINDS.NCCL2, Gloo: _KINDS.GLOO})
_KINDS.SOME_ASK_IN_WAIT = True
