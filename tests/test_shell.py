"""The shell's frame: what needs no torch, mistakes and their hints, several ranks, and how an installation finds it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import safecomm
import safecomm_shell
from safecomm.__main__ import main
from safecomm.tools import commands

ROOT = Path(safecomm.__file__).resolve().parents[1]


def shell(*arguments, script="import safecomm_shell, sys; sys.exit(safecomm_shell.main())", **environment):
    """Run ``safecomm`` with ``arguments``, where torch can't be imported, and return the process."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None\n{script}", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture(scope="module")
def commands_of_the_help():
    return list(safecomm_shell.COMMANDS)


def test_help_version_and_mistakes_need_no_torch():
    version = shell("--version")
    assert (version.returncode, version.stdout) == (0, f"safecomm {safecomm.__version__}\n")
    overview = shell("--help")
    assert overview.returncode == 0
    assert all(f"    {name} " in overview.stdout for name in safecomm_shell.COMMANDS)
    typo = shell("domo")
    assert typo.returncode == 2
    assert typo.stderr.endswith("safecomm: error: there is no command 'domo': did you mean demo?\n")


def test_a_torch_that_is_not_there_is_one_line_and_status_1():
    ended = shell("doctor")
    assert ended.returncode == 1
    assert ended.stderr.startswith("safecomm doctor: ")
    assert "torch" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", safecomm_shell.COMMANDS)
def test_each_commands_help_has_two_examples_that_parse(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    examples = safecomm_shell.COMMANDS[name][2]
    assert len(examples) >= 2
    for words, what in examples:
        assert f"  python -m safecomm {words}\n      {what}\n" in shown
        arguments = words.partition(" > ")[0].split()  # what follows is the shell's
        assert safecomm_shell._parsed(arguments, "safecomm").command == name
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        ([], "", "required: COMMAND"),
        (["demmo"], "", "there is no command 'demmo': did you mean demo?"),
        (["nothing"], "", "there is no command 'nothing'"),
        (["tune", "--round", "x"], " tune", "argument --rounds: invalid int value: 'x'"),
        (["tune", "--roumds=3"], " tune", "there is no option '--roumds': did you mean --rounds?"),
        (["doctor", "--verbose"], " doctor", "there is no option '--verbose'"),
        (["doctor", "json"], " doctor", "there is no argument 'json': did you mean --json?"),
        (["run", "--strikt", "train.py"], " run", "there is no option '--strikt': did you mean --strict?"),
        (["demo", "--device", "tpu"], " demo", "invalid choice: 'tpu'"),
        (["report"], " report", "required: FILE"),
    ],
)
def test_a_mistake_is_told_by_the_commands_own_usage(arguments, usage, said, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"usage: python -m safecomm{usage} [-h]")
    assert told.splitlines()[-1].startswith(f"python -m safecomm{usage}: error: ")
    assert told.splitlines()[-1].endswith(said) or said in told.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["domo"], ["doctor", "--jsn"], ["run", "no_such_script.py"]])
def test_of_several_ranks_one_speaks(arguments, capsys, monkeypatch):
    said = []
    for rank in ("0", "1", "7"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code
        assert status == 2
        said.append(capsys.readouterr().err)
    assert said[0]
    assert said[1:] == ["", ""]


def test_what_goes_wrong_on_one_rank_that_one_says(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")

    def fail(options):
        raise safecomm.SafecommError("of this rank")

    monkeypatch.setitem(commands._COMMANDS, "doctor", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "python -m safecomm doctor: of this rank\n"


def test_every_command_is_done_by_something():
    assert list(safecomm_shell.COMMANDS) == list(commands._COMMANDS)


def test_tune_says_before_it_launches_what_would_fail_on_every_rank(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("safecomm.tools.tune.launch", lambda *_: pytest.fail("it was launched"))
    assert main(["tune", "--low-latency"]) == 1
    assert capsys.readouterr().err == (
        "python -m safecomm tune: there is nothing to tune: low_latency() needs two GPUs, and here there are 1\n"
    )


def test_interrupted_while_torch_is_imported():
    script = """
import builtins, safecomm_shell
real = builtins.__import__
def importing(name, *rest):
    if name == "safecomm":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = importing
sys.exit(safecomm_shell.main())
"""
    ended = shell("doctor", script=script)
    assert (ended.returncode, ended.stderr) == (130, "safecomm doctor: interrupted\n")


# --- what an installation consists of; "make dist" builds one and tries it --------------------------------------------

DATA = {
    "collectives/gate.py.in",
    "py.typed",
    "diagnostics/page.css",
    "diagnostics/page.js",
    "tools/demo/recorded.json",
}
"""What the package reads besides Python. The wheel takes the folder whole."""


def test_the_package_holds_all_that_it_reads():
    folder = ROOT / "safecomm"
    beside = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    beside.remove("_torch/_driver.c")  # compiled where that is asked for, and left out of each wheel
    assert {name for name in beside if not name.endswith((".py", ".pyi", ".pyc", ".abi3.so"))} == DATA


def test_what_the_build_is_told_is_there():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["safecomm"].partition(":")
    assert getattr(importlib.import_module(module), name) is safecomm_shell.main
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert wheel == ["safecomm", "safecomm_shell.py"]
    assert all((ROOT / one).exists() for one in wheel)
    assert (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text().count(safecomm.__version__) == 1
    heading = "Unreleased" if ".dev" in safecomm.__version__ else safecomm.__version__
    assert f"## [{heading}]" in (ROOT / "CHANGELOG.md").read_text()
