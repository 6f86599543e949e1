"""The kernels, in Triton: each rank stores into its peers' staging, and polls its own until everything is there.

The data is its own flag. Staging that is free holds the bits of negative zero, which no rank ever sends (it sends
positive zero in its place), so an element that is anything else has arrived: there is no barrier, no flag beside the
data, and no order between stores that anybody has to rely on. ``docs/low-latency.md`` has the proof.

A tensor is cut into *chunks*. One program works on a chunk at a time, and each chunk has three *phases*, each with
staging of its own, which take turns: while a call uses one, it clears the one after the next. (Not the next one: a peer
may already be one call ahead, and what it has sent would be lost.) The phase of a chunk lies in device memory, where
replays of a CUDA graph advance it too.

Addresses come as numbers, because Triton's launcher asks the driver about each pointer that it is given. Imported when
low_latency() is switched on, and not before: it imports Triton.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from safecomm import _torch

INTERPRETED = triton.runtime.jit.knobs.runtime.interpret if hasattr(triton, "knobs") else False
"""Whether the kernels run in Triton's interpreter, on the CPU, as some tests have them do."""


def _constants(count: int) -> Any:
    return range(count) if INTERPRETED else map(tl.constexpr, range(count))


SUM, AVG, MAX, MIN = _constants(4)

REDUCE, SCATTER, GATHER = _constants(3)

# What the table of a group holds, in numbers of 8 bytes; behind it come the addresses of the ranks' staging, and the
# phase of each chunk.
LIMIT, WORD, FAILED, BASES = _constants(4)

*_, PHASES = _constants(4)
*_, LOOKS = _constants(65)

if INTERPRETED:

    def _clock() -> Any:
        os.sched_yield()  # to the peers, which may have fewer processors than they are
        return tl.full([], time.monotonic_ns(), tl.int64)

    def _fence(THREADS: Any) -> None:
        pass  # the interpreter runs one thing after the other

else:
    _clock = globaltimer

    @triton.jit
    def _fence(THREADS: tl.constexpr):
        """Let what each thread stores from here on be seen, also by peers, after all that it and they did before."""
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r,~{memory}", [tl.arange(0, THREADS)], tl.int32, False, 1
        )


@triton.jit
def _pointer(address, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(BITS))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _staging(table, rank, offset, BITS: tl.constexpr):
    """Return a pointer into the staging of ``rank``, ``offset`` bytes from where it begins."""
    return _pointer(tl.load(table + BASES + rank) + offset, BITS, True)


@triton.jit
def _taken(source, at, count, FREE: tl.constexpr):
    """Return the bits of elements of the caller's tensor, as they are sent: negative zero as positive zero."""
    return _positive(tl.load(source + at, mask=at < count, other=0), FREE)


@triton.jit
def _positive(bits, FREE: tl.constexpr):
    """Return ``bits`` with positive zero in place of negative zero."""
    return tl.where(bits == FREE, 0, bits)


@triton.jit
def _arrived(pointers, mask, wait_budget, timed_out, FREE: tl.constexpr):
    """Return what a peer has sent, once all of it is there; and 1 if that took too long, or has timed out before.

    The clock is slow to read, so it is left alone until a few looks were in vain. Each thread reads its own, so whether
    it took too long is reduced like the elements: all threads must leave the loop, which has barriers, together.
    """
    bits = tl.load(pointers, mask=mask, other=0, volatile=True)
    waiting = tl.max((bits == FREE).to(tl.int32), axis=0)
    looks = 0
    began = tl.full([], 0, tl.int64)
    while waiting != 0:
        bits = tl.load(pointers, mask=mask, other=0, volatile=True)
        waiting = tl.max((bits == FREE).to(tl.int32), axis=0)
        looks += 1
        if looks == LOOKS:
            looks = 0
            now = _clock()
            began = tl.where(began == 0, now, began)
            tired = tl.max(((bits == FREE) & (now - began >= wait_budget)).to(tl.int32), axis=0)
            if (timed_out | tired) != 0:
                timed_out = 1
                waiting = 0
    return bits, timed_out


