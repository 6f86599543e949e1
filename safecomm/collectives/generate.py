"""Makes ``gates.py`` and its stub of ``gate.py.in`` and the table: ``python -m safecomm.collectives.generate``.

A gate is written out for each collective because every call of a function, and every look at an attribute of a row,
would be paid by every collective of a program. A test keeps the files what this makes.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

from safecomm.collectives.table import ROWS, Row

FOLDER = Path(__file__).parent

HEAD = '''"""All wrapped collectives but batches and ends of groups.

Made by ``python -m safecomm.collectives.generate`` of ``gate.py.in`` and ``table.py``, which are what to change.

A gate asks, in this order: whether something that is held may be over; whether a taker takes the call before the
backend does (``takers.py``); whether it is an ordinary call, of plain tensors on a group that has a route. Then it
launches, and holds. What is not ordinary goes the general way, which is c10d's own function with a hold around it; so
does a call that leaves its group to c10d where ranks are threads. The gates of lists are in ``lists.py``.
"""

# ruff: noqa: E501

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm import _torch
from safecomm.collectives import lists
from safecomm.collectives.general import (
    by_way_of,
    direct,
    forwarded,
    prepared,
    prepared_by_root,
    prepared_for_all,
    split_sizes,
)
from safecomm.collectives.holding import counter, wait_for
from safecomm.collectives.regions import REGIONS
from safecomm.collectives.routes import ROUTES, Route
from safecomm.collectives.table import ROWS
from safecomm.collectives.takers import BUCKETS, DECLINED, ENGINES, GENERAL, offer, splits
from safecomm.collectives.tensors import storages_of
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST
from safecomm.core.work import Work, waited_for_once

# Bound once: each of these is read on every call.
_compiling = torch.compiler.is_dynamo_compiling
_nonempty = LEDGER.nonempty
_can_skip_sweep = LEDGER.can_skip_sweep
_current = LEDGER.streams.current
_alloc_stream = LEDGER.streams.alloc_stream
_getframe = sys._getframe
_has_torch_function = _torch.has_torch_function
_groups = _torch.groups
_DEFAULT = _torch.DEFAULT
_names = _torch.c10d_vars
_WORLD = _torch.WORLD
_world = _torch.world
_routes = ROUTES.fast
_modes = _torch.dispatch_modes
_profiler = _torch.profiler
_inflight = _torch.inflight_as_graph_input
_HOOKS = _torch.HOOKS
_HERE = globals()


def _caller(frame: types.FrameType) -> types.FrameType:
    """Return the call site: what called us, or what called the earlier name that did."""
    return frame.f_back if frame.f_globals is _HERE and frame.f_back is not None else frame
'''

BEFORE = """
# --- ${key} ---

_row_${key} = ROWS["${key}"]
_name_${key} = _row_${key}.name
_c10d_${key} = getattr(c10d, _name_${key})
_count_${key} = counter(_name_${key})
_general_${key} = forwarded(_row_${key}, asks=False)
${prepared}


"""

AFTER = """

${key}${annotated} = direct(_${key}, _row_${key}, _launch_${key})
"""

EARLIER = """
if _name_${key} == "${alias}":
    ${alias}, ${key} = ${key}, None
else:
    # torch 2.13 and 2.14 warn of the earlier name; since 2.15 it is an alias that does not.
    _deprecated_${key} = getattr(getattr(c10d, "${alias}", None), "__deprecated__", None)

    def _${alias}(${signature}) -> object:
        if _deprecated_${key} is not None and not _compiling():
            warnings.warn(_deprecated_${key}, FutureWarning, stacklevel=2)
        return ${key}(${passed})

    ${alias} = by_way_of(_${alias}, _row_${key})
"""

GENERAL = """
${key} = forwarded(ROWS["${key}"])"""

LISTED = """
${key} = direct(lists.${key}, ROWS["${key}"], ROWS["${key}"].launch)"""

STUB = """# Made by ``python -m safecomm.collectives.generate``: what type checkers are told of ``gates.py``.
# ruff: noqa: E501

from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed.distributed_c10d as c10d

