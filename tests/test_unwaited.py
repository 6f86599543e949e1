"""Functional collectives that were not waited for are counted: torch keeps their tensors until they are."""

import pytest
import torch
import torch.distributed as stock
import torch.distributed._functional_collectives as functional
from ranks import on
from watching import Log

import safecomm
from safecomm import _torch
from safecomm.diagnostics import leaks
from safecomm.tools.doctor import examine, look

SAID = "3 functional collectives that were not waited for"


@pytest.mark.skipif(_torch.unwaited() is None, reason="this torch does not count")
@on(2)
def test_they_are_counted_wherever_somebody_looks():
    assert safecomm.memory_report().unwaited == 0
    with leaks.watch(log_leaks=True) as watched, Log():
        kept = [functional.all_reduce(torch.ones(8), "sum", stock.group.WORLD).elem for _ in range(3)]
        launched = len(kept)
    assert watched.unwaited == launched == 3
    assert SAID in str(watched)
    assert SAID in str(safecomm.memory_report())
    (check,) = [check for check in examine(look(), {}) if check.name == "functional collectives"]
    assert not check.ok
    assert check.sentence.startswith(SAID)
    for tensor in kept:
        functional.wait_tensor(tensor)
    assert safecomm.memory_report().unwaited == 0
    assert not [check for check in examine(look(), {}) if check.name == "functional collectives"]
