"""drain(wait=True) and the end of the process: what they wait for, and how they give up (S3, S4, S7)."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from simulated import INDEX, FakeGroup, SimulatedDevice, call, routes_of

from safecomm.core import drain
from safecomm.core.drain import drain_ledger
from safecomm.core.holds import Hold
from safecomm.core.ledger import Ledger
from safecomm.core.streams import HOST
from safecomm.errors import CaptureBoundaryError, PendingWorkError

pytestmark = pytest.mark.usefixtures("quiet")

AT_ONCE, LONG = timedelta(0), timedelta(minutes=5)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def ledger(device: SimulatedDevice) -> Ledger:
    return Ledger(device, patience=0)


def failed(device: SimulatedDevice, ledger: Ledger, group: FakeGroup, **how: Any) -> Any:
    """Launch a collective that fails, drop its handle, and return its block of memory."""
    tensor = device.allocate(0, 64)
    (block,) = device.blocks_of([tensor])
    with contextlib.suppress(RuntimeError):
        call(ledger, group, [tensor], fate="fails", **how).work.wait()
    assert "quarantined" in {entry.state for entry in ledger.pending()}
    return block


def running_on(device: SimulatedDevice) -> Any:
    """Return the context in which the device runs on whenever the host pauses."""
    return mock.patch("safecomm.core.drain.time.sleep", side_effect=lambda _: device.run())


@pytest.fixture
def busy(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the device become idle only when what this returns is set."""
    idle = threading.Event()
    idle.threads = threads = []
    synchronize = device.synchronize

    def blocks(index: int) -> None:
        threads.append(threading.current_thread())
        assert idle.wait(60)
        synchronize(index)

    monkeypatch.setattr(device, "synchronize", blocks)
    yield idle
    idle.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


# --- the quarantine ---------------------------------------------------------------------------------------------------


def test_a_device_that_does_not_become_idle_in_time_keeps_what_failed_s4_s7(device, ledger, busy) -> None:
    """A kernel whose peer is gone runs for ever: drain() ends nevertheless, and frees nothing, then or later."""
    block = failed(device, ledger, FakeGroup(device, "nccl"))
    with pytest.raises(PendingWorkError, match="1 works are not over in time: all_reduce"):
        drain_ledger(ledger, wait=True, timeout=AT_ONCE)
    assert [entry.state for entry in ledger.pending()] == ["quarantined"]
    with pytest.raises(PendingWorkError):
        drain_ledger(ledger, wait=True, timeout=AT_ONCE)
    assert len(busy.threads) == 1, "one for each hold"
    busy.set()
    device.settle()
    assert not device.is_free(block), "the thread that has waited released it"
    assert drain_ledger(ledger, wait=True, timeout=LONG) == 0
    assert ledger.pending() == []
    assert device.is_free(block)


def test_a_device_that_is_idle_in_time_gives_back_what_failed_s3_s4(device, ledger) -> None:
    block = failed(device, ledger, FakeGroup(device, "nccl"))
    seen = []
    synchronize = device.synchronize

    def notes(index: int) -> None:
        assert not device.is_free(block)
        seen.append(index)
        synchronize(index)

    with mock.patch.object(device, "synchronize", notes):
        assert drain_ledger(ledger, wait=True, timeout=LONG) == 0
    assert seen == [INDEX]
    device.settle()
    assert device.is_free(block)


def test_what_only_the_program_keeps_does_not_fail_as_its_group_ends_s4(device, ledger) -> None:
    """As a kept result of a functional collective, with which the device is done."""
    kept = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)]).work
    device.finish()
    with mock.patch.object(type(kept), "in_use", return_value=True):
        ledger.fail(kept, RuntimeError("its group was destroyed"))
    assert ledger.pending() == []
    assert drain_ledger(ledger) == 0


def test_memory_of_failed_works_waits_for_the_end_of_a_capture_of_another_thread_s4_s5(device, ledger) -> None:
    block = failed(device, ledger, FakeGroup(device, "nccl"))
    device.begin_capture(1)
    ledger.recording[device.capturing] = SimpleNamespace(goes_on=lambda: bool(device.capturing))
    device.switch(0)
    with pytest.raises(CaptureBoundaryError, match="another thread captures"):
        drain_ledger(ledger, wait=True)
    assert [entry.state for entry in ledger.pending()] == ["quarantined"]
    device.end_capture()
    assert drain_ledger(ledger, wait=True) == 0
    device.settle()
    assert device.is_free(block)


