"""Regions and ``bucketed()``: an exception leaves neither open, wherever it comes. Later calls run, or raise (S8).

The exception comes at each place in turn where a signal handler can raise while one is opened, used and closed.
"""

import contextlib
import gc

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from interrupts import Interrupted
from ranks import on

import safecomm
from safecomm.collectives import block, bucketed, coalesced, takers
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.takers import BUCKETS

GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
OPENING = {module.__file__ for module in (block, bucketed, coalesced, takers, contextlib)}
"""The files of what opens and closes blocks, and of what is called in between."""


def _opens(frame):
    return frame.f_code.co_filename in OPENING


def _region():
    with safecomm._coalescing_manager():
        safecomm.all_reduce(torch.ones(4))
        safecomm.all_reduce(torch.ones(2))


def _region_of_nothing():
    with safecomm._coalescing_manager():
        pass


def _asynchronous_region():
    with safecomm._coalescing_manager(async_ops=True) as manager:
        safecomm.all_reduce(torch.ones(4))
    manager.wait()


def _bucketed():
    with safecomm.bucketed(1):
        safecomm.all_reduce(torch.ones(4))
        safecomm.all_reduce(torch.ones(2))


def _bucketed_around_others():
    with safecomm.bucketed(1):
        safecomm.all_reduce(torch.ones(4))
        safecomm.broadcast(torch.ones(4), 0)
        with safecomm._coalescing_manager():
            safecomm.all_reduce(torch.ones(4))


@safecomm.bucketed(1)
def _decorated():
    safecomm.all_reduce(torch.ones(4))


BLOCKS = [_region, _region_of_nothing, _asynchronous_region, _bucketed, _bucketed_around_others, _decorated]


@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("run", BLOCKS)
@on(1)
def test_no_interrupt_leaves_a_block_open_s8(run, kept):
    run()
    gc.collect()
    gc.disable()
    errors = []
    collecting = []
    number = 0
    try:
        while True:
            try:
                with Interrupted(number, _opens):
                    run()
            except BaseException as error:
                if kept:  # as a notebook does, and with it all frames
                    errors.append(error)
            else:
                break
            if c10d._world.pg_coalesce_state or BUCKETS:
                collecting.append(number)
                c10d._world.pg_coalesce_state.clear()
                BUCKETS.clear()
            number += 1
    finally:
        gc.enable()
    assert number > 10  # or nothing was interrupted
    assert collecting == []
    found = torch.zeros(4)
    getattr(safecomm, GATHER)(found, torch.ones(4))
    assert found.tolist() == [1] * 4
    errors.clear()
    gc.collect()
    assert not ROUTES._kept_back  # later calls are as fast as before
    safecomm.drain(wait=True)


@on(1)
def test_blocks_by_hand_and_in_an_exit_stack_s8():
    for make in (safecomm._coalescing_manager, safecomm.bucketed):
        with contextlib.ExitStack() as stack:
            stack.enter_context(make())
            safecomm.all_reduce(torch.ones(2))
            assert c10d._world.pg_coalesce_state or BUCKETS
        assert not c10d._world.pg_coalesce_state
        assert not BUCKETS
        one = make()
        assert hasattr(one, "__exit__")
        one.__enter__()
        gc.collect()
        tensor = torch.ones(2)
        safecomm.all_reduce(tensor)
        assert c10d._world.pg_coalesce_state or BUCKETS
        one.__exit__(None, None, None)
        one.__exit__(None, None, None)  # as torch's: nothing
        assert not c10d._world.pg_coalesce_state
        assert not BUCKETS


@on(1)
def test_what_was_not_entered_is_not_left_and_nothing_is_entered_twice_s8():
    manager = safecomm._coalescing_manager()
    with pytest.raises(RuntimeError, match="had not been entered"):
        manager.__exit__(None, None, None)
    with manager:
        pass
    with pytest.raises(AttributeError, match="only once"):  # as torch
        manager.__enter__()
    assert not c10d._world.pg_coalesce_state


@on(2)
def test_a_region_on_a_rank_outside_of_its_group_s8():
    """As torch's: the calls warn, and nothing else happens."""
    group = stock.new_group([0])
    for dist in (stock, safecomm):
        warned = (
            pytest.warns(UserWarning, match="not belong|not part of") if stock.get_rank() else contextlib.nullcontext()
        )
        for asynchronous in (False, True):
            with warned, dist._coalescing_manager(group=group, async_ops=asynchronous) as manager:
                dist.all_reduce(torch.ones(4), group=group)
            if asynchronous and not stock.get_rank():
                manager.wait()
