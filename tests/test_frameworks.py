"""Real frameworks, patched and not: equal losses, equal weights, nothing past us.

megatron-core trains a tiny GPT in ways that use every kind of parallelism; torch's own parallel modules train too.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as stock
from ranks import on, signal_to_peers, start_ranks, wait_for_signal
from torch import nn

import safecomm
from safecomm import _torch

ROOT = Path(safecomm.__file__).parents[1]
SCRIPT = ROOT / "tests" / "frameworks" / "megatron_gpt.py"
LIMIT = 110
"""Seconds until a run counts as hanging."""

WAYS = {
    "TP": [],
    "TP, SP, Megatron DDP and optimizer, overlapped": ["--sp", "--ddp", "--overlap", "--dist-opt"],
    "MoE, EP": ["--moe", "4", "--tp", "1", "--ep", "2"],
    "MoE, EP, combined 1F1B": ["--moe", "4", "--tp", "1", "--ep", "2", "--combined", "--dtype", "bf16"],
    "PP": ["--tp", "1", "--pp", "2"],
}

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core has no wheel for this Python"
)


BUFFERED = [way for way, options in WAYS.items() if "--sp" in options]
"""The ways that use Megatron's global buffers."""

HOW = {
    "unpatched": ([], [], list(WAYS)),
    "by the runner": (["-m", "safecomm", "run"], [], list(WAYS)),
    "late": ([], ["--patch", "safecomm", "--patch-late"], list(WAYS)),
    "by the runner, with an arena": (["-m", "safecomm", "run", "--arena", "16MiB"], [], BUFFERED),
}
"""The options before and after the script, and the ways that it trains. The runner patches before Megatron comes."""

PATCHED = [how for how in HOW if how != "unpatched"]


@dataclasses.dataclass
class Run:
    """What a run of two ranks printed for each way, and what it said."""

    trained: dict[str, dict]
    said: str

    def of(self, way):
        assert way in self.trained, f"it ended before:\n{self.said}"
        return self.trained[way]


def start(how, thread):
    """Begin a run, and return what waits for its end."""
    before, after, ways = HOW[how]
    options = [option for way in ways for option in ("--way", *WAYS[way])]
    command = [*before, str(SCRIPT), "--device", "cpu", *after, *options]
    if how == "by the runner":  # one of them as a person would start it
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SAFECOMM_STRICT": "1"}
        started = thread.submit(
            subprocess.run, [*torchrun, *command], capture_output=True, text=True, timeout=LIMIT, env=environment
        )
    else:
        started = start_ranks(2, *command, cwd=str(ROOT), limit=LIMIT, SAFECOMM_STRICT="1")

    def end():
        if how == "by the runner":
            ended = started.result()
            status, out, said = ended.returncode, ended.stdout, ended.stderr
        else:
            ended = started.end()
            status, out, said = max(abs(one.status) for one in ended), ended[0].out, "".join(one.err for one in ended)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if len(lines) == len(ways):
            assert status == 0, said
        return Run(dict(zip(ways, lines, strict=False)), said)

    return end


@pytest.fixture(scope="module")
def runs():
    """Each of ``HOW``, for all ways: importing Megatron takes ten times as long as training."""
    runs, names = {}, list(HOW)
    with ThreadPoolExecutor(1) as thread:
        for several in (names[place : place + 2] for place in range(0, len(names), 2)):  # one starts, another trains
            ends = {how: start(how, thread) for how in several}
            runs.update((how, end()) for how, end in ends.items())
    return runs


@needs_megatron
@pytest.mark.parametrize(("how", "way"), [(how, way) for how in PATCHED for way in HOW[how][2]])
def test_megatron_trains_the_same_patched_late_and_by_the_runner_s8(runs, how, way):
    expected, found = runs["unpatched"].of(way), runs[how].of(way)
    assert expected["ok"]
    for key in ("losses", "grad_norms", "hashes"):
        assert found[key] == expected[key], key


@needs_megatron
@pytest.mark.parametrize("how", PATCHED)
def test_nothing_of_megatron_goes_past_safecomm_s8(runs, how):
    said = runs[how].said
    assert "bypassed safecomm" not in said
    if how.startswith("by the runner"):
        assert "0 calls bypassed it" in said
        assert "0 bytes in 0 holds at the end" in said


