"""The boundary of a graph capture: what may be waited for, asked and begun inside of it, and what may not (S5)."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from simulated import INDEX, FakeGroup, SimulatedDevice, call, routes_of

from safecomm.core import captures
from safecomm.core.captures import CapturedGraph
from safecomm.core.drain import await_before_capture, drain_ledger
from safecomm.core.ledger import Ledger
from safecomm.errors import CaptureBoundaryError, PendingWorkError

WAITS = ["wait", "wait with a timeout", "synchronize", "block_current_stream"]


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def ledger(device: SimulatedDevice) -> Ledger:
    return Ledger(device)


@pytest.fixture
def group(device: SimulatedDevice) -> FakeGroup:
    return FakeGroup(device, "nccl")


def host_waits(device: SimulatedDevice) -> Any:
    """Return the context in which the device runs on whenever the host pauses."""
    return mock.patch("safecomm.core.drain.time.sleep", side_effect=lambda _: device.run())


def wait_for(work: Any, how: str) -> None:
    """Wait for ``work`` by one of :data:`WAITS`."""
    if how == "wait with a timeout":
        assert work.wait(timedelta(seconds=1)) is True
    elif how == "wait":
        assert work.wait() is True
    else:
        getattr(work, how)()


# --- waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAITS)
def test_what_the_host_has_waited_for_before_a_capture_may_be_waited_for_in_it_s5(device, ledger, group, how) -> None:
    """The graph has nothing to wait for: the device and the backend are not asked, and no edge comes into it."""
    launched = call(ledger, group, [device.allocate(0, 64)])
    with host_waits(device):
        await_before_capture(ledger, None)
    assert ledger.pending() == []
    device.begin_capture(1)
    before = device.calls.copy()
    with mock.patch.object(launched.inner, "wait", side_effect=AssertionError("the backend is asked")):
        wait_for(launched.work, how)
    assert device.calls == before
    assert captures.RECORDING == {}
    device.finish()
    device.end_capture()
    assert device.faults == []
    device.switch(0)
    wait_for(launched.work, how)


@pytest.mark.parametrize("released", ["complete", "after a later work", "after itself", "elsewhere"])
@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_what_was_released_before_is_waited_for_by_the_host_too_s5(device, backend, released) -> None:
    """A stream that has waited for it says nothing about the host: until then it is refused in a capture."""
    ledger, group = Ledger(device, patience=0), FakeGroup(device, backend)
    launched, later = (call(ledger, group, [device.allocate(0, 64)]) for _ in range(2))
    if released == "complete":
        device.finish()
        ledger.sweep(thorough=True)
    elif released == "elsewhere":
        with device.using(INDEX, 2):
            launched.work.wait()
    else:
        (later if "later" in released else launched).work.wait()
    assert launched.op not in {entry.op for entry in ledger.pending() if entry.state == "in flight"}
    device.begin_capture(1)
    with pytest.raises(CaptureBoundaryError):
        launched.work.wait()
    with pytest.raises(CaptureBoundaryError, match="the host can't wait"):
        await_before_capture(ledger, None)
    device.end_capture()
    device.switch(0)
    if released != "complete":
        with pytest.raises(PendingWorkError):
            await_before_capture(ledger, timedelta(0))
    with host_waits(device):
        await_before_capture(ledger, None)
    assert not launched.inner.bit & ~device.done
    device.begin_capture(1)
    assert launched.work.wait() is True
    assert device.faults == []
    device.end_capture()


def test_what_has_failed_and_was_given_back_is_none_that_the_host_has_waited_for_s4_s5(device, ledger, group) -> None:
    failed = call(ledger, group, [device.allocate(0, 64)], fate="fails")
    with pytest.raises(RuntimeError):
        failed.work.wait()
    assert drain_ledger(ledger, wait=True) == 0
    await_before_capture(ledger, None)
    device.begin_capture(1)
    with pytest.raises(CaptureBoundaryError):
        failed.work.wait()


def test_what_was_launched_after_the_host_has_waited_is_refused_in_a_capture_s5(device, ledger, group) -> None:
    with host_waits(device):
        await_before_capture(ledger, None)
    launched = call(ledger, group, [device.allocate(0, 64)])
    device.begin_capture(1)
    with pytest.raises(CaptureBoundaryError, match="before the CUDA graph capture"):
        launched.work.wait()
    assert ledger.pending() != []


def test_a_work_of_a_capture_is_none_that_the_host_has_waited_for_s5(device, ledger, group) -> None:
    """Another thread captures while this one settles its works: those that were captured never run."""
    eager = call(ledger, group, [device.allocate(0, 64)])
    other = FakeGroup(device, "nccl")
    device.begin_capture(1)
    captured = call(ledger, other, [device.allocate(1, 64)])
    device.switch(0)
    with host_waits(device):
        await_before_capture(ledger, None)
    assert [entry.op for entry in ledger.pending()] == [captured.op]
    assert (eager.work.host_waited, captured.work.host_waited) == (True, False)
    assert device.faults == []


def test_nothing_counts_as_settled_when_a_work_is_not_over_in_time_s5(device, ledger, group) -> None:
    launched = call(ledger, group, [device.allocate(0, 64)])
    with pytest.raises(PendingWorkError, match=launched.op):
        await_before_capture(ledger, timedelta(0))
    device.begin_capture(1)
    with pytest.raises(CaptureBoundaryError):
        launched.work.wait()


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("ended", [False, True])
def test_a_wait_in_another_capture_than_the_works_is_refused_s5(device, ledger, group, how, ended) -> None:
    """A graph can't be ordered after what runs in another. The refusal leaves the capture and the handle unharmed."""
    device.begin_capture(1)
    first = device.capturing
    launched = call(ledger, group, [device.allocate(1, 64)])
    device.end_capture()
    if ended:
        ledger.end_capture(first)
    device.begin_capture(2)
    before = device.calls.copy(), device.here().captured
    with pytest.raises(CaptureBoundaryError, match="into another CUDA graph than the one that is being captured"):
        wait_for(launched.work, how)
    assert (device.calls, device.here().captured) == before
    assert device.faults == []
    own = call(ledger, FakeGroup(device, "nccl"), [device.allocate(2, 64)])
    wait_for(own.work, how)
    assert own.op not in {entry.op for entry in ledger.pending()}


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_wait_outside_of_the_works_capture_is_refused_s5(device, ledger, group, how, stream) -> None:
    """Only a replay runs it, so there is nothing to wait for: neither after the capture, nor beside of it."""
    device.begin_capture(1)
    launched = call(ledger, group, [device.allocate(1, 64)])
    if stream != 2:
        device.end_capture()
    device.switch(stream)
    before = device.calls.copy(), device.here().eager
    with pytest.raises(CaptureBoundaryError, match="it was captured into a CUDA graph"):
        wait_for(launched.work, how)
    assert (device.calls, device.here().eager) == before
    assert device.faults == []


