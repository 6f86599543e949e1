"""bucketed(): the same results as one by one, in the same order, whatever comes in between."""

import contextlib
import gc
import itertools
import random
import sys
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from ranks import on, until
from watching import cpu_profile

import safecomm
from safecomm import functional
from safecomm.collectives import bucketed, gates
from safecomm.collectives.bucketed import Buckets
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import BUCKETS, at_once

GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"
MIB = 1 << 20
KINDS = ["gather", "scatter", "broadcast", "asynchronous", "strided", "leaf", "max"]


def deferred():
    """Return how many calls of the default group are deferred just now."""
    buckets = BUCKETS.get(stock.group.WORLD)
    return 0 if buckets is None else buckets.waiting()


def _nothing_is_left():
    assert not BUCKETS
    assert not c10d._world.pg_coalesce_state
    tensor = torch.ones(2)
    safecomm.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]


class Launches:
    """Counts the collectives that c10d is asked for."""

    def __enter__(self):
        from safecomm.collectives.holding import counted

        self._counted, self._before = counted, counted()
        return self

    def __exit__(self, *_):
        after = self._counted()
        self.calls = {name: count - self._before.get(name, 0) for name, count in after.items()}


# --- programs ---------------------------------------------------------------------------------------------------


def program(dice, library, whole):
    """Call what the dice say on parts of ``whole``, which may overlap, and yield what callers get on the spot."""
    for _ in range(dice.randrange(1, 12)):
        kind = dice.choice(
            ["reduce"] * 5 + ["gather", "scatter", "broadcast", "asynchronous", "strided", "leaf", "max"]
        )
        start, size = dice.randrange(0, 64), dice.randrange(0, 32)
        part = whole[start : start + size]
        other = whole[96 + start : 96 + start + 2 * size]
        if kind == "reduce":
            library.all_reduce(part)
        elif kind == "max":
            library.all_reduce(part, op=stock.ReduceOp.MAX)
        elif kind == "gather":
            getattr(library, GATHER)(other, part)
        elif kind == "scatter":
            getattr(library, SCATTER)(part, other)
        elif kind == "broadcast":
            library.broadcast(part, dice.randrange(2))
            yield part.clone()
        elif kind == "asynchronous":
            library.all_reduce(part, async_op=True).wait()
            yield part.clone()
        elif kind == "strided":
            library.reduce(whole[start : start + size * 2].view(-1, 2)[:, 0].contiguous(), 0)
        elif whole.is_floating_point():
            with torch.no_grad():
                library.all_reduce(part.detach().requires_grad_())


@on(2)
@pytest.mark.parametrize("seed", range(6))
def test_s8_programs_give_what_they_give_one_by_one(seed):
    for number in range(120):
        outcomes = []
        for library in (stock, safecomm):
            dice = random.Random(f"{seed} {number}")
            dtype = dice.choice([torch.float32, torch.int64, torch.bfloat16])
            whole = (torch.arange(256) % 3 + stock.get_rank()).to(dtype)
            size = dice.choice([32, 1e-4, 1e-5])
            with safecomm.bucketed(size) if library is safecomm else contextlib.nullcontext():
                seen = list(program(dice, library, whole))
            outcomes.append([*seen, whole])
        for one, other in zip(*outcomes, strict=True):
            assert torch.equal(one, other), (seed, number)
    _nothing_is_left()


# --- what is deferred ---------------------------------------------------------------------------------------------


@on(2)
def test_many_calls_become_few():
    tensors = [torch.full((size,), 1.0) for size in range(1, 101)]
    safecomm.all_reduce(tensors[0])
    with safecomm.bucketed(), Launches() as launched:
        for tensor in tensors[1:]:
            safecomm.all_reduce(tensor)
        assert deferred() == 99
        assert tensors[5][0] == 1
    assert deferred() == 0
    assert launched.calls.get("all_reduce", 0) <= 1
    assert all((tensor == 2).all() for tensor in tensors)


