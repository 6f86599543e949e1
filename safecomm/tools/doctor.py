"""What this machine and its environment would do to a program's collectives: facts, and green or red with a sentence.

Red is what is wrong, or has no effect, as things are set. A hazard that only some programs meet is green, and its
sentence says which. What safecomm does about each is in ``docs/contract.md``.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed
from torch.torch_version import TorchVersion

from safecomm import _torch
from safecomm.arena import use
from safecomm.arena.arguments import bytes_of
from safecomm.core import refcounts
from safecomm.diagnostics.environment import level_of
from safecomm.diagnostics.record import record_memory, unwaited_for
from safecomm.diagnostics.replaced import replaced
from safecomm.interception.replacing import VARIABLE, flag
from safecomm.patching.patch import AVOID, STRICT
from safecomm.peers.limits import DEFAULTS, read
from safecomm.peers.low_latency import lacking

_PATIENCE = 20  # seconds for nvidia-smi


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    """Green or red."""
    sentence: str
    """What it means, and what to do if it is red."""


@dataclass(frozen=True)
class Machine:
    """What the checks are about."""

    torch: str
    python: str
    cuda: str = ""
    """The CUDA version that torch was built for; ``""`` for none."""
    nccl: tuple[int, ...] = ()
    driver: str = ""
    refused: str = ""
    """Why CUDA can't be started, in torch's words; ``""`` if it can, or is not there."""
    gpus: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    """The lines of ``nvidia-smi topo -m``."""
    no_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that can't reach each other's memory."""
    driver_answers: bool = True
    """Whether the driver's functions that tell allocations and captures apart were found."""
    why_ctypes: str = ""
    """Why what each call asks is asked by ctypes; ``""`` where it is asked in C."""
    allocator_answers: bool = True
    """Whether the caching allocator tells the stream of its segments."""
    missing: tuple[str, ...] = ()
    """What safecomm leans on, and this torch should have, but does not."""
    not_yet: tuple[str, ...] = ()
    """What it leans on, and later versions of torch have."""
    uncounted: str = ""
    """Why counts of references are not used; ``""`` where they are."""
    backends: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    """What of torch's safecomm has replaced in this process."""
    low_latency: str = ""
    """What ``low_latency()`` does not find; ``""`` for nothing."""
    unwaited: int = 0
    """Functional collectives of this thread that were not waited for."""

    @property
    def at_least(self) -> Callable[[str], bool]:
        """Return whether torch is of a version or later, as a function of it."""
        return lambda version: TorchVersion(self.torch) >= version


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found."""

    machine: Machine
    checks: tuple[Check, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything is green."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, object]:
        """Return it as plain lists and dictionaries."""
        return {"ok": self.ok, "machine": asdict(self.machine), "checks": [asdict(check) for check in self.checks]}

    def text(self, *, colour: bool = False) -> str:
        """Return it for people."""
        machine = self.machine
        nccl = ".".join(map(str, machine.nccl)) or "none"
        lines = [
            f"torch {machine.torch}, Python {machine.python}, CUDA {machine.cuda or 'none'}, NCCL {nccl}, "
            f"driver {machine.driver or 'none'}, backends {', '.join(machine.backends) or 'none'}",
            *(f"GPU {number}: {name}" for number, name in enumerate(machine.gpus)),
            *machine.links,
            *(f"{what} Later versions of torch have it." for what in machine.not_yet),
            "",
        ]
        for check in self.checks:
            word = "green" if check.ok else "red  "
            if colour:
                word = f"\x1b[{32 if check.ok else 31}m{word}\x1b[0m"
            lines.append(f"{word}  {check.name}: {check.sentence}")
        red = sum(not check.ok for check in self.checks)
        return "\n".join([*lines, "", f"{red} of {len(self.checks)} are red" if red else "all is green"])


def diagnose() -> Diagnosis:
    """Look at this machine, this torch and this environment.

    Starts CUDA where there is a GPU, allocates nothing on it, and changes nothing.

    Examples
    --------
    >>> diagnose().machine.torch == torch.__version__
    True
    """
    machine = look()
    return Diagnosis(machine, tuple(examine(machine, os.environ)))


def examine(machine: Machine, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield what there is to say of ``machine``, and of the variables in ``environ``."""
    yield from _of_the_machine(machine)
    yield from _of_the_versions(machine)
    yield from _of_the_environment(machine, environ)


