"""What holds: who refers to whom, from the memory that has survived outwards, and how that is told."""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from safecomm import _torch
from safecomm.core.ledger import LEDGER
from safecomm.diagnostics.leaks.frames import CO_OPTIMIZED, is_own, locals_of
from safecomm.diagnostics.leaks.tensors import cdata_of_tensor

DEPTH = 24
"""References that a chain is followed for."""

MOST = 2000
"""Survivors that are looked into; others are counted with those that were made by the same line."""


class _Memory:
    """A storage, as the start of a chain of references."""

    def __init__(self, cdata: int) -> None:
        self.cdata = cdata


class Holders:
    """Who refers to whom, from the survivors outwards."""

    def __init__(
        self,
        survivors: Mapping[int, object],
        owners: tuple[object, ...],
        frames: list[types.FrameType],
        old: set[tuple[int, int]],
    ) -> None:
        self.shown: dict[object, tuple[str, ...]] = {}
        self._old = old
        self._own: set[int] = set()
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
        others = [f for thread, f in sys._current_frames().items() if not is_own(f)]
        for frame in {id(f): f for f in [*frames, *others]}.values():
            if not is_own(frame):
                if not frame.f_code.co_flags & CO_OPTIMIZED:
                    self._namespaces[id(frame.f_locals)] = frame
                    continue
                for name, value in locals_of(frame).items():
                    self._variables.setdefault(id(value), []).append((frame, name))
        self._referrers: dict[int, list[object]] = {}
        self._objects: dict[int, object] = {}  # keeps the ids true
        self._works: dict[int, list[str]] = {}
        for hold in [*LEDGER.holds(), *LEDGER.quarantine]:
            for storage in hold.storages:
                if isinstance(storage, torch.UntypedStorage):
                    pending = hold.describe()
                    what = f"{pending.op} launched at {pending.site}, {pending.state}"
                    self._works.setdefault(_torch.cdata_of(storage), []).append(what)
        self._find_tensors_and_graphs(set(survivors))
        self._follow()

    def _find_tensors_and_graphs(self, survivors: set[int]) -> None:
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        self._own.add(id(tensors))
        self._start: dict[int, list[object]] = {}  # by storage: the tensors and nodes that have it
        self._saved: dict[tuple[int, int], str] = {}
        nodes: list[torch.autograd.graph.Node] = []
        self._own.add(id(nodes))
        self._nodes: dict[int, object] = {}
        self._own.add(id(self._nodes))
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

    def _refer(self, thing: object, referrer: object) -> None:
        self._objects[id(thing)] = thing
        self._objects[id(referrer)] = referrer
        self._referrers.setdefault(id(thing), []).append(referrer)

    def _follow(self) -> None:
        """Ask the garbage collector who refers to the survivors, to those, and so on."""
        starts = [thing for things in self._start.values() for thing in things][: MOST * 2]
        seen = {id(thing) for thing in starts}
        self._own.update(map(id, (self._objects, self._referrers, self._start, self._variables, starts, seen)))
        self._own.update(map(id, self._start.values()))
        self._own.update(map(id, self._referrers.values()))
        self._own.update(map(id, self._variables.values()))
        for places in self._variables.values():
            self._own.update(map(id, places))
        frontier = starts
        for _ in range(DEPTH):
            following: list[object] = []
            self._own.update((id(frontier), id(following)))
            wanted = {id(thing): thing for thing in frontier}
            self._own.add(id(wanted))
            for thing in frontier:  # the edges that the garbage collector does not know
                for referrer in self._referrers.get(id(thing), ()):
                    if id(referrer) not in seen and not self._ends(referrer):
                        seen.add(id(referrer))
                        following.append(referrer)
            found = gc.get_referrers(*frontier) if frontier else []
            self._own.add(id(found))
            for referrer in found:
                if id(referrer) in self._own or isinstance(referrer, (types.FrameType, Holders)):
                    continue
                if referrer is self.__dict__:
                    continue
                for thing in gc.get_referents(referrer):
                    if id(thing) in wanted and thing is not referrer:
                        mine = self._referrers.get(id(thing))
                        if mine is None:
                            mine = self._referrers[id(thing)] = []
                            self._own.add(id(mine))
                        self._objects[id(referrer)] = referrer
                        self._objects[id(thing)] = thing
                        if not any(known is referrer for known in mine):
                            mine.append(referrer)
                if id(referrer) not in seen and not self._ends(referrer):
                    seen.add(id(referrer))
                    following.append(referrer)
            frontier = following
            if not frontier or len(seen) > 50 * MOST:
                break

    def _ends(self, thing: object) -> bool:
        """Return whether ``thing`` lives on its own, so that a chain may end there."""
        return isinstance(thing, (torch.nn.Module, type, types.ModuleType)) or id(thing) in self._modules

    def of(self, cdata: int) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
        """Return the kind of holder of a storage, the chain, and its shape without numbers; None if it may live."""
        if cdata in self._works:
            chain = tuple(f"the unwaited {work}" for work in self._works[cdata][:1])
            return "unwaited work", chain, chain
        start = _Memory(cdata)
        queue: deque[list[object]] = deque([[start]])
        seen = {id(start)}
        expected = False
        longest: list[object] = [start]
        while queue:
            path = queue.popleft()
            thing = path[-1]
            if len(path) > 1 and self._ends(thing):
                running = self._namespaces.get(id(thing))
                if running is not None and self._expected(path[:-1], running):
                    expected = True
                    continue
                return self._told(path, None)
            for frame, name in self._variables.get(id(thing), ()):
                if self._expected(path, frame):
                    expected = True
                else:
                    return self._told(path, f"local variable {name!r} of {_where(frame)}")
            if len(path) > DEPTH:
                continue
            if any(isinstance(t, FunctionCtx) for t in path) > any(isinstance(t, FunctionCtx) for t in longest) or (
                len(path) > len(longest) and not any(isinstance(t, FunctionCtx) for t in longest)
            ):
                longest = path
            for referrer in self._start.get(cdata, ()) if thing is start else self._referrers.get(id(thing), ()):
                if id(referrer) not in seen:
                    seen.add(id(referrer))
                    queue.append([*path, referrer])
        if expected:
            return None
        return self._told(longest, None)

    def _expected(self, path: list[object], frame: types.FrameType) -> bool:
        """Return whether a local variable may keep the memory at the start of ``path``."""
        if any(id(thing) in self._nodes or isinstance(thing, FunctionCtx) for thing in path):
            return False  # the variable is of the result, not of what the graph has saved for it
        if isinstance(path[-1], torch.Tensor):
            return True
        # A container that was there when the step before the last one began collects.
        return (id(frame), id(path[-1])) not in self._old

    # --- words ------------------------------------------------------------------------------------------------

    def _told(self, path: list[object], end: str | None) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        hops: list[str] = []
        kinds: list[str] = []
        place = 1
        while place < len(path):
            thing, referrer = path[place - 1], path[place]
            if isinstance(thing, _Memory) and isinstance(referrer, torch.Tensor):
                place += 1
                continue  # the tensor itself
            if type(referrer) is dict and place + 1 < len(path) and _dictionary(path[place + 1]) is referrer:
                kind, hop = self._attribute(path[place + 1], _key(referrer, thing))
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
            hops.append("something outside of Python: no Python object refers to it")
        elif end is None and not self._ends(path[-1]):
            hops.append("nothing else that Python knows of: a reference cycle through the graph, or something in C++")
        shape = tuple("".join("#" if c.isdigit() else c for c in hop) for hop in hops)
        return self._kind(kinds, end), tuple(hops), shape

    def _kind(self, kinds: list[str], end: str | None) -> str:
        for kind in ("autograd context", "retained graph", "closure", "module attribute"):
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
        if isinstance(owner, types.FunctionType):
            return "object", f"attribute {name!r} of function {_function(owner)}"
        return "object", f"attribute {name!r} of a {type(owner).__name__}"

    def _hop(self, thing: object, referrer: Any) -> tuple[str, str]:
        if isinstance(thing, _Memory):
            name = self._saved[thing.cdata, id(referrer)]
            return "retained graph", f"the autograd node {referrer.name()}, which saved it as {name!r} for the backward"
        if id(thing) in self._nodes and isinstance(referrer, torch.Tensor) and referrer.grad_fn is thing:
            return "graph", f"the graph of a tensor of shape {tuple(referrer.shape)}"
        if id(thing) in self._nodes and id(referrer) in self._nodes:
            return "graph", "the graph of a later node"
        if id(referrer) in self._modules:
            return "variable", f"global variable {_key(referrer, thing)!r} of module {self._modules[id(referrer)]}"
        if isinstance(referrer, (list, tuple, deque)):
            place = next((i for i, one in enumerate(referrer) if one is thing), None)
            return "list", f"item {place} of a {type(referrer).__name__} of {len(referrer)}"
        if isinstance(referrer, dict):
            return "list", f"key {_key(referrer, thing)!r} of a {type(referrer).__name__}"
        if isinstance(referrer, (set, frozenset)):
            return "list", f"a set of {len(referrer)}"
        if isinstance(referrer, types.CellType):
            return "closure", "a variable of a closure"
        if isinstance(referrer, types.FunctionType):
            return "closure", f"an argument default of function {_function(referrer)}"
        if isinstance(referrer, torch.Tensor):
            return "object", f"the gradient or an attribute of a tensor of shape {tuple(referrer.shape)}"
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


def _dictionary(thing: object) -> dict[str, object] | None:
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
