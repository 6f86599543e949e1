"""Files of ``record_memory()`` as they are read: without torch, and whatever is in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safecomm.diagnostics import checked

VERSION = 1
"""Of the format of the file."""

_LONGEST_LINE = 1 << 24
"""Characters: 1000 call sites have some 100 KB. What is longer would be read as a whole before it is refused."""


FIGURES = ("active", "allocated", "reserved", "unusable", "arena")
"""Of a line, those that need not be there."""


@dataclass
class Recording:
    """What a file of ``record_memory()`` says, all of it checked."""

    path: Path
    rank: int | None
    world: int | None
    started: float
    samples: list[dict[str, Any]]
    """In the order of their times."""
    sites: dict[int, dict[str, str]]
    left: list[dict[str, Any]] | None
    """What was still held at the end; None if the process did not get there."""
    calls: dict[str, int] = field(default_factory=dict)
    """How often each collective was called, also those that held nothing."""
    program: str = ""
    """What ran; ``""`` where the file does not say."""


def read_recording(path: Path) -> Recording:
    """Read a file of ``record_memory()``.

    Raises
    ------
    ValueError
        If it is not one. What a process that was killed has left of its last line is passed over.
    """
    recording: Recording | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
            try:
                line = checked.loads(text)
                if not isinstance(line, dict):
                    raise ValueError
            except ValueError:
                if recording is not None and not text.endswith("\n") and len(text) < _LONGEST_LINE:
                    break
                raise ValueError(f"{path}: line {number} is not of a recording") from None
            if recording is None:
                version = line.get("safecomm_record", VERSION)
                if type(version) is int and version != VERSION:
                    raise ValueError(f"{path}: format {version % 10**6}, and this version reads {VERSION}")
            try:
                if recording is None:
                    checked.whole(line["safecomm_record"], VERSION, VERSION)
                    recording = Recording(path, *_rank_of(line), checked.finite(line["started"]), [], {}, None)
                    recording.program = checked.text(line.get("program", ""))
                else:
                    _take(recording, line)
            except (KeyError, ValueError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"{path}: line {number} is not of a recording ({what})") from None
    if recording is None:
        raise ValueError(f"{path} is empty")
    recording.samples.sort(key=lambda sample: sample["t"])
    return recording


def _take(recording: Recording, line: dict[str, object]) -> None:
    if "site" in line:
        site = {key: checked.text(line[key]) for key in ("op", "group", "at")}
        recording.sites[checked.whole(line["site"])] = site
    elif "calls" in line:
        recording.calls = {checked.text(a): checked.whole(b) for a, b in map(_list, _list(line["calls"]))}
    elif "t" in line:
        recording.samples.append(_sample_of(line))
    elif "end" in line:
        recording.left = [_left_of(one) for one in _list(line["left"])]
    elif "rank" in line:
        recording.rank, recording.world = _rank_of(line)


def _rank_of(line: dict[str, object]) -> tuple[int | None, int | None]:
    rank, world = line["rank"], line["world"]
    world = None if world is None else checked.whole(world, 1, 1 << 31)
    return None if rank is None else checked.whole(rank, 0, (world or 1 << 31) - 1), world


def _sample_of(line: dict[str, object]) -> dict[str, Any]:
    sites = []
    for site in _list(line["sites"]):
        if len(_list(site)) != 7:
            raise ValueError("a call site has not 7 figures")
        sites.append([*map(checked.whole, site[:6]), checked.seconds(site[6])])
    figures = {name: checked.whole(line[name], -checked.MOST) for name in FIGURES if name in line}
    if "unusable" in figures and "active" not in figures:
        raise ValueError("there is 'unusable', and not 'active'")
    held, peak = checked.whole(line["held"]), checked.whole(line["peak"])
    return {"t": checked.seconds(line["t"]), "held": held, "peak": peak, "sites": sites, **figures}


def _left_of(one: object) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise ValueError(f"{type(one).__name__} instead of what is left")
    words = {name: checked.text(one[name]) for name in ("op", "group", "at", "state")}
    return {**words, "nbytes": checked.whole(one["nbytes"]), "seconds": checked.seconds(one["seconds"])}


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} instead of a list")
    return value
