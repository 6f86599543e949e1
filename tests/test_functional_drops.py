"""Functional collectives that were dropped: under patch() a later call waits, once nobody can miss the wait (S3)."""

import contextlib
import ctypes
import gc
import random
import sys
import tempfile
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as funcol
from ranks import launch, on, signal_to_peers, until, wait_for_signal
from torch.multiprocessing.reductions import StorageWeakRef
from watching import Sees

import safecomm
from safecomm import _torch
from safecomm.core.ledger import LEDGER
from safecomm.core.refcounts import COUNTED
from safecomm.patching import patch as patching
from safecomm.patching.functional import Result

pytestmark = pytest.mark.skipif(
    _torch.functional_collectives() is None or not COUNTED, reason="no hook of this torch tells the works"
)


def world():
    return stock.group.WORLD


KINDS = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", world()),
    "broadcast": lambda x: funcol.broadcast(x, 0, world()),
    "all_gather": lambda x: funcol.all_gather_single(x, 0, world()),
    "all_to_all": lambda x: funcol.all_to_all_single(x, None, None, world()),
}


def launched(x=None):
    return KINDS["all_reduce"](torch.ones(8) if x is None else x)


def comes_back():
    """Poll, as each call of a program does, until nothing is kept for functional collectives."""
    until(lambda: safecomm.drain() == 0 and _torch.unwaited() == 0)


def noted():
    return list(patching._state.functional.unwaited.values())


def results():
    return [entry for entry in [*LEDGER.holds(), *LEDGER.quarantine] if isinstance(entry, Result)]


@on(1)
def test_what_is_dropped_comes_back_at_a_later_call_s3():
    with safecomm.patched():
        for kind in KINDS.values():
            for _ in range(3):
                storage = StorageWeakRef(kind(torch.ones(8)).elem.untyped_storage())
            assert results(), kind
            comes_back()
            assert storage.expired()
            assert not noted()


@on(1)
def test_each_call_looks_functional_ones_too_s3():
    with safecomm.patched():
        for call in (lambda: stock.all_reduce(torch.ones(1)), lambda: launched().wait()):
            for _ in range(4):
                launched()
            stock.barrier()
            until(lambda: (call(), _torch.unwaited())[1] == 0)  # noqa: B023


@on(2)
def test_every_form_of_a_group_is_known():
    mesh = stock.device_mesh.init_device_mesh("cpu", (2, 1))
    line = stock.device_mesh.init_device_mesh("cpu", (2,))
    with safecomm.patched():
        for group in (world(), world().group_name, (mesh, 0), line):
            funcol.all_reduce(torch.ones(8), "sum", group)
            assert results()
            comes_back()


@on(2)
def test_one_that_runs_is_left_alone_and_named():
    """A wait for it would block the host, and take the wait of somebody who has the tensor (S3)."""
    with safecomm.patched():
        if stock.get_rank() == 0:
            kept = launched().elem
            launched()
            for number in range(3):
                assert safecomm.drain() == 64
                stock.send(torch.full((1,), float(number)), 1)
            assert _torch.unwaited() == 2
            held = safecomm.pending()
            assert {(one.op, one.nbytes, one.device) for one in held} == {("all_reduce", 32, "cpu")}
            assert "test_functional_drops.py" in held[0].site
            with pytest.raises(safecomm.PendingWorkError, match="all_reduce"):
                safecomm.drain(wait=True, timeout=timedelta(milliseconds=20))
            signal_to_peers("go on")
            assert funcol.wait_tensor(kept).tolist() == [2] * 8
        else:
            for _ in range(3):
                stock.recv(torch.empty(1), 0)
            wait_for_signal("go on")
            launched()
            launched()
        safecomm.drain(wait=True)
        assert _torch.unwaited() == 0
        assert not results()


