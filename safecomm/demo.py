"""The program that shows what safecomm is for: layers of matmul, each followed by an all_reduce.

It runs for real, one process a rank, in several ways, and measures the memory of each: ``python -m safecomm demo``, or
:func:`run_demo`. The numbers that the ways compute are compared with each other.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from safecomm import _torch
from safecomm.collectives.groups import destroy_process_group
from safecomm.collectives.reduce import all_reduce
from safecomm.errors import SafecommError
from safecomm.ledger import drain
from safecomm.record_stream import avoid_record_streams

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""The element types that the demo runs with, by name."""

_MIB = 1 << 20
_GPU_SIZES = (4096, 8192, "bfloat16")
_CPU_SIZES = (512, 512, "float32")
_SMALLEST = 64
_MOST_CPU_RANKS = 64


@dataclass(frozen=True)
class Settings:
    """What is run, and on what."""

    device: str
    """``"cuda"`` or ``"cpu"``."""
    backend: str
    """``"nccl"`` or ``"gloo"``."""
    world: int
    """Ranks: one process each, and on CUDA one GPU each."""
    layers: int
    """Layers of an iteration: one matmul and one all_reduce each."""
    iterations: int
    """Iterations of a pass."""
    passes: int
    """Measured passes of each way, after one that is not measured."""
    rows: int
    """Rows of what a layer computes."""
    cols: int
    """Columns of what a layer computes; the weights have as many rows."""
    dtype: str
    """Name of the element type."""
    limit: float
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


@dataclass(frozen=True)
class Row:
    """What was measured of one way with one library. Bytes and times are those of the rank with the most."""

    way: str
    """The way, such as ``"async + wait"``."""
    library: str
    """``"torch.distributed"``, ``"safecomm"``, or ``"-"`` where nothing is communicated."""
    peak: int
    """Bytes above the base, at most. CUDA: of the caching allocator's active blocks, used or not reusable yet;
    CPU: of the live storages that the program made, looked at after each matmul."""
    peaks: list[list[int]]
    """The same for each rank and each pass."""
    unusable: int | None
    """Bytes that the program freed and the allocator could not give out again, the most seen when an iteration had been
    queued (CUDA: active - allocated); None on the CPU."""
    held: int
    """Bytes above the base at the end of a pass, when the program has dropped its tensors and the communication is over
    (CUDA: after ``torch.cuda.synchronize()``; CPU: after a barrier), before any other call."""
    held_after_drain: int | None
    """The same after ``safecomm.drain()``; None for other libraries."""
    milliseconds: float
    """Time of an iteration: of a pass, until all of it is over, divided by its iterations; the median of the passes."""
    numbers: str
    """The final tensor against the reference: ``"same"`` bit for bit, ``"rounding"``, ``"DIFFERENT"``, or ``"-"``."""


