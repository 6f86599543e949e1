"""Reductions in the order of the ranks: the backend moves what each rank has, and every element is added here.

A backend adds in an order that depends on the size of a tensor, on the place in it, on algorithm, protocol and links.
Here rank 0's value comes first, then rank 1's, and so on. Half precision is added in fp32 and rounded once, at the end;
an average is the sum divided by the number of ranks, once. The kernels of :func:`safecomm.low_latency` reduce so too,
which gives the same bits; and a CPU gives those of a GPU.

On the wire that is what a ring takes. Larger tensors are reduced in turns of :data:`TURN` bytes, and what a turn
receives is of the arena in use. All of it runs on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.arena.staging import buffer
from safecomm.collectives.holding import relaxed
from safecomm.collectives.table import OPS_BY_NAME

TURN = 64 << 20
"""Bytes that are reduced at once: as much is received, and of two ranks' half precision one half in fp32 is as much
again. On two H200, 256 MiB took 1.74 of NCCL's time in one turn, 2.2 in turns of this, 5.6 in turns of 16 MiB."""

SMALL = 64 << 10
"""Bytes of all ranks together up to which each rank gets everything, and adds it: one step in place of two."""

LINE = 16
"""Bytes of which each rank's part is a multiple, so that its address is one that is easy to copy from."""

_SUM, _AVG, _PRODUCT, _MIN, _MAX = (OPS_BY_NAME[name] for name in ("sum", "avg", "product", "min", "max"))
OPERATIONS: frozenset[object] = frozenset((_SUM, _AVG, _PRODUCT, _MIN, _MAX))
"""The operations whose result can depend on the order."""

SUMS: frozenset[object] = frozenset((_SUM, _AVG))
"""Those that complex numbers have, too."""

NOT_HERE: str = (
    "" if _torch.all_to_all_single and _torch.all_gather else f"torch {torch.__version__} has no exchange to launch"
)
"""Why nothing can be reduced so; ``""`` if it can."""


