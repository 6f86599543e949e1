"""The three rules where a stream is unusual: of no memory, unknown, captured elsewhere, or not the one that waits."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from simulated import INDEX, FakeGroup, SimulatedDevice, call, call_sync

from safecomm.core import ledger as ledgers
from safecomm.core import uses
from safecomm.core.ledger import Ledger


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def ledger(device: SimulatedDevice) -> Ledger:
    return Ledger(device, lag=0, budget=0, use_budget=0, patience=0)


@pytest.fixture
def group(device: SimulatedDevice) -> FakeGroup:
    return FakeGroup(device, "nccl")


def test_a_tensor_without_memory_asks_no_stream_of_the_device_s3(device, ledger, group) -> None:
    """What has no memory is of no stream: the driver would take the number that stands for that for a stream."""
    call(ledger, group, [device.allocate(0, 64), device.allocate(0, 0)])
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []
    assert device.faults == []


def test_memory_of_an_unknown_stream_is_kept_however_much_has_piled_up_s1(device, ledger, group) -> None:
    """Rule 3 has no stream to order, so only the device can tell that the memory is free."""
    for _ in range(3):
        call_sync(ledger, group, [device.allocate(None, 64)])
    ledger.sweep()
    device.settle()  # raises if the memory could be handed out now
    assert [entry.state for entry in ledger.pending()] == ["handed off"] * 3
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


def test_a_complete_work_on_memory_of_an_unknown_stream_is_held_by_an_event_s1(device, group) -> None:
    """A work that is complete may have been waited for on no stream, so the current one waits, and the device tells."""
    ledger = Ledger(device, patience=0)
    work = call(ledger, group, [device.allocate(None, 64)]).work
    device.finish()
    kernel = device.launch(device.here(), [])  # which the current stream has to get past
    del work
    ledger.sweep()
    assert [entry.state for entry in ledger.pending()] == ["handed off"]
    ledger.sweep()
    assert (len(ledger.pending()), kernel & device.done) == (1, 0)
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


@pytest.mark.parametrize("how", ["dropped", "kept", "asked"])
def test_a_complete_work_on_memory_of_another_stream_waits_for_nothing_else_s3(device, group, how) -> None:
    """Not for what the current stream has to do, which may be another group's collective that never ends."""
    ledger = Ledger(device, patience=0)
    work = call(ledger, group, [device.allocate(1, 64)]).work
    device.finish()
    device.launch(device.here(), [])
    if how == "asked":
        assert work.is_completed()
    elif how == "dropped":
        del work
    if how != "asked":
        ledger.sweep()
    assert ledger.pending() == []
    device.settle()


def test_works_that_pile_up_make_no_stream_wait_but_that_of_their_memory_s3(device, group) -> None:
    few = Ledger(device, lag=1, budget=64, patience=0)
    before = device.here().eager
    for _ in range(8):
        call(few, group, [device.allocate(1, 64)])
        few.sweep()
    assert len(few.pending()) <= 2
    assert device.here().eager & ~before == 0
    device.settle()


def test_a_complete_work_on_memory_of_two_streams_waits_for_nothing_else_s3(device, group) -> None:
    ledger = Ledger(device, patience=0)
    work = call(ledger, group, [device.allocate(1, 64), device.allocate(2, 64)])
    device.finish()
    for stream in (1, 2):
        device.launch(device.streams[stream], [])
    del work
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


def test_memory_that_may_not_be_ordered_keeps_nothing_else_s3(device, group) -> None:
    """A work on it is the oldest of its queue, and others are behind."""
    few = Ledger(device, lag=1, budget=64, patience=0)
    captured_elsewhere(device)
    call(few, group, [device.allocate(1, 64)])
    for _ in range(8):
        call(few, group, [device.allocate(0, 64)])
        few.sweep()
    assert len(few.pending()) <= 3
    assert device.faults == []
    device.settle()


@pytest.mark.parametrize("home", [None, 0, 1])
def test_a_work_that_has_failed_and_says_that_it_is_complete_is_not_believed_s4(device, group, home) -> None:
    """NCCL's says so, and its wait() need not raise, while its kernel may still run."""
    ledger = Ledger(device, patience=0)
    work = call(ledger, group, [device.allocate(home, 64)], fate="silent").work
    before = {handle: stream.eager for handle, stream in device.streams.items()}
    bit = work.inner.bit
    del work
    for _ in range(2):
        ledger.sweep()
        device.settle()
    assert [entry.state for entry in ledger.pending()] == ["handed off"] * (home is None)
    after = {handle: stream.eager for handle, stream in device.streams.items()}
    waits = home or 0
    assert after == {**before, waits: before[waits] | bit}, "one stream waits, that of the memory if it is known"
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


