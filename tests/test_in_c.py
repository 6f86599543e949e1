"""Holding, waiting and asking whether to sweep in C: the ordinary cases as in Python, and all others in Python."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import compiled
import pytest
import torch
from simulated import INDEX, FakeGroup, SimulatedDevice, call, call_sync, routes_of

from safecomm._torch import modes
from safecomm.collectives import in_c
from safecomm.core.ledger import CROWD, Ledger, WorkQueue
from safecomm.core.streams import HOST
from safecomm.core.work import RegionWork, StagedWork, Work

pytestmark = pytest.mark.skipif(bool(compiled.why_not()), reason=compiled.why_not())
HERE = Path(__file__).parent


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def ledger(device: SimulatedDevice) -> Ledger:
    return Ledger(device)


@pytest.fixture
def group(device: SimulatedDevice, ledger: Ledger) -> FakeGroup:
    """A group whose waits order streams, as those of NCCL do."""
    found = FakeGroup(device, "nccl")
    routes_of(ledger).of(found, INDEX).wait_is_stream_order = True
    return found


@pytest.fixture
def put_in_place():
    """Return what lets C, or with None Python, do it until the test is over."""
    before = in_c.MODULE
    yield in_c.put_in_place
    in_c.put_in_place(before)


@pytest.fixture
def native(put_in_place):
    put_in_place(compiled.compiled())
    assert in_c.MODULE is compiled.compiled()


def test_the_tests_of_the_core_pass_with_c_in_place():
    """Among them the random programs, which find what is unsafe; without the mutants of the ledger's Python."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "c_form", "-p", "no:cacheprovider", "-n0",
            "-k", "not machine_catches and not [2]", *[f"test_{name}.py" for name in ("holds", "rules", "ledger")],
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}, cwd=HERE,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_c_holds_what_python_holds_s1(device, group, ledger, put_in_place):
    told = []
    for module in (None, compiled.compiled()):
        put_in_place(module)
        ledger.observer = mock.Mock()
        tensors = [device.allocate(0, 64), device.allocate(0, 128)]
        work = call(ledger, group, tensors).work
        assert [storage.data_ptr() for storage in work.storages] == [t.untyped_storage().data_ptr() for t in tensors]
        assert work in work.queue.holds
        assert work.queue in ledger.nonempty
        ledger.observer.held.assert_called_once_with(work)
        told.append((work.op[:10], work.alloc_stream, work.code, work.instruction, work.nbytes, type(work.since)))
        ledger.observer = None
        work.wait()
    assert told[0] == told[1]
    assert type(WorkQueue.hold).__name__ == type(Ledger.can_skip_sweep).__name__ == "method_descriptor"


def test_what_is_held_otherwise_python_holds_s5(device, group, ledger, put_in_place):
    seen = mock.Mock(side_effect=in_c.HOLD)
    with mock.patch.object(in_c, "HOLD", seen):
        put_in_place(compiled.compiled())
        call(ledger, group, [device.allocate(0, 64)])
        assert not seen.called
        device.switch(1)  # it may be captured
        call(ledger, group, [device.allocate(1, 64)])
        assert seen.call_count == 1
        device.switch(0)
        call(ledger, FakeGroup(device, "gloo"), [device.allocate(None, 64)], index=HOST)
        assert seen.call_count == 2
        with pytest.raises(TypeError):
            WorkQueue.hold(object(), 1, 2)
        with pytest.raises(TypeError):
            WorkQueue.hold()


# --- waiting ----------------------------------------------------------------------------------------------------------


def held(device, group, ledger, stream=0) -> Any:
    return call(ledger, group, [device.allocate(stream, 64)]).work


