"""The kernel for large tensors, in Triton: a two-shot all_reduce whose staging is small and used again and again.

A tensor is cut into *chunks* of one *piece* for each rank, and each program works on every so-manieth chunk. In an
*iteration* it copies the results that the peers have sent of an earlier chunk, sends every peer that peer's piece of
another, reduces its own piece of the one between them, which the peers have sent, and sends all of them the result. For
that a program has two *phases* of staging, which take turns, and in each of them a place and a *flag* for each peer,
for what it sends first and for its results.

A flag holds the number of the iteration whose data is there, counted over all calls, so nothing is ever cleared, any
bits can be sent, and calls of all types and sizes use the same staging. No rank tells another that it has read
something: that follows from what it sends next. ``docs/low-latency.md`` has the proof.

Imported when low_latency() is switched on, and not before: it imports Triton.
"""

import triton
import triton.language as tl

from safecomm.peers import staging, strong
from safecomm.peers.kernels import (
    AVG,
    FAILED,
    GATHER,
    INTERPRETED,
    SCATTER,
    _combine,
    _constants,
    _given,
    _pointer,
)

*_, FLAG = _constants(staging.FLAG + 1)

# The kernels' TICKET says where in the table of a group the ring's own part begins: with what counts the programs that
# have begun. Behind it come the addresses of the ranks' staging, and the turn of each program.

if INTERPRETED:

    def _release():
        pass  # the interpreter runs one thing after the other

    def _set(address, value):
        tl.store(address.to(tl.pointer_type(tl.int32)), value)

else:

    @triton.jit
    def _release():
        """Let what :func:`_set` stores next be seen, also by peers, after all that the threads did before."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            bar.sync 0;
            mov.b32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.sys;
            mov.b32 $0, $1;
            }""",
            "=r,r,~{memory}", [tl.full([], 0, tl.int32)], tl.int32, False, 1,
        )  # fmt: skip

    @triton.jit
    def _set(address, value):
        """Store a flag, once."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.b32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.relaxed.sys.global.b32 [$1], $2;
            mov.b32 $0, $2;
            }""",
            "=r,l,r,~{memory}", [address, value], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def _divided(total, count: tl.constexpr, REDUCED: tl.constexpr):
    return tl.div_rn(total, tl.full(total.shape, count, REDUCED)) if REDUCED == tl.float32 else total / count


