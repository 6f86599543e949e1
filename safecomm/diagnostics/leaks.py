"""leaks.watch(): which tensors outlive the step that made them, and what holds them.

While it watches, every operation of torch is seen, and the memory that it made is remembered by a weak reference, with
the lines that made it. At the end, what is still alive and has no business to be is looked for in three places: what
safecomm holds, what the autograd graph has saved, and what Python objects refer to.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from safecomm import _torch
from safecomm.diagnostics.record import unwaited_for
from safecomm.errors import SafecommError
from safecomm.ledger import LEDGER
from safecomm.refcounts import HELD_ONCE, getrefcount

log = logging.getLogger("safecomm")

DEPTH = 24
"""References that a chain is followed for."""

STACK = 12
"""Lines of the program that are kept of where a tensor was made."""

MOST = 2000
"""Survivors that are looked into; others are counted with those that were made by the same line."""

__all__ = ["Leak", "watch"]

_WARM_UP = 2  # what only the first steps make, and later ones keep, is a cache
_CO_OPTIMIZED = 1  # the code of a function: its locals are not a dictionary
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep

Place = tuple[types.CodeType, int]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Leak:
    """Tensors that were made by one line, outlived their step, and are held the same way."""

    nbytes: int
    """Bytes of all of them."""
    count: int
    """How many there are."""
    steps: tuple[int, ...]
    """The steps that made them, counted from 1; 0 is what was made before the first."""
    created: str
    """The line of the program that made them, as ``file:line in function``."""
    stack: tuple[str, ...]
    """The lines of the program at that moment, innermost first."""
    kind: str
    """What holds them: ``"autograd context"``, ``"retained graph"``, ``"unwaited work"``, ``"closure"``,
    ``"module attribute"``, ``"list"``, ``"object"``, ``"variable"``, or ``"unknown"``."""
    chain: tuple[str, ...]
    """What refers to what, from the tensor outwards to something that lives on its own."""

    def __str__(self) -> str:
        steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"steps {self.steps[0]} to {self.steps[-1]}"
        what = f"{self.nbytes} bytes in {self.count} tensor{'s' * (self.count > 1)} outlived {steps} ({self.kind})"
        return "\n".join([what, f"  made at {self.created}", *(f"  held by {hop}" for hop in self.chain)])


class watch:  # noqa: N801
    """Find the tensors that are made inside of it and are still alive at its end without a good reason.

    Put it around one training step or several. A step begins at each call of the outermost ``owners`` that are modules;
    without any, all of it is one step. Parameters, gradients, buffers, what optimizers and gradient scalers keep, and
    what is in local variables of the functions that are running belong to nobody's step and are no leaks; nor is what
    only the first two of at least four steps made, which is a cache.

    At the end ``leaks`` has a :class:`Leak` for each line and holder, the largest first, with the chain of references
    from the tensor to what keeps it, and each is logged as a warning. An exception that leaves the block is passed on,
    and nothing is looked for. ``unwaited`` is how many functional collectives of this thread were launched inside, and
    nobody has waited for them: torch keeps their tensors until somebody does.

    It holds no tensor, frees none, and orders no stream. While it watches, each operation costs some 10 us of host time
    more, so it is for debugging. Operations in other threads than the one that entered are only seen where autograd
    runs them.

    Parameters
    ----------
    owners
        Modules whose steps are watched, and other objects, such as an optimizer that is not torch's, whose tensors are
        theirs to keep.
    log_leaks
        Whether to log what was found.

    Raises
    ------
    TypeError
        If an owner can't keep anything, as a number or a class.
    SafecommError
        If this torch can't be watched.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 4)
    >>> with watch(model) as watched:
    ...     model(torch.ones(2, 4)).sum().backward()
    >>> watched.leaks
    []
    """

    def __init__(self, *owners: object, log_leaks: bool = True) -> None:
        if _torch.TorchDispatchMode is None:
            raise SafecommError(
                f"leaks.watch() needs TorchDispatchMode, which torch {torch.__version__} does not have."
            )
        for owner in owners:
            if isinstance(owner, type) or not hasattr(owner, "__dict__"):
                kind = "a class" if isinstance(owner, type) else type(owner).__name__
                raise TypeError(f"leaks.watch(): expected modules, or objects that keep tensors, not {kind}")
        if not isinstance(log_leaks, bool):
            raise TypeError(f"leaks.watch(log_leaks={log_leaks!r}): expected True or False")
        self.leaks: list[Leak] = []
        self.unwaited = 0
        self.owners = owners
        self.steps = 0
        self._log_leaks = log_leaks
        self._depth = 0
        self._hooks: list[Any] = []
        self._frames: list[types.FrameType] = []
        self._before: list[set[tuple[int, int]]] = []
        self._made = _Made()
        self._unwaited_before = 0

    def __enter__(self) -> watch:
        self._frames = list(_callers())
        self._before = [self._containers()] * 2
        for module in self.owners:
            if isinstance(module, torch.nn.Module):
                self._hooks.append(module.register_forward_pre_hook(self._enter_module))
                self._hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
        self._unwaited_before = _torch.unwaited() or 0
        self._mode = _mode(self._made)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._mode.__exit__(kind, *error)
        for hook in self._hooks:
            hook.remove()
        try:
            if kind is None:
                gc.collect()
                self.leaks = self._search()
                self.unwaited = max((_torch.unwaited() or 0) - self._unwaited_before, 0)
        finally:
            self._frames.clear()
            self._hooks.clear()
            self._made.known.clear()
        if self._log_leaks:
            for leak in self.leaks:
                log.warning("leaks.watch(): %s", leak)
            if self.unwaited:
                log.warning("leaks.watch(): %s", unwaited_for(self.unwaited))

    def __str__(self) -> str:
        unwaited = [unwaited_for(self.unwaited)] if self.unwaited else []
        return "\n\n".join([*map(str, self.leaks), *unwaited]) or "no leaks"

    def _enter_module(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self.steps += 1
            self._made.step = self.steps
            self._before = [self._before[1], self._containers()]

    def _leave_module(self, *_: object) -> None:
        self._depth -= 1

    def _containers(self) -> set[tuple[int, int]]:
        """Return which objects the local variables of the running functions refer to."""
        return {(id(frame), id(value)) for frame in self._frames for value in _locals(frame).values()}

    # --- what to look into ----------------------------------------------------------------------------------

    def _search(self) -> list[Leak]:
        with torch.no_grad():
            known = self._made.known
            alive = {cdata: one for cdata, one in known.items() if not one[0].expired()}
            kept = _kept(self.owners)
            survivors = {cdata: one for cdata, one in alive.items() if cdata not in kept}
            if not survivors:
                return []
            # At both moments: what a variable had at one of them may be gone, and another one be in its place.
            old = self._before[0] & self._before[1]
            holders = _Holders(survivors, self.owners, self._frames, old)
            found: dict[tuple[Any, tuple[str, ...], str], list[tuple[int, int]]] = {}
            for cdata, (_, nbytes, step, stack) in survivors.items():
                held = holders.of(cdata)
                if held is None:
                    continue
                kind, chain, shape = held
                found.setdefault((stack, shape, kind), []).append((nbytes, step))
                holders.shown.setdefault((stack, shape, kind), chain)
        leaks = []
        for (stack, shape, kind), ones in found.items():
            steps = tuple(sorted({step for _, step in ones}))
            if self.steps >= 2 * _WARM_UP and steps[-1] <= _WARM_UP and kind not in ("unwaited work",):
                continue
            lines = _lines(stack)
            leaks.append(
                Leak(
                    nbytes=sum(nbytes for nbytes, _ in ones),
                    count=len(ones),
                    steps=steps,
                    created=lines[0] if lines else "an unknown line",
                    stack=lines,
                    kind=kind,
                    chain=holders.shown[stack, shape, kind],
                )
            )
        return sorted(leaks, key=lambda leak: -leak.nbytes)


# --- what is made ---------------------------------------------------------------------------------------------


class _Made:
    """The memory that was made, by the address of its storage: a weak reference, bytes, step and place."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, int, int, tuple[Place, ...]]] = {}
        self.step = 0
        self._limit = 4096

    def note(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], *, always: bool) -> None:
        given: set[int] | None = None
        for tensor in outputs:
            try:
                storage = tensor.untyped_storage()
                cdata = _torch.cdata_of(storage)
            except (NotImplementedError, RuntimeError):
                continue  # without memory of its own
            known = self.known.get(cdata)
            if known is not None and not known[0].expired():
                continue
            if given is None:
                given = set() if always else {s for s in map(_cdata, inputs) if s}
            if cdata in given or tensor.is_meta:
                continue
            weak = _torch.StorageWeakRef(storage)
            self.known[cdata] = (weak, storage.nbytes(), self.step, _stack())
            if len(self.known) > self._limit:
                alive = [(c, one) for c, one in self.known.items() if not one[0].expired()]
                self.known = dict(alive)
                self._limit = max(4096, 2 * len(self.known))