@needs_megatron
def test_megatrons_buffers_come_from_the_runners_arena(runs):
    said = runs["by the runner, with an arena"].said
    assert "arena: at most 0 B of" not in said
    assert "of 16.0 MiB" in said


@needs_megatron
def test_the_example_runs_a_script_twice_and_compares(runs, monkeypatch, capsys):
    """It begins what the fixture has run already."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "megatron.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    way = next(way for way in WAYS if "--dist-opt" in WAYS[way])
    begun, by_runner = [], runs["by the runner"].of(way)

    def train(command):
        begun.append(command)
        return by_runner if "safecomm" in command else runs["unpatched"].of(way)

    monkeypatch.setattr(example, "train", train)
    monkeypatch.setattr(sys, "argv", ["megatron.py", "--cpu"])
    assert example.main() == 0
    place = begun[0].index(str(SCRIPT))
    assert begun[1] == [*begun[0][:place], "-m", "safecomm", "run", "--strict", *begun[0][place:]]
    assert set(WAYS[way]) < set(begun[0])
    loss = f"{by_runner['losses'][-1]:.4f}"
    ways = "the script -> -m safecomm run the script"
    assert capsys.readouterr().out.splitlines()[-1] == f"loss {loss} -> {loss} ({ways}; memory needs a GPU)"

    with monkeypatch.context() as other:
        other.setitem(by_runner, "losses", [0.0])
        assert example.main() == 1
        assert "DIFFERENT" in capsys.readouterr().out


WHO_ASKS = """
import torch
import safecomm
from safecomm import _torch
from safecomm.arena.arena import OPEN

torch.cuda.current_device = lambda: torch.device("cpu")
safecomm.patch()
from megatron.core.utils import GlobalMemoryBuffer

memory = GlobalMemoryBuffer()
for name in ("megatron.core.transformer.dot_product_attention", "megatron.core.tensor_parallel.layers"):
    ask = "memory.get_tensor((64, 64), torch.float32, 'mpu')"
    tensor = eval(ask, {"__name__": name, "memory": memory, "torch": torch})
    print(name.rpartition(".")[2], [arena.owns(tensor) for arena in OPEN.values()])
"""


@needs_megatron
def test_no_arena_is_made_for_what_attention_takes_of_megatrons_buffers():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SAFECOMM_ARENA": "1MiB"}
    done = subprocess.run(
        [sys.executable, "-c", WHO_ASKS], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.splitlines() == ["dot_product_attention []", "layers [True]"], done.stderr


@needs_megatron
@on(2)
def test_megatrons_overlapped_send_that_is_freed_before_it_is_copied_s1():
    """The order of megatron-core 0.16.1's interleaved schedule, by its own functions: isend, free the output, go on.

    gloo reads the memory when the peer is ready for it. Stock sends whatever is there by then.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        from megatron.core.pipeline_parallel.p2p_communication import _p2p_ops
        from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    group, rank, numel = stock.group.WORLD, stock.get_rank(), 16 << 10
    nothing = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
    peers = {"group": group, "prev_pipeline_rank": 1 - rank, "next_pipeline_rank": 1 - rank}

    def send_and_free(name):
        if rank == 0:
            output = torch.full((numel,), 1.0)
            requests = _p2p_ops(**{**nothing, "tensor_send_next": output}, **peers)
            deallocate_output_tensor(output, True)
            later = [torch.full((numel,), -7.0) for _ in range(64)]  # what the next microbatch computes
            signal_to_peers(f"{name} freed")
            requests["send_next"].wait()
            del later
            return None
        wait_for_signal(f"{name} freed")
        received = torch.zeros(numel)
        _p2p_ops(**{**nothing, "tensor_recv_prev": received}, **peers)["recv_prev"].wait()
        return bool((received == 1.0).all())

    without = send_and_free("stock")
    with safecomm.patched():
        ours = [send_and_free(f"patched {trial}") for trial in range(5)]
    if rank == 1:
        assert without is False, "stock sends the right data: the program does not bite"
        assert ours == [True] * 5
    assert safecomm.pending() == []


