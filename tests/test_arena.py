"""The arena's single promises, on the CPU: places, lives, limits, sizes, and what it says when it is used wrongly."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import threading

import numpy
import pytest
import torch
import torch.multiprocessing
from ranks import on, until
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

import safecomm
from safecomm import Arena, ArenaError, ArenaFullError, _torch, use_arena
from safecomm.arena import arena as module
from safecomm.arena import free_list as free_list_module
from safecomm.arena import layout as layout_module
from safecomm.arena import size_class as size_class_module
from safecomm.arena import use
from safecomm.arena.arguments import bytes_of
from safecomm.arena.layout import Layout
from safecomm.core.ledger import LEDGER


@pytest.fixture
def arena():
    arena = Arena(1 << 20, "cpu")
    yield arena
    arena.close()


# --- places ------------------------------------------------------------------------------------------------


def test_a_buffer_is_what_torch_empty_gives(arena):
    for size in [(3, 5), ((3, 5),), ([3, 5],), (torch.Size([3, 5]),), (15,)]:
        for dtype in (None, torch.bfloat16, torch.int64, torch.bool):
            ours, theirs = arena.empty(*size, dtype=dtype), torch.empty(*size, dtype=dtype)
            assert (ours.shape, ours.dtype, ours.stride(), ours.device) == (
                theirs.shape, theirs.dtype, theirs.stride(), theirs.device,
            )  # fmt: skip
            assert not ours.requires_grad
            assert ours.is_leaf
            assert not ours._is_view()
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            assert arena.owns(ours)
            assert arena.offset(ours) % 512 == 0
    scalar = arena.empty((), dtype=torch.float32)
    assert scalar.shape == ()


def test_the_default_type_is_the_one_of_now(arena):
    assert arena.empty(4).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert arena.empty(4).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_same_program_gets_the_same_places_in_every_step_and_run():
    def step(arena):
        first = arena.empty(1000)
        second = arena.empty(3000, dtype=torch.bfloat16)
        places = [arena.offset(first), arena.offset(second)]
        del first
        for _ in range(3):
            third = arena.empty(1000)
            places.append(arena.offset(third))
        held = [arena.empty(500) for _ in range(20)]
        return places + [arena.offset(one) for one in held]

    runs = []
    for _ in range(2):
        arena = Arena(1 << 20, "cpu")
        runs.append([step(arena) for _ in range(4)])
        arena.close()
    assert runs[0] == runs[1]
    assert runs[0][1] == runs[0][2] == runs[0][3], "each step gets the places of the one before"


def test_the_block_is_allocated_once_and_nothing_after(arena):
    pointer = arena._block.data_ptr()
    for _ in range(3):
        kept = [arena.empty(n) for n in (10, 1000, 100_000)]
        del kept
    assert arena._block.data_ptr() == pointer
    assert arena.stats().fallbacks == 0
    assert arena.stats().high_water <= 512 + 4096 + 400_384


# --- lives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[3:],
        lambda t: t.view(8, 8),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.untyped_storage(),
        lambda t: t.numpy(),
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: memoryview(t.numpy()),
        lambda t: torch.nn.Parameter(t),
        lambda t: (t.requires_grad_() * t).grad_fn,
    ],
    ids=["view", "reshape", "detach", "data", "storage", "numpy", "dlpack", "memoryview", "parameter", "saved"],
)
def test_whatever_refers_to_the_storage_keeps_the_slot_and_nothing_else_does(arena, hold):
    tensor = arena.empty(64)
    place = arena.offset(tensor)
    kept = hold(tensor)
    del tensor
    assert arena.stats().in_use == 512
    other = arena.empty(64)
    assert arena.offset(other) != place
    del kept, other
    assert arena.stats().in_use == 0
    again = [arena.empty(64), arena.empty(64)]
    assert place in map(arena.offset, again)


def test_giving_a_tensor_other_memory_frees_its_slot(arena):
    tensor = arena.empty(64)
    tensor.data = torch.empty(1)
    assert arena.stats().in_use == 0


def test_the_python_object_of_a_storage_is_not_its_life(arena):
    tensor = arena.empty(64)
    place = arena.offset(tensor)
    for _ in range(3):
        tensor.untyped_storage()
    assert arena.offset(arena.empty(64)) != place
    del tensor
    assert arena.stats().in_use == 0


def test_a_new_buffer_has_no_history_of_autograd(arena):
    first = arena.empty(4)
    first.add_(1)
    del first
    second = arena.empty(4)
    assert second._version == 0


def test_threads_never_share_a_buffer(arena):
    wrong = []

    def run(value):
        for _ in range(3000):
            tensor = arena.empty(16, dtype=torch.int64)
            tensor.fill_(value)
            other = arena.empty(16, dtype=torch.int64)
            other.fill_(-value)
            if not (bool((tensor == value).all()) and bool((other == -value).all())):
                wrong.append(value)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.stats().in_use == 0


@on(2)
def test_a_running_collective_keeps_its_slot():
    arena = Arena(1 << 16, "cpu")
    tensor = arena.empty(64).fill_(1.0)
    place = arena.offset(tensor)
    work = safecomm.all_reduce(tensor, async_op=True)
    del tensor
    other = arena.empty(64)
    assert arena.offset(other) != place
    assert "all_reduce from " in arena.map()
    work.wait()
    del work
    until(lambda: arena.stats().in_use == 512)  # gloo's thread lets go a moment after the wait
    del other
    arena.close()


def test_a_slot_counts_as_nobodys_where_the_ledger_asks(arena):
    """What the arena keeps is nobody who uses it: the ledger gives back what only it still refers to."""
    tensor = arena.empty(64)
    storage = tensor.untyped_storage()
    assert not _torch.only_holder(storage)
    del tensor
    assert _torch.only_holder(storage)
    del storage
    assert arena.stats().in_use == 0


# --- full ----------------------------------------------------------------------------------------------------


def test_a_full_arena_falls_back_and_says_once_what_would_have_been_enough(caplog):
    caplog.set_level(logging.WARNING, "safecomm")
    arena = Arena(4096, "cpu")
    kept = [arena.empty(512, dtype=torch.uint8) for _ in range(8)]
    more = [arena.empty(1000, dtype=torch.uint8) for _ in range(3)]
    assert not any(map(arena.owns, more))
    assert len(caplog.records) == 1
    assert "5120 would be enough" in caplog.text
    assert "test_arena.py" in caplog.text
    stats = arena.stats()
    assert (stats.fallbacks, stats.fallback_bytes, stats.enough) == (3, 3000, 4096 + 3 * 1024)
    del kept, more
    arena.close()


def test_a_full_arena_raises_where_that_is_asked_for():
    arena = Arena(4096, "cpu", full="raise")
    with pytest.raises(ArenaFullError, match=r"Arena\.empty\(\[8192\], torch\.uint8\) at .*test_arena.*8192 would be"):
        arena.empty(8192, dtype=torch.uint8)
    kept = arena.empty(4096, dtype=torch.uint8)
    with pytest.raises(ArenaFullError, match="4608 would be enough"):
        arena.empty(1)
    del kept
    assert arena.owns(arena.empty(4096, dtype=torch.uint8)), "nothing was lost"
    arena.close()


@pytest.mark.parametrize("full", ["fallback", "raise"])
def test_who_can_do_without_gets_a_slot_or_nothing_and_nothing_is_counted(full, caplog):
    caplog.set_level(logging.WARNING, "safecomm")
    arena = Arena(4096, "cpu", full=full)
    found = arena.if_room((2, 256), torch.float32)
    assert arena.owns(found)
    assert (found.shape, found.dtype) == ((2, 256), torch.float32)
    assert arena.if_room((513,), torch.float32) is None
    assert arena.if_room((1 << 20,), torch.float32) is None
    place = arena.offset(found)
    del found
    again = arena.if_room((2, 256), torch.float32)
    assert arena.offset(again) == place
    stats = arena.stats()
    assert (stats.fallbacks, stats.fallback_bytes, stats.enough, stats.in_use) == (0, 0, 4096, 2048)
    assert caplog.records == []
    del again
    arena.close()
    assert arena.if_room((1,), torch.float32) is None


def test_who_can_do_without_takes_shelves_apart_only_where_that_makes_room():
    arena = Arena(8192, "cpu", full="raise")
    kept = [arena.empty(2048, dtype=torch.uint8) for _ in range(4)]
    del kept[1:]
    before = dict(arena._layout.live)
    assert len(before) == 4
    assert arena.if_room((7000,), torch.uint8) is None
    assert arena._layout.live == before, "the idle slots stay on their shelf"
    assert not arena._layout.buckets[""].fragmented
    assert arena.owns(arena.if_room((6000,), torch.uint8))
    del kept
    arena.close()


def test_a_registered_arena_is_not_for_who_can_do_without(arena):
    arena._backing = object()
    assert arena.if_room((4,), torch.float32) is None
    arena._backing = None


def test_unused_slots_are_taken_apart_before_anything_is_refused():
    arena = Arena(8192, "cpu", full="raise")
    for size in (512, 1024, 2048, 8192, 512, 4096):
        kept = [arena.empty(size, dtype=torch.uint8) for _ in range(8192 // size)]
        del kept
    arena.close()


def test_buckets_are_parts_of_their_own():
    arena = Arena(8192, "cpu", full="raise", buckets={"gather": 2048, "scatter": "1KiB"})
    gathered = arena.empty(2048, dtype=torch.uint8, bucket="gather")
    assert arena.offset(gathered) == 0
    with pytest.raises(ArenaFullError, match="bucket 'gather' of 2048 bytes"):
        arena.empty(1, bucket="gather")
    assert arena.offset(arena.empty(1024, dtype=torch.uint8, bucket="scatter")) == 2048
    assert arena.offset(arena.empty(5120, dtype=torch.uint8)) == 3072
    assert [bucket.name for bucket in arena.stats().buckets] == ["gather", "scatter", ""]
    assert [bucket.in_use for bucket in arena.stats().buckets] == [2048, 0, 0]
    assert "bucket gather, 0 to 2048: 2048 bytes in 1 slots" in str(arena)
    with pytest.raises(ValueError, match=r"bucket='nonsense'.*gather"):
        arena.empty(1, bucket="nonsense")
    del gathered
    arena.close()


def test_what_is_cached_is_counted_in_each_bucket():
    """The last one had none, because the idle slots of all buckets were freed to look at the first."""
    arena = Arena(8192, "cpu", buckets={"gather": 2048})
    for bucket in ("gather", ""):
        arena.empty(1024, dtype=torch.uint8, bucket=bucket)
    assert [(bucket.name, bucket.cached) for bucket in arena.stats().buckets] == [("gather", 1024), ("", 1024)]
    arena.close()


# --- what size is enough ---------------------------------------------------------------------------------------


def varied(length):
    """Buffers of a step with sequences of this length."""
    gathered = safecomm.empty(length, 7)
    scattered = safecomm.empty(length, 3, dtype=torch.bfloat16)
    del gathered
    kept = [safecomm.empty(length) for _ in range(3)]
    reduced = safecomm.empty(length, 5)
    del scattered, kept, reduced


def layered(length):
    """A layer's buffers are two for what is gathered, one for what is scattered, and the latter of all layers live."""
    part = safecomm.empty(length, 512)
    kept = []
    for _ in range(8):
        whole, product = safecomm.empty(length, 1024), safecomm.empty(length, 1024)
        kept.append(part)
        del whole
        part = safecomm.empty(length, 512)
        del product
    for _ in range(8):
        one = kept.pop()
        wholes, product = [safecomm.empty(length, 1024) for _ in range(2)], safecomm.empty(length, 1024)
        del wholes
        part = safecomm.empty(length, 512)
        del product, one


