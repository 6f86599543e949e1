"""The list forms with an arena in use: slices flat on NCCL, and all others c10d's; and which lists a peer may write to.

What finds the buffer and what decides is tested here, the rest on GPUs: ``tests/gpu/arena.py``.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as stock
from ranks import on, subgroup
from torch.overrides import TorchFunctionMode
from watching import Sees, cpu_profile, noted

import safecomm
from safecomm import _torch
from safecomm.arena import use
from safecomm.arena.use import IN_USE
from safecomm.collectives import lists
from safecomm.collectives.guards import KINDS, ListGuards
from safecomm.collectives.holding import counted
from safecomm.collectives.lists import whole_of
from safecomm.collectives.routes import ROUTES
from safecomm.peers import list_exchange

# --- finding the buffer ---------------------------------------------------------------------------------------------


class Backend:
    def __init__(self, size, rank=0):
        self.size = lambda: size
        self.rank = lambda: rank


def found(tensors, tensor=None, size=None, rank=0):
    like = torch.zeros(tensors[0].shape, dtype=tensors[0].dtype) if tensor is None else tensor
    return whole_of(tensors, like, Backend(len(tensors) if size is None else size, rank))


def test_slices_of_one_buffer_are_that_buffer():
    memory = torch.arange(24.0).reshape(4, 2, 3)
    for slices in (list(memory.unbind()), list(memory.chunk(4)), list(memory[1:].unbind()), [memory[3]]):
        whole = found(slices)
        assert whole.data_ptr() == slices[0].data_ptr()
        assert whole.untyped_storage() is memory.untyped_storage()
        assert torch.equal(whole, torch.cat([one.flatten() for one in slices]))
        assert whole.is_contiguous()
        assert not whole.requires_grad


def test_slices_of_memory_that_is_otherwise_shaped_are_found():
    whole = found(list(torch.arange(12.0).split(4)))
    assert whole.tolist() == list(range(12))
    transposed = torch.zeros(3, 4).t()  # of which the columns follow each other
    assert found(list(transposed.unbind(1))) is not None
    storage = torch.arange(6.0).untyped_storage()
    apart = [torch.empty(0).set_(storage, place, (3,)) for place in (0, 3)]  # which are views of nothing
    assert found(apart).tolist() == [0, 1, 2, 3, 4, 5]


class Sub(torch.Tensor):
    pass


def of_two_storages(*, overlapping):
    """Return tensors that follow each other in memory, each of a storage of its own."""
    memory = torch.zeros(8)
    pointer, nbytes = memory.data_ptr(), memory.nbytes // 2
    first = _torch.storage_over(pointer, memory.device, memory.nbytes if overlapping else nbytes)
    second = _torch.storage_over(pointer + nbytes, memory.device, nbytes)
    tensors = [torch.empty(0).set_(storage, 0, (4,)) for storage in (first, second)]
    tensors[0].keep = memory
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + nbytes
    return tensors


def negative(w):
    return torch._neg_view(w[1])


def of_inference(w):
    with torch.inference_mode():
        made = torch.zeros(2, 3, 3)
    return list(made.unbind())


BROKEN = {
    "order": lambda w: [w[1], w[0]],
    "gap": lambda w: [w[0], w[2]],
    "overlap": lambda w: [w.view(-1)[:6], w.view(-1)[3:9]],
    "twice": lambda w: [w[0], w[0]],
    "twice of three": lambda w: [w[0], w[0], w[2]],
    "the last elsewhere": lambda w: [w[0], w[1].clone()],
    "one elsewhere": lambda w: [w[0], w[1].clone(), w[2]],
    "pieces": lambda w: [one.clone() for one in w],
    "neighbours": lambda w: of_two_storages(overlapping=False),
    "two storages": lambda w: of_two_storages(overlapping=True),
    "strided": lambda w: [w[0], w[1].t(), w[2]],
    "type": lambda w: [w[0], w[1].view(torch.int32), w[2]],
    "size of the type": lambda w: [w[0], w[1].double()],
    "shape": lambda w: [w[0], w[1].view(9), w[2]],
    "parts": lambda w: [w[0][:1], w[1][:1]],
    "requires grad": lambda w: [w[0], w[1].detach().requires_grad_(), w[2]],
    "parameters": lambda w: [torch.nn.Parameter(one, requires_grad=False) for one in w],
    "a subclass": lambda w: [w[0], w[1].as_subclass(Sub), w[2]],
    "a subclass first": lambda w: [w[0].as_subclass(Sub), w[1], w[2]],
    "negative": lambda w: [w[0], negative(w), w[2]],
    "no tensor": lambda w: [w[0], None, w[2]],
    "no tensor last": lambda w: [w[0], w[1], 3],
    "sparse": lambda w: [w[0].to_sparse(), w[1].to_sparse()],
    "nested": lambda w: [torch.nested.nested_tensor([w[0][0]]), torch.nested.nested_tensor([w[1][0]])],
    "meta": lambda w: list(torch.zeros(2, 3, 3, device="meta")),
    "complex": lambda w: list(torch.zeros(2, 3, 3, dtype=torch.complex64)),
    "conjugated": lambda w: list(torch.zeros(2, 3, 3, dtype=torch.complex64).conj()),
    "nothing in them": lambda w: list(torch.zeros(2, 0)),
}


def tensor_for(broken, tensors):
    """Return the tensor that the list ``BROKEN[broken]`` is given with."""
    if broken in ("parts", "overlap", "neighbours", "two storages", "complex", "conjugated", "nothing in them"):
        return torch.zeros(tensors[0].shape, dtype=tensors[0].dtype)
    return torch.zeros(3, 3)


unlike = pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, requires_grad=True),
        torch.zeros(4),
        torch.zeros(1, 3),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(6)[::2],
        torch._neg_view(torch.zeros(3)),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=["requires grad", "size", "shape", "type", "strided", "negative", "sparse", "meta"],
)
"""With each tensor that a list of ``torch.zeros(3)`` is not like."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("broken", BROKEN)
def test_others_are_not(broken):
    tensors = BROKEN[broken](torch.arange(27.0).reshape(3, 3, 3))
    like = tensor_for(broken, tensors)
    if not like.is_complex() and like.numel():
        for _ in range(2):
            ordinary = list(torch.zeros(len(tensors), *like.shape, dtype=like.dtype))  # that the next are compared with
            assert found(ordinary) is not None
    assert whole_of(tensors, like, Backend(len(tensors))) is None


