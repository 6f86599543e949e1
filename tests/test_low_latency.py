"""low_latency(): the kernels, run by Triton's interpreter on real processes, and what is around them.

The peers' memory is shared memory of the machine, in place of symmetric memory. What only GPUs show is in
``tests/gpu/low_latency.py``.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as stock
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import launch, on, run_program, run_python, signal_to_peers, speed_up_the_interpreter, wait_for_signal
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from watching import Log, Sees, slowed

import safecomm
from safecomm._torch import links
from safecomm.collectives import table, takers
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.takers import ENGINES
from safecomm.core import captures
from safecomm.peers import engine as engine_module
from safecomm.peers import limits as low_latency_limits
from safecomm.peers import list_exchange, low_latency, room
from safecomm.peers.limits import LowLatencyLimits
from safecomm.peers.staging import FREE, OTHER, PROGRAMS, SLOT, StagingLayout
from safecomm.tools import tune_low_latency

pytest.importorskip("triton", reason="the kernels are Triton's, which is not installed")

KIB = 1 << 10
SMALL = LowLatencyLimits(one_shot=16 * KIB, two_shot=40 * KIB, scatter=16 * KIB, gather=16 * KIB)
GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"
EXACT = LowLatencyLimits(
    one_shot=16 * KIB, two_shot=40 * KIB, scatter=16 * KIB, gather=16 * KIB, exact=10 * KIB, exchange=12 * KIB
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = [stock.ReduceOp.SUM, stock.ReduceOp.AVG, stock.ReduceOp.MAX, stock.ReduceOp.MIN]


class SharedStaging:
    """Memory that the processes of this machine share."""

    def __init__(self, layout, device):
        descriptor, self.path = tempfile.mkstemp(dir="/dev/shm")
        os.close(descriptor)
        self.nbytes = layout.nbytes
        self.block = self._map(self.path)
        layout.clear(self.block)

    def _map(self, path):
        return torch.from_file(path, shared=True, size=self.nbytes, dtype=torch.uint8)

    def meet(self, group):
        paths = [None] * group.size()
        stock.all_gather_object(paths, self.path, group=group)
        self.peers = [self.block if path == self.path else self._map(path) for path in paths]
        self.bases = [peer.data_ptr() for peer in self.peers]
        stock.barrier(group)
        os.unlink(self.path)


@contextlib.contextmanager
def switched_on(group=None, limits=SMALL, timeout=timedelta(seconds=30), *, tried=False, **how):
    """Switch it on; but if ``tried``, without a first call of each kernel, which takes longer than most tests."""
    low_latency.STAGINGS["gloo"] = SharedStaging
    first = low_latency._try if tried else lambda engine: engine.set_patience(engine.timeout)
    try:
        with (
            mock.patch.object(low_latency, "_try", first),
            safecomm.low_latency(group, limits=limits, timeout=timeout, **how) as on_now,
        ):
            assert on_now.reason == ""
            yield on_now
    finally:
        low_latency.STAGINGS.pop("gloo", None)  # one in another has done it


def of_rank(rank, count, dtype):
    """Return what a rank sends: small multiples of 1/4, whose sums every type holds exactly."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    return (torch.randint(-40, 40, (count,), generator=generator) / 4).to(dtype)


def reduced(tensors, op):
    stacked = torch.stack([tensor.double() for tensor in tensors])
    if op == stock.ReduceOp.SUM:
        return stacked.sum(0)
    if op == stock.ReduceOp.AVG:
        return stacked.mean(0)
    return stacked.amax(0) if op == stock.ReduceOp.MAX else stacked.amin(0)


def same(found, expected):
    """Compare with tolerance for the rounding of AVG alone, which Triton's interpreter cuts off for bf16."""
    return (
        torch.allclose(found.double(), expected.double(), rtol=1e-2, atol=0)
        if found.dtype != torch.float32
        else (torch.allclose(found.double(), expected.double(), rtol=1e-6, atol=0))
    )


# --- results ----------------------------------------------------------------------------------------------------


@on(2, 3, interpreted=True)
def test_all_reduce_gives_the_reduction_on_every_rank_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    calls = [(OPS[0], dtype, count) for dtype in DTYPES for count in (1, 16, 4097, 9000)]
    calls += [(op, dtype, count) for op in OPS[1:] for dtype, count in ((torch.float32, 4100), (torch.bfloat16, 7))]
    with switched_on(tried=True) as ours:
        for op, dtype, count in calls:
            sent = [of_rank(peer, count, dtype) for peer in range(world)]
            tensor = sent[rank].clone()
            assert safecomm.all_reduce(tensor, op=op) is None
            assert same(tensor, reduced(sent, op)), (op, dtype, count)
            everyone = [torch.empty_like(tensor) for _ in range(world)]
            stock.all_gather(everyone, tensor)
            assert all(torch.equal(other, tensor) for other in everyone)
        assert ours.calls == len(calls)


@on(3, interpreted=True)
def test_sums_are_taken_in_fp32_in_the_order_of_the_ranks():
    rank, world = stock.get_rank(), stock.get_world_size()
    with switched_on():
        for count in (2000, 9000):  # by both kernels
            generator = torch.Generator().manual_seed(7)
            sent = torch.randn(world, count, generator=generator)
            tensor = sent[rank].clone()
            safecomm.all_reduce(tensor)
            assert torch.equal(tensor, sent[0] + sent[1] + sent[2])


@on(2, 3, interpreted=True)
def test_gather_and_scatter_give_what_c10d_gives_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    with switched_on() as ours:
        for dtype, count in itertools.product(DTYPES, (1, 16, 4095)):
            data = of_rank(rank, count, dtype)
            out = torch.full((count * world,), 9.0, dtype=dtype)
            getattr(safecomm, GATHER)(out, data)
            assert torch.equal(out, torch.cat([of_rank(peer, count, dtype) for peer in range(world)]))

            sent = [of_rank(peer, count * world, dtype) for peer in range(world)]
            part = torch.full((count,), 9.0, dtype=dtype)
            getattr(safecomm, SCATTER)(part, sent[rank])
            assert torch.equal(part.double(), reduced(sent, OPS[0])[rank * count : (rank + 1) * count])
        assert ours.calls == 18


@on(2, interpreted=True)
def test_in_place_gather_and_scatter_and_odd_addresses():
    rank, world = stock.get_rank(), stock.get_world_size()
    with switched_on() as ours:
        for count, offset in itertools.product((5, 4096), (0, 1)):
            whole = torch.zeros(offset + count * world)[offset:]
            mine = whole[rank * count : (rank + 1) * count]
            mine.copy_(of_rank(rank, count, torch.float32))
            getattr(safecomm, GATHER)(whole, mine)
            assert torch.equal(whole, torch.cat([of_rank(peer, count, torch.float32) for peer in range(world)]))
            getattr(safecomm, SCATTER)(mine, whole)
            assert torch.equal(mine, world * of_rank(rank, count, torch.float32))
        assert ours.calls == 8


def words_of(*words, dtype):
    """Return a tensor that has these words of 4 bytes."""
    return torch.tensor(
        [word - ((word & 1 << 31) << 1) if word > 0 else word for word in words], dtype=torch.int32
    ).view(dtype)


