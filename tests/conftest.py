import fnmatch
import json
import logging
import os
from pathlib import Path

import amount
import pytest
import torch
from ranks import Pools
from torch.torch_version import TorchVersion

# The tests' tensors are tiny. A second thread has nothing to do for them but to wait, which it does by spinning, on the
# core that a rank needs. The same for the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

SKIPS = json.loads((Path(__file__).parent / "compat_skips.json").read_text())
"""The tests that can't run on an old torch, and why. On the newest there are none."""


LONGEST = ("test_front_programs.py", "test_low_latency.py", "test_frameworks.py", "test_workloads.py")
"""The files that begin first: at the end one process of the tests would wait for another that has one of them."""

SEARCHING = ("test_patching.py", "test_leaks_ways.py", "test_leaks.py", "test_threaded_ranks.py", "test_ending.py")
"""The files that come next: their tests look through all objects of the process, and other files leave many there."""

FIRST = [*LONGEST, *SEARCHING]


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    if not amount.ALL:
        patterns = [pattern for entry in amount.LATER for pattern in entry["tests"]]
        later = [item for item in items if any(fnmatch.fnmatchcase(item.nodeid, f"*{one}") for one in patterns)]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in set(later)]
    version = TorchVersion(torch.__version__)
    for entry in SKIPS:
        if version < entry["before"]:
            mark = pytest.mark.skip(reason=entry["reason"])
            for item in items:
                if any(fnmatch.fnmatchcase(item.nodeid, f"*{pattern}") for pattern in entry["tests"]):
                    item.add_marker(mark)


@pytest.fixture(scope="module")
def quiet():
    """Nothing is formatted of what safecomm says: of thousands of programs that would be half of the time.

    And what is said of a failure has its traceback, and so the memory, which pytest would keep.
    """
    log = logging.getLogger("safecomm")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.fixture(scope="session")
def pools():
    pools = Pools()
    yield pools
    pools.close()
