"""Backends are told apart by what they are, whatever they are called; and what safecomm does about each of them."""

import contextlib
import sys
import types
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from ranks import launch, on
from simulated import FakeGroup, FakeNccl, FakeNccl2, SimulatedDevice, routes_of

import safecomm
from safecomm import _torch
from safecomm.collectives import backends, coalesced, general, holding
from safecomm.collectives import tensors as tensors_of_calls
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.table import ROWS
from safecomm.core.ledger import LEDGER, Ledger
from safecomm.core.streams import HOST


class Somebodys:
    """A backend that nobody knows."""


class NCCL4PyBackend:
    """Stands for torch's backend of Python, which is known by its name."""

    __module__ = "torch.distributed._nccl4py.backend"
    _record_stream = None


class Forgetful:
    """The same once torch has taken ``record_stream`` out of it."""

    __module__ = "torch.distributed._nccl4py.backend"
    __qualname__ = "NCCL4PyBackend"


class LikeNccl(FakeNccl):
    """A class that was made of one that is known."""


def test_the_classes_of_this_torch_are_told_apart():
    """Also on a torch that has no GPU to make objects of them, and where it has none of the classes."""
    known = {
        "ProcessGroupNCCL": backends.NCCL,
        "ProcessGroupNCCL2": backends.NCCL2,
        "ProcessGroupNCCLLazy": backends.NCCL2,
        "ProcessGroupGloo": backends.GLOO,
    }
    for name, kind in known.items():
        if hasattr(c10d, name):
            one = getattr(c10d, name)
            assert backends.kind_of(one.__new__(one)) is kind, name
    assert hasattr(c10d, "ProcessGroupNCCL2") == backends.SOME_ASK_IN_WAIT


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        (FakeNccl(), backends.NCCL), (FakeNccl2(), backends.NCCL2), (LikeNccl(), backends.NCCL),
        (Somebodys(), backends.PYTHON), (None, backends.UNKNOWN), (NCCL4PyBackend(), backends.NCCL4PY),
        (Forgetful(), backends.PYTHON), (object(), backends.OTHER),
    ],
)  # fmt: skip
def test_an_object_is_what_its_class_is(backend, kind):
    assert backends.kind_of(backend) is kind


def test_what_debugging_wraps_around_a_backend_is_looked_into():
    """As TORCH_DISTRIBUTED_DEBUG=DETAIL does."""
    gloo = c10d.ProcessGroupGloo(stock.HashStore(), 0, 1, timeout=timedelta(seconds=5))
    wrapped = c10d._ProcessGroupWrapper(gloo, gloo)
    assert backends.kind_of(wrapped) is backends.GLOO
    assert backends.kind_of(c10d._ProcessGroupWrapper(wrapped, gloo)) is backends.GLOO
    with mock.patch.object(_torch.backends, "_Wrapper", type("Nothing", (), {})):
        assert backends.kind_of(wrapped) is backends.OTHER


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "anything"])
def test_the_name_in_the_config_says_nothing(name):
    """``nccl`` is one class or the other, and each has further names."""
    group = FakeGroup(SimulatedDevice(), "nccl2")
    with mock.patch.dict(c10d._world.pg_backend_config, {group: f"cuda:{name}"}):
        assert backends.of(group, "cuda") is backends.NCCL2


@on(2)
def test_a_group_of_somebodys_own_is_nobodys_that_is_known():
    """Its works need not be those of the backend that it has registered."""

    class Own(c10d.ProcessGroup):
        pass

    assert backends.of(c10d._get_default_group(), "cpu") is backends.GLOO
    own = Own(0, 1)
    with mock.patch.object(_torch, "backend_of", return_value=FakeNccl()):
        assert backends.of(own, "cuda") is backends.PYTHON
    assert backends.of(c10d._get_default_group(), "cuda") in (backends.UNKNOWN, backends.GLOO)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [backends.NCCL, backends.NCCL2, backends.GLOO])
def test_what_a_route_is_told_of_its_backend(monkeypatch, kind, wrapped):
    """Only ProcessGroupNCCL's works may be waited for in part, and its regions taken apart."""
    group = c10d.ProcessGroup(0, 1)
    backend = c10d.ProcessGroupGloo(stock.HashStore(), 0, 1, timeout=timedelta(seconds=5))
    if wrapped:
        backend = c10d._ProcessGroupWrapper(backend, backend)
    monkeypatch.setitem(backends.CLASSES, c10d.ProcessGroupGloo, kind)
    monkeypatch.setattr(_torch, "backend_of", lambda *_: backend)
    route = routes_of(Ledger(SimulatedDevice())).of(group, 0)
    assert route.kind is kind
    assert route.backend is backend
    assert route.single_call_equivalent == (kind is backends.NCCL and not wrapped)
    assert route.wait_is_stream_order == (route.single_call_equivalent and _torch.waits_only_block_streams())
    assert route.asks_in_wait == (kind is backends.NCCL2)
    assert route.stream_ordered == route.ordered == (kind is not backends.GLOO)


