"""The gates: they are what the table makes of the template, each of their questions counts, and they stay short.

A mutant is a module with one node of its syntax tree changed (``mutants.py``). The checks below are what a gate and the
takers promise; each mutant has to fail one of them, and what is not changed passes all.
"""

import ast
import contextlib
import dis
import functools
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from mutants import finds, fresh
from ranks import on, run_program
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from watching import Sees, cpu_profile

import safecomm
from safecomm import _torch
from safecomm.collectives import gates, general, generate, takers
from safecomm.collectives.regions import REGIONS, Region
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.table import ROWS
from safecomm.core.ledger import LEDGER

HERE = TorchVersion(torch.__version__)
PACKAGE = Path(safecomm.__file__).parent


def wrapped(made, key):
    return getattr(made, key) or getattr(made, ROWS[key].alias)


GATED = [key for key, row in ROWS.items() if not row.because]
DIRECT = [key for key in GATED if wrapped(gates, key).__globals__ is vars(gates)]
"""Where torch has what it takes: before 2.6 broadcast and reduce have no ``group_src``."""

# --- what is made, and what it is made of ------------------------------------------------------------------


def test_the_gates_are_what_the_table_and_the_template_make():
    for suffix, made in ((".py", generate.gates()), (".pyi", generate.stub())):
        there = Path(gates.__file__).with_suffix(suffix).read_text()
        assert there == made, "run: python -m safecomm.collectives.generate"


