"""bucketed(): many small collectives as few large ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.arena.use import empty
from safecomm.collectives import gather, reduce
from safecomm.collectives.call import COMPLEX, PLAIN, REGIONS, Region, default_group, storages_of
from safecomm.ledger import LEDGER
from safecomm.sites import outside
from safecomm.streams import HOST

BUCKET_MB = 32
"""Size of a bucket, in MiB, where the caller says none: on 2 x H200 the time of 200 small all_reduces changes by less
than a tenth from 16 on."""

_ELEMENTWISE = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"})
_OPS = frozenset(id(getattr(c10d.ReduceOp, name)) for name in _ELEMENTWISE)

_gather_into = getattr(gather, "all_gather_single", gather.all_gather_into_tensor)
_scatter_into = getattr(reduce, "reduce_scatter_single", reduce.reduce_scatter_tensor)


class Buckets(Region):
    """The calls of one group that are put off, until :func:`bucketed` ends or something else comes in between."""

    bucketed = True

    def __init__(self, group: Any, nbytes: int) -> None:
        super().__init__()
        self.group = group
        self.nbytes = nbytes
        self.index: int | None = None  # device and stream of the calls that are put off
        self.stream = HOST

    def collect(
        self, group: Any, function: Any, tensor: torch.Tensor, other: torch.Tensor | None, op: Any, async_op: bool
    ) -> None:
        index = tensor.get_device()
        stream = HOST if index < 0 else LEDGER.current(index)
        calls = _torch.world.pg_coalesce_state[group]
        if calls and (index != self.index or stream != self.stream):
            self.flush()  # on the stream where they were called, which the caller has left
        self.index, self.stream = index, stream
        _torch.world.pg_coalesce_state[group].append(_torch.CollOp(function, tensor, other, op, None))

    def alias(self, tensor: Any) -> Any:
        return tensor  # c10d is given none of them

    def open(self) -> None:
        """Put off what is called from now on."""
        _torch.world.pg_coalesce_state[self.group] = []
        REGIONS[self.group] = self

    def close(self) -> list[Any]:
        """Put off nothing any more, and return what was."""
        REGIONS.pop(self.group, None)
        self.tensors.clear()
        return _torch.world.pg_coalesce_state.pop(self.group, [])  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Launch what was put off."""
        with self.closed():
            pass

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Launch what was put off, and put nothing off inside."""
        self.launch(self.close())
        try:
            yield
        finally:
            self.open()

    def launch(self, calls: list[Any]) -> None:
        """Launch ``calls`` in their order, on the stream that they were made on."""
        if not calls:
            return
        index = calls[0].tensor.get_device()
        there: Any = contextlib.nullcontext()
        if index >= 0 and self.index == index and LEDGER.current(index) != self.stream:
            there = LEDGER.streams.using(index, self.stream)
        with there, torch.no_grad():
            for bucket in _buckets(calls, self.nbytes, self.group.size()):
                _launch(bucket, self.group)


def bucketed(
    bucket_mb: float | str | os.PathLike[str] | None = None, group: Any = None
) -> contextlib.AbstractContextManager[None]:
    """Launch the many small collectives that are called inside as few large ones.

    Synchronous ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` of ``group`` are put off, as
    inside torch's ``_coalescing_manager``: until the end of the block their outputs are not there, and their tensors
    are not to be changed. At the end they have run, in their order, and each result is where its caller expects it.
    Consecutive calls of one kind, dtype and operation share a bucket: contiguous memory of the arena in use, ordinary
    memory where there is none, which they are copied into and out of. All ranks have to make the same calls.

    Whatever else is called on the group through safecomm, asynchronous calls and :mod:`safecomm.functional` among it,
    runs when it is called, after what was put off before it. Tensors that are not contiguous, that overlap with others
    of their bucket, or that are as large as a bucket, go on their own.

    ``bucket_mb``: the size of a bucket in MiB, 32 by default, or the file that ``python -m safecomm tune`` wrote, the
    same on all ranks. ``group``: by default the default group. Runs on the
    stream where the calls were made; on the host a call takes about 2 us. The copies count as changes in place for
    autograd. Sums of floating-point numbers over more than two ranks may be added in another order than one by one,
    because NCCL chooses by the size.

    Raises
    ------
    ValueError
        If the group is already collecting calls, the size is not positive, or the file is not one of ``tune``.
    OSError
        If the file can't be read.

    An exception inside of the block goes on, and what was put off is not launched.

    Examples
    --------
    >>> with bucketed():
    ...     for gradient in gradients:
    ...         dist.all_reduce(gradient)
    """
    if torch.compiler.is_dynamo_compiling():  # a graph of the compiler has its own buckets
        return contextlib.nullcontext()
    if isinstance(bucket_mb, (str, os.PathLike)):
        size = _tuned(os.fspath(bucket_mb))
    else:
        size = BUCKET_MB if bucket_mb is None else bucket_mb
    if not size > 0:
        raise ValueError(f"bucketed(): a bucket of {size} MiB; it has to be larger than 0")
    return _bucketed(group, int(size * 2**20))


@functools.cache
def _tuned(path: str) -> float:
    with open(path, encoding="utf-8") as file:
        try:
            return float(json.load(file)["bucket_mb"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"bucketed(): {path} is not a file of python -m safecomm tune: {error!r}") from None


@contextlib.contextmanager
def _bucketed(group: Any, nbytes: int) -> Iterator[None]:
    to = group or default_group()
    if to is None:
        raise ValueError("bucketed(): there is no default group; call init_process_group first")
    if to in _torch.world.pg_coalesce_state:
        raise ValueError("bucketed(): the group is already collecting calls, in bucketed() or _coalescing_manager()")
    if not isinstance(to, c10d.ProcessGroup):  # this rank is not in it: c10d says what it says for each call
        yield
        return
    buckets = Buckets(to, nbytes)
    buckets.open()
    try:
        yield
    except BaseException:
        buckets.close()
        raise
    buckets.launch(buckets.close())


# --- what is launched -----------------------------------------------------------------------------------------


def _kind(call: Any, world: int) -> Any:
    """Return what calls have in common that can share a bucket; None for one that goes on its own."""
    tensor, other, op = call.tensor, call.dst_tensor, call.redop
    name = call.op.__name__
    if (
        type(tensor) not in PLAIN
        or tensor.layout is not torch.strided
        or tensor.dtype in COMPLEX
        or not tensor.is_contiguous()
        or not tensor.numel()
        or tensor.is_inference()
        or (op is not None and id(op) not in _OPS)
    ):
        return None
    if name == "all_reduce":
        return name, id(op), tensor.dtype, tensor.get_device()
    if (
        type(other) not in PLAIN
        or other.dtype is not tensor.dtype
        or other.device != tensor.device
        or not other.is_contiguous()
        or other.is_inference()
    ):
        return None
    small, large = (tensor, other) if op is None else (other, tensor)
    return (name, id(op), tensor.dtype, tensor.get_device()) if large.numel() == world * small.numel() else None


def _buckets(calls: list[Any], nbytes: int, world: int) -> Iterator[list[Any]]:
    """Yield ``calls`` in their order, those that share a bucket of at most ``nbytes`` bytes together."""
    bucket: list[Any] = []
    kind, size = None, 0
    for call in calls:
        its = _kind(call, world)
        its_size = max(call.tensor.nbytes, 0 if call.dst_tensor is None else call.dst_tensor.nbytes)
        if bucket and (its is None or its != kind or size + its_size > nbytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(call)
        kind, size = its, size + its_size
    if bucket:
        yield bucket


def _launch(bucket: list[Any], group: Any) -> None:
    tensors = [call.tensor for call in bucket]
    tensors += [call.dst_tensor for call in bucket if call.dst_tensor is not None]
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors) if len(bucket) > 1 else []
    apart = all(start + nbytes <= after for (start, nbytes), (after, _) in itertools.pairwise(places))
    name = bucket[0].op.__name__
    if len(bucket) == 1 or not apart:
        for call in bucket:
            _ONE[name](call, group)
        return
    _MANY[name](bucket, group, bucket[0].redop)
    index = tensors[0].get_device()
    if index >= 0:
        stream = LEDGER.current(index)
        if not LEDGER.streams.all_at_home(stream, [start for start, _ in places]):
            frame = outside(("safecomm.collectives.", "contextlib."))
            LEDGER.trail("bucketed", group, index, storages_of(tensors), frame)


def _all_reduce(bucket: list[Any], group: Any, op: Any) -> None:
    tensors = [call.tensor for call in bucket]
    flat = _flat(tensors[0], sum(tensor.numel() for tensor in tensors))
    parts = _torch.unflatten(flat, tensors)
    _torch.copy_all(parts, tensors)
    reduce.all_reduce(flat, op, group)
    _torch.copy_all(tensors, parts)


def _all_gather(bucket: list[Any], group: Any, _: Any) -> None:
    inputs = [call.tensor for call in bucket]
    sizes = [tensor.numel() for tensor in inputs]
    source = _flat(inputs[0], sum(sizes))
    _torch.copy_all(_torch.unflatten(source, inputs), inputs)
    whole = _flat(inputs[0], sum(sizes) * group.size())
    _gather_into(whole, source, group)
    for call, part in zip(bucket, torch.split(whole.view(group.size(), -1), sizes, 1), strict=True):
        call.dst_tensor.view(part.shape).copy_(part)


def _reduce_scatter(bucket: list[Any], group: Any, op: Any) -> None:
    outputs = [call.dst_tensor for call in bucket]
    numel = sum(tensor.numel() for tensor in outputs)
    whole = _flat(outputs[0], numel * group.size())
    rows = [call.tensor.view(group.size(), -1) for call in bucket]
    torch.cat(rows, 1, out=whole.view(group.size(), numel))
    part = _flat(outputs[0], numel)
    _scatter_into(part, whole, op, group)
    _torch.copy_all(outputs, _torch.unflatten(part, outputs))


def _flat(like: torch.Tensor, numel: int) -> torch.Tensor:
    return empty(numel, dtype=like.dtype, device=like.device)


_MANY: dict[str, Callable[[list[Any], Any, Any], None]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
}
_ONE: dict[str, Callable[[Any, Any], None]] = {
    "all_reduce": lambda call, group: reduce.all_reduce(call.tensor, call.redop, group),
    "all_gather_into_tensor": lambda call, group: _gather_into(call.dst_tensor, call.tensor, group),
    "all_gather_single": lambda call, group: _gather_into(call.dst_tensor, call.tensor, group),
    "reduce_scatter_tensor": lambda call, group: _scatter_into(call.dst_tensor, call.tensor, call.redop, group),
    "reduce_scatter_single": lambda call, group: _scatter_into(call.dst_tensor, call.tensor, call.redop, group),
}
