"""The end of a coalescing region of several calls: launched past c10d's manager where each is plain, else by it."""

import contextlib
import gc
import sys
import weakref
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as stock
from ranks import on
from watching import Sees, cpu_profile

import safecomm
from safecomm.collectives import coalesced, holding
from safecomm.collectives import tensors as tensors_of_calls
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.table import ROWS
from safecomm.core import captures
from safecomm.core.streams import HOST

GATHER, SCATTER = ROWS["all_gather_single"].name, ROWS["reduce_scatter_single"].name


@contextlib.contextmanager
def past_c10d():
    """Note how many calls each region launches past c10d's manager."""
    launched = []
    together = coalesced._together

    def noting(*arguments):
        found = together(*arguments)
        if found is not None:
            launched.append(len(found.given))
        return found

    with mock.patch.object(coalesced, "_together", noting):
        yield launched


def made(name, count=3):
    """Return what ``count`` calls are given: each its output and its input."""
    rank, world = stock.get_rank(), stock.get_world_size()
    parts = [torch.arange(2.0) + 10 * number + rank for number in range(count)]
    wholes = [torch.arange(2.0 * world) * (rank + 1) + number for number in range(count)]
    if name == "all_reduce":
        return [(part,) for part in parts]
    return list(zip(wholes, parts, strict=True) if name == GATHER else zip(parts, wholes, strict=True))


def region(library, calls, name, asynchronous, **how):
    with library._coalescing_manager(async_ops=asynchronous) as manager:
        for given in calls:
            getattr(library, name)(*given, **how)
    return manager


def begin():
    safecomm.all_reduce(torch.ones(1))  # makes the route


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", GATHER, SCATTER])
@on(2)
def test_a_region_of_plain_calls_does_what_torchs_does_s8(name, asynchronous):
    begin()
    for op in (None,) if name == GATHER else (None, stock.ReduceOp.MAX):
        results = []
        for library in (stock, safecomm):
            calls = made(name)
            with past_c10d() as launched:
                manager = region(library, calls, name, asynchronous, **({} if op is None else {"op": op}))
            assert launched == ([] if library is stock else [3])
            assert len(manager.works) == asynchronous
            manager.wait()
            results.append([([one.tolist() for one in given], [one._version for one in given]) for given in calls])
        assert results[0] == results[1]
    assert safecomm.pending() == []


@pytest.mark.parametrize("name", ["all_reduce", GATHER, SCATTER])
@on(2)
def test_its_work_holds_all_tensors_until_it_was_waited_for_s1_s2(name):
    begin()
    calls = made(name)
    manager = region(safecomm, calls, name, True)
    (entry,) = safecomm.pending()
    assert (entry.op, entry.nbytes) == ("_coalescing_manager", sum(one.nbytes for given in calls for one in given))
    assert "in region" in entry.site
    memory = [weakref.ref(one.untyped_storage()) for given in calls for one in given]
    (work,) = manager.works
    aliases = list(work.aliases)
    assert {alias.data_ptr() for alias in aliases} == {one.data_ptr() for given in calls for one in given}
    manager.wait()
    assert safecomm.pending() == []
    assert [alias.untyped_storage().nbytes() for alias in aliases] == [0] * len(aliases)  # c10d may keep them
    del calls, work
    if name == "all_reduce":  # gloo keeps views of the others' outputs with its work
        assert [one() for one in memory] == [None] * len(memory)  # while somebody keeps the handle
    with pytest.raises(safecomm.SafecommError, match=r"before wait\(\)"):
        manager.works[0].result()


@on(2)
def test_a_region_keeps_nothing_of_what_it_has_launched_at_its_end_s2():
    begin()
    gc.disable()
    try:
        calls = made("all_reduce")
        memory = [weakref.ref(one.untyped_storage()) for given in calls for one in given]
        manager = region(safecomm, calls, "all_reduce", False)
        del calls
        assert [one() for one in memory] == [None] * 3
        assert manager.works == []
    finally:
        gc.enable()


@on(2)
def test_a_dropped_region_is_held_until_it_is_over_s3():
    begin()
    calls = made("all_reduce")
    region(safecomm, calls, "all_reduce", True)
    assert safecomm.drain(wait=True) == 0
    assert safecomm.pending() == []
    world = stock.get_world_size()
    assert calls[0][0].tolist() == [sum(range(world)), world + sum(range(world))]


@pytest.mark.parametrize("plain", [True, False])
@on(2)
def test_a_region_whose_end_gloo_does_not_tell_s3_s8(plain):
    """gloo's reduce-scatter copies its result at each wait, and is not over before the first."""
    begin()
    with contextlib.nullcontext() if plain else mock.patch.object(coalesced, "_together", return_value=None):
        dropped, waited = made(SCATTER), made(SCATTER)
        region(safecomm, dropped, SCATTER, True)
        assert safecomm.drain(wait=True, timeout=timedelta(seconds=60)) == 0
        (work,) = region(safecomm, waited, SCATTER, True).works
        for _ in range(2):
            assert work.wait()
    assert safecomm.pending() == []
    expected = made(SCATTER)
    region(stock, expected, SCATTER, False)
    for calls in (dropped, waited):
        assert [given[0].tolist() for given in calls] == [given[0].tolist() for given in expected]


