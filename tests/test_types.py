"""What mypy and pyright see of it: what is wrong is an error, as of torch.distributed or better; the rest is none."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as stock

import safecomm

ROOT = Path(__file__).parent.parent
PACKAGE = Path(safecomm.__file__).parent
OWN = {"_exported.pyi", "gates.pyi"}
STUBS = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.pyi") if path.name not in OWN)
SUBMODULES = [".".join(stub.with_suffix("").parts).removesuffix(".__init__") for stub in STUBS]

OF_BOTH = """\
dist.allreduce(x)
dist.all_reduce(x, async_ops=True)
dist.all_reduce(x, op=dist.ReduceOp.SUMM)
dist.all_reduce(x, async_op=True).wiat()
dist.all_reduce(x).wait()
dist.broadcast([x], 0)
dist.reduce_scatter_tensor(x)
dist.init_process_group("gloo", world=2)
dist.get_world_sise()
dist.send(x, dst="1")
"""
"""Ten typical typos and misuses of what torch.distributed has, one a line."""

OURS = """\
dist.avoid_record_stream()
dist.avoid_record_streams("convrt")
dist.avoid_record_streams(release="later")
dist.Arena("1GiB", full="rise")
dist.use_arena("1GiB", full="fall")
dist.Arena("1GiB", check=True)
dist.graph(torch.cuda.CUDAGraph(), capture_error_mode="relax")
dist.patch(strict="maybe")
dist.low_latency(limits=3)
dist.drain(timeout="soon")
dist.bucketed(bucket_size=1)
import safecomm.fspd
from safecomm.fsdp import FullyShardedDataParalel
with dist.use_arena("1GiB") as arena: arena.statistics()
with dist.graph(torch.cuda.CUDAGraph()) as captured: captured.bytes
with dist.avoid_record_streams() as avoided: avoided.count
with dist.low_latency() as engine: engine.call
with dist.leaks.watch() as watched: watched.leak
with dist.record_memory("run.jsonl") as recording: recording.file
"""
"""The same of safecomm's own."""

RIGHT = """\
work: dist.Work = dist.all_reduce(x, async_op=True)
work.wait()
with dist.use_arena("1GiB", full="raise") as arena: buffer: torch.Tensor = arena.empty(4)
with dist.graph(torch.cuda.CUDAGraph()) as captured: captured.nbytes + 1
with dist.avoid_record_streams("count", release="order") as avoided: avoided.calls + 1
with dist.patched(strict=True), dist.bucketed(): pass
from safecomm.fsdp import FullyShardedDataParallel
from safecomm.tensor.parallel import ColwiseParallel
from safecomm.checkpoint.state_dict import get_state_dict
from safecomm.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
dist.distributed_c10d.all_reduce(x)
"""


def public_names():
    """Return what torch.distributed offers its users: what modules it uses itself, and loggers, are nothing of that."""
    uses = {"Logger", "Reducer", "c10d_logger", "config", "log", "logging_handlers", "remote_device", "timedelta"}
    return [name for name in safecomm.__all__ if hasattr(stock, name) and name not in uses]


FILES = {
    "typos_of_torch": "import torch, torch.distributed as dist\nx = torch.ones(1)\n" + OF_BOTH,
    "typos": "import torch, safecomm as dist\nx = torch.ones(1)\n" + OF_BOTH,
    "own_typos": "import torch, safecomm as dist\nx = torch.ones(1)\n" + OURS,
    "right": "import torch, safecomm as dist\nx = torch.ones(1)\n" + RIGHT,
    "names": "import safecomm\n" + "".join(f"print(safecomm.{name})\n" for name in public_names()),
    "submodules": "".join(f"import safecomm.{name}\nprint(safecomm.{name})\n" for name in SUBMODULES),
}


def lines_by_mypy(folder):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--output", "json", *(str(folder / f"{name}.py") for name in FILES)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    for line in done.stdout.splitlines():
        told = json.loads(line)
        # Beside what strict alone minds: that torch has not annotated a function.
        if told["severity"] == "error" and told["code"] != "no-untyped-call":
            yield Path(told["file"]).stem, told["line"], told["message"]


def lines_by_pyright(folder):
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": ["."], "extraPaths": [str(PACKAGE.parent)]}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)],
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},  # that there is a newer version
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    for told in json.loads(done.stdout)["generalDiagnostics"]:
        if told["severity"] == "error":
            yield Path(told["file"]).stem, told["range"]["start"]["line"] + 1, told["message"]


CHECKERS = {"mypy": lines_by_mypy, "pyright": lines_by_pyright}


@pytest.fixture(scope="module", params=CHECKERS)
def found(request, tmp_path_factory):
    """Return what a checker finds: by file and line, what it says."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(
            "types are checked where the linters are installed, and with torch 2.13 or later"
        )  # compat_skips.json
    folder = tmp_path_factory.mktemp("types")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    told = {name: {} for name in FILES}
    for name, line, message in CHECKERS[request.param](folder):
        told[name][FILES[name].splitlines()[line - 1]] = message
    return told


def test_each_typo_is_found_and_so_all_that_are_found_of_torch_distributed(found):
    lines = OF_BOTH.splitlines()
    assert len(lines) == 10
    assert set(found["typos"]) == set(lines) >= set(found["typos_of_torch"])


def test_a_misspelt_call_is_an_error(found):
    assert "allreduce" in found["typos"]["dist.allreduce(x)"]


def test_each_misuse_of_what_is_safecomm_s_own_is_found(found):
    assert set(OURS.splitlines()) - set(found["own_typos"]) == set()


@pytest.mark.parametrize("name", ["right", "names", "submodules"])
def test_what_is_right_is_no_error(found, name):
    assert found[name] == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # of torch.distributed.optim, at its import
@pytest.mark.parametrize("name", SUBMODULES)
def test_a_stub_is_of_a_submodule_of_torch_distributed(name):
    theirs = importlib.import_module(f"torch.distributed.{name}")
    assert importlib.import_module(f"safecomm.{name}") is theirs
    stub = PACKAGE / f"{name.replace('.', '/')}.pyi"
    stub = stub if stub.exists() else stub.with_suffix("") / "__init__.pyi"
    assert stub.read_text() == f"from torch.distributed.{name} import *\n"
