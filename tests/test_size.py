"""The package does not grow beyond what ``tests/size.py`` says, and what that counts is right."""

from __future__ import annotations

import ast
import doctest

import pytest
import size

import safecomm


@pytest.fixture(scope="module")
def package():
    return size.of_tree((size.CORE,))  # as main() asks for it, so that it is read once


def test_no_figure_is_beyond_what_it_may_be(package):
    found = size.beyond(package.figures())
    assert not found, "\n".join(found)


def test_what_figures_are_now_is_beyond_their_limits():
    """Or it would be no limit that is meant."""
    assert all(size.NOW[name] > size.LIMITS[name] for name in size.NOW)


def test_a_figure_that_rises_is_found_and_one_that_has_reached_its_limit_too(package, monkeypatch):
    figures = package.figures()
    limits = {name: figure - 1 for name, figure in figures.items()}
    monkeypatch.setattr(size, "LIMITS", limits)
    monkeypatch.setattr(size, "NOW", {})
    assert len(size.beyond(figures)) == len(figures)
    assert size.main(["--check"]) == 1
    monkeypatch.setattr(size, "LIMITS", figures)
    assert size.beyond(figures) == []
    assert size.main(["--check"]) == 0
    monkeypatch.setattr(size, "NOW", {size.ANY: figures[size.ANY] + 1})
    (said,) = size.beyond(figures)
    assert "leave NOW" in said


def test_the_examples_of_what_is_counted():
    counted = doctest.testmod(size)
    assert counted.attempted >= 3
    assert not counted.failed


def made(folder, **files):
    """Return a package of ``files``, of which those in core are the core."""
    for name, text in files.items():
        path = folder / "safecomm" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "safecomm" / "__init__.py").write_text("")
    (folder / "safecomm" / "core" / "__init__.py").touch()
    return size.of_tree(root=folder)


def test_paths_circles_and_imports_of_the_core_are_found(tmp_path):
    package = made(
        tmp_path,
        core__ledger="import safecomm.top\nfrom safecomm.core import holds\nfrom safecomm import errors, _torch",
        core__holds="def late():\n    from safecomm.core.ledger import hold\n",
        core__captures="x = 1\ny = 2\n",
        errors="",
        _torch="",
        top="from safecomm.core import ledger",
        shell="from safecomm.top import x",
        alone="from safecomm import errors\nimport os",
    )
    assert package.circles == [["safecomm.core.holds", "safecomm.core.ledger", "safecomm.top"]]
    assert package.into_core == ["safecomm.core.ledger imports safecomm.top"]
    assert package.longest_path[0] == "safecomm.shell"
    assert package.longest_path[-1] in {"safecomm.errors", "safecomm._torch"}
    assert package.statements_of_core == {"__init__.py": 0, "holds.py": 2, "ledger.py": 3}


def test_modules_of_the_package_are_told_from_its_names(package):
    """An import of a name out of a package is one of the package, and of a module out of it one of that module."""
    known = set(package.imports)
    assert {"safecomm", "safecomm.arena", "safecomm.arena.stats"} <= known
    assert "safecomm.arena.stats" in package.imports["safecomm.arena"]
    assert "safecomm.arena" in package.imports["safecomm"]
    assert "safecomm._torch.submodules" in package.imports["safecomm._torch"]
    assert len(known) == len(list(size.ROOT.joinpath("safecomm").rglob("*.py"))) + 1
    assert "safecomm.tools.commands" in package.imports["safecomm_shell"]
    assert size.ROOT.joinpath("safecomm", "__init__.py").samefile(safecomm.__file__)


def test_lines_and_statements_are_those_of_the_code():
    text = '"""Doc\n\nof three."""\n\nx = """a\nb"""  # two lines\n\n\n'
    text += 'def f():\n    "Doc."\n    # Why.\n    return (\n        1\n    )\n'
    assert size.lines(text) == 2 + 1 + 3
    assert size.statements(ast.parse(text)) == 3


def test_the_files_that_are_no_measure_are_there():
    for name in size.NOT_BY_HAND:
        assert size.ROOT.joinpath(name).exists(), name


def test_the_table_says_what_is_counted(capsys):
    assert size.main([]) == 0
    said = capsys.readouterr().out
    for name in size.LIMITS:
        assert name in said
    assert " > " in said
