"""Every private name that safecomm stands on is there, and where it is not, what stands in for it works.

A failure of the first kind means that torch has moved: the message says what takes over, and what that costs.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import types
from datetime import timedelta
from unittest import mock

import calls
import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from ranks import launch, on
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from watching import Log

import safecomm
from safecomm import _torch
from safecomm.collectives import backends

HERE = TorchVersion(torch.__version__)
NAMES = sorted(_torch.NAMES)


@pytest.mark.parametrize("path", NAMES)
def test_the_name_is_there_and_does_what_it_did(path):
    name = _torch.NAMES[path]
    assert name.costs
    if name.since <= HERE:
        assert path not in _torch.LACKING, f"{path} {_torch.LACKING[path]}. What comes of it: {name.costs}"


# --- each of them taken away ---------------------------------------------------------------------------------


class _Gone:
    """An attribute of a class that is not there."""

    def __get__(self, *_):
        raise AttributeError("taken away")


class _World:
    """c10d's registry of groups, but for one of its attributes."""

    def __init__(self, world, name, replacement):
        self.__dict__["__real"] = world, name, replacement

    def __getattr__(self, name):
        world, taken, replacement = self.__dict__["__real"]
        if name != taken:
            return getattr(world, name)
        if isinstance(replacement, _Gone):
            raise AttributeError(name)
        return replacement

    def __setattr__(self, name, value):
        setattr(self.__dict__["__real"][0], name, value)


@contextlib.contextmanager
def without(path, replacement):
    """Take away what torch has at ``path``, or put ``replacement`` there, if that is not a :class:`_Gone`."""
    names = path.split(".")[1:]
    if "_world" in names[:-1]:
        path, replacement = ".".join(["torch", *names[:-1]]), _World(c10d._world, names[-1], replacement)
        names = names[:-1]
    owner = functools.reduce(getattr, names[:-1], torch)
    own, before = names[-1] in vars(owner), inspect.getattr_static(owner, names[-1])
    if isinstance(replacement, _Gone) and not isinstance(owner, type):
        delattr(owner, names[-1])
    else:
        setattr(owner, names[-1], replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, names[-1], before)
        else:
            delattr(owner, names[-1])  # it was inherited


def import_anew():
    """Import safecomm as a fresh interpreter would."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "safecomm"]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("safecomm.")]
    return importlib.import_module("safecomm")


def outcome(module, name, asynchronous):
    """Return what a call gives, or what it raises."""
    try:
        returned, tensors = calls.invoke(module, name, calls.Setting(asynchronous=asynchronous))
        return calls.finish(returned), [calls.bits(tensor) for tensor in tensors]
    except Exception as error:  # of torch's own function too, where that needs the name
        c10d._world.pg_coalesce_state.clear()  # torch leaves a region open that an exception has left
        return type(error).__name__


def outcomes(names):
    """Return what torch's calls give, by name and ``async_op``."""
    return {
        (name, asynchronous): outcome(stock, name, asynchronous) for name in names for asynchronous in (False, True)
    }


def differing(library, before):
    """Return the calls that give something else in ``library`` than in torch: as it is now, or as it was ``before``.

    That is what came of them while torch had all of its names, because it needs some itself.
    """
    found = []
    for call, whole in before.items():
        theirs, ours = (outcome(module, *call) for module in (stock, library))
        if ours not in (theirs, whole):
            found.append((call, theirs, ours))
    left = library.drain(wait=True)
    return [*found, left] if left else found


# A point-to-point call needs somebody else.
ON_ONE_RANK = [name for name in calls.ALL if name not in calls.POINT_TO_POINT]


def end():
    """Say that the end was reached, without that of the group, which gloo of torch 2.4 does not always survive."""
    print("all of them", flush=True)
    os._exit(0)


# Names that are not tried out at import: that a call of them does something else is not seen.
ONLY_THERE = {
    "torch.distributed.distributed_c10d._coalescing_manager",
    "torch.distributed.distributed_c10d.ProcessGroup._end_coalescing",
    "torch.distributed.distributed_c10d.ProcessGroup._get_backend",
    "torch._C.DisableTorchFunction",
    "torch._C._DisableFuncTorch",
    "torch._C._InferenceMode",
    "torch.utils._python_dispatch._disable_current_modes",
}


