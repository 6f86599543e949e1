"""The route of a group's calls: the backend that they go to, and the queue that their works wait in.

A :class:`Route` is a queue of the core with what a direct call of the backend needs besides, so that a gate looks up
one object. While each call has to be seen, as in a capture, no group has a fast route: see :meth:`Routes.off`.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup

from safecomm import _torch
from safecomm.collectives import backends
from safecomm.collectives.guards import Guards
from safecomm.core import captures
from safecomm.core.holds import Hold, keys_of
from safecomm.core.ledger import LEDGER, Ledger, W, WorkQueue
from safecomm.core.refcounts import COUNTED
from safecomm.core.streams import HOST, capture_of


class HeldByHandles(weakref.WeakKeyDictionary[Hold, None]):
    """Holds that only their handles keep: what a dropped one used is kept by the backend, as without safecomm."""

    def __iter__(self) -> Iterator[Hold]:
        # Python's own raises where another thread changes it meanwhile.
        return iter([hold for reference in self.keyrefs() if (hold := reference()) is not None])


class Key(NamedTuple):
    """What a route is found by."""

    group: int  # its id
    device: int
    capture: int
    unordered: bool
    results: bool


class RootOptions(Protocol):
    """The options of a call that has a root."""

    rootRank: int  # noqa: N815 (c10d's name)


class Route(WorkQueue):
    """The way of a group's calls on one device, in one capture or in none, and the queue of their works."""

    __slots__ = (
        "_unordered",
        "backend",
        "guards",
        "kind",
        "rank",
        "root_options",
        "routes",
        "single_call_equivalent",
        "world",
    )

    key: Key

    def __init__(self, routes: Routes, key: Key, stream: int) -> None:
        super().__init__(routes.ledger, routes.all, key, key.device, stream, key.capture)
        self.routes: Routes = routes
        self.kind: backends.Kind = backends.UNKNOWN  # what the backend is
        self.backend: Any = None  # of a fast route: the C++ side of the group's backend
        self.world: int = 0  # ranks of the group
        self.rank: int = 0  # of this process among them
        self.single_call_equivalent: bool = False  # a region of one call does what that call does
        self.guards: Guards = Guards(key.device)  # of the tensors of direct calls
        # Options of direct calls that have a root, by what they are given.
        self.root_options: dict[tuple[object, ...], RootOptions] = {}
        self._unordered: Route | None = None

    def of_capture(self, stream: int) -> WorkQueue:
        capture = capture_of(self.ledger.streams, stream)
        return self.routes.of(self.its_group(), self.index, stream, capture, unordered=self.key.unordered)

    def its_group(self) -> object:
        """Return the group whose route this is; None if it is gone."""
        return None if self.group is None else self.group()

    def unordered(self, group: object) -> Route:
        """Return the route for calls of ``group`` here that end in no order: gloo does not tell their end."""
        if self._unordered is None:
            self._unordered = self.routes.of(group, self.index, unordered=True)
        return self._unordered