@pytest.mark.parametrize("captured", [False, True])
def test_a_wait_releases_what_is_before_it_only_up_to_a_stream_that_is_captured_s5(
    device, ledger, group, captured
) -> None:
    """c10d's staging is to be ordered on the stream of the launch. A wait there would break that stream's capture."""
    device.switch(1)
    staged = call(ledger, group, [device.allocate(0, 64)], staged=True)
    device.switch(0)
    later = call(ledger, group, [device.allocate(0, 64)])
    if captured:
        device.begin_capture(1)  # by another thread
        device.switch(0)
    later.work.wait()
    assert device.faults == []
    assert [entry.op for entry in ledger.pending()] == ([staged.op] if captured else [])
    device.settle()


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_launch_may_ask_the_device_only_where_that_ends_no_capture_s5(device, ledger, backend) -> None:
    """NCCL2 asks for earlier works as it launches. In the thread that captures, CUDA is to say that this is illegal."""
    queue = routes_of(ledger).of(FakeGroup(device, backend), INDEX)
    lenient = []

    def launches(*given: int) -> tuple[int, ...]:
        lenient.append(device._thread.relaxed)
        return given

    assert queue.launch(launches, 1, 2) == (1, 2)
    device.begin_capture(1)
    queue.launch(launches)
    device.switch(2)
    queue.launch(launches)
    assert lenient == [backend == "nccl2", False, backend == "nccl2"]
    assert device._thread.relaxed is False


