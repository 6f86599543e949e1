"""Torch's functional collectives, DTensor's and those of compiled code: run by the engines that take them.

All of them come down to the operators ``_c10d_functional``, which have one kernel of torch's for all devices. While
``low_latency()`` is on for any group, those that an engine can run have a kernel of ours for the device besides. It
offers the call to the engine of its group, and whatever that does not take goes to torch's kernel, untouched.

What the engine runs is complete in the order of the stream that it was called on, as any kernel's result is. Nothing of
it is in torch's registry of works, so nothing stays if the result is dropped. But a wait on another stream has to order
that: the storage that was written to carries a :class:`_Launch`, and dies with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives.guards import PLAIN
from safecomm.collectives.holding import finish_read
from safecomm.collectives.table import OPS_BY_NAME as _OPS
from safecomm.collectives.table import ROWS, Row
from safecomm.collectives.takers import ENGINES, take
from safecomm.core import captures
from safecomm.core.call_site import program
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.errors import CaptureBoundaryError, LowLatencyError
from safecomm.peers.engine import Engine

NAMESPACE = "_c10d_functional"

_GATHER, _SCATTER = ROWS["all_gather_single"], ROWS["reduce_scatter_single"]
_MARK = "_safecomm_launches"
"""The attribute of a storage that says what has written to it, and was not waited for."""

_How: TypeAlias = tuple[Any, ...]
"""What an operator is given behind its tensors; see :func:`_stand_in`."""

_groups: dict[str, Any] = {}  # those that have an engine, by name
_current = LEDGER.streams.current


class _Launch:
    """A kernel of an engine that has written to a storage, and that was not waited for."""

    __slots__ = ("capture", "engine", "event", "stream")

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)  # one that is gone was left when all it had launched was complete
        self.stream = self.capture = 0
        self.event: Any = None
        index = engine.index
        if index != HOST:
            streams = LEDGER.streams
            self.stream = stream = _current(index)
            self.capture = streams.capture(stream) if stream else 0
            self.event = streams.record_event(index, stream)
            engine.launched_events = True

    def wait(self) -> None:
        """Order the current stream after it, and raise PeerTimeoutError if a peer is known to have been late."""
        engine = self.engine()
        if engine is None:
            return
        if self.event is not None:
            self._order(engine.index)
        engine.raise_failure()

    def _order(self, index: int) -> None:
        streams = LEDGER.streams
        stream = _current(index)
        now = streams.capture(stream) if stream else 0
        if now == self.capture:
            if stream != self.stream:
                streams.wait_event(index, stream, self.event)
            if not now:
                event, self.event = self.event, None
                streams.recycle_event(index, event)
        elif not self.capture:
            # No graph can wait for what is outside of it, but the host can.
            with streams.relaxed_capture_mode():
                self.event.synchronize()
        elif self.capture in captures.RECORDING:
            if now:
                raise CaptureBoundaryError(
                    "wait_tensor() for a functional collective of low_latency(): it was captured into another CUDA "
                    "graph than the one that is being captured. To mend it, wait for it in the capture that it was "
                    "launched in. Nothing was done, and the capture is unharmed."
                )
            streams.wait_event(index, stream, self.event)  # which takes this stream into the capture
        # Else the graph is complete, and a replay orders what it has written.


def _mark(engine: Engine, tensor: torch.Tensor) -> None:
    """Note that ``engine`` has just written to ``tensor``, on the current stream."""
    attributes = vars(tensor.untyped_storage())
    launch = _Launch(engine)
    # The kernels of an engine run one after the other, so that of one engine's the last is enough.
    others = [one for one in attributes.get(_MARK, ()) if one.engine != launch.engine or one.capture != launch.capture]
    attributes[_MARK] = (*others, launch)


def _wait(tensor: torch.Tensor) -> bool:
    """Order the current stream after what an engine has written to ``tensor``; return whether there was anything."""
    attributes = vars(tensor.untyped_storage())
    launches = attributes.pop(_MARK, None)  # by one thread alone, because a wait gives the event away
    if launches is None:
        return False
    try:
        for launch in launches:
            launch.wait()
    except CaptureBoundaryError:
        attributes[_MARK] = launches  # it can be waited for elsewhere
        raise
    return True


# --- whose call it is ---------------------------------------------------------------------------------------


def _group_of(named: object, tensor: torch.Tensor) -> Any:
    """Return the group of a call that an engine may take; None if ``tensor`` is too large for it, or there is none."""
    name = named if type(named) is str else _name_of(named)
    group = _groups.get(name)
    if group is None:
        if None not in ENGINES:
            return None
        try:
            group = _torch.group_named(name)
        except (RuntimeError, ValueError):
            return None  # torch says itself what is wrong with it
    engine = ENGINES.get(group) or ENGINES.get(None)
    return group if engine is not None and engine.functional and tensor.nbytes <= engine.most else None


def _name_of(group: Any) -> str:
    """Return the name of a group that an operator was given itself (torch 2.13 and later, where that is asked for)."""
    if isinstance(group, torch.ScriptObject):
        group = c10d.ProcessGroup.unbox(group)
    return str(getattr(group, "group_name", ""))


def _taken(row: Row, group: Any, out: torch.Tensor, data: torch.Tensor, op: object) -> bool:
    """Return whether an engine has written to ``out`` what a call of ``data`` gives."""
    if LEDGER.nonempty:
        LEDGER.sweep()
    if not take(row, group, (out,) if out is data else (out, data), op, program):
        return False
    engine = ENGINES.get(group)
    if engine is not None:  # else another thread has switched it off since, and has waited for it
        _mark(engine, out)
    return True


def _all_taken(row: Row, group: Any, calls: list[tuple[torch.Tensor, torch.Tensor]], op: object) -> bool:
    """Return whether an engine has run all of ``calls``, each an output and an input: all of them or none."""
    engine = ENGINES.get(group)
    if not isinstance(engine, Engine) or not all(engine.takes(row.name, out, data, op) for out, data in calls):
        return False
    taken = [_taken(row, group, out, data, op) for out, data in calls]
    if any(taken) and not all(taken):
        raise LowLatencyError(f"{row.name}: low_latency() was switched off in the middle of a coalesced call")
    return all(taken)


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without a class of its own, which a rank alone may have given it."""
    if type(tensor) in PLAIN:
        return tensor
    with _torch.without_functions():
        return tensor.as_subclass(torch.Tensor)


