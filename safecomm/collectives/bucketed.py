"""bucketed(): many small collectives as few large ones.

All ranks must launch the same buckets. So nothing here depends on what may differ between ranks that make the same
calls: profilers and modes, whether a group was used before, how a tensor lies in memory. Which tensors overlap does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, captures
from safecomm.arena.use import empty
from safecomm.collectives import gather, reduce
from safecomm.collectives.call import BUCKETS, COMPLEX, OPS, PLAIN, default_group, storages_of
from safecomm.errors import SafecommError
from safecomm.ledger import LEDGER
from safecomm.sites import outside
from safecomm.streams import HOST

BUCKET_MB = 32.0
"""MiB of a bucket where the caller says nothing."""

_KINDS = {
    "all_reduce": "reduce",
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",
    "_all_gather_base": "gather",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_single": "scatter",
    "_reduce_scatter_base": "scatter",
}
_OPS = frozenset({id(None), *map(id, OPS)})
_gather_into = getattr(gather, "all_gather_single", gather.all_gather_into_tensor)
_scatter_into = getattr(reduce, "reduce_scatter_single", reduce.reduce_scatter_tensor)
_current = LEDGER.current

_Call = tuple[str, list[torch.Tensor], Any]
"""What kind of call, its tensors (the output first), and the reduce operation."""


class Buckets:
    """The calls of one group that are put off, until :func:`bucketed` ends or something else comes in between."""

    def __init__(self, group: Any, nbytes: int) -> None:
        self.group = group
        self.nbytes = nbytes
        self.calls: list[_Call] = []
        self.index = self.stream = HOST  # device and stream of the calls that are put off
        self.regions = _torch.world.pg_coalesce_state  # of torch's own manager, and of ours
        self.lock = threading.Lock()  # around the calls and whether the block is over: others may be calling
        self.over = False
        self.failure: BaseException | None = None

    def put_off(self, name: str, tensors: list[Any], op: Any) -> bool:
        """Note a call of one of ``_KINDS`` for later; False if it has to run now."""
        if self.group in self.regions:
            return False
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.dtype in COMPLEX or tensor.layout is not torch.strided:
                return False
        if _torch.transform_level() is not None:  # what it wraps is gone when it ends
            return False
        index = tensors[0].get_device()
        stream = HOST if index < 0 else _current(index)
        if self.calls and (stream != self.stream or index != self.index):
            with self.closed():  # on the stream where they were called, which the caller has left
                pass
        with self.lock:
            if self.over or self.failure is not None:
                return False
            self.index, self.stream = index, stream
            self.calls.append((_KINDS[name], tensors, op))
        return True

    def open(self) -> None:
        """Put off what is called from now on, unless the block is over or has failed."""
        if not self.over and self.failure is None:
            BUCKETS[self.group] = self

    def close(self) -> None:
        """Put off nothing any more."""
        if BUCKETS.get(self.group) is self:
            del BUCKETS[self.group]

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Launch what was put off, and put nothing off inside."""
        self.close()
        try:
            self.launch()
            yield
        finally:
            self.open()

    def launch(self) -> None:
        """Launch what was put off, in its order, on the stream where it was called. Not while more is put off."""
        with self.lock:
            calls, self.calls = self.calls, []
        if not calls:
            return
        collected = self.regions.pop(self.group, None)  # by torch's own manager, which is to collect none of ours
        there: Any = contextlib.nullcontext()
        if self.index >= 0 and _current(self.index) != self.stream:
            there = LEDGER.streams.using(self.index, self.stream)
        try:
            # In inference mode, where tensors of either kind can be written to.
            with _torch.undisturbed(), there, torch.inference_mode():
                world = self.group.size()
                for kind, run in itertools.groupby(calls, lambda call: _shared(call, world)):
                    for bucket in _buckets(run, self.nbytes):
                        if kind is None or len(bucket) == 1:
                            _launch_one(bucket, self.group)
                        else:
                            _launch(bucket, self.group)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            if collected is not None:
                self.regions[self.group] = collected


