"""low_latency(): small collectives as one kernel over the memory of the peers, behind the same calls."""

from __future__ import annotations

import importlib.util
import logging
import socket
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, captures
from safecomm.collectives.call import ENGINES, NOT_TAKEN, default_group
from safecomm.errors import LowLatencyError
from safecomm.ledger import LEDGER
from safecomm.peers.choice import GATHER, REDUCE, SCATTER, LowLatencyLimits, defaults, read
from safecomm.peers.engine import Engine
from safecomm.peers.staging import SymmetricStaging
from safecomm.streams import HOST

log = logging.getLogger("safecomm")

STAGINGS: dict[str, Any] = {"nccl": SymmetricStaging}
"""What makes memory that peers can store into, by the backend of the group."""

PATIENCE = timedelta(seconds=30)
"""How long leaving waits for the other ranks."""

_KEPT: list[Engine] = []
"""Engines into whose memory a peer may still store."""


class low_latency:  # noqa: N801
    """Inside of it, small collectives of ``group`` are one kernel over the memory of the peers.

    ``all_reduce`` (SUM, AVG, MAX, MIN), ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` of contiguous tensors
    (bf16, fp16, fp32) on GPUs of one host, up to a size above which NCCL is faster, eager and in CUDA graphs.
    Everything else goes where it went before. The result is bit for bit the same on every rank and in every run. It is
    not NCCL's: sums are taken in fp32 in the order of the ranks, and negative zero becomes positive zero. See
    ``docs/low-latency.md``, also for when not to use it.

    A context manager, and the same by :meth:`enable` and :meth:`disable`. Entering and leaving are collective: every
    rank of the group does the same. Leaving waits for all calls, and up to 30 s for the other ranks; by an exception it
    does not wait for them. What a rank that did not come may still store into is kept to the end of the process.

    Calls run on the current stream, asynchronous ones too; calls on several streams run one after the other (S1). In a
    graph, every rank has to replay the same calls in the same order as the others, as with NCCL.

    Parameters
    ----------
    group
        c10d's process group, by default the default group. One whose ranks do not share a host with peer access, that
        is not NCCL's, or has more than 8 ranks, stays as it is: :attr:`reason` says why, and so does the log.
    limits
        Up to how many bytes calls are taken, as :class:`LowLatencyLimits`, or the file that ``python -m safecomm tune
        --low-latency`` has written; by default values for the number of ranks on Hopper GPUs.
    timeout
        How long a call waits for its peers; by default the group's own timeout. After that the call's result is NaN,
        and the next call or wait raises :class:`PeerTimeoutError`.
    check
        For debugging: each call is compared with those of the other ranks before it is launched. It blocks the host.

    Raises
    ------
    LowLatencyError
        If it is on for the group already, or the ranks differ in what they ask for.
    ValueError
        For a file of limits that is not one.
    CaptureBoundaryError
        On entering or leaving inside of a CUDA graph capture.
    LiveGraphError
        On leaving while a graph is alive that runs collectives of the group.

    Examples
    --------
    >>> with safecomm.low_latency():
    ...     dist.all_reduce(tensor)
    """

    def __init__(
        self,
        group: Any = None,
        *,
        limits: LowLatencyLimits | str | Path | None = None,
        timeout: timedelta | None = None,
        check: bool = False,
    ) -> None:
        self._group = group
        self._limits = limits
        self._timeout = timeout
        self._check = check
        self._engine: Engine | None = None
        self._undo: Any = None
        self.reason = "it was not switched on"
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
        if not isinstance(group, c10d.ProcessGroup):
            raise LowLatencyError(f"low_latency({group!r}): expected a process group that this rank is in")
        if isinstance(ENGINES.get(group), Engine):
            raise LowLatencyError("low_latency(): it is on for this group already")
        captures.refuse_capture("low_latency()")
        self._group = group
        self._engine, self.reason = _make(group, self._limits, self._timeout, self._check)
        if self._engine is None:
            log.warning("low_latency(): group %r stays as it is: %s", _torch.group_name(group), self.reason)
            return self
        self._undo = LEDGER.diverted(group)
        self._undo.__enter__()
        captures.watch()
        captures.BEFORE.append(self._engine.order.before_capture)
        self._engine.end = self._end
        ENGINES[group] = self._engine
        return self

    def disable(self) -> None:
        """Switch it off, on all ranks of the group together, and give its memory back once all of them are here."""
        if self._engine is not None:
            captures.refuse_capture("low_latency.disable()")
            captures.refuse_live(self._group)
            self._end(PATIENCE)

    def _end(self, patience: timedelta) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self.reason = "it was switched off"
        ENGINES.pop(self._group, None)
        captures.BEFORE.remove(engine.order.before_capture)
        captures.unwatch()
        self._undo.__exit__(None, None, None)
        _KEPT.append(engine)
        if _fence(engine, patience):
            _KEPT.remove(engine)
            engine.raise_failure()

    def __enter__(self) -> low_latency:
        return self.enable()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.disable()
        else:  # the peers may be anywhere
            self._end(timedelta())


