"""What an installation consists of, without building one: ``make dist`` builds it and tries it."""

from __future__ import annotations

from pathlib import Path

import safecomm

PACKAGE = Path(safecomm.__file__).parent
DATA = [
    "py.typed",
    "diagnostics/page.js",
    "recorded/stock.pickle",
    "recorded/safecomm.pickle",
    "recorded/figures.json",
]
"""What the package reads besides Python, by the folder that the wheel takes whole."""


def test_the_package_holds_all_that_it_reads():
    beside = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.is_file()}
    beside = {name for name in beside if not name.endswith((".py", ".pyc"))}
    assert beside == set(DATA)
