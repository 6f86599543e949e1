"""patch(), unpatch(), patched(): put safecomm in the place of ``torch.distributed``'s functions, and take it out."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from safecomm import _torch, arguments
from safecomm.core import captures
from safecomm.core.drain import drain, pending
from safecomm.interception import replacing, stream_methods
from safecomm.interception.record_stream import avoid_record_streams as _avoid_record_streams
from safecomm.patching import aliases
from safecomm.patching.functional import Functional
from safecomm.patching.megatron import Buffers
from safecomm.patching.strict import Strict
from safecomm.patching.table import MODULES, NAMES, ORIGINALS, REPLACEMENTS
from safecomm.patching.works import Works

log: logging.Logger = logging.getLogger("safecomm")

STRICT, AVOID = "SAFECOMM_STRICT", "SAFECOMM_AVOID_RECORD_STREAMS"

_lock = threading.RLock()

_MAYBE = arguments.is_a("True, False or None", bool, type(None))


class _State:
    """What the patch in force has done; None where it has not."""

    on = False
    replaced = _torch.Replaced()
    buffers: Buffers | None = None
    functional: Functional | None = None
    strict: Strict | None = None
    last_strict: Strict | None = None  # also when it is off again
    works: Works | None = None
    avoided: _avoid_record_streams | None = None


_state = _State()


def patch(*, strict: bool | None = None, avoid_record_streams: bool | None = None) -> None:
    """Let every ``torch.distributed`` call of the program be safecomm's, wherever it took the function from.

    Guarantees that ``torch.distributed.all_reduce`` and its siblings, also under the names that other modules, classes,
    default arguments, lists, dictionaries, closures and partials keep, run safecomm's, with its promises; and that
    :func:`unpatch` undoes it completely. What other code has replaced by a wrapper stays its own, and its inner call
    is ours. Call it at the top of a program, or late; before or after groups exist; from any thread, but not while
    another one is in the middle of a call.

    ``strict`` reports each call of a group that did not come by safecomm, with its call site (logger ``safecomm``, and
    :func:`bypassed`), from torch 2.14 on also those of C++, such as DTensor's and DDP's; it costs some us of each call.
    ``avoid_record_streams`` also opens ``avoid_record_streams()`` for as long as the patch is on. None: the environment
    variables ``SAFECOMM_STRICT`` and ``SAFECOMM_AVOID_RECORD_STREAMS`` decide (1 is yes).

    Each CUDA graph capture is seen, and owns what its collectives read and write (:class:`CapturedGraph`).
    Megatron's global buffers come from the arena in use, while there is one. :func:`destroy_process_group` raises
    neither LiveGraphError nor PendingWorkError, for which a program would have to be written: graphs are reset, and the
    memory of works that are not over is kept, with a warning.

    A second call does nothing, or adds what the first did not ask for.

    Raises
    ------
    ValueError
        If such a variable is neither 0 nor 1. Nothing is patched then.
    SafecommError
        If ``SAFECOMM_REPLACE=0`` forbids it.

    Examples
    --------
    >>> patch()
    >>> is_patched("all_reduce")
    True
    >>> unpatch()
    """
    replacing.ask("patch()")
    strict, avoid = wanted(strict, avoid_record_streams)
    with _lock, contextlib.ExitStack() as undo:
        undo.callback(_back_to, *_current())
        if not _state.on:
            _apply()
        if strict and _state.strict is None:
            _state.strict = _state.last_strict = Strict()
        if avoid and _state.avoided is None:
            avoided = _avoid_record_streams()
            avoided.__enter__()
            _state.avoided = avoided
        undo.pop_all()


def unpatch() -> None:
    """Undo :func:`patch`: every name is torch's again, in every module that had it.

    Also without a patch, the methods of ``torch.cuda.Event`` that are replaced from the first memory used on another
    stream are torch's again, until there is such memory anew. Works that are still pending stay held until they are
    over, and come back at ``drain()``.

    Examples
    --------
    >>> unpatch()
    """
    stream_methods.forget_uses()
    _back_to(on=False, strict=False, avoids=False)


@contextlib.contextmanager
def patched(*, strict: bool | None = None, avoid_record_streams: bool | None = None) -> Iterator[None]:
    """Patch inside of a ``with`` block, and leave the patch as it was before. See :func:`patch`.

    Examples
    --------
    >>> with patched():
    ...     is_patched("all_reduce")
    True
    """
    with _lock:
        before = _current()
        patch(strict=strict, avoid_record_streams=avoid_record_streams)
    try:
        yield
    finally:
        _back_to(*before)
        if not before[0]:
            stream_methods.forget_uses()


def _current() -> tuple[bool, bool, bool]:
    """Return what the patch in force does: whether it is on, strict, and avoids ``record_stream``."""
    return _state.on, _state.strict is not None, _state.avoided is not None


def _back_to(on: bool, strict: bool, avoids: bool) -> None:
    """Undo what the patch in force does beyond that."""
    with _lock:
        if not avoids and _state.avoided is not None:
            avoided, _state.avoided = _state.avoided, None
            avoided.__exit__(None, None, None)
        if not strict and _state.strict is not None:
            _state.strict.remove()
            _state.strict = None
        if not on and _state.on:
            _remove()


def is_patched(name: str | None = None) -> bool:
    """Return whether ``torch.distributed.<name>`` is safecomm's now; without a name, whether a patch is on.

    Raises ValueError for a name that ``torch.distributed`` does not have.

    Examples
    --------
    >>> is_patched("ReduceOp")
    False
    """
    if name is None:
        return _state.on
    arguments.check("is_patched", arguments.TEXT, name=name)
    if name not in NAMES and not hasattr(torch.distributed, name):
        raise ValueError(f"is_patched(name={arguments.shown(name)}): expected a name of torch.distributed")
    return name in REPLACEMENTS and all(vars(module).get(name) is REPLACEMENTS[name] for module in MODULES)


def original(name: str) -> Any:
    """Return torch's own ``torch.distributed.<name>``, patched or not.

    Raises
    ------
    AttributeError
        If ``torch.distributed`` has no such name.

    Examples
    --------
    >>> original("ReduceOp") is torch.distributed.ReduceOp
    True
    """
    arguments.check("original", arguments.TEXT, name=name)
    return ORIGINALS[name] if name in ORIGINALS else getattr(torch.distributed, name)


def bypassed() -> dict[str, int]:
    """Return the calls that bypassed safecomm while the last strict patch was on, by call site; empty without one.

    Examples
    --------
    >>> bypassed()
    {}
    """
    return dict(_state.last_strict.bypassed) if _state.last_strict is not None else {}


def strict() -> bool:
    """Return whether the patch in force is strict."""
    return _state.strict is not None


def was_strict() -> bool:
    """Return whether any patch of this process was strict."""
    return _state.last_strict is not None


def converted() -> int:
    """Return how many calls of ``record_stream`` the patch has seen."""
    return _state.avoided.calls if _state.avoided is not None else 0


def wanted(strict: bool | None, avoid_record_streams: bool | None) -> tuple[bool, bool]:
    """Return what :func:`patch` has to do, by its arguments or else by the variables; ValueError if these are wrong."""
    arguments.check("patch", _MAYBE, strict=strict, avoid_record_streams=avoid_record_streams)
    return (
        replacing.flag(STRICT, os.environ.get(STRICT, "0")) if strict is None else strict,
        replacing.flag(AVOID, os.environ.get(AVOID, "0")) if avoid_record_streams is None else avoid_record_streams,
    )


def _apply() -> None:
    _state.on = True
    version = _torch.versions.HERE
    if version < "2.8" and torch.distributed.is_initialized():
        log.warning("torch %s: groups that exist already call record_stream; patch before they are made", version)
    remaps = _collectives_that_dynamo_knows()
    for module in MODULES:
        for name, replacement in REPLACEMENTS.items():
            there = vars(module).get(name)
            if there is ORIGINALS[name]:
                _state.replaced.attribute(module, name, replacement)
            elif there is not None:
                log.info("%s.%s is %r already, and stays", module.__name__, name, there)
    for name, replacement in REPLACEMENTS.items():
        if ORIGINALS[name] in remaps:
            remaps[replacement] = remaps[ORIGINALS[name]]
    captures.set_tolerant(True)
    captures.watch(_state)
    _state.buffers = Buffers()
    _state.functional = Functional()
    functional = _state.functional.changes
    _state.works = Works()
    works = _state.works.changes
    changes = {ORIGINALS[name]: replacement for name, replacement in REPLACEMENTS.items()} | functional | works
    found = aliases.sweep(changes, (*_KEEP, functional, works))
    log.info(
        "patched %d functions of torch.distributed, %d functional ones, and %d aliases of them: %s",
        len(REPLACEMENTS),
        len(functional),
        len(found),
        ", ".join(found) or "none",
    )


def _remove() -> None:
    remaps = _collectives_that_dynamo_knows()
    for replacement in REPLACEMENTS.values():
        remaps.pop(replacement, None)
    _state.replaced.close()
    if _state.buffers is not None:
        _state.buffers.remove()
        _state.buffers = None
    _state.on = False
    captures.set_tolerant(False)
    captures.unwatch(_state)
    changes = {replacement: ORIGINALS[name] for name, replacement in REPLACEMENTS.items()}
    keep: tuple[object, ...] = _KEEP
    if _state.functional is not None:
        functional, _state.functional = _state.functional, None
        functional.remove()
        changes |= {replacement: original for original, replacement in functional.changes.items()}
        keep = (*keep, functional.changes)
    if _state.works is not None:
        works, _state.works = _state.works, None
        works.remove()
        changes |= {replacement: original for original, replacement in works.changes.items()}
        keep = (*keep, works.changes)
    aliases.sweep(changes, keep)
    drain()
    left = pending()
    log.info("unpatched%s", f"; {len(left)} works are still held, until drain() finds them over" if left else "")


_KEEP = (ORIGINALS, REPLACEMENTS)


def _collectives_that_dynamo_knows() -> dict[types.FunctionType, object]:
    """Return Dynamo's table of the functions that it has traceable forms of, which it finds by identity.

    Imported before anything is replaced, so that torch's own functions are what it starts with.
    """
    import torch.distributed._functional_collectives as functional

    return getattr(functional, "traceable_collective_remaps", {})
