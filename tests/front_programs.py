"""Random programs of safecomm's public calls on the simulated device: what a user writes, and nothing else.

    python tests/front_programs.py --programs 1000 --seed 1
    python tests/front_programs.py --seed 1 --only 37

One program is one rank on three streams, with groups of NCCL, NCCL2 or gloo. Each group has one to three peers, which
are late, die, or come to their groups in another order. The program calls collectives of all kinds, keeps or drops
their handles and tensors, waits here and there, and orders its streams by events that safecomm sees and by C++ that it
does not. It captures graphs, opens regions and buckets, and has an arena. Half of the programs have a second thread,
with groups of its own, which does the same, between two steps or in the middle of one. Everything is drawn from the
seed.

A program fails by *unsafe reuse* (``Violation``): memory is given out that something may still touch (S1, S5, S6). Or
by *loss*: it has let go of everything and drained, and not all is back (S3). Programs are correct ones: a stream that
uses memory is ordered after the stream that the memory was allocated on, and what a graph uses stays where it is.
While a thread captures, the other one is on the default stream.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import random
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import front
import torch
from device import Event, Violation
from fakes import FakeEvent, FakeStream
from front import Alone, Answers, Backend, Clock, Device, Gloo, Graph, Loss, Nccl, Nccl2
from turns import Turns

import safecomm as dist

SIZES = (64, 128, 256)
HUGE = 100 << 20  # of which safecomm lets few pile up as works; nobody writes it, so that it costs nothing
LARGE = 8192  # of which it lets few pile up as handoffs, on a device of a MiB
CAPACITY = 6 * 512  # of an arena, so that it is often full
STREAMS = 3
BACKENDS: dict[str, type[Backend]] = {"nccl": Nccl, "nccl2": Nccl2, "gloo": Gloo}


class Passes(torch.overrides.TorchFunctionMode):
    """Under it no call is an ordinary one: all go the general way."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), how: Any = None) -> Any:
        return function(*given, **(how or {}))


STEPS = {
    "allocate": 10, "collective": 16, "pair": 8, "lists": 6, "point_to_point": 4, "batch": 2, "region": 4, "bucket": 3,
    "wait": 14, "ask": 4, "kernel": 6, "drop": 12, "alias": 3, "wait_stream": 8, "record_event": 4, "wait_event": 4,
    "peers": 12, "run_device": 10, "drain": 2, "capture": 4, "replay": 8, "end_graph": 3, "request": 10, "use_arena": 2,
    "close": 1, "avoid": 4, "record": 8, "free_in_place": 2, "burst": 2, "order": 6,
}  # fmt: skip
"""The steps, and how often each is taken."""


