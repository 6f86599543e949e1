"""Random programs of safecomm's public calls on the simulated device: what a user writes, and nothing else.

    python tests/front_programs.py --programs 1000 --seed 1
    python tests/front_programs.py --seed 1 --only 37

One program is one rank on three streams, with two groups of NCCL, NCCL2 or gloo. Each group has one to three peers,
which are late, die, or come to their groups in another order. The program calls collectives of all kinds, keeps or
drops their handles and tensors, waits here and there, and orders its streams by events that safecomm sees and by C++
that it does not. It captures graphs, opens regions and buckets, and has an arena. Everything is drawn from the seed.

A program fails by *unsafe reuse* (``Violation``): memory is given out that something may still touch (S1, S5, S6). Or
by *loss*: it has let go of everything and drained, and not all is back (S3). Programs are correct ones: a stream that
uses memory is ordered after the stream that the memory was allocated on, and what a graph uses stays where it is.
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
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import front
import torch
from device import Violation
from fakes import FakeEvent, FakeStream
from front import Answers, Backend, Device, Gloo, Graph, Nccl, Nccl2

import safecomm as dist

SIZES = (64, 128, 256)
CAPACITY = 6 * 512  # of an arena, so that it is often full
STREAMS = 3
BACKENDS: dict[str, type[Backend]] = {"nccl": Nccl, "nccl2": Nccl2, "gloo": Gloo}


class Passes(torch.overrides.TorchFunctionMode):
    """Under it no call is an ordinary one: all go the general way."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), how: Any = None) -> Any:
        return function(*given, **(how or {}))


class Loss(AssertionError):
    """Something did not come back."""


STEPS = {
    "allocate": 10, "collective": 16, "pair": 8, "lists": 6, "point_to_point": 4, "batch": 2, "region": 4, "bucket": 3,
    "wait": 14, "ask": 4, "kernel": 6, "drop": 12, "alias": 3, "wait_stream": 8, "record_event": 4, "wait_event": 4,
    "peers": 12, "run_device": 10, "drain": 2, "capture": 4, "replay": 8, "end_graph": 3, "request": 10, "use_arena": 2,
    "close": 1, "avoid": 4, "record": 8,
}  # fmt: skip
"""The steps, and how often each is taken."""


