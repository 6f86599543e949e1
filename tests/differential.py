"""The same calls with torch.distributed and with safecomm, by chance, and all that can be seen of them compared (S8).

    python tests/differential.py --seed 1 --seconds 60      cases of a seed; each find prints the line that repeats it
    python tests/differential.py --seed 1 --only 17         one case, with all that differs
    python tests/differential.py --case '{"call": ...}'     one case as it was described
    python tests/differential.py --new --seconds 60         a new seed, which it prints; finds fail nothing

``--cases N`` ends after N cases, ``--world W`` runs on that many ranks (1, 2, 3). The exit status is 1 where something
was found.

A case is a dictionary that a seed and a number give, the same on all ranks. Every rank makes its tensors anew for each
side, with data of its own, calls, waits, and tells what it saw. What torch itself raises is compared, unless it fails
in a way that says nothing: a rank that dies or hangs, a group of which some ranks raise and some do not, or a broken
connection. Those are skipped, and the ranks are started anew. What differs is tried again in new ranks, each side
twice, and counts if torch does the same both times and safecomm does not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as stock
import torch.distributed.distributed_c10d as c10d
from calls import bits

import safecomm

Case = dict[str, Any]

TIMEOUT = 4
"""Seconds until gloo gives a call up. A case takes milliseconds."""

LIMIT = 12
"""Seconds until ranks that have said nothing count as hanging: two of gloo's time limits, and time for the rest."""

# --- cases ----------------------------------------------------------------------------------------------------

PAIRS_GATHER = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
PAIRS_SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
POINT_TO_POINT = ("send_recv", "isend_irecv", "batch")
CALLS = (
    "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "scatter", "gather", "all_to_all",
    "all_to_all_single", "all_gather_coalesced", "all_reduce_coalesced", "barrier", *PAIRS_GATHER, *PAIRS_SCATTER,
    *POINT_TO_POINT, "region",
)  # fmt: skip
# What is usual is there several times, so that most cases have few things that are not.
OPS = (
    *["SUM"] * 8, "MAX", "MIN", "PRODUCT", "AVG", "BAND", "BXOR", "PREMUL_SUM", "RedOpType", "string", "None",
)  # fmt: skip
DTYPES = (
    *["float32"] * 6, "float64", "float16", "bfloat16", "int32", "int64", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)  # fmt: skip
SHAPES = (*[[4]] * 6, [7], [3, 5], [2, 3, 2], [1], [0], [0, 3], [])
LAYOUTS = (*["contiguous"] * 8, "transposed", "strided", "offset", "expanded", "conj", "neg", "channels")
KINDS = (
    *["plain"] * 10, "leaf", "nonleaf", "parameter", "view of leaf", "inference", "sparse", "csr", "nested",
    "quantized", "meta", "subclass", "fake zero",
)  # fmt: skip
LIES = (*["apart"] * 5, "slices", "same", "overlapping", "in place")
ASYNC = ("False", "True", "True", "False", "1", "0", "None", "numpy True", "numpy False", "left out")
GROUPS = (*["None"] * 8, "left out", "world", "all", "one", "last", "own", "pair", "non-member", "string", "number")
WRONG = (
    *["nothing"] * 14, "None", "number", "string", "list", "missing", "extra", "odd", "dtype", "size", "device",
    "tuple", "short", "long", "empty", "iterator", "an element",
)  # fmt: skip
ROOTS = (*["first"] * 4, "last", "group", "bad", "negative", "both", "None")
CONTEXTS = (
    *["none"] * 8, "bucketed", "bucketed", "arena", "bucketed and arena", "avoid_record_streams", "patched",
)  # fmt: skip


ORDINARY: Case = {
    "call": "all_reduce", "dtype": "float32", "shape": [4], "layout": "contiguous", "kind": "plain", "which": "all",
    "lie": "apart", "async": "False", "mode": "grad", "op": "SUM", "group": "None", "root": "first", "wrong": "nothing",
    "place": 0, "style": "mixed", "context": "none", "times": 1, "values": "plain", "asks": "wait",
    "body": "all_reduce", "inner": "same",
}  # fmt: skip
"""The case that nothing is unusual in: what a description leaves out."""