@on(2)
@pytest.mark.parametrize("seed", range(6))
def test_results_come_back_whatever_is_dropped_and_destroyed_in_what_order(seed):
    """Results of several groups are dropped, waited for or kept, before their group is destroyed or after it (S4)."""
    dice = random.Random(seed)
    with safecomm.patched():
        for _ in range(8):
            group = stock.new_group([0, 1])
            found = [funcol.all_reduce(torch.ones(8), "sum", group) for _ in range(dice.randrange(1, 4))]
            stock.barrier()
            destroyed = False
            while found or not destroyed:
                what = dice.choice(["drop", "wait", "destroy", "drain"])
                if what == "destroy" and not destroyed:
                    stock.destroy_process_group(group)
                    destroyed = True
                elif what == "drain":
                    safecomm.drain()
                elif found:
                    one = found.pop(dice.randrange(len(found)))
                    if what == "wait":
                        assert funcol.wait_tensor(one).tolist() == [2] * 8
                    del one
            comes_back()


@on(2)
def test_a_recording_that_begins_leaves_those_that_run_as_they_are():
    with safecomm.patched(), tempfile.TemporaryDirectory() as folder:
        if stock.get_rank() == 0:
            launched()
            assert len(results()) == 1
            with safecomm.record_memory(f"{folder}/run.jsonl"):
                signal_to_peers("recorded")
                comes_back()
        else:
            wait_for_signal("recorded")
            launched()
            comes_back()


@on(1)
def test_what_is_waited_for_is_freed_at_once_s2():
    with safecomm.patched():
        for use in (
            lambda one: one + 0, lambda one: one.wait().clone(), lambda one: funcol.wait_tensor(one.elem).clone(),
            lambda one: one.view(2, -1)[1:] * 1, lambda one: one.clone().numpy(),
        ):  # fmt: skip
            one = launched(torch.arange(8.0))
            storage = StorageWeakRef(one.elem.untyped_storage())
            got = use(one)
            assert float(got.reshape(-1)[-1]) == 7
            del one
            until(storage.expired)  # gloo's thread may still be leaving
            assert not results()
            assert not noted()


def saved(tensor):
    return torch.ones(tensor.shape, requires_grad=True) * tensor


