"""The ledger's promises, one at a time, on a simulated device.

Random programs of public calls prove what is ordinary: ``front_programs.py``. These are what they do not come to, or
can't tell: what a call costs, what is said, moments between two threads, and works of the backends that are rare.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import INDEX, FakeGroup, SimulatedDevice, call, call_sync, routes_of

from safecomm import _torch
from safecomm.core.drain import await_before_capture, drain_ledger
from safecomm.core.ledger import Ledger
from safecomm.core.streams import HOST
from safecomm.errors import CaptureBoundaryError

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def group(device: SimulatedDevice) -> FakeGroup:
    return FakeGroup(device, "nccl", shelved=True)


def test_calls_take_the_long_way_for_as_long_as_anybody_wants_them_to(device: SimulatedDevice) -> None:
    ledger, group = Ledger(device), object()
    lanes: Any = {id(group): SimpleNamespace(its_group=lambda: group)}
    routes_of(ledger).fast.update(lanes)
    with routes_of(ledger).off():
        with routes_of(ledger).off():
            assert not routes_of(ledger).fast
        assert not routes_of(ledger).fast
    assert routes_of(ledger).fast == lanes


def test_a_route_whose_group_dies_as_it_is_moved_is_nobodys_s1(device: SimulatedDevice) -> None:
    """Another group may get its id, and would be launched on the backend of the dead one."""
    routes = routes_of(Ledger(device))
    dead: Any = SimpleNamespace(its_group=lambda: None)
    routes.fast[7] = dead
    with routes.off():
        assert not routes.fast
    assert not routes.fast


def test_the_backend_of_a_group_that_died_is_not_kept_by_a_handle_s7(device: SimulatedDevice) -> None:
    """It has threads and connections, which would go on."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(0, 64)])
    route: Any = launched.work.queue
    route.backend = object()
    launched.inner.group = None
    del group
    assert route.its_group() is None
    assert route.backend is None
    device.finish()


def test_in_a_capture_nothing_is_asked_of_what_another_thread_has_just_launched_s5(device, group, monkeypatch) -> None:
    ledger = Ledger(device, patience=0)
    gloo = FakeGroup(device, "gloo")
    call(ledger, gloo, [device.allocate(None, 64)], index=HOST)
    before_asking = device.relaxed_capture_mode

    def launches() -> Any:
        monkeypatch.setattr(device, "relaxed_capture_mode", before_asking)
        device.switch(0)
        call(ledger, group, [device.allocate(0, 64)])
        device.switch(1)
        return before_asking()

    device.begin_capture(1)
    monkeypatch.setattr(device, "relaxed_capture_mode", launches)
    ledger.sweep()
    assert device.faults == []


@pytest.mark.parametrize("stream", [0, 2])
def test_ordinary_program_needs_one_block_and_asks_nothing_s2(device, group, stream) -> None:
    """S2: allocated, launched and waited on one stream, memory is back at the wait, and nobody was asked."""
    ledger = Ledger(device)
    device.switch(stream)
    for _ in range(100):
        tensor = device.allocate(stream, 64)
        launched = call(ledger, group, [tensor])
        launched.work.wait()
        assert not ledger.nonempty
        del tensor, launched
    assert len(device.blocks) == 1, "peak memory is that of one step"
    assert not device.calls


@pytest.mark.parametrize("p2p", [False, True])
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    lag=st.integers(0, 5),
    budget=st.sampled_from([0, 100, 1000]),
)
def test_what_nobody_waits_for_is_bounded_on_a_device_that_never_runs_s3(sizes, lag, budget, p2p) -> None:
    """Rule 3: however far the host is ahead, a lane of dropped works is no larger than its budget and a few entries."""
    device = SimulatedDevice()
    group = FakeGroup(device, "nccl")
    ledger = Ledger(device, lag=lag, budget=budget)
    for size in sizes:
        call(ledger, group, [device.allocate(0, size)], p2p=p2p)
        device.settle()
        assert drain_ledger(ledger) <= budget + (lag + 1) * max(sizes)


