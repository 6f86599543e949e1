"""What the shell commands do, each a few lines over the library. What they take is in ``safecomm_shell.py``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from safecomm._version import __version__
from safecomm.diagnostics.checked import printable
from safecomm.errors import SafecommError
from safecomm.tools.progress import Progress

if TYPE_CHECKING:
    from safecomm.diagnostics.report import Report

DONE, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130
"""The exit statuses, as the head of ``safecomm_shell.py`` has them."""


def _say(line: str) -> None:
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except BrokenPipeError:  # its reader is gone; what was asked for still has to be done
        _silence(sys.stderr)


def _print(text: str) -> None:
    """Print what the terminal, or what stands for it, may have no letters for."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _coloured() -> bool:
    """Return whether what is printed may be coloured (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _silence(stream: TextIO) -> None:
    """Let what is printed to ``stream``, whose reader has gone, go nowhere, now and when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _write_page(path: Path, reports: Sequence[Report], title: str = "") -> None:
    from safecomm.diagnostics.page import make_page

    try:
        path.write_text(make_page(reports, title), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"--html: {path} can't be written: {error.strerror}") from None


def _demo(options: argparse.Namespace) -> int:
    from safecomm.tools.demo import pictures
    from safecomm.tools.demo.show import demo

    path: Path | None = options.json
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise ValueError(f"--json: {path} can't be written; name another place")
    found = demo(options.device)
    if path is not None:
        path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    letters = pictures.BLOCKS if pictures.BLOCKS.fit(sys.stdout.encoding or "ascii") else pictures.PLAIN
    _print(found.text(shutil.get_terminal_size().columns, letters, colour=_coloured()))
    if not found.ok:
        raise SafecommError("not all came out as it must")
    return DONE


def _run(options: argparse.Namespace) -> Callable[[], int]:
    from safecomm.patching.runner import check, run

    try:
        check(
            options.target[0],
            module=options.module,
            strict=options.strict,
            avoid_record_streams=options.avoid_record_streams,
            arena=options.arena,
            record=options.record,
            snapshot=options.snapshot,
        )
    except (OSError, ImportError) as error:
        raise ValueError(str(error)) from None

    def begin() -> int:  # outside of what handles our own errors: the script's are the script's
        run(
            options.target,
            module=options.module,
            strict=options.strict,
            avoid_record_streams=options.avoid_record_streams,
            arena=options.arena,
            record=options.record,
            snapshot=options.snapshot,
            low_latency=options.low_latency,
            invariant=options.invariant,
        )
        return DONE

    return begin


def _report(options: argparse.Namespace) -> int:
    from safecomm.diagnostics.comparison import compared
    from safecomm.diagnostics.exports import write_json, write_perfetto
    from safecomm.diagnostics.files import make_reports
    from safecomm.diagnostics.plot import plot

    with Progress() as progress:
        reports = make_reports(options.files, progress, (options.begin, options.to))
    if options.html is not None:  # before what is printed, whose reader may go away
        _write_page(options.html, reports)
    if options.png is not None:
        plot(reports, options.png)
    if options.json is not None:
        write_json(reports, options.json)
    if options.perfetto is not None:
        write_perfetto(reports, options.perfetto)
    _print(compared(reports))
    for path in (options.html, options.png, options.json, options.perfetto):
        if path is not None:
            _print(f"\nwrote {printable(str(path))}")
    return DONE


def _compare(options: argparse.Namespace) -> int:
    from safecomm.diagnostics.comparison import compared
    from safecomm.diagnostics.exports import write_object
    from safecomm.diagnostics.files import make_reports
    from safecomm.tools import compare

    files = [path for path in (options.before, options.after) if path is not None]
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if bool(files) is bool(program) or (files and len(files) != 2):
        raise ValueError("give a program, or --before FILE and --after FILE of two runs that were recorded")
    if files:
        with Progress() as progress:
            reports = [make_reports([path], progress)[0] for path in files]
        _print(compared(reports))
        return DONE
    window = re.fullmatch(r"(\d{1,9}):(\d{1,9})", options.seconds or options.steps, re.ASCII)
    first, last = map(int, window.groups()) if window else (0, 0)
    if not 1 <= first <= last or (options.seconds and first == last) or options.turns < 1:
        what = f"--seconds {options.seconds}" if options.seconds else f"--steps {options.steps}"
        raise ValueError(f"{what} --turns {options.turns}: expected such as 3:12, and 1 or more")
    if options.limit is not None and not options.limit > 0:
        raise ValueError(f"--limit {options.limit}: expected seconds")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {options.out} can't be made a directory: {error.strerror}") from None
    with Progress() as progress:
        reports, found = compare.compare(
            program,
            options.out,
            window=(first, last, bool(options.seconds)),
            turns=options.turns,
            limit=options.limit,
            arena=options.arena,
            progress=progress,
        )
    write_object("--out", options.out / "compare.json", found)
    _write_page(options.out / "compare.html", reports, reports[0].title)
    _print(str(reports[0]))
    _print(f"\nwrote {printable(str(options.out / 'compare.html'))} and compare.json")
    return DONE


