"""Every collective of c10d as one call on given data, and the values that the tests try them with.

A call takes the module whose function it uses, ``torch.distributed`` or ``safecomm``, and a :class:`Setting`. It
returns what the function returned, and all tensors that it was given, inputs and outputs.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((4,), (7,), (3, 5), (0,), ())

# With the one torch.distributed itself takes the process down (torch 2.13, gloo), with the other it breaks connections.
NOT_FOR_SCALARS = {"reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single", "region_of_reduce_scatter"}
NOT_FOR_NOTHING = {"recv_from_any"}


def shapes(name: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that the call ``name`` is tried with."""
    without = {()} if name in NOT_FOR_SCALARS else {(0,)} if name in NOT_FOR_NOTHING else set()
    return tuple(shape for shape in SHAPES if shape not in without)


LAYOUTS = ("contiguous", "strided")
OPS = ("SUM", "MAX", "MIN", "PRODUCT", "AVG")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to call a collective; the same in every rank, but for the data."""

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (4,)
    layout: str = "contiguous"
    op: str = "SUM"
    asynchronous: bool = False
    group: Any = None  # what is passed as group=
    members: tuple[int, ...] = ()  # its ranks; () for all

    @property
    def size(self) -> int:
        return len(self.members) or stock.get_world_size()

    @property
    def rank(self) -> int:
        """The rank in the group; outside of it the first member's, so that the call would be valid for a member."""
        mine = stock.get_rank()
        return self.members.index(mine) if mine in self.members else (0 if self.members else mine)

    def world_rank(self, rank: int) -> int:
        return self.members[rank] if self.members else rank

    def data(self, seed: int = 0, times: int = 1) -> torch.Tensor:
        """Return the data of this rank: not the same in any two, and fractions, which types round differently."""
        room = self.room(times)
        count = torch.arange(room.numel(), dtype=torch.float64).reshape(room.shape)
        values = (count * 1.37 + seed * 3.1 + self.rank * 5.7 + 0.3) % 11
        if self.dtype.is_complex:
            room.copy_(torch.complex(values, 11 - values))
        elif self.dtype is torch.bool:
            room.copy_(values > 5)
        else:
            room.copy_(values)
        return room

    def room(self, times: int = 1) -> torch.Tensor:
        """Return zeros, ``times`` of the shape along the first dimension."""
        shape = (self.shape[0] * times, *self.shape[1:]) if self.shape else ((times,) if times > 1 else ())
        if self.layout == "strided" and shape:
            return torch.zeros((*shape[:-1], shape[-1] * 2), dtype=self.dtype)[..., ::2]
        return torch.zeros(shape, dtype=self.dtype)

    @property
    def keywords(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}

    @property
    def reduction(self) -> Any:
        return getattr(stock.ReduceOp, self.op)


Call = Callable[[Any, Setting], tuple[Any, list[torch.Tensor]]]

REDUCTIONS: dict[str, Call] = {}
"""The calls that take a reduce operation."""

MOVES: dict[str, Call] = {}
"""The calls that take ``async_op`` and move data only."""

NOT_ON_GLOO: dict[str, Call] = {}
"""The calls that gloo does not have (torch 2.15)."""

POINT_TO_POINT: dict[str, Call] = {}
"""Sends and receives."""

COALESCED: dict[str, Call] = {}
"""Regions of ``_coalescing_manager``."""


def _in(table: dict[str, Call]) -> Callable[[Call], Call]:
    def register(call: Call) -> Call:
        table[call.__name__] = call
        return call

    return register


# --- reductions ------------------------------------------------------------------------------------------


@_in(REDUCTIONS)
def all_reduce(dist, s):
    tensor = s.data()
    return dist.all_reduce(tensor, s.reduction, **s.keywords), [tensor]


@_in(REDUCTIONS)
def all_reduce_coalesced(dist, s):
    tensors = [s.data(seed) for seed in range(3)]
    return dist.all_reduce_coalesced(tensors, s.reduction, **s.keywords), tensors


@_in(REDUCTIONS)
def reduce(dist, s):
    tensor = s.data()
    return dist.reduce(tensor, s.world_rank(s.size - 1), s.reduction, **s.keywords), [tensor]


def reduce_group_dst(dist, s):
    tensor = s.data()
    return dist.reduce(tensor, op=s.reduction, group_dst=0, **s.keywords), [tensor]


GROUP_RANKS = "group_dst" in inspect.signature(c10d.reduce).parameters
"""Whether a rank can be named by its number in the group, as since torch 2.6."""

if GROUP_RANKS:
    _in(REDUCTIONS)(reduce_group_dst)


@_in(REDUCTIONS)
def reduce_scatter(dist, s):
    output, inputs = s.room(), [s.data(seed) for seed in range(s.size)]
    return dist.reduce_scatter(output, inputs, s.reduction, **s.keywords), [output, *inputs]


