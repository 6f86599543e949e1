"""The page and the plot of python -m safecomm report: what they draw adds up, and a real browser shows it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import snapshots
from browser import Browser
from pages import browse, needs_browser, probed, shown_by
from snapshots import MIB, Allocator, stack, write
from test_report import GONE, LAYER, recording

from safecomm.__main__ import main
from safecomm.diagnostics import colours, snapshot_report
from safecomm.diagnostics.files import make_reports
from safecomm.diagnostics.page import make_page
from safecomm.diagnostics.report import Report
from safecomm.diagnostics.snapshot import without_collection


@pytest.fixture
def pair(tmp_path):
    return snapshots.pair(tmp_path)


def share_of(colour, pixels):
    """Return the share of the pixels that are of ``colour``."""
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return float((abs(pixels - wanted).max(axis=-1) < 0.02).mean())


def test_the_plot_shows_both_timelines(pair, tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    path = tmp_path / "x.png"
    assert main(["report", *map(str, pair), "--png", str(path)]) == 0
    pixels = image.imread(path)[:-90, :, :3]  # without the legend
    half = pixels.shape[1] // 2
    assert share_of(colours.UNUSABLE, pixels[:, :half]) > 0.1
    assert share_of(colours.UNUSABLE, pixels[:, half:]) == 0
    assert share_of(colours.LINES[0], pixels[:, half:]) > 0.05


def test_the_plot_stacks_blocks_without_holes(pair):
    from safecomm.diagnostics.plot import _stacked

    for one in make_reports(pair):
        (timeline,) = one.timelines
        pieces = _stacked(timeline)
        assert pieces
        for number in range(200):
            time = timeline.duration * (number + 0.5) / 200
            here = sorted((bottom, block.nbytes) for block, start, end, bottom in pieces if start <= time < end)
            top = 0
            for bottom, nbytes in here:
                assert bottom == top
                top += nbytes
            active = [value for at, value in timeline.lines["active"] if at <= time][-1]
            assert top == active


def test_the_page_needs_no_other_file_and_runs_nothing_of_the_data(tmp_path):
    allocator = Allocator()
    evil = "/x/</script><script>alert(1)</script><!--.py"
    allocator.alloc(MIB, stack((1, "<img src=x onerror=alert(1)>"), program=evil))
    page = make_page(make_reports([write(tmp_path / "x.pickle", allocator.snapshot())]))
    assert not re.search(r"(src|href)\s*=\s*[\"']", page)
    assert "http" not in page.replace("http-equiv", "")
    assert "<img" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    (shown,) = shown_by(page)
    assert any("onerror" in shown["texts"][line] for line in shown["stacks"][-1])


# --- the sum of what is drawn -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[50, 500_000])
def traced(request):
    """A trace of so many allocations, and the page of it."""
    with without_collection():
        snapshot = snapshots.many(Path("many.pickle"), request.param)
        (trace,) = snapshot.traces
        active = [one + two for one, two in zip(trace.allocated, trace.unusable, strict=True)]
        timeline = snapshot_report._timeline(snapshot, trace, active, "", {snapshot.stacks.sites[1]: 1}, "")
        return trace, make_page([Report("", [], [], [], [timeline])])


def at_each_moment(trace):
    """Return the moments of a trace in microseconds, and the bytes that are active at each, and that wait."""
    return np.stack(
        (
            np.rint(np.array(trace.times) * 1e6),
            np.add(trace.allocated, trace.unusable, dtype=float),
            np.array(trace.unusable, dtype=float),
        )
    )


def test_the_page_has_what_is_active_and_what_waits_at_each_moment(traced):
    trace, page = traced
    (shown,) = shown_by(page)
    size, held, waited = (np.array(shown[name]) for name in ("size", "held", "waited"))
    start = np.cumsum(shown["start"])
    freed = start + np.maximum(held - 1, 0)
    end = freed + waited - 1
    waits, back = (held > 0) & (waited != 1), waited > 0
    moments, places = np.unique(np.concatenate((start, freed[held > 0], end[back])), return_inverse=True)
    added = places[: len(start)]
    released = np.searchsorted(moments, end[back])
    found = np.zeros((2, len(moments)))
    np.add.at(found[0], added, size)
    np.add.at(found[0], released, -size[back])
    np.add.at(found[1], np.searchsorted(moments, freed[waits]), size[waits])
    np.add.at(found[1], np.searchsorted(moments, end[back & waits]), -size[back & waits])
    assert len(size) == len(trace.blocks)
    assert max(trace.unusable) > 0
    assert np.array_equal([moments, *found.cumsum(axis=1)], at_each_moment(trace))
    assert len(page) < 8 << 20


ADDS_UP = """
    const [chart] = charts, { blocks, duration } = chart;
    const sha = async (values) => [...new Uint8Array(await crypto.subtle.digest("SHA-256", values))]
      .map((one) => one.toString(16).padStart(2, "0")).join("");
    found.digests = [await sha(blocks.times), await sha(blocks.active), await sha(blocks.unusable)];
    found.windows = [];
    for (const [from, to] of [[0, 1], [0.3, 0.4], [0.5, 0.501], [0.9, 1]]) {
      const start = from * duration, end = Math.max(to * duration, start + 2);
      const { numbers, block, start: starts, end: ends, bottom, band } = blocks.picture(start, end, 6e7, 1000, 400);
      const changes = new Map();
      const add = (t, size) => changes.set(t, (changes.get(t) ?? 0) + size);
      block.forEach((number, i) => { add(starts[i], blocks.size[number]); add(ends[i], -blocks.size[number]); });
      const times = [...changes.keys()].sort((a, b) => a - b);
      let place = 0, sum = 0, wrong = 0;
      band.times.forEach((t, i) => {
        while (place < times.length && times[place] <= t) sum += changes.get(times[place++]);
        if (sum !== band.bottoms[i] || band.tops[i] !== blocks.at(blocks.active, t) || sum > band.tops[i]) wrong++;
      });
      // None lies over another one, and there is no hole: at some moments one is looked for on top of the other.
      for (let k = 0; k < 40; k++) {
        const t = start + (end - start) * (k + 0.5) / 40;
        const here = block.map((number, i) => [starts[i], ends[i], bottom[i], bottom[i] + blocks.size[number]])
          .filter(([since, until]) => since <= t && t < until).sort((a, b) => a[2] - b[2]);
        here.forEach(([, , low], i) => { if (low !== (i ? here[i - 1][3] : 0)) wrong++; });
      }
      found.windows.push({ wrong, moments: band.times.length, drawn: numbers.length });
    }
    // The picture itself: a column is painted up to the most that is active in it.
    const { width, height } = chart.canvas, { data } = chart.canvas.getContext("2d").getImageData(0, 0, width, height);
    found.heights = [];
    for (let k = 1; k < 20; k++) {
      const x = Math.round(70 + chart.inner * k / 20);
      let painted = height;
      for (const column of [x - 1, x, x + 1]) for (let y = 0; y < painted; y++) {
        const i = 4 * (y * width + column);
        if (data[i + 3] && Math.min(data[i], data[i + 1], data[i + 2]) < 215) painted = y; // no line of the axis
      }
      const most = (first, last) => {
        const from = chart.time(first), to = chart.time(last);
        let value = blocks.at(blocks.active, from);
        for (let i = 0; i < blocks.times.length; i++) {
          const t = blocks.times[i];
          if (t >= from && t < to && blocks.active[i] > value) value = blocks.active[i];
        }
        return value;
      };
      found.heights.push([chart.y(most(x - 3, x + 4)) - 2, painted, chart.y(most(x, x + 1)) + 2]);
    }