@triton.jit
def _combine(total, value, op):
    if op <= AVG:
        total += value
    elif op == MAX:
        total = tl.maximum(total, value)
    else:
        total = tl.minimum(total, value)
    return total


@triton.jit
def _unless(timed_out, bits, FREE: tl.constexpr, BITS: tl.constexpr):
    """Return ``bits``, and NaN in their place if the peer has timed out."""
    return tl.where(timed_out != 0, -1 - FREE, bits).to(BITS)


@triton.jit
def _averaged(total, op, WORLD: tl.constexpr):
    if op == AVG:
        total = tl.div_rn(total, tl.full(total.shape, WORLD, tl.float32))
    return total


@triton.jit
def _rounded(total, op, timed_out, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr):
    """Return the bits of the result: NaN if a peer has timed out, so that nobody can take it for one."""
    total = tl.where(timed_out != 0, float("nan"), _averaged(total, op, WORLD))
    return total.to(DTYPE).to(BITS, bitcast=True)


@triton.jit
def _clear(pointers, SLOTS: tl.constexpr, BLOCK: tl.constexpr, FREE: tl.constexpr, BITS: tl.constexpr):
    for slot in tl.static_range(SLOTS):
        tl.store(pointers + slot * BLOCK, tl.full([BLOCK], FREE, BITS))


@triton.jit
def _fail(table, timed_out, call):
    """Tell the calls that come after that a peer has timed out; and the host, if this call is the first."""
    if timed_out != 0:
        if tl.atomic_cas(table + FAILED, tl.full([], 0, tl.int64), tl.full([], 1, tl.int64)) == 0:
            tl.store(tl.load(table + WORD).to(tl.pointer_type(tl.int64)), call.to(tl.int64))


@triton.jit
def _wait_budget(table, padded):
    """Return how long to wait for a peer, and how many elements to send.

    A call after one that has given up waits for nobody. It sends nothing either, because a peer that is only slow may
    still be in the earlier one.
    """
    well = tl.load(table + FAILED) == 0
    return tl.where(well, tl.load(table + LIMIT), 0), tl.where(well, padded, 0)


