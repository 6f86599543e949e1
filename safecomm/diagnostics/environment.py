"""What the environment variables SAFECOMM_LOG and SAFECOMM_RECORD ask for, when safecomm is imported."""

from __future__ import annotations

import logging
import os

from safecomm.diagnostics.checked import printable
from safecomm.diagnostics.record import record_memory

log: logging.Logger = logging.getLogger("safecomm")

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def level_of(value: str) -> str:
    """Return the level that ``value`` of ``SAFECOMM_LOG`` names; ValueError if it names none."""
    if value.upper() not in LEVELS:
        raise ValueError(f"SAFECOMM_LOG={printable(value)}: expected one of {', '.join(LEVELS)}")
    return value.upper()


def apply() -> None:
    """Set the level of the logger ``safecomm`` to ``SAFECOMM_LOG``, and record into ``SAFECOMM_RECORD``.

    A logger that the program has given no handler writes to standard error, one line an event. What is wrong with a
    variable is logged; it does not keep the program from running.
    """
    level = os.environ.get("SAFECOMM_LOG", "")
    try:
        log.setLevel(level_of(level) if level else log.level)
    except ValueError as error:
        log.warning("%s", error)
    else:
        if level and not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
            log.addHandler(handler)
    path = os.environ.get("SAFECOMM_RECORD")
    if path:
        try:
            record_memory(path).start()
        except (OSError, ValueError) as error:
            log.warning("SAFECOMM_RECORD=%s: nothing is recorded: %s", printable(path), printable(str(error)))
