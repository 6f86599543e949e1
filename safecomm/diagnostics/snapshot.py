"""Memory snapshots of torch (``torch.cuda.memory._dump_snapshot``), of any program: read safely, and told as lives.

A snapshot is a pickle, and a pickle can run any code when it is read. One of these consists of dictionaries, lists,
strings and numbers, so everything else is refused. A pickle can also ask for more memory or time than there is: its
opcodes are looked through before it is read, and what they refer to again and again is counted each time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import mmap
import pickle
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from safecomm.diagnostics import checked
from safecomm.diagnostics.checked import LETTERS

if TYPE_CHECKING:
    from typing_extensions import Buffer

ROUND = 512
"""The caching allocator's blocks are multiples of so many bytes; a trace has the bytes that were asked for."""

DEVICES = 128
"""Torch has no more."""

FRAMES = 1000
"""Of a stack that are looked at, from the innermost on."""

_AWAITING = ("active_awaiting_free", "active_pending_free")  # what versions of torch call it
_PACKAGE = Path(__file__).parents[1]
_OURS = "|".join(re.escape(one.stem) for one in _PACKAGE.iterdir() if one.suffix == ".py" or one.is_dir())
_LIBRARY = re.compile(rf"(^|[/\\])(torch[/\\]|typing_extensions\.py$|safecomm[/\\]({_OURS})([/\\]|\.py$))")
_STARTS = re.compile(r"^<|[/\\](runpy|threading|concurrent[/\\].*|multiprocessing[/\\].*)\.py$")
_CXX = re.compile(r"^\?\?$|^$|\.(cpp|cc|cu|cuh|h|hpp|c)$|\.so(\.|$)")


class Block:
    """One allocation: when it was made and given back, and by what. Each "when" is a place in ``Trace.times``."""

    __slots__ = ("address", "completed", "freed_at", "label", "made", "made_at", "requested", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, made: int, made_at: int, label: str = "") -> None:
        self.address: int = address
        self.size: int = size
        self.stream: int = stream
        self.made: int = made  # 0 for what was there before
        self.made_at: int = made_at  # the number of the stack of the allocation; 0 if that is before the trace
        self.requested: int | None = None  # when the program freed it; None if it has not
        self.completed: int | None = None  # when the allocator could give it out again; as requested if at once
        self.freed_at: int = 0  # the number of the stack of that
        self.label: str = label  # what the program has attached to it: torch's user_metadata


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
    duration: float = 0.0
    blocks: list[Block] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    times: list[float] = field(default_factory=lambda: [0.0])
    """When each of the following changed, in the order of the history."""
    allocated: list[int] = field(default_factory=lambda: [0])
    unusable: list[int] = field(default_factory=lambda: [0])
    reserved: list[int] = field(default_factory=lambda: [0])
    began: float = 0.0
    """Unix seconds of the start; 0 if the history has no times."""

    @property
    def active(self) -> list[int]:
        """Bytes that were allocated or unusable."""
        return [one + two for one, two in zip(self.allocated, self.unusable, strict=True)]

    def seconds(self, start: int, end: int | None) -> float:
        """Return what passed between two places in ``times``; None is the end."""
        return (self.duration if end is None else self.times[end]) - self.times[start]

    def keep(self, first: float, last: float) -> None:
        """Forget what was not between ``first`` and ``last``, in seconds: what was there as that begins stays."""
        start, end = max(bisect_right(self.times, first) - 1, 0), bisect_right(self.times, last)

        def moved(place: int | None) -> int | None:
            return None if place is None or place >= end else max(place - start, 0)

        blocks, self.blocks = self.blocks, []
        for block in blocks:
            if block.made < end and (block.completed is None or block.completed > start):
                block.made = max(block.made - start, 0)
                block.requested, block.completed = moved(block.requested), moved(block.completed)
                block.freed_at = 0 if block.requested is None else block.freed_at
                self.blocks.append(block)
        self.times = [max(time - first, 0.0) for time in self.times[start:end]]
        self.allocated, self.unusable = self.allocated[start:end], self.unusable[start:end]
        self.reserved = self.reserved[start:end]
        if last < self.duration:
            self.segments = []  # they are those of the end
        self.duration = max(min(last, self.duration) - first, 0.0)
        self.began += first if self.began else 0.0


