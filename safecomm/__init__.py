"""Memory-safe collectives behind the ``torch.distributed`` API: ``import safecomm as dist``.

Every tensor that a collective reads or writes is held exactly as long as it is unsafe to reuse its memory, without
``record_stream`` and without blocking the host. Everything that ``torch.distributed`` has is here under the same name;
what is not wrapped is the very same object.

    >>> import safecomm as dist
    >>> work = dist.all_reduce(tensor, async_op=True)
    >>> work.wait()  # from here on the tensor may be read, and freed
    >>> dist.pending()  # what is still held, and by which line
    >>> dist.drain()  # give back what is over

``patch()`` does it for programs that import ``torch.distributed`` themselves, ``avoid_record_streams()`` for code that
calls ``record_stream``, and ``graph()`` for CUDA graphs. ``functional`` has autograd-aware collectives, ``Arena`` has
buffers out of one block, ``low_latency()`` has small collectives as one kernel, ``invariant()`` has reductions whose
bits depend on no path, and ``memory_report()`` tells where memory is. ``help(safecomm.all_reduce)`` ends with what
safecomm does beside torch.
"""

# The direction of dependency, top to bottom; nothing imports upwards (``tests/test_structure.py`` keeps it):
#
#     __init__, __main__     the face; the shell, whose arguments are in safecomm_shell.py, which needs no torch
#     tools                  what only the shell runs: its commands, the demo, the doctor and the tuning
#     patching               patch(), unpatch(), and the runner
#     diagnostics            where memory goes, and what keeps it; loaded when asked for
#     functional, operators  autograd-aware collectives out of the arena; an all_reduce as an operator of torch
#     peers                  low_latency(): small collectives as one kernel over peer memory
#     interception           what sees and changes torch's own calls: record_stream, events, captures
#     collectives            the wrapped collectives, a file a family
#     arena                  one contiguous block of communication buffers
#     core                   what is held, and until when: every release is decided there
#     _torch                 private names of torch and of the driver; the versions of torch that were tested
#     arguments              what arguments have to be, and how others are refused
#     errors                 few, flat
#     _version, _exported    the version; what type checkers are told of torch.distributed besides
#
# The head of each folder says what is inside, who may import it, and where to begin to read.

import logging
import os
import sys
import types
from typing import TYPE_CHECKING

# "python -m safecomm report" reads files, without torch: it is done before torch is looked for.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-1 - len(sys.argv) :][:3] == ["-m", "safecomm", "report"]:
    from safecomm.__main__ import main as _main

    sys.exit(_main())

# First, because it refuses a torch that lacks what the rest imports.
from safecomm import _torch

# isort: split

import torch
import torch.distributed

if TYPE_CHECKING:
    # mypy takes the first of two definitions of a name, and pyright the last.
    from safecomm.collectives.gates import *  # noqa: F403
    from safecomm.collectives.point_to_point import *  # noqa: F403

from torch.distributed import *  # type: ignore[assignment, no-redef]  # noqa: F403

if TYPE_CHECKING:
    from safecomm._exported import *  # noqa: F403

