"""Ranks that are threads of one process, each with groups of its own: torch's threaded backend, which tests use."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

import safecomm
from safecomm.collectives import groups as ends
from safecomm.collectives.regions import REGIONS
from safecomm.core import drain

threaded = pytest.importorskip(
    "torch.testing._internal.distributed.multi_threaded_pg", reason="torch has no such thing"
)


@contextlib.contextmanager
def world_of_threads():
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        isolate(False)


def run(body, size=2, backend="threaded"):
    """Run ``body(rank)`` on ``size`` ranks that are threads, and raise what the first one of them has raised."""
    store, errors = stock.HashStore(), []

    def rank_of(rank):
        try:
            stock.init_process_group(backend, rank=rank, world_size=size, store=store)
            body(rank)
            if stock.is_initialized():
                safecomm.destroy_process_group()
            assert stock.group.WORLD is None
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    with world_of_threads():
        ranks = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        assert not any(rank.is_alive() for rank in ranks)
    if errors:
        raise errors[0]
    assert safecomm.pending() == []
    assert not REGIONS


@pytest.fixture(params=["import", "patch"])
def dist(request):
    """Return what programs call: safecomm, or torch with safecomm in its place."""
    if request.param == "import":
        yield safecomm
    else:
        with safecomm.patched():
            yield stock


@pytest.fixture(params=["threaded", "gloo"])
def backend(request):
    return request.param


def groups():
    """Return each way to name the default group."""
    return (None, stock.group.WORLD)


def test_a_call_without_a_group_is_of_the_threads_own(dist, backend):
    def body(rank):
        for group in groups():
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [1.0] * 3
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work.wait()
            assert tensor.tolist() == [2.0] * 3

    run(body, backend=backend)


def test_a_default_group_of_the_process_is_not_taken_for_the_threads(dist, backend):
    stock.init_process_group("gloo", store=stock.HashStore(), rank=0, world_size=1)
    try:
        home = torch.ones(2)
        dist.all_reduce(home)  # makes the route of the process's group

        def body(rank):
            tensor = torch.full((2,), float(rank + 1))
            dist.all_reduce(tensor)
            assert tensor.tolist() == [3.0, 3.0]
            parts = [torch.zeros(2) for _ in range(2)]
            dist.all_gather(parts, torch.full((2,), float(rank)))
            assert torch.stack(parts).tolist() == [[0.0, 0.0], [1.0, 1.0]]

        run(body, backend=backend)
        dist.all_reduce(home)
        assert home.tolist() == [1.0, 1.0]
    finally:
        stock.destroy_process_group()


@pytest.mark.parametrize("async_ops", [False, True])
def test_a_region_comes_to_what_it_comes_to_in_torch(dist, backend, async_ops):
    def body(rank):
        for group in groups():
            first, second = torch.full((2,), float(rank)), torch.ones(1)
            with dist._coalescing_manager(group=group, async_ops=async_ops) as region:
                assert dist.all_reduce(first, group=group) is None
                dist.all_reduce(second, group=group)
                assert stock.group.WORLD in c10d._world.pg_coalesce_state
            if async_ops:
                region.wait()
            assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0])
            assert not c10d._world.pg_coalesce_state

    run(body, backend=backend)


def test_torchs_own_function_is_collected_by_a_region_of_ours(backend):
    def body(rank):
        ours, theirs = torch.full((2,), float(rank)), torch.ones(1)
        with safecomm._coalescing_manager():
            safecomm.all_reduce(ours)
            stock.all_reduce(theirs)
            if backend == "threaded":
                assert theirs.tolist() == [1.0], "it was to be launched at the end"
        assert (ours.tolist(), theirs.tolist()) == ([1.0, 1.0], [2.0])

    run(body, backend=backend)


def test_a_region_that_an_exception_leaves_is_closed(dist, backend):
    def body(rank):
        tensor = torch.ones(2)

        def left():
            with dist._coalescing_manager():
                dist.all_reduce(tensor)
                raise ValueError("of the program")

        with pytest.raises(ValueError, match="of the program"):
            left()
        assert tensor.tolist() == [1.0, 1.0]
        assert not c10d._world.pg_coalesce_state
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]

    run(body, backend=backend)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_region_of_one_call_and_one_of_gathers(dist):
    def body(rank):
        tensor, whole, other = torch.full((2,), float(rank)), torch.zeros(4), torch.zeros(4)
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(whole, tensor)
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(other, tensor)
            dist.all_gather_into_tensor(whole, tensor + 1)
        assert (other.tolist(), whole.tolist()) == ([0, 0, 1, 1], [1, 1, 2, 2])

    run(body)


def test_lists_and_functional_calls(dist, backend):
    def body(rank):
        tensor = torch.full((2,), float(rank))
        parts = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(parts, tensor)
        assert torch.cat(parts).tolist() == [0, 0, 1, 1]
        out = torch.zeros(2)
        dist.scatter(out, parts if rank == 0 else None, src=0)
        assert out.tolist() == [rank] * 2
        dist.broadcast(out, 1)
        assert out.tolist() == [1, 1]
        summed = functional.all_reduce(tensor, "sum", stock.group.WORLD)
        assert functional.wait_tensor(summed).tolist() == [1, 1]
        dist.barrier()

    run(body, backend=backend)


def test_buckets_are_of_the_threads_group(backend):
    def body(rank):
        first, second = torch.full((2,), float(rank)), torch.ones(1)
        with safecomm.bucketed():
            safecomm.all_reduce(first)
            safecomm.all_reduce(second)
        assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0])

    run(body, backend=backend)


def test_the_end_of_a_threads_groups_waits_for_their_works_s7(dist, monkeypatch):
    waiting = threading.Event()

    def await_works(*args, **kwargs):
        waiting.set()
        drain.await_works(*args, **kwargs)

    monkeypatch.setattr(ends, "await_works", await_works)

    def body(rank):
        pair = stock.new_group([0, 1])
        tensors = [torch.full((4,), float(rank + 1)) for _ in range(2)]
        if rank == 0:
            assert waiting.wait(60)  # the other rank is in the end of its groups, and its works are not over
        for tensor, group in zip(tensors, (None, pair), strict=True):
            dist.all_reduce(tensor, group=group, async_op=True)
        dist.destroy_process_group()
        assert [tensor.tolist() for tensor in tensors] == [[3.0] * 4] * 2

    run(body, backend="gloo")


def test_the_end_of_a_threads_groups_is_not_the_end_of_others_s7(dist):
    """Neither waits it for works of another thread, nor does it give up their memory."""
    launched, ended = threading.Event(), threading.Event()

    def body(rank):
        pair = stock.new_group([0, 2])
        tensor = torch.full((4,), float(rank))
        if rank == 1:
            assert launched.wait(60)
            dist.destroy_process_group()
            ended.set()
            return
        if rank == 2:
            assert ended.wait(60)
        work = dist.all_reduce(tensor, group=pair, async_op=True)
        launched.set()
        assert ended.wait(60)
        assert "quarantined" not in [entry.state for entry in safecomm.pending()]
        assert work.wait()
        assert tensor.tolist() == [2.0] * 4

    run(body, size=3, backend="gloo")
