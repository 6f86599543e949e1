"""Strong loads and stores, in PTX: what ranks may read and write at the same time. Triton has none that are vectors.

Each works on naturally aligned words of 4 or 8 bytes, several in an instruction, at system scope. PTX reads and writes
each word whole, and no two such accesses are a data race. Addresses are numbers; where a load or store is not
``wanted``, nothing is done. In Triton's interpreter, whose ranks are processes of one machine, they are plain loads and
stores.

What waits for peers is one loop of each thread: it looks until all that the thread itself needs is there, and after
some looks whether that takes too long. All that there is to do about a peer that does not come is here.
"""

import os
import time

import triton
import triton.language as tl

from safecomm.peers import staging

LIMIT, WORD, FAILED, LONG = range(4)
"""Where the table of a group has, in numbers of 8 bytes: ns until a call gives up, the address of what the host is
told, whether a call has given up, and ns until the host is told that one waits."""

LOOKS = 64
"""How often a thread looks before it reads the clock, which is slow to read."""

INTERPRETED: bool = triton.runtime.jit.knobs.runtime.interpret if hasattr(triton, "knobs") else False
"""Whether the kernels run in Triton's interpreter, on the CPU, as some tests have them do."""

if INTERPRETED:

    def _at(addresses, offset: int, dtype):
        return (addresses + offset).to(tl.pointer_type(dtype))

    def store(addresses, words, wanted):
        """Store four words of 4 bytes at each address."""
        for number, word in enumerate(words):
            tl.store(_at(addresses, 4 * number, tl.int32), word, mask=wanted)

    def store_packets(addresses, first, second, epoch, wanted):
        """Store two packets at each address."""
        for number, word in enumerate((first, second)):
            packet = (word.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
            tl.store(_at(addresses, 8 * number, tl.int64), packet, mask=wanted)

    def release(addresses, wanted):
        """Add 1 at each address, where no other program stores."""
        pointers = _at(addresses, 0, tl.int32)
        tl.store(pointers, tl.load(pointers, mask=wanted, other=0) + 1, mask=wanted)

    def _clear(addresses, wanted):
        store(addresses, [tl.full(wanted.shape, staging.FREE, tl.int32)] * 4, wanted)

    _clock = time.monotonic_ns

    def _look_until(look, well, address, call):
        """Look until nothing is missing; return what there is, and -1 for each thread that has given up."""
        table = _at(address, 0, tl.int64)
        began = _clock()
        while True:
            found, missing = look()
            missing = missing & (well != 0)
            waited = _clock() - began
            if not missing.handle.data.any() or waited >= tl.load(table + LIMIT).handle.data:
                break
            if waited >= tl.load(table + LONG).handle.data:
                tl.store(_at(tl.load(table + WORD), 4, tl.int32), call)
            os.sched_yield()  # to the peers, which may have fewer processors than they are
        if missing.handle.data.any() and not tl.load(table + FAILED).handle.data:
            tl.store(table + FAILED, 1)
            tl.store(_at(tl.load(table + WORD), 0, tl.int32), call)
        return *found, tl.where(missing | (well == 0), -1, 0)

    def await_begun(addresses, over, wanted, address, call):
        """Look until the word at each address, a count that begins again, is not behind ``over``."""

        def look():
            return (), (tl.load(_at(addresses, 0, tl.int32), mask=wanted, other=0) - over < 0) & wanted

        _look_until(look, wanted.to(tl.int32), address, call)

    def agreed(condition):
        """Return ``condition``: there are no threads."""
        return condition

    def await_flag(place, expected, address, call, late):
        """Look until the flag at ``place`` is ``expected``; return whether it is late."""

        def look():
            return (), tl.load(_at(place, 0, tl.int32)) != expected

        return _look_until(look, (late == 0).to(tl.int32), address, call)[0]

    def arrived(addresses, left, address, call, well, epoch, WORLD, ME, SLOT, STEP, EXACT):
        """Do what the compiled one does, which see."""
        peers = [peer for peer in range(WORLD) if peer != ME]

        def look():
            found, missing = [], well != well
            for number, peer in enumerate(peers):
                wanted = (left > STEP * peer) & (well != 0)
                if EXACT:
                    places = [_at(addresses, SLOT * (2 * number + half), tl.int64) for half in range(2)]
                    packets = [tl.load(place + way, mask=wanted, other=0) for place in places for way in range(2)]
                    found += [packet.to(tl.int32) for packet in packets]
                    for packet in packets:
                        missing = missing | (((packet >> 32).to(tl.int32) != epoch) & wanted)
                else:
                    place = _at(addresses, SLOT * number, tl.int32)
                    found += [tl.load(place + word, mask=wanted, other=0) for word in range(4)]
                    for word in found[-4:]:
                        missing = missing | (word == staging.FREE)
            return found, missing

        *found, late = _look_until(look, well, address, call)
        for number, peer in enumerate(() if EXACT else peers):
            _clear(addresses + SLOT * number, (left > STEP * peer) & (late == 0))
        return (*found, late)

else:
    # The operands follow each other: what comes out, the addresses, the words, and whether it is wanted.
    _STORE = tl.constexpr("""
    {
        .reg .pred wanted;
        setp.ne.b32 wanted, $6, 0;
        mov.b32 $0, 0;
        @wanted st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
    }
    """)
    _STORE_PACKETS = tl.constexpr("""
    {
        .reg .pred wanted;
        .reg .b64 first, second;
        setp.ne.b32 wanted, $5, 0;
        mov.b32 $0, 0;
        mov.b64 first, {$2, $4};
        mov.b64 second, {$3, $4};
        @wanted st.relaxed.sys.global.v2.b64 [$1], {first, second};
    }
    """)
    _RELEASE = tl.constexpr("""
    {
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        mov.b32 $0, 0;
        @wanted red.release.sys.global.add.u32 [$1], 1;
    }
    """)

    @triton.constexpr_function
    def _awaiting(
        begin: str, look: str, end: str, *, table: str, call: str, well: str, late: str, after: str = ""
    ) -> str:
        """Return a loop of each thread that goes on while ``look`` sets ``again``, and ends by ``end``.

        ``late`` is -1 for a thread that has given up, or was not ``well`` and has not looked; else 0. The first thread
        of the group that gives up tells the host which ``call`` that was. Each that waits long tells it so, and again
        after as long: a peer may be slow for minutes, and the host's memory is far.
        """
        return f"""
        {{
            .reg .pred again, now_so;
            .reg .b32 looks, some;
            .reg .b64 began, told, waited, since, limit, word;
            {begin}
            mov.b32 {late}, -1;
            setp.eq.b32 again, {well}, 0;
            @again bra THROUGH;
            mov.b32 looks, 0;
            mov.b64 began, 0;
            mov.b64 told, 0;
        LOOK:
            {look}
            @!again bra HERE;
            add.u32 looks, looks, 1;
            and.b32 some, looks, {LOOKS - 1};
            setp.ne.b32 now_so, some, 0;
            @now_so bra LOOK;
            mov.u64 waited, %globaltimer;
            setp.eq.b64 now_so, began, 0;
            selp.b64 began, waited, began, now_so;
            sub.s64 waited, waited, began;
            sub.s64 since, waited, told;
            ld.global.b64 word, [{table} + {8 * WORD}];
            ld.global.b64 limit, [{table} + {8 * LONG}];
            setp.ge.s64 now_so, since, limit;
            @now_so st.relaxed.sys.global.b32 [word + 4], {call};
            @now_so mov.b64 told, waited;
            ld.global.b64 limit, [{table} + {8 * LIMIT}];
            setp.lt.s64 now_so, waited, limit;
            @now_so bra LOOK;
            atom.relaxed.gpu.global.cas.b64 limit, [{table} + {8 * FAILED}], 0, 1;
            setp.eq.b64 now_so, limit, 0;
            @now_so st.relaxed.sys.global.b32 [word], {call};
            bra THROUGH;
        HERE:
            mov.b32 {late}, 0;
            {end}
        THROUGH:
            {after}
        }}
        """

    # $0: late; $1: the address; $2: what is over; $3: whether it is wanted; $4: the table; $5: the call.
    _AWAIT_BEGUN = tl.constexpr(
        _awaiting(
            ".reg .b32 found;",
            """
            ld.acquire.sys.global.b32 found, [$1];
            sub.s32 found, found, $2;
            setp.lt.s32 again, found, 0;
            """,
            "", table="$4", call="$5", well="$3", late="$0",
        )
    )  # fmt: skip

    # $0: late; $1: the address; $2: what is expected; $3: the table; $4: the call; $5: whether it is late by now.
    _AWAIT_FLAG = tl.constexpr(
        _awaiting(
            """
            .reg .pred first;
            .reg .b32 found, well;
            mov.b32 well, %tid.x;
            setp.eq.b32 first, well, 0;
            setp.eq.and.b32 again, $5, 0, first;
            selp.b32 well, 1, 0, again;
            """,
            """
            ld.acquire.sys.global.b32 found, [$1];
            setp.ne.b32 again, found, $2;
            """,
            "", table="$3", call="$4", well="well", late="$0",
            after="""
            setp.ne.and.b32 again, $0, 0, first;
            barrier.cta.red.or.pred again, 0, again;
            selp.b32 $0, -1, 0, again;
            """,
        )
    )  # fmt: skip

    _AGREED = tl.constexpr("""
    {
        .reg .pred yes;
        setp.ne.b32 yes, $1, 0;
        barrier.cta.red.or.pred yes, 0, yes;
        selp.b32 $0, 1, 0, yes;
    }
    """)

    @triton.constexpr_function
    def _arrival(WORLD, ME, SLOT, STEP, EXACT):
        """Return the loop of :func:`arrived`: its outputs are four words of each peer, and whether it has given up."""
        peers = [peer for peer in range(WORLD) if peer != ME]
        late, address, left, table, call, well, epoch = (f"${4 * len(peers) + number}" for number in range(7))
        begin, look, check, end = [], [], [], []
        for number, peer in enumerate(peers):
            words = [f"${4 * number + word}" for word in range(4)]
            wanted = f"wanted{number}"
            begin += [f".reg .pred {wanted};", f"setp.gt.s32 {wanted}, {left}, {STEP * peer};"]
            begin += [f"mov.b32 {word}, 0;" for word in words]
            if EXACT:
                numbers, packets = ([f"{kind}{number}_{word}" for word in range(4)] for kind in ("number", "packet"))
                begin += [f".reg .b32 {', '.join(numbers)};", f".reg .b64 {', '.join(packets)};"]
                begin += [f"mov.b64 {packet}, {{{words[0]}, {epoch}}};" for packet in packets]
                for half in range(2):
                    pair = ", ".join(packets[2 * half : 2 * half + 2])
                    place = f"[{address} + {SLOT * (2 * number + half)}]"
                    look += [f"@{wanted} ld.relaxed.sys.global.v2.b64 {{{pair}}}, {place};"]
                for word, other, packet in zip(words, numbers, packets, strict=True):
                    check += [f"mov.b64 {{{word}, {other}}}, {packet};"]
                    check += [f"setp.ne.or.b32 again, {other}, {epoch}, again;"]
            else:
                place = f"[{address} + {SLOT * number}]"
                look += [f"@{wanted} ld.relaxed.sys.global.v4.b32 {{{', '.join(words)}}}, {place};"]
                check += [f"setp.eq.or.b32 again, {word}, {staging.FREE}, again;" for word in words]
                end += [f"@{wanted} st.global.v4.b32 {place}, {{{', '.join(['free'] * 4)}}};"]
        begin += [".reg .b32 free;", f"mov.b32 free, {staging.FREE};"]
        look += ["setp.ne.b32 again, looks, looks;", *check]
        return _awaiting(
            "\n".join(begin), "\n".join(look), "\n".join(end), table=table, call=call, well=well, late=late
        )

    @triton.constexpr_function
    def _outputs(WORLD):
        return ",".join(["=&r"] * (4 * WORLD - 3))

    @triton.constexpr_function
    def _types(WORLD):
        return (tl.int32,) * (4 * WORLD - 3)

    @triton.jit
    def store(addresses, words, wanted):
        """Store 16 bytes at each address: four words of 4 bytes."""
        a, b, c, d = words
        tl.inline_asm_elementwise(
            _STORE, "=r,l,r,r,r,r,r,~{memory}", [addresses, a, b, c, d, wanted.to(tl.int32)], tl.int32, False, 1
        )

    @triton.jit
    def store_packets(addresses, first, second, epoch, wanted):
        """Store 16 bytes at each address: two packets of 8 bytes, each of a word of data and the epoch."""
        tl.inline_asm_elementwise(
            _STORE_PACKETS, "=r,l,r,r,r,r,~{memory}", [addresses, first, second, epoch, wanted.to(tl.int32)],
            tl.int32, False, 1,
        )  # fmt: skip

    @triton.jit
    def release(addresses, wanted):
        """Add 1 to the 4 bytes at each address, to be seen after all that this thread knows to have been stored."""
        tl.inline_asm_elementwise(
            _RELEASE, "=r,l,r,~{memory}", [addresses, wanted.to(tl.int32)], tl.int32, False, 1
        )  # fmt: skip

    @triton.jit
    def await_begun(addresses, over, wanted, address, call):
        """Wait until the count at each address is not behind ``over``, and know what the program knew that counted.

        By difference, because the count begins again; and a peer may be a call ahead.
        """
        tl.inline_asm_elementwise(
            _AWAIT_BEGUN, "=&r,l,r,r,l,r,~{memory}", [addresses, over, wanted.to(tl.int32), address, call],
            tl.int32, False, 1,
        )  # fmt: skip

    @triton.jit
    def agreed(condition):
        """Return 1 on all threads if ``condition``, which is 0 or 1, is 1 on one of them."""
        return tl.inline_asm_elementwise(_AGREED, "=r,r,~{memory}", [condition], tl.int32, False, 1)

    @triton.jit
    def await_flag(place, expected, address, call, late):
        """Wait until the flag at ``place`` is ``expected``; return whether it is ``late``, and at once if it was.

        One thread looks, and the others wait for it. What a peer stored before its flag is there for the loads of all
        that follow.
        """
        return tl.inline_asm_elementwise(
            _AWAIT_FLAG, "=&r,l,r,l,r,r,~{memory}", [place, expected, address, call, late], tl.int32, False, 1
        )

    @triton.jit
    def arrived(
        addresses, left, address, call, well, epoch, WORLD: tl.constexpr, ME: tl.constexpr, SLOT: tl.constexpr,
        STEP: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Wait for 16 bytes of each peer, and return them: four words of a peer; then -1 where one is late, else 0.

        A peer's lie ``SLOT`` bytes behind those of the one before, at ``addresses``. ``left``: from there on, how many
        bytes rank 0 sends, and ``STEP``: how many less a rank sends than the one before; what is not sent is 0.
        ``address``: of the table. What is not ``well`` is not waited for, and late.

        What has arrived is made free, by weak stores: the peers' next stores to these places, and the loads of this
        thread, are ordered against them. ``EXACT``: packets of ``epoch``, the second half of 16 bytes ``SLOT`` behind
        the first; nothing is made free.
        """
        return tl.inline_asm_elementwise(
            _arrival(WORLD, ME, SLOT, STEP, EXACT), _outputs(WORLD) + ",l,r,l,r,r,r,~{memory}",
            [addresses, left, address, call, well, epoch], _types(WORLD), False, 1,
        )  # fmt: skip
