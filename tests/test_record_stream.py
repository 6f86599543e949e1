"""avoid_record_streams(): interception, conversion, and what it leaves behind (S1, S2, S4).

The dispatcher's key can be CPU's as well, so the interception is the real one, on CPU tensors; the streams are those of
the simulated device. What needs CUDA's allocator is in ``tests/gpu/graphs.py``.
"""

import _thread
import collections
import functools
import gc
import inspect
import logging
import sys
import threading
import types
import weakref

import pytest
import torch
from simulated import INDEX, FakeGraph, FakeGroup, FakeStream, SimulatedDevice, call, events_of_torch, routes_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from watching import cpu_profile

import safecomm
from safecomm.collectives.routes import ROUTES
from safecomm.core import captures, refcounts
from safecomm.core.drain import drain_ledger
from safecomm.core.ledger import Ledger
from safecomm.interception import record_stream
from safecomm.interception.record_stream import avoid_record_streams
from safecomm.patching import functional

RESIZE = torch.UntypedStorage.resize_
EVENT = torch.cuda.Event.record, torch.cuda.Event.wait
CAPTURE = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end


def stream(number):
    """Return what C++ gives to Python for stream ``number`` of the simulated device."""
    return torch.Stream(stream_id=number, device_index=INDEX, device_type=1)


@pytest.fixture
def device():
    return SimulatedDevice()


@pytest.fixture
def ledger(device, monkeypatch):
    ledger = Ledger(device)

    def intercept():
        return record_stream._Interception(ledger, "CPU", lambda stream: stream.stream_id)

    monkeypatch.setattr(record_stream, "_intercept", intercept)
    yield ledger
    assert not record_stream._SHARED.users
    untouched()


def untouched():
    """Assert that torch is as it was."""
    assert torch.UntypedStorage.resize_ == RESIZE
    assert "resize_" not in vars(torch.UntypedStorage)
    assert "record_stream" not in vars(torch.Tensor)
    assert (torch.cuda.Event.record, torch.cuda.Event.wait) == EVENT
    assert (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end) == CAPTURE
    with pytest.raises(NotImplementedError, match="aten::record_stream"):
        torch.ones(1).record_stream(stream(1))
    assert "record_stream.py" not in torch._C._dispatch_dump("aten::resize_")


def used_on(device, number, home=0):
    """Return a tensor allocated on ``home`` that a kernel uses on stream ``number``, and which is recorded for it."""
    tensor = device.allocate(home, 64)
    device.launch(device.streams[number], device.blocks_of([tensor]))
    tensor.record_stream(stream(number))
    return tensor


def states(ledger):
    return [entry.state for entry in ledger.pending()]


def is_over(device, ledger):
    """Assert that all that is held comes back once the device has run."""
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []


def is_handed_off_until_it_is_over(device, ledger):
    ledger.sweep()
    assert states(ledger) == ["handed off"]
    device.settle()
    is_over(device, ledger)


def nothing_is_left(device, ledger):
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0
    assert not device.live()


def waits(device, ledger, waiting, other):
    """Order one stream after another, as wait_stream does inside of the context."""
    note = ledger.stream_order.recorded(INDEX, other)
    device.wait(device.streams[waiting], device.streams[other].past, device.streams[other].capture)
    if note is not None:
        ledger.stream_order.waited(INDEX, waiting, note)


# --- convert -------------------------------------------------------------------------------------------------


def test_held_until_nobody_uses_it_and_the_device_has_got_there_s1(device, ledger):
    with avoid_record_streams() as avoided:
        tensor = used_on(device, 1)
        view = tensor[:3].view(torch.int8)
        ledger.sweep()
        assert states(ledger) == ["recorded"]
        del tensor
        ledger.sweep()
        assert states(ledger) == ["recorded"]
        assert drain_ledger(ledger) == 0, "what others still use is not held for anybody"
        del view
        is_handed_off_until_it_is_over(device, ledger)
        device.settle()
    assert avoided.calls == 1


def test_a_functional_result_and_a_recorded_use_do_not_wait_for_each_other_s3(device, ledger, monkeypatch):
    """Both wait until nobody else has the memory. The program has dropped the result without a wait."""
    monkeypatch.setattr(functional._torch, "group_name", lambda _: "the group's")
    waited = []
    group = FakeGroup(device, "nccl")
    queue = routes_of(ledger).of(group, INDEX, results=True)
    device.switch(0)
    tensor, result = device.allocate(0, 64), functional.Result()
    result.works = (group.launch([tensor]),)
    result.works[0].outputs.clear()
    result.owner = types.SimpleNamespace(exiting=False, unwaited={}, wait_for=lambda _: waited.append(True))
    result.queue, result.op, result.since, result.has_future, result.alloc_stream = queue, "all_reduce", 0.0, True, None
    result.code, result.instruction = sys._getframe().f_code, sys._getframe().f_lasti
    result.tensor, result.storage = tensor, tensor.untyped_storage()
    result.storages, result.key = (result.storage,), result.storage._cdata
    del tensor
    result.counted = result.count()
    used = result.tensor.detach()
    device.launch(device.streams[3], device.blocks_of([used]))
    assert ledger.uses.record(used.untyped_storage(), INDEX, 3, sys._getframe())
    queue.holds[result] = ledger.nonempty[queue] = None
    device.finish()
    ledger.sweep(thorough=True)
    assert not waited, "somebody has a tensor of it"
    del used, result
    for _ in range(3):
        ledger.sweep(thorough=True)
    assert waited == [True]
    assert ledger.pending() == []
    assert not device.live()


