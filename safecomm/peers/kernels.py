"""The kernels, in Triton: each rank stores into its peers' staging, and polls its own until everything is there.

The data is its own flag. Staging that is free holds in each word of 4 bytes the bits of one NaN, which no rank ever
sends (it sends another NaN in its place), so a word that is anything else has arrived: no data waits for a barrier or
for a flag beside it, and for no order between its stores. What is sent bit for bit has the number of the call in its
place, in each 8 bytes. ``docs/low-latency.md`` has the proof.

A tensor is cut into *chunks*, and one program works on a chunk at a time. Staging has three *phases*, each with a slot
for every chunk and peer, which take turns: a call clears what it has read, and two calls later that is known to the
peers. All slots of a call have the same phase. Each program counts it for itself, in device memory, where replays of a
CUDA graph advance it too.

Addresses come as numbers, because Triton's launcher asks the driver about each pointer that it is given. Imported when
low_latency() is switched on, and not before: it imports Triton.
"""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from safecomm import _torch
from safecomm.peers import staging, strong
from safecomm.peers.strong import INTERPRETED

PIECES, BASES = ([f"{letter}{rank}" for rank in range(8)] for letter in "pb")


def _constants(count: int) -> Any:
    return range(count) if INTERPRETED else map(tl.constexpr, range(count))


SUM, AVG, MAX, MIN = _constants(4)

REDUCE, SCATTER, GATHER, EXCHANGE = _constants(4)

# Where the table of a group has, in numbers of 8 bytes: what strong.py begins it with, of which this one is asked here;
# how many calls there were; and what each program of the largest grid counts, and the one that tells.
*_, FAILED = _constants(strong.FAILED + 1)
*_, TURN, COUNTERS = _constants(strong.LONG + 3)

*_, PHASES = _constants(staging.PHASES + 1)
*_, BESIDE = _constants(staging.BESIDE + 1)
FREE, OTHER, PROGRAMS = (
    one if INTERPRETED else tl.constexpr(one) for one in (staging.FREE, staging.OTHER, staging.PROGRAMS)
)


