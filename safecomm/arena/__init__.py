"""The arena: communication buffers out of one block that is allocated once.

``Arena`` takes the block, ``use_arena()`` says which arena calls and ``empty()`` take their buffers from. The
collectives, ``functional`` and all above them may import it; it imports the core. Begin with ``use``, then ``arena``,
which asks ``layout`` and ``size_class`` for a place.
"""

from safecomm.arena.arena import Arena as Arena
from safecomm.arena.stats import ArenaStats as ArenaStats
from safecomm.arena.stats import BucketStats as BucketStats
from safecomm.arena.use import empty as empty
from safecomm.arena.use import use_arena as use_arena
