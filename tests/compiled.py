"""The C file, compiled into a folder of its own, and drivers that it and ctypes can ask: functions of Python."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safecomm._torch import native, segment_table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "safecomm" / "_torch" / "_driver.c"
STRICT = ("-Wall", "-Wextra", "-Werror")


def hook() -> types.ModuleType:
    """Return ``hatch_build.py``."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_not() -> str:
    """Return why the C file can't be compiled here, or would not be used; "" if it can."""
    if native.threads_are_free():
        return "this Python runs without a global interpreter lock, and does not load extensions of the stable ABI"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there is no Python.h"
    return "" if shutil.which("cc") or shutil.which("gcc") else "there is no C compiler"


def load(path: Path) -> Any:
    """Return the module that was compiled to ``path``."""
    loader = importlib.machinery.ExtensionFileLoader("safecomm._torch._driver", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@functools.cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@functools.cache
def compiled() -> Any:
    """Return the module, compiled now, with each warning an error."""
    path = folder() / "_driver.abi3.so"
    try:
        hook().compile_c(path, *STRICT)
    except subprocess.CalledProcessError as error:
        raise AssertionError("the C file does not compile without warnings") from error
    return load(path)


ATTRIBUTE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int, ctypes.c_uint64)
"""``cuPointerGetAttribute``."""

_kept: list[Any] = []  # for the tables, which have the addresses


def driver(identity_of: Callable[[int], int | None]) -> Any:
    """Return a driver's function that answers with the id that ``identity_of`` gives a pointer; None: it fails."""

    def pointer_attribute(answer, attribute, pointer):
        assert attribute == 7
        identity = identity_of(pointer)
        if identity is None:
            return 1  # CUDA_ERROR_INVALID_VALUE, and the answer stays what it was
        answer[0] = identity
        return 0

    _kept.append(ATTRIBUTE(pointer_attribute))
    return _kept[-1]


FAKE_DRIVER = """
int cuPointerGetAttribute(unsigned long long *answer, int attribute, unsigned long long pointer) {
    *answer = pointer >> 21;
    return !*answer || attribute != 7;
}
int cuStreamIsCapturing(unsigned long long stream, int *status) { *status = stream == 77; return 0; }
int cuStreamGetCaptureInfo_v2(
    unsigned long long stream, int *status, unsigned long long *id, void *a, void *b, void *c) {
    *status = 1; *id = 10 * stream; return a || b || c;
}
"""
"""Where nothing is at the lowest 2 MiB, each 2 MiB is an allocation of its own, and stream 77 is captured."""


def fake_driver(into: Path) -> None:
    """Compile FAKE_DRIVER to the driver's library in the folder ``into``."""
    source = into / "libcuda.c"
    source.write_text(FAKE_DRIVER)
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", str(source), "-o", str(into / "libcuda.so.1")], check=True)


def run(program: str, site: Path, **environment: str) -> str:
    """Run ``program`` with the package in the folder ``site``, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(site), **environment}, cwd=site,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


KINDS = ("ctypes", "C")


def table_of(kind: str, asked: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what makes tables that ask ``asked``, which :func:`driver` has made. Skips where there is no compiler."""
    monkeypatch.setattr(segment_table, "pointer_attribute", asked)
    if kind == "ctypes":
        return segment_table.SegmentTable
    if why_not():
        pytest.skip(why_not())
    return functools.partial(compiled().Table, native.address_of(asked))
