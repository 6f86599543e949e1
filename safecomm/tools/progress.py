"""How far a command is: one line of a terminal that is written over, and nothing where the output is no terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from safecomm.diagnostics.checked import printable


class Progress:
    """Shows the line that it is called with in place of the one before, and takes the last one away at the end.

    Where ``stream`` (standard error by default) is no terminal, it writes nothing. It raises nothing.

    Examples
    --------
    >>> with Progress() as progress:
    ...     progress("reading: 3 of 10 MiB")
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()

    def __call__(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        line = printable(line)
        self._write("\r\x1b[K" + (line if len(line) <= width else "..." + line[len(line) - width + 3 :]))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if not self._shown:
            return
        try:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError:  # its reader is gone; what was asked for still has to be done
            self._shown = False
