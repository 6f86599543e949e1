"""What Python runs as it starts, in each process that a program under ``run`` or ``compare`` starts by itself.

The directory of this file is the first of PYTHONPATH there. Once such a process has imported torch, it begins as the
first one has (``runner.begin``), before its own code can take a function of torch.distributed. A sitecustomize that
would have run without this one runs first.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path


class _AfterTorch:
    """Finds torch as the other finders do, and has its import end with ours."""

    looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_begin(module: types.ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                _begin()

            spec.loader.exec_module = run_and_begin  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    options = os.environ.get("_SAFECOMM_CHILDREN", "")
    if not options:
        return
    sys.path.append(str(Path(__file__).parents[3]))  # for a checkout that is not installed; behind all others
    try:
        from safecomm.patching.runner import begin

        begin(**json.loads(options))
    except Exception as error:  # the process is the program's, which goes on as it would without us
        print(f"safecomm: process {os.getpid()} is not patched: {error!r}", file=sys.stderr, flush=True)


def _run_the_other() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTorch())
_run_the_other()
