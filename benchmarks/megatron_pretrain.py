"""Megatron-LM's own ``pretrain_gpt.py``, not edited, patched and not.

    python benchmarks/megatron_pretrain.py --megatron CHECKOUT --out FILE [--world 2]

``CHECKOUT`` is a checkout of Megatron-LM, at the tag of the version of megatron-core that is tested, with its C++
helpers built. A tiny GPT trains on Megatron's mock data, with its own optimizer, DDP and logging, on two GPUs: tensor
parallel, and pipeline parallel, each unpatched, patched before and after Megatron is imported, and by the runner, side
by side. The losses, gradient norms and norms of the parameters are those that Megatron itself prints; with each patch,
the calls of collectives that bypassed safecomm are counted.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "TP 2": ["--tensor-model-parallel-size", "2"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
}
LATE = """
import runpy, sys
import pretrain_gpt
import safecomm
safecomm.patch()
del sys.modules["pretrain_gpt"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
EARLY = """
import safecomm
safecomm.patch()
import runpy, sys
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HOW = {"stock": [], "early": [], "late": [], "runner": ["-m", "safecomm", "run", "--strict"]}
BEFORE = {"early": EARLY, "late": LATE}
SIZE = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 --log-params-norm --seed 1234 --bf16"
)
WITHOUT = shlex.split(  # Transformer Engine, apex, and files with data
    "--transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm --use-cpu-initialization "
    "--hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--num-workers 0 --distributed-timeout-minutes 1"
)
LINE = re.compile(r"iteration +\d+/ +\d+ .*lm loss: (\S+) .*grad norm: (\S+) .*params norm: (\S+) ")


def stand_ins(folder):
    """Write into ``folder`` what Megatron calls and this machine lacks, though there is nothing to build; name it."""
    written = []

    def write(name, *lines):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(("#!/bin/sh", *lines, "")))
        path.chmod(0o755)
        written.append(name)

    if shutil.which("make") is None:
        write("make", "exit 0")
    # Debian's python3-config may be another Python's, or absent: make would build the helpers again, under its name.
    write("python3-config", f"echo {sysconfig.get_config_var('EXT_SUFFIX')}")
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        write("nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.0"')
    return written


def run(megatron, world, how, options, folder, limit):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(megatron), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "SAFECOMM_STRICT": "1",
        "TORCHDYNAMO_DISABLE": "1",  # Megatron warms its fused functions up, for a minute, though none is used
    }
    if (folder / "bin" / "nvcc").exists():
        environment["CUDA_HOME"] = str(folder)
    script = [str(megatron / "pretrain_gpt.py")]
    if how in BEFORE:
        path = folder / f"{how}.py"
        path.write_text(BEFORE[how].replace("sys.argv[0]", repr(script[0])))
        script = [str(path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*torchrun, *HOW[how], *script, *SIZE, *WITHOUT, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, error = process.communicate()
        return {"ended": f"not within {limit} s", "out": out.splitlines()[-8:], "error": error.splitlines()[-40:]}
    steps = LINE.findall(out)
    found = {
        "ended": "by itself" if process.returncode == 0 else f"status {process.returncode}",
        "seconds": round(time.perf_counter() - start),
        "losses": [float(step[0]) for step in steps],
        "grad norms": [float(step[1]) for step in steps],
        "params norms": [float(step[2]) for step in steps],
    }
    if how != "stock":
        found["past"] = error.count("bypassed safecomm") + sum(
            int(count) for count in re.findall(r"(\d+) calls bypassed it", error)
        )
    if how == "runner":
        found["said"] = [line for line in error.splitlines() if line.startswith("safecomm: ")]
    if process.returncode or not steps:
        found["out"], found["error"] = out.splitlines()[-8:], [*filter(of_python, error.splitlines())][-40:]
    return found


def of_python(line):
    """Say whether ``line`` of standard error is of a traceback."""
    return line.startswith("[rank0]") or "Error" in line


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--megatron", required=True, type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--commit", default="", help="its commit, where it is no repository")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--limit", type=int, default=100, help="seconds until a run counts as hanging")
    parser.add_argument("--at-once", type=int, default=8, help="how many runs side by side")
    parser.add_argument("options", nargs="*", help="more options of pretrain_gpt.py, after --")
    arguments = parser.parse_args()
    megatron = arguments.megatron.resolve()
    for helpers in (megatron / "megatron" / "core" / "datasets").glob("helpers_cpp*.so"):
        helpers.touch()  # newer than its source, so that make has nothing to do
    results = {
        "command": "python benchmarks/megatron_pretrain.py",
        "date": datetime.date.today().isoformat(),
        "Megatron-LM": arguments.commit,
        "python": sys.version.split()[0],
        "ways": {},
    }
    import torch  # for its version alone, and the name of the device

    results["torch"] = torch.__version__
    results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.at_once) as side_by_side:
        folder = Path(name)
        results["stand-ins"] = stand_ins(folder)
        started = {
            (way, how): side_by_side.submit(
                run,
                megatron,
                arguments.world,
                how,
                [*options, *arguments.options],
                folder,
                arguments.limit,
            )
            for way, options in WAYS.items()
            for how in HOW
        }
        for (way, how), ended in started.items():
            row = results["ways"].setdefault(way, {})[how] = ended.result()
            stock = results["ways"][way]["stock"]
            row["same"] = bool(row.get("losses")) and all(
                row[key] == stock.get(key) for key in ("losses", "grad norms", "params norms")
            )
            print(way, how, {key: row[key] for key in row if key not in ("out", "error")}, flush=True)
            with open(arguments.out, "w") as file:
                json.dump(results, file, indent=1)
                file.write("\n")
    rows = [row for way in results["ways"].values() for row in way.values()]
    sys.exit(not all(row["ended"] == "by itself" and row["same"] and not row.get("past") for row in rows))


if __name__ == "__main__":
    main()