def without_each(_):
    log = logging.getLogger("safecomm")
    log.propagate = False
    import_anew()
    before = outcomes(ON_ONE_RANK)
    names = sys.modules["safecomm._torch"]
    for path in sorted(set(names.NAMES) - set(names.LACKING)):
        for replacement in (_Gone(), object(), *((lambda *_, **__: 0,) if path not in ONLY_THERE else ())):
            with without(path, replacement):
                try:
                    with Log() as said:
                        library = import_anew()
                except ImportError as error:
                    print(path, "is required:", error)
                    continue
                names = sys.modules["safecomm._torch"]
                # Of some only their being there can be told, and one has another name in another torch.
                if isinstance(replacement, _Gone):
                    assert path in names.LACKING or path not in names.NAMES, path
                if path in names.LACKING:
                    assert sum(f" {path} " in line for line in said.messages) == 1, (path, said.messages)
                found = differing(library, before)
                assert found == [], (path, replacement, found)
    end()


def test_without_any_one_name_it_imports_and_every_collective_is_torchs_s8():
    """S8: or it is one of the few that are needed, and the ImportError says so."""
    (ended,) = launch(1, without_each, timeout=10, limit=300)
    ended.check()
    *required, last = ended.out.splitlines()
    assert last == "all of them"
    assert {line.split()[0] for line in required} == set(_torch.REQUIRED)
    for line in required:
        assert f"safecomm can't work with torch {torch.__version__}: it needs" in line


def imported_in_odd_places(_):
    import_anew()
    names = sys.modules["safecomm._torch"]
    lacking = dict(names.LACKING)

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, *_, **__):
            raise RuntimeError("not here")

    class RefusesFunctions(TorchFunctionMode):
        def __torch_function__(self, *_, **__):
            raise RuntimeError("not here")

    @contextlib.contextmanager
    def traced():
        def trace(frame, *_):
            # As debuggers do, which makes them refer to what is in there. Of functions: looking at a module's has
            # comprehensions lose their variables (Python 3.12.1).
            _ = frame.f_locals if frame.f_code.co_flags & inspect.CO_OPTIMIZED else None
            return trace

        sys.settrace(trace)
        sys.setprofile(trace)
        yield
        assert sys.gettrace() is trace
        sys.settrace(None)
        sys.setprofile(None)

    @contextlib.contextmanager
    def default(device):
        torch.set_default_device(device)
        yield
        torch.set_default_device(None)

    places = {
        "inference mode": torch.inference_mode,
        "a mode that refuses operations": Refuses,
        "a mode that refuses functions": RefusesFunctions,
        "fake tensors": FakeTensorMode,
        "meta by default": lambda: default("meta"),
        "forward AD": torch.autograd.forward_ad.dual_level,
        "a tracer": traced,
    }
    for place, make in places.items():
        with Log() as said, make():
            import_anew()
        assert said.messages == [], (place, said.messages)
        assert lacking == sys.modules["safecomm._torch"].LACKING, place
        assert sys.modules["safecomm.core.refcounts"].COUNTED, place
    for transform in (torch.vmap, torch.func.grad, torch.func.functionalize):
        transform(lambda x: [import_anew(), x.sum()][1])(torch.ones(2))
        assert lacking == sys.modules["safecomm._torch"].LACKING, transform
        assert sys.modules["safecomm.core.refcounts"].COUNTED, transform
    end()


def test_whatever_is_active_nothing_is_found_missing_and_counts_are_used():
    (ended,) = launch(1, imported_in_odd_places)
    ended.check()
    assert ended.out == "all of them\n"


SUBJECTS = {
    "c10d": lambda path: path.startswith("torch.distributed."),
    "its backends": lambda path: path.startswith("torch._C._distributed_c10d."),
    "tensors and the dispatcher": lambda path: "_distributed_c10d" not in path and path.startswith("torch._C."),
    "the rest of torch": lambda path: not path.startswith(("torch.distributed.", "torch._C.")),
    "all": lambda _: True,
}


def without_many(_, subject):
    import_anew()
    names = sys.modules["safecomm._torch"]
    log = logging.getLogger("safecomm")
    log.propagate = False
    log.addHandler(logging.NullHandler())
    before = outcomes(calls.ALL)
    taken = [p for p in names.NAMES if SUBJECTS[subject](p) and p not in names.REQUIRED and p not in names.LACKING]
    assert taken
    with contextlib.ExitStack() as stack:
        # The longest first: what is inside of a class before the class.
        for path in sorted(taken, key=lambda path: -path.count(".")):
            stack.enter_context(without(path, _Gone()))
        library = import_anew()
        names = sys.modules["safecomm._torch"]
        assert {path for path in taken if path in names.NAMES} <= set(names.LACKING)
        found = differing(library, before)
        assert found == [], found
    end()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_without_all_names_of_a_subject_every_collective_is_torchs_on_two_ranks_s8(subject):
    for ended in launch(2, without_many, subject, timeout=10, limit=120):
        ended.check()
        assert ended.out == "all of them\n"