@dataclass
class Snapshot:
    """A memory snapshot of torch."""

    path: Path
    traces: list[Trace]
    """Those of the devices that anything is known of; empty lists if no history was recorded."""
    stacks: Stacks
    """Those of all its blocks."""


# --- reading ----------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Makes nothing but Python's own containers, strings and numbers."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no snapshot does; nothing of it was run")

    def persistent_load(self, identity: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside of the file, which no snapshot does")


# Numbers of up to 64 bits: longer ones can be chosen so that a dictionary of them never ends.
_NUMBER = (
    rb"(?:K.|M..|J.{4}|N|[\x88\x89]|G.{8}|\x8a(?:"
    + b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(9))
    + rb"|\x09.{8}\x00))"
)
# A tuple of numbers, or a number that is not in one, or what makes or fills containers, or refers to what there is. A
# tuple of tuples, each of them twice the one before, would never end as a key of a dictionary.
_HARMLESS = re.compile(
    rb"(?:[hq].|[\x94(}\])aesu]|j.{4}|(?=[KMJNG\x88-\x8a])(?:"
    + (_NUMBER + rb"\x85|" + _NUMBER * 2 + rb"\x86|" + _NUMBER * 3 + rb"\x87|" + _NUMBER + rb"(?![\x85-\x87])")
    + rb")){1,1000}",
    re.DOTALL,
)
_ARGUMENT = {0x80: 1, 0x8C: 1, 0x58: 4, 0x72: 4}  # PROTO, SHORT_BINUNICODE, BINUNICODE, LONG_BINPUT
_TRUNCATED = {
    0x4B: 2, 0x4D: 3, 0x4A: 5, 0x47: 9, 0x8A: 10, 0x68: 2, 0x71: 2, 0x6A: 5,
}  # fmt: skip
"""The most bytes of those that are harmless when they are whole."""


def _without_frames(data: bytes | mmap.mmap) -> bytes:
    """Return a pickle without its frames, which only say how much can be read at once.

    With them pickle's reader in C drops the beginning of an argument that crosses the end of a frame, so that it would
    read other opcodes than were looked through. And a frame may begin between any two opcodes, in a tuple too.
    """
    pieces, place = [data[:2]], 2
    while (opcode := data[place : place + 1]) in (b"\x95", b"X"):  # a frame, or a long text between two
        head = 9 if opcode == b"\x95" else 5
        end = place + head + int.from_bytes(data[place + 1 : place + head], "little")
        pieces.append(data[place + head if opcode == b"\x95" else place : end])
        place = end
    return b"".join([*pieces, data[place:]])


def _look_through(data: bytes) -> None:
    """Raise if the opcodes of a pickle are not those of a snapshot: EOFError if they end too early, or ValueError."""
    place, size = 0, len(data)
    while place < size:
        run = _HARMLESS.match(data, place)
        if run is not None:
            place = run.end()
            continue
        opcode = data[place]
        if opcode == 0x2E:  # STOP
            return
        length = _ARGUMENT.get(opcode)
        if length is None:
            if place + _TRUNCATED.get(opcode, 0) > size:
                raise EOFError
            raise ValueError(f"it has the opcode {opcode:#04x} at byte {place}, which no snapshot has; nothing was run")
        argument = int.from_bytes(data[place + 1 : place + 1 + length], "little")
        place += 1 + length
        if opcode in (0x8C, 0x58):
            place += argument
        elif opcode == 0x72 and argument > place:  # room is made for all that would come before
            raise ValueError(f"it keeps object {argument} at byte {place}, which no snapshot does")
    raise EOFError


class _Progress(io.BufferedReader):
    def __init__(self, data: bytes, progress: Callable[[int, int], None]) -> None:
        super().__init__(io.BytesIO(data), 1 << 20)
        self._size = len(data)
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

    def readinto(self, buffer: Buffer, /) -> int:
        count = super().readinto(buffer)
        self._count(count)
        return count


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
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
    with without_collection():
        try:
            with path.open("rb") as plain, mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                data = _without_frames(mapped)
            _look_through(data)
            with _Progress(data, progress) as file:
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
            return _Reader(path, path.stat().st_size).told(found)
        except ValueError as error:
            raise ValueError(f"{path}: not a memory snapshot of torch: {error}") from None


