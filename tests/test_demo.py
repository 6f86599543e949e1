"""The demo, as it is without GPUs; what the run on GPUs is made of; bad input; the ends that are not the happy one."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
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
from safecomm.tools.demo import launch, pictures, program, show, shown

ROOT = Path(__file__).resolve().parent.parent
FIGURES = json.loads((show.RECORDED / "figures.json").read_text())
MIB = 1 << 20


def command(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def environment(**variables: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The demo and the example, which run at the same time: most of it is one process that starts."""
    folder = tmp_path_factory.mktemp("demo")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    commands = {
        "demo": (
            command("-m", "safecomm", "demo", "--device", "cpu", "--json", "demo.json"),
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
    assert f"{peaks[1]} MiB, {round(100 - 100 * peaks[1] / peaks[0])} % less." in text
    # What was run here.
    assert "SafecommError: safecomm.functional: its group has an open coalescing region" in text
    assert "held by attribute 'losses' of a _Trainer" in text
    assert "\x1b" not in done.stdout, "it is not a terminal"

    page = Path(lines[-1])
    assert page.name == "safecomm-demo.html"
    assert [one.name for one in folder.iterdir()] == ["demo.json"], "nothing that was not asked for"
    page = page.read_text()
    assert page.count("<figure>") == 2
    for title in ("record_stream", "safecomm.avoid_record_streams()"):
        assert f"{title}, recorded on" in page
    result = json.loads((folder / "demo.json").read_text())
    assert result["ok"] is True
    assert result["recorded"] == FIGURES
    assert len(result["shown"]) == 2
    assert result["versions"]["torch"] == torch.__version__


def test_a_narrow_terminal_without_the_letters(monkeypatch, tmp_path):
    monkeypatch.setattr(shown, "everything", list)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["demo", "--device", "cpu", "--html", str(tmp_path / "page.html")]) == 0
    lines = stream.buffer.getvalue().decode("ascii").splitlines()
    drawn = [line for line in lines if re.search(r"[#.|]{20}", line)]
    assert len(drawn) >= 10
    assert max(map(len, drawn)) <= 40
    assert lines[-1] == str(tmp_path / "page.html")


# --- what is shown ----------------------------------------------------------------------------------------------------


def _accepts(send, rank):
    with mock.patch.object(shown.functional, "now", return_value=contextlib.nullcontext()):
        shown._read_too_early(send, rank)


def test_what_is_refused_would_have_read_too_early(monkeypatch):
    assert shown.boundary().ok
    ((_, (said, _)),) = launch.launch(1, _accepts, limit=60.0)
    assert not said


def test_what_does_not_come_out_is_status_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shown, "everything", lambda: [shown.Shown("title", [], False)])
    assert main(["demo", "--device", "cpu", "--html", str(tmp_path / "page.html")]) == 1
    assert "not all came out as it must" in capsys.readouterr().err


# --- pictures ---------------------------------------------------------------------------------------------------------


