"""The handle (S1 to S4) and what the ledger says of it: what is held, and when it comes back, whatever the caller does.

Several tests need a collective that is certainly under way: rank 0 launches it, and rank 1 joins only when told to.
"""

import copy
import gc
import math
import pickle
import threading
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import COALESCED, MOVES, POINT_TO_POINT, REDUCTIONS, Setting, bits, finish, invoke
from ranks import launch, on, signal_to_peers, subgroup, until, wait_for_signal
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from watching import Log

import safecomm as dist
from safecomm.core.ledger import LEDGER

ASYNCHRONOUS = Setting(asynchronous=True)


def watch(tensor):
    """Return a weak reference to the memory of ``tensor``."""
    return StorageWeakRef(tensor.untyped_storage())


def all_reduce_late(key, tensor):
    """Launch an all_reduce that rank 1 joins when it gets the signal ``key``; in rank 1 wait for that, and join."""
    if dist.get_rank() == 1:
        wait_for_signal(key)
    return dist.all_reduce(tensor, async_op=True)


# --- the class ------------------------------------------------------------------------------------------


def test_every_method_of_torch_s_work_is_overridden():
    # What the base class has never gets to __getattr__: FSDP2 and others would ask a work that was never launched.
    inherited = {name for name in dir(c10d.Work) if not name.startswith("__") and "pybind11" not in name}
    ours = {name for kind in dist.Work.__mro__ if kind.__module__.startswith("safecomm") for name in vars(kind)}
    # unbox() makes a work of what boxed() gave, and is no method.
    assert inherited - ours - {"unbox"} == set()


@on(2)
def test_fsdp_s_question_and_weak_references():
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert isinstance(work, dist.distributed_c10d.Work)
    assert isinstance(work, dist.Work)
    assert type(work) is dist.Work
    assert "Work" in repr(work)
    seen = weakref.ref(work)
    assert seen() is work
    work.wait()
    del work
    assert seen() is None


@pytest.mark.parametrize("name", [*REDUCTIONS, *MOVES, *sorted({*POINT_TO_POINT} - {"send_and_recv", "recv_from_any"})])
@on(2)
def test_an_asynchronous_call_returns_our_work_and_holds_until_waited(name):
    setting = Setting(asynchronous=True)
    returned, tensors = invoke(dist, name, setting)
    works = returned if isinstance(returned, list) else [returned]
    assert len(dist.pending()) == len(works)
    assert sum(entry.nbytes for entry in dist.pending()) == sum(t.untyped_storage().nbytes() for t in tensors)
    for work in works:
        assert isinstance(work, (dist.Work, torch._C.Future))
        work.wait()
    dist.drain()
    assert dist.pending() == []


@on(2)
def test_the_forwarding_methods_say_what_torch_s_say():
    def answers(module):
        tensor = torch.full((3,), 1.0 + dist.get_rank())
        work = module.all_reduce(tensor, async_op=True)
        work.wait()
        until(work.is_completed)
        answers = {"result": [bits(each) for each in work.result()], "is_success": work.is_success()}
        answers["future"] = [bits(each) for each in work.get_future().value()]
        for name in ("exception", "source_rank", "_source_rank", "_get_op_type", "_get_duration", "get_future_result"):
            try:
                answers[name] = getattr(work, name)()
            except Exception as error:
                answers[name] = type(error), str(error)
        answers["get_future_result"] = type(answers["get_future_result"])
        boxed = work.boxed()
        answers["boxed"] = type(boxed)
        answers["unboxed"] = isinstance(c10d.Work.unbox(boxed), c10d.Work) if hasattr(c10d.Work, "unbox") else None
        return answers

    assert answers(dist) == answers(stock)


@on(2)
def test_synchronize_and_block_current_stream_do_what_torch_s_do():
    def outcome(module, method):
        tensor = torch.ones(3)
        work = module.all_reduce(tensor, async_op=True)
        try:
            answer = getattr(work, method)()
        except Exception as error:
            answer = type(error), str(error)
        work.wait()
        return answer, tensor.tolist()

    for method in ("synchronize", "block_current_stream"):
        assert outcome(dist, method) == outcome(stock, method)


# --- waiting --------------------------------------------------------------------------------------------


