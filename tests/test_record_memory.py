"""record_memory(): the file, its figures, that it is bounded, and that its thread touches nothing (S4)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
import torch
from ranks import launch, on, run_program, run_python, signal_to_peers, until, wait_for_signal

import safecomm
from safecomm.core.uses import Events
from safecomm.core.work import Work
from safecomm.diagnostics import record
from safecomm.diagnostics.recording import read_recording


def launched_as(monkeypatch, **variables):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return record.launched_as.__wrapped__()


def test_only_a_number_is_a_rank(monkeypatch):
    assert launched_as(monkeypatch, RANK="3", WORLD_SIZE="8") == (3, 8)
    assert launched_as(monkeypatch, RANK="3", WORLD_SIZE="\u00b2") == (3, None)
    assert launched_as(monkeypatch, RANK="3", WORLD_SIZE="2") == (3, None)
    for rank in ("\u00b2", "\u0663", "9" * 5000, "-1", "", "1 "):
        assert launched_as(monkeypatch, RANK=rank, WORLD_SIZE="8") == (None, None)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_flight(peer, nbytes=4000):
    """Launch a receive that does not end before the peer sends, and return it."""
    return safecomm.irecv(torch.empty(nbytes // 4), peer)


@on(2)
def test_what_is_held_is_recorded_by_line_and_group():
    rank = torch.distributed.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        with safecomm.record_memory(Path(folder) / "run.jsonl", interval=0.001) as recording:
            assert recording.path == Path(folder) / f"run.rank{rank}.jsonl"
            work = in_flight(1 - rank)
            sent = safecomm.isend(torch.ones(1000), 1 - rank)
            recording._sample()
            work.wait()
            sent.wait()
            tensor = torch.ones(500)
            for _ in range(10):
                safecomm.all_reduce(tensor, async_op=True).wait()
        found = read_recording(recording.path)
    assert (found.rank, found.world) == (rank, 2)
    ops = {number: site["op"] for number, site in found.sites.items()}
    assert sorted(ops.values()) == ["all_reduce", "irecv", "isend"]
    assert all(site["at"].startswith(__file__) for site in found.sites.values())
    assert {site["group"] for site in found.sites.values()} == {
        safecomm._torch.group_name(torch.distributed.group.WORLD)
    }
    held = [sample for sample in found.samples if sample["held"]]
    assert max(sample["held"] for sample in held) == 8000
    assert max(sample["peak"] for sample in found.samples) == 8000
    totals = {}
    for sample in found.samples:
        for number, nbytes, peak, entries, count, total, longest in sample["sites"]:
            totals[ops[number]] = (nbytes, entries, count, total)
            assert nbytes <= peak
            assert longest >= 0
    assert totals == {"irecv": (0, 0, 1, 4000), "isend": (0, 0, 1, 4000), "all_reduce": (0, 0, 10, 20000)}
    # The works were each over before the next sample, and their memory is seen all the same.
    assert found.samples[-1]["held"] == 0
    assert found.left == []


@on(2)
def test_what_is_held_before_and_after_is_seen():
    peer = 1 - torch.distributed.get_rank()
    work = in_flight(peer)
    with tempfile.TemporaryDirectory() as folder:
        with safecomm.record_memory(f"{folder}/run.jsonl") as recording:
            pass
        found = read_recording(recording.path)
        assert found.samples[-1]["held"] == 4000
        (left,) = found.left
        assert (left["op"], left["nbytes"], left["state"]) == ("irecv", 4000, "in flight")
        with safecomm.record_memory(f"{folder}/again.jsonl") as recording:
            safecomm.isend(torch.ones(1000), peer).wait()
            work.wait()
        assert read_recording(recording.path).samples[-1]["held"] == 0


@on(2)
def test_no_tensor_is_freed_on_the_thread_that_writes():
    """S4: the program drops and releases memory as fast as it can, while the thread writes as fast as it can."""
    freed = set()
    tensor = torch.ones(64)
    with tempfile.TemporaryDirectory() as folder:
        with safecomm.record_memory(f"{folder}/run.jsonl", interval=1e-5) as recording:
            writer = recording._thread.ident
            for _ in range(300):
                other = tensor * 2
                weakref.finalize(other.untyped_storage(), lambda: freed.add(threading.get_ident()))
                work = safecomm.all_reduce(other, async_op=True)
                del other
                work.wait()
                del work
        assert len(read_recording(recording.path).samples) > 2
    assert freed  # by this thread, or by gloo's
    assert writer not in freed


def test_the_thread_reads_counters_only(tmp_path, monkeypatch):
    """S4: it does not even look at entries, whose last reference it could then drop."""

    def forbidden(*_):
        assert threading.current_thread() is threading.main_thread()
        return []

    recording = safecomm.record_memory(tmp_path / "run.jsonl", interval=1e-4)
    monkeypatch.setattr(record.LEDGER, "holds", forbidden)
    monkeypatch.setattr(record.LEDGER, "pending", forbidden)
    with recording:
        until(lambda: len(lines(recording.path)) > 5 or not recording._thread.is_alive())
        assert recording._thread.is_alive()
    assert read_recording(recording.path).left == []


def test_nothing_is_left_behind(tmp_path):
    with safecomm.record_memory(tmp_path / "run.jsonl"):
        assert record.LEDGER.observer is not None
    assert record.LEDGER.observer is None
    assert not [thread for thread in threading.enumerate() if thread.name == "safecomm-record"]


def test_one_at_a_time_and_stop_twice(tmp_path):
    recording = safecomm.record_memory(tmp_path / "run.jsonl")
    recording.start()
    with pytest.raises(safecomm.SafecommError, match="already"):
        safecomm.record_memory(tmp_path / "other.jsonl").start()
    recording.stop()
    recording.stop()
    assert not (tmp_path / "other.jsonl").exists()
    recording.start()  # again, into the same file
    recording.stop()
    assert len(lines(recording.path)) == 3


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="interval"):
        safecomm.record_memory(interval=0)
    for interval in (float("nan"), float("inf"), -1, 1e300):
        with pytest.raises(ValueError, match="expected seconds"):
            safecomm.record_memory(interval=interval)
    for interval in ("x", None, True):
        with pytest.raises(TypeError, match="expected seconds, not"):
            safecomm.record_memory(interval=interval)
    for path in (".", "/", "..", "", "a\0b"):
        with pytest.raises(ValueError, match="expected the path of a file"):
            safecomm.record_memory(path)
    with pytest.raises(TypeError, match="expected a path, not int"):
        safecomm.record_memory(5)
    with pytest.raises(OSError, match="nowhere"):
        safecomm.record_memory(tmp_path / "nowhere" / "run.jsonl").start()
    with safecomm.record_memory(tmp_path / "run.jsonl"):  # nothing is on because of that
        pass


def test_as_a_decorator(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    record.launched_as.cache_clear()

    @safecomm.record_memory(tmp_path / "run.jsonl")
    def step():
        return 7

    assert step() == step() == 7
    record.launched_as.cache_clear()
    assert [path.name for path in tmp_path.iterdir()] == ["run.rank3.jsonl"]


def test_the_number_of_lines_of_the_program_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MOST_SITES", 3)
    monkeypatch.setattr(record.LEDGER.uses, "budget", 0)
    counters = record._Counters()
    for number in range(10):
        entry = Work()
        entry.op, entry.code, entry.instruction, entry.since = f"op{number}", (lambda: 0).__code__, 0, 0.0
        entry.queue = Events(record.LEDGER.uses, 0, 0)
        entry.storages = (torch.empty(100, dtype=torch.uint8).untyped_storage(),)
        counters.held(entry)
        assert counters.nbytes == 100 * (number + 1)
    assert len(counters.sites) == 4
    assert counters.sites[None].holds == 7


def under_a_variable(rank, path):
    tensor = torch.ones(10)
    safecomm.all_reduce(tensor, async_op=True).wait()


def test_the_environment_variable_records_the_whole_process(tmp_path):
    os.environ["SAFECOMM_RECORD"] = str(tmp_path / "run.jsonl")
    try:
        for ended in launch(2, under_a_variable, "x"):
            ended.check(destroyed=False)
    finally:
        del os.environ["SAFECOMM_RECORD"]
    found = [read_recording(path) for path in sorted(tmp_path.iterdir())]
    assert sorted(one.rank for one in found) == [0, 1]
    assert {one.world for one in found} == {2}
    for one in found:
        assert [site["op"] for site in one.sites.values()] == ["all_reduce"]
        assert one.left == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SAFECOMM_RECORD": "/nowhere/at/all.jsonl"}, "nothing is recorded"),
        ({"SAFECOMM_RECORD": "."}, "SAFECOMM_RECORD=.: nothing is recorded"),
        ({"SAFECOMM_RECORD": "/"}, "SAFECOMM_RECORD=/: nothing is recorded"),
        ({"SAFECOMM_RECORD": "/nowhere\n\x1b[2J/x"}, "SAFECOMM_RECORD=/nowhere\\n\\x1b[2J/x: nothing is recorded"),
        ({"SAFECOMM_RECORD": "/dev/null/x", "RANK": "\u00b2"}, "nothing is recorded"),
        ({"SAFECOMM_RECORD": "/dev/null/x", "RANK": "9" * 5000}, "nothing is recorded"),
        ({"SAFECOMM_ARENA": "9" * 400}, "no arena is used"),
        ({"SAFECOMM_ARENA": "10000000000GiB"}, "no arena is used"),
        ({"SAFECOMM_ARENA": "\u00b2"}, "no arena is used"),
        ({"SAFECOMM_ARENA": "1PiB\n"}, "no arena is used"),
        ({"SAFECOMM_ARENA": str(1 << 50)}, "no arena is used"),
        ({"SAFECOMM_LOW_LATENCY": "/nowhere/at/all.json"}, ""),
        ({"SAFECOMM_LOG": "\u00b2"}, "expected one of"),
        ({"SAFECOMM_LOG": "loud"}, "SAFECOMM_LOG=loud: expected one of"),
        ({"SAFECOMM_LOG": "debug"}, "safecomm DEBUG hello"),
        ({"SAFECOMM_LOG": "error"}, ""),
        ({}, ""),
    ],
)
def test_variables_that_are_wrong_do_not_end_the_program(variables, said, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = run_program(
        "import safecomm, logging; logging.getLogger('safecomm').debug('hello'); safecomm.empty(3); print('ran')"
    )
    ended.check()
    assert ended.out == "ran\n"
    assert said in ended.err
    assert len(ended.err.splitlines()) <= 1
    assert bool(ended.err) == bool(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("hello\n", "line 1 is not of a recording"),
        ("[1]\n", "line 1 is not of a recording"),
        ('{"a": 1}\n', "line 1 is not of a recording"),
        ('{"safecomm_record": 99}\n', "format 99"),
        ('{"safecomm_record": 1, "rank": 0, "world": 1, "started": 0}\n{"t": 0}\n', "line 2 is not of a recording"),
        ('{"safecomm_record": 1, "rank": 0, "world": 1, "started": 0}\n{"t"\n{}\n', "line 2 is not of a recording"),
        ("[" * 100000 + "\n", "line 1 is not of a recording"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, said):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_recording(path)


def test_the_last_line_of_a_killed_process_may_be_cut_off(tmp_path):
    with safecomm.record_memory(tmp_path / "run.jsonl") as recording:
        pass
    text = recording.path.read_text()
    recording.path.write_text(text[:-10])
    found = read_recording(recording.path)
    assert len(found.samples) == 1
    assert found.left is None


@on(2)
def test_memory_report_shows_what_is_held_now():
    peer = 1 - torch.distributed.get_rank()
    work = in_flight(peer)
    report = safecomm.memory_report()
    assert [one.op for one in report.held] == ["irecv"]
    assert report.unusable == report.active - report.allocated == 0
    assert "held by collectives  3.9 KiB" in str(report).splitlines()
    assert "irecv of 4000 bytes on cpu, in flight" in str(report)
    signal_to_peers(f"reported {peer}")
    wait_for_signal(f"reported {1 - peer}")
    safecomm.isend(torch.ones(1000), peer).wait()
    work.wait()


def test_a_full_disk_ends_the_recording_and_not_the_program(tmp_path, caplog):
    recording = safecomm.record_memory(tmp_path / "run.jsonl", interval=1e-4)
    with caplog.at_level(logging.WARNING, "safecomm"), recording:
        write = recording._write

        def full(line):
            raise OSError(28, "No space left on device")

        recording._write = full
        recording._thread.join()
        recording._write = write
    assert "can't be written to any more" in caplog.text


FORKS = """
import os, sys, threading
import safecomm
from safecomm.diagnostics import record
from safecomm.core.ledger import LEDGER

