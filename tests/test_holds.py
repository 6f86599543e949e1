"""Holds and their queues: what other threads, finalizers, signal handlers and torch's modes do not change (S1, S3)."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from device import Event
from simulated import INDEX, FakeGroup, SimulatedDevice, call, call_sync, routes_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from safecomm import _torch
from safecomm._torch import tensors
from safecomm.core import uses
from safecomm.core.captures import CapturedGraph
from safecomm.core.drain import drain_ledger
from safecomm.core.holds import Hold, Queue, first_of
from safecomm.core.ledger import Ledger
from safecomm.core.streams import HOST
from safecomm.core.uses import Events, Use
from safecomm.core.work import Work
from safecomm.errors import PendingWorkError


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def ledger(device: SimulatedDevice) -> Ledger:
    return Ledger(device, patience=0)


# --- queues -----------------------------------------------------------------------------------------------------------


class Changed(OrderedDict[Any, None]):
    """Holds that another thread changes while they are looked at, for as often as ``times``."""

    def __init__(self, found: Any, times: int, *, takes_all: bool = False) -> None:
        super().__init__(found)
        self.times = times
        self.takes_all = takes_all

    def __iter__(self) -> Any:
        if self.times:
            self.times -= 1
            if self.takes_all:
                self.clear()
                return iter(())
            raise RuntimeError("OrderedDict mutated during iteration")
        return super().__iter__()


def queue_of(ledger: Ledger, found: Any = ()) -> Queue:
    """Return a queue of ``ledger`` that has ``found``."""
    queue = Queue(ledger, {}, "key", INDEX)
    queue.holds = found
    return queue


def test_the_oldest_hold_is_found_while_others_are_taken_out_s3(ledger) -> None:
    found = dict.fromkeys(["oldest", "newest"])
    assert queue_of(ledger, Changed(found, 3)).first() == "oldest"
    assert queue_of(ledger, Changed(found, 1, takes_all=True)).first() is None
    assert queue_of(ledger, Changed({}, 1)).first() is None
    assert first_of(Changed(found, 3), 1) == ("oldest",)
    assert first_of(Changed(found, 3), 5) == ("oldest", "newest")
    assert first_of(Changed(found, 0), 1, reversed) == ("newest",)


def test_a_queue_that_another_thread_adds_to_as_it_becomes_empty_is_not_lost_s3(ledger) -> None:
    """Nobody would sweep it any more."""
    queue = queue_of(ledger, OrderedDict())

    class Interrupted(dict[Any, None]):
        def pop(self, key: Any, *default: Any) -> Any:
            super().pop(key, *default)
            queue.holds["of another thread"] = None
            self[queue] = None  # which comes too early, or too late: either way it has to be there

    queue.nonempty = Interrupted({queue: None})
    queue.note_empty()
    assert queue in queue.nonempty

    class TooEarly(Interrupted):
        def pop(self, key: Any, *default: Any) -> Any:
            super().pop(key, *default)
            dict.pop(self, key)

    queue.holds.clear()
    queue.nonempty = TooEarly({queue: None})
    queue.note_empty()
    assert queue in queue.nonempty


def test_the_queue_of_a_capture_is_forgotten_with_its_last_hold(device, ledger) -> None:
    """A capture comes only once, and programs make many."""
    device.begin_capture(1)
    group = FakeGroup(device, "nccl")
    launched = [call(ledger, group, [device.allocate(1, 64)]) for _ in range(2)]
    table = launched[0].work.queue.table
    before = len(table)
    launched[0].work.wait()
    assert len(table) == before
    launched[1].work.wait()
    assert len(table) == before - 1


# --- release ----------------------------------------------------------------------------------------------------------


class Told:
    """An observer, which may be interrupted as it is told of a release."""

    def __init__(self, *, interrupted: bool = False) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.interrupted = interrupted

    def held(self, hold: Hold) -> None:
        self.events.append(("held", hold.op, hold.nbytes))

    def released(self, hold: Hold) -> None:
        self.events.append(("released", hold.op, hold.nbytes))
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt


def test_an_observer_is_told_of_each_hold_and_of_its_release(device, ledger) -> None:
    ledger.observer = told = Told()
    group = FakeGroup(device, "nccl")
    tensor = device.allocate(0, 64)
    work = call(ledger, group, [tensor])
    device.switch(1)
    sync = call_sync(ledger, group, [tensor])
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 2, sys._getframe())
    assert told.events == [("held", work.op, 64), ("held", sync, 64), ("held", "record_stream", 64)]
    device.switch(0)
    work.work.wait()
    del tensor, work.inner.outputs[:]
    device.finish()
    drain_ledger(ledger, wait=True)
    assert sorted(told.events[3:]) == sorted(("released", op, 0) for op in (work.op, sync, "record_stream"))


@pytest.mark.parametrize("p2p", [False, True])
def test_what_an_exception_of_a_signal_handler_leaves_in_its_queue_is_taken_out_by_the_next_call_s3(
    device, ledger, p2p
) -> None:
    """Also where the backend never tells that a work is complete: it holds nothing any more."""
    launched = call(ledger, FakeGroup(device, "gloo"), [device.allocate(None, 64)], p2p=p2p, index=HOST)
    ledger.observer = Told(interrupted=True)
    with contextlib.suppress(KeyboardInterrupt):
        launched.work.wait()
        raise AssertionError
    assert ledger.nonempty
    ledger.sweep()
    assert not ledger.nonempty
    assert launched.work.wait() is True


def test_a_work_of_which_the_backend_does_not_tell_is_waited_for_by_drain_s3(device, ledger) -> None:
    """Any work, such as a region's, and not only the handle of a send or receive."""
    group, tensor = FakeGroup(device, "gloo"), device.allocate(None, 64)
    inner = call(Ledger(device), group, [tensor], index=HOST).inner
    work: Any = Work()
    storages = (tensor.untyped_storage(),)
    routes_of(ledger).hold(work, "region", inner, group, HOST, storages, sys._getframe(), unordered=True)
    ledger.sweep()
    assert [entry.op for entry in ledger.pending()] == ["region"]
    sent, here, wait = threading.Event(), threading.current_thread(), inner.wait

    def blocks() -> bool:
        assert sent.is_set() or threading.current_thread() is not here, "the caller would be blocked for ever"
        assert sent.wait(60)
        return bool(wait())

    inner.wait = blocks
    with pytest.raises(PendingWorkError):
        drain_ledger(ledger, wait=True, timeout=timedelta(0))
    assert [entry.state for entry in ledger.pending()] == ["in flight"]
    sent.set()
    assert drain_ledger(ledger, wait=True) == 0
    assert inner.waited


