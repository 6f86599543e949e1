"""invariant(): reductions whose bits do not depend on how they are made.

All reductions of c10d come down to a few operators, whoever calls them. While anybody wants it, these have a kernel of
ours, which reduces in the order of the ranks; and the gates leave their direct way, which passes by the operators.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch, arguments
from safecomm.collectives.beside import beside
from safecomm.collectives.holding import Call, finish
from safecomm.collectives.rank_order import NOT_HERE, OPERATIONS, SUMS, RankOrder, flattened, write_back
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES
from safecomm.collectives.table import OPS, ROWS, Row
from safecomm.collectives.takers import BUCKETS, ENGINES, now, take
from safecomm.core.call_site import place, program
from safecomm.errors import InvarianceError
from safecomm.interception import replacing


class invariant(contextlib.ContextDecorator):  # noqa: N801
    """Inside of it, an element of a reduced result depends on the ranks' values of that element, and on no path.

    Nothing else matters (S11): not the tensor's size, nor the place in it; not whether the call is synchronous, in a
    CUDA graph, compiled, coalesced, or by a kernel of :func:`low_latency`; no link, host or order of the cards; and no
    version or variable of NCCL. The operation, the type and the number of ranks do. A CPU on gloo and a GPU get the
    same bits; of NaN, which only is one.

    ``all_reduce``, ``reduce_scatter`` in all forms and ``reduce`` of ``group`` (None: of all groups), whoever calls
    them: safecomm, ``torch.distributed`` itself, DDP, functional collectives and compiled code. Rank 0's value comes
    first, then rank 1's. fp16 and bf16 are added in fp32 and rounded once; ``AVG`` divides the sum once; ``MAX`` and
    ``MIN`` prefer numbers to NaN, and tell the zeros apart. Sums of integers, and collectives that only move data, have
    one result anyway and stay the backend's.

    Tensors of any size, strided or complex too (those for SUM and AVG). Where :func:`low_latency` is on, its kernels
    reduce, on the current stream, also what is asynchronous or larger than its limits. Otherwise the backend moves what
    is added here, in turns of 64 MiB, each of which takes up to three times its bytes more, what it receives of the
    arena in use; a tensor with gaps is copied. Then a synchronous call runs on the current stream; an asynchronous one
    on a stream of its group's own on a GPU, and on the CPU it blocks the host.

    All ranks of a group have to be inside together. For all threads, because backward runs in others. Nests. A
    decorator too.

    Raises
    ------
    InvarianceError
        On entering, where torch does not let its reductions be replaced. At a call, for what can't be kept: sparse
        tensors, those whose elements share memory, and sums multiplied before (``PREMUL_SUM``). Nothing was launched.
    SafecommError
        On entering, if ``SAFECOMM_REPLACE=0`` forbids it, or if a coalescing region of a group is open. What
        ``bucketed()`` has deferred is launched as it begins and ends.

    Examples
    --------
    >>> with safecomm.invariant():
    ...     dist.all_reduce(tensor)
    """

    def __init__(self, group: c10d.ProcessGroup | None = None) -> None:
        if torch.compiler.is_dynamo_compiling():  # which runs a frame that raises as it is
            raise InvarianceError("invariant() can't be traced.")
        arguments.check("invariant", arguments.GROUP, group=group)
        self._group = group
        self._entered: list[object] = []

    @_torch.unfollowed
    def __enter__(self) -> invariant:
        replacing.ask("invariant()")
        other = [one for one in _torch.all_groups() if type(one) is not c10d.ProcessGroup]
        why = NOT_HERE or _torch.why_not_replaced()
        if other and not why:  # its methods are called in place of the operators
            why = f"group {_torch.group_name(other[0])!r} is of the program's own class, {type(other[0]).__name__}"
        if why:
            raise InvarianceError(f"invariant(): {why}. Nothing was changed.")
        self._launch_deferred()
        user = object()
        self._entered.append(user)
        try:
            _KERNELS.enter(user, self._group)
            _plan_again()
        except BaseException:
            self.__exit__()
            raise
        return self

    @_torch.unfollowed
    def __exit__(self, *error: object) -> None:
        try:
            self._launch_deferred()
        finally:
            _KERNELS.leave(self._entered[-1])
            self._entered.pop()
            _plan_again()

    def _launch_deferred(self) -> None:
        """Launch what ``bucketed()`` has deferred, so that each call is reduced as it is where it was made."""
        for group in [*BUCKETS, *REGIONS]:  # in the order in which they were opened, which ranks share
            if self._group is None or group is self._group:
                with now("invariant()", group):  # which raises for a region
                    pass


def is_invariant(group: object) -> bool:
    """Return whether the reductions of ``group`` are made so now."""
    return any(one is None or one is group for one in list(_KERNELS.users.values()))


def _install(replaced: _torch.Replaced, _: object) -> None:
    off = ROUTES.off()
    off.__enter__()
    replaced.callback(off.__exit__, None, None, None)
    for name in _torch.REDUCTIONS:
        replaced.callback(_torch.replace_reduction(name, _reduction(name)).remove)


_KERNELS = _torch.Shared(_install)


def _plan_again() -> None:
    """Let the engines decide anew which calls they run."""
    for engine in list(ENGINES.values()):
        engine.plan_again()


_ROWS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single",
}
"""The calls that the operators are of."""


def _reduction(name: str) -> Callable[..., object]:
    """Return our kernel of an operator, which is given torch's, and what that is given."""
    signature, row = _torch.REDUCTIONS[name], ROWS[_ROWS[name]]
    at = signature.before
    flag = at + 2 + signature.between

    def kernel(original: Callable[..., object], *args: Any) -> object:
        group, op = _torch.unboxed(args[at], args[at + 1])
        if not is_invariant(group) or group.size() == 1:
            return original(*args)
        calls = _calls(args[:at])
        if not _is_ours(row, group, calls, op, several="coalesced" in name):
            return original(*args)
        given = args[flag:]  # torch leaves out what is as it is by default
        asynchronous = given[0] if given else True
        timeout = timedelta(milliseconds=given[1]) if len(given) > 1 and given[1] >= 0 else None
        ranks = RankOrder(group, _torch.index_of(calls[0][0]), timeout)
        root = args[at + 2] if row.key == "reduce" else None
        work = _torch.boxed(_run(ranks, row, group, calls, op, root, asynchronous=asynchronous))
        return (args[0], work) if signature.returns_first else work

    return kernel


