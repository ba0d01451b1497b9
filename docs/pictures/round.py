"""A round in five steps: the objects that replicas write into the store, and read from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.pictures.drawing import SMALL, WIDTH, Drawing, Theme, write_drawing

TITLE = (
    "A round in five steps. 1: each replica trains H steps from the same anchor. 2: each writes its contribution. "
    "3: one replica creates the seal, the list of contributions that count. 4: each averages one part of the mean, and "
    "writes it. 5: each reads all parts and takes the outer step, so all hold the same new anchor."
)
STEPS = (
    ("Train", "each replica makes H steps on its own data", "blue"),
    ("Contribution", "each writes: anchor - live model", "blue"),
    ("Seal", "one replica lists the contributions that count", "orange"),
    ("Mean", "each averages one part of them, and writes it", "green"),
    ("Anchor", "each reads all parts, and takes the outer step", "green"),
)
ROW = 122  # the height of a step
TOP = 34  # the height of the heads of the columns
REPLICAS_X = (45, 115, 185)
STORE_X = 268
CHIP = 76  # the width of an object in the store


def draw(theme: Theme) -> Drawing:
    """Return the drawing.

    Args:
        theme: Its colors.
    """
    drawing = Drawing(theme, TOP + ROW * len(STEPS), TITLE)
    drawing.text(115, 18, "replicas", is_bold=True, anchor="middle")
    drawing.text((STORE_X + WIDTH - 6) / 2, 18, "store: directory or bucket", is_bold=True, anchor="middle")
    for index, (name, words, color) in enumerate(STEPS):
        top = TOP + ROW * index
        if index:
            drawing.line((6, top), (WIDTH - 6, top), color="line", wide=1, is_dashed=True)
        drawing.dot(18, top + 20, str(index + 1), color=color)
        drawing.text(38, top + 25, name, is_bold=True, color=color)
        drawing.text(160, top + 25, words, size=SMALL, color="faint")
        middle = top + 78
        _replicas(drawing, index, middle)
        _objects(drawing, index, middle)
    return drawing


def _replicas(drawing: Drawing, step: int, middle: float) -> None:
    color = STEPS[step][2]
    for rank, x in enumerate(REPLICAS_X):
        is_active = step != 2 or rank == 1
        drawing.box(x - 28, middle - 20, 56, 40, line=color if is_active else "line")
        label = {0: "H steps", 4: "k + 1"}.get(step, f"rank {rank}")
        drawing.text(x, middle + 5, label, size=SMALL if step else 14, anchor="middle")


def _objects(drawing: Drawing, step: int, middle: float) -> None:
    color = STEPS[step][2]
    drawing.box(STORE_X, middle - 34, WIDTH - 6 - STORE_X, 68, fill="none")
    center = (STORE_X + WIDTH - 6) / 2
    if step == 0:
        drawing.text(center, middle - 4, "anchor k", anchor="middle", is_code=True, size=SMALL)
        drawing.text(center, middle + 18, "equal on all replicas", anchor="middle", size=SMALL, color="faint")
        drawing.arrow((STORE_X - 6, middle), (219, middle), color=color)
        return
    if step == 2:
        drawing.box(STORE_X + 14, middle - 22, WIDTH - 34 - STORE_X, 44, line=color)
        drawing.text(center, middle - 2, "seal of round k", anchor="middle", is_code=True, size=SMALL)
        drawing.text(center, middle + 16, "counts: 0, 1, 2", anchor="middle", is_code=True, size=SMALL, color="faint")
    else:
        names = ["part 0", "part 1", "part 2"] if step > 2 else ["contr. 0", "contr. 1", "contr. 2"]
        for index, name in enumerate(names):
            x = STORE_X + 10 + index * (CHIP + 8)
            drawing.box(x, middle - 20, CHIP, 40, line=color)
            drawing.text(x + CHIP / 2, middle + 5, name, anchor="middle", size=SMALL - 1, is_code=True)
    start, end = (219, middle), (STORE_X - 6, middle)
    drawing.arrow(*((end, start) if step == 4 else (start, end)), color=color)


def write(folder: Path) -> Iterator[Path]:
    """Write the picture for each theme, and yield the files.

    Args:
        folder: The folder of the files.
    """
    return write_drawing(draw, folder, "round")
