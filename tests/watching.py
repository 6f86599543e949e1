"""What tests watch safecomm with: its log, notes of calls, and a mode that sees operations and changes nothing."""

import logging

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
