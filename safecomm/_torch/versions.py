"""The versions of torch: which are needed, which were tested and how, and what is said of the others.

The one table of them: the import, ``patch()``, the doctor, ``make compat`` read it. ``docs/torch_versions.md`` has it
as :func:`markdown` makes it, and the README as :func:`brief` does.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.distributed
from torch.torch_version import TorchVersion

log: logging.Logger = logging.getLogger("safecomm")


class Tested(NamedTuple):
    """A version of torch that tests have run on."""

    torch: str
    pythons: tuple[str, ...]
    """The oldest and the newest Python that they ran on, of those that this torch has wheels for."""
    cpu: str
    """What ran on the CPU, with gloo."""
    gpu: str = ""
    """What ran on GPUs, with NCCL; ``""`` for nothing."""


COMPAT = "`make compat`"
WHOLE = "all tests"

TESTED = (
    Tested("2.4.1", ("3.10", "3.12"), COMPAT),
    Tested("2.8.0", ("3.10", "3.13"), COMPAT),
    Tested("2.11.0", ("3.10", "3.13"), COMPAT, "GPU tests, benchmarks: 2, 4 H100; 2, 4 H200; CUDA 13.0, NCCL 2.28.9"),
    Tested("2.13.0", ("3.11",), f"{WHOLE}, at each push"),
    Tested("2.14.1", ("3.10", "3.13"), COMPAT),
    Tested("2.15.0", ("3.11", "3.13"), f"{COMPAT}, {WHOLE}", "GPU tests: 2 H100/H200; CUDA 13.2, NCCL 2.30.7"),
)
"""From the oldest to the newest. Versions between them work as far as safecomm's checks of torch go."""


class Support(NamedTuple):
    """Something else than torch that safecomm runs on: what was tested of it, and what was not."""

    what: str
    tested: str
    """By tests of the repository; ``""`` for nothing."""
    tried: str
    """By hand, and not again since; ``""`` for nothing."""
    untried: str


SUPPORT = (
    Support("Python", "3.10 to 3.13", "3.14 with torch 2.15.0", "free-threaded builds: counts of references are off"),
    Support("CUDA", "13.0, 13.2", "", "others"),
    Support("GPUs", "NVIDIA H100, H200", "", "others"),
    Support("GPUs of one machine", "2, 4", "", "8 and others"),
    Support("several machines", "", "", "all of it: torchrun and NCCL do that, nothing of safecomm's own"),
    Support("ROCm", "", "", "all of it"),
)

OLDEST = "2.4"
HERE = TorchVersion(torch.__version__)
"""The version that is installed."""


def release(version: str) -> str:
    """Return the minor release that ``version`` belongs to.

    >>> release("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


NEWEST = release(TESTED[-1].torch)


def require(version: str = torch.__version__) -> None:
    """Raise ImportError where safecomm can't work: with an older torch, or with one that was built without distributed.

    Examples
    --------
    >>> require()
    """
    if TorchVersion(version) < OLDEST:
        raise ImportError(f"safecomm needs torch {OLDEST} or later, and this is torch {version}: upgrade torch.")
    if not torch.distributed.is_available():
        raise ImportError(
            f"safecomm needs torch.distributed, which this torch {version} was built without: install a build that has "
            "it (torch.distributed.is_available())."
        )


require()  # at import: what safecomm's other modules import is not in such a torch


def standing(version: str = torch.__version__) -> str:
    """Return what is known of a version of torch: ``"tested"``, ``"works"``, ``"newer than tested"`` or ``"too old"``.

    ``"works"``: versions before and after it were tested, and safecomm asks torch what it has.

    Examples
    --------
    >>> standing("2.4.1"), standing("2.9.0"), standing("3.0.0"), standing("2.3.1")
    ('tested', 'works', 'newer than tested', 'too old')
    """
    if TorchVersion(version) < OLDEST:
        return "too old"
    if release(version) in {release(one.torch) for one in TESTED}:
        return "tested"
    return "newer than tested" if TorchVersion(version) > NEWEST else "works"


def sentence(version: str = torch.__version__) -> str:
    """Return a sentence about a version of torch, for people.

    Examples
    --------
    >>> sentence("2.9.0")
    'torch 2.9.0 was not tested itself: versions before and after it were, and what safecomm needs of it is checked.'
    """
    known = standing(version)
    if known == "tested":
        return f"torch {version} is of a release that safecomm is tested with."
    if known == "works":
        return (
            f"torch {version} was not tested itself: versions before and after it were, and what safecomm needs of it "
            "is checked."
        )
    if known == "too old":
        return f"torch {version} is too old: safecomm needs {OLDEST} or later."
    return (
        f"torch {version} is newer than {TESTED[-1].torch}, the newest that safecomm is tested with: it works as far "
        "as the checks at import go. `python -m safecomm doctor` lists what they found."
    )


def warn_if_newer() -> None:
    """Log once, at import, that this torch is newer than the tested ones."""
    if standing() == "newer than tested":
        log.warning("%s", sentence())


def markdown() -> str:
    """Return the tables of what was tested, tried and not tried.

    Examples
    --------
    >>> markdown().splitlines()[0]
    '| torch | Python | on the CPU, with gloo | on GPUs, with NCCL |'
    """
    rows = [
        "| torch | Python | on the CPU, with gloo | on GPUs, with NCCL |",
        "| --- | --- | --- | --- |",
        *(f"| {one.torch} | {', '.join(one.pythons)} | {one.cpu} | {one.gpu or 'not tried'} |" for one in TESTED),
        f"| others from {OLDEST} on | 3.10 and later | not run: what is missing is found at import | not tried |",
        "",
        "| | tested | tried by hand | not tried |",
        "| --- | --- | --- | --- |",
        *(f"| {one.what} | {one.tested or '-'} | {one.tried or '-'} | {one.untried} |" for one in SUPPORT),
    ]
    return "\n".join(rows)


def brief() -> str:
    """Return one table of what was tested and what was not.

    It has one row for all versions of torch, and none for what that row names already.

    Examples
    --------
    >>> brief().splitlines()[0]
    '| | tested | not tried |'
    """
    on_cpu = ", ".join(one.torch for one in TESTED)
    on_gpus = ", ".join(f"{one.torch} ({one.gpu})" for one in TESTED if one.gpu)
    rows = [
        "| | tested | not tried |",
        "| --- | --- | --- |",
        f"| torch on the CPU, with gloo | {on_cpu} | others from {OLDEST} on |",
        f"| torch on GPUs, with NCCL | {on_gpus} | others |",
        *(f"| {one.what} | {one.tested or '-'} | {one.untried} |" for one in SUPPORT if one.untried != "others"),
    ]
    return "\n".join(rows)
