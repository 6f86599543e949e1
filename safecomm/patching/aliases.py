"""Names that other modules took: found by identity, wherever they are kept.

Megatron-core binds ``dist_all_gather_func = torch.distributed.all_gather_into_tensor`` when it is imported; scripts do
``from torch.distributed import all_reduce``; others keep functions in class attributes, default arguments, lists,
dictionaries, closures and partials. The garbage collector knows all of them.
"""

from __future__ import annotations

import collections
import functools
import gc
import logging
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

log: logging.Logger = logging.getLogger("safecomm")


def _modules_of_ours() -> list[types.ModuleType]:
    """Return safecomm's own modules, which keep torch's functions on purpose: to call them."""
    return [
        module
        for name, module in tuple(sys.modules.items())
        if isinstance(module, types.ModuleType) and name.startswith("safecomm.") and module.__name__ == name
    ]


def sweep(changes: Mapping[types.FunctionType, types.FunctionType], keep: Iterable[object] = ()) -> list[str]:
    """Put ``changes[x]`` wherever in the process ``x`` is kept; return where, as ``module.name`` or a description.

    Not replaced are keys of dictionaries, elements of sets and of tuples other than default arguments, properties,
    bound methods, weak references, what C++ holds, local variables of functions that are running, what only ``keep``
    holds, and safecomm's own references.
    """
    by_identity = {id(old): new for old, new in changes.items()}
    ours = {id(container) for container in keep} | {id(vars(module)) for module in _modules_of_ours()} | {id(changes)}
    # What safecomm's functions close over, and the __wrapped__ of those that stand in for torch's.
    for thing in _things_of_ours(changes):
        if isinstance(thing, types.FunctionType):
            ours.add(id(thing.__dict__))
            ours.update(id(cell) for cell in thing.__closure__ or ())
        else:
            ours.add(id(thing))
    found: list[str] = []
    frozen = gc.get_freeze_count()
    if frozen:  # the collector does not look into what is frozen
        gc.unfreeze()
    try:
        for referrer in gc.get_referrers(*changes):
            if id(referrer) not in ours:
                try:
                    _replace_in(referrer, by_identity, found)
                except Exception as error:  # one that refuses must not keep the others
                    log.warning("an alias in a %s can't be replaced: %r", type(referrer).__qualname__, error)
    finally:
        if frozen:
            gc.freeze()
    return found


def _things_of_ours(changes: Mapping[types.FunctionType, types.FunctionType]) -> list[object]:
    """Return the functions of the collectives, in their modules or in slots, and the objects that have such slots."""
    things: list[object] = [*changes, *changes.values()]
    for module in _modules_of_ours():
        if module.__name__.startswith("safecomm.collectives"):
            for thing in tuple(vars(module).values()):
                things.append(thing)
                if type(thing).__module__.startswith("safecomm.collectives"):
                    things += [getattr(thing, name, None) for name in vars(type(thing)).get("__slots__", ())]

    def is_ours(thing: object) -> bool:
        return isinstance(thing, types.FunctionType) or type(thing).__module__.startswith("safecomm.collectives")

    return list(filter(is_ours, things))


def _replace_in(referrer: object, new: dict[int, types.FunctionType], found: list[str]) -> None:
    # Each value is read once: other threads run. The methods are the base class's, because others' may refuse.
    if isinstance(referrer, dict):
        _replace_in_dict(referrer, new, found)
    elif isinstance(referrer, (list, collections.deque)):
        kind: Any = list if isinstance(referrer, list) else collections.deque
        for place, value in enumerate(tuple(referrer)):
            if id(value) in new:
                kind.__setitem__(referrer, place, new[id(value)])
                found.append(f"an element of a {kind.__name__}")
    elif isinstance(referrer, types.CellType):
        replacement = new.get(id(referrer.cell_contents))
        if replacement is not None:
            referrer.cell_contents = replacement
            found.append("a closure")
    elif isinstance(referrer, functools.partial):
        _replace_in_partial(referrer, new, found)
    elif isinstance(referrer, (staticmethod, classmethod)):
        for holder in _classes_with(referrer):
            for name, value in tuple(vars(holder).items()):
                if value is referrer and id(referrer.__func__) in new:
                    type.__setattr__(holder, name, _wrapped(referrer, new[id(referrer.__func__)]))
                    found.append(f"{holder.__module__}.{holder.__qualname__}.{name}")
    elif isinstance(referrer, tuple):
        for owner in gc.get_referrers(referrer):
            if isinstance(owner, types.FunctionType) and owner.__defaults__ is referrer:
                owner.__defaults__ = tuple(new.get(id(value), value) for value in referrer)
                found.append(f"a default argument of {owner.__module__}.{owner.__qualname__}")
            elif isinstance(owner, functools.partial) and owner.args is referrer:
                _replace_in_partial(owner, new, found)
    elif not isinstance(referrer, (type, types.FunctionType, types.ModuleType)):
        _replace_in_attributes(referrer, new, found)


def _wrapped(before: Any, function: types.FunctionType) -> object:
    """Return ``function`` as the static or class method that ``before`` is: the very object that it had before."""
    earlier = vars(before).get("before")
    if earlier is not None and earlier.__func__ is function:
        return earlier
    made = type(before)(function)
    made.before = before
    return made


def _replace_in_attributes(thing: object, new: dict[int, types.FunctionType], found: list[str]) -> None:
    """Replace in the slots of an object, and in attributes that Python keeps in place of a dictionary."""
    kind = type(thing)
    for owner in kind.__mro__:
        for name, slot in tuple(vars(owner).items()):
            if isinstance(slot, types.MemberDescriptorType):
                replacement = new.get(id(getattr(thing, name, None)))
                if replacement is not None:
                    slot.__set__(thing, replacement)
                    found.append(f"a slot of a {kind.__qualname__}")
    if hasattr(thing, "__dict__"):
        _replace_in_dict(vars(thing), new, found, f"an attribute of a {kind.__qualname__}")


def _replace_in_partial(partial: functools.partial[Any], new: dict[int, types.FunctionType], found: list[str]) -> None:
    function = new.get(id(partial.func), partial.func)
    arguments = tuple(new.get(id(argument), argument) for argument in partial.args)
    keywords = {name: new.get(id(value), value) for name, value in partial.keywords.items()}
    partial.__setstate__((function, arguments, keywords, vars(partial) or None))  # type: ignore[attr-defined]
    found.append("a partial")


def _replace_in_dict(
    namespace: dict[Any, object], new: dict[int, types.FunctionType], found: list[str], what: str = ""
) -> None:
    changes = [(name, new[id(value)]) for name, value in tuple(namespace.items()) if id(value) in new]
    if not changes:
        return
    # Only a class's looks so, and asking for its owner takes a pass over all objects.
    of_a_class = "__module__" in namespace and "__name__" not in namespace
    owners = [owner for owner in gc.get_referrers(namespace) if isinstance(owner, type)] if of_a_class else []
    for name, value in changes:
        if owners:  # through the class, which keeps a cache of its attributes
            for owner in owners:
                type.__setattr__(owner, name, value)
                found.append(f"{owner.__module__}.{owner.__qualname__}.{name}")
        else:
            dict.__setitem__(namespace, name, value)
            module = namespace.get("__name__")
            found.append(what or (f"{module}.{name}" if isinstance(module, str) else f"an entry {name!r} of a dict"))


def _classes_with(attribute: object) -> list[type]:
    return [
        owner
        for namespace in gc.get_referrers(attribute)
        if isinstance(namespace, dict)
        for owner in gc.get_referrers(namespace)
        if isinstance(owner, type)
    ]
