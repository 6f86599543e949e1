"""What a review of changes for speed showed: each of these once hung, diverged or cost too much."""

import contextlib
import gc
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as stock
from ranks import on
from torch.utils._python_dispatch import TorchDispatchMode

import safecomm
from safecomm import captures, entries
from safecomm.arena.layout import Layout
from safecomm.collectives import call
from safecomm.ledger import LEDGER

INTERRUPTED = """
import signal, time
import torch, torch.distributed as dist
import safecomm
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
class Interrupt(Exception): pass
armed = False
def handler(*_):
    if armed: raise Interrupt
signal.signal(signal.SIGALRM, handler)
tensors = [torch.ones(4) for _ in range(50)]
for number in range(60000):
    armed = True
    try:
        with safecomm.bucketed():
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + number % 100 * 1e-6)
            while True:
                for tensor in tensors: safecomm.all_reduce(tensor)
    except Interrupt:
        armed = False
"""


def test_an_exception_of_a_signal_handler_leaves_no_lock_behind():
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=50)


def test_the_collector_may_end_a_capture_while_lanes_are_moved():
    class Graph:
        pass

    def fail():
        graph = Graph()
        captures.begin(captures.CapturedGraph(LEDGER, graph, (0, 1), [], 0, 7, 42, sys._getframe()), graph)
        graph.itself = graph

    def collect_in_the_middle(frame, event, arg):
        if frame.f_code is entries.keys_of.__code__:
            sys.settrace(None)
            gc.collect()

    def divert():
        sys.settrace(collect_in_the_middle)
        with LEDGER.diverted():
            pass

    gc.disable()
    try:
        fail()
        thread = threading.Thread(target=divert, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        assert captures.RECORDING == {}
    finally:
        gc.enable()


def asked(layout, used, kind, stream, capture=0, usable=lambda _: True):
    found = layout.take((kind,), 512, stream, capture, "", usable)
    if found is not None:
        layout.put(found[0])
        used.add(found[0])
    return found


def test_streams_that_take_turns_do_not_wait_for_each_other_while_there_is_room():
    used = set()
    layout = Layout(1 << 20, {}, lambda slot, _: slot not in used)
    for _ in range(4):
        for stream in (1, 2):
            assert not asked(layout, used, f"of {stream}", stream)[1]
            used.clear()


def test_a_capture_begins_with_what_nobody_has_to_be_waited_for():
    used = set()
    layout = Layout(1 << 20, {}, lambda slot, _: slot not in used)
    asked(layout, used, "another thread's", 1)
    used.clear()
    assert asked(layout, used, "captured", 5, 9, lambda after: not after) is not None


@pytest.mark.parametrize("exact", [False, True])
def test_looking_whether_all_are_idle_does_not_take_longer_with_each_slot(exact):
    used, looks = set(), []
    layout = Layout(1 << 20, {}, lambda slot, _: looks.append(slot) or slot not in used)
    layout.exact = exact
    last = asked(layout, used, 0, 1)[0]
    for kind in range(1, 1000):
        newer = asked(layout, used, kind, 1)[0]
        used.discard(last)
        last = newer
    assert len(looks) < 4000


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@on(2, interpreted=True)
def test_an_engine_is_asked_once_also_where_one_rank_has_a_mode():
    from test_low_latency import switched_on

    with switched_on(check=True) as ours:
        safecomm.all_reduce(torch.ones(1 << 20))
        safecomm.all_reduce(torch.ones(1 << 20))
        before = ours._engine._compared
        with Sees() if stock.get_rank() == 0 else contextlib.nullcontext():
            safecomm.all_reduce(torch.ones(1 << 20))
        assert ours._engine._compared == before + 1


@on(2, interpreted=True)
def test_a_bucketed_block_that_ends_in_another_thread_changes_no_way():
    from test_low_latency import switched_on

    other = stock.new_group()
    with switched_on() as ours:
        safecomm.all_reduce(torch.ones(1 << 20))  # the lane is there
        block = contextlib.ExitStack()

        def end_after(frame, event, arg):
            if frame.f_code is call.by_engine.__code__:
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
    from test_low_latency import switched_on

    group = stock.group.WORLD
    with switched_on() as ours:

        def switch_off(frame, event, arg):
            if frame.f_code is call.by_engine.__code__:
                sys.settrace(None)
                call.ENGINES.pop(group)

        sys.settrace(switch_off)
        tensor = torch.ones(16)
        safecomm.all_reduce(tensor)
        call.ENGINES[group] = ours._engine
        assert tensor.tolist() == [2.0] * 16
