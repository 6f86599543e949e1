"""The same bits, the same exceptions, the same warnings as torch.distributed (S8), and nothing held afterwards (S2).

Every test here calls torch.distributed and safecomm with equal data in the same ranks, and compares what can be seen.
"""

import contextlib
import gc
import itertools
import re
import sys
import warnings
import weakref
from datetime import timedelta
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import (
    ALL,
    COALESCED,
    DTYPES,
    GROUP_RANKS,
    LAYOUTS,
    MOVES,
    NOT_ON_GLOO,
    OPS,
    POINT_TO_POINT,
    REDUCTIONS,
    Setting,
    bits,
    finish,
    shapes,
)  # fmt: skip
from ranks import launch, on, subgroup, until
from torch.torch_version import TorchVersion
from watching import Sees, cpu_profile, noted

import safecomm
from safecomm.collectives.routes import ROUTES

# --- the comparison ----------------------------------------------------------------------------------------


def outcome(dist, call, setting):
    """Return all that can be seen of a call: results, or exception, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned, tensors = call(dist, setting)
            seen = finish(returned), [bits(tensor) for tensor in tensors]
        except Exception as error:
            seen = type(error), str(error)
    return seen, [(w.category, str(w.message)) for w in caught]


def compare(call, settings):
    different = []
    for setting in settings:
        expected = outcome(stock, call, setting)
        found = outcome(safecomm, call, setting)
        if isinstance(found[0][0], type):
            safecomm.drain(wait=True)  # what has failed may still be in use (S4)
        elif call.__name__ in ("all_reduce_coalesced", "all_gather_coalesced"):
            safecomm.drain()  # they answer with a future, which does not tell us that it was waited for
        held = safecomm.pending()
        if found != expected or held:
            different.append(f"{setting}:\n  torch.distributed {expected}\n  safecomm          {found}\n  held {held}")
            with contextlib.suppress(safecomm.PendingWorkError):
                safecomm.drain(wait=True, timeout=timedelta(seconds=1))
    assert not different, "\n".join([f"{len(different)} differ:", *different[:3]])


def both_ways(**axes):
    """Return a setting for each combination of ``axes``, synchronous and asynchronous."""
    for values in itertools.product(*axes.values(), (False, True)):
        yield Setting(**dict(zip((*axes, "asynchronous"), values, strict=True)))


# --- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@on(2, 3)
def test_same_bits_for_every_type_shape_and_layout(name):
    # What there is of types does not depend on how many ranks there are.
    dtypes = DTYPES if stock.get_world_size() == 2 else (torch.float32, torch.complex64)
    compare(ALL[name], both_ways(dtype=dtypes, shape=shapes(name), layout=LAYOUTS))


@pytest.mark.parametrize("name", REDUCTIONS)
@on(2)
def test_same_bits_for_every_reduction(name):
    compare(REDUCTIONS[name], both_ways(op=OPS, dtype=DTYPES))


@pytest.mark.parametrize("name", {**REDUCTIONS, **MOVES, **POINT_TO_POINT, **COALESCED})
@on(4)
def test_same_in_a_subgroup_and_outside_of_it(name):
    # Outside: None or a warning, whatever torch.distributed has; point-to-point and regions have no such answer.
    members = (1, 3)
    group = subgroup(*members)
    if stock.get_rank() in members or (name not in POINT_TO_POINT and name not in COALESCED):
        dtypes = (torch.float32, torch.complex64)
        compare(ALL[name], both_ways(group=[group], members=[members], dtype=dtypes, shape=[(4,), (3, 5)]))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
@on(3)
def test_same_for_the_group_passed_as_world(name):
    compare(ALL[name], both_ways(group=[stock.group.WORLD]))


@on(2)
def test_same_for_tensors_that_are_not_plain():
    def sparse(dist, s):
        index = torch.tensor([[0, 2 + s.rank]])
        tensor = torch.sparse_coo_tensor(index, s.data()[:2], (5,), check_invariants=True)
        return dist.all_reduce(tensor, **s.keywords), [tensor]

    def parameter(dist, s):
        tensor = torch.nn.Parameter(s.data())
        with torch.no_grad():
            return dist.all_reduce(tensor, **s.keywords), [tensor]

    def part(dist, s):
        whole = s.data(times=4)
        return dist.all_reduce(whole[1:3], **s.keywords), [whole]

    def meta(dist, s):
        return dist.all_reduce(s.data().to("meta"), **s.keywords), []

    class Subclass(torch.Tensor):
        pass

    def subclass(dist, s):
        tensor = s.data().as_subclass(Subclass)
        return dist.all_reduce(tensor, **s.keywords), [tensor.as_subclass(torch.Tensor)]

    _quietly(lambda: sparse(stock, Setting()))  # torch warns of the first one
    for call in (sparse, parameter, part, meta, subclass):
        compare(call, both_ways())


@on(2)
def test_premultiplied_sum_and_operations_by_type():
    def call(dist, s):
        tensor = s.data()
        return dist.all_reduce(tensor, stock.ReduceOp(getattr(stock.ReduceOp.RedOpType, s.op)), **s.keywords), [tensor]

    compare(call, both_ways(op=("SUM", "MAX", "BAND"), dtype=(torch.float32, torch.int32)))


# --- calls without tensors ------------------------------------------------------------------------------------


def barrier(dist, s):
    return dist.barrier(**s.keywords), []


def barrier_with_timeout(dist, s):
    return dist.barrier(timeout=timedelta(seconds=30), **s.keywords), []


def monitored_barrier(dist, s):
    return dist.monitored_barrier(group=s.group, timeout=timedelta(seconds=30), wait_all_ranks=True), []


def objects(dist, s):
    mine, size = {"rank": s.rank}, s.size
    gathered, at_one, sent, part = [None] * size, [None] * size, [mine, "x"], [None]
    root = s.rank == 0
    dist.all_gather_object(gathered, mine, group=s.group)
    dist.gather_object(mine, at_one if root else None, s.world_rank(0), group=s.group)
    dist.broadcast_object_list(sent, s.world_rank(size - 1), group=s.group)
    dist.scatter_object_list(part, [[rank] for rank in range(size)] if root else None, s.world_rank(0), group=s.group)
    moved = [mine] if root else [None]
    if s.rank == 0:
        dist.send_object_list(moved, s.world_rank(1), group=s.group)
    elif s.rank == 1:
        dist.recv_object_list(moved, s.world_rank(0), group=s.group)
    return [str(each) for each in (gathered, at_one, sent, part, moved)], []


@pytest.mark.parametrize("call", [barrier, barrier_with_timeout, monitored_barrier, objects])
@on(2, 3)
def test_same_for_calls_without_tensors(call):
    compare(call, both_ways())


@pytest.mark.parametrize("call", [barrier, monitored_barrier, objects])
@on(4)
def test_same_for_calls_without_tensors_in_a_subgroup(call):
    group = subgroup(0, 2)
    if call is objects and stock.get_rank() in (1, 3):
        return  # ranks of the group are asked for, and have no answer outside
    compare(call, both_ways(group=[group], members=[(0, 2)]))


# --- wrong arguments ----------------------------------------------------------------------------------------------


def _ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


_one = _ones(4)
_tensor_functions = [
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
]
_pair_functions = [
    "all_gather_into_tensor",
    "all_gather_single",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "all_to_all_single",
]
_list_functions = ["all_gather", "reduce_scatter", "all_to_all"]
_other_functions = ["all_reduce_coalesced", "all_gather_coalesced", "batch_isend_irecv", "barrier"]
_pair_functions = [name for name in _pair_functions if hasattr(safecomm, name)]


class _Odd:
    """No tensor, with attributes that raise."""

    def __getattr__(self, name):
        raise RuntimeError(name)


# Calls that every rank makes and that no rank can launch. The group has two members.
WRONG = {
    **{
        f"{name} with {what}": (name, arguments, {})
        for name in _tensor_functions
        for what, arguments in {
            "nothing": (),
            "None": (None, 0),
            "a list": ([_one], 0),
            "a number": (3, 0),
            "what raises": (_Odd(), 0),
        }.items()
    },
    **{
        f"{name} with {what}": (name, arguments, {})
        for name in _pair_functions
        for what, arguments in {
            "nothing": (),
            "one argument": (_one,),
            "a list": ([_ones(8)], _one),
            "None": (_ones(8), None),
            "what raises": (_ones(8), _Odd()),
            "wrong sizes": (_ones(5), _ones(3)),
            "two types": (_ones(8, dtype=torch.float64), _ones(4)),
        }.items()
    },
    **{
        f"{name} with {what}": (name, arguments, {})
        for name in _list_functions
        for what, arguments in {
            "nothing": (),
            "a tensor in place of the list": (_one, _one),
            "a short list": ([_one], [_one]) if name == "all_to_all" else ([_one], _one),
            "an empty list": ([], _one),
            "two types": ([_one, _ones(4, dtype=torch.float64)], _one),
        }.items()
    },
    "reduce_scatter with a short list": ("reduce_scatter", (_one, [_one]), {}),
    "all_to_all_single with wrong splits": ("all_to_all_single", (_one, _one, [1, 1], [2, 2]), {}),
    **{f"{name} with nothing": (name, (), {}) for name in _other_functions[:3]},
    **{f"{name} with a string": (name, ("x", "y")[: 1 + ("gather" in name)], {}) for name in _other_functions[:3]},
    "batch_isend_irecv with an empty list": ("batch_isend_irecv", ([],), {}),
    "P2POp with a wrong function": ("P2POp", (max, _one, 0), {}),
    "P2POp with nothing": ("P2POp", (), {}),
    "P2POp with no tensor": ("P2POp", (stock.isend, 5, 0), {}),
    "P2POp with no peer": ("P2POp", (stock.isend, _one), {}),
    "P2POp with a wrong keyword": ("P2POp", (stock.isend, _one, 0), {"nonsense": 1}),
    "all_reduce with no operation": ("all_reduce", (_one, None), {}),
    "all_reduce with a string as operation": ("all_reduce", (_one, "sum"), {}),
    "all_reduce with an unsupported operation": (
        "all_reduce",
        (_ones(4, dtype=torch.complex64), stock.ReduceOp.MAX),
        {},
    ),
    "broadcast without a source": ("broadcast", (_one,), {}),
    "broadcast from two sources": ("broadcast", (_one, 0), {"group_src": 0}),
    "broadcast from nowhere": ("broadcast", (_one, 7), {}),
    "gather with lists everywhere": ("gather", (_one, [_one, _one], 5), {}),
    "scatter without a list": ("scatter", (_one,), {"src": -1}),
    "_coalescing_manager with too much": ("_coalescing_manager", (None, None, False, 1), {}),
    "destroy_process_group with a string": ("destroy_process_group", ("x",), {}),
    **{
        f"{name} with a wrong keyword": (name, (), {"nonsense": 1})
        for name in [*_tensor_functions, *_pair_functions, *_list_functions, *_other_functions, "_coalescing_manager"]
    },
}

if TorchVersion(torch.__version__) < "2.9":  # there gloo ends the process
    for _name in ("reduce_scatter_tensor", "_reduce_scatter_base"):
        del WRONG[f"{_name} with wrong sizes"], WRONG[f"{_name} with two types"]

WRONG_GROUPS = {
    name: (arguments, keywords)
    for name, arguments, keywords in [
        ("all_reduce", (_one,), {}),
        ("all_reduce_coalesced", ([_one],), {}),
        ("broadcast", (_one, 0), {}),
        ("reduce", (_one, 0), {}),
        ("all_gather", ([_one, _one], _one), {}),
        ("all_gather_coalesced", ([[_one], [_one]], [_one]), {}),
        ("gather", (_one,), {}),
        ("scatter", (_one,), {}),
        ("reduce_scatter", (_one, [_one, _one]), {}),
        ("all_to_all", ([_one, _one], [_one, _one]), {}),
        ("isend", (_one, 0), {}),
        ("irecv", (_one, 0), {}),
        ("send", (_one, 0), {}),
        ("recv", (_one, 0), {}),
        ("barrier", (), {}),
        ("destroy_process_group", (), {}),
        *((name, (_one, _one), {}) for name in _pair_functions),
    ]
}


def raised(dist, name, arguments, keywords):
    """Return the type and the text of what the call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = getattr(dist, name)(*arguments, **keywords)
            if name == "_coalescing_manager":
                with made:
                    pass
        except Exception as error:
            # Addresses and times differ from one call to the next.
            return type(error), re.sub(r"0x[0-9a-f]+|\[F\S+ \S+ ", "", str(error))
        return None


