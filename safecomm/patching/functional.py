"""Functional collectives whose results were dropped: finished at a later call, once no code can miss the wait (S3).

A functional collective gives out a wrapper of the tensor that it writes to. Torch keeps the work, which refers to its
tensors, in a registry until a wait for a tensor of that storage: for the life of the process, if the wrapper
was dropped. From torch 2.14 on a hook of the group tells the work of each call that is made here. When the wrapper has
died, the ledger polls the work as it polls others, and :class:`Result` waits in the program's place, which takes it out
of the registry. Before 2.14 nothing tells the work, and all of this is torch's.

Two things must hold, and the first alone makes it safe:

1. *The work is complete*, without an error. A wait in the program's place takes the wait from code that still has the
   tensor, and who that is can't be told: a wrapper that the program made, autograd, C++ and weak references have it in
   ways that no count shows. But no code needs a wait for a work that is complete. The host has seen that the tensor is
   written, so whatever it launches from now on, on any stream, comes after that.
2. *No other reference to the tensor is seen.* The registry may have a later work for the same storage: of a collective
   that works in place on what was taken out of the wrapper. Its wait would be taken too, and might block the host.
   So the program is given another tensor of the storage than the work has, and each tensor and each storage object
   that comes of that is counted. The work's own references can only become fewer. Those that a wait ends are gone
   where the program has waited, and then there is nothing to take; the others end with the work.

Torch goes through a group's hooks without a lock: one that is taken off while another thread launches takes the
process down. So a hook stays on its group once it is there, and what it calls is exchanged (:data:`Tap`).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from safecomm import _torch
from safecomm.collectives.routes import ROUTES, Route
from safecomm.core.call_site import outside
from safecomm.core.holds import keys_of
from safecomm.core.ledger import LEDGER, WorkHold
from safecomm.core.refcounts import COUNTED, HELD_ONCE, getrefcount
from safecomm.core.streams import HOST, capture_of

NAMES = ("all_gather_single", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_single")
"""The functional collectives that launch one collective for one tensor. The older names call these."""

Tap: TypeAlias = Any  # functools.partial, whose __setstate__ the checkers don't know
"""A hook: calls ``append`` of the list of the call that is being made, or of :data:`_HIDDEN`. No function of Python,
in which an exception of a signal handler could come: the operator would raise, and nothing would have the work, which
runs. ``__setstate__`` exchanges the list between two calls of the hook, whichever thread makes them."""

_ID = int.from_bytes(b"functio", "big")
"""Of our hooks. A program that registers one under the same number takes its place."""

_HIDDEN: deque[object] = deque(maxlen=0)
"""For what no other code sees."""


def _into(calls: list[Any] | deque[object]) -> tuple[object, ...]:
    """Return the state of a :data:`Tap` whose calls go to ``calls``."""
    return calls.append, (), {}, None


class Result(WorkHold):
    """What a functional collective writes to. Its own work for the ledger: the two conditions are asked here."""

    queue: Route
    owner: Functional
    key: int  # of the storage
    tensor: torch.Tensor | None  # until it is torch's or the program's again
    storage: torch.UntypedStorage
    works: tuple[Work, ...]  # until they are complete
    counted: tuple[int, int]  # when nothing else had it
    kept: bool = False  # by the program, after it was complete
    wrapper: weakref.ref[torch.Tensor]

    @property
    def inner(self) -> Result:
        """The work that the ledger polls."""
        return self

    def is_completed(self) -> bool:
        """Return whether there is nothing left to do; do it, if it can be done. Never blocks. Not in a capture."""
        tensor = self.tensor
        if tensor is None:
            return True
        if self.owner.exiting:
            return False
        works = self.works
        if not all(work.is_completed() for work in works):
            return False
        try:
            worked = all(work.wait() for work in works)
        except Exception:
            worked = False
        if not worked:
            self.forget()  # the program's own wait raises the error
            return True
        self.works = ()
        if not self.only_holder():
            self.kept = True
            return False
        with _torch.probing(), torch.no_grad():
            self.owner.wait_for(tensor)
        self.forget()
        return True

    def wait(self) -> bool:
        """Do nothing: it is complete."""
        return True

    def in_use(self) -> bool:
        return self.kept  # the device is done with it, and the program might still wait

    def forget(self) -> None:
        """Leave it to torch, or to the code that has waited."""
        self.owner.unwaited.pop(self.key, None)
        self.tensor = None
        self.works = ()

    def only_holder(self) -> bool:
        """Return whether nothing else has a tensor of the storage, or the storage."""
        uses, references = self.count()
        return uses <= self.counted[0] and references <= self.counted[1]

    def count(self) -> tuple[int, int]:
        """Return how many references there are to the storage in C++, and in Python but for those of recorded uses.

        The first is asked twice, since another thread may exchange the one for the other meanwhile.
        """
        storage = self.storage
        uses = _torch.storage_use_count(self.key)
        # A recorded use waits until nothing else has the memory, which this is one of: each would wait for the other.
        references = getrefcount(storage) - len(self.queue.ledger.uses.by_storage.get(self.key, ()))
        return max(uses, _torch.storage_use_count(self.key)), references


class Functional:
    """The replacements, while the patch is on. ``changes`` has them by what they replace; none before torch 2.14."""

    def __init__(self) -> None:
        self.changes: dict[types.FunctionType, types.FunctionType] = {}
        self.unwaited: dict[int, Result] = {}  # by storage
        self.exiting: bool = False
        self._on = True
        self._taps: dict[int, tuple[weakref.ref[Any], Tap]] = {}  # by the id of a group
        self._open: dict[int, tuple[int, list[Any]]] = {}  # by the same: the call that is being made, and its thread
        self._replaced = _torch.Replaced()
        self._module: Any = _torch.functional_collectives() if COUNTED else None
        module = self._module
        if module is None:
            return
        self.wait_for: Callable[[torch.Tensor], object] = module.wait_tensor
        for name in (*NAMES, "wait_tensor"):
            original = vars(module).get(name)
            if original is not None and _torch.is_torchs(original):
                self.changes[original] = (self._waiting if name == "wait_tensor" else self._noting)(original)
                self._replaced.attribute(module, name, self.changes[original])
        atexit.register(self._exit)

    def remove(self) -> None:
        """Put torch's own back. What was dropped stays the ledger's, and the rest is torch's."""
        atexit.unregister(self._exit)
        self._on = False
        self._replaced.close()
        for result in list(self.unwaited.values()):
            if result.wrapper() is not None:
                result.forget()
        self._open.clear()
        for key in keys_of(self._taps):
            there = self._taps.pop(key, None)
            group = None if there is None else there[0]()
            if group is not None:
                group.unregister_post_hook(_ID)

    def _exit(self) -> None:
        # Neither a wait nor a hook outlives the interpreter: a function that C++ has then takes the process down.
        self.exiting = True
        self.remove()

    def _waiting(self, original: types.FunctionType) -> Any:
        """Return what stands in for ``wait_tensor``, which the wrapper calls too."""

        @functools.wraps(original)
        def wait_tensor(tensor: torch.Tensor) -> object:
            waited = original(tensor)
            if not is_compiling() and self.unwaited and type(tensor) is torch.Tensor:
                result = self.unwaited.get(_torch.cdata_of(tensor.untyped_storage()))
                if result is not None:
                    result.forget()
                    if result in result.queue.holds:
                        LEDGER.release(result)
            return waited

        return wait_tensor

    def _noting(self, original: types.FunctionType) -> Any:
        """Return what stands in for a functional collective."""
        place = list(inspect.signature(original).parameters).index("group")

        @functools.wraps(original)
        def collective(*args: object, **kwargs: object) -> object:
            if is_compiling() or not self._on:
                return original(*args, **kwargs)
            if LEDGER.nonempty:
                LEDGER.sweep()
            group = _group(args[place] if len(args) > place else kwargs.get("group"))
            # A mode or a transform would see what is done here, and may keep what it sees.
            seen = _torch.dispatch_modes() or _torch.transform() is not None or _torch.has_torch_function(1)
            # In a coalescing region a work may tell that it is complete before it has begun.
            if group is None or seen or group in _torch.open_regions():
                return original(*args, **kwargs)
            tap, key = self._tap(group), id(group)
            calls: list[Any] = []
            mine = threading.get_ident(), calls
            other = self._open.setdefault(key, mine)
            if other is not mine:
                if other[0] != mine[0]:
                    return original(*args, **kwargs)  # another thread is in a call, and its hook would be closed
                # One that an exception has left, or a call around this one, which is not noted then.
                self._open[key] = mine
            try:
                tap.__setstate__(_into(calls))
                made = original(*args, **kwargs)
            finally:
                whole = self._open.get(key) is mine
                if whole:
                    tap.__setstate__(_into(_HIDDEN))
                    self._open.pop(key, None)
            # The hook was open all the time, so the work of this call is among these; others may be other threads'.
            works = tuple(call.work for call in calls)
            if whole and works and None not in works and type(made) is self._module.AsyncCollectiveTensor:
                self._note(made, works, group, original.__name__, outside(("torch.", f"{__name__}.")))
            return made

        return collective

    def _tap(self, group: Any) -> Tap:
        """Return the hook of ``group``."""
        key = id(group)
        there = self._taps.get(key)
        if there is not None and there[0]() is group:
            return there[1]

        def gone(reference: object) -> None:
            there = self._taps.get(key)
            if there is not None and there[0] is reference:
                self._taps.pop(key, None)
                self._open.pop(key, None)

        tap: Tap = functools.partial(_HIDDEN.append)
        self._taps[key] = weakref.ref(group, gone), tap  # before it is on: what is on, has to be taken off at exit
        group.register_post_hook(_ID, tap)
        return tap

    def _note(
        self, wrapper: Any, works: tuple[Work, ...], group: ProcessGroup, op: str, frame: types.FrameType
    ) -> None:
        """Note what was launched, before the program has it."""
        tensor = wrapper.elem
        if type(tensor) is not torch.Tensor or tensor.requires_grad or (index := _torch.index_of(tensor)) < HOST:
            return
        if getrefcount(tensor) > HELD_ONCE + 1:  # the wrapper's, and the work's: a hook, say, has kept it
            return
        if index != HOST and capture_of(LEDGER.streams, LEDGER.current(index)):
            return  # the work is the graph's
        route = ROUTES.of(group, index, results=True)
        # The works of others are not known. gloo's are complete before their copies to a device are, and those
        # of its reduce-scatter not before the program has waited.
        if not (route.kind.direct and op != "reduce_scatter_single" if index == HOST else route.kind.stream_ordered):
            return
        result = Result()
        result.queue = route
        result.owner = self
        result.op = op
        result.code, result.instruction = frame.f_code, frame.f_lasti
        result.since = time.perf_counter()
        result.has_future = True  # that it is not waited for is no mistake, and is not logged
        result.works = works
        result.tensor = tensor
        result.alloc_stream = None
        result.storage = storage = tensor.untyped_storage()
        result.storages = (storage,)
        result.key = key = _torch.cdata_of(storage)
        del storage
        result.counted = result.count()
        wrapper.elem = tensor.detach()  # so that what comes of it counts, and is not taken for the work's
        result.wrapper = weakref.ref(wrapper, functools.partial(self._dropped, key))
        self.unwaited[key] = result

    def _dropped(self, key: int, _: Any) -> None:
        # In any thread, also within the garbage collector, so it only queues.
        result = self.unwaited.get(key)
        if result is not None:
            result.queue.holds[result] = None
            LEDGER.nonempty[result.queue] = None


def _group(group: object) -> ProcessGroup | None:
    """Return c10d's own group that ``group`` means, in any form that is given but a list; None for others."""
    try:
        if isinstance(group, str):
            group = _torch.group_named(group)
        elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
            group = group[0].get_group(group[1])
        elif isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
    except Exception:
        return None  # torch says itself what is wrong with it
    return group if type(group) is ProcessGroup else None