def test_a_row_has_a_direct_way_or_says_why_not():
    launched = [row.key for row in ROWS.values() if row.launch is not None]
    assert launched == [*GATED, "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
    assert GATED == [
        "all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "reduce", "all_to_all_single",
    ]  # fmt: skip
    assert set(GATED) - set(DIRECT) <= ({"broadcast", "reduce"} if HERE < "2.6" else set())


def calls_of(path, names):
    """Yield what a file calls of ``names``, as functions or as methods."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in names:
                yield name


def test_the_gates_and_the_general_way_alone_launch_on_a_backend_or_hold():
    """What else takes calls hands them on: ``holding`` holds, by ``routes`` where a call is not ordinary.

    The exchange of an engine is another call than any of c10d's, and so is launched by the engine itself.
    """
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] in ("collectives", "arena", "peers", "patching")
        or path.name == "graphs.py"
        if list(calls_of(path, {"hold", *(f"_launch_{key}" for key in DIRECT), "_launch_all_gather"}))
    }
    assert found == {"collectives/gates.py", "collectives/holding.py", "collectives/routes.py"}


# --- checks ------------------------------------------------------------------------------------------------


class Notes:
    """Stands in for what launches: notes what it was given, and launches it."""

    def __init__(self, launch):
        self.launch = launch
        self.given = []

    def __call__(self, *given):
        self.given.append(given)
        return self.launch(*given)


@contextlib.contextmanager
def noting(made, key):
    name = f"_launch_{key}"
    notes = Notes(getattr(made, name))
    with mock.patch.object(made, name, notes):
        yield notes


def arguments(key, count=4):
    """Return what a call of one rank is given, without the group."""
    tensors = [torch.ones(count) for _ in ROWS[key].tensors]
    return (*tensors, *((0,) if key in ("broadcast", "reduce") else ()))


@contextlib.contextmanager
def nothing_held():
    assert safecomm.pending() == []
    yield
    safecomm.drain(wait=True)
    assert safecomm.pending() == []


def check_launch(made):
    """An ordinary call launches directly, once, with the options of its kind, and counts."""
    for key in DIRECT:
        for asynchronous in (False, True):
            before = repr(getattr(made, f"_count_{key}").__self__)
            with noting(made, key) as notes:
                work = wrapped(made, key)(*arguments(key), async_op=asynchronous)
            ((_, *_, options),) = notes.given
            assert isinstance(work, stock.Work) if asynchronous else work is None
            assert not _torch.ASYNC_OPTION or options.asyncOp is asynchronous
            assert repr(getattr(made, f"_count_{key}").__self__) != before
            if asynchronous:
                work.wait()


class Index:
    """A rank that c10d takes, and that is no key of a table, as an array is none."""

    __hash__ = None

    def __index__(self):
        return 0


def check_options(made):
    for key in {"all_reduce", "reduce_scatter_single", "reduce"} & set(DIRECT):
        with noting(made, key) as notes:
            wrapped(made, key)(*arguments(key), op=stock.ReduceOp.MAX)
        assert notes.given[0][-1].reduceOp == stock.ReduceOp.MAX
    with noting(made, "all_to_all_single") as notes:
        made.all_to_all_single(torch.ones(2), torch.ones(2), [2], [2])
        assert notes.given[0][-3:-1] == ([2], [2])
        for kind in (numpy.int64, numpy.uint8):  # as Megatron gives them
            made.all_to_all_single(torch.ones(2), torch.ones(2), numpy.array([2], kind), numpy.array([2], kind))
            assert notes.given[-1][-3:-1] == ([2], [2])
            assert {type(size) for sizes in notes.given[-1][-3:-1] for size in sizes} == {int}
    arrays = numpy.array([2.0]), numpy.array([[2]]), numpy.array(2), numpy.array([-2]), torch.tensor([2])
    for sizes in ([2.5], (2,), [-2], [1 << 70], 2, *arrays):  # c10d's to refuse, or to take
        assert not goes(made, "all_to_all_single", torch.ones(2), torch.ones(2), sizes, [2])
        assert not goes(made, "all_to_all_single", torch.ones(2), torch.ones(2), [2], sizes)
    with noting(made, "broadcast") as notes:
        if "broadcast" not in DIRECT:
            return
        made.broadcast(torch.ones(2), group_src=0)
        assert len(notes.given) == 1
        for wrong in ({"src": 1}, {"src": 0.0}, {"src": 0, "group_src": 0}, {}):
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                made.broadcast(torch.ones(2), **wrong)
        for wrong in ([0], {0}):  # which are no keys of a table
            with pytest.raises(TypeError, match="incompatible function arguments"):
                made.broadcast(torch.ones(2), src=wrong)
        made.broadcast(torch.ones(2), src=Index())
        assert len(notes.given) == 1


def check_held(made):
    """An asynchronous call holds its tensors until it was waited for, and says where it was made."""
    for key in DIRECT:
        with nothing_held():
            given = arguments(key)
            work = wrapped(made, key)(*given, async_op=True)
            assert len(safecomm.pending()) == 1, key
            (entry,) = safecomm.pending()
            assert entry.nbytes == 16 * len(ROWS[key].tensors), key
            assert entry.op == ROWS[key].name
            assert "in check_held" in entry.site
            assert (work.turn is None) is ROWS[key].pollable
            assert work.queue.pollable is ROWS[key].pollable
            work.wait()


def check_alias(made):
    """gloo's threads get tensors of their own, which share the versions of what is written to."""
    for key in DIRECT:
        given = arguments(key)
        with noting(made, key) as notes:
            wrapped(made, key)(*given, async_op=True).wait()
        sent = [one for one in notes.given[0][1:] if isinstance(one, (torch.Tensor, list))]
        sent = [*sent[0]] if isinstance(sent[0], list) else sent[: len(ROWS[key].tensors)]
        for one, tensor in zip(sent, given, strict=False):
            assert one is not tensor
            assert one.data_ptr() == tensor.data_ptr()
        written = given[0]
        version = written._version
        sent[0].add_(0)
        assert written._version == version + 1


class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def goes(made, key, *given, **how):
    """Return whether a call goes the direct way."""
    with noting(made, key) as notes, contextlib.suppress(TypeError, ValueError, RuntimeError):
        work = wrapped(made, key)(*given, **how)
        if work is not None and how.get("async_op"):
            work.wait()
    return bool(notes.given)


def goes_only_outside_of_modes(made, goes):
    """Return the profile in which ``goes()``, which asks whether a call goes the direct way, said no."""
    assert goes()
    for mode in (Function(), Sees(), FakeTensorMode(allow_non_fake_inputs=True)):  # the guards don't see the last
        with mode:
            assert not goes(), mode
    with cpu_profile() as profile:
        assert not goes()
    with mock.patch.dict(made._routes, clear=True):
        assert not goes()
    return profile


def check_ordinary(made):
    """What is not ordinary goes c10d's way, with all that torch does around it."""
    for key in DIRECT:
        given = arguments(key)
        profile = goes_only_outside_of_modes(made, lambda key=key, given=given: goes(made, key, *given))
        assert any(event.key == f"safecomm::{ROWS[key].name}" for event in profile.key_averages())
        with mock.patch.object(made, "_compiling", return_value=True):
            assert not goes(made, key, *given)
        with mock.patch.object(made, "_inflight", return_value=True):
            assert not goes(made, key, *given, async_op=True)
            assert goes(made, key, *given)
        assert not goes(made, key, *given, async_op=1)
        assert not goes(
            made, key, *[one.to(torch.complex64) if isinstance(one, torch.Tensor) else one for one in given]
        )
        leaf = [one.requires_grad_() if isinstance(one, torch.Tensor) else one for one in arguments(key)]
        assert not goes(made, key, *leaf)


class Nested:
    """Stands in for a nested tensor, about which the guards must not be asked: they take the process down."""

    is_nested = True
    requires_grad = False

    def __getattr__(self, name):
        raise AttributeError(name)


def check_nested(made):
    asked = []
    route = types.SimpleNamespace(
        guards=mock.Mock(guard1=asked.append, guard2=lambda *_: asked.append(_), plain=asked.append)
    )
    with mock.patch.dict(made._routes, {id(stock.group.WORLD): route}):
        for key in DIRECT:
            for place in range(len(ROWS[key].tensors)):
                given = [*arguments(key)]
                given[place] = Nested()
                with contextlib.suppress(Exception):  # what c10d says of it
                    wrapped(made, key)(*given)
                assert asked == [], key


def check_sweep(made):
    """A call looks whether something that is held is over (S4)."""
    for key in DIRECT:
        with (
            mock.patch.object(made, "_nonempty", {1: None}),
            mock.patch.object(made, "_can_skip_sweep", return_value=False),
        ):
            with mock.patch.object(made, "LEDGER", mock.Mock(wraps=LEDGER)) as ledger:
                wrapped(made, key)(*arguments(key))
            assert ledger.sweep.called, key
        with (
            mock.patch.object(made, "_nonempty", {1: None}),
            mock.patch.object(made, "_can_skip_sweep", return_value=True),
        ):
            with mock.patch.object(made, "LEDGER", mock.Mock(wraps=LEDGER)) as ledger:
                wrapped(made, key)(*arguments(key))
            assert not ledger.sweep.called, key


def returning(value):
    return mock.Mock(return_value=value)


def check_device(made):
    """On a device what was used on another stream than its own is left a trail of (S1), and works know their home."""
    for key in DIRECT:
        route = mock.Mock(index=0, stream_ordered=True, asks_in_wait=False)
        route.guards.guard1.return_value = route.guards.guard2.return_value = True
        ledger = mock.Mock()
        with (
            mock.patch.dict(made._routes, {id(stock.group.WORLD): route}),
            mock.patch.multiple(made, _alloc_stream=returning(7), _current=returning(5), LEDGER=ledger),
            mock.patch.object(made, f"_launch_{key}", return_value=None),
            mock.patch.object(made, f"_options_{key}", MagicOptions()),
        ):
            wrapped(made, key)(*arguments(key))
            ledger.hand_off.assert_called_once()
            assert ledger.hand_off.call_args.args[:3] == (ROWS[key].name, stock.group.WORLD, 0), key
            assert len(ledger.hand_off.call_args.args[3]) == len(ROWS[key].tensors)
            ledger.hand_off.reset_mock()
            with mock.patch.object(made, "_current", returning(7)):
                wrapped(made, key)(*arguments(key))
            assert not ledger.hand_off.called
        # Where waiting asks the device, it is asked in the relaxed mode (S5).
        route.asks_in_wait = True
        with (
            mock.patch.dict(made._routes, {id(stock.group.WORLD): route}),
            mock.patch.multiple(made, _alloc_stream=returning(7), _current=returning(7), LEDGER=ledger),
            mock.patch.object(made, "wait_for") as waited,
            mock.patch.object(made, f"_launch_{key}", side_effect=AssertionError),
            mock.patch.object(made, f"_options_{key}", MagicOptions()),
        ):
            wrapped(made, key)(*arguments(key))
            assert route.launch.call_count == 1
            assert waited.call_count == 1
            assert waited.call_args.args[2:4] == (ROWS[key], stock.group.WORLD)
            assert len(waited.call_args.args[4]) == len(ROWS[key].tensors)
            route.launch.reset_mock()
            wrapped(made, key)(*arguments(key), async_op=True)
            assert route.launch.call_count == 1
            assert route.hold.call_args.args[4] == 7


class MagicOptions:
    """Options of any kind of call."""

    rootRank = 0

    def __getitem__(self, _):
        return self

    def __call__(self, *_):
        return self

    get = __call__


def is_offered(made, key, given, call, goes, notes):
    """Assert that ``call()`` is offered before it is looked at, and goes where the answer says."""
    for holder in ("ENGINES", "BUCKETS", "REGIONS"):
        with mock.patch.object(made, holder, {1: 1}), mock.patch.object(made, "offer") as offer:
            offer.return_value = takers.Answer("taken")
            with Sees(), notes() as noted:
                assert call() == "taken"
            assert noted.given == []
            offer.assert_called_once()
            row, group, tensors, op, asynchronous = offer.call_args.args
            assert (row, group, asynchronous) == (ROWS[key], stock.group.WORLD, False)
            assert len(tensors) == len(row.tensors)
            assert all(one is other for one, other in zip(tensors, given, strict=False))
            assert op == (stock.ReduceOp.SUM if "op" in row.given else None)
            offer.return_value = made.DECLINED
            assert goes()
            offer.return_value = made.GENERAL
            assert not goes()


def check_asked(made):
    """Who may take a call is asked before all that can differ between ranks, and once (see takers.py)."""
    for key in DIRECT:
        given, bound = arguments(key), functools.partial
        call, way = bound(wrapped(made, key), *given), bound(goes, made, key, *given)
        is_offered(made, key, given, call, way, bound(noting, made, key))


def check_earlier(made):
    """The earlier names are the same calls, and their call site is the caller's."""
    for key in DIRECT:
        alias = ROWS[key].alias
        if alias and ROWS[key].name != alias and hasattr(c10d, alias):
            with warnings.catch_warnings(record=True) as told, nothing_held():
                warnings.simplefilter("always")
                work = getattr(made, alias)(*arguments(key), async_op=True)
                assert len(safecomm.pending()) == 1, key
                (entry,) = safecomm.pending()
                assert "in check_earlier" in entry.site
                work.wait()
            deprecated = getattr(getattr(c10d, alias), "__deprecated__", None)
            assert [str(one.message) for one in told] == ([] if deprecated is None else [deprecated])


CHECKS_OF_GATES = [
    check_launch, check_options, check_held, check_alias, check_ordinary, check_nested, check_sweep, check_device,
    check_asked, check_earlier,
]  # fmt: skip


@on(1)
def test_the_gates_pass_their_checks():
    safecomm.all_reduce(torch.ones(1))
    for check in CHECKS_OF_GATES:
        check(gates)
        check(fresh(gates))


MUTANTS_OF_GATES = {
    "compiles by itself": ("_compiling()", "False"),
    "looks at nothing that is held": ("_nonempty and not _can_skip_sweep()", "False"),
    "looks at all that is held": ("_nonempty and not _can_skip_sweep()", "_nonempty"),
    "asks no engine": ("ENGINES or BUCKETS or REGIONS", "BUCKETS or REGIONS"),
    "asks no buckets": ("ENGINES or BUCKETS or REGIONS", "ENGINES or REGIONS"),
    "asks no region": ("ENGINES or BUCKETS or REGIONS", "ENGINES or BUCKETS"),
    "launches what is taken": ("taken is not DECLINED", "taken is DECLINED"),
    "launches what is c10d's": ("_general_all_reduce(tensor, op=op, group=group, async_op=async_op) "
                                "if taken is GENERAL else taken.result", "None"),
    "sees no function mode": ("not _has_torch_function(tensor)", "True"),
    "asks guards about nested tensors": ("not tensor.is_nested", "True"),
    "asks guards about nested inputs": ("not input_tensor.is_nested", "True"),
    "asks guards about nested outputs": ("not output.is_nested", "True"),
    "sees no dispatch mode": ("not _modes()", "True"),
    "sees no profiler": ("not _profiler._is_profiler_enabled", "True"),
    "sees no graph input": ("async_op is True and not _inflight()", "async_op is True"),
    "takes any flag": ("async_op is False or (async_op is True and not _inflight())", "True"),
    "takes any root": ("_options_broadcast(route, to, src, group_src, None, async_op)",
                       "_options_broadcast(route, to, 0, None, None, async_op)"),
    "takes any sizes": ("(outputs := split_sizes(output_split_sizes)) is None",
                        "(outputs := output_split_sizes or []) is None"),
    "mixes options": ("_options_all_reduce[async_op].get(id(op))",
                      "_options_all_reduce[async_op].get(id(c10d.ReduceOp.SUM))"),
    "always launches synchronously": ("_options_all_reduce[async_op]", "_options_all_reduce[False]"),
    "counts nothing": ("_count_broadcast()", "None"),
    "holds no input": ("(output.untyped_storage(), input.untyped_storage())", "(output.untyped_storage(),)"),
    "holds nothing": ("route.hold", "(lambda work, op, inner, *_: inner)"),
    "polls what tells nothing": ("not route.stream_ordered", "False"),
    "waits twice": ("waited_for_once()", "Work()"),
    "gives gloo the tensor": ("tensor.detach()", "tensor"),
    "gives gloo the output": ("to_write, to_read = output.detach(), input.data", "pass"),
    "tells autograd nothing": ("(output.detach(), input.data)", "(output.data, input.data)"),
    "makes no handoff": ("index >= 0 and alloc_stream != _current(index)", "False"),
    "always makes a handoff": ("index >= 0 and alloc_stream != _current(index)", "index >= 0"),
    "knows one stream": ("_alloc_stream(output.data_ptr(), input.data_ptr()) if index >= 0 else HOST", "HOST"),
    "asks the device unrelaxed": ("inner = route.launch(_launch_all_reduce, launcher, [alias], options)",
                                  "inner = _launch_all_reduce(launcher, [alias], options)"),
    "waits unrelaxed": ("wait_for", "(lambda route, inner, *_: inner.wait())"),
    "launches unrelaxed": ("inner = route.launch(_launch_all_reduce, launcher, [tensor], options)",
                           "inner = _launch_all_reduce(launcher, [tensor], options)"),
    "names its own line": ("_caller(_getframe(1))", "_getframe(1)"),
    "warns of nothing": ("_deprecated_all_gather_single is not None and not _compiling()", "False"),
}  # fmt: skip


NOTHING_CHANGES_HERE = {
    "sees no dispatch mode": HERE < "2.6",  # the guards see FakeTensorMode too
    "collects under a mode": HERE < "2.6",
    "always launches synchronously": not _torch.ASYNC_OPTION,
    "names its own line": ROWS["all_gather_single"].name != "all_gather_single",  # there is no earlier name
    "warns of nothing": getattr(c10d.all_gather_into_tensor, "__deprecated__", None) is None,  # and torch does not
}
"""The mutants that do in this torch what is right."""


def changing(mutants):
    """Return the names of ``mutants``, those that change nothing in this torch to be skipped."""
    right = {change for change, no in NOTHING_CHANGES_HERE.items() if no}
    right |= {change for change, (old, _) in mutants.items() if "broadcast" in old and "broadcast" not in DIRECT}
    skip = pytest.mark.skip(reason="it does in this torch what is right")
    return [pytest.param(change, marks=[skip] if change in right else []) for change in mutants]


@pytest.mark.parametrize("change", changing(MUTANTS_OF_GATES))
@on(1)
def test_a_check_finds_gates_that(change):
    old, new = MUTANTS_OF_GATES[change]
    safecomm.all_reduce(torch.ones(1))
    assert finds(CHECKS_OF_GATES, fresh(gates, old, new))


@on(1)
def test_the_first_call_of_a_group_makes_the_way_of_the_next():
    for key in {"broadcast", "reduce", "all_to_all_single"} & set(DIRECT):
        group = stock.new_group([0])
        wrapped(gates, key)(*arguments(key), group=group)
        assert goes(gates, key, *arguments(key), group=group), key
        safecomm.destroy_process_group(group)


@on(1)
def test_a_root_of_a_group_that_was_destroyed_past_safecomm():
    group = stock.new_group([0])
    safecomm.all_reduce(torch.ones(1), group=group)
    for _ in range(2):
        safecomm.broadcast(torch.ones(1), src=0, group=group)
    stock.destroy_process_group(group)
    with pytest.raises((ValueError, TypeError)) as torchs:
        stock.broadcast(torch.ones(1), src=0, group=group)
    with pytest.raises(torchs.type) as raised:
        safecomm.broadcast(torch.ones(1), src=0, group=group)
    assert str(raised.value) == str(torchs.value)


def test_a_region_calls_what_somebody_has_put_in_the_place_of_torchs():
    run_program(
        """
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torchs, calls = c10d.all_reduce, []

def all_reduce(tensor, op=c10d.ReduceOp.SUM, group=None, async_op=False):
    calls.append(tensor)
    return torchs(tensor, op, group, async_op)

c10d.all_reduce = all_reduce
import safecomm

safecomm.all_reduce(torch.ones(1))
with safecomm._coalescing_manager():
    safecomm.all_reduce(torch.ones(1))
    safecomm.all_reduce(torch.ones(1))
assert len(calls) == 3, calls
dist.destroy_process_group()
"""
    ).check()


# --- takers ------------------------------------------------------------------------------------------------


class Engine:
    """Takes every call, and notes it."""

    answer = None

    def __init__(self):
        self.calls = []

    def run(self, group, name, tensors, op, asynchronous, *, unshared=True):
        self.calls.append(name)
        return self.answer

    def leave(self, _):
        return lambda: None


@contextlib.contextmanager
def engine_of(made, engine, group=None):
    group = group or stock.group.WORLD
    with mock.patch.dict(made.ENGINES, {group: engine}):
        yield engine


def offered(made, key, asynchronous=False, op=stock.ReduceOp.SUM, given=None):
    given = given or arguments(key)[: len(ROWS[key].tensors)]
    answer = made.offer(ROWS[key], stock.group.WORLD, given, op, asynchronous)
    assert type(answer) is made.Answer
    return answer if answer in (made.DECLINED, made.GENERAL) else answer.result


def check_nobody(made):
    assert offered(made, "all_reduce") is made.DECLINED
    other = object()
    with mock.patch.dict(made.ENGINES, {other: Engine()}), mock.patch.dict(made.BUCKETS, {other: None}):
        assert offered(made, "all_reduce") is made.DECLINED


def check_engine(made):
    with engine_of(made, Engine()) as engine:
        for key in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
            assert offered(made, key) is None
            assert offered(made, key, asynchronous=True) is None
        assert engine.calls == [
            name
            for key in ("all_reduce", "all_gather_single", "reduce_scatter_single")
            for name in [ROWS[key].name] * 2
        ]
        engine.calls.clear()
        for key in ("broadcast", "_all_gather_base"):
            assert offered(made, key) is made.DECLINED
        assert engine.calls == []
        with cpu_profile() as profile:
            assert offered(made, "all_reduce") is None
        assert any(event.key == "safecomm::all_reduce" for event in profile.key_averages())
    refuses = Engine()
    refuses.answer = made.DECLINED
    with engine_of(made, refuses) as engine:
        assert offered(made, "all_reduce") is made.DECLINED
        assert len(engine.calls) == 1
    with mock.patch.dict(made.ENGINES, {None: Engine()}):
        assert offered(made, "all_reduce") is None


def check_captured(made):
    """In a capture that is seen, the engine's calls are told to it: what they use, before and after (S5, S6)."""
    seen = mock.Mock(RECORDING={1: None})
    with engine_of(made, Engine()), mock.patch.object(made, "captures", seen):
        assert offered(made, "all_reduce") is None
        seen.check_group.assert_called_once()
        assert seen.check_group.call_args.args[:2] == ("all_reduce", stock.group.WORLD)
        seen.note.assert_called_once()
        assert seen.note.call_args.args[0] == "all_reduce"
        assert len(seen.note.call_args.args[2]) == 1


class Buckets:
    """Puts off what it is told to, and notes when it is closed."""

    def __init__(self, puts_off=True):
        self.puts_off = puts_off
        self.calls = []

    def defer(self, row, op, *tensors):
        self.calls.append(row.key)
        return self.puts_off

    @contextlib.contextmanager
    def closed(self):
        self.calls.append("closed")
        del self.table[stock.group.WORLD]
        yield
        self.table[stock.group.WORLD] = self


@contextlib.contextmanager
def buckets_of(made, buckets):
    buckets.table = made.BUCKETS
    with mock.patch.dict(made.BUCKETS, {stock.group.WORLD: buckets}):
        yield


def check_buckets(made):
    buckets = Buckets()
    with (
        buckets_of(made, buckets),
    ):
        assert offered(made, "all_reduce") is None
        assert buckets.calls == ["all_reduce"]
        assert offered(made, "all_reduce", asynchronous=True) is made.GENERAL
        assert offered(made, "broadcast") is made.GENERAL
        assert buckets.calls == ["all_reduce", "closed", "closed"]
        with engine_of(made, Engine()) as engine:
            assert offered(made, "all_reduce") is None
            assert engine.calls == []
            assert offered(made, "all_reduce", asynchronous=True) is None
            assert engine.calls == ["all_reduce"]  # after what was deferred
            assert buckets.calls[-1] == "closed"


def check_region(made):
    buckets, engine = Buckets(), Engine()
    region = Region()
    with (
        buckets_of(made, buckets),
        engine_of(made, engine),
        mock.patch.dict(REGIONS, {stock.group.WORLD: region}),
    ):
        assert offered(made, "all_reduce") is None
        assert len(region) == 1
        assert region[0].op.__name__ == "all_reduce"
        assert offered(made, "all_reduce", asynchronous=True) is not None
        assert offered(made, "broadcast", op=None) is made.GENERAL
        assert offered(made, "_reduce_scatter_base") is made.GENERAL
        tensor = torch.ones(4)
        with FakeTensorMode(allow_non_fake_inputs=True):  # which the guards don't see
            assert offered(made, "all_reduce", given=(tensor,)) is made.GENERAL
        with mock.patch.object(made, "_inflight", return_value=True):
            assert offered(made, "all_reduce", asynchronous=True) is made.GENERAL
        assert offered(made, "all_reduce", op=object()) is made.GENERAL
        assert offered(made, "all_reduce", op=None) is made.GENERAL
        for flag in ("yes", "", 1, torch.ones(2)):  # c10d refuses some of them
            assert offered(made, "all_reduce", asynchronous=flag) is made.GENERAL
        with mock.patch.dict(REGIONS, {stock.group.WORLD: mock.Mock()}):  # torch's own manager's, which is a list
            assert offered(made, "all_reduce") is made.GENERAL
        assert (buckets.calls, engine.calls, len(region)) == ([], [], 2)


def check_flags(made):
    """A flag that is no bool is what c10d takes it for."""
    buckets = Buckets()
    with (
        buckets_of(made, buckets),
    ):
        assert offered(made, "all_reduce", asynchronous=0) is None
        assert offered(made, "all_reduce", asynchronous=1) is made.GENERAL
        assert (
            offered(made, "all_reduce", asynchronous=torch.ones(2)) is None
        )  # c10d refuses it: it is not taken for true


CHECKS_OF_TAKERS = [
    check_nobody, check_engine, check_captured, check_buckets, check_region, check_flags,
]  # fmt: skip


@on(1)
def test_the_takers_pass_their_checks():
    safecomm.all_reduce(torch.ones(1))
    for check in CHECKS_OF_TAKERS:
        check(takers)
        check(fresh(takers))


MUTANTS_OF_TAKERS = {
    "forgets regions": ("REGIONS and (region := REGIONS.get(group)) is not None", "False"),
    "collects for torch's own manager": ("type(region) is Region", "True"),
    "collects what c10d does not": (
        "row.collected and row.launch is not None and _torch.is_torchs(getattr(c10d, row.name, None))",
        "row.launch is not None and _torch.is_torchs(getattr(c10d, row.name, None))"),
    "collects what is old": ("row.launch is not None", "True"),
    "collects any operation": ("id(op) in OP_IDS", "True"),
    "collects under a mode": ("not _modes()", "True"),
    "collects what is a graph's input": ("not (asynchronous and _inflight())", "True"),
    "asks buckets in a region": ("return GENERAL", "pass"),
    "forgets buckets": ("BUCKETS and (buckets := BUCKETS.get(group)) is not None", "False"),
    "puts off what was asked for now": ("row.collected and not asynchronous and buckets.defer(row, op, *tensors)",
                                        "row.collected and buckets.defer(row, op, *tensors)"),
    "puts off what can't be": ("row.collected and not asynchronous and buckets.defer(row, op, *tensors)",
                               "not asynchronous and buckets.defer(row, op, *tensors)"),
    "overtakes what was deferred": (
        "with buckets.closed():\n    taken = _run(row, group, tensors, op, asynchronous)", "taken = DECLINED"),
    "forgets the engine after buckets": ("taken = _run(row, group, tensors, op, asynchronous)", "taken = DECLINED"),
    "runs after buckets, and again": ("return GENERAL if taken is DECLINED else taken", "return GENERAL"),
    "gives an engine anything": ("row.kind and row.engine", "True"),
    "gives an engine what is old": ("row.kind and row.engine", "row.kind"),
    "knows no engine of everywhere": ("ENGINES.get(None)", "None"),
    "shows a profiler nothing": ("_profiler._is_profiler_enabled and not SPAN.open", "False"),
    "asks no capture": ("captures.check_group(row.name, group, flat)", "None"),
    "tells no capture": ("captures.note(row.name, group, with_memory(flat), site())", "None"),
    "takes what an engine leaves": (
        "if result is DECLINED:\n    return DECLINED", "if result is DECLINED:\n    return"),
    "takes flags as they are": ("asynchronous = is_true(asynchronous)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("change", changing(MUTANTS_OF_TAKERS))
@on(1)
def test_a_check_finds_takers_that(change):
    made = fresh(takers, *MUTANTS_OF_TAKERS[change])
    safecomm.all_reduce(torch.ones(1))
    assert finds(CHECKS_OF_TAKERS, made)


# --- captures that have to see each call ------------------------------------------------------------------


def check_general(made):
    """c10d's way tells a capture of each call, before it and after it (S5, S6)."""
    seen = mock.Mock(RECORDING={1: None})
    with mock.patch.object(made, "captures", seen):
        call = made.forwarded(ROWS["broadcast"])
        tensor = torch.ones(2)
        call(tensor, 0)
        seen.check_group.assert_called_once_with("broadcast", stock.group.WORLD, [tensor])
        seen.note.assert_called_once()
        assert seen.note.call_args.args[:3] == ("broadcast", stock.group.WORLD, [tensor])


def check_diverted(made):
    """While a capture has to see each call, no gate launches."""
    safecomm.all_reduce(torch.ones(1))
    with ROUTES.off():
        assert not goes(gates, "all_reduce", torch.ones(1))
        other = stock.new_group([0])  # one that is made meanwhile neither
        for _ in range(2):
            assert not goes(gates, "all_reduce", torch.ones(1), group=other)
    assert goes(gates, "all_reduce", torch.ones(1))
    assert goes(gates, "all_reduce", torch.ones(1), group=other)
    stock.destroy_process_group(other)


MUTANTS_OF_GENERAL = {
    "asks no capture": ("captures.check_group(name, group, tensors)", "None"),
    "tells no capture": ("captures.note(name, group, with_memory(tensors), caller())", "None"),
}


@pytest.mark.parametrize("change", [None, *MUTANTS_OF_GENERAL])
@on(1)
def test_a_capture_is_told_of_each_call_s5_s6(change):
    made = fresh(general, *MUTANTS_OF_GENERAL.get(change, ()))
    assert finds([check_general], made) is (change is not None)


@on(1)
def test_while_a_capture_sees_each_call_no_gate_launches_s5():
    check_diverted(None)


# --- the budget --------------------------------------------------------------------------------------------

BUDGET = {
    "all_reduce": 20, "all_gather_single": 25, "reduce_scatter_single": 25, "broadcast": 21, "reduce": 21,
    "all_to_all_single": 27,
}  # fmt: skip
"""Calls, of Python or of C, that an ordinary synchronous call of each makes at most before and after its launch."""


@on(1)
def test_an_ordinary_call_makes_few_calls_s10():
    for key in DIRECT:
        given = arguments(key)
        wrapped(gates, key)(*given)
        made = []

        def see(frame, event, argument, made=made):
            if event in ("call", "c_call"):
                made.append(
                    getattr(argument, "__name__", frame.f_code.co_name) if event == "c_call" else frame.f_code.co_name
                )

        sys.setprofile(see)
        try:
            wrapped(gates, key)(*given)
        finally:
            sys.setprofile(None)
        assert len(made) - 1 <= BUDGET[key], (key, made)


def test_a_gate_is_short_s10():
    """The bytecodes of a gate, most of which an ordinary call runs; what a maintainer adds is paid by each call."""
    for key in DIRECT:
        count = len(list(dis.get_instructions(getattr(gates, f"_{key}"))))
        assert count <= 425, (key, count)
