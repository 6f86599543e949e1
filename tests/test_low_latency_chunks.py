"""Programs of the kernels that have several chunks: how they send and poll, and what they do when a peer is late.

One program in place of hundreds has them here, as each has of a tensor of several MiB.
"""

import contextlib
import itertools
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as stock
from ranks import on, signal_to_peers, wait_for_signal
from test_low_latency import GATHER, KIB, SCATTER, of_rank, switched_on
from watching import around

import safecomm
from safecomm.peers import low_latency, room
from safecomm.peers.limits import LowLatencyLimits

CHUNKS = 6


@contextlib.contextmanager
def with_programs(count):
    """Have so many programs in the largest grid, of large pieces."""
    with (
        mock.patch.object(low_latency, "most_threads", return_value=256 * count),
        mock.patch.object(room, "FINE", 0),
    ):
        yield


LIMITS = LowLatencyLimits(
    one_shot=CHUNKS * 4 * KIB, two_shot=CHUNKS * 8 * KIB, scatter=CHUNKS * 4 * KIB, gather=2 * CHUNKS * 4 * KIB,
    exact=CHUNKS * 4 * KIB, exchange=CHUNKS * 4 * KIB,
)  # fmt: skip  # for two ranks
KERNELS = {"one-shot": 1024, "two-shot": 2048, "exact": 1024}
"""The kernels, and of how many words of 4 bytes a chunk of each is."""


def called(kernel, chunks):
    """Make a call of so many chunks; return what has come, what is right, and which of it says that it has not come."""
    rank = stock.get_rank()
    numbers = torch.arange(chunks * KERNELS[kernel], dtype=torch.int32)
    if kernel == "exact":
        whole = torch.full((2 * len(numbers),), -7, dtype=torch.int32)
        getattr(safecomm, GATHER)(whole, numbers + rank)
        come = whole[(1 - rank) * len(numbers) :][: len(numbers)]
        return come, numbers + 1 - rank, come == -1
    tensor = numbers.float() + rank
    safecomm.all_reduce(tensor)
    return tensor, 2 * numbers.float() + 1, tensor.isnan()


@on(2, 3, interpreted=True)
def test_a_program_takes_many_chunks_in_turn_and_each_arrives_s8():
    """Of every kernel, in place, with chunks that not all programs have the same number of, until phases come again."""
    rank, world = stock.get_rank(), stock.get_world_size()
    limits = LowLatencyLimits(
        one_shot=20 * KIB, two_shot=56 * KIB, scatter=20 * KIB, gather=20 * KIB, exact=8 * KIB, exchange=20 * KIB
    )
    with with_programs(3), switched_on(limits=limits, tried=True) as ours:
        for number, count in enumerate((5120, 4100, 14000, 3100, 14000, 5120, 14000, 14000)):  # of fp32
            sent = [of_rank(peer, count, torch.float32) + number for peer in range(world)]
            tensor = sent[rank].clone()
            safecomm.all_reduce(tensor)
            assert torch.equal(tensor, sum(sent)), number
            count = min(count, 5120)
            whole = torch.zeros(count * world)
            mine = whole[rank * count : (rank + 1) * count]
            mine.copy_(sent[rank][:count])
            getattr(safecomm, GATHER)(whole, mine)
            assert torch.equal(whole, torch.cat([tensor[:count] for tensor in sent])), number
            exchanged = torch.empty_like(whole)
            safecomm.all_to_all_single(exchanged, whole)
            assert torch.equal(exchanged, sent[rank][:count].repeat(world)), number
            getattr(safecomm, SCATTER)(mine, whole)
            assert torch.equal(mine, world * sent[rank][:count]), number
        assert ours.calls == 32


@on(2, 3, interpreted=True)
def test_a_program_sends_one_chunk_ahead_of_what_it_polls_for():
    world = stock.get_world_size()
    limits = LowLatencyLimits(
        one_shot=12 * KIB, two_shot=12 * KIB * world, scatter=12 * KIB, gather=12 * KIB, exchange=12 * KIB
    )
    done = []
    notes = {"_send": lambda: done.append("s"), "_arrived": lambda: done.append("p")}
    small, large = torch.ones(3 * 1024), torch.ones(3 * 1024 * world)
    calls = {
        "SSpSpp": [
            lambda: safecomm.all_reduce(small),
            lambda: getattr(safecomm, GATHER)(large, small),
            lambda: getattr(safecomm, SCATTER)(small, large),
            lambda: safecomm.all_to_all_single(torch.empty_like(large), large),
        ],
        "SSS" + "pS" + "pSp" + "pSp" + "p": [lambda: safecomm.all_reduce(large)],
    }
    with with_programs(1), switched_on(limits=limits), around(notes):
        for order, made in calls.items():
            for call in made:
                done.clear()
                call()
                assert "".join(done).replace("s" * (world - 1), "S") == order