def test_dropped_handle_is_reported_once_per_line_s3(device, group, caplog) -> None:
    """S3: a handle dropped without a wait is safe, and reported once for each call site, with that call site."""
    caplog.set_level(logging.WARNING, "safecomm")
    ledger = Ledger(device)
    for _ in range(3):
        call(ledger, group, [device.allocate(0, 64)])
    device.finish()
    ledger.sweep()
    assert not ledger.pending()
    assert [record for record in caplog.records if Path(__file__).name in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1


@pytest.mark.parametrize("memory", [0, 1])
def test_memory_of_a_graph_does_not_grow_with_its_layers_s5(device, group, memory) -> None:
    """S5: in a capture, what is used on a side stream comes back by an edge of the graph."""
    ledger = Ledger(device)
    blocks = []
    for layers in (4, 64):
        device.begin_capture(1)
        before = len(device.blocks)
        for _ in range(layers):
            device.wait(device.streams[2], device.here().past, device.here().capture)
            device.switch(1 + memory)
            tensor = device.allocate(1, 64)
            if memory:
                call_sync(ledger, group, [tensor])
            else:
                call(ledger, group, [tensor]).work.wait()
            device.switch(1)
            del tensor
            ledger.sweep()
        device.end_capture()
        blocks.append(len(device.blocks) - before)
    assert blocks[0] == blocks[1], f"blocks of 4 and of 64 layers: {blocks}"


@pytest.mark.parametrize("patience", [0, math.inf])
def test_a_call_takes_constant_time_however_many_works_are_in_flight_s10(device, group, patience) -> None:
    """S10: with 10,000 works in flight, a call does as much as with 100."""
    group.shelved = False  # c10d's own bookkeeping is not what is measured
    ledger = Ledger(device, patience=patience)
    tensor = device.allocate(0, 64)
    kept = [call(ledger, group, [tensor]) for _ in range(100)]
    few = calls_in(lambda: kept.append(call(ledger, group, [tensor])))
    kept += [call(ledger, group, [tensor]) for _ in range(9_900)]
    many = calls_in(lambda: kept.append(call(ledger, group, [tensor])))
    # Not equal to the last call: a garbage collection may fall into either.
    assert many <= 1.2 * few, f"{few} calls of functions with 100 works, {many} with 10,000"


def calls_in(step: Callable[[], object]) -> int:
    """Return how many functions ``step`` calls: a measure that a busy machine does not change."""
    count = 0

    def tally(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def test_one_that_never_ends_keeps_no_other_s3(device) -> None:
    """S3: behind a point-to-point work that is not over, all that is over is given back by the next call."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    stuck = call(ledger, group, [device.allocate(0, 64)], p2p=True)  # one peer's; the others' go to the next
    while device.run():
        pass
    with mock.patch.object(stuck.inner, "is_completed", return_value=False):
        for _ in range(20):
            call(ledger, group, [device.allocate(0, 64)], p2p=True)
        while device.run():
            pass
        ledger.sweep()
        assert [entry.op for entry in ledger.pending()] == [stuck.op]


@pytest.mark.parametrize("kept", [1, 8, 30])
def test_what_is_dropped_does_not_pile_up_behind_kept_handles_s3(device, group, kept) -> None:
    """S3: dropped works come back at the next call also behind kept ones, which the ledger does not ask."""
    ledger = Ledger(device, patience=math.inf)
    handles = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(kept)]
    for _ in range(100):
        device.finish()
        call(ledger, group, [device.allocate(0, 1 << 20)])
        assert sum(entry.nbytes for entry in ledger.pending()) <= (2 << 20) + 64 * kept
    assert len(handles) == kept


@pytest.mark.parametrize("patience", [0, math.inf])
def test_a_dropped_handle_is_told_from_a_kept_one_when_the_interpreter_is_warm_s3(device, patience) -> None:
    """S3: the ledger counts references, and the interpreter counts them differently in code that has run often."""
    ledger, group = Ledger(device, patience=patience), FakeGroup(device, "nccl")
    for number in range(300):
        launched = call(ledger, group, [device.allocate(0, 64)], p2p=number % 3 == 0)
        kept = launched.work if number % 2 else None
        del launched
        while device.run():
            pass
        ledger.dropped_at.clear()
        ledger.sweep()
        assert bool(ledger.dropped_at) == (kept is None), number
        assert bool(ledger.pending()) == (kept is not None and patience > 0), "S3: held although nobody will wait"
        if kept is not None:
            kept.wait()


def test_waiting_for_the_oldest_of_a_lane_releases_that_one_s2(device) -> None:
    """S2: at once, by the short way of the ordinary program; S1: what is behind it stays held."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    launched = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(3)]
    with mock.patch.object(ledger, "waited", side_effect=AssertionError("the long way")):
        for left in (2, 1, 0):
            launched.pop(0).work.wait()
            assert [entry.op for entry in ledger.pending()] == [one.op for one in launched]
            assert bool(ledger.nonempty) == bool(left)
            device.settle()


@pytest.mark.parametrize(("timeout", "profiled", "asked"), [
    (None, False, ["block_current_stream"]),
    (None, True, ["wait", "block_current_stream"]),
    (timedelta(seconds=1), False, ["wait", "block_current_stream"]),
])  # fmt: skip
def test_where_a_wait_only_blocks_a_stream_it_is_asked_for_no_more_s10(device, timeout, profiled, asked) -> None:
    """And S8: with a timeout the host blocks, and a profiler sees the wait."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(0, 64)])
    launched.work.queue.wait_is_stream_order = True
    calls = []
    for name in ("wait", "block_current_stream"):
        method = getattr(launched.inner, name)
        setattr(launched.inner, name, lambda *args, name=name, method=method: (calls.append(name), method(*args))[1])
    with mock.patch.object(_torch.profiler, "_is_profiler_enabled", profiled):
        assert launched.work.wait(timeout) is True
    assert calls == asked
    assert ledger.pending() == []
    device.settle()


@pytest.mark.parametrize("how", ["wait with a timeout", "a later wait", "is_completed", "a sweep", "twice"])
def test_a_failed_work_fails_at_each_wait_where_waits_only_block_streams_s4(device, how) -> None:
    """S4: and S8: NCCL's wait() raises for a work that is known to have failed, and block_current_stream() does not."""
    ledger, group = Ledger(device, patience=0), FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(0, 64)], fate="fails")
    launched.work.queue.wait_is_stream_order = True
    if how == "wait with a timeout":
        with pytest.raises(RuntimeError, match="failed"):
            launched.work.wait(timedelta(seconds=1))
    elif how == "a later wait":
        later = call(ledger, group, [device.allocate(0, 64)])
        later.work.wait()
    elif how in ("is_completed", "a sweep"):
        device.switch(1)
        with mock.patch.object(ledger, "_staging_is_captured", return_value=True):
            ledger.sweep() if how == "a sweep" else launched.work.is_completed()
        device.switch(0)
    else:
        launched.work.synchronize()
        assert ledger.pending() == []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed"):
            launched.work.wait()
    assert [entry.state for entry in ledger.pending()] == ([] if how == "twice" else ["quarantined"])


