"""Every figure of a report of snapshots, against a count that replays each entry and adds up all blocks after it.

The histories are made by hand, in the format of ``torch.cuda.memory._snapshot()``, with what makes a count go wrong:
pauses within a free, entries of one microsecond, a beginning or an end that is missing, several devices.
"""

from __future__ import annotations

import re

import pytest
from snapshots import MIB, Allocator, frame, stack, write

from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.page import make_page
from safecomm.diagnostics.report import SHARE, WORTH
from safecomm.diagnostics.snapshot import NO_STACK, UNKNOWN
from safecomm.diagnostics.units import mib, span

A, B, C, GONE = stack((1, "a")), stack((2, "b")), stack((3, "c")), stack((9, "gone"))


def layer(number):
    return stack((40, "forward"), program=f"/home/me/layer{number}.py")


# --- the histories ----------------------------------------------------------------------------------------------------


def one_block_that_stays(at):
    at.alloc(3 * MIB, A)


def frees_at_once(at):
    for _ in range(4):
        block = at.alloc(3 * MIB, A)
        at.tick(50)
        at.free(block, GONE)
        at.tick(5)


def a_pause_within_a_free(at, pause=262):
    block = at.alloc(32 * MIB, A)
    at.tick(1000)
    at.free(block, GONE, recorded=True)
    at.tick(pause)
    at.complete(block, GONE)
    at.tick(10)
    at.alloc(40 * MIB, B)


def a_pause_of_a_second_within_a_free(at):
    a_pause_within_a_free(at, 10**6)


def a_block_that_others_are_kept_from(at):
    block = at.alloc(32 * MIB, A)
    at.free(block, GONE, recorded=True)
    at.tick(30)
    at.alloc(40 * MIB, B)
    at.tick(30)
    at.complete(block, B)


def what_waits_at_another_time_than_the_peak(at):
    big = at.alloc(500 * MIB, A)
    at.tick(10)
    at.free(big, GONE)
    for _ in range(3):
        waits = at.alloc(7 * MIB, B)
        at.free(waits, GONE, recorded=True)
        at.tick(10)
        at.free(at.alloc(MIB, C), GONE)
        at.complete(waits, C)


def a_gain_below_what_two_runs_differ_by(at):
    at.alloc(500 * MIB, A)
    waits = at.alloc(4 * MIB, B)
    at.free(waits, GONE, recorded=True)
    at.tick(10)
    at.alloc(4 * MIB, C)
    at.complete(waits, C)


def what_waits_to_the_end(at):
    for number in range(5):
        at.free(at.alloc((1 + number) * 4 * MIB, A), GONE, recorded=True)
        at.tick(20)


def a_beginning_that_is_missing(at):
    kept, gone, waits = (at.alloc(size * MIB, A) for size in (5, 6, 7))
    at.free(waits, GONE, recorded=True)
    at.tick(10)
    at.cut = len(at.trace)
    at.free(at.alloc(2 * MIB, B), GONE)
    at.tick(10)
    at.complete(waits, B)
    at.free(gone, GONE)
    at.alloc(MIB, C)
    return kept


def entries_of_one_microsecond(at):
    before = at.alloc(30 * MIB, A)
    for number in range(6):
        after = at.alloc(30 * MIB, A if number % 2 else B)
        at.free(before, GONE)
        before = after


def times_that_go_back(at):
    before = at.alloc(8 * MIB, A)
    for _ in range(5):
        after = at.alloc(8 * MIB, A)
        at.tick(-3)
        at.free(before, GONE, recorded=True)
        at.alloc(MIB, B)
        at.complete(before, B)
        before = after


def layers_one_after_the_other(at):
    for number in range(18):
        waits = at.alloc(7 * MIB, layer(number))
        at.free(waits, stack((7, "free"), program=f"/home/me/layer{number}.py"), recorded=True)
        at.tick(10)
        at.free(at.alloc(MIB, C), GONE)
        at.complete(waits, C)


