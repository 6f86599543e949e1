"""Programs as users write them, from the documents alone, on the simulated device of ``front.py``.

    python tests/workloads.py --seed 1 --rounds 20             # each workload, a line of JSON for each
    python tests/workloads.py moe_dispatch:NAME                # with a rule of safecomm broken (front_mutants.py)

Each workload is what one rank runs. Between any two of its lines the device completes kernels, and peers come to
calls, at a pace that the seed draws: in some steps all at once, in some few, in some none. What a workload may expect
are promises of the documents: no memory is given out that something may still touch (``Violation``); the most that is
live in a step does not depend on the pace, and does not grow; after ``drain(wait=True)`` all is back.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import front
import torch
from device import Violation
from fakes import FakeStream
from front import Answers, Backend, Device, Gloo, Nccl

import safecomm as dist

STEPS = 20
FIRST = 3
"""So many first steps see a device that completes nothing, and no peer: no other pace lets more be live."""

WORKLOADS: list[Callable[[Rank], None]] = []


class Broken(AssertionError):
    """A promise of the documents does not hold, and no memory was given out too early."""


class Gpu(Device):
    """A device that goes on while the host blocks, when safecomm asks it again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()  # a wait for gloo may block a thread of its own
        self.meanwhile: Callable[[], None] = lambda: None

    def query(self, past: int, capture: int) -> bool:
        self.meanwhile()
        return super().query(past, capture)

    def run(self, pick: int = 0) -> bool:
        with self.lock:
            return super().run(pick)


