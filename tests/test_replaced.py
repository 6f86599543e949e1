"""What safecomm replaces of torch's: nothing by its import, else what the doctor lists, where the switch allows it."""

import pytest
import torch
import torch.distributed as stock
from ranks import launch, run_program

import safecomm
from safecomm.__main__ import main
from safecomm.diagnostics.replaced import replaced
from safecomm.tools.doctor import diagnose

KEPT = """
import sys, types
import torch.distributed._functional_collectives

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, staticmethod, classmethod)

def kept():
    namespaces = {
        name: vars(module) for name, module in tuple(sys.modules.items())
        if f"{name}.".startswith("torch.") and isinstance(module, types.ModuleType)
    }
    classes = [one for names in namespaces.values() for one in names.values() if issubclass(type(one), type)]
    namespaces |= {
        f"{one.__module__}.{one.__qualname__}": vars(one)
        for one in classes if f"{one.__module__}.".startswith("torch.")
    }
    # By identity: an object in a dictionary of ours would be an alias, and be replaced as well.
    return {
        space: {name: id(one) for name, one in tuple(names.items()) if type(one) in FUNCTIONS}
        for space, names in namespaces.items()
    }

def changed(before):
    after = kept()
    return {
        f"{space}.{name}" for space in before for name in {*before[space], *after[space]}
        if before[space].get(name) != after[space].get(name)
    }
"""
"""A program that looks at torch by itself."""


def test_importing_safecomm_replaces_nothing_of_torchs():
    program = (
        KEPT
        + """
before = kept()
assert sum(map(len, before.values())) > 10_000
import safecomm
assert changed(before) == set(), changed(before)
from safecomm.diagnostics.replaced import replaced
assert replaced() == [], replaced()
"""
    )
    run_program(program).check()


def test_what_is_replaced_is_listed_and_undone():
    program = (
        KEPT
        + """
import safecomm, torch.distributed
from safecomm.core import captures
from safecomm.diagnostics.replaced import replaced
before = kept()
safecomm.patch(strict=True)
with safecomm.avoid_record_streams():
    listed = set(replaced())
    operators = {name for name in listed if "::" in name}
    assert changed(before) == listed - operators, changed(before) ^ (listed - operators)
    assert {
        "torch.distributed.all_reduce",
        "torch.distributed.distributed_c10d.all_reduce",
        "torch.distributed._functional_collectives.legacy_allreduce",
        "torch.storage.UntypedStorage.resize_",
        "torch.cuda.streams.Event.record",
        "torch.cuda.streams.Event.wait",
        "torch.cuda.graphs.CUDAGraph.capture_begin",
        "aten::record_stream",
    } <= listed, listed
assert "torch.distributed.all_reduce" in replaced()
assert not {"aten::record_stream", "torch.storage.UntypedStorage.resize_"} & set(replaced())
safecomm.unpatch()
assert replaced() == []
assert changed(before) == set(), changed(before)
"""
    )
    run_program(program).check()


def _forbidden(_):
    import os

    os.environ["SAFECOMM_REPLACE"] = "0"
    safecomm.avoid_record_streams()  # only entering it replaces anything
    for begin in (
        safecomm.patch,
        safecomm.patched().__enter__,
        safecomm.avoid_record_streams().__enter__,
        safecomm.low_latency().enable,
    ):
        with pytest.raises(safecomm.SafecommError, match=r"which SAFECOMM_REPLACE=0 forbids\. Nothing was done\."):
            begin()
    assert not safecomm.is_patched()
    assert replaced() == []
    tensor = torch.ones(2)
    safecomm.all_reduce(tensor)
    with safecomm.bucketed():
        safecomm.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    assert safecomm.pending() == []
    stock.all_reduce(tensor)


def test_the_switch_forbids_what_replaces_and_nothing_else():
    launch(1, _forbidden)[0].check()


def test_the_runner_says_that_the_switch_forbids_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SAFECOMM_REPLACE", "no")
    assert main(["run", str(tmp_path / "script.py")]) != 0
    assert "run replaces functions of torch's, which SAFECOMM_REPLACE=no forbids" in capsys.readouterr().err


def test_the_doctor_lists_what_is_replaced():
    def said():
        (check,) = [check for check in diagnose().checks if check.name == "replaced"]
        assert check.ok
        return check.sentence

    assert said().startswith("nothing of torch's, in this process.")
    with safecomm.patched():
        assert "torch.distributed.all_reduce, " in said()
