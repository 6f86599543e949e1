"""Time of ``import safecomm`` beyond ``import torch.distributed``.

    python benchmarks/import_time.py --out FILE

One process imports torch.distributed, and each time a fork of it imports safecomm, which that has not met. With the
byte code that pip writes when it installs a package, and as a second figure from the source alone.
"""

import argparse
import compileall
import datetime
import json
import os
import statistics
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
import torch.distributed

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, WARM = 41, 3


def took(from_source):
    """Return the ms that the import takes in a fork of this process."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        if from_source:
            SourceFileLoader.get_code = lambda self, name: compile(self.get_data(self.path), self.path, "exec")
        start = time.perf_counter()
        import safecomm  # noqa: F401

        os.write(send, f"{(time.perf_counter() - start) * 1e3}".encode())
        os._exit(0)
    os.close(send)
    with open(receive) as pipe:
        found = float(pipe.read())
    os.waitpid(child, 0)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if not compileall.compile_dir(ROOT / "safecomm", quiet=1):
        sys.exit("no byte code could be written")
    results = {
        "command": "python benchmarks/import_time.py",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
        "unit": "ms",
    }
    for name, from_source in (("byte code", False), ("source", True)):
        times = [took(from_source) for _ in range(WARM + ROUNDS)][WARM:]
        results[name] = {"median": round(statistics.median(times), 1), "least": round(min(times), 1)}
        results[name]["most"] = round(max(times), 1)
    # Last: a fork of a process that has asked for the device is told that it can't use it.
    results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(results)
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
