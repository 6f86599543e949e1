"""A wrong argument is refused in one sentence that says what to do, before anything is changed.

Every parameter of every public function and class is tried, by the signatures, so that a new one needs a line in
``RIGHT``. What is wrapped refuses what torch refuses, in torch's words (S8).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import re
import textwrap
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import on, run_program

import safecomm
from safecomm import functional, leaks
from safecomm.arena import arena as arenas
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.takers import BUCKETS, ENGINES
from safecomm.diagnostics import record
from safecomm.patching.table import NAMES

# --- what is tried -----------------------------------------------------------------------------------------


def junk():
    """Return values that few parameters take, by what they are called here."""
    return {
        "None": None,
        "empty": "",
        "typo": "typo",
        "three": 3,
        "zero": 0,
        "minus one": -1,
        "huge": 2**70,
        "longer": 10**5000,
        "half": 0.5,
        "nan": math.nan,
        "infinity": math.inf,
        "true": True,
        "bytes": b"x",
        "tensor": torch.ones(3),
        "one": torch.ones(1),
        "whole": torch.tensor(2),
        "list": [1],
        "nothing": [],
        "tuple": (),
        "dictionary": {3: 3},
        "lambda": lambda: None,
        "class": int,
        "object": object(),
        "delta": timedelta(seconds=-1),
    }


TIMES = {"None", "three", "zero", "half"}

OWN = {
    "Arena": {
        "nbytes": {"three"},
        "device": {"None"},
        "full": set(),
        "buckets": {"None"},
        "check": {"None"},
        "register": {"None"},
        "symmetric": {"true"},
    },
    "Arena.empty": {
        "size": {"three", "tuple", "list", "nothing"},
        "dtype": {"None"},
        "bucket": {"empty"},
    },
    "Arena.offset": {"tensor": set()},
    "Arena.owns": {"tensor": {"tensor", "one", "whole"}},
    "LowLatencyLimits": {field.name: {"three", "zero"} for field in dataclasses.fields(safecomm.LowLatencyLimits)},
    "avoid_record_streams": {"mode": set(), "release": set(), "this_thread": {"true"}, "strict": {"true"}},
    "bucketed": {"bucket_mb": {"None", "three", "half", "typo", "empty"}, "group": {"None"}},
    "drain": {"wait": {"true"}, "timeout": TIMES, "group": {"None"}},
    # Where no arena is in use, size and type are torch.empty's to check: it takes a tensor and a class.
    "empty": {
        "size": {"three", "zero", "minus one", "huge", "longer", "tuple", "list", "nothing", "whole"},
        "dtype": {"None", "class"},
        "device": {"None"},
        "bucket": {"empty", "typo"},
    },
    "graph": {
        "cuda_graph": set(),
        "pool": {"None", "tuple"},
        "stream": {"None"},
        "capture_error_mode": set(),
        "groups": {"nothing", "tuple", "empty"},
        "newer": set(),
    },
    "is_patched": {"name": {"None"}},
    "invariant": {"group": {"None"}},
    "low_latency": {
        "group": {"None"},
        "limits": {"None", "typo", "empty"},
        "timeout": TIMES,
        "check": {"true"},
        "functional": {"true"},
    },
    "original": {"name": {"empty", "typo"}},  # AttributeError, as getattr() does
    "patch": {"strict": {"None", "true"}, "avoid_record_streams": {"None", "true"}},
    "patched": {"strict": {"None", "true"}, "avoid_record_streams": {"None", "true"}},
    "record_memory": {"path": {"typo"}, "interval": {"three", "half"}},
    "settle_before_capture": {"timeout": TIMES},
    "use_arena": {
        "arena": {"three"},
        "device": {"None"},
        "full": set(),
        "buckets": {"None"},
        "check": {"None"},
        "register": {"None"},
    },
    "leaks.watch": {"owners": set(), "log_leaks": {"true"}},
}
"""Which of the junk is no junk, by function and parameter."""

ROWS = {"list", "nothing", "tuple", "dictionary"}
DIMS = {"three", "zero", "minus one"}
FUNCTIONAL = {
    "all_reduce": {"op": set()},
    "all_gather": {"dim": DIMS},
    "reduce_scatter": {"dim": DIMS, "op": set()},
    # Whether numbers of rows fit the group and the tensor, c10d says.
    "all_to_all": {"output_splits": ROWS, "input_splits": ROWS},
    "copy_to_tensor_parallel_region": {},
    "gather_from_sequence_parallel_region": {"dim": DIMS},
    "gather_from_tensor_parallel_region": {"dim": DIMS},
    "reduce_from_tensor_parallel_region": {},
    "reduce_scatter_to_sequence_parallel_region": {"dim": DIMS},
    "scatter_to_tensor_parallel_region": {"dim": DIMS},
}
for _name, _more in FUNCTIONAL.items():
    OWN[f"functional.{_name}"] = {"tensor": {"tensor", "one", "whole"}, "group": {"None"}, **_more}
    if "async_op" in inspect.signature(getattr(functional, _name)).parameters:
        OWN[f"functional.{_name}"]["async_op"] = {"true"}

MADE_BY_SAFECOMM = {
    "ArenaStats", "BucketStats", "CapturedGraph", "Lease", "Pending", "Work", "functional.AsyncResult", "leaks.Leak",
}  # fmt: skip
"""Results, which programs read and do not make."""


def public():
    """Yield the public functions and classes of safecomm's own that take arguments, by their names."""
    named = {name: getattr(safecomm, name) for name in safecomm._OWN}
    named |= {f"functional.{name}": getattr(functional, name) for name in functional.__all__}
    named |= {f"leaks.{name}": getattr(leaks, name) for name in leaks.__all__}
    named |= {f"Arena.{name}": getattr(safecomm.Arena, name) for name in ("empty", "offset", "owns")}
    for name, thing in named.items():
        failure = isinstance(thing, type) and issubclass(thing, Exception)
        if callable(thing) and not failure and name not in MADE_BY_SAFECOMM and name != "P2POp":
            yield name, thing


