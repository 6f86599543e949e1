"""Host time to get a buffer from an arena, against ``torch.empty``, interleaved in one process.

    python benchmarks/arena_host_time.py --out FILE

On the GPU where there is one. Each round times a burst of requests of one and then of the other, in turns, and the
ratio is the median over rounds of the ratio of the two, so that what else the machine does falls on both. The device
is synchronised between bursts, outside of the timing. Steady state: each buffer is dropped before the next request;
and, as "held", bursts whose buffers are all held to the end of the burst, as those of a forward pass are.
"""

import argparse
import datetime
import json
import statistics
import time

import torch

import safecomm

ROUNDS, BURST = 300, 200
SIZES = [1 << n for n in range(10, 27, 2)]


def transient(get):
    for _ in range(BURST):
        get()


def held(get):
    kept = []
    for _ in range(BURST):
        kept.append(get())  # noqa: PERF401 - both sides pay for the loop


def burst(pattern, get, device):
    start = time.perf_counter()
    pattern(get)
    seconds = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return seconds / BURST * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    results = {
        "command": "python benchmarks/arena_host_time.py",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "date": datetime.date.today().isoformat(),
        "unit": "us of host time a buffer, medians; ratio: median of the rounds' ratios",
        "rows": {},
    }
    torch.set_num_threads(1)
    with safecomm.use_arena("1GiB", device) as arena:
        for where in ("default stream", "side stream") if cuda else ("cpu",):
            with torch.cuda.stream(torch.cuda.Stream() if where == "side stream" else None):
                for pattern, nbytes in [(transient, n) for n in SIZES] + [(held, n) for n in SIZES if n <= 1 << 22]:
                    numel = nbytes // 2

                    def stock(numel=numel):
                        return torch.empty(numel, dtype=torch.bfloat16, device=device)

                    def ours(numel=numel):
                        return arena.empty(numel, dtype=torch.bfloat16)

                    times = {"torch.empty": [], "arena": []}
                    for round_ in range(arguments.rounds + 10):
                        order = [("torch.empty", stock), ("arena", ours)]
                        for name, get in order if round_ % 2 else order[::-1]:
                            times[name].append(burst(pattern, get, device))
                    for values in times.values():
                        del values[:10]  # warm-up
                    ratios = [b / a for a, b in zip(times["torch.empty"], times["arena"], strict=True)]
                    row = {name: round(statistics.median(values), 3) for name, values in times.items()}
                    row["ratio"] = round(statistics.median(ratios), 3)
                    results["rows"][f"{nbytes >> 10} KiB, {pattern.__name__}, {where}"] = row
                    print(f"{nbytes >> 10} KiB, {pattern.__name__}, {where}:", row, flush=True)
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
