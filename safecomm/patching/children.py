"""Processes that a program starts by itself: how they begin as the first one has, and which ranks took part.

The way of coverage.py and OpenTelemetry: an environment in which each Python process, whoever starts it, runs our
``site/sitecustomize.py``. A process that was forked has what its parent had.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "_SAFECOMM_CHILDREN"
_SITE = Path(__file__).parent / "site"


def variables(options: Mapping[str, object]) -> dict[str, str]:
    """Return the variables by which each Python process that is started with them begins with ``options``.

    They are the arguments of :func:`safecomm.patching.runner.begin`.

    Examples
    --------
    >>> sorted(variables({"strict": True}))
    ['PYTHONPATH', '_SAFECOMM_CHILDREN']
    """
    before = os.environ.get("PYTHONPATH")
    others = [] if not before else [path for path in before.split(os.pathsep) if path != str(_SITE)]
    return {"PYTHONPATH": os.pathsep.join([str(_SITE), *others]), VARIABLE: json.dumps(options)}


def take_part(directory: str, rank: int) -> None:
    """Leave a mark in ``directory`` that ``rank`` took part."""
    Path(directory, f"took part.{rank}").touch()


def took_part(directory: str) -> int:
    """Return how many ranks have left their mark in ``directory``."""
    return len(list(Path(directory).glob("took part.*")))
