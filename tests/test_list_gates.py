"""The direct way of the list forms: each of its questions counts, and it holds what it was given.

The mutants are as those of ``test_gates.py``: the module with one node changed has to fail a check.
"""

import contextlib
import functools
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as stock
from mutants import finds, fresh
from ranks import on
from test_gates import MagicOptions, Nested, changing, goes_only_outside_of_modes, is_offered
from torch.torch_version import TorchVersion
from watching import cpu_profile

import safecomm
from safecomm import _torch
from safecomm.collectives import gates, lists
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.table import ROWS
from safecomm.core.ledger import LEDGER, WorkHold
from safecomm.core.work import StagedWork, Work

HERE = TorchVersion(torch.__version__)

KEYS = ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
DIRECT = [key for key in KEYS if key not in ("gather", "scatter") or HERE >= "2.6"]
"""Before 2.6 gather and scatter have no ``group_dst`` and ``group_src``, so that they stay c10d's."""


def arguments(key, count=4):
    """Return what a call of one rank is given, without the group."""
    one, other = torch.ones(count), torch.ones(count)
    return {
        "all_gather": ([one], other),
        "reduce_scatter": (one, [other]),
        "all_to_all": ([one], [other]),
        "gather": (one, [other], 0),
        "scatter": (one, [other], 0),
    }[key]


def run(made, key, *given, group=None, asynchronous=False, **how):
    """Run a call of ``made``, which is ``lists`` or a mutant of it, as the public function does."""
    return getattr(made, key)(*given, group=group, async_op=asynchronous, **how)


class Launches:
    """Stands in for what launches: notes what it was given, and launches it if it is to."""

    def __init__(self, way, launches):
        self.function = way.function
        self.launches = launches
        self.given = []

    def __call__(self, *given):
        self.given.append(given)
        return self.function(*given) if self.launches else None


@contextlib.contextmanager
def noting(made, key, *, launches=True):
    way = getattr(made, f"_{key.upper()}")
    notes = Launches(way, launches)
    way.function = notes
    try:
        yield notes
    finally:
        way.function = notes.function


def goes(made, key, *given, **how):
    """Return whether a call goes the direct way. It is not launched: under a mode that takes the process down."""
    with (
        noting(made, key, launches=False) as notes,
        contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError),
    ):
        work = run(made, key, *given, **how)
        if isinstance(work, stock.Work):
            work.wait()
    return bool(notes.given)


@functools.cache
def runs(key):
    """Return whether gloo runs a collective: not each version of torch has all of them."""
    world, rank = stock.get_world_size(), stock.get_rank()
    one, parts, others = torch.ones(1), [torch.ones(1) for _ in range(world)], [torch.ones(1) for _ in range(world)]
    given = {
        "all_gather": (parts, one), "reduce_scatter": (one, parts), "all_to_all": (parts, others),
        "gather": (one, None if rank else parts, 0), "scatter": (one, None if rank else parts, 0),
    }[key]  # fmt: skip
    try:
        getattr(stock, key)(*given)
    except RuntimeError:
        return False
    return True


def present():
    found = [key for key in DIRECT if runs(key)]
    assert found
    return found


# --- checks ------------------------------------------------------------------------------------------------


def check_launch(made):
    """An ordinary call launches once, with the options of its kind, counts, and does what it is to do."""
    for key in present():
        way = getattr(made, f"_{key.upper()}")
        for asynchronous in (False, True):
            before = repr(way.count.__self__)
            given = arguments(key)
            source = given[1] if key in ("all_gather", "reduce_scatter", "all_to_all", "scatter") else given[0]
            (source[0] if isinstance(source, list) else source).fill_(7)
            with noting(made, key) as notes:
                work = run(made, key, *given, asynchronous=asynchronous)
            ((_, _, _, options),) = notes.given
            assert isinstance(work, stock.Work) if asynchronous else work is None
            assert not _torch.ASYNC_OPTION or options.asyncOp is asynchronous
            assert repr(way.count.__self__) != before
            if asynchronous:
                work.wait()
            for one in given[:2]:
                assert (one[0] if isinstance(one, list) else one).tolist() == [7] * 4, key


def check_held(made):
    """An asynchronous call holds all of its tensors until it was waited for, and says where it was made."""
    for key in present():
        assert safecomm.pending() == []
        row = ROWS[key]
        work = getattr(made, key)(*arguments(key), async_op=True)
        assert len(safecomm.pending()) == 1, key
        (entry,) = safecomm.pending()
        assert entry.nbytes == 32, key
        assert entry.op == row.name
        assert "in check_held" in entry.site
        assert (work.turn is None) is row.pollable
        assert work.queue.pollable is row.pollable
        work.wait()
        safecomm.drain(wait=True)


