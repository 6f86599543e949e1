"""safecomm's calls show in a profile of torch, with c10d's and the backend's inside of them."""

from __future__ import annotations

import pytest
import torch
from ranks import on
from watching import cpu_profile

import safecomm


def profiled(call):
    """Return the events of a profile of ``call``, by name: the times at which each begins and ends."""
    with cpu_profile() as profile:
        call()
    found = {}
    for event in profile.events():
        found.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    return found


@on(2)
def test_each_call_is_a_range_around_torchs_own():
    tensor = torch.ones(8)

    def calls():
        safecomm.all_reduce(tensor)
        safecomm.all_reduce(tensor, async_op=True).wait()
        safecomm.broadcast(tensor, 0)

    calls()  # what the first call makes is not what is looked at
    events = profiled(calls)
    assert len(events["safecomm::all_reduce"]) == 2
    assert len(events["safecomm::broadcast"]) == 1
    for (start, end), (inner, last) in zip(events["safecomm::all_reduce"], events["c10d::allreduce_"], strict=True):
        assert start <= inner <= last <= end


@on(2)
def test_an_error_closes_the_range():
    def calls():
        with pytest.raises((ValueError, TypeError)):
            safecomm.broadcast("no tensor", 0)
        safecomm.broadcast(torch.ones(1), 0)

    assert len(profiled(calls)["safecomm::broadcast"]) == 2


@on(2)
def test_the_call_site_is_the_programs_under_a_profiler_too():
    peer = 1 - torch.distributed.get_rank()
    with cpu_profile():
        work = safecomm.irecv(torch.empty(4), peer)
        (entry,) = safecomm.pending()
        assert entry.site.startswith(f"{__file__}:")
        safecomm.isend(torch.ones(4), peer).wait()
        work.wait()