def compare_errors(calls):
    different = []
    for what, call in calls:
        expected = raised(stock, *call)
        found = raised(safecomm, *call)
        if expected is None or found != expected or safecomm.pending():
            different.append(
                f"{what}:\n  torch.distributed {expected}\n  safecomm          {found} {safecomm.pending()}"
            )
    assert not different, "\n".join([f"{len(different)} differ:", *different[:3]])


@on(2)
def test_wrong_arguments_raise_the_same_and_hold_nothing():
    compare_errors(WRONG.items())


@on(2)
def test_a_wrong_group_raises_the_same_and_holds_nothing():
    for group in ("x", 5, object):
        compare_errors(
            (f"{name} with group={group!r}", (name, arguments, {**keywords, "group": group}))
            for name, (arguments, keywords) in WRONG_GROUPS.items()
        )


@on(2)
def test_a_call_that_fails_on_the_backend_holds_nothing():
    def call(dist, s):
        tensor = s.data()
        return dist.all_reduce(tensor, stock.ReduceOp.BAND, **s.keywords), [tensor]

    for asynchronous in (False, True):
        setting = Setting(asynchronous=asynchronous)
        assert outcome(stock, call, setting)[0][0] is RuntimeError
        compare(call, [setting])


@on(2)
def test_what_gloo_does_not_have_raises_the_same_and_holds_nothing():
    for call in NOT_ON_GLOO.values():
        for asynchronous in (False, True):
            setting = Setting(asynchronous=asynchronous)
            assert issubclass(outcome(stock, call, setting)[0][0], Exception)
            compare(call, [setting])