def test_a_view_of_the_storage_records_the_storage_once(device, ledger):
    with avoid_record_streams() as avoided:
        tensor = used_on(device, 1)
        tensor[:2].record_stream(stream(1))
        tensor.view(torch.int8).record_stream(stream(1))
        assert len(ledger.pending()) == 1
        tensor.record_stream(stream(2))
        assert len(ledger.pending()) == 2
        del tensor
        is_over(device, ledger)
    assert avoided.calls == 4


def test_on_its_own_stream_there_is_nothing_to_hold(device, ledger):
    with avoid_record_streams():
        tensor = used_on(device, 0)
        empty = torch.empty(0)
        empty.record_stream(stream(1))
        assert ledger.pending() == []
        del tensor


class Sub(torch.Tensor):
    """A tensor that does as a tensor does."""


class SeesFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_pythons_calls_go_past_the_dispatcher_and_cs_do_not(device, ledger, monkeypatch):
    """The dispatcher and its way into Python take longer than all the rest of a call."""
    through = []
    own = record_stream._caller
    monkeypatch.setattr(record_stream, "_caller", lambda: (through.append("the dispatcher"), own())[1])
    with avoid_record_streams() as avoided:
        tensor = used_on(device, 1)
        parameter = torch.nn.Parameter(device.allocate(0, 64).float())
        device.track(parameter, 0)
        parameter.record_stream(s=stream(1))
        assert through == []
        assert states(ledger) == ["recorded"] * 2
        torch.ops.aten.record_stream(tensor, stream(2))
        assert through == ["the dispatcher"]
        assert states(ledger) == ["recorded"] * 3
    assert avoided.calls == 3
    places = [site.partition(" in ")[2] for site in avoided.sites]
    assert places[:2] == ["used_on", inspect.currentframe().f_code.co_name]


@pytest.mark.parametrize("who", ["subclass", "wrapper", "function mode", "dispatch mode", "profiler", "transform"])
def test_who_is_to_see_the_operator_sees_it(device, ledger, who):
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    class Wrapper(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(function._schema.name)

    tensor = device.allocate(0, 64)
    with avoid_record_streams() as avoided:
        if who == "subclass":
            with Sees():  # below the subclass
                tensor.as_subclass(Sub).record_stream(stream(1))
        elif who == "wrapper":
            torch.Tensor._make_subclass(Wrapper, tensor).record_stream(stream(1))
        elif who == "function mode":
            with SeesFunctions() as mode:
                tensor.record_stream(stream(1))
            seen += [f"aten::{name}" for name in mode.names]
        elif who == "dispatch mode":
            with Sees():
                tensor.record_stream(stream(1))
        elif who == "profiler":
            with cpu_profile() as profile:
                tensor.record_stream(stream(1))
            seen += [event.name for event in profile.events()]
        else:

            def batched(one):
                one.record_stream(stream(1))
                return one

            with pytest.raises(RuntimeError, match="record_stream"):  # torch has no rule for it
                torch.func.vmap(batched)(tensor)
            seen.append("aten::record_stream")
        assert "aten::record_stream" in seen
        assert avoided.calls == (who not in ("wrapper", "transform"))


def test_what_is_no_stream_or_has_no_storage_is_torchs_to_refuse(device, ledger):
    with avoid_record_streams() as avoided:
        with pytest.raises(RuntimeError, match="unknown parameter type"):
            device.allocate(0, 64).record_stream(1)
        with pytest.raises(NotImplementedError, match="aten::record_stream"):
            torch.ones(2, device="meta").record_stream(stream(1))
        with pytest.raises(NotImplementedError, match="aten::record_stream"):
            torch.eye(2).to_sparse().record_stream(stream(1))
    assert avoided.calls == 0


def test_somebodys_method_over_ours_reaches_torchs_afterwards(device, ledger):
    def theirs(tensor, s):
        return ours(tensor, s)

    with avoid_record_streams() as avoided:
        ours = torch.Tensor.record_stream
        torch.Tensor.record_stream = theirs
        used_on(device, 1)
    try:
        assert torch.Tensor.record_stream is theirs
        with pytest.raises(NotImplementedError, match="aten::record_stream"):
            torch.ones(1).record_stream(stream(1))
        assert avoided.calls == 1
        is_over(device, ledger)
    finally:
        del torch.Tensor.record_stream


def test_somebodys_method_below_ours_is_called(device, ledger, monkeypatch):
    seen = []
    own = torch.Tensor.record_stream
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, s: (seen.append(s), own(tensor, s))[1])
    theirs = torch.Tensor.record_stream
    with avoid_record_streams() as avoided:
        used_on(device, 1)
        assert states(ledger) == ["recorded"]
    assert (len(seen), avoided.calls) == (1, 1)
    assert torch.Tensor.record_stream is theirs
    monkeypatch.undo()


