"""The shell command ``safecomm``: its arguments, its help, and its answers to mistakes, all of it without torch.

It is beside the package and not in it, because whoever imports the package imports torch, which takes seconds of a
processor. ``python -m safecomm`` is the same command. What the commands do is in ``safecomm/tools/commands.py``.

Exit statuses: 0 done, 1 it ran and something is wrong, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

_PACKAGE = Path(__file__).with_name("safecomm")


def version() -> str:
    """Return the version of the package, which is not imported for it."""
    return str(runpy.run_path(str(_PACKAGE / "_version.py"))["__version__"])


def speaks() -> bool:
    """Return whether this process is the one to say what every rank of a machine finds wrong in the same way."""
    return os.environ.get("LOCAL_RANK", "0") in ("", "0") or not os.environ["LOCAL_RANK"].isdecimal()


class _Formatter(argparse.HelpFormatter):
    """Leaves what has lines of its own as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told with its own usage, once for all ranks of a machine."""

    def error(self, message: str) -> NoReturn:
        if speaks():
            super().error(message)
        sys.exit(2)  # as argparse's own

    def unknown(self, what: str, word: str, known: Sequence[str]) -> NoReturn:
        """Say that there is no ``what`` such as ``word``, and which of those that are ``known`` may be meant."""
        import difflib

        near = difflib.get_close_matches(word.lstrip("-"), [one.lstrip("-") for one in known], n=1)
        meant = [one for one in known if one.lstrip("-") in near]
        self.error(f"there is no {what} {word!r}" + (f": did you mean {meant[0]}?" if meant else ""))


def main(arguments: Sequence[str] | None = None, *, prog: str = "safecomm") -> int:
    """Run the command that ``arguments`` (by default the process's own) name, and return the exit status."""
    options = _parsed(list(sys.argv[1:] if arguments is None else arguments), prog)
    try:
        with warnings.catch_warnings():
            if options.command != "run":  # whose program may want to know
                warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            if options.command in ("report", "compare") and "safecomm" not in sys.modules:
                # It reads files: the package without its __init__, and so without torch.
                sys.modules["safecomm"] = types.ModuleType("safecomm")
                sys.modules["safecomm"].__path__ = [str(_PACKAGE)]
            from safecomm.tools import commands
    except KeyboardInterrupt:
        status, text = 128 + signal.SIGINT, "interrupted"
    except ImportError as error:  # of a torch that is missing, or too old
        status, text = 1, str(error)
    else:
        return commands.execute(options, prog)
    if speaks() and (status == 1 or "LOCAL_RANK" not in os.environ):  # else who started the ranks says so
        print(f"{prog} {options.command}: {text}", file=sys.stderr)
    return status


def _parsed(arguments: list[str], prog: str) -> argparse.Namespace:
    parser = _Parser(
        prog=prog,
        description="Memory-safe collectives for PyTorch.",
        epilog=_examples(prog, ("demo", "what it is for, in two pictures"), ("COMMAND --help", "what a command takes")),
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"safecomm {version()}")
    parser.set_defaults(speaks=speaks())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (add_arguments, text, examples) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_examples(prog, *examples),
            formatter_class=_Formatter,
        )
        add_arguments(command)
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is not None and word not in COMMANDS:
        parser.unknown("command", word, list(COMMANDS))
    options, rest = parser.parse_known_args(arguments)
    if rest:
        command = commands.choices[options.command]
        known = [option for action in command._actions for option in action.option_strings]
        command.unknown("option" if rest[0].startswith("-") else "argument", rest[0].partition("=")[0], known)
    return options


def _examples(prog: str, *examples: tuple[str, str]) -> str:
    return "\n".join(["examples:", *(f"  {prog} {words}\n      {what}" for words, what in examples)])


