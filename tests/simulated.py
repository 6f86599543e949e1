"""A simulated device: what a GPU, the caching allocator and c10d do to memory, without any of them.

The ledger under test is the real one; only its ``Streams`` and c10d's works are replaced. An operation is a bit, and
a point in a stream is the set of operations that happen before it, as an int: "a happens before b" is one ``&``.
Operations complete only when a test runs the device, in any order that the streams allow, because the host of a real
program is anywhere ahead of its GPU.

What is not legal raises, and is recorded in ``faults`` as well: the ledger turns exceptions of c10d into quarantined
entries, and must not be able to hide the fault from the test by that.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from safecomm import backends
from safecomm.ledger import Ledger
from safecomm.streams import HOST, home_of
from safecomm.work import Work
from safecomm.work import handle as new_handle

INDEX = 0
"""The index of the simulated device."""


class Violation(AssertionError):
    """A promise is broken."""


class IllegalCall(Violation):
    """What CUDA would have answered with an error, or with a capture that can't be used any more."""


class Stream:
    """A queue of operations; two of them, because what is captured has no order with what runs."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.capture = 0
        self.eager = 0  # the operations that are before whatever runs next here
        self.captured = 0

    @property
    def past(self) -> int:
        return self.captured if self.capture else self.eager

    def extend(self, operations: int) -> None:
        if self.capture:
            self.captured |= operations
        else:
            self.eager |= operations


class Event:
    """A point in a stream."""

    def __init__(self, past: int, capture: int) -> None:
        self.past = past
        self.capture = capture
        self.recycled = False


class Operation:
    """A kernel that was launched and has not run."""

    def __init__(self, bit: int, after: int, stuck: bool) -> None:
        self.bit = bit
        self.after = after
        self.stuck = stuck  # ends only when somebody waits for the whole device


class Block:
    """A piece of device memory, which is handed out again and again."""

    def __init__(self, home: int | None, capture: int, nbytes: int) -> None:
        self.home = home  # None: memory of the host or of an unknown allocator, which no stream orders
        self.capture = capture  # the capture in whose pool it is
        self.nbytes = nbytes
        self.tenancy = 0  # how often it was handed out
        self.touched: Counter[int] = Counter()  # by capture, 0 for what runs: the operations since it was handed out


class _Thread(threading.local):
    current = 0  # the stream
    lenient = False


class SimulatedDevice:
    """Streams, events, captures and a caching allocator.

    ``calls`` counts what the ledger asked for, by name.
    """

    def __init__(self, streams: int = 4) -> None:
        self.streams = {handle: Stream(handle) for handle in range(streams)}
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []
        self.capturing = 0  # the id of the capture that goes on
        self.pending: list[Operation] = []
        self.done = 0
        self.blocks: list[Block] = []
        self._origin = 0
        self._thread = _Thread()
        self._next_bit = (1 << n for n in itertools.count()).__next__
        self._next_capture = itertools.count(7).__next__
        self._live: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._free: list[Block] = []

    @property
    def _current(self) -> int:
        return self._thread.current

    @_current.setter
    def _current(self, stream: int) -> None:
        self._thread.current = stream

    # --- what the ledger asks -----------------------------------------------------------------------------

    def current(self, index: int) -> int:
        assert index == INDEX
        return self._current

    def home(self, pointer: int, other: int | None = None) -> int | None:
        home = self._live[pointer][1].home
        return home if other is None or self.home(other) == home else None

    def pool(self, pointer: int) -> object:
        return (self._live[pointer][1].capture,)

    def allocated(self, pool: object) -> list[tuple[int, int]]:
        return []

    def all_at_home(self, stream: int, pointers: list[int]) -> bool:
        return all(pointer and self.home(pointer) == stream for pointer in pointers)

    def capture(self, stream: int) -> int:
        return self.streams[stream].capture

    def is_capturing(self, index: int, stream: int) -> bool:
        assert stream == self.current(index)
        return self.capture(stream) != 0

    def capacity(self, index: int) -> int:
        return 1 << 20

    def mark(self, index: int, stream: int) -> Event:
        self.calls["mark"] += 1
        at = self.streams[stream]
        return Event(at.past, at.capture)

    def reached(self, event: Event) -> bool:
        self._check(event)
        return self.query(event.past, event.capture)

    def recycle(self, index: int, event: Event) -> None:
        self._check(event)
        event.recycled = True  # the next one to record it would move it under the feet of whoever still uses it

    def order(self, index: int, stream: int, event: Event) -> None:
        self.calls["order"] += 1
        self._check(event)
        self.wait(self.streams[stream], event.past, event.capture)

    def pause(self, index: int, stream: int) -> None:
        self.calls["pause"] += 1
        if self.streams[stream].capture:
            self._fault("a graph would pause at each replay")

    @contextmanager
    def using(self, index: int, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def lenient(self) -> Iterator[None]:
        before, self._thread.lenient = self._thread.lenient, True
        try:
            yield
        finally:
            self._thread.lenient = before

    def synchronize(self, index: int) -> None:
        self.calls["synchronize"] += 1
        if self.capturing:
            self._fault("the host waits for the device during a capture")
        self.finish()

    # --- streams ------------------------------------------------------------------------------------------

    def switch(self, stream: int) -> None:
        """Make ``stream`` the current one."""
        self._current = stream

    def new_stream(self) -> Stream:
        """Return a stream of a communicator."""
        handle = len(self.streams)
        self.streams[handle] = Stream(handle)
        return self.streams[handle]

    def here(self) -> Stream:
        """Return the current stream."""
        return self.streams[self._current]

    def wait(self, stream: Stream, past: int, capture: int) -> None:
        """Order ``stream`` after a point of another one, which may take it into that one's capture."""
        if stream.capture != capture:
            if stream.capture or capture != self.capturing:
                self._fault(f"a wait crosses from capture {capture} to capture {stream.capture}")
            if stream.handle == 0:
                self._fault("the legacy default stream can't be captured")
            stream.capture = capture
            stream.captured = 0
        stream.extend(past)

    def query(self, past: int, capture: int) -> bool:
        """Return whether the device has got past a point."""
        self.calls["query"] += 1
        return self.passed(past, capture)

    def passed(self, past: int, capture: int) -> bool:
        """Return what :meth:`query` does, for somebody else than the ledger."""
        if capture:
            self._fault("a captured event is queried")
        if self.capturing and (self.here().capture or not self._thread.lenient):
            self._fault("an event is queried during a capture")
        return not past & ~self.done

    def _check(self, event: Event) -> None:
        if event.recycled:
            self._fault("an event is used after it was given back")

    def _fault(self, what: str) -> None:
        self.faults.append(what)
        raise IllegalCall(what)

    # --- captures -----------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Capture ``stream`` from now on, and make it the current one, as ``torch.cuda.graph`` does."""
        assert stream
        assert not self.capturing
        self._origin = self._current = stream
        self.capturing = self.streams[stream].capture = self._next_capture()
        self.streams[stream].captured = 0

    def end_capture(self) -> None:
        """End the capture, as if all of its streams had been joined: whether they have is not the ledger's matter."""
        for stream in self.streams.values():
            stream.capture = 0
        self.capturing = 0

    # --- running ------------------------------------------------------------------------------------------

    def launch(self, stream: Stream, blocks: list[Block], *, stuck: bool = False) -> int:
        """Enqueue a kernel that touches ``blocks``, and return its bit."""
        bit = self._next_bit()
        if not stream.capture:
            self.pending.append(Operation(bit, stream.eager, stuck))
        stream.extend(bit)
        for block in blocks:
            block.touched[stream.capture] |= bit
        return bit

    def run(self, pick: int = 0) -> bool:
        """Complete one of the operations that could be running now; False if none could."""
        ready = [op for op in self.pending if not op.stuck and not op.after & ~self.done]
        if ready:
            op = ready[pick % len(ready)]
            self.pending.remove(op)
            self.done |= op.bit
        return bool(ready)

    def finish(self) -> None:
        """Complete everything."""
        for op in self.pending:
            self.done |= op.bit
        self.pending.clear()

    # --- memory -------------------------------------------------------------------------------------------

    def allocate(self, stream: int | None, nbytes: int) -> torch.Tensor:
        """Return a tensor of memory of ``stream``, which may be what was freed there a moment ago.

        ``None``: memory that no stream orders, and that is anybody's once it is free.
        """
        # Real memory, because the ledger reads the address and counts the references of real storages.
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self.adopt(tensor, stream)
        return tensor

    def adopt(self, tensor: torch.Tensor, stream: int | None) -> None:
        """Take ``tensor``, which was allocated just now, for memory of ``stream``."""
        self.settle()  # what has died may have had the same address
        storage = tensor.untyped_storage()
        block = self._hand_out(stream, storage.nbytes())
        self._live[storage.data_ptr()] = StorageWeakRef(storage), block

    def _hand_out(self, stream: int | None, nbytes: int) -> Block:
        capture = 0 if stream is None else self.streams[stream].capture
        for block in reversed(self._free):
            if (block.home, block.capture, block.nbytes) == (stream, capture, nbytes):
                self._free.remove(block)
                break
        else:
            block = Block(stream, capture, nbytes)
            self.blocks.append(block)
        self._check_free(block)
        block.touched.clear()
        block.tenancy += 1
        return block

    def settle(self) -> None:
        """Notice what was freed, and check that it could be handed out again at once (S1, S5).

        To be called after whatever may free and before whatever may hand out. Storages are looked at, and not left to
        tell of their end, because the Python object of a storage may die while its memory lives.
        """
        for pointer, (alive, block) in tuple(self._live.items()):
            if alive.expired():
                del self._live[pointer]
                self._check_free(block)
                self._free.append(block)

    def _check_free(self, block: Block) -> None:
        if block.home is None:
            unsafe = block.touched[0] & ~self.done
        elif not block.capture:
            # Kernels of a graph touch it at each replay, and keeping it until then is the graph's matter (S6).
            unsafe = block.touched[0] & ~self.done & ~self.streams[block.home].eager
        elif block.capture == self.streams[block.home].capture:
            unsafe = block.touched[block.capture] & ~self.streams[block.home].captured
        else:
            return  # its capture is over: the pool is the graph's, and hands nothing out
        if unsafe:
            raise Violation(f"memory of stream {block.home} is free while operations {unsafe:b} may touch it (S1)")

    def is_free(self, block: Block) -> bool:
        """Return whether nobody refers to ``block``."""
        self.settle()
        return block in self._free

    def block(self, tensor: torch.Tensor) -> Block | None:
        """Return the block under ``tensor``; None if it has no memory."""
        pointer = tensor.untyped_storage().data_ptr()
        return self._live[pointer][1] if pointer else None

    def blocks_of(self, tensors: list[torch.Tensor]) -> list[Block]:
        """Return the blocks under ``tensors``."""
        return [block for tensor in tensors if (block := self.block(tensor)) is not None]

    def live(self) -> list[Block]:
        """Return the blocks that somebody refers to."""
        self.settle()
        return [block for _, block in self._live.values()]


