"""The shape of the package: who may import whom, who may touch private names, and that all of it is documented."""

import ast
import itertools
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import safecomm

ROOT = Path(safecomm.__file__).parent
sys.path.append(str(Path(__file__).parent / "gpu"))
from paths import ABSOLUTE, without_directories  # noqa: E402

FILES = sorted(ROOT.rglob("*.py"))

# Names with an underscore that are torch.distributed's vocabulary rather than its internals: collectives that safecomm
# wraps, which people call under these names.
WRAPPED_NAMES = {
    "_coalescing_manager",
    "_all_gather_base",
    "_reduce_scatter_base",
    "_allgather_base",
    "_abort_process_group",
    "_reconfigure",
    "_end_coalescing",
}
# A module of torch with an underscore in its name, but documented functions: torch.overrides and the like have none.
ALIASES = {"torch", "c10d", "_c10d", "C10dWork"}


def layers(package=ROOT):
    """Return the layers that the head of ``package`` lists, top to bottom, each a set of module names."""
    lines = (package / "__init__.py").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# The direction of dependency"))
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines[start:])
    indented = [line.removeprefix("#") for line in comment if line.startswith("#     ")]
    return [{name.strip() for name in line.strip().split("  ")[0].split(",")} for line in indented]


def layer_of(module):
    """Return the number of the layer that ``safecomm.<module>`` is in; 0 is the top."""
    first = module.split(".")[0] or "__init__"
    found = [number for number, names in enumerate(layers()) if first in names]
    assert len(found) == 1, f"{first} is listed {len(found)} times at the head of safecomm/__init__.py"
    return found[0]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imported(tree):
    """Yield the modules of safecomm that a module imports, at its head or in its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "safecomm":
                    yield alias.name.removeprefix("safecomm").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            if node.module == "safecomm":
                for alias in node.names:
                    yield alias.name if (ROOT / f"{alias.name}.py").exists() or (ROOT / alias.name).is_dir() else ""
            elif node.module and node.module.startswith("safecomm."):
                yield node.module.removeprefix("safecomm.")


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_imports_upwards(path):
    module = module_of(path)
    for other in imported(ast.parse(path.read_text())):
        assert layer_of(other) >= layer_of(module), f"{module or '__init__'} imports {other or 'safecomm itself'}"


CORE = sorted((ROOT / "core").glob("*.py"))


@pytest.mark.parametrize("path", CORE, ids=module_of)
def test_the_core_imports_private_names_checks_and_errors_and_nothing_else(path):
    order = layers(ROOT / "core")
    number = {name: number for number, names in enumerate(order) for name in names}
    assert set(number) == {path.stem for path in CORE} - {"__init__"}
    for other in imported(ast.parse(path.read_text())):
        if other.startswith("core."):
            assert number[other.removeprefix("core.")] >= number[path.stem], f"{path.stem} imports {other}"
        else:
            assert other.split(".")[0] in ("_torch", "arguments", "errors"), f"{path.stem} imports {other}"


LETS_GO = re.compile(r"\.storages = \(\)|\.holds\.(pop|clear|popitem)\(")


def test_every_release_is_made_by_release():
    """What a hold keeps is let go in ``Holds.release()``, and by what that calls."""
    found = {
        f"{module_of(path)}: {line.strip()}"
        for path in FILES
        for line in path.read_text().splitlines()
        if LETS_GO.search(line)
    }
    assert found == {
        "core.holds: hold.storages = ()",
        "core.holds: if queue.holds.pop(hold, queue) is not queue:",
        "core.uses: self.storages = ()",  # Use.on_release()
        "core.uses: queue.holds.pop(use, None)",  # into the queue of those that have an event, and what was released
        "core.ledger: hold.queue.holds.pop(hold, None)",  # into the quarantine
    }
    assert [module_of(path) for path in FILES if ".on_release()" in path.read_text()] == ["core.holds"]


TOOLS = "safecomm.tools"


def test_nothing_but_the_shell_imports_the_tools():
    library = [path for path in FILES if not module_of(path).startswith("tools")]
    assert len(library) < len(FILES)
    for path in library:  # as text, and so what is imported by its name too
        assert TOOLS not in path.read_text().replace("import tools", TOOLS), path
    shell = imported(ast.parse((ROOT.parent / "safecomm_shell.py").read_text()))
    assert set(shell) == {"tools"}


@pytest.mark.parametrize("room", sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
def test_the_head_of_a_folder_says_where_to_begin(room):
    head = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    if room not in ("core", "_torch"):  # whose heads list their files in order
        begin = re.search(r"Begin with ``(\w+)``", head)
        assert begin
        assert (ROOT / room / f"{begin[1]}.py").exists()
        assert re.search(r"\bimports? it\b", head), "who may import it"


def test_the_picture_of_the_rooms_is_what_is_imported():
    drawn = subprocess.run(
        [sys.executable, "docs/rooms.py", "--check"], cwd=ROOT.parent, capture_output=True, text=True
    )
    assert not drawn.returncode, drawn.stdout + drawn.stderr


def test_the_library_loads_no_tool():
    script = "import sys, safecomm\nfor name in safecomm._LAZY: getattr(safecomm, name)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "safecomm.diagnostics.leaks" in loaded
    assert [name for name in loaded if name.startswith(TOOLS)] == []


@pytest.mark.parametrize("package", ["arena"])
def test_no_file_of_a_package_imports_one_that_imports_it(package):
    """Neither at its head nor in a function: each file can be read after those that it needs."""
    needed = {
        module_of(path): {name for name in imported(ast.parse(path.read_text())) if name.startswith(f"{package}.")}
        for path in FILES
        if path.is_relative_to(ROOT / package)
    }
    while free := [module for module, others in needed.items() if not others & needed.keys()]:
        for module in free:
            del needed[module]
    assert not needed


def test_every_file_is_in_the_list():
    for path in FILES:
        layer_of(module_of(path))


PRIVATE = ROOT / "_torch"
PRIVATE_FILES = sorted(path for path in PRIVATE.glob("*.py") if path.stem != "__init__")


def test_the_files_of_private_names_import_only_what_is_below_them():
    below = [names for (names,) in layers(PRIVATE)]
    assert sorted(below) == [path.stem for path in PRIVATE_FILES]
    for path in PRIVATE_FILES:
        for other in imported(ast.parse(path.read_text())):
            package, _, name = other.partition(".")
            assert package == "_torch", f"{path.name} imports {other}"
            assert name in below[below.index(path.stem) + 1 :], f"{path.name} imports {other}"


def given_out():
    """Return what the list of ``safecomm._torch`` gives out, and the file of each name."""
    listed = [
        (alias.asname, alias.name, node.module)
        for node in ast.parse((PRIVATE / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("safecomm._torch.")
        for alias in node.names
        if not private(alias.asname)
    ]
    assert all(given == name for given, name, _ in listed)
    return {name: module for name, _, module in listed}


def used_of_private_names(tree):
    """Yield what a file uses of ``safecomm._torch``, as ``_torch.x`` or by an import."""
    for chain in chains(tree):
        if chain[0] == "_torch":
            yield chain[1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "safecomm._torch":
            yield from (alias.name for alias in node.names)


def test_what_others_use_of_the_private_names_is_listed_and_no_more():
    trees = [ast.parse(path.read_text()) for path in FILES if PRIVATE not in path.parents]
    used = {name for tree in trees for name in used_of_private_names(tree)}
    of_tests = {"LACKING", "NAMES", "REQUIRED"}
    whole = {"submodules", "versions"}  # files that are given out whole, because they have no private names
    assert used | of_tests == set(given_out()) | whole
    for tree in trees:
        assert not [other for other in imported(tree) if other.startswith("_torch.")], "it reaches past the list"


def test_no_name_that_is_given_out_hides_a_file():
    assert not set(given_out()) & {path.stem for path in PRIVATE_FILES}
    for name, module in given_out().items():
        assert getattr(safecomm._torch, name) is getattr(sys.modules[module], name), name


def chains(tree):
    """Yield each chain of attributes as a list of names: ``torch._C._x`` as ["torch", "_C", "_x"]."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = []
            while isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name):
                yield [node.id, *names]


