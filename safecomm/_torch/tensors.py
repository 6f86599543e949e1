"""What kind of tensor a tensor is: fake, plain, or like another one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from safecomm._torch.modes import inference_mode, probing
from safecomm._torch.names import NOT_DIRECT, look_up


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` only pretends to have memory."""
    subclasses = sys.modules.get("torch._subclasses.fake_tensor")
    return tensor.is_meta or (subclasses is not None and isinstance(tensor, subclasses.FakeTensor))


HOST, ELSEWHERE = -1, -2
"""The index of the host's memory, which no stream orders; and of a device that safecomm does not know, or of none."""


def index_of(tensor: torch.Tensor) -> int:
    """Return the index of the GPU that ``tensor`` is on; :data:`HOST` or :data:`ELSEWHERE` if it is on none.

    Each part of safecomm asks this question, and no other, of where a tensor is. The tests answer it with a simulated
    device, whose memory is the host's.
    """
    if type(tensor) is not torch.Tensor and is_fake(tensor):
        return ELSEWHERE
    if tensor.is_cuda:
        return tensor.get_device()
    return HOST if tensor.is_cpu else ELSEWHERE


def unlike(*_: object) -> bool:
    """Say that no tensors are like any."""
    return False


def look_alike(*tensors: torch.Tensor, shaped: bool = False) -> Callable[..., bool]:
    """Return a function that says whether as many other tensors are like ``tensors``, in one call of C++.

    The function is what Dynamo guards its graphs with. It compares the types, dtypes, devices, numbers of dimensions
    (``shaped``: shapes and strides), ``requires_grad`` and dispatch keys. The keys include those that the thread adds,
    but not those of ``FakeTensorMode`` (torch 2.13). Two arguments that are one tensor are like nothing. None may ask
    about a strided nested tensor, which takes the process down.
    """
    return unlike if _TensorGuards is None else _guards_of(_TensorGuards, tensors, shaped)


def _guards_of(kind: Any, tensors: Sequence[torch.Tensor], shaped: bool) -> Callable[..., bool]:
    sizes: list[list[int | None]] = [[*tensor.shape] if shaped else [None] * tensor.dim() for tensor in tensors]
    strides: list[list[int | None]] = [[*tensor.stride()] if shaped else [None] * tensor.dim() for tensor in tensors]
    check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _tell_apart(kind: Any) -> bool:
    with probing():
        one, other = torch.empty(2, device="cpu"), torch.empty(2, dtype=torch.int8, device="cpu")
        like, same = _guards_of(kind, [one], False), _guards_of(kind, [one], True)
        longer = torch.empty(3, device="cpu")
        return like(longer) is True and like(other) is False and same(longer) is False


def _plain_keys() -> frozenset[str]:
    found = set()
    for inference in (False, True):
        with probing(), torch.inference_mode(inference):
            found.add(str(_dispatch_keys(torch.empty(0, device="cpu"))))
    return frozenset(found)


def has_plain_keys(tensor: torch.Tensor) -> bool:
    """Return whether the dispatcher sees an ordinary tensor of the CPU or of CUDA; False if torch does not tell.

    An ordinary tensor is dense. It is no view that is written out first, no wrapper of a transform, and neither
    quantized nor nested nor named.
    """
    if _PLAIN_KEYS is None:
        return False
    keys: torch._C.DispatchKeySet = _dispatch_keys(tensor)
    number = keys.raw_repr() if _NUMBERED else None
    if number in _plain_numbers:
        return True
    found = str(keys).replace("CUDA", "CPU") in _PLAIN_KEYS
    if found and number is not None:
        _plain_numbers.add(number)
    return found


def _tells_devices(keys_of: Callable[[torch.Tensor], object]) -> bool:
    with probing():
        dense, other = torch.empty(0, device="cpu"), torch.empty(0, device="meta")
        return "CPU" in str(keys_of(dense)) and "CPU" not in str(keys_of(other))


def _is_numbered() -> bool:
    with probing():
        return type(_dispatch_keys(torch.empty(0, device="cpu")).raw_repr()) is int


_dispatch_keys: Any = look_up("torch._C._dispatch_keys", None, NOT_DIRECT, _tells_devices)
_PLAIN_KEYS = None if _dispatch_keys is None else _plain_keys()

_NUMBERED = _PLAIN_KEYS is not None and (
    look_up(
        "torch._C.DispatchKeySet.raw_repr", None, "a tensor of a kind not seen before takes a microsecond more",
        lambda _: _is_numbered(), since="2.5",
    ) is not None
)  # fmt: skip

_plain_numbers: set[int | None] = set()

_TensorGuards: Any = look_up(
    "torch._C._dynamo.guards.TensorGuards", None, "every call looks at its tensors one by one, 0.5 us more", _tell_apart
)


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def leave_empty(alias: torch.Tensor) -> None:
    """Take its memory from ``alias``, which c10d may keep until the group's next collective."""
    key = alias.dtype, alias.device
    empty = _EMPTY.get(key)
    if empty is None:
        with inference_mode(False):
            empty = torch.empty(0, dtype=alias.dtype, device=alias.device)
        if type(empty) is torch.Tensor and has_plain_keys(empty):  # and not a mode's
            _EMPTY[key] = empty
    alias.data = empty


def leave_all_empty(aliases: Iterable[torch.Tensor]) -> None:
    """Take their memory from ``aliases``, of which most are of one type and device."""
    like: torch.Tensor | None = None
    for alias in aliases:
        if like is None or alias.dtype is not like.dtype or alias.get_device() != like.get_device():
            leave_empty(alias)
            like = alias
        else:
            alias.data = like
