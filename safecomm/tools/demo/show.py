"""The demo: what is refused and what is found on any machine, and two pictures of one program's memory."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from safecomm.tools.demo import pictures, program, shown
from safecomm.tools.demo.pictures import MIB, Letters, Picture

RECORDED = Path(__file__).with_name("recorded.json")
"""What was found on two GPUs, from the snapshots that ``benchmarks/record_snapshots.py`` has written there."""


@dataclass(frozen=True)
class Outcome:
    """What the demo has found."""

    found: dict[str, Any]
    """What :func:`program.run` returns."""
    recorded: bool
    """Whether that was found on another machine."""
    shown: list[shown.Shown]

    @property
    def ok(self) -> bool:
        """Whether all came out as it must."""
        return all(one.ok for one in self.shown)

    @property
    def pictures(self) -> list[Picture]:
        """The memory of both runs of the program."""
        return [Picture(one["title"], [(*step,) for step in one["steps"]]) for one in self.found["pictures"]]

    @property
    def heading(self) -> str:
        """What the pictures are of."""
        found = self.found
        where = f"on {program.RANKS} x {found['device']}, {found['date']} (torch {found['torch']})"
        return (
            f"The memory of one rank in {program.ITERATIONS} iterations of {program.LAYERS} layers: a matmul, and an "
            f"all_reduce of its result of {found['rows']} x {program.COLS} on a side stream, "
            + (f"recorded {where}, because two GPUs are needed to run it:" if self.recorded else f"{where}:")
        )

    @property
    def conclusion(self) -> str:
        """What the pictures say, in a sentence."""
        stock, ours = self.pictures
        less = round(100 * (1 - ours.peak / stock.peak))
        return (
            f"With record_stream this program takes {stock.peak // MIB} MiB, of which up to "
            f"{stock.most_waiting // MIB} MiB are freed and can't be used; with safecomm it takes "
            f"{ours.peak // MIB} MiB, " + (f"{less} % less." if less > 0 else "which is not less.")
        )

    def text(self, width: int, letters: Letters, *, colour: bool) -> str:
        """Return it for a terminal of ``width`` columns."""
        # The pictures are last, because that is what stays on a small terminal.
        drawn = pictures.draw(self.pictures, width, letters, colour=colour)
        parts = [one.text(width) for one in self.shown]
        return "\n\n".join([*parts, textwrap.fill(self.heading, width), drawn, textwrap.fill(self.conclusion, width)])

    def to_json(self) -> dict[str, object]:
        """Return all of it as what ``json.dumps`` takes."""
        shown = [asdict(one) for one in self.shown]
        return {**self.found, "recorded": self.recorded, "shown": shown, "conclusion": self.conclusion, "ok": self.ok}


def demo(device: str) -> Outcome:
    """Run the demo, on the GPUs of this machine, or with what was recorded on others.

    Parameters
    ----------
    device
        ``"cuda"``: on two GPUs. ``"cpu"``: as it was recorded. ``"auto"``: on GPUs if there are two.

    Raises
    ------
    ValueError
        If GPUs are asked for, and there are not two of them, or they have no room.
    SafecommError
        If a rank fails, or does not finish in time.
    """
    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if device == "cuda" and gpus < program.RANKS:
        raise ValueError(f"--device cuda needs {program.RANKS} GPUs and NCCL, and here there are {gpus}")
    recorded = device == "cpu" or gpus < program.RANKS
    found = json.loads(RECORDED.read_text()) if recorded else program.run()
    return Outcome(found, recorded, [shown.boundary(), shown.leak()])