@pytest.mark.parametrize("nbytes", [512, 20_000])
@pytest.mark.parametrize("step", [varied, layered])
def test_the_size_that_is_enough_is_found_in_a_few_runs_of_all_lengths(step, nbytes):
    dice = random.Random(5)
    lengths = [dice.choice(range(1, 17)) for _ in range(100)]
    for _ in range(4):
        with use_arena(nbytes, "cpu") as arena:
            for length in lengths:
                step(length)
            stats = arena.stats()
        if not stats.fallbacks:
            break
        assert stats.enough > nbytes, "else no run says how to go on"
        nbytes = stats.enough
    assert stats.fallbacks == 0
    assert nbytes <= max(1.25 * stats.high_water, 20_480), "and not more than that"


def test_memory_that_was_needed_one_after_the_other_is_enough_once():
    arena = Arena(4096, "cpu", buckets={"gather": 2048})
    kept = arena.empty(2048, dtype=torch.uint8)
    for _ in range(3):
        arena.empty(4096, dtype=torch.uint8)
    assert arena.stats().enough == 4096 + 4096
    beside = arena.empty(4096, dtype=torch.uint8)
    arena.empty(4096, dtype=torch.uint8, bucket="gather")
    assert arena.stats().enough == 4096 + 2 * 4096
    del kept, beside
    arena.close()


