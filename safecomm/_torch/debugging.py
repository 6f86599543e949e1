"""Torch's debug server (``torch.distributed.debug``): pages of one's own, which it fetches from every rank."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

from safecomm._torch.names import C_C10D, look_up


class DebugResponse(Protocol):
    """What a rank answers."""

    def set_content(self, content: str, content_type: str) -> None: ...
    def set_status(self, status: int) -> None: ...


class Answer(Protocol):
    """What the server has got from a rank, or why it has not."""

    text: str


class _Frontend(Protocol):
    def render_template(self, template: str, **values: object) -> bytes: ...


class DebugRequest(Protocol):
    """What a browser asks the server."""

    frontend: _Frontend


_Handler = Callable[[object, DebugResponse], None]

_register: Callable[[str, _Handler], None] = look_up(
    f"{C_C10D}._register_handler",
    lambda name, handler: None,
    "torch's debug server has no page of safecomm",
    since="2.13",
)


def register_debug_handler(name: str, handler: _Handler) -> None:
    """Have a thread of this process answer what the debug server asks under ``name``."""
    # Torch lets go of it after Python has ended, which aborts the process if nothing else has it by then.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    _register(name, handler)


def ask_all_ranks(name: str, timeout: float) -> tuple[Sequence[str], Sequence[Answer]]:
    """Return the addresses of all ranks, and what each answers: in the debug server's own process."""
    from torch.distributed.debug._frontend import fetch_all

    addresses, answers = fetch_all(name, timeout=timeout)
    return addresses, answers
