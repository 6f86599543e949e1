"""Random programs of public calls break no promise (S1, S3, S5, S6), and a safecomm that is wrong fails them.

The programs run in processes of their own, in which the GPU is the simulated device: see ``front.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from amount import ALL, SEED, share
from interpreters import PYTHONS
from ranks import launch, run_python

TESTS = Path(__file__).parent
MUTANTS = re.findall(r"^@mutant\(.*\)\ndef (\w+)", (TESTS / "front_mutants.py").read_text(), re.MULTILINE)
RESULTS = json.loads((TESTS.parent / "benchmarks" / "results" / "front_mutants.json").read_text())["parts"]
QUICK = 20
"""Programs after which those mutants were found that each run looks for; the others are for ``make test-all``."""


def run(script, *arguments):
    """Run a script of the tests, and return its status and the lines that it printed."""
    command = [str(TESTS / script), *map(str, arguments)]
    ended = run_python(*command, cwd=str(TESTS.parent), limit=900, CUDA_VISIBLE_DEVICES="")
    assert ended.out, ended.err
    return ended.status, ended.out.splitlines()


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "gloo"])
def test_programs_of_public_calls_s1_s3_s5_s6(backend):
    status, said = run("front_programs.py", "--programs", share(1000), "--seed", 21 + SEED, "--backend", backend)
    assert status == 0, said
    counts = json.loads(said[-1])
    assert counts.pop("failures") == 0
    assert min(counts.values()) > 0


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "gloo"])
def test_exceptions_in_the_middle_of_calls_let_nothing_out_too_early_s1(backend):
    """And ``drain(wait=True)`` gives back what they have kept."""
    status, said = run("front_interrupts.py", "--programs", share(300), "--seed", 31 + SEED, "--backend", backend)
    counts = json.loads(said[-1])
    assert (status, counts["failed"]) == (0, []), said
    assert counts["interrupts"] > 100


@pytest.mark.parametrize("mutant", ["hands_off_after_the_release", "waits_after_the_release"])
def test_exceptions_find_a_safecomm_that_releases_first(mutant):
    _, said = run("front_interrupts.py", "--programs", 300, "--mutant", mutant)
    (failed,) = json.loads(said[-1])["failed"]
    assert failed.startswith("unsafe: "), failed


def test_a_failing_program_is_one_line_that_replays_it_s1():
    """The line names the seed, and the shortest part of the program that still fails."""
    mutant = ["--mutant", "the_end_of_a_region_holds_its_first_tensor_alone"]
    status, said = run("front_programs.py", "--programs", 100, *mutant)
    assert status == 1
    kind, again, reason = said[0].split(": ", 2)
    assert (kind, "free while operations" in reason) == ("unsafe", True)
    status, replayed = run("front_programs.py", *again.split(), *mutant)
    assert status == 1
    assert replayed[0].split(": ", 2)[2].split(" operations")[0] == reason.split(" operations")[0]
    steps = int(again.split()[-1])
    assert steps > 1
    assert run("front_programs.py", *again.split()[:-1], steps - 1, *mutant)[0] == 0


def test_programs_find_each_safecomm_that_is_wrong():
    """Each by a Violation or a Loss, and by no other exception."""
    names = [one["name"] for one in RESULTS if ALL or one["programs"] <= QUICK]
    _, said = run("front_mutants.py", *names)
    found = {one["name"]: one for one in map(json.loads, said)}
    assert [*found] == names
    assert [one for one in found.values() if one["by"] not in ("Violation", "Loss")] == []


def test_the_results_are_of_all_that_is_wrong():
    assert {re.sub("_(nccl|gloo)$", "", one["name"]) for one in RESULTS} == {*MUTANTS}
    assert [one["name"] for one in RESULTS if one["by"] not in ("Violation", "Loss")] == []


def programs_of_public_calls(_, python, backend):
    PYTHONS[python]()
    import front_programs

    front_programs.Program.counted = False
    front_programs.quiet()
    front_programs.warm_up()
    for number in range(share(250)):
        program, failure = front_programs.run_one(41 + SEED, number, backend)
        if failure is not None:
            raise AssertionError(number, program.steps) from failure


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("python", ["no_gil", "one_too_many_later"])
def test_programs_of_public_calls_keep_the_promises_without_counts_s1_s3_s5_s6(python, backend):
    (ended,) = launch(0, programs_of_public_calls, python, backend)
    ended.check()
