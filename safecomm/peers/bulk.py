"""Large calls: how an engine launches the ring's kernels, and the one order that those of a device have.

A large call is bound by the link, so two of them at once are not faster than one after the other, and programs that
wait for peers in several kernels could keep each other from running. So those of all groups of a device run one after
the other, in the order in which they are called, whatever streams they are on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from safecomm.collectives.table import GATHER, REDUCE, SCATTER
from safecomm.core import captures
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.peers.limits import COPIED
from safecomm.peers.order import Order
from safecomm.peers.room import RING_THREADS, ring_registers
from safecomm.peers.staging import RING_PHASES, RING_PROGRAMS, StagingLayout

_MOST = (1 << 31) - 1
"""Elements, which the kernels count in 32 bits."""

_REDUCED = {
    torch.bfloat16: "float32", torch.float16: "float32", torch.float32: "float32", torch.float64: "float64",
    torch.int32: "int32", torch.int64: "int64",
}  # fmt: skip
"""The types that are reduced, and in what. On two H100, 32 MiB of uint8 took 1.53 of NCCL's time, and of int8 1.01."""

_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}

_AVG = 1

Launcher = Callable[..., None]


def table(bases: list[int]) -> list[int]:
    """Return the ring's part of a group's table, for ranks whose staging begins at ``bases``."""
    return [0, *bases, *[0] * RING_PROGRAMS]


def around(layout: StagingLayout, collective: str) -> int:
    """Return the bytes of a call in which each program uses each of its phases, and one of them a second time."""
    sent = layout.ring_piece * (layout.world if collective == REDUCE else 1)
    return RING_PROGRAMS * (RING_PHASES + 1) * sent


class _Device:
    """The order of the large calls on a device; held by the engines that have some."""

    def __init__(self, index: int) -> None:
        self.lock = threading.Lock()  # between putting a call in order and launching it, no other may come
        self.order = Order(LEDGER.streams, index)

    def launch(self, launcher: Launcher, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch a kernel on ``stream`` after the one before."""
        with self.lock:
            capture = LEDGER.streams.capture(stream) if stream else 0
            if not capture:
                self.order.follow(stream)
            elif self.order.follow_captured(stream, capture):
                captures.RECORDING[capture].before_replay.append(self.before_replay)
            launcher(stream, *arguments)

    def before_replay(self, stream: int) -> None:
        """Put a replay that is about to be launched on ``stream`` in order."""
        with self.lock:
            self.order.follow(stream)

    def before_capture(self, index: int) -> None:
        """See to the order of what is launched by now; a capture is about to begin on device ``index``."""
        with self.lock:
            self.order.before_capture(index)


_DEVICES: weakref.WeakValueDictionary[int, _Device] = weakref.WeakValueDictionary()


class Bulk:
    """The large calls of one engine, on device ``index``, for rank ``rank``.

    ``kernels``: the module that compiles. ``ticket``: where its part of the group's table begins (:func:`table`).
    """

    def __init__(self, kernels: Any, layout: StagingLayout, index: int, rank: int, ticket: int) -> None:
        from safecomm.peers import ring  # which imports Triton

        self._ring = ring
        self._kernels = kernels
        self._layout = layout
        self._host = index == HOST
        self._device = _DEVICES.setdefault(index, _Device(index))
        self.before_capture: Callable[[int], None] = self._device.before_capture
        self._known = {
            "WORLD": layout.world,
            "ME": rank,
            "AREA": layout.ring_area,
            "FLAGS": layout.ring_flags,
            "TICKET": ticket,
            "PLACE": layout.ring_piece,
            "PHASES": RING_PHASES,
        }
        self._launchers: dict[object, Launcher] = {}

    def plan(self, collective: str, dtype: torch.dtype, count: int, number: int) -> tuple[Launcher, ...]:
        """Return what launches a call of ``count`` elements a part, unaligned and aligned; () if it is the backend's.

        ``number``: the reduce operation, as the kernels know it.
        """
        if collective == GATHER:
            if dtype not in COPIED or dtype.itemsize not in _BITS:
                return ()
        elif dtype not in _REDUCED or (number == _AVG and not dtype.is_floating_point):
            return ()
        if count * self._layout.world > _MOST:
            return ()
        block = self._layout.ring_piece // dtype.itemsize
        pieces = -(-count // (block * self._layout.world if collective == REDUCE else block))
        # What would be one iteration is two of half of the programs, so that copies overlap with what is sent.
        grid = RING_PROGRAMS if pieces > RING_PROGRAMS else min(RING_PROGRAMS // 2, pieces)
        aligned = (False, count % 16 == 0)
        return tuple(self._launcher(collective, dtype, one, grid) for one in aligned)

    def _launcher(self, collective: str, dtype: torch.dtype, aligned: bool, grid: int) -> Launcher:
        width = dtype.itemsize
        key = (collective, width if collective == GATHER else dtype, aligned, grid)
        launcher = self._launchers.get(key)
        if launcher is None:
            language = vars(self._kernels)["tl"]
            name = _BITS[width] if collective == GATHER else str(dtype).removeprefix("torch.")
            constants = {
                **self._known,
                "DTYPE": getattr(language, name),
                "BITS": getattr(language, _BITS[width]),
                "REDUCED": getattr(language, name if collective == GATHER else _REDUCED[dtype]),
                "ALIGNED": aligned,
                "BLOCK": self._layout.ring_piece // width,
            }
            if collective == REDUCE:
                kernel = self._ring.ring_reduce
            else:
                kernel = self._ring.ring_one_way
                constants["KIND"] = vars(self._ring)["SCATTER" if collective == SCATTER else "GATHER"]
            with (
                LEDGER.streams.relaxed_capture_mode()
            ):  # loading a kernel is not allowed in a capture that is not relaxed
                launcher = self._in_order(
                    self._kernels.launcher(
                        kernel, constants, grid, RING_THREADS // 32, ring_registers(self._layout.world)
                    )
                )
            self._launchers[key] = launcher
        return launcher

    def _in_order(self, launcher: Launcher) -> Launcher:
        if self._host:
            return launcher
        device = self._device

        def launch(stream: int, *arguments: int) -> None:
            device.launch(launcher, stream, arguments)

        return launch