def picture(title, *steps):
    return pictures.Picture(title, 10.0, list(steps), 0)


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
        ("demo --world 1", "world must be at least 2"),
        ("demo --rows -3", "rows must be at least 1, not -3"),
        ("demo --cols 0", "cols must be at least 1"),
        ("demo --layers 0", "layers must be at least 1"),
        ("demo --iterations -1", "iterations must be at least 1"),
        ("demo --passes 0", "passes must be at least 1"),
        ("demo --limit 0", "time limit must be more than 0"),
        ("demo --limit nan", "time limit must be more than 0"),
        ("demo --dtype int8", "dtype must be one of"),
        ("demo --device cpu --rows 64 --world 2", "--world, --rows: only a run on GPUs can be set"),
        ("demo --device cuda --world 1000", "cuda with 1000 ranks needs as many GPUs"),
        ("demo --json /nowhere/at/all.json", "can't be written"),
        ("demo --html /nowhere/at/all.html", "can't be written"),
        ("demo --html .", "can't be written"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(arguments, said, capsys):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root can write to")
def test_a_page_that_can_not_be_written_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(shown, "everything", list)
    assert main(["demo", "--device", "cpu", "--html", "/proc/page.html"]) == 2
    assert capsys.readouterr().err.startswith("python -m safecomm demo: --html: /proc/page.html can't be written: ")


def test_a_run_on_gpus_shows_its_table_its_pictures_and_its_page(monkeypatch, capsys, tmp_path):
    """All but the run itself, which is the recorded one here."""
    asked = []

    def run(settings, given, folder, progress):
        asked.append((settings, given))
        for name in program.SNAPSHOTS:
            (folder / f"{name}.pickle").write_bytes((show.RECORDED / f"{name}.pickle").read_bytes())
        return report(2, "-", "same")

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    page, path = tmp_path / "page.html", tmp_path / "demo.json"
    assert main(["demo", "--layers", "3", "--html", str(page), "--json", str(path)]) == 0
    assert asked == [(program.Settings(2, layers=3), {"layers"})]
    shown_here = capsys.readouterr().out
    assert shown_here.startswith("way ")
    assert "2976 MiB" in shown_here
    assert "recorded on" not in shown_here + page.read_text()
    assert shown_here.splitlines()[-1] == str(page)
    assert json.loads(path.read_text())["rows"][1]["numbers"] == "same"


def row(numbers):
    return program.Row("way", "library", 0, [[0]], 0, 0, None, 1.0, numbers)


def report(world, *numbers):
    return program.Report(program.Settings(world), "GPUs", {}, "", [row(one) for one in numbers])


def test_what_counts_as_agreeing():
    assert report(2, "-", "same").ok
    assert not report(2, "same", "rounding").ok  # two numbers have one sum
    assert report(4, "same", "rounding").ok
    assert not report(4, "same", "DIFFERENT").ok


def test_sizes_are_made_smaller_unless_they_were_given():
    settings = program.Settings(2)
    fitted = program.fitting(settings, set(), settings.needed_bytes // 3)
    assert fitted.needed_bytes <= settings.needed_bytes // 3
    assert (fitted.layers, fitted.iterations) == (settings.layers, settings.iterations)
    assert program.fitting(settings, {"cols"}, settings.needed_bytes // 2).cols == settings.cols
    with pytest.raises(launch.Refused, match="MiB are free"):
        program.fitting(settings, {"rows", "cols"}, settings.needed_bytes - 1)


def test_of_several_ranks_the_one_with_the_most_counts():
    ranks = [
        program._Measured([5, 7], 1, 0, 3, [1.0, 2.0, 9.0], "same"),
        program._Measured([6, 6], 4, 2, 0, [1.0, 1.0, 1.0], "rounding"),
    ]
    found = program.row("way", "safecomm", ranks)
    assert (found.peak, found.unusable, found.held, found.held_after_drain) == (7, 4, 2, 3)
    assert (found.milliseconds, found.numbers) == (2000.0, "rounding")


# --- ranks ------------------------------------------------------------------------------------------------------------


def _speak(send, rank, words):
    if words == "refuse":
        raise launch.Refused("too large")
    if words == "fail" and rank == 1:
        raise RuntimeError("broken")
    if words == "die" and rank == 1:
        os._exit(7)
    send((words, rank))
    while words == "hang":
        time.sleep(60)


@pytest.fixture(autouse=True, scope="module")
def quick_ranks():
    """Start ranks as copies of one process that has imported torch, and not each on its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["safecomm.tools.demo.launch"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: context)
        yield


def test_what_ranks_send_arrives():
    assert sorted(launch.launch(2, _speak, "hello", limit=60.0)) == [(0, ("hello", 0)), (1, ("hello", 1))]


@pytest.mark.parametrize(
    ("words", "limit", "error", "said"),
    [
        ("refuse", 60.0, ValueError, "^too large$"),
        ("fail", 60.0, safecomm.SafecommError, "(?s)rank 1 failed:.*RuntimeError: broken"),
        ("die", 60.0, safecomm.SafecommError, "rank 1 ended in the middle, with exit status 7"),
        ("hang", 0.2, safecomm.SafecommError, r"nothing was heard of the ranks for 0\.2 s"),
    ],
)
def test_ranks_that_do_not_end_well(words, limit, error, said):
    with pytest.raises(error, match=said):
        list(launch.launch(2, _speak, words, limit=limit))


INTERRUPTED = """
import sys
from safecomm.tools import commands
from safecomm.__main__ import main
from safecomm.tools.demo.launch import launch
from test_demo import _speak

def hang(options):
    for rank, _ in launch(2, _speak, "hang", limit=60.0):
        print(rank, flush=True)

if __name__ == "__main__":
    commands._COMMANDS["demo"] = hang
    sys.exit(main(["demo"]))
"""


@pytest.fixture
def hanging(tmp_path):
    """A demo whose two ranks do nothing any more."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    running = subprocess.Popen(
        command(str(tmp_path / "interrupted.py")), env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        # A shell without job control starts what is in the background with the signal ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert running.stdout is not None
    assert {running.stdout.readline() for _ in range(2)} == {"0\n", "1\n"}
    yield running
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_interrupted_in_the_middle(hanging):
    os.killpg(hanging.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    err = hanging.communicate(timeout=30)[1]
    assert hanging.returncode == 130
    assert err.splitlines() == ["python -m safecomm demo: interrupted"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ranks_end_with_the_process_that_started_them_though_it_is_killed(hanging):
    hanging.kill()
    hanging.communicate(timeout=30)  # until nobody has the pipes any more, and the ranks have them


def test_tensor_parallel_example(runs):
    done = runs[1]["example"].result()
    assert done.returncode == 0, done.stderr
    assert "as on one rank" in done.stdout
    assert "still held by safecomm: nothing" in done.stdout
