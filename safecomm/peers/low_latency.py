"""low_latency(): small collectives as one kernel over the memory of the peers, behind the same calls."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, arguments
from safecomm.collectives import backends
from safecomm.collectives.table import EXCHANGE, GATHER, REDUCE, SCATTER
from safecomm.collectives.takers import DECLINED, ENGINES, default_group
from safecomm.core import captures
from safecomm.core.call_site import place
from safecomm.core.streams import HOST
from safecomm.errors import LowLatencyError, SafecommError
from safecomm.interception import replacing
from safecomm.peers import operators
from safecomm.peers.bulk import around
from safecomm.peers.engine import Engine
from safecomm.peers.limits import LARGEST, RING, LowLatencyLimits, defaults, read
from safecomm.peers.room import Room, fit, larger_forms, most_threads, needed
from safecomm.peers.staging import MOST, Staging, StagingLayout, SymmetricStaging

log: logging.Logger = logging.getLogger("safecomm")

STAGINGS: dict[str, Callable[[StagingLayout, torch.device], Staging]] = {"nccl": SymmetricStaging}
"""What makes memory that peers can store into, by the backend of the group."""

PATIENCE = timedelta(seconds=30)
"""How long leaving waits for the other ranks."""

FIRST_PATIENCE = timedelta(seconds=30)
"""How long the first calls, which try the kernels, wait for their peers."""

_LIMITS = arguments.is_a("LowLatencyLimits, or the path of a file of them", LowLatencyLimits, str, Path, type(None))

_KEPT: list[Engine] = []
"""Engines whose memory a peer may still use."""


class low_latency:  # noqa: N801
    """Inside of it, small collectives of ``group`` are one kernel over the memory of the peers.

    ``all_reduce`` (SUM, AVG, MAX, MIN), ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` of contiguous tensors
    (bf16, fp16, fp32) on GPUs of one host, up to a size above which NCCL is faster, eager and in CUDA graphs. The list
    forms ``all_gather`` and ``reduce_scatter``, of any size, send from tensor to tensor, without c10d's flat buffer and
    its copies. Everything else goes where it went before. The result is bit for bit the same on every rank and in every
    run. It is not NCCL's: sums are taken in fp32 in the order of the ranks. See ``docs/low-latency.md``, also for when
    not to use it.

    A context manager, and the same by :meth:`enable` and :meth:`disable`. Entering and leaving are collective: every
    rank of the group does the same. Leaving waits for all calls, and up to 30 s for the other ranks; by an exception it
    does not wait for them. What a rank that did not come may still use is kept to the end of the process.

    Calls run on the current stream, asynchronous ones too; calls on several streams run one after the other. Of
    large calls, above 4 MiB or a part of 1 MiB, only synchronous ones are taken. In a graph, every rank has to replay
    the same calls in the same order as the others, as with NCCL.

    Parameters
    ----------
    group
        c10d's process group, by default the default group. One whose ranks do not share a host with peer access, that
        is not NCCL's, has more than 8 ranks, or has hooks of the program's own, stays as it is: :attr:`reason` says
        why, and so does the log.
    limits
        Up to how many bytes calls are taken, as :class:`LowLatencyLimits`, or the file that ``python -m safecomm tune
        --low-latency`` has written; by default values for the number of ranks on Hopper GPUs.
    timeout
        Seconds for which a call waits for its peers, or a timedelta; by default the group's own. After that its result
        is NaN, and the next call or wait raises :class:`PeerTimeoutError`.
    check
        For debugging: each call is compared with those of the other ranks before it is launched. It blocks the host.
    functional
        Whether torch's functional collectives are taken too, and so DTensor's and those of compiled code.

    Raises
    ------
    LowLatencyError
        If it is on for the group already, the ranks differ in what they ask for, or a rank can't read its limits.
    CaptureBoundaryError
        On entering or leaving inside of a CUDA graph capture.
    LiveGraphError
        On leaving while a graph is alive that runs collectives of the group.
    SafecommError
        On entering, if ``SAFECOMM_REPLACE=0`` forbids it.

    Examples
    --------
    >>> with safecomm.low_latency():
    ...     dist.all_reduce(tensor)
    """

    def __init__(
        self,
        group: c10d.ProcessGroup | None = None,
        *,
        limits: LowLatencyLimits | str | Path | None = None,
        timeout: timedelta | float | None = None,
        check: bool = False,
        functional: bool = True,
    ) -> None:
        arguments.check("low_latency", arguments.MEMBER, group=group)
        arguments.check("low_latency", _LIMITS, limits=limits)
        arguments.check("low_latency", arguments.FLAG, check=check, functional=functional)
        self._group = group
        self._limits = limits
        self._timeout = arguments.seconds("low_latency", timeout=timeout)
        self._check = check
        self._functional = functional
        self._engine: Engine | None = None
        self.reason: str = "it was not switched on"
        """Why the group's calls are not taken; ``""`` if they are."""

    @property
    def calls(self) -> int:
        """How many calls were taken since it was switched on. A replay of a graph is none."""
        return 0 if self._engine is None else self._engine.taken

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes on this rank's device."""
        return 0 if self._engine is None else self._engine.nbytes

    def enable(self) -> low_latency:
        """Switch it on, on all ranks of the group together."""
        group = self._group or default_group()
        if group is None:
            c10d.get_rank()  # raises what torch raises before init_process_group
        replacing.ask("low_latency()")  # which sees captures
        captures.refuse_capture("low_latency()")
        before = ENGINES.get(group)
        if isinstance(before, Engine):
            if not before.everywhere:
                raise LowLatencyError("low_latency(): it is on for this group already")
            captures.refuse_live(group)
            before.leave(PATIENCE)()
        self._group = group
        ENGINES[group] = _Stays()  # for the calls that switching on makes
        try:
            self._engine, self.reason = _make(group, self._limits, self._timeout, self._check, self._functional)  # pyright: ignore[reportArgumentType]
        finally:
            if self._engine is None:
                ENGINES.pop(group, None)
                if isinstance(before, _Stays):
                    ENGINES[group] = before
        if self._engine is None:
            log.warning("low_latency(): group %r stays as it is: %s", _torch.group_name(group), self.reason)
            return self
        captures.watch(self._engine)
        captures.BEFORE.append(self._engine.before_capture)
        self._engine.leave = self._leave
        ENGINES[group] = self._engine
        if self._engine.functional:
            operators.install(self._engine, _key(self._engine.index), group)
        return self

    def disable(self) -> None:
        """Switch it off, on all ranks of the group together, and give its memory back once all of them are here."""
        engine = self._engine
        if engine is not None:
            captures.refuse_capture("low_latency.disable()")
            captures.refuse_live(self._group)
            self._leave(PATIENCE)()
            engine.raise_failure()

    def check(self) -> None:
        """Raise PeerTimeoutError if a call has given up; warn in the log of one that has waited for 5 s.

        Each call, wait and replay does so. This is for loops that do neither, such as one that only synchronises with
        a long graph; or for another thread. It reads a word of host memory, and waits for nothing.

        Examples
        --------
        >>> low = safecomm.low_latency().enable()
        >>> low.check()
        """
        if self._engine is not None:
            self._engine.raise_failure()

    def __repr__(self) -> str:
        of = "" if self._group is None else f"group {_torch.group_name(self._group)!r}, "
        if self._engine is None:
            return f"<low_latency(): {of}off: {self.reason}>"
        return f"<low_latency(): {of}on, {self.calls} calls taken, {self.nbytes} bytes>"

    def _leave(self, patience: timedelta) -> Callable[[], None]:
        """Switch it off here, and return what waits for the other ranks and gives the memory back."""
        engine, self._engine = self._engine, None
        if engine is None:
            return lambda: None
        self.reason = "it was switched off"
        ENGINES.pop(self._group, None)
        captures.BEFORE.remove(engine.before_capture)
        captures.unwatch(engine)
        _KEPT.append(engine)
        deadline = time.monotonic() + patience.total_seconds()
        complete = engine.idle(patience)
        idle = complete and not engine.timed_out
        if engine.functional:
            operators.remove(engine, _key(engine.index), self._group, complete=complete or not engine.launched_events)
        if idle and patience:
            engine.store.set(f"over/{engine.group.rank()}", "1")

        def wait() -> None:
            left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
            if idle and patience and _all_complete(engine, left):
                _KEPT.remove(engine)

        return wait

    def __enter__(self) -> low_latency:
        return self.enable()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.disable()
        else:  # the peers may be anywhere
            self._leave(timedelta())()


def _make(
    group: c10d.ProcessGroup, limits: LowLatencyLimits | str | Path | None, timeout: timedelta | None, check: bool,
    functional: bool,
) -> tuple[Engine | None, str]:  # fmt: skip
    """Return an engine for ``group``, or None and why there is none: the same on every rank.

    Whatever can go wrong on one rank alone is told to the others before anybody goes on.
    """
    world, rank = group.size(), group.rank()
    reason, problem, found, index, backend = "", "", None, HOST, ""
    try:
        backend = backends.of(group, "cuda" if torch.cuda.is_available() else "cpu").name
        index = torch.cuda.current_device() if backend == "nccl" else HOST
        found = (read(limits, world) if isinstance(limits, (str, Path)) else limits) or defaults(world)
        reason = _why_not(group, backend, found)
    except (OSError, ValueError) as error:
        problem = f"rank {rank}: {error}"
    torchs = operators.why_not(_key(index)) if functional else "functional=False"
    mine = (problem, reason, (repr(found), repr(timeout), check, torchs), _host(), _device(index), uuid.uuid4().hex)
    problems, reasons, asked, hosts, devices, names = zip(*_everyones(mine, group), strict=True)
    if any(problems):
        raise LowLatencyError(f"low_latency(): {'; '.join(filter(None, problems))}")
    if any(reasons):
        return None, next(filter(None, reasons))
    if len(set(asked)) > 1:
        raise LowLatencyError(f"low_latency(): the ranks ask for different things: {sorted(set(asked))}")
    if len(set(hosts)) > 1:
        return None, f"its ranks are on {len(set(hosts))} hosts"
    if index != HOST and len(set(devices)) < world:
        return None, "several of its ranks are on one GPU"
    assert found is not None
    layout = found.layout(world)
    device = torch.device("cpu") if index == HOST else torch.device("cuda", index)
    if _torch.HOOKS:
        hooks = sorted({place for places in _everyones(_hooks(group, device), group) for place in places})
        if hooks:
            return None, f"the program has hooks on it, which would not see its calls: {', '.join(hooks)}"
    timeout = timeout or _torch.group_timeout(group, device.type) or timedelta(minutes=10)
    staging: Any = None
    engine: Engine | None = None
    try:
        reason = _not_here(index, devices, layout, default=limits is None)
        if not reason:
            staging = STAGINGS[backend](layout, device)
        if index != HOST:
            torch.cuda.synchronize(index)  # it is cleared before any peer knows of it
    except Exception as error:
        reason = f"no memory that peers can store into: {error}"
    if why := next(filter(None, _everyones(reason, group)), ""):
        return None, why
    threads = min(_everyones(_threads(index, layout), group))
    if not threads:
        return None, (
            "its programs would not all fit on a GPU beside those of other groups that have it on, so that they could "
            "wait for each other without end"
        )
    try:
        staging.meet(group)
        store = _torch.store_of(group, f"safecomm/low_latency/{names[0]}")
        engine = Engine(group, index, staging, layout, found, timeout, store, threads, check=check)
        engine.room = None if index == HOST else _room(index, layout, threads)
        engine.functional = not torchs
        for call in _first_calls(engine):
            engine.prepare(*call[:2])  # compiles: other ranks are not to wait for that in a kernel
    except Exception as error:
        reason = f"the ranks can't reach each other's memory, or its kernels can't be compiled: {error}"
    if not all(_everyones(not reason, group)):
        return None, reason or "a rank can't reach the memory of the others, or can't compile its kernels"
    assert engine is not None
    if functional and torchs:
        log.warning("low_latency(): functional collectives stay torch's: %s", torchs)
    reason = _try(engine)
    if not all(_everyones(not reason, group)):
        _KEPT.append(engine)
        return None, reason or "on another rank a first call failed"
    return engine, ""


def _everyones(mine: object, group: c10d.ProcessGroup) -> list[Any]:
    """Return what every rank of ``group`` has to say here."""
    found: list[Any] = [None] * group.size()
    c10d.all_gather_object(found, mine, group=group)
    return found


def _hooks(group: c10d.ProcessGroup, device: torch.device) -> list[str]:
    """Return where the program's own hooks of ``group`` are, as far as they are functions of Python.

    Torch does not tell which there are (2.15). So this launches a collective, as all ranks do, and looks which
    functions that calls. Hooks of C++ are not seen, such as torch's flight recorder, which is on most groups.
    """
    found: list[str] = []
    here = sys._getframe()

    def called(frame: types.FrameType, event: str, _: object) -> None:
        ours = str(frame.f_globals.get("__name__")).startswith("safecomm.")  # patch(strict=True)'s
        if event == "call" and frame.f_back is here and not ours:
            found.append(place(frame))

    tensors, launch = [torch.zeros(1, device=device)], group.allreduce
    with _torch.undisturbed():
        before = sys.getprofile()
        sys.setprofile(called)
        try:
            work = launch(tensors)
        finally:
            sys.setprofile(before)
    work.wait()
    return found


def _why_not(group: c10d.ProcessGroup, backend: str, limits: LowLatencyLimits | None) -> str:
    """Return why this rank can't; ``""`` if there is no reason that it knows alone."""
    if backend not in STAGINGS:
        return f"its backend is {backend or 'unknown'}, and not nccl"
    if group.size() < 2:
        return "it has one rank"
    if limits is None:
        return f"it has {group.size()} ranks, for which there are no limits"
    if backend == "nccl" and os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "TRITON_INTERPRET is set, so kernels would not run on the GPU"
    if _torch.backend_of(group, "cuda" if backend == "nccl" else "cpu") is None:
        return f"torch {torch.__version__} does not give out the backend of a group"
    if _torch.store_of(group, "") is None:
        return f"torch {torch.__version__} does not give out the store of a group"
    return lacking() if backend == "nccl" else ""


def _not_here(index: int, devices: Sequence[str], layout: StagingLayout, *, default: bool) -> str:
    """Return why this rank's device can't, or is not to; ``""`` if there is no reason.

    ``default``: no limits were given, and those for NVLink are not for what is slower.
    """
    if index == HOST:
        return ""
    if default and (apart := _torch.not_linked(devices)):
        return f"{apart}, and its limits by default are for NVLink: give some, of python -m safecomm tune --low-latency"
    return ""


def _threads(index: int, layout: StagingLayout) -> int:
    """Return how many threads a kernel for small calls may have on this rank's device: all, half of them, or none."""
    most = most_threads(layout.world)
    if index == HOST:
        return most
    groups = [one.room for one in ENGINES.values() if isinstance(one, Engine) and one.index == index and one.room]
    return next((few for few in (most, most // 2) if fit([*groups, _room(index, layout, few)])), 0)


def _room(index: int, layout: StagingLayout, threads: int) -> Room:
    found = torch.cuda.get_device_properties(index)
    return needed(layout, threads, int(found.multi_processor_count), int(found.max_threads_per_multi_processor))


def lacking() -> str:
    """Return what is not installed that it needs on GPUs; ``""`` for nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if _torch.symmetric_memory() is None:
        return f"torch {torch.__version__} has no symmetric memory"
    if _torch.all_to_all is None:
        return f"torch {torch.__version__} does not give out its backend's all_to_all"
    return ""


def _key(index: int) -> str:
    """Return the dispatch key of device ``index``."""
    return "CPU" if index == HOST else "CUDA"


def _host() -> str:
    """Return what tells this machine from others, also from those with its name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _device(index: int) -> str:
    return "" if index == HOST else str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def _all_complete(engine: Engine, patience: timedelta) -> bool:
    """Wait until all ranks are done with the group's calls; False if one does not get there in time.

    Through the group's store and not by a collective, which could not be given up.
    """
    try:
        engine.store.wait([f"over/{rank}" for rank in range(engine.group.size())], patience)
    except Exception as error:  # of the kind that each store has
        log.warning("low_latency(): not every rank has switched it off, so its memory is kept: %s", error)
        return False
    return True


def _first_calls(engine: Engine) -> Iterator[tuple[str, list[Any], torch.Tensor]]:
    """Yield a call for each kernel: its name, its tensors, and the result."""
    limits, world, rank = engine.limits, engine.group.size(), engine.group.rank()
    device = "cpu" if engine.index == HOST else f"cuda:{engine.index}"
    small = (
        (REDUCE, 0, limits.one_shot, 1), (REDUCE, limits.one_shot, limits.two_shot, world),
        (SCATTER, 0, limits.scatter, 1), (GATHER, 0, limits.exact, 1), (GATHER, limits.exact, limits.gather, 1),
        (EXCHANGE, 0, limits.exchange, 1),
    )  # fmt: skip
    counts = []
    for collective, beyond, most, slots in small:
        if most > beyond:
            counts.append((collective, beyond // 4 + min((most - beyond) // 4, 4100)))
        # The kernels differ where pieces are larger, and where a program has several chunks.
        larger = larger_forms(slots, engine.threads)
        counts += [(collective, nbytes // 4) for nbytes in larger if beyond < nbytes <= most]
    rings = (limits.ring, limits.ring_scatter, limits.ring_gather)
    for collective, largest in zip((REDUCE, SCATTER, GATHER), rings, strict=True):
        if limits.kernel(collective, largest) == RING:
            counts.append((collective, min(largest, around(engine.layout, collective)) // 4))
    for collective, count in counts:
        part = torch.arange(count, device=device, dtype=torch.float32).remainder_(251)
        total = world * part + sum(range(world))
        if collective == REDUCE:
            tensor = part + rank
            yield "all_reduce", [tensor, tensor], total
        elif collective == SCATTER:
            yield "reduce_scatter_tensor", [torch.empty_like(part), (part + rank).repeat(world)], total
            if 0 < count * 4 <= limits.scatter:
                yield "reduce_scatter", [torch.empty_like(part), [part + rank] * world], total
        elif collective == EXCHANGE:
            given = torch.cat([part + rank + 3 * to for to in range(world)])
            exchanged = torch.cat([part + peer + 3 * rank for peer in range(world)])
            yield "all_to_all_single", [torch.empty_like(given), given], exchanged
        else:
            gathered = torch.cat([part + peer for peer in range(world)])
            yield "all_gather_into_tensor", [torch.empty_like(gathered), part + rank], gathered


def _try(engine: Engine) -> str:
    """Run each kernel once, and return what is wrong; ``""`` for nothing."""
    try:
        engine.set_patience(FIRST_PATIENCE)
        for name, tensors, expected in _first_calls(engine):
            op = None if name == "all_to_all_single" else c10d.ReduceOp.SUM
            if engine.run(engine.group, name, tensors, op, False) is None:
                if not engine.idle(2 * FIRST_PATIENCE):
                    return "a first call does not end"
                engine.raise_failure()
                if bool((tensors[0] != expected).any()):
                    return f"a first {name} gave wrong results"
        engine.set_patience(engine.timeout)
    except Exception as error:
        return f"a first call failed: {error}"
    engine.taken = 0
    return ""


class _Everywhere:
    """Stands in for the engines of groups that have none yet, and makes one at a group's first call."""

    functional = True
    most = MOST * LARGEST

    def __init__(self, limits: str | None) -> None:
        self._limits = limits

    def plan_again(self) -> None:
        """Do nothing."""

    def run(
        self, group: c10d.ProcessGroup, name: str, tensors: list[Any], op: object, asynchronous: bool, *,
        unshared: bool = True,
    ) -> object:  # fmt: skip
        """As :meth:`Engine.run`; it switches low_latency() on for ``group`` first, which all its ranks do here."""
        if not isinstance(group, c10d.ProcessGroup) or captures.capturing():
            return DECLINED
        ENGINES[group] = _Stays()
        backend = backends.of(group, "cuda").name or "unknown"
        if backend not in STAGINGS:
            name = _torch.group_name(group)
            log.warning("low_latency(): group %r stays as it is: its backend is %s, and not nccl", name, backend)
        elif group.size() > 1:
            try:
                low_latency(group, limits=self._limits).enable()
            except SafecommError as error:  # on all ranks the same, and the program does not say it
                log.warning("%s; the calls of group %s stay NCCL's", error, _torch.group_name(group))
            if isinstance(ENGINES[group], Engine):
                ENGINES[group].everywhere = True
        return ENGINES[group].run(group, name, tensors, op, asynchronous, unshared=unshared)


class _Stays:
    """Takes no call of a group."""

    functional = False
    most = 0

    def plan_again(self) -> None:
        """Do nothing."""

    def run(
        self, group: object, name: str, tensors: object, op: object, asynchronous: bool, *, unshared: bool = True
    ) -> object:
        """Leave the call to the backend."""
        return DECLINED

    def leave(self, patience: timedelta) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None


def everywhere(limits: str | None = None, *, instead: bool = False) -> None:
    """Switch it on for every group at its first call, for the rest of the process, as ``SAFECOMM_LOW_LATENCY`` does.

    ``limits``: a file of limits. A group whose first call is inside a CUDA graph capture stays as it is until the first
    one that is not. ``instead``: of what was asked for before.
    """
    if instead or None not in ENGINES:
        if replacing.allowed() and None not in ENGINES and not operators.why_not("CUDA"):
            operators.install(everywhere, "CUDA")
        ENGINES[None] = _Everywhere(limits)
