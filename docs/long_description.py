"""The README as the long description of the package: an index of packages has none of the files that it links to.

With a ``Repository`` in ``[project.urls]``, links and pictures go there. Without one, a link is its text, and a picture
is left out. A link within the README, or to elsewhere, stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"<picture>.*?<img src=\"([^\"]+)\" alt=\"([^\"]+)\">.*?</picture>", re.DOTALL)
LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)")


def long_description(readme: str, address: str) -> str:
    """Return the text of ``readme`` with links that need none of its neighbours."""
    address = address.rstrip("/")
    picture = rf"![\2]({address}/raw/main/\1)" if address else ""
    link = rf"[\1]({address}/blob/main/\2)" if address else r"\1"
    return LINK.sub(link, PICTURE.sub(picture, readme))


class CustomMetadataHook(MetadataHookInterface):
    """Gives the project its readme, in place of the file as it is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the long description to ``metadata``."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = long_description(readme, metadata.get("urls", {}).get("Repository", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