@triton.jit
def _place(
    number, phase, part: tl.constexpr, sender: tl.constexpr, owner: tl.constexpr, PHASES: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Return which of the places, and flags, in the staging of ``owner`` is that of what ``sender`` sends it."""
    slot: tl.constexpr = sender - (1 if sender > owner else 0)
    return ((number * PHASES + phase) * (WORLD - 1) + slot) * 2 + part


@triton.jit
def _number(table, TICKET: tl.constexpr):
    """Return the number of this program, among those of its kernel.

    A program waits for the peers' program of its number. It takes it when it begins, so all below it are running or
    through, and the lowest that is not through runs on every rank, however few programs a device runs at once.
    """
    number = tl.atomic_add(table + TICKET, tl.full([], 1, tl.int64)).to(tl.int32)
    if number == tl.num_programs(0) - 1:
        tl.store(table + TICKET, tl.full([], 0, tl.int64))
    return number


@triton.jit
def _bases(table, TICKET: tl.constexpr, WORLD: tl.constexpr):
    """Return where the staging of each of eight ranks begins, as far as there are so many."""
    bases = table + TICKET + 1
    b0, b1, b2, b3 = tl.load(bases), tl.load(bases + 1), tl.load(bases + 2 % WORLD), tl.load(bases + 3 % WORLD)
    b4, b5 = tl.load(bases + 4 % WORLD), tl.load(bases + 5 % WORLD)
    b6, b7 = tl.load(bases + 6 % WORLD), tl.load(bases + 7 % WORLD)
    return b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def _tell(
    number, turn, begin, rounds, sent, back, bases, FLAGS: tl.constexpr, PHASES: tl.constexpr, WORLD: tl.constexpr,
    ME: tl.constexpr,
):  # fmt: skip
    """Set the flags at all peers of what was stored for iteration ``sent``, and of what goes back for another."""
    _release()
    for step in tl.static_range(1, WORLD):
        peer = (ME + step) % WORLD
        flags = bases[(ME + step) % WORLD] + FLAGS
        if sent < rounds:
            place = _place(number, (begin + sent) % PHASES, 0, ME, peer, PHASES, WORLD)
            _set(flags + place * FLAG, (turn + sent + 1).to(tl.int32))
        if (back >= 0) & (back < rounds):
            place = _place(number, (begin + back) % PHASES, 1, ME, peer, PHASES, WORLD)
            _set(flags + place * FLAG, (turn + back + 1).to(tl.int32))


@triton.jit
def _rounds(pieces, number):
    """Return how many of ``pieces`` are this program's."""
    return tl.maximum(tl.cdiv(pieces - number, tl.num_programs(0)), 0)


@triton.jit
def _poisoned(timed_out, bits, BITS: tl.constexpr):
    """Return ``bits``; if a peer has timed out, NaN, or of integers the one that has all bits set."""
    return tl.where(timed_out != 0, -1, bits).to(BITS)


@triton.jit
def _arrived(address, within, mask, BITS: tl.constexpr):
    """Return what a peer has stored, without the cache, which does not see it."""
    return tl.load(_pointer(address, BITS, True) + within, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def _bits(total, op, DTYPE: tl.constexpr, BITS: tl.constexpr, REDUCED: tl.constexpr, WORLD: tl.constexpr):
    """Return the bits of the result."""
    if REDUCED.is_floating():
        if op == AVG:
            total = _divided(total, WORLD, REDUCED)
    return total.to(DTYPE).to(BITS, bitcast=True)


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op"])
def ring_reduce(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, REDUCED: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr,
    ALIGNED: tl.constexpr, AREA: tl.constexpr, FLAGS: tl.constexpr, TICKET: tl.constexpr, PLACE: tl.constexpr,
    PHASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce ``size`` elements of every rank, in the order of the ranks, in the type ``REDUCED``.

    ``BLOCK``: elements of a piece, of at most ``PLACE`` bytes.
    """
    table, target, source, count = _given(address, out, data, size, BITS, ALIGNED)
    within = tl.arange(0, BLOCK)
    bases = _bases(table, TICKET, WORLD)
    own = bases[ME]
    # Another program may give up meanwhile, and what the threads do has barriers.
    timed_out = strong.agreed((tl.load(table + FAILED) != 0).to(tl.int32))
    number = _number(table, TICKET)
    turn = tl.load(table + TICKET + 1 + WORLD + number)
    begin = (turn % PHASES).to(tl.int32)
    rounds = _rounds(tl.cdiv(count, WORLD * BLOCK), number)
    peer = (ME + 1) % WORLD
    if WORLD == 2:  # what is sent next is loaded while this program waits for its peer
        at = (number * WORLD + peer) * BLOCK + within
        loaded = tl.load(source + at, mask=at < count, other=0)
    for turned in range(0, rounds + 2):
        copied = turned - 2
        if copied >= 0:
            first = (number + copied * tl.num_programs(0)) * WORLD
            phase = (begin + copied) % PHASES
            for rank in tl.static_range(WORLD):
                if rank != ME:
                    place = _place(number, phase, 1, rank, ME, PHASES, WORLD)
                    flag = own + FLAGS + place * FLAG
                    timed_out = strong.await_flag(flag, (turn + copied + 1).to(tl.int32), address, call, timed_out)
                    at = (first + rank) * BLOCK + within
                    bits = _arrived(own + AREA + place.to(tl.int64) * PLACE, within, at < count, BITS)
                    tl.store(target + at, _poisoned(timed_out, bits, BITS), mask=at < count)
        if (turned < rounds) & (timed_out == 0):
            first = (number + turned * tl.num_programs(0)) * WORLD
            phase = (begin + turned) % PHASES
            for step in tl.static_range(1, WORLD):
                peer = (ME + step) % WORLD
                at = (first + peer) * BLOCK + within
                there = AREA + _place(number, phase, 0, ME, peer, PHASES, WORLD).to(tl.int64) * PLACE
                bits = loaded if WORLD == 2 else tl.load(source + at, mask=at < count, other=0)
                there += bases[(ME + step) % WORLD]
                tl.store(_pointer(there, BITS, True) + within, bits, mask=at < count)
            if WORLD == 2:
                at = (first + tl.num_programs(0) * WORLD + peer) * BLOCK + within
                loaded = tl.load(source + at, mask=at < count, other=0)
        reduced = turned - 1
        if (reduced >= 0) & (reduced < rounds):
            at = ((number + reduced * tl.num_programs(0)) * WORLD + ME) * BLOCK + within
            phase = (begin + reduced) % PHASES
            mine = tl.load(source + at, mask=at < count, other=0)
            for rank in tl.static_range(WORLD):
                if rank != ME:
                    flag = own + FLAGS + _place(number, phase, 0, rank, ME, PHASES, WORLD) * FLAG
                    timed_out = strong.await_flag(flag, (turn + reduced + 1).to(tl.int32), address, call, timed_out)
            total = tl.zeros([BLOCK], REDUCED)
            for rank in tl.static_range(WORLD):
                bits = mine
                if rank != ME:
                    here = own + AREA + _place(number, phase, 0, rank, ME, PHASES, WORLD).to(tl.int64) * PLACE
                    bits = _arrived(here, within, at < count, BITS)
                value = bits.to(DTYPE, bitcast=True).to(REDUCED)
                total = value if rank == 0 else _combine(total, value, op).to(REDUCED)
            result = _poisoned(timed_out, _bits(total, op, DTYPE, BITS, REDUCED, WORLD), BITS)
            if timed_out == 0:
                for step in tl.static_range(1, WORLD):
                    peer = (ME + step) % WORLD
                    there = AREA + _place(number, phase, 1, ME, peer, PHASES, WORLD).to(tl.int64) * PLACE
                    there += bases[(ME + step) % WORLD]
                    tl.store(_pointer(there, BITS, True) + within, result, mask=at < count)
            tl.store(target + at, result, mask=at < count)
        if (turned < rounds + 1) & (timed_out == 0):
            _tell(number, turn, begin, rounds, turned, reduced, bases, FLAGS, PHASES, WORLD, ME)
    tl.store(table + TICKET + 1 + WORLD + number, turn + rounds)


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op"])
def ring_one_way(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, REDUCED: tl.constexpr, WORLD: tl.constexpr,
    ME: tl.constexpr, ALIGNED: tl.constexpr, AREA: tl.constexpr, FLAGS: tl.constexpr, TICKET: tl.constexpr,
    PLACE: tl.constexpr, PHASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``GATHER`` or ``SCATTER`` of parts of ``size`` elements.

    Pieces go where :func:`ring_reduce` has its results, so what that sends first always finds its places free.
    """
    table, target, source, count = _given(address, out, data, size, BITS, ALIGNED)
    within = tl.arange(0, BLOCK)
    bases = _bases(table, TICKET, WORLD)
    own = bases[ME]
    # Another program may give up meanwhile, and what the threads do has barriers.
    timed_out = strong.agreed((tl.load(table + FAILED) != 0).to(tl.int32))
    number = _number(table, TICKET)
    turn = tl.load(table + TICKET + 1 + WORLD + number)
    begin = (turn % PHASES).to(tl.int32)
    rounds = _rounds(tl.cdiv(count, BLOCK), number)
    if KIND == GATHER:  # what is sent next is loaded while this program waits for its peers
        at = number * BLOCK + within
        loaded = tl.load(source + at, mask=at < count, other=0)
    for turned in range(0, rounds + 1):
        copied = turned - 1
        if copied >= 0:
            at = (number + copied * tl.num_programs(0)) * BLOCK + within
            phase = (begin + copied) % PHASES
            if KIND == SCATTER:
                mine = tl.load(source + ME * count + at, mask=at < count, other=0)
            for rank in tl.static_range(WORLD):
                if rank != ME:
                    flag = own + FLAGS + _place(number, phase, 1, rank, ME, PHASES, WORLD) * FLAG
                    timed_out = strong.await_flag(flag, (turn + copied + 1).to(tl.int32), address, call, timed_out)
            total = tl.zeros([BLOCK], REDUCED)
            for rank in tl.static_range(WORLD):
                here = own + AREA + _place(number, phase, 1, rank, ME, PHASES, WORLD).to(tl.int64) * PLACE
                if KIND == GATHER:
                    if rank != ME:
                        bits = _poisoned(timed_out, _arrived(here, within, at < count, BITS), BITS)
                        tl.store(target + rank * count + at, bits, mask=at < count)
                else:
                    bits = mine if rank == ME else _arrived(here, within, at < count, BITS)
                    value = bits.to(DTYPE, bitcast=True).to(REDUCED)
                    total = value if rank == 0 else _combine(total, value, op).to(REDUCED)
            if KIND == SCATTER:
                result = _poisoned(timed_out, _bits(total, op, DTYPE, BITS, REDUCED, WORLD), BITS)
                tl.store(target + at, result, mask=at < count)
        if turned < rounds:
            at = (number + turned * tl.num_programs(0)) * BLOCK + within
            phase = (begin + turned) % PHASES
            if timed_out == 0:
                for step in tl.static_range(1, WORLD):
                    peer = (ME + step) % WORLD
                    there = AREA + _place(number, phase, 1, ME, peer, PHASES, WORLD).to(tl.int64) * PLACE
                    there += bases[(ME + step) % WORLD]
                    bits = loaded if KIND == GATHER else tl.load(source + peer * count + at, mask=at < count, other=0)
                    tl.store(_pointer(there, BITS, True) + within, bits, mask=at < count)
            if KIND == GATHER:
                tl.store(target + ME * count + at, loaded, mask=at < count)
                at += tl.num_programs(0) * BLOCK
                loaded = tl.load(source + at, mask=at < count, other=0)
            if timed_out == 0:
                _tell(number, turn, begin, rounds, rounds, turned, bases, FLAGS, PHASES, WORLD, ME)
    tl.store(table + TICKET + 1 + WORLD + number, turn + rounds)
