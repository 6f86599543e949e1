"""A soak of low_latency(): millions of random calls, all verified, replayed and eager, by several groups at once.

    torchrun --nproc-per-node 2 benchmarks/soak.py --out FILE --seconds 120

It goes on until FILE has counted enough calls or the time is over; started again, it goes on where it was, with
another seed. ``--programs 24`` gives a kernel so few programs that each has several chunks, as of larger tensors. Each
of several groups has a stream of its own, so that their kernels run at once. A replayed graph has some thousand calls,
of random sizes up to 1 MiB, types and collectives, by both kernels of all_reduce; on each rank other delays between
them. Every few seconds other graphs are captured, and a rank is slow by a second. ``--large`` has the default limits
and calls of up to 32 MiB, of which the ring takes the largest; two groups fit on a device then. With ``--stop`` one
rank stops in the end, and all others must have an error in time.

Calls are in chains: each works on what the one before has made, and a sum over a power of two of ranks doubles all
numbers exactly. So every call sends something else than any other that used its staging, whatever goes wrong stays
wrong, and one look at the end of a chain verifies all of its calls. What was found wrong is counted on the device.
"""

import argparse
import contextlib
import json
import os
import random
import time
from datetime import timedelta

import torch
import torch.distributed as stock
from measured import begin, setting, write

import safecomm
from safecomm.peers import room
from safecomm.peers.limits import defaults

# What torch 2.13 calls them, because their older names warn there.
GATHER = getattr(safecomm, "all_gather_single", None) or safecomm.all_gather_into_tensor
SCATTER = getattr(safecomm, "reduce_scatter_single", None) or safecomm.reduce_scatter_tensor
GROUPS = 4
SMALL = safecomm.LowLatencyLimits(
    one_shot=256 << 10, two_shot=1 << 20, scatter=256 << 10, gather=256 << 10, exact=16 << 10, exchange=64 << 10
)
"""So that both kernels run, and the programs of all groups fit on the device at once."""
LARGEST = {"reduce": 32 << 20, "parts": 16 << 20}
"""Bytes of the largest calls of the ring, where the limits let it run."""
DOUBLINGS = {torch.float32: 100, torch.bfloat16: 100, torch.float16: 22}
"""How often numbers of a type may double."""
CHAINS = 12
"""Chains in a graph, whose calls alternate."""
TIMEOUT = timedelta(seconds=30)
STOPPED = timedelta(seconds=5)
"""How long the ranks wait for one that has stopped."""
LOOK = 0.5
"""Seconds between two looks whether all is well."""
AGAIN = 4.0
"""Seconds between two captures."""


class Chain:
    """Tensors that calls of one kind go through, and what they are to hold in the end."""

    def __init__(self, dice, device, group, wrong, limits):
        self.group, self.wrong = group, wrong
        world, rank = group.size(), group.rank()
        dtype = dice.choice(tuple(DOUBLINGS))
        self.kind = dice.choice(("reduce", "reduce", "reduce", "parts", "exchange"))
        most = {"reduce": limits.two_shot, "parts": limits.gather, "exchange": limits.exchange}[self.kind]
        if limits.ring:
            most = LARGEST.get(self.kind, most)
        count = max(1, int(most / dtype.itemsize / 2 ** dice.uniform(0, most.bit_length() - 3)))
        self.calls = DOUBLINGS[dtype] // (world.bit_length() - 1)
        generator = torch.Generator(device).manual_seed(dice.getrandbits(40))
        if self.kind == "exchange":  # what is exchanged twice is where it was
            self.calls = 10
            width = dice.choice((torch.uint8, torch.int32, torch.int64))
            count = max(1, int(most / width.itemsize / 2 ** dice.uniform(0, 14))) * world
            bits = torch.randint(0, 1 << 30, (world, count), generator=generator, device=device)[rank].to(width)
            self.first, self.last = bits, bits + self.calls
            self.tensor, self.whole = torch.empty_like(self.first), torch.empty_like(self.first)
            return
        given = torch.randint(0, 16, (world, count), generator=generator, device=device)
        given += torch.arange(world, device=device)[:, None]
        # Small numbers in place of 1, 2, 3: as many doublings as the type has room for.
        smallest = 2.0 ** (-14 if dtype is torch.float16 else -60)
        mine = given.sum(0) if self.kind == "reduce" else given[rank] * world
        self.first = (given[rank] * smallest).to(dtype)
        self.last = (mine * smallest * 2.0 ** ((self.calls - 1) * (world.bit_length() - 1))).to(dtype)
        offset = dice.choice((0, 0, 0, 1))  # at an odd address
        self.tensor = torch.empty(count + offset, dtype=dtype, device=device)[offset:]
        self.whole = torch.empty(world * count, dtype=dtype, device=device)

    def steps(self):
        """Yield each call of the chain, and yield what verifies it."""
        yield lambda: self.tensor.copy_(self.first)
        for _ in range(self.calls):
            if self.kind == "reduce":
                yield lambda: safecomm.all_reduce(self.tensor, group=self.group)
            elif self.kind == "exchange":
                yield lambda: safecomm.all_to_all_single(self.whole, self.tensor, group=self.group)
                yield lambda: torch.add(self.whole, 1, out=self.tensor)
            else:
                yield lambda: GATHER(self.whole, self.tensor, group=self.group)
                yield lambda: SCATTER(self.tensor, self.whole, group=self.group)
        yield lambda: self.wrong.add_((self.tensor != self.last).sum())

    @property
    def number(self):
        """How many calls it makes."""
        return 2 * self.calls if self.kind == "parts" else self.calls