@on(2)
def test_a_bucket_holds_what_was_asked_for():
    tensors = [torch.ones(1024) for _ in range(20)]
    safecomm.all_reduce(tensors[0])
    block = safecomm.bucketed(4 * 4096 / MIB)
    block.__enter__()
    for tensor in tensors:
        safecomm.all_reduce(tensor)
    with Launches() as launched:
        block.__exit__(None, None, None)
    assert launched.calls["all_reduce"] == 5


@on(2)
def test_other_calls_run_at_once_and_after_what_was_put_off():
    for name, other in {
        "broadcast": lambda t: safecomm.broadcast(t, 0),
        "asynchronous": lambda t: safecomm.all_reduce(t * 0, async_op=True).wait(),
        "list": lambda t: safecomm.all_gather([torch.empty_like(t) for _ in range(2)], t),
        "barrier": lambda t: safecomm.barrier(),
        "object": lambda t: safecomm.all_gather_object([None, None], 1),
        "batch": lambda t: [
            work.wait()
            for work in safecomm.batch_isend_irecv(
                [
                    safecomm.P2POp(safecomm.isend, t, 1 - stock.get_rank()),
                    safecomm.P2POp(safecomm.irecv, torch.empty_like(t), 1 - stock.get_rank()),
                ]
            )
        ],
        "functional": lambda t: functional.all_reduce(t),
        "functional, dim 1": lambda t: functional.all_gather(t.view(2, -1), dim=1),
        "manager": lambda t: _managed(t.clone()),
    }.items():
        tensor = torch.ones(4)
        with safecomm.bucketed():
            safecomm.all_reduce(tensor)
            assert deferred() == 1, name
            other(tensor)
            if name not in ("object",):  # of torch, which safecomm does not see
                assert tensor.tolist() == [2] * 4, name
            safecomm.all_reduce(tensor)
            assert deferred() >= 1, name
        assert tensor.tolist() == [4] * 4, name


@on(2)
def test_a_region_that_was_made_outside_is_beside_the_buckets_too():
    tensor, other = torch.ones(2), torch.ones(2)
    region = safecomm._coalescing_manager()

    @safecomm._coalescing_manager()
    def step():
        assert other.tolist() == [2] * 2, "what was deferred has run before"
        safecomm.all_reduce(tensor)

    with safecomm.bucketed():
        safecomm.all_reduce(other)
        with region:
            assert other.tolist() == [2] * 2
            safecomm.all_reduce(tensor)
        for _ in range(2):
            step()
            assert deferred() == 0
        assert tensor.tolist() == [8] * 2
        safecomm.all_reduce(other)
        assert deferred() == 1
    assert other.tolist() == [4] * 2


def _managed(tensor):
    with safecomm._coalescing_manager(async_ops=True) as manager:
        safecomm.all_reduce(tensor)
    manager.wait()
    assert tensor.tolist() == [2] * 4


@on(2)
def test_results_of_functional_are_there_when_it_returns():
    with safecomm.bucketed():
        assert functional.all_reduce(torch.ones(2)).tolist() == [2, 2]
        assert functional.all_gather(torch.ones(2)).tolist() == [1] * 4
        assert functional.reduce_scatter(torch.ones(4)).tolist() == [2, 2]
        assert deferred() == 0


@on(2)
def test_two_calls_on_one_tensor_both_count():
    tensor, alias = torch.ones(8), None
    alias = tensor[2:6]
    with safecomm.bucketed():
        safecomm.all_reduce(tensor)
        safecomm.all_reduce(alias)
        safecomm.all_reduce(tensor)
    assert tensor.tolist() == [4, 4, 8, 8, 8, 8, 4, 4]


@on(2)
def test_another_group_is_not_touched():
    group = stock.new_group()
    tensor, other = torch.ones(2), torch.ones(2)
    with safecomm.bucketed(group=group):
        safecomm.all_reduce(tensor)
        safecomm.all_reduce(other, group=group)
        assert tensor.tolist() == [2, 2]
        assert other.tolist() == [1, 1]
        with safecomm.bucketed():
            safecomm.all_reduce(tensor)
        assert tensor.tolist() == [4, 4]
    assert other.tolist() == [2, 2]
    safecomm.destroy_process_group(group)


