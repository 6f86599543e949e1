"""The links of the README and of the documents lead somewhere: to a file that there is, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"""\]\(([^()\s]+)\)|(?:href|src|srcset)="([^"\s]+)\"""")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def links(path):
    """Return what a document links to, but for the web."""
    found = (one or other for one, other in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(path):
    """Return the anchors that the headings of a document have, as GitHub and most other renderers name them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ +(.*?) *$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def of_the_site(anchor, path):
    """Return whether the site knows ``anchor``: of a picture for one scheme, or of a name whose docstring is there."""
    if path.suffix == ".svg":
        return anchor in ("only-light", "only-dark")
    return f"::: {anchor}\n" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_internal_links_lead_to_files_and_headings(path):
    broken = []
    for target in links(path):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or not there.is_relative_to(ROOT):
            broken.append(f"{target}: there is no such file")
        elif anchor and anchor not in anchors(there) and not of_the_site(anchor, there):
            broken.append(f"{target}: {there.name} has no such heading")
    assert not broken, broken


def test_links_are_found_and_broken_ones_are_too(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('# S1. Alive `x` here\n[a](page.md#s1-alive-x-here) `[b](c)` [d](https://e)\n<img src="f.svg">\n')
    assert links(page) == ["page.md#s1-alive-x-here", "f.svg"]
    assert anchors(page) == {"s1-alive-x-here"}


def test_every_document_is_linked_from_another():
    linked = {(path.parent / target.partition("#")[0]).resolve() for path in DOCUMENTS for target in links(path)}
    assert [path.name for path in DOCUMENTS[1:] if path not in linked] == []