def _reduce_scatter_like(name: str) -> Call:
    def call(dist, s):
        output, tensor = s.room(), s.data(times=s.size)
        return getattr(dist, name)(output, tensor, s.reduction, **s.keywords), [output, tensor]

    call.__name__ = name
    return call


for _name in ("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"):
    if hasattr(c10d, _name):
        _in(REDUCTIONS)(_reduce_scatter_like(_name))


# --- moves -----------------------------------------------------------------------------------------------


def _all_gather_like(name: str) -> Call:
    def call(dist, s):
        output, tensor = s.room(s.size), s.data()
        return getattr(dist, name)(output, tensor, **s.keywords), [output, tensor]

    call.__name__ = name
    return call


for _name in ("all_gather_into_tensor", "_all_gather_base", "all_gather_single"):
    if hasattr(c10d, _name):
        _in(MOVES)(_all_gather_like(_name))


@_in(MOVES)
def all_gather(dist, s):
    outputs, tensor = [s.room() for _ in range(s.size)], s.data()
    return dist.all_gather(outputs, tensor, **s.keywords), [*outputs, tensor]


@_in(MOVES)
def all_gather_coalesced(dist, s):
    outputs = [[s.room() for _ in range(2)] for _ in range(s.size)]
    tensors = [s.data(seed) for seed in range(2)]
    return dist.all_gather_coalesced(outputs, tensors, **s.keywords), [t for row in [*outputs, tensors] for t in row]


@_in(MOVES)
def all_to_all(dist, s):
    outputs, inputs = [s.room() for _ in range(s.size)], [s.data(seed) for seed in range(s.size)]
    return dist.all_to_all(outputs, inputs, **s.keywords), [*outputs, *inputs]


@_in(MOVES)
def all_to_all_single(dist, s):
    output, tensor = s.room(s.size), s.data(times=s.size)
    return dist.all_to_all_single(output, tensor, **s.keywords), [output, tensor]


@_in(MOVES)
def all_to_all_single_uneven(dist, s):
    """Rank r gets r + 1 rows from everybody."""
    rows = [rank + 1 for rank in range(s.size)]
    output, tensor = s.room((s.rank + 1) * s.size), s.data(times=sum(rows))
    width = s.shape[0] if s.shape else 1
    sizes = [(s.rank + 1) * width] * s.size, [row * width for row in rows]
    return dist.all_to_all_single(output, tensor, *sizes, **s.keywords), [output, tensor]


@_in(MOVES)
def broadcast(dist, s):
    tensor = s.data()
    return dist.broadcast(tensor, s.world_rank(0), **s.keywords), [tensor]


def broadcast_group_src(dist, s):
    tensor = s.data()
    return dist.broadcast(tensor, group_src=s.size - 1, **s.keywords), [tensor]


if GROUP_RANKS:
    _in(MOVES)(broadcast_group_src)


@_in(MOVES)
def gather(dist, s):
    tensor = s.data()
    outputs = [s.room() for _ in range(s.size)] if s.rank == 0 else None
    return dist.gather(tensor, outputs, s.world_rank(0), **s.keywords), [tensor, *(outputs or [])]


def _gather_to_one(name: str) -> None:
    def call(dist, s):
        tensor = s.data()
        output = s.room(s.size) if s.rank == 0 else None
        returned = getattr(dist, name)(tensor, output, s.world_rank(0), **s.keywords)
        return returned, [tensor] if output is None else [tensor, output]

    call.__name__ = name
    if hasattr(c10d, name):  # torch 2.14 and later
        _in(NOT_ON_GLOO)(call)


_gather_to_one("gather_single")
_gather_to_one("gather_into_tensor")


@_in(MOVES)
def scatter(dist, s):
    tensor = s.room()
    inputs = [s.data(seed) for seed in range(s.size)] if s.rank == s.size - 1 else None
    return dist.scatter(tensor, inputs, s.world_rank(s.size - 1), **s.keywords), [tensor, *(inputs or [])]


# --- point to point ----------------------------------------------------------------------------------------


def _neighbours(s: Setting) -> tuple[int, int]:
    return s.world_rank((s.rank + 1) % s.size), s.world_rank((s.rank - 1) % s.size)


@_in(POINT_TO_POINT)
def send_and_recv(dist, s):
    """A chain: everybody but the first receives, everybody but the last sends on."""
    tensor, room = s.data(), s.room()
    returned = []
    if s.rank > 0:
        returned.append(dist.recv(room, s.world_rank(s.rank - 1), group=s.group, tag=3))
    if s.rank < s.size - 1:
        returned.append(dist.send(tensor, s.world_rank(s.rank + 1), group=s.group, tag=3))
    return returned, [tensor, room]


