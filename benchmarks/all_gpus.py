"""All that is to be run on a machine with another number of GPUs, in three parts of ten minutes at most.

    python benchmarks/all_gpus.py 1 --out DIR    the GPU cases, and those of low_latency() first
    python benchmarks/all_gpus.py 2 --out DIR    tune, and low_latency() beside NCCL and torch's symmetric memory
    python benchmarks/all_gpus.py 3 --out DIR    soaks: groups of all ranks, of half of them beside; one that stops

Each command has a limit of its own, and what it has written by then stays. On as many GPUs as there are.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SOAK = "benchmarks/soak.py --out {out}/low_latency_soak_{n}.json"
CASES = "tests/gpu/run.py --out {out}/gpu_tests_{n}"
FIRST = "low_latency ring operators invariant"
PARTS = {
    1: [
        (200, f"{CASES}_low_latency.json --only {FIRST}"),
        (380, f"{CASES}.json --only s1_ s2_ s3_ s4_ s5_ s6_ s7_ s8_ arena bucketed overlap host_time"),
    ],
    2: [
        (240, "-m safecomm tune --low-latency --out {out}/limits_{n}.json"),
        (340, "benchmarks/low_latency.py --out {out}/low_latency_{n}.json"),
    ],
    3: [
        (70, f"{SOAK} --seconds 55 --eager 0 --replayed 1e7"),
        (60, f"{SOAK} --seconds 45 --groups 1 --halves --eager 0 --replayed 1e9"),
        (60, f"{SOAK} --seconds 45 --large --groups 2 --eager 0 --replayed 1e9"),
        (90, f"{SOAK} --seconds 75 --eager 1e5 --replayed 0"),
        (60, f"{SOAK} --seconds 20 --eager 0 --replayed 1e9 --stop"),
        (200, "benchmarks/invariance.py --out {out}/invariance_{n}.json"),
    ],
}
"""The commands of each part, that torchrun starts, with the seconds that they may take."""

SETTINGS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Without multicast, as all of the figures are."""


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter, description=__doc__)
    parser.add_argument("part", type=int, choices=tuple(PARTS))
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--dry", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    environment = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    failed = 0
    for limit, command in PARTS[arguments.part]:
        words = command.format(out=arguments.out, n=arguments.gpus).split()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        print(f"{limit} s:", " ".join(words), flush=True)
        if arguments.dry:
            continue
        start = time.monotonic()
        process = subprocess.Popen(
            [*torchrun, str(arguments.gpus), *words], cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            status = "not over in time"
        failed += status != 0
        print(f"status {status} after {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
