"""What the compiler makes of the kernels of ``low_latency()``, without a GPU.

    python benchmarks/ptx.py --out BEFORE.json
    python benchmarks/ptx.py --compare BEFORE.json

A kernel that is written another way, and gives the same PTX, line for line, runs as before. ``--compare`` names those
that differ, and exits with 1.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ.setdefault("TRITON_ALWAYS_COMPILE", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton before 3.10 does

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from safecomm.peers import kernels, ring
from safecomm.peers.room import RING_THREADS, registers, ring_registers
from safecomm.peers.staging import RING_PHASES, SLOT

REDUCE, SCATTER, GATHER, EXCHANGE = range(4)
TYPES = ((tl.bfloat16, tl.int16, tl.float32), (tl.float32, tl.int32, tl.float32))

TOLD = ("KIND", "BITS", "WORLD", "ME", "ALIGNED", "ONCE")
"""The constants that the name of a variant has."""


def variants():
    """Yield names, kernels and constants: each kind, two types, worlds of two to eight, first and other ranks."""
    for world, me, aligned, (dtype, bits, reduced) in itertools.product((2, 3, 4, 8), (0, 1), (False, True), TYPES):
        if world == 3 and (me == 0 or not aligned):
            continue
        width = bits.primitive_bitwidth // 8
        known = {
            "EXACT": False, "DTYPE": dtype, "BITS": bits, "REDUCED": reduced, "WORLD": world, "ME": me,
            "ALIGNED": aligned, "AREA": 0, "STRIDE": 1 << 20, "BEGUN": 1 << 20, "BLOCK": SLOT // width,
            "FLAGS": 1 << 22, "TICKET": 600, "PLACE": 8 << 10, "PHASES": RING_PHASES,
        }  # fmt: skip
        for once in (True, False):
            for kind in (REDUCE, SCATTER, GATHER):
                yield "one_shot", kernels.one_shot, {**known, "ONCE": once, "KIND": kind}
            yield "two_shot", kernels.two_shot, {**known, "ONCE": once, "KIND": REDUCE}
            for kind in (GATHER, EXCHANGE):
                packets = {"ONCE": once, "KIND": kind, "EXACT": True, "AREA": 1 << 16, "DTYPE": None}
                yield "exact", kernels.one_shot, {**known, **packets}
            yield "scatter_pieces", kernels.scatter_pieces, {**known, "ONCE": once}
        yield "combine", kernels.combine, known
        known = {**known, "AREA": 1 << 16}
        large = {**known, "BLOCK": (8 << 10) // width}
        yield "ring_reduce", ring.ring_reduce, large
        for kind in (SCATTER, GATHER):
            yield "ring_one_way", ring.ring_one_way, {**large, "KIND": kind}


def ptx(kernel, known):
    """Return the PTX of a kernel, as a GPU of compute capability 9.0 gets it."""
    constants = {name: value for name, value in known.items() if name in kernel.arg_names}
    parameters = kernel.signature.parameters
    signature = {name: f"i{str(parameters[name].annotation)[-2:]}" for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    given = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    if "TICKET" in kernel.arg_names:
        options = {"num_warps": RING_THREADS // 32, "maxnreg": ring_registers(known["WORLD"])}
    else:
        nbytes = known["BLOCK"] * known["BITS"].primitive_bitwidth // 8
        options = {"num_warps": nbytes // 16 // 32, "maxnreg": registers(known["WORLD"])}
    compiled = triton.compile(ASTSource(kernel, signature, given), target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--compare", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the PTX itself")
    parser.add_argument("--every", type=int, default=1, help="of so many variants, one")
    options = parser.parse_args()
    before = json.loads(options.compare.read_text())["variants"] if options.compare else None
    made, differ = {}, []
    for label, kernel, known in itertools.islice(variants(), 0, None, options.every):
        shown = [one for one in known if one in TOLD and one in kernel.arg_names]
        name = " ".join([label, *(f"{one}={getattr(known[one], 'name', known[one])}" for one in shown)])
        if name in made:
            continue
        text = ptx(kernel, known)
        text = re.sub(rf"{kernel.__name__} *", "kernel ", text)  # the kernel may have had another name
        made[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        if options.keep:
            (options.keep / name.replace(" ", ",")).write_text(text)
        if before is not None and before.get(name) != made[name]:
            differ.append(name)
            print(f"differs: {name}", flush=True)
    print(f"{len(made)} variants, {len(differ)} differ")
    if options.out:
        options.out.write_text(json.dumps({"triton": triton.__version__, "variants": made}, indent=1) + "\n")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
