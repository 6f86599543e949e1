"""What ``help()`` of a wrapped call says beside torch's own text: what safecomm does with the memory of the call.

The documentation's reference of the calls is made of the same table, by a program without torch: this file imports
none.
"""

from __future__ import annotations

import re

_HELD = """\
Holds {}.
  Asynchronous: held until the stream that this memory was allocated on has waited for the work, or the work is
  over, whether or not it is waited for or its handle is kept."""
_SYNCHRONOUS = """\
  Synchronous: held only if it runs on another stream than that, until that stream has waited for it, or it is over."""
_STAGED = "What the call copies through is kept in the same way."
_ORDERED = """\
Ordered after what the current stream has been given; wait() orders the stream that is current then.
  On the CPU wait() blocks the host."""
_RAISES = """\
Raises CaptureBoundaryError, before CUDA sees it, if the wait is not in the CUDA graph capture that the
  launch was in, or if the first call of a group is made inside of a capture that is seen. Else what torch raises."""
_FORGETFUL = """\
On gloo, which does not say when this call is over, a dropped one is held until drain(wait=True), or until its
  group is destroyed."""
_LENDING = "On NCCL torch is given tensors that own nothing, so that its own record_stream makes no memory pile up."
_WHERE = "pending() shows what is held, and for which line; drain() gives back what is over."


def _call(held: str, *more: str, staged: bool = False, synchronous: bool = True) -> tuple[str, ...]:
    sometimes = [_SYNCHRONOUS] * synchronous + [_STAGED] * staged
    return _HELD.format(held), *sometimes, _ORDERED, _RAISES, *more, _WHERE


_INTO = _call("output_tensor and input_tensor")
_SCATTERED = _call("output and input", _FORGETFUL)
_GATHERED = _call("tensor and gather_tensor")
_SENT = _call("tensor", _LENDING, _FORGETFUL, synchronous=False)
_SENT_AT_ONCE = (
    "Holds tensor only if it was allocated on another stream than the call runs on, until that stream has waited for\n"
    "  the call, or the call is over.",
    _LENDING,
    _WHERE,
)
_LEFT = "What was not over is in quarantine: drain(wait=True) gives it back, once the device is idle."
_LIVE = "LiveGraphError if a CUDA graph is alive that runs its collectives"

_PARTS = (
    "Holds nothing, because torch keeps the memory of its parts to itself.",
    "What bucketed() has deferred on the group is launched first.",
)

TABLE: dict[str, tuple[str, ...]] = {
    "_abort_process_group": ("Holds what works of the group use that are not over. " + _LEFT,),
    "_all_gather_base": _INTO,
    "_coalescing_manager": (
        "Holds the tensors of all calls inside, as one asynchronous call does if async_ops is True, and otherwise as\n"
        "  one synchronous call.",
        "A region that an exception leaves is closed, and what it has launched stays held until that is over.",
        _WHERE,
    ),
    "_reconfigure": ("Holds what the old communicator's works use. " + _LEFT, f"Raises {_LIVE}."),
    "_reduce_scatter_base": _SCATTERED,
    "all_gather": _call("the tensors of tensor_list, and tensor", staged=True),
    "all_gather_coalesced": _call("the tensors of both lists", staged=True),
    "all_gather_into_tensor": _INTO,
    "all_gather_object": _PARTS,
    "all_gather_single": _INTO,
    "all_reduce": _call("tensor"),
    "all_reduce_coalesced": _call("tensors"),
    "all_to_all": _call("the tensors of both lists"),
    "all_to_all_single": _call("output and input"),
    "barrier": (
        "Holds nothing, because it is given no memory. What other calls hold and is over comes back, as at every call.",
        _ORDERED,
    ),
    "batch_isend_irecv": _call("the tensors of all operations", _LENDING, _FORGETFUL, synchronous=False),
    "broadcast": _call("tensor"),
    "broadcast_object_list": _PARTS,
    "destroy_process_group": (
        "Waits first for the works of the group, for its timeout or 30 s, whichever is shorter.\n"
        "  Gives back what they hold.",
        "Raises PendingWorkError, which names the works that were not over in time.",
        f"Raises {_LIVE}.\n  Nothing was destroyed then. While patch() is on it warns instead of raising, and goes on.",
    ),
    "gather": _call("tensor and the tensors of gather_list"),
    "gather_into_tensor": _GATHERED,
    "gather_object": _PARTS,
    "gather_single": _GATHERED,
    "irecv": _SENT,
    "isend": _SENT,
    "monitored_barrier": _PARTS,
    "recv": _SENT_AT_ONCE,
    "recv_object_list": _PARTS,
    "reduce": _call("tensor"),
    "reduce_scatter": _call("output and the tensors of input_list", _FORGETFUL, staged=True),
    "reduce_scatter_single": _SCATTERED,
    "reduce_scatter_tensor": _SCATTERED,
    "scatter": _call("tensor and the tensors of scatter_list"),
    "scatter_object_list": _PARTS,
    "send": _SENT_AT_ONCE,
    "send_object_list": _PARTS,
    "shrink_group": ("Holds what works of the old communicator use. " + _LEFT, f"Raises {_LIVE}."),
}
"""What each wrapped call does with memory, line by line, by the name of c10d's function."""


def help_of(name: str, theirs: str | None) -> str | None:
    """Return ``theirs``, the documentation of c10d's function ``name``, with ours at its end."""
    if name not in TABLE:  # other code's function, which has another name
        return theirs
    theirs = theirs or ""
    # Python 3.13 has taken the margin from it; before, ours has to have the same one.
    margin = min(re.findall(r"\n( *)\S", theirs), default="")
    ours = "\n".join(TABLE[name]).replace("\n", f"\n{margin}    ")
    return f"{theirs.rstrip()}\n\n{margin}In safecomm:\n{margin}    {ours}\n{margin}"
