"""A plugin for pytest, ``-p c_form``: the same tests, with C doing what it can to holds."""

from __future__ import annotations

import compiled

from safecomm.collectives import gates, in_c, list_gates, lists
from safecomm.collectives.routes import Routes
from safecomm.core.ledger import LEDGER

in_c.put_in_place(compiled.compiled())
for module in (gates, list_gates, lists):
    module._can_skip_sweep = LEDGER.can_skip_sweep

_make = Routes._make


def make(self, key, group, stream):
    """Let simulated groups wait by ordering streams as well, which only groups of torch's own class do."""
    route = _make(self, key, group, stream)
    route.wait_is_stream_order = route.kind.wait_is_stream_order and not key.results
    return route


Routes._make = make
