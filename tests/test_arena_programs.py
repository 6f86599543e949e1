"""The arena's promises, on random programs against a simulated device and a model of which bytes are whose.

The arena, the ledger and the graphs are the real ones, on real memory. After every step the bytes of the block are what
the model says: the pattern of the tensor that has them, or poison where nobody has any, so that no two tensors ever
share a byte; and the slots in use are exactly those that something refers to. When memory is handed out again, all that
touched it must be over, or before whatever comes next on the stream that gets it.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from programs import Running, programs
from simulated import INDEX, ArenaDevice, ArenaGraph, FakeGroup, Launched, Violation, call, call_sync

from safecomm import _torch
from safecomm.arena import Arena, size_class
from safecomm.arena import arena as arenas
from safecomm.arena.free_list import FreeList, Range
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import ALIGNMENT, NO_STREAMS, PROBES, SizeClass, Slot
from safecomm.core import captures
from safecomm.core.captures import CapturedGraph
from safecomm.core.drain import drain_ledger
from safecomm.core.ledger import Ledger
from safecomm.core.refcounts import UNUSED
from safecomm.errors import ArenaFullError

pytestmark = pytest.mark.usefixtures("quiet")

CAPACITY = 5 * ALIGNMENT  # so that it is often full
SIZES = st.sampled_from([100, 512, 512, 1024, 1500, 2048])
PICK = st.integers(0, 5)
STREAM = st.integers(0, 2)
POISON = 0xDB


def test_a_request_without_room_looks_for_what_is_over_however_recently_that_was_done(monkeypatch) -> None:
    device = ArenaDevice()
    ledger = Ledger(device)
    ledger.interval = 100
    monkeypatch.setattr(arenas, "LEDGER", ledger)
    arena = object.__new__(Arena)
    arena._start(torch.empty(CAPACITY, dtype=torch.uint8), INDEX, device, "raise", {}, None)
    tensor = arena.empty(CAPACITY, dtype=torch.uint8)
    device.hand_out(tensor, 0)
    group = FakeGroup(device, "nccl")
    device.switch(1)
    call_sync(ledger, group, [tensor])
    del tensor
    device.switch(0)
    ledger.sweep()
    with pytest.raises(ArenaFullError):
        arena.empty(CAPACITY, dtype=torch.uint8)
    device.finish()
    ledger.sweep()
    assert len(ledger.pending()) == 1
    tensor = arena.empty(CAPACITY, dtype=torch.uint8)
    assert ledger.pending() == []
    del tensor
    arena.close()


class ArenaPrograms(RuleBasedStateMachine):
    """Programs with three streams, two NCCL groups, captures one at a time, and an arena that is often full."""

    arena_type: type[Arena] = Arena

    def __init__(self) -> None:
        super().__init__()
        self.device = ArenaDevice()
        self.ledger = Ledger(self.device, lag=1, budget=1024, handoff_budget=1024, patience=0)
        self.groups = [FakeGroup(self.device, "nccl", shelved=True) for _ in range(2)]
        self.block = torch.full((CAPACITY + ALIGNMENT,), POISON, dtype=torch.uint8)
        # From an aligned address on, as a block of a device is.
        self.block = self.block[-self.block.data_ptr() % ALIGNMENT :][:CAPACITY]
        self.base = self.block.data_ptr()
        self.image = self.block.clone()  # what the bytes should be
        self.tensors: list[torch.Tensor] = []
        self.storages: list[torch.UntypedStorage] = []  # what Python holds without a tensor
        self.works: list[Launched] = []
        self.graphs: list[tuple[ArenaGraph, CapturedGraph]] = []
        self.recording: tuple[ArenaGraph, CapturedGraph] | None = None
        self.pattern = 0
        self.make({})

    def make(self, buckets: dict[str, int]) -> None:
        self.arena = object.__new__(self.arena_type)
        self.arena._start(self.block, INDEX, self.device, "fallback", buckets, None)

    @initialize(bucket=st.sampled_from([0, 0, 0, 512]), probes=st.sampled_from([PROBES, 0]))
    def start(self, bucket: int, probes: int) -> None:
        size_class.PROBES = probes  # without any, each search looks at all slots of its size class
        if bucket:
            self.make({"named": bucket})

    # --- the model ----------------------------------------------------------------------------------------

    def mine(self, pointer: int) -> bool:
        return self.base <= pointer < self.base + CAPACITY

    def held(self) -> set[int]:
        """Return the addresses of what anything refers to."""
        found = [tensor.untyped_storage() for tensor in self.tensors] + self.storages
        for entry in [*self.ledger.holds(), *self.ledger.quarantine]:
            found += [one for one in entry.storages if isinstance(one, torch.UntypedStorage)]
        for _, _, storages, _, _ in self.ledger.handoffs.leftovers.values():
            found += storages
        for launched in self.works:
            found += [tensor.untyped_storage() for tensor in launched.inner.outputs + launched.inner.shelf]
        for group in self.groups:
            found += [tensor.untyped_storage() for _, shelf in group.shelves for tensor in shelf]
        for _, captured in self.graphs + ([self.recording] if self.recording else []):
            found += [
                *captured._slots.values(),
                *(one.storage for one in captured._arguments if one.storage is not None),
            ]
        return {pointer for storage in found if self.mine(pointer := storage.data_ptr())}

    def fill(self, storage: torch.UntypedStorage, value: int) -> None:
        start = storage.data_ptr() - self.base
        self.block[start : start + storage.nbytes()] = value
        self.image[start : start + storage.nbytes()] = value

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """Poison the memory of ``storage``, if the program has it no more."""
        others = [tensor.untyped_storage() for tensor in self.tensors] + self.storages
        if all(storage.data_ptr() != other.data_ptr() for other in others):
            self.fill(storage, POISON)

    @invariant()
    def every_byte_is_whose_it_should_be(self) -> None:
        if not torch.equal(self.block, self.image):
            raise Violation("bytes of a tensor, or of free memory, were written by somebody else")

    @invariant()
    def what_is_in_use_is_what_is_referred_to(self) -> None:
        used = {slot.pointer for slot in self.arena._layout.in_use()}
        if used != self.held():
            raise Violation(f"in use: {used}, referred to: {self.held()}")

    # --- memory -------------------------------------------------------------------------------------------

    @rule(stream=STREAM, nbytes=SIZES, named=st.sampled_from([False, False, False, True]))
    def allocate(self, stream: int, nbytes: int, named: bool) -> None:
        self.go_to(stream)
        stream = self.device.current(INDEX)
        before = self.arena._fallbacks
        bucket = "named" if named and "named" in self.arena._layout.buckets else ""
        tensor = self.arena.empty(nbytes, dtype=torch.uint8, bucket=bucket)
        if self.arena._fallbacks > before:
            if not self.device.capturing:
                self.check_full(nbytes, bucket)
            return
        storage = tensor.untyped_storage()
        free = self.arena._layout.buckets[bucket]
        start, end = free.start, free.end
        place = storage.data_ptr() - self.base
        assert storage.nbytes() == nbytes
        assert place % ALIGNMENT == 0
        assert start <= place <= place + nbytes <= end
        for other in [*(tensor.untyped_storage() for tensor in self.tensors), *self.storages]:
            if (
                other.data_ptr() < storage.data_ptr() + nbytes
                and storage.data_ptr() < other.data_ptr() + other.nbytes()
            ):
                raise Violation("memory that the program has is handed out again")
        self.device.hand_out(tensor, stream)
        if self.recording is not None and self.device.here().capture:
            self.recording[0].touch(self.device.blocks_of([tensor]))
        self.pattern = (self.pattern + 1) % POISON
        self.fill(storage, self.pattern)
        self.tensors.append(tensor)

    def check_full(self, nbytes: int, bucket: str) -> None:
        """Nothing is refused while there is room."""
        free = self.arena._layout.buckets[bucket]
        start, end = free.start, free.end
        for slot in [*self.arena._layout.in_use(), None]:
            if slot is not None and slot.size_class.bucket != bucket:
                continue
            assert (end if slot is None else slot.start) - start < nbytes, "there is room"
            start = end if slot is None else slot.end

    @rule(streams=st.lists(STREAM, min_size=1, max_size=3), nbytes=SIZES)
    def use_and_drop(self, streams: list[int], nbytes: int) -> None:
        """What most programs do: a buffer, a collective on the stream that it is of, and no more of it."""
        for stream in streams:
            before = len(self.tensors)
            self.allocate(stream, nbytes, named=False)
            if len(self.tensors) > before:
                here = self.device.current(INDEX)
                self.launch(here, 0, [before], last=True, keep=False, synchronous=True)

    @rule(pick=PICK, how=st.sampled_from(["drop", "drop", "drop", "view", "alias", "storage"]))
    def change(self, pick: int, how: str) -> None:
        if not self.tensors:
            return
        place = pick % len(self.tensors)
        tensor = self.tensors[place]
        if how == "view":
            self.tensors[place] = tensor[1:] if tensor.numel() > 1 else tensor
        elif how == "alias":
            self.tensors.append(tensor.detach())
        elif how == "storage":
            self.storages.append(tensor.untyped_storage())
            del self.tensors[place]
        else:
            del self.tensors[place]
            self.let_go(tensor.untyped_storage())

    @rule(pick=PICK)
    def drop_storage(self, pick: int) -> None:
        if self.storages:
            self.let_go(self.storages.pop(pick % len(self.storages)))

    # --- the device -----------------------------------------------------------------------------------------

    def go_to(self, stream: int) -> None:
        """Make ``stream`` the current one; during a capture rather one that takes part in it."""
        members = [handle for handle in range(3) if self.device.capture(handle)]
        self.device.switch(members[stream % len(members)] if members and stream != 2 else stream)

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def run_device(self, picks: list[int]) -> None:
        for pick in picks:
            self.device.run(pick)

    @rule(waiting=STREAM, other=STREAM)
    def wait_stream(self, waiting: int, other: int) -> None:
        one, two = self.device.streams[waiting], self.device.streams[other]
        if one.capture == two.capture or (one.capture == 0 and two.capture and waiting):
            self.device.wait(one, two.past, two.capture)

    # --- calls ----------------------------------------------------------------------------------------------

    def some_tensors(self, picks: list[int], last: bool) -> list[torch.Tensor]:
        chosen = [self.tensors[place] for place in sorted({pick % len(self.tensors) for pick in picks})]
        if self.device.capturing and not self.device.here().capture:
            # What a capture was handed out is not there yet for what runs.
            absent = self.device.capturing
            chosen = [t for t in chosen if all(block.capture != absent for block in self.device.blocks_of([t]))]
        if last:
            self.tensors = [tensor for tensor in self.tensors if all(tensor is not one for one in chosen)]
        return chosen

    @rule(stream=STREAM, to=st.integers(0, 1), picks=st.lists(PICK, min_size=1, max_size=2), last=st.booleans(),
          keep=st.booleans(), synchronous=st.booleans())  # fmt: skip
    def launch(self, stream: int, to: int, picks: list[int], last: bool, keep: bool, synchronous: bool) -> None:
        self.go_to(stream)
        group = self.groups[to]
        if not self.tensors or not group.can_launch() or not (tensors := self.some_tensors(picks, last)):
            return
        storages = [tensor.untyped_storage() for tensor in tensors]
        if synchronous:
            call_sync(self.ledger, group, tensors)
        else:
            launched = call(self.ledger, group, tensors)
            if keep:
                self.works.append(launched)
            del launched
        if self.recording is not None and self.device.here().capture:
            graph, captured = self.recording
            graph.touch(self.device.blocks_of(tensors))
            for tensor in tensors:
                captured.add("a collective", group, tensor, sys._getframe())
        del tensors
        for storage in storages:
            self.let_go(storage)

    @rule(stream=STREAM, pick=PICK)
    def wait(self, stream: int, pick: int) -> None:
        self.go_to(stream)
        for _ in range(len(self.works)):
            place = pick % len(self.works)
            if self.works[place].capture == self.device.here().capture:
                self.works.pop(place).work.wait()
                return
            pick += 1

    @rule()
    def drain(self) -> None:
        drain_ledger(self.ledger)

    # --- graphs ---------------------------------------------------------------------------------------------

    @rule(stream=st.integers(1, 2))
    def capture(self, stream: int) -> None:
        if self.device.capturing:
            self.end_capture()
            return
        self.arena.before_capture()
        self.device.begin_capture(stream)
        capture = self.device.capturing
        graph = ArenaGraph(self.device)
        captured = CapturedGraph(self.ledger, graph, (capture,), [], INDEX, stream, capture, sys._getframe())
        captures.RECORDING[capture] = captured
        self.recording = graph, captured

    def end_capture(self) -> None:
        assert self.recording is not None
        capture = self.device.capturing
        captures.RECORDING.pop(capture)
        self.ledger.sweep()
        self.ledger.join_unwaited(capture, self.recording[1].stream)
        self.device.end_capture()
        self.ledger.end_capture(capture)
        self.recording[1].seal()
        self.graphs.append(self.recording)
        self.recording = None
        self.works = [launched for launched in self.works if launched.capture != capture]

    @rule(stream=STREAM, pick=PICK)
    def replay(self, stream: int, pick: int) -> None:
        if self.graphs and not self.device.capturing:
            self.device.switch(stream)
            self.graphs[pick % len(self.graphs)][0].replay()

    @rule(pick=PICK, how=st.sampled_from(["reset", "dies"]))
    def end_graph(self, pick: int, how: str) -> None:
        if self.graphs:
            graph, _ = self.graphs.pop(pick % len(self.graphs))
            if how == "reset":
                graph.reset()

    def teardown(self) -> None:
        size_class.PROBES = PROBES
        try:
            if sys.exc_info()[0] is None:
                if self.device.capturing:
                    self.end_capture()
                self.graphs.clear()
                self.works.clear()
                self.tensors.clear()
                self.storages.clear()
                self.device.finish()
                assert drain_ledger(self.ledger, wait=True) == 0
                assert self.arena.stats().in_use == 0, "slots are in use that nobody refers to"
                assert self.arena.stats().buckets[-1].largest_free == self.arena.stats().buckets[-1].capacity
                self.arena.close()
        finally:
            if self.recording is not None:
                captures.RECORDING.pop(self.recording[1].capture, None)
                self.recording[1]._end()
        if self.device.faults:
            raise Violation(f"illegal calls: {self.device.faults}")


STEPS = 20


def test_random_programs_of_the_arena() -> None:
    """S1, S5, S6 and no leak: in 5,000 programs no byte has two owners, and none is kept for nobody."""
    for running in [Running(ArenaPrograms, 1000, STEPS, number) for number in range(2)]:
        running.check()


# --- arenas with one rule broken, each of which the programs have to catch -------------------------------------


def counts_only_tensors() -> Any:
    """Does not see that Python refers to a storage, as the ledger does."""
    return idle(lambda slot, _: _torch.storage_use_count(slot.cdata) == 2)


def counts_only_python() -> Any:
    """Does not see that tensors refer to a storage."""
    return idle(lambda slot, _: sys.getrefcount(slot.storage) <= UNUSED)


def keeps_all() -> Any:
    """Takes no slot back."""
    return idle(lambda slot, _: False)


def idle(told: Any) -> Any:
    """An arena that asks ``told`` whether a slot is in use, also on its short way."""

    def start(arena: Arena, *arguments: Any) -> None:
        original(arena, *arguments)
        arena._layout._is_idle = lambda slot, but_for_graph: bool(told(slot, but_for_graph))
        arena._group = object()  # no short way
        arena._log = Nothing()

    original = Arena._start
    return mock.patch.object(Arena, "_start", start)


class Nothing(list):
    def append(self, one: object) -> None:
        pass


def orders_nothing() -> Any:
    """Hands memory to another stream as it is."""

    def take(layout: Layout, *arguments: Any, **how: Any) -> Any:
        found = original(layout, *arguments, **how)
        return None if found is None else (found[0], NO_STREAMS)

    original = Layout.take
    return mock.patch.object(Layout, "take", take)


def forgets_the_streams_of_neighbours() -> Any:
    """Merges ranges, and remembers the streams of one of them."""

    def merged(free: FreeList, start: int, end: int, after: frozenset[int]) -> tuple[int, int, Range]:
        first, last, (start, end, _) = original(free, start, end, after)
        return first, last, (start, end, after)

    original = FreeList.merged
    return mock.patch.object(FreeList, "merged", merged)


def leases_nothing() -> Any:
    """Hands out to others what a graph writes at each replay."""
    return mock.patch.object(CapturedGraph, "lease", return_value=None)


def gives_captures_what_runs() -> Any:
    """Does not wait for the device before a capture."""

    def before_capture(arena: Arena) -> None:
        arena._layout.reclaim(lambda: None)

    return mock.patch.object(Arena, "before_capture", before_capture)


def never_merges() -> Any:
    """Leaves idle slots in their size classes."""
    return mock.patch.object(Layout, "coalesce_free", return_value=None)


def cuts_too_short() -> Any:
    """Takes the memory behind a slot for free."""

    def take(layout: Layout, *arguments: Any, **how: Any) -> Any:
        found = original(layout, *arguments, **how)
        if found is not None and found[0].end - found[0].start > ALIGNMENT:
            free = layout.buckets[found[0].size_class.bucket]
            first, last, merged = free.merged(found[0].end - ALIGNMENT, found[0].end, NO_STREAMS)
            free.ranges[first:last] = [merged]
        return found

    original = Layout.take
    return mock.patch.object(Layout, "take", take)


def is_at_home_where_the_block_is() -> Any:
    """Tells the ledger the stream of the block for that of a slot."""
    return mock.patch.object(Arena, "_alloc_stream_of", lambda self, pointer: self._alloc_stream)


def takes_any_slot_of_a_size_class() -> Any:
    """Does not look whether a slot that it takes is idle."""

    def search(self: SizeClass, is_idle: Any) -> Slot | None:
        return self.slots.pop() if self.slots else None

    return mock.patch.object(SizeClass, "search", search)


@pytest.mark.parametrize(
    "broken",
    [
        counts_only_tensors,
        counts_only_python,
        keeps_all,
        orders_nothing,
        forgets_the_streams_of_neighbours,
        leases_nothing,
        gives_captures_what_runs,
        never_merges,
        cuts_too_short,
        is_at_home_where_the_block_is,
        takes_any_slot_of_a_size_class,
    ],
)
def test_programs_catch_an_arena_that(broken: Any) -> None:
    """The promises are really tested: an arena with one rule broken does not get through."""
    with broken(), pytest.raises(AssertionError):  # and no error of the mutant itself, which would prove nothing
        run_state_machine_as_test(ArenaPrograms, settings=programs(5000, STEPS, phases=[Phase.generate]))