def make(seed: int, number: int) -> Case:
    """Return the case ``number`` of a seed."""
    dice = random.Random(f"{seed} {number}")
    case = {
        "call": dice.choice([name for name in CALLS if hasattr(c10d, name) or name in (*POINT_TO_POINT, "region")]),
        "dtype": dice.choice(DTYPES),
        "shape": dice.choice(SHAPES),
        "layout": dice.choice(LAYOUTS),
        "kind": dice.choice(KINDS),
        "which": dice.choice(["all", "written", "read"]),
        "lie": dice.choice(LIES),
        "async": dice.choice(ASYNC),
        "mode": dice.choice(["grad"] * 4 + ["no_grad", "inference"]),
        "op": dice.choice(OPS),
        "group": dice.choice(GROUPS),
        "root": dice.choice(ROOTS),
        "wrong": dice.choice(WRONG),
        "place": dice.randrange(2),
        "style": dice.choice(["positional", "keyword", "mixed"]),
        "context": dice.choice(CONTEXTS),
        "times": dice.choice([1, 1, 1, 2, 3]),
        "values": dice.choice(["plain"] * 4 + ["odd"]),
        "asks": dice.choice(["wait", "wait", "future", "twice", "timeout"]),
        "body": dice.choice(["all_reduce", "all_reduce", "gather", "scatter", "mixed", "none", "broadcast"]),
        "inner": dice.choice(["same", "False", "True", "left out"]),
    }
    if case["call"] in POINT_TO_POINT and case["group"] in ("one", "last", "own"):
        case["group"] = "all"  # with oneself there is nothing to exchange, and some of it hangs
    if case["shape"] == [] and ("scatter" in case["call"] or case["body"] == "scatter"):
        case["shape"] = [4]  # gloo ends the process
    return case


# --- known differences ----------------------------------------------------------------------------------------

_OUTSIDE = ("one", "last", "own", "pair", "non-member", "string", "number")
_GRADIENTS = ("leaf", "nonleaf", "parameter", "view of leaf")


def _is_asynchronous(case: Case) -> bool:
    return case["async"] in ("True", "1", "numpy True") or case["call"] == "isend_irecv"


_LIMITS = "docs/limits.md: "

KNOWN = [
    (
        _LIMITS + "gloo is given aliases, and its results are those, which are no parameters",
        lambda case, label: "whose" in label or (case["kind"] == "parameter" and label.endswith(("result", "future"))),
    ),
    (
        _LIMITS + "of two things that are wrong the other is told: a group that is none, given by position",
        lambda case, label: (
            label.endswith("call") and case["style"] == "positional" and case["group"] in ("string", "number")
        ),
    ),
    (
        _LIMITS + "of two things that are wrong the other is told: an argument, and the group or the rank",
        lambda case, label: (
            label.endswith("call") and case["wrong"] != "nothing" and case["group"] in _OUTSIDE
        ),
    ),
    (
        _LIMITS + "of two things that are wrong the other is told: the arguments, of a deprecated function",
        lambda case, label: label == "warnings" and (case["wrong"] != "nothing" or case["_raises"]),
    ),
    (
        _LIMITS + "gloo's reduce_scatter copies its result at each wait, and safecomm waits for it once",
        lambda case, _: case["asks"] == "twice" and _is_asynchronous(case) and "scatter" in case["call"],
    ),
    (
        "the alias of a tensor that has no memory is another kind of tensor, and the error names it",
        lambda case, label: case["kind"] == "fake zero" and _is_asynchronous(case) and label.startswith("call"),
    ),
    (
        "torch makes the output part of a graph while gloo's thread copies into it, and that raises or not by chance",
        lambda case, _: case["call"] in PAIRS_GATHER and case["kind"] in _GRADIENTS and case["which"] != "written",
    ),
    (
        "a send whose receive raised has no end, so it is held until its group is destroyed (docs/contract.md, S3)",
        lambda case, label: label == "held" and case["_raises"] and case["call"] in POINT_TO_POINT,
    ),
    (
        "bucketed(): the copies out of a bucket are made also where autograd would have a word to say of the outputs",
        lambda case, _: "bucketed" in case["context"] and case["kind"] in (*_GRADIENTS, "inference"),
    ),
    (
        "bucketed(): an output whose elements share memory can't be copied to, which torch refuses",
        lambda case, _: "bucketed" in case["context"] and case["layout"] == "expanded",
    ),
    (
        "bucketed(): the copies out of a bucket count as changes in place, also where the collective's own do not",
        lambda case, label: "bucketed" in case["context"] and label.startswith(("version", "backward")),
    ),
    (
        "bucketed(): calls are launched at the end, where wrong ones raise, and others of the block have not run then",
        lambda case, label: (
            "bucketed" in case["context"] and case["_raises"]
            and (
                re.search(r"call \d+: kind", label)
                or label == "warnings"
                or (case["times"] > 1 and label.startswith(("call", "bits")))
            )
        ),
    ),
]  # fmt: skip
"""What is documented to differ: why, and whether a case's label is of that kind."""


def known(case: Case, label: str) -> bool:
    return any(of(case, label) for _, of in KNOWN)


# --- in the ranks: tensors --------------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