"""


@needs_browser
def test_what_a_browser_draws_adds_up_to_what_is_active_at_each_moment_and_zoom(traced, tmp_path):
    trace, page = traced
    found = probed(page, tmp_path, ADDS_UP)
    expected = at_each_moment(trace)
    assert found["digests"] == [hashlib.sha256(one.astype("<f8").tobytes()).hexdigest() for one in expected]
    assert [one["wrong"] for one in found["windows"]] == [0, 0, 0, 0]
    assert found["windows"][0]["moments"] == len(trace.times) - 1  # the last one has no width
    if len(trace.blocks) > 1000:  # it is chosen again for each zoom
        whole, _, small, _ = found["windows"]
        assert 100 < whole["drawn"] < len(trace.blocks) / 50
        assert small["drawn"] > 100
    assert len(found["heights"]) == 19
    for least, painted, most in found["heights"]:
        assert least <= painted <= most


# --- a browser --------------------------------------------------------------------------------------------------------

INTERACTS = """
    const [one, two] = charts;
    const { blocks, drawn } = one;
    const place = drawn.block.findIndex((number) => blocks.freed[number] < blocks.end[number]);
    const number = drawn.block[place];
    const middle = (Math.max(drawn.start[place], blocks.freed[number]) + drawn.end[place]) / 2;
    const x = one.x(middle), y = one.y(drawn.bottom[place] + blocks.size[number] / 2);
    at(one, "pointermove", x, y);
    found.hover = details.textContent;
    found.tip = tip.style.display === "block" ? tip.textContent : "";
    found.covers = tip.getBoundingClientRect().right > two.canvas.getBoundingClientRect().left;
    found.scrolls = !at(one, "wheel", x, y, { deltaY: -300 });
    found.all = shown.to - shown.from;
    const before = one.time(x);
    found.zooms = at(one, "wheel", x, y, { deltaY: -300, ctrlKey: true });
    found.zoomed = shown.to - shown.from;
    found.moved = Math.abs(one.time(x) - before) / one.duration;
    found.zoomsWithoutCtrl = at(two, "wheel", x, y, { deltaY: -300 });
    found.both = two.to - two.from < two.duration * found.zoomed;
    one.canvas.dispatchEvent(new MouseEvent("dblclick"));
    found.again = [shown.from, shown.to];
    const drag = (from, to) => {
      at(one, "pointerdown", from, 50); at(one, "pointermove", to, 50); at(one, "pointerup", to, 50);
    };
    drag(200, 400);
    found.marked = [shown.from, shown.to].map((share) => Math.round(share * one.inner + 70));
    drag(200, 100);
    found.dragged = Math.round(shown.from * one.inner + 70);
    found.keys = [];
    for (const key of "0 + ArrowRight ArrowLeft - m ArrowUp ArrowDown M 0 ArrowUp x".split(" ")) {
      found.keys.push([key, press(one, key), shown.from, shown.to, shown.low / shown.high, shown.high]);
    }
    report.redraw();
    at(one, "pointermove", x, y); at(one, "pointerdown", x, y); at(one, "pointerup", x, y);
    found.pinned = details.textContent;
    at(two, "pointermove", 300, 30);
    found.stays = details.textContent === found.pinned && tip.style.display === "none";
    let copied = null;
    Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => { copied = text; } } });
    document.getElementById("copy").click();
    await later(() => copied !== null);
    found.copied = copied;
    press(one, "Escape");
    found.unpinned = details.className;
    press(two, "n");
    found.largest = details.textContent;
    press(two, "n");
    found.next = details.textContent;
    press(two, "p");
    found.back = details.textContent;
    document.getElementById("in").click();
    found.button = shown.to - shown.from;
    found.labels = charts.map((chart) => chart.canvas.getAttribute("aria-label"));
    found.focus = charts.map((chart) => { chart.canvas.focus(); return document.activeElement === chart.canvas; });
    found.names = [...document.querySelectorAll("button")].map((button) => button.textContent);
    found.tables = [...document.querySelectorAll("figure details table")].map((table) => table.rows.length);
    for (const name of [".legend", ".key", "#help", ".headline"]) {
      found[name] = document.querySelector(name).textContent;
    }
    const beside = [...document.querySelectorAll("figure")].map((figure) => figure.getBoundingClientRect());
    found.beside = beside[0].top === beside[1].top && beside[0].right <= beside[1].left;
    document.body.style.width = "360px";
    found.phone = document.body.scrollWidth;
    found.under = two.canvas.getBoundingClientRect().top > one.canvas.getBoundingClientRect().bottom;
