"""Backends that safecomm does not know, whose works can't be asked: nothing is worse than without safecomm (S1, S3)."""

import contextlib
import functools
import sys
import types
import typing
import weakref

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from ranks import on, until
from simulated import FakeGroup, SimulatedDevice, call, routes_of
from torch._C._distributed_c10d import Backend

import safecomm
from safecomm.collectives import backends, holding
from safecomm.collectives.table import ROWS
from safecomm.core.drain import await_before_capture, drain_ledger
from safecomm.core.ledger import Ledger
from safecomm.core.streams import HOST
from safecomm.core.work import Work
from safecomm.errors import PendingWorkError

COUNT = 40
MIB = 1 << 20

# --- a backend of Python, which forwards to gloo ----------------------------------------------------------------------


class Silent(c10d.Work):
    """It says nothing but that it was waited for."""

    def __init__(self, inner: c10d.Work) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: object = None) -> bool:
        return self.inner.wait()


class Never(Silent):
    """It is never complete, and has no future."""

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future:
        raise NotImplementedError


class Telling(Silent):
    """It has a future, which whoever has made the work sets."""

    futures: typing.ClassVar = []

    def __init__(self, inner: c10d.Work) -> None:
        super().__init__(inner)
        self.future = torch.futures.Future()
        self.futures.append(weakref.ref(self.future))

    def get_future(self) -> torch.futures.Future:
        return self.future


WORKS = [Silent, Never, Telling]


def _can_be_subclassed() -> bool:
    try:
        type("Probe", (Backend,), {})(0, 1)
    except TypeError:  # before torch 2.14
        return False
    return True


BASE = Backend if _can_be_subclassed() else stock.ProcessGroup
"""What a backend of Python is made of. Before torch 2.14 it is a whole group."""


class Forwarding(BASE):
    """A backend of Python, whose collectives are gloo's and whose works are its own."""

    def __init__(self, kind: type, store: stock.Store, rank: int, size: int, timeout: object) -> None:
        super().__init__(rank, size)
        self.kind = kind
        self.inner = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        if hasattr(Backend, "Options") and BASE is Backend:
            self.its_options = Backend.Options("forwarding", timeout=timeout)

    @property
    def options(self) -> object:  # which torch 2.15 reads
        return self.its_options

    def getBackendName(self) -> str:
        return "forwarding"

    def _forward(self, name: str, *given: object) -> c10d.Work:
        return self.kind(getattr(self.inner, name)(*given))

    allreduce = functools.partialmethod(_forward, "allreduce")
    broadcast = functools.partialmethod(_forward, "broadcast")
    send = functools.partialmethod(_forward, "send")
    recv = functools.partialmethod(_forward, "recv")


@functools.cache
def _group(kind: type) -> stock.ProcessGroup:
    name = f"forwarding_{kind.__name__.lower()}"
    stock.Backend.register_backend(name, functools.partial(Forwarding, kind), devices=["cpu"])
    return stock.new_group(backend=name)


class Memory(bytearray):
    """Bytes whose end can be noted."""


class Alive:
    """How many bytes of the tensors that it makes are still there."""

    def __init__(self) -> None:
        self.nbytes = self.peak = 0

    def tensor(self, nbytes: int = MIB) -> torch.Tensor:
        memory = Memory(nbytes)
        weakref.finalize(memory, self._gone, nbytes)
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)
        return torch.frombuffer(memory, dtype=torch.float32)

    def _gone(self, nbytes: int) -> None:
        self.nbytes -= nbytes


@on(2)
@pytest.mark.parametrize("kind", WORKS)
def test_a_dropped_handle_takes_no_more_memory_than_without_safecomm_s3(kind):
    """Of 40, each of which gloo has ended before the next."""
    group, peaks = _group(kind), {}
    for library in (stock, safecomm):
        alive = Alive()
        for _ in range(COUNT):
            library.all_reduce(alive.tensor(), group=group, async_op=True)
            until(lambda: not alive.nbytes)  # noqa: B023
        peaks[library.__name__] = alive.peak
    assert peaks == {"torch.distributed": MIB, "safecomm": MIB}
    assert safecomm.drain() == 0
    assert safecomm.pending() == []