# --- in use ----------------------------------------------------------------------------------------------------


def test_empty_is_of_the_innermost_arena_in_use_and_ordinary_without_one():
    assert safecomm.empty(4).device.type == "cpu"
    with use_arena("64KiB", "cpu") as arena:
        assert arena.owns(safecomm.empty(4))
        assert arena.owns(safecomm.empty(4, device="cpu"))
        assert use.in_use(-1) is arena
    assert use.in_use(-1) is None
    with pytest.raises(ArenaError, match="was closed"):
        arena.empty(4)


def test_use_arena_keeps_an_arena_whose_slots_are_in_use():
    with pytest.raises(ArenaError, match=r"Arena\.close\(\): 1 slots are in use"), use_arena("64KiB", "cpu") as arena:
        kept = arena.empty(4).fill_(3.0)
    assert kept.tolist() == [3.0] * 4
    del kept
    arena.close()


def test_an_exception_is_not_hidden_by_slots_in_use():
    kept = []

    def program():
        with use_arena("64KiB", "cpu"):
            kept.append(safecomm.empty(4))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program()
    kept.clear()
    module.OPEN[-1].close()


def test_the_environment_asks_for_an_arena(monkeypatch, caplog):
    monkeypatch.setenv("SAFECOMM_ARENA", "128KiB")
    use.read_environment()
    try:
        tensor = safecomm.empty(16, device="cpu")
        arena = use.in_use(-1)
        assert arena.nbytes == 128 << 10
        assert arena.owns(tensor)
        del tensor
        use.IN_USE.clear()
        arena.close()
        monkeypatch.setenv("SAFECOMM_ARENA", "plenty")
        use.read_environment()
        assert "SAFECOMM_ARENA='plenty'" in caplog.text
        assert use.in_use(-1) is None
    finally:
        monkeypatch.undo()
        use.read_environment()