"""


@pytest.fixture(scope="module")
def interacted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return probed(make_page(make_reports(snapshots.pair(folder))), folder, INTERACTS)


@needs_browser
def test_a_browser_shows_both_timelines_with_hover_zoom_and_labels(interacted):
    found = interacted
    assert "freed, and unusable for" in found["hover"]
    made = f"allocated at\n  /usr/lib/python3/site-packages/torch/_tensor.py:1000 in wrapped\n  {LAYER}"
    assert made in found["hover"]
    assert GONE in found["hover"].partition("freed at")[2]
    assert found["tip"].splitlines()[-1] == LAYER
    assert not found["covers"]
    assert found["scrolls"]
    assert found["all"] == 1
    assert found["zooms"]
    assert found["zoomed"] < 0.8
    assert found["moved"] < 3e-3  # a pixel
    assert found["zoomsWithoutCtrl"]
    assert found["both"]
    assert found["again"] == [0, 1]
    assert found["marked"] == [200, 400]
    assert 220 < found["dragged"] < 240  # a third of the way, since a third is shown
    assert found["pinned"] == found["hover"] == found["copied"]
    assert found["stays"]
    assert "pinned" not in found["unpinned"]
    assert found["largest"].startswith("64.0 MiB, held for")
    assert found["next"] != found["largest"]
    assert found["back"] == found["largest"]
    assert found["button"] == 0.5
    for name, label in zip(("stock", "safecomm"), found["labels"], strict=True):
        assert f"Memory over time of {name}.pickle" in label
        assert "at the most active" in label
    assert found["focus"] == [True, True]
    assert found["names"] == ["Zoom in", "Zoom out", "All of it", "Copy what is pinned", "Unpin"]
    assert found["tables"] == [12, 12]
    assert LAYER in found[".legend"]
    assert "too small" in found[".key"]
    assert "arena" not in found[".key"]
    assert "Keys, on a chart: + - 0 zoom" in found["#help"]
    assert found[".headline"].startswith("Peak 640.0 MiB \u2192 256.0 MiB (-60 %)")
    assert found["beside"]
    assert found["phone"] == 360
    assert found["under"]


@needs_browser
def test_a_browser_obeys_keys(interacted):
    names, done, starts, ends, lows, highs = zip(*interacted["keys"], strict=True)
    widths = [round(end - start, 6) for start, end in zip(starts, ends, strict=True)]
    assert names[:5] == ("0", "+", "ArrowRight", "ArrowLeft", "-")
    assert widths == [1, 0.7, 0.7, 0.7, *[1] * 8]
    assert starts[1] < starts[2]
    assert starts[3] == pytest.approx(starts[1])
    assert names[5:9] == ("m", "ArrowUp", "ArrowDown", "M")
    assert highs[5] < highs[6]
    assert lows[5] == pytest.approx(lows[7])
    assert highs[8] == highs[0]
    assert done[:10] == (True,) * 10
    assert done[10:] == (False, False)  # with all of the memory shown, the page scrolls


@needs_browser
def test_the_page_as_it_is_written_is_drawn_light_and_dark(pair, tmp_path):
    """With its policy, which lets its own script run and no other."""
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    page = tmp_path / "x.html"
    assert main(["report", *map(str, pair), "--html", str(page)]) == 0
    shots = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        shot = tmp_path / f"{scheme}.png"
        browse(page, tmp_path, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={number}")
        shots[scheme] = image.imread(shot)[..., :3]
    assert shots["dark"][5, 5].max() < 0.2
    assert shots["light"][5, 5].min() > 0.9
    for pixels in shots.values():
        half = pixels.shape[1] // 2
        assert share_of(colours.UNUSABLE, pixels[:, :half]) > 0.05
        assert share_of(colours.UNUSABLE, pixels[:, half:]) < 0.001
        assert share_of(colours.LINES[0], pixels[:, half:]) > 0.01


RECORDING = """
    const [chart] = charts;
    const { data } = chart.canvas.getContext("2d").getImageData(0, 0, chart.canvas.width, chart.canvas.height);
    let painted = 0;
    for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
    found.painted = painted / (data.length / 4);
    found.charts = charts.length;
    found.key = document.querySelector(".key").textContent;
    at(chart, "pointermove", chart.x(150000), chart.y(1e6));
    found.hover = details.textContent;
