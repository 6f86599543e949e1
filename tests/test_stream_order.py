"""What the program's own events order gives memory back at once, from the first use on another stream on (S1, S2).

The random programs that use events are those of ``front_programs.py``; what they use of CUDA is in
``tests/gpu/stream_order.py``.
"""

import sys
import threading
from unittest import mock

import fakes
import pytest
import torch
from device import Event, Stream
from simulated import INDEX, FakeEvent, FakeGroup, FakeStream, SimulatedDevice, call, call_sync, events_of_torch

import safecomm
from safecomm import _torch
from safecomm.core.drain import drain_ledger
from safecomm.core.holds import Queue
from safecomm.core.ledger import LEDGER, Ledger
from safecomm.core.uses import Events
from safecomm.diagnostics.replaced import replaced
from safecomm.interception import stream_methods


def methods():
    return torch.cuda.Event.record, torch.cuda.Event.wait, torch.cuda.Stream.wait_stream


METHODS = methods()


@pytest.fixture
def device():
    return SimulatedDevice()


@pytest.fixture
def ledger(device):
    """A ledger that sees events from its first use on, as the process's does."""
    ledger = Ledger(device)

    def first_use():
        ledger.uses.on_use = None
        stream_methods.see(ledger, ledger)

    ledger.uses.on_use = first_use
    with events_of_torch():
        own = methods()
        yield ledger
        stream_methods.unsee(ledger)
        assert methods() == own
    assert methods() == METHODS
    device.settle()
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0
    assert not ledger.nonempty
    device.settle()
    assert not device.live()
    assert not device.faults


def use(device, ledger, launching, home=0):
    """Use memory of ``home`` in a collective on ``launching``, and drop it."""
    device.wait(device.streams[launching], device.streams[home].past, device.streams[home].capture)
    before, device._current = device._current, launching
    tensor = device.allocate(home, 64)
    call_sync(ledger, FakeGroup(device, "nccl"), [tensor])
    device._current = before
    del tensor
    device.settle()


def held(ledger):
    return len(ledger.holds())


# --- what orders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wait_stream", "wait_event", "Event.wait", "an event of its own"])
def test_memory_is_back_when_its_stream_waits_s2(device, ledger, how):
    use(device, ledger, 1)
    main, side = FakeStream(device, 0), FakeStream(device, 1)
    assert held(ledger) == 1
    if how == "wait_stream":
        main.wait_stream(side)
    elif how == "wait_event":
        main.wait_event(side.record_event())
    elif how == "Event.wait":
        side.record_event().wait(main)
    else:
        event = FakeEvent()
        event.record(side)
        main.wait_event(event)
    assert held(ledger) == 0
    assert device.calls["query"] == 0, "nothing was asked"
    device.settle()


