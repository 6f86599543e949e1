"""patch(): every call reaches safecomm wherever its function was kept, results are the same, and undoing is complete.

S8 and S9 for programs that import torch.distributed themselves. The real megatron-core is in ``test_frameworks.py``.
"""

import collections
import functools
import gc
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives
import torch.distributed.distributed_c10d as c10d
from calls import ALL, Setting
from ranks import on, run_program, run_python, start_ranks
from test_compile import all_gather_of_one, all_reduce, asynchronous, barrier, compiled, region, theirs

import safecomm
from safecomm import _torch
from safecomm.collectives.holding import counted
from safecomm.patching.table import MODULES, NAMES, ORIGINALS, REPLACEMENTS

ROOT = str(Path(safecomm.__file__).parents[1])
GATHER = "all_gather_single" if hasattr(stock, "all_gather_single") else "all_gather_into_tensor"


@pytest.fixture(autouse=True)
def _unpatched():
    assert not safecomm.is_patched()
    yield
    safecomm.unpatch()
    for name, original in ORIGINALS.items():
        for module in MODULES:
            assert vars(module).get(name, original) is original


def calls_of(name):
    return counted().get(name, 0)


# --- what is replaced --------------------------------------------------------------------------------------


def test_the_table_is_what_safecomm_wraps():
    wrapped = {
        name
        for name, thing in vars(safecomm).items()
        if type(thing) is types.FunctionType
        and name != "__dir__"
        and hasattr(c10d, name)
        and thing is not getattr(c10d, name)
    }
    assert wrapped == set(REPLACEMENTS)
    assert set(NAMES) >= wrapped


def test_both_modules_get_one_object_that_looks_like_torchs():
    safecomm.patch()
    for name, replacement in REPLACEMENTS.items():
        assert vars(c10d)[name] is replacement
        assert vars(stock).get(name, replacement) is replacement
        assert safecomm.is_patched(name) == (name in vars(stock))
        assert safecomm.original(name) is ORIGINALS[name]
        assert getattr(safecomm, name) is not replacement
        assert replacement.__wrapped__ is ORIGINALS[name]
        assert (replacement.__module__, replacement.__name__) == (
            ORIGINALS[name].__module__,
            ORIGINALS[name].__name__,
        )
        assert pickle.loads(pickle.dumps(replacement)) is replacement
    assert not safecomm.is_patched("ReduceOp")
    assert safecomm.original("ReduceOp") is stock.ReduceOp
    with pytest.raises(AttributeError):
        safecomm.original("no such name")


def test_twice_is_once_and_undone_once():
    before = {module: dict(vars(module)) for module in MODULES}
    safecomm.patch()
    safecomm.patch()
    safecomm.unpatch()
    assert not safecomm.is_patched()
    assert {module: dict(vars(module)) for module in MODULES} == before
    safecomm.unpatch()


def test_twice_with_other_options_is_the_union():
    safecomm.patch(strict=True)
    assert safecomm.bypassed() == {}
    safecomm.patch(avoid_record_streams=True)
    assert safecomm.patching.patch.strict()
    assert safecomm.patching.patch._state.avoided is not None
    safecomm.unpatch()
    assert safecomm.patching.patch._state.avoided is None
    assert not safecomm.patching.patch.strict()


def test_a_context_leaves_it_as_it_was():
    with safecomm.patched():
        assert safecomm.is_patched("all_reduce")
        with safecomm.patched(strict=True):
            assert safecomm.patching.patch.strict()
        assert safecomm.is_patched("all_reduce")
        assert not safecomm.patching.patch.strict()
    assert not safecomm.is_patched("all_reduce")


def test_a_context_that_an_exception_leaves():
    with pytest.raises(KeyError), safecomm.patched(strict=True):
        raise KeyError
    assert not safecomm.is_patched()


@pytest.mark.parametrize("value", ["yes", "", "2"])
def test_a_variable_that_means_nothing_patches_nothing(monkeypatch, value):
    monkeypatch.setenv("SAFECOMM_STRICT", value)
    with pytest.raises(ValueError, match="SAFECOMM_STRICT"):
        safecomm.patch()
    assert not safecomm.is_patched()


