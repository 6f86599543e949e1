"""Megatron's global buffers, out of the arena.

``GlobalMemoryBuffer`` keeps one buffer for each name for the life of the program, as large as the largest request, and
gives it out again without any ordering. Out of an arena each request has a slot of its own, for as long as anything
refers to it, and slots are shared by all names. Attention takes the memory of its matrix product there too, under the
name of the communication buffers; nothing communicates with that, so it stays Megatron's, and a program without other
buffers makes no arena for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

import torch

from safecomm import _torch
from safecomm.arena.use import empty, in_use, may_be_used
from safecomm.core.streams import HOST

MODULE = "megatron.core.utils"
ATTENTION = "megatron.core.transformer.dot_product_attention"


class Buffers:
    """The replacement of ``GlobalMemoryBuffer.get_tensor``, now or when Megatron is imported."""

    def __init__(self) -> None:
        self._finder = _Finder(self.serve)
        self._replaced = _torch.Replaced()
        if MODULE in sys.modules:
            self.serve(sys.modules[MODULE])
        else:
            sys.meta_path.insert(0, self._finder)

    def serve(self, module: types.ModuleType) -> None:
        """Replace the method in ``module``."""
        owner = getattr(module, "GlobalMemoryBuffer", None)
        original = getattr(owner, "get_tensor", None)
        if original is None:
            return

        def get_tensor(
            self: object, tensor_shape: Sequence[int], dtype: torch.dtype, name: str, *args: object, **kwargs: object
        ) -> torch.Tensor:
            if (
                may_be_used()
                and not args
                and not kwargs
                and 0 not in tensor_shape
                and sys._getframe(1).f_globals.get("__name__") != ATTENTION
            ):
                device = torch.device(torch.cuda.current_device())
                if in_use(HOST if device.type == "cpu" else device.index) is not None:
                    return empty(*tensor_shape, dtype=dtype, device=device)
            return original(self, tensor_shape, dtype, name, *args, **kwargs)  # type: ignore[no-any-return]

        get_tensor.__doc__ = original.__doc__
        self._replaced.attribute(owner, "get_tensor", get_tensor)

    def remove(self) -> None:
        """Put Megatron's own method back."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._replaced.close()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Megatron's module as the others do, and tells when it has been run."""

    def __init__(self, then: Callable[[types.ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