def test_a_work_is_not_asked_in_a_capture_s5(device, ledger, group) -> None:
    launched = call(ledger, group, [device.allocate(0, 64)])
    device.begin_capture(1)
    captured = call(ledger, FakeGroup(device, "nccl"), [device.allocate(1, 64)])
    for one in (launched, captured):
        with pytest.raises(CaptureBoundaryError, match=f"is_completed.. for {one.op}"):
            one.work.is_completed()
    device.end_capture()
    device.switch(0)
    with pytest.raises(CaptureBoundaryError):
        captured.work.is_completed()
    assert launched.work.is_completed() is False
    assert device.faults == []


@pytest.mark.parametrize("how", ["before", "later"])
def test_an_event_of_a_capture_is_not_used_for_anything_else_s5(device, ledger, how) -> None:
    """Memory that frees itself inside a capture, where ``record_stream`` was called for it: an edge of the graph."""
    if how == "later":
        device.begin_capture(1)
        device.wait(device.streams[2], 0, device.capturing)
    tensor = device.allocate(1, 64)
    (block,) = device.blocks_of([tensor])
    device.launch(device.streams[2], [block])
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 2, sys._getframe())
    recycled = mock.Mock(wraps=device.recycle_event)
    with mock.patch.object(device, "recycle_event", recycled):
        assert ledger.uses.freeing(tensor.untyped_storage()) == []
        ledger.uses.freed(tensor.untyped_storage())
    assert recycled.call_count == (how == "before")
    del tensor
    device.settle()  # raises if stream 1 is not ordered after the kernel
    assert ledger.pending() == []


# --- calls in a capture -----------------------------------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A tensor that says that it is on the simulated device."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return INDEX


class Graph:
    """``torch.cuda.CUDAGraph``, of which nothing but its life matters."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.replayed: list[int] = []

    def capture_end(self) -> None:
        self.device.end_capture()

    def replay(self) -> None:
        self.replayed.append(self.device.here().handle)

    def reset(self) -> None:
        pass


class GraphInTwo(Graph):
    """``torch.cuda.CUDAGraph`` of torch 2.14, which ends a capture and makes a graph of it in two steps."""

    def capture_end_pre(self) -> None:
        self.device.end_capture()

    def capture_end(self) -> None:
        self.capture_end_pre()
        self.made = True


Begin = Callable[..., tuple[Graph, CapturedGraph]]


@pytest.fixture
def capturing(device: SimulatedDevice, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Return what begins a capture on stream 1, recorded."""
    monkeypatch.setattr(captures, "LEDGER", ledger)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: INDEX)

    def begin(kind: type[Graph] = Graph) -> tuple[Graph, CapturedGraph]:
        device.begin_capture(1)
        graph = kind(device)
        captured = CapturedGraph(ledger, graph, (device.capturing,), [], INDEX, 1, device.capturing, sys._getframe())
        captured.begin(graph)
        return graph, captured

    return begin


def test_what_an_exception_has_kept_of_a_dead_graph_is_back_after_drain_s6(device, ledger, group, capturing) -> None:
    graph, captured = capturing()
    outside = device.allocate(0, 64)
    (block,) = device.blocks_of([outside])
    captured.add("all_reduce", group, outside, sys._getframe())
    graph.capture_end()
    captured._finalizer.detach()  # as if a signal handler had raised in it
    device.switch(0)
    graph = outside = None
    assert ledger.pending() == []
    assert drain_ledger(ledger, wait=True) == 0
    device.settle()
    assert device.is_free(block)
    assert captured.leases() == []


def test_a_capture_that_torch_gives_up_as_it_begins_is_over_s6(device, capturing) -> None:
    """``torch.cuda.graph.__enter__`` of torch 2.15 ends it without ``capture_end()``; calls would be slow from then."""
    graph, captured = capturing(GraphInTwo)
    graph.capture_end_pre()
    assert captures.RECORDING == {}
    assert "capture_end_pre" not in vars(graph)
    device.switch(0)
    graph.reset()
    assert captured.leases() == []