class Program:
    """One program: each of its steps is a method."""

    threads = True
    """Whether half of the programs have a second thread."""

    counted = True
    """Whether references can be counted, so that memory of an arena may be given to ``record_stream``."""

    def __init__(self, seed: int, number: int, backend: str) -> None:
        self.rng = rng = random.Random(f"{seed}:{number}")
        self.device = Answers.device = Device()
        self.turns = Answers.turns = Turns(self.switch) if rng.random() < 0.5 and self.threads else Alone()
        self.gloo = backend == "gloo"
        self.host = self.device.host = self.gloo and rng.random() < 0.7
        front.leave_alone(rng.choice([1 << 14, 1 << 14, 64, 0]))
        self.pace = rng.choice([0, 0.02, 1])  # seconds from step to step
        Clock.now = 0
        shelved = rng.random() < 0.7
        kind = BACKENDS[backend]
        # Two groups of each thread.
        self.backends = [kind(self.device, backend, rng.randint(1, 3), shelved=shelved) for _ in range(4)]
        self.groups = [front.group_of(one) for one in self.backends]
        self.streams = [FakeStream(self.device, number) for number in range(STREAMS)]
        self.events: list[FakeEvent] = []
        self.tensors: list[torch.Tensor] = []
        self.works: list[tuple[Any, set[int | None]]] = []  # with the streams of their memory, if one wait is enough
        self.graphs: list[Graph] = []
        self.kept: list[tuple[int, Any]] = []
        self.counts: Counter[str] = Counter()
        self.steps: list[str] = []
        self.lines = [0, 0]  # of each thread, the place of its last step
        self.busy = [False, False]  # which thread is in the middle of a step
        self.blocks: list[list[Any]] = [[], []]  # contexts of each thread that are open, the innermost last
        self.capturing: bool | None = None  # the thread that captures
        self.failed: Exception | None = None  # what the second thread has failed with
        self.arena: Any = None
        self.deceives = rng.random() < 0.3  # events are recorded again past Python
        self.deceived = False  # one was
        self.weights = [weight * rng.choice([0.2, 1, 1, 3]) for weight in STEPS.values()]

    # --- the order of things ----------------------------------------------------------------------------------------

    def run(self, stop: int = 0) -> None:
        """Run the program, or its first ``stop`` turns; raise Violation or Loss if a promise is broken."""
        for taken in range(self.rng.randint(20, 80)):
            if stop and taken == stop:
                break
            if self.turns.__class__ is Turns and self.rng.random() < 0.3:
                self.other()
            else:
                self.step()
        self.turns.finish()
        self.check()
        self.end()

    def other(self) -> None:
        """On the first thread: let the second one begin a step, or go on with the one that it is in."""
        self.counts["turns"] += 1
        assert isinstance(self.turns, Turns)
        self.turns.resume(None if self.turns.underway else self.second_step)

    def give_turn(self) -> None:
        """Between two calls of a step: the turn is the other thread's, if there is one."""
        if isinstance(self.turns, Turns):
            self.turns.left = 0
            self.turns.hand_back() if self.me else self.other()

    def second_step(self) -> None:
        try:
            self.step()
        except Exception as error:  # not in the middle of a call of the first thread, which might catch it
            self.failed = error

    def switch(self) -> None:
        """In the middle of a call: the turn is the other thread's."""
        turns = self.turns
        self.counts["turns in the middle"] += 1
        if turns.second:
            turns.hand_back()
        else:
            self.other()
        turns.left = self.soon() if self.rng.random() < 0.3 else 0

    def soon(self) -> int:
        return 1 + int(self.rng.expovariate(1 / 10))

    @property
    def me(self) -> bool:
        """Whether this is the second thread."""
        return self.turns.second

    def undisturbed(self) -> bool:
        """Give the other thread no turn in this step; return whether it is between two steps."""
        self.turns.left = 0
        return not self.busy[not self.me]

    @property
    def beside(self) -> bool:
        """Whether the other thread captures."""
        return self.capturing is not None and self.capturing != self.me

    def step(self) -> None:
        me = self.me
        (name,) = self.rng.choices(list(STEPS), self.weights)
        name = "meanwhile" if self.beside and self.rng.random() < 0.5 else name
        self.lines[me] = len(self.steps)
        self.steps.append(f"{'second: ' * me}{name}")
        self.counts[name] += 1
        Clock.now += self.rng.random() * self.pace
        general = self.rng.random() < 0.25
        self.busy[me] = True
        if self.turns.__class__ is Turns and self.rng.random() < 0.5:
            self.turns.left = self.soon()
        try:
            self.take(name, general)
        finally:
            self.turns.left = 0
            self.busy[me] = False
        self.check()

    def take(self, name: str, general: bool) -> None:
        """Take the step ``name``; ``general``: its calls go the general way."""
        with Passes() if general else contextlib.nullcontext():
            getattr(self, name)()

    def note(self, what: object) -> None:
        self.steps[self.lines[self.me]] += f" {what}"

    def check(self) -> None:
        self.device.settle()
        if self.failed is not None:
            raise self.failed
        if self.device.faults:
            raise Violation(f"illegal calls: {self.device.faults}")
        self.kept = [one for one in self.kept if one[0] & ~self.device.done]

    def end(self) -> None:
        """Let go of everything, and see that all is back."""
        self.lines[0] = len(self.steps)
        self.steps.append("end")
        for blocks in self.blocks:
            while blocks:
                blocks.pop().__exit__(None, None, None)
        while self.graphs:
            self.end_graph()
        self.works.clear()
        self.tensors.clear()
        self.events.clear()
        self.check()
        self.all_is_over()
        self.kept.clear()
        self.device.switch(0)
        for backend in self.backends:
            backend.group.shelves.clear()
        if missing := self.missing():
            gc.collect()  # what cycles hold, such as the traceback of a refused request, is not lost
            missing = self.missing()
        if missing:
            raise Loss(missing)
        self.turns.close()

    def all_is_over(self) -> None:
        """Let all peers come, and the device complete what it has."""
        for backend in self.backends:
            for peer in backend.peers:
                peer.calls = backend.calls
        self.device.finish()

    def missing(self) -> str:
        """Drain, and return what is not back; "" if all is."""
        Clock.now += 10
        for _ in range(2):  # what no stream orders is an event at first
            dist.drain()
        lost = [one for one in dist.pending() if one.state != "quarantined" and not self.gloo]
        left = dist.drain(wait=True)
        self.check()
        stats = None if self.arena is None else self.arena.stats()
        self.close()
        found = {
            "not back by a call, although it is over": lost,
            "bytes": left,
            "in an arena": stats and (stats.in_use or stats.buckets[-1].largest_free != stats.capacity),
            "pending": dist.pending(),
            "blocks": self.device.live(),
            "blocks that the allocator defers": self.device.deferred,
            "an arena": self.arena,
            "in torch's place": front.in_place(),
        }
        return "; ".join(f"{name}: {one!r}" for name, one in found.items() if one)

    # --- what a program has -----------------------------------------------------------------------------------------

    def go(self) -> None:
        """Go to some stream."""
        stream = 0 if self.beside else self.rng.randrange(STREAMS)
        self.device.switch(stream)
        self.note(f"on {stream}")

    def some(self, count: int, nbytes: int = 0) -> list[torch.Tensor]:
        """Return tensors of the program, the current stream ordered after their allocation stream; or new ones."""
        rng = self.rng
        found = [one for one in self.tensors if one.nbytes == (nbytes or one.nbytes) < HUGE]
        found = [rng.choice(found) if found and rng.random() < 0.8 else self.new(nbytes) for _ in range(count)]
        if len({id(one) for one in found}) < count:
            found = [self.new(nbytes) for _ in range(count)]
        for tensor in found:
            self.order_after(tensor)
        return found

    def order_after(self, tensor: torch.Tensor) -> None:
        """Order the current stream after what is on the stream that ``tensor`` was allocated on."""
        block = self.device.block(tensor) if not self.host else None
        here = self.device.here()
        if block is None or block.alloc_stream in (None, here.handle):
            return
        other = self.device.streams[block.alloc_stream]
        if here.capture:
            return  # the origin of the capture is after it
        if self.beside:
            self.device.wait(here, other.eager, 0)  # by an event from before the capture
        elif self.rng.random() < 0.5:
            self.streams[here.handle].wait_stream(self.streams[other.handle])
        else:
            self.device.wait(here, other.past, other.capture)  # by C++, which safecomm does not see

    def new(self, nbytes: int = 0) -> torch.Tensor:
        nbytes = nbytes or self.rng.choice(SIZES)
        if self.host:
            tensor = self.device.allocate(None, nbytes)
        else:
            tensor = self.device.allocate(self.device._current, nbytes)
        self.tensors.append(tensor)
        return tensor

    def let_go(self, tensors: list[torch.Tensor], chance: float = 0.5) -> None:
        if self.rng.random() < chance:
            self.tensors = [one for one in self.tensors if all(one is not other for other in tensors)]

    def keep_handle(self, work: Any, tensors: list[torch.Tensor] = []) -> None:  # noqa: B006  not changed
        """Keep the handle of a call, or drop it; ``tensors``: all that it uses."""
        if work is None:
            return
        if self.rng.random() < 0.7:
            self.works.append((work, {block.alloc_stream for block in self.device.blocks_of(tensors)}))
        else:
            self.counts["dropped"] += 1

    def pick(self) -> tuple[Any, Backend, bool]:
        """Return a group, its backend, and whether the next call is asynchronous."""
        self.go()
        at = 2 * self.me + self.rng.randrange(2)
        asynchronous = self.rng.random() < 0.6
        backend = self.backends[at]
        if asynchronous:
            fates = ["", "late", "fails", *["silent"] * (type(backend) is Nccl)]
            backend.fate = self.rng.choices(fates, [30, 1, 1, 2][: len(fates)])[0]
        return self.groups[at], backend, asynchronous

    # --- memory -----------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        self.go()
        self.new()

    def drop(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if self.tensors:
                del self.tensors[self.rng.randrange(len(self.tensors))]

    def alias(self) -> None:
        if self.tensors:
            place = self.rng.randrange(len(self.tensors))
            tensor = self.tensors[place]
            self.tensors[place] = self.rng.choice([lambda: tensor[1:], tensor.detach, lambda: tensor.view(-1)])()

    def kernel(self) -> None:
        """Let a kernel of the program's use what it has, and order the allocation stream after it, as it has to."""
        if self.host or not self.tensors:
            return
        self.go()
        (tensor,) = self.some(1)
        block = self.device.block(tensor)
        if self.beside and block is not None and block.alloc_stream != 0:
            return  # a stream that is captured can't be ordered after it
        self.device.launch(self.device.here(), self.device.blocks_of([tensor]))
        if block is not None and block.alloc_stream not in (None, self.device._current):
            self.streams[block.alloc_stream].wait_stream(self.streams[self.device._current])

    # --- an arena, and record_stream --------------------------------------------------------------------------------

    def request(self) -> None:
        """Ask the arena for a buffer, and check that it is one that nothing uses."""
        if self.host:
            return
        self.go()
        device = self.device
        if self.arena is None:
            if not self.undisturbed():
                return  # the other thread may be about to make one
            self.arena = dist.Arena(CAPACITY, full=self.rng.choice(["fallback", "raise"]))
            self.counts["arenas"] += 1
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            device.settle()
            ask = dist.empty if any(self.blocks) and self.rng.random() < 0.5 else self.arena.empty
            nbytes, resumed = self.rng.choice([64, 256, 512, 1024, 1500]), self.turns.resumed
            try:
                tensor = ask(nbytes, dtype=torch.uint8)
            except dist.ArenaError:
                self.check_full(nbytes, resumed)
                return
            if ask is not dist.empty and not self.arena.owns(tensor):
                self.check_full(nbytes, resumed)
            self.received(tensor)
            if self.rng.random() < 0.5:  # what most programs do with it
                device.launch(device.here(), device.blocks_of([tensor]))
            del tensor

    def check_full(self, nbytes: int, resumed: int) -> None:
        """Nothing is refused while there is room, or would be if all that is over was given back."""
        if self.device.capturing or resumed != self.turns.resumed:
            return  # the other thread may have given something back since
        self.turns.left = 0
        dist.drain()
        if self.arena.stats().buckets[-1].largest_free >= nbytes:
            raise Loss(f"{nbytes} bytes were refused although there is room (S3)")

    def received(self, tensor: torch.Tensor) -> None:
        """The program has a buffer, which is the arena's or the allocator's."""
        if self.arena is not None and self.arena.owns(tensor):
            for other in self.tensors:
                start, storage = tensor.data_ptr(), other.untyped_storage()
                if storage.data_ptr() < start + tensor.nbytes and start < storage.data_ptr() + storage.nbytes():
                    raise Violation("memory that the program has is handed out again (S1)")
        self.device.received(tensor)
        self.tensors.append(tensor)

    def use_arena(self) -> None:
        if self.arena is not None and len(self.blocks[self.me]) < 3:
            self.enter(dist.use_arena(self.arena))

    def avoid(self) -> None:
        if self.host:
            return
        mine = self.blocks[self.me]
        if mine and self.rng.random() < 0.6:
            mine.pop().__exit__(None, None, None)
        elif len(mine) < 3:
            release = self.rng.choice(["auto", "auto", "order", "defer"])
            self.enter(dist.avoid_record_streams(release=release, this_thread=self.rng.random() < 0.2))

    def enter(self, block: Any) -> None:
        block.__enter__()
        self.blocks[self.me].append(block)

    def avoids(self) -> bool:
        """Return whether this thread is in a block of ``avoid_record_streams()``, which no other thread can end."""
        return any(isinstance(one, dist.avoid_record_streams) for one in self.blocks[self.me])

    def close(self) -> None:
        """Close the arena, if it can be, and check that its block can be given out."""
        used = any(isinstance(one, dist.use_arena) for blocks in self.blocks for one in blocks)
        if self.arena is None or used or self.device.capturing or not self.undisturbed():
            return
        with contextlib.suppress(dist.ArenaError):
            self.arena.close()
            self.arena = None

    def record(self) -> None:
        """Let a kernel use memory of another stream, and tell the allocator by ``record_stream``."""
        if self.host or not self.tensors:
            return
        self.go()
        (tensor,) = self.some(1)
        if not (self.avoids() and self.counted) and self.arena is not None and self.arena.owns(tensor):
            return  # the allocator does nothing for an arena's memory
        self.device.launch(self.device.here(), self.device.blocks_of([tensor]))
        front.record_stream(tensor, front.stream_of_torch(self.device._current))
        self.let_go([tensor])

    def free_in_place(self) -> None:
        """``resize_(0)`` of what another stream uses, and only ``record_stream`` protects."""
        if self.host or self.device.capturing or not self.avoids() or not self.undisturbed():
            return
        tensor = self.device.allocate(self.rng.randrange(STREAMS), 64)
        self.go()
        self.order_after(tensor)
        self.device.launch(self.device.here(), self.device.blocks_of([tensor]))
        front.record_stream(tensor, front.stream_of_torch(self.device._current))
        pointer = tensor.data_ptr()
        tensor.untyped_storage().resize_(0)
        self.device.freed(pointer)

    # --- calls ------------------------------------------------------------------------------------------------------

    def collective(self) -> None:
        group, backend, asynchronous = self.pick()
        name = self.rng.choice(["all_reduce", "broadcast", "reduce"])
        self.note(f"{name} {'async' * asynchronous} {backend.fate}")
        tensors = self.some(1)
        how: dict[str, Any] = {"broadcast": {"src": 0}, "reduce": {"group_dst": 0}}.get(name, {})
        self.keep_handle(getattr(dist, name)(*tensors, group=group, async_op=asynchronous, **how), tensors)
        self.let_go(tensors)

    def burst(self) -> None:
        """Let much pile up that nobody waits for."""
        group, backend, asynchronous = self.pick()
        for _ in range(self.rng.randint(4, 9)):
            if self.beside:
                (tensor,) = self.some(1)
            elif self.host:
                tensor = self.device.allocate(None, HUGE if asynchronous else 64)
            else:
                alloc_stream = self.rng.choice([self.device._current, self.rng.randrange(STREAMS)])
                tensor = self.device.allocate(alloc_stream, HUGE if asynchronous else LARGE)
                self.order_after(tensor)
            dist.all_reduce(tensor, group=group, async_op=asynchronous)
            backend.fate = ""
            self.let_go([tensor], 1)
            del tensor
            self.device.settle()

    def pair(self) -> None:
        group, backend, asynchronous = self.pick()
        name = self.rng.choice(["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"])
        self.note(f"{name} {'async' * asynchronous} {backend.fate}")
        world = group.size()
        part = self.rng.choice(SIZES)
        whole = part * world if name != "all_to_all_single" else part
        part = part - part % world if whole == part else part
        (small,), (large,) = self.some(1, part), self.some(1, whole if whole != part else 0)
        if name == "all_to_all_single":
            (small, large) = self.some(2, 192)
        given = (large, small) if name == "all_gather_into_tensor" else (small, large)
        self.keep_handle(getattr(dist, name)(*given, group=group, async_op=asynchronous))
        self.let_go([small])
        self.let_go([large])

    def lists(self) -> None:
        group, backend, asynchronous = self.pick()
        names = ["all_gather", "gather", "scatter"] + ["reduce_scatter", "all_to_all"] * (not self.host)
        name = self.rng.choice(names)
        self.note(f"{name} {'async' * asynchronous} {backend.fate}")
        nbytes = self.rng.choice(SIZES)
        tensors = self.some(1 + group.size(), nbytes)
        one, many = tensors[0], tensors[1:]
        call: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: dist.all_gather(many, one, group=group, async_op=asynchronous),
            "gather": lambda: dist.gather(one, many, dst=0, group=group, async_op=asynchronous),
            "scatter": lambda: dist.scatter(one, many, src=0, group=group, async_op=asynchronous),
            "reduce_scatter": lambda: dist.reduce_scatter(one, many, group=group, async_op=asynchronous),
            "all_to_all": lambda: dist.all_to_all(
                many, self.some(len(many), nbytes), group=group, async_op=asynchronous
            ),
        }
        self.keep_handle(call[name]())
        self.let_go(tensors)

    def point_to_point(self) -> None:
        group, backend, _ = self.pick()
        (tensor,) = self.some(1)
        name = self.rng.choice(["isend", "irecv", "send", "recv"])
        if name in ("send", "recv"):
            backend.fate = ""
        self.note(f"{name} {backend.fate}")
        self.keep_handle(getattr(dist, name)(tensor, 1, group=group) if name[0] == "i" else None)
        if name[0] != "i":
            getattr(dist, name)(tensor, 1, group=group)
        self.let_go([tensor])

    def batch(self) -> None:
        group, _, _ = self.pick()
        tensors = self.some(2)
        ops = [dist.P2POp(dist.isend, tensors[0], 1, group), dist.P2POp(dist.irecv, tensors[1], 1, group)]
        for work in dist.batch_isend_irecv(ops):
            self.keep_handle(work)
        self.let_go(tensors)

    def region(self) -> None:
        group, _, asynchronous = self.pick()
        count = self.rng.choice([1, 2, 3])
        nbytes = self.rng.choice(SIZES)
        tensors = self.some(count, nbytes)
        self.note(f"of {count} {'async' * asynchronous}")
        with dist._coalescing_manager(group, async_ops=asynchronous) as region:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        if asynchronous:
            self.keep_handle(region)
        self.let_go(tensors)

    def bucket(self) -> None:
        group, backend, _ = self.pick()
        backend.fate = ""
        tensors = self.some(self.rng.choice([1, 2, 3]))
        with contextlib.suppress(dist.ArenaError), dist.bucketed(group=group):  # an arena may be full
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
            self.let_go(tensors)
        self.let_go(tensors)

    # --- handles ----------------------------------------------------------------------------------------------------

    def meanwhile(self) -> None:
        """While the other thread captures: use memory of its streams, let go of it, and call on."""
        group, backend, asynchronous = self.pick()
        backend.fate = ""
        blocks = [(one, self.device.block(one)) for one in self.tensors]
        for tensor in [one for one, block in blocks if block is not None and block.alloc_stream][:6]:
            self.order_after(tensor)
            dist.all_reduce(tensor, group=group, async_op=asynchronous)
            self.let_go([tensor], 1)
        blocks.clear()
        tensor = None  # type: ignore[assignment]
        if self.rng.random() < 0.5:
            self.all_is_over()
        dist.drain()

    def wait(self) -> None:
        if not self.works:
            return
        self.go()
        work, streams = self.works.pop(self.rng.randrange(len(self.works)))
        self.wait_for(work, streams)
        if self.rng.random() < 0.2:
            self.works.append((work, set()))

    def wait_for(self, work: Any, streams: set[int | None]) -> None:
        how = self.rng.choice(["wait", "wait", "wait", "synchronize", "block_current_stream"])
        if self.host or not hasattr(work, how) or getattr(getattr(work, "inner", None), "fate", ""):
            how = "wait"  # which is what reports a failure
        self.note(how)
        inner = getattr(work, "inner", None)
        fate, captures = getattr(inner, "fate", ""), {self.device.capturing, getattr(inner, "capture", 0)}
        try:
            getattr(work, how)()
        except dist.CaptureBoundaryError as error:
            if captures == {0}:
                raise Violation("a wait that crosses no boundary of a capture is refused (S5)") from error
        except RuntimeError as error:
            if inner is not None and not fate:
                raise Violation("a wait fails for a work that is well (S8)") from error
        else:
            if streams and streams <= {None if self.host else self.device._current} and how == "wait" and work.nbytes:
                raise Violation("memory is held after a wait on the stream that it was allocated on (S2)")

    def wait_well(self, work: Any) -> None:
        """Wait for a work of a call that is well."""
        try:
            work.wait()
        except dist.CaptureBoundaryError:
            raise
        except RuntimeError as error:
            raise Violation("a wait fails for a work that is well (S8)") from error

    def ask(self) -> None:
        if not self.works:
            return
        self.go()
        work, _ = self.rng.choice(self.works)
        self.ask_of(work, self.rng.choice(["is_completed", "get_future"]))

    def ask_of(self, work: Any, name: str) -> None:
        self.note(name)
        if hasattr(work, name) and not (self.host and name != "is_completed"):
            with contextlib.suppress(RuntimeError):
                getattr(work, name)()

    # --- order ------------------------------------------------------------------------------------------------------

    def wait_stream(self) -> None:
        if self.beside:
            return
        one, other = self.rng.sample(range(STREAMS), 2)
        self.note(f"{one} waits for {other}")
        event = FakeEvent()
        self.streams[other].record_event(event)
        self.wait_here(one, event)

    def record_event(self) -> None:
        if not self.beside:
            self.events = [self.streams[self.rng.randrange(STREAMS)].record_event(), *self.events[:2]]

    def wait_event(self) -> None:
        if self.events and not self.beside:
            self.wait_here(self.rng.randrange(STREAMS), self.rng.choice(self.events))

    def wait_here(self, stream: int, event: FakeEvent) -> None:
        """Let a stream wait for an event, and check that it waits for nothing else."""
        at, resumed = self.device.streams[stream], self.turns.resumed
        before, point = at.past, event.point
        self.streams[stream].wait_event(event)
        asked = before | (0 if point is None else point.past)
        alone = self.turns.resumed == resumed  # else the other thread may have used the stream
        if alone and not self.deceived and at.past != asked:
            self.check()  # what was not legal comes first
            raise Violation(f"stream {stream} waits for {at.past & ~asked:b}, which the program has not asked for (S2)")

    def order(self) -> None:
        """Use memory on another stream, let go of it, and order its own stream after that, in one of many ways."""
        if self.host or self.beside:
            return
        home, use, third = self.rng.sample(range(STREAMS), 3)
        event = FakeEvent()
        tensor = self.device.allocate(home, 64)
        self.device.switch(use)
        self.order_after(tensor)
        hows = ["at once", "used again", "too early", "recorded again", "by way of"] + ["past Python"] * self.deceives
        how = self.rng.choice(hows)
        self.note(f"{home} {use} {how}")
        if how == "too early":
            self.wait_here(home, event)
        self.use_here(tensor)
        if how == "too early":
            self.streams[use].record_event(event)
            return
        self.streams[use].record_event(event)
        if how == "used again":
            self.use_here(tensor)
        elif how == "recorded again":
            self.streams[third].record_event(event)
        elif how == "past Python":
            at = self.device.streams[third]
            assert event.point is not None
            event.point = Event(at.past, at.capture)
            self.deceived = True
        elif how == "by way of":
            self.wait_here(third, event)
            self.streams[third].record_event(event)
        del tensor
        self.wait_here(home, event)
        if self.rng.random() < 0.5:
            self.events = [event, *self.events[:2]]

    def use_here(self, tensor: torch.Tensor) -> None:
        if self.avoids() and self.rng.random() < 0.5:
            self.device.launch(self.device.here(), self.device.blocks_of([tensor]))
            front.record_stream(tensor, front.stream_of_torch(self.device._current))
        else:
            dist.all_reduce(tensor, group=self.groups[2 * self.me])

    # --- others -----------------------------------------------------------------------------------------------------

    def peers(self) -> None:
        """Let peers come to further calls: prompt ones to all, late ones to one more, dead ones to none."""
        for backend in self.rng.sample(self.backends, len(self.backends)):
            for peer in backend.peers:
                peer.dead = peer.dead or self.rng.random() < 0.01
                if not peer.dead:
                    peer.calls = max(peer.calls, self.rng.choice([peer.calls, peer.calls + 1, backend.calls]))

    def run_device(self) -> None:
        for _ in range(self.rng.randrange(6)):
            self.device.run(self.rng.randrange(4))

    def drain(self) -> None:
        if self.device.capturing or self.rng.random() < 0.5:
            dist.drain()
        else:
            self.note("wait")
            self.all_is_over()
            dist.drain(wait=True)

    # --- graphs -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture some collectives, of what the graph allocates and of what it does not."""
        if self.gloo or self.device.capturing or not self.undisturbed():
            return
        self.all_is_over()
        for _ in range(self.rng.randrange(3)):  # what runs still, beside the works, which are settled
            self.rng.choice([self.request, self.kernel, self.drop])()
        for _ in range(self.rng.choice([0, 0, 6])):  # what the other thread may use meanwhile
            self.tensors.append(self.device.allocate(self.rng.randrange(STREAMS), LARGE))
        graph = torch.cuda.CUDAGraph()
        outside = self.some(2)
        self.undisturbed()
        own = dist.graph
        if self.avoids() and self.rng.random() < 0.5:  # which sees the captures that torch makes
            own = torch.cuda.graph
            self.device.finish()  # as torch does
        works: list[Any] = []
        try:
            with own(graph):
                self.capturing = self.me
                for _ in range(self.rng.randint(1, 4)):
                    works += self.captured_call(outside)
                    for _ in range(self.rng.choice([0, 0, 1, 4])):
                        self.give_turn()
                if self.rng.random() < 0.9:
                    for work in works:
                        self.wait_well(work)
                self.undisturbed()
        except dist.CaptureBoundaryError:
            graph.reset()
        else:
            self.counts["captured"] += 1
            self.graphs.append(graph)
        finally:
            self.capturing = None
        self.works += [(work, set()) for work in works if self.rng.random() < 0.2]
        self.let_go(outside)

    def captured_call(self, outside: list[torch.Tensor]) -> list[Any]:
        """Make a call that is captured; return the works that are to be waited for."""
        rng, device = self.rng, self.device
        self.turns.left = self.soon() if isinstance(self.turns, Turns) and rng.random() < 0.7 else 0
        group = self.groups[2 * self.me + rng.randrange(2)]
        tensor = rng.choice([device.allocate(device._current, 64), *outside])
        if self.arena is not None and rng.random() < 0.5:
            with contextlib.suppress(dist.ArenaError):
                tensor = self.arena.empty(512, dtype=torch.uint8)
                device.received(tensor)
        if self.works and rng.random() < 0.3:  # it was launched outside
            work, _ = rng.choice(self.works)
            self.ask_of(work, "get_future") if rng.random() < 0.3 else self.wait_for(work, set())
        how = rng.choice(["sync", "async", "later", "lists", "fork"])
        origin, side = self.streams[device._current], self.streams[1]
        if how == "sync":
            dist.all_reduce(tensor, group=group)
        elif how in ("async", "later"):
            work = dist.all_reduce(tensor, group=group, async_op=True)
            if how == "later":
                return [work]
            self.wait_well(work)
        elif how == "lists":
            parts = [device.allocate(device._current, 64) for _ in range(1 + group.size())]
            work = dist.all_gather(parts[1:], parts[0], group=group, async_op=True)
            del parts
            if rng.random() < 0.5:
                return [work]
            self.wait_well(work)
        else:  # to another stream and back
            left, self.turns.left = self.turns.left, 0
            side.wait_stream(origin)
            with torch.cuda.stream(side):
                if rng.random() < 0.5:
                    dist.all_reduce(tensor, group=group)
                else:
                    self.wait_well(dist.all_reduce(tensor, group=group, async_op=True))
            if rng.random() < 0.5:
                del tensor
                self.turns.left = left
                dist.all_reduce(outside[0], group=group)
                self.turns.left = 0
            origin.wait_stream(side)
        return []

    def replay(self) -> None:
        if self.graphs and not self.device.capturing:
            self.go()
            self.rng.choice(self.graphs).replay()

    def end_graph(self) -> None:
        if not self.graphs or self.device.capturing or not self.undisturbed():
            return
        graph = self.graphs.pop(self.rng.randrange(len(self.graphs)))
        if self.rng.random() < 0.5:
            graph.reset()


