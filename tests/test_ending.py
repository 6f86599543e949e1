"""Destroying groups where CUDA graphs are alive that nobody saw the capture of: an end, or a clear error (S7).

torch's function is a fake that waits for a graph as NCCL does. On GPUs: ``tests/gpu/ends.py``.
"""

import ctypes
import gc
import logging
import os
import sys
import threading
from datetime import timedelta

import pytest
import torch
from ranks import launch

import safecomm as dist
from safecomm.collectives import ending, groups
from safecomm.core import captures

SOON = timedelta(seconds=0.05)
LATE = timedelta(seconds=30)


class Graph:
    """A CUDA graph that a communicator waits for. torch's is not to be made where there is no CUDA."""

    def __init__(self):
        self.gone = threading.Event()

    def __del__(self):
        self.gone.set()

    def reset(self):
        self.gone.set()


@pytest.fixture
def cuda(monkeypatch):
    """Let CUDA be there, with device 3 the current one; return which device each thread has set."""
    gc.collect()  # the graphs of other tests
    devices = {}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: devices.update({threading.get_ident(): index}))
    yield devices
    assert ending._begun == []


class Destroy:
    """torch's function, which waits for ``graph``."""

    def __init__(self, graph=None, error=None):
        self.gone = None if graph is None else graph.gone
        self.error = error
        self.calls = []

    def __call__(self, group):
        self.calls.append((group, threading.get_ident()))
        if self.gone is not None:
            self.gone.wait()
        if self.error is not None:
            raise self.error


def test_without_graphs_torchs_function_is_called_as_it_is(cuda):
    function = Destroy(error=ValueError("torch's own"))
    with pytest.raises(ValueError, match="torch's own"):
        ending.destroy(function, None, "world", LATE, whole=True)
    assert function.calls == [(None, threading.get_ident())]


def test_graphs_that_hold_nothing_up_are_not_noticed(cuda):
    graph, error = Graph(), ValueError("torch's own")
    function = Destroy(error=error)
    with pytest.raises(ValueError, match="torch's own") as caught:
        ending.destroy(function, "group", "group", LATE, whole=False)
    assert caught.value is error
    ((_, thread),) = function.calls
    assert thread != threading.get_ident()
    assert cuda == {thread: 3}
    assert not graph.gone.is_set()


@pytest.mark.parametrize("how", ["reset", "dropped", "frozen"])
def test_a_graph_that_holds_it_up_is_a_clear_error_s7(cuda, how):
    graph = Graph()
    function = Destroy(graph)
    if how == "frozen":
        gc.freeze()
    with pytest.raises(dist.LiveGraphError, match=r"has not returned after 0\.05 s.* 1 are alive") as caught:
        ending.destroy(function, None, "world", SOON, whole=True)
    assert caught.value.graphs == (graph,)
    # It still goes on: another group is not destroyed beside it, and the same one not twice.
    for group in ("another", "world"):
        with pytest.raises(dist.LiveGraphError):
            ending.destroy(function, group, group, SOON, whole=group == "world")
    if how == "dropped":
        del caught, graph
        gc.collect()
    else:
        caught.value.graphs[0].reset()
    ending.destroy(function, None, None, LATE, whole=True)  # of the world, which is not there any more
    assert len(function.calls) == 1


def test_what_has_ended_unasked_is_not_taken_for_another_group(cuda):
    graph = Graph()
    with pytest.raises(dist.LiveGraphError):
        ending.destroy(Destroy(graph), None, "world", SOON, whole=True)
    graph.reset()
    function = Destroy()
    ending.destroy(function, None, "a new world", LATE, whole=True)
    assert len(function.calls) == 1


def test_a_patched_program_ends_with_graphs_that_nobody_saw_s7(cuda, caplog):
    graph = Graph()
    captures.set_tolerant(True)
    try:
        ending.destroy(Destroy(graph), None, "world", SOON, whole=True)
    finally:
        captures.set_tolerant(False)
    assert graph.gone.is_set()
    assert "They were reset, because all groups are being destroyed" in caplog.text


def test_a_patched_program_that_destroys_one_group_keeps_its_graphs(cuda):
    graph, function = Graph(), Destroy()
    function.gone = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: function.gone.set() if "Reset those that do" in record.getMessage() else None
    logging.getLogger("safecomm").addHandler(handler)
    captures.set_tolerant(True)
    try:
        ending.destroy(function, "group", "group", SOON, whole=False)
    finally:
        captures.set_tolerant(False)
        logging.getLogger("safecomm").removeHandler(handler)
    assert not graph.gone.is_set()


def test_without_any_graph_it_waits_as_long_as_torch(cuda, monkeypatch):
    """What was alive at first is gone at the limit, so what torch waits for is something else: a rank that is late."""
    alive = iter([[object()], []])
    function = Destroy()
    function.gone = threading.Event()

    def look():
        found = next(alive)
        if not found:
            function.gone.set()
        return found

    monkeypatch.setattr(captures, "alive", look)
    ending.destroy(function, None, "world", SOON, whole=True)
    assert len(function.calls) == 1


def test_at_the_end_of_the_interpreter_it_is_torchs_function(cuda, monkeypatch):
    def start(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    graph, function = Graph(), Destroy()
    ending.destroy(function, None, "world", LATE, whole=True)
    assert function.calls == [(None, threading.get_ident())]
    assert not graph.gone.is_set()


# --- the process -----------------------------------------------------------------------------------------------------


class Telling(Graph):
    def __del__(self, tell=os.write):  # its module is gone by then
        tell(1, b"the graph died")


def _ends_while_torch_waits(rank):
    torch.cuda.CUDAGraph = Graph
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda _: None
    groups._c10d_destroy = lambda _: ctypes.CDLL(None).pause()  # for ever, and without the interpreter
    sys.modules["__main__"].graph = Telling()  # a global, which dies with its module
    try:
        dist.destroy_process_group()
    except dist.LiveGraphError as error:
        print(error)
    assert dist.is_initialized()


def test_a_process_ends_while_torch_waits_for_a_graph_s7():
    (ended,) = launch(1, _ends_while_torch_waits, timeout=1.0)
    ended.check(destroyed=False)
    assert "has not returned after 1 s" in ended.out
    assert "the graph died" not in ended.out, "torch's function would come back to an interpreter that is gone"
