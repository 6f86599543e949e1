"""Ends and errors (S4, S7): each ends cleanly or with a clear error, never in a hang or a crash.

Tests that kill ranks, destroy groups or end interpreters have processes of their own.
"""

import functools
import gc
import logging
import os
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import COALESCED, Setting
from ranks import launch, on, signal_to_peers, until, wait_for_signal
from torch.multiprocessing.reductions import StorageWeakRef

import safecomm as dist
from safecomm.collectives import groups
from safecomm.collectives.routes import ROUTES
from safecomm.core import captures
from safecomm.core import holds as entries
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST

SOON = 1.0
"""A group's timeout, in seconds, for the tests that run into it."""


def check(world, body, *arguments, statuses=None, destroyed=True, **limits):
    """Run ``body`` in ranks of their own, check how each ended, and return that."""
    ended = launch(world, body, *arguments, **limits)
    for rank, one in enumerate(ended):
        one.check((statuses or [0] * world)[rank], destroyed=destroyed)
    return ended


# --- destroying and aborting ----------------------------------------------------------------------------


def _destroy_with_works_pending(rank, which):
    group = dist.new_group() if which == "subgroup" else None
    tensors = [torch.ones(1000) for _ in range(20)]
    kept = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:10]]
    for tensor in tensors[10:]:
        dist.all_reduce(tensor, group=group, async_op=True)
    sent, room = torch.full((10,), 5.0), torch.zeros(10)
    dist.isend(sent, 1 - rank, group=group)
    dist.irecv(room, 1 - rank, group=group)
    assert len(dist.pending()) > 0
    dist.destroy_process_group(group)
    assert dist.pending() == []
    assert all(tensor[0] == 2 for tensor in tensors)
    assert room[0] == 5
    assert all(work.wait() for work in kept)
    if group is not None:
        dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.drain(wait=True) == 0


@pytest.mark.parametrize("which", ["world", "subgroup"])
def test_destroying_a_group_finishes_its_works_first(which):
    check(2, _destroy_with_works_pending, which)


def _destroy_with_a_work_that_cannot_end(rank):
    if rank == 1:
        wait_for_signal("destroyed")
        dist.destroy_process_group()
        return
    tensor = torch.ones(1000)
    memory = StorageWeakRef(tensor.untyped_storage())
    dist.all_reduce(tensor, async_op=True)
    del tensor
    groups.GRACE = timedelta(seconds=SOON / 4)  # which ends before the group's limit, at which the work fails
    with pytest.raises(dist.PendingWorkError) as raised:
        dist.destroy_process_group()
    assert "all_reduce of 4000 bytes" in str(raised.value)
    assert "in _destroy_with_a_work_that_cannot_end" in str(raised.value)
    assert not memory.expired()
    c10d.destroy_process_group()
    signal_to_peers("destroyed")


def test_destroying_a_group_with_a_work_that_cannot_end_is_a_clear_error():
    check(2, _destroy_with_a_work_that_cannot_end, timeout=SOON)


def _destroy_in_a_patched_program(rank):
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("safecomm").addHandler(handler)
    dist.patch()
    stock.all_reduce(torch.ones(4))
    tensor = torch.ones(1000)
    memory = StorageWeakRef(tensor.untyped_storage())
    stop = stock.irecv(tensor, 1 - rank)  # as for a message that tells this rank to stop, and never comes
    del tensor
    stock.destroy_process_group()
    assert not stock.is_initialized()
    (warning,) = said
    assert "irecv of 4000 bytes on cpu, quarantined" in warning
    assert "in _destroy_in_a_patched_program" in warning
    assert "its group was destroyed before it was over" in warning
    assert [one.state for one in dist.pending()] == ["quarantined"]
    del stop
    assert not memory.expired()
    assert dist.drain(wait=True) == 0
    assert memory.expired()


def test_a_patched_program_ends_with_a_receive_posted_s7():
    """As with torch, at once: well before the group's limit, which is that of the test."""
    check(2, _destroy_in_a_patched_program)


def _destroy_in_a_patched_program_with_a_work_that_cannot_end(rank):
    dist.patch()
    groups.GRACE = timedelta(seconds=SOON / 4)  # as above
    if rank == 1:
        wait_for_signal("destroyed")
    else:
        tensor = torch.ones(1000)
        stock.all_reduce(tensor, async_op=True)
        del tensor
    stock.destroy_process_group()
    assert not stock.is_initialized()
    assert [one.state for one in dist.pending()] == ([] if rank else ["quarantined"])
    if rank == 0:
        signal_to_peers("destroyed")


def test_a_patched_program_ends_with_a_work_that_cannot_end_s7():
    check(2, _destroy_in_a_patched_program_with_a_work_that_cannot_end, timeout=SOON)


