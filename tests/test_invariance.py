"""invariant(): an element of a reduced result has the same bits, whatever way it was reduced (S11).

All ways by random elements are in ``same_bits.py``, which runs more of them as a program. That the kernels of
low_latency() give these bits too is in ``test_ring.py``.
"""

import itertools
import pickle
import re
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import same_bits
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from ranks import on, run_python, signal_to_peers, subgroup, until, wait_for_signal

import safecomm
from safecomm import _torch
from safecomm.collectives import rank_order
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.takers import ENGINES
from safecomm.interception import invariance

SUM, AVG, MAX, MIN = (getattr(stock.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN"))


def given(count, dtype=torch.float32, seed=3):
    """Return what each rank has: numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(stock.get_world_size(), count, generator=generator).to(dtype))


def kernels():
    """Return who has registered the kernels of the operators that reduce."""
    return [torch._C._dispatch_dump(f"c10d::{name}") for name in _torch.REDUCTIONS]


# --- the same bits --------------------------------------------------------------------------------------------


@on(3, 4)
def test_all_ways_to_reduce_random_elements_give_the_same_bits_s11():
    found = [same_bits.try_all(seed) for seed in range(5, 11)]
    assert [wrong for wrong, _ in found if wrong] == []
    assert any(torch_differs for _, torch_differs in found)  # or this proves nothing


@on(3)
def test_the_ways_are_told_from_one_that_adds_in_another_order():
    combine = rank_order._combine

    def from_the_last(rows, op, out):
        combine(rows.flip(0), op, out)

    with (
        mock.patch.object(rank_order, "_combine", from_the_last),
        mock.patch.object(same_bits, "OPS", ("SUM",)),
        mock.patch.object(same_bits, "COUNTS", (333, 5000)),
        mock.patch.object(same_bits, "DTYPES", (torch.float32, torch.float64)),  # of three of bf16 fp32 has all bits
    ):
        wrong = [one for seed in range(5, 8) for one in same_bits.try_all(seed)[0]]
    assert len(wrong) == 3 * len(same_bits.WAYS)


@on(3)
def test_an_average_is_the_sum_divided_once():
    """By a number of ranks whose reciprocal is not exact."""
    rows = given(5000)
    mine = rows[stock.get_rank()].clone()
    with safecomm.invariant():
        safecomm.all_reduce(mine, AVG)
    assert same_bits.differing(mine, same_bits.expected(rows, "AVG")) == 0


@on(3)
def test_the_ways_are_told_from_torchs_own():
    found = [same_bits.try_all(seed, (same_bits.whole, same_bits.pieces), _Nothing) for seed in range(5, 20)]
    assert any(wrong for wrong, _ in found if "AVG" not in str(wrong))


class _Nothing:
    """invariant() that does nothing; gloo has no AVG, which is left out."""

    def __enter__(self):
        self.patch = mock.patch.object(same_bits, "OPS", ("SUM",))
        self.patch.__enter__()

    def __exit__(self, *error):
        self.patch.__exit__(*error)


def test_what_is_expected_is_what_ieee_754_says():
    """The model's own rounding against torch's, and its zeros and NaN by hand."""
    values = torch.randn(1000) * torch.exp2(torch.randint(-20, 20, (1000,)).float())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(same_bits._rounded(values.numpy().copy(), dtype), values.to(dtype))
    zero, minus, nan = np.float32(0.0), np.float32(-0.0), np.float32("nan")
    for op, first, second, right in (
        ("MAX", zero, minus, zero), ("MAX", minus, zero, zero), ("MIN", zero, minus, minus),
        ("MIN", minus, zero, minus), ("MAX", nan, minus, minus), ("MIN", zero, nan, zero),
    ):  # fmt: skip
        found = same_bits._combined(np.array([first]), np.array([second]), op)[0]
        assert (found, np.signbit(found)) == (right, np.signbit(right)), (op, first, second)


@on(3)
def test_large_tensors_are_reduced_in_turns_of_bounded_memory_s11():
    rank, world = stock.get_rank(), stock.get_world_size()
    rows, buffers = given(70_001), []
    right = same_bits.expected(rows, "SUM")
    buffer = rank_order._buffer

    def counted(shape, like):
        buffers.append(buffer(shape, like))
        return buffers[-1]

    part = 70_001 // world
    with (
        mock.patch.object(rank_order, "TURN", 1 << 17),
        mock.patch.object(rank_order, "_buffer", counted),
        safecomm.invariant(),
    ):
        found = rows[rank].clone()
        safecomm.all_reduce(found)
        out = torch.empty(part)
        getattr(safecomm, same_bits.SCATTER)(out, rows[rank][: part * world].clone())
        # In place, as FSDP does: the output is this rank's part of the input.
        whole = rows[rank][: part * world].clone()
        getattr(safecomm, same_bits.SCATTER)(whole[rank * part :][:part], whole)
    assert same_bits.differing(found, right) == 0
    mine = right[: part * world].view(world, part)[rank]
    assert same_bits.differing(out, mine) == same_bits.differing(whole[rank * part :][:part], mine) == 0
    assert len(buffers) > 6
    assert max(one.nbytes for one in buffers) <= 1 << 17


@on(3)
def test_buffers_are_of_the_arena_in_use_and_go_back_to_it():
    arena = safecomm.Arena("1MiB", device="cpu")
    with safecomm.use_arena(arena), safecomm.invariant():
        tensor = given(30_000)[stock.get_rank()]
        safecomm.all_reduce(tensor)
    assert arena.stats().high_water >= tensor.nbytes
    until(lambda: arena.stats().in_use == 0)  # gloo's threads let go of tensors a moment after the wait
    arena.close()


@on(3)
def test_parts_of_a_list_may_differ_in_size():
    rank, world = stock.get_rank(), stock.get_world_size()
    sizes = [5, 0, 700][:world]
    rows = given(sum(sizes))
    with safecomm.invariant():
        out = torch.empty(sizes[rank])
        options = stock.ReduceScatterOptions()
        stock.group.WORLD.reduce_scatter([out], [list(rows[rank].split(sizes))], options).wait()
    assert same_bits.differing(out, same_bits.expected(rows, "SUM").split(sizes)[rank]) == 0


@on(2, 3)
def test_complex_numbers_empty_tensors_single_numbers_and_leaves():
    rank, world = stock.get_rank(), stock.get_world_size()
    with safecomm.invariant():
        numbers = torch.full((3, 5), complex(rank, 1), dtype=torch.complex64)
        safecomm.all_reduce(numbers)
        part = torch.zeros(2, dtype=torch.complex64)
        getattr(safecomm, same_bits.SCATTER)(part, torch.full((2 * world,), 1 + 2j, dtype=torch.complex64))
        nothing = torch.zeros(0)
        safecomm.all_reduce(nothing)
        one = torch.tensor(1.5)
        safecomm.all_reduce(one, AVG)
        leaf = torch.nn.Parameter(torch.ones(4))
        safecomm.all_reduce(leaf)
        with torch.inference_mode():
            inference = torch.ones(3)
            safecomm.all_reduce(inference)
        flipped = torch.ones(2, 3, 4).to(memory_format=torch.contiguous_format).transpose(0, 2)
        safecomm.all_reduce(flipped)
    assert torch.equal(numbers, torch.full((3, 5), complex(sum(range(world)), world), dtype=torch.complex64))
    assert part.tolist() == [complex(world, 2 * world)] * 2
    assert one == 1.5
    assert leaf.tolist() == [world] * 4
    assert leaf._version == 0  # as after torch's
    assert inference.tolist() == [world] * 3
    assert bool((flipped == world).all())


@on(3)
def test_ddp_and_compiled_code_give_the_same_bits_s11():
    """DDP's reducer is C++, and calls no function of Python."""
    rank = stock.get_rank()
    rows = given(333)
    right = same_bits.expected(rows, "SUM")

    def program(tensor):
        return functional.all_reduce(tensor * 1, "sum", stock.group.WORLD) * 1

    def within(tensor):  # whose frame torch.compile runs as it is, and follows what that calls
        tensor = tensor * 1
        with safecomm.invariant():
            result = functional.wait_tensor(functional.all_reduce(tensor, "sum", stock.group.WORLD))
        return result * 1

    inside = torch.compile(within, backend="aot_eager")(rows[rank])
    with safecomm.invariant():
        compiled = torch.compile(program, backend="aot_eager")(rows[rank])
        model = torch.nn.Linear(333, 1, bias=False)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(rows[rank].view(1, -1)).sum().backward()
    assert same_bits.differing(compiled, right) == same_bits.differing(inside, right) == 0
    # DDP divides what each rank has before it is added.
    divided = same_bits.expected([row * (1 / len(rows)) for row in rows], "SUM")
    assert same_bits.differing(model.weight.grad.view(-1), divided) == 0


# --- what is refused, and what stays torch's --------------------------------------------------------------------


@on(2)
def test_what_can_not_be_kept_raises_with_its_line_and_nothing_is_launched_s11():
    rank = stock.get_rank()
    with safecomm.invariant():
        if rank == 0:  # alone: its peers would wait for what it had launched
            with pytest.raises(safecomm.InvarianceError, match=r"all_reduce at .*test_invariance.py:\d+.*PREMUL_SUM"):
                safecomm.all_reduce(torch.ones(3), stock._make_nccl_premul_sum(2.0))
            sparse = torch.eye(2).to_sparse()
            with pytest.raises(safecomm.InvarianceError, match="a sparse tensor can't be reduced"):
                stock.all_reduce(sparse)
        tensor = torch.ones(3)
        safecomm.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    error = pickle.loads(pickle.dumps(safecomm.InvarianceError("as it was")))
    assert isinstance(error, safecomm.SafecommError)


@on(2)
def test_integers_and_calls_that_torch_refuses_are_torchs_own():
    with safecomm.invariant(), mock.patch.object(invariance, "_run", side_effect=AssertionError):
        tensor = torch.ones(3, dtype=torch.int32)
        safecomm.all_reduce(tensor)
        bits = torch.tensor([1 << stock.get_rank()])
        safecomm.all_reduce(bits, stock.ReduceOp.BOR)
        for of, given_ in ((torch.zeros(3), torch.zeros(5)), (torch.zeros(2), torch.zeros(4, dtype=torch.float64))):
            errors = []
            for library in (safecomm, stock):
                with pytest.raises(Exception) as caught:  # noqa: PT011  whatever torch says
                    getattr(library, same_bits.SCATTER)(of, given_)
                errors.append(re.sub(r"\[.*?\]", "", str(caught.value)).splitlines()[0])
            assert errors[0] == errors[1]
    assert tensor.tolist() == [2] * 3
    assert bits.item() == 3


@on(3)
def test_of_one_group_others_stay_torchs():
    rank = stock.get_rank()
    other = same_bits.other_group()
    rows = given(5000)
    right = same_bits.expected(rows, "SUM")
    with safecomm.invariant(other):
        assert invariance.is_invariant(other)
        assert not invariance.is_invariant(stock.group.WORLD)
        mine, torchs = rows[rank].clone(), rows[rank].clone()
        safecomm.all_reduce(mine, group=other)
        safecomm.all_reduce(torchs)
    alone = rows[rank].clone()
    stock.all_reduce(alone)
    assert same_bits.differing(mine, right) == 0
    assert same_bits.differing(torchs, alone) == 0
    assert same_bits.differing(torchs, right) > 0


@on(2)
def test_leaving_restores_torch_to_the_kernel_also_after_an_exception_and_nested():
    before, fast = kernels(), dict(ROUTES.fast)
    assert fast

    @safecomm.invariant()
    def decorated():
        assert kernels() != before
        assert not ROUTES.fast
        safecomm.all_reduce(torch.ones(3))

    decorated()
    assert kernels() == before
    with pytest.raises(ZeroDivisionError), safecomm.invariant(), safecomm.invariant(stock.group.WORLD):
        1 / 0  # noqa: B018
    with safecomm.invariant():
        with safecomm.invariant():
            pass
        assert kernels() != before
    assert kernels() == before
    assert ROUTES.fast == fast
    assert not _torch.OVERRIDDEN


@on(2)
def test_an_exception_of_a_signal_handler_while_entering_leaves_nothing_replaced():
    before, calls = kernels(), itertools.count()
    replace = _torch.replace_reduction

    def interrupted(*args):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return replace(*args)

    with mock.patch.object(_torch, "replace_reduction", interrupted), pytest.raises(KeyboardInterrupt):
        safecomm.invariant().__enter__()
    assert kernels() == before
    assert not invariance.is_invariant(stock.group.WORLD)
    with safecomm.invariant():
        assert kernels() != before
    assert kernels() == before


@on(3)
def test_a_hook_of_ddp_in_cpp_gets_the_result_of_the_work():
    """It takes the tensors out of the work's future."""
    rank = stock.get_rank()
    with safecomm.invariant():
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1, bias=False))
        wrapped._register_builtin_comm_hook(stock.BuiltinCommHookType.FP16_COMPRESS)
        wrapped(torch.full((1, 5), float(rank))).sum().backward()
    assert torch.allclose(wrapped.module.weight.grad, torch.ones(1, 5), rtol=1e-3)  # (0 + 1 + 2) / 3


