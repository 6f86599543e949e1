"""``python -m safecomm run``: an existing script, patched, with nothing else changed for it."""

from __future__ import annotations

import atexit
import builtins
import functools
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from safecomm import _torch
from safecomm.arena.arena import OPEN
from safecomm.arena.arguments import bytes_of
from safecomm.arena.use import VARIABLE as ARENA
from safecomm.arena.use import asked_in_vain, read_environment
from safecomm.collectives.holding import counted
from safecomm.core.drain import pending
from safecomm.core.ledger import LEDGER
from safecomm.diagnostics.record import launched_as
from safecomm.diagnostics.units import each, mib
from safecomm.interception import replacing
from safecomm.patching import children
from safecomm.patching import patch as patching
from safecomm.patching.strict import UNSEEN

RECORD = "SAFECOMM_RECORD"


def check(
    name: str,
    *,
    module: bool = False,
    strict: bool = False,
    avoid_record_streams: bool = False,
    arena: str = "",
    record: str = "",
    snapshot: str = "",
) -> None:
    """Raise what there is to say against :func:`run`: FileNotFoundError, IsADirectoryError, ImportError, ValueError.

    Makes the directories ``record`` and ``snapshot``, if there is nothing to say and they are not there.
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
    for option, directory in (("--record", record), ("--snapshot", snapshot)):
        try:
            if directory:
                os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise NotADirectoryError(f"{option}: {directory} can't be made a directory: {error.strerror}") from None


def run(
    target: Sequence[str],
    *,
    module: bool = False,
    **options: Unpack[Options],
) -> None:
    """Run a script, or with ``module`` a module, as ``python`` itself would, with every collective safecomm's.

    ``target`` is its path or name, and its arguments. It sees its own ``sys.argv``, ``sys.path`` and ``__main__``, and
    ends as it would without: the same exit status, and the same traceback. When the process ends, rank 0 says on
    standard error what safecomm did for it, and on how many of the ranks. Python processes that it starts begin so,
    too. ``options``: those of :func:`begin`.
    """
    sys.argv[:] = target
    # A process that the script starts may be elsewhere.
    if record := options.get("record"):
        options["record"] = os.path.abspath(record)
    if snapshot := options.get("snapshot"):
        options["snapshot"] = os.path.abspath(snapshot)
    options["parent"] = os.getpid()
    if "ranks" not in options:
        options["ranks"] = tempfile.mkdtemp(prefix="safecomm-")
        atexit.register(shutil.rmtree, options["ranks"], ignore_errors=True)
    os.environ |= children.variables(options)
    begin(**options)
    try:
        if module:
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(target[0])  # type: ignore[attr-defined]
        else:
            _run_script(target[0])
    except BaseException as error:
        if not isinstance(error, SystemExit):
            _show_without_us(error)
        if "TORCHELASTIC_RUN_ID" in os.environ and getattr(error, "code", 1) not in (None, 0):
            what = f"safecomm: {target[0]} ended by {error!r}; torchrun names the module that it has started"
            print(what, file=sys.stderr)
        raise


class Options(TypedDict, total=False):
    """The arguments of :func:`begin`."""

    strict: bool
    avoid_record_streams: bool
    arena: str
    record: str
    snapshot: str
    low_latency: bool
    invariant: bool
    observe: tuple[str, int, int, str, bool] | None
    patch: bool
    ranks: str
    parent: int


_BEGUN: list[bool] = []
_RANK: list[tuple[int, int]] = []
"""The rank in the first group that this process made, and that group's size; of a group of a program's own class 0."""


def begin(
    *,
    strict: bool = False,
    avoid_record_streams: bool = False,
    arena: str = "",
    record: str = "",
    snapshot: str = "",
    low_latency: bool = False,
    invariant: bool = False,
    observe: tuple[str, int, int, str, bool] | None = None,
    patch: bool = True,
    ranks: str = "",
    parent: int = 0,
) -> None:
    """Begin in this process what :func:`run` does for a script, once.

    ``arena`` is as ``SAFECOMM_ARENA``; ``record`` is a directory for the files of ``record_memory()``, ``snapshot`` one
    for memory snapshots; ``low_latency`` is as ``SAFECOMM_LOW_LATENCY=1``. Each of them wins over its variable.
    ``invariant``: inside of :func:`invariant`. ``observe``: for ``compare``, the arguments of its observer. Without
    ``patch`` nothing but that is done. ``ranks``: a directory in which ranks leave a mark.
    ``parent``: the process that says so if none made a group.
    """
    if _BEGUN:
        return
    _BEGUN.append(True)
    worlds: list[int] = []

    def note(group: ProcessGroup) -> None:
        # A group of the program's own class may not know its size yet.
        rank, world = (group.rank(), group.size()) if type(group) is ProcessGroup else (0, 0)
        worlds.append(world)
        if not _RANK:
            _RANK.append((rank, world))
            if ranks and world:
                children.take_part(ranks, rank)

    _torch.on_each_group(note)
    if snapshot:
        from safecomm.diagnostics.snapshots import Snapshots

        Snapshots(snapshot, lambda: _rank()[0])
    if patch:
        _patch(
            strict=strict, avoid_record_streams=avoid_record_streams, arena=arena, record=record,
            low_latency=low_latency, invariant=invariant,
        )  # fmt: skip
    if observe:  # not if that has failed: what is told would be of another program
        from safecomm.diagnostics.observer import Observer

        directory, first, last, how, seconds = observe
        patched = functools.partial(patching.is_patched, "all_reduce")
        Observer(directory, first, last, _rank, how=how, seconds=seconds, patched=patched)
    elif patch:
        atexit.register(_summary, os.getpid(), launched_as.__wrapped__()[1] or 1, worlds, ranks, parent)


def _patch(
    *, strict: bool, avoid_record_streams: bool, arena: str, record: str, low_latency: bool, invariant: bool
) -> None:
    """Do what :func:`begin` is asked for beside watching."""
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
    if invariant:
        from safecomm.interception.invariance import invariant as entered

        entered().__enter__()
    patching.patch(strict=strict or None, avoid_record_streams=avoid_record_streams or None)


def _rank() -> tuple[int | None, int | None]:
    """Return this process's rank and how many there are; None and None while it has no group.

    What launchers tell does not count: processes that a rank starts are told the same.
    """
    return _RANK[0] if _RANK else (None, None)


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
    """Let the traceback of ``error`` begin where the program begins, whatever prints it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    hook = sys.excepthook

    def without_us(kind: type[BaseException], value: BaseException, _: types.TracebackType | None) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = without_us