@pytest.mark.parametrize(("home", "elsewhere"), [(0, 1), (1, 0), (1, 2)])
def test_a_work_alone_in_its_lane_is_not_released_by_a_wait_elsewhere_s1(device, home, elsewhere) -> None:
    """S1: the short way of the ordinary program is not taken where the waiting stream is not the memory's own."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    device.switch(home)
    launched = call(ledger, group, [device.allocate(home, 64)])
    device.switch(elsewhere)
    launched.work.wait()
    assert [entry.state for entry in ledger.pending()] == ["handed off"]
    del launched
    device.settle()  # raises if the memory could be handed out now


def test_a_stream_waits_once_for_each_use_that_is_too_far_behind_s3(device) -> None:
    ledger, group = Ledger(device, use_budget=1600), FakeGroup(device, "nccl")
    for number in range(60):
        tensor = device.allocate(0, 100)
        device.switch(1)
        call_sync(ledger, group, [tensor])
        device.switch(0)
        del tensor
        assert sum(entry.nbytes for entry in ledger.pending()) == min(100 * (number + 1), 1700), "S3"
        assert device.calls["wait_event"] == max(number - 16, 0)
    device.settle()
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


def used_on_another_stream(device, streams: int) -> Ledger:
    """Return a ledger that holds 60 tensors, used on stream 3, and allocated on the first ``streams`` in turn."""
    ledger, group = Ledger(device, use_budget=1600), FakeGroup(device, "nccl")
    tensors = [device.allocate(1 + number % streams, 100) for number in range(60)]
    device.switch(3)
    for tensor in tensors:
        call_sync(ledger, group, [tensor])
    device.switch(0)
    return ledger


def test_a_stream_that_another_thread_captures_by_now_does_not_wait_s5(device, monkeypatch) -> None:
    ledger = used_on_another_stream(device, 1)
    recycle = device.recycle_event

    def recycled(index, event):
        """Take it back, while another thread begins a capture."""
        recycle(index, event)
        if not device.capturing:
            device.begin_capture(1)
            device.switch(0)

    monkeypatch.setattr(device, "recycle_event", recycled)
    ledger.sweep()
    assert device.calls["wait_event"] == 1, "the others are left until the capture is over"
    assert device.faults == []
    device.end_capture()
    monkeypatch.undo()
    ledger.sweep()
    assert sum(entry.nbytes for entry in ledger.pending()) == 1600, "S3"
    device.settle()


# --- ProcessGroupNCCL2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["wait", "wait elsewhere", "sync", "rule 3", "get_future_result"])
def test_what_one_thread_asks_ends_no_capture_of_another_on_nccl2_s5(device, monkeypatch, what) -> None:
    """S5: in the global mode, which is torch's default, it would."""
    group = FakeGroup(device, "nccl2")
    ledger = Ledger(device, lag=0, budget=0, patience=0)
    launched = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(2)]
    device.begin_capture(1)

    def other() -> None:
        device.switch(2 if what == "wait elsewhere" else 0)
        if what == "sync":
            call_sync(ledger, group, [device.allocate(0, 64)])
        elif what == "rule 3":
            launched.clear()
            ledger.sweep()
        elif what == "get_future_result":
            launched[0].inner.get_future_result = launched[0].inner.check
            launched[0].work.get_future_result()
        else:
            launched[0].work.wait()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert device.faults == []
    if what == "rule 3":
        assert ledger.pending() == []


