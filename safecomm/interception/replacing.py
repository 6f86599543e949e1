"""The switch that forbids what replaces anything of torch's.

Importing safecomm replaces nothing. ``patch()`` does, and a few contexts, each of which asks here first, and the first
memory that is used on another stream than its allocation stream.
"""

from __future__ import annotations

import os

from safecomm.errors import SafecommError

VARIABLE = "SAFECOMM_REPLACE"


def flag(name: str, value: str) -> bool:
    """Return what the variable ``name`` says by ``value``, ValueError if that is neither 0 nor 1."""
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def allowed() -> bool:
    """Return whether the switch lets functions of torch's be replaced.

    Examples
    --------
    >>> allowed()
    True
    """
    try:
        return flag(VARIABLE, os.environ.get(VARIABLE) or "1")
    except ValueError:  # what is misspelt may have been meant to forbid
        return False


def ask(what: str) -> None:
    """Raise SafecommError if the switch forbids ``what``, which is about to replace functions of torch's.

    Examples
    --------
    >>> ask("patch()")
    """
    if not allowed():
        raise SafecommError(
            f"{what} replaces functions of torch's, which {VARIABLE}={os.environ[VARIABLE]} forbids. Nothing was done."
        )
