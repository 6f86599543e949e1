"""collective_log(): which collectives ran, how much they moved, and how fast, by line of the program.

What is told is what torch's flight recorder has of each call: it records synchronous calls too, and those from C++. It
costs safecomm nothing, and is on if the process began with ``TORCH_FR_BUFFER_SIZE`` (``TORCH_NCCL_TRACE_BUFFER_SIZE``
before torch 2.9), as it does under ``safecomm compare``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from safecomm.diagnostics.snapshot import Stacks
from safecomm.diagnostics.table import Table
from safecomm.diagnostics.units import mib

if TYPE_CHECKING:
    from safecomm._torch import FlightEntry

_BYTES = {
    "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Of an element, by the name of its type; of others, which begin with Float8, 1."""

_TIMES = (("all_?reduce", 2), ("reduce_?scatter|all_?gather|all_?to_?all", 1))
"""How often the other ranks' share of the bytes passes by a link; all bytes of other operations do once.

See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""


@dataclass(frozen=True)
class LoggedCall:
    """Calls of one operation by one line in one group, of one size. Bytes, us, and GB/s (10^9 bytes a second)."""

    op: str
    group: str
    at: str
    """The line of the program, outside of torch and safecomm."""
    nbytes: int
    """Of one call, as nccl-tests count: of the larger of what goes in and what comes out."""
    calls: int
    total: int
    """Bytes of all of them."""
    us: float | None
    """The median, by events of the device; None where the backend tells none, as of calls that were captured."""
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None


def factor(op: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth of an operation in a group of ``ranks``, by nccl-tests' formulas.

    Examples
    --------
    >>> factor("all_reduce", 4), factor("broadcast", 4)
    (1.5, 1.0)
    """
    times = next((times for pattern, times in _TIMES if re.search(pattern, op)), 0)
    return times * (ranks - 1) / ranks if times and ranks > 1 else 1.0


def rows_of(entries: Iterable[FlightEntry], ranks: Mapping[str, int]) -> list[LoggedCall]:
    """Return the calls that the flight recorder has, those with the most bytes first.

    ``ranks``: of each group, by name.
    """
    found: dict[tuple[str, str, str, int], list[float | None]] = {}
    stacks = Stacks()
    for entry in entries:
        name = entry["profiling_name"]
        op = name.partition(":")[2] or name
        nbytes = max(
            _bytes(entry.get("input_sizes"), entry.get("input_dtypes")),
            _bytes(entry.get("output_sizes"), entry.get("output_dtypes")),
        )
        took = entry.get("duration_ms")
        at = stacks.sites[stacks.number(entry.get("frames"))]
        key = op, entry["process_group"][0], at, nbytes
        found.setdefault(key, []).append(None if took is None else 1e3 * took)
    rows = []
    for (op, group, at, nbytes), all_of_them in found.items():
        timed = [us for us in all_of_them if us]
        us = statistics.median(timed) if timed else None
        speed = None if us is None else nbytes / us / 1e3
        bus = None if speed is None or group not in ranks else speed * factor(op, ranks[group])
        rows.append(LoggedCall(op, group, at, nbytes, len(all_of_them), nbytes * len(all_of_them), us, speed, bus))
    return sorted(rows, key=lambda row: -row.total)


def _bytes(sizes: list[list[int]] | None, kinds: list[str] | None) -> int:
    return sum(math.prod(size) * _BYTES.get(kind, 1) for size, kind in zip(sizes or (), kinds or (), strict=False))


@dataclass(frozen=True)
class CollectiveLog:
    """What :func:`collective_log` has found. ``str()`` is a table."""

    rows: tuple[LoggedCall, ...]
    why: str = ""
    """Why nothing was logged; ``""`` if something could be."""

    def to_json(self) -> list[dict[str, object]]:
        """Return the rows as dictionaries."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        return self.why or str(table_of(self.rows))


def table_of(rows: Sequence[LoggedCall], most: int | None = None) -> Table:
    """Return a table of ``rows``; ``most``: of no more."""
    shown = [
        (
            row.op, row.group, mib(row.nbytes), str(row.calls), mib(row.total), _figure(row.us),
            _figure(row.algorithm_bandwidth), _figure(row.bus_bandwidth), row.at,
        )
        for row in rows[:most]
    ]  # fmt: skip
    columns = ("collective", "group", "bytes", "calls", "in all", "us", "algorithm GB/s", "bus GB/s", "called at")
    return Table("collectives", columns, shown)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def late(created: Sequence[Mapping[tuple[str, int], int]]) -> dict[int, tuple[int, float]]:
    """Return of each rank how often it was the last to call, and by how many ms more than the first in the median.

    ``created``: of each rank, when it made each call, in ns of one clock, by group and number in it.
    """
    shared = set.intersection(*map(set, created)) if len(created) > 1 else set()
    behind: dict[int, list[float]] = {}
    for call in shared:
        times = [one[call] for one in created]
        behind.setdefault(times.index(max(times)), []).append((max(times) - min(times)) / 1e6)
    return {rank: (len(ms), statistics.median(ms)) for rank, ms in sorted(behind.items())}


def collective_log() -> CollectiveLog:
    """Return which collectives this process has called, by line: the calls that torch's flight recorder still has.

    Asks no event and waits for no device. What :func:`safecomm.low_latency` runs by its kernels is not among them.
    Times are those of NCCL with ``TORCH_NCCL_ENABLE_TIMING=1``; captured calls are counted, and have none.

    The first call takes seconds, because torch imports its compiler to tell stacks. With that comes
    ``torch.distributed.nn``, which keeps the default group alive if there is one when it is imported.

    Examples
    --------
    >>> log = collective_log()
    >>> log.rows == () or log.rows[0].total > 0
    True
    """
    from safecomm import _torch

    entries = _torch.flight_entries()
    if not entries:
        return CollectiveLog((), "no collective was logged: begin the process with TORCH_FR_BUFFER_SIZE=20000")
    return CollectiveLog(tuple(rows_of(entries, group_sizes())))


def group_sizes() -> dict[str, int]:
    """Return how many ranks each group has, by name. One of the program's own class may not know, and is left out."""
    from torch.distributed import ProcessGroup

    from safecomm import _torch

    return {_torch.group_name(group): group.size() for group in _torch.all_groups() if type(group) is ProcessGroup}
