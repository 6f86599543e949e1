"""The kernels, in Triton: each rank stores into its peers' staging, and polls its own until everything is there.

The data is its own flag. Staging that is free holds in each word of 4 bytes the bits of one NaN, which no rank ever
sends (it sends another NaN in its place), so a word that is anything else has arrived: no data waits for a barrier or
for a flag beside it, and for no order between its stores. What is sent bit for bit has the number of the call in its
place, in each 8 bytes. ``docs/low-latency.md`` has the proof.

A tensor is cut into *chunks*. One program works on a chunk at a time, and sends it through a *channel* of the staging.
A channel has three *phases*, each with a slot for every peer, which take turns: a call clears what it has read, and two
calls later that is known to the peers. The phase of a channel lies in device memory, where replays of a CUDA graph
advance it too.

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
from safecomm.peers import staging, strong
from safecomm.peers.strong import INTERPRETED

PIECES, BASES = ([f"{letter}{rank}" for rank in range(8)] for letter in "pb")


def _constants(count: int) -> Any:
    return range(count) if INTERPRETED else map(tl.constexpr, range(count))


SUM, AVG, MAX, MIN = _constants(4)

REDUCE, SCATTER, GATHER, EXCHANGE = _constants(4)

# What the table of a group holds, in numbers of 8 bytes; behind it comes the phase of each channel.
LIMIT, WORD, FAILED, LONG, TURN = _constants(5)

*_, PHASES = _constants(4)
SLOT, THREADS = (4096, 256) if INTERPRETED else (tl.constexpr(4096), tl.constexpr(256))
*_, LOOKS = _constants(strong.LOOKS + 1)
*_, BESIDE = _constants(staging.BESIDE + 1)
FREE, OTHER = (one if INTERPRETED else tl.constexpr(one) for one in (staging.FREE, staging.OTHER))

if INTERPRETED:

    def _clock() -> Any:
        os.sched_yield()  # to the peers, which may have fewer processors than they are
        return tl.full([], time.monotonic_ns(), tl.int64)

else:
    _clock = globaltimer


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
def _row(words, row: tl.constexpr):
    """Return one of the rows of ``words``."""
    rows = tl.arange(0, words.shape[0])[:, None]
    return tl.sum(tl.where(rows == row, words, 0), axis=0)


@triton.jit
def _of(a, b, c, d, row: tl.constexpr, BITS: tl.constexpr):
    """Return the elements that the peer of a row has sent."""
    return _elements(_row(a, row), _row(b, row), _row(c, row), _row(d, row), BITS)


@triton.jit
def _peers(WORLD: tl.constexpr, ME: tl.constexpr):
    """Return the ranks of the peers, as a column of a power of two; the last may be none."""
    rows: tl.constexpr = 1 if WORLD == 2 else 2 if WORLD == 3 else 4 if WORLD <= 5 else 8
    peers = tl.arange(0, rows)
    return (peers + (peers >= ME).to(tl.int32))[:, None]


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
def _word(table):
    """Return a pointer to what the host is told: that a call has given up, and that one has waited long."""
    return tl.load(table + WORD).to(tl.pointer_type(tl.int32))


@triton.jit
def _fail(table, timed_out, call):
    """Tell the calls that come after that a peer has timed out; and the host, if this call is the first."""
    if timed_out != 0:
        if tl.atomic_cas(table + FAILED, tl.full([], 0, tl.int64), tl.full([], 1, tl.int64)) == 0:
            tl.store(_word(table), call)


@triton.jit
def _seen(addresses, wanted, epoch, EXACT: tl.constexpr):
    """Return what lies at each address, and for each thread whether something there has not arrived."""
    if addresses.shape[0] == 1:
        # Each thread looks for itself until all is there. Of several peers that would be one load after the other.
        if EXACT:
            a, b, c, d, missing = strong.await_packets(addresses, epoch, wanted)
        else:
            a, b, c, d, missing = strong.await_words(addresses, wanted)
    elif EXACT:
        a, b, c, d, missing = strong.look_at_packets(addresses, epoch, wanted)
    else:
        a, b, c, d, missing = strong.look_at_words(addresses, wanted)
    return a, b, c, d, tl.max(missing.to(tl.int32), axis=0)


@triton.jit
def _arrived(
    table, call, slots, left, wait_budget, timed_out, WORLD: tl.constexpr, ME: tl.constexpr, STEP: tl.constexpr = 0,
    epoch=0, EXACT: tl.constexpr = False,
):  # fmt: skip
    """Return what the peers have sent to ``slots``, once it is all there; and 1 if it takes, or has taken, too long.

    ``left``: the bytes that the peers send; ``STEP``: how many less a peer sends than the one before. The clock is slow
    to read, so it is left alone until some looks were in vain. Each thread reads its own, so whether it took too long
    is reduced like the elements: all threads must leave the loop, which has barriers, together.
    """
    peers = _peers(WORLD, ME)
    offsets = tl.arange(0, THREADS)[None, :] * 16
    numbers = peers - (peers > ME).to(tl.int32)  # as in _slot()
    addresses = slots + numbers * (2 * SLOT if EXACT else SLOT) + offsets
    wanted = (peers < WORLD) & (offsets < left - peers * STEP)
    a, b, c, d, missing = _seen(addresses, wanted, epoch, EXACT)
    waiting = tl.max(missing, axis=0)
    looks = 0
    most: tl.constexpr = 1 if addresses.shape[0] == 1 else LOOKS  # for one peer, _seen() has looked as often
    began = tl.full([], 0, tl.int64)
    while waiting != 0:
        a, b, c, d, missing = _seen(addresses, wanted, epoch, EXACT)
        waiting = tl.max(missing, axis=0)
        looks += 1
        if looks == most:
            looks = 0
            now = _clock()
            began = tl.where(began == 0, now, began)
            tl.store(_word(table) + 1, call, mask=now - began >= tl.load(table + LONG))
            tired = tl.max(missing & (now - began >= wait_budget).to(tl.int32), axis=0)
            if (timed_out | tired) != 0:
                timed_out = 1
                waiting = 0
    return a, b, c, d, timed_out


@triton.jit
def _send(base, place, bits, left):
    """Store elements at ``place`` of the staging at ``base``: the first ``left`` bytes of them."""
    offsets = tl.arange(0, THREADS) * 16
    strong.store(base + place + offsets, _as_sent(bits), offsets < left)


@triton.jit
def _send_packets(base, place, bits, epoch, left):
    """Store elements at ``place`` of the staging at ``base`` in packets of ``epoch``: the first ``left`` bytes of them.

    Neighbours store next to each other, so a slot has first the first half of each 16 bytes, and then the second.
    """
    offsets = tl.arange(0, THREADS) * 16
    a, b, c, d = _words(bits)
    number = tl.full([THREADS], 0, tl.int32) + epoch
    strong.store_packets(base + place + offsets, a, b, number, offsets < left)
    strong.store_packets(base + place + SLOT + offsets, c, d, number, offsets < left)


@triton.jit
def _slot(sender: tl.constexpr, owner: tl.constexpr):
    """Return which of the slots of ``owner``, which needs none for itself, is that of what ``sender`` sends it."""
    return sender - (1 if sender > owner else 0)


@triton.jit
def _slots(channel, phase, WORLD: tl.constexpr):
    """Return where the slots of a phase of a channel are, in bytes from where the first channel begins."""
    return ((channel * PHASES + phase) * (WORLD - 1)).to(tl.int64) * SLOT


@triton.jit
def _clear(slots, WORLD: tl.constexpr, ME: tl.constexpr):
    """Make the slots of a phase free.

    By weak stores: peers' stores to the same places, and this rank's loads, are ordered against them.
    """
    pointers = _pointer(slots, tl.int32, True) + tl.arange(0, SLOT // 4)
    for rank in tl.static_range(WORLD):
        if rank != ME:
            tl.store(pointers + _slot(rank, ME) * (SLOT // 4), tl.full([SLOT // 4], FREE, tl.int32))


@triton.jit
def _tell_begun(base, BEGUN: tl.constexpr):
    """Tell the peers that a call has begun here, and so that all before it are over, with what they have cleared.

    A program of its own does this beside the others, and waits for no peer. It counts in this rank's own staging, where
    the peers look: a kernel is over when its stores are there, and a release to a peer's memory takes 0.1 us longer.
    """
    offsets = tl.arange(0, THREADS)
    # It waits for what its thread has under way, so nothing is loaded before.
    strong.release(base + BEGUN + 4 * offsets, offsets == 0)


@triton.jit
def _keep_pace(table, call, bases, BEGUN: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr):
    """See that every peer has begun the call before this one.

    Another program of its own does this, for the next kernel, which begins when all of this one is over. It hardly ever
    waits, because what the peers sent in the last call has arrived, and they told that it had begun before. See
    ``docs/low-latency.md``.
    """
    offsets = tl.arange(0, THREADS)
    peers = offsets + (offsets >= ME).to(tl.int32)
    wanted = peers < WORLD
    theirs = tl.full([THREADS], 0, tl.int64)
    for rank in tl.static_range(WORLD):
        theirs = tl.where(peers == rank, bases[rank], theirs)
    over = tl.load(table + TURN).to(tl.int32)
    wait_budget, _, timed_out = _wait_budget(table, 0)
    waiting = 1
    looks = 0
    began = tl.full([], 0, tl.int64)
    while waiting != 0:
        # By difference, because the count begins again; and a peer may be a call ahead.
        missing = ((strong.acquire(theirs + BEGUN, wanted) - over < 0) & wanted).to(tl.int32)
        waiting = tl.max(missing, axis=0)
        looks += 1
        if looks == LOOKS:
            looks = 0
            now = _clock()
            began = tl.where(began == 0, now, began)
            if tl.max(missing & (now - began >= wait_budget).to(tl.int32), axis=0) != 0:
                timed_out = 1
                waiting = 0
    tl.store(table + TURN, (over + 1).to(tl.int64))
    _fail(table, timed_out, call)


@triton.jit
def _work_beside(program, table, call, bases, BEGUN: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr):
    """Do what one of the programs does that touch no data, whose numbers are below 0."""
    if program == -BESIDE:
        _tell_begun(bases[ME], BEGUN)
    else:
        _keep_pace(table, call, bases, BEGUN, WORLD, ME)


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
def _unless(timed_out, bits, BITS: tl.constexpr):
    """Return ``bits``, and all ones in their place if a peer has timed out: NaN to every type that has one."""
    return tl.where(timed_out != 0, -1, bits).to(BITS)


@triton.jit
def _averaged(total, op, WORLD: tl.constexpr):
    if op == AVG:
        total = tl.div_rn(total, tl.full(total.shape, WORLD, tl.float32))
    return total


@triton.jit
def _rounded(total, op, timed_out, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr):
    """Return the bits of the result: NaN if a peer has timed out, so that it can't be taken for one."""
    total = tl.where(timed_out != 0, float("nan"), _averaged(total, op, WORLD))
    return total.to(DTYPE).to(BITS, bitcast=True)


