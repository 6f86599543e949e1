"""Every exception that safecomm raises on its own account.

Wrong arguments are not here: they raise what ``torch.distributed`` raises (S8).
"""


class SafecommError(RuntimeError):
    """Base of all errors that safecomm itself raises."""


class CaptureBoundaryError(SafecommError):
    """A work was waited on the other side of a CUDA graph capture from where it was launched (S5).

    Raised before CUDA sees the wait, so that the capture stays usable. Wait for eager works
    before the capture begins, and for captured works inside the same capture.
    """


class PendingWorkError(SafecommError):
    """Works did not complete in the time given, so what they hold could not be given back (S7).

    The message names each work's operation, bytes and call site. Nothing was released.
    """
