"""Programs of blocks by chance: each gives what its calls give one by one, or a call is refused with nothing done (S8).

    python tests/block_programs.py --seed 1 --programs 500 --world 3      programs of a seed; a wrong one ends it
    python tests/block_programs.py --seed 1 --only 17 --world 3           one program, which is printed

A program opens ``bucketed()`` blocks and coalescing regions, safecomm's and torch's, around calls of every kind:
collectives, ``functional`` with and without a backward, ``torch.ops.safecomm``, objects, barriers and drains; on the
default group and on one of the first two ranks, with an arena or without, patched or imported. It is made of a seed and
a number, the same on all ranks. The maker keeps which tensors wait for a call that has not run, and makes no call that
touches such a tensor from elsewhere: the promise does not cover that. What a call returns, and all tensors that wait
for nothing, are compared after each step with a run of the same calls one by one: on torch's own functions, in torch's
own regions, without ``bucketed()``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d

import safecomm
from safecomm import functional, operators
from safecomm.collectives import objects, takers
from safecomm.core.ledger import Ledger

SIZE = 12
"""Rows and columns of a tensor: 2, 3 and 4 ranks can share them."""

TENSORS, LARGE = 6, 2
"""Tensors of a program; those with a part for each rank of a group, for each group."""

DEFERRED = ("reduce", "largest", "gather", "scatter")
"""What a block puts off if it is synchronous."""

AT_ONCE = (
    "broadcast", "list", "barrier", "all_gather_object", "broadcast_object_list", "gather_object", "monitored_barrier",
    *(f"{name}, async" for name in DEFERRED),
)  # fmt: skip
"""What runs when it is called, in a block too."""

COMPLETE: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda t, group: functional.all_reduce(t, group=group),
    "all_reduce, async": lambda t, group: functional.all_reduce(t, group=group, async_op=True).wait(),
    "all_gather": lambda t, group: functional.all_gather(t, group=group),
    "all_gather, columns": lambda t, group: functional.all_gather(t, dim=1, group=group),
    "all_gather, columns, async": lambda t, group: functional.all_gather(t, 1, group, async_op=True).wait(),
    "all_gather, strided": lambda t, group: functional.all_gather(t.t(), group=group),
    "reduce_scatter": lambda t, group: functional.reduce_scatter(t, group=group),
    "reduce_scatter, columns": lambda t, group: functional.reduce_scatter(t, dim=1, group=group),
    "all_to_all": lambda t, group: functional.all_to_all(t, group=group),
    "all_to_all, strided": lambda t, group: functional.all_to_all(t.t(), group=group),
    "region: copy": lambda t, group: functional.copy_to_tensor_parallel_region(t, group).clone(),
    "region: reduce": lambda t, group: functional.reduce_from_tensor_parallel_region(t, group),
    "region: gather": lambda t, group: functional.gather_from_tensor_parallel_region(t, group),
    "region: scatter": lambda t, group: functional.scatter_to_tensor_parallel_region(t, group),
    "region: sequence": lambda t, group: functional.gather_from_sequence_parallel_region(t, group),
    "region: to sequence": lambda t, group: functional.reduce_scatter_to_sequence_parallel_region(t, group),
    "backward": lambda t, group: _gradient(t, lambda leaf: functional.all_reduce(leaf, group=group)),
    "backward of copy": lambda t, group: _gradient(
        t, lambda leaf: functional.copy_to_tensor_parallel_region(leaf, group)
    ),
    "operator": lambda t, group: torch.ops.safecomm.all_reduce(t, "sum", _name(group)),
    "operator, max": lambda t, group: torch.ops.safecomm.all_reduce(t, "max", _name(group)),
    "operator, conj": lambda t, group: torch.ops.safecomm.all_reduce_(_complex(t).conj(), "sum", _name(group)),
    "operator, neg": lambda t, group: torch.ops.safecomm.all_reduce_(_complex(t).conj().imag, "sum", _name(group)),
    "operator, in place": lambda t, group: torch.ops.safecomm.all_reduce_(t, "sum", _name(group)),
}
"""What has its result when it returns, and is refused in a region of its group and on a rank outside of it."""

REFUSED: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "operator, zero": lambda t, group: torch.ops.safecomm.all_reduce_(
        torch._efficientzerotensor(t.shape), "sum", _name(group)
    ),
}
"""What is refused anywhere."""

DRAINS = ("drain", "drain, wait", "settle")


@dataclass
class Step:
    """One call, or a block with the steps inside."""

    what: str
    group: str
    tensor: int = 0
    large: int = 0
    inside: list[Step] = field(default_factory=list)
    whose: str = ""
    refused: bool = False
    deferred: list[str] = field(default_factory=list)  # the groups of which buckets have something, after it
    waiting: list[int] = field(default_factory=list)  # the tensors that wait for a call, after it


_SMALL = ("small", "bucket")


class Maker:
    """Makes a program, and keeps which tensors wait for what: ``place -> (block, group)``."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.waiting: dict[tuple[str, int], tuple[str, str]] = {}
        self.buckets: list[str] = []
        self.regions: dict[str, str] = {}  # what each open region collects, "" before the first call
        self.late = {"world", "pair"}  # the groups of which a backward is left

    def steps(self, depth: int = 0) -> Iterator[Step]:
        for _ in range(self.dice.randrange(1, 7)):
            group = self.dice.choice(["world", "world", "pair"])
            what = self.dice.choice(["block", "block", *["deferred"] * 4, "at once", "complete", "complete", "drain"])
            step = self._block(group, depth) if what == "block" else self._call(what, group)
            if step is not None:
                step.deferred = sorted({of for block, of in self.waiting.values() if block == "bucket"})
                step.waiting = sorted(number for kind, number in self.waiting if kind == "small")
                yield step

    def _block(self, group: str, depth: int) -> Step | None:
        if depth == 3 or group in self.regions:
            return None
        if self.dice.random() < 0.5:
            if group in self.buckets:
                return None
            self.buckets.append(group)
            inside = list(self.steps(depth + 1))
            self.buckets.remove(group)
            self._ran("bucket", group)
            return Step("bucketed", group, inside=inside)
        self._ran("bucket", group)  # a region of safecomm's launches it, and torch's is not seen
        whose = "ours" if group in self.buckets else self.dice.choice(["ours", "torch's"])
        self.regions[group] = ""
        inside = list(self.steps(depth + 1))
        del self.regions[group]
        self._ran("region", group)
        return Step("region", group, inside=inside, whose=whose)

    def _ran(self, block: str, group: str) -> None:
        for place in [place for place, by in self.waiting.items() if by == (block, group)]:
            del self.waiting[place]

    def _call(self, kind: str, group: str) -> Step | None:
        tensor, large = self.dice.randrange(TENSORS), self.dice.randrange(LARGE)
        deferred = [(of, place) for (what, place), (block, of) in self.waiting.items() if (what, block) == _SMALL]
        if kind != "deferred" and deferred and self.dice.random() < 0.5:
            group, tensor = self.dice.choice(deferred)  # what reads it has to come after
        if kind == "drain":
            return Step(self.dice.choice(DRAINS), group)
        if kind == "complete" and self.dice.random() < 0.1:
            return Step(self.dice.choice(list(REFUSED)), group, tensor, refused=True)
        names = {"deferred": DEFERRED, "at once": AT_ONCE, "complete": (*COMPLETE, "late backward")}[kind]
        what = self.dice.choice(names)
        touched = [("small", tensor)]
        if what.split(",")[0] in ("gather", "scatter") and kind != "complete":
            touched.append((group, large))
        held = [self.waiting[place] for place in touched if place in self.waiting]
        in_region = group in self.regions
        if what == "late backward":
            if group not in self.late:
                return None
            self.late.discard(group)
        if kind == "complete" and in_region:
            return Step(what, group, tensor, refused=True)
        if any(by != ("bucket", group) for by in held) or (held and in_region):
            return None  # of another block, whose calls nobody may touch
        if in_region:
            if kind == "deferred":
                if self.regions[group] not in ("", what):
                    return None
                self.regions[group] = what
                self.waiting.update(dict.fromkeys(touched, ("region", group)))
            elif what.endswith("async"):
                return None
        elif group in self.buckets and kind == "deferred":
            self.waiting.update(dict.fromkeys(touched, ("bucket", group)))
        else:
            self._ran("bucket", group)
        return Step(what, group, tensor, large)


