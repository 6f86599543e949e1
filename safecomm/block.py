"""Blocks of a ``with`` statement that no exception leaves open, wherever it comes.

A signal handler can raise between any two steps of Python, those of ``__enter__`` and ``__exit__`` themselves among
them. A block that was open then would stay so, and later calls would be collected and never run. (contextlib's own
managers, and so torch's ``_coalescing_manager``, have this hole.)

What a ``with`` statement has in its hands from before ``__enter__`` until after ``__exit__``, and drops whatever
happens, is the callable that it has looked up as ``__exit__``. So each block gets one of its own, and its death closes
what is still open, in C, where no handler runs.
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
    """What a class of blocks has as ``__exit__``: each ``with`` statement that looks it up gets one of its own."""

    def __get__(self, block: Block | None, kind: type[Block]) -> Callable[..., None]:
        if block is None:  # contextlib.ExitStack calls the class's
            return kind._leave
        # Not a bound method, which the interpreter takes apart, and drops, before it calls what is in it.
        leave = _partial(kind._leave, block)
        block._exit = _ref(leave)
        return leave


class Block(contextlib.ContextDecorator):
    """A block. A subclass has ``__enter__``, and ``_leave()`` in place of ``__exit__``."""

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
        """Have ``close`` called, with one argument that means nothing, if the ``with`` statement ends some other way.

        To be called before anything is open. ``close`` is best C's, because a second handler could raise in it. Of a
        block that no ``with`` statement has, nothing is known.
        """
        leave = None if self._exit is None else self._exit()
        if leave is not None:
            self._watch = _ref(leave, close)

    def _closed(self) -> None:
        """Forget what was to be called: the block was left as it should be."""
        self._watch = None