def test_a_call_that_no_frame_of_python_makes(device, ledger, monkeypatch):
    """So a hook of a tensor runs in a thread of autograd."""
    over, failed = threading.Event(), []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: failed.append(unraisable.exc_value))
    tensor = device.allocate(0, 64)

    class Over:
        def __del__(self):
            over.set()

    with avoid_record_streams() as avoided:
        # The thread lets go of what it was started with when the call is over, whatever came of it.
        call = functools.partial(torch.Tensor.record_stream, tensor, stream(1))
        call.over = Over()
        _thread.start_new_thread(call, ())
        del call
        assert over.wait(60)
        assert (failed, avoided.calls, states(ledger)) == ([], 1, ["recorded"])
        del tensor
        device.finish()


def test_memory_that_was_swapped_unseen_is_ordered_where_it_is_now_s1(device, ledger):
    """C++ can give a storage other memory, past all that is replaced."""
    tensor = device.allocate(0, 64)
    with avoid_record_streams():
        tensor.record_stream(stream(1))
    assert states(ledger) == ["recorded"]
    RESIZE(tensor.untyped_storage(), 1 << 16)
    device.settle()
    device.track(tensor, 2)
    device.launch(device.streams[1], device.blocks_of([tensor]))
    del tensor
    waits(device, ledger, 0, 1)
    device.settle()
    assert states(ledger) == ["handed off"]
    waits(device, ledger, 2, 1)
    assert states(ledger) == []
    device.settle()


@pytest.mark.parametrize("release", ["auto", "order"])
def test_memory_that_was_swapped_for_some_of_an_unknown_stream_is_deferred_s1(device, ledger, release):
    """There is nothing to order."""
    tensor = device.allocate(0, 64)
    with avoid_record_streams(release=release):
        tensor.record_stream(stream(1))
    RESIZE(tensor.untyped_storage(), 1 << 16)
    device.settle()
    device.track(tensor, None)
    device.launch(device.streams[1], device.blocks_of([tensor]))
    del tensor
    is_handed_off_until_it_is_over(device, ledger)


def test_memory_recorded_again_is_ordered_where_it_is_now_s1(device, ledger):
    """The same address can be another stream's by then."""
    with avoid_record_streams():
        tensor = used_on(device, 1)
        (_, block) = device._live[tensor.data_ptr()]
        block.alloc_stream = 2
        device.launch(device.streams[1], device.blocks_of([tensor]))
        tensor.record_stream(stream(1))
        del tensor
        waits(device, ledger, 0, 1)
        device.settle()
        assert states(ledger) == ["handed off"]
        waits(device, ledger, 2, 1)
        assert states(ledger) == []
        device.settle()


def test_where_memory_was_allocated_is_asked_once(device, ledger, monkeypatch):
    """S10: the driver's answer takes as long as the rest of a call."""
    asked = []
    own = device.alloc_stream
    monkeypatch.setattr(device, "alloc_stream", lambda *pointers: (asked.append(pointers), own(*pointers))[1])
    with avoid_record_streams():
        used_on(device, 1)
        waits(device, ledger, 0, 1)
        assert states(ledger) == []
        used_on(device, 1).untyped_storage().resize_(0)
        assert states(ledger) == []
    assert len(asked) == 2
    device.settle()


def test_a_wait_that_orders_it_gives_it_back_at_once_s2(device, ledger):
    with avoid_record_streams():
        tensor = used_on(device, 1)
        waits(device, ledger, 0, 1)
        assert states(ledger) == ["recorded"], "somebody uses it"
        del tensor
        waits(device, ledger, 2, 1)
        assert states(ledger) == ["handed off"], "that is not the stream that it was allocated on"
        waits(device, ledger, 0, 1)
        assert states(ledger) == []
        assert device.calls["query"] == 0, "S2: nothing is asked"
        assert device.calls["record_event"] == device.calls["wait_event"] == 1
        device.settle()


def test_wait_stream_is_seen(device, ledger):
    with events_of_torch(), avoid_record_streams():
        used_on(device, 1)
        FakeStream(device, 0).wait_stream(FakeStream(device, 1))
        assert ledger.pending() == []
        device.settle()


@pytest.mark.parametrize("release", ["auto", "order", "defer"])
def test_release(device, ledger, release):
    with avoid_record_streams(release=release):
        used_on(device, 1)
        ledger.sweep()
        assert device.calls["wait_event"] == (release == "order")
        assert states(ledger) == ([] if release == "order" else ["handed off"])
        device.settle()
        device.finish()


def test_too_much_behind_the_host_is_ordered(device, monkeypatch):
    few = Ledger(device, lag=2, use_budget=256)
    monkeypatch.setattr(
        record_stream, "_intercept", lambda: record_stream._Interception(few, "CPU", lambda stream: stream.stream_id)
    )
    with avoid_record_streams():
        for _ in range(20):
            used_on(device, 1)
            device.settle()
        assert sum(entry.nbytes for entry in few.pending()) <= 256 + 64
    assert device.calls["wait_event"]
    device.finish()


