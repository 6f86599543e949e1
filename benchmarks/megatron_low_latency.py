"""Megatron's training step with low_latency() on its tensor-parallel group, and without.

    torchrun --nproc-per-node 2 benchmarks/megatron_low_latency.py --out FILE

A step of ``tests/frameworks/megatron_gpt.py`` with tensor parallelism, hidden size 4096, sequences of 2048, bf16.
Blocks of five steps in turns, all of them patched; in every other turn the group's engine is taken out, and its calls
are NCCL's.
"""

import contextlib
import json
import statistics
import sys
import time

import megatron_script
import torch
import torch.distributed as dist

import safecomm
from safecomm.collectives.takers import ENGINES

SHAPE = {"device": "cuda", "dtype": "bf16", "tp": 2, "hidden": 4096, "heads": 32, "seq": 2048, "layers": 4, "mbs": 1}


@contextlib.contextmanager
def without(group):
    """Let all calls of ``group`` be NCCL's."""
    engine = ENGINES.pop(group)
    try:
        yield
    finally:
        ENGINES[group] = engine


def compare(step, script):
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    times = {"NCCL": [], "low_latency()": []}

    def block(kind):
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        times[kind].append(time.perf_counter() - start)

    with safecomm.patched(), safecomm.low_latency(group) as on:
        if on.reason:
            raise SystemExit(on.reason)
        calls = on.calls
        step()
        calls = on.calls - calls
        script.in_turns(
            step, tuple(times), lambda kind: without(group) if kind == "NCCL" else contextlib.nullcontext(), block
        )
    ms = {kind: round(statistics.median(taken) / 5e-3, 3) for kind, taken in times.items()}
    ratios = sorted(a / b for a, b in zip(times["low_latency()"], times["NCCL"], strict=True))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": "torchrun benchmarks/megatron_low_latency.py",
        "calls of a step that it takes": calls,
        "ms a step": ms,
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


def main():
    out = sys.argv[sys.argv.index("--out") + 1]
    seconds = sys.argv[sys.argv.index("--seconds") + 1] if "--seconds" in sys.argv else "10"
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    sys.argv[1:] = [*shape, "--compare", seconds, "--steps", "1"]
    found = {}

    def noted(step, script):
        found.update(compare(step, script))
        if dist.get_rank() == 0:
            with open(out, "w") as file:
                file.write(json.dumps(found, indent=1) + "\n")
        return found

    megatron_script.measure(noted)


if __name__ == "__main__":
    main()