@pytest.mark.parametrize("timeout", [None, LONG])
def test_what_failed_in_another_group_stays_s4_s7(device, ledger, timeout) -> None:
    one, two = FakeGroup(device, "nccl"), FakeGroup(device, "nccl")
    first, second = failed(device, ledger, one), failed(device, ledger, two)
    assert drain_ledger(ledger, wait=True, timeout=timeout, group=two) == 0
    device.settle()
    assert device.is_free(second)
    assert not device.is_free(first)
    assert drain_ledger(ledger, group=one) == 64
    assert drain_ledger(ledger, wait=True, group=one) == 0
    device.settle()
    assert device.is_free(first)


def test_on_the_host_what_has_timed_out_is_kept_until_its_threads_have_ended_s4_s7(device, ledger) -> None:
    group, tensor = FakeGroup(device, "gloo"), device.allocate(None, 64)
    with pytest.raises(RuntimeError, match="timed out"):
        call(ledger, group, [tensor], fate="late", index=HOST).work.wait()
    with pytest.raises(PendingWorkError):
        drain_ledger(ledger, wait=True, timeout=AT_ONCE)
    assert [entry.state for entry in ledger.pending()] == ["quarantined"]
    with running_on(device):
        assert drain_ledger(ledger, wait=True, timeout=LONG) == 0


# --- works that do not tell when they are over ------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [timedelta(seconds=-5), timedelta(days=999_999), 1e10, 0.0])
def test_a_receive_is_waited_for_with_every_time_that_torch_takes_s8(device, ledger, timeout) -> None:
    launched = call(ledger, FakeGroup(device, "gloo"), [device.allocate(None, 64)], p2p=True, index=HOST)
    with mock.patch.object(launched.inner, "wait", return_value=True):
        assert launched.work.wait(timeout) is True
    assert ledger.pending() == []


def test_a_receive_that_nobody_sends_to_is_given_up_in_time_and_not_harmed_s7(device, ledger) -> None:
    """A wait with a timeout would close gloo's connection, so that a later wait could not succeed."""
    group, tensor = FakeGroup(device, "gloo"), device.allocate(None, 64)
    launched = call(ledger, group, [tensor], p2p=True, index=HOST)
    sent, given, threads = threading.Event(), [], []
    wait = launched.inner.wait

    def blocks(*timeout: Any) -> bool:
        given.append(timeout)
        threads.append(threading.current_thread())
        assert sent.wait(60)
        return bool(wait())

    with mock.patch.object(launched.inner, "wait", blocks):
        before = threading.active_count()
        for _ in range(1000):
            with pytest.raises(PendingWorkError, match=launched.op):
                drain_ledger(ledger, wait=True, timeout=AT_ONCE)
        assert threading.active_count() == before + 1, "one for each work that is pending"
        assert [entry.op for entry in ledger.pending()] == [launched.op]
        with pytest.raises(TimeoutError, match=r"is not over after 0:00:00.000001"):  # the first thread still waits
            launched.work.wait(timedelta(microseconds=1))
        assert [entry.state for entry in ledger.pending()] == ["in flight"], "a wait that is too late is no failure"
        sent.set()
        threads[0].join(60)
        assert threading.active_count() == before
        assert [entry.op for entry in ledger.pending()] == [launched.op], "what is released is released by a caller"
        assert launched.work.wait() is True
        assert launched.work.wait(LONG) is True
    assert given == [()], "it was waited for twice, or with a timeout"
    assert ledger.pending() == []


@pytest.mark.parametrize("handler", ["raises", "raises TimeoutError", "drains"])
def test_a_signal_handler_that_runs_as_a_wait_returns_s3_s4(device, ledger, monkeypatch, handler) -> None:
    launched = call(ledger, FakeGroup(device, "gloo"), [device.allocate(None, 64)], p2p=True, index=HOST)
    wait = launched.inner.wait

    def interrupted() -> bool:
        wait()
        if handler == "drains":
            assert drain_ledger(ledger, wait=True, timeout=LONG) == 0
        raise TimeoutError if "Timeout" in handler else RuntimeError

    with mock.patch.object(launched.inner, "wait", interrupted), pytest.raises((TimeoutError, RuntimeError)):
        launched.work.wait()
    assert ledger.failures == 0
    assert [entry.state for entry in ledger.pending()] == ([] if handler == "drains" else ["in flight"])
    assert launched.work.wait() is True
    assert device.faults == []
    assert ledger.pending() == []


def test_works_that_do_not_tell_are_left_alone_where_they_may_never_end_s7(device, ledger) -> None:
    """At the end of a group: others are waited for."""
    group = FakeGroup(device, "gloo")
    blind = call(ledger, group, [device.allocate(None, 64)], p2p=True, index=HOST)
    other = call(ledger, group, [device.allocate(None, 64)], index=HOST)
    with mock.patch.object(blind.inner, "wait") as wait, running_on(device):
        drain.await_works(ledger, None, group, unpollable=False)
    assert not wait.called
    assert [(entry.op, entry.state) for entry in ledger.pending()] == [(blind.op, "in flight")]
    del other