def test_dropped_works_of_any_stream_do_not_pile_up_s3(device, group) -> None:
    few = Ledger(device, lag=4, budget=640, use_budget=640, patience=0)
    call(few, group, [device.allocate(3, 64)])  # in front of all others
    for home in (0, 2):
        for _ in range(100):
            device.switch(home)
            tensor = device.allocate(home, 64)
            device.wait(device.streams[1], device.here().eager, 0)
            device.switch(1)
            call(few, group, [tensor])
            del tensor
            assert len(few.pending()) <= 24
    device.settle()
    device.finish()
    few.sweep()
    assert few.pending() == []


def test_a_work_that_fails_as_the_end_of_its_capture_waits_for_it_is_kept_s4(device, ledger, group) -> None:
    device.begin_capture(1)
    launched = [call(ledger, group, [device.allocate(1, 64)], fate=fate) for fate in ("fails", "")]
    left = ledger.join_unwaited(device.capturing, 1)
    assert [line.split(" launched")[0] for line in left] == [one.op for one in launched]
    assert [(entry.op, entry.state) for entry in ledger.pending()] == [(launched[0].op, "quarantined")]


def test_a_graph_gets_no_edge_for_memory_that_the_program_still_uses_s5(device, ledger, group) -> None:
    """At each replay, the stream of the memory would wait for a use that the program may not want to wait for."""
    device.begin_capture(1)
    device.wait(device.streams[2], device.here().past, device.capturing)
    tensor = device.allocate(2, 64)
    call_sync(ledger, group, [tensor])
    ledger.sweep()
    assert device.calls["wait_event"] == 0
    assert len(ledger.pending()) == 1
    del tensor
    ledger.sweep()
    assert device.calls["wait_event"] == 1
    assert ledger.pending() == []
    device.settle()


# --- streams that another thread captures: an edge, or a wait, would be one of its graph -----------------------------


def recorded(device: SimulatedDevice, ledger: Ledger, allocated_on: int, release_by: str = "auto") -> None:
    """Use memory of ``allocated_on`` on stream 2, call ``record_stream`` for that, and drop the memory."""
    tensor = device.allocate(allocated_on, 64)
    device.launch(device.streams[2], device.blocks_of([tensor]))
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 2, sys._getframe(), release_by)


def captured_elsewhere(device: SimulatedDevice) -> None:
    """Let another thread capture stream 1."""
    device.begin_capture(1)
    device.switch(0)


def test_works_that_pile_up_order_no_stream_that_another_thread_captures_s5(device, ledger, group) -> None:
    works = [call(ledger, group, [device.allocate(1, 64)]) for _ in range(2)]
    del works
    captured_elsewhere(device)
    ledger.sweep()
    assert device.faults == []
    assert [entry.state for entry in ledger.pending()] == ["handed off"] * 2
    device.end_capture()
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


def test_while_another_thread_captures_no_other_stream_is_ordered_s5(device, ledger, group) -> None:
    """It may take the stream in between the question whether it is captured and the wait, which would end it."""
    captured_elsewhere(device)
    ledger.recording[device.capturing] = SimpleNamespace(goes_on=lambda: bool(device.capturing))
    device.switch(2)
    call_sync(ledger, group, [device.allocate(3, 64)])
    call_sync(ledger, group, [device.allocate(0, 64)])
    device.switch(0)
    ledger.sweep()
    assert [entry.nbytes for entry in ledger.pending()] == [64], "what is of the current stream comes back"
    assert device.streams[3].eager == 0
    device.end_capture()  # of which an exception has left the note
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


