"""The demo and the examples, run as a person would; bad input; the ends that are not the happy one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import safecomm
from safecomm import demo
from safecomm.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
SIZES = ["--layers=2", "--iterations=2", "--rows=64", "--cols=32", "--passes=2"]
TINY = ["demo", "--device", "cpu", *SIZES]
WAYS = [
    ("without communication", "-"),
    ("synchronous", "torch.distributed"),
    ("synchronous", "safecomm"),
    ("async + wait", "torch.distributed"),
    ("async + wait", "safecomm"),
    ("handles dropped", "torch.distributed"),
    ("handles dropped", "safecomm"),
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The demo and the example, which run at the same time: most of it is one process that starts."""
    path = tmp_path_factory.mktemp("demo") / "demo.json"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    commands = {
        "demo": command("-m", "safecomm", *TINY, "--json", str(path)),
        "example": command(*launcher, str(ROOT / "examples" / "tensor_parallel.py")),
    }
    with ThreadPoolExecutor(len(commands)) as threads:
        yield (
            path,
            {
                name: threads.submit(
                    subprocess.run, arguments, env=environment(), capture_output=True, text=True, timeout=120
                )
                for name, arguments in commands.items()
            },
        )


def test_demo_shows_progress_a_table_and_writes_json(runs):
    path, done = runs[0], runs[1]["demo"].result()
    assert done.returncode == 0, done.stderr

    for number, (way, library) in enumerate(WAYS, 1):
        title = way if library == "-" else f"{way}, {library}"
        assert f"[{number}/{len(WAYS)}] {title}: peak" in done.stderr
    head, rule, *lines = done.stdout.strip().splitlines()
    assert " ".join(head.split()) == "way library peak freed but unusable held at the end after drain() ms numbers"
    assert set(rule) == {"-", " "}
    for line, (way, library) in zip(lines, WAYS, strict=False):
        assert line.startswith(way)
        assert library in line
    # The dropped handles are reported with the line that dropped them.
    assert "demo.py:" in done.stdout.partition("safecomm logged:")[2]

    result = json.loads(path.read_text())
    assert result["ok"] is True
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["safecomm"] == safecomm.__version__
    assert result["date"].startswith("20")
    assert result["device"]
    assert result["settings"]["backend"] == "gloo"
    assert result["settings"]["world"] == 2
    assert [(row["way"], row["library"]) for row in result["rows"]] == WAYS
    buffer = 64 * 32 * 4
    for row in result["rows"]:
        assert row["numbers"] == ("-" if row["library"] == "-" else "same")
        assert row["milliseconds"] > 0
        assert row["unusable"] is None
        assert [len(passes) for passes in row["peaks"]] == [2, 2]
        if row["way"] != "handles dropped":
            # A layer's input and its output (S2), and one more where gloo's threads let go a moment after the wait.
            peaks = {peak for passes in row["peaks"] for peak in passes}
            assert peaks <= {2 * buffer, 3 * buffer}
            assert row["held"] == 0
        if row["library"] == "safecomm":
            assert row["held_after_drain"] == 0
        else:
            assert row["held_after_drain"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("demo --world 1", "world must be at least 2"),
        ("demo --device cpu --world 1000", "world must be at most"),
        ("demo --rows -3", "rows must be at least 1, not -3"),
        ("demo --cols 0", "cols must be at least 1"),
        ("demo --layers 0", "layers must be at least 1"),
        ("demo --iterations -1", "iterations must be at least 1"),
        ("demo --passes 0", "passes must be at least 1"),
        ("demo --limit 0", "time limit must be more than 0"),
        ("demo --limit nan", "time limit must be more than 0"),
        ("demo --dtype int8", "dtype must be one of"),
        ("demo --json /nowhere/at/all.json", "can't be written"),
        ("demo --html /nowhere/at/all.html", "can't be written"),
        ("demo --device cpu --html page.html", "need GPUs"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said, capsys):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
def test_cuda_without_gpus_is_refused(capsys):
    assert main(["demo", "--device", "cuda"]) == 2
    assert "cuda needs GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nope"], ["demo", "--world", "x"], ["demo", "--device", "tpu"]])
def test_usage_errors_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m safecomm" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"safecomm {safecomm.__version__}\n"


def test_sizes_that_do_not_fit_are_refused(capsys):
    assert main(["demo", "--device", "cpu", "--rows", "10000000", "--cols", "10000000"]) == 2
    assert "MiB are free" in capsys.readouterr().err


def test_time_limit_ends_the_ranks():
    with pytest.raises(safecomm.SafecommError, match=r"the start took more than 0\.2 s"):
        demo.run_demo(device="cpu", limit=0.2)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_interrupted_in_the_middle():
    running = subprocess.Popen(
        command("-m", "safecomm", *TINY, "--passes", "100000"),
        env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        # A shell without job control starts what is in the background with the signal ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert running.stderr is not None
    assert running.stderr.readline().startswith("starting 2 gloo ranks")
    assert "2 layers" in running.stderr.readline()
    os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    err = running.communicate(timeout=30)[1]
    assert running.returncode == 130
    assert err.splitlines() == ["python -m safecomm demo: interrupted"]


def row(numbers):
    return demo.Row("way", "library", 0, [[0]], None, 0, None, 1.0, numbers)


def report(world, *numbers):
    settings = demo.Settings("cpu", "gloo", world, 1, 1, 1, 1, 1, "float32", 1.0)
    return demo.Report(settings, "", {}, "", [row(one) for one in numbers])


def test_what_counts_as_agreeing():
    assert report(2, "-", "same").ok
    assert not report(2, "same", "rounding").ok  # two numbers have one sum
    assert report(4, "same", "rounding").ok
    assert not report(4, "same", "DIFFERENT").ok


def test_numbers_that_differ_are_status_1(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", lambda **_: report(2, "DIFFERENT"))
    assert main(["demo"]) == 1
    assert "the numbers differ" in capsys.readouterr().err


def test_tensor_parallel_example(runs):
    done = runs[1]["example"].result()
    assert done.returncode == 0, done.stderr
    assert "as on one rank" in done.stdout
    assert "still held by safecomm: nothing" in done.stdout
