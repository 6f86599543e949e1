"""Memory snapshots of torch (``torch.cuda.memory._dump_snapshot``), of any program: read safely, and told as lives.

A snapshot is a pickle, and a pickle can run any code when it is read. One of these consists of dictionaries, lists,
strings and numbers, so everything else is refused.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUND = 512
"""The caching allocator's blocks are multiples of so many bytes; a trace has the bytes that were asked for."""

AT_ONCE = 1e-4
"""Seconds within which a block that waits for nothing is freed, and noted as free: two entries of one call."""

_LIMIT = 1 << 62
_AWAITING = ("active_awaiting_free", "active_pending_free")  # what versions of torch call it
_PACKAGE = Path(__file__).parents[1]
_OURS = "|".join(re.escape(one.stem) for one in _PACKAGE.iterdir() if one.suffix == ".py" or one.is_dir())
_LIBRARY = re.compile(rf"(^|[/\\])(torch[/\\]|safecomm[/\\]({_OURS})([/\\]|\.py$))")
_CXX = re.compile(r"^\?\?$|^$|\.(cpp|cc|cu|cuh|h|hpp|c)$|\.so(\.|$)")


class Block:
    """One allocation: when it was made and given back, and by what. Times are seconds from the start of the trace."""

    __slots__ = ("address", "completed", "freed_at", "made", "made_at", "requested", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, made: float, made_at: Any) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.made = made  # 0 for what was there before
        self.made_at = made_at  # the frames of the allocation; None if that is before the trace
        self.requested: float | None = None  # when the program freed it; None if it has not
        self.completed: float | None = None  # when the allocator could give it out again; as requested if at once
        self.freed_at: Any = None  # the frames of that


@dataclass
class Segment:
    """Memory that the allocator has from the driver, at the moment of the snapshot."""

    address: int
    size: int
    stream: int
    active: int
    """Bytes of blocks in use, or freed and not usable yet."""
    awaiting: int
    """Bytes of the latter."""
    free: int
    largest_free: int
    blocks: int
    expandable: bool


@dataclass
class Trace:
    """What happened on one device. Bytes, and seconds from the start."""

    device: int
    duration: float
    blocks: list[Block]
    times: list[float] = field(default_factory=list)
    """When each of the following changed."""
    allocated: list[int] = field(default_factory=list)
    unusable: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


@dataclass
class Snapshot:
    """A memory snapshot of torch."""

    path: Path
    segments: list[Segment]
    traces: list[Trace]
    """Those of the devices that anything is known of; empty lists if no history was recorded."""


