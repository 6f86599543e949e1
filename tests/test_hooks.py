"""Hooks of a group see safecomm's calls as they see torch's (torch 2.14 and later)."""

import _thread
import contextlib
import functools
import re
import warnings

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import ALL, NOT_ON_GLOO, Setting, bits, finish
from ranks import launch, on, until
from torch.utils._python_dispatch import TorchDispatchMode
from watching import Log

import safecomm
from safecomm._torch.versions import HERE
from safecomm.peers import low_latency

SETTINGS = (
    Setting(),
    Setting(asynchronous=True),
    Setting(dtype=torch.complex64, asynchronous=True),
    Setting(shape=(3, 5), layout="strided"),
)


class Seen:
    """What hooks of the default group saw: which call, of which tensors, with what in them."""

    def __enter__(self):
        self.calls = []
        self.tensors = []
        group = stock.group.WORLD
        group.register_pre_hook(1, self._before)
        group.register_post_hook(1, self._after)
        return self

    def __exit__(self, *_):
        stock.group.WORLD.unregister_pre_hook(1)
        stock.group.WORLD.unregister_post_hook(1)

    def _before(self, call):
        given = [*flat(call.input_tensors), *flat(call.output_tensors)]
        self.tensors.append([tensor.data_ptr() for tensor in given])
        # What is in an output before the call is nobody's business, and in pieces it may be anything.
        self.calls.append(
            (
                "before",
                call.name.name,
                call.async_op,
                call.root,
                [(tuple(one.shape), one.dtype, bits(one)) for one in flat(call.input_tensors)],
                [(tuple(one.shape), one.dtype) for one in flat(call.output_tensors)],
            )
        )

    def _after(self, call):
        self.calls.append(("after", call.name.name, call.async_op, call.work is not None))


def flat(tensors):
    return [one for item in tensors for one in (flat(item) if isinstance(item, (list, tuple)) else [item])]


def seen(dist, call, setting):
    """Return what hooks saw of a call, and whether the tensors that they saw lie in those that it was given."""
    with Seen() as hooks, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):  # what a call raises, test_collectives compares
            returned, tensors = call(dist, setting)
            finish(returned)
            spans = [(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors]
            hooks.calls.append([[any(a <= p < a + max(n, 1) for a, n in spans) for p in one] for one in hooks.tensors])
    return hooks.calls


@pytest.mark.parametrize("name", sorted(set(ALL) - set(NOT_ON_GLOO)))
@on(2)
def test_hooks_see_each_call_as_torchs_s8(name):
    for setting in SETTINGS:
        ours, theirs = seen(safecomm, ALL[name], setting), seen(stock, ALL[name], setting)
        assert ours == theirs, setting


@on(2)
def test_hooks_see_what_is_launched_in_another_form_as_it_is_launched_s8():
    with Seen() as hooks, safecomm.bucketed():
        for _ in range(3):
            safecomm.all_reduce(torch.ones(4))
    names = [(call[1], call[4][0][0]) for call in hooks.calls if call[0] == "before"]
    assert names == [("ALLREDUCE", (12,))]


@on(2)
def test_a_hook_that_raises_stops_the_call_and_nothing_is_left_held_s8():
    def refuse(_):
        raise RuntimeError("refused by a hook")

    group = stock.group.WORLD
    group.register_pre_hook(2, refuse)
    try:
        for dist in (stock, safecomm):
            for asynchronous in (False, True):
                with pytest.raises(RuntimeError, match="refused by a hook"):
                    dist.all_reduce(torch.ones(4), async_op=asynchronous)
    finally:
        group.unregister_pre_hook(2)
    assert safecomm.pending() == []
    tensor = torch.ones(4)
    safecomm.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4


@on(2)
def test_the_check_for_nan_sees_the_calls_s8():
    hook = c10d.NanCheckHook.attach(stock.group.WORLD)
    try:
        for call in (
            lambda dist: dist.all_reduce(torch.tensor([1.0, float("nan")])),
            lambda dist: dist.all_gather_single(torch.zeros(4), torch.tensor([1.0, float("nan")]), async_op=True),
            lambda dist: dist.reduce_scatter_single(torch.zeros(1), torch.tensor([1.0, float("nan")])),
        ):
            for dist in (stock, safecomm):
                with pytest.raises(RuntimeError, match=r"(?i)nan"):
                    call(dist)
    finally:
        hook.remove()
    assert safecomm.pending() == []


@on(2)
def test_the_flight_recorder_has_the_same_entries_s8():
    import pickle

    def recorded():
        return pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])

    def entries(dist):
        hook = c10d.FlightRecorderHook.attach(stock.group.WORLD, [0, 1])
        before = max((one["record_id"] for one in recorded()), default=-1)  # it keeps the newest 2,000
        tensor, whole = torch.ones(4), torch.ones(8)
        for asynchronous in (False, True):
            for work in (
                dist.all_reduce(tensor, async_op=asynchronous),
                dist.all_gather_single(whole, tensor, async_op=asynchronous),
                dist.reduce_scatter_single(tensor, whole, async_op=asynchronous),
                dist.broadcast(tensor, 0, async_op=asynchronous),
            ):
                if work is not None:
                    work.wait()
        found = [one for one in recorded() if one["record_id"] > before]
        hook.remove()
        return [(one["profiling_name"], one["input_sizes"], one["output_sizes"], one["input_dtypes"]) for one in found]

    theirs = entries(stock)
    assert len(theirs) == 8
    assert entries(safecomm) == theirs