# --- what the wrapped calls do about ProcessGroupNCCL2 ------------------------------------------------------------


@contextlib.contextmanager
def as_nccl2():
    """Take this rank's gloo for a backend whose waits ask the device; yield what is noted of modes."""
    modes = []

    @contextlib.contextmanager
    def lenient():
        modes.append("relaxed")
        yield
        modes.append("as it was")

    group = c10d._get_default_group()
    route = ROUTES.of(group, HOST)
    with (
        mock.patch.object(backends, "SOME_ASK_IN_WAIT", True),
        mock.patch.object(general, "relaxed", side_effect=lambda *_: lenient()),
        mock.patch.object(LEDGER.streams, "relaxed_capture_mode", lenient),
    ):
        route.asks_in_wait, route.current = True, lambda index: 0
        try:
            yield modes
        finally:
            route.asks_in_wait, route.current = False, LEDGER.streams.current


@on(2)
def test_a_wait_is_in_the_relaxed_mode_s5():
    """S5: a wait that asks the device ends another thread's capture in any other."""
    for wait in ("wait", "wait with a timeout"):
        work = safecomm.all_reduce(torch.ones(4), async_op=True)
        with as_nccl2() as modes:
            assert work.wait() if wait == "wait" else work.wait(timedelta(seconds=30))
            assert modes == ["relaxed", "as it was"]


GATHER = getattr(safecomm, "all_gather_single", None) or safecomm.all_gather_into_tensor
SCATTER = getattr(safecomm, "reduce_scatter_single", None) or safecomm.reduce_scatter_tensor
CALLS = {
    "all_reduce": lambda: safecomm.all_reduce(torch.ones(4)),
    "all_gather": lambda: GATHER(torch.ones(8), torch.ones(4)),
    "reduce_scatter": lambda: SCATTER(torch.ones(2), torch.ones(4)),
    "broadcast": lambda: safecomm.broadcast(torch.ones(4), 0),
    "a list": lambda: safecomm.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4)),
}
if backends.SOME_ASK_IN_WAIT:  # else a barrier is c10d's at once
    CALLS["barrier"] = lambda: safecomm.barrier()


@on(2)
def test_so_are_synchronous_calls_s5():
    for name, make in CALLS.items():
        with as_nccl2() as modes:
            make()
        # The direct way launches, and then waits.
        assert modes in (["relaxed", "as it was"], ["relaxed", "as it was"] * 2), name


@on(2)
def test_so_are_launches_s5():
    """S5: ProcessGroupNCCL2 asks for earlier works when it launches one."""
    launches = {
        "all_reduce": lambda: safecomm.all_reduce(torch.ones(4), async_op=True),
        "all_gather": lambda: GATHER(torch.ones(8), torch.ones(4), async_op=True),
        "reduce_scatter": lambda: SCATTER(torch.ones(2), torch.ones(4), async_op=True),
        "broadcast": lambda: safecomm.broadcast(torch.ones(4), 0, async_op=True),
    }
    route = ROUTES.of(c10d._get_default_group(), HOST)
    for name, launch_one in launches.items():
        with as_nccl2() as modes, mock.patch.object(route, "stream_ordered", True):
            work = launch_one()
            assert modes == ["relaxed", "as it was"], name
        work.wait()


@on(2)
def test_a_launch_inside_of_a_capture_is_in_its_mode():
    """What CUDA does not allow there is an error of its own, and not hidden by the relaxed mode."""
    route = ROUTES.of(c10d._get_default_group(), HOST)
    with (
        as_nccl2() as modes,
        mock.patch.object(route, "current", return_value=7),
        mock.patch.object(LEDGER.streams, "is_capturing", lambda index, stream: stream == 7),
    ):
        assert route.launch(sum, [1, 2]) == 3
    assert modes == []


@on(2)
def test_so_are_regions_s5():
    with as_nccl2() as modes, mock.patch.object(coalesced, "relaxed", general.relaxed):
        with safecomm._coalescing_manager():
            for _ in range(2):
                safecomm.all_reduce(torch.ones(4))
        assert modes in (["relaxed", "as it was"], ["relaxed", "as it was"] * 2)  # launched, and waited for


@on(2)
def test_of_others_nothing_is_done_about_the_mode():
    """And no call pays for it."""
    with mock.patch.object(LEDGER.streams, "relaxed_capture_mode", side_effect=AssertionError("not for gloo")):
        for make in CALLS.values():
            make()
        safecomm.all_reduce(torch.ones(4), async_op=True).wait()


