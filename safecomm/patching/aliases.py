"""Names that other modules took: found by identity, wherever they are kept.

Megatron-core binds ``dist_all_gather_func = torch.distributed.all_gather_into_tensor`` when it is imported; scripts do
``from torch.distributed import all_reduce``; others keep functions in class attributes, default arguments, lists,
dictionaries, closures and partials. The garbage collector knows all of them.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any


def _modules_of_ours() -> list[types.ModuleType]:
    """Return safecomm's own modules, which keep torch's functions on purpose: to call them."""
    return [
        module
        for name, module in tuple(sys.modules.items())
        if isinstance(module, types.ModuleType) and name.startswith("safecomm.") and module.__name__ == name
    ]


def sweep(changes: dict[Any, Any], keep: Iterable[Any] = ()) -> list[str]:
    """Put ``changes[x]`` wherever in the process ``x`` is kept; return where, as ``module.name`` or a description.

    Not replaced are keys of dictionaries, elements of sets and of tuples other than default arguments, local variables
    of functions that are running, what only ``keep`` holds, and safecomm's own references.
    """
    by_identity = {id(old): new for old, new in changes.items()}
    ours = {id(container) for container in keep} | {id(vars(module)) for module in _modules_of_ours()} | {id(changes)}
    # What safecomm's functions close over, and the __wrapped__ of those that stand in for torch's.
    for function in _functions_of_ours(changes):
        ours.add(id(function.__dict__))
        ours.update(id(cell) for cell in function.__closure__ or ())
    found: list[str] = []
    for referrer in gc.get_referrers(*changes):
        if id(referrer) not in ours:
            _replace_in(referrer, by_identity, found)
    return found


def _functions_of_ours(changes: dict[Any, Any]) -> list[types.FunctionType]:
    things = [*changes, *changes.values()]
    for module in _modules_of_ours():
        if module.__name__.startswith("safecomm.collectives"):
            things += vars(module).values()
    return [thing for thing in things if isinstance(thing, types.FunctionType)]


def _replace_in(referrer: Any, new: dict[int, Any], found: list[str]) -> None:
    if isinstance(referrer, dict):
        _replace_in_dict(referrer, new, found)
    elif isinstance(referrer, list):
        for place, value in enumerate(referrer):
            if id(value) in new:
                referrer[place] = new[id(value)]
                found.append("an element of a list")
    elif isinstance(referrer, types.CellType):
        referrer.cell_contents = new[id(referrer.cell_contents)]
        found.append("a closure")
    elif isinstance(referrer, functools.partial):
        _replace_in_partial(referrer, new, found)
    elif isinstance(referrer, (staticmethod, classmethod)):
        for holder in _classes_with(referrer):
            for name, value in tuple(vars(holder).items()):
                if value is referrer:
                    setattr(holder, name, type(referrer)(new[id(referrer.__func__)]))
                    found.append(f"{holder.__module__}.{holder.__qualname__}.{name}")
    elif isinstance(referrer, tuple):
        for owner in gc.get_referrers(referrer):
            if isinstance(owner, types.FunctionType) and owner.__defaults__ is referrer:
                owner.__defaults__ = tuple(new.get(id(value), value) for value in referrer)
                found.append(f"a default argument of {owner.__module__}.{owner.__qualname__}")
            elif isinstance(owner, functools.partial) and owner.args is referrer:
                _replace_in_partial(owner, new, found)
    elif hasattr(referrer, "__dict__") and not isinstance(referrer, (type, types.FunctionType, types.ModuleType)):
        # An object whose attributes Python keeps in place of a dictionary.
        _replace_in_dict(vars(referrer), new, found, f"an attribute of a {type(referrer).__qualname__}")


def _replace_in_partial(partial: functools.partial[Any], new: dict[int, Any], found: list[str]) -> None:
    function = new.get(id(partial.func), partial.func)
    arguments = tuple(new.get(id(argument), argument) for argument in partial.args)
    keywords = {name: new.get(id(value), value) for name, value in partial.keywords.items()}
    partial.__setstate__((function, arguments, keywords, vars(partial) or None))  # type: ignore[attr-defined]
    found.append("a partial")


def _replace_in_dict(namespace: dict[Any, Any], new: dict[int, Any], found: list[str], what: str = "") -> None:
    names = [name for name, value in tuple(namespace.items()) if id(value) in new]
    if not names:
        return
    owners = [owner for owner in gc.get_referrers(namespace) if isinstance(owner, type)]
    for name in names:
        value = new[id(namespace[name])]
        if owners:  # through the class, which keeps a cache of its attributes
            for owner in owners:
                setattr(owner, name, value)
                found.append(f"{owner.__module__}.{owner.__qualname__}.{name}")
        else:
            namespace[name] = value
            module = namespace.get("__name__")
            found.append(what or (f"{module}.{name}" if isinstance(module, str) else f"an entry {name!r} of a dict"))


def _classes_with(attribute: Any) -> list[type]:
    return [
        owner
        for namespace in gc.get_referrers(attribute)
        if isinstance(namespace, dict)
        for owner in gc.get_referrers(namespace)
        if isinstance(owner, type)
    ]
