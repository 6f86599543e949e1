"""What a call is given: its tensors, their memory, and what stands in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from safecomm import _torch
from safecomm.collectives.guards import PLAIN
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST

_NOTHING = contextlib.nullcontext()
_index_of = _torch.index_of
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream
_all_allocated_on = LEDGER.streams.all_allocated_on


def storages_of(tensors: Iterable[torch.Tensor]) -> tuple[object, ...]:
    """Return what keeps the memory of ``tensors`` alive.

    Storages and not the tensors: ``t.data = ...`` leaves a held tensor with other memory (Megatron and DeepSpeed free
    that way). A subclass is made of other tensors, and those are what counts; it is held itself as well.
    """
    found: list[object] = []
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            found.append(tensor)
            if flatten := getattr(tensor, "__tensor_flatten__", None):
                names, _ = flatten()
                found.extend(storages_of([getattr(tensor, name) for name in names]))
                continue
        try:
            found.append(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # sparse
            found.append(tensor)
    return tuple(found)


def common_alloc_stream(index: int, storages: tuple[object, ...]) -> int | None:
    """Return the one stream of a device that all of ``storages`` were allocated on; None if it is not surely one."""
    pointers = [storage.data_ptr() for storage in storages if type(storage) is torch.UntypedStorage]
    if not pointers or len(pointers) < len(storages):
        return None
    if len(pointers) <= 2:
        return _alloc_stream(*pointers)
    stream = _current(index)
    return stream if _all_allocated_on(stream, sorted(pointers)) else None


def with_memory(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors``, with the tensors that a subclass is made of in its place."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if type(tensor) in PLAIN:
            found.append(tensor)
        elif flatten := getattr(tensor, "__tensor_flatten__", None):
            names, _ = flatten()
            found.extend(with_memory([getattr(tensor, name) for name in names]))
    return found


def flatten(arguments: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in arbitrarily nested lists and tuples."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from flatten(argument)


def all_on_current_stream(arguments: Iterable[torch.Tensor]) -> bool:
    """Return whether a synchronous call need hold none of these: on the CPU, or allocated on the current stream."""
    pointers = []
    index = HOST
    for argument in arguments:
        if type(argument) not in PLAIN:
            return False
        device = _index_of(argument)
        if device == HOST:
            continue
        if device < 0 or index not in (HOST, device) or argument.layout is not torch.strided:
            return False
        index = device
        pointers.append(argument.data_ptr())
    if len(pointers) <= 2:
        return not pointers or _alloc_stream(*pointers) == _current(index)
    return _all_allocated_on(_current(index), sorted(pointers))  # one question to the driver for each segment


def host_alias(argument: Any) -> Any:
    """Return what an asynchronous call is given in place of a CPU tensor, or of a list of them.

    gloo's threads look the memory up in the tensor when they come to it, so ``t.data = ...`` after the launch would
    have them use other memory, and gather then takes the process down (torch 2.13). NCCL gets addresses at the launch.

    The threads copy into most outputs, and autograd has to be told of that: an alias shares the tensor's version
    counter. Not for calls of which any tensor requires a gradient: there what they do is recorded, or raises.
    """
    if isinstance(argument, list):
        return [host_alias(one) for one in argument]
    if type(argument) is tuple:
        return tuple(map(host_alias, argument))
    if (
        type(argument) not in PLAIN
        or _index_of(argument) != HOST
        or argument.layout is not torch.strided
        or _torch.transform() is not None  # in a transform of torch.func, an alias would be without memory
    ):
        return argument
    with _torch.undisturbed() if _torch.dispatch_modes() else _NOTHING:  # a mode would see an operation more
        if argument.is_inference() and not torch.is_inference_mode_enabled():
            return argument.view_as(argument)  # what is detached there could be written to, which torch refuses
        return argument.detach()


def as_they_are(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether an asynchronous call is given ``tensors`` themselves; see :func:`host_alias`."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes longer than the question)
        if _index_of(tensor) != HOST or tensor.requires_grad:
            return True
    return False


def device_alias(argument: Any) -> Any:
    """Return what a send or receive is given in place of a tensor of a GPU.

    ProcessGroupNCCL calls the allocator's ``record_stream`` for each (torch 2.13), which does nothing for memory that
    the tensor does not own. The ledger holds it.
    """
    if type(argument) in PLAIN and _index_of(argument) >= 0 and argument.layout is torch.strided:
        return _torch.non_owning_alias(argument)
    return argument
