"""Real processes for the tests: a pool of ranks that outlives a test, and ranks of their own for tests that end them.

``@on(2)`` makes a function a test that runs in every rank of the pool of that size. The pool's processes stay alive;
one that fails or hangs takes the pool with it, with a report of every rank, and the next test gets a new pool.
``launch`` runs a function in interpreters of its own and tells how each of them ended.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as stock

LIMIT = 100
"""Seconds until a test counts as hanging: far more than any takes, below pytest's own dump of the stacks."""

GRACE = 5
"""Seconds in which the other ranks may still report, once one has failed."""

# --- for the functions that run in the ranks -------------------------------------------------------------

_store: stock.Store | None = None


def signal_to_peers(key: str) -> None:
    """Let every rank that waits for ``key`` go on."""
    _store.set(key, "1")


def wait_for_signal(key: str) -> None:
    """Block until a rank gives the signal ``key``."""
    _store.wait([key])


def until(condition) -> None:
    """Poll ``condition``; the time limit of the test ends a wait that is in vain."""
    while not condition():
        _let_others_run()


def _let_others_run() -> None:
    """Sleep for a moment: a rank that only yields has its full share of a processor that its peers need."""
    time.sleep(0.0005)


@functools.cache
def subgroup(*members: int) -> stock.ProcessGroup:
    """Return a group of ``members``, made once: every rank of the world has to ask for it."""
    return stock.new_group(list(members))


def _join(rank: int, world: int, port: int, prefix: str, timeout: float) -> None:
    global _store
    store = stock.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT))
    _store = stock.PrefixStore(f"{prefix}/signals", store)
    stock.init_process_group(
        "gloo",
        store=stock.PrefixStore(f"{prefix}/group", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def _server() -> stock.TCPStore:
    return stock.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# --- the pool ----------------------------------------------------------------------------------------------


def on(*sizes: int, interpreted: bool = False):
    """Make a function the body of a test that every rank of a pool runs, once for each of ``sizes``.

    ``interpreted``: of a pool in which Triton's kernels run in its interpreter.
    """

    def decorate(body):
        def test(pools, world, **arguments):
            failure = pools.run(world, body.__module__, body.__name__, arguments, interpreted=interpreted)
            if failure:
                pytest.fail(failure, pytrace=False)

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pools", "world")]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in inspect.signature(body).parameters
        ]
        functools.update_wrapper(test, body)
        test.__signature__ = inspect.Signature(parameters)
        test.body = body
        return pytest.mark.parametrize("world", sizes)(test)

    return decorate


def _serve(rank: int, world: int, port: int, connection: Connection, stacks: str, interpreted: bool) -> None:
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports it
        # The kernels call it there while they wait for a peer, after a look that takes as long.
        os.sched_yield = functools.partial(time.sleep, 0.003)
        speed_up_the_interpreter()
    torch.set_num_threads(1)
    gc.freeze()  # or tests that collect garbage would look for it among all objects of torch
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)  # as in pyproject.toml
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        _join(rank, world, port, "pool", LIMIT)
        while True:
            try:
                module, name, arguments = connection.recv()
            except EOFError:  # the tests are over
                return
            try:
                getattr(importlib.import_module(module), name).body(**arguments)
                _check_clean()
            except BaseException:
                connection.send(traceback.format_exc())
            else:
                connection.send(None)


def speed_up_the_interpreter() -> None:
    """Have Triton's interpreter put its functions in the language's place once a kernel and module.

    It looks for all of them again in each call of a function, which takes half of its time.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        module, outermost = id(function.__globals__), not patched
        if module in patched:
            return None  # what a function that is called returns to nobody
        patched.add(module)
        scope = patch(function)
        if outermost:  # a kernel, which undoes it at its end
            restore, scope.restore = scope.restore, lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


def _check_clean() -> None:
    """Whatever a test did, it leaves nothing held (S2, S3), no coalescing region open, torch's modes as they were."""
    import safecomm
    from safecomm._torch import world

    left = safecomm.pending()
    assert left == [], f"still held after the test: {left}"
    assert not world.pg_coalesce_state
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