@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("old", [0, 200])
def test_what_nobody_uses_does_not_pile_up_whatever_the_order_s3(device, ledger, window, old):
    """S3: nobody tells when the last reference goes, so what is found by looking must not be less than what comes."""
    with avoid_record_streams():
        kept = [used_on(device, 1) for _ in range(old)]
        used = collections.deque()
        for number in range(3000):
            used.append(used_on(device, 1))
            if len(used) > window:
                del used[0 if number % 2 else window // 2]
            device.finish()
        assert len(ledger.pending()) <= (window + old) * 1.5 + 20
        used.clear()
        kept.clear()
        drain_ledger(ledger)
        assert not device.live()


def test_much_memory_is_looked_at_by_the_next_call_s3(device, monkeypatch):
    few = Ledger(device, use_budget=8 * 64 * 3)
    few.interval = 100
    monkeypatch.setattr(
        record_stream, "_intercept", lambda: record_stream._Interception(few, "CPU", lambda stream: stream.stream_id)
    )
    with avoid_record_streams():
        for _ in range(100):
            used_on(device, 1)
            device.finish()
            assert len(few.pending()) <= 12
        assert len(few.pending()) > 3
    few.sweep(thorough=True)


def test_leaving_gives_back_what_is_over_however_recently_it_was_looked_at_s3(device, ledger):
    ledger.interval = 100
    with avoid_record_streams():
        used_on(device, 1)
        device.finish()
        ledger.sweep()
        assert states(ledger) == ["recorded"]
    assert states(ledger) == []


def test_in_a_capture_each_call_of_record_stream_looks_s5(device, ledger):
    with avoid_record_streams():
        device.begin_capture(1)
        device.wait(device.streams[2], device.here().past, device.here().capture)
        for _ in range(10):
            used_on(device, 2, 1)
            assert len(ledger.pending()) == 1
            device.settle()
        device.end_capture()
    ledger.sweep()


@pytest.mark.parametrize("passed", ["one", "both"])
def test_a_finalizer_that_sweeps_in_the_middle_of_a_sweep_s3(device, ledger, passed):
    with avoid_record_streams():
        storage = used_on(device, 1).untyped_storage()
        weakref.finalize(storage, ledger.sweep)
        del storage
        ledger.sweep()
        used_on(device, 1)
        ledger.sweep()
        if passed == "both":
            device.finish()
        else:
            device.run()
        ledger.sweep()
        is_over(device, ledger)


@pytest.mark.parametrize("first", ["defer", "given back"])
def test_rule_three_counts_what_is_behind_the_first(device, monkeypatch, first):
    few = Ledger(device, lag=2, use_budget=256)
    monkeypatch.setattr(
        record_stream, "_intercept", lambda: record_stream._Interception(few, "CPU", lambda stream: stream.stream_id)
    )
    with avoid_record_streams():
        if first == "defer":
            with avoid_record_streams(release="defer"):
                used_on(device, 1)
        else:
            used_on(device, 1, home=2)
            for _ in range(40):
                used_on(device, 1)
            few.sweep(thorough=True)
            waits(device, few, 0, 1)
        for _ in range(100):
            used_on(device, 1, home=2)
            device.settle()
            assert sum(entry.nbytes for entry in few.pending()) <= 256 + 64 * 4
    device.finish()


@pytest.mark.parametrize("home", [1, 2])
def test_in_a_capture_an_edge_gives_it_back_s5(device, ledger, home):
    with avoid_record_streams():
        device.begin_capture(1)
        device.wait(device.streams[2], device.here().past, device.here().capture)
        for _ in range(10):
            used_on(device, 3 - home, home)
            ledger.sweep()
            assert states(ledger) == []
            device.settle()
        device.end_capture()
        assert len(device.blocks) == 1


# --- memory that frees itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [True, False])
def test_resize_of_the_tensor_is_ordered_before_s1(device, ledger, monkeypatch, kernel):
    """Also where torch's kernel can't be called."""
    if not kernel:
        monkeypatch.delattr(torch.library, "get_kernel", raising=False)
    with avoid_record_streams():
        tensor = used_on(device, 1)
        tensor.resize_(1 << 16)
        assert device.calls["wait_event"] == 1
        assert ledger.pending() == []
        assert torch.empty(0).resize_(7).shape == (7,)
        assert torch.empty(0).resize_(7, 2).shape == (7, 2)
        assert device.calls["wait_event"] == 1
    assert "resize_" not in vars(torch.Tensor)


def test_what_could_not_be_ordered_stays_held_s4(device, ledger, monkeypatch):
    with avoid_record_streams(release="order"):
        tensor = used_on(device, 1)
        del tensor
        with monkeypatch.context() as patch:
            patch.setattr(device, "wait_event", None)
            with pytest.raises(TypeError):
                ledger.sweep()
        assert len(ledger.pending()) == 1
        ledger.sweep()
        assert ledger.pending() == []
        device.settle()


def test_data_swapped_under_it_stays_held_s1(device, ledger):
    with avoid_record_streams():
        tensor = used_on(device, 1)
        tensor.data = torch.empty(1, dtype=torch.uint8)
        ledger.sweep()
        assert states(ledger) == ["handed off"]
        device.settle()
        device.finish()


@pytest.mark.parametrize("how", ["smaller", "out="])
def test_a_resize_that_moves_nothing_keeps_the_record_s1(device, ledger, how):
    with avoid_record_streams(release="order"):
        tensor = used_on(device, 1)
        if how == "smaller":
            tensor.resize_(8)
        else:
            tensor.resize_(0)
        assert states(ledger) == ["recorded"]
        device.launch(device.streams[1], device.blocks_of([tensor]))  # which that still protects
        del tensor
        ledger.sweep()
        device.settle()
    device.finish()


def test_memory_of_nobody_knows_where_is_deferred_without_torchs_kernel_s1(device, ledger):
    with avoid_record_streams():
        tensor = device.allocate(None, 64)
        device.launch(device.streams[1], device.blocks_of([tensor]))
        tensor.record_stream(stream(1))  # CPU has no kernel, as every device before torch 2.9
        del tensor
        is_handed_off_until_it_is_over(device, ledger)


def test_a_wait_for_another_devices_default_stream_orders_nothing_here_s1(device, ledger):
    with events_of_torch(), avoid_record_streams():
        used_on(device, 0, home=1)
        event = FakeStream(device, 0, INDEX + 1).record_event()
        event.point = None  # nothing of this device
        FakeStream(device, 1).wait_event(event)
        ledger.sweep()
        device.settle()
        assert states(ledger) == ["handed off"]
        device.finish()


def test_what_another_thread_does_during_the_wait_is_not_ordered_by_it_s1(device, ledger):
    with avoid_record_streams():
        used_on(device, 1)
        tensor = used_on(device, 1)
        note = ledger.stream_order.recorded(INDEX, 1)
        device.wait(device.streams[0], device.streams[1].past, 0)
        device.launch(device.streams[1], device.blocks_of([tensor]))  # the other thread, after the event
        del tensor
        ledger.stream_order.waited(INDEX, 0, note)
        device.settle()
        device.finish()


def test_a_record_that_another_thread_releases_is_all_there_or_gone_s1(device, ledger):
    """One thread is about to ask whether a record is alone, and another one is in the middle of releasing it."""
    gone = threading.Event()
    answered = threading.Event()

    class Turns:
        """The records' lock: the asking thread gets it after the releasing one has let go of it, and not later."""

        def __init__(self):
            self.lock = threading.RLock()
            self.depth = 0

        def __enter__(self):
            if threading.current_thread() is not releasing and releasing.ident is None:
                releasing.start()
                assert gone.wait(60)
            self.lock.acquire()
            self.depth += 1

        def __exit__(self, *_):
            self.depth -= 1
            outermost = not self.depth
            self.lock.release()
            if outermost and threading.current_thread() is releasing:
                gone.set()
                answered.wait(60)

    with avoid_record_streams():
        used_on(device, 1)
        (entry,) = [*ledger.holds(), *ledger.quarantine]
        releasing = threading.Thread(target=ledger.release_all, args=([entry],))
        ledger.lock = Turns()
        try:
            waits(device, ledger, 0, 1)
        finally:
            answered.set()
            releasing.join(60)
        assert ledger.pending() == []
        device.finish()


def test_a_capture_that_another_thread_begins_while_the_event_is_recorded_s5(device, ledger, monkeypatch):
    """The event would be one of the capture, which nobody may poll: each later call would raise."""
    device.switch(2)
    tensor = device.allocate(0, 64)
    device.launch(device.streams[2], device.blocks_of([tensor]))
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 2, sys._getframe())
    del tensor
    device.switch(0)
    own = device.record_event

    def after_a_capture_has_begun(index, stream):
        monkeypatch.setattr(device, "record_event", own)
        thread = threading.Thread(target=device.begin_capture, args=(2,))
        thread.start()
        thread.join()
        return own(index, stream)

    monkeypatch.setattr(device, "record_event", after_a_capture_has_begun)
    ledger.sweep()
    assert device.capturing
    assert states(ledger) == ["recorded"]
    device.end_capture()
    ledger.sweep()
    assert states(ledger) == ["handed off"]
    is_over(device, ledger)
    assert device.faults == []
    assert not device.live()


