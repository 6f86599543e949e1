"""The collectives as data: what each is given, who may take its calls first, and how its calls are launched.

A row with a ``launch`` has a *direct* way: a gate launches plain calls without c10d's Python. The gates of single
tensors are in ``gates.py``, which ``generate.py`` makes of ``gate.py.in``, and those of lists in ``lists.py``. A row
without a launch says why not, and its calls go through c10d's own function; see ``general.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch

REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"
"""The kinds of collectives that can be deferred or run by an engine."""

EXCHANGE = "all_to_all"
"""What an engine can run too, and ``bucketed()`` does not defer."""

OPS = tuple(getattr(c10d.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))
"""The reduce operations that are members of an enum. A premultiplied sum is another object."""

OPS_BY_NAME = {str(op).rsplit(".", 1)[-1].lower(): op for op in OPS}
"""Those operations, by the names that torch's operators have for them."""

OP_IDS = frozenset({id(None), *map(id, OPS)})
"""The ids of those, and of None. Members of an enum never die, so such an id is theirs."""


@dataclass(frozen=True, eq=False)
class Row:
    """One function of c10d's, and what safecomm does with its calls."""

    key: str
    """c10d's name of it in the newest torch."""
    tensors: tuple[str, ...]
    """The arguments that are tensors, or lists of them, in the order of the signature."""
    given: tuple[str, ...] = ()
    """The arguments between the tensors and the group."""
    last: tuple[str, ...] = ()
    """The arguments after the flag."""
    kind: str = ""
    """Its kind for buckets and engines: :data:`REDUCE`, :data:`SCATTER`, :data:`GATHER` or :data:`EXCHANGE`, or ``""``
    for nothing."""
    collected: bool = False
    """A coalescing region collects its calls, and :func:`safecomm.bucketed` puts them off."""
    engine: bool = True
    """If it has a kind, an engine may run it."""
    staged: bool = False
    """c10d copies through memory of its own."""
    ordered: bool = True
    """Its works end in the order in which they were launched. Point-to-point may have a communicator for each peer."""
    pollable: bool = True
    """gloo tells when its works are over. Its point-to-point and its reduce_scatter do not (torch 2.13)."""
    alias: str = ""
    """The earlier name, which torch before 2.13 has alone, and later ones have too."""
    launch: _torch.Launch | None = None
    """What launches it directly; None if nothing does."""
    successor: str = ""
    """The key of the row whose function c10d's calls; that one counts the call where it is ours, while patched."""
    because: str = ""
    """Why no gate is made for it: it has no direct way, or it is a list form."""
    module: str = "gates"
    """The module of this package that has it."""

    @property
    def one(self) -> bool:
        """Whether it works in place, on the one tensor that it is given."""
        return len(self.tensors) == 1

    @functools.cached_property
    def name(self) -> str:
        """c10d's name of it in this torch."""
        return self.alias if self.alias and not hasattr(c10d, self.key) else self.key


_LIST = "it takes lists: its gate is in lists.py"
_COALESCED = "it is rare, and c10d stages it"
_PEER = "what it is given is held apart, and by aliases: see point_to_point.py"
_NEW = "it is new in torch 2.14, and rare where latency matters"
_OLD = "it is private and old: c10d's calls its successor"
_HOST_ONLY = "it has no tensors"

ROWS: dict[str, Row] = {
    row.key: row
    for row in (
        Row("all_reduce", ("tensor",), ("op",), kind=REDUCE, collected=True, launch=_torch.all_reduce),
        Row(
            "all_gather_single", ("output_tensor", "input_tensor"), kind=GATHER, collected=True,
            alias="all_gather_into_tensor", launch=_torch.all_gather,
        ),
        Row(
            "reduce_scatter_single", ("output", "input"), ("op",), kind=SCATTER, collected=True, pollable=False,
            alias="reduce_scatter_tensor", launch=_torch.reduce_scatter,
        ),
        Row("broadcast", ("tensor",), ("src",), ("group_src",), launch=_torch.broadcast),
        Row("reduce", ("tensor",), ("dst", "op"), ("group_dst",), launch=_torch.reduce),
        Row(
            "all_to_all_single", ("output", "input"), ("output_split_sizes", "input_split_sizes"), kind=EXCHANGE,
            launch=_torch.all_to_all_single,
        ),
        Row(
            "_all_gather_base", ("output_tensor", "input_tensor"), kind=GATHER, collected=True, engine=False,
            successor="all_gather_single", because=_OLD,
        ),
        Row(
            "_reduce_scatter_base", ("output", "input"), ("op",), kind=SCATTER, collected=True, engine=False,
            pollable=False, successor="reduce_scatter_single", because=_OLD,
        ),
        Row(
            "all_gather", ("tensor_list", "tensor"), kind=GATHER, staged=True, launch=_torch.all_gather_list,
            because=_LIST,
        ),
        Row(
            "reduce_scatter", ("output", "input_list"), ("op",), kind=SCATTER, staged=True, pollable=False,
            launch=_torch.reduce_scatter_list, because=_LIST,
        ),
        Row("all_gather_coalesced", ("output_tensor_lists", "input_tensor_list"), staged=True, because=_COALESCED),
        Row("all_reduce_coalesced", ("tensors",), ("op",), because="torch deprecates it, and it answers by a future"),
        Row("all_to_all", ("output_tensor_list", "input_tensor_list"), launch=_torch.all_to_all, because=_LIST),
        Row("gather", ("tensor", "gather_list"), ("dst",), ("group_dst",), launch=_torch.gather, because=_LIST),
        Row("scatter", ("tensor", "scatter_list"), ("src",), ("group_src",), launch=_torch.scatter, because=_LIST),
        Row("gather_single", ("tensor", "gather_tensor"), ("dst",), ("group_dst",), because=_NEW),
        Row("gather_into_tensor", ("tensor", "gather_tensor"), ("dst",), ("group_dst",), because=_NEW),
        Row("barrier", (), (), ("device_ids", "timeout"), because=_HOST_ONLY),
        *(Row(name, ("tensor",), ordered=False, pollable=False, because=_PEER, module="point_to_point")
          for name in ("isend", "irecv", "send", "recv")),
        Row("batch_isend_irecv", (), ordered=False, pollable=False, because=_PEER, module="point_to_point"),
    )
}  # fmt: skip
"""The collectives, by c10d's newest names. Not every torch has all of them."""

REGION = Row("_coalescing_manager", ())
"""What a coalescing region is, as a call."""

BUCKETED = Row("bucketed", ())
"""What copies into and out of a bucket are."""

COLLECTIVE_OF = {
    name: row.kind for row in ROWS.values() if row.kind and not row.staged for name in (row.key, row.alias) if name
}
"""The collectives that can be deferred, or run by an engine, by the names of c10d's functions."""

LISTS = {row.key: row.kind for row in ROWS.values() if row.kind and row.staged}
"""The list forms that an engine can run, likewise."""


def fits(collective: str, output: torch.Tensor, given: torch.Tensor, world: int) -> bool:
    """Return whether the larger of the two has a part like the smaller for each of ``world`` ranks, as c10d wants."""
    if collective == REDUCE:
        return True
    part, whole = (given, output) if collective == GATHER else (output, given)
    return whole.numel() == world * part.numel()