def _cdata(tensor: torch.Tensor) -> int:
    try:
        return _torch.cdata_of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())


def _mode(made: _Made) -> Any:
    class Mode(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            # What torch.tensor() makes comes by here first as the input of this one, and is new all the same.
            lift = "lift_fresh" in str(function)
            made.note(_tensors((args, kwargs)), _tensors(result), always=lift)
            return result

    return Mode()  # type: ignore[no-untyped-call]


def _callers() -> Iterator[types.FrameType]:
    """Yield the frames of this thread that are not of this file, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _stack() -> tuple[Place, ...]:
    """Return where the program is: the innermost lines that are neither torch's nor ours."""
    places: list[Place] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < STACK:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _OURS)) and not code.co_filename.startswith("<"):
            places.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def _lines(stack: tuple[Place, ...]) -> tuple[str, ...]:
    lines = []
    for code, instruction in stack:
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= instruction < end and number is not None:
                line = number
        lines.append(f"{code.co_filename}:{line} in {code.co_name}")
    return tuple(lines)


def _locals(frame: types.FrameType) -> dict[str, Any]:
    found = frame.f_locals
    values = dict(found)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & _CO_OPTIMIZED and getrefcount(found) <= HELD_ONCE:
        # The frame keeps this dictionary, which is only a copy, and with it the values as they were: a leak of our own.
        # Unless somebody else has it, from locals().
        found.clear()
    return values


