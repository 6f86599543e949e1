"""What torch records of itself: the history of its allocator, and the calls of its backends (the flight recorder)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypedDict

from typing_extensions import NotRequired

from safecomm._torch.names import C_C10D, HAS_CUDA, look_up, of_cuda

_NO_HISTORY = "no snapshot with a history can be recorded"
record_history: Callable[..., object] | None = look_up("torch.cuda.memory._record_memory_history", None, _NO_HISTORY)
dump_snapshot: Callable[[str], object] | None = look_up("torch.cuda.memory._dump_snapshot", None, _NO_HISTORY)
on_out_of_memory: Callable[[Callable[..., None]], object] | None = of_cuda(
    "_cuda_attach_out_of_memory_observer", None, "no snapshot is written as memory runs out"
)
"""Calls a function with the device and three numbers of bytes, before torch raises OutOfMemoryError."""

when_cuda_starts: Callable[[Callable[[], object]], object] = look_up(
    "torch.cuda._lazy_call", lambda call: call(), "CUDA starts early"
)
"""Calls a function as the program starts CUDA, or at once if it has: to ask before would start it."""

_BACKENDS = "gloo", "nccl2", "nccl-lazy"
"""Those of torch that have a recorder each from torch 2.15 on, where "nccl" is made of the last two."""

_dump: Callable[..., bytes] | None = look_up(
    f"{C_C10D}._dump_fr_trace", None, "collectives of gloo are not logged", since="2.9"
)
_dump_nccl: Callable[[], bytes] | None = (
    look_up(f"{C_C10D}._dump_nccl_trace", None, "collectives of NCCL are not logged") if HAS_CUDA else None
)


class FlightEntry(TypedDict):
    """A call, as the flight recorder has it."""

    profiling_name: str
    """The backend and the operation, as ``"nccl:all_reduce"``."""
    process_group: tuple[str, str]
    """The group's name, and its description."""
    collective_seq_id: int
    """Its number among the collectives of its group."""
    is_p2p: NotRequired[bool]
    time_created_ns: int
    """Of the clock of time.time_ns()."""
    duration_ms: NotRequired[float | None]
    """By the device's events, once the backend has seen it complete."""
    input_sizes: NotRequired[list[list[int]]]
    input_dtypes: NotRequired[list[str]]
    output_sizes: NotRequired[list[list[int]]]
    output_dtypes: NotRequired[list[str]]
    frames: NotRequired[list[object]]
    """The stack, as memory snapshots have it."""


def flight_entries() -> list[FlightEntry] | None:
    """Return what the flight recorder has of each call, oldest first; None where torch has none.

    The calls of all backends that record, such as NCCL and gloo, from Python or not.
    """
    dumped = [_dump_nccl()] if _dump_nccl is not None else []
    if _dump is not None:
        try:
            dumped += [_dump(backend=name) for name in _BACKENDS]
        except TypeError:  # one recorder for all, before torch 2.15
            dumped.append(_dump())
    entries = [entry for one in dumped for entry in pickle.loads(one).get("entries", [])]
    return sorted(entries, key=lambda entry: entry["time_created_ns"]) if dumped else None