def test_an_ordinary_wait_orders_and_releases_in_c_s2(device, group, ledger, native):
    work = held(device, group, ledger)
    with mock.patch.object(Ledger, "release", side_effect=AssertionError):
        assert work.wait() is True
    assert (work.storages, list(work.queue.holds), ledger.nonempty) == ((), [], {})
    device.settle()  # raises if the stream was not ordered
    with mock.patch.object(work.inner, "wait", return_value=True) as asked:
        work.wait()  # it may have failed since
    assert asked.called


def test_what_is_left_of_a_queue_stays_s3(device, group, ledger, native):
    first, second = held(device, group, ledger), held(device, group, ledger)
    first.wait()
    assert list(second.queue.holds) == [second]
    assert ledger.nonempty == {second.queue: None}
    device.settle()


def test_a_wait_for_a_later_work_releases_the_earlier_ones_s2(device, group, ledger, native):
    first, second = held(device, group, ledger), held(device, group, ledger)
    second.wait()
    assert (first.storages, second.storages, ledger.nonempty) == ((), (), {})
    device.settle()


def test_memory_of_another_stream_is_handed_off_s1(device, group, ledger, native):
    work = held(device, group, ledger, stream=2)
    work.wait()
    assert [entry.state for entry in ledger.pending()] == ["handed off"]
    device.settle()


@pytest.mark.parametrize("what", ["an observer", "a quarantine"])
def test_who_is_to_know_of_a_release_is_told_s4(device, group, ledger, native, what):
    work = held(device, group, ledger)
    if what == "an observer":
        ledger.observer = mock.Mock()
    else:
        failed = call(ledger, group, [device.allocate(0, 64)], fate="fails").work
        ledger.fail(failed, RuntimeError())
    with mock.patch.object(Ledger, "release", autospec=True, side_effect=Ledger.release) as release:
        work.wait()
    release.assert_called_once_with(ledger, work)
    assert work.storages == ()
    if what == "an observer":
        ledger.observer.released.assert_called_once_with(work)


def test_a_wait_that_fails_raises_and_keeps_the_memory_s4(device, group, ledger, native):
    work = held(device, group, ledger)
    failing = mock.patch.object(work.inner, "block_current_stream", side_effect=RuntimeError("it failed"))
    with failing, pytest.raises(RuntimeError, match="it failed"):
        work.wait()
    stopped = mock.patch.object(ledger, "fail", side_effect=AssertionError)
    other = held(device, group, ledger)
    other.inner.block_current_stream = mock.Mock(side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt):
        other.wait()
    other.inner.block_current_stream = mock.Mock(side_effect=RuntimeError("the first"))
    with stopped, pytest.raises(AssertionError):
        other.wait()
    assert list(ledger.quarantine) == [work]
    assert len(work.storages) == 1


def test_a_release_of_another_thread_meanwhile_is_no_error_s1(device, group, ledger, native):
    work = held(device, group, ledger)
    order = work.inner.block_current_stream

    def and_release() -> None:
        order()
        ledger.release(work)

    with mock.patch.object(work.inner, "block_current_stream", and_release):
        assert work.wait() is True
    assert ledger.nonempty == {}


def test_what_is_not_ordinary_is_waited_for_in_python(device, group, ledger, put_in_place, monkeypatch):
    seen = mock.Mock(return_value="Python")
    seen.__doc__ = ""
    monkeypatch.setattr(in_c, "WAIT", seen)
    work = held(device, group, ledger)
    put_in_place(compiled.compiled())
    with mock.patch.object(work.inner, "block_current_stream", side_effect=AssertionError):
        device.switch(1)
        assert work.wait() == "Python"  # it may be captured
        device.switch(0)
        work.needs_full_wait = "it may be staged, or have aliases"
        assert work.wait() == "Python"
        del work.needs_full_wait
        with mock.patch.object(torch.autograd.profiler, "_is_profiler_enabled", True):
            assert work.wait() == "Python"
        work.queue.wait_is_stream_order = False
        assert work.wait() == "Python"
        work.queue.wait_is_stream_order = True
        for other in (StagedWork(), Work(), object(), None):
            assert Work.wait(other) == "Python"
        hour = timedelta(hours=1)
        assert work.wait(hour) == work.wait(timeout=hour) == "Python"
        assert seen.call_args_list[-2:] == [mock.call(work, hour), mock.call(work, timeout=hour)]
        ledger.release(work)
        assert work.wait() == "Python"  # it was waited for, or has failed
    with pytest.raises(TypeError):
        Work.wait()


