"""Megatron's training script, ``tests/frameworks/megatron_gpt.py``, with a comparison of one's own of its steps."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "tests" / "frameworks" / "megatron_gpt.py"


def measure(compare):
    """Run the script with ``sys.argv``; rank 0 prints what ``compare(step, script)`` returns, as a line of JSON."""
    sys.path = [path for path in sys.path if Path(path).resolve() != HERE]  # megatron.py is not what is to be imported
    spec = importlib.util.spec_from_file_location("megatron_gpt", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.argv[0] = str(SCRIPT)
    spec.loader.exec_module(script)
    found = {}
    script.compare = lambda step: found.update(compare(step, script))
    script.await_turn()
    cuda = script.A.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("nccl" if cuda else "gloo")
    script.train()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