@on(2, interpreted=True)
def test_what_is_compiled_and_tried_at_first_has_one_chunk_a_program_and_several():
    """Of each kernel and collective: nobody compiles one while peers wait in theirs, or finds then that it can't be."""
    from safecomm.peers import kernels

    limits = LowLatencyLimits(
        one_shot=28 * KIB, two_shot=52 * KIB, scatter=28 * KIB, gather=32 * KIB, exact=28 * KIB, exchange=28 * KIB
    )
    with (
        with_programs(6),
        mock.patch.object(kernels, "launcher", wraps=kernels.launcher) as launcher,
        switched_on(limits=limits),
    ):
        compiled = [(call.args[0].__name__, call.args[1]) for call in launcher.call_args_list]
    found = {
        ("exact" if constants.get("EXACT") else name, constants.get("KIND", 0), constants["ONCE"])
        for name, constants in compiled
        if "ONCE" in constants
    }
    kinds = [
        ("one_shot", 0),
        ("one_shot", 1),
        ("one_shot", 2),
        ("two_shot", 0),
        ("scatter_pieces", 0),
        ("exact", 2),
        ("exact", 3),
    ]
    gathers_small = ("one_shot", 2, True)  # which are exact
    assert found == {(*kind, once) for kind in kinds for once in (False, True)} - {gathers_small}


@pytest.mark.parametrize("kernel", KERNELS)
@on(2, interpreted=True)
def test_as_many_chunks_as_programs_and_then_more_and_again_s8(kernel):
    programs = 4 if kernel == "two-shot" else 2  # three chunks of two-shot go by the other kernel
    with with_programs(programs), switched_on(limits=LIMITS) as ours:
        # What was tried when it was switched on is forgotten: a call has to find its own form after one of the other.
        ours._engine._launchers.clear()
        for chunks in (programs, programs + 2, programs):
            come, right, _ = called(kernel, chunks)
            assert torch.equal(come, right), chunks


@pytest.mark.parametrize("kernel", KERNELS)
@on(2, interpreted=True)
def test_what_comes_after_a_program_has_given_up_is_no_result_and_a_slow_peer_has_all_of_its_own(kernel):
    """Rank 1 stops before it sends what its third chunk has, until rank 0 has given up. That waits for all then."""
    from safecomm.peers.kernels import FAILED

    rank = stock.get_rank()
    sends = 2 * CHUNKS if kernel == "two-shot" else CHUNKS
    begun, done, told = itertools.count(1), itertools.count(1), []

    def stop():
        if rank == 1 and next(begun) == sends - CHUNKS + 3:
            wait_for_signal(f"given up a chunk, {kernel}")

    def tell_sent():
        if rank == 1 and next(done) == sends:
            signal_to_peers(f"sent all, {kernel}")

    with with_programs(1), switched_on(limits=LIMITS) as ours:
        table = ours._engine._table

        def tell_given_up():
            if rank == 0 and table[FAILED] and not told:
                told.append(signal_to_peers(f"given up a chunk, {kernel}"))
                wait_for_signal(f"sent all, {kernel}")

        stock.barrier()
        ours._engine.set_patience(timedelta(seconds=0.5 if rank == 0 else 20))
        with around({"_send": stop}, {"_send": tell_sent, "_arrived": tell_given_up}):
            come, right, missing = called(kernel, CHUNKS)
        by_chunk = [bool(chunk.any()) for chunk in missing.split(KERNELS[kernel])]
        assert by_chunk == ([False] * 2 + [True] * 4 if rank == 0 else [False] * 6)
        assert torch.equal(come[~missing], right[~missing])
        assert bool(table[FAILED]) == (rank == 0)
        ours._leave(timedelta())()
        stock.barrier()
    low_latency._KEPT.clear()