def test_a_wait_inside_of_a_capture_is_torchs_own_on_nccl2_s5(device, monkeypatch) -> None:
    """It asks nothing there, and the mode of a thread that captures stays what it is."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    device.begin_capture(1)
    launched = call(ledger, group, [device.allocate(1, 64)])
    monkeypatch.setattr(device, "relaxed_capture_mode", mock.Mock(side_effect=AssertionError("it is captured")))
    launched.work.wait()
    assert ledger.pending() == []


def test_a_stream_is_ordered_although_the_future_was_asked_for_on_nccl2_s1(device) -> None:
    """S1: block_current_stream() of that class goes by the future, which is done once it has ordered one stream."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    launched = call(ledger, group, [device.allocate(0, 64)])
    device.switch(1)
    launched.work.get_future()
    device.switch(0)
    launched.work.block_current_stream()
    assert ledger.pending() == []
    del launched
    device.settle()  # raises if stream 0 could use it now


@pytest.mark.parametrize("how", ["synchronize", "block_current_stream"])
def test_what_failed_without_a_word_is_kept_on_nccl2_s4(device, how) -> None:
    """S4: where the group was aborted, or got another communicator, that class orders nothing, and does not raise."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    launched = call(ledger, group, [device.allocate(0, 64)], fate="fails")
    getattr(launched.work, how)()
    del launched
    device.settle()  # raises if it could be used now
    assert [entry.state for entry in ledger.pending()] == ["quarantined"]
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_the_works_of_an_aborted_communicator_are_quarantined_on_nccl2_s4(device) -> None:
    """S4: abort() and reconfigure() of torch's own leave the group alive, and its works fail when they are asked."""
    ledger, group = Ledger(device, patience=0), FakeGroup(device, "nccl2")
    handles = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(3)]
    for launched in handles:
        launched.inner.status = "failed"
    ledger.sweep()
    assert [entry.state for entry in ledger.pending()] == ["quarantined"] * 3
    later = call(ledger, group, [device.allocate(0, 64)])  # of the next communicator
    later.work.wait()
    assert [entry.state for entry in ledger.pending()] == ["quarantined"] * 3
    handles.clear()
    device.settle()
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_a_failed_work_is_an_error_in_the_capture_that_it_was_settled_for_s4(device, group) -> None:
    """S4: what has failed before a capture is not taken for waited for inside of it."""
    ledger = Ledger(device)
    failed, well = (call(ledger, group, [device.allocate(1, 64)], fate=fate) for fate in ("fails", ""))
    device.finish()
    await_before_capture(ledger, None)
    assert [one.state for one in ledger.pending()] == ["quarantined"]
    device.begin_capture(1)
    assert well.work.wait(), "there is nothing to wait for"
    with pytest.raises(CaptureBoundaryError):
        failed.work.wait()
    device.end_capture()
    assert device.faults == []
    assert drain_ledger(ledger, wait=True) == 0


