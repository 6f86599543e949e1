"""avoid_record_streams(): no ``record_stream``, the program's or torch's own, makes memory pile up.

``record_stream`` tells the caching allocator that a tensor is used on another stream. When the tensor is freed, the
allocator keeps its memory back until the host happens to see that the stream has got there: memory piles up behind a
host that runs ahead, and inside a CUDA graph capture nothing is ever seen. Here each call becomes a reference that the
ledger holds, and gives back in an order that does not depend on the host.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch

from safecomm import _torch, arguments
from safecomm.arena.arena import OPEN
from safecomm.collectives.guards import PLAIN
from safecomm.core import captures
from safecomm.core.call_site import line_of, outside, place
from safecomm.core.ledger import LEDGER, Ledger
from safecomm.core.refcounts import COUNTED, WHY_NOT
from safecomm.core.streams import HOST, stream_object
from safecomm.errors import RecordStreamError
from safecomm.interception import replacing, stream_methods

log: logging.Logger = logging.getLogger("safecomm")

T = TypeVar("T")

Mode = Literal["convert", "raise", "warn", "count"]
Release = Literal["auto", "order", "defer"]


class _Site:
    """A call site of ``record_stream``, which is put into words when it is asked for."""

    __slots__ = ("code", "count", "instruction")

    def __init__(self, code: types.CodeType, instruction: int) -> None:
        self.code, self.instruction, self.count = code, instruction, 0


class avoid_record_streams(contextlib.ContextDecorator):  # noqa: N801
    """Inside of it, ``record_stream`` does not make memory pile up: Python's, Megatron's, a C++ extension's.

    ``mode="convert"`` guarantees for each call what ``record_stream`` guarantees, that the memory is not given out
    again before what runs on the stream by then is over, by holding it until nothing else refers to it and its
    allocation stream is ordered after that. Other modes leave ``record_stream`` as it is and look: ``"raise"``
    raises :class:`RecordStreamError` at each call, ``"warn"`` logs each call site once, ``"count"`` only counts.

    ``release`` is how converted memory comes back. ``"auto"``: when the allocation stream next waits for the other
    one, by ``wait_stream`` or an event, or once the device has passed that point, whatever comes first; that never
    delays a stream, so overlapped compute stays overlapped. Only when more than 1/64 of the device's memory has piled
    up, or in a CUDA graph capture, where nothing can be asked, the allocation stream is ordered. ``"order"`` does that
    always: memory that is the same in each run, and no overlap after the end of a tensor. ``"defer"`` never does it,
    except in a capture. Where references can't be counted, as in a free-threaded Python, nothing is converted, each
    call is torch's own, and one for memory of an arena raises :class:`RecordStreamError`.

    ``untyped_storage().resize_(0)`` frees memory whatever refers to it, so it is made safe before: by ordering the
    allocation stream, or with ``"defer"`` by torch's own ``record_stream``.

    Calls that go straight to the caching allocator, without the dispatcher, can't be converted (torch's own
    point-to-point does that; safecomm's does not let it). On leaving, the bytes that are freed but unusable because
    of them are logged; with ``strict`` they raise :class:`RecordStreamError`, with the place of the allocation if
    ``torch.cuda.memory._record_memory_history`` is on.

    For all threads, because backward runs in others; ``this_thread`` restricts it. Nests, the innermost counts. A
    decorator too. Leaving restores torch exactly, and hands what is still held over to the allocator's own keeping, but
    for memory of an arena, which stays held.

    Attributes, after or inside: ``calls`` (number of ``record_stream`` calls), ``sites`` (a Counter of their places so
    far), ``unusable`` (bytes freed but unusable that came up inside, known on leaving).

    Raises
    ------
    ValueError
        For an unknown mode or release.
    RecordStreamError
        See ``mode="raise"`` and ``strict``.
    SafecommError
        On entering, if ``SAFECOMM_REPLACE=0`` forbids it.

    Examples
    --------
    >>> with avoid_record_streams() as avoided:
    ...     pass
    >>> avoided.calls
    0
    """

    def __init__(
        self, mode: Mode = "convert", *, release: Release = "auto", this_thread: bool = False, strict: bool = False
    ) -> None:
        arguments.check("avoid_record_streams", arguments.one_of(get_args(Mode)), mode=mode)
        arguments.check("avoid_record_streams", arguments.one_of(get_args(Release)), release=release)
        arguments.check("avoid_record_streams", arguments.FLAG, this_thread=this_thread, strict=strict)
        self.mode: Mode = mode
        self.release: Release = release
        self.this_thread = this_thread
        self.strict = strict
        self.calls = 0
        self._sites: dict[tuple[int, int], _Site] = {}  # by the code object's address, as its hash takes long
        self._warned: set[str] = set()
        self.unusable: int = 0
        self._unusable_before = 0
        self._entered: list[object] = []

    @property
    def sites(self) -> Counter[str]:
        """The places of the ``record_stream`` calls so far, with the number of each."""
        sites: Counter[str] = Counter()
        for site in list(self._sites.values()):
            sites[line_of(site.code, site.instruction)] += site.count
        return sites

    def _note(self, code: types.CodeType, instruction: int) -> None:
        self.calls += 1
        key = id(code), instruction
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _Site(code, instruction)
        site.count += 1

    def _tell(self, frame: types.FrameType) -> None:
        """Raise or log that ``record_stream`` is called there, if that is what the mode is for."""
        if self.mode == "raise":
            raise RecordStreamError(
                f"record_stream() called at {place(frame)}, inside avoid_record_streams(mode='raise'). "
                "Keep the tensor until the stream that it was allocated on has waited for the other one."
            )
        if self.mode == "warn" and (where := place(frame)) not in self._warned:
            self._warned.add(where)
            log.warning("record_stream() called at %s (reported once for this line)", where)

    def _recreate_cm(self) -> avoid_record_streams:
        return avoid_record_streams(self.mode, release=self.release, this_thread=self.this_thread, strict=self.strict)

    def __enter__(self) -> avoid_record_streams:
        replacing.ask("avoid_record_streams()")
        self._unusable_before = _unusable()
        key = object()
        _SHARED.enter(key, (self, _thread.me if self.this_thread else None))
        self._entered.append(key)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._entered:
            raise RuntimeError("avoid_record_streams(): it was left, and had not been entered")
        _SHARED.leave(self._entered[-1])
        self._entered.pop()
        self.unusable = max(0, _unusable() - self._unusable_before)
        if self.unusable:
            what = f"{self.unusable} bytes are freed but unusable: {_blocks_awaiting_free()}"
            if self.strict and kind is None:
                raise RecordStreamError(what)
            log.warning("inside avoid_record_streams(): %s", what)

    def __repr__(self) -> str:
        where = "inside" if self._entered else "outside"
        told = f"{self.calls} calls of record_stream"
        if most := self.sites.most_common(1):
            told += f", {most[0][1]} of them from {most[0][0]}"
        if self.unusable:
            told += f", {self.unusable} bytes freed but unusable"
        return f"<avoid_record_streams(mode={self.mode!r}, release={self.release!r}): {where}, {told}>"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.me = object()


_thread = _Thread()


_SHARED = _torch.Shared(lambda replaced, _: _intercept().install(replaced))
"""Its users are the blocks that are open: each gave its context, and its thread if it is for that one alone."""


def policy() -> avoid_record_streams | None:
    """Return the innermost context that counts in this thread; None outside."""
    users: list[tuple[avoid_record_streams, object]] = list(_SHARED.users.values())
    if len(users) == 1 and users[0][1] is None:
        return users[0][0]
    everybodys = None
    for context, thread in reversed(users):
        if thread is _thread.me:
            return context
        if thread is None and everybodys is None:
            everybodys = context
    return everybodys


class _Interception:
    """What stands in torch's place while a block of ``avoid_record_streams()`` is open."""

    def __init__(self, ledger: Ledger, key: str, raw_stream: Callable[[torch.Stream], int] = _torch.raw_stream) -> None:
        self.ledger = ledger
        self._raw_stream = raw_stream
        self._raw_streams: dict[tuple[int, int], int] = {}
        self._key = key

    def install(self, replaced: _torch.Replaced) -> None:
        """Stand in torch's place until ``replaced`` is closed, and hand over what is held then."""

        def override(operator: str, ours: Callable[..., object], *, needs_original: bool = True) -> _torch.Override:
            made = _torch.Override(operator, self._key, ours, needs_original=needs_original)
            replaced.callback(made.remove)
            return made

        def replace(owner: type, name: str, around: Callable[[Any], object]) -> None:
            replaced.attribute(owner, name, around(getattr(owner, name)))

        replaced.callback(self._hand_over)
        # Where references are not counted, each call goes on to torch's kernel; torch 2.8 does not give that out.
        self._record_stream = override("aten::record_stream", self.record_stream, needs_original=not COUNTED)
        self._resize = override("aten::resize_", self.resize)
        # What compiled FSDP2 frees with.
        self._resize_storage = override("inductor::resize_storage_bytes_", self.resize_storage)
        replace(torch.UntypedStorage, "resize_", self._around_resize)
        # Where other code has replaced the method, its own is called, and the operator leads here.
        if COUNTED and "record_stream" not in vars(torch.Tensor):
            replace(torch.Tensor, "record_stream", self._around_record_stream)
        if self._resize.original is None:  # before torch 2.9; what C++ resizes there is not seen
            replace(torch.Tensor, "resize_", self._around_tensor_resize)
        replaced.callback(stream_methods.unsee, self)
        stream_methods.see(self, self.ledger)
        replaced.callback(captures.unwatch, self)
        captures.watch(self)

    def _hand_over(self) -> None:
        self.ledger.sweep(thorough=True)
        if "_record_stream" in vars(self) and self._record_stream.original is not None:
            self.ledger.uses.hand_over(_give)

    # --- record_stream ----------------------------------------------------------------------------------

    def _around_record_stream(
        self, original: Callable[[torch.Tensor, torch.Stream], None]
    ) -> Callable[[torch.Tensor, torch.Stream], None]:
        """Stand in for the method of tensors, without the dispatcher, where nothing would see the operator there."""

        @functools.wraps(original)
        def record_stream(tensor: torch.Tensor, s: torch.Stream) -> None:
            context = policy()
            if (
                context is not None  # else it was left, and other code has wrapped this
                and type(tensor) in plain
                and isinstance(s, stream_type)
                and is_here(tensor)
                and tensor.layout is strided
                and not (has_torch_function(tensor) or dispatch_modes() or profiler._is_profiler_enabled)
                and transform() is None
            ):
                try:
                    caller: types.FrameType | None = getframe(1)
                except ValueError:  # C calls, such as autograd in a thread of its own
                    caller = None
                record(tensor, s, caller or getframe(), context)  # as a local variable our frame would keep the tensor
            else:
                original(tensor, s)

        # In a program little of what a call touches is in the caches: each name that is looked up elsewhere counts.
        is_here: Callable[[torch.Tensor], bool] = operator.attrgetter(f"is_{self._key.lower()}")
        has_torch_function, dispatch_modes, profiler = _torch.has_torch_function, _torch.dispatch_modes, _torch.profiler
        transform, strided, plain, stream_type = _torch.transform, torch.strided, PLAIN, torch.Stream
        record, getframe = self._record, sys._getframe
        return record_stream

    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Stand in for the kernel of ``aten::record_stream``."""
        self._record(tensor, stream, _caller(), policy())

    def _record(
        self, tensor: torch.Tensor, stream: torch.Stream, frame: types.FrameType, context: avoid_record_streams | None
    ) -> None:
        original = self._record_stream.original
        if context is None:
            converts, release = original is None, "auto"
        else:
            context._note(frame.f_code, frame.f_lasti)
            converts, release = context.mode == "convert", context.release
            if not converts:
                context._tell(frame)
                converts = original is None
            elif not COUNTED and any(arena.owns(tensor) for arena in tuple(OPEN.values())):
                raise RecordStreamError(
                    f"record_stream() called at {place(frame)} for memory of an arena, which torch's does nothing for, "
                    f"and which can't be held until its last use, because {WHY_NOT}. Order the streams before the "
                    "buffer is dropped, or take ordinary memory. Nothing was done."
                )
        if not converts:
            original(tensor, stream)  # type: ignore[misc]
            return
        ledger, index = self.ledger, stream.device_index
        uses, raw = ledger.uses, self._raw(stream)
        if ledger.nonempty and not ledger.can_skip_sweep():
            ledger.sweep()
        storage = tensor.untyped_storage()
        # A stream of another device can't be ordered by torch's means; that is rare, and the allocator's matter.
        if _torch.index_of(tensor) in (index, HOST) and uses.record(storage, index, raw, frame, release):
            return
        if original is not None:
            original(tensor, stream)
        else:
            uses.record(storage, index, raw, frame, unordered=True)

    def _raw(self, stream: torch.Stream) -> int:
        key = (stream.stream_id, stream.device_index)
        raw = self._raw_streams.get(key)
        if raw is None:
            raw = self._raw_streams[key] = self._raw_stream(stream)
        return raw

    # --- what frees memory that is referred to ------------------------------------------------------------

    def _freeing(self, storage: torch.UntypedStorage) -> None:
        context = policy()
        order = context is None or context.release != "defer"
        for index, stream in self.ledger.uses.freeing(storage, order=order):
            if self._record_stream.original is not None:
                self._record_stream.original(_tensor_of(storage), stream_object(index, stream))
            else:  # the host can wait, if nothing else can
                stream_object(index, stream).synchronize()

    def _resized(self, storage: torch.UntypedStorage, resize: Callable[[], T]) -> T:
        """Call ``resize``, which may give ``storage`` other memory."""
        if _torch.cdata_of(storage) not in self.ledger.uses.by_storage:
            return resize()
        before = storage.data_ptr()
        self._freeing(storage)
        result = resize()
        if storage.data_ptr() != before:
            self.ledger.uses.freed(storage)
        return result

    def _around_resize(
        self, original: Callable[[torch.UntypedStorage, int], T]
    ) -> Callable[[torch.UntypedStorage, int], T]:
        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> T:
            if cdata_of(storage) not in recorded:
                return original(storage, size)
            return self._resized(storage, lambda: original(storage, size))

        recorded, cdata_of = self.ledger.uses.by_storage, _torch.cdata_of

        return resize_

    def _around_tensor_resize(self, original: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(original)
        def resize_(tensor: torch.Tensor, *size: object, **how: object) -> T:
            return self._resized(tensor.untyped_storage(), lambda: original(tensor, *size, **how))

        return resize_

    def resize(
        self, tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
    ) -> torch.Tensor:
        """Stand in for the kernel of ``aten::resize_``, which moves a tensor that does not fit to other memory."""

        def resize() -> Any:
            return self._resize.original(tensor, size, memory_format=memory_format)  # type: ignore[misc]

        storage = tensor.untyped_storage()
        if _torch.cdata_of(storage) not in self.ledger.uses.by_storage:
            return resize()  # type: ignore[no-any-return]
        needed = (math.prod(size) + tensor.storage_offset()) * tensor.element_size()
        return self._resized(storage, resize) if needed > storage.nbytes() else resize()  # type: ignore[no-any-return]

    def resize_storage(self, tensor: torch.Tensor, size: int) -> None:
        """Stand in for the kernel of ``inductor::resize_storage_bytes_``."""

        def resize() -> object:
            return self._resize_storage.original(tensor, size)  # type: ignore[misc]

        self._resized(tensor.untyped_storage(), resize)


def _intercept() -> _Interception:
    return _Interception(LEDGER, "CUDA")


def _caller() -> types.FrameType:
    """Return the innermost frame that is neither ours nor torch's dispatcher's."""
    return outside((f"{__name__}.", "torch._ops.", "torch.library."))


def _give(storage: torch.UntypedStorage, index: int, stream: int) -> None:
    """Have the allocator keep ``storage`` for ``stream``, as torch's own ``record_stream`` does."""
    _tensor_of(storage).record_stream(stream_object(index, stream))


def _tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unusable() -> int:
    """Return the bytes on all devices that are freed and that the allocator can't give out yet."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    found = 0
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        found += stats.get("active_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
    return found


def _blocks_awaiting_free(limit: int = 8) -> str:
    """Describe the largest of those, with the place of their allocation where torch has recorded it."""
    blocks = [
        block
        for segment in _torch.segments()
        for block in segment["blocks"]
        if block["state"] not in ("active_allocated", "inactive")
    ]
    blocks.sort(key=lambda block: -block["size"])
    described = []
    for block in blocks[:limit]:
        frames = [frame for frame in block.get("frames", ()) if frame["filename"].endswith(".py")]
        where = f" allocated at {frames[0]['filename']}:{frames[0]['line']}" if frames else ""
        described.append(f"{block['size']} bytes{where}")
    more = "; ..." if len(blocks) > limit else ""
    return ("; ".join(described) or "in blocks that are no longer there") + more
