"""What is written down of a machine's paths: results are published, and where a checkout lay is nobody's business."""

import re

ABSOLUTE = re.compile(r"""(?<![\w./<>:*)-])/(?:[\w.+@~-]+/)*(?=[A-Za-z_.~])""")
"""The directories of an absolute path, up to its last name: a slash at the beginning of a word. Not of "us / call"."""


def without_directories(text: str) -> str:
    """Return ``text`` with the last name only of each absolute path."""
    return ABSOLUTE.sub("", text)