def _abort_with_works_pending(rank):
    if rank == 1:
        wait_for_signal("aborted")
        dist.destroy_process_group()
        return
    tensor = torch.ones(1000)
    memory = StorageWeakRef(tensor.untyped_storage())
    work = dist.all_reduce(tensor, async_op=True)
    del tensor
    dist._abort_process_group()
    # The backend may still have it: it stays until drain(wait=True).
    assert [entry.state for entry in dist.pending()] == ["quarantined"]
    assert not memory.expired()
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0
    assert dist.pending() == []
    del work
    signal_to_peers("aborted")


@pytest.mark.skipif(not hasattr(c10d, "_abort_process_group"), reason="torch before 2.6 has no such function")
def test_aborting_a_group_with_works_pending():
    check(2, _abort_with_works_pending, timeout=SOON)


def _other_communicator(rank, name):
    """Have ``name`` called while a receive is posted for a message that never comes, with a stand-in for c10d's."""
    seen = []
    peer, tensor = 1 - rank, torch.zeros(4)
    mine = StorageWeakRef(tensor.untyped_storage())
    work = dist.irecv(tensor, peer)
    states = [entry.state for entry in dist.pending()]
    assert states == ["in flight"]
    route = ROUTES.of(c10d.GroupMember.WORLD, HOST)

    def refuses(*given, **named):
        raise ValueError("no such rank")

    def does(*given, **named):
        seen.append((given, named, [entry.state for entry in dist.pending()]))
        return "c10d's"

    setattr(groups, f"_c10d_{name.strip('_').removesuffix('_group')}", refuses)
    if name == "shrink_group":
        with pytest.raises(ValueError, match="no such rank"):
            dist.shrink_group([5])
        assert [entry.state for entry in dist.pending()] == states, "nothing has come of it"
    setattr(groups, f"_c10d_{name.strip('_').removesuffix('_group')}", does)
    arguments = ([1], None) if name == "shrink_group" else (3, ["a"], None)
    assert getattr(dist, name)(*arguments, timeout=1) == "c10d's"
    assert seen[0][:2] == (arguments, {"timeout": 1})
    quarantined = ["quarantined"]
    assert seen[0][2] == (states if name == "shrink_group" else quarantined)
    assert [entry.state for entry in dist.pending()] == quarantined, "S4"
    assert ROUTES.of(c10d.GroupMember.WORLD, HOST) is not route, "it may have other ranks now"
    del work, tensor
    dist.drain()
    assert not mine.expired(), "S4"
    assert dist.drain(wait=True) == 0
    assert mine.expired()
    assert dist.pending() == []
    stock.barrier()  # no rank goes while another receives


@pytest.mark.parametrize("name", ["shrink_group", "_reconfigure"])
def test_what_is_held_when_a_group_gets_another_communicator_is_quarantined_s4(name):
    """S4: what the old one runs is not known to end, and is not asked; on torch's refusal nothing changes."""
    if not hasattr(c10d, name):
        assert not hasattr(dist, name)
        return
    check(2, _other_communicator, name)


def _reconfigures(_):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=stock.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    for uuid in (1, 2):
        dist._reconfigure(uuid, [c10d._get_reconfigure_handle()]).wait()
        tensor = torch.ones(4)
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor.tolist() == [1.0] * 4
        assert dist.pending() == []
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(c10d, "_reconfigure"), reason="torch 2.15")
def test_a_group_goes_on_after_it_was_reconfigured():
    check(1, _reconfigures)


def _init_again(rank, path):
    for number in range(3):
        tensor = torch.ones(4)
        dist.all_reduce(tensor, async_op=True)
        dist.destroy_process_group()
        assert tensor.tolist() == [2.0] * 4
        dist.init_process_group("gloo", init_method=f"file://{path}{number}", rank=rank, world_size=2)
    dist.all_reduce(tensor)
    dist.destroy_process_group()


def test_groups_may_be_made_again(tmp_path):
    check(2, _init_again, str(tmp_path / "store"))


# --- collectives that fail ------------------------------------------------------------------------------


def _times_out(rank, module_is_stock):
    module = stock if module_is_stock else dist
    if rank == 1:
        wait_for_signal("timed out")
        os._exit(0)  # its peer has closed the connection
    tensor = torch.ones(1000)
    work = module.all_reduce(tensor, async_op=True)
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    print(type(caught.value).__name__, str(caught.value).split("]")[-1].split("ms")[-1], flush=True)
    if not module_is_stock:
        assert dist.pending() == []  # gloo's thread has ended with the work, and touches nothing any more
        with pytest.raises(RuntimeError):
            work.wait()
    signal_to_peers("timed out")
    os._exit(0)