def test_a_send_that_another_thread_launches_meanwhile_and_drops_is_waited_for_too_s3_s7(device, ledger) -> None:
    """Nobody but a wait tells that it is over, so a drain that only looks at it would never end."""
    group = FakeGroup(device, "gloo")
    call(ledger, group, [device.allocate(None, 64)], index=HOST)

    def sleep(_: float) -> None:
        assert sleeping.call_count < 10, "it looks for ever"
        if sleeping.call_count == 1:
            call(ledger, group, [device.allocate(None, 64)], index=HOST, p2p=True)
        device.run()

    with mock.patch("safecomm.core.drain.time.sleep", side_effect=sleep) as sleeping:
        assert drain_ledger(ledger, wait=True) == 0
    device.settle()


def test_what_only_waits_for_others_from_now_on_is_not_waited_for_s7(device, ledger) -> None:
    """Another thread waits for a functional result meanwhile, and keeps it: there is nothing that could be over."""
    launched = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    seen: list[bool] = []

    def sleep(_: float) -> None:
        assert not seen, "drain() would never return"
        seen.append(True)
        launched.work.in_use = lambda: True

    with mock.patch("safecomm.core.drain.time.sleep", sleep):
        assert drain_ledger(ledger, wait=True) == 0
    assert seen
    assert ledger.holds() == [launched.work]
    device.finish()


def test_a_recorded_use_that_another_thread_releases_as_drain_looks_is_nothing_to_report_s3(device, ledger) -> None:
    """It was listed, and is gone before drain() asks whether others still use its memory."""
    tensor = device.allocate(1, 64)
    assert ledger.uses.record(tensor.untyped_storage(), INDEX, 2, sys._getframe())
    listed = ledger.holds

    def released_since(group: Any = None) -> list[Hold]:
        found = listed(group)
        assert [hold.state for hold in found] == ["recorded"]
        ledger.release_all(found)
        return found

    with mock.patch.object(ledger, "holds", released_since):
        assert drain_ledger(ledger) == 0
    assert ledger.pending() == []
    assert not ledger.uses.by_storage


@pytest.mark.parametrize("count", [8, 9])
def test_of_many_that_are_late_a_few_are_named_s7(device, ledger, count) -> None:
    group = FakeGroup(device, "nccl")
    launched = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(count)]
    with pytest.raises(PendingWorkError, match=f"^{count} works are not over in time") as error:
        drain_ledger(ledger, wait=True, timeout=AT_ONCE)
    assert str(error.value).count("all_reduce") == 8
    assert ("; ..." in str(error.value)) == (count > 8)
    del launched


# --- the end of the process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sweep", ["ends", "raises"])
def test_what_still_runs_at_the_end_of_the_process_is_never_freed_s1_s7(device, sweep) -> None:
    """Modules are torn down in some order, while a kernel or a thread of gloo may still use the memory."""
    ledger = Ledger(device, patience=0)
    blocks = [failed(device, ledger, FakeGroup(device, "nccl"))]
    tensor = device.allocate(0, 64)
    blocks += device.blocks_of([tensor])
    call(ledger, FakeGroup(device, "nccl"), [tensor])
    del tensor
    said: list[str] = []
    log = SimpleNamespace(debug=lambda text, *given: said.append(text % given))
    error = RuntimeError("no device") if sweep == "raises" else None
    with mock.patch.object(ledger, "sweep", side_effect=error), mock.patch.object(drain, "log", log):
        drain._at_exit(ledger)
    assert said == (["sweep at exit: RuntimeError('no device')"] if error else [])
    for table in (ledger.quarantine, ledger.nonempty, routes_of(ledger).all):  # as the interpreter does
        table.clear()
    del ledger, error
    gc.collect()
    device.settle()
    assert not any(device.is_free(block) for block in blocks)


def test_where_nothing_is_left_at_the_end_of_the_process_nothing_is_kept(device, ledger) -> None:
    launched = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    launched.work.wait()
    with mock.patch.object(drain.ctypes, "pythonapi") as pythonapi:
        drain._at_exit(ledger)
    assert not pythonapi.Py_IncRef.called


def test_what_is_over_at_the_end_of_the_process_is_released(device, ledger) -> None:
    tensor = device.allocate(0, 64)
    (block,) = device.blocks_of([tensor])
    launched = call(ledger, FakeGroup(device, "nccl"), [tensor])
    del tensor
    device.finish()
    with mock.patch.object(drain.ctypes, "pythonapi") as pythonapi:
        drain._at_exit(ledger)
    assert not pythonapi.Py_IncRef.called
    launched.inner.outputs.clear()
    device.settle()
    assert device.is_free(block)