@on(3)
def test_calls_that_bucketed_defers_are_reduced_where_they_were_made_and_open_regions_are_refused():
    rank = stock.get_rank()
    rows = given(5000)
    right = same_bits.expected(rows, "SUM")
    outside = rows[rank].clone()
    stock.all_reduce(outside)
    assert same_bits.differing(outside, right) > 0
    for group in (None, stock.group.WORLD):
        before, inside, after = (rows[rank].clone() for _ in range(3))
        with safecomm.bucketed():
            safecomm.all_reduce(before)
            with safecomm.invariant(group):
                safecomm.all_reduce(inside)
            safecomm.all_reduce(after)
        assert torch.equal(before, outside)
        assert same_bits.differing(inside, right) == 0
        assert torch.equal(after, outside)
    tensor = torch.ones(3)
    with safecomm._coalescing_manager():
        safecomm.all_reduce(tensor)
        assert "has an open coalescing region" in refused(safecomm.SafecommError)
    assert not _torch.OVERRIDDEN
    assert tensor.tolist() == [3.0] * 3


@on(2)
def test_lists_that_are_not_of_a_tensor_a_rank_and_complex_products_are_torchs_to_refuse():
    options = stock.ReduceScatterOptions()
    group, tensor = stock.group.WORLD, torch.ones(2)
    product = stock.AllreduceOptions()
    product.reduceOp = stock.ReduceOp.PRODUCT

    def said(call):
        with pytest.raises(Exception) as caught:  # noqa: PT011  whatever torch says
            call()
        return re.sub(r"\[.*?\]", "", str(caught.value)).splitlines()[0]

    calls = (
        lambda: group.reduce_scatter([tensor], [[]], options),
        lambda: group.allreduce([torch.ones(2, dtype=torch.complex64)], product).wait(),
    )
    before = [said(call) for call in calls]
    with safecomm.invariant():
        assert [said(call) for call in calls] == before
        with pytest.raises(safecomm.InvarianceError, match="elements share memory"):
            stock.all_reduce(torch.ones(1).expand(3))


