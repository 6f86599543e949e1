"""The backends of a group: their classes, their timeouts, how their works wait, and their memory on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm._torch.names import C10D, C_C10D, NOT_DIRECT, Never, is_class, look_up, of_cuda

Backend: type = look_up(f"{C_C10D}.Backend", Never, NOT_DIRECT, is_class)
"""The class of the C++ side of one backend of a group.

A call of its collectives skips the dispatcher, which takes 1 to 2.5 us of each call.
"""

NCCL: type | None = getattr(c10d, "ProcessGroupNCCL", None)
NCCL2: type | None = getattr(c10d, "ProcessGroupNCCL2", None)
NCCL_LAZY: type | None = getattr(c10d, "ProcessGroupNCCLLazy", None)
GLOO: type | None = getattr(c10d, "ProcessGroupGloo", None)
"""The classes of backends; None where torch was built without one. The second and third are in torch 2.15 and later."""

FakeWork: type | None = look_up(
    f"{C_C10D}.FakeWork", None, "what the fake backend returns is taken for a work", is_class, since="2.8"
)
"""What calls of the fake backend and calls with meta tensors return: it stands for no work, and is never complete."""


def backend_of(group: c10d.ProcessGroup, device_type: str) -> Any:
    """Return the C++ side of ``group``'s backend for ``device_type``; None if it has none, or torch does not say."""
    try:
        return group._get_backend(torch.device(device_type))
    except (AttributeError, RuntimeError, TypeError):
        return None


look_up(
    f"{C10D}.ProcessGroup._get_backend", None,
    "no group is known to be NCCL's or gloo's, so calls go c10d's own way, memory comes back later, and the end of a "
    "group waits 30 s at most",
)  # fmt: skip

_Wrapper: type = Never

if GLOO is not None:
    _Wrapper = look_up(
        f"{C10D}._ProcessGroupWrapper", Never,
        "with TORCH_DISTRIBUTED_DEBUG=DETAIL no group is known to be NCCL's or gloo's",
        lambda found: is_class(found) and hasattr(found, "wrapped_pg"),
    )  # fmt: skip


def unwrapped(backend: object) -> object:
    """Return ``backend``, or the backend that TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped in it."""
    while isinstance(backend, _Wrapper):
        backend = backend.wrapped_pg  # type: ignore[attr-defined]
    return backend


def is_nccl4py(known: type) -> bool:
    """Return whether ``known`` is the backend ``nccl4py``, told by its name: importing it imports NCCL's bindings.

    And whether it calls ``record_stream`` for what it uses, as that of torch 2.15 does.
    """
    name = f"{known.__module__}.{known.__qualname__}"
    return name == "torch.distributed._nccl4py.backend.NCCL4PyBackend" and hasattr(known, "_record_stream")


def is_initialized(group: Any, device_type: str) -> bool:
    """Return whether ``group`` has made its communicators for ``device_type``; True if torch does not say."""
    backend = backend_of(group, device_type)
    try:
        return bool(backend._is_initialized())
    except (AttributeError, RuntimeError, TypeError):
        return True


def group_timeout(group: c10d.ProcessGroup, device_type: str) -> timedelta | None:
    """Return the timeout of ``group``'s backend for ``device_type``; None if torch does not say."""
    try:
        timeout = backend_of(group, device_type).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def nccl_memory_of(group: c10d.ProcessGroup) -> int | None:
    """Return the bytes of a device that NCCL has for ``group``; None if torch does not say, or has no communicator yet.

    ``memory_stats()`` is in torch 2.12 and later, and needs NCCL 2.29.7: https://github.com/pytorch/pytorch/pull/176300.
    It reads counters.
    """
    backend = unwrapped(backend_of(group, "cuda"))
    # Torch would wait for a communicator that its peers have not joined yet.
    if not isinstance(backend, _NCCLS) or not is_initialized(group, "cuda"):
        return None
    try:
        stats = backend.memory_stats()  # type: ignore[attr-defined]
        # NCCL goes on to count what it has given back when it was suspended.
        return int(stats["persist" if stats.get("suspended") else "total"])
    except (AttributeError, KeyError, RuntimeError):
        return None


_NCCLS = tuple(known for known in (NCCL, NCCL2, NCCL_LAZY) if known is not None)


def _no_context(index: int) -> bool:
    return False


has_context: Callable[[int], bool] = of_cuda(
    "_cuda_hasPrimaryContext", _no_context, "memory_report() does not tell what is used outside of the allocator"
)
"""Whether this process has started CUDA on a device, by its index. Starts it on none."""


def regions_differ() -> bool:
    """Return whether a coalescing region of one call may differ from that call outside of a region.

    The coalesced calls of ProcessGroupNCCL know neither torch's own one-shot all_reduce nor torch's check for NaN.
    Environment variables ask for these two, and each group reads the variables when it is made.
    """
    return _any_set("ENABLE_INTRA_NODE_COMM", "TORCH_NCCL_NAN_CHECK")


def waits_only_block_streams() -> bool:
    """Return whether ``block_current_stream()`` does what the first ``wait()`` for a work of ProcessGroupNCCL does.

    The two differ in what they tell a profiler, which takes half of the time of ``wait()``. They differ, too, for a
    work that was polled or waited for before and has failed: ``wait()`` alone raises then (``WorkNCCL::wait``, torch
    2.9 and later). False where an environment variable asks ``wait()`` to block the host. Each group reads the
    variables when it is made. ``block_current_stream()`` came with https://github.com/pytorch/pytorch/pull/156883.
    """
    known = hasattr(c10d.Work, "block_current_stream")
    return known and not _any_set("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def _any_set(*names: str) -> bool:
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)
