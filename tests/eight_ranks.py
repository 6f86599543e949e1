"""The protocols of low_latency() with eight ranks, gone through at random: python tests/eight_ranks.py --out FILE

The tests do so with two to four, and with eight for the ring alone. Here each protocol makes a million moves, and each
fault of those tests has to be found with eight ranks too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from datetime import date
from pathlib import Path

import protocol
import ring_protocol
import test_low_latency_protocol
import test_ring_protocol

RANKS = 8


def small_calls(dice: random.Random) -> object:
    kinds = [dice.choice(list(protocol.KINDS)) for _ in range(dice.randint(1, 6))]
    return protocol.start(RANKS, kinds)


def numbered(dice: random.Random) -> object:
    return protocol.start_exact(RANKS, dice.randint(1, 8))


def ring(dice: random.Random) -> object:
    lengths = [dice.randint(0, 7) for _ in range(dice.randint(1, 2))]
    return ring_protocol.start(dice.choice(test_ring_protocol.SHAPES), RANKS, lengths, programs=dice.randint(1, 2))


PROTOCOLS = {"small calls": small_calls, "numbered packets": numbered, "ring": ring}


def gone_through(start, moves: int) -> dict[str, int]:
    """Go through a protocol at random, until so many things have happened; raise Wrong at what is wrong."""
    happened = seed = 0
    while happened < moves:
        dice = random.Random(seed)
        happened, seed = happened + protocol.walk(start(dice), dice), seed + 1
    return {"runs": seed, "moves": happened, "wrong": 0}


def faults() -> dict[str, bool]:
    """Return whether each fault is found."""
    small = test_low_latency_protocol
    found = {
        f"small calls: {name}": small.found_wrong(RANKS, [protocol.ONE, protocol.TWO] * 3, **how)
        for name, how in small.FAULTS.items()
    }
    found["small calls: the signals of all peers but one"] = small.found_wrong(
        RANKS, [protocol.ONE] * 8, seen=RANKS - 2
    )
    for name, make in test_ring_protocol.FAULTS.items():
        found[f"ring: {name}"] = test_ring_protocol.found_wrong(RANKS, make)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moves", type=int, default=1_000_000)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    results = {"command": "python tests/eight_ranks.py", "ranks": RANKS, "date": date.today().isoformat()}
    for name, start in PROTOCOLS.items():
        results[name] = gone_through(start, arguments.moves)
        print(name, results[name], flush=True)
    results["faults that are found"] = found = faults()
    print(found)
    Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
    return not all(found.values())


if __name__ == "__main__":
    sys.exit(main())