@on(2)
def test_a_rank_outside_of_the_group_calls_nothing():
    group = stock.new_group([0])
    tensor = torch.ones(2)
    if stock.get_rank() == 1:  # torch says that it does nothing, as without buckets
        with safecomm.bucketed(group=group), pytest.warns(UserWarning, match="does not belong"):
            safecomm.all_reduce(tensor, group=group)
    assert tensor.tolist() == [1, 1]


# --- errors -------------------------------------------------------------------------------------------------------


@on(2)
def test_bad_input_is_refused_before_anything_is_put_off():
    for size in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="larger than 0"):
            safecomm.bucketed(size)
    with safecomm.bucketed(), pytest.raises(ValueError, match="already collecting"), safecomm.bucketed():
        pass
    with stock._coalescing_manager(), pytest.raises(ValueError, match="already collecting"), safecomm.bucketed():
        safecomm.all_reduce(torch.ones(1))
    _nothing_is_left()


def _fail_inside(tensor):
    with safecomm.bucketed():
        safecomm.all_reduce(tensor)
        raise KeyError("mine")


@on(2)
def test_s7_an_exception_goes_on_and_nothing_is_launched_or_held():
    tensor = torch.ones(1000)
    reference = weakref.ref(tensor.untyped_storage())
    with pytest.raises(KeyError, match="mine"):
        _fail_inside(tensor)
    assert tensor[0] == 1
    del tensor
    gc.collect()
    assert reference() is None
    _nothing_is_left()
    again = torch.ones(2)
    safecomm.all_reduce(again)
    assert again.tolist() == [2, 2]


@on(2)
def test_s2_nothing_is_kept_after_the_end():
    storages = []
    with safecomm.bucketed():
        for _ in range(5):
            tensor = torch.ones(1000)
            storages.append(weakref.ref(tensor.untyped_storage()))
            safecomm.all_reduce(tensor)
        del tensor
    gc.collect()
    assert [storage() for storage in storages] == [None] * 5
    assert safecomm.pending() == []


@on(2)
def test_the_buckets_come_from_the_arena():
    tensors = [torch.ones(1000) for _ in range(5)]
    with safecomm.use_arena("1MiB", device="cpu") as arena:
        with safecomm.bucketed():
            for tensor in tensors:
                safecomm.all_reduce(tensor)
        assert arena.stats().high_water >= 20000
        until(lambda: arena.stats().in_use == 0)  # gloo's thread lets go of it a moment later
    assert all((tensor == 2).all() for tensor in tensors)


# --- what differs between ranks, or goes wrong --------------------------------------------------------------------


def _flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


@on(2)
def test_a_profiler_or_a_mode_on_one_rank_changes_no_bucket():
    contexts = {
        "profiler": cpu_profile,
        "dispatch mode": _flop_counter,
        "device": lambda: torch.device("cpu"),
        "diverted": ROUTES.off,
        "inference": torch.inference_mode,
        "no grad": torch.no_grad,
    }
    for name, context in contexts.items():
        group = stock.new_group()  # on which nothing was called yet
        tensors = [torch.full((size,), 1.0) for size in range(1, 20)]
        with context() if stock.get_rank() == 0 else contextlib.nullcontext(), safecomm.bucketed(group=group):
            for tensor in tensors:
                safecomm.all_reduce(tensor, group=group)
            assert BUCKETS[group].waiting() == 19, name
        assert all((tensor == 2).all() for tensor in tensors), name
        safecomm.destroy_process_group(group)


