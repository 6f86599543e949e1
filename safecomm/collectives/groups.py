"""The ends of groups and of their communicators."""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import ending
from safecomm.collectives.general import stand_in
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.takers import ENGINES, default_group
from safecomm.core import captures
from safecomm.core.drain import await_works, deadline_of
from safecomm.core.ledger import LEDGER
from safecomm.errors import PendingWorkError

log: logging.Logger = logging.getLogger("safecomm")

GRACE = timedelta(seconds=30)
"""How long ``destroy_process_group`` waits for works that are not over, and for torch's own where there are graphs.

The group's own timeout, if that is shorter.
"""

_c10d_destroy = c10d.destroy_process_group


def _target(group: object) -> object:
    """Return the group whose works end with ``group``; None for all, which the default group takes with it.

    Where ranks are threads, it takes those of its thread, and not all: see :func:`destroy_process_group`.
    """
    whole = group is None or group is default_group()
    return None if whole and _torch.c10d_vars[_torch.WORLD] is _torch.world else group or default_group()


def _end_engines(target: object, patience: timedelta) -> None:
    """Switch low_latency() off for ``target`` (None: for all groups), whatever becomes of it."""
    waits = []
    for group in [group for group in ENGINES if group is not None and target in (None, group)]:
        with contextlib.suppress(Exception):  # of a device that is gone
            waits.append(ENGINES.pop(group).leave(patience))
    for wait in waits:  # after all of them: another rank may have them in another order
        wait()


def destroy_process_group(group: Any = None) -> None:
    target = _target(group)
    process_group = group or default_group()
    if target is not None and target is default_group():
        for other in _torch.all_groups():
            if other is not target:
                destroy_process_group(other)
    patience = GRACE
    if default_group() is not None and group is not c10d.GroupMember.NON_GROUP_MEMBER:
        captures.refuse_live(target)
        for device_type in ("cpu", "cuda"):
            patience = min(patience, _torch.group_timeout(process_group, device_type) or patience)
        # A program that can't be edited may leave a receive posted for a message that never comes. torch ends at once.
        tolerant = captures.tolerant()
        try:
            await_works(LEDGER, deadline_of(patience), target, unpollable=not tolerant)
        except PendingWorkError as error:
            if not tolerant:
                raise
            log.warning("destroy_process_group() goes on all the same: %s", error)
        if tolerant:  # before, because c10d lets go of the group in it
            ROUTES.close(target, "its group was destroyed before it was over")
        _end_engines(target, patience)
    ending.destroy(_c10d_destroy, group, process_group, patience, whole=target is None)
    ROUTES.close(target, "its group was destroyed")


destroy_process_group = stand_in(destroy_process_group, _c10d_destroy)

_c10d_abort: Any = getattr(c10d, "_abort_process_group", None)  # not in torch 2.4


def _abort_process_group(group: c10d.ProcessGroup | None = None) -> None:
    # Before, because c10d lets go of the group in it.
    ROUTES.close(_target(group), "its group was aborted")
    _end_engines(_target(group), timedelta())
    _c10d_abort(group)


_abort_process_group = None if _c10d_abort is None else stand_in(_abort_process_group, _c10d_abort)  # type: ignore[assignment]

# --- another communicator under a group, or in its place ------------------------------------------------------

_c10d_shrink: Any = getattr(c10d, "shrink_group", None)  # torch 2.9 and later
_c10d_reconfigure: Any = getattr(c10d, "_reconfigure", None)  # torch 2.15 and later


def _end_generation(group: object, reason: str) -> None:
    """Quarantine what ``group`` (None: all groups) holds and is not over, and forget what is known of it."""
    LEDGER.sweep(thorough=True)  # what is over need not wait for the whole device
    ROUTES.close(group, reason)
    _end_engines(group, timedelta())


def shrink_group(
    ranks_to_exclude: list[int], group: c10d.ProcessGroup | None = None, *args: object, **kwargs: object
) -> Any:
    target, of = _target(group), group or default_group()
    captures.refuse_live(target)
    shrunk = _c10d_shrink(ranks_to_exclude, group, *args, **kwargs)
    # After, because c10d may say no before it does anything. Until then ``of`` keeps the backend, which works ask.
    _end_generation(target, "its group was shrunk")
    del of
    return shrunk


def _reconfigure(
    uuid: object, handles: object, group: c10d.ProcessGroup | None = None, *args: object, **kwargs: object
) -> object:
    of = group or default_group()
    if of is not None:  # else c10d says so
        captures.refuse_live(of)
        _end_generation(of, "its group was given another communicator")
    return _c10d_reconfigure(uuid, handles, group, *args, **kwargs)


shrink_group = None if _c10d_shrink is None else stand_in(shrink_group, _c10d_shrink)  # type: ignore[assignment]
_reconfigure = None if _c10d_reconfigure is None else stand_in(_reconfigure, _c10d_reconfigure)  # type: ignore[assignment]