@on(2)
def test_regions_of_several_calls_that_are_c10ds_s8():
    begin()

    def two(first=None, second=None, **how):
        with safecomm._coalescing_manager(**how) as manager:
            safecomm.all_reduce(torch.ones(2) if first is None else first)
            safecomm.all_reduce(torch.ones(2) if second is None else second)
        manager.wait()

    def without_gradients():
        with safecomm._coalescing_manager(), torch.no_grad():
            safecomm.all_reduce(torch.ones(2, requires_grad=True))
            safecomm.all_reduce(torch.ones(2, requires_grad=True))

    def mixed(library):
        with library._coalescing_manager():
            library.all_reduce(torch.ones(2))
            getattr(library, SCATTER)(torch.ones(2), torch.ones(4))

    with past_c10d() as launched:
        with cpu_profile():
            two()
        with Sees():
            two()
        with mock.patch.object(coalesced, "_inflight", return_value=True):
            two(async_ops=True)
        with mock.patch.dict(captures.RECORDING, {1: None}), mock.patch.object(coalesced, "relaxed") as way:
            way.return_value = contextlib.nullcontext()
            two()
            assert way.called
        with ROUTES.off():
            two()
        two(first=torch.ones(2, dtype=torch.complex64), second=torch.ones(2, dtype=torch.complex64))
        with pytest.raises(RuntimeError, match="leaf"):
            without_gradients()
        try:
            mixed(stock)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="same type"):
                mixed(safecomm)
        else:  # torch 2.4 takes all for calls of the first's kind
            mixed(safecomm)
        with safecomm._coalescing_manager():  # one was called through torch's own function
            safecomm.all_reduce(torch.ones(2))
            stock.all_reduce(torch.ones(2))
        with mock.patch.object(coalesced, "_ORDINARY", False):
            two()
        assert launched == []
        two()
        assert launched == [2]
    assert stock.group.WORLD not in REGIONS


@on(2)
def test_a_call_that_comes_at_the_end_of_a_region_is_not_lost_s8():
    begin()
    late, together = torch.ones(2), coalesced._together

    def interrupted(*arguments):
        found = together(*arguments)
        safecomm.all_reduce(late)  # as a signal handler can
        return found

    with mock.patch.object(coalesced, "_together", interrupted):
        calls = made("all_reduce")
        region(safecomm, calls, "all_reduce", False)
    assert late.tolist() == [2, 2]
    assert calls[0][0].tolist() == [1, 3]


@on(1)
def test_on_a_device_a_region_knows_where_its_memory_was_allocated_s1():
    tensors = [torch.ones(2), torch.ones(2), torch.ones(2)]
    group = stock.group.WORLD
    for local in (True, False):
        route, ledger, inner = mock.Mock(index=0), mock.Mock(), mock.Mock(spec=stock.Work)
        together = coalesced._Together(lambda *_: inner, None, route, tensors, [])  # noqa: B023 (it is called here)
        route.launch = lambda function, *given: function(*given)
        where = lambda *_, local=local: local  # noqa: E731
        with (
            mock.patch.multiple(holding, _current=lambda _: 5, LEDGER=ledger),
            mock.patch.multiple(tensors_of_calls, _current=lambda _: 5, _all_allocated_on=where),
            mock.patch.multiple(coalesced, _current=lambda _: 5, _all_allocated_on=where),
            mock.patch.dict(holding.ROUTES.fast, {id(group): route}),
        ):
            assert together.launch(group, False, True, sys._getframe()) is None
            assert route.wait_for.call_args.args == (inner,)
            assert ledger.hand_off.called is not local
            together.launch(group, True, True, sys._getframe())
            assert route.hold.call_args.args[4] == (5 if local else None)
            assert len(route.hold.call_args.args[3]) == 3
            ledger.hand_off.reset_mock()
            route.wait_for.side_effect = RuntimeError("too late")
            with pytest.raises(RuntimeError, match="too late"):
                together.launch(group, False, True, sys._getframe())
            assert ledger.hand_off.called is not local


@pytest.mark.parametrize("made_in_mode", [False, True])
@pytest.mark.parametrize("launched_in_mode", [False, True])
def test_c10d_is_given_the_tensor_itself_where_an_alias_would_be_of_another_kind_s8(made_in_mode, launched_in_mode):
    """Outside of inference mode torch refuses to write to what was made in it, and an alias it would not refuse."""
    with torch.inference_mode(made_in_mode):
        tensor = torch.ones(2)
    aliases = []
    with torch.inference_mode(launched_in_mode):
        (given,) = coalesced._aliases([tensor], aliases)
    assert (given is tensor) == (made_in_mode != launched_in_mode)
    assert aliases == ([] if given is tensor else [given])


@pytest.mark.parametrize("answer", ["a work", "nothing", "an error"])
@on(1)
def test_what_c10d_keeps_of_a_region_that_has_ended_has_no_memory_s2(answer):
    """ProcessGroupNCCL keeps what it was given until the group's next collective. Threads of gloo may still come."""
    tensor, waited, given = torch.ones(2), [], []

    def wait_for(inner):
        waited.append((inner, given[0].numel()))
        if answer == "an error":
            raise RuntimeError("too late")

    inner = None if answer == "nothing" else "a work"
    route = SimpleNamespace(index=HOST, asks_in_wait=False, wait_for=wait_for)
    together = coalesced._Together(lambda _, tensors, __: given.extend(tensors) or inner, None, route, [tensor], [])
    with pytest.raises(RuntimeError) if answer == "an error" else contextlib.nullcontext():
        assert together.launch(stock.group.WORLD, False, True, sys._getframe()) is None
    assert waited == ([] if inner is None else [(inner, 2)])
    (alias,) = given
    kept = answer == "an error"
    assert (alias.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()) is kept
    assert (alias.numel(), tensor.numel()) == (2 if kept else 0, 2)