def parameters(thing):
    return {name: one for name, one in inspect.signature(thing).parameters.items() if name != "self"}


RIGHT = {
    "Arena": lambda: {"nbytes": 4096, "device": "cpu"},
    "Arena.empty": lambda: {"size": (3,)},
    "LowLatencyLimits": lambda: dict.fromkeys(("one_shot", "two_shot", "scatter", "gather"), 0),
    "empty": lambda: {"size": (3,)},
    "graph": lambda: {"cuda_graph": object.__new__(torch.cuda.CUDAGraph)},
    "original": lambda: {"name": "all_reduce"},
    "record_memory": dict,
    "use_arena": lambda: {"arena": 4096, "device": "cpu"},
    "functional.all_to_all": lambda: {"tensor": torch.ones(4, 4), "output_splits": [2, 2], "input_splits": [2, 2]},
}
"""The other arguments of each call, where it needs some."""


def attempt(name, parameter, value):
    """Make a call that is right but for one argument; return what was raised, None if it was accepted."""
    of, _, rest = name.partition(".")
    arena = safecomm.Arena(4096, "cpu") if of == "Arena" and rest else None
    if arena is not None:
        function = getattr(arena, rest)
    else:
        function = getattr(getattr(safecomm, of), rest) if rest else getattr(safecomm, of)
    default = (lambda: {"tensor": torch.ones(4, 4)}) if of == "functional" else dict
    given = RIGHT.get(name, default)()
    given[parameter] = value
    kind = parameters(function)[parameter].kind
    positional = ()
    for key in ("size", "owners"):
        if key in given:
            found = given.pop(key)
            positional = found if key == "size" and parameter != "size" else (found,)
    if kind is inspect.Parameter.VAR_KEYWORD:
        given["typo"] = given.pop(parameter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = function(*positional, **given)
            if hasattr(made, "__enter__"):
                with made:
                    pass
    except Exception as error:
        return error
    finally:
        made = None
        if arena is not None:
            arena.close()
        for one in tuple(arenas.OPEN.values()):
            one.close()
    return None


INTERNAL = re.compile(
    r"has no attribute|not supported between|is not iterable|not subscriptable|unhashable|has no len|bad operand|"
    r"can't be converted|cannot be converted|incompatible function|only integer tensors|Boolean value of|"
    r"too large to convert|Exceeds the limit|__index__|__fspath__|Expected one of cpu, cuda, ipu"
)


def check_refused(name, parameter, label, error):
    what = f"{name}({parameter}={label})"
    assert error is not None, f"{what} was accepted"
    said = str(error)
    assert isinstance(error, (TypeError, ValueError, OSError, IndexError, safecomm.SafecommError)), f"{what}: {error!r}"
    assert "\n" not in said.strip(), f"{what}: {said}"
    assert 15 < len(said) < 250, f"{what}: {said}"
    assert not INTERNAL.search(said), f"{what}: {said}"


def check_clean():
    """Nothing is held or left open."""
    assert safecomm.pending() == []
    assert not arenas.OPEN
    assert not safecomm.arena.use.IN_USE
    assert not BUCKETS
    assert not REGIONS
    assert not ENGINES
    assert not safecomm.is_patched()
    assert not record._on


CALLS = [(name, parameter) for name, thing in public() for parameter in parameters(thing)]
WRONG = [
    (name, parameter, label)
    for name, parameter in CALLS
    for label in junk()
    if label not in OWN.get(name, {}).get(parameter, ())
]


def test_every_public_name_and_parameter_is_tried():
    assert {(name, parameter) for name, parameter, _ in WRONG} == set(CALLS)
    assert {(name, parameter) for name, of in OWN.items() for parameter in of} == set(CALLS)
    assert len(WRONG) > 1000


def reduce_works():
    tensor = torch.full((3,), float(stock.get_rank() + 1))
    safecomm.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(stock.get_world_size() + 1))] * 3


