"""Time of ``import safecomm`` beyond ``import torch.distributed``, in fresh interpreters.

    python benchmarks/import_time.py --out FILE

Each interpreter imports torch.distributed first, and then safecomm, whose time is taken. The first ones are left out:
they write the byte code, and bring the files into memory.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys

import torch

ROUNDS, WARM = 25, 3
PROGRAM = """
import time
import torch.distributed
start = time.perf_counter()
import safecomm
print((time.perf_counter() - start) * 1e3)
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    took = []
    for _ in range(WARM + ROUNDS):
        ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
        took.append(float(ended.stdout))
    results = {
        "command": "python benchmarks/import_time.py",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.date.today().isoformat(),
        "unit": "ms",
        "median": round(statistics.median(took[WARM:]), 1),
        "least": round(min(took[WARM:]), 1),
        "most": round(max(took[WARM:]), 1),
    }
    print(results)
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
