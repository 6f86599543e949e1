"""NVML, the library of NVIDIA's driver that knows how GPUs are connected, which neither torch nor CUDA tells.

CUDA tells whether a GPU can reach another's memory, and not over what. Torch has a function of its own that asks NVML
(``_detect_dma_connectivity``), but for the GPUs of this process alone, which ``CUDA_VISIBLE_DEVICES`` may hide.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"

_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_FINE = 0  # NVML_SUCCESS, and NVML_P2P_STATUS_OK


def not_linked(uuids: Sequence[str]) -> str:
    """Return why not every two of the GPUs are known to be connected by NVLink, directly or by a switch; ``""`` if so.

    ``uuids``: as torch gives them. They may be of GPUs that CUDA does not show this process.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
        initialise, handle_of = library.nvmlInit_v2, library.nvmlDeviceGetHandleByUUID
        status_of, end = library.nvmlDeviceGetP2PStatus, library.nvmlShutdown
    except (OSError, AttributeError) as error:
        return f"NVML can't be asked: {error}"
    if code := initialise():
        return f"NVML can't be asked: its error {code}"
    try:
        handles = []
        for uuid in uuids:
            handle = ctypes.c_void_p()
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            if code := handle_of(name.encode(), ctypes.byref(handle)):
                return f"NVML does not know the GPU {uuid}: its error {code}"
            handles.append(handle)
        for (a, one), (b, other) in itertools.permutations(zip(uuids, handles, strict=True), 2):
            status = ctypes.c_int()
            if code := status_of(one, other, _NVLINK, ctypes.byref(status)):
                return f"NVML does not say how the GPUs {a} and {b} are connected: its error {code}"
            if status.value != _FINE:
                return f"no NVLink connects the GPUs {a} and {b}"
        return ""
    finally:
        end()