def test_a_collective_that_times_out_fails_as_torch_s_and_is_over():
    outs = [check(2, _times_out, module_is_stock, timeout=SOON)[0].out for module_is_stock in (True, False)]
    assert outs[0]
    assert outs[0] == outs[1]


def _peer_dies(rank, asynchronous):
    dist.barrier()
    if rank == 1:
        wait_for_signal("launched")
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(1 << 20)
    if asynchronous:
        work = dist.all_reduce(tensor, async_op=True)
        signal_to_peers("launched")
        with pytest.raises(RuntimeError):
            work.wait()
    else:
        signal_to_peers("launched")
        with pytest.raises(RuntimeError):
            dist.all_reduce(tensor)
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0
    with pytest.raises(RuntimeError):  # the group is broken, which is said again and hangs nothing
        dist.all_reduce(tensor)
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0
    dist.destroy_process_group()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_dies_is_an_error_in_the_others(asynchronous):
    check(2, _peer_dies, asynchronous, statuses=[0, -signal.SIGKILL], timeout=30.0)


def _peer_dies_and_nobody_waits(rank):
    dist.barrier()
    if rank == 1:
        wait_for_signal("launched")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        dist.all_reduce(torch.ones(1000), async_op=True)
    signal_to_peers("launched")
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0
    dist.destroy_process_group()


def test_a_rank_that_dies_and_nobody_waits():
    check(2, _peer_dies_and_nobody_waits, statuses=[0, -signal.SIGKILL], timeout=30.0)


# --- regions that fail ----------------------------------------------------------------------------------


class Interruption(Exception):
    pass


def _group_works_again():
    assert dist.pending() == []
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(tensor)
    manager.wait()
    assert tensor.tolist() == [4.0] * 4
    assert dist.pending() == []


@pytest.mark.parametrize("asynchronous", [False, True])
@on(2)
def test_after_an_exception_in_a_coalescing_region_the_group_works(asynchronous):
    tensor = torch.ones(4)

    def interrupted():
        with dist._coalescing_manager(async_ops=asynchronous):
            dist.all_reduce(tensor)
            raise Interruption

    with pytest.raises(Interruption):
        interrupted()
    assert tensor.tolist() == [1.0] * 4  # it was never launched
    _group_works_again()


@on(2)
def test_after_an_error_at_the_end_of_a_coalescing_region_the_group_works():
    with pytest.raises(RuntimeError, match="same type"):
        COALESCED["mixed_region"](dist, Setting())
    _group_works_again()


@on(2)
def test_after_a_region_that_could_not_begin_the_group_works():
    # gloo has no regions that launch as they go. torch.distributed leaves the group collecting calls for ever.
    def begin(module):
        try:
            with module._coalescing_manager(device=torch.device("cpu")):
                pass
        except RuntimeError as error:
            return str(error)
        return None

    expected = begin(c10d)
    c10d._world.pg_coalesce_state.clear()
    assert expected is not None
    assert begin(dist) == expected
    _group_works_again()


@on(2)
def test_a_region_in_a_region_fails_as_torch_s_and_the_group_works():
    def nested():
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(4))
            with dist._coalescing_manager():
                pass

    with pytest.raises(ValueError, match="non-empty op list"):
        nested()
    _group_works_again()


@on(2)
def test_a_region_that_somebody_has_closed_fails_as_torch_s_and_the_group_works():
    def closed(library):
        with library._coalescing_manager():
            with library._coalescing_manager():
                pass
            library.all_reduce(torch.ones(4))

    for library in (stock, dist):
        with pytest.raises(KeyError):
            closed(library)
    _group_works_again()


@on(2)
def test_an_exception_between_launch_and_wait_leaves_nothing_behind():
    def fails():
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, async_op=True)
        raise Interruption

    with pytest.raises(Interruption):
        fails()
    assert dist.drain(wait=True, timeout=timedelta(seconds=30)) == 0


# --- interpreters that end ------------------------------------------------------------------------------


def _ends(rank, how, destroy):
    logging.basicConfig(level=logging.ERROR)
    global kept  # a global is taken down with its module, later than a local
    tensor, room, peer = torch.ones(1 << 16), torch.empty(1 << 16), 1 - rank
    if how == "waited":
        kept = dist.all_reduce(tensor, async_op=True)
        kept.wait()
    elif how == "dropped":
        dist.all_reduce(tensor, async_op=True)
        del tensor
    elif how == "kept":
        kept = dist.all_reduce(tensor, async_op=True)
    elif how == "future":
        kept = dist.all_reduce(tensor, async_op=True).get_future()
    elif how == "send":
        kept = [dist.isend(tensor, peer), dist.irecv(room, peer)]
    elif how == "region":
        with dist._coalescing_manager(async_ops=True) as kept:
            dist.all_reduce(tensor)
    if destroy:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("how", "destroy"),
    [(how, False) for how in ("waited", "dropped", "kept", "future", "send", "region")]
    + [(how, True) for how in ("kept", "send", "region")],
)
def test_interpreters_end_with_works(how, destroy):
    check(2, _ends, how, destroy, destroyed=destroy, timeout=30.0)


