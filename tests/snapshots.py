"""Synthetic memory snapshots, of the structure of ``torch.cuda.memory._snapshot()`` (torch 2.11).

``Allocator`` is a caching allocator in miniature that keeps the history as torch's does: blocks in segments of a
stream, frees that have to wait for another stream, frames shared between entries.
"""

from __future__ import annotations

import pickle

from safecomm.diagnostics.snapshot import Block, Snapshot, Stacks, Trace

MIB = 1 << 20
SEGMENT = 20 * MIB


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


def stack(*lines, program="/home/me/train.py"):
    """Return frames of ``program``, innermost first, between those of torch's C++ and of its launcher."""
    return [
        frame("??", 0, "c10::cuda::CUDACachingAllocator::malloc(...)"),
        frame("/usr/lib/python3/site-packages/torch/_tensor.py", 1000, "wrapped"),
        *(frame(program, line, name) for line, name in lines),
        frame("/usr/lib/python3/site-packages/torch/distributed/run.py", 900, "main"),
    ]


class Allocator:
    """Segments, blocks and history of one device."""

    def __init__(self, start=1_700_000_000_000_000):
        self.time = start
        self.segments = []
        self.trace = []
        self.waiting = {}
        self.next_address = 0x7F0000000000
        self.metadata = ""  # as torch.cuda.memory._set_memory_metadata() sets it

    def tick(self, microseconds):
        self.time += microseconds

    def _note(self, action, address, size, stream, frames, **more):
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": self.time}
        entry |= {"frames": frames, "compile_context": "N/A", "user_metadata": self.metadata, **more}
        self.trace.append(entry)

    def annotate(self, address, metadata, frames):
        """Do what ``torch.cuda.memory._annotate_tensor`` does (torch 2.15)."""
        self._note("annotate", address, 0, 0, frames, user_metadata=metadata)

    def alloc_behind(self, prefix, size, frames, **mark):
        """Allocate at an address: the allocator takes ``prefix`` bytes before it, and gives them back at once."""
        place = len(self.trace)
        before = self.alloc(prefix, frames)
        for entry in self.trace[place:]:
            entry.update(mark if entry["action"] == "alloc" else {})
        address = self.alloc(size, frames)
        place = len(self.trace)
        self.free(before, frames)
        for entry in self.trace[place:]:
            entry.update(mark)
        return address

    def alloc(self, size, frames, stream=0):
        rounded = -(-size // 512) * 512
        for segment in self.segments:
            if segment["stream"] != stream:
                continue
            for place, block in enumerate(segment["blocks"]):
                if block["state"] == "inactive" and block["size"] >= rounded:
                    return self._take(segment, place, rounded, size, frames)
        total = SEGMENT if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
        self._note("segment_alloc", self.next_address, total, stream, frames)
        block = {"address": self.next_address, "size": total, "requested_size": 0, "state": "inactive", "frames": []}
        segment = {
            "device": 0, "address": self.next_address, "total_size": total, "allocated_size": 0, "active_size": 0,
            "requested_size": 0, "stream": stream, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": frames, "blocks": [block],
        }  # fmt: skip
        self.segments.append(segment)
        self.next_address += total + 2 * MIB
        return self._take(segment, 0, rounded, size, frames)

    def _take(self, segment, place, rounded, size, frames):
        block = segment["blocks"][place]
        if block["size"] > rounded:
            rest = {**block, "address": block["address"] + rounded, "size": block["size"] - rounded}
            segment["blocks"].insert(place + 1, rest)
        block.update(size=rounded, requested_size=size, state="active_allocated", frames=frames)
        self._note("alloc", block["address"], size, segment["stream"], frames)
        return block["address"]

    def _find(self, address):
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["address"] == address:
                    return segment, block
        raise KeyError(address)

    def free(self, address, frames, *, recorded=False):
        segment, block = self._find(address)
        self._note("free_requested", address, block["requested_size"], segment["stream"], frames)
        block["state"] = "active_awaiting_free"
        if not recorded:
            self.complete(address, frames)

    def complete(self, address, frames):
        segment, block = self._find(address)
        self._note("free_completed", address, block["requested_size"], segment["stream"], frames)
        block.update(state="inactive", requested_size=0, frames=[])
        blocks = segment["blocks"]
        merged = []
        for one in blocks:
            if merged and merged[-1]["state"] == one["state"] == "inactive":
                merged[-1]["size"] += one["size"]
            else:
                merged.append(one)
        segment["blocks"] = merged

    def snapshot(self):
        for segment in self.segments:
            states = {
                "allocated_size": ("active_allocated",),
                "active_size": ("active_allocated", "active_awaiting_free"),
            }
            for name, counted in states.items():
                segment[name] = sum(block["size"] for block in segment["blocks"] if block["state"] in counted)
        return {
            "segments": self.segments,
            "device_traces": [self.trace, []],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
            "external_annotations": [],
        }

    def active(self):
        """Return the bytes of blocks in use, and of those that wait."""
        blocks = [block for segment in self.segments for block in segment["blocks"]]
        waiting = sum(block["size"] for block in blocks if block["state"] == "active_awaiting_free")
        return sum(block["size"] for block in blocks if block["state"] == "active_allocated"), waiting


def forum(*, stripes, layers=8, iterations=5, size=64 * MIB, lag=6):
    """Return the allocator after the forum's program: layers of matmul, and an all_reduce on a side stream.

    ``stripes``: with record_stream, so that each freed block waits until the host looks again, ``lag`` layers later.
    Also returns the most bytes that were active and that waited.
    """
    allocator = Allocator()
    weights = stack((10, "make"), (40, "<module>"))
    matmul = stack((21, "layer"), (30, "step"), (41, "<module>"))
    gone = stack((23, "layer"), (30, "step"), (41, "<module>"))
    for _ in range(layers):
        allocator.alloc(16 * MIB, weights)
    allocator.tick(1000)
    before = None
    waiting = []
    most = (0, 0)
    for _ in range(iterations):
        for _ in range(layers):
            while stripes and len(waiting) > lag:
                allocator.complete(waiting.pop(0), matmul)
            now = allocator.alloc(size, matmul)
            most = max(most[0], sum(allocator.active())), max(most[1], allocator.active()[1])
            allocator.tick(200)
            if before is not None:
                allocator.free(before, gone, recorded=stripes)
                if stripes:
                    waiting.append(before)
            before = now
            allocator.tick(300)
            most = max(most[0], sum(allocator.active())), max(most[1], allocator.active()[1])
    return allocator, most


def pair(folder):
    """Write two snapshots of the forum's program, with stripes and without, and return their paths."""
    return [
        write(folder / f"{name}.pickle", forum(stripes=stripes)[0].snapshot())
        for name, stripes in (("stock", True), ("safecomm", False))
    ]


def large(nbytes):
    """Return a snapshot whose pickle has about ``nbytes``."""
    entries = []
    frames = [stack(*((number + depth, f"function_{number}_{depth}") for depth in range(30))) for number in range(2000)]
    each = 82
    time = 1_700_000_000_000_000
    for number in range(nbytes // each // 3):
        address, size = 0x7F0000000000 + (number % 5000) * 4 * MIB, 512 * (1 + number % 4096)
        for action in ("alloc", "free_requested", "free_completed"):
            time += 3
            entries.append(
                {
                    "action": action,
                    "addr": address,
                    "size": size,
                    "stream": 0,
                    "mempool_id": (0, number % 3),
                    "time_us": time,
                    "frames": frames[number % 2000],
                    "compile_context": "N/A",
                    "user_metadata": "",
                }
            )
    return {"segments": [], "device_traces": [entries], "allocator_settings": {}, "external_annotations": []}


def many(path, count):
    """Return a snapshot of ``count`` allocations as it is read, without the file: some wait when they are freed.

    Of sizes from 512 B to 1 MB, and freed when others have been allocated.
    """
    import numpy as np

    stacks = Stacks()
    stack_of = [stacks.number(stack((number, f"layer{number % 40}"))) for number in range(1, 61)]
    numbers = np.arange(count)
    sizes = 512 * np.array((1, 2, 3, 500, 2000, 1, 700))[numbers % 7]
    made = 5 * numbers
    freed = made + 2 + 5 * np.where(numbers % 500 == 0, 20000, 1 + numbers * numbers % 199)
    back = freed + np.where(sizes > 300000, 500, 0)
    end = int(made[-1])
    moments, places = np.unique(np.concatenate((made, freed, back)), return_inverse=True)
    used, waiting = (np.zeros(len(moments), dtype=np.int64) for _ in range(2))
    for changed, when, sign in ((used, 0, 1), (used, 1, -1), (waiting, 1, 1), (waiting, 2, -1)):
        np.add.at(changed, places[when * count : (when + 1) * count], sign * sizes)
    blocks = []
    rows = zip(*places.reshape(3, count).tolist(), freed.tolist(), back.tolist(), sizes.tolist(), strict=True)
    for number, (start, given, usable, freed_at, back_at, size) in enumerate(rows):
        block = Block(number, size, 0, start, stack_of[number % 60])
        block.freed_at = block.made_at
        block.requested = given if freed_at <= end else None
        block.completed = usable if back_at <= end else None
        blocks.append(block)
    shown = moments <= end
    trace = Trace(0, end / 1e6, blocks, times=(moments[shown] / 1e6).tolist())
    trace.allocated, trace.unusable = used.cumsum()[shown].tolist(), waiting.cumsum()[shown].tolist()
    trace.reserved = [0] * len(trace.times)
    return Snapshot(path, [trace], stacks)


def write(path, snapshot):
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)
    return path