def test_where_torch_does_not_tell_of_profilers_python_waits(device, group, ledger, put_in_place, monkeypatch):
    monkeypatch.setattr(in_c, "WAIT", mock.Mock(return_value="Python"))
    monkeypatch.setattr(in_c._torch, "profiler", modes._Unknown)
    put_in_place(compiled.compiled())
    assert held(device, group, ledger).wait() == "Python"


def test_a_wait_says_the_same_of_itself_in_c(native):
    assert inspect.getdoc(Work.wait) == inspect.getdoc(in_c.WAIT)
    assert str(inspect.signature(Work.wait)) == "(self, /, timeout=None)"


def test_a_work_with_aliases_is_released_in_python_which_empties_them_s2(device, group, ledger, native):
    work, alias = RegionWork(), torch.ones(4)
    work.aliases = (alias,)
    first = held(device, group, ledger)
    first.wait()
    first.queue.hold(work, "a region", first.inner, (torch.ones(1),), 0, sys._getframe())
    work.wait()
    assert (alias.numel(), work.storages) == (0, ())


# --- whether a sweep is needed ----------------------------------------------------------------------------------------


def test_a_dropped_handle_is_noticed_and_one_that_is_kept_is_not_swept_s3(device, group, ledger, native):
    kept = [held(device, group, ledger) for _ in range(3)]
    assert ledger.can_skip_sweep() is True
    held(device, group, ledger)
    assert ledger.can_skip_sweep() is False
    device.finish()
    ledger.sweep()
    kept.append(held(device, group, ledger))
    assert ledger.can_skip_sweep() is True
    del kept[-1]
    assert ledger.can_skip_sweep() is False


def test_what_else_wants_a_sweep_s3_s4(device, group, ledger, native):
    work = held(device, group, ledger)
    ledger.quarantine[work] = None
    assert ledger.can_skip_sweep() is False
    ledger.quarantine.clear()
    for table in (ledger.handoffs.leftovers, ledger.handoffs.unfinished):
        table[1] = None
        assert ledger.can_skip_sweep() is False
        table.clear()
    assert ledger.can_skip_sweep() is True
    work.since -= 1
    assert ledger.can_skip_sweep() is False  # nobody has waited for so long
    work.since += 1
    many = [held(device, group, ledger) for _ in range(CROWD - 1)]
    assert ledger.can_skip_sweep() is True
    many.append(held(device, group, ledger))
    assert ledger.can_skip_sweep() is False
    many.pop().wait()
    device.switch(1)
    call_sync(ledger, group, [device.allocate(0, 64)])
    assert ledger.can_skip_sweep() is False  # tests look at events at each call


# --- where C can't be used --------------------------------------------------------------------------------------------


def test_where_a_slot_is_not_found_python_does_all_of_it(put_in_place, monkeypatch, caplog):
    marks = in_c._marks()
    monkeypatch.setattr(in_c, "_marks", lambda: [*marks[:-1], (marks[-1][0], object())])
    put_in_place(compiled.compiled())
    assert (WorkQueue.hold, Ledger.can_skip_sweep) == (in_c.HOLD, in_c.CAN_SKIP_SWEEP)
    assert (Work.wait, in_c.MODULE) == (in_c.WAIT, None)
    monkeypatch.setattr(in_c, "_marks", lambda: marks[:-1])
    put_in_place(compiled.compiled())
    assert in_c.MODULE is None
    assert caplog.text.count("so Python holds") == 2
