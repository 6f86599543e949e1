"""The ledger's promises, on random programs against a simulated device.

A machine is a program that hypothesis writes: what a user may do with streams, tensors and handles, in any order. The
device checks S1 and S5 by itself, after every step and for every block that is free, because a free block can be handed
out at any moment. The other promises are asserted by the step that they are about.

That the machines can tell a wrong ledger from a right one is proved by mutants: ledgers with one rule broken, or with
handoffs or recorded uses that have one broken, each of which they have to catch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from device import Event
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from programs import Running, programs
from simulated import INDEX, FakeGraph, FakeGroup, Launched, SimulatedDevice, Violation, call, call_sync, routes_of

from safecomm import _torch
from safecomm.collectives.routes import Routes
from safecomm.core import refcounts
from safecomm.core.captures import CapturedGraph
from safecomm.core.drain import await_before_capture, drain_ledger
from safecomm.core.handoffs import Handoff, Handoffs
from safecomm.core.holds import Hold
from safecomm.core.ledger import CROWD, Ledger, WorkHold
from safecomm.core.recorded_uses import RecordedUse, RecordedUses
from safecomm.core.stream_order import Note, StreamOrder
from safecomm.core.streams import HOST
from safecomm.errors import CaptureBoundaryError, StaleGraphError

pytestmark = pytest.mark.usefixtures("quiet")

BYTES = st.sampled_from([64, 64, 128, 0])  # few sizes, so that freed memory is handed out again
PICK = st.integers(0, 5)
STREAM = st.integers(0, 3)
FATES = st.sampled_from(["", "", "", "", "", "late", "fails"])


class ProgramEvent:
    """An event of the program's, with what ``stream_methods`` keeps in it."""

    point: Event | None = None
    note: Note | None = None
    deceives = False  # it was recorded again, and nobody has told