def delay(own, most):
    """Keep this rank's current stream busy for some cycles, now and then."""
    if own.random() < most and torch.cuda.is_available():
        torch.cuda._sleep(int(2 ** own.uniform(6, 17)))


def run_alternating(chains, dice, own):
    """Make the calls of ``chains``, the next of them always at random."""
    left = [chain.steps() for chain in chains]
    while left:
        chosen = dice.randrange(len(left))
        step = next(left[chosen], None)
        if step is None:
            del left[chosen]
        else:
            step()
            delay(own, 0.005)


class Groups:
    """The groups, the stream of each, and what each has found wrong."""

    def __init__(self, device, number, limits, halves):
        self.device, self.limits = device, limits
        world, rank = stock.get_world_size(), stock.get_rank()
        half = world // 2
        both = [stock.new_group(list(range(half))), stock.new_group(list(range(half, world)))] if halves else []
        self.groups = [stock.new_group(list(range(world))) for _ in range(number)] + both[rank >= half :][:1]
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream() if cuda else None for _ in self.groups]
        self.wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in self.groups]
        self.on = [safecomm.low_latency(group, limits=limits, timeout=TIMEOUT).enable() for group in self.groups]
        for on in self.on:
            if on.reason:
                raise SystemExit(on.reason)

    def stream(self, number):
        """Make the stream of a group the current one."""
        return contextlib.nullcontext() if self.streams[number] is None else torch.cuda.stream(self.streams[number])

    def chain(self, dice, number):
        """Return a chain of calls of a group."""
        return Chain(dice, self.device, self.groups[number], self.wrong[number], self.limits)

    def captured(self, dice, own):
        """Return a graph for each group, and how many calls of ours they have together."""
        replays, calls = [], 0
        for number in range(len(self.groups)):
            chains = [self.chain(dice, number) for _ in range(CHAINS)]
            calls += sum(chain.number for chain in chains)
            if self.streams[number] is None:
                replays.append(lambda chains=chains: run_alternating(chains, dice, own))
                continue
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with safecomm.graph(graph, stream=self.streams[number]):
                run_alternating(chains, dice, own)
            replays.append(Replay(graph, chains))
        return replays, calls

    def be_slow(self):
        """Keep all streams busy for a second."""
        for number in range(len(self.groups)) if self.device.type == "cuda" else ():
            with self.stream(number):
                torch.cuda._sleep(1_500_000_000)

    def settle(self):
        """Wait for all; raise what is the matter; return the elements that were wrong."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for on in self.on:
            on.check()
        return sum(int(wrong.item()) for wrong in self.wrong)


class Replay:
    """A graph, and the tensors that it works on."""

    def __init__(self, graph, chains):
        self.graph, self.chains = graph, chains

    def __call__(self):
        self.graph.replay()


def agreed(value, device):
    """Return the largest of the ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    stock.all_reduce(tensor, op=stock.ReduceOp.MAX)
    return tensor.item()


def replay(groups, dice, own, wanted, deadline):
    """Replay graphs until ``wanted`` calls are made, or it is late; yield after each while how many they were."""
    while True:
        replays, calls = groups.captured(dice, own)
        if dice.randrange(stock.get_world_size()) == stock.get_rank():
            groups.be_slow()
        again, done = time.monotonic() + AGAIN, 0
        while True:
            look, made, early = time.monotonic() + LOOK, 0, 1.0
            while early:
                for _ in range(1 if groups.device.type == "cpu" else 16):
                    # The same on all ranks: streams may share one of the device's queues, as with NCCL's groups.
                    order = list(range(len(replays)))
                    dice.shuffle(order)
                    for number in order:
                        with groups.stream(number):
                            delay(own, 0.1)
                            replays[number]()
                    made += calls
                early = agreed(float(time.monotonic() < look), groups.device)
            done += made
            yield made
            if agreed(float(done >= wanted or time.monotonic() > deadline), groups.device):
                return
            if agreed(float(time.monotonic() > again), groups.device):
                break
        wanted -= done
        groups.settle()
        for one in replays:
            if isinstance(one, Replay):
                one.graph.reset()
        del replays