def run_one(seed: int, number: int, backend: str, stop: int = 0) -> tuple[Program, Exception | None]:
    """Run program ``number`` of ``seed``; return it, and what it has failed with."""
    program = Program(seed, number, backend)
    failure: Exception | None = None
    try:
        program.run(stop)
    except Exception as error:
        failure = error
    finally:
        front.forget(program.groups)
    return program, failure


def quiet() -> None:
    """Let programs run fast: nothing is logged, and what is imported is no garbage to look through at each capture."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()
    gc.disable()  # it would run at other points when a program runs alone


def warm_up() -> None:
    """Let each stream use memory of another one, so that a program alone does what it does among others."""
    program = Program(0, 0, "nccl")
    with contextlib.suppress(Exception):  # of a safecomm that is wrong, which programs are to find
        for stream in range(STREAMS):
            program.device.switch(stream)
            dist.all_reduce(program.device.allocate((stream + 1) % STREAMS, 64), group=program.groups[0])
        program.end()
    front.forget(program.groups)


def kind_of(failure: Exception) -> str:
    return "unsafe" if isinstance(failure, Violation) else "lost" if isinstance(failure, Loss) else "error"


def batch(seed: int, numbers: list[int], backend: str, steps: int) -> tuple[dict[str, int], int | None]:
    """Run programs until one fails; return what they did, and the number of that one."""
    counts: Counter[str] = Counter()
    for number in numbers:
        program, failure = run_one(seed, number, backend, steps)
        counts["programs"] += 1
        counts += program.counts
        if failure is not None:
            return counts, number
    return counts, None


def shortest(seed: int, number: int, backend: str) -> int:
    """Return the number of first steps after which a failing program fails as well, the smallest there is."""
    return next(
        steps
        for steps in range(1, 1000)
        if front.forked(lambda steps=steps: batch(seed, [number], backend, steps))[1] is not None
    )


def write(path: Path, *parts: Any) -> None:
    """Add ``parts`` to those of the same commit in a file."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    before = json.loads(path.read_text()) if path.exists() else {}
    parts = (*(before.get("parts", ()) if before.get("commit") == commit else ()), *parts)
    command = f"python tests/{Path(sys.argv[0]).name}"
    said = {**before, "command": command, "commit": commit, "torch": torch.__version__, "parts": parts}
    path.write_text(json.dumps(said, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs of public calls on the simulated device.")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="nccl")
    parser.add_argument("--mutant", help="a safecomm with this of front_mutants.py broken")
    parser.add_argument("--json", type=Path, help="a file to write what came of it to")
    parser.add_argument("--only", type=int, help="run this program alone, and show its steps")
    parser.add_argument("--steps", type=int, default=0, help="so many of its first steps")
    options = parser.parse_args()
    quiet()
    if options.mutant:
        import front_mutants

        front_mutants.MUTANTS[options.mutant][0]()
    warm_up()
    seed, backend, steps = options.seed, options.backend, options.steps
    began = front.clock()
    numbers = [*range(options.programs)] if options.only is None else [options.only]
    # In a fork, because a program that fails leaves something behind.
    counts, failed = front.forked(lambda: batch(seed, numbers, backend, steps))
    if failed is not None:
        steps = steps or shortest(seed, failed, backend)
        program, failure = run_one(seed, failed, backend, steps)
        kind = "unsafe" if isinstance(failure, Violation) else "lost" if isinstance(failure, Loss) else "error"
        again = f"--backend {backend} --seed {seed} --only {failed} --steps {steps}"
        print(f"{kind}: {again}: {type(failure).__name__}: {failure}"[:600])
        if options.only is not None:
            print("\n".join(program.steps))
            traceback.print_exception(failure)
    ended = {**counts, "failures": int(failed is not None), "seconds": round(front.clock() - began, 1)}
    print(json.dumps(ended))
    if options.json:
        write(options.json, {"backend": backend, "seed": seed, **ended})
    return failed is not None


if __name__ == "__main__":
    sys.exit(main())
