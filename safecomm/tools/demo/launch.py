"""Processes of this machine, a rank each, that send what they find to the process that started them.

Not torch's elastic launcher, which starts the ranks of ``tune``. That one hands over what ranks return, and only when
all have ended; it waits for a silent rank for ever; it leaves to its log what a rank could not do; and if it is killed,
the ranks that it has started run on, and keep their GPUs. The demo tells each way as it is measured, and must end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from safecomm.errors import SafecommError


class Refused(Exception):  # noqa: N818
    """What a rank raises when it can't do what it was asked for, and the arguments are to blame."""


def launch(
    world: int, work: Callable[..., None], *arguments: object, limit: float
) -> Generator[tuple[int, Any], None, None]:
    """Run ``work(send, rank, *arguments)`` in ``world`` processes, and yield each rank with what it sends.

    The processes end with the iterator, however that ends, and with this process. Ctrl-C is this process's alone. A
    script that gets here must do so under ``if __name__ == "__main__":``, as always with processes that are spawned.

    Raises
    ------
    ValueError
        If a rank raises :class:`Refused`.
    SafecommError
        If a rank fails, or nothing is heard of any for ``limit`` seconds.

    """
    processes: list[BaseProcess] = []
    pipes: dict[connection.Connection, int] = {}
    context = multiprocessing.get_context("spawn")
    try:
        with _uninterrupted():
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                pipes[ours] = rank
                process: BaseProcess = context.Process(target=_run, args=(theirs, rank, work, arguments), daemon=True)
                processes.append(process)
                process.start()
                theirs.close()
        waiting = dict(pipes)
        while waiting:
            ready: list[Any] = connection.wait(list(waiting), timeout=limit)
            if not ready:
                raise SafecommError(f"nothing was heard of the ranks for {limit:g} s, and they were ended")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    processes[rank].join(5)
                    raise SafecommError(
                        f"rank {rank} ended in the middle, with exit status {processes[rank].exitcode}"
                    ) from None
                if kind == "refused":
                    raise ValueError(content)
                if kind == "failed":
                    raise SafecommError(f"rank {rank} failed:\n{content}")
                if kind == "end":
                    del waiting[pipe]
                else:
                    yield rank, content
        for rank, process in enumerate(processes):
            process.join(30)
            if process.exitcode != 0:
                raise SafecommError(f"rank {rank} did all of it but did not end well: {process.exitcode}")
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()


def _run(pipe: connection.Connection, rank: int, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Run one rank."""
    _watch_parent()
    try:
        work(lambda content: pipe.send(("sent", content)), rank, *arguments)
        pipe.send(("end", None))
    except Refused as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()


def _watch_parent() -> None:
    """End this process when the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch(parent: BaseProcess) -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Leave Ctrl-C to this process alone: those that are started inside ignore it, and are ended by this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(processes: list[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
