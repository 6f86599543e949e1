"""The arena in use: the source of safecomm's buffers, and ``empty()``."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from safecomm import arguments
from safecomm.arena.arena import OPEN, Arena
from safecomm.arena.arguments import Full, bytes_of, device_of
from safecomm.errors import SafecommError

log: logging.Logger = logging.getLogger("safecomm")

IN_USE: dict[int, Arena] = {}
"""The arena in use on each device, by the device's index. One for all threads, because backward runs in others."""

_order: dict[object, Arena] = {}  # the arenas in use, the innermost last, by a key for each time that one was entered
_innermost: list[Arena] = []  # the last arena of ``_order``, if there is any
_made: list[Arena] = []  # the arenas that are closed when they are no longer in use
_lock = threading.RLock()  # for changes of these

VARIABLE = "SAFECOMM_ARENA"
_wanted: list[int] = []  # the bytes that the variable asks for; none once an arena of this size has failed


def read_environment() -> None:
    """Read ``SAFECOMM_ARENA``: the size, such as ``256MiB``, of an arena that is made on each device when needed."""
    _wanted.clear()
    text = os.environ.get(VARIABLE, "")
    if text:
        try:
            _wanted.append(bytes_of(text, VARIABLE))
        except ValueError as error:
            log.warning("%s; no arena is used", error)


def may_be_used() -> bool:
    """Return whether :func:`in_use` would give an arena for any device."""
    return bool(IN_USE or _wanted)


def asked_in_vain() -> bool:
    """Return whether the variable asks for an arena, and none was made, because no buffer was asked for."""
    return bool(_wanted) and not OPEN


def would_be_used(index: int) -> bool:
    """Return whether :func:`in_use` would give an arena for the device with ``index``, without making one."""
    return index in IN_USE or bool(_wanted and index not in OPEN)


def in_use(index: int) -> Arena | None:
    """Return the arena in use on the device with ``index``, which it may have to make; None if there is none."""
    arena = IN_USE.get(index)
    if arena is None and _wanted and index not in OPEN:
        nbytes = _wanted[0]
        try:
            arena = IN_USE[index] = Arena(nbytes, "cpu" if index < 0 else index)
        except (SafecommError, RuntimeError) as error:
            _wanted.clear()
            log.warning("%s=%d: %s; no arena is used", VARIABLE, nbytes, str(error).partition("\n")[0])
    return arena


class use_arena(contextlib.ContextDecorator):  # noqa: N801
    """Inside of it, safecomm's buffers on one device come from an arena: those of :func:`empty` and ``functional``.

    This holds for all threads, because backward runs in others. Blocks nest: the innermost of a device counts. Entering
    returns the arena.

    Parameters
    ----------
    arena
        The arena, or the size of a new one, which is closed when the last block with it ends.
    device, full, buckets, check, register
        For a new arena, as for :class:`Arena`, and for no other.

    Raises
    ------
    ArenaError
        On leaving, if the arena is a new one and slots of it are in use. The arena stays open then: drop the buffers
        and call ``close()``. On entering, if the new arena was closed. Also as ``Arena`` does.

    Examples
    --------
    >>> with use_arena("1MiB", device="cpu") as arena:
    ...     arena.owns(empty(16, device="cpu"))
    True
    """

    def __init__(
        self,
        arena: Arena | int | str,
        device: torch.device | str | int | None = None,
        *,
        full: Full = "fallback",
        buckets: Mapping[str, int | str] | None = None,
        check: ProcessGroup | None = None,
        register: ProcessGroup | None = None,
    ) -> None:
        self._made = not isinstance(arena, Arena)
        if not self._made and (full != "fallback" or any(x is not None for x in (device, buckets, check, register))):
            raise ValueError(f"use_arena({arena!r}): expected nothing else, which is for an arena that it makes")
        self.arena: Arena = (
            Arena(arena, device, full=full, buckets=buckets, check=check, register=register)  # type: ignore[arg-type]
            if self._made
            else arena  # type: ignore[assignment]
        )
        self._entered: list[object] = []  # of each time: its key in ``_order``

    def __enter__(self) -> Arena:
        arena = self.arena
        if self._made:
            arena._refuse_ended("use_arena()")
        key = object()
        with _lock:
            if self._made:
                _made.append(arena)
            _order[key] = arena
            _choose(arena.index)
        self._entered.append(key)
        return arena

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._entered:
            raise RuntimeError("use_arena(): it was left, and had not been entered")
        # The traceback of an exception may hold tensors of the arena, so there is no wait for them.
        _left(self._entered.pop(), self.arena, wait=kind is None)

    def __repr__(self) -> str:
        return f"<use_arena({self.arena!r}): {'inside' if self._entered else 'outside'}>"


def _left(key: object, arena: Arena, *, wait: bool) -> None:
    """End one use of ``arena``, and close it if this was the last one and a block made it.

    ``key``: of the use in ``_order``. ``wait``: whether closing waits a moment for slots in use, and raises ArenaError
    if there are any.
    """
    with _lock:
        _order.pop(key, None)
        _choose(arena.index)
        last = arena in _made and arena not in _order.values()
    if not last:
        return
    try:
        if wait:
            arena.close()
        else:
            with contextlib.suppress(SafecommError):
                arena._closed()
    finally:
        _made[:] = [one for one in _made if one is not arena]


def _choose(index: int) -> None:
    """Make the innermost arena of a device the one in use, or none if there is none."""
    arenas = [*_order.values()]
    _innermost[:] = arenas[-1:]
    others = [arena for arena in arenas if arena.index == index]
    if others:
        IN_USE[index] = others[-1]
    else:
        IN_USE.pop(index, None)


def empty(
    *size: Any, dtype: torch.dtype | None = None, device: torch.device | str | int | None = None, bucket: str = ""
) -> torch.Tensor:
    """Return uninitialised memory of the arena in use, or ordinary memory where no arena is in use.

    Parameters
    ----------
    size, dtype, bucket
        As for :meth:`Arena.empty`.
    device
        Default: the device of the innermost arena in use, or else torch's default.

    Examples
    --------
    >>> empty(2, 3).shape
    torch.Size([2, 3])
    """
    if type(bucket) is not str:
        arguments.check("empty", arguments.TEXT, bucket=bucket)
    if device is None:
        if _innermost:
            return _innermost[0].empty(*size, dtype=dtype, bucket=bucket)
        if not _wanted:
            return torch.empty(*size, dtype=dtype)
    _, index = device_of(device)
    arena = in_use(index)
    if arena is None:
        return torch.empty(*size, dtype=dtype, device=device)
    return arena.empty(*size, dtype=dtype, bucket=bucket)


def _none_in_child() -> None:
    # The arenas are the parent's; the child has ordinary memory, until it makes its own.
    global _lock
    IN_USE.clear()
    _lock = threading.RLock()  # another thread of the parent may have held the old one
    _order.clear()
    _innermost.clear()
    _made.clear()
    _wanted.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_none_in_child)

read_environment()
