"""The engine of one group: it takes the calls that a kernel over peer memory is the fastest one for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import backends
from safecomm.collectives.beside import beside
from safecomm.collectives.guards import PLAIN
from safecomm.collectives.holding import Call, finish, relaxed
from safecomm.collectives.table import COLLECTIVE_OF, EXCHANGE, GATHER, LISTS, OPS, REDUCE, ROWS, SCATTER
from safecomm.collectives.takers import DECLINED
from safecomm.core import captures
from safecomm.core.call_site import outside, program
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.errors import LowLatencyError
from safecomm.interception.invariance import is_invariant
from safecomm.peers import bulk, list_exchange
from safecomm.peers.host_word import LONG, REMEMBERED, HostWord
from safecomm.peers.launched import LaunchedKernel
from safecomm.peers.limits import ASYNCHRONOUS, COPIED, DTYPES, EXACT, RING, TWO_SHOT, LowLatencyLimits
from safecomm.peers.order import Order
from safecomm.peers.room import Room, dealt, registers
from safecomm.peers.staging import BESIDE, MOST, SLOT, Staging, StagingLayout

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""As what is sent bit for bit: by the bytes of an element."""

LIST_LARGEST = 4 << 20
"""Bytes of the largest output of that kernel: more was not measured."""

SWEEP = 1 << 11
"""The largest grid of a kernel that waits for no peer, of which not all programs need to fit at once."""

LEAST_TURN = 1 << 20
"""Bytes. 64 MiB in turns of that take two H200 as long as what NCCL moves and torch adds (``invariance_gpus.json``)."""

KINDS = 4096
"""How many kinds of calls are remembered."""