def layers_at_a_time(at):
    for number in range(18):
        at.alloc((1 + number % 3) * MIB, layer(number))
        at.tick(1)


def two_streams(at):
    for stream in (0, 0x7F00, 0x7F00):
        at.free(at.alloc(3 * MIB, A, stream), GONE)
        at.alloc(12 * MIB, B, stream)


def segments_that_grow(at):
    first = at.alloc(4 * MIB, A)
    for entry in at.trace:
        if entry["action"] == "segment_alloc":
            entry["action"] = "segment_map"
    at.tick(10)
    at.free(first, GONE)
    at._note("segment_map", 0x7E0000000000, 2 * MIB, 0, B)
    at.tick(10)
    at._note("segment_unmap", 0x7E0000000000, 2 * MIB, 0, B)


def other_entries_within_a_free(at):
    for action in ("snapshot", "oom", "workspace_snapshot"):
        block = at.alloc(4 * MIB, A)
        at.free(block, GONE, recorded=True)
        at.tick(40)
        at._note(action, 0, 0, 0, [])
        at.complete(block, B)


def sizes_that_are_rounded(at):
    blocks = [at.alloc(size, A) for size in (1, 511, 513, MIB + 1)]
    at.tick(5)
    for block in blocks[::2]:
        at.free(block, GONE)


