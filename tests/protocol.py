"""The protocol of the low-latency kernels as a model: ranks, calls, phases, and stores that arrive when they like.

One chunk of one element stands for all, because chunks share nothing. A store, to a peer or to clear, is issued and
arrives at any time after that; the end of a kernel waits for what it has cleared, as CUDA does, and for nothing else.
``ahead`` says which phase a call clears, counted from the one that it uses: 2 in ``kernels.py``.
"""

from __future__ import annotations

import random
from collections import deque

FREE = None
PHASES = 3


class Wrong(AssertionError):
    """A rank has read what another call sent, or all wait for ever."""


def program(rank: int, ranks: int, calls: int, *, two_shot: bool, ahead: int) -> list[tuple]:
    """Return what a rank does, a list of steps."""
    peers = [peer for peer in range(ranks) if peer != rank]
    steps = []
    for call in range(calls):
        phase = call % PHASES
        steps.append(("store", [(peer, phase, 0, rank, (call, rank, 0)) for peer in peers]))
        parts = range(2 if two_shot else 1)
        freed = (phase + ahead) % PHASES
        steps.append(("store", [(rank, freed, part, peer, FREE) for part in parts for peer in peers]))
        for part in parts:
            steps += [("poll", phase, part, peer, (call, peer, part)) for peer in peers]
            if two_shot and part == 0:
                steps.append(("store", [(peer, phase, 1, rank, (call, rank, 1)) for peer in peers]))
        steps.append(("end",))
    return steps


class State:
    """Where each rank is, what each staging holds, and what is on its way."""

    def __init__(self, programs: list[list[tuple]]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.staging: dict[tuple, object] = {}  # by owner, phase, part and slot; FREE where nothing is
        self.flying: tuple[tuple[int, tuple], ...] = ()  # who has issued a store, and the store

    def key(self) -> tuple:
        return tuple(self.at), frozenset(self.staging.items()), frozenset(self.flying)

    def copy(self) -> State:
        other = State(self.programs)
        other.at = list(self.at)
        other.staging = dict(self.staging)
        other.flying = self.flying
        return other

    def moves(self) -> list[tuple[str, int]]:
        """Return what can happen next."""
        found = [("arrive", number) for number in range(len(self.flying))]
        for rank, steps in enumerate(self.programs):
            if self.at[rank] == len(steps):
                continue
            step = steps[self.at[rank]]
            if step[0] == "poll" and (rank, *step[1:4]) not in self.staging:
                continue
            if step[0] == "end" and any(
                issuer == rank and store[0] == rank and store[-1] is FREE for issuer, store in self.flying
            ):
                continue
            found.append(("step", rank))
        return found

    def make(self, move: tuple[str, int]) -> None:
        """Let a move happen. Raises Wrong if a rank reads what it should not."""
        kind, number = move
        if kind == "arrive":
            _, (*place, value) = self.flying[number]
            self.flying = self.flying[:number] + self.flying[number + 1 :]
            if value is FREE:
                self.staging.pop(tuple(place), None)
            else:
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


def start(ranks: int, calls: int, *, two_shot: bool = False, ahead: int = 2) -> State:
    """Return the state before the first call."""
    return State([program(rank, ranks, calls, two_shot=two_shot, ahead=ahead) for rank in range(ranks)])


def walk(state: State, dice: random.Random) -> None:
    """Let things happen at random until nothing can any more."""
    weights = [dice.choice((1, 1, 8)) for _ in range(len(state.programs) + 1)]  # some ranks are faster than others
    while moves := state.moves():
        chosen = dice.choices(moves, [weights[-1] if kind == "arrive" else weights[rank] for kind, rank in moves])
        state.make(chosen[0])
    state.check_end()


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
