"""What the core asks of a GPU, with torch.cuda replaced: each question goes to the device and stream that it is about.

``tests/gpu`` asks real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safecomm.core import streams
from safecomm.core.streams import CudaStreams, alloc_stream_of, capture_of, stream_object


class Event:
    """``torch.cuda.Event``."""

    def __init__(self) -> None:
        self.on: list[Any] = []
        self.complete = False

    def record(self, stream: Any) -> None:
        self.on.append(stream)

    def wait(self, stream: Any) -> None:
        stream.waited_for.append(self)

    def query(self) -> int:
        return int(self.complete)


class Stream:
    """``torch.cuda.ExternalStream``, or the default stream."""

    def __init__(self, handle: int, *, device: int) -> None:
        self.name = (device, handle)
        self.waited_for: list[Any] = []


class Cuda:
    """``torch.cuda``, and the questions of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: list[Any] = ["the program's"]
        self.synchronized: list[int] = []
        self.mode = 0  # of captures: global
        self.made = 0  # how many streams were
        cuda = SimpleNamespace(
            Event=Event, ExternalStream=Stream, default_stream=lambda index: Stream(0, device=index),
            Stream=self.new, stream=self.stream, synchronize=self.synchronized.append,
            get_device_properties=lambda index: SimpleNamespace(total_memory=float(1 << (30 + index))),
        )  # fmt: skip
        monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda, UntypedStorage=torch.UntypedStorage))
        monkeypatch.setattr(streams, "_EVENT", Event)
        monkeypatch.setattr(streams._torch, "swap_capture_mode", self.swap)

    def new(self, index: int) -> SimpleNamespace:
        """``torch.cuda.Stream``: another one, call after call."""
        self.made += 1
        return SimpleNamespace(cuda_stream=self.made)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream.name)
        try:
            yield
        finally:
            self.current.pop()

    def swap(self, mode: int = 2) -> int:
        before, self.mode = self.mode, mode
        return before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_raw_stream_is_the_stream_of_that_device_and_0_is_its_default_one_s1(cuda) -> None:
    assert stream_object(1, 77).name == (1, 77)
    assert stream_object(1, 0).name == (1, 0)
    known = CudaStreams()
    assert known._stream(1, 77).name == (1, 77)
    assert known._stream(0, 77).name == (0, 77)
    assert known._stream(0, 77) is known._stream(0, 77)
    assert known._stream(0, 77) is not known._stream(1, 77)
    assert known._stream(0, 0).name == (0, 0)


def test_an_event_is_recorded_on_the_stream_that_is_asked_for_and_another_one_waits_s1(cuda) -> None:
    device = CudaStreams()
    event = device.record_event(0, 77)
    assert [stream.name for stream in event.on] == [(0, 77)]
    assert device.query_event(event) is False
    event.complete = True
    assert device.query_event(event) is True
    device.wait_event(0, 88, event)
    assert device._stream(0, 88).waited_for == [event]
    assert device._stream(0, 77).waited_for == []


def test_an_event_is_used_again_once_it_is_given_back_and_on_no_other_device_s1(cuda) -> None:
    """An event belongs to the device on which it was first recorded."""
    device = CudaStreams()
    first, second = device.record_event(0, 77), device.record_event(0, 77)
    assert first is not second
    device.recycle_event(0, first)
    assert device.record_event(1, 77) is not first
    assert device.record_event(0, 88) is first
    assert [stream.name for stream in first.on] == [(0, 77), (0, 88)]
    assert device.record_event(0, 88) not in (first, second)


def test_each_device_has_one_stream_that_the_program_does_not_use(cuda) -> None:
    device = CudaStreams()
    spare = [device.spare(index) for index in (0, 1, 0, 1)]
    assert spare == [1, 2, 1, 2]


def test_another_stream_is_the_current_one_only_meanwhile(cuda) -> None:
    device = CudaStreams()
    with contextlib.suppress(KeyboardInterrupt), device.using(1, 77):
        assert cuda.current[-1] == (1, 77)
        raise KeyboardInterrupt
    assert cuda.current == ["the program's"]


def test_the_capture_mode_of_a_thread_is_put_back_whatever_happens_s5(cuda) -> None:
    device = CudaStreams()
    with contextlib.suppress(RuntimeError), device.relaxed_capture_mode():
        assert cuda.mode == 2
        with device.relaxed_capture_mode():
            assert cuda.mode == 2
        assert cuda.mode == 2
        raise RuntimeError("the device is lost")
    assert cuda.mode == 0


def test_the_device_that_is_asked_for_is_waited_for_and_measured(cuda) -> None:
    device = CudaStreams()
    device.synchronize(1)
    assert cuda.synchronized == [1]
    assert device.capacity(1) == 2 << 30
    assert type(device.capacity(0)) is int


def test_the_legacy_default_stream_is_not_asked_whether_it_is_captured_s5() -> None:
    """The question would break another thread's capture in the global mode."""
    asked: list[int] = []
    device: Any = SimpleNamespace(capture=lambda stream: asked.append(stream) or 7)
    assert capture_of(device, 0) == 0
    assert asked == []
    assert capture_of(device, 5) == 7


@pytest.mark.parametrize("storage", [torch.empty(0).untyped_storage(), object()])
def test_what_has_no_memory_is_of_no_stream(storage) -> None:
    device: Any = SimpleNamespace(alloc_stream=lambda pointer: 5)
    assert alloc_stream_of(device, storage, -1) == -1
    assert alloc_stream_of(device, torch.empty(1).untyped_storage(), -1) == 5
