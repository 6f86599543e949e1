"""The C file against ctypes: the same answers, from one random history and in the middle of one another.

``tests/test_allocation.py`` runs with both. Here is what compares them, what C alone can get wrong, and what happens
where the file can't be used.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import types
import weakref
import zipfile
from pathlib import Path
from typing import Any

import compiled
import pytest
from amount import share
from hatchling.builders.wheel import WheelBuilder
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from programs import programs

from safecomm._torch import driver, native
from safecomm._torch.segment_table import GRANULE
from safecomm.core import allocation
from safecomm.core.allocation import Allocations

needs_c = pytest.mark.skipif(bool(compiled.why_not()), reason=compiled.why_not())

PLACES = range(8, 16)
"""The granules of the address space."""
PIECE = (1 << GRANULE) // 4
pointers = st.builds(
    lambda place, piece, byte: (place << GRANULE) + piece * PIECE + byte,
    st.sampled_from(PLACES), st.integers(0, 3), st.sampled_from((0, 512)),
)  # fmt: skip
streams = st.sampled_from((0, 5, (1 << 47) - 256))
FOREIGN = "cudaMalloc without torch"


class Histories(RuleBasedStateMachine):
    """Segments come, go, and are claimed; an address comes back as another stream's. Both are asked the same."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.identities: dict[int, int] = {}  # the driver's, by granule
        self.next_identity = 1
        self.segments: list[dict[str, Any]] = []
        self.foreign: dict[int, str] = {}
        self.claims: dict[int, tuple[int, int]] = {}  # by the first granule: the address past the last, the stream
        self.asked = 0
        self.current = 5
        self.asking: Allocations | None = None
        self.told_meanwhile: list[tuple[int | None, int | None]] = []  # and what is right
        self.during: list[Any] = []  # what happens in the middle of a question: once, for the one that asks
        asked = compiled.driver(self.answer)
        both = [compiled.table_of(kind, asked, self.patch) for kind in compiled.KINDS]
        self.patch.setattr(allocation._torch, "segments", self.snapshot)
        self.patch.setattr(allocation._torch, "current_raw_stream", lambda device: self.current)
        self.patch.setattr(allocation._torch, "capture_id", lambda stream: 0)
        self.patch.setattr(
            allocation, "torch", types.SimpleNamespace(UntypedStorage=self.byte, device=lambda *named: named)
        )
        self.both = [Allocations(table) for table in both]

    def teardown(self) -> None:
        self.patch.undo()

    # --- the driver and the allocator

    def answer(self, pointer: int) -> int | None:
        self.asked += 1
        identity = self.identities.get(pointer >> GRANULE)
        self.happen()
        return identity

    def snapshot(self) -> list[dict[str, Any]]:
        self.happen()
        return list(self.segments)

    def byte(self, nbytes: int, *, device: object) -> Any:
        self.happen()
        for segment in self.segments:
            free = segment["address"] >> GRANULE not in self.asking._anchors
            if free and segment["segment_type"] == "small" and segment["stream"] == self.current:
                return types.SimpleNamespace(data_ptr=functools.partial(int, segment["address"] + 512))
        raise RuntimeError("out of memory")

    def happen(self) -> None:
        """Let happen what another thread, a finalizer or a signal handler does in the middle of a question."""
        if self.during:
            what, pointer = self.during.pop()
            if what == "question":
                # An assertion would not get through the driver's function.
                self.told_meanwhile.append((self.asking.alloc_stream(pointer), self.truth(pointer)))
            elif what == "forget":
                self.asking._forget()
            else:
                for number in range(200):
                    self.asking._table.keep(1 << 40 | number, 77, 0, 0)  # ids that are nobody's

    def truth(self, pointer: int) -> int | None:
        for first, (end, stream) in self.claims.items():
            if first << GRANULE <= pointer < end:
                return stream
        if self.identities.get(pointer >> GRANULE) is not None:
            for segment in self.segments:
                if segment["address"] <= pointer < segment["address"] + segment["total_size"]:
                    return segment["stream"]
        return None

    def both_ways(self, question: Any, during: list[Any]) -> tuple[Any, Any]:
        """Return the two answers; the driver is asked as often for each."""
        told = []
        for found in self.both:
            self.asked, self.asking, self.during = 0, found, list(during)
            told.append((question(found), self.asked))
            self.during = []
        assert told[0] == told[1]
        assert all(stream == right for stream, right in self.told_meanwhile)
        self.told_meanwhile.clear()
        return told[0]

    # --- what happens

    @initialize(anchored=st.booleans())
    def begin(self, anchored: bool) -> None:
        for place, kind in ((8, "small"), (9, "small"), (10, "expandable"), (12, "large")):
            self.map(place, 5, kind, 2)
        if anchored:
            self.ask(8 << GRANULE, 9 << GRANULE, [])

    def free(self, place: int, granules: int) -> bool:
        return not any(one in self.identities for one in range(place, place + granules))

    @rule(
        place=st.sampled_from(PLACES), stream=streams, kind=st.sampled_from(("small", "large", "pool", "expandable")),
        granules=st.integers(1, 3),
    )  # fmt: skip
    def map(self, place: int, stream: int, kind: str, granules: int) -> None:
        granules = 1 if kind == "small" else granules
        if not self.free(place, granules):
            return
        self.segments.append({
            "address": place << GRANULE, "total_size": granules << GRANULE, "stream": stream, "device": 0,
            "segment_type": "small" if kind in ("small", "pool") else "large",
            "segment_pool_id": (0, 3) if kind == "pool" else (0, 0), "is_expandable": kind == "expandable",
            "blocks": [{"state": "active_allocated"}, {"state": "inactive"}],
        })  # fmt: skip
        for one in range(place, place + granules):
            self.identities[one] = self.next_identity
            self.next_identity += kind == "expandable"  # an id for each part
        self.next_identity += 1

    @rule(place=st.sampled_from(PLACES))
    def map_foreign(self, place: int) -> None:
        if self.free(place, 1):
            self.identities[place], self.foreign[place] = self.next_identity, FOREIGN
            self.next_identity += 1

    @rule(index=st.integers(0, 99))
    def unmap(self, index: int) -> None:
        """Give a segment back to the driver: one without an anchor, and without a piece that is claimed."""
        gone = [
            one for one in self.segments
            if not any(one["address"] >> GRANULE in found._anchors for found in self.both)
            and not self.claimed(one["address"], one["address"] + one["total_size"])
        ]  # fmt: skip
        if gone and len(self.segments) > 2:
            segment = gone[index % len(gone)]
            self.segments.remove(segment)
            first = segment["address"] >> GRANULE
            for one in range(first, first + (segment["total_size"] >> GRANULE)):
                del self.identities[one]
        elif self.foreign:
            place = sorted(self.foreign)[index % len(self.foreign)]
            del self.foreign[place], self.identities[place]

    @rule(number=st.integers(0, 10))
    def remap(self, number: int) -> None:
        """Unmap a part of an expandable segment and map it again: it gets another id."""
        parts = [
            place
            for one in self.segments if one["is_expandable"]
            for place in range(one["address"] >> GRANULE, (one["address"] + one["total_size"]) >> GRANULE)
        ]  # fmt: skip
        if parts:
            self.identities[parts[number % len(parts)]] = self.next_identity
            self.next_identity += 1

    def claimed(self, start: int, end: int) -> bool:
        return any(first << GRANULE < end and start < last for first, (last, _) in self.claims.items())

    @rule(place=st.sampled_from(PLACES), pieces=st.integers(1, 6), stream=streams)
    def claim(self, place: int, pieces: int, stream: int) -> None:
        start, end = place << GRANULE, (place << GRANULE) + pieces * PIECE
        inside = any(one["address"] <= start and end <= one["address"] + one["total_size"] for one in self.segments)
        if inside and not self.claimed(start, end):
            self.claims[place] = (end, stream)
            for found in self.both:
                found.claim(start, end, lambda pointer: stream)

    @precondition(lambda self: self.claims)
    @rule(number=st.integers(0, 10))
    def unclaim(self, number: int) -> None:
        place = sorted(self.claims)[number % len(self.claims)]
        del self.claims[place]
        for found in self.both:
            found.unclaim(place << GRANULE)

    @rule(stream=streams)
    def use_stream(self, stream: int) -> None:
        self.current = stream

    # --- what is asked

    interruptions = st.lists(st.tuples(st.sampled_from(("question", "forget", "fill")), pointers), max_size=2)

    @rule(pointer=pointers, other=st.none() | pointers, during=interruptions)
    def ask(self, pointer: int, other: int | None, during: list[Any]) -> None:
        stream, _ = self.both_ways(lambda found: found.alloc_stream(pointer, other), during)
        right = self.truth(pointer)
        assert stream == (right if other is None or self.truth(other) == right else None)

    @rule(stream=streams, asked=st.lists(pointers, max_size=6), during=interruptions)
    def ask_all(self, stream: int, asked: list[int], during: list[Any]) -> None:
        everywhere, _ = self.both_ways(lambda found: found.all_allocated_on(stream, sorted(asked)), during)
        assert everywhere == all(self.truth(pointer) == stream for pointer in asked)

    @rule(pointer=pointers)
    def ask_for_the_pool(self, pointer: int) -> None:
        self.both_ways(lambda found: found.pool(pointer), [])

    @invariant()
    def anchors_are_the_same(self) -> None:
        one, other = self.both
        assert one._anchors.keys() == other._anchors.keys()