def _without_a_group(rank):
    calls = [(name, (name, *rest)) for name, rest in WRONG_GROUPS.items()]
    calls.append(("_coalescing_manager", ("_coalescing_manager", (), {})))
    if GROUP_RANKS:  # before, making one asked no group
        calls.append(("P2POp", ("P2POp", (stock.isend, _one, 0), {})))
    compare_errors(calls)
    assert safecomm.pending() == []
    assert safecomm.drain() == safecomm.drain(wait=True) == 0


def test_without_a_process_group_everything_raises_the_same():
    launch(0, _without_a_group)[0].check()


def _direct_calls():
    full, part = torch.ones(4), torch.ones(2)
    return {
        "allreduce_": lambda library: library.all_reduce(full),
        "_allgather_base_": lambda library: getattr(library, GATHER)(full, part),
        "_reduce_scatter_base_": lambda library: getattr(library, SCATTER)(part, full),
    }


GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(stock, "reduce_scatter_single") else "reduce_scatter_tensor"


def _c10ds_own(call):
    """Return the functions of c10d's Python that ``call`` goes through."""
    names = set()

    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename == c10d.__file__:
            names.add(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@on(2)
def test_s8_tensors_that_are_not_like_those_of_the_last_call_are_told_from_them():

    plain, whole = torch.ones(2), torch.ones(4)
    for _ in range(2):
        safecomm.all_reduce(plain)
        getattr(safecomm, GATHER)(whole, plain)
    route = ROUTES.fast[id(stock.group.WORLD)]
    assert route.guards.guard1(torch.zeros(5))
    assert route.guards.guard2(torch.zeros(6), torch.zeros(3))
    others = {
        "subclass": torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
        "graph": torch.ones(2, requires_grad=True) * 1,
        "dtype": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "negative": torch.ones(2, dtype=torch.complex64).conj().imag,
        "sparse": torch.ones(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "batched": None,
        "no tensor": [plain],
    }
    torch.vmap(lambda one: others.update(batched=one) or one)(torch.ones(2, 2))
    for name, other in others.items():
        assert not route.guards.guard1(other), name
        assert not route.guards.guard2(whole, other), name
        assert not route.guards.guard2(other, plain), name
    with Sees():
        assert not route.guards.guard1(plain)
    assert route.guards.guard1(plain)


@on(2)
def test_s8_what_requires_a_gradient_is_told_from_the_last_only_where_none_is_recorded():

    leaf, whole = torch.ones(2, requires_grad=True), torch.ones(4)
    with torch.no_grad():
        for _ in range(2):
            getattr(safecomm, GATHER)(whole, leaf)
            getattr(safecomm, SCATTER)(torch.ones(2), whole)
    route = ROUTES.fast[id(stock.group.WORLD)]
    kinds = route.guards.guard2, route.guards.guard2_before
    assert not any(like(whole, leaf) for like in kinds), "the dispatcher does more with it here"
    with torch.no_grad():
        assert sum(like(whole, leaf) for like in kinds) == 1
        assert sum(like(torch.ones(2), whole) for like in kinds) == 1


def _quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, deprecated
        return make()


def _nested():
    return _quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def _fake(library):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor, whole = torch.ones(4), torch.zeros(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        library.all_reduce(tensor)
        library.all_reduce(tensor, async_op=True)
        getattr(library, GATHER)(whole, tensor)
    return tensor, whole


def _functionalized(library):
    def function(tensor):
        result = tensor + 1
        library.all_reduce(result)
        return result

    return torch.func.functionalize(function)(torch.ones(4))


def _in_a_transform(asynchronous):
    def call(library):
        closed_over = torch.ones(4)

        def function(tensor):
            work = library.all_reduce(closed_over, async_op=asynchronous)
            if asynchronous:
                work.wait()
            return (tensor * 2).sum()

        return torch.func.grad(function)(torch.ones(4)), closed_over

    return call


def _region_in_a_transform(library):
    closed_over = torch.ones(4)

    def function(tensor):
        with library._coalescing_manager():
            library.all_reduce(closed_over)
        return (tensor * 2).sum()

    return torch.func.grad(function)(torch.ones(4)), closed_over


def _swapped_in_a_region(library):
    tensor = torch.ones(3)
    before = tensor.detach()
    with library._coalescing_manager():
        library.all_reduce(tensor)
        tensor.data = torch.full((3,), 5.0)
    return tensor, before


def _results_of_a_region(library):
    one, other = torch.ones(3), torch.ones(2)
    with library._coalescing_manager(async_ops=True) as manager:
        library.all_reduce(one)
        library.all_reduce(other)
    (work,) = manager.works
    until(getattr(work, "inner", work).is_completed)  # before, gloo's answers or raises, as it comes
    results = work.result()
    manager.wait()
    return results


def _leaf_in_a_region(library):
    leaf = torch.ones(3, requires_grad=True)
    with library._coalescing_manager():
        library.all_reduce(leaf)
    return leaf


UNUSUAL = {
    "nested": lambda library: library.all_reduce(_nested()),
    "nested, gathered": lambda library: getattr(library, GATHER)(torch.ones(10), _nested()),
    "zero": lambda library: library.all_reduce(torch._efficientzerotensor((3,))),
    "quantized": lambda library: library.all_reduce(
        _quietly(lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8))
    ),
    "fake": _fake,
    "functionalized": _functionalized,
    "in a transform": _in_a_transform(False),
    "in a transform, asynchronous": _in_a_transform(True),
    "region in a transform": _region_in_a_transform,
    "swapped in a region": _swapped_in_a_region,
    "results of a region": _results_of_a_region,
    "leaf in a region": _leaf_in_a_region,
}


@on(2)
@pytest.mark.parametrize("what", UNUSUAL)
def test_s8_what_is_no_plain_tensor_is_treated_as_by_torch(what):
    """Each of these was once taken for a plain tensor, and some took the process down."""
    safecomm.all_reduce(torch.ones(2))  # a plain one has been seen
    getattr(safecomm, GATHER)(torch.ones(4), torch.ones(2))
    outcomes = []
    for library in (stock, safecomm):
        try:
            result = UNUSUAL[what](library)
        except Exception as error:
            outcomes.append((type(error), str(error)))
        else:
            tensors = result if isinstance(result, (list, tuple)) else [result]
            outcomes.append([one.tolist() for one in tensors if isinstance(one, torch.Tensor)])
    assert outcomes[0] == outcomes[1]
    safecomm.drain(wait=True)


@contextlib.contextmanager
def _single_calls_go_direct():
    """Let gloo's regions of one call be launched as that call, and give the names of what was."""
    from safecomm.collectives import general

    launched = []

    table = dict(general.DIRECT)
    safecomm.all_reduce(torch.ones(1))  # so that there is a route
    route = ROUTES.fast[id(stock.group.WORLD)]
    route.single_call_equivalent = True
    general.DIRECT.update({name: (noted(launched, name, launch), *tables) for name, (launch, *tables) in table.items()})
    try:
        yield launched
    finally:
        route.single_call_equivalent = False
        general.DIRECT.update(table)


def _one_call(library, name, tensor, whole, asynchronous, op=None):
    how = {} if op is None else {"op": op}
    with library._coalescing_manager(async_ops=asynchronous) as manager:
        if name == "all_reduce":
            library.all_reduce(tensor, **how)
        elif name == GATHER:
            getattr(library, GATHER)(whole, tensor)
        else:
            getattr(library, SCATTER)(tensor, whole, **how)
    works = list(manager.works)
    manager.wait()
    return works


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", GATHER, SCATTER])
@on(2)
def test_a_region_of_one_call_is_launched_as_that_call_with_the_same_bits_s8(name, asynchronous):
    ops = [None] if name == GATHER else [None, stock.ReduceOp.MAX]
    for dtype, op in itertools.product((torch.float32, torch.bfloat16, torch.int64), ops):
        results = []
        for library in (stock, safecomm):
            tensor = torch.arange(3).to(dtype) + stock.get_rank()
            whole = (torch.arange(6) * (stock.get_rank() + 1)).to(dtype)
            with _single_calls_go_direct() as launched:
                works = _one_call(library, name, tensor, whole, asynchronous, op)
            assert launched == ([] if library is stock else [name])
            assert len(works) == asynchronous
            results.append((bits(tensor), bits(whole)))
        assert results[0] == results[1]
    assert safecomm.pending() == []


@pytest.mark.parametrize(("name", "nbytes"), [("all_reduce", 200), (GATHER, 600), (SCATTER, 600)])
@on(2)
def test_the_work_of_a_region_of_one_call_is_held_with_the_line_of_the_region_s1_s3(name, nbytes):
    tensor, whole = torch.ones(50), torch.ones(100)
    with _single_calls_go_direct(), safecomm._coalescing_manager(async_ops=True) as manager:
        if name == "all_reduce":
            safecomm.all_reduce(tensor)
        elif name == GATHER:
            getattr(safecomm, GATHER)(whole, tensor)
        else:
            getattr(safecomm, SCATTER)(tensor, whole)
    (entry,) = safecomm.pending()
    assert (entry.op, entry.nbytes) == ("_coalescing_manager", nbytes)
    assert re.search(r"test_collectives.py:\d+ in test_the_work_of_a_region", entry.site)
    manager.wait()
    assert safecomm.pending() == []


@on(2)
def test_regions_that_are_c10ds_though_they_have_one_call():
    from safecomm.collectives import coalesced

    spread = torch.ones(4, 2).t()
    with _single_calls_go_direct() as launched:
        with safecomm._coalescing_manager():  # not contiguous, which only the coalesced call takes
            safecomm.all_reduce(spread)
        with safecomm._coalescing_manager():
            safecomm.all_reduce(torch.ones(2, dtype=torch.complex64))
        with cpu_profile(), safecomm._coalescing_manager():
            safecomm.all_reduce(torch.ones(2))
        with Sees(), safecomm._coalescing_manager():
            safecomm.all_reduce(torch.ones(2))
        with safecomm._coalescing_manager():
            safecomm.all_reduce(torch.ones(2))
            safecomm.all_reduce(torch.ones(2))
        with mock.patch.object(coalesced, "_inflight", return_value=True):
            with safecomm._coalescing_manager(async_ops=True) as manager:
                safecomm.all_reduce(torch.ones(2))
            manager.wait()
        with contextlib.suppress(UnboundLocalError), safecomm._coalescing_manager():  # which is torch 2.4's own
            pass
        with pytest.raises(RuntimeError, match="leaf"), safecomm._coalescing_manager(), torch.no_grad():
            safecomm.all_reduce(torch.ones(2, requires_grad=True))
        assert launched == []
        with safecomm._coalescing_manager():  # and the group goes on
            safecomm.all_reduce(torch.ones(2))
        assert launched == ["all_reduce"]
    assert spread.sum() == 16


@on(2)
def test_a_call_that_comes_at_the_end_of_a_region_of_one_call_is_not_lost_s8():
    from safecomm.collectives import coalesced

    one, late = torch.ones(2), torch.ones(2)
    alone = coalesced._single_call

    def interrupted(*arguments):
        ready = alone(*arguments)
        safecomm.all_reduce(late)  # as from a signal handler
        return ready

    with _single_calls_go_direct() as launched, mock.patch.object(coalesced, "_single_call", interrupted):
        with safecomm._coalescing_manager():
            safecomm.all_reduce(one)
        assert launched == []
    assert (one.tolist(), late.tolist()) == ([2, 2], [2, 2])


@on(2)
def test_a_group_with_nothing_but_regions_has_a_lane_s10():

    group = stock.new_group()
    with safecomm._coalescing_manager(group):
        safecomm.all_reduce(torch.ones(2), group=group)
    assert id(group) in ROUTES.fast
    safecomm.destroy_process_group(group)


@pytest.mark.parametrize("name", ["ENABLE_INTRA_NODE_COMM", "TORCH_NCCL_NAN_CHECK"])
def test_regions_of_one_call_are_c10ds_where_its_coalesced_calls_differ_s8(name, monkeypatch):
    from safecomm import _torch

    monkeypatch.delenv(name, raising=False)
    assert not _torch.regions_differ()
    monkeypatch.setenv(name, "1")
    assert _torch.regions_differ()


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_waits_that_are_to_block_the_host_do_s8(name, monkeypatch):
    from safecomm import _torch

    monkeypatch.delenv(name, raising=False)
    assert _torch.waits_only_block_streams() == hasattr(stock.Work, "block_current_stream")
    monkeypatch.setenv(name, "1")
    assert not _torch.waits_only_block_streams()


@on(2)
def test_a_region_of_one_call_uses_what_the_tensor_has_at_its_end_s8():
    with _single_calls_go_direct() as launched:
        tensor, before = _swapped_in_a_region(safecomm)
        assert launched == ["all_reduce"]
    assert (tensor.tolist(), before.tolist()) == ([10] * 3, [1] * 3)


@on(2)
def test_a_region_can_be_entered_once_and_decorate_many_calls_s8():
    tensor = torch.ones(2)
    manager = safecomm._coalescing_manager()
    with manager:
        safecomm.all_reduce(tensor)
    with pytest.raises(AttributeError), manager:  # as torch's
        pass
    assert tensor.tolist() == [2] * 2
    safecomm.all_reduce(tensor)
    assert tensor.tolist() == [4] * 2, "nothing was left open"

    @safecomm._coalescing_manager()
    def step(before):
        safecomm.all_reduce(tensor)
        assert tensor.tolist() == [before] * 2, "called before the end of the region"

    for before in (4, 8):
        step(before)
    assert tensor.tolist() == [16] * 2


@on(2)
def test_a_region_keeps_nothing_alive_s2():
    def entered(manager, failing):
        tensor = torch.ones(2)
        memory = weakref.ref(tensor.untyped_storage())
        with contextlib.suppress(ValueError), manager:
            safecomm.all_reduce(tensor)
            if failing:
                raise ValueError
        return memory

    def refused(kept):
        local = torch.ones(2)
        kept.append(safecomm._coalescing_manager())
        with pytest.raises(ValueError, match=r"already collecting|non-empty"), kept[0]:
            pass
        return weakref.ref(local)

    gc.disable()
    try:
        for failing in (False, True):
            manager = safecomm._coalescing_manager()
            assert entered(manager, failing)() is None
        with safecomm._coalescing_manager():
            safecomm.all_reduce(torch.ones(2))
            kept = []
            assert refused(kept)() is None
    finally:
        gc.enable()


@on(2)
def test_results_of_a_region_that_was_waited_for_are_refused_and_not_empty():
    tensor = torch.ones(3)
    with safecomm._coalescing_manager(async_ops=True) as manager:
        safecomm.all_reduce(tensor)
    manager.wait()
    for ask in (manager.works[0].result, manager.works[0].get_future):
        with pytest.raises(safecomm.SafecommError, match=r"before wait\(\)"):
            ask()
    assert tensor.tolist() == [2] * 3


@on(2)
def test_s10_a_tensor_that_requires_grad_takes_the_direct_way_where_no_gradient_is_recorded():
    leaf, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    safecomm.all_reduce(plain)
    assert "all_reduce" not in _c10ds_own(lambda: safecomm.all_reduce(plain))
    assert "all_reduce" in _c10ds_own(lambda: safecomm.all_reduce(leaf * 1))

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):  # as in Megatron: the tensor still says that it requires a gradient
            assert tensor.requires_grad
            return tensor, _c10ds_own(lambda: safecomm.all_reduce(tensor))

        @staticmethod
        def backward(ctx, gradient, _):
            return gradient

    result, names = Region.apply(leaf * 1)
    assert "all_reduce" not in names
    assert result.tolist() == [2, 2]


@on(2)
def test_s8_a_dispatch_mode_sees_the_calls_that_it_sees_of_torch():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for name, call in _direct_calls().items():
        call(safecomm)  # the second call of a group is the first that can go the direct way
        sights = []
        for library in (stock, safecomm):
            seen = []
            with Watch():
                call(library)
            sights.append(seen)
        assert sights[0] == sights[1], name
        assert any(name in operator for operator in sights[0]), sights


@on(2)
def test_s8_the_profiler_shows_the_calls_that_it_shows_of_torch():
    for name, call in _direct_calls().items():
        call(safecomm)
        shown = []
        for library in (stock, safecomm):
            with cpu_profile() as profile:
                call(library)
            shown.append({event.key for event in profile.key_averages() if event.key.startswith(("c10d::", "gloo:"))})
        assert shown[0] == shown[1], name
        assert f"c10d::{name}" in shown[0], shown


@on(2)
def test_s8_a_tensor_that_requires_grad_gets_the_warning_that_it_gets_of_torch():
    import warnings

    said = []
    for library in (stock, safecomm):
        leaf = torch.ones(2, requires_grad=True)
        library.all_reduce(torch.ones(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moved = leaf * 1
            library.all_reduce(moved)
            moved.sum().backward()
        said.append(["autograd kernel was not registered" in str(warning.message) for warning in caught])
    assert said[0] == said[1], said


@on(2)
def test_s8_a_negative_view_is_written_out_first():
    def all_reduce(library, view, whole, part):
        library.all_reduce(view)

    def asynchronous(library, view, whole, part):
        library.all_reduce(view, async_op=True).wait()

    def gather(library, view, whole, part):
        getattr(library, GATHER)(whole, view)

    def scatter(library, view, whole, part):
        getattr(library, SCATTER)(part, view)

    for call in (all_reduce, asynchronous, gather, scatter):
        outcomes = []
        for library in (stock, safecomm):
            tensors = (
                torch.ones(4, 2).cumsum(0).view(torch.complex64).flatten().conj().imag,
                torch.zeros(8),
                torch.zeros(2),
            )
            assert tensors[0].is_neg()
            try:
                call(library, *tensors)
            except Exception as error:
                outcomes.append((type(error), str(error)))
            else:
                outcomes.append([tensor.tolist() for tensor in tensors])
        assert outcomes[0] == outcomes[1], call


@on(2)
def test_s8_what_is_neither_true_nor_false_is_refused_as_async_op():
    flags = (
        "yes",
        [],
        torch.ones(2),
        numpy.array([1, 0]),
        1,
        0,
        None,
        numpy.bool_(True),
        numpy.array(1),
        torch.tensor(0),
    )
    for flag in flags:
        for name in ("all_reduce", GATHER, SCATTER, "all_gather"):
            outcomes = []
            for library in (stock, safecomm):
                whole, part = torch.zeros(4), torch.ones(2)
                given = {"all_reduce": [part], GATHER: [whole, part], SCATTER: [part, whole]}
                arguments = given.get(name, [list(whole.chunk(2)), part])
                try:
                    returned = getattr(library, name)(*arguments, async_op=flag)
                except Exception as error:
                    outcomes.append(type(error))
                else:
                    outcomes.append((finish(returned), whole.tolist(), part.tolist()))
            assert outcomes[0] == outcomes[1], (flag, name)
