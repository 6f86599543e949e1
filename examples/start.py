"""How each example begins: its ranks find each other, and it knows where it runs.

The examples are started by torchrun, with as many ranks as you like, or by ``python``, as the only rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def start() -> torch.device:
    """Make the default group, and return this rank's device.

    With NCCL and a GPU for each rank; with gloo on the CPU if there are not as many GPUs, or ``--cpu`` is asked for.
    """
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    cuda = "--cpu" not in sys.argv and torch.cuda.device_count() >= ranks and dist.is_nccl_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    else:
        # Libraries look for GPUs by themselves, and are not to find any.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, device_id=device if cuda else None, **alone)
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if cuda else "the CPU, small"
        print(f"{dist.get_world_size()} rank(s) with {backend} on {where}, torch {torch.__version__}")
    return device


def forget_peak(device: torch.device) -> int:
    """Begin a measurement of memory; return the bytes that are active now, which are not what is measured."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.empty(1, device=device)  # The allocator sees only now that what record_stream was called for is over.
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


def peak(device: torch.device, base: int) -> str:
    """Return the most that was active since :func:`forget_peak`, above its ``base``, in MiB.

    Active is what is in use, and what is freed and can't be given out again yet. On the CPU nobody counts that.
    """
    if device.type != "cuda":
        return "not seen on a CPU"
    torch.cuda.synchronize()
    return f"{(torch.cuda.memory_stats()['active_bytes.all.peak'] - base) / 2**20:.0f} MiB"