class Programs(RuleBasedStateMachine):
    """Eager programs on one device with four streams, two NCCL groups and a gloo group."""

    ledger_type: type[Ledger] = Ledger
    nccl = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self.device = SimulatedDevice(streams=4)
        self.ledger = self.ledger_type(self.device)
        self.groups: list[FakeGroup] = []
        self.tensors: list[torch.Tensor] = []
        self.works: list[Launched] = []
        self.failed: set[str] = set()  # the works whose failure the program has seen
        self.homeless: set[str] = set()  # the calls that use memory which no stream orders
        self.kept: list[torch.Tensor] = []
        self.patience: float = 0
        self.events = [ProgramEvent() for _ in range(3)]
        self.deceived = False  # by an event that was recorded again past Python
        self.recorded: set[tuple[int, int, int, int]] = set()  # the block, its tenancy, the stream, and its capture

    @initialize(lag=st.integers(0, 3), budget=st.sampled_from([0, 128, 1 << 20]), shelved=st.booleans())
    def start(self, lag: int, budget: int, shelved: bool) -> None:
        self.patience = math.inf if lag == 3 else 0
        self.ledger = self.ledger_type(
            self.device, lag=lag, budget=budget, handoff_budget=budget, patience=self.patience
        )
        backends = (self.nccl, self.nccl, "gloo")
        self.groups = [FakeGroup(self.device, backend, shelved=shelved) for backend in backends]
        self.tensors = [self.device.allocate(stream, 64) for stream in self.device.streams if stream < 4]

    # Few rules with many choices: hypothesis spreads its programs evenly over rules, and launches and waits are what
    # matters.

    # --- tensors ------------------------------------------------------------------------------------------

    @rule(stream=st.sampled_from([0, 1, 2, 3, None]), nbytes=BYTES)
    def allocate(self, stream: int | None, nbytes: int) -> None:
        self.tensors.append(self.device.allocate(stream, nbytes))

    @rule(pick=PICK, how=st.sampled_from(["drop", "drop", "view", "free in place"]))
    def change(self, pick: int, how: str) -> None:
        if not self.tensors:
            return
        place = pick % len(self.tensors)
        if how == "drop":
            del self.tensors[place]
        elif how == "view":
            self.tensors[place] = self.tensors[place][:1]
        else:
            self.tensors[place].data = torch.empty(0, dtype=torch.uint8)

    def some_tensors(self, picks: list[int], last: bool) -> list[torch.Tensor]:
        """Return what a correct program can use here, and keep it unless this is its ``last`` use."""
        if not self.tensors:
            self.allocate(self.device.current(INDEX), 64)
        chosen = [self.tensors[n] for n in sorted({pick % len(self.tensors) for pick in picks})]
        if self.device.capturing and not self.device.here().capture:
            # What a capture allocates is not there yet for what runs.
            absent = self.device.capturing
            chosen = [t for t in chosen if all(block.capture != absent for block in self.device.blocks_of([t]))]
        if last:
            self.tensors = [tensor for tensor in self.tensors if all(tensor is not one for one in chosen)]
        return chosen

    def go_to(self, stream: int) -> None:
        """Make ``stream`` the current one."""
        self.device.switch(stream)

    # --- the device ---------------------------------------------------------------------------------------

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def run_device(self, picks: list[int]) -> None:
        for pick in picks:
            self.device.run(pick)

    @rule(waiting=STREAM, other=STREAM)
    def wait_stream(self, waiting: int, other: int) -> None:
        one, two = self.device.streams[waiting], self.device.streams[other]
        joins = one.capture == 0 and two.capture and waiting
        if one.capture == two.capture or joins:
            self.device.wait(one, two.past, two.capture)

    # --- calls --------------------------------------------------------------------------------------------

    @rule(
        stream=STREAM,
        to=st.sampled_from([0, 0, 1, 2]),
        picks=st.lists(PICK, min_size=1, max_size=2),
        last=st.booleans(),
        kind=st.sampled_from(["", "staged", "p2p"]),
        fate=FATES,
        keep=st.sampled_from([True, True, False]),
    )
    def launch(self, stream: int, to: int, picks: list[int], last: bool, kind: str, fate: str, keep: bool) -> None:
        self.go_to(stream)
        group = self.groups[to]
        if not group.can_launch() or not (tensors := self.some_tensors(picks, last)):
            return
        if group.backend == "gloo":
            kind = fate = ""
        p2p = kind == "p2p"
        launched = call(self.ledger, group, tensors, staged=kind == "staged", p2p=p2p, receives=p2p and last, fate=fate)
        self.used(tensors, group)
        if None in launched.alloc_streams:
            self.homeless.add(launched.op)
        if keep:
            self.works.append(launched)

    @rule(stream=STREAM, picks=st.lists(PICK, min_size=1, max_size=2), last=st.booleans())
    def launch_sync(self, stream: int, picks: list[int], last: bool) -> None:
        self.go_to(stream)
        if tensors := self.some_tensors(picks, last):
            op = call_sync(self.ledger, self.groups[0], tensors)
            self.used(tensors, self.groups[0])
            if any(block.alloc_stream is None for block in self.device.blocks_of(tensors)):
                self.homeless.add(op)

    def used(self, tensors: list[torch.Tensor], group: FakeGroup) -> None:
        """A collective of ``group`` was launched on ``tensors``."""

    # --- record_stream ------------------------------------------------------------------------------------

    @rule(stream=STREAM, pick=PICK, last=st.booleans(), order=st.sampled_from(["auto", "auto", "order", "defer"]))
    def use_and_record(self, stream: int, pick: int, last: bool, order: str) -> None:
        """A kernel of the program's own on another stream, and record_stream for it, once for many."""
        self.go_to(stream)
        for tensor in self.some_tensors([pick], last=False):
            storage = tensor.untyped_storage()
            (block,) = self.device.blocks_of([tensor]) or (None,)
            if block is None or block.alloc_stream is None:
                continue
            here = self.device.here()
            key = (id(block), block.tenancy, here.handle, here.capture)
            self.device.launch(here, [block])
            if key not in self.recorded and here.handle != block.alloc_stream:
                if not self.ledger.recorded_uses.add(storage, INDEX, here.handle, sys._getframe(), order):
                    assert not refcounts.COUNTED
                    self.kept.append(tensor.detach())  # by the allocator, which torch's own record_stream asks for it
                self.recorded.add(key)
            if last:
                self.tensors = [one for one in self.tensors if one is not tensor]

    # --- the program's events, of which stream_methods tells ---------------------------------------------------

    @rule(stream=STREAM, pick=st.integers(0, 2), seen=st.sampled_from([True, True, True, False]))
    def record_event(self, stream: int, pick: int, seen: bool) -> None:
        """torch.cuda.Event.record; not ``seen``: by C++, or in another process."""
        event = self.events[pick]
        note = event.note
        self.record(event, stream)
        event.deceives = not seen and note is not None
        if not seen:
            event.note = note

    @rule(stream=STREAM, pick=st.integers(0, 2))
    def wait_event(self, stream: int, pick: int) -> None:
        self.wait_for_event(stream, self.events[pick])

    def wait_for_event(self, stream: int, event: ProgramEvent) -> None:
        """torch.cuda.Event.wait, where CUDA allows it."""
        at, point = self.device.streams[stream], event.point
        joins = at.capture == 0 and stream and point and point.capture == self.device.capturing != 0
        if point is None or not (at.capture == point.capture or joins):
            return
        self.device.wait(at, point.past, point.capture)
        if event.note is not None:
            before = at.past
            self.ledger.stream_order.waited(INDEX, stream, event.note)
            self.deceived |= event.deceives  # and so is whoever waits for what is recorded behind it
            assert at.past == before or self.deceived, "a stream waits for more than the program has asked for"

    @rule(
        waiting=STREAM,
        other=STREAM,
        third=STREAM,
        use=st.sampled_from(["none", "collective", "record_stream"]),
        how=st.sampled_from(
            ["at once", "at once", "a use between", "too early", "recorded again", "past Python", "by way of"]
        ),
    )
    def order(self, waiting: int, other: int, third: int, use: str, how: str) -> None:
        """One stream waits for another by an event, of which stream_methods tells; "at once" is wait_stream()."""
        event = ProgramEvent()
        if use == "collective":
            self.launch_sync(other, [third], last=True)
        elif use == "record_stream":
            self.use_and_record(other, third, last=False, order="auto")
        if how != "too early":
            self.record(event, other)
        if how == "a use between":
            self.launch_sync(other, [third], last=True)
            self.use_and_record(other, third, last=True, order="auto")
        elif how == "recorded again":
            self.record(event, third)
        elif how == "past Python":
            at = self.device.streams[third]
            event.point, event.deceives = Event(at.past, at.capture), event.note is not None
        elif how == "by way of":
            self.wait_for_event(third, event)
            self.record(event, third)
        self.wait_for_event(waiting, event)
        if how == "too early":
            self.record(event, other)

    def record(self, event: ProgramEvent, stream: int) -> None:
        at = self.device.streams[stream]
        event.note = self.ledger.stream_order.recorded(INDEX, stream)
        event.point = Event(at.past, at.capture)

    @rule(pick=PICK, order=st.booleans())
    def free_storage(self, pick: int, order: bool) -> None:
        """resize_(0) of what only record_stream protects: the memory is gone, whoever refers to it."""
        if not self.tensors:
            return
        tensor = self.tensors[pick % len(self.tensors)]
        storage = tensor.untyped_storage()
        if not self.ledger.recorded_uses.by_storage.get(storage._cdata):
            return
        if any(entry.op != "record_stream" for entry in self.holding(storage)):
            return  # a collective's: nothing in Python survives that, and no correct program does it
        left = self.ledger.recorded_uses.freeing(storage, order=order)
        self.ledger.recorded_uses.freed(storage)
        assert not self.holding(storage)
        if left:
            self.kept.append(tensor.detach())  # by the allocator, until the device is over with it
        else:
            self.tensors = [one for one in self.tensors if one.untyped_storage()._cdata != storage._cdata]

    def holding(self, storage: torch.UntypedStorage) -> list[Any]:
        """Return the holds of ``storage``."""
        holds = [hold for queue in self.ledger.nonempty for hold in queue.holds]
        return [hold for hold in holds if any(one._cdata == storage._cdata for one in hold.storages)]

    # --- handles ------------------------------------------------------------------------------------------

    @rule(
        stream=STREAM,
        pick=PICK,
        how=st.sampled_from(["wait", "wait", "wait", "synchronize", "block_current_stream"]),
        last=st.booleans(),
    )
    def wait(self, stream: int, pick: int, how: str, last: bool) -> None:
        self.go_to(stream)
        if not self.works:
            return
        launched = self.works[pick % len(self.works)]
        inner = launched.inner
        if how != "wait" and inner.fate and inner.group.backend == "nccl":
            return  # only wait() reports a failure
        if last:
            self.works.remove(launched)
        here = self.device.here()
        crosses = here.capture != launched.capture
        home = launched.alloc_streams <= {here.handle} and launched.op in self.held(
            "in flight"
        )  # no wait elsewhere before
        alone = self.held() == {launched.op} and not inner.staging
        before = self.device.calls.copy()
        try:
            getattr(launched.work, how)()
        except CaptureBoundaryError:
            assert self.device.capturing or launched.capture, "S5: refused a wait that crosses no capture boundary"
            return
        except RuntimeError:
            if inner.fate and launched.op in self.held():  # else it has only timed out, or a drain has found out
                self.failed.add(launched.op)
            return
        assert not crosses, "S5: let a wait cross a capture boundary"
        if how != "wait" and inner.group.backend == "nccl2" and not inner.is_success():
            if launched.op in self.held():
                self.failed.add(launched.op)
            return
        if home and (how == "wait" or inner.group.backend != "gloo"):
            if alone:
                assert self.device.calls == before, "S2: asked the device for more than the wait"
            assert launched.op not in self.held(), "S2: still held after a wait on the stream of its memory"

    @rule(stream=STREAM, kind=st.sampled_from(["", "staged", "p2p"]), last=st.booleans())
    def launch_many_and_wait_for_one(self, stream: int, kind: str, last: bool) -> None:
        """What Megatron and DeepSpeed do: the last of many is the only one that is waited for."""
        for _ in range(3):
            self.launch(stream, 0, [0], last, kind, "", keep=True)
        self.wait(stream, len(self.works) - 1, "wait", last)
        del self.works[-2:]

    @rule(pick=PICK, how=st.sampled_from(["drop", "is_completed", "get_future"]))
    def use_handle(self, pick: int, how: str) -> None:
        if not self.works:
            return
        place = pick % len(self.works)
        if how == "drop":
            del self.works[place]
        elif how == "get_future":
            with contextlib.suppress(CaptureBoundaryError):
                self.works.pop(place).work.get_future()
        elif not self.device.capturing and not self.works[place].capture:  # CUDA would not allow it
            self.works[place].work.is_completed()

    # --- the ledger ---------------------------------------------------------------------------------------

    def held(self, *states: str) -> set[str]:
        """Return the calls that the ledger holds something for."""
        return {entry.op for entry in self.ledger.pending() if not states or entry.state in states}

    @rule(how=st.sampled_from(["sweep", "sweep", "drain", "drain and wait", "all is over"]))
    def use_ledger(self, how: str) -> None:
        if how == "sweep":
            self.ledger.sweep()
        elif how == "drain":
            drain_ledger(self.ledger)
        elif how == "drain and wait":
            self.drain_and_wait()
        else:
            self.all_is_over()

    def drain_and_wait(self) -> None:
        idle = itertools.count(1)

        def sleep(_: float) -> None:
            if not self.device.run():
                self.device.finish()  # what hangs ends when its group is aborted
                assert next(idle) < 10, "S3: drain(wait=True) waits for what is over"

        if self.device.here().capture:
            try:
                drain_ledger(self.ledger, wait=True)
            except CaptureBoundaryError:
                pass
            else:
                assert not self.held("in flight", "handed off"), "S5: waits inside a capture"
        elif not self.device.capturing:
            with mock.patch("safecomm.core.drain.time.sleep", sleep):
                assert drain_ledger(self.ledger, wait=True) == 0, "S3: drain(wait=True) left something"
            assert self.held() <= {"record_stream"}, "S3: drain(wait=True) left something"
            assert not self.held("in flight", "handed off"), "S3: drain(wait=True) left something"
            self.failed.clear()

    def all_is_over(self) -> None:
        if self.device.capturing:
            return  # nobody can know
        self.device.finish()
        self.ledger.sweep()
        # Works on memory that no stream orders become handoffs when they are complete, which look at the device again.
        assert self.held("in flight") <= self.awaited(), "S3: still held although all is over"
        assert self.held("handed off") <= self.homeless, "S3: still held although all is over"
        self.ledger.sweep()
        assert self.held("in flight", "handed off") <= self.awaited(), "S3: still held although all is over"

    def awaited(self) -> set[str]:
        """Return the works that the ledger need not ask whether they are over."""
        return {launched.op for launched in self.works} if self.patience else set()

    # --- always -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_unsafe_is_free(self) -> None:
        self.device.settle()
        assert not self.device.faults, self.device.faults

    @invariant()
    def what_failed_is_kept(self) -> None:
        assert not self.failed or self.failed <= self.held(), "S4: released after a failure"

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            if self.device.capturing:
                self.device.end_capture()
            self.all_is_over()
            self.drain_and_wait()
            self.works.clear()
            self.tensors.clear()
            for group in self.groups:
                group.shelves.clear()
            self.kept.clear()
            self.ledger.sweep()
            self.nothing_unsafe_is_free()
            assert not self.device.live(), "S3: leaked"


