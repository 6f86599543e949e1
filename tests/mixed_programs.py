"""Random programs that mix all that safecomm does with memory, on a simulated device.

One program has an arena, CUDA graph captures, ``avoid_record_streams()``, three streams and two threads. The ledger,
the arena and the graphs are the real ones; what the device does to memory is ``simulated.py``'s, and where threads take
turns is ``points.py``'s. Everything is drawn from the seed, so a program can be run again alone:

    python tests/mixed_programs.py --programs 1000 --seed 1 --jobs 2
    python tests/mixed_programs.py --seed 1 --only 37

NCCL's groups have the rules of ProcessGroupNCCL, or with ``--nccl2`` those of ProcessGroupNCCL2.

A program fails by *unsafe reuse*, when memory is given out that something may still touch (S1, S5, S6), or by *loss*,
when it has let go of everything and not all is back: memory, slots, entries, and what stood in torch's place (S3).

The programs are correct ones. They order or record what they use on other streams, and keep what graphs use that nobody
has seen to be captured. A stream is taken into a capture while the other thread is between two calls, and on the
default stream.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import math
import multiprocessing
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from points import HOOK, DeadlockError, TurnLock, Turns, instrumented
from simulated import (
    INDEX,
    ArenaDevice,
    ArenaGraph,
    Block,
    FakeEvent,
    FakeGroup,
    FakeStream,
    Launched,
    Tenant,
    Violation,
    call,
    events_of_torch,
    routes_of,
)
from simulated import call_sync as sync

from safecomm import _torch, record_stream, stream_methods
from safecomm.arena import Arena, use
from safecomm.arena import arena as arena_module
from safecomm.arena.size_class import ALIGNMENT
from safecomm.core import captures
from safecomm.core import drain as drain_module
from safecomm.core.drain import drain_ledger
from safecomm.core.ledger import Ledger
from safecomm.errors import ArenaError, CaptureBoundaryError, RecordStreamError, SafecommError, StaleGraphError
from safecomm.record_stream import avoid_record_streams

CAPACITY = 6 * ALIGNMENT  # so that it is often full
SIZES = (100, 512, 512, 1024, 1500)
STREAMS = 3
ROOT = Path(__file__).parents[1]
RESULTS = {
    "nccl": ROOT / "benchmarks" / "results" / "mixed_programs.json",
    "nccl2": ROOT / "benchmarks" / "results" / "mixed_programs_nccl2.json",
}

KNOWN_TURNS: dict[str, tuple[bool, str]] = {}
"""Functions that another thread is known to break a promise in (True: in a capture): it is given no turn there."""


class Loss(AssertionError):
    """Something did not come back."""


class Device(ArenaDevice):
    """A device with two threads, each with a current stream, and an allocator that knows ``record_stream``."""

    def __init__(self, turns: Turns, launched: Callable[[int], None]) -> None:
        self.turns = turns
        self.launched = launched
        self.currents = [0, 0]
        super().__init__()
        self.recorded: dict[Block, set[int]] = {}  # the streams that the allocator was told of
        self.deferred: list[tuple[int, Block]] = []  # until when memory that has died is not given out
        self.upcoming = 0
        self.given_up = False

    @property
    def _current(self) -> int:
        return self.currents[self.turns.second]

    @_current.setter
    def _current(self, stream: int) -> None:
        self.currents[self.turns.second] = stream

    def launch(self, stream: Any, blocks: list[Block], *, stuck: bool = False) -> int:
        bit = super().launch(stream, blocks, stuck=stuck)
        self.launched(bit)
        return bit

    def query_event(self, event: Any) -> bool:
        # Also of an event that the other thread has just given back: its entry is gone then, whatever the answer.
        return self.query(event.past, event.capture)

    def pending_bits(self) -> int:
        return sum(op.bit for op in self.pending)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Do what the caching allocator does, which is nothing for memory that is not its own."""
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._live:
            self.recorded.setdefault(self._live[pointer][1], set()).add(stream)

    def settle(self) -> None:
        for pointer, (alive, block) in tuple(self._live.items()):
            if alive.expired() and block in self.recorded:
                del self._live[pointer]
                past = 0
                for stream in self.recorded.pop(block):
                    past |= self.streams[stream].eager
                self.deferred.append((past, block))
        for past, block in tuple(self.deferred):
            if not past & ~self.done:
                self.deferred.remove((past, block))
                self.check_free(block)
                self._free.append(block)
        super().settle()

    def freed(self, pointer: int) -> None:
        """Note that the memory at ``pointer`` was freed under whoever refers to it."""
        _, block = self._live.pop(pointer)
        past = 0
        for stream in self.recorded.pop(block, ()):
            past |= self.streams[stream].eager
        if past:
            self.deferred.append((past, block))
        if not any(one is block for _, one in self.deferred):
            self.check_free(block)
            self._free.append(block)

    def begin_capture(self, stream: int) -> None:
        self._next_capture = lambda: self.upcoming
        super().begin_capture(stream)

    def give_up(self) -> None:
        """End the capture as CUDA does when it has come to something that can't be captured."""
        super().end_capture()
        self.given_up = True


class Graph(ArenaGraph):
    """``torch.cuda.CUDAGraph``."""

    device: Device

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.capture = 0
        self.kept: list[torch.Tensor] = []  # what the program keeps for it
        self.replayed = 0  # the operations of its replays
        self.busy = 0  # how many threads are about to replay it

    def begin(self, _: Any) -> None:
        self.device.begin_capture(self.device._current)
        self.capture = self.device.capturing

    def touch(self, blocks: list[Block]) -> None:
        self.touches += [(one, one.tenancy) for one in blocks if isinstance(one, Tenant) or one.capture != self.capture]

    def capture_end(self) -> None:
        if self.device.given_up:
            self.device.given_up = False
            raise RuntimeError("the capture was given up")
        self.device.end_capture()

    def replay(self) -> None:
        for block, tenancy in self.touches:
            taken = block.gone if isinstance(block, Tenant) else block.tenancy != tenancy or self.device.is_free(block)
            if taken:
                raise Violation("a replay touches memory that is somebody else's (S6)")
        self.replayed |= self.device.launch(self.device.here(), [block for block, _ in self.touches])