def in_a_future(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def generator(tensor):
    yield None
    yield tensor


def begun(tensor):
    there = generator(tensor)
    next(there)
    return there


HOLDERS = {
    "a wrapper of the program's": lambda one: funcol.AsyncCollectiveTensor(one.elem),
    "a view of the wrapper": lambda one: one.detach()[2:],
    "the tensor": lambda one: one.elem,
    "a view": lambda one: one.elem.view(2, -1)[1],
    "a slice that is detached": lambda one: one.elem[2:].detach(),
    "data": lambda one: one.elem.data,
    "what autograd saved": lambda one: saved(one.elem),
    "a storage": lambda one: one.elem.untyped_storage(),
    "a future": lambda one: in_a_future(one.elem),
    "an array": lambda one: one.elem.numpy(),
    "a capsule": lambda one: torch.utils.dlpack.to_dlpack(one.elem),
    "a generator": lambda one: begun(one.elem),
    "a closure": lambda one: (lambda elem: lambda: elem)(one.elem),
    "a cycle": lambda one: (lambda cell: cell.append(cell) or cell)([one.elem]),
    "parameter": lambda one: torch.nn.Parameter(one.elem, requires_grad=False),
    "memoryview": lambda one: memoryview(one.elem.numpy()),
}


@on(1)
def test_whoever_has_it_keeps_the_wait():
    with safecomm.patched():
        for name, take in HOLDERS.items():
            for kind in (KINDS["all_reduce"], KINDS["all_gather"]):
                kept = take(kind(torch.ones(8)))
                safecomm.drain(wait=True)  # until it is complete, and no longer
                assert _torch.unwaited() == 1, name
                del kept
                if name == "a cycle":
                    gc.collect()
                comes_back()
                assert not results()
                assert not noted()


@on(2)
def test_a_later_work_of_the_same_storage_is_not_waited_for():
    """It was launched on what was taken out of the wrapper. A wait for the first would take the second's too."""
    if stock.get_rank() == 0:
        with safecomm.patched():
            kept = launched().elem
            torch.ops._c10d_functional.all_reduce_(kept, "sum", world().group_name)
            until(lambda: safecomm.drain() == 0)  # the first is complete; a wait would block
            assert _torch.unwaited() == 2
            signal_to_peers("second")
            assert funcol.wait_tensor(kept).tolist() == [4] * 8
            del kept
            comes_back()
    else:
        launched().wait()
        wait_for_signal("second")
        funcol.all_reduce(torch.full((8,), 2.0), "sum", world()).wait()


@on(1)
def test_what_a_hook_a_mode_or_a_function_mode_may_have_kept_is_torchs():
    kept = []

    class Keeps(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kept.append(function(*args, **(kwargs or {})))
            return kept[-1]

    with safecomm.patched():
        world().register_pre_hook(7, lambda call: kept.extend(call.input_tensors))
        made = [launched()]
        world().unregister_pre_hook(7)
        for mode in (Sees(), Keeps()):
            with mode:
                made.append(launched())
        assert not noted()
        assert len(kept) >= 2
        assert [one.tolist() for one in made] == [[1] * 8] * 3


@on(1)
def test_a_work_that_failed_keeps_its_error_for_whoever_waits():
    class Failed:
        def is_completed(self):
            return True

        def wait(self):
            raise RuntimeError("a peer has gone")

    with safecomm.patched():
        kept = launched()
        (result,) = noted()
        result.works = (Failed(),)
        elem = kept.elem
        del kept
        safecomm.drain()
        assert not results()
        assert not noted()
        assert _torch.unwaited() == 1
        assert funcol.wait_tensor(elem).tolist() == [1] * 8


@on(1)
def test_the_end_of_a_wrapper_only_queues_wherever_it_comes_s4():
    with safecomm.patched():
        cycle, box = [launched()], [launched()]
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
def test_a_call_in_another_thread_is_told_from_this_ones():
    """Each thread has a hook on the group; the works of others are not taken for its own."""
    with safecomm.patched():
        groups = [stock.new_group([0, 1]) for _ in range(2)]

        def many(group):
            for _ in range(50):
                assert float(funcol.all_reduce(torch.ones(2), "sum", group).sum()) == 4
                funcol.all_reduce(torch.ones(2), "sum", group)

        threads = [threading.Thread(target=many, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comes_back()
        assert not patching._state.functional._open


def same_group(_):
    """Several threads make functional and other calls of one group at once."""
    safecomm.patch()
    sys.setswitchinterval(1e-5)
    failed = []

    def many(call):
        try:
            for _ in range(1000):
                assert float(call().sum()) == 8
                launched()
        except BaseException as error:
            failed.append(error)

    def other():
        tensor = torch.ones(8)
        stock.all_reduce(tensor)
        return tensor

    threads = [threading.Thread(target=many, args=(call,)) for call in (launched, launched, other, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    comes_back()
    assert not noted()
    assert not patching._state.functional._open
    stock.destroy_process_group()


def test_threads_that_share_a_group_do_not_take_hooks_from_under_each_other():
    """Torch goes through a group's hooks without a lock."""
    for ended in launch(1, same_group, limit=90):
        ended.check()


@on(1)
def test_a_hook_that_stays_keeps_nothing_and_goes_with_the_patch():
    with safecomm.patched():
        launched().wait()
        functional = patching._state.functional
        tap = functional._taps[id(world())][1]
        assert tap.func.__self__.maxlen == 0
        storage = StorageWeakRef((tensor := torch.ones(8)).untyped_storage())
        stock.all_reduce(tensor)
        del tensor
        until(storage.expired)
    assert not functional._taps
    stale = weakref.ref(tap)
    del tap
    assert stale() is None  # C++ has it no more


@on(1)
def test_modes_and_inference_mode_do_not_see_the_wait():
    from torch._subclasses import FakeTensorMode

    with safecomm.patched():
        for around in (FakeTensorMode(), torch.inference_mode(), torch.no_grad(), Sees()):
            launched()
            with around:
                comes_back()
        with torch.inference_mode():
            launched()
            assert results()
        comes_back()


@on(1)
def test_unpatch_puts_torchs_own_back_and_finishes_what_was_dropped():
    def there():
        return [
            {name: id(value) for name, value in vars(one).items()} for one in (funcol, funcol.AsyncCollectiveTensor)
        ]

    before = there()
    taken = {"as": funcol.all_reduce}
    with safecomm.patched():
        assert taken["as"] is funcol.all_reduce
        changed = {name for name, one in before[0].items() if there()[0][name] != one}
        assert changed >= {"all_reduce", "all_gather_single", "wait_tensor"}
        assert there()[1] == before[1]
        kept = launched()
        launched()
    assert there() == before
    assert id(taken["as"]) == before[0]["all_reduce"]
    until(lambda: safecomm.drain() == 0)
    assert kept.tolist() == [1] * 8
    assert _torch.unwaited() == 0


@on(1)
def test_compiled_collectives_are_torchs_s9():
    def step(x):
        return funcol.wait_tensor(funcol.all_reduce(x * 2, "sum", world())) + 1

    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    found = []
    for around in (contextlib.nullcontext(), safecomm.patched()):
        torch._dynamo.reset()
        with around:
            found.append(torch.compile(step, backend=backend, fullgraph=True)(torch.ones(4)).tolist())
            assert not results()
    torch._dynamo.reset()
    assert found == [[3] * 4] * 2
    assert graphs[0] == graphs[1]


def distributed_tensors(*, drop):
    """Return what a few programs of DTensor give."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b = torch.randn(4, 6), torch.randn(6, 4)
    sharded = distribute_tensor(a, mesh, [Shard(0)])
    columns = sharded.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(b, mesh, [Shard(0)])  # partial sums
    found = [sharded.full_tensor(), columns.to_local(), product.full_tensor()]
    found.append((product.redistribute(mesh, [Replicate()], async_op=True) * 2).to_local())
    weight = distribute_tensor(b.clone(), mesh, [Shard(1)]).requires_grad_()
    (distribute_tensor(a, mesh, [Replicate()]) @ weight).redistribute(mesh, [Replicate()]).square().sum().backward()
    found.append(weight.grad.full_tensor())
    if drop:
        for _ in range(3):
            product.redistribute(mesh, [Replicate()], async_op=True)
            sharded.redistribute(mesh, [Replicate()], async_op=True).to_local()
    found.append(product.redistribute(mesh, [Replicate()], async_op=True).to_local() + 0)
    return [one.detach().clone() for one in found]


@on(2)
def test_distributed_tensors_are_those_without_the_patch():
    expected = distributed_tensors(drop=False)
    with safecomm.patched():
        for _ in range(2):
            got = distributed_tensors(drop=True)
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        comes_back()


@on(2)
def test_gradients_are_those_without_the_patch():
    def gradient():
        leaf = (torch.arange(4.0) + stock.get_rank()).requires_grad_()
        (funcol.all_gather_single_autograd(leaf, 0, world()) * torch.arange(8.0)).sum().backward()
        return leaf.grad.tolist()

    expected = gradient()
    with safecomm.patched():
        assert gradient() == expected
        assert not noted()


MIB = 1 << 20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@on(2)
def test_forty_dropped_collectives_leave_nothing():
    big, half = torch.ones(4 * MIB), torch.ones(2 * MIB)
    small = torch.ones(4)
    with safecomm.patched():
        stock.all_reduce(small)
        used = [launched(big)[0], KINDS["all_gather"](half)[0] * stock.get_world_size()]
        assert used[0] == used[1]
        comes_back()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident()
        for _ in range(20):
            launched(big)
            KINDS["all_gather"](half)
            stock.barrier()
        assert safecomm.drain(wait=True) == 0
        assert _torch.unwaited() == 0
        ctypes.CDLL(None).malloc_trim(0)  # the C library keeps what was freed
        more = resident() - before
        assert more <= 64 * MIB, more  # of 640 MiB


def ends(_):
    safecomm.patch()
    kept, dropped = launched(), launched()
    del dropped
    stock.destroy_process_group()
    assert safecomm.drain() == 0
    del kept
    assert safecomm.drain() == 0
    assert not results()
    stock.init_process_group("gloo", store=stock.HashStore(), rank=0, world_size=1)
    launched()
    assert noted()  # and the interpreter ends


def test_nothing_is_done_after_the_group_or_at_exit_s7():
    for ended in launch(1, ends, limit=60):
        ended.check()