class Rank:
    """A process with a GPU: its memory, streams, groups and kernels, and the pace of all that is not the process."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.device = Answers.device = Gpu()
        self.main, self.side = FakeStream(self.device, 0), FakeStream(self.device, 1)
        self.backends: list[Backend] = []
        self.groups: list[Any] = []
        self.peaks: list[int] = []  # of each step, in blocks
        self.pace = 0  # the most kernels that complete between two lines

    # --- what a program calls ---------------------------------------------------------------------------------------

    def group(self, peers: int, kind: type[Backend] = Nccl) -> Any:
        """Return a group of this rank and ``peers`` others. Those of gloo are never late, because waits block."""
        backend = kind(self.device, kind.__name__.lower(), peers, shelved=self.rng.random() < 0.5)
        for peer in backend.peers:
            peer.calls = 0 if kind is Nccl else sys.maxsize
        self.backends.append(backend)
        self.groups.append(front.group_of(backend))
        return self.groups[-1]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return what ``torch.empty`` does, on the current stream."""
        return self.device.allocate(self.device._current, nbytes)

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Return memory of the host."""
        return self.device.allocate(None, nbytes)

    def kernel(self, *tensors: torch.Tensor) -> None:
        """Launch something that reads or writes ``tensors`` on the current stream."""
        self.device.launch(self.device.here(), self.device.blocks_of(list(tensors)))

    def steps(self) -> Iterator[int]:
        for step in range(STEPS):
            self.peaks.append(0)
            self.pace = 0 if step < FIRST else self.rng.choice([0, 1, 3, 50])
            yield step

    def catch_up(self) -> None:
        """Let peers come to all calls, and the device complete everything."""
        for backend in self.backends:
            for peer in backend.peers:
                peer.calls = max(peer.calls, backend.calls)
        self.device.finish()

    # --- what goes on beside it -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Check what is free now, and measure what is live."""
        live = len(self.device.live())
        if self.device.faults:
            raise Violation(f"illegal calls: {self.device.faults}")
        if self.peaks:
            self.peaks[-1] = max(self.peaks[-1], live)

    def advance(self) -> None:
        """Let peers come to calls, and kernels complete, at the pace of the step."""
        for backend in self.backends if self.pace else ():
            for peer in backend.peers:
                if peer.calls < backend.calls:
                    peer.calls += self.rng.randint(0, min(self.pace, backend.calls - peer.calls))
        for _ in range(self.rng.randint(0, self.pace)):
            self.device.run(self.rng.randrange(4))

    def run(self, workload: Callable[[Rank], None]) -> None:
        """Run ``workload``, and raise Violation or Broken if a promise is broken."""
        codes = {workload.__code__, *(one for one in workload.__code__.co_consts if isinstance(one, CodeType))}

        def between_lines(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code in codes:
                self.look()
                self.advance()
                return between_lines
            return None

        sys.settrace(between_lines)
        try:
            workload(self)
        finally:
            sys.settrace(None)
        self.look()
        self.pace, self.device.meanwhile = 3, self.advance
        left = dist.drain(wait=True)  # the device may be anywhere behind, and peers may be late
        self.look()
        expect(left == 0 and dist.pending() == [], f"{left} bytes in {dist.pending()} after drain(wait=True)")
        for backend in self.backends:
            backend.group.shelves.clear()  # c10d's own, until its next call
        expect(not self.device.live(), f"{len(self.device.live())} blocks are lost")
        first, later = max(self.peaks[:FIRST]), max(self.peaks[FIRST:])
        expect(later <= first, f"the peak grows: {self.peaks}")


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def workload(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    WORKLOADS.append(function)
    return function


# --- training -------------------------------------------------------------------------------------------------------


@workload
def tensor_parallel_layer(rank: Rank) -> None:
    """A layer with sequence parallelism: collectives on a side stream, beside a matmul of forward and of backward."""
    group, main, side = rank.group(3), rank.main, rank.side
    weight, grad_weight = rank.empty(512), rank.empty(512)
    for _ in rank.steps():
        x, partial = rank.empty(256), rank.empty(256)
        rank.kernel(x, weight, partial)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = rank.empty(64)
            work = dist.reduce_scatter_tensor(y, partial, group=group, async_op=True)
            work.wait()
        del partial, work
        residual = rank.empty(256)
        rank.kernel(x, residual)  # beside it
        main.wait_stream(side)
        rank.kernel(y, residual)
        grad, grad_x = rank.empty(256), rank.empty(256)
        rank.kernel(residual, grad)
        rank.kernel(grad, weight, grad_x)
        side.wait_stream(main)  # after which y's memory can be given out again, too
        del y, residual
        with torch.cuda.stream(side):
            work = dist.all_reduce(grad_x, group=group, async_op=True)
            tied = dist.reduce(grad, group_dst=1, group=group, async_op=True)  # rank 1 has the tied weight
            work.wait()
            tied.wait()
        rank.kernel(grad, x, grad_weight)  # beside it
        del x, grad, tied
        main.wait_stream(side)
        rank.kernel(grad_x, weight)
        del grad_x, work


@workload
def megatron_ddp(rank: Rank) -> None:
    """Buckets of gradients in coalescing regions, beside backward; the last region alone is waited for."""
    group = rank.group(1)
    params = rank.empty(512)
    for _ in rank.steps():
        regions, shards = [], []
        for _ in range(3):
            grads = [rank.empty(256) for _ in range(3)]
            rank.kernel(params, *grads)
            with dist._coalescing_manager(group, async_ops=True) as region:
                for grad in grads:
                    shards.append(rank.empty(128))
                    dist.reduce_scatter_tensor(shards[-1], grad, group=group)
            regions.append(region)
            del grads, grad, region
        regions[-1].wait()
        expect(dist.pending() == [], "one stream, all waited for, and something is held (S2)")
        rank.kernel(params, *shards)
        del regions, shards
        gathered = rank.empty(512)
        work = dist.all_gather_into_tensor(gathered, params[:256], group=group, async_op=True)
        work.wait()
        rank.kernel(gathered, params)
        del gathered, work


@workload
def fsdp_by_events(rank: Rank) -> None:
    """Parameters are gathered a layer ahead on a side stream, and gradients scattered there, in the order of events."""
    group, main, side = rank.group(3), rank.main, rank.side
    shards = [rank.empty(64) for _ in range(4)]

    def gather(layer: int) -> Any:
        with torch.cuda.stream(side):
            full = rank.empty(256)
            return full, dist.all_gather_into_tensor(full, shards[layer], group=group, async_op=True)

    for _ in rank.steps():
        side.wait_stream(main)
        ahead = gather(0)
        for layer in range(4):
            full, work = ahead
            work.wait()
            ahead = gather(layer + 1) if layer < 3 else None
            activation = rank.empty(128)
            rank.kernel(full, activation)
            side.wait_event(main.record_event())
            del full, work
        for shard in reversed(shards):
            grad = rank.empty(256)
            rank.kernel(activation, grad)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                reduced = rank.empty(64)
                dist.reduce_scatter_tensor(reduced, grad, group=group)
                rank.kernel(reduced, shard)
            del grad, reduced
        main.wait_stream(side)
        rank.kernel(*shards)
        del activation, shard


@workload
def fsdp_by_record_stream(rank: Rank) -> None:
    """The same with ``record_stream``, unedited inside of ``avoid_record_streams()``."""
    group, main, side = rank.group(3), rank.main, rank.side
    shards = [rank.empty(64) for _ in range(4)]
    with dist.avoid_record_streams():
        for _ in rank.steps():
            for shard in shards:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    full = rank.empty(256)
                    dist.all_gather_into_tensor(full, shard, group=group)
                    gathered = side.record_event()
                main.wait_event(gathered)
                grad = rank.empty(256)
                rank.kernel(full, grad)
                front.record_stream(full, front.stream_of_torch(0))
                del full
                side.wait_event(main.record_event())
                with torch.cuda.stream(side):
                    rank.kernel(grad)  # divides it
                    front.record_stream(grad, front.stream_of_torch(1))
                    reduced = rank.empty(64)
                    dist.reduce_scatter_tensor(reduced, grad, group=group)
                    rank.kernel(reduced, shard)
                del grad, reduced
            main.wait_stream(side)
            rank.kernel(*shards)


@workload
def pipeline_1f1b(rank: Rank) -> None:
    """A middle stage of a pipeline, between ranks 1 and 2, whose outputs are freed right after they are sent."""
    group = rank.group(2)
    weight = rank.empty(512)
    for _ in rank.steps():
        inputs: list[torch.Tensor] = []
        for turn in range(6):  # four microbatches; a backward comes two turns after its forward
            ops = []
            if turn >= 2:
                grad = rank.empty(256)
                ops.append(dist.P2POp(dist.irecv, grad, 2, group))
            if turn < 4:
                inputs.append(rank.empty(256))
                for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, inputs[-1], 1, group)]):
                    work.wait()
                y = rank.empty(256)
                rank.kernel(inputs[-1], weight, y)
                ops.append(dist.P2POp(dist.isend, y, 2, group))
            works = dist.batch_isend_irecv(ops)
            if turn < 4:
                y.data = rank.empty(1)  # as Megatron's schedules do
            rank.kernel(weight)  # beside it
            for work in works:
                work.wait()
            if turn >= 2:
                grad_x = rank.empty(256)
                rank.kernel(inputs.pop(0), grad, weight, grad_x)
                works = dist.batch_isend_irecv([dist.P2POp(dist.isend, grad_x, 1, group)])
                del grad, grad_x
                rank.kernel(weight)
                works[-1].wait()
            del ops, works, work
        expect(dist.pending() == [], "one stream, all waited for, and something is held (S2)")
        del y


