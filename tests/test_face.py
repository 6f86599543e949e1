"""``import safecomm as dist`` offers all that torch.distributed does, under the same names, and looks the same (S8)."""

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import types

import calls
import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import GROUP_RANKS
from ranks import on, run_program

import safecomm
from safecomm.collectives import effects, objects
from safecomm.collectives.table import ROWS
from safecomm.core import captures
from safecomm.core.captures import CapturedGraph
from safecomm.patching.table import NAMES

WRAPPED = [
    name
    for name in [
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
        "all_gather_single",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "reduce",
        "gather",
        "gather_into_tensor",
        "gather_single",
        "scatter",
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_isend_irecv",
        "barrier",
        "_coalescing_manager",
        "_all_gather_base",
        "_reduce_scatter_base",
        "destroy_process_group",
        "_abort_process_group",
        "_reconfigure",
        "shrink_group",
        *objects.NAMES,
    ]
    if hasattr(c10d, name)
]
CLASSES = ["Work", "P2POp"]
NEW = [
    "Arena", "ArenaError", "ArenaFullError", "ArenaStats", "BucketStats", "CaptureBoundaryError",
    "CapturedGraph", "InvarianceError", "Lease", "LiveGraphError", "LowLatencyError", "PeerTimeoutError", "Pending",
    "PendingWorkError", "RecordStreamError", "SafecommError", "StaleGraphError", "avoid_record_streams", "bucketed",
    "bypassed", "drain", "empty", "graph", "invariant", "is_patched", "original", "patch", "patched", "pending",
    "settle_before_capture", "unpatch", "use_arena",
]  # fmt: skip

LAZY = ["LowLatencyLimits", "collective_log", "leaks", "low_latency", "mark_step", "memory_report", "record_memory"]
"""Imported when they are first asked for."""

PUBLIC = [name for name in dir(stock) if not name.startswith("_")]


def in_a_fresh_interpreter(program):
    """Return what ``program`` prints where torch is imported, and safecomm is not."""
    ended = run_program(f"import warnings; warnings.simplefilter('error')\n{program}")
    ended.check()
    return ended.out


def from_the_start(program):
    """Return what ``program`` prints where nothing is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_reachable_and_what_is_not_wrapped_is_the_very_same_object(name):
    ours, theirs = getattr(safecomm, name), getattr(stock, name)
    if name in WRAPPED or name in CLASSES:
        assert ours is not theirs
    else:
        assert ours is theirs


def test_private_names_and_those_added_later_are_reachable():
    assert safecomm._get_default_group is c10d._get_default_group if hasattr(stock, "_get_default_group") else True
    stock.a_name_of_tomorrow = object()
    try:
        assert safecomm.a_name_of_tomorrow is stock.a_name_of_tomorrow
        assert "a_name_of_tomorrow" in dir(safecomm)
    finally:
        del stock.a_name_of_tomorrow
    with pytest.raises(AttributeError, match=r"'safecomm'.*'nonsense'"):
        safecomm.nonsense  # noqa: B018 - looked up for its error
    assert not hasattr(safecomm, "__nonsense__")


def test_it_imports_where_the_older_names_warn_of_nothing():
    """As since torch 2.15, where they are plain aliases of the newer ones."""
    program = """
import torch.distributed as stock
from torch.distributed import distributed_c10d as c10d

