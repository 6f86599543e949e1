"""bucketed(): many small collectives of one kind as few large ones."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.arena.staging import buffer
from safecomm.collectives import gather, reduce
from safecomm.collectives.call import COLLECTORS, PLAIN, at_home, default_group, storages_of
from safecomm.ledger import LEDGER
from safecomm.streams import HOST

DEFAULT_MB = 25.0
"""Bucket size where nothing else is said: what DistributedDataParallel starts from."""

VARIABLE = "SAFECOMM_BUCKETS"
"""Names the file that ``python -m safecomm tune`` has written."""

_gather_into = getattr(gather, "all_gather_single", gather.all_gather_into_tensor)
_scatter_into = getattr(reduce, "reduce_scatter_single", reduce.reduce_scatter_tensor)

_thread_id = threading.get_ident

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}


def read_tuning(path: str | os.PathLike[str]) -> float:
    """Return the bucket size in MiB that a file of ``python -m safecomm tune`` recommends.

    Raises
    ------
    ValueError
        If the file is none of that kind.
    """
    try:
        size = json.loads(Path(path).read_text())["bucket_mb"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file of python -m safecomm tune: {error!r}") from None
    return _checked(size, f"bucket_mb of {path}")


def _checked(size: Any, what: str) -> float:
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < 1 << 20:
        raise ValueError(f"{what}={size!r}: expected a size in MiB, greater than 0")
    return float(size)


class _Bucket:
    """Calls of one kind on one group, and then the collective that they became."""

    def __init__(self, region: bucketed, kind: str, op: Any, group: Any, index: int) -> None:
        self.region = region
        self.kind = kind
        self.op = op
        self.group = group
        self.index = index
        self.outputs: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []  # for all_reduce, none: they are the outputs
        self.nbytes = 0
        self.views: list[torch.Tensor] = []  # of the flat result, one for each output
        self.work: Any = None
        self.done = False

    def launch(self) -> None:
        """Pack, and launch the one collective."""
        if self.work is not None or self.done:
            return
        group = self.group
        with self.region.apart():
            if self.kind == "all_reduce":
                flat = buffer((sum(one.numel() for one in self.outputs),), self.outputs[0])
                self.views = list(_torch.unflatten(flat, self.outputs))
                _torch.foreach_copy(self.views, self.outputs)
                self.work = reduce.all_reduce(flat, self.op, group, True)
                return
            world = group.size()
            small, large = (self.inputs, self.outputs) if self.kind == "all_gather" else (self.outputs, self.inputs)
            sizes = [one.numel() for one in small]
            one = buffer((sum(sizes),), small[0])
            every = buffer((world, sum(sizes)), small[0])
            parts = list(torch.split(one, sizes))
            rows = list(torch.split(every, sizes, 1))
            if self.kind == "all_gather":
                _torch.foreach_copy(parts, [source.view(-1) for source in small])
                self.views = rows
                self.work = _gather_into(every.view(-1), one, group, True)
            else:
                _torch.foreach_copy(rows, [source.view(world, -1) for source in large])
                self.views = parts
                self.work = _scatter_into(one, every.view(-1), self.op, group, True)

    def finish(self) -> None:
        """Wait, and put the results where the callers expect them."""
        if self.done:
            return
        self.launch()
        self.work.wait()
        outputs = self.outputs
        if self.kind != "all_reduce":
            outputs = [output.view(view.shape) for output, view in zip(outputs, self.views, strict=True)]
        _torch.foreach_copy(outputs, self.views)
        if self.index != HOST and not at_home(self.outputs + self.inputs):
            storages = storages_of(self.outputs + self.inputs)
            LEDGER.trail(f"bucketed {self.kind}", self.group, self.index, storages, _outside())
        self.forget()

    def forget(self) -> None:
        """Let go of everything."""
        self.done = True
        self.outputs, self.inputs, self.views, self.work = [], [], [], None


class BucketedWork:
    """The handle of an asynchronous call inside of :class:`bucketed`: of the large collective that it became part of.

    Waiting for it launches that one, if it was not, and puts all of its results in place. Safe to drop: leaving the
    region waits. ``isinstance(work, torch.distributed.Work)`` is true.
    """

    __slots__ = ("_bucket",)
    __class__ = property(lambda self: c10d.Work)

    def __init__(self, bucket: _Bucket) -> None:
        self._bucket = bucket

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the call (CUDA), or block until it is over (CPU)."""
        self._bucket.finish()
        return True

    def is_completed(self) -> bool:
        """Return whether the results are in place."""
        return self._bucket.done


