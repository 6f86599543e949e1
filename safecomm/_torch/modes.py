"""What is active on this thread and sees or changes operations: modes, transforms and profilers."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from safecomm._torch.names import NOT_DIRECT, answers, exactly, is_class, look_up


class _Overrides:
    """A class that wants to see torch's functions."""

    def __torch_function__(self, *_: object, **__: object) -> object:
        return NotImplemented


has_torch_function: Callable[..., bool] = look_up(
    "torch.overrides.has_torch_function_variadic", lambda *tensors: torch.overrides.has_torch_function(tensors),
    "looking for subclasses of tensors takes longer", lambda found: found(1, _Overrides()) is True,
)  # fmt: skip
"""Whether a tensor is of a subclass that has ``__torch_function__``, or a ``TorchFunctionMode`` is active."""


def _perhaps() -> bool:
    # With this answer every call goes through c10d's own function.
    return True


dispatch_modes: Callable[[], int] = look_up("torch._C._len_torch_dispatch_stack", _perhaps, NOT_DIRECT, answers(int))
"""How many ``TorchDispatchMode``s are active. A mode sees the dispatcher's calls and no others."""


class _Unknown:
    _is_profiler_enabled = True


profiler: types.ModuleType | type[_Unknown] = torch.autograd.profiler

if look_up("torch.autograd.profiler._is_profiler_enabled", None, NOT_DIRECT, exactly(bool)) is None:
    profiler = _Unknown
"""``profiler._is_profiler_enabled`` says whether a profiler is on, which shows the dispatcher's calls.

Torch keeps the attribute "for fast python checks": a call of C++ takes a tenth of a microsecond more. A profiler that
was started without ``torch.profiler`` or ``torch.autograd.profiler`` sees the kernels of a direct call, and neither the
name of the call nor any wait.
"""


def _no_transform() -> None:
    return None


transform: Callable[[], object] = look_up(
    "torch._C._functorch.peek_interpreter_stack", _no_transform, "calls inside of torch.func may fail",
    lambda found: found() is None or hasattr(found(), "level"),
)  # fmt: skip
"""The transform of ``torch.func`` that runs, and wraps what is made of tensors; None if there is none."""

_without_transforms: Callable[[], AbstractContextManager[object]] = look_up(
    "torch._C._DisableFuncTorch", contextlib.nullcontext, "groups that are first used inside of torch.func may fail"
)

_without_modes: Callable[[], AbstractContextManager[object]] = look_up(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext,
    "what is set up inside of a TorchDispatchMode is seen by it",
)  # fmt: skip

without_functions: Callable[[], AbstractContextManager[object]] = look_up(
    "torch._C.DisableTorchFunction", contextlib.nullcontext,
    "an import inside of a TorchFunctionMode that raises finds names missing",
)  # fmt: skip


def _sets_inference_mode(guard: Callable[[bool], AbstractContextManager[object]]) -> bool:
    before = torch.is_inference_mode_enabled()
    with guard(not before):
        inside = torch.is_inference_mode_enabled()
    return inside is not before and torch.is_inference_mode_enabled() is before


inference_mode: Callable[[bool], AbstractContextManager[object]] = look_up(
    "torch._C._InferenceMode", torch.inference_mode,
    "a signal handler that raises as a bucket is launched may leave inference mode on until the exception is freed",
    _sets_inference_mode,
)  # fmt: skip
"""The guard inside of :class:`torch.inference_mode`.

The guard is all C++, so no exception comes between the guard and its block.
"""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the transforms and modes that are active, for operations that they must not see."""
    with contextlib.ExitStack() as stack:
        if transform() is not None:
            stack.enter_context(_without_transforms())
        if dispatch_modes():
            stack.enter_context(_without_modes())
        yield


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Leave what the program has active, such as a mode that refuses operations, to try a name of torch out."""
    with without_functions(), torch.inference_mode(False), undisturbed():
        yield


try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:
    TorchDispatchMode = None  # type: ignore[assignment, misc]
"""The base of what sees every operation; None if this torch has none: then leaks can't be watched for."""

if not look_up("torch.utils._python_dispatch.TorchDispatchMode", None, "leaks.watch() can't watch", is_class):
    TorchDispatchMode = None  # type: ignore[assignment, misc]


def without_import(mode: type) -> type:
    """Return ``mode``, a ``TorchDispatchMode``, as one that does not import Dynamo.

    Torch hides what a mode does from Dynamo, and imports Dynamo for that, which takes seconds. Here that begins when
    the program itself has imported it: then the attribute is there.
    """
    hidden: Callable[..., object] = mode.__torch_dispatch__  # type: ignore[attr-defined]
    plain = inspect.unwrap(hidden)

    # Named as torch names it: a walk over the frames of a call tells by that name what is of a mode (strict).
    def __torch_dispatch__(*arguments: object) -> object:  # noqa: N807
        if "_dynamo" not in vars(torch):
            return plain(*arguments)
        mode.__torch_dispatch__ = hidden  # type: ignore[attr-defined]
        return hidden(*arguments)

    mode.__torch_dispatch__ = __torch_dispatch__  # type: ignore[attr-defined]
    return mode
