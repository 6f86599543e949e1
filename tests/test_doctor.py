"""python -m safecomm doctor: what is green and what is red, for machines that are told of and for this one."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_program

import safecomm
from safecomm import _torch
from safecomm.__main__ import main
from safecomm.tools import doctor
from safecomm.tools.doctor import Diagnosis, Machine, examine

H200 = Machine(
    torch="2.11.0+cu130", python="3.12.3", cuda="13.0", nccl=(2, 28, 9), driver="580.1", gpus=("NVIDIA H200",) * 2,
    links=("GPU0\tX\tNV18", "GPU1\tNV18\tX"), backends=("nccl", "gloo"),
)  # fmt: skip
OLD = Machine(torch="2.6.0", python="3.10.1", cuda="12.4", nccl=(2, 21, 5), gpus=("A",) * 2, backends=("nccl", "gloo"))
CPU = Machine(torch="2.13.0+cpu", python="3.11.7", backends=("gloo",))


def red(machine, **environ):
    return [check for check in examine(machine, environ) if not check.ok]


def names(checks):
    return [check.name for check in checks]


@pytest.mark.parametrize("machine", [H200, OLD, CPU])
def test_a_machine_as_it_comes_is_green(machine):
    assert red(machine) == []
    for check in examine(machine, {}):
        assert check.sentence.endswith(".")


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (H200, "can be used by groups of up to 8 ranks on this machine."),
        (replace(H200, torch="2.15.0+cu132"), "such as torch's flight recorder, don't see it."),
        (replace(H200, low_latency="Triton is not installed"), "as they are: Triton is not installed."),
        (replace(H200, no_peer_access=((0, 1), (1, 0))), "as they are: not all GPUs reach each other's memory."),
    ],
)
def test_it_says_whether_low_latency_can_be_used(machine, said):
    (check,) = [check for check in examine(machine, {}) if check.name == "low_latency()"]
    assert check.ok
    assert said in check.sentence


def test_it_names_the_backend_that_calls_record_stream():
    (check,) = [check for check in examine(replace(H200, torch="2.15.0+cu132"), {}) if check.name == "nccl4py"]
    assert check.ok
    assert check.sentence.endswith("Capture inside of avoid_record_streams().")
    assert "nccl4py" not in names(examine(H200, {}))


def test_every_known_variable_has_a_sentence_for_every_machine():
    for machine in (H200, OLD, CPU):
        for name in doctor.VARIABLES:
            for value in ("", "0", "1", "garbage", "expandable_segments:True", "a:b:c,,:"):
                (check,) = [check for check in examine(machine, {name: value}) if check.name.startswith(f"{name}=")]
                assert check.sentence.endswith(".")


@pytest.mark.parametrize(
    ("machine", "environ", "said"),
    [
        (H200, {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}, "ignored since torch 2.8"),
        (OLD, {"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"}, "memory piles up"),
        (CPU, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}, "did you mean expandable_segments?"),
        (CPU, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments"}, "has no value"),
        (H200, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "holds memory longer"),
        (H200, {"CUDA_DEVICE_MAX_CONNECTIONS": "64"}, "from 1 to 32"),
        (H200, {"CUDA_DEVICE_MAX_CONNECTIONS": "x"}, "from 1 to 32"),
        (H200, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "blocks the host"),
        (H200, {"NCCL_BLOCKING_WAIT": "1"}, "put TORCH_ in front"),
        (H200, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "hangs without end"),
        (H200, {"CUDA_LAUNCH_BLOCKING": "1"}, "waits for every kernel"),
        (H200, {"NCCL_P2P_DISABLE": "1"}, "through the host"),
        (CPU, {"SAFECOMM_RECROD": "x"}, "a typo?"),
        (CPU, {"SAFECOMM_STRICT": ""}, "expected 0 or 1"),
    ],
)
def test_what_is_set_wrong_is_red(machine, environ, said):
    (check,) = red(machine, **environ)
    ((name, value),) = environ.items()
    assert check.name == f"{name}={value}"
    assert said in check.sentence


@pytest.mark.parametrize(
    ("machine", "environ"),
    [
        (OLD, {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}),
        (H200, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}),
        (H200, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}),
        (H200, {"PYTORCH_ALLOC_CONF": "an_option_of_later:1"}),  # torch has taken it, else CUDA had not started
        (CPU, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (CPU, {"SAFECOMM_LOG": "", "SAFECOMM_REPLACE": "", "SAFECOMM_LOW_LATENCY": ""}),
        (H200, {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False"}),
        (H200, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (H200, {"TORCH_NCCL_BLOCKING_WAIT": "0"}),
        (H200, {"SAFECOMM_RECORD": "x.jsonl", "SAFECOMM_LOG": "info"}),
    ],
)
def test_what_is_set_right_is_green(machine, environ):
    assert red(machine, **environ) == []
    assert len(list(examine(machine, environ))) == len(list(examine(machine, {}))) + len(environ)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.3.1"}, "needs 2.4"),
        ({"backends": ("gloo",)}, "no NCCL"),
        ({"no_peer_access": ((0, 1), (1, 0))}, "GPUs 0 and 1 can't reach"),
        ({"driver_answers": False}, "can't be told"),
        ({"allocator_answers": False}, "can't be told"),
        ({"missing": ("It has no such name.",)}, "It has no such name."),
        ({"gpus": (), "refused": "Unrecognized key 'x'."}, "can't be started: Unrecognized key 'x'."),
    ],
)
def test_what_the_machine_lacks_is_red(change, said):
    (check,) = red(Machine(**{**vars(H200), **change}))
    assert said in check.sentence


@pytest.mark.parametrize(
    ("nccl", "applies"), [((2, 27, 7), False), ((2, 28, 9), True), ((2, 30, 6), True), ((2, 30, 7), False)]
)
def test_a_hazard_is_named_for_the_versions_that_have_it(nccl, applies):
    machine = Machine(**{**vars(H200), "nccl": nccl})
    assert ("symmetric memory of NCCL" in names(examine(machine, {}))) is applies


@pytest.mark.parametrize(
    ("torchs", "nccl", "told"),
    [("2.15.0", (2, 30, 7), True), ("2.15.0", (2, 28, 9), False), ("2.11.0", (2, 30, 7), False)],
)
def test_it_says_whether_the_memory_of_nccl_is_told(torchs, nccl, told):
    (check,) = [one for one in examine(replace(H200, torch=torchs, nccl=nccl), {}) if one.name == "memory of NCCL"]
    assert check.sentence.startswith("is told by group") is told


def test_the_command_on_this_machine(monkeypatch, capsys):
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out
    assert ("all is green" in out) is (status == 0)
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    assert main(["doctor"]) == 1
    assert "red    NCCL_BLOCKING_WAIT=1" in capsys.readouterr().out


def test_json(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "99")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["machine"]["torch"] == torch.__version__
    assert [check["ok"] for check in found["checks"] if check["name"].startswith("CUDA_DEVICE")] == [False]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ


def test_colours_are_for_terminals():
    found = Diagnosis(H200, tuple(examine(H200, {"CUDA_LAUNCH_BLOCKING": "1"})))
    assert "\x1b[31m" in found.text(colour=True)
    assert "\x1b" not in found.text()
    assert "1 of" in found.text()
    assert "GPU0\tX\tNV18" in found.text()


@pytest.mark.parametrize(("why", "said"), [("", "are asked in C."), ("of x", "by ctypes, because of x.")])
def test_it_says_who_asks_the_questions_of_each_call(why, said):
    (check,) = [check for check in examine(replace(H200, why_ctypes=why), {}) if check.name == "questions of each call"]
    assert check.ok
    assert said in check.sentence


def test_it_looks_who_asks_them():
    assert doctor.look().why_ctypes == _torch.WHY_CTYPES


REFUSED = {
    "SAFECOMM_AVOID_RECORD_STREAMS": "yes",
    "SAFECOMM_STRICT": "true",
    "SAFECOMM_ARENA": "64 megabytes",
    "SAFECOMM_LOW_LATENCY": "ture",
    "SAFECOMM_RECORD": "/nowhere/at/all.jsonl",
    "SAFECOMM_LOG": "verbose",
    "SAFECOMM_REPLACE": "false",
    "SAFECOMM_BUILD_C": "yes",
}
"""A value that is refused, of each variable of docs/shell.md."""

ASKED = """
import os, sys, safecomm
from safecomm.collectives.takers import ENGINES
from safecomm.patching import runner
from safecomm.peers.limits import read
if ENGINES:
    read(ENGINES[None]._limits, 2)
