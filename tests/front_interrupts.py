"""Random programs of public calls in which exceptions come in the middle of calls, as Ctrl-C does (S1).

    python tests/front_interrupts.py --programs 500 --seed 1 --backend nccl
    python tests/front_interrupts.py --mutant waits_after_the_release

The programs are those of ``front_programs.py``. In every other step an exception comes somewhere in safecomm: it may
keep memory held, and let none out that something may still touch. At the end ``drain(wait=True)`` gives all of it back.

A program takes a call that was interrupted for one that runs, and keeps what it has given to it: between a launch and
its hold nobody else does. A block of a ``with`` statement may stay open if its own beginning or end is interrupted, so
that is spared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import front
import front_programs
import torch
from device import Violation
from front import Backend
from front_programs import BACKENDS, Loss
from interrupts import Interrupt, Interrupted

import safecomm
from safecomm.core import ledger, work

PACKAGE = str(Path(safecomm.__file__).parent)
BLOCKS = tuple(f"{PACKAGE}/{name}.py" for name in ("interception/record_stream", "interception/graphs", "arena/use"))


def seen(frame: types.FrameType) -> bool:
    """Return whether an exception may come in ``frame``."""
    code = frame.f_code
    broken = code.co_filename == __file__ and code.co_name in ("wait", "release_waited")
    return (code.co_filename.startswith(PACKAGE) or broken) and not is_block(frame)


def is_block(frame: types.FrameType | None) -> bool:
    """Return whether ``frame`` is, or was called by, the beginning or end of a block that may stay open."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__enter__", "__exit__") and code.co_filename in BLOCKS:
            return True
        frame = frame.f_back
    return False


class Program(front_programs.Program):
    """A program of one thread, in whose steps exceptions come."""

    threads = False

    def __init__(self, seed: int, number: int, backend: str) -> None:
        super().__init__(seed, number, backend)
        self.given: list[torch.Tensor] = []
        allocate = self.device.allocate

        def allocated(*what: Any) -> torch.Tensor:
            tensor = allocate(*what)
            self.given.append(tensor)
            return tensor

        self.device.allocate = allocated  # type: ignore[method-assign]

    def take(self, name: str, general: bool) -> None:
        self.given.clear()
        LAUNCHED.clear()
        if self.rng.random() < 0.5:
            super().take(name, general)
            return
        try:
            with Interrupted(int(self.rng.expovariate(1 / 40)), seen):
                super().take(name, general)
        except Interrupt as interrupt:
            self.counts["interrupts"] += 1
            self.note(f"is interrupted in {interrupt}")
            self.keep()

    def end(self) -> None:
        self.given.clear()
        LAUNCHED.clear()
        super().end()

    def some(self, count: int, nbytes: int = 0) -> list[torch.Tensor]:
        found = super().some(count, nbytes)
        self.given += found
        return found

    def keep(self) -> None:
        """Keep what the interrupted step has given to calls, and end a capture that it has left."""
        device = self.device
        if device.capturing:
            graph = front.CAPTURING[0]
            with contextlib.suppress(RuntimeError):  # such as works that were not waited for
                graph.capture_end()
            device.switch(0)
            graph.reset()
        for backend in self.backends:
            backend.fate = ""  # which it was to have
        running = 0
        for op in device.pending:
            running |= op.bit
        self.kept.append((running, [*self.given, *LAUNCHED]))


LAUNCHED: list[Any] = []
"""The works that a step has launched. c10d keeps those that run, with what they have staged."""


def _launch(launch: Callable[..., Any]) -> Callable[..., Any]:
    def launched(*given: Any) -> Any:
        made = launch(*given)
        LAUNCHED.append(made)
        return made

    return launched


Backend._launch = _launch(Backend._launch)  # type: ignore[method-assign]

# --- a safecomm that is wrong, which only an exception shows ----------------------------------------------------------


def waits_after_the_release() -> None:
    """A wait lets go of the memory, and then waits."""

    def wait(self: work.Work, timeout: object = None) -> bool:
        self.queue.ledger.release(self)
        return original(self, timeout)  # type: ignore[arg-type]

    original = work.Work.wait
    work.Work.wait = wait  # type: ignore[method-assign, assignment]


def hands_off_after_the_release() -> None:
    """A work that was waited for on another stream is released, and then what it held is handed off."""

    def release_waited(self: ledger.Ledger, held: Any) -> None:
        storages, held.storages = list(held.storages), ()
        self.release(held)
        alive, storages = tuple(storages), []
        self.uses.use(held.op, held.of_group(), held.queue.index, alive, held, held.alloc_stream)

    ledger.Ledger._release_waited = release_waited  # type: ignore[method-assign]


MUTANTS = {one.__name__: one for one in (waits_after_the_release, hands_off_after_the_release)}


def run(seed: int, numbers: range, backend: str) -> tuple[dict[str, int], list[str]]:
    """Run programs until one fails; return what they did, and what has failed."""
    counts: dict[str, int] = {}
    for number in numbers:
        program = Program(seed, number, backend)
        failure = None
        try:
            program.run()
        except BaseException as error:
            failure = error
        finally:
            front.forget(program.groups)
        for name, count in program.counts.items():
            counts[name] = counts.get(name, 0) + count
        if failure is not None:
            if len(numbers) == 1:
                print("\n".join(program.steps))
                raise failure
            kind = "unsafe" if isinstance(failure, Violation) else "lost" if isinstance(failure, Loss) else "error"
            return counts, [f"{kind}: --backend {backend} --seed {seed} --only {number}: {failure!r}"[:600]]
    return counts, []


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs in whose calls exceptions come.")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="nccl")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--only", type=int, help="run this program alone, and show its steps")
    options = parser.parse_args()
    front_programs.quiet()
    sys.unraisablehook = lambda _: None
    if options.mutant:
        MUTANTS[options.mutant]()
    numbers = range(options.programs) if options.only is None else range(options.only, options.only + 1)
    counts, failed = run(options.seed, numbers, options.backend)
    print(json.dumps({"failed": failed, **counts}))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
