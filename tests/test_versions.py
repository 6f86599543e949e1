"""One table of versions, which the import, the doctor and the documents agree with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import run_program

from safecomm._torch import versions
from safecomm.tools import doctor

ROOT = Path(__file__).resolve().parents[1]


def importing(program):
    """Return what is logged, and what is raised, where ``program`` runs before safecomm is imported."""
    ended = run_program(
        f"""
import logging, torch
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("safecomm").addHandler(handler)
logging.getLogger("safecomm").propagate = False
{program}
try:
    import safecomm
except ImportError as error:
    lines.append(f"ImportError: {{error}}")
print(*lines, sep="\\n")
"""
    )
    ended.check()
    return ended.out.split("\n")[:-1]


def test_a_newer_torch_is_said_once_and_works():
    lines = importing('torch.__version__ = torch.torch_version.TorchVersion("99.1.0")')
    assert [line for line in lines if "is newer than" in line] == [versions.sentence("99.1.0")]
    assert not any("ImportError" in line for line in lines)


def test_a_tested_torch_is_not_mentioned():
    assert not any("newer than" in line or "ImportError" in line for line in importing(""))


def test_an_older_torch_is_one_clear_sentence():
    (line,) = importing('torch.__version__ = torch.torch_version.TorchVersion("2.3.1")')
    assert line == "ImportError: safecomm needs torch 2.4 or later, and this is torch 2.3.1: upgrade torch."


def test_a_torch_without_distributed_is_one_clear_sentence():
    (line,) = importing(
        """
import sys
import torch.distributed
torch.distributed.is_available = lambda: False
sys.modules["torch.distributed.distributed_c10d"] = None  # importing it fails, as in such a torch
"""
    )
    assert "safecomm needs torch.distributed, which this torch" in line


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.3.1", "too old"),
        ("2.4.0", "tested"),
        ("2.9.1", "works"),
        ("2.13.0+cpu", "tested"),
        (versions.TESTED[-1].torch, "tested"),
        ("99.0.0", "newer than tested"),
        ("99.0.0.dev20990101+cu999", "newer than tested"),
    ],
)
def test_what_is_known_of_a_version_is_what_the_doctor_says(version, known):
    assert versions.standing(version) == known
    machine = doctor.Machine(torch=version, python="3.12.0")
    (check,) = [check for check in doctor.examine(machine, {}) if check.name == "torch"]
    assert check.sentence == versions.sentence(version)
    assert check.ok == (known != "too old")


def test_this_torch_is_one_of_the_table():
    assert versions.standing(torch.__version__) == "tested"


def test_the_table_is_in_order_and_says_of_each_what_ran():
    order = [tuple(map(int, one.torch.split("."))) for one in versions.TESTED]
    assert order == sorted(order)
    for one in versions.TESTED:
        assert one.cpu
        assert one.pythons


@pytest.mark.parametrize(("file", "table"), [("README.md", "brief"), ("docs/torch_versions.md", "markdown")])
def test_the_documents_have_the_table(file, table):
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(r"<!-- versions:begin -->\n(.*?)\n<!-- versions:end -->", text, re.DOTALL)
    assert found, f"{file} has no table of versions"
    made = getattr(versions, table)()
    assert found[1] == made, f"{file} is out of date: it should have what versions.{table}() returns"


def test_the_short_table_leaves_out_no_torch_and_nothing_that_was_not_tried():
    told = versions.brief()
    for one in versions.TESTED:
        assert one.torch in told
        assert one.gpu in told
    for one in versions.SUPPORT:
        if one.untried == "others":
            assert f"{one.tested.split()[-1]}" in told, "the row of torch on GPUs says it"
        else:
            assert one.untried in told
