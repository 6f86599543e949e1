"""``safecomm compare``, ``run --snapshot``, and ranks that a program starts by itself: real processes on gloo."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import run_python
from snapshots import MIB, Allocator, forum, stack, write

import safecomm
from safecomm import _torch
from safecomm._torch import observing
from safecomm.diagnostics import collective_log as logs
from safecomm.diagnostics import exposed, inspector, observed, observer, snapshots
from safecomm.diagnostics.page import make_page
from safecomm.diagnostics.peaks import peak_of
from safecomm.diagnostics.snapshot import read_snapshot
from safecomm.diagnostics.steps import LISTENERS
from safecomm.diagnostics.units import mib
from safecomm.errors import SafecommError
from safecomm.patching import children
from safecomm.tools import compare

TRAIN = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    os.makedirs(os.environ["NCCL_INSPECTOR_DUMP_DIR"], exist_ok=True)
    with open(os.path.join(os.environ["NCCL_INSPECTOR_DUMP_DIR"], f"pid{os.getpid()}.log"), "w") as file:
        file.write(RECORD)
    for _ in range(6):
        model(torch.randn(4, 64)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.barrier()
    print("patched" if "safecomm/collectives" in dist.all_reduce.__code__.co_filename else "unpatched", flush=True)
    os._exit(0)  # a process that ends with gloo's threads now and then aborts, without safecomm too

if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), "")
    else:
        mp.start_processes(work, (os.path.abspath(f"store{os.getpid()}"),), nprocs=2, start_method="spawn")
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("RECORD", repr(record())))
    return tmp_path


def start(program, *arguments, status=0, **environment):
    """Run ``python -m safecomm compare`` in the folder of ``program``."""
    ended = run_python("-m", "safecomm", "compare", *arguments, cwd=str(program), limit=180, **environment)
    assert ended.status == status, (ended.status, ended.out, ended.err)
    return ended


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")


@pytest.mark.parametrize("launched", [TORCHRUN, (sys.executable, "train.py")], ids=["torchrun", "spawn"])
def test_both_ranks_are_observed_and_patched_whoever_starts_them(program, launched):
    said = start(program, "--steps", "2:5", "--limit", "90", "--", *launched).out
    assert "2 of 2 ranks took part; steps 2 to 5; cpu" in said
    assert "without a GPU" in said
    assert "No gain: memory is not seen here." in said
    found = json.loads((program / "safecomm-compare/compare.json").read_text())
    assert found["safecomm_compare"] == compare.VERSION
    assert found["ranks"] == {"unpatched": 2, "patch()": 2}
    for way, folder in (("unpatched", "1.unpatched"), ("patch()", "1.patch")):
        assert len(found["ways"][way]["seconds"]) == 4
        printed = (program / "safecomm-compare" / folder / "output.txt").read_text()
        assert re.findall("unpatched|patched", printed) == 2 * ["unpatched" if way == "unpatched" else "patched"]
    (row, *_) = found["ways"]["unpatched"]["collectives"]
    assert (row["op"], row["nbytes"], row["calls"]) == ("all_reduce", 64 * 64 * 4, 4)
    assert re.search(r"train.py:\d+ in work", row["at"])
    (row,) = found["ways"]["unpatched"]["inspector"]
    assert (row["op"], row["nbytes"], row["calls"]) == ("AllReduce", 1 << 20, 2)
    page = (program / "safecomm-compare/compare.html").read_text()
    assert "No gain" in page
    for way in found["ways"].values():
        assert compare._spread(way["seconds"]) in page


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("raise SystemExit(7)", (), "unpatched, ended with status 7"),
        ("import time; print('begun', flush=True); time.sleep(1e5)", ("--limit", "3"), "did not end within 3 seconds"),
        ("print('no torch')", (), "no rank wrote what it saw"),
        ("print('x' * 10_000_000)\nraise SystemExit(1)", (), "ended with status 1"),
    ],
)
def test_a_program_that_fails_hangs_or_prints_much_is_told_in_a_line_and_nothing_is_left(
    tmp_path, script, options, said
):
    (tmp_path / "script.py").write_text(script)
    ended = start(tmp_path, *options, "--", sys.executable, "script.py", status=1)
    assert said in ended.err.splitlines()[0]
    assert not list((tmp_path / "safecomm-compare").glob("compare.*"))


def test_seconds_are_looked_at_of_a_server_and_then_it_is_ended(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, torch.distributed as dist, os, time\n"
        "dist.init_process_group('gloo', init_method='file://' + os.path.abspath(f'store{os.getpid()}'), rank=0, "
        "world_size=1)\n"
        "open('served', 'a').write(f'{os.getpid()}\\n')\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
    )
    said = start(tmp_path, "--seconds", "1:2", "--limit", "60", "--", sys.executable, "script.py").out
    assert "1 of 1 ranks took part; seconds 1 to 2" in said
    served = (tmp_path / "served").read_text().split()
    assert len(served) == 2
    assert not any(Path("/proc", pid).exists() for pid in served)
    for way in ("1.unpatched", "1.patch"):
        (one,) = observed.read_run(tmp_path / "safecomm-compare" / way)
        assert (one.ended, one.window, one.seconds) == ("seconds", (1, 2), [])


def test_a_server_of_which_a_rank_writes_nothing_is_ended_too(tmp_path):
    """One that never makes a group, here; its seconds are over, and so is the patience with it."""
    command = [sys.executable, "-c", "import torch, time; time.sleep(1e5)"]
    with mock.patch.object(compare, "PATIENCE", 5), pytest.raises(SafecommError, match="no rank wrote what it saw"):
        compare._run(command, tmp_path / "x", compare.UNPATCHED, (1, 2, True), 60, "")


def test_what_has_left_its_session_is_ended_too(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        'code = \'import os, time; open("pid", "w").write(str(os.getpid())); time.sleep(1e5)\'\n'
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "while not os.path.exists('pid') or not open('pid').read(): pass\n"
    )
    start(tmp_path, "--", sys.executable, "script.py", status=1)
    left = int((tmp_path / "pid").read_text())
    # It is killed, and gone once its parent, the first process, has collected it.
    assert not Path(f"/proc/{left}").exists() or "Z" in Path(f"/proc/{left}/stat").read_text().rpartition(")")[2]


def test_what_ignores_that_it_is_ended_is_killed(tmp_path):
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(1e5)"
    log = tmp_path / "output.txt"
    environment = {**os.environ, children.VARIABLE: json.dumps({"patch": False, "parent": os.getpid()})}
    with mock.patch.object(compare, "PATIENCE", 0.5):
        compare._ended([sys.executable, "-c", code], environment, log, None, lambda: log.read_text().endswith("\n"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_program_too(tmp_path, number):
    (tmp_path / "script.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1e5)")
    command = [sys.executable, "-m", "safecomm", "compare", "--", sys.executable, "script.py"]
    # Where these tests run in the background of a shell, an interrupt is ignored, and their children inherit that.
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(number)
    assert process.wait(60) == 130
    assert "interrupted" in process.stderr.read()
    process.stderr.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a program, or --before"),
        (("--",), "give a program, or --before"),
        (("--out", "a-file", "--", "true"), "can't be made a directory"),
        (("--seconds", "x", "--", "true"), "--seconds x"),
        (("--seconds", "2:2", "--", "true"), "--seconds 2:2"),
        (("--steps", "1:" + "9" * 5000, "--", "true"), "expected such as 3:12"),
        (("--limit", "nan", "--", "true"), "--limit nan: expected seconds"),
        (("--limit", "0", "--", "true"), "--limit 0"),
        (("--before", "a"), "give a program, or --before"),
        (("--steps", "5:2", "--", "true"), "--steps 5:2"),
        (("--turns", "0", "--", "true"), "--turns 0"),
        (("--", "no-such-program"), "no-such-program can't be run"),
        (("--before", "a", "--after", "b"), "a: no such file"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(tmp_path, arguments, said):
    (tmp_path / "a-file").touch()
    ended = start(tmp_path, *arguments, status=2)
    assert said in ended.err
    assert "Traceback" not in ended.err


# --- what ranks have written -----------------------------------------------------------------------------------------

GOOD = {
    "safecomm_observed": 1, "rank": 0, "world": 2, "how": "unpatched", "torch": "2.13", "device": "cpu",
    "ended": "steps", "window": [3, 4], "began": 1.0, "patched": False,
    "seconds": [0.5, 0.25], "memory": {"active": 5, "held": 0},
    "collectives": [["all_reduce", "0", "a.py:1 in f", 4, 2, 8, None, None, None]], "created": [["0", 1, 10]],
    "exposed": {"ms": 2.0, "exposed ms": 1.0},
}  # fmt: skip


def test_a_file_of_the_observer_is_read_as_it_was_written(tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps(GOOD))
    (one,) = observed.read_run(tmp_path)
    assert (one.rank, one.world, one.window, one.seconds) == (0, 2, (3, 4), [0.5, 0.25])
    assert one.memory == {"active": 5, "held": 0}
    assert one.collectives[0].total == 8
    assert one.created == {("0", 1): 10}
    assert one.snapshot is None


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in GOOD if name not in ("exposed", "patched")),
        {"seconds": [float("nan")]}, {"rank": -1}, {"memory": {"active": "5"}}, {"collectives": [[1]]},
        {"created": [["0", 1]]}, {"exposed": 3}, {"window": [1, 2, 3]}, {"safecomm_observed": 2},
    ],
)  # fmt: skip
def test_a_file_that_is_malformed_is_refused_in_a_line(tmp_path, change):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        observed.read_observed(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "3", '{"safecomm_observed": 1}', "\0", "\x80\x02}"])
def test_a_file_that_is_none_of_it_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not of safecomm compare"):
        observed.read_observed(path)


# --- what is told ----------------------------------------------------------------------------------------------------


def a_way(name, seconds=(), peak=None, **memory):
    one = observed.Observed(
        0, 1, name, "2.13", "GPU", "steps", (3, 4), 0.0, False, list(seconds), memory, [], {}, None, None
    )  # fmt: skip
    return compare.Way(name, [compare.Run([one], peak=peak)])


@pytest.mark.parametrize("nccl", [484 * MIB, 0])
def test_the_page_of_three_ways_has_the_figures_of_the_json(tmp_path, nccl):
    """Each chart is named by its way, and the lines are those of the way that is best.

    Where torch does not tell what NCCL has, it is what a group adds without the program.
    """
    names = {compare.UNPATCHED: True, compare.PATCHED: True, compare.AVOIDING: False}

    def ended(command, environment, log, *_):
        """Write what two ranks on GPUs would, and those without a program."""
        if log.name == "bare.txt":
            assert "--nproc-per-node=2" in command
            assert f'"parent": {os.getpid()}' in environment[children.VARIABLE]
            log.write_text(f"OMP_NUM_THREADS is 1\nbytes {856 * MIB} {484 * MIB}\nbytes {855 * MIB} {484 * MIB}\n")
            return 0
        (how,) = (name for name in names if log.parent.name == f"1.{name.removesuffix('()')}")
        active = (640 if names[how] else 256) * MIB
        memory = {"active": active, "reserved": active, "held": MIB, "outside": 1616 * MIB, "nccl": nccl}
        told = GOOD | {"how": how, "patched": how != compare.UNPATCHED, "device": "a GPU", "began": 0.0}
        for rank in range(2):
            told |= {"rank": rank, "memory": memory | {"staging": 16 * MIB}}
            (log.parent / f"rank{rank}.json").write_text(json.dumps(told))
            write(log.parent / f"rank{rank}.pickle", forum(stripes=names[how])[0].snapshot())
        return 0

    stale = tmp_path / "1.unpatched" / "inspector"
    stale.mkdir(parents=True)
    (stale / "old.log").write_text(record())
    with mock.patch.object(compare, "_ended", ended):
        reports, found = compare.compare(
            ["a", "b"], tmp_path, window=(3, 4, False), turns=1, limit=None, arena="", progress=lambda line: None
        )
    page = make_page(reports, reports[0].title)
    assert "<h1>What communication costs: a b</h1>" in page
    for name, stripes in names.items():
        way = found["ways"][name]
        assert sum(way["lines"].values()) == way["bytes"]["active"] == (640 if stripes else 256) * MIB
        assert way["bytes"]["nccl"] == 484 * MIB
        assert way["bytes"]["unattributed"] == 260 * MIB
        assert way["active of runs"] == [way["bytes"]["active"]]
        assert way["inspector"] == []
        assert f"<strong>{name}: " in page.replace("<wbr>", "")
        for nbytes in way["bytes"].values():
            assert mib(nbytes) in page
    assert found["predicted active"] == 256 * MIB
    (lines,) = (table for table in reports[0].tables if "by line" in table.title)
    assert lines.columns[2] == compare.AVOIDING
    assert lines.rows[-1][:3] == ("-384.0 MiB", "640.0 MiB", "256.0 MiB")


def test_what_a_device_does_not_tell_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compare._bare(2, tmp_path / "bare.txt", lambda line: None) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (1000, 400, "patch() lowers the peak of active bytes by 600.0 MiB."),
        (1000, 995, "No gain: no way lowers a peak by more than 1 % in all runs."),
        (1000, 1200, "patch() raises the peak of active bytes by 200.0 MiB."),
        (None, None, "No gain: memory is not seen here."),
    ],
)
def test_only_what_was_measured_to_be_better_is_advised(before, after, said):
    figures = [{} if one is None else {"active": one * MIB, "reserved": 2000 * MIB} for one in (before, after)]
    ways = [a_way("unpatched", **figures[0]), a_way("patch()", **figures[1])]
    advice = [one.text for one in compare.advised(ways)]
    assert any(said in text for text in advice), advice
    assert any("No gain" in text for text in advice) is ("lowers the" not in said)


def of_runs(name, *peaks):
    """Return a way with a run for each peak, in MiB; of None that peak is not known."""
    ways = [a_way(name, **({} if peak is None else {"active": peak * MIB})) for peak in peaks]
    return compare.Way(name, [way.runs[0] for way in ways])


@pytest.mark.parametrize(
    ("unpatched", "patched", "gain"),
    [
        ([2065, 2148, 2820], [2147, 2066, 1900], False),  # ranges that meet, as those of FSDP1
        ([2150, 2200, 2820], [2147, 2066, 1900], True),
        ([2150, 2200, 2820], [2150], False),  # that touch
        ([2150, None, 2820], [2000, 1990, 1980], False),
    ],
)
def test_a_peak_is_lower_if_it_is_so_in_all_runs(unpatched, patched, gain):
    (advice,) = compare.advised([of_runs("unpatched", *unpatched), of_runs("patch()", *patched)])
    assert ("lowers the peak" in advice.text) is gain
    assert "--turns" not in advice.text


@pytest.mark.parametrize("patched", [1000, 3000])
def test_of_one_run_it_says_that_more_of_them_tell(patched):
    text = str(compare.advised([of_runs("unpatched", 2000), of_runs("patch()", patched)]))
    assert text.count("--turns 3 tells") == 1


def test_times_within_the_spread_of_both_are_not_told_as_slower():
    near = [a_way("unpatched", (1.0, 1.2, 1.4)), a_way("patch()", (1.1, 1.25, 1.5))]
    apart = [a_way("unpatched", (1.0, 1.1, 1.2)), a_way("patch()", (2.0, 2.1, 2.2))]
    assert "A step takes 1.04 of its time unpatched, which is within the spread of both." in str(compare.advised(near))
    assert "A step takes 1.91 of its time unpatched; the machine may have" in str(compare.advised(apart))
    for ways in (near, apart):
        for way in ways:
            way.runs *= 2
    assert "A step takes 1.04 of its time unpatched.'" in str(compare.advised(near))  # of twice the same medians
    assert "A step takes 1.91 of its time unpatched.'" in str(compare.advised(apart))


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("a\nb", "b"),
        (
            "[rank1]:  line\n[rank1]: x.OwnError: 3\n---\nx.ChildFailedError: \n====",
            "[rank1]: x.OwnError: 3",
        ),
        ("Traceback\nValueError: 1\nmore\nTraceback\nKeyError: 2\nE failed\nx.ChildFailedError:", "KeyError: 2"),
        ("Traceback\nValueError: caught\nthe reason", "the reason"),
    ],
)
def test_of_a_program_that_fails_its_own_exception_is_shown(printed, shown, tmp_path):
    log = tmp_path / "output.txt"
    log.write_text(printed)
    assert compare._last_lines(log)[-1] == shown


def test_backends_that_record_apart_are_all_in_the_log():
    """From torch 2.15 on; and before, one recorder had them all."""
    entry = {"profiling_name": "x:all_reduce", "process_group": ("0", ""), "collective_seq_id": 1}

    def of_each(backend="gloo"):
        times = {"gloo": 2, "nccl2": 3, "nccl-lazy": 1}
        return pickle.dumps({"entries": [{**entry, "time_created_ns": times[backend]}]})

    for dump, expected in ((of_each, [1, 2, 3]), (lambda: of_each(), [2])):
        with mock.patch.object(observing, "_dump", dump), mock.patch.object(observing, "_dump_nccl", None):
            assert [one["time_created_ns"] for one in _torch.flight_entries()] == expected


def test_lines_add_up_to_the_peak_and_what_was_before_the_window_does_not_count(tmp_path):
    allocator = Allocator()
    early = allocator.alloc(8 * MIB, stack((1, "early")))
    large = allocator.alloc(16 * MIB, stack((2, "startup")))
    allocator.tick(1000)
    allocator.free(large, stack((3, "startup")))
    allocator.tick(1000)
    since = allocator.time / 1e6
    allocator.tick(1000)
    one = allocator.alloc(4 * MIB, stack((4, "step")))
    allocator.tick(1000)
    allocator.free(one, stack((5, "step")))
    allocator.tick(1000)
    assert early
    write(tmp_path / "a.pickle", allocator.snapshot())
    snapshot = read_snapshot(tmp_path / "a.pickle")
    whole, window = peak_of(snapshot), peak_of(snapshot, since)
    assert whole.active == 24 * MIB
    assert window.active == 12 * MIB
    for peak in (whole, window):
        assert sum(peak.lines.values()) == peak.active
    assert "startup" not in str(window.lines)
    assert window.gain == 0


def test_what_was_active_as_the_window_began_counts(tmp_path):
    allocator = Allocator()
    block = allocator.alloc(8 * MIB, stack((1, "early")))
    allocator.tick(1000)
    since = allocator.time / 1e6
    allocator.tick(1000)
    allocator.free(block, stack((2, "step")))
    write(tmp_path / "a.pickle", allocator.snapshot())
    assert peak_of(read_snapshot(tmp_path / "a.pickle"), since).active == 8 * MIB


# --- NCCL's Inspector ------------------------------------------------------------------------------------------------


def record(bus=485.1, **more):
    call = {"coll": "AllReduce", "coll_sn": 7, "coll_msg_size_bytes": 1 << 20, "coll_exec_time_us": 20}
    call |= {"coll_algobw_gbs": 277.2, "coll_busbw_gbs": bus, **more}
    return json.dumps({"header": {"id": "0x7f", "rank": 2, "n_ranks": 8}, "metadata": {}, "coll_perf": call})


def test_what_the_inspector_wrote_is_summed_by_operation_group_and_size(tmp_path):
    lines = [record(bus=1), record(bus=5), record(bus=3), record(coll="AllGather", coll_msg_size_bytes=9)]
    (tmp_path / "host-pid1.log").write_text("\n".join(lines))
    (tmp_path / "host-pid2.log").write_text(record(bus=2) + "\n" + record()[:50])
    first, second = inspector.read_inspector(tmp_path)
    assert (first.op, first.group, first.nbytes, first.calls, first.us) == ("AllReduce", "0x7f", 1 << 20, 4, 20)
    assert (first.bus_bandwidth, first.total, second.op) == (2.5, 4 << 20, "AllGather")
    assert inspector.read_inspector(tmp_path / "none") == []


@pytest.mark.parametrize(
    "line",
    [
        "", "x", "[]", "{}", "5", "[" * 100_000, "\x00", '{"header": 5, "coll_perf": 6}', record(bus="x"),
        record(bus=float("nan")), record(coll_exec_time_us=-1), record(coll=5), record(coll_msg_size_bytes=1 << 70),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_counts_for_nothing(line, tmp_path):
    (tmp_path / "a.log").write_text(line)
    assert inspector.read_inspector(tmp_path) == []


# --- the log ---------------------------------------------------------------------------------------------------------


def entry(op="nccl:all_reduce", count=1000, ms=None, line=5, **more):
    frames = [
        {"filename": "/x/torch/distributed/distributed_c10d.py", "name": "all_reduce", "line": 1},
        {"filename": "/home/me/train.py", "name": "step", "line": line},
    ]
    sizes = {"input_sizes": [[count]], "output_sizes": [[count]], "input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    return {"profiling_name": op, "process_group": ("0", "default"), "frames": frames, "duration_ms": ms} | sizes | more


def test_calls_of_a_line_are_a_row_with_the_bandwidths_of_nccl_tests():
    calls = [entry(count=1_000_000, ms=ms) for ms in (1.0, 2.0, 3.0)] + [entry(line=9), entry(count=2_000_000)]
    rows = logs.rows_of(calls, {"0": 4})
    first = next(row for row in rows if row.calls == 3)
    assert first.at == "/home/me/train.py:5 in step"
    assert (first.nbytes, first.total, first.us) == (4_000_000, 12_000_000, 2000.0)
    assert first.algorithm_bandwidth == pytest.approx(2.0)
    assert first.bus_bandwidth == pytest.approx(3.0)
    assert [row.us for row in rows if row is not first] == [None, None]
    assert [row.total for row in rows] == sorted((row.total for row in rows), reverse=True)
    assert "train.py:9" in str(logs.CollectiveLog(tuple(rows)))


@pytest.mark.parametrize(
    ("op", "expected"),
    [("all_reduce", 1.75), ("_all_gather_base", 0.875), ("reduce_scatter_tensor", 0.875), ("all_to_all", 0.875),
     ("broadcast", 1.0), ("send 0->1", 1.0)],
)  # fmt: skip
def test_the_factors_are_those_of_nccl_tests(op, expected):
    assert logs.factor(op, 8) == expected


def test_who_is_last_is_told_by_rank():
    created = [{("0", 1): 100, ("0", 2): 100}, {("0", 1): 3_000_100, ("0", 2): 0, ("0", 3): 5}]
    assert logs.late(created) == {0: (1, pytest.approx(1e-4)), 1: (1, 3.0)}
    assert logs.late(created[:1]) == {}


def test_without_a_flight_recorder_the_log_says_why():
    for found in (None, []):
        with mock.patch.object(_torch, "flight_entries", return_value=found):
            assert "TORCH_FR_BUFFER_SIZE" in str(safecomm.collective_log())


# --- pieces ----------------------------------------------------------------------------------------------------------


def kernel(name, start, end):
    device, times = SimpleNamespace(name="CUDA"), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=times)


def test_what_runs_beside_no_other_kernel_is_exposed():
    events = [
        kernel("ncclDevKernel_AllReduce", 0, 3000), kernel("ncclDevKernel_AllGather", 2000, 4000),
        kernel("gemm", 1000, 2500), kernel("gemm", 2400, 2600), kernel("add", 9000, 9500),
    ]  # fmt: skip
    assert exposed.exposed(events) == {"ms": 4.0, "exposed ms": 2.4}
    assert exposed.exposed([]) is None


def test_another_sitecustomize_still_runs_and_a_process_without_options_is_left_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with mock.patch.dict(os.environ, environment):
        environment |= children.variables({})
    environment.pop(children.VARIABLE)
    program = "import torch, sys; print('safecomm' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert ended.stdout.split() == ["theirs", "False"]


def test_a_process_that_can_not_begin_says_so_and_goes_on(tmp_path):
    environment = os.environ | children.variables({"no such option": 1})
    ended = subprocess.run(
        [sys.executable, "-c", "import torch; print('on')"], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert ended.stdout.strip() == "on"
    assert "is not patched: TypeError" in ended.stderr


def test_a_process_begins_that_first_only_asks_whether_torch_is_there():
    environment = os.environ | children.variables({"patch": True})
    program = (
        "import importlib.util; importlib.util.find_spec('torch'); import torch.distributed as dist; "
        "print(dist.all_reduce.__code__.co_filename)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert ended.stdout.endswith("safecomm/collectives/gates.py\n"), (ended.stdout, ended.stderr)


def test_a_program_that_patches_by_itself_is_not_told_as_unpatched(tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps(GOOD | {"patched": True}))

    def ended(command, environment, log, limit, enough):
        assert environment["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "0"
        assert not [name for name in environment if name.startswith("SAFECOMM_") and name != children.VARIABLE]
        log.write_text("said")
        (log.parent / "rank0.json").write_text(json.dumps(GOOD | {"patched": True}))
        return 0

    with (
        mock.patch.object(compare, "_ended", ended),
        mock.patch.dict(os.environ, SAFECOMM_ARENA="1MiB"),
        pytest.raises(SafecommError, match="patches by itself"),
    ):
        compare._run(["true"], tmp_path, compare.UNPATCHED, (3, 4, False), None, "")


def test_variables_of_a_process_within_such_a_process_do_not_grow():
    first = children.variables({})
    with mock.patch.dict(os.environ, first):
        assert children.variables({}) == first


class Torchs:
    """Stands in for what torch writes snapshots by."""

    def __init__(self, error=None):
        self.error = error
        self.recorded = []

    def dump(self, path):
        Path(path).write_bytes(b"half")
        if self.error is not None:
            raise self.error
        Path(path).write_bytes(b"whole")


@pytest.fixture
def torchs(monkeypatch):
    fake = Torchs()
    monkeypatch.setattr(_torch, "when_cuda_starts", lambda call: call())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(_torch, "record_history", lambda *given, **how: fake.recorded.append((given, how)))
    monkeypatch.setattr(_torch, "dump_snapshot", fake.dump)
    monkeypatch.setattr(_torch, "on_out_of_memory", lambda call: setattr(fake, "out_of_memory", call))
    return fake


def test_snapshots_are_written_at_the_end_as_memory_runs_out_and_at_a_signal(tmp_path, torchs):
    before = signal.getsignal(snapshots.SIGNAL)
    with mock.patch.object(snapshots.atexit, "register") as registered:
        snapshots.Snapshots(str(tmp_path), lambda: 3)
    try:
        assert torchs.recorded[0][0] == ("all",)
        torchs.out_of_memory(0, 1, 2, 3)
        os.kill(os.getpid(), snapshots.SIGNAL)
        registered.call_args.args[0](*registered.call_args.args[1:])
    finally:
        signal.signal(snapshots.SIGNAL, before)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "end.rank3.pickle", "oom.rank3.pickle", "signal.rank3.pickle",
    ]  # fmt: skip


def test_a_full_disk_leaves_no_half_of_a_snapshot_and_ends_no_program(tmp_path, torchs, capsys):
    torchs.error = OSError(28, "No space left on device")
    with mock.patch.object(snapshots.atexit, "register") as registered:
        snapshots.Snapshots(str(tmp_path), lambda: None)
    signal.signal(snapshots.SIGNAL, signal.SIG_DFL)
    registered.call_args.args[0](*registered.call_args.args[1:])
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in capsys.readouterr().err


@pytest.fixture
def observe():
    """Return what observes this process; it ends with the test."""
    made = []

    def observe(directory, first, last):
        with mock.patch.object(observer.atexit, "register"):
            made.append(observer.Observer(str(directory), first, last, lambda: (0, 2), how="x", patched=bool))

    yield observe
    for one in made:
        one._hook.remove()
    observer.LEDGER.observer = None
    LISTENERS.clear()


def an_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], 0.1)


OUTLIVED = """
import os, weakref
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.path.abspath(f"store{os.getpid()}"), rank=0, world_size=1)
import safecomm, torch
group = weakref.ref(dist.group.WORLD)
for _ in range(3):
    dist.all_reduce(torch.ones(3))
    safecomm.mark_step()
