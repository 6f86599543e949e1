"""What the environment variables SAFECOMM_LOG and SAFECOMM_RECORD ask for, when safecomm is imported."""

from __future__ import annotations

import logging
import os

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.record import record_memory

log: logging.Logger = logging.getLogger("safecomm")

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def apply() -> None:
    """Set the level of the logger ``safecomm`` to ``SAFECOMM_LOG``, and record into ``SAFECOMM_RECORD``.

    A logger that the program has given no handler writes to standard error, one line an event. What is wrong with a
    variable is logged; it does not keep the program from running.
    """
    level = os.environ.get("SAFECOMM_LOG", "").upper()
    if level in LEVELS:
        log.setLevel(level)
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
            log.addHandler(handler)
    elif level:
        log.warning("SAFECOMM_LOG=%s: expected one of %s", printable(level), ", ".join(LEVELS))
    path = os.environ.get("SAFECOMM_RECORD")
    if path:
        try:
            record_memory(path).start()
        except (OSError, ValueError) as error:
            log.warning("SAFECOMM_RECORD=%s: nothing is recorded: %s", printable(path), printable(str(error)))