def _tune(options: argparse.Namespace) -> Callable[[], int] | int:
    import torch

    from safecomm.tools import tune, tune_low_latency

    sizes = options.mib or tune.SIZES
    if not all(0 < size <= tune.LARGEST for size in sizes):
        raise ValueError(f"sizes have to be larger than 0, and at most {tune.LARGEST:g} MiB")
    if options.rounds < 1 or (options.world is not None and options.world < 1):
        raise ValueError("rounds and ranks have to be larger than 0")
    for path in (options.out, options.png):
        if path is not None and (os.path.isdir(path) or not os.path.isdir(path.absolute().parent)):
            raise ValueError(f"{path} can't be written to")
        if path is not None and len(os.fsencode(path.name)) > 255:  # of the common file systems
            raise ValueError(f"{path.name[:40]}... is too long a name for a file")
    if options.low_latency:
        tune_low_latency.kept(options.out)  # not after all has been measured
    if not os.environ.get("LOCAL_RANK", "0").isascii() or not os.environ.get("LOCAL_RANK", "0").isdigit():
        raise ValueError(f"LOCAL_RANK={os.environ['LOCAL_RANK']!r}: expected a number, as torchrun sets it")

    if "LOCAL_RANK" not in os.environ:
        if options.low_latency and torch.cuda.device_count() < 2:
            raise SafecommError(
                "there is nothing to tune: low_latency() needs two GPUs, and here there are "
                f"{torch.cuda.device_count()}"
            )
        arguments = ["--mib", *map(str, sizes), "--rounds", str(options.rounds), "--out", str(options.out)]
        if options.png is not None:
            arguments += ["--png", str(options.png)]
        if options.low_latency:
            arguments.append("--low-latency")
        return tune.launch(options.world, arguments)

    def begin() -> int:
        try:
            with Progress() as progress:
                if options.low_latency:
                    with tune.group() as device:
                        tune_low_latency.tune(device, options.out, options.rounds, progress)
                else:
                    tune.tune(sizes, options.out, options.png, options.rounds, progress)
        except KeyboardInterrupt:  # the launcher of the ranks says so
            return INTERRUPTED
        except RuntimeError as error:
            if not options.low_latency:
                raise
            if options.speaks:
                _say(f"safecomm tune: {error}")
            return WRONG
        return DONE

    return begin


def _doctor(options: argparse.Namespace) -> int:
    from safecomm.tools.doctor import diagnose

    found = diagnose()
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(f"safecomm {__version__}")
        print(found.text(colour=_coloured()))
    return DONE if found.ok else WRONG


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | Callable[[], int]]] = {
    "demo": _demo,
    "run": _run,
    "report": _report,
    "compare": _compare,
    "tune": _tune,
    "doctor": _doctor,
}
"""What each command does. It gives the exit status, or a last step, the errors of which are the program's own."""


def execute(options: argparse.Namespace, prog: str) -> int:
    """Run the command that ``options`` name, and return the exit status."""
    try:
        outcome = _COMMANDS[options.command](options)
        if not callable(outcome):
            sys.stdout.flush()
    except BrokenPipeError:  # as of "| head"
        _silence(sys.stdout)
        return DONE
    except ValueError as error:
        status, text = USAGE, str(error)
    except (SafecommError, OSError) as error:
        status, text = WRONG, str(error)
    except KeyboardInterrupt:
        status, text = INTERRUPTED, "interrupted"
    else:
        return int(outcome() if callable(outcome) else outcome)
    lines = text.split("\n") if status == WRONG else [text]  # a stack of a rank that failed, or the name of a file
    # What is wrong with the arguments is wrong on all ranks, and one of them says so.
    if status == WRONG or options.speaks:
        for number, line in enumerate(lines):
            _say(line if number else f"{prog} {options.command}: {line}")
    return status
