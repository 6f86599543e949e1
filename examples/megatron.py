"""A Megatron script, not a line edited: run by itself, and by ``python -m safecomm run``.

    python examples/megatron.py [--cpu] [SCRIPT]    (starts torchrun twice; needs megatron-core)

Two lines of the shell are the example; this script only makes them, compares, and prints what safecomm said:

    torchrun --nproc-per-node N                 megatron_gpt.py ...
    torchrun --nproc-per-node N -m safecomm run megatron_gpt.py ...

The script, by default the tests' own, trains a tiny GPT of the real megatron-core: tensor and sequence parallelism, and
Megatron's overlapping DDP with its distributed optimizer. Losses and weights of both runs are the same bit for bit, and
no call of Python's goes past safecomm. Expect no less memory: Megatron waits for each of these collectives on the
stream that launched it, and that torch does well itself since 2.8. docs/megatron.md says where safecomm does help.

The last line is the peak of memory of both runs; on a CPU, where it can't be seen, the loss of the last step.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "frameworks" / "megatron_gpt.py"
SIZE = ["--hidden", "1024", "--layers", "4", "--seq", "512", "--dtype", "bf16"]


def train(command: list[str]) -> dict[str, Any]:
    """Run ``command``, show what safecomm says, and return the last line of JSON that rank 0 prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    print(*(line for line in done.stderr.splitlines() if line.startswith("safecomm:")), sep="\n")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the last line, about two runs."""
    ways = "the script -> -m safecomm run the script"
    if before["mem"]:
        peaks = [run["mem"]["peak_active_kib"] / 1024 for run in (before, after)]
        return f"peak {peaks[0]:.0f} MiB -> {peaks[1]:.0f} MiB ({ways})"
    return f"loss {before['losses'][-1]:.4f} -> {after['losses'][-1]:.4f} ({ways}; memory needs a GPU)"


def has_megatron() -> bool:
    """Return whether megatron-core is installed: a folder of the name "megatron" does for a package."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def main() -> int:
    asked = [argument for argument in sys.argv[1:] if argument != "--cpu"]
    script = asked[0] if asked else str(SCRIPT)
    if not asked and not (has_megatron() and SCRIPT.exists()):
        print("skipped: needs megatron-core, and a clone with its tests")
        return 0
    gpus = 0 if "--cpu" in sys.argv else torch.cuda.device_count()
    ranks = min(gpus, 2) or 2
    options = ["--device", "cuda", *SIZE] if gpus else ["--device", "cpu"]
    options += ["--tp", str(ranks), "--ddp", "--overlap", "--dist-opt", *(["--sp"] if ranks > 1 else [])]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    print(f"{ranks} rank(s) on {torch.cuda.get_device_name() if gpus else 'the CPU, small'}, torch {torch.__version__}")
    before = train([*launcher, script, *options])
    after = train([*launcher, "-m", "safecomm", "run", "--strict", script, *options])
    same = all(before[key] == after[key] for key in ("losses", "hashes"))
    print("losses and weights:", "the same bit for bit" if same else "DIFFERENT")
    print(compare(before, after))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