from safecomm import functional as functional
from safecomm import operators as _operators  # noqa: F401  which defines torch.ops.safecomm
from safecomm._version import __version__ as __version__
from safecomm.arena import Arena as Arena
from safecomm.arena import ArenaStats as ArenaStats
from safecomm.arena import BucketStats as BucketStats
from safecomm.arena import empty as empty
from safecomm.arena import use_arena as use_arena
from safecomm.collectives.bucketed import bucketed as bucketed
from safecomm.collectives.coalesced import _coalescing_manager as _coalescing_manager
from safecomm.collectives.gates import _all_gather_base as _all_gather_base
from safecomm.collectives.gates import _reduce_scatter_base as _reduce_scatter_base
from safecomm.collectives.gates import all_gather as all_gather
from safecomm.collectives.gates import all_gather_coalesced as all_gather_coalesced
from safecomm.collectives.gates import all_gather_into_tensor as all_gather_into_tensor
from safecomm.collectives.gates import all_gather_single as all_gather_single
from safecomm.collectives.gates import all_reduce as all_reduce
from safecomm.collectives.gates import all_reduce_coalesced as all_reduce_coalesced
from safecomm.collectives.gates import all_to_all as all_to_all
from safecomm.collectives.gates import all_to_all_single as all_to_all_single
from safecomm.collectives.gates import barrier as barrier
from safecomm.collectives.gates import broadcast as broadcast
from safecomm.collectives.gates import gather as gather
from safecomm.collectives.gates import gather_into_tensor as gather_into_tensor
from safecomm.collectives.gates import gather_single as gather_single
from safecomm.collectives.gates import reduce as reduce
from safecomm.collectives.gates import reduce_scatter as reduce_scatter
from safecomm.collectives.gates import reduce_scatter_single as reduce_scatter_single
from safecomm.collectives.gates import reduce_scatter_tensor as reduce_scatter_tensor
from safecomm.collectives.gates import scatter as scatter
from safecomm.collectives.groups import _abort_process_group as _abort_process_group
from safecomm.collectives.groups import _reconfigure as _reconfigure
from safecomm.collectives.groups import destroy_process_group as destroy_process_group
from safecomm.collectives.groups import shrink_group as shrink_group
from safecomm.collectives.objects import all_gather_object as all_gather_object
from safecomm.collectives.objects import broadcast_object_list as broadcast_object_list
from safecomm.collectives.objects import gather_object as gather_object
from safecomm.collectives.objects import monitored_barrier as monitored_barrier
from safecomm.collectives.objects import recv_object_list as recv_object_list
from safecomm.collectives.objects import scatter_object_list as scatter_object_list
from safecomm.collectives.objects import send_object_list as send_object_list
from safecomm.collectives.point_to_point import P2POp as P2POp
from safecomm.collectives.point_to_point import batch_isend_irecv as batch_isend_irecv
from safecomm.collectives.point_to_point import irecv as irecv
from safecomm.collectives.point_to_point import isend as isend
from safecomm.collectives.point_to_point import recv as recv
from safecomm.collectives.point_to_point import send as send
from safecomm.core.captures import CapturedGraph as CapturedGraph
from safecomm.core.captures import Lease as Lease
from safecomm.core.drain import drain as drain
from safecomm.core.drain import pending as pending
from safecomm.core.holds import Pending as Pending
from safecomm.core.work import Work as Work
from safecomm.errors import ArenaError as ArenaError
from safecomm.errors import ArenaFullError as ArenaFullError
from safecomm.errors import CaptureBoundaryError as CaptureBoundaryError
from safecomm.errors import InvarianceError as InvarianceError
from safecomm.errors import LiveGraphError as LiveGraphError
from safecomm.errors import LowLatencyError as LowLatencyError
from safecomm.errors import PeerTimeoutError as PeerTimeoutError
from safecomm.errors import PendingWorkError as PendingWorkError
from safecomm.errors import RecordStreamError as RecordStreamError
from safecomm.errors import SafecommError as SafecommError
from safecomm.errors import StaleGraphError as StaleGraphError
from safecomm.interception.graphs import graph as graph
from safecomm.interception.graphs import settle_before_capture as settle_before_capture
from safecomm.interception.invariance import invariant as invariant
from safecomm.interception.record_stream import avoid_record_streams as avoid_record_streams
from safecomm.patching.patch import bypassed as bypassed
from safecomm.patching.patch import is_patched as is_patched
from safecomm.patching.patch import original as original
from safecomm.patching.patch import patch as patch
from safecomm.patching.patch import patched as patched
from safecomm.patching.patch import unpatch as unpatch
from safecomm.patching.table import NAMES as _WRAPPED

# What this torch does not have, safecomm has not either.
for _name in [name for name in _WRAPPED if globals().get(name, name) is None]:
    del globals()[_name]

if TYPE_CHECKING:
    from safecomm.diagnostics import leaks as leaks
    from safecomm.diagnostics.collective_log import collective_log as collective_log
    from safecomm.diagnostics.record import memory_report as memory_report
    from safecomm.diagnostics.record import record_memory as record_memory
    from safecomm.diagnostics.steps import mark_step as mark_step
    from safecomm.peers.limits import LowLatencyLimits as LowLatencyLimits
    from safecomm.peers.low_latency import low_latency as low_latency