def test_none_is_not_one_buffer():
    assert whole_of([], torch.zeros(3), Backend(0)) is None


def test_a_list_of_another_length_than_the_group_is_c10ds():
    tensors = list(torch.zeros(3, 4).unbind())
    assert found(tensors) is not None
    assert found(tensors, size=2) is None
    assert found(tensors, size=4) is None


@unlike
def test_a_tensor_that_is_not_like_the_list_is_c10ds(tensor):
    for _ in range(3):
        assert whole_of(list(torch.zeros(2, 3)), tensor, Backend(2)) is None
        assert found(list(torch.zeros(2, 3))) is not None


def test_lists_like_one_of_the_last_are_told_by_one_call(monkeypatch):
    def lists_of(shape):
        return list(torch.zeros(2, *shape)), [torch.zeros(shape), torch.zeros(shape)], torch.zeros(shape)

    def told(shape):
        slices, pieces, tensor = lists_of(shape)
        assert found(slices, tensor) is not None
        for written in (False, True):
            assert alike(pieces, tensor, written=written)
        return asked

    asked = []
    for module, name in ((lists, "_are_slices"), (list_exchange, "_are_alike")):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, inner=inner: asked.append(name) or inner(*args))
    for module, name in ((lists, "_SLICES"), (list_exchange, "_READ")):
        monkeypatch.setattr(module, name, ListGuards())
    monkeypatch.setattr(list_exchange, "_WRITTEN", (ListGuards(), ListGuards()))
    each = ["_are_slices", "_are_alike", "_are_alike"]
    assert told((3,)) == told((3,)) == 2 * each, "such that never come again are not worth it"
    assert told((3,)) == 2 * each
    assert told((4, 2)) == told((3,)) == 3 * each
    assert told((4, 2)) == told((3,)) == told((4, 2)) == 4 * each
    asked.clear()
    for size in range(10, 10 + KINDS):
        told((size,))
    for size in range(10, 10 + KINDS):
        told((size,))
    assert asked == 2 * KINDS * each
    assert told((3,)) == (1 + 2 * KINDS) * each, "only so many are known"
    asked.clear()
    memory = torch.zeros(4)
    slices = list(memory.view(2, 2))
    for _ in range(3):
        assert found(slices, slices[0], rank=0) is not None
    assert told((25,)) == ["_are_slices"] * 3, "one tensor given twice is like nothing, and is not known"