def check_alias(made):
    """gloo's threads get tensors of their own, which share the versions of what is written to."""
    for key in present():
        given = arguments(key)
        with noting(made, key) as notes:
            run(made, key, *given, asynchronous=True).wait()
        sent = []
        for one in notes.given[0][1:3]:
            for tensor in one:
                sent += tensor if isinstance(tensor, list) else [tensor]
        mine = [tensor for one in given[:2] for tensor in (one if isinstance(one, list) else [one])]
        assert {tensor.data_ptr() for tensor in sent} == {tensor.data_ptr() for tensor in mine}
        assert {id(tensor) for tensor in sent}.isdisjoint(map(id, mine))


def check_ordinary(made):
    """What is not ordinary goes c10d's way, with all that torch does around it."""
    for key in present():
        given = arguments(key)
        goes_only_outside_of_modes(made, functools.partial(goes, made, key, *given))
        with mock.patch.object(made, "_inflight", return_value=True):
            assert not goes(made, key, *given, asynchronous=True)
            assert goes(made, key, *given)
        assert not goes(made, key, *given, asynchronous=1)
        for change in (lambda one: one.to(torch.complex64), lambda one: one.clone().requires_grad_()):
            changed = [
                [change(part) for part in one]
                if isinstance(one, list)
                else change(one)
                if torch.is_tensor(one)
                else one
                for one in arguments(key)
            ]
            assert not goes(made, key, *changed)
        mixed = [[part.double() for part in one] if key != "all_to_all" or not place else one
                 for place, one in enumerate(given) if isinstance(one, list)]  # fmt: skip
        mixed = [mixed.pop(0) if isinstance(one, list) else one for one in given]
        assert not goes(made, key, *mixed)
        tuples = [tuple(one) if isinstance(one, list) else one for one in given]
        assert not goes(made, key, *tuples)
        empty = [[] if isinstance(one, list) else one for one in given]
        assert not goes(made, key, *empty)


def check_nested(made):
    asked = []
    route = mock.Mock(guards=mock.Mock(all=asked.append))
    with mock.patch.dict(made._routes, {id(stock.group.WORLD): route}):
        for key in present():
            given = [[Nested()] if isinstance(one, list) else Nested() if torch.is_tensor(one) else one
                     for one in arguments(key)]  # fmt: skip
            goes(made, key, *given)
    assert asked == []


def check_roots(made):
    """The root has the list, and is named as c10d takes it."""
    for key, group_root in (("gather", "group_dst"), ("scatter", "group_src")):
        if key not in present():
            continue
        one, parts, _ = arguments(key)
        for how in ({}, {group_root: 0}):
            assert goes(made, key, one, parts, **how), (key, how)
        for wrong in ((1,), (0.0,), ([0],)):
            assert not goes(made, key, one, parts, *wrong)
        assert not goes(made, key, one, parts, 0, **{group_root: 0})
        assert not goes(made, key, one, None, 0)
        route = made._routes[id(stock.group.WORLD)]
        with mock.patch.object(route, "rank", 1):  # on another rank nobody has the list
            assert not goes(made, key, one, parts, 0)
            seen = mock.Mock(return_value=None)
            with mock.patch.object(getattr(made, f"_{key.upper()}"), "function", seen):
                run(made, key, one, None, 0)
            outputs, inputs = seen.call_args.args[1:3]
            assert (outputs, inputs) == (([], [one]) if key == "gather" else ([one], []))


def check_operation(made):
    if "reduce_scatter" not in present():
        return
    with noting(made, "reduce_scatter") as notes:
        run(made, "reduce_scatter", *arguments("reduce_scatter"), op=stock.ReduceOp.MAX)
    assert notes.given[0][-1].reduceOp == stock.ReduceOp.MAX
    assert not goes(made, "reduce_scatter", *arguments("reduce_scatter"), op=object())


def check_sweep(made):
    """A call looks whether something that is held is over (S4)."""
    for key in present():
        for awaited in (False, True):
            with (
                mock.patch.object(made, "_nonempty", {1: None}),
                mock.patch.object(made, "_can_skip_sweep", return_value=awaited),
                mock.patch.object(made, "LEDGER", mock.Mock(wraps=LEDGER)) as ledger,
            ):
                run(made, key, *arguments(key))
            assert ledger.sweep.called is not awaited, key


def check_asked(made):
    """Who may take a call is asked before all that can differ between ranks, and once (see takers.py)."""
    for key in present():
        given, bound = arguments(key), functools.partial
        call, way = bound(run, made, key, *given), bound(goes, made, key, *given)
        is_offered(made, key, given, call, way, bound(noting, made, key))


