"""What the kernels of a group tell the host: that a call has given up, or has waited long, and where it was made."""

from __future__ import annotations

import ctypes
import logging
import types
from datetime import timedelta

import torch

from safecomm.core.call_site import line_of
from safecomm.errors import PeerTimeoutError

log: logging.Logger = logging.getLogger("safecomm")

LONG = timedelta(seconds=5)
"""How long a call waits for its peers before there is a warning of it."""

REMEMBERED = 4096
"""How many eager calls' sites are kept, for the error or the warning that names one."""

Site = tuple[int, str, types.CodeType, int]
"""The number of a call, c10d's function, and where it was called."""


class HostWord:
    """8 bytes of host memory that kernels of a device write to, and the sites of the calls that they may name.

    The first four are the number of the first call that has given up, the others that of a call that has waited longer
    than :data:`LONG`. Both are nearly always 0, so the host looks at them together, where it is anyway.

    ``who``: the rank and the group, for what is said. ``timeout``: how long their calls wait.
    """

    def __init__(self, who: str, timeout: timedelta, *, pinned: bool) -> None:
        self.failure: str = ""  # what there is to say of the call that has given up
        self.recent: list[Site | None] = [None] * REMEMBERED
        self.captured: dict[int, Site] = {}
        self._who = who
        self._timeout = timeout
        self._memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.address: int = self._memory.data_ptr()  # pinned memory has the same on the device
        self._both = ctypes.c_int64.from_address(self.address)
        self._each = (ctypes.c_int32 * 2).from_address(self.address)
        self._warned = 0  # the call that was last warned of

    @property
    def timed_out(self) -> bool:
        """Whether a call has given up."""
        return self._each[0] != 0

    def look(self) -> None:
        """Raise PeerTimeoutError if a call has given up; warn of one that has waited long."""
        if self._both.value:
            self._say()

    def _say(self) -> None:
        failed, slow = self._each
        if failed:
            if not self.failure:
                self.failure = (
                    f"{self._who} has waited {self._timeout} for its peers in {self._site_of(failed)}: a rank has "
                    "died, is stuck, or has not made that call. Its result has NaN, and those of the calls after it "
                    "are NaN. The group can't be used with low_latency() any more; end the job, or make the group anew."
                )
            raise PeerTimeoutError(self.failure)  # a new one: an old one's traceback would keep the caller's tensors
        self._each[1] = 0
        # A kernel says it again as long as it waits.
        if slow != self._warned:
            self._warned = slow
            log.warning(
                "low_latency(): %s has waited longer than %s for its peers in %s, and gives up after %s: a rank is "
                "slow, is stuck or has died",
                self._who, LONG, self._site_of(slow), self._timeout,
            )  # fmt: skip

    def _site_of(self, call: int) -> str:
        site = self.captured.get(call) or self.recent[call % REMEMBERED]
        if site is None or site[0] != call:
            return "a call that was forgotten since"
        return f"{site[1]} called at {line_of(site[2], site[3])}"
