"""python -m safecomm report: what it finds in recordings and snapshots, that it executes nothing, and bad input."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import snapshots
import torch
from pages import shown_by
from snapshots import MIB, Allocator, forum, stack, write

import safecomm
from safecomm.__main__ import main
from safecomm.diagnostics import snapshot as snapshot_module
from safecomm.diagnostics.comparison import compared, difference, headline
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.page import make_page
from safecomm.diagnostics.snapshot import read_snapshot
from safecomm.diagnostics.snapshot_report import lines_of

LAYER = "/home/me/train.py:21 in layer"
GONE = "/home/me/train.py:23 in layer"

RECORDED = Path(__file__).parents[1] / "benchmarks" / "results" / "snapshots"
"""Snapshots of a real run, by ``benchmarks/record_snapshots.py``."""


@pytest.fixture
def pair(tmp_path):
    return snapshots.pair(tmp_path)


# --- what a snapshot says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stripes", [True, False])
def test_the_bytes_are_the_allocators(tmp_path, stripes):
    allocator, (active, unusable) = forum(stripes=stripes)
    snapshot = read_snapshot(write(tmp_path / "x.pickle", allocator.snapshot()))
    (trace,) = snapshot.traces
    assert max(map(sum, zip(trace.allocated, trace.unusable, strict=True))) == active
    assert max(trace.unusable) == unusable
    assert (trace.allocated[-1], trace.unusable[-1]) == (allocator.active()[0], allocator.active()[1])
    assert trace.reserved[-1] == sum(segment["total_size"] for segment in allocator.segments)
    assert max(trace.reserved) == trace.reserved[-1]


def test_the_stripes_are_found_with_the_lines_that_caused_them(pair):
    stock, ours = make_reports(pair)
    snapshot = read_snapshot(pair[0])
    (trace,) = snapshot.traces
    (line,) = lines_of(trace, snapshot.stacks, waited=True)
    assert line.sites == (LAYER, GONE)
    assert line.count == 39
    assert line.most == max(trace.unusable) == 7 * 64 * MIB
    (advice,) = stock.advice
    assert "39 blocks were freed but unusable, 448.0 MiB at the most" in advice
    assert f"A block of 64.0 MiB allocated at {LAYER} waited 3.3 ms" in advice
    assert "At most 384.0 MiB of the peak of 640.0 MiB can be gained" in advice
    assert stock.summary[1].endswith("active 256.0 MiB: at most 384.0 MiB to gain")
    assert ours.advice == []
    assert "active 256.0 MiB at the most, freed but unusable 0 B" in ours.summary[0]


def test_the_gain_is_that_of_the_program_without_record_stream(pair):
    """The figure that is told of the one program, as what it can gain at the most, is that of the other."""
    stock, ours = (read_snapshot(path).traces[0] for path in pair)
    assert max(stock.allocated) == max(ours.allocated)


def test_a_history_that_begins_and_ends_in_the_middle(tmp_path):
    """The ring buffer of a long run has lost its beginning: what was there before is known from the end."""
    allocator, _ = forum(stripes=True)
    whole = read_snapshot(write(tmp_path / "whole.pickle", allocator.snapshot())).traces[0]
    snapshot = allocator.snapshot()
    for cut in (1, 30, 60, 101, len(allocator.trace) - 1):
        snapshot["device_traces"] = [allocator.trace[cut:]]
        part = read_snapshot(write(tmp_path / "part.pickle", snapshot)).traces[0]
        count = len(part.times) - 1
        assert part.allocated[-count:] == whole.allocated[-count:]
        assert part.unusable[-count:] == whole.unusable[-count:]
        assert part.reserved[-count:] == whole.reserved[-count:]


def random_history(seed):
    """Return an allocator with a history, and what was in use and what waited as it was asked after each action."""
    chance = random.Random(seed)
    allocator, live, waits, expected = Allocator(), [], [], []
    for _ in range(chance.randrange(5, 200)):
        allocator.tick(200 + chance.randrange(3))
        action = chance.random()
        if action < 0.5 or not live:
            stream = chance.choice((0, 0, 0x55))
            live.append(allocator.alloc(chance.randrange(1, 8 * MIB), stack((chance.randrange(9), "f")), stream))
        elif action < 0.8:
            address = live.pop(chance.randrange(len(live)))
            recorded = chance.random() < 0.5
            allocator.free(address, stack((1, "g")), recorded=recorded)
            waits += [address] * recorded
        elif waits:
            address = waits.pop(chance.randrange(len(waits)))
            if allocator.trace[-1]["action"] == "free_requested" and allocator.trace[-1]["addr"] == address:
                del expected[-1]  # nothing came between: nobody was kept from it
            allocator.complete(address, stack((2, "h")))
        expected.append(allocator.active())
    return allocator, expected


def test_random_histories_agree_with_the_allocator(tmp_path):
    """Whatever happens, bytes in use and bytes that wait are the allocator's at each moment that it was asked."""
    for seed in range(20):
        allocator, expected = random_history(seed)
        trace = read_snapshot(write(tmp_path / "x.pickle", allocator.snapshot())).traces[0]
        told = list(zip(trace.allocated, trace.unusable, strict=True))
        assert told[-1] == expected[-1]
        assert max(sum(one) for one in told) == max(sum(one) for one in expected)
        assert max(one[1] for one in told) == max(one[1] for one in expected)
        assert set(expected) <= set(told)


