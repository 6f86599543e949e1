"""What tests watch safecomm with: its log, notes of calls, and a mode that sees operations and changes nothing."""

import contextlib
import functools
import importlib
import inspect
import logging
import random
import time

import torch
import torch.distributed as stock
from torch.utils._python_dispatch import TorchDispatchMode


class Log(logging.Handler):
    """What safecomm logs meanwhile."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("safecomm").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("safecomm").removeHandler(self)


def cpu_profile():
    """Return torch's profiler of the CPU, which warns where it is not told to keep its events (torch 2.5 to 2.12)."""
    keeps = "acc_events" in inspect.signature(torch.profiler.profile).parameters
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, **({"acc_events": True} if keeps else {}))


def noted(log, name, function):
    """Return ``function`` with a note of ``name`` in ``log`` for each call."""

    def call(*args):
        log.append(name)
        return function(*args)

    return call


class Sees(TorchDispatchMode):
    """A mode that is active, and lets everything through."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class StandIn:
    """Stands in for a function of the kernels, and does something before and after each call of it, on this rank."""

    def __init__(self, function, before, after):
        self.function, self.before, self.after = function, before, after

    def __call__(self, *arguments, **more):
        self.before()
        result = self.function(*arguments, **more)
        self.after()
        return result

    def __getattr__(self, name):
        return getattr(self.function, name)


@contextlib.contextmanager
def around(before=(), after=(), *, module="kernels"):
    """Call these beside functions of a module of kernels, by the names of those, before and after them, meanwhile."""
    kernels = importlib.import_module(f"safecomm.peers.{module}")
    before, after = dict(before), dict(after)
    functions = {name: getattr(kernels, name) for name in before | after}
    for name, function in functions.items():
        setattr(kernels, name, StandIn(function, before.get(name, int), after.get(name, int)))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(kernels, name, function)


def slowed(module="kernels", **chances):
    """Let functions of a module of kernels be late at random, on this rank."""
    dice = random.Random(100 + stock.get_rank())

    def wait(chance):
        if dice.random() < chance:
            time.sleep(dice.random() * 0.03)

    return around({name: functools.partial(wait, chance) for name, chance in chances.items()}, module=module)