def test_variables_and_arguments(monkeypatch):
    monkeypatch.setenv("SAFECOMM_STRICT", "1")
    safecomm.patch(strict=False)
    assert not safecomm.patching.patch.strict()
    safecomm.patch()
    assert safecomm.patching.patch.strict()


def test_a_line_says_what_was_replaced(caplog):
    caplog.set_level(logging.INFO, "safecomm")
    kept = types.ModuleType("a_module_of_the_program")
    kept.reduce_everything = stock.all_reduce
    safecomm.patch()
    assert "a_module_of_the_program.reduce_everything" in caplog.text
    assert str(len(REPLACEMENTS)) in caplog.text


def test_patching_in_a_thread():
    thread = threading.Thread(target=safecomm.patch)
    thread.start()
    thread.join()
    assert safecomm.is_patched("all_reduce")


# --- aliases -------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("kept",)


class Attributes:
    of_the_class = stock.all_reduce
    static = staticmethod(stock.broadcast)

    def __init__(self):
        self.of_the_object = stock.all_gather


def a_default(function=stock.all_reduce, *, keyword=stock.barrier):
    return function, keyword


def a_closure():
    function = stock.reduce

    def inner():
        return function

    return inner


def test_wherever_it_is_kept_it_is_found_and_put_back():
    slotted, many = Slotted(), collections.deque([1, stock.gather])
    slotted.kept = stock.scatter
    module = types.ModuleType("aliases")
    module.dist_all_gather_func = getattr(stock, GATHER)
    sys.modules["aliases"] = module
    kept = Attributes()
    listed = [stock.all_reduce, 1]
    entry = {"op": stock.isend, "other": 2}
    partial = functools.partial(stock.reduce_scatter, op=stock.ReduceOp.MAX)
    argument = functools.partial(map, stock.irecv)
    inner = a_closure()

    def places():
        return {
            "module": (module.dist_all_gather_func, GATHER),
            "class": (vars(Attributes)["of_the_class"], "all_reduce"),
            "static method": (Attributes.static, "broadcast"),
            "object": (kept.of_the_object, "all_gather"),
            "default": (a_default()[0], "all_reduce"),
            "keyword default": (a_default()[1], "barrier"),
            "list": (listed[0], "all_reduce"),
            "dict": (entry["op"], "isend"),
            "partial": (partial.func, "reduce_scatter"),
            "argument of a partial": (argument.args[0], "irecv"),
            "closure": (inner(), "reduce"),
            "slot": (slotted.kept, "scatter"),
            "deque": (many[1], "gather"),
        }

    try:
        before = places()
        safecomm.patch()
        for place, (found, name) in places().items():
            assert found is REPLACEMENTS[name], place
        assert partial.keywords == {"op": stock.ReduceOp.MAX}
        safecomm.unpatch()
        assert places() == before
        assert all(found is ORIGINALS[name] for found, name in places().values())
    finally:
        del sys.modules["aliases"]


def test_what_is_frozen_is_found_and_put_back():
    module = types.ModuleType("frozen")
    module.kept = stock.all_reduce
    gc.collect()
    gc.freeze()
    try:
        safecomm.patch()
        assert module.kept is REPLACEMENTS["all_reduce"]
        safecomm.unpatch()
        assert module.kept is ORIGINALS["all_reduce"]
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_container_that_refuses_keeps_no_other_from_being_replaced():
    class Registry(dict):
        def __setitem__(self, key, value):
            raise KeyError(key)

    class Closed(type):
        def __setattr__(cls, name, value):
            raise AttributeError(name)

    class Kept(metaclass=Closed):
        op = stock.all_reduce

    registry = Registry(op=stock.all_reduce)
    module = types.ModuleType("after")
    module.kept = stock.all_reduce
    safecomm.patch()
    found = REPLACEMENTS["all_reduce"]
    assert (registry["op"], module.kept, vars(Kept)["op"]) == (found, found, found)
    safecomm.unpatch()
    assert (registry["op"], module.kept) == (ORIGINALS["all_reduce"], ORIGINALS["all_reduce"])


