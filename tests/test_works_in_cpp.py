"""Works that go to torch's C++ while the patch is on: DDP's Join, the registry of works, groups of Python."""

import contextlib
import gc
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
from ranks import on
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

import safecomm
from safecomm._torch.versions import HERE
from safecomm.core.work import Work
from safecomm.patching.works import for_cpp

GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"


class DDP(nn.parallel.DistributedDataParallel):
    """DDP that does not ask Dynamo for what only compiled models need: its import takes minutes on a busy machine."""

    def __init__(self, size, group):
        model = nn.Sequential(nn.Linear(3, size), nn.Linear(size, 1))
        with mock.patch.dict(vars(torch), {} if "_dynamo" in vars(torch) else {"_dynamo": mock.MagicMock()}):
            super().__init__(model, process_group=group)

    def _inside_ddp_forward(self):
        return contextlib.nullcontext()


def learn(model, given):
    """Make one step. torch.optim would import Dynamo."""
    model.zero_grad()
    model(given).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def trained(world, size=2, inputs=None, group=None, more=None):
    """Return the parameters that a DDP model has after steps whose number differs between ranks."""
    rank = stock.get_rank()
    torch.manual_seed(7)
    model = DDP(size, group)
    steps = 2 + rank if inputs is None else inputs
    with Join([model], **(more or {})):
        for step in range(steps):
            learn(model, torch.full((2, 3), float(rank + step + 1)))
    return [parameter.detach().clone() for parameter in model.parameters()]


def alike(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@on(2, 3)
def test_uneven_inputs_train_as_without_the_patch():
    expected = trained(stock.get_world_size())
    with safecomm.patched():
        assert alike(trained(stock.get_world_size()), expected)
    assert alike(trained(stock.get_world_size()), expected)


@on(2, 3)
def test_uneven_inputs_divided_by_those_that_are_left_train_as_without_the_patch():
    """DDP's reducer reads how many are left out of the future of the work."""
    world = stock.get_world_size()
    expected = trained(world, more={"divide_by_initial_world_size": False})
    assert not alike(trained(world), expected)
    with safecomm.patched():
        assert alike(trained(world, more={"divide_by_initial_world_size": False}), expected)
    safecomm.drain()


@on(2)
def test_the_first_that_runs_out_of_inputs_ends_the_training_of_all():
    with safecomm.patched(), pytest.raises(RuntimeError, match="exhausted"):
        trained(2, more={"throw_on_early_termination": True})
    safecomm.drain(wait=True)


@on(2)
def test_a_join_context_of_ones_own_is_given_a_work():
    class Counter(torch.distributed.algorithms.Joinable):
        def __init__(self):
            super().__init__()
            self.group = stock.group.WORLD

        def join_hook(self, **_):
            return torch.distributed.algorithms.JoinHook()

        join_device = torch.device("cpu")
        join_process_group = property(lambda self: self.group)

    counter, seen = Counter(), []
    with safecomm.patched(), Join([counter]):
        for _ in range(1 + stock.get_rank()):
            work = Join.notify_join_context(counter)
            assert type(work) is not Work
            assert work.wait()
            seen.append(work)
    assert len(seen) == 1 + stock.get_rank()
    safecomm.drain(wait=True)


# --- the registry of works ------------------------------------------------------------------------------------

registered = pytest.mark.skipif(HERE < "2.5", reason="torch has _register_work since 2.5")


@registered
@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "region", "member"])
@on(2)
def test_a_work_that_is_registered_is_waited_for_by_torchs_wait(call):
    rank, output, given = stock.get_rank(), torch.zeros(2), torch.arange(4.0)
    with safecomm.patched():
        if call == "all_reduce":
            output += rank
            work = stock.all_reduce(output, async_op=True)
        elif call == "reduce_scatter":
            # Of which gloo's work copies again when it is waited for again.
            work = getattr(stock, SCATTER)(output, given, async_op=True)
        else:
            output += rank
            with stock._coalescing_manager(async_ops=True) as region:
                stock.all_reduce(given)
                if call == "region":
                    stock.all_reduce(output)
                else:  # c10d runs it at once
                    work = stock.broadcast(output, 1, async_op=True)
            if call == "region":
                (work,) = region.works
            del region
        torch._C._distributed_c10d._register_work(output, work)
        del work
        gc.collect()
        assert functional.wait_tensor(output) is output
        expected = {"reduce_scatter": [[0.0, 2.0], [4.0, 6.0]][rank]}.get(call, [1.0, 1.0])
        assert output.tolist() == expected
        output.fill_(9.0)
        safecomm.drain(wait=True)
    assert output.tolist() == [9.0, 9.0], "the work was waited for again, which copied its result again"
    assert safecomm.pending() == []


