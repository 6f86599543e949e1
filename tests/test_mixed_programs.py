"""Random programs that mix the arena, graphs, record_stream, and threads break no promise (S1, S3, S5, S6).

And the proof that they could tell: with one rule of safecomm broken, some program fails.
"""

import contextlib
import sys
from unittest import mock

import mixed_programs
import pytest
from amount import SEED, share
from mixed_programs import run_many
from points import TurnLock

from safecomm.arena import arena as arena_module
from safecomm.arena.arena import Arena
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import NO_STREAMS
from safecomm.collectives.routes import Route, Routes
from safecomm.core import captures, refcounts
from safecomm.core.captures import CapturedGraph
from safecomm.core.handoffs import Handoffs
from safecomm.core.ledger import Ledger, WorkHold
from safecomm.core.recorded_uses import RecordedUses
from safecomm.core.work import Work

pytestmark = [
    pytest.mark.skipif(not refcounts.COUNTED, reason="the programs are about the ways that count references"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="what is spared is told by qualified names"),
]

GATE = {11 + SEED: share(600), 12 + SEED: share(600)}
"""Programs of each seed. Many more have run: benchmarks/results/mixed_programs.json."""

GATE_NCCL2 = share(500)
"""The same with ProcessGroupNCCL2's rules. More: benchmarks/results/mixed_programs_nccl2.json."""

BOUND = 3000
"""Programs within which each mutant is to be found."""


@pytest.mark.parametrize("seed", GATE)
def test_mixed_programs_s1_s3_s5_s6(seed):
    ended = run_many(seed, range(GATE[seed]))
    assert ended["failures"] == []
    assert min(ended["counts"].get(kind, 0) for kind in mixed_programs.KINDS) > 0


def test_mixed_programs_where_works_keep_inputs_and_waits_ask_the_device_s1_s3_s5_s6():
    """S1, S5: with ProcessGroupNCCL2's rules, also where handles and outputs are dropped, and beside captures."""
    ended = run_many(13 + SEED, range(GATE_NCCL2), nccl="nccl2")
    assert ended["failures"] == []
    assert min(ended["counts"].get(kind, 0) for kind in mixed_programs.KINDS) > 0


def test_a_program_is_the_same_when_it_runs_alone():
    with mixed_programs.World() as world:
        steps = {number: mixed_programs.run_one(world, 13, number)[0].steps for number in range(40)}
        for number in (39, 7, 20):
            assert mixed_programs.run_one(world, 13, number)[0].steps == steps[number]


def test_a_failure_says_how_to_run_it_again(capsys):
    with takes_a_wait_on_any_stream(), mock.patch("sys.argv", ["", "--programs", "150", "--seed", "14"]):
        assert mixed_programs.main() == 1
    said = capsys.readouterr().out.splitlines()[0].split(":")
    assert said[0] == "unsafe_reuse"
    with takes_a_wait_on_any_stream(), mock.patch("sys.argv", ["", *said[1].split()]):
        assert mixed_programs.main() == 1
    assert "first " in capsys.readouterr().out


# --- safecomm with one rule broken --------------------------------------------------------------------------------


def takes_a_wait_on_any_stream():
    """Releases a work whichever stream has waited for it."""

    def release_waited(ledger, work):
        ledger.release(work)

    return mock.patch.object(Ledger, "_release_waited", release_waited)


def forgets_leases():
    """Takes a slot for idle that a graph writes at each replay."""

    def idle(slot, but_for_graph):
        return original(slot, True)

    original = arena_module.idle
    return mock.patch.object(arena_module, "idle", idle)


def releases_handoffs_before_their_event():
    """Takes each handoff for complete."""

    def sweep_queue(handoffs, queue, capturing, *, thorough):
        handoffs._rules.release_all(queue.holds)

    return mock.patch.object(Handoffs, "sweep_queue", sweep_queue)


def ends_leases_with_the_capture():
    """Gives back what a graph uses when it has been captured."""

    def seal(captured):
        original(captured)
        captured._leave_slots()
        for one in captured._arguments:
            one.storage = None

    original = CapturedGraph.seal
    return mock.patch.object(CapturedGraph, "seal", seal)


def gives_slots_to_other_streams_as_they_are():
    """Orders no stream after those that used the memory before."""

    def take(layout, *arguments, **how):
        found = original(layout, *arguments, **how)
        return None if found is None else (found[0], NO_STREAMS)

    original = Layout.take
    return mock.patch.object(Layout, "take", take)