@pytest.fixture
def replaced_streams(ledger, monkeypatch):
    """``torch.cuda.Stream`` is the simulated device's, and so is what stands in for its methods."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(_torch.launches, "_LAYERS", (*_torch.launches._LAYERS, fakes.__file__))
    return ledger


def test_wait_stream_takes_an_event_of_the_pool_s2(device, replaced_streams):
    use(device, replaced_streams, 1)
    main, side = FakeStream(device, 0), FakeStream(device, 1)
    with mock.patch.object(FakeEvent, "record", side_effect=AssertionError("a new event")):
        main.wait_stream(side)
        assert held(replaced_streams) == 0
    assert device.calls["query"] == 0, "nothing was asked"
    main.wait_stream(side)  # nothing is held, and so it is torch's


@pytest.mark.parametrize("name", ["record_event", "wait_event"])
def test_wait_stream_calls_what_somebody_has_put_in_torchs_place(device, replaced_streams, monkeypatch, name):
    use(device, replaced_streams, 1)
    called = []
    own = getattr(FakeStream, name)
    monkeypatch.setattr(FakeStream, name, lambda *given: called.append(name) or own(*given))
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert called == [name]
    assert held(replaced_streams) == 0


def test_wait_stream_of_another_devices_stream_is_torchs(device, replaced_streams):
    use(device, replaced_streams, 1)
    with mock.patch.object(replaced_streams.stream_order, "wait_stream", side_effect=AssertionError):
        FakeStream(device, 0, INDEX + 1).wait_stream(FakeStream(device, 1))
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))


def test_the_event_of_wait_stream_in_a_capture_is_not_used_again_s5(device, replaced_streams):
    use(device, replaced_streams, 3)  # something is held
    device.begin_capture(1)
    main, side = FakeStream(device, 1), FakeStream(device, 2)
    side.wait_stream(main)
    with mock.patch.object(device, "recycle_event", side_effect=AssertionError("it is the graph's")):
        main.wait_stream(side)
    device.end_capture()
    device.switch(0)
    FakeStream(device, 0).wait_stream(FakeStream(device, 3))


def test_what_was_released_otherwise_is_not_passed_on(device, ledger):
    use(device, ledger, 1)
    streams = [FakeStream(device, number) for number in range(3)]
    streams[2].wait_stream(streams[1])
    assert ledger.stream_order.recorded(INDEX, 2) is not None
    device.finish()
    drain_ledger(ledger)
    assert ledger.stream_order.recorded(INDEX, 2) is None


def test_a_chain_through_other_streams_is_followed_s2(device, ledger):
    use(device, ledger, 1)
    use(device, ledger, 2)
    streams = [FakeStream(device, number) for number in range(4)]
    streams[2].wait_stream(streams[1])
    streams[3].wait_stream(streams[2])
    assert held(ledger) == 2, "neither is the stream that the memory was allocated on"
    streams[0].wait_stream(streams[3])
    assert held(ledger) == 0
    device.settle()


def test_a_wait_outside_for_an_event_of_a_capture_releases_nothing_s5(device, ledger):
    """Such as for an external event, which is where the graph was replayed last."""
    use(device, ledger, 1)
    note = ledger.stream_order.recorded(INDEX, 1)
    assert note is not None
    ledger.stream_order.waited(INDEX, 0, (7, note[1]))
    assert held(ledger) == 1
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 0


def test_a_wait_that_fails_releases_nothing_s1(device, ledger):
    use(device, ledger, 1)
    event = FakeStream(device, 1).record_event()
    device.begin_capture(2)
    with pytest.raises(RuntimeError, match="CUDA error"):
        FakeStream(device, 2).wait_event(event)
    device.end_capture()
    assert held(ledger) == 1


def test_memory_of_two_streams_waits_for_the_device_s1(device, ledger):
    """A hold of several storages that were allocated on two streams."""
    tensors = [device.allocate(home, 64) for home in (0, 2)]
    device.switch(1)
    call_sync(ledger, FakeGroup(device, "nccl"), tensors)
    tensors.clear()
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 1
    device.settle()
    device.finish()
    ledger.sweep()
    assert held(ledger) == 0


def test_memory_that_replaced_other_memory_is_of_its_own_stream_s1(device, ledger):
    """A storage that was resized where nobody sees it has memory of another stream, and is used there again."""
    stream_methods.see(ledger, ledger)
    tensor = device.allocate(0, 64)
    storage = tensor.untyped_storage()
    assert ledger.uses.record(storage, INDEX, 1, sys._getframe())
    block = device.block(tensor)
    block.alloc_stream = 2
    device.wait(device.streams[1], device.streams[2].past, 0)
    device.launch(device.streams[1], [block])
    assert ledger.uses.record(storage, INDEX, 1, sys._getframe())
    del tensor, storage
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    device.settle()  # which finds what is free and still in use
    assert held(ledger) == 1
    FakeStream(device, 2).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 0


def test_a_stream_that_does_not_tell_its_handle_is_torchs_matter_s1(device, ledger):
    """The generic ``torch.Stream``: a wait of one releases nothing, and what it records has no note."""

    class Generic:
        device_index = INDEX

    use(device, ledger, 1)
    event = FakeStream(device, 1).record_event()
    event.point = None
    torch.cuda.Event.wait(event, Generic())
    assert held(ledger) == 1
    with pytest.raises(AttributeError):  # which torch has not, nor the device that stands for it
        torch.cuda.Event.record(event, Generic())
    assert set(vars(event)) == {"point"}, "a note of the record before"


def test_a_stream_that_got_the_handle_of_another_one_frees_nothing_too_early_s1(device, ledger):
    """A stream of other code was destroyed with work on it; as with the stream of each thread, one handle is two."""
    use(device, ledger, 3)
    device.streams[3] = Stream(3)
    use(device, ledger, 3)
    FakeStream(device, 0).wait_stream(FakeStream(device, 3))
    device.settle()  # which finds what is free and still in use
    assert held(ledger) == 0


def test_other_threads_may_record_and_wait_s1(device, ledger):
    use(device, ledger, 1)
    event = FakeEvent()
    for step in (lambda: event.record(FakeStream(device, 1)), lambda: event.wait(FakeStream(device, 0))):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(60)
    assert held(ledger) == 0
    device.settle()


def test_in_a_capture_an_event_of_the_capture_orders_s5(device, ledger):
    device.begin_capture(1)
    device.wait(device.streams[2], device.streams[1].past, device.capturing)
    use(device, ledger, 2, home=1)
    main, side = FakeStream(device, 1), FakeStream(device, 2)
    assert held(ledger) == 1
    main.wait_event(side.record_event())
    assert held(ledger) == 0
    device.settle()
    device.end_capture()


def test_what_ran_before_a_capture_is_not_ordered_in_it_s1_s5(device, ledger):
    use(device, ledger, 2, home=1)
    device.begin_capture(1)
    main, side = FakeStream(device, 1), FakeStream(device, 2)
    side.wait_stream(main)
    main.wait_stream(side)
    assert held(ledger) == 1
    device.end_capture()
    main.wait_stream(side)
    assert held(ledger) == 0
    device.settle()


def test_what_a_stream_was_behind_in_a_capture_it_is_not_behind_afterwards_s1_s5(device, ledger):
    streams = [FakeStream(device, number) for number in range(4)]
    use(device, ledger, 1)
    device.begin_capture(2)
    for joining in (1, 3):
        streams[joining].wait_stream(streams[2])
    use(device, ledger, 1, home=3)
    streams[2].wait_stream(streams[1])
    device.end_capture()
    before = device.streams[0].past
    streams[0].wait_stream(streams[2])
    assert device.streams[0].past == before, "waits for what the program does not wait for"
    assert held(ledger) == 2
    ledger.sweep()
    assert held(ledger) == 1
    device.settle()


def test_an_external_event_of_a_capture_orders_nothing_that_ran_before_s1(device, ledger):
    """It is recorded by replays, wherever they run: a wait for it is none before the first one."""
    use(device, ledger, 1)
    device.begin_capture(1)
    event = FakeStream(device, 1).record_event()
    device.end_capture()
    event.point = Event(0, 0)
    before = device.streams[0].past
    FakeStream(device, 0).wait_event(event)
    assert device.streams[0].past == before, "waits for what the program does not wait for"
    assert held(ledger) == 1


def test_a_work_that_was_waited_for_elsewhere_comes_back_so_too_s2(device, ledger):
    tensor = device.allocate(0, 64)
    launched = call(ledger, FakeGroup(device, "nccl"), [tensor])
    device.switch(1)
    launched.work.wait()
    del launched, tensor
    assert [one.state for one in ledger.pending()] == ["handed off"]
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 0
    device.settle()


def test_what_nobody_waits_for_any_more_leaves_nothing_behind(device, ledger):
    """The streams that are known to be behind some use are forgotten with it."""
    for _ in range(50):
        use(device, ledger, 1)
        FakeStream(device, 2).wait_stream(FakeStream(device, 1))
        FakeStream(device, 3).wait_stream(FakeStream(device, 2))
        device.finish()
        ledger.sweep()
        device.settle()
    use(device, ledger, 1)
    for number in (2, 3):
        FakeStream(device, number).record_event()
    assert ledger.stream_order._behind == {}


# --- what is replaced, and when --------------------------------------------------------------------------------------


@pytest.fixture
def process():
    """The process's ledger, on a simulated device."""
    yield LEDGER
    stream_methods.forget_uses()
    assert methods() == METHODS


