"""What each backend's works do with memory, told by the class of the backend's object.

The name that a program gave does not tell it: ``nccl`` is another class since torch 2.15, ``nccl2`` and
``nccl-legacy`` are names of the two, and ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` puts an object around each. A class that
is not here is unknown: its calls are c10d's, and nothing is taken for granted of its works. c10d passes on
``wait()`` and ``get_future()`` of a work that was made in Python, and nothing else: such a work can't be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from safecomm import _torch


@dataclass(frozen=True)
class Kind:
    """What the objects of one class, and their works, do."""

    name: str = ""
    """``"nccl"`` or ``"gloo"``; ``""`` for others."""
    direct: bool = False
    """Its calls may go the direct way, because its works are what c10d says that works are. The fake backend's never
    end."""
    stream_ordered: bool = False
    """Waiting for a work orders a stream, and collectives end in the order in which they began. With others it blocks
    the host."""
    wait_is_stream_order: bool = False
    """``block_current_stream()`` does what the first ``wait()`` for a work does, where torch has it."""
    single_call_equivalent: bool = False
    """A coalescing region of one call does what that call does."""
    needs_aliases: bool = True
    """It holds what it was given longer than it needs: point-to-point calls ``record_stream``, and a coalescing region
    keeps its tensors until the group's next collective. So it is given aliases."""
    asks_in_wait: bool = False
    """``wait()`` asks the device whether the work is complete, which ends a capture of another thread."""
    hides_failures: bool = False
    """``synchronize()`` does nothing for a work that has failed, and does not say so; asking for the future orders the
    current stream, and ``block_current_stream()`` goes by the future."""
    stages_lists: bool = True
    """A reduce_scatter of a list goes through a flat buffer of the list's size. Else it takes no memory."""
    pollable_p2p: bool = True
    """A send or receive says that it is complete also before it has been waited for."""
    tells: bool = True
    """Its works say when they are complete. Else ``is_completed()`` stays False, and of a dropped handle the
    future is asked."""
    records: bool = False
    """Its asynchronous collectives call ``record_stream`` for all that they use, so that the allocator keeps it. Its
    sends and receives run on the current stream."""


NCCL = Kind("nccl", direct=True, stream_ordered=True, wait_is_stream_order=True, single_call_equivalent=True)
"""ProcessGroupNCCL. An asynchronous work keeps its inputs and outputs until it is waited for (torch 2.8 and later)."""

NCCL2 = Kind(
    "nccl", direct=True, stream_ordered=True, needs_aliases=False, asks_in_wait=True, hides_failures=True,
    stages_lists=False,
)  # fmt: skip
"""ProcessGroupNCCL2, and the one that has a communicator for each peer. A work keeps its inputs; its outputs are kept
by the handle alone, and what is received is not kept. A list form is a group of NCCL's broadcasts or reductions of its
tensors, which a rank that called the flat form would not take part in (``nccl2/ProcessGroupNCCL.cpp``, torch 2.15)."""

GLOO = Kind("gloo", direct=True, pollable_p2p=False)

NCCL4PY = Kind(needs_aliases=False, tells=False, records=True)
"""The backend of torch 2.15 that is written in Python. A second ``wait()`` for one of its works orders nothing."""

OTHER = Kind()
"""A class of C++ that is not here."""

PYTHON = Kind(needs_aliases=False, tells=False)
"""A class of Python that is not here. It gets the caller's tensors, so that its ``record_stream`` does what it says."""

UNKNOWN = Kind(pollable_p2p=False)
"""Torch does not give the object out: it may be gloo's."""

CLASSES: dict[type, Kind] = {
    known: kind
    for known, kind in (
        (_torch.NCCL, NCCL), (_torch.NCCL2, NCCL2), (_torch.NCCL_LAZY, NCCL2), (_torch.GLOO, GLOO),
    )
    if known is not None
}  # fmt: skip
"""By class, those that this torch has."""

SOME_ASK_IN_WAIT = any(kind.asks_in_wait for kind in CLASSES.values())
"""Whether a group of this torch may have a backend whose ``wait()`` asks the device."""


def kind_of(backend: object) -> Kind:
    """Return what ``backend`` is, the C++ side of a group's backend, also where another wraps it."""
    if backend is None:
        return UNKNOWN
    backend = _torch.unwrapped(backend)
    for known in type(backend).__mro__:
        kind = CLASSES.get(known)
        if kind is not None:
            return kind
        if _torch.is_nccl4py(known):
            return NCCL4PY
    return PYTHON if hasattr(backend, "__dict__") else OTHER


def of(group: Any, device_type: str) -> Kind:
    """Return what serves ``device_type`` in ``group``."""
    if isinstance(group, ProcessGroup) and type(group) is not ProcessGroup:
        return PYTHON  # other code's, whose works need not be its backend's
    return kind_of(_torch.backend_of(group, device_type))
