"""bucketed(), regions, functional, operators, objects and drains, mixed: as one by one, or refused with nothing done.

``python tests/block_programs.py --seed S --programs N --world W`` tries others.
"""

import amount
import block_programs
import pytest

FOUND = {2: [16, 24, 32, 34, 35], 3: [0, 5, 9, 14]}
"""Programs of seed 1, by the number of ranks, that went wrong before calls that complete at once began by one rule.

With two ranks: inputs that were read before what was deferred on them was launched, of functional calls and of
objects, and lazy bits. With three: also calls that a region collected.
"""


@pytest.mark.parametrize("world", [2, 3, 4])
def test_s8_programs_of_blocks_give_what_their_calls_give_one_by_one(world):
    assert not block_programs.run(amount.SEED, range(amount.share(250)), world)


@pytest.mark.parametrize("world", FOUND)
def test_s8_programs_of_blocks_that_once_went_wrong(world):
    assert not block_programs.run(1, FOUND[world], world)


@pytest.mark.parametrize("broken", block_programs.BREAKS)
def test_programs_of_blocks_find_a_begin_that_is_wrong(broken):
    assert "block_programs.py --seed 1 --only" in block_programs.run(1, range(60), 2, broken)
