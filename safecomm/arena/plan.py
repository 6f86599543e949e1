"""Plan: the requests of a step, and how large an arena they need."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import SupportsIndex

import torch

from safecomm import _torch, arguments
from safecomm.arena.arguments import device_of, shape_of
from safecomm.arena.layout import Layout
from safecomm.arena.size_class import rounded
from safecomm.core.ledger import LEDGER
from safecomm.core.streams import HOST


@dataclass
class Request:
    """One request of a recorded program."""

    nbytes: int
    """Bytes that were asked for."""
    bucket: str
    """The name of its bucket; ``""`` for none."""
    stream: int
    """The number of its stream, in the order of the first requests on each."""
    kind: int
    """The number of its shape and type, in the order of the first requests for each."""
    until: int
    """The number of the request before which the buffer had died; the number of requests, if it lived to the end."""


@dataclass
class Plan:
    """The requests of a recorded program, in their order: see :class:`record_plan`.

    Examples
    --------
    >>> with record_plan("cpu") as plan:
    ...     first = empty(1024)
    ...     second = empty(1024)
    ...     del first, second
    ...     third = empty(1024)
    >>> plan.nbytes
    8192
    """

    requests: list[Request] = field(default_factory=list)
    """The requests."""

    def __post_init__(self) -> None:
        arguments.check("Plan", arguments.is_a("a list of requests", list), requests=self.requests)
        for request in self.requests:
            arguments.check("Plan", arguments.is_a("requests of a recording", Request), requests=request)

    @property
    def buckets(self) -> dict[str, int]:
        """Bytes of each bucket that has a name: the least in which the program never falls back."""
        return {name: self._least(mine) for name, mine in sorted(self._by_bucket().items()) if name}

    @property
    def nbytes(self) -> int:
        """Bytes of an arena in which the program, run again and again, never falls back."""
        return sum(map(self._least, self._by_bucket().values()))

    @property
    def peak(self) -> int:
        """The most bytes that were in use at once. Placement loses the difference to :attr:`nbytes`."""
        return _peak(list(enumerate(self.requests)))

    def _by_bucket(self) -> dict[str, list[tuple[int, Request]]]:
        """Return the requests of each bucket, with their numbers."""
        found: dict[str, list[tuple[int, Request]]] = {}
        for number, request in enumerate(self.requests):
            found.setdefault(request.bucket, []).append((number, request))
        return found

    def _least(self, mine: list[tuple[int, Request]]) -> int:
        """Return the bytes in which all requests of a bucket find room, by trial."""
        size = max(512, _peak(mine))  # less can't be enough, and each trial places all requests again
        while missing := self._missing(mine, size):
            size += missing
        return size

    def _missing(self, requests: list[tuple[int, Request]], size: int) -> int:
        """Return how many bytes more than ``size`` the first request that finds no room needs; 0 if all find room.

        The requests are placed twice, because the second run begins with the places that the first has left. A buffer
        that lives to the end of the program lives in both: a recorded step should end without buffers that the next
        step replaces.

        Parameters
        ----------
        requests
            The requests of one bucket, with their numbers.
        size
            Bytes of the bucket.
        """
        used: set[int] = set()  # ids of slots
        layout = Layout(size, {}, lambda slot, _: id(slot) not in used)
        layout.exact = True
        for _ in range(2):
            ends: list[tuple[int, int]] = []  # until when, and the id of the slot, as a heap
            for number, request in requests:
                while ends and ends[0][0] <= number:
                    used.discard(heapq.heappop(ends)[1])
                found = layout.take((request.kind,), request.nbytes, request.stream, 0, "")
                if found is None:
                    return max(rounded(request.nbytes) - layout.largest(""), 512)
                slot = found[0]
                used.add(id(slot))
                heapq.heappush(ends, (request.until, id(slot)))
                layout.push(slot)
            used.clear()
        return 0

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file that :meth:`load` reads."""
        Path(path).write_text(json.dumps([vars(request) for request in self.requests]))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Return the plan in a file that :meth:`save` wrote.

        Raises
        ------
        ValueError
            If the file is not a plan.
        OSError
            If the file can't be read.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(found, list):
                raise ValueError("expected a list of requests")
            sizes: dict[int, int] = {}  # by kind: all requests of one shape and type have one size
            return cls([_checked(request, number, len(found), sizes) for number, request in enumerate(found)])
        except RecursionError:
            raise ValueError(f"{path} is not a plan of an arena: it is nested too deep") from None
        except ValueError as error:
            raise ValueError(f"{path} is not a plan of an arena: {error}") from None


