"""Programs through the front door find a safecomm that is wrong: each function here breaks one of its rules.

    python tests/front_mutants.py            # all, and how many programs each took
    python tests/front_mutants.py NAME ...

A mutant counts as found by ``Violation`` or ``Loss`` and by nothing else. Each runs in a fork of its own, so that
what it leaves behind is nobody's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import front
import front_programs
from device import Violation
from front_programs import Loss, run_one

from safecomm.arena import arena as arenas
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import NO_STREAMS
from safecomm.collectives import bucketed, holding, routes, tensors
from safecomm.core import captures, handoffs, ledger
from safecomm.core.recorded_uses import RecordedUses

BOUND = 1500
"""Programs within which a mutant is to be found."""

MUTANTS: dict[str, tuple[Callable[[], None], str]] = {}
"""By name: what breaks the rule, and the backend of the programs."""


def mutant(backend: str = "nccl") -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(breaks: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[breaks.__name__] = breaks, backend
        return breaks

    return add


def everywhere(function: Any, other: Any) -> None:
    """Put ``other`` in the place of ``function`` in each module of safecomm that has it."""
    found = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("safecomm"):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, other)
                    found += 1
    assert found, function


def method(owner: type, name: str, around: Callable[[Any], Any]) -> None:
    """Put what ``around`` makes of a method in its place."""
    setattr(owner, name, around(getattr(owner, name)))


# --- the gates' seams -----------------------------------------------------------------------------------------------


@mutant()
def a_work_of_the_general_way_is_not_held() -> None:
    everywhere(holding.finish, lambda row, result, group, tensors, frame: result)


@mutant()
def a_list_is_held_without_its_last_tensor() -> None:
    original = holding.hold_list
    everywhere(
        original, lambda row, inner, route, group, given, frame: original(row, inner, route, group, given[:-1], frame)
    )


@mutant()
def a_list_is_held_by_its_first_tensor() -> None:
    original = holding.hold_list
    everywhere(
        original, lambda row, inner, route, group, given, frame: original(row, inner, route, group, given[:1], frame)
    )


@mutant()
def a_call_holds_its_first_storage_alone() -> None:
    method(
        routes.Route,
        "hold",
        lambda original: (
            lambda route, work, op, inner, storages, *more: original(route, work, op, inner, storages[:1], *more)
        ),
    )


@mutant()
def a_general_call_holds_its_first_storage_alone() -> None:
    method(
        routes.Routes,
        "hold",
        lambda original: (
            lambda self, work, op, inner, group, index, storages, frame, **how: original(
                self, work, op, inner, group, index, storages[:1], frame, **how
            )
        ),
    )


@mutant()
def the_end_of_a_region_holds_its_first_tensor_alone() -> None:
    original = holding.hold_together

    def hold(inner, route, group, given, aliases, asynchronous, ordered, frame):  # type: ignore[no-untyped-def]
        return original(inner, route, group, given[:1], aliases, asynchronous, ordered, frame)

    everywhere(original, hold)


@mutant()
def a_region_of_one_call_is_held_by_nothing() -> None:
    everywhere(holding.hold_launched, lambda op, inner, *_: inner)


@mutant()
def a_synchronous_call_makes_no_handoff() -> None:
    method(ledger.Ledger, "hand_off", lambda original: lambda *_: None)


@mutant()
def a_synchronous_call_hands_off_its_first_storage_alone() -> None:
    method(
        ledger.Ledger,
        "hand_off",
        lambda original: (
            lambda self, op, group, index, storages, *more: original(self, op, group, index, storages[:1], *more)
        ),
    )


@mutant()
def all_is_taken_for_memory_of_the_current_stream() -> None:
    everywhere(tensors.all_on_current_stream, lambda _: True)


@mutant()
def the_first_of_two_tells_the_allocation_stream_of_both() -> None:
    original = tensors.alloc_stream_of_few
    everywhere(original, lambda index, storages: original(index, storages[:1]))


@mutant()
def buckets_make_no_handoff() -> None:
    everywhere(bucketed.storages_of, tensors.storages_of)
    bucketed.storages_of = lambda given: ()  # type: ignore[assignment]


@mutant()
def a_batch_holds_nothing_of_its_second_operation() -> None:
    original = holding.finish

    def finish(row, result, group, given, frame):  # type: ignore[no-untyped-def]
        return original(row, result, group, given[:1] if row.name == "batch_isend_irecv" else given, frame)

    everywhere(original, finish)


@mutant()
def a_capture_leases_nothing() -> None:
    everywhere(captures.note, lambda *_: None)


@mutant()
def the_general_way_tells_a_capture_nothing_of_its_second_tensor() -> None:
    original = captures.note
    captures.note = lambda op, group, given, frame: original(op, group, given[1:], frame)


@mutant("nccl2")
def inputs_alone_are_held() -> None:
    method(
        routes.Route,
        "hold",
        lambda original: (
            lambda route, work, op, inner, storages, *more: original(
                route, work, op, inner, storages[1:] or storages, *more
            )
        ),
    )


@mutant("gloo")
def what_threads_of_the_host_use_is_not_held() -> None:
    method(
        routes.Route,
        "hold",
        lambda original: lambda route, work, op, inner, storages, *more: original(route, work, op, inner, (), *more),
    )


@mutant("gloo")
def a_send_of_gloo_is_not_held() -> None:
    original = holding._hold_work
    holding._hold_work = lambda row, inner, group, index, given, frame: original(row, inner, group, index, [], frame)


# --- the ledger -----------------------------------------------------------------------------------------------------


@mutant()
def a_wait_on_any_stream_releases() -> None:
    method(ledger.Ledger, "_release_waited", lambda original: lambda self, work: self.release(work))


@mutant()
def a_handoff_is_released_before_its_event() -> None:
    method(
        handoffs.Handoffs,
        "sweep_queue",
        lambda original: lambda self, queue, *_, **how: self._rules.release_all(queue.holds),
    )


@mutant()
def handoffs_are_never_released() -> None:
    kept = []

    def around(original: Any) -> Any:
        def release(self, hold):  # type: ignore[no-untyped-def]
            if not isinstance(hold, ledger.WorkHold):
                kept.append(hold.storages)
            original(self, hold)

        return release

    method(ledger.Ledger, "release", around)


@mutant()
def a_dropped_handle_releases_at_once() -> None:
    def around(original: Any) -> Any:
        def sweep(self, *given, **how):  # type: ignore[no-untyped-def]
            for hold in self.holds():
                if isinstance(hold, ledger.WorkHold) and sys.getrefcount(hold) <= 5:
                    self.release(hold)
            return original(self, *given, **how)

        return sweep

    method(ledger.Ledger, "sweep", around)


@mutant()
def a_graph_gives_back_what_it_uses_when_it_is_captured() -> None:
    def around(original: Any) -> Any:
        def seal(self):  # type: ignore[no-untyped-def]
            original(self)
            for one in self._arguments:
                one.storage = None

        return seal

    method(captures.CapturedGraph, "seal", around)


@mutant()
def the_last_replay_of_a_graph_is_forgotten() -> None:
    method(handoffs.Handoffs, "add_leftover", lambda original: lambda *_: None)


# --- arena, captures and record_stream -------------------------------------------------------------------------------


@mutant()
def a_slot_that_a_graph_writes_counts_as_idle() -> None:
    original = arenas.idle
    everywhere(original, lambda slot, but_for_graph: original(slot, True))


@mutant()
def slots_go_to_other_streams_as_they_are() -> None:
    def around(original: Any) -> Any:
        def take(layout, *given, **how):  # type: ignore[no-untyped-def]
            found = original(layout, *given, **how)
            return None if found is None else (found[0], NO_STREAMS)

        return take

    method(Layout, "take", around)


@mutant()
def captures_are_given_slots_that_are_in_use() -> None:
    method(arenas.Arena, "before_capture", lambda original: lambda arena: arena._layout.reclaim(lambda: None))


@mutant()
def an_arena_is_closed_without_order() -> None:
    method(arenas.Arena, "_order", lambda original: lambda *_: None)


@mutant()
def record_stream_holds_nothing() -> None:
    method(RecordedUses, "add", lambda original: lambda *_, **how: True)


@mutant()
def what_sees_captures_stays_in_place() -> None:
    everywhere(captures.unwatch, lambda who=None: None)


@mutant()
def what_has_failed_is_released() -> None:
    method(ledger.Ledger, "is_idle", lambda original: lambda *_: True)


def found(name: str, seed: int = 1) -> dict[str, Any]:
    """Return after how many programs the mutant is found, and by what; an empty ``by`` if it is not."""
    breaks, backend = MUTANTS[name]

    def search() -> dict[str, Any]:
        breaks()
        for number in range(BOUND):
            _, failure = run_one(seed, number, backend)
            if failure is not None:
                by = type(failure).__name__ if isinstance(failure, (Violation, Loss)) else ""
                return {"programs": number + 1, "by": by, "reason": f"{type(failure).__name__}: {failure}"[:200]}
        return {"programs": BOUND, "by": "", "reason": "it was not found"}

    return {"name": name, **(front.forked(search) or {"programs": 0, "by": "", "reason": "it has died"})}


def main() -> int:
    parser = argparse.ArgumentParser(description="Programs through the front door find each safecomm that is wrong.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; all if there are none")
    parser.add_argument("--json", type=Path, help="a file to write what came of it to")
    options = parser.parse_args()
    front_programs.quiet()
    ended = []
    for name in options.names or MUTANTS:
        ended.append(found(name))
        print(json.dumps(ended[-1]), flush=True)
    if options.json:
        front_programs.write(options.json, *ended)
    return not all(said["by"] for said in ended)


if __name__ == "__main__":
    sys.exit(main())