@on(2)
def test_how_tensors_lie_in_memory_may_differ_between_ranks():
    first = stock.get_rank() == 0
    with torch.inference_mode() if first else contextlib.nullcontext():
        tensors = [torch.ones(3, 4).t() if first else torch.ones(4, 3) for _ in range(5)]
        whole = [torch.zeros(4, 4).t() if first else torch.zeros(4, 4) for _ in range(5)]
        parts = [torch.ones(2, 8)[:, ::2] if first else torch.ones(2, 4) for _ in range(5)]
        rows = [torch.zeros(4, 2)[:, 0] if first else torch.zeros(4) for _ in range(5)]
        inputs = [torch.ones(8, 2)[:, 0] if first else torch.ones(8) for _ in range(5)]
    with safecomm.bucketed():
        for tensor in tensors:
            safecomm.all_reduce(tensor)
        for output, part in zip(whole, parts, strict=True):
            getattr(safecomm, GATHER)(output, part)
        for output, tensor in zip(rows, inputs, strict=True):
            getattr(safecomm, SCATTER)(output, tensor)
    assert all((tensor == 2).all() for tensor in tensors + rows)
    assert all((tensor == 1).all() for tensor in whole)


@on(2)
def test_outputs_that_contain_their_inputs_share_a_bucket():
    rank = stock.get_rank()
    whole = [torch.zeros(8) for _ in range(6)]
    for tensor in whole:
        tensor[4 * rank : 4 * rank + 4] = rank + 1
    with Launches() as launched, safecomm.bucketed():
        for tensor in whole:
            getattr(safecomm, GATHER)(tensor, tensor[4 * rank : 4 * rank + 4])
    assert all(tensor.tolist() == [1] * 4 + [2] * 4 for tensor in whole)
    assert launched.calls[GATHER] == 1


@on(2)
def test_one_tensor_twice_begins_a_new_bucket_and_no_more():
    tensors = [torch.ones(10) for _ in range(30)]
    with Launches() as launched, safecomm.bucketed():
        for tensor in [*tensors, tensors[3]]:
            safecomm.all_reduce(tensor)
    assert tensors[3].tolist() == [4] * 10
    assert tensors[4].tolist() == [2] * 10
    assert launched.calls["all_reduce"] == 2


@on(2)
def test_torchs_own_functions_inside_run_once_and_at_once():
    one, other, late = torch.ones(2), torch.ones(2), torch.ones(2)
    with safecomm.bucketed():
        safecomm.all_reduce(late)
        stock.all_reduce(one)
        assert one.tolist() == [2, 2]
        with stock._coalescing_manager():
            stock.all_reduce(other)
            safecomm.all_reduce(one)
        assert other.tolist() == [2, 2]
        assert one.tolist() == [4, 4]
    assert late.tolist() == [2, 2]
    _nothing_is_left()


@on(2)
def test_a_call_that_outlives_the_block_leaves_nothing_open():
    entered, go = threading.Event(), threading.Event()

    def outlive():
        with at_once(None):
            entered.set()
            go.wait(30)

    with safecomm.bucketed():
        thread = threading.Thread(target=outlive)
        thread.start()
        entered.wait(30)
    go.set()
    thread.join()
    _nothing_is_left()


def _swallow_a_failure():
    with safecomm.use_arena("64KiB", device="cpu", full="raise"), safecomm.bucketed():
        safecomm.all_reduce(torch.ones(20000))
        safecomm.all_reduce(torch.ones(20000))
        with contextlib.suppress(safecomm.ArenaFullError):
            safecomm.barrier()


@on(2)
def test_s7_a_launch_that_failed_and_was_swallowed_is_told_at_the_end():
    with pytest.raises(safecomm.SafecommError, match="not all results"):
        _swallow_a_failure()
    safecomm.barrier()
    _nothing_is_left()


@on(2)
def test_what_is_put_off_runs_outside_of_transforms_and_modes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    one, other, inner = torch.ones(3), torch.ones(4), torch.ones(2)

    def function(tensor):
        safecomm.broadcast(inner, 0)
        assert one.tolist() == [2] * 3
        return (tensor * 2).sum()

    with safecomm.bucketed():
        safecomm.all_reduce(one)
        safecomm.all_reduce(other)
        assert torch.func.grad(function)(torch.ones(4)).tolist() == [2] * 4
        safecomm.all_reduce(one)
        safecomm.all_reduce(other)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            safecomm.broadcast(mode.from_tensor(inner), 0)
    assert one.tolist() == [4] * 3
    assert other.tolist() == [4] * 4