def check_compiling(made):
    for key in present():
        with mock.patch.object(made, "_compiling", return_value=True):
            assert not goes(made, key, *arguments(key))


def check_device(made):
    """On a device what was used on another stream than its own leaves a trail (S1), as does what has failed (S4)."""
    for key in present():
        row, way = ROWS[key], getattr(made, f"_{key.upper()}")
        for queries in (False, True):
            route = mock.Mock(index=0, stream_ordered=True, asks_in_wait=queries, rank=0)
            route.launch = lambda function, *given: function(*given)
            with (
                mock.patch.dict(made._routes, {id(stock.group.WORLD): route}),
                mock.patch.object(made, "_current", return_value=5),
                mock.patch.object(made, "finish") as finish,
                mock.patch.object(way, "options", MagicOptions()),
            ):

                def ended(finish=finish, row=row):
                    """Return what has been the answer to the call that has ended, and forget it."""
                    finish.assert_called_once()
                    call, answer = finish.call_args.args
                    assert (call.row, call.group, call.index, call.staged) == (
                        row, stock.group.WORLD, 0, row.staged and not isinstance(answer, Exception)
                    )  # fmt: skip
                    assert len(call.tensors) == 2
                    finish.reset_mock()
                    return answer

                for local in (True, False):
                    with (
                        mock.patch.object(made, "_all_allocated_on", return_value=local) as asked,
                        mock.patch.object(way, "function", return_value=mock.Mock()) as launch,
                    ):
                        run(made, key, *arguments(key))
                        stream, pointers = asked.call_args.args
                        assert stream == 5
                        assert pointers == sorted(pointers)
                        assert len(pointers) == 2
                        assert finish.called is not local
                        waits = route.wait_for if queries else launch.return_value.wait
                        assert waits.call_count == 1
                    route.wait_for.reset_mock()
                assert ended() is None
                failed = stock.DistBackendError("it has failed")
                with mock.patch.object(way, "function", side_effect=failed), pytest.raises(stock.DistBackendError):
                    run(made, key, *arguments(key))
                assert ended() is failed
                with mock.patch.object(way, "function", return_value="inner"):
                    run(made, key, *arguments(key), asynchronous=True)
                assert ended() == "inner"


CHECKS = [
    check_launch, check_held, check_alias, check_ordinary, check_nested, check_roots, check_operation, check_sweep,
    check_asked, check_compiling, check_device,
]  # fmt: skip

MUTANTS = {
    "compiles by itself": ("_compiling()", "False"),
    "looks at nothing that is held": ("_nonempty and not _can_skip_sweep()", "False"),
    "looks at all that is held": ("_nonempty and not _can_skip_sweep()", "_nonempty"),
    "asks no engine": ("ENGINES or BUCKETS or REGIONS", "BUCKETS or REGIONS"),
    "asks no buckets": ("ENGINES or BUCKETS or REGIONS", "ENGINES or REGIONS"),
    "asks no region": ("ENGINES or BUCKETS or REGIONS", "ENGINES or BUCKETS"),
    "launches what is taken": ("taken is DECLINED", "True"),
    "sees no function mode": ("_has_torch_function(*tensors)", "False"),
    "asks guards about nested tensors": ("tensor.is_nested", "False"),
    "takes what is not plain": ("not route.guards.all(tensors)", "False"),
    "sees no dispatch mode": ("_modes()", "False"),
    "sees no profiler": ("_profiler._is_profiler_enabled", "False"),
    "sees no graph input": ("not _inflight()", "True"),
    "takes any flag": ("not (asynchronous is False or (asynchronous is True and not _inflight()))", "False"),
    "gives gloo the tensors": ("[tensor.detach() for tensor in tensors]", "tensors"),
    "always launches synchronously": ("len(outputs), way.options[asynchronous]", "len(outputs), way.options[False]"),
    "counts nothing": ("way.count()", "None"),
    "holds nothing": ("finish", "(lambda _, inner: inner)"),
    "names its own line": ("_getframe(4)", "_getframe(3)"),
    "does not wait": ("inner.wait()", "None"),
    "waits unrelaxed": ("route.wait_for(inner)", "inner.wait()"),
    "makes no handoff": (
        "index < 0 or _all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in used]))",
        "_all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in used])) or True"),
    "always makes a handoff": (
        "index < 0 or _all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in used]))",
        "index < 0 or (_all_allocated_on(_current(index), sorted([tensor.data_ptr() for tensor in used])) and False)"),
    "forgets what has failed": ("finish(Call(row, group, used, index, _getframe(4)), error)", "None"),
    "forgets that c10d stages": ("row.staged and flat is None", "False"),
    "forgets inputs": (
        "_run(way, way.function, route, group, given[:count], given[count:], options, tensors, asynchronous)",
        "_run(way, way.function, route, group, given[:count], given[count:], options, outputs, asynchronous)"),
    "takes any operation": ("way.options[asynchronous].get(id(op))",
                            "way.options[asynchronous].get(id(c10d.ReduceOp.SUM))"),
    "takes a list from anybody": ("(options.rootRank == route.rank) is not bool(parts)", "False"),
    "knows no root but a named one": ("root = 0", "pass"),
    "takes tuples": ("type(tensor_list) is not list", "False"),
    "takes tuples of inputs": ("type(input_list) is not list", "False"),
    "takes tuples of parts": ("type(parts) is not list", "False"),
    "takes empty lists": ("not tensor_list", "False"),
    "gathers what it scatters": ("way is _GATHER", "way is _SCATTER"),
}  # fmt: skip