def lives(trace):
    """Return of each place what was in use and what waited, as the sum of its blocks."""
    found = []
    for place in range(len(trace.times)):
        blocks = [one for one in trace.blocks if one.made <= place and (one.completed is None or one.completed > place)]
        waits = sum(one.size for one in blocks if one.requested is not None and one.requested <= place)
        found.append((sum(one.size for one in blocks) - waits, waits))
    return found


def test_a_part_of_a_history_has_what_was_there_as_it_began(tmp_path):
    """Whatever the part: its lines, and the sum of its blocks, are those of the whole at each moment."""
    for seed in range(20):
        chance = random.Random(1000 + seed)
        path = write(tmp_path / "x.pickle", random_history(seed)[0].snapshot())
        whole, part = (read_snapshot(path).traces[0] for _ in range(2))
        first = chance.uniform(0, whole.duration)
        last = chance.choice((whole.duration, 2 * whole.duration, chance.uniform(first, whole.duration)))
        part.keep(first, last)
        assert part.duration == pytest.approx(min(last, whole.duration) - first)
        assert part.began == pytest.approx(whole.began + first)
        start = max(number for number, time in enumerate(whole.times) if time <= first)
        end = sum(time <= last for time in whole.times)
        assert part.times == pytest.approx([max(time - first, 0) for time in whole.times[start:end]])
        for name in ("allocated", "unusable", "reserved"):
            assert getattr(part, name) == getattr(whole, name)[start:end]
        assert lives(part) == lives(whole)[start:end]
        assert lives(part) == list(zip(part.allocated, part.unusable, strict=True))


def test_a_report_of_a_part_says_what_is_not_in_the_file(tmp_path, capsys):
    path = write(tmp_path / "x.pickle", random_history(3)[0].snapshot())
    assert main(["report", str(path), "--from", "0.001", "--to", "0.002", "--html", str(tmp_path / "x.html")]) == 0
    assert "allocations in 0.001 s" in capsys.readouterr().out
    recording = tmp_path / "run.jsonl"
    with safecomm.record_memory(recording):
        pass
    assert main(["report", str(recording), "--from", "0.1"]) == 2
    assert "is a recording: --from and --to are of snapshots" in capsys.readouterr().err
    for wrong in (["--from", "100"], ["--from", "0.002", "--to", "0.001"], ["--from", "-1"], ["--to", "nan"]):
        assert main(["report", str(path), *wrong]) == 2
        assert "s of history: --from and --to have to be in it" in capsys.readouterr().err


