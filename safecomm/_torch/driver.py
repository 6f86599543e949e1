"""The CUDA driver: questions that torch does not answer, and a launch without Triton.

For questions the library is a PyDLL and no CDLL, because releasing the GIL would cost more than any question. The
argument objects are kept, which halves the cost of a call (0.35 us against 0.7). No two threads share any, because
another thread may run between a call and the reading of its answer. An argument that fits into an int is passed as
Python's int: in a program each object is a cache miss or two, and an int takes a fifth less.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch

BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class _Arguments(threading.local):
    def __init__(self) -> None:
        self.pointer = ctypes.c_uint64()
        self.answer = ctypes.c_uint64()
        self.status = ctypes.c_int()
        self.capturing = (self.pointer, self.status, ctypes.byref(self.status))
        self.mode = ctypes.c_int()


_arguments = _Arguments()

Question = tuple[ctypes.c_uint64, ctypes.c_uint64, object]
"""What ``pointer_attribute`` is called with: the pointer, the answer, and a reference to the answer."""

questions: list[Question] = []
"""Questions that are free. A caller takes one, and puts it back when it has read the answer.

That is cheaper than a question for each thread. A signal handler that asks in the middle takes another question.
"""


def new_question() -> Question:
    """Return a new question, which no other caller has."""
    answer = ctypes.c_uint64()
    return ctypes.c_uint64(), answer, ctypes.byref(answer)


def _driver_function(name: str, *, waits: bool = False) -> Callable[..., int] | None:
    try:
        library = (ctypes.CDLL if waits else ctypes.PyDLL)("libcuda.so.1")
    except OSError:
        return None
    return library[name] if hasattr(library, name) else None


pointer_attribute = _driver_function("cuPointerGetAttribute")
"""Called with a :data:`Question` and ``BUFFER_ID``: answers with the driver's id of a pointer's allocation.

Unlike an address, an id is never used again in the life of the process ("subsequent allocations do not reuse IDs",
CUDA driver API). The rule holds for ``cudaMalloc`` and for each mapping of an expandable segment.

None without a driver.
"""

stream_is_capturing = _driver_function("cuStreamIsCapturing")
capture_info = _driver_function("cuStreamGetCaptureInfo_v2")
_exchange_capture_mode = _driver_function("cuThreadExchangeStreamCaptureMode")
_current_context = _driver_function("cuCtxGetCurrent")
_set_context = _driver_function("cuCtxSetCurrent")
_launch_kernel = _driver_function("cuLaunchKernel", waits=True)


def capture_id(stream: int) -> int:
    """Return the id of the CUDA graph capture that the raw ``stream`` is part of; 0 if the stream is not capturing."""
    if stream_is_capturing is None or capture_info is None:
        # Without the driver only the current stream can be asked, and one capture can't be told from another.
        return int(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    handle, status, status_reference = _arguments.capturing
    handle.value = stream
    if stream_is_capturing(handle, status_reference) or status.value != _CAPTURE_ACTIVE:
        return 0
    identity = _arguments.answer
    failed = capture_info(handle, status_reference, ctypes.byref(identity), None, None, None)
    return 0 if failed else int(identity.value)


def swap_capture_mode(mode: int = _CAPTURE_RELAXED) -> int:
    """Set this thread's stream-capture mode and return the mode that the thread had.

    In the relaxed mode a thread may query events although another thread is capturing in the global mode, which is
    torch's default. In any other mode the query fails, and the capture with it
    (https://github.com/pytorch/pytorch/pull/148594).
    """
    if _exchange_capture_mode is None:
        return mode
    argument = _arguments.mode
    argument.value = mode
    _exchange_capture_mode(ctypes.byref(argument))
    return argument.value


_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def kernel_launcher(
    function: int,
    grid: int,
    threads: int,
    shared: int,
    kinds: Sequence[type[ctypes.c_uint64 | ctypes.c_uint32]],
    preset: Sequence[int] = (),
) -> Callable[..., None] | None:
    """Return what launches ``function``, a kernel of the current device: ``launch(stream, *arguments)``.

    ``kinds`` are the types of ctypes of the kernel's parameters; a parameter that no argument is given for is 0.
    ``shared``: bytes of shared memory. No two threads may call ``launch`` at once. None without a driver.
    """
    launch_kernel, set_context = _launch_kernel, _set_context
    if launch_kernel is None or _current_context is None or set_context is None:
        return None
    context = ctypes.c_void_p()
    _current_context(ctypes.byref(context))
    values = [kind() for kind in kinds]
    for value, argument in zip(values, preset):  # noqa: B905
        value.value = argument
    addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    handle = ctypes.c_void_p()
    one = ctypes.c_uint(1)
    call = (
        ctypes.c_void_p(function), ctypes.c_uint(grid), one, one, ctypes.c_uint(threads), one, one,
        ctypes.c_uint(shared), handle, addresses, None,
    )  # fmt: skip

    def launch(stream: int, *arguments: int) -> None:
        handle.value = stream
        for value, argument in zip(values, arguments):  # noqa: B905
            value.value = argument
        error = launch_kernel(*call)
        # A thread that has not called CUDA yet has no context.
        if error == _INVALID_CONTEXT:
            set_context(context)
            error = launch_kernel(*call)
        if error:
            raise RuntimeError(f"cuLaunchKernel failed with error {error} of the CUDA driver")

    return launch