@pytest.mark.parametrize("name", sorted(OWN))
@on(2)
def test_a_wrong_argument_is_refused_and_nothing_is_changed(name):
    peer = 1 - safecomm.get_rank()
    received = torch.zeros(3)
    work = safecomm.irecv(received, peer)  # which nobody has sent yet
    before = [(one.op, one.site) for one in safecomm.pending()]
    assert len(before) == 1
    values = junk()
    for _, parameter, label in (one for one in WRONG if one[0] == name):
        check_refused(name, parameter, label, attempt(name, parameter, values[label]))
        assert [(one.op, one.site) for one in safecomm.pending()] == before, (parameter, label)
    safecomm.send(torch.ones(3), peer)
    work.wait()
    assert received.tolist() == [1, 1, 1]
    check_clean()
    reduce_works()


# --- junk by chance ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """A group of one rank, in this process."""
    stock.init_process_group("gloo", store=stock.HashStore(), rank=0, world_size=1)
    yield
    stock.destroy_process_group()


VALUES = st.recursive(
    st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(min_size=1).filter(lambda text: text not in ("cpu", "cuda", "raise"))
    | st.binary()
    | st.sampled_from([torch.ones(3), torch.tensor(1), len, int, print, Ellipsis, NotImplemented, re, object()])
    | st.functions(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers(), inner, min_size=1),
    max_leaves=4,
)
ONLY_ONE_KIND = [
    (name, parameter)
    for name, parameter in CALLS
    if OWN[name][parameter] <= {"None", "true"} and parameter not in ("newer", "device", "owners")
]  # fmt: skip


@given(call=st.sampled_from(ONLY_ONE_KIND), value=VALUES)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_by_chance_is_refused(alone, call, value):
    check_refused(*call, repr(value)[:80], attempt(*call, value))
    check_clean()