class CapturingPrograms(Programs):
    """The same with graph captures, one at a time."""

    def go_to(self, stream: int) -> None:
        """Make ``stream`` the current one; during a capture rather one that takes part in it."""
        members = [handle for handle in range(4) if self.device.capture(handle)]
        self.device.switch(members[stream % len(members)] if members and stream != 3 else stream)

    @rule(picks=st.lists(PICK, min_size=1, max_size=2), other=STREAM)
    def fork_and_join(self, picks: list[int], other: int) -> None:
        """Go from the current stream to another one and back, as a capture has to."""
        here = self.device.current(INDEX)
        if here != other:
            self.order(other, here, 0, "none", "at once")
            self.launch_sync(other, picks, last=True)
            self.order(here, other, 0, "none", "at once")

    @rule(stream=st.integers(1, 3))
    def capture(self, stream: int) -> None:
        if self.device.capturing:
            self.device.end_capture()
        else:
            self.device.begin_capture(stream)


class Nccl2Programs(CapturingPrograms):
    """The same with ProcessGroupNCCL2's rules."""

    nccl = "nccl2"


class GraphPrograms(CapturingPrograms):
    """The same with graphs that are seen to be captured, replayed, reset, and that die."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[tuple[FakeGraph, CapturedGraph]] = []
        self.freed = False  # a tensor was freed in place, which may have been an argument of a captured call
        self.recording: tuple[FakeGraph, CapturedGraph] | None = None

    @rule(stream=st.integers(1, 3))
    def capture(self, stream: int) -> None:
        if self.device.capturing:
            self.end_capture()
            return
        self.device.begin_capture(stream)
        capture = self.device.capturing
        graph = FakeGraph(self.device)
        captured = CapturedGraph(self.ledger, graph, (capture,), [], INDEX, stream, capture, sys._getframe())
        self.recording = graph, captured

    def end_capture(self) -> None:
        assert self.recording is not None
        capture = self.device.capturing
        self.ledger.sweep()
        self.ledger.join_unwaited(capture, self.recording[1].stream)
        self.device.end_capture()
        self.ledger.end_capture(capture)
        self.recording[1].seal()
        self.graphs.append(self.recording)
        self.recording = None
        # Its works are no longer to be waited for: they stand for nothing that runs.
        self.works = [launched for launched in self.works if launched.capture != capture]

    def used(self, tensors: list[torch.Tensor], group: FakeGroup) -> None:
        if self.recording is not None and self.device.here().capture:
            graph, captured = self.recording
            graph.touch(self.device.blocks_of(tensors))
            for tensor in tensors:
                captured.add("a collective", group, tensor, sys._getframe())

    @rule(pick=PICK, how=st.sampled_from(["drop", "drop", "view", "free in place"]))
    def change(self, pick: int, how: str) -> None:
        self.freed |= how == "free in place"
        super().change(pick, how)

    @rule(stream=STREAM, pick=PICK)
    def replay(self, stream: int, pick: int) -> None:
        if self.graphs and not self.device.capturing:
            self.device.switch(stream)
            try:
                self.graphs[pick % len(self.graphs)][0].replay()
            except StaleGraphError:
                assert self.freed, "S6: refused to replay a graph whose arguments are where they were"

    @rule(pick=PICK, how=st.sampled_from(["reset", "dies"]))
    def end_graph(self, pick: int, how: str) -> None:
        if self.graphs:
            graph, _ = self.graphs.pop(pick % len(self.graphs))
            if how == "reset":
                graph.reset()

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            if self.device.capturing:
                self.end_capture()
            self.graphs.clear()
        elif self.recording is not None:
            self.recording[1]._end()
        super().teardown()


class HostPrograms(RuleBasedStateMachine):
    """Programs on the CPU with gloo, where no stream orders anything: memory is safe when the work is over."""

    ledger_type: type[Ledger] = Ledger

    def __init__(self) -> None:
        super().__init__()
        self.device = SimulatedDevice(streams=1)
        self.ledger = self.ledger_type(self.device, patience=0)
        self.group = FakeGroup(self.device, "gloo")
        self.tensors: list[torch.Tensor] = []
        self.works: list[Launched] = []
        self.blind: set[str] = set()  # sends and receives, which don't tell when they are over

    @rule(nbytes=BYTES)
    def allocate(self, nbytes: int) -> None:
        self.tensors.append(self.device.allocate(None, nbytes))

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def run_threads(self, picks: list[int]) -> None:
        for pick in picks:
            self.device.run(pick)

    @rule(
        picks=st.lists(PICK, min_size=1, max_size=2),
        last=st.booleans(),
        p2p=st.booleans(),
        fate=st.sampled_from(["", "", "late", "fails"]),
        keep=st.sampled_from([True, True, False]),
    )
    def launch(self, picks: list[int], last: bool, p2p: bool, fate: str, keep: bool) -> None:
        if not self.tensors:
            self.allocate(64)
        places = sorted({pick % len(self.tensors) for pick in picks})
        tensors = [self.tensors[place] for place in places]
        launched = call(self.ledger, self.group, tensors, p2p=p2p, fate=fate, index=HOST)
        if last:
            for place in reversed(places):
                del self.tensors[place]
        if p2p:
            self.blind.add(launched.op)
        if keep:
            self.works.append(launched)

    @rule(p2p=st.booleans(), fate=st.sampled_from(["", "late", "fails"]), drop=st.booleans())
    def launch_and_wait(self, p2p: bool, fate: str, drop: bool) -> None:
        self.launch([0], True, p2p, fate, keep=True)
        self.wait(self.works[-1])
        if drop:
            del self.works[-1]

    @rule(pick=PICK, how=st.sampled_from(["wait", "wait", "drop", "is_completed"]))
    def use_handle(self, pick: int, how: str) -> None:
        if not self.works:
            return
        launched = self.works[pick % len(self.works)]
        if how == "drop":
            self.works.remove(launched)
        elif how == "is_completed":
            launched.work.is_completed()
        else:
            self.wait(launched)

    def wait(self, launched: Launched) -> None:
        fate = launched.inner.fate  # which is over when it has timed out
        try:
            launched.work.wait()
        except RuntimeError:
            assert fate, "S8: a wait raises for a work that is well"
        else:
            assert launched.op not in self.held(), "S2: still held after a wait"

    def held(self) -> set[str]:
        return {entry.op for entry in self.ledger.pending()}

    @rule(how=st.sampled_from(["sweep", "drain and wait", "all is over"]))
    def use_ledger(self, how: str) -> None:
        if how == "drain and wait":
            self.drain_and_wait()
            return
        if how == "all is over":
            self.device.finish()
        self.ledger.sweep()
        if how == "all is over":
            assert self.held() <= self.blind, "S3: still held although all is over"

    def drain_and_wait(self) -> None:
        def sleep(_: float) -> None:
            assert self.device.run(), "S3: drain(wait=True) waits for what is over"

        with mock.patch("safecomm.core.drain.time.sleep", sleep):
            assert drain_ledger(self.ledger, wait=True) == 0, "S3: drain(wait=True) left something"

    @invariant()
    def nothing_unsafe_is_free(self) -> None:
        self.device.settle()
        assert not self.device.faults, self.device.faults

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.drain_and_wait()
            self.works.clear()
            self.tensors.clear()
            self.nothing_unsafe_is_free()
            assert not self.device.live(), "S3: leaked"


STEPS = 30
COUNTS = {Programs: 400, CapturingPrograms: 450, Nccl2Programs: 200, GraphPrograms: 400, HostPrograms: 200}


@pytest.fixture(scope="module")
def running() -> Iterator[dict[type[RuleBasedStateMachine], Running]]:
    running = {machine: Running(machine, count, STEPS) for machine, count in COUNTS.items()}
    yield running
    for one in running.values():
        one.close()


@pytest.mark.parametrize("machine", COUNTS)
def test_random_programs_s1_s2_s3_s4_s5(running: Any, machine: type[RuleBasedStateMachine]) -> None:
    """S1 to S5: no random program breaks a promise."""
    running[machine].check()


# --- the proof that the machines bite -----------------------------------------------------------------------


# With names of private methods: where one is renamed, its mutant has to follow.


class ReleasesWherever(Ledger):
    """Takes a wait on any stream for a wait on the allocation stream."""

    def _release_waited(self, work):
        self.release(work)


class NeverReleases(Ledger):
    """Lets no work go."""

    kind: type[Hold] = WorkHold

    def release(self, hold):
        if isinstance(hold, self.kind):
            self.kept = [*getattr(self, "kept", []), hold.storages]
        super().release(hold)


class NeverReleasesHandoffs(NeverReleases):
    """Lets no handoff go."""

    kind = Handoff


class NeverReleasesRecordedUses(NeverReleases):
    """Lets no recorded use go."""

    kind = RecordedUse


class LeavesItToTheHandle(Ledger):
    """Holds nothing itself, so that memory goes with the handle."""

    def __init__(self, streams, **how):
        super().__init__(streams, **how)
        vars(self)["routes"] = HoldsNothing(self)


class HoldsNothing(Routes):
    def of(self, *args, **how):
        route = super().of(*args, **how)
        route.holds = Emptiness()
        return route


class Emptiness(OrderedDict):
    def __setitem__(self, hold, _):
        pass


class ReleasesAllBefore(Ledger):
    """Believes that all works end in the order in which they were made."""

    believes = False

    def waited(self, work):
        work.queue.ordered = self.believes = True
        super().waited(work)
        self.believes = False

    def _wait_here(self, work):
        return self.believes or super()._wait_here(work)


class OrdersNothing(Ledger):
    """Releases works by rule 3 without ordering anything."""

    def _order_and_release(self, work, **_):
        self.release(work)


class ForgetsFailures(Ledger):
    """Releases what failed."""

    def is_idle(self, hold):
        return True


class ForgetsStaging(Ledger):
    """Leaves c10d's staging to c10d."""

    def guard_staging(self, work):
        pass