# --- what has a right to live ---------------------------------------------------------------------------------


def _kept(owners: tuple[object, ...]) -> set[int]:
    """Return the storages of parameters, gradients, buffers, and of what optimizers and the like keep."""
    kept: set[int] = set()

    def keep(value: Any) -> None:
        for tensor in _tensors(value):
            kept.add(_cdata(tensor))
            grad = tensor.grad if tensor.is_leaf else None
            if grad is not None:
                kept.add(_cdata(grad))

    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.nn.Parameter):
            keep(thing)
        elif issubclass(kind, torch.nn.Module):
            keep(list(vars(thing).get("_buffers", {}).values()))
            keep(list(vars(thing).get("_parameters", {}).values()))
        elif issubclass(kind, (torch.optim.Optimizer, torch.amp.GradScaler)):
            keep(list(vars(thing).values()))
    for owner in owners:
        if not isinstance(owner, torch.nn.Module):
            keep(list(getattr(owner, "__dict__", {}).values()))
    kept.discard(0)
    return kept


# --- what holds -----------------------------------------------------------------------------------------------


class _Memory:
    """A storage, as the start of a chain of references."""

    def __init__(self, cdata: int) -> None:
        self.cdata = cdata


Hop = tuple[Any, Any]
"""An object and one that refers to it."""


