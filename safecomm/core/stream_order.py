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

from collections.abc import Sequence

from safecomm.core.holds import Holds, keys_of
from safecomm.core.streams import capture_of
from safecomm.core.uses import Events, StreamKey, Use, Uses, Waiting

Note = tuple[int, dict[Events, int]]
"""A capture, 0 for none, and by queue of uses in that capture: all uses there with a lower serial lie before."""


class StreamOrder:
    """Which uses each stream is known to be ordered after.

    Parameters
    ----------
    ledger, uses
        The holds of the process, and what is released of them.
    """

    def __init__(self, ledger: Holds, uses: Uses) -> None:
        self._ledger, self._streams, self._uses = ledger, ledger.streams, uses
        # What each stream has waited for. A note is replaced and never changed, because threads may share a stream. Of
        # two waits at once the note of one may be lost, and what it tells of is held until its events are complete.
        self._behind: dict[StreamKey, Note] = {}

    def recorded(self, index: int, stream: int, over: Sequence[Use] = ()) -> Note | None:
        """Return the note of an event that is about to be recorded on ``stream``; None if it tells of no use.

        To be asked before the event is recorded: another thread may use more memory there in between. No need to ask
        while nothing is held. ``over``: uses that need no event of their own.
        """
        here = stream, index
        used, behind = here in self._uses.used_on, self._behind.get(here)
        if not used and behind is None:
            return None
        capture = capture_of(self._streams, stream)
        known: dict[Events, int] = {}
        if behind is not None:
            if behind[0] == capture:
                known = {queue: serial for queue, serial in behind[1].items() if queue.has_before(serial)}
            if not known and (behind[0] or not capture):  # else the stream is captured now, and later runs again
                self._behind.pop(here, None)
        if used:
            queues = self._uses.queues
            waiting: Waiting | None = queues.get((Waiting, stream, index, capture))
            if waiting is not None and waiting.holds:
                waiting.look(at_newest=True)
            events: Events | None = queues.get((Events, stream, index, capture))
            if events is not None and len(events.holds) > len(over):
                if events.eventless:
                    events.record_events()
                known[events] = next(self._ledger.serials)
        return (capture, known) if known else None

    def waited(self, index: int, stream: int, note: Note) -> None:
        """Release what ``note`` tells of and was allocated on ``stream``, which waits for the event of ``note``."""
        capture, known = note
        if capture != capture_of(self._streams, stream):
            return  # an external event, which is where the graph was replayed last
        left = {
            queue: serial
            for queue, serial in known.items()
            if (queue.stream != stream or queue.index != index)
            and queue.has_before(serial)
            and self._release(queue, serial, index, stream)
        }
        if left:
            here = stream, index
            behind_in, behind = self._behind.get(here, (capture, left))
            for queue, serial in behind.items() if behind_in == capture else ():
                left[queue] = max(serial, left.get(queue, 0))
            self._behind[here] = capture, left

    def wait_stream(self, index: int, stream: int, other: int) -> None:
        """Order ``stream`` after what ``other`` has to do now, and release what that makes safe.

        The same as to record an event on ``other``, and to let ``stream`` wait for it, with an event of the pool. No
        other code can record that again, so an eventless use that lies before it needs no event of its own.
        """
        streams, ledger = self._streams, self._ledger
        events: Events | None = self._uses.queues.get((Events, other, index, 0))
        over = events.allocated_on(stream) if events is not None and events.eventless else ()
        note = self.recorded(index, other, over)
        event = streams.record_event(index, other)
        streams.wait_event(index, stream, event)
        if not capture_of(streams, other):  # an event of a capture stays the graph's
            streams.recycle_event(index, event)
            for use in over:
                with ledger.lock:
                    ledger.release(use)
                use.queue.eventless.pop(use, None)
        if note is not None:
            self.waited(index, stream, note)

    def _release(self, queue: Events, serial: int, index: int, stream: int) -> bool:
        """Release those of ``queue`` below ``serial`` that were allocated on ``stream``, which waits for them.

        Returns whether others may be left.
        """
        left = False
        with self._ledger.lock:
            for hold in keys_of(queue.holds):
                if hold.serial >= serial:
                    break
                if hold.event is not None and hold.alloc_stream == stream and queue.index == index:
                    # For each one's event, and not the last one's alone: if the stream was destroyed and another one
                    # has got its handle, the last event is not behind the others.
                    self._streams.wait_event(index, stream, hold.event)
                    self._ledger.release(hold)
                else:
                    left = True
        return left