@workload
def moe_dispatch(rank: Rank) -> None:
    """Tokens go to experts and back by ``all_to_all_single``, in sizes that change from step to step."""
    group, main, side = rank.group(3), rank.main, rank.side
    for _ in rank.steps():
        mine, theirs = rank.empty(4), rank.empty(4)
        rank.kernel(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        sent, got = ([rank.rng.choice([16, 32, 64]) for _ in range(4)] for _ in range(2))
        tokens, received = rank.empty(sum(sent)), rank.empty(sum(got))
        rank.kernel(tokens)
        work = dist.all_to_all_single(received, tokens, got, sent, group=group, async_op=True)
        del tokens, mine, theirs
        shared = rank.empty(256)
        rank.kernel(shared)  # the shared expert, beside it
        work.wait()
        outputs, combined = rank.empty(sum(got)), rank.empty(sum(sent))
        rank.kernel(received, outputs)
        del received, work
        side.wait_stream(main)
        with torch.cuda.stream(side):
            dist.all_to_all_single(combined, outputs, sent, got, group=group)
        del outputs
        again = rank.empty(sum(got))
        rank.kernel(shared, again)  # beside it
        main.wait_stream(side)
        rank.kernel(combined, shared)
        del combined, shared, again


@workload
def second_group_on_a_third_stream(rank: Rank) -> None:
    """One group reduces on a side stream, for which main waits; another gathers on a third, and main goes on."""
    first, second = rank.group(3), rank.group(1)
    main, side, third = rank.main, rank.side, FakeStream(rank.device, 2)
    for _ in rank.steps():
        grad = rank.empty(256)
        rank.kernel(grad)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            dist.all_reduce(grad, group=first)
        third.wait_stream(side)
        with torch.cuda.stream(third):
            whole = rank.empty(512)
            dist.all_gather_into_tensor(whole, grad, group=second)
        main.wait_stream(side)
        del grad
        activation = rank.empty(256)
        rank.kernel(activation)  # beside the second group, and not in memory that it reads
        main.wait_stream(third)
        rank.kernel(whole, activation)
        third.wait_stream(main)
        del whole, activation


# --- serving, and what is beside training ---------------------------------------------------------------------------


@workload
def decode_by_graphs(rank: Rank) -> None:
    """Graphs that share nothing are replayed on a side stream beside eager calls; each step makes one anew."""
    group, main, side = rank.group(3), rank.main, rank.side
    weight = rank.empty(512)
    dist.all_reduce(weight, group=group)  # makes the communicator

    def capture(nbytes: int) -> Any:
        cuda_graph, tokens, logits = torch.cuda.CUDAGraph(), rank.empty(nbytes), rank.empty(nbytes)
        with dist.graph(cuda_graph):
            hidden = rank.empty(nbytes)
            rank.kernel(tokens, weight, hidden)
            dist.all_reduce(hidden, group=group)
            work = dist.all_reduce(logits, group=group, async_op=True)
            rank.kernel(hidden)  # beside it
            work.wait()
        return cuda_graph, tokens  # logits, which a collective writes, are the graph's

    graphs = [capture(64), capture(128)]
    for step in rank.steps():
        for cuda_graph, tokens in graphs:
            rank.kernel(tokens)  # the batch is copied in
            side.wait_stream(main)
            with torch.cuda.stream(side):
                cuda_graph.replay()
            score = rank.empty(64)
            rank.kernel(score)
            work = dist.all_reduce(score, group=group, async_op=True)
            work.wait()
            rank.kernel(score)
            del score, work
        graphs[step % 2][0].reset()
        graphs[step % 2] = cuda_graph = tokens = None
        batch = rank.empty(64 << step % 2)
        rank.kernel(batch)  # may be what the graph has had
        main.wait_stream(side)
        del batch
        graphs[step % 2] = capture(64 << step % 2)


@workload
def arena_by_turns(rank: Rank) -> None:
    """Two buffers of an arena by turns, then a third on another stream, at the same places in each step."""
    group, main, side = rank.group(1), rank.main, rank.side
    arena = dist.Arena(2 * 512, full="raise")
    places = set()
    with dist.use_arena(arena):
        for _ in rank.steps():
            offsets: list[int] = []
            previous = None
            for _ in range(4):
                buffer = dist.empty(512, dtype=torch.uint8)
                rank.device.received(buffer)
                offsets.append(arena.offset(buffer))
                rank.kernel(buffer)
                work = dist.all_reduce(buffer, group=group, async_op=True)
                del buffer
                if previous is not None:
                    previous.wait()
                previous = work
                del work
            previous.wait()
            previous = None
            with torch.cuda.stream(side):
                buffer = dist.empty(512, dtype=torch.uint8)
                rank.device.received(buffer)
                offsets.append(arena.offset(buffer))
                rank.kernel(buffer)
                dist.all_reduce(buffer, group=group)
            del buffer
            main.wait_stream(side)
            places.add(tuple(offsets))
    expect(len(places) == 1, f"the same requests have got other places: {places}")
    arena.close()


@workload
def dropped_handles(rank: Rank) -> None:
    """Statistics whose handles and tensors are dropped, from two streams; a rest at the end of each step."""
    group, main, side = rank.group(3), rank.main, rank.side
    for _ in rank.steps():
        for _ in range(3):
            loss, total = rank.empty(64), rank.empty(256)
            rank.kernel(loss)
            dist.all_reduce(loss, group=group, async_op=True)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                dist.all_gather_into_tensor(total, loss, group=group, async_op=True)
            dist.isend(loss, 1, group=group)
            del loss, total
            activation = rank.empty(64)
            rank.kernel(activation)
            del activation
        rank.catch_up()
        dist.all_reduce(rank.empty(64), group=group)
        held = {hold.op for hold in dist.pending()} & {"all_reduce", "all_gather_into_tensor"}
        expect(not held, f"{held} are complete, and held after another call (S3)")
        expect(dist.drain() == 0 and dist.pending() == [], "all is complete, and drain() leaves something held (S3)")


@workload
def gloo_beside_nccl(rank: Rank) -> None:
    """Metrics are summed on the host and waited for a step later, beside gradients on the device."""
    group, host = rank.group(3), rank.group(2, Gloo)
    dist.isend(rank.on_host(64), 1, group=host)  # dropped, so it is held until drain(wait=True)
    previous = None
    for _ in rank.steps():
        grad = rank.empty(256)
        rank.kernel(grad)
        work = dist.all_reduce(grad, group=group, async_op=True)
        metrics = dist.all_reduce(rank.on_host(64), group=host, async_op=True)
        message = rank.on_host(128)
        sent = dist.isend(message, 1, group=host)
        del message
        table = [rank.on_host(64) for _ in range(3)]
        dist.all_gather(table, rank.on_host(64), group=host)
        del table
        if previous is not None:
            previous.wait()
        previous = metrics
        rank.on_host(128)
        work.wait()
        rank.kernel(grad)
        sent.wait()
        del grad, work, metrics, sent
    previous.wait()


def rounds_of(program: Callable[[Rank], None], seed: int, rounds: int) -> dict[str, Any]:
    """Run ``program`` so often, each time at another pace, until it fails; return what there is to say."""
    said: dict[str, Any] = {"workload": program.__name__, "seed": seed, "rounds": 0, "peak": 0, "by": "", "reason": ""}
    for number in range(rounds):
        rank = Rank(f"{seed}:{number}")
        try:
            rank.run(program)
        except Exception as error:
            where = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.name == program.__name__]
            reason = f"step {len(rank.peaks)}, line {where[-1:]}: {error}"
            return {**said, "rounds": number + 1, "by": type(error).__name__, "reason": reason[:600]}
        front.forget(rank.groups)
        said.update(rounds=number + 1, peak=max(rank.peaks))
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="Programs as users write them, on the simulated device.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "only", nargs="*", metavar="WORKLOAD[:MUTANT]",
        help="of these, and with what front_mutants.py breaks by that name",
    )  # fmt: skip
    options = parser.parse_args()
    import front_mutants
    import front_programs

    front_programs.quiet()
    workloads = {one.__name__: one for one in WORKLOADS}

    def run(name: str, mutant: str) -> dict[str, Any]:
        if mutant:
            front_mutants.MUTANTS[mutant][0]()
        return rounds_of(workloads[name], options.seed, options.rounds)

    failures = 0
    for one in options.only or workloads:
        name, _, mutant = one.partition(":")
        # In a fork, because a program that fails leaves something behind.
        said = front.forked(lambda name=name, mutant=mutant: run(name, mutant))
        said = said or {"workload": name, "by": "death", "reason": "the process has died"}
        failures += bool(said["by"])
        print(json.dumps(said), flush=True)
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
