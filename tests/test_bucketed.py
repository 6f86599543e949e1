"""bucketed(): the same results from few large collectives, in the order of the program."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as stock
from ranks import on, until

import safecomm
from safecomm import bucketed, use_arena
from safecomm.bucketing import read_tuning

GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"


def data(seed, *shape, dtype=torch.int64):
    generator = torch.Generator().manual_seed(100 * stock.get_rank() + seed)
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


def program(dist):
    """A program of many kinds of calls, and all that it has written."""
    world = stock.get_world_size()
    written = []
    for n in range(12):
        tensor = data(n, n + 1, 3, dtype=(torch.int64, torch.float64)[n % 2])
        dist.all_reduce(tensor, (stock.ReduceOp.SUM, stock.ReduceOp.MAX)[n % 3 == 0])
        gathered = torch.empty(world * (n + 1), dtype=torch.int64)
        getattr(dist, GATHER)(gathered, data(n, n + 1))
        scattered = torch.empty(n + 2, dtype=torch.int64)
        getattr(dist, SCATTER)(scattered, data(n, world * (n + 2)))
        written += [tensor, gathered, scattered]
    strided = data(5, 4, 3).t()
    dist.all_reduce(strided)
    slices = data(6, 20, 2)
    for one in slices:
        dist.all_reduce(one)
    dist.all_reduce(slices)  # what was collected is summed first
    dist.broadcast(slices, 0)
    dist.all_reduce(slices[3])
    in_place = data(7, world * 4)
    getattr(dist, GATHER)(in_place, in_place.view(world, 4)[stock.get_rank()])
    return [*written, strided, slices, in_place]


@pytest.mark.parametrize("size", [1, 0.0001])
@on(1, 2, 4)
def test_the_same_results_as_one_by_one(size):
    want = program(stock)
    for arena in (None, "1MiB"):
        if arena is None:
            with bucketed(size):
                got = program(safecomm)
        else:
            with use_arena(arena, "cpu") as one:
                with bucketed(size):
                    got = program(safecomm)
                assert one.stats().high_water
                until(lambda one=one: not one.stats().in_use)
        assert all(map(torch.equal, got, want))


def counted(monkeypatch):
    from safecomm.collectives import reduce

    calls = []
    original = reduce.all_reduce

    def all_reduce(tensor, *arguments):
        calls.append(tensor.numel())
        return original(tensor, *arguments)

    monkeypatch.setattr(reduce, "all_reduce", all_reduce)
    return calls


@on(2)
def test_many_small_become_few_large_of_the_size_asked_for():
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = counted(monkeypatch)
        tensors = [torch.ones(1024) for _ in range(100)]
        with bucketed(64 / 1024):
            for tensor in tensors:
                safecomm.all_reduce(tensor)
            large = torch.ones(1 << 20)
            safecomm.all_reduce(large)
        assert calls == [16 * 1024] * 6 + [4 * 1024]
        assert large[0] == 2.0
        assert all(tensor.tolist() == [2.0] * 1024 for tensor in tensors)


@on(2)
def test_a_handle_brings_the_results_of_its_bucket():
    with bucketed():
        tensors = [torch.full((3,), float(n)) for n in range(4)]
        works = [safecomm.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert all(isinstance(work, stock.Work) for work in works)
        assert tensors[1].tolist() == [1.0] * 3, "nothing was launched"
        assert not works[0].is_completed()
        works[2].wait()
        assert all(work.is_completed() for work in works)
        assert [tensor[0].item() for tensor in tensors] == [0.0, 2.0, 4.0, 6.0]
        late = torch.ones(3)
        safecomm.all_reduce(late, async_op=True)
        safecomm.all_reduce(tensors[3])
    assert late.tolist() == [2.0] * 3
    assert tensors[3].tolist() == [12.0] * 3
    assert safecomm.pending() == []


@on(2)
def test_an_exception_launches_nothing_more_and_leaves_nothing_behind():
    tensor = torch.ones(3)

    def program():
        with bucketed():
            safecomm.all_reduce(tensor)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program()
    assert tensor.tolist() == [1.0] * 3
    safecomm.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@on(2)
def test_only_the_thread_that_entered_is_collected():
    import threading

    with bucketed():
        tensor = torch.ones(3)
        thread = threading.Thread(target=safecomm.all_reduce, args=(tensor,))
        thread.start()
        thread.join()
        assert tensor.tolist() == [2.0] * 3


@on(2)
def test_wrong_arguments_raise_what_torch_raises():
    with bucketed(), pytest.raises(TypeError, match="Invalid function argument"):
        safecomm.all_reduce("no tensor")


def test_sizes_and_files_are_checked(tmp_path, monkeypatch):
    for wrong in (0, -1, "8", True):
        with pytest.raises(ValueError, match="bucketed: bucket_mb="):
            bucketed(wrong)
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps({"bucket_mb": 7.5}))
    assert read_tuning(path) == 7.5
    monkeypatch.setenv("SAFECOMM_BUCKETS", str(path))
    assert bucketed().bucket_mb == 7.5
    assert bucketed(3).bucket_mb == 3.0
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"buckets\.json is not a file of"):
        bucketed()
    monkeypatch.delenv("SAFECOMM_BUCKETS")
    assert bucketed().bucket_mb == 25.0
