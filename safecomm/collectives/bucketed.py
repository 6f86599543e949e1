"""bucketed(): many small collectives as few large ones.

All ranks must launch the same buckets. So nothing here depends on what may differ between ranks that make the same
calls: profilers and modes, whether a group was used before, how a tensor lies in memory. Which tensors overlap does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, arguments
from safecomm.arena.staging import buffer
from safecomm.collectives import gates
from safecomm.collectives.block import Block
from safecomm.collectives.guards import COMPLEX, PLAIN
from safecomm.collectives.holding import Call, finish
from safecomm.collectives.table import BUCKETED, GATHER, OP_IDS, REDUCE, ROWS, SCATTER, Row, fits
from safecomm.collectives.takers import BUCKETS, default_group
from safecomm.collectives.tensors import all_on_current_stream, storages_of
from safecomm.core import captures
from safecomm.core.call_site import outside
from safecomm.core.call_site import place as place_of
from safecomm.core.holds import Pending, distinct_bytes
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST, capture_of
from safecomm.errors import SafecommError

BUCKET_MB = 32.0
"""MiB of a bucket where the caller says nothing."""

LARGEST_MB = float(1 << 42)
"""MiB that no bucket has; so many bytes are still a whole number of 63 bits."""

_gather_into = getattr(gates, ROWS["all_gather_single"].name)
_scatter_into = getattr(gates, ROWS["reduce_scatter_single"].name)
_current = LEDGER.current
_BETWEEN = ("safecomm.collectives.", "contextlib.")
_numel = torch.Tensor.numel
_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous

_Call = tuple[torch.Tensor, ...]
"""The tensors of a call, the output first. An all_reduce has one."""


class Batch:
    """Consecutive calls of one kind and operation: those that can share a bucket, or those that can't."""

    def __init__(self, row: Row | None, op: Any, shared: object) -> None:
        self.row = row
        self.kind: str = "" if row is None else row.kind
        self.op = op
        self.shared = shared  # what the calls have in common; None if each goes on its own
        self.outputs: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []  # none of an all_reduce
        # Whether the tensors of another call are like those of one that is in the batch, in all that deferring it
        # depends on. Two of them, because weights and biases take turns.
        self.guard = self.guard_before = _torch.unlike
        self._guards: dict[tuple[int, ...], Callable[..., bool]] = {}  # by the numbers of dimensions

    def add(self, tensors: _Call) -> None:
        """Add a call at the end."""
        self.outputs.append(tensors[0])
        self.inputs.extend(tensors[1:])
        dims = tuple([tensor.dim() for tensor in tensors])
        if len(self.outputs) == 1:  # the only one, maybe
            return
        guard = self._guards.get(dims)
        if guard is None or guard is self.guard or guard is self.guard_before:  # those have just said no
            guard = self._guards[dims] = _torch.look_alike(*tensors)
        self.guard, self.guard_before = guard, self.guard

    def calls(self) -> list[_Call]:
        """Return the tensors of each call."""
        return list(zip(self.outputs, self.inputs, strict=True) if self.inputs else zip(self.outputs))


