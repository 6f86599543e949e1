"""The protocol of the low-latency kernels as a model: ranks, calls, phases, and stores that arrive when they like.

Few channels of one word stand for all. A call may be one of the one-shot kernel, through the first or through two, or
one of the two-shot kernel, of one chunk or of two, whose results go through every second channel. What of a chunk of a
large piece is two channels here is two chunks of small pieces in another call, each of a program of its own. All
channels of a call have the same phase, which all programs count, also those that a call has not. A store, to a peer or
to clear, is issued and arrives at any time after that. The end of a kernel waits for nothing: that a clear arrives
before a peer's later store to the same place is what the ranks' *signals* are for. A signal is stored in a rank's own
staging, where peers look; it arrives there after all that the rank has cleared in earlier calls, and the end of a call
waits for the signals of all peers in the call before. (Where CUDA is ``kind``, the end of a kernel waits for its
clears, as GPUs do although no rule of PTX says so; then nothing is lost without signals either.)

A call clears what it has read. An ``exact`` call clears nothing: it waits for what has its number, in one of
``sections``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

FREE = None
PHASES = 3
SIGNAL = "signal"
ONE, BOTH, FINE = "one-shot", "one-shot of a large piece", "one-shot of two small pieces"
LATER = "one-shot of two small pieces, one after the other"
TWO, CHUNKS = "two-shot", "two-shot of two chunks"
KINDS = {
    ONE: "send 0, poll 0",
    BOTH: "send 0, send 1, poll 0, poll 1",
    FINE: "send 0, send 1, poll 0, poll 1",
    LATER: "send 1, poll 1, send 0, poll 0",
    TWO: "send 0, poll 0, send 1, poll 1",
    CHUNKS: "send 0, send 2, poll 0, send 1, poll 2, send 3, poll 1, poll 3",
}
"""What the programs do in a call of each kind, through which channels. A poll clears what it has found."""
SECOND = {FINE: {1}, LATER: {1}}
"""Through which channels a second program goes; all others are the first one's."""


class Wrong(AssertionError):
    """A rank has read what another call sent, or all wait for ever."""


def exact(rank: int, ranks: int, calls: int, *, sections: int) -> list[tuple]:
    """Return what a rank does in calls that send numbered packets."""
    peers = [peer for peer in range(ranks) if peer != rank]
    steps = []
    for call in range(calls):
        section = call % sections
        steps.append(("store", [(peer, section, 0, rank, (call, rank, 0)) for peer in peers]))
        steps += [("expect", section, 0, peer, (call, peer, 0)) for peer in peers]
        steps.append(("end",))
    return steps


