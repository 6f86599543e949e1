"""The demo: two pictures of one program's memory, with what they say in words and as a page."""

from __future__ import annotations

import json
import platform
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from safecomm._version import __version__
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.report import Report
from safecomm.tools.demo import pictures, program, shown
from safecomm.tools.demo.pictures import Letters, Picture

RECORDED = Path(__file__).parents[2] / "recorded"
"""What ``benchmarks/record_snapshots.py`` recorded on GPUs."""

_TITLES = {"stock": "record_stream", "safecomm": "safecomm.avoid_record_streams()"}
_MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What the demo has found. On GPUs ``measured`` is there, elsewhere ``recorded`` and ``shown``."""

    heading: str
    pictures: list[Picture]
    reports: list[Report]
    """For the page."""
    measured: program.Report | None = None
    recorded: dict[str, object] = field(default_factory=dict)
    """Of the recorded runs: the machine, the date, and what the allocator counted."""
    shown: list[shown.Shown] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all came out as it must."""
        return all(one.ok for one in self.shown) and (self.measured is None or self.measured.ok)

    @property
    def conclusion(self) -> str:
        """What the pictures say, in a sentence."""
        stock, ours = self.pictures
        less = round(100 * (1 - ours.peak / stock.peak))
        return (
            f"With record_stream this program takes {stock.peak // _MIB} MiB, of which up to "
            f"{stock.most_waiting // _MIB} MiB are freed and nobody can use them; with safecomm it takes "
            f"{ours.peak // _MIB} MiB, " + (f"{less} % less." if less > 0 else "which is not less.")
        )

    def text(self, width: int, letters: Letters, *, colour: bool) -> str:
        """Return it for a terminal of ``width`` columns."""
        parts = []
        if self.measured is not None:
            parts += [self.measured.table(), *(f"safecomm logged: {message}" for message in self.measured.messages)]
        if self.shown:
            parts.append("What needs no GPU:")
            parts += [one.text(width) for one in self.shown]
        # Last, because that is what stays on a small terminal.
        drawn = pictures.draw(self.pictures, width, letters, colour=colour)
        parts += [textwrap.fill(self.heading, width), drawn, textwrap.fill(self.conclusion, width)]
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, object]:
        """Return all of it as what ``json.dumps`` takes."""
        if self.measured is not None:
            return {**self.measured.to_json(), "conclusion": self.conclusion}
        versions = {"safecomm": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return {
            "versions": versions,
            "recorded": self.recorded,
            "shown": [asdict(one) for one in self.shown],
            "conclusion": self.conclusion,
            "ok": self.ok,
        }


def demo(device: str, given: Mapping[str, Any], progress: Callable[[str], None]) -> Outcome:
    """Run the demo: on the GPUs of this machine, or from what was recorded.

    Parameters
    ----------
    device
        ``"cuda"``: on GPUs. ``"cpu"``: as it was recorded, and what can be shown without any. ``"auto"``: on GPUs if
        there are two.
    given
        Those of :class:`program.Settings` that are not to be the default.
    progress
        Called with a line of text as the run on GPUs goes along.

    Raises
    ------
    ValueError
        If the settings are wrong, or ask for what this machine does not have.
    SafecommError
        If a rank fails, or does not finish in time.

    """
    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    settings = program.Settings(**{"world": max(2, gpus), **given})
    settings.check()
    if device == "cuda" and settings.world > gpus:
        raise ValueError(f"cuda with {settings.world} ranks needs as many GPUs and NCCL, and here there are {gpus}")
    if device == "cuda" or (device == "auto" and settings.world <= gpus):
        return _measured(settings, set(given), progress)
    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise ValueError(f"{names}: only a run on GPUs can be set, and this is not one ({gpus} GPUs here)")
    return _as_recorded()


def _measured(settings: program.Settings, given: set[str], progress: Callable[[str], None]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="safecomm-snapshots-") as folder:
        measured = program.run(settings, given, Path(folder), progress)
        return Outcome(f"{_what(measured.settings)}, on {measured.device}:", *_pair(Path(folder), ""), measured)


def _as_recorded() -> Outcome:
    figures = json.loads((RECORDED / "figures.json").read_text())
    where = f"recorded on {figures['world']} x {figures['device']}, {figures['date']}"
    found, reports = _pair(RECORDED, f", {where}")
    heading = (
        f"The memory of one rank in {found[0].allocations} layers of a matmul, and an all_reduce of its result on a "
        f"side stream: {where} (torch {figures['torch']}), because two GPUs are needed to run it."
    )
    return Outcome(heading, found, reports, recorded=figures, shown=shown.everything())


def _what(settings: program.Settings) -> str:
    return (
        f"The memory of rank 0 in {settings.iterations} iterations of {settings.layers} layers of a matmul, and an "
        "all_reduce of its result on a side stream"
    )


def _pair(folder: Path, where: str) -> tuple[list[Picture], list[Report]]:
    paths = {name: folder / f"{name}.pickle" for name in _TITLES}
    reports = make_reports(list(paths.values()))
    for one, title in zip(reports, _TITLES.values(), strict=True):
        one.title = title + where
        for timeline in one.timelines:
            timeline.title = title + where
    return [pictures.read(_TITLES[name], path) for name, path in paths.items()], reports
