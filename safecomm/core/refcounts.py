"""Who else refers to an object: counts of references, calibrated in one place, tested at import, or not used at all.

A dropped handle and an arena's idle slot are told by CPython's counts of references. What a count is worth differs:
versions of Python push an argument with or without a reference of its own, and versions of torch keep one reference
more to a storage's Python object. So each count is compared with what was counted here, of objects whose references
are known. A free-threaded interpreter splits its counts among threads and defers some, so there no count is used.

Where counts can't be relied on, :data:`COUNTED` is False and the comparisons below never hold. Nothing is then known
to be dropped or unused: works are polled at each call, ``record_stream`` stays torch's, and an arena makes each buffer
anew and looks whether its storage has died. ``docs/contract.md`` says at S3 what that can't promise.

A count must be taken directly, on a local variable or an attribute, in the function that compares it: what a reference
of a Python function's argument is worth changes as the interpreter specialises the call.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from safecomm import _torch

log: logging.Logger = logging.getLogger("safecomm")


def _no_count(_: object) -> int:
    return sys.maxsize


getrefcount: Callable[[object], int] = getattr(sys, "getrefcount", _no_count)

_ROUNDS = 64
"""How often the self-test counts: by then the interpreter has specialised the code that counts."""


class Counts(NamedTuple):
    """What counts are compared with."""

    held_once: int
    """References to an object that one tuple has, or a list, counted on the one variable that has it too."""
    queued: int
    """The same of a key of an OrderedDict, which refers to each key twice."""
    unused: int
    """References to the storage of a slot that is unused, counted on the slot's attribute."""
    keeping: int
    """How many of those there are because of the slot and its template."""


NEVER = Counts(held_once=0, queued=0, unused=-1, keeping=1)
"""Comparisons with these never hold."""


class _Slot:
    """What an arena keeps of a slot: a storage, and a tensor of it that others are copied from."""

    __slots__ = ("storage", "template")

    def __init__(self) -> None:
        self.storage: Any = None
        self.template: Any = None


class _WrongCountError(Exception):
    """A count is not what the references make it."""


def _calibrate() -> Counts:
    """Count the references to objects of which it is known who has them."""
    (thing,) = container = [object()]
    held_once = getrefcount(thing)
    container.clear()
    queue = OrderedDict({thing: None})
    queued = getrefcount(thing)
    del queue
    slot = _Slot()
    # The storage is never bound to a local variable: a tracer could keep a reference to that.
    slot.storage = torch.empty(1, device="cpu").untyped_storage()
    unshared = getrefcount(slot.storage)
    slot.template = torch.empty(0, dtype=torch.uint8, device="cpu").set_(slot.storage)
    unused = getrefcount(slot.storage)
    # A version of CPython may need fewer references for a call; none needs more, but a tracer may hold one to a local.
    return Counts(min(held_once, 3), min(queued, 4), unused, unused - unshared + 1)


def _check(told: bool, what: str) -> None:
    if not told:
        raise _WrongCountError(what)


def _test_objects(counts: Counts) -> None:
    """Ask of objects, in the ways that the ledger and the arena's layout do, whether one container alone has them."""
    things: OrderedDict[object, None] = OrderedDict()
    for _ in range(_ROUNDS):
        things[object()] = None
        while (thing := next(iter(things), None)) is not None:
            _check(getrefcount(thing) <= counts.queued, "an object that one container has counts as shared")
            handle = thing
            _check(getrefcount(thing) > counts.queued, "a second reference to an object is not counted")
            del handle
            _check(getrefcount(thing) <= counts.queued, "a reference that is gone is still counted")
            del things[thing]
        table = {0: object()}
        for thing in tuple(table.values()):
            _check(getrefcount(thing) == counts.held_once + 1, "two containers do not count as two")
        (thing,) = pair = (table.pop(0),)
        _check(getrefcount(thing) == counts.held_once, "an object that a tuple has counts as shared")
        del pair


def _test_storages(counts: Counts) -> None:
    """Ask of storages, as the arena does, whether only their slot has them."""
    slot = _Slot()
    slot.storage = torch.empty(8, device="cpu").untyped_storage()
    cdata = _torch.cdata_of(slot.storage)
    _check(_torch.storage_use_count(cdata) == 1, "torch counts users of a storage that has none")
    slot.template = torch.empty(0, dtype=torch.uint8, device="cpu").set_(slot.storage)
    for _ in range(_ROUNDS):
        _check(
            _torch.storage_use_count(cdata) == 2 and getrefcount(slot.storage) == counts.unused,
            "an unused storage counts as used",
        )
        other = slot.template.data
        _check(_torch.storage_use_count(cdata) != 2, "torch does not count a tensor of a storage")
        del other
        held = slot.storage
        _check(getrefcount(slot.storage) != counts.unused, "a reference to a storage is not counted")
        _check(getrefcount(slot.storage) == counts.unused + 1, "a reference to a storage does not count as one")
        del held


def _trusted() -> tuple[Counts, str]:
    """Return the counts, and why they are not to be used; ``""`` if they are."""
    if _torch.threads_are_free():
        return NEVER, "this Python runs without a global interpreter lock, so its counts are split among threads"
    if not _torch.USE_COUNT:
        return NEVER, f"torch {torch.__version__} does not tell how many tensors use a storage"
    tracer, profiler = sys.gettrace(), sys.getprofile()
    sys.settrace(None)  # either may look at a frame's locals, and then refers to them too
    sys.setprofile(None)
    try:
        with _torch.probing():
            counts = _calibrate()
            _test_objects(counts)
            _test_storages(counts)
    except Exception as error:  # of whatever kind: nothing here may break the import
        return NEVER, f"{error}" if isinstance(error, _WrongCountError) else f"counting them failed: {error!r}"
    finally:
        sys.settrace(tracer)
        sys.setprofile(profiler)
    return counts, ""


_counts, WHY_NOT = _trusted()
HELD_ONCE, QUEUED, UNUSED, KEEPING = _counts

COUNTED: bool = not WHY_NOT
"""Whether counts of references are used in this process. :data:`WHY_NOT` says why they are not."""

COSTS = "dropped handles go unnoticed, record_stream stays torch's, and an arena takes longer to hand out a buffer"
"""What is worse where they are not."""

if not COUNTED:
    log.warning("counts of references are not used here, because %s: %s", WHY_NOT, COSTS)