def program(
    rank: int, ranks: int, kinds: Sequence[str], *, phases: int, signals: bool, lag: int, seen: int | None,
    counted: bool,
) -> list[tuple]:  # fmt: skip
    """Return what a rank does in calls of ``kinds``, a list of steps.

    ``lag``: of how many calls before are the signals that it waits for. ``seen``: of how many peers. ``counted``:
    whether a call is counted for a program that it has not.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    turns = [0, 0]  # of each program
    steps = []
    for call, kind in enumerate(kinds):
        if signals:
            steps.append(("store", [(rank, SIGNAL, 0, rank, call)]))
        second = SECOND.get(kind, set())
        for act in KINDS[kind].split(", "):
            channel = int(act[-1])
            phase = turns[channel in second] % phases
            if act.startswith("send"):
                steps.append(("store", [(peer, phase, channel, rank, (call, rank, channel)) for peer in peers]))
            else:
                steps += [("poll", phase, channel, peer, (call, peer, channel)) for peer in peers]
                steps.append(("store", [(rank, phase, channel, peer, FREE) for peer in peers]))
        turns[0] += 1
        turns[1] += counted or bool(second)
        if signals and call >= lag:
            steps += [("await", peer, SIGNAL, 0, peer, call - lag) for peer in peers[:seen]]
        steps.append(("end",))
    return steps


class State:
    """Where each rank is, what each staging holds, and what is on its way."""

    def __init__(self, programs: list[list[tuple]], *, kind: bool = False) -> None:
        self.programs = programs
        self.kind = kind
        self.at = [0] * len(programs)
        self.staging: dict[tuple, object] = {}  # by owner, phase, channel and slot; FREE where nothing is
        self.flying: tuple[tuple[int, tuple], ...] = ()  # who has issued a store, and the store

    def key(self) -> tuple:
        # Of what is on its way, only the order of one rank's clears and signals matters.
        ordered = tuple(one for one in self.flying if one[1][-1] is FREE or one[1][1] == SIGNAL)
        by_rank = tuple(tuple(one for one in ordered if one[0] == rank) for rank in range(len(self.at)))
        return tuple(self.at), frozenset(self.staging.items()), frozenset(self.flying), by_rank

    def copy(self) -> State:
        other = State(self.programs, kind=self.kind)
        other.at = list(self.at)
        other.staging = dict(self.staging)
        other.flying = self.flying
        return other

    def moves(self) -> list[tuple[str, int]]:
        """Return what can happen next; nothing more once all ranks are through.

        Of what only the rank itself sees, and what stays possible whatever happens first, just one: it may as well
        happen at once. What it stores nobody sees before that arrives.
        """
        found = []
        for rank, steps in enumerate(self.programs):
            if self.at[rank] == len(steps):
                continue
            step = steps[self.at[rank]]
            if step[0] == "store":
                return [("step", rank)]
            if step[0] == "poll":
                if (
                    (rank, *step[1:4]) in self.staging
                    # A rank sees its own clears, wherever they are.
                    and not any(store == (rank, *step[1:4], FREE) for _, store in self.flying)
                ):
                    found.append(("step", rank))
            elif step[0] == "expect":
                if self.staging.get((rank, *step[1:4])) == step[4]:
                    found.append(("step", rank))
            elif step[0] == "await":
                if self.staging.get(step[1:5], -1) >= step[5]:
                    return [("step", rank)]
            elif not self.kind or not any(
                issuer == rank and store[0] == rank and store[-1] is FREE for issuer, store in self.flying
            ):
                return [("step", rank)]
        if all(at == len(steps) for at, steps in zip(self.at, self.programs, strict=True)):
            return []
        clearing: set[int] = set()
        for number, (issuer, store) in enumerate(self.flying):
            if store[-1] is FREE:
                clearing.add(issuer)
            if store[1] != SIGNAL or issuer not in clearing:
                found.append(("arrive", number))
        return found

    def make(self, move: tuple[str, int]) -> None:
        """Let a move happen. Raises Wrong if a rank reads what it should not."""
        kind, number = move
        if kind == "arrive":
            _, (*place, value) = self.flying[number]
            self.flying = self.flying[:number] + self.flying[number + 1 :]
            if value is FREE:
                self.staging.pop(tuple(place), None)
            elif place[1] != SIGNAL or self.staging.get(tuple(place), -1) < value:
                self.staging[tuple(place)] = value
            return
        step = self.programs[number][self.at[number]]
        self.at[number] += 1
        if step[0] == "store":
            self.flying += tuple((number, store) for store in step[1])
        elif step[0] == "poll":
            found = self.staging[(number, *step[1:4])]
            if found != step[4]:
                raise Wrong(f"rank {number} reads {found} where it waits for {step[4]}")

    def check_end(self) -> None:
        """Raise Wrong if nothing can happen any more although a rank is not through."""
        for rank, steps in enumerate(self.programs):
            if self.at[rank] < len(steps):
                raise Wrong(f"rank {rank} waits for ever in {steps[self.at[rank]]}")


def start(
    ranks: int, kinds: Sequence[str], *, phases: int = PHASES, signals: bool = True, lag: int = 1, kind: bool = False,
    seen: int | None = None, counted: bool = True,
) -> State:  # fmt: skip
    """Return the state before the first of calls of ``kinds``."""
    programs = [
        program(rank, ranks, kinds, phases=phases, signals=signals, lag=lag, seen=seen, counted=counted)
        for rank in range(ranks)
    ]
    return State(programs, kind=kind)


def start_exact(ranks: int, calls: int, *, sections: int = 2) -> State:
    """Return the state before the first of calls that send numbered packets."""
    return State([exact(rank, ranks, calls, sections=sections) for rank in range(ranks)])


def walk(state: State, dice: random.Random) -> int:
    """Let things happen at random until nothing can any more; return how many did."""
    weights = [dice.choice((1, 1, 8)) for _ in state.programs]  # some ranks are faster than others
    stores, clears = dice.choice((1, 1, 8)), dice.choice((1, 1, 0.02))  # and some clears late
    happened = 0
    while moves := state.moves():
        likely = [
            weights[number] if kind == "step" else clears if state.flying[number][1][-1] is FREE else stores
            for kind, number in moves
        ]
        state.make(dice.choices(moves, likely)[0])
        happened += 1
    state.check_end()
    return happened


def explore(state: State, limit: int) -> int:
    """Go through everything that can happen; return how many states there are, which are to be below ``limit``."""
    seen = {state.key()}
    waiting = deque([state])
    while waiting:
        here = waiting.popleft()
        moves = here.moves()
        if not moves:
            here.check_end()
        for move in moves:
            there = here.copy()
            there.make(move)
            key = there.key()
            if key not in seen:
                seen.add(key)
                assert len(seen) < limit, "too many states to go through"
                waiting.append(there)
    return len(seen)
