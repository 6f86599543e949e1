"""Hooks of a group see safecomm's calls as they see torch's (torch 2.14 and later)."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import ALL, NOT_ON_GLOO, Setting, bits, finish
from ranks import on

import safecomm

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

    def entries(dist):
        hook = c10d.FlightRecorderHook.attach(stock.group.WORLD, [0, 1])
        before = len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", []))
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
        found = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])[before:]
        hook.remove()
        return [(one["profiling_name"], one["input_sizes"], one["output_sizes"], one["input_dtypes"]) for one in found]

    theirs = entries(stock)
    assert len(theirs) == 8
    assert entries(safecomm) == theirs