from safecomm.core.work import Work
"""

_TYPES = {
    "group": "c10d.ProcessGroup | None",
    "op": "c10d.ReduceOp | c10d.ReduceOp.RedOpType",
    "device_ids": "list[int] | None",
    "timeout": "timedelta | None",
    "async_op": "bool",
}


def _type_of(row: Row, name: str) -> str:
    """Return the type of the argument ``name`` of ``row``."""
    if name in _TYPES:
        return _TYPES[name]
    if name.endswith("split_sizes"):
        return "list[int] | None"
    if name not in row.tensors:
        return "int | None"
    if name.endswith("_lists"):
        return "list[list[torch.Tensor]]"
    if name in ("gather_list", "scatter_list"):
        return "list[torch.Tensor] | None"
    return "list[torch.Tensor]" if name.endswith(("_list", "tensors")) else "torch.Tensor"


def typed(row: Row) -> str:
    """Return what type checkers are told of ``row``: what an asynchronous call returns, and what a synchronous one."""
    optional = [*row.given, "group"]
    can_be_left_out = ("gather_list", "scatter_list", "gather_tensor")
    tensors = [f"{name}: {_type_of(row, name)}{' = ...' if name in can_be_left_out else ''}" for name in row.tensors]
    lefts = [f"{name}: {_type_of(row, name)} = ..." for name in optional]
    after = [f"{name}: {_type_of(row, name)} = ..." for name in row.last]
    handle = "torch.Future[Any]" if row.key.endswith("_coalesced") else "Work"
    forms = (
        ([*tensors, *lefts, "async_op: Literal[False] = ...", *after], "None"),
        ([*tensors, *lefts, "*", "async_op: Literal[True]", *after], handle),
        ([*tensors, *lefts, "async_op: bool = ...", *after], f"{handle} | None"),
    )
    return "".join(
        f"\n@overload\ndef {key}({', '.join(given)}) -> {back}: ..."
        for key in filter(None, (row.key, row.alias))
        for given, back in forms
    )


def gate(row: Row) -> str:
    """Return the gate of ``row``, and what it needs."""
    root = next((name for name in row.given if name in ("src", "dst")), "")
    splits = "output_split_sizes" in row.given
    arguments = [*row.tensors, *row.given, "group", "async_op", *row.last]
    defaults = {"op": "c10d.ReduceOp.SUM", "async_op": "False"}
    optional = arguments[len(row.tensors) :]
    operation = "op" if "op" in row.given else "None"
    to_takers = "splits(output_split_sizes, input_split_sizes)" if splits else operation
    if root:
        prepared = f"_launch_{row.key}, _options_{row.key} = prepared_by_root(_row_{row.key})"
        options = f"(options := _options_{row.key}(route, to, {root}, group_{root}, {operation}, async_op)) is None"
    elif "op" in row.given:
        prepared = f"_launch_{row.key}, _options_{row.key} = prepared(_row_{row.key}.launch)"
        options = f"(options := _options_{row.key}[async_op].get(id(op))) is None"
    else:
        prepared = f"_launch_{row.key}, _options_{row.key} = prepared_for_all(_row_{row.key}.launch)"
        options = f"(options := _options_{row.key}[async_op]) is None"
    if splits:
        options += " or (outputs := split_sizes(output_split_sizes)) is None"
        options += " or (inputs := split_sizes(input_split_sizes)) is None"
    frame = "_caller(_getframe(1))" if row.alias else "_getframe(1)"
    hold = f"return inner and route.hold(Work(), _name_{row.key}, inner, storages, alloc_stream, {frame})"
    if not row.pollable:
        hold = (
            "if not route.stream_ordered:\n"
            f"            route, work = route.unordered(to), waited_for_once()\n"
            f"            return inner and route.hold(work, _name_{row.key}, inner, storages, alloc_stream, {frame})\n"
            f"        {hold}"
        )
    if row.one:
        (tensor,) = row.tensors
        guards = f"route.guards.guard1({tensor})"
        written = f"[{tensor}]"
        # See tensors.host_alias.
        aliased = f"alias = {tensor} if route.stream_ordered or {tensor}.requires_grad else {tensor}.detach()"
        aliases = "[alias]"
    else:
        output, given = row.tensors
        assert output.startswith("output"), f"{row.key}: a gate of two tensors writes to the first"
        both = f"{output}, {given}"
        guards = f"route.guards.guard2({both}) or route.guards.guard2_before({both})"
        written = both
        aliased = (
            f"to_write, to_read = {both}\n"
            f"        if not (route.stream_ordered or {output}.requires_grad or {given}.requires_grad):\n"
            f"            to_write, to_read = {output}.detach(), {given}.data"
        )
        aliases = "to_write, to_read"
    tensors = ", ".join(row.tensors)
    more = ", outputs, inputs" if splits else ""
    holes = {
        "key": row.key,
        "alias": row.alias,
        "signature": ", ".join(
            [f"{name}: {_type_of(row, name)}" for name in row.tensors]
            + [f"{name}: {_type_of(row, name)} = {defaults.get(name, 'None')}" for name in optional]
        ),
        "passed": ", ".join(arguments),
        "named": ", ".join([*row.tensors, *[f"{name}={name}" for name in optional]]),
        "tensors": tensors,
        "op": to_takers,
        "not_nested": " and ".join(f"not {name}.is_nested" for name in reversed(row.tensors)),
        "guarded": f"{guards} or route.guards.plain({tensors})",
        "no_options": options,
        "pointers": ", ".join(f"{name}.data_ptr()" for name in row.tensors),
        "storages": ", ".join(f"{name}.untyped_storage()" for name in row.tensors),
        "aliased": aliased,
        "aliases": aliases + more,
        "held": hold,
        "launched": written + more,
        "frame": frame,
        "prepared": prepared,
        "annotated": ": Any" if row.alias else "",  # it may be None
    }
    body = (FOLDER / "gate.py.in").read_text().replace("def ${key}(", "def _${key}(")
    return "".join(Template(part).substitute(holes) for part in (BEFORE, body, AFTER, EARLIER if row.alias else ""))


_ROWS = [row for row in ROWS.values() if row.module == "gates"]


def gates() -> str:
    """Return the text of ``gates.py``."""
    public = [key for row in _ROWS for key in (row.key, row.alias) if key and not key.startswith("_")]
    names = "".join(f'    "{key}",\n' for key in sorted(public))
    gated = [gate(row) for row in _ROWS if not row.because]
    others = [
        Template(GENERAL if row.launch is None else LISTED).substitute(key=row.key) for row in _ROWS if row.because
    ]
    return "".join([HEAD, f"\n__all__ = [\n{names}]\n", *gated, "\n# --- the rest ---\n", *others, "\n"])


def stub() -> str:
    """Return the text of ``gates.pyi``."""
    return "".join([STUB, *map(typed, _ROWS), "\n"])


if __name__ == "__main__":
    (FOLDER / "gates.py").write_text(gates())
    (FOLDER / "gates.pyi").write_text(stub())