def test_what_was_imported_while_patched_is_put_back_too():
    safecomm.patch()
    module = types.ModuleType("imported_later")
    exec("from torch.distributed import all_reduce, barrier", vars(module))
    assert module.all_reduce is REPLACEMENTS["all_reduce"]
    ours = types.ModuleType("of_safecomm")
    exec("from safecomm import all_reduce", vars(ours))
    safecomm.unpatch()
    assert module.all_reduce is ORIGINALS["all_reduce"]
    assert ours.all_reduce is safecomm.all_reduce, "what came from safecomm is not the patch's"


def test_every_attribute_of_every_module_is_the_original_after_undoing():
    import torch.distributed.fsdp
    import torch.distributed.nn
    import torch.distributed.tensor  # noqa: F401

    def attributes():
        return {
            (name, key): id(value)  # an object in a dict of ours would be an alias as well
            for name, module in sorted(sys.modules.items())
            if isinstance(module, types.ModuleType) and not name.startswith("hypothesis")  # it counts collections
            for key, value in vars(module).items()
        }

    gc.collect()
    before = attributes()
    safecomm.patch(strict=True)
    changed = [place for place, value in attributes().items() if before.get(place) != value]
    assert ("torch.distributed._functional_collectives", "legacy_allreduce") in changed
    safecomm.unpatch()
    after = attributes()
    assert [place for place in before if after.get(place) != before[place]] == []


def test_somebody_elses_wrapper_stays_and_reaches_us():
    theirs = c10d.all_reduce

    def wrapper(*args, **kwargs):
        return theirs(*args, **kwargs)

    try:
        stock.all_reduce = wrapper
        safecomm.patch()
        assert stock.all_reduce is wrapper
        assert theirs is REPLACEMENTS["all_reduce"]
        assert not safecomm.is_patched("all_reduce")
        safecomm.unpatch()
        assert stock.all_reduce is wrapper
        assert theirs is ORIGINALS["all_reduce"]
    finally:
        stock.all_reduce = ORIGINALS["all_reduce"]


def test_a_wrapper_put_over_ours_stays_and_is_over_torchs_after_undoing():
    safecomm.patch()
    ours = stock.all_reduce

    def wrapper(*args, **kwargs):
        return ours(*args, **kwargs)

    try:
        stock.all_reduce = wrapper
        safecomm.unpatch()
        assert stock.all_reduce is wrapper
        assert ours is ORIGINALS["all_reduce"]
    finally:
        stock.all_reduce = ORIGINALS["all_reduce"]


# --- calls -----------------------------------------------------------------------------------------------------