@on(3)
def test_three_ranks():
    tensors = [torch.full((size,), float(stock.get_rank())) for size in range(1, 30)]
    whole, parts = [torch.zeros(6) for _ in range(4)], [torch.full((2,), float(stock.get_rank())) for _ in range(4)]
    with safecomm.bucketed():
        for tensor in tensors:
            safecomm.all_reduce(tensor)
        for output, part in zip(whole, parts, strict=True):
            getattr(safecomm, GATHER)(output, part)
    assert all((tensor == 3).all() for tensor in tensors)
    assert all(tensor.tolist() == [0, 0, 1, 1, 2, 2] for tensor in whole)


@on(2)
def test_results_of_functional_are_there_also_when_calls_were_put_off():
    pending = torch.ones(3)
    leaf = torch.ones(4, requires_grad=True)
    with safecomm.bucketed():
        safecomm.all_reduce(pending)
        assert functional.all_reduce(torch.ones(2)).tolist() == [2, 2]
        assert pending.tolist() == [2] * 3
        safecomm.all_reduce(pending)
        assert functional.all_gather(torch.ones(2)).tolist() == [1] * 4
        safecomm.all_reduce(pending)
        result = functional.reduce_scatter(leaf * 2)
        safecomm.all_reduce(pending)
        result.sum().backward()
        assert leaf.grad.tolist() == [2] * 4
        assert deferred() == 0
        safecomm.all_reduce(pending)
        assert deferred() == 1
    assert pending.tolist() == [2**5] * 3


@on(2)
def test_what_was_put_off_is_not_collected_by_torchs_manager():
    for mode in (contextlib.nullcontext, torch.inference_mode):
        with mode():
            one, other, inside = torch.ones(2), torch.ones(3), torch.ones(4)
            with safecomm.bucketed():
                safecomm.all_reduce(one)
                safecomm.all_reduce(other)
                with stock._coalescing_manager():
                    safecomm.all_reduce(inside)
                    assert one.tolist() == [2, 2]
                assert inside.tolist() == [2] * 4
            assert other.tolist() == [2] * 3
    _nothing_is_left()


@on(2)
def test_inputs_that_are_only_read_may_be_one():
    source, outputs = torch.ones(8), [torch.zeros(4) for _ in range(5)]
    with Launches() as launched, safecomm.bucketed():
        for output in outputs:
            getattr(safecomm, SCATTER)(output, source)
    assert all(output.tolist() == [2] * 4 for output in outputs)
    assert launched.calls[SCATTER] == 1


@on(2)
def test_a_call_that_is_on_its_way_when_the_block_ends_runs_at_once():
    buckets = Buckets(stock.group.WORLD, MIB)
    buckets.ended = True
    assert not buckets.defer(ROWS["all_reduce"], None, torch.ones(2))
    assert buckets.waiting() == 0
    buckets.ended = False
    assert all(buckets.defer(ROWS["all_reduce"], None, torch.ones(2)) for _ in range(3))
    buckets.ended = True
    assert not buckets.defer(ROWS["all_reduce"], None, torch.ones(2))
    assert buckets.waiting() == 3


@on(2)
def test_s8_arguments_of_wrong_types_are_refused_as_without():
    tensor = torch.ones(2)
    for call in (
        lambda: safecomm.all_reduce([tensor]),
        lambda: safecomm.all_reduce(None),
        lambda: getattr(safecomm, GATHER)(torch.ones(4), [tensor]),
    ):
        with pytest.raises(TypeError) as outside:
            call()
        with safecomm.bucketed(), pytest.raises(TypeError) as inside:
            call()
        assert str(inside.value) == str(outside.value)


