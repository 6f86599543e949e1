"""Where memory is at home, of what is known without a device: ``tests/gpu/collectives.py`` asks a real one."""

import pytest

from safecomm import homes
from safecomm.homes import GRANULE, Homes

FIRST, SECOND, THIRD = (granule << GRANULE for granule in (8, 9, 10))


@pytest.fixture
def known(monkeypatch):
    """Return homes in which three segments are pinned: two of stream 5, and one of stream 6."""
    monkeypatch.setattr(homes, "pointer_attribute", None)  # as without a driver: nothing is known but what is pinned
    found = Homes()
    found._pinned.update({8: 5, 9: 5, 10: 6})
    return found


def test_what_is_pinned_is_known_without_the_driver_s1(known):
    assert known.home(SECOND) == known.home(SECOND + 7, FIRST) == 5
    assert known.home(THIRD) == 6
    assert known.home(THIRD, FIRST) is None
    assert known.all_at_home(5, [FIRST, FIRST + 512, SECOND])
    assert not known.all_at_home(5, [FIRST, THIRD])
    assert not known.all_at_home(6, [THIRD, 11 << GRANULE])


def test_a_claim_ends_what_is_known_of_the_segments_that_it_lies_in_s1(known):
    known.claim(SECOND + 512, SECOND + 1024, lambda pointer: 7)
    assert known._pinned == {8: 5, 10: 6}
    known.claim(FIRST, THIRD, lambda pointer: 7)
    assert known._pinned == {10: 6}