def test_a_tensor_inside_of_the_list_is_nccls_only_at_the_ranks_own_slice():
    memory = torch.zeros(16)
    slices = list(memory[4:12].view(2, 4))
    assert found(slices, memory[4:8], rank=0) is not None
    assert found(slices, slices[0], rank=0) is not None
    assert found(slices, memory[8:12], rank=1) is not None
    assert found(slices, slices[1], rank=1) is not None
    assert found(slices, memory[8:12], rank=0) is None
    assert found(slices, memory[4:8], rank=1) is None
    assert found(slices, memory[6:10], rank=0) is None
    assert found(slices, memory[1:5], rank=0) is None
    assert found(slices, memory[11:15], rank=1) is None
    assert found(slices, memory[:4], rank=0) is not None
    assert found(slices, memory[12:], rank=1) is not None


@pytest.mark.parametrize("inside", [False, True])
def test_tensors_of_inference_mode_are_slices_too_but_not_beside_others(inside):
    tensors = of_inference(None)
    mixed = [torch.empty(0).set_(tensors[0].untyped_storage(), 0, (3, 3)), tensors[1]]
    assert not mixed[0].is_inference()
    with torch.inference_mode(inside):
        assert found(tensors).is_inference()
        assert found(mixed) is None


def test_autograd_does_not_see_the_buffer():
    memory = torch.zeros(2, 3)
    slices = list(memory.unbind())
    whole = found(slices)
    assert whole.grad_fn is None
    assert memory._version == 0
    base = torch.zeros(2, 3, requires_grad=True)
    with torch.no_grad():
        assert found(list(base.unbind())) is None
        assert found(list(base.detach().unbind())).grad_fn is None


# --- pieces that a peer may send from, or write to ------------------------------------------------------------------

APART = {"order", "gap", "the last elsewhere", "one elsewhere", "pieces", "neighbours", "two storages", "parts"}
APART.add("complex")  # whether a type can be exchanged is asked before
OVERLAPPING = {"overlap", "twice", "twice of three"}


def alike(pieces, tensor, size=2, *, written):
    return list_exchange.alike(pieces, tensor, 0, size, written=written)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("broken", BROKEN)
def test_pieces_are_exchanged_where_they_lie_if_they_are_like_the_tensor_and_apart_where_they_are_written_to(broken):
    tensors = BROKEN[broken](torch.arange(27.0).reshape(3, 3, 3))
    like = tensor_for(broken, tensors)
    for written in (False, True):
        if not like.is_complex() and like.numel():
            for _ in range(2):
                ordinary = [torch.zeros_like(like) for _ in tensors]  # that the next are compared with
                assert alike(ordinary, like, len(tensors), written=written)
        apart = broken in APART or (broken in OVERLAPPING and not written)
        assert alike(tensors, like, len(tensors), written=written) is apart


@unlike
def test_pieces_unlike_the_tensor_are_not_exchanged_where_they_lie(tensor):
    for _ in range(3):
        assert not alike([torch.zeros(3), torch.zeros(3)], tensor, written=False)
        assert alike([torch.zeros(3), torch.zeros(3)], torch.zeros(3), written=False)


