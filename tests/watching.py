"""What tests watch safecomm with: its log, notes of calls, and a mode that sees operations and changes nothing."""

import inspect
import logging

import torch
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
