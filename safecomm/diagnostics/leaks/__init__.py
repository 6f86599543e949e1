"""leaks.watch(): which tensors outlive the step that made them, and what holds them.

While it watches, every operation of torch is seen, and the memory that it made is remembered by a weak reference, with
the lines that made it. At the end, what is still alive and has no business to be is looked for in three places: what
safecomm holds, what the autograd graph has saved, and what Python objects refer to.
"""

from __future__ import annotations

import gc
import logging
import types
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from safecomm import _torch
from safecomm.diagnostics.leaks.frames import callers, locals_of
from safecomm.diagnostics.leaks.holders import Holders
from safecomm.diagnostics.leaks.kept import kept_by
from safecomm.diagnostics.leaks.made import Made, Place, lines_of, noting
from safecomm.diagnostics.record import unwaited_for
from safecomm.errors import SafecommError

log: logging.Logger = logging.getLogger("safecomm")

__all__ = ["Leak", "watch"]

_WARM_UP = 2  # what only the first steps make, and later ones keep, is a cache


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
    ``"module attribute"``, ``"list"``, ``"object"``, ``"variable"``, or ``"unknown"``."""
    chain: tuple[str, ...]
    """What refers to what, from the tensor outwards to something that lives on its own."""

    def __str__(self) -> str:
        steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"steps {self.steps[0]} to {self.steps[-1]}"
        what = f"{self.nbytes} bytes in {self.count} tensor{'s' * (self.count > 1)} outlived {steps} ({self.kind})"
        return "\n".join([what, f"  made at {self.created}", *(f"  held by {hop}" for hop in self.chain)])


class watch:  # noqa: N801
    """Find the tensors that are made inside of it and are still alive at its end without a good reason.

    Put it around one training step or several. A step begins at each call of the outermost ``owners`` that are modules;
    without any, all of it is one step. Parameters, gradients, buffers, what optimizers and gradient scalers keep, and
    what is in local variables of the functions that are running belong to nobody's step and are no leaks; nor is what
    only the first two of at least four steps made, which is a cache.

    At the end ``leaks`` has a :class:`Leak` for each line and holder, the largest first, with the chain of references
    from the tensor to what keeps it, and each is logged as a warning. An exception that leaves the block is passed on,
    and nothing is looked for. ``unwaited`` is how many functional collectives of this thread were launched inside, and
    nobody has waited for them: torch keeps their tensors until somebody does.

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
        If an owner can't keep anything, as a number or a class.
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
            if isinstance(owner, type) or not hasattr(owner, "__dict__"):
                kind = "a class" if isinstance(owner, type) else type(owner).__name__
                raise TypeError(f"leaks.watch(): expected modules, or objects that keep tensors, not {kind}")
        if not isinstance(log_leaks, bool):
            raise TypeError(f"leaks.watch(log_leaks={log_leaks!r}): expected True or False")
        self.leaks: list[Leak] = []
        self.unwaited: int = 0
        self.owners = owners
        self.steps: int = 0
        self._log_leaks = log_leaks
        self._depth = 0
        self._hooks: list[RemovableHandle] = []
        self._frames: list[types.FrameType] = []
        self._before: list[set[tuple[int, int]]] = []
        self._made = Made()
        self._unwaited_before = 0

    def __enter__(self) -> watch:
        self._frames = list(callers())
        self._before = [self._containers()] * 2
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
        try:
            if kind is None:
                gc.collect()
                self.leaks = self._search()
                self.unwaited = max((_torch.unwaited() or 0) - self._unwaited_before, 0)
        finally:
            self._frames.clear()
            self._hooks.clear()
            self._made.known.clear()
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
            self._before = [self._before[1], self._containers()]

    def _leave_module(self, *_: object) -> None:
        self._depth -= 1

    def _containers(self) -> set[tuple[int, int]]:
        """Return which objects the local variables of the running functions refer to."""
        return {(id(frame), id(value)) for frame in self._frames for value in locals_of(frame).values()}

    # --- what to look into ----------------------------------------------------------------------------------

    def _search(self) -> list[Leak]:
        with torch.no_grad():
            known = self._made.known
            alive = {cdata: one for cdata, one in known.items() if not one[0].expired()}
            kept = kept_by(self.owners)
            survivors = {cdata: one for cdata, one in alive.items() if cdata not in kept}
            if not survivors:
                return []
            # At both moments: what a variable had at one of them may be gone, and another one be in its place.
            old = self._before[0] & self._before[1]
            holders = Holders(survivors, self.owners, self._frames, old)
            found: dict[tuple[tuple[Place, ...], tuple[str, ...], str], list[tuple[int, int]]] = {}
            for cdata, (_, nbytes, step, stack) in survivors.items():
                held = holders.of(cdata)
                if held is None:
                    continue
                kind, chain, shape = held
                found.setdefault((stack, shape, kind), []).append((nbytes, step))
                holders.shown.setdefault((stack, shape, kind), chain)
        leaks = []
        for (stack, shape, kind), ones in found.items():
            steps = tuple(sorted({step for _, step in ones}))
            if self.steps >= 2 * _WARM_UP and steps[-1] <= _WARM_UP and kind not in ("unwaited work",):
                continue
            lines = lines_of(stack)
            leaks.append(
                Leak(
                    nbytes=sum(nbytes for nbytes, _ in ones),
                    count=len(ones),
                    steps=steps,
                    created=lines[0] if lines else "an unknown line",
                    stack=lines,
                    kind=kind,
                    chain=holders.shown[stack, shape, kind],
                )
            )
        return sorted(leaks, key=lambda leak: -leak.nbytes)