@triton.jit
def _reduced(own, a, b, c, d, op, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr):
    """Return the sum, or what ``op`` makes, of ``own`` and what the peers have sent: in the order of the ranks."""
    total = tl.zeros([own.shape[0]], tl.float32)
    for rank in tl.static_range(WORLD):
        bits = own if rank == ME else _of(a, b, c, d, rank - (rank > ME), BITS)
        value = bits.to(DTYPE, bitcast=True).to(tl.float32)
        total = value if rank == 0 else _combine(total, value, op)
    return total


@triton.jit
def _wait_budget(table, padded):
    """Return how long to wait for a peer, how many elements to send, and 1 if an earlier call has given up.

    A call after one that has given up waits for no peer. It sends nothing either, because a peer that is only slow may
    still be in the earlier one; and it takes nothing for a result, because what such a peer sends late lies there.
    """
    well = tl.load(table + FAILED) == 0
    return tl.where(well, tl.load(table + LIMIT), 0), tl.where(well, padded, 0), 1 - well.to(tl.int32)


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
def _phase_and_epoch(counter, EXACT: tl.constexpr):
    """Return the phase of a channel's next call, and its number if it sends bit for bit: both halves of its counter.

    The phase is not the remainder of the number, which took 0.02 us on an H100 before anything was sent.
    """
    halves = tl.load(counter)
    phase = (halves >> 32 if EXACT else halves).to(tl.int32)
    epoch = halves.to(tl.int32) + 1 if EXACT else 0
    return phase, epoch