@needs_c
def test_c_and_ctypes_answer_the_same_in_random_histories_s1():
    run_state_machine_as_test(Histories, settings=programs(share(1000), 40))


MUTANTS = {
    "an anchor outlives its claim": ("if (next.stream == NONE && i < self->anchors) self", "if (0) self"),
    "an anchor is of its neighbours too": ("granule == pointer >> GRANULE", "granule >> 1 == pointer >> GRANULE >> 1"),
    "what is claimed is not forgotten": ("if (self->count) memset", "if (0) memset"),
    "the second pointer is not asked for": ("if (two && !(found.start", "if (0 && !(found.start"),
    "a segment goes on beyond its end": ("other < found.end", "other <= found.end"),
    "an expandable segment has an end": ("*slot = next;", "*slot = next; if (!slot->end) slot->end = ~0ull;"),
    "the first of a list is enough": ("if (found.stream != stream) Py_RETURN_FALSE", "Py_RETURN_TRUE"),
    "a list is of the stream that is known last": ("pointer < found.end ||", "pointer < found.end || found.end ||"),
    "a driver that fails has said something": ("if (self->ask(&identity, BUFFER_ID, pointer)) return 0;",
                                               "self->ask(&identity, BUFFER_ID, pointer);"),
    "an id is looked for by a part of it": ("self->slots[place].key != key", "(self->slots[place].key ^ key) & 3"),
    "the last anchor is lost with another": ("self->anchor[--self->anchors]", "(--self->anchors, self->anchor[i])"),
}  # fmt: skip


