"""What devices use outside of the caching allocator: a driver and groups that are told of, on any machine."""

from __future__ import annotations

import contextlib
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import safecomm
from safecomm import _torch
from safecomm._torch import backends
from safecomm.core.streams import HOST
from safecomm.diagnostics import outside as module
from safecomm.diagnostics.outside import Outside, outside
from safecomm.diagnostics.record import MemoryReport

GIB = 1 << 30
MIB = 1 << 20
TOTAL = 140 * GIB


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    monkeypatch.setattr(module, "ENGINES", {})


@pytest.fixture
def driver(monkeypatch):
    """Two devices, of which this process has started CUDA on the second."""
    asked = mock.Mock(side_effect=lambda index: (TOTAL - (index + 1) * GIB, TOTAL))
    mode = mock.MagicMock(side_effect=contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: {})
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=AssertionError("it waits for the device")))
    monkeypatch.setattr(_torch, "has_context", lambda index: index == 1)
    monkeypatch.setattr(type(module.LEDGER.streams), "relaxed_capture_mode", mode, raising=False)
    return SimpleNamespace(asked=asked, mode=mode)


@pytest.fixture
def groups(monkeypatch):
    """Groups by name, with the bytes that NCCL has for them."""
    found = {}
    monkeypatch.setattr(_torch, "all_groups", lambda: list(found))
    monkeypatch.setattr(_torch, "nccl_memory_of", found.get)
    monkeypatch.setattr(_torch, "group_name", lambda group: group or "")
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_cuda_there_is_nothing_to_tell():
    assert outside() is None
    report = safecomm.memory_report()
    assert report.outside is None
    assert "outside" not in str(report)


def test_a_device_without_a_context_is_not_asked_about_because_that_would_make_one(driver, groups):
    assert outside() == Outside(used=2 * GIB, reserved=100 * MIB, parts={})
    driver.asked.assert_called_once_with(1)


def test_where_cuda_was_started_on_no_device_there_is_nothing_to_tell(driver, monkeypatch):
    monkeypatch.setattr(_torch, "has_context", lambda index: False)
    assert outside() is None
    driver.asked.assert_not_called()


def test_all_devices_with_a_context_are_added_up(driver, groups, monkeypatch):
    monkeypatch.setattr(_torch, "has_context", lambda index: True)
    assert outside() == Outside(used=3 * GIB, reserved=200 * MIB, parts={})


def test_a_driver_that_does_not_answer_does_not_end_the_report(driver, groups):
    driver.asked.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert outside() is None
    assert safecomm.memory_report().outside is None


def test_the_driver_is_asked_as_a_capture_allows(driver, groups):
    outside()
    driver.mode.assert_called_once()


def test_nccls_memory_is_told_by_group(driver, groups):
    groups.update({"0": 600 * MIB, "tp": 40 * MIB, "gloo's": None})
    found = outside()
    assert found.parts == {"NCCL, group 0": 600 * MIB, "NCCL, group tp": 40 * MIB}
    assert found.total == 2 * GIB - 100 * MIB
    assert found.unattributed == 2 * GIB - 740 * MIB


def test_staging_is_told_by_group_and_only_what_is_on_a_device(driver, groups, monkeypatch):
    layout = SimpleNamespace(nbytes=8 * MIB)
    monkeypatch.setattr(
        module,
        "ENGINES",
        {
            "0": SimpleNamespace(layout=layout, index=1, nbytes=8 * MIB + 4096),
            "tp": SimpleNamespace(layout=layout, index=HOST),
            "pp": SimpleNamespace(functional=False),
            None: SimpleNamespace(layout=layout, index=1),
        },
    )
    assert outside().parts == {
        "low_latency() staging, group 0": 8 * MIB,
        "low_latency() staging, group without a name": 8 * MIB,
    }


def test_groups_of_one_name_are_added_up(driver, groups):
    groups.update({"": 1, None: 2})
    assert outside().parts == {"NCCL, group without a name": 3}


def test_the_report_has_it_as_rows_and_as_figures(driver, groups):
    groups["0"] = 600 * MIB
    report = safecomm.memory_report()
    assert report.outside == outside()
    lines = str(report).splitlines()
    assert lines[-3:] == [
        "outside of the allocator           1948.0 MiB",
        "  NCCL, group 0                     600.0 MiB",
        "  CUDA's context, other processes  1348.0 MiB",
    ]
    assert pickle.loads(pickle.dumps(report)) == report
    assert hash(report)


def test_what_torch_does_not_tell_of_nccl_is_with_the_rest_and_said():
    found = Outside(used=5 * MIB, reserved=2 * MIB, parts={"low_latency() staging, group 0": MIB})
    assert found.figures() == {
        "outside of the allocator": 3 * MIB,
        "  low_latency() staging, group 0": MIB,
        "  NCCL (not told by this torch), CUDA's context, other processes": 2 * MIB,
    }


def test_a_report_without_it_is_as_it_was():
    assert "outside" not in str(MemoryReport((), 0, 0, 0, None))


# --- what torch tells of NCCL -------------------------------------------------------------------------------------


class Nccl:
    """Stands in for ``ProcessGroupNCCL``."""

    def __init__(self, stats=None, initialized=True):
        self._stats = stats
        self._initialized = initialized

    def _is_initialized(self):
        return self._initialized

    def memory_stats(self):
        if isinstance(self._stats, Exception):
            raise self._stats
        return self._stats


class OldNccl:
    """The same, of a torch before 2.12."""


def memory_of(backend):
    group = SimpleNamespace(_get_backend=lambda device: backend)
    with mock.patch.object(backends, "_NCCLS", (Nccl, OldNccl)):
        return backends.nccl_memory_of(group)


STATS = {"suspend": 30, "suspended": 0, "persist": 12, "total": 42}


def test_nccls_memory_is_the_total_of_its_communicators():
    assert memory_of(Nccl(STATS)) == 42


def test_of_suspended_communicators_only_what_stays_is_counted():
    assert memory_of(Nccl({**STATS, "suspended": 1})) == 12


@pytest.mark.parametrize(
    "backend",
    [
        None,
        object(),
        OldNccl(),
        Nccl({}),
        Nccl(RuntimeError("getMemoryStats() requires NCCL 2.29.7 or later")),
        Nccl(AssertionError("torch would wait for a communicator"), initialized=False),
    ],
    ids=["no backend", "not NCCL's", "a torch before 2.12", "other figures", "an older NCCL", "no communicator yet"],
)
def test_otherwise_nccls_memory_is_unknown(backend):
    assert memory_of(backend) is None


def test_a_build_without_cuda_has_no_contexts():
    if not (torch.version.cuda or torch.version.hip):
        assert not _torch.has_context(0)