@triton.jit
def _count(counter, phase, epoch, EXACT: tl.constexpr):
    """Store what the next call finds there.

    No exact call has the number 0, which staging begins with. The largest is left out too: how many there are is then
    no multiple of 3, and both halves are the same again only after three times as many calls.
    """
    if EXACT:
        number = tl.where(epoch == -2, 0, epoch)
        tl.store(counter, (((phase + 1) % PHASES).to(tl.int64) << 32) | (number.to(tl.int64) & 0xFFFFFFFF))
    else:
        tl.store(counter, ((phase + 1) % PHASES).to(tl.int64))


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op", *BASES])
def one_shot(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr,
    ALIGNED: tl.constexpr, EXACT: tl.constexpr, AREA: tl.constexpr, BEGUN: tl.constexpr, FIRST_PHASE: tl.constexpr,
    BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Exchange ``size`` elements with every rank, all in one go.

    ``REDUCE``: each rank sends its tensor to all, and each adds up all of them, in the order of the ranks, in fp32.
    ``SCATTER``: the same with the pieces of ``size`` elements that are each rank's. ``GATHER``: nothing is added up.
    ``EXCHANGE``: each rank sends a piece of ``size`` elements to each.

    ``EXACT``: bit for bit, in packets of 4 bytes and the number of the call. A packet is stored by one store, so what
    has this call's number is this call's, and nothing is cleared.
    """
    behind: tl.constexpr = 0 if ONCE else 1
    pieces: tl.constexpr = KIND % 2 == 1  # SCATTER, EXCHANGE: what is sent is another for each rank
    reduces: tl.constexpr = KIND < GATHER
    spread: tl.constexpr = 2 if EXACT else 1  # packets are twice as long as what they carry
    bases = b0, b1, b2, b3, b4, b5, b6, b7
    table, target, source, count = _given(address, out, data, size, BITS, ALIGNED)
    # Staging is used in pieces of 16 bytes; what is after the tensor's end is zero.
    padded = count if EXACT else (count + 15) // 16 * 16
    within = tl.arange(0, BLOCK)
    width: tl.constexpr = BITS.primitive_bitwidth // 8
    programs = tl.num_programs(0) - BESIDE
    program = tl.program_id(0) - BESIDE
    if program < 0:
        _work_beside(program, table, call, bases, BEGUN, WORLD, ME)
        return
    wait_budget, sendable, timed_out = _wait_budget(table, padded)
    rounds = _rounds(tl.cdiv(count, BLOCK), ONCE)
    for turn in range(rounds + behind):
        if turn < rounds:
            chunk = program + turn * programs
            at = chunk * BLOCK + within
            left = (sendable - chunk * BLOCK) * width
            phase, epoch = _phase_and_epoch(table + FIRST_PHASE + chunk, EXACT)
            place = AREA + spread * _slots(chunk, phase, WORLD)
            bits = tl.load(source + (ME * count if KIND == EXCHANGE else 0) + at, mask=at < count, other=0)
            if not (EXACT or reduces):
                bits = _as_arrived(bits)  # the same on all ranks
            own = bits
            for step in tl.static_range(1, WORLD):
                peer = (ME + step) % WORLD
                if pieces:
                    bits = tl.load(source + peer * count + at, mask=at < count, other=0)
                there = place + _slot(ME, (ME + step) % WORLD) * (spread * SLOT)
                if EXACT:
                    _send_packets(bases[(ME + step) % WORLD], there, bits, epoch, left)
                else:
                    _send(bases[(ME + step) % WORLD], there, bits, left)
            if not reduces:  # before a peer's part is stored, which the input may overlap
                tl.store(target + ME * count + at, own, mask=at < count)
        if turn >= behind:
            chunk = program + (turn - behind) * programs
            at = chunk * BLOCK + within
            phase, epoch = _phase_and_epoch(table + FIRST_PHASE + chunk, EXACT)
            used = bases[ME] + AREA + spread * _slots(chunk, phase, WORLD)
            if reduces:
                own = tl.load(source + (ME * count if KIND == SCATTER else 0) + at, mask=at < count, other=0)
            a, b, c, d, timed_out = _arrived(
                table, call, used, (padded - chunk * BLOCK) * width, wait_budget, timed_out, WORLD, ME, 0, epoch, EXACT
            )
            if not EXACT:
                _clear(used, WORLD, ME)
            if reduces:
                total = _reduced(own, a, b, c, d, op, DTYPE, BITS, WORLD, ME)
                tl.store(target + at, _rounded(total, op, timed_out, DTYPE, BITS, WORLD), mask=at < count)
            else:
                for rank in tl.static_range(WORLD):
                    if rank != ME:
                        bits = _of(a, b, c, d, rank - (rank > ME), BITS)
                        tl.store(target + rank * count + at, _unless(timed_out, bits, BITS), mask=at < count)
            _count(table + FIRST_PHASE + chunk, phase, epoch, EXACT)
            _fail(table, timed_out, call)


@triton.jit(do_not_specialize=["out", "data", "address", "call", "size", "op", *BASES])
def two_shot(
    out: tl.int64, data: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr,
    ALIGNED: tl.constexpr, BEGUN: tl.constexpr, FIRST_PHASE: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Reduce as :func:`one_shot` does, with less to send: a rank reduces one piece of each chunk, for all of them.

    A chunk has ``WORLD`` pieces of ``BLOCK`` elements, and two channels: the peers send through the first what they
    have for the piece that is this rank's, and through the second the results of the pieces that are theirs.
    """
    behind: tl.constexpr = 0 if ONCE else 1
    table, target, source, count = _given(address, out, data, size, BITS, ALIGNED)
    padded = (count + 15) // 16 * 16  # staging is used in pieces of 16 bytes; what is after the tensor's end is zero
    within = tl.arange(0, BLOCK)
    width: tl.constexpr = BITS.primitive_bitwidth // 8
    bases = b0, b1, b2, b3, b4, b5, b6, b7
    programs = tl.num_programs(0) - BESIDE
    program = tl.program_id(0) - BESIDE
    if program < 0:
        _work_beside(program, table, call, bases, BEGUN, WORLD, ME)
        return
    wait_budget, sendable, timed_out = _wait_budget(table, padded)
    rounds = _rounds(tl.cdiv(count, WORLD * BLOCK), ONCE)
    for turn in range(rounds):
        chunk = program + turn * programs
        phase = tl.load(table + FIRST_PHASE + 2 * chunk).to(tl.int32)
        place = _slots(2 * chunk, phase, WORLD)
        for step in tl.static_range(1, WORLD):
            peer = (ME + step) % WORLD
            first = (chunk * WORLD + peer) * BLOCK
            bits = tl.load(source + first + within, mask=first + within < count, other=0)
            there = place + _slot(ME, (ME + step) % WORLD) * SLOT
            _send(bases[(ME + step) % WORLD], there, bits, (sendable - first) * width)
    result_timed_out = timed_out
    for turn in range(rounds + behind):
        if turn < rounds:
            chunk = program + turn * programs
            phase = tl.load(table + FIRST_PHASE + 2 * chunk).to(tl.int32)
            used = bases[ME] + _slots(2 * chunk, phase, WORLD)
            place = _slots(2 * chunk + 1, tl.load(table + FIRST_PHASE + 2 * chunk + 1).to(tl.int32), WORLD)
            first = (chunk * WORLD + ME) * BLOCK
            at = first + within
            own = tl.load(source + at, mask=at < count, other=0)
            a, b, c, d, timed_out = _arrived(
                table, call, used, (padded - first) * width, wait_budget, timed_out, WORLD, ME
            )
            _clear(used, WORLD, ME)
            total = _reduced(own, a, b, c, d, op, DTYPE, BITS, WORLD, ME)
            result = _rounded(total, op, timed_out, DTYPE, BITS, WORLD)
            for step in tl.static_range(1, WORLD):
                there = place + _slot(ME, (ME + step) % WORLD) * SLOT
                left = (sendable * (1 - timed_out) - first) * width
                _send(bases[(ME + step) % WORLD], there, result, left)
            tl.store(target + at, result, mask=at < count)
            tl.store(table + FIRST_PHASE + 2 * chunk, ((phase + 1) % PHASES).to(tl.int64))
            _fail(table, timed_out, call)
        if turn >= behind:
            chunk = program + (turn - behind) * programs
            phase = tl.load(table + FIRST_PHASE + 2 * chunk + 1).to(tl.int32)
            used = bases[ME] + _slots(2 * chunk + 1, phase, WORLD)
            first = chunk * WORLD * BLOCK
            a, b, c, d, result_timed_out = _arrived(
                table, call, used, (padded - first) * width, wait_budget, timed_out | result_timed_out, WORLD, ME, SLOT
            )
            _clear(used, WORLD, ME)
            for rank in tl.static_range(WORLD):
                if rank != ME:
                    at = first + rank * BLOCK + within
                    bits = _of(a, b, c, d, rank - (rank > ME), BITS)
                    tl.store(target + at, _unless(result_timed_out, bits, BITS), mask=at < count)
            tl.store(table + FIRST_PHASE + 2 * chunk + 1, ((phase + 1) % PHASES).to(tl.int64))
            _fail(table, result_timed_out, call)
            # What comes after that is waited for no longer; but what the peers have sent is reduced, and sent to them.
            wait_budget = tl.where(result_timed_out != 0, 0, wait_budget)


@triton.jit(do_not_specialize=["out", *PIECES, "address", "call", "size", "op", *BASES])
def scatter_pieces(
    out: tl.int64, p0: tl.int64, p1: tl.int64, p2: tl.int64, p3: tl.int64, p4: tl.int64, p5: tl.int64, p6: tl.int64,
    p7: tl.int64, address: tl.int64, call: tl.int32, size: tl.int32, op: tl.int32,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64, b6: tl.int64, b7: tl.int64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WORLD: tl.constexpr, ME: tl.constexpr, ALIGNED: tl.constexpr,
    BEGUN: tl.constexpr, FIRST_PHASE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``SCATTER`` of :func:`one_shot`, with a piece for each rank at an address of its own, and of more elements.

    What is more than ``CHANNELS`` blocks goes through the same channels again, as in a next call: for each of them that
    is what it is, because they share nothing. Between calls :func:`_keep_pace` orders what is cleared. Here fences do,
    before each block and after the last: what was cleared must be so before a peer, which what is sent next lets go on,
    can store there.
    """
    table = _pointer(address, tl.int64, True)
    target = _pointer(out, BITS, ALIGNED)
    count = _multiple(size, ALIGNED)
    padded = (count + 15) // 16 * 16
    within = tl.arange(0, BLOCK)
    width: tl.constexpr = BITS.primitive_bitwidth // 8
    pieces = p0, p1, p2, p3, p4, p5, p6, p7
    bases = b0, b1, b2, b3, b4, b5, b6, b7
    programs = tl.num_programs(0) - BESIDE
    program = tl.program_id(0) - BESIDE
    if program < 0:
        _work_beside(program, table, call, bases, BEGUN, WORLD, ME)
        return
    wait_budget, sendable, timed_out = _wait_budget(table, padded)
    several = tl.cdiv(count, BLOCK) > CHANNELS
    for chunk in range(program, tl.minimum(tl.cdiv(count, BLOCK), CHANNELS), programs):
        phase = tl.load(table + FIRST_PHASE + chunk).to(tl.int32)
        for block in range(chunk, tl.cdiv(count, BLOCK), CHANNELS):
            if several:
                strong.fence(THREADS)
            at = block * BLOCK + within
            left = (sendable * (1 - timed_out) - block * BLOCK) * width
            place = _slots(chunk, phase, WORLD)
            for step in tl.static_range(1, WORLD):
                source = _pointer(pieces[(ME + step) % WORLD], BITS, ALIGNED)
                bits = tl.load(source + at, mask=at < count, other=0)
                there = place + _slot(ME, (ME + step) % WORLD) * SLOT
                _send(bases[(ME + step) % WORLD], there, bits, left)
            used = bases[ME] + place
            own = tl.load(_pointer(pieces[ME], BITS, ALIGNED) + at, mask=at < count, other=0)
            a, b, c, d, timed_out = _arrived(
                table, call, used, (padded - block * BLOCK) * width, wait_budget, timed_out, WORLD, ME
            )
            _clear(used, WORLD, ME)
            total = _reduced(own, a, b, c, d, op, DTYPE, BITS, WORLD, ME)
            tl.store(target + at, _rounded(total, op, timed_out, DTYPE, BITS, WORLD), mask=at < count)
            phase = (phase + 1) % PHASES
        if several:
            strong.fence(THREADS)
        tl.store(table + FIRST_PHASE + chunk, phase.to(tl.int64))
        _fail(table, timed_out, call)


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
        result = _averaged(total, op, WORLD).to(DTYPE).to(BITS, bitcast=True)
        tl.store(target + at, result, mask=at < count)


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