@triton.jit
def _words(bits):
    """Return elements as words of 4 bytes: the first, second, third and fourth of each 16 bytes."""
    if bits.dtype.primitive_bitwidth == 8:
        low, high = tl.split(tl.reshape(bits, [bits.shape[0] // 2, 2]))
        halves = (low.to(tl.int16) & 0xFF) | (high.to(tl.int16) << 8)
    else:
        halves = bits
    if halves.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(halves, [halves.shape[0] // 2, 2]))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        words = halves
    even, odd = tl.split(tl.reshape(words, [words.shape[0] // 2, 2]))
    a, c = tl.split(tl.reshape(even, [even.shape[0] // 2, 2]))
    b, d = tl.split(tl.reshape(odd, [odd.shape[0] // 2, 2]))
    return a, b, c, d


@triton.jit
def _elements(a, b, c, d, BITS: tl.constexpr):
    """Return the elements that :func:`_words` has made words of."""
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * a.shape[0]])
    if BITS.primitive_bitwidth <= 16:
        words = tl.reshape(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)), [8 * a.shape[0]])
    if BITS.primitive_bitwidth == 8:
        words = tl.reshape(tl.join(words.to(tl.int8), (words >> 8).to(tl.int8)), [16 * a.shape[0]])
    return words


@triton.jit
def _sent(word):
    """Return a word as it is sent: that which means free as another NaN."""
    return tl.where(word == FREE, OTHER, word)


@triton.jit
def _pointer(address, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(BITS))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _as_sent(bits):
    """Return elements as words of 4 bytes, as they are sent."""
    a, b, c, d = _words(bits)
    return _sent(a), _sent(b), _sent(c), _sent(d)


@triton.jit
def _as_arrived(bits):
    """Return elements as they arrive at the peers.

    What is reduced needs no such thing: GPUs make the same NaN of all, so it does not matter which of them goes in, and
    what comes out is sent as it is.
    """
    a, b, c, d = _as_sent(bits)
    return _elements(a, b, c, d, bits.dtype)


@triton.jit
def _send(address, bits, left, epoch, EXACT: tl.constexpr):
    """Store elements at ``address`` in a peer's staging: the first ``left`` bytes of them.

    ``EXACT``: in packets of ``epoch``. Neighbours store next to each other, so a slot has first the first half of each
    16 bytes, and then the second.
    """
    SLOT: tl.constexpr = bits.shape[0] * bits.dtype.primitive_bitwidth // 8
    offsets = tl.arange(0, SLOT // 16) * 16
    if EXACT:
        a, b, c, d = _words(bits)
        number = tl.full([SLOT // 16], 0, tl.int32) + epoch
        strong.store_packets(address + offsets, a, b, number, offsets < left)
        strong.store_packets(address + SLOT + offsets, c, d, number, offsets < left)
    else:
        strong.store(address + offsets, _as_sent(bits), offsets < left)


@triton.jit
def _arrived(
    slots, left, address, call, well, WORLD: tl.constexpr, ME: tl.constexpr, SLOT: tl.constexpr,
    STEP: tl.constexpr = 0, epoch=0, EXACT: tl.constexpr = False,
):  # fmt: skip
    """Return what the peers have sent to ``slots``, once it is there; and which threads have waited in vain.

    ``left``, ``STEP`` and the others: see :func:`strong.arrived`, for which each thread has its own 16 bytes.
    """
    offsets = tl.arange(0, SLOT // 16) * 16
    return strong.arrived(slots + offsets, left - offsets, address, call, well, epoch, WORLD, ME, SLOT, STEP, EXACT)


@triton.jit
def _from(arrived, peer: tl.constexpr, ME: tl.constexpr, BITS: tl.constexpr):
    """Return the elements that a peer has sent."""
    row: tl.constexpr = 4 * (peer - (peer > ME))  # as _slot()
    return _elements(arrived[row], arrived[row + 1], arrived[row + 2], arrived[row + 3], BITS)


@triton.jit
def _unless(late, bits, BITS: tl.constexpr):
    """Return ``bits``, and all ones where a thread has waited in vain: NaN to every type that has one.

    So it can't be taken for a result.
    """
    return bits | _elements(late, late, late, late, BITS)


@triton.jit
def _slot(sender: tl.constexpr, owner: tl.constexpr):
    """Return which of the slots of ``owner``, which needs none for itself, is that of what ``sender`` sends it."""
    return sender - (1 if sender > owner else 0)


@triton.jit
def _next(counter):
    """Return the counter of the next call: its phase, and the number of the call, in half of the bits each.

    The phase is not the remainder of the number, which took 0.02 us on an H100 before anything was sent. What is sent
    bit for bit has the number plus 1, which is never 0, that staging begins with. The largest is left out too: how many
    there are is then no multiple of 3, and both halves are the same again only after three times as many calls.
    """
    number = counter.to(tl.int32) + 1
    phase = ((counter >> 32) + 1) % PHASES
    return (phase << 32) | (tl.where(number == -2, 0, number).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _tell_begun(table, base, BEGUN: tl.constexpr, THREADS: tl.constexpr):
    """Tell the peers that a call has begun here, and so that all before it are over, with what they have cleared.

    A program of its own does this beside the others, and waits for no peer. It counts in this rank's own staging, where
    the peers look: a kernel is over when its stores are there, and a release to a peer's memory takes 0.1 us longer.
    Then it counts the call for the programs that this one has not, so that all counters are the same in the end.
    """
    offsets = tl.arange(0, THREADS)
    # It waits for what its thread has under way, so nothing is loaded before.
    strong.release(base + BEGUN + 4 * offsets, offsets == 0)
    counter = _next(tl.load(table + COUNTERS + PROGRAMS))  # its own
    tl.debug_barrier()  # each thread has loaded it before the first stores the next
    tl.store(table + COUNTERS + PROGRAMS, counter)
    others = tl.arange(0, PROGRAMS)
    tl.store(table + COUNTERS + others, counter, mask=others >= tl.num_programs(0) - BESIDE)


@triton.jit
def _keep_pace(
    table, address, call, bases, BEGUN: tl.constexpr, THREADS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr
):
    """See that every peer has begun the call before this one.

    Another program of its own does this, for the next kernel, which begins when all of this one is over. It hardly ever
    waits, because what the peers sent in the last call has arrived, and they told that it had begun before. See
    ``docs/low-latency.md``.
    """
    offsets = tl.arange(0, THREADS)
    peers = offsets + (offsets >= ME).to(tl.int32)
    theirs = tl.full([THREADS], 0, tl.int64)
    for rank in tl.static_range(WORLD):
        theirs = tl.where(peers == rank, bases[rank], theirs)
    over = tl.load(table + TURN).to(tl.int32)
    wanted = peers < tl.where(tl.load(table + FAILED) == 0, WORLD, 0)
    strong.await_begun(theirs + BEGUN, over, wanted, address, call)
    tl.store(table + TURN, (over + 1).to(tl.int64))


@triton.jit
def _work_beside(
    program, table, address, call, bases, BEGUN: tl.constexpr, THREADS: tl.constexpr, WORLD: tl.constexpr,
    ME: tl.constexpr,
):  # fmt: skip
    """Do what one of the programs does that touch no data, whose numbers are below 0."""
    if program == -BESIDE:
        _tell_begun(table, bases[ME], BEGUN, THREADS)
    else:
        _keep_pace(table, address, call, bases, BEGUN, THREADS, WORLD, ME)


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
def _rounded(total, op, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr):
    """Return the bits of the result."""
    if op == AVG:
        total = tl.div_rn(total, tl.full(total.shape, WORLD, tl.float32))
    return total.to(DTYPE).to(BITS, bitcast=True)


@triton.jit
def _reduced(own, arrived, op, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr):
    """Return the sum, or what ``op`` makes, of ``own`` and what has arrived: in the order of the ranks, in fp32."""
    total = tl.zeros([own.shape[0]], tl.float32)
    for rank in tl.static_range(WORLD):
        bits = own if rank == ME else _from(arrived, rank, ME, BITS)
        value = bits.to(DTYPE, bitcast=True).to(tl.float32)
        total = value if rank == 0 else _combine(total, value, op)
    return _unless(arrived[4 * (WORLD - 1)], _rounded(total, op, DTYPE, BITS, WORLD), BITS)


@triton.jit
def _multiple(count, ALIGNED: tl.constexpr):
    """Return ``count``, which the compiler is told to be a multiple of 16 if the tensors are aligned."""
    return count // 16 * 16 if ALIGNED else count


@triton.jit
def _given(address, out, data, size, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the table of the group, the tensors that are written to and read, and the number of their elements."""
    table = _pointer(address, tl.int64, True)
    return table, _pointer(out, BITS, ALIGNED), _pointer(data, BITS, ALIGNED), _multiple(size, ALIGNED)


@triton.jit
def _rounds(chunks, ONCE: tl.constexpr):
    """Return how many chunks this program has. ``ONCE``: each program has just one.

    Told that, the compiler leaves the loop over chunks out, and small calls take 0.07 to 0.26 us less on an H100. Where
    there are more, a program polls for one chunk after it has sent the next (by the two-shot kernel: for the results of
    one after it has reduced the next), so that the link is busy while it clears and stores.
    """
    return 1 if ONCE else tl.cdiv(chunks - (tl.program_id(0) - BESIDE), tl.num_programs(0) - BESIDE)


@triton.jit
def _exchange(
    program, table, address, call, target, sources, count, op, bases, KIND: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr, EXACT: tl.constexpr, AREA: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Exchange ``count`` elements with every rank; ``sources``: what is sent to each. See :func:`one_shot`."""
    behind: tl.constexpr = 0 if ONCE else 1
    pieces: tl.constexpr = KIND % 2 == 1  # SCATTER, EXCHANGE: what is sent is another for each rank
    reduces: tl.constexpr = KIND < GATHER
    width: tl.constexpr = BITS.primitive_bitwidth // 8
    SLOT: tl.constexpr = BLOCK * width
    SPREAD: tl.constexpr = 2 * SLOT if EXACT else SLOT  # packets are twice as long as what they carry
    within = tl.arange(0, BLOCK)
    # Staging is used in pieces of 16 bytes; what is after the tensor's end is zero.
    padded = count if EXACT else (count + 15) // 16 * 16
    programs = tl.num_programs(0) - BESIDE
    counter = tl.load(table + COUNTERS + program)
    epoch = counter.to(tl.int32) + 1
    area = AREA + (counter >> 32) * STRIDE
    sends = (tl.load(table + FAILED) == 0).to(tl.int32)
    well = tl.full([SLOT // 16], 0, tl.int32) + sends
    rounds = _rounds(tl.cdiv(count, BLOCK), ONCE)
    for turn in range(rounds + behind):
        if turn < rounds:
            chunk = program + turn * programs
            at = chunk * BLOCK + within
            left = (padded - chunk * BLOCK) * width * sends
            place = area + chunk.to(tl.int64) * (WORLD - 1) * SPREAD
            bits = tl.load(sources[ME] + at, mask=at < count, other=0)
            if not (EXACT or reduces):
                bits = _as_arrived(bits)  # the same on all ranks
            own = bits
            for step in tl.static_range(1, WORLD):
                if pieces:
                    bits = tl.load(sources[(ME + step) % WORLD] + at, mask=at < count, other=0)
                there = place + _slot(ME, (ME + step) % WORLD) * SPREAD
                _send(bases[(ME + step) % WORLD] + there, bits, left, epoch, EXACT)
            if not reduces:  # before a peer's part is stored, which the input may overlap
                tl.store(target + ME * count + at, own, mask=at < count)
            # Every thread has loaded what it sends before another stores what has come in its place.
            tl.debug_barrier()
        if turn >= behind:
            chunk = program + (turn - behind) * programs
            at = chunk * BLOCK + within
            used = bases[ME] + area + chunk.to(tl.int64) * (WORLD - 1) * SPREAD
            if reduces:
                own = tl.load(sources[ME] + at, mask=at < count, other=0)
            left = (padded - chunk * BLOCK) * width
            found = _arrived(used, left, address, call, well, WORLD, ME, SLOT, 0, epoch, EXACT)
            late = found[4 * (WORLD - 1)]
            if reduces:
                tl.store(target + at, _reduced(own, found, op, DTYPE, BITS, WORLD, ME), mask=at < count)
            else:
                for rank in tl.static_range(WORLD):
                    if rank != ME:
                        bits = _unless(late, _from(found, rank, ME, BITS), BITS)
                        tl.store(target + rank * count + at, bits, mask=at < count)
            well &= late + 1
    tl.store(table + COUNTERS + program, _next(counter))


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op", *BASES])
def one_shot(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr,
    ALIGNED: tl.constexpr, EXACT: tl.constexpr, AREA: tl.constexpr, STRIDE: tl.constexpr, BEGUN: tl.constexpr,
    BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Exchange ``size`` elements with every rank, all in one go.

    ``REDUCE``: each rank sends its tensor to all, and each adds up all of them, in the order of the ranks, in fp32.
    ``SCATTER``: the same with the pieces of ``size`` elements that are each rank's. ``GATHER``: nothing is added up.
    ``EXCHANGE``: each rank sends a piece of ``size`` elements to each.

    ``EXACT``: bit for bit, in packets of 4 bytes and the number of the call. A packet is stored by one store, so what
    has this call's number is this call's, and nothing is cleared.
    """
    table, target, source, count = _given(address, out, data, size, BITS, ALIGNED)
    bases = b0, b1, b2, b3, b4, b5, b6, b7
    program = tl.program_id(0) - BESIDE
    if program < 0:
        _work_beside(program, table, address, call, bases, BEGUN, BLOCK * BITS.primitive_bitwidth // 128, WORLD, ME)
        return
    part = count if KIND % 2 == 1 else 0
    sources = (
        source, source + 1 % WORLD * part, source + 2 % WORLD * part, source + 3 % WORLD * part,
        source + 4 % WORLD * part, source + 5 % WORLD * part, source + 6 % WORLD * part, source + 7 % WORLD * part,
    )  # fmt: skip
    _exchange(
        program, table, address, call, target, sources, count, op, bases, KIND, DTYPE, BITS, WORLD, ME, EXACT, AREA,
        STRIDE, BLOCK, ONCE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["out", *PIECES, "address", "call", "size", "op", *BASES])
def scatter_pieces(
    out: tl.int64, p0: tl.int64, p1: tl.int64, p2: tl.int64, p3: tl.int64, p4: tl.int64, p5: tl.int64, p6: tl.int64,
    p7: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr, ALIGNED: tl.constexpr,
    STRIDE: tl.constexpr, BEGUN: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """``SCATTER`` of :func:`one_shot`, with a piece for each rank at an address of its own."""
    table, target, _, count = _given(address, out, p0, size, BITS, ALIGNED)
    bases = b0, b1, b2, b3, b4, b5, b6, b7
    program = tl.program_id(0) - BESIDE
    if program < 0:
        _work_beside(program, table, address, call, bases, BEGUN, BLOCK * BITS.primitive_bitwidth // 128, WORLD, ME)
        return
    sources = (
        _pointer(p0, BITS, ALIGNED), _pointer(p1, BITS, ALIGNED), _pointer(p2, BITS, ALIGNED),
        _pointer(p3, BITS, ALIGNED), _pointer(p4, BITS, ALIGNED), _pointer(p5, BITS, ALIGNED),
        _pointer(p6, BITS, ALIGNED), _pointer(p7, BITS, ALIGNED),
    )  # fmt: skip
    _exchange(
        program, table, address, call, target, sources, count, op, bases, SCATTER, DTYPE, BITS, WORLD, ME, False, 0,
        STRIDE, BLOCK, ONCE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op", *BASES])
def two_shot(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr, ALIGNED: tl.constexpr,
    STRIDE: tl.constexpr, BEGUN: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Reduce as :func:`one_shot` does, with less to send: a rank reduces one piece of each chunk, for all of them.

    A chunk has ``WORLD`` pieces of ``BLOCK`` elements, and its slots twice: through the first the peers send what they
    have for the piece that is this rank's, and through the second the results of the pieces that are theirs.
    """
    behind: tl.constexpr = 0 if ONCE else 1
    width: tl.constexpr = BITS.primitive_bitwidth // 8
    SLOT: tl.constexpr = BLOCK * width
    table, target, source, count = _given(address, out, data, size, BITS, ALIGNED)
    bases = b0, b1, b2, b3, b4, b5, b6, b7
    programs = tl.num_programs(0) - BESIDE
    program = tl.program_id(0) - BESIDE
    if program < 0:
        _work_beside(program, table, address, call, bases, BEGUN, SLOT // 16, WORLD, ME)
        return
    within = tl.arange(0, BLOCK)
    padded = (count + 15) // 16 * 16  # as in _exchange()
    counter = tl.load(table + COUNTERS + program)
    area = (counter >> 32) * STRIDE
    sends = (tl.load(table + FAILED) == 0).to(tl.int32)
    well = tl.full([SLOT // 16], 0, tl.int32) + sends
    rounds = _rounds(tl.cdiv(count, WORLD * BLOCK), ONCE)
    for turn in range(rounds):
        chunk = program + turn * programs
        place = area + chunk.to(tl.int64) * 2 * (WORLD - 1) * SLOT
        for step in tl.static_range(1, WORLD):
            first = (chunk * WORLD + (ME + step) % WORLD) * BLOCK
            bits = tl.load(source + first + within, mask=first + within < count, other=0)
            there = place + _slot(ME, (ME + step) % WORLD) * SLOT
            _send(bases[(ME + step) % WORLD] + there, bits, (padded - first) * width * sends, 0, False)
    heard = well
    tl.debug_barrier()  # as in _exchange()
    for turn in range(rounds + behind):
        if turn < rounds:
            chunk = program + turn * programs
            place = area + chunk.to(tl.int64) * 2 * (WORLD - 1) * SLOT
            first = (chunk * WORLD + ME) * BLOCK
            at = first + within
            left = (padded - first) * width
            own = tl.load(source + at, mask=at < count, other=0)
            found = _arrived(bases[ME] + place, left, address, call, well, WORLD, ME, SLOT)
            result = _reduced(own, found, op, DTYPE, BITS, WORLD, ME)
            well &= found[4 * (WORLD - 1)] + 1
            for step in tl.static_range(1, WORLD):
                there = place + (WORLD - 1 + _slot(ME, (ME + step) % WORLD)) * SLOT
                _send(bases[(ME + step) % WORLD] + there, result, left * well, 0, False)
            tl.store(target + at, result, mask=at < count)
        if turn >= behind:
            chunk = program + (turn - behind) * programs
            used = bases[ME] + area + (chunk.to(tl.int64) * 2 + 1) * (WORLD - 1) * SLOT
            first = chunk * WORLD * BLOCK
            found = _arrived(used, (padded - first) * width, address, call, heard & well, WORLD, ME, SLOT, SLOT)
            late = found[4 * (WORLD - 1)]
            for rank in tl.static_range(WORLD):
                if rank != ME:
                    at = first + rank * BLOCK + within
                    bits = _unless(late, _from(found, rank, ME, BITS), BITS)
                    tl.store(target + at, bits, mask=at < count)
            heard &= late + 1
    tl.store(table + COUNTERS + program, _next(counter))


@triton.jit(do_not_specialize=["out", "own", "others", "size", "op"])
def combine(
    out: tl.int64, own: tl.int64, others: tl.int64, size: tl.int32, op: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce ``own``, and at ``others`` what each of the other ranks has sent, ``size`` elements each.

    In the order of the ranks, in fp32, as the other kernels do. It waits for no peer.
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
        tl.store(target + at, _rounded(total, op, DTYPE, BITS, WORLD), mask=at < count)


def launcher(
    kernel: Any, constants: dict[str, object], grid: int, warps: int, registers: int | None = None,
    bases: tuple[int, ...] = (),
) -> Callable[..., None]:  # fmt: skip
    """Compile ``kernel``, and return what launches it: ``launch(stream, *arguments)``, on the current device.

    ``registers``: of a thread, at most. ``bases``: the last arguments, which are always the same.

    Triton's own way to launch looks at all arguments, to find or compile what fits them. Even what it launches with
    once that is known took 7 us on an H200's host, and the driver alone takes 3.
    """
    if INTERPRETED:

        def interpret(stream: int, *arguments: int) -> None:
            kernel[(grid,)](*arguments, *bases, **constants)

        return interpret
    parameters = kernel.signature.parameters
    widths = [str(one.annotation)[-2:] for name, one in parameters.items() if name not in constants]
    compiled = kernel.warmup(*[0] * len(widths), **constants, grid=(grid,), num_warps=warps, maxnreg=registers)
    run = compiled[(grid, 1, 1)]  # which loads it
    kinds = _parameters(compiled, widths)
    preset = [0] * (len(widths) - len(bases)) + [*bases]
    if kinds is not None:
        launch = _torch.kernel_launcher(compiled.function, grid, 32 * warps, compiled.metadata.shared, kinds, preset)
        if launch is not None:
            launch.compiled = compiled  # type: ignore[attr-defined]  # Triton 3.9 unloads a kernel that it forgets
            return launch
    values = tuple(constants[name] for name in parameters if name in constants)  # in the kernel's order

    def launch_by_triton(stream: int, *arguments: int) -> None:
        run(*arguments, *bases, *values, stream=stream)

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
