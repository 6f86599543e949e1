"""functional: results, gradients and what they keep alive, on gloo."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as stock
from ranks import on, until
from torch.multiprocessing.reductions import StorageWeakRef

import safecomm
from safecomm import functional, use_arena

SHAPE = (4, 2, 6)  # can be cut into 1 or 2 along each dimension

OPERATIONS = {
    "all_reduce": functional.all_reduce,
    **{f"all_gather, {dim}": lambda x, dim=dim, **how: functional.all_gather(x, dim, **how) for dim in (0, 1, -1)},
    **{
        f"reduce_scatter, {dim}": lambda x, dim=dim, **how: functional.reduce_scatter(x, dim, **how)
        for dim in (0, 1, -1)
    },
    "all_to_all": functional.all_to_all,
    "all_to_all, uneven": lambda x, **how: functional.all_to_all(x, *splits(), **how),
    "gather from sequence": functional.gather_from_sequence_parallel_region,
    "reduce scatter to sequence": functional.reduce_scatter_to_sequence_parallel_region,
}
"""Those whose gradient is that of the sum of all ranks' losses."""


def splits():
    """Rows that each rank gets from each, and sends to each: rank 0 keeps three of its four, and sends one."""
    if stock.get_world_size() == 1:
        return [4], [4]
    return ([3, 2], [3, 1]) if stock.get_rank() == 0 else ([1, 2], [2, 2])


def expected(name, all_x, rank):
    """What the operation returns on ``rank``, computed in one process from all ranks' arguments."""
    world = len(all_x)
    kind, *dim = name.split(", ")
    if kind == "all_reduce":
        return sum(all_x)
    if kind in ("all_gather", "gather from sequence"):
        return torch.cat(list(all_x), int(dim[0]) if dim else 0)
    if kind in ("reduce_scatter", "reduce scatter to sequence"):
        return sum(all_x).chunk(world, int(dim[0]) if dim else 0)[rank]
    if name == "all_to_all":
        return torch.cat([x.chunk(world)[rank] for x in all_x])
    sent = [[4]] if world == 1 else [[3, 1], [2, 2]]
    return torch.cat([x.split(rows)[rank] for x, rows in zip(all_x, sent, strict=True)])