def _ends_with_a_send_that_nobody_receives(rank):
    global kept
    if rank == 0:
        kept = dist.isend(torch.ones(1 << 20), 1)
    else:
        kept = dist.irecv(torch.ones(4), 0, tag=5)
    dist.barrier()


def test_interpreters_end_with_a_send_that_nobody_receives():
    check(2, _ends_with_a_send_that_nobody_receives, destroyed=False, timeout=30.0)


def _ends_with_a_collective_that_nobody_joins(rank):
    global kept
    dist.barrier()
    if rank == 0:
        kept = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        signal_to_peers("launched")
    else:
        wait_for_signal("launched")


def test_interpreters_end_with_a_collective_that_nobody_joins():
    check(2, _ends_with_a_collective_that_nobody_joins, destroyed=False, timeout=30.0)


def _ends_by_an_exception(rank):
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)  # noqa: F841 - alive in the traceback
    raise Interruption("the program's own")


def test_an_interpreter_that_ends_by_an_exception_says_which():
    for ended in launch(2, _ends_by_an_exception, timeout=30.0):
        assert ended.status in (1, -signal.SIGABRT), ended.err  # see Ended.check
        assert "Segmentation" not in ended.err
        assert "Interruption: the program's own" in ended.err


def _ends_while_a_thread_waits(rank):
    if rank == 1:
        wait_for_signal("thread waits")
        dist.all_reduce(torch.ones(4))
        return
    work = dist.all_reduce(torch.ones(4), async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    signal_to_peers("thread waits")


def test_an_interpreter_that_ends_while_a_thread_waits():
    check(2, _ends_while_a_thread_waits, destroyed=False, timeout=30.0)


class _Late:
    """Is taken down as the interpreter ends: lets the peer send, and waits until ``thread`` has come back from gloo."""

    def __init__(self, thread):
        self.signal = functools.partial(signal_to_peers, "ending")
        self.status = f"/proc/self/task/{thread.native_id}/status"

    def __del__(self, open=open, exists=os.path.exists):
        def blocked():
            with open(self.status) as file:
                return [line for line in file if line.startswith("voluntary_ctxt_switches")]

        before = blocked()
        self.signal()
        while exists(self.status) and blocked() == before:
            pass


def _told_that_a_call_is_pending(rank, how):
    if rank == 1:
        wait_for_signal("ending")
        stock.send(torch.ones(4), 0)
        os._exit(0)

    def waiting():
        return [thread for thread in threading.enumerate() if thread.name == "safecomm.drain"]

    _stop = dist.irecv(torch.ones(4), 1)
    if how == "interrupt":

        def interrupt():
            until(waiting)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            dist.drain(wait=True)
        with pytest.raises(dist.PendingWorkError):
            dist.drain(wait=True, timeout=timedelta(milliseconds=20))
    elif how == "destroy":
        groups.GRACE = timedelta(milliseconds=20)
        with pytest.raises(dist.PendingWorkError):
            dist.destroy_process_group()
    else:
        for _ in range(3):
            with pytest.raises(dist.PendingWorkError):
                dist.drain(wait=True, timeout=timedelta(milliseconds=20))
    [thread] = waiting()
    sys.modules["late"] = _Late(thread)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells that the thread has come back")
@pytest.mark.parametrize("how", ["limit", "destroy", "interrupt"])
def test_an_interpreter_ends_while_a_thread_of_ours_waits_s7(how):
    """The thread comes back to an interpreter that is ending: its exit would unwind C++, which terminates."""
    check(2, _told_that_a_call_is_pending, how)


def _without_any_group(rank):
    assert dist.pending() == []
    assert dist.drain(wait=True) == 0


def test_an_interpreter_that_used_no_group():
    launch(0, _without_any_group)[0].check()


def test_the_collector_may_end_a_capture_while_lanes_are_moved():
    class Graph:
        pass

    def fail():
        graph = Graph()
        captures.CapturedGraph(LEDGER, graph, (0, 1), [], 0, 7, 42, sys._getframe()).begin(graph)
        graph.itself = graph

    def collect_in_the_middle(frame, event, arg):
        if frame.f_code is entries.keys_of.__code__:
            sys.settrace(None)
            gc.collect()

    def divert():
        sys.settrace(collect_in_the_middle)
        with ROUTES.off():
            pass

    gc.disable()
    try:
        fail()
        thread = threading.Thread(target=divert, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        assert captures.RECORDING == {}
    finally:
        gc.enable()