def _checked(request: object, number: int, count: int, sizes: dict[int, int]) -> Request:
    """Return a request that was read from a file, or raise ValueError.

    Parameters
    ----------
    request
        The value in the file.
    number
        The number of the request.
    count
        How many requests the file has.
    sizes
        The size of each kind, to which this request adds its own.
    """
    # No recording has a buffer that outlives the program, or more streams or kinds than requests.
    limits = {"nbytes": (1, 1 << 62), "stream": (0, count), "kind": (0, count), "until": (number + 1, count)}
    if not isinstance(request, dict) or request.keys() != {*limits, "bucket"}:
        raise ValueError(f"request {number} has not the fields of one")
    if not isinstance(request["bucket"], str):
        raise ValueError(f"request {number}: its bucket is not text")
    for name, (least, most) in limits.items():
        if type(request[name]) is not int or not least <= request[name] <= most:
            raise ValueError(f"request {number}: its {name} is not a whole number from {least} to {most}")
    if sizes.setdefault(request["kind"], request["nbytes"]) != request["nbytes"]:
        raise ValueError(f"request {number}: another one of its kind has another size")
    return Request(**request)


def _peak(requests: list[tuple[int, Request]]) -> int:
    """Return the most bytes that are in use at once. Each request comes with its number."""
    changes = [(number, 1, rounded(request.nbytes)) for number, request in requests]
    changes += [(request.until, 0, -rounded(request.nbytes)) for _, request in requests]
    most = now = 0
    for _, _, nbytes in sorted(changes):  # before one request, buffers die first
        now += nbytes
        most = max(most, now)
    return most


class Recorder:
    """Stands in for an arena while a plan is recorded: hands out ordinary memory, and records how long it lives."""

    symmetric = False
    device: torch.device
    index: int

    def __init__(self, device: torch.device | str | int | None) -> None:
        self.device, self.index = device_of(device)
        self.plan: Plan = Plan()
        self._live: list[tuple[_torch.WeakStorage, Request]] = []
        self._kinds: dict[object, int] = {}
        self._streams: dict[int, int] = {}

    def empty(
        self, *size: SupportsIndex | Sequence[SupportsIndex], dtype: torch.dtype | None = None, bucket: str = ""
    ) -> torch.Tensor:
        """Return what :meth:`Arena.empty` does, in ordinary memory."""
        dtype = torch.get_default_dtype() if dtype is None else dtype
        shape = shape_of(size, dtype, "Recorder.empty()")
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._look(len(self.plan.requests))
        stream = 0 if self.index == HOST else LEDGER.current(self.index)
        request = Request(
            nbytes=math.prod(shape) * dtype.itemsize,
            bucket=bucket,
            stream=self._streams.setdefault(stream, len(self._streams)),
            kind=self._kinds.setdefault((shape, dtype), len(self._kinds)),
            until=-1,
        )
        self.plan.requests.append(request)
        alive = _torch.StorageWeakRef(tensor.untyped_storage())
        self._live.append((alive, request))
        return tensor

    def if_room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return what :meth:`Arena.if_room` does in an arena of this plan, in ordinary memory."""
        return self.empty(shape, dtype=dtype)

    def _look(self, number: int) -> None:
        """Record which buffers have died before the request with this ``number``."""
        live = []
        for alive, request in self._live:
            if alive.expired():
                request.until = number
            else:
                live.append((alive, request))
        self._live = live

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return False: no memory is an arena's."""
        return False

    def end(self) -> None:
        """End the recording: buffers that are alive now lived to the end of the program."""
        for _, request in self._live:
            request.until = len(self.plan.requests)
        self._live.clear()