@on(2)
def test_every_collective_is_covered_and_gives_the_same_bits():
    setting = Setting(asynchronous=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {call: outcome(stock, call, setting) for call in ALL.values()}
        with safecomm.patched(strict=True):  # one patch for all: each looks through all objects of the process
            for call in ALL.values():
                before = sum(counted().values())
                found = outcome(stock, call, setting)
                assert safecomm.bypassed() == {}, call
                assert sum(counted().values()) > before, call
                assert found == expected[call], (call, found, expected[call])
    safecomm.drain(wait=True)
    assert safecomm.pending() == []


def outcome(library, call, setting):
    from test_collectives import outcome as of

    return of(library, call, setting)[0]


@on(2)
def test_strict_tells_what_goes_past_and_from_where():
    group = stock.group.WORLD
    with safecomm.patched(strict=True):
        safecomm.original("all_reduce")(torch.ones(2))
        group.broadcast(torch.ones(2), 0).wait()
        (first, second) = sorted(safecomm.bypassed())
        assert "allreduce at" in first
        assert "broadcast at" in second
        assert all("test_patching.py" in place for place in (first, second))
    assert len(safecomm.bypassed()) == 2
    stock.all_reduce(torch.ones(2))


@on(2)
def test_a_wrapper_over_a_strict_method_survives():
    group = stock.ProcessGroup
    own = vars(group)["allreduce"]
    try:
        with safecomm.patched(strict=True):
            inner = group.allreduce

            def theirs(self, *args):
                return inner(self, *args)

            group.allreduce = theirs
        assert vars(group)["allreduce"] is theirs
        stock.all_reduce(torch.ones(2))
    finally:
        group.allreduce = own


@on(2)
def test_a_list_of_somebodys_own_kind():
    class Parts(list):
        def __init__(self, several, more):
            super().__init__(several)

    for library in (stock, safecomm):
        outs = Parts([torch.zeros(2), torch.zeros(2)], "more")
        library.all_gather(outs, torch.ones(2) * stock.get_rank(), async_op=True).wait()
        assert [out.tolist() for out in outs] == [[0.0, 0.0], [1.0, 1.0]]
        with pytest.raises(ValueError, match="Invalid"):
            library.batch_isend_irecv(iter([]))


@on(2)
def test_objects_and_point_to_point_made_before_and_after():
    me, peer = stock.get_rank(), 1 - stock.get_rank()

    def exchange(make, send, receive, batch):
        out, into = torch.full((3,), float(me)), torch.empty(3)
        for work in batch([make(send, out, peer), make(receive, into, peer)]):
            work.wait()
        assert into.tolist() == [float(peer)] * 3

    early = [stock.P2POp(stock.isend, torch.ones(2), peer), stock.P2POp(stock.irecv, torch.zeros(2), peer)]
    with safecomm.patched(strict=True):
        exchange(stock.P2POp, stock.isend, stock.irecv, stock.batch_isend_irecv)
        exchange(safecomm.P2POp, safecomm.isend, safecomm.irecv, safecomm.batch_isend_irecv)
        exchange(safecomm.P2POp, stock.isend, stock.irecv, stock.batch_isend_irecv)
        for work in stock.batch_isend_irecv(early):
            work.wait()
        found = [None, None]
        stock.all_gather_object(found, {"rank": me})
        assert found == [{"rank": 0}, {"rank": 1}]
        assert safecomm.bypassed() == {}
    exchange(stock.P2POp, stock.isend, stock.irecv, stock.batch_isend_irecv)
    assert safecomm.pending() == []


@on(2)
def test_coalescing_by_torchs_functions_is_ours():
    with safecomm.patched(strict=True):
        tensors = [torch.ones(3), torch.ones(2, 2)]
        before = calls_of("_coalescing_manager")
        with stock._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                stock.all_reduce(tensor)
        manager.wait()
        assert calls_of("_coalescing_manager") == before + 1
        assert all(bool((tensor == 2).all()) for tensor in tensors)
        assert safecomm.bypassed() == {}


@on(2)
def test_a_work_pending_at_unpatch_stays_held_until_it_is_over():
    safecomm.patch()
    tensor = torch.ones(4)
    work = stock.all_reduce(tensor, async_op=True)
    safecomm.unpatch()
    work.wait()
    assert tensor.tolist() == [2.0] * 4
    assert safecomm.drain(wait=True) == 0


# --- compilers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["patched, then compiled", "compiled, then patched", "run, then patched"])
@on(2)
def test_compiled_whole_whatever_the_order_s9(order):
    def function(x):
        y = x * 2
        stock.all_reduce(y)
        out = torch.empty(2 * y.numel())
        getattr(stock, GATHER)(out, y)
        return out + 1

    torch._dynamo.reset()
    x = torch.arange(4.0) + stock.get_rank()
    expected = function(x)
    if order.startswith("patched"):
        safecomm.patch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        if order.startswith("run"):
            assert torch.equal(compiled(x), expected)
        safecomm.patch()
        assert torch.equal(compiled(x), expected)
        assert torch.equal(function(x), expected)
        safecomm.unpatch()
        assert torch.equal(compiled(x), expected)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.parametrize("make", [all_reduce, all_gather_of_one, asynchronous, barrier, region])
@on(2)
def test_the_same_graphs_as_torchs_s9(make):
    expected = [compiled(theirs(make), make, "eager", fullgraph=fullgraph) for fullgraph in (True, False)]
    with safecomm.patched():
        found = [compiled(theirs(make), make, "eager", fullgraph=fullgraph) for fullgraph in (True, False)]
    assert found == expected, (found, expected)


# --- the runner ------------------------------------------------------------------------------------------------


def python(*arguments, cwd, status=0):
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert ended.returncode == status, (ended.returncode, ended.stdout, ended.stderr)
    return ended


def pythons(*commands, cwd):
    """Run several at the same time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda arguments: python(*arguments, cwd=cwd), commands))


def run(*arguments, cwd, status=0, **environment):
    """Run ``python -m safecomm run``."""
    ended = run_python("-m", "safecomm", "run", *map(str, arguments), cwd=str(cwd), **environment)
    assert ended.status == status, (ended.status, ended.out, ended.err)
    return ended


SAY = """
import sys, torch.distributed as dist
print(__name__, __file__, sys.argv, sys.modules["__main__"].__dict__ is globals(), __spec__ is None)
print(dist.all_reduce.__code__.co_filename.split("/")[-3:-1])
"""


def test_a_script_sees_what_it_sees_without(tmp_path):
    directory = tmp_path / "elsewhere"  # than where it is started
    directory.mkdir()
    (directory / "beside.py").write_text("")
    (directory / "script.py").write_text(SAY + "import beside\n")
    command = ["elsewhere/script.py", "-x", "--", "--flag", "--"]
    alone, ran = pythons(command, ["-m", "safecomm", "run", *command], cwd=tmp_path)
    with_us = ran.stdout.splitlines()
    assert with_us[0] == alone.stdout.splitlines()[0]
    assert with_us[1] == "['safecomm', 'collectives']"
    assert ran.stderr.count("safecomm: ") == 3, ran.stderr
    assert len(ran.stderr.splitlines()) == 3


def test_a_module_sees_what_it_sees_without(tmp_path):
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text(SAY.replace("__spec__ is None", "__spec__.name"))
    command = ["-m", "program.tool", "1"]
    alone, with_us = pythons(command, ["-m", "safecomm", "run", *command], cwd=tmp_path)
    assert with_us.stdout.splitlines()[0] == alone.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('said at the end')",
        "def f():\n    raise ValueError('of the script')\nf()",
        "this is no Python",
        "raise OSError('like one of ours')",
        "import os; os._exit(3)",
        "import sys\ndef hook(kind, value, traceback):\n    import traceback as t\n"
        "    print(len(t.extract_tb(traceback)))\nsys.excepthook = hook\nraise KeyError(1)",
    ],
)
def test_it_ends_as_it_would_without(tmp_path, program):
    (tmp_path / "script.py").write_text(program + "\n")
    alone = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    with_us = run_python("-m", "safecomm", "run", "script.py", cwd=str(tmp_path))
    said = [line for line in with_us.err.splitlines() if not line.startswith("safecomm: ")]
    assert (with_us.status, with_us.out, said) == (alone.returncode, alone.stdout, alone.stderr.splitlines())


# A process that was started in the background may have inherited that interrupts are ignored.
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
while True:
    pass
"""


def test_an_interrupt_ends_it_as_without(tmp_path):
    import signal

    (tmp_path / "script.py").write_text(INTERRUPTED)
    python("-m", "safecomm", "run", "script.py", cwd=tmp_path, status=-signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such_script.py"], "no such script"),
        (["."], "is a directory"),
        (["-m", "no_such_module"], "no module named 'no_such_module'"),
        (["-m", "nothing.of.the.kind"], "no module named"),
        ([], "target"),
        (["--unknown", "x.py"], "there is no option '--unknown'"),
        (["--arena", "much", "runner_target.py"], "--arena='much'"),
        (
            ["--record", "runner_target.py/in", "runner_target.py"],
            "--record: runner_target.py/in can't be made a directory",
        ),
    ],
)
def test_bad_arguments_run_nothing(tmp_path, arguments, said):
    (tmp_path / "runner_target.py").write_text("print('ran')\n")
    ended = run(*arguments, cwd=tmp_path, status=2)
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_a_package_sees_what_it_sees_without(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys, torch.distributed as dist\nprint(sys.argv, dist.all_reduce.__code__.co_filename.split('/')[-3])\n"
    )
    (package / "__main__.py").write_text("print(__package__)\n")
    command = ["-m", "package", "x"]
    ended = pythons(command, ["-m", "safecomm", "run", *command], cwd=tmp_path)
    alone, with_us = (one.stdout.splitlines() for one in ended)
    assert with_us[1:] == alone[1:]
    assert "safecomm" in with_us[0]
    assert "run" not in with_us[0]


