"""Write the figures of ``docs/benchmarks.md``, and the README's, from the committed results.

python benchmarks/table.py          # writes them
python benchmarks/table.py --check  # only compares

Each table is of one run, at one commit, on one kind of card; :func:`figures_of` raises where that is not so.
"""

import json
import pathlib
import re
import statistics
import sys
import textwrap
from decimal import ROUND_HALF_UP, Decimal

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- figures:begin ?(\S*) -->\n).*?(<!-- figures:end -->)", re.DOTALL)
NEWEST = "gpu_tests.json"
TORCH = "2.11.0"
BETWEEN, BACK_TO_BACK = "us in graphs, a kernel between", "us in graphs, back to back"


def load(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def card(results):
    return results["device"].split(" 80GB")[0].removeprefix("NVIDIA ")


def source(*names):
    """Say where a table is from: the cards, which are those of the first file, and the files."""
    results = load(names[0])
    world = results.get("world") or results.get("ranks") or 1
    if results["torch"].split("+")[0] != TORCH:
        raise ValueError(f"{names[0]}: the page says that all tables are of torch {TORCH}")
    links = ", ".join(f"[{name}](../benchmarks/results/{name})" for name in names)
    return f"\n{world} x {card(results)}: {links}.\n" if "device" in results else f"\n{links}.\n"


def figures_of(name, *cases):
    """Return the figures of some cases of the GPU tests, which one run has made at one commit."""
    found = load(name)["cases"]
    commits = {found[case].get("commit") for case in cases}
    if len(commits) > 1:
        raise ValueError(f"{name}: {', '.join(cases)} ran at several commits")
    return [found[case]["figures"] for case in cases]


def rounded(number, digits=2):
    return f"{Decimal(str(number)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)}"


def span(numbers, digits=2):
    numbers = list(numbers)
    return f"{rounded(min(numbers), digits)} to {rounded(max(numbers), digits)}"


# --- memory -----------------------------------------------------------------------------------------------------------


def corruption():
    one, every, events, captured = figures_of(
        NEWEST,
        "s1_corruption_programs",
        "s1_every_combination_of_streams",
        "s1_every_combination_of_streams_ordered_by_events",
        "s5_first_work_dropped_in_capture",
    )
    world = load(NEWEST)["world"]

    total = every["programs"] * every["trials each"] * world
    # Ordered by events, torch's run once, and all are counted on one rank.
    by_events = f"{events['stock corrupted']} of {events['programs']}"
    ours_by_events = f"{events['safecomm corrupted']} of {events['programs'] * events['trials each']}"
    stock, ours = (sum(row[whose] for row in one.values()) for whose in ("stock", "safecomm"))
    wrong = [f"{captured[f'{whose}: wrong replays of 20']} of 20" for whose in ("stock", "safecomm")]
    rows = [
        (f"{len(one)} programs with collectives or waits on side streams", f"{stock} of {3 * world * len(one)}",
         f"{ours} of {10 * world * len(one)}"),
        (f"{every['programs']} programs: each of three streams allocates, launches, waits",
         f"{every['stock corrupted']} of {total}", f"{every['safecomm corrupted']} of {total}"),
        ("the same, ordered by events", by_events, ours_by_events),
        ("replays of a graph whose first work was dropped", *wrong),
    ]  # fmt: skip
    return table(("trials with a corrupted tensor", "torch.distributed", "safecomm"), rows) + source(NEWEST)


def memory():
    forum, captured, dropped, loop, region, sends, shared, flat = figures_of(
        NEWEST,
        "s2_forum_program_with_record_stream",
        "s5_record_stream_in_a_capture",
        "s3_dropped_handles",
        "s3_dropped_in_a_loop",
        "s3_coalesced",
        "s1_point_to_point_leaves_nothing_unusable",
        "s6_graphs_share_memory",
        "s2_forum_program",
    )

    def layers(whose):
        return " / ".join(map(str, captured[f"Python, {whose}: MiB at 4, 16, 64 layers"]))

    buffers = [f"{loop[f'{whose}: buffers above base'] * 64:.0f}" for whose in ("stock", "safecomm")]
    rows = [
        ("forum program on one stream, beyond the same without communication", "0", f"{max(flat.values()):.0f}"),
        (f"forum program with `record_stream`, peak ({forum['stock, no record_stream']['peak MiB']} without it)",
         forum["stock"]["peak MiB"], forum["converted"]["peak MiB"]),
        ("the same in a CUDA graph of 4 / 16 / 64 layers", layers("stock"), layers("safecomm")),
        ("16 handles of 32 MiB dropped, collectives complete: still held", dropped["stock, drain: MiB held"],
         dropped["safecomm, drain: MiB held"]),
        ("40 dropped handles of 64 MiB in a row, peak", *buffers),
        ("asynchronous coalescing region after `wait()`: still held", region["stock, device=True: MiB held"],
         region["safecomm, device=True: MiB held"]),
        ("20 `batch_isend_irecv` of 64 MiB: freed but not reusable", sends["stock: MiB"], sends["safecomm: MiB"]),
    ]  # fmt: skip
    told = (
        f"\n16 decoding graphs of `graph()` in one pool take {shared['16 sharing, largest first: MiB']} MiB if the "
        f"largest is captured first, {shared['16 sharing, smallest first: MiB']} if the smallest is, and "
        f"{shared['16 apart: MiB']} apart.\n"
    )
    return table(("MiB", "torch.distributed", "safecomm"), rows) + told + source(NEWEST)


# --- time -------------------------------------------------------------------------------------------------------------


def overlap():
    plain, converted = figures_of(NEWEST, "overlap_is_kept", "overlap_is_kept_under_conversion")
    ratios = [span((row["ratio"] for row in found.values()), 3) for found in (plain, converted)]
    told = (
        f"48 side-stream `all_reduce` of 64 and 256 MiB beside compute take {ratios[0]} of torch's time together, and "
        f"{ratios[1]} where torch's own calls use a converted `record_stream`.\n"
    )
    return told + source(NEWEST)


LEFT_OUT = "all_reduce_in_a_group", "all_to_all_single_of_sizes"  # like those without


def calls():
    small, large, gloo = (load(f"host_time_{which}.json") for which in ("one", "one_1mib", "gloo"))
    columns = [f"{how}, {where} stream" for where in ("default", "side") for how in ("sync", "async + wait")]
    names = [name for name in dict.fromkeys(name.split(", ")[0] for name in small["rows"]) if name not in LEFT_OUT]
    rows = [(name, *(rounded(small["rows"][f"{name}, {column}"]["ratio"]) for column in columns)) for name in names]

    def ratios(results, how):
        return span(row["ratio"] for name, row in results["rows"].items() if how in name)

    reduce = small["rows"]["all_reduce, sync, default stream"]
    told = (
        f"\nA synchronous `all_reduce` takes {reduce['safecomm']} us, and torch's {reduce['stock']}. With 1 MiB, calls "
        f"take {ratios(large, 'sync, default')} (synchronous) and {ratios(large, 'wait, default')} (asynchronous) on "
        f"the default stream, {ratios(large, 'sync, side')} and {ratios(large, 'wait, side')} on a side stream. "
        f"On gloo the calling thread takes {ratios(gloo, 'sync, cpu')} and {ratios(gloo, 'wait, cpu')} of torch's CPU "
        "time.\n"
    )
    files = [f"host_time_{which}.json" for which in ("one", "one_1mib", "gloo")]
    return table(("1 KiB, NCCL, ratio", *columns), rows) + told + source(*files)


MORE = "us more than torch's"
ORDERING = {
    "wait_stream, nothing held": "`wait_stream`, nothing held",
    "wait_stream, a use on the stream is held": "`wait_stream`, memory held",
    "all_reduce on a side stream and wait_stream": "`all_reduce` on a side stream and `wait_stream`",
    "all_reduce on a side stream and events": "`all_reduce` on a side stream and events",
}


def streams():
    forum, times = figures_of(NEWEST, "s2_forum_program_on_a_side_stream", "host_time_of_what_orders_streams")
    rows = [
        (said, times[name]["torch's us"], f"+{times[name].get('us more', times[name].get(MORE))}")
        for name, said in ORDERING.items()
    ]
    took = span((row["time to torch's"] for row in forum.values() if "time to torch's" in row), 3)
    above = max(row["buffers above no communication"] for row in forum.values())
    told = (
        f"\nThe forum program on a side stream peaks at {above:.0f} buffers above the same without communication, and "
        f"takes {took} of torch's time on the device.\n"
    )
    return table(("host time, us", "torch", "safecomm"), rows) + told + source(NEWEST)


RECORDED = {
    "": "one call",
    ": whole": "allocated, recorded, freed",
    ", cold": "one call, caches cold",
}


def recorded():
    results = load("recorded_use.json")
    rows = [
        (said, *(results["rows"][f"Tensor.record_stream, {held} held{case}"][whose]
                 for held in (0, 100) for whose in ("torch", "converted")))
        for case, said in RECORDED.items()
    ]  # fmt: skip
    head = "`Tensor.record_stream`, us", "torch", "converted", "torch, 100 tensors held", "converted, 100 held"
    return table(head, rows) + source("recorded_use.json")


def asked():
    found, whole = load("alloc_stream_gpu.json"), load("in_c.json")["rows"].values()
    us = {
        f"{how} {size}": rounded(found["MiB read before"][size][f"one segment, {how}"][1] / 1000)
        for how in ("ctypes", "C")
        for size in ("0", "8")
    }
    ways = [span(one[f"{way} to stock"]["ratio"] for one in whole) for way in ("ctypes", "C")]
    return (
        f"A question takes {us['ctypes 0']} us by ctypes and {us['C 0']} us in C, after 8 MiB of other memory was read "
        f"{us['ctypes 8']} and {us['C 8']} us. "
        f"Whole calls of 4 MiB take {ways[0]} of torch's time with ctypes, and {ways[1]} with C.\n"
        + source("in_c.json", "alloc_stream_gpu.json")
    )


PROGRAMS = {
    "dropped": "dropped handles",
    "side": "32 MiB on a side stream",
    "side_small": "64 KiB on a side stream",
    "side_large": "512 MiB on a side stream",
    "side_host_bound": "1 MiB on a side stream",
    "side_events": "1 MiB on a side stream, events",
    "offload": "copies to the host, `record_stream`",
    "overlapped": "256 MiB beside matmuls, `record_stream`",
    "activations": "300 activations, `record_stream`",
    "waited": "8 in flight, waited for",
    "crowd": "200 in flight, waited for",
    "futures": "8 in flight, by futures",
    "gloo": "64 dropped, gloo",
}


def constants():
    def shown(name, value):
        if "BUDGET" in name and value != "never":
            return f"{int(value) >> 20} MiB"
        return "no limit" if value == "never" else value

    rows = []
    for name, constant in load("constants.json")["constants"].items():
        for program, values in constant["programs"].items():
            own, *others = values.items()
            told = "; ".join(
                f"{shown(name, value)}: {rounded(took['ratio'])}, {took['peak MiB']:.0f} MiB" for value, took in others
            )
            rows.append((f"`{name}`", shown(name, own[0]), PROGRAMS[program], f"{own[1]['peak MiB']:.0f} MiB", told))
    head = "constant", "is", "program", "peak", "with another value: time, of that with ours; peak"
    return table(head, rows) + source("constants.json")


def imported():
    results = load("import_time.json")
    return (
        f"`import safecomm` takes {results['byte code']['median']} ms beyond `import torch.distributed`, and "
        f"{results['source']['median']} ms where there is no byte code and none may be written.\n"
        + source("import_time.json")
    )


# --- the arena --------------------------------------------------------------------------------------------------------


def bucketed():
    results = load("bucketed.json")
    us = {name: row["us"] for name, row in results["rows"].items()}
    sizes = ", ".join(f"{us[f'bucketed({mib})']} us with {mib} MiB" for mib in (4, 16, 32, 64))
    told = (
        f"200 `all_reduce` of 4 to 256 KiB, {results['MiB in all']} MiB in all, take {us['one by one']} us one by one "
        f"""and {us["torch's _coalescing_manager"]} us in torch's """
        f"`_coalescing_manager`; with `bucketed()` {sizes}.\n"
    )
    return told + source("bucketed.json")


def arena():
    times, fragmentation = load("arena_host_time.json"), load("arena_fragmentation.json")
    if len(set(fragmentation["commits"].values())) > 1:
        raise ValueError("arena_fragmentation.json is of several commits")
    named = {"tiled": "layers computed in tiles", "recompute": "recomputed activations"}
    columns = {f"{way}, {how}": f"{said}{where}"
               for how, where in (("default", ""), ("expandable", ", `expandable_segments`"))
               for way, said in (("stock", "torch"), ("arena", "arena"))}  # fmt: skip
    rows = [
        (named[program], *(ways[column]["overhead MiB"] for column in columns))
        for program, ways in fragmentation["programs"].items()
    ]
    ratios = span(row["ratio"] for row in times["rows"].values())
    told = f"\nAn arena's buffer takes {ratios} of the host time of `torch.empty`.\n"
    head = "MiB beyond the most in use", *columns.values()
    return table(head, rows) + told + source("arena_fragmentation.json", "arena_host_time.json")


def lists():
    rows = load("arena_lists.json")["rows"].items()

    def ratios(way):
        return span(row["ratio"] for name, row in rows if name.endswith(f", {way}"))

    told = (
        f"They take {ratios('slices')} of the time of torch's if the list has slices of one buffer, "
        f"and {ratios('pieces, low_latency()')} if it has pieces and `low_latency()` is on.\n"
    )
    return told + source("arena_lists.json")


# --- low latency ------------------------------------------------------------------------------------------------------

SHOWN = {
    "all_reduce": (1 << 13, 1 << 18, 1 << 20, 1 << 22, 1 << 26),
    "reduce_scatter": (1 << 13, 1 << 20, 1 << 23),
    "all_gather": (1 << 13, 1 << 20, 1 << 23),
    "all_to_all": (1 << 13,),
}


def bytes_of(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def took(row):
    """Return what NCCL, the fastest of torch's kernels of symmetric memory, and ours took."""
    return row["NCCL"], min((us for name, us in row.items() if name.startswith("torch")), default="-"), row["safecomm"]


def latency(name="low_latency_4.json"):
    results = load(name)
    rows = [
        (f"`{collective}`, {bytes_of(size)}",
         *(us for way in (BETWEEN, BACK_TO_BACK) for us in took(results[way][collective][str(size)])))
        for collective, sizes in SHOWN.items()
        for size in sizes
    ]  # fmt: skip
    three = "NCCL", "torch's symmetric memory", "`low_latency()`"
    return table(("us", *three, *(f"{one}, back to back" for one in three)), rows) + source(name)


def sglang():
    """The times of all_reduce beside those of SGLang's push kernels."""
    results, rows = load("low_latency_sglang.json"), []
    for size in (1 << power for power in (13, 16, 19, 21, 22, 23, 24, 25, 26)):
        cells = []
        for way in (BETWEEN, BACK_TO_BACK):
            row = results[way]["all_reduce"][str(size)]
            with_it, without = (
                min(us for name, us in row.items() if name.startswith("SGLang") and name.endswith("PDL") is plain)
                for plain in (False, True)
            )
            cells += [row["safecomm"], with_it, without]
        rows.append((bytes_of(size), *cells))
    heads = ("`low_latency()`", "SGLang", "SGLang without PDL")
    heads = (f"us, {results['world']} x {card(results)}", *heads, *(f"{one}, back to back" for one in heads))
    return table(heads, rows) + source("low_latency_sglang.json")


def since():
    """Return what the kernels of today take of the time of those that the other figures are of, by collective."""
    results = load("low_latency_parent.json")
    ratios = {}
    for name, row in results["us"].items():
        collective, size = name.split(", ")
        if int(size) >= 8 << 10:  # of smaller calls, which vary more, the ratio is about 1
            ratios.setdefault(collective, []).append(row["ratio"])
    told = ", ".join(f"`{collective}` {span(found)}" for collective, found in ratios.items())
    return (
        f"- Since the figures of four GPUs the small kernels are faster. On two {card(results)}, side by side and back "
        f"to back, from 8 KiB to 32 MiB, they take of the time of commit {results['parent']}: {told}.\n"
    )


def latency_of_two():
    results, soaks = load("low_latency.json"), ("low_latency_soak.json", "low_latency_soak_4.json")
    kinds = results["ratio by operation and type"]
    return (
        latency("low_latency.json") + f"\n- The largest ratio to NCCL over {len(kinds)} operations and types was "
        f"{max(ratio for sizes in kinds.values() for ratio in sizes.values())}.\n"
        f"- An eager `all_reduce` of 8 KiB takes {results['host us, 8 KiB']['ratio']} of the host time of torch's.\n"
        + since()
        + "".join(map(soaked, soaks))
        + source("low_latency_parent.json", *soaks)
    )


def invariance():
    results = load("invariance.json")["by ranks"]
    rows = [(ranks, *(f"{found[name]:,}" for name in COUNTED)) for ranks, found in results.items()]
    link = "[invariance.json](../benchmarks/results/invariance.json)"
    return table(("ranks on gloo", *COUNTED), rows) + f"\n{link}, by `python tests/same_bits.py`.\n"


def invariant_on_gpus():
    """The times of all_reduce inside of invariant(), beside NCCL's as it is, and pinned."""
    results = load("invariance_gpus.json")
    pinned = results["us of NCCL, pinned"]["all_reduce"]
    rows = []
    for size in (1 << power for power in (13, 16, 19, 21, 23, 26, 28)):
        ours, moved = (results[name]["all_reduce"][str(size)] for name in ("us", "us, moved"))
        us = ours["invariant()"]
        rows.append((bytes_of(size), ours["NCCL"], us, moved["invariant(), moved"], pinned[str(size)]["NCCL"]))
    ratios = [us["ratio of invariant()"] for sizes in results["us"].values() for us in sizes.values()]
    of_pinned = [us["invariant()"] / pinned[size]["NCCL"] for size, us in results["us"]["all_reduce"].items()]
    without = [row["ratio of invariant(), moved"] for row in results["us without links"]["all_reduce"].values()]
    lines = [
        f"- With kernels, 8 KiB to 256 MiB of `all_reduce` and `reduce_scatter`: {span(ratios)} of NCCL's time, "
        f"{span(of_pinned)} of NCCL pinned to one channel of a tree. Moved, where GPUs don't reach each other's memory "
        f"(`NCCL_P2P_DISABLE=1`), from 1 MiB on: {span(without)}.",
    ]
    for name, what in (("by kernels", "kernels"), ("moved", "moved"), ("without links", "moved, without links")):
        four = next(found for key, found in results[name].items() if "GEMM" in key)["4"]
        backward = [row["ratio"] for row in results[name]["us of products and buckets"].values()]
        lines.append(
            f"- Asynchronous, {what}: of the time with NCCL's, a product of 8192 cubed beside four of 32 MiB takes "
            f"{four['GEMM, safecomm'] / four['GEMM, NCCL']:.2f}, all of it "
            f"{four['both, safecomm'] / four['both, NCCL']:.2f}; products with buckets of 25 MiB between them, as in a "
            f"backward, {span(backward)}."
        )
    heads = (f"us, `all_reduce`, {results['world']} x {card(results)}", "NCCL", "kernels", "moved", "NCCL pinned")
    return table(heads, rows) + "\n" + "\n".join(lines) + "\n" + source("invariance_gpus.json")


COUNTED = ("cases", "sets of elements", "wrong", "torch alone differs")


def soaked(name):
    soak = load(name)
    errors = [run["seconds until an error"] for run in soak["runs"] if "seconds until an error" in run]
    stopped = max((f"; of a rank that stops, an error after {one['took']:g} seconds" for one in errors), default="")
    kernels = " of earlier kernels" if soak["date"] < load("low_latency_parent.json")["date"] else ""
    return (
        f"- A soak{kernels} on {soak['world']} GPUs made {soak['replayed']:,} replayed calls and {soak['eager']:,} "
        f"eager ones: {soak['wrong']} wrong elements, {soak['stuck']} hangs{stopped}.\n"
    )


def decode():
    return span(row["ratio"] for row in load("low_latency_4.json")["decode step us"].values()), span(
        row["ratio"] for row in load("low_latency.json")["decode step us"].values()
    )


def functional():
    results = load("functional_low_latency.json")
    times, llama = results["times"], results["llama"]
    named = {
        "host us, functional and wait": "host, functional collective and wait",
        "host us, operator and wait": "host, operator and wait",
        "host us, operator and wait on another stream": "host, operator, wait on another stream",
        "device us, operator and wait": "device, operator and wait",
    }
    rows = [(said, times[f"{name}, torch's"], times[f"{name}, ours"]) for name, said in named.items()]
    rows.append(("host, call of safecomm", "-", times["host us, wrapped, ours"]))
    tokens = [
        (f"a token of a Llama, {way}", row["us, without"], row["us, with"])
        for way, row in llama.items()
        if "batch 1" in way
    ]
    bits, soak = results["bits"], results["soak"]
    told = (
        f"\nOf {bits['calls']} random calls {bits['different']} differed in a bit from the wrapped call; of "
        f"{soak['calls']:,} mixed calls {soak['wrong elements']} had a wrong element and {soak['stuck']} hung. The "
        f"Llama is that of transformers {llama['transformers']}, of {llama['layers']} layers, in a CUDA graph.\n"
    )
    head = "`all_reduce` of 8 KiB, us", "torch's", "`low_latency()`"
    return table(head, rows + tokens) + told + source("functional_low_latency.json")


# --- Megatron ---------------------------------------------------------------------------------------------------------

AVOID = "runner, avoid"


def peaks(hows):
    """Return what a way of training allocates and reserves at most, patched to unpatched, and the MiB between them."""
    ratios = (f"{hows[AVOID][f'peak_{what}_kib ratio']:.3f}" for what in ("alloc", "reserved"))
    beyond = (f"{hows[how]['reserved minus allocated KiB'] / 1024:.1f}" for how in ("stock", AVOID))
    return *ratios, *beyond


def megatron_ways():
    """Return the ways of training, by the commit at which they ran."""
    found = {}
    for way, hows in load("megatron.json")["ways"].items():
        (commit,) = {row["commit"] for row in hows.values()}
        found.setdefault(commit, {})[way] = hows
    return found


def megatron():
    most, (other,) = sorted(megatron_ways().values(), key=len, reverse=True)
    ways = load("megatron.json")["ways"]
    if not all(row["same"] and not row["past"] for hows in ways.values() for row in hows.values()):
        raise ValueError("a patched run of Megatron differs from the one without")
    allocated, reserved, *beyond = peaks(ways[other])
    head = (
        "with `--avoid-record-streams`",
        "peak allocated, ratio",
        "reserved, ratio",
        "MiB between, unpatched",
        "patched",
    )
    return (
        table(head, [(way, *peaks(hows)) for way, hows in most.items()])
        + f"\n{other}, of a later commit: allocated {allocated}, reserved {reserved}, MiB between {beyond[0]} and "
        f"{beyond[1]}. Losses, gradient norms and weights are equal in all.\n" + source("megatron.json")
    )


def noisy(results):
    return f"{rounded(results['ratio'])} ({' to '.join(map(rounded, results['ratios']))} from turn to turn)"


def steps():
    results = load("megatron_steps.json")["with C"]
    rows = []
    for way, sizes in results["step time"].items():
        (row,) = sizes.values()
        low, middle, high = row["ratio, 95 %"]
        spread = f"{low:.3f} to {high:.3f}"
        rows.append((way, f"{row['step_ms']:.1f}", f"{middle:.3f}", spread, rounded(results["calls"][way]["ratio"])))
    head = "microbatches of 2", "unpatched, ms", "patched, ratio", "95 % of 8 processes", "its collectives alone"
    bound = [sizes["microbatches of 64"]["ratio"] for sizes in load("megatron.json")["step time"].values()]
    quick, pretrain = load("megatron_low_latency.json"), load("megatron_pretrain.json")
    if not all(row["same"] for hows in pretrain["ways"].values() for row in hows.values()):
        raise ValueError("a patched pretrain_gpt.py differs from the one without")
    if any(row["past"] for hows in pretrain["ways"].values() for how, row in hows.items() if how != "stock"):
        raise ValueError("collectives of a patched pretrain_gpt.py bypass safecomm")
    told = (
        f"\nWith microbatches of 64, where the device takes the time, a patched step takes {span(bound, 3)}. "
        f"With `low_latency()` a step of tensor parallelism takes {noisy(quick)} of its time with NCCL. "
        "Megatron-LM's own `pretrain_gpt.py`, unedited, prints equal losses and norms, and no collective bypasses "
        "safecomm.\n"
    )
    files = "megatron_steps.json", "megatron.json", "megatron_low_latency.json", "megatron_pretrain.json"
    return table(head, rows) + told + source(*files)


# --- what to take away ------------------------------------------------------------------------------------------------


def costs():
    ways = load("megatron.json")["ways"]
    moved = [way for way, hows in ways.items() if float(peaks(hows)[0]) != 1 or float(peaks(hows)[1]) != 1]
    allocated, reserved, *_ = peaks(ways[moved[0]])
    stepped = load("megatron_steps.json")["with C"]["step time"]
    (host_bound,) = stepped["TP, SP, DDP, overlapped"].values()
    low, middle, high = host_bound["ratio, 95 %"]
    bound = [sizes["microbatches of 64"]["ratio"] for sizes in load("megatron.json")["step time"].values()]
    theirs, more = one_use(NEWEST)
    others = [one_use("stream_order_one.json"), of_two_calls()]
    use = load("recorded_use.json")["rows"]
    warm, cold = (use[f"Tensor.record_stream, 0 held{how}"] for how in ("", ", cold"))
    region = [load(f"host_time_{which}.json")["rows"]["region_of_four, async + wait, side stream"]["ratio"]
              for which in ("one", "one_1mib")]  # fmt: skip
    program = load("arena_fragmentation.json")["programs"]["recompute"]
    quick = load("megatron_low_latency.json")
    told = [
        f"**Megatron's peak memory does not change** in {len(ways) - len(moved)} of {len(ways)} ways of training, and "
        f"hardly in the other ({', '.join(moved)}): allocated {allocated}, reserved {reserved} of unpatched "
        "([table](#megatron)).",
        f"**A Megatron step that waits for the host takes {middle:.3f}** of an unpatched one ({low:.3f} to {high:.3f}) "
        f"with sequence parallelism and DDP; one that waits for the device {span(bound, 3)}.",
        f"**An `all_reduce` on memory of another stream, and `wait_stream`,** take the host {more:.0f} us more than "
        f"torch's {theirs:.0f}; on two other machines "
        + " and ".join(f"{over:.0f} more than {under:.0f}" for under, over in others)
        + ". torch holds nothing there, and can corrupt the memory.",
        f"**A converted `record_stream`** takes {warm['converted']} us where torch's takes {warm['torch']}; with cold "
        f"caches, as in a program, {cold['converted']} and {cold['torch']} us.",
        f"**An asynchronous coalescing region** of four calls takes up to {max(region):.2f} of torch's host time.",
        "**`low_latency()` gains nothing** for the largest calls. A training step of Megatron with it took "
        f"{noisy(quick)}: within the noise.",
        "**An arena** reserves more, not less, with recomputed activations: "
        f"{program['arena, default']['overhead MiB']} MiB beyond what is in use, and "
        f"{program['stock, default']['overhead MiB']} without it.",
    ]
    return "".join(f"- {one}\n" for one in told)


def one_use(name):
    """Return what an ``all_reduce`` on a side stream and ``wait_stream`` take with torch, and what ours take more."""
    (times,) = figures_of(name, "host_time_of_what_orders_streams")
    row = times["all_reduce on a side stream and wait_stream"]
    return row["torch's us"], row[MORE]


def of_two_calls():
    """Return the same of the run that times the two calls apart."""
    rows = [load("recorded_use.json")["rows"][f"all_reduce on a side stream{one}"] for one in ("", ": wait_stream")]
    theirs = sum(row["torch"] for row in rows)
    return theirs, sum(row["safecomm"] for row in rows) - theirs


def gains():
    every, forum, captured, dropped = figures_of(
        NEWEST,
        "s1_every_combination_of_streams",
        "s2_forum_program_with_record_stream",
        "s5_record_stream_in_a_capture",
        "s3_dropped_handles",
    )
    rows = load("host_time_one.json")["rows"].items()
    own = [row["ratio"] for name, row in rows if "default" in name and "barrier" not in name and "region" not in name]
    nccl, torchs, ours = took(load("low_latency_4.json")[BETWEEN]["all_reduce"][str(8 << 10)])
    llama = [row["ratio"] for row in load("functional_low_latency.json")["llama"].values() if isinstance(row, dict)]
    four, two = decode()
    token = span(llama)
    deepest = [captured[f"Python, {whose}: MiB at 4, 16, 64 layers"][-1] for whose in ("stock", "safecomm")]
    trials = every["programs"] * every["trials each"] * load(NEWEST)["world"]
    told = [
        f"**No corruption**: of {trials} trials on side streams with a delayed rank, torch corrupts "
        f"{every['stock corrupted']} and safecomm {every['safecomm corrupted']}.",
        f"**Memory with `record_stream`**: a peak of {forum['converted']['peak MiB']} MiB in place of "
        f"{forum['stock']['peak MiB']}; in a CUDA graph of 64 layers {deepest[1]} in place of {deepest[0]}; after "
        f"dropped handles {dropped['safecomm, drain: MiB held']} held in place of {dropped['stock, drain: MiB held']}.",
        f"**Host time of a collective** on memory of its own stream, NCCL, 1 KiB: {span(own)} of torch's, but for "
        "`barrier` and coalescing regions.",
        f"**`low_latency()`**: a decoding step takes {four} of its time with NCCL on four GPUs, {two} on two, and "
        f"a token of a Llama {token}. An `all_reduce` of 8 KiB beside other kernels takes {ours} us; NCCL's takes "
        f"{nccl}, torch's symmetric memory {torchs}.",
    ]
    return "".join(f"- {one}\n" for one in told)


def brief():
    """Return the figures of the README."""
    results = load(NEWEST)
    every, forum, captured, dropped = figures_of(
        NEWEST,
        "s1_every_combination_of_streams",
        "s2_forum_program_with_record_stream",
        "s5_record_stream_in_a_capture",
        "s3_dropped_handles",
    )
    trials = every["programs"] * every["trials each"] * results["world"]
    theirs, more = one_use(NEWEST)
    times, four = load("host_time_one.json"), load("low_latency_4.json")
    nccl, torchs, ours = took(four[BETWEEN]["all_reduce"][str(8 << 10)])
    reduce = times["rows"]["all_reduce, sync, default stream"]

    def deepest(whose):
        return captured[f"Python, {whose}: MiB at 4, 16, 64 layers"][-1]

    rows = [
        (f"side streams, delayed rank: corrupted tensors, of {trials}", every["stock corrupted"],
         every["safecomm corrupted"]),
        (f"`record_stream`: peak, MiB ({forum['stock, no record_stream']['peak MiB']} without it)",
         forum["stock"]["peak MiB"], forum["converted"]["peak MiB"]),
        ("64 layers with `record_stream` in a CUDA graph: peak, MiB", deepest("stock"), deepest("safecomm")),
        ("16 dropped handles of 32 MiB: MiB still held", dropped["stock, drain: MiB held"],
         dropped["safecomm, drain: MiB held"]),
        ("host us: `all_reduce` on a side stream, `wait_stream`", theirs, round(theirs + more, 2)),
        (f"host us: `all_reduce` on its allocation stream ({times['world']} {card(times)})", reduce["stock"],
         reduce["safecomm"]),
        (f"`low_latency()`, CUDA graph: `all_reduce` of 8 KiB, us ({four['world']} GPUs; symmetric memory {torchs})",
         nccl, ours),
    ]  # fmt: skip
    where = f"{results['world']} x {card(results)}, torch {results['torch'].split('+')[0]}"
    return table((where, "torch.distributed", "safecomm"), rows)


WAYS = "unpatched", "patch()", "avoid_record_streams()"


def programs():
    """What compare tells of ten programs: peaks without and with safecomm, and what it predicted."""
    results, rows = load("gains.json"), []
    for name, found in results["programs"].items():
        ways = found["ways"]
        peaks = [ways[way]["bytes"]["active"] if way in ways else None for way in WAYS]
        off = f"{100 * found['off by']:+.0f} %" if abs(found["off by"]) >= 0.005 else "0 %"
        rows.append(
            (name, *("-" if peak is None else peak >> 20 for peak in peaks), found["predicted active"] >> 20, off)
        )
    heads = "peak of active bytes, MiB", "unpatched", *(f"`{way}`" for way in WAYS[1:]), "predicted", "off by"
    return table(heads, rows) + source("gains.json")


def programs_in_turns():
    """What compare tells of the time of a step, each way in several processes by turns."""
    rows = []
    for name, found in load("gains_turns.json")["programs"].items():
        ms = {way: statistics.median(one["ms"]) for way, one in found["ways"].items()}
        first = ms["unpatched"]
        ratios = [f"{ms[way] / first:.2f}" if way in ms else "-" for way in WAYS[1:]]
        rows.append((name, f"{first:.1f}", *ratios))
    heads = "a step", "unpatched, ms", *(f"`{way}`, of it" for way in WAYS[1:])
    return table(heads, rows) + source("gains_turns.json")


def the_log():
    """The log's bandwidth of that by events of another program, least and most of three operations; its host time."""
    results = load("collective_log.json")
    rows = []
    for size in (1, 4, 16, 64, 256):
        row = [f"{size} MiB"]
        for what in ("busy", "as they come"):
            found = [
                one for key, one in results[f"bus bandwidth, GB/s, {what}"].items() if key.endswith(f" {size} MiB")
            ]
            row += [span(one[f"of {apart}"] for one in found) for apart in ("loop", "each")]
        rows.append(row)
    heads = (
        "the log's bus bandwidth", "queued calls: of a loop's", "of each call's", "as they come: of a loop's",
        "of each call's",
    )  # fmt: skip
    us = results["us a call, median of each program"]
    named = {"off, parent": "off, the commit before the log"}
    host = [
        (named.get(name, name), *(f"{rounded(statistics.median(found))} ({span(found)})" for found in of.values()))
        for name, of in us.items()
    ]
    medians = "host us of `all_reduce`, median (programs)", "`torch.distributed`", "`safecomm`"
    return table(heads, rows) + "\n" + table(medians, host) + source("collective_log.json")


MADE = {
    "README.md": {"": brief},
    "docs/same-bits.md": {"invariance": invariance, "invariant_on_gpus": invariant_on_gpus},
    "docs/low-latency.md": {"sglang": sglang},
    "docs/compare.md": {"programs": programs, "programs_in_turns": programs_in_turns, "the_log": the_log},
    "docs/benchmarks.md": {
        one.__name__: one
        for one in (
            costs, gains, corruption, memory, megatron, steps, overlap, calls, streams, recorded, asked, latency,
            latency_of_two, functional, bucketed, arena, lists, constants, imported,
        )
    },
}  # fmt: skip
"""What makes the figures of each document, by the name of the block that they stand in."""


def wrapped(text):
    """Break the lines of prose, and leave tables as they are."""
    lines = []
    for line in text.splitlines():
        more = "  " if line.startswith("- ") else ""
        prose = {"width": 138, "break_long_words": False, "break_on_hyphens": False, "subsequent_indent": more}
        lines += [line] if line.startswith("|") else textwrap.wrap(line, **prose) or [""]
    return "\n".join(lines) + "\n"


def made(name):
    """Return a document as it is, and as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = [block for _, block, _ in BLOCK.findall(text)]
    if sorted(found) != sorted(MADE[name]):
        raise ValueError(f"{name} has the blocks {sorted(found)}, and not {sorted(MADE[name])}")
    return text, BLOCK.sub(lambda block: f"{block[1]}{wrapped(MADE[name][block[2]]())}{block[3]}", text)


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
