"""What holds: who refers to whom, from the memory that has survived outwards, and how that is told."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from safecomm import _torch
from safecomm.core.ledger import LEDGER
from safecomm.diagnostics.leaks.frames import CO_OPTIMIZED, is_own, locals_of, running
from safecomm.diagnostics.leaks.tensors import cdata_of_tensor

DEPTH = 24
"""References that a chain is followed for."""

MOST = 2000
"""Objects that are looked at, of those who refer to one survivor."""

MEETING = 8
"""Ways that are followed on from an object in which they meet."""

_CACHED = type(functools.lru_cache(len))
"""What a function is that ``functools`` gave a cache."""

_FRAMES = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}


class _Memory:
    """A storage, as the start of a chain of references."""

    def __init__(self, cdata: int) -> None:
        self.cdata = cdata


@dataclass(frozen=True)
class Held:
    """A way to be held. Two are the same if they differ in numbers and keys at most."""

    kind: str
    shape: frozenset[str]
    """What comes in the chain, without numbers and keys: however long a list of linked objects is, it is the same."""
    chain: tuple[str, ...] = field(compare=False)
    """What refers to what, in words, from the tensor outwards."""

    def covers(self, other: Held) -> bool:
        """Return whether ``other`` is held like this, or nearer to the end of the same chain."""
        return self.kind == other.kind and self.shape >= other.shape


class Holders:
    """Who refers to whom, from the survivors outwards."""

    def __init__(self, survivors: Iterable[int], owners: tuple[object, ...], old: set[tuple[int, int]] | None) -> None:
        objects = gc.get_objects()  # before there are any of this search
        self._old = old
        self._modules: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType):
                self._modules.setdefault(id(vars(module)), name)
        self._names: dict[int, str] = {}
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                for name, part in owner.named_modules():
                    self._names.setdefault(id(part), name)
        self._variables: dict[int, list[tuple[types.FrameType, str]]] = {}
        self._namespaces: dict[int, types.FrameType] = {}  # of modules that are running
        self._referrers: dict[int, list[object]] = {}
        self._array: Any = getattr(sys.modules.get("numpy"), "ndarray", ())  # unknown to the garbage collector
        self._running = running()
        for frame in self._running.values():
            if not frame.f_code.co_flags & CO_OPTIMIZED:
                self._namespaces[id(frame.f_locals)] = frame
                continue
            value: Any
            for name, value in locals_of(frame).items():
                self._variables.setdefault(id(value), []).append((frame, name))
                if type(value) is self._array:
                    self._refer(value.base, value)
        self._works: dict[int, str] = {}
        for hold in [*LEDGER.holds(), *LEDGER.quarantine]:
            for storage in hold.storages:
                if isinstance(storage, torch.UntypedStorage):
                    pending = hold.describe()
                    what = f"the unwaited {pending.op} launched at {pending.site}, {pending.state}"
                    self._works.setdefault(_torch.cdata_of(storage), what)
        self._read_heap(objects, set(survivors))

    def _read_heap(self, objects: list[Any], survivors: set[int]) -> None:
        """Take note of who refers to whom: of what the garbage collector knows, of arrays, and in the graph."""
        tensors: list[torch.Tensor] = []
        for holder in objects:
            kind = type(holder)
            if holder is self or (kind is types.FrameType and (id(holder) in self._running or is_own(holder))):
                continue
            if issubclass(kind, torch.Tensor):
                tensors.append(holder)
            elif kind is threading.local:  # of a subclass, to ask may run the program's __init__
                self._refer(vars(holder), holder)
            for thing in gc.get_referents(holder):
                if gc.is_tracked(thing):
                    self._referrers.setdefault(id(thing), []).append(holder)
                elif type(thing) is self._array:
                    self._refer(thing, holder)
        self._start: dict[int, list[object]] = {}  # by storage: the tensors and nodes that have it
        self._saved: dict[tuple[int, int], str] = {}
        nodes: list[torch.autograd.graph.Node] = []
        self._nodes: dict[int, object] = {}
        for tensor in tensors:
            cdata = cdata_of_tensor(tensor)
            if cdata in survivors:
                self._start.setdefault(cdata, []).append(tensor)
            try:
                node = tensor.grad_fn
                grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            except RuntimeError:
                continue
            if grad is not None:
                self._refer(grad, tensor)
            if node is not None:
                self._refer(node, tensor)
                if id(node) not in self._nodes:
                    self._nodes[id(node)] = node
                    nodes.append(node)
        while nodes:
            node = nodes.pop()
            for name, tensor in _torch.saved_by(node):
                cdata = cdata_of_tensor(tensor)
                if cdata in survivors:
                    self._start.setdefault(cdata, []).append(node)
                    self._saved[cdata, id(node)] = name
            for following, _ in node.next_functions:
                if following is not None:
                    self._refer(following, node)
                    if id(following) not in self._nodes:
                        self._nodes[id(following)] = following
                        nodes.append(following)

    def _refer(self, thing: Any, referrer: object) -> None:
        self._referrers.setdefault(id(thing), []).append(referrer)
        if type(thing) is self._array:
            self._refer(thing.base, thing)

    def _ends(self, thing: object) -> bool:
        """Return whether ``thing`` lives on its own, so that a chain may end there."""
        return isinstance(thing, (torch.nn.Module, type, types.ModuleType)) or id(thing) in self._modules

    def of(self, cdata: int) -> list[Held]:
        """Return in which ways a storage is held, the shortest first; none if all who hold it may."""
        if cdata in self._works:
            return [_held("unwaited work", [self._works[cdata]])]
        start = _Memory(cdata)
        queue: deque[list[object]] = deque([[start]])
        seen: Counter[int] = Counter()
        expected = False
        found: dict[Held, None] = {}
        longest: list[object] = [start]
        while queue and len(seen) < MOST:
            path = queue.popleft()
            thing = path[-1]
            if isinstance(thing, deque) and thing.maxlen is not None:
                expected = True  # the program has bounded it
                continue
            if len(path) > 1 and self._ends(thing):
                frame = self._namespaces.get(id(thing))
                if frame is not None and self._expected(path[:-1], frame):
                    expected = True
                else:
                    found.setdefault(self._told(path, None))
                continue
            for frame, name in self._variables.get(id(thing), ()):
                if self._expected(path, frame):
                    expected = True
                else:
                    found.setdefault(self._told(path, f"local variable {name!r} of {_where(frame)}"))
            if len(path) > DEPTH:
                continue
            longest = max(longest, path, key=lambda path: (any(isinstance(t, FunctionCtx) for t in path), len(path)))
            for referrer in self._start.get(cdata, ()) if thing is start else self._referrers.get(id(thing), ()):
                # Ways that meet in an object, such as two attributes of it, are two all the same.
                if seen[id(referrer)] < MEETING and all(referrer is not thing for thing in path):
                    seen[id(referrer)] += 1
                    queue.append([*path, referrer])
        return list(found) or ([] if expected else [self._told(longest, None)])

    def _expected(self, path: list[object], frame: types.FrameType) -> bool:
        """Return whether a local variable may keep the memory at the start of ``path``, whether or not that grows."""
        if self._old is None or any(id(thing) in self._nodes or isinstance(thing, FunctionCtx) for thing in path):
            return False  # the variable is of the result, not of what the graph has saved for it
        # What was there before the only step collects.
        return isinstance(path[-1], torch.Tensor) or (id(frame), id(path[-1])) not in self._old

    # --- words ------------------------------------------------------------------------------------------------

    def _told(self, path: list[object], end: str | None) -> Held:
        hops: list[str] = []
        kinds: list[str] = []
        place = 1
        while place < len(path):
            thing, referrer = path[place - 1], path[place]
            if isinstance(thing, _Memory) and isinstance(referrer, torch.Tensor):
                place += 1
                continue  # the tensor itself
            owner = path[place + 1] if place + 1 < len(path) else None
            if type(referrer) is dict and (isinstance(owner, type) or _dictionary(owner) is referrer):
                kind, hop = self._attribute(owner, _key(referrer, thing))
                place += 1
            elif isinstance(referrer, types.CellType) and (function := _closed_over_by(path[place + 1 : place + 3])):
                names = dict(zip(map(id, function.__closure__ or ()), function.__code__.co_freevars, strict=True))
                kind, hop = "closure", f"closure variable {names.get(id(referrer))!r} of function {_function(function)}"
                place = next(i for i in range(place, len(path)) if path[i] is function)
            else:
                kind, hop = self._hop(thing, referrer)
            if kinds and kind == kinds[-1] == "graph":
                hops.pop()  # from node to node is of no interest
                kinds.pop()
            hops.append(hop)
            kinds.append(kind)
            place += 1
        if end is not None:
            hops.append(end)
        if not hops:
            hops.append("nothing that the garbage collector knows: something in C++, or an object that it can't follow")
        elif end is None and not self._ends(path[-1]):
            hops.append("nothing else that Python knows of: a reference cycle through the graph, or something in C++")
        return _held(self._kind(kinds, end), hops)

    def _kind(self, kinds: list[str], end: str | None) -> str:
        for kind in ("autograd context", "exception", "retained graph", "closure", "module attribute"):
            if kind in kinds:
                return kind
        if "graph" in kinds:
            return "retained graph"
        for kind in ("list", "object"):
            if kind in kinds:
                return kind
        return "variable" if end is not None or kinds else "unknown"

    def _attribute(self, owner: object, name: object) -> tuple[str, str]:
        if isinstance(owner, FunctionCtx):
            return "autograd context", f"attribute {name!r} of the context of the autograd node {type(owner).__name__}"
        if isinstance(owner, torch.nn.Module):
            path = self._names.get(id(owner))
            which = type(owner).__name__ if path is None else f"{path or 'the model'} ({type(owner).__name__})"
            return "module attribute", f"attribute {name!r} of module {which}"
        if isinstance(owner, type):
            return "object", f"attribute {name!r} of class {owner.__qualname__}"
        if isinstance(owner, types.FunctionType):
            return "object", f"attribute {name!r} of function {_function(owner)}"
        return "object", f"attribute {name!r} of a {type(owner).__name__}"

    def _hop(self, thing: object, referrer: Any) -> tuple[str, str]:
        if isinstance(thing, _Memory):
            name = self._saved[thing.cdata, id(referrer)]
            return "retained graph", f"the autograd node {referrer.name()}, which saved it as {name!r} for the backward"
        if id(referrer) in self._modules:
            return "variable", f"global variable {_key(referrer, thing)!r} of module {self._modules[id(referrer)]}"
        if id(thing) in self._nodes and isinstance(referrer, torch.Tensor) and referrer.grad_fn is thing:
            return "graph", f"the graph of a tensor of shape {tuple(referrer.shape)}"
        if id(thing) in self._nodes and id(referrer) in self._nodes:
            return "graph", "the graph of a later node"
        if isinstance(referrer, (list, tuple, deque)):
            place = next((i for i, one in enumerate(referrer) if one is thing), None)
            return "list", f"item {place} of a {type(referrer).__name__} of {len(referrer)}"
        if isinstance(referrer, dict):
            key = _key(referrer, thing)
            if key is None and None not in referrer:
                return "list", f"a key of a {type(referrer).__name__} of {len(referrer)}"
            # The repr of an object may be long, or take long.
            which = repr(key) if isinstance(key, (str, int, float, type(None))) else f"of type {type(key).__name__}"
            return "list", f"key {which} of a {type(referrer).__name__}"
        if isinstance(referrer, (set, frozenset)):
            return "list", f"a set of {len(referrer)}"
        if isinstance(referrer, types.CellType):
            return "closure", "a variable of a closure"
        if isinstance(referrer, types.FunctionType):
            return "closure", f"an argument default of function {_function(referrer)}"
        if isinstance(referrer, torch.Tensor):
            return "object", f"the gradient or an attribute of a tensor of shape {tuple(referrer.shape)}"
        if isinstance(referrer, types.TracebackType):
            return "exception", "a traceback"
        if isinstance(referrer, _CACHED):
            return "object", f"the cache of function {referrer.__module__}.{referrer.__qualname__}"
        frame = getattr(referrer, _FRAMES[type(referrer)]) if type(referrer) in _FRAMES else referrer
        if isinstance(frame, types.FrameType):
            variable = _key(locals_of(frame), thing)
            return (
                "variable",
                f"{'the frame' if variable is None else f'local variable {variable!r}'} of {_where(frame)}",
            )
        for name in _slots(referrer):
            if getattr(referrer, name, None) is thing:
                return self._attribute(referrer, name)
        for name, value in (_dictionary(referrer) or {}).items():
            if value is thing:
                return self._attribute(referrer, name)
        return "object", f"a {type(referrer).__name__}"


def _closed_over_by(path: list[object]) -> types.FunctionType | None:
    """Return the function that ``path``, from a cell outwards, leads to: by way of the tuple of its cells."""
    return next((thing for thing in path if isinstance(thing, types.FunctionType)), None)


def _held(kind: str, hops: list[str]) -> Held:
    shape = frozenset(re.sub(r"(?s)^key .* of a |\d+", "#", hop) for hop in hops)
    return Held(kind, shape, tuple(hop for hop, _ in itertools.groupby(hops)))


def _dictionary(thing: object) -> dict[str, object] | None:
    if type(thing) is threading.local:
        return vars(thing)
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(thing: object) -> Iterator[str]:
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _key(dictionary: Mapping[Any, object], value: object) -> object:
    return next((key for key, one in dictionary.items() if one is value), None)


def _function(function: types.FunctionType) -> str:
    code = function.__code__
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def _where(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
