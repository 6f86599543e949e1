"""Compiles the one C file of safecomm into the wheel where that is asked for: ``SAFECOMM_BUILD_C=1 pip install .``.

Without the variable the wheel is pure Python, for all machines. With it, it is for this kind of machine and for every
Python from 3.10 on (``cp310-abi3``). ``pip install --editable`` puts what is compiled beside its source, and without
the variable it removes what another install has put there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "safecomm" / "_torch" / "_driver.c"
BUILT = "safecomm/_torch/_driver.abi3.so"


def compile_c(into: Path, *options: str) -> None:
    """Compile the C file to ``into``, by the compiler that CC names, Python's own, or cc."""
    named = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"]
    commands = [shlex.split(one) for one in named if one]
    compiler = next((one for one in commands if shutil.which(one[0])), None)
    if compiler is None:
        raise RuntimeError("SAFECOMM_BUILD_C=1 needs a C compiler: install one, or name it in CC")
    include = sysconfig.get_path("include")
    subprocess.run(
        [*compiler, "-std=c11", "-O2", "-fPIC", "-shared", f"-I{include}", *options, str(SOURCE), "-o", str(into)],
        check=True,
    )


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled C file to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if the variable asks for it."""
        self._folder = tempfile.mkdtemp()
        beside = SOURCE.with_name(Path(BUILT).name)
        if version == "editable":
            beside.unlink(missing_ok=True)
        wanted = os.environ.get("SAFECOMM_BUILD_C", "")
        if wanted not in ("", "0", "1"):
            raise ValueError(f"SAFECOMM_BUILD_C={wanted!r}: expected 0 or 1")
        if wanted in ("", "0"):
            return
        if version == "editable":
            compile_c(beside)
            return
        built = Path(self._folder, beside.name)
        compile_c(built)
        build_data["force_include"][str(built)] = BUILT
        build_data["pure_python"] = False
        build_data["tag"] = "cp310-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has by now."""
        shutil.rmtree(self._folder)
