"""The examples: each runs on two ranks and on one, from anywhere, and ends with its line; and what measures them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch.distributed as stock
from ranks import start_ranks

ROOT = Path(__file__).resolve().parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load(ROOT / "benchmarks" / "examples.py")

SAYS = {
    "decode.py": ["32 of 32 tokens are the same", "the group stays as it is: its backend is gloo"],
    "fsdp2.py": ["the same bit for bit", "went past safecomm: none", "still held by safecomm: nothing"],
    "leak_hunt.py": [
        "held by attribute 'tensors' of the context of the autograd node GatheredBackward",
        "KiB -> 0 KiB",
    ],
    "record_stream.py": ["the same bit for bit"],
    "same_bits.py": ["eager and in a graph: the same bits", "-> 0 (as it is -> inside of invariant()"],
    "tensor_parallel.py": ["as on one rank", "still held by safecomm: nothing"],
    "transformers_decode.py": ["32 of 32 tokens are the same", "the group stays as it is: its backend is gloo"],
    "transformers_tp.py": ["the same bit for bit", "by safecomm 0 -> 4 of 6 collectives"],
}
"""What an example shows on the CPU beside its last line. megatron.py is run in test_frameworks.py."""

NEEDS = {"transformers_decode.py": "transformers", "transformers_tp.py": "transformers"}


DRIVER = """
import contextlib, io, json, os, runpy, sys, traceback, warnings

into, folder, *named = sys.argv[1:]
names = dict(one.split(":") for one in named)
sys.path[0] = folder
warnings.simplefilter("error")
rank, found = os.environ["RANK"], {}
sys.argv[1:] = ["--cpu"]
for ranks in ("2", "1"):
    for name, port in names.items():
        if ranks == "1":
            for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as without torchrun
                os.environ.pop(variable, None)
        os.environ["MASTER_PORT"] = port
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                runpy.run_path(os.path.join(folder, name), run_name="__main__")
            except SystemExit as end:
                status = end.code
            except BaseException:
                status = traceback.format_exc()
        found[f"{name} on {ranks}"] = status, out.getvalue()
        with open(os.path.join(into, rank), "w") as file:
            json.dump(found, file)
"""
"""Runs the examples one after the other, because the libraries that they import take longer than they do. Each has a
store of its own: a group leaves its addresses there."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each of two ranks says of each example, in a folder that is not the clone's."""
    folder = tmp_path_factory.mktemp("examples")
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    names = [name for name in SAYS if importlib.util.find_spec(NEEDS.get(name, "torch"))]
    stores = [stock.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in names]
    named = [f"{name}:{store.port}" for name, store in zip(names, stores, strict=True)]
    into = folder / "found"
    into.mkdir()
    ended = start_ranks(2, str(driver), str(into), str(ROOT / "examples"), *named, cwd=str(folder), limit=110).end()
    found = [json.loads((into / str(rank)).read_text()) if (into / str(rank)).exists() else {} for rank in (0, 1)]
    return found, ended


@pytest.mark.parametrize("name", SAYS)
@pytest.mark.parametrize("ranks", [2, 1])
def test_an_example_runs_and_ends_with_its_line(runs, name, ranks):
    if not importlib.util.find_spec(NEEDS.get(name, "torch")):
        pytest.skip(f"{NEEDS[name]} is not installed")
    (first, second), ended = runs
    assert f"{name} on {ranks}" in first, ended
    status, out = first[f"{name} on {ranks}"]
    assert status == 0, status
    last = out.splitlines()[-1]
    if name in NEEDS and ranks == 1:
        assert last.startswith("skipped: a model on one rank has no collectives")
        return
    assert benchmark.LAST.fullmatch(last)
    for words in SAYS[name]:
        assert words in out
    status, out = second[f"{name} on {ranks}"]
    assert status == 0, status
    if ranks == 2:
        assert out == ""  # one rank speaks


def test_the_examples_leave_an_interpreter_that_ends(runs):
    for ended in runs[1]:
        ended.check()


def test_every_example_is_listed_tested_and_measured():
    names = set(benchmark.examples())
    assert names == {*SAYS, "megatron.py"}
    listed, _, _ = (ROOT / "examples" / "README.md").read_text().partition(benchmark.BEGIN)
    for name in names:
        assert f"| [{name}]({name}) | " in listed
    runs = json.loads(benchmark.RESULTS.read_text())["runs"]
    assert any(set(measured["examples"]) == names for measured in runs)
    for measured in runs:
        assert set(measured["examples"]) <= names  # of those that there were
        assert not any("failed" in row for row in measured["examples"].values())


def test_the_tables_are_those_of_the_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["examples.py", "--check"])
    benchmark.main()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (
            "print('peak 3 MiB -> 1 MiB (a -> b)')",
            {"before": "3 MiB", "after": "1 MiB", "what": "peak", "ways": "a -> b"},
        ),
        ("print('skipped: no GPU')", {"skipped": "no GPU"}),
        ("print('done')", {"failed": "status 0"}),
        ("import sys; sys.exit(print('peak 3 MiB -> 1 MiB (a -> b)') or 3)", {"failed": "status 3"}),
        ("while True: pass", {"failed": "not over after 1 s"}),
    ],
)
def test_what_is_written_of_an_example(program, found, tmp_path, monkeypatch):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "one.py").write_text(program)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    row = benchmark.run("one.py", 1, True, 1 if "while True" in program else 100)
    assert row["command"] == "python examples/one.py --cpu"
    assert {key: row.get(key) for key in found} == found
    assert ("failed" in row) == ("failed" in found)