# --- patch(strict=True) counts what hooks see ------------------------------------------------------------------------


def names_and_lines():
    """Return what went past: the name of each call and the function that it came from, and how often."""
    return {(line.split()[0], line.rsplit(" in ", 1)[1]): count for line, count in safecomm.bypassed().items()}


@on(2)
def test_strict_counts_each_call_of_cpp_once_at_the_line_of_the_program():
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group, mesh = stock.group.WORLD, init_device_mesh("cpu", (2,))
    compiled = torch.compile(lambda tensor: functional.all_reduce(2 * tensor, "sum", group) + 1, backend="aot_eager")

    def by_functional():
        return functional.all_reduce(torch.ones(4), "sum", group).wait()

    def by_dtensor():
        return distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor()

    def by_compiler():
        return compiled(torch.ones(4))

    def by_python():
        group.broadcast([torch.ones(4)], stock.BroadcastOptions()).wait()
        return torch.tensor([2.0] * 4)

    compiled(torch.ones(4))
    with safecomm.patched(strict=True):
        assert by_functional().tolist() == [2.0] * 4
        assert by_dtensor().tolist() == [1.0] * 4
        assert by_compiler().tolist() == [5.0] * 4
        by_python()
        by_python()
    by_functional()
    assert names_and_lines() == {
        ("allreduce", "by_functional"): 1,
        ("allgather" if HERE < "2.15" else "allgather_into_tensor_coalesced", "by_dtensor"): 1,
        ("allreduce", "<lambda>"): 1,
        ("broadcast", "by_python"): 2,
    }


@on(2)
def test_strict_counts_what_the_reducer_of_ddp_launches():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))

    def backward():
        model(torch.ones(2, 3)).sum().backward()

    backward()  # the first rebuilds the buckets, and tells the other ranks
    backward()

    with safecomm.patched(strict=True):
        for _ in range(3):
            backward()
    assert names_and_lines() == {("allreduce", "backward"): 3}