@on(2)
def test_the_timeout_of_a_call_is_kept():
    options = stock.AllreduceOptions()
    options.timeout = timedelta(seconds=1.5)
    with safecomm.invariant():
        if stock.get_rank():
            wait_for_signal("over")
        else:
            with mock.patch.object(rank_order.RankOrder, "all_reduce") as called:
                made = mock.patch.object(rank_order.RankOrder, "finish", return_value=_torch.complete_work())
                with made, mock.patch.object(invariance, "RankOrder", wraps=rank_order.RankOrder) as ranks:
                    stock.group.WORLD.allreduce([torch.ones(2)], options)
            assert called.called
            assert ranks.call_args.args[2] == timedelta(seconds=1.5)
            ordered = rank_order.RankOrder(stock.group.WORLD, -1, timedelta(seconds=1.5))
            assert ordered._options(_torch.all_gather)[1].timeout == timedelta(seconds=1.5)
            signal_to_peers("over")


@on(3)
def test_a_rank_outside_of_the_group_does_nothing():
    members = subgroup(0, 1)
    inside = stock.get_rank() < 2
    with safecomm.invariant(members):
        assert invariance.is_invariant(stock.group.WORLD) is False
        assert bool(_torch.OVERRIDDEN)
        if inside:
            tensor = torch.ones(3)
            safecomm.all_reduce(tensor, group=members)
            assert tensor.tolist() == [2.0] * 3


