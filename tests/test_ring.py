"""The ring: large calls by kernels whose staging is small, in Triton's interpreter on real processes.

Its protocol as a model is in ``test_ring_protocol.py``, and what only GPUs show in ``tests/gpu/low_latency.py``.
"""

import contextlib
import itertools
import random
from datetime import timedelta
from unittest import mock

import pytest
import same_bits
import torch
import torch.distributed as stock
from ranks import on, signal_to_peers, wait_for_signal
from test_low_latency import GATHER, KIB, OPS, SCATTER, of_rank, reduced, same, switched_on
from watching import slowed

import safecomm
from safecomm.collectives.takers import DECLINED, ENGINES
from safecomm.peers import bulk, engine, low_latency
from safecomm.peers.limits import LowLatencyLimits
from safecomm.peers.staging import StagingLayout

LIMITS = LowLatencyLimits(
    one_shot=64, two_shot=0, scatter=64, gather=64, ring=1 << 20, ring_scatter=1 << 20, ring_gather=1 << 20
)
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]


@contextlib.contextmanager
def small_ring(programs=3, **how):
    """Switch it on with three programs, of pieces of 1 KiB: so a few KiB are several iterations of each."""
    before = bulk.RING_PROGRAMS, StagingLayout.ring_piece
    bulk.RING_PROGRAMS = programs
    StagingLayout.ring_piece = property(lambda self: KIB)
    try:
        with switched_on(limits=LIMITS, **how) as ours:
            yield ours
    finally:
        bulk.RING_PROGRAMS, StagingLayout.ring_piece = before


@on(2, 3, interpreted=True)
def test_all_reduce_of_every_type_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    calls = [(OPS[0], dtype, count) for dtype in FLOATS + INTEGERS for count in (65, 5001)]
    calls += [(op, dtype, 333) for op in OPS[1:] for dtype in (torch.bfloat16, torch.float64)]
    calls += [(op, dtype, 333) for op in OPS[2:] for dtype in (torch.int32, torch.int64)]
    with small_ring(tried=True) as ours:
        for op, dtype, count in calls:
            sent = [
                of_rank(peer, count, dtype) if dtype.is_floating_point else whole(peer, count, dtype)
                for peer in range(world)
            ]
            tensor = sent[rank].clone()
            assert safecomm.all_reduce(tensor, op=op) is None
            assert same(tensor, reduced(sent, op).to(dtype)), (op, dtype, count)
        assert ours.calls == len(calls)
        safecomm.all_reduce(torch.ones(5000, dtype=torch.uint8))  # the backend's
        assert ours.calls == len(calls)


@on(2, interpreted=True)
def test_operations_that_the_kernels_do_not_know_are_the_backends_s8():
    rank = stock.get_rank()
    with small_ring() as ours:
        engine = ENGINES[stock.group.WORLD]
        for dtype, op, expected in (
            (torch.float32, stock.ReduceOp.PRODUCT, 6),
            (torch.int32, stock.ReduceOp.PRODUCT, 6),
            (torch.int32, stock.ReduceOp.BAND, 2),
            (torch.int32, stock.ReduceOp.BOR, 3),
            (torch.int32, stock.ReduceOp.BXOR, 1),
        ):
            tensor = torch.full((5000,), 2 + rank, dtype=dtype)
            safecomm.all_reduce(tensor, op=op)
            assert tensor.eq(expected).all(), (dtype, op)
        part, sent = torch.empty(3000), torch.full((6000,), 2.0 + rank)
        getattr(safecomm, SCATTER)(part, sent, op=stock.ReduceOp.PRODUCT)
        assert part.eq(6).all()
        scaled = stock._make_nccl_premul_sum(0.5)  # which gloo refuses
        assert engine.run(stock.group.WORLD, SCATTER, [part, sent], scaled, False) is DECLINED
        assert ours.calls == 0


def whole(rank, count, dtype):
    generator = torch.Generator().manual_seed(100 * rank + count)
    return torch.randint(0, 40, (count,), generator=generator).to(dtype)