class QueriesInCaptures(Ledger):
    """Does not know that it is in a capture."""

    def _capturing(self, queues):
        return 0


class CrossesCaptures(Ledger):
    """Lets any wait through."""

    def check_boundary(self, work):
        pass


class IgnoresCapturesElsewhere(Ledger):
    """Does not see that a stream which a release would order is being captured."""

    def captured_now(self, hold, streams=None):
        return False


class PollsConnections(Ledger):
    """Waits for sends and receives as often as it likes."""

    def holds(self, group=None):
        found = super().holds(group)
        for hold in found:
            if isinstance(hold, WorkHold) and not hold.queue.pollable:
                with contextlib.suppress(RuntimeError):
                    hold.inner.wait()
        return found


class HoldsNoLease(Ledger):
    """Thinks that all memory is the graph's pool."""

    def __init__(self, streams, **how):
        super().__init__(streams, **how)
        streams.pool = lambda pointer: (streams.capturing,)


class HandoffsOrderNothing(Handoffs):
    """Releases handoffs and recorded uses by rule 3 without ordering anything."""

    def order_and_release(self, hold, **_):
        self._rules.release_all([hold])
        return set()


class FreesLeasesAtOnce(Handoffs):
    """Does not wait for the last replay."""

    def add_leftover(self, *_):
        pass


