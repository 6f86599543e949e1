"""How a private name of torch is looked up and tried out, and what is reported of those that are missing.

A private name that is missing, or means something else, breaks no import: its users get what stands in for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.torch_version import TorchVersion

_log = logging.getLogger("safecomm")


class Name(NamedTuple):
    """One private name."""

    costs: str
    """What is worse without the name, as the end of a sentence that begins with the name; ``""`` for nothing."""
    since: str
    """The first version of torch that has the name, where 2.4 does not."""


NAMES: dict[str, Name] = {}
"""The private names that were looked up, by their paths from torch."""

LACKING: dict[str, str] = {}
"""What is the matter with each name that is missing or has changed, by path."""

_GONE: object = object()

C10D = "torch.distributed.distributed_c10d"
C_C10D = "torch._C._distributed_c10d"
"""The beginnings of paths: c10d's modules of Python and of C++."""

NOT_DIRECT = "calls go through c10d's own function, which takes the host longer"
"""What the names of the direct way cost; see :data:`Name.costs`."""


class Never:
    """A class without instances: what stands in for a class that torch lacks."""


def look_up(
    path: str, otherwise: object, costs: str, check: Callable[[Any], object] = callable, since: str = "2.4"
) -> Any:
    """Return what torch has at ``path`` if that passes ``check``, and else ``otherwise``, which ``costs`` something.

    Never raises. ``check`` tries the name out where a trial is cheap, because a name can be there and mean something
    else. Whatever ``check`` raises counts as a failure of the check.
    """
    NAMES[path] = Name(costs, since)
    found: object = torch
    try:
        for name in path.split(".")[1:]:
            found = getattr(found, name, _GONE)
        if found is _GONE:
            LACKING[path] = "is not there"
        elif check(found):
            return found
        else:
            LACKING[path] = "is something else than it was"
    # A name that means something else now can raise anything.
    except Exception as error:
        LACKING[path] = f"does not do what it did ({error!r})"
    return otherwise


def exactly(*types: type) -> Callable[[object], bool]:
    """Return a check for a value of exactly one of ``types``."""
    return lambda found: type(found) in types


def answers(*types: type) -> Callable[[Callable[[], object]], bool]:
    """Return a check for a function of no arguments that returns a value of exactly one of ``types``."""
    return lambda found: type(found()) in types


def is_class(found: object) -> TypeGuard[type]:
    """Return whether ``found`` is a class."""
    return isinstance(found, type)


HAS_CUDA: bool = bool(torch.version.cuda or torch.version.hip)


def of_cuda(name: str, otherwise: object, costs: str) -> Any:
    """Return ``torch._C.name``; where torch was built without CUDA, ``otherwise``, which costs nothing there."""
    return look_up(f"torch._C.{name}", otherwise, costs) if HAS_CUDA else otherwise


def missing(*, expected: bool = False) -> list[str]:
    """Return a sentence for each private name that this torch lacks, or that means something else in this torch.

    ``expected``: for the names that only later versions of torch have, and for no others.
    """
    return [
        f"{path} {lack}: {NAMES[path].costs}."
        for path, lack in LACKING.items()
        if (TorchVersion(torch.__version__) < NAMES[path].since) is expected
    ]


def warn_of_missing() -> None:
    """Log a warning for each name that this torch should have and lacks."""
    for sentence in missing():
        _log.warning("torch %s: %s", torch.__version__, sentence)
