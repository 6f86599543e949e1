"""What stands in torch's place, and how torch's own comes back: the one way in which safecomm replaces anything."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

_NOTHING = object()


class Replaced(contextlib.ExitStack):
    """Attributes of torch's that are ours until :meth:`close`, with what else is undone then.

    Each is undone by identity: what other code has put over ours since stays, and goes on to ours.
    """

    def attribute(self, owner: object, name: str, ours: object) -> None:
        """Let ``owner.name`` be ``ours``. The owner, such as an object of torch's, is not kept alive."""
        own = vars(owner).get(name, _NOTHING)
        # First, because an exception of a signal handler can come in between.
        self.callback(_restore, weakref.ref(owner), name, own, ours)
        setattr(owner, name, ours)


def _restore(reference: Callable[[], object], name: str, own: object, ours: object) -> None:
    owner = reference()
    if owner is None or vars(owner).get(name) is not ours:
        return
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
        """Count ``user``, which is counted once."""
        with self._lock:
            first = not self.users
            self.users[user] = given
            if first:
                try:
                    self._install(self._replaced, given)
                except BaseException:
                    self.leave(user)
                    raise

    def leave(self, user: object) -> None:
        """Count ``user`` no more. When none is left, torch's own is back."""
        with self._lock:
            self.users.pop(user, None)
            if not self.users:
                self._replaced.close()
