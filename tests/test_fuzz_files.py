"""Whatever is in a file, there is a result or one line that says what is wrong, soon and in little memory."""

from __future__ import annotations

from pathlib import Path

import fuzz_files
import pytest
from amount import share
from fuzz_files import CHECKS, FOUND, corpus, watch

FILES = share(300)
"""Of each seed. More are looked at by ``python tests/fuzz_files.py``."""


def test_every_file_that_broke_something_is_told_or_refused():
    outcomes, wrong = watch(FOUND, len(corpus()), 300)
    assert wrong == []
    assert sum(outcomes.values()) == len(corpus())


@pytest.mark.parametrize("seed", [101, 102])
def test_mutated_files_are_told_or_refused(seed):
    outcomes, wrong = watch(seed, FILES, 300)
    assert wrong == []
    assert sum(outcomes.values()) == FILES
    assert {outcome.split()[0] for outcome in outcomes} == set(CHECKS)
    for kind in ("jsonl", "pickle"):  # the files are wrong in ways that are not all the same
        assert outcomes[f"{kind} told"]
        assert outcomes[f"{kind} refused"]


def test_what_dies_hangs_or_fails_is_named(monkeypatch, tmp_path):
    """The fuzzer itself: a file that is more than it may be is wrong, and the next one has its turn."""
    fuzz = tmp_path / "fuzz_files.py"
    spoilt = """
def make(seed, number):
    return "jsonl", b""


def check(kind, data, folder, number=1):
    if number == 1:
        bytearray(3 << 30)
    if number == 2:
        os._exit(3)
    if number == 3:
        raise Wrong("no")
    return "told"
"""
    text = Path(fuzz_files.__file__).read_text()
    fuzz.write_text(text.replace("# --- many ---", f"{spoilt}\n# --- many ---"))
    monkeypatch.setattr(fuzz_files, "__file__", str(fuzz))
    outcomes, wrong = watch(0, 5, 300, report=lambda line: None)
    assert sum(outcomes.values()) == 2
    assert [line.split(":")[0].split(" ")[0] for line in wrong] == ["1", "died", "3"]
    assert "MemoryError" in wrong[0]
    assert "status 3: python tests/fuzz_files.py --seed 0 --only 2" in wrong[1]
