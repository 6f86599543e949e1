"""The protocol of the low-latency kernels, as a model, and the order of their calls on the simulated device."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protocol import BOTH, CHUNKS, FINE, KINDS, LATER, ONE, TWO, Wrong, explore, start, start_exact, walk
from simulated import INDEX, SimulatedDevice

from safecomm.peers.order import Order

# --- the protocol --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds",
    [
        [ONE] * 4,
        [TWO] * 3,
        [ONE, TWO, ONE, ONE],
        [TWO, ONE, TWO],
        [BOTH, ONE, TWO],
        [TWO, BOTH, ONE],
        [BOTH, FINE, ONE],
    ],
)
def test_two_ranks_never_read_wrong_or_wait_for_ever_whatever_happens(kinds):
    """Four calls use a phase again; of those through two channels, which have too many states, three are made."""
    assert explore(start(2, kinds), limit=1_000_000) > 600
    assert explore(start(2, [*kinds, ONE, ONE][:5], signals=False, kind=True), limit=400_000) > 200


@pytest.mark.parametrize(
    ("ranks", "kinds", "how"),
    [(2, [CHUNKS], {}), (3, [ONE], {}), (3, [ONE, ONE], {"signals": False, "kind": True})],
    ids=["two ranks, two chunks", "three ranks", "three ranks that end what they clear"],
)
def test_nor_do_two_chunks_of_a_program_or_three_ranks(ranks, kinds, how):
    """More calls have too many states; those are gone through at random below."""
    assert explore(start(ranks, kinds, **how), limit=100_000) > 5_000


CALLS = st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 4), CALLS, st.integers(0, 1 << 32))
def test_more_ranks_never_read_wrong_or_wait_for_ever(ranks, kinds, seed):
    walk(start(ranks, kinds), random.Random(seed))


FAULTS = {
    "no signals": {"signals": False},
    "signals of two calls before": {"lag": 2},
    "two phases": {"phases": 2},
}


def found_wrong(ranks, kinds, **how):
    for seed in range(300):
        try:
            walk(start(ranks, kinds, **how), random.Random(seed))
        except Wrong:
            return True
    return False


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "kinds",
    [[ONE] * 8, [TWO] * 8, [CHUNKS] * 6, [ONE, TWO, BOTH, CHUNKS] * 2],
    ids=["one", "two", "two chunks", "mixed"],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_clear_that_comes_late_loses_data_then(fault, kinds, ranks):
    assert found_wrong(ranks, kinds, **FAULTS[fault])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_of_other_sizes_need_calls_that_all_programs_count(ranks):
    kinds = [BOTH, BOTH, FINE, LATER] * 2
    assert found_wrong(ranks, kinds, counted=False)
    assert not found_wrong(ranks, kinds)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("kind", [ONE, TWO, CHUNKS])
def test_the_signals_of_all_peers_but_one_are_not_enough(kind, ranks):
    assert found_wrong(ranks, [kind] * 8, seen=ranks - 2)


def test_numbered_packets_need_two_sections_and_no_clears():
    assert explore(start_exact(2, 6), limit=20_000) > 50
    with pytest.raises(Wrong, match="waits for ever"):
        explore(start_exact(2, 3, sections=1), limit=20_000)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(0, 1 << 32))
def test_numbered_packets_are_never_lost(ranks, calls, seed):
    walk(start_exact(ranks, calls), random.Random(seed))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", [ONE, TWO, CHUNKS])
def test_one_phase_loses_data_however_soon_a_clear_comes(ranks, kind):
    assert found_wrong(ranks, [kind] * 6, phases=1, kind=True)


# --- order ---------------------------------------------------------------------------------------------------------


class Calls:
    """Calls of one group on the streams of a simulated device, each of which has to come after the one before."""

    def __init__(self):
        self.device = SimulatedDevice()
        self.order = Order(self.device, INDEX)
        self.last = 0  # the bit of the last eager call or replay
        self.last_captured = 0

    def call(self, stream):
        if self.device.streams[stream].capture:
            self.order.follow_captured(stream, self.device.capturing)
            assert not self.last_captured & ~self.device.streams[stream].captured, "two calls of a capture at once"
            self.last_captured = self.device.launch(self.device.streams[stream], [])
        else:
            self.order.follow(stream)
            self._launched_after_the_last(stream)

    def replay(self, stream):
        self.order.follow(stream)
        self._launched_after_the_last(stream)

    def _launched_after_the_last(self, stream):
        assert not self.last & ~self.device.streams[stream].eager, "two calls at once"
        self.last = self.device.launch(self.device.streams[stream], [])

    def capture(self, stream, others):
        self.order.before_capture(INDEX)
        self.device.begin_capture(stream)
        self.last_captured = 0
        for other in others:  # as a program forks: the stream waits for one that is captured
            self.device.wait(self.device.streams[other], self.device.streams[stream].past, self.device.capturing)


STEP = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 3)),
    st.tuples(st.just("replay"), st.integers(0, 3)),
    st.tuples(st.just("capture"), st.integers(1, 3)),
    st.tuples(st.just("end"), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=25))
@example([("call", 1), ("capture", 1), ("call", 0)])  # which random ones do not always come to
@example([("capture", 1), ("call", 1), ("call", 2)])
def test_calls_never_run_at_once_s1(steps):
    calls = Calls()
    for kind, stream in steps:
        if kind == "capture" and not calls.device.capturing:
            calls.capture(stream, [other for other in (1, 2, 3) if other != stream])
        elif kind == "end" and calls.device.capturing:
            calls.device.end_capture()
        elif kind == "call":
            calls.call(stream)
        elif kind == "replay" and not calls.device.streams[stream].capture:
            calls.replay(stream)
    assert calls.device.faults == []


def test_that_test_bites(monkeypatch):
    for name in ("follow", "follow_captured", "before_capture"):
        with monkeypatch.context() as patch:
            patch.setattr(Order, name, lambda *_: False)
            with pytest.raises(AssertionError):
                test_calls_never_run_at_once_s1()
