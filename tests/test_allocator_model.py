"""The model of torch's caching allocator that ``benchmarks/megatron_buffers.py`` asks: torch's rules, on small cases.

That it is torch's to the byte for a whole program is in the results of that script, of which the last test is.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model = load("allocator_model")


def allocator():
    return model.Allocator([(1 << 30, 20 * MIB), (2 << 30, 20 * MIB), (3 << 30, 2 * MIB)])


def test_segments_are_of_torch_s_sizes_and_lie_where_torch_s_lay():
    one = allocator()
    places = [one.allocate(nbytes, 0).address for nbytes in (1000, 2 * MIB, 19 * MIB + 1, 11 * MIB + 1)]
    assert places == [3 << 30, 1 << 30, 2 << 30, (1 << 30) + 2 * MIB]
    assert one.reserved == (2 + 20 + 20) * MIB
    assert one.allocated == 1024 + 2 * MIB + 20 * MIB + 11 * MIB + 512  # less than 1 MiB left over is not split off


def test_the_smallest_free_block_that_is_large_enough_is_taken_and_the_lower_one_of_two():
    one = allocator()
    blocks = [one.allocate(nbytes * MIB, 0) for nbytes in (4, 2, 3, 2, 9)]
    places = [block.address for block in blocks]
    assert places == [(1 << 30) + offset * MIB for offset in (0, 4, 6, 9, 11)]
    for number in (0, 1, 3):
        one.free(blocks[number])
    again = one.allocate(2 * MIB, 0)
    assert again.address == places[3]  # the first two are one block of 6 MiB now
    assert one.allocate(6 * MIB, 0).address == places[0]
    assert one.reserved == 20 * MIB


def test_a_block_is_merged_with_both_neighbours_and_not_across_streams():
    one = allocator()
    first, middle, last = (one.allocate(nbytes * MIB, 0) for nbytes in (5, 5, 10))
    other = one.allocate(2 * MIB, 7)
    assert other.address == 2 << 30
    for block in (first, last, middle):
        one.free(block)
    assert one.free_ranges() == [(1 << 30, (1 << 30) + 20 * MIB), ((2 << 30) + 2 * MIB, (2 << 30) + 20 * MIB)]
    assert one.allocated == 2 * MIB


def test_a_replay_without_some_allocations_counts_them_beside():
    events = [("segment_alloc", 1 << 30, 20 * MIB, 0)]
    events += [("alloc", 1 << 30, 9 * MIB, 0), ("alloc", (1 << 30) + 9 * MIB, 9 * MIB, 0)]
    events += [("free_completed", 1 << 30, 9 * MIB, 0), ("alloc", 1 << 30, 4 * MIB, 0)]
    whole, part = model.Replayed(events), model.Replayed(events, without={0})
    assert (whole.reserved, whole.allocated, whole.beside) == (20 * MIB, 18 * MIB, 0)
    assert (part.reserved, part.allocated, part.beside) == (29 * MIB, 18 * MIB, 9 * MIB)
    assert whole.lives == {0: (0, 2), 1: (1, None), 2: (2, None)}
    assert whole.free == [((1 << 30) + 18 * MIB, (1 << 30) + 20 * MIB)]


def test_what_of_a_recording_are_outputs_that_come_and_go(monkeypatch):
    """An output of 3 MiB stays; each of four steps has one of 2 MiB, and 1.5 MiB that a call changes in place."""
    monkeypatch.setitem(sys.modules, "allocator_model", model)
    buffers = load("megatron_buffers")
    events, calls, marks = [("segment_alloc", 1 << 30, 20 * MIB, 0)], [], []

    def alloc(offset, nbytes):
        events.append(("alloc", (1 << 30) + offset, nbytes, 0, ["mappings.py:1 gather"]))
        return (1 << 30) + offset

    kept = alloc(0, 3 * MIB)
    calls.append((1, "all_gather_into_tensor", ["a"], [7], [kept]))
    for step in range(4):
        marks.append((1 + 2 * step, len(calls)))
        output, changed = alloc(3 * MIB, 2 * MIB), alloc(5 * MIB, MIB * 3 // 2)
        calls.append((3 + 2 * step, "irecv", ["b"], [], [output]))
        calls.append((3 + 2 * step, "all_reduce", ["c"], [changed], [changed]))
        events.extend(("free_completed", one, 0, 0) for one in (output, changed))
    peak = 3 * MIB + 2 * MIB + MIB * 3 // 2
    found = buffers.analyse({"steps": marks, "calls": calls, "events": events, "torch": [20 * MIB, peak]})
    assert found["the model agrees with torch"]
    assert found["outputs that come and go"] == {"a step": 1, "at once MiB": 2.0}
    rows = {row["call"]: (row["how"], row["a step"], row["MiB"]) for row in found["used by collectives"]}
    assert rows == {"irecv": ("output", 1, 2.0), "all_reduce": ("in place", 1, 1.5)}
    assert found["free when the most was allocated"]["where nobody had been"] == 13.5
    assert found["with them in a perfect arena"]["reserved MiB"] == 22.0
    assert found["with them in a perfect arena"]["allocated MiB"] == 6.5


def test_it_was_torch_to_the_byte_wherever_it_was_asked():
    results = json.loads((ROOT / "benchmarks" / "results" / "megatron_buffers.json").read_text())
    agree = [
        rank["the model agrees with torch"]
        for way in results["ways"].values()
        for name, rank in way.items()
        if name.startswith("rank ")
    ]
    assert agree == [True] * 10