@pytest.fixture
def later(monkeypatch):
    """What makes so many seconds pass, for what decides when events are looked at again."""
    passed = 0.0

    def pass_(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    def now() -> float:
        return clock() + passed

    clock = time.perf_counter
    for where, name in ((ledgers, "_now"), (uses, "_now"), (time, "perf_counter")):
        monkeypatch.setattr(where, name, now)
    return pass_


def held_by_event(device, ledger, group, kind: str, home: int = 0) -> torch.Tensor:
    """Have the ledger hold memory of stream ``home`` that is used on stream 1, by an event, and return the tensor."""
    tensor = device.allocate(home, 64)
    if kind == "handoff":
        device.switch(1)
        call_sync(ledger, group, [tensor])
    else:
        device.launch(device.streams[1], device.blocks_of([tensor]))
        assert ledger.uses.record(tensor.untyped_storage(), INDEX, 1, sys._getframe())
    return tensor


@pytest.mark.parametrize("kind", ["handoff", "recorded use"])
def test_events_are_looked_at_once_in_a_while_s3_s10(device, group, later, kind) -> None:
    """A look takes longer than the rest of a call, and most programs give memory back by ordering their streams."""
    ledger = Ledger(device)
    ledger.interval = 100
    held_by_event(device, ledger, group, kind)
    ledger.sweep()
    assert device.calls["query"] == 0
    later(101)
    ledger.sweep()
    assert device.calls["query"] == 1
    device.finish()
    for _ in range(5):
        ledger.sweep()
        assert ledger.can_skip_sweep()
    assert device.calls["query"] == 1
    assert len(ledger.pending()) == 1
    later(101)
    assert not ledger.can_skip_sweep()
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


@pytest.mark.parametrize("kind", ["handoff", "recorded use"])
def test_events_are_looked_at_where_much_has_come_s3(device, group, later, kind) -> None:
    """A program holds no more than a few more than with a look at each call."""
    ledger = Ledger(device)
    ledger.interval = 100
    held_by_event(device, ledger, group, kind)
    ledger.sweep()
    later(101)
    ledger.sweep()
    more = ledger.lag if kind == "handoff" else 1 + ledger.lag  # the look has left none where the others come to
    for _ in range(more):
        device.finish()
        held_by_event(device, ledger, group, kind)
        assert ledger.can_skip_sweep()
    assert len(ledger.pending()) == 1 + more
    device.finish()
    held_by_event(device, ledger, group, kind)
    assert not ledger.can_skip_sweep()
    ledger.sweep()
    # A recorded use is seen to be unused in one look, and its event to be complete in the next.
    left = 1 if kind == "handoff" else 1 + more
    assert [entry.state for entry in ledger.pending()] == ["handed off"] * left
    device.finish()
    ledger.sweep(thorough=True)
    assert ledger.pending() == []


def test_works_with_futures_are_left_alone_once_and_not_for_good_s3(device, group, later) -> None:
    """A hook asks for the future of each work, and drops the handle."""
    ledger = Ledger(device)
    ledger.interval = 100
    for _ in range(3):
        call(ledger, group, [device.allocate(0, 64)]).work.get_future()
        device.finish()
        assert ledger.can_skip_sweep()
        later(101)
        assert not ledger.can_skip_sweep()
        ledger.sweep()
        assert ledger.pending() == []
    for number in range(20):
        launched = call(ledger, group, [device.allocate(0, 64)])
        later(90)
        launched.work.get_future()
        del launched
        device.finish()
        assert len(ledger.pending()) <= 1 + ledger.lag, number
    later(101)
    ledger.sweep()
    assert ledger.pending() == []


def test_what_is_recorded_and_falls_unused_does_not_pile_up_between_looks_s3(device, group, later) -> None:
    """A backward frees what a forward has recorded, and records nothing."""
    ledger = Ledger(device, use_budget=8 * 64)
    ledger.interval = 100
    kept = [held_by_event(device, ledger, group, "recorded use") for _ in range(100)]
    ledger.sweep()
    while kept:
        del kept[-1]
        ledger.sweep()
        device.finish()
        assert len(ledger.pending()) <= max(len(kept) + 2, 8)
    ledger.sweep(thorough=True)
    ledger.sweep(thorough=True)
    assert ledger.pending() == []


@pytest.mark.parametrize("kind", ["handoff", "recorded use"])
def test_in_a_capture_each_call_looks_s5(device, group, later, kind) -> None:
    """An edge of the graph gives the memory back, and nothing is asked of the device."""
    ledger = Ledger(device)
    ledger.interval = 100
    device.begin_capture(1)
    device.wait(device.streams[2], device.here().past, device.capturing)
    kept = held_by_event(device, ledger, group, kind, home=2)
    ledger.sweep()
    for _ in range(3):
        held_by_event(device, ledger, group, kind, home=2)
        assert not ledger.can_skip_sweep()
        ledger.sweep()
        assert len(ledger.pending()) == 1
        device.settle()
    del kept
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()
    device.end_capture()


def test_a_wait_gives_back_what_is_not_looked_at_s2(device, group, later) -> None:
    ledger = Ledger(device)
    ledger.interval = 100
    for kind in ("handoff", "recorded use"):
        held_by_event(device, ledger, group, kind)
        ledger.sweep()
        note = ledger.stream_order.recorded(INDEX, 1)
        device.wait(device.streams[0], device.streams[1].past, 0)
        ledger.stream_order.waited(INDEX, 0, note)
        assert ledger.pending() == []
        device.settle()


def test_works_are_looked_at_beside_events_that_are_not_s3(device, group, later) -> None:
    ledger = Ledger(device)
    ledger.interval = 100
    held_by_event(device, ledger, group, "handoff")
    launched = call(ledger, group, [device.allocate(1, 64)])
    assert ledger.can_skip_sweep()
    del launched
    assert not ledger.can_skip_sweep(), "its handle was dropped"
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


@pytest.mark.parametrize("kind", ["handoff", "recorded use"])
def test_what_waits_give_back_needs_no_look_s10(device, group, later, kind) -> None:
    """Neither because of the time since the last one, nor because of how many have come and gone."""
    ledger = Ledger(device)
    ledger.interval = 100
    for _ in range(2 * ledger.lag):
        later(90)
        held_by_event(device, ledger, group, kind)
        assert ledger.can_skip_sweep()
        note = ledger.stream_order.recorded(INDEX, 1)
        device.wait(device.streams[0], device.streams[1].past, 0)
        ledger.stream_order.waited(INDEX, 0, note)
        assert ledger.pending() == []
    for _ in range(2 + ledger.lag):
        assert ledger.can_skip_sweep()
        held_by_event(device, ledger, group, kind)
    assert not ledger.can_skip_sweep()
    ledger.sweep(thorough=True)
    device.finish()
    ledger.sweep(thorough=True)


@pytest.mark.parametrize("kept", [0, 5])
def test_a_wait_gives_back_all_that_came_and_fell_unused_before_its_event_s2(device, group, later, kept) -> None:
    """And not the newest alone."""
    ledger = Ledger(device)
    ledger.interval = 100
    used = [held_by_event(device, ledger, group, "recorded use") for _ in range(30)]
    del used[: 30 - kept]
    note = ledger.stream_order.recorded(INDEX, 1)
    device.wait(device.streams[0], device.streams[1].past, 0)
    ledger.stream_order.waited(INDEX, 0, note)
    assert len(ledger.pending()) == kept
    device.settle()


def test_recorded_uses_that_pile_up_order_no_stream_that_another_thread_captures_s5(device) -> None:
    ledger = Ledger(device, lag=2, use_budget=0)
    for _ in range(2):
        recorded(device, ledger, 1)
    ledger.sweep(thorough=True)
    assert [entry.state for entry in ledger.pending()] == ["handed off"] * 2
    captured_elsewhere(device)
    recorded(device, ledger, 3)
    ledger.sweep(thorough=True)
    assert device.faults == []
    assert {tuple(ledger.alloc_streams(hold)) for hold in ledger.holds()} == {(1,)}
    device.end_capture()
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


def test_a_buffer_that_the_program_keeps_keeps_no_other_memory_s3(device, group) -> None:
    """It is used first, and does not come back by ordering anything."""
    few = Ledger(device, lag=2, use_budget=64)
    device.switch(1)
    kept = device.allocate(0, 64)
    call_sync(few, group, [kept])
    for _ in range(20):
        call_sync(few, group, [device.allocate(0, 64)])
        few.sweep(thorough=True)
    assert len(few.pending()) <= 4
    assert kept.untyped_storage() in few.holds()[0].storages
    device.settle()
    device.finish()
    few.sweep(thorough=True)
    assert few.pending() == []


def test_one_look_at_all_finds_what_waits_for_another_hold_of_the_same_memory_s3(device, ledger, group) -> None:
    """A request of an arena that finds no room looks once."""
    device.launch(device.streams[1], [])
    tensor = device.allocate(0, 64)
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 1, sys._getframe())
    call(ledger, group, [tensor])
    del tensor
    device.finish()
    ledger.sweep(thorough=True)
    assert ledger.pending() == []