def _make(
    group: Any, limits: LowLatencyLimits | str | Path | None, timeout: timedelta | None, check: bool
) -> tuple[Engine | None, str]:
    """Return an engine for ``group``, or None and why there is none: the same on every rank."""
    world = group.size()
    backend = _torch.backend_name(group, "cuda" if torch.cuda.is_available() else "cpu")
    index = torch.cuda.current_device() if backend == "nccl" else HOST
    device = torch.device("cpu") if index == HOST else torch.device("cuda", index)
    if isinstance(limits, (str, Path)):
        limits = read(limits, world)
    limits = limits or defaults(world)
    reason = _why_not(group, backend, limits)
    mine = (reason, (repr(limits), repr(timeout), check), socket.gethostname(), _identity(index), uuid.uuid4().hex)
    reasons, asked, hosts, devices, names = zip(*_everyones(mine, group), strict=True)
    if any(reasons):
        return None, next(filter(None, reasons))
    if len(set(asked)) > 1:
        raise LowLatencyError(f"low_latency(): the ranks ask for different things: {sorted(set(asked))}")
    if len(set(hosts)) > 1:
        return None, f"its ranks are on {len(set(hosts))} hosts"
    if index != HOST and len(set(devices)) < world:
        return None, "several of its ranks are on one GPU"
    assert limits is not None
    layout = limits.layout(world)
    timeout = timeout or _torch.group_timeout(group, device.type) or timedelta(minutes=10)
    staging: Any = None
    engine: Engine | None = None
    try:
        staging = STAGINGS[backend](layout, device)
        if index != HOST:
            torch.cuda.synchronize(index)  # it is cleared before any peer knows of it
    except Exception as error:
        reason = f"no memory that peers can store into: {error}"
    if not all(_everyones(staging is not None, group)):
        return None, reason or "a rank has no memory that peers can store into"
    try:
        staging.meet(group)
        store = _torch.store_of(group, f"safecomm/low_latency/{names[0]}")
        engine = Engine(group, index, staging, layout, limits, timeout, store, check=check)
    except Exception as error:
        reason = f"the ranks can't reach each other's memory: {error}"
    if not all(_everyones(engine is not None, group)):
        return None, reason or "a rank can't reach the memory of the others"
    assert engine is not None
    reason = _try(engine)
    if not all(_everyones(not reason, group)):
        _KEPT.append(engine)
        return None, reason or "on another rank a first call failed"
    return engine, ""


def _everyones(mine: Any, group: Any) -> list[Any]:
    """Return what every rank of ``group`` has to say here."""
    found: list[Any] = [None] * group.size()
    c10d.all_gather_object(found, mine, group=group)
    return found


def _why_not(group: Any, backend: str, limits: LowLatencyLimits | None) -> str:
    """Return why this rank can't; ``""`` if there is no reason that it knows alone."""
    if backend not in STAGINGS:
        return f"its backend is {backend or 'unknown'}, and not nccl"
    if group.size() < 2:
        return "it has one rank"
    if limits is None:
        return f"it has {group.size()} ranks, for which there are no limits"
    if _torch.store_of(group, "") is None:
        return f"torch {torch.__version__} does not give out the store of a group"
    return lacking() if backend == "nccl" else ""


