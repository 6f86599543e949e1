"""What stands in torch's place, and how torch's own comes back: the one way in which safecomm replaces anything."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

_NOTHING = object()


class Replaced:
    """Attributes of torch's that are ours until :meth:`close`, with what else is undone then, the last first.

    Each is undone by identity: what other code has put over ours since stays, and goes on to ours.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def callback(self, undo: Callable[..., object], *given: object) -> None:
        """Have ``undo(*given)`` called at the end. An exception of a signal handler can have it called again."""
        self._undo.append((undo, given))

    def attribute(self, owner: object, name: str, ours: object) -> None:
        """Let ``owner.name`` be ``ours``."""
        own = vars(owner).get(name, _NOTHING)
        # A function in a set, where the sweep for aliases of torch's neither replaces it, nor takes a pass over all
        # objects for what it is in. Other kinds may not have a hash.
        kept = frozenset([own]) if isinstance(own, types.FunctionType) else (own,)
        # First, because an exception of a signal handler can come in between.
        self.callback(_restore, owner, name, kept, ours)
        setattr(owner, name, ours)

    def again(self) -> None:
        """Let each attribute be ours again where other code has put torch's own back."""
        for undo, given in self._undo:
            if undo is _restore:
                owner, name, (own,), ours = given
                if vars(owner).get(name, _NOTHING) is own:
                    setattr(owner, name, ours)

    def close(self) -> None:
        """Undo all of it, and raise the last error that came as it was undone."""
        failed = None
        while self._undo:
            undo, given = self._undo[-1]
            try:
                undo(*given)
            except Exception as error:  # an exception of a signal handler leaves the rest to the next call
                failed = error
            del self._undo[-1]
        if failed is not None:
            raise failed


def _restore(owner: object, name: str, kept: frozenset[object] | tuple[object], ours: object) -> None:
    (own,) = kept
    if vars(owner).get(name) is ours:
        if own is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class Shared:
    """What is replaced while there are users of it.

    Parameters
    ----------
    install
        Called for the first user, with what to replace by, and with what that user gave.
    """

    def __init__(self, install: Callable[[Replaced, Any], None]) -> None:
        self.users: dict[object, Any] = {}  # with what each gave
        self._install, self._replaced = install, Replaced()
        # Reentrant: the collector can run inside, and end a user.
        self._lock = threading.RLock()

    def enter(self, user: object, given: Any = None) -> None:
        """Count ``user``, which is counted once, and replace for the first."""
        with self._lock:
            first = not self.is_used()
            self.users[user] = given
            try:
                if first:
                    self._install(self._replaced, given)
                else:
                    self._replaced.again()
            except BaseException:
                self.leave(user)
                raise

    def leave(self, user: object) -> None:
        """Count ``user`` no more. When none is left, torch's own is back."""
        with self._lock:
            self.users.pop(user, None)
            self.is_used()

    def is_used(self) -> bool:
        """Return whether there are users. If there are none, torch's own is back, whatever has come in between."""
        with self._lock:
            if not self.users:
                self._replaced.close()
            return bool(self.users)
