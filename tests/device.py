"""A simulated device: what a GPU and its caching allocator do to memory, without either.

Its memory is the host's, so that the ledger that is shown or tested with it is the real one. An operation is a bit, and
a point in a stream is the set of operations that happen before it, as an int: "a happens before b" is one ``&``.
Operations complete only when somebody runs the device, in any order that the streams allow, because the host of a real
program is anywhere ahead of its GPU.

What is not legal raises, and is recorded in ``faults`` as well: the ledger turns exceptions of c10d into quarantined
entries, and must not be able to hide the fault by that.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from safecomm import _torch

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

    def __init__(self, alloc_stream: int | None, capture: int, nbytes: int) -> None:
        self.alloc_stream = alloc_stream  # None: memory of the host or of an unknown allocator, which no stream orders
        self.capture = capture  # the capture in whose pool it is
        self.nbytes = nbytes
        self.tenancy = 0  # how often it was handed out
        self.touched: Counter[int] = Counter()  # by capture, 0 for what runs: the operations since it was handed out


class _Thread(threading.local):
    current = 0  # the stream
    relaxed = False


class SimulatedDevice:
    """Streams, events, captures and a caching allocator.

    ``calls`` counts what the ledger asked for, by name.
    """

    def __init__(self, streams: int = 4) -> None:
        self.streams: dict[int, Stream] = {handle: Stream(handle) for handle in range(streams)}
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []
        self.capturing: int = 0  # the id of the capture that goes on
        self.pending: list[Operation] = []
        self.done = 0
        self.blocks: list[Block] = []
        self._origin = 0
        self._spare = 0
        self._thread = _Thread()
        self._next_bit = (1 << n for n in itertools.count()).__next__
        self._next_capture = itertools.count(7).__next__
        self._live: dict[int, tuple[_torch.WeakStorage, Block]] = {}
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

    def alloc_stream(self, pointer: int, other: int | None = None) -> int | None:
        alloc_stream = self._live[pointer][1].alloc_stream
        return alloc_stream if other is None or self.alloc_stream(other) == alloc_stream else None

    def pool(self, pointer: int) -> object:
        return (self._live[pointer][1].capture,)

    def allocated(self, pool: object) -> list[tuple[int, int]]:
        return []

    def all_allocated_on(self, stream: int, pointers: list[int]) -> bool:
        return all(pointer and self.alloc_stream(pointer) == stream for pointer in pointers)

    def capture(self, stream: int) -> int:
        return self.streams[stream].capture

    def is_capturing(self, index: int, stream: int) -> bool:
        assert stream == self.current(index)
        return self.capture(stream) != 0

    def capacity(self, index: int) -> int:
        return 1 << 20

    def claim(self, start: int, end: int, alloc_stream: Callable[[int], int | None]) -> None:
        """Know of no arena."""

    def spare(self, index: int) -> int:
        self._spare = self._spare or self.new_stream().handle
        return self._spare

    def unclaim(self, start: int) -> None:
        """Know of no arena."""

    def is_lasting(self, index: int, stream: int) -> bool:
        assert stream == self.current(index)
        return stream % 3 != 0

    def record_event(self, index: int, stream: int) -> Event:
        self.calls["record_event"] += 1
        at = self.streams[stream]
        return Event(at.past, at.capture)

    def query_event(self, event: Event) -> bool:
        self._check(event)
        return self.query(event.past, event.capture)

    def recycle_event(self, index: int, event: Event) -> None:
        self._check(event)
        event.recycled = True  # the next one to record it would move it under the feet of whoever still uses it

    def wait_event(self, index: int, stream: int, event: Event) -> None:
        self.calls["wait_event"] += 1
        self._check(event)
        self.wait(self.streams[stream], event.past, event.capture)

    @contextmanager
    def using(self, index: int, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def relaxed_capture_mode(self) -> Iterator[None]:
        before, self._thread.relaxed = self._thread.relaxed, True
        try:
            yield
        finally:
            self._thread.relaxed = before

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
        if self.capturing and (self.here().capture or not self._thread.relaxed):
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
            self.track(tensor, stream)
        return tensor

    def track(self, tensor: torch.Tensor, stream: int | None) -> None:
        """Take ``tensor``, which was allocated just now, for memory of ``stream``."""
        self.settle()  # what has died may have had the same address
        storage = tensor.untyped_storage()
        block = self._hand_out(stream, storage.nbytes())
        self._live[storage.data_ptr()] = _torch.StorageWeakRef(storage), block

    def _hand_out(self, stream: int | None, nbytes: int) -> Block:
        capture = 0 if stream is None else self.streams[stream].capture
        for block in reversed(self._free):
            if (block.alloc_stream, block.capture, block.nbytes) == (stream, capture, nbytes):
                self._free.remove(block)
                break
        else:
            block = Block(stream, capture, nbytes)
            self.blocks.append(block)
        self.check_free(block)
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
                self.check_free(block)
                self._free.append(block)

    def check_free(self, block: Block) -> None:
        """Raise Violation if ``block``, which is free, can be handed out before what touches it is over."""
        if block.alloc_stream is None:
            unsafe = block.touched[0] & ~self.done
        elif not block.capture:
            # Kernels of a graph touch it at each replay, and keeping it until then is the graph's matter (S6).
            unsafe = block.touched[0] & ~self.done & ~self.streams[block.alloc_stream].eager
        elif block.capture == self.streams[block.alloc_stream].capture:
            unsafe = block.touched[block.capture] & ~self.streams[block.alloc_stream].captured
        else:
            return  # its capture is over: the pool is the graph's, and hands nothing out
        if unsafe:
            raise Violation(
                f"memory of stream {block.alloc_stream} is free while operations {unsafe:b} may touch it (S1)"
            )

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