class ForgetsRecordedUses(RecordedUses):
    """Takes record_stream() for nothing."""

    def add(self, storage, index, stream, frame, release_by="auto"):
        return True


class TakesARecordForTheEnd(RecordedUses):
    """Takes an event for the end of each use before it, although somebody else still uses the memory."""

    def _only_recorded(self, hold):
        return True


class TakesLaterUsesForEarlierOnes(StreamOrder):
    """Takes a use behind the event, such as another thread's, for one before it."""

    def recorded(self, index, stream):
        note = super().recorded(index, stream)
        return note and (note[0], dict.fromkeys(note[1], sys.maxsize))


class TakesAWaitForALaterRecord(StreamOrder):
    """Takes a wait for one that comes after whatever is recorded later."""

    def waited(self, index, stream, note):
        super().waited(index, stream, note)
        now = self._streams.capture(stream)
        known = self._known((stream, index), now)
        self._behind[stream, index] = now, {**known, **dict.fromkeys(note[1], sys.maxsize)}


class BelievesTheNote(StreamOrder):
    """Orders nothing itself: what an event that was recorded again is behind, it does not know."""

    def _release(self, queue, serial, waiting):
        with mock.patch.object(self._streams, "wait_event"):
            return super()._release(queue, serial, waiting)


class ReleasesForAnyStream(StreamOrder):
    """Does not care which stream waits."""

    def _release(self, queue, serial, waiting):
        for hold in list(queue.holds):
            if hold.event is not None and hold.serial < serial:
                self._rules.release(hold)
        return False


class ForgetsRecordingAgain(StreamOrder):
    """Thinks that an event is where it was first recorded as well."""

    def __init__(self, *given):
        super().__init__(*given)
        self.all = {}

    def recorded(self, index, stream):
        capture, known = super().recorded(index, stream) or (self._streams.capture(stream), {})
        self.all = {**self.all, **known}
        return (capture, self.all) if self.all else None


class OrdersAcrossCaptures(StreamOrder):
    """Takes what is captured for ordered after what runs."""

    def _queues(self, used_on, capture):
        return super()._queues(used_on, capture) + super()._queues(used_on, 0)


class FreesWithoutOrder(RecordedUses):
    """Lets memory that frees itself go at once."""

    def freeing(self, storage, *, order=True):
        return []


def ledger_with(broken: type) -> type[Ledger]:
    """Return a ledger one part of which is ``broken``."""

    class Broken(Ledger):
        def __init__(self, streams, **how):
            super().__init__(streams, **how)
            if issubclass(broken, StreamOrder):
                self.stream_order = broken(self, self.handoffs, self.recorded_uses)
                return
            part = self.handoffs if issubclass(broken, Handoffs) else self.recorded_uses
            part.__class__ = broken

    return Broken


@pytest.mark.parametrize(
    ("broken", "machine"),
    [
        (ReleasesWherever, Programs),
        (NeverReleases, Programs),
        (NeverReleases, HostPrograms),
        (NeverReleasesHandoffs, Programs),
        (NeverReleasesRecordedUses, Programs),
        (LeavesItToTheHandle, Programs),
        (LeavesItToTheHandle, HostPrograms),
        (ReleasesAllBefore, Programs),
        (OrdersNothing, Programs),
        (OrdersNothing, CapturingPrograms),
        (HandoffsOrderNothing, Programs),
        (HandoffsOrderNothing, CapturingPrograms),
        (ForgetsFailures, Programs),
        (ForgetsFailures, HostPrograms),
        (ForgetsStaging, Programs),
        (QueriesInCaptures, CapturingPrograms),
        (CrossesCaptures, CapturingPrograms),
        (IgnoresCapturesElsewhere, CapturingPrograms),
        (PollsConnections, HostPrograms),
        (ForgetsRecordedUses, Programs),
        (TakesARecordForTheEnd, Programs),
        (TakesLaterUsesForEarlierOnes, Programs),
        (TakesAWaitForALaterRecord, Programs),
        (BelievesTheNote, Programs),
        (ReleasesForAnyStream, Programs),
        (ForgetsRecordingAgain, Programs),
        (OrdersAcrossCaptures, CapturingPrograms),
        (FreesWithoutOrder, Programs),
        (FreesLeasesAtOnce, GraphPrograms),
        (HoldsNoLease, GraphPrograms),
    ],
)
def test_machine_catches_a_ledger_that(broken: type, machine: type[RuleBasedStateMachine]) -> None:
    """S1 to S5 are really tested: a ledger with one rule broken does not get through."""
    ledger = broken if issubclass(broken, Ledger) else ledger_with(broken)

    def search() -> None:
        for number in range(3, 23):  # programs of one seed have much in common
            mutant = seed(number)(type(machine.__name__, (machine,), {"ledger_type": ledger}))
            run_state_machine_as_test(mutant, settings=programs(300, STEPS, phases=[Phase.generate]))

    with pytest.raises(AssertionError):
        search()


# --- single promises ----------------------------------------------------------------------------------------


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def group(device: SimulatedDevice) -> FakeGroup:
    return FakeGroup(device, "nccl", shelved=True)


def test_calls_take_the_long_way_for_as_long_as_anybody_wants_them_to(device: SimulatedDevice) -> None:
    ledger, group = Ledger(device), object()
    lanes: Any = {id(group): SimpleNamespace(its_group=lambda: group)}
    routes_of(ledger).fast.update(lanes)
    with routes_of(ledger).off():
        with routes_of(ledger).off():
            assert not routes_of(ledger).fast
        assert not routes_of(ledger).fast
    assert routes_of(ledger).fast == lanes


def test_a_route_whose_group_dies_as_it_is_moved_is_nobodys_s1(device: SimulatedDevice) -> None:
    """Another group may get its id, and would be launched on the backend of the dead one."""
    routes = routes_of(Ledger(device))
    dead: Any = SimpleNamespace(its_group=lambda: None)
    routes.fast[7] = dead
    with routes.off():
        assert not routes.fast
    assert not routes.fast