if "SAFECOMM_BUILD_C" in os.environ:
    sys.path.insert(0, {root!r})
    import hatch_build
    hatch_build.CustomBuildHook("", {{}}, None, None, "", "").initialize("standard", {{}})
safecomm.patch()
"""
"""A program that asks for what each variable decides."""


def test_every_variable_of_the_docs_has_a_value_that_is_refused():
    assert set(REFUSED) == set(doctor.OWN) == own_variables()


def own_variables():
    """Return the variables that the package reads: the names that its files have."""
    pattern = re.compile(r"""["'](SAFECOMM_[A-Z_]+)["']""")
    files = Path(safecomm.__file__).parent.rglob("*.py")
    return {name for path in files for name in pattern.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_a_value_that_is_refused_is_red_with_what_the_refusal_says(name, value, monkeypatch):
    (check,) = red(CPU, **{name: value})
    assert check.name == f"{name}={value}"
    monkeypatch.setenv(name, value)
    ended = run_program(ASKED.format(root=str(Path(safecomm.__file__).parents[1])))
    said = re.sub(r"'[^']*'\.$", "", check.sentence).rstrip(".")  # a path may be of the file itself
    if name == "SAFECOMM_REPLACE":
        said = "which SAFECOMM_REPLACE=false forbids"  # a switch that is misspelt forbids
    assert said in ended.err


def test_each_private_name_that_is_taken_away_is_told_and_not_green():
    for path, name in _torch.NAMES.items():
        machine = replace(CPU, missing=(f"{path} is not there: {name.costs}.",))
        (check,) = red(machine)
        assert path in check.sentence
    later = Diagnosis(replace(CPU, not_yet=("x is not there: y.",)), ())
    assert "\nx is not there: y. Later versions of torch have it.\n" in later.text()
    assert "green" not in later.text().partition("x is not there")[0]


def test_a_name_that_torch_lacks_is_red_or_of_a_later_torch(monkeypatch):
    for path, name in _torch.NAMES.items():
        monkeypatch.setitem(_torch.LACKING, path, "is not there")
        found = doctor.diagnose()
        reds = [check.sentence for check in found.checks if not check.ok and path in check.sentence]
        assert bool(reds) is (name.since <= torch.__version__)
        assert path in found.text()
        assert not any(path in check.sentence for check in found.checks if check.ok)
        monkeypatch.delitem(_torch.LACKING, path)
