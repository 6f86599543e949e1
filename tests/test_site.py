"""The site: its reference has the signatures of the calls, and a real browser shows it from the disk and served."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import runpy
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.distributed_c10d as c10d
from browser import Browser
from pages import needs_browser

from safecomm._torch.versions import HERE
from safecomm.collectives import effects

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
CALLS = (DOCS / "reference" / "calls.md").read_text(encoding="utf-8")
WIDTHS = (390, 1280, 1600)


@pytest.fixture
def hooks():
    return runpy.run_path(str(DOCS / "hooks.py"))


# --- the reference of the calls -------------------------------------------------------------------------------------


def signatures():
    """Return the signatures that the reference has, by name, in its order."""
    blocks = re.findall(r"^```calls\n(.*?)^```$", CALLS, re.MULTILINE | re.DOTALL)
    return {line.partition("(")[0]: line for block in blocks for line in block.splitlines()}


def test_each_wrapped_call_is_there_once_and_those_that_are_used_come_first():
    blocks = re.findall(r"^```calls\n(.*?)^```$", CALLS, re.MULTILINE | re.DOTALL)
    names = [line.partition("(")[0] for block in blocks for line in block.splitlines()]
    assert sorted(names) == sorted(effects.TABLE)
    assert names[0] == "all_reduce"


@pytest.mark.parametrize("name", effects.TABLE)
def test_the_signature_is_torchs(name):
    theirs = getattr(c10d, name, None)
    if HERE < "2.13" or theirs is None:
        pytest.skip("an earlier torch has other arguments, or has it not")
    if "*" in signatures()[name]:
        pytest.skip("it takes whatever torch's takes")
    given = ast.parse(signatures()[name]).body[0].value
    parameters = inspect.signature(theirs).parameters.values()
    shown = [one.id for one in given.args] + [f"{one.arg}={ast.unparse(one.value)}" for one in given.keywords]
    ops = {str(c10d.ReduceOp.SUM): "ReduceOp.SUM"}
    assert shown == [
        one.name + ("" if one.default is one.empty else f"={ops.get(str(one.default), one.default)}")
        for one in parameters
    ]


def test_what_a_call_does_is_told_of_each_or_of_its_family(hooks):
    page = SimpleNamespace(url="reference/calls.html")
    made = hooks["on_page_markdown"](CALLS, page, None, None)
    for family in re.split(r"^## ", made, flags=re.MULTILINE)[1:]:
        for name in re.findall(r"^### `(\w+)` \{ #safecomm\.\1 \}$", family, re.MULTILINE):
            for line in hooks["effects"](name):
                assert line in family, (name, line)
    assert made.count("### `") == len(effects.TABLE)
    assert "\n".join(effects.TABLE["all_reduce"]).split() == " ".join(hooks["effects"]("all_reduce")).split()


# --- the address of the repository ----------------------------------------------------------------------------------


def test_files_of_the_repository_are_links_where_it_has_an_address_and_text_where_not(hooks):
    known, page = hooks["link"].__globals__, SimpleNamespace(url="x.html")
    markdown, html = "[results](../benchmarks/results/in_c.json)", "<p><code>tests/ranks.py</code></p>"
    others = "<pre><code>tests/ranks.py</code></pre><a href='x'><code>tests/ranks.py</code></a><code>no/such.py</code>"
    with_address = ("https://x.org/a/b", '<a href="https://x.org/a/b/blob/main/{}">', "</a>")
    for address, start, end in (("", "", ""), with_address):
        known["address"] = lambda address=address: address
        made = hooks["on_page_markdown"](markdown, page, None, None)
        assert made == start.format("benchmarks/results/in_c.json") + "results" + end
        shown = hooks["on_page_content"](html + others, page, None, None).replace("<wbr>", "")
        assert shown == f"<p>{start.format('tests/ranks.py')}<code>tests/ranks.py</code>{end}</p>{others}"


# --- a browser ------------------------------------------------------------------------------------------------------

needs_mkdocs = pytest.mark.skipif(not MKDOCS.exists(), reason="make docs has not made what builds the site")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def served(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def browser():
    browser = Browser()
    yield browser
    browser.close()


@needs_browser
@needs_mkdocs
def test_each_page_is_whole_on_a_phone(site, browser):
    pages = sorted({*site.rglob("*.html")} - {site / "404.html"})  # which is for servers, from their root
    assert pages
    for path in pages:
        browser.open(path.as_uri(), width=390, dark=True)
        assert browser.broken() == [], path.name
        assert browser.scrolls_sideways() == 0, path.name
        assert browser.console == [], path.name


@needs_browser
@needs_mkdocs
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_whole_at_each_width_light_and_dark(site, browser, width, dark):
    for name in ("index", "tutorial", "concepts", "reference/calls", "reference/graphs"):
        browser.open((site / f"{name}.html").as_uri(), width=width, dark=dark)
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 80) is dark
        assert browser.broken() == []
        assert browser.scrolls_sideways() == 0
    assert browser.console == []


SHOWN = """
    [...document.querySelectorAll("img")].filter((one) => one.checkVisibility()).map((one) => one.src.split("/").pop())
"""
SWITCH = """
    [...document.querySelectorAll("label.md-header__button")]
      .find((one) => one.htmlFor.startsWith("__palette") && one.checkVisibility()).focus()
"""


@needs_browser
@needs_mkdocs
@pytest.mark.parametrize("place", ["disk", "server"])
def test_the_search_and_the_scheme_work_from_the_disk_and_served_by_keys_alone(site, served, browser, place):
    browser.open(f"{site.as_uri() if place == 'disk' else served}/index.html")
    assert browser.evaluate(SHOWN) == ["memory-light.svg#only-light"]
    for now in ("default", "slate"):  # it begins as the system is
        browser.evaluate(SWITCH)
        browser.press("Enter")
        browser.until(f"document.body.dataset.mdColorScheme === '{now}'")
    assert browser.evaluate(SHOWN) == ["memory-dark.svg#only-dark"]
    browser.press("s")
    browser.until("document.activeElement.matches('.md-search__input')")
    browser.until("/Type to start/.test(document.querySelector('.md-search-result__meta').textContent)")
    for letter in "use_arena":
        browser.press(letter)
    browser.until("document.querySelectorAll('.md-search-result__link').length > 3")
    # Of all letters: Enter would open what the first one has found.
    browser.until("/arena/.test(document.querySelector('.md-search-result__link').href)")
    with browser.leaving():
        browser.press("Enter")
    assert "arena" in browser.evaluate("location.href")
    assert browser.console == []


@needs_browser
@needs_mkdocs
def test_the_reference_has_a_signature_of_all_that_is_called(site, browser):
    for place in ("graphs graph", "arena use_arena", "arena empty", "diagnostics leaks.watch"):
        page, name = place.split()
        browser.open((site / "reference" / f"{page}.html").as_uri())
        after = f"document.getElementById('safecomm.{name}').parentElement.querySelector('.doc-signature').textContent"
        assert browser.evaluate(after).strip().startswith(name.rpartition(".")[2] + "("), name
