"""Compiles the one C file of safecomm into the wheel: for this kind of machine, every Python from 3.10 on (cp310-abi3).

Where that fails, as without a compiler, and with ``SAFECOMM_BUILD_C=0``, the wheel is pure Python, for all machines.
``pip install --editable`` puts what is compiled beside its source.
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
    compiler = next((one for one in commands if shutil.which(one[0])), commands[-1])
    include = sysconfig.get_path("include")
    subprocess.run(
        [*compiler, "-std=c11", "-O2", "-fPIC", "-shared", f"-I{include}", *options, str(SOURCE), "-o", str(into)],
        check=True,
    )


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled C file to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the variable forbids it."""
        self._folder = tempfile.mkdtemp()
        built = Path(self._folder, Path(BUILT).name)
        if version == "editable":
            built = SOURCE.with_name(built.name)
            built.unlink(missing_ok=True)
        wanted = os.environ.get("SAFECOMM_BUILD_C", "")
        if wanted not in ("", "0", "1"):
            raise ValueError(f"SAFECOMM_BUILD_C={wanted!r}: expected 0 or 1")
        if wanted == "0":
            return
        try:
            compile_c(built)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"safecomm is built without its C file, which does not compile here: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(built)] = BUILT
            build_data["pure_python"] = False
            build_data["tag"] = "cp310-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has by now."""
        shutil.rmtree(self._folder)
