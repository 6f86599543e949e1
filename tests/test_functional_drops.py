"""Functional collectives that nobody waits for: finished under patch() at the next call (S3, S4), counted without."""

import contextlib
import ctypes
import gc
import logging
import sys
import threading
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as funcol
from ranks import launch, on, signal_to_peers, until, wait_for_signal
from torch.multiprocessing.reductions import StorageWeakRef
from watching import Log

import safecomm
from safecomm import _torch, backends
from safecomm.diagnostics import leaks
from safecomm.diagnostics.doctor import examine, look
from safecomm.ledger import LEDGER
from safecomm.patching.functional import _orders
from safecomm.trails import Trails
from safecomm.unwaited import Result, Unwaited

pytestmark = pytest.mark.skipif(
    _torch.tensor_use_count is None or _torch.unwaited() is None, reason="this torch does not count"
)


def world():
    return stock.group.WORLD


def gather(tensor):
    newer = getattr(funcol, "all_gather_single", None)
    return (newer or funcol.all_gather_tensor)(tensor, 0, world())


def scatter(tensor):
    newer = getattr(funcol, "reduce_scatter_single", None)
    return (newer or funcol.reduce_scatter_tensor)(tensor, "sum", 0, world())


KINDS = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", world()),
    "broadcast": lambda x: funcol.broadcast(x, 0, world()),
    "all_gather": gather,
    "reduce_scatter": scatter,
    "all_to_all": lambda x: funcol.all_to_all_single(x, None, None, world()),
    "coalesced": lambda x: funcol.all_reduce_coalesced([x, x + 1], "sum", world()),
}


def comes_back():
    """Poll with calls, as a program makes them, until nothing is kept for functional collectives."""
    until(lambda: safecomm.drain() == 0 and _torch.unwaited() == 0)


def results():
    return [entry for entry in LEDGER.entries if isinstance(entry, Result)]


@on(2)
def test_what_is_dropped_comes_back_at_the_next_call_s3():
    with safecomm.patched():
        for launched in KINDS.values():
            inner = launched(torch.ones(8))
            inner = [
                StorageWeakRef(one.elem.untyped_storage()) for one in (inner if isinstance(inner, list) else [inner])
            ]
            assert results(), launched
            stock.barrier()  # a call, that sees them, and after which all have come
            comes_back()
            assert all(one.expired() for one in inner)
    assert not results()


@on(2)
def test_a_functional_call_is_a_next_call_too_s3():
    with safecomm.patched():
        for _ in range(4):
            funcol.all_reduce(torch.ones(8), "sum", world())
            (kept,) = {funcol.all_reduce(torch.ones(8), "sum", world()).sum().item()}
            assert kept == 16
        until(lambda: (funcol.all_reduce(torch.ones(1), "sum", world()).wait(), _torch.unwaited())[1] == 0)
    safecomm.drain(wait=True)


@on(2)
def test_a_drop_is_named_while_it_is_held():
    with safecomm.patched():
        safecomm.drain(wait=True)
        if stock.get_rank() == 0:
            KINDS["all_reduce"](torch.ones(8))
            (held,) = safecomm.pending()
            assert (held.op, held.nbytes, held.device) == ("all_reduce", 32, "cpu")
            assert "test_functional_drops.py" in held.site
            with pytest.raises(safecomm.PendingWorkError, match="all_reduce"):
                safecomm.drain(wait=True, timeout=timedelta(milliseconds=20))
            signal_to_peers("go on")
        else:
            wait_for_signal("go on")
            KINDS["all_reduce"](torch.ones(8))
        assert safecomm.drain(wait=True) == 0
        assert _torch.unwaited() == 0
        assert not results()


@on(2)
def test_the_host_does_not_block_for_a_drop_whose_peer_comes_later_s3():
    """Whoever waited in the next call would keep the peer from its own."""
    rank = stock.get_rank()
    with safecomm.patched():
        if rank == 0:
            KINDS["all_reduce"](torch.ones(8))
            for number in range(3):
                stock.send(torch.full((1,), float(number)), 1)
        else:
            got = torch.empty(1)
            for number in range(3):
                stock.recv(got, 0)
                assert got.item() == number
            KINDS["all_reduce"](torch.ones(8))
        comes_back()


