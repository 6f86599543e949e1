"""Where another thread can go on: points in the functions of safecomm.

CPython gives the interpreter to another thread where a function begins, where a call returns,
and where a loop goes back. :func:`instrumented` compiles functions of safecomm anew with a call of :func:`point` at
each of these. A tracer would see them too, but until Python 3.13 it refers to the locals of each frame that it sees,
and safecomm counts references. Simulated devices are not compiled anew, so that a call of one is as one into C.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import queue
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MODULES = (
    "_torch.allocator", "_torch.autograd", "_torch.backends", "_torch.driver", "_torch.functional",
    "_torch.kernels", "_torch.launches", "_torch.lists", "_torch.modes", "_torch.names", "_torch.regions",
    "_torch.registry", "_torch.storages", "_torch.streams", "_torch.symmetric", "_torch.tensors", "arena.arena",
    "arena.free_list", "arena.layout", "arena.size_class", "arena.use", "collectives.routes", "core.call_site",
    "core.captures", "core.drain", "core.handoffs", "core.holds", "core.ledger", "core.recorded_uses", "core.rules",
    "core.stream_order", "core.streams", "core.work", "record_stream", "stream_methods",
)  # fmt: skip
"""The modules of safecomm with points."""


class _Hook:
    """What happens at points: after ``left`` of them ``happen`` is called, once."""

    left = 0
    happen: Callable[[], None]


HOOK = _Hook()


def point(value: Any = None) -> Any:
    """Pass ``value`` on, and let happen what is to happen here."""
    if HOOK.left:
        HOOK.left -= 1
        if not HOOK.left:
            HOOK.happen()
    return value


class _AddsPoints(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        return ast.Call(ast.Name("_point", ast.Load()), [node], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        documented = ast.get_docstring(node) is not None
        node.body = [*node.body[:documented], _here(), *self._statements(node.body[documented:])]
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        return [node, _here()]  # its end is a call

    def visit_For(self, node: ast.For | ast.While) -> Any:
        self.generic_visit(node)
        node.body.append(_here())
        return node

    visit_While = visit_For

    def visit_Continue(self, node: ast.Continue) -> Any:
        return [_here(), node]

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            new = self.visit(statement)
            found += new if isinstance(new, list) else [new]
        return found


def _here() -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name("_point", ast.Load()), [], []))


def _located(tree: ast.AST) -> ast.AST:
    """Give nodes that were added the place of the node that they are in or after."""

    def locate(node: ast.AST, line: int) -> None:
        if "lineno" in node._attributes:
            if not hasattr(node, "lineno"):
                node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
            line = node.lineno  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_point" and node.args:
            line = node.args[0].lineno
            node.lineno = node.end_lineno = line
        for child in ast.iter_child_nodes(node):
            locate(child, line)
            line = getattr(child, "end_lineno", None) or line

    locate(tree, 1)
    return tree


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _functions(owner: Any, module: types.ModuleType) -> Iterator[types.FunctionType]:
    for found in tuple(vars(owner).values()):
        if isinstance(found, type):
            if found.__module__ == module.__name__ and owner is module:
                yield from _functions(found, module)
            continue
        parts = [found.fget, found.fset] if isinstance(found, property) else [found]
        for part in parts:
            function = (
                inspect.unwrap(getattr(part, "__func__", part)) if callable(getattr(part, "__func__", part)) else part
            )
            if isinstance(function, types.FunctionType) and function.__globals__ is vars(module):
                yield function


@contextmanager
def instrumented() -> Iterator[None]:
    """Give the functions of safecomm points, until the end of it."""
    before: list[tuple[types.FunctionType, types.CodeType]] = []
    try:
        for name in MODULES:
            module = importlib.import_module(f"safecomm.{name}")
            tree = _located(_AddsPoints().visit(ast.parse(inspect.getsource(module))))
            whole = compile(tree, module.__file__ or "", "exec", dont_inherit=True)
            codes = {(code.co_name, code.co_firstlineno): code for code in _codes(whole)}
            module._point = point  # type: ignore[attr-defined]
            for function in _functions(module, module):
                old = function.__code__
                new = codes.get((old.co_name, old.co_firstlineno))
                if new is not None and new.co_freevars == old.co_freevars and old.co_name != "<lambda>":
                    function.__code__ = new
                    before.append((function, old))
        yield
    finally:
        for function, old in before:
            function.__code__ = old


# --- two threads, one at a time ---------------------------------------------------------------------------------


class DeadlockError(AssertionError):
    """Each of two threads waits for a lock that the other one has."""


class Turns:
    """A second thread, which runs only while the first one waits for it, so that what they do has one order.

    It runs a step until that is over, or hands back in the middle of it (:meth:`hand_back`), or until it needs a lock
    (:class:`TurnLock`) that the first thread has. The next :meth:`resume` goes on where it was.
    """

    def __init__(self) -> None:
        self.second = False  # the second thread runs
        self.underway = False  # the second thread is in the middle of a step
        self.blocked = False  # on a lock of the first thread
        self._to: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (step := self._to.get()) is not None:
            failure = None
            try:
                step()
            except BaseException as error:
                failure = error
            self.underway = False
            del step
            self._back.put(failure)
            del failure

    def resume(self, step: Callable[[], None] | None = None) -> None:
        """Let the second thread run ``step``, or go on with the one that it is in the middle of."""
        assert self.underway == (step is None)
        assert not self.second
        self.underway = self.second = True
        self.blocked = False
        left, HOOK.left = HOOK.left, 0
        self._to.put(step if step is not None else True)
        failure = self._back.get()
        HOOK.left = left
        self.second = False
        if failure is not None:
            raise failure

    def hand_back(self) -> None:
        """On the second thread, in the middle of a step: let the first one run until it resumes this one."""
        left, HOOK.left = HOOK.left, 0
        self._back.put(None)
        self._to.get()
        HOOK.left = left

    def finish(self) -> None:
        """Let the second thread come to the end of its step."""
        while self.underway:
            self.resume()
            if self.blocked:
                raise DeadlockError("the second thread waits for a lock that was not let go of")

    def close(self) -> None:
        """End the second thread, which is between two steps."""
        self._to.put(None)


class TurnLock:
    """A lock that can be taken again by the thread that has it, and for which the other thread is given its turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._depth = 0
        self._second = False  # the second thread has it

    def acquire(self) -> bool:
        turns = self._turns
        while self._depth and self._second != turns.second:
            if turns.second:
                turns.blocked = True
                turns.hand_back()
            else:
                turns.resume()
                if turns.blocked and self._depth and self._second:
                    raise DeadlockError("each thread waits for a lock that the other one has")
        self._second = turns.second
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._depth
        assert self._second == self._turns.second
        self._depth -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        return bool(self._depth)