dist.destroy_process_group()
assert group() is None
print("gone", flush=True)
os._exit(0)
"""


def test_a_group_does_not_outlive_its_end_because_it_was_looked_at(tmp_path):
    """Threads of gloo that are there as the process ends abort it now and then."""
    (tmp_path / "script.py").write_text(OUTLIVED)
    start(tmp_path, "--steps", "1:2", "--limit", "60", "--", sys.executable, "script.py")
    for way in ("1.unpatched", "1.patch"):
        assert (tmp_path / "safecomm-compare" / way / "output.txt").read_text().splitlines()[-1] == "gone"


def test_marked_steps_count_and_then_no_others(tmp_path, observe):
    observe(tmp_path, 2, 4)
    first, second = an_optimizer(), an_optimizer()
    for _ in range(4):
        for optimizer in (first, second, first):
            optimizer.step()
        assert not (tmp_path / "rank0.json").exists()
        safecomm.mark_step()
    (one,) = observed.read_run(tmp_path)
    assert (one.ended, one.window, len(one.seconds)) == ("steps", (2, 4), 3)


def test_an_optimizer_takes_the_place_of_one_that_is_gone(tmp_path, observe):
    observe(tmp_path, 1, 2)
    for _ in range(2):
        assert not (tmp_path / "rank0.json").exists()
        an_optimizer().step()
    assert observed.read_run(tmp_path)[0].window == (1, 2)


def test_what_a_rank_saw_is_there_once_all_of_it_is(tmp_path, observe):
    observe(tmp_path, 1, 1)

    def snapshot(path):
        assert not list(tmp_path.iterdir())

    with mock.patch.object(observer, "write_snapshot", side_effect=snapshot) as written:
        an_optimizer().step()
    assert written.called
    assert not observed.all_done(tmp_path)  # of two ranks
    (tmp_path / "rank1.json").write_text((tmp_path / "rank0.json").read_text())
    assert observed.all_done(tmp_path)


def test_of_several_optimizers_one_counts(tmp_path, observe):
    observe(tmp_path, 1, 2)
    first, second = an_optimizer(), an_optimizer()
    for _ in range(2):
        assert not (tmp_path / "rank0.json").exists()
        second.step()
        first.step()
    assert observed.read_run(tmp_path)[0].window == (1, 2)


def test_the_observer_says_that_a_disk_is_full_and_the_program_goes_on(tmp_path, capsys, observe):
    observe(tmp_path / "gone", 1, 1)
    an_optimizer().step()
    assert "rank0.json can't be written" in capsys.readouterr().err


def test_a_process_that_a_rank_starts_does_not_write_in_its_place(tmp_path):
    """It is told the same rank, as the workers of torch.compile are."""
    options = {"observe": (str(tmp_path), 1, 2, "unpatched", False), "patch": False}
    environment = os.environ | children.variables(options) | {"RANK": "0", "WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_an_observer_that_fails_ends_and_the_program_goes_on(tmp_path, capsys, observe):
    observe(tmp_path, 1, 1)
    optimizer = an_optimizer()
    with mock.patch.object(_torch, "flight_entries", side_effect=RuntimeError("no recorder")):
        optimizer.step()
        optimizer.step()
    said = capsys.readouterr().err
    assert said.count("is observed no more: RuntimeError('no recorder')") == 1


def test_a_run_that_no_rank_saw_is_an_error_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no rank wrote what it saw"):
        observed.read_run(tmp_path)
    assert issubclass(SafecommError, RuntimeError)
