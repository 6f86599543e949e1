"""``make compat``: the tests of what depends on torch, on each version of torch that safecomm is tested with.

Each version has an environment of its own outside of the tree, one at a time, because each takes some 5 GB: it is made,
used and deleted. ``--keep`` leaves it in the cache, where the next run finds it; ``--clear`` empties the cache. Run it
with the Python of an environment that has safecomm: the versions are those of ``safecomm/_torch/versions.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from torch.torch_version import TorchVersion

from safecomm._torch.versions import COMPAT, TESTED, Tested

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safecomm" / "compat"
FILES = (
    "test_face", "test_versions", "test_private_names", "test_refcounts", "test_collectives", "test_work",
    "test_patching", "test_ledger", "test_allocation", "test_arena", "test_lists", "test_gates",
    "test_list_gates", "test_region_ends", "test_hooks", "test_stream_order", "test_invariance",
)  # fmt: skip
"""What depends on torch: names, calls, works, patching, the ledger, the arena, lists, hooks, versions."""

MUTANTS = "test_a_check_finds_"
"""What is left out: that a wrong gate is caught. It depends on torch only in that some torch forgives
a gate that is wrong, such as one that does not see dispatch modes (2.8) or forgets the inputs (2.11)."""

NEEDS = ("pytest>=8", "pytest-xdist>=3.7", "hypothesis>=6.100", "typing-extensions>=4.6", "hatchling")
"""What the environments have besides torch and numpy."""

HANGS = "2.5"
"""Before it, gloo now and then hangs when a group is destroyed, with or without safecomm: torch 2.4.1 did in 3 of 60
plain programs of five all_reduces of a new tensor each. A few tests that fail there are run again, thrice at most."""

REASONS = {entry["reason"] for entry in json.loads((Path(__file__).parent / "compat_skips.json").read_text())}
"""Why a test may be skipped: ``conftest.py`` skips those of the committed list. A skip of another reason fails."""


def interpreter(minor: str) -> str | None:
    """Return an installed Python of that minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [sys.executable, shutil.which(f"python{minor}"), *sorted(pyenv.glob(f"versions/{minor}.*/bin/python"))]
    for candidate in filter(None, candidates):
        command = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip() == minor:
            return str(candidate)
    return None


def make(version: str, minor: str, python: str, extra: list[str]) -> Path:
    """Return an environment with that torch, made if it is not in the cache."""
    folder = CACHE / f"torch-{version}-python-{minor}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        numpy = "numpy<2" if TorchVersion(version) < "2.5" else "numpy"
        needs = [f"torch=={version}", numpy, *NEEDS, *extra]
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        # The version is what is asked for: a constraint of this machine's pip would only refuse it, or choose another.
        subprocess.run([*pip, *needs], check=True, env={**os.environ, "PIP_CONSTRAINT": os.devnull})
        (folder / "ready").touch()
    return folder


def run(folder: Path, files: list[str], results: Path) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """Run the tests of ``files``; return the counts, what failed, and what was skipped with its reason."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command: list[Any] = [folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", f"--junitxml={results}"]
    if files:
        command += ["-k", f"not ({MUTANTS})"]
    results.unlink(missing_ok=True)
    ended = subprocess.run([*command, *files], cwd=ROOT, env=environment, check=False)
    failed, skipped, counts = [], {}, {"passed": 0, "failed": 0, "skipped": 0}
    if ended.returncode not in (0, 1) or not results.exists():  # tests have passed or failed; else there is no result
        return {**counts, "failed": 1}, [f"pytest itself, which ended with {ended.returncode}"], skipped
    for case in ET.parse(results).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
            counts["failed"] += 1
        elif (skip := case.find("skipped")) is not None:
            skipped[name] = skip.get("message", "")
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts, failed, skipped


def node(test: str) -> str:
    """Return what pytest calls a test of its results."""
    where, name = test.split("::", 1)
    return f"{where.replace('.', '/')}.py::{name}"


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write what has come of it until now, with the commit."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    path.write_text(json.dumps({"command": "make compat", "commit": commit, "runs": runs}, indent=1) + "\n")


def newest() -> str:
    """Return the newest torch of the registry; ``""`` if it does not say."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return ""
    found = re.search(r"Available versions: ([^,\s]+)", done.stdout)
    return found[1] if found else ""