_Call: TypeAlias = "tuple[torch.Tensor, list[torch.Tensor]]"
"""The output, and what is sent: one tensor, or one for each rank; of what is reduced in place nothing."""


def _calls(given: tuple[Any, ...]) -> list[_Call]:
    """Return the calls of an operator. Of each tensor another object, which tells autograd nothing, as torch's call."""
    outputs, *sent = ([one] if isinstance(one, torch.Tensor) else one for one in given)
    inputs = [[one] if isinstance(one, torch.Tensor) else one for one in sent[0]] if sent else [[] for _ in outputs]
    return [(out.data, [one.data for one in parts]) for out, parts in zip(outputs, inputs, strict=False)]


def _is_ours(row: Row, group: c10d.ProcessGroup, calls: list[_Call], op: object, *, several: bool) -> bool:
    """Return whether the result depends on the order; raise InvarianceError if it does and none can be kept.

    That of integers never does, nor what the backend refuses. ``several``: it is a call of several tensors.
    """
    tensors = [tensor for out, sent in calls for tensor in (out, *sent)]
    if not tensors or tensors[0].device.type not in ("cpu", "cuda"):
        return False
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return False
    what = ""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        what = "a sparse tensor"
    elif any(0 in tensor.stride() and not tensor.is_contiguous() for tensor in tensors):
        what = "a tensor whose elements share memory"
    elif op not in OPS:
        what = f"the operation {getattr(op, 'name', 'that torch does not tell')}"
    if what:
        raise InvarianceError(
            f"{row.name} at {place(program())}: inside of invariant() {what} can't be reduced in the order of the "
            "ranks. Reduce it outside, or in another way. Nothing was launched."
        )
    if op not in OPERATIONS or (op not in SUMS and any(tensor.is_complex() for tensor in tensors)):
        return False
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1 or (len(calls) > 1 and not several):
        return False
    if _torch.backend_of(group, tensors[0].device.type) is None:
        return False
    if row.key in ("all_reduce", "reduce"):
        return True
    if row.key == "reduce_scatter":
        return all(len(sent) == group.size() and sent[group.rank()].numel() == out.numel() for out, sent in calls)
    return all(len(sent) == 1 and sent[0].numel() == group.size() * out.numel() for out, sent in calls)


def _run(
    ranks: RankOrder, row: Row, group: c10d.ProcessGroup, calls: list[_Call], op: object, root: int | None, *,
    asynchronous: bool,
) -> c10d.Work:  # fmt: skip
    """Reduce: by the kernels of low_latency() on the current stream, and what those do not take by the backend.

    That one runs beside the current stream on a GPU if the call is ``asynchronous``: there it is late where its steps
    and a kernel that fills the device keep each other from running, and elsewhere programs waited longer.
    """
    index = _torch.index_of(calls[0][0])
    with (
        _torch.undisturbed(),
        _torch.inference_mode(True),  # where tensors of either kind can be written to
    ):
        left = [call for call in calls if not (ENGINES and _taken(row, group, call, op))]
        side = _side(group, index) if asynchronous and left and index >= 0 else None
        with contextlib.nullcontext() if side is None else beside(side):
            for out, sent in left:
                if root is not None:
                    ranks.reduce(out, op, root)
                elif row.key == "all_reduce":
                    ranks.all_reduce(out, op)
                else:
                    parts = sent if len(sent) == group.size() else list(sent[0].reshape(-1).chunk(group.size()))
                    ranks.reduce_scatter(out, parts, op)
            if side is not None:
                # Who has called may drop these before this stream has read them (S1).
                used = [tensor for out, sent in left for tensor in (out, *sent)]
                finish(Call(row, group, used, index, program()), None)
            return ranks.finish(calls[-1][0]) if asynchronous else _torch.complete_work()


def _taken(row: Row, group: c10d.ProcessGroup, call: _Call, op: object) -> bool:
    """Return whether a kernel of low_latency() has run a call."""
    out, (flat, *rows) = call[0], map(flattened, (call[0], *call[1]))  # a rank alone may have gaps in its tensors
    given = (flat, rows) if row.key == "reduce_scatter" else (flat, *rows)
    if not take(row, group, given, op, program, unshared=True):
        return False
    write_back(out, flat)
    return True


_STREAMS: weakref.WeakKeyDictionary[c10d.ProcessGroup, torch.cuda.Stream] = weakref.WeakKeyDictionary()
"""The stream of a group's asynchronous reductions. On one for all groups, two ranks that call two groups in another
order would wait for each other."""


def _side(group: c10d.ProcessGroup, index: int) -> torch.cuda.Stream:
    side = _STREAMS.get(group)
    if side is None or side.device_index != index:
        side = _STREAMS[group] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return side