@given(call=st.sampled_from(["drain", "settle_before_capture", "low_latency"]), value=VALUES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_timeout_is_seconds_or_a_timedelta(alone, call, value):
    if isinstance(value, (int, float)) and 0 <= value <= 1e9:
        assert attempt(call, "timeout", value) is None
        assert attempt(call, "timeout", timedelta(seconds=value)) is None
    elif not isinstance(value, (int, float)) or not value > 0 or value > 1e10:
        check_refused(call, "timeout", repr(value)[:80], attempt(call, "timeout", value))


# --- what is wrapped -----------------------------------------------------------------------------------------


def arguments_of(parameters):
    """Return right arguments of a wrapped call in a group of one rank."""
    one = torch.ones(2)
    right: dict = dict.fromkeys(("tensor", "output", "input", "output_tensor", "input_tensor"), one)
    lists = ("tensors", "tensor_list", "input_list", "output_tensor_list", "input_tensor_list", "gather_list")
    right |= {name: [one] for name in (*lists, "scatter_list", "object_list", "object_gather_list")}
    right |= {name: [None] for name in ("scatter_object_output_list", "scatter_object_input_list")}
    right |= {"output_tensor_lists": [[one]], "obj": 1, "p2p_op_list": [], "ranks_to_exclude": []}
    right["src" if "src" in parameters else "dst"] = 0
    return {name: value for name, value in right.items() if name in parameters}


WRAPPED = [
    (name, parameter)
    for name in NAMES
    if hasattr(safecomm, name) and hasattr(c10d, name)
    for parameter in parameters(getattr(c10d, name))
]


@pytest.mark.parametrize("value", ["typo", object()], ids=["text", "object"])
@pytest.mark.parametrize(("name", "parameter"), WRAPPED)
def test_what_is_wrapped_says_what_torch_says(alone, name, parameter, value):
    said = []
    for module in (c10d, safecomm):
        given = {**arguments_of(parameters(getattr(c10d, name))), parameter: value}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = getattr(module, name)(**given)
                if hasattr(made, "__enter__"):
                    with made:
                        pass
            said.append(None)
        except Exception as error:
            said.append((type(error), re.sub(r"0x[0-9a-f]+|tensor\(.*?\)", "", str(error))))
        if module is c10d:
            c10d._world.pg_coalesce_state.clear()  # torch leaves a region open that it has refused to begin (2.13)
    assert said[0] == said[1]
    check_clean()
    reduce_works()


@pytest.mark.parametrize(
    "timeout", ["typo", 3, b"x", True, torch.ones(1), object()], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("kind", ["collective", "point-to-point", "region"])
@on(2)
def test_a_wait_for_a_wrong_time_says_what_torch_says_and_the_work_goes_on(kind, timeout):
    def launch(dist):
        tensor = torch.ones(3)
        if kind == "collective":
            return dist.all_reduce(tensor, async_op=True)
        if kind == "point-to-point":
            return (dist.isend if dist.get_rank() else dist.irecv)(tensor, 1 - dist.get_rank())
        with dist._coalescing_manager(async_ops=True) as region:
            dist.all_reduce(tensor, async_op=True)
        return region

    for dist in (stock, safecomm):
        work = launch(dist)
        with pytest.raises(TypeError):
            (work.works[0] if kind == "region" else work).wait(timeout)
        if dist is stock:
            work.wait()
    assert "quarantined" not in {one.state for one in safecomm.pending()}
    work.wait()
    reduce_works()
    check_clean()


@pytest.mark.parametrize("kind", ["collective", "point-to-point"])
@on(2)
def test_a_float_is_seconds_for_a_wait_as_in_torch(kind):
    tensor = torch.ones(3)
    if kind == "collective":
        work = safecomm.all_reduce(tensor, async_op=True)
    else:
        work = (safecomm.isend if safecomm.get_rank() else safecomm.irecv)(tensor, 1 - safecomm.get_rank())
    assert work.wait(30.0)
    check_clean()


# --- groups --------------------------------------------------------------------------------------------------


@on(2)
def test_a_group_is_what_torch_takes_for_one():
    other = c10d.GroupMember.NON_GROUP_MEMBER
    assert safecomm.drain(group=other) == 0
    assert safecomm.drain(group=pickle.loads(pickle.dumps(other))) == 0
    with safecomm.bucketed(group=other):
        pass
    for refuses in (safecomm.low_latency, lambda group: safecomm.Arena(4096, "cpu", check=group)):
        with pytest.raises(TypeError, match="a process group that this rank is in"):
            refuses(group=other)
    with safecomm.bucketed(group=stock.group.WORLD):
        reduce = torch.ones(2)
        safecomm.all_reduce(reduce)
    assert reduce.tolist() == [2, 2]
    check_clean()


@on(2)
def test_a_wrong_group_does_not_hide_a_work_that_is_pending():
    tensor = torch.ones(3)
    if safecomm.get_rank():
        work = safecomm.irecv(tensor, 0)
        with pytest.raises(TypeError, match=r"drain\(group='typo'\): expected a process group"):
            safecomm.drain(group="typo")
        assert safecomm.drain() == 12
    reduce_works()
    if not safecomm.get_rank():
        work = safecomm.isend(tensor, 1)
    work.wait()
    check_clean()


def test_before_there_is_a_group_torch_says_so():
    ended = run_program(
        textwrap.dedent("""
        import safecomm, torch
        for call in (
            lambda: safecomm.low_latency().enable(),
            lambda: safecomm.functional.all_reduce(torch.ones(1)),
            lambda: torch.distributed.get_rank(),
        ):
            try:
                call()
            except ValueError as error:
                print(error)
        """)
    )
    ended.check(destroyed=False)
    assert len(ended.out.splitlines()) == 3
    assert len(set(ended.out.splitlines())) == 1


@pytest.mark.skipif(not hasattr(torch.ops.safecomm, "all_reduce"), reason="there are no operators here")
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_"])
def test_an_operator_refuses_what_is_no_operation_and_no_group(alone, name):
    operator = getattr(torch.ops.safecomm, name)
    group = stock.group.WORLD.group_name
    for arguments in (("typo", group), ("", group), ("sum", "typo"), ("sum", "")):
        with pytest.raises(ValueError, match=r"torch\.ops\.safecomm"):
            operator(torch.ones(1), *arguments)
    for arguments in ((None, group), (3, group), ("sum", None), ("sum", stock.group.WORLD)):
        with pytest.raises(RuntimeError, match="safecomm::all_reduce"):  # the schema's
            operator(torch.ones(1), *arguments)
    check_clean()
    reduce_works()