class _Holders:
    """Who refers to whom, from the survivors outwards."""

    def __init__(
        self, survivors: dict[int, Any], owners: tuple[object, ...], frames: list[types.FrameType], old: set[Any]
    ) -> None:
        self.shown: dict[Any, tuple[str, ...]] = {}
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
        others = [f for thread, f in sys._current_frames().items() if f.f_code.co_filename != __file__]
        for frame in {id(f): f for f in [*frames, *others]}.values():
            if frame.f_code.co_filename != __file__:
                if not frame.f_code.co_flags & _CO_OPTIMIZED:
                    self._namespaces[id(frame.f_locals)] = frame
                    continue
                for name, value in _locals(frame).items():
                    self._variables.setdefault(id(value), []).append((frame, name))
        self._referrers: dict[int, list[Any]] = {}
        self._objects: dict[int, Any] = {}  # keeps the ids true
        self._works: dict[int, list[str]] = {}
        for entry in LEDGER.entries:
            for storage in entry.storages:
                if isinstance(storage, torch.UntypedStorage):
                    pending = entry.describe()
                    what = f"{pending.op} launched at {pending.site}, {pending.state}"
                    self._works.setdefault(_torch.cdata_of(storage), []).append(what)
        self._find_tensors_and_graphs(set(survivors))
        self._follow()

    def _find_tensors_and_graphs(self, survivors: set[int]) -> None:
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        self._own.add(id(tensors))
        self._start: dict[int, list[Any]] = {}  # by storage: the tensors and nodes that have it
        self._saved: dict[tuple[int, int], str] = {}
        nodes: list[Any] = []
        self._own.add(id(nodes))
        self._nodes: dict[int, Any] = {}
        self._own.add(id(self._nodes))
        for tensor in tensors:
            cdata = _cdata(tensor)
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
                cdata = _cdata(tensor)
                if cdata in survivors:
                    self._start.setdefault(cdata, []).append(node)
                    self._saved[cdata, id(node)] = name
            for following, _ in node.next_functions:
                if following is not None:
                    self._refer(following, node)
                    if id(following) not in self._nodes:
                        self._nodes[id(following)] = following
                        nodes.append(following)

    def _refer(self, thing: Any, referrer: Any) -> None:
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
            following: list[Any] = []
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
                if id(referrer) in self._own or isinstance(referrer, (types.FrameType, _Holders)):
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

    def _ends(self, thing: Any) -> bool:
        """Return whether ``thing`` lives on its own, so that a chain may end there."""
        return isinstance(thing, (torch.nn.Module, type, types.ModuleType)) or id(thing) in self._modules

    def of(self, cdata: int) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
        """Return the kind of holder of a storage, the chain, and its shape without numbers; None if it may live."""
        if cdata in self._works:
            chain = tuple(f"the unwaited {work}" for work in self._works[cdata][:1])
            return "unwaited work", chain, chain
        start = _Memory(cdata)
        queue: deque[list[Any]] = deque([[start]])
        seen = {id(start)}
        expected = False
        longest: list[Any] = [start]
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

    def _expected(self, path: list[Any], frame: types.FrameType) -> bool:
        """Return whether a local variable may keep the memory at the start of ``path``."""
        if any(id(thing) in self._nodes or isinstance(thing, FunctionCtx) for thing in path):
            return False  # the variable is of the result, not of what the graph has saved for it
        if isinstance(path[-1], torch.Tensor):
            return True
        # A container that was there when the step before the last one began collects.
        return (id(frame), id(path[-1])) not in self._old

    # --- words ------------------------------------------------------------------------------------------------

    def _told(self, path: list[Any], end: str | None) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
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

    def _attribute(self, owner: Any, name: Any) -> tuple[str, str]:
        if isinstance(owner, FunctionCtx):
            return "autograd context", f"attribute {name!r} of the context of the autograd node {type(owner).__name__}"
        if isinstance(owner, torch.nn.Module):
            path = self._names.get(id(owner))
            which = type(owner).__name__ if path is None else f"{path or 'the model'} ({type(owner).__name__})"
            return "module attribute", f"attribute {name!r} of module {which}"
        if isinstance(owner, types.FunctionType):
            return "object", f"attribute {name!r} of function {_function(owner)}"
        return "object", f"attribute {name!r} of a {type(owner).__name__}"

    def _hop(self, thing: Any, referrer: Any) -> tuple[str, str]:
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


def _closed_over_by(path: list[Any]) -> types.FunctionType | None:
    """Return the function that ``path``, from a cell outwards, leads to: by way of the tuple of its cells."""
    return next((thing for thing in path if isinstance(thing, types.FunctionType)), None)


def _dictionary(thing: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(thing: Any) -> Iterator[str]:
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _key(dictionary: Any, value: Any) -> Any:
    return next((key for key, one in dictionary.items() if one is value), None)


def _function(function: types.FunctionType) -> str:
    code = function.__code__
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def _where(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def summary(leaks: Iterable[Leak]) -> Counter[str]:
    """Return the bytes of ``leaks`` by the kind of what holds them."""
    found: Counter[str] = Counter()
    for leak in leaks:
        found[leak.kind] += leak.nbytes
    return found
