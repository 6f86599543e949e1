"""The protocol of the ring, as a model: what it needs, and that nothing of it can be left out."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol import Wrong, explore, walk
from ring_protocol import TO_REDUCE, both_ways, one_way, start

SHAPES = [both_ways, one_way, [both_ways, one_way], [one_way, both_ways]]

FAULTS = {
    "one phase": functools.partial(both_ways, phases=1),
    "no fence": functools.partial(both_ways, fence=False),
    "sent before the results are copied": functools.partial(both_ways, early=True),
    "a gather with one phase": functools.partial(one_way, phases=1),
    "a gather without a fence": functools.partial(one_way, fence=False),
    "a gather that sends before the last piece has come": functools.partial(one_way, early=True),
    "a gather that does so behind an all_reduce": [both_ways, functools.partial(one_way, early=True)],
    "a gather to the places of what is to reduce": [functools.partial(one_way, kind=TO_REDUCE), both_ways],
}


@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize("lengths", [(5,), (2, 1, 3), (1, 0, 3)])
def test_two_ranks_never_read_wrong_or_wait_for_ever_whatever_happens(make, lengths):
    assert 100 < explore(start(make, 2, lengths), limit=20_000) < 20_000  # so that all states were seen


@pytest.mark.parametrize(("make", "lengths"), [(both_ways, (1, 1)), (one_way, (2,)), (one_way, (1, 1))])
def test_three_ranks_neither(make, lengths):
    assert 3_000 < explore(start(make, 3, lengths), limit=20_000) < 20_000


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 8]), st.sampled_from(SHAPES), st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.integers(1, 3), st.integers(0, 1 << 32),
)  # fmt: skip
def test_more_ranks_and_programs_never_read_wrong_or_wait_for_ever(ranks, make, lengths, programs, seed):
    """However few programs a device runs at once: here one, of up to three."""
    if ranks == 8:
        lengths, programs = lengths[:2], 1
    walk(start(make, ranks, lengths, programs=programs), random.Random(seed))


def found_wrong(ranks, make, **how):
    for seed in range(100):
        try:
            walk(start(make, ranks, (6, 3), **how), random.Random(seed))
        except Wrong:
            return True
    return False


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_out_is_found(fault, ranks):
    assert found_wrong(ranks, FAULTS[fault])


@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_without_a_ticket_wait_for_each_other_for_ever(ranks):
    """A rank that runs one program at a time begins with another than its peer."""
    assert found_wrong(ranks, both_ways, programs=2, ticket=False)
    assert not found_wrong(ranks, both_ways, programs=2)
    assert not found_wrong(ranks, both_ways, programs=2, room=2, ticket=False)  # all of them at once: nobody needs one
