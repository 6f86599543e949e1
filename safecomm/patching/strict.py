"""Which collectives still bypass safecomm, and from where."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from safecomm import _torch
from safecomm.core.call_site import outside, place

log: logging.Logger = logging.getLogger("safecomm")


UNSEEN: str = (
    "" if _torch.HOOKS else "; before torch 2.14 calls of C++ are not seen (DDP, DTensor, functional, compiled)"
)
"""What no :class:`Strict` sees on this torch."""


class Strict:
    """Tells the collectives of all groups that bypass safecomm: ``bypassed`` counts them, by name and call site.

    Where groups have hooks (torch 2.14 and later) these are all that are launched, also from C++: by functional
    collectives, DTensor, DDP's reducer, compiled graphs. Before, those that Python asks a group for. What is no
    collective of c10d's, such as symmetric memory, is not seen.
    """

    def __init__(self) -> None:
        self.bypassed: Counter[str] = Counter()
        self._watch = _Hooks(self._count) if _torch.HOOKS else _Methods(self._count)

    def remove(self) -> None:
        """Leave torch as it was."""
        self._watch.remove()

    def _count(self, name: str, frame: types.FrameType | None) -> None:
        where = f"{name} {'in a thread of C++' if frame is None else f'at {place(frame)}'}"
        self.bypassed[where] += 1
        if self.bypassed[where] == 1:
            log.warning("a collective bypassed safecomm: %s (reported once for this line)", where)


_Count = Callable[[str, "types.FrameType | None"], None]


# --- hooks ----------------------------------------------------------------------------------------------------------

_ID = int.from_bytes(b"safecomm", "big")
"""Of our hook. A program that registers one under the same number takes its place."""

_NO_COLLECTIVES = {"BARRIER", "SPLIT", "NEW_WINDOW"}
_NAMES = {"ALLGATHER_BASE": "all_gather_single", "REDUCE_SCATTER_BASE": "reduce_scatter_single"}
"""What the methods of a group are called, where hooks name the operator under them; elsewhere it is the same."""

_AROUND = ("torch.", "contextlib.", "typing_extensions.", "safecomm.patching.")
"""What is around a launch, and neither the program nor what holds a call of safecomm: torch, and what runs programs."""


class _Hooks:
    """Sees each collective of each group, those that are made later too, whatever calls it."""

    def __init__(self, count: _Count) -> None:
        self._count = count
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._end = _torch.on_each_group(self._attach)
        # A function of Python that C++ has kept to the end of the process takes it down there (torch 2.15).
        atexit.register(self.remove)

    def _attach(self, group: object) -> None:
        if isinstance(group, ProcessGroup):
            group.register_pre_hook(_ID, self._launched)  # type: ignore[attr-defined, unused-ignore]
            self._groups.add(group)

    def remove(self) -> None:
        """Take the hooks away."""
        atexit.unregister(self.remove)
        self._end()
        for group in tuple(self._groups):
            group.unregister_pre_hook(_ID)

    def _launched(self, call: Any) -> None:
        op: str = call.name.name
        if op in _NO_COLLECTIVES:
            return
        found: types.FrameType | None = None
        frame = sys._getframe().f_back  # None in a thread of C++, such as autograd's
        while frame is not None:
            module = f"{frame.f_globals.get('__name__', 'torch')}."  # code that torch has generated may have no module
            if frame.f_code.co_name == "__torch_dispatch__":
                found = None  # a mode, which saw the call on its way to the backend: it came from further out
            elif found is None and not module.startswith(_AROUND):
                if module.startswith("safecomm."):
                    return
                found = frame
            frame = frame.f_back
        self._count(_NAMES.get(op, op.lower()), found)


# --- methods --------------------------------------------------------------------------------------------------------

_METHODS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast",
    "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""The collectives of a group, which every call from Python ends in."""


class _Methods:
    """Sees each collective that Python asks a group for."""

    def __init__(self, count: _Count) -> None:
        self._count = count
        replaced = _torch.Replaced()
        for name in _METHODS:
            if name in vars(ProcessGroup):
                replaced.attribute(ProcessGroup, name, self._watched(name))
        self.remove = replaced.close

    def _watched(self, name: str) -> Callable[..., object]:
        bare = getattr(ProcessGroup, name)

        @functools.wraps(bare)
        def method(group: ProcessGroup, *args: object, **kwargs: object) -> object:
            frame = outside(_AROUND)
            if not str(frame.f_globals.get("__name__")).startswith("safecomm."):
                self._count(name, frame)
            return bare(group, *args, **kwargs)

        return method
