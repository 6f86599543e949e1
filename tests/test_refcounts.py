"""Counts of references: right where they are used, and not used where they are wrong (S1, S3)."""

from __future__ import annotations

import sys

import pytest
import torch
from interpreters import PYTHONS
from ranks import launch
from watching import Log

# safecomm is imported by each test: some do so in another Python.


def test_they_are_used_in_this_python():
    from safecomm.core import refcounts

    assert refcounts.COUNTED
    assert refcounts.WHY_NOT == ""


def test_what_is_counted_is_what_there_is():
    from safecomm.core import refcounts

    (thing,) = only = [object()]
    assert refcounts.getrefcount(thing) == refcounts.HELD_ONCE
    other = thing
    assert refcounts.getrefcount(thing) == refcounts.HELD_ONCE + 1
    del other, only


def not_counted(_, python):
    PYTHONS[python]()
    log = Log()
    lines = log.messages
    log.__enter__()
    import safecomm
    from safecomm.core import refcounts
    from safecomm.core.captures import CapturedGraph
    from safecomm.core.ledger import LEDGER
    from safecomm.core.streams import HOST
    from safecomm.interception import record_stream
    from safecomm.tools import doctor

    assert not refcounts.COUNTED
    assert len(lines) == 1, lines
    assert refcounts.WHY_NOT in lines[0]
    (check,) = [check for check in doctor.diagnose().checks if check.name == "reference counts"]
    assert not check.ok

    # S3: a dropped handle's memory comes back at the next call after it is over, though nobody notices the drop.
    tensor = torch.ones(4)
    for _ in range(3):
        safecomm.all_reduce(tensor, async_op=True)
    kept = safecomm.all_reduce(tensor, async_op=True)
    safecomm.drain(wait=True)
    assert safecomm.pending() == []
    assert kept.wait()
    assert len(lines) == 1, "a drop was noticed"
    assert LEDGER.can_skip_sweep() is True  # with nothing in flight there is nothing to ask
    work = safecomm.all_reduce(tensor, async_op=True)
    assert LEDGER.can_skip_sweep() is False, "works are not asked at once"
    work.wait()

    # S1: nobody can tell when others let go of what record_stream was called for, so that stays torch's.
    assert not LEDGER.uses.record(tensor.untyped_storage(), 0, 7, sys._getframe())

    # Nothing stands in for torch's kernel that could not go on to it; and for memory of an arena, which that does
    # nothing for, it is refused.
    made = []
    intercept = record_stream._intercept
    record_stream._intercept = lambda: made.append(intercept()) or made[0]
    with safecomm.use_arena("1MiB", device="cpu") as arena, safecomm.avoid_record_streams():
        (interception,) = made
        replaced = interception._record_stream
        assert (replaced._library is None) == (replaced.original is None)
        with pytest.raises(safecomm.RecordStreamError, match="memory of an arena"):
            interception.record_stream(arena.empty(4), None)

    # The arena: what fails in the middle of a request costs no slot.
    arena = safecomm.Arena("64KiB", device="cpu")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            arena.empty(256, dtype=torch.quint8)
    assert arena.stats().buckets[0].largest_free == 1 << 16
    arena.close()

    # The arena: a storage that only Python refers to is in use, and so is a tensor.
    with safecomm.use_arena("1MiB", device="cpu") as arena:
        one = arena.empty(256)
        storage, place = one.untyped_storage(), one.data_ptr()
        del one
        assert arena.empty(256).data_ptr() != place
        assert arena.stats().in_use == 1024
        del storage
        assert arena.stats().in_use == 0
        assert arena.empty(256).data_ptr() == place
        held = arena.empty(256)
        assert "1024 bytes in use" in str(arena)
        # S6: and so is what only a graph has.
        graph = type("Graph", (), {})()
        captured = CapturedGraph(LEDGER, graph, (1,), [], HOST, 0, 0, sys._getframe())
        captured.lease(held.untyped_storage())
        del held
        assert arena.stats().in_use == 1024
        assert captured.nbytes == 1024
        captured._leave_slots()
        captured._end()
        assert arena.stats().in_use == 0
    safecomm.destroy_process_group()


@pytest.mark.parametrize("python", PYTHONS)
def test_where_they_are_wrong_none_is_used_and_that_is_said_once_s1_s3(python):
    (ended,) = launch(1, not_counted, python)
    ended.check()


