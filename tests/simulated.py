"""safecomm's calls, as its collectives make them, on the simulated device: ``tests/device.py`` and ``tests/fakes.py``.

The ledger under test is the real one; only its ``Streams`` and c10d's works are replaced.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import fakes
import torch
from device import INDEX as INDEX
from device import SimulatedDevice as SimulatedDevice
from device import Violation as Violation
from fakes import FakeEvent as FakeEvent
from fakes import FakeGraph as FakeGraph
from fakes import FakeHostWork as FakeHostWork
from fakes import FakeStream as FakeStream
from fakes import events_of_torch as events_of_torch

from safecomm.collectives import backends
from safecomm.collectives.routes import Routes
from safecomm.core import ledger as ledgers
from safecomm.core.ledger import Ledger
from safecomm.core.streams import HOST, alloc_stream_of
from safecomm.core.work import StagedWork, Work, waited_for_once

ledgers.INTERVAL = 0  # of the ledgers that are made from here on: each call looks at what is held


class FakeNccl:
    """Stands for ProcessGroupNCCL."""


class FakeNccl2:
    """Stands for ProcessGroupNCCL2."""


class FakeGloo:
    """Stands for ProcessGroupGloo."""


BACKENDS = {"nccl": FakeNccl(), "nccl2": FakeNccl2(), "gloo": FakeGloo()}
"""The backends' objects, by whose classes the ledger tells them apart."""

backends.CLASSES.update({FakeNccl: backends.NCCL, FakeNccl2: backends.NCCL2, FakeGloo: backends.GLOO})


class FakeGroup(fakes.FakeGroup):
    """A process group, whose backend safecomm knows by its class."""

    def _get_backend(self, device: torch.device) -> object:
        return BACKENDS[self.backend]


# --- safecomm's calls, as its collectives make them ---------------------------------------------------------


@dataclass(eq=False)
class Launched:
    """An asynchronous collective, as long as the program keeps its handle."""

    op: str  # its name in the ledger, which no other call has
    work: Work
    inner: Any
    alloc_streams: set[int | None]  # of the memory that it uses
    capture: int


def routes_of(ledger: Ledger) -> Routes:
    """Return the routes of the groups whose calls ``ledger`` holds."""
    routes: Routes | None = vars(ledger).get("routes")
    if routes is None:
        routes = vars(ledger)["routes"] = Routes(ledger)
    return routes


_ops = map("all_reduce {}".format, itertools.count())


def call(
    ledger: Ledger,
    group: FakeGroup,
    tensors: list[torch.Tensor],
    *,
    staged: bool = False,
    p2p: bool = False,
    receives: bool = False,
    fate: str = "",
    index: int = INDEX,
) -> Launched:
    """Launch an asynchronous collective on ``tensors``, the first of them its output, from the current stream."""
    if ledger.nonempty:
        ledger.sweep()
    device = group.device
    device.settle()
    inner: Any
    if index == HOST:
        inner = FakeHostWork(group, tensors, p2p, fate)
    else:
        inner = group.launch(tensors, staged=staged, p2p=p2p, receives=receives, fate=fate)
    op = next(_ops)
    storages = tuple(tensor.untyped_storage() for tensor in tensors)
    handle = waited_for_once() if p2p and group.backend == "gloo" else Work()
    frame = sys._getframe(1)
    now = device.here()
    if staged and not p2p and index != HOST and not now.capture:  # as holding.hold_list() does
        here = {alloc_stream_of(ledger.streams, storage, HOST) for storage in storages} == {now.handle}
        handle = StagedWork()
        handle.stream = now.handle
        route = routes_of(ledger).of(group, index)
        route.hold(handle, op, inner, storages, now.handle if here else None, frame)
    elif staged or p2p:
        routes_of(ledger).hold(handle, op, inner, group, index, storages, frame, staged=staged, unordered=p2p)
    else:
        streams = {HOST if index == HOST else alloc_stream_of(ledger.streams, storage, HOST) for storage in storages}
        alloc_stream = streams.pop() if len(streams) == 1 else None  # HOST is no stream: no memory has none
        routes_of(ledger).of(group, index).hold(handle, op, inner, storages, alloc_stream, frame)
    return Launched(
        op, handle, inner, {block.alloc_stream for block in device.blocks_of(tensors)}, device.here().capture
    )


def call_sync(ledger: Ledger, group: FakeGroup, tensors: list[torch.Tensor]) -> str:
    """Run a synchronous collective, a kernel on the current stream, and return its name."""
    if ledger.nonempty:
        ledger.sweep()
    group.device.settle()
    inner = group.run(tensors)
    if inner is not None:
        routes_of(ledger).of(group, INDEX).wait_for(inner)
    op = next(_ops)
    storages = tuple(tensor.untyped_storage() for tensor in tensors)
    ledger.hand_off(op, group, INDEX, storages, sys._getframe(1))
    return op
