"""What version 0.1.0 wrote means the same to this one: its recordings, plans, files of tune, pickles and variables.

The files are in ``tests/fixtures/0.1.0``. That version made them, by ``tests/fixtures/make.py``, and read them too.
"""

from __future__ import annotations

import base64
import functools
import json
import operator
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from ranks import run_program

import safecomm
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.recording import read_recording
from safecomm.patching.table import NAMES
from safecomm.tools import tune_low_latency as tuning

HERE = Path(__file__).parent / "fixtures"
OLD = HERE / "0.1.0"
OWN = ("expected", "instances", "names", "variables")
"""What is there besides the files of that version."""

sys.path += [str(HERE), str(HERE.parent / "gpu")]
import make  # noqa: E402
from paths import ABSOLUTE  # noqa: E402


@functools.cache
def old(name):
    return json.loads((OLD / f"{name}.json").read_text())


def as_json(thing):
    return json.loads(json.dumps(make.told(thing)))


def alike(new, expected):
    """Return whether ``new`` says all that ``expected`` does. A later version may say more."""
    if isinstance(expected, dict):
        return isinstance(new, dict) and all(name in new and alike(new[name], one) for name, one in expected.items())
    if isinstance(expected, list):
        return isinstance(new, list) and len(new) == len(expected) and all(map(alike, new, expected))
    return type(new) is type(expected) and new == expected


@pytest.mark.parametrize(("name", "part"), make.READ)
def test_a_file_means_what_it_did(name, part):
    found = json.loads(json.dumps(make.meaning(OLD / name, part)))
    assert alike(found, old("expected")["files"][f"{name} {part}".strip()])


def test_every_file_is_read():
    written = {path.name for path in OLD.iterdir()}
    assert written == {name for name, _ in make.READ} | {f"{one}.json" for one in OWN}


def test_what_is_compared_are_values():
    expected = {"a": [1, {"b": 2.0}], "c": None}
    assert alike({"a": [1, {"b": 2.0, "new": 3}], "c": None, "d": 4}, expected)
    for other in ({"a": [1, {"b": 2.5}], "c": None}, {"a": [1], "c": None}, {"a": [1, {"b": 2}], "c": None}, {}):
        assert not alike(other, expected)


# --- recordings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(OLD.glob("*.jsonl")), ids=lambda path: path.name)
def test_a_recording_that_was_cut_off_is_read_up_to_there(path, tmp_path):
    """A process that is killed leaves a part of its last line."""
    whole = read_recording(path)
    text = path.read_text()
    cut = tmp_path / path.name
    cut.write_text(text[:-20])
    part = read_recording(cut)
    assert part.left is None
    assert part.samples == (whole.samples if whole.left is not None else whole.samples[:-1])


def test_a_report_of_recordings_says_what_they_say():
    (told,) = make_reports([OLD / "gpu.jsonl"])
    said = " ".join([*told.summary, *(" ".join(row) for table in told.tables for row in table.rows)])
    for figure in ("7.0 KiB", "2.0 MiB", "train.py:7 in backward", "train.py:24 in run", "irecv"):
        assert figure in said, f"{figure} in {said}"


def test_a_state_that_had_another_name_is_read(tmp_path):
    """Handoffs were "trailing"."""
    *lines, last = (OLD / "cpu.rank0.jsonl").read_text().splitlines()
    end = json.loads(last)
    end["left"][0]["state"] = "trailing"
    path = tmp_path / "trailing.jsonl"
    path.write_text("\n".join([*lines, json.dumps(end)]))
    assert [one["state"] for one in read_recording(path).left] == ["trailing"]
    (told,) = make_reports([path])
    assert told.summary


def test_both_ends_of_a_recording_are_among_them():
    """So that the tests above see a process that ended and one that was killed, with a GPU and without."""
    found = [read_recording(path) for path in OLD.glob("*.jsonl")]
    assert {one.left is None for one in found} == {True, False}
    assert {"active" in one.samples[0] for one in found} == {True, False}
    assert {one.rank for one in found} == {0, 1}


# --- plans, and files of tune ---------------------------------------------------------------------------------------


def test_an_arena_of_a_plan_has_its_size():
    plan = safecomm.Plan.load(OLD / "plan.json")
    arena = safecomm.Arena.from_plan(plan, device="cpu")
    assert arena.nbytes == old("expected")["files"]["plan.json"]["nbytes"]
    arena.close()


def test_a_plan_is_saved_as_it_was(tmp_path):
    safecomm.Plan.load(OLD / "plan.json").save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads((OLD / "plan.json").read_text())


@pytest.mark.parametrize("name", ["tuned.json", "tuned-both.json"])
def test_bucketed_takes_the_file(name):
    safecomm.bucketed(OLD / name)


@pytest.mark.parametrize("name", ["tuned.json", "tuned-both.json", "tuned-low-latency.json"])
def test_tune_adds_to_the_file(name):
    assert tuning.kept(OLD / name) == json.loads((OLD / name).read_text())


# --- pickles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", old("names"))
def test_the_pickle_of_a_name_is_the_name(name):
    if name in NAMES and not hasattr(c10d, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert pickle.loads(old("names")[name].encode()) is operator.attrgetter(name)(safecomm)


@pytest.mark.parametrize("name", old("instances"))
def test_a_pickled_object_says_what_it_said(name):
    thing = pickle.loads(base64.b64decode(old("instances")[name]))
    assert alike(as_json(thing), old("expected")["instances"][name])
    str(thing)
    repr(thing)


def test_a_pickled_plan_is_a_plan():
    assert pickle.loads(base64.b64decode(old("instances")["Plan"])) == safecomm.Plan.load(OLD / "plan.json")


# --- variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(make.VARIABLES)), ids=lambda n: "=".join(make.VARIABLES[n][:2]))
def test_a_variable_does_what_it_did(number, monkeypatch, tmp_path):
    variable, value, program = make.VARIABLES[number]
    row = old("variables")[number]
    assert (row["variable"], row["value"]) == (variable, value)
    for name in os.environ:
        if name.startswith("SAFECOMM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ended = run_program(f"import os\nos.chdir({str(tmp_path)!r})\n{program}")
    assert ended.out == row["printed"], ended.err


def test_every_variable_that_version_knew_is_tried():
    assert {row["variable"] for row in old("variables")} == {
        "SAFECOMM_ARENA",
        "SAFECOMM_AVOID_RECORD_STREAMS",
        "SAFECOMM_LOG",
        "SAFECOMM_LOW_LATENCY",
        "SAFECOMM_RECORD",
        "SAFECOMM_STRICT",
    }


# --- the fixtures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(OLD.iterdir()), ids=lambda path: path.name)
def test_a_fixture_names_no_directory_of_a_machine(path):
    assert not ABSOLUTE.search(path.read_text())
    assert path.stat().st_size < 32_000
