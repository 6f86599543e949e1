"""Registration of an arena's block with NCCL: once, on all ranks together, and undone in the right order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from safecomm import _torch
from safecomm.errors import ArenaError

SYMMETRIC_SINCE = (2, 30, 7)
"""The first NCCL whose symmetric kernels do not start before their input was written (since 2.28 they could)."""


class Registration:
    """A block from the backend's own allocator, registered with the communicator of ``group``.

    Guarantees that all ranks register or none does: all ranks of the group make it together, agree first that each has
    its block, and are fenced before and after.

    Parameters
    ----------
    nbytes
        Bytes of the block.
    device
        Where the block is.
    group
        The group, of NCCL.
    symmetric
        Whether the block is registered as a symmetric window.

    Raises
    ------
    ArenaError
        If the group, torch or NCCL can't register memory, or a rank of the group has no room for its block. Nothing is
        registered then.
    """

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup, *, symmetric: bool) -> None:
        self._group: dist.ProcessGroup | None = group
        backend: Any = _torch.backend_of(group, "cuda") if device.type == "cuda" else None
        if not all(
            hasattr(backend, name) for name in ("mem_allocator", "register_mem_pool", "deregister_mem_pool")
        ) or not hasattr(torch.cuda, "MemPool"):
            raise ArenaError(
                f"Arena(register=...): the group has no backend on {device} that registers memory: it takes NCCL, and "
                f"torch 2.7 or later; this is torch {torch.__version__}"
            )
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if symmetric and version < SYMMETRIC_SINCE:
            raise ArenaError(
                f"Arena(symmetric=True): NCCL {'.'.join(map(str, version))} can read the input of a symmetric "
                f"collective before it is written, which corrupts silently; it takes NCCL "
                f"{'.'.join(map(str, SYMMETRIC_SINCE))} or later. Plain registration is not concerned."
            )
        failure: Exception | None = None
        try:
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.device(device), torch.cuda.use_mem_pool(self._pool):
                self.block: torch.Tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except Exception as error:
            failure = error
        # This call is the fence before, and makes the communicator where there is none yet.
        ready = torch.tensor(int(failure is None), device=device)
        dist.all_reduce(ready, dist.ReduceOp.MIN, group=group)
        if not int(ready):
            raise ArenaError(
                f"Arena(register=...): no block of {nbytes} bytes: {failure or 'on another rank'}. "
                "Nothing was registered."
            ) from failure
        if symmetric:
            backend.register_mem_pool(self._pool, symm=True)
        else:
            backend.register_mem_pool(self._pool)
        self._backend: Any = backend
        self._fence(device)

    def _fence(self, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        torch.cuda.synchronize(device)

    def close(self) -> None:
        """Undo the registration, on all ranks of the group together, and free the block and then its pool."""
        self._fence(self.block.device)  # no rank's collective uses the block any more
        self._backend.deregister_mem_pool(self._pool)
        del self.block
        self._pool = self._backend = self._group = None
