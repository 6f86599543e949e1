"""What mkdocs does with a page beside making it a page: the reference of the calls, and links out of the site."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CALLS = "<!-- calls -->"
REPOSITORY = re.compile(r'^(?:Repository|Source|source|repository) = "(.+)"', re.MULTILINE)


def on_config(config: Any) -> Any:
    """Take the address of the repository from where the package has it, if it has one."""
    found = REPOSITORY.search((ROOT / "pyproject.toml").read_text())
    if found:
        config.repo_url = found[1]
    return config


def calls() -> str:
    """Return the reference of the wrapped calls. Without torch: the table is in a file that imports nothing."""
    table = runpy.run_path(str(ROOT / "safecomm" / "collectives" / "effects.py"))["TABLE"]
    entries = []
    for name in sorted(table, key=lambda name: name.strip("_")):
        items = re.split(r"\n(?! )", "\n".join(table[name]))  # what is indented goes on with the line before
        entries.append(
            f"## `{name}` {{ #safecomm.{name} }}\n\n" + "\n".join(f"- {' '.join(item.split())}" for item in items)
        )
    return "\n\n".join(entries)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the calls where they belong, and let links to files outside of the site go to the repository."""

    def outside(link: re.Match[str]) -> str:
        text, path = link.groups()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    if page.url.count("/"):  # the reference, whose links stay in the site
        return markdown.replace(CALLS, calls())
    return re.sub(r"\[([^]]*)\]\(\.\./([^)]*)\)", outside, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Make links of what docstrings refer to, such as :func:`drain`, where it is in the reference."""

    def refer(role: re.Match[str]) -> str:
        kind, name = role.groups()
        if kind in ("attr", "meth") and "." not in name:  # of the class that is documented, which has it below
            return f"<code>{name}</code>"
        return f'<autoref identifier="safecomm.{name.removeprefix("safecomm.")}" optional><code>{name}</code></autoref>'

    return re.sub(r":(attr|class|func|meth|mod):<code>([^<]+)</code>", refer, html)
