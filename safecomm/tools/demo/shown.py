"""What is shown on any machine: each piece runs as it is shown."""

from __future__ import annotations

import gc
import itertools
import textwrap
from dataclasses import dataclass

import torch
import torch.distributed

from safecomm import functional
from safecomm.collectives.coalesced import _coalescing_manager
from safecomm.collectives.gates import all_reduce
from safecomm.collectives.groups import destroy_process_group
from safecomm.core.drain import pending
from safecomm.diagnostics import leaks
from safecomm.errors import SafecommError


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


# --- a call that would read what has not run --------------------------------------------------------------------------


def boundary() -> Shown:
    """Call in a coalescing region what is complete when it returns, and show that it is refused.

    Makes the default group of this process, and destroys it.
    """
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    y, said = torch.ones(4), ""
    with _coalescing_manager():
        all_reduce(y)
        try:
            functional.all_reduce(y)
        except SafecommError as error:
            said = str(error)
    unharmed = y.tolist() == [1.0] * 4 and not pending()  # what was collected has run
    destroy_process_group()
    return Shown(
        "1. A call that would read what has not run yet, refused",
        [
            "with dist._coalescing_manager(): dist.all_reduce(y); functional.all_reduce(y)",
            f"SafecommError: {said}",
        ],
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
        "2. A leak, found with what holds it",
        ["safecomm.leaks.watch(model):", *itertools.chain.from_iterable(str(one).split("\n") for one in found[:1])],
        bool(found),
    )
