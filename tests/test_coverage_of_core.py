"""The page's figure of branches that are taken is that of the result, and the result is one of this core."""

from __future__ import annotations

import json
from pathlib import Path

import coverage_of_core as of_core
import pytest


@pytest.fixture(scope="module")
def result():
    return json.loads(of_core.RESULT.read_text(encoding="utf-8"))


def test_the_page_says_what_the_result_says(result):
    page = of_core.PAGE.read_text(encoding="utf-8")
    assert of_core.written(page, result) == page, "python tests/coverage_of_core.py writes it"
    assert of_core.main(["--check"]) == 0


def test_enough_branches_are_taken_and_each_that_is_left_has_a_reason(result):
    assert of_core.wrong(result) == []


def test_the_branches_that_are_left_are_in_the_core(result):
    """A reason for a line that is gone is a reason for nothing: ``make coverage`` writes the result anew."""
    assert {*result["files"]} <= {path.name for path in of_core.CORE.glob("*.py")}
    assert [branch for branch in map(of_core.named, result["left"]) if not of_core.is_there(branch)] == []


def test_a_branch_is_found_by_its_function_and_its_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(of_core, "CORE", tmp_path)
    lines = ["if A:", " B", "class C:", " def f(self):", "  def g():", "   if D:", "    E", "  if D:", "   F"]
    text = "\n".join(lines)
    (tmp_path / "one.py").write_text(text, encoding="utf-8")
    assert [of_core.function_at(text, line) for line in range(1, 10)] == [
        "", "", "", "C.f", "C.f.g", "C.f.g", "C.f.g", "C.f", "C.f"
    ]  # fmt: skip
    assert of_core.is_there(("one.py", "C.f.g", "if D:", "E"))
    assert of_core.is_there(("one.py", "C.f.g", "if D:", "the end"))
    assert of_core.is_there(("one.py", "", "if A:", "B"))
    for gone in [
        ("two.py", "C.f", "if D:", "F"),  # its file
        ("one.py", "C.h", "if D:", "F"),  # its function
        ("one.py", "C.f.g", "if A:", "E"),  # the line that it begins in
        ("one.py", "C.f.g", "if D:", "F"),  # the line that it goes to
    ]:
        assert not of_core.is_there(gone)


def report(*missing, taken=98):
    """Return what ``coverage json`` writes of 100 branches in the ledger."""
    found = {
        "summary": {"num_branches": 100, "covered_branches": taken},
        "missing_branches": [list(one) for one in missing],
    }
    empty = {"summary": {"num_branches": 0, "covered_branches": 0}, "missing_branches": []}
    files = {"safecomm/core/ledger.py": found, "safecomm/core/__init__.py": empty}
    return {"meta": {"version": "7.10"}, "files": files}


def test_branches_without_a_reason_reasons_without_a_branch_and_too_few_branches_are_told(monkeypatch):
    monkeypatch.setattr(of_core, "WHY_NOT", {})
    lines = (of_core.CORE / "ledger.py").read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line == "        if not self.asks_in_wait:")
    found = of_core.of_report(report((number, number + 1), (number, -number)))
    assert found["files"] == {"ledger.py": [98, 100]}
    branches = [
        ("ledger.py", "WorkQueue.relaxed", "if not self.asks_in_wait:", to) for to in ("return _NOTHING", "the end")
    ]
    assert [of_core.named(one) for one in found["left"]] == branches
    assert len(of_core.wrong(found)) == 2
    of_core.WHY_NOT.update(dict.fromkeys(branches, "Because."))
    assert of_core.wrong(found) == []
    assert "**98 of 100 branches of the core, 98.0%**" in of_core.section(found)
    (taken,) = of_core.wrong(of_core.of_report(report((number, -number))))
    assert "a reason for a branch that is taken" in taken
    of_core.WHY_NOT.clear()
    (few,) = of_core.wrong(of_core.of_report(report(taken=94)))
    assert "94 of 100 branches" in few
    assert of_core.wrong(of_core.of_report(report(taken=95))) == []


def test_a_page_of_another_result_is_found_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "testing.md"
    page.write_text(of_core.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(of_core, "PAGE", page)
    monkeypatch.setattr(of_core, "RESULT", tmp_path / "coverage.json")
    Path(tmp_path / "report.json").write_text(json.dumps(report(taken=94)), encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    assert of_core.main([str(tmp_path / "report.json")]) == 1
    assert "94 of 100" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") != before
    assert of_core.main(["--check"]) == 0
    page.write_text(before, encoding="utf-8")
    assert of_core.main(["--check"]) == 1
