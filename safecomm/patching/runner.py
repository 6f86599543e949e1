"""``python -m safecomm run``: an existing script, patched, with nothing else changed for it."""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence

import torch

from safecomm import replacing
from safecomm.arena.arena import OPEN
from safecomm.arena.arguments import bytes_of
from safecomm.arena.use import VARIABLE as ARENA
from safecomm.arena.use import asked_in_vain, read_environment
from safecomm.collectives.holding import counted
from safecomm.core.drain import pending
from safecomm.core.ledger import LEDGER
from safecomm.patching import patch as patching

RECORD = "SAFECOMM_RECORD"


def check(
    name: str,
    *,
    module: bool = False,
    strict: bool = False,
    avoid_record_streams: bool = False,
    arena: str = "",
    record: str = "",
) -> None:
    """Raise what there is to say against :func:`run`: FileNotFoundError, IsADirectoryError, ImportError, ValueError.

    Makes the directory ``record``, if there is nothing to say and it is not there.
    """
    replacing.ask("run")
    patching.wanted(strict or None, avoid_record_streams or None)
    if arena:
        bytes_of(arena, "--arena")
    if module:
        _go_to(os.getcwd())  # as python -m does
        if importlib.util.find_spec(name.partition(".")[0]) is None:  # the rest would import the package, too early
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    elif os.path.isdir(name):
        raise IsADirectoryError(f"{name} is a directory: expected a script")
    elif not os.path.exists(name):
        raise FileNotFoundError(f"{name}: no such script")
    if record:
        try:
            os.makedirs(record, exist_ok=True)
        except OSError as error:
            raise NotADirectoryError(f"--record: {record} can't be made a directory: {error.strerror}") from None


def run(
    target: Sequence[str],
    *,
    module: bool = False,
    strict: bool = False,
    avoid_record_streams: bool = False,
    arena: str = "",
    record: str = "",
    low_latency: bool = False,
) -> None:
    """Run a script, or with ``module`` a module, as ``python`` itself would, with every collective safecomm's.

    ``target`` is its path or name, and its arguments. It sees its own ``sys.argv``, ``sys.path`` and ``__main__``, and
    ends as it would without: the same exit status, and the same traceback. When the process ends, rank 0 says on
    standard error what safecomm did for it. Processes that the script spawns by itself are not patched. ``arena`` is as
    ``SAFECOMM_ARENA``; ``record`` is a directory for the files of ``record_memory()``; ``low_latency`` is as
    ``SAFECOMM_LOW_LATENCY=1``. Each of them wins over its variable.
    """
    if arena:
        os.environ[ARENA] = arena
        read_environment()
    if record:
        from safecomm.diagnostics.record import record_memory

        os.environ.pop(RECORD, None)
        record_memory.give_way()
        record_memory(os.path.join(record, "run.jsonl")).start()
    if low_latency:
        from safecomm.peers.low_latency import everywhere

        everywhere(instead=True)
    patching.patch(strict=strict or None, avoid_record_streams=avoid_record_streams or None)
    atexit.register(_summary, os.getpid())
    sys.argv[:] = target
    try:
        if module:
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(target[0])  # type: ignore[attr-defined]
        else:
            _run_script(target[0])
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_us(error)
        raise


def _go_to(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory


def _run_script(path: str) -> None:
    path = os.path.abspath(path)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    _go_to(os.path.dirname(os.path.realpath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _show_without_us(error: BaseException) -> None:
    """Let the traceback of ``error`` begin where the program begins, whoever prints it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    hook = sys.excepthook

    def without_us(kind: type[BaseException], value: BaseException, _: types.TracebackType | None) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = without_us


def _summary(process: int) -> None:
    bypassed = patching.bypassed()
    if os.environ.get("RANK", "0") != "0" or os.getpid() != process:
        return
    calls = counted()
    by_name = ", ".join(f"{name} {count}" for name, count in sorted(calls.items(), key=lambda item: -item[1]))
    if patching.was_strict():
        beside = f"{sum(bypassed.values())} calls went past it" + "".join(
            f"; {count} x {at}" for at, count in bypassed.items()
        )
    else:
        beside = "--strict counts what went past it"
    held = pending()
    memory = ""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats()
        memory = (
            f"; peak {stats.get('allocated_bytes.all.peak', 0) >> 20} MiB allocated, "
            f"{stats.get('reserved_bytes.all.peak', 0) >> 20} MiB reserved"
        )
    for arena in tuple(OPEN.values()):
        used = arena.stats()
        memory += (
            f"; arena: at most {used.high_water / 2**20:.2f} of {used.capacity / 2**20:.2f} MiB, "
            f"{used.fallbacks} requests did not fit"
        )
    if asked_in_vain():
        memory += "; no arena was made, because nothing asked for a buffer of it"
    lines = [
        f"safecomm: {sum(calls.values())} calls of collectives by it ({by_name or 'none'}); {beside}",
        f"safecomm: {LEDGER.handoffs.count} uses of memory on another stream than its own, "
        f"{patching.converted()} calls of record_stream, "
        f"{len(LEDGER.dropped_at)} lines that drop handles, {LEDGER.failures} works that failed",
        f"safecomm: {sum(hold.nbytes for hold in held)} bytes in {len(held)} holds at the end{memory}",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
