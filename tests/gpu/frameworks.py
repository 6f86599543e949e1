"""Whether torch's frameworks and Megatron-core train the same with torch alone, patch(), and avoid_record_streams():

    python tests/gpu/frameworks.py --out FILE.json [--device cpu] [--ranks 2]

DDP with overlapped all_reduces and with a communication hook, FSDP2, pipelining by GPipe and 1F1B, and, where it can be
imported, Megatron-core by ``tests/frameworks/megatron_gpt.py``. Each mode is a process of its own on each rank. Losses
and the final parameters' hash are equal to the bit, rank by rank.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as stock
from paths import without_directories
from torch import nn

MODES = ("stock", "patch", "avoid")
MEGATRON = Path(__file__).resolve().parents[1] / "frameworks" / "megatron_gpt.py"
WAYS = {
    "TP": [],
    "TP, SP, DDP, overlapped": ["--sp", "--ddp", "--overlap", "--dist-opt"],
    "PP": ["--tp", "1", "--pp", "2"],
}
STEPS, WIDTH, LAYERS, ROWS = 5, 512, 8, 64
FRAMEWORKS = {}


def framework(function):
    FRAMEWORKS[function.__name__] = function
    return function


def layers(device, count=LAYERS, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count))).to(device)


def batches(device, seed):
    """Inputs and targets of each step."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield tuple(torch.randn(ROWS, WIDTH, generator=chance).to(device) for _ in range(2))


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


def trained(module, device, seed):
    """Train ``module``, and return the losses and a hash of its parameters, of this rank."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3), []
    for given, target in batches(device, seed):
        loss = loss_of(module(given), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "hash": hash_of(module)}


def hash_of(module):
    found = hashlib.sha256()
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(local.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@framework
def ddp(device):
    """Its reducer is C++, and all_reduces overlap the backward, in buckets of 1 MiB."""
    return trained(nn.parallel.DistributedDataParallel(layers(device), bucket_cap_mb=1), device, stock.get_rank())


@framework
def ddp_with_a_hook(device):
    """A hook that calls torch.distributed."""
    module = nn.parallel.DistributedDataParallel(layers(device), bucket_cap_mb=1)

    def hook(state, bucket):
        buffer = bucket.buffer().div_(stock.get_world_size())
        return stock.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])

    module.register_comm_hook(None, hook)
    return trained(module, device, stock.get_rank())


@framework
def fsdp2(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (stock.get_world_size(),))
    module = layers(device)
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return trained(module, device, stock.get_rank())


def pipelined(device, schedule):
    """A stage on each rank, and microbatches of an eighth; the losses are those of the last stage."""
    from torch.distributed import pipelining

    rank, world = stock.get_rank(), stock.get_world_size()
    stage = pipelining.PipelineStage(layers(device, LAYERS // world, seed=rank), rank, world, device)
    optimizer, told = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3), []
    schedule = getattr(pipelining, schedule)(stage, n_microbatches=8, loss_fn=loss_of)
    for given, target in batches(device, seed=0):
        losses = []
        last = {"target": target, "losses": losses} if rank == world - 1 else {}
        schedule.step(*([given] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        told.append([loss.item() for loss in losses])
    return {"losses": told, "hash": hash_of(stage.submod)}


@framework
def pipelining_gpipe(device):
    return pipelined(device, "ScheduleGPipe")


@framework
def pipelining_1f1b(device):
    return pipelined(device, "Schedule1F1B")


def child(mode, kind, folder):
    """Train with each framework in this mode, and write what came of it, on this rank."""
    if mode != "stock":
        import safecomm  # torch alone runs without it

        safecomm.patch(avoid_record_streams=mode == "avoid")
    if kind == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        stock.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        stock.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, train in FRAMEWORKS.items():
        try:
            found[name] = train(device)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        with open(f"{folder}/{stock.get_rank()}", "w") as file:
            json.dump(found, file)
        stock.barrier()
    if kind == "cuda":
        about = stock.group.WORLD._get_backend(device)
        found["about"] = [type(about).__name__, torch.cuda.get_device_name(), torch.cuda.nccl.version()]
        with open(f"{folder}/{stock.get_rank()}", "w") as file:
            json.dump(found, file)
    stock.destroy_process_group()


def run(arguments, command, limit=180):
    """Run ``command`` by torchrun, and return its lines, or why there are none."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={arguments.ranks}",
            *command,
        ],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return [], f"not within {limit} s"
    return out.splitlines(), f"status {process.returncode}: {error[-2000:]}" if process.returncode else ""


def of_torch(mode, arguments):
    """What the ranks found with torch's frameworks, by framework."""
    with tempfile.TemporaryDirectory() as folder:
        _, error = run(arguments, [__file__, "--child", mode, "--device", arguments.device, "--out", folder])
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    missing = {"error": error or "nothing was written"}
    names = [*FRAMEWORKS, *(["about"] if arguments.device == "cuda" else [])]
    return {name: [found.get(name, missing) for found in ranks] or [missing] for name in names}


def of_megatron(mode, arguments):
    """What Megatron-core printed for each way; a way each after the other in the same processes."""
    ways = [option for options in WAYS.values() for option in ("--way", *options)]
    runner = {
        "stock": [],
        "patch": ["-m", "safecomm", "run"],
        "avoid": ["-m", "safecomm", "run", "--avoid-record-streams"],
    }
    lines, error = run(arguments, [*runner[mode], str(MEGATRON), "--device", arguments.device, *ways])
    lines = [json.loads(line) for line in lines if line.startswith("{")]
    found = [{key: line[key] for key in ("losses", "grad_norms", "hashes") if key in line} for line in lines]
    missing = {"error": error or "nothing was printed"}
    return {f"Megatron-core, {way}": dict(enumerate(found)).get(n, missing) for n, way in enumerate(WAYS)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.device, arguments.out)
    results = {"command": "python tests/gpu/frameworks.py", "torch": torch.__version__, "device": arguments.device}
    if not importlib.util.find_spec("megatron"):
        results["not run"] = "Megatron-core, which is not installed"
    trainers = (of_torch,) if "not run" in results else (of_torch, of_megatron)
    with concurrent.futures.ThreadPoolExecutor() as threads:  # a start takes most of the time
        jobs = {mode: [threads.submit(train, mode, arguments) for train in trainers] for mode in MODES}
    found = {mode: {name: said for job in jobs[mode] for name, said in job.result().items()} for mode in MODES}
    results["about"] = found["stock"].pop("about", None)
    failures = 0
    for name, wanted in found["stock"].items():
        wrong = [mode for mode in MODES[1:] if found[mode][name] != wanted]
        broken = [mode for mode in MODES if '"error"' in json.dumps(found[mode][name])]
        failures += bool(wrong or broken)
        results[name] = {"equal to stock": not wrong, "stock": wanted}
        results[name] |= {mode: found[mode][name] for mode in {*wrong, *broken}}
        print("FAILED" if wrong or broken else "equal", name, *wrong, *broken, flush=True)
    with open(arguments.out, "w") as file:
        file.write(without_directories(json.dumps(results, indent=1)) + "\n")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
