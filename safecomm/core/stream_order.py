"""What the program's own events order: an allocation stream that waits behind a use gets the memory back at once.

A program that uses memory on another stream orders the allocation stream after that use itself. It records an event
behind the use, and lets the allocation stream wait for it, perhaps by way of further streams. ``StreamOrder`` is told
of each record and of each wait. To an event it gives a *note*: for each stream, up to which use the event is known to
be recorded behind the uses there. A stream that waits for the event knows the same from then on, and tells it to the
events that are recorded on it. These are vector clocks, of the few streams whose uses are still held.

A note is a hint, and no proof: who records the event again in C++, or in another process, is not seen. So a
release does not rest on the note alone. The waiting stream is also ordered after the hold's own event, which lies
before the program's. If the note is right, that adds nothing to what the device waits for. If it is wrong, the stream
waits longer than the program has asked for, and no memory is given out too early.
"""

from __future__ import annotations

from safecomm.core.holds import Holds, first_of
from safecomm.core.streams import capture_of
from safecomm.core.uses import SCAN, Events, StreamKey, Uses, Waiting

Note = tuple[int, dict[StreamKey, int]]
"""A capture, 0 for none, and by stream of uses: all uses there in that capture with a lower serial lie before."""


class StreamOrder:
    """Which uses each stream is known to be ordered after.

    Parameters
    ----------
    ledger, uses
        The holds of the process, and what is released of them.
    """

    def __init__(self, ledger: Holds, uses: Uses) -> None:
        self._ledger, self._streams, self._uses = ledger, ledger.streams, uses
        # What each stream has waited for. Each is replaced and never changed, because threads may share a stream: one
        # of two that wait at once may get lost, which only keeps memory until the device is there.
        self._behind: dict[StreamKey, Note] = {}

    def recorded(self, index: int, stream: int) -> Note | None:
        """Return the note of an event that is about to be recorded on ``stream``; None if it tells of no use.

        To be asked before the event is recorded: another thread may use more memory there in between. No need to ask
        while nothing is held.
        """
        here = stream, index
        used = here in self._uses.used_on
        if not used and here not in self._behind:
            return None
        capture = capture_of(self._streams, stream)
        waiting: Waiting | None = self._uses.queues.get((Waiting, *here, capture)) if used else None
        if waiting is not None and waiting.holds:
            waiting.look(at_newest=True)
        known = self._known(here, capture) if here in self._behind else {}
        if used:
            known[here] = next(self._ledger.serials)
        return (capture, known) if known else None

    def waited(self, index: int, stream: int, note: Note) -> None:
        """Release what ``note`` tells of and was allocated on ``stream``, which waits for the event of ``note``."""
        here = stream, index
        capture, known = note
        if capture != capture_of(self._streams, stream):
            return  # an external event, which is where the graph was replayed last
        left: dict[StreamKey, int] = {}
        for used_on, serial in known.items():
            if used_on != here:
                queue = self._events(used_on, capture)
                if queue is not None and self._release(queue, serial, here):
                    left[used_on] = serial
        if left:
            behind_in, behind = self._behind.get(here, (capture, {}))
            for used_on, serial in behind.items() if behind_in == capture else ():
                left[used_on] = max(serial, left.get(used_on, 0))
            self._behind[here] = capture, left

    def wait_stream(self, index: int, stream: int, other: int) -> None:
        """Order ``stream`` after what ``other`` has to do now, and release what that makes safe.

        The same as to record an event on the one, and to let the other wait for it, with an event of the pool.
        """
        note = self.recorded(index, other)
        event = self._streams.record_event(index, other)
        self._streams.wait_event(index, stream, event)
        if not capture_of(self._streams, other):  # an event of a capture stays the graph's
            self._streams.recycle_event(index, event)
        if note is not None:
            self.waited(index, stream, note)

    def _release(self, queue: Events, serial: int, waiting: StreamKey) -> bool:
        """Release those holds of ``queue`` below ``serial`` that were allocated on the stream that waits for them.

        Returns whether others may be left.
        """
        stream, index = waiting
        with self._ledger.lock:
            holds = first_of(queue.holds, SCAN)
            left = len(holds) == SCAN
            for hold in holds:
                if hold.serial >= serial:
                    break
                if hold.event is not None and hold.alloc_stream == stream and queue.index == index:
                    # For each one's event, although the last one's is behind the others' if all were recorded on one
                    # stream: another stream may have got the handle of one that was destroyed.
                    self._streams.wait_event(index, stream, hold.event)
                    self._ledger.release(hold)
                else:
                    left = True
        return left

    def _known(self, here: StreamKey, capture: int) -> dict[StreamKey, int]:
        """Return, as a new dictionary, what the stream is behind of all that is still held in ``capture``."""
        behind_in, behind = self._behind.get(here, (capture, {}))
        if behind_in == capture:
            known = {
                used_on: serial
                for used_on, serial in behind.items()
                if (queue := self._events(used_on, capture)) is not None
                and any(hold.serial < serial for hold in first_of(queue.holds, 1))
            }
            if known:
                return known
        elif not behind_in:
            return {}  # the stream is captured now, and runs later again
        self._behind.pop(here, None)
        return {}

    def _events(self, used_on: StreamKey, capture: int) -> Events | None:
        """Return the uses on that stream, in that capture, that have an event; None if there are none."""
        queue: Events | None = self._uses.queues.get((Events, *used_on, capture))
        return queue if queue is not None and queue.holds else None
