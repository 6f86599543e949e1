"""What is made: the memory of each operation of torch, by weak references, and the lines that made it."""

from __future__ import annotations

import itertools
import os
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from safecomm import _torch
from safecomm.diagnostics.leaks.growth import Line
from safecomm.diagnostics.leaks.tensors import cdata_of_tensor, tensors_in

STACK = 12
"""Lines of the program that are kept of where a tensor was made."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_TOOLS = _OURS + "tools" + os.sep
"""What only the shell runs, such as the program of the demo, is a program like any other."""

_DEEP_COPY = torch.Tensor.__deepcopy__.__code__

Stack = tuple[tuple[types.CodeType, int], ...]
"""Where something was made: functions and numbers of lines, innermost first."""


class Made:
    """The memory that was made, by the address of its storage: a weak reference, bytes, step and place."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[_torch.WeakStorage, int, int, Stack]] = {}
        self.lines: dict[Stack, Line] = {}
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
                self._forget()
                self._limit = max(4096, 2 * len(self.known))

    def _forget(self) -> None:
        self.known = {cdata: one for cdata, one in self.known.items() if not one[0].expired()}

    def look(self, step: int) -> None:
        """Take note of what each line has alive as ``step`` begins, and forget what has died."""
        self._forget()
        aged: Counter[Stack] = Counter()
        nbytes: Counter[Stack] = Counter()
        for _, size, made, stack in self.known.values():
            aged[stack] += made < step - 1
            nbytes[stack] += size
        for stack, size in nbytes.items():
            self.lines.setdefault(stack, Line()).look(step, aged[stack], size)


def noting(made: Made) -> Any:
    """Return a context in which ``made`` takes note of each operation of torch."""

    @_torch.without_import
    class Mode(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            function: Callable[..., object],
            kinds: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            result = function(*args, **(kwargs or {}))
            # What torch.tensor() and a deep copy make comes by here first as an input, and is new all the same.
            name = str(function)
            new = "lift_fresh" in name or ("aten.set_.source_Storage" in name and _DEEP_COPY in _codes())
            made.note(tensors_in((args, kwargs)), tensors_in(result), always=new)
            return result

    return Mode()  # type: ignore[no-untyped-call]


def _codes() -> list[types.CodeType]:
    return [frame.f_code for frame, _ in itertools.islice(traceback.walk_stack(None), 8)]


def _stack() -> Stack:
    """Return where the program is: the innermost lines that are neither torch's nor ours."""
    # The number of the line and not the instruction: a call that the interpreter has specialised is at another one.
    places: list[tuple[types.CodeType, int]] = []
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if name.startswith(_TOOLS) or not name.startswith((_TORCH, _OURS, "<")):
            places.append((frame.f_code, line))
            if len(places) == STACK:
                break
    return tuple(places)


def lines_of(stack: Stack) -> tuple[str, ...]:
    """Return the places of ``stack`` as ``file:line in function``."""
    return tuple(f"{code.co_filename}:{line} in {code.co_name}" for code, line in stack) or ("an unknown line",)