def test_records_from_many_threads(device, ledger):
    failures = []

    def work():
        try:
            for _ in range(200):
                tensor = torch.empty(64, dtype=torch.uint8)
                ledger.uses.record(tensor.untyped_storage(), INDEX, 1, sys._getframe(), unordered=True)
                if note := ledger.stream_order.recorded(INDEX, 1):
                    ledger.stream_order.waited(INDEX, 0, note)
                del tensor
                ledger.sweep()
        except Exception as error:
            failures.append(error)

    device.alloc_stream = lambda pointer: 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    ledger.sweep()
    assert ledger.pending() == []


# --- modes -------------------------------------------------------------------------------------------------------


def test_raise_names_the_call_site(device, ledger):
    tensor = device.allocate(0, 64)
    with avoid_record_streams("raise"), pytest.raises(safecomm.RecordStreamError, match=r"test_record_stream\.py:\d+"):
        tensor.record_stream(stream(1))
    assert ledger.pending() == []


def test_warn_names_each_call_site_once(device, ledger, caplog):
    with avoid_record_streams("warn"):
        for _ in range(3):
            tensor = used_on(device, 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "test_record_stream.py" in caplog.text
    del tensor
    device.finish()


def test_count_counts_by_call_site(device, ledger):
    with avoid_record_streams("count") as avoided:
        for _ in range(3):
            used_on(device, 1)
        device.allocate(0, 64).record_stream(stream(1))
        assert list(avoided.sites.values()) == [3, 1]
        for _ in range(2):
            device.allocate(0, 64).record_stream(stream(1)), device.allocate(0, 64).record_stream(stream(1))
    assert avoided.calls == 8
    assert sorted(avoided.sites.values()) == [1, 3, 4], "two instructions of one line are one place"
    assert all("test_record_stream.py" in site for site in avoided.sites)
    assert avoided.sites.most_common(1)[0][0] in repr(avoided)


def test_sites_of_code_that_is_gone_are_not_taken_for_others(device, ledger):
    """A new code object could lie where an old one did."""
    codes = []
    with avoid_record_streams("count") as avoided:
        for number in range(2):
            names = {}
            exec(compile("def called(tensor, s): tensor.record_stream(s)", f"file{number}.py", "exec"), names)
            names["called"](device.allocate(0, 64), stream(1))
            codes.append(weakref.ref(names["called"].__code__))
            del names
    gc.collect()
    assert all(code() is not None for code in codes)
    assert avoided.sites == {f"file{number}.py:1 in called": 1 for number in range(2)}
    device.finish()


@pytest.mark.parametrize("argument", [{"mode": "ignore"}, {"release": "never"}])
def test_unknown_arguments_fail_before_anything_is_replaced(argument):
    with pytest.raises(ValueError, match=r"expected one of"):
        avoid_record_streams(**argument)
    untouched()


# --- the context ---------------------------------------------------------------------------------------------------


def test_nested_the_innermost_counts(device, ledger):
    with avoid_record_streams("count") as outer:
        with avoid_record_streams() as inner:
            used_on(device, 1)
        assert (outer.calls, inner.calls) == (0, 1)
        used_on(device, 1)
        assert (outer.calls, inner.calls) == (1, 1)
    device.finish()


def test_a_decorator_is_fresh_at_each_call(device, ledger):
    @avoid_record_streams("count")
    def function():
        assert record_stream.policy().calls == 0
        used_on(device, 1)
        return record_stream.policy()

    first, second = function(), function()
    assert first is not second
    assert (first.calls, second.calls) == (1, 1)
    device.finish()


def test_an_exception_leaves_torch_as_it_was(device, ledger):
    def fails():
        with avoid_record_streams():
            used_on(device, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    untouched()
    device.finish()


def test_all_threads_or_this_one(device, ledger):
    def elsewhere():
        tensor = device.allocate(0, 64)
        tensor.record_stream(stream(1))

    for this_thread, expected in ((False, 1), (True, 0)):
        with avoid_record_streams("count", this_thread=this_thread) as avoided:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert avoided.calls == expected
    device.finish()


def test_somebody_elses_wrapper_over_ours_survives(device, ledger):
    def theirs(event, stream=None):
        return ours(event, stream)

    with avoid_record_streams():
        ours = torch.cuda.Event.wait
        torch.cuda.Event.wait = theirs
    try:
        assert torch.cuda.Event.wait is theirs
        assert torch.cuda.Event.record is EVENT[0]
    finally:
        torch.cuda.Event.wait = EVENT[1]


def test_it_warns_of_nothing_and_leaves_no_filter():
    import warnings

    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with avoid_record_streams():
            pass
    assert warnings.filters == before


@pytest.mark.parametrize("kept_by_an_arena", [False, True])
def test_what_is_still_held_is_handed_over_s1(device, ledger, monkeypatch, kept_by_an_arena):
    """But for memory of an arena, for which the allocator would do nothing."""
    handed = []
    real = record_stream._torch.Override

    def with_an_original(operator, key, function, **how):
        override = real(operator, key, function, **how)
        if override.original is None:
            override.original = lambda *_: None
        return override

    class Over:
        def __init__(self, storage):
            self.storage = storage

        def record_stream(self, of):
            handed.append((self.storage.data_ptr(), of))

    monkeypatch.setattr(record_stream._torch, "Override", with_an_original)
    monkeypatch.setattr(record_stream, "_tensor_of", Over)
    monkeypatch.setattr(record_stream, "stream_object", lambda index, raw: (index, raw))
    with avoid_record_streams():
        tensor = used_on(device, 1)
        pointer = tensor.data_ptr()
        if kept_by_an_arena:
            storage = tensor.untyped_storage()
            template = torch.empty(0, dtype=torch.uint8).set_(storage)
            monkeypatch.setitem(record_stream._torch.KEPT, storage._cdata, [None] * refcounts.KEEPING)
    if kept_by_an_arena:
        assert handed == []
        assert states(ledger) == ["recorded"]
        del tensor
        ledger.sweep()
        assert states(ledger) == ["handed off"], "each call goes on looking"
        device.finish()
        ledger.sweep()
        del storage, template
    else:
        assert handed == [(pointer, (INDEX, 1))]
    assert ledger.pending() == []
    device.finish()


# --- captures ------------------------------------------------------------------------------------------------------


class Graph(FakeGraph):
    def __init__(self, device):
        super().__init__(device)
        self.events = []

    def capture_end(self):
        self.events.append("ended")
        self.device.end_capture()
        self.ended = True

    def reset(self):
        self.events.append("reset")
        super().reset()


@pytest.fixture
def capturing(device, ledger, monkeypatch):
    """Begin a capture on stream 1, recorded, and return the graph and what is known of it."""
    monkeypatch.setattr(captures, "LEDGER", ledger)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: INDEX)

    def begin():
        device.begin_capture(1)
        capture = device.capturing
        graph = Graph(device)
        captured = captures.CapturedGraph(ledger, graph, (capture,), [], INDEX, 1, capture, sys._getframe())
        captured.begin(graph)
        return graph, captured

    yield begin
    assert captures.RECORDING == {}
    assert not ROUTES._wanted_off


def test_a_capture_ends_well_after_the_context_is_left(device, ledger, capturing):
    with avoid_record_streams():
        graph, captured = capturing()
    outside = device.allocate(0, 64)
    captured.add("all_reduce", object.__new__(Anything), outside, sys._getframe())
    graph.capture_end()
    assert graph.events == ["ended"]
    assert captured.nbytes == 64
    assert "capture_end" not in vars(graph)
    graph.replay()
    graph.reset()
    assert graph.events == ["ended", "reset"]
    is_over(device, ledger)


class Anything:
    """What stands for a group."""


def leased(device, capturing):
    """Return a graph in whose capture a collective used memory of outside, what is known of it, and that memory."""
    graph, captured = capturing()
    outside = device.allocate(0, 64)
    graph.touch(device.blocks_of([outside]))
    captured.add("all_reduce", object.__new__(Anything), outside, sys._getframe())
    return graph, captured, outside


def test_a_graph_that_dies_in_its_capture_leaves_nothing(device, ledger, capturing):
    graph, captured = capturing()
    captured.add("all_reduce", object.__new__(Anything), device.allocate(0, 64), sys._getframe())
    del graph, captured
    device.end_capture()
    device.switch(0)
    ledger.sweep()
    device.finish()
    ledger.sweep()
    assert not device.live()


def test_works_left_unjoined_raise_whatever_else_is_being_handled(device, ledger, capturing):
    group = FakeGroup(device, "nccl")
    try:
        raise MemoryError
    except MemoryError:
        graph, _ = capturing()
        call(ledger, group, [device.allocate(1, 64)])
        with pytest.raises(safecomm.CaptureBoundaryError, match="were not waited for"):
            graph.capture_end()
    assert graph.events == ["ended", "reset"]
    assert ledger.pending() == []


@pytest.mark.parametrize("replayed", ["through the object", "past it", "interrupted", "never"])
def test_a_lease_outlives_the_last_replay_s6(device, ledger, capturing, replayed):
    """Also one that an exception of a signal handler ends."""

    class Interrupted(Graph):
        def replay(self):
            super().replay()
            raise KeyboardInterrupt

    graph, _, outside = leased(device, capturing)
    graph.capture_end()
    device.switch(2)
    if replayed == "through the object":
        graph.replay()
    elif replayed == "past it":
        FakeGraph.replay(graph)
    elif replayed == "interrupted":
        graph.__class__ = Interrupted
        with pytest.raises(KeyboardInterrupt):
            graph.replay()
        device.switch(0)
    del outside
    graph.reset()
    device.settle()
    assert bool(ledger.pending()) == (replayed != "never")
    nothing_is_left(device, ledger)


@pytest.mark.parametrize("works", ["joined", "left"])
def test_a_graph_whose_capture_has_ended_keeps_its_memory_although_a_signal_handler_has_raised_s6(
    device, ledger, capturing, monkeypatch, works
):
    """The signal comes while torch's ``capture_end()`` is in C, and its handler runs in torch's own Python."""

    def interrupted(graph):
        own(graph)
        raise KeyboardInterrupt

    own = Graph.capture_end
    monkeypatch.setattr(Graph, "capture_end", interrupted)
    graph, _, outside = leased(device, capturing)
    if works == "left":
        call(ledger, FakeGroup(device, "nccl"), [device.allocate(1, 64)])
    with pytest.raises(KeyboardInterrupt):
        graph.capture_end()
    device.switch(0)
    del outside
    device.finish()
    ledger.sweep()
    graph.replay()
    graph.reset()
    nothing_is_left(device, ledger)


def test_a_live_graph_of_a_group_is_refused_or_reset_s7(device, ledger, capturing, caplog):
    group = Anything()
    for reset in (False, True):
        graph, captured = capturing()
        captured.add("all_reduce", group, device.allocate(0, 64), sys._getframe())
        graph.capture_end()
        device.switch(0)
        captures.refuse_live(Anything())
        captures.set_tolerant(reset)
        try:
            if reset:
                captures.refuse_live(group)
                assert "test_record_stream.py" in caplog.text
            else:
                with pytest.raises(safecomm.LiveGraphError, match=r"test_record_stream\.py") as error:
                    captures.refuse_live(group)
                (one,) = error.value.graphs
                one.reset()
        finally:
            captures.set_tolerant(False)
        assert graph.events == ["ended", "reset"]
        captures.refuse_live(None)
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


@pytest.fixture
def cuda_graph(device, ledger, monkeypatch):
    """Let torch's CUDAGraph be a graph of the simulated device, which is captured on stream 1; return its class."""

    class CUDAGraph(Graph):
        def capture_begin(self, pool=None, capture_error_mode="global"):
            self.pool = pool
            self.device.begin_capture(1)

    with monkeypatch.context() as until_then:
        until_then.setattr(captures, "LEDGER", ledger)
        until_then.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        until_then.setattr(torch.cuda, "current_device", lambda: INDEX)
        until_then.setattr(torch.cuda, "graph_pool_handle", lambda: (7, 0))
        until_then.setattr(captures._torch, "end_allocation_to_pool", lambda *_: None)
        yield CUDAGraph


def test_captures_are_seen_from_patch_on_s6_s7(device, ledger, cuda_graph, caplog):
    own = cuda_graph.capture_begin
    with safecomm.patched():
        for pool in (None, (9, 0), types.SimpleNamespace(id=(9, 0))):  # a MemPool, from torch 2.14 on
            group, graph, outside = Anything(), cuda_graph(device), device.allocate(0, 64)
            graph.touch(device.blocks_of([outside]))
            graph.capture_begin(pool, capture_error_mode="thread_local")
            (captured,) = captures.RECORDING.values()
            captured.add("all_reduce", group, outside, sys._getframe())
            graph.capture_end()
            del outside
            device.switch(0)
            graph.replay()  # which checks that the memory is still the graph's
            captures.refuse_live(group)
            assert graph.events == ["ended", "reset"]
            assert graph.pool == ((7, 0) if pool is None else (9, 0))
    assert "test_record_stream.py" in caplog.text
    assert cuda_graph.capture_begin is own
    graph.capture_begin()
    assert captures.RECORDING == {}
    device.end_capture()
    device.switch(0)
    nothing_is_left(device, ledger)


def test_a_patched_program_waits_for_what_it_leaves_in_a_capture_s5(device, ledger, cuda_graph, caplog):
    group, graph = FakeGroup(device, "nccl"), cuda_graph(device)
    with safecomm.patched():
        graph.capture_begin()
        call(ledger, group, [device.allocate(1, 64)])
        launched = device.streams[group.stream.handle].captured
        graph.capture_end()
        assert "were not waited for, and waits for: all_reduce" in caplog.text
        assert graph.events == ["ended"]
        assert not launched & ~device.streams[1].captured
        graph.replay()
        graph.reset()
    device.switch(0)
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_what_cuda_finds_unjoined_is_a_clear_error_s5(device, ledger, cuda_graph, monkeypatch):
    def give_up(graph):
        graph.device.end_capture()
        raise RuntimeError("CUDA error: capturing stream has unjoined work\nCompile with ...")

    monkeypatch.setattr(cuda_graph, "capture_end", give_up)
    with safecomm.patched():
        graph = cuda_graph(device)
        graph.capture_begin()
        with pytest.raises(safecomm.CaptureBoundaryError, match=r"capture at .*test_record_stream\.py") as caught:
            graph.capture_end()
        assert "unjoined" in str(caught.value.__cause__)
    assert captures.RECORDING == {}


@pytest.mark.skipif(not hasattr(torch.cuda.graphs, "register_graph_capture_start_hook"), reason="torch 2.14")
def test_where_graphs_were_captured_is_known_without_a_patch_s7(monkeypatch):
    assert captures._note_place in torch.cuda.graphs._global_capture_start_hooks.values()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Anything)
    graph, other = Anything(), Anything()
    captures._note_place(graph)
    assert captures.alive() == [graph, other]
    (seen, unseen) = sorted(captures.places_of([graph, other]), key=lambda where: "test_record" not in where)
    assert "test_record_stream.py" in seen
    assert "were not seen" in unseen