@needs_c
@pytest.mark.parametrize("mutant", MUTANTS)
def test_histories_find_what_is_wrong_in_c(mutant, tmp_path, monkeypatch):
    text = compiled.SOURCE.read_text()
    right, wrong = MUTANTS[mutant]
    assert text.count(right) == 1
    made = tmp_path / "_driver.c"
    made.write_text(text.replace(right, wrong))
    hook = compiled.hook()
    monkeypatch.setattr(hook, "SOURCE", made)
    hook.compile_c(tmp_path / "_driver.so", "-w")
    module = compiled.load(tmp_path / "_driver.so")
    monkeypatch.setattr(compiled, "compiled", lambda: module)
    generated = programs(1000, 40, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Histories, settings=generated)


# --- what C alone can get wrong ---------------------------------------------------------------------------------------


@needs_c
def test_the_file_is_short_and_has_none_of_the_names_beyond_the_stable_abi():
    text = compiled.SOURCE.read_text()
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) <= 120
    assert text.index("#define Py_LIMITED_API 0x030A0000") < text.index("#include <Python.h>")
    assert compiled.compiled().VERSION == native._VERSION


@needs_c
def test_a_table_that_is_filled_beyond_what_it_has_room_for_forgets_and_goes_on(monkeypatch):
    asked = []
    identities = iter(range(3 * allocation.LIMIT))
    table = compiled.table_of("C", compiled.driver(lambda pointer: pointer), monkeypatch)(
        lambda pointer, identity: asked.append(identity) or (9, 0, 0)
    )
    for identity in identities:
        table.keep(identity << 17, 5, 0, 0)  # ids that would all come to lie in one slot by their last bits
    last = (3 * allocation.LIMIT - 1) << 17
    assert table.alloc_stream(last) == 5
    assert table.alloc_stream(0) == 9, "it was forgotten long ago"
    assert table.alloc_stream((1 << 64) - 1) == 9, "the id for which there is no slot"
    table.keep((1 << 64) - 1, 5, 0, 0)
    assert table.alloc_stream((1 << 64) - 1) == 9
    assert asked == [0, (1 << 64) - 1, (1 << 64) - 1]