def call_eagerly(groups, dice, own, wanted, deadline):
    """Make ``wanted`` eager calls, or those until it is late; yield now and then how many they were."""
    done = 0
    while done < wanted and not agreed(float(time.monotonic() > deadline), groups.device):
        made = 0
        chains = []
        for number in range(len(groups.groups)):
            chains += [(number, groups.chain(dice, number)) for _ in range(3)]
        # What is made on one stream and used on another.
        if groups.device.type == "cuda":
            torch.cuda.synchronize()
        for _ in range(20):
            left = [(number, chain.steps()) for number, chain in chains]
            made += sum(chain.number for _, chain in chains)
            while left:
                chosen = dice.randrange(len(left))
                number, steps = left[chosen]
                with groups.stream(number):
                    step = next(steps, None)
                    if step is None:
                        del left[chosen]
                    else:
                        step()
                        delay(own, 0.002)
            if groups.device.type == "cpu":
                break
        done += made
        yield made


def stop(groups, dice, own):
    """Stop one rank: the others replay without it; return the most seconds that one of their groups took to say so."""
    replays, _ = groups.captured(dice, own)
    for on in groups.on:
        on._engine.set_patience(STOPPED)
    groups.settle()
    stock.barrier()
    most = 0.0
    for number, one in enumerate(replays if stock.get_rank() else ()):
        start = time.monotonic()
        try:
            with groups.stream(number):
                one()
            if groups.device.type == "cuda":
                torch.cuda.synchronize()
            groups.on[number].check()
            raise SystemExit("calls of a group, one of whose ranks has stopped, raised nothing")
        except safecomm.PeerTimeoutError:
            most = max(most, time.monotonic() - start)
    return agreed(most, groups.device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--replayed", type=float, default=1e8)
    parser.add_argument("--eager", type=float, default=1e6)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--programs", type=int, default=room.PROGRAMS)
    parser.add_argument("--halves", action="store_true", help="besides, a group of each half of the ranks")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--stop", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    device = begin()
    world = stock.get_world_size()
    if world & (world - 1):
        raise SystemExit("a sum over a power of two of ranks is exact, and so it wants such a number of them")
    results = setting("torchrun benchmarks/soak.py") | {"replayed": 0, "eager": 0, "wrong": 0, "stuck": 0, "runs": []}
    if os.path.exists(arguments.out):
        with open(arguments.out) as file:
            results |= json.load(file)
    found = [results]
    stock.broadcast_object_list(found, src=0)  # the ranks may see different files
    results = found[0]
    seed = len(results["runs"])
    room.PROGRAMS = arguments.programs
    run = {"seed": seed, "groups": arguments.groups, "programs": room.PROGRAMS, "large": arguments.large}
    run |= {"halves": True} if arguments.halves else {}
    run |= {"replayed": 0, "eager": 0, "wrong": 0, "seconds": 0.0}
    results["runs"].append(run)
    dice, own = random.Random(seed), random.Random(1000 * seed + stock.get_rank() + 1)
    before = dict(results)

    limits = defaults(world) if arguments.large else SMALL
    groups = Groups(device, arguments.groups, limits, arguments.halves)
    deadline = start + arguments.seconds

    def count(what, made):
        run[what] += made
        run["wrong"] = int(agreed(float(groups.settle()), device))
        run["seconds"] = round(time.monotonic() - start, 1)
        for name in ("replayed", "eager", "wrong"):
            results[name] = before[name] + run[name]
        write(arguments.out, results)
        if stock.get_rank() == 0:
            print(run, flush=True)

    try:
        # A fifth of the time for the eager calls, so that a run has some of both, or all of it.
        share = 0.2 if arguments.replayed > before["replayed"] else 1.0
        left = arguments.eager - before["eager"]
        if left > 0:
            for made in call_eagerly(groups, dice, own, left, start + arguments.seconds * share):
                count("eager", made)
        left = arguments.replayed - before["replayed"]
        if left > 0:
            for made in replay(groups, dice, own, left, deadline):
                count("replayed", made)
        if arguments.stop:
            run["seconds until an error"] = {
                "allowed": STOPPED.total_seconds(),
                "took": round(stop(groups, dice, own), 1),
            }
            write(arguments.out, results)
            if stock.get_rank() == 0:
                print(run, flush=True)
            os._exit(results["wrong"] > 0)  # the ranks have lost each other
    except safecomm.PeerTimeoutError as error:
        results["stuck"] += 1
        write(arguments.out, results)
        print(f"rank {stock.get_rank()}: {error}", flush=True)
        os._exit(1)  # the ranks have lost each other
    if stock.get_rank() == 0:
        print({name: results[name] for name in ("replayed", "eager", "wrong", "stuck")}, flush=True)
    for on in groups.on:
        on.disable()
    safecomm.destroy_process_group()
    if results["wrong"]:
        raise SystemExit("some elements were wrong")


if __name__ == "__main__":
    main()
