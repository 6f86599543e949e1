"""The switch that forbids what replaces anything of torch's.

Importing safecomm replaces nothing. ``patch()`` does, and a few contexts, each of which asks here first.
"""

from __future__ import annotations

import os

from safecomm.errors import SafecommError

VARIABLE = "SAFECOMM_REPLACE"


def ask(what: str) -> None:
    """Raise SafecommError if the switch forbids ``what``, which is about to replace functions of torch's.

    Examples
    --------
    >>> ask("patch()")
    """
    value = os.environ.get(VARIABLE, "1")
    if value not in ("", "1"):
        raise SafecommError(
            f"{what} replaces functions of torch's, which {VARIABLE}={value} forbids. Nothing was done."
        )