@on(2)
def test_tensors_of_a_transform_are_reduced_at_once():
    def function(tensor):
        result = tensor + 1
        safecomm.all_reduce(result)
        return (result * result).sum()

    with safecomm.bucketed():
        safecomm.all_reduce(torch.ones(2))
        assert torch.func.functionalize(function)(torch.ones(2)).item() == 32


# --- calls that are like the one before -------------------------------------------------------------------------


@on(2)
def test_plain_calls_are_put_off_without_the_long_way():
    tensors, whole = [torch.ones(4) for _ in range(6)], [torch.zeros(8) for _ in range(6)]
    with contextlib.ExitStack() as stack:
        block = safecomm.bucketed()
        block.__enter__()
        for name in ("all_reduce", "reduce_scatter_single", "all_gather_single"):
            stack.enter_context(mock.patch.object(gates, f"_general_{name}", side_effect=AssertionError))
        for tensor in tensors:
            safecomm.all_reduce(tensor)
        for output, tensor in zip(whole, tensors, strict=True):
            getattr(safecomm, GATHER)(output, tensor)
        for output, tensor in zip(whole, tensors, strict=True):
            getattr(safecomm, SCATTER)(tensor, output)
        assert deferred() == 18
    block.__exit__(None, None, None)
    assert all(tensor.tolist() == [4] * 4 for tensor in tensors)
    assert all(tensor.tolist() == [2] * 8 for tensor in whole)


@on(2)
def test_calls_of_any_shapes_share_a_bucket():
    def tensors():
        yield torch.ones(3, 4)
        yield torch.ones(4)
        yield torch.ones(())
        yield torch.ones(0)
        yield torch.ones(2, 0)
        yield torch.nn.Parameter(torch.ones(2, 1, 2))
        with torch.inference_mode():
            yield torch.ones(5)
        yield torch.ones(3, requires_grad=True) * 1
        yield torch.ones(2, 3).t()
        yield torch.ones(6)[::2]

    made = [tensor for _ in range(4) for tensor in tensors()]
    for them in (made, [tensor for tensor in made if tensor.is_contiguous()], [torch.ones(0) for _ in range(3)]):
        before = [tensor.detach().clone() for tensor in them]
        versions = [None if tensor.is_inference() else tensor._version for tensor in them]
        with Launches() as launched, torch.no_grad(), safecomm.bucketed():
            for tensor in them:
                safecomm.all_reduce(tensor)
        assert launched.calls["all_reduce"] == 1
        assert all(torch.equal(tensor, 2 * old) for tensor, old in zip(them, before, strict=True))
        assert all(t.is_inference() or t._version > old for t, old in zip(them, versions, strict=True) if t.numel())


@on(2)
def test_each_kind_dtype_and_operation_has_its_buckets():
    tensors = [torch.ones(4) for _ in range(20)]
    halves = [torch.ones(4, dtype=torch.bfloat16) for _ in range(20)]
    with Launches() as launched, safecomm.bucketed():
        for tensor in tensors:
            safecomm.all_reduce(tensor)
        for tensor in tensors:
            safecomm.all_reduce(tensor, op=stock.ReduceOp.MAX)
        for tensor in halves:
            safecomm.all_reduce(tensor, op=stock.ReduceOp.MAX)
        for tensor, half in zip(tensors, halves, strict=True):
            safecomm.all_reduce(tensor)
            safecomm.all_reduce(half)
        getattr(safecomm, GATHER)(torch.zeros(8), tensors[0])
    assert launched.calls["all_reduce"] == 3 + 40
    assert all(tensor.tolist() == [4] * 4 for tensor in tensors)
    assert all(half.tolist() == [2] * 4 for half in halves)