class Routes:
    """The routes of the process's groups.

    Parameters
    ----------
    ledger
        Holds what the calls launch.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.fast: dict[int, Route] = {}  # by the id of a group that is c10d's own: the route of its ordinary calls
        self.all: dict[Key, Route] = {}
        self._kept_back: dict[int, Route] = {}  # the fast ones, while they are off
        self._wanted_off: int = 0  # how many want them off
        # Reentrant: the collector can run inside, and end the capture of a graph that died.
        self._lock = threading.RLock()

    def of(
        self,
        group: object,
        index: int,
        stream: int = 0,
        capture: int = 0,
        *,
        unordered: bool = False,
        results: bool = False,
    ) -> Route:
        """Return the route of calls of ``group``, and make it if there is none.

        Parameters
        ----------
        group
            Of c10d's, or other code's.
        index, stream, capture
            Of the device, and of the capture that ``stream`` is part of, if it is part of one.
        unordered
            For calls that end in no order, as point-to-point calls do.
        results
            For functional collectives, which are released when they are complete, and in no other case.
        """
        key = Key(id(group), index, capture, unordered, results)
        route = self.all.get(key)
        return self._make(key, group, stream) if route is None else route

    def _make(self, key: Key, group: object, stream: int) -> Route:
        _, index, capture, unordered, results = key
        device_type = "cpu" if index == HOST else "cuda"
        kind = backends.of(group, device_type)
        route = Route(self, key, stream)
        route.group = weakref.ref(group, lambda _: self._forget(key))
        route.kind = kind
        route.hides_failures = kind.hides_failures
        route.stream_ordered = kind.stream_ordered and not results
        route.ordered = route.stream_ordered and not unordered  # point-to-point may have a communicator for each peer
        # A gloo send or receive does not tell that it is complete before it was waited for (is_completed()
        # stays False, torch 2.13), and a second wait for it hangs. So it is never polled, and waited for once.
        route.pollable = kind.tells and (kind.pollable_p2p or not unordered)
        if not (kind.tells or unordered or capture or results) and (index == HOST or kind.records):
            # On the host what works on memory refers to it, and elsewhere the allocator keeps it. To hold it after
            # the end of the handle would keep it for longer than without safecomm.
            route.holds, route.held_by_handles = HeldByHandles(), True  # type: ignore[assignment]
        route.asks_in_wait = kind.asks_in_wait and not capture  # where the current stream is captured, nothing is asked
        # Where a dropped handle goes unnoticed, any work may be one that is never waited for.
        route.defer_polling = not capture and route.pollable and not results and COUNTED
        self.all[key] = route
        if type(group) is ProcessGroup and kind.direct and not (capture or unordered or results):
            backend = _torch.backend_of(group, device_type)
            if isinstance(backend, _torch.Backend):
                route.backend = backend
                route.world = group.size()
                route.rank = group.rank()
                # What wraps another compares the names of what the ranks call, which differ.
                bare = _torch.unwrapped(backend) is backend
                route.single_call_equivalent = kind.single_call_equivalent and bare and not _torch.regions_differ()
                route.wait_is_stream_order = kind.wait_is_stream_order and bare and _torch.waits_only_block_streams()
                with self._lock:
                    fast = self._kept_back if self._wanted_off else self.fast
                    fast.setdefault(id(group), route)  # a group may have a route for each of two devices
        return route

    def hold(
        self,
        work: W,
        op: str,
        inner: object,
        group: object,
        index: int,
        storages: tuple[object, ...],
        frame: types.FrameType,
        *,
        aliases: tuple[torch.Tensor, ...] = (),
        staged: bool = False,
        unordered: bool = False,
        alloc_stream: int | None = None,
    ) -> W:
        """Make ``work`` the hold of ``inner``, a call on ``group`` of any kind; ordinary ones take ``Route.hold()``."""
        route = self.fast.get(id(group))
        if route is None or route.index != index or unordered:
            route = self.of(group, index, unordered=unordered)
        work.full = True
        work.aliases = aliases
        work.staged = staged and route.kind.tells  # where waiting once more orders nothing, the backend does it
        work.stream = self.ledger.current(index) if index >= 0 else 0
        return route.hold(work, op, inner, storages, alloc_stream, frame)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Let every call take the general way, so that what has to see all of them does."""
        with self._lock:
            self._wanted_off += 1
            self._move(self.fast, self._kept_back)
        try:
            yield
        finally:
            with self._lock:
                self._wanted_off -= 1
                if not self._wanted_off:
                    self._move(self._kept_back, self.fast)

    @staticmethod
    def _move(routes: dict[int, Route], to: dict[int, Route]) -> None:
        for key in keys_of(routes):
            route = routes.get(key)  # its group may have died since
            if route is not None:
                to[key] = route
                routes.pop(key, None)
                if route.its_group() is None:  # it did in between, and another may get its id
                    to.pop(key, None)

    def _forget(self, key: Key) -> None:
        # A group has died. What its queue holds stays in the ledger, and is swept.
        route = self.all.pop(key, None)
        if route is not None:
            route.backend = None  # a handle that is kept would keep it
        self.fast.pop(key.group, None)
        self._kept_back.pop(key.group, None)

    def close(self, group: object, reason: str) -> None:
        """Forget the routes of ``group`` (None: of all groups), which is gone, and quarantine what is still held."""
        for key in keys_of(self.all):
            route = self.all.get(key)
            if route is not None and (group is None or route.its_group() is group):
                for hold in keys_of(route.holds):
                    self.ledger.fail(hold, RuntimeError(reason))
                self._forget(key)

    def at_exit(self) -> None:
        """Let go of the backends: one that goes only when modules are torn down can take the process down (gloo)."""
        self.fast.clear()
        self._kept_back.clear()
        for route in list(self.all.values()):
            route.backend = None


ROUTES = Routes(LEDGER)
"""The process's routes."""

captures.DURING.append(ROUTES.off)  # a capture that is recorded has to see each call
atexit.register(ROUTES.at_exit)
