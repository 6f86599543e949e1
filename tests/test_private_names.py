"""Every private name that safecomm stands on is there, and where it is not, what stands in for it works.

A failure of the first kind means that torch has moved: the message says what takes over, and what that costs.
"""

import importlib.util
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from ranks import on

import safecomm
from safecomm import _torch

# Where it is looked up, the name, and what happens without it. None: nothing stands in, safecomm can't be imported.
NAMES = [
    (c10d, "_world", None),
    (c10d._world, "default_pg", None),
    (c10d._world, "_default_pg", "each call asks the property, which is a call of Python"),
    (c10d._world, "pg_coalesce_state", None),
    (c10d._world, "pg_backend_config", "backend_name() says '', so nothing is known to end in order"),
    (c10d._world, "pg_names", "group_name() says '', so pending() shows no group"),
    (c10d._world, "pg_map", "store_of() says None, and low_latency() leaves groups as they are"),
    (
        torch._C._distributed_c10d,
        "_SymmetricMemory",
        "symmetric_memory() says None, and low_latency() leaves groups as they are",
    ),
    (c10d, "_IllegalWork", None),
    (c10d, "_CollOp", None),
    (c10d, "_coalescing_manager", None),
    (c10d, "_CoalescingManager", None),
    (c10d.AllreduceOptions, "asyncOp", "every call counts as asynchronous, as before torch 2.7"),
    (c10d.ProcessGroup, "_get_backend", "group_timeout() says None, so destroy_process_group waits 30 s at most"),
    (c10d.ProcessGroup, "_end_coalescing", None),
    (torch._C._distributed_c10d, "Backend", None),
    (torch._C._distributed_c10d.Backend, "_allgather_base", None),
    (torch._C._distributed_c10d.Backend, "_reduce_scatter_base", None),
    (torch._C, "_len_torch_dispatch_stack", "no call takes the direct way"),
    (torch.autograd.profiler, "_is_profiler_enabled", "no call takes the direct way"),
    (torch._C, "_dispatch_keys", "no call takes the direct way, and c10d keeps coalesced tensors a bit longer"),
    (torch._C._functorch, "maybe_current_level", "calls inside of torch.func may fail"),
    (torch._C._dynamo.guards, "TensorGuards", "every call looks at its tensors one by one, 0.5 us more"),
    (
        torch._C._distributed_c10d,
        "_allow_inflight_collective_as_graph_input",
        "nothing: torch has no such calls, as before 2.6",
    ),
    (
        torch._C,
        "_storage_Use_Count",
        "only_holder() says False, so memory behind the host comes back a bit later; Arena is refused",
    ),
    (torch.UntypedStorage, "_cdata", "only_holder() fails"),
    (
        torch._C,
        "_construct_storage_from_data_pointer",
        "unowned() gives the tensor itself, and sends record streams; no arena",
    ),
    (torch.utils._python_dispatch, "TorchDispatchMode", "leaks.watch() says that it can't watch"),
    (torch.autograd.forward_ad, "_current_level", "lists in pieces are c10d's"),
    (torch._C._autograd.SavedTensor, "data", "saved_by() unpacks what is saved, and runs unpack hooks"),
    (torch.cuda.memory, "_record_memory_history", "the demo writes no snapshots, and demo --html says so"),
    (torch.cuda.memory, "_dump_snapshot", "the demo writes no snapshots, and demo --html says so"),
    (torch._C._nn, "unflatten_dense_tensors", "unflatten() splits and views, 2 us a tensor"),
    (torch, "_foreach_copy_", "copy_all() copies one by one, a kernel each"),
    (torch.library, "get_kernel", "outside of its thread or mode, record_stream is converted too, and stays so"),
    (torch.library.Library, "_destroy", None),
]
if torch.cuda.is_available():
    NAMES += [
        (torch._C, "_cuda_getCurrentRawStream", "current_raw_stream() takes 5 us in place of 0.1"),
        (torch._C, "_cuda_getDevice", "current_device() takes 0.1 us more"),
        (torch._C, "_cuda_isCurrentStreamCapturing", "is_capturing() takes 0.1 us more"),
        (torch._C, "_cuda_sleep", "compute can hold up the collectives that it overlaps, where it runs far ahead"),
        (
            torch._C,
            "_cuda_endAllocateToPool",
            "after a capture that CUDA gave up, the allocator frees nothing any more",
        ),
        (torch._C, "_cuda_releasePool", "after a capture that CUDA gave up, the allocator frees nothing any more"),
    ]


@pytest.mark.parametrize(("owner", "name", "fallback"), NAMES, ids=[name for _, name, _ in NAMES])
def test_the_name_is_there(owner, name, fallback):
    takes_over = fallback or "nothing: safecomm needs it"
    assert hasattr(owner, name), f"{name} is gone from {owner}. What takes over: {takes_over}"


def a_fresh_copy():
    """Return ``safecomm._torch``, run again, as on a torch without the names that the test took away."""
    spec = importlib.util.spec_from_file_location("a_copy_of_torch_names", Path(_torch.__file__))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_the_use_count_nobody_is_known_to_be_the_only_holder(monkeypatch):
    storage = torch.empty(4).untyped_storage()
    assert _torch.only_holder(storage)
    other = torch.empty(0).set_(storage)
    assert not _torch.only_holder(storage)
    del other
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not a_fresh_copy().only_holder(storage)


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
    alias = _torch.unowned(tensor)
    assert torch.equal(alias, tensor)
    assert (alias.data_ptr(), alias.stride()) == (tensor.data_ptr(), tensor.stride())
    assert _torch.only_holder(alias.untyped_storage()) is False
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    empty = torch.empty(0)
    assert _torch.unowned(empty) is empty
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    assert a_fresh_copy().unowned(tensor) is tensor


def test_without_a_way_to_get_torchs_kernel_only_record_stream_is_replaced(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
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
    assert _torch.transform_level() is None
    monkeypatch.delattr(torch._C, "_dispatch_keys")
    monkeypatch.delattr(torch._C._functorch, "maybe_current_level")
    copy = a_fresh_copy()
    assert not copy.has_plain_keys(tensor)
    assert copy.transform_level() is None


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


def test_without_the_attribute_of_the_default_group_its_property_is_asked(monkeypatch):
    class World:
        default_pg = object()

    monkeypatch.setattr(c10d, "_world", World())
    copy = a_fresh_copy()
    assert copy.groups[copy.DEFAULT] is World.default_pg


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
    assert _torch.backend_name(group, "cpu") == "gloo"
    assert _torch.group_name(group) == group.group_name
    assert isinstance(_torch.group_timeout(group, "cpu"), timedelta)

    copy = a_fresh_copy()
    copy.world = object()
    assert copy.backend_name(group, "cpu") == ""
    assert copy.group_name(group) == ""
    assert copy.group_timeout(object(), "cpu") is None


@on(2)
def test_a_group_of_a_backend_that_is_not_known_is_held_for_all_the_same():
    before = _torch.world
    _torch.world = types.SimpleNamespace(default_pg=before.default_pg, pg_coalesce_state=before.pg_coalesce_state)
    try:
        tensor = torch.ones(4)
        work = safecomm.all_reduce(tensor, group=c10d.new_group(), async_op=True)
        (entry,) = safecomm.pending()
        assert entry.group == ""
        assert work.wait()
        assert safecomm.pending() == []
    finally:
        _torch.world = before
    assert tensor.tolist() == [2.0] * 4