WRAPPED_BEFORE = """
import functools, torch, torch.distributed as dist
inner = dist.all_reduce
calls = []
{wraps}
def theirs(*args, **kwargs):
    calls.append(1)
    return inner(*args, **kwargs)
dist.all_reduce = dist.distributed_c10d.all_reduce = theirs
import safecomm
safecomm.patch()
assert dist.all_reduce is theirs
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(5):
    safecomm.all_reduce(torch.ones(1))
assert len(calls) == 5, calls
dist.destroy_process_group()
"""


@pytest.mark.parametrize("wraps", ["@functools.wraps(inner)", ""])
def test_a_wrapper_that_was_there_before_safecomm_is_always_called(wraps):
    run_program(WRAPPED_BEFORE.format(wraps=wraps)).check()


def test_a_module_that_fails_to_import_shows_its_own_error(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    ended = run("-m", "broken", cwd=tmp_path, status=1)
    assert "No module named 'no_such_thing'" in ended.err


def test_a_script_that_patches_torch_itself(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import functools, torch, torch.distributed as dist
            inner = dist.all_reduce
            @functools.wraps(inner)
            def mine(*args, **kwargs):
                print("mine")
                return inner(*args, **kwargs)
            dist.all_reduce = mine
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            """
        )
    )
    ended = run("--strict", "script.py", cwd=tmp_path)
    assert ended.out == "mine\n"
    assert "all_reduce 1" in ended.err
    assert "0 calls bypassed it" in ended.err


def test_the_variables_do_what_the_options_do(tmp_path):
    (tmp_path / "script.py").write_text(
        "import safecomm.patching.patch as patch\nprint(patch.strict(), patch._state.avoided is not None)\n"
    )
    options = run("--strict", "--avoid-record-streams", "script.py", cwd=tmp_path)
    variables = run("script.py", cwd=tmp_path, SAFECOMM_STRICT="1", SAFECOMM_AVOID_RECORD_STREAMS="1")
    assert options.out == variables.out == "True True\n"


def test_what_is_wrong_with_a_variable_is_said_before_the_script_begins(tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    for name in ("SAFECOMM_STRICT", "SAFECOMM_AVOID_RECORD_STREAMS"):
        ended = run("script.py", cwd=tmp_path, status=2, **{name: "yes"})
        assert ended.out == ""
        assert ended.err == f"python -m safecomm run: {name}='yes': expected 0 or 1\n"
    everything = [
        "--strict",
        "--avoid-record-streams",
        "--low-latency",
        "--arena",
        "2MiB",
        "--record",
        tmp_path / "new" / "and made",
    ]
    (tmp_path / "script.py").write_text(
        "import safecomm, safecomm.patching.patch as patch\n"
        "from safecomm.collectives.takers import ENGINES\n"
        "print(patch.strict(), patch._state.avoided is not None, ENGINES[None]._limits, safecomm.empty(3).shape)"
    )
    ended = run(
        *everything, "script.py", cwd=tmp_path, RANK="0", SAFECOMM_STRICT="no", SAFECOMM_AVOID_RECORD_STREAMS="no",
        SAFECOMM_LOW_LATENCY="/nowhere.json", SAFECOMM_ARENA="1MiB", SAFECOMM_RECORD=str(tmp_path / "old.jsonl"),
    )  # fmt: skip
    assert ended.out == "True True None torch.Size([3])\n"
    assert "of 2.0 MiB" in ended.err
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["run.rank0.jsonl"]


def test_arena_and_record(tmp_path):
    (tmp_path / "script.py").write_text("import safecomm, torch\nprint(safecomm.empty(100, device='cpu').shape)\n")
    ended = run("--arena", "1MiB", "--record", tmp_path, "script.py", cwd=tmp_path, RANK="0")
    assert "torch.Size([100])" in ended.out
    assert "of 1.0 MiB, 0 requests did not fit" in ended.err
    assert list(tmp_path.glob("run.*.jsonl"))


def test_what_the_arena_cost_is_said(tmp_path):
    vain = "no arena was made, nor its memory taken"
    (tmp_path / "script.py").write_text("import torch\ntorch.empty(100)\n")
    assert vain in run("--arena", "1MiB", "script.py", cwd=tmp_path, RANK="0").err
    assert "arena" not in run("script.py", cwd=tmp_path, RANK="0").err
    (tmp_path / "script.py").write_text("import safecomm\nx = safecomm.empty(100, device='cpu')\n")
    said = run("--arena", "64MiB", "script.py", cwd=tmp_path, RANK="0").err
    assert vain not in said
    assert "arena: at most 512 B of 64.0 MiB, 0 requests did not fit" in said
    assert "it cost 64.0 MiB all the time: a smaller one serves as much" in said
    assert "it cost" not in run("--arena", "512", "script.py", cwd=tmp_path, RANK="0").err
    # What a program's own block takes is no reason to keep quiet about the variable's.
    (tmp_path / "script.py").write_text("import safecomm\nwith safecomm.use_arena(1024, device='cpu'):\n    pass\n")
    assert vain in run("--arena", "1MiB", "script.py", cwd=tmp_path, RANK="0").err


# --- what the runner says -------------------------------------------------------------------------------------------

PAST = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.randn(2, 4)).sum().backward()
functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
dist.destroy_process_group()
"""

# Without gloo, which before torch 2.5 now and then hangs when such a group of two processes is destroyed.
SPAWNS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

def work(number, first=0):
    dist.init_process_group("fake", store=FakeStore(), rank=first + number, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

if __name__ == "__main__":
    one = len(sys.argv[1:])
    mp.start_processes(work, (one,), nprocs=2 - one, start_method="spawn")
    if one:
        work(0)
"""


def on_two(tmp_path, program, *options):
    """Run ``program`` by the runner on two ranks, and return what rank 0 says."""
    (tmp_path / "script.py").write_text(program)
    launched = start_ranks(2, "-m", "safecomm", "run", *options, "script.py", cwd=str(tmp_path), limit=120)
    first, second = launched.end()
    assert (first.status, second.status) == (0, 0), (first.err, second.err)
    assert not [line for line in second.err.splitlines() if line.startswith("safecomm: ")]
    return [line for line in first.err.splitlines() if line.startswith("safecomm: ")]


@pytest.mark.parametrize("options", [[], ["--strict"]])
def test_it_says_what_this_torch_does_not_show(tmp_path, options):
    said, *_ = on_two(tmp_path, PAST, *options)
    assert ("before torch 2.14 calls of C++ are not seen" in said) is not _torch.HOOKS
    if options and _torch.HOOKS:
        assert int(re.search(r"(\d+) calls bypassed it", said)[1]) > 0


UNKNOWN_SIZE = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

class Later(dist.ProcessGroup):
    def size(self):
        raise RuntimeError("not yet")

group = Later(0, 1)
c10d._register_process_group("later", group)
"""


def test_a_group_that_does_not_know_its_size_yet_is_none_of_its_business(tmp_path):
    (tmp_path / "script.py").write_text(UNKNOWN_SIZE)
    run("script.py", cwd=tmp_path)


def test_it_says_of_how_many_ranks_it_speaks(tmp_path):
    said = on_two(tmp_path, "import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert "on rank 0 of 2" in said[0]
    assert len(said) == 2
    (tmp_path / "script.py").write_text(SPAWNS)
    one = run("script.py", "one", cwd=tmp_path).err
    assert "1 calls of collectives (all_reduce 1) handled on rank 0 of 2" in one
    assert "ran under this command" not in one
    both = run("script.py", cwd=tmp_path).err
    assert "1 calls of collectives (all_reduce 1) handled on rank 0 of 2" in both
    assert both.count("handled on") == 1
    (tmp_path / "script.py").write_text("import torch.distributed")
    none = run("script.py", cwd=tmp_path).err
    assert "this process, which made no group, ran under this command" in none
    alone = "import os; os.environ.pop('_SAFECOMM_CHILDREN', None)\n" + SPAWNS
    (tmp_path / "script.py").write_text(alone)
    assert "at least 1 of 2 ranks ran under this command" in run("script.py", "one", cwd=tmp_path).err


def test_low_latency_says_why_it_takes_nothing(tmp_path):
    program = "import torch, torch.distributed as d\nd.init_process_group('gloo')\nd.all_reduce(torch.ones(1))\n"
    (tmp_path / "script.py").write_text(program)
    first, _ = start_ranks(2, "-m", "safecomm", "run", "--low-latency", "script.py", cwd=str(tmp_path), limit=60).end()
    assert first.err.count("stays as it is: its backend is gloo, and not nccl") == 1


def test_under_torchrun_it_names_what_failed(tmp_path):
    for program, how in (("raise KeyError(1)", "KeyError(1)"), ("raise SystemExit(3)", "SystemExit(3)")):
        (tmp_path / "script.py").write_text(program)
        said = run_python("-m", "safecomm", "run", "script.py", cwd=str(tmp_path), TORCHELASTIC_RUN_ID="none").err
        assert f"safecomm: script.py ended by {how}; torchrun names the module that it has started" in said
        alone = run_python("-m", "safecomm", "run", "script.py", cwd=str(tmp_path)).err
        assert "; torchrun names" not in alone
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    ended = run_python("-m", "safecomm", "run", "script.py", cwd=str(tmp_path), TORCHELASTIC_RUN_ID="none")
    assert "; torchrun names" not in ended.err


EVERY = """
import json, sys, warnings
sys.path.insert(0, {tests!r})
warnings.simplefilter("ignore")
import calls, torch, torch.distributed as dist
from safecomm.collectives.holding import counted
dist.init_process_group("gloo")
for name in calls.ALL:
    for asynchronous in (False, True):
        before = counted()
        try:
            result, _ = calls.invoke(dist, name, calls.Setting(asynchronous=asynchronous))
            calls.finish(result)
        except (RuntimeError, UnboundLocalError):  # the latter of an empty region, torch 2.4
            continue
        after = counted()
        made = {{one: after[one] - before.get(one, 0) for one in after if after[one] != before.get(one, 0)}}
        expected = {{"isend_and_irecv": 2, "empty_region": sum(made.values())}}.get(name, 1)
        assert sum(made.values()) == expected, (name, made)
objects = [None] * 2
dist.all_gather_object(objects, dist.get_rank())
dist.barrier()
dist.destroy_process_group()
"""


def test_the_report_counts_what_the_runner_counts_and_each_call_once(tmp_path):
    said, *_ = on_two(tmp_path, EVERY.format(tests=str(Path(__file__).parent)), "--record", "recorded")
    (counts,) = re.findall(r"\d+ calls of collectives \(.*?\)", said)
    assert "send 2" in counts  # of send_and_recv, once each
    report = run_python("-m", "safecomm", "report", "recorded/run.rank0.jsonl", cwd=str(tmp_path)).out
    assert counts in report


def test_a_recording_of_synchronous_calls_says_why_nothing_was_held(tmp_path):
    program = "import torch, torch.distributed as d\nd.init_process_group('gloo')\nd.all_reduce(torch.ones(1))\n"
    on_two(tmp_path, program, "--record", "recorded")
    report = run_python("-m", "safecomm", "report", "recorded/run.rank0.jsonl", cwd=str(tmp_path)).out
    assert "1 calls of collectives (all_reduce 1): they left nothing to hold, as synchronous calls" in report


OF_TORCH = """
import torch, torch.distributed as dist, safecomm
dist.init_process_group("gloo")
torchs = {"__name__": "torch.distributed.x", "dist": dist, "torch": torch}
code = "def all_reduce(): return dist.all_reduce(torch.ones(2), async_op=True)"
exec(compile(code, "torch/distributed/x.py", "exec"), torchs)
dist.all_reduce(torch.ones(2))  # a group's first call goes another way
for _ in range(2):
    work = torchs["all_reduce"]()
    (one,) = safecomm.pending()
    print(one.site)
    work.wait()
dist.destroy_process_group()
"""


def test_the_call_site_of_what_torch_calls_is_the_programs_line(tmp_path):
    (tmp_path / "script.py").write_text(OF_TORCH)
    first, _ = start_ranks(2, "-m", "safecomm", "run", "script.py", cwd=str(tmp_path), limit=60).end()
    line = 1 + OF_TORCH.splitlines().index('    work = torchs["all_reduce"]()')
    assert first.out == 2 * f"{tmp_path / 'script.py'}:{line} in <module>\n"
