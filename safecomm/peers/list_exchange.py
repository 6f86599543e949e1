"""List forms of a group with an engine: what a rank has for another goes from tensor to tensor.

c10d gathers a list into a flat buffer, and copies from there to each tensor; for a reduce_scatter it copies to such a
buffer first. Ranks that exchange the tensors themselves need neither: a gather writes to each tensor of the list where
that lies, and a reduce_scatter keeps what it receives, which is less than the buffer, only until it is added up.

NCCL sends that in one group of sends and receives, as ``all_to_all``. That is another call than c10d's: a rank that
makes the one would wait in vain for a rank that makes the other. So it is for groups whose ranks have agreed to do so.
What decides on it is the same on all ranks: the type, the bytes, the operation. How a rank's own list lies decides
only what that rank does with it.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from safecomm import _torch
from safecomm.arena.use import IN_USE
from safecomm.collectives.general import prepared_for_all
from safecomm.collectives.guards import PLAIN, ListGuards
from safecomm.core.streams import HOST

LARGEST = 1 << 30
"""Elements of a tensor of the list. The kernel counts in 32 bits."""

_launch, (_options, _) = prepared_for_all(_torch.all_to_all)


_READ, _WRITTEN = ListGuards(), (ListGuards(), ListGuards())
"""Lists that are read; lists that are written to, outside and inside of inference mode, of whose tensors ``like()``
inside of it can't tell others."""


def alike(pieces: object, tensor: torch.Tensor, rank: int, world: int, *, written: bool) -> bool:
    """Return whether ``pieces`` are ``world`` tensors like ``tensor``, and can be sent, or received, where they lie.

    Those that are ``written`` to must lie apart, because c10d writes to one after the other, and from ``tensor`` too,
    which a peer may still read while another's arrives; but this rank's own may be ``tensor`` itself. Where this is so,
    :func:`can_be_copied` is so too.
    """
    if (
        not isinstance(pieces, list)
        or len(pieces) != world
        or tensor.numel() > LARGEST
        or _torch.forward_ad._current_level >= 0  # which our copies don't know, and c10d's do
        or tensor.is_nested  # like() must not be asked
    ):
        return False
    for one in pieces:
        if type(one) is not torch.Tensor or one.is_nested:
            return False
    guards, together = _WRITTEN[torch.is_inference_mode_enabled()] if written else _READ, [*pieces, tensor]
    if not guards.match(together):
        if not _are_alike(pieces, tensor, written):
            return False
        guards.add_guard(together)
    nbytes, place = tensor.nbytes, tensor.data_ptr()
    places = [one.data_ptr() for one in pieces]
    if not nbytes or not all(places):
        return False
    return not written or (
        all(following - one >= nbytes for one, following in pairwise(sorted(places)))
        and all(abs(one - place) >= nbytes or (one == place and peer == rank) for peer, one in enumerate(places))
    )


def _are_alike(pieces: list[torch.Tensor], tensor: torch.Tensor, written: bool) -> bool:
    """Return whether ``pieces`` are like ``tensor``, and our copies do with them what c10d's would."""
    if not _torch.has_plain_keys(tensor) or tensor.requires_grad or not tensor.is_contiguous():
        return False
    shape, dtype, index = tensor.shape, tensor.dtype, _torch.index_of(tensor)
    fixed = written and not torch.is_inference_mode_enabled()
    return all(
        _torch.has_plain_keys(one)
        and one.shape == shape
        and one.dtype is dtype
        and _torch.index_of(one) == index
        and not one.requires_grad
        and one.is_contiguous()
        and not (fixed and one.is_inference())  # c10d raises when it copies
        for one in pieces
    )


def can_be_copied(pieces: object, tensor: torch.Tensor, world: int) -> bool:
    """Return whether ``pieces`` are as many tensors as there are ranks, with what ``tensor`` has, however they lie.

    The answer is the same on all ranks that make the same call.
    """
    return (
        isinstance(pieces, list)
        and len(pieces) == world
        and 0 < tensor.numel() <= LARGEST
        and all(
            isinstance(one, torch.Tensor)
            and one.layout is torch.strided
            and not one.is_nested
            and one.dtype is tensor.dtype
            and one.device == tensor.device
            and one.numel() == tensor.numel()
            and one.shape == pieces[0].shape  # else c10d makes a call of each
            for one in pieces
        )
    )


def gather(launcher: object, pieces: list[torch.Tensor], tensor: torch.Tensor, *, direct: bool) -> None:
    """Receive every rank's ``tensor`` in ``pieces``, in the order of the current stream.

    ``direct``: they are :func:`alike`. Else they are copied to, which does what c10d's copies do with any tensor.
    """
    if direct:
        _exchange(launcher, pieces, [tensor] * len(pieces))
        # As c10d's copies do, which tell autograd so.
        _torch.increment_versions([one for one in pieces if not one.is_inference()])
        return
    received = list(_staging((len(pieces), *tensor.shape), tensor).unbind())
    _exchange(launcher, received, [tensor] * len(pieces))
    for one, sent in zip(pieces, received, strict=True):
        one.copy_(sent.view(one.shape))


def scatter(
    launcher: object, pieces: list[torch.Tensor], output: torch.Tensor, rank: int, *, direct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Receive what the others have for this rank, in the order of the current stream.

    Returns this rank's own piece for itself, and those of the other ranks, in their order, in memory without gaps.
    """
    inputs = _as_they_lie(pieces, output, direct)
    own, others = inputs[rank], len(pieces) - 1
    received = _staging(output.shape if others == 1 else (others, *output.shape), output)
    outputs = [received] if others == 1 else list(received.unbind())
    outputs.insert(rank, own)  # to where it lies already, which NCCL leaves out
    _exchange(launcher, outputs, inputs)
    return apart(own, output), received


def readable(pieces: list[torch.Tensor], output: torch.Tensor, direct: bool) -> list[torch.Tensor]:
    """Return ``pieces`` for a kernel that reads them while it writes ``output``."""
    return [apart(one, output) for one in _as_they_lie(pieces, output, direct)]


def apart(piece: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return ``piece``, or a copy of it if writing ``output``, element by element, would overwrite others of it."""
    gap = piece.data_ptr() - output.data_ptr()
    return piece.clone() if gap and -output.nbytes < gap < output.nbytes else piece


def _as_they_lie(pieces: list[torch.Tensor], like: torch.Tensor, direct: bool) -> list[torch.Tensor]:
    """Return ``pieces``, with copies of those that have no memory of their own, or not in the order of the elements."""
    if direct:
        return pieces
    return [
        one.detach().view(like.shape)
        if type(one) in PLAIN and _torch.has_plain_keys(one) and one.is_contiguous()
        else like.new_empty(one.shape).copy_(one.detach()).view(like.shape)
        for one in pieces
    ]


def _exchange(launcher: object, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Send each of ``inputs`` to its rank, and receive ``outputs``."""
    work = _launch(launcher, outputs, inputs, _options)
    if work is not None:
        work.wait()


def _staging(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return memory for what is received: of the arena in use if that has room."""
    index = like.get_device()
    arena = IN_USE.get(index if index >= 0 else HOST)
    slot = arena.if_room(shape, like.dtype) if arena is not None else None
    return like.new_empty(shape) if slot is None else slot
