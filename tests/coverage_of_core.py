"""Which branches of ``safecomm/core`` the tests take on a CPU: the figure of ``docs/testing.md``.

    python tests/coverage_of_core.py build/coverage/coverage.json   the result and the page, from what coverage found
    python tests/coverage_of_core.py                                the page from the result
    python tests/coverage_of_core.py --check                        only compares: exits 1 where the page is another

``make coverage`` runs the first. It exits 1 if fewer branches than LEAST are taken, or if one is left that WHY_NOT has
no reason for: then a test is missing, or a reason. A reason for a branch that is taken is one to delete.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "safecomm" / "core"
RESULT = ROOT / "benchmarks" / "results" / "coverage.json"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- coverage:begin -->\n", "<!-- coverage:end -->\n"
END_OF_FUNCTION = "the end"

LEAST = 0.95
"""The share of branches that has to be taken."""

WHY_NOT: dict[tuple[str, str, str, str], str] = {
    (
        "captures.py",
        "_end_capture",
        "if not captured.goes_on():",
        "if not unjoined:",
    ): "CUDA ends a capture, or raises: it goes on only where an exception is on its way, and that way is taken.",
    (
        "captures.py",
        "",
        'if register := getattr(torch.cuda.graphs, "register_graph_capture_start_hook", None):  # torch 2.14',
        "register(_note_place)",
    ): "The figures are of a torch that has no such hook. `make compat` runs one that has.",
    ("drain.py", "_without_return_at_exit", "if on_linux:", "try:"): "The figures are of Linux.",
    ("drain.py", "_without_return_at_exit", "if on_linux:", "over.set()"): "The same.",
    (
        "work.py",
        "",
        "if not TYPE_CHECKING:",
        "def wait(self, timeout: timedelta | None = None) -> bool:",
    ): "Only a type checker takes it.",
}
"""Why no test takes a branch, by its file, its function, the line that it begins in, and the one that it goes to.

By the text of the lines and not by their numbers, so that an edit elsewhere in the file changes nothing.
"""


def of_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a report, which ``coverage json`` has written."""
    import torch

    files, left = {}, []
    for path, found in sorted(report["files"].items()):
        name = Path(path).name
        text = (CORE / name).read_text(encoding="utf-8")
        lines = text.splitlines()
        if found["summary"]["num_branches"]:
            files[name] = [found["summary"]["covered_branches"], found["summary"]["num_branches"]]
        for begin, to in found["missing_branches"]:
            # A negative number: out of the function, or of the module, that begins there.
            goes_to = lines[to - 1].strip() if to > 0 else END_OF_FUNCTION
            within = function_at(text, begin)
            left.append({"file": name, "in": within, "at": lines[begin - 1].strip(), "to": goes_to})
    return {
        "torch": torch.__version__.split("+")[0],
        "python": ".".join(map(str, sys.version_info[:2])),
        "coverage": report["meta"]["version"],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "files": files,
        "left": left,
    }


def functions_of(text: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last line of each function of a module; ``""`` is the module itself."""
    found = {"": (1, len(text.splitlines()))}

    def look(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                within = (*names, child.name)
                if isinstance(child, ast.FunctionDef):
                    found[".".join(within)] = (child.lineno, child.end_lineno or child.lineno)
                look(child, within)
            else:
                look(child, names)

    look(ast.parse(text), ())
    return found


def function_at(text: str, line: int) -> str:
    """Return the name of the innermost function that ``line`` is in; ``""`` if it is in none."""
    around = {name: first for name, (first, last) in functions_of(text).items() if first <= line <= last}
    return max(around, key=lambda name: (around[name], name))


def is_there(branch: tuple[str, str, str, str]) -> bool:
    """Return whether the core has the lines of a branch, in the function that it is said to be in."""
    name, within, at, to = branch
    text = (CORE / name).read_text(encoding="utf-8") if (CORE / name).exists() else ""
    first, last = functions_of(text).get(within, (1, 0))
    lines = [line.strip() for line in text.splitlines()[first - 1 : last]]
    return at in lines and to in [*lines, END_OF_FUNCTION]


def named(one: dict[str, str]) -> tuple[str, str, str, str]:
    """Return a branch of a result in the way that WHY_NOT names it."""
    return one["file"], one["in"], one["at"], one["to"]


def share(result: dict[str, Any]) -> tuple[int, int]:
    """Return how many branches are taken, and how many there are."""
    taken, there = (sum(column) for column in zip(*result["files"].values(), strict=True))
    return taken, there


def wrong(result: dict[str, Any]) -> list[str]:
    """Return what a result may not have."""
    found = [
        f"{one['file']}, {one['in']}: no test takes the branch from {one['at']!r} to {one['to']!r}, and WHY_NOT has no "
        "reason for it"
        for one in result["left"]
        if named(one) not in WHY_NOT
    ]
    left = {named(one) for one in result["left"]}
    found += [
        f"WHY_NOT has a reason for a branch that is taken, or is not there: {one}" for one in WHY_NOT if one not in left
    ]
    taken, there = share(result)
    if taken < LEAST * there:
        found.append(f"{taken} of {there} branches are taken, which is less than {LEAST:.0%}")
    return found


def section(result: dict[str, Any]) -> str:
    """Return what the page says of a result."""
    taken, there = share(result)
    return (
        f"On a CPU the tests take **{taken} of {there} branches of the core, {taken / there:.1%}** (torch "
        f"{result['torch']}, Python {result['python']}, {result['date']})"
        + (",\nall but those that `tests/coverage_of_core.py` names with a reason.\n" if taken < there else ".\n")
    )


def written(page: str, result: dict[str, Any]) -> str:
    """Return ``page`` with what it is to say of ``result``."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{section(result)}{END}{after}"


def main(arguments: list[str]) -> int:
    """Do what the module's docstring says, and return the exit status."""
    reports = [argument for argument in arguments if argument != "--check"]
    for report in reports:
        found = of_report(json.loads(Path(report).read_text(encoding="utf-8")))
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    new = written(page, result)
    if "--check" in arguments:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    taken, there = share(result)
    print(f"{taken} of {there} branches of the core are taken: {taken / there:.1%}")
    for one in (problems := wrong(result)):
        print(one, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
