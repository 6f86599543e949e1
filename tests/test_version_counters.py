"""The version counters by which autograd knows what was written to are as torch.distributed leaves them (S8).

What torch 2.13 does on gloo, as increments of the outputs' versions by a call of two ranks. Inputs never change.

===================================================== ========= ============ ==============================
call                                                  at launch when it ends  by whom
===================================================== ========= ============ ==============================
all_reduce, reduce, broadcast, scatter                0         0            nobody: gloo writes to the address
all_to_all_single, send, recv, isend, irecv, a batch  0         0            nobody, likewise
reduce_scatter                                        1         1            a copy of the own part before gloo runs
reduce_scatter_single and its older names             0         1            a copy out of staging in gloo's thread
all_gather, gather, all_to_all                        0         1 of each    a copy into each tensor of the list
all_gather_single and its older names                 0         2            a copy into each part, one a rank, in views
all_gather_coalesced                                  0         1 of each    a copy into each tensor
all_reduce_coalesced                                  0         1 of each    a copy out of the flat buffer
a region of the three that have one                   0         as coalesced at the end of the region
===================================================== ========= ============ ==============================

It makes no difference whether the call is asynchronous; the copies are then done when ``wait()`` returns. Autograd
checks what is copied: an output that is a leaf which requires a gradient raises in those calls, and so does one of
inference mode outside of it. The calls that write to addresses do neither. What was raised in gloo's thread is raised
by ``wait()`` and by the group's next ``barrier()``, so the group is of no use any more.
"""

import contextlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as stock
from calls import MOVES, REDUCTIONS, Setting
from counters import GATHER, ROWS, SCATTER, Made, backward, differences, seen, version
from ranks import on

import safecomm


def arena():
    return safecomm.use_arena("1MiB", device="cpu")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ROWS)
@on(2)
def test_versions_and_gradients_are_torchs_s8(name, asynchronous):
    different = differences(stock, safecomm, rows=(name,), asynchronous=asynchronous)
    safecomm.drain(wait=True)
    assert different == [], different


@pytest.mark.parametrize("context", [arena, safecomm.avoid_record_streams, safecomm.patched])
@on(2)
def test_versions_are_torchs_in_contexts_that_say_nothing_of_them_s8(context):
    cases = [(name, asynchronous) for name in ROWS for asynchronous in (False, True)]
    expected = {case: seen(stock, case[0], Made(asynchronous=case[1])) for case in cases}
    with context():
        module = stock if context is safecomm.patched else safecomm
        found = {case: seen(module, case[0], Made(asynchronous=case[1])) for case in cases}
    safecomm.drain(wait=True)
    different = [(case, expected[case], found[case]) for case in cases if expected[case] != found[case]]
    assert different == [], different


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "gather"])
@on(2)
def test_lists_that_are_slices_of_one_buffer_share_its_version_s8(name, asynchronous):
    # Slices have the version of their buffer, so each copy into one of them counts for all.
    def call(module):
        buffer, given = torch.zeros(8), torch.arange(8.0)
        parts, pieces = list(buffer.chunk(2)), list(given.chunk(2))
        arguments = {
            "all_gather": (parts, pieces[0]),
            "reduce_scatter": (parts[0], pieces),
            "all_to_all": (parts, pieces),
            "gather": (pieces[0], parts if stock.get_rank() == 0 else None),
        }[name]
        work = getattr(module, name)(*arguments, async_op=asynchronous)
        if asynchronous:
            work.wait()
        return buffer.tolist(), buffer._version, [part._version for part in parts], given._version

    expected, found = call(stock), [call(safecomm)]
    with arena():
        found.append(call(safecomm))
    safecomm.drain(wait=True)
    assert found == [expected, expected], (found, expected)


