"""What the size of the package is: ``python tests/size.py`` prints a table, ``--check`` exits 1 beyond a limit.

    python tests/size.py                            the figures, their limits, and where the largest come from
    python tests/size.py --core safecomm/ledger.py safecomm/trails.py
                                                    what is counted as the core: a folder, or files

LIMITS are what the package is to keep. NOW has the figures that are beyond them as yet: they may fall, and never rise.
A figure that has reached its limit leaves NOW. ``tests/test_size.py`` keeps both.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STATEMENTS, FILE, DEVICE, ROOMS, PATH, CIRCLES, INTO_CORE, ANY = (
    "statements of the core",
    "lines of code of the largest file",
    "lines of code that a device runs",
    "rooms",
    "rooms on the longest path of imports",
    "circles of imports",
    "imports into the core from elsewhere",
    "uses of Any",
)

LIMITS = {STATEMENTS: 900, FILE: 450, DEVICE: 524, ROOMS: 17, PATH: 9, CIRCLES: 0, INTO_CORE: 0, ANY: 300}
"""What each figure may be at the most."""

NOW = {STATEMENTS: 1477, DEVICE: 600}
"""What figures that are beyond their limits are."""

CORE = "safecomm/core"
"""The folder of the core. Until it is there, nothing is counted as the core."""

SHELL = "safecomm_shell"
"""The shell command, which is beside the package, and a room of it."""

BESIDE = "captures*.py"
"""Files of the core whose statements are not counted: what sees CUDA graph captures."""

CORE_MAY_IMPORT = {"safecomm._torch", "safecomm.arguments", "safecomm.errors"}
"""What the core may import of the package, beside itself."""

NOT_BY_HAND = {"safecomm/collectives/gates.py", "safecomm/peers/kernels.py"}
"""Files whose length is not that of what somebody reads: one is generated, one is in Triton's language."""

# --- what one file has ----------------------------------------------------------------------------------------------

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a string alone: a docstring, or what documents an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(tree: ast.AST) -> int:
    """Return the number of statements, without docstrings.

    >>> statements(ast.parse("'''Doc.'''\\nif x:\\n    y = 1; z = 2\\n'''Of z.'''"))
    3
    """
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in ast.walk(tree))


def lines(text: str) -> int:
    """Return the number of lines that have code, and not a comment or a docstring alone.

    >>> lines("'''Doc.'''\\n\\n# A comment.\\nx = [\\n    1,  # one\\n]\\n")
    3
    """
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and is_text(node):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def of_device(node: ast.AST) -> bool:
    """Return whether a device runs what a node defines: a function in Triton's language, or PTX in a string.

    >>> of_device(ast.parse("@triton.jit(x=1)\\ndef f(): pass").body[0])
    True
    """
    if isinstance(node, ast.FunctionDef):
        return any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)
    # PTX has the names of its types.
    return isinstance(node, ast.Assign) and node.lineno != node.end_lineno and ".b32" in ast.unparse(node.value)


def uses_of_any(tree: ast.AST) -> int:
    """Return how often the name ``Any`` stands in a module, without the line that imports it.

    >>> uses_of_any(ast.parse("from typing import Any\\nx: Any = 1\\ny: typing.Any = 2"))
    2
    """
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(tree)
    )


# --- the package ----------------------------------------------------------------------------------------------------


