"""Draw the rooms of the package from its imports: ``python docs/rooms.py``; ``--check`` only compares.

A room is a file or a folder at the top of the package. Each stands above all that it imports. An arrow that others
lead to as well, by way of rooms between, is left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from size import SHELL, of_tree  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
STYLE = ROOT / "docs" / "pictures" / "layers.svg"
"""Whose style it has."""
WIDTH, WIDE, HIGH, FLOOR = 760, 140, 34, 74


def floors(rooms: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms from the bottom up, each on the lowest floor that is above all that it imports."""
    floor: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in floor:
            floor[room] = 1 + max((of(other) for other in rooms[room]), default=-1)
        return floor[room]

    found: list[list[str]] = [[] for _ in range(1 + max(map(of, rooms)))]
    for room in sorted(rooms):
        found[floor[room]].append(room)
    return found


def arrows(rooms: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return which room imports which, without what follows from the others."""

    def below(room: str) -> set[str]:
        return {found for other in rooms[room] for found in {other} | below(other)}

    return [
        (room, other)
        for room, others in sorted(rooms.items())
        for other in sorted(others)
        if not any(other in below(between) for between in others)
    ]


def draw() -> str:
    """Return the picture."""
    rooms = {room: others - {"safecomm._version"} for room, others in of_tree().rooms.items()}
    del rooms["safecomm._version"]  # which has a line
    shown = {room: room.removeprefix("safecomm.") for room in rooms} | {SHELL: f"{SHELL}.py", "safecomm": "__init__"}
    by_floor = floors(rooms)
    place = {
        room: (WIDTH * (2 * number + 1) / (2 * len(there)), 30 + FLOOR * (len(by_floor) - 1 - floor))
        for floor, there in enumerate(by_floor)
        for number, room in enumerate(there)
    }
    style = re.search(r"  <style>.*?</style>\n", STYLE.read_text(), re.DOTALL)
    marker = re.search(r"  <defs>.*?</defs>\n", STYLE.read_text(), re.DOTALL)
    assert style
    assert marker
    told = "; ".join(f"{shown[room]} imports {shown[other]}" for room, other in arrows(rooms))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {FLOOR * len(by_floor)}" role="img" '
        'aria-labelledby="title desc">',
        '  <title id="title">The rooms</title>',
        f'  <desc id="desc">{told}.</desc>',
        style[0] + marker[0].rstrip(),
    ]
    for room, other in arrows(rooms):
        (x, y), (to_x, to_y) = place[room], place[other]
        lines.append(
            f'  <path class="line" d="M{x:g} {y + HIGH / 2:g} L{to_x:g} {to_y - HIGH / 2:g}" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in place.items():
        kind = "run" if room == "safecomm.core" else "box"
        corner = f'x="{x - WIDE / 2:g}" y="{y - HIGH / 2:g}"'
        lines.append(f'  <rect class="{kind}" {corner} width="{WIDE}" height="{HIGH}" rx="6"/>')
        lines.append(f'  <text class="middle" x="{x:g}" y="{y + 5:g}">{shown[room]}</text>')
    return "\n".join([*lines, "</svg>\n"])


def main() -> int:
    """Draw it, or compare, and return the exit status."""
    made = draw()
    if "--check" in sys.argv:
        if PICTURE.read_text() != made:
            print(f"{PICTURE} is out of date: run python docs/rooms.py")
            return 1
        return 0
    PICTURE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
