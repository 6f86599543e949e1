"""The one ``release()``, and what is asked before it: see the rules at the head of ``ledger.py``.

Works, handoffs and recorded uses are decided about in three files. All of them come here to release, and share what
is the same for every hold: on which streams the memory can be given out again, whether one of these is being captured
just now, and whether the memory would come back at all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator

from safecomm import _torch
from safecomm.core.holds import Hold, Observer, Queue
from safecomm.core.streams import HOST, Streams, alloc_stream_of


class Rules:
    """What all three kinds of holds share.

    Parameters
    ----------
    streams
        Answers for the device.
    lag
        Holds of one queue that rule 3 leaves alone, however large they are.
    """

    def __init__(self, streams: Streams, lag: int) -> None:
        self.streams = streams
        self.lag = lag
        self.interval: float = 0  # seconds in which events are looked at once, while few bytes come
        self.nonempty: dict[Queue, object] = {}  # the queues that have holds: none if all works are waited for
        self.quarantine: dict[Hold, None] = {}  # what has failed
        self.observer: Observer | None = None
        self.serials: Iterator[int] = itertools.count()  # of the holds that have events
        # Around whatever polls an event of a hold or looks at recorded uses, which takes several steps: another thread
        # must not recycle the event in between. No collective takes the lock while there are only works.
        self.lock: threading.RLock = threading.RLock()

    def release(self, hold: Hold) -> None:
        """Let go of the memory of ``hold``: every release of the package is made here.

        The caller has made sure that each stream in whose order the memory can be given out again is ordered after the
        last use, or that the last use is complete. Releasing again does nothing. For a hold with an event under
        :attr:`lock`.
        """
        queue = hold.queue
        if hold.aliases or hold.in_a_table:
            hold.on_release()
        hold.storages = ()
        if (observer := self.observer) is not None:
            observer.released(hold)
        if self.quarantine:
            self.quarantine.pop(hold, None)
        # Whoever takes the hold out of its queue recycles the event: it could be recycled twice else.
        if queue.holds.pop(hold, queue) is not queue:
            if not queue.holds:
                queue.note_empty()
            if hold.event is not None and not queue.capture:  # an event of a capture stays the graph's
                self.streams.recycle_event(queue.index, hold.event)

    def release_all(self, holds: Iterable[Hold]) -> None:
        """Release ``holds``, whose allocation streams were ordered after their last use, or whose capture is over."""
        for hold in list(holds):
            with self.lock:
                self.release(hold)

    def alloc_streams(self, hold: Hold) -> set[int | None]:
        """Return the streams that the memory of ``hold`` was allocated on; None among them if one is unknown."""
        if hold.event is not None and hold.alloc_stream is not None:
            return {hold.alloc_stream}
        streams = {alloc_stream_of(self.streams, storage, HOST) for storage in hold.storages}
        return streams - {HOST}

    def captured_now(self, hold: Hold, streams: Iterable[int | None] | None = None) -> bool:
        """Return whether one of ``streams``, which releasing the eager ``hold`` would order, is captured just now.

        Without ``streams``: one of those that the memory was allocated on.
        """
        if hold.queue.index == HOST or hold.queue.capture:
            return False
        ordered = self.alloc_streams(hold) if streams is None else streams
        return any(stream and self.streams.capture(stream) for stream in ordered)

    def only_holder(self, hold: Hold) -> bool:
        """Return whether the memory of ``hold`` would come back if it was released."""
        return all(_torch.only_holder(storage) for storage in hold.storages)