class bucketed(contextlib.ContextDecorator):  # noqa: N801
    """Inside of it, small ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` calls are collected.

    Calls of the same kind, type, operation and group become one large collective on a contiguous buffer, of the arena
    in use where there is one. It is launched when ``bucket_mb`` MiB are collected, when a tensor comes a second time,
    before any call that is not collected, when an asynchronous call's handle is waited for, and on leaving.

    The results are where the callers expect them when the region is left, or after ``wait()`` of an asynchronous call.
    Until then the arguments must not be read or written. All ranks have to make the same calls in the same order, as
    without it. Sums can be rounded in another order than one by one, as the algorithm depends on the size.

    ``bucket_mb``: by default what the file says that the environment's ``SAFECOMM_BUCKETS`` names and
    ``python -m safecomm tune`` has written, and without one 25. Larger tensors are not collected. Only for the thread
    that entered it. Left by an exception, it launches nothing more: what was collected is not reduced.

    Raises
    ------
    ValueError
        For a size that is none, and a file that is none.

    Examples
    --------
    >>> with bucketed(bucket_mb=8):
    ...     for gradient in gradients:
    ...         safecomm.all_reduce(gradient)
    """

    def __init__(self, bucket_mb: float | None = None) -> None:
        if bucket_mb is None:
            path = os.environ.get(VARIABLE)
            bucket_mb = read_tuning(path) if path else DEFAULT_MB
        self.bucket_mb = _checked(bucket_mb, "bucketed: bucket_mb")
        self._limit = int(self.bucket_mb * (1 << 20))
        self._thread = 0
        self._open: dict[Any, _Bucket] = {}
        self._running: list[_Bucket] = []
        self._ranges: list[tuple[int, int]] = []  # addresses of all that is collected and not finished, sorted
        self._inside = contextlib.ExitStack()

    def _recreate_cm(self) -> bucketed:
        return bucketed(self.bucket_mb)

    def __enter__(self) -> bucketed:
        self._thread = threading.get_ident()
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(LEDGER.diverted())
        COLLECTORS.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._inside:
                if kind is None:
                    self._settle()
                    return
                for bucket in self._running:
                    with contextlib.suppress(Exception):
                        bucket.finish()
        finally:
            COLLECTORS.remove(self)
            for bucket in self._open.values():
                bucket.forget()
            self._open.clear()
            self._running.clear()
            self._ranges.clear()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Launch without being collected."""
        before, self._thread = self._thread, 0
        try:
            yield
        finally:
            self._thread = before

    def _launch(self, key: Any) -> None:
        bucket = self._open.pop(key)
        bucket.launch()
        self._running.append(bucket)

    def _settle(self) -> None:
        """Launch all that was collected, and put all results in place."""
        for key in tuple(self._open):
            self._launch(key)
        for bucket in self._running:
            bucket.finish()
        self._running.clear()
        self._ranges.clear()

    def take(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Collect a call, if it can be; otherwise launch what was collected, so that the order stays."""
        if _thread_id() != self._thread:
            return NotImplemented
        if name == "all_reduce" and len(args) == 1 and self._add(args[0], **kwargs):
            return None
        kind = _KINDS.get(name)
        taken = NotImplemented if kind is None else self._collect(kind, args, kwargs)
        if taken is NotImplemented and (self._open or self._running):
            self._settle()
        return taken

    def _add(self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> bool:
        """Put a plain call into a bucket that is open for its like, as ``_collect`` would, in half the time."""
        if type(tensor) not in PLAIN or async_op or tensor.requires_grad:
            return False
        to = _torch.world.default_pg if group is None else group
        bucket = self._open.get(("all_reduce", id(op), id(to), tensor.dtype, tensor.get_device()))
        if bucket is None or bucket.done or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
        nbytes = tensor.nbytes
        if not 0 < nbytes <= self._limit - bucket.nbytes or _torch.dispatch_modes():
            return False
        start = tensor.data_ptr()
        ranges = self._ranges
        place = bisect.bisect(ranges, (start,))
        if (place and ranges[place - 1][1] > start) or (place < len(ranges) and ranges[place][0] < start + nbytes):
            return False
        ranges.insert(place, (start, start + nbytes))
        bucket.outputs.append(tensor)
        bucket.nbytes += nbytes
        return True

    def _collect(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op, group, asynchronous = kwargs.get("op"), kwargs.get("group"), kwargs.get("async_op", False)
        if kind == "all_reduce":
            if len(args) != 1:
                return NotImplemented
            output = source = args[0]
        else:
            if len(args) != 2:
                return NotImplemented
            output, source = args
        if (
            type(output) not in PLAIN
            or type(source) not in PLAIN
            or output.requires_grad
            or source.requires_grad
            or source.dtype.is_complex
            or output.dtype is not source.dtype
            or output.device != source.device
            or source.layout is not torch.strided
            or not 0 < source.nbytes <= self._limit
            or not (source.is_cuda or source.is_cpu)
            or _torch.dispatch_modes()
        ):
            return NotImplemented
        to = default_group() if group is None else group
        if not isinstance(to, c10d.ProcessGroup) or to in _torch.world.pg_coalesce_state:
            return NotImplemented
        if source is not output:
            small, large = (source, output) if kind == "all_gather" else (output, source)
            if large.numel() != small.numel() * to.size() or not (small.is_contiguous() and large.is_contiguous()):
                return NotImplemented
        key = (kind, id(op), id(to), source.dtype, source.get_device())
        if not self._claim(output, source):
            self._settle()
            self._claim(output, source)
        bucket = self._open.get(key)
        if bucket is not None and (bucket.done or bucket.nbytes + source.nbytes > self._limit):
            self._launch(key)  # nothing is left to do of one that was waited for
            bucket = None
        if bucket is None:
            bucket = self._open[key] = _Bucket(self, kind, op, to, source.get_device())
        bucket.outputs.append(output)
        if source is not output:
            bucket.inputs.append(source)
        bucket.nbytes += source.nbytes
        return BucketedWork(bucket) if asynchronous else None

    def _claim(self, output: torch.Tensor, source: torch.Tensor) -> bool:
        """Note the memory of a call; False if some of it is that of a call whose result is not in place yet."""
        spans = [_range(output)]
        if source is not output:
            span = _range(source)
            if spans[0][0] < span[1] and span[0] < spans[0][1]:  # in place
                spans = [(min(spans[0][0], span[0]), max(spans[0][1], span[1]))]
            else:
                spans.append(span)
        ranges = self._ranges
        places = [bisect.bisect(ranges, span) for span in spans]
        for place, (start, end) in zip(places, spans, strict=True):
            if (place and ranges[place - 1][1] > start) or (place < len(ranges) and ranges[place][0] < end):
                return False
        for span in spans:
            bisect.insort(ranges, span)
        return True


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of ``tensor``, and the one past its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + reach * tensor.itemsize


def _outside() -> types.FrameType:
    """Return the innermost frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("safecomm.") and frame.f_back is not None:
        frame = frame.f_back
    return frame
