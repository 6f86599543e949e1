"""What shows the ledger how the program orders its streams: three methods of ``torch.cuda``, replaced.

All of torch's Python ways to order streams come down to ``Event.record`` and ``Event.wait``: ``Stream.wait_event``,
``Stream.record_event`` and ``Stream.wait_stream`` call them. They are replaced from the first memory on that was used
on another stream than its allocation stream, and inside of ``avoid_record_streams()``. Each does what torch's does, and
tells the ledger's ``stream_order`` of it. What the core does with that is said there. ``Stream.wait_stream`` is
replaced as well, because its new event and its four methods of Python take longer than all that CUDA does for it. What
orders streams by other means (C++, ``torch.Event``) is not seen. Memory then comes back when the host sees that
the device has got there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from safecomm import _torch
from safecomm.core.ledger import LEDGER, Ledger
from safecomm.interception import replacing

if TYPE_CHECKING:
    from collections.abc import Callable

    from safecomm.core.stream_order import Note

_NOTE = "_safecomm_note"
"""The attribute of an event that has its note. An event without one has none."""


def see(who: object, ledger: Ledger = LEDGER) -> None:
    """Tell ``ledger`` of each record and wait from now on, until :func:`unsee` is called for all who want it.

    Calling it again for the same ``who`` does nothing.
    """
    _SHARED.enter(who, ledger)


def unsee(who: object) -> None:
    """Undo :func:`see` for ``who``."""
    _SHARED.leave(who)


def _install(replaced: _torch.Replaced, ledger: Ledger) -> None:
    for owner, name, around in (
        (torch.cuda.Event, "record", _around_record),
        (torch.cuda.Event, "wait", _around_wait),
        (torch.cuda.Stream, "wait_stream", _around_wait_stream),
    ):
        if (original := vars(owner).get(name)) is not None:
            replaced.attribute(owner, name, around(original, ledger))


_SHARED = _torch.Shared(_install)


def forget_uses() -> None:
    """Put torch's methods back until the next use, if only the ledger wants them replaced."""
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


def _around_wait_stream(original: Callable[..., None], ledger: Ledger) -> Callable[..., None]:
    @functools.wraps(original)
    def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        if (
            held
            and (raw := getattr(other, "cuda_stream", None)) is not None
            and stream.device_index == other.device_index
            and called() == would_call
        ):
            order(stream.device_index, stream.cuda_stream, raw)
        else:
            original(stream, other)

    def called() -> tuple[Any, ...]:
        return events["record"], events["wait"], streams["record_event"], streams["wait_event"]

    held, order = ledger.nonempty, ledger.stream_order.wait_stream
    events, streams = vars(torch.cuda.Event), vars(torch.cuda.Stream)
    # What torch's own calls. Where other code has replaced one of these, its own has to be called.
    record, wait, *of_stream = there = called()
    torchs = all(map(_torch.is_torchs, (original, record.__wrapped__, wait.__wrapped__, *of_stream)))
    would_call = there if torchs else None
    return wait_stream


LEDGER.uses.on_use = _first_use
