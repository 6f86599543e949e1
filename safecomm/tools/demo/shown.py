"""What is shown on any machine: each piece runs as it is shown, on the real ledger."""

from __future__ import annotations

import gc
import itertools
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from safecomm import backends
from safecomm.collectives.routes import Routes
from safecomm.core.ledger import Ledger
from safecomm.core.work import handle
from safecomm.diagnostics import leaks
from safecomm.errors import CaptureBoundaryError
from safecomm.tools.demo.simulated import INDEX, Block, SimulatedDevice

_MAIN, _SIDE = 0, 1


@dataclass(frozen=True)
class Shown:
    """One thing that was shown."""

    title: str
    lines: list[str]
    ok: bool
    """Whether it came out as it must."""

    def text(self, width: int) -> str:
        """Return it for a terminal of ``width`` columns."""
        wrapped = [self.title]
        for line in self.lines:
            indent = " " * (3 + len(line) - len(line.lstrip()))
            # A word may be longer than a line: the name of a file is left in one piece.
            wrapped += textwrap.wrap(
                line.lstrip(), width, initial_indent=indent, subsequent_indent=f"{indent}  ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
        return "\n".join(wrapped)


# --- memory that is given out too early -------------------------------------------------------------------------------


class _Memory(SimulatedDevice):
    """A simulated device on which each piece of memory has a value, as a tensor that is filled with it would."""

    def __init__(self, *, main_first: bool) -> None:
        super().__init__()
        self.values: dict[Block, float] = {}
        self._kernels: dict[int, tuple[Block, Callable[[float], float]]] = {}
        self._pick = -1 if main_first else 0

    def check_free(self, block: Block) -> None:
        """Find nothing wrong: a caching allocator asks for no other stream than that of the allocation either."""

    def kernel(self, stream: int, tensor: torch.Tensor, compute: Callable[[float], float]) -> None:
        """Launch on ``stream`` what gives ``tensor`` another value."""
        (block,) = self.blocks_of([tensor])
        self._kernels[self.launch(self.streams[stream], [block])] = block, compute

    def run_all(self) -> None:
        """Run what was launched."""
        while self.run(self._pick):
            for bit in [bit for bit in self._kernels if bit & self.done]:
                block, compute = self._kernels.pop(bit)
                self.values[block] = compute(self.values.get(block, 0.0))


def _program(device: _Memory, after_the_collective: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, Block]:
    """Reduce a tensor on the side stream, drop it, make another; return that one, and what the first one had."""
    y = device.allocate(_MAIN, 64)
    device.kernel(_MAIN, y, lambda _: 3.0)  # y = x @ w
    side = device.streams[_SIDE]
    device.wait(side, device.streams[_MAIN].past, 0)  # side.wait_stream(main)
    with device.using(INDEX, _SIDE):
        device.kernel(_SIDE, y, lambda value: 2 * value)  # all_reduce(y), of two ranks that have the same
        after_the_collective(y)
    first = device.blocks_of([y])[0]
    del y
    z = device.allocate(_MAIN, 64)
    device.kernel(_MAIN, z, lambda _: 1.0)  # z = torch.ones(...)
    return z, first


def corruption() -> Shown:
    """Show a tensor that a collective overwrites, because it has its memory too early; and that it need not."""
    stock = _Memory(main_first=True)
    z, _ = _program(stock, lambda _: None)
    stock.run_all()
    corrupted = stock.values[stock.blocks_of([z])[0]]

    ours = _Memory(main_first=True)
    ledger, group = Ledger(ours), _Group()

    def leave(y: torch.Tensor) -> None:
        ledger.hand_off("all_reduce", group, INDEX, (y.untyped_storage(),), sys._getframe())

    z, first = _program(ours, leave)
    ours.run_all()
    right = ours.values[ours.blocks_of([z])[0]]
    ledger.sweep(thorough=True)
    again = ours.is_free(first)
    return Shown(
        "1. A tensor that is overwritten, and one that is not",
        [
            "on a side stream dist.all_reduce(y); on the main one del y; z = torch.ones(n)",
            f"torch's rule      z is {corrupted:g}: it got y's memory, and the all_reduce came after",
            f"safecomm's rule   z is {right:g}: y's memory was kept until the all_reduce was over",
        ],
        corrupted != 1.0 and right == 1.0 and again,
    )


# --- a wait that would break a capture --------------------------------------------------------------------------------


class _Nccl:
    """Stands for ProcessGroupNCCL."""


backends.CLASSES[_Nccl] = backends.NCCL


class _Group:
    """Stands for a process group."""

    def _get_backend(self, device: torch.device) -> object:
        return _Nccl()


class _Work:
    """Stands for the work of a collective, which ran on a stream of the group's own."""

    def __init__(self, device: SimulatedDevice, tensor: torch.Tensor) -> None:
        self.device = device
        stream = device.new_stream()
        device.wait(stream, device.here().past, device.here().capture)
        device.launch(stream, device.blocks_of([tensor]))
        self.past, self.capture = stream.past, stream.capture

    def wait(self, timeout: object = None) -> bool:
        """Order the current stream after it: CUDA breaks the capture where that crosses its edge."""
        self.device.wait(self.device.here(), self.past, self.capture)
        return True

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self.device.query(self.past, self.capture)


def boundary() -> Shown:
    """Show a wait that would end a capture, refused."""
    device = SimulatedDevice()
    ledger, group = Ledger(device), _Group()
    y = device.allocate(_MAIN, 64)
    work = handle(once=False)
    inner = _Work(device, y)
    route = Routes(ledger).of(group, INDEX)
    route.hold(work, "all_reduce", inner, (y.untyped_storage(),), _MAIN, sys._getframe())
    device.begin_capture(_SIDE)
    said = ""
    try:
        work.wait()
    except CaptureBoundaryError as error:
        said = str(error)
    unharmed = device.streams[_SIDE].capture == device.capturing and not device.faults
    device.end_capture()
    work.wait()
    return Shown(
        "2. A wait that would break the capture of a CUDA graph, refused",
        ["work = dist.all_reduce(y, async_op=True); then, in a capture: work.wait()", f"CaptureBoundaryError: {said}"],
        bool(said) and unharmed,
    )


# --- a leak -----------------------------------------------------------------------------------------------------------


class _Trainer:
    """A training loop that keeps its losses, and with them the graph of each step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(256, 256)
        self.losses: list[torch.Tensor] = []

    def step(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).square().mean()
        self.losses.append(loss)  # .item() is missing


def leak() -> Shown:
    """Show a leak, with what holds it."""
    trainer = _Trainer()
    batch = torch.ones(64, 256)
    with leaks.watch(trainer.model, log_leaks=False) as watched:
        for _ in range(4):
            trainer.step(batch)
    gc.collect()
    found = watched.leaks
    return Shown(
        "3. A leak, found with what holds it",
        ["safecomm.leaks.watch(model):", *itertools.chain.from_iterable(str(one).split("\n") for one in found[:1])],
        bool(found),
    )


def everything() -> list[Shown]:
    """Show all of it."""
    return [corruption(), boundary(), leak()]
