"""bucketed(): many small collectives as few large ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.arena.use import empty
from safecomm.collectives import gather, reduce
from safecomm.collectives.call import REGIONS, Region, default_group, storages_of
from safecomm.ledger import LEDGER
from safecomm.sites import outside
from safecomm.streams import HOST

BUCKET_MB = 32
"""Size of a bucket, in MiB, where the caller says none: on 2 x H200 the time of 200 small all_reduces changes by less
than a tenth from 16 on."""

_ELEMENTWISE = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPS = frozenset({id(None), *(id(getattr(c10d.ReduceOp, name)) for name in _ELEMENTWISE)})
_current = LEDGER.current

_Call = tuple[Any, torch.Tensor, "torch.Tensor | None", Any]
"""c10d's function, input, output if there is another, and the reduce operation; the ledger's guards found it plain."""

_gather_into = getattr(gather, "all_gather_single", gather.all_gather_into_tensor)
_scatter_into = getattr(reduce, "reduce_scatter_single", reduce.reduce_scatter_tensor)


class Buckets(Region):
    """The calls of one group that are put off, until :func:`bucketed` ends or something else comes in between."""

    bucketed = True

    def __init__(self, group: Any, nbytes: int) -> None:
        super().__init__()
        self.group = group
        self.nbytes = nbytes
        self.calls: list[Any] = []  # ours are of _Call; c10d's own functions note theirs here too
        self.index: int | None = None  # device and stream of the calls that are put off
        self.stream = HOST

    def collect(
        self, group: Any, function: Any, tensor: torch.Tensor, other: torch.Tensor | None, op: Any, async_op: bool
    ) -> None:
        index = tensor.get_device()
        stream = HOST if index < 0 else _current(index)
        if stream != self.stream or index != self.index:
            if self.calls:
                self.flush()  # on the stream where they were called, which the caller has left
            self.index, self.stream = index, stream
        self.calls.append((function, tensor, other, op))

    def open(self) -> None:
        """Put off what is called from now on."""
        self.calls = _torch.world.pg_coalesce_state[self.group] = []
        REGIONS[self.group] = self

    def close(self) -> list[Any]:
        """Put off nothing any more, and return what was."""
        REGIONS.pop(self.group, None)
        _torch.world.pg_coalesce_state.pop(self.group, None)
        self.tensors.clear()
        calls, self.calls = self.calls, []
        return calls

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
        there: Any = contextlib.nullcontext()
        if self.stream != HOST and self.index is not None and _current(self.index) != self.stream:
            there = LEDGER.streams.using(self.index, self.stream)
        with there, torch.no_grad():
            for kind, run in itertools.groupby(calls, _kind):
                if kind is None:
                    for call in run:
                        _launch_one(call, self.group)
                    continue
                for bucket in _buckets(run, self.nbytes):
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
    of their bucket, or that are as large as a bucket, go on their own, and so do calls of ``torch.distributed``'s own
    functions.

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


def _kind(call: Any) -> Any:
    """Return what calls have in common that can share a bucket; None for those that go on their own."""
    if type(call) is not tuple:  # of c10d's: what it notes may be anything
        return None
    function, tensor, other, op = call
    if not tensor.is_contiguous() or not tensor.numel() or tensor.is_inference() or id(op) not in _OPS:
        return None
    if other is not None and (not other.is_contiguous() or not other.numel() or other.is_inference()):
        return None
    return function, id(op), tensor.dtype, tensor.get_device()


def _buckets(calls: Iterable[_Call], nbytes: int) -> Iterator[list[_Call]]:
    """Yield ``calls`` in their order, at most ``nbytes`` bytes together."""
    bucket: list[_Call] = []
    size = 0
    for call in calls:
        its = call[1].nbytes if call[2] is None else max(call[1].nbytes, call[2].nbytes)
        if bucket and size + its > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(call)
        size += its
    yield bucket


def _launch(bucket: list[_Call], group: Any) -> None:
    tensors = [call[1] for call in bucket]
    others = [call[2] for call in bucket if call[2] is not None]
    world = group.size()
    places = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors + others])
    apart = all(start + nbytes <= after for (start, nbytes), (after, _) in itertools.pairwise(places))
    name, op = bucket[0][0].__name__, bucket[0][3]
    if name == "all_reduce":
        fit = True
    else:
        small, large = (tensors, others) if op is None else (others, tensors)
        fit = all(one.numel() * world == other.numel() for one, other in zip(small, large, strict=True))
    if len(bucket) == 1 or not apart or not fit:
        for call in bucket:
            _launch_one(call, group)
        return
    if name == "all_reduce":
        _all_reduce(tensors, group, op)
    elif op is None:
        _all_gather(tensors, others, group)
    else:
        _reduce_scatter(tensors, others, group, op)
    index = tensors[0].get_device()
    if index >= 0 and not LEDGER.streams.all_at_home(_current(index), [start for start, _ in places]):
        frame = outside(("safecomm.collectives.", "contextlib."))
        LEDGER.trail("bucketed", group, index, storages_of(tensors + others), frame)


def _launch_one(call: Any, group: Any) -> None:
    if type(call) is not tuple:
        call = call.op, call.tensor, call.dst_tensor, call.redop
    function, tensor, other, op = call
    if function.__name__ == "all_reduce":
        reduce.all_reduce(tensor, op, group)
    elif op is None:
        _gather_into(other, tensor, group)
    else:
        _scatter_into(other, tensor, op, group)


def _all_reduce(tensors: list[torch.Tensor], group: Any, op: Any) -> None:
    flat = _flat(tensors[0], sum(map(torch.Tensor.numel, tensors)))
    parts = _parts(flat, tensors)
    _torch.copy_all(parts, tensors)
    reduce.all_reduce(flat, op, group)
    _torch.copy_all(tensors, parts)


def _all_gather(inputs: list[torch.Tensor], outputs: list[torch.Tensor], group: Any) -> None:
    sizes = [tensor.numel() for tensor in inputs]
    source = _flat(inputs[0], sum(sizes))
    _torch.copy_all(_parts(source, inputs), inputs)
    whole = _flat(inputs[0], sum(sizes) * group.size())
    _gather_into(whole, source, group)
    for output, part in zip(outputs, torch.split(whole.view(group.size(), -1), sizes, 1), strict=True):
        output.view(part.shape).copy_(part)


def _reduce_scatter(inputs: list[torch.Tensor], outputs: list[torch.Tensor], group: Any, op: Any) -> None:
    numel = sum(map(torch.Tensor.numel, outputs))
    whole = _flat(outputs[0], numel * group.size())
    rows = [tensor.view(group.size(), -1) for tensor in inputs]
    torch.cat(rows, 1, out=whole.view(group.size(), numel))
    part = _flat(outputs[0], numel)
    _scatter_into(part, whole, op, group)
    _torch.copy_all(outputs, _parts(part, outputs))


def _flat(like: torch.Tensor, numel: int) -> torch.Tensor:
    return empty(numel, dtype=like.dtype, device=like.device)


_PARTS: dict[Any, Sequence[torch.Tensor]] = {}
"""The parts of flat tensors of earlier buckets, by address and shapes. They own no memory, and are only used while the
flat tensor that is at their address now is alive: making 200 views takes as long as all the rest of a bucket."""


def _parts(flat: torch.Tensor, like: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return consecutive parts of ``flat``, shaped like the tensors of ``like``."""
    key = flat.data_ptr(), flat.dtype, flat.device, tuple([tensor.shape for tensor in like])
    parts = _PARTS.get(key)
    if parts is None:
        if len(_PARTS) >= 32:
            _PARTS.clear()
        # Not tensors of inference, which could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            alias = _torch.unowned(flat)
            if alias is flat:
                return _torch.unflatten(flat, like)
            del alias._memory  # type: ignore[attr-defined]
            parts = _PARTS[key] = _torch.unflatten(alias, like)
    return parts