# --- what stands in for some of them ------------------------------------------------------------------------


def a_fresh_copy():
    """Return ``safecomm._torch``, run again, as on a torch without the names that the test took away."""

    def ours():
        return [name for name in sys.modules if name == _torch.__name__ or name.startswith(f"{_torch.__name__}.")]

    before = {name: sys.modules.pop(name) for name in ours()}
    try:
        return importlib.import_module(_torch.__name__)
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
        safecomm._torch = _torch


def test_without_the_use_count_nobody_is_known_to_be_the_only_holder(monkeypatch):
    storage = torch.empty(4).untyped_storage()
    assert _torch.only_holder(storage)
    other = torch.empty(0).set_(storage)
    assert not _torch.only_holder(storage)
    del other
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not a_fresh_copy().only_holder(storage)


def test_the_trial_of_the_use_count_reads_no_storage_that_has_died(monkeypatch):
    count, seen = torch._C._storage_Use_Count, []

    def noted(cdata):
        seen.append(count(cdata))
        return seen[-1]

    monkeypatch.setattr(torch._C, "_storage_Use_Count", noted)
    assert a_fresh_copy().USE_COUNT
    assert seen == [1]  # of a dead one it is 0, or whatever lies there now


@on(1)
def test_each_group_is_told_of_now_or_when_it_is_made_and_without_the_names_those_that_are_there():
    def told_of(module):
        seen = []
        end = module.on_each_group(seen.append)
        first = tuple(seen)
        made = stock.new_group([0])
        end()
        later = stock.new_group([0])
        for group in (made, later):
            stock.destroy_process_group(group)
        return first, seen[len(first) :] == [made]

    register = c10d._register_process_group
    (*first,), made = told_of(_torch)
    assert stock.group.WORLD in first
    assert made
    assert c10d._register_process_group is register
    log = logging.getLogger("safecomm")
    before, log.disabled = log.disabled, True
    try:
        for name, replacement, expected in (
            ("_register_process_group", object(), (tuple(first), False)),
            ("_world.pg_map", _Gone(), ((stock.group.WORLD,), True)),
        ):
            with without(f"torch.distributed.distributed_c10d.{name}", replacement):
                names = a_fresh_copy()
            assert told_of(names) == expected, name
    finally:
        log.disabled = before


def test_only_holder_takes_what_is_no_storage():
    assert not _torch.only_holder(object())


def test_without_the_raw_stream_the_public_one_is_asked(monkeypatch):
    class Stream:
        cuda_stream = 77

    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream)
    assert a_fresh_copy().current_raw_stream(0) == 77


def test_an_unowned_tensor_is_the_same_memory_and_keeps_nothing(monkeypatch):
    tensor = torch.arange(12.0).reshape(3, 4).t()[1:]
    alias = _torch.non_owning_alias(tensor)
    assert torch.equal(alias, tensor)
    assert (alias.data_ptr(), alias.stride()) == (tensor.data_ptr(), tensor.stride())
    assert _torch.only_holder(alias.untyped_storage()) is False
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    empty = torch.empty(0)
    assert _torch.non_owning_alias(empty) is empty
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    assert a_fresh_copy().non_owning_alias(tensor) is tensor


