"""Memory snapshots of torch that a process writes of itself: at its end, as memory runs out, and at a signal."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from safecomm import _torch

ENTRIES = 1_000_000
"""Entries of the history that are kept, the newest: some 100 MB of a file."""

SIGNAL = getattr(signal, "SIGUSR2", None)


def begin_history(*, every_stack: bool = True) -> None:
    """Have torch record what its allocator does from when the program starts CUDA, with the line of each allocation.

    ``every_stack``: and the line that frees it, which costs as much again.
    """
    record, context = _torch.record_history, "all" if every_stack else "alloc"
    if record is not None:
        _torch.when_cuda_starts(lambda: record("all", context=context, stacks="python", max_entries=ENTRIES))


def write_snapshot(path: Path) -> None:
    """Write what the allocator has, and has done since the history began; nothing where CUDA has not started.

    The file is there as a whole or not at all. Raises OSError.
    """
    if _torch.dump_snapshot is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    part = path.with_name(f".{path.name}.part")
    try:
        _torch.dump_snapshot(str(part))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class Snapshots:
    """Writes ``end.rank0.pickle`` into ``directory`` as the process ends, ``oom.rank0.pickle`` as memory runs out.

    And ``signal.rank0.pickle`` when SIGUSR2 comes, where the program has no handler for it. Of several processes each
    writes a file for its rank, which ``rank`` tells, None if there is none yet.
    """

    def __init__(self, directory: str, rank: Callable[[], int | None]) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._process = os.getpid()
        begin_history()
        atexit.register(self._write, "end")
        if (observe := _torch.on_out_of_memory) is not None:
            _torch.when_cuda_starts(lambda: observe(lambda *_: self._write("oom")))
        with contextlib.suppress(ValueError):  # in another thread than the main one there are no handlers
            if SIGNAL is not None and signal.getsignal(SIGNAL) is signal.SIG_DFL:
                signal.signal(SIGNAL, lambda *_: self._write("signal"))

    def _write(self, why: str) -> None:
        rank = self._rank()
        if os.getpid() != self._process:  # of a child, which has no history
            return
        path = self._directory / f"{why}.{f'pid{os.getpid()}' if rank is None else f'rank{rank}'}.pickle"
        try:
            write_snapshot(path)
        except Exception as error:  # a full disk must not end the program, nor replace its own error
            print(f"safecomm: --snapshot: {path} can't be written: {error}", file=sys.stderr, flush=True)
