"""What NCCL's Inspector has written of collectives, beside the log's own figures.

It is a plugin of NCCL (2.28 and later) that times collectives by their kernels and writes a line of JSON for each:
https://github.com/NVIDIA/nccl/tree/master/plugins/profiler/inspector.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from safecomm.diagnostics import checked
from safecomm.diagnostics.collective_log import LoggedCall

VARIABLE = "NCCL_INSPECTOR_DUMP_DIR"
"""The folder that it writes to."""

LONGEST = 1 << 20
"""Bytes of a line that are looked at."""


def read_inspector(directory: Path) -> list[LoggedCall]:
    """Return what its files in ``directory`` tell, of all ranks, those with the most bytes first.

    Calls of one operation, communicator and size are one row, whose place is not known; of their times and bandwidths
    it has the medians. A line that is no record of a collective counts for nothing, such as the last of a process that
    was ended.
    """
    found: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
        if path.is_file():
            for key, figures in _records(path):
                found.setdefault(key, []).append(figures)
    rows = []
    for (op, group, nbytes), each in found.items():
        us, algorithm, bus = map(statistics.median, zip(*each, strict=True))
        rows.append(LoggedCall(op, group, "", nbytes, len(each), nbytes * len(each), us, algorithm, bus))
    return sorted(rows, key=lambda row: -row.total)


def _records(path: Path) -> Iterator[tuple[tuple[str, str, int], tuple[float, float, float]]]:
    with path.open("rb") as file:
        while line := file.readline(LONGEST):
            try:
                record = checked.loads(line.decode())
                header, call = record["header"], record["coll_perf"]
                group = header.get("comm_name") or header["id"]
                key = checked.text(call["coll"]), checked.text(group), checked.whole(call["coll_msg_size_bytes"])
                algorithm, bus = (checked.finite(call[f"coll_{name}bw_gbs"]) for name in ("algo", "bus"))
                yield key, (float(checked.whole(call["coll_exec_time_us"])), algorithm, bus)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
