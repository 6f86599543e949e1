"""The shell commands: ``python -m safecomm COMMAND``. Each is a few lines over the library.

Exit statuses: 0 done, 1 it ran and something is wrong, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import safecomm

DONE, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130


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


def _demo(options: argparse.Namespace) -> int:
    from safecomm.demo import run_demo

    path: Path | None = options.json
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--json: {path} can't be written to")
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
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(f"\n{report.table()}")
    for message in report.messages:
        print(f"\nsafecomm logged: {message}")
    if path is not None:
        path.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if not report.ok:
        print("python -m safecomm demo: the numbers differ between the ways", file=sys.stderr)
        return WRONG
    return DONE


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if there are two"
    )
    parser.add_argument("--world", type=int, metavar="N", help="ranks (default: every GPU, or 2 on the CPU)")
    parser.add_argument("--tensors", type=int, default=200, metavar="N", help="tensors of a pass (default: 200)")
    parser.add_argument("--tensor-kb", type=float, default=64, metavar="KIB", help="size of each (default: 64)")
    parser.add_argument(
        "--passes", type=int, default=10, metavar="N", help="measured passes of each size (default: 10)"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="write what bucketed() reads to PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the figures to PATH (takes matplotlib)")


def _tune(options: argparse.Namespace) -> int:
    from safecomm.tuning import run_tune

    for path in (options.out, options.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{path} can't be written to")
    tuning = run_tune(
        device=options.device,
        world=options.world,
        tensors=options.tensors,
        tensor_kb=options.tensor_kb,
        passes=options.passes,
    )
    print(tuning.table())
    if options.out is not None:
        tuning.save(options.out)
        print(f"\nSAFECOMM_BUCKETS={options.out} makes bucketed() use it")
    if options.plot is not None:
        tuning.plot(options.plot)
    return DONE


COMMANDS = {
    "demo": (
        _demo_arguments,
        _demo,
        "run layers of matmul and all_reduce in several ways, and measure the memory of each",
    ),
    "tune": (_tune_arguments, _tune, "measure bucket sizes for bucketed() on this machine, and say which to use"),
}
"""Each command's arguments, what it does, and a line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's own) name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m safecomm", description="Memory-safe collectives for PyTorch.")
    parser.add_argument("--version", action="version", version=f"safecomm {safecomm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add_arguments, _, text) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=text))
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command][1](options)
    except ValueError as error:
        status, text = USAGE, str(error)
    except (safecomm.SafecommError, OSError) as error:
        status, text = WRONG, str(error)
    except KeyboardInterrupt:
        status, text = INTERRUPTED, "interrupted"
    print(f"{parser.prog} {options.command}: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