def private(name):
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", [path for path in FILES if PRIVATE not in path.parents], ids=module_of)
def test_private_names_of_torch_are_only_in_their_place(path):
    tree = ast.parse(path.read_text())
    touched = [
        ".".join(chain)
        for chain in chains(tree)
        if chain[0] in ALIASES and any(private(name) and name not in WRAPPED_NAMES for name in chain[1:])
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            touched += [f"from {node.module}: {name}" for name in names if private(name) and name not in WRAPPED_NAMES]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id in ALIASES
            and isinstance(node.args[1], ast.Constant)
            and private(node.args[1].value)
            and node.args[1].value not in WRAPPED_NAMES
        ):
            touched.append(f"{node.func.id}({node.args[0].id}, {node.args[1].value!r})")
    assert touched == []


def words(value):
    """Yield all text in the JSON ``value``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for one in value.values():
            yield from words(one)
    elif isinstance(value, list):
        for one in value:
            yield from words(one)


RESULTS = [
    path for folder in ("benchmarks/results", "safecomm/tools/demo") for path in (ROOT.parent / folder).rglob("*.json")
]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_no_directory_of_a_machine(path):
    assert [text for text in words(json.loads(path.read_text())) if ABSOLUTE.search(text)] == []


def test_directories_are_taken_out_of_results():
    found = without_directories(
        json.dumps(
            {
                "at": "of /home/me/main/tests/a.py:3, from /home/me/main",
                "ratio": "us/call 3 / 4 1/2",
                "/tmp/x.json": "./a/b",
            }
        )
    )
    assert found == '{"at": "of a.py:3, from main", "ratio": "us/call 3 / 4 1/2", "x.json": "./a/b"}'
    for text in (
        "/root/x",
        "in '/home/me'",
        "(/usr/lib/python3/site-packages/torch/_tensor.py)",
        "file:/tmp",
        "a=/opt/x",
    ):
        assert not ABSOLUTE.search(without_directories(text))
    for text in ("/root/x", "in '/home/me'", "(/usr/lib/python3/site-packages/torch/_tensor.py)", "a=/opt/x"):
        assert ABSOLUTE.search(text)


def documented():
    for name, thing in vars(safecomm).items():
        # By type() and not isinstance(): torch's deprecated reduce_op warns when its class is asked for.
        if name.startswith("_") or not issubclass(type(thing), (type, types.FunctionType)):
            continue
        if thing.__module__.split(".")[0] == "safecomm":
            yield name, thing
            if isinstance(thing, type):
                for member, value in vars(thing).items():
                    if not member.startswith("_") and isinstance(value, (types.FunctionType, property)):
                        yield f"{name}.{member}", value


def test_the_package_is_documented():
    assert safecomm.__doc__
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


DOCUMENTED = dict(documented())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_is_documented(name):
    assert DOCUMENTED[name].__doc__
