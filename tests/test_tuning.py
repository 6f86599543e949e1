"""``python -m safecomm tune``: a table, a file that bucketed() reads, a plot where matplotlib is there."""

from __future__ import annotations

import importlib.util

import pytest

import safecomm
from safecomm.__main__ import DONE, USAGE, main
from safecomm.bucketing import read_tuning
from safecomm.tuning import Tuning, run_tune

TUNING = Tuning("cpu", 2, 8, 1.0, 4.0, {0.5: 2.0, 1: 1.01, 2: 1.0}, 1)


def test_tune_measures_and_writes_what_bucketed_reads(tmp_path, capsys):
    path = tmp_path / "buckets.json"
    few = ["--world", "2", "--tensors", "8", "--tensor-kb", "1", "--passes", "1", "--device", "cpu"]
    assert main(["tune", *few, "--out", str(path)]) == DONE
    out = capsys.readouterr().out
    assert "8 tensors of 1 KiB, 2 ranks, cpu" in out
    assert out.count("<- use this") == 1
    assert f"{read_tuning(path):g} " in next(line for line in out.splitlines() if "use this" in line)


def test_the_table_shows_each_size_and_the_one_to_use():
    lines = TUNING.table().splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["none", "0.5", "1", "2"]
    assert "<- use this" in lines[5]


def test_what_can_not_be_measured_is_refused(tmp_path, capsys):
    for wrong in (["--tensors", "0"], ["--tensor-kb", "-1"], ["--world", "-2"], ["--out", str(tmp_path)]):
        assert main(["tune", "--device", "cpu", *wrong]) == USAGE
        assert "python -m safecomm tune:" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected auto, cpu or cuda"):
        run_tune(device="tpu")


def test_a_plot_is_drawn_where_matplotlib_is_there(tmp_path):
    path = tmp_path / "tuning.png"
    if importlib.util.find_spec("matplotlib"):
        TUNING.plot(path)
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(safecomm.SafecommError, match="takes matplotlib"):
            TUNING.plot(path)
