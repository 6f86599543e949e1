"""How much of what takes long the tests run: ``make test`` a part, ``make test-all`` all of it."""

import json
import os
from pathlib import Path

ALL = os.environ.get("SAFECOMM_TESTS", "") == "all"
"""Whether all of it runs."""

SEED = int(os.environ.get("SAFECOMM_TESTS_SEED", "0"))
"""What is added to the seeds of random programs: with another one they are others."""

LATER = json.loads((Path(__file__).parent / "later.json").read_text())
"""The tests that only ``make test-all`` runs, and why each may wait for it."""


def share(count: int) -> int:
    """Return how many of ``count`` random programs run: a fifth."""
    return count if ALL else max(1, count // 5)