@on(2)
@pytest.mark.parametrize("kind", WORKS)
def test_many_dropped_handles_leave_nothing_behind_s3(kind):
    group, alive = _group(kind), Alive()
    for _ in range(COUNT):
        safecomm.all_reduce(alive.tensor(), group=group, async_op=True)
    until(lambda: not alive.nbytes)
    assert safecomm.drain(wait=True, timeout=60) == 0


@on(2)
@pytest.mark.parametrize("kind", WORKS)
def test_a_handle_that_somebody_has_is_held_until_it_is_waited_for_s2(kind):
    group, alive = _group(kind), Alive()
    given = alive.tensor()
    given.fill_(stock.get_rank() + 1)
    work = safecomm.all_reduce(given, group=group, async_op=True)
    result = given[:1]
    del given
    (held,) = safecomm.pending()
    assert held.nbytes == MIB
    assert work.wait()
    assert result.item() == 3
    del result
    assert safecomm.pending() == []
    assert work.wait()
    del work  # gloo's refers to its output
    until(lambda: not alive.nbytes)


@on(2)
@pytest.mark.parametrize("kind", WORKS)
def test_draining_waits_for_handles_that_can_not_be_asked_s3(kind):
    group, alive = _group(kind), Alive()
    given = alive.tensor()
    given.fill_(1)
    work = safecomm.all_reduce(given, group=group, async_op=True)
    assert safecomm.drain(wait=True, timeout=60) == 0
    assert given[0].item() == 2
    assert work.wait()


