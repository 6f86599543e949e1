"""What is replaced of torch's functional collectives, so that those that nobody waits for are finished.

They stay torch's own. Around them it is noted what they read and write, and each begins with what every call of
safecomm begins with; the wrapper that they give out tells of its beginning, and of waits. ``safecomm/unwaited.py`` does
the rest. While torch traces, all of it does what torch does.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from safecomm import _torch, backends
from safecomm.collectives.call import flatten
from safecomm.ledger import LEDGER
from safecomm.sites import outside

NAMES = (
    "all_gather_into_tensor_coalesced", "all_gather_single", "all_gather_single_autograd",
    "all_gather_single_coalesced", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce",
    "all_reduce_coalesced", "all_to_all_single", "all_to_all_single_autograd", "broadcast", "permute_tensor",
    "reduce_scatter_single", "reduce_scatter_single_autograd", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
"""The functional collectives, under the names of all versions of torch."""


class Functional:
    """The replacements, while the patch is on. ``changes`` has those of functions, by what they replace."""

    def __init__(self) -> None:
        self.changes: dict[Any, Any] = {}
        self._module = module = _torch.functional_collectives()
        self._methods: dict[str, tuple[Any, Any]] = {}
        if module is None:
            return
        LEDGER.unwaited.wait_for = module.wait_tensor
        for name in NAMES:
            original = vars(module).get(name)
            # A deprecated one says so of the line that calls it, and calls the one that has taken its place.
            newer = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
            deprecated = newer != name and newer in vars(module)
            if original is not None and _torch.is_torchs(original) and not deprecated:
                self.changes[original] = _noting(original, module.AsyncCollectiveTensor)
                setattr(module, name, self.changes[original])
        for name, make in (("__new__", _telling), ("trigger_wait", _waiting), ("wait", _waiting)):
            there = vars(module.AsyncCollectiveTensor)[name]
            self._methods[name] = there, make(there)
            setattr(module.AsyncCollectiveTensor, name, self._methods[name][1])

    def remove(self) -> None:
        """Put torch's own back. What somebody has put over ours since stays, and goes on to them."""
        for original, replacement in self.changes.items():
            if vars(self._module).get(original.__name__) is replacement:
                setattr(self._module, original.__name__, original)
        for name, (original, replacement) in self._methods.items():
            if vars(self._module.AsyncCollectiveTensor).get(name) is replacement:
                setattr(self._module.AsyncCollectiveTensor, name, original)


def _noting(original: Any, wrapper: type) -> Any:
    """Return what stands in for a functional collective."""
    place = list(inspect.signature(original).parameters).index("group")

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        if LEDGER.busy:
            LEDGER.sweep()
        result = original(*args, **kwargs)
        wrappers: list[Any] = [
            one for one in (result if isinstance(result, list) else (result,)) if type(one) is wrapper
        ]
        if wrappers:
            given = args[0] if args else kwargs.get("self", kwargs.get("inputs"))
            frame = outside(("torch.", f"{__name__}."))
            orders = wrappers[0].elem.is_cuda and _orders(args[place] if len(args) > place else kwargs["group"])
            for one in wrappers:
                LEDGER.unwaited.launched(one.elem, original.__name__, list(flatten(given)), frame, orders=orders)
        return result

    return function


def _orders(group: Any) -> bool:
    """Return whether a wait on a GPU orders a stream, of ``group`` in any form that is given; False if it is others."""
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        group = group[0].get_group(group[1])
    elif isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    return isinstance(group, ProcessGroup) and backends.waits_order_streams(group)


def _telling(original: Any) -> Any:
    """Return what stands in for the wrapper's ``__new__``."""
    make = original.__func__

    @functools.wraps(make)
    def __new__(cls: Any, elem: torch.Tensor) -> Any:  # noqa: N807
        made = make(cls, elem)
        if not is_compiling():
            LEDGER.unwaited.wrapped(made, elem, sys._getframe(1))
        return made

    return staticmethod(__new__)


def _waiting(original: Any) -> Any:
    """Return what stands in for the method of the wrapper that waits."""

    @functools.wraps(original)
    def method(self: Any) -> Any:
        result = original(self)
        if not is_compiling():
            LEDGER.unwaited.waited(self.elem)
        return result

    return method
