"""Every exception that safecomm raises on its own account.

Wrong arguments are not here: they raise what ``torch.distributed`` raises.
"""

from __future__ import annotations

from typing import Any


class SafecommError(RuntimeError):
    """Base of all errors that safecomm itself raises."""


class CaptureBoundaryError(SafecommError):
    """A work was waited on the other side of a CUDA graph capture from where it was launched.

    Raised before CUDA sees the wait, so that the capture stays usable. Wait for eager works
    before the capture begins, and for captured works inside the same capture.
    """


class PendingWorkError(SafecommError):
    """Works did not complete in the time given, so what they hold could not be given back.

    The message names each work's operation, bytes and call site. Nothing was released.
    """


class RecordStreamError(SafecommError):
    """``record_stream`` was called inside of ``avoid_record_streams(mode="raise")``, or bypassed a strict one.

    The message names the call site, or how many bytes are freed but unusable. The tensor was not recorded.
    """


class LiveGraphError(SafecommError):
    """A group can't be destroyed while a CUDA graph is alive that runs its collectives.

    NCCL waits for such a graph without end. ``graphs`` lists them; reset each (``for graph in error.graphs:
    graph.reset()``), and destroy the group again. Nothing was destroyed.

    Where captures were not seen, it is raised after torch has begun to destroy the group and has not returned in time.
    ``graphs`` lists all that are alive then.
    """

    def __init__(self, message: str, graphs: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.graphs = graphs


class StaleGraphError(SafecommError):
    """A CUDA graph would read or write memory that is no longer what was captured.

    The message names the collective and its call site. Nothing was replayed; capture the graph again.
    """


class ArenaError(SafecommError):
    """An arena was used in a way that it can't be: after its end, in another process, or twice on one device.

    The message names the operation and what to do. Nothing was lost: what the arena has handed out stays valid.
    """


class ArenaFullError(ArenaError):
    """An arena with ``full="raise"`` has no room for a request.

    The message names the request, the call site, and the size with which there would have been room.
    """


class LowLatencyError(SafecommError):
    """``low_latency()`` was used in a way that it can't be, or with ``check=True`` the ranks called different things.

    The message names the call, and what each rank did. Nothing was launched.
    """


class InvarianceError(SafecommError):
    """Inside of ``invariant()`` a reduction can't be made in the order of the ranks, or torch does not let it.

    The message names the call site, and what to do. Nothing was launched.
    """


class PeerTimeoutError(LowLatencyError):
    """A rank has waited for its peers in a call under ``low_latency()`` for longer than the timeout.

    The message names group, rank, call and call site. The results of that call and of later ones are NaN, and the
    group's calls raise this from then on: as after NCCL's own timeouts, the group is lost.
    """
