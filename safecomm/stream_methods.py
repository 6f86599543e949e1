"""What shows the ledger how the program orders its streams: ``torch.cuda.Event.record`` and ``wait``, replaced.

All of torch's Python ways to order streams come down to these two: ``Stream.wait_stream``, ``Stream.wait_event`` and
``Stream.record_event`` call them. They are replaced from the first memory on that was used on another stream than its
allocation stream, and inside of ``avoid_record_streams()``. Each does what torch's does, and tells the ledger's
``stream_order`` of it. What the core does with that is said there. What orders streams past these two (C++, the generic
``torch.Event``) is not seen. Memory then comes back when the host sees that the device has got there.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from safecomm import replacing
from safecomm.core.ledger import LEDGER, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from safecomm.core.stream_order import Note

_NOTE = "_safecomm_note"
"""The attribute of an event that has its note. An event without one has none."""

_lock = threading.RLock()
_users: dict[object, None] = {}
_replaced: dict[str, tuple[Any, Any]] = {}  # by name: what stood there, and what stands in for it


def see(who: object, ledger: Ledger = LEDGER) -> None:
    """Tell ``ledger`` of each record and wait from now on, until :func:`unsee` is called for all who want it.

    Calling it again for the same ``who`` does nothing.
    """
    with _lock:
        _users[who] = None
        for name, around in (("record", _around_record), ("wait", _around_wait)):
            stands = vars(torch.cuda.Event).get(name)
            if stands is None:
                continue
            if name not in _replaced:
                _replaced[name] = stands, around(stands, ledger)
            original, standing_in = _replaced[name]
            if stands is original:
                setattr(torch.cuda.Event, name, standing_in)


def unsee(who: object) -> None:
    """Undo :func:`see` for ``who``."""
    with _lock:
        _users.pop(who, None)
        if _users:
            return
        for name, (original, standing_in) in tuple(_replaced.items()):
            # Else somebody has put theirs over ours, which goes on to torch's.
            if vars(torch.cuda.Event).get(name) is standing_in:
                setattr(torch.cuda.Event, name, original)
            _replaced.pop(name, None)


def forget_uses() -> None:
    """Put torch's methods back until the next use, if nobody but the ledger wants them replaced."""
    unsee(_first_use)
    LEDGER.uses.on_use = _first_use


def _first_use() -> None:
    if replacing.allowed():
        see(_first_use)
    LEDGER.uses.on_use = None


def _around_record(original: Callable[..., None], ledger: Ledger) -> Callable[..., None]:
    @functools.wraps(original)
    def record(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        known = vars(event)
        known.pop(_NOTE, None)
        note = None
        if held:
            if stream is None:
                stream = torch.cuda.current_stream()
            # A generic torch.Stream does not tell its handle.
            raw: int | None = getattr(stream, "cuda_stream", None)
            note = None if raw is None else recorded(stream.device_index, raw)
        original(event, stream)
        if note is not None:
            known[_NOTE] = note

    held, recorded = ledger.nonempty, ledger.stream_order.recorded
    return record


def _around_wait(original: Callable[..., None], ledger: Ledger) -> Callable[..., None]:
    @functools.wraps(original)
    def wait(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        note: Note | None = vars(event).get(_NOTE)
        if note is None:
            original(event, stream)
            return
        if stream is None:
            stream = torch.cuda.current_stream()
        original(event, stream)
        if (raw := getattr(stream, "cuda_stream", None)) is not None:
            waited(stream.device_index, raw, note)

    waited = ledger.stream_order.waited
    return wait


LEDGER.uses.on_use = _first_use