def test_pieces_of_another_number_or_of_nothing_and_dual_numbers_are_not_exchanged_where_they_lie():
    def exchanged(*shape, size=2):
        return alike([torch.zeros(shape), torch.zeros(shape)], torch.zeros(shape), size, written=True)

    assert exchanged(3)
    assert exchanged()
    assert not exchanged(3, size=1)
    assert not exchanged(3, size=3)
    assert not exchanged(0)
    assert not alike([], torch.zeros(3), written=False)
    with torch.autograd.forward_ad.dual_level():
        assert not exchanged(3)


def test_pieces_of_inference_mode_are_written_to_inside_of_it_only():
    with torch.inference_mode():
        made, like = [torch.zeros(3), torch.zeros(3)], torch.zeros(3)
        mixed = [made[0], torch.empty(0).set_(made[1].untyped_storage(), 0, (3,))]
        for _ in range(3):
            assert alike(made, like, written=True)
        assert alike(mixed, torch.zeros(3), written=True)
    assert not alike(made, like, written=True)
    assert not alike(made, torch.zeros(3), written=True)
    assert alike([torch.zeros(3), torch.zeros(3)], torch.zeros(3), written=True)
    assert not alike([torch.zeros(3), made[0]], torch.zeros(3), written=True)
    assert alike(made, torch.zeros(3), written=False)


# --- deciding, with gloo in NCCL's place ----------------------------------------------------------------------------


@contextlib.contextmanager
def flat():
    """Let gloo's groups go flat, and give the names of what was launched so."""
    launched = []

    before = lists._NCCL, lists._launch_all_gather, lists._launch_reduce_scatter
    lists._NCCL = type(stock.group.WORLD._get_backend(torch.device("cpu")))
    lists._launch_all_gather = noted(launched, "all_gather", before[1])
    lists._launch_reduce_scatter = noted(launched, "reduce_scatter", before[2])
    try:
        with safecomm.use_arena("4MiB", device="cpu") as arena:
            yield launched
            assert arena.stats().high_water == 0
    finally:
        lists._NCCL, lists._launch_all_gather, lists._launch_reduce_scatter = before


def gathered(library=safecomm, *, group=None, asynchronous=False, made="slices"):
    rank, world = stock.get_rank(), stock.get_world_size()
    whole = torch.zeros(world, 3)
    out = list(whole.unbind()) if made == "slices" else [torch.zeros(3) for _ in whole]
    work = library.all_gather(out, torch.full((3,), float(rank)), group, asynchronous)
    if asynchronous:
        work.wait()
    assert torch.stack(out).tolist() == [[float(one)] * 3 for one in range(world)]


def scattered(library=safecomm, *, op=stock.ReduceOp.SUM, asynchronous=False, made="slices"):
    rank, world = stock.get_rank(), stock.get_world_size()
    given = list((torch.arange(3.0 * world).reshape(world, 3) + rank).unbind())
    given = given if made == "slices" else [one.clone() for one in given]
    out = torch.zeros(3)
    work = library.reduce_scatter(out, given, op, async_op=asynchronous)
    if asynchronous:
        work.wait()
    expected = torch.arange(3.0 * world).reshape(world, 3)[rank] * world + sum(range(world))
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
@on(2, 3)
def test_slices_go_flat_and_pieces_do_not(asynchronous):
    with flat() as launched:
        gathered(asynchronous=asynchronous)
        assert launched == ["all_gather"]
        scattered(asynchronous=asynchronous)
        assert launched == ["all_gather", "reduce_scatter"]
        gathered(asynchronous=asynchronous, made="pieces")
        scattered(asynchronous=asynchronous, made="pieces")
        assert launched == ["all_gather", "reduce_scatter"]
        launched.clear()
    for made in ("slices", "pieces"):
        gathered(asynchronous=asynchronous, made=made)
        scattered(asynchronous=asynchronous, made=made)
    assert launched == [], "without an arena"
    safecomm.drain(wait=True)
    assert safecomm.pending() == []


