"""_coalescing_manager: many calls launched as one."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives.call import (
    BUCKETS,
    REGIONS,
    Region,
    at_once,
    counter,
    default_group,
    home_of_few,
    index_of,
    inside,
    stand_in,
    storages_of,
)
from safecomm.entries import leave_empty
from safecomm.ledger import LEDGER
from safecomm.streams import HOST
from safecomm.work import Work

_original = c10d._coalescing_manager
_count = counter("_coalescing_manager")
_compiling = torch.compiler.is_dynamo_compiling


def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
    if _compiling() or inside.batch:
        return _original(group, device, async_ops)
    _count()
    if LEDGER.busy:
        LEDGER.sweep()
    return _region(group or default_group(), device, async_ops, sys._getframe(1))


_coalescing_manager = stand_in(_coalescing_manager, _original)


@contextlib.contextmanager
def _region(to: Any, device: Any, async_ops: bool, frame: types.FrameType) -> Iterator[Any]:
    if BUCKETS:
        with at_once(to):
            yield from _inside_of(to, device, async_ops, frame)
    else:
        yield from _inside_of(to, device, async_ops, frame)


def _inside_of(to: Any, device: Any, async_ops: bool, frame: types.FrameType) -> Iterator[Any]:
    region = Region()
    manager = _original(to, device, async_ops)
    was_open = to in _torch.world.pg_coalesce_state
    try:
        cm = manager.__enter__()
    except BaseException:
        if not was_open:  # c10d would go on collecting the group's calls without running them
            _torch.world.pg_coalesce_state.pop(to, None)
        raise
    REGIONS[to] = region
    try:
        yield cm
    except BaseException:
        REGIONS.pop(to, None)
        cm.works = _abandon(to, device)
        _close(cm, to, region, frame)
        raise
    REGIONS.pop(to, None)
    for call in _torch.world.pg_coalesce_state.get(to, ()):  # also what was called through torch's own functions
        call.tensor = region.alias(call.tensor)
        if call.dst_tensor is not None:
            call.dst_tensor = region.alias(call.dst_tensor)
        region.tensors += [tensor for tensor in (call.tensor, call.dst_tensor) if tensor is not None]
        # c10d tells calls apart by the function that its module has under the name, which a patch may have changed.
        call.op = getattr(c10d, call.op.__name__, call.op)
    before = len(cm.works)
    manager.__exit__(None, None, None)
    own, cm.works = cm.works[:before], cm.works[before:]  # callers may have put works of their own in
    try:
        _close(cm, to, region, frame)
    finally:
        cm.works[:0] = own


def _close(cm: Any, group: Any, region: Region, frame: types.FrameType) -> None:
    """Hold what the region has launched, whose work is in ``cm``."""
    index = index_of(region.tensors[0]) if region.tensors else None
    if index is None:
        return
    storages = storages_of(region.tensors)
    if cm.works:
        (inner,) = cm.works
        work = LEDGER.hold(
            Work(), "_coalescing_manager", inner, group, index, storages, frame,
            aliases=tuple(region.aliases), staged=region.staged, p2p=region.p2p,
            home=home_of_few(index, storages),
        )  # fmt: skip
        cm.works[:] = [work]
        for call in region.works:
            call._region = work
        return
    for alias in region.aliases:
        leave_empty(alias)
    if index != HOST:
        LEDGER.trail("_coalescing_manager", group, index, storages, frame)


def _abandon(group: Any, device: Any) -> list[Any]:
    """End a region that an exception left, and return the work of what it had launched, if any.

    c10d does not: the group would go on collecting calls without running them, and with ``device`` the thread would
    stay inside of an NCCL group.
    """
    _torch.world.pg_coalesce_state.pop(group, None)
    if device is None:
        return []  # nothing was launched yet
    work = group._end_coalescing(device)
    return [] if work is None else [work]
