"""Modules of safecomm with one thing broken, and how a check is said to find them.

What is broken is a node of the syntax tree, so the layout of the source does not matter. Only an assertion finds what
is broken, or an error that the test names: a mutant that stumbles over itself has proved nothing.
"""

import ast
import types
from pathlib import Path

import pytest

from safecomm.core.ledger import LEDGER


class _Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = parsed(old), parsed(new)
        self.dumped = ast.dump(self.old)
        self.count = 0

    def visit(self, node):
        if type(node) is type(self.old) and ast.dump(node) == self.dumped:
            self.count += 1
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def parsed(text):
    """Return the one statement that ``text`` is, or its expression."""
    (node,) = ast.parse(text).body
    return node.value if isinstance(node, ast.Expr) else node


def fresh(module, old="", new=""):
    """Return ``module`` made anew, in which each expression or statement ``old`` is ``new``."""
    tree = ast.parse(Path(module.__file__).read_text())
    if old:
        replace = _Replace(old, new)
        tree = ast.fix_missing_locations(replace.visit(tree))
        assert replace.count, f"there is no {old!r} in {module.__name__}"
    made = types.ModuleType(module.__name__)
    made.__file__ = module.__file__
    exec(compile(tree, module.__file__, "exec"), made.__dict__)
    return made


def finds(checks, made, *errors):
    """Return whether one of ``checks`` finds that ``made`` is wrong: by an assertion, or by one of ``errors``."""
    try:
        for check in checks:
            check(made)
    except (AssertionError, pytest.fail.Exception, *errors):
        LEDGER.release_all(LEDGER.holds())  # what a mutant has held where it can't be waited for
        return True
    return False
