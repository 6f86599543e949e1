"""What torch does on the simulated device: streams, events, graphs, an arena's memory, and the works of a backend.

Nothing here knows safecomm but for the questions of a device, which is ``tests/device.py``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from device import INDEX, Block, Event, SimulatedDevice, Stream, Violation


class FakeEvent:
    """``torch.cuda.Event``: a point in a stream, once it is recorded."""

    def __init__(self) -> None:
        self.point: Event | None = None

    # As torch does: what stands in torch's place is called, if anything does.

    def record(self, stream: FakeStream) -> None:
        torch.cuda.Event.record(self, stream)  # type: ignore[arg-type]

    def wait(self, stream: FakeStream) -> None:
        torch.cuda.Event.wait(self, stream)  # type: ignore[arg-type]


class FakeStream:
    """``torch.cuda.Stream``, which orders by events, and in torch's way."""

    def __init__(self, device: SimulatedDevice, number: int, index: int = INDEX) -> None:
        self.device = device
        self.device_index = index
        self.cuda_stream = self.stream_id = number

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = FakeEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.synchronize(self.device_index)


@contextlib.contextmanager
def events_of_torch(may_join: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Let ``torch.cuda.Event``'s two methods do to fake events what CUDA does to real ones.

    ``may_join``: whether a stream is meant to join a capture just now. If not, that is an error.
    """

    def record(event: FakeEvent, stream: FakeStream) -> None:
        at = stream.device.streams[stream.cuda_stream]
        event.point = Event(at.past, at.capture)

    def wait(event: FakeEvent, stream: FakeStream) -> None:
        point = event.point
        if point is None:
            return
        at = stream.device.streams[stream.cuda_stream]
        joins = at.capture == 0 and at.handle and point.capture == stream.device.capturing and may_join()
        if at.capture != point.capture and not joins:
            raise RuntimeError("CUDA error: a dependency was created on uncaptured work in another stream")
        stream.device.wait(at, point.past, point.capture)

    with mock.patch.object(torch.cuda.Event, "record", record), mock.patch.object(torch.cuda.Event, "wait", wait):
        yield


class FakeGraph:
    """``torch.cuda.CUDAGraph``: what its collectives touch, at each replay."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.touches: list[tuple[Block, int]] = []  # with the tenancy that was captured
        self.ended = False

    def pool(self) -> tuple[int, int]:
        """Return the pool, which a graph knows once its capture has ended well."""
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return (0, 1)

    def touch(self, blocks: list[Block]) -> None:
        """Note what a collective that is being captured touches."""
        self.touches += [(block, block.tenancy) for block in blocks if block.capture != self.device.capturing]

    def replay(self) -> None:
        """Run the graph on the current stream, and check that what it touches is still its own (S6)."""
        for block, tenancy in self.touches:
            if block.tenancy != tenancy or self.device.is_free(block):
                raise Violation("a replay touches memory that is somebody else's (S6)")
        self.device.launch(self.device.here(), [block for block, _ in self.touches])

    def reset(self) -> None:
        self.touches.clear()
        self.ended = False


class Tenant(Block):
    """A range of the arena from when it was handed out."""

    def __init__(self, start: int, end: int, alloc_stream: int, capture: int) -> None:
        super().__init__(alloc_stream, capture, end - start)
        self.start = start
        self.end = end
        self.gone = False  # somebody else has it, who is not of the same capture


class ArenaDevice(SimulatedDevice):
    """A device whose memory is an arena's."""

    def __init__(self) -> None:
        super().__init__(streams=3)
        self.tenants: dict[int, Tenant] = {}  # the last at each address
        self.history: list[Tenant] = []
        self._stream_of: Any = None

    def claim(self, start: int, end: int, stream_of: Any) -> None:
        self._stream_of = stream_of

    def unclaim(self, start: int) -> None:
        self._stream_of = None

    def alloc_stream(self, pointer: int, other: int | None = None) -> int | None:
        if other is not None:
            return alloc_stream if (alloc_stream := self.alloc_stream(pointer)) == self.alloc_stream(other) else None
        tenant = self.tenants.get(pointer)
        if tenant is None:
            return super().alloc_stream(pointer)
        told = self._stream_of(pointer)
        if told != tenant.alloc_stream:
            raise Violation(f"memory of stream {tenant.alloc_stream} is said to be of {told}")
        return tenant.alloc_stream

    def pool(self, pointer: int) -> object:
        return None if pointer in self.tenants else super().pool(pointer)

    def block(self, tensor: torch.Tensor) -> Block | None:
        return self.tenants.get(tensor.untyped_storage().data_ptr()) or super().block(tensor)

    def hand_out(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that ``tensor`` was handed out on ``stream``, and check that it could be (S1, S5, S6)."""
        start = tensor.untyped_storage().data_ptr()
        at = self.streams[stream]
        tenant = Tenant(start, start + tensor.untyped_storage().nbytes(), stream, at.capture)
        for other in tuple(self.history):
            if other.start < tenant.end and tenant.start < other.end:
                unsafe = other.touched[0] & ~self.done
                if at.capture:
                    unsafe |= other.touched[at.capture] & ~at.captured
                else:
                    unsafe &= ~at.eager
                if unsafe:
                    raise Violation(f"memory is handed out on stream {stream} while operations {unsafe:b} may touch it")
                other.gone |= other.capture != at.capture or not at.capture
                if tenant.start <= other.start and other.end <= tenant.end and not other.capture:
                    self.history.remove(other)
        self.history.append(tenant)
        self.tenants[start] = tenant


class FakeGroup:
    """A process group: a communicator with a stream of its own, and one more for each peer.

    ``shelved``: it keeps references of its own until a work is waited for, or over, as c10d does since torch 2.8: of
    inputs and outputs, or as ``nccl2`` of inputs alone.
    """

    def __init__(self, device: SimulatedDevice, backend: str, *, shelved: bool = False) -> None:
        self.device = device
        self.backend = backend
        self.shelved = shelved
        self.stream = device.new_stream()
        self.peers = [device.new_stream(), device.new_stream()]
        self.shelves: list[tuple[int, list[Any]]] = []
        self._next_peer = itertools.cycle(self.peers).__next__

    def can_launch(self) -> bool:
        """Return whether a correct program can launch from the current stream: all or nothing of it is captured."""
        now = self.device.here().capture
        if self.backend == "gloo":
            return not self.device.capturing
        return all(stream.capture in ((0, now) if now else (0,)) for stream in (self.stream, *self.peers))

    def launch(
        self,
        tensors: list[torch.Tensor],
        *,
        staged: bool = False,
        p2p: bool = False,
        receives: bool = False,
        fate: str = "",
    ) -> FakeWork:
        """Enqueue an asynchronous collective after the current stream, and return its work.

        ``fate``: ``"fails"``: every wait raises and its kernel hangs; ``"late"``: the first wait times out;
        ``"silent"``: it has failed and says that it is complete, its kernel hangs, and a wait orders and says nothing
        (NCCL).
        ``receives``: it only writes, as a receive does.
        """
        self.shelves = [(bit, shelf) for bit, shelf in self.shelves if bit & ~self.device.done]
        if self.backend == "nccl2":
            return FakeNccl2Work(self, tensors, self.stream, fate, receives)
        return FakeWork(self, tensors, self._next_peer() if p2p else self.stream, staged, fate)

    def run(self, tensors: list[torch.Tensor]) -> FakeWork | None:
        """Run a synchronous collective, a kernel on the current stream; return what is to be waited for, or None."""
        if self.backend == "nccl2":
            return FakeNccl2Work(self, tensors, self.device.here(), "", True)
        self.device.launch(self.device.here(), self.device.blocks_of(tensors))
        return None


class FakeWork:
    """c10d's handle, as far as it matters to memory."""

    def __init__(self, group: FakeGroup, tensors: list[torch.Tensor], stream: Stream, staged: bool, fate: str) -> None:
        device = group.device
        launching = device.here()
        self.device = device
        self.group = group
        self.fate = fate
        self.outputs = [tensor.detach() for tensor in tensors[:1]]  # result() gives them out
        self.staging = [device.allocate(launching.handle, 64)] if staged else []
        self.shelf = [tensor.detach() for tensor in tensors] if group.shelved else []
        device.wait(stream, launching.past, launching.capture)
        self.capture = stream.capture
        self.bit = device.launch(stream, device.blocks_of(tensors + self.staging), stuck=fate in ("fails", "silent"))
        self.past = stream.past
        if self.shelf and not self.capture:
            group.shelves.append((self.bit, self.shelf))

    def wait(self, timeout: object = None) -> bool:
        if self.fate and self.fate != "silent":
            self.fate = "" if self.fate == "late" else self.fate
            raise RuntimeError("the collective failed")
        if self.group.backend == "gloo":
            while self.bit & ~self.device.done:
                if not self.device.run():
                    self.device.finish()
        self.block_current_stream()
        return True

    def block_current_stream(self) -> None:
        self.device.wait(self.device.here(), self.past, self.capture)
        self.staging.clear()
        self.shelf.clear()

    synchronize = block_current_stream

    def is_completed(self) -> bool:
        return self.fate in ("fails", "silent") or self.device.query(self.past, self.capture)

    def is_success(self) -> bool:
        return self.fate not in ("fails", "silent")

    def get_future(self) -> object:
        return object()


class FakeNccl2Work(FakeWork):
    """ProcessGroupNCCL2's handle.

    Others than it keep inputs only, and of what only ``receives`` not even that. It has its state from asking the
    device, which a wait does, and what has failed is not waited for: ``synchronize()`` does not even say so. A stream
    is ordered after it when its future is asked for, and no other once there is one.
    """

    def __init__(
        self, group: FakeGroup, tensors: list[torch.Tensor], stream: Stream, fate: str, receives: bool
    ) -> None:
        super().__init__(group, tensors, stream, False, fate)
        inputs = [] if receives else tensors[1:] or tensors
        if receives:
            self.outputs.clear()
        self.shelf[:] = [tensor.detach() for tensor in inputs] if group.shelved else []
        self.future: object | None = None
        self.status = "failed" if fate == "fails" else ""

    def check(self) -> None:
        if not self.status and self.fate:
            self.status = "failed"  # for good
        if not self.status and self.device.passed(self.past, self.capture):
            self.status = "over"

    def wait(self, timeout: object = None) -> bool:
        self.synchronize()
        if not self.device.here().capture:
            self.check()
        if self.status == "failed":
            raise RuntimeError("the collective failed")
        return True

    def synchronize(self) -> None:
        if not self.status:
            self.device.wait(self.device.here(), self.past, self.capture)
        if self.status != "failed":
            self.shelf.clear()

    def block_current_stream(self) -> None:
        self.get_future()

    def get_future(self) -> object:
        if self.future is None:
            self.synchronize()
            self.future = object()
        return self.future

    def is_completed(self) -> bool:
        self.device.calls["query"] += 1
        self.check()
        return self.status != ""

    def is_success(self) -> bool:
        return self.status != "failed"


class FakeHostWork:
    """The work of a collective that threads of the host run, on memory that no stream orders."""

    def __init__(self, group: FakeGroup, tensors: list[torch.Tensor], p2p: bool, fate: str) -> None:
        self.device = group.device
        self.p2p = p2p
        self.fate = fate
        self.waited = self.failed = False
        self.bit = self.device.launch(group.device.new_stream(), self.device.blocks_of(tensors))

    def wait(self, timeout: object = None) -> bool:
        if self.p2p and self.waited and not self.failed:
            self.device.faults.append("a second wait for a send or receive, which hangs")
        if self.fate == "late" and not self.p2p:  # the threads go on; a send or receive closes its connections instead
            self.fate = ""
            raise RuntimeError("timed out")
        while self.bit & ~self.device.done:
            if not self.device.run():
                self.device.finish()
        self.waited, self.failed = True, bool(self.fate)
        if self.fate:
            raise RuntimeError("the connection was closed")
        return True

    def is_completed(self) -> bool:
        self.device.calls["query"] += 1
        return not self.bit & ~self.device.done and (self.waited or not self.p2p)

    def is_success(self) -> bool:
        return not self.failed
