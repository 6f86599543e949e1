"""Random programs that hypothesis writes: how many, and several kinds of them at the same time."""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from amount import SEED, share
from hypothesis import HealthCheck, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from interpreters import PYTHONS
from ranks import Launch

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


class Running:
    """``count`` programs of a machine, which run in an interpreter of their own, beside whatever else runs.

    With each ``number`` they are others. ``python`` names another Python than this, of ``interpreters.py``.
    """

    def __init__(
        self, machine: type[RuleBasedStateMachine], count: int, steps: int, number: int = 0, python: str = ""
    ) -> None:
        # No limit that a slow machine could reach: they end by themselves.
        names = machine.__module__, machine.__name__
        self._launch = Launch(1, _run, *names, share(count), steps, number + SEED, python, limit=3600)

    def check(self) -> None:
        """Wait for them, and raise what hypothesis found."""
        (ended,) = self._launch.end()
        ended.check()

    def close(self) -> None:
        self._launch.close()


def _run(_: int, module: str, machine: str, count: int, steps: int, number: int, python: str) -> None:
    if python:
        assert "safecomm" not in sys.modules
        PYTHONS[python]()
    logging.getLogger("safecomm").setLevel(logging.ERROR)
    numbered = seed(number)(getattr(importlib.import_module(module), machine))
    run_state_machine_as_test(numbered, settings=programs(count, steps))