@dataclass
class Package:
    """The files of a package, by the names of their modules."""

    root: Path
    """The folder that the package is in."""
    name: str = "safecomm"
    core: tuple[Path, ...] = ()
    """The files of the core."""
    paths: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        files = [*sorted((self.root / self.name).rglob("*.py")), *self.root.glob(f"{SHELL}.py")]
        self.paths = {self._module(path): path for path in files}
        self.trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in self.paths.items()}

    def _module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def imports_of(self, module: str) -> Iterator[str]:
        """Yield the modules of the package that ``module`` imports, in functions too, as often as it does.

        ``from package import name`` is an import of the module ``package.name`` where there is one.
        """
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.paths)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in self.paths:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from {one if one in self.paths else node.module for one in inner}

    @cached_property
    def imports(self) -> dict[str, list[str]]:
        """The modules of the package that each imports. A package is not what its own modules import from it."""
        return {module: sorted({*self.imports_of(module)} - {module}) for module in self.paths}

    @cached_property
    def circles(self) -> list[list[str]]:
        """The sets of modules each of which imports all others of the set, by way of one another."""
        reached = {module: self._reached(module) for module in self.imports}
        found = {frozenset(one for one in reached[module] if module in reached[one]) for module in self.imports}
        return sorted(sorted(circle) for circle in found if circle)

    def _reached(self, module: str) -> set[str]:
        found: set[str] = set()
        left = [*self.imports[module]]
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left += self.imports[one]
        return found

    @cached_property
    def rooms(self) -> dict[str, set[str]]:
        """By room, which is a file or a folder at the top of the package, or the shell: the rooms that it imports from.

        Stubs of ``torch.distributed``'s submodules are none: there is nothing in them.
        """

        def room(module: str) -> str:
            return ".".join(module.split(".")[:2])

        found: dict[str, set[str]] = {}
        for module, others in self.imports.items():
            found.setdefault(room(module), set()).update(set(map(room, others)) - {room(module)})
        return found

    @cached_property
    def longest_path(self) -> list[str]:
        """The longest path of rooms along imports, but for the shell. Of a circle, each room counts once."""

        def from_here(room: str, passed: tuple[str, ...]) -> list[str]:
            others = sorted(self.rooms[room] - {*passed, SHELL})
            return [room, *max((from_here(other, (*passed, room)) for other in others), key=len, default=[])]

        return max((from_here(room, ()) for room in self.rooms if room != SHELL), key=len)

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines of code of the files that are written by hand."""
        by_path = {str(path.relative_to(self.root)): path for path in self.paths.values()}
        return {name: lines(path.read_text()) for name, path in by_path.items() if name not in NOT_BY_HAND}

    @cached_property
    def lines_of_device(self) -> dict[str, int]:
        """Lines of code that a device runs, by module."""
        found: dict[str, int] = {}
        for module, path in self.paths.items():
            text = path.read_text(encoding="utf-8")
            for node in filter(of_device, ast.walk(self.trees[module])):
                segment = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
                found[module] = found.get(module, 0) + lines(segment)
        return found

    @cached_property
    def into_core(self) -> list[str]:
        """The imports of the core that it may not make."""
        core = {self._module(path) for path in self.core}
        return [
            f"{module} imports {one}"
            for module in sorted(core)
            for one in self.imports_of(module)
            if one not in core | CORE_MAY_IMPORT
        ]

    @cached_property
    def statements_of_core(self) -> dict[str, int]:
        """Statements of the files of the core that are counted."""
        return {path.name: statements(self.trees[self._module(path)]) for path in self.core if not path.match(BESIDE)}

    @cached_property
    def uses_of_any(self) -> dict[str, int]:
        """Uses of ``Any`` by module."""
        return {module: uses_of_any(tree) for module, tree in self.trees.items()}

    def figures(self) -> dict[str, int]:
        """Return what LIMITS has limits for."""
        return {
            STATEMENTS: sum(self.statements_of_core.values()),
            FILE: max(self.lines.values()),
            DEVICE: sum(self.lines_of_device.values()),
            ROOMS: len(self.rooms),
            PATH: len(self.longest_path),
            CIRCLES: len(self.circles),
            INTO_CORE: len(self.into_core),
            ANY: sum(self.uses_of_any.values()),
        }

    def reasons(self) -> dict[str, list[str]]:
        """Return where each figure comes from, the largest first."""
        return {
            STATEMENTS: [f"{name} {count}" for name, count in ranked(self.statements_of_core)],
            FILE: [f"{name} {count}" for name, count in ranked(self.lines) if count > LIMITS[FILE]],
            DEVICE: [f"{name} {count}" for name, count in ranked(self.lines_of_device)],
            ROOMS: [", ".join(module.removeprefix(f"{self.name}.") for module in self.rooms)],
            PATH: [" > ".join(module.removeprefix(f"{self.name}.") for module in self.longest_path)],
            CIRCLES: [", ".join(circle) for circle in self.circles],
            INTO_CORE: self.into_core,
            ANY: [f"{name} {count}" for name, count in ranked(self.uses_of_any)[:5]],
        }


def ranked(counts: dict[str, int]) -> list[tuple[str, int]]:
    """Return ``counts``, the largest first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@cache  # the tests ask for the same again
def of_tree(core: tuple[str, ...] = (CORE,), root: Path = ROOT) -> Package:
    """Return the package of this tree. ``core``: folders and files, of which those that are there count."""
    paths = [root / one for one in core]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return Package(root, core=tuple(file for file in files if file.exists()))


def beyond(figures: dict[str, int]) -> list[str]:
    """Return what is wrong with ``figures``, a line each, as LIMITS and NOW have it."""
    found = []
    for name, figure in figures.items():
        limit, now = LIMITS[name], NOW.get(name, LIMITS[name])
        if figure > now:
            found.append(f"{name}: {figure}, and at the most {now}")
        elif name in NOW and figure <= limit:
            found.append(f"{name}: {figure}, which is within its limit of {limit}, so it is to leave NOW")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", nargs="+", default=[CORE], metavar="PATH", help="a folder, or files")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a figure is beyond its limit")
    options = parser.parse_args(arguments)
    package = of_tree((*options.core,))
    figures, reasons = package.figures(), package.reasons()
    print(f"{'':42}{'now':>6}{'limit':>8}")
    for name, figure in figures.items():
        print(f"{name:42}{figure:6}{LIMITS[name]:8}{'  beyond' * (figure > LIMITS[name])}")
    for name, why in reasons.items():
        if why:
            print(f"\n{name}:", *why, sep="\n    ")
    return int(options.check and any(figure > LIMITS[name] for name, figure in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