recording = safecomm.record_memory("run.jsonl", interval=1e-4)
locked, over = threading.Event(), threading.Event()


def hold():
    with record._lock, recording._counters.lock, recording._stopping._cond:
        locked.set()
        over.wait()


with recording:
    parent = os.getpid()
    for number in range(3):
        if number == 2:  # locks that nobody in the child will ever give back
            over.clear()
            threading.Thread(target=hold).start()
            locked.wait()
        child = os.fork()
        if not child:
            assert LEDGER.observer is None
            recording.stop()
            try:
                recording.start()
            except safecomm.SafecommError as error:
                assert "was forked from" in str(error)
            else:
                raise AssertionError("it has replaced the file of its parent")
            with safecomm.record_memory("own.jsonl") as own:
                pass
            own.start()
            sys.exit(0)  # and atexit ends it
        status = os.waitpid(child, 0)[1]
        over.set()
        assert status == 0
"""


def test_the_child_of_a_fork_has_no_recording_and_its_parent_goes_on(tmp_path):
    """However the locks and the thread that writes were at the fork; it hung, or wrote the end of the parent's file."""
    environment = {**os.environ, "RANK": "0"}
    subprocess.run([sys.executable, "-c", FORKS], cwd=tmp_path, env=environment, timeout=100, check=True)
    assert [sorted(line)[0] for line in lines(tmp_path / "run.rank0.jsonl")].count("end") == 1
    assert read_recording(tmp_path / "run.rank0.jsonl").left == []
    assert "end" in lines(tmp_path / "own.rank0.jsonl")[-1]


