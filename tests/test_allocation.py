"""Which stream memory was allocated on, without a device: ``tests/gpu/collectives.py`` asks a real one.

All of it with ctypes and with C; ``test_native.py`` compares the two in random histories.
"""

import functools
import inspect
from types import SimpleNamespace

import compiled
import pytest
import torch

from safecomm._torch import driver, segment_table
from safecomm.core import allocation
from safecomm.core.allocation import GRANULE, Allocations
from safecomm.interception import record_stream

FIRST, SECOND, THIRD = (granule << GRANULE for granule in (8, 9, 10))


@pytest.fixture(params=compiled.KINDS)
def kind(request):
    return request.param


@pytest.fixture
def known(kind, monkeypatch):
    """Return allocations in which three segments are anchored: two of stream 5, and one of stream 6."""
    found = Allocations(compiled.table_of(kind, compiled.driver(lambda pointer: None), monkeypatch))
    for granule, stream in {8: 5, 9: 5, 10: 6}.items():
        found._table.anchor(granule, stream)
        found._anchors[granule] = None
    return found


def test_what_is_pinned_is_known_without_the_driver_s1(known):
    assert known.alloc_stream(SECOND) == known.alloc_stream(SECOND + 7, FIRST) == 5
    assert known.alloc_stream(THIRD) == 6
    assert known.alloc_stream(THIRD, FIRST) is None
    assert known.all_allocated_on(5, [FIRST, FIRST + 512, SECOND])
    assert not known.all_allocated_on(5, [FIRST, THIRD])
    assert not known.all_allocated_on(6, [THIRD, 11 << GRANULE])


def test_a_claim_ends_what_is_known_of_the_segments_that_it_lies_in_s1(known):
    known.claim(SECOND + 512, SECOND + 1024, lambda pointer: 7)
    assert [known.alloc_stream(start) for start in (FIRST, SECOND, THIRD)] == [5, None, 6]
    known.claim(FIRST, THIRD, lambda pointer: 7)
    assert [known.alloc_stream(start) for start in (FIRST, SECOND, THIRD)] == [None, None, 6]
    assert [*known._anchors] == [10]


FOURTH, NOWHERE = 11 << GRANULE, 99 << GRANULE


BUFFERS = {8: 101, 9: 102, 10: 103, 11: 104}


def allocations_of(kind, monkeypatch, identity_of=lambda pointer: BUFFERS.get(pointer >> GRANULE)):
    """Return allocations with a driver: segments of streams 5, 5 and 6, and one that somebody hands out pieces of."""
    found = Allocations(compiled.table_of(kind, compiled.driver(identity_of), monkeypatch))
    found.claim(FOURTH, FOURTH + 1024, lambda pointer: 5 if pointer < FOURTH + 512 else 6)
    for number, (start, stream) in enumerate([(FIRST, 5), (SECOND, 5), (THIRD, 6)]):
        found._table.keep(101 + number, stream, start, start + (1 << GRANULE))
    found._claimed.add(104)
    return found


@pytest.fixture
def asked(kind, monkeypatch):
    return allocations_of(kind, monkeypatch)


@pytest.mark.parametrize(
    ("pointer", "other", "stream"),
    [
        (FIRST, None, 5),
        (FIRST, FIRST + 512, 5),
        (FIRST, SECOND, 5),
        (FIRST, THIRD, None),
        (THIRD, FIRST, None),
        (FIRST, NOWHERE, None),
        (NOWHERE, FIRST, None),
        (NOWHERE, None, None),
        (FOURTH, FOURTH + 8, 5),
        (FOURTH, FOURTH + 512, None),
        (FOURTH + 512, FOURTH + 520, 6),
        (FIRST, FOURTH, 5),
        (FIRST, FOURTH + 512, None),
        (FOURTH + 512, THIRD, 6),
    ],
)
def test_two_pieces_of_memory_have_a_stream_where_it_is_one_and_known_s1(asked, pointer, other, stream):
    before = len(driver.questions)
    for _ in range(2):
        assert asked.alloc_stream(pointer, other) == stream
    assert len(driver.questions) <= max(before, 1), "each question is put back, and taken again"


def test_a_question_asked_in_the_middle_of_another_leaves_that_one_alone_s1(kind, monkeypatch):
    """A signal handler, or another thread, can ask between a driver's call and the reading of its answer."""
    due = []

    def interrupted(pointer):
        if due:
            due.pop()
            assert asked.alloc_stream(THIRD) == 6
        return BUFFERS[pointer >> GRANULE]

    asked = allocations_of(kind, monkeypatch, interrupted)
    due.append("a signal")
    assert asked.alloc_stream(FIRST, SECOND) == 5
    assert not due


