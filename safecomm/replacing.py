"""The switch that forbids what replaces anything of torch's.

Importing safecomm replaces nothing. ``patch()`` does, and a few contexts, each of which asks here first, and the first
memory that is used on another stream than its allocation stream.
"""

from __future__ import annotations

import os

from safecomm.errors import SafecommError

VARIABLE = "SAFECOMM_REPLACE"


def allowed() -> bool:
    """Return whether the switch lets functions of torch's be replaced.

    Examples
    --------
    >>> allowed()
    True
    """
    return os.environ.get(VARIABLE, "1") in ("", "1")


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