@on(3, interpreted=True)
def test_sums_are_taken_in_the_order_of_the_ranks_in_a_type_that_is_wide_enough():
    rank, world = stock.get_rank(), stock.get_world_size()
    generator = torch.Generator().manual_seed(7)
    sent = torch.randn(world, 5000, generator=generator, dtype=torch.float64)
    with small_ring():
        for dtype in (torch.float32, torch.float64):
            tensor = sent[rank].to(dtype, copy=True)
            safecomm.all_reduce(tensor)
            assert torch.equal(tensor, sent[0].to(dtype) + sent[1].to(dtype) + sent[2].to(dtype))
        large = torch.full((1000,), 1 << 62, dtype=torch.int64) + rank
        safecomm.all_reduce(large)
        assert torch.equal(large, torch.full((1000,), (3 << 62) - (1 << 64), dtype=torch.int64) + 3)


@on(2, interpreted=True)
def test_copies_are_bit_for_bit():
    """Negative zero, and NaN whatever its payload."""
    rank, world = stock.get_rank(), stock.get_world_size()
    patterns = {
        torch.bfloat16: (torch.int16, [-0x8000, 0x7FC1, -0x3F, 1, 0]),
        torch.float32: (torch.int32, [-0x80000000, 0x7F800001, -0x3FFFFF, 1, 0]),
        torch.float64: (torch.int64, [-(1 << 63), 0x7FF0000000000001, -5, 1, 0]),
        torch.uint8: (torch.uint8, [255, 128, 7, 1, 0]),
    }
    with small_ring() as ours:
        for dtype, (bits, values) in patterns.items():
            part = torch.tensor(values * 500, dtype=bits).view(dtype).roll(rank)
            out = torch.empty(world * part.numel(), dtype=dtype)
            getattr(safecomm, GATHER)(out, part)
            expected = torch.cat([torch.tensor(values * 500, dtype=bits).roll(peer) for peer in range(world)])
            assert torch.equal(out.view(bits), expected)
        zeros = torch.full((4000,), -0.0)
        safecomm.all_reduce(zeros)
        assert zeros.view(torch.int32).eq(-0x80000000).all(), "the sum of negative zeros is one"
        assert ours.calls == len(patterns) + 1


@on(2, 3, interpreted=True)
def test_gather_and_scatter_in_place_and_at_odd_addresses_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    with small_ring() as ours:
        for dtype, count, offset in itertools.product((torch.float32, torch.bfloat16), (70, 3001), (0, 1)):
            whole = torch.zeros(offset + count * world, dtype=dtype)[offset:]
            mine = whole[rank * count : (rank + 1) * count]
            mine.copy_(of_rank(rank, count, dtype))
            getattr(safecomm, GATHER)(whole, mine)
            assert torch.equal(whole, torch.cat([of_rank(peer, count, dtype) for peer in range(world)]))
            sent = [of_rank(peer, count * world, dtype) for peer in range(world)]
            part = torch.full((count,), 9.0, dtype=dtype)
            getattr(safecomm, SCATTER)(part, sent[rank])
            assert torch.equal(part.double(), reduced(sent, OPS[0])[rank * count : (rank + 1) * count])
            getattr(safecomm, SCATTER)(mine, whole, op=OPS[2])
            assert torch.equal(mine, of_rank(rank, count, dtype))
        assert ours.calls == 24


@on(2, interpreted=True)
def test_operators_calls_of_the_rings_sizes_are_not_looked_at():
    with small_ring():
        assert ENGINES[stock.group.WORLD].most == 2 * LIMITS.one_shot


@on(2, interpreted=True)
def test_a_gather_whose_input_is_a_part_of_its_output_reads_it_first():
    rank, world = stock.get_rank(), stock.get_world_size()
    with small_ring():
        for count, shift in itertools.product((70, 3001, 9000), (0, 1)):
            whole = torch.zeros(count * world)
            part = whole[(rank + shift) % world * count :][:count]
            part.copy_(torch.arange(count) + 1000.0 * rank)
            getattr(safecomm, GATHER)(whole, part)
            assert torch.equal(whole, torch.cat([torch.arange(count) + 1000.0 * peer for peer in range(world)]))


