"""leaks.watch(): which tensors outlive the step that made them, and what holds them.

While it watches, every operation of torch is seen, and the memory that it made is remembered by a weak reference, with
the lines that made it. At the end, what is still alive and has no business to be is looked for in three places: what
safecomm holds, what the autograd graph has saved, and what Python objects refer to.
"""

from __future__ import annotations

import gc
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from safecomm import _torch, arguments
from safecomm.diagnostics.leaks.frames import locals_of, running
from safecomm.diagnostics.leaks.holders import Held, Holders
from safecomm.diagnostics.leaks.kept import kept_by
from safecomm.diagnostics.leaks.made import Made, Stack, lines_of, noting
from safecomm.diagnostics.record import unwaited_for
from safecomm.errors import SafecommError

log: logging.Logger = logging.getLogger("safecomm")

__all__ = ["Leak", "watch"]

_AT_ONCE = ("autograd context", "unwaited work")
"""Kinds of holders that have no business to hold anything, however much."""

_NO_OWNERS = (type, types.FunctionType, types.MethodType, torch.Tensor)


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Leak:
    """Tensors that were made by one line, outlived their step, and are held the same way."""

    nbytes: int
    """Bytes of all of them."""
    count: int
    """How many there are."""
    steps: tuple[int, ...]
    """The steps that made them, counted from 1; 0 is what was made before the first."""
    created: str
    """The line of the program that made them, as ``file:line in function``."""
    stack: tuple[str, ...]
    """The lines of the program at that moment, innermost first."""
    kind: str
    """What holds them: ``"autograd context"``, ``"retained graph"``, ``"unwaited work"``, ``"closure"``,
    ``"module attribute"``, ``"exception"``, ``"list"``, ``"object"``, ``"variable"``, or ``"unknown"``."""
    chain: tuple[str, ...]
    """What refers to what, from the tensor outwards to something that lives on its own."""

    def __str__(self) -> str:
        steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"steps {self.steps[0]} to {self.steps[-1]}"
        what = f"{self.nbytes} bytes in {self.count} tensor{'s' * (self.count > 1)} outlived {steps} ({self.kind})"
        return "\n".join([what, f"  made at {self.created}", *(f"  held by {hop}" for hop in self.chain)])


def _variables() -> set[tuple[int, int]]:
    """Return which objects the local variables of the running functions refer to, by the ids of frame and object."""
    return {(place, id(value)) for place, frame in running().items() for value in locals_of(frame).values()}


