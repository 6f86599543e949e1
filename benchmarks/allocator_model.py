"""A model of torch's caching allocator: what it would have reserved, had some allocations not been made.

It replays the events of ``torch.cuda.memory._record_memory_history``: the smallest free block that is large enough is
split, blocks that are freed are merged with their free neighbours, and a new segment is taken where nothing fits. The
sizes at which that happens are torch's (c10/cuda/CUDACachingAllocator.cpp), without its options. Segments lie where
torch's lay, because between blocks of one size the lower address wins. Fed with all events of a run it reserves and
allocates what torch did, to the byte; ``megatron_buffers.py`` writes down whether it does.
"""

import bisect

SMALLEST = 512
MIB = 1 << 20
SMALL = MIB  # the largest request that goes to the pool of small blocks


def rounded(nbytes):
    """Return the bytes of a block for ``nbytes``."""
    return max(SMALLEST, -(-nbytes // SMALLEST) * SMALLEST)


class Block:
    """A part of a segment, with its neighbours."""

    def __init__(self, address, nbytes, pool):
        self.address, self.nbytes, self.pool = address, nbytes, pool
        self.free, self.before, self.after = True, None, None

    @property
    def key(self):
        return self.nbytes, self.address


class Allocator:
    """Torch's rules, over the ``segments``, of ``(address, bytes)``, that torch took."""

    def __init__(self, segments):
        self.segments = list(segments)
        self.first = []  # the first block of each segment
        self.pools = {}  # by stream, and whether for small blocks: the keys of the free blocks in order
        self.free_blocks = {}  # by pool and key
        self.reserved = self.allocated = 0

    def _add(self, block):
        block.free = True
        bisect.insort(self.pools[block.pool], block.key)
        self.free_blocks[block.pool, block.key] = block

    def _take(self, block):
        pool = self.pools[block.pool]
        del pool[bisect.bisect_left(pool, block.key)]
        del self.free_blocks[block.pool, block.key]
        block.free = False

    def _new_segment(self, nbytes, pool):
        size = 2 * MIB if nbytes <= SMALL else 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
        # Without some allocations the others come to their segments a little earlier or later: it may not be the next.
        place = next((place for place, (_, one) in enumerate(self.segments[:4]) if one == size), None)
        address = (1 << 60) + self.reserved if place is None else self.segments.pop(place)[0]
        self.reserved += size
        block = Block(address, size, pool)
        self.first.append(block)
        self._add(block)
        return block

    def allocate(self, nbytes, stream):
        """Return a block of at least ``nbytes``."""
        nbytes = rounded(nbytes)
        pool = stream, nbytes <= SMALL
        keys = self.pools.setdefault(pool, [])
        place = bisect.bisect_left(keys, (nbytes, 0))
        block = self.free_blocks[pool, keys[place]] if place < len(keys) else self._new_segment(nbytes, pool)
        self._take(block)
        rest = block.nbytes - nbytes
        if rest >= SMALLEST if pool[1] else rest > SMALL:
            behind = Block(block.address + nbytes, rest, pool)
            behind.before, behind.after, block.after, block.nbytes = block, block.after, behind, nbytes
            if behind.after is not None:
                behind.after.before = behind
            self._add(behind)
        self.allocated += block.nbytes
        return block

    def free(self, block):
        """Give ``block`` back, merged with the free blocks beside it."""
        self.allocated -= block.nbytes
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = self._merged(block.before)
        if block.after is not None and block.after.free:
            self._take(block.after)
            block = self._merged(block)
        self._add(block)

    @staticmethod
    def _merged(block):
        """Return ``block`` with the one behind it."""
        behind = block.after
        block.nbytes += behind.nbytes
        block.after = behind.after
        if block.after is not None:
            block.after.before = block
        return block

    def free_ranges(self):
        """Return the addresses, from and to, that are free now."""
        ranges = []
        for block in self.first:
            while block is not None:
                if block.free:
                    ranges.append((block.address, block.address + block.nbytes))
                block = block.after
        return ranges


class Replayed:
    """What a replay of ``events`` came to, in bytes.

    Parameters
    ----------
    events
        All that the allocator did: ``(action, address, bytes, stream, ...)``.
    since
        Count what is allocated from this allocation on. What is reserved is never given back.
    without
        The numbers of the allocations that are in memory beside the allocator's: as much as they take at once.

    Attributes
    ----------
    reserved, allocated
        The most of each, with what is beside.
    beside
        The most that was beside at once.
    free
        The addresses, from and to, that were free when the most was allocated.
    places, lives
        Of each allocation, by its number: its addresses; the number of allocations before it, and before it was freed.
    """

    def __init__(self, events, since=0, without=()):
        allocator = Allocator([(event[1], event[2]) for event in events if event[0] == "segment_alloc"])
        number = beside = self.beside = self.allocated = 0
        self.places, self.lives, self.free = {}, {}, []
        placed = {}
        for action, address, nbytes, stream, *_ in events:
            if action == "alloc":
                if number in without:
                    placed[address] = number, rounded(nbytes), None
                    beside += rounded(nbytes)
                    self.beside = max(self.beside, beside)
                else:
                    block = allocator.allocate(nbytes, stream)
                    placed[address] = number, 0, block
                    self.places[number] = block.address, block.address + block.nbytes
                self.lives[number] = number, None
                number += 1
                if number > since and allocator.allocated + beside > self.allocated:
                    self.allocated, self.free = allocator.allocated + beside, allocator.free_ranges()
            elif action == "free_completed" and address in placed:
                one, nbytes, block = placed.pop(address)
                self.lives[one] = one, number
                beside -= nbytes
                if block is not None:
                    allocator.free(block)
        self.reserved = allocator.reserved + self.beside