class FakeGraph:
    """``torch.cuda.CUDAGraph``: what its collectives touch, at each replay."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.touches: list[tuple[Block, int]] = []  # with the tenancy that was captured

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


class Tenant(Block):
    """A range of the arena from when it was handed out."""

    def __init__(self, start: int, end: int, home: int, capture: int) -> None:
        super().__init__(home, capture, end - start)
        self.start = start
        self.end = end
        self.gone = False  # somebody else has it, who is not of the same capture


class ArenaDevice(SimulatedDevice):
    """A device whose memory is an arena's."""

    def __init__(self) -> None:
        super().__init__(streams=3)
        self.tenants: dict[int, Tenant] = {}  # the last at each address
        self.history: list[Tenant] = []
        self._home_of: Any = None

    def claim(self, start: int, end: int, home: Any) -> None:
        self._home_of = home

    def unclaim(self, start: int) -> None:
        self._home_of = None

    def home(self, pointer: int, other: int | None = None) -> int | None:
        if other is not None:
            return home if (home := self.home(pointer)) == self.home(other) else None
        tenant = self.tenants.get(pointer)
        if tenant is None:
            return super().home(pointer)
        told = self._home_of(pointer)
        if told != tenant.home:
            raise Violation(f"memory of stream {tenant.home} is said to be of {told}")
        return tenant.home

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