class _Reader:
    """Checks what a pickle has made, and turns it into a snapshot.

    Of what a file has once and refers to a million times, each is looked at: there are no more such looks than a file
    of its size has entries.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._looks = nbytes // 8
        self._stacks = Stacks()
        self._labels: dict[str, str] = {"": ""}

    def _list(self, value: object) -> list[Any]:
        if type(value) is not list:
            raise ValueError(f"{type(value).__name__} instead of a list")
        self._looks -= len(value)
        if self._looks < 0:
            raise ValueError("it has more entries than a file of its size can have")
        return value

    def _field(self, one: object, name: str) -> object:
        if type(one) is not dict:
            raise ValueError(f"{type(one).__name__} instead of an entry with {name!r}")
        if name not in one:
            raise ValueError(f"an entry without {name!r}")
        return one[name]

    def told(self, found: Any) -> Snapshot:
        """Return the snapshot that ``found`` is."""
        by_device: dict[int, list[_Found]] = {}
        for one in self._list(self._field(found, "segments")):
            segment = self._segment(one)
            by_device.setdefault(checked.whole(one.get("device", 0), 0, DEVICES - 1), []).append(segment)
        histories = self._list(found.get("device_traces", []))
        if len(histories) > DEVICES:
            raise ValueError(f"histories of {len(histories)} devices")
        traces = []
        for device in range(max(len(histories), max(by_device, default=-1) + 1)):
            history = self._list(histories[device]) if device < len(histories) else []
            if history or device in by_device:
                traces.append(_trace(device, self._events(history), by_device.get(device, [])))
                if history:
                    traces[-1].began = history[0].get("time_us", 0) / 1e6
        return Snapshot(self._path, traces, self._stacks)

    def _segment(self, one: Any) -> tuple[Segment, list[_Part]]:
        address, size = _address(self._field(one, "address")), checked.whole(self._field(one, "total_size"))
        blocks = []
        place = address
        for block in self._list(self._field(one, "blocks")):
            state = self._field(block, "state")
            if type(state) is not str:
                raise ValueError(f"{type(state).__name__} instead of a state")
            place = _address(block.get("address", place))
            stack = self._stack(block) if block.get("frames") else 0
            blocks.append(_Part(place, checked.whole(self._field(block, "size")), state, stack))
            place += blocks[-1].size
        free = [block.size for block in blocks if block.state == "inactive"]
        segment = Segment(
            address=address,
            size=size,
            stream=_stream(self._field(one, "stream")),
            active=size - sum(free),
            awaiting=sum(block.size for block in blocks if block.state in _AWAITING),
            free=sum(free),
            largest_free=max(free, default=0),
            blocks=len(blocks),
            expandable=one.get("is_expandable") is True,
        )
        return segment, blocks

    def _events(self, history: list[Any]) -> Iterator[_Event]:
        """Yield the entries of a device, with their times, which never go back; ``""`` for one that tells of none."""
        start = 0
        now = 0.0
        seen = self._stacks.seen
        for number, one in enumerate(history):
            action = one.get("action") if type(one) is dict else None
            if action is None:
                action = self._field(one, "action")
            # Before torch 2.1 entries have no time: then the number of the entry stands for it.
            time = one.get("time_us", number)
            if type(time) is not int or not 0 <= time < 1 << 53:
                time = checked.whole(time, 0, 1 << 53)
            if not number and "time_us" in one:
                start = time
            later = (time - start) / 1e6
            if later > now:
                now = checked.seconds(later)
            label = one.get("user_metadata") or ""
            marked = (label or "internal_metadata" in one) and _made_up(one)
            if type(action) is not str or action not in _ACTIONS or marked:
                yield "", 0, 0, 0, now, 0, ""
            else:
                if label:
                    label = self._label(label)
                address, size, stream = one.get("addr"), one.get("size"), one.get("stream", 0)
                # There are millions of them, and most are as they should be.
                if not (
                    type(address) is type(size) is type(stream) is int and 0 <= address | size < 1 << 62 > stream >= 0  # pyright: ignore[reportOptionalOperand]
                ):
                    address, size = _address(self._field(one, "addr")), checked.whole(self._field(one, "size"))
                    stream = _stream(stream)
                known = seen.get(id(one.get("frames")))
                yield action, address, size, stream, now, known[1] if known else self._stack(one), label

    def _label(self, value: object) -> str:
        if type(value) is not str:
            raise ValueError(f"{type(value).__name__} instead of metadata")
        label = self._labels.get(value)
        if label is None:
            label = self._labels[value] = checked.text(value)
        return label

    def _stack(self, one: dict[str, object]) -> int:
        frames = one.get("frames")
        if frames is not None and type(frames) is not list:
            raise ValueError(f"{type(frames).__name__} instead of a stack")
        return self._stacks.number(frames)


class _Part(NamedTuple):
    """A block of a segment, at the moment of the snapshot."""

    address: int
    size: int
    state: str
    stack: int


_Event = tuple[str, int, int, int, float, int, str]
"""An entry of a history: action, address, size, stream, time, stack, and what the program has attached."""

_Found = tuple[Segment, list[_Part]]

_ACTIONS = {
    *("alloc", "free_requested", "free", "free_completed"),
    *("segment_alloc", "segment_map", "segment_free", "segment_unmap"),
    "annotate",
}
"""Of a history; others, such as "oom" and "snapshot", change nothing."""


_PREFIX = "mallocWithAddress"
"""Marks a block that the allocator takes and gives back at once, to come to an address behind it."""


def _made_up(one: dict[str, Any]) -> bool:
    """Return whether an entry tells of such a block. Before torch 2.15 the mark ended the program's own metadata."""
    user = one.get("user_metadata")
    return one.get("internal_metadata") == _PREFIX or (type(user) is str and user.rpartition("\n")[2] == _PREFIX)