# --- reading ----------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Makes nothing but Python's own containers, strings and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no snapshot does; nothing of it was run")

    def persistent_load(self, identity: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside of the file, which no snapshot does")


class _Progress(io.BufferedReader):
    def __init__(self, path: Path, progress: Callable[[int, int], None]) -> None:
        super().__init__(io.FileIO(path), 1 << 20)
        self._size = path.stat().st_size
        self._done = 0
        self._told = 0
        self._progress = progress

    def _count(self, number: int) -> None:
        self._done += number
        if self._done - self._told >= max(self._size // 20, 1 << 20):
            self._told = self._done
            self._progress(self._done, self._size)

    def read(self, size: int | None = -1, /) -> bytes:
        # The unpickler asks for as many bytes as the file says, and a buffer would be made for all of them first.
        if size is not None and size > self._size - self._done:
            raise EOFError
        data = super().read(size)
        self._count(len(data))
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        data = super().readline(size)
        self._count(len(data))
        return data

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self._count(count)
        return count


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector off: it would look again and again through the millions of objects that are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_snapshot(path: Path, progress: Callable[[int, int], None] = lambda done, size: None) -> Snapshot:
    """Read a snapshot without running anything that is in it.

    ``progress`` is told of the bytes read so far, and of all.

    Raises
    ------
    ValueError
        If it is not a whole snapshot. The message says in what way.
    """
    with _without_collection():
        try:
            with _Progress(path, progress) as file:
                found = _Unpickler(file).load()
        except EOFError:
            raise ValueError(f"{path}: the file ends too early: it was cut off, or is still being written") from None
        except MemoryError:
            raise ValueError(f"{path}: not a memory snapshot: it asks for more memory than there is") from None
        except OSError:
            raise
        except Exception as error:  # a pickle that is broken can fail in any way
            if "truncated" in str(error) or "ran out" in str(error):
                raise ValueError(
                    f"{path}: the file ends too early: it was cut off, or is still being written"
                ) from None
            raise ValueError(f"{path}: not a memory snapshot: {error}") from None
        try:
            return _told(path, found)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: not a memory snapshot of torch: {error!r} is not as it should be") from None


def _told(path: Path, found: Any) -> Snapshot:
    if not isinstance(found, dict) or "segments" not in found:
        raise ValueError("segments")
    segments = []
    by_device: dict[int, list[Any]] = {}
    for one in found["segments"]:
        by_device.setdefault(int(one.get("device", 0)), []).append(one)
        free = [_bytes(block["size"]) for block in one["blocks"] if block["state"] == "inactive"]
        awaiting = sum(_bytes(block["size"]) for block in one["blocks"] if block["state"] in _AWAITING)
        size = _bytes(one["total_size"])
        segments.append(
            Segment(
                address=int(one["address"]),
                size=size,
                stream=int(one["stream"]),
                active=size - sum(free),
                awaiting=awaiting,
                free=sum(free),
                largest_free=max(free, default=0),
                blocks=len(one["blocks"]),
                expandable=bool(one.get("is_expandable")),
            )
        )
    histories = found.get("device_traces", [])
    traces = []
    for device in range(max(len(histories), max(by_device, default=-1) + 1)):
        history = histories[device] if device < len(histories) else []
        if history or device in by_device:
            traces.append(_trace(device, history, by_device.get(device, [])))
    return Snapshot(path, segments, traces)


def _bytes(size: Any) -> int:
    if not 0 <= size < _LIMIT:
        raise ValueError(f"size {size!r}")
    return int(size)


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def _trace(device: int, history: list[Any], segments: list[Any]) -> Trace:
    start = history[0]["time_us"] if history and "time_us" in history[0] else 0
    blocks: list[Block] = []
    live: dict[int, Block] = {}
    allocated = unusable = reserved = 0  # relative to the start, which is known only at the end
    changes: list[tuple[float, int, int, int]] = []
    base_allocated = base_unusable = 0
    now = 0.0
    for number, event in enumerate(history):
        action = event["action"]
        # Before torch 2.1 entries have no time: then the number of the entry stands for it.
        now = (event["time_us"] - start) / 1e6 if "time_us" in event else number / 1e6
        if action == "alloc":
            size = _rounded(_bytes(event["size"]))
            block = Block(event["addr"], size, event["stream"], now, event.get("frames"))
            live[event["addr"]] = block
            blocks.append(block)
            allocated += size
        elif action in ("free_requested", "free"):
            known = live.get(event["addr"])
            if known is None:  # allocated before the trace begins
                size = _rounded(_bytes(event["size"]))
                known = live[event["addr"]] = Block(event["addr"], size, event["stream"], 0.0, None)
                blocks.append(known)
                base_allocated += size
            known.requested = now
            known.freed_at = event.get("frames")
            allocated -= known.size
            unusable += known.size
        elif action == "free_completed":
            known = live.pop(event["addr"], None)
            if known is None:  # freed before the trace begins
                size = _rounded(_bytes(event["size"]))
                known = Block(event["addr"], size, event["stream"], 0.0, None)
                known.requested = 0.0
                blocks.append(known)
                base_unusable += size
            elif known.requested is None:
                known.requested = now
                allocated -= known.size
                unusable += known.size
            known.completed = now
            unusable -= known.size
            last = history[number - 1] if number else {}
            follows = last.get("action") == "free_requested" and last["addr"] == event["addr"]
            if follows and now - (known.requested or 0.0) < AT_ONCE:
                known.completed = known.requested  # it waited for nothing
                changes[-1] = (changes[-1][0], allocated, unusable, reserved)
                continue
        elif action in ("segment_alloc", "segment_map"):
            reserved += _bytes(event["size"])
        elif action in ("segment_free", "segment_unmap"):
            reserved -= _bytes(event["size"])
        else:
            continue  # such as "oom" and "snapshot"
        changes.append((now, allocated, unusable, reserved))
    end = now
    for segment in segments:
        address = int(segment["address"])
        for one in segment["blocks"]:
            address = int(one.get("address", address))
            state = one["state"]
            if state != "inactive":
                known = live.get(address)
                if known is None:  # there from the beginning to the end
                    known = Block(address, _bytes(one["size"]), segment["stream"], 0.0, one.get("frames") or None)
                    blocks.append(known)
                    if state in _AWAITING:
                        known.requested = 0.0
                        base_unusable += known.size
                    else:
                        base_allocated += known.size
            address += _bytes(one["size"])
    base_reserved = sum(_bytes(one["total_size"]) for one in segments) - reserved
    trace = Trace(device, end, blocks)
    trace.times = [0.0, *(change[0] for change in changes)]
    trace.allocated = [base_allocated, *(base_allocated + change[1] for change in changes)]
    trace.unusable = [base_unusable, *(base_unusable + change[2] for change in changes)]
    trace.reserved = [base_reserved, *(base_reserved + change[3] for change in changes)]
    return trace


# --- stacks -----------------------------------------------------------------------------------------------------

UNKNOWN = "before the recording began"
"""Stands for the place of an allocation that the history does not have."""


def stack_of(frames: Any) -> tuple[str, ...]:
    """Return the lines of ``frames`` that are Python's, innermost first; of C++ if there are no others."""
    if not frames:
        return ()
    try:
        shown = [f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in frames]
        python = [text for text, frame in zip(shown, frames, strict=True) if not _CXX.search(str(frame["filename"]))]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a memory snapshot of torch: a stack is not as it should be ({error!r})") from None
    return tuple(python or shown)


def site_of(stack: tuple[str, ...]) -> str:
    """Return the innermost line of ``stack`` that is the program's: neither torch's nor safecomm's."""
    for text in stack:
        if not _LIBRARY.search(text.split(":")[0]):
            return text
    return stack[0] if stack else UNKNOWN


class Stacks:
    """Stacks by number, each kept once. The frames that a pickle shares are looked at once."""

    def __init__(self) -> None:
        self.stacks: list[tuple[str, ...]] = [()]
        self.sites: list[str] = [UNKNOWN]
        self._numbers: dict[tuple[str, ...], int] = {(): 0}
        self._seen: dict[int, tuple[Any, int]] = {}

    def number(self, frames: Any) -> int:
        """Return the number of the stack that ``frames`` are."""
        seen = self._seen.get(id(frames))
        if seen is not None:
            return seen[1]
        stack = stack_of(frames)
        number = self._numbers.get(stack)
        if number is None:
            number = self._numbers[stack] = len(self.stacks)
            self.stacks.append(stack)
            self.sites.append(site_of(stack))
        self._seen[id(frames)] = (frames, number)  # with the frames, so that the id stays theirs
        return number
