"""Works that go to torch's C++, which takes none but c10d's: C++ is given one that stands for ours.

They go there by DDP's ``Join`` context, by ``_register_work``, and by groups and backends that are classes of Python,
whose methods C++ calls. A work that anybody may wait for goes as the backend's own handle, which needs no Python; the
ledger polls that as ever (S3). What only ours knows how to wait for goes as a work of Python that asks ours.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import Work as C10dWork

from safecomm import _torch
from safecomm.core.work import Work

_BASES: tuple[Any, ...] = (ProcessGroup, _torch.Backend)


class _StandIn(C10dWork):
    """A work of c10d's class, each of whose methods is ``work``'s."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "work"), name)


def for_cpp(value: Any) -> Any:
    """Return what C++ takes for ``value``, if that is a ``safecomm.Work``; else ``value``."""
    if type(value) is Work and value.turn is None:
        value._keep_results()
        value.has_future = True  # what C++ has stands for the handle from now on
        return value.inner
    # Before, C++ kept no reference to a work of Python, and waits without end for one that is gone (pytorch #146376).
    return _StandIn(value) if issubclass(type(value), Work) and _torch.versions.HERE >= "2.7" else value


class Works:
    """The replacements of what takes works to C++, by what they replace; methods of classes that come later too."""

    def __init__(self) -> None:
        gives = (Join.notify_join_context, _torch.register_work)
        self.changes: dict[Any, types.FunctionType] = {one: _giving(one) for one in gives if one is not None}
        self._replaced, self._on = _torch.Replaced(), True
        for base in _BASES:
            kinds = base.__subclasses__()
            for kind in kinds:
                self.changes |= _methods(base, kind)
                kinds += kind.__subclasses__()
            made = classmethod(lambda kind, _base=base, **given: self._made(_base, kind, **given))
            self._replaced.attribute(base, "__init_subclass__", made)

    def _made(self, base: Any, kind: Any, **kwargs: object) -> None:
        super(base, kind).__init_subclass__(**kwargs)
        for original, replacement in _methods(base, kind).items() if self._on else ():
            self._replaced.attribute(kind, original.__name__, replacement)
            self.changes[original] = replacement

    def remove(self) -> None:
        """Replace no more methods of classes that come later."""
        self._on = False  # for what other code has put over ours, which goes on to it
        self._replaced.close()


def _methods(base: Any, kind: type) -> dict[Any, types.FunctionType]:
    """Return what replaces the methods of ``base`` that are functions of Python in ``kind``, and that C++ may call."""
    found = [value for name, value in vars(kind).items() if name in vars(base) and not name.startswith("__")]
    return {value: _giving(value) for value in found if isinstance(value, types.FunctionType)}


def _giving(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(*args: object, **kwargs: object) -> object:
        return for_cpp(original(*map(for_cpp, args), **{key: for_cpp(value) for key, value in kwargs.items()}))

    return replacement