# --- the self-test itself, which runs untraced at import --------------------------------------------------------------


@pytest.fixture
def counting():
    """Return the module, and its counts where the self-test is called directly."""
    from safecomm.core import refcounts

    return refcounts, refcounts._calibrate()


def test_what_is_counted_again_is_what_was_counted_at_import(counting):
    refcounts, counts = counting
    assert counts == (refcounts.HELD_ONCE, refcounts.QUEUED, refcounts.UNUSED, refcounts.KEEPING)
    refcounts._test_objects(counts)
    refcounts._test_storages(counts)


@pytest.mark.parametrize(
    ("test", "name", "by", "found"),
    [
        ("objects", "queued", -1, "an object that one container has counts as shared"),
        ("objects", "queued", 1, "a second reference to an object is not counted"),
        ("objects", "held_once", -1, "two containers do not count as two"),
        ("objects", "held_once", 1, "two containers do not count as two"),
        ("storages", "unused", -1, "an unused storage counts as used"),
        ("storages", "unused", 1, "an unused storage counts as used"),
    ],
)
def test_a_count_that_is_wrong_by_one_is_found_s1_s3(counting, test, name, by, found):
    refcounts, counts = counting
    wrong = counts._replace(**{name: getattr(counts, name) + by})
    with pytest.raises(refcounts._WrongCountError, match=found):
        getattr(refcounts, f"_test_{test}")(wrong)


def test_comparisons_with_what_is_used_in_place_of_wrong_counts_never_hold(counting):
    refcounts, _ = counting
    (thing,) = only = [object()]
    assert refcounts.getrefcount(thing) > refcounts.NEVER.held_once
    assert refcounts.getrefcount(thing) > refcounts.NEVER.queued
    assert refcounts.getrefcount(thing) != refcounts.NEVER.unused
    assert refcounts._no_count(thing) == sys.maxsize
    del only


@pytest.fixture
def traced(monkeypatch):
    """Let a tracer see the self-test: coverage refers to no frame's locals."""
    monkeypatch.setattr(sys, "settrace", lambda tracer: None)


@pytest.mark.parametrize(
    "failure", ["", "wrong", "broken", "torch does not tell", "free threads", "free-threaded build"]
)
def test_why_counts_are_not_used_is_said_and_nothing_breaks_the_import(counting, traced, monkeypatch, failure):
    refcounts, counts = counting
    expected = {
        "wrong": "torch counts users",
        "broken": "counting them failed: ZeroDivisionError('no')",
        "torch does not tell": "does not tell how many tensors use a storage",
        "free threads": "without a global interpreter lock",
        "free-threaded build": "without a global interpreter lock",
    }
    if failure == "wrong":
        monkeypatch.setattr(refcounts._torch, "storage_use_count", lambda cdata: 7)
    elif failure == "broken":
        monkeypatch.setattr(refcounts, "_test_storages", lambda counts: raise_(ZeroDivisionError("no")))
    elif failure == "torch does not tell":
        monkeypatch.setattr(refcounts._torch, "USE_COUNT", False)
    elif failure == "free threads":
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    elif failure == "free-threaded build":
        monkeypatch.setattr(sys, "abiflags", "t")
    found, why = refcounts._trusted()
    assert found == (refcounts.NEVER if failure else counts)
    assert expected[failure] in why if failure else why == ""


def raise_(error):
    raise error


@pytest.mark.parametrize("fails", [False, True])
def test_a_programs_tracer_and_profiler_see_nothing_of_it_and_are_put_back(counting, monkeypatch, fails):
    """Either may look at a frame's locals, and refers to them from then on."""
    refcounts, _ = counting
    seen = []

    def see(frame, event, argument):
        if frame.f_globals.get("__name__") == refcounts.__name__:
            seen.append(frame.f_code.co_name)
        return see

    def calibrate():
        assert sys.gettrace() is None
        assert sys.getprofile() is None
        return refcounts.NEVER if fails else refcounts._counts

    monkeypatch.setattr(refcounts, "_calibrate", calibrate)
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(see)
    sys.setprofile(see)
    try:
        found, _ = refcounts._trusted()
        after = sys.gettrace(), sys.getprofile()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert after == (see, see)
    assert (found == refcounts.NEVER) == fails
    assert not {"_test_objects", "_test_storages", "_check"} & set(seen)