def _snapshot_with_history(given, mempool_id=None, include_traces=True):
    given.append(include_traces)
    return SEGMENTS


def _snapshot_that_has_no_choice(given, mempool_id=None):
    given.append("no choice")
    return SEGMENTS


SEGMENTS = [
    {
        "device": 0, "address": FIRST, "total_size": 1 << GRANULE, "stream": 5, "segment_pool_id": (0, 3),
        "blocks": [{"address": FIRST, "size": 512, "state": "active_awaiting_free", "frames": []}],
    }
]  # fmt: skip


@pytest.mark.parametrize(
    ("snapshot", "given"), [(_snapshot_with_history, False), (_snapshot_that_has_no_choice, "no choice")]
)
def test_the_allocator_is_asked_without_its_history_where_that_can_be_left_out(snapshot, given, monkeypatch):
    """Torch takes ms to seconds to convert the history, which diagnostics switch on."""
    asked = []

    def memory_snapshot(*args, **kwargs):
        return snapshot(asked, *args, **kwargs)

    memory_snapshot.__signature__ = inspect.signature(functools.partial(snapshot, asked))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)
    found = Allocations()
    assert found._missed(FIRST, 101) == (5, FIRST, SECOND)
    assert found.allocated((0, 3)) == [(FIRST, FIRST + 512)]
    assert record_stream._blocks_awaiting_free() == "512 bytes"
    assert asked == [given] * 3


def test_a_claim_in_an_expandable_segment_is_met_through_any_part_of_it_s1(asked, monkeypatch):
    """S1: the driver has one id for a part of which a claim takes a piece, and the allocator says no part's end."""
    segment = {"address": FOURTH, "total_size": 1 << GRANULE, "stream": 9, "device": 0}
    segment |= {"is_expandable": True, "blocks": []}
    monkeypatch.setattr(allocation._torch, "segments", lambda: [segment])
    asked._forget()
    beside = FOURTH + (1 << GRANULE) - 512
    assert asked.alloc_stream(beside) == 9
    assert asked.alloc_stream(FOURTH) == 5, "it is of the claim, whoever was asked about first"
    assert asked.alloc_stream(FOURTH + 512) == 6


# --- what the driver does not know ------------------------------------------------------------------------------------


class Allocator:
    """The driver, torch's snapshot, and what a byte is allocated in: one segment a granule."""

    def __init__(self, kind, monkeypatch):
        self.segments = []
        self.identities = {}  # by granule
        self.asked = 0  # how often the driver was
        self.searched = 0
        self.place = None  # where the next byte is allocated; None: there is no memory
        self.current = 5
        self.capturing = 0
        self.meanwhile = lambda: None  # what another thread does while a byte is allocated
        self.table = compiled.table_of(kind, compiled.driver(self._driver), monkeypatch)
        monkeypatch.setattr(allocation._torch, "segments", self._snapshot)
        monkeypatch.setattr(allocation._torch, "current_raw_stream", lambda device: self.current)
        monkeypatch.setattr(allocation._torch, "capture_id", lambda stream: self.capturing)
        monkeypatch.setattr(
            allocation, "torch", SimpleNamespace(UntypedStorage=self._byte, device=lambda *named: named)
        )

    def add(self, granule, stream=5, *, full=False, granules=1, **how):
        """Map a small segment, of which something is in use, and return its address."""
        start = granule << GRANULE
        states = ["active_allocated"] if full else ["active_allocated", "inactive"]
        segment = {
            "address": start, "total_size": granules << GRANULE, "stream": stream, "device": 0, "segment_type": "small",
            "segment_pool_id": (0, 0),
            "blocks": [{"address": start + 512 * n, "size": 512, "state": state} for n, state in enumerate(states)],
        }  # fmt: skip
        self.segments.append(segment | how)
        for number in range(granule, granule + granules):
            self.identities[number] = 1000 + granule
        return start

    def allocations(self):
        return Allocations(self.table)

    def _driver(self, pointer):
        self.asked += 1
        return self.identities.get(pointer >> GRANULE)

    def _snapshot(self):
        self.searched += 1
        if self.segments is None:
            raise RuntimeError("this allocator keeps no record")
        return self.segments

    def _byte(self, nbytes, *, device):
        assert (nbytes, device) == (1, ("cuda", 0))
        self.meanwhile()
        if self.place is None:
            raise RuntimeError("out of memory")
        return SimpleNamespace(data_ptr=lambda: self.place)