@needs_c
def test_more_anchors_than_there_is_room_for_are_left_out(monkeypatch):
    table = compiled.table_of("C", compiled.driver(lambda pointer: None), monkeypatch)(None)
    for granule in range(40):
        table.anchor(granule, granule)
    known = [table.alloc_stream(granule << GRANULE) for granule in range(40)]
    assert known == [*range(allocation.ANCHORS), *[None] * (40 - allocation.ANCHORS)]
    for granule in range(40):
        table.anchor(granule, None)
    table.anchor(3, 7)
    assert [table.alloc_stream(granule << GRANULE) for granule in range(40)] == [None, None, None, 7, *[None] * 36]


@pytest.mark.parametrize("kind", compiled.KINDS)
def test_what_is_raised_in_the_middle_reaches_the_caller(kind, monkeypatch):
    def missed(pointer, identity):
        raise KeyboardInterrupt

    table = compiled.table_of(kind, compiled.driver(lambda pointer: 3), monkeypatch)(missed)
    with pytest.raises(KeyboardInterrupt):
        table.alloc_stream(1 << 30)
    with pytest.raises(KeyboardInterrupt):
        table.alloc_stream(1 << 30, 1 << 31)
    with pytest.raises(KeyboardInterrupt):
        table.all_allocated_on(5, [1 << 30])
    assert table.all_allocated_on(5, [])


@pytest.mark.parametrize("kind", compiled.KINDS)
@pytest.mark.parametrize(
    "wrong",
    [
        ("alloc_stream",), ("alloc_stream", 1, 2, 3), ("alloc_stream", "x"), ("alloc_stream", 1, "x"),
        ("alloc_stream", 1.5), ("all_allocated_on", 5), ("all_allocated_on", 5, ["x"]), ("all_allocated_on", 5, 7),
        ("keep", 1), ("anchor", 1), ("anchor", "x", 1), ("clear", 1),
    ],
)  # fmt: skip
def test_arguments_that_are_none_raise_and_change_nothing(kind, wrong, monkeypatch):
    table = compiled.table_of(kind, compiled.driver(lambda pointer: 3), monkeypatch)(lambda *_: (5, 0, 0))
    name, *arguments = wrong
    if kind == "ctypes" and name == "anchor" and "x" in arguments:
        pytest.skip("a dictionary takes any key")
    with pytest.raises(TypeError):
        getattr(table, name)(*arguments)
    assert table.alloc_stream(1 << 30) == 5


@pytest.mark.parametrize("kind", compiled.KINDS)
def test_a_table_dies_with_what_asks_it(kind, monkeypatch):
    found = Allocations(compiled.table_of(kind, compiled.driver(lambda pointer: None), monkeypatch))
    bound, gone = found.alloc_stream, weakref.ref(found)
    del found
    gc.collect()
    assert gone() is not None, "what is bound has the table, which calls back"
    assert bound(1 << 30) is None
    del bound
    gc.collect()
    assert gone() is None


@needs_c
def test_a_list_that_changes_while_it_is_asked_for_is_read_as_far_as_it_goes(monkeypatch):
    pointers = [1 << 30, 1 << 31, 1 << 32]
    table = compiled.table_of("C", compiled.driver(lambda pointer: pointer), monkeypatch)(
        lambda pointer, identity: (pointers.clear(), (5, 0, 0))[1]
    )
    assert table.all_allocated_on(5, pointers)


