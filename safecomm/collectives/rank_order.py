"""Reductions in the order of the ranks: the backend moves what each rank has, and every element is added here.

A backend adds in an order that depends on the size of a tensor, on the place in it, on algorithm, protocol and links.
Here rank 0's value comes first, then rank 1's, and so on. Half precision is added in fp32 and rounded once, at the end;
an average is the sum divided by the number of ranks, once. The kernels of :func:`safecomm.low_latency` reduce so too,
which gives the same bits; and a CPU gives those of a GPU.

What a call takes on the wire is what a ring takes. Its memory is one tensor more, of the arena in use, and at most
:data:`TURN` bytes: larger tensors are reduced in turns. All of it runs on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.arena.staging import buffer
from safecomm.collectives.general import prepared_for_all
from safecomm.collectives.holding import relaxed

TURN = 64 << 20
"""Bytes that are reduced at once."""

SMALL = 64 << 10
"""Bytes of all ranks together up to which each rank gets everything, and adds it: one step in place of two."""

LINE = 128
"""Elements of which each rank's part is a multiple, so that each begins at an address that is easy to copy from."""

_SUM, _AVG, _PRODUCT, _MIN, _MAX = (
    getattr(c10d.ReduceOp.RedOpType, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
)
OPERATIONS: frozenset[Any] = frozenset((_SUM, _AVG, _PRODUCT, _MIN, _MAX))
"""The operations whose result can depend on the order."""

KNOWN: frozenset[Any] = OPERATIONS | {getattr(c10d.ReduceOp.RedOpType, name) for name in ("BAND", "BOR", "BXOR")}
"""Those, and the ones that are defined for integers alone."""

_exchange, (_exchange_options, _exchange_options_async) = prepared_for_all(_torch.all_to_all_single)
_gather, (_gather_options, _) = prepared_for_all(_torch.all_gather)

NOT_HERE: str = "" if _exchange and _gather else f"torch {torch.__version__} has no exchange that can be launched"
"""Why nothing can be reduced so; ``""`` if it can."""


class RankOrder:
    """The reductions of one group on one device."""

    def __init__(self, group: c10d.ProcessGroup, index: int) -> None:
        self._group = group
        self._world, self._rank = group.size(), group.rank()
        self._through = group if _torch.HOOKS else _torch.backend_of(group, "cpu" if index < 0 else "cuda")

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce ``tensor`` in place, on every rank."""
        flat = _flat(tensor)
        for turn in torch.split(flat, TURN // flat.element_size()):
            small = turn.nbytes * self._world <= SMALL
            part = 0 if small else turn.numel() // (self._world * LINE) * LINE
            whole = part * self._world
            if part:
                self._reduce_parts(turn[:whole], part, op)
            if whole < turn.numel():
                self._reduce_all(turn[whole:], op)
        _write(tensor, flat)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> None:
        """Reduce ``tensor`` in place on rank ``root`` of the group; that of other ranks stays as it is."""
        result = _buffer(tensor.shape, tensor).copy_(tensor)
        self.all_reduce(result, op)
        if self._rank == root:
            tensor.copy_(result)

    def reduce_scatter(self, out: torch.Tensor, sent: torch.Tensor, sizes: list[int], op: Any) -> None:
        """Reduce into ``out`` what every rank has for this one.

        ``sent`` has a part for each rank, one after the other, of so many elements as that rank's ``out``, which are
        ``sizes``.
        """
        flat, whole = _flat(out), _flat(sent)
        width = 2 if out.is_complex() else 1  # numbers of an element
        rows = whole.split([width * size for size in sizes])  # type: ignore[no-untyped-call]
        step = TURN // self._world // flat.element_size()
        longest = max(row.numel() for row in rows)
        for begin in range(0, longest, step):
            turn = [row[begin : begin + step] for row in rows]
            mine = flat[begin : begin + step]
            received = _buffer((self._world, mine.numel()), flat)
            given = whole if step >= longest else torch.cat(turn)
            self._exchange(received, given, [mine.numel()] * self._world, [one.numel() for one in turn])
            _combine(received, op, mine)
        _write(out, flat)

    def finish(self, tensor: torch.Tensor) -> c10d.Work:
        """Return a work that is complete when all of this is, whose result is ``tensor``, on a GPU.

        It is the backend's own, which tells when, and orders streams: of an exchange in which every rank keeps what it
        has.
        """
        whole = tensor if tensor.dim() and tensor.is_contiguous() else _flat(tensor)
        kept = [len(whole) if rank == self._rank else 0 for rank in range(self._world)]
        work: c10d.Work = _exchange(self._through, whole, whole, kept, kept, _exchange_options_async)
        return work

    def _reduce_parts(self, flat: torch.Tensor, part: int, op: Any) -> None:
        """Reduce one part of ``flat`` on each rank, and gather them."""
        received = _buffer((self._world, part), flat)
        self._exchange(received, flat, [], [])
        mine = flat[self._rank * part :][:part]
        _combine(received, op, mine)
        self._gather(flat, mine)

    def _reduce_all(self, flat: torch.Tensor, op: Any) -> None:
        """Reduce all of ``flat`` on every rank."""
        everyones = _buffer((self._world, flat.numel()), flat)
        self._gather(everyones, flat)
        _combine(everyones, op, flat)

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor, sizes: list[int], sent_sizes: list[int]) -> None:
        width = sent.element_size()
        sizes, sent_sizes = ([width * size for size in given] for given in (sizes, sent_sizes))
        received, sent = _bytes(received), _bytes(sent)
        with relaxed(self._group, [received]):
            _wait(_exchange(self._through, received, sent, sizes, sent_sizes, _exchange_options))

    def _gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        with relaxed(self._group, [whole]):
            _wait(_gather(self._through, _bytes(whole), _bytes(part), _gather_options))


def _wait(work: c10d.Work | None) -> None:
    if work is not None:  # None where the backend has run it on the current stream
        work.wait()


def _buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    with _torch.inference_mode(False):  # gloo's threads write to it outside of that
        return buffer(shape, like)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as what every backend moves, whatever types it knows."""
    return tensor.view(-1).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of ``tensor`` in a line: those in its memory, or a copy where they have gaps."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element alone may have any stride


def _write(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Write ``flat`` to the ``tensor`` that it is of, if it is a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        values = torch.view_as_complex(flat.view(*tensor.shape, 2)) if tensor.is_complex() else flat.view(tensor.shape)
        tensor.copy_(values)


def _combine(rows: torch.Tensor, op: Any, out: torch.Tensor) -> None:
    """Reduce ``rows``, one of each rank, into ``out``, in their order."""
    dtype = rows.dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        value = row.to(wide)
        if op in (_SUM, _AVG):
            total.add_(value)
        elif op == _PRODUCT:
            total.mul_(value)
        else:
            # Which of two zeros, or of a number and NaN, torch's own minimum takes depends on the place.
            better = value > total if op == _MAX else value < total
            zero = value.signbit() if op == _MIN else ~value.signbit()
            total = torch.where(better | total.isnan() | ((value == total) & zero), value, total)
    if op == _AVG:
        # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
        total.div_(torch.full((), len(rows), dtype=wide, device=rows.device))
    out.copy_(total)