def test_what_is_to_be_ordered_waits_until_its_stream_is_not_captured_any_more_s5(device, ledger, monkeypatch) -> None:
    """An exception of a signal handler has come after the event of the use was recorded, and then the capture."""
    recorded(device, ledger, 1, "order")
    with monkeypatch.context() as until_then:
        until_then.setattr(ledger.uses, "order_and_release", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.sweep(thorough=True)
    captured_elsewhere(device)
    ledger.sweep(thorough=True)
    assert device.faults == []
    assert len(ledger.pending()) == 1
    device.end_capture()
    ledger.sweep(thorough=True)
    assert ledger.pending() == []
    device.settle()


@pytest.mark.parametrize("complete", [False, True])
def test_a_recorded_use_that_an_exception_leaves_in_both_queues_is_taken_out_of_one_s3(device, complete) -> None:
    """An exception of a signal handler has come before it was taken out, and then perhaps it was released."""
    ledger = Ledger(device)
    recorded(device, ledger, 1)
    (use,) = ledger.holds()
    waiting = use.queue
    ledger.sweep(thorough=True)
    assert use.queue is waiting.events
    if complete:
        device.finish()
        ledger.sweep(thorough=True)
    waiting.holds[use] = waiting.nonempty[waiting] = None
    ledger.sweep(thorough=True)
    assert waiting not in ledger.nonempty
    assert len(ledger.pending()) == (not complete)
    device.settle()
    device.finish()
    ledger.sweep(thorough=True)
    assert ledger.pending() == []


def test_a_recorded_use_that_an_exception_leaves_in_a_capture_is_not_held_beyond_it_s3(device) -> None:
    ledger = Ledger(device)
    device.begin_capture(2)
    tensor = device.allocate(2, 64)
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 2, sys._getframe(), unordered=True)
    (use,) = ledger.holds()
    waiting = use.queue
    assert waiting.capture
    with ledger.lock:
        ledger.release(use)
    use.queue = waiting.events
    waiting.holds[use] = waiting.nonempty[waiting] = None
    del tensor
    device.end_capture()
    device.switch(0)
    ledger.sweep()
    assert ledger.pending() == []
    assert not ledger.nonempty