def converts_nothing():
    """Says of each call of record_stream that it holds the memory."""

    def add(uses, *arguments, **how):
        return True

    return mock.patch.object(RecordedUses, "add", add)


def forgets_the_last_replay():
    """Lets go of what a graph has used as soon as it has ended."""

    def add_leftover(handoffs, *what):
        pass

    return mock.patch.object(Handoffs, "add_leftover", add_leftover)


def gives_captures_what_runs():
    """Does not wait for the device before a capture."""

    def before_capture(arena):
        arena._layout.reclaim(lambda: None)

    return mock.patch.object(Arena, "before_capture", before_capture)


def keeps_what_is_over():
    """Lets no handoff and no recorded use go."""

    def release(ledger, hold):
        if not isinstance(hold, WorkHold):
            kept.append(hold.storages)
        original(ledger, hold)

    kept = []
    original = Ledger.release
    return mock.patch.object(Ledger, "release", release)


def goes_on_watching():
    """Leaves what sees captures where it is."""
    return mock.patch.object(captures, "unwatch", return_value=None)


def closes_without_order():
    """Gives the block back whatever runs on it."""

    def close(arena):
        with mock.patch.object(type(arena._streams), "wait_event"):
            original(arena)

    original = Arena.close
    return mock.patch.object(Arena, "close", close)


def releases_what_has_failed():
    """Takes a wait that raises for one that has come back."""

    return mock.patch.object(Ledger, "is_idle", return_value=True)


def lets_two_threads_into_the_layout():
    """Takes no lock."""

    @contextlib.contextmanager
    def unlocked():
        with mock.patch.object(TurnLock, "acquire", return_value=True), mock.patch.object(TurnLock, "release"):
            yield

    return unlocked()


MUTANTS = [
    takes_a_wait_on_any_stream,
    forgets_leases,
    releases_handoffs_before_their_event,
    ends_leases_with_the_capture,
    gives_slots_to_other_streams_as_they_are,
    converts_nothing,
    forgets_the_last_replay,
    gives_captures_what_runs,
    keeps_what_is_over,
    goes_on_watching,
    closes_without_order,
    releases_what_has_failed,
    lets_two_threads_into_the_layout,
]


# --- the same with ProcessGroupNCCL2's rules -----------------------------------------------------------------------


def holds_inputs_only():
    """Leaves the output to the program, as ProcessGroupNCCL2 does."""

    def hold(route, work, op, inner, storages, alloc_stream, frame):
        return original(route, work, op, inner, storages[1:] or storages, alloc_stream, frame)

    original = Route.hold
    return mock.patch.object(Route, "hold", hold)


def holds_nothing_of_sends_and_receives():
    """Leaves those to ProcessGroupNCCL2, which keeps what is sent."""

    def hold(routes, work, op, inner, group, index, storages, frame, *, unordered=False, **how):
        return original(
            routes, work, op, inner, group, index, () if unordered else storages, frame, unordered=unordered, **how
        )

    original = Routes.hold
    return mock.patch.object(Routes, "hold", hold)


def waits_without_the_relaxed_mode():
    """Waits as torch does."""

    def wait_for(route, inner, timeout=None):
        return inner.wait()

    return mock.patch.object(Route, "wait_for", wait_for)


def asks_for_futures_anywhere():
    """Does not know that a future orders the stream."""

    def get_future(work):
        work.has_future = True
        return work.inner.get_future()

    return mock.patch.object(Work, "get_future", get_future)


MUTANTS_NCCL2 = [
    holds_inputs_only,
    holds_nothing_of_sends_and_receives,
    waits_without_the_relaxed_mode,
    asks_for_futures_anywhere,
]


@pytest.mark.parametrize(
    ("broken", "nccl"), [*((one, "nccl") for one in MUTANTS), *((one, "nccl2") for one in MUTANTS_NCCL2)]
)
def test_programs_find_a_safecomm_that(broken, nccl):
    """The promises are really tested: safecomm with one rule broken does not get through."""
    with broken():
        ended = run_many(16, range(BOUND), nccl=nccl, stop=1)
    ((_, kind, what),) = ended["failures"]
    assert kind in ("unsafe_reuse", "lost"), what  # and no error of the mutant's own