_REDUCTIONS = tuple(getattr(c10d.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN"))  # in the kernels' order
_UNKNOWN = -1
_NUMBERS = {id(op): _REDUCTIONS.index(op) if op in _REDUCTIONS else _UNKNOWN for op in OPS} | {id(None): _UNKNOWN}
"""What the kernels know reduce operations by, for those that are members of the enum, which never die."""

_HERE = contextlib.nullcontext()

_EXCHANGE, _ALL_REDUCE = "all_to_all_single", "all_reduce"

_KINDS = {REDUCE: 0, SCATTER: 1, GATHER: 2, EXCHANGE: 3}  # what the kernels know them by

_Plan: TypeAlias = "tuple[()] | tuple[tuple[Callable[..., None], ...], int, bool]"
"""What launches a call, unaligned and aligned, on how many elements, and whether it must be synchronous.

() if it is the backend's.
"""


class Engine:
    """Runs calls of ``group`` on device ``index`` by kernels over ``staging``, where ``limits`` say so.

    What decides whether it does is the same on all ranks that make the same call: the operation, its type, its bytes.
    The kernels of a group wait for their peers, so they are put in order, one after the other, whatever stream each is
    called on. A peer that does not come within ``timeout`` makes a call give up: its result has NaN, and the next call
    or wait raises PeerTimeoutError. With ``check``, the ranks compare what they call.
    """

    def __init__(
        self, group: c10d.ProcessGroup, index: int, staging: Staging, layout: StagingLayout,
        limits: LowLatencyLimits, timeout: timedelta, store: c10d.Store, threads: int, *, check: bool,
    ) -> None:  # fmt: skip
        from safecomm.peers import kernels  # which imports Triton

        self.group = group
        self.index = index
        self.taken: int = 0  # calls
        self.everywhere = False  # this group alone has not asked for it
        self.functional = False  # torch's functional collectives stay torch's
        self.launched_events = False  # some of those have been launched, on a device
        self.limits = limits
        self.timeout = timeout
        self.threads = threads  # that all programs of a kernel for small calls may have
        self.room: Room | None = None  # that its kernels need on the device
        self._kernels = kernels
        self._staging = staging
        self.layout = layout
        self._rank = group.rank()
        self._world = group.size()
        device = torch.device("cpu") if index == HOST else torch.device("cuda", index)
        who = f"rank {self._rank} of group {_torch.group_name(group)!r}"
        self._word = HostWord(who, timeout, pinned=index != HOST)
        self.raise_failure: Callable[[], None] = self._word.look
        head = [_nanoseconds(timeout), self._word.address, 0, _nanoseconds(LONG), 0]
        self._bases = (*staging.bases, *[0] * (MOST - self._world))
        head += [0] * layout.counters
        self._table = torch.tensor(head + bulk.table(staging.bases), dtype=torch.int64, device=device)
        self._table_pointer = self._table.data_ptr()
        self._launchers: dict[object, Callable[..., None]] = {}
        self._plans: dict[object, _Plan] = {}
        self._lock = threading.Lock()  # between putting a call in order and launching it, no other may come
        self.order: Order = Order(LEDGER.streams, index)
        self._stages_lists = backends.of(group, device.type).stages_lists
        self._through = group if _torch.HOOKS else _torch.backend_of(group, device.type)
        self._bulk = bulk.Bulk(kernels, layout, index, self._rank, len(head))
        self._exchanged: set[int] = set()  # the streams of sends and receives
        self._side: torch.cuda.Stream | None = None  # for asynchronous calls of list forms
        self._call = 0
        self.store = store
        self._check = check
        # Bytes of the largest tensor of an operator's call that it looks at.
        self.most: int = sys.maxsize if check else self._world * limits.most_asynchronous
        self._compared = 0
        self._ordered = False  # all reductions are to be in the order of the ranks
        self._turn = sys.maxsize  # bytes that an all_reduce which is too large for that is reduced in turns of
        self.plan_again()
        # What the end of the group calls: tells the peers, and returns what waits for them.
        self.leave: Callable[[timedelta], Callable[[], None]] = lambda _: lambda: None
        self.nbytes: int = int(staging.block.nbytes + self._table.nbytes)

    # --- a call ---------------------------------------------------------------------------------------------

    def run(
        self, group: c10d.ProcessGroup, name: str, tensors: list[Any], op: object, asynchronous: bool, *,
        unshared: bool = True,
    ) -> object:  # fmt: skip
        """Run a call of c10d's function ``name`` on ``group``, which is this one's, or return DECLINED.

        ``tensors``: what is given as the output, and as the input where that is another. ``unshared``: the current
        stream waits for the call right away. Returns what c10d's function would: None, or a Work for an asynchronous
        call.
        """
        if name in LISTS:
            return self._run_list(group, name, tensors, op, asynchronous)
        out, data = tensors[0], tensors[-1]
        index = self.index
        if not _is_plain(data, index) or (out is not data and not _is_plain(out, index)):
            return DECLINED
        if index != HOST and _torch.current_device() != index:
            with torch.cuda.device(index):
                return self.run(group, name, tensors, op, asynchronous, unshared=unshared)
        exchanges = name == _EXCHANGE  # whose operation is what splits() has found
        number = _UNKNOWN if exchanges else _number(op)
        key = (name, data.dtype, data.numel(), out.dtype, out.numel(), number)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > KINDS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(name, out, data, number)
        if exchanges and (op is not None or any(one.dim() == 0 or len(one) % self._world for one in tensors)):
            plan = ()  # its parts differ, and no rank knows those of all others
        elif plan and plan[2] and (asynchronous or not unshared):
            plan = ()
        if not plan and name == _ALL_REDUCE and data.nbytes > self._turn and data.dtype in DTYPES and number >= 0:
            for turn in data.view(-1).split(self._turn // data.itemsize):
                if self.run(group, name, [turn], op, False) is DECLINED:  # then the first one is
                    return DECLINED
            return LaunchedKernel(self, tensors[:1]) if asynchronous else None
        stream = capture = 0
        if index != HOST:
            stream = LEDGER.current(index)
            capture = LEDGER.streams.capture(stream) if stream else 0
            if capture and capture not in captures.RECORDING:
                plan = ()  # its replays are not seen, which must be put in order
        if self._check:
            how = f"{'by a kernel' if plan else 'by the backend'}{', captured' if capture else ''}"
            self.compare(f"{name} of {data.numel()} elements of {data.dtype}, operation {op}, {how}")
        if not plan:
            return DECLINED
        launchers, count, _ = plan
        addresses = out.data_ptr(), data.data_ptr()
        aligned = not (addresses[0] | addresses[1]) & 15
        self._launch(name, launchers[aligned], addresses, count, number, stream, capture)
        return LaunchedKernel(self, tensors[:1]) if asynchronous else None

    def takes(self, name: str, out: torch.Tensor, data: torch.Tensor, op: object) -> bool:
        """Return whether :meth:`run` would run such a call of two tensors beside others, if not captured unseen."""
        if not _is_plain(data, self.index) or not _is_plain(out, self.index):
            return False
        plan = self._plan(name, out, data, _number(op))
        return not plan[2] if plan else False

    def _launch(
        self, name: str, launcher: Callable[..., None], addresses: tuple[int, ...], count: int, number: int,
        stream: int, capture: int,
    ) -> None:  # fmt: skip
        """Launch a kernel that waits for its peers, in the order of the group's calls."""
        self.raise_failure()
        frame = outside(("safecomm.collectives.", "safecomm.peers."))
        if frame.f_globals.get("__name__") == "torch._ops":  # one of torch's operators, which the program has called
            frame = program(frame)
        with self._lock:
            call = self._call = self._call % 0x7FFFFFFF + 1
            site = (call, name, frame.f_code, frame.f_lasti)
            if capture:
                self._word.captured[call] = site
                if self.order.follow_captured(stream, capture):
                    captures.RECORDING[capture].before_replay.append(self._prepare_replay)
            else:
                self._word.recent[call % REMEMBERED] = site
                if self.index != HOST:
                    self.order.follow(stream)
            launcher(stream, *addresses, self._table_pointer, call, count, max(number, 0))
        self.taken += 1

    def _run_list(
        self, group: c10d.ProcessGroup, name: str, given: list[Any], op: object, asynchronous: bool
    ) -> object:
        """Run a call of a list form as :meth:`run` does; ``given``: the output and the input, one of them a list."""
        scatter = LISTS[name] == SCATTER
        tensor, whole = given if scatter else (given[1], given[0])
        index = self.index
        if not _is_plain(tensor, index):
            return DECLINED
        if index != HOST and _torch.current_device() != index:
            with torch.cuda.device(index):
                return self._run_list(group, name, given, op, asynchronous)
        number = _number(op)
        known = tensor.dtype in DTYPES and number >= 0 if scatter else tensor.dtype in COPIED
        direct = known and list_exchange.alike(whole, tensor, self._rank, self._world, written=not scatter)
        taken = direct or (known and list_exchange.can_be_copied(whole, tensor, self._world))
        stream = capture = 0
        if index != HOST:
            stream = LEDGER.current(index)
            capture = LEDGER.streams.capture(stream) if stream else 0
        small = scatter and tensor.nbytes <= min(self.limits.scatter, LIST_LARGEST)
        if capture and capture not in captures.RECORDING:
            small = False  # as in run()
        if scatter and not small and not self._stages_lists:
            taken = False  # what is received here would take memory, and the backend's own call takes none
        if self._check:
            how = "by a kernel" if taken and small else "from tensor to tensor" if taken else "by the backend"
            self.compare(f"{name} of {tensor.numel()} elements of {tensor.dtype}, operation {op}, {how}")
        if not taken:
            return DECLINED
        if small:
            sent = list_exchange.readable(whole, tensor, direct)
            addresses = (tensor.data_ptr(), *[one.data_ptr() for one in sent])
            launcher = self._list_launcher(tensor.dtype, tensor.numel(), addresses)
            addresses += addresses[-1:] * (MOST - self._world)
            self._launch(name, launcher, addresses, tensor.numel(), number, stream, capture)
            return LaunchedKernel(self, given[:1]) if asynchronous else None
        self.taken += 1
        if asynchronous and index != HOST and self._side is None:
            self._side = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        try:
            with beside(self._side) if asynchronous and self._side is not None else _HERE:
                return self._exchange(whole, tensor, number, scatter, direct, asynchronous)
        except BaseException as error:  # by a copy to a tensor that can't be written to; what was launched goes on
            if index != HOST:
                frame = outside(("safecomm.collectives.", "safecomm.peers."))
                finish(Call(ROWS[name], group, [tensor, *whole], index, frame), error)
            raise

    def _exchange(
        self, whole: list[Any], tensor: torch.Tensor, number: int, scatter: bool, direct: bool, asynchronous: bool
    ) -> LaunchedKernel | None:
        """Run a list form by the backend's sends and receives, on the current stream."""
        with relaxed(self.group, [tensor]):
            if scatter:
                own, others = list_exchange.scatter(self._through, whole, tensor, self._rank, direct=direct)
                self._combine(tensor, own, others, number)
            else:
                list_exchange.gather(self._through, whole, tensor, direct=direct)
        if self.index != HOST:
            self._exchanged.add(LEDGER.current(self.index))
        return LaunchedKernel(self, [tensor] if scatter else whole) if asynchronous else None

    def _combine(self, out: torch.Tensor, own: torch.Tensor, others: torch.Tensor, number: int) -> None:
        """Reduce ``own``, and what each of the other ranks has sent, into ``out``, on the current stream.

        ``others``: of the other ranks, in their order, one after the other. ``number``: the reduce operation.
        """
        count, dtype = out.numel(), out.dtype
        addresses = out.data_ptr(), own.data_ptr(), others.data_ptr()
        blocks = -(-count * dtype.itemsize // SLOT)
        launcher = self._list_launcher(dtype, count, addresses, min(SWEEP, 1 << (blocks - 1).bit_length()))
        with self._lock:  # a launcher has its arguments in one place
            launcher(LEDGER.current(self.index) if self.index != HOST else 0, *addresses, count, number)

    def _list_launcher(
        self, dtype: torch.dtype, count: int, addresses: tuple[int, ...], grid: int = 0
    ) -> Callable[..., None]:
        """Return what launches the kernel that scatters a list, or with a ``grid`` the one that combines what came."""
        together = 0
        for address in addresses:
            together |= address
        aligned = count % 16 == 0 and not together & 15
        kernels = self._kernels
        if not grid:
            return self._launcher(kernels.scatter_pieces, count * dtype.itemsize, dtype, aligned)
        key = (dtype, aligned, grid)
        launcher = self._launchers.get(key)
        if launcher is None:
            constants = {**self._constants(dtype, SLOT), "ALIGNED": aligned}
            launcher = self._launchers[key] = self._load(kernels.combine, constants, grid, SLOT)
        return launcher

    def _launcher(
        self, kernel: object, nbytes: int, dtype: torch.dtype, aligned: bool, collective: str = SCATTER,
        *, exact: bool = False,
    ) -> Callable[..., None]:  # fmt: skip
        """Return what launches a kernel that waits for its peers, on tensors, or parts of them, of so many bytes."""
        kernels, layout = self._kernels, self.layout
        slots = self._world if kernel is kernels.two_shot else 1
        piece, grid, once = dealt(nbytes, self._world, slots, self.threads)
        key = (kernel, collective, exact, dtype, aligned, piece, grid, once)
        launcher = self._launchers.get(key)
        if launcher is None:
            constants = {
                **self._constants(dtype, piece),
                "ALIGNED": aligned,
                "STRIDE": layout.exact_stride if exact else layout.stride,
                "BEGUN": layout.begun,
                "ONCE": once,
            }
            if kernel is kernels.one_shot:
                area = layout.exact_area if exact else 0
                constants |= {"KIND": _KINDS[collective], "EXACT": exact, "AREA": area}
            launcher = self._launchers[key] = self._load(kernel, constants, BESIDE + grid, piece, self._bases)
        return launcher

    def _load(
        self, kernel: object, constants: dict[str, object], grid: int, piece: int, bases: tuple[int, ...] = ()
    ) -> Callable[..., None]:
        """Compile and load a kernel, with a thread for each 16 bytes of a piece; return what launches it."""
        # Loading one is not allowed in a capture that is not relaxed.
        with LEDGER.streams.relaxed_capture_mode():
            warps = piece // 16 // 32
            return self._kernels.launcher(kernel, constants, grid, warps, registers(self._world), bases)

    @property
    def timed_out(self) -> bool:
        """Whether a call has given up."""
        return self._word.timed_out

    def prepare(self, name: str, tensors: list[Any]) -> None:
        """Compile what a call needs, and launch nothing."""
        if name in LISTS:
            output, sent = tensors
            addresses = (output.data_ptr(), *[one.data_ptr() for one in sent])
            for grid in (0, 1):
                self._list_launcher(output.dtype, output.numel(), addresses, grid)
        else:
            self._plan(name, tensors[0], tensors[-1], 0)

    def _plan(self, name: str, out: torch.Tensor, data: torch.Tensor, number: int) -> _Plan:
        """Return how calls like this one are run; see :data:`_Plan`."""
        collective, dtype = COLLECTIVE_OF[name], data.dtype
        part, whole = (out, data) if collective == SCATTER else (data, out)
        count = part.numel()
        if collective == EXCHANGE:
            count //= self._world
            if out.numel() != data.numel():
                return ()
        elif whole.numel() != (count if collective == REDUCE else count * self._world):
            return ()
        kernel, kernels = self.limits.kernel(collective, count * dtype.itemsize), self._kernels
        if kernel is None or out.dtype is not dtype or not count:
            return ()
        if kernel == EXACT:
            if dtype not in COPIED:
                return ()
            bits = _BITS[min(dtype.itemsize, 4)]
            count *= dtype.itemsize // bits.itemsize
            return self._both(kernels.one_shot, count, bits, collective, exact=True), count, False
        if number == _UNKNOWN and collective != GATHER:
            return ()
        at_every_size = self._ordered and collective != GATHER  # whose bits depend on no order
        if kernel == RING:
            if self._ordered and self._world > 2:
                return ()  # of more ranks its order depends on the place
            launchers = self._bulk.plan(collective, dtype, count, number)
            return (launchers, count, not at_every_size) if launchers else ()
        if dtype not in DTYPES:
            return ()
        launchers = self._both(kernels.two_shot if kernel == TWO_SHOT else kernels.one_shot, count, dtype, collective)
        return launchers, count, part.nbytes > ASYNCHRONOUS[collective] and not at_every_size

    def _both(
        self, kernel: object, count: int, dtype: torch.dtype, collective: str, *, exact: bool = False
    ) -> tuple[Callable[..., None], ...]:
        """Return what launches a kernel on tensors that are not aligned, and on those that are."""
        nbytes = count * dtype.itemsize
        aligned = (False, count % 16 == 0)
        return tuple(self._launcher(kernel, nbytes, dtype, one, collective, exact=exact) for one in aligned)

    def _constants(self, dtype: torch.dtype, piece: int) -> dict[str, object]:
        """Return what every kernel is told of the group, of a type, and of the bytes of a piece."""
        language = vars(self._kernels)["tl"]
        return {
            "DTYPE": getattr(language, str(dtype).removeprefix("torch.")),
            "BITS": getattr(language, f"int{8 * dtype.itemsize}"),
            "WORLD": self._world,
            "ME": self._rank,
            "BLOCK": piece // dtype.itemsize,
        }

    def plan_again(self) -> None:
        """Decide anew which calls are taken; inside of invariant() all that can be, asynchronous ones too."""
        self._ordered, limits = is_invariant(self.group), self.limits
        largest = max(limits.one_shot, limits.two_shot, limits.ring if self._world == 2 else 0)
        self._turn = largest if self._ordered and largest >= LEAST_TURN else sys.maxsize
        self._plans.clear()

    def before_capture(self, index: int) -> None:
        """See to the order of what is launched by now; a capture is about to begin on device ``index``."""
        with self._lock:
            self.order.before_capture(index)
        self._bulk.before_capture(index)

    def _prepare_replay(self, stream: int) -> None:
        """Put the replay of a graph on ``stream``, which is about to be launched, in its order."""
        self.raise_failure()
        with self._lock:
            self.order.follow(stream)

    # --- when ranks differ, or a peer does not come -----------------------------------------------------------

    def set_patience(self, patience: timedelta) -> None:
        """Let the calls from here on wait for their peers for that long."""
        self._table[0] = _nanoseconds(patience)

    def idle(self, patience: timedelta) -> bool:
        """Wait until the last call is over; return whether it is after ``patience``."""
        if self.index == HOST or not patience:
            return self.index == HOST
        streams = LEDGER.streams
        events = [self.order.last_event(), *[streams.record_event(self.index, stream) for stream in self._exchanged]]
        deadline = time.monotonic() + patience.total_seconds()
        with streams.relaxed_capture_mode():
            while any(event is not None and not streams.query_event(event) for event in events):
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
        for event in events[1:]:
            streams.recycle_event(self.index, event)
        return True

    def compare(self, what: str) -> None:
        """Raise LowLatencyError, on every rank, unless all ranks call ``what`` now."""
        store = self.store
        number, self._compared = self._compared, self._compared + 1
        store.set(f"call/{number}/{self._rank}", what)
        keys = [f"call/{number}/{rank}" for rank in range(self._world)]
        given_up = f"call/{number}/given up"
        try:
            store.wait(keys, self.timeout)
            if store.check([given_up]):
                raise TimeoutError("another rank has given up")
        except Exception as error:  # of the kind that each store has
            store.set(given_up, "1")
            raise LowLatencyError(
                f"low_latency(check=True): rank {self._rank} calls {what}, and not every rank of the group has made "
                f"its call number {number} within {self.timeout}. Nothing was launched."
            ) from error
        found = [store.get(key).decode() for key in keys]
        if number:
            store.delete_key(f"call/{number - 1}/{self._rank}")  # a rank that has got here has read it
        if len(set(found)) > 1:
            shown = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(found))
            raise LowLatencyError(
                f"low_latency(check=True): the ranks differ in call number {number}: {shown}. Nothing was launched."
            )


def _nanoseconds(time: timedelta) -> int:
    return int(time.total_seconds() * 1e9)


def _number(op: object) -> int:
    """Return what the kernels know a reduce operation by."""
    number = _NUMBERS.get(id(op))
    if number is None:  # another object that may be equal to a member, such as a copy
        number = next((place for place, known in enumerate(_REDUCTIONS) if op == known), _UNKNOWN)
    return number


def _is_plain(tensor: torch.Tensor, index: int) -> bool:
    """Return whether ``tensor``, on device ``index``, is what c10d would hand to NCCL as it is.

    Whether a gradient is recorded does not matter, to NCCL neither, and could differ between ranks.
    """
    return (
        type(tensor) in PLAIN
        and tensor.get_device() == index
        and _torch.has_plain_keys(tensor)
        and tensor.is_contiguous()
    )