class ArenaGraph(FakeGraph):
    """A graph that owns all that its collectives touch, wherever it comes from."""

    def touch(self, blocks: list[Block]) -> None:
        self.touches += [(block, block.tenancy) for block in blocks]

    def replay(self) -> None:
        for block, _ in self.touches:
            if isinstance(block, Tenant) and block.gone:
                raise Violation("a replay touches memory that is somebody else's (S6)")
        self.device.launch(self.device.here(), [block for block, _ in self.touches])


class FakeNccl:
    """Stands for ProcessGroupNCCL."""


class FakeNccl2:
    """Stands for ProcessGroupNCCL2."""


class FakeGloo:
    """Stands for ProcessGroupGloo."""


BACKENDS = {"nccl": FakeNccl(), "nccl2": FakeNccl2(), "gloo": FakeGloo()}
"""The backends' objects, by whose classes the ledger tells them apart."""

backends.CLASSES.update({FakeNccl: backends.NCCL, FakeNccl2: backends.NCCL2, FakeGloo: backends.GLOO})


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

    def _get_backend(self, device: torch.device) -> object:
        return BACKENDS[self.backend]

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

        ``fate``: ``"fails"``: every wait raises and its kernel hangs; ``"late"``: the first wait times out.
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
        self.bit = device.launch(stream, device.blocks_of(tensors + self.staging), stuck=fate == "fails")
        self.past = stream.past
        if self.shelf and not self.capture:
            group.shelves.append((self.bit, self.shelf))

    def wait(self, timeout: object = None) -> bool:
        if self.fate:
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
        return self.fate == "fails" or self.device.query(self.past, self.capture)

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
        self.waited = False
        self.bit = self.device.launch(group.device.new_stream(), self.device.blocks_of(tensors))

    def wait(self, timeout: object = None) -> bool:
        if self.p2p and self.waited:
            self.device.faults.append("a second wait for a send or receive, which hangs")
        if self.fate == "late" and not self.p2p:  # the threads go on; a send or receive closes its connections instead
            self.fate = ""
            raise RuntimeError("timed out")
        while self.bit & ~self.device.done:
            self.device.run()
        if self.fate:
            raise RuntimeError("the connection was closed")
        self.waited = True
        return True

    def is_completed(self) -> bool:
        self.device.calls["query"] += 1
        return not self.bit & ~self.device.done and (self.waited or not self.p2p)


