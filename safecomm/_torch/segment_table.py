"""The table that answers on which stream memory was allocated: by the driver's id of a segment, and by anchors.

The core's ``allocation.py`` fills it. The hot path asks it with each call, so it is there twice: here, with ctypes, and
in C (``_driver.c``), which is optional and does the same step by step. The tests compare their answers.
"""

from __future__ import annotations

from collections.abc import Callable

from safecomm._torch.driver import BUFFER_ID, new_question, pointer_attribute, questions

Segment = tuple[int | None, int, int]
"""What is known of a piece of memory: its stream, the first address, and the one after the last."""

UNKNOWN: Segment = (None, 0, 0)
"""The segment of memory whose stream is unknown."""

GRANULE = 21
"""Binary logarithm of what the driver maps at least: 2 MiB, which is also what the allocator's small segments have."""

_take, _give = questions.pop, questions.append


def buffer_id(pointer: int) -> int | None:
    """Return the driver's id of the allocation at ``pointer``; None if it knows of none, or if there is no driver."""
    if pointer_attribute is None:
        return None
    try:
        question = _take()
    except IndexError:
        question = new_question()
    argument, answer, reference = question
    argument.value = pointer
    failed = pointer_attribute(reference, BUFFER_ID, argument)
    identity = answer.value
    _give(question)
    return None if failed else identity


class SegmentTable:
    """What is known of segments, and where the driver need not be asked; the core's ``Streams`` says what it answers.

    ``missed`` is called with an address and the id of its segment where the table does not have the segment.
    """

    def __init__(self, missed: Callable[[int, int], Segment]) -> None:
        self._missed = missed
        # By the driver's buffer id and not by address. Once a segment is unmapped, its address can come back as a
        # segment of another stream: it did, in the first program tried.
        self._segments: dict[int, Segment] = {}
        self._known = self._segments.get
        # The streams of segments that stay mapped because an anchor lies in them, by the number of the granule.
        self._anchored: dict[int, int] = {}
        self._anchored_at = self._anchored.get

    def alloc_stream(self, pointer: int, other: int | None = None) -> int | None:
        anchored = self._anchored_at(pointer >> GRANULE)
        if anchored is not None and (other is None or self._anchored_at(other >> GRANULE) == anchored):
            return anchored
        identity = buffer_id(pointer)
        stream, start, end = UNKNOWN if identity is None else self._known(identity) or self._missed(pointer, identity)
        # Where both lie in one segment, which the driver has just confirmed for the first, it need not be asked again.
        if other is None or start <= other < end or self.alloc_stream(other) == stream:
            return stream
        return None

    def all_allocated_on(self, stream: int, pointers: list[int]) -> bool:
        known = 0
        for pointer in pointers:
            # In the segment of one before it, which the driver has just confirmed; or where it need not be asked.
            if pointer < known or self._anchored_at(pointer >> GRANULE) == stream:
                continue
            identity = buffer_id(pointer)
            found, _, known = UNKNOWN if identity is None else self._known(identity) or self._missed(pointer, identity)
            if found != stream:
                return False
        return True

    def keep(self, identity: int, stream: int | None, start: int, end: int) -> None:
        """Keep what is known of the segment with the driver's id ``identity``."""
        self._segments[identity] = (stream, start, end)

    def clear(self) -> None:
        """Forget all segments, but not the anchors."""
        self._segments.clear()

    def anchor(self, granule: int, stream: int | None) -> None:
        """From now on ``stream`` is the answer for all of ``granule``, unasked; None: the driver is asked again."""
        if stream is None:
            self._anchored.pop(granule, None)
        else:
            self._anchored[granule] = stream