@on(2)
def test_an_error_after_all_was_replaced_restores_it():
    safecomm.all_reduce(torch.ones(3))
    assert ROUTES.fast
    engine = mock.Mock()
    engine.plan_again.side_effect = [KeyboardInterrupt, None]
    with mock.patch.dict(ENGINES, {None: engine}), pytest.raises(KeyboardInterrupt):
        safecomm.invariant().__enter__()
    assert not _torch.OVERRIDDEN
    assert ROUTES.fast


@on(2)
def test_with_low_latency_on_for_all_groups_and_none_that_can():
    """As SAFECOMM_LOW_LATENCY=1 switches it on: gloo's group stays as it is."""
    from safecomm.peers import low_latency

    tensor = torch.ones(3)
    with mock.patch.dict(ENGINES), mock.patch.object(low_latency.operators, "install"):
        low_latency.everywhere()
        with safecomm.invariant():
            safecomm.all_reduce(tensor)
            with safecomm.invariant():  # of an engine that takes no call
                pass
    assert tensor.tolist() == [2.0] * 3


@on(2)
def test_engines_plan_again_as_it_begins_and_ends():
    engine = mock.Mock()
    with mock.patch.dict(ENGINES, {None: engine}):
        with safecomm.invariant():
            assert engine.plan_again.call_count == 1
        assert engine.plan_again.call_count == 2


