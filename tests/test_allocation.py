"""Which stream memory was allocated on, without a device: ``tests/gpu/collectives.py`` asks a real one."""

import functools
import inspect

import pytest
import torch

from safecomm import record_stream
from safecomm.core import allocation
from safecomm.core.allocation import GRANULE, Allocations

FIRST, SECOND, THIRD = (granule << GRANULE for granule in (8, 9, 10))


@pytest.fixture
def known(monkeypatch):
    """Return allocations in which three segments are anchored: two of stream 5, and one of stream 6."""
    monkeypatch.setattr(allocation, "pointer_attribute", None)  # as without a driver
    found = Allocations()
    found._anchored.update({8: 5, 9: 5, 10: 6})
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
    assert known._anchored == {8: 5, 10: 6}
    known.claim(FIRST, THIRD, lambda pointer: 7)
    assert known._anchored == {10: 6}


FOURTH, NOWHERE = 11 << GRANULE, 99 << GRANULE


@pytest.fixture
def asked(monkeypatch):
    """Return allocations with a driver: segments of streams 5, 5 and 6, and one that somebody hands out pieces of."""
    buffers = {8: 101, 9: 102, 10: 103, 11: 104}

    def pointer_attribute(reference, attribute, argument):
        assert attribute == 7
        if argument.value >> GRANULE not in buffers:
            return 1  # CUDA_ERROR_INVALID_VALUE, and the answer stays what it was
        reference._obj.value = buffers[argument.value >> GRANULE]
        return 0

    monkeypatch.setattr(allocation, "pointer_attribute", pointer_attribute)
    found = Allocations()
    found.claim(FOURTH, FOURTH + 1024, lambda pointer: 5 if pointer < FOURTH + 512 else 6)
    for number, (start, stream) in enumerate([(FIRST, 5), (SECOND, 5), (THIRD, 6)]):
        found._segments[101 + number] = (stream, start, start + (1 << GRANULE), (0, 0))
    found._segments[104] = (allocation._CLAIMED, 0, 0, (0, 0))
    return found


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
    before = len(allocation.questions)
    for _ in range(2):
        assert asked.alloc_stream(pointer, other) == stream
    assert len(allocation.questions) <= max(before, 1), "each question is put back, and taken again"


def test_a_question_asked_in_the_middle_of_another_leaves_that_one_alone_s1(asked, monkeypatch):
    """A signal handler, or another thread, can ask between a driver's call and the reading of its answer."""
    ask = allocation.pointer_attribute

    def interrupted(reference, attribute, argument):
        failed = ask(reference, attribute, argument)
        monkeypatch.setattr(allocation, "pointer_attribute", ask)
        assert asked.alloc_stream(THIRD) == 6
        return failed

    monkeypatch.setattr(allocation, "pointer_attribute", interrupted)
    assert asked.alloc_stream(FIRST, SECOND) == 5


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
    assert found._look_up(FIRST, 101) == (5, FIRST, SECOND, (0, 3))
    assert found.allocated((0, 3)) == [(FIRST, FIRST + 512)]
    assert record_stream._blocks_awaiting_free() == "512 bytes"
    assert asked == [given] * 3


def test_a_claim_in_an_expandable_segment_is_met_through_any_part_of_it_s1(asked, monkeypatch):
    """S1: the driver has one id for a part of which a claim takes a piece, and the allocator says no part's end."""
    segment = {"address": FOURTH, "total_size": 1 << GRANULE, "stream": 9, "device": 0}
    segment |= {"is_expandable": True, "blocks": []}
    monkeypatch.setattr(allocation._torch, "segments", lambda: [segment])
    asked._segments.clear()
    beside = FOURTH + (1 << GRANULE) - 512
    assert asked.alloc_stream(beside) == 9
    assert asked.alloc_stream(FOURTH) == 5, "it is of the claim, whoever was asked about first"
    assert asked.alloc_stream(FOURTH + 512) == 6
