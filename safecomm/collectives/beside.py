"""A call beside the current stream: on a stream of its own, in order with what is before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside(side: torch.cuda.Stream) -> Iterator[None]:
    """Make ``side`` the current stream of its device inside, after all that is on the current one now.

    Of an exception the current stream waits for it, since the caller gets nothing to wait for.
    """
    current = torch.cuda.current_stream(side.device_index)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    except BaseException:
        current.wait_stream(side)
        raise