RECORDS = "import safecomm\nwith safecomm.record_memory('alone.jsonl'):\n    pass\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train.py", "train.py"),
        ("-m jobs", "jobs"),
        ("-m jobs.train", "train.py"),
        ("-m safecomm run train.py", "train.py"),
    ],
)
def test_a_recording_says_what_ran(tmp_path, command, name):
    (tmp_path / "jobs").mkdir()
    for place in ("train.py", "jobs/__main__.py", "jobs/train.py"):
        (tmp_path / place).write_text(RECORDS)
    assert run_python(*command.split(), cwd=str(tmp_path)).status == 0
    (path,) = tmp_path.glob("alone*.jsonl")
    assert read_recording(path).program == name


def test_what_run_records_says_what_ran(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = run_python("-m", "safecomm", "run", "--record", "memory", "train.py", cwd=str(tmp_path))
    assert done.status == 0
    (path,) = (tmp_path / "memory").iterdir()
    assert read_recording(path).program == "train.py"


def test_it_tells_its_state(tmp_path):
    recording = safecomm.record_memory(tmp_path / "own.jsonl")
    assert repr(recording).endswith("own.jsonl'): not recording>")
    with recording:
        assert repr(recording).endswith("own.jsonl'): recording>")
    assert repr(recording).endswith("not recording>")
