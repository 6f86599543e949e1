"""``import safecomm.fsdp``: the submodules of ``torch.distributed``, under our name, the very same objects."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_OURS = "safecomm."
_THEIRS = "torch.distributed."


def _meant(name: str) -> str:
    """Return the name under which the module called ``name`` here is imported."""
    return _THEIRS + name[len(_OURS) :]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``safecomm.x.y`` as ``torch.distributed.x.y``, unless ``safecomm.x`` is a module of the package's own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(_OURS):
            return None
        first = ".".join(name.split(".")[:2])
        ours = importlib.machinery.PathFinder.find_spec(first, sys.modules["safecomm"].__path__)
        # A folder of stubs, which type checkers read, is no module: it has no loader.
        if ours is not None and ours.loader is not None:
            return None
        try:
            found = importlib.util.find_spec(_meant(name))
        except ModuleNotFoundError:
            found = None
        return None if found is None else importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_meant(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It ran when it was imported under its own name. The import system has put the alias's spec on it: put its own
        # back.
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def install() -> None:
    """Make the submodules importable. Nothing is imported before it is asked for."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First: to the ordinary finder the path of torch's packages would do, and it would load a second copy of each.
        sys.meta_path.insert(0, _Finder())