def test_dead_graphs_are_taken_over_after_a_capture_and_not_in_it_s6(device, ledger, capturing):
    graph, captured, outside = leased(device, capturing)
    graph.capture_end()
    device.switch(1)
    graph.replay()
    del outside, captured
    device.begin_capture(1)
    del graph
    ledger.sweep()
    device.settle()
    device.end_capture()
    ledger.sweep()
    device.settle()
    nothing_is_left(device, ledger)


def test_draining_does_not_wait_for_another_threads_capture(device, ledger):
    device.begin_capture(1)
    group = FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(1, 64)])
    device.switch(0)
    assert drain_ledger(ledger, wait=True) == 0
    assert len(ledger.pending()) == 1
    device.switch(1)
    launched.work.wait()
    device.end_capture()


# --- graph() ---------------------------------------------------------------------------------------------------------


def test_graph_takes_what_torch_takes():
    theirs = inspect.signature(torch.cuda.graph.__init__).parameters
    ours = inspect.signature(safecomm.graph.__init__).parameters
    assert list(ours)[:5] == list(theirs)[:5]
    assert all(ours[name].default == theirs[name].default for name in list(theirs)[1:5])
    assert ours["newer"].kind is inspect.Parameter.VAR_KEYWORD


def test_settling_before_a_capture_with_nothing_to_settle():
    safecomm.settle_before_capture()
    assert safecomm.pending() == []