@on(2)
@pytest.mark.parametrize("kind", WORKS)
def test_a_dropped_send_is_kept_until_its_future_is_done_or_it_is_drained_s3(kind):
    """gloo's send takes its buffer with it, so the ledger keeps the handle, as that of gloo's own."""
    group, alive, rank = _group(kind), Alive(), stock.get_rank()
    Telling.futures.clear()
    if rank == 0:
        safecomm.isend(alive.tensor(), 1, group=group)
        assert [held.nbytes for held in safecomm.pending()] == [MIB]
        if kind is Telling:
            (future,) = Telling.futures
            safecomm.barrier()
            assert alive.nbytes == MIB  # the future is not done
            future().set_result(None)
    else:
        received = torch.ones(MIB // 4)
        safecomm.recv(received, 0, group=group)
        assert not received.any()
        safecomm.barrier() if kind is Telling else None
    stock.barrier()
    safecomm.barrier()  # looks
    if kind is Telling:
        assert safecomm.pending() == []
    else:
        assert len(safecomm.pending()) == (rank == 0)
        assert safecomm.drain(wait=True, timeout=60) == 0
    until(lambda: not alive.nbytes)


# --- on a device, which is simulated ----------------------------------------------------------------------------------


class Future:
    """A future that is done with its work, or, as NCCL's, as soon as that is launched."""

    def __init__(self, work: "PythonWork") -> None:
        self.work = work

    def done(self) -> bool:
        return self.work.group.at_launch or not self.work.bit & ~self.work.device.done


class PythonWork:
    """As nccl4py's: its first wait alone orders a stream, it is never complete, and c10d passes on little of it."""

    def __init__(self, group: "PythonGroup", tensors: list[torch.Tensor]) -> None:
        device, self.group = group.device, group
        self.device = device
        launching = device.here()
        device.wait(group.stream, launching.past, launching.capture)
        self.capture = group.stream.capture
        self.bit = device.launch(group.stream, device.blocks_of(tensors))
        self.past, self.waited = group.stream.past, False

    def wait(self, timeout: object = None) -> bool:
        if not self.waited:
            self.device.wait(self.device.here(), self.past, self.capture)
        self.waited = True
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Future:
        if not self.group.has_futures:
            raise RuntimeError("Work::getFuture not implemented.")
        return Future(self)


class PythonBackend:
    """A backend of a class of Python that nobody knows."""


class PythonGroup(FakeGroup):
    """A group of such a backend."""

    def __init__(self, device: SimulatedDevice, *, has_futures: bool = True, at_launch: bool = False) -> None:
        super().__init__(device, "nccl")
        self.has_futures, self.at_launch = has_futures, at_launch

    def _get_backend(self, device: torch.device) -> object:
        return PythonBackend()

    def launch(self, tensors: list[torch.Tensor], **_: object) -> PythonWork:
        return PythonWork(self, tensors)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.mark.parametrize("at_launch", [False, True])
@pytest.mark.parametrize("p2p", [False, True])
def test_a_dropped_handle_comes_back_once_its_future_is_done_s1_s3(device, at_launch, p2p):
    """Whenever the future is done, memory is not given out before the work is over, and no stream is made to wait."""
    ledger, group = Ledger(device, patience=0), PythonGroup(device, at_launch=at_launch)
    for _ in range(COUNT):
        call(ledger, group, [device.allocate(device.here().handle, 64)], p2p=p2p)
    assert len(ledger.pending()) == COUNT
    before = {handle: stream.past for handle, stream in device.streams.items() if handle < 4}
    drain_ledger(ledger)
    assert len(ledger.pending()) == COUNT
    assert {handle: device.streams[handle].past for handle in before} == before
    device.finish()
    for _ in range(3):
        drain_ledger(ledger)
    device.settle()
    assert not ledger.pending()
    assert not device.faults


@pytest.mark.parametrize("p2p", [False, True])
def test_a_handle_that_has_neither_is_held_until_it_is_drained_s3(device, p2p):
    ledger, group = Ledger(device, patience=0), PythonGroup(device, has_futures=False)
    call(ledger, group, [device.allocate(0, 64)], p2p=p2p)
    device.finish()
    for _ in range(3):
        drain_ledger(ledger)
    assert len(ledger.pending()) == 1
    assert drain_ledger(ledger, wait=True) == 0
    assert not device.faults


def test_draining_waits_for_the_device_where_a_wait_only_orders_a_stream_s1(device):
    """What waits later finds the work over, because a second wait of such a work orders nothing."""
    ledger, group = Ledger(device, patience=0), PythonGroup(device)
    launched = call(ledger, group, [device.allocate(0, 64)])
    with pytest.raises(PendingWorkError):
        drain_ledger(ledger, wait=True, timeout=safecomm.arguments.seconds("drain", timeout=0.05))
    assert len(ledger.pending()) == 1
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0
    device.switch(1)
    assert launched.work.wait()


def test_works_that_were_waited_for_are_over_before_a_capture_s5(device):
    ledger, group = Ledger(device, patience=0), PythonGroup(device)
    launched = call(ledger, group, [device.allocate(0, 64)])
    launched.work.wait()
    assert not ledger.pending()
    device.finish()
    await_before_capture(ledger, None)
    assert launched.work.host_waited


def test_a_list_is_waited_for_once_where_a_second_wait_orders_nothing_s1(device):
    """c10d's own staging memory is known of NCCL alone."""
    ledger, group = Ledger(device, patience=0), PythonGroup(device)
    tensor = device.allocate(0, 64)
    inner, storages = group.launch([tensor]), (tensor.untyped_storage(),)
    work = routes_of(ledger).hold(Work(), "all_gather", inner, group, 0, storages, sys._getframe(), staged=True)
    device.switch(1)
    work.wait()
    assert device.streams[1].past & inner.bit


@pytest.mark.parametrize(
    ("kind", "index", "held"),
    [
        (backends.PYTHON, HOST, False), (backends.PYTHON, 0, True), (backends.NCCL4PY, 0, False),
        (backends.OTHER, HOST, True), (backends.GLOO, HOST, True),
    ],
)  # fmt: skip
def test_who_keeps_what_a_dropped_handle_used(monkeypatch, device, kind, index, held):
    """The backend: on the host, and where it calls record_stream. Not for sends and receives, nor in a capture."""
    monkeypatch.setattr(backends, "of", lambda group, device_type: kind)
    routes, group = routes_of(Ledger(device)), PythonGroup(device)
    assert routes.of(group, index).held_by_handles is not held
    assert not routes.of(group, index, unordered=True).held_by_handles
    assert not routes.of(group, index, 1, 7).held_by_handles


def test_record_stream_keeps_only_what_the_allocator_gives_out():
    """For the buffers of an arena it does nothing, so the ledger holds those of a dropped handle on nccl4py too."""
    with contextlib.closing(safecomm.Arena("1MiB", device="cpu")) as arena:
        ordinary, buffer = torch.ones(8).untyped_storage(), arena.empty(8).untyped_storage()
        assert holding._handle(backends.NCCL4PY, 0, (ordinary,), True)[1]
        assert not holding._handle(backends.NCCL4PY, 0, (ordinary, buffer), True)[1]
        assert not holding._handle(backends.NCCL4PY, 0, (object(),), True)[1]
        assert holding._handle(backends.PYTHON, HOST, (buffer,), True)[1]
        del buffer


def test_a_send_of_nccl4py_is_a_use_on_the_current_stream_s1_s3(monkeypatch):
    """So what it uses is held where it was allocated on another stream, and its handle alone holds it besides."""
    uses, tensor = [], torch.ones(8)
    route = types.SimpleNamespace(kind=backends.NCCL4PY)
    routes = types.SimpleNamespace(fast={}, of=lambda *_: route, hold=lambda *_, unordered, **__: unordered)
    monkeypatch.setattr(holding, "ROUTES", routes)
    monkeypatch.setattr(holding, "LEDGER", types.SimpleNamespace(hand_off=lambda *given: uses.append(given[3])))
    monkeypatch.setattr(holding, "_current", lambda _: 5)
    monkeypatch.setattr(holding, "common_alloc_stream", lambda *_: 7)

    def held(ordered):
        group = c10d.ProcessGroup(0, 1)
        call = holding.Call(ROWS["all_reduce"], group, [tensor], 0, sys._getframe(), ordered=ordered)
        return holding.finish(call, Silent(None))

    assert held(ordered=False) is False
    assert uses == [(tensor.untyped_storage(),)]
    assert held(ordered=True) is False
    assert len(uses) == 1  # of a collective record_stream tells the allocator


def test_a_call_that_ends_after_the_default_group_has_gone_is_held_s1(monkeypatch):
    """Such as the copy of a functional all_gather, which is made where the program waits."""
    uses, tensor = [], torch.ones(8)
    monkeypatch.setattr(holding, "LEDGER", types.SimpleNamespace(hand_off=lambda *given: uses.append(given[1:4])))
    call = holding.Call(ROWS["all_gather"], None, [tensor], 0, sys._getframe())
    assert holding.finish(call, None) is None
    assert uses == [(None, 0, (tensor.untyped_storage(),))]


@pytest.mark.parametrize(
    ("kind", "index", "ordered", "once"),
    [
        (backends.PYTHON, HOST, True, True), (backends.PYTHON, 0, False, False), (backends.GLOO, HOST, True, False),
        (backends.GLOO, HOST, False, True), (backends.NCCL, 0, False, False), (backends.OTHER, HOST, False, False),
    ],
)  # fmt: skip
def test_who_is_waited_for_once(kind, index, ordered, once):
    """On a device each wait orders another stream. On the host a second one may hang, as that for a gloo send does."""
    assert (holding._handle(kind, index, (), ordered)[0].turn is not None) is once