@pytest.mark.parametrize("kind", compiled.KINDS)
def test_threads_that_ask_while_others_claim_are_told_what_is_right_s1(kind, monkeypatch):
    """S1: what is asked about is of one stream all the time, whoever claims what lies beside it."""
    segments = [
        {"address": number << GRANULE, "total_size": 1 << GRANULE, "stream": 50 + number, "device": 0, "blocks": []}
        for number in range(8, 40)
    ]
    monkeypatch.setattr(allocation._torch, "segments", lambda: segments)
    identities = compiled.driver(lambda pointer: pointer >> GRANULE)
    found = Allocations(compiled.table_of(kind, identities, monkeypatch))
    wrong, over = [], threading.Event()

    def ask(first):
        while not over.is_set():
            for number in range(8, 40):
                start = number << GRANULE
                if found.alloc_stream(start, start + 512) != 50 + number:
                    wrong.append(number)
                if not found.all_allocated_on(50 + number, [start, start + 1024]):
                    wrong.append(-number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for turn in range(400):
            place = (8 + turn % 32) << GRANULE
            found.claim(place + 4096, place + 8192, lambda pointer: 7)
            if found.alloc_stream(place + 5000) != 7:
                wrong.append(place)
            found.unclaim(place + 4096)
            if found.alloc_stream(place + 5000) != 50 + 8 + turn % 32:
                wrong.append(place)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert wrong == []


# --- captures ---------------------------------------------------------------------------------------------------------

IS_CAPTURING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int))
INFO = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64), *[ctypes.c_void_p] * 3
)
LAST = (1 << 64) - 1
CAPTURES = {0: (0, 0, 0), 5: (0, 1, 77), 6: (0, 2, 78), 7: (900, 1, 79), LAST - 1: (0, 1, LAST)}
"""By stream: the error that the driver returns, the status, and the id of the capture."""


@pytest.fixture
def captures(monkeypatch):
    """Return what C makes of CAPTURES, and what ctypes makes of the same."""
    if compiled.why_not():
        pytest.skip(compiled.why_not())

    def is_capturing(stream, status):
        error, status[0], _ = CAPTURES[stream]
        return error

    def info(stream, status, identity, *nothing):
        assert nothing == (None, None, None)
        error, status[0], identity[0] = CAPTURES[stream]
        return error if stream else 1

    functions = IS_CAPTURING(is_capturing), INFO(info)
    monkeypatch.setattr(driver, "stream_is_capturing", functions[0])
    monkeypatch.setattr(driver, "capture_info", functions[1])
    capture_id, is_capturing = compiled.compiled().captures(
        *map(native.address_of, functions), lambda index, stream: ("asked torch", index, stream)
    )
    yield capture_id, is_capturing
    del functions


def test_c_and_ctypes_tell_the_same_capture_s5(captures):
    capture_id, _ = captures
    told = {stream: capture_id(stream) for stream in CAPTURES}
    assert told == {stream: driver.capture_id(stream) for stream in CAPTURES}
    assert told == {0: 0, 5: 77, 6: 0, 7: 0, LAST - 1: LAST}


def test_a_stream_is_capturing_as_torch_has_it_and_torch_is_asked_where_the_driver_fails_s5(captures):
    """S5: also where its capture is invalid, in which nothing may be polled either."""
    _, is_capturing = captures
    assert [is_capturing(0, stream) for stream in (0, 5, 6, LAST - 1)] == [False, True, True, True]
    assert is_capturing(3, 7) == ("asked torch", 3, 7)
    for wrong in [(), (0,), (0, "x"), (0, 1, 2)]:
        with pytest.raises(TypeError):
            is_capturing(*wrong)


# --- where it is used, and where it is not ----------------------------------------------------------------------------


def not_used(monkeypatch, path=None):
    """Return why the C file is not used if the package has what is in the folder ``path``."""
    import safecomm._torch

    monkeypatch.delitem(sys.modules, "safecomm._torch._driver", raising=False)
    monkeypatch.setattr(safecomm._torch, "__path__", [] if path is None else [str(path)])
    module, why = native._load()
    monkeypatch.delitem(sys.modules, "safecomm._torch._driver", raising=False)
    assert (module is None) == bool(why)
    return why


def test_where_it_was_not_built_ctypes_asks(monkeypatch):
    assert not_used(monkeypatch) == "the C file was not built"


def test_what_can_not_be_loaded_costs_speed_and_not_the_import(monkeypatch, tmp_path):
    (tmp_path / "_driver.abi3.so").write_bytes(b"\x7fELF of another machine")
    assert "can't be loaded" in not_used(monkeypatch, tmp_path)
    (tmp_path / "_driver.abi3.so").unlink()
    (tmp_path / "_driver.py").write_text("VERSION = -1")
    assert "another version" in not_used(monkeypatch, tmp_path)
    (tmp_path / "_driver.py").write_text("raise SystemError('nothing works')")
    assert not_used(monkeypatch, tmp_path) == "what was built can't be loaded (nothing works)"


def test_a_python_without_a_global_lock_does_not_load_it(monkeypatch, tmp_path):
    (tmp_path / "_driver.py").write_text("raise AssertionError")
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not_used(monkeypatch, tmp_path) == "this Python runs without a global interpreter lock"


