"""Blocks that an exception leaves where nothing can catch it: later calls run, or raise, and are never collected (S8).

The exception comes at each place in turn where a signal handler can raise while a block is opened, used and closed.
"""

import contextlib
import dis
import functools
import gc
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from ranks import on

import safecomm
from safecomm import block
from safecomm.arena import use
from safecomm.arena.arena import OPEN
from safecomm.block import Block
from safecomm.collectives import bucketed, coalesced, takers
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.takers import BUCKETS

GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
OPENING = {module.__file__ for module in (block, bucketed, coalesced, takers, contextlib, use)}
"""The files of what opens and closes blocks, and of what is called in between."""


class Interrupt(BaseException):
    """As a signal handler raises."""


@functools.cache
def _places(code):
    """Return where in ``code`` the interpreter runs signal handlers: at the start, after calls, and in loops."""
    found = set()
    before = "RESUME"
    for instruction in dis.get_instructions(code):
        if (before == "RESUME" or before.startswith("CALL")) and instruction.opname not in ("RESUME", "CACHE"):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction.opname
    return found


class Interrupted:
    """Raises :class:`Interrupt` at the place ``number`` of those that the files of ``OPENING`` come to inside."""

    def __init__(self, number):
        self.left = number

    def __enter__(self):
        sys.settrace(self._called)

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, argument):
        if frame.f_code.co_filename not in OPENING:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise Interrupt
        return self._step


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


def _arena_in_use():
    with safecomm.use_arena(OPEN[-1]):
        safecomm.empty(4)


def _arena_in_use_twice():
    use = safecomm.use_arena(OPEN[-1])
    with use, use:
        safecomm.empty(4)


ARENAS = [_arena_in_use, _arena_in_use_twice]
BLOCKS = [_region, _region_of_nothing, _asynchronous_region, _bucketed, _bucketed_around_others, _decorated]


@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("run", BLOCKS + ARENAS)
@on(1)
def test_no_interrupt_leaves_a_block_open_s8(run, kept):
    arena = safecomm.Arena("64KiB", "cpu")
    run()
    gc.collect()
    gc.disable()
    errors = []
    collecting = []
    number = 0
    try:
        while True:
            try:
                with Interrupted(number):
                    run()
            except BaseException as error:
                if kept:  # as a notebook does, and with it all frames
                    errors.append(error)
            else:
                break
            if c10d._world.pg_coalesce_state or BUCKETS or use.IN_USE:
                collecting.append(number)
                c10d._world.pg_coalesce_state.clear()
                BUCKETS.clear()
                use.IN_USE.clear()
                use._order.clear()
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
    arena.close()
    safecomm.drain(wait=True)


@on(1)
def test_no_signal_leaves_a_block_open_s8():
    """The same with real signals, whose handlers run where the interpreter lets them."""
    assert threading.current_thread() is threading.main_thread()
    raised = [0, 0]

    def handler(*_):
        raised[0] += 1
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    gc.disable()  # a finalizer would swallow the exception
    try:
        for number in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 300 * 1e-6)
                while raised[0] == raised[1]:
                    BLOCKS[number % 2 * 3]()
            except Interrupt:
                pass
            raised[1] = raised[0]
            assert not c10d._world.pg_coalesce_state
            assert not BUCKETS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert raised[0] == 2000
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


def test_a_block_that_dies_is_closed_and_one_that_ends_is_not_closed_again():
    closed = []

    class Once(Block):
        def __init__(self, ends):
            self.ends = ends

        def __enter__(self):
            self._close_by(closed.append)

        def _leave(self, *_):
            if self.ends:
                self._closed()

    with Once(True):
        gc.collect()
    assert closed == []
    with Once(False):
        gc.collect()
        assert closed == []
    assert len(closed) == 1
