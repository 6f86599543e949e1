"""Write the figures of ``docs/benchmarks.md``, and the README's six, from the committed results.

python benchmarks/table.py          # writes them
python benchmarks/table.py --check  # only compares
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = {
    "tiled": "layers computed in tiles",
    "recompute": "recomputed activations",
    "keep": "kept activations",
}
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def load(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def setting(results):
    return (
        f"torch {results['torch']}, NCCL {results['nccl']}, {results['world']} x {results['device']}, {results['date']}"
    )


def safety(cases):
    figures = cases["s1_corruption_programs"]["figures"]
    world = 2
    rows = [
        (name, f"{row['stock']} of {3 * world}", f"{row['safecomm']} of {10 * world}") for name, row in figures.items()
    ]
    every = cases["s1_every_combination_of_streams"]["figures"]
    total = every["programs"] * every["trials each"] * world
    rows.append(
        (
            f"each of three streams allocating, launching, waiting; 4 collectives: {every['programs']} programs",
            f"{every['stock corrupted']} of {total}",
            f"{every['safecomm corrupted']} of {total}",
        )
    )
    captured = cases["s5_first_work_dropped_in_capture"]["figures"]
    rows.append(
        (
            "in a capture: first work dropped, second waited for; wrong replays",
            f"{captured['stock: wrong replays of 20']} of 20",
            f"{captured['safecomm: wrong replays of 20']} of 20",
        )
    )
    return table(("program, slow peer; trials in which a tensor was corrupted", "torch.distributed", "safecomm"), rows)


def memory(cases):
    dropped = cases["s3_dropped_handles"]["figures"]
    loop = cases["s3_dropped_in_a_loop"]["figures"]
    coalesced = cases["s3_coalesced"]["figures"]
    forum = cases["s2_forum_program"]["figures"]
    flat = cases["s5_capture_is_flat"]["figures"]
    rows = [
        (
            "16 dropped handles of 32 MiB, over: MiB held after drain() / after a call on another group",
            f"{dropped['stock, drain: MiB held']} / {dropped['stock, another group: MiB held']}",
            f"{dropped['safecomm, drain: MiB held']} / {dropped['safecomm, another group: MiB held']}",
        ),
        (
            "40 x (matmul, async all_reduce, handle dropped): peak above the base, in buffers of 64 MiB",
            loop["stock: buffers above base"],
            loop["safecomm: buffers above base"],
        ),
        (
            "coalescing with async_ops=True, waited for and deleted: MiB held, with device= / without",
            f"{coalesced['stock, device=True: MiB held']} / {coalesced['stock, device=False: MiB held']}",
            f"{coalesced['safecomm, device=True: MiB held']} / {coalesced['safecomm, device=False: MiB held']}",
        ),
        (
            "forum program, one stream (default or not), sync, async + wait, 5 runs, all ranks: "
            "buffers above the same without communication, most",
            "-",
            max(forum.values()),
        ),
        (
            "bytes of a captured graph of 4 / 16 / 64 layers, sync on a side stream, MiB",
            "-",
            " / ".join(map(str, flat["sync on a side stream"])),
        ),
    ]
    return table(("memory", "torch.distributed", "safecomm"), rows)


def recorded(cases):
    captured = cases["s5_record_stream_in_a_capture"]["figures"]
    forum = cases["s2_forum_program_with_record_stream"]["figures"]
    freed = cases["s1_recorded_memory_freed_in_place"]["figures"]
    p2p = cases["s1_point_to_point_leaves_nothing_unusable"]["figures"]
    shared = cases["s6_graphs_share_memory"]["figures"]
    replays = cases["s8_replay_against_eager"]["figures"]

    def layers(how, name):
        return " / ".join(map(str, captured[f"{how}, {name}: MiB at 4, 16, 64 layers"]))

    rows = [
        ("capture of 4 / 16 / 64 layers of 64 MiB, MiB", layers("Python", "stock"), layers("Python", "safecomm")),
        ("the same, record_stream called by a C++ extension", layers("C++", "stock"), layers("C++", "safecomm")),
        (
            f"forum program, active peak, MiB (without record_stream {forum['stock, no record_stream']['peak MiB']})",
            forum["stock"]["peak MiB"],
            forum["converted"]["peak MiB"],
        ),
        ("forum program, time on the device, ms", forum["stock"]["ms"], forum["converted"]["ms"]),
        (
            f"freed in place or dropped after record_stream, slow side stream, {len(freed)} programs: corrupted",
            "-",
            f"{sum(freed.values())} of {20 * len(freed)}",
        ),
        ("20 x batch_isend_irecv of 64 MiB: MiB freed but unusable", p2p["stock: MiB"], p2p["safecomm: MiB"]),
        (
            "16 graphs of a decode-like step sharing a pool, largest first / smallest first, MiB "
            f"(the largest alone {shared['largest alone MiB']}, all apart {shared['16 apart: MiB']})",
            "-",
            f"{shared['16 sharing, largest first: MiB']} / {shared['16 sharing, smallest first: MiB']}",
        ),
        (
            f"replays that differ from eager, {len(replays['collectives'])} collectives",
            "-",
            f"0 of {replays['replays compared']}",
        ),
    ]
    return table(("record_stream and graphs, under avoid_record_streams() and graph()", "torch", "safecomm"), rows)


def overlap(cases):
    rows = [(name, row["stock ms"], row["ratio"]) for name, row in cases["overlap_is_kept"].get("figures", {}).items()]
    rows += [
        (f"{name}, torch's all_reduce and record_stream, converted", row["stock ms"], row["ratio"])
        for name, row in cases["overlap_is_kept_under_conversion"]["figures"].items()
    ]
    return table(("compute on main under side-stream all_reduces, 48 of them", "torch.distributed, ms", "ratio"), rows)


def arena(times, lists, fragmentation, cases):
    shown = {name: row["ratio"] for name, row in times["rows"].items()}
    come_and_go = [ratio for name, ratio in shown.items() if "transient" in name]
    kept = [ratio for name, ratio in shown.items() if "held" in name]
    figures = cases["arena_stress_with_a_slow_peer"]["figures"]
    calls = cases["arena_allocator_calls_per_step"]["figures"]
    rows = [
        (
            "host time of a buffer that comes and goes, 1 KiB to 64 MiB, ratio",
            f"{min(come_and_go)} to {max(come_and_go)}",
        ),
        ("host time of one of 200 buffers that are all kept, 1 KiB to 4 MiB, ratio", f"{min(kept)} to {max(kept)}"),
        (
            f"60 s of random programs with a slow peer, {figures['programs']} of them: elements written by others",
            figures["elements written by others"],
        ),
    ]
    rows.append(
        (
            "allocations a step of a Megatron-like layer after the first, without / with an arena",
            " / ".join(f"{calls[name]['allocations a step']:.0f}" for name in ("ordinary memory", "arena")),
        )
    )
    for program, ways in fragmentation["programs"].items():
        for name, row in ways.items():
            way, settings = name.replace("stock", "no arena").split(", ")
            rows.append(
                (
                    f"300 steps of 32 sequence lengths, {PROGRAMS[program]}, {way}, {settings} settings of the "
                    "allocator: MiB reserved beyond the most in use",
                    row["overhead MiB"],
                )
            )
    for name, row in lists["rows"].items():
        rows.append(
            (
                f"list form, {name}: time ratio; MiB of staging",
                f"{row['ratio']}; {row['safecomm MiB']:.0f} ({row['stock MiB']:.0f})",
            )
        )
    return table(("the arena, against torch.empty and torch's list forms", ""), rows)


def bucketed(results):
    one_by_one, manager = "one by one", "torch's _coalescing_manager"
    rows = [
        (
            name,
            row["us"],
            row.get(f"ratio to {one_by_one}", "-"),
            row.get(f"ratio to {manager}", "-"),
        )
        for name, row in results["rows"].items()
    ]
    return table(
        (f"200 all_reduces of 4 KiB to 256 KiB, {results['MiB in all']} MiB", "us", one_by_one, "_coalescing_manager"),
        rows,
    )


def megatron(results):
    rows = []
    for way, hows in results["ways"].items():
        same = all(row["same"] and not row["past"] for row in hows.values())
        plain = [row for how, row in hows.items() if "arena" not in how]
        allocated = max(row.get("peak_alloc_kib ratio", 0) for row in plain)
        reserved = max(row.get("peak_reserved_kib ratio", 0) for row in plain)
        beyond = [hows[how]["reserved minus allocated KiB"] / 1024 for how in ("stock", "runner, arena, avoid")]
        times = [f"{timed['ratio']} ({timed['control']})" for timed in results["step time"].get(way, {}).values()]
        times += ["-"] * (2 - len(times))
        rows.append(
            (
                way,
                "equal" if same else "DIFFERENT",
                allocated,
                reserved,
                " / ".join(f"{one:.1f}" for one in beyond),
                *times,
            )
        )
    graph = results["graph"]["runner, avoid"]["ended"]
    head = (
        "megatron-core, bf16, patched early, late, by the runner",
        "losses, weights",
        "peak allocated",
        "reserved",
        "reserved beyond it, MiB, unpatched / with both options",
        "step, microbatches of 2 (unpatched to itself)",
        "of 64",
    )
    parts = ("region", "wait")  # of calls, timed by themselves
    calls = [
        (
            f"{way}, microbatches of 2",
            f"{sum(call['a step'] for name, call in found['calls'].items() if not name.startswith(parts)):.0f}",
            " / ".join(str(found["us a step"][kind]) for kind in ("unpatched", "patched")),
            found["ratio"],
        )
        for way, found in results["calls"].items()
    ]
    called = ("collectives of a step, timed one by one in it, with their regions and waits", "calls")
    commits = sorted({row["commit"] for hows in results["ways"].values() for row in hows.values()})
    return (
        table(head, rows)
        + f"\nA full-iteration CUDA graph, by the runner, ended {graph.split(',')[0]}; stock does not return.\n\n"
        + table((*called, "us a step, unpatched / patched", "ratio"), calls)
        + f"\nResults and memory at {' and '.join(commits)}, times at {results['commit']}.\n"
    )


def megatron_steps(results):
    newest = results["holds in C"]
    asked = {
        "with ctypes": results["with ctypes"],
        "with C": results["with C"],
        "with C, before": newest.get("before", {}),
        "holds in C too, tried": newest,
    }
    before = f"at {newest['before']['commit']} and " if "before" in newest else ""
    calls = [
        (way, how, " / ".join(str(found["us a step"][kind]) for kind in ("unpatched", "patched")), found["ratio"])
        for how, section in asked.items()
        for way, found in section.get("calls", {}).items()
    ]
    steps, parts = [], []
    for how, section in asked.items():
        for way, sizes in section.get("step time", {}).items():
            (row,) = sizes.values()
            for key, shown in (("ratio", way), ("avoid", f"{way}, record_stream avoided, to the same")):
                if key in row:
                    low, middle, high = row[f"{key}, 95 %"]
                    steps.append(
                        (shown, how, len(row["processes"]), row["step_ms"], f"{middle:.3f} ({low:.3f} to {high:.3f})")
                    )
        for way, found in section.get("parts", {}).items():
            for part, took in found.get("parts", {}).items():
                parts.append((way, how, part, took["a step"], took["median us"], took["us a step"]))
    equal = ""
    if "ways" in newest:
        differ = sorted({way for way, hows in newest["ways"].items() if not all(hows.values())})
        said = f"DIFFER in {' and '.join(differ)}" if differ else "were equal"
        hows = sorted({how for row in newest["ways"].values() for how in row})
        equal = (
            f"\nLosses, norms of gradients and weights of the {len(newest['ways'])} ways {said} once more at"
            f" {newest['commit']}, patched ({'; '.join(hows)})\nand not, with no call past safecomm.\n"
        )
    return (
        f"The same again on other machines, whose hosts are slower: {results['world']} x {results['device']}, torch\n"
        f"{results['torch']}. {results['date']}, at {results['with ctypes']['commit']} with ctypes and at"
        f" {results['with C']['commit']} with the C file; {newest['date']}, {before}at\n"
        f"{newest['commit']}, which was not kept, where holding, waiting and asking for a sweep were C too.\n\n"
        + table(
            ("collectives of a step, timed one by one in it", "asked", "us a step, unpatched / patched", "ratio"), calls
        )
        + "\n"
        + table(
            ("steps, microbatches of 2", "asked", "processes", "ms a step, unpatched", "patched to unpatched (95 %)"),
            steps,
        )
        + equal
        + "\nWhat safecomm's own parts take in such a step; each is timed alone, and a timer takes what *nothing*\n"
        "does.\n\n" + table(("way", "asked", "part", "a step", "median, us", "us a step"), parts)
    )


def megatron_buffers(results):
    def both(row, *keys):
        found = []
        for rank in (row["rank 0"], row["rank 1"]):
            for key in keys:
                rank = rank[key]
            found.append(f"{rank:g}")
        return found[0] if found[0] == found[1] else " / ".join(found)

    def beyond(row):
        return f"{row['reserved MiB'] - row['allocated MiB']:.1f}"

    free, outputs = "free when the most was allocated", "outputs that come and go"
    rows = []
    for way, row in results["ways"].items():
        rows.append(
            (
                way,
                both(row, outputs, "a step"),
                both(row, outputs, "at once MiB"),
                both(row, free, "MiB"),
                both(row, free, "where only such outputs had been"),
                both(row, free, "where they and others had been"),
                both(row, "with them in a perfect arena", "reserved beyond allocated, ratio"),
                beyond(row["by the runner, --arena 8MiB"]),
                beyond(row["expandable segments"]),
            )
        )
    agree = all(
        row[rank]["the model agrees with torch"] for row in results["ways"].values() for rank in ("rank 0", "rank 1")
    )
    head = (
        "outputs of collectives that come and go, by rank",
        "a step",
        "at once, MiB",
        "free, MiB, when the most was allocated",
        "of it where only they had been",
        "where they and others had been",
        "reserved beyond allocated with a perfect arena, to that without",
        "reserved beyond allocated, MiB, by the runner, `--arena 8MiB`",
        "with expandable segments",
    )
    says = "reserves and allocates what torch did, to the byte" if agree else "DIFFERS from torch"
    return (
        table(head, rows)
        + f"\nmegatron-core {results['mcore']}, torch {results['torch']}, two ranks, {results['device']}. The model\n"
        + f"of torch's allocator that the perfect arena is from {says}, in all of them.\n"
    )


def megatron_pretrain(results):
    rows = []
    for way, hows in results["ways"].items():
        patched = {how: row for how, row in hows.items() if how != "stock"}
        rows.append(
            (
                way,
                ", ".join(patched),
                "equal" if all(row["same"] for row in hows.values()) else "DIFFERENT",
                f"{hows['stock']['losses'][0]:g} -> {hows['stock']['losses'][-1]:g}",
                sum(row["past"] for row in patched.values()),
                patched["runner"]["said"][0].split()[1],
            )
        )
    head = (
        "Megatron-LM's `pretrain_gpt.py`, unedited",
        "patched",
        "losses, norms of gradients and parameters",
        "loss",
        "calls past safecomm",
        "calls by it, rank 0",
    )
    return table(head, rows) + (
        f"\nMegatron-LM at {results['Megatron-LM']}, torch {results['torch']}, two ranks, {results['device']}.\n"
    )


WAYS = {
    "us in graphs, a kernel between": "with an elementwise kernel after each call, which counts",
    "us in graphs, back to back": "back to back",
    "us in graphs": "back to back",  # of runs that had no other way
}


def low_latency(results):
    def bytes_of(size):
        size = int(size)
        return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"

    ways = {way: results[key] for key, way in WAYS.items() if key in results}
    rows, itself = [], []
    for collective, sizes in next(iter(ways.values())).items():
        for size in sizes:
            row = [f"{collective}, {bytes_of(size)}"]
            for found in ways.values():
                us = found[collective][size]
                best = min((took for name, took in us.items() if name.startswith("torch")), default="-")
                row += us["NCCL"], best, us["safecomm"], us["ratio"]
                itself += [us["NCCL to itself"]] if "NCCL to itself" in us and collective == "all_reduce" else []
            rows.append(row)
    kinds = results["ratio by operation and type"]
    theirs = results.get("NCCL to itself by operation and type", {})
    worst = max((ratio, kind, size) for kind, sizes in kinds.items() for size, ratio in sizes.items())
    eager = results["host us, 8 KiB"]
    beside = {name: found for name, found in results.items() if "beside" in name}  # of runs that have a ring
    steps = [f"{row['ratio']} at batch {batch}" for batch, row in results["decode step us"].items()]
    first = f"us of a call in a CUDA graph, bf16, {results['world']} ranks, {'; then '.join(ways)}"
    text = (
        f"Over {len(kinds)} combinations of operation and type the largest ratio to NCCL was {worst[0]} ({worst[1]},\n"
        f"{bytes_of(worst[2])}). An eager all_reduce of 8 KiB took {eager['ratio']} of the host time of torch's.\n"
        f"A decode step in a graph took {', '.join(steps)}\nof the time on NCCL.\n"
    )
    if itself:
        whose = "Of large calls" if beside else "From 8 MiB on the call is NCCL's own; there"
        text += f"{whose}, NCCL took {min(itself)} to {max(itself)} of itself.\n"
    if theirs:
        most = max(ratio for sizes in theirs.values() for ratio in sizes.values())
        text += f"Of types whose calls are NCCL's own but for those of the ring, NCCL took up to {most} of itself.\n"
    for name, rows_beside in beside.items():
        told = [
            f"{many}: {row['GEMM, alone']} alone, {row['GEMM, NCCL']} without, {row['GEMM, safecomm']} with it"
            for many, row in rows_beside.items()
        ]
        text += (
            f"{name[0].upper()}{name[1:]}, by their number, without `low_latency()` and with it: {'; '.join(told)}.\n"
        )
        text += "Asynchronous calls of this size are NCCL's with it too.\n"
    head = (first, *["NCCL", "torch's symmetric memory", "`low_latency()`", "ratio to NCCL"] * len(ways))
    return f"{table(head, rows)}\n{text}"


def low_latency_parent(results, soak, megatron):
    """How the kernels compare with those before; what a soak has found; a step of Megatron."""
    rows = []
    for name, row in results["us"].items():
        spread, ratios = f"{row['from']} to {row['to']}", (row["loops ratio"], row["idle ratio"])
        rows.append((name, row["parent"], row["this"], row["ratio"], spread, *ratios))
    head = (
        "us of a call in a CUDA graph, bytes", f"at {results['parent']}", "now", "median ratio", "eight of ten turns",
        "now, with loops over chunks", "then, with two idle programs",
    )  # fmt: skip
    ms, (least, most) = megatron["ms a step"], megatron["ratios"]
    told = (
        "\nThe kernels beside those of the commit before they had strong stores and signals, by `{command}`\n"
        "({world} x {device}, torch {torch}, {date}):\n\n"
    )
    soaked = (
        "\nA soak by `{command}` on {world} x {device} made {replayed} replayed calls and\n{eager} eager ones: {wrong} "
        "elements were wrong, and {stuck} calls stuck.\n"
    )
    for name, found in soak.items():
        if name.startswith(("before ", "with ")):
            soaked += f"{name[0].upper()}{name[1:]}, it made {found['replayed']} and {found['eager']}: "
            soaked += f"{found['wrong']} wrong, {found['stuck']} stuck.\n"
    step = (
        f"\nA training step of Megatron, TP 2, hidden size 4096, sequences of 2048: {ms['NCCL']} ms on NCCL, "
        f"{ms['low_latency()']} ms with\n`low_latency()`, which takes {megatron['calls of a step that it takes']} "
        f"calls of it; {megatron['ratio']} of the time ({least} to {most}), by `{megatron['command']}`.\n"
    )
    return told.format(**results) + table(head, rows) + soaked.format(**soak) + step


def push_copy(results):
    """What plain copies over the link take, by the bytes of an all_reduce of two ranks."""
    rows = []
    for size, reference in results["reference"].items():
        row = [f"{int(size) >> 20} MiB", reference["NCCL"], reference["copy engine"]]
        for way in ("push", "moves"):
            shapes = results[way].get(size, {})
            best = min(shapes, key=shapes.get, default=None)
            row.append(f"{shapes[best]} ({best})" if best else "-")
        rows.append(row)
    head = (
        "us, in a CUDA graph, slowest rank",
        "NCCL's all_reduce",
        "the copy engine, as many bytes each way",
        "the best plain kernel that pushes them",
        "the best that also moves what an all_reduce moves",
    )
    told = (
        "From 8 MiB on, what is left between NCCL and the link, by `{command}` ({world} x {device}, torch {torch}):\n\n"
    )
    return f"\n{told.format(**results)}\n\n" + table(head, rows)


def functional(results):
    """The figures of functional collectives, of the cases that there are."""
    parts = ["By `{command}`: torch {torch}, {world} x {device}, {date}, at {commit}.\n\n".format(**results)]
    rows = [
        (way, row["ours"], row["the backend's"], row["low.calls, of two calls"])
        for way, row in results.get("kernels", {}).items()
    ]
    columns = "kernels of a step with four collectives (DTensor: one)", "ours", "NCCL's", "`low.calls`, two steps"
    parts.append(table(columns, rows))
    times = results["times"]
    ways = [name for name in times if name.startswith("host us") and name.endswith("torch's")]
    rows = [
        (name.removesuffix(", torch's"), times[name], times[name.removesuffix("torch's") + "ours"]) for name in ways
    ]
    rows += [(name, "-", times[name]) for name in times if name.startswith("host us") and name not in ways
             and name.removesuffix("ours") + "torch's" not in ways]  # fmt: skip
    device = "device us, operator and wait"
    rows += [(device, times[f"{device}, torch's"], times[f"{device}, ours"])]
    rows += [("device us, wrapped", "-", times["device us, wrapped"])]
    parts.append("\n" + table(("all_reduce of 8 KiB", "torch's", "`low_latency()`"), rows))
    llama = results.get("llama", {})
    rows = [
        (way, row["us, without"], row["us, with"], row["ratio"], row["captured calls of low_latency(), with"])
        for way, row in llama.items()
        if isinstance(row, dict)
    ]
    if rows:
        head = (
            f"a Llama of transformers {llama['transformers']}, {llama['layers']} layers: us of a token in a CUDA graph"
        )
        parts.append("\n" + table((head, "NCCL", "`low_latency()`", "ratio", "calls taken"), rows))
    bits, gradients = results["bits"], results["gradients"]
    parts.append(
        f"\nOf {bits['calls']} random calls, {bits['taken in all their forms']} of them taken in every form, "
        f"{bits['different']} differed from the wrapped call in a bit. Gradients\nthrough DTensor and functional "
        f"collectives differed by at most {gradients['largest relative difference']:.1g} of those without.\n"
    )
    if soak := results.get("soak"):
        parts.append(
            f"Of {soak['calls']} mixed calls, {soak['eager']} eager and {soak['replayed']} replayed, "
            f"{soak['wrong elements']} elements were wrong and {soak['stuck']} calls stuck.\n"
        )
    return "".join(parts)


def host(results, where):
    rows = [(name, row["stock"], row["safecomm"], row["ratio"]) for name, row in results["rows"].items()]
    return table((f"host time of a call, 1 KiB, {where}, us", "torch.distributed", "safecomm", "ratio"), rows)


def host_of_now(small, large):
    head = "With torch {torch} on one {device}, one rank, at the commit {commit}: ratios with their quartiles.\n\n"
    parts = [head.format(**small)]
    for results, size in ((small, "1 KiB"), (large, "1 MiB")):
        rows = [
            (name, row["stock"], row["safecomm"], f"{row['ratio']} ({row['quartiles'][0]} to {row['quartiles'][1]})")
            for name, row in results["rows"].items()
        ]
        columns = f"host time of a call, {size}, {results['backend']}, us", "torch.distributed", "safecomm", "ratio"
        parts.append(table(columns, rows))
    return "".join(parts)


def ordered(results):
    cases = {name: case["figures"] for name, case in results["cases"].items()}
    head = "With torch {torch} on one {device}, one rank, at the commit {commit}: `{command}`.\n\n".format(**results)
    forum = cases["s2_forum_program_on_a_side_stream"]
    rows = [
        (name, f"{row['buffers above no communication']:g}", row.get("time to torch's", "-"))
        for name, row in forum.items()
    ]
    columns = "forum's program on a side stream", "buffers above no communication", "time to torch's, no record_stream"
    every = cases["s1_every_combination_of_streams_ordered_by_events"]
    total = every["programs"] * every["trials each"]
    again = cases["s1_an_event_recorded_again_past_python"]
    told = (
        f"{every['programs']} programs of three streams, ordered by events: {every['safecomm corrupted']} of {total} "
        f"corrupted. An event recorded again past Python: {again['corrupted']} of {again['of']}.\n\n"
    )
    calls = cases["host_time_of_what_orders_streams"]
    times = [
        (name, row["torch's us"], row.get("us more") or row["us more than torch's"], row.get("us more than unseen", ""))
        for name, row in calls.items()
    ]
    named = "host time of a call", "torch's, us", "us more", "us more than where safecomm does not see events"
    return head + table(columns, rows) + "\n" + told + table(named, times)


def recorded_use(results):
    rows, before = results["rows"], results["before"]
    told = (
        "With torch {torch} on one {device}, one rank, at the commit {commit}: `{command}`, in us of the host a call. "
        '"Whole": a tensor is\nallocated, recorded and freed, with all that gives it back. "Cold": 4 MiB of other '
        "memory are read before each call.\n\n"
    ).format(**results)
    calls = [
        (case, row["torch"], row["converted"], before["rows"][case]["converted"])
        for case, row in rows.items()
        if "converted" in row
    ]
    others = [
        (case, row["torch"], row["safecomm"], before["rows"][case]["safecomm"])
        for case, row in rows.items()
        if {"torch", "safecomm"} <= row.keys()
    ]
    earlier = f"at {before['commit']}"
    return (
        told
        + table(("record_stream", "torch's", "converted", earlier), calls)
        + "\n"
        + table(("memory of another stream", "torch", "safecomm", earlier), others)
    )


def imported(results):
    compiled, source = results["byte code"], results["source"]
    return (
        f"`import safecomm` took {compiled['median']} ms beyond `import torch.distributed` (torch {results['torch']},\n"
        f"Python {results['python']}, {results['device']}; {compiled['least']} to {compiled['most']}), and\n"
        f"{source['median']} ms where its byte code is neither there nor may be written.\n"
    )


def asked(results):
    """Return what one question takes: by what was read before, the medians with their quartiles."""
    by_size = results["MiB read before"]

    def cell(size, name):
        low, middle, high = by_size[size][name]
        return f"{middle} ({low} to {high})"

    rows = [
        (what, *(cell(size, f"{what}, {how}") for size in by_size for how in ("ctypes", "C")))
        for what in ("one segment", "two segments", "anchored")
    ]
    sizes = [f"{size} MiB" if size != "0" else "warm" for size in by_size]
    head = ("memory at one address, or at two", *(f"{size}: {how}" for size in sizes for how in ("ctypes", "C")))
    return (
        f"Nanoseconds a call, medians with quartiles. Who was asked: {results['driver']}. So much other memory was\n"
        f"read before each (Python {results['python']}, {results['date']}).\n\n" + table(head, rows)
    )


def asked_in_calls(results):
    """Return what calls take whose questions are asked in C, and by ctypes."""
    rows = [
        (
            name,
            *(found[way] for way in ("stock", "ctypes", "C")),
            *(
                f"{found[ratio]['ratio']} ({found[ratio]['quartiles'][0]} to {found[ratio]['quartiles'][1]})"
                for ratio in ("ctypes to stock", "C to stock")
            ),
        )
        for name, found in results["rows"].items()
    ]
    head = ("call", "torch.distributed, us", "ctypes, us", "C, us", "ctypes: of torch's", "C: of torch's")
    return (
        f"{results['world']} x {results['device']}, torch {results['torch']}, {results['date']}; {results['unit']}.\n"
        "Tensors of 4 MiB, for which the driver is asked; *cold*: 4 MiB of other memory were read before each call.\n\n"
        + table(head, rows)
    )


def failed(cases):
    names = [f"`{name}`" for name, case in cases.items() if not case["passed"]]
    return f"not {', '.join(names)} (see [limits.md](limits.md))." if names else "none failed."


def figures():
    """Return all of them, for ``docs/benchmarks.md``."""
    gpu, times = load("gpu_tests.json"), load("host_time.json")
    cases = gpu["cases"]
    parts = [
        "Measured by `torchrun --nproc-per-node 2 tests/gpu/run.py` and `... benchmarks/host_time.py`:",
        f"{setting(gpu)}. The results are in",
        "[benchmarks/results](../benchmarks/results), and `python benchmarks/table.py` makes these tables of them.",
        "Absolute times are one machine's; the ratios are medians of interleaved runs.",
        f"Of {len(cases)} cases {sum(case['passed'] for case in cases.values())} passed; {failed(cases)}",
        f"They ran at the commits {', '.join(sorted({case['commit'] for case in cases.values()}))}, the times of calls",
        f"at {times['commit']}; [limits.md](limits.md#what-was-measured-and-what-was-not) says what has changed since.",
        "\n## Corrupted tensors\n",
        safety(cases),
        "## Memory\n",
        memory(cases),
        "## record_stream and CUDA graphs\n",
        recorded(cases),
        "## Compute and communication side by side\n",
        overlap(cases),
        "## The arena\n",
        arena(
            load("arena_host_time.json"),
            load("arena_lists.json"),
            load("arena_fragmentation.json"),
            cases,
        ),
        "## Many small collectives\n",
        bucketed(load("bucketed.json")),
        "## Low-latency collectives\n",
        low_latency(load("low_latency.json")),
        low_latency(load("low_latency_4.json")),
        low_latency_parent(
            load("low_latency_parent.json"), load("low_latency_soak.json"), load("megatron_low_latency.json")
        ),
        push_copy(load("push_copy.json")),
        "## Functional collectives and compiled code\n",
        functional(load("functional_low_latency.json")),
        "## Megatron\n",
        megatron(load("megatron.json")),
        megatron_steps(load("megatron_steps.json")),
        megatron_pretrain(load("megatron_pretrain.json")),
        megatron_buffers(load("megatron_buffers.json")),
        "## Side streams ordered by events\n",
        ordered(load("stream_order_one.json")),
        "## Host time of record_stream and of handoffs\n",
        recorded_use(load("recorded_use.json")),
        "## Host time of a call\n",
        host_of_now(load("host_time_one.json"), load("host_time_one_1mib.json")),
        "On gloo, torch 2.13: CPU time of the calling thread.\n",
        host(load("host_time_gloo.json"), "gloo, one rank"),
        "The same earlier, on two GPUs, when three collectives had the direct way and not six:\n",
        host(times, times["backend"]),
        "## Which stream memory was allocated on, in C and by ctypes\n",
        asked(load("alloc_stream_gpu.json")),
        asked(load("alloc_stream.json")),
        asked_in_calls(load("in_c.json")),
        "## Import\n",
        imported(load("import_time.json")),
    ]
    return "\n".join(parts)


def six():
    """Return the figures of the README."""
    gpu, times, latency = load("gpu_tests.json"), load("host_time_one.json"), load("low_latency.json")
    cases = gpu["cases"]
    streams = cases["s1_every_combination_of_streams"]["figures"]
    trials = streams["programs"] * streams["trials each"] * gpu["world"]
    forum = cases["s2_forum_program_with_record_stream"]["figures"]
    captured = cases["s5_record_stream_in_a_capture"]["figures"]
    dropped = cases["s3_dropped_handles"]["figures"]
    small = next(latency[way] for way in WAYS if way in latency)["all_reduce"][str(8 << 10)]
    reduce = times["rows"]["all_reduce, sync, default stream"]
    ratios = [row["ratio"] for row in times["rows"].values()]

    def deepest(library):
        return captured[f"Python, {library}: MiB at 4, 16, 64 layers"][-1]

    rows = [
        (
            f"{streams['programs']} programs on three streams: corrupted tensors, of {trials}",
            streams["stock corrupted"],
            streams["safecomm corrupted"],
        ),
        (
            "`all_reduce` on a side stream and `record_stream`: peak, MiB "
            f"(without `record_stream` {forum['stock, no record_stream']['peak MiB']})",
            forum["stock"]["peak MiB"],
            forum["converted"]["peak MiB"],
        ),
        ("64 layers of it in a CUDA graph: MiB", deepest("stock"), deepest("safecomm")),
        (
            "16 dropped handles of 32 MiB: MiB still held when complete",
            dropped["stock, drain: MiB held"],
            dropped["safecomm, drain: MiB held"],
        ),
        (
            f"`all_reduce` of 8 KiB in a CUDA graph, `low_latency()`, {latency['device'].split(' 80')[0]}: us",
            small["NCCL"],
            small["safecomm"],
        ),
        (
            f"host time of `all_reduce`, 1 KiB, {times['world']} GPU: us "
            f"(all calls: {min(ratios):.2f} to {max(ratios):.2f} of torch's)",
            reduce["stock"],
            reduce["safecomm"],
        ),
    ]
    where = f"{gpu['world']} x {gpu['device']}, torch {gpu['torch']}"
    return table((where, "torch.distributed", "safecomm"), rows)


MADE = {"README.md": six, "docs/benchmarks.md": figures}
"""What makes the figures of each document, between the two marks in it."""


def made(name):
    """Return a document as it is, and as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return text, f"{before}{BEGIN}\n{MADE[name]()}{END}{after}"


def stale():
    """Return the documents whose figures are not those of the results."""
    return [name for name in MADE if len(set(made(name))) > 1]


def main():
    if "--check" not in sys.argv:
        for name in MADE:
            (ROOT / name).write_text(made(name)[1], encoding="utf-8")
    elif wrong := stale():
        sys.exit(f"{', '.join(wrong)}: not what benchmarks/table.py makes of the results")


if __name__ == "__main__":
    main()
