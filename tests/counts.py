"""The numbers in ``docs/testing.md`` are those of the tree: ``python tests/counts.py`` writes them.

With ``--check`` it only compares them, and exits with 1 where one is another. Each entry of PHRASES is words of that
page with a number in them, which comes from the code.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "testing.md"
RESULTS = HERE.parent / "benchmarks" / "results"


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(folder: Path) -> Iterator[ast.FunctionDef]:
    """Yield the functions at the top of each file in ``folder``."""
    for path in sorted(folder.glob("*.py")):
        yield from (node for node in tree_of(path).body if isinstance(node, ast.FunctionDef))


def tests() -> int:
    """Return the number of tests, before they are repeated with other arguments, rounded down to hundreds."""
    return sum(node.name.startswith("test_") for node in functions(HERE)) // 100 * 100


def gpu_cases() -> int:
    """Return the number of cases that run on GPUs."""
    return sum(
        isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "case"
        for node in functions(HERE / "gpu")
        for mark in node.decorator_list
    )


def arguments(module: str, test: str) -> list[Any]:
    """Return what a test is run with, one time after the other."""
    marks = getattr(import_module(module), test).pytestmark
    return next(list(mark.args[1]) for mark in marks if mark.name == "parametrize")


def length(module: str, name: str) -> Callable[[], int]:
    """Return what counts the elements of a table of the tests."""
    return lambda: len(getattr(import_module(module), name))


def total(module: str, name: str) -> Callable[[], int]:
    """Return what adds up a table of the tests."""
    return lambda: sum(getattr(import_module(module), name).values())


def recorded(name: str) -> int:
    """Return the number of programs in a file of results."""
    return sum(part["programs"] for part in json.loads((RESULTS / f"{name}.json").read_text())["parts"])


def snippets() -> int:
    """Return the number of pieces of Python in the documents that the tests run."""
    docs = import_module("test_docs")
    return sum(runs for path in docs.PAGES for _, _, runs in docs.snippets(path))


PHRASES: dict[str, Callable[[], int]] = {
    "more than {} tests": tests,
    "{} state machines": length("test_ledger", "COUNTS"),
    "{} random programs of up to": total("test_ledger", "COUNTS"),
    "of up to {} steps": lambda: import_module("test_ledger").STEPS,
    "{} wrong ledgers": lambda: len(arguments("test_ledger", "test_machine_catches_a_ledger_that")),
    "{} wrong arenas": lambda: len(arguments("test_arena_programs", "test_programs_catch_an_arena_that")),
    "{} ways in which all of safecomm is wrong": lambda: sum(
        len(getattr(import_module("test_mixed_programs"), name)) for name in ("MUTANTS", "MUTANTS_NCCL2")
    ),
    "{} wrong gates": length("test_gates", "MUTANTS_OF_GATES"),
    "{} wrong takers": length("test_gates", "MUTANTS_OF_TAKERS"),
    "{} wrong ways of the general call": length("test_gates", "MUTANTS_OF_GENERAL"),
    "{} mixed programs have run": lambda: recorded("mixed_programs") + recorded("mixed_programs_nccl2"),
    "{} modules have such points": length("points", "MODULES"),
    "{} cases in which something was once found": lambda: len(
        json.loads((HERE / "corpus" / "differential.json").read_text())
    ),
    "{} files that broke something": lambda: len(list((HERE / "corpus" / "files").iterdir())),
    "{} kinds of calls": length("calls", "ALL"),
    "{} cases on GPUs": gpu_cases,
    "{} versions of torch": lambda: len(import_module("safecomm.versions").TESTED),
    "{} Pythons whose counts are wrong": length("interpreters", "PYTHONS"),
    "{} pieces of Python": snippets,
    "{} pickled names": lambda: len(json.loads((HERE / "fixtures" / "0.1.0" / "names.json").read_text())),
    "{} settings of variables": lambda: len(json.loads((HERE / "fixtures" / "0.1.0" / "variables.json").read_text())),
}
"""Words of the page, and what counts their number."""

NUMBER = r"\d{1,3}(?:,\d{3})+|\d+"


def written(text: str) -> str:
    """Return the text of the page with the numbers of the tree. Raises ValueError if words of PHRASES are not there."""
    for phrase, count in PHRASES.items():
        before, after = (re.escape(part).replace(r"\ ", r"\s+") for part in phrase.split("{}"))
        pattern = re.compile(f"({before})(?:{NUMBER})({after})")
        if not pattern.search(text):
            raise ValueError(f"{PAGE.name} has no words {phrase!r}")
        number = f"{count():,}"
        text = pattern.sub(lambda found, number=number: f"{found[1]}{number}{found[2]}", text)
    return text


def main(arguments: list[str]) -> int:
    """Write the numbers, or with ``--check`` only compare them; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    new = written(text)
    if "--check" in arguments:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