def _summary(process: int, started: int, worlds: list[int], ranks: str, parent: int) -> None:
    """Say what safecomm did, on rank 0.

    ``started``: the ranks that a launcher has started; ``worlds``: the groups' sizes; ``ranks``: where they left marks;
    ``parent``: the process that speaks if none made a group.
    """
    bypassed = patching.bypassed()
    started = max(started, took_part := children.took_part(ranks))
    rank = (_RANK[0] if _RANK else launched_as())[0] or 0
    if rank or os.getpid() != process or (not worlds and (took_part or process != parent)):
        return
    world = max(worlds, default=0)
    if patching.was_strict():
        beside = f"{sum(bypassed.values())} calls bypassed it" + "".join(
            f"; {count} x {at}" for at, count in bypassed.items()
        )
    else:
        beside = "--strict counts those that bypass it"
    lines = [f"{each(counted())} handled{f' on rank 0 of {world}' if world else ''}; {beside}{UNSEEN}"]
    if not worlds or world > started:
        which = f"at least {started} of {world} ranks" if worlds else "this process, which made no group,"
        lines.append(
            f"{which} ran under this command: what a program starts on other machines, or forks before it has made a "
            "group, is not counted"
        )
    held = pending()
    counts = {
        "uses of memory on another stream than its own": LEDGER.uses.count,
        "calls of record_stream": patching.converted(),
        "lines that drop handles": len(LEDGER.dropped_at),
        "works that failed": LEDGER.failures,
    }
    memory = [f"{sum(hold.nbytes for hold in held)} bytes in {len(held)} holds at the end"]
    memory += [f"{count} {what}" for what, count in counts.items() if count]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats()
        allocated, reserved = (stats.get(f"{name}_bytes.all.peak", 0) >> 20 for name in ("allocated", "reserved"))
        memory.append(f"peak {allocated} MiB allocated, {reserved} MiB reserved")
    for arena in tuple(OPEN.values()):
        used = arena.stats()
        most, whole = mib(used.high_water), mib(used.capacity)
        memory.append(f"arena: at most {most} of {whole}, {used.fallbacks} requests did not fit")
        if 2 * used.high_water < used.capacity:
            memory.append(f"it cost {whole} all the time: a smaller one serves as much")
    if asked_in_vain():
        memory.append("no arena was made, nor its memory taken: neither functional nor empty() asked for a buffer")
    print(*(f"safecomm: {line}" for line in [*lines, "; ".join(memory)]), sep="\n", file=sys.stderr, flush=True)