def test_nothing_is_taken_from_an_arena_under_compile_or_in_a_dispatch_mode(arena):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert type(arena.empty(4)).__name__ == "FakeTensor"

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return arena.empty(4).fill_(1.0) + x

    assert compiled(torch.ones(4)).tolist() == [2.0] * 4
    assert arena.stats().high_water == 0


# --- the same on all ranks ---------------------------------------------------------------------------------------


@on(2)
def test_a_check_names_the_first_request_that_differs_between_ranks():
    import torch.distributed as stock

    arena = Arena(1 << 16, "cpu", check=stock.group.WORLD)
    for _ in range(3):
        tensor = arena.empty(100)
        del tensor
    arena.check()
    tensor = arena.empty(100)
    other = arena.empty(100 + stock.get_rank())
    third = arena.empty(7)
    with pytest.raises(ArenaError, match=r"request 1 since.*rank 0: 400 bytes at place 512.*rank 1: 404 bytes.*_arena"):
        arena.check()
    arena.check()
    assert "asked for at " in arena.map()
    del tensor, other, third
    if stock.get_rank() == 0:
        arena.empty(5)
    with pytest.raises(ArenaError, match=r"request 0 since.*rank 1: no more requests"):
        arena.check()
    arena.close()


# --- wrong use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"nbytes": 0}, ValueError, "Arena: nbytes=0"),
        ({"nbytes": -1}, ValueError, "Arena: nbytes=-1"),
        ({"nbytes": 1.5}, TypeError, "Arena: nbytes=1.5"),
        ({"nbytes": True}, TypeError, "Arena: nbytes=True"),
        ({"nbytes": "lots"}, ValueError, "Arena: nbytes='lots'"),
        ({"nbytes": "3 apples"}, ValueError, "Arena: nbytes='3 apples'"),
        ({"device": "meta"}, ValueError, "Arena(device='meta')"),
        ({"device": "nonsense"}, ValueError, "Arena(device='nonsense')"),
        ({"full": "shrug"}, ValueError, "Arena(full='shrug')"),
        ({"buckets": {"a": 1 << 20, "b": 1}}, ValueError, "must fit"),
        ({"buckets": {"": 1}}, ValueError, "need names"),
        ({"buckets": {"a": 0}}, ValueError, "bucket 'a'=0"),
        ({"register": ProcessGroup(0, 1)}, ValueError, 'Arena(register=...): expected full="raise"'),
        ({"register": ProcessGroup(0, 1), "full": "raise"}, ArenaError, "the group has no backend on cpu"),
    ],
)
def test_an_arena_that_can_not_be_is_refused(arguments, error, message):
    with pytest.raises(error) as raised:
        Arena(**{"nbytes": 1 << 20, "device": "cpu", **arguments})
    assert message in str(raised.value)
    assert not module.OPEN


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="there is no CUDA device here"):
        Arena(1 << 20, "cuda")


@pytest.mark.parametrize(
    ("size", "dtype", "error", "message"),
    [
        ((0,), None, ValueError, "no elements"),
        ((3, 0), None, ValueError, "no elements"),
        ((-1,), None, ValueError, "negative size"),
        (((2, -3),), None, ValueError, "negative size"),
        ((1.5,), None, TypeError, "shape of integers"),
        ((True,), None, TypeError, "shape of integers"),
        ((numpy.float64(2),), None, TypeError, "shape of integers"),
        (("4",), None, TypeError, "shape of integers"),
        ((4,), "float32", TypeError, "torch.dtype"),
        ((4,), float, TypeError, "torch.dtype"),
    ],
)
def test_a_request_that_can_not_be_is_refused_and_nothing_is_lost(arena, size, dtype, error, message):
    for _ in range(2):
        with pytest.raises(error, match=r"Arena\.empty") as raised:
            arena.empty(*size, dtype=dtype)
        assert message in str(raised.value)
    assert arena.stats().in_use == 0
    assert arena.owns(arena.empty(4))


