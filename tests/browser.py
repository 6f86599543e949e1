"""A real browser without a window, driven by its own protocol: what a page shows at a width and in a scheme."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import threading

from pages import CHROMIUM

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39}

CUT = """
(() => {
  // A word is broken if a line ends inside of it. Names in code may end a line after an underscore, or a point.
  const found = [], range = document.createRange();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const owner = node.parentElement;
    if (!owner.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (owner.closest("SKIPPED")) continue;
    for (const { 0: word, index } of node.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
      if (word.length > 30) continue; // such as a hash: longer than a line of a phone
      range.setStart(node, index); range.setEnd(node, index + word.length);
      const tops = [...range.getClientRects()].filter((box) => box.width > 0).map((box) => Math.round(box.top));
      if (new Set(tops).size > 1) found.push(word);
    }
  }
  return found;
})()
"""


class Browser:
    """One page at a time. ``console`` has the errors and warnings that its pages have said there."""

    def __init__(self):
        self.console = []
        self._numbers = itertools.count(1)
        self._answers = {}
        self._arrived = threading.Condition()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_to_read, theirs_to_write = os.pipe()
        theirs_to_read, ours_to_write = os.pipe()

        def pipes():  # in the child: it reads from 3, and writes to 4
            moved = os.dup(theirs_to_write)
            os.dup2(theirs_to_read, 3)
            os.dup2(moved, 4)

        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_to_read)
        os.close(theirs_to_write)
        self._to = os.fdopen(ours_to_write, "wb", buffering=0)
        self._from = os.fdopen(ours_to_read, "rb")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._session = None
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def _read(self):
        buffer = b""
        while piece := self._from.read1(1 << 20):
            *messages, buffer = (buffer + piece).split(b"\0")
            with self._arrived:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self._heard(message["method"], message.get("params", {}))
                self._arrived.notify_all()

    def _heard(self, method, given):
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.console.append(details.get("exception", details).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.console.append(str([one.get("value") for one in given["args"]]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Page.loadEventFired":
            self._loaded = True

    def tell(self, method, **given):
        """Send a command, and return its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        with self._arrived:
            assert self._arrived.wait_for(lambda: number in self._answers, timeout=60), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def evaluate(self, script):
        """Return the value of an expression in the page, and wait for it if it is a promise."""
        answer = self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition):
        """Wait until an expression is true in the page."""
        look = f"const look = () => ({condition}) ? resolve() : setTimeout(look, 20)"
        self.evaluate(f"new Promise((resolve) => {{ {look}; look(); }})")

    def open(self, address, *, width=1280, height=900, dark=False):
        """Open a page, as wide as that, for somebody who likes the dark or the light."""
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.tell("Emulation.setEmulatedMedia", features=media)
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        with self.leaving():
            self.tell("Page.navigate", url=address)

    @contextlib.contextmanager
    def leaving(self):
        """Wait in the end until another page has loaded: an answer that is waited for in the page before is lost."""
        self._loaded = False
        yield
        with self._arrived:
            assert self._arrived.wait_for(lambda: self._loaded, timeout=60), "no page has loaded"

    def press(self, key):
        """Press a key, and let it go."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        given = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper())), **text}
        self.tell("Input.dispatchKeyEvent", type="keyDown", **given)
        self.tell("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def broken(self, skipped="pre"):
        """Return the words that the page breaks over two lines, but in ``skipped`` elements."""
        return self.evaluate(CUT.replace("SKIPPED", skipped))

    def scrolls_sideways(self):
        """Return by how many pixels the whole page is wider than the window."""
        return self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def shot(self, path):
        """Write what is seen to a PNG file."""
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        """End it."""
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.tell("Browser.close")
        self._process.wait(timeout=60)
        self._to.close()
        self._reader.join(timeout=60)
        self._from.close()
        self._folder.cleanup()
