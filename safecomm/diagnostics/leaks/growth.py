"""The rule by which memory that is still alive counts as leaked: from step to step there is more of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_LARGER = 4
"""Steps in a row after which a tensor that is replaced by a larger one each time is taken for one that grows."""


class Line:
    """How much memory of one line of the program was alive as each step began, and at the end."""

    def __init__(self) -> None:
        self._aged = self._most = self._since = 0
        self._sizes: list[int] = []

    def look(self, step: int, aged: int, nbytes: int) -> None:
        """Take note of ``aged`` tensors that have outlived a whole step as ``step`` begins, and ``nbytes`` in all."""
        self._aged = aged
        if aged > self._most:
            self._most, self._since = aged, step
        self._sizes.append(nbytes)

    def grew(self, made: Sequence[int], last: int) -> bool:
        """Return whether tensors leak that the steps ``made`` of ``last`` have left, and that are held in one way.

        After a single step all do. Else those of several steps do, unless the line has come to keep no more of them: in
        a ring an older one dies for each, and a cache gets no more when it is full. Those of one step replace those of
        the step before, and do if there is more of them each time.
        """
        if last < 2:
            return True
        if len(made) < 2:
            *before, now = self._sizes
            return len(before) >= _LARGER and all(a < b for a, b in pairwise(before)) and before[-1] <= now
        older = [step for step in made if step < last]
        stride = max((later - sooner for sooner, later in pairwise(older)), default=1)
        full = self._aged < self._most or self._since < older[-1] + 2
        return not full and last - older[-1] <= stride