def test_only_a_call_of_nccl2_that_is_not_captured_is_in_the_relaxed_mode(monkeypatch):
    """Inside of a capture nothing is asked, and what CUDA refuses there stays an error."""
    group = c10d.ProcessGroup(0, 1)
    device = SimulatedDevice()
    ledger = Ledger(device)
    monkeypatch.setattr(holding, "LEDGER", ledger)
    monkeypatch.setattr(holding, "ROUTES", routes_of(ledger))
    monkeypatch.setattr(holding, "_current", device.current)
    tensors = [types.SimpleNamespace(is_cuda=True, is_meta=False, get_device=lambda: 0)]
    for backend, relaxes in ((FakeNccl2(), True), (FakeNccl(), False)):
        routes_of(ledger).all.clear()
        monkeypatch.setattr(_torch, "backend_of", lambda *_, backend=backend: backend)
        for some in (True, False):
            monkeypatch.setattr(backends, "SOME_ASK_IN_WAIT", some)
            with holding.relaxed(group, tensors):
                assert device._thread.relaxed == (relaxes and some)
        monkeypatch.setattr(backends, "SOME_ASK_IN_WAIT", True)
        device.begin_capture(1)
        with holding.relaxed(group, tensors):
            assert not device._thread.relaxed
        device.end_capture()
        device.switch(0)
        with holding.relaxed(group, [torch.ones(1)]), holding.relaxed(None, tensors):
            assert not device._thread.relaxed


def test_a_synchronous_call_that_fails_leaves_what_it_still_uses_s4(monkeypatch):
    """S4: the kernel of a call whose wait raises is on the current stream, which is not the memory's."""
    device = SimulatedDevice()
    ledger = Ledger(device)
    monkeypatch.setattr(holding, "LEDGER", ledger)
    monkeypatch.setattr(holding, "ROUTES", routes_of(ledger))
    monkeypatch.setattr(holding, "_current", device.current)
    monkeypatch.setattr(tensors_of_calls, "_alloc_stream", device.alloc_stream)
    tensor = device.allocate(0, 64)
    device.switch(1)
    device.launch(device.here(), device.blocks_of([tensor]))
    route = types.SimpleNamespace(index=0, wait_for=mock.Mock(side_effect=RuntimeError("too late")))
    with pytest.raises(RuntimeError, match="too late"):
        holding.wait_for(route, None, ROWS["all_reduce"], c10d.ProcessGroup(0, 1), [tensor], sys._getframe())
    del tensor
    device.settle()
    assert [entry.state for entry in ledger.pending()] == ["handed off"]


class OnTheDevice(torch.Tensor):
    """A tensor that says that it is a GPU's."""

    is_cuda = True

    def get_device(self):
        return 0


@pytest.mark.parametrize(
    ("backend", "aliased"), [(FakeNccl(), True), (FakeNccl2(), False), (Somebodys(), False), (object(), True)]
)
def test_aliases_are_for_backends_that_hold_too_long(monkeypatch, backend, aliased):
    """ProcessGroupNCCL2 calls no record_stream for sends and receives, and gives a region's tensors back."""
    monkeypatch.setattr(holding, "LEDGER", Ledger(SimulatedDevice()))
    monkeypatch.setattr(_torch, "backend_of", lambda *_: backend)
    group = c10d.ProcessGroup(0, 1)
    on_device = torch.ones(1).as_subclass(OnTheDevice)
    assert holding.needs_aliases(group, [on_device]) is aliased
    assert holding.needs_aliases(group, [torch.ones(1), on_device]) is aliased
    assert not holding.needs_aliases(group, [torch.ones(1), "nothing"])


def _under_detail(rank):
    stock.set_debug_level(stock.DebugLevel.DETAIL)
    group = stock.new_group()
    assert type(_torch.backend_of(group, "cpu")) is c10d._ProcessGroupWrapper
    tensor = torch.full((4,), float(rank))
    assert safecomm.all_reduce(tensor, group=group, async_op=True).wait()
    assert tensor.tolist() == [1.0] * 4
    assert ROUTES.fast[id(group)].kind is backends.GLOO
    safecomm.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 4
    work = (safecomm.isend if rank == 0 else safecomm.irecv)(tensor, 1 - rank, group=group)
    assert not work.queue.pollable, "S3: gloo's, so it is not asked"
    assert work.wait()
    assert safecomm.pending() == []
    del group, work
    safecomm.destroy_process_group()


def test_gloo_is_gloo_where_everything_is_checked():
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps each backend."""
    for ended in launch(2, _under_detail):
        ended.check()