class Pool:
    """The processes of one world size."""

    def __init__(self, world: int, interpreted: bool) -> None:
        # Not fork: the process of the tests has threads, of the stores. The server forks clean copies of itself that
        # have torch imported already.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        self.store = _server()
        self.connections = []
        self.processes = []
        self.stacks = []
        for rank in range(world):
            here, there = context.Pipe()
            descriptor, stacks = tempfile.mkstemp(prefix="stacks-")
            os.close(descriptor)
            serving = (rank, world, self.store.port, there, stacks, interpreted)
            process = context.Process(target=_serve, args=serving, daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)
            self.stacks.append(Path(stacks))

    def run(self, module: str, name: str, arguments: dict) -> str | None:
        """Run a test in every rank; return what there is to say about a failure."""
        for connection in self.connections:
            connection.send((module, name, arguments))
        reports: dict[int, str | None] = {}
        deadline = time.monotonic() + LIMIT
        while len(reports) < len(self.connections):
            waiting = {c: r for r, c in enumerate(self.connections) if r not in reports}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    reports[rank] = connection.recv()
                except EOFError:
                    self.processes[rank].join()
                    reports[rank] = f"the process ended with status {self.processes[rank].exitcode}"
                if reports[rank] is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = set(range(len(self.connections))) - set(reports)
        if silent or any(reports.values()):
            for rank in silent:
                reports[rank] = "did not finish; its stacks:\n" + self._stacks_of(rank)
            return "\n".join(f"--- rank {rank}: {reports[rank] or 'passed'}" for rank in sorted(reports))
        return None

    def _stacks_of(self, rank: int) -> str:
        process, path = self.processes[rank], self.stacks[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + GRACE
            while not path.read_text().endswith("\n") and time.monotonic() < deadline:
                _let_others_run()
        return path.read_text()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if "coverage" in sys.modules:
                process.join(GRACE)  # a process that is killed writes down none of the branches that it took
            process.kill()
            process.join()
        for path in self.stacks:
            path.unlink(missing_ok=True)


class Pools:
    """The pools of a session, by what their ranks are like, started when they are first asked for."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], Pool] = {}

    def run(self, world: int, module: str, name: str, arguments: dict, *, interpreted: bool = False) -> str | None:
        pool = self._pools.pop((world, interpreted), None) or Pool(world, interpreted)
        try:
            failure = pool.run(module, name, arguments)
        except BaseException:
            pool.close()
            raise
        if failure:
            pool.close()  # who knows what its ranks still have under way
        else:
            self._pools[world, interpreted] = pool
        return failure

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


# --- ranks of their own -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Ended:
    """How an interpreter ended."""

    status: int
    out: str
    err: str

    def check(self, status: int = 0, *, destroyed: bool = True) -> None:
        """Check the exit status, and that no part of torch came down on the way.

        ``destroyed``: whether the program destroyed its groups. If not, torch 2.13 aborts in some of the exits with
        gloo, one in twenty or so, without safecomm as well; that is all that is let through. The handler that then
        writes where each thread was may itself meet a thread whose memory is gone.
        """
        if not destroyed and self.status in (-signal.SIGABRT, -signal.SIGSEGV):
            assert "terminate called without an active exception" in self.err, self.err
            assert "Traceback" not in self.err, self.err
            return
        assert self.status == status, f"status {self.status}, not {status}\n{self.out}\n{self.err}"
        for sign in ("terminate called", "Segmentation", "Fatal Python error", "Exception ignored"):
            assert sign not in self.err, self.err


class Interpreters:
    """A process that has torch imported, and becomes an interpreter for each task: it forks, and the fork goes on.

    Starting Python and importing torch takes longer than any task. The fork comes back into the main module and ends
    with it, so what happens at the end of an interpreter happens as in any other.
    """

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._statuses: dict[int, int | None] = {}

    def start(self, out: str, err: str, limit: float, task: tuple) -> int:
        """Return the id of a new interpreter that runs ``task``, with this process's environment."""
        self._connection.send((dict(os.environ), sys.path, out, err, limit, pickle.dumps(task)))
        while True:
            process, status = self._receive()
            if status is None:
                return process

    def status(self, process: int, deadline: float) -> int:
        """Return the exit status of an interpreter, which is killed at the ``deadline``."""
        while self._statuses[process] is None:
            if self._connection.poll(max(deadline - time.monotonic(), 0)):
                self._receive()
            else:
                os.kill(process, signal.SIGKILL)
                deadline = time.monotonic() + GRACE
        return self._statuses.pop(process)

    def _receive(self) -> tuple[int, int | None]:
        process, status = self._connection.recv()
        self._statuses[process] = status
        return process, status

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


@functools.cache
def _interpreters() -> Interpreters:
    interpreters = Interpreters()
    atexit.register(interpreters.close)
    return interpreters


class Launch:
    """``body(rank, *arguments)`` in interpreters of their own, which have begun."""

    def __init__(
        self, ranks: int, body, *arguments, port: int = 0, timeout: float = LIMIT, limit: float = LIMIT
    ) -> None:
        self.store: stock.Store | None = None  # which the ranks use, and somebody has to keep
        self._interpreters = _interpreters()
        self._folder = tempfile.TemporaryDirectory()
        self._started = []
        for rank in range(ranks):
            out, err = (Path(self._folder.name) / f"{rank}.{name}" for name in ("out", "err"))
            task = (rank, ranks, port, timeout, body.__module__, body.__name__, arguments)
            process = self._interpreters.start(str(out), str(err), limit - 2 * GRACE, task)
            self._started.append((process, out, err))
        self._deadline = time.monotonic() + limit

    def end(self) -> list[Ended]:
        """Wait for all of them, and return how they ended."""
        deadline, ended = self._deadline, []
        with self._folder:
            for process, out, err in self._started:
                status = self._interpreters.status(process, deadline)
                if status:  # the others may be waiting for it in vain
                    deadline = min(deadline, time.monotonic() + 3 * GRACE)
                # gloo of some versions of torch says there how many ranks it has found.
                said = re.sub(r"^\[Gloo\].*\n", "", out.read_text(), flags=re.MULTILINE)
                ended.append(Ended(status, said, err.read_text()))
        self._started.clear()
        return ended

    def close(self) -> None:
        """Kill those whose end nobody has waited for."""
        self._deadline = 0.0
        self.end()


def launch(world: int, body, *arguments, timeout: float = LIMIT, limit: float = LIMIT) -> list[Ended]:
    """Run ``body(rank, *arguments)`` in ``world`` interpreters of their own, in a gloo group with ``timeout``.

    ``world`` 0: one interpreter, without a group.
    """
    if not world:
        return Launch(1, body, *arguments, limit=limit).end()
    store = _server()
    return Launch(world, body, *arguments, port=store.port, timeout=timeout, limit=limit).end()


def run_program(program: str) -> Ended:
    """Run a program, given as text, in an interpreter of its own, which has torch imported, and safecomm not."""
    return launch(0, _run, program)[0]


def _run(_: int, program: str) -> None:
    assert "safecomm" not in sys.modules
    exec(program, {"__name__": "program"})


def run_python(*arguments: str, cwd: str, limit: float = LIMIT, **environment: str) -> Ended:
    """Run ``python arguments``, a script or ``-m`` and a module, in such an interpreter."""
    return launch(0, _run_python, arguments, cwd, environment, limit=limit)[0]


def start_ranks(world: int, *arguments: str, cwd: str, limit: float, **environment: str) -> Launch:
    """Begin ``python arguments`` on ``world`` ranks, which find one another as those of torchrun do."""
    store = _server()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where["TORCHELASTIC_RESTART_COUNT"] = "0"  # torch 2.4 asks for it
    environment = {**environment, **where, "WORLD_SIZE": str(world)}
    started = Launch(world, _run_python, arguments, cwd, environment, limit=limit)
    started.store = store
    return started


def _run_python(rank: int, arguments: tuple[str, ...], cwd: str, environment: dict[str, str]) -> None:
    assert "safecomm" not in sys.modules
    os.environ.update(environment)
    if "WORLD_SIZE" in environment:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(cwd)
    if arguments[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv[:] = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # all that the interpreter itself does for -m
    else:
        sys.path.insert(0, os.path.dirname(arguments[0]))
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _become(connection: Connection) -> bytes | None:
    """Fork for each task that comes, and return the task in the fork; None when the tests are over."""
    running: dict[int, int] = {}  # the processes, by the end of a pipe that says when the other end is closed
    gc.freeze()  # or each of them would at its end look for garbage among all objects of torch
    while True:
        for ready in wait([connection, *running]):
            if ready is not connection:
                process = running.pop(ready)
                os.close(ready)
                connection.send((process, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))
                continue
            try:
                environment, path, out, err, limit, task = connection.recv()
            except EOFError:
                return None
            here, there = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads of libraries, which are idle
                process = os.fork()
            if process:
                os.close(there)
                running[here] = process
                connection.send((process, None))
                continue
            # "there" stays open for as long as this process lives.
            connection.close()
            for descriptor in (here, *running):
                os.close(descriptor)
            for descriptor, name in ((1, out), (2, err)):
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, descriptor)
                os.close(file)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = path
            faulthandler.dump_traceback_later(limit)
            return task


def _main() -> None:
    task = _become(Connection(int(sys.argv[1])))
    if task is None:
        return
    import ranks  # this file, under the name that the tests know

    rank, world, port, timeout, module, name, arguments = pickle.loads(task)
    torch.set_num_threads(1)
    if port:
        ranks._join(rank, world, port, "launch", timeout)
    getattr(importlib.import_module(module), name)(rank, *arguments)


if __name__ == "__main__":
    _main()
