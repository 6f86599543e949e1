"""The arena: communication buffers out of one block that is allocated once."""

from safecomm.arena.arena import Arena as Arena
from safecomm.arena.stats import ArenaStats as ArenaStats
from safecomm.arena.stats import BucketStats as BucketStats
from safecomm.arena.use import empty as empty
from safecomm.arena.use import use_arena as use_arena