@on(2)
def test_an_arena_that_is_only_wanted_is_not_made_for_slices():
    before = lists._NCCL
    lists._NCCL = type(stock.group.WORLD._get_backend(torch.device("cpu")))
    use._wanted.append(1 << 20)
    try:
        assert lists._flat_route(list(torch.zeros(2, 3)), torch.zeros(3), stock.group.WORLD, False) is not None
        gathered()
        assert not IN_USE
    finally:
        lists._NCCL = before
        use._wanted.clear()


@on(2)
def test_slices_are_c10ds_where_torch_has_nothing_that_launches_them_flat():
    with flat() as launched:
        lists._launch_all_gather = None
        gathered()
    assert launched == []


@on(2)
def test_the_first_call_of_a_group_goes_flat():
    group = stock.new_group()
    with flat() as launched:
        assert id(group) not in ROUTES.fast
        gathered(group=group)
        gathered(group=group)
    assert launched == ["all_gather"] * 2
    stock.destroy_process_group(group)


@on(2)
def test_in_place_on_the_ranks_own_slice():
    rank, world = stock.get_rank(), stock.get_world_size()
    with flat() as launched:
        whole = torch.zeros(world, 3)
        whole[rank] = rank + 1
        out = list(whole.unbind())
        safecomm.all_gather(out, out[rank])
        assert whole.tolist() == [[one + 1.0] * 3 for one in range(world)]
        assert launched == ["all_gather"]


@on(2)
def test_an_asynchronous_call_is_held_until_it_is_waited_for():
    with flat():
        whole = torch.zeros(2, 3)
        storage = whole.untyped_storage()
        work = safecomm.all_gather(list(whole.unbind()), torch.ones(3), async_op=True)
        (entry,) = safecomm.pending()
        assert entry.op == "all_gather"
        assert entry.nbytes == 36
        assert "test_lists" in entry.site
        del whole
        assert work.wait()
        assert safecomm.pending() == []
        assert bytes(storage) == bytes(torch.ones(6).untyped_storage())


@on(2)
def test_calls_are_counted_once_whichever_way():
    before = counted().get("all_gather", 0)
    with flat():
        gathered()
        gathered(made="pieces")
        gathered(made="pieces", asynchronous=True)
    assert counted()["all_gather"] == before + 3


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@on(2)
def test_modes_and_symmetric_arenas_and_other_backends_leave_it_to_c10d():
    with flat() as launched:
        rank, world = stock.get_rank(), stock.get_world_size()
        for context in (Sees(), SeesFunctions()):
            whole, mine = torch.zeros(world, 3), torch.full((3,), float(rank))
            out = list(whole.unbind())
            with context:
                safecomm.all_gather(out, mine)
            assert out[1].tolist() == [1.0] * 3
        assert launched == []
        out, mine = list(torch.zeros(world, 3).unbind()), torch.full((3,), float(rank))
        torch.func.grad(lambda x: (safecomm.all_gather(out, mine), x.sum())[1])(torch.ones(2))
        assert out[1].tolist() == [1.0] * 3
        assert launched == []
        IN_USE[-1].symmetric = True
        gathered()
        scattered()
        assert launched == []
        IN_USE[-1].symmetric = False
        known, lists._NCCL = lists._NCCL, torch.distributed.Backend  # such as DETAIL's wrapper around it
        gathered()
        lists._NCCL = known
        assert launched == []
        gathered()
        assert launched == ["all_gather"]


@on(2)
def test_inside_of_bucketed_it_is_c10ds_after_what_was_put_off():
    with flat() as launched:
        gathered()
        launched.clear()
        total = torch.ones(3)
        with safecomm.bucketed():
            safecomm.all_reduce(total)
            assert total.tolist() == [1.0] * 3
            gathered()
            assert total.tolist() == [2.0] * 3
            gathered()
        assert launched == []


@on(2)
def test_inside_of_a_region_it_is_c10ds():
    with flat() as launched:
        gathered()
        launched.clear()
        _torch.world.pg_coalesce_state[stock.group.WORLD] = []
        try:
            gathered()
        finally:
            del _torch.world.pg_coalesce_state[stock.group.WORLD]
        assert launched == []
        gathered()
        assert launched != []


