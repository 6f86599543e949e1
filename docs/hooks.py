"""What mkdocs does with a page beside making it a page: the reference of the calls, and links out of the site."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CALLS = re.compile(r"^```calls\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A family of calls in the reference: their signatures, in the order of use."""
ADDRESS = re.compile(r'^Repository = "(.+)"', re.MULTILINE)
WIDTH = 76
"""Letters of a line of a signature."""
PRE = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
LINK = re.compile(r"(<pre.*?</pre>|<a [^>]*>.*?</a>)", re.DOTALL)
"""Pieces of a page in which the name of a file is no link."""


def address() -> str:
    """Return the address of the repository, which pyproject.toml has if it is decided, or an empty text."""
    found = ADDRESS.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found[1].rstrip("/") if found else ""


def link(path: str, text: str, place: str) -> str:
    """Return ``text`` as a link to a file of the repository at ``place``; without an address of it, the text alone."""
    return f'<a href="{place}/blob/main/{path}">{text}</a>' if place else text


def on_config(config: Any) -> Any:
    """Show where the repository is, if it has an address. Not as ``repo_url``: each page would ask it for its stars."""
    if address():
        config.extra["social"] = [
            {"icon": "fontawesome/brands/git-alt", "link": address(), "name": "Repository"},
        ]
    return config


def effects(name: str) -> list[str]:
    """Return what a wrapped call does, line by line. Without torch: the table is in a file that imports nothing."""
    table = runpy.run_path(str(ROOT / "safecomm" / "collectives" / "effects.py"))["TABLE"]
    # What is indented goes on with the line before, unless it says in which case something holds.
    lines = re.split(r"\n(?! )|\n  (?=Asynchronous:|Synchronous:)", "\n".join(table[name]))
    return [" ".join(line.split()) for line in lines]


def family(text: str) -> str:
    """Return the reference of some calls: what all of them do, and of each its signature, and what else it does."""
    signatures = {line.partition("(")[0]: line for line in text.splitlines()}
    done = {name: effects(name) for name in signatures}
    first = next(iter(done.values()))
    shared = [line for line in first if all(line in lines for lines in done.values())] if len(done) > 1 else []
    parts = ["Each of these:", "\n".join(f"- {line}" for line in shared)] if shared else []
    for name, signature in signatures.items():
        if len(signature) > WIDTH:
            taken = signature[len(name) + 1 : -1].split(", ")
            signature = "\n".join([f"{name}(", *(f"    {one}," for one in taken), ")"])
        own = [line for line in done[name] if line not in shared]
        parts += [f"### `{name}` {{ #safecomm.{name} }}", f"```python\n{signature}\n```"]
        parts += own if len(own) == 1 else ["\n".join(f"- {line}" for line in own)]
    return "\n\n".join(filter(None, parts))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the calls where they belong, and let links to files outside of the site go to the repository."""
    if page.url.count("/"):  # the reference, whose links stay in the site
        return CALLS.sub(lambda found: family(found[1]), markdown)
    return re.sub(r"\[([^]]*)\]\(\.\./([^)]*)\)", lambda found: link(found[2], found[1], address()), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Make links of what docstrings refer to, such as :func:`drain`, and of the names of files of the repository."""

    def refer(role: re.Match[str]) -> str:
        kind, name = role.groups()
        if kind in ("attr", "meth") and "." not in name:  # of the class that is documented, which has it below
            return f"<code>{name}</code>"
        return f'<autoref identifier="safecomm.{name.removeprefix("safecomm.")}" optional><code>{name}</code></autoref>'

    def file(code: re.Match[str]) -> str:
        known = "/" in code[1] and (ROOT / code[1]).is_file()
        return link(code[1], code[0], address()) if known else code[0]

    def breakable(code: re.Match[str]) -> str:  # on a phone a long name is longer than a line
        return code[1] + re.sub(r"((?<=[^\W_])[_/=]|(?<=[^\W_\d])[.:])(?=\w)", r"\1<wbr>", code[2])

    html = re.sub(r":(attr|class|func|meth|mod):<code>([^<]+)</code>", refer, html)
    html = _outside(LINK, r"<code>([\w./-]+)</code>", file, html)
    return _outside(PRE, r"(<(?:code|span)\b[^>]*>)([^<]{16,})", breakable, html)


def _outside(of: re.Pattern[str], pattern: str, does: Callable[[re.Match[str]], str], html: str) -> str:
    """Replace what has the ``pattern``, but for the pieces ``of`` a page."""
    parts = of.split(html)
    parts[::2] = [re.sub(pattern, does, part) for part in parts[::2]]
    return "".join(parts)
