"""Reports of files: which ones a name or a folder means, what each has, and whether all ranks of a run are there."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from safecomm.diagnostics.comparison import of_ranks
from safecomm.diagnostics.recording import Recording, read_recording
from safecomm.diagnostics.recording_report import report_recording
from safecomm.diagnostics.report import Report
from safecomm.diagnostics.snapshot import Snapshot, read_snapshot, without_collection
from safecomm.diagnostics.snapshot_report import report_snapshot
from safecomm.diagnostics.units import MIB

WHOLE = (0.0, math.inf)
"""Of a history: all of it, in seconds."""
_RANK = re.compile(r"[._-]?(rank|pid)[._-]?(\d+)")
_FILES = (".jsonl", ".pickle", ".pkl")
"""Of a folder that are read."""
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip, as what torch.save() writes",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
}
"""How a file begins that was packed with what."""


def make_reports(
    paths: Sequence[Path],
    progress: Callable[[str], None] = lambda line: None,
    between: tuple[float, float] = WHOLE,
) -> list[Report]:
    """Read files of ``record_memory()`` and memory snapshots of torch, and return what each says.

    A recording may be named as it was to ``record_memory``: then the files of all its ranks are read, and each must be
    there. Of a folder, all recordings and snapshots in it are read. The ranks of one run are one report. Nothing that
    is in a file is executed. ``between``: the seconds of a snapshot's history that are looked at.

    Raises
    ------
    ValueError
        If a file is missing, can't be read, or is neither; or if ranks are missing.
    """
    found: list[Recording | Report] = []
    files = dict.fromkeys(itertools.chain.from_iterable(map(_files_of, paths)))
    for number, path in enumerate(files, 1):
        named = f"{path} ({number} of {len(files)})" if len(files) > 1 else str(path)
        content = _read(path, named, progress)
        if isinstance(content, Recording) and between != WHOLE:
            raise ValueError(f"{path} is a recording: --from and --to are of snapshots")
        # A snapshot is told at once, so that there is only one of them at a time.
        with without_collection():
            found.append(content if isinstance(content, Recording) else _of_snapshot(content, between))
    _check_ranks([one for one in found if isinstance(one, Recording)])
    runs: dict[object, list[Report]] = {}
    for one in found:
        report = _of_recording(one) if isinstance(one, Recording) else one
        runs.setdefault(report.run or id(report), []).append(report)
    return [ranks[0] if len(ranks) == 1 else of_ranks(ranks) for ranks in runs.values()]


def _of_recording(recording: Recording) -> Report:
    report = report_recording(recording)
    if recording.rank is not None:
        report.run, report.rank = _run_of(recording.path, recording.world), recording.rank
    return report


def _of_snapshot(snapshot: Snapshot, between: tuple[float, float]) -> Report:
    if between != WHOLE:
        longest = max((trace.duration for trace in snapshot.traces), default=0.0)
        if not 0 <= between[0] < min(between[1], longest):
            raise ValueError(f"{snapshot.path} has {longest:.3f} s of history: --from and --to have to be in it")
        for trace in snapshot.traces:
            trace.keep(*between)
    report = report_snapshot(snapshot)
    rank = _rank_of(snapshot.path.name)
    if rank is not None:
        report.run, report.rank = _run_of(snapshot.path, None), rank
    return report


def _files_of(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        return _ranks_of(path)
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in _FILES and one.is_file())
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    if not files:
        raise ValueError(f"{path}: no recording or snapshot is in it: no file that ends in {', '.join(_FILES)}")
    return sorted(files, key=lambda one: (_RANK.sub("", one.name), _rank_of(one.name) or 0))


def _rank_of(name: str) -> int | None:
    """Return the rank that the name of a file tells."""
    match = _RANK.search(name)
    return int(match[2]) if match and match[1] == "rank" else None


def _ranks_of(path: Path) -> list[Path]:
    if os.path.exists(path):  # Path's own raises for a name that is too long, and in a directory that is not readable
        return [path]
    pattern = re.compile(re.escape(path.stem) + r"\.(rank(\d+)|pid\d+)" + re.escape(path.suffix))
    try:
        matches = {one: pattern.fullmatch(one.name) for one in path.parent.iterdir()}
    except OSError:
        matches = {}
    ranks = [(int(match[2] or 0), one) for one, match in matches.items() if match]
    if not ranks:
        raise ValueError(f"{path}: no such file")
    return [one for _, one in sorted(ranks)]


def _read(path: Path, named: str, progress: Callable[[str], None]) -> Recording | Snapshot:
    try:
        if not path.is_file():
            raise ValueError(f"{path} is not an ordinary file")  # a pipe can be read only once, and can block
        with path.open("rb") as file:
            first = file.read(6)
        if first[:1] == b"\x80":

            def told(done: int, size: int) -> None:
                progress(f"reading {named}: {done // MIB} of {size // MIB} MiB")

            snapshot = read_snapshot(path, told)
            progress(f"reading {named}: done, {sum(len(trace.blocks) for trace in snapshot.traces)} allocations")
            return snapshot
        if first[:1] == b"{":
            progress(f"reading {named}")
            return read_recording(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    if not first:
        raise ValueError(f"{path} is empty")
    for magic, name in _PACKED.items():
        if first.startswith(magic):
            raise ValueError(f"{path} is packed with {name}: unpack it, and give what was in it")
    raise ValueError(f"{path} is neither a recording of safecomm nor a memory snapshot of torch")


def _check_ranks(recordings: list[Recording]) -> None:
    """Raise ValueError if several ranks of one run are there, but not all."""
    runs: dict[tuple[str, str, int | None], set[int]] = {}
    for one in recordings:
        if one.rank is not None:
            runs.setdefault(_run_of(one.path, one.world), set()).add(one.rank)
    for (_, base, world), ranks in runs.items():
        missing = (world or 0) - len(ranks)  # a rank is less than its world, or the file is refused
        if len(ranks) > 1 and missing > 0:
            first = itertools.islice((rank for rank in range(world or 0) if rank not in ranks), 10)
            raise ValueError(
                f"{base}: of {world} ranks, {missing} are missing ({', '.join(map(str, first))}). "
                "Give the files of all, or of one."
            )


def _run_of(path: Path, world: int | None) -> tuple[str, str, int | None]:
    return str(path.parent), _RANK.sub("", path.name), world