"""


@needs_browser
def test_a_browser_shows_recordings_and_what_has_no_history(tmp_path):
    recording(tmp_path / "run.rank0.jsonl", 0, 1, unusable=300 * MIB)
    empty = write(tmp_path / "empty.pickle", {"segments": [], "device_traces": []})
    found = probed(make_page(make_reports([tmp_path / "run.jsonl", empty])), tmp_path, RECORDING)
    assert found["charts"] == 1
    assert found["painted"] > 0.05
    assert "freed but unusable" in found["key"]
    assert "too small" not in found["key"]
    assert f"held by\nall_reduce at {LAYER}" in found["hover"]


CUT = """
    [...document.querySelectorAll(".scroll")]
      .filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth).length
"""


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_no_word_is_broken_and_no_table_cut_at_any_width(pair, tmp_path, width, dark):
    recording(tmp_path / "run.rank0.jsonl", 0, 1, unusable=300 * MIB)
    recorded = [
        Path(snapshots.__file__).parents[1] / "benchmarks" / "results" / "snapshots" / name.name for name in pair
    ]
    page = tmp_path / "x.html"
    page.write_text(make_page(make_reports([*recorded, tmp_path / "run.jsonl"])), encoding="utf-8")
    browser = Browser()
    try:
        browser.open(page.as_uri(), width=width, dark=dark)
        browser.until("document.documentElement.dataset.drawn")
        browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert browser.broken() == []
        assert browser.evaluate(CUT) == 0
        assert browser.scrolls_sideways() == 0
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 80) is dark
        for _ in range(3):  # by keys alone: what a key does to a chart is tested above
            browser.press("Tab")
            if browser.evaluate("document.activeElement.matches('.picture')"):
                break
        browser.press("n")
        assert browser.evaluate("document.getElementById('details').classList.contains('pinned')")
        assert browser.console == []
    finally:
        browser.close()


def heading(page):
    return re.search(r"<title>(.*)</title>", page)[1], re.search(r"<h1>(.*)</h1>", page)[1].replace("<wbr>", "")


def test_the_page_says_what_ran(pair, tmp_path):
    stock, ours = make_reports(pair)
    assert heading(make_page([stock, ours])) == (
        "train.py: stock.pickle, safecomm.pickle - safecomm report",
        "Memory of train.py: stock.pickle, safecomm.pickle",
    )
    path = recording(tmp_path / "run.rank0.jsonl", 0, 1)
    assert heading(make_page(make_reports([path])))[1] == "Memory of run.rank0.jsonl, rank 0 of 1"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(first.replace('"world"', '"program": "<b>", "world"') + "\n" + rest)
    assert heading(make_page(make_reports([path])))[1] == "Memory of &lt;b&gt;: run.rank0.jsonl, rank 0 of 1"


def test_what_ran_is_the_script_and_not_what_started_it(tmp_path):
    allocator = Allocator()
    starts = [("<frozen runpy>", 88, "_run_code"), ("/usr/lib/python3/runpy.py", 9, "run")]
    program = stack((1, "main"), program="/x/pre train.py")
    allocator.alloc(
        MIB, [snapshots.frame("/x/layers.py", 3, "f"), *program, *(snapshots.frame(*one) for one in starts)]
    )
    (report,) = make_reports([write(tmp_path / "x.pickle", allocator.snapshot())])
    assert report.program == "pre train.py"


FIRST = """
    const [chart] = charts, x = Math.round(chart.x(50000)), y = Math.round(chart.y(1e6));
    found.painted = [...chart.canvas.getContext("2d").getImageData(x, y, 1, 1).data];
    at(chart, "pointermove", chart.x(50000), chart.y(1e6));
    found.hover = details.textContent;
"""


@needs_browser
def test_what_was_held_before_the_first_line_of_a_recording_is_drawn(tmp_path):
    """Its peak is known; a line comes each 100 ms."""
    head = '{"safecomm_record": 1, "started": 1, "rank": 0, "world": 1}\n'
    head += '{"site": 0, "op": "all_reduce", "group": "0", "at": "a.py:1 in f"}\n'
    lines = [f'{{"t": {n / 10}, "held": 0, "peak": 0, "sites": []}}\n' for n in range(2, 9)]
    first = f'{{"t": 0.1, "held": 0, "peak": {4 * MIB}, "sites": [[0, 0, {4 * MIB}, 0, 1, {4 * MIB}, 0.01]]}}\n'
    path = tmp_path / "run.rank0.jsonl"
    path.write_text(head + first + "".join(lines))
    found = probed(make_page(make_reports([path])), tmp_path, FIRST)
    assert found["painted"][3] == 255
    assert found["hover"].startswith("4.0 MiB held by\nall_reduce at a.py:1 in f")
