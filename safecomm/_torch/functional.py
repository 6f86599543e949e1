"""Torch's functional collectives, and the registry of their works.

Torch holds each work, and so its tensors, until the program waits for the work
(https://github.com/pytorch/torchtitan/issues/1769).
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup, Work

from safecomm._torch.names import C_C10D, answers, look_up
from safecomm._torch.registry import HOOKS

register_work: Callable[[torch.Tensor, Work], object] | None = look_up(
    f"{C_C10D}._register_work", None, "under patch() a program can't register works of its own", since="2.5"
)
"""Put a work into the registry, which takes none but c10d's own."""


def _never() -> bool:
    return False


inflight_as_graph_input: Callable[[], bool] = look_up(
    f"{C_C10D}._allow_inflight_collective_as_graph_input", _never,
    "a graph that is given tensors still in flight does not find their works", answers(bool), since="2.6",
)  # fmt: skip
"""Whether the dispatcher's calls register their works, for graphs that are given tensors still in flight.

The rules are in https://github.com/pytorch/pytorch/pull/137763.
"""

_size_of_registry: Callable[[], int] | None = look_up(
    f"{C_C10D}._get_work_registry_size", None, "functional collectives that were not waited for are not reported",
    answers(int), since="2.6",
)  # fmt: skip


def unwaited() -> int | None:
    """Return how many functional collectives of this thread were not waited for; None if torch does not say."""
    return None if _size_of_registry is None else _size_of_registry()


_STAYS = "functional collectives that were not waited for stay until the process ends, also under patch()"
_works_are_told = look_up(f"{C_C10D}.PostHookArgs.work", None, _STAYS, lambda found: True, since="2.14") is not None


def functional_collectives() -> types.ModuleType | None:
    """Return torch's module of functional collectives; None where no hook tells their works."""
    if not HOOKS or not _works_are_told:
        return None
    try:
        import torch.distributed._functional_collectives as module
    except ImportError:
        return None
    return module if hasattr(getattr(module, "AsyncCollectiveTensor", None), "elem") else None


_group_named: Callable[[str], ProcessGroup] | None = look_up(
    f"{C_C10D}._resolve_process_group", None, f"where a group is given by its name, {_STAYS}"
)


def group_named(name: str) -> ProcessGroup | None:
    """Return the group that C++ knows under ``name``; None if torch does not tell. Raises if there is no such group."""
    return None if _group_named is None else _group_named(name)