class GivenUp(Graph):
    """A graph of which CUDA has given up the capture."""

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_capture_that_cuda_has_given_up_ends_by_its_error_and_nothing_is_asked_s5(
    device, ledger, group, capturing, monkeypatch
) -> None:
    """Until its end CUDA refuses whatever it is asked."""
    monkeypatch.setattr(captures._torch, "end_allocation_to_pool", lambda *_: None)
    call(ledger, group, [device.allocate(0, 64)])
    graph, _ = capturing(GivenUp)
    device.end_capture()
    before = device.calls.copy()
    with pytest.raises(RuntimeError, match="a previous error"):
        graph.capture_end()
    assert device.calls == before
    assert captures.RECORDING == {}
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_a_capture_that_ends_in_two_steps_is_one_that_is_replayed_s6(device, capturing) -> None:
    graph, captured = capturing(GraphInTwo)
    tensor = device.allocate(1, 64)
    captured.add("all_reduce", device, tensor, sys._getframe())
    graph.capture_end()
    assert graph.made
    assert captures.RECORDING == {}
    assert vars(graph)["replay"] == captured.replay
    assert len(captured.leases()) == 1


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Return the groups that have a communicator."""
    groups: set[Any] = set()
    monkeypatch.setattr(captures._torch, "is_initialized", lambda group, device_type: group in groups)
    return groups


def test_the_first_call_of_a_group_is_refused_in_a_capture_s5(device, group, capturing, initialized) -> None:
    """NCCL would make a communicator, which can't be captured: what CUDA makes of it is an error far from its cause."""
    graph, _ = capturing()
    tensor = device.allocate(1, 64)
    there = tensor.as_subclass(OnDevice)
    with pytest.raises(CaptureBoundaryError, match="all_reduce inside a CUDA graph capture is the first call of group"):
        captures.check_group("all_reduce", group, [None, tensor, there])
    captures.check_group("all_reduce", group, [tensor])  # of a group for the host
    initialized.add(group)
    captures.check_group("all_reduce", group, [there])
    initialized.clear()
    device.switch(2)
    captures.check_group("all_reduce", group, [there])  # a stream that is not captured
    device.switch(1)
    captures.set_tolerant(True)  # by patch(): torch says it, or can do it
    try:
        captures.check_group("all_reduce", group, [there])
    finally:
        captures.set_tolerant(False)
    graph.capture_end()
    device.switch(0)
    captures.check_group("all_reduce", group, [there])


def test_arguments_are_a_graphs_where_the_current_stream_is_captured_s6(device, group, capturing) -> None:
    """And only those on the device, with memory of their own."""
    graph, captured = capturing()
    outside = device.allocate(0, 64).as_subclass(OnDevice)
    host = device.allocate(None, 64)
    sparse: Any = SimpleNamespace(is_meta=False, is_cuda=True, layout=torch.sparse_coo, get_device=lambda: INDEX)
    captures.note("all_reduce", group, [host, sparse, outside], sys._getframe())
    device.switch(2)
    captures.note("all_gather", group, [outside], sys._getframe())
    device.switch(1)
    ((op, nbytes, leased),) = [(lease.op, lease.nbytes, lease.leased) for lease in captured.leases()]
    assert (op, nbytes, leased) == ("all_reduce", 64, True)
    assert captured.uses(group)
    assert captured.uses(None)
    assert not captured.uses(FakeGroup(device, "nccl"))
    graph.capture_end()
    device.switch(0)
    captures.note("broadcast", group, [outside], sys._getframe())
    assert len(captured.leases()) == 1


@pytest.mark.parametrize("capturing_now", [False, True])
def test_what_has_to_wait_for_the_device_is_refused_in_a_capture_s5(monkeypatch, capturing_now) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing_now)
    assert captures.capturing() is capturing_now
    if capturing_now:
        with pytest.raises(CaptureBoundaryError, match=r"low_latency\(\) inside a CUDA graph capture"):
            captures.refuse_capture("low_latency()")
    else:
        captures.refuse_capture("low_latency()")


# --- what graphs leave while a capture goes on ------------------------------------------------------------------------