def test_a_work_during_whose_wait_an_interrupt_comes_has_not_failed_s3_s4(device, group, monkeypatch) -> None:
    """A later wait waits for it too. An interrupt there says nothing about the work, which may be well."""
    ledger = Ledger(device)
    earlier, later = (call(ledger, group, [device.allocate(0, 64)]) for _ in range(2))
    with monkeypatch.context() as until_then:
        until_then.setattr(earlier.inner, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            later.work.wait()
    assert [entry.state for entry in ledger.pending()] == ["in flight"] * 2
    assert ledger.failures == 0
    later.work.wait()
    assert ledger.pending() == []
    device.finish()


@pytest.mark.parametrize("moment", ["before it is in the quarantine", "after it has looked there"])
def test_what_another_thread_releases_as_it_fails_is_not_kept_s3_s4(device, group, monkeypatch, moment) -> None:
    """Of two threads that wait for a work one sees an error, and the other that it is well."""
    ledger = Ledger(device, patience=0)
    launched = call(ledger, group, [device.allocate(0, 64)])
    queue = launched.work.queue
    note_empty = type(queue).note_empty

    def releases_before(_: Any) -> bool:
        ledger.release(launched.work)
        return False

    def releases_after(empty: Any) -> None:
        with mock.patch.object(ledger, "quarantine", {}):  # what the other thread has found there
            ledger.release(launched.work)
        note_empty(empty)

    if moment == "before it is in the quarantine":
        monkeypatch.setattr(ledger, "is_idle", releases_before)
    else:
        monkeypatch.setattr(type(queue), "note_empty", releases_after)
    ledger.fail(launched.work, RuntimeError("late"))
    monkeypatch.undo()
    assert ledger.pending() == []
    assert not ledger.quarantine
    assert not ledger.nonempty
    device.finish()


@pytest.mark.parametrize("index", [INDEX, HOST])
def test_a_work_that_its_backend_can_not_tell_of_stops_no_other_group_s3_s4(device, group, monkeypatch, index) -> None:
    ledger, other = Ledger(device, patience=0), FakeGroup(device, "gloo" if index == HOST else "nccl")
    launched = call(ledger, other, [device.allocate(0 if index == INDEX else None, 64)], index=index)
    monkeypatch.setattr(launched.inner, "is_completed", mock.Mock(side_effect=RuntimeError("MPI_Test failed")))
    for _ in range(3):
        call(ledger, group, [device.allocate(0, 64)]).work.wait()
    assert [(entry.op, entry.state) for entry in ledger.pending()] == [(launched.op, "quarantined")]
    assert launched.work.wait() is True
    assert ledger.pending() == []
    device.finish()


def test_a_recorded_use_on_another_device_is_one_of_its_own_s1(device, monkeypatch) -> None:
    """S1: each device has a default stream of the handle 0, and ordering one of them orders no other."""
    ledger, tensor = Ledger(device), device.allocate(2, 64)
    storage = tensor.untyped_storage()
    for index in (0, 1):
        assert ledger.uses.record(storage, index, 0, sys._getframe(), unordered=True)
    assert len(ledger.holds()) == 2
    memory = _torch.StorageWeakRef(storage)
    del tensor, storage
    for index in (0, 1):
        if note := ledger.stream_order.recorded(index, 0):
            ledger.stream_order.waited(INDEX, 2, note)
    assert not memory.expired(), "stream 2 of device 0 is not the one of device 1"