@on(2, interpreted=True)
def test_kernels_are_given_all_their_constants():
    """Where they are compiled, what is not given is taken for an argument."""
    given = {}
    with small_ring():
        engine = ENGINES[stock.group.WORLD]
        kernels = engine._kernels
        before, kernels.launcher = kernels.launcher, lambda kernel, constants, *_: given.setdefault(kernel, constants)
        for collective, dtype in itertools.product(("all_reduce", "reduce_scatter", "all_gather"), FLOATS[:2]):
            engine._bulk._launchers.clear()
            assert engine._bulk.plan(collective, dtype, 1000, 0)
        kernels.launcher = before
        engine._bulk._launchers.clear()
    assert len(given) == 2
    for kernel, constants in given.items():
        arguments = ["out", "data", "address", "call", "size", "op"]
        assert [name for name in kernel.arg_names if name not in constants] == arguments


@on(2, 3, interpreted=True)
def test_calls_of_all_kinds_with_ranks_that_are_late_at_any_point_s8():
    """They use the same staging, by turns that go on. Asynchronous ones are the backend's."""
    rank, world = stock.get_rank(), stock.get_world_size()
    dice = random.Random(4)  # the same on every rank
    taken = 0
    with small_ring(4) as ours, slowed("ring", _release=0.1, _arrived=0.05, _number=0.3, _poisoned=0.05):
        for number in range(25):
            kind, count = dice.choice(("reduce", "reduce", "gather", "scatter")), dice.choice((65, 2000, 7000))
            dtype, asynchronous = dice.choice((torch.int32, torch.float32)), dice.random() < 0.5
            if kind == "reduce":
                tensor = torch.arange(count, dtype=dtype) + rank + number
                work = safecomm.all_reduce(tensor, async_op=asynchronous)
                expected = world * (torch.arange(count, dtype=dtype) + number) + sum(range(world))
            elif kind == "gather":
                tensor = torch.empty(count * world, dtype=dtype)
                part = torch.arange(count, dtype=dtype) + rank + number
                work = getattr(safecomm, GATHER)(tensor, part, async_op=asynchronous)
                expected = torch.cat([torch.arange(count, dtype=dtype) + peer + number for peer in range(world)])
            else:
                tensor = torch.empty(count, dtype=dtype)
                sent = torch.arange(count * world, dtype=dtype) + rank
                work = getattr(safecomm, SCATTER)(tensor, sent, async_op=asynchronous)
                expected = world * torch.arange(rank * count, (rank + 1) * count, dtype=dtype) + sum(range(world))
            taken += not asynchronous
            if asynchronous:
                work.wait()
            assert torch.equal(tensor, expected), number
        assert ours.calls == taken > 8


@on(2, interpreted=True)
def test_turns_go_on_where_the_numbers_of_flags_begin_anew():
    rank, world = stock.get_rank(), stock.get_world_size()
    with small_ring() as ours:
        engine = ENGINES[stock.group.WORLD]
        turns = engine._table[-bulk.RING_PROGRAMS :]
        turns[:] = (1 << 32) - 4  # as after so many iterations
        for number in range(6):
            tensor = torch.arange(7000, dtype=torch.int32) + rank + number
            safecomm.all_reduce(tensor)
            assert torch.equal(tensor, world * (torch.arange(7000, dtype=torch.int32) + number) + sum(range(world)))
        assert int(turns[0]) > 1 << 32
        assert ours.calls == 6