def _contiguous(row: Row, group: object, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without a class of its own, or if it is not contiguous a copy, made on the current stream."""
    tensor = _unwrapped(tensor)
    if tensor.is_contiguous():
        return tensor
    copy = tensor.contiguous()
    finish_read(row, group, tensor)
    return copy


def _new(row: Row, tensor: torch.Tensor, how: _How) -> torch.Tensor:
    """Return new contiguous memory for what a call of ``row`` makes of ``tensor``; see :func:`_stand_in`."""
    shape: tuple[int, ...] = tensor.shape
    if row is _GATHER:
        shape = (how[-2] * shape[0] if shape else how[-2], *shape[1:])
    elif row is _SCATTER:
        shape = (shape[0] // how[-2], *shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


# --- what engines make of the operators' calls; None where none takes it ---------------------------------------


def _stand_in(row: Row, form: str) -> Callable[..., object]:
    """Return what engines make of the operator that is ``row`` in one ``form``: what follows its name.

    ``how``, what it is given behind its tensors: the operation and the number of ranks, where it has them; the group.
    """
    in_place, reduces, scatters = form.endswith("_"), "op" in row.given, row is _SCATTER

    def group_of(tensor: torch.Tensor, how: _How, out: torch.Tensor | None = None) -> Any:
        if reduces and how[0] not in _OPS:
            return None
        group = _group_of(how[-1], tensor)
        if group is None or row.one:
            return group
        if out is not None:
            return group if how[-2] == group.size() else None
        return None if scatters and (not tensor.dim() or tensor.shape[0] % how[-2]) else group

    def call_of(
        group: object, tensor: torch.Tensor, how: _How, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if in_place:
            data = _unwrapped(tensor)
            return data, data
        return _new(row, tensor, how) if out is None else _unwrapped(out), _contiguous(row, group, tensor)

    def one(tensor: torch.Tensor, *how: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
        group = group_of(tensor, how, out)
        if group is None:
            return None
        written, sent = call_of(group, tensor, how, out)
        if not _taken(row, group, written, sent, _OPS[how[0]] if reduces else None):
            return None
        return tensor if in_place else written if out is None else out

    def several(tensors: list[torch.Tensor], *how: Any) -> list[torch.Tensor] | None:
        groups = [group_of(tensor, how) for tensor in tensors]
        if not groups or None in groups:
            return None
        calls = [call_of(groups[0], tensor, how) for tensor in tensors]
        if not _all_taken(row, groups[0], calls, _OPS[how[0]] if reduces else None):
            return None
        return tensors if in_place else [written for written, _ in calls]

    return several if "coalesced" in form else one


# A wait that finds what an engine has written may find a work of torch's for the same storage besides.


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if _wait(tensor) and _torch.unwaited() == 0 else None


def _wait_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    found = [_wait(tensor) for tensor in tensors]
    return tensors if all(found) and _torch.unwaited() == 0 else None


_OURS: dict[str, Callable[..., object]] = {
    f"{row.alias or row.key}{form}": _stand_in(row, form)
    for row in ROWS.values()
    if row.collected and row.engine
    for form in ("", "_coalesced", *(("_", "_coalesced_") if row.one else ("_out",)))
} | {"wait_tensor": _wait_tensor, "wait_tensors": _wait_tensors}
"""What engines make of the operators, by their names. Not every torch has all of them."""

_WAITS = ("wait_tensor", "wait_tensors")


# --- kernels, while anybody wants them --------------------------------------------------------------------------


def _replaces(key: str, *, waits: bool) -> _torch.Shared:
    def install(replaced: _torch.Replaced, _: object) -> None:
        for name in _present():
            if (name in _WAITS) is waits:
                replaced.callback(_override(name, key, _OURS[name]).remove)

    return _torch.Shared(install)


_SHARED = {(key, waits): _replaces(key, waits=waits) for key in ("CPU", "CUDA") for waits in (False, True)}
"""What replaces the operators of a dispatch key that launch, and those that wait."""


def install(user: object, key: str, group: Any = None) -> None:
    """Let the functional collectives reach the engine of ``group`` (None: those of all) until :func:`remove`.

    ``key``: the dispatch key of the engine's device. Not if :func:`why_not` has something to say.
    """
    if group is not None:
        _groups[group.group_name] = group
    try:
        for waits in (False, True):
            _SHARED[key, waits].enter(user)
    except BaseException:
        remove(user, key, group)
        raise


def why_not(key: str) -> str:
    """Return why the functional collectives of ``key`` stay torch's; ``""`` if they need not."""
    if not _torch.keeps_attributes():
        return f"storages of torch {torch.__version__} have no attributes"
    for name in _present():
        ours = _SHARED[key, name in _WAITS].is_used()
        if not ours and _torch.kernel_of_all_devices(f"{NAMESPACE}::{name}", key) is None:
            return f"{NAMESPACE}::{name} has another kernel for {key}, or torch does not tell"
    return ""


def _present() -> list[str]:
    """Return the names of the operators that are replaced, of those that this torch has."""
    operators = getattr(torch.ops, NAMESPACE)
    return [name for name in _OURS if hasattr(operators, name)]


def _override(name: str, key: str, ours: Callable[..., object]) -> _torch.Override:
    operator = f"{NAMESPACE}::{name}"
    original: Any = _torch.kernel_of_all_devices(operator, key)

    def kernel(*args: object, **kwargs: object) -> object:
        taken = ours(*args, **kwargs)
        return original(*args, **kwargs) if taken is None else taken

    return _torch.Override(operator, key, kernel, needs_original=True, original=original)


def remove(user: object, key: str, group: Any = None, *, complete: bool = True) -> None:
    """Undo an :func:`install`: torch's kernels are back when all have undone theirs.

    Not ``complete``: what an engine has launched may be running, so that waiting for it stays ours.
    """
    if group is not None:
        _groups.pop(group.group_name, None)
    _SHARED[key, False].leave(user)
    waits = _SHARED[key, True]
    if not complete:
        waits.enter(object())  # which never leaves
    waits.leave(user)
