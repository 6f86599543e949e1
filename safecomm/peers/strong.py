"""Strong loads and stores, in PTX: what ranks may read and write at the same time. Triton has none that are vectors.

Each works on naturally aligned words of 4 or 8 bytes, several in an instruction, at system scope. PTX reads and writes
each word whole, and no two such accesses are a data race. Addresses are numbers; where a load or store is not
``wanted``, nothing is done. In Triton's interpreter, whose ranks are processes of one machine, they are plain loads and
stores.
"""

from typing import Any

import triton
import triton.language as tl

from safecomm.peers import staging

LOOKS = 64
"""How often a thread looks for something by itself before all threads look whether everything is there."""

INTERPRETED: bool = triton.runtime.jit.knobs.runtime.interpret if hasattr(triton, "knobs") else False
"""Whether the kernels run in Triton's interpreter, on the CPU, as some tests have them do."""

FREE, SLOT = (one if INTERPRETED else tl.constexpr(one) for one in (staging.FREE, staging.SLOT))

if INTERPRETED:

    def _at(addresses: Any, offset: int, dtype: Any) -> Any:
        return (addresses + offset).to(tl.pointer_type(dtype))

    def fence(threads: Any) -> None:
        """Do nothing: the interpreter does one thing after the other."""

    def store(addresses: Any, words: Any, wanted: Any) -> None:
        """Store four words of 4 bytes at each address."""
        for number, word in enumerate(words):
            tl.store(_at(addresses, 4 * number, tl.int32), word, mask=wanted)

    def load(addresses: Any, wanted: Any) -> Any:
        """Load four words of 4 bytes at each address."""
        return [tl.load(_at(addresses, 4 * number, tl.int32), mask=wanted, other=0) for number in range(4)]

    def store_packets(addresses: Any, first: Any, second: Any, epoch: Any, wanted: Any) -> None:
        """Store two packets at each address."""
        for number, word in enumerate((first, second)):
            packet = (word.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
            tl.store(_at(addresses, 8 * number, tl.int64), packet, mask=wanted)

    def load_packets(addresses: Any, wanted: Any) -> Any:
        """Load two packets at each address: both words, and both epochs."""
        packets = [tl.load(_at(addresses, 8 * number, tl.int64), mask=wanted, other=0) for number in range(2)]
        return [packet.to(tl.int32) for packet in packets] + [(packet >> 32).to(tl.int32) for packet in packets]

    def release(addresses: Any, wanted: Any) -> None:
        """Add 1 at each address, where no other program stores."""
        tl.store(_at(addresses, 0, tl.int32), acquire(addresses, wanted) + 1, mask=wanted)

    def acquire(addresses: Any, wanted: Any) -> Any:
        """Load the word at each address."""
        return tl.load(_at(addresses, 0, tl.int32), mask=wanted, other=0)

else:
    # The operands follow each other: what comes out, the addresses, the words, and whether it is wanted.
    _FENCE = tl.constexpr("fence.acq_rel.sys; mov.b32 $0, $1;")
    _STORE = tl.constexpr("""
    {
        .reg .pred wanted;
        setp.ne.b32 wanted, $6, 0;
        mov.b32 $0, 0;
        @wanted st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
    }
    """)
    _LOAD = tl.constexpr("""
    {
        .reg .pred wanted;
        setp.ne.b32 wanted, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @wanted ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
    }
    """)

    def _awaiting(wanted: str, registers: str, look: str) -> Any:
        """Return a loop of each thread, which is through when ``look`` says that it needs not look ``again``."""
        return tl.constexpr(f"""
    {{
        .reg .pred again;
        .reg .b32 looks;
        {registers}
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        mov.b32 $4, 0;
        mov.b32 looks, {LOOKS};
        setp.eq.b32 again, {wanted}, 0;
        @again bra THROUGH;
    LOOK:
        {look}
        selp.b32 $4, 1, 0, again;
        sub.u32 looks, looks, 1;
        setp.ne.and.b32 again, looks, 0, again;
        @again bra LOOK;
    THROUGH:
    }}
    """)

    _AWAIT_WORDS = _awaiting(
        "$6",
        "",
        f"""
        ld.relaxed.sys.global.v4.b32 {{$0, $1, $2, $3}}, [$5];
        setp.eq.b32 again, $0, {staging.FREE};
        setp.eq.or.b32 again, $1, {staging.FREE}, again;
        setp.eq.or.b32 again, $2, {staging.FREE}, again;
        setp.eq.or.b32 again, $3, {staging.FREE}, again;
        """,
    )
    _AWAIT_PACKETS = _awaiting(
        "$7",
        ".reg .b32 one, two, three, four; .reg .b64 first, second, third, fourth;",
        f"""
        ld.relaxed.sys.global.v2.b64 {{first, second}}, [$5];
        ld.relaxed.sys.global.v2.b64 {{third, fourth}}, [$5 + {staging.SLOT}];
        mov.b64 {{$0, one}}, first;
        mov.b64 {{$1, two}}, second;
        mov.b64 {{$2, three}}, third;
        mov.b64 {{$3, four}}, fourth;
        setp.ne.b32 again, one, $6;
        setp.ne.or.b32 again, two, $6, again;
        setp.ne.or.b32 again, three, $6, again;
        setp.ne.or.b32 again, four, $6, again;
        """,
    )
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
    _LOAD_PACKETS = tl.constexpr("""
    {
        .reg .pred wanted;
        .reg .b64 first, second;
        setp.ne.b32 wanted, $5, 0;
        mov.b64 first, 0;
        mov.b64 second, 0;
        @wanted ld.relaxed.sys.global.v2.b64 {first, second}, [$4];
        mov.b64 {$0, $2}, first;
        mov.b64 {$1, $3}, second;
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
    _ACQUIRE = tl.constexpr("""
    {
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        mov.b32 $0, 0;
        @wanted ld.acquire.sys.global.b32 $0, [$1];
    }
    """)

    @triton.jit
    def fence(threads: tl.constexpr):
        """Let what any thread stores from here on be seen, also by peers, after all that the program did before."""
        # What one thread has stored or loaded the fences of others know after a barrier only. What a fence has told its
        # thread the others know after another.
        tl.debug_barrier()
        tl.inline_asm_elementwise(_FENCE, "=r,r,~{memory}", [tl.arange(0, threads)], tl.int32, False, 1)
        tl.debug_barrier()

    @triton.jit
    def store(addresses, words, wanted):
        """Store 16 bytes at each address: four words of 4 bytes."""
        a, b, c, d = words
        tl.inline_asm_elementwise(
            _STORE, "=r,l,r,r,r,r,r,~{memory}", [addresses, a, b, c, d, wanted.to(tl.int32)], tl.int32, False, 1
        )

    @triton.jit
    def load(addresses, wanted):
        """Load the 16 bytes at each address as four words of 4 bytes; 0 where they are not wanted."""
        return tl.inline_asm_elementwise(
            _LOAD, "=r,=r,=r,=r,l,r,~{memory}", [addresses, wanted.to(tl.int32)],
            (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip

    @triton.jit
    def await_words(addresses, wanted):
        """Return what :func:`look_at_words` does, after each thread has looked for itself until no word is free.

        Or until it has looked some times in vain.
        """
        return tl.inline_asm_elementwise(
            _AWAIT_WORDS, "=&r,=&r,=&r,=&r,=&r,l,r,~{memory}", [addresses, wanted.to(tl.int32)],
            (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip

    @triton.jit
    def store_packets(addresses, first, second, epoch, wanted):
        """Store 16 bytes at each address: two packets of 8 bytes, each of a word of data and the epoch."""
        tl.inline_asm_elementwise(
            _STORE_PACKETS, "=r,l,r,r,r,r,~{memory}", [addresses, first, second, epoch, wanted.to(tl.int32)],
            tl.int32, False, 1,
        )  # fmt: skip

    @triton.jit
    def load_packets(addresses, wanted):
        """Load the two packets of 8 bytes at each address: both words, and both epochs; 0 where they are not wanted."""
        return tl.inline_asm_elementwise(
            _LOAD_PACKETS, "=r,=r,=r,=r,l,r,~{memory}", [addresses, wanted.to(tl.int32)],
            (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip

    @triton.jit
    def await_packets(addresses, epoch, wanted):
        """Return what :func:`look_at_packets` does, after each thread has looked for itself until all are of ``epoch``.

        Or until it has looked some times in vain.
        """
        return tl.inline_asm_elementwise(
            _AWAIT_PACKETS, "=&r,=&r,=&r,=&r,=&r,l,r,r,~{memory}", [addresses, epoch, wanted.to(tl.int32)],
            (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip

    @triton.jit
    def release(addresses, wanted):
        """Add 1 to the 4 bytes at each address, to be seen after all that this thread knows to have been stored."""
        tl.inline_asm_elementwise(
            _RELEASE, "=r,l,r,~{memory}", [addresses, wanted.to(tl.int32)], tl.int32, False, 1
        )  # fmt: skip

    @triton.jit
    def acquire(addresses, wanted):
        """Load the 4 bytes at each address, and know with them what the program that has released them knew."""
        return tl.inline_asm_elementwise(
            _ACQUIRE, "=r,l,r,~{memory}", [addresses, wanted.to(tl.int32)], tl.int32, False, 1
        )


@triton.jit
def look_at_words(addresses, wanted):
    """Load the 16 bytes at each address as four words; return them, and whether one of them is free."""
    a, b, c, d = load(addresses, wanted)
    return a, b, c, d, (a == FREE) | (b == FREE) | (c == FREE) | (d == FREE)


@triton.jit
def look_at_packets(addresses, epoch, wanted):
    """Load two packets at each address, and two a slot behind; return them, and whether one is of another epoch."""
    a, b, one, two = load_packets(addresses, wanted)
    c, d, three, four = load_packets(addresses + SLOT, wanted)
    return a, b, c, d, ((one != epoch) | (two != epoch) | (three != epoch) | (four != epoch)) & wanted


if INTERPRETED:
    await_words, await_packets = look_at_words, look_at_packets  # there are no threads