class World:
    """What stands in torch's place in the process that runs programs, and the second thread."""

    device: Device
    joins = False  # a stream is about to join a capture by waiting for another one
    with_kernels = False  # torch gives out its kernel of record_stream, as since 2.9

    def __init__(self) -> None:
        self.turns = Turns()
        self.unraisable: list[BaseException] = []
        self.idle = 0
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> World:
        put = self._inside.enter_context
        put(instrumented())
        world = self

        def begin(graph: Graph, pool: Any = None) -> None:
            graph.begin(pool)

        def handle() -> tuple[int, int]:
            return (world.device.upcoming, 0)

        class Kernel(_torch.Override):
            def __init__(self, operator: str, key: str, function: Any, **how: Any) -> None:
                super().__init__(operator, key, function, **how)
                if operator == "aten::record_stream" and world.with_kernels:
                    self.original = lambda tensor, stream: world.device.record_stream(tensor, _raw(stream))

        class Over:
            def __init__(self, storage: Any) -> None:
                self.tensor = torch.empty(0, dtype=torch.uint8).set_(storage)

            def untyped_storage(self) -> torch.UntypedStorage:
                return self.tensor.untyped_storage()

            def record_stream(self, stream: FakeStream) -> None:
                world.device.record_stream(self.tensor, _raw(stream))

        def intercept() -> Any:
            return record_stream._Interception(captures.LEDGER, "CPU", _raw)

        self.capture_begin = begin
        put(events_of_torch(lambda: self.joins))
        self.events_methods = torch.cuda.Event.record, torch.cuda.Event.wait
        put(mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", begin, create=True))
        put(mock.patch.object(torch.cuda, "graph_pool_handle", handle))
        put(mock.patch.object(torch.cuda, "current_device", return_value=INDEX))
        put(mock.patch.object(_torch, "Override", Kernel))
        put(mock.patch.object(_torch, "end_allocation_to_pool"))  # of a pool that torch knows
        put(mock.patch.object(record_stream, "_tensor_of", Over))
        put(mock.patch.object(record_stream, "stream_object", lambda index, stream: FakeStream(world.device, stream)))
        put(mock.patch.object(record_stream, "_intercept", intercept))
        put(mock.patch.object(record_stream, "_lock", TurnLock(self.turns)))
        put(mock.patch.object(stream_methods, "_lock", TurnLock(self.turns)))
        put(mock.patch.object(captures, "_lock", TurnLock(self.turns)))
        put(mock.patch.object(use, "_lock", TurnLock(self.turns)))
        put(mock.patch.object(captures, "LEDGER", None))
        put(mock.patch.object(arena_module, "LEDGER", None))
        put(mock.patch.object(captures, "DURING", []))
        put(mock.patch.object(drain_module.time, "sleep", self._sleep))
        put(mock.patch.object(sys, "unraisablehook", self._caught))
        log = logging.getLogger("safecomm")
        self._inside.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)  # formatting what is said would be half of the time
        if gc.isenabled():
            self._inside.callback(gc.enable)
        gc.disable()  # it would run at other points when a program runs alone
        self._inside.callback(self.turns.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(*error)  # type: ignore[arg-type]

    def _sleep(self, _: float) -> None:
        if not self.device.run():
            self.device.finish()  # what hangs ends when its group is aborted
            self.idle += 1
            if self.idle > 20:
                raise Loss("drain(wait=True) waits for what is over (S3)")

    def _caught(self, unraisable: Any) -> None:
        self.unraisable.append(unraisable.exc_value)

    def untouched(self) -> str:
        """Return what is not as it was before the program; "" if all is."""
        cuda = torch.cuda
        return ", ".join(
            name
            for name, changed in {
                "events": (cuda.Event.record, cuda.Event.wait) != self.events_methods or stream_methods._users,
                "capture_begin": vars(cuda.CUDAGraph).get("capture_begin") is not self.capture_begin,
                "resize_": "resize_" in vars(torch.UntypedStorage),
                "record_stream": "record_stream" in vars(torch.Tensor),
                "avoid_record_streams()": record_stream._users or record_stream._installed,
                "watchers": captures._watchers,
                "captures that go on": captures.RECORDING,
                "live graphs": captures._live,
                "open arenas": arena_module.OPEN,
                "arenas in use": use.IN_USE or use._order,
            }.items()
            if changed
        )

    def reset(self) -> None:
        """After a program that has failed: leave nothing of it to the next one."""
        cuda = torch.cuda
        for interception in record_stream._installed:
            with contextlib.suppress(BaseException):
                interception.remove()
        for table in (record_stream._users, record_stream._installed, captures.RECORDING, captures._watchers,
                      captures._live, arena_module.OPEN, use.IN_USE, use._order):  # fmt: skip
            table.clear()
        captures._own_begin = None
        cuda.Event.record, cuda.Event.wait = self.events_methods  # type: ignore[method-assign]
        stream_methods._users.clear()
        stream_methods._replaced.clear()
        cuda.CUDAGraph.capture_begin = self.capture_begin
        if "resize_" in vars(torch.UntypedStorage):
            del torch.UntypedStorage.resize_
        if "record_stream" in vars(torch.Tensor):
            del torch.Tensor.record_stream  # type: ignore[misc]
        for lock in (record_stream._lock, stream_methods._lock, captures._lock):
            lock._depth = 0
        gc.collect()


def _inside(context: Any) -> Iterator[None]:
    """Be in the block of a ``with`` statement of ``context`` from ``next()`` to :func:`_leave`."""
    with context:
        yield


def _leave(block: Iterator[None]) -> None:
    next(block, None)


def _diverted() -> bool:
    """Return whether ``record_stream`` is safecomm's, which a thread may be about to change."""
    found = [vars(one).get("_record_stream") for one in record_stream._installed]
    return any(one is not None and one._library is not None for one in found)


def _raw(stream: Any) -> int:
    return int(stream.stream_id)


STEPS: dict[str, int] = {
    "allocate": 6, "request": 14, "change": 10, "launch": 14, "launch_sync": 6, "wait": 12, "use_handle": 4,
    "use_and_record": 10, "wait_stream": 8, "record_event": 4, "wait_event": 5, "run_device": 9, "sweep": 4,
    "drain_and_wait": 1, "capture": 10, "replay": 20, "end_graph": 4, "avoid": 7, "close": 2, "free_in_place": 1,
    "use_arena": 2,
}  # fmt: skip
_NAMES = list(STEPS)
OF_WORKS = ("allocate", "launch", "launch_sync", "wait", "use_handle", "capture")


class Program:
    """One program: its steps are methods, of the thread whose turn it is."""

    def __init__(self, world: World, seed: int, number: int, nccl: str = "nccl") -> None:
        self.rng = random.Random(f"{seed}:{number}")
        rng = self.rng
        self.world = world
        self.turns = world.turns
        self.counts: Counter[str] = Counter()
        self.steps: list[str] = []
        self.device = world.device = Device(world.turns, lambda bit: self.detail(f"({bit:b})"))
        world.idle = 0
        world.with_kernels = rng.random() < 0.6
        patience = math.inf if rng.random() < 0.3 else 0
        budget = rng.choice([0, 512, 1 << 20])
        self.ledger = Ledger(self.device, lag=rng.randrange(3), budget=budget, handoff_budget=budget, patience=patience)
        self.ledger.interval = rng.choice([0, 1000])
        self.ledger.lock = TurnLock(self.turns)  # type: ignore[assignment]
        routes = routes_of(self.ledger)
        routes._lock = TurnLock(self.turns)  # type: ignore[assignment]
        captures.DURING[:] = [routes.off]
        captures.LEDGER = arena_module.LEDGER = self.ledger  # type: ignore[misc]
        shelved = rng.random() < 0.7
        self.groups = [
            [FakeGroup(self.device, backend, shelved=shelved) for backend in (nccl, nccl, "gloo")]
            for _ in range(2)
        ]  # fmt: skip
        self.tensors: list[torch.Tensor] = []
        self.storages: list[torch.UntypedStorage] = []  # what Python holds without a tensor
        self.kept: list[tuple[int, Any]] = []  # what the program keeps until operations are over
        self.works: list[Launched] = []
        self.graphs: list[Graph] = []
        self.recording: Graph | None = None
        self.capturing_thread = False
        self.contexts: list[tuple[bool, avoid_record_streams, Iterator[None]]] = []
        self.arenas: list[Arena] = []  # those that were not seen to be closed
        self.uses: list[Any] = []
        self.between = [True, True]  # whether each thread is between two steps
        self.switches = False  # the second thread gets its turn in this step
        self.cuda_events = [FakeEvent() for _ in range(3)]
        if rng.random() < 0.6:  # what safecomm does by itself, for a ledger that is the process's
            self.ledger.handoffs.on_use = functools.partial(stream_methods.see, self.ledger, self.ledger)
        self.freed = False  # memory was freed in place, which may have been an argument of a captured call
        self.slots_before = len(_torch.KEPT)
        # Programs of many steps of few kinds get further than those that do a bit of everything.
        self.weights = [weight * rng.choice([0.2, 1, 1, 3]) for weight in STEPS.values()]
        if nccl == "nccl2":
            self.weights = [w * 3 if name in OF_WORKS else w for name, w in zip(_NAMES, self.weights, strict=True)]
        self.make_arena()

    # --- the order of things ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the program; raise Violation or Loss if a promise is broken."""
        rng, turns = self.rng, self.turns
        HOOK.happen = self.happen
        for _ in range(rng.randint(10, 40)):
            if rng.random() < 0.25:
                self.second_goes_on()
            else:
                self.step()
        turns.finish()
        self.end()

    def second_goes_on(self) -> None:
        self.counts["thread_switches"] += 1
        if self.turns.underway:
            self.note("the second thread goes on")
            self.turns.resume()
        else:
            self.turns.resume(self.step)

    def step(self) -> None:
        """One step of the thread whose turn it is."""
        rng, me = self.rng, self.turns.second
        for _ in range(5):
            (name,) = rng.choices(_NAMES, self.weights)
            if self.can(name):
                break
        self.counts["steps"] += 1
        self.between[me] = False
        self.note(name)
        if me:
            HOOK.left = self.soon() if rng.random() < 0.5 else 0
        else:
            self.switches = rng.random() < 0.4
            HOOK.left = self.soon() if self.switches else 0
        try:
            getattr(self, name)()
        finally:
            HOOK.left = 0
            self.between[me] = True
        self.check()

    def can(self, name: str) -> bool:
        """Return whether there is something to do for a step."""
        if name in ("launch", "launch_sync", "use_and_record", "change", "free_in_place"):
            return bool(self.tensors)
        if name in ("wait", "use_handle"):
            return bool(self.works)
        if name in ("replay", "end_graph"):
            return bool(self.graphs) and not self.device.capturing
        if name == "capture":
            return not self.device.capturing or self.turns.second == self.capturing_thread
        return True

    def soon(self) -> int:
        return 1 + int(self.rng.expovariate(1 / 14))

    def happen(self) -> None:
        """It is time for the other thread, at some point of a call of safecomm."""
        frame = sys._getframe(2)
        if _is_known_turn(frame, self.device.here().capture):
            HOOK.left = self.soon()
            return
        if self.turns.second:
            self.note("  hands back " + _where(frame))
            self.turns.hand_back()
            HOOK.left = self.soon() if self.rng.random() < 0.3 else 0
            return
        self.note("  gives the second thread its turn " + _where(frame))
        self.second_goes_on()

    def note(self, what: str) -> None:
        self.steps.append(f"{'second' if self.turns.second else 'first '} {what}")

    def detail(self, what: str) -> None:
        self.steps[-1] += " " + what

    def check(self) -> None:
        device = self.device
        device.settle()
        if device.faults:
            raise Violation(f"illegal calls: {device.faults}")
        if self.world.unraisable:
            raise Violation(f"a finalizer failed: {self.world.unraisable!r}")
        done = device.done
        self.kept = [one for one in self.kept if one[0] & ~done]

    def alone(self) -> bool:
        """Return whether the other thread is between two steps."""
        return self.between[not self.turns.second]

    @property
    def stream(self) -> int:
        return self.device._current

    def go(self) -> None:
        """Go to some stream; during a capture rather one that takes part in it."""
        rng, device = self.rng, self.device
        stream = rng.randrange(STREAMS)
        if device.capturing:
            if self.turns.second != self.capturing_thread:
                stream = 0
            elif rng.random() < 0.85:
                stream = rng.choice([one for one in range(STREAMS) if device.capture(one)])
        device.switch(stream)
        self.detail(f"on {stream}")

    def in_capture(self) -> Graph | None:
        """Return the graph that the current stream is being captured into."""
        return self.recording if self.device.here().capture else None

    # --- memory -------------------------------------------------------------------------------------------

    def make_arena(self) -> None:
        left, HOOK.left = HOOK.left, 0
        device, rng = self.device, self.rng
        block = torch.zeros(CAPACITY + ALIGNMENT, dtype=torch.uint8)
        block = block[-block.data_ptr() % ALIGNMENT :][:CAPACITY]
        current, device._current = device._current, rng.randrange(STREAMS)
        self.arena = object.__new__(Arena)
        full = rng.choice(["fallback", "fallback", "raise"])
        self.arena._start(block, INDEX, device, full, rng.choice([{}, {"named": 1024}]), None)  # type: ignore[arg-type]
        device._current = current
        self.arena._layout.lock = TurnLock(self.turns)  # type: ignore[assignment]
        self.base = block.data_ptr()
        arena_module.OPEN[INDEX] = self.arena
        self.arenas.append(self.arena)
        HOOK.left = left

    def allocate(self) -> None:
        self.go()
        self.took(self.device.allocate(self.stream, self.rng.choice(SIZES)))

    def took(self, tensor: torch.Tensor) -> None:
        """The program has ``tensor`` from now on."""
        self.tensors.append(tensor)
        graph = self.in_capture()
        if graph is not None and graph.capture not in captures.RECORDING:
            graph.kept.append(tensor)

    def request(self) -> None:
        self.go()
        rng, device, arena = self.rng, self.device, self.arena
        for _ in range(rng.choice([1, 1, 2, 3])):
            if arena is not self.arena:
                return  # the other thread has closed it
            nbytes = rng.choice(SIZES)
            bucket = "named" if "named" in arena._layout.buckets and rng.random() < 0.3 else ""
            self.counts["requests"] += 1
            device.settle()
            ask: Callable[..., torch.Tensor] = use.empty if use._order and rng.random() < 0.5 else arena.empty
            try:
                if not bucket and rng.random() < 0.1:
                    maybe = arena.if_room((nbytes,), torch.uint8)
                    if maybe is None:
                        return
                    tensor = maybe
                else:
                    tensor = ask(nbytes, dtype=torch.uint8, bucket=bucket)
            except ArenaError:
                return
            if self.base <= tensor.data_ptr() < self.base + CAPACITY:
                start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
                for other in [*(one.untyped_storage() for one in self.tensors), *self.storages]:
                    if other.data_ptr() < end and start < other.data_ptr() + other.nbytes():
                        raise Violation("memory that the program has is handed out again (S1)")
                device.hand_out(tensor, self.stream)
                graph = self.in_capture()
                if graph is not None:
                    graph.touch(device.blocks_of([tensor]))
            else:
                self.counts["fallbacks"] += 1
                device.track(tensor, self.stream)
            self.took(tensor)
            if rng.random() < 0.5:  # what most programs do with it
                device.launch(device.here(), device.blocks_of([tensor]))

    def change(self) -> None:
        rng = self.rng
        if self.storages and rng.random() < 0.3:
            del self.storages[rng.randrange(len(self.storages))]
            return
        if not self.tensors:
            return
        place = rng.randrange(len(self.tensors))
        tensor = self.tensors[place]
        how = rng.choice(["drop", "drop", "drop", "drop", "view", "alias", "storage"])
        self.detail(how)
        if how == "view":
            self.tensors[place] = tensor[1:] if tensor.numel() > 1 else tensor
        elif how == "alias":
            self.tensors.append(tensor.detach())
        elif how == "storage":
            self.storages.append(tensor.untyped_storage())
            del self.tensors[place]
        else:
            del self.tensors[place]

    def some(self, count: int) -> list[torch.Tensor]:
        """Return tensors that a correct program can use here."""
        device, rng = self.device, self.rng
        if not self.tensors:
            return []
        chosen = {id(one): one for one in rng.choices(self.tensors, k=count)}.values()
        if device.capturing and not device.here().capture:
            # What a capture was given is not there yet for what runs.
            absent = device.capturing
            return [t for t in chosen if all(block.capture != absent for block in device.blocks_of([t]))]
        return list(chosen)

    def let_go(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.tensors = [one for one in self.tensors if one is not tensor]

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Keep ``tensors`` for what runs now, and what is captured."""
        graph = self.in_capture()
        if graph is not None:
            graph.kept += tensors
            graph.touch(self.device.blocks_of(tensors))
        self.kept.append((self.device.pending_bits(), tensors))

    # --- calls --------------------------------------------------------------------------------------------

    def used(self, tensors: list[torch.Tensor], group: FakeGroup) -> None:
        """A collective of ``group`` was called with ``tensors``: do what safecomm does with it in a capture."""
        graph = self.in_capture()
        if graph is None:
            return
        captured = captures.RECORDING.get(graph.capture)
        if captured is None:
            graph.kept += tensors
        else:
            for tensor in tensors:
                captured.add("a collective", group, tensor, sys._getframe())
        graph.touch(self.device.blocks_of(tensors))

    def launch(self) -> None:
        self.go()
        rng = self.rng
        group = rng.choice(self.groups[self.turns.second])
        tensors = self.some(rng.choice([1, 2]))
        if not tensors or not group.can_launch():
            return
        kind = fate = ""
        if group.backend != "gloo":
            kind = rng.choice(["", "", "", "staged", "p2p"])
            fate = rng.choices(["", "late", "fails"], [30, 1, 1])[0]
        p2p = kind == "p2p"
        receives = p2p and group.backend == "nccl2" and rng.random() < 0.5
        self.detail(f"{kind} {fate}{' receives' * receives}")
        launched = call(self.ledger, group, tensors, staged=kind == "staged", p2p=p2p, receives=receives, fate=fate)
        self.used(tensors, group)
        kept = rng.random() < 0.7
        if kept:
            self.works.append(launched)
        if rng.random() < (0.5 if self.in_capture() is None else 0.8):
            self.let_go(tensors)
            self.counts["dropped"] += not kept

    def launch_sync(self) -> None:
        self.go()
        rng = self.rng
        group = self.groups[self.turns.second][0]
        tensors = self.some(rng.choice([1, 2]))
        if not tensors:
            return
        sync(self.ledger, group, tensors)
        self.used(tensors, group)
        if rng.random() < (0.5 if self.in_capture() is None else 0.8):
            self.let_go(tensors)

    def wait(self) -> None:
        self.go()
        rng = self.rng
        if not self.works:
            return
        works = [one for one in self.works if one.capture == self.device.here().capture]
        launched = rng.choice(works if works and rng.random() < 0.9 else self.works)
        how = rng.choice(["wait", "wait", "wait", "synchronize", "block_current_stream"])
        if launched.inner.fate and launched.inner.group.backend == "nccl":
            how = "wait"  # only that reports a failure
        if rng.random() < 0.8:
            self.works = [one for one in self.works if one is not launched]
        here = self.device.here()
        self.counts["waits_elsewhere"] += not launched.alloc_streams <= {here.handle}
        self.counts["waits_beside_captures"] += bool(self.device.capturing) and not here.capture
        with contextlib.suppress(CaptureBoundaryError, RuntimeError):
            getattr(launched.work, how)()

    def use_handle(self) -> None:
        rng = self.rng
        if not self.works:
            return
        launched = rng.choice(self.works)
        how = rng.choice(["drop", "is_completed", "get_future"])
        self.detail(how)
        # That torch's future orders a stream is ProcessGroupNCCL2's way: it is waited for, too.
        again = how == "get_future" and launched.inner.group.backend == "nccl2" and rng.random() < 0.5
        if how != "is_completed" and not again:
            self.works = [one for one in self.works if one is not launched]
        with contextlib.suppress(CaptureBoundaryError, SafecommError):
            if how == "get_future":
                launched.work.get_future()
            elif how == "is_completed":
                launched.work.is_completed()

    # --- the device ---------------------------------------------------------------------------------------

    def run_device(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.device.run(self.rng.randrange(6))

    def use_and_record(self) -> None:
        """A kernel of the program's own, and ``record_stream`` for it."""
        self.go()
        device, rng = self.device, self.rng
        for tensor in self.some(1):
            (block,) = device.blocks_of([tensor])
            here = device.here()
            graph = self.in_capture()
            if graph is not None and block.capture != here.capture:
                self.keep([tensor])  # for the replays, which nobody else does
            device.launch(here, [block])
            if block.alloc_stream != here.handle and (graph is None or block.capture == here.capture):
                self.record(tensor, block, graph)
            if rng.random() < 0.4:
                self.let_go([tensor])

    def record(self, tensor: torch.Tensor, block: Block, graph: Graph | None) -> None:
        context = self.policy()
        contexts = [one[1] for one in self.contexts]
        installed = _diverted()
        converts = installed and (
            not self.world.with_kernels if context is None or context.mode != "convert" else True
        )  # fmt: skip
        if not converts and (graph is not None or isinstance(block, Tenant)):
            self.keep([tensor])  # an arena's memory is nothing to the allocator
            return
        self.counts["record_streams"] += 1
        self.detail("converted" if converts else "recorded")
        if not installed:
            self.device.record_stream(tensor, self.stream)
            return
        try:
            tensor.record_stream(torch.Stream(stream_id=self.stream, device_index=INDEX, device_type=1))
        except RecordStreamError:
            self.keep([tensor])
        except NotImplementedError:  # the other thread has left in the middle of it, and it was torch's: there is none
            if _diverted():
                raise
            self.keep([tensor])
        if [one[1] for one in self.contexts] != contexts:
            self.keep([tensor])  # the other thread has left a context, or entered one

    def policy(self) -> avoid_record_streams | None:
        """Return the context that counts in this thread."""
        inside = list(record_stream._users.values())[::-1]
        mine = [context for context, thread in inside if thread is record_stream._thread.me]
        return next(iter(mine + [context for context, thread in inside if thread is None]), None)

    def wait_stream(self) -> None:
        device, rng = self.device, self.rng
        waiting, other = rng.randrange(STREAMS), rng.randrange(STREAMS)
        capture = device.streams[other].capture
        if waiting != other and self.can_wait(waiting, capture):
            self.detail(f"{waiting} for {other}")
            self.order(waiting, capture, lambda: FakeStream(device, waiting).wait_stream(FakeStream(device, other)))

    def record_event(self) -> None:
        device, number, stream = self.device, self.rng.randrange(3), self.rng.randrange(STREAMS)
        if not device.capturing or self.turns.second == self.capturing_thread or not device.streams[stream].capture:
            self.detail(f"{number} on {stream}")
            self.cuda_events[number].record(FakeStream(device, stream))

    def wait_event(self) -> None:
        device, number, waiting = self.device, self.rng.randrange(3), self.rng.randrange(STREAMS)
        event = self.cuda_events[number]
        if event.point is not None and self.can_wait(waiting, event.point.capture):
            self.detail(f"{waiting} for event {number}")
            self.order(waiting, event.point.capture, lambda: event.wait(FakeStream(device, waiting)))

    def can_wait(self, waiting: int, capture: int) -> bool:
        """Return whether ``waiting`` can wait for a point of ``capture``, and by that join it: see :meth:`order`."""
        device, at = self.device, self.device.streams[waiting]
        joins = at.capture == 0 and waiting and self.alone()
        if capture not in (0, device.capturing) or not (at.capture == capture or joins):
            return False
        return not device.capturing or self.turns.second == self.capturing_thread or not (at.capture or capture)

    def order(self, waiting: int, capture: int, wait: Callable[[], None]) -> None:
        self.world.joins = self.device.streams[waiting].capture != capture
        if self.world.joins:
            self.undisturbed()
        try:
            wait()
        except RuntimeError as error:
            if "CUDA error" not in str(error):  # the other thread has begun or ended a capture in between
                raise
        finally:
            self.world.joins = False

    def undisturbed(self) -> None:
        """Give the other thread no turn in this step."""
        HOOK.left = 0

    def free_in_place(self) -> None:
        device = self.device
        if device.capturing or not _diverted() or not self.alone():
            return
        self.undisturbed()
        for tensor in self.some(1):
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
            block = device.block(tensor)
            holders = [
                one
                for one in [*self.ledger.holds(), *self.ledger.quarantine]
                for held in one.storages
                if held._cdata == storage._cdata
            ]
            kept = [one for _, tensors in self.kept for one in tensors]
            kept += [one for graph in self.graphs for one in graph.kept]
            if (
                block is None
                or isinstance(block, Tenant)
                or block.capture
                or any(one.op != "record_stream" for one in holders)
                or any(one.untyped_storage()._cdata == storage._cdata for one in kept)
                or any(touched is block for graph in self.graphs for touched, _ in graph.touches)
            ):
                return
            self.freed = True
            try:
                storage.resize_(0)
            finally:
                if not storage.nbytes():
                    self.tensors = [one for one in self.tensors if one.untyped_storage()._cdata != storage._cdata]
                    self.storages = [one for one in self.storages if one._cdata != storage._cdata]
                    device.freed(pointer)

    # --- the ledger ---------------------------------------------------------------------------------------

    def sweep(self) -> None:
        if self.rng.random() < 0.5:
            self.ledger.sweep()
        else:
            drain_ledger(self.ledger)

    def drain_and_wait(self) -> None:
        if not self.device.capturing:
            self.world.idle = 0
            drain_ledger(self.ledger, wait=True)

    # --- graphs -------------------------------------------------------------------------------------------

    def capture(self) -> None:
        device, me = self.device, self.turns.second
        if device.capturing:
            if me == self.capturing_thread:
                self.end_capture(self.rng.choices(["joined", "as it is", "given up", "dies"], [12, 3, 2, 2])[0])
            return
        if not self.alone():
            return
        self.undisturbed()
        device.currents[not me] = 0
        device.switch(self.rng.choice([1, 2]))
        self.detail(f"on {self.stream}")
        device.upcoming += 1
        self.capturing_thread = me
        graph = self.recording = Graph(device)
        torch.cuda.CUDAGraph.capture_begin(graph)  # type: ignore[arg-type]

    def end_capture(self, how: str) -> None:
        device, graph = self.device, self.recording
        assert graph is not None
        self.detail(f"ends {how}")
        device.switch(device._origin)
        if how == "joined":
            for launched in [one for one in self.works if one.capture == graph.capture]:
                with contextlib.suppress(RuntimeError):
                    launched.work.wait()
            launched = None  # type: ignore[assignment]
        if how == "dies":
            self.recording = None
            self.kept.append((device.pending_bits(), graph.kept))
            del graph
            device.end_capture()
            return
        if how == "given up":
            device.give_up()
        try:
            graph.capture_end()
        except (CaptureBoundaryError, RuntimeError):
            self.discard()
        else:
            self.counts["captures"] += 1
            self.graphs.append(graph)
            self.recording = None
        finally:
            self.works = [one for one in self.works if one.capture != graph.capture]

    def discard(self) -> None:
        """End a capture that came to nothing, as a program does that was told so by an exception."""
        device, graph = self.device, self.recording
        assert graph is not None
        HOOK.left = 0
        if device.capturing:
            with contextlib.suppress(CaptureBoundaryError):
                graph.capture_end()
        if device.capturing:  # its end has raised before
            Graph.capture_end(graph)
        device.given_up = False
        self.recording = None
        self.kept.append((device.pending_bits(), graph.kept))
        graph.reset()

    def replay(self) -> None:
        if not self.graphs or self.device.capturing:
            return
        self.go()
        graph = self.rng.choice(self.graphs)
        graph.busy += 1
        try:
            for _ in range(self.rng.choice([1, 1, 2, 3])):
                self.counts["replays"] += 1
                graph.replay()
        except StaleGraphError:
            if not self.freed:
                raise Violation("refused to replay a graph whose arguments are where they were (S6)") from None
        finally:
            graph.busy -= 1

    def end_graph(self) -> None:
        graphs = [one for one in self.graphs if not one.busy]
        if not graphs:
            return
        graph = self.rng.choice(graphs)
        graphs.clear()
        self.graphs = [one for one in self.graphs if one is not graph]
        how = self.rng.choice(["reset", "dies"])
        self.detail(how)
        self.kept.append((graph.replayed | self.device.pending_bits(), graph.kept))
        if how == "reset":
            graph.reset()

    # --- contexts -----------------------------------------------------------------------------------------

    def avoid(self) -> None:
        rng, me = self.rng, self.turns.second
        mine = [one for one in self.contexts if one[0] == me]
        if mine and rng.random() < 0.5:
            self.contexts.remove(mine[-1])
            self.detail("left")
            _leave(mine[-1][2])
        elif len(mine) < 3:
            mode = rng.choice(["convert"] * 6 + ["raise", "warn", "count"])
            release, here = rng.choice(["auto", "auto", "order", "defer"]), rng.random() < 0.2
            context = avoid_record_streams(mode, release=release, this_thread=here)
            self.detail(f"entered {mode} {release}{' this_thread' * here}")
            block = _inside(context)
            next(block)
            self.contexts.append((me, context, block))

    def use_arena(self) -> None:
        if self.uses and self.rng.random() < 0.5:
            _leave(self.uses.pop())
        elif len(self.uses) < 2:
            block = _inside(use.use_arena(self.arena))
            next(block)
            self.uses.append(block)

    def close(self) -> None:
        if not self.device.capturing and self.alone():
            self.undisturbed()
            arena = self.arena
            try:
                arena.close()
            except ArenaError:
                return
            finally:
                if arena._ended:
                    self.closed(arena)
                    self.make_arena()

    def closed(self, arena: Arena) -> None:
        """The block of ``arena`` is the allocator's again: check that it can be (S1)."""
        device = self.device
        base = arena._base
        for tenant in list(device.history):
            if base <= tenant.start < base + CAPACITY:
                device.history.remove(tenant)
                unsafe = tenant.touched[0] & ~device.done & ~device.streams[arena._alloc_stream].eager
                if unsafe:
                    raise Violation(f"the block is given back while operations {unsafe:b} may touch it (S1)")
        for pointer in [one for one in device.tenants if base <= one < base + CAPACITY]:
            del device.tenants[pointer]
        arena.close()
        self.arenas.remove(arena)
        if arena_module.OPEN.get(INDEX) is arena:
            raise Loss("an arena that was closed counts as open")

    # --- the end ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the contexts of this thread."""
        me = self.turns.second
        for context in [one for one in self.contexts if one[0] == me][::-1]:
            _leave(context[2])

    def end(self) -> None:
        """Let go of everything, and see that all is back."""
        device, ledger = self.device, self.ledger
        HOOK.left = 0
        self.note("the end")
        if device.capturing:
            device.currents = [device._origin, 0] if not self.capturing_thread else [0, device._origin]
            if self.capturing_thread:
                self.turns.resume(lambda: self.end_capture("joined"))
            else:
                self.end_capture("joined")
        self.check()
        self.turns.resume(self.leave)
        self.leave()
        ledger.handoffs.on_use = None
        stream_methods.unsee(ledger)
        for block in self.uses[::-1]:
            _leave(block)
        for graph in self.graphs[::2]:
            graph.reset()
        graph = None  # type: ignore[assignment]
        self.kept += [(one.replayed, one.kept) for one in self.graphs]
        self.graphs.clear()
        self.check()
        self.works.clear()
        self.tensors.clear()
        self.storages.clear()
        self.check()
        device.finish()
        self.kept.clear()
        for group in (*self.groups[0], *self.groups[1]):
            group.shelves.clear()
        self.world.idle = 0
        left = drain_ledger(ledger, wait=True)
        self.check()
        missing = self.missing()
        if left or missing:
            gc.collect()  # what cycles hold is not lost
            left = drain_ledger(ledger, wait=True)
            missing = self.missing()
            if left or missing:
                raise Loss(f"{left} bytes are held; {missing}")

    def missing(self) -> str:
        """Return what is not back; "" if all is."""
        device, ledger = self.device, self.ledger
        found = []
        for arena in self.arenas[:]:
            if not arena._ended:
                stats = arena.stats()
                if stats.in_use or any(one.largest_free != one.capacity for one in stats.buckets):
                    found.append(f"slots: {stats}")
                    continue
                arena.close()
            self.closed(arena)
        routes = routes_of(ledger)
        locks = [routes._lock, ledger.lock, self.arena._layout.lock, captures._lock]
        states = {
            "pending": ledger.pending(),
            "queues": ledger.nonempty,
            "recorded uses": [of_storage for of_storage in ledger.recorded_uses.by_storage.values() if of_storage],
            "quarantine": ledger.quarantine,
            "leftovers": ledger.handoffs.leftovers,
            "routes that are off": routes._wanted_off or routes._kept_back,
            "memory": device.live(),
            "memory that the allocator keeps": device.deferred,
            "locks": [one for one in (*locks, record_stream._lock) if one.held],  # type: ignore[union-attr]
            "lenient": device._thread.relaxed,
        }
        found += [f"{name}: {state!r}" for name, state in states.items() if state]
        return "; ".join([*found, self.world.untouched()]).strip("; ")


def _place(frame: Any) -> str:
    """Return the module of safecomm, and the function in it, that ``frame`` runs."""
    code = frame.f_code
    return f"{frame.f_globals['__name__'].removeprefix('safecomm.')}.{getattr(code, 'co_qualname', code.co_name)}"


def _is_known_turn(frame: Any, capture: int) -> bool:
    found = [KNOWN_TURNS.get(_place(one)) for one in (frame, frame.f_back)]
    return any(one is not None and (capture or not one[0]) for one in found)


def _where(frame: Any) -> str:
    return f"in {_place(frame)}, line {frame.f_lineno}"


# --- running them -----------------------------------------------------------------------------------------------


def run_one(world: World, seed: int, number: int, nccl: str = "nccl") -> tuple[Program, BaseException | None]:
    """Run program ``number`` of ``seed``; return it, and what it has failed with."""
    program = Program(world, seed, number, nccl)
    failure: BaseException | None = None
    try:
        program.run()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        failure = error
    HOOK.left = 0
    if failure is not None:
        try:
            world.turns.finish()
        except BaseException:
            world.turns = Turns()  # the other one waits for ever
        world.reset()
    world.unraisable.clear()
    return program, failure


KINDS = ("steps", "captures", "replays", "requests", "fallbacks", "record_streams",
         "thread_switches", "dropped", "waits_elsewhere", "waits_beside_captures")  # fmt: skip


def run_many(seed: int, numbers: Any, *, nccl: str = "nccl", stop: int = 0, show: bool = False) -> dict[str, Any]:
    """Run programs of ``seed``; return what they did, and which failed. ``stop``: after so many failures."""
    counts: Counter[str] = Counter()
    failures: list[tuple[int, str, str]] = []
    ran = 0
    with World() as world:
        for number in numbers:
            program, failure = run_one(world, seed, number, nccl)
            ran += 1
            counts += program.counts
            if failure is not None:
                kind = "lost" if isinstance(failure, (Loss, DeadlockError)) else (
                    "unsafe_reuse" if isinstance(failure, Violation) else "errors"
                )  # fmt: skip
                counts[kind] += 1
                failures.append((number, kind, f"{type(failure).__name__}: {failure}"[:300]))
                if show:
                    print("\n".join(program.steps))
                    traceback.print_exception(failure)
                failure.__traceback__ = None
            del program, failure
            if ran % 100 == 0:
                gc.collect()
            if stop and len(failures) >= stop:
                break
    return {"programs": ran, "counts": dict(counts), "failures": failures}


def _job(arguments: tuple[int, range, str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    seed, numbers, nccl = arguments
    return run_many(seed, numbers, nccl=nccl)


def _commit() -> str:
    """Return the commit that ``safecomm/`` is of, with a mark if it has been changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "safecomm")
    return git("log", "-1", "--format=%h", "--", "safecomm") + (" and changes" if changed else "")


def write(path: Path, part: dict[str, Any]) -> None:
    """Add ``part`` to the parts in the file, if those are of the same commit."""
    commit = _commit()
    results = json.loads(path.read_text()) if path.exists() else {}
    if results.get("commit") != commit:
        spares = {name: why for name, (_, why) in KNOWN_TURNS.items()}
        results = {"commit": commit, "torch": torch.__version__, "spares": spares, "parts": []}
    results["parts"] = [one for one in results["parts"] if one["seed"] != part["seed"]] + [part]
    results["total"] = {
        kind: sum(one[kind] for one in results["parts"])
        for kind in part
        if isinstance(part[kind], int) and kind != "seed"
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs that mix all that safecomm does with memory.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this program alone, and show its steps")
    parser.add_argument("--nccl2", action="store_true", help="with ProcessGroupNCCL2's rules")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, nargs="?", const=Path(), help="a file to add this part to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    nccl = "nccl2" if options.nccl2 else "nccl"
    if options.only is not None:
        ended = run_many(options.seed, [options.only], nccl=nccl, show=True)
        print(ended["counts"])
        return bool(ended["failures"])
    began = time.perf_counter()
    jobs = [(options.seed, range(first, options.programs, options.jobs), nccl) for first in range(options.jobs)]
    if options.jobs == 1:
        ended = [_job(jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            ended = pool.map(_job, jobs)
    counts: Counter[str] = sum((Counter(one["counts"]) for one in ended), Counter())
    failures = sorted(failure for one in ended for failure in one["failures"])
    seconds = time.perf_counter() - began
    part = {
        "seed": options.seed,
        "programs": options.programs,
        **{kind: counts[kind] for kind in KINDS},
        **{kind: counts[kind] for kind in ("unsafe_reuse", "lost", "errors")},
        "seconds": round(seconds),
    }
    for number, kind, what in failures[:400]:
        print(f"{kind}: --seed {options.seed}{' --nccl2' * options.nccl2} --only {number}: {what}")
    print(json.dumps(part))
    if options.json is not None:
        write(RESULTS[nccl] if options.json == Path() else options.json, part)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