olds = [getattr(c10d, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")]
for old in olds:
    vars(old).pop("__deprecated__", None)
import safecomm, torch

store = stock.HashStore()
stock.init_process_group("gloo", store=store, rank=0, world_size=1)
for call in (safecomm.all_gather_into_tensor, safecomm.reduce_scatter_tensor):
    output = torch.zeros(2)
    call(output, torch.ones(2))
    print(output.tolist())
    call(output, torch.ones(2), async_op=True).wait()
stock.destroy_process_group()
"""
    assert in_a_fresh_interpreter(program) == "[1.0, 1.0]\n" * 2


def test_dir_has_the_public_names_of_both_and_no_others():
    listed = dir(safecomm)
    public = {name for name in (*PUBLIC, *WRAPPED, *CLASSES, *NEW, *LAZY, "functional") if name[0] != "_"}
    modules = {name for name, thing in vars(stock).items() if type(thing) is types.ModuleType}
    assert set(listed) - modules == {*public, "__version__"} - modules
    assert {"device_mesh", "distributed_c10d"} <= set(listed)
    assert {"logging", "sys", "torch", "traceback", "typing"}.isdisjoint(listed)
    assert listed == sorted(set(listed))


def test_a_star_import_gives_what_both_offer_and_no_module_that_torch_uses_itself():
    namespace = {}
    exec("from safecomm import *", namespace)
    del namespace["__builtins__"]
    offered = {name for name in WRAPPED + CLASSES + NEW + LAZY if not name.startswith("_")}
    assert sorted(namespace) == safecomm.__all__
    assert {*offered, "init_process_group", "ReduceOp", "functional"} <= set(namespace)
    assert set(namespace) - offered - {"functional"} <= set(PUBLIC)
    for name, thing in namespace.items():
        assert thing is getattr(safecomm, name)
        if type(thing) is types.ModuleType:
            assert thing.__name__.startswith(("safecomm.", "torch.distributed."))


def test_completion_shows_no_internals():
    for module, names in ((safecomm.functional, safecomm.functional.__all__), (safecomm.leaks, ["Leak", "watch"])):
        assert dir(module) == sorted(names)
    assert set(dir(safecomm.Work())) == {*dir(stock.Work), "inner", "nbytes", "op", "site"}
    with safecomm.use_arena("1MiB", device="cpu") as arena:
        assert {name for name in dir(arena) if name[0] != "_"} == {
            "check", "close", "device", "empty", "map", "nbytes", "offset", "owns", "stats",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("al_reduce", "all_reduce"), ("avoid_record_stream", "avoid_record_streams"), ("Reduceop", "ReduceOp")],
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(misspelt, meant):
    with pytest.raises(AttributeError, match=f"'{misspelt}'.* Did you mean '{meant}'"):
        getattr(safecomm, misspelt)


def test_a_name_that_is_like_no_other_is_answered_with_none():
    with pytest.raises(AttributeError) as caught:
        safecomm.qqqq  # noqa: B018 - looked up for its error
    assert str(caught.value) == "module 'safecomm' has no attribute 'qqqq', and neither has torch.distributed"


# --- help -------------------------------------------------------------------------------------------------


def test_the_package_s_help_begins_with_its_use():
    text = safecomm.__doc__
    assert "import safecomm as dist" in text.splitlines()[0]
    assert len(text.splitlines()) <= 20
    assert "imports upwards" not in text


def test_every_call_that_is_wrapped_is_in_the_table_of_effects():
    assert set(effects.TABLE) == set(NAMES)


def test_every_collective_is_called_on_ranks():
    there = {name for row in ROWS.values() if row.module == "gates" for name in (row.key, row.alias)}
    tried = {*calls.ALL, *calls.NOT_ON_GLOO, "barrier"}  # which has no tensors, and is what the ranks meet by
    assert {name for name in there if hasattr(c10d, name)} <= tried


@pytest.mark.parametrize("name", WRAPPED)
def test_help_ends_with_what_safecomm_does_with_the_memory(name):
    text = inspect.getdoc(getattr(safecomm, name))
    before, _, ours = text.partition("\n\nIn safecomm:\n")
    assert before == inspect.getdoc(getattr(c10d, name)).rstrip()
    lines = [line.removeprefix("    ") for line in ours.splitlines()]
    assert lines == "\n".join(effects.TABLE[name]).splitlines()
    assert lines[0].startswith(("Holds ", "Waits "))


@pytest.mark.parametrize("name", WRAPPED)
def test_the_arguments_that_help_says_are_held_are_the_call_s(name):
    held = {word.strip(".,") for word in effects.TABLE[name][0].splitlines()[0].split() if "_" in word}
    assert held <= set(inspect.signature(getattr(safecomm, name)).parameters) | {"async_ops"}


def test_the_margin_of_help_is_torch_s_on_every_python():
    """Python 3.13 takes the margin from what it compiles; torch's text is of either kind."""
    for theirs in (
        "One line.",
        "One line.\n\n    Args:\n        x: it.\n    ",
        "One line.\n\nArgs:\n    x: it.\n",
        None,
    ):
        text = inspect.cleandoc(effects.help_of("all_reduce", theirs))
        assert "In safecomm:\n    Holds tensor.\n" in text
        if theirs is not None:
            assert text.startswith(inspect.cleandoc(theirs))


def test_a_function_of_somebody_s_own_keeps_its_text():
    assert effects.help_of("mine", "Mine.") == "Mine."


# --- repr -------------------------------------------------------------------------------------------------


class Asked:
    """A backend, a device or a stream that must not be asked."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")


@on(1)
def test_a_work_tells_its_call_its_bytes_its_line_and_its_state():
    tensor = torch.ones(1024)
    work = safecomm.all_reduce(tensor, async_op=True)
    here = f"<safecomm.Work all_reduce from {__file__}:"
    assert repr(work).startswith(here)
    assert repr(work).endswith(": 4096 bytes held, in flight>")
    work.wait()
    assert repr(work).startswith(here)
    assert repr(work).endswith(": nothing is held>")


def test_the_repr_of_a_work_asks_neither_backend_nor_device():
    work = safecomm.Work()
    assert repr(work) == "<safecomm.Work that is being launched>"
    ledger = types.SimpleNamespace(quarantine={}, streams=Asked())
    frame = inspect.currentframe()
    work.op, work.inner, work.code, work.instruction = "broadcast", Asked(), frame.f_code, frame.f_lasti
    work.queue = types.SimpleNamespace(ledger=ledger, capture=7, current=Asked())
    work.storages = (torch.ones(2).untyped_storage(),)
    assert repr(work).endswith(": 8 bytes held, in a CUDA graph capture>")
    ledger.quarantine[work] = None
    assert repr(work).endswith(": 8 bytes held, quarantined>")


@on(1)
def test_a_call_in_a_region_tells_the_work_of_the_region():
    with safecomm._coalescing_manager(async_ops=True):
        call = safecomm.broadcast(torch.ones(4), 0, async_op=True)
    assert repr(call) == "<safecomm.Work of a call in a coalescing region>"
    call.wait()
    call._region = safecomm.all_reduce(torch.ones(4), async_op=True)
    assert repr(call) == f"<safecomm.Work of a call in {call._region}>"
    call.wait()


def test_a_captured_graph_tells_its_line_its_bytes_and_its_state():
    class Graph:
        pass

    graph = Graph()
    frame = inspect.currentframe()
    captured = CapturedGraph(Asked(), graph, (0, 1), [], 0, 5, 9, frame)
    assert repr(captured).startswith(f"<CapturedGraph from {__file__}:")
    assert repr(captured).endswith(": reset, 0 bytes held for 0 lines with collectives>")
    captured._slots[1] = torch.ones(2).untyped_storage()
    captures.RECORDING[9] = captured
    try:
        assert ": being captured, 8 bytes held" in repr(captured)
    finally:
        del captures.RECORDING[9]
    captures._live[id(captured)] = captured
    try:
        assert ": ready, " in repr(captured)
    finally:
        del captures._live[id(captured)]
    del graph
    assert ": dead, " in repr(captured)
    assert {"add", "begin", "lease", "seal"}.isdisjoint(dir(captured))
    assert {"leases", "nbytes", "replay", "reset", "site"} <= set(dir(captured))


def test_contexts_tell_what_they_are_and_whether_they_are_entered():
    avoided = safecomm.avoid_record_streams("count")
    assert repr(avoided).endswith("(mode='count', release='auto'): outside, 0 calls of record_stream>")
    with avoided:
        for name in ("f", "f", "g"):
            avoided._note(compile("0", "a.py", "exec").replace(co_name=name), 0)
        # A module begins in line 0, and before Python 3.11 in line 1.
        most = re.search(r"inside, 3 calls of record_stream, 2 of them from a\.py:[01] in f>$", repr(avoided))
        assert most, repr(avoided)
    used = safecomm.use_arena("1MiB", device="cpu")
    assert repr(used) == "<use_arena(<Arena of 1048576 bytes on cpu>): outside>"
    with used:
        assert repr(used).endswith("inside>")
    assert repr(safecomm.low_latency()) == "<low_latency(): off: it was not switched on>"


def test_every_own_name_is_exported_once_and_says_where_it_is_from():
    own = {
        name: thing
        for name, thing in vars(safecomm).items()
        if issubclass(type(thing), (type, types.FunctionType))  # isinstance() would make torch's reduce_op warn
        and thing.__module__.split(".")[0] == "safecomm"
        and not name.startswith("_")
    }
    new = {name: thing for name, thing in own.items() if not hasattr(c10d, name)}
    assert sorted(new) == sorted(NEW)
    assert set(own) <= {*NEW, *WRAPPED, *CLASSES}
    for name, thing in own.items():
        assert [other for other in own if own[other] is thing] == [name]
        assert getattr(importlib.import_module(thing.__module__), name) is thing


# --- what wrapped functions look like ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WRAPPED, "P2POp"])
def test_wrapped_functions_look_like_the_originals(name):
    ours, theirs = getattr(safecomm, name), getattr(c10d, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    if name in WRAPPED:
        assert ours.__name__ == theirs.__name__
        assert ours.__qualname__ == theirs.__qualname__
        assert inspect.getdoc(ours).startswith(inspect.getdoc(theirs).rstrip())
        assert inspect.isfunction(ours)  # what dynamo and others ask


@pytest.mark.parametrize("name", [*WRAPPED, *CLASSES, *NEW])
def test_pickle_finds_wrapped_functions_again(name):
    thing = getattr(safecomm, name)
    assert pickle.loads(pickle.dumps(thing)) is thing


@pytest.mark.parametrize("name", [name for name in NEW if name.endswith("Error")])
def test_a_pickled_error_says_what_it_said(name):
    error = getattr(safecomm, name)(f"what {name} says")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))


@on(2)
def test_a_pickled_figure_is_the_same():
    limits = safecomm.LowLatencyLimits(one_shot=1024, two_shot=4096, scatter=0, gather=2048)
    with safecomm.use_arena("64KiB", "cpu") as arena:
        kept = safecomm.empty(100)
        work = safecomm.all_reduce(torch.ones(1000), async_op=True)
        (pending,) = safecomm.pending()
        for figures in (limits, pending, arena.stats(), safecomm.memory_report()):
            assert pickle.loads(pickle.dumps(figures)) == figures
        work.wait()
        del kept


def test_pickle_in_another_interpreter():
    text = pickle.dumps(safecomm.all_reduce).hex()
    program = (
        f"import pickle; f = pickle.loads(bytes.fromhex({text!r})); import safecomm; print(f is safecomm.all_reduce)"
    )
    assert in_a_fresh_interpreter(program).strip() == "True"


@on(2)
def test_p2pop_is_an_instance_both_ways():
    for make in (safecomm.P2POp, stock.P2POp):
        for function in (stock.isend, stock.irecv, safecomm.isend, safecomm.irecv):
            if make is stock.P2POp and function in (safecomm.isend, safecomm.irecv):
                continue  # torch's own class takes its own functions only, unless they are patched
            op = make(function, torch.ones(1), 0)
            assert isinstance(op, stock.P2POp)
            assert op.op in (c10d.isend, c10d.irecv)
            assert repr(op).startswith("P2POp(")
    peer = {"group_peer" if GROUP_RANKS else "peer": 1}
    assert isinstance(safecomm.P2POp(safecomm.isend, tensor=torch.ones(1), **peer), safecomm.P2POp)


# --- submodules ---------------------------------------------------------------------------------------------

SUBMODULES = """
import sys, warnings
import torch.distributed
import safecomm
import safecomm.fsdp
import safecomm.nn.functional
import safecomm.algorithms.ddp_comm_hooks.default_hooks as hooks
from safecomm.tensor.parallel import ColwiseParallel
from safecomm.device_mesh import DeviceMesh
from safecomm.fsdp import FullyShardedDataParallel
import torch.distributed.fsdp, torch.distributed.nn.functional, torch.distributed.tensor.parallel
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as their_hooks
for name in ("fsdp", "nn", "nn.functional", "tensor", "tensor.parallel", "device_mesh"):
    module = sys.modules["torch.distributed." + name]
    assert sys.modules["safecomm." + name] is module, name
    assert module.__name__ == module.__spec__.name == "torch.distributed." + name, module.__spec__
    assert module.__spec__.origin == module.__file__
    assert module.__spec__.loader is module.__loader__
    assert (module.__package__ or "").startswith("torch.distributed")
assert safecomm.fsdp is torch.distributed.fsdp
assert safecomm.nn.functional is torch.distributed.nn.functional
assert hooks is their_hooks
assert ColwiseParallel is torch.distributed.tensor.parallel.ColwiseParallel
assert DeviceMesh is torch.distributed.device_mesh.DeviceMesh
assert safecomm.core.ledger.__name__ == "safecomm.core.ledger"  # our own come first
import importlib
importlib.reload(torch.distributed.nn.functional)
for missing in ("safecomm.nonsense", "safecomm.fsdp.nonsense"):
    try:
        importlib.import_module(missing)
    except ModuleNotFoundError as error:
        assert missing in str(error), error
    else:
        raise AssertionError(missing)
print("done")
"""


def test_submodules_are_torch_distributed_s_own_and_unharmed():
    program = "import warnings; warnings.simplefilter('default')\n" + SUBMODULES
    assert in_a_fresh_interpreter(program).strip() == "done"


def test_a_submodule_is_reachable_as_an_attribute_without_an_import():
    program = "import safecomm, sys; print(safecomm.checkpoint is sys.modules['torch.distributed.checkpoint'])"
    assert in_a_fresh_interpreter("import warnings; warnings.simplefilter('default')\n" + program).strip() == "True"


# --- cost of the import ---------------------------------------------------------------------------------------


def test_the_import_brings_nothing_but_safecomm():
    program = (
        "import sys, torch.distributed; before = set(sys.modules); import safecomm; print(*set(sys.modules) - before)"
    )
    new = from_the_start(program).split()
    assert "safecomm" in new
    assert {name.split(".")[0] for name in new} - {"safecomm"} <= sys.stdlib_module_names


@pytest.mark.parametrize("name", LAZY)
def test_some_names_are_imported_when_they_are_asked_for(name):
    program = f"""
import sys, safecomm
loaded = lambda: any(name.startswith(("safecomm.diagnostics", "safecomm.peers")) for name in sys.modules)
before = loaded()
from safecomm import {name}
print(before, loaded(), {name} is safecomm.{name}, "{name}" in dir(safecomm))
"""
    assert in_a_fresh_interpreter(program).split() == ["False", "True", "True", "True"]


@pytest.mark.parametrize("name", LAZY)
def test_type_checkers_see_them_as_well(name):
    tree = ast.parse(inspect.getsource(safecomm))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert name in {alias.asname for block in blocks for node in block.body for alias in node.names}


def test_the_import_changes_nothing_in_torch():
    program = """
import torch, torch.distributed as stock, torch.distributed.distributed_c10d as c10d, os, warnings
before = dict(vars(stock)), dict(vars(c10d)), dict(os.environ), list(warnings.filters)
import safecomm
after = dict(vars(stock)), dict(vars(c10d)), dict(os.environ), list(warnings.filters)
print([a == b for a, b in zip(before, after)])
"""
    assert in_a_fresh_interpreter(program).strip() == "[True, True, True, True]"