def bucketed(
    bucket_mb: float | str | os.PathLike[str] | None = None, group: Any = None
) -> contextlib.AbstractContextManager[None]:
    """Launch the many small collectives that are called inside as few large ones.

    Synchronous ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` of ``group`` through safecomm
    are put off: until the end of the block their outputs are not there, and their tensors are not to be changed or
    resized. At the end they have run, in their order, and each result is where its caller expects it. Consecutive calls
    of one kind, dtype and operation share a bucket: contiguous memory of the arena in use, ordinary memory where there
    is none, which they are copied into and out of. A call that writes where another one of its bucket reads or writes
    begins a new bucket.

    Whatever else is called on the group through safecomm, asynchronous calls and :mod:`safecomm.functional` among it,
    runs when it is called, after what was put off before it. What does not come through safecomm runs when it is
    called and waits for nothing that was put off: ``torch.distributed``'s own functions where they are not patched,
    functional collectives, and compiled code, the calls of safecomm in it included.

    All ranks have to make the same calls, with tensors of the same kinds, whose ranges of addresses overlap in the same
    way; else how they lie in memory may differ, and so may profilers and modes.

    ``bucket_mb``: the size of a bucket in MiB, 32 by default, or the file that ``python -m safecomm tune`` wrote, the
    same on all ranks. ``group``: by default the default group.

    Runs on the stream where the calls were made. While a block is open, other calls of the process take some
    microseconds more. The copies count as changes in place for autograd. Sums of floating-point numbers over more than
    two ranks may be added in another order than one by one, because NCCL chooses by the size.

    Raises
    ------
    ValueError
        If the group is already collecting calls, the size is not positive and finite, or the file is not one of
        ``tune``.
    OSError
        If the file can't be read.
    SafecommError
        At the end, if launching what was put off has failed before, and the block went on: some results are not there.

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
    if not 0 < size < float("inf"):
        raise ValueError(f"bucketed(): a bucket of {size} MiB; it has to be larger than 0, and finite")
    return _bucketed(group, int(size * 2**20))


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
    if to in BUCKETS or to in _torch.world.pg_coalesce_state:
        raise ValueError("bucketed(): the group is already collecting calls, in bucketed() or _coalescing_manager()")
    if not isinstance(to, c10d.ProcessGroup):  # this rank is not in it: c10d says what it says for each call
        yield
        return
    buckets = Buckets(to, nbytes)
    with LEDGER.diverted():
        buckets.open()
        try:
            yield
        finally:
            with buckets.lock:
                buckets.over = True  # also for calls of other threads that are on their way
            buckets.close()
        if buckets.failure is not None:
            raise SafecommError(
                "bucketed(): what was put off could not be launched, and the block went on; not all results are there"
            ) from buckets.failure
        buckets.launch()


# --- what is launched -----------------------------------------------------------------------------------------


def _shared(call: _Call, world: int) -> Any:
    """Return what calls have in common that can share a bucket; None for those that go on their own."""
    kind, tensors, op = call
    if id(op) not in _OPS or not all(map(_torch.has_plain_keys, tensors)):
        return None
    first = tensors[0]
    if kind != "reduce":
        small, large = (tensors[1], first) if kind == "gather" else (first, tensors[1])
        # What does not fit, c10d is to refuse.
        if small.dtype is not large.dtype or small.device != large.device or large.numel() != world * small.numel():
            return None
    return kind, id(op), first.dtype, first.get_device()


def _buckets(calls: Iterable[_Call], nbytes: int) -> Iterator[list[_Call]]:
    """Yield ``calls`` in their order, at most ``nbytes`` bytes together and none that overlaps with another."""
    bucket: list[_Call] = []
    size = 0
    for call in calls:
        its = max([tensor.nbytes for tensor in call[1]])
        if bucket and size + its > nbytes:
            yield from _apart(bucket)
            bucket, size = [], 0
        bucket.append(call)
        size += its
    yield from _apart(bucket)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of ``tensor``, and the one past the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _apart(bucket: list[_Call]) -> Iterator[list[_Call]]:
    """Yield parts of ``bucket`` in which no two calls overlap. The tensors of one call may: they are staged."""
    places = sorted([(*_extent(tensor), number) for number, call in enumerate(bucket) for tensor in call[1]])
    reached, whose = 0, -1
    for start, end, number in places:
        if start < min(reached, end) and number != whose:
            break
        if end > reached:
            reached, whose = end, number
    else:
        yield bucket
        return
    part: list[_Call] = []
    taken: list[tuple[int, int, bool]] = []
    for call in bucket:
        mine = [(*_extent(tensor), number == 0) for number, tensor in enumerate(call[1])]  # the first is written to
        if any(
            start < until and since < end and (writes or written)
            for start, end, writes in mine
            for since, until, written in taken
        ):
            yield part
            part, taken = [], []
        part.append(call)
        taken += mine
    yield part


def _launch_one(bucket: list[_Call], group: Any) -> None:
    for kind, tensors, op in bucket:
        if kind == "reduce":
            reduce.all_reduce(tensors[0], op, group)
        elif kind == "gather":
            _gather_into(tensors[0], tensors[1], group)
        else:
            _scatter_into(tensors[0], tensors[1], op, group)


def _launch(bucket: list[_Call], group: Any) -> None:
    kind, _, op = bucket[0]
    outputs = [call[1][0] for call in bucket]
    inputs = [call[1][-1] for call in bucket]
    if kind == "reduce":
        _all_reduce(outputs, group, op)
    elif kind == "gather":
        _all_gather(outputs, inputs, group)
    else:
        _reduce_scatter(outputs, inputs, group, op)
    if captures.RECORDING:
        captures.note("bucketed", group, outputs + inputs, outside(("safecomm.collectives.", "contextlib.")))
    index = outputs[0].get_device()
    if index >= 0:
        places = sorted({tensor.data_ptr() for tensor in outputs + inputs if tensor.numel()})
        if not LEDGER.streams.all_at_home(_current(index), places):
            frame = outside(("safecomm.collectives.", "contextlib."))
            LEDGER.trail("bucketed", group, index, storages_of(outputs + inputs), frame)


def _all_reduce(tensors: list[torch.Tensor], group: Any, op: Any) -> None:
    flat = _flat(tensors[0], sum(map(torch.Tensor.numel, tensors)))
    parts = _torch.unflatten(flat, tensors)
    _torch.copy_all(parts, tensors)
    reduce.all_reduce(flat, op, group)
    _torch.copy_all(tensors, parts)


def _all_gather(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any) -> None:
    sizes = [tensor.numel() for tensor in inputs]
    source = _flat(inputs[0], sum(sizes))
    _torch.copy_all(_torch.unflatten(source, inputs), inputs)
    whole = _flat(inputs[0], sum(sizes) * group.size())
    _gather_into(whole, source, group)
    for output, part in zip(outputs, torch.split(whole.view(group.size(), sum(sizes)), sizes, 1), strict=True):
        output.copy_(part.reshape(output.shape))


def _reduce_scatter(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, op: Any) -> None:
    numel, world = sum(map(torch.Tensor.numel, outputs)), group.size()
    whole = _flat(outputs[0], numel * world)
    rows = [tensor.reshape(world, output.numel()) for tensor, output in zip(inputs, outputs, strict=True)]
    torch.cat(rows, 1, out=whole.view(world, numel))
    part = _flat(outputs[0], numel)
    _scatter_into(part, whole, op, group)
    _torch.copy_all(outputs, _torch.unflatten(part, outputs))


def _flat(like: torch.Tensor, numel: int) -> torch.Tensor:
    with torch.inference_mode(False):  # gloo's threads write to it outside of that
        return empty(numel, dtype=like.dtype, device=like.device)