@pytest.fixture
def allocator(kind, monkeypatch):
    return Allocator(kind, monkeypatch)


def test_what_is_known_of_a_segment_is_searched_for_once(allocator):
    start, found = allocator.add(8), allocator.allocations()
    for number in range(4):
        assert found.alloc_stream(start + 512 * number) == 5
    assert found.pool(start) == (0, 0)
    assert (allocator.asked, allocator.searched) == (5, 1)


def test_the_pool_of_memory_that_nobody_has_asked_about_is_searched_for(allocator):
    start, found = allocator.add(8, segment_pool_id=(0, 3)), allocator.allocations()
    assert found.pool(start) == (0, 3)
    assert found.alloc_stream(start) == 5
    assert allocator.searched == 1


def test_a_segment_that_is_mapped_where_another_was_is_not_taken_for_that_one_s1(allocator):
    start, found = allocator.add(8, segment_pool_id=(0, 1)), allocator.allocations()
    assert found.alloc_stream(start) == 5
    allocator.segments.clear()
    allocator.add(8, stream=6, segment_pool_id=(0, 2))
    allocator.identities[8] = 77  # the driver's ids never come back
    assert found.alloc_stream(start) == 6
    assert found.pool(start) == (0, 2)


def test_memory_of_another_allocator_has_no_known_stream_s1(allocator):
    allocator.add(8)
    found = allocator.allocations()
    allocator.identities[9] = 55  # cudaMalloc without torch: the driver knows it, and the snapshot does not
    assert found.alloc_stream(9 << GRANULE) is None
    assert found.pool(9 << GRANULE) is None
    assert not found.all_allocated_on(5, [9 << GRANULE])
    allocator.segments = None
    assert allocator.allocations().alloc_stream(8 << GRANULE) is None


def test_without_a_driver_no_stream_is_known_s1(monkeypatch):
    monkeypatch.setattr(segment_table, "pointer_attribute", None)
    assert Allocations(segment_table.SegmentTable).alloc_stream(FIRST) is None
    assert Allocations(segment_table.SegmentTable).pool(FIRST) is None


def test_a_part_of_an_expandable_segment_says_nothing_of_what_is_beyond_it_s1(allocator):
    """Each part that is mapped has an id of its own, and may be unmapped alone."""
    start, found = allocator.add(8, granules=2, is_expandable=True), allocator.allocations()
    assert found.alloc_stream(start, start + 512) == 5
    assert allocator.asked == 2, "the driver has to confirm both"
    assert not found._anchors


def test_what_is_known_of_segments_does_not_grow_for_ever(allocator):
    start, found = allocator.add(8, segment_pool_id=(0, 1)), allocator.allocations()
    for identity in range(10_000, 10_001 + (1 << 16)):
        found._pools[identity] = (0, 1)
        found._table.keep(identity, 6, 0, 0)
    allocator.add(9, segment_pool_id=(0, 1))
    allocator.identities[9] = 10_000
    assert found.alloc_stream(9 << GRANULE) == 6
    assert found.alloc_stream(start) == 5
    assert list(found._pools) == [1008]
    assert found.alloc_stream(9 << GRANULE) == 5, "it was forgotten with all others, and searched for again"


# --- claims -----------------------------------------------------------------------------------------------------------


def arena_of(found, start):
    """Claim the second KiB from ``start``: its first half is stream 6's, and its other half stream 7's."""
    found.claim(start + 1024, start + 2048, lambda pointer: 6 if pointer < start + 1536 else 7)


@pytest.mark.parametrize("first", ["the claim", "the segment"])
def test_pieces_of_a_claim_are_their_owners_and_the_rest_of_the_segment_is_the_allocators_s1(allocator, first):
    start, found = allocator.add(8), allocator.allocations()
    allocator.place = start + 512  # an anchor would be possible
    if first == "the segment":
        assert found.alloc_stream(start) == 5
        assert found._anchors
    arena_of(found, start)
    for _ in range(2):
        assert found.alloc_stream(start) == 5
        assert found.alloc_stream(start + 1024) == 6
        assert found.alloc_stream(start + 2047) == 7
        assert found.alloc_stream(start + 2048) == 5
        assert found.alloc_stream(start + 1024, start + 1028) == 6
        assert found.alloc_stream(start, start + 1024) is None
        assert found.alloc_stream(start + 1024, start + 1536) is None
        assert found.alloc_stream(start, start + 2048) == 5
    assert not found._anchors, "where an address lies in the segment is no longer the answer"