def chosen(names: list[str], *, every_python: bool) -> list[tuple[Tested, str]]:
    """Return the versions that were asked for, each with its oldest and its newest Python.

    First all versions with one of them, which is the oldest but for the newest torch, and then with the other.
    """
    first, second = [], []
    for one in TESTED:
        newest = one is TESTED[-1]
        if one.torch in names or (newest and "newest" in names) or (not names and COMPAT in one.cpu):
            order = one.pythons[::-1] if newest else one.pythons
            first.append((one, order[0]))
            second += [(one, minor) for minor in order[1:]]
    return first + second if every_python else first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="of torch, or 'newest'; all that are tested so if there are none")
    parser.add_argument("--one-python", action="store_true", help="one Python for each, in place of oldest and newest")
    parser.add_argument("--whole", action="store_true", help="all tests, and not only those that depend on torch")
    parser.add_argument("--keep", action="store_true", help="leave the environments in the cache")
    parser.add_argument("--clear", action="store_true", help="empty the cache, and do nothing else")
    parser.add_argument("--json", type=Path, help="write what came of it there")
    options = parser.parse_args()
    if options.clear:
        shutil.rmtree(CACHE, ignore_errors=True)
        return 0
    CACHE.mkdir(parents=True, exist_ok=True)
    runs, wrong = [], 0
    for tested, minor in chosen(options.versions, every_python=not options.one_python):
        name = f"torch {tested.torch}, Python {minor}"
        python = interpreter(minor)
        if python is None:
            print(f"{name}: not run, because there is no Python {minor} here", flush=True)
            runs.append({"torch": tested.torch, "python": minor, "run": False})
            continue
        print(f"{name}: installing", flush=True)
        began = time.monotonic()
        extra = ["matplotlib", "transformers>=4.40", "triton", "megatron-core==0.16.1"] if options.whole else []
        folder = make(tested.torch, minor, python, extra)
        installed = time.monotonic() - began
        print(f"{name}: testing", flush=True)
        again: list[str] = []
        try:
            files = [] if options.whole else [f"tests/{file}.py" for file in FILES]
            counts, failed, skipped = run(folder, files, CACHE / "results.xml")
            for _ in range(3):
                if not (TorchVersion(tested.torch) < HANGS and 0 < len(failed) <= 5):
                    break
                print(f"{name}: once more, {', '.join(failed)}", flush=True)
                before, failed = failed, run(folder, [node(test) for test in failed], CACHE / "results.xml")[1]
                again += before
                counts = {**counts, "passed": counts["passed"] + len(before) - len(failed), "failed": len(failed)}
        finally:
            if not options.keep:
                shutil.rmtree(folder)
        unexcused = [test for test, reason in skipped.items() if reason not in REASONS]
        seconds = round(time.monotonic() - began - installed)
        runs.append({"torch": tested.torch, "python": minor, "run": True, **counts, "again": again, "seconds": seconds})
        if options.json:
            write(options.json, runs)
        said = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"{name}: {said}, in {seconds} s after {installed:.0f} s of installing", flush=True)
        for test in failed:
            print(f"  failed: {test}")
        for test in unexcused:
            print(f"  skipped, which no list excuses: {test}: {skipped[test]}")
        wrong += len(failed) + len(unexcused)
    there = newest()
    if there and TorchVersion(there) > TESTED[-1].torch:
        print(
            f"torch {there} is there, newer than {TESTED[-1].torch}, the newest that is tested. Nothing fails for that."
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