class Buckets:
    """The calls of one group that are deferred, until :func:`bucketed` ends or something else comes in between."""

    def __init__(
        self, group: c10d.ProcessGroup, nbytes: int, site: str = "",
        block: weakref.ref[Callable[..., None]] | None = None,
    ) -> None:  # fmt: skip
        self.group = group
        self.nbytes = nbytes
        self.site = site
        self.since = time.perf_counter()
        self.block = block  # dead when the with statement is over, however it ended; None if it is not known
        self.world: int = group.size()
        self.batches: list[Batch] = []  # what is deferred
        self.batch: Batch = Batch(None, None, None)  # the last of them, if there are any
        self.index = self.stream = HOST  # device and stream of the calls that are deferred
        # Around the calls and whether the block has ended: others may be calling.
        self.lock: threading.Lock = threading.Lock()
        self.ended = False  # or has failed
        self.failure: BaseException | None = None

    def waiting(self) -> int:
        """Return how many calls are deferred."""
        return sum(len(batch.outputs) for batch in self.batches)

    def pending(self) -> list[Pending]:
        """Return what is deferred, as :func:`safecomm.pending` shows it: one for all calls, none if there are none."""
        with self.lock:
            tensors = [tensor for batch in self.batches for tensor in (*batch.outputs, *batch.inputs)]
        if not tensors:
            return []
        nbytes = distinct_bytes(storages_of(tensors))
        name, device = _torch.group_name(self.group), str(tensors[0].device)
        return [Pending("bucketed", nbytes, "deferred", name, device, self.site, time.perf_counter() - self.since)]

    def defer(self, row: Row, op: object, output: Any, given: Any = None) -> bool:
        """Defer a call that can be deferred; return False if it has to run now.

        ``given``: its input, None for an all_reduce.
        """
        with self.lock:
            batch = self.batch
            if (
                row is batch.row
                and op is batch.op
                and type(output) in PLAIN
                and not output.is_nested  # look_alike() must not be asked
                # Says no in a transform, which adds to what the dispatcher sees.
                and (
                    batch.guard(output) or batch.guard_before(output)
                    if batch.kind == REDUCE
                    else self._alike(batch, output, given)
                )
                and (self.index < 0 or _current(self.index) == self.stream)
                and not self.ended
            ):
                batch.outputs.append(output)
                if given is not None:
                    batch.inputs.append(given)
                return True
        return self._defer_other(row, op, output, given)

    def _alike(self, batch: Batch, output: torch.Tensor, given: Any) -> bool:
        if type(given) not in PLAIN or given.is_nested:
            return False
        return fits(batch.kind, output, given, self.world) and (
            batch.guard(output, given) or batch.guard_before(output, given)
        )

    def _defer_other(self, row: Row, op: object, output: Any, given: Any) -> bool:
        """As defer(), of a call that is not like those of the last batch."""
        tensors = (output,) if row.one else (output, given)
        for tensor in tensors:
            if (
                type(tensor) not in PLAIN
                or tensor.dtype in COMPLEX
                or tensor.layout is not torch.strided
                or tensor.is_nested
            ):
                return False
        if _torch.transform() is not None:  # what it wraps is gone when it ends
            return False
        if (index := _torch.index_of(output)) < HOST:
            return False
        stream = HOST if index < 0 else _current(index)
        shared = self._shared(row.kind, op, tensors)
        while True:
            with self.lock:
                if self.ended:
                    return False
                if not self.batches or (stream == self.stream and index == self.index):
                    self.index, self.stream = index, stream
                    if not self.batches or shared is None or shared != self.batch.shared:
                        self.batch = Batch(row, op, shared)
                        self.batches.append(self.batch)
                    self.batch.add(tensors)
                    return True
            with self.closed():  # on the stream where they were called, which the caller has left
                pass

    def _shared(self, kind: str, op: object, tensors: _Call) -> object:
        """Return what calls have in common that can share a bucket; None for those that go on their own."""
        if id(op) not in OP_IDS or not all(map(_torch.has_plain_keys, tensors)):
            return None
        first, last = tensors[0], tensors[-1]
        # What does not fit is left to c10d, which refuses it.
        if first.dtype is not last.dtype or first.device != last.device or not fits(kind, first, last, self.world):
            return None
        return kind, id(op), first.dtype, first.device

    def open(self) -> None:
        """Defer what is called from now on, unless the block is over or has failed."""
        if not self.ended and (self.block is None or self.block() is not None):
            BUCKETS[self.group] = self

    def close(self) -> None:
        """Defer nothing any more."""
        if BUCKETS.get(self.group) is self:
            del BUCKETS[self.group]

    def end(self) -> None:
        """Defer nothing any more, for good."""
        with self.lock:
            self.ended = True  # also for calls of other threads that are on their way
        self.close()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Launch what was deferred, and defer nothing inside."""
        self.close()
        try:
            self.launch()
            yield
        finally:
            self.open()

    def launch(self) -> None:
        """Launch what was deferred, in its order, on the stream where it was called. Not while more is deferred."""
        with self.lock:
            batches, self.batches = self.batches, []
            self.batch = Batch(None, None, None)
            index, stream = self.index, self.stream
        if not batches:
            return
        collected = _torch.open_regions().pop(self.group, None)  # of torch's own manager, which may collect none
        there: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if index >= 0 and _current(index) != stream:
            there = LEDGER.streams.using(index, stream)
        try:
            # In inference mode, where tensors of either kind can be written to.
            with _torch.undisturbed(), there, _torch.inference_mode(True):
                for batch in batches:
                    self._launch(batch)
        except BaseException as error:
            self.failure, self.ended = error, True
            raise
        finally:
            if collected is not None:
                _torch.open_regions()[self.group] = collected

    def _launch(self, batch: Batch) -> None:
        parts = [slice(0, 1)] if batch.shared is None else _buckets(batch, self.nbytes)
        for part in parts:
            outputs, inputs = batch.outputs[part], batch.inputs[part]
            if len(outputs) == 1:
                _launch_one(batch, outputs[0], *inputs, group=self.group)
            else:
                _launch(batch, outputs, inputs, self.group)


def bucketed(
    bucket_mb: float | str | os.PathLike[str] | None = None, group: c10d.ProcessGroup | None = None
) -> contextlib.AbstractContextManager[None]:
    """Launch the many small collectives that are called inside as few large ones.

    Synchronous ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` of ``group`` through safecomm
    are deferred: until the end of the block their outputs are not there, and their tensors are not to be changed or
    resized. At the end they have run, in their order, and each result is where its caller expects it. Consecutive calls
    of one kind, dtype and operation share a bucket: contiguous memory of the arena in use, ordinary memory where there
    is none, which they are copied into and out of. A call that writes where another one of its bucket reads or writes
    begins a new bucket.

    Whatever else is called on the group through safecomm, asynchronous calls, collectives of objects and
    :mod:`safecomm.functional` among it, runs when it is called, after what was deferred before it. What does not come
    through safecomm runs when it is called and waits for nothing that was deferred: ``torch.distributed``'s own
    functions where they are not patched, functional collectives, and compiled code, the calls of safecomm in it
    included. :func:`drain` and :func:`settle_before_capture` launch nothing; :func:`pending` shows what is deferred.

    All ranks have to make the same calls, with tensors of the same kinds, whose ranges of addresses overlap in the same
    way; else how they lie in memory may differ, and so may profilers and modes.

    ``bucket_mb``: the size of a bucket in MiB, 32 by default, or the file that ``python -m safecomm tune`` wrote, the
    same on all ranks. ``group``: by default the default group.

    Runs on the stream where the calls were made. The copies count as changes in place for autograd. They are made
    whatever autograd has to say of the outputs, in which ranks may differ: what gloo would refuse one by one is not
    refused. Sums of floating-point numbers over more than two ranks may be added in another order than one by one,
    because NCCL chooses by the size.

    An exception inside of the block goes on, and what was deferred is not launched.

    Raises
    ------
    ValueError
        If the group is already collecting calls, the size is not positive and finite, or the file is not one of
        ``tune``.
    OSError
        If the file can't be read.
    SafecommError
        At the end, if launching what was deferred has failed before, and the block went on: some results are not there.

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
        arguments.check("bucketed", arguments.is_a("MiB, or a path", int, float), bucket_mb=size)
    arguments.check("bucketed", arguments.GROUP, group=group)
    if not 0 < size < LARGEST_MB:
        raise ValueError(f"bucketed(): a bucket of {arguments.shown(size)} MiB; it has to be larger than 0, and finite")
    return _Bucketed(group, int(size * 2**20))


def _tuned(path: str) -> float:
    with open(path, encoding="utf-8") as file:
        try:
            size = json.load(file)["bucket_mb"]
            if type(size) not in (int, float):
                raise ValueError(f"{type(size).__name__} instead of MiB")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"bucketed(): {path} is not a file of python -m safecomm tune: {error!r}") from None
    if not 0 < size < LARGEST_MB:
        raise ValueError(f"bucketed(): {path} has a bucket that is not larger than 0, and finite")
    return float(size)


class _Bucketed(Block):
    """The context of one block of :func:`bucketed`."""

    _buckets: Buckets | None = None

    def __init__(self, group: c10d.ProcessGroup | None, nbytes: int) -> None:
        self._group = group
        self._nbytes = nbytes

    def _recreate_cm(self) -> _Bucketed:  # of a decorator, for each call
        return _Bucketed(self._group, self._nbytes)

    def __enter__(self) -> None:
        to = self._group or default_group()
        if to is None:
            raise ValueError("bucketed(): there is no default group; call init_process_group first")
        if to in BUCKETS or to in _torch.open_regions():
            raise ValueError(
                "bucketed(): the group is already collecting calls, in bucketed() or _coalescing_manager()"
            )
        if not isinstance(to, c10d.ProcessGroup):  # this rank is not in it: c10d says what it says for each call
            return
        self._close_by(functools.partial(BUCKETS.pop, to))
        self._buckets = Buckets(to, self._nbytes, place_of(outside(_BETWEEN)), self._watch)
        self._buckets.open()

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        buckets, self._buckets = self._buckets, None
        if buckets is None:
            return
        buckets.end()
        if kind is None:
            if buckets.failure is not None:
                raise SafecommError(
                    "bucketed(): what was deferred could not be launched, and the block went on; "
                    "not all results are there"
                ) from buckets.failure
            buckets.launch()
        self._watch = None


# --- what is launched -----------------------------------------------------------------------------------------


def _buckets(batch: Batch, limit: int) -> Iterator[slice]:
    """Yield which calls of ``batch`` go together: at most ``limit`` bytes, and none that overlaps with another."""
    outputs = [tensor.nbytes for tensor in batch.outputs]
    inputs = [tensor.nbytes for tensor in batch.inputs]
    large = inputs if batch.kind == SCATTER else outputs
    begin = 0
    if sum(large) > limit:
        size = 0
        for number, its in enumerate(large):
            size += its
            if size > limit and number > begin:
                part = slice(begin, number)
                yield from _apart(batch, part, outputs[part] + inputs[part])
                begin, size = number, its
    part = slice(begin, len(large))
    yield from _apart(batch, part, outputs[part] + inputs[part])


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of ``tensor``, and the one after the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _disjoint(tensors: list[torch.Tensor], nbytes: list[int]) -> bool:
    """Return whether no two of ``tensors`` overlap."""
    starts = list(map(_data_ptr, tensors))
    if all(map(_is_contiguous, tensors)):
        ends = list(map(operator.add, starts, nbytes))
    else:
        ends = [_extent(tensor)[1] for tensor in tensors]
    # Where two overlap, at least two have begun and not ended, so number k ends after number k + 1 has begun. Numbers
    # are sorted faster than pairs.
    starts.sort()
    ends.sort()
    return all(map(operator.le, ends, starts[1:]))


def _apart(batch: Batch, part: slice, nbytes: list[int]) -> Iterator[slice]:
    """Yield pieces of ``part`` of the calls in which no two overlap. The tensors of one call may: they are staged."""
    if _disjoint(batch.outputs[part] + batch.inputs[part], nbytes):
        yield part
        return
    calls = batch.calls()[part]
    places = sorted([(*_extent(tensor), number) for number, call in enumerate(calls) for tensor in call])
    furthest, whose = 0, -1
    for first, last, number in places:
        if first < min(furthest, last) and number != whose:
            break
        if last > furthest:
            furthest, whose = last, number
    else:
        yield part
        return
    begin = part.start
    taken: list[tuple[int, int, bool]] = []
    for place, call in enumerate(calls, begin):
        mine = [(*_extent(tensor), number == 0) for number, tensor in enumerate(call)]  # the first is written to
        if any(
            first < until and since < last and (writes or written)
            for first, last, writes in mine
            for since, until, written in taken
        ):
            yield slice(begin, place)
            begin, taken = place, []
        taken += mine
    yield slice(begin, part.stop)


def _launch_one(
    batch: Batch, output: torch.Tensor, given: torch.Tensor | None = None, *, group: c10d.ProcessGroup
) -> None:
    if batch.kind == REDUCE:
        gates.all_reduce(output, batch.op, group)
    elif batch.kind == GATHER:
        _gather_into(output, given, group)
    else:
        _scatter_into(output, given, batch.op, group)


def _launch(batch: Batch, outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: c10d.ProcessGroup) -> None:
    if batch.kind == REDUCE:
        _all_reduce(outputs, batch.op, group)
    elif batch.kind == GATHER:
        _all_gather(outputs, inputs, group)
    else:
        _reduce_scatter(outputs, inputs, batch.op, group)
    if captures.RECORDING:
        captures.note("bucketed", group, outputs + inputs, outside(_BETWEEN))
    if not all_on_current_stream(outputs + inputs):
        index = _torch.index_of(outputs[0])
        finish(Call(BUCKETED, group, outputs + inputs, index, outside(_BETWEEN)), None)


def _all_reduce(
    tensors: list[torch.Tensor], op: c10d.ReduceOp | c10d.ReduceOp.RedOpType, group: c10d.ProcessGroup
) -> None:
    lines = _lines(tensors)
    flat = _flat(tensors[0], sum(map(_numel, tensors)))
    _pack(flat, tensors, lines)
    gates.all_reduce(flat, op, group)
    _unpack(flat, tensors, lines)


def _all_gather(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: c10d.ProcessGroup) -> None:
    sizes = list(map(_numel, inputs))
    source = _flat(inputs[0], sum(sizes))
    _pack(source, inputs, _lines(inputs))
    whole = _flat(inputs[0], sum(sizes) * group.size())
    _gather_into(whole, source, group)
    for output, part in zip(outputs, torch.split(whole.view(group.size(), sum(sizes)), sizes, 1), strict=True):
        if output.is_contiguous():
            output.view(part.shape).copy_(part)
        else:
            output.copy_(part.reshape(output.shape))


def _reduce_scatter(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: c10d.ReduceOp, group: c10d.ProcessGroup
) -> None:
    numel, world = sum(map(_numel, outputs)), group.size()
    whole = _flat(outputs[0], numel * world)
    rows = [tensor.reshape(world, output.numel()) for tensor, output in zip(inputs, outputs, strict=True)]
    torch.cat(rows, 1, out=whole.view(world, numel))
    part = _flat(outputs[0], numel)
    _scatter_into(part, whole, op, group)
    _unpack(part, outputs, _lines(outputs))


def _lines(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return ``tensors`` with one dimension each; None if one of them has no such view, because it is not contiguous.

    Lines are copied by fewer and larger kernels than tensors of any shape.
    """
    try:
        return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
    except RuntimeError:
        return None


def _pack(flat: torch.Tensor, tensors: list[torch.Tensor], lines: list[torch.Tensor] | None) -> None:
    """Copy ``tensors`` into ``flat``."""
    if lines is None:
        _torch.copy_all(_torch.unflatten(flat, tensors), tensors)
    else:
        torch.cat(lines, out=flat)


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor], lines: list[torch.Tensor] | None) -> None:
    """Copy ``flat`` into ``tensors``."""
    index = _torch.index_of(flat)
    # The copies of lines take addresses from memory of the host that is given back at once, so a graph can't have them;
    # and of nothing at all, they divide by 0 on a GPU (torch 2.11).
    captured = index >= 0 and capture_of(LEDGER.streams, _current(index))
    if lines is None or captured or not flat.numel():
        _torch.copy_all(tensors, _torch.unflatten(flat, tensors))
    else:
        torch.split_with_sizes_copy(flat, list(map(_numel, lines)), out=lines)
        if index >= 0:  # its kernel for CUDA does not tell autograd (torch 2.11); the one for the CPU does
            _torch.increment_versions([tensor for tensor in tensors if not tensor.is_inference()])


def _flat(like: torch.Tensor, numel: int) -> torch.Tensor:
    with _torch.inference_mode(False):  # gloo's threads write to it outside of that
        return buffer((numel,), like)