@on(2)
def test_s8_what_is_not_like_the_calls_before_is_what_it_is_alone():
    plain = [torch.ones(4) for _ in range(5)]
    negative, same = (torch.full((4,), 1j).conj().imag for _ in range(2))
    assert negative.is_neg()
    stock.all_reduce(same)
    paired = torch.ones(4, dtype=torch.complex64)
    sparse = torch.eye(4).to_sparse()
    seen = []
    with Launches() as launched, safecomm.bucketed():
        for tensor in plain:
            safecomm.all_reduce(tensor)
        safecomm.all_reduce(negative)
        safecomm.all_reduce(plain[0])
        assert deferred() == 7
        safecomm.all_reduce(paired)
        assert deferred() == 0
        for tensor in plain:
            safecomm.all_reduce(tensor)

        def function(tensor):
            inner = torch.ones(4)  # no wrapper, but in a transform
            safecomm.all_reduce(inner)
            seen.append(inner.tolist())
            return tensor.sum()

        torch.func.grad(function)(torch.ones(2))
        assert deferred() == 0
        for tensor in plain:
            safecomm.all_reduce(tensor)
        safecomm.all_reduce(sparse)
        assert deferred() == 0
    assert launched.calls["all_reduce"] == 3 + 1 + 1 + 1 + 1 + 1
    assert seen == [[2] * 4]
    assert torch.equal(negative, same)
    assert paired.tolist() == [2] * 4
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(4))
    assert plain[1].tolist() == [8] * 4


def _gather_last(output, given):
    with safecomm.bucketed():
        for _ in range(3):
            getattr(safecomm, GATHER)(torch.zeros(8), torch.ones(4))
        getattr(safecomm, GATHER)(output, given)


@on(2)
def test_s8_tensors_that_do_not_fit_are_refused_as_without():
    for output, given in ((torch.zeros(9), torch.ones(4)), (torch.zeros(8, dtype=torch.int64), torch.ones(4))):
        with pytest.raises((ValueError, RuntimeError)) as outside:
            getattr(safecomm, GATHER)(output, given)
        with pytest.raises((ValueError, RuntimeError)) as inside:
            _gather_last(output, given)
        assert str(inside.value) == str(outside.value)
    with safecomm.bucketed():
        for _ in range(3):
            getattr(safecomm, GATHER)(torch.zeros(8), torch.ones(4))
        with pytest.raises(TypeError):
            getattr(safecomm, GATHER)(torch.zeros(8), None)
    _nothing_is_left()


@on(1)
def test_s8_calls_of_other_threads_run_once_whatever_comes_in_between():
    stop, calls = threading.Event(), []

    def other():
        while not stop.is_set():
            pair = torch.zeros(4), torch.full((4,), float(len(calls) + 1))
            getattr(safecomm, GATHER)(*pair)
            calls.append(pair)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for _ in range(20):
        stop.clear()
        with safecomm.bucketed():
            thread = threading.Thread(target=other)
            thread.start()
            for _ in range(20):
                safecomm.all_reduce(torch.ones(3))
                safecomm.barrier()
            until(lambda: len(calls) > 10)
        stop.set()
        thread.join()
        assert all(torch.equal(*pair) for pair in calls)
        calls.clear()
    sys.setswitchinterval(interval)


@on(1)
def test_one_tensor_as_output_and_input():
    tensors = [torch.full((4,), float(number)) for number in range(5)]
    with safecomm.bucketed():
        for tensor in tensors:
            getattr(safecomm, GATHER)(tensor, tensor)
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2, 3, 4]


def test_what_overlaps_is_found():
    dice = random.Random(7)
    whole = torch.zeros(64)
    found = set()
    for _ in range(4000):
        tensors, places = [], []
        for _ in range(dice.randrange(1, 6)):
            start, size, step = dice.randrange(0, 48), dice.randrange(0, 9), dice.choice([1, 1, 1, 3])
            tensors.append(whole[start : start + size : step])
            if size:
                places.append((start, start + (len(tensors[-1]) - 1) * step + 1))
        places.sort()
        disjoint = all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert bucketed._disjoint(tensors, [tensor.nbytes for tensor in tensors]) == disjoint, places
        found.add(disjoint)
    assert found == {True, False}
