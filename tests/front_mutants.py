"""Programs through the front door find a safecomm that is wrong: each function here breaks one of its rules.

    python tests/front_mutants.py            # all, and how many programs each took
    python tests/front_mutants.py NAME ...

A mutant counts as found by ``Violation`` or ``Loss`` and by nothing else. Each runs in a fork of its own, so that
what it leaves behind is nobody's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import front
import front_programs
from front_programs import run_one
from turns import TurnLock

from safecomm import _torch
from safecomm.arena import arena as arenas
from safecomm.arena.free_list import FreeList
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import ALIGNMENT, NO_STREAMS, SizeClass
from safecomm.collectives import bucketed, coalesced, general, holding, lists, point_to_point, routes, takers, tensors
from safecomm.core import captures, holds, ledger, uses
from safecomm.core import work as works
from safecomm.core.stream_order import StreamOrder
from safecomm.errors import CaptureBoundaryError

BOUND = 1500
"""Programs within which a mutant is to be found."""

MUTANTS: dict[str, tuple[Callable[[], None], str]] = {}
"""By name: what breaks the rule, and the backend of the programs."""


def mutant(*backends: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(breaks: Callable[[], None]) -> Callable[[], None]:
        for backend in backends or ("nccl",):
            MUTANTS[breaks.__name__ + f"_{backend}" * (len(backends) > 1)] = breaks, backend
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


def holding_less(less: Callable[[holding.Call, Any], list[Any]], *modules: Any) -> None:
    """Have calls that come to their end in ``modules``, by default in all, hold the tensors that ``less`` gives."""
    original = holding.finish

    def finish(call: holding.Call, answer: object) -> Any:
        call.tensors = less(call, answer)
        return original(call, answer)

    if not modules:
        everywhere(original, finish)
    for module in modules:
        assert module.finish is original
        module.finish = finish


@mutant()
def a_work_of_the_general_way_is_not_held() -> None:
    holding_less(lambda *_: [], general, point_to_point, takers)


@mutant()
def a_list_is_held_without_its_last_tensor() -> None:
    holding_less(lambda call, answer: call.tensors if answer is None else call.tensors[:-1], lists)


@mutant()
def a_list_is_held_by_its_first_tensor() -> None:
    holding_less(lambda call, answer: call.tensors if answer is None else call.tensors[:1], lists)


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
    coalesced._Together.tensors = property(lambda self: [*self.given, *self.others][:1])  # type: ignore[assignment]


@mutant()
def a_region_of_one_call_is_held_by_nothing() -> None:
    original, single = coalesced._Manager._end_single, []
    holding_less(lambda call, _: [] if single else call.tensors, coalesced)

    def end(self: Any, *given: Any) -> bool:
        single.append(self)
        try:
            return original(self, *given)
        finally:
            single.pop()

    coalesced._Manager._end_single = end  # type: ignore[method-assign]


@mutant()
def a_synchronous_call_makes_no_handoff() -> None:
    ledger.LEDGER.hand_off = lambda *_: None


@mutant()
def a_synchronous_call_hands_off_its_first_storage_alone() -> None:
    original = ledger.LEDGER.hand_off
    ledger.LEDGER.hand_off = lambda op, group, index, storages, *more: original(op, group, index, storages[:1], *more)


@mutant()
def all_is_taken_for_memory_of_the_current_stream() -> None:
    everywhere(tensors.all_on_current_stream, lambda _: True)


@mutant()
def the_first_of_two_tells_the_allocation_stream_of_both() -> None:
    original = tensors.common_alloc_stream
    everywhere(original, lambda index, storages: original(index, storages[:1]))


@mutant()
def buckets_make_no_handoff() -> None:
    holding_less(lambda *_: [], bucketed)


@mutant()
def a_batch_holds_nothing_of_its_second_operation() -> None:
    holding_less(lambda call, _: call.tensors[:1], point_to_point)


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
    original = holding.finish

    def finish(call: holding.Call, answer: object) -> Any:
        with mock.patch.object(holding, "storages_of", return_value=()):
            return original(call, answer)

    general.finish = point_to_point.finish = finish  # type: ignore[attr-defined]


# --- the ledger -----------------------------------------------------------------------------------------------------


@mutant()
def a_wait_on_any_stream_releases() -> None:
    method(ledger.Ledger, "_release_waited", lambda original: lambda self, work: self.release(work))


@mutant()
def a_handoff_is_released_before_its_event() -> None:
    method(
        uses.Events,
        "sweep",
        lambda original: lambda self, *_, **how: self.ledger.release_all(self.holds),
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
def a_graph_gives_back_its_slots_when_it_is_captured() -> None:
    def around(original: Any) -> Any:
        def seal(self):  # type: ignore[no-untyped-def]
            original(self)
            self._leave_slots()

        return seal

    method(captures.CapturedGraph, "seal", around)


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
    method(uses.Uses, "add_of_graph", lambda original: lambda *_: None)


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
    method(uses.Uses, "record", lambda original: lambda *_, **how: True)


@mutant()
def what_sees_captures_stays_in_place() -> None:
    everywhere(captures.unwatch, lambda who=None: None)


@mutant("nccl", "gloo")
def what_has_failed_is_released() -> None:
    method(ledger.Ledger, "is_idle", lambda original: lambda *_: True)


# --- works, handoffs and recorded uses ------------------------------------------------------------------------------


def never_released(told: Callable[[Any], bool]) -> None:
    kept = []

    def around(original: Any) -> Any:
        def release(self, hold):  # type: ignore[no-untyped-def]
            if told(hold):
                kept.append(hold.storages)
            original(self, hold)

        return release

    method(ledger.Ledger, "release", around)


@mutant("nccl", "gloo")
def works_are_never_released() -> None:
    never_released(lambda hold: isinstance(hold, ledger.WorkHold))


@mutant()
def recorded_uses_are_never_released() -> None:
    never_released(lambda hold: hold.op == "record_stream")


@mutant("nccl", "gloo")
def memory_goes_with_the_handle() -> None:
    def around(original: Any) -> Any:
        def hold(queue, work, *more):  # type: ignore[no-untyped-def]
            original(queue, work, *more)
            queue.holds.pop(work, None)
            return work

        return hold

    method(ledger.WorkQueue, "hold", around)


@mutant()
def works_end_in_the_order_in_which_they_were_made() -> None:
    def around(original: Any) -> Any:
        def waited(self, work):  # type: ignore[no-untyped-def]
            for earlier in list(work.queue.holds):
                if earlier is work:
                    break
                self._release_waited(earlier)
            original(self, work)

        return waited

    method(ledger.Ledger, "waited", around)


def released_without_order(complete: bool) -> None:
    """Have works of which a sweep finds that they are complete, or too far behind, be released as they are."""

    def around(original: Any) -> Any:
        def release_over(self, work):  # type: ignore[no-untyped-def]
            if work.inner.is_completed() == complete:
                self.release(work)
            else:
                original(self, work)

        return release_over

    method(ledger.Ledger, "_release_over", around)


@mutant()
def works_too_far_behind_are_released_without_order() -> None:
    released_without_order(complete=False)


@mutant()
def a_work_that_says_that_it_is_complete_is_believed() -> None:
    released_without_order(complete=True)


@mutant()
def handoffs_too_far_behind_are_released_without_order() -> None:
    def around(original: Any) -> Any:
        def order_and_release(self, hold, streams):  # type: ignore[no-untyped-def]
            self.ledger.release_all([hold])
            return set()

        return order_and_release

    method(uses.Uses, "order_and_release", around)


@mutant()
def handoffs_of_a_capture_are_released_without_order() -> None:
    def around(original: Any) -> Any:
        def order_and_release(self, hold, streams):  # type: ignore[no-untyped-def]
            if not hold.queue.capture:
                return original(self, hold, streams)
            self.ledger.release_all([hold])
            return set()

        return order_and_release

    method(uses.Uses, "order_and_release", around)


@mutant()
def staging_is_left_to_c10d() -> None:
    method(ledger.Ledger, "guard_staging", lambda original: lambda *_: None)


@mutant("gloo")
def what_can_be_waited_for_once_is_waited_for_again() -> None:
    def around(original: Any) -> Any:
        def holds(self, group=None):  # type: ignore[no-untyped-def]
            found = original(self, group)
            for hold in found:
                if isinstance(hold, ledger.WorkHold) and not hold.queue.pollable:
                    with contextlib.suppress(RuntimeError):
                        hold.inner.wait()
            return found

        return holds

    method(ledger.Ledger, "holds", around)


@mutant()
def a_record_is_the_end_of_a_use_that_goes_on() -> None:
    method(uses.Uses, "only_recorded", lambda original: lambda *_: True)


@mutant()
def memory_that_frees_itself_goes_at_once() -> None:
    method(uses.Uses, "freeing", lambda original: lambda *_, **how: [])


# --- what the program orders ----------------------------------------------------------------------------------------


@mutant()
def a_later_use_is_behind_an_event() -> None:
    def around(original: Any) -> Any:
        def recorded(self, index, stream, over=()):  # type: ignore[no-untyped-def]
            note = original(self, index, stream, over)
            return note and (note[0], dict.fromkeys(note[1], sys.maxsize))

        return recorded

    method(StreamOrder, "recorded", around)


@mutant()
def a_wait_is_for_what_is_recorded_later() -> None:
    def around(original: Any) -> Any:
        def waited(self, index, stream, note):  # type: ignore[no-untyped-def]
            original(self, index, stream, note)
            now = self._streams.capture(stream)
            _, known = self._behind.get((stream, index), (now, {}))
            self._behind[stream, index] = now, {**known, **dict.fromkeys(note[1], sys.maxsize)}

        return waited

    method(StreamOrder, "waited", around)


def waits_for_nothing(name: str) -> None:
    """Have that method of ``StreamOrder`` make no stream wait."""

    def around(original: Any) -> Any:
        def without(self, *given):  # type: ignore[no-untyped-def]
            with mock.patch.object(self._streams, "wait_event"):
                return original(self, *given)

        return without

    method(StreamOrder, name, around)


@mutant()
def the_note_of_an_event_is_believed() -> None:
    waits_for_nothing("_release")


@mutant()
def any_stream_that_waits_releases() -> None:
    def around(original: Any) -> Any:
        def release(self, queue, serial, index, stream):  # type: ignore[no-untyped-def]
            for hold in list(queue.holds):
                if hold.event is not None and hold.serial < serial:
                    self._ledger.release(hold)
            return False

        return release

    method(StreamOrder, "_release", around)


@mutant()
def an_event_is_where_it_was_recorded_first_as_well() -> None:
    everything: dict[Any, int] = {}

    def around(original: Any) -> Any:
        def recorded(self, index, stream, over=()):  # type: ignore[no-untyped-def]
            capture, known = original(self, index, stream, over) or (self._streams.capture(stream), {})
            everything.update(known)
            return (capture, dict(everything)) if everything else None

        return recorded

    method(StreamOrder, "recorded", around)


@mutant()
def what_is_captured_is_behind_what_runs() -> None:
    def around(original: Any) -> Any:
        def recorded(self, index, stream, over=()):  # type: ignore[no-untyped-def]
            capture, known = original(self, index, stream, over) or (self._streams.capture(stream), {})
            if (events := self._uses.queues.get((uses.Events, stream, index, 0))) is not None:
                known[events] = next(self._ledger.serials)
            return (capture, known) if known else None

        return recorded

    method(StreamOrder, "recorded", around)


@mutant()
def wait_stream_orders_nothing() -> None:
    waits_for_nothing("wait_stream")


@mutant()
def wait_stream_releases_what_is_of_other_streams() -> None:
    method(uses.Events, "allocated_on", lambda original: lambda self, _: list(self.eventless))


@mutant()
def events_are_recorded_on_the_current_stream() -> None:
    def around(original: Any) -> Any:
        def record_events(self):  # type: ignore[no-untyped-def]
            with mock.patch.object(self, "stream", self.ledger.streams.current(self.index)):
                original(self)

        return record_events

    method(uses.Events, "record_events", around)


@mutant()
def wait_stream_is_behind_what_comes_later() -> None:
    waits_for_nothing("wait_stream")


# --- captures, and two threads --------------------------------------------------------------------------------------


@mutant()
def in_a_capture_the_device_is_asked() -> None:
    method(ledger.Ledger, "capturing", lambda original: lambda *_: 0)


@mutant()
def a_wait_crosses_the_boundary_of_a_capture() -> None:
    method(ledger.Ledger, "check_boundary", lambda original: lambda *_: None)


@mutant()
def a_wait_on_another_stream_is_refused() -> None:
    def around(original: Any) -> Any:
        def check_boundary(self, work):  # type: ignore[no-untyped-def]
            if self.current(work.queue.index) != work.alloc_stream:
                raise CaptureBoundaryError
            return original(self, work)

        return check_boundary

    method(ledger.Ledger, "check_boundary", around)


@mutant("nccl", "gloo")
def a_wait_fails_because_another_call_has_failed() -> None:
    def around(original: Any) -> Any:
        def waited(self, work):  # type: ignore[no-untyped-def]
            original(self, work)
            if self.quarantine:
                raise RuntimeError

        return waited

    method(ledger.Ledger, "waited", around)


@mutant()
def staging_of_a_stream_that_is_captured_elsewhere_is_guarded() -> None:
    method(ledger.Ledger, "_staging_is_captured", lambda original: lambda *_: False)


def orders_streams_that_are_captured_elsewhere(kind: type[holds.Hold]) -> None:
    def around(original: Any) -> Any:
        def orderable(self, hold):  # type: ignore[no-untyped-def]
            streams = self.ledger.alloc_streams(hold)
            believed = isinstance(hold, kind) and not hold.queue.capture and None not in streams
            return streams if believed else original(self, hold)

        return orderable

    method(uses.Uses, "orderable", around)


@mutant()
def works_order_streams_that_are_captured_elsewhere() -> None:
    orders_streams_that_are_captured_elsewhere(ledger.WorkHold)


@mutant()
def handoffs_order_streams_that_are_captured_elsewhere() -> None:
    orders_streams_that_are_captured_elsewhere(uses.Use)


@mutant()
def all_memory_is_the_pool_of_the_graph() -> None:
    def around(original: Any) -> Any:
        def add(self, *given):  # type: ignore[no-untyped-def]
            with mock.patch.object(self, "_ledger") as asked:
                asked.streams.pool.return_value = self._pool
                original(self, *given)

        return add

    method(captures.CapturedGraph, "add", around)


@mutant()
def no_thread_waits_for_another() -> None:
    method(TurnLock, "acquire", lambda original: lambda *_: True)
    method(TurnLock, "release", lambda original: lambda _: None)


@mutant("nccl2")
def sends_and_receives_are_not_held() -> None:
    def around(original: Any) -> Any:
        def hold(self, work, op, inner, group, index, storages, frame, *, unordered=False, **how):  # type: ignore[no-untyped-def]
            held = () if unordered else storages
            return original(self, work, op, inner, group, index, held, frame, unordered=unordered, **how)

        return hold

    method(routes.Routes, "hold", around)


@mutant("nccl2")
def a_wait_is_not_relaxed() -> None:
    method(ledger.WorkQueue, "wait_for", lambda original: lambda queue, inner, timeout=None: inner.wait())


@mutant("nccl2")
def a_launch_is_not_relaxed() -> None:
    everywhere(holding.relaxed, lambda *_: contextlib.nullcontext())


@mutant("nccl2")
def a_future_is_asked_for_across_the_boundary_of_a_capture() -> None:
    def get_future(work):  # type: ignore[no-untyped-def]
        work.has_future = True
        return work.inner.get_future()

    works.Work.get_future = get_future  # type: ignore[method-assign]


# --- the places of an arena -----------------------------------------------------------------------------------------


def idle_is(told: Callable[[Any, bool], bool]) -> None:
    everywhere(arenas.idle, told)


@mutant()
def what_only_python_refers_to_is_idle() -> None:
    idle_is(lambda slot, _: _torch.storage_use_count(slot.cdata) == 2)
    everywhere(arenas.getrefcount, lambda _: arenas.UNUSED)


@mutant()
def what_only_tensors_refer_to_is_idle() -> None:
    idle_is(lambda slot, _: sys.getrefcount(slot.storage) <= arenas.UNUSED)
    arenas._use_count = lambda _: 2


@mutant()
def no_slot_is_idle() -> None:
    idle_is(lambda *_: False)
    arenas._use_count = lambda _: 0


@mutant()
def a_merged_range_was_used_on_the_streams_of_one_part() -> None:
    def around(original: Any) -> Any:
        def merged(free, start, end, after):  # type: ignore[no-untyped-def]
            first, last, (start, end, _) = original(free, start, end, after)
            return first, last, (start, end, after)

        return merged

    method(FreeList, "merged", around)


@mutant()
def a_graph_leases_no_slot() -> None:
    method(captures.CapturedGraph, "lease", lambda original: lambda *_: None)


@mutant()
def idle_slots_are_never_merged() -> None:
    method(Layout, "coalesce_free", lambda original: lambda *_: None)


@mutant()
def the_end_of_a_slot_is_free() -> None:
    def around(original: Any) -> Any:
        def take(layout, *given, **how):  # type: ignore[no-untyped-def]
            found = original(layout, *given, **how)
            if found is not None and found[0].end - found[0].start > ALIGNMENT:
                free = layout.buckets[found[0].size_class.bucket]
                first, last, merged = free.merged(found[0].end - ALIGNMENT, found[0].end, NO_STREAMS)
                free.ranges[first:last] = [merged]
            return found

        return take

    method(Layout, "take", around)


@mutant()
def a_slot_is_of_the_stream_of_the_block() -> None:
    method(arenas.Arena, "_alloc_stream_of", lambda original: lambda arena, pointer: arena._alloc_stream)


@mutant()
def any_slot_of_a_size_class_is_taken() -> None:
    method(SizeClass, "search", lambda original: lambda self, is_idle: self.slots.pop() if self.slots else None)


@mutant()
def a_range_that_a_request_fills_is_none_for_it() -> None:
    method(FreeList, "find", lambda original: lambda free, size, *usable: original(free, size + 1, *usable))


@mutant()
def a_request_without_room_looks_for_nothing_that_is_over() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            return (lambda **_: None) if name == "sweep" else getattr(ledger.LEDGER, name)

    arenas.LEDGER = Lazy()  # type: ignore[assignment]


def found(name: str, seed: int = 1) -> dict[str, Any]:
    """Return after how many programs the mutant is found, and by what; an empty ``by`` if it is not."""
    breaks, backend = MUTANTS[name]

    def search() -> dict[str, Any]:
        breaks()
        front_programs.warm_up()
        for number in range(BOUND):
            _, failure = run_one(seed, number, backend)
            if failure is not None:
                by = {"unsafe": "Violation", "lost": "Loss", "error": ""}[front_programs.kind_of(failure)]
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
