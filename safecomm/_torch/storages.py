"""Storages: who refers to one, when it dies, and storages over given memory."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from safecomm._torch.modes import probing
from safecomm._torch.names import look_up

_WITHOUT_COUNTS = "references are not counted: dropped handles go unnoticed, and record_stream stays torch's"


def _small_storage() -> torch.UntypedStorage:
    with probing():
        return torch.empty(4, dtype=torch.uint8, device="cpu").untyped_storage()


def _counts(count: Callable[[int], int]) -> bool:
    # The storage has a name, because torch reads what is at the address, and must not read what has been freed.
    storage = _small_storage()
    return type(count(cdata_of(storage))) is int


cdata_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""The address of the C++ side of a storage, which all Python objects of one storage share."""

if look_up("torch.UntypedStorage._cdata", None, _WITHOUT_COUNTS, lambda _: type(cdata_of(_small_storage())) is int):
    _storage_use_count: Callable[[int], int] | None = look_up(
        "torch._C._storage_Use_Count", None, _WITHOUT_COUNTS, _counts
    )
else:
    cdata_of, _storage_use_count = id, None

USE_COUNT = _storage_use_count is not None
"""Whether torch tells how many references to a storage there are in C++."""

storage_use_count: Callable[[int], int] = _storage_use_count or (lambda _: 0)
"""How many references in C++ there are to the storage at an address; 0, which means nothing, without ``USE_COUNT``."""


@functools.cache
def keeps_attributes() -> bool:
    """Return whether a storage has what was set on it for as long as it lives, also if Python does not refer to it."""
    try:
        with probing():
            tensor = torch.empty(4, dtype=torch.uint8, device="cpu")
            tensor.untyped_storage()._safecomm_tried = True  # type: ignore[attr-defined]
            return "_safecomm_tried" in vars(tensor.view(2, 2).untyped_storage())
    except (AttributeError, TypeError):
        return False


KEPT: dict[int, list[None]] = {}
"""Storages that something keeps for good without using them, by ``_cdata``: an item for each reference in Python.

Such a storage has one reference in C++. An arena keeps its slots so.
"""


def only_holder(storage: object) -> bool:
    """Return whether the caller's reference to ``storage`` is the only one left; False if torch does not say.

    References of what is :data:`KEPT` do not count.
    """
    if _storage_use_count is None or not isinstance(storage, torch.UntypedStorage):
        return False
    cdata = cdata_of(storage)
    return _storage_use_count(cdata) == (2 if cdata in KEPT else 1)


def _makes_storages(construct: Callable[[int, torch.device, int], torch.UntypedStorage]) -> bool:
    whole = _small_storage()
    with probing():
        made = construct(whole.data_ptr(), torch.device("cpu"), 4)
        return type(made) is torch.UntypedStorage and (made.data_ptr(), made.nbytes()) == (whole.data_ptr(), 4)


_construct_storage: Callable[[int, torch.device, int], torch.UntypedStorage] | None = look_up(
    "torch._C._construct_storage_from_data_pointer", None,
    "there is no Arena, and sends and receives on NCCL call record_stream", _makes_storages,
)  # fmt: skip

MAKES_STORAGES = _construct_storage is not None
"""Whether torch makes storages over given memory."""


class WeakStorage(Protocol):
    """A weak reference to a storage."""

    def expired(self) -> bool:
        """Return whether the storage has died."""


class _NeverDead:
    """A weak reference to a storage that never notices the storage's death."""

    def __init__(self, storage: object) -> None:
        pass

    def expired(self) -> bool:
        return False


def _notices_death(kind: Callable[[torch.UntypedStorage], WeakStorage]) -> bool:
    storage = _small_storage()
    weak = kind(storage)
    before = weak.expired()
    with probing():
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    del storage
    meanwhile = weak.expired()
    del tensor
    return (before, meanwhile, weak.expired()) == (False, False, True)


StorageWeakRef: Callable[[torch.UntypedStorage], WeakStorage] = look_up(
    "torch.multiprocessing.reductions.StorageWeakRef", _NeverDead,
    "stats().enough of an arena takes all that did not fit for needed at once, leaks.watch() may take one for another, "
    "and where references are not counted, an arena takes no buffer back",
    _notices_death,
)  # fmt: skip
"""A weak reference to a storage, whose ``expired()`` says whether the storage has died."""


def storage_over(pointer: int, device: torch.device, nbytes: int) -> torch.UntypedStorage | None:
    """Return a storage over memory that the storage does not own; None if torch can't make one."""
    return None if _construct_storage is None else _construct_storage(pointer, device, nbytes)


_SHARE = tuple(
    name
    for name in ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
    if look_up(
        f"torch.UntypedStorage.{name}", None, "memory of an arena must not be shared with other processes", callable
    ) is not None
)  # fmt: skip
"""The methods of a storage that every way of sharing a storage with other processes calls."""


def before_sharing(storage: torch.UntypedStorage, call: Callable[[torch.UntypedStorage], None]) -> None:
    """Have ``call`` called with ``storage`` each time before torch shares the storage with other processes.

    Sharing moves a storage of the CPU to other memory, under its tensors. A storage of a GPU stays where it is. If the
    memory is torch's own, torch keeps the storage until the other processes have released it.
    """
    for name in _SHARE:
        setattr(storage, name, functools.partial(_share, weakref.ref(storage), name, call))


def _share(
    reference: Callable[[], Any],
    name: str,
    call: Callable[[torch.UntypedStorage], None],
    *args: object,
    **kwargs: object,
) -> object:
    # The storage has this function as an attribute, so a strong reference would keep the storage alive without end.
    storage = reference()
    call(storage)
    return getattr(type(storage), name)(storage, *args, **kwargs)


def non_owning_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory whose storage does not own it; ``tensor`` itself if torch can't make one.

    The memory lives as long as the new tensor, because the tensor refers to the storage that owns the memory. The
    caching allocator's C++ ``recordStream``, which ProcessGroupNCCL calls for sends and receives, does nothing for
    memory whose deleter is not its own (https://github.com/pytorch/pytorch/pull/155854 proposed an option).
    """
    storage = tensor.untyped_storage()
    if _construct_storage is None or not storage.nbytes() or tensor.is_neg() or tensor.is_conj():
        return tensor
    same = _construct_storage(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
    # A handle gives out what it was given, by result() and by its future. Who keeps the tensor keeps the memory.
    alias._memory = storage  # type: ignore[attr-defined]
    return alias