# --- what the commands take -----------------------------------------------------------------------------------------


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="cuda: run it on GPUs; cpu: show what was recorded on GPUs (default: GPUs if there are two)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write what was found to PATH")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="report the calls that still bypass safecomm")
    parser.add_argument(
        "--avoid-record-streams", action="store_true", help="convert record_stream calls, in captures too"
    )
    parser.add_argument("--arena", default="", metavar="SIZE", help="communication buffers out of an arena, as 256MiB")
    parser.add_argument(
        "--record", default="", metavar="DIR", help="record the memory of the run, for report; DIR is made if need be"
    )
    parser.add_argument(
        "--snapshot", default="", metavar="DIR",
        help="write memory snapshots to DIR: at the end, as memory runs out, and at SIGUSR2",
    )  # fmt: skip
    parser.add_argument(
        "--low-latency", action="store_true", help="run small collectives as one kernel, on every group that can"
    )
    parser.add_argument(
        "--invariant", action="store_true", help="reduce in the order of the ranks: bits that depend on no path"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument(
        "target", nargs=argparse.PARSER, metavar="target",
        help="the script or module, and its arguments; what comes after it is its own",
    )  # fmt: skip


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="of record_memory(), or a memory snapshot of torch, of any program; or a folder of them",
    )  # fmt: skip
    parser.add_argument(
        "--from",
        dest="begin",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="look at a snapshot's history from then",
    )
    parser.add_argument("--to", type=float, default=float("inf"), metavar="SECONDS", help="and up to then")
    parser.add_argument("--html", type=Path, metavar="PATH", help="also write a page with the timelines, side by side")
    parser.add_argument("--png", type=Path, metavar="PATH", help="also write a plot (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures and tables, for a script")
    parser.add_argument("--perfetto", type=Path, metavar="PATH", help="also write a trace for ui.perfetto.dev")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", default="3:12", metavar="A:B", help="the optimizer's or marked steps to look at (default: 3:12)"
    )
    parser.add_argument("--seconds", default="", metavar="A:B", help="look at these seconds of each process instead")
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="how often each way is run (default: 1)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a run that takes longer")
    parser.add_argument("--arena", default="", metavar="SIZE", help="patched, with an arena, as 256MiB")
    parser.add_argument(
        "--out", type=Path, default=Path("safecomm-compare"), metavar="DIR",
        help="what is written goes there (default: safecomm-compare)",
    )  # fmt: skip
    parser.add_argument("--before", type=Path, metavar="FILE", help="compare what was recorded, instead of a program;")
    parser.add_argument("--after", type=Path, metavar="FILE", help="a recording, a snapshot of torch, or a folder")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="the command that starts it")


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, metavar="N", help="ranks (default: every GPU, or 2 on the CPU)")
    parser.add_argument(
        "--mib", type=float, nargs="+", metavar="MIB", help="sizes of a bucket to try, in MiB (default: 1 to 64)"
    )
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="how often each is run (default: 30)")
    parser.add_argument(
        "--out", type=Path, default=Path("safecomm-tuned.json"), metavar="PATH",
        help="the file to write (default: safecomm-tuned.json)",
    )  # fmt: skip
    parser.add_argument("--png", type=Path, metavar="PATH", help="also write a plot (needs matplotlib)")
    parser.add_argument(
        "--low-latency", action="store_true", help="measure instead up to which sizes low_latency() is faster than NCCL"
    )


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


_Arguments = Callable[[argparse.ArgumentParser], None]

COMMANDS: dict[str, tuple[_Arguments, str, tuple[tuple[str, str], ...]]] = {
    "demo": (
        _demo_arguments,
        "show the memory of one program with record_stream and with safecomm, in two pictures",
        (
            ("demo", "on the GPUs of this machine, or as it was recorded"),
            ("demo --json /tmp/demo.json", "what was found goes there, too"),
        ),
    ),
    "run": (
        _run_arguments,
        "run a script or module that uses torch.distributed, unedited, with safecomm's collectives",
        (
            ("run train.py --lr 1e-4", "as python train.py --lr 1e-4"),
            ("run --avoid-record-streams --record memory -m train", "a module, and a recording in memory/"),
        ),
    ),
    "report": (
        _report_arguments,
        "tell where communication memory went, from a recording or a memory snapshot of torch",
        (
            ("report run.jsonl", "all ranks of a recording, in words"),
            ("report before.pickle after.pickle --html page.html", "two snapshots of torch, side by side"),
        ),
    ),
    "compare": (
        _compare_arguments,
        "run a program without safecomm and with it, and tell what its communication costs in memory and time",
        (
            ("compare -- torchrun --nproc-per-node 2 train.py", "and what to do; a page in safecomm-compare/"),
            ("compare --before a.pickle --after b.pickle", "of two runs that were recorded"),
        ),
    ),
    "tune": (
        _tune_arguments,
        "measure which size of a bucket is the best for bucketed(), on the ranks of this machine or of torchrun",
        (
            ("tune", "on every GPU; writes safecomm-tuned.json"),
            ("tune --low-latency --out limits.json", "for low_latency('limits.json')"),
        ),
    ),
    "doctor": (
        _doctor_arguments,
        "look at this machine, its versions and its environment; the exit status is 1 if something is red",
        (
            ("doctor", "in words"),
            ("doctor --json > doctor.json", "for a script, or for an issue"),
        ),
    ),
}
"""Each command's arguments, a line of help, and two examples."""


if __name__ == "__main__":
    sys.exit(main())
