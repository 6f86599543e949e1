"""Call sites: the line of the program that a call came from."""

from __future__ import annotations

import sys
import types


def outside(packages: tuple[str, ...], frame: types.FrameType | None = None) -> types.FrameType:
    """Return the innermost frame from ``frame`` on (our caller's) in none of ``packages``, which end in a dot."""
    frame = frame or sys._getframe(1)
    # A name can be missing, or be anything: globals are the program's.
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(packages):
        frame = frame.f_back
    return frame


def program(frame: types.FrameType | None = None) -> types.FrameType:
    """Return the innermost frame from ``frame`` on that is not safecomm's or torch's, or the outermost one."""
    return outside(("safecomm.", "torch."), frame)


def called_from(frame: types.FrameType) -> tuple[types.CodeType, int]:
    """Return the call site of a call that came from ``frame``: the program's, where ``frame`` is torch's."""
    if str(frame.f_globals.get("__name__")).startswith("torch."):
        frame = program(frame)
    return frame.f_code, frame.f_lasti


def place(frame: types.FrameType) -> str:
    """Return where ``frame`` is, as ``file:line in function``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def line_of(code: types.CodeType, instruction: int) -> str:
    """Return where ``instruction`` of ``code`` is, as ``file:line in function``.

    The two are cheap to take from a frame, and this is only for when the call site is asked for.
    """
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_name}"
