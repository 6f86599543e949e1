"""What each asynchronous call does to its hold, done in C where the C file was built; see ``_torch/_holds.c``.

C has the ordinary cases of three methods, and calls the methods of Python for all others. It reads and writes the slots
of the same objects, and finds where these lie by marks. Where anything is not as it should be, Python does all of it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from safecomm import _torch
from safecomm.core import ledger, refcounts
from safecomm.core.holds import SHARE, Queue
from safecomm.core.ledger import CROWD, NEWEST, Ledger, WorkQueue
from safecomm.core.work import Work

log: logging.Logger = logging.getLogger("safecomm")

# In the order in which C numbers them.
_SLOTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Work, ("alloc_stream", "code", "inner", "instruction", "op", "queue", "since", "storages")),
    (WorkQueue, ("budget", "defer_polling", "holds", "index", "next_look", "nonempty", "unseen_bytes")),
    (WorkQueue, ("current", "ledger", "wait_is_stream_order")),
    (Ledger, ("_leftovers", "nonempty", "observer", "_patience", "quarantine", "_unfinished")),
)
HOLD, CAN_SKIP_SWEEP, WAIT = WorkQueue.hold, Ledger.can_skip_sweep, Work.wait
"""The methods of Python."""


def _marks() -> list[tuple[object, object]]:
    """Return, for each slot, an object that has a mark of its own there, and the mark."""
    marks: list[tuple[object, object]] = []
    for kind, names in _SLOTS:
        one: Any = object.__new__(kind)
        for name in names:
            mark = object()
            setattr(one, name, mark)
            marks.append((one, mark))
    return marks


MODULE: Any = None
"""What does it in C; None where Python does all of it."""


def put_in_place(module: Any) -> None:
    """Let C, which is in ``module``, do what it can; None: let Python do all of it."""
    global MODULE
    done = None
    if module is not None:
        queue: OrderedDict[object, None] = OrderedDict({object(): None})
        dropped = module.references(queue)  # what one queue alone refers to
        profiler = vars(_torch.profiler)
        if type(profiler) is not dict:  # of a class, which says that a profiler is always on
            profiler = dict(profiler)
        done = module.holding(
            _marks(), (Work, Queue, WorkQueue, Ledger),
            (HOLD, CAN_SKIP_SWEEP, WAIT, ledger._now, profiler),
            (CROWD, NEWEST, SHARE, dropped if refcounts.COUNTED else 0),
            f"wait($self, /, timeout=None)\n--\n\n{WAIT.__doc__}",
        )  # fmt: skip
        if done is None:
            log.warning("C does not find where holds are written, so Python holds: calls take some microseconds more")
    MODULE = module if done else None
    WorkQueue.hold, Ledger.can_skip_sweep, Work.wait = done or (HOLD, CAN_SKIP_SWEEP, WAIT)  # type: ignore[method-assign]


put_in_place(_torch.native_module)