def _address(value: object) -> int:
    return checked.whole(value, 0, 1 << 64)


def _stream(value: object) -> int:
    return checked.whole(value, -(1 << 63), 1 << 64)


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def _trace(device: int, events: Iterator[_Event], found: list[_Found]) -> Trace:
    trace = Trace(device, segments=[segment for segment, _ in found])
    live: dict[int, Block] = {}
    allocated = unusable = reserved = 0  # relative to the start, which is known only at the end
    base_allocated = base_unusable = 0
    before = ""
    for action, address, size, stream, now, stack, label in events:
        last, before = before, action
        trace.duration = now
        at, known = len(trace.times), live.get(address)
        if not action:
            continue
        if action == "annotate":
            if known is not None:
                known.label = f"{known.label}; {label}"[-checked.LETTERS :] if known.label else label
            continue
        if action == "alloc":
            if known is not None:  # the history has lost its end
                known.completed = at
                if known.requested is None:
                    known.requested = at
                    allocated -= known.size
                else:
                    unusable -= known.size
            live[address] = Block(address, _rounded(size), stream, at, stack, label)
            trace.blocks.append(live[address])
            allocated += live[address].size
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        else:
            if known is None:  # allocated before the trace begins
                known = live[address] = Block(address, _rounded(size), stream, 0, 0)
                trace.blocks.append(known)
                if action == "free_completed":
                    known.requested = 0
                    base_unusable += known.size
                else:
                    base_allocated += known.size
            if known.requested is None:
                known.requested, known.freed_at = at, stack
                allocated -= known.size
                unusable += known.size
            elif action != "free_completed":
                continue
            if action != "free_requested":
                del live[address]
                unusable -= known.size
                if last == "free_requested" and known.requested == at - 1:
                    # No memory was asked for between the two entries, however long that took: it waited for nothing.
                    known.completed = known.requested
                    trace.unusable[-1] = unusable
                    continue
                known.completed = at
        trace.times.append(now)
        trace.allocated.append(allocated)
        trace.unusable.append(unusable)
        trace.reserved.append(reserved)
    for segment, parts in found:
        for part in parts:
            if part.state != "inactive" and part.address not in live:  # there from the beginning to the end
                known = Block(part.address, part.size, segment.stream, 0, part.stack)
                trace.blocks.append(known)
                if part.state in _AWAITING:
                    known.requested = 0
                    base_unusable += known.size
                else:
                    base_allocated += known.size
    base_reserved = sum(segment.size for segment in trace.segments) - reserved
    trace.allocated = [base_allocated + nbytes for nbytes in trace.allocated]
    trace.unusable = [base_unusable + nbytes for nbytes in trace.unusable]
    trace.reserved = [base_reserved + nbytes for nbytes in trace.reserved]
    return trace