def refused(error=safecomm.InvarianceError):
    """Return what it says when it can't be entered."""
    with pytest.raises(error) as caught:
        safecomm.invariant().__enter__()
    return str(caught.value)


@on(2)
def test_it_can_not_be_entered_where_torch_does_not_allow_it():
    with mock.patch.object(_torch, "why_not_replaced", return_value="torch 9 has other reductions"):
        assert refused() == "invariant(): torch 9 has other reductions. Nothing was changed."

    class Own(c10d.ProcessGroup):
        pass

    own = Own(0, 1)
    with mock.patch.object(_torch, "all_groups", return_value=[own]):
        assert "of the program's own class, Own" in refused()
    with mock.patch.dict("os.environ", SAFECOMM_REPLACE="0"):
        assert "SAFECOMM_REPLACE=0 forbids" in refused(safecomm.SafecommError)
    with pytest.raises(TypeError, match="invariant"):
        safecomm.invariant(3)


def test_every_operator_that_reduces_is_replaced():
    assert _torch.why_not_replaced() == ""
    with mock.patch.dict(_torch.REDUCTIONS):
        del _torch.REDUCTIONS["reduce_"]
        found = _torch.why_not_replaced.__wrapped__()
    assert found.endswith("has reductions that safecomm does not know: reduce_")


@on(3)
def test_an_asynchronous_call_is_held_and_complete_when_it_was_waited_for():
    rank = stock.get_rank()
    rows = given(4000)
    with safecomm.invariant():
        mine = rows[rank].clone()
        work = safecomm.all_reduce(mine, async_op=True)
        future = work.get_future()
        assert work.wait(timedelta(seconds=60))
        assert work.is_completed()
        assert future.value()[0].data_ptr() == mine.data_ptr()
        # An asynchronous call of nothing, and of a type that backends do not know.
        safecomm.all_reduce(torch.zeros(0), async_op=True).wait()
        small = torch.ones(3).to(torch.float8_e5m2)
        stock.all_reduce(small, async_op=True).wait()
        assert small.float().tolist() == [3.0] * 3
    assert same_bits.differing(mine, same_bits.expected(rows, "SUM")) == 0
    assert safecomm.pending() == []


@on(2)
def test_calls_of_a_rank_that_is_late_wait_for_it():
    tensor = torch.full((100_000,), float(stock.get_rank()))
    with safecomm.invariant():
        if stock.get_rank():
            wait_for_signal("go")
        else:
            work = stock.barrier(async_op=True)
            signal_to_peers("go")
        if stock.get_rank():
            work = stock.barrier(async_op=True)
        work.wait()
        safecomm.all_reduce(tensor)
    assert bool((tensor == 1).all())


def test_run_has_a_flag_for_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from safecomm.interception import invariance\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(invariance.is_invariant(dist.group.WORLD))\n"
        "dist.destroy_process_group()\n"
    )
    for flags, said in ((["--invariant"], "True"), ([], "False")):
        ended = run_python("-m", "safecomm", "run", *flags, str(script), cwd=str(tmp_path))
        ended.check()
        assert said in ended.out.splitlines()