def test_what_a_dead_graph_leaves_waits_for_the_capture_of_its_stream_s5_s6(device, ledger, group, capturing) -> None:
    """Its last replay was on a stream that another thread captures now: nothing can be recorded there yet."""
    outside = device.allocate(0, 64)
    (block,) = device.blocks_of([outside])
    graph, captured = capturing()
    captured.add("all_reduce", group, outside, sys._getframe())
    graph.capture_end()
    device.switch(2)
    graph.replay()
    device.launch(device.here(), [block])
    device.switch(0)
    device.begin_capture(2)
    device.switch(0)
    del graph, captured, outside
    for _ in range(2):
        ledger.sweep()
        device.settle()
        assert not device.is_free(block)
        assert [(entry.op, entry.state) for entry in ledger.pending()] == [("a CUDA graph", "handed off")]
    device.end_capture()
    device.switch(0)
    ledger.sweep()
    (use,) = ledger.holds()
    assert use.event is not None
    device.settle()
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0
    assert device.is_free(block)
    assert device.faults == []


# --- the graph --------------------------------------------------------------------------------------------------------


def test_a_graph_is_not_replayed_after_an_argument_was_freed_s6(device, group, capturing) -> None:
    graph, captured = capturing()
    outside = device.allocate(0, 64)
    captured.add("all_reduce", group, outside, sys._getframe())
    captured.add("all_reduce", group, device.allocate(1, 64), sys._getframe())  # the pool's, which torch keeps
    graph.capture_end()
    device.switch(0)
    graph.replay()
    outside.untyped_storage().resize_(0)
    with pytest.raises(captures.StaleGraphError, match=r"all_reduce at .*test_capture_boundaries\.py.*was resized"):
        graph.replay()
    assert graph.replayed == [0]


def test_before_a_replay_others_are_told_its_stream_and_only_if_there_is_one_s6(device, group, capturing) -> None:
    """``low_latency()`` prepares what a graph's kernels need there."""
    graph, captured = capturing()
    outside = device.allocate(0, 64)
    captured.add("all_reduce", group, outside, sys._getframe())
    told: list[tuple[int, list[int]]] = []
    captured.before_replay.append(lambda stream: told.append((stream, list(graph.replayed))))
    graph.capture_end()
    device.switch(2)
    captured.replay()
    assert told == [(2, [])]
    assert graph.replayed == [2]
    outside.data = torch.empty(64, dtype=torch.uint8)
    with pytest.raises(captures.StaleGraphError, match="given other memory"):
        captured.replay()
    assert len(told) == 1
    captured.before_replay.clear()  # its function refers to the graph
    device.finish()


def test_a_graph_that_is_no_longer_there_is_not_replayed_and_may_be_reset_s6(device, ledger, group, capturing) -> None:
    graph, captured = capturing()
    captured.add("all_reduce", group, device.allocate(0, 64), sys._getframe())
    graph.capture_end()
    device.switch(0)
    del graph
    with pytest.raises(captures.StaleGraphError, match="is no longer there"):
        captured.replay()
    captured.reset()
    assert captured.nbytes == 0
    assert captured.leases() == []
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0
    assert not device.live()


def test_a_graph_that_was_reset_is_not_replayed_under_its_old_name_s6(device, ledger, group, capturing) -> None:
    """The object may have been captured again since. Its replays are known to the one that is of its last capture."""
    graph, old = capturing()
    graph.capture_end()
    device.switch(0)
    old.reset()
    device.begin_capture(1)
    new = CapturedGraph(ledger, graph, (device.capturing,), [], INDEX, 1, device.capturing, sys._getframe())
    new.begin(graph)
    new.add("all_reduce", group, outside := device.allocate(0, 64), sys._getframe())
    blocks = device.blocks_of([outside])
    graph.capture_end()
    device.switch(2)
    with pytest.raises(captures.StaleGraphError, match="or was reset since"):
        old.replay()
    new.replay()
    device.launch(device.here(), blocks)
    device.switch(0)
    del outside
    graph.reset()
    ledger.sweep()
    device.settle()  # raises if the memory is free while the replay may run
    assert [entry.op for entry in ledger.pending()] == ["a CUDA graph"]
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_the_collector_may_end_graphs_while_those_that_live_are_looked_at_s7(device, ledger, group, capturing) -> None:
    """Before Python 3.12 it runs wherever memory is asked for, also in the middle of looking at a dictionary."""

    def live() -> Any:
        graph, captured = capturing()
        captured.seal()
        device.end_capture()
        return graph

    kept = [live() for _ in range(20)]
    threshold = gc.get_threshold()
    try:
        for look in (captures.refuse_live, captures.places_of):
            for soon in range(1, 16):
                gc.disable()
                graph = live()
                graph.itself = graph
                del graph
                gc.set_threshold(gc.get_count()[0] + soon)
                gc.enable()
                look(group if look is captures.refuse_live else [])
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    del kept


