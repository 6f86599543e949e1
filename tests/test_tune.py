"""python -m safecomm tune: a real run on two ranks, the file that bucketed() reads, and bad input."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from ranks import on

import safecomm
from safecomm.__main__ import main
from safecomm.tools.tune import best, launch


def test_the_smallest_size_that_is_about_as_fast_is_the_best():
    assert best({4.0: 900.0, 16.0: 500.0, 32.0: 495.0}) == 16.0
    assert best({4.0: 900.0, 16.0: 530.0, 32.0: 495.0}) == 32.0
    assert best({8.0: 1.0}) == 8.0


def test_it_measures_says_and_writes(tmp_path):
    out, png = tmp_path / "tuned.json", tmp_path / "tuned.png"
    command = ["tune", "--world", "2", "--rounds", "1", "--mib", "1", "32", "--out", str(out), "--png", str(png)]
    done = subprocess.run(
        [sys.executable, "-m", "safecomm", *command],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["bucket_mb"] in (1.0, 32.0)
    assert set(found["us"]) == {"one by one", "torch's _coalescing_manager", "bucketed(1)", "bucketed(32)"}
    assert f"bucketed({found['bucket_mb']:g})" in next(
        line for line in done.stdout.splitlines() if line.endswith("use this")
    )
    assert "round 1 of" not in done.stdout + done.stderr  # which no terminal shows
    assert re.search(r"^one by one +\d[\d.]* ms +1\.00$", done.stdout, re.MULTILINE)
    assert png.stat().st_size > 1000


@on(2)
def test_bucketed_reads_the_file():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.json"
        path.write_text('{"bucket_mb": 4}')
        tensor = torch.ones(3)
        with safecomm.bucketed(path):
            safecomm.all_reduce(tensor)
        assert tensor.tolist() == [2] * 3
        with pytest.raises(FileNotFoundError):
            safecomm.bucketed(Path(folder) / "none.json")
        path = Path(folder) / "bad.json"
        for text in ("{", "{}", "[1]", '{"bucket_mb": "x"}', '{"bucket_mb": "1"}', '{"bucket_mb": true}', "[" * 10**5):
            path.write_text(text)
            with pytest.raises(ValueError, match=r"bad\.json is not a file of"):
                safecomm.bucketed(path)
        path.write_bytes(b'{"bucket_mb": 1, "\xff": 1}')
        with pytest.raises(ValueError, match=r"bad\.json is not a file of"):
            safecomm.bucketed(path)
        for size in ("0", "-1", "NaN", "Infinity", "1e308", "1" + "0" * 400):
            path.write_text(f'{{"bucket_mb": {size}}}')
            with pytest.raises(ValueError, match=r"bad\.json has a bucket that is not larger than 0"):
                safecomm.bucketed(path)


def test_bad_input_is_refused_with_status_2(capsys, tmp_path):
    (tmp_path / "other.json").write_text("[" * 100000)
    for arguments in (
        *(["--mib", size] for size in ("0", "-1", "inf", "nan", "1e300")),
        *(["--rounds", "0"], ["--world", "-1"], ["--world", "0"]),
        *(["--out", str(tmp_path / "no" / "x.json")], ["--out", str(tmp_path)], ["--png", str(tmp_path)]),
        ["--low-latency", "--out", str(tmp_path / "other.json")],
    ):
        assert main(["tune", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("python -m safecomm tune: ")
        assert len(err.splitlines()) == 1


def test_a_rank_that_is_no_number_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "²")
    assert main(["tune"]) == 2
    assert "LOCAL_RANK" in capsys.readouterr().err


def test_a_rank_that_fails_gives_its_status_and_no_traceback_of_torchrun(monkeypatch):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fail(arguments):
        assert arguments[:3] == ["--standalone", "--nproc-per-node", "3"]
        raise ChildFailedError("tune", {1: ProcessFailure(1, 4711, 2, "/nowhere")})

    monkeypatch.setattr(run, "main", fail)
    assert launch(3, []) == 2

    def interrupt(arguments):
        raise SignalException("Ctrl-C", signal.SIGINT)

    monkeypatch.setattr(run, "main", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(3, [])