class watch:  # noqa: N801
    """Find the tensors that are made inside of it and are still alive at its end without a good reason.

    Put it around one training step or several. A step begins at each call of the outermost ``owners`` that are modules;
    without any, all of it is one step.

    Tensors leak if one stack of calls made them in two steps or more, they are held in the same way, and more tensors
    of the line have outlived a whole step than ever before; so does a tensor that a larger one replaced in each of four
    steps or more. What each step replaces is no leak, nor a ring that has gone round, nor a cache that got nothing in
    the last two steps. Until then a ring or a cache can't be told from a leak: take two steps more than it has places.
    After a single step all that outlives it is a leak, except what local variables of running functions have, directly
    or in an object that is newer than the step. What an autograd context or an unwaited handle keeps always is a leak;
    parameters, gradients, buffers, what optimizers and gradient scalers keep, and what is in a ``deque`` with a
    ``maxlen`` never are.

    At the end ``leaks`` has a :class:`Leak` for each line and holder, the largest first, with the chain of references
    from the tensor to what keeps it, and each is logged as a warning. An exception that leaves the block is passed on,
    and nothing is looked for. ``unwaited`` is how many functional collectives of this thread were launched inside and
    not waited for: torch keeps their tensors until they are.

    It holds no tensor, frees none, and orders no stream. While it watches, each operation costs some 10 us of host time
    more, so it is for debugging. Operations in other threads than the one that entered are only seen where autograd
    runs them.

    Parameters
    ----------
    owners
        Modules whose steps are watched, and other objects, such as an optimizer that is not torch's, whose tensors are
        theirs to keep.
    log_leaks
        Whether to log what was found.

    Raises
    ------
    TypeError
        If an owner can't keep anything, as a number, a class, a function or a tensor.
    SafecommError
        If this torch can't be watched.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 4)
    >>> with watch(model) as watched:
    ...     model(torch.ones(2, 4)).sum().backward()
    >>> watched.leaks
    []
    """

    def __init__(self, *owners: object, log_leaks: bool = True) -> None:
        if _torch.TorchDispatchMode is None:
            raise SafecommError(
                f"leaks.watch() needs TorchDispatchMode, which torch {torch.__version__} does not have."
            )
        for owner in owners:
            if isinstance(owner, _NO_OWNERS) or not hasattr(owner, "__dict__"):
                kind = "a class" if isinstance(owner, type) else type(owner).__name__
                raise TypeError(f"leaks.watch(): expected modules, or objects that keep tensors, not {kind}")
        arguments.check("leaks.watch", arguments.FLAG, log_leaks=log_leaks)
        self.leaks: list[Leak] = []
        self.unwaited: int = 0
        self.owners = owners
        self.steps: int = 0
        self._log_leaks = log_leaks
        self._depth = 0
        self._hooks: list[RemovableHandle] = []
        self._old: set[tuple[int, int]] = set()
        self._made = Made()
        self._unwaited_before = 0

    def __repr__(self) -> str:
        return f"<leaks.watch(): {len(self.leaks)} leaks in {self.steps} steps>"

    def __enter__(self) -> watch:
        self._old = _variables()
        for module in self.owners:
            if isinstance(module, torch.nn.Module):
                self._hooks.append(module.register_forward_pre_hook(self._enter_module))
                self._hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
        self._unwaited_before = _torch.unwaited() or 0
        self._mode = noting(self._made)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._mode.__exit__(kind, *error)
        for hook in self._hooks:
            hook.remove()
        collects = gc.isenabled()
        gc.disable()  # it would run again and again as the search reads the heap
        try:
            if kind is None:
                gc.collect()
                self._made.look(self.steps + 1)
                self.leaks = self._search()
                self.unwaited = max((_torch.unwaited() or 0) - self._unwaited_before, 0)
        finally:
            if collects:
                gc.enable()
            self._hooks.clear()
            self._made.known.clear()
            self._made.lines.clear()
        if self._log_leaks:
            for leak in self.leaks:
                log.warning("leaks.watch(): %s", leak)
            if self.unwaited:
                log.warning("leaks.watch(): %s", unwaited_for(self.unwaited))

    def __str__(self) -> str:
        unwaited = [unwaited_for(self.unwaited)] if self.unwaited else []
        return "\n\n".join([*map(str, self.leaks), *unwaited]) or "no leaks"

    def _enter_module(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self.steps += 1
            self._made.step = self.steps
            self._made.look(self.steps)
            if self.steps == 1:  # what a variable had before may be gone, and another one be in its place
                self._old &= _variables()

    def _leave_module(self, *_: object) -> None:
        self._depth -= 1

    # --- what to look into ----------------------------------------------------------------------------------

    def _search(self) -> list[Leak]:
        with torch.no_grad():
            kept = kept_by(self.owners)
            survivors = {cdata: one for cdata, one in self._made.known.items() if cdata not in kept}
            if not survivors:
                return []
            by_line: dict[Stack, dict[int, tuple[int, int]]] = {}
            for cdata, (_, nbytes, step, stack) in survivors.items():
                by_line.setdefault(stack, {})[cdata] = nbytes, step
            # In a single step the variables of the program may have what they have, but not what was there before it.
            holders = Holders(survivors, self.owners, self._old if self.steps < 2 else None)
            ways = {cdata: holders.of(cdata) for cdata in survivors}
        leaks = (leak for stack, ones in by_line.items() for leak in self._leaks_of(stack, ones, ways))
        return sorted(leaks, key=lambda leak: -leak.nbytes)

    def _leaks_of(self, stack: Stack, ones: dict[int, tuple[int, int]], ways: dict[int, list[Held]]) -> Iterator[Leak]:
        """Yield what of one line leaks, by who holds it."""
        steps: dict[Held, set[int]] = {}
        for cdata, (_, step) in ones.items():
            for held in ways[cdata]:
                steps.setdefault(held, set()).add(step)
        held_by: dict[Held, list[tuple[int, int]]] = {}
        for cdata, one in ones.items():
            # Of several holders the one that has tensors of the most steps.
            if candidates := [held for held in steps if any(map(held.covers, ways[cdata]))]:
                held_by.setdefault(max(candidates, key=lambda held: len(steps[held])), []).append(one)
        lines = lines_of(stack)
        for held, those in held_by.items():
            made = tuple(sorted({step for _, step in those}))
            if held.kind in _AT_ONCE or self._made.lines[stack].grew(made, self.steps):
                nbytes = sum(nbytes for nbytes, _ in those)
                yield Leak(nbytes, len(those), made, lines[0], lines, held.kind, held.chain)