class _Odd:
    """No tensor, with attributes that raise."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        return "odd"


class Tensors:
    """Makes the tensors of a case, and knows them all, in their order."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.made: list[torch.Tensor] = []
        self.count = 0

    def one(self, shape: list[int], *, written: bool) -> torch.Tensor:
        """Return a new tensor of ``shape``, of the case's kind."""
        case = self.case
        dtype = getattr(torch, case["dtype"])
        if case["wrong"] == "dtype" and not written:
            dtype = torch.float64 if dtype is not torch.float64 else torch.float32
        if case["wrong"] == "size" and not written and shape:
            shape = [*shape[:-1], shape[-1] + 1]
        special = case["which"] == "all" or (case["which"] == "written") == written
        tensor = self._laid(shape, dtype, case["layout"] if special else "contiguous")
        tensor = self._of_kind(tensor, case["kind"] if special else "plain")
        if case["wrong"] == "device" and written:
            tensor = tensor.to("meta")
        self.made.append(tensor)
        return tensor

    def several(self, count: int, shape: list[int], *, written: bool) -> Any:
        """Return a list of ``count`` tensors, which lie as the case says, or not the list that is wanted."""
        case, wrong = self.case, self.case["wrong"]
        count = max(count + {"short": -1, "long": 1}.get(wrong, 0), 0) if wrong != "empty" else 0
        lie = case["lie"] if case["kind"] in ("plain", "leaf", "inference", "parameter") else "apart"
        if lie == "slices" and shape and count and shape[0]:
            found = list(self.one([shape[0] * count, *shape[1:]], written=written).chunk(count))
        elif lie == "same" and count:
            found = [self.one(shape, written=written)] * count
        elif lie == "overlapping" and shape and count and len(shape) == 1:
            whole = self.one([shape[0] + count], written=written)
            found = [whole[place : place + shape[0]] for place in range(count)]
        else:
            found = [self.one(shape, written=written) for _ in range(count)]
        if lie in ("slices", "overlapping"):
            self.made.extend(found)
        if wrong == "an element" and found:
            found[-1] = None
        return {"tuple": tuple, "iterator": iter}.get(wrong, list)(found)

    def _laid(self, shape: list[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
        if layout == "transposed" and len(shape) > 1:
            return self._filled(shape[::-1], dtype).permute(*reversed(range(len(shape))))
        if layout == "strided" and shape:
            return self._filled([*shape[:-1], shape[-1] * 2], dtype)[..., ::2]
        if layout == "offset" and shape:
            return self._filled([shape[0] + 3, *shape[1:]], dtype)[3:]
        if layout == "expanded" and shape:
            return self._filled([*shape[:-1], 1], dtype).expand(shape)
        if layout == "conj" and dtype.is_complex:
            return self._filled(shape, dtype).conj()
        if layout == "neg" and dtype in (torch.float32, torch.float64):
            return self._filled(shape, torch.complex64 if dtype is torch.float32 else torch.complex128).conj().imag
        if layout == "channels" and len(shape) == 3:
            return self._filled([1, *shape], dtype).to(memory_format=torch.channels_last)[0]
        return self._filled(shape, dtype)

    def _filled(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        self.count += 1
        room = torch.zeros(shape, dtype=dtype)
        count = torch.arange(room.numel(), dtype=torch.float64).reshape(room.shape)
        values = (count * 1.37 + self.count * 3.1 + self.rank * 5.7 + 0.3) % 11
        if dtype is torch.bool:
            return room.copy_(values > 5)
        if dtype.is_complex:
            return room.copy_(torch.complex(values, 11 - values))
        room.copy_(values)
        if self.case["values"] == "odd" and dtype.is_floating_point and room.numel() > 2:
            room.view(-1)[0], room.view(-1)[1], room.view(-1)[2] = float("nan"), float("inf"), -0.0
        return room

    def _of_kind(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        real = tensor.is_floating_point() or tensor.is_complex()
        if kind == "leaf" and real:
            return tensor.requires_grad_()
        if kind == "nonleaf" and real:
            return tensor.requires_grad_() * 1
        if kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=real)
        if kind == "view of leaf" and real:
            return tensor.requires_grad_()[...]
        if kind == "inference":
            with torch.inference_mode():
                return tensor.clone()
        if kind == "sparse" and tensor.dim():
            return tensor.to_sparse()
        if kind == "csr" and tensor.dim() == 2:
            return tensor.to_sparse_csr()
        if kind == "nested" and tensor.dim():
            return torch.nested.nested_tensor([tensor, tensor])
        if kind == "quantized" and tensor.dtype is torch.float32:
            return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
        if kind == "meta":
            return tensor.to("meta")
        if kind == "subclass":
            return tensor.as_subclass(_Subclass)
        if kind == "fake zero" and real:
            return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)
        return tensor


# --- in the ranks: calls ----------------------------------------------------------------------------------------

_LEFT_OUT = object()
_groups: dict[str, Any] = {}


def _make_groups() -> None:
    """Make the groups that cases use; every rank makes all of them, in this order."""
    world, rank = stock.get_world_size(), stock.get_rank()
    _groups.update({"None": None, "left out": _LEFT_OUT, "world": stock.group.WORLD, "string": "group", "number": 3})
    _groups["all"] = stock.new_group(list(range(world)))
    _groups["one"], _groups["last"] = stock.new_group([0]), stock.new_group([world - 1])
    _groups["own"] = [stock.new_group([one]) for one in range(world)][rank]
    _groups["pair"] = stock.new_group(sorted({0, world - 1}))
    _groups["non-member"] = stock.GroupMember.NON_GROUP_MEMBER


def _members(case: Case) -> list[int]:
    world = stock.get_world_size()
    return {
        "one": [0],
        "last": [world - 1],
        "own": [stock.get_rank()],
        "pair": sorted({0, world - 1}),
    }.get(case["group"], list(range(world)))


def _flag(word: str) -> Any:
    if word.startswith("numpy"):
        import numpy

        return numpy.bool_(word.endswith("True"))
    return {"True": True, "False": False, "1": 1, "0": 0, "None": None, "left out": _LEFT_OUT}[word]


def _operation(word: str) -> Any:
    if word == "PREMUL_SUM":
        return c10d._make_nccl_premul_sum(2.0)
    if word == "RedOpType":
        return stock.ReduceOp(stock.ReduceOp.RedOpType.SUM)
    return {"string": "sum", "None": None}[word] if word in ("string", "None") else getattr(stock.ReduceOp, word)


def _root(case: Case, name: str, members: list[int]) -> dict[str, Any]:
    word = case["root"]
    ranks = {"first": members[0], "last": members[-1], "bad": 99, "negative": -1, "None": None}
    if word in ranks:
        return {name: ranks[word]}
    return {f"group_{name}": len(members) - 1} if word == "group" else {name: members[0], f"group_{name}": 0}


def _is_root(case: Case, members: list[int]) -> bool:
    return stock.get_rank() == members[-1 if case["root"] in ("last", "group") else 0]


def _arguments(case: Case, name: str, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors that ``name`` is called with and its other arguments, by name."""
    members, shape = _members(case), list(case["shape"])
    size = len(members)
    large = [shape[0] * size, *shape[1:]] if shape else [size]
    given: dict[str, Any]
    more: dict[str, Any] = {"group": _groups[case["group"]], "async_op": _flag(case["async"])}
    if name == "all_reduce":
        given = {"tensor": tensors.one(shape, written=True)}
    elif name == "all_reduce_coalesced":
        given = {"tensors": tensors.several(2, shape, written=True)}
    elif name in ("reduce", "broadcast"):
        given = {"tensor": tensors.one(shape, written=True)}
        more |= _root(case, "dst" if name == "reduce" else "src", members)
    elif name in PAIRS_GATHER:
        output = tensors.one(large, written=True)
        place = stock.get_rank() if stock.get_rank() < size else 0
        if case["lie"] == "in place" and shape and shape[0] and case["kind"] not in ("sparse", "csr", "nested"):
            tensor = output.chunk(size)[place]
        else:
            tensor = tensors.one(shape, written=False)
        given = {"output_tensor": output, "input_tensor": tensor}
    elif name in PAIRS_SCATTER:
        given = {"output": tensors.one(shape, written=True), "input": tensors.one(large, written=False)}
    elif name == "all_gather":
        given = {"tensor_list": tensors.several(size, shape, written=True)}
        in_place = case["lie"] == "in place" and isinstance(given["tensor_list"], list) and given["tensor_list"]
        given["tensor"] = given["tensor_list"][0] if in_place else tensors.one(shape, written=False)
    elif name == "reduce_scatter":
        given = {
            "output": tensors.one(shape, written=True),
            "input_list": tensors.several(size, shape, written=False),
        }
    elif name == "all_to_all":
        given = {
            "output_tensor_list": tensors.several(size, shape, written=True),
            "input_tensor_list": tensors.several(size, shape, written=False),
        }
    elif name == "all_to_all_single":
        given = {"output": tensors.one(large, written=True), "input": tensors.one(large, written=False)}
    elif name == "all_gather_coalesced":
        given = {
            "output_tensor_lists": [tensors.several(2, shape, written=True) for _ in range(size)],
            "input_tensor_list": tensors.several(2, shape, written=False),
        }
    elif name == "gather":
        given = {"tensor": tensors.one(shape, written=False)}
        lists = tensors.several(size, shape, written=True)
        given["gather_list"] = lists if _is_root(case, members) else None
        more |= _root(case, "dst", members)
    elif name == "scatter":
        given = {"tensor": tensors.one(shape, written=True)}
        lists = tensors.several(size, shape, written=False)
        given["scatter_list"] = lists if _is_root(case, members) else None
        more |= _root(case, "src", members)
    elif name == "barrier":
        given = {}
    else:
        raise AssertionError(name)
    if name.startswith(("reduce", "all_reduce")):
        more["op"] = _operation(case["op"])
    more = {key: value for key, value in more.items() if value is not _LEFT_OUT}
    _spoil(case, given, more)
    return given, more


def _spoil(case: Case, given: dict[str, Any], more: dict[str, Any]) -> None:
    """Make one argument wrong, if the case says so, the same one on all ranks."""
    wrong = case["wrong"]
    if wrong == "extra":
        more["nonsense"] = 1
    if not given:
        return
    name = list(given)[case["place"] % len(given)]
    if wrong == "missing":
        del given[name]
    elif wrong in ("None", "number", "string", "odd", "list"):
        things = {"None": None, "number": 3, "string": "tensor", "odd": _Odd(), "list": [given[name]]}
        given[name] = things[wrong]


def _invoke(case: Case, function: Any, name: str, given: dict[str, Any], more: dict[str, Any]) -> Any:
    if case["style"] == "keyword" or case["wrong"] == "missing":
        return function(**given, **more)
    if case["style"] == "positional":
        signature = inspect.signature(getattr(c10d, name))
        with contextlib.suppress(TypeError):
            bound = signature.bind(**given, **more)
            return function(*bound.args, **bound.kwargs)
    return function(*given.values(), **more)


def _program(case: Case, dist: Any, tensors: Tensors, number: int) -> Any:
    """Make the call of a case, prepare it first, and return it as something to be called without arguments."""
    name, members, rank = case["call"], _members(case), stock.get_rank()
    group = {} if _groups[case["group"]] is _LEFT_OUT else {"group": _groups[case["group"]]}
    if name == "region":
        return _region(case, dist, tensors, group)
    if name not in POINT_TO_POINT:
        given, more = _arguments(case, name, tensors)
        return lambda: _invoke(case, getattr(dist, name), name, given, more)
    sent = {"tensor": tensors.one(list(case["shape"]), written=False)}
    room = {"tensor": tensors.one(list(case["shape"]), written=True)}
    place = members.index(rank) if rank in members else 0
    after, before = members[(place + 1) % len(members)], members[place - 1]
    _spoil(case, sent, group)
    _spoil({**case, "wrong": case["wrong"] if case["wrong"] != "extra" else "nothing"}, room, group)
    if name == "send_recv":
        if place == 0:
            return lambda: dist.send(**sent, dst=after, **group)
        return (lambda: dist.recv(**room, src=before, **group)) if place == 1 else (lambda: None)
    if name == "isend_irecv":
        return lambda: [dist.isend(**sent, dst=after, **group), dist.irecv(**room, src=before, **group)]
    keywords = group or {"group": None}
    ops = [("isend", sent, after), ("irecv", room, before)]

    def batch() -> Any:
        return dist.batch_isend_irecv(
            [dist.P2POp(getattr(dist, op), peer=peer, **tensor, **keywords) for op, tensor, peer in ops]
        )

    return batch


def _region(case: Case, dist: Any, tensors: Tensors, group: dict[str, Any]) -> Any:
    asynchronous = bool(_flag(case["async"])) and case["async"] != "left out"
    inner = {"same": case["async"]}.get(case["inner"], case["inner"])
    gather = "all_gather_single" if hasattr(c10d, "all_gather_single") else "all_gather_into_tensor"
    scatter = "reduce_scatter_single" if hasattr(c10d, "reduce_scatter_single") else "reduce_scatter_tensor"
    names = {
        "all_reduce": ["all_reduce"] * 3,
        "gather": [gather] * 2,
        "scatter": [scatter] * 2,
        "mixed": ["all_reduce", gather],
        "none": [],
        "broadcast": ["broadcast"] * 2,
    }[case["body"]][: 1 + case["times"]]
    calls = [(name, *_arguments({**case, "async": inner}, name, tensors)) for name in names]

    def region() -> Any:
        with dist._coalescing_manager(**group, async_ops=asynchronous) as manager:
            inside = [_invoke(case, getattr(dist, name), name, given, more) for name, given, more in calls]
        return [manager if asynchronous else None, *(type(one).__name__ == "NoneType" for one in inside)]

    return region


# --- in the ranks: what is seen ---------------------------------------------------------------------------------


def _normal(text: str) -> str:
    """Return a message without what differs between two runs of the same.

    Addresses of objects, ports of connections and durations are of one run.
    """
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"\[?127\.0\.0\.1\]?:\d+", "PEER", text)
    return re.sub(r"\d+ ?ms", "TIME", text)


def _said(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, _normal(str(error))


def _look(function: Any, *arguments: Any) -> Any:
    """Return what ``function`` gives, or what it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return _said(error)


def _content(tensor: torch.Tensor) -> Any:
    """Return the values of a tensor of any kind, bit by bit."""
    tensor = tensor.as_subclass(torch.Tensor).detach()
    if tensor.is_nested:
        return [_content(one) for one in tensor.unbind()]
    if tensor.layout is torch.sparse_coo:
        return _content(tensor._indices()), _content(tensor._values()), tensor.is_coalesced()
    if tensor.layout is torch.sparse_csr:
        return _content(tensor.crow_indices()), _content(tensor.values())
    if tensor.is_quantized:
        return _content(tensor.int_repr())
    if tensor.is_meta:
        return "meta"
    return bits(tensor.resolve_conj().resolve_neg())


def _looks(tensor: torch.Tensor) -> dict[str, Any]:
    """Return all that can be seen of a tensor, but for its values."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return {
        "type": type(tensor).__name__,
        "shape": _look(lambda: tuple(tensor.shape)),
        "dtype": str(tensor.dtype),
        "strides": tuple(tensor.stride()) if strided else None,
        "offset": tensor.storage_offset() if strided else None,
        "room": tensor.untyped_storage().nbytes() if strided else None,
        "requires_grad": tensor.requires_grad,
        # torch's own assertion fails for some that a call has left half changed.
        "leaf": _look(lambda: tensor.is_leaf),
        "grad_fn": _look(lambda: tensor.grad_fn and tensor.grad_fn.name()),
        "inference": tensor.is_inference(),
        "conj and neg": (tensor.is_conj(), tensor.is_neg()),
    }


def _address(tensor: torch.Tensor) -> Any:
    return _look(lambda: (tensor.data_ptr(), tensor.untyped_storage().data_ptr()))


def _whose(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return which of the caller's own tensors the results of a work are."""
    if isinstance(value, torch.Tensor):
        return [place for place, tensor in enumerate(tensors) if tensor is value][:1]
    return [_whose(one, tensors) for one in value] if isinstance(value, (list, tuple)) else None


def _results(value: Any) -> Any:
    """Return what is in the results of a work."""
    if isinstance(value, torch.Tensor):
        return _look(_content, value), _looks(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, (torch.Tensor, list)) for one in value):
        return [_results(one) for one in value]
    return repr(value)


def _ask(returned: Any, case: Case, seen: dict[str, Any], label: str, tensors: list[torch.Tensor]) -> None:
    """Ask what a call has returned all that it can be asked, and wait for it."""
    if isinstance(returned, list):
        seen[f"{label}: kind"] = f"list of {len(returned)}"
        for number, one in enumerate(returned):
            _ask(one, case, seen, f"{label} {number}", tensors)
    elif isinstance(returned, c10d.Work):
        seen[f"{label}: kind"] = "Work"
        alone = case["call"] in POINT_TO_POINT  # gloo's can't be waited for twice, nor answer with a future
        early = _look(returned.get_future) if case["asks"] == "future" and not alone else None
        limit = [timedelta(seconds=TIMEOUT)] if case["asks"] == "timeout" else []
        seen[f"{label}: wait"] = _look(returned.wait, *limit)
        if case["asks"] == "twice" and not alone:
            seen[f"{label}: wait again"] = _look(returned.wait)
        if not alone:
            seen[f"{label}: is_completed"] = _look(returned.is_completed)
            seen[f"{label}: is_success"] = _look(returned.is_success)
            seen[f"{label}: exception"] = repr(_look(returned.exception))
            result = _look(returned.result)
            seen[f"{label}: result"], seen[f"{label}: whose result"] = _results(result), _whose(result, tensors)
            future = early if early is not None else _look(returned.get_future)
            if isinstance(future, torch.futures.Future | torch._C.Future):
                result = _look(future.wait)
                seen[f"{label}: future"], seen[f"{label}: whose future"] = _results(result), _whose(result, tensors)
            else:
                seen[f"{label}: future"] = future
    elif isinstance(returned, torch._C.Future):
        seen[f"{label}: kind"] = "Future"
        result = _look(returned.wait)
        seen[f"{label}: future"], seen[f"{label}: whose future"] = _results(result), _whose(result, tensors)
        seen[f"{label}: done"] = _look(returned.done)
    elif isinstance(returned, c10d._CoalescingManager):
        seen[f"{label}: kind"] = "manager"
        seen[f"{label}: works"] = len(returned.works)
        seen[f"{label}: wait"] = _look(returned.wait)
    else:
        seen[f"{label}: kind"] = _normal(repr(returned))


@contextlib.contextmanager
def _context(case: Case, ours: bool) -> Any:
    """Give the module whose functions are called, inside of what must not change anything."""
    if not ours:
        yield stock
        return
    group = _groups[case["group"]]
    group = group if isinstance(group, c10d.ProcessGroup) else None
    with contextlib.ExitStack() as stack:
        word = case["context"]
        if "arena" in word:
            stack.enter_context(safecomm.use_arena("1MiB", device="cpu"))
        if "bucketed" in word:
            stack.enter_context(safecomm.bucketed(group=group))
        if word == "avoid_record_streams":
            stack.enter_context(safecomm.avoid_record_streams())
        if word == "patched":
            stack.enter_context(safecomm.patched())
        yield stock if word == "patched" else safecomm


_SAID_ONCE = "The PyTorch API of nested tensors is in prototype stage"
"""A warning that torch gives once, and here always: an alias of such a tensor, which safecomm makes, gives it again."""

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def _losses(tensors: list[torch.Tensor]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return losses that have saved the tensors, as they are before the call."""
    losses = []
    for number, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            continue
        if not tensor.is_floating_point() or tensor.is_inference() or type(tensor) is _Subclass:
            continue
        weight = torch.ones(tensor.shape, dtype=tensor.dtype, requires_grad=True)
        losses.append((number, weight, (weight * tensor.detach()).sum()))
    return losses


def _gradient(weight: torch.Tensor, loss: torch.Tensor) -> Any:
    loss.backward()
    return bits(weight.grad)


def play(case: Case, ours: bool) -> dict[str, Any]:
    """Run a case in this rank, and return what was seen, by label."""
    seen: dict[str, Any] = {}
    tensors = Tensors(case, stock.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.ExitStack() as stack:
            try:
                context = stack.enter_context(_context(case, ours))
                with MODES["grad"]():
                    times = 1 if case["call"] == "region" else case["times"]
                    programs = [_program(case, context, tensors, number) for number in range(times)]
                    losses = _losses(tensors.made)
            except Exception as error:  # such tensors can't be made: the same for both
                return {"case": ("no such case", *_said(error))}
            addresses = [_address(tensor) for tensor in tensors.made]
            del caught[:]
            try:
                with MODES[case["mode"]](), stack:
                    for number, program in enumerate(programs):
                        _ask(program(), case, seen, f"call {number}", tensors.made)
            except Exception as error:
                seen["call"] = _said(error)
        said = [(w.category.__name__, _normal(str(w.message))) for w in caught if _SAID_ONCE not in str(w.message)]
    seen["warnings"] = said
    seen["addresses"] = [_address(tensor) for tensor in tensors.made] == addresses
    for number, tensor in enumerate(tensors.made):
        seen |= {f"{what} of {number}": value for what, value in _looks(tensor).items()}
        seen[f"version of {number}"] = None if tensor.is_inference() else _look(lambda one=tensor: one._version)
        seen[f"bits of {number}"] = _look(_content, tensor)
    for number, weight, loss in losses:
        seen[f"backward of {number}"] = _look(_gradient, weight, loss)
    c10d._world.pg_coalesce_state.clear()  # c10d leaves a region that has failed open
    if ours:
        tensors = programs = losses = program = tensor = weight = loss = None
        seen["held"] = _held()
    return seen


def _held() -> Any:
    gc.collect()
    with contextlib.suppress(safecomm.PendingWorkError):
        safecomm.drain(wait=True, timeout=timedelta(seconds=2))
    return [f"{one.op} {one.nbytes}" for one in safecomm.pending()]


def _serve(rank: int, world: int, port: int, connection: Connection) -> None:
    from ranks import _join

    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else the side that comes first has the warnings
    logging.disable(logging.CRITICAL)
    _join(rank, world, port, "differential", TIMEOUT)
    _make_groups()
    gc.collect()
    gc.freeze()
    connection.send(None)
    while True:
        try:
            case, ours = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            seen = play(case, ours)
        except Exception:  # of this file: the driver is to end with it
            seen = traceback.format_exc()
        connection.send(seen)


# --- the ranks, from outside ------------------------------------------------------------------------------------


class Ranks:
    """The processes that cases run in, started anew when a case has left them of no use."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.processes: list[Any] = []
        self.starts = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed", "safecomm", "numpy"])

    def start(self) -> None:
        # On a machine that has much else to do, one rank may come later than gloo waits for it.
        for _ in range(5):
            if self._start():
                return
        raise RuntimeError("the ranks did not start")

    def _start(self) -> bool:
        self.close()
        self.store = stock.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connections = []
        for rank in range(self.world):
            here, there = self._context.Pipe()
            arguments = (rank, self.world, self.store.port, there)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)
        self.starts += 1
        return self._answers(60) is not None

    def _answers(self, limit: float) -> list[Any] | None:
        answers: dict[Any, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(self.connections):
            ready = wait([one for one in self.connections if one not in answers], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            for connection in ready:
                try:
                    answers[connection] = connection.recv()
                except (EOFError, ConnectionError):
                    return None
        return [answers[connection] for connection in self.connections]

    def play(self, case: Case, ours: bool) -> list[dict[str, Any]] | None:
        """Run one side of a case on all ranks, and return what each has seen; None if one hangs or dies."""
        if not self.processes:
            self.start()
        try:
            for connection in self.connections:
                connection.send((case, ours))
        except OSError:
            return None
        answers = self._answers(LIMIT)
        for answer in answers or ():
            if isinstance(answer, str):
                raise RuntimeError(f"{case}\n{answer}")
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self.connections if self.processes else ():
            connection.close()
        self.processes.clear()


BROKEN = ("gloo/transport", "Timed out", "timed out", "Connection", "Socket", "Broken pipe")


def useless(case: Case, seen: list[dict[str, Any]]) -> str:
    """Return why what was seen leaves the ranks out of step, "" if it does not."""
    text = str([[value for label, value in one.items() if label.startswith("call")] for one in seen])
    if any(sign in text for sign in BROKEN):
        return "a broken connection"
    raising = ["call" in one or any(label.endswith("wait") and _is_error(one[label]) for label in one) for one in seen]
    if len(set(raising)) > 1 and case["group"] not in ("one", "last", "own"):
        return "some ranks raise and some do not"
    return ""


def _is_error(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


Differences = dict[str, tuple[Any, Any]]


def compare(case: Case, expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> Differences:
    """Return what differs, by rank and label, but for what is known to."""
    different = {}
    raises = any("call" in one for one in expected)
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        other = {"held": [], **other}
        for label in {**one, **other}:
            if one.get(label, [] if label == "held" else None) == other.get(label):
                continue
            if not known({**case, "_raises": raises}, label):
                different[f"rank {rank}, {label}"] = (one.get(label), other.get(label))
    return different


class Session:
    """Cases of one run: what they came to."""

    def __init__(self, world: int) -> None:
        self.ranks = Ranks(world)
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.close()

    def examine(self, case: Case) -> Differences:
        """Return what differs in a case at first sight; nothing for one that says nothing."""
        expected = self.ranks.play(case, False)
        why = "torch hangs or dies" if expected is None else useless(case, expected)
        if why:
            self.counts[f"skipped: {why}"] += 1
            self.ranks.start()
            return {}
        if "case" in expected[0]:
            self.counts["no such case"] += 1
            return {}
        self.counts["compared"] += 1
        self.counts["of them torch raises"] += any("call" in one for one in expected)
        found = self.ranks.play(case, True)
        if found is None:
            self.ranks.start()
            return {"all ranks": ("fine", "a rank hangs or dies")}
        different = compare(case, expected, found)
        if useless(case, found):
            self.ranks.start()
        return different

    def confirm(self, case: Case) -> Differences:
        """Return what differs in new ranks, if torch does the same twice."""
        self.ranks.start()
        expected, again = self.ranks.play(case, False), None
        if expected is not None and not useless(case, expected):
            again = self.ranks.play(case, False)
        if again is None or compare(case, expected, again):
            self.counts["found, but torch is not always the same"] += 1
            self.ranks.start()
            return {}
        different: Differences = {}
        for _ in range(2):
            found = self.ranks.play(case, True)
            if found is None:
                different = {"all ranks": ("fine", "a rank hangs or dies")}
                break
            different = different or compare(case, expected, found)
        self.ranks.start()
        return different


def kinds_of(case: Case, different: Differences) -> set[str]:
    """Return what finds of the same kinds have in common: the call, what differs, and for errors which two."""
    how = "asynchronous" if _is_asynchronous(case) else "synchronous"
    context = case["context"] if "bucketed" in case["context"] else ""
    kinds = set()
    for label, both in different.items():
        errors = [one[0] if _is_error(one) else "" for one in both]
        kinds.add(" ".join([case["call"], how, context, re.sub(r"^rank \d+, |\d+", "", label), *map(str, errors)]))
    return kinds


def brief(different: Differences, length: int = 160) -> str:
    """Return the first difference in one line, from where the two begin to differ."""
    label, both = next(iter(different.items()))
    texts = [str(one) for one in both]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    place = max(len(list(same)) - 20, 0)
    expected, found = [("..." if place else "") + text[place : place + length] for text in texts]
    more = f"; and {len(different) - 1} more" if len(different) > 1 else ""
    return f"{label}: torch {expected}, safecomm {found}{more}".replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--case", help="one case, as JSON")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--without", help="a regular expression: labels that are not compared")
    parser.add_argument("--new", action="store_true", help="a new seed; finds are printed and fail nothing")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.without:
        KNOWN.append(("--without", lambda _, label: re.search(options.without, label)))
    with Session(options.world) as session:
        if options.only is not None or options.case:
            case = {**ORDINARY, **json.loads(options.case)} if options.case else make(options.seed, options.only)
            print(json.dumps({name: value for name, value in case.items() if value != ORDINARY[name]}))
            different = session.confirm(case)
            for label, (expected, found) in different.items():
                print(f"{label}:\n  torch    {expected}\n  safecomm {found}")
            print("differs" if different else f"equal {dict(session.counts)}")
            return bool(different)
        seed = int.from_bytes(os.urandom(4), "big") if options.new else options.seed
        finds = search(session, seed, options)
    return bool(finds) and not options.new


def search(session: Session, seed: int, options: argparse.Namespace) -> int:
    """Run cases of a seed until time or number is up; print and count the finds, one of each kind."""
    start = shown = time.monotonic()
    kinds: set[str] = set()
    seconds = options.seconds if options.seconds or options.cases else 60
    program = os.path.relpath(__file__)
    world = f" --world {options.world}" if options.world != 2 else ""
    print(f"seed {seed}", flush=True)
    for number in itertools.count():
        now = time.monotonic()
        if (seconds and now - start > seconds) or (options.cases and number >= options.cases):
            break
        if sys.stderr.isatty() and now - shown > 3:
            print(f"\r{number} cases, {len(kinds)} kinds of finds, {now - start:.0f} s", end="", file=sys.stderr)
            shown = now
        case = make(seed, number)
        new = kinds_of(case, session.examine(case)) - kinds
        if not new:
            continue
        different = session.confirm(case)
        new = kinds_of(case, different) - kinds
        kinds.update(new)
        if new:
            told = {label: both for label, both in different.items() if kinds_of(case, {label: both}) & new}
            print(f"python {program} --seed {seed} --only {number}{world}  # {case['call']}: {brief(told)}", flush=True)
    print(
        f"seed {seed}: {number} cases in {time.monotonic() - start:.0f} s, {dict(session.counts)}, "
        f"{session.ranks.starts} starts; {len(kinds)} kinds of finds"
    )
    return len(kinds)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