# --- the machine ----------------------------------------------------------------------------------------------------


def look() -> Machine:
    """Return what this machine is."""
    gpus: tuple[str, ...] = ()
    nccl: tuple[int, ...] = ()
    no_peers: list[tuple[int, int]] = []
    allocator_answers = True
    refused = ""
    if torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError) as error:  # such as an option of the allocator that there is not
            refused = str(error).partition("\n")[0]
    if torch.cuda.is_available() and not refused:
        count = torch.cuda.device_count()
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(count))
        pairs = [(one, two) for one in range(count) for two in range(count) if one != two]
        no_peers = [(one, two) for one, two in pairs if not torch.cuda.can_device_access_peer(one, two)]
        try:
            _torch.segments()
        except RuntimeError:
            allocator_answers = False
        if torch.distributed.is_nccl_available():
            nccl = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    names = ("nccl", "gloo", "ucc", "mpi")
    available = [name for name in names if getattr(torch.distributed, f"is_{name}_available", lambda: False)()]
    links = _nvidia_smi("topo", "-m") if len(gpus) > 1 else []
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") if gpus else []
    return Machine(
        torch=torch.__version__,
        python=platform.python_version(),
        cuda=torch.version.cuda or "",
        nccl=nccl,
        driver=driver[0] if driver else "",
        refused=refused,
        gpus=gpus,
        links=tuple(line for line in links if re.match(r"\s*\S*GPU\d", line)),
        no_peer_access=tuple(no_peers),
        driver_answers=not gpus or _torch.pointer_attribute is not None,
        why_ctypes=_torch.WHY_CTYPES,
        allocator_answers=allocator_answers,
        missing=tuple(_torch.missing()),
        not_yet=tuple(_torch.missing(expected=True)),
        uncounted=refcounts.WHY_NOT,
        backends=tuple(available),
        replaced=tuple(replaced()),
        low_latency=lacking(),
        unwaited=_torch.unwaited() or 0,
    )