@on(2)
def test_diverted_calls_go_flat_all_the_same():
    with flat() as launched:
        gathered()
        with ROUTES.off():
            gathered()
        with ROUTES.off():
            scattered()
    assert launched == ["all_gather", "all_gather", "reduce_scatter"]


@on(2)
def test_an_operation_that_is_another_object_is_c10ds():
    with flat() as launched:
        scattered(op=stock.ReduceOp(stock.ReduceOp.SUM))  # as a premultiplied sum is
        assert launched == []


@on(2)
def test_a_flat_call_shows_in_a_profile():
    with flat() as launched:
        with cpu_profile() as profile:
            gathered()
        assert [event.name for event in profile.events()].count("safecomm::all_gather") == 1
        assert launched == ["all_gather"]


@on(2)
def test_what_is_overwritten_is_noticed_by_autograd():
    with flat() as launched:
        whole = torch.ones(2, 3)
        x = torch.ones(2, 3, requires_grad=True)
        y = (x * whole).sum()
        safecomm.all_gather(list(whole.unbind()), torch.zeros(3))
        assert launched == ["all_gather"]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@on(2)
def test_each_of_the_list_counts_as_written_to():
    with flat():
        lists._launch_all_gather = lambda *_: None  # gloo's copies count as well
        storage = torch.zeros(6).untyped_storage()
        out = [torch.empty(0).set_(storage, place, (3,)) for place in (0, 3)]
        before = [one._version for one in out]
        safecomm.all_gather(out, torch.zeros(3))
        assert [one._version for one in out] == [count + 1 for count in before]


@on(2)
def test_works_that_graphs_are_to_see_are_c10ds():
    with flat() as launched:
        before, lists._inflight = lists._inflight, lambda: True
        try:
            gathered(asynchronous=True)
            assert launched == []
            gathered()
            assert launched == ["all_gather"]
        finally:
            lists._inflight = before


@on(2)
def test_tensors_of_inference_mode_go_flat_inside_of_it_only():
    with flat() as launched:
        with torch.inference_mode():
            gathered()
            assert launched == ["all_gather"]
            whole = torch.zeros(2, 3)
        with contextlib.suppress(RuntimeError):  # what gloo says of it, in a thread of its own
            safecomm.all_gather(list(whole.unbind()), torch.ones(3))
        assert launched == ["all_gather"]


@on(2)
def test_arguments_that_are_none_raise_what_c10d_raises():
    with flat() as launched:
        for arguments in (
            (torch.zeros(2, 3), torch.zeros(3)),
            ([torch.zeros(3), 1], torch.zeros(3)),
            ([torch.zeros(3)] * 2, None),
            ([], torch.zeros(3)),
            ([torch.zeros(3) for _ in range(3)], torch.zeros(3)),
            ([torch.zeros(3), torch.zeros(4)], torch.zeros(3)),
            ([torch.zeros(3), torch.zeros(3, dtype=torch.int32)], torch.zeros(3)),
            (list(torch.zeros(2, 3, dtype=torch.int32)), torch.zeros(3)),
        ):
            with pytest.raises(Exception) as theirs:  # noqa: PT011
                stock.all_gather(*arguments)
            with pytest.raises(type(theirs.value)) as ours:
                safecomm.all_gather(*arguments)
            assert str(ours.value) == str(theirs.value)
        assert launched == []


@on(3)
def test_a_rank_that_is_not_in_the_group():
    group = subgroup(0, 1)
    with flat(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert safecomm.all_gather(list(torch.zeros(2, 3)), torch.zeros(3), group) is None
    assert ["does not belong" in str(one.message) for one in caught] == [True] * (stock.get_rank() == 2)


@pytest.mark.parametrize("async_op", [False, True])
@on(2)
def test_on_the_cpu_an_arena_changes_nothing(async_op):
    with safecomm.use_arena("4MiB", device="cpu"):
        gathered(asynchronous=async_op)
        scattered(asynchronous=async_op)
        assert lists._flat_route(list(torch.zeros(2, 3)), torch.zeros(3), stock.group.WORLD, async_op) is None
    assert safecomm.pending() == []