@on(2)
def test_what_is_used_is_right_and_freed_at_once_s2():
    with safecomm.patched():
        for launched in KINDS.values():
            plain = torch.arange(8.0) + stock.get_rank()
            safecomm.unpatch()
            expected = launched(plain)
            expected = [one.clone() for one in (expected if isinstance(expected, list) else [expected])]
            safecomm.patch()
            got = launched(plain)
            got = got if isinstance(got, list) else [got]
            storages = [StorageWeakRef(one.elem.untyped_storage()) for one in got]
            views = [one.view(2, -1) for one in got]
            del got
            assert [one.flatten().tolist() for one in views] == [one.tolist() for one in expected]
            later = [one.view(-1) for one in views]
            del views, later
            until(lambda: all(one.expired() for one in storages))  # noqa: B023 (gloo's thread may still be leaving)
            assert not results()


@on(2)
def test_what_somebody_took_out_of_its_wrapper_is_left_alone():
    with safecomm.patched():
        for take in (lambda one: one.elem, lambda one: one.elem.view(2, 4)[1], lambda one: one.elem[2:].detach()):
            tensor = take(KINDS["all_reduce"](torch.arange(8.0)))
            for _ in range(3):
                safecomm.drain()
            safecomm.drain(wait=True, timeout=timedelta(seconds=10))  # does not wait for what others have
            assert _torch.unwaited() == 1  # nobody has waited in its place
            funcol.wait_tensor(tensor)
            assert tensor.tolist() == take(Wrapped(torch.arange(8.0) * 2)).tolist()
            comes_back()
            assert tensor.tolist() == take(Wrapped(torch.arange(8.0) * 2)).tolist()
            del tensor
            comes_back()
            # Taken out, and dropped then without a wait.
            tensor = take(KINDS["all_reduce"](torch.arange(8.0)))
            safecomm.drain()
            assert _torch.unwaited() == 1
            del tensor
            comes_back()
            assert not results()


class Wrapped:
    def __init__(self, elem):
        self.elem = elem


@on(2)
def test_a_view_that_is_another_wrapper_keeps_its_wait():
    with safecomm.patched():
        whole = gather(torch.arange(4.0))
        view = whole[2:6]
        del whole
        safecomm.drain()
        assert not results()
        assert _torch.unwaited() == 1
        assert view.tolist() == [2, 3, 0, 1]
        assert _torch.unwaited() == 0
        first = gather(torch.arange(4.0))
        second = funcol.AsyncCollectiveTensor(first.elem)
        del first
        safecomm.drain()
        assert not results()
        assert second.tolist() == [0, 1, 2, 3] * 2


@on(2)
def test_the_end_of_a_wrapper_only_queues_wherever_it_comes_s4():
    with safecomm.patched():
        cycle, box = ([KINDS["all_reduce"](torch.ones(8))] for _ in range(2))
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert len(results()) == 1
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert len(results()) == 2
        assert _torch.unwaited() == 2
        comes_back()


@on(2)
def test_a_mode_that_refuses_operations_does_not_see_the_wait():
    from torch._subclasses import FakeTensorMode

    with safecomm.patched():
        KINDS["all_reduce"](torch.ones(8))
        with FakeTensorMode():
            comes_back()


@on(2)
def test_unpatch_puts_torchs_own_back():
    kind = funcol.AsyncCollectiveTensor

    def there():
        return [{name: id(value) for name, value in vars(thing).items()} for thing in (funcol, kind)]

    before = there()
    taken = {"as": funcol.all_reduce}
    with safecomm.patched():
        assert taken["as"] is funcol.all_reduce
        assert sum(there()[0][name] != id_ for name, id_ in before[0].items()) >= 8
        assert {name for name, id_ in before[1].items() if there()[1][name] != id_} == {
            "__new__",
            "trigger_wait",
            "wait",
        }
        kept = KINDS["all_reduce"](torch.ones(8))
    assert there() == before
    assert id(taken["as"]) == before[0]["all_reduce"]
    assert kept.tolist() == [2] * 8
    del kept
    safecomm.drain()
    assert not results()


