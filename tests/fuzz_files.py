"""Files that are wrong in many ways, and what becomes of them: ``python tests/fuzz_files.py --seconds N --seed S``.

Recordings, snapshots, the files of ``tune``, and its arguments are mutated: JSON and pickles by their values, by
their bytes, and by hand where something is meant to ask for too much. Each has to give a result, or one line that says
what is wrong, within 5 s of the processor and 1 GiB. What a seed and a number make is the same on every run;
``--seed -1`` stands for the files of ``tests/corpus/files``, which broke something once.

The files are looked at in a process that has a limit of memory, under a watchdog: what hangs or dies there is named and
the next file has its turn. ``--only N`` looks at one file here, and ``--write PATH`` keeps it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import random
import re
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "files"
SECONDS = 5.0
"""Of the processor, for one file."""
MEMORY = 1 << 30
PATIENCE = 120.0
"""Seconds after which a file hangs: of the wall, on a machine that has other things to do."""
FOUND = -1
"""The seed that stands for the corpus: small files that broke something, or would without what is there against it."""
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe\x9b31m\u2028\x00\n\r"

# --- values -------------------------------------------------------------------------------------------------------

NUMBERS = [0, -1, 1, 2, 511, 1 << 31, 1 << 48, 1 << 53, 1 << 62, 1 << 63, 1 << 64, 10**19, 10**400, -(10**30)]
FLOATS = [0.5, -0.0, 1e-320, 1e17, 1e300, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "x", ESCAPES, "9" * 5000, "\ud800", "\x00", "$\\frac", "</script>", "all_gather", "x" * 70000, "inf"]
DEEP, DIGITS = "@deep@", "@digits@"  # what json.dumps can't write
OTHERS = [None, True, False, [], {}, [[]], {"a": 1}, DEEP, DIGITS]


def value(dice: random.Random):
    kind = dice.random()
    if kind < 0.4:
        return dice.choice(NUMBERS)
    if kind < 0.6:
        return dice.choice(FLOATS)
    return dice.choice(TEXTS if kind < 0.8 else OTHERS)


def places(tree, most=4000):
    """Return where there are values in ``tree``: containers and their keys."""
    found, left = [], [tree]
    while left and len(found) < most:
        one = left.pop()
        if isinstance(one, dict):
            inner = list(one.items())
        elif isinstance(one, list):
            inner = list(enumerate(one))
        else:
            continue
        found += [(one, key) for key, _ in inner]
        left += [child for _, child in inner]
    return found


def mutate(dice: random.Random, tree):
    """Change ``tree`` in a few places."""
    repeated = False  # not what is repeated again, which would be more than JSON can be written of
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        there = places(tree)
        if not there:
            return value(dice)
        inside, key = dice.choice(there)
        if key not in (inside if isinstance(inside, dict) else range(len(inside))):
            continue  # what was there is gone by an earlier change
        action = dice.random()
        if action < 0.55:
            inside[key] = value(dice)
        elif action < 0.65:
            del inside[key]
        elif action < 0.75 and isinstance(inside, list) and not repeated:
            repeated = True
            inside[key:key] = [inside[key]] * dice.choice((1, 2, 50, 3000))
        elif action < 0.85:
            other, at = dice.choice(there)
            with contextlib.suppress(LookupError):
                inside[key] = copy.deepcopy(other[at]) if dice.random() < 0.5 else other[at]
        elif isinstance(inside, dict):
            inside[dice.choice([str(key) + "x", "", "safecomm_record", "site", "t", "end", "action"])] = inside.pop(key)
        elif type(inside[key]) is int:
            inside[key] += dice.choice((-1, 1, 1 << 40))
    return tree


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Change some bytes of ``data``."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        place = dice.randrange(len(out) + 1) if dice.random() < 0.7 else min(dice.randrange(200), len(out))
        action = dice.random()
        if action < 0.5 and place < len(out):
            out[place] = dice.randrange(256)
        elif action < 0.6:
            out[place:place] = dice.randbytes(dice.choice((1, 2, 9, 300)))
        elif action < 0.7:
            del out[place : place + dice.choice((1, 4, 100))]
        elif action < 0.8:
            del out[place:]
        elif action < 0.9:
            out[place:place] = out[place // 2 : place // 2 + dice.randrange(2000)]
        else:
            out[place:place] = dice.choice(
                (b"\x00", b"\xff\xfe", b"\n", b"{", b"[" * 5000, b'"', b"\\ud800", b"2" * 50)
            )
    return bytes(out)


def as_json(dice: random.Random, tree) -> str:
    try:
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=dice.random() < 0.7)
    except (ValueError, RecursionError):  # it contains itself
        text = "[]"
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{DIGITS}"', "7" * 6000)
    if dice.random() < 0.05:
        name = dice.choice(("t", "site", "bucket", "nbytes", "bucket_mb", "rank"))
        text = text.replace("{", f'{{"{name}":{dice.choice(("1", "NaN", "null", "[]"))},', 1)  # a key twice
    return text


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- files --------------------------------------------------------------------------------------------------------


def recording(dice: random.Random) -> bytes:
    lines = [json.loads(line) for line in (CORPUS / "real.jsonl").read_text().splitlines()]
    if dice.random() < 0.3:
        lines += [dict(line) for line in lines[-3:-1] for _ in range(dice.choice((1, 30)))]
    if dice.random() < 0.8:
        for _ in range(dice.choice((1, 1, 3))):
            number = dice.randrange(len(lines))
            lines[number] = mutate(dice, lines[number])
    if dice.random() < 0.1:
        dice.shuffle(lines)
    data = to_bytes("".join(as_json(dice, line) + "\n" for line in lines))
    return damaged(dice, data) if dice.random() < 0.3 else data


def snapshot(dice: random.Random) -> bytes:
    sys.path.append(str(HERE))
    import snapshots

    kind = dice.random()
    if kind < 0.05:
        tree = pickle.loads((HERE.parent / "benchmarks" / "results" / "snapshots" / "stock.pickle").read_bytes())
    elif kind < 0.5:
        tree = snapshots.forum(stripes=True, layers=2, iterations=2)[0].snapshot()
    else:
        allocator = snapshots.Allocator()
        for number in range(8):
            name = dice.choice(("all_gather", "f"))
            stream = dice.choice((0, 0x55))
            block = allocator.alloc(1 + dice.randrange(1 << 22), snapshots.stack((number, name)), stream)
            if number % 3:
                allocator.free(block, snapshots.stack((number, "g")), recorded=dice.random() < 0.5)
        tree = allocator.snapshot()
    if dice.random() < 0.8:
        tree = mutate(dice, tree)
    if dice.random() < 0.1 and isinstance(tree, dict):
        place = dice.choice([(tree, "segments"), (tree, "device_traces"), *places(tree)])
        with contextlib.suppress(LookupError, TypeError):
            place[0][place[1]] = [place[0][place[1]]] * dice.choice((2, 100, 50000))  # each the same
    try:
        data = pickle.dumps(tree, protocol=dice.choice((2, 3, 4, 4, 4, 5)))
    except (RecursionError, pickle.PicklingError):
        data = b"\x80\x04N."
    if dice.random() < 0.2:
        data = bomb(dice, data)
    return damaged(dice, data) if dice.random() < 0.3 else data


def keyed(keys) -> bytes:
    return b"\x80\x04}(" + b"".join(key + b"N" for key in keys) + b"u."


def bomb(dice: random.Random, data: bytes) -> bytes:
    """Return a small pickle that asks for much."""
    count = dice.choice((30, 1000, 200000))
    nested = b"\x80\x04)\x94" + b"".join(b"h%c" % min(n, 255) * 2 + b"\x86\x94" for n in range(60))
    prime = (1 << 61) - 1
    return dice.choice(
        [
            nested + b"}h<Ns.",  # a tuple of tuples as a key
            # Keys that all have the same hash.
            keyed(b"\x8a\x10" + (number * prime).to_bytes(16, "little") for number in range(20000)),
            keyed(b"\x8a\x09" + (number * prime % (1 << 70)).to_bytes(9, "little") for number in range(20000)),
            keyed(b"G" + struct.pack(">d", number * 2.0**61) for number in range(20000)),
            b"\x80\x04N" + b"r" + struct.pack("<I", dice.choice((1 << 20, 1 << 31, 0xFFFFFFFF))) + b".",
            b"\x80\x04]" + b"]" * count + b"a" * count + b".",
            b"\x80\x04](" + b"}" * count + b"e.",
            b"\x80\x04(" + b"2" * count + b"l.",
            b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"1.",
            b"\x80\x04\x8b" + struct.pack("<i", count) + b"\x7f" * count + b".",
            b"\x80\x04X" + struct.pack("<I", 0xFFFFFFFF) + b"x.",
            b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + data[2:],
            b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
            b"\x80\x04I" + b"9" * count + b"\n.",
            b"\x80\x04" + b"(" * count + b".",
            data[:-1] + b"\x94" * count + b".",
            b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00xtR.",
        ]
    )


def tuned(dice: random.Random) -> bytes:
    limits = {"one_shot": 1 << 20, "two_shot": 1 << 22, "scatter": 0, "gather": 5}
    tree = {"bucket_mb": 16.0, "us": {"one by one": 9.0}, "low_latency": {"2": limits, "4": dict(limits)}, "world": 2}
    if dice.random() < 0.4:
        tree["bucket_mb"] = value(dice)
    elif dice.random() < 0.4:
        limits[dice.choice(list(limits))] = value(dice)
    data = to_bytes(as_json(dice, mutate(dice, tree)))
    return damaged(dice, data) if dice.random() < 0.2 else data


def arguments(dice: random.Random) -> bytes:
    words = ["0", "-1", "1", "inf", "nan", "1e300", "1e-300", "1e999", "9" * 5000, "\u00b2", "", "x", "/", ".", ESCAPES]
    options = ["--mib", "--rounds", "--world", "--out", "--png", "--low-latency", "--mib=", "--nothing"]
    return to_bytes(json.dumps([dice.choice(dice.choice((options, words))) for _ in range(dice.randrange(6))]))


KINDS = {
    "jsonl": recording,
    "pickle": snapshot,
    "tuned.json": tuned,
    "arguments.json": arguments,
}  # fmt: skip
"""What makes a file, by the end of its name."""


def corpus() -> list[Path]:
    """Return the files that broke something, by name: each ``WHAT.KIND``."""
    return sorted(CORPUS.iterdir())


def make(seed: int, number: int) -> tuple[str, bytes]:
    """Return the kind of a file and what is in it; of seed -1, of a file of the corpus."""
    if seed == FOUND:
        path = corpus()[number]
        return path.name.partition(".")[2], path.read_bytes()
    dice = random.Random(f"{seed}/{number}")
    kind = dice.choices(list(KINDS), (4, 6, 1, 1))[0]
    return kind, KINDS[kind](dice)


# --- what becomes of them -------------------------------------------------------------------------------------------


class Wrong(Exception):
    """What a file made of the library is not as promised."""


def command(*words: str, own: bool = False) -> tuple[int, str, str]:
    """Run a command in this process; return its exit status and what it printed.

    ``own``: what it prints of the words is whoever typed them's own affair.
    """
    from safecomm.__main__ import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(words))
        except SystemExit as error:  # argparse's
            status = error.code
        out.flush()
        err.flush()
    texts = [one.buffer.getvalue().decode() for one in (out, err)]
    for text in texts:
        strange = [one for one in text if one != "\n" and not one.isprintable()]
        if strange and not own:
            raise Wrong(f"it prints {strange[:5]}")
    return status, *texts


def check_report(path: Path, number: int) -> str:
    page, plot = path.with_name("page.html"), path.with_name("plot.png")
    page.unlink(missing_ok=True)
    words = ["report", str(path), "--html", str(page), *(["--png", str(plot)] if number % 40 == 0 else [])]
    status, out, err = command(*words)
    said = [line for line in err.splitlines() if not line.startswith("reading ")]
    if (status, len(said)) == (2, 1) and out == "" and (str(path) in said[0] or "--png" in said[0]):
        return "refused"
    if status or said or "=====" not in out:
        raise Wrong(f"status {status}, {len(out)} letters printed, and on standard error {said[:3]}")
    data = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)[1]
    json.loads(data, parse_constant=lambda name: (_ for _ in ()).throw(Wrong(f"{name} in the page")))
    return "told"


def refused(path: Path, function, *arguments) -> str:
    """Return what became of a call, which may raise ValueError with the path."""
    try:
        function(path, *arguments)
    except ValueError as error:
        if str(path) not in str(error):
            raise Wrong(f"a ValueError without the path: {error}") from None
        return "refused"
    return "told"


def check_tuned(path: Path, number: int) -> str:
    from safecomm import bucketed
    from safecomm.peers import limits as low_latency_limits
    from safecomm.tools import tune_low_latency

    return " ".join(
        refused(path, one) for one in (bucketed, lambda p: low_latency_limits.read(p, 2), tune_low_latency.kept)
    )


def check_arguments(path: Path, number: int) -> str:
    from safecomm.tools import tune

    launch, tune.launch = tune.launch, lambda *_: 0
    try:
        status, _, err = command("tune", *json.loads(path.read_text()), own=True)
    finally:
        tune.launch = launch
    if status == 1 and "two GPUs" in err:
        return "refused"
    if status not in (0, 2) or bool(err) != bool(status) or "Traceback" in err:
        raise Wrong(f"status {status}: {err[-200:]}")
    return "refused" if status else "told"


CHECKS = {
    "jsonl": check_report,
    "pickle": check_report,
    "tuned.json": check_tuned,
    "arguments.json": check_arguments,
}


def check(kind: str, data: bytes, folder: Path, number: int = 1) -> str:
    """Look at a file; return what became of it. Raises Wrong, or whatever it is that nobody caught."""
    path = folder / f"file.{kind}"
    path.write_bytes(data)
    start = time.process_time()
    found = CHECKS[kind](path, number)
    took = time.process_time() - start
    if took > SECONDS:
        raise Wrong(f"it took {took:.1f} s for {len(data)} bytes")
    return found


# --- many -----------------------------------------------------------------------------------------------------------


def limit_memory() -> None:
    """Give this process ``MEMORY`` more than what its libraries have."""

    with contextlib.suppress(ImportError):
        import matplotlib.figure  # noqa: F401
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def work(seed: int, first: int, end: int, until: float) -> None:
    """Look at files one after another, and say so on standard output, for ``watch``."""
    os.environ["PYTHONWARNINGS"] = "error"
    limit_memory()
    say = os.fdopen(os.dup(1), "w", buffering=1)
    with tempfile.TemporaryDirectory() as folder:
        number = first
        while number < end and time.time() < until:
            kind, data = make(seed, number)
            say.write(f"begin {number}\n")
            try:
                found = check(kind, data, Path(folder), number)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1:]
                place = "".join(f" at {Path(one.filename).name}:{one.lineno}" for one in where)
                said = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " | ")
                say.write(f"wrong {number} {kind}: {said}{place}\n")
            else:
                say.write(f"fine {kind} {found}\n")
            number += 1


def watch(seed: int, count: int | None, seconds: float, report=print) -> tuple[dict[str, int], list[str]]:
    """Have files looked at; return how often what became of which kind, and what was wrong."""
    until = time.time() + seconds
    end = count if count is not None else 1 << 40
    outcomes: dict[str, int] = {}
    wrong: list[str] = []
    number = 0
    while number < end and time.time() < until:
        words = [sys.executable, __file__, "--seed", seed, "--work", number, end, until]
        with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE) as worker:
            lost = follow(worker, outcomes, wrong, seed, report)
        if lost is None:
            if worker.returncode:
                raise RuntimeError(f"the process that looks at files ended with status {worker.returncode}")
            break
        number = lost + 1
    return outcomes, wrong


def follow(worker, outcomes, wrong, seed, report) -> int | None:
    """Read what ``worker`` says; return the number of the file that it was lost with, if it was."""
    buffer, current = b"", None
    while True:
        ready, _, _ = select.select([worker.stdout], [], [], PATIENCE)
        data = os.read(worker.stdout.fileno(), 1 << 16) if ready else b""
        if not data:
            if not ready:
                worker.kill()
            worker.wait()
            if current is None:
                return None
            what = f"died with status {worker.returncode}" if ready else f"not done after {PATIENCE:.0f} s"
            wrong.append(f"{what}: python tests/fuzz_files.py --seed {seed} --only {current}")
            report(wrong[-1])
            return current
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "begin":
                current = int(rest)
            elif word == "fine":
                outcomes[rest] = outcomes.get(rest, 0) + 1
                current = None
            else:
                wrong.append(f"{rest}: python tests/fuzz_files.py --seed {seed} --only {current}")
                report(wrong[-1])
                current = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="look at this file, in this process")
    parser.add_argument("--write", type=Path, metavar="PATH", help="with --only: keep the file there")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        first, end, until = options.work
        work(options.seed, int(first), int(end), float(until))
        return 0
    if options.only is not None:
        kind, data = make(options.seed, options.only)
        if options.write:
            options.write.write_bytes(data)
        limit_memory()
        with tempfile.TemporaryDirectory() as folder:
            print(kind, len(data), "bytes:", check(kind, data, Path(folder), options.only))
        return 0
    count = len(corpus()) if options.seed == FOUND else None
    outcomes, wrong = watch(options.seed, count, options.seconds)
    for name, count in sorted(outcomes.items()):
        print(f"{count:7} {name}")
    print(f"seed {options.seed}: {sum(outcomes.values()) + len(wrong)} files, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