class Mode(TorchDispatchMode):
    """Sees each operation, and lets another function of the program go on with it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return go_on(function, args, kwargs or {})


def go_on(function, args, kwargs):
    return function(*args, **kwargs)


@on(2)
def test_strict_counts_no_call_of_safecomm():
    tensor, whole = torch.ones(4), torch.ones(8)

    def calls(dist):
        for asynchronous in (False, True):
            for work in (
                dist.all_reduce(tensor, async_op=asynchronous),
                dist.all_gather_single(whole, tensor, async_op=asynchronous),
                dist.reduce_scatter_single(tensor, whole, async_op=asynchronous),
                dist.all_gather(list(whole.chunk(2)), tensor, async_op=asynchronous),
                dist.broadcast(tensor, 0, async_op=asynchronous),
            ):
                if work is not None:
                    work.wait()
        with dist._coalescing_manager(async_ops=True) as works:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor)
        works.wait()

    def functional():
        return torch.distributed._functional_collectives.all_reduce(tensor, "sum", stock.group.WORLD).wait()

    with safecomm.patched(strict=True):
        for dist in (stock, safecomm):
            calls(dist)
            with safecomm.bucketed():
                dist.all_reduce(tensor)
                dist.all_reduce(tensor)
            with contextlib.closing(safecomm.Arena(1 << 16, device="cpu")) as arena, safecomm.use_arena(arena):
                dist.all_gather([torch.empty(4), torch.empty(4)], tensor)
        safecomm.functional.all_reduce(tensor.clone().requires_grad_()).sum().backward()
        stock.barrier()
        with Mode():
            calls(safecomm)
        with safecomm.leaks.watch(torch.nn.Linear(1, 1)):
            calls(safecomm)
        assert safecomm.bypassed() == {}
        with Mode():
            functional()
        with safecomm.leaks.watch(torch.nn.Linear(1, 1)):
            functional()
        assert names_and_lines() == {("allreduce", "functional"): 2}


@on(2)
def test_strict_sees_groups_that_are_made_later_and_leaves_all_of_them_alone_in_the_end():
    def call(group):
        torch.distributed._functional_collectives.all_reduce(torch.ones(4), "sum", group).wait()

    register = c10d._register_process_group
    with safecomm.patched(strict=True):
        new = stock.new_group([0, 1])
        split = stock.split_group(stock.group.WORLD, [[0, 1]])
        for group in (stock.group.WORLD, new, split):
            call(group)
        gone = stock.new_group([0, 1])
        call(gone)
        stock.destroy_process_group(gone)
    assert names_and_lines() == {("allreduce", "call"): 4}
    assert c10d._register_process_group is register
    later = stock.new_group([0, 1])
    for group in (stock.group.WORLD, new, split, later):
        call(group)
    assert names_and_lines() == {("allreduce", "call"): 4}
    for group in (new, split, later):
        stock.destroy_process_group(group)


@on(2)
def test_strict_counts_a_call_from_a_thread_without_python():
    group, tensor = stock.group.WORLD, torch.ones(4)
    with safecomm.patched(strict=True):
        _thread.start_new_thread(functools.partial(group.allreduce, [tensor]), ())
        until(lambda: tensor[0] == 2)
        assert safecomm.bypassed() == {"allreduce in a thread of C++": 1}


KEPT = []


def _ends_without_undoing(_):
    safecomm.patch(strict=True)
    KEPT.append(stock.group.WORLD)
    torch.distributed._functional_collectives.all_reduce(torch.ones(4), "sum", stock.group.WORLD).wait()
    assert len(safecomm.bypassed()) == 1


def test_a_process_ends_cleanly_with_the_hooks_of_strict_on_s7():
    for ended in launch(2, _ends_without_undoing):
        ended.check()


# --- low_latency(), whose calls no hook sees --------------------------------------------------------------------------


class _NoStaging:
    """Where switching on gets to memory of the peers, nothing was against it before."""

    def __init__(self, *_):
        raise MemoryError("it got this far")


@on(2)
def test_a_hook_of_the_program_on_any_rank_keeps_low_latency_away_s8():
    class Hook:
        def __call__(self, call):
            pass

    group = stock.group.WORLD
    low_latency.STAGINGS["gloo"] = _NoStaging

    def reason():
        with Log(), safecomm.low_latency() as low:
            return low.reason

    try:
        recorder = c10d.FlightRecorderHook.attach(group, [0, 1])
        with safecomm.patched(strict=True), Mode():
            assert reason() == "no memory that peers can store into: it got this far"
        recorder.remove()
        for register, unregister in (
            (group.register_pre_hook, group.unregister_pre_hook),
            (group.register_post_hook, group.unregister_post_hook),
        ):
            for hook, name in ((lambda call: None, "<lambda>"), (Hook(), "__call__")):
                if stock.get_rank() == 1:
                    register(5, hook)
                found = reason()
                unregister(5)
                assert re.fullmatch(rf"the program has hooks on it.*test_hooks.py:\d+ in {name}", found), found
        assert reason() == "no memory that peers can store into: it got this far"
    finally:
        del low_latency.STAGINGS["gloo"]
