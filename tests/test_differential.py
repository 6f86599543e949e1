"""Calls by chance are as torch.distributed's (S8): some seeds, and every case in which something was once found.

``python tests/differential.py --seed S --seconds N`` tries others, and ``--new`` a seed that nobody has tried.
"""

import json
import random
from pathlib import Path

import pytest
from amount import SEED, share
from differential import ORDINARY, Session, brief, compare, known, make

CORPUS = json.loads((Path(__file__).parent / "corpus" / "differential.json").read_text())


@pytest.fixture(scope="module")
def sessions():
    made = {}
    yield lambda world: made.setdefault(world, Session(world))
    for session in made.values():
        session.ranks.close()


@pytest.mark.parametrize(
    ("seed", "world", "cases"), [(1 + SEED, 2, share(150)), (3 + SEED, 1, share(100)), (4 + SEED, 3, share(50))]
)
def test_calls_by_chance_are_torchs_s8(sessions, seed, world, cases):
    session, found = sessions(world), []
    for number in range(cases):
        case = make(seed, number)
        # Confirmed only then: it takes new ranks.
        different = session.examine(case) and session.confirm(case)
        if different:
            again = f"python tests/differential.py --seed {seed} --only {number} --world {world}"
            found.append(f"{again}  # {case['call']}: {brief(different)}")
            if len(found) == 3:  # each takes seconds to confirm
                break
    assert not found, "\n".join(found)
    # Most cases have to say something: a generator of calls that torch can't run would prove nothing.
    compared, raised = session.counts["compared"], session.counts["of them torch raises"]
    assert compared > 0.7 * cases
    assert compared - raised > 0.25 * cases


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry["found"])
def test_what_was_found_once_is_torchs_s8(sessions, entry):
    case = {**ORDINARY, **entry["case"]}
    session = sessions(entry.get("world", 2))
    before = session.counts["compared"]
    different = session.examine(case)
    different = different and session.confirm(case)
    assert not different, brief(different)
    assert session.counts["compared"] == before + 1, "torch itself does not do it any more"


def test_a_case_is_what_its_seed_and_number_say():
    assert [make(5, number) for number in range(20)] == [make(5, number) for number in range(20)]
    assert make(5, 1) != make(5, 2)
    state = random.getstate()
    make(5, 3)
    assert random.getstate() == state
    assert set(make(5, 1)) == set(ORDINARY)


def test_what_differs_is_found_unless_it_is_known():
    # The comparison itself: a difference of one version, and the same where the documentation says that it may be.
    case = {**ORDINARY, "call": "all_gather"}
    expected = [{"version of 0": 2, "bits of 0": "same"}] * 2
    assert compare(case, expected, expected) == {}
    found = [expected[0], {**expected[1], "version of 0": 1}]
    assert compare(case, expected, found) == {"rank 1, version of 0": (2, 1)}
    assert compare({**case, "context": "bucketed"}, expected, found) == {}
    held = [{**expected[0], "held": ["all_gather 16"]}, expected[1]]
    assert compare(case, expected, held) == {"rank 0, held": (None, ["all_gather 16"])}
    assert not known({**case, "_raises": False}, "bits of 0")