def first_use():
    LEDGER.uses.on_use()


def test_torchs_methods_are_replaced_from_the_first_use_on(process):
    assert replaced() == []
    first_use()
    assert replaced() == [f"torch.cuda.streams.{name}" for name in ("Event.record", "Event.wait", "Stream.wait_stream")]
    assert LEDGER.uses.on_use is None, "once is enough"
    safecomm.unpatch()
    assert replaced() == []
    first_use()
    assert len(replaced()) == 3, "unpatch() is not for good"


def test_two_threads_may_use_memory_elsewhere_for_the_first_time(device, ledger):
    """The first use of one thread takes away what the other one is about to call."""

    class TakenAway(type(ledger.uses)):
        on_use = property(lambda self: told.pop(), lambda self, value: None)

    called = []
    told = [None, lambda: called.append(True)]
    ledger.uses.__class__ = TakenAway
    use(device, ledger, 1)
    assert called == [True]


def test_the_switch_forbids_it(process, monkeypatch):
    monkeypatch.setenv("SAFECOMM_REPLACE", "0")
    first_use()
    assert replaced() == []
    assert LEDGER.uses.on_use is None


def test_a_context_and_the_first_use_do_not_get_in_each_others_way(process):
    first_use()
    with safecomm.avoid_record_streams():
        first = torch.cuda.Event.record
    assert torch.cuda.Event.record is first
    stream_methods.forget_uses()
    assert replaced() == []
    with safecomm.avoid_record_streams():
        first_use()
        stream_methods.forget_uses()
        assert "torch.cuda.streams.Event.wait" in replaced()
    assert replaced() == []


