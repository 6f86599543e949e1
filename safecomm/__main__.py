"""``python -m safecomm``: the shell command, under the name by which every installation has it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import safecomm_shell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's own) name, and return the exit status."""
    return safecomm_shell.main(arguments, prog="python -m safecomm")


if __name__ == "__main__":
    sys.exit(main())
