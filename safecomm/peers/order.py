"""The order of a group's calls: kernels that wait for their peers never run at once, whatever streams they are on.

Two of them at once could take each other's data, and each rank would pair them differently. So a call on another stream
than the last one begins after that. In a CUDA graph capture that is an edge of the graph; and because a graph runs when
it is replayed, each replay is put in order with what is not captured.
"""

from __future__ import annotations

from typing import Any

from safecomm.core.streams import Streams


class Order:
    """The last calls of a group on device ``index``: the eager one, or replay, and that of each capture."""

    def __init__(self, streams: Streams, index: int) -> None:
        self._streams = streams
        self._index = index
        self._eager: int | None = None  # the stream of the last eager call, or replay of a graph
        self._event: Any = None  # recorded there, if that stream may have come into a capture since
        self._captured: dict[int, int] = {}  # by capture, the stream of its last call

    def follow(self, stream: int) -> None:
        """Let what ``stream`` is given next begin after the last eager call or replay."""
        last, self._eager = self._eager, stream
        event, self._event = self._event, None
        if last is not None and last != stream:
            event = event or self._streams.record_event(self._index, last)
            self._streams.wait_event(self._index, stream, event)
        if event is not None:
            self._streams.recycle_event(self._index, event)

    def last_event(self) -> Any:
        """Return an event after the last eager call or replay; None if there was none."""
        if self._event is None and self._eager is not None:
            self._event = self._streams.record_event(self._index, self._eager)
        return self._event

    def before_capture(self, index: int) -> None:
        """Note where the last eager call is: a stream that is being captured can't be asked any more."""
        if index == self._index:
            self.last_event()

    def follow_captured(self, stream: int, capture: int) -> bool:
        """Let what ``stream`` is given next begin after the last call of ``capture``; return whether it is the first.

        :meth:`follow` puts the replays of a capture in order.
        """
        last = self._captured.get(capture)
        self._captured[capture] = stream
        if last is not None and last != stream:
            self._streams.wait_event(self._index, stream, self._streams.record_event(self._index, last))
        return last is None