# --- safecomm's calls, as its collectives make them ---------------------------------------------------------


@dataclass(eq=False)
class Launched:
    """An asynchronous collective, as long as the program keeps its handle."""

    op: str  # its name in the ledger, which no other call has
    work: Work
    inner: Any
    homes: set[int | None]  # of the memory that it uses
    capture: int


_ops = map("all_reduce {}".format, itertools.count())


def call(
    ledger: Ledger,
    group: FakeGroup,
    tensors: list[torch.Tensor],
    *,
    staged: bool = False,
    p2p: bool = False,
    receives: bool = False,
    fate: str = "",
    index: int = INDEX,
) -> Launched:
    """Launch an asynchronous collective on ``tensors``, the first of them its output, from the current stream."""
    if ledger.busy:
        ledger.sweep()
    device = group.device
    device.settle()
    inner: Any
    if index == HOST:
        inner = FakeHostWork(group, tensors, p2p, fate)
    else:
        inner = group.launch(tensors, staged=staged, p2p=p2p, receives=receives, fate=fate)
    op = next(_ops)
    storages = tuple(tensor.untyped_storage() for tensor in tensors)
    handle = new_handle(once=p2p and group.backend == "gloo")
    frame = sys._getframe(1)
    if staged or p2p:
        ledger.hold(handle, op, inner, group, index, storages, frame, staged=staged, p2p=p2p)
    else:
        homes = {HOST if index == HOST else home_of(ledger.streams, storage, HOST) for storage in storages}
        home = homes.pop() if len(homes) == 1 else None  # HOST is no stream: memory that is not there has none
        ledger.lane_of(group, index).hold(handle, op, inner, storages, home, frame)
    return Launched(op, handle, inner, {block.home for block in device.blocks_of(tensors)}, device.here().capture)


def call_sync(ledger: Ledger, group: FakeGroup, tensors: list[torch.Tensor]) -> str:
    """Run a synchronous collective, a kernel on the current stream, and return its name."""
    if ledger.busy:
        ledger.sweep()
    group.device.settle()
    inner = group.run(tensors)
    if inner is not None:
        ledger.lane_of(group, INDEX).wait_for(inner)
    op = next(_ops)
    storages = tuple(tensor.untyped_storage() for tensor in tensors)
    ledger.trail(op, group, INDEX, storages, sys._getframe(1))
    return op
