"""The words that safecomm no longer uses, each with the word that it uses in their place.

``test_structure.py`` looks for them in the names of the package: one thing has one name, and it is the field's.
"""

OLD = {
    "adopt": "add, convert",
    "alone": "single_call_equivalent, only_holder",
    "astray": "foreign",
    "awaited": "has_future, can_skip_sweep",
    "blind": "pollable",
    "brief": "wait_is_stream_order",
    "diverted": "ROUTES.off()",
    "entries": "holds",
    "entry": "hold",
    "home": "alloc_stream",
    "homeless": "unknown allocation stream",
    "homes": "allocation",
    "lane": "queue, route, area",
    "lanes": "queues, routes, areas",
    "late": "timed_out",
    "lenient": "relaxed",
    "likes": "guards",
    "manners": "wait_budget",
    "orphan": "leftover",
    "orphanage": "leftover_queue",
    "orphans": "leftovers",
    "pardon": "release from the quarantine",
    "patient": "defer_polling",
    "queries": "asks_in_wait",
    "rare": "needs_full_wait",
    "reached": "query_event",
    "section": "phase",
    "sections": "phases",
    "shelf": "size_class",
    "shelves": "needs_aliases",
    "silent": "hides_failures",
    "streamed": "stream_ordered",
    "trail": "handoff",
    "trailing": "handed off",
    "trails": "handoffs",
    "turns": "epochs, phases",
    "unedited": "tolerant",
    "unowned": "non_owning_alias",
    "witness": "last_busy",
}
"""Words of names, such as ``trail`` in ``trail_budget``."""

OLD_NAMES = {
    "NOT_TAKEN": "DECLINED",
    "by_engine": "offer",
    "let_go": "release",
    "put_off": "defer",
    "two_before": "guard2_before",
}
"""Names, or parts of names, of several words."""

OTHERS = {
    "brief": "versions.brief() makes the short table of the README",
    "entries": "of the legend of a plot, or of a page",
    "entry": "of a kernel, in PTX",
    "_section": "of a page of HTML",
}
"""Names that are of somebody else's interface, or mean what the word means to everybody."""
