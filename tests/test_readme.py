"""The README is short, its figures and pictures are those of the results, and what it says to type runs."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch
from ranks import on, run_python

import safecomm
from safecomm.__main__ import main
from safecomm.core.captures import CapturedGraph
from safecomm.tools import doctor

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = (ROOT / "docs" / "shell.md").read_text(encoding="utf-8")
WORDS = 900


def script(name):
    return runpy.run_path(str(ROOT / "benchmarks" / name))


def section(text, heading):
    """Return what is under a heading, up to the next."""
    found = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {heading}"
    return found[1]


def snippets(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


# --- what it looks like ---------------------------------------------------------------------------------------------


def test_it_is_one_screen():
    assert len(README.split()) <= WORDS, f"{len(README.split())} words, counting tables and code"


def test_it_speaks_of_no_commit_and_no_number_of_a_promise():
    text = re.sub(r"https?://\S+", "", README)
    commits = [word for word in re.findall(r"\b[0-9a-f]{7,40}\b", text) if re.search("[a-f]", word)]
    assert not commits, "a reader has no use for them"
    assert not re.findall(r"\bS(?:10|[1-9])\b", text), "docs/contract.md explains them, and the README does not"


def test_it_names_the_thread_that_it_began_with():
    thread = "https://discuss.pytorch.org/t/cuda-allocation-lifetime-for-inputs-to-distributed-all-reduce/191573"
    assert f"]({thread})" in README


def test_what_it_does_not_help_comes_first():
    answers = re.findall(r"^\| .*? \| (\w+)[^|]*\|$", section(README, r"Does it help me\?"), re.MULTILINE)
    assert answers == sorted(answers, key=["no", "hardly", "yes"].index)
    assert set(answers) == {"no", "hardly", "yes"}


# --- what is made ---------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_results():
    assert script("table.py")["stale"]() == [], "python benchmarks/table.py writes them"


def test_a_table_is_of_one_run_at_one_commit():
    figures_of = script("table.py")["figures_of"]
    cases = {"one": {"figures": 1}, "two": {"figures": 2}, "of an earlier commit": {"figures": 3, "commit": "0123456"}}
    figures_of.__globals__["load"] = lambda name: {"cases": cases}
    assert figures_of("results.json", "one", "two") == [1, 2]
    with pytest.raises(ValueError, match="ran at several commits"):
        figures_of("results.json", "one", "of an earlier commit")


def test_the_pictures_are_those_of_the_recorded_runs():
    pictures = script("pictures.py")
    assert pictures["stale"]() == [], "python benchmarks/pictures.py draws them"
    for page in pictures["INKS"]:
        assert f"docs/pictures/memory-{page}.svg" in README
    for report in pictures["drawn"]():
        peak = report.timelines[0].title.rpartition(": ")[2]
        assert peak in README, "the words beside the picture say how high it goes"


def test_a_picture_of_other_data_is_stale(tmp_path):
    pictures = script("pictures.py")
    known = pictures["stale"].__globals__
    for page in pictures["INKS"]:
        text = (ROOT / "docs" / "pictures" / f"memory-{page}.svg").read_text(encoding="utf-8")
        (tmp_path / f"memory-{page}.svg").write_text(text.replace("drawn from ", "drawn from 0"), encoding="utf-8")
    known["PICTURES"] = tmp_path
    assert pictures["stale"]() == ["memory-light.svg", "memory-dark.svg"]


# --- what it says to type -------------------------------------------------------------------------------------------


def test_each_make_is_one_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for text in (README, SHELL):
        assert set(re.findall(r"\bmake ([a-z-]+)\b(?=[ `]|$)", text, re.MULTILINE)) <= set(targets)


@on(2)
def test_the_tensor_parallel_code_runs():
    first, _ = snippets("python")
    torch.manual_seed(safecomm.get_rank())
    known = {"grad": torch.randn(3, 4), "weight": torch.randn(4, 5), "x": torch.randn(3, 5)}
    expected = known["grad"] @ known["weight"]
    torch.distributed.all_reduce(expected)
    exec(first, known)
    assert torch.equal(known["grad_x"], expected)
    assert torch.equal(known["grad_weight"], known["grad"].t() @ known["x"])
    assert safecomm.pending() == []


def test_the_code_of_a_graph_has_names_that_there_are():
    _, second = snippets("python")
    owners = {"dist": safecomm, "torch": torch, "captured": CapturedGraph, "cuda_graph": torch.cuda.CUDAGraph}
    asked = [
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(second))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    assert {owner for owner, _ in asked} == set(owners)
    for owner, name in asked:
        assert hasattr(owners[owner], name), f"{owner}.{name}"


def test_the_megatron_command_runs_a_script_patched(tmp_path):
    (line,) = [line for line in README.splitlines() if line.startswith("torchrun")]
    launcher, _, words = line.partition(" -m ")
    assert launcher == "torchrun --nproc-per-node 8"
    module, *arguments = words.replace("<its own arguments>", "--lr 0.1").split()
    (tmp_path / "pretrain_gpt.py").write_text(
        "import sys, torch.distributed, safecomm\n"
        "print(sys.argv, torch.distributed.all_reduce.__code__ is safecomm.all_reduce.__code__)\n"
    )
    ended = run_python("-m", module, *arguments, cwd=str(tmp_path))
    ended.check()
    assert ended.out == "['pretrain_gpt.py', '--lr', '0.1'] True\n"


# --- the page of the shell ------------------------------------------------------------------------------------------


def told(*arguments):
    """Let a command, or all of it, say what it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*arguments, "--help"])


def test_the_page_of_the_shell_has_every_command_and_option(capsys):
    told()
    commands = re.findall(r"^ {4}(\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"run", "report", "tune", "doctor", "demo"} <= set(commands)
    for command in commands:
        told(command)
        options = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
        missing = [option for option in options if f"`{option}" not in section(SHELL, command)]
        assert not missing, f"docs/shell.md, {command}: {missing}"


def test_the_page_of_the_shell_has_every_variable():
    assert set(re.findall(r"^\| `(SAFECOMM_\w+)` ", SHELL, re.MULTILINE)) == set(doctor.OWN)
