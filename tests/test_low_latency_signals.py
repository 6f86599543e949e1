"""What says that a rank has begun a call, and the numbers of calls, also where those begin again.

The processes of one machine see each other's stores in order, so nothing that these tests run loses data without the
signals, as GPUs may: what is tested is that each kernel counts, and waits for every peer's count.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as stock
from ranks import on
from test_low_latency import EXACT, GATHER, switched_on
from watching import around

import safecomm
from safecomm.peers import low_latency
from safecomm.peers.staging import PROGRAMS


def begun(engine):
    """Return the word that peers look at."""
    return engine._staging.block[engine.layout.begun :][:4].view(torch.int32)


def signed(number):
    """Return ``number`` as 4 bytes have it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@pytest.mark.parametrize("behind", [1, 2])
@on(2, 3, interpreted=True)
def test_a_call_waits_until_every_peer_has_begun_the_one_before_s1(behind):
    """A rank that has not begun it may not have cleared what the next call's stores would come before."""
    from safecomm.peers.kernels import FAILED

    rank, world = stock.get_rank(), stock.get_world_size()
    for late in range(world):
        failed = []  # by the time that the program that keeps pace is through
        with switched_on(limits=EXACT, timeout=timedelta(milliseconds=400)) as ours:
            engine = ours._engine
            stock.barrier()
            if rank == late:
                begun(engine).sub_(behind)  # the next call adds 1
            stock.barrier()
            with around(
                after={"_keep_pace": lambda engine=engine, failed=failed: failed.append(bool(engine._table[FAILED]))}
            ):
                safecomm.all_reduce(torch.ones(5))
            stock.barrier()
            assert failed == [behind == 2 and rank != late], late
            ours._leave(timedelta())()
            stock.barrier()
        low_latency._KEPT.clear()


@on(2, interpreted=True)
def test_every_kernel_counts_one_call():
    from safecomm.peers.kernels import TURN

    world = stock.get_world_size()
    with switched_on(limits=EXACT) as ours:
        engine = ours._engine
        calls = [
            lambda: safecomm.all_reduce(torch.ones(5)),
            lambda: safecomm.all_reduce(torch.ones(8000)),
            lambda: getattr(safecomm, GATHER)(torch.empty(2 * world), torch.ones(2)),
            lambda: safecomm.reduce_scatter(torch.empty(900), [torch.ones(900) for _ in range(world)]),
        ]
        for call in calls:
            stock.barrier()
            before = begun(engine).item()
            assert engine._table[TURN].item() == before
            call()
            stock.barrier()
            assert engine._table[TURN].item() == before + 1 == begun(engine).item()


@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3])
@on(2, interpreted=True)
def test_calls_go_on_where_their_count_begins_again(first):
    from safecomm.peers.kernels import TURN

    rank, world = stock.get_rank(), stock.get_world_size()
    with switched_on(limits=EXACT, timeout=timedelta(seconds=10)) as ours:
        engine = ours._engine
        stock.barrier()
        begun(engine).fill_(signed(first))
        engine._table[TURN] = signed(first)
        stock.barrier()
        for number in range(7):
            tensor = torch.full((9,), float(rank + number))
            safecomm.all_reduce(tensor)
            assert (tensor == world * number + sum(range(world))).all()
        stock.barrier()
        assert begun(engine).item() == signed(first + 7) == engine._table[TURN].item()


@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 5])
@on(2, interpreted=True)
def test_no_call_that_is_exact_has_the_number_of_staging_that_nobody_has_used(first):
    """A rank would take that for what its peer has sent. The phases take turns all the same."""
    from safecomm.peers.kernels import COUNTERS

    rank, world = stock.get_rank(), stock.get_world_size()
    with switched_on(limits=EXACT) as ours:
        engine = ours._engine
        counters = engine._table[COUNTERS:][: PROGRAMS + 1]
        stock.barrier()
        counters.copy_((counters >> 32 << 32) | first)
        stock.barrier()
        phase, numbers = counters[0].item() >> 32, []
        for number in range(7):
            numbers.append((counters[0].item() + 1) & 0xFFFFFFFF)
            out = torch.empty(5 * world, dtype=torch.int32)
            getattr(safecomm, GATHER)(out, torch.full((5,), 10 * number + rank, dtype=torch.int32))
            assert out.view(world, 5).tolist() == [[10 * number + peer] * 5 for peer in range(world)]
            assert counters[0].item() >> 32 == (phase + number + 1) % 3
        stock.barrier()
    expected = [one if one < 2**32 - 1 else one - (2**32 - 2) for one in range(first + 1, first + 8)]
    assert numbers == expected
    assert 0 not in numbers