@on(2, interpreted=True)
def test_a_peer_that_does_not_come_leaves_nan_or_minus_one_and_an_error():
    rank = stock.get_rank()
    with small_ring(timeout=timedelta(milliseconds=300)) as ours:
        tensors = [torch.ones(7000, dtype=dtype) for dtype in (torch.bfloat16, torch.int32)]
        if rank == 0:
            safecomm.all_reduce(tensors[0])  # which the other has not come to yet
            assert tensors[0].isnan().all()
            engine = ENGINES[stock.group.WORLD]
            engine.raise_failure, known = lambda: None, engine.raise_failure
            safecomm.all_reduce(tensors[1])  # as the rest of a graph would be
            engine.raise_failure = known
            assert (tensors[1] == -1).all()
            with pytest.raises(safecomm.PeerTimeoutError, match=r"all_reduce called at .*test_ring.py"):
                safecomm.all_reduce(tensors[1])
            signal_to_peers("given up")
        else:
            wait_for_signal("given up")
            safecomm.all_reduce(tensors[0])  # what the other has sent in that call is not what the next one waits for
            with pytest.raises(safecomm.PeerTimeoutError):
                safecomm.all_reduce(tensors[1])
            assert ((tensors[0] == 2) | tensors[0].isnan()).all()
            assert tensors[0].isnan().any()
        ours._leave(timedelta())()
    low_latency._KEPT.clear()


# --- inside of invariant() ---------------------------------------------------------------------------------------


@on(3, interpreted=True)
def test_kernels_give_the_bits_of_what_is_moved_s11():
    """fp32 alone: Triton's interpreter cuts bf16 off where GPUs round it."""
    ways = (same_bits.whole, same_bits.scattered, same_bits.asynchronous)
    with (
        switched_on(tried=True) as ours,
        mock.patch.object(same_bits, "DTYPES", (torch.float32,)),
        mock.patch.object(same_bits, "OPS", ("SUM", "AVG")),
        mock.patch.object(same_bits, "COUNTS", (5, 3000)),
        mock.patch.object(same_bits, "SPECIAL", (0.0, -0.0, 1e-39)),
    ):
        assert [same_bits.try_all(seed, ways)[0] for seed in range(4)] == [[]] * 4
        assert ours.calls >= 4 * len(ways)


@on(3, interpreted=True)
def test_kernels_take_larger_calls_in_turns_asynchronous_ones_and_those_of_torch_s11():
    limits = LowLatencyLimits(one_shot=512, two_shot=2 * KIB, scatter=0, gather=0)
    generator = torch.Generator().manual_seed(7)
    rows = list(torch.randn(stock.get_world_size(), 1500, generator=generator))
    with switched_on(tried=True, limits=limits) as ours, mock.patch.object(engine, "LEAST_TURN", KIB):
        for library, asynchronous in itertools.product((safecomm, stock), (False, True)):
            tensor, before = rows[stock.get_rank()].clone(), ours.calls
            with safecomm.invariant():
                work = library.all_reduce(tensor, async_op=asynchronous)
                assert (work is None) is not asynchronous
                if work is not None:
                    work.wait()
            assert ours.calls - before == 3
            assert same_bits.differing(tensor, same_bits.expected(rows, "SUM")) == 0
        safecomm.all_reduce(tensor)
        assert ours.calls - before == 3  # outside it is the backend's as before


@on(3, interpreted=True)
def test_a_rank_alone_may_have_gaps_in_its_tensor_s11():
    generator = torch.Generator().manual_seed(9)
    rows = list(torch.randn(stock.get_world_size(), 100, generator=generator))
    me = stock.get_rank()
    with switched_on(tried=True) as ours, safecomm.invariant():
        tensor = rows[me].clone() if me else torch.stack([rows[me], rows[me]], 1)[:, 0]
        safecomm.all_reduce(tensor)
        assert ours.calls == 1
    assert same_bits.differing(tensor.contiguous(), same_bits.expected(rows, "SUM")) == 0


@on(3, interpreted=True)
def test_the_ring_whose_order_depends_on_the_place_takes_no_call_of_three_ranks():
    with small_ring(tried=True) as ours:
        for within in (False, True, False):
            before = ours.calls
            with safecomm.invariant() if within else mock.MagicMock():
                safecomm.all_reduce(torch.ones(5000))
            assert (ours.calls > before) is not within
