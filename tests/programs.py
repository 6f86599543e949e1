"""Random programs that hypothesis writes: how many."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

# The programs are the same on every run: there is nothing to keep, and a directory in the checkout is in pytest's way.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")


def programs(count: int, steps: int, **more: Any) -> settings:
    """Return settings under which a machine runs ``count`` programs, the same on every run."""
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        **more,
    )