def lacking() -> str:
    """Return what is not installed that it needs on GPUs; ``""`` for nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if _torch.symmetric_memory() is None:
        return f"torch {torch.__version__} has no symmetric memory"
    return ""


def _identity(index: int) -> str:
    return "" if index == HOST else str(torch.cuda.get_device_properties(index).uuid)


def _fence(engine: Engine, patience: timedelta) -> bool:
    """Wait until the devices of all ranks are done with the group's calls; False if a rank does not get there in time.

    Through the group's store and not by a collective, which could not be given up.
    """
    if engine.index != HOST:
        torch.cuda.synchronize(engine.index)
    if engine.failure is not None or not patience:
        return False
    world, rank = engine.group.size(), engine.group.rank()
    try:
        engine.store.set(f"over/{rank}", "1")
        engine.store.wait([f"over/{peer}" for peer in range(world)], patience)
    except Exception as error:  # of the kind that each store has
        log.warning("low_latency(): not every rank has switched it off: %s", error)
        return False
    return True


def _first_calls(limits: LowLatencyLimits) -> Iterator[tuple[str, int]]:
    """Yield a collective for each kernel, and the number of fp32 elements of a rank's part."""
    for collective, largest in ((REDUCE, limits.one_shot), (SCATTER, limits.scatter), (GATHER, limits.gather)):
        yield collective, min(largest // 4, 4100)
    if limits.two_shot > limits.one_shot:
        yield REDUCE, limits.one_shot // 4 + 1


def _try(engine: Engine) -> str:
    """Run each kernel once, which compiles it, and return what is wrong; ``""`` for nothing."""
    world, rank = engine.group.size(), engine.group.rank()
    device = "cpu" if engine.index == HOST else f"cuda:{engine.index}"
    names = {REDUCE: "all_reduce", SCATTER: "_reduce_scatter_base", GATHER: "_all_gather_base"}
    try:
        for collective, count in _first_calls(engine.limits):
            part = torch.arange(count, device=device, dtype=torch.float32).remainder_(251)
            total = world * part + sum(range(world))
            if collective == REDUCE:
                data = out = part + rank
                expected = total
            elif collective == SCATTER:
                data, out, expected = (part + rank).repeat(world), torch.empty_like(part), total
            else:
                data, out = part + rank, part.repeat(world)
                expected = torch.cat([part + peer for peer in range(world)])
            result = engine.run(engine.group, names[collective], [out, data], c10d.ReduceOp.SUM, False)
            if result is None and bool((out != expected).any()):
                return f"a first {collective} gave wrong results"
        engine.raise_failure()
    except Exception as error:
        return f"a first call failed: {error}"
    engine.taken = 0
    return ""


class _Everywhere:
    """Stands in for the engines of groups that have none yet, and makes one at a group's first call."""

    def __init__(self, limits: str | None) -> None:
        self._limits = limits

    def run(self, group: Any, name: str, tensors: list[Any], op: Any, asynchronous: bool) -> Any:
        """As :meth:`Engine.run`; it switches low_latency() on for ``group`` first, which all its ranks do here."""
        if not isinstance(group, c10d.ProcessGroup) or captures.capturing():
            return NOT_TAKEN
        ENGINES[group] = _Stays()  # also for the calls that switching on makes
        if _torch.backend_name(group, "cuda") in STAGINGS and group.size() > 1:
            low_latency(group, limits=self._limits).enable()
        return ENGINES[group].run(group, name, tensors, op, asynchronous)


class _Stays:
    """Takes no call of a group."""

    def run(self, group: Any, name: str, tensors: list[Any], op: Any, asynchronous: bool) -> Any:
        """Leave the call to the backend."""
        return NOT_TAKEN

    def end(self, patience: timedelta) -> None:
        """Do nothing."""


def everywhere(limits: str | None = None) -> None:
    """Switch it on for every group at its first call, for the rest of the process, as ``SAFECOMM_LOW_LATENCY`` does.

    ``limits``: a file of limits. A group whose first call is inside a CUDA graph capture stays as it is until the first
    one that is not.
    """
    if None not in ENGINES:
        LEDGER.diverted().__enter__()
        ENGINES[None] = _Everywhere(limits)
