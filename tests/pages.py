"""Pages of ``python -m safecomm report``: what their scripts are given, and what a real browser finds in them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def shown_by(page):
    """Return of each timeline what the script of a page is given, with its columns as the script has them."""
    timelines = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    for one in timelines:
        if one["columns"]:
            data, place = zlib.decompress(base64.b64decode(one["columns"]["data"])), 0
            for name, code, length in one["columns"]["described"]:
                column = struct.unpack_from(f"<{length}{code}", data, place)
                one[name] = [int(value) for value in column]
                place += struct.calcsize(f"<{length}{code}")
    return timelines


def browse(page, folder, *arguments):
    """Open ``page`` in a real browser without a window, and return what it prints; its console must be empty."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --window-size=1500,900 --virtual-time-budget=4000"
    flags += " --enable-logging=stderr"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout


_PROBE = """
<script>
addEventListener("load", async () => {
  const found = {}, usual = { bubbles: true, cancelable: true };
  const at = (chart, kind, x, y, more) => {
    const box = chart.canvas.getBoundingClientRect();
    const made = { clientX: box.left + x, clientY: box.top + y, pointerId: 1, ...usual, ...more };
    chart.canvas.setPointerCapture = () => {};
    return !chart.canvas.dispatchEvent(new (kind === "wheel" ? WheelEvent : PointerEvent)(kind, made));
  };
  const press = (chart, key) =>
    !chart.canvas.dispatchEvent(new KeyboardEvent("keydown", { key, ...usual }));
  const later = (check) => new Promise((resolve) => {
    const look = () => check() ? resolve() : setTimeout(look, 5);
    look();
  });
  await later(() => document.documentElement.dataset.drawn);
  const { charts, shown } = report;
  const tip = document.getElementById("tip"), details = document.getElementById("details");
  try {
    SCRIPT
  } catch (error) { found.error = error.stack; }
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
  document.body.append(result);
});
</script>
"""


def probed(page, folder, script):
    """Return what ``script``, which runs in ``page`` when all is drawn, has put into ``found``."""
    probe = _PROBE.replace("SCRIPT", script)
    # The policy of the page permits its own script only.
    text = re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", f"{probe}</body>")
    (folder / "probe.html").write_text(text)
    result = re.search(r'<pre id="result">(.*?)</pre>', browse(folder / "probe.html", folder, "--dump-dom"))
    assert result, "the script of the page did not get to its end"
    found = json.loads(base64.b64decode(result[1]))
    assert "error" not in found, found["error"]
    return found