def test_a_recorded_use_that_is_released_is_not_polled_any_more_s1(device) -> None:
    """Its event may be somebody else's by then, or one of a capture."""
    ledger = Ledger(device)
    recorded(device, ledger, 1)
    ledger.sweep(thorough=True)
    (hold,) = ledger.holds()
    assert hold.event is not None
    device.wait(device.streams[1], device.streams[2].past, 0)
    note = ledger.stream_order.recorded(INDEX, 2)
    assert note is not None
    ledger.stream_order.waited(INDEX, 1, note)
    recorded(device, ledger, 1)
    ledger.sweep(thorough=True)
    assert device.faults == []
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []
    assert hold not in hold.queue.holds


@pytest.mark.parametrize("complete", [False, True])
def test_a_staged_work_orders_no_stream_of_its_launch_that_another_thread_captures_s5(
    device, ledger, group, complete
) -> None:
    """Its memory is of a stream that runs, and c10d's staging is of the one that is captured.

    Where the work is not complete, it is too far behind.
    """
    device.switch(1)
    call(ledger, group, [device.allocate(0, 64)], staged=True)
    captured_elsewhere(device)
    if complete:
        device.finish()
    ledger.sweep()
    assert device.faults == []
    assert len(ledger.pending()) == 1
    device.end_capture()
    ledger.sweep()
    assert ledger.pending() == []
    device.settle()


# --- waits -----------------------------------------------------------------------------------------------------------


def test_a_wait_for_the_newest_work_releases_all_before_it_s2(device, group) -> None:
    """NCCL runs a group's works in order. Megatron and DeepSpeed wait for the last of many, and for no other."""
    ledger = Ledger(device)
    launched = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(3)]
    launched[-1].work.wait()
    assert ledger.pending() == []
    device.settle()


def test_a_wait_for_the_newest_work_goes_on_behind_one_that_failed_s2_s4(device, group) -> None:
    """What failed is kept, because a kernel may still touch it. What came after it did not fail, nor does the wait."""
    ledger = Ledger(device)
    failed, *well = (call(ledger, group, [device.allocate(0, 64)], fate=fate) for fate in ("fails", "", ""))
    assert well[-1].work.wait() is True
    assert [(entry.op, entry.state) for entry in ledger.pending()] == [(failed.op, "quarantined")]
    assert ledger.failures == 1
    with pytest.raises(RuntimeError, match="failed"):
        failed.work.wait()
    device.settle()


def test_in_a_capture_too_a_wait_for_one_peer_orders_and_releases_nothing_of_another_s1(device, group) -> None:
    """Sends and receives may have a communicator for each peer, which end in no order."""
    ledger = Ledger(device)
    device.begin_capture(1)
    first, second = (call(ledger, group, [device.allocate(1, 64)], p2p=True) for _ in range(2))
    second.work.wait()
    assert [entry.op for entry in ledger.pending()] == [first.op]
    assert not device.here().captured & first.inner.bit
    first.work.wait()
    assert ledger.pending() == []
    device.settle()