def arguments():
    """All ranks' arguments, the same on all."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(SHAPE, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(stock.get_world_size())
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
@on(1, 2)
def test_results_and_gradients_are_those_of_the_definition(name, strided, asynchronous):
    rank, world = stock.get_rank(), stock.get_world_size()
    all_x = arguments()
    outputs = [expected(name, all_x, one) for one in range(world)]
    weights = [torch.linspace(-1, 2 + one, out.numel()).double().view(out.shape) for one, out in enumerate(outputs)]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    with use_arena("1MiB", "cpu") as arena:
        mine = all_x[rank].detach()
        if strided:
            mine = mine.transpose(0, 2).contiguous().transpose(0, 2)
        before = mine.clone()
        mine.requires_grad_()
        out = OPERATIONS[name](mine, async_op=True).wait() if asynchronous else OPERATIONS[name](mine)
        assert arena.owns(out)
        assert out.is_contiguous()
        assert torch.equal(out, outputs[rank])
        assert torch.equal(mine, before), "the argument is not changed"
        (out * weights[rank]).sum().backward()
        torch.testing.assert_close(mine.grad, all_x[rank].grad)
        assert arena.stats().fallbacks == 0
        del out, mine, before
        until(lambda: not arena.stats().in_use)  # gloo's threads let go of tensors a moment after the wait


REGIONS = {
    "copy to": functional.copy_to_tensor_parallel_region,
    "reduce from": functional.reduce_from_tensor_parallel_region,
    "gather from": functional.gather_from_tensor_parallel_region,
    "scatter to": functional.scatter_to_tensor_parallel_region,
}


def gradchecked(function, shape=(2, 2)):
    """Check the function of all ranks' arguments; each rank's gradients are summed, as each has a share of them."""
    generator = torch.Generator().manual_seed(3)
    all_x = torch.randn(stock.get_world_size(), *shape, dtype=torch.float64, generator=generator, requires_grad=True)

    def replicated(x):
        # The same on all ranks, with the gradients of all ranks: what each rank uses of it is its share.
        return function(*functional.copy_to_tensor_parallel_region(x))

    assert torch.autograd.gradcheck(replicated, (all_x,))
    assert torch.autograd.gradgradcheck(replicated, (all_x,))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather, 0", "all_gather, -1", "reduce_scatter, 1", "all_to_all"])
@on(2)
def test_gradcheck_of_collectives(name):
    def function(*all_x):
        rank, world = stock.get_rank(), stock.get_world_size()
        out = OPERATIONS[name](all_x[rank])
        places = torch.nn.functional.one_hot(torch.tensor(rank), world).to(out.dtype)
        # Side by side, so that the result is the same on all ranks.
        return functional.reduce_from_tensor_parallel_region(places.view(world, *[1] * out.dim()) * out)

    gradchecked(function)


@on(2)
def test_gradcheck_of_a_tensor_parallel_layer():
    """A column-parallel and a row-parallel linear map, and what gathers and scatters around them."""
    rank, world = stock.get_rank(), stock.get_world_size()
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    second = torch.randn(4, 2, dtype=torch.float64, generator=generator)

    def parallel(x):
        h = functional.copy_to_tensor_parallel_region(x)
        h = torch.tanh(h @ first.chunk(world, 1)[rank])
        y = functional.reduce_from_tensor_parallel_region(h @ second.chunk(world, 0)[rank])
        part = functional.scatter_to_tensor_parallel_region(y)
        return functional.gather_from_tensor_parallel_region(part * part)

    def serial(x):
        y = torch.tanh(x @ first) @ second
        return y * y

    x = torch.randn(2, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    torch.testing.assert_close(parallel(x), serial(x))
    assert torch.autograd.gradcheck(parallel, (x,))
    assert torch.autograd.gradgradcheck(parallel, (x,))
    torch.testing.assert_close(torch.autograd.grad(parallel(x).sum(), x)[0], torch.autograd.grad(serial(x).sum(), x)[0])


@on(2)
def test_the_same_as_torchs_own_autograd_functions():
    import torch.distributed.nn.functional as theirs

    def gradient(run):
        x = arguments()[stock.get_rank()]
        out = run(x)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        return out.detach(), x.grad

    pairs = [
        (functional.all_reduce, theirs.all_reduce),
        (functional.all_gather, lambda x: torch.cat(theirs.all_gather(x))),
        (
            functional.reduce_scatter,
            lambda x: theirs.reduce_scatter(x.new_empty(2, 2, 6), [one.contiguous() for one in x.chunk(2)]),
        ),
        (functional.all_to_all, lambda x: theirs.all_to_all_single(torch.empty_like(x), x)),
    ]
    for ours, torchs in pairs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that torch has deprecated
            want = gradient(torchs)
        for mine, other in zip(gradient(ours), want, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", [*OPERATIONS, *REGIONS])
@on(2)
def test_nothing_is_kept_after_forward_and_after_backward(name):
    """Neither the argument, nor the output, nor a gradient, beyond what the caller keeps."""
    run = {**OPERATIONS, **REGIONS}[name]
    leaf = torch.randn(SHAPE, requires_grad=True)
    given = leaf * 1
    argument = StorageWeakRef(given.untyped_storage())
    out = run(given)
    view = name == "copy to"
    output = StorageWeakRef(out.untyped_storage())
    del given
    if view:
        assert not argument.expired()
    else:
        until(argument.expired)  # at once, but for gloo's threads, which let go of tensors a moment after the wait
    gradients = []
    out.register_hook(lambda gradient: gradients.append(StorageWeakRef(gradient.untyped_storage())))
    loss = (out * 2).sum()
    del out
    if not view:
        until(output.expired)  # the backward does not need it
    loss.backward()
    until(argument.expired)
    leaf.grad = None
    until(lambda: gradients and all(gradient.expired() for gradient in gradients))
    assert loss.grad_fn is not None
    assert safecomm.pending() == []


@on(2)
def test_an_asynchronous_call_keeps_nothing_once_it_was_waited_for():
    with use_arena("1MiB", "cpu") as arena:
        x = arena.empty(SHAPE).fill_(1.0)
        result = functional.all_gather(x, -1, async_op=True)
        del x
        assert arena.stats().buckets[0].slots == 3, "the argument, the staging and the output"
        out = result.wait()
        assert out is result.wait()
        until(lambda: arena.stats().buckets[0].slots == 1)
        assert out.shape == (4, 2, 12)
        del out, result


@on(2)
def test_without_an_arena_the_memory_is_ordinary():
    assert functional.all_reduce(torch.ones(4)).tolist() == [2.0] * 4


WRONG = {
    "dim": (lambda: functional.all_gather(torch.ones(2), 1), IndexError, r"functional\.all_gather\(dim=1\)"),
    "size": (
        lambda: functional.reduce_scatter(torch.ones(3)),
        ValueError,
        r"reduce_scatter\(dim=0\): the size 3 can't",
    ),
    "rows": (lambda: functional.all_to_all(torch.ones(3)), ValueError, r"functional\.all_to_all"),
    "splits": (lambda: functional.all_to_all(torch.ones(2), input_splits=[1, 1]), ValueError, "give both"),
    "op": (
        lambda: functional.all_reduce(torch.ones(2, requires_grad=True), stock.ReduceOp.MAX),
        ValueError,
        "only sums and averages have a gradient",
    ),
    "scatter": (
        lambda: functional.scatter_to_tensor_parallel_region(torch.ones(2, 3)),
        ValueError,
        r"scatter_to_tensor_parallel_region\(dim=-1\): the size 3 can't be divided by the 2 ranks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@on(2)
def test_what_no_collective_takes_is_refused_before_anything_is_launched(name):
    run, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        run()
    assert safecomm.pending() == []
    assert functional.all_reduce(torch.ones(2), stock.ReduceOp.MAX).tolist() == [1.0, 1.0]


@on(2)
def test_the_operator_in_place_reduces_values_and_not_what_a_lazy_bit_covers():
    """Also where the bit is set on one rank alone."""
    rank, name = stock.get_rank(), stock.group.WORLD.group_name
    for lazy in (torch.conj, lambda x: x.conj().imag):
        for which in (0, 1, 2):
            values = torch.tensor([1 + 2j, 3 - 1j])
            tensor, want = lazy(values * (rank + 1)), lazy(values * 3)
            given = tensor if which in (rank, 2) else tensor.resolve_conj().resolve_neg()
            torch.ops.safecomm.all_reduce_(given, "sum", name)
            assert given.tolist() == want.tolist(), which
    assert safecomm.drain() == 0


@on(2)
def test_a_lazy_view_of_what_is_deferred_is_read_after_it_was_launched():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with safecomm.bucketed():
        safecomm.all_reduce(values)
        view = torch.view_as_complex(values.view(2, 2)).conj()
        torch.ops.safecomm.all_reduce_(view, "sum", stock.group.WORLD.group_name)
        assert values.tolist() == [4, 8, 12, 16]


@on(2)
def test_a_lazy_view_of_what_is_deferred_is_summed_after_it_was_launched():
    rank, name = stock.get_rank(), stock.group.WORLD.group_name
    for requires in (False, True):
        values = torch.full((2,), 1.0 + rank)
        with safecomm.bucketed():
            safecomm.all_reduce(values)
            view = torch._neg_view(values).detach().requires_grad_(requires)
            total = torch.ops.safecomm.all_reduce(view, "sum", name)
        assert total.tolist() == [-6.0, -6.0]
        assert total.requires_grad is requires


@on(2)
def test_a_conjugated_gradient_is_taken_as_its_values_are():
    given = torch.tensor([1 + 2j, 3 - 1j, 2j, 1 + 0j], requires_grad=True)
    functional.reduce_scatter(given).backward(torch.tensor([1 + 1j, 2 - 1j]).conj())
    assert given.grad.tolist() == [1 - 1j, 2 + 1j] * 2
    view = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert functional.all_gather(view).tolist() == view.tolist() * 2
    assert functional.all_to_all(view)[stock.get_rank()] == view[stock.get_rank()]
