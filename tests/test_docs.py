"""The documents: their snippets run, the site has all of them, and the reference has every public name."""

import ast
import contextlib
import doctest
import functools
import inspect
import io
import os
import re
import tempfile
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from ranks import on

import safecomm
from safecomm import functional, leaks
from safecomm.collectives import effects

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def name_of(path):
    return str(path.relative_to(ROOT))


# --- snippets ----------------------------------------------------------------------------------------------

FENCE = re.compile(r"^(<!-- not run: .+ -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def snippets(path):
    """Return the Python of a page: where it begins, its text, and whether a CPU can run it."""
    text = path.read_text()
    return [(text.count("\n", 0, match.start(2)), match[2], match[1] is None) for match in FENCE.finditer(text)]


def compiled(path, line, code):
    return compile("\n" * line + code, name_of(path), "exec", flags=ast.PyCF_ONLY_AST)


RUN = [name_of(path) for path in PAGES if any(runs for _, _, runs in snippets(path))]


def the_readers():
    """Return what a snippet takes from the program that it would be part of."""
    model = torch.nn.Linear(4, 4)

    def train_step(model, batch):
        model(batch).sum().backward()

    return {
        "batches": [torch.ones(2, 4)] * 2,
        "gradients": [torch.ones(8) for _ in range(3)],
        "model": model,
        "safecomm": safecomm,
        "step": lambda: safecomm.empty(64),
        "steps": 3,
        "train": lambda: None,
        "train_step": train_step,
        "dist": safecomm,
    }


@contextlib.contextmanager
def elsewhere():
    """Be in a directory that is gone afterwards, print nothing, and leave nothing patched."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)
            safecomm.unpatch()


@pytest.mark.parametrize("page", RUN)
@on(2)
def test_the_snippets_of_a_page_run_one_after_the_other(page):
    namespace = {**the_readers(), "__name__": "__main__"}
    with elsewhere():
        for line, code, runs in snippets(ROOT / page):
            if runs:
                exec(compile(compiled(ROOT / page, line, code), page, "exec"), namespace)


@pytest.mark.parametrize("path", [path for path in PAGES if snippets(path)], ids=name_of)
def test_every_snippet_is_python_and_names_what_there_is(path):
    modules = {"dist": safecomm, "safecomm": safecomm, "functional": functional, "leaks": leaks}
    for line, code, _ in snippets(path):
        for node in ast.walk(compiled(path, line, code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert hasattr(modules[node.value.id], node.attr), f"{path.name}:{node.lineno}: {ast.unparse(node)}"


# --- the site ----------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once():
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(nav) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_the_page_of_the_tests_says_what_is_not_tested_and_names_files_that_there_are():
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    assert "## What is not tested" in page
    files = re.findall(r"`(?:python )?(tests/\w+(?:\.py)?)", page)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


# --- the reference -------------------------------------------------------------------------------------------

ENTRY = re.compile(r"^::: (safecomm\.\S+)((?:\n(?: {4}.*)?)*)", re.M)


def entries():
    """Yield the names that the reference has, each with the members that it is asked for, None for all."""
    for path in sorted((DOCS / "reference").glob("*.md")):
        for name, options in ENTRY.findall(path.read_text()):
            members = re.search(r"members: \[(.*)\]", re.sub("inherited_members", "", options))
            yield name, members and [one for one in members[1].split(", ") if one]


REFERENCE = dict(entries())


RETURNED = {
    f"safecomm.diagnostics.{name}"
    for name in ("record.MemoryReport", "collective_log.CollectiveLog", "collective_log.LoggedCall")
}
"""What is returned by functions that are public, and has no public name itself."""


def test_the_reference_has_every_public_name_once():
    names = [name for name, _ in entries()]
    assert len(names) == len(set(names))
    own = {f"safecomm.{name}" for name in safecomm._OWN if name != "leaks"}
    elsewhere = {f"safecomm.leaks.{name}" for name in leaks.__all__} | {"safecomm.diagnostics.debug_server.HeldHandler"}
    assert set(names) == own | elsewhere | RETURNED
    assert sorted(REFERENCE["safecomm.functional"]) == functional.__all__


def test_the_public_names_are_torchs_those_that_are_wrapped_and_safecomms_own():
    wrapped = {name for name in effects.TABLE if not name.startswith("_") and hasattr(safecomm, name)}
    assert {*wrapped, *safecomm._OWN} <= set(safecomm.__all__)
    for name in set(safecomm.__all__) - wrapped - set(safecomm._OWN):
        assert getattr(safecomm, name) is getattr(torch.distributed, name)


@pytest.mark.parametrize("name", REFERENCE)
def test_what_the_reference_shows_is_there_and_documented(name):
    thing = resolve_name(name)
    assert inspect.getdoc(thing)
    for member in REFERENCE[name] or ():
        assert hasattr(thing, member) or member in thing.__annotations__


# --- the examples of docstrings --------------------------------------------------------------------------------

SHOWN = [*REFERENCE, *(f"safecomm.functional.{name}" for name in functional.__all__)]
EXAMPLES = [name for name in SHOWN if ">>>" in (inspect.getdoc(resolve_name(name)) or "") and name != "safecomm.graph"]


def test_every_function_and_every_context_has_an_example():
    lower = [name for name in SHOWN if name.rpartition(".")[2].islower()]
    assert {*lower, "safecomm.Work", "safecomm.Arena"} - {"safecomm.graph"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
@on(2)
def test_the_examples_of_a_docstring_run(name):
    thing = resolve_name(name)
    namespace = {one: getattr(safecomm, one) for one in safecomm._OWN}
    namespace |= {**vars(leaks), **the_readers(), "torch": torch, "functional": functional}
    namespace |= {"tensor": torch.ones(8), "x": torch.ones(4, 4), "w": torch.ones(4, 4), "h": torch.ones(4, 4)}
    namespace |= {"part": torch.ones(4), "whole": torch.ones(8), "tokens": torch.ones(4, 2), "group": None}
    namespace |= {"sent": [2, 2], "received": [2, 2]}
    runner = doctest.DocTestRunner(verbose=False)
    said = io.StringIO()
    with elsewhere():
        for test in doctest.DocTestFinder(recurse=isinstance(thing, type)).find(thing, name, False, globs=namespace):
            runner.run(test, out=said.write)
    assert runner.tries
    assert not runner.failures, said.getvalue()
