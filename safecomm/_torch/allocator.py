"""Torch's caching allocator of CUDA: what it has, and the end of a capture that failed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from safecomm._torch.names import of_cuda


def segments() -> list[dict[str, Any]]:
    """Return the caching allocator's segments with their blocks, and without its history.

    The history, which diagnostics switch on, takes torch up to 0.7 s to convert for 100,000 entries
    (https://github.com/pytorch/pytorch/pull/172672). A torch without the option converts it all the same. Raises
    RuntimeError where the allocator keeps no record.
    """
    snapshot = torch.cuda.memory_snapshot
    found: list[dict[str, Any]] = snapshot(**_without_history(snapshot))  # type: ignore[no-untyped-call]
    return found


@functools.cache
def _without_history(snapshot: Callable[..., object]) -> dict[str, bool]:
    """Return the arguments that make ``snapshot`` leave the history out; none if no argument does."""
    return {"include_traces": False} if "include_traces" in inspect.signature(snapshot).parameters else {}


def end_allocation_to_pool(index: int, pool: tuple[int, int]) -> None:
    """Tell the caching allocator that a capture with memory of ``pool`` has ended, whose ``capture_end()`` has failed.

    Where CUDA gives a capture up, torch's ``capture_end()`` raises before it tells the allocator (2.13;
    https://github.com/pytorch/pytorch/pull/180395). For the allocator the capture then never ends:
    ``empty_cache()`` and running out of memory free nothing any more, ``record_stream`` keeps memory for good, and the
    end of a ``MemPool`` aborts the process.
    """
    if _end_allocation is None or _release_pool is None:
        return
    # Torch has told the allocator already if something later has failed.
    with contextlib.suppress(RuntimeError):
        _end_allocation(index, pool)
        _release_pool(index, pool)


_AFTER_FAILURE = "after a capture that CUDA gave up, the allocator frees nothing any more"

# The name of the function in torch 2.4.
_EARLIER = "_cuda_endAllocateCurrentStreamToPool"
_end_allocation: Callable[[int, tuple[int, int]], None] | None = of_cuda(
    _EARLIER if hasattr(torch._C, _EARLIER) else "_cuda_endAllocateToPool", None, _AFTER_FAILURE
)
_release_pool: Callable[[int, tuple[int, int]], None] | None = of_cuda("_cuda_releasePool", None, _AFTER_FAILURE)