def test_the_backend_of_a_group_that_died_is_not_kept_by_a_handle_s7(device: SimulatedDevice) -> None:
    """It has threads and connections, which would go on."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(0, 64)])
    route: Any = launched.work.queue
    route.backend = object()
    launched.inner.group = None
    del group
    assert route.its_group() is None
    assert route.backend is None
    device.finish()


def test_in_a_capture_nothing_is_asked_of_what_another_thread_has_just_launched_s5(device, group, monkeypatch) -> None:
    ledger = Ledger(device, patience=0)
    gloo = FakeGroup(device, "gloo")
    call(ledger, gloo, [device.allocate(None, 64)], index=HOST)
    before_asking = device.relaxed_capture_mode

    def launches() -> Any:
        monkeypatch.setattr(device, "relaxed_capture_mode", before_asking)
        device.switch(0)
        call(ledger, group, [device.allocate(0, 64)])
        device.switch(1)
        return before_asking()

    device.begin_capture(1)
    monkeypatch.setattr(device, "relaxed_capture_mode", launches)
    ledger.sweep()
    assert device.faults == []


@pytest.mark.parametrize("stream", [0, 2])
def test_ordinary_program_needs_one_block_and_asks_nothing_s2(device, group, stream) -> None:
    """S2: allocated, launched and waited on one stream, memory is back at the wait, and nobody was asked."""
    ledger = Ledger(device)
    device.switch(stream)
    for _ in range(100):
        tensor = device.allocate(stream, 64)
        launched = call(ledger, group, [tensor])
        launched.work.wait()
        assert not ledger.nonempty
        del tensor, launched
    assert len(device.blocks) == 1, "peak memory is that of one step"
    assert not device.calls


@pytest.mark.parametrize("p2p", [False, True])
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    lag=st.integers(0, 5),
    budget=st.sampled_from([0, 100, 1000]),
)
def test_what_nobody_waits_for_is_bounded_on_a_device_that_never_runs_s3(sizes, lag, budget, p2p) -> None:
    """Rule 3: however far the host is ahead, a lane of dropped works is no larger than its budget and a few entries."""
    device = SimulatedDevice()
    group = FakeGroup(device, "nccl")
    ledger = Ledger(device, lag=lag, budget=budget)
    for size in sizes:
        call(ledger, group, [device.allocate(0, size)], p2p=p2p)
        device.settle()
        assert drain_ledger(ledger) <= budget + (lag + 1) * max(sizes)


def test_dropped_handle_is_reported_once_per_line_s3(device, group, caplog) -> None:
    """S3: a handle dropped without a wait is safe, and reported once for each call site, with that call site."""
    caplog.set_level(logging.WARNING, "safecomm")
    ledger = Ledger(device)
    for _ in range(3):
        call(ledger, group, [device.allocate(0, 64)])
    device.finish()
    ledger.sweep()
    assert not ledger.pending()
    assert [record for record in caplog.records if Path(__file__).name in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1


@pytest.mark.parametrize("memory", [0, 1])
def test_memory_of_a_graph_does_not_grow_with_its_layers_s5(device, group, memory) -> None:
    """S5: in a capture, what is used on a side stream comes back by an edge of the graph."""
    ledger = Ledger(device)
    blocks = []
    for layers in (4, 64):
        device.begin_capture(1)
        before = len(device.blocks)
        for _ in range(layers):
            device.wait(device.streams[2], device.here().past, device.here().capture)
            device.switch(1 + memory)
            tensor = device.allocate(1, 64)
            if memory:
                call_sync(ledger, group, [tensor])
            else:
                call(ledger, group, [tensor]).work.wait()
            device.switch(1)
            del tensor
            ledger.sweep()
        device.end_capture()
        blocks.append(len(device.blocks) - before)
    assert blocks[0] == blocks[1], f"blocks of 4 and of 64 layers: {blocks}"


@pytest.mark.parametrize("patience", [0, math.inf])
def test_a_call_takes_constant_time_however_many_works_are_in_flight_s10(device, group, patience) -> None:
    """S10: with 10,000 works in flight, a call does as much as with 100."""
    group.shelved = False  # c10d's own bookkeeping is not what is measured
    ledger = Ledger(device, patience=patience)
    tensor = device.allocate(0, 64)
    kept = [call(ledger, group, [tensor]) for _ in range(100)]
    few = calls_in(lambda: kept.append(call(ledger, group, [tensor])))
    kept += [call(ledger, group, [tensor]) for _ in range(9_900)]
    many = calls_in(lambda: kept.append(call(ledger, group, [tensor])))
    # Not equal to the last call: a garbage collection may fall into either.
    assert many <= 1.2 * few, f"{few} calls of functions with 100 works, {many} with 10,000"


def calls_in(step: Callable[[], object]) -> int:
    """Return how many functions ``step`` calls: a measure that a busy machine does not change."""
    count = 0

    def tally(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def test_one_that_never_ends_keeps_no_other_s3(device) -> None:
    """S3: behind a point-to-point work that is not over, all that is over is given back by the next call."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    stuck = call(ledger, group, [device.allocate(0, 64)], p2p=True)  # one peer's; the others' go to the next
    while device.run():
        pass
    with mock.patch.object(stuck.inner, "is_completed", return_value=False):
        for _ in range(20):
            call(ledger, group, [device.allocate(0, 64)], p2p=True)
        while device.run():
            pass
        ledger.sweep()
        assert [entry.op for entry in ledger.pending()] == [stuck.op]


@pytest.mark.parametrize("kept", [1, 8, 30])
def test_what_is_dropped_does_not_pile_up_behind_kept_handles_s3(device, group, kept) -> None:
    """S3: dropped works come back at the next call also behind kept ones, which the ledger does not ask."""
    ledger = Ledger(device, patience=math.inf)
    handles = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(kept)]
    for _ in range(100):
        device.finish()
        call(ledger, group, [device.allocate(0, 1 << 20)])
        assert sum(entry.nbytes for entry in ledger.pending()) <= (2 << 20) + 64 * kept
    assert len(handles) == kept


def test_a_crowd_is_asked_whoever_has_the_handles_s3(device, group) -> None:
    """S3: works that are over do not pile up because their handles are kept for a while."""
    ledger = Ledger(device, patience=math.inf)
    handles = []
    for _ in range(300):
        device.finish()
        handles.append(call(ledger, group, [device.allocate(0, 64)]))
        assert len(ledger.pending()) <= CROWD + 2


@pytest.mark.parametrize("patience", [0, math.inf])
def test_a_dropped_handle_is_told_from_a_kept_one_when_the_interpreter_is_warm_s3(device, patience) -> None:
    """S3: the ledger counts references, and the interpreter counts them differently in code that has run often."""
    ledger, group = Ledger(device, patience=patience), FakeGroup(device, "nccl")
    for number in range(300):
        launched = call(ledger, group, [device.allocate(0, 64)], p2p=number % 3 == 0)
        kept = launched.work if number % 2 else None
        del launched
        while device.run():
            pass
        ledger.dropped_at.clear()
        ledger.sweep()
        assert bool(ledger.dropped_at) == (kept is None), number
        assert bool(ledger.pending()) == (kept is not None and patience > 0), "S3: held although nobody will wait"
        if kept is not None:
            kept.wait()


def test_waiting_for_the_oldest_of_a_lane_releases_that_one_s2(device) -> None:
    """S2: at once, by the short way of the ordinary program; S1: what is behind it stays held."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    launched = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(3)]
    with mock.patch.object(ledger, "waited", side_effect=AssertionError("the long way")):
        for left in (2, 1, 0):
            launched.pop(0).work.wait()
            assert [entry.op for entry in ledger.pending()] == [one.op for one in launched]
            assert bool(ledger.nonempty) == bool(left)
            device.settle()


@pytest.mark.parametrize(("timeout", "profiled", "asked"), [
    (None, False, ["block_current_stream"]),
    (None, True, ["wait", "block_current_stream"]),
    (timedelta(seconds=1), False, ["wait", "block_current_stream"]),
])  # fmt: skip
def test_where_a_wait_only_blocks_a_stream_it_is_asked_for_no_more_s10(device, timeout, profiled, asked) -> None:
    """And S8: with a timeout the host blocks, and a profiler sees the wait."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(0, 64)])
    launched.work.queue.wait_is_stream_order = True
    calls = []
    for name in ("wait", "block_current_stream"):
        method = getattr(launched.inner, name)
        setattr(launched.inner, name, lambda *args, name=name, method=method: (calls.append(name), method(*args))[1])
    with mock.patch.object(_torch.profiler, "_is_profiler_enabled", profiled):
        assert launched.work.wait(timeout) is True
    assert calls == asked
    assert ledger.pending() == []
    device.settle()


