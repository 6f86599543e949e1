"""Blocks of a ``with`` statement in which calls are collected, and which are never left open.

An exception of a signal handler can come before ``__exit__`` has begun, or after ``__enter__`` has done its work. Later
calls of the group would then be collected, and never run. (torch's ``_coalescing_manager`` has this hole.)
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

_partial, _ref = functools.partial, weakref.ref  # bound once: each block of a step asks for them


class _Exit:
    """``__exit__`` of a class of blocks: each ``with`` statement has one of its own, and drops it however it ends."""

    def __get__(self, block: Block | None, kind: type[Block]) -> Callable[..., None]:
        if block is None:  # contextlib.ExitStack calls the class's
            return kind._leave
        # Not a bound method, which the interpreter takes apart, and drops, before it calls what is in it.
        leave = _partial(kind._leave, block)
        block._exit = _ref(leave)
        return leave


class Block(contextlib.ContextDecorator):
    """A block. A subclass has ``__enter__``, with :meth:`_close_by`, and ``_leave()`` in place of ``__exit__``."""

    _exit: weakref.ref[Callable[..., None]] | None = None
    _watch: weakref.ref[Callable[..., None]] | None = None

    if TYPE_CHECKING:

        def __exit__(self, *error: object) -> None:
            """Leave the block."""
    else:
        __exit__ = _Exit()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None, /
    ) -> None:
        raise NotImplementedError

    def _close_by(self, close: Callable[[Any], object]) -> None:
        """Have ``close`` called when the ``with`` statement ends, unless ``_watch`` is None by then.

        To be called before anything is open. Of a block that no ``with`` statement has, nothing is known.
        """
        leave = None if self._exit is None else self._exit()
        if leave is not None:
            self._watch = _ref(leave, close)
