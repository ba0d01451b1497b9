"""The life of a replica: start, attempt, kill, restart and end, beside two replicas that continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.pictures.drawing import SMALL, WIDTH, Drawing, Theme, write_drawing

TITLE = (
    "Three replicas over time. All start and take part in rounds 1 and 2. Rank 1 is killed before round 3. The "
    "others wait at most the grace, seal round 3 without it, and continue. The supervisor starts attempt 1 of "
    "rank 1. It loads the newest snapshot, and takes part from round 5. All three end with the same model."
)
NOTES = (
    ("start", "the backend starts one process for each rank"),
    ("attempt", "the ranks train, and meet in rounds"),
    ("kill", "the outcome is recorded, and the others continue"),
    ("restart", "attempt 1 loads the newest snapshot"),
    ("end", "all ranks hold the same model"),
)
LEFT, RIGHT = 84, WIDTH - 12
ROUNDS = tuple(LEFT + 68 * number for number in range(1, 7))
LANES = (78, 146, 196)
KILLED, BACK = LEFT + 170, LEFT + 288
BAR = 26  # the height of an attempt


def draw(theme: Theme) -> Drawing:
    """Return the drawing.

    Args:
        theme: Its colors.
    """
    drawing = Drawing(theme, 410, TITLE)
    drawing.text(10, 30, "rounds", size=SMALL, color="faint")
    for number, x in enumerate(ROUNDS, start=1):
        drawing.line((x, 38), (x, LANES[-1] + 24), color="line", wide=1, is_dashed=True)
        drawing.text(x, 30, str(number), anchor="middle", size=SMALL, color="faint")
    for rank, y in enumerate(LANES):
        drawing.text(10, y + 5, f"rank {rank}", is_bold=True, size=SMALL)
        if rank == 1:
            _bar(drawing, LEFT, KILLED, y, "attempt 0", "blue")
            drawing.line((KILLED, y), (BACK, y), color="line", is_dashed=True)
            _bar(drawing, BACK, RIGHT - 8, y, "attempt 1", "green")
            for dx in (-7, 7):
                drawing.line((KILLED - dx, y - 7), (KILLED + dx, y + 7), color="red", wide=3)
        else:
            _bar(drawing, LEFT, RIGHT - 8, y, "attempt 0", "blue")
            drawing.box(ROUNDS[2] - 14, y - BAR / 2, 28, BAR, line="orange")
    drawing.text(ROUNDS[2], LANES[0] - 22, "grace", size=SMALL, color="orange", anchor="middle")
    for number, (x, y) in enumerate(
        (
            (LEFT + 12, LANES[1] - 26),
            (LEFT + 90, LANES[1] - 26),
            (KILLED, LANES[1] - 26),
            (BACK + 12, LANES[1] - 26),
            (RIGHT - 30, LANES[1] - 26),
        ),
        start=1,
    ):
        drawing.dot(x, y, str(number), color="red" if number == 3 else "ink")
    for number, (name, words) in enumerate(NOTES, start=1):
        y = 224 + 34 * number
        drawing.dot(24, y, str(number), color="red" if number == 3 else "ink")
        drawing.text(46, y + 5, name, is_bold=True, size=SMALL)
        drawing.text(134, y + 5, words, size=SMALL, color="faint")
    return drawing


def _bar(drawing: Drawing, left: float, right: float, y: float, words: str, color: str) -> None:
    drawing.box(left, y - BAR / 2, right - left, BAR, line=color)
    drawing.text(left + 10, y + 5, words, size=SMALL, color=color)


def write(folder: Path) -> Iterator[Path]:
    """Write the picture for each theme, and yield the files.

    Args:
        folder: The folder of the files.
    """
    return write_drawing(draw, folder, "life")