class RankOrder:
    """The reductions of one group on one device, each with ``timeout``; None for the group's."""

    def __init__(self, group: c10d.ProcessGroup, index: int, timeout: timedelta | None = None) -> None:
        self._group = group
        self._world, self._rank = group.size(), group.rank()
        self._through = group if _torch.HOOKS else _torch.backend_of(group, "cpu" if index < 0 else "cuda")
        self._timeout = timeout

    def all_reduce(self, tensor: torch.Tensor, op: object) -> None:
        """Reduce ``tensor`` in place, on every rank."""
        flat = flattened(tensor)
        for turn in _turns(flat):
            self._reduce(turn, op)
        write_back(tensor, flat)

    def reduce(self, tensor: torch.Tensor, op: object, root: int) -> None:
        """Reduce ``tensor`` in place on rank ``root`` of the group; that of other ranks stays as it is."""
        flat = flattened(tensor)
        for turn in _turns(flat):
            result = _buffer(turn.shape, turn).copy_(turn)
            self._reduce(result, op)
            if self._rank == root:
                turn.copy_(result)
        write_back(tensor, flat)

    def reduce_scatter(self, out: torch.Tensor, sent: list[torch.Tensor], op: object) -> None:
        """Reduce into ``out`` what every rank has for this one.

        ``sent`` has a part for each rank, of as many elements as that rank's ``out``.
        """
        flat, rows = flattened(out), [flattened(one) for one in sent]
        step = TURN // self._world // flat.element_size()
        for begin in range(0, max(row.numel() for row in rows), step):
            turn = [row[begin : begin + step] for row in rows]
            mine = flat[begin : begin + step]
            received = _buffer((self._world, mine.numel()), flat)
            given = torch.cat(turn, out=_buffer((sum(one.numel() for one in turn),), flat))
            self._exchange(received, given, [mine.numel()] * self._world, [one.numel() for one in turn])
            _combine(received, op, mine)
        write_back(out, flat)

    def finish(self, tensor: torch.Tensor) -> c10d.Work:
        """Return a work that is complete when all of this is, whose result is ``tensor``.

        It is the backend's own, which tells when, and orders streams: of an exchange in which every rank keeps what it
        has.
        """
        whole = tensor if tensor.dim() and tensor.is_contiguous() and not tensor.is_complex() else flattened(tensor)
        if whole.element_size() == 1:  # of which backends know few types
            whole = _bytes(whole)
        kept = [len(whole) if rank == self._rank else 0 for rank in range(self._world)]
        launch, options = self._options(_torch.all_to_all_single, asynchronous=True)
        work: c10d.Work = launch(self._through, whole, whole, kept, kept, options)
        return work

    def _reduce(self, flat: torch.Tensor, op: object) -> None:
        """Reduce ``flat`` in place, on every rank, at once."""
        line = LINE // flat.element_size()
        part = 0 if flat.nbytes * self._world <= SMALL else flat.numel() // (self._world * line) * line
        whole = part * self._world
        if part:
            received = _buffer((self._world, part), flat)
            self._exchange(received, flat[:whole], [], [])
            mine = flat[self._rank * part :][:part]
            _combine(received, op, mine)
            self._gather(flat[:whole], mine)
        if whole < flat.numel():
            rest = flat[whole:]
            everyones = _buffer((self._world, rest.numel()), flat)
            self._gather(everyones, rest)
            _combine(everyones, op, rest)

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor, sizes: list[int], sent_sizes: list[int]) -> None:
        width = sent.element_size()
        sizes, sent_sizes = ([width * size for size in given] for given in (sizes, sent_sizes))
        launch, options = self._options(_torch.all_to_all_single)
        with relaxed(self._group, [received]):
            _wait(launch(self._through, _bytes(received), _bytes(sent), sizes, sent_sizes, options))

    def _gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        launch, options = self._options(_torch.all_gather)
        with relaxed(self._group, [whole]):
            _wait(launch(self._through, _bytes(whole), _bytes(part), options))

    def _options(self, launch: Any, *, asynchronous: bool = False) -> tuple[Any, Any]:
        """Return what launches a call, and its options."""
        options = launch.options()
        if _torch.ASYNC_OPTION:
            options.asyncOp = asynchronous
        if self._timeout is not None:
            options.timeout = self._timeout
        return launch.function, options


def _turns(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(flat, TURN // flat.element_size()) if flat.numel() else ()


def _wait(work: c10d.Work | None) -> None:
    if work is not None:  # None where the backend has run it on the current stream
        work.wait()


def _buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    with _torch.inference_mode(False):  # gloo's threads write to it outside of that
        return buffer(shape, like)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as what every backend moves, whatever types it knows."""
    return tensor.view(-1).view(torch.uint8)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of ``tensor`` in a line: those in its memory, or a copy where they have gaps."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element alone may have any stride


def write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Write ``flat`` to the ``tensor`` that it is of, if it is a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        values = torch.view_as_complex(flat.view(*tensor.shape, 2)) if tensor.is_complex() else flat.view(tensor.shape)
        tensor.copy_(values)


def _combine(rows: torch.Tensor, op: object, out: torch.Tensor) -> None:
    """Reduce ``rows``, one of each rank, into ``out``, in their order."""
    dtype = rows.dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total, narrow = rows[0].to(wide), dtype.itemsize == 1  # of which torch promotes none
    for number, row in enumerate(rows[1:], 2):
        value = row.to(wide) if narrow else row
        if op == _SUM and number == len(rows) and not narrow:
            torch.add(total, value, out=out)  # in the wider type, rounded as it is stored
            return
        if op in SUMS:
            total = total + value
        elif op == _PRODUCT:
            total = total * value
        else:
            # Which of two zeros, or of a number and NaN, torch's own minimum takes depends on the place.
            better = value > total if op == _MAX else value < total
            zero = value.signbit() if op == _MIN else ~value.signbit()
            total = torch.where(better | total.isnan() | ((value == total) & zero), value, total)
    if op == _AVG:
        # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
        total = total / torch.full((), len(rows), dtype=wide, device=rows.device)
    out.copy_(total)
