"""The shell commands: ``python -m safecomm COMMAND``. Each is a few lines over the library.

Exit statuses: 0 done, 1 it ran and something is wrong, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import safecomm
from safecomm.diagnostics.checked import printable

DONE, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130


def _say(line: str) -> None:
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except BrokenPipeError:  # nobody reads it any more; what was asked for is still to be done
        _silence(sys.stderr)


def _print(text: str) -> None:
    """Print what the terminal, or what stands for it, may have no letters for."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _silence(stream: TextIO) -> None:
    """Let what is printed to ``stream``, whose reader has gone, go nowhere, now and when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _write_page(path: Path, reports: Sequence[Any]) -> None:
    from safecomm.diagnostics.page import make_page

    try:
        path.write_text(make_page(reports), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"--html: {path} can't be written: {error.strerror}") from None


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if there are two"
    )
    parser.add_argument("--world", type=int, metavar="N", help="ranks (default: every GPU, or 2 on the CPU)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="layers of an iteration (default: 8)")
    parser.add_argument("--iterations", type=int, default=5, metavar="N", help="iterations of a pass (default: 5)")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of a layer's result (default: what fits)")
    parser.add_argument("--cols", type=int, metavar="N", help="columns of a layer's result (default: what fits)")
    parser.add_argument("--dtype", metavar="TYPE", help="element type (default: bfloat16 on GPUs, float32 on the CPU)")
    parser.add_argument("--passes", type=int, default=3, metavar="N", help="measured passes of each way (default: 3)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds a way may take (default: 120)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to PATH")
    parser.add_argument(
        "--html", type=Path, metavar="PATH",
        help="also write a page with the memory timelines of record_stream and of safecomm, side by side (GPUs only)",
    )  # fmt: skip


def _demo(options: argparse.Namespace) -> int:
    from safecomm.demo import run_demo

    path: Path | None = options.json
    for name in ("json", "html"):
        wanted: Path | None = getattr(options, name)
        if wanted is not None and (wanted.is_dir() or not wanted.absolute().parent.is_dir()):
            raise ValueError(f"--{name}: {wanted} can't be written to")
    with tempfile.TemporaryDirectory(prefix="safecomm-snapshots-") as folder:
        report = run_demo(
            device=options.device,
            world=options.world,
            layers=options.layers,
            iterations=options.iterations,
            rows=options.rows,
            cols=options.cols,
            dtype=options.dtype,
            passes=options.passes,
            limit=options.limit,
            progress=_say,
            snapshots=Path(folder) if options.html is not None else None,
        )
        if options.html is not None:
            from safecomm.diagnostics.report import make_reports

            files = [Path(folder) / f"{library}.pickle" for library in ("torch.distributed", "safecomm")]
            _write_page(options.html, make_reports(files))
    print(f"\n{report.table()}")
    for message in report.messages:
        print(f"\nsafecomm logged: {message}")
    if path is not None:
        path.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if not report.ok:
        print("python -m safecomm demo: the numbers differ between the ways", file=sys.stderr)
        return WRONG
    return DONE


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="report the calls that still go past safecomm")
    parser.add_argument(
        "--avoid-record-streams", action="store_true", help="convert record_stream calls, in captures too"
    )
    parser.add_argument("--arena", default="", metavar="SIZE", help="communication buffers out of an arena, as 256MiB")
    parser.add_argument("--record", default="", metavar="DIR", help="record the memory of the run, for report")
    parser.add_argument(
        "--low-latency", action="store_true", help="run small collectives as one kernel, on every group that can"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("target", nargs=argparse.PARSER, help="the script or module, and its arguments")


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
            low_latency=options.low_latency,
        )
        return DONE

    return begin


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="of record_memory(), or a memory snapshot of torch, of any program",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="PATH", help="also write a page with the timelines, side by side")
    parser.add_argument("--png", type=Path, metavar="PATH", help="also write a plot (needs matplotlib)")


def _report(options: argparse.Namespace) -> int:
    from safecomm.diagnostics.plot import plot
    from safecomm.diagnostics.report import make_reports

    reports = make_reports(options.files, progress=_say)
    if options.html is not None:  # before what is printed, whose reader may go away
        _write_page(options.html, reports)
    if options.png is not None:
        plot(reports, options.png)
    _print("\n\n\n".join(map(str, reports)))
    return DONE


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, help="ranks; by default all GPUs of this machine, or 2 on the CPU")
    parser.add_argument("--mib", type=float, nargs="+", help="sizes of a bucket to try, in MiB")
    parser.add_argument("--rounds", type=int, default=30, help="how often each is run")
    parser.add_argument(
        "--out", type=Path, default=Path("safecomm-tuned.json"), metavar="PATH", help="the file to write"
    )
    parser.add_argument("--png", type=Path, metavar="PATH", help="also write a plot (needs matplotlib)")
    parser.add_argument(
        "--low-latency", action="store_true", help="measure instead up to which sizes low_latency() is faster than NCCL"
    )


def _tune(options: argparse.Namespace) -> Callable[[], int]:
    from safecomm import tune
    from safecomm.peers.tuning import kept

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
        kept(options.out)  # not after all has been measured
    if not os.environ.get("LOCAL_RANK", "0").isascii() or not os.environ.get("LOCAL_RANK", "0").isdigit():
        raise ValueError(f"LOCAL_RANK={os.environ['LOCAL_RANK']!r}: expected a number, as torchrun sets it")

    def begin() -> int:
        under_torchrun = "LOCAL_RANK" in os.environ
        if under_torchrun and options.low_latency:
            try:
                tune.tune_low_latency(options.out, options.rounds, _say)
            except RuntimeError as error:
                _say(f"python -m safecomm tune: {error}")
                return WRONG
            return DONE
        if under_torchrun:
            tune.tune(sizes, options.out, options.png, options.rounds, _say)
            return DONE
        arguments = ["--mib", *map(str, sizes), "--rounds", str(options.rounds), "--out", str(options.out)]
        if options.png is not None:
            arguments += ["--png", str(options.png)]
        if options.low_latency:
            arguments.append("--low-latency")
        return tune.launch(options.world, arguments)

    return begin


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(options: argparse.Namespace) -> int:
    from safecomm.diagnostics.doctor import diagnose

    found = diagnose()
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(f"safecomm {safecomm.__version__}")
        print(found.text(colour=sys.stdout.isatty()))
    return DONE if found.ok else WRONG


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[Any], Any], str]] = {
    "demo": (
        _demo_arguments,
        _demo,
        "run layers of matmul and all_reduce in several ways, and measure the memory of each",
    ),
    "run": (
        _run_arguments,
        _run,
        "run a script or module that uses torch.distributed, unedited, with safecomm's collectives",
    ),
    "report": (
        _report_arguments,
        _report,
        "tell where communication memory went, from a recording or a memory snapshot of torch",
    ),
    "tune": (
        _tune_arguments,
        _tune,
        "measure which size of a bucket is the best for bucketed(), on the ranks of this machine or of torchrun",
    ),
    "doctor": (
        _doctor_arguments,
        _doctor,
        "look at this machine, its versions and its environment; the exit status is 1 if something is red",
    ),
}
"""Each command's arguments, what it does, and a line of help. What it does gives the exit status, or a last step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's own) name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m safecomm", description="Memory-safe collectives for PyTorch.")
    parser.add_argument("--version", action="version", version=f"safecomm {safecomm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add_arguments, _, text) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=text))
    options = parser.parse_args(arguments)
    try:
        outcome = COMMANDS[options.command][1](options)
        if not callable(outcome):
            sys.stdout.flush()
    except BrokenPipeError:  # as of "| head"
        _silence(sys.stdout)
        return DONE
    except ValueError as error:
        status, text = USAGE, str(error)
    except (safecomm.SafecommError, OSError) as error:
        status, text = WRONG, str(error)
    except KeyboardInterrupt:
        status, text = INTERRUPTED, "interrupted"
    else:
        return int(outcome() if callable(outcome) else outcome)
    lines = text.split("\n") if status == WRONG else [text]  # a stack of a rank that failed, or the name of a file
    for number, line in enumerate(lines):
        _say(line if number else f"{parser.prog} {options.command}: {line}")
    return status


if __name__ == "__main__":
    sys.exit(main())