def test_two_arenas_on_one_device_are_refused(arena):
    with pytest.raises(ArenaError, match="is open on this device; close"):
        Arena(1 << 20, "cpu")


def test_close_with_slots_in_use_is_refused_and_says_who_has_them(arena):
    kept = arena.empty(64).fill_(2.0)
    with pytest.raises(ArenaError, match=r"Arena\.close\(\): 1 slots are in use. Nothing was done.(?s:.*)1 tensors"):
        arena.close()
    assert kept.tolist() == [2.0] * 64
    assert arena.owns(arena.empty(64))


@pytest.mark.parametrize("operation", ["empty", "stats", "map", "check"])
def test_use_after_close_is_refused(operation):
    arena = Arena(4096, "cpu")
    arena.empty(4)
    block = StorageWeakRef(arena._block.untyped_storage())
    arena.close()
    arena.close()
    assert block.expired()
    assert not _torch.KEPT
    with pytest.raises(ArenaError, match="was closed"):
        getattr(arena, operation)(*([4] if operation == "empty" else []))
    assert str(arena) == "<Arena of 4096 bytes on cpu>"


def test_the_child_of_a_fork_has_no_arena(arena):
    kept = arena.empty(4).fill_(5.0)
    arena.empty(8)
    child = os.fork()
    if not child:
        status = 1
        try:
            for _ in range(2):
                with pytest.raises(ArenaError, match=r"Arena\.empty\(\): .* made before the fork"):
                    arena.empty(8)
            own = Arena(4096, "cpu")
            assert own.owns(own.empty(4))
            assert kept.tolist() == [5.0] * 4
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena.owns(arena.empty(8))


def test_sizes_are_read_as_people_write_them():
    assert bytes_of(7) == 7
    assert bytes_of("7") == 7
    assert bytes_of("256MiB") == 256 << 20
    assert bytes_of("1.5 GiB") == 3 << 29
    assert bytes_of("2kb") == 2000


def test_where_torch_makes_no_storages_there_is_no_arena(monkeypatch):
    monkeypatch.setattr(_torch, "MAKES_STORAGES", False)
    with pytest.raises(ArenaError, match="storages over given memory"):
        Arena(4096, "cpu")


def test_a_slot_made_in_inference_mode_can_be_saved_for_backward():
    with use_arena("1MiB", device="cpu"):
        with torch.inference_mode():
            safecomm.empty(4, 4, device="cpu")
        buffer = safecomm.empty(4, 4, device="cpu").fill_(2.0)
        x = torch.ones(4, 4, requires_grad=True)
        (x * buffer).sum().backward()
        assert x.grad.tolist() == [[2.0] * 4] * 4
        del buffer, x


def test_uses_that_overlap_without_nesting_leave_the_right_one():
    from safecomm.arena.use import in_use

    with use_arena("1MiB", device="cpu") as arena:
        first, second = use_arena(arena), use_arena(arena)
        first.__enter__()
        second.__enter__()
        first.__exit__(None)
        assert in_use(-1) is arena
        second.__exit__(None)
        assert in_use(-1) is arena
    assert in_use(-1) is None


# --- the layout by itself ----------------------------------------------------------------------------------


def asked(layout, used, kind, stream, capture=0, usable=lambda _: True):
    found = layout.take((kind,), 512, stream, capture, "", usable)
    if found is not None:
        layout.push(found[0])
        used.add(found[0])
    return found


def test_streams_that_take_turns_do_not_wait_for_each_other_while_there_is_room():
    used = set()
    layout = Layout(1 << 20, {}, lambda slot, _: slot not in used)
    for _ in range(4):
        for stream in (1, 2):
            assert not asked(layout, used, f"of {stream}", stream)[1]
            used.clear()


def test_a_capture_begins_with_what_nobody_has_to_be_waited_for():
    used = set()
    layout = Layout(1 << 20, {}, lambda slot, _: slot not in used)
    asked(layout, used, "another thread's", 1)
    used.clear()
    assert asked(layout, used, "captured", 5, 9, lambda after: not after) is not None


@pytest.mark.parametrize("fragmented", [False, True])
def test_looking_whether_all_are_idle_does_not_take_longer_with_each_slot(fragmented):
    used, looks = set(), []
    layout = Layout(1 << 20, {}, lambda slot, _: looks.append(slot) or slot not in used)
    layout.buckets[""].fragmented = fragmented
    last = asked(layout, used, 0, 1)[0]
    for kind in range(1, 1000):
        newer = asked(layout, used, kind, 1)[0]
        used.discard(last)
        last = newer
    assert len(looks) < 4000