def test_without_libcuda_nothing_is_asked_in_c(monkeypatch, tmp_path):
    (tmp_path / "_driver.py").write_text(f"VERSION = {native._VERSION}")
    monkeypatch.setattr(driver, "pointer_attribute", None)
    assert not_used(monkeypatch, tmp_path) == "there is no driver to ask"


PROGRAM = """
import types
import torch
torch.cuda.memory_snapshot = lambda *_, **__: []
import safecomm
from safecomm import _torch
from safecomm._torch import native
from safecomm.core.ledger import LEDGER
from safecomm.collectives import coalesced, gates, holding, lists, takers, tensors

streams = LEDGER.streams
in_c = type(streams._table).__module__ == "safecomm._torch._driver"
assert in_c == (not _torch.WHY_CTYPES)
for module in (coalesced, gates, holding, takers, tensors):
    assert module._alloc_stream.__self__ is streams._table
for module in (coalesced, lists, tensors):
    assert module._all_allocated_on.__self__ is streams._table
for asked in (streams.alloc_stream, streams.all_allocated_on, streams.capture, streams.is_capturing):
    assert (type(asked) is types.BuiltinFunctionType) == in_c
streams._table.keep(8, 5, 8 << 21, 9 << 21)
assert streams.alloc_stream(8 << 21, (8 << 21) + 512) == 5
assert streams.alloc_stream(9 << 21) is None  # the driver knows it, and torch does not
assert streams.alloc_stream(0) is None
assert (streams.capture(6), streams.capture(77)) == (0, 770)
assert not in_c or streams.is_capturing(0, 77) is True  # without C, torch is asked, which here has no GPU
print(_torch.WHY_CTYPES or "in C")
"""


# --- the wheel --------------------------------------------------------------------------------------------------------


def wheel(into: Path, version: str = "standard") -> Path:
    """Build the wheel as pip does, unpack it into the folder ``into``, and return where it was."""
    (made,) = WheelBuilder(str(compiled.ROOT)).build(directory=str(into / "dist"), versions=[version])
    zipfile.ZipFile(made).extractall(into)
    return Path(made)


@needs_c
def test_a_wheel_has_the_c_file_for_this_kind_of_machine_and_each_python_and_the_hot_path_calls_it(
    tmp_path, monkeypatch
):
    """With a library in place of the driver's, in an interpreter that is started with both."""
    monkeypatch.delenv("SAFECOMM_BUILD_C", raising=False)
    assert "-cp310-abi3-linux_" in wheel(tmp_path).name
    compiled.fake_driver(tmp_path)
    assert compiled.run(PROGRAM, tmp_path, LD_LIBRARY_PATH=str(tmp_path)) == "in C\n"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"SAFECOMM_BUILD_C": "0"}, ""),
        ({"PATH": "", "CC": ""}, "No such file or directory: 'cc'"),
        ({"CC": "false"}, "returned non-zero exit status 1"),
    ],
    ids=["asked", "no compiler", "does not compile"],
)
def test_without_a_compiler_the_wheel_is_pure_and_one_line_says_so(variables, says, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("SAFECOMM_BUILD_C", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wheel(tmp_path).name.endswith("-py3-none-any.whl")
    assert list(tmp_path.rglob("*.so")) == []
    said = "".join(capfd.readouterr())
    assert says in said
    assert said.count("\n") == bool(says)


@needs_c
def test_a_pure_wheel_asks_by_ctypes_and_is_told_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFECOMM_BUILD_C", "0")
    wheel(tmp_path)
    compiled.fake_driver(tmp_path)
    assert compiled.run(PROGRAM, tmp_path, LD_LIBRARY_PATH=str(tmp_path)) == "the C file was not built\n"


@needs_c
def test_an_editable_install_has_it_beside_its_source(tmp_path, monkeypatch):
    hook = compiled.hook()
    source = tmp_path / "_driver.c"
    source.write_text(compiled.SOURCE.read_text())
    monkeypatch.setattr(hook, "SOURCE", source)
    for wanted in ("1", "0"):
        monkeypatch.setenv("SAFECOMM_BUILD_C", wanted)
        made = hook.CustomBuildHook(str(tmp_path), {}, None, None, "", "")
        made.initialize("editable", {})
        made.finalize("editable", {}, "")
        assert (tmp_path / "_driver.abi3.so").exists() == (wanted == "1")