@on(2)
def test_wait_with_and_without_a_timeout_and_twice():
    for timeouts in ([None, None], [timedelta(seconds=30)] * 2, [timedelta(seconds=30), None]):
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, async_op=True)
        for timeout in timeouts:
            assert (work.wait() if timeout is None else work.wait(timeout)) is True
            assert dist.pending() == []
        assert work.wait(timeout=timedelta(seconds=30))
        assert tensor.tolist() == [2.0] * 4


@on(2)
def test_a_second_wait_on_a_send_or_receive_returns():
    # torch's own never does, with gloo.
    tensor, room, peer = torch.ones(4), torch.zeros(4), 1 - dist.get_rank()
    works = [dist.isend(tensor, peer), dist.irecv(room, peer)]
    for work in works * 2:
        assert work.wait()
        assert work.wait(timedelta(seconds=30))
    assert room.tolist() == [1.0] * 4
    for _ in range(2):
        for work in works:
            assert work.wait()


@on(2)
def test_threads_may_wait_for_the_same_receive():
    peer, key = 1 - dist.get_rank(), "threads may receive"
    if dist.get_rank() == 1:
        wait_for_signal(key)
        dist.send(torch.ones(4), peer)
        return
    room = torch.zeros(4)
    work, answers = dist.irecv(room, peer), []
    threads = [threading.Thread(target=lambda: answers.append(work.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    signal_to_peers(key)
    for thread in threads:
        thread.join()
    assert answers == [True] * 3
    assert room.tolist() == [1.0] * 4


@on(2)
def test_another_thread_may_wait_and_that_gives_back():
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    assert dist.pending() == []
    assert tensor.tolist() == [2.0] * 4


@on(2)
def test_a_wait_in_backward_and_from_a_thread_that_runs_backward():
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            work = dist.all_reduce(gradient, async_op=True)
            assert work.wait()
            return gradient

    def backward(tensor):
        Reduce.apply(tensor).sum().backward()

    for run in (lambda call: call(), lambda call: _in_thread(call)):
        tensor = torch.ones(4, requires_grad=True)
        run(lambda tensor=tensor: backward(tensor))
        assert tensor.grad.tolist() == [2.0] * 4
        assert dist.pending() == []


def _in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@on(2)
def test_many_threads_launch_and_wait():
    # A group for each, because the order of launches within a group has to be the same in every rank.
    groups = [dist.new_group() for _ in range(4)]

    def work_away(group, failures):
        try:
            for number in range(50):
                tensor = torch.full((8,), float(number))
                work = dist.all_reduce(tensor, group=group, async_op=True)
                if number % 3:
                    work.wait()
                    assert tensor[0] == 2 * number
        except BaseException as error:
            failures.append(error)

    failures = []
    threads = [threading.Thread(target=work_away, args=(group, failures)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0
    for group in groups:
        dist.destroy_process_group(group)


# --- S1: alive until over -------------------------------------------------------------------------------


SWAPPED = [name for name in (*REDUCTIONS, *MOVES, "isend_and_irecv", "batch", *COALESCED) if name != "mixed_region"]


@pytest.mark.parametrize("name", SWAPPED)
@on(2)
def test_memory_swapped_under_a_held_tensor_stays_until_the_work_is_over(name):
    """Megatron and DeepSpeed free by ``t.data = ...``, which takes the memory from under a tensor that is held."""
    key = f"swapped {name}"
    if dist.get_rank() == 1:
        wait_for_signal(key)
    returned, tensors = invoke(dist, name, ASYNCHRONOUS)
    memory = [watch(tensor) for tensor in tensors]
    if dist.get_rank() == 0:
        for tensor in tensors:
            tensor.data = torch.empty_like(tensor)
        assert not any(each.expired() for each in memory), [each.expired() for each in memory]
        signal_to_peers(key)
    finish(returned)
    # The backend's own handle may keep outputs, for result(); with ours it goes.
    del returned, tensors
    until(lambda: dist.drain() == 0)
    until(lambda: all(each.expired() for each in memory))


@pytest.mark.parametrize("name", SWAPPED)
@on(2)
def test_peers_get_what_was_launched_although_its_tensors_were_swapped(name):
    """The same, freeing as Megatron does, with another shape: what is read is the memory of the time of the launch."""
    expected = [bits(tensor) for tensor in _finished(name)]
    key = f"swapped and read {name}"
    if dist.get_rank() == 1:
        wait_for_signal(key)
    returned, tensors = invoke(dist, name, ASYNCHRONOUS)
    aliases = [tensor.detach() for tensor in tensors]
    if dist.get_rank() == 0:
        for tensor in tensors:
            tensor.data = torch.empty(1)
        signal_to_peers(key)
    finish(returned)
    assert [bits(alias) for alias in aliases] == expected
    until(lambda: dist.drain() == 0)


def _finished(name):
    returned, tensors = invoke(stock, name, ASYNCHRONOUS)
    finish(returned)
    return tensors


@on(2)
def test_what_was_sent_arrives_although_its_tensor_was_freed():
    if dist.get_rank() == 0:
        tensor = torch.arange(1 << 16, dtype=torch.float32)
        work = dist.isend(tensor, 1)
        tensor.data = torch.empty(0)
        others = [torch.full((1 << 16,), -1.0) for _ in range(8)]  # where the memory would go
        signal_to_peers("freed after send")
        work.wait()
        del others
    else:
        wait_for_signal("freed after send")
        room = torch.empty(1 << 16)
        dist.recv(room, 0)
        assert torch.equal(room, torch.arange(1 << 16, dtype=torch.float32))


# --- S3: nothing forgotten ------------------------------------------------------------------------------


def completed(work):
    """Return when the backend's handle of ``work`` is over, without a question to safecomm."""
    until(work.inner.is_completed)


@on(2)
def test_a_dropped_handle_is_given_back_by_the_next_call_of_any_group_and_reported_once_a_line():
    other = subgroup(0, 1)

    def drop(key):
        tensor = torch.ones(1000)
        memory = watch(tensor)
        work = all_reduce_late(key, tensor)
        inner = work.inner
        return memory, inner

    LEDGER.dropped_at.clear()  # other tests of this process drop handles on the same line
    with Log() as log:
        for number in range(3):
            key = f"dropped {number}"
            memory, inner = drop(key)
            if dist.get_rank() == 0:
                assert not memory.expired()
                (entry,) = dist.pending()
                assert entry.state == "in flight"
                signal_to_peers(key)
            until(inner.is_completed)
            del inner
            assert not memory.expired()
            dist.barrier(group=other)
            assert dist.pending() == []
            until(memory.expired)
        assert len(log.messages) == 1, log.messages
        assert "all_reduce" in log.messages[0]
        assert "test_work.py" in log.messages[0]
        assert "in all_reduce_late" in log.messages[0]
        dist.all_reduce(torch.ones(1), async_op=True)  # another line
        until(lambda: dist.drain() == 0)
        line = test_a_dropped_handle_is_given_back_by_the_next_call_of_any_group_and_reported_once_a_line.body
        assert len(log.messages) == 2, log.messages
        assert f"in {line.__name__}" in log.messages[1]


@pytest.mark.parametrize("name", [*REDUCTIONS, *MOVES])
@on(2)
def test_every_dropped_collective_comes_back(name):
    """Also those that gloo finishes in wait() only, such as the reduce-scatters."""
    returned, tensors = invoke(dist, name, ASYNCHRONOUS)
    memory = [watch(tensor) for tensor in tensors]
    del returned, tensors
    assert dist.drain(wait=True, timeout=timedelta(seconds=10)) == 0
    assert dist.pending() == []
    until(lambda: all(each.expired() for each in memory))


@on(2)
def test_a_dropped_send_or_receive_comes_back_at_drain():
    peer = 1 - dist.get_rank()
    tensor, room = torch.ones(1000), torch.zeros(1000)
    memory = watch(tensor)
    dist.isend(tensor, peer)
    dist.irecv(room, peer)
    assert len(dist.pending()) == 2
    del tensor
    assert not memory.expired()
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0
    until(memory.expired)
    assert room[0] == 1


@on(2)
def test_kept_handles_that_nobody_waits_for_are_given_back_by_the_next_call_once_they_are_old_s3():
    tensors = [torch.ones(100) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert len(dist.pending()) >= 1
    for work in works:
        completed(work)
    with Log() as log:
        with mock.patch.object(LEDGER, "_patience", math.inf):
            dist.barrier()
            assert len(dist.pending()) == len(works)  # somebody has their handles, and is about to wait
        with mock.patch.object(LEDGER, "_patience", 0):
            dist.barrier()
            assert dist.pending() == []
    assert log.messages == []  # they were not dropped
    assert all(work.wait() for work in works)


@on(2)
def test_waiting_only_for_the_last_of_several():
    # Megatron and DeepSpeed do. With gloo that says nothing of the others, which are given back once they are over.
    tensors = [torch.ones(100) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    for work in works:
        completed(work)
    dist.drain()
    assert dist.pending() == []
    assert all(tensor[0] == 2 for tensor in tensors)


@on(2)
def test_is_completed_gives_back():
    tensor = torch.ones(100)
    work = all_reduce_late("is completed", tensor)
    if dist.get_rank() == 0:
        assert not work.is_completed()
        assert len(dist.pending()) == 1
        signal_to_peers("is completed")
    until(work.is_completed)
    assert dist.pending() == []


@on(2)
def test_a_future_keeps_the_hold_until_the_work_is_over():
    tensor = torch.ones(100)
    memory = watch(tensor)
    work = all_reduce_late("a future", tensor)
    inner, future = work.inner, work.get_future()
    del work, tensor
    with Log() as log:
        if dist.get_rank() == 0:
            assert dist.drain() == 400
            assert len(dist.pending()) == 1
            signal_to_peers("a future")
        future.wait()
        assert future.value()[0][0] == 2
        assert not memory.expired()
        until(inner.is_completed)
        del inner
        dist.drain()
        assert dist.pending() == []
    assert log.messages == []  # the future stands for the handle: nothing was dropped
    del future
    until(memory.expired)


@on(2)
def test_ten_thousand_works_in_flight_are_all_given_back():
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(10_000)]
    for work in works:
        work.wait()
    assert dist.pending() == []


# --- what the ledger says -------------------------------------------------------------------------------


@on(2)
def test_what_pending_says():
    group = subgroup(0, 1)
    tensor = torch.ones(6, dtype=torch.float64)
    work = dist.all_reduce(tensor[1:3], group=group, async_op=True)
    (entry,) = dist.pending()
    assert (entry.op, entry.nbytes, entry.state, entry.device) == ("all_reduce", 48, "in flight", "cpu")
    assert entry.group == group.group_name
    path, _, where = entry.site.rpartition(":")
    assert path == __file__
    line, _, function = where.partition(" in ")
    assert function == "test_what_pending_says"
    source = test_what_pending_says.body.__code__
    assert 0 < int(line) - source.co_firstlineno < 5
    assert 0 <= entry.seconds < 60
    for shown in ("all_reduce", "48", "cpu", entry.site):
        assert shown in str(entry)
    with pytest.raises(AttributeError):
        entry.op = "x"
    work.wait()


@on(2)
def test_drain_of_one_group_and_oldest_first():
    group = subgroup(0, 1)
    first, second = torch.ones(10), torch.ones(20)
    if dist.get_rank() == 1:
        there = dist.broadcast(second, 0, group=group, async_op=True)
    here = all_reduce_late("drain of one group", first)
    if dist.get_rank() == 0:
        there = dist.broadcast(second, 0, group=group, async_op=True)
        assert [entry.op for entry in dist.pending()] == ["all_reduce", "broadcast"]
        assert dist.drain(wait=True, group=group, timeout=timedelta(seconds=30)) == 0
        assert dist.drain() == 40
        assert [entry.op for entry in dist.pending()] == ["all_reduce"]
        with pytest.raises(dist.PendingWorkError, match=r"all_reduce of 40 bytes.*test_work\.py.*in all_reduce_late"):
            dist.drain(wait=True, timeout=timedelta(milliseconds=50))
        assert dist.drain() == 40  # nothing was released
        signal_to_peers("drain of one group")
    assert dist.drain(wait=True) == 0
    assert here.wait()
    assert there.wait()


def _receive_without_a_send(rank):
    if rank == 0:
        room = torch.zeros(10)
        memory = watch(room)
        work = dist.irecv(room, 1)
        del room
        with pytest.raises(
            dist.PendingWorkError, match=r"irecv of 40 bytes.*test_work\.py:\d+ in _receive_without_a_send"
        ):
            dist.drain(wait=True, timeout=timedelta(milliseconds=300))
        assert not memory.expired()
        assert [entry.op for entry in dist.pending()] == ["irecv"]
        del work
        signal_to_peers("gave up")
    else:
        wait_for_signal("gave up")


def test_a_receive_that_nobody_sends_to_is_an_error_that_names_the_line():
    for ended in launch(2, _receive_without_a_send):
        ended.check(destroyed=False)


# --- inside of other machinery --------------------------------------------------------------------------


@on(2)
def test_in_a_coalescing_region_torch_s_placeholder_passes_through():
    tensors = [torch.ones(4), torch.ones(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        inside = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert dist.pending() == []
        for work in inside:
            assert type(work) is c10d._IllegalWork
            with pytest.raises(ValueError, match="Illegal to call wait on IllegalWork object"):
                work.wait()
    (entry,) = dist.pending()
    assert entry.nbytes == 24
    assert entry.op == "_coalescing_manager"
    assert "in test_in_a_coalescing_region" in entry.site
    assert len(manager.works) == 1
    assert issubclass(type(manager.works[0]), dist.Work)
    manager.wait()
    assert dist.pending() == []
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4, [2.0] * 2]


class Count(TorchFunctionMode):
    """Which functions a mode sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        if getattr(function, "__module__", "") in (c10d.__name__, dist.__name__):
            self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", {**REDUCTIONS, **MOVES, "isend_and_irecv": 0, "batch": 0})
@on(2)
def test_a_function_mode_sees_torch_s_functions_as_often_and_the_hold_is_made_once(name):
    # What a mode sees are torch's functions, which is what those who write one compare with.
    def watched(module):
        with Count() as mode:
            returned, tensors = invoke(module, name, ASYNCHRONOUS)
        held = len(dist.pending())
        works = len(returned) if isinstance(returned, list) else 1
        finish(returned)
        until(lambda: dist.drain() == 0)
        return mode.seen, held, works, [bits(tensor) for tensor in tensors]

    expected, none, works, data = watched(stock)
    found, held, _, our_data = watched(dist)
    assert none == 0
    assert found == expected, f"{found}, not {expected}"
    assert our_data == data
    assert held == works


@on(2)
def test_c_plus_plus_takes_the_backends_handle_and_refuses_ours():
    from torch._C._distributed_c10d import _register_work

    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _register_work(tensor, work)
    _register_work(tensor, work.inner)
    del work
    torch.ops._c10d_functional.wait_tensor(tensor)
    assert tensor.tolist() == [2.0] * 4
    dist.drain()
    assert dist.pending() == []


@on(2)
def test_functional_collectives_beside_ours():
    import torch.distributed._functional_collectives as functional

    assert functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).tolist() == [2.0] * 4
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4


# --- S4: freed where it should be -----------------------------------------------------------------------


@pytest.mark.parametrize("name", {**REDUCTIONS, **MOVES, "isend_and_irecv": 0, "batch": 0, "region_of_all_reduce": 0})
@on(2)
def test_no_reference_cycles(name):
    """Memory comes back when its last reference goes, not when the collector happens to run."""

    def use():
        returned, tensors = invoke(dist, name, ASYNCHRONOUS)
        references = [weakref.ref(returned)] if isinstance(returned, dist.Work) else []
        memory = [watch(tensor) for tensor in tensors]
        finish(returned)
        return references, memory

    use()
    until(lambda: dist.drain() == 0)
    until(lambda: gc.collect() == 0)  # what the compiler left in this process goes in more than one collection
    gc.disable()
    try:
        references, memory = use()
        until(lambda: dist.drain() == 0)
        assert all(reference() is None for reference in references)
        until(lambda: all(each.expired() for each in memory))  # a thread of gloo may have been last
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert gc.garbage == [], [repr(thing)[:200] for thing in gc.garbage[:10]]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@on(2)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_work_is_not_copied_or_pickled_s8(duplicate):
    """As torch's; a copy would let go of the memory when it is waited for, and the other one would still hold it."""
    for library in (stock, dist):
        work = library.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(TypeError):
            duplicate(work)
        work.wait()
