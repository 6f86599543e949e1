"""Exceptions where a signal handler can raise: after a call, where a function begins, and where a loop goes back."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Interrupt(BaseException):
    """What a signal handler raises."""


@functools.cache
def _places(code: types.CodeType) -> frozenset[int]:
    """Return where in ``code`` the interpreter runs signal handlers."""
    found = set()
    before = "RESUME"
    for instruction in dis.get_instructions(code):
        if (before == "RESUME" or before.startswith("CALL")) and instruction.opname not in ("RESUME", "CACHE"):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction.opname
    return frozenset(found)


class Interrupted:
    """Raises :class:`Interrupt` inside, once ``after`` such places have passed in the frames that ``seen`` says."""

    def __init__(self, after: int, seen: Callable[[types.FrameType], bool]) -> None:
        self.left = after
        self.seen = seen

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if not self.seen(frame):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                code = frame.f_code
                raise Interrupt(f"{code.co_name}, {Path(code.co_filename).name}:{frame.f_lineno}")
        return self._step