@triton.jit
def _multiple(count, ALIGNED: tl.constexpr):
    """Return ``count``, which the compiler is told to be a multiple of 16 if the tensors are aligned."""
    return count // 16 * 16 if ALIGNED else count


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op"])
def one_shot(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, FREE: tl.constexpr, WORLD: tl.constexpr,
    ME: tl.constexpr, ALIGNED: tl.constexpr, AREA: tl.constexpr, FIRST_PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Exchange ``size`` elements with every rank, all in one go.

    ``REDUCE``: each rank sends its tensor to all, and each adds up all of them, in the order of the ranks, in fp32.
    ``SCATTER``: the same with the pieces of ``size`` elements that are each rank's. ``GATHER``: nothing is added up.
    """
    table = _pointer(address, tl.int64, True)
    target = _pointer(out, BITS, ALIGNED)
    source = _pointer(data, BITS, ALIGNED)
    count = _multiple(size, ALIGNED)
    padded = (count + 15) // 16 * 16  # staging is used in pieces of 16 bytes; what is past the tensor's end is zero
    within = tl.arange(0, BLOCK)
    slot: tl.constexpr = BLOCK * (BITS.primitive_bitwidth // 8)
    wait_budget, sendable = _wait_budget(table, padded)
    timed_out = 0
    for chunk in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = chunk * BLOCK + within
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        place = AREA + ((chunk * PHASES + phase) * WORLD + ME).to(tl.int64) * slot
        bits = _taken(source, at, count, FREE)
        for step in tl.static_range(1, WORLD):
            peer = (ME + step) % WORLD
            if KIND == SCATTER:
                bits = _taken(source + peer * count, at, count, FREE)
            tl.store(_staging(table, peer, place, BITS) + within, bits, mask=at < sendable)
        if KIND == GATHER:  # before a peer's part is stored, which the input may overlap
            tl.store(target + ME * count + at, bits, mask=at < count)
    for chunk in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = chunk * BLOCK + within
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        used = AREA + ((chunk * PHASES + phase) * WORLD).to(tl.int64) * slot
        free = AREA + ((chunk * PHASES + (phase + 2) % PHASES) * WORLD).to(tl.int64) * slot
        _clear(_staging(table, ME, free, BITS) + within, WORLD, BLOCK, FREE, BITS)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            if rank != ME:
                sent = _staging(table, ME, used + rank * slot, BITS) + within
                bits, timed_out = _arrived(sent, at < padded, wait_budget, timed_out, FREE)
            elif KIND != GATHER:
                bits = _taken(source + (ME * count if KIND == SCATTER else 0), at, count, FREE)
            if KIND != GATHER:
                value = bits.to(DTYPE, bitcast=True).to(tl.float32)
                total = value if rank == 0 else _combine(total, value, op)
            elif rank != ME:
                tl.store(target + rank * count + at, _unless(timed_out, bits, FREE, BITS), mask=at < count)
        if KIND != GATHER:
            tl.store(target + at, _rounded(total, op, timed_out, DTYPE, BITS, WORLD), mask=at < count)
        tl.store(table + FIRST_PHASE + chunk, ((phase + 1) % PHASES).to(tl.int64))
        _fail(table, timed_out, call)


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op"])
def two_shot(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, FREE: tl.constexpr, WORLD: tl.constexpr,
    ME: tl.constexpr, ALIGNED: tl.constexpr, AREA: tl.constexpr, FIRST_PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce as :func:`one_shot` does, with less to send: a rank reduces one piece of each chunk, for all of them.

    A chunk has ``WORLD`` pieces of ``BLOCK`` elements, and a phase two parts of as many slots: for what the peers
    send for the piece that is this rank's, and for the results of the pieces that are theirs.
    """
    table = _pointer(address, tl.int64, True)
    target = _pointer(out, BITS, ALIGNED)
    source = _pointer(data, BITS, ALIGNED)
    count = _multiple(size, ALIGNED)
    padded = (count + 15) // 16 * 16
    within = tl.arange(0, BLOCK)
    slot: tl.constexpr = BLOCK * (BITS.primitive_bitwidth // 8)
    wait_budget, sendable = _wait_budget(table, padded)
    timed_out = 0
    for chunk in range(tl.program_id(0), tl.cdiv(count, WORLD * BLOCK), tl.num_programs(0)):
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        place = AREA + ((chunk * PHASES + phase) * 2 * WORLD + ME).to(tl.int64) * slot
        for step in tl.static_range(1, WORLD):
            peer = (ME + step) % WORLD
            at = (chunk * WORLD + peer) * BLOCK + within
            bits = _taken(source, at, count, FREE)
            tl.store(_staging(table, peer, place, BITS) + within, bits, mask=at < sendable)
    for chunk in range(tl.program_id(0), tl.cdiv(count, WORLD * BLOCK), tl.num_programs(0)):
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        used = AREA + ((chunk * PHASES + phase) * 2 * WORLD).to(tl.int64) * slot
        free = AREA + ((chunk * PHASES + (phase + 2) % PHASES) * 2 * WORLD).to(tl.int64) * slot
        _clear(_staging(table, ME, free, BITS) + within, 2 * WORLD, BLOCK, FREE, BITS)
        at = (chunk * WORLD + ME) * BLOCK + within
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            if rank == ME:
                bits = _taken(source, at, count, FREE)
            else:
                sent = _staging(table, ME, used + rank * slot, BITS) + within
                bits, timed_out = _arrived(sent, at < padded, wait_budget, timed_out, FREE)
            value = bits.to(DTYPE, bitcast=True).to(tl.float32)
            total = value if rank == 0 else _combine(total, value, op)
        result = _positive(_rounded(total, op, timed_out, DTYPE, BITS, WORLD), FREE)
        for step in tl.static_range(1, WORLD):
            peer = (ME + step) % WORLD
            there = _staging(table, peer, used + (WORLD + ME) * slot, BITS) + within
            tl.store(there, result, mask=at < sendable * (1 - timed_out))
        tl.store(target + at, result, mask=at < count)
        _fail(table, timed_out, call)
    for chunk in range(tl.program_id(0), tl.cdiv(count, WORLD * BLOCK), tl.num_programs(0)):
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        used = AREA + ((chunk * PHASES + phase) * 2 * WORLD).to(tl.int64) * slot
        for rank in tl.static_range(WORLD):
            if rank != ME:
                at = (chunk * WORLD + rank) * BLOCK + within
                sent = _staging(table, ME, used + (WORLD + rank) * slot, BITS) + within
                bits, timed_out = _arrived(sent, at < padded, wait_budget, timed_out, FREE)
                tl.store(target + at, _unless(timed_out, bits, FREE, BITS), mask=at < count)
        tl.store(table + FIRST_PHASE + chunk, ((phase + 1) % PHASES).to(tl.int64))
        _fail(table, timed_out, call)


@triton.jit
def _piece(rank: tl.constexpr, p0, p1, p2, p3, p4, p5, p6, p7):
    address = p0
    if rank == 1:
        address = p1
    elif rank == 2:
        address = p2
    elif rank == 3:
        address = p3
    elif rank == 4:
        address = p4
    elif rank == 5:
        address = p5
    elif rank == 6:
        address = p6
    elif rank == 7:
        address = p7
    return address


@triton.jit(do_not_specialize=["out", *(f"p{rank}" for rank in range(8)), "address", "call", "size", "op"])
def scatter_pieces(
    out: tl.int64, p0: tl.int64, p1: tl.int64, p2: tl.int64, p3: tl.int64, p4: tl.int64, p5: tl.int64, p6: tl.int64,
    p7: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, FREE: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr,
    ALIGNED: tl.constexpr, AREA: tl.constexpr, FIRST_PHASE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """``SCATTER`` of :func:`one_shot`, with a piece for each rank at an address of its own, and of more elements.

    What is more than ``CHUNKS`` blocks goes through the same chunks again, as in a next call: chunk by chunk that is
    what it is, because chunks share nothing. Between two calls one kernel ends and another begins; here a fence stands
    for that: what was cleared must be so before a peer, which what is sent next lets go on, can store there.
    """
    table = _pointer(address, tl.int64, True)
    target = _pointer(out, BITS, ALIGNED)
    count = _multiple(size, ALIGNED)
    padded = (count + 15) // 16 * 16
    within = tl.arange(0, BLOCK)
    slot: tl.constexpr = BLOCK * (BITS.primitive_bitwidth // 8)
    wait_budget, sendable = _wait_budget(table, padded)
    timed_out = 0
    for chunk in range(tl.program_id(0), tl.minimum(tl.cdiv(count, BLOCK), CHUNKS), tl.num_programs(0)):
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        for block in range(chunk, tl.cdiv(count, BLOCK), CHUNKS):
            if block != chunk:
                _fence(THREADS)
            at = block * BLOCK + within
            place = AREA + ((chunk * PHASES + phase) * WORLD + ME).to(tl.int64) * slot
            for step in tl.static_range(1, WORLD):
                source = _piece((ME + step) % WORLD, p0, p1, p2, p3, p4, p5, p6, p7)
                bits = _taken(_pointer(source, BITS, ALIGNED), at, count, FREE)
                there = _staging(table, (ME + step) % WORLD, place, BITS) + within
                tl.store(there, bits, mask=at < sendable * (1 - timed_out))
            used = AREA + ((chunk * PHASES + phase) * WORLD).to(tl.int64) * slot
            free = AREA + ((chunk * PHASES + (phase + 2) % PHASES) * WORLD).to(tl.int64) * slot
            _clear(_staging(table, ME, free, BITS) + within, WORLD, BLOCK, FREE, BITS)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(WORLD):
                if rank == ME:
                    bits = _taken(_pointer(_piece(ME, p0, p1, p2, p3, p4, p5, p6, p7), BITS, ALIGNED), at, count, FREE)
                else:
                    sent = _staging(table, ME, used + rank * slot, BITS) + within
                    bits, timed_out = _arrived(sent, at < padded, wait_budget, timed_out, FREE)
                value = bits.to(DTYPE, bitcast=True).to(tl.float32)
                total = value if rank == 0 else _combine(total, value, op)
            tl.store(target + at, _rounded(total, op, timed_out, DTYPE, BITS, WORLD), mask=at < count)
            phase = (phase + 1) % PHASES
        tl.store(table + FIRST_PHASE + chunk, phase.to(tl.int64))
        _fail(table, timed_out, call)


@triton.jit(do_not_specialize=["out", "own", "others", "size", "op"])
def combine(
    out: tl.int64, own: tl.int64, others: tl.int64, size: tl.int32, op: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce ``own``, and at ``others`` what each of the other ranks has sent, ``size`` elements each.

    In the order of the ranks, in fp32, as the other kernels do. It waits for nobody.
    """
    target = _pointer(out, BITS, ALIGNED)
    mine = _pointer(own, BITS, ALIGNED)
    theirs = _pointer(others, BITS, ALIGNED)
    count = _multiple(size, ALIGNED)
    within = tl.arange(0, BLOCK)
    for chunk in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = chunk * BLOCK + within
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            if rank == ME:
                bits = tl.load(mine + at, mask=at < count, other=0)
            else:
                before = (rank - 1 if rank > ME else rank) * tl.cast(count, tl.int64)
                bits = tl.load(theirs + before + at, mask=at < count, other=0)
            value = bits.to(DTYPE, bitcast=True).to(tl.float32)
            total = value if rank == 0 else _combine(total, value, op)
        result = _averaged(total, op, WORLD).to(DTYPE).to(BITS, bitcast=True)
        tl.store(target + at, result, mask=at < count)


def launcher(kernel: Any, constants: dict[str, object], grid: int, warps: int) -> Callable[..., None]:
    """Compile ``kernel``, and return what launches it: ``launch(stream, *arguments)``, on the current device.

    Triton's own way to launch looks at all arguments, to find or compile what fits them. Even what it launches with
    once that is known took 7 us on an H200's host, and the driver alone takes 3.
    """
    if INTERPRETED:

        def interpret(stream: int, *arguments: int) -> None:
            kernel[(grid,)](*arguments, **constants)

        return interpret
    parameters = kernel.signature.parameters
    widths = [str(one.annotation)[-2:] for name, one in parameters.items() if name not in constants]
    compiled = kernel.warmup(*[0] * len(widths), **constants, grid=(grid,), num_warps=warps)
    run = compiled[(grid, 1, 1)]  # which loads it
    kinds = _parameters(compiled, widths)
    if kinds is not None:
        launch = _torch.kernel_launcher(compiled.function, grid, 32 * warps, compiled.metadata.shared, kinds)
        if launch is not None:
            launch.compiled = compiled  # type: ignore[attr-defined]  # Triton 3.9 unloads a kernel that it forgets
            return launch
    values = tuple(constants[name] for name in parameters if name in constants)  # in the kernel's order

    def launch_by_triton(stream: int, *arguments: int) -> None:
        run(*arguments, *values, stream=stream)

    return launch_by_triton


def _parameters(compiled: Any, given: list[str]) -> list[type[ctypes.c_uint64 | ctypes.c_uint32]] | None:
    """Return the types of a kernel's parameters; None if it is not one that the driver can be given without Triton.

    ``given``: the bits of its arguments. Behind them come addresses of memory for Triton's own use, which these kernels
    have none of.
    """
    ordinary = {
        "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False,
        "launch_pdl": False,
    }  # fmt: skip
    if any(getattr(compiled.metadata, name, value) != value for name, value in ordinary.items()):
        return None
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", compiled.asm["ptx"])
    kinds = re.findall(r"\.param\s+\.(\w+)", entry[1]) if entry is not None else []
    widths = [kind[1:] for kind in kinds]
    if widths[: len(given)] != given or set(widths[len(given) :]) - {"64"}:
        return None
    return [ctypes.c_uint64 if width == "64" else ctypes.c_uint32 for width in widths]