@pytest.mark.parametrize("gone", [False, True])
def test_a_slot_that_was_handed_out_in_a_capture_is_the_graphs_until_its_end_s6(
    device, ledger, capturing, monkeypatch, gone
) -> None:
    """Also where references are not counted, so that nothing notes who keeps it. Two threads may end the graph."""
    graph, captured = capturing()
    storage = device.allocate(1, 64).untyped_storage()
    for _ in range(2):
        captured.lease(storage)
    assert captured.nbytes == 64
    graph.capture_end()
    device.switch(0)

    class Kept(dict[int, list[None]]):
        def get(self, key: int, default: Any = None) -> Any:
            captured._slots.clear()  # by another thread
            return super().get(key, default)

    kept: list[None] = [None]
    if gone:
        monkeypatch.setattr(captures._torch, "KEPT", Kept({captures._torch.cdata_of(storage): kept}))
    graph.reset()
    assert captured.nbytes == 0
    assert kept == [None], "the other thread has counted it"
    device.finish()
    del storage
    assert drain_ledger(ledger, wait=True) == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_capture_that_goes_on_after_an_error_keeps_what_it_has_s5_s6(
    device, ledger, group, capturing, monkeypatch, interrupted
) -> None:
    """``capture_end()`` on another stream than the capture's, which torch refuses, or an interrupt before the end."""
    graph, captured = capturing()
    launched = call(ledger, group, [device.allocate(1, 64)])
    outside = device.allocate(0, 64)
    captured.add("all_reduce", group, outside, sys._getframe())
    bit = device.streams[group.stream.handle].captured

    def refused(graph: Graph) -> None:
        raise RuntimeError("capture must end on the same stream it began on")

    with monkeypatch.context() as patched:
        patched.setattr(captures._torch, "end_allocation_to_pool", mock.Mock(side_effect=AssertionError("it goes on")))
        if interrupted:
            patched.setattr(ledger, "join_unwaited", mock.Mock(side_effect=KeyboardInterrupt))
        else:
            patched.setattr(Graph, "capture_end", refused)
            device.switch(0)
        error, message = (KeyboardInterrupt, None) if interrupted else (RuntimeError, "same stream")
        with pytest.raises(error, match=message):
            graph.capture_end()
    device.switch(1)
    assert [entry.op for entry in ledger.pending()] == [launched.op]
    launched.work.wait()
    assert not bit & ~device.streams[1].captured
    assert ledger.pending() == []
    assert list(captures.RECORDING.values()) == [captured]
    graph.capture_end()
    device.switch(0)
    assert captures.RECORDING == {}
    (block,) = device.blocks_of([outside])
    del outside
    device.settle()
    assert not device.is_free(block), "the graph writes to it at each replay"
    graph.reset()
    assert drain_ledger(ledger, wait=True) == 0
    device.settle()
    assert device.is_free(block)


def test_where_graphs_were_captured_is_known_if_somebody_saw_it_s7(device, capturing, monkeypatch) -> None:
    class CUDAGraph(Graph):
        pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    graph, captured = capturing()
    graph.capture_end()
    noted, unseen = CUDAGraph(device), CUDAGraph(device)
    captures._note_place(noted)
    assert captures.alive() == [noted, unseen]
    assert captures.places_of([unseen]) == ["places that were not seen, without patch()"]
    (of_recorded,), (of_noted,) = captures.places_of([graph]), captures.places_of([noted])
    assert of_recorded == captured.site
    assert "test_capture_boundaries.py" in of_noted
    assert len(captures.places_of([graph, noted, unseen])) == 3


