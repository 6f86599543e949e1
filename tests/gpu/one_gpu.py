"""The kernels of low_latency() by three to eight ranks that share one GPU: ``python tests/gpu/one_gpu.py --out FILE``.

The GPU runs their processes in turns, and what a rank stores into a peer's memory it stores into its own GPU's. So the
kernels, their flags and their orders of loads and stores are a real GPU's, with any number of ranks; links and times
are not. NCCL refuses two ranks on one GPU, so the group is gloo's; low_latency() refuses them too, and is told that
each has a GPU of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import types
import uuid
from pathlib import Path

CASES = (
    "low_latency_bit_for_bit", "ring_bits", "ring_results", "low_latency_error_and_bits", "low_latency_results",
    "invariant_kernels_give_the_bits_of_a_cpu",
)  # fmt: skip
"""Those that ask nothing of the group's own backend that gloo does not have."""
TURNS = 3
"""How much longer than on GPUs of their own a case of several ranks may take."""


def share():
    """Make low_latency() take ranks on one GPU, whose group is gloo's."""
    from safecomm.peers import low_latency

    low_latency._device = lambda index: uuid.uuid4().hex
    low_latency.backends = types.SimpleNamespace(of=lambda group, device: types.SimpleNamespace(name="nccl"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", nargs="*", type=int, default=[3, 4, 8])
    parser.add_argument("--only", nargs="*", default=CASES, help="run the cases with one of these in their names")
    arguments = parser.parse_args()
    out, results, failed = Path(arguments.out), {}, 0
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    for ranks in arguments.ranks:
        part = out.with_suffix(f".{ranks}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(Path(__file__).with_name("run.py")), "--one-gpu", "--out", str(part)]
        failed += subprocess.run([*command, "--only", *arguments.only], env=environment).returncode != 0
        if part.exists():
            results[ranks] = json.loads(part.read_text())
            part.unlink()
            out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