@on(2, interpreted=True)
def test_every_word_arrives_as_it_was_sent_but_for_one_nan_that_arrives_as_another():
    with switched_on():
        for dtype in DTYPES:
            special = [-0.0, 0.0, math.inf, -math.inf, math.nan, -math.nan, torch.finfo(dtype).tiny, 1.0]
            ordinary = torch.tensor([*special, *reversed(special)], dtype=dtype)
            nans = words_of(0xFFFFFFFF, 0x7FFFFFFF, 0x80008000, 0xFFE55A5B, 0x5A5AFFE5, 0x7FE55A5A, dtype=dtype)
            free = words_of(FREE, OTHER, dtype=dtype)
            assert free.isnan()[len(free) // 2 - 1 :: len(free) // 2].all(), "the upper half of each"
            sent = torch.cat([ordinary, nans, free])
            out = torch.empty(2 * len(sent), dtype=dtype)
            getattr(safecomm, GATHER)(out, sent)
            arrived = torch.cat([ordinary, nans, words_of(OTHER, OTHER, dtype=dtype)]).view(torch.uint8).tolist()
            assert out.view(torch.uint8).tolist() == 2 * arrived, "also of this rank's own, so that all have the same"


@on(2, interpreted=True)
def test_the_word_that_means_free_can_be_added_up():
    """By both kernels, on either rank or on both, of all types: it is a NaN, and nobody waits for ever."""
    rank = stock.get_rank()
    limits = LowLatencyLimits(one_shot=64, two_shot=40 * KIB, scatter=0, gather=0)
    with switched_on(limits=limits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, in the interpreter, of a sum that is NaN
        for dtype in DTYPES:
            for words in (1, 16, 5000):
                for ranks in ((0,), (1,), (0, 1)):
                    tensor = words_of(*[FREE] * words, dtype=dtype)
                    nan = tensor.isnan()
                    if rank not in ranks:
                        tensor = torch.ones_like(tensor)
                    safecomm.all_reduce(tensor)
                    assert torch.equal(tensor.isnan(), nan)


@on(2, interpreted=True)
def test_negative_zeros_are_added_up_as_such():
    for limits in (None, LowLatencyLimits(one_shot=0, two_shot=40 * KIB, scatter=0, gather=0)):
        with switched_on(**({} if limits is None else {"limits": limits})) as ours:
            for dtype in DTYPES:
                for op in OPS:
                    tensor = torch.full((2500,), -0.0, dtype=dtype)
                    safecomm.all_reduce(tensor, op=op)
                    assert tensor.signbit().all()
            assert ours.calls


@on(3, interpreted=True)
def test_calls_of_all_kinds_follow_each_other_s8():
    """The phases of a channel take turns over calls of all kinds, types and sizes, which use different channels."""
    rank, world = stock.get_rank(), stock.get_world_size()
    generator = torch.Generator().manual_seed(3)  # the same on every rank
    with switched_on(check=True) as ours:
        for number in range(30):
            kind, size, dtype = (int(torch.randint(0, most, (1,), generator=generator)) for most in (4, 3, 3))
            dtype = DTYPES[dtype]
            count = (3, 2500, 9000)[size] if kind < 2 else (3, 2500, 4000)[size]
            if kind < 2:
                tensor = torch.full((count,), float(rank + number), dtype=dtype)
                work = safecomm.all_reduce(tensor, op=OPS[2 * kind], async_op=bool(number % 2))
                if work is not None:
                    work.wait()
                expected = world - 1 + number if kind else sum(range(world)) + world * number
                assert (tensor == expected).all(), number
            elif kind == 2:
                out = torch.empty(count * world, dtype=dtype)
                getattr(safecomm, GATHER)(out, torch.full((count,), float(rank + number), dtype=dtype))
                assert (out.view(world, -1) == torch.arange(number, number + world, dtype=dtype)[:, None]).all(), number
            else:
                part = torch.empty(count, dtype=dtype)
                getattr(safecomm, SCATTER)(part, torch.full((count * world,), float(rank), dtype=dtype))
                assert (part == sum(range(world))).all(), number
        assert ours.calls == 30
        stock.barrier()
        engine = ENGINES[stock.group.WORLD]
        channels = engine._staging.block[: engine.layout.exact_area].view(torch.int32)
        assert (channels == FREE).all(), "all that was read is cleared"


@on(2, interpreted=True)
def test_a_call_takes_the_next_phase_for_all_programs():
    """Of one by one-shot, several by two-shot, many by a list, and of what is exact: also for those not there."""
    from safecomm.peers.kernels import COUNTERS

    limits = LowLatencyLimits(one_shot=4 * KIB, two_shot=24 * KIB, scatter=12 * KIB, gather=0, exact=4 * KIB)
    with switched_on(limits=limits):
        table = ENGINES[stock.group.WORLD]._table
        counters = table[COUNTERS:][: PROGRAMS + 1]
        begin = counters.clone()  # each kernel was tried
        calls = [
            lambda: safecomm.all_reduce(torch.ones(250)),
            lambda: safecomm.all_reduce(torch.ones(2 * 2048, dtype=torch.bfloat16)),
            lambda: safecomm.reduce_scatter(torch.empty(3000), [torch.ones(3000) for _ in range(2)]),
            lambda: getattr(safecomm, GATHER)(torch.empty(8), torch.ones(4)),
        ]
        for number, call in enumerate(2 * calls, 1):
            call()
            assert ((counters >> 32) - (begin >> 32) + 9 - number).remainder(3).eq(0).all()
            assert ((counters & 0xFFFFFFFF) - (begin & 0xFFFFFFFF)).eq(number).all()


@on(2, 3, interpreted=True)
def test_ranks_that_are_late_at_any_point_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    dice = random.Random(4)  # the same on every rank
    limits = LowLatencyLimits(one_shot=64, two_shot=40 * KIB, scatter=16 * KIB, gather=16 * KIB)
    with switched_on(limits=limits) as ours, slowed("strong", _clear=0.5), slowed(_arrived=0.2, _send=0.1, _next=0.3):
        for number in range(40):
            kind = dice.choice(("reduce", "reduce", "gather", "scatter", "pieces"))
            count = dice.choice((1, 16, 17, 200, 2049) if kind != "pieces" else (17, 2049, 9000))
            mine, total = float(number + rank), number * world + sum(range(world))
            if kind == "reduce":
                tensor = torch.full((count,), mine)
                safecomm.all_reduce(tensor)
                assert (tensor == total).all(), (number, count)
            elif kind == "gather":
                whole = torch.empty(count * world)
                getattr(safecomm, GATHER)(whole, torch.full((count,), mine))
                assert (whole.view(world, -1) == torch.arange(number, number + world)[:, None]).all(), (number, count)
            elif kind == "scatter":
                part = torch.empty(count)
                getattr(safecomm, SCATTER)(part, torch.full((count * world,), mine))
                assert (part == total).all(), (number, count)
            else:  # the longest go through the staging three times
                part = torch.empty(count)
                safecomm.reduce_scatter(part, [torch.full((count,), mine + 100 * to) for to in range(world)])
                assert (part == total + 100 * world * rank).all(), (number, count)
        assert ours.calls == 40


@on(2, interpreted=True)
def test_after_a_timeout_all_is_nan_whatever_a_late_peer_sends():
    """As in the rest of a graph: a rank gives up a call, and its peer sends for that call afterwards."""
    for late in (0, 1):
        with switched_on(timeout=timedelta(milliseconds=300)) as ours:
            ENGINES[stock.group.WORLD].raise_failure = lambda: None
            if stock.get_rank() == 0:
                for number in range(5):
                    if number == 1 + late:
                        signal_to_peers(f"given up {late}")
                        wait_for_signal(f"sent {late}")
                    tensor = torch.full((100,), 10.0 * number)
                    safecomm.all_reduce(tensor)
                    assert tensor.isnan().all(), (late, number)
                signal_to_peers(f"end {late}")
            else:
                wait_for_signal(f"given up {late}")
                safecomm.all_reduce(torch.full((100,), 1.0))
                signal_to_peers(f"sent {late}")
                wait_for_signal(f"end {late}")
            ours._leave(timedelta())()
    low_latency._KEPT.clear()


@on(2, interpreted=True)
def test_a_rank_that_clears_late_has_lost_nothing_of_the_next_call():
    """By the two-shot kernel, whose sections have two parts."""
    rank = stock.get_rank()
    limits = LowLatencyLimits(one_shot=4, two_shot=40 * KIB, scatter=0, gather=0)
    with switched_on(limits=limits, timeout=timedelta(seconds=8)), slowed("strong", _clear=float(rank)):
        for number in range(6):
            for count in (17, 4096):
                tensor = torch.full((count,), float(number + rank))
                safecomm.all_reduce(tensor)
                assert (tensor == 2 * number + 1).all(), (number, count)


@on(2, interpreted=True)
def test_a_gather_whose_input_is_a_part_of_its_output_reads_it_first():
    rank = stock.get_rank()
    with switched_on() as ours:
        whole = torch.full((8,), float(rank))
        getattr(safecomm, GATHER)(whole, whole[:4])
        assert whole.tolist() == [0.0] * 4 + [1.0] * 4
        assert ours.calls == 1


# --- bit for bit ----------------------------------------------------------------------------------------------------


def bits_of(rank, count, dtype):
    """Return what a rank sends: any bits that the type has."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    largest = 2 if dtype is torch.bool else 256
    return torch.randint(0, largest, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def same_bits(found, expected):
    return torch.equal(found.clone().view(torch.uint8), expected.clone().view(torch.uint8))


@on(2, 3, interpreted=True)
def test_exchanges_and_small_gathers_are_exact_in_every_type_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    calls = [(torch.float32, 16), (torch.int64, 700), (torch.uint8, 9), (torch.bool, 4099), (torch.bfloat16, 5000)]
    calls += [(torch.float16, 3), (torch.float64, 1), (torch.int8, 64)]
    with switched_on(limits=EXACT, tried=True) as ours:
        for dtype, count in calls:
            sent = [bits_of(peer, count * world, dtype) for peer in range(world)]
            offset = count % 2  # also at odd addresses
            out = torch.zeros(offset + count * world, dtype=dtype)[offset:]
            given = torch.cat([sent[rank][:offset], sent[rank]])[offset:]
            for _ in range(3):
                out.zero_()
                assert safecomm.all_to_all_single(out, given) is None
                parts = [one[rank * count : (rank + 1) * count] for one in sent]
                assert same_bits(out, torch.cat(parts)), (dtype, count)
            getattr(safecomm, GATHER)(out, given[:count])
            assert same_bits(out, torch.cat([one[:count] for one in sent])), (dtype, count)
        whole = torch.full((2 * world,), float(rank))
        safecomm.all_to_all_single(whole, whole)  # in place
        assert whole.tolist() == [float(peer) for peer in range(world) for _ in range(2)]
        special = torch.tensor([-0.0, math.nan, math.inf])
        special.view(torch.int32)[1] += 5  # a payload
        out = torch.empty(3 * world)
        work = getattr(safecomm, GATHER)(out, special, async_op=True)
        work.wait()
        assert same_bits(out, special.repeat(world))
        assert ours.calls == 4 * len(calls) + 2


@on(2, 3, interpreted=True)
def test_exact_calls_of_ranks_that_are_late_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    dice = random.Random(5)  # the same on every rank
    how = {"limits": EXACT, "timeout": timedelta(seconds=8)}
    with switched_on(**how) as ours, slowed(_send=0.3, _arrived=0.3, _next=0.3):
        for number in range(20):
            count = dice.choice((1, 5, 1024, 3000))
            given = torch.arange(world, dtype=torch.int32).repeat_interleave(count) + 10 * rank + 100 * number
            out = torch.zeros_like(given)
            safecomm.all_to_all_single(out, given)
            expected = torch.arange(world, dtype=torch.int32).repeat_interleave(count) * 10 + rank + 100 * number
            assert torch.equal(out, expected), (number, count)
        assert ours.calls == 20, ours.calls


@on(2, interpreted=True)
def test_exchanges_that_ranks_can_not_agree_on_are_c10d_s_s8():
    rank = stock.get_rank()
    with switched_on(limits=EXACT) as ours:
        given = torch.full((6,), rank, dtype=torch.int32)
        out = torch.empty(6, dtype=torch.int32)
        # By position and by name.
        safecomm.all_to_all_single(out, given, [2, 4] if rank else [4, 2], [4, 2] if rank == 0 else [2, 4])
        assert sorted(out.tolist()) == ([0, 0, 0, 0, 1, 1] if rank == 0 else [0, 0, 1, 1, 1, 1])
        sizes = torch.tensor([3, 3]).numpy()
        safecomm.all_to_all_single(out, given, sizes, sizes)
        safecomm.all_to_all_single(out, given, output_split_sizes=[3, 3], input_split_sizes=[3, 3])
        assert out.tolist() == [0, 0, 0, 1, 1, 1]
        large = torch.full((6000 * 2,), float(rank))
        safecomm.all_to_all_single(torch.empty_like(large), large)
        assert ours.calls == 0
        safecomm.all_to_all_single(out.view(1, 6), given.view(1, 6))  # whose first dimension has no two parts
        for arguments in ((out, given.double()), (out, None), ([out], given)):
            errors = []
            for library in (stock, safecomm):
                with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                    library.all_to_all_single(*arguments)
                errors.append((error.type, str(error.value)[:40]))
            assert errors[0] == errors[1]
        assert ours.calls == 0
        safecomm.all_to_all_single(out, given, [], None)
        assert ours.calls == 1


# --- list forms ---------------------------------------------------------------------------------------------------


def laid_out(how, tensors):
    """Return tensors with the values of ``tensors`` that lie as ``how`` says."""
    whole = torch.stack(tensors)
    if how == "slices":
        return list(whole.unbind())
    if how == "strided":
        return [torch.stack([one, one], -1)[..., 0] for one in tensors]
    if how == "negated":
        return [torch.complex(one, -one).conj().imag for one in tensors]  # whose copy has another sign than its bits
    return [one.clone() for one in tensors]


@on(2, 3, interpreted=True)
def test_lists_are_gathered_straight_and_bit_for_bit_s8():
    rank, world = stock.get_rank(), stock.get_world_size()
    calls = [(dtype, count, "pieces") for dtype in (*DTYPES, torch.int64, torch.bool) for count in (1, 17, 9000)]
    calls += [(torch.float32, 40, how) for how in ("slices", "strided", "negated")]
    calls += [(torch.float32, 40, ("pieces", "slices", "strided")[rank])]  # each rank as it likes
    with switched_on() as ours:
        for dtype, count, how in calls:
            sent = [of_rank(peer, count, dtype) for peer in range(world)]
            sent[0][0] = -0.0
            out = laid_out(how, [torch.zeros_like(one) for one in sent])
            given = sent[rank].clone()
            assert safecomm.all_gather(out, given) is None
            for one, expected in zip(out, sent, strict=True):
                assert torch.equal(one, expected), (dtype, count, how)
                assert how == "negated" or not dtype.is_floating_point or torch.equal(one.signbit(), expected.signbit())
            work = safecomm.all_gather(out, given.clone(), async_op=True)
            assert isinstance(work, stock.Work)
            work.wait()
            assert all(map(torch.equal, out, sent))
        assert ours.calls == 2 * len(calls)
        assert safecomm.pending() == []


@on(2, interpreted=True)
def test_a_list_may_overlap_itself_and_the_input_s8():
    """c10d writes one tensor after the other, after it has read the input."""
    rank = stock.get_rank()
    with switched_on() as ours:
        memory = torch.full((6,), float(rank))
        safecomm.all_gather([memory[0:4], memory[2:6]], memory[1:5])
        assert memory.tolist() == [0, 0, 1, 1, 1, 1]
        out = [torch.full((4,), float(rank)) for _ in range(2)]
        safecomm.all_gather(out, out[rank])  # in place
        assert [one.tolist() for one in out] == [[0.0] * 4, [1.0] * 4]
        safecomm.all_gather(out, out[1 - rank])
        assert [one.tolist() for one in out] == [[1.0] * 4, [0.0] * 4]
        assert ours.calls == 3


def test_tensors_that_a_peer_may_still_read_are_not_received_into_s1():
    """gloo sends all before it receives any, so that only the decision shows it here."""
    out = [torch.zeros(4) for _ in range(3)]
    assert list_exchange.alike(out, torch.zeros(4), 0, 3, written=True)
    assert list_exchange.alike(out, out[0], 0, 3, written=True)  # in place
    assert not list_exchange.alike(out, out[1], 0, 3, written=True)
    memory = torch.zeros(16)
    apart = [memory[:4], memory[8:12]]
    assert list_exchange.alike(apart, memory[4:8], 0, 2, written=True)
    assert not list_exchange.alike(apart, memory[2:6], 0, 2, written=True)
    assert list_exchange.alike(apart, memory[2:6], 0, 2, written=False)


@on(2, 3, interpreted=True)
def test_lists_are_reduced_in_the_order_of_the_ranks():
    rank, world = stock.get_rank(), stock.get_world_size()
    calls = [(OPS[0], dtype, count, "pieces") for dtype in DTYPES for count in (1, 16, 4097)]
    calls += [
        (op, torch.float32, 4100, how) for op, how in zip(OPS, ("slices", "strided", "negated", "pieces"), strict=True)
    ]
    with switched_on() as ours:
        for op, dtype, count, how in calls:
            sent = [[of_rank(world * peer + to, count, dtype) for to in range(world)] for peer in range(world)]
            expected = reduced([lists[rank] for lists in sent], op)
            given = laid_out(how, sent[rank])
            output = torch.empty(count, dtype=dtype)
            assert safecomm.reduce_scatter(output, given, op=op) is None
            assert same(output, expected), (op, dtype, count, how)
            assert all(map(torch.equal, given, sent[rank]))
            output.zero_()
            safecomm.reduce_scatter(output, given, op=op, async_op=True).wait()
            assert same(output, expected), (op, dtype, count, how)
            safecomm.reduce_scatter(given[rank] if how == "pieces" else output, given, op=op)  # in place
            assert how != "pieces" or same(given[rank], expected), (op, dtype, count)
        for count in (9600, 17_000):
            memory = torch.zeros(count + 4000)
            memory[:count] = of_rank(rank, count, torch.float32)
            total = reduced([of_rank(peer, count, torch.float32) for peer in range(world)], OPS[0])
            safecomm.reduce_scatter(
                memory[4000:], [memory[:count] for _ in range(world)]
            )  # over a part of what it reads
            assert same(memory[4000:], total)
        assert ours.calls == 3 * len(calls) + 2
        assert safecomm.pending() == []


@on(2, interpreted=True)
def test_lists_that_ranks_do_not_exchange_are_c10d_s_s8():
    rank = stock.get_rank()
    with switched_on() as ours:
        out = [torch.zeros(3, dtype=torch.complex64) for _ in range(2)]
        safecomm.all_gather(out, torch.full((3,), 1j * rank))
        assert [one[0].item() for one in out] == [0, 1j]
        total = torch.zeros(3, dtype=torch.int32)
        safecomm.reduce_scatter(total, [torch.full((3,), rank + to, dtype=torch.int32) for to in range(2)])
        assert total.tolist() == [1 + 2 * rank] * 3
        total = torch.zeros(3)
        safecomm.reduce_scatter(total, [torch.full((3,), rank + 2.0)] * 2, op=stock.ReduceOp.PRODUCT)
        assert total.tolist() == [6] * 3
        safecomm.all_gather([torch.zeros(0), torch.zeros(0)], torch.zeros(0))
        for bad in (
            [torch.zeros(3)],
            [torch.zeros(3), torch.zeros(3, dtype=torch.int64)],
            (torch.zeros(3), torch.zeros(3)),
        ):
            errors = []
            for library in (stock, safecomm):
                with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                    library.all_gather(bad, torch.zeros(3))
                errors.append((error.type, str(error.value)))
            assert errors[0] == errors[1]
        assert ours.calls == 0
        assert safecomm.pending() == []


@on(2, interpreted=True)
def test_tensors_of_any_kind_may_be_in_a_list_s8():
    rank, world = stock.get_rank(), stock.get_world_size()

    class Listed(list):
        pass

    with switched_on() as ours:
        for shape in ((5,), (), (3, 2, 700), (2, 3, 3000)):  # the last is sent by the backend
            kinds = [
                lambda one: AsyncCollectiveTensor(one),
                lambda one: torch.nn.Parameter(one),
                lambda one: one.clone().requires_grad_() * 1,
                lambda one: one[..., None].expand(*one.shape, 2)[..., 1] if one.dim() else one,
            ]
            sent = [torch.full(shape, 1.0 + rank + 10 * to) for to in range(world)]
            for kind in kinds:
                output = torch.empty(shape)
                safecomm.reduce_scatter(output, Listed(map(kind, sent)))
                assert (output == 3 + 20 * rank).all(), (shape, kind)
            out = [torch.zeros(shape), torch.zeros(shape)]
            versions = [one._version for one in out]
            safecomm.all_gather(Listed(out), sent[0])
            assert [one.unique().item() for one in out] == [1, 2]
            assert all(one._version > before for one, before in zip(out, versions, strict=True))
        assert ours.calls == 20, ours.calls
        errors = []
        for library in (stock, safecomm):
            with pytest.raises(RuntimeError) as error:
                library.all_gather([torch.zeros(5, requires_grad=True) for _ in range(2)], torch.zeros(5))
            errors.append(str(error.value))
        assert errors[0] == errors[1]
        assert safecomm.pending() == []


@on(2, interpreted=True)
def test_an_engine_of_a_group_of_its_own_is_the_only_one_where_it_is_on_everywhere_s7():
    ENGINES[None] = low_latency._Everywhere(None)
    before = list(captures.BEFORE)
    try:
        with safecomm.patched():  # the calls that switching on makes come back to us
            for _ in range(2):
                with switched_on():
                    assert len(captures.BEFORE) == len(before) + 1
                assert before == captures.BEFORE
                assert set(ENGINES) == {None}
    finally:
        ENGINES.clear()


@on(2, interpreted=True)
def test_what_is_received_for_a_list_comes_from_the_arena_and_goes_back():
    rank = stock.get_rank()
    with switched_on(), safecomm.use_arena("1MiB", device="cpu") as arena:
        output = torch.empty(17_408)
        safecomm.reduce_scatter(output, [torch.full((17_408,), 1.0 + rank)] * 2)
        assert output.unique().tolist() == [3.0]
        assert arena.stats().high_water == 4 * 17_408
        assert arena.stats().in_use == 0
        safecomm.all_gather([torch.empty(17_408), torch.empty(17_408)], output)
        assert arena.stats().high_water == 4 * 17_408  # a gather needs none


# --- which calls ----------------------------------------------------------------------------------------------


@on(2, interpreted=True)
def test_other_calls_go_where_they_went_before_s8():
    with switched_on() as ours:
        for tensor in (
            torch.ones(5, dtype=torch.int32),
            torch.ones(5, dtype=torch.float64),
            torch.ones(5, dtype=torch.complex64),
            torch.ones(40 * KIB // 4 + 1),
            torch.ones(0),
        ):
            safecomm.all_reduce(tensor)
            assert (tensor == 2).all()
        tensor = torch.ones(4)
        safecomm.all_reduce(tensor, op=stock.ReduceOp.PRODUCT)
        safecomm.broadcast(tensor, 0)
        assert (tensor == 1).all()
        with safecomm._coalescing_manager():
            safecomm.all_reduce(tensor)
        assert (tensor == 2).all()
        other = stock.new_group([0, 1])
        safecomm.all_reduce(tensor, group=other)
        assert ours.calls == 0


@on(2, interpreted=True)
def test_wrong_arguments_raise_what_c10d_raises_and_nothing_is_held_s8():
    part, whole = torch.ones(4), torch.ones(8)
    calls = [
        ("all_reduce", ([part],)),
        ("all_reduce", (None,)),
        (GATHER, (part, part)),
        (GATHER, (whole, part.double())),
        (SCATTER, (whole, part)),
        ("all_reduce", (part, stock.ReduceOp.SUM, None, False, 5)),
    ]
    with switched_on() as ours:
        for name, arguments in calls:
            with pytest.raises(Exception) as stocks:  # noqa: PT011
                getattr(stock, name)(*arguments)
            with pytest.raises(type(stocks.value)) as found:
                getattr(safecomm, name)(*arguments)
            assert str(found.value)[:12] == str(stocks.value)[:12]
        assert ours.calls == 0
    assert safecomm.pending() == []


def test_limits_say_which_kernel():
    limits = LowLatencyLimits(one_shot=100, two_shot=1000, scatter=0, gather=50)
    assert [limits.kernel("all_reduce", nbytes) for nbytes in (100, 101, 1001)] == ["one_shot", "two_shot", None]
    assert limits.kernel("reduce_scatter", 1) is None
    assert limits.kernel("all_gather", 50) == "one_shot"
    assert limits.kernel("all_to_all", 1) is None
    limits = LowLatencyLimits(one_shot=100, two_shot=1000, scatter=100, gather=50, exact=20, exchange=9)
    assert [limits.kernel("all_gather", nbytes) for nbytes in (20, 21, 51)] == ["exact", "one_shot", None]
    assert [limits.kernel("all_to_all", nbytes) for nbytes in (9, 10)] == ["exact", None]
    assert [limits.kernel(name, 1) for name in ("all_reduce", "reduce_scatter")] == ["one_shot", "one_shot"]
    for wrong in (-1, 1 << 30, 2.5):
        with pytest.raises(ValueError, match="expected bytes"):
            LowLatencyLimits(one_shot=wrong, two_shot=0, scatter=0, gather=0)


def test_limits_are_read_from_a_file(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"low_latency": {"2": {"one_shot": 1, "two_shot": 2, "scatter": 3, "gather": 4}}}))
    assert low_latency_limits.read(path, 2) == LowLatencyLimits(one_shot=1, two_shot=2, scatter=3, gather=4)
    assert low_latency_limits.read(path, 4) is None
    for wrong in ("", "{}", '{"low_latency": {"2": {"one_shot": 1}}}', '{"low_latency": []}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="no limits of low_latency"):
            low_latency_limits.read(path, 2)


@on(2, interpreted=True)
def test_only_synchronous_calls_are_taken_beyond_what_is_for_asynchronous_ones():
    rank = stock.get_rank()
    bounds = low_latency_limits.ASYNCHRONOUS
    before = dict(bounds)
    calls_of = {
        table.REDUCE: lambda part, whole, **how: safecomm.all_reduce(part, **how),
        table.SCATTER: lambda part, whole, **how: getattr(safecomm, SCATTER)(part, whole, **how),
        table.GATHER: lambda part, whole, **how: getattr(safecomm, GATHER)(whole, part, **how),
    }
    counts = {table.REDUCE: 1024, table.SCATTER: 1500, table.GATHER: 2000}
    bounds.update({collective: 4 * count for collective, count in counts.items()})
    try:
        with switched_on() as ours:
            for collective, call in calls_of.items():
                for more, taken in ((0, 2), (1, 1)):
                    part = of_rank(rank, counts[collective] + more, torch.float32)
                    calls = ours.calls
                    call(part, torch.zeros(2 * len(part)))
                    call(part, torch.zeros(2 * len(part)), async_op=True).wait()
                    assert ours.calls == calls + taken, collective
    finally:
        bounds.update(before)


@on(2, interpreted=True)
def test_no_kernel_has_more_programs_than_are_counted():
    """Also not that of lists, which uses more channels than the one-shot kernel."""
    from safecomm.peers import kernels

    limits = LowLatencyLimits(one_shot=8 * KIB, two_shot=48 * KIB, scatter=8 * KIB, gather=0)
    with mock.patch.object(kernels, "launcher", wraps=kernels.launcher) as launcher, switched_on(limits=limits):
        safecomm.all_reduce(torch.ones(12 * 1024))
        safecomm.reduce_scatter(torch.empty(8 * 1024), [torch.ones(8 * 1024) for _ in range(2)])
        stock.barrier()
    needed = room.needed(limits.layout(2), room.most_threads(2), multiprocessors=1, threads=2048)
    counted = max(round(part / program) for part, program in needed.kernels)
    assert max(call.args[2] for call in launcher.call_args_list) == counted == 2 + 12


@on(2, interpreted=True)
def test_lists_above_what_was_measured_are_sent_by_the_backend():
    with (
        mock.patch.object(engine_module, "LIST_LARGEST", 8 * KIB),
        mock.patch.object(list_exchange, "scatter", wraps=list_exchange.scatter) as sent,
        switched_on(),
    ):
        for more in (0, 1):
            out = torch.empty(2048 + more)
            before = sent.call_count
            safecomm.reduce_scatter(out, [torch.ones_like(out) for _ in range(2)])
            assert (out == 2).all()
            assert sent.call_count == before + more


def test_there_are_limits_for_up_to_eight_ranks():
    assert [low_latency_limits.defaults(world) is None for world in (2, 3, 4, 5, 8, 9)] == [False] * 5 + [True]


# --- memory ---------------------------------------------------------------------------------------------------------


@given(st.integers(2, 8), st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 17))
def test_channels_and_packets_lie_behind_each_other_and_hold_the_largest_call(world, one_shot, two_shot, exact):
    layout = StagingLayout(world, one_shot, two_shot, exact)
    # A slot of each channel for the one-shot kernel, and for the two-shot one a slot for every rank of each two.
    assert layout.channels * SLOT >= one_shot
    assert layout.channels // 2 * SLOT * world >= two_shot
    assert layout.channels <= max(-(-one_shot // SLOT), 2 * -(-two_shot // (SLOT * world)))
    end = layout.channels * 3 * (world - 1) * SLOT
    assert layout.exact_area == end
    assert layout.stride * 3 == end
    # Three phases, in each of which every peer has packets that are twice what they carry.
    assert layout.exact_stride >= 2 * exact * (world - 1)
    assert layout.begun == end + 3 * layout.exact_stride
    assert layout.nbytes - layout.begun == SLOT
    ring = StagingLayout(world, one_shot, two_shot, exact, ring=True)
    places = 256 * 2 * 2 * (world - 1)
    assert (ring.ring_area, ring.ring_flags) == (layout.nbytes, layout.nbytes + places * ring.ring_piece)
    assert ring.nbytes == ring.ring_flags + places * 32


def test_the_bytes_of_staging_are_known_before():
    ring = 256 * 2 * 2 * (16 * KIB + 32)
    assert low_latency_limits.defaults(2).nbytes(2) == (24 * KIB + 6 * 256 + 4) * KIB + ring < 48 * KIB * KIB
    limits = LowLatencyLimits(one_shot=8 * KIB, two_shot=64 * KIB, scatter=0, gather=16 * KIB)
    assert limits.nbytes(4) == 3 * 3 * max(16 * KIB, 2 * 64 * KIB // 4) + SLOT
    assert all(limits.nbytes(world) <= 64 * KIB * KIB for world, limits in low_latency_limits.DEFAULTS.items())


@on(2, interpreted=True)
def test_the_memory_goes_when_all_ranks_have_switched_it_off_s7():
    import gc
    import weakref

    with switched_on() as ours:
        assert ours.nbytes > StagingLayout(2, 16 * KIB, 40 * KIB).nbytes
        block = weakref.ref(ENGINES[stock.group.WORLD]._staging)
        tensor = torch.ones(4)
        safecomm.all_reduce(tensor)
    gc.collect()
    assert block() is None
    assert not low_latency._KEPT
    assert not ENGINES
    assert ours.nbytes == ours.calls == 0
    safecomm.all_reduce(tensor)
    assert id(stock.group.WORLD) in ROUTES.fast, "calls are direct again"


@on(2, interpreted=True)
def test_memory_that_a_rank_may_still_store_into_is_kept_s1():
    with contextlib.suppress(ZeroDivisionError), switched_on():
        raise ZeroDivisionError
    assert len(low_latency._KEPT) == 1
    low_latency._KEPT.clear()
    assert not ENGINES


# --- handles ------------------------------------------------------------------------------------------------------


@on(2, interpreted=True)
def test_asynchronous_calls_return_a_work_s1():
    with switched_on() as ours:
        tensor = torch.ones(100)
        work = safecomm.all_reduce(tensor, async_op=True)
        assert isinstance(work, stock.Work)
        assert [entry.nbytes for entry in safecomm.pending()] == [400]
        assert work.wait()
        assert (tensor == 2).all()
        assert safecomm.pending() == []
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        work = safecomm.all_reduce(tensor, async_op=True)
        assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
        work.wait(timedelta(seconds=1))
        assert ours.calls == 2
        del work
        safecomm.drain()


# --- when ranks differ, or a peer does not come ---------------------------------------------------------------------


@on(2, interpreted=True)
def test_a_peer_that_does_not_come_is_an_error_with_the_call_and_no_result():
    rank = stock.get_rank()
    with switched_on(timeout=timedelta(milliseconds=300)) as ours:
        tensor = torch.ones(5000)
        if rank == 0:
            safecomm.all_reduce(tensor)  # here
            assert tensor.isnan().all()
            with pytest.raises(safecomm.PeerTimeoutError, match=r"all_reduce called at .*test_low_latency.py") as found:
                safecomm.all_reduce(torch.ones(1))
            assert f"rank 0 of group {stock.group.WORLD.group_name!r}" in str(found.value)
            with pytest.raises(safecomm.PeerTimeoutError):
                safecomm.all_reduce(torch.ones(1))
            signal_to_peers("timed out")
        else:
            wait_for_signal("timed out")
        ours._leave(timedelta())()
    assert len(low_latency._KEPT) == 1
    low_latency._KEPT.clear()
    tensor = torch.ones(2)
    stock.all_reduce(tensor)
    assert (tensor == 2).all()


@on(2, interpreted=True)
def test_a_wait_raises_for_a_late_peer():
    rank = stock.get_rank()
    with switched_on(timeout=timedelta(milliseconds=300)) as ours:
        if rank == 0:
            work = safecomm.all_reduce(torch.ones(5), async_op=True)
            with pytest.raises(safecomm.PeerTimeoutError):
                work.wait()
            assert isinstance(work.exception(), safecomm.PeerTimeoutError)
            assert not work.is_success()
            del work
            safecomm.drain(wait=True)
            signal_to_peers("waited")
        else:
            wait_for_signal("waited")
        ours._leave(timedelta())()
    low_latency._KEPT.clear()


@on(2, interpreted=True)
def test_a_loop_that_makes_no_calls_can_ask():
    rank = stock.get_rank()
    with switched_on(timeout=timedelta(milliseconds=300)) as ours:
        ours.check()
        if rank == 0:
            safecomm.all_reduce(torch.ones(5))
            with pytest.raises(safecomm.PeerTimeoutError, match="all_reduce called at"):
                ours.check()
            signal_to_peers("asked")
        else:
            wait_for_signal("asked")
        ours._leave(timedelta())()
        ours.check()  # it is off
    low_latency._KEPT.clear()


@on(2, interpreted=True)
def test_a_slow_peer_is_warned_of_before_it_fails():
    from safecomm.peers import strong

    rank = stock.get_rank()
    with switched_on() as ours:
        ours._engine._table[3] = 1000  # ns in place of 5 s
        clock, looks = strong._clock, itertools.count()

        def counted():
            if next(looks) % 10 == 5:  # it has waited for longer than that
                signal_to_peers(f"waiting {number}")
            return clock()

        strong._clock = counted
        for number in range(2):
            tensor = torch.ones(5)
            if rank == 0:
                with Log() as records:
                    safecomm.all_reduce(tensor)
                    ours.check()
                    ours.check()
                assert len(records.messages) == 1, number
                assert re.search(r"rank 0 of group .* all_reduce called at .*test_low_latency.py", records.messages[0])
            else:
                wait_for_signal(f"waiting {number}")
                safecomm.all_reduce(tensor)
            assert (tensor == 2).all()
        strong._clock = clock


def the_first_call(tensor):
    safecomm.all_reduce(tensor)


@on(2, interpreted=True)
def test_a_peer_that_is_only_slow_gets_nothing_wrong():
    """Calls that were launched after the one that has given up send nothing: the peer may still be in that one."""
    rank = stock.get_rank()
    with switched_on(timeout=timedelta(milliseconds=300)) as ours:
        engine = ENGINES[stock.group.WORLD]
        tensors = [torch.full((250,), 10.0 * number + rank) for number in range(5)]  # of one program
        if rank == 0:
            look, engine.raise_failure = engine.raise_failure, lambda: None  # the host has not looked yet
            the_first_call(tensors[0])
            for tensor in tensors[1:]:
                safecomm.all_reduce(tensor)
            assert all(tensor.isnan().all() for tensor in tensors)
            engine.raise_failure = look
            with pytest.raises(safecomm.PeerTimeoutError, match="in the_first_call:"):
                safecomm.all_reduce(torch.ones(1))
            signal_to_peers("launched all")
        else:
            wait_for_signal("launched all")
            safecomm.all_reduce(tensors[0])
            assert (tensors[0] == 1).all()
            safecomm.all_reduce(tensors[1])
            assert tensors[1].isnan().all()
            with pytest.raises(safecomm.PeerTimeoutError):
                safecomm.all_reduce(tensors[2])
        stock.barrier()
        ours._leave(timedelta())()
    low_latency._KEPT.clear()


@on(2, interpreted=True)
def test_what_may_differ_between_ranks_decides_nothing():
    rank = stock.get_rank()
    with switched_on() as ours:
        tensor = torch.ones(3, requires_grad=bool(rank))
        safecomm.all_reduce(tensor)
        assert (tensor == 2).all()
        tensor = torch.full((3,), float(rank))
        op = pickle.loads(pickle.dumps(stock.ReduceOp(stock.ReduceOp.MAX))) if rank else stock.ReduceOp.MAX
        safecomm.all_reduce(tensor, op=op)
        assert (tensor == 1).all()
        safecomm.all_reduce(tensor[1:] if rank else torch.ones(2))  # at an odd address on one rank
        assert ours.calls == 3


@on(2, interpreted=True)
def test_ranks_that_differ_are_told_so():
    rank = stock.get_rank()
    with switched_on(check=True) as ours:
        safecomm.all_reduce(torch.ones(3))
        with pytest.raises(safecomm.LowLatencyError, match=r"rank 0: all_reduce of 3 .*rank 1: all_reduce of 4 "):
            safecomm.all_reduce(torch.ones(3 + rank))
        with pytest.raises(safecomm.LowLatencyError, match=r"rank 0: .* by a kernel; rank 1: .* by the backend"):
            safecomm.all_reduce(torch.ones(3 if rank == 0 else 40 * KIB))
        with pytest.raises(safecomm.LowLatencyError, match=r"rank 0: .*SUM.*rank 1: .*MAX"):
            safecomm.all_reduce(torch.ones(3), op=OPS[2 * rank])
        tensor = torch.ones(3)
        safecomm.all_reduce(tensor)
        assert (tensor == 2).all(), "nothing was launched"
        assert ours.calls == 2


@on(2, interpreted=True)
def test_ranks_that_ask_for_different_things_are_told_so():
    rank = stock.get_rank()
    with (
        pytest.raises(safecomm.LowLatencyError, match="the ranks ask for different things"),
        switched_on(timeout=timedelta(seconds=5 + rank)),
    ):
        pass
    assert not ENGINES


@on(2, interpreted=True)
def test_limits_that_one_rank_can_not_read_are_an_error_on_all():
    with (
        pytest.raises(safecomm.LowLatencyError, match=r"rank 1: .*no-such-file"),
        switched_on(limits="no-such-file" if stock.get_rank() else SMALL),
    ):
        pass
    assert not ENGINES


@on(2, interpreted=True)
def test_the_default_device_does_not_matter():
    with torch.device("meta"), switched_on() as ours:
        tensor = torch.ones(3, device="cpu")
        safecomm.all_reduce(tensor)
        assert (tensor == 2).all()
        assert ours.calls == 1


@on(2, interpreted=True)
def test_on_twice_is_an_error():
    with switched_on():
        with pytest.raises(safecomm.LowLatencyError, match="is on for this group already"):
            safecomm.low_latency().enable()
        tensor = torch.ones(3)
        safecomm.all_reduce(tensor)
        assert (tensor == 2).all()


# --- groups that stay as they are -----------------------------------------------------------------------------------


@on(2)
def test_a_group_that_it_can_not_do_anything_for_stays_as_it_is():
    with Log() as records, safecomm.low_latency() as ours:
        assert ours.reason == "its backend is gloo, and not nccl"
        tensor = torch.ones(3)
        safecomm.all_reduce(tensor)
        assert (tensor == 2).all()
        assert ours.calls == ours.nbytes == 0
    assert len(records.messages) == 1
    assert "stays as it is: its backend is gloo" in records.messages[0]
    assert not ENGINES


@on(2, interpreted=True)
def test_one_rank_that_can_not_keeps_all_as_they_are():
    class Broken(SharedStaging):
        def __init__(self, layout, device):
            if stock.get_rank() == 1:
                raise RuntimeError("no memory left")
            super().__init__(layout, device)

    class Unreachable(SharedStaging):
        def meet(self, group):
            super().meet(group)
            if stock.get_rank() == 0:
                raise RuntimeError("no way there")

    class Wrong(SharedStaging):
        def meet(self, group):
            super().meet(group)
            self.bases = [self.bases[stock.get_rank()]] * 2

    reasons = {Broken: "memory that peers can store into", Unreachable: "reach", Wrong: "first"}
    low_latency.FIRST_PATIENCE, patience = timedelta(milliseconds=300), low_latency.FIRST_PATIENCE
    for staging, reason in reasons.items():
        low_latency.STAGINGS["gloo"] = staging
        try:
            ours = safecomm.low_latency(limits=SMALL).enable()
        finally:
            del low_latency.STAGINGS["gloo"]
        assert reason in ours.reason
        assert not ENGINES
        tensor = torch.ones(3)
        safecomm.all_reduce(tensor)
        assert (tensor == 2).all()
        ours.disable()
    low_latency._KEPT.clear()
    low_latency.FIRST_PATIENCE = patience


class Nvml:
    """Stands in for NVML: which of four GPUs are linked, and what fails."""

    def __init__(self, linked=lambda a, b: True, failing=""):
        self.linked, self.failing, self.open = linked, failing, 0

    def nvmlInit_v2(self):
        self.open += 1
        return 9 * (self.failing == "init")

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        assert name.startswith(b"GPU-")
        handle._obj.value = int(name[4:])
        return 9 * (self.failing == "handle")

    def nvmlDeviceGetP2PStatus(self, one, other, index, status):
        assert index == 2  # NVML_P2P_CAPS_INDEX_NVLINK
        status._obj.value = 0 if self.linked(one.value, other.value) else 5
        return 9 * (self.failing == "status")


def test_gpus_that_nvlink_does_not_connect_are_found(monkeypatch):
    def asked(nvml):
        monkeypatch.setattr(links.ctypes, "CDLL", lambda name: nvml)
        found = links.not_linked(["1", "GPU-2", "3"])
        assert nvml.open == (1 if nvml.failing == "init" else 0)
        return found

    assert asked(Nvml()) == ""
    assert asked(Nvml(lambda a, b: (a, b) != (3, 2))) == "no NVLink connects the GPUs 3 and GPU-2"
    reasons = {"init": "asked: its error 9", "handle": "the GPU 1: its error 9", "status": "1 and GPU-2"}
    for failing, said in reasons.items():
        assert said in asked(Nvml(failing=failing))
    monkeypatch.undo()
    monkeypatch.setattr(links, "LIBRARY", "no-such-library.so")
    assert "NVML can't be asked" in links.not_linked(["1", "2"])


def test_without_nvlink_everywhere_the_limits_by_default_are_not_used(monkeypatch):
    layout = low_latency_limits.defaults(2).layout(2)
    monkeypatch.setattr(low_latency._torch, "not_linked", lambda devices: f"no NVLink connects {devices}")
    reason = low_latency._not_here(0, ["a", "b"], layout, default=True)
    assert reason.startswith("no NVLink connects ['a', 'b'], and its limits by default are for NVLink")
    assert low_latency._not_here(0, ["a", "b"], layout, default=False) == ""
    assert low_latency._not_here(low_latency.HOST, ["a", "b"], layout, default=True) == ""


def test_a_group_that_has_no_room_beside_others_has_half_of_the_threads_or_none(monkeypatch):
    class Properties:
        multi_processor_count = 132
        max_threads_per_multi_processor = 2048

    def engine(index, world):
        one = low_latency.Engine.__new__(low_latency.Engine)
        one.index, one.room = index, low_latency._room(index, layouts[world], room.most_threads(world))
        return one

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    layouts = {world: low_latency_limits.defaults(world).layout(world) for world in (2, 4, 8)}
    elsewhere = engine(1, 8)
    for here, world, part in (
        ([], 8, 1), ([2], 2, 1), ([4], 4, 1), ([2], 4, 0.5), ([4], 2, 0.5), ([2, 2], 2, 0), ([8], 2, 0), ([8], 8, 0)
    ):  # fmt: skip
        engines = dict(enumerate([elsewhere, *(engine(0, one) for one in here)]))
        monkeypatch.setattr(low_latency, "ENGINES", engines)
        assert low_latency._threads(0, layouts[world]) == part * room.most_threads(world), (here, world)
    Properties.max_threads_per_multi_processor = 1024  # as Turing has: two of two ranks do not fit
    for here, part in (([], 1), ([engine(0, 2)], 0)):
        monkeypatch.setattr(low_latency, "ENGINES", dict(enumerate(here)))
        assert low_latency._threads(0, layouts[2]) == part * room.most_threads(2)
    assert low_latency._threads(low_latency.HOST, layouts[2]) == room.most_threads(2)


def test_programs_that_are_smaller_may_leave_too_little_on_each_multiprocessor():
    """13 of 16th on each, by a group of small programs: no room for one of another group, which is a quarter."""
    large = room.Room(((0.05, 1 / 4),), ring=0.0)
    assert not room.fit([room.Room(((13 / 16, 1 / 16),), ring=0.0), large])
    assert room.fit([room.Room(((12 / 16, 1 / 16),), ring=0.0), large])
    assert room.fit([room.Room(((13 / 16, 1 / 4),), ring=0.0), large])


MULTIPROCESSORS = 6
LAYOUTS = st.tuples(
    st.sampled_from([2, 4, 8]), st.sampled_from([0, 4, 64, 300, 4000]), st.sampled_from([0, 16, 500]), st.booleans(),
    st.sampled_from([1, 2, 4]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(LAYOUTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_fits_has_room_wherever_the_programs_of_others_are(groups, dice):
    """Of each group a kernel of one size runs, or the ring's, and programs begin in any order, in any place."""
    rooms = [
        room.needed(
            StagingLayout(world, one_shot * KIB, two_shot * KIB, ring=ring), room.most_threads(world) // 22 // less,
            MULTIPROCESSORS, 2048,
        )
        for world, one_shot, two_shot, ring, less in groups
    ]  # fmt: skip
    assume(room.fit(rooms))
    for _ in range(5):
        free = [1.0] * MULTIPROCESSORS
        running = [dice.choice([*one.kernels, *[None] * (one.ring > 0)]) if one.kernels else None for one in rooms]
        programs = [
            program
            for kernel in filter(None, running)
            for part, program in [kernel]
            for _ in range(round(part * MULTIPROCESSORS / program))
        ]
        dice.shuffle(programs)
        if spread := dice.random() < 0.5:  # the smallest first, which is the worst for the largest
            programs.sort()
        for program in programs:
            places = [number for number, left in enumerate(free) if left > program - 1e-9]
            assert places, "a program that its peers wait for has no room"
            free[max(places, key=free.__getitem__) if spread else dice.choice(places)] -= program
        for one, kernel in zip(rooms, running, strict=True):
            assert kernel or not one.ring or max(free) > one.ring - 1e-9, "the ring has no room at all"


# --- every group, and the ends of groups ----------------------------------------------------------------------------


def everywhere_and_an_end(rank):
    speed_up_the_interpreter()
    low_latency.STAGINGS["gloo"] = SharedStaging
    low_latency_limits.DEFAULTS[2] = limits = LowLatencyLimits(one_shot=64, two_shot=0, scatter=0, gather=0)
    real = low_latency.backends.of
    low_latency.backends.of = lambda group, _: real(group, "cpu")
    low_latency.everywhere()
    group = stock.new_group([0, 1])
    for member in (None, group):
        tensor = torch.ones(10)
        for _ in range(3):
            safecomm.all_reduce(tensor, group=member)
        assert (tensor == 8).all()
    assert [engine.taken for engine in ENGINES.values() if hasattr(engine, "taken")] == [3, 3]
    with safecomm.low_latency(group, limits=limits) as ours:  # what is said for a group wins
        safecomm.all_reduce(tensor, group=group)
        assert ours.calls == 1
    safecomm.all_reduce(tensor, group=group)
    assert ENGINES[group].taken == 1
    safecomm.destroy_process_group(group)
    assert group not in ENGINES
    safecomm.destroy_process_group()
    assert list(ENGINES) == [None]
    assert not low_latency._KEPT


def test_everywhere_switches_groups_on_at_their_first_call_and_they_end_with_the_group_s7(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for ended in launch(2, everywhere_and_an_end):
        ended.check()


def test_the_runner_switches_it_on_everywhere(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from safecomm.collectives.takers import ENGINES; print(list(ENGINES))")
    run = functools.partial(run_python, "-m", "safecomm", "run", cwd=str(tmp_path))
    assert run("--low-latency", "script.py").out == "[None]\n"
    assert run("script.py", SAFECOMM_LOW_LATENCY="1").out == "[None]\n"


@pytest.mark.parametrize(("value", "found"), [("", {}), ("0", {}), ("limits.json", {None: "limits.json"})])
def test_what_the_variable_may_say_besides(value, found, monkeypatch):
    monkeypatch.setenv("SAFECOMM_LOW_LATENCY", value)
    ended = run_program(
        "import safecomm\nfrom safecomm.collectives.takers import ENGINES\n"
        "print({group: engine._limits for group, engine in ENGINES.items()})"
    )
    ended.check()
    assert ended.out == f"{found}\n"


# --- tuning ---------------------------------------------------------------------------------------------------------


def test_limits_follow_from_the_times():
    sizes = [1, 2, 4, 8]

    def times(*us):
        return dict(zip(sizes, us, strict=True))

    nccl = times(9.0, 9.0, 9.0, 9.0)
    us = {
        "all_reduce": {"NCCL": nccl, "one_shot": times(2, 4, 8, 9), "two_shot": times(3, 3, 5, 9.1)},
        "reduce_scatter": {"NCCL": nccl, "one_shot": times(9.2, 1, 1, 1)},
        "all_gather": {"NCCL": nccl, "one_shot": times(2, 9.1, 3, 4), "exact": times(2, 9, 3, 5)},
        "all_to_all": {"NCCL": nccl, "exact": times(2, 9.1, 3, 12)},
    }
    assert tune_low_latency.limits_of(us) == LowLatencyLimits(
        one_shot=1, two_shot=8, scatter=0, gather=8, exact=4, exchange=4
    )
    del us["all_reduce"]["two_shot"]
    us["all_gather"]["exact"][2] = 9.2
    assert tune_low_latency.limits_of(us) == LowLatencyLimits(
        one_shot=8, two_shot=0, scatter=0, gather=8, exact=1, exchange=4
    )
    us["all_reduce"]["ring"] = {4: 5.0, 8: 3.8, 16: 7.0, 32: 9.95}
    us["all_reduce"]["NCCL"] |= {16: 9.0, 32: 10.0}
    us["all_gather"]["ring"] = {8: 3.9, 16: 8.95}
    found = tune_low_latency.limits_of(us)
    assert (found.one_shot, found.ring, found.gather, found.ring_gather) == (2, 16, 4, 8), "1 % faster than NCCL"


def test_the_limits_for_four_ranks_are_what_tuning_would_find():
    """By what four H100 took, an elementwise kernel included; at 256 MiB the ring took what NCCL did."""
    mib = KIB * KIB
    us = {
        "all_reduce": {
            "NCCL": {8 * mib: 64.2, 16 * mib: 104.0, 32 * mib: 192.7, 64 * mib: 370.5, 128 * mib: 705.8},
            "two_shot": {8 * mib: 52.4},
            "ring": {8 * mib: 55.7, 16 * mib: 96.8, 32 * mib: 188.0, 64 * mib: 363.0, 128 * mib: 705.8},
        },
        "reduce_scatter": {"NCCL": {}},
        "all_gather": {"NCCL": {}, "exact": {}},
        "all_to_all": {"NCCL": {}, "exact": {}},
    }
    found, default = tune_low_latency.limits_of(us), low_latency_limits.defaults(4)
    assert (found.two_shot, found.ring) == (default.two_shot, default.ring) == (8 * mib, 64 * mib)
    us["all_reduce"]["ring"] |= {16 * mib: 102.0, 32 * mib: 190.0, 64 * mib: 366.0}
    assert tune_low_latency.limits_of(us).ring == 0, "a gain that is not worth the memory"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_what_tuning_tries_fits_into_64_mib(world, monkeypatch):
    tried = []

    @contextlib.contextmanager
    def only_the_limits(limits):
        tried.append(limits)
        yield types.SimpleNamespace(reason="")

    monkeypatch.setattr(tune_low_latency, "low_latency", only_the_limits)
    monkeypatch.setattr(tune_low_latency, "calls", lambda *_: (None, None))
    monkeypatch.setattr(tune_low_latency, "prepare", lambda *_: None)
    monkeypatch.setattr(tune_low_latency, "slowest", lambda runs, *_: dict.fromkeys(runs, 1.0))
    monkeypatch.setattr(stock, "get_world_size", lambda: world)
    sizes, ring_sizes = tune_low_latency.SIZES, tune_low_latency.RING_SIZES
    tune_low_latency.measure(torch.device("cpu"), sizes, ring_sizes, 1, lambda _: None)
    largest = {name: max(getattr(one, name) for one in tried) for name in vars(tried[0])}
    assert LowLatencyLimits(**largest).nbytes(world) <= 64 * KIB * KIB
    found = low_latency_limits.defaults(world)
    assert all(getattr(found, name) <= most for name, most in largest.items() if world > 2 or name != "two_shot")


@on(2, interpreted=True)
def test_tuning_writes_limits_that_low_latency_reads(tmp_path):
    low_latency.STAGINGS["gloo"] = SharedStaging
    path = tmp_path / "tuned.json"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            tune_low_latency.tune(torch.device("cpu"), path, 2, lambda _: None, sizes=[2 * KIB], ring_sizes=[40 * KIB])
    finally:
        del low_latency.STAGINGS["gloo"]
    stock.barrier()
    assert low_latency_limits.read(path, 2) is not None
    if stock.get_rank() == 0:
        assert "2 KiB" in out.getvalue()
        assert json.loads(path.read_text())["low_latency_measured"]["world"] == 2
    with switched_on(limits=path) as ours:
        assert ours.calls == 0


# --- what a GPU would run -------------------------------------------------------------------------------------------

COMPILE = """
import json, re, sys
from triton import language as tl
sys.path.append(sys.argv[1])
from ptx import ptx as made
from safecomm.peers import kernels
from safecomm.peers.staging import SLOT

found = []
for kernel, kind, dtype, bits, world, piece in (
    (kernels.one_shot, 0, tl.bfloat16, tl.int16, 2, SLOT),
    (kernels.one_shot, 2, tl.bfloat16, tl.int16, 4, SLOT // 4),
    (kernels.one_shot, 1, tl.float32, tl.int32, 4, SLOT),
    (kernels.two_shot, 0, tl.bfloat16, tl.int16, 4, SLOT // 4),
    (kernels.scatter_pieces, None, tl.bfloat16, tl.int16, 2, SLOT // 2),
    (kernels.scatter_pieces, None, tl.float32, tl.int32, 8, SLOT),
    (kernels.one_shot, 2, None, tl.int8, 4, SLOT),
    (kernels.one_shot, 3, None, tl.int16, 2, SLOT // 4),
    (kernels.one_shot, 3, None, tl.int32, 8, SLOT),
    (kernels.combine, None, tl.bfloat16, tl.int16, 4, SLOT),
):
    for once in (True, False) if "ONCE" in kernel.arg_names else (None,):
        width = bits.primitive_bitwidth // 8
        constants = dict(
            KIND=kind, DTYPE=dtype, BITS=bits, WORLD=world, ME=1, ALIGNED=True, AREA=0, STRIDE=1 << 16,
            BEGUN=1 << 20, BLOCK=piece // width, ONCE=once, EXACT=dtype is None,
        )
        ptx = made(kernel, constants)
        name = "exact" if dtype is None and kernel is kernels.one_shot else kernel.__name__
        accesses = re.findall(r"\\s((?:ld|st|red|atom|fence)[.][\\w.:]+)", ptx)
        found.append([world, name, once, piece, accesses, ptx])
print(json.dumps(found))
"""


class Thread:
    """A thread that waits for its peers by what a kernel has in PTX, with a clock that goes on by 1 at each look at it.

    ``arrives``: at which look each word of each peer is there; ``left``: bytes that rank 0 sends, and ``well``.
    """

    EPOCH, TABLE, PLACE, CALL, HOST = 7, 1 << 20, 1 << 30, 77, 1 << 40
    LIMIT, LONG = 9, 3

    def __init__(self, text, slot, arrives, *, left=1 << 20, well=1, failed=0):
        lines = [line.strip() for line in text.splitlines()]
        self.steps = [
            one for line in lines for one in re.findall(r"(?:@!?\w+ )?[\w.:]+[^;:]*[;:]", line) if one[0] != "."
        ]
        self.exact, self.slot, self.arrives = "v2.b64" in text, slot, arrives
        late, word = (
            re.search(r"mov\.b32 (%r\d+), -1", text)[1],
            re.search(r"\.v[24]\.b\d+ {[^}]*}, \[(%rd\d+)", text)[1],
        )
        known = {
            word: self.PLACE,
            re.search(r"setp\.eq\.b32 again, (%r\d+), 0", text)[1]: well,
            re.search(r"setp\.gt\.s32 wanted0, (%r\d+)", text)[1]: left,
            re.search(r"word, \[(%rd\d+)", text)[1]: self.TABLE,
            re.search(r"b32 \[word\], (%r\d+)", text)[1]: self.CALL,
        }
        if self.exact:
            known[re.search(r"mov\.b64 packet0_0, {%r\d+, (%r\d+)}", text)[1]] = self.EPOCH
        self.known, self.clock, self.looks = known, 100, 0
        self.table = {0: self.LIMIT, 8: self.HOST, 16: failed, 24: self.LONG}
        self.told, self.cleared, self.looked = {}, set(), set()
        self._run()
        self.late = known[late]

    def _value(self, name):
        return self.known[name] if name in self.known else int(name)

    def _run(self):
        at = 0
        while at < len(self.steps):
            step, at = self.steps[at].rstrip(";"), at + 1
            if step.startswith("@"):
                guard, _, step = step.partition(" ")
                if self.known[guard.strip("@!")] == ("!" in guard):
                    continue
            operation, _, rest = step.partition(" ")
            given = [one.strip("{}[] ") for one in rest.split(",")]
            if operation == "bra":
                at = self.steps.index(f"{rest}:")
            elif not operation.endswith(":"):
                self._step(operation, given)

    def _step(self, operation, given):
        known, value = self.known, self._value
        if operation.startswith(("ld.relaxed.sys", "st.global.v4")):
            place, _, more = given[-1 if operation[0] == "l" else 0].partition(" + ")
            slot, rest = divmod(int(more or 0), self.slot)
            assert (value(place), rest) == (self.PLACE, 0)
            if operation[0] == "s":
                assert [value(one) for one in given[1:]] == [FREE] * 4
                self.cleared.add(slot)
                return
            self.looks += slot == min(self.looked, default=slot)
            self.looked.add(slot)
            words = self.arrives[slot // 2][2 * (slot % 2) :] if self.exact else self.arrives[slot]
            for name, look in zip(given[:-1], words, strict=False):
                there = look <= self.looks
                known[name] = (5, self.EPOCH if there else self.EPOCH - 3) if self.exact else 5 if there else FREE
        elif operation.startswith("ld.global"):
            known[given[0]] = self.table[int(given[1].partition(" + ")[2] or 0)]
        elif operation.startswith("st.relaxed.sys.global.b32"):
            place = int(given[0].partition(" + ")[2] or 0)
            self.told.setdefault(place, []).append(value(given[1]))
        elif operation.startswith("atom"):
            known[given[0]], self.table[16] = self.table[16], self.table[16] or 1
        elif operation == "mov.u64":
            known[given[0]] = self.clock = self.clock + 1
        elif operation.startswith("mov.b64") and len(given) == 3:
            if given[0] in known and isinstance(known[given[0]], tuple) and given[0].startswith("packet"):
                raise AssertionError("a packet that has arrived is lost")
            pair = (given[0], given[1]) if given[2].startswith("packet") else None
            if pair:
                known.update(zip(pair, known[given[2]], strict=True))
            else:
                known[given[0]] = value(given[1]), value(given[2])
        elif operation.startswith("mov"):
            known[given[0]] = value(given[1])
        elif operation.startswith("setp"):
            compare = {"eq": "__eq__", "ne": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__"}
            found = getattr(value(given[1]), compare[operation.split(".")[1]])(value(given[2]))
            known[given[0]] = found or known[given[3]] if ".or." in operation else found
        elif operation.startswith("selp"):
            known[given[0]] = value(given[1] if known[given[3]] else given[2])
        else:
            one, other = value(given[1]), value(given[2])
            known[given[0]] = {"add": one + other, "sub": one - other, "and": one & other}[operation.split(".")[0]]


def a_thread_waits_for_all_that_it_needs(text, slot, world, *, results):
    """Run a thread, with words of each peer that arrive one after the other, or never."""
    peers, exact = world - 1, "v2.b64" in text
    now = [[1] * 4 for _ in range(peers)]
    slots = set(range(peers * (2 if exact else 1)))
    cleared = set() if exact else slots
    thread = Thread(text, slot, now)
    assert (thread.late, thread.looks, thread.cleared, thread.told) == (0, 1, cleared, {})
    for peer in range(peers):
        for word in range(4):
            for look in (2, 64, 65, 200):
                arrives = [list(one) for one in now]
                arrives[peer][word] = look
                thread = Thread(text, slot, arrives)
                assert (thread.late, thread.looks, thread.cleared, thread.told) == (0, look, cleared, {}), (peer, word)
            arrives[peer][word] = 1 << 40
            thread = Thread(text, slot, arrives)
            assert (thread.late, thread.cleared) == (-1, set())
            # The call has given up, and has waited long three times over.
            assert thread.told == {0: [Thread.CALL], 4: [Thread.CALL] * 3}
            assert thread.table[16] == 1
            assert Thread(text, slot, arrives, failed=1).told == {4: [Thread.CALL] * 3}  # another has told the host
    thread = Thread(text, slot, [[1 << 40] * 4] * peers, well=0)
    assert (thread.late, thread.looks, thread.cleared, thread.told) == (-1, 0, set(), {})
    if results:  # of which each rank sends a slot less than the one before, and this is rank 1 of them
        thread = Thread(text, slot, [now[0], *[[1 << 40] * 4] * (peers - 1)], left=slot)
        assert (thread.late, thread.looked) == (0, {0})
    thread = Thread(text, slot, [[1 << 40] * 4] * peers, left=0)
    assert (thread.late, thread.looked, thread.cleared) == (0, set(), set())


def test_the_kernels_compile_for_hopper_with_strong_words_in_pieces_of_16_bytes():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(Path(__file__).parents[1] / "benchmarks")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    backwards = {}
    for world, name, once, piece, accesses, ptx in json.loads(done.stdout):
        waits = name != "combine"
        labels = {found[1]: found.start() for found in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE)}
        branches = re.finditer(r"bra(?:\.uni)?\s+(\$\w+);", ptx)
        backwards.setdefault((name, once), sum(labels[branch[1]] < branch.start() for branch in branches))
        # One lane a thread: what one of them adds is added once, and it clears what it has itself looked at.
        assert f".reqntid {piece // 16}" in ptx
        blocks = re.findall(r"begin inline asm(.*?)// end inline asm", ptx, re.DOTALL)
        loops = [block for block in blocks if "LOOK:" in block and "wanted0" in block]
        assert len(loops) == {"two_shot": 2, "combine": 0}.get(name, 1), name
        for number, loop in enumerate(loops):
            a_thread_waits_for_all_that_it_needs(loop, piece, world, results=number == 1)
        words = "v2.b64" if name == "exact" else "v4.b32"
        # All peers' slots at once, twice in the two-shot kernel; exact slots have halves.
        looks = {"two_shot": 2, "exact": 2, "combine": 0}.get(name, 1)
        assert accesses.count(f"ld.relaxed.sys.global.{words}") == looks * (world - 1), name
        sends = accesses.count(f"st.relaxed.sys.global.{words}")  # or twice that, where the compiler peels a loop
        assert sends in (looks * (world - 1), 2 * looks * (world - 1)), name
        assert ("bar.sync" in ptx) == waits, "nothing is stored before all that is sent was loaded"
        for access in ("red.release.sys.global.add.u32", "ld.acquire.sys.global.b32"):
            assert accesses.count(access) == waits, name
        assert len(re.findall(r"red\.release\.sys\.global\.add\.u32 \[%rd\d+\], 1;", ptx)) == waits, name
        assert not any(".local" in access for access in accesses), "registers are spilt"
        for access in accesses:
            assert re.fullmatch(
                r"ld\.param\..*|(ld|st)(\.\w+\.sys)?\.global\.(v4\.b32|v2\.b64|b64|b32)|(ld|st)\.shared.*|red.*"
                r"|atom\.relaxed\.gpu\.global\.cas\.b64",
                access,
            ), (name, access)
    for name in ("one_shot", "two_shot", "exact"):
        assert backwards[name, True] < backwards[name, False], "no loop over chunks where each program has one"


@on(2, interpreted=True)
def test_an_engine_is_asked_once_also_where_one_rank_has_a_mode():
    with switched_on(check=True) as ours:
        safecomm.all_reduce(torch.ones(1 << 20))
        safecomm.all_reduce(torch.ones(1 << 20))
        before = ours._engine._compared
        with Sees() if stock.get_rank() == 0 else contextlib.nullcontext():
            safecomm.all_reduce(torch.ones(1 << 20))
        assert ours._engine._compared == before + 1


@on(2, interpreted=True)
def test_a_bucketed_block_that_ends_in_another_thread_changes_no_way():
    other = stock.new_group()
    with switched_on() as ours:
        safecomm.all_reduce(torch.ones(1 << 20))  # the area is there
        block = contextlib.ExitStack()

        def end_after(frame, event, arg):
            if frame.f_code is takers.offer.__code__:
                return ended
            return None

        def ended(frame, event, arg):
            if event == "return":
                sys.settrace(None)
                thread = threading.Thread(target=block.close)
                thread.start()
                thread.join()
            return ended

        if stock.get_rank() == 0:
            block.enter_context(safecomm.bucketed(group=other))
            sys.settrace(end_after)
        taken = ours.calls
        tensor = torch.ones(16)
        safecomm.all_reduce(tensor)
        sys.settrace(None)
        assert tensor.tolist() == [2.0] * 16
        assert ours.calls == taken + 1
    stock.destroy_process_group(other)


@on(2, interpreted=True)
def test_an_engine_that_is_switched_off_in_another_thread_raises_nothing():
    group = stock.group.WORLD
    with switched_on() as ours:

        def switch_off(frame, event, arg):
            if frame.f_code is takers.offer.__code__:
                sys.settrace(None)
                takers.ENGINES.pop(group)

        sys.settrace(switch_off)
        tensor = torch.ones(16)
        safecomm.all_reduce(tensor)
        takers.ENGINES[group] = ours._engine
        assert tensor.tolist() == [2.0] * 16
