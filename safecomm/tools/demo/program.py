"""The program that is measured on GPUs: layers of matmul, each followed by an all_reduce, in several ways.

The numbers that the ways compute are compared with each other, and the memory of each with that of the others.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from safecomm import _torch
from safecomm._version import __version__
from safecomm.collectives.gates import all_reduce
from safecomm.collectives.groups import destroy_process_group
from safecomm.core.drain import drain
from safecomm.diagnostics.table import laid_out
from safecomm.record_stream import avoid_record_streams
from safecomm.tools.demo.launch import Refused, launch

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""The element types that the program runs with, by name."""

_MIB = 1 << 20
_SMALLEST = 64


@dataclass(frozen=True)
class Settings:
    """What is run, and on what."""

    world: int
    """Ranks: one process and one GPU each."""
    layers: int = 8
    """Layers of an iteration: one matmul and one all_reduce each."""
    iterations: int = 5
    """Iterations of a pass."""
    passes: int = 3
    """Measured passes of each way, after one that is not measured."""
    rows: int = 4096
    """Rows of what a layer computes."""
    cols: int = 8192
    """Columns of what a layer computes; the weights have as many rows."""
    dtype: str = "bfloat16"
    """Name of the element type."""
    limit: float = 120.0
    """Seconds that one way may take."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of what one layer computes and communicates."""
        return self.rows * self.cols * DTYPES[self.dtype].itemsize

    @property
    def needed_bytes(self) -> int:
        """Bytes that a rank needs at most: if nothing that it communicates is given back during a pass."""
        weights = self.layers * self.cols**2 * DTYPES[self.dtype].itemsize
        return weights + (self.layers * self.iterations + 4) * self.buffer_bytes

    def check(self) -> None:
        """Raise ValueError where a setting is out of its range, whatever machine it is for."""
        for name in ("layers", "iterations", "passes", "rows", "cols"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.limit > 0:
            raise ValueError(f"the time limit must be more than 0 seconds, not {self.limit}")
        if self.world < 2:
            raise ValueError(
                f"world must be at least 2, not {self.world}: a single rank has nobody to communicate with"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")


@dataclass(frozen=True)
class Row:
    """What was measured of one way with one library. Bytes and times are those of the rank with the most."""

    way: str
    """The way, such as ``"async + wait"``."""
    library: str
    """``"torch.distributed"``, ``"safecomm"``, or ``"-"`` where nothing is communicated."""
    peak: int
    """Bytes above the base, at most: of the caching allocator's active blocks, used or not reusable yet."""
    peaks: list[list[int]]
    """The same for each rank and each pass."""
    unusable: int
    """Bytes that the program freed and the allocator could not give out again (active - allocated), the most seen when
    an iteration had been queued."""
    held: int
    """Bytes above the base at the end of a pass, when the program has dropped its tensors and the communication is over
    (after ``torch.cuda.synchronize()``), before any other call."""
    held_after_drain: int | None
    """The same after ``safecomm.drain()``; None for other libraries."""
    milliseconds: float
    """Time of an iteration: of a pass, until all of it is over, divided by its iterations; the median of the passes."""
    numbers: str
    """The final tensor against the reference: ``"same"`` bit for bit, ``"rounding"``, ``"DIFFERENT"``, or ``"-"``."""

    def __str__(self) -> str:
        title = self.way if self.library == "-" else f"{self.way}, {self.library}"
        return f"{title}: peak {_mib(self.peak)} MiB, {self.milliseconds:.2f} ms per iteration, numbers {self.numbers}"


@dataclass(frozen=True)
class Report:
    """The outcome of a run."""

    settings: Settings
    device: str
    """Name of the GPUs."""
    versions: dict[str, str]
    date: str
    rows: list[Row] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    """What safecomm logged on rank 0."""

    @property
    def ok(self) -> bool:
        """Whether all numbers agree as far as they must."""
        # The sum of two numbers does not depend on their order: with two ranks there is nothing to round differently.
        accepted = {"same", "-"} if self.settings.world == 2 else {"same", "-", "rounding"}
        return all(row.numbers in accepted for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """Return all of it as what ``json.dumps`` takes."""
        return {**asdict(self), "ok": self.ok}

    def title(self) -> str:
        """Return what was run, on what."""
        settings = self.settings
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.device} ({versions}): {settings.layers} layers of {settings.rows} x {settings.cols} "
            f"{settings.dtype}, {settings.iterations} iterations, {settings.passes} passes"
        )

    def table(self) -> str:
        """Return the rows as text, with what the columns mean."""
        columns = ("way", "library", "peak", "freed but unusable", "held at the end", "after drain()", "ms", "numbers")
        rows = [
            (
                row.way,
                row.library,
                *map(_mib, (row.peak, row.unusable, row.held, row.held_after_drain)),
                f"{row.milliseconds:.2f}",
                row.numbers,
            )
            for row in self.rows
        ]
        notes = [
            f"Memory in MiB above the base (weights and input), on the rank with the most; one layer's result is "
            f"{_mib(self.settings.buffer_bytes)} MiB.",
            "peak: active bytes of the caching allocator (in use, or freed but not reusable yet).",
            "freed but unusable: active - allocated bytes, the most seen when an iteration had been queued.",
            "held at the end: what is not given back when the program has dropped its tensors, after a device "
            "synchronize and before any other call; after drain(): once safecomm.drain() was called.",
            f"ms: time of one iteration, median of {self.settings.passes} passes.",
            "numbers: the final tensor against a synchronous all_reduce with torch.distributed.",
        ]
        return "\n".join([*laid_out(columns, rows), "", *notes])


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / _MIB:.1f}"