@on(2)
def test_compiled_collectives_are_torchs_s9():
    def step(x):
        return funcol.all_reduce(x * 2, "sum", world()) + 1

    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    plain = torch.compile(step, backend=backend, fullgraph=True)(torch.ones(4))
    torch._dynamo.reset()
    with safecomm.patched():
        patched = torch.compile(step, backend=backend, fullgraph=True)(torch.ones(4))
        assert not results()
    torch._dynamo.reset()
    assert plain.tolist() == patched.tolist() == [5] * 4
    assert graphs[0] == graphs[1]


@on(2)
def test_gradients_are_those_without_the_patch():
    name = (
        "all_gather_single_autograd" if hasattr(funcol, "all_gather_single_autograd") else "all_gather_tensor_autograd"
    )

    def gradient():
        leaf = (torch.arange(4.0) + stock.get_rank()).requires_grad_()
        (getattr(funcol, name)(leaf, 0, world()) * torch.arange(8.0)).sum().backward()
        return leaf.grad.tolist()

    expected = gradient()
    with safecomm.patched():
        assert gradient() == expected
        getattr(funcol, name)(torch.ones(4, requires_grad=True), 0, world())
        comes_back()


def distributed_tensors(*, drop):
    """Return what a few programs of DTensor give."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b = torch.randn(4, 6), torch.randn(6, 4)
    sharded = distribute_tensor(a, mesh, [Shard(0)])
    other = distribute_tensor(b, mesh, [Shard(0)])
    columns = sharded.redistribute(mesh, [Shard(1)])
    product = columns @ other  # partial sums
    found = [sharded.full_tensor(), columns.to_local(), product.full_tensor()]
    found.append(product.redistribute(mesh, [Shard(0)]).to_local())
    found.append((product.redistribute(mesh, [Replicate()], async_op=True) * 2).to_local())
    weight = distribute_tensor(b.clone(), mesh, [Shard(1)]).requires_grad_()
    (distribute_tensor(a, mesh, [Replicate()]) @ weight).redistribute(mesh, [Replicate()]).square().sum().backward()
    found.append(weight.grad.full_tensor())
    if drop:
        product.redistribute(mesh, [Replicate()], async_op=True)
    taken = product.redistribute(mesh, [Shard(1)], async_op=True).to_local()  # perhaps a wrapper
    found.append(taken + 0)
    assert isinstance(product.placements[0], Partial)
    return [one.detach().clone() for one in found]


@on(2)
def test_distributed_tensors_are_those_without_the_patch():
    pytest.importorskip("torch.distributed.tensor")
    expected = distributed_tensors(drop=False)
    with safecomm.patched():
        for _ in range(3):
            got = distributed_tensors(drop=True)
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        comes_back()


@on(2)
def test_without_the_patch_they_are_counted():
    assert safecomm.memory_report().unwaited == 0
    with leaks.watch(log_leaks=True) as watched, Log() as said:
        kept = [KINDS["all_reduce"](torch.ones(8)).elem for _ in range(3)]
        watched_keeps = len(kept)
    assert watched.unwaited == watched_keeps == 3
    assert "3 functional collectives that nobody has waited for" in str(watched)
    assert "3 functional collectives that nobody has waited for" in str(safecomm.memory_report())
    (check,) = [check for check in examine(look(), {}) if check.name == "functional collectives"]
    assert not check.ok
    assert check.sentence.startswith("3 functional collectives")
    for tensor in kept:
        funcol.wait_tensor(tensor)
    assert safecomm.memory_report().unwaited == 0
    assert not [check for check in examine(look(), {}) if check.name == "functional collectives"]
    assert said is not None


class Device:
    """What a ledger asks of a device, of which stream 7 is the current one."""

    captured = 0

    def __init__(self):
        self.stream = 7
        self.homes = {}

    def current(self, _):
        return self.stream

    def capture(self, stream):
        return self.captured if stream == 7 else 0

    def home(self, pointer, *_):
        return self.homes[pointer]

    @contextlib.contextmanager
    def using(self, _, stream):
        self.stream, before = stream, self.stream
        yield
        self.stream = before

    def lenient(self):
        return contextlib.nullcontext()

    def mark(self, *_):
        return "event"


class Wrapper:
    """Something that can die."""


@pytest.mark.parametrize(("home", "trails"), [(7, 0), (9, 1)])
def test_on_a_device_the_stream_of_the_launch_waits_and_inputs_of_another_become_a_trail_s1(monkeypatch, home, trails):
    device, busy, waits, failed = Device(), {}, [], []
    trail = Trails(device, busy, lag=4, budget=1)
    unwaited = Unwaited(device, busy, trail, lambda *what: failed.append(what))
    unwaited.wait_for = lambda tensor: waits.append((device.stream, tensor.data_ptr()))
    monkeypatch.setattr(unwaited, "_over", lambda _: False)

    def drop(*, known=True, orders=True):
        tensor, given, wrapper = torch.ones(4), torch.ones(4), Wrapper()
        device.homes |= {tensor.data_ptr(): 7, given.data_ptr(): home}
        unwaited.wrapped(wrapper, tensor, sys._getframe())
        (result,) = unwaited._results.values()
        result.lane, result.stream = unwaited._lane(0), 7
        if known:
            unwaited.launched(tensor, "all_gather", [given], sys._getframe(), orders=orders)
        return result.lane, tensor.data_ptr(), given

    lane, _, _ = drop(known=False)
    assert not lane.entries  # a wait could give what it reads back too early, so it stays torch's
    lane, _, _ = drop(orders=False)
    assert not lane.entries  # a wait would block the host
    lane, pointer, given = drop()
    device.stream = 3
    device.captured = 5
    unwaited.sweep(lane)
    assert waits == []
    device.captured = 0
    unwaited.sweep(lane)
    assert waits == [(7, pointer)]
    assert not lane.entries
    assert trail.count == trails
    assert [[one.data_ptr() for one in entry.storages] for lane in busy for entry in lane.entries] == [
        [given.data_ptr()]
    ] * trails
    device.stream = 7
    lane, _, _ = drop()
    unwaited.wait_for = lambda tensor: 1 / 0
    unwaited.sweep(lane)
    ((result, error),) = failed  # its memory is for the quarantine
    assert len(result.storages) == 2
    assert isinstance(error, ZeroDivisionError)


MIB = 1 << 20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def drops_many(_):
    logging.getLogger("safecomm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    big, half, small = torch.ones(MIB), torch.ones(MIB), torch.ones(4)
    with safecomm.patched():
        stock.all_reduce(small)
        assert KINDS["all_reduce"](big)[0] == gather(half)[0] * stock.get_world_size()
        before = resident()
        for _ in range(20):
            KINDS["all_reduce"](big)
            gather(half)
            stock.all_reduce(small)
        assert safecomm.drain(wait=True) == 0
        assert _torch.unwaited() == 0
        ctypes.CDLL(None).malloc_trim(0)  # the C library keeps what was freed
        more = resident() - before
        assert more <= 64 * MIB, more  # of 240 MiB
    stock.destroy_process_group()


def test_forty_dropped_collectives_leave_nothing():
    for ended in launch(2, drops_many, limit=60):
        ended.check()


@on(2)
def test_the_group_of_a_functional_collective_is_known_in_each_form():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1))
    streamed = backends.waits_order_streams
    asked = []
    backends.waits_order_streams = lambda group: asked.append(group) or True
    try:
        assert all(map(_orders, (world(), (mesh, 0), (mesh, 1))))
        assert not any(map(_orders, ([0, 1], "0", mesh)))
    finally:
        backends.waits_order_streams = streamed
    assert asked == [world(), mesh.get_group(0), mesh.get_group(1)]
    assert not streamed(world())  # gloo
