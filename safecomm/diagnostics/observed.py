"""Files of the observer as they are read: without torch, and whatever is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safecomm.diagnostics import checked
from safecomm.diagnostics.collective_log import LoggedCall

VERSION = 1
"""Of the format of the file."""

MEMORY = ("active", "allocated", "reserved", "held", "outside", "nccl", "staging")
"""What a file may have of memory: bytes."""


@dataclass
class Observed:
    """What one rank of one run has written down, all of it checked."""

    rank: int
    world: int
    how: str
    torch: str
    device: str
    ended: str
    """``"steps"`` or ``"seconds"`` if the window was seen whole; ``"end"`` if the program ended before."""
    window: tuple[int, int]
    began: float
    """The window, in unix time."""
    patched: bool
    seconds: list[float]
    """Of each step of the window."""
    memory: dict[str, int]
    collectives: list[LoggedCall]
    created: dict[tuple[str, int], int]
    """When each call was made, in ns, by its group and number."""
    exposed: dict[str, float] | None
    snapshot: Path | None


def read_observed(path: Path) -> Observed:
    """Read a file of the observer.

    Raises ValueError if it is not one.
    """
    try:
        found = checked.loads(path.read_text(encoding="utf-8", errors="replace"))
        if not isinstance(found, dict) or checked.whole(found["safecomm_observed"]) != VERSION:
            raise ValueError("another format")
        exposed = found["exposed"]
        window = [checked.whole(one) for one in _list(found["window"], 2)]
        snapshot = path.with_suffix(".pickle")
        return Observed(
            rank=checked.whole(found["rank"]),
            world=checked.whole(found["world"]),
            **{name: checked.text(found[name]) for name in ("how", "torch", "device", "ended")},
            window=(window[0], window[1]),
            began=checked.finite(found["began"]),
            patched=found["patched"] is True,
            seconds=[checked.seconds(one) for one in _list(found["seconds"])],
            memory={name: checked.whole(found["memory"][name]) for name in MEMORY if name in _dict(found["memory"])},
            collectives=[_call(_list(one, 9)) for one in _list(found["collectives"])],
            created={
                (checked.text(group), checked.whole(number)): checked.whole(at)
                for group, number, at in (_list(one, 3) for one in _list(found["created"]))
            },
            exposed=None if exposed is None else {name: checked.finite(exposed[name]) for name in _dict(exposed)},
            snapshot=snapshot if snapshot.is_file() else None,
        )
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: not of safecomm compare ({what})") from None


def read_run(directory: Path) -> list[Observed]:
    """Return what the ranks of one run have written, in their order.

    Raises ValueError if none has, or if a file is broken.
    """
    files = sorted(directory.glob("rank*.json"))
    if not files:
        raise ValueError(
            f"{directory}: no rank wrote what it saw: the program made no process group, did not get to its end, or "
            "replaced the environment of the processes that it started"
        )
    return sorted((read_observed(path) for path in files), key=lambda one: one.rank)


def all_done(directory: Path) -> bool:
    """Return whether each rank has written what it saw."""
    files = list(directory.glob("rank*.json"))
    return bool(files) and len(files) >= max(read_observed(one).world for one in files)


def _call(row: list[object]) -> LoggedCall:
    op, group, at = (checked.text(one) for one in row[:3])
    nbytes, calls, total = (checked.whole(one) for one in row[3:6])
    us, algorithm, bus = (None if one is None else checked.finite(one) for one in row[6:])
    return LoggedCall(op, group, at, nbytes, calls, total, us, algorithm, bus)


def _list(value: object, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{type(value).__name__} instead of a list")
    return value


def _dict(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} instead of an object")
    return value
