"""The frames of the program: those that are not this package's own, and what their variables refer to."""

from __future__ import annotations

import os
import sys
import traceback
import types

from safecomm.core.refcounts import HELD_ONCE, getrefcount

CO_OPTIMIZED = 1
"""The flag of the code of a function: its locals are not a dictionary."""

_HERE = os.path.dirname(__file__) + os.sep


def is_own(frame: types.FrameType) -> bool:
    """Return whether ``frame`` is of this package, whose variables keep nothing longer than a search."""
    return frame.f_code.co_filename.startswith(_HERE)


def running() -> dict[int, types.FrameType]:
    """Return the frames that run, of all threads, by their ids, without those of this package."""
    frames = (frame for innermost in sys._current_frames().values() for frame, _ in traceback.walk_stack(innermost))
    return {id(frame): frame for frame in frames if not is_own(frame)}


def locals_of(frame: types.FrameType) -> dict[str, object]:
    """Return what the local variables of ``frame`` refer to, and leave nothing of it with the frame."""
    found = frame.f_locals
    values = dict(found)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED and getrefcount(found) <= HELD_ONCE:
        # The frame keeps this dictionary, which is only a copy, and with it the values as they were: a leak of our own.
        # Unless other code has it, from locals().
        found.clear()
    return values
