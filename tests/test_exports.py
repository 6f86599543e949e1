"""report --json and --perfetto: the schema, the Trace Event Format, torch's clock, and what can't be written."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import snapshots
import torch
from snapshots import MIB, Allocator, forum, stack, write

import safecomm
from safecomm.__main__ import main
from safecomm.diagnostics import exports
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.timeline import Timeline

ROOT = Path(__file__).parents[1]
AT = "/home/me/train.py:21 in layer"
SITE = f"all_reduce at {AT}"
BEGAN = 1_700_000_000.25


def recording(path, rank=0, world=1, *, started=BEGAN, held=((0, 0), (64, 128), (0, 64), (0, 0), (32, 32))):
    """Write a recording with a sample each tenth of a second: MiB that one line holds, and the most since the last."""
    lines = [
        {"safecomm_record": 1, "rank": rank, "world": world, "started": started, "program": "train.py"},
        {"site": 0, "op": "all_reduce", "group": "0", "at": AT},
    ]
    for number, (now, most) in enumerate(held):
        figures = {"active": 900 * MIB, "allocated": 800 * MIB, "reserved": 1000 * MIB, "unusable": 100 * MIB}
        site = [0, now * MIB, most * MIB, 1, number, 64 * MIB * number, 0.004]
        lines.append({"t": number / 10, "held": now * MIB, "peak": most * MIB, "sites": [site], **figures})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def exported(option, path, *files):
    """Return what the command writes."""
    assert main(["report", *map(str, files), option, str(path)]) == 0
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def trace_of(tmp_path, *files):
    return exported("--perfetto", tmp_path / "trace.json", *files)


def events(trace, phase, name=None):
    return [one for one in trace["traceEvents"] if one["ph"] == phase and name in (None, one["name"])]


@pytest.fixture
def pair(tmp_path):
    return snapshots.pair(tmp_path)


# --- JSON -------------------------------------------------------------------------------------------------------

SCHEMA = {
    "safecomm_report": int,
    "reports": [
        {
            "title": str, "program": str, "rank": (int, type(None)), "figures": {str: int}, "summary": [str],
            "advice": [{"nbytes": int, "text": str}],
            "tables": [{"title": str, "columns": [str], "rows": [[str]], "note": str}],
            "timelines": [
                {"title": str, "duration": float, "lines": {str: [(float, int)]}, "holders": {str: int}, "caption": str}
            ],
        }
    ],
}  # fmt: skip
"""Lists of one thing, objects of named keys or of any, and a point as a tuple."""


def conforms(value, schema):
    if isinstance(schema, list):
        return type(value) is list and all(conforms(one, schema[0]) for one in value)
    if isinstance(schema, tuple) and float in schema:
        return type(value) is list and [type(one) for one in value] == [float, int]
    if isinstance(schema, dict) and list(schema) == [str]:
        return type(value) is dict and all(conforms(one, schema[str]) for one in value.values())
    if isinstance(schema, dict):
        return (
            type(value) is dict
            and value.keys() == schema.keys()
            and all(map(conforms, value.values(), schema.values()))
        )
    return type(value) in (schema if isinstance(schema, tuple) else (schema,))


def keys(schema, place=""):
    """Yield each key of the schema as the page writes it."""
    if isinstance(schema, dict) and list(schema) != [str]:
        for name, inner in schema.items():
            lists = "[]" if isinstance(inner, list) else ""
            yield f"{place}{name}{lists}"
            yield from keys(inner[0] if lists else inner, f"{place}{name}{lists}.")


def test_the_json_is_of_the_documented_schema(tmp_path, pair):
    found = exported("--json", tmp_path / "x.json", *pair, recording(tmp_path / "run.rank0.jsonl"))
    assert conforms(found, SCHEMA)
    assert found["safecomm_report"] == 1
    assert [report["rank"] for report in found["reports"]] == [None, None, 0]
    assert [report["program"] for report in found["reports"]] == ["train.py"] * 3


def test_the_page_has_every_key_of_the_schema_in_its_order():
    page = (ROOT / "docs" / "exports.md").read_text()
    assert re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.M) == list(keys(SCHEMA))


def test_the_json_says_what_is_printed(tmp_path, pair):
    found = exported("--json", tmp_path / "x.json", pair[0])["reports"][0]
    (report,) = make_reports([pair[0]])
    assert (found["title"], found["figures"], found["summary"]) == (report.title, report.figures, report.summary)
    assert [one["text"] for one in found["advice"]] == report.advice
    assert found["advice"][0]["nbytes"] == 384 * MIB
    for table, one in zip(found["tables"], report.tables, strict=True):
        assert (table["title"], tuple(table["columns"])) == (one.title, one.columns)
        assert [tuple(row) for row in table["rows"]] == list(one.rows)
    (timeline,) = found["timelines"]
    assert max(value for _, value in timeline["lines"]["active"]) == report.figures["active"]
    assert timeline["holders"] == report.timelines[0].holders


# --- a trace ----------------------------------------------------------------------------------------------------

REQUIRED = {"C": {"cat", "ts", "args"}, "X": {"cat", "ts", "dur", "args"}, "M": {"args"}}
"""Of each phase that is written, beside ``name``, ``ph``, ``pid`` and ``tid``."""


def check_format(trace):
    """Assert what the Trace Event Format asks for, and what Perfetto asks for beyond it."""
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "baseTimeNanoseconds", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert type(trace["baseTimeNanoseconds"]) is int
    for one in trace["traceEvents"]:
        assert one.keys() == {"name", "ph", "pid", "tid"} | REQUIRED[one["ph"]]
        assert type(one["name"]) is str
        assert one["name"]
        assert type(one["pid"]) is type(one["tid"]) is int
        assert one["tid"] > 0 < one["pid"] < 1 << 31
        if one["ph"] == "M":
            assert one["name"] in ("process_name", "thread_name")
            assert type(one["args"]["name"]) is str
        else:
            assert type(one["ts"]) is int
            assert 0 <= one["ts"] < 1 << 53
        if one["ph"] == "C":
            assert list(map(type, one["args"].values())) == [int]
        if one["ph"] == "X":
            assert type(one["dur"]) is int
            assert one["dur"] >= 0
    times = [one["ts"] for one in trace["traceEvents"] if one["ph"] != "M"]
    assert times == sorted(times)
    names = [(one["name"], one["pid"], one["tid"]) for one in events(trace, "M")]
    assert len(names) == len(set(names))
    assert {(one["pid"], one["tid"]) for one in trace["traceEvents"]} == {
        (pid, tid) for name, pid, tid in names if name == "thread_name"
    }
    ends = {}
    for one in events(trace, "X"):
        assert ends.get((one["pid"], one["tid"]), 0) <= one["ts"], "Perfetto leaves out a span that overlaps"
        ends[one["pid"], one["tid"]] = one["ts"] + one["dur"]


def test_the_trace_is_of_the_trace_event_format(tmp_path, pair):
    trace = trace_of(tmp_path, *pair, recording(tmp_path / "run.rank0.jsonl"))
    check_format(trace)
    assert {one["ph"] for one in trace["traceEvents"]} == {"C", "X", "M"}
    titles = [one["args"]["name"] for one in events(trace, "M", "process_name")]
    assert titles == ["stock.pickle", "safecomm.pickle", "run.rank0.jsonl, rank 0 of 1"]
    assert len({one["pid"] for one in trace["traceEvents"]}) == 3
    assert min(one["pid"] for one in trace["traceEvents"]) > 1 << 22, "a process or a GPU can have the number"


def test_a_counter_is_written_for_each_line_of_a_timeline(tmp_path, pair):
    trace = trace_of(tmp_path, pair[0])
    (timeline,) = make_reports([pair[0]])[0].timelines
    first = min(one["ts"] for one in events(trace, "C"))
    for name, line in (("active", "active"), ("freed but unusable", "unusable"), ("reserved", "reserved")):
        found = [((one["ts"] - first) / 1e6, one["args"]["bytes"]) for one in events(trace, "C", name)]
        assert found == [(round(moment, 6), value) for moment, value in timeline.lines[line]]
    assert {one["name"] for one in events(trace, "C")} == {"active", "freed but unusable", "reserved"}


def test_a_block_that_waited_is_a_span_with_the_lines_that_allocated_and_freed_it(tmp_path):
    allocator = Allocator()
    allocator.metadata = "step 3"
    waits, other = (allocator.alloc(size * MIB, stack((21, "layer"))) for size in (4, 2))
    allocator.tick(1000)
    allocator.free(waits, stack((23, "layer")), recorded=True)
    allocator.free(other, stack((24, "layer")))
    allocator.tick(250)
    allocator.complete(waits, stack((21, "layer")))
    (span,) = events(trace_of(tmp_path, write(tmp_path / "x.pickle", allocator.snapshot())), "X")
    assert (span["name"], span["cat"], span["dur"]) == (AT, "freed but unusable", 250)
    freed = "/home/me/train.py:23 in layer"
    assert span["args"] == {"bytes": 4 * MIB, "freed at": freed, "user_metadata": "step 3"}


def test_a_block_that_waits_at_the_end_has_a_span_until_then(tmp_path):
    allocator = Allocator()
    block = allocator.alloc(4 * MIB, stack((21, "layer")))
    allocator.free(block, stack((23, "layer")), recorded=True)
    allocator.tick(500)
    allocator.alloc(4 * MIB, stack((21, "layer")))
    (span,) = events(trace_of(tmp_path, write(tmp_path / "x.pickle", allocator.snapshot())), "X")
    assert span["dur"] == 500


def test_the_spans_of_all_stripes_are_there_and_none_overlaps(tmp_path, pair):
    trace = trace_of(tmp_path, *pair)
    check_format(trace)
    spans = events(trace, "X")
    blocks = [block for path in pair for block in make_reports([path])[0].timelines[0].blocks]
    assert len(spans) == sum(block.freed is not None and block.freed != block.end for block in blocks) == 39
    assert len({one["tid"] for one in spans}) == 7, "as many as waited at a time"


def test_the_spans_are_those_of_the_largest_blocks_and_the_trace_says_so(tmp_path, monkeypatch):
    allocator = Allocator()
    for size in (3, 1, 9, 5, 7):
        allocator.free(allocator.alloc(size * MIB, stack((21, "layer"))), stack((23, "layer")), recorded=True)
        allocator.tick(10)
    allocator.alloc(MIB, stack((21, "layer")))
    path = write(tmp_path / "x.pickle", allocator.snapshot())
    assert len(events(trace_of(tmp_path, path), "X")) == 5
    assert exports.SPANS == 20_000
    monkeypatch.setattr(exports, "SPANS", 3)
    trace = trace_of(tmp_path, path)
    check_format(trace)
    assert {one["args"]["bytes"] // MIB for one in events(trace, "X")} == {9, 5, 7}
    assert trace["otherData"]["spans"] == "at most 3: the largest of 5 blocks that were freed but unusable"


def test_what_call_sites_of_a_recording_held_are_counters_and_spans(tmp_path):
    path = recording(tmp_path / "run.rank0.jsonl")
    trace = trace_of(tmp_path, path)
    (timeline,) = make_reports([path])[0].timelines
    first = min(one["ts"] for one in events(trace, "C"))
    band = [(one["ts"] - first, one["args"]["bytes"]) for one in events(trace, "C", f"held by collectives: {SITE}")]
    assert band == [(round(moment * 1e6), value) for moment, value in timeline.bands[SITE]]
    assert [one["args"]["bytes"] for one in events(trace, "C", "held by collectives, at most")] == [v for _, v in band]
    assert {one["args"]["bytes"] for one in events(trace, "C", "reserved")} == {1000 * MIB}
    spans = [(one["name"], one["ts"] - first, one["dur"], one["args"]) for one in events(trace, "X")]
    assert spans == [
        (SITE, 0, 200_000, {"bytes at the most": 128 * MIB}),
        (SITE, 300_000, 100_000, {"bytes at the most": 32 * MIB}),
    ]


def test_the_sum_of_call_sites_is_that_of_each_moment():
    bands = {"one": [(0.0, 1), (2.0, 5), (3.0, 0)], "two": [(1.0, 10), (3.0, 20)]}
    trace = exports.make_trace([Timeline("x", 4.0, {}, bands)])
    found = [(one["ts"], one["args"]["bytes"]) for one in events(trace, "C", "held by collectives, at most")]
    assert found == [(0, 1), (1_000_000, 11), (2_000_000, 15), (3_000_000, 20)]
    check_format(trace)
    held = [(one["name"], one["ts"], one["dur"]) for one in events(trace, "X")]
    assert held == [("one", 0, 3_000_000), ("two", 1_000_000, 3_000_000)]


def test_devices_and_ranks_are_processes_of_their_own(tmp_path):
    allocator = Allocator()
    allocator.alloc(MIB, stack((21, "layer")))
    found = allocator.snapshot()
    found["device_traces"] = [allocator.trace, allocator.trace]
    ranks = [recording(tmp_path / f"run.rank{rank}.jsonl", rank, 2, held=[(rank, rank)] * 3) for rank in range(2)]
    trace = trace_of(tmp_path, write(tmp_path / "x.pickle", found), *ranks)
    check_format(trace)
    assert [one["args"]["name"] for one in events(trace, "M", "process_name")] == [
        "x.pickle, device 0", "x.pickle, device 1",
        "run.rank1.jsonl, rank 1 of 2, the most of all ranks", "run.rank0.jsonl, rank 0 of 2, the median of all ranks",
    ]  # fmt: skip


# --- its clock --------------------------------------------------------------------------------------------------


def unix_micros(trace, one):
    return trace["baseTimeNanoseconds"] // 1000 + one["ts"]


def test_the_times_of_a_snapshot_are_its_own_to_the_microsecond(tmp_path):
    allocator, _ = forum(stripes=True)
    trace = trace_of(tmp_path, write(tmp_path / "x.pickle", allocator.snapshot()))
    written = {unix_micros(trace, one) for one in trace["traceEvents"] if one["ph"] != "M"}
    assert written <= {entry["time_us"] for entry in allocator.trace}
    assert min(written) == allocator.trace[0]["time_us"]
    assert trace["otherData"]["clock not known"] == []


def test_two_files_lie_on_one_clock(tmp_path):
    """Also if the one began in the quarter of a year before the other's."""
    quarter = 7_889_238
    for distance in (3, quarter):
        ones = [
            recording(tmp_path / f"{name}.jsonl", None, None, started=BEGAN + at)
            for name, at in (("b", distance), ("a", 0))
        ]
        trace = trace_of(tmp_path, *ones)
        check_format(trace)
        starts = {one["pid"]: unix_micros(trace, one) for one in reversed(events(trace, "C", "active"))}
        assert sorted(starts.values()) == [int(BEGAN * 1e6), int((BEGAN + distance) * 1e6)]
        assert trace["baseTimeNanoseconds"] == int(BEGAN) // quarter * quarter * 10**9