_LAZY = {
    "LowLatencyLimits": ("safecomm.peers.limits", "LowLatencyLimits"),
    "collective_log": ("safecomm.diagnostics.collective_log", "collective_log"),
    "leaks": ("safecomm.diagnostics.leaks", None),
    "low_latency": ("safecomm.peers.low_latency", "low_latency"),
    "mark_step": ("safecomm.diagnostics.steps", "mark_step"),
    "memory_report": ("safecomm.diagnostics.record", "memory_report"),
    "record_memory": ("safecomm.diagnostics.record", "record_memory"),
}
"""What is imported when it is first asked for: the module, and the name in it."""

_OWN = (
    "Arena", "ArenaError", "ArenaFullError", "ArenaStats", "BucketStats", "CaptureBoundaryError", "CapturedGraph",
    "InvarianceError", "Lease", "LiveGraphError", "LowLatencyError", "LowLatencyLimits", "P2POp", "PeerTimeoutError",
    "Pending", "PendingWorkError", "RecordStreamError", "SafecommError", "StaleGraphError", "Work",
    "avoid_record_streams", "bucketed", "bypassed", "collective_log", "drain", "empty", "functional", "graph",
    "invariant", "is_patched", "leaks", "low_latency", "mark_step", "memory_report", "original", "patch", "patched",
    "pending", "record_memory", "settle_before_capture", "unpatch", "use_arena",
)  # fmt: skip
"""The public names that are safecomm's own, beside the calls that are wrapped."""


def _is_torchs(thing: object) -> bool:
    """Return whether a name of ``torch.distributed`` is for its users, and not a module that it imports itself."""
    return type(thing) is not types.ModuleType or thing.__name__.startswith("torch.distributed.")


def __dir__() -> list[str]:
    """Return the public names, those of torch.distributed and safecomm's own, for completion."""
    theirs = [name for name, thing in vars(torch.distributed).items() if name[0] != "_" and _is_torchs(thing)]
    return sorted({*_OWN, *theirs, "__version__"})


_torch.submodules.install()
_torch.versions.warn_if_newer()

if (
    _torch.versions.HERE < "2.8"
    and torch.distributed.is_nccl_available()
    and "TORCH_NCCL_AVOID_RECORD_STREAMS" not in os.environ
):
    # Read when a group is made. Later versions never call record_stream for collectives, and ignore it.
    os.environ["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "1"
    logging.getLogger("safecomm").warning(
        "torch %s: TORCH_NCCL_AVOID_RECORD_STREAMS=1 was set, so that torch leaves the holding to safecomm",
        torch.__version__,
    )

if "SAFECOMM_LOG" in os.environ or "SAFECOMM_RECORD" in os.environ:
    from safecomm.diagnostics import environment as _environment

    _environment.apply()

if os.environ.get("SAFECOMM_LOW_LATENCY", "0") not in ("", "0"):
    from safecomm.peers import low_latency as _low_latency

    _low_latency.everywhere(None if os.environ["SAFECOMM_LOW_LATENCY"] == "1" else os.environ["SAFECOMM_LOW_LATENCY"])


def _forwarded(name: str) -> object:
    """Return the diagnostics, and ``torch.distributed``'s private names, what was added later, and its submodules."""
    if name in _LAZY:
        import importlib

        module, attribute = _LAZY[name]
        found = importlib.import_module(module)
        return found if attribute is None else getattr(found, attribute)
    try:
        return getattr(torch.distributed, name)
    except AttributeError:
        pass
    if not name.startswith("__"):
        import importlib

        try:
            return importlib.import_module(f"torch.distributed.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"torch.distributed.{name}":
                raise
    message = f"module 'safecomm' has no attribute {name!r}, and neither has torch.distributed"
    if not name.startswith("_"):
        import difflib

        meant = difflib.get_close_matches(name, __dir__(), n=1)
        message += f". Did you mean {meant[0]!r}?" if meant else ""
    raise AttributeError(message)


# Type checkers see what is imported above. Of a list that is made here they would see nothing, and a module with
# ``__getattr__`` has every name there could be, misspelt ones among them.
if not TYPE_CHECKING:
    __all__ = [name for name in __dir__() if name[0] != "_"]
    __getattr__ = _forwarded
