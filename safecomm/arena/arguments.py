"""What the arguments of an arena mean: bytes, shapes, devices."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from safecomm import arguments
from safecomm.core.streams import HOST

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

Full = Literal["fallback", "raise"]
"""What happens to a request that finds no room."""

LARGEST = 1 << 50
"""Bytes of an arena: more than any machine has, and small enough that torch can say so."""

_DEVICE = arguments.is_a("a device, or its name or index", torch.device, str, int)
_BUCKETS = arguments.is_a("names and bytes, as a dictionary", Mapping, type(None))


def bytes_of(size: int | str, what: str = "size") -> int:
    """Return the bytes that ``size`` names: a number, or text such as ``"256MiB"``; ``what``: its name, for messages.

    Raises ValueError or TypeError for what names no number of bytes, or none that is greater than 0.

    >>> bytes_of("2KiB")
    2048
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = match and _UNITS.get(match[2].upper())
        if match is None or unit is None:
            raise ValueError(f'{what}={size!r}: expected a number of bytes, or text such as "256MiB"')
        size = int(min(float(match[1]), 1e30) * unit)  # a number of many digits is infinite as a float
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{what}={arguments.shown(size)}: expected a number of bytes, not {type(size).__name__}")
    if size <= 0:
        raise ValueError(f"{what}={arguments.shown(size)}: expected more than 0 bytes")
    if size > LARGEST:
        raise ValueError(f"{what}={arguments.shown(size)}: expected at most {LARGEST} bytes")
    return size


def shape_of(size: tuple[Any, ...], dtype: object) -> tuple[int, ...]:
    """Return the shape that ``empty(*size, dtype=dtype)`` asks an arena for.

    Raises ValueError or TypeError for a shape that is none, or has no elements, or a type that is none.
    """
    given = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    if not all(map(arguments.WHOLE.fits, given)):
        raise TypeError(f"Arena.empty(): expected a shape of integers, got {', '.join(map(arguments.shown, given))}")
    shape = tuple(map(operator.index, given))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"Arena.empty(): expected a torch.dtype, got dtype={arguments.shown(dtype)}")
    if min(shape, default=1) < 0:
        raise ValueError(f"Arena.empty(): negative size in the shape {shape}")
    if 0 in shape:
        raise ValueError(f"Arena.empty(): the shape {shape} has no elements, and so no memory to take from an arena")
    if math.prod(shape) * dtype.itemsize > LARGEST:
        raise ValueError(f"Arena.empty(): expected a shape of at most {LARGEST} bytes")
    return shape


def options_of(
    full: Full, buckets: Mapping[str, int | str] | None, check: object, register: object, symmetric: bool
) -> dict[str, int]:
    """Check what :class:`Arena` is given beside its size and its device; return the bytes of its buckets by name."""
    arguments.check("Arena", arguments.one_of(get_args(Full)), full=full)
    arguments.check("Arena", arguments.FLAG, symmetric=symmetric)
    arguments.check("Arena", arguments.MEMBER, check=check, register=register)
    arguments.check("Arena", _BUCKETS, buckets=buckets)
    if register is not None and full != "raise":
        raise ValueError(
            'Arena(register=...): expected full="raise", because the ranks of a registered group must not mix '
            "registered memory with ordinary memory"
        )
    return {name: bytes_of(size, f"Arena: bucket {name!r}") for name, size in (buckets or {}).items()}


def device_of(device: torch.device | str | int | None) -> tuple[torch.device, int]:
    """Return the device that an argument names, and the index by which the ledger knows this device.

    Raises ValueError or TypeError for a device that is none, is not there, or is neither a CUDA device nor the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.check("Arena", _DEVICE, device=device)
    try:
        found = torch.device(device)
    except (RuntimeError, OverflowError):
        raise ValueError(f"Arena(device={arguments.shown(device)}): expected a device of torch's") from None
    if found.type == "cpu":
        return torch.device("cpu"), HOST
    if found.type != "cuda":
        raise ValueError(f"Arena(device={device!r}): expected a CUDA device or the CPU")
    if not torch.cuda.is_available():
        raise ValueError(f"Arena(device={device!r}): there is no CUDA device here")
    index = torch.cuda.current_device() if found.index is None else found.index
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"Arena(device={device!r}): there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index), index