@on(2)
def test_a_gather_into_a_saved_buffer_makes_the_backward_refuse_s8():
    # The program that shows what a version is for: the gradient would be made of what has come, not of what was there.
    for module in (stock, safecomm):
        weight, buffer = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
        loss = (weight * buffer).sum()
        getattr(module, GATHER)(buffer, torch.full((2,), 100.0), async_op=True).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- bucketed() ---------------------------------------------------------------------------------------------------


def _bucketed(name, count):
    """Return how much the versions of the outputs of ``count`` calls rose in a block, and losses that saved them."""
    outputs, losses = [], []
    for _ in range(count):
        weight, output = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
        losses.append((weight * output).sum())
        outputs.append(output)
    before = [version(output) for output in outputs]
    with safecomm.bucketed():
        for output in outputs:
            if name == "all_reduce":
                safecomm.all_reduce(output)
            else:
                getattr(safecomm, name)(output, torch.ones(2 if name == GATHER else 8))
    return [version(output) - old for output, old in zip(outputs, before, strict=True)], losses


@pytest.mark.parametrize("use_arena", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", GATHER, SCATTER])
@on(2)
def test_copies_out_of_a_bucket_count_as_changes_in_place_s8(name, use_arena):
    # More than one call shares a bucket; a single one is launched as it is, and does what torch's does.
    with arena() if use_arena else contextlib.nullcontext():
        for count in (2, 3):
            rises, losses = _bucketed(name, count)
            assert len(rises) == len(losses) == count
            assert all(rise > 0 for rise in rises), (count, rises)
            for loss in losses:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
        (alone,), _ = _bucketed(name, 1)
        output = torch.full((4,), 3.0)
        given = () if name == "all_reduce" else (torch.ones(2 if name == GATHER else 8),)
        getattr(stock, name)(output, *given)
        assert alone == output._version, (alone, output._version)


@on(2)
def test_what_is_not_put_off_in_a_block_has_torchs_versions_s8():
    for name in (*MOVES, "reduce", "reduce_scatter", "isend_and_irecv", "batch"):
        expected = seen(stock, name, Made(asynchronous=True))
        with safecomm.bucketed():
            found = seen(safecomm, name, Made(asynchronous=True))
        assert found == expected, (name, found, expected)
    safecomm.drain(wait=True)


# --- tensors that can't be written to as others -----------------------------------------------------------------


IN_PLACE = {name for name in (*REDUCTIONS, *MOVES) if name.startswith(("all_reduce", "broadcast", "reduce"))}
IN_PLACE -= {name for name in REDUCTIONS if "scatter" in name}
"""The calls that write to what they read."""

READ_ONLY = {"all_to_all_single", "all_to_all_single_uneven", "scatter"}
"""The calls whose inputs may require a gradient without a race. In the others torch makes the output part of a graph
while gloo's thread copies into it, and that raises or not, whichever comes first."""


def _leaf(tensor, written):
    return tensor.requires_grad_() if written else tensor


def _leaf_in_place(tensor, _):
    return tensor.requires_grad_()


def _read_leaf(tensor, written):
    return tensor if written else tensor.requires_grad_()


def _of_inference_mode(tensor, written):
    return _of_inference_mode_in_place(tensor, written) if written else tensor


def _of_inference_mode_in_place(tensor, _):
    with torch.inference_mode():
        return tensor.clone()


def _both(name, asynchronous, hook):
    """Return what torch and safecomm leave, each in a group of its own, which an error may have made useless."""
    outcomes = []
    for module in (stock, safecomm):
        group = stock.new_group([0, 1])
        setting = Made(asynchronous=asynchronous, group=group, hook=hook)
        outcomes.append(seen(module, name, setting))
        if not isinstance(outcomes[-1][0], type):
            safecomm.drain(wait=True)
            safecomm.destroy_process_group(group)
        else:
            safecomm.drain(wait=True)  # what has failed is kept until then (S4)
            safecomm.collectives.routes.ROUTES.close(group, "it has failed")
    return outcomes


@pytest.mark.parametrize("name", {**REDUCTIONS, **MOVES})
@on(2)
def test_tensors_that_require_a_gradient_raise_as_torchs_do_s8(name):
    for hook in (_leaf_in_place if name in IN_PLACE else _leaf, *((_read_leaf,) if name in READ_ONLY else ())):
        expected, found = _both(name, False, hook)
        assert found == expected, (hook, found, expected)


@pytest.mark.parametrize("name", {**REDUCTIONS, **MOVES})
@on(2)
def test_asynchronous_outputs_that_require_a_gradient_raise_as_torchs_or_record_nothing_s8(name):
    # docs/limits.md: where torch raises in gloo's thread, safecomm may write, and then records no gradient.
    expected, found = _both(name, True, _leaf_in_place if name in IN_PLACE else _leaf)
    if found != expected:
        assert isinstance(expected[0], type), (expected, found)
        assert not isinstance(found[0], type), (expected, found)
        assert set(found[1]) == {None}, (expected, found)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", {**REDUCTIONS, **MOVES})
@on(2)
def test_tensors_of_inference_mode_are_written_to_outside_of_it_as_torchs_are_s8(name, asynchronous):
    hook = _of_inference_mode_in_place if name in IN_PLACE else _of_inference_mode
    expected, found = _both(name, asynchronous, hook)
    assert found == expected, (found, expected)


@pytest.mark.parametrize("asynchronous", [False, True])
@on(2)
def test_inside_of_inference_mode_all_is_as_torchs_s8(asynchronous):
    for name in ROWS:
        setting = Made(asynchronous=asynchronous)
        with torch.inference_mode():
            expected, found = seen(stock, name, setting), seen(safecomm, name, setting)
        assert found == expected, (name, found, expected)
    safecomm.drain(wait=True)


@on(2)
def test_the_gpu_cases_of_this_table_run_s8():
    # What they do on a GPU can't be seen here; that they run, and that their table is that of torch on the CPU, can.
    sys.path.append(str(Path(__file__).parent / "gpu"))
    import version_counters

    different = version_counters.compared("cpu")
    safecomm.drain(wait=True)
    assert different == {}, different


def test_the_table_can_see_a_collective_that_hides_what_it_writes(monkeypatch):
    # A version that nobody bumps is what the table is for: a module whose copies go past autograd has to show.
    class Shown:
        def all_reduce(self, tensor, op, group, async_op):
            tensor.add_(1)

    class Hides:
        def all_reduce(self, tensor, op, group, async_op):
            tensor.data.add_(1)

    monkeypatch.setattr(Setting, "rank", 0)
    found = differences(Shown(), Hides(), rows=("all_reduce",))
    assert [(name, what) for name, what, *_ in found] == [("all_reduce", "versions"), ("all_reduce", "gradients")]
    assert "modified by an inplace operation" in backward(Shown(), "all_reduce")[0]


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_coalesced", "reduce"])
@on(2)
def test_versions_do_not_depend_on_what_is_known_of_an_operation_s8(name):
    """gloo divides what it has added up for an average, in place and by torch's own division."""
    for op in ("SUM", "AVG", "MAX", "PRODUCT"):
        for asynchronous in (False, True):
            versions = []
            for library in (stock, safecomm):
                tensor = torch.ones(4)
                given = [tensor] if name == "all_reduce_coalesced" else tensor
                arguments = {"dst": 0} if name == "reduce" else {}
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        returned = getattr(library, name)(
                            given, op=getattr(stock.ReduceOp, op), async_op=asynchronous, **arguments
                        )
                    if returned is not None:
                        returned.wait()
                except RuntimeError as error:  # an operation that gloo does not have
                    versions.append(type(error))
                else:
                    versions.append(tensor._version)
            assert versions[0] == versions[1], (op, asynchronous)
    safecomm.drain(wait=True)  # a future that was waited for is seen at the next call
