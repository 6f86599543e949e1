"""torch's ``destroy_process_group`` with a time limit, where CUDA graphs may keep it from returning (S7).

NCCL ends a communicator once all graphs are gone that run its collectives, and waits for them without end. Which graphs
those are is known only of captures that were seen. So where there is any graph, torch's function runs in a thread, and
who has called it can stop waiting.
"""

from __future__ import annotations

import atexit
import gc
import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from safecomm import _torch
from safecomm.core import captures
from safecomm.errors import LiveGraphError

log: logging.Logger = logging.getLogger("safecomm")

_begun: list[_Destruction] = []
"""Those that have not returned yet, or whose caller did not wait for that."""


class _Destruction(threading.Thread):
    """A call of torch's ``destroy_process_group``, which may never return."""

    def __init__(self, function: Callable[..., None], group: object, process_group: object, whole: bool) -> None:
        super().__init__(name="destroy_process_group", daemon=True)
        self._function = function
        self._group = group
        self._process_group = process_group
        self._whole = whole
        self._device = torch.cuda.current_device()
        self._error: BaseException | None = None
        self.kept: object = None

    def run(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # a thread begins with the first one
            self._function(self._group)
        except BaseException as error:
            self._error = error

    def is_of(self, process_group: object) -> bool:
        """Return whether this destroys ``process_group``; None if there is no default group any more."""
        return self._whole if process_group is None else process_group is self._process_group

    def finish(self, patience: timedelta, process_group: object) -> bool:
        """Wait until torch's function has returned, and return whether it was for ``process_group``.

        Raises what it has raised, or LiveGraphError if graphs are alive at the end of ``patience``.
        """
        self.join(patience.total_seconds())
        if self.is_alive():
            self._look_for_graphs(patience)
            self.join()  # as long as torch does: a rank may be late
        _begun.remove(self)
        if not self.is_of(process_group):
            return False
        if self._error is None:
            return True
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # which refers to this frame

    def _look_for_graphs(self, patience: timedelta) -> None:
        gc.unfreeze()  # what is frozen can't be found
        graphs = captures.alive()
        if not graphs:
            return
        what = (
            f"torch's destroy_process_group() has not returned after {patience.total_seconds():g} s. NCCL waits for "
            f"ever for CUDA graphs that run collectives of the group. {len(graphs)} are alive, captured at "
            f"{'; '.join(captures.places_of(graphs))}."
        )
        if not captures.tolerant():
            raise LiveGraphError(
                f"{what} Reset those that do, which the graphs of this error let you do, and destroy the group again: "
                "that waits for what torch has begun. The process can end as it is.",
                tuple(graphs),
            )
        if self._whole:
            log.warning("%s They were reset, because all groups are being destroyed.", what)
            for graph in graphs:
                graph.reset()
        else:
            log.warning("%s Reset those that do.", what)


def destroy(
    function: Callable[..., None], group: object, process_group: object, patience: timedelta, *, whole: bool
) -> None:
    """Destroy ``group`` by torch's ``function``. ``process_group``: what it stands for; ``whole``: it has all others.

    Raises LiveGraphError if graphs are alive and ``function`` has not returned after ``patience``. It goes on then, and
    the next call waits for it again. Nothing of that keeps the process from ending.
    """
    for one in tuple(_begun):
        if one.finish(patience, process_group):
            return
    there = torch.cuda.is_initialized() and (gc.get_freeze_count() or captures.alive())  # type: ignore[no-untyped-call]
    if not there or _torch.c10d_vars[_torch.WORLD] is not _torch.world:  # a thread would have other groups
        function(group)
        return
    destruction = _Destruction(function, group, process_group, whole)
    try:
        destruction.start()
    except RuntimeError:  # the interpreter is ending: from Python 3.12 on it starts no threads then
        function(group)
        return
    _begun.append(destruction)
    atexit.unregister(_stay)
    atexit.register(_stay)
    destruction.finish(patience, process_group)


def _stay() -> None:
    """Keep groups and graphs alive after the end of the interpreter, if it ends while torch's function is waiting.

    A thread that comes back to an interpreter that is gone takes the process down (Python 3.13 and before), so it is
    not to come back. Groups that die abort their communicators, and that waits for graphs as well.
    """
    for one in _begun:
        if one.is_alive():
            # What a thread refers to that never ends is never freed.
            one.kept = captures.alive(), _torch.all_groups()
