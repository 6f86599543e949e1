"""The list forms with an arena in use: c10d's, but for large slices of one buffer on NCCL.

That way needs GPUs: ``arena_list_forms_against_stock`` in ``tests/gpu/arena.py``.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as stock
from ranks import on

import safecomm
from safecomm.arena.staging import joined
from safecomm.collectives.lists import apart, whole_of


def test_slices_of_one_buffer_are_that_buffer():
    whole = torch.arange(24.0).reshape(4, 2, 3)
    found = joined(list(whole.unbind()))
    assert found is not None
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)
    later = joined(list(whole[1:].unbind()))
    assert later is not None
    assert torch.equal(later, whole[1:])


@pytest.mark.parametrize(
    "broken",
    [
        lambda w: [w[1], w[0]],
        lambda w: [w[0], w[2]],
        lambda w: [w[0], w[1].clone()],
        lambda w: [w[0], w[1].t()],
        lambda w: [w[0], w[1].double()],
        lambda w: [w[0][:1], w[1][:1]],
    ],
    ids=["order", "gap", "elsewhere", "strided", "type", "parts"],
)
def test_others_are_not(broken):
    assert joined(broken(torch.arange(27.0).reshape(3, 3, 3))) is None


def test_a_tensor_inside_of_the_list_is_nccls_only_at_the_ranks_own_slice():
    memory = torch.zeros(16)
    whole = memory[4:12].view(2, 4)
    assert apart(memory[4:8], whole, 0)
    assert apart(memory[8:12], whole, 1)
    assert not apart(memory[8:12], whole, 0)
    assert not apart(memory[6:10], whole, 0)
    assert not apart(memory[2:6], whole, 0)
    assert apart(memory[:4], whole, 0)
    assert apart(memory[12:], whole, 1)
    assert apart(torch.zeros(4), whole, 1)


@pytest.mark.parametrize("async_op", [False, True])
@on(2)
def test_on_the_cpu_an_arena_changes_nothing(async_op):
    rank, world = stock.get_rank(), stock.get_world_size()
    with safecomm.use_arena("4MiB", device="cpu"):
        whole = torch.zeros(world, 3)
        work = safecomm.all_gather(list(whole.unbind()), torch.full((3,), float(rank)), async_op=async_op)
        if async_op:
            work.wait()
        assert whole.tolist() == [[0.0] * 3, [1.0] * 3]
        out = torch.zeros(3)
        work = safecomm.reduce_scatter(out, list(torch.ones(world, 3).unbind()), async_op=async_op)
        if async_op:
            work.wait()
        assert out.tolist() == [2.0] * 3
        assert whole_of(list(whole.unbind()), torch.zeros(3), stock.group.WORLD) is None
        del work
    assert safecomm.pending() == []