# --- torch's own ------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def steps(module, optimizer=None):
    optimizer = optimizer or torch.optim.Adam(module.parameters(), lr=1e-2)
    torch.manual_seed(1 + stock.get_rank())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def ddp():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    plain = nn.parallel.DistributedDataParallel(model())
    hooked = nn.parallel.DistributedDataParallel(model())
    hooked.register_comm_hook(None, fp16_compress_hook)

    def our_hook(_, bucket):
        work = stock.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / stock.get_world_size())

    by_hand = nn.parallel.DistributedDataParallel(model())
    by_hand.register_comm_hook(None, our_hook)
    return [(steps(one), list(one.parameters())) for one in (plain, hooked, by_hand)]


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = steps(module)
    with FullyShardedDataParallel.summon_full_params(module):
        return losses, [parameter.detach().clone() for parameter in module.parameters()]


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (stock.get_world_size(),))
    module = model()
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return steps(module), [whole(parameter.detach()) for parameter in module.parameters()]


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (stock.get_world_size(),))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(2)
    x = torch.randn(4, 8)
    module(x).sum().backward()
    return [whole(parameter.grad) for parameter in module.parameters()]


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=1e-2)
    return steps(module, optimizer), list(module.parameters())


def checkpoint():
    import tempfile

    import torch.distributed.checkpoint as dcp

    module = model()
    folder = [tempfile.mkdtemp() if stock.get_rank() == 0 else None]
    stock.broadcast_object_list(folder)
    dcp.save(module.state_dict(), checkpoint_id=folder[0])
    loaded = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    dcp.load(loaded, checkpoint_id=folder[0])
    return [loaded[name] for name in sorted(loaded)]


def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = stock.get_rank(), stock.get_world_size()
    torch.manual_seed(3)
    layers = [nn.Linear(8, 8) for _ in range(world)]
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    losses = []
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    return [loss.detach() for loss in losses], [parameter.grad for parameter in layers[rank].parameters()]


def differentiable():
    import torch.distributed.nn.functional as functional

    x = torch.ones(2, 3, requires_grad=True)
    total = sum(part.sum() for part in functional.all_gather(functional.all_reduce(x * (1 + stock.get_rank()))))
    total.backward()
    return total.detach(), x.grad


def functional_collectives():
    import torch.distributed._functional_collectives as functional

    gathered = functional.all_gather_tensor(torch.ones(2) * stock.get_rank(), 0, stock.group.WORLD)
    return functional.all_reduce(torch.ones(3), "sum", stock.group.WORLD) + 0, gathered + 0


PARALLEL = [
    ddp, fsdp1, fsdp2, tensor_parallel, zero_redundancy, checkpoint, pipeline, differentiable, functional_collectives,
]  # fmt: skip


LAUNCHED_BY_CPP = {
    "ddp": {"allgather", "allreduce", "broadcast"},
    "fsdp2": {"allgather_into_tensor_coalesced"},
    "tensor_parallel": {"allgather_into_tensor_coalesced", "allreduce"},
    "zero_redundancy": {"allgather", "allreduce", "broadcast"},
    "functional_collectives": {"allgather_into_tensor_coalesced", "allreduce"},
}  # fmt: skip
"""What goes past the patch because C++ launches it, by functional collectives and DDP's reducer: hooks see it."""


def flat(thing):
    if isinstance(thing, (list, tuple)):
        return [leaf for one in thing for leaf in flat(one)]
    return [thing.detach().clone() if isinstance(thing, torch.Tensor) else thing]


@pytest.mark.parametrize("make", PARALLEL)
@on(2)
def test_torchs_own_parallel_modules_are_the_same_patched_s8(make):
    same_patched(make)


@pytest.mark.parametrize("make", [fsdp2, pipeline, zero_redundancy])
@on(4)
def test_the_same_on_four_ranks_s8(make):
    same_patched(make)


def same_patched(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        expected = flat(make())
        with safecomm.patched(strict=True):
            found = flat(make())
            bypassed = safecomm.bypassed()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    by_cpp = LAUNCHED_BY_CPP.get(make.__name__, set()) if _torch.HOOKS else set()
    assert {line.partition(" ")[0] for line in bypassed} == by_cpp, bypassed
    safecomm.drain(wait=True)
    assert safecomm.pending() == []
