"""SizeClass: the slots of one shape, type, stream and bucket.

Almost every request pops an idle slot from its size class, copies the template, and pushes the slot back. Neither takes
a lock: "In hand" at the head of ``layout.py`` says why two requests never get the same slot.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

from safecomm import _torch
from safecomm.core.refcounts import COUNTED, KEEPING, UNUSED, getrefcount

ALIGNMENT = 512
"""Bytes to which slots are aligned: as the caching allocator aligns, and more than any kernel asks for."""

PROBES = 4
"""How many of the slots that were handed out last a search looks at, before it looks at all of them."""

NO_STREAMS: frozenset[int] = frozenset()

# Bound once: every request reads it.
_use_count = _torch.storage_use_count


def rounded(nbytes: int) -> int:
    """Return ``nbytes``, or the next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slot:
    """A range of the block that is handed out as one storage, again and again.

    It is *live* while the range is its own, and *in use* while anything but the arena refers to its storage. A slot
    that is not in use is *idle*.
    """

    __slots__ = ("after", "asked", "cdata", "end", "pointer", "site", "size_class", "start", "storage", "template")

    def __init__(self, start: int, end: int, size_class: SizeClass) -> None:
        self.start: int = start
        self.end: int = end
        self.size_class: SizeClass = size_class
        self.asked: int = 0  # bytes that its tensors have
        self.after: frozenset[int] = (
            NO_STREAMS  # the streams that the next use must be ordered after, until it is pushed
        )
        self.site: str = ""  # the call site of the last request, if the arena logs requests
        self.storage: Any = None  # where references are not counted: a weak reference to it
        self.template: Any = None  # a tensor over the storage; each request gets a copy of this tensor
        self.cdata: int = 0
        self.pointer: int = 0


def idle(slot: Slot, but_for_graph: bool) -> bool:
    """Return whether nothing refers to the storage of ``slot``, or nothing but the graph that was captured with it.

    Parameters
    ----------
    slot
        A slot of an arena, with or without a storage.
    but_for_graph
        Whether the slot counts as idle while only its own graph refers to it.
    """
    if not COUNTED:  # each buffer has a storage of its own then, which dies with its last reference
        return slot.storage is None or bool(slot.storage.expired())
    try:
        leases = len(_torch.KEPT[slot.cdata]) - KEEPING
    except KeyError:  # an exception came before the slot was handed out for the first time
        return slot.storage is None
    if leases and not but_for_graph:
        return False
    # In C++ the template and the Python object refer to the storage; in Python the slot refers to this object.
    return _use_count(slot.cdata) == 2 and getrefcount(slot.storage) == UNUSED + leases


_start_of = operator.attrgetter("start")


class SizeClass:
    """The slots that requests of one kind get.

    Guarantees that one thread alone gets a slot that it pops, and that a program which repeats its steps gets the same
    slots in the same order in each of them. ``Arena.empty`` pops without a call and falls back on :meth:`search`.

    Parameters
    ----------
    identity
        What the requests have in common: for an arena the shape and the type.
    alloc_stream
        The stream that the slots are handed out on. Their memory is reused in the order of this stream.
    bucket
        The name of the bucket that the slots lie in.
    capture
        The CUDA graph capture that the slots are handed out in; 0 for none.
    """

    __slots__ = ("alloc_stream", "bucket", "capture", "first", "identity", "key", "ready", "slots")

    def __init__(self, identity: object, alloc_stream: int, bucket: str, capture: int) -> None:
        self.key: tuple[object, int, str, int] = identity, alloc_stream, bucket, capture
        self.identity: Any = identity
        self.alloc_stream: int = alloc_stream
        self.bucket: str = bucket
        self.capture: int = capture
        self.slots: list[Slot] = []  # handed out, the last at the end; some may be idle again
        self.ready: list[Slot] = []  # found to be idle by a search, the lowest at the end
        # The slot that was handed out first since the last search of all slots. When it is idle again, the program has
        # begun its next step: a search hands out all idle slots from the lowest on, as in the step before.
        self.first: Slot | None = None

    def search(self, is_idle: Callable[[Slot, bool], bool]) -> Slot | None:
        """Take an idle slot: one of the last handed out, or else the lowest of all idle ones. None if all are in use.

        The former finds the buffer that comes and goes beside many that stay. The latter pays once for all slots that
        have become idle. The caller has the lock of the layout.
        """
        slots, ready, own_graph = self.slots, self.ready, self.capture > 0
        step_begins = self.first is None or is_idle(self.first, own_graph)
        if not step_begins:
            with contextlib.suppress(IndexError):
                return ready.pop()
            for slot in slots[: -PROBES - 1 : -1]:
                if self.remove(slot, is_idle):
                    return slot
            if len(slots) <= PROBES:
                return None
        busy: list[Slot] = []
        try:
            while slots:
                slot = slots.pop()
                (ready if is_idle(slot, own_graph) else busy).append(slot)
        except IndexError:  # another thread was faster
            pass
        finally:
            slots[:0] = busy[::-1]
        ready.sort(key=_start_of, reverse=True)
        try:
            lowest: Slot | None = ready.pop()
        except IndexError:
            lowest = None
        if step_begins:
            self.first = lowest
        return lowest

    def remove(self, slot: Slot, is_idle: Callable[[Slot, bool], bool], *, of_graph: bool = True) -> bool:
        """Take ``slot``, which was handed out, if it is idle; return whether it is the caller's now.

        Parameters
        ----------
        slot
            A slot of this class.
        is_idle
            :func:`idle`, or what stands for it without memory.
        of_graph
            Whether a slot that only its own graph refers to counts as idle.
        """
        own_graph = of_graph and self.capture > 0
        if not is_idle(slot, own_graph):
            return False
        try:
            self.slots.remove(slot)
        except ValueError:  # another thread was faster
            return False
        if is_idle(slot, own_graph):  # another thread may have handed it out in between
            return True
        self.slots.append(slot)
        return False
