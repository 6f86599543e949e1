"""What a handle says and passes on, on the simulated device: ``test_work.py`` has the promises on real ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from simulated import FakeGroup, SimulatedDevice, call

from safecomm.core.ledger import Ledger
from safecomm.core.work import Work, member


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def ledger(device: SimulatedDevice) -> Ledger:
    return Ledger(device, patience=0)


def test_a_handle_says_what_is_held_and_asks_nobody(device, ledger) -> None:
    """A debugger shows it at any moment: in a capture, after a failure, and before the launch is over."""
    assert repr(Work()) == "<safecomm.Work that is being launched>"
    groups = [FakeGroup(device, "nccl") for _ in range(3)]
    launched = call(ledger, groups[0], [device.allocate(0, 64)])
    failed = call(ledger, groups[1], [device.allocate(0, 64)], fate="fails")
    with contextlib.suppress(RuntimeError):
        failed.work.wait()
    device.begin_capture(1)
    captured = call(ledger, groups[2], [device.allocate(1, 128)])
    before = device.calls.copy()
    with mock.patch.object(device, "current", side_effect=AssertionError("the device is asked")):
        assert repr(launched.work).startswith(f"<safecomm.Work {launched.op} from ")
        assert repr(launched.work).endswith(": 64 bytes held, in flight>")
        assert "test_handles.py" in repr(launched.work)
        assert repr(failed.work).endswith(": 64 bytes held, quarantined>")
        assert repr(captured.work).endswith(": 128 bytes held, in a CUDA graph capture>")
    assert device.calls == before
    captured.work.wait()
    assert repr(captured.work).endswith(": nothing is held>")


def test_completion_shows_torchs_names_and_what_is_held(device, ledger) -> None:
    work = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)]).work
    assert {"wait", "is_completed", "result", "inner", "nbytes", "op", "site"} <= {*dir(work)}
    assert not {"queue", "storages", "host_waited", "full"} & {*dir(work)}


FORWARDS: dict[str, Callable[[Any], Any]] = {
    "_get_sequence_number": lambda work: work._get_sequence_number(),
    "timeout": lambda work: work.timeout,
    "boxed": lambda work: work.boxed(),
    "_get_duration": lambda work: work._get_duration(),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_newer_torches_ask_of_a_work_is_the_backends(device, ledger, name) -> None:
    launched = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    answer = object()
    setattr(launched.inner, name, answer if name == "timeout" else lambda: answer)
    assert FORWARDS[name](launched.work) is answer


# --- one call in a coalescing region ----------------------------------------------------------------------------------


class Region:
    """The handle of a region, which notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            self.asked.append((name, *given))
            return name

        return ask


OF_MEMBERS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "wait": (lambda work: work.wait(), [("wait",)]),
    "wait with a timeout": (lambda work: work.wait(timedelta(1)), [("wait", timedelta(1))]),
    "synchronize": (lambda work: work.synchronize(), [("synchronize",)]),
    "block_current_stream": (lambda work: work.block_current_stream(), [("block_current_stream",)]),
    "is_completed": (lambda work: work.is_completed(), [("is_completed",)]),
    "get_future": (lambda work: work.get_future(), [("get_future",)]),
}


@pytest.mark.parametrize("how", OF_MEMBERS)
def test_waiting_for_one_call_of_a_region_is_waiting_for_the_region_s1(how) -> None:
    """S1: the event of such a call's own work is never recorded, so that nothing would be ordered after it."""
    own, region = Region(), Region()
    work: Any = member(own)  # type: ignore[arg-type]
    work._region = region
    ask, asked = OF_MEMBERS[how]
    answer = ask(work)
    assert region.asked == asked
    assert own.asked == []
    assert answer in (asked[0][0], None)


def test_before_the_region_has_ended_its_calls_have_their_own_works() -> None:
    own = Region()
    work: Any = member(own)  # type: ignore[arg-type]
    assert work.wait() == "wait"
    assert work._get_duration() == "_get_duration"
    assert own.asked == [("wait",), ("_get_duration",)]


def test_a_call_of_a_region_says_of_which(device, ledger) -> None:
    work: Any = member(Region())  # type: ignore[arg-type]
    assert repr(work) == "<safecomm.Work of a call in a coalescing region>"
    launched = call(ledger, FakeGroup(device, "nccl"), [device.allocate(0, 64)])
    work._region = launched.work
    assert repr(work) == f"<safecomm.Work of a call in {launched.work!r}>"
