"""Draw the README's picture from the recorded runs: ``python benchmarks/pictures.py``; ``--check`` only compares.

The memory of the forum's program with ``record_stream`` and inside of ``avoid_record_streams()``, as ``report --png``
draws it, in the colours of a light and of a dark page.
"""

import dataclasses
import hashlib
import importlib.util
import json
import pathlib
import re
import sys
import tempfile

from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.plot import plot
from safecomm.diagnostics.units import MIB

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "snapshots"
PICTURES = ROOT / "docs" / "pictures"
TITLES = {"stock": "torch.distributed and record_stream", "safecomm": "the same program, with safecomm"}
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
"""The colour of text and of lines, by the page that the picture is on. The background is the page's own."""


def drawn():
    """Return the reports as they are drawn: one line each, and a title that tells how much it was at the most.

    That is what was in use, or freed and not to be given out again yet.
    """
    shown = []
    for name, report in zip(TITLES, make_reports([RECORDED / f"{name}.pickle" for name in TITLES]), strict=True):
        (timeline,) = report.timelines
        active = timeline.lines["active"]
        title = f"{TITLES[name]}: {max(value for _, value in active) // MIB} MiB"
        timeline = dataclasses.replace(timeline, title=title, lines={"active": active})
        shown.append(dataclasses.replace(report, timelines=[timeline]))
    return shown


def digest(reports):
    """Return a hash of what ``reports`` have to draw, which is the same with each version of matplotlib."""
    timelines = [dataclasses.asdict(timeline) for report in reports for timeline in report.timelines]
    for timeline in timelines:
        del timeline["began"]  # it is not drawn
    return hashlib.sha256(json.dumps(timelines, sort_keys=True).encode()).hexdigest()


def make(reports, folder):
    """Draw ``reports`` into ``folder`` for both pages, without a date, and with :func:`digest` in the last line."""
    import matplotlib

    for page, ink in INKS.items():
        path = folder / f"memory-{page}.svg"
        settings = {
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "font.size": 17,
            "svg.fonttype": "none",
            "svg.hashsalt": "safecomm",
        }
        with matplotlib.rc_context(settings):
            plot(reports, path)
        text = re.sub(r"\s*<dc:date>.*?</dc:date>", "", path.read_text(encoding="utf-8"))
        text = "".join(line.rstrip() + "\n" for line in text.splitlines())
        path.write_text(f"{text}<!-- drawn from {digest(reports)} -->\n", encoding="utf-8")


def stale():
    """Return the names of the pictures that are not what :func:`make` draws of the recorded runs.

    Each version of matplotlib writes other text. So with another one than has drawn a picture, or with none, it is
    asked only whether the picture was drawn from the same data.
    """
    reports = drawn()
    here = None
    if importlib.util.find_spec("matplotlib"):
        import matplotlib

        here = f"Matplotlib v{matplotlib.__version__},"
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if here:
            make(reports, folder)
        for page in INKS:
            path = PICTURES / f"memory-{page}.svg"
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            right = text.endswith(f"<!-- drawn from {digest(reports)} -->\n")
            if here and here in text:
                right = text == (folder / path.name).read_text(encoding="utf-8")
            if not right:
                wrong.append(path.name)
    return wrong


def main():
    if "--check" not in sys.argv:
        PICTURES.mkdir(exist_ok=True)
        make(drawn(), PICTURES)
    elif wrong := stale():
        sys.exit(f"{', '.join(wrong)}: not what benchmarks/pictures.py draws of the recorded runs")


if __name__ == "__main__":
    main()