@pytest.mark.parametrize("complete", [False, True])
def test_of_two_threads_that_release_a_handoff_one_uses_its_event_s1(device, ledger, complete) -> None:
    """The other one would order a stream after whatever the event was recorded for since."""
    device.switch(1)
    call_sync(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    assert ledger.stream_order.recorded(INDEX, 1) is not None  # behind an event of the use
    (hold,) = ledger.holds()
    assert isinstance(hold, Use)
    for _ in range(2):
        ledger.uses.order_and_release(hold, () if complete else {0})
    assert device.calls["wait_event"] == (not complete)
    assert device.faults == []
    device.finish()


def test_a_handoff_that_another_thread_releases_is_not_polled_s5(device, ledger) -> None:
    """Its event may be recorded in a capture by then, where polling it would break that."""
    device.switch(1)
    for _ in range(2):
        call_sync(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    first, second = ledger.holds()
    assert ledger.stream_order.recorded(INDEX, 1) is not None  # both have events

    class Late:
        """A lock that another thread has had in between."""

        taken = 0

        def __enter__(self) -> None:
            self.taken += 1
            if self.taken == 1:
                ledger.release(first)

        def __exit__(self, *_: object) -> None:
            pass

    event = first.event
    ledger.lock = Late()
    polled: list[Any] = []
    query = device.query_event
    device.query_event = lambda event: (polled.append(event), query(event))[1]
    ledger.sweep()
    assert event not in polled
    assert polled == [second.event]
    assert device.faults == []
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


def test_recorded_uses_are_handed_over_but_for_an_arenas_s1(device, ledger, monkeypatch) -> None:
    """The allocator does nothing for memory of an arena: what was recorded for that goes on as it is."""
    tensors = [device.allocate(0, 64), device.allocate(0, 64)]
    for tensor in tensors:
        assert ledger.uses.record(tensor.untyped_storage(), INDEX, 1, sys._getframe())
    arenas, others = (tensor.untyped_storage() for tensor in tensors)
    monkeypatch.setitem(_torch.KEPT, _torch.cdata_of(arenas), [])
    given: list[Any] = []
    ledger.uses.hand_over(lambda *what: given.append(what))
    assert given == [(others, INDEX, 1)]
    (left,) = ledger.holds()
    assert left.storages == (arenas,)


def test_what_a_capture_recorded_and_handoffs_are_not_handed_over_s1(device, ledger) -> None:
    """A graph's pool is not to be told of streams, and of a handoff the allocator would know less than the ledger."""
    device.switch(2)
    call_sync(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    device.begin_capture(1)
    tensor = device.allocate(1, 64)
    device.wait(device.streams[3], 0, device.capturing)
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 3, sys._getframe())
    held = ledger.holds()
    assert sorted(entry.state for entry in ledger.pending()) == ["handed off", "recorded"]
    ledger.uses.hand_over(mock.Mock(side_effect=AssertionError("the allocator is told")))
    assert ledger.holds() == held
    device.finish()


def test_outputs_that_another_thread_asks_for_as_they_are_released_stay_with_the_handle_s8(device, ledger) -> None:
    """It has taken the aliases, so that the release has nothing to empty."""
    launched = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    launched.inner.result = lambda: launched.inner.outputs
    work, (output,) = launched.work, launched.inner.outputs
    work.aliases = (output,)

    real = work.on_release
    with mock.patch.object(type(work), "on_release", lambda self: (self.result(), real())):
        work.wait()
    assert ledger.pending() == []
    assert [one.nbytes for one in work.result()] == [64]


def test_a_recorded_use_that_is_not_the_latest_of_its_storage_leaves_that_one_s1(device, ledger) -> None:
    """A use that is over is a handoff, while the next one of the same memory begins."""
    tensor = device.allocate(0, 64)
    storage = tensor.untyped_storage()
    device.launch(device.streams[1], device.blocks_of([tensor]))
    assert ledger.uses.record(storage, INDEX, 1, sys._getframe())
    (first,) = ledger.holds()
    with mock.patch.object(uses, "only_holder"), mock.patch.object(ledger.uses, "only_recorded"):
        ledger.sweep(thorough=True)
    assert first.event is not None
    assert ledger.uses.record(storage, INDEX, 1, sys._getframe())
    (second,) = (hold for hold in ledger.holds() if hold is not first)
    ledger.release_all([first])
    assert list(ledger.uses.by_storage[_torch.cdata_of(storage)].values()) == [second]
    assert ledger.holds() == [second]
    assert second.storages == (storage,)


def test_what_a_graph_leaves_while_another_is_taken_over_is_not_forgotten_s6(device, ledger) -> None:
    """Graphs die whenever the garbage collector runs."""
    tensors = [device.allocate(0, 64), device.allocate(0, 64)]
    blocks = device.blocks_of(tensors)
    code = sys._getframe().f_code
    dead = ledger.uses.queue(Events, 1, INDEX)

    def leave() -> None:
        ledger.uses.add_of_graph(INDEX, (1,), (tensors.pop().untyped_storage(),), code, 0)

    class Dies(dict[Any, None]):
        def pop(self, key: Any, *default: Any) -> Any:
            if key is dead and tensors:
                leave()
            return super().pop(key, *default)

    ledger.nonempty = dead.nonempty = Dies()
    leave()
    device.finish()
    ledger.sweep()
    assert not tensors
    assert dead in ledger.nonempty
    ledger.sweep()
    assert not dead.holds
    assert dead not in ledger.nonempty
    assert ledger.pending() == []
    assert all(device.is_free(block) for block in blocks)


@pytest.mark.parametrize("then", ["goes on", "is freed"])
@pytest.mark.parametrize(
    "interrupted", [(Events, "record_events"), (SimulatedDevice, "record_event"), (Queue, "note_empty")]
)
def test_an_exception_as_a_use_gets_its_event_loses_nothing_s1(device, ledger, interrupted, then) -> None:
    tensor = device.allocate(0, 64)
    blocks = device.blocks_of([tensor])
    storage = tensor.untyped_storage()
    device.launch(device.streams[1], blocks)
    assert ledger.uses.record(storage, INDEX, 1, sys._getframe())
    (use,) = ledger.holds()
    del tensor
    del storage
    with mock.patch.object(*interrupted, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        ledger.sweep(thorough=True)
    assert set(ledger.holds()) == {use}
    device.settle()
    assert not any(map(device.is_free, blocks))
    if then == "is freed":
        device.finish()
        ledger.release_all([use])
    device.finish()
    ledger.sweep(thorough=True)
    ledger.sweep(thorough=True)
    assert ledger.pending() == []
    assert not ledger.nonempty
    device.settle()
    assert all(map(device.is_free, blocks))


def test_a_signal_handler_that_sweeps_as_a_use_gets_its_event_recycles_that_once_s1(
    device, ledger, monkeypatch
) -> None:
    tensor = device.allocate(0, 64)
    (block,) = device.blocks_of([tensor])
    device.launch(device.streams[1], [block])
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 1, sys._getframe())
    del tensor
    record, handled = device.record_event, []

    def interrupted(index: int, stream: int) -> Event:
        if not handled:
            handled.append(stream)
            device.finish()
            ledger.sweep(thorough=True)
        return record(index, stream)

    monkeypatch.setattr(device, "record_event", interrupted)
    ledger.sweep(thorough=True)
    ledger.sweep(thorough=True)
    assert handled
    assert device.faults == [], "an event is recycled twice"
    assert ledger.pending() == []
    device.settle()
    assert device.is_free(block)


def test_a_queue_of_a_capture_that_others_still_have_leaves_its_successor_in_the_table_s5(device, ledger) -> None:
    device.begin_capture(1)
    first = ledger.uses.queue(Events, 1, INDEX, device.capturing)
    ledger.uses.queues.clear()
    second = ledger.uses.queue(Events, 1, INDEX, device.capturing)
    assert first is not second
    first.note_empty()
    assert ledger.uses.queue(Events, 1, INDEX, device.capturing) is second
    second.note_empty()
    assert second not in ledger.uses.queues.values()


def test_what_is_no_storage_is_held_as_it_is_s1(device, ledger) -> None:
    """A tensor subclass without memory of its own."""
    device.switch(1)
    thing = object()
    ledger.hand_off("all_reduce", None, INDEX, (thing,), sys._getframe(), 0)
    (use,) = ledger.holds()
    assert use.storages == (thing,)
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


def test_memory_that_was_used_where_it_was_allocated_is_not_held_s2(device, ledger) -> None:
    """A caller may know the allocation stream, and need not have compared it."""
    stream = ledger.current(INDEX)
    storages = (device.allocate(stream, 64).untyped_storage(),)
    ledger.hand_off("all_reduce", None, INDEX, storages, sys._getframe(), stream)
    assert ledger.pending() == []
    assert not ledger.nonempty


# --- aliases ----------------------------------------------------------------------------------------------------------


def test_a_mode_of_the_program_leaves_nothing_of_its_own_for_later_calls(monkeypatch) -> None:
    """What takes the memory from an alias is kept, and would be a fake tensor for good."""
    monkeypatch.setattr(tensors, "_EMPTY", {})
    with FakeTensorMode():
        alias = torch.empty(4)
        tensors.leave_empty(alias)
        assert alias.numel() == 0
    assert tensors._EMPTY == {}
    real = torch.empty(4)
    tensors.leave_empty(real)
    assert type(real) is torch.Tensor
    assert real.untyped_storage().nbytes() == 0
    (kept,) = tensors._EMPTY.values()
    assert not isinstance(kept, FakeTensor)
    later = torch.ones(4)
    tensors.leave_empty(later)
    assert len(tensors._EMPTY) == 1
    assert tensors._EMPTY[torch.float32, torch.device("cpu")] is kept


def test_memory_is_taken_from_aliases_of_all_types() -> None:
    aliases = [torch.ones(4), torch.ones(2), torch.ones(4, dtype=torch.int64), torch.ones(3)]
    _torch.leave_all_empty(aliases)
    assert [alias.untyped_storage().nbytes() for alias in aliases] == [0] * 4
    assert [alias.dtype for alias in aliases] == [torch.float32, torch.float32, torch.int64, torch.float32]


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_a_graph_says_what_it_is_and_holds(device, ledger) -> None:
    class Graph:
        def capture_end(self) -> None:
            device.end_capture()

        def reset(self) -> None:
            pass

    device.begin_capture(1)
    graph, capture = Graph(), device.capturing
    captured = CapturedGraph(ledger, graph, (capture,), [], INDEX, 1, capture, sys._getframe())
    captured.begin(graph)
    group, outside = FakeGroup(device, "nccl"), device.allocate(0, 64)
    captured.add("all_reduce", group, outside, sys._getframe())
    captured.add("all_reduce", group, device.allocate(1, 0), sys._getframe())  # has no memory, so it is no argument
    assert "test_holds.py" in repr(captured)
    assert "being captured, 64 bytes held for 1 lines with collectives" in repr(captured)
    device.end_capture()
    captured.seal()
    assert ": ready, 64 bytes" in repr(captured)
    assert {"leases", "nbytes", "replay", "reset"} <= {*dir(captured)}
    assert not {"add", "begin", "seal"} & {*dir(captured)}
    graph.reset()
    assert ": reset, 0 bytes" in repr(captured)
    del graph
    assert ": dead, 0 bytes" in repr(captured)
