"""What an arena tells of its use."""

from __future__ import annotations

from dataclasses import dataclass, field

from safecomm import _torch
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import Slot
from safecomm.core.refcounts import COUNTED, KEEPING


@dataclass(frozen=True)
class BucketStats:
    """One bucket of an arena. All sizes are bytes."""

    name: str
    """``""`` for what the named buckets leave."""
    capacity: int
    """The size of the bucket."""
    in_use: int
    """In slots that something refers to."""
    cached: int
    """In slots that nothing refers to and that wait for a request like the last."""
    high_water: int
    """The most that was in slots at once, in use or cached."""
    waste: int
    """In use, but not asked for: slots are aligned."""
    slots: int
    """Number of slots that something refers to."""
    largest_free: int
    """The largest request that would find room if all cached slots were freed."""


@dataclass(frozen=True)
class ArenaStats:
    """What :meth:`Arena.stats` returns. All sizes are bytes."""

    capacity: int
    """The size of the block."""
    in_use: int
    """In slots that something refers to."""
    high_water: int
    """The most that was in slots at once, in use or waiting for a request like the last."""
    waste: int
    """In use, but not asked for: slots are aligned."""
    captured: int
    """In use by CUDA graphs."""
    fallbacks: int
    """Number of requests that got ordinary memory."""
    fallback_bytes: int
    """Bytes of these requests."""
    enough: int
    """The capacity that has room for the requests until now: the block, and what did not fit and was needed at once.
    Places may lose a little more, which another run in an arena of this size tells."""
    buckets: tuple[BucketStats, ...] = field(default=())
    """Each bucket."""


def bucket_stats(layout: Layout) -> tuple[BucketStats, ...]:
    """Return what is in use of each bucket. The caller has the lock. Frees the idle slots."""
    used = layout.in_use()
    live = {name: free.live_bytes for name, free in layout.buckets.items()}  # before largest() frees idle slots
    found = []
    for name, free in layout.buckets.items():
        own = [slot for slot in used if slot.size_class.bucket == name]
        in_use = sum(slot.end - slot.start for slot in own)
        one = BucketStats(
            name=name,
            capacity=free.end - free.start,
            in_use=in_use,
            cached=live[name] - in_use,
            high_water=free.high_water,
            waste=in_use - sum(slot.asked for slot in own),
            slots=len(own),
            largest_free=layout.largest(name),
        )
        found.append(one)
    return tuple(found)


def lines_of(layout: Layout, buckets: tuple[BucketStats, ...], holders: dict[int, list[str]]) -> list[str]:
    """Return a line for each bucket, and below it one for each of its slots in use.

    Parameters
    ----------
    layout
        Where the slots are.
    buckets
        The figures of each bucket.
    holders
        The calls that hold memory, by its address.
    """
    lines = []
    for bucket in buckets:
        free = layout.buckets[bucket.name]
        lines.append(
            f"bucket {bucket.name or '(unnamed)'}, {free.start} to {free.end}: {bucket.in_use} bytes in "
            f"{bucket.slots} slots, {bucket.cached} cached, largest free {bucket.largest_free}"
        )
        for slot in layout.in_use():
            if slot.size_class.bucket == bucket.name:
                shape, dtype = slot.size_class.identity
                stream = slot.size_class.alloc_stream
                lines.append(
                    f"  {slot.start:>12} {slot.end - slot.start:>12}  {str(dtype).removeprefix('torch.')} "
                    f"{list(shape)}{'' if stream < 0 else f', stream {stream:#x}'}: "
                    f"{'; '.join(_holders(slot, holders)) or 'the program'}"
                )
    return lines


def _holders(slot: Slot, holders: dict[int, list[str]]) -> list[str]:
    """Return what is known to hold ``slot``, and which call asked for it."""
    found = [*holders.get(slot.pointer, ())]
    if len(_torch.KEPT.get(slot.cdata, ())) > KEEPING:
        found.append("a CUDA graph")
    tensors = _torch.storage_use_count(slot.cdata) - 2 if COUNTED else 0
    if tensors > 0:
        found.append(f"{tensors} tensors")
    if slot.site:
        found.append(f"asked for at {slot.site}")
    return found
