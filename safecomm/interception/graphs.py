"""graph(): ``torch.cuda.graph`` in which collectives behave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed

from safecomm import arguments
from safecomm.core import captures
from safecomm.core.captures import CapturedGraph
from safecomm.core.drain import await_before_capture
from safecomm.core.ledger import LEDGER
from safecomm.errors import CaptureBoundaryError
from safecomm.interception import replacing
from safecomm.interception.record_stream import avoid_record_streams

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]


class graph:  # noqa: N801
    """Capture a CUDA graph whose collectives have flat memory, no aliasing on replay, and clear errors.

    ``torch.cuda.graph`` with the same arguments, and those that newer versions of torch add (``check_input_liveness``).
    Beyond it:

    - Before the capture, the host waits for all eager works (:func:`settle_before_capture`), and ``groups`` are used
      once, so that each has its communicator. All ranks of these groups have to do the same.
    - Inside, what collectives use is held by edges of the graph, and :class:`avoid_record_streams` is on.
    - At the end, a work that was not waited for raises CaptureBoundaryError with its call site.
    - Memory from outside that a captured collective reads or writes is the graph's until ``cuda_graph.reset()`` or its
      death. ``cuda_graph.replay()`` checks first that it is still there.

    Several graphs that never run at the same time share memory through torch's ``pool``: what the collectives of one
    have freed, the next capture gets. Capture the largest first; a smaller one then needs nothing more.

    Entering gives a :class:`CapturedGraph`, which tells what the graph holds.

    Raises
    ------
    CaptureBoundaryError
        On leaving, for works that were not joined. The graph is reset then.
    SafecommError
        On entering, if ``SAFECOMM_REPLACE=0`` forbids it.

    Examples
    --------
    >>> cuda_graph = torch.cuda.CUDAGraph()
    >>> with safecomm.graph(cuda_graph) as captured:
    ...     safecomm.all_reduce(tensor)
    >>> cuda_graph.replay()
    """

    def __init__(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: CaptureErrorMode = "global",
        *,
        groups: Iterable[torch.distributed.ProcessGroup] = (),
        **newer: Any,
    ) -> None:
        arguments.check("graph", arguments.is_a("a torch.cuda.CUDAGraph", torch.cuda.CUDAGraph), cuda_graph=cuda_graph)
        arguments.check("graph", arguments.is_a("a torch.cuda.Stream", torch.cuda.Stream, type(None)), stream=stream)
        arguments.check("graph", arguments.is_a("what pool() of a graph returns", tuple, type(None)), pool=pool)
        modes = arguments.one_of(get_args(CaptureErrorMode))
        arguments.check("graph", modes, capture_error_mode=capture_error_mode)
        arguments.check("graph", arguments.is_a("process groups", Iterable), groups=groups)
        self._cuda_graph = cuda_graph
        self._groups = tuple(groups)
        for one in self._groups:
            arguments.check("graph", arguments.MEMBER, groups=one)
        self._capture = torch.cuda.graph(
            cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode, **newer
        )
        self._inside = contextlib.ExitStack()
        self._captured: CapturedGraph | None = None

    def __repr__(self) -> str:
        return f"<graph(): {self._captured or 'not entered'}>"

    def __enter__(self) -> CapturedGraph:
        replacing.ask("graph()")
        settle_before_capture()
        for group in self._groups:
            torch.distributed.all_reduce(torch.zeros(1, device="cuda"), group=group)
        with self._inside as inside:
            inside.enter_context(avoid_record_streams())
            self._capture.__enter__()
            captured = next(one for one in captures.RECORDING.values() if one._graph() is self._cuda_graph)
            self._captured = captured
            self._inside = inside.pop_all()
        return captured

    def __exit__(self, *error: object) -> None:
        with self._inside:
            try:
                self._capture.__exit__(*error)
            except BaseException as failed:
                # torch leaves its stream the current one if the capture can't be ended.
                self._capture.stream_ctx.__exit__(*error)
                # What went wrong inside is why works were not waited for.
                if error[0] is None or not isinstance(failed, CaptureBoundaryError):
                    raise


def settle_before_capture(timeout: timedelta | float | None = None) -> None:
    """Block the host until all eager works are over, so that a capture may wait for them too.

    Inside a CUDA graph capture, ``wait()`` for a work that was launched before it is refused. After this it does
    nothing, because there is nothing left to wait for. Memory comes back as by ``drain(wait=True)``.

    Raises
    ------
    PendingWorkError
        If works are not over after ``timeout``, in seconds or as a timedelta.
    CaptureBoundaryError
        Inside a capture.

    Examples
    --------
    >>> work = dist.all_reduce(tensor, async_op=True)
    >>> settle_before_capture()
    """
    await_before_capture(LEDGER, arguments.seconds("settle_before_capture", timeout=timeout))
