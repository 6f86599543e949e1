"""Torch's own kernels of operators, replaced by functions of Python until the end of an :class:`Override`."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from safecomm._torch.names import look_up

OVERRIDDEN: weakref.WeakKeyDictionary[Override, str] = weakref.WeakKeyDictionary()
"""The operators that have another kernel than torch's, by the override, whose death restores torch's kernel."""


class Override:
    """A Python function in place of torch's own kernel of ``operator`` (such as ``"aten::record_stream"``).

    ``original`` is called as the operator is: what is given, or torch's kernel for ``key``; None if this torch does not
    give that out (before 2.9). Without an original, a function that ``needs_original`` replaces nothing. One that
    ``wants_keys`` is given the call's keys first, to go on below.
    """

    def __init__(
        self, operator: str, key: str, function: Callable[..., object], *, needs_original: bool = False,
        original: Callable[..., Any] | None = None, wants_keys: bool = False,
    ) -> None:  # fmt: skip
        namespace, name = operator.split("::")
        self.original: Callable[..., Any] | None = original
        try:
            kernel = None if original or _get_kernel is None else _get_kernel(operator, key)
            if kernel is not None:
                keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                self.original = functools.partial(kernel.call_boxed, keys)
        except (RuntimeError, AttributeError, TypeError):
            # This device type has no kernel, or torch does not give it out.
            pass
        self._library: Any = None
        if needs_original and self.original is None:
            return
        self._library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # Torch warns of every kernel that is replaced.
            warnings.simplefilter("ignore")
            self._library.impl(name, function, key, **({"with_keyset": True} if wants_keys else {}))
        OVERRIDDEN[self] = operator

    def remove(self) -> None:
        """Restore torch's own kernel."""
        OVERRIDDEN.pop(self, None)
        library, self._library = self._library, None
        if library is not None and _destroys:
            # Without this method the library dies by itself, because nothing refers to it any more.
            library._destroy()


def kernel_of_all_devices(operator: str, key: str) -> Callable[..., Any] | None:
    """Return what calls the operator's one kernel for all devices, None if it has none, or one for ``key`` besides.

    The way there is the key of no device, which no other kernel is put at. Unlike a kernel that torch gives out, it is
    called without the interpreter's lock: gloo's threads may need that before a wait can end.
    """
    namespace, name = operator.split("::")
    if _has_kernel is None or not _has_kernel(operator, _ALL_DEVICES) or _has_kernel(operator, key):
        return None
    overload = getattr(getattr(torch.ops, namespace), name).default
    redispatch: Any = getattr(overload, "redispatch", None)
    nowhere = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    return None if redispatch is None else functools.partial(redispatch, nowhere)


_ALL_DEVICES = "CompositeExplicitAutograd"

_has_kernel: Any = look_up(
    "torch._C._dispatch_has_kernel_for_dispatch_key", None,
    "functional collectives do not reach low_latency()",
    lambda found: found("aten::empty_like", _ALL_DEVICES) is True and found("aten::empty_like", "Undefined") is False,
)  # fmt: skip

_get_kernel: Any = look_up(
    "torch.library.get_kernel", None,
    "inside of avoid_record_streams() every record_stream is converted, in each thread, and stays so", since="2.9",
)  # fmt: skip

_destroys = look_up("torch.library.Library._destroy", None, "kernels of torch are put back a bit later") is not None