@registered
@on(1)
def test_a_registered_work_needs_no_safecomm_and_a_name_taken_before_is_replaced():
    register = torch._C._distributed_c10d._register_work
    kept = [register]
    with safecomm.patched():
        tensor = torch.ones(2)
        kept[0](tensor=tensor, work=stock.all_reduce(tensor, async_op=True))
        kept[0](torch.ones(1), safecomm.original("all_reduce")(tensor, async_op=True))
        functional.wait_tensor(tensor)
    assert kept[0] is torch._C._distributed_c10d._register_work is register
    safecomm.drain(wait=True)


# --- groups of Python -----------------------------------------------------------------------------------------


class Forwarding(stock.ProcessGroup):
    """A group whose collectives are another group's, as fault-tolerant ones are."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.called = []

    def getBackendName(self):
        return "forwarding"

    def size(self):
        return self.inner.size()

    def rank(self):
        return self.inner.rank()

    def allreduce(self, tensors, opts=None):
        self.called.append("allreduce")
        op = stock.ReduceOp.SUM if opts is None else opts.reduceOp
        (tensor,) = tensors
        return stock.all_reduce(tensor, op, group=self.inner, async_op=True)

    def broadcast(self, tensors, opts=None):
        self.called.append("broadcast")
        (tensor,) = tensors
        return stock.broadcast(tensor, 0 if opts is None else opts.rootRank, group=self.inner, async_op=True)

    def allgather(self, outputs, inputs, opts=None):
        self.called.append("allgather")
        return stock.all_gather(outputs[0], inputs[0], group=self.inner, async_op=True)

    def _gather(self, output, given, opts=None):
        self.called.append("gather")
        return getattr(stock, GATHER)(output, given, group=self.inner, async_op=True)

    def _scatter(self, output, given, opts=None):
        self.called.append("scatter")
        return getattr(stock, SCATTER)(output, given, group=self.inner, async_op=True)

    all_gather_single = _allgather_base = _gather
    reduce_scatter_single = _reduce_scatter_base = _scatter

    def all_gather_single_coalesced(self, outputs, given, opts=None):
        return self._gather(outputs[0], given[0])

    def reduce_scatter_single_coalesced(self, outputs, given, opts=None):
        return self._scatter(outputs[0], given[0])

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts=None):
        self.called.append("barrier")
        return stock.all_reduce(torch.ones(1), group=self.inner, async_op=True)


class Failing(Forwarding):
    """Raises, and inherits the rest."""

    def allreduce(self, tensors, opts=None):
        raise ValueError("of the program")


holds_python = pytest.mark.skipif(
    HERE < "2.7", reason="before, C++ keeps no reference to a group's work of Python, whoever made it (pytorch #146376)"
)


def steps(group):
    rank = stock.get_rank()
    torch.manual_seed(3)
    model = DDP(4, group)
    for step in range(3):
        learn(model, torch.full((2, 3), float(rank + step + 1)))
    return [parameter.detach().clone() for parameter in model.parameters()]


@on(2, 3)
def test_ddp_over_a_group_that_forwards_trains_as_over_the_other():
    inner = stock.group.WORLD
    expected = steps(inner)
    with safecomm.patched():
        group = Forwarding(inner)
        assert alike(steps(group), expected)
        assert "allreduce" in group.called

        class Later(Forwarding):
            def allreduce(self, tensors, opts=None):
                self.called.append("later")
                return stock.all_reduce(tensors[0], group=self.inner, async_op=True)

        group = Later(inner)
        assert alike(steps(group), expected)
        assert "later" in group.called
    assert type(group.allreduce([torch.ones(1)])) is not Work
    safecomm.drain(wait=True)
    assert alike(steps(Forwarding(inner)), expected)


@on(2)
def test_a_join_context_over_a_group_that_forwards():
    expected = trained(2)
    group = Forwarding(stock.group.WORLD)
    with safecomm.patched(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(c10d._world.pg_group_ranks, group, {0: 0, 1: 1})
        assert alike(trained(2, group=group), expected)
    assert "allreduce" in group.called
    safecomm.drain(wait=True)


@on(2)
def test_what_a_group_of_python_raises_is_raised():
    with safecomm.patched(), pytest.raises(ValueError, match="of the program"):
        Failing(stock.group.WORLD).allreduce([torch.ones(1)])


@holds_python
@on(2)
def test_functional_calls_by_the_name_of_a_group_that_forwards():
    rank = stock.get_rank()
    with safecomm.patched():
        group = Forwarding(stock.group.WORLD)
        name = "forwarding-group"
        c10d._register_process_group(name, group)
        try:
            summed = torch.ops._c10d_functional.all_reduce(torch.full((2,), float(rank)), "sum", name)
            assert torch.ops._c10d_functional.wait_tensor(summed).tolist() == [1.0, 1.0]
            whole = torch.ops._c10d_functional.all_gather_into_tensor(torch.full((1,), float(rank)), 2, name)
            assert torch.ops._c10d_functional.wait_tensor(whole).tolist() == [0.0, 1.0]
            # gloo's work of this copies again at each wait.
            part = torch.ops._c10d_functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 2, name)
            assert torch.ops._c10d_functional.wait_tensor(part).tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
            part.fill_(9.0)
            assert safecomm.drain(wait=True) == 0
            assert part.tolist() == [9.0, 9.0]
        finally:
            c10d._unregister_process_group(name)
        assert group.called == ["allreduce", "gather", "scatter"]


@on(1)
def test_the_methods_are_the_programs_again():
    before = {name: vars(Forwarding)[name] for name in ("allreduce", "barrier")}
    notify = Join.notify_join_context
    with safecomm.patched():
        assert Forwarding.allreduce.__wrapped__ is not None
        assert Join.notify_join_context.__wrapped__ is not None
    assert not hasattr(Forwarding.allreduce, "__wrapped__")
    assert {name: vars(Forwarding)[name] for name in before} == before
    assert Join.notify_join_context is notify
    assert "__init_subclass__" not in vars(stock.ProcessGroup)


@on(1)
def test_a_class_that_is_made_after_the_patch_has_its_own_methods():
    """Also where other code has put something over what sees such classes, which goes on to ours."""
    with safecomm.patched():
        ours = stock.ProcessGroup.__init_subclass__.__func__
        stock.ProcessGroup.__init_subclass__ = classmethod(lambda kind, **given: ours(kind, **given))
    try:

        class Later(stock.ProcessGroup):
            def allreduce(self, *_):
                """Reduce nothing."""

        assert not hasattr(Later.allreduce, "__wrapped__")
    finally:
        del stock.ProcessGroup.__init_subclass__


@on(2)
def test_what_is_no_work_of_ours_stays_and_a_work_stays_held():
    assert for_cpp(3) == 3
    tensor = torch.ones(8)
    work = safecomm.all_reduce(tensor, async_op=True)
    theirs = for_cpp(work)
    assert theirs is work.inner
    assert for_cpp(theirs) is theirs
    if not work.is_completed():
        assert [entry.nbytes for entry in safecomm.pending()] == [32]
    del work
    assert theirs.wait()
    safecomm.drain(wait=True)
    assert tensor.tolist() == [2.0] * 8


@on(1)
def test_a_wait_of_cpp_without_a_limit_has_none():
    """C++ says 0, and a wait that another thread is in is waited for."""

    class Lock:
        def acquire(self, timeout):
            asked.append(timeout)
            return True

        def release(self):
            asked.append("released")

    asked, output = [], torch.zeros(2)
    work = getattr(safecomm, SCATTER)(output, torch.ones(2), async_op=True)
    work.turn = Lock()
    assert for_cpp(work).wait(timedelta())
    assert asked == [-1, "released"]
    assert output.tolist() == [1.0, 1.0]
    assert safecomm.pending() == []