@pytest.mark.parametrize("how", ["wait with a timeout", "a later wait", "is_completed", "a sweep", "twice"])
def test_a_failed_work_fails_at_each_wait_where_waits_only_block_streams_s4(device, how) -> None:
    """S4: and S8: NCCL's wait() raises for a work that is known to have failed, and block_current_stream() does not."""
    ledger, group = Ledger(device, patience=0), FakeGroup(device, "nccl")
    launched = call(ledger, group, [device.allocate(0, 64)], fate="fails")
    launched.work.queue.wait_is_stream_order = True
    if how == "wait with a timeout":
        with pytest.raises(RuntimeError, match="failed"):
            launched.work.wait(timedelta(seconds=1))
    elif how == "a later wait":
        later = call(ledger, group, [device.allocate(0, 64)])
        later.work.wait()
    elif how in ("is_completed", "a sweep"):
        device.switch(1)
        with mock.patch.object(ledger, "captured_now", return_value=True):  # another thread captures it
            ledger.sweep() if how == "a sweep" else launched.work.is_completed()
        device.switch(0)
    else:
        launched.work.synchronize()
        assert ledger.pending() == []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed"):
            launched.work.wait()
    assert [entry.state for entry in ledger.pending()] == ([] if how == "twice" else ["quarantined"])


@pytest.mark.parametrize(("home", "elsewhere"), [(0, 1), (1, 0), (1, 2)])
def test_a_work_alone_in_its_lane_is_not_released_by_a_wait_elsewhere_s1(device, home, elsewhere) -> None:
    """S1: the short way of the ordinary program is not taken where the waiting stream is not the memory's own."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl")
    device.switch(home)
    launched = call(ledger, group, [device.allocate(home, 64)])
    device.switch(elsewhere)
    launched.work.wait()
    assert [entry.state for entry in ledger.pending()] == ["handed off"]
    del launched
    device.settle()  # raises if the memory could be handed out now


def test_a_stream_that_waits_because_too_much_is_behind_lets_the_next_collective_go_first(device) -> None:
    """Else the kernels that it starts, where one collective ends, are in the way of the next one each time."""
    ledger, group = Ledger(device, handoff_budget=1600), FakeGroup(device, "nccl")
    for number in range(60):
        tensor = device.allocate(0, 100)
        device.switch(1)
        call_sync(ledger, group, [tensor])
        device.switch(0)
        del tensor
        assert sum(entry.nbytes for entry in ledger.pending()) == min(100 * (number + 1), 1700), "S3"
        assert device.calls["pause"] == device.calls["wait_event"] == max(number - 16, 0)
    device.settle()
    device.finish()
    ledger.sweep()
    assert ledger.pending() == []
    assert device.calls["pause"] == device.calls["wait_event"]


def used_on_another_stream(device, streams: int) -> Ledger:
    """Return a ledger that holds 60 tensors, used on stream 3, and allocated on the first ``streams`` in turn."""
    ledger, group = Ledger(device, handoff_budget=1600), FakeGroup(device, "nccl")
    tensors = [device.allocate(1 + number % streams, 100) for number in range(60)]
    device.switch(3)
    for tensor in tensors:
        call_sync(ledger, group, [tensor])
    device.switch(0)
    return ledger


def test_streams_that_wait_for_several_at_once_pause_behind_the_last(device, monkeypatch) -> None:
    ledger = used_on_another_stream(device, 2)
    steps = []
    wait_event, pause = device.wait_event, device.pause

    def waiting(index, stream, event):
        steps.append(("waits", stream))
        wait_event(index, stream, event)

    def pausing(index, stream):
        steps.append(("pauses", stream))
        pause(index, stream)

    monkeypatch.setattr(device, "wait_event", waiting)
    monkeypatch.setattr(device, "pause", pausing)
    ledger.sweep()
    assert sum(entry.nbytes for entry in ledger.pending()) == 1600, "S3"
    assert steps[:44] == [("waits", 1), ("waits", 2)] * 22
    assert sorted(steps[44:]) == [("pauses", 1), ("pauses", 2)]
    device.settle()


def test_a_stream_that_another_thread_captures_by_now_does_not_pause_s5(device, monkeypatch) -> None:
    ledger = used_on_another_stream(device, 1)
    recycle = device.recycle_event

    def recycled(index, event):
        """Take it back, while another thread begins a capture."""
        recycle(index, event)
        if not device.capturing:
            device.begin_capture(1)
            device.switch(0)

    monkeypatch.setattr(device, "recycle_event", recycled)
    ledger.sweep()
    assert device.calls["wait_event"] == 1, "the others are left until the capture is over"
    assert device.calls["pause"] == 0
    assert device.faults == []
    device.end_capture()
    monkeypatch.undo()
    ledger.sweep()
    assert sum(entry.nbytes for entry in ledger.pending()) == 1600, "S3"
    device.settle()


# --- ProcessGroupNCCL2 ----------------------------------------------------------------------------------------


NCCL2_CALLS = {"all_gather": (2, False), "irecv": (1, True)}
"""How many tensors a call has, the first of them the output, and whether it only writes."""


@pytest.mark.parametrize("name", NCCL2_CALLS)
def test_a_handle_and_its_output_may_be_dropped_on_nccl2_s1(device, name) -> None:
    """S1: that class holds inputs only, so that without the ledger this is a use after free."""
    count, receives = NCCL2_CALLS[name]
    group = FakeGroup(device, "nccl2", shelved=True)
    ledger = Ledger(device, patience=0)
    tensors = [device.allocate(0, 64) for _ in range(count)]
    launched = call(ledger, group, tensors, p2p=receives, receives=receives)
    output = device.block(tensors[0])
    del launched, tensors
    device.settle()
    assert output is not None
    assert not device.is_free(output)
    device.finish()
    ledger.sweep()
    device.settle()
    assert ledger.pending() == []
    assert device.is_free(output), "S3"

    tensors = [device.allocate(0, 64) for _ in range(count)]
    inner = group.launch(tensors, p2p=receives, receives=receives)
    del inner, tensors
    with pytest.raises(Violation, match="is free while"):
        device.settle()


@pytest.mark.parametrize("what", ["wait", "wait elsewhere", "sync", "rule 3", "get_future_result"])
def test_what_one_thread_asks_ends_no_capture_of_another_on_nccl2_s5(device, monkeypatch, what) -> None:
    """S5: in the global mode, which is torch's default, it would."""
    group = FakeGroup(device, "nccl2")
    ledger = Ledger(device, lag=0, budget=0, patience=0)
    launched = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(2)]
    device.begin_capture(1)

    def other() -> None:
        device.switch(2 if what == "wait elsewhere" else 0)
        if what == "sync":
            call_sync(ledger, group, [device.allocate(0, 64)])
        elif what == "rule 3":
            launched.clear()
            ledger.sweep()
        elif what == "get_future_result":
            launched[0].inner.get_future_result = launched[0].inner.check
            launched[0].work.get_future_result()
        else:
            launched[0].work.wait()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert device.faults == []
    if what == "rule 3":
        assert ledger.pending() == []


