"""Which tensors are plain: those that a direct call of a backend does with what the dispatcher's call would."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import Parameter

from safecomm import _torch
from safecomm.core.streams import HOST

PLAIN = frozenset({torch.Tensor, Parameter})
"""Tensor types that behave like tensors; a subclass may do anything, so it goes through c10d's own function."""

COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
"""What c10d passes on as pairs of real numbers."""

KINDS = 16
"""Kinds of tensors that are remembered of each number of them."""

_FP8 = frozenset(
    found
    for name in dir(torch)
    if name.startswith("float8_") and isinstance(found := getattr(torch, name), torch.dtype)
)


class Guards:
    """What the tensors of earlier direct calls on one device were like: the next call's will be like them.

    Each guard compares tensors with those of one call, in one call of C++; see ``_torch.look_alike``. It must not be
    asked about nested tensors.
    """

    __slots__ = ("_known", "guard1", "guard2", "guard2_before", "index")

    def __init__(self, index: int) -> None:
        self.index: int = index  # of the device that the tensors have to be on
        # The latest guard of one tensor, and of two. Of two there are two kinds at hand: sequence parallelism gathers
        # one and scatters another in turns.
        self.guard1: Callable[..., bool] = _torch.unlike
        self.guard2: Callable[..., bool] = _torch.unlike
        self.guard2_before: Callable[..., bool] = _torch.unlike
        self._known: dict[int, list[Callable[..., bool]]] = {}  # by the number of tensors

    def plain(self, *tensors: torch.Tensor) -> bool:
        """Return whether ``tensors`` are plain. Asked where the latest guards say no.

        The dispatcher does more with tensors that record a gradient, with negative views, nested and quantized tensors;
        c10d does with complex ones, and with small floats on older GPUs. gloo refuses to write to tensors of inference
        mode outside of it, which an alias of ours has to as well.
        """
        for guard in self._known.get(len(tensors), ()):
            if guard(*tensors):
                self._set_latest(guard, len(tensors))
                return True
        index = self.index
        for tensor in tensors:
            if (
                type(tensor) not in PLAIN
                or _torch.index_of(tensor) != index
                or tensor.dtype in COMPLEX
                or (index != HOST and tensor.dtype in _FP8 and torch.cuda.get_device_capability(index)[0] < 9)
                or tensor.dtype is not tensors[0].dtype
                or not _torch.has_plain_keys(tensor)
                or (tensor.requires_grad and torch.is_grad_enabled())
                or (index == HOST and tensor.is_inference() and not torch.is_inference_mode_enabled())
            ):
                return False
        if _torch.dispatch_modes() or _torch.transform() is not None:
            return False
        self._add(tensors)
        return True

    def all(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether ``tensors``, any number of them, are plain. No tensor given twice is like any."""
        for guard in self._known.get(len(tensors), ()):
            if guard(*tensors):
                return True
        return len(set(map(id, tensors))) == len(tensors) and self.plain(*tensors)

    def _add(self, tensors: tuple[torch.Tensor, ...]) -> None:
        guard = _torch.look_alike(*tensors)
        if any(tensor.requires_grad for tensor in tensors):  # the dispatcher does more where a gradient is recorded
            guard = _where_no_gradient_is_recorded(guard)
        count = len(tensors)
        self._known[count] = [guard, *self._known.get(count, ())][:KINDS]
        self._set_latest(guard, count)

    def _set_latest(self, guard: Callable[..., bool], count: int) -> None:
        if count == 1:
            self.guard1 = guard
        elif count == 2:
            self.guard2, self.guard2_before = guard, self.guard2


class ListGuards:
    """The lists that one way was found to do: whether tensors are like those of any, in one call of C++ for each."""

    def __init__(self) -> None:
        self._known: dict[int, list[Callable[..., bool]]] = {}  # by the number of tensors
        self._met: list[tuple[int, torch.Size, torch.dtype]] = []  # the last that were like none of them

    def match(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether ``tensors`` are like those of any list that is known. None of them may be nested."""
        for like in self._known.get(len(tensors), ()):  # noqa: SIM110 (a generator takes longer than the question)
            if like(*tensors):
                return True
        return False

    def add_guard(self, tensors: list[torch.Tensor]) -> None:
        """Know ``tensors`` from now on, if there were such ones already: to know lists that never come again costs."""
        kind = len(tensors), tensors[-1].shape, tensors[-1].dtype
        if kind not in self._met:
            self._met = [kind, *self._met[: KINDS - 1]]
        elif len({id(tensor) for tensor in tensors}) == len(tensors):  # nothing is like one tensor given twice
            known = self._known.get(len(tensors), [])
            self._known[len(tensors)] = [_torch.look_alike(*tensors, shaped=True), *known[: KINDS - 1]]


def _where_no_gradient_is_recorded(guard: Callable[..., bool]) -> Callable[..., bool]:
    recorded = torch.is_grad_enabled
    return lambda *tensors: not recorded() and guard(*tensors)