def test_all_of_a_list_are_asked_for_where_a_claim_lies_among_them_s1(allocator):
    start, found = allocator.add(8), allocator.allocations()
    arena_of(found, start)
    assert found.all_allocated_on(5, [start, start + 2048])
    assert found.all_allocated_on(6, [start + 1024, start + 1028])
    assert not found.all_allocated_on(6, [start + 1024, start + 1536])
    assert not found.all_allocated_on(5, [start, start + 1024])


def test_other_segments_are_not_changed_by_a_claim(allocator):
    start, other = allocator.add(8), allocator.add(9, stream=7)
    found = allocator.allocations()
    arena_of(found, start)
    assert found.alloc_stream(other) == 7
    assert found.all_allocated_on(7, [other, other + 512])


def test_a_claim_that_was_undone_is_the_allocators_again_s1(allocator):
    start, found = allocator.add(8), allocator.allocations()
    arena_of(found, start)
    assert found.alloc_stream(start + 1024) == 6
    found.unclaim(start + 1024)
    assert found.alloc_stream(start + 1024) == 5
    searched = allocator.searched
    assert found.alloc_stream(start + 1024) == 5
    assert allocator.searched == searched
    found.unclaim(start + 1024)


# --- anchors ----------------------------------------------------------------------------------------------------------


def test_an_anchored_segment_needs_no_driver_s1(allocator):
    start, found = allocator.add(8), allocator.allocations()
    allocator.place = start + 512
    assert found.alloc_stream(start) == 5
    asked = allocator.asked
    assert found.alloc_stream(start + 512, start + 700) == 5
    assert found.all_allocated_on(5, [start, start + 512])
    assert allocator.asked == asked
    assert found._anchors[8].data_ptr() == start + 512, "the segment could be unmapped"


NO_ANCHOR = {
    "large": {"segment_type": "large"},
    "expandable": {"is_expandable": True},
    "of a graph's pool": {"segment_pool_id": (0, 3)},
    "full": {"full": True},
    "not of whole granules": {"total_size": (1 << GRANULE) - 512},
}


@pytest.mark.parametrize("kind", NO_ANCHOR)
def test_a_segment_that_may_be_unmapped_whoever_is_in_it_is_not_anchored_s1(allocator, kind):
    start, found = allocator.add(8, **NO_ANCHOR[kind]), allocator.allocations()
    allocator.place = start + 512
    assert found.alloc_stream(start) == 5
    assert not found._anchors


@pytest.mark.parametrize("how", ["another stream is current", "it is captured", "no memory", "elsewhere", "a claim"])
def test_a_byte_that_does_not_come_to_lie_in_the_segment_anchors_nothing_s1_s5(allocator, how):
    start, found = allocator.add(8), allocator.allocations()
    allocator.place = start + 512
    if how == "another stream is current":
        allocator.current = 6
    elif how == "it is captured":
        allocator.capturing = 9  # the byte would come from the graph's pool
    elif how == "no memory":
        allocator.place = None
    elif how == "elsewhere":
        allocator.place = 9 << GRANULE
    else:
        allocator.meanwhile = lambda: arena_of(found, start)
    assert found.alloc_stream(start) == 5
    assert not found._anchors


def test_few_segments_are_anchored(allocator):
    found = allocator.allocations()
    for granule in range(8, 10 + allocation.ANCHORS):
        allocator.place = allocator.add(granule) + 512
        assert found.alloc_stream(allocator.place) == 5
    assert len(found._anchors) == allocation.ANCHORS
    asked = allocator.asked
    for granule in range(8, 8 + allocation.ANCHORS):
        assert found.alloc_stream(granule << GRANULE) == 5
    assert allocator.asked == asked


def test_a_segment_that_two_threads_look_up_is_anchored_once(allocator):
    start, found = allocator.add(8), allocator.allocations()
    allocator.place = start + 512
    found.alloc_stream(start)
    before = dict(found._anchors)
    found._anchor(allocator.segments[0])
    assert found._anchors == before


def test_the_default_stream_is_no_capture_and_can_be_anchored(allocator):
    start, found = allocator.add(8, stream=0), allocator.allocations()
    allocator.current, allocator.capturing, allocator.place = 0, 9, start + 512
    assert found.alloc_stream(start) == 0
    assert [*found._anchors] == [8]
    asked = allocator.asked
    assert found.alloc_stream(start + 512) == 0
    assert allocator.asked == asked