def test_what_stands_in_is_torchs_to_whoever_looks(process):
    first_use()
    for ours, own in zip(methods(), METHODS, strict=True):
        assert ours.__wrapped__ is own
        assert (ours.__name__, ours.__doc__) == (own.__name__, own.__doc__)


# --- events that are recorded late ------------------------------------------------------------------------------------


def test_wait_stream_needs_no_event_of_a_use_s2_s10(device, ledger):
    use(device, ledger, 1)
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 0
    assert not ledger.uses.queues[Events, 1, INDEX, 0].eventless
    assert device.calls["record_event"] == 1, "that of the wait"
    device.settle()


def test_a_use_has_its_event_before_the_next_one_of_the_program_s1(device, ledger):
    use(device, ledger, 1)
    event = FakeStream(device, 1).record_event()
    assert device.calls["record_event"] == 1
    device.launch(device.streams[1], [])  # which nobody has to wait for
    FakeStream(device, 0).wait_event(event)
    assert held(ledger) == 0
    device.settle()


def test_a_use_has_its_event_as_the_next_call_begins_s3(device, ledger):
    use(device, ledger, 1)
    (one,) = ledger.holds()
    assert one.event is None
    ledger.sweep()
    assert one.event is not None
    device.finish()
    ledger.sweep()
    assert held(ledger) == 0


def test_of_a_stream_that_may_be_destroyed_an_event_is_recorded_at_once_s1(device, ledger):
    use(device, ledger, 3)
    (one,) = ledger.holds()
    assert one.event is not None
    device.finish()
    ledger.sweep()


def test_what_is_of_a_third_stream_stays_held_s1(device, ledger):
    use(device, ledger, 1, home=2)
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 1
    device.settle()
    FakeStream(device, 2).wait_stream(FakeStream(device, 0))
    assert held(ledger) == 0
    device.settle()


def test_memory_of_the_stream_itself_is_not_held_where_the_caller_does_not_know_it_s2(device, ledger):
    device.switch(1)
    own, other = device.allocate(1, 64), device.allocate(0, 64)
    ledger.hand_off("all_reduce", None, INDEX, (own.untyped_storage(),), sys._getframe())
    assert held(ledger) == 0
    both = own.untyped_storage(), other.untyped_storage()
    ledger.hand_off("all_gather", None, INDEX, both, sys._getframe())
    (one,) = ledger.holds()
    assert one.storages == (both[1],)
    ledger.release(one)


def test_the_queue_of_a_stream_is_there_when_it_is_complete_s1(device, ledger):
    """An exception comes as it is made, or another thread."""
    device.switch(1)
    with mock.patch.object(Queue, "__init__", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        ledger.uses.queue(Events, 1, INDEX)
    use(device, ledger, 1)
    assert held(ledger) == 1
    FakeStream(device, 0).wait_stream(FakeStream(device, 1))
    assert held(ledger) == 0