def begin():
    safecomm.all_reduce(torch.ones(1))  # makes the route


@on(1)
def test_the_list_gates_pass_their_checks():
    begin()
    for check in CHECKS:
        check(lists)
        check(fresh(lists))


@pytest.mark.skipif(HERE < "2.6", reason="gather and scatter are c10d's there")
@pytest.mark.parametrize("change", changing(MUTANTS))
@on(1)
def test_a_check_finds_list_gates_that(change):
    begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A gate that gathers what it scatters gives what launches arguments of the wrong types.
        errors = (TypeError,) if change == "gathers what it scatters" else ()
        assert finds(CHECKS, fresh(lists, *MUTANTS[change]), *errors)


@on(1)
def test_the_first_list_call_of_a_group_makes_the_way_of_the_next():
    for key in present():
        group = stock.new_group([0])
        getattr(safecomm, key)(*arguments(key), group=group)
        assert goes(lists, key, *arguments(key), group=group), key
        safecomm.destroy_process_group(group)


@on(1)
def test_one_tensor_given_twice_is_c10ds():
    begin()
    one, other = torch.ones(2), torch.ones(2)
    guards = ROUTES.fast[id(stock.group.WORLD)].guards
    for _ in range(2):
        before = list(guards._known.get(3, ()))
        assert not guards.all([one, one, other])
        assert guards._known.get(3, []) == before  # and learns nothing, of which it would not know the next


@on(2)
def test_two_ranks_that_go_different_ways_meet_s8():
    """One goes past c10d's Python, and the other through it, because a profiler is on there."""
    rank = stock.get_rank()
    begin()
    for key in present():
        for asynchronous in (False, True):
            parts, one = [torch.zeros(2), torch.zeros(2)], torch.full((2,), float(rank + 1))
            given = {
                "all_gather": (parts, one), "reduce_scatter": (one, parts), "all_to_all": (parts, [one, one.clone()]),
                "gather": (one, None if rank else parts, 0), "scatter": (one, None if rank else parts, 0),
            }[key]  # fmt: skip
            with cpu_profile() if rank else contextlib.nullcontext():
                work = getattr(safecomm, key)(*given, async_op=asynchronous)
                if asynchronous:
                    work.wait()
            if key in ("all_gather", "all_to_all") or (key == "gather" and not rank):
                assert [part.tolist() for part in parts] == [[1, 1], [2, 2]], key
            else:
                assert one.tolist() == ([rank + 1] * 2 if key == "gather" else [0, 0]), key


def test_a_staged_work_orders_the_stream_of_its_launch_s1():
    """c10d gives its staging back at the first wait, to the stream of the launch: waited for elsewhere, both wait."""
    for current, full in ((5, False), (7, True)):
        work = StagedWork()
        work.stream = 5
        work.queue = mock.Mock(index=0, current=lambda _, current=current: current)
        with mock.patch.object(Work, "wait", lambda self, timeout: self.full):
            assert bool(work.wait()) is full
        assert work.staged
        assert WorkHold.staged is False


BUDGET = {"all_gather": 36, "reduce_scatter": 36, "all_to_all": 33, "gather": 38, "scatter": 38}
"""Calls, of Python or of C, that an ordinary synchronous call of each makes at most before and after its launch."""


@on(1)
def test_an_ordinary_list_call_makes_few_calls_s10():
    begin()
    for key in present():
        call, given, made = getattr(gates, key), arguments(key), []
        call(*given)

        def see(frame, event, argument, made=made):
            if event == "c_call":
                made.append(getattr(argument, "__name__", ""))
            elif event == "call":
                made.append(frame.f_code.co_name)

        sys.setprofile(see)
        try:
            call(*given)
        finally:
            sys.setprofile(None)
        assert len(made) - 1 <= BUDGET[key], (key, made)
