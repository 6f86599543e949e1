"""A page in torch's debug server: what collectives hold, by which line, on every rank.

The server fetches it from each rank, also where a rank hangs in a collective, because it is a thread that answers.
"""

from __future__ import annotations

from typing import NamedTuple

from safecomm import _torch
from safecomm.diagnostics.record import memory_report

_NAME = "safecomm"


class _Place(NamedTuple):
    """What torch takes as a route, and as a link to it."""

    path: str
    label: str
    handler: object


class HeldHandler:
    """A handler for ``torch.distributed.debug.start_debug_server``, made on each rank: :func:`memory_report` of all.

    It has the methods of torch's ``DebugHandler``: the page is at ``/safecomm``, and ``enabled_dumps`` may have
    ``"safecomm"``. Needs torch 2.13 or later, and what its server needs. Everyone who reaches the server can read it.

    Examples
    --------
    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers

    from safecomm.diagnostics.debug_server import HeldHandler

    start_debug_server(handlers=[*default_handlers(), HeldHandler()])
    """

    fetch_timeout = 60.0

    def routes(self) -> list[_Place]:
        """Return the one path, and what answers."""
        return [_Place(f"/{_NAME}", _NAME, self._page)]

    nav_links = routes

    def templates(self) -> dict[str, str]:
        """Return none: the page is torch's for texts of all ranks."""
        return {}

    def dump(self) -> str:
        """Return the texts of all ranks."""
        _, answers = _torch.ask_all_ranks(_NAME, self.fetch_timeout)
        return "\n\n".join(f"rank {rank}\n{one.text}" for rank, one in enumerate(answers))

    def dump_filename(self) -> str:
        """Return the name of its files."""
        return _NAME

    def _page(self, request: _torch.DebugRequest) -> bytes:
        addresses, answers = _torch.ask_all_ranks(_NAME, self.fetch_timeout)
        return request.frontend.render_template(
            "raw_resp.html", title="what collectives hold", addrs=addresses, resps=answers
        )


def _answer(request: object, response: _torch.DebugResponse) -> None:
    response.set_content(str(memory_report()), "text/plain")
    response.set_status(200)


# Once a process: torch refuses a name that it has.
_torch.register_debug_handler(_NAME, _answer)

__all__ = ["HeldHandler"]