# --- in the middle of a request ----------------------------------------------------------------------------


def test_a_request_of_a_finalizer_in_the_middle_of_another_gets_other_memory_s1():
    used, got = set(), []
    layout = Layout(4096, {}, lambda slot, _: slot not in used)

    def usable(_):
        if not got:
            got.append(layout.take("inner", 512, 1, 0, ""))
            layout.reclaim()
            layout.reclaim(lambda: None)
        return True

    slot, _ = asked(layout, used, "outer", 1, 0, usable)
    assert got == [None]
    assert (slot.start, slot.end) == (0, 512)
    assert asked(layout, used, "next", 1)[0].start == 512


class Cycle:
    """What only the garbage collector ends; asks for a buffer then."""

    def __init__(self, arena, got):
        self.arena, self.got, self.itself = arena, got, self

    def __del__(self):
        self.got.append(self.arena.empty(64))


def test_no_two_get_a_buffer_when_the_collector_runs_in_the_middle_s1(arena):
    got = []
    gc.collect()
    thresholds = gc.get_threshold()
    try:
        for number in range(1, 600):
            gc.disable()
            Cycle(arena, got)
            got.clear()
            if number % 50 == 0:
                gc.collect()
                arena._layout.reclaim()
            Cycle(arena, got)
            gc.set_threshold(gc.get_count()[0] + number % 23 + 1)  # it runs once, wherever in the request that is
            gc.enable()
            tensor = arena.empty(64 + number)
            assert tensor.data_ptr() not in [other.data_ptr() for other in got]
            del tensor
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.collect()
        got.clear()


def test_a_full_arena_that_raises_says_that_it_was_asked_in_the_middle_of_another_request():
    raising, said = Arena.__new__(Arena), []
    raising._start(torch.empty(4096, dtype=torch.uint8), -1, LEDGER.streams, "raise", {}, None)

    def usable(_):
        with pytest.raises(ArenaFullError, match="in the middle of another request") as error:
            raising.empty(64)
        said.append(error.value)
        with pytest.raises(ArenaError, match="in the middle of a request"):
            raising.close()
        return True

    assert raising._layout.take("outer", 512, 1, 0, "", usable) is not None
    assert len(said) == 1


def test_what_another_thread_has_in_hand_is_nobody_elses_s1():
    used = set()
    layout = Layout(512, {}, lambda slot, _: slot not in used)
    in_hand, _ = asked(layout, used, "kind", 1)
    used.clear()
    in_hand.size_class.slots.remove(in_hand)  # as Arena.empty() does, without the lock
    layout.reclaim()
    assert layout.live == {0: in_hand}
    del in_hand
    layout.reclaim()
    assert layout.live == {}


def test_what_was_not_put_in_order_yet_is_not_forgotten_s1():
    used = set()
    layout = Layout(512, {}, lambda slot, _: slot not in used)
    asked(layout, used, "first", 1)
    used.clear()
    # An exception comes, and it is neither put in order nor on a shelf.
    assert layout.take("second", 512, 2, 0, "")[1] == {1}
    assert layout.take("third", 512, 3, 0, "")[1] == {1, 2}


@pytest.mark.parametrize("event", ["call", "c_call", "c_return", "return"])
def test_an_exception_at_any_point_of_a_request_costs_no_memory_s4(event):
    """What belongs together is changed together: later requests are as before. ``Layout`` alone."""
    left, files = 0, {one.__file__ for one in (layout_module, free_list_module, size_class_module)}

    def profile(frame, what, _):
        nonlocal left
        code = frame.f_code
        if what == event and code.co_filename in files and code.co_name != "<genexpr>":  # whose end hides exceptions
            left -= 1
            if not left:
                raise InterruptedError

    when = 0
    while left <= 0:  # until a program ends before its turn comes
        when += 1
        left, used = when, set()
        layout = Layout(12 * 512, {}, lambda slot, _, used=used: id(slot) not in used)
        held = []

        def take(kind, size, stream, layout=layout, used=used, held=held):
            slot, _ = layout.take((kind,), size, stream, 0, "")
            used.add(id(slot))
            held.append(slot)
            layout.push(slot)

        sys.setprofile(profile)
        with contextlib.suppress(InterruptedError):
            for kind, size in [("a", 512), ("b", 1024), ("a", 512), ("c", 512), ("a", 512)]:
                take(kind, size, 1)
            used.difference_update([id(slot) for slot in held[::2]])
            layout.reclaim()
            take("d", 1536, 2)
            take("a", 512, 1)
            used.clear()
            layout.reclaim(lambda: None)
            take("e", 4096, 3)
        sys.setprofile(None)
        used.clear()
        held.clear()
        assert layout.largest("") == 12 * 512, when
        assert layout.live == {}
        assert layout.buckets[""].live_bytes == 0
        assert layout.buckets[""].starts == []
        assert not layout.changing
    assert when > 15


