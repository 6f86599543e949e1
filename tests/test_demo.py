"""The demo, as it is without GPUs; its pictures; bad input; the ranks of its run, and how they end."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

import safecomm
from safecomm.__main__ import main
from safecomm.tools.demo import pictures, program, show, shown
from safecomm.tools.demo.pictures import MIB

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOTS = ROOT / "benchmarks" / "results" / "snapshots"
FIGURES = json.loads((SNAPSHOTS / "figures.json").read_text())


def command(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def environment(**variables: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables}


DEMO = """
import sys
from safecomm.__main__ import main
status = main(["demo", "--device", "cpu", "--json", "demo.json"])
assert "torch._dynamo" not in sys.modules, "whose import takes longer than all of the demo"
sys.exit(status)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The demo and the example, which run at the same time: most of it is one process that starts."""
    folder = tmp_path_factory.mktemp("demo")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    commands = {
        "demo": (
            command("-c", DEMO),
            environment(PYTHONIOENCODING="utf-8", COLUMNS="100"),
        ),
        "example": (command(*launcher, str(ROOT / "examples" / "tensor_parallel.py")), environment()),
    }
    with ThreadPoolExecutor(len(commands)) as threads:
        yield (
            folder,
            {
                name: threads.submit(
                    subprocess.run, arguments, env=variables, cwd=folder, capture_output=True, text=True, timeout=120,
                    encoding="utf-8",
                )
                for name, (arguments, variables) in commands.items()
            },
        )  # fmt: skip


def test_without_gpus_it_shows_what_was_recorded_and_what_is_true_there(runs):
    folder, done = runs[0], runs[1]["demo"].result()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100 or "/" in max(lines, key=len)  # but for the name of a file
    text = " ".join(done.stdout.split())

    # Said to be recorded, on what and when.
    assert f"recorded on {FIGURES['world']} x {FIGURES['device']}, {FIGURES['date']}" in text
    # The peaks are those that the allocator counted, and are drawn on one scale.
    peaks = [FIGURES[name]["active_peak"] // MIB for name in ("stock", "safecomm")]
    for peak in peaks:
        assert re.search(rf"^ *{peak} MiB │", done.stdout, re.MULTILINE)
    assert "█ in use ░ freed, and not reusable yet" in text
    assert f"takes {peaks[0]} MiB" in text
    assert text.endswith(f"{peaks[1]} MiB, {round(100 - 100 * peaks[1] / peaks[0])} % less.")
    # What was run here.
    assert "SafecommError: safecomm.functional: its group has an open coalescing region" in text
    assert "held by attribute 'losses' of a _Trainer" in text
    assert "\x1b" not in done.stdout, "it is not a terminal"

    assert [one.name for one in folder.iterdir()] == ["demo.json"], "nothing that was not asked for"
    result = json.loads((folder / "demo.json").read_text())
    assert (result["ok"], result["recorded"]) == (True, True)
    assert result["pictures"] == json.loads(show.RECORDED.read_text())["pictures"]
    assert len(result["shown"]) == 2


def test_what_is_drawn_are_the_snapshots_of_the_recorded_run():
    spec = importlib.util.spec_from_file_location("record_snapshots", ROOT / "benchmarks" / "record_snapshots.py")
    assert spec is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert json.loads(show.RECORDED.read_text()) == benchmark.drawn(SNAPSHOTS)
    sizes = (benchmark.LAYERS, benchmark.ITERATIONS, benchmark.ROWS, benchmark.COLS)
    assert sizes == (program.LAYERS, program.ITERATIONS, program.ROWS, program.COLS), "the text says so"


def nothing_is_shown(monkeypatch, ok=True):
    for name in ("boundary", "leak"):
        monkeypatch.setattr(shown, name, lambda: shown.Shown("title", [], ok))


def test_a_narrow_terminal_without_the_letters(monkeypatch):
    nothing_is_shown(monkeypatch)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["demo", "--device", "cpu"]) == 0
    lines = stream.buffer.getvalue().decode("ascii").splitlines()
    drawn = [line for line in lines if re.search(r"[#.|]{20}", line)]
    assert len(drawn) >= 10
    assert max(map(len, drawn)) <= 40
    assert lines[-1].endswith("% less.")


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_what_is_refused_would_have_read_too_early():
    assert shown.boundary().ok
    with mock.patch.object(shown.functional, "now", return_value=contextlib.nullcontext()):
        assert not shown.boundary().ok


def test_what_does_not_come_out_is_status_1(monkeypatch, capsys):
    nothing_is_shown(monkeypatch, ok=False)
    assert main(["demo", "--device", "cpu"]) == 1
    assert "not all came out as it must" in capsys.readouterr().err


# --- pictures ---------------------------------------------------------------------------------------------------------


def picture(title, *steps):
    return pictures.Picture(title, [*steps, (10.0, *steps[-1][1:])])


def test_a_picture_loses_no_peak_and_is_to_scale():
    thin = picture("thin", (0.0, 0, 0), (3.0, 40 * MIB, 60 * MIB), (3.001, 20 * MIB, 0))
    low = picture("low", (0.0, 0, 0), (5.0, 50 * MIB, 0))
    head, *rows, floor, _, legend = pictures.draw([thin, low], 80, pictures.PLAIN).splitlines()
    assert head.split() == ["thin", "low"]
    assert len(rows) == 10
    assert [row.split("|")[0].strip() for row in rows] == ["100 MiB", *[""] * 4, "50 MiB", *[""] * 4]
    left, right = ([row.split("|")[number].ljust(31)[:31] for row in rows] for number in (1, 2))
    assert [column for column in zip(*left, strict=True) if "." in column] == [tuple("......####")]
    assert ["".join(row).strip() for row in left[8:]] == [f"{'#' * 22}"] * 2
    assert [row.strip("# ") for row in right] == [""] * 10
    assert [row.count("#") for row in right] == [0] * 5 + [16] * 5
    assert floor.split()[0] == "0"
    assert "." in legend


def test_only_what_is_wasted_is_coloured():
    one = picture("one", (0.0, MIB, 0), (5.0, MIB, MIB))
    plain, coloured = (pictures.draw([one], 60, colour=colour) for colour in (False, True))
    assert re.sub("\x1b\\[[0-9]*m", "", coloured) == plain
    assert set(re.findall("\x1b\\[31m(.+?)\x1b\\[0m", coloured)[0]) == {"░"}


@pytest.mark.parametrize(("encoding", "fits"), [("utf-8", True), ("cp437", True), ("ascii", False), ("no-such", False)])
def test_where_the_letters_are_there(encoding, fits):
    assert pictures.BLOCKS.fit(encoding) is fits
    assert pictures.PLAIN.fit("ascii")


# --- bad input, and the other ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("demo --device cuda", "--device cuda needs 2 GPUs and NCCL, and here there are "),
        ("demo --json /nowhere/at/all.json", "can't be written"),
        ("demo --json .", "can't be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_run_on_gpus_shows_its_pictures(device, monkeypatch, capsys, tmp_path):
    """All but the run itself, which is the recorded one here."""
    nothing_is_shown(monkeypatch)
    found = {**json.loads(show.RECORDED.read_text()), "device": "GPU of this machine", "rows": 64}
    monkeypatch.setattr(program, "run", lambda: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    path = tmp_path / "demo.json"
    assert main(["demo", "--device", device, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 x GPU of this machine" in out
    assert "2976 MiB" in out
    assert "recorded" not in out
    assert "64 x 8192" in " ".join(out.split())
    assert json.loads(path.read_text())["recorded"] is False


def test_the_program_computes_the_sums_and_looks_at_each_layer(monkeypatch):
    """On the CPU, whose streams and allocator are none."""
    stats = {f"{what}_bytes.all.current": nbytes for what, nbytes in (("allocated", 5), ("active", 7))}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    x, weights = torch.eye(3), [torch.full((3, 3), 0.5), torch.eye(3)]
    result, steps = program.run_program(x, weights, mock.Mock(), lambda y: y.mul_(2))
    assert torch.equal(result, x @ weights[0] * 4)
    assert [step[1:] for step in steps] == [(5, 2)] * (2 * 2 * program.ITERATIONS)


def test_the_rows_are_fewer_where_there_is_little_room():
    assert program.rows_for(8 << 30) == program.ROWS
    assert program.rows_for(2 << 30) == program.ROWS // 4
    with pytest.raises(ValueError, match="1024 MiB are free"):
        program.rows_for(1 << 30)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _end(rank, words):
    if words == "fail" and rank == 1:
        raise RuntimeError("broken")
    if words == "die" and rank == 1:
        os._exit(7)
    while words == "hang":
        time.sleep(60)
    if os.path.isabs(words):
        Path(words).with_suffix(f".{rank}").touch()


@pytest.fixture
def forked(monkeypatch):
    """Start ranks that have torch imported already; how they start without, the one test that kills them shows."""
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    monkeypatch.setattr(torch.multiprocessing, "spawn", start)


@pytest.mark.usefixtures("forked")
def test_two_ranks_run(tmp_path):
    program.launch(_end, str(tmp_path / "rank"), limit=60.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.0", "rank.1"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("words", "limit", "said"),
    [
        ("fail", 60.0, "(?s)rank 1 did not end well:.*RuntimeError: broken"),
        ("die", 60.0, "rank 1 did not end well:.* exit code 7"),
        ("hang", 0.2, r"the ranks were not done after 0\.2 s, and were ended"),
    ],
)
def test_ranks_that_do_not_end_well(words, limit, said):
    others = {*multiprocessing.active_children()}  # of tests that ran before
    with pytest.raises(safecomm.SafecommError, match=said):
        program.launch(_end, words, limit=limit)
    assert {*multiprocessing.active_children()} <= others


HANGING = """
import sys, time
from safecomm.tools.demo import program

def hang(rank):
    print(rank, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    program.launch(hang)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch does not end processes whose parent was killed")
def test_ranks_end_with_the_process_that_started_them_though_it_is_killed(tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    command_line = command(str(tmp_path / "hanging.py"))
    with subprocess.Popen(command_line, env=environment(), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert {running.stdout.readline() for _ in range(2)} == {"0\n", "1\n"}
        running.kill()
        running.communicate(timeout=120)  # until nobody has the pipe any more, and the ranks have it


def test_tensor_parallel_example(runs):
    done = runs[1]["example"].result()
    assert done.returncode == 0, done.stderr
    assert "as on one rank" in done.stdout
    assert "still held by safecomm: nothing" in done.stdout
