"""The protocol of the ring as a model: programs, iterations, phases, flags, and stores that arrive when they like.

As in ``protocol.py``, whose ``walk`` and ``explore`` go through it: a store arrives at any time after it was issued, in
any order. What has been released arrives first: a release waits until all that its program has stored before is there.
Ranks run as many programs at once as their device has room for, in the order of their numbers with a ticket, and in any
order without.
"""

from __future__ import annotations

from protocol import Wrong

TO_REDUCE, RESULT = "to reduce", "result"


def both_ways(rank, ranks, program, turn, rounds, *, phases=2, fence=True, early=False):
    """Return the steps of an all_reduce of ``rounds`` iterations, the first of which is number ``turn`` of all.

    ``early``: an iteration sends before it has copied the results of an earlier one.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    steps = []

    def stores(kind, iteration, what):
        number = turn + iteration
        place = (program, number % phases, kind)
        return [(peer, *place, what, rank, (number, rank)) for peer in peers]

    def receive(kind, iteration):
        number = turn + iteration
        place = (program, number % phases, kind)
        steps.append(("wait", [((*place, "flag", peer), (number, peer)) for peer in peers]))
        steps.append(("read", [((*place, "data", peer), (number, peer)) for peer in peers]))

    def send(turned):
        if turned < rounds:
            steps.append(("store", stores(TO_REDUCE, turned, "data")))

    for turned in range(rounds + 2):
        reduced, copied = turned - 1, turned - 2
        if early:
            send(turned)
        if copied >= 0:
            receive(RESULT, copied)
        if not early:
            send(turned)
        if 0 <= reduced < rounds:
            receive(TO_REDUCE, reduced)
            steps.append(("store", stores(RESULT, reduced, "data")))
        flags = stores(TO_REDUCE, turned, "flag") if turned < rounds else []
        flags += stores(RESULT, reduced, "flag") if 0 <= reduced < rounds else []
        if flags:
            steps += [("release",)] * fence + [("store", flags)]
    return steps


def one_way(rank, ranks, program, turn, rounds, *, phases=2, fence=True, early=False, kind=RESULT):
    """Return the steps of a gather, or a scatter, whose pieces go to the places of one ``kind``."""
    peers = [peer for peer in range(ranks) if peer != rank]
    steps = []

    def here(iteration, what):
        number = turn + iteration
        return [((program, number % phases, kind, what, peer), (number, peer)) for peer in peers]

    def stores(iteration, what):
        number = turn + iteration
        return [(peer, program, number % phases, kind, what, rank, (number, rank)) for peer in peers]

    def send(turned):
        if turned < rounds:
            steps.append(("store", stores(turned, "data")))
            steps.extend([("release",)] * fence + [("store", stores(turned, "flag"))])

    for turned in range(rounds + 1):
        if early:
            send(turned)
        if turned > 0:
            steps.append(("wait", here(turned - 1, "flag")))
            steps.append(("read", here(turned - 1, "data")))
        if not early:
            send(turned)
    return steps


def calls(make, rank, ranks, program, lengths, **how):
    """Return the steps of several calls, one after the other, of so many iterations each."""
    steps = []
    turn = 0
    for number, rounds in enumerate(lengths):
        kind = make[number % len(make)] if isinstance(make, list) else make
        steps += kind(rank, ranks, program, turn, rounds, **how)
        turn += rounds
    return steps


class State:
    """Where each program of each rank is, what its staging holds, and what is on its way.

    ``programs``: of each rank, the steps of its programs. ``room``: how many of them run at once.
    """

    def __init__(self, programs, *, room=1, ticket=True):
        self.of_rank = programs
        self.programs = [steps for of_rank in programs for steps in of_rank]
        self.owner = [rank for rank, of_rank in enumerate(programs) for _ in of_rank]
        self.room, self.ticket = room, ticket
        self.at = [-1] * len(self.programs)  # -1: not begun
        self.staging = {}  # by owner, program, phase, kind, what and sender
        self.flying = ()  # by whom it was issued, and the store

    def key(self):
        return tuple(self.at), frozenset(self.staging.items()), frozenset(self.flying)

    def copy(self):
        other = object.__new__(State)
        other.__dict__.update(self.__dict__)
        other.at, other.staging = list(self.at), dict(self.staging)
        return other

    def moves(self):
        """Return what can happen next.

        What a program stores it stores at once: nobody sees that before it arrives, which it may do at any time after.
        """
        found = [("arrive", number) for number in range(len(self.flying))]
        running = [0] * len(self.of_rank)
        for thread, at in enumerate(self.at):
            running[self.owner[thread]] += 0 <= at < len(self.programs[thread])
        begun = set()
        for thread, steps in enumerate(self.programs):
            at, rank = self.at[thread], self.owner[thread]
            if at == len(steps):
                continue
            if at < 0:
                if running[rank] < self.room and not (self.ticket and rank in begun):
                    found.append(("step", thread))
                begun.add(rank)
                continue
            step = steps[at]
            if step[0] == "wait" and any(self.staging.get((rank, *place)) != value for place, value in step[1]):
                continue
            if step[0] == "release" and any(issuer == thread for issuer, _ in self.flying):
                continue
            if step[0] == "store":
                return [("step", thread)]
            found.append(("step", thread))
        return found

    def make(self, move):
        """Let a move happen. Raises Wrong if a program reads what it should not."""
        kind, number = move
        if kind == "arrive":
            _, (*place, value) = self.flying[number]
            self.flying = self.flying[:number] + self.flying[number + 1 :]
            self.staging[tuple(place)] = value
            return
        self.at[number] += 1
        if self.at[number] == 0:
            return
        step = self.programs[number][self.at[number] - 1]
        if step[0] == "store":
            self.flying += tuple((number, store) for store in step[1])
        elif step[0] == "read":
            for place, value in step[1]:
                found = self.staging.get((self.owner[number], *place))
                if found != value:
                    raise Wrong(f"rank {self.owner[number]} reads {found} where it waits for {value}")

    def check_end(self):
        """Raise Wrong if nothing can happen any more although a program is not through."""
        for thread, steps in enumerate(self.programs):
            if self.at[thread] < len(steps):
                raise Wrong(f"rank {self.owner[thread]} waits for ever in {steps[self.at[thread]]}")


def start(make, ranks, lengths, *, programs=1, room=1, ticket=True, **how):
    """Return the state before the first call."""
    return State(
        [[calls(make, rank, ranks, program, lengths, **how) for program in range(programs)] for rank in range(ranks)],
        room=room,
        ticket=ticket,
    )