def _nvidia_smi(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()


def _of_the_machine(machine: Machine) -> Iterator[Check]:
    yield Check("torch", _torch.versions.standing(machine.torch) != "too old", _torch.versions.sentence(machine.torch))
    for what in machine.missing:
        yield Check("private names of torch", False, what)
    yield Check(
        "replaced",
        True,
        f"of torch's own, in this process: {', '.join(machine.replaced)}."
        if machine.replaced
        else "nothing of torch's, in this process. patch() and a few contexts do it; SAFECOMM_REPLACE=0 forbids it.",
    )
    if machine.uncounted:
        yield Check("reference counts", False, f"are not used, because {machine.uncounted}: {refcounts.COSTS}.")
    if machine.unwaited:
        yield Check("functional collectives", False, f"{unwaited_for(machine.unwaited)}. Wait for them (wait_tensor).")
    if machine.refused:
        yield Check("GPUs", False, f"CUDA can't be started: {machine.refused.rstrip('.')}.")
    elif not machine.gpus:
        yield Check(
            "GPUs", True, "none: collectives run on gloo, where memory is held until the backend's threads are done."
        )
    yield Check(
        "questions of each call",
        True,
        f"are asked by ctypes, because {machine.why_ctypes}. In C they take some microseconds less."
        if machine.why_ctypes
        else "are asked in C.",
    )
    if not machine.gpus:
        return
    yield Check(
        "NCCL",
        "nccl" in machine.backends,
        "there." if "nccl" in machine.backends else "this torch has no NCCL, so collectives of GPU tensors need gloo.",
    )
    yield Check(
        "memory of NCCL",
        True,
        "is told by group in memory_report().outside."
        if machine.at_least("2.12") and machine.nccl >= (2, 29, 7)
        else "is not told before torch 2.12 with NCCL 2.29.7: hundreds of MiB a group, beside what torch reserves.",
    )
    pairs = sorted({f"{min(pair)} and {max(pair)}" for pair in machine.no_peer_access})
    if len(machine.gpus) > 1:
        yield Check(
            "links",
            not pairs,
            f"GPUs {', '.join(pairs)} can't reach each other's memory: their collectives go through the host."
            if pairs
            else "all GPUs reach each other's memory.",
        )
        why_not = machine.low_latency or ("not all GPUs reach each other's memory" if pairs else "")
        yield Check(
            "low_latency()",
            True,
            f"leaves groups as they are: {why_not}."
            if why_not
            else "can be used by groups of up to 8 ranks on this machine"
            + (
                ". It makes no call of c10d's: hooks of groups, such as torch's flight recorder, don't see it."
                if machine.at_least("2.14")
                else "."
            ),
        )
    yield Check(
        "allocation streams",
        machine.driver_answers and machine.allocator_answers,
        "the stream that memory was allocated on can be told, so it comes back at wait()."
        if machine.driver_answers and machine.allocator_answers
        else "the stream that memory was allocated on can't be told (an allocator other than torch's native one, or no "
        "libcuda), so safecomm holds it until the device has passed the collective.",
    )


# --- hazards of versions ----------------------------------------------------------------------------------------------


def _of_the_versions(machine: Machine) -> Iterator[Check]:
    if not machine.gpus:
        return
    if machine.at_least("2.8"):
        yield Check(
            "memory reused too early",
            True,
            "torch.distributed of this version gives memory back by the stream that waits, and holds nothing for "
            "synchronous calls, so side streams can corrupt data silently; safecomm's collectives don't. DDP and "
            "functional collectives don't pass through safecomm.",
        )
    else:
        yield Check(
            "record_stream",
            True,
            "torch.distributed of this version calls record_stream for collectives, unless "
            "TORCH_NCCL_AVOID_RECORD_STREAMS=1, which safecomm sets when it is imported before a group is made.",
        )
    if machine.nccl[:2] >= (2, 28) and machine.nccl < (2, 30, 7):
        yield Check(
            "symmetric memory of NCCL",
            True,
            f"NCCL {'.'.join(map(str, machine.nccl))} can read the input of a symmetric kernel too early (2.28 to "
            "2.30.6): register no buffers with symm=True. Nothing of safecomm does.",
        )
    if machine.at_least("2.15"):
        yield Check(
            "nccl4py",
            True,
            "torch's backend of Python calls record_stream for each asynchronous collective, so a capture on it grows "
            "with each layer. Capture inside of avoid_record_streams().",
        )
    yield Check(
        "groups and graphs",
        True,
        "destroy_process_group() of torch hangs while a CUDA graph lives that runs the group's collectives; safecomm's "
        "raises LiveGraphError, at once for graphs that it has seen, and patched it resets them.",
    )
    yield Check(
        "avoid_record_streams()",
        True,
        "converts record_stream where it is asked to, and leaves it elsewhere."
        if machine.at_least("2.9")
        else "in this torch it converts record_stream in every thread, and goes on until the process ends.",
    )


# --- variables --------------------------------------------------------------------------------------------------------

Told = tuple[bool, str]


def _avoid_record_streams(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
    if machine.at_least("2.8"):
        return False, "is ignored since torch 2.8: remove it. safecomm.avoid_record_streams() does it for all code."
    if value in ("0", ""):
        return False, "makes every asynchronous collective call record_stream, so memory piles up: set it to 1."
    return True, "collectives don't call record_stream."


def _allocator(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
    parts = [part.partition(":") for part in re.split(r",(?![^\[]*\])", value) if part.strip()]
    options = {name.strip(): setting.strip() for name, _, setting in parts}
    if not machine.gpus:  # else torch has taken them, when CUDA was started
        for name, setting in options.items():
            if name not in ALLOCATOR_OPTIONS or not setting:
                near = difflib.get_close_matches(name, ALLOCATOR_OPTIONS, n=1)
                what = "is no option of torch 2.4 to 2.15" + (f" (did you mean {near[0]}?)" if near else "")
                what = "has no value" if name in ALLOCATOR_OPTIONS else what
                return False, f"{name!r} {what}, and CUDA does not start with such a one."
    if options.get("backend") == "cudaMallocAsync":
        return False, "with cudaMallocAsync the stream of an allocation is unknown: safecomm holds memory longer."
    if options.get("expandable_segments", "").lower() == "true":
        if environ.get("NCCL_GRAPH_REGISTER") != "0":
            return True, (
                "expandable segments. A program with collectives in CUDA graphs needs NCCL_GRAPH_REGISTER=0 with them: "
                "buffers that NCCL has registered in a graph end in illegal memory accesses."
            )
        return True, "expandable segments, and NCCL registers no buffers of graphs."
    return True, "is understood by torch's own allocator."


def _graph_register(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
    if value == "0":
        return True, "NCCL registers no buffers of CUDA graphs, so their memory may be remapped."
    return True, "NCCL registers the buffers of CUDA graphs: don't remap or offload memory that a graph uses."


def _connections(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
    if not value.isdigit() or not 1 <= int(value) <= 32:
        return False, "must be a number from 1 to 32; CUDA does not take this one."
    if value == "1":
        return True, (
            "kernels start in the order in which they were queued, as Megatron's overlap wants before Blackwell; "
            "streams that should run side by side can wait for each other."
        )
    return True, "streams have that many queues."


def _blocking_wait(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
    if value in ("0", ""):
        return True, "is off, as by default."
    return False, (
        "wait() blocks the host, so nothing overlaps, and torch watches no work: one that hangs is only seen where "
        "the program waits for it. Remove it outside of debugging."
    )


def _old_name(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
    return False, "is the name of before torch 2.2: put TORCH_ in front."


def _must_not(wrong: str, sentence: str) -> Callable[[str, Machine, Mapping[str, str]], Told]:
    def tell(value: str, machine: Machine, environ: Mapping[str, str]) -> Told:
        return (False, sentence) if value == wrong else (True, "does no harm to memory or overlap.")

    return tell


VARIABLES: dict[str, Callable[[str, Machine, Mapping[str, str]], Told]] = {
    "TORCH_NCCL_AVOID_RECORD_STREAMS": _avoid_record_streams,
    "PYTORCH_CUDA_ALLOC_CONF": _allocator,
    "PYTORCH_ALLOC_CONF": _allocator,
    "NCCL_GRAPH_REGISTER": _graph_register,
    "CUDA_DEVICE_MAX_CONNECTIONS": _connections,
    "TORCH_NCCL_BLOCKING_WAIT": _blocking_wait,
    "NCCL_BLOCKING_WAIT": _old_name,
    "NCCL_ASYNC_ERROR_HANDLING": _old_name,
    "NCCL_AVOID_RECORD_STREAMS": _old_name,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _must_not("0", "a rank whose peer is gone hangs without end: remove it."),
    "CUDA_LAUNCH_BLOCKING": _must_not("1", "the host waits for every kernel, so nothing overlaps: for debugging only."),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _must_not(
        "1", "there is no caching allocator, so every allocation waits for the device: for debugging only."
    ),
    "NCCL_P2P_DISABLE": _must_not("1", "GPUs don't use their links: collectives go through the host."),
}
"""The variables that are known, with what their value means. Those that are not set are passed over."""


def _of_the_environment(machine: Machine, environ: Mapping[str, str]) -> Iterator[Check]:
    for name, tell in VARIABLES.items():
        if name in environ:
            ok, sentence = tell(environ[name], machine, environ)
            yield Check(f"{name}={environ[name]}", ok, sentence)
    for name in sorted(environ):
        if name.startswith("SAFECOMM_"):
            wrong = "" if name in OWN else "is not known to this safecomm: a typo?"
            try:
                if not wrong and (environ[name] or name in (STRICT, AVOID)):  # the others are off when empty
                    OWN[name](environ[name])
            except (OSError, ValueError) as error:
                wrong = f"{error}."
            yield Check(f"{name}={environ[name]}", not wrong, wrong or "is read by safecomm.")


def _limits(value: str) -> None:
    if value not in ("0", "1"):
        for world in range(2, max(DEFAULTS) + 1):
            read(value, world)


OWN: dict[str, Callable[[str], object]] = {
    "SAFECOMM_LOG": level_of,
    "SAFECOMM_RECORD": lambda value: tempfile.TemporaryFile(dir=record_memory(value).path.parent).close(),
    use.VARIABLE: lambda value: bytes_of(value, use.VARIABLE),
    "SAFECOMM_LOW_LATENCY": _limits,
    **{name: functools.partial(flag, name) for name in (STRICT, AVOID, VARIABLE, "SAFECOMM_BUILD_C")},
}
"""safecomm's own variables, with what reads the value, and raises ValueError or OSError where safecomm refuses it."""

ALLOCATOR_OPTIONS = (
    "backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "roundup_power2_divisions",
)  # fmt: skip
"""The options of torch's caching allocator, which a torch that sees no GPU does not check."""