@_in(POINT_TO_POINT)
def recv_from_any(dist, s):
    tensor, room = s.data(), s.room()
    if s.rank == 0:
        return [dist.recv(room, group=s.group)], [tensor, room]
    to = {"group_dst": 0} if GROUP_RANKS else {"dst": s.world_rank(0)}
    return [dist.send(tensor, **to, group=s.group) if s.rank == 1 else None], [tensor, room]


@_in(POINT_TO_POINT)
def isend_and_irecv(dist, s):
    """A ring."""
    tensor, room = s.data(), s.room()
    after, before = _neighbours(s)
    return [dist.isend(tensor, after, group=s.group), dist.irecv(room, before, group=s.group)], [tensor, room]


def _batch(name: str, op_of: Callable[[Any], Any], functions_of: Callable[[Any], Any]) -> Call:
    def call(dist, s):
        tensor, room = s.data(), s.room()
        after, before = _neighbours(s)
        make, functions = op_of(dist), functions_of(dist)
        ops = [make(functions.isend, tensor, after, s.group), make(functions.irecv, room, before, s.group, 0)]
        return dist.batch_isend_irecv(ops), [tensor, room]

    call.__name__ = name
    return call


# P2POp and its functions from ours, or from torch's.
_in(POINT_TO_POINT)(_batch("batch", lambda dist: dist.P2POp, lambda dist: dist))
_in(POINT_TO_POINT)(_batch("batch_their_functions", lambda dist: dist.P2POp, lambda _: stock))
_in(POINT_TO_POINT)(_batch("batch_all_theirs", lambda _: stock.P2POp, lambda _: stock))


# --- regions -----------------------------------------------------------------------------------------------


def _region(name: str, body: Callable[[Any, Setting, dict[str, Any]], list[torch.Tensor]]) -> Call:
    def call(dist, s):
        with dist._coalescing_manager(group=s.group, async_ops=s.asynchronous) as manager:
            tensors = body(dist, s, s.keywords)
        return (manager if s.asynchronous else None), tensors

    call.__name__ = name
    return call


def _coalesced_all_reduce(dist, s, keywords):
    tensors = [s.data(seed) for seed in range(3)]
    for tensor in tensors:
        dist.all_reduce(tensor, **keywords)
    return tensors


def _coalesced_all_gather(dist, s, keywords):
    tensors = [(s.room(s.size), s.data(seed)) for seed in range(2)]
    for output, tensor in tensors:
        getattr(dist, _GATHER)(output, tensor, **keywords)
    return [tensor for pair in tensors for tensor in pair]


def _coalesced_reduce_scatter(dist, s, keywords):
    tensors = [(s.room(), s.data(seed, times=s.size)) for seed in range(2)]
    for output, tensor in tensors:
        getattr(dist, _SCATTER)(output, tensor, **keywords)
    return [tensor for pair in tensors for tensor in pair]


def _mixed(dist, s, keywords):
    tensor, output = s.data(), s.room(s.size)
    dist.all_reduce(tensor, **keywords)
    getattr(dist, _GATHER)(output, tensor, **keywords)
    return [tensor, output]


def _nothing(dist, s, keywords):
    return []


_GATHER = "all_gather_single" if hasattr(c10d, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(c10d, "reduce_scatter_single") else "reduce_scatter_tensor"

for _call in (
    _region("region_of_all_reduce", _coalesced_all_reduce),
    _region("region_of_all_gather", _coalesced_all_gather),
    _region("region_of_reduce_scatter", _coalesced_reduce_scatter),
    _region("mixed_region", _mixed),
    _region("empty_region", _nothing),
):
    _in(COALESCED)(_call)

_Manager = c10d._CoalescingManager

ALL: dict[str, Call] = {**REDUCTIONS, **MOVES, **POINT_TO_POINT, **COALESCED}


def invoke(module: Any, name: str, setting: Setting) -> tuple[Any, list[torch.Tensor]]:
    """Make the call ``name``, without the warnings of those that torch has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return ALL[name](module, setting)


# --- what came of a call -----------------------------------------------------------------------------------


def finish(returned: Any) -> Any:
    """Wait for what a call returned, and return what a comparison can use of it."""
    if isinstance(returned, c10d.Work):
        return "Work", returned.wait()
    if isinstance(returned, torch._C.Future):
        returned.wait()
        return "Future"
    if isinstance(returned, _Manager):
        return "manager", returned.wait()
    if isinstance(returned, (list, tuple)):
        return [finish(each) for each in returned]
    return returned


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the tensor as something that is equal only if every bit is."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce()
        return bits(tensor.indices()), bits(tensor.values())
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).numpy().tobytes())