class Program:
    """One program: each of its steps is a method."""

    def __init__(self, seed: int, number: int, backend: str) -> None:
        self.rng = rng = random.Random(f"{seed}:{number}")
        self.device = Answers.device = Device()
        self.host = backend == "gloo"
        shelved = rng.random() < 0.7
        kinds = [backend, backend]
        self.backends = [BACKENDS[kind](self.device, kind, rng.randint(1, 3), shelved=shelved) for kind in kinds]
        self.groups = [front.group_of(one) for one in self.backends]
        self.streams = [FakeStream(self.device, number) for number in range(STREAMS)]
        self.events: list[FakeEvent] = []
        self.tensors: list[torch.Tensor] = []
        self.works: list[Any] = []
        self.graphs: list[tuple[Graph, list[torch.Tensor]]] = []
        self.kept: list[tuple[int, Any]] = []
        self.counts: Counter[str] = Counter()
        self.steps: list[str] = []
        self.blocks: list[Any] = []  # contexts that are open, the innermost last
        self.arena: Any = None
        self.weights = [weight * rng.choice([0.2, 1, 1, 3]) for weight in STEPS.values()]

    # --- the order of things ----------------------------------------------------------------------------------------

    def run(self, stop: int = 0) -> None:
        """Run the program, or its first ``stop`` steps; raise Violation or Loss if a promise is broken."""
        count = self.rng.randint(20, 80)
        for taken in range(count):
            if stop and taken == stop:
                break
            (name,) = self.rng.choices(list(STEPS), self.weights)
            self.steps.append(name)
            self.counts[name] += 1
            self.step(name)
            self.check()
        self.end()

    def step(self, name: str) -> None:
        general = self.rng.random() < 0.25
        with Passes() if general else contextlib.nullcontext():
            getattr(self, name)()

    def note(self, what: object) -> None:
        self.steps[-1] += f" {what}"

    def check(self) -> None:
        self.device.settle()
        if self.device.faults:
            raise Violation(f"illegal calls: {self.device.faults}")
        self.kept = [one for one in self.kept if one[0] & ~self.device.done]

    def end(self) -> None:
        """Let go of everything, and see that all is back."""
        self.steps.append("end")
        while self.blocks:
            self.leave()
        while self.graphs:
            self.end_graph()
        self.works.clear()
        self.tensors.clear()
        self.events.clear()
        self.check()
        for backend in self.backends:
            self.arrive(backend, backend.calls)
        self.device.finish()
        self.kept.clear()
        self.device.switch(0)
        for backend in self.backends:
            backend.group.shelves.clear()
        if missing := self.missing():
            gc.collect()  # what cycles hold, such as the traceback of a refused request, is not lost
            missing = self.missing()
        if missing:
            raise Loss(missing)

    def missing(self) -> str:
        """Drain, and return what is not back; "" if all is."""
        left = dist.drain(wait=True)
        self.check()
        self.close()
        found = {
            "bytes": left,
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
        stream = self.rng.randrange(STREAMS)
        self.device.switch(stream)
        self.note(f"on {stream}")

    def some(self, count: int, nbytes: int = 0) -> list[torch.Tensor]:
        """Return tensors of the program, the current stream ordered after their allocation stream; or new ones."""
        rng = self.rng
        found = [one for one in self.tensors if not nbytes or one.nbytes == nbytes]
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
        if here.capture != other.capture:
            return  # the origin of the capture is after it
        if self.rng.random() < 0.5:
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

    def keep_handle(self, work: Any) -> None:
        if work is None:
            return
        if self.rng.random() < 0.7:
            self.works.append(work)
        else:
            self.counts["dropped"] += 1

    def pick(self) -> tuple[Any, Backend, bool]:
        """Return a group, its backend, and whether the next call is asynchronous."""
        self.go()
        at = self.rng.randrange(len(self.groups))
        asynchronous = self.rng.random() < 0.6
        backend = self.backends[at]
        if asynchronous and not self.device.capturing:
            backend.fate = self.rng.choices(["", "late", "fails"], [30, 1, 1])[0]
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
        self.device.launch(self.device.here(), self.device.blocks_of([tensor]))
        block = self.device.block(tensor)
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
            self.arena = dist.Arena(CAPACITY, full=self.rng.choice(["fallback", "raise"]))
            self.counts["arenas"] += 1
        device.settle()
        nbytes = self.rng.choice(SIZES)
        ask = dist.empty if self.blocks and self.rng.random() < 0.5 else self.arena.empty
        try:
            tensor = ask(nbytes, dtype=torch.uint8)
        except dist.ArenaError:
            return
        self.received(tensor)
        if self.rng.random() < 0.5:  # what most programs do with it
            device.launch(device.here(), device.blocks_of([tensor]))

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
        if self.arena is not None and len(self.blocks) < 3:
            self.enter(dist.use_arena(self.arena))

    def avoid(self) -> None:
        if self.host:
            return
        if self.blocks and self.rng.random() < 0.6:
            self.leave()
        elif len(self.blocks) < 3:
            self.enter(dist.avoid_record_streams(release=self.rng.choice(["auto", "auto", "order", "defer"])))

    def enter(self, block: Any) -> None:
        block.__enter__()
        self.blocks.append(block)

    def leave(self) -> None:
        self.blocks.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Close the arena, if it can be, and check that its block can be given out."""
        if self.arena is None or any(isinstance(one, dist.use_arena) for one in self.blocks):
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
        avoids = any(isinstance(one, dist.avoid_record_streams) for one in self.blocks)
        if not avoids and self.arena is not None and self.arena.owns(tensor):
            return  # the allocator does nothing for an arena's memory
        self.device.launch(self.device.here(), self.device.blocks_of([tensor]))
        front.record_stream(tensor, front.stream_of_torch(self.device._current))
        self.let_go([tensor])

    # --- calls ------------------------------------------------------------------------------------------------------

    def collective(self) -> None:
        group, backend, asynchronous = self.pick()
        name = self.rng.choice(["all_reduce", "broadcast", "reduce"])
        self.note(f"{name} {'async' * asynchronous} {backend.fate}")
        tensors = self.some(1)
        how: dict[str, Any] = {"broadcast": {"src": 0}, "reduce": {"group_dst": 0}}.get(name, {})
        self.keep_handle(getattr(dist, name)(*tensors, group=group, async_op=asynchronous, **how))
        self.let_go(tensors)

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

    def wait(self) -> None:
        if not self.works:
            return
        self.go()
        work = self.works.pop(self.rng.randrange(len(self.works)))
        with contextlib.suppress(RuntimeError):  # of a call that fails
            getattr(work, self.rng.choice(["wait", "wait", "wait", "wait"]))()
        if self.rng.random() < 0.2:
            self.works.append(work)

    def ask(self) -> None:
        if not self.works or self.device.capturing:
            return
        self.go()
        work = self.rng.choice(self.works)
        name = self.rng.choice(["is_completed", "get_future", "synchronize"])
        self.note(name)
        if hasattr(work, name) and not (self.host and name != "is_completed"):
            with contextlib.suppress(RuntimeError):
                getattr(work, name)()

    # --- order ------------------------------------------------------------------------------------------------------

    def wait_stream(self) -> None:
        one, other = self.rng.sample(range(STREAMS), 2)
        self.note(f"{one} waits for {other}")
        self.streams[one].wait_stream(self.streams[other])

    def record_event(self) -> None:
        self.events = [self.streams[self.rng.randrange(STREAMS)].record_event(), *self.events[:2]]

    def wait_event(self) -> None:
        if self.events:
            self.streams[self.rng.randrange(STREAMS)].wait_event(self.rng.choice(self.events))

    # --- others -----------------------------------------------------------------------------------------------------

    def arrive(self, backend: Backend, calls: int) -> None:
        for peer in backend.peers:
            peer.calls = max(peer.calls, calls)

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
        if self.rng.random() < 0.5:
            dist.drain()
        else:
            self.note("wait")
            for backend in self.backends:
                self.arrive(backend, backend.calls)
            self.device.finish()
            dist.drain(wait=True)

    # --- graphs -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture some collectives, of what the graph allocates and of what it does not."""
        if self.host:
            return
        for backend in self.backends:
            self.arrive(backend, backend.calls)
        self.device.finish()
        for _ in range(self.rng.randrange(3)):  # what runs still, beside the works, which are settled
            self.rng.choice([self.request, self.kernel, self.drop])()
        graph = torch.cuda.CUDAGraph()
        outside = self.some(2)
        kept: list[torch.Tensor] = []
        with dist.graph(graph):
            for _ in range(self.rng.randint(1, 4)):
                group = self.rng.choice(self.groups)
                tensor = self.rng.choice([self.device.allocate(self.device._current, 64), *outside])
                if self.arena is not None and self.rng.random() < 0.5:
                    with contextlib.suppress(dist.ArenaError):
                        tensor = self.arena.empty(512, dtype=torch.uint8)
                        self.device.received(tensor)
                if self.rng.random() < 0.5:
                    dist.all_reduce(tensor, group=group)
                else:
                    dist.all_reduce(tensor, group=group, async_op=True).wait()
                del tensor
        self.counts["captured"] += 1
        self.graphs.append((graph, kept))
        self.let_go(outside)

    def replay(self) -> None:
        if self.graphs:
            self.go()
            self.rng.choice(self.graphs)[0].replay()

    def end_graph(self) -> None:
        if not self.graphs:
            return
        graph, _ = self.graphs.pop(self.rng.randrange(len(self.graphs)))
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
    said = {"command": command, "commit": commit, "torch": torch.__version__, "parts": parts}
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
    seed, backend, steps = options.seed, options.backend, options.steps
    began = time.perf_counter()
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
    ended = {**counts, "failures": int(failed is not None), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(ended))
    if options.json:
        write(options.json, {"backend": backend, "seed": seed, **ended})
    return failed is not None


if __name__ == "__main__":
    sys.exit(main())