def make(seed: int, number: int) -> tuple[list[Step], bool, bool]:
    """Return a program, whether it has an arena, and whether it is patched."""
    dice = random.Random(f"{seed} {number}")
    return list(Maker(dice).steps()), dice.random() < 0.4, dice.random() < 0.3


# --- a run --------------------------------------------------------------------------------------------------------


def _name(group: Any) -> str:
    """Return the name of ``group``; on a rank outside of it, one that no group has."""
    return group.group_name if isinstance(group, stock.ProcessGroup) else "a group of others"


def _gradient(tensor: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    leaf = tensor.detach().clone().requires_grad_()
    (call(leaf) * 3).sum().backward()
    return leaf.grad


def _copied(found: Any) -> Any:
    if isinstance(found, list):
        return [_copied(one) for one in found]
    return found.clone() if isinstance(found, torch.Tensor) else found


def _complex(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view: a copy would be the program's own look at a tensor that may be deferred."""
    return torch.view_as_complex(tensor.view(SIZE, SIZE // 2, 2))


class Run:
    """Plays a program: with its blocks by ``library``, or one by one (``blocks=False``)."""

    def __init__(self, groups: dict[str, Any], library: Any, *, blocks: bool) -> None:
        self.groups, self.library, self.blocks = groups, library, blocks
        rank = stock.get_rank()
        count = torch.arange(float(SIZE * SIZE), dtype=torch.float64).view(SIZE, SIZE)
        self.small = [(count * (number + 2) + 5 * rank) % 23 for number in range(TENSORS)]
        self.large = {
            name: [(torch.cat([count] * size) + 3 * rank + number) % 19 for number in range(LARGE)]
            for name, size in (("world", stock.get_world_size()), ("pair", 2))
        }
        self.leaves, self.graphs = {}, {}
        for name, group in groups.items():
            self.leaves[name] = leaf = torch.ones(2, requires_grad=True)
            if isinstance(group, stock.ProcessGroup):
                self.graphs[name] = functional.copy_to_tensor_parallel_region(leaf, group).sum()
        self.seen: list[Any] = []

    def play(self, steps: list[Step], depth: int = 0) -> list[Any]:
        """Play ``steps``; return what was seen."""
        for step in steps:
            self.seen.append((step.what, _copied(self._step(step, depth))))  # an arena gets its slots back
            if self.blocks:
                told = sorted({one.group for one in safecomm.pending() if one.state == "deferred"})
                members = [self.groups[name] for name in step.deferred]
                want = sorted(one.group_name for one in members if isinstance(one, stock.ProcessGroup))
                assert told == want, f"pending() tells that {told} have deferred calls, after {step}"
            clean = [one for number, one in enumerate(self.small) if number not in step.waiting]
            self.seen.append([one.clone() for one in clean])
            if not depth:
                for one in [*clean, *self.large["world"], *self.large["pair"]]:
                    one.remainder_(97)
        return self.seen

    def _step(self, step: Step, depth: int) -> Any:
        group = self.groups[step.group]
        if step.what in ("bucketed", "region"):
            with self._block(step, group):
                self.play(step.inside, depth + 1)
            return None
        if step.what in DRAINS:
            return self._drain(step) if self.blocks else None
        outside = not isinstance(group, stock.ProcessGroup)
        completes = step.what in COMPLETE or step.what == "late backward"
        if step.refused or (completes and outside):
            if step.what == "late backward" and outside:
                return "refused"
            return "refused" if not self.blocks else self._refused(step, group)
        return self._call(step.what, step, group)

    def _block(self, step: Step, group: Any) -> Any:
        if step.what == "bucketed":
            return safecomm.bucketed(1e-3, group) if self.blocks else contextlib.nullcontext()
        return (self.library if step.whose == "ours" else c10d)._coalescing_manager(group=group)

    def _drain(self, step: Step) -> None:
        before = [one.clone() for one in self.small]
        if step.what == "settle":
            safecomm.settle_before_capture()
        else:
            left = safecomm.drain(wait=step.what == "drain, wait")
            deferred = sum(one.nbytes for one in safecomm.pending() if one.state == "deferred")
            assert left >= deferred, f"drain() says {left} bytes are held, and {deferred} are deferred"
        assert all(map(torch.equal, before, self.small)), f"{step.what} has launched something"

    def _refused(self, step: Step, group: Any) -> str:
        before = [one.clone() for one in self.small]
        try:
            found = f"not refused: {self._call(step.what, step, group)}"
        except (RuntimeError, ValueError) as error:
            if not isinstance(error, (safecomm.SafecommError, ValueError)) and "ZeroTensors are" not in str(error):
                raise
            found = "refused"
        assert all(map(torch.equal, before, self.small)), f"{step.what} was refused, and has done something"
        return found

    def _call(self, what: str, step: Step, group: Any) -> Any:
        tensor, dist = self.small[step.tensor], self.library
        if what in COMPLETE or what in REFUSED:
            return (COMPLETE.get(what) or REFUSED[what])(tensor, group)
        if what == "late backward":
            self.graphs[step.group].backward()
            return self.leaves[step.group].grad
        large, later = self.large[step.group][step.large], what.endswith("async")
        size = large.shape[0] // SIZE
        name = what.split(",")[0]
        work = None
        if name in ("reduce", "largest"):
            op = stock.ReduceOp.SUM if name == "reduce" else stock.ReduceOp.MAX
            work = dist.all_reduce(tensor, op, group, later)
        elif name == "gather":
            work = dist.all_gather_into_tensor(large, tensor, group, later)
        elif name == "scatter":
            work = dist.reduce_scatter_tensor(tensor, large, group=group, async_op=later)
        elif name == "broadcast":
            dist.broadcast(tensor, 0, group)
        elif name == "barrier":
            dist.barrier(group)
        elif name == "monitored_barrier":
            dist.monitored_barrier(group, timedelta(seconds=60))
        else:
            return self._objects(name, tensor, group, size)
        if later and work is not None:
            work.wait()
            return [tensor.clone(), large.clone()]
        return None

    def _objects(self, name: str, tensor: torch.Tensor, group: Any, size: int) -> Any:
        dist, found = self.library, [None] * size
        first = stock.get_rank() == 0
        if name == "list":
            parts = [torch.zeros_like(tensor) for _ in range(size)]
            dist.all_gather(parts, tensor, group)
            return parts
        if name == "all_gather_object":
            dist.all_gather_object(found, tensor, group)
        elif name == "gather_object":
            dist.gather_object(tensor, found if first else None, 0, group)
        else:
            found = [tensor]
            dist.broadcast_object_list(found, 0, group)
        return found


def same(one: Any, other: Any) -> bool:
    """Return whether two things that were seen are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(seed: int, number: int, groups: dict[str, Any]) -> None:
    """Play a program both ways, and raise AssertionError where they differ."""
    steps, arena, patched = make(seed, number)
    expected = Run(groups, stock, blocks=False).play(steps)
    with contextlib.ExitStack() as stack:
        if arena:
            stack.enter_context(safecomm.use_arena("1MiB", device="cpu"))
        if patched:
            stack.enter_context(safecomm.patched())
        found = Run(groups, stock if patched else safecomm, blocks=True).play(steps)
    for one, other in zip(expected, found, strict=True):
        assert same(one, other), f"{one}\n  one by one, and in blocks\n{other}"
    assert not c10d._world.pg_coalesce_state
    assert safecomm.drain() == 0, safecomm.pending()


def _launches_nothing(what: str, group: Any) -> Any:
    return contextlib.nullcontext()


def _refuses_nothing(what: str, group: Any) -> Any:
    return takers.at_once(group)


BREAKS: dict[str, list[tuple[Any, str, Any]]] = {
    "nothing is launched first": [(functional, "now", _launches_nothing), (operators, "now", _launches_nothing)],
    "nothing is refused": [(functional, "now", _refuses_nothing), (operators, "now", _refuses_nothing)],
    "objects overtake": [(objects, "at_once", contextlib.nullcontext)],
    "what is deferred is not told": [(Ledger, "deferred", lambda ledger, group=None: [])],
}
"""What is replaced in every rank to see that the programs find it."""


def _serve(rank: int, world: int, port: int, numbers: Sequence[int], seed: int, broken: str, result: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for where, name, wrong in BREAKS.get(broken, []):
        setattr(where, name, wrong)
    store = stock.TCPStore("127.0.0.1", port, is_master=False)
    stock.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    groups = {"world": None, "pair": stock.new_group([0, 1])}
    groups["world"] = stock.group.WORLD
    for number in numbers:
        try:
            check(seed, number, groups)
        except BaseException as error:
            if not isinstance(error, RuntimeError) or "gloo" not in str(error):  # else another rank has died
                result.put(f"python tests/block_programs.py --seed {seed} --only {number} --world {world}: {error!r}")
            raise
    result.put("")
    stock.barrier()
    stock.destroy_process_group()


def run(seed: int, numbers: Sequence[int], world: int, broken: str = "") -> str:
    """Play programs on ranks of their own; return what is wrong with the first that is. ``broken``: of BREAKS."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # whose import takes longer than the programs
    result = context.SimpleQueue()
    server = stock.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_serve, args=(rank, world, server.port, numbers, seed, broken, result))
        for rank in range(world)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    said = []
    while not result.empty():
        said.append(result.get())
    wrong = [text for text in said if text]
    return wrong[0] if wrong else "" if len(said) == world else f"a rank died: {[one.exitcode for one in ranks]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--only", type=int)
    parser.add_argument("--world", type=int, default=2, choices=(2, 3, 4))
    options = parser.parse_args()
    numbers = range(options.programs) if options.only is None else range(options.only, options.only + 1)
    if options.only is not None:
        for step in make(options.seed, options.only)[0]:
            print(step)
    wrong = run(options.seed, numbers, options.world)
    print(wrong or f"{len(numbers)} programs of seed {options.seed} on {options.world} ranks: all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