# --- who sees captures ------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda_graph(device: SimulatedDevice, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """Let torch's CUDAGraph be a graph of the simulated device, whose ``capture_begin`` is inherited, as on a CPU."""

    class Inherited(Graph):
        begun = 0

        def capture_begin(self, pool: Any = None) -> None:
            self.begun += 1
            self.device.begin_capture(1)

    class CUDAGraph(Inherited):
        pass

    monkeypatch.setattr(captures, "LEDGER", ledger)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: INDEX)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (7, 0))
    yield CUDAGraph
    assert not captures._SHARED.users
    assert captures.RECORDING == {}


def recorded(device: SimulatedDevice, kind: type[Any]) -> int:
    """Capture with a graph of ``kind``, and return how many recordings that began."""
    graph = kind(device)
    graph.capture_begin()
    found = len(captures.RECORDING)
    assert graph.begun == 1
    graph.capture_end()
    device.switch(0)
    return found


def test_captures_are_seen_until_the_last_watcher_has_gone_s6(device, cuda_graph) -> None:
    """A watcher with a name counts once, because an exception of a signal handler can make it call again."""
    own = cuda_graph.capture_begin
    who = object()
    captures.watch(who)
    captures.watch(cuda_graph)
    captures.watch(who)
    assert recorded(device, cuda_graph) == 1
    captures.unwatch(who)
    assert recorded(device, cuda_graph) == 1
    captures.unwatch(cuda_graph)
    assert "capture_begin" not in vars(cuda_graph)
    assert cuda_graph.capture_begin is own
    captures.unwatch(who)  # nobody watches: nothing happens
    assert recorded(device, cuda_graph) == 0


def test_what_somebody_has_put_over_ours_stays_and_sees_no_capture_twice_s6(device, cuda_graph) -> None:
    """Theirs goes on to ours, which outlives the last watcher: then it does nothing, and later it is the inner one."""
    captures.watch(cuda_graph)
    ours = cuda_graph.capture_begin

    def theirs(graph: Any, pool: Any = None) -> None:
        ours(graph, pool)

    cuda_graph.capture_begin = theirs
    assert recorded(device, cuda_graph) == 1
    captures.unwatch(cuda_graph)
    assert cuda_graph.capture_begin is theirs
    assert recorded(device, cuda_graph) == 0
    captures.watch(cuda_graph)
    assert recorded(device, cuda_graph) == 1
    captures.unwatch(cuda_graph)
    assert cuda_graph.capture_begin is theirs


def test_a_graph_that_other_code_has_put_a_wrapper_on_dies_s6(device, cuda_graph) -> None:
    """Theirs refers to the graph, and ours takes its place for the life of the graph."""
    captures.watch(cuda_graph)
    graph = cuda_graph(device)
    graph.replay = lambda graph=graph: None
    graph.capture_begin()
    graph.capture_end()
    device.switch(0)
    died = weakref.ref(graph)
    del graph
    gc.collect()
    assert died() is None
    captures.unwatch(cuda_graph)


def test_where_nothing_is_captured_nothing_is_recorded(device, cuda_graph) -> None:
    """A graph of another device than the current one, or a class that captures nothing."""
    captures.watch(cuda_graph)
    try:
        graph = cuda_graph(device)
        with mock.patch.object(device, "begin_capture"):
            graph.capture_begin()
        assert captures.RECORDING == {}
        assert "capture_end" not in vars(graph)
    finally:
        captures.unwatch(cuda_graph)


def test_a_capture_that_is_prepared_for_is_one_that_somebody_watches(device, cuda_graph, monkeypatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(captures, "BEFORE", [prepared.append])
    captures.watch(cuda_graph)
    left_behind = cuda_graph.capture_begin
    recorded(device, cuda_graph)
    captures.unwatch(cuda_graph)
    cuda_graph.capture_begin = left_behind
    recorded(device, cuda_graph)
    assert prepared == [INDEX]


def test_captures_of_torch_compile_are_told_from_others():
    """What shares its graphs' pool is torch's to keep: it refuses memory of the pool that others keep."""
    space = {"__name__": "torch._inductor.cudagraph_trees", "ask": captures._is_of_trees}
    exec("def record(): return inner()\ndef inner(): return ask()", space)
    assert space["record"]()
    assert not captures._is_of_trees()