def test_buffers_of_many_sizes_that_split_segments_call_for_an_arena(tmp_path):
    allocator = Allocator()
    gathering = stack((7, "all_gather_params"), (9, "forward"))
    kept = []
    for number in range(12):
        buffer = allocator.alloc((1 + number % 6) * MIB, gathering)
        kept.append(allocator.alloc(MIB // 2, stack((8, "activation"))))
        allocator.tick(100)
        allocator.free(buffer, gathering)
    (report,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    (advice,) = [text for text in report.advice if "arena" in text]
    split = [s for s in allocator.segments if {b["state"] for b in s["blocks"]} == {"inactive", "active_allocated"}]
    assert f"12 buffers of collectives, of 6 different sizes, split {len(split)} segments" in advice
    free = sum(b["size"] for s in split for b in s["blocks"] if b["state"] == "inactive")
    assert f"{free // MIB}.0 MiB are free in pieces and 0 B are theirs. An arena of 6 MiB would hold" in advice
    assert f"at most {free // MIB - 6}.0 MiB to gain" in advice


MARKS = {
    "torch 2.15": {"internal_metadata": "mallocWithAddress", "user_metadata": "step 3"},
    "torch 2.14": {"user_metadata": "step 3\nmallocWithAddress"},
}
"""How torch marks the block that it takes to come to an address behind it, and gives back at once."""


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("cut", [0, 2])
def test_what_the_allocator_takes_to_come_to_an_address_is_nobodys_block(tmp_path, mark, cut):
    """Also where the history begins between the taking and the giving back."""
    allocator = Allocator()
    allocator.alloc_behind(3 * MIB, MIB, stack((7, "place")), **mark)
    assert [entry["action"] for entry in allocator.trace[1:]] == ["alloc", "alloc", "free_requested", "free_completed"]
    snapshot = allocator.snapshot()
    snapshot["device_traces"] = [allocator.trace[cut:]]
    (trace,) = read_snapshot(write(tmp_path / "x.pickle", snapshot)).traces
    assert [block.size for block in trace.blocks] == [MIB]
    assert max(trace.allocated) == MIB
    assert max(trace.unusable) == 0


def test_what_the_program_has_attached_to_memory_is_shown(tmp_path):
    allocator = Allocator()
    layer, other = stack((21, "layer")), stack((30, "step"))
    allocator.alloc(4 * MIB, other)
    for number in range(5):
        allocator.metadata = f'{{"microbatch":{number}}}'
        address = allocator.alloc((9 - number) * MIB, layer)
        allocator.tick(10)
    allocator.metadata = ""
    allocator.annotate(address, "packed \x1b[2J", layer)
    allocator.free(address, layer, recorded=True)
    allocator.tick(10)
    (report,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    holders, stripes = report.tables[:2]
    assert [dict(zip(holders.columns, row, strict=True))["user_metadata"] for row in holders.rows] == [
        '{"microbatch":0}, {"microbatch":1}, {"microbatch":2}, and 2 others', "",
    ]  # fmt: skip
    last = '{"microbatch":4}; packed \\x1b[2J'
    assert [row[-1] for row in stripes.rows] == [last]
    assert "\x1b" not in str(report)
    (shown,) = shown_by(make_page([report]))
    texts = [None, *shown["texts"]]
    labels = {size: texts[label] for size, label in zip(shown["size"], shown["label"], strict=True)}
    assert labels == {4 * MIB: None, 5 * MIB: last} | {(9 - n) * MIB: f'{{"microbatch":{n}}}' for n in range(4)}


def test_without_metadata_the_tables_have_no_column_for_it(pair):
    tables = [table for report in make_reports(pair) for table in report.tables]
    assert tables
    assert all("user_metadata" not in table.columns for table in tables)


def test_annotations_of_one_block_stay_small(tmp_path):
    allocator = Allocator()
    address = allocator.alloc(MIB, stack((1, "f")))
    for number in range(200):
        allocator.annotate(address, f"{number} {'x' * 50}", stack((2, "g")))
    (trace,) = read_snapshot(write(tmp_path / "x.pickle", allocator.snapshot())).traces
    assert [len(block.label) for block in trace.blocks] == [1000]
    assert trace.blocks[0].label.endswith(f"199 {'x' * 50}")


def test_fragmentation_by_stream_and_segment(tmp_path):
    allocator = Allocator()
    blocks = [allocator.alloc(2 * MIB, stack((1, "f")), stream) for stream in (0, 0x7F00) for _ in range(40)]
    for block in blocks[::2]:
        allocator.free(block, stack((2, "g")))
    (report,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    (table,) = [table for table in report.tables if table.title.startswith("fragmentation")]
    streams = {row[0]: row for row in table.rows if "segment" not in row[0]}
    assert set(streams) == {"default stream", "stream 0x7f00"}
    assert streams["default stream"][1:7] == ("4", "80.0 MiB", "40.0 MiB", "0 B", "40.0 MiB", "2.0 MiB")
    (advice,) = [text for text in report.advice if "in pieces between blocks" in text]
    assert "80.0 MiB of 160.0 MiB reserved are free" in advice
    assert "no free block is larger than 2.0 MiB" in advice


def test_a_snapshot_without_a_history(tmp_path):
    allocator, _ = forum(stripes=False)
    snapshot = {**allocator.snapshot(), "device_traces": []}
    (report,) = make_reports([write(tmp_path / "x.pickle", snapshot)])
    assert "no history" in report.summary[-1]
    assert "record_memory_history" in str(report)
    make_page([report])


def test_a_large_snapshot_takes_seconds_and_shows_progress(tmp_path):
    """No time is asserted here but pytest's own limit. Frames of the pickle begin within its tuples too."""
    path = write(tmp_path / "large.pickle", snapshots.large(12 << 20))
    content = path.read_bytes()
    assert re.search(rb"K.\x95.{6}\x00\x00K.\x86", content, re.DOTALL)
    assert path.stat().st_size > 8 << 20
    lines = []
    (tmp_path / "x.html").write_text(make_page(make_reports([path], lines.append)))
    told = [int(found[1]) for line in lines if (found := re.fullmatch(rf"reading {path}: (\d+) of \d+ MiB", line))]
    assert len(told) > 5
    assert told == sorted(told)
    assert (tmp_path / "x.html").stat().st_size < 8 << 20


# --- several files, and what is printed ---------------------------------------------------------------------------


def test_two_reports_begin_with_their_difference(pair, capsys):
    reports = make_reports(pair)
    assert headline(reports) == "Peak 640.0 MiB -> 256.0 MiB (-60 %); freed but unusable 448.0 MiB -> 0 B (-100 %)"
    assert difference(reports).rows[0] == ("active", "640.0 MiB", "256.0 MiB", "-384.0 MiB", "-60 %")
    assert compared(reports).startswith(headline(reports))
    assert difference(reports[:1]) is None
    assert headline(reports[:1]) == ""
    assert headline([reports[0], reports[0]]) == "No difference in active memory"
    assert main(["report", *map(str, pair)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Peak 640.0 MiB -> 256.0 MiB")
    assert err == ""


def test_the_last_line_tells_what_was_written(pair, tmp_path, capsys):
    page = tmp_path / "x.html"
    assert main(["report", str(pair[0]), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {page}"


def test_a_folder_is_all_that_is_in_it_and_ranks_are_one_report(tmp_path, capsys):
    """Of many ranks the range of each figure, and all of the rank that has the most, once."""
    for rank in range(16):
        allocator = Allocator()
        for _ in range(1 + (rank == 11)):
            allocator.alloc(64 * MIB, stack((21, "layer")))
        write(tmp_path / f"run_rank{rank}.pickle", allocator.snapshot())
    (tmp_path / "notes.txt").write_text("not read")
    (told,) = make_reports([tmp_path])
    assert told.title == f"{tmp_path / 'run.pickle'}, 16 ranks"
    active = next(row for row in told.tables[0].rows if row[0] == "active")
    assert active == ("active", "64.0 MiB", "64.0 MiB", "128.0 MiB", "rank 11")
    assert [one.title.partition(",")[0] for one in told.timelines] == ["run_rank11.pickle", "run_rank7.pickle"]
    assert [table.title for table in told.tables].count("top holders") == 1
    assert main(["report", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 40


def test_lines_that_differ_in_digits_of_their_files_are_one_row(tmp_path):
    allocator = Allocator()
    for number in range(32):
        allocator.alloc(48 * MIB, stack((7, "forward"), program=f"/home/me/layer{number}.py"))
    allocator.alloc(48 * MIB, stack((8, "forward"), program="/home/me/layer3.py"))
    (told,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    rows = [(row[0], row[-1]) for row in told.tables[0].rows]
    assert rows == [
        ("1536.0 MiB", "/home/me/layer*.py:7 in forward (32 files)"), ("48.0 MiB", "/home/me/layer3.py:8 in forward"),
    ]  # fmt: skip


def test_numbers_are_flush_right(pair):
    text = str(make_reports(pair)[0].tables[0])
    head, _, *rows = (line for line in text.splitlines()[1:])
    end = head.index("allocations") + len("allocations")
    assert rows
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows)


def test_progress_is_written_over_on_a_terminal(pair, tmp_path):
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "safecomm", "report", pair[0].name]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, cwd=tmp_path, timeout=100, check=True)
    os.close(theirs)
    written = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "reading" in written
    assert "\n" not in written
    assert written.endswith("\r\x1b[K")


# --- nothing is executed, and bad input ------------------------------------------------------------------------------


class Call:
    """What pickles into a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def opcodes(text):
    return b"\x80\x04" + text


MALICIOUS = {
    "reduce": lambda mark: pickle.dumps(Call(os.system, f"touch {mark}")),
    "exec": lambda mark: pickle.dumps(Call(exec, f"open({str(mark)!r}, 'w').close()")),
    "inside": lambda mark: pickle.dumps({"segments": [Call(os.system, f"touch {mark}")], "device_traces": []}),
    "global": lambda mark: opcodes(b"cos\nsystem\n(V" + f"touch {mark}".encode() + b"\ntR."),
    "inst": lambda mark: opcodes(b"(V" + f"touch {mark}".encode() + b"\nios\nsystem\n."),
    "obj": lambda mark: opcodes(b"(cos\nsystem\nV" + f"touch {mark}".encode() + b"\no."),
    "class": lambda mark: pickle.dumps(Path),
    "builtin": lambda mark: pickle.dumps(Call(getattr, "", "join")),
    "extension": lambda mark: opcodes(b"\x82\x01."),
    "persistent": lambda mark: opcodes(b"Pname\n."),
    "buffer": lambda mark: b"\x80\x05\x97.",
    "torch": lambda mark: pickle.dumps(__import__("torch").ones(1)),
    "build": lambda mark: opcodes(b"}}(V__class__\nVx\nub."),
    "bomb": lambda mark: b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_a_malicious_pickle_runs_nothing(kind, tmp_path, capsys):
    mark, path = tmp_path / "executed", tmp_path / "evil.pickle"
    path.write_bytes(MALICIOUS[kind](mark))
    assert main(["report", str(path)]) == 2
    assert not mark.exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "evil.pickle" in err


def crossing(size, hidden):
    """Return a pickle with an argument that crosses the end of a frame of ``size``: C's reader drops its beginning.

    What is read then are not the opcodes that stand there: ``hidden`` is no text any more.
    """
    hidden = b"\0\0" + hidden
    body = b"](" + b"K\1" * ((size - 6) // 2) + b"eX" + len(hidden).to_bytes(4, "little")[:2]
    return b"\x80\4\x95" + len(body).to_bytes(8, "little") + body + b"\0\0" + hidden + b"."


@pytest.mark.parametrize("size", [200, 70_000, 1_048_570, 1_100_000, 3_000_000])
def test_a_frame_hides_nothing(size, tmp_path, capsys):
    """A tuple doubled sixty times would never end as a key of a dictionary."""
    doubled = b"00}K\1\x85" + b"\x942\x86" * 60 + b"K\1s."
    path = tmp_path / "hidden.pickle"
    path.write_bytes(crossing(size, doubled))
    assert main(["report", str(path)]) == 2
    assert "not a memory snapshot" in capsys.readouterr().err


def something(chance, depth=0):
    kind = chance.random()
    if depth > 4 or kind < 0.35:
        text = "x" * chance.choice((0, 3, 255, 256, 1000, 70_000 if chance.random() < 0.004 else 9))
        return chance.choice((chance.randrange(-5, 300), chance.randrange(1 << 62), None, True, chance.random(), text))
    if kind < 0.6:
        return [something(chance, depth + 1) for _ in range(chance.randrange(8))]
    if kind < 0.8:
        return {f"key{number}": something(chance, depth + 1) for number in range(chance.randrange(6))}
    return tuple(chance.randrange(70_000) for _ in range(chance.randrange(4)))


def test_what_pickle_writes_is_read_as_pickle_reads_it():
    """Whatever the protocol, and wherever a frame begins."""
    for seed in range(40):
        chance = random.Random(seed)
        content = [something(chance) for _ in range(chance.choice((3, 50, 2000)))]
        for protocol in (2, 3, 4, 5):
            data = snapshot_module._without_frames(pickle.dumps(content, protocol))
            snapshot_module._look_through(data)
            with snapshot_module._Progress(data, lambda done, size: None) as file:
                assert snapshot_module._Unpickler(file).load() == content


def test_a_text_between_two_frames_is_read(tmp_path):
    """Pickle writes one of more than 64 KiB outside of its frames."""
    allocator = Allocator()
    allocator.metadata = "x" * 100_000
    allocator.alloc(MIB, stack((1, "f")))
    path = write(tmp_path / "x.pickle", allocator.snapshot())
    assert path.read_bytes().count(b"\x95") > 1
    assert read_snapshot(path).traces[0].blocks[0].label.endswith("xxx")


def test_the_malicious_pickles_are_such(tmp_path):
    """They do run under pickle itself, so that the test above tells something."""
    for kind in ("reduce", "exec", "inside", "global", "inst", "obj"):
        mark = tmp_path / kind
        pickle.loads(MALICIOUS[kind](mark))
        assert mark.exists()


def test_a_truncated_snapshot_is_said_to_be_one(tmp_path, capsys):
    whole = pickle.dumps(forum(stripes=True)[0].snapshot())
    path = tmp_path / "cut.pickle"
    for length in (2, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert main(["report", str(path)]) == 2
        assert "ends too early" in capsys.readouterr().err


def mutations(whole, seed):
    chance = random.Random(seed)
    damaged = bytearray(whole)
    for _ in range(chance.randrange(1, 6)):
        damaged[chance.randrange(2, len(damaged))] = chance.randrange(256)
    return bytes(damaged)


def test_a_damaged_snapshot_is_an_error_or_a_report_and_nothing_else(tmp_path):
    small = Allocator()
    small.free(small.alloc(MIB, stack((1, "f"))), stack((2, "g")), recorded=True)
    whole = pickle.dumps(small.snapshot())
    path = tmp_path / "damaged.pickle"
    refused = 0
    for seed in range(400):
        path.write_bytes(mutations(whole, seed))
        try:
            str(make_reports([path])[0])
        except ValueError:
            refused += 1
    assert 0 < refused < 400


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"segments": 5},
        {"segments": [{}]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "x", "stream": 0, "time_us": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -1, "stream": 0, "time_us": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": [], "size": 1, "stream": 0, "time_us": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "user_metadata": [1]}]]},
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, content, capsys):
    path = write(tmp_path / "other.pickle", content)
    assert main(["report", str(path)]) == 2
    assert "not a memory snapshot of torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b"PK\x03\x04zip", "with zip"), (b"{}\n", "line 1"), (b"hello", "neither")]
)
def test_a_foreign_file_is_refused(tmp_path, content, said, capsys):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    assert said in capsys.readouterr().err


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("snapshot.pickle", data)
    return file.getvalue()


def saved(data):
    file = io.BytesIO()
    torch.save(pickle.loads(data), file)
    return file.getvalue()


PACKED = {
    "gzip": gzip.compress,
    "zip": zipped,
    "zip, as what torch.save() writes": saved,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: b"\x28\xb5\x2f\xfd" + data,
    "lz4": lambda data: b"\x04\x22\x4d\x18" + data,
}


@pytest.mark.parametrize("name", [".pickle", ".gz", ""])
@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_file_is_said_to_be_one(kind, name, tmp_path, capsys):
    """Whatever its name says."""
    for number, data in enumerate((pickle.dumps(forum(stripes=True)[0].snapshot()), pickle.dumps([]))):
        path = tmp_path / f"{number}{name}"
        path.write_bytes(PACKED[kind](data))
        assert main(["report", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"python -m safecomm report: {path} is packed with {kind}")
        assert len(err.splitlines()) == 1


def test_a_snapshot_of_torch_2_0_is_read(tmp_path):
    """It has no times, other names, and the stacks of its blocks elsewhere."""
    allocator = Allocator()
    blocks = [allocator.alloc(size * MIB, stack((1, "f"))) for size in (2, 3, 4)]
    allocator.free(blocks[0], stack((2, "g")), recorded=True)
    found = allocator.snapshot()
    cut = next(place for place, one in enumerate(allocator.trace) if one["addr"] == blocks[2])
    trace = [
        {key: one[key] for key in ("action", "addr", "size", "stream", "frames")}
        for one in allocator.trace[cut:]
    ]  # fmt: skip
    for segment in found["segments"]:
        for name in ("segment_pool_id", "is_expandable", "frames", "requested_size"):
            del segment[name]
        for block in segment["blocks"]:
            history = {"addr": block.pop("address"), "frames": block.pop("frames"), "real_size": block["size"]}
            block["history"] = [history]
            if block["state"] == "active_awaiting_free":
                block["state"] = "active_pending_free"
    (report,) = make_reports([write(tmp_path / "x.pickle", {"segments": found["segments"], "device_traces": [trace]})])
    assert report.figures["active"] == 9 * MIB
    assert report.figures["freed but unusable"] == 2 * MIB
    assert [row[-1] for row in report.tables[0].rows] == ["before the recording began", "/home/me/train.py:1 in f"]


WITHOUT_TORCH = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
"""


def test_files_are_read_without_torch(pair, tmp_path):
    """And so without the seconds that its import takes: by the command, and by the module."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "sitecustomize.py").write_text(WITHOUT_TORCH)
    recording(tmp_path / "run.rank0.jsonl", 0, 1, left=[LEFT], unusable=300 * MIB)
    files = [*map(str, pair), str(tmp_path / "run.jsonl")]
    path = [str(tmp_path / "gone"), str(Path(safecomm.__file__).parents[1])]
    shell = "import sys, safecomm_shell; sys.exit(safecomm_shell.main())"
    texts = []
    for number, way in enumerate((["-m", "safecomm"], ["-X", "utf8", "-m", "safecomm"], ["-c", shell])):
        for here in (path, path[1:]):
            page = tmp_path / f"{number}{len(here)}.html"
            done = subprocess.run(
                [sys.executable, *way, "report", *files, "--html", page],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(here)}, capture_output=True, text=True, timeout=100,
                check=True,
            )  # fmt: skip
            assert done.stderr == ""
            texts.append((done.stdout.rpartition("wrote")[0], page.read_text()))
    assert len(set(texts)) == 1
    done = subprocess.run(
        [sys.executable, "-m", "safecomm", "doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr


def test_what_can_not_be_read_or_written(tmp_path, pair, capsys):
    (tmp_path / "empty").mkdir()
    for arguments, said in [
        (["report", str(tmp_path / "nowhere.pickle")], "no such file"),
        (["report", str(tmp_path / "no" / "where.pickle")], "no such file"),
        (["report", str(tmp_path / "empty")], "no recording or snapshot is in it"),
        (["report", str(pair[0]), "--html", str(tmp_path / "no" / "x.html")], "--html"),
        (["report", str(pair[0]), "--png", str(tmp_path / "no" / "x.png")], "--png"),
    ]:
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe\x9b31m\nadvice\u2028"


def harmless(text):
    return all(one == "\n" or one.isprintable() for one in text)


def test_nothing_in_a_file_steers_the_terminal(tmp_path, capsys):
    """Neither its words nor its name, in the report and in what there is to say against it."""
    snapshot = Allocator()
    snapshot.free(snapshot.alloc(2 * MIB, stack((1, ESCAPES), program=ESCAPES)), stack((2, ESCAPES)), recorded=True)
    evil = write(tmp_path / f"{ESCAPES}.pickle", snapshot.snapshot())
    lines = [json.loads(line) for line in recording(tmp_path / "x.jsonl", 0, 1, left=[LEFT]).read_text().splitlines()]
    lines[1].update(op=ESCAPES, at=ESCAPES, group=ESCAPES)
    lines[-1]["left"][0].update(op=ESCAPES, at=ESCAPES)
    evil_recording = tmp_path / f"{ESCAPES}.jsonl"
    evil_recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, plot = tmp_path / "x.html", tmp_path / "x.png"
    assert main(["report", str(evil), str(evil_recording), "--html", str(page), "--png", str(plot)]) == 0
    out, err = capsys.readouterr()
    assert harmless(out)
    assert harmless(err)
    assert out.count("\\x1b[2J") > 4
    assert harmless(page.read_text())
    evil.write_bytes(b"\x80nothing")
    assert main(["report", str(evil)]) == 2
    err = capsys.readouterr().err
    assert harmless(err)
    assert len(err.splitlines()) == 1


def test_names_that_are_no_text_can_be_printed_and_drawn(tmp_path, capsysbinary):
    path = recording(tmp_path / os.fsdecode(b"$\xff$\frac"), 0, 1)
    page, plot = tmp_path / "x.html", tmp_path / "x.png"
    assert main(["report", str(path), "--html", str(page), "--png", str(plot)]) == 0
    assert b"$\\udcff$\\x0crac" in capsysbinary.readouterr().out


def test_a_reader_that_goes_away_ends_it_quietly_and_the_page_is_there(pair, tmp_path):
    for streams in ({"stdout": "x"}, {"stdout": "x", "stderr": "x"}):
        here, there = os.pipe()
        os.close(here)
        page = tmp_path / f"{len(streams)}.html"
        command = [sys.executable, "-m", "safecomm", "report", str(pair[0]), "--html", str(page)]
        with open(tmp_path / "err", "w+") as err:
            to = {"stdout": there, "stderr": err} | dict.fromkeys(streams, there)
            done = subprocess.run(command, timeout=100, check=False, **to)
            assert done.returncode == 0
            assert "Error" not in Path(err.name).read_text()
        os.close(there)
        assert page.read_text().endswith("</html>\n")


def test_what_is_no_ordinary_file_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["report", str(tmp_path / "pipe")]) == 2
    assert "not an ordinary file" in capsys.readouterr().err
    assert main(["report", str(tmp_path / ("x" * 300))]) == 2
    assert "no such file" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(pair[0]), "--png", str(tmp_path / "x.png")]) == 2
    assert "pip install 'safecomm[plot]'" in capsys.readouterr().err


# --- recordings ---------------------------------------------------------------------------------------------------


def recording(path, rank, world, *, left=(), unusable=0):
    """Write a recording such as a rank makes."""
    at = "/home/me/train.py:21 in layer"
    lines = [
        {
            "safecomm_record": 1,
            "rank": rank,
            "world": world,
            "started": 1.7e9,
            "interval": 0.1,
            "pid": 7,
            "versions": {},
        },
        {"site": 0, "op": "all_reduce", "group": "0", "at": at},
    ]
    for number in range(20):
        site = [[0, 64 * MIB * (number % 2), 128 * MIB, 1, number, 64 * MIB * number, 0.004]] if number % 3 else []
        allocator = {
            "active": 900 * MIB,
            "allocated": 900 * MIB - unusable,
            "reserved": 1000 * MIB,
            "unusable": unusable,
        }
        held = 64 * MIB * (number % 2)
        lines.append({"t": number / 10, "held": held, "peak": 128 * MIB, "sites": site, **allocator})
    lines.append({"end": 2.0, "left": [{**one, "at": at} for one in left]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LEFT = {"op": "all_reduce", "group": "0", "state": "in flight", "nbytes": 4 * MIB, "seconds": 1.5}


def test_the_band_of_a_call_site_tells_its_peaks_and_what_is_held_between_them(tmp_path):
    path = tmp_path / "run.rank0.jsonl"
    head = {"safecomm_record": 1, "started": 1, "rank": 0, "world": 1}
    times = [{"t": number, "held": 0, "peak": 9, "sites": []} for number in range(6)]
    times[1]["sites"] = [[0, 3, 9, 1, 1, 9, 0.5]]
    times[4]["sites"] = [[0, 0, 3, 1, 1, 9, 0.5]]
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *times]))
    (report,) = make_reports([path])
    assert list(report.timelines[0].bands.values()) == [[(0, 9), (1, 3), (3, 3), (4, 0)]]


def test_a_recording_names_what_holds_and_what_was_never_waited_for(tmp_path):
    left = [
        {"op": "all_reduce", "group": "0", "state": "in flight", "nbytes": 4 * MIB, "seconds": 1.5 + number}
        for number in range(3)
    ]
    path = recording(tmp_path / "run.rank0.jsonl", 0, 2, left=left, unusable=300 * MIB)
    (report,) = make_reports([path])
    (table,) = report.tables
    assert table.rows[0][0] == "all_reduce"
    assert table.rows[0][1] == "128.0 MiB"
    assert table.rows[0][-1] == "/home/me/train.py:21 in layer"
    assert "300.0 MiB at the most: record_stream was called for them" in report.advice[0]
    assert "At most 300.0 MiB of the peak of 900.0 MiB can be gained" in report.advice[0]
    assert (
        "3 all_reduce launched at /home/me/train.py:21 in layer were never waited for: at the end 12.0 MiB"
        in report.advice[1]
    )
    assert "the first for 3.5 s" in report.advice[1]
    assert set(report.timelines[0].lines) == {"active", "reserved", "unusable"}
    assert list(report.timelines[0].bands) == ["all_reduce at /home/me/train.py:21 in layer"]


@pytest.mark.parametrize(
    ("samples", "told", "worth"),
    [
        ([(900, 0), (500, 200)], "active 900.0 MiB: no gain", False),
        ([(900, 5), (895, 0)], "active 895.0 MiB: at most 5.0 MiB to gain", False),
        ([(900, 300), (700, 0)], "active 700.0 MiB: at most 200.0 MiB to gain", True),
    ],
)
def test_a_recording_promises_no_more_than_its_samples_have(samples, told, worth, tmp_path):
    lines = [{"safecomm_record": 1, "started": 1, "rank": 0, "world": 1}]
    for number, (active, unusable) in enumerate(samples):
        figures = {"active": active * MIB, "unusable": unusable * MIB}
        lines.append({"t": number, "held": 0, "peak": 0, "sites": [], **figures})
    path = tmp_path / "run.rank0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (report,) = make_reports([path])
    assert report.summary[-1] == f"with every block usable as soon as it was freed, {told}"
    assert len(report.advice) == worth
    for text in report.advice:
        assert "only a run with it tells" in text
        assert "the peak can rise" in text


def test_advice_of_ranks_is_that_of_the_rank_with_the_most_of_it(tmp_path):
    for rank, (unusable, left) in enumerate(((100, 1), (300, 1), (0, 1))):
        ones = [{**LEFT, "nbytes": (rank + left) * 200 * MIB}]
        recording(tmp_path / f"run.rank{rank}.jsonl", rank, 3, left=ones, unusable=unusable * MIB)
    (report,) = make_reports([tmp_path / "run.jsonl"])
    never, freed = report.advice
    assert "600.0 MiB were still held" in never
    assert never.endswith("(Rank 2; 2 other ranks: the like.)")
    assert "At most 300.0 MiB" in freed
    assert freed.endswith("(Rank 1; 1 other ranks: the like.)")


def test_all_ranks_of_a_run_or_one(tmp_path, capsys):
    for rank in (0, 1, 3):
        recording(tmp_path / f"run.rank{rank}.jsonl", rank, 4)
    assert main(["report", str(tmp_path / "run.jsonl")]) == 2
    assert "of 4 ranks, 1 are missing (2)" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run.rank0.jsonl"), str(tmp_path / "run.rank1.jsonl")]) == 2
    assert "2 are missing (2, 3)" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run.rank1.jsonl")]) == 0
    recording(tmp_path / "run.rank2.jsonl", 2, 4)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run.jsonl"), "--html", str(tmp_path / "x.html")]) == 0
    out = capsys.readouterr().out
    assert "run.jsonl, 4 ranks" in out
    assert out.count("held by collectives, by call site") == 1


def test_a_real_recording_can_be_reported(tmp_path):
    import safecomm

    with safecomm.record_memory(tmp_path / "run.jsonl") as made:
        pass
    (report,) = make_reports([made.path])
    assert "collectives held 0 B at the most" in report.summary[0]
    make_page([report])


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root can write to")
def test_a_page_that_can_not_be_written_is_one_line_and_status_2(capsys):
    assert main(["report", str(RECORDED / "stock.pickle"), "--html", "/proc/page.html"]) == 2
    assert capsys.readouterr().err.startswith("python -m safecomm report: --html: /proc/page.html can't be written: ")


# --- snapshots of a real run ----------------------------------------------------------------------------------------


def test_in_a_real_run_the_stripes_are_found_with_the_allocators_bytes_and_the_right_line():
    figures = json.loads((RECORDED / "figures.json").read_text())
    assert sum(path.stat().st_size for path in RECORDED.iterdir()) < 2 * MIB
    for name in ("stock", "safecomm"):
        (trace,) = read_snapshot(RECORDED / f"{name}.pickle").traces
        active = [one + two for one, two in zip(trace.allocated, trace.unusable, strict=True)]
        assert max(active) == pytest.approx(figures[name]["active_peak"], rel=0.01)
        assert active[-1] == pytest.approx(figures[name]["active"], rel=0.01)
        assert trace.unusable[-1] == pytest.approx(figures[name]["active"] - figures[name]["allocated"], rel=0.01)
    stock, ours = make_reports([RECORDED / "stock.pickle", RECORDED / "safecomm.pickle"])
    assert f"allocated at {figures['line']}" in stock.advice[0]
    gain = int(re.search(r"At most (\d+)\.0 MiB", stock.advice[0])[1]) * MIB
    gained = figures["stock"]["active_peak"] - figures["safecomm"]["active_peak"]
    assert 0.9 * gain < gained <= gain  # what was foretold as a bound, and what it was
    assert not [text for text in ours.advice if "unusable" in text]
