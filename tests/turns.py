"""Two threads of which one runs at a time, so that what they do has one order, and no lock is ever waited for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class DeadlockError(AssertionError):
    """Each of two threads waits for a lock that the other one has."""


class Turns:
    """A second thread, which runs only while the first one waits for it, so that what they do has one order.

    It runs a step until that is over, or hands back in the middle of it (:meth:`hand_back`), or until it needs a lock
    (:class:`TurnLock`) that the first thread has. The next :meth:`resume` goes on where it was.

    ``happen``: called at a point of the thread that runs, once ``left`` points of it have gone by.
    """

    def __init__(self, happen: Callable[[], None] = lambda: None) -> None:
        self.happen = happen
        self.left = 0  # of the thread that runs; 0: nothing is to happen
        self.second = False  # the second thread runs
        self.underway = False  # the second thread is in the middle of a step
        self.blocked = False  # on a lock of the first thread
        self.resumed = 0  # how often the second thread was given the turn, also for a lock that it has
        self._to: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (step := self._to.get()) is not None:
            failure = None
            try:
                step()
            except BaseException as error:
                failure = error
            self.underway = False
            del step
            self._back.put(failure)
            del failure

    def point(self) -> None:
        """Let happen what is to happen here."""
        if self.left:
            self.left -= 1
            if not self.left:
                self.happen()

    def resume(self, step: Callable[[], None] | None = None) -> None:
        """Let the second thread run ``step``, or go on with the one that it is in the middle of."""
        assert self.underway == (step is None)
        assert not self.second
        self.underway = self.second = True
        self.resumed += 1
        self.blocked = False
        left, self.left = self.left, 0
        self._to.put(step if step is not None else True)
        failure = self._back.get()
        self.left = left
        self.second = False
        if failure is not None:
            raise failure

    def hand_back(self) -> None:
        """On the second thread, in the middle of a step: let the first one run until it resumes this one."""
        left, self.left = self.left, 0
        self._back.put(None)
        self._to.get()
        self.left = left

    def finish(self) -> None:
        """Let the second thread come to the end of its step."""
        while self.underway:
            self.resume()
            if self.blocked:
                raise DeadlockError("the second thread waits for a lock that was not let go of")

    def close(self) -> None:
        """End the second thread, which is between two steps."""
        self._to.put(None)


class TurnLock:
    """A lock that can be taken again by the thread that has it, and for which the other thread is given its turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._depth = 0
        self._second = False  # the second thread has it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        turns = self._turns
        while self._depth and self._second != turns.second:
            if turns.second:
                turns.blocked = True
                turns.hand_back()
            else:
                turns.resume()
                if turns.blocked and self._depth and self._second:
                    raise DeadlockError("each thread waits for a lock that the other one has")
        self._second = turns.second
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._depth
        assert self._second == self._turns.second
        self._depth -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        return bool(self._depth)
