"""What the cases share: how they are registered, how they fail, and how they leave the device alone."""

import gc

import torch
import torch.distributed as stock

import safecomm

CASES = {}
MIB = 1 << 20
LIBRARIES = {"stock": stock, "safecomm": safecomm}


def case(limit, ranks=1, there=True):
    """Register a case that may take ``limit`` seconds and takes ``ranks`` at least, if what it needs is ``there``."""

    def register(function):
        if there:
            CASES[function.__name__] = (function, limit, ranks)
        return function

    return register


def require(condition, *what):
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


def rank():
    return stock.get_rank()


def held():
    """Bytes that the allocator has given out."""
    return torch.cuda.memory_allocated()


def settle():
    """Leave nothing behind that the next measurement could count."""
    safecomm.drain(wait=True)
    gc.collect()
    for _ in range(1 if stock.get_backend() == "gloo" else 100):
        # What c10d's watchdog has put aside is freed by the group's next collective, once the watchdog has seen it.
        stock.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def slow(seconds=0.02):
    torch.cuda._sleep(int(seconds * 1.5e9))
