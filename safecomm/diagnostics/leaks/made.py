"""What is made: the memory of each operation of torch, by weak references, and the lines that made it."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from safecomm import _torch
from safecomm.diagnostics.leaks.tensors import cdata_of_tensor, tensors_in

STACK = 12
"""Lines of the program that are kept of where a tensor was made."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep

Place = tuple[types.CodeType, int]


class Made:
    """The memory that was made, by the address of its storage: a weak reference, bytes, step and place."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[_torch.WeakStorage, int, int, tuple[Place, ...]]] = {}
        self.step = 0
        self._limit = 4096

    def note(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], *, always: bool) -> None:
        """Remember the memory of ``outputs`` that is new: that of none of ``inputs``, unless ``always``."""
        given: set[int] | None = None
        for tensor in outputs:
            try:
                storage = tensor.untyped_storage()
                cdata = _torch.cdata_of(storage)
            except (NotImplementedError, RuntimeError):
                continue  # without memory of its own
            known = self.known.get(cdata)
            if known is not None and not known[0].expired():
                continue
            if given is None:
                given = set() if always else {s for s in map(cdata_of_tensor, inputs) if s}
            if cdata in given or tensor.is_meta:
                continue
            weak = _torch.StorageWeakRef(storage)
            self.known[cdata] = (weak, storage.nbytes(), self.step, _stack())
            if len(self.known) > self._limit:
                alive = [(c, one) for c, one in self.known.items() if not one[0].expired()]
                self.known = dict(alive)
                self._limit = max(4096, 2 * len(self.known))


def noting(made: Made) -> Any:
    """Return a context in which ``made`` takes note of each operation of torch."""

    class Mode(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            function: Callable[..., object],
            kinds: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            result = function(*args, **(kwargs or {}))
            # What torch.tensor() makes comes by here first as the input of this one, and is new all the same.
            lift = "lift_fresh" in str(function)
            made.note(tensors_in((args, kwargs)), tensors_in(result), always=lift)
            return result

    return Mode()  # type: ignore[no-untyped-call]


def _stack() -> tuple[Place, ...]:
    """Return where the program is: the innermost lines that are neither torch's nor ours."""
    places: list[Place] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < STACK:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _OURS)) and not code.co_filename.startswith("<"):
            places.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def lines_of(stack: tuple[Place, ...]) -> tuple[str, ...]:
    """Return the places of ``stack`` as ``file:line in function``."""
    lines = []
    for code, instruction in stack:
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= instruction < end and number is not None:
                line = number
        lines.append(f"{code.co_filename}:{line} in {code.co_name}")
    return tuple(lines)
