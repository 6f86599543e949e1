"""c10d's registry of groups: which groups there are, and what c10d knows of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm._torch.names import C10D, LACKING, exactly, look_up

REQUIRED = (f"{C10D}._world", f"{C10D}._world.pg_coalesce_state")
"""The names without which nothing works: without them it can't be told that a call is in a coalescing region, and
the call would count as complete before c10d launched it."""

WORLD = "_world"

c10d_vars: dict[str, Any] = c10d.__dict__
"""``c10d_vars[WORLD]`` is c10d's registry of groups for this thread: :data:`world`, but where ranks are threads.

Torch puts a registry in its place that has other groups in each thread (``_install_threaded_pg``), at any time.
"""

world: c10d._World = look_up(REQUIRED[0], None, "safecomm can't be imported", lambda found: True)
"""c10d's registry of groups, of the process."""

look_up(REQUIRED[1], None, "safecomm can't be imported", exactly(dict))

for _path in REQUIRED:
    if _path in LACKING:
        raise ImportError(
            f"safecomm can't work with torch {torch.__version__}: it needs {_path}, which {LACKING[_path]}. A newer "
            "safecomm may know what has taken its place."
        )


class _Asked(dict[str, Any]):
    """Stands in for the attributes of the registry: asks for the default group by its public name."""

    def __missing__(self, _: str) -> c10d.ProcessGroup | None:
        return c10d.GroupMember.WORLD


DEFAULT = "_default_pg"

look_up(f"{C10D}._world.{DEFAULT}", None, "each call asks c10d's property for the default group", lambda found: True)

groups: dict[str, Any] = vars(world) if DEFAULT in getattr(world, "__dict__", ()) else _Asked()
"""``groups[DEFAULT]`` is the process's default group, None before ``init_process_group``; see :func:`default_group`.

c10d's own property is a call of Python, and a lookup in this dict is none.
"""


def default_group() -> Any:
    """Return c10d's default group for this thread, None before ``init_process_group``."""
    return groups[DEFAULT] if c10d_vars[WORLD] is world else c10d_vars[WORLD].default_pg


def open_regions() -> dict[Any, list[Any]]:
    """Return c10d's table of the coalescing regions that are open, by group, for this thread."""
    return c10d_vars[WORLD].pg_coalesce_state  # type: ignore[no-any-return]


HOOKS = hasattr(c10d.ProcessGroup, "register_pre_hook")
"""Whether groups have hooks (torch 2.14 and later), which see the calls of a group and not those of its backend.

The hooks are described in https://github.com/pytorch/pytorch/issues/186300.
"""


def _of(table: str, group: object) -> Any:
    """Return what c10d's ``table`` of groups says of ``group``; None if there is no such table, or nothing in it."""
    found = getattr(c10d_vars[WORLD], table, None)
    return found.get(group) if isinstance(found, dict) else None


look_up(f"{C10D}._world.pg_names", None, "pending() shows no group", exactly(dict))

look_up(
    f"{C10D}._world.pg_map", None,
    "low_latency() leaves groups as they are, and patch(strict=True) sees only the default group", exactly(dict),
)  # fmt: skip


def all_groups() -> list[c10d.ProcessGroup]:
    """Return all groups of this process, or of this thread where ranks are threads; none if torch does not say."""
    found = getattr(c10d_vars[WORLD], "pg_map", None)
    return list(found) if isinstance(found, dict) else []


def group_name(group: object) -> str:
    """Return the name under which c10d knows ``group``; ``""`` if it does not."""
    return str(_of("pg_names", group) or "")


def store_of(group: object, prefix: str) -> Any:
    """Return a store that the ranks of ``group`` share, for keys of our own; None if torch does not give it out."""
    found = _of("pg_map", group)
    return None if found is None else c10d.PrefixStore(prefix, found[1])


_register_group: Any = look_up(
    f"{C10D}._register_process_group", None, "patch(strict=True) does not see groups that are made later"
)
"""What c10d calls with the name of each group that it makes, and the group."""


def on_each_group(call: Callable[[c10d.ProcessGroup], None]) -> Callable[[], None]:
    """Call ``call`` with each group that there is, and with each new one from now on; return what ends these calls.

    Without c10d's private name no new group is seen.
    """
    module: Any = c10d
    before = getattr(module, "_register_process_group", None)
    ended: list[bool] = []

    @functools.wraps(_register_group)
    def register(name: str, group: c10d.ProcessGroup) -> None:
        before(name, group)  # type: ignore[misc]
        if not ended:
            call(group)

    def end() -> None:
        ended.append(True)
        if getattr(module, "_register_process_group", None) is register:
            # Otherwise other code has replaced our function by another. That one still calls ours, and ours torch's.
            module._register_process_group = before

    if _register_group is not None:
        module._register_process_group = register
    for group in {*all_groups(), default_group()} - {None}:
        call(group)
    return end
