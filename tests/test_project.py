"""What people join by: the files at the top, the version, the long description, the linters, and the tutorial."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Ended, run_python, start_ranks

import safecomm

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
TOP = {
    ".ci", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE",
    "Makefile", "README.md", "SECURITY.md", "benchmarks", "docs", "examples", "hatch_build.py", "mkdocs.yml",
    "pyproject.toml", "safecomm", "safecomm_shell.py", "tests",
}  # fmt: skip


def fenced(text, language=""):
    """Return what the blocks of that language have."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for of, code in blocks if of == language]


def test_the_top_has_nothing_that_need_not_be_there():
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {path.split("/")[0] for path in listed.split("\0") if path} <= TOP


def test_the_version_is_told_once_and_cited():
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == safecomm.__version__


def test_the_linters_before_a_commit_are_those_of_make_lint():
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    before = {tuple(entry.split()) for entry in re.findall(r"entry: \.venv/bin/([^,]+),", config)}
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    of_make = {
        tuple(line.split())
        for line in re.findall(r"\$\(BIN\)/(.*)", recipe.replace("--pythonpath $(BIN)", "--pythonpath .venv/bin"))
    }
    assert before == {tuple(word for word in line if word != ".") for line in of_make}


def test_what_is_not_published_is_not_in_what_people_copy():
    for path in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        blocks = fenced(path.read_text())
        assert blocks, path.name
        for block in blocks:
            assert not re.search(r"pip install (?!\.|-e|')", block), path.name


# --- the long description -------------------------------------------------------------------------------------------


@pytest.fixture
def described():
    """Return ``docs/long_description.py``."""
    return runpy.run_path(str(ROOT / "docs" / "long_description.py"))


def links(text):
    return re.findall(r"\]\(([^)]*)\)", text)


@pytest.mark.parametrize("address", ["", "https://x.org/a/b", "https://x.org/a/b/"])
def test_each_link_of_the_long_description_needs_no_other_file(described, address):
    text = described["long_description"](README, address)
    assert all(link.startswith("https://") for link in links(text))
    assert "<picture>" not in text
    assert "<img" not in text
    linked = re.compile(r"<picture>.*?</picture>|!?\[([^]]+)\]\([^)]+\)", re.DOTALL)
    words = [linked.sub(r"\1", one) for one in (README, text)]
    assert re.sub(r"Memory over time[^\n]*\n", "", words[1]).split() == words[0].split()
    if not address:
        assert links(text) == [link for link in links(README) if link.startswith("https://")]
        return
    there = [link.removeprefix("https://x.org/a/b/") for link in links(text) if link.startswith(address)]
    assert len(there) > 10
    for path in there:
        kind, branch, file = path.split("/", 2)
        assert (kind, branch) in (("raw", "main"), ("blob", "main"))
        assert (ROOT / file.partition("#")[0]).exists(), file


def test_the_project_is_given_that_text_with_the_address_that_it_has(described):
    hook = described["CustomMetadataHook"](str(ROOT), {})
    for urls, address in (({}, ""), ({"Repository": "https://x.org/a"}, "https://x.org/a")):
        metadata = {"urls": urls}
        hook.update(metadata)
        assert metadata["readme"]["text"] == described["long_description"](README, address)


# --- the tutorial ---------------------------------------------------------------------------------------------------


def test_the_tutorial_is_one_page():
    assert len(TUTORIAL.split()) <= 900


def told(text):
    """Return the words of a text, with a 0 for each of its numbers, any time as 0 s, and no lines of dashes."""
    without = re.sub(r" -+(?= |$)", "", text, flags=re.MULTILINE)
    return re.sub(r"\d+(\.\d+)?( [mu]?s\b)?", lambda found: "0 s" if found[2] else "0", without).split()


def test_each_command_of_the_tutorial_runs_and_says_what_the_page_says(tmp_path):
    (script,) = fenced(TUTORIAL, "python")
    (tmp_path / "train.py").write_text(script)
    commands = "".join(fenced(TUTORIAL)).splitlines()
    assert len(commands) == 6
    for name in ("stock", "safecomm"):  # what the commands write on GPUs
        shutil.copy(ROOT / "benchmarks" / "results" / "snapshots" / f"{name}.pickle", tmp_path)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = ""
    for number, command in enumerate(commands):
        program, *words = command.split()
        if program == "python":
            ended = [run_python(*words, cwd=str(tmp_path), **environment)]
        elif number:  # what torchrun starts, without torchrun
            assert (program, words[:2]) == ("torchrun", ["--nproc-per-node", "2"])
            environment["LOCAL_WORLD_SIZE"] = "2"
            ended = start_ranks(2, *words[2:], cwd=str(tmp_path), limit=120, **environment).end()
        else:
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
            with_ours = {**os.environ, **environment}
            done = subprocess.run(run, cwd=tmp_path, env=with_ours, capture_output=True, text=True, timeout=120)
            ended = [Ended(done.returncode, done.stdout, done.stderr)]
        for one in ended:
            assert one.status == 0, f"{command}\n{one.err}"
            printed += one.out.replace(f"{tmp_path}/", "")
    for shown in fenced(TUTORIAL, "text"):
        assert " ".join(told(shown)) in " ".join(told(printed)), shown
    for figure in re.findall(r"`(with every block[^`]*)`|^(Peak .*)$", TUTORIAL, re.MULTILINE):
        assert "".join(figure) in printed
    assert (tmp_path / "held.html").exists()
    assert (tmp_path / "both.html").exists()