def test_who_is_looked_up_in_the_middle_of_a_harvest_is_still_found_s1(monkeypatch):
    used = set()
    layout = Layout(8 * 512, {}, lambda slot, _: slot not in used)
    slots = [asked(layout, used, "kind", 1)[0] for _ in range(8)]
    bisect = free_list_module.bisect.bisect
    used.clear()

    def found(*arguments):
        place = bisect(*arguments)
        layout.reclaim()  # a finalizer's
        return place

    monkeypatch.setattr(free_list_module.bisect, "bisect", found)
    assert [layout.at(place * 512 + 100) for place in range(8)] == slots


def test_waiting_for_the_device_forgets_nobody_who_came_meanwhile_s1():
    used, got = set(), []
    layout = Layout(4 * 512, {}, lambda slot, _: slot not in used)
    asked(layout, used, "kind", 1)
    used.clear()
    layout.reclaim(lambda: got.append(layout.take("kind", 512, 2, 0, "")))
    assert got == [None]
    assert layout.take("kind", 4 * 512, 3, 0, "")[1] == frozenset()


def test_what_is_given_back_meanwhile_is_no_stray_s1(monkeypatch, arena):
    """S1: a finalizer comes after the count of references: what that says must still be so when it is compared."""
    layout, count, done = arena._layout, layout_module.getrefcount, []
    held = [arena.empty(64) for _ in range(8)]
    (size_class,) = layout._size_classes.values()
    del held[1:]
    target = size_class.slots[0]
    size_class.first = size_class.slots[3]  # a step began there

    def counted(slot):
        found = count(slot) - surplus - (slot is target)
        if slot is target and not done:
            done.append(slot)
            held.clear()
            again = arena.empty(64)
            assert size_class.first is target
            assert again.data_ptr() == target.pointer
        return found

    surplus = 0
    monkeypatch.setattr(layout_module, "getrefcount", lambda slot: count(slot))
    (thing,) = only = [object()]
    surplus = layout_module.getrefcount(thing) - layout_module.HELD_ONCE  # a call of Python takes more
    del only, thing
    monkeypatch.setattr(layout_module, "getrefcount", counted)
    layout.reclaim()
    monkeypatch.undo()
    assert done
    assert (target.start in layout.live) == (target in size_class.slots or target in size_class.ready)
    tensors = [arena.empty(64 + number % 2) for number in range(60)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 60


def test_close_is_refused_while_a_thread_is_about_to_hand_out_a_slot_s1():
    arena = Arena(4096, "cpu")
    arena.empty(64)
    (size_class,) = arena._size_classes.values()
    in_hand = size_class.slots.pop()  # as Arena.empty() does, without the lock
    with pytest.raises(ArenaError, match="1 slots are in use"):
        arena.close()
    size_class.slots.append(in_hand)
    assert arena.empty(64).data_ptr() == in_hand.pointer
    arena.close()


@pytest.mark.parametrize("ask", [lambda arena: arena.empty(64), lambda arena: arena.if_room((64,), torch.float32)])
def test_who_waits_while_another_thread_closes_gets_none_of_its_memory_s1(ask):
    arena = Arena(4096, "cpu")
    lock = arena._layout.lock

    class Late:
        def __enter__(self):
            arena._layout.lock = lock
            arena.close()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    arena._layout.lock = Late()
    try:
        assert ask(arena) is None
    except ArenaError as error:
        assert "was closed" in str(error)  # noqa: PT017


def test_a_finalizer_in_the_middle_of_close_gets_none_of_its_memory_s1(monkeypatch):
    arena, got = Arena(4096, "cpu"), []
    coalesce_free = Layout.coalesce_free
    monkeypatch.setattr(Layout, "coalesce_free", lambda layout: got.append(arena.empty(64)) or coalesce_free(layout))
    arena.close()
    assert len(got) == 1
    assert not arena.owns(got[0])


def test_an_exception_while_a_slot_is_furnished_costs_no_memory_s4(monkeypatch):
    arena = Arena(4096, "cpu")
    for name in ("finalize", "KEPT"):
        with monkeypatch.context() as patch:
            if name == "finalize":
                patch.setattr(module.weakref, "finalize", lambda *_: 1 // 0)
            else:
                patch.setattr(_torch, "KEPT", type("Kept", (dict,), {"__setitem__": lambda *_: 1 // 0})(_torch.KEPT))
            with pytest.raises(ZeroDivisionError):
                arena.empty(64)
        assert arena.stats().in_use == 0
        assert arena.stats().buckets[0].largest_free == 4096
    arena.close()


# --- what takes a buffer out of the arena --------------------------------------------------------------------


def _read_twice(queue, answers, go_on):
    tensor = queue.get()
    answers.put(tensor.tolist())
    go_on.wait(60)
    answers.put(tensor.tolist())


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_what_another_process_reads_is_not_handed_out_again_s1(arena, strategy, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", strategy)
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # as the pools of ranks have it
    queue, answers, go_on = context.SimpleQueue(), context.SimpleQueue(), context.Event()
    process = context.Process(target=_read_twice, args=(queue, answers, go_on))
    process.start()
    sent = arena.empty(4).fill_(7.0)
    queue.put(sent)
    assert answers.get() == [7.0] * 4
    del sent
    others = [arena.empty(4).fill_(99.0) for _ in range(3)]
    go_on.set()
    assert answers.get() == [7.0] * 4
    process.join()
    assert all(map(arena.owns, others))


def test_a_buffer_that_is_shared_leaves_the_arena_and_its_slot_is_used_again(arena):
    place = arena.empty(4).data_ptr()
    shared = arena.empty(4).fill_(7.0)
    assert shared.data_ptr() == place
    view = shared[1:]
    shared.share_memory_()
    shared.share_memory_()  # a second time it stays
    assert shared.is_shared()
    assert not arena.owns(shared)
    assert _torch.only_holder(shared.untyped_storage()) is False
    # While anything has the storage, a call may still be writing to where it was.
    assert arena.stats().in_use == 512
    other = arena.empty(4).fill_(99.0)
    assert other.data_ptr() != place
    assert view.tolist() == [7.0] * 3
    del shared
    assert arena.stats().in_use == 1024
    del view, other
    assert arena.stats().in_use == 0
    assert arena.empty(4).data_ptr() == place


def test_memory_of_a_gpu_is_not_shared_with_other_processes_s1(arena, monkeypatch):
    buffer = arena.empty(4)
    monkeypatch.setattr(arena, "index", 0)
    for share in (buffer.share_memory_, buffer.untyped_storage()._share_cuda_):
        with pytest.raises(ArenaError, match=r"can't be shared with other processes(?s:.*)clone\(\)"):
            share()
    assert arena.owns(buffer)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_a_transform_of_torch_func_gets_ordinary_memory_and_leaves_nothing_behind_s8(arena, transform):
    for _ in range(2):  # with a slot of that kind, and without

        def function(x):
            buffer = arena.empty(4)
            buffer.copy_(x)
            return buffer.sum()

        transform(function)(torch.ones(4))
        after = arena.empty(4)
        assert arena.owns(after)
        assert after.fill_(2.0).numpy().tolist() == [2.0] * 4
        del after


# --- the ends of an arena ------------------------------------------------------------------------------------


@on(2)
def test_an_arena_that_nobody_uses_any_more_can_be_closed_while_gloo_lets_go():
    """Its threads drop their tensors a moment after they have said that the work is over."""
    from safecomm import functional

    for _ in range(300):
        with use_arena("64KiB", device="cpu"):
            functional.all_reduce(torch.ones(16))


def test_an_arena_is_closed_by_whoever_leaves_it_last():
    outer = use_arena("64KiB", "cpu")
    arena = outer.__enter__()
    with use_arena(arena), outer:
        outer.__exit__(None, None, None)
        assert arena.owns(safecomm.empty(4))
    assert arena.nbytes
    with pytest.raises(ArenaError, match="was closed"):
        arena.empty(4)
    with pytest.raises(ArenaError, match=r"use_arena\(\): <Arena of 65536 bytes on cpu> was closed"):
        outer.__enter__()
    with pytest.raises(RuntimeError, match="had not been entered"):
        outer.__exit__(None, None, None)
    assert not use.IN_USE


def test_integers_of_numpy_are_sizes(arena):
    assert arena.empty(numpy.int64(3), 2).shape == (3, 2)
    assert arena.empty((numpy.int32(3),)).shape == (3,)


def test_threads_enter_and_leave_at_the_same_time():
    arena = Arena("64KiB", "cpu")
    dice = random.Random(1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed = []

    def program():
        try:
            for _ in range(dice.randrange(300, 400)):
                with use_arena(arena), use_arena(arena):
                    assert use.IN_USE[-1] is arena
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=program) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert not use.IN_USE
    assert not use._order
    arena.close()


@pytest.mark.parametrize("step", ["_free_block", "forget"])
def test_a_close_that_an_exception_has_ended_can_be_made_again(monkeypatch, step):
    arena = Arena(4096, "cpu")
    owner = Arena if step == "_free_block" else Layout
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            arena.close()
    arena.close()
    assert -1 not in module.OPEN
    Arena(4096, "cpu").close()