# --- the ways ------------------------------------------------------------------------------------------
#
# Each runs one iteration and returns its final tensor. Each layer reads what the layer before has reduced, but for the
# way that drops its handles: what nobody waits for must not be read, so there each layer reads the input.


class _Program:
    """One rank's tensors."""

    def __init__(self, settings: Settings, rank: int) -> None:
        dtype = DTYPES[settings.dtype]
        # The input is the same on every rank, the weights are each rank's own. The scale keeps the values near 1.
        common = torch.Generator("cuda").manual_seed(0)
        own = torch.Generator("cuda").manual_seed(1 + rank)
        scale = (settings.cols * settings.world) ** -0.5
        shape = (settings.rows, settings.cols)
        self.x = torch.randn(shape, dtype=dtype, device="cuda", generator=common)
        self.weights = [
            torch.randn((settings.cols, settings.cols), dtype=dtype, device="cuda", generator=own).mul_(scale)
            for _ in range(settings.layers)
        ]
        self.side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


_AllReduce = Callable[..., Any]
_Way = Callable[[_Program, _AllReduce], torch.Tensor]


def _without(program: _Program, _: _AllReduce) -> torch.Tensor:
    h = program.x
    for weight in program.weights:
        h = h @ weight
    return h


def _synchronous(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    h = program.x
    for weight in program.weights:
        h = h @ weight
        reduce(h)
    return h


def _asynchronous(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    h = program.x
    for weight in program.weights:
        h = h @ weight
        work = reduce(h, async_op=True)
        work.wait()
        del work
    return h


def _side_stream(program: _Program, reduce: _AllReduce, *, record: bool = False) -> torch.Tensor:
    main = torch.cuda.current_stream()
    h = program.x
    for weight in program.weights:
        h = h @ weight
        program.side.wait_stream(main)
        with torch.cuda.stream(program.side):
            reduce(h)
        if record:
            h.record_stream(program.side)
        main.wait_stream(program.side)
    return h


def _recorded(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    return _side_stream(program, reduce, record=True)


def _converted(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    with avoid_record_streams():
        return _recorded(program, reduce)


def _dropped(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    for weight in program.weights:
        y = program.x @ weight
        reduce(y, async_op=True)
    return y


_TORCH = "torch.distributed"
_OURS = "safecomm"
_LIBRARIES: dict[str, _AllReduce] = {"-": all_reduce, _TORCH: torch.distributed.all_reduce, _OURS: all_reduce}

WAYS: list[tuple[str, str, _Way]] = [
    ("without communication", "-", _without),
    ("synchronous", _TORCH, _synchronous),
    ("synchronous", _OURS, _synchronous),
    ("async + wait", _TORCH, _asynchronous),
    ("async + wait", _OURS, _asynchronous),
    ("side stream + record_stream", _TORCH, _recorded),
    ("side stream + record_stream", _OURS, _converted),
    ("side stream", _OURS, _side_stream),
    ("handles dropped", _TORCH, _dropped),
    ("handles dropped", _OURS, _dropped),
]
"""The ways to run it, each with its name and its library."""

SNAPSHOTS = {"stock": _recorded, "safecomm": _converted}
"""The ways of which a memory snapshot is written, by the name of its file."""


# --- one rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """What one rank measured of one way."""

    peaks: list[int]
    unusable: int
    held: int
    held_after_drain: int | None
    seconds: list[float]
    numbers: str


class _Rank:
    """One process of the run, once its group is there."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.program = _Program(settings, rank)
        # This also warms up: the communicator, and the libraries' workspaces.
        self.reference = _synchronous(self.program, torch.distributed.all_reduce).cpu()
        last = self.program.x @ self.program.weights[-1]
        torch.distributed.all_reduce(last)
        self.reference_of_dropped = last.cpu()

    def align(self) -> None:
        """Bring all ranks, and the memory of each, to the same point."""
        drain(wait=True)
        # Also has torch let go of the works that it has not been asked to wait for.
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def measure(self, way: _Way, library: str) -> _Measured:
        """Run ``way`` one pass more than asked for, and return what the passes after the first took."""
        peaks: list[int] = []
        seconds: list[float] = []
        unusable = held = drained = 0
        numbers = "-"
        for number in range(self.settings.passes + 1):
            self.align()
            base = torch.cuda.memory_allocated()
            final: torch.Tensor | None = None
            start = time.perf_counter()
            for _ in range(self.settings.iterations):
                final = None
                final = way(self.program, _LIBRARIES[library])
                stats = torch.cuda.memory_stats()
                freed = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
                unusable = max(unusable, freed) if number else 0
            torch.cuda.synchronize()
            spent = (time.perf_counter() - start) / self.settings.iterations
            if library != "-" and final is not None:
                numbers = _worse(numbers, self.compare(final.cpu(), dropped=way is _dropped))
            final = None
            if number:
                # Those included that could not be given out again.
                peaks.append(int(torch.cuda.memory_stats()["active_bytes.all.peak"]) - base)
                seconds.append(spent)
                held = max(held, torch.cuda.memory_allocated() - base)
            if library == _OURS:
                drain()
                drained = max(drained, torch.cuda.memory_allocated() - base)
        return _Measured(peaks, unusable, held, drained if library == _OURS else None, seconds, numbers)

    def snapshot(self, name: str, folder: Path | None) -> None:
        """Run one more pass of a way, and write what the allocator did in it to ``folder``, if there is one."""
        self.align()
        library = _LIBRARIES[_OURS if name == "safecomm" else _TORCH]
        with contextlib.nullcontext() if folder is None else _torch.memory_history(folder / f"{name}.pickle"):
            for _ in range(self.settings.iterations):
                SNAPSHOTS[name](self.program, library)
        torch.cuda.synchronize()

    def compare(self, final: torch.Tensor, *, dropped: bool) -> str:
        """Return how ``final`` compares with the reference."""
        reference = self.reference_of_dropped if dropped else self.reference
        if torch.equal(final, reference):
            return "same"
        error = float((final.double() - reference.double()).abs().max())
        largest = float(reference.double().abs().max())
        # Each layer rounds once more. A NaN compares false.
        allowed = 4 * self.settings.layers * torch.finfo(final.dtype).eps * largest
        return "rounding" if error <= allowed else "DIFFERENT"


_GRADES = ("-", "same", "rounding", "DIFFERENT")


def _worse(one: str, other: str) -> str:
    return max(one, other, key=_GRADES.index)


def fitting(settings: Settings, given: set[str], free: int) -> Settings:
    """Return ``settings`` with the sizes that are not ``given`` small enough for ``free`` bytes.

    Raises Refused if they can't be.
    """
    while settings.needed_bytes > free:
        rows, cols = settings.rows, settings.cols
        if "cols" not in given and cols > _SMALLEST and (cols >= rows or "rows" in given):
            settings = replace(settings, cols=cols // 2)
        elif "rows" not in given and rows > _SMALLEST:
            settings = replace(settings, rows=rows // 2)
        else:
            raise Refused(
                f"{settings.layers} layers of {rows} x {cols} {settings.dtype}, {settings.iterations} iterations, need "
                f"up to {_mib(settings.needed_bytes)} MiB for each rank, and {_mib(free)} MiB are free"
            )
    return settings


def _log_to(messages: list[str]) -> None:
    """Collect what safecomm logs, rather than have it printed amid the progress."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("safecomm")
    logger.addHandler(Collect(logging.WARNING))
    logger.propagate = False


def _work(
    send: Callable[[object], None], rank: int, settings: Settings, given: set[str], rendezvous: str, folder: Path
) -> None:
    """Run one rank: send what it is, a measurement of each way, and what was logged."""
    messages: list[str] = []
    _log_to(messages)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl",
        init_method=rendezvous,
        rank=rank,
        world_size=settings.world,
        timeout=timedelta(seconds=settings.limit),
        device_id=torch.device("cuda", rank),
    )
    least = torch.tensor(torch.cuda.mem_get_info()[0], device="cuda")
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    settings = fitting(settings, given, int(int(least) * 0.9))
    this = _Rank(settings, rank)
    versions = {
        "safecomm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]
    }
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    send(Report(settings, f"{settings.world} x {torch.cuda.get_device_name()}", versions, date))
    for _, library, way in WAYS:
        send(this.measure(way, library))
    for name in SNAPSHOTS:
        this.snapshot(name, folder if rank == 0 else None)
    destroy_process_group()
    send(messages)


# --- all of them ------------------------------------------------------------------------------------------


def run(settings: Settings, given: set[str], folder: Path, progress: Callable[[str], None]) -> Report:
    """Run the program on the GPUs of this machine, and return what was measured.

    Sizes that are not among the names ``given`` may be made smaller, to fit. Rank 0 writes into ``folder`` a memory
    snapshot of a pass on a side stream with ``record_stream``, and of the same under safecomm, as ``SNAPSHOTS`` names
    them.

    Raises
    ------
    ValueError
        If the sizes do not fit.
    SafecommError
        If a rank fails, or does not finish in time.

    """
    progress(f"starting {settings.world} ranks")
    report: Report | None = None
    measured: list[list[_Measured]] = [[] for _ in range(settings.world)]
    with tempfile.TemporaryDirectory(prefix="safecomm-demo-", ignore_cleanup_errors=True) as store:
        rendezvous = (Path(store) / "store").as_uri()
        with contextlib.closing(
            launch(settings.world, _work, settings, given, rendezvous, folder, limit=settings.limit)
        ) as heard:
            for rank, content in heard:
                if isinstance(content, _Measured):
                    measured[rank].append(content)
                elif rank == 0 and isinstance(content, Report):
                    report = content
                    progress(report.title())
                elif rank == 0:
                    assert report is not None
                    report.messages.extend(content)
                while report is not None and len(report.rows) < min(map(len, measured)):
                    number = len(report.rows)
                    report.rows.append(row(*WAYS[number][:2], [of_rank[number] for of_rank in measured]))
                    progress(f"[{number + 1}/{len(WAYS)}] {report.rows[-1]}")
    assert report is not None
    return report


def row(way: str, library: str, ranks: list[_Measured]) -> Row:
    """Return what the ``ranks`` have measured of one way."""
    numbers = "-"
    for rank in ranks:
        numbers = _worse(numbers, rank.numbers)
    drained = [rank.held_after_drain for rank in ranks if rank.held_after_drain is not None]
    return Row(
        way=way,
        library=library,
        peak=max(max(rank.peaks) for rank in ranks),
        peaks=[rank.peaks for rank in ranks],
        unusable=max(rank.unusable for rank in ranks),
        held=max(rank.held for rank in ranks),
        held_after_drain=max(drained, default=None),
        milliseconds=1e3 * max(statistics.median(rank.seconds) for rank in ranks),
        numbers=numbers,
    )
