"""What safecomm replaces of torch's: nothing by its import, else what the doctor lists, where the switch allows it."""

import pytest
import torch
import torch.distributed as stock
from ranks import launch, run_program

import safecomm
from safecomm import _torch
from safecomm.__main__ import main
from safecomm.diagnostics.replaced import replaced
from safecomm.interception import stream_methods
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


ORDERS = (
    KEPT
    + """
import contextlib, random, threading
import torch, torch.distributed, torch.distributed.distributed_c10d as c10d
import safecomm
from safecomm import _torch
from safecomm.interception import stream_methods
from safecomm.core import captures
from safecomm.peers import operators
from safecomm.diagnostics.replaced import replaced

OWNERS = (
    torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph, torch.UntypedStorage, torch.Tensor,
    torch.distributed.ProcessGroup, torch.distributed, c10d, torch.distributed._functional_collectives,
)

class Broken(Exception):
    pass

@contextlib.contextmanager
def user(begin, end):
    who = object()
    begin(who)
    try:
        yield
    finally:
        end(who)

def is_ours(owner, name):
    return "safecomm" in vars(owner)[name].__code__.co_filename

def is_overridden(operator):
    return operator in _torch.OVERRIDDEN.values()

def block(rng, patches):
    '''Return what replaces something, and what says whether it does.'''
    avoid = safecomm.avoid_record_streams
    kinds = [
        (
            lambda: avoid(rng.choice(["convert", "warn", "raise", "count"]), this_thread=rng.random() < 0.3),
            lambda: is_overridden("aten::record_stream") and is_ours(torch.cuda.CUDAGraph, "capture_begin"),
        ),
        (lambda: user(captures.watch, captures.unwatch), lambda: is_ours(torch.cuda.CUDAGraph, "capture_begin")),
        (lambda: user(stream_methods.see, stream_methods.unsee), lambda: is_ours(torch.cuda.Event, "record")),
        (
            lambda: user(lambda who: operators.install(who, "CUDA"), lambda who: operators.remove(who, "CUDA")),
            lambda: is_overridden("_c10d_functional::all_reduce") and is_overridden("_c10d_functional::wait_tensor"),
        ),
    ]
    if patches:
        patch = lambda: safecomm.patched(strict=rng.random() < 0.5, avoid_record_streams=rng.random() < 0.5)
        kinds += [(patch, lambda: True)] * 2  # the first one's end is that of all that are inside of it
    made, there = rng.choice(kinds)
    return made(), there

FAILED = []

def in_a_thread(rng):
    try:
        order(rng, False)
    except BaseException as error:  # which a thread would only print
        FAILED.append(error)

def order(rng, patches):
    '''Enter and leave blocks at random, as threads of two users would.'''
    open_blocks = []
    for _ in range(rng.randint(2, 8)):
        if open_blocks and rng.random() < 0.4:
            one, _ = open_blocks.pop(rng.randrange(len(open_blocks)))
            error = rng.choice([(None, None, None), (Broken, Broken(), None)])
            with contextlib.suppress(Broken):
                one.__exit__(*error)
        elif rng.random() < 0.1:
            stream_methods._first_use()
        else:
            one, there = block(rng, patches)
            try:
                one.__enter__()
            except Broken:
                continue
            open_blocks.append((one, there))
        assert all(there() for _, there in open_blocks), [there() for _, there in open_blocks]
    for one, _ in rng.sample(open_blocks, len(open_blocks)):
        one.__exit__(None, None, None)

def breaking(rng, original):
    '''Let one kernel in fifty not be replaced, by an error.'''
    def made(*args, **kwargs):
        if rng.random() < 0.02:
            raise Broken
        return original(*args, **kwargs)
    return made

def shown():
    return [{name: id(one) for name, one in vars(owner).items() if type(one) in FUNCTIONS} for owner in OWNERS]

def orders(seed, count, patches):
    rng = random.Random(seed)
    override, _torch.Override = _torch.Override, breaking(rng, _torch.Override)
    for number in range(count):
        if number % 10:
            order(rng, patches)
        else:
            threads = [threading.Thread(target=in_a_thread, args=(random.Random(rng.random()),)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not FAILED, (seed, number, FAILED)
        stream_methods.forget_uses()
        assert not _torch.OVERRIDDEN, (seed, number)
        wrong = [
            (owner, name) for owner, was, now in zip(OWNERS, before_shown, shown(), strict=True)
            for name in {*was, *now} if was.get(name) != now.get(name)
        ]
        assert not wrong, (seed, number, wrong)
    _torch.Override = override

safecomm.patch()
safecomm.unpatch()
before, before_shown = kept(), shown()
orders(SEED, COUNT, False)
orders(SEED, COUNT // 50, True)
assert replaced() == []
assert changed(before) == set(), changed(before)
"""
)
"""Blocks that replace something of torch's, entered and left in random orders, with errors, and by two threads."""


def test_in_whatever_order_blocks_end_torch_is_as_before_s9():
    run_program(ORDERS.replace("SEED", "1").replace("COUNT", "200")).check()


class Owner:
    """Of which something is replaced."""

    method = "torch's"


def test_an_exception_of_a_signal_handler_leaves_the_rest_to_the_next_call_s9():
    """It comes as one is undone: nothing is lost, and the next user finds torch as it was."""
    interrupts = [KeyboardInterrupt]

    def install(replaced, _):
        replaced.attribute(Owner, "method", "ours")
        replaced.callback(lambda: interrupts and (_ for _ in ()).throw(interrupts.pop()))
        replaced.attribute(Owner, "other", "ours")

    shared = _torch.Shared(install)
    shared.enter("a user")
    with pytest.raises(KeyboardInterrupt):
        shared.leave("a user")
    assert Owner.method == "ours"
    assert not shared.is_used()
    assert vars(Owner).get("other") is None
    assert Owner.method == "torch's"


def test_an_error_as_one_is_undone_keeps_no_other_from_it_s9():
    replaced = _torch.Replaced()
    replaced.attribute(Owner, "method", "ours")
    replaced.callback([].pop)
    with pytest.raises(IndexError):
        replaced.close()
    assert Owner.method == "torch's"
    replaced.close()


def test_what_other_code_has_put_back_is_ours_again_for_the_next_user():
    shared = _torch.Shared(lambda replaced, _: replaced.attribute(Owner, "method", "ours"))
    shared.enter("first")
    Owner.method = "torch's"  # as the end of a profiler's, or of a test's patch
    shared.enter("second")
    assert Owner.method == "ours"
    Owner.method = "theirs"
    shared.enter("third")
    for user in ("first", "second", "third"):
        shared.leave(user)
    assert Owner.method == "theirs"
    Owner.method = "torch's"


def test_the_end_of_a_patch_puts_back_what_the_first_use_has_replaced():
    with safecomm.patched():
        stream_methods._first_use()
        assert "torch.cuda.streams.Event.record" in replaced()
    assert replaced() == []