def test_without_a_way_to_get_torchs_kernel_only_record_stream_is_replaced(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel", raising=False)
    copy = a_fresh_copy()
    override = copy.Override("aten::resize_", "CPU", lambda *_: None, needs_original=True)
    assert override.original is None
    assert torch.empty(0).resize_(3).shape == (3,)
    override.remove()


def test_without_asyncop_every_call_counts_as_asynchronous(monkeypatch):
    class Options:
        pass

    monkeypatch.setattr(c10d, "AllreduceOptions", Options)
    assert a_fresh_copy().ASYNC_OPTION is False


def test_without_a_word_on_who_watches_the_dispatcher_no_call_goes_past_it(monkeypatch):
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    copy = a_fresh_copy()
    assert copy.dispatch_modes()
    assert copy.profiler._is_profiler_enabled


def test_without_what_works_on_lists_tensors_are_copied_one_by_one(monkeypatch):
    like = [torch.ones(2, 3), torch.ones(4)]
    monkeypatch.delattr(torch._C._nn, "unflatten_dense_tensors")
    monkeypatch.delattr(torch, "_foreach_copy_")
    copy = a_fresh_copy()
    for module in (_torch, copy):
        flat = torch.zeros(10)
        parts = module.unflatten(flat, like)
        module.copy_all(parts, like)
        assert [part.shape for part in parts] == [(2, 3), (4,)]
        assert flat.tolist() == [1] * 10


def test_without_the_dispatch_keys_no_tensor_is_known_to_be_plain(monkeypatch):
    tensor = torch.ones(2)
    assert _torch.has_plain_keys(tensor)
    assert not _torch.has_plain_keys(tensor.to_sparse())
    assert _torch.transform() is None
    monkeypatch.delattr(torch._C, "_dispatch_keys")
    monkeypatch.delattr(torch._C._functorch, "peek_interpreter_stack")
    copy = a_fresh_copy()
    assert not copy.has_plain_keys(tensor)
    assert copy.transform() is None


def test_without_the_level_of_forward_ad_there_may_be_tangents(monkeypatch):
    assert _torch.forward_ad._current_level == -1
    with torch.autograd.forward_ad.dual_level():
        assert _torch.forward_ad._current_level == 0
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    assert a_fresh_copy().forward_ad._current_level >= 0


def test_without_dynamos_guards_no_tensors_are_like_others(monkeypatch):
    tensor = torch.ones(2)
    assert _torch.look_alike(tensor)(torch.zeros(3))
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not a_fresh_copy().look_alike(tensor)(tensor)


def test_without_the_attribute_of_the_default_group_the_public_name_is_asked(monkeypatch):
    world = type("World", (), {"__slots__": (), "default_pg": object(), "pg_coalesce_state": {}})()
    monkeypatch.setattr(c10d, "_world", world)
    copy = a_fresh_copy()
    assert copy.groups[copy.DEFAULT] is world.default_pg


def test_without_a_driver_there_are_no_buffers_and_no_captures(monkeypatch):
    def no_driver(name):
        raise OSError(name)

    import ctypes

    monkeypatch.setattr(ctypes, "PyDLL", no_driver)
    copy = a_fresh_copy()
    assert copy.pointer_attribute is None
    assert copy.capture_id(1) == 0
    assert copy.swap_capture_mode(2) == 2


@on(2)
def test_what_is_known_of_groups_and_what_without_the_names():
    group = c10d._get_default_group()
    assert backends.of(group, "cpu") is backends.GLOO
    assert _torch.group_name(group) == group.group_name
    assert isinstance(_torch.group_timeout(group, "cpu"), timedelta)

    copy = a_fresh_copy()
    with mock.patch.dict(copy.c10d_vars, {copy.WORLD: object()}):
        assert copy.group_name(group) == ""
    assert copy.group_timeout(object(), "cpu") is None


@on(2)
def test_a_send_of_a_backend_that_is_not_known_is_never_asked_whether_it_is_over_s1():
    """S1: it may be gloo's, whose sends say that they are over while their memory is still read."""
    group = c10d.new_group()
    rank = stock.get_rank()
    with mock.patch.object(_torch, "backend_of", return_value=None):
        tensor = torch.full((4,), float(rank))
        work = (safecomm.isend if rank == 0 else safecomm.irecv)(tensor, 1 - rank, group=group)
        assert not work.queue.pollable
        safecomm.drain()
        assert len(safecomm.pending()) == 1
        assert work.wait()
        assert work.wait(), "a second wait for it would hang"
        assert safecomm.pending() == []
    assert tensor.tolist() == [0.0] * 4


@on(2)
def test_a_group_of_a_backend_that_is_not_known_is_held_for_all_the_same():
    before = c10d._world
    world = types.SimpleNamespace(default_pg=before.default_pg, pg_coalesce_state=before.pg_coalesce_state)
    tensor, group = torch.ones(4), c10d.new_group()
    with (
        mock.patch.dict(_torch.c10d_vars, {_torch.WORLD: world}),
        mock.patch.object(_torch, "backend_of", return_value=None),
    ):
        work = safecomm.all_reduce(tensor, group=group, async_op=True)
        assert work.queue.kind is backends.UNKNOWN
        (entry,) = safecomm.pending()
        assert entry.group == ""
        assert work.wait()
        assert safecomm.pending() == []
    assert tensor.tolist() == [2.0] * 4