def test_a_wait_inside_of_a_capture_is_torchs_own_on_nccl2_s5(device, monkeypatch) -> None:
    """It asks nothing there, and the mode of a thread that captures stays what it is."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    device.begin_capture(1)
    launched = call(ledger, group, [device.allocate(1, 64)])
    monkeypatch.setattr(device, "relaxed_capture_mode", mock.Mock(side_effect=AssertionError("it is captured")))
    launched.work.wait()
    assert ledger.pending() == []


def test_a_stream_is_ordered_although_the_future_was_asked_for_on_nccl2_s1(device) -> None:
    """S1: block_current_stream() of that class goes by the future, which is done once it has ordered one stream."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    launched = call(ledger, group, [device.allocate(0, 64)])
    device.switch(1)
    launched.work.get_future()
    device.switch(0)
    launched.work.block_current_stream()
    assert ledger.pending() == []
    del launched
    device.settle()  # raises if stream 0 could use it now


@pytest.mark.parametrize("how", ["synchronize", "block_current_stream"])
def test_what_failed_without_a_word_is_kept_on_nccl2_s4(device, how) -> None:
    """S4: where the group was aborted, or got another communicator, that class orders nothing, and does not raise."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    launched = call(ledger, group, [device.allocate(0, 64)], fate="fails")
    getattr(launched.work, how)()
    del launched
    device.settle()  # raises if it could be used now
    assert [entry.state for entry in ledger.pending()] == ["quarantined"]
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_a_future_is_not_asked_for_across_a_capture_on_nccl2_s5(device) -> None:
    """S5: asking orders the current stream there, so it is refused as a wait is."""
    ledger, group = Ledger(device), FakeGroup(device, "nccl2")
    launched = call(ledger, group, [device.allocate(0, 64)])
    device.begin_capture(1)
    with pytest.raises(CaptureBoundaryError):
        launched.work.get_future()
    assert device.faults == []
    device.end_capture()
    launched.work.get_future()


def test_the_works_of_an_aborted_communicator_are_quarantined_on_nccl2_s4(device) -> None:
    """S4: abort() and reconfigure() of torch's own leave the group alive, and its works fail when they are asked."""
    ledger, group = Ledger(device, patience=0), FakeGroup(device, "nccl2")
    handles = [call(ledger, group, [device.allocate(0, 64)]) for _ in range(3)]
    for launched in handles:
        launched.inner.status = "failed"
    ledger.sweep()
    assert [entry.state for entry in ledger.pending()] == ["quarantined"] * 3
    later = call(ledger, group, [device.allocate(0, 64)])  # of the next communicator
    later.work.wait()
    assert [entry.state for entry in ledger.pending()] == ["quarantined"] * 3
    handles.clear()
    device.settle()
    device.finish()
    assert drain_ledger(ledger, wait=True) == 0


def test_a_failed_work_is_an_error_in_the_capture_that_it_was_settled_for_s4(device, group) -> None:
    """S4: what has failed before a capture is not taken for waited for inside of it."""
    ledger = Ledger(device)
    failed, well = (call(ledger, group, [device.allocate(1, 64)], fate=fate) for fate in ("fails", ""))
    device.finish()
    await_before_capture(ledger, None)
    assert [one.state for one in ledger.pending()] == ["quarantined"]
    device.begin_capture(1)
    assert well.work.wait(), "there is nothing to wait for"
    with pytest.raises(CaptureBoundaryError):
        failed.work.wait()
    device.end_capture()
    assert device.faults == []
    assert drain_ledger(ledger, wait=True) == 0


def test_a_work_during_whose_wait_an_interrupt_comes_has_not_failed_s3_s4(device, group, monkeypatch) -> None:
    """A later wait waits for it too. An interrupt there says nothing about the work, which may be well."""
    ledger = Ledger(device)
    earlier, later = (call(ledger, group, [device.allocate(0, 64)]) for _ in range(2))
    with monkeypatch.context() as until_then:
        until_then.setattr(earlier.inner, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            later.work.wait()
    assert [entry.state for entry in ledger.pending()] == ["in flight"] * 2
    assert ledger.failures == 0
    later.work.wait()
    assert ledger.pending() == []
    device.finish()


@pytest.mark.parametrize("moment", ["before it is in the quarantine", "after it has looked there"])
def test_what_another_thread_releases_as_it_fails_is_not_kept_s3_s4(device, group, monkeypatch, moment) -> None:
    """Of two threads that wait for a work one sees an error, and the other that it is well."""
    ledger = Ledger(device, patience=0)
    launched = call(ledger, group, [device.allocate(0, 64)])
    queue = launched.work.queue
    note_empty = type(queue).note_empty

    def releases_before(_: Any) -> bool:
        ledger.release(launched.work)
        return False

    def releases_after(empty: Any) -> None:
        with mock.patch.object(ledger, "quarantine", {}):  # what the other thread has found there
            ledger.release(launched.work)
        note_empty(empty)

    if moment == "before it is in the quarantine":
        monkeypatch.setattr(ledger, "is_idle", releases_before)
    else:
        monkeypatch.setattr(type(queue), "note_empty", releases_after)
    ledger.fail(launched.work, RuntimeError("late"))
    monkeypatch.undo()
    assert ledger.pending() == []
    assert not ledger.quarantine
    assert not ledger.nonempty
    device.finish()


@pytest.mark.parametrize("index", [INDEX, HOST])
def test_a_work_that_its_backend_can_not_tell_of_stops_no_other_group_s3_s4(device, group, monkeypatch, index) -> None:
    ledger, other = Ledger(device, patience=0), FakeGroup(device, "gloo" if index == HOST else "nccl")
    launched = call(ledger, other, [device.allocate(0 if index == INDEX else None, 64)], index=index)
    monkeypatch.setattr(launched.inner, "is_completed", mock.Mock(side_effect=RuntimeError("MPI_Test failed")))
    for _ in range(3):
        call(ledger, group, [device.allocate(0, 64)]).work.wait()
    assert [(entry.op, entry.state) for entry in ledger.pending()] == [(launched.op, "quarantined")]
    assert launched.work.wait() is True
    assert ledger.pending() == []
    device.finish()


def test_a_recorded_use_on_another_device_is_one_of_its_own_s1(device, monkeypatch) -> None:
    """S1: each device has a default stream of the handle 0, and ordering one of them orders no other."""
    ledger, tensor = Ledger(device), device.allocate(2, 64)
    storage = tensor.untyped_storage()
    for index in (0, 1):
        assert ledger.recorded_uses.add(storage, index, 0, sys._getframe(), unordered=True)
    assert len(ledger.holds()) == 2
    memory = _torch.StorageWeakRef(storage)
    del tensor, storage
    for index in (0, 1):
        if note := ledger.stream_order.recorded(index, 0):
            ledger.stream_order.waited(INDEX, 2, note)
    assert not memory.expired(), "stream 2 of device 0 is not the one of device 1"
