"""What each call asks, in C where that was built, and otherwise by ctypes. Both answer the same.

``_driver.c`` is compiled where the wheel is built and there is a compiler, and never at import. Whatever is wrong
with what was built costs time, a few microseconds a call, and nothing else: ``WHY_CTYPES`` says what it is.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import safecomm._torch.driver as driver
import safecomm._torch.streams as streams
from safecomm._torch.segment_table import SegmentTable

_VERSION = 1  # of _driver.c: a folder that is installed as editable may have an older build


def threads_are_free() -> bool:
    """Return whether this is a Python without a global interpreter lock, or one that can be."""
    has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return not has_gil() or "t" in getattr(sys, "abiflags", "")


def _load() -> tuple[Any, str]:
    """Return the module that ``_driver.c`` is compiled to, and why it is not used: "" if it is."""
    if threads_are_free():
        return None, "this Python runs without a global interpreter lock"
    try:
        module: Any = importlib.import_module("safecomm._torch._driver")
        if module.VERSION != _VERSION:
            return None, "what was built is of another version of safecomm: build it again"
    except ModuleNotFoundError:
        return None, "the C file was not built"
    except Exception as error:  # of whatever kind: nothing here may break the import
        return None, f"what was built can't be loaded ({error})"
    if None in (driver.pointer_attribute, driver.stream_is_capturing, driver.capture_info):
        return None, "there is no driver to ask"
    return module, ""


def address_of(function: Any) -> int:
    """Return where a function of ctypes is."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_native, WHY_CTYPES = _load()

new_segment_table: Callable[..., Any] = SegmentTable
"""Make a table of segments, with what it calls for a segment that it does not have."""

capture_id: Callable[[int], int] = driver.capture_id
"""Return the id of the CUDA graph capture that a raw stream is part of; 0 if the stream is not capturing."""

is_capturing: Callable[[int, int], bool] = streams.is_capturing
"""Return whether a raw stream, the current one of the device with the index, is part of a CUDA graph capture."""

if _native is not None:
    new_segment_table = functools.partial(_native.Table, address_of(driver.pointer_attribute))
    capture_id, is_capturing = _native.captures(
        address_of(driver.stream_is_capturing), address_of(driver.capture_info), streams.is_capturing
    )