def test_the_clock_is_that_of_torchs_profiler(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with safecomm.record_memory(tmp_path / "run.jsonl") as made:
            torch.ones(3)
        after = time.time_ns() // 1000
        torch.zeros(3)
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    theirs = json.loads((tmp_path / "profile.json").read_text())
    trace = exports.make_trace(make_reports([made.path])[0].timelines)
    if "baseTimeNanoseconds" in theirs:
        assert trace["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    base = theirs.get("baseTimeNanoseconds", 0) // 1000
    begun, ended = (
        next(base + float(one["ts"]) for one in theirs["traceEvents"] if one.get("name") == f"aten::{name}")
        for name in ("ones", "zeros")
    )
    (report,) = make_reports([made.path])
    began = report.timelines[0].began * 1e6
    assert began <= begun + 1000
    assert after <= ended + 1000


@pytest.mark.parametrize("started", [0, -5.0, 1e18])
def test_what_has_no_clock_begins_with_the_first_that_has_one(started, tmp_path):
    ones = [recording(tmp_path / "a.jsonl", None, None, started=started), recording(tmp_path / "b.jsonl", None, None)]
    trace = trace_of(tmp_path, *ones)
    check_format(trace)
    assert len({one["ts"] for one in events(trace, "C", "active")}) == 5
    assert trace["otherData"]["clock not known"] == ["a.jsonl"]
    alone = trace_of(tmp_path, ones[0])
    check_format(alone)
    assert alone["baseTimeNanoseconds"] == min(one["ts"] for one in events(alone, "C")) == 0


def test_a_snapshot_without_times_has_no_clock(tmp_path):
    allocator, _ = forum(stripes=True)
    for entry in allocator.trace:
        del entry["time_us"]
    trace = trace_of(tmp_path, write(tmp_path / "x.pickle", allocator.snapshot()))
    check_format(trace)
    assert trace["otherData"]["clock not known"] == ["x.pickle"]


# --- writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--json", "--perfetto"])
def test_what_can_not_be_written_is_one_line_and_nothing_is_left(option, tmp_path, pair, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for name in ("no/x.json", "folder", "file/x.json", "x" * 300):
        assert main(["report", str(pair[0]), option, str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"python -m safecomm report: {option}: {tmp_path / name} can't be written: ")
        assert len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["--json", "--perfetto"])
@pytest.mark.parametrize("failing", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_if_writing_fails(option, failing, tmp_path, pair, capsys, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("kept")
    before = sorted(tmp_path.iterdir())

    def fail(*_):
        raise failing

    monkeypatch.setattr(os, "replace", fail)
    assert main(["report", str(pair[0]), option, str(path)]) == (2 if isinstance(failing, OSError) else 130)
    assert path.read_text() == "kept"
    assert sorted(tmp_path.iterdir()) == before
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_link_stays_one_and_the_file_has_ordinary_permissions(tmp_path, pair):
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    exported("--json", tmp_path / "link.json", pair[0])
    assert (tmp_path / "link.json").is_symlink()
    (tmp_path / "other").write_text("")
    assert (tmp_path / "file.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    exports.write_json([], tmp_path / "pipe")
    assert json.loads(os.read(reader, 1 << 16)) == {"safecomm_report": 1, "reports": []}
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_without_a_history_there_is_no_trace(tmp_path, capsys):
    path = write(tmp_path / "x.pickle", {"segments": [], "device_traces": []})
    assert main(["report", str(path), "--perfetto", str(tmp_path / "x.json")]) == 2
    assert "--perfetto: there is no timeline to write" in capsys.readouterr().err
    assert exported("--json", tmp_path / "x.json", path)["reports"][0]["timelines"] == []


def test_what_a_file_says_is_plain_text_in_both(tmp_path):
    evil = '</script>"\\\u2028\U0001f600\ud800'
    allocator = Allocator()
    allocator.free(allocator.alloc(MIB, stack((1, evil), program=evil)), stack((2, evil)), recorded=True)
    allocator.tick(10)
    allocator.alloc(MIB, stack((1, evil)))
    path = write(tmp_path / "x.pickle", allocator.snapshot())
    for option in ("--json", "--perfetto"):
        exported(option, tmp_path / "x.json", path)
        assert (tmp_path / "x.json").read_bytes().isascii()


def test_both_are_written_without_torch_and_the_last_lines_say_so(tmp_path, pair):
    script = "import sys; sys.modules['torch'] = None\nimport safecomm_shell; sys.exit(safecomm_shell.main())"
    arguments = ["report", str(pair[0]), "--json", "x.json", "--perfetto", "trace.json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[-5:] == ["", "wrote x.json", "", "wrote trace.json", ""]
    assert conforms(json.loads((tmp_path / "x.json").read_text()), SCHEMA)
    check_format(json.loads((tmp_path / "trace.json").read_text()))