# --- stacks -----------------------------------------------------------------------------------------------------

UNKNOWN = "before the recording began"
"""Stands for the place of an allocation that the history does not have."""
NO_STACK = "no stack was recorded"
"""Stands for the place of one that it has without a stack, as of backward where stacks of Python alone are recorded."""

NOWHERE = (UNKNOWN, NO_STACK)

_NODE = re.compile(r"\btorch::autograd::(?:generated::)?(CppNode<.*>|\w+)::apply\(")
_OPERATOR = re.compile(r"\bat::_ops::(\w+)::")
_PLUMBING = re.compile(r" in .*(unwind|CapturedTraceback|gather_with_cpp|CachingAllocator)")


def _cxx_site(stack: tuple[str, ...]) -> str:
    """Return what stands for the line of the program where no Python is, as in the threads of autograd.

    It is the autograd node that runs, or else the outermost operator, or else what asked the allocator for memory.
    """
    nodes = (f"autograd node {found[1]}" for text in stack if (found := _NODE.search(text)))
    operators = (f"operator {found[1]}" for text in reversed(stack) if (found := _OPERATOR.search(text)))
    others = (text for text in stack if not _PLUMBING.search(text))
    return next(itertools.chain(nodes, operators, others), stack[0])


class Stacks:
    """Stacks by number, each kept once. What a pickle shares, a stack or a frame, is looked at once."""

    def __init__(self) -> None:
        self.stacks: list[tuple[str, ...]] = [(), (NO_STACK,)]
        """The lines of each that are Python's, innermost first; of C++ if there are no others."""
        self.sites: list[str] = [UNKNOWN, NO_STACK]
        """Of each the innermost line that is the program's: not torch's, safecomm's or of what wraps theirs."""
        self.programs: list[str] = ["", ""]
        """Of each the file of the outermost such line, where Python's own that start a program are left out."""
        self._numbers: dict[tuple[str, ...], int] = {(): 1}
        self.seen: dict[int, tuple[object, int]] = {}
        self._frames: dict[int, tuple[object, str, bool]] = {}
        self._texts: dict[str, str] = {}
        self._ours: dict[str, bool] = {}

    def number(self, frames: list[object] | None) -> int:
        """Return the number of the stack that ``frames`` are."""
        seen = self.seen.get(id(frames))
        if seen is not None:
            return seen[1]
        lines = [self._line(frame) for frame in (frames or ())[:FRAMES]]
        python = tuple([text for _, text, python in lines if python])
        stack = python or tuple([text for _, text, _ in lines])
        number = self._numbers.get(stack)
        if number is None:
            number = self._numbers[stack] = len(self.stacks)
            self.stacks.append(stack)
            ours = [text for text in stack if not self._ours[text]]
            self.sites.append((ours or stack)[0] if python else _cxx_site(stack))
            outer = (text.rpartition(" in ")[0].rpartition(":")[0] for text in reversed(ours if python else []))
            self.programs.append(next((file for file in outer if not _STARTS.search(file)), ""))
        self.seen[id(frames)] = (frames, number)  # with the frames, so that the id stays theirs
        return number

    def _line(self, frame: object) -> tuple[object, str, bool]:
        """Return a frame with its line, and whether that is Python's."""
        seen = self._frames.get(id(frame))
        if seen is None:
            if type(frame) is not dict or not {"filename", "name", "line"} <= frame.keys():
                raise ValueError("a stack has an entry without 'filename', 'line' and 'name'")
            file, name, line = frame["filename"], frame["name"], frame["line"]
            # A line that is not known is -1, in 64 bits and with no sign.
            known = line if type(line) is int and 0 <= line < 1 << 32 else "?"
            text = f"{checked.text(file)}:{known} in {checked.text(name)}"
            text = self._texts.setdefault(text, text)
            self._ours[text] = bool(_LIBRARY.search(text.split(":")[0]))
            seen = self._frames[id(frame)] = (frame, text, not _CXX.search(file[-LETTERS:]))
        return seen