@dataclass(frozen=True)
class Report:
    """The outcome of a demo."""

    settings: Settings
    device: str
    """Name of the GPUs, or of the processor's architecture."""
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

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what ``json.dumps`` takes."""
        return {**asdict(self), "ok": self.ok}

    def table(self) -> str:
        """Return the rows as text, with what the columns mean."""
        cuda = self.settings.device == "cuda"
        head = ["way", "library", "peak", "freed but unusable", "held at the end", "after drain()", "ms", "numbers"]
        lines = [head] + [
            [
                row.way,
                row.library,
                _mib(row.peak),
                _mib(row.unusable),
                _mib(row.held),
                _mib(row.held_after_drain),
                f"{row.milliseconds:.2f}",
                row.numbers,
            ]
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        lines.insert(1, ["-" * width for width in widths])
        text = "\n".join(
            "  ".join(
                cell.ljust(width) if column in (0, 1, 7) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        what = (
            "active bytes of the caching allocator (in use, or freed but not reusable yet)"
            if cuda
            else "live bytes of the tensors that the program made, looked at after each matmul"
        )
        end = "device synchronize" if cuda else "barrier"
        notes = [
            f"Memory in MiB above the base (weights and input), on the rank with the most; one layer's result is "
            f"{_mib(self.settings.buffer_bytes)} MiB.",
            f"peak: {what}.",
            "freed but unusable: "
            + ("active - allocated bytes, the most seen when an iteration had been queued." if cuda else "CUDA only."),
            "held at the end: what is not given back when the program has dropped its tensors, after a "
            f"{end} and before any other call; after drain(): once safecomm.drain() was called.",
            f"ms: time of one iteration, median of {self.settings.passes} passes.",
            "numbers: the final tensor against a synchronous all_reduce with torch.distributed.",
        ]
        return "\n".join([text, "", *notes])


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / _MIB:.1f}"


# --- the ways ------------------------------------------------------------------------------------------
#
# Each runs one iteration and returns its final tensor. Each layer reads what the layer before has reduced, but for the
# way that drops its handles: what nobody waits for must not be read, so there each layer reads the input.


class _Program:
    """One rank's tensors, and what is measured of them while they are made."""

    def __init__(self, settings: Settings, device: torch.device, rank: int) -> None:
        dtype = DTYPES[settings.dtype]
        # The input is the same on every rank, the weights are each rank's own. The scale keeps the values near 1.
        common = torch.Generator(device).manual_seed(0)
        own = torch.Generator(device).manual_seed(1 + rank)
        scale = (settings.cols * settings.world) ** -0.5
        shape = (settings.rows, settings.cols)
        self.device = device
        self.x = torch.randn(shape, dtype=dtype, device=device, generator=common)
        self.weights = [
            torch.randn((settings.cols, settings.cols), dtype=dtype, device=device, generator=own).mul_(scale)
            for _ in range(settings.layers)
        ]
        self.live = _LiveStorages() if device.type == "cpu" else None
        self.side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def layer(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.mm(h, weight)
        if self.live is not None:
            self.live.add(y)
        return y


class _LiveStorages:
    """Bytes of the storages that are alive, among those that it was shown."""

    def __init__(self) -> None:
        self._seen: list[tuple[Any, int]] = []
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._seen.append((_torch.StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.count())

    def count(self) -> int:
        self._seen = [(reference, nbytes) for reference, nbytes in self._seen if not reference.expired()]
        return sum(nbytes for _, nbytes in self._seen)


_AllReduce = Callable[..., Any]
_Way = Callable[[_Program, _AllReduce], torch.Tensor]


def _without(program: _Program, _: _AllReduce) -> torch.Tensor:
    h = program.x
    for weight in program.weights:
        h = program.layer(h, weight)
    return h


def _synchronous(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    h = program.x
    for weight in program.weights:
        h = program.layer(h, weight)
        reduce(h)
    return h


def _asynchronous(program: _Program, reduce: _AllReduce) -> torch.Tensor:
    h = program.x
    for weight in program.weights:
        h = program.layer(h, weight)
        work = reduce(h, async_op=True)
        work.wait()
        del work
    return h


def _side_stream(program: _Program, reduce: _AllReduce, *, record: bool = False) -> torch.Tensor:
    main = torch.cuda.current_stream()
    h = program.x
    for weight in program.weights:
        h = program.layer(h, weight)
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
        y = program.layer(program.x, weight)
        reduce(y, async_op=True)
    return y


_TORCH = "torch.distributed"
_OURS = "safecomm"
_LIBRARIES: dict[str, _AllReduce] = {"-": all_reduce, _TORCH: torch.distributed.all_reduce, _OURS: all_reduce}


def _plan(device: str) -> list[tuple[str, str, _Way]]:
    """Return the ways to run, each with its name and its library."""
    side: list[tuple[str, str, _Way]] = [
        ("side stream + record_stream", _TORCH, _recorded),
        ("side stream + record_stream", _OURS, _converted),
        ("side stream", _OURS, _side_stream),
    ]
    return [
        ("without communication", "-", _without),
        ("synchronous", _TORCH, _synchronous),
        ("synchronous", _OURS, _synchronous),
        ("async + wait", _TORCH, _asynchronous),
        ("async + wait", _OURS, _asynchronous),
        *(side if device == "cuda" else []),
        ("handles dropped", _TORCH, _dropped),
        ("handles dropped", _OURS, _dropped),
    ]


# --- one rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """What one rank measured of one way."""

    peaks: list[int]
    unusable: int | None
    held: int
    held_after_drain: int | None
    seconds: list[float]
    numbers: str


class _Rank:
    """One process of the demo, once its group is there."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.cuda = settings.device == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.program = _Program(settings, self.device, rank)
        # This also warms up: the communicator, and the libraries' workspaces.
        self.reference = _synchronous(self.program, torch.distributed.all_reduce).cpu()
        last = self.program.layer(self.program.x, self.program.weights[-1])
        torch.distributed.all_reduce(last)
        self.reference_of_dropped = last.cpu()

    def settle(self) -> None:
        """Wait until all that was launched is complete, on this rank's side, without a call of safecomm."""
        if self.cuda:
            torch.cuda.synchronize()
        else:
            torch.distributed.barrier()  # gloo's waits for all works before it, dropped or not
            time.sleep(0.02)  # for gloo's threads to let go of what they have completed

    def align(self) -> None:
        """Bring all ranks, and the memory of each, to the same point."""
        drain(wait=True)
        if self.cuda:
            # Also has torch let go of the works that it has not been asked to wait for.
            torch.distributed.all_reduce(torch.zeros(1, device=self.device))
        else:
            torch.distributed.barrier()
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elif self.program.live is not None:
            self.program.live.peak = self.program.live.count()

    def now(self) -> int:
        """Return the bytes that are in use."""
        return torch.cuda.memory_allocated() if self.program.live is None else self.program.live.count()

    def peak(self) -> int:
        """Return the most bytes in use since :meth:`align`, those included that could not be given out again."""
        live = self.program.live
        return int(torch.cuda.memory_stats()["active_bytes.all.peak"]) if live is None else live.peak

    def measure(self, way: _Way, library: str) -> _Measured:
        """Run ``way`` one pass more than asked for, and return what the passes after the first took."""
        peaks: list[int] = []
        seconds: list[float] = []
        unusable = held = drained = 0
        numbers = "-"
        for number in range(self.settings.passes + 1):
            self.align()
            base = self.now()
            final: torch.Tensor | None = None
            start = time.perf_counter()
            for _ in range(self.settings.iterations):
                final = None
                final = way(self.program, _LIBRARIES[library])
                if self.cuda:
                    stats = torch.cuda.memory_stats()
                    freed = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
                    unusable = max(unusable, freed) if number else 0
            self.settle()
            spent = (time.perf_counter() - start) / self.settings.iterations
            if library != "-" and final is not None:
                numbers = _worse(numbers, self.compare(final.cpu(), dropped=way is _dropped))
            final = None
            if number:
                peaks.append(self.peak() - base)
                seconds.append(spent)
                held = max(held, self.now() - base)
            if library == _OURS:
                drain()
                drained = max(drained, self.now() - base)
        return _Measured(
            peaks, unusable if self.cuda else None, held, drained if library == _OURS else None, seconds, numbers
        )

    def snapshot(self, way: _Way, library: str, path: Path | None) -> None:
        """Run one more pass of ``way``, and write what the allocator did in it to ``path``, if there is one."""
        self.align()
        with contextlib.nullcontext() if path is None else _torch.memory_history(path):
            for _ in range(self.settings.iterations):
                way(self.program, _LIBRARIES[library])
        self.settle()

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


class _TooLargeError(Exception):
    """The sizes that were asked for do not fit."""


def _free_bytes(settings: Settings) -> int | None:
    """Return the memory that a rank can have; None if nobody knows."""
    if settings.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // settings.world
    return None


def _fit(settings: Settings, given: tuple[bool, bool]) -> Settings:
    """Return ``settings`` with the sizes that are not ``given`` small enough for the rank with the least memory."""
    device = "cuda" if settings.device == "cuda" else "cpu"
    mine = _free_bytes(settings)
    least = torch.tensor(1 << 62 if mine is None else mine, device=device)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    free = int(int(least) * 0.9)
    while settings.needed_bytes > free:
        rows, cols = settings.rows, settings.cols
        if not given[1] and cols > _SMALLEST and (cols >= rows or given[0]):
            settings = replace(settings, cols=cols // 2)
        elif not given[0] and rows > _SMALLEST:
            settings = replace(settings, rows=rows // 2)
        else:
            raise _TooLargeError(
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


def _watch_parent() -> None:
    """End this process when the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch(parent: BaseProcess) -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def _work(
    rank: int, settings: Settings, given: tuple[bool, bool], rendezvous: str, pipe: Any, snapshots: Path | None
) -> None:
    """Run one rank, and send what it measures, in pairs of a kind and what belongs to it."""
    _watch_parent()
    messages: list[str] = []
    _log_to(messages)
    try:
        options: dict[str, Any] = {}
        if settings.device == "cuda":
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.world))
        torch.distributed.init_process_group(
            settings.backend,
            init_method=rendezvous,
            rank=rank,
            world_size=settings.world,
            timeout=timedelta(seconds=settings.limit),
            **options,
        )
        settings = _fit(settings, given)
        this = _Rank(settings, rank)
        pipe.send(("start", (settings, _device_name(settings), _versions(settings))))
        for _, library, way in _plan(settings.device):
            pipe.send(("row", this.measure(way, library)))
        if snapshots is not None:
            this.snapshot(_recorded, _TORCH, snapshots / f"{_TORCH}.pickle" if rank == 0 else None)
            this.snapshot(_converted, _OURS, snapshots / f"{_OURS}.pickle" if rank == 0 else None)
        destroy_process_group()
        pipe.send(("end", messages))
    except _TooLargeError as error:
        pipe.send(("large", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()


def _device_name(settings: Settings) -> str:
    if settings.device == "cuda":
        return f"{settings.world} x {torch.cuda.get_device_name()}"
    return f"{settings.world} processes on {platform.machine()}, {os.cpu_count()} cores"


def _versions(settings: Settings) -> dict[str, str]:
    version = str(sys.modules["safecomm"].__version__)  # read, not imported: the package is above this module
    found = {"safecomm": version, "torch": torch.__version__, "python": platform.python_version()}
    if settings.device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


# --- the process that starts them ------------------------------------------------------------------------


def _checked(
    device: str,
    world: int | None,
    layers: int,
    iterations: int,
    rows: int | None,
    cols: int | None,
    dtype: str | None,
    passes: int,
    limit: float,
) -> Settings:
    """Return the settings that the arguments of :func:`run_demo` ask for. Raises ValueError where they can't be had."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, not {device!r}")
    numbers = {"layers": layers, "iterations": iterations, "passes": passes, "rows": rows, "cols": cols}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not limit > 0:
        raise ValueError(f"the time limit must be more than 0 seconds, not {limit}")
    if world is not None and world < 2:
        raise ValueError(f"world must be at least 2, not {world}: a single rank has nobody to communicate with")
    gpus = torch.cuda.device_count()
    usable = gpus if torch.distributed.is_nccl_available() else 0
    if device == "auto":
        device = "cuda" if usable >= max(2, world or 2) else "cpu"
    if device == "cuda" and not usable:
        raise ValueError("cuda needs GPUs and a torch with NCCL, and here there are none")
    if device == "cuda" and usable < max(2, world or 2):
        raise ValueError(f"cuda with {max(2, world or 2)} ranks needs as many GPUs, and here there are {usable}")
    if device == "cpu" and (world or 2) > _MOST_CPU_RANKS:
        raise ValueError(f"world must be at most {_MOST_CPU_RANKS} on the CPU, not {world}: each rank is a process")
    if device == "cpu" and not torch.distributed.is_gloo_available():
        raise ValueError("this torch has no gloo, which ranks on the CPU need")
    default = _GPU_SIZES if device == "cuda" else _CPU_SIZES
    dtype = dtype or str(default[2])
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return Settings(
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        world=world or (usable if device == "cuda" else 2),
        layers=layers,
        iterations=iterations,
        passes=passes,
        rows=rows or int(default[0]),
        cols=cols or int(default[1]),
        dtype=dtype,
        limit=limit,
    )


def run_demo(
    *,
    device: str = "auto",
    world: int | None = None,
    layers: int = 8,
    iterations: int = 5,
    rows: int | None = None,
    cols: int | None = None,
    dtype: str | None = None,
    passes: int = 3,
    limit: float = 120.0,
    progress: Callable[[str], None] | None = None,
    snapshots: Path | None = None,
) -> Report:
    """Run the demo, and return what it measured.

    It starts ``world`` processes, which end with the call, also when it raises. A script that calls it must do so under
    ``if __name__ == "__main__":``, as always with processes that are spawned.

    Parameters
    ----------
    device
        ``"cuda"``: NCCL, a GPU for each rank. ``"cpu"``: gloo. ``"auto"``: CUDA if there are GPUs enough.
    world
        Ranks; by default all GPUs, or 2 on the CPU.
    layers, iterations
        Each iteration runs ``layers`` times a matmul and an all_reduce.
    rows, cols, dtype
        Shape and type of what a layer computes. By default 4096 x 8192 bfloat16 on GPUs and 512 x 512 float32 on the
        CPU, or less if memory is short.
    passes
        Measured passes of ``iterations`` iterations, for each way.
    limit
        Seconds that one way, or the start, may take before the demo gives up.
    progress
        Called with a line of text as the demo goes along.
    snapshots
        A folder into which rank 0 also writes a memory snapshot of a pass on a side stream with ``record_stream``,
        ``torch.distributed.pickle``, and of the same under safecomm, ``safecomm.pickle``. Needs CUDA.

    Raises
    ------
    ValueError
        If the arguments are wrong or ask for what this machine does not have.
    SafecommError
        If a rank fails, or does not finish in time.

    """
    settings = _checked(device, world, layers, iterations, rows, cols, dtype, passes, limit)
    if snapshots is not None and settings.device != "cuda":
        raise ValueError("memory snapshots need GPUs: on the CPU there is no caching allocator")
    given = (rows is not None, cols is not None)
    processes: list[BaseProcess] = []
    pipes: list[Any] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="safecomm-demo-", ignore_cleanup_errors=True) as folder:
        rendezvous = (Path(folder) / "store").as_uri()
        try:
            with _uninterrupted():
                for rank in range(settings.world):
                    ours, theirs = context.Pipe(duplex=False)
                    process: BaseProcess = context.Process(
                        target=_work, args=(rank, settings, given, rendezvous, theirs, snapshots), daemon=True
                    )
                    pipes.append(ours)
                    processes.append(process)
                    process.start()
                    theirs.close()
            report = _collect(settings, processes, pipes, progress or (lambda line: None))
            for rank, process in enumerate(processes):
                process.join(30)
                if process.exitcode != 0:
                    raise SafecommError(f"rank {rank} measured everything but did not end well: {process.exitcode}")
            return report
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Leave Ctrl-C to this process alone: those that are started inside ignore it, and are ended by this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(processes: list[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _collect(
    settings: Settings, processes: list[BaseProcess], pipes: list[Any], progress: Callable[[str], None]
) -> Report:
    """Receive what the ranks send until all have ended."""
    plan = _plan(settings.device)
    report = Report(settings, "", {}, datetime.now(timezone.utc).isoformat(timespec="seconds"))
    measured: list[list[_Measured]] = [[] for _ in pipes]
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    started: set[int] = set()
    doing = "the start"
    progress(f"starting {settings.world} {settings.backend} ranks on {settings.device}")
    deadline = time.monotonic() + settings.limit
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise SafecommError(f"{doing} took more than {settings.limit:g} s, and was ended")
        for pipe in ready:
            rank = waiting[pipe]
            kind, content = _receive(pipe, rank, processes)
            if kind == "large":
                raise ValueError(content)
            if kind == "failed":
                raise SafecommError(f"rank {rank} failed in {doing}:\n{content}")
            if kind == "start":
                started.add(rank)
                if rank == 0:
                    report = replace(report, settings=content[0], device=content[1], versions=content[2])
                if len(started) == len(pipes):
                    progress(_describe(report))
                    deadline = time.monotonic() + settings.limit
            elif kind == "row":
                measured[rank].append(content)
            elif kind == "end":
                del waiting[pipe]
                if rank == 0:
                    report.messages.extend(content)
        while len(report.rows) < min(len(of_rank) for of_rank in measured):
            number = len(report.rows)
            row = _row(plan[number][0], plan[number][1], [of_rank[number] for of_rank in measured])
            report.rows.append(row)
            progress(
                f"[{number + 1}/{len(plan)}] {_title(row)}: peak {_mib(row.peak)} MiB, "
                f"{row.milliseconds:.2f} ms per iteration, numbers {row.numbers}"
            )
            deadline = time.monotonic() + settings.limit
        if len(started) == len(pipes):
            doing = "the end" if len(report.rows) == len(plan) else f"{' with '.join(plan[len(report.rows)][:2])}"
    return report


def _receive(pipe: Any, rank: int, processes: list[BaseProcess]) -> tuple[str, Any]:
    try:
        received: tuple[str, Any] = pipe.recv()
    except EOFError:
        processes[rank].join(5)
        raise SafecommError(f"rank {rank} ended in the middle, with exit status {processes[rank].exitcode}") from None
    return received


def _row(way: str, library: str, ranks: list[_Measured]) -> Row:
    numbers = "-"
    for rank in ranks:
        numbers = _worse(numbers, rank.numbers)
    return Row(
        way=way,
        library=library,
        peak=max(max(rank.peaks) for rank in ranks),
        peaks=[rank.peaks for rank in ranks],
        unusable=_most([rank.unusable for rank in ranks]),
        held=max(rank.held for rank in ranks),
        held_after_drain=_most([rank.held_after_drain for rank in ranks]),
        milliseconds=1e3 * max(statistics.median(rank.seconds) for rank in ranks),
        numbers=numbers,
    )


def _most(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _title(row: Row) -> str:
    return row.way if row.library == "-" else f"{row.way}, {row.library}"


def _describe(report: Report) -> str:
    settings = report.settings
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f"{report.device} ({versions}): {settings.layers} layers of {settings.rows} x {settings.cols} "
        f"{settings.dtype}, {settings.iterations} iterations, {settings.passes} passes"
    )


__all__ = ["DTYPES", "Report", "Row", "Settings", "run_demo"]