def frees_in_another_order(at):
    blocks = [at.alloc((1 + number) * MIB, A if number % 2 else B) for number in range(8)]
    for block in blocks:
        at.free(block, GONE, recorded=True)
        at.tick(7)
    for block in reversed(blocks):
        at.complete(block, C)
        at.alloc(MIB // 2, C)
        at.tick(7)


def a_history_without_an_end_of_a_block(at):
    lost = at.alloc(6 * MIB, A)
    at.tick(10)
    at.free(lost, GONE)
    del at.trace[-2:]  # as where recording was off for a while
    at.alloc(6 * MIB, B)
    at.tick(10)


def lines_without_a_stack(at):
    at.alloc(2 * MIB, [])
    at.free(at.alloc(3 * MIB, []), [])
    at.tick(9)


HISTORIES = [
    one_block_that_stays,
    frees_at_once,
    a_pause_within_a_free,
    a_pause_of_a_second_within_a_free,
    a_block_that_others_are_kept_from,
    what_waits_at_another_time_than_the_peak,
    a_gain_below_what_two_runs_differ_by,
    what_waits_to_the_end,
    a_beginning_that_is_missing,
    entries_of_one_microsecond,
    times_that_go_back,
    layers_one_after_the_other,
    layers_at_a_time,
    two_streams,
    segments_that_grow,
    other_entries_within_a_free,
    sizes_that_are_rounded,
    frees_in_another_order,
    a_history_without_an_end_of_a_block,
    lines_without_a_stack,
]


def snapshot_of(history):
    allocator = Allocator()
    allocator.cut = 0
    history(allocator)
    found = allocator.snapshot()
    found["device_traces"] = [allocator.trace[allocator.cut :], []]
    return found


def no_times(found):
    for entry in found["device_traces"][0]:
        del entry["time_us"]  # torch 2.0


def third_device(found):
    found["device_traces"] = [[], [], [], found["device_traces"][0]]
    for segment in found["segments"]:
        segment["device"] = 3


# --- the count --------------------------------------------------------------------------------------------------------


class Counted:
    """What a snapshot of one device says, counted from nothing but its entries and segments."""

    def __init__(self, found, device=0):
        entries = found["device_traces"][device]
        self.blocks = []  # [size, line that made it, line that freed it, made, requested, completed], by entries
        first = entries[0].get("time_us", 0) if entries else 0
        self.times = [0.0]
        for number, entry in enumerate(entries):
            self.times.append(max(self.times[-1], (entry.get("time_us", number) - first) / 1e6))
        now = {}
        for number, entry in enumerate(entries, 1):
            action, address, size = entry["action"], entry["addr"], -(-entry["size"] // 512) * 512
            if action == "alloc":
                if address in now:
                    lost = now.pop(address)
                    lost[4:] = lost[4] or number, number
                now[address] = [size, self.line(entry["frames"]), None, number, None, None]
                self.blocks.append(now[address])
            elif action in ("free_requested", "free_completed"):
                if address not in now:
                    now[address] = [size, UNKNOWN, None, 0, 0 if action == "free_completed" else None, None]
                    now[address][2] = UNKNOWN
                    self.blocks.append(now[address])
                if action == "free_requested":
                    now[address][2], now[address][4] = self.line(entry["frames"]), number
                else:
                    block = now.pop(address)
                    before = entries[number - 2] if number > 1 else {}
                    at_once = (before.get("action"), before.get("addr")) == ("free_requested", address)
                    block[5] = block[4] if at_once else number
        for segment in found["segments"]:
            place = segment["address"]
            for part in segment["blocks"]:
                if segment["device"] == device and part["state"] != "inactive" and place not in now:
                    waits = 0 if part["state"] == "active_awaiting_free" else None
                    self.blocks.append([part["size"], self.line(part["frames"]), UNKNOWN, 0, waits, None])
                place += part["size"]
        self.segments = [one for one in found["segments"] if one["device"] == device]
        self.instants = range(len(entries) + 1)
        grown = [0]
        for entry in entries:
            sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
            grown.append(grown[-1] + sign.get(entry["action"], 0) * entry["size"])
        end = sum(one["total_size"] for one in self.segments)
        self.reserved = max(end - grown[-1] + one for one in grown)

    @staticmethod
    def line(frames):
        own = [one for one in frames if "/torch/" not in one["filename"] and one["filename"] != "??"]
        return f"{own[0]['filename']}:{own[0]['line']} in {own[0]['name']}" if own else NO_STACK

    def bytes_at(self, instant, blocks, start, end=5):
        """Return the bytes of ``blocks`` that are between two of their entries after an entry of the history."""
        return sum(
            one[0]
            for one in blocks
            if one[start] is not None and one[start] <= instant and (one[end] is None or instant < one[end])
        )

    def most(self, start, end=5, blocks=None):
        return max(self.bytes_at(one, self.blocks if blocks is None else blocks, start, end) for one in self.instants)

    def seconds(self, one, start):
        return (self.times[-1] if one[5] is None else self.times[one[5]]) - self.times[one[start]]

    def rows(self, start):
        """Return the rows of a table: of what was allocated (``start`` 3), or freed but unusable (4)."""
        groups = {}
        for one in self.blocks:
            if one[start] is not None and one[start] != one[5]:
                lines = one[1:2] if start == 3 else one[1:3]
                groups.setdefault(tuple(re.sub(r"layer\d+", "layer*", line) for line in lines), []).append(one)
        rows = []
        for key, blocks in groups.items():
            names = [len({one[1 + place] for one in blocks}) for place in range(len(key))]
            sites = [
                text + f" ({count} files)" if count > 1 else blocks[0][1 + place]
                for place, (text, count) in enumerate(zip(key, names, strict=True))
            ]
            longest = span(max(self.seconds(one, start) for one in blocks))
            mean = sum(self.seconds(one, start) * one[0] for one in blocks) / max(self.times[-1], 1e-9)
            most = mib(self.most(start, blocks=blocks))
            if start == 3:
                rows.append((most, str(len(blocks)), mib(sum(one[0] for one in blocks)), longest, *sites))
            else:
                rows.append((most, mib(mean), str(len(blocks)), longest, *sites))
        return sorted(rows)


def check(report, counted, device=0):
    peak, unusable, needed = counted.most(3), counted.most(4), counted.most(3, 4)
    assert report.figures == {"active": peak, "freed but unusable": unusable, "reserved": counted.reserved}
    assert report.summary[0] == (
        f"device {device}: {len(counted.blocks)} allocations in {counted.times[-1]:.3f} s; active {mib(peak)} at the "
        f"most, freed but unusable {mib(unusable)}, reserved {mib(counted.reserved)}"
    )
    gain = peak - needed
    told = f"at most {mib(gain)} to gain" if gain else "no gain"
    expected = [f"with every block usable as soon as it was freed, active {mib(needed)}: {told}"] if unusable else []
    assert report.summary[1:] == expected
    worth = [text for text in report.advice if "record_stream" in text]
    assert len(worth) == (gain >= max(WORTH, peak // SHARE))
    for text in worth:
        assert f"{mib(unusable)} at the most" in text
        assert f"At most {mib(gain)} of the peak of {mib(peak)} can be gained" in text
        waits = [one for one in counted.blocks if one[4] is not None and one[4] != one[5]]
        assert text.startswith(f"{len(waits)} blocks were freed but unusable")
        ends = sum(one[5] is None for one in waits)
        assert (f"{ends} of them were still waiting at the end" in text) == (ends > 0)
    holders, stripes, fragmentation = report.tables
    assert sorted(holders.rows) == counted.rows(3)
    assert sorted(stripes.rows) == counted.rows(4)
    by_stream = {}
    for one in counted.segments:
        by_stream.setdefault(one["stream"], []).append(one)
    for stream, ones in by_stream.items():
        parts = [part for one in ones for part in one["blocks"]]
        free = [part["size"] for part in parts if part["state"] == "inactive"]
        size = sum(one["total_size"] for one in ones)
        waits = sum(part["size"] for part in parts if part["state"] == "active_awaiting_free")
        figures = (size, size - sum(free), waits, sum(free), max(free, default=0))
        row = (str(len(ones)), *map(mib, figures), str(len(parts)), f"{100 * sum(free) / size:.0f} %")
        assert (f"stream {stream:#x}" if stream else "default stream", *row) in fragmentation.rows
    (timeline,) = report.timelines
    assert timeline.holders == {
        site: counted.most(3, blocks=[one for one in counted.blocks if one[1] == site])
        for site in {one[1] for one in counted.blocks}
    }
    assert max(value for _, value in timeline.lines["active"]) == peak
    assert max(value for _, value in timeline.lines["unusable"]) == unusable
    assert f"at the most active {mib(peak)}, freed but unusable {mib(unusable)}" in timeline.caption
    page = make_page([report])
    assert f"with every block usable as soon as it was freed, active {mib(needed)}" in page or not unusable


@pytest.mark.parametrize("change", [None, no_times, third_device], ids=["as it is", "no times", "third device"])
@pytest.mark.parametrize("history", HISTORIES, ids=lambda one: one.__name__)
def test_every_figure_is_that_of_a_count_of_each_entry(history, change, tmp_path):
    found = snapshot_of(history)
    if change is not None:
        change(found)
    device = 3 if change is third_device else 0
    counted = Counted(found, device)
    (report,) = make_reports([write(tmp_path / "x.pickle", found)])
    check(report, counted, device)


def test_the_histories_are_such():
    """They have what they are to have, so that the test above tells something."""
    by_name = {one.__name__: Counted(snapshot_of(one)) for one in HISTORIES}
    gains = {name: one.most(3) - one.most(3, 4) for name, one in by_name.items()}
    assert len(HISTORIES) >= 20
    assert by_name["a_pause_within_a_free"].most(4) == by_name["a_pause_of_a_second_within_a_free"].most(4) == 0
    assert gains["a_block_that_others_are_kept_from"] == 32 * MIB
    assert by_name["what_waits_at_another_time_than_the_peak"].most(4) == 7 * MIB
    assert gains["what_waits_at_another_time_than_the_peak"] == 0
    assert gains["a_gain_below_what_two_runs_differ_by"] == 4 * MIB
    assert by_name["entries_of_one_microsecond"].most(3) == 60 * MIB
    assert by_name["layers_one_after_the_other"].rows(4)[0][0] == "7.0 MiB"
    assert by_name["layers_at_a_time"].rows(3)[0][0] == "36.0 MiB"


def test_devices_are_told_apart(tmp_path):
    """Their segments, their figures and their advice, the most bytes first."""
    small, large = snapshot_of(a_block_that_others_are_kept_from), snapshot_of(what_waits_to_the_end)
    for segment in large["segments"]:
        segment["device"] = 5
    both = {
        **small,
        "segments": small["segments"] + large["segments"],
        "device_traces": [small["device_traces"][0], *[[]] * 4, large["device_traces"][0]],
    }
    (report,) = make_reports([write(tmp_path / "x.pickle", both)])
    assert [line.partition(":")[0] for line in report.summary] == ["device 0"] * 2 + ["device 5"] * 2
    frag = [table for table in report.tables if table.title.startswith("fragmentation")]
    assert [table.title.rpartition(", ")[2] for table in frag] == ["device 0", "device 5"]
    for table, one in zip(frag, (small, large), strict=True):
        assert table.rows[0][1] == str(len(one["segments"]))
    gains = [Counted(one).most(3) - Counted(one).most(3, 4) for one in (small, {**large, "segments": []})]
    assert gains == [32 * MIB, 40 * MIB]
    told = [text for text in report.advice if "record_stream" in text]
    assert [text.partition(":")[0] for text in told] == ["device 5", "device 0"]


# --- stacks -----------------------------------------------------------------------------------------------------------

UNWINDER = [
    frame("??", 0, "torch::unwind::unwind()"),
    frame("/pytorch/torch/csrc/profiler/combined_traceback.cpp", 12, "torch::CapturedTraceback::gather(bool, bool)"),
    frame("??", 0, "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(int)"),
    frame("??", 0, "at::detail::empty_generic(c10::ArrayRef<long>)"),
]
ENGINE = [frame("??", 0, "torch::autograd::Engine::evaluate_function(x)"), frame("??", 0, "clone")]


def cxx(*names):
    return [*UNWINDER, *(frame("??", 0, name) for name in names), *ENGINE]


EMPTY, MM = "at::_ops::empty_strided::redispatch(c10::DispatchKeySet)", "at::_ops::mm::call(at::Tensor const&)"
CXX = {
    "autograd node MmBackward0": cxx(EMPTY, MM, "torch::autograd::generated::MmBackward0::apply(std::vector<x>&&)"),
    "autograd node AccumulateGrad": cxx(EMPTY, "torch::autograd::AccumulateGrad::apply(std::vector<x>&&)"),
    "autograd node CppNode<mine::Gather<8> >": cxx(EMPTY, "torch::autograd::CppNode<mine::Gather<8> >::apply(x)"),
    "operator mm": cxx(EMPTY, MM),
    "??:0 in at::detail::empty_generic(c10::ArrayRef<long>)": cxx(),
    "??:0 in torch::unwind::unwind()": UNWINDER[:1],
    "/home/me/train.py:5 in f": [*cxx(EMPTY, MM)[:-2], frame("/home/me/train.py", 5, "f")],
    NO_STACK: [],
}


def test_what_has_no_line_of_python_has_its_node_or_operator(tmp_path):
    allocator = Allocator()
    for number, frames in enumerate(CXX.values()):
        allocator.alloc((1 + number) * MIB, frames)
    (report,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    assert {row[-1]: row[0] for row in report.tables[0].rows} == {
        site: f"{1 + number}.0 MiB" for number, site in enumerate(CXX)
    }
    make_page([report])


@pytest.mark.parametrize("line", [1 << 32, (1 << 64) - 1, -1, None, "x", 1.5])
def test_a_line_that_is_not_known_is_shown_as_such(line, tmp_path):
    allocator = Allocator()
    allocator.alloc(MIB, [frame("/home/me/train.py", line, "f")])
    (report,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    assert report.tables[0].rows[0][-1] == "/home/me/train.py:? in f"
