"""The list forms through an arena: the same bits, one flat collective, no copy where none is needed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from ranks import on, until

import safecomm
from safecomm import use_arena


def part(seed, shape=(3, 5), dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * stock.get_rank() + seed)
    return (torch.rand(shape, generator=generator) * 10).to(dtype)


def slices(times, shape=(3, 5), dtype=torch.float32):
    """Consecutive slices of one buffer."""
    return list(torch.full((times, *shape), -1, dtype=dtype).unbind())


def pieces(times, shape=(3, 5), dtype=torch.float32):
    return [torch.full(shape, -1, dtype=dtype) for _ in range(times)]


def strided(times, shape=(3, 5), dtype=torch.float32):
    return [torch.full(shape[::-1], -1, dtype=dtype).t() for _ in range(times)]


LISTS = {"slices": slices, "pieces": pieces, "strided": strided}


def call(dist, op, made, dtype, async_op):
    """Run one list form on lists of the kind ``made``, and return its results."""
    world = stock.get_world_size()
    if op == "all_gather":
        out = LISTS[made](world, dtype=dtype)
        work = dist.all_gather(out, part(0, dtype=dtype), async_op=async_op)
    elif op == "reduce_scatter":
        out = pieces(1, dtype=dtype)
        given = [one.copy_(part(n, dtype=dtype)) for n, one in enumerate(LISTS[made](world, dtype=dtype))]
        work = dist.reduce_scatter(out[0], given, async_op=async_op)
    else:
        out = LISTS[made](world, dtype=dtype)
        given = [one.copy_(part(n, dtype=dtype)) for n, one in enumerate(LISTS[made](world, dtype=dtype))]
        work = dist.all_to_all(out, given, async_op=async_op)
    if async_op:
        work.wait()
    return out


def outcome(*arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Flat:
    """Counts the flat collectives that c10d is asked for."""

    NAMES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")

    def __init__(self, monkeypatch, lists):
        self.calls = 0
        for name in ("_gather_into", "_scatter_into", "_all_to_all_single"):
            monkeypatch.setattr(lists, name, self.counted(getattr(lists, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
@on(1, 2, 4)
def test_the_same_bits_with_an_arena_as_of_torch(op, asynchronous):
    for made in LISTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            want = outcome(stock, op, made, dtype, asynchronous)
            with use_arena("1MiB", "cpu") as arena:
                got = outcome(safecomm, op, made, dtype, asynchronous)
                until(lambda arena=arena: not arena.stats().in_use)
            if isinstance(want, str):
                assert got == want, (made, dtype)
            else:
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (made, dtype, got, want)


@on(2)
def test_slices_of_one_buffer_are_not_copied_and_pieces_are_staged_once():
    from safecomm.collectives import lists

    with pytest.MonkeyPatch.context() as monkeypatch, use_arena("1MiB", "cpu") as arena:
        flat = Flat(monkeypatch, lists)
        for op in ("all_gather", "reduce_scatter"):
            for made, staged in (("slices", 0), ("pieces", 1)):
                calls, high = flat.calls, arena.stats().high_water
                call(safecomm, op, made, torch.int64, False)
                assert flat.calls == calls + 1, (op, made)
                assert (arena.stats().high_water > high) == bool(staged and not high), (op, made)
        until(lambda: not arena.stats().in_use)


@on(2)
def test_what_is_unusual_goes_torchs_own_way():
    from safecomm.collectives import lists

    with pytest.MonkeyPatch.context() as monkeypatch:
        flat = Flat(monkeypatch, lists)
        call(safecomm, "all_gather", "slices", torch.float32, False)
        assert flat.calls == 0, "without an arena"
        with use_arena("1MiB", "cpu"):
            call(safecomm, "all_gather", "slices", torch.complex64, False)
            safecomm.all_gather(pieces(2, (0,)), torch.ones(0))
            uneven = [torch.zeros(2), torch.zeros(3)]  # which gloo refuses
            for wrong in (
                uneven,
                [],
                [torch.zeros(2)],
                None,
                [torch.zeros(2)] * 3,
                [torch.zeros(2), torch.zeros(2).double()],
            ):
                raised = []
                for dist in (stock, safecomm):
                    try:
                        dist.all_gather(wrong, torch.ones(2))
                    except Exception as error:
                        raised.append((type(error), str(error)))
                assert len(raised) in (0, 2)
                assert raised[:1] == raised[1:]
        assert flat.calls == 0


@on(2)
def test_a_list_in_one_piece_on_one_rank_and_in_pieces_on_the_other():
    with use_arena("1MiB", "cpu") as arena:
        for asynchronous in (False, True):
            out = (slices if stock.get_rank() else pieces)(2)
            work = safecomm.all_gather(out, part(0), async_op=asynchronous)
            if work is not None:
                work.wait()
            want = pieces(2)
            stock.all_gather(want, part(0))
            assert all(map(torch.equal, out, want))
        del work
        until(lambda: not arena.stats().in_use)


@on(2)
def test_a_running_flat_call_is_held_under_its_own_name_and_line():
    with use_arena("1MiB", "cpu") as arena:
        given = list(arena.empty(2, 16, dtype=torch.int32).fill_(1).unbind())
        out = torch.empty(16, dtype=torch.int32)
        work = safecomm.reduce_scatter(out, given, async_op=True)
        (entry,) = safecomm.pending()
        assert entry.op == "reduce_scatter"
        assert "test_lists.py" in entry.site
        del given
        assert arena.stats().in_use == 512
        work.wait()
        assert out.tolist() == [2] * 16
        del work
        until(lambda: not arena.stats().in_use)


def test_the_functions_look_like_torchs():
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert getattr(safecomm, name).__wrapped__ is getattr(c10d, name)
