"""c10d's handle of an asynchronous call that an engine has run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.errors import PeerTimeoutError


class Failing(Protocol):
    """An engine, as far as a handle needs it."""

    index: int

    def raise_failure(self) -> None:
        """Raise PeerTimeoutError if a call has given up."""


class LaunchedKernel(c10d.Work):
    """c10d's handle of an asynchronous call: a kernel on the stream that it was called on."""

    def __init__(self, engine: Failing, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._engine = engine
        self._outputs = outputs
        self._stream = 0
        self._event: Any = None
        if engine.index != HOST:
            self._stream = LEDGER.current(engine.index)
            self._event = LEDGER.streams.record_event(engine.index, self._stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the kernel; with ``timeout``, block the host until it is over."""
        engine = self._engine
        if self._event is not None:
            if LEDGER.current(engine.index) != self._stream:
                LEDGER.streams.wait_event(engine.index, LEDGER.current(engine.index), self._event)
            if timeout is not None:
                self._event.synchronize()
        engine.raise_failure()
        return True

    def block_current_stream(self) -> None:
        """Order the current stream after the kernel."""
        self.wait()

    synchronize = block_current_stream

    def is_completed(self) -> bool:
        """Return whether the kernel is over."""
        return self._event is None or LEDGER.streams.query_event(self._event)

    def is_success(self) -> bool:
        """Return whether no peer is known to have been late."""
        return self.exception() is None

    def exception(self) -> PeerTimeoutError | None:
        """Return the error of a call of the group that has given up; None if none has."""
        try:
            self._engine.raise_failure()
        except PeerTimeoutError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the outputs."""
        index = self._engine.index
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=None if index == HOST else [index]
        )
        if index == HOST:
            future.set_result(self._outputs)
        else:
            side = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            side.wait_event(self._event)
            with torch.cuda.stream(side):  # the future orders what waits for it after the stream it was filled on
                future.set_result(self._outputs)
        return future
