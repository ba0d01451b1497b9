"""The rooms of the code, and the three walks through them: a launch, a round and a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.pictures.drawing import SMALL, WIDTH, Drawing, Theme, write_drawing

TITLE = (
    "The rooms of the code, from the command at the top to the store at the bottom, with three walks. A launch "
    "goes from the command to the launcher, the task, the backend, the supervisor and the worker. A round goes "
    "from DiLoCo to the training side, the round runner, the protocol and the store. A restart goes from the "
    "supervisor to the rules and the decision log in the store, back to the supervisor, and to the worker and "
    "DiLoCo of the next attempt."
)
ROOMS = (
    ("executors/cli/", "the command"),
    ("executors/launcher/", "check, write, start"),
    ("executors/task/", "code and arguments"),
    ("executors/backends/", "local, slurm, modal …"),
    ("executors/supervisor/", "watches its ranks"),
    ("executors/restarts/", "rules, decision log"),
    ("executors/worker/", "the process of a rank"),
    ("diloco/outer.py", "the loop calls it"),
    ("rendezvous/training_side.py", "work to send, merge"),
    ("rendezvous/round_runner.py", "one round"),
    ("diloco/rendezvous/", "the protocol"),
    ("executors/store/", "directory or bucket"),
)
WALKS = (
    ("launch", "blue", {0: "1", 1: "2", 2: "3", 3: "4", 4: "5", 6: "6"}),
    ("round", "green", {7: "1", 8: "2·6", 9: "3", 10: "4", 11: "5"}),
    ("restart", "orange", {4: "1·4", 5: "2", 6: "5", 7: "6", 11: "3"}),
)
TOP, ROW = 40, 44
COLUMNS = (362, 432, 500)


def draw(theme: Theme) -> Drawing:
    """Return the drawing.

    Args:
        theme: Its colors.
    """
    drawing = Drawing(theme, TOP + ROW * len(ROOMS) + 6, TITLE)
    for index, (name, words) in enumerate(ROOMS):
        top = TOP + ROW * index
        drawing.box(4, top, WIDTH - 8, ROW - 6)
        drawing.text(14, top + 18, name, is_code=True, size=SMALL)
        drawing.text(14, top + 33, words, size=13, color="faint")
    for (name, color, stops), x in zip(WALKS, COLUMNS, strict=True):
        drawing.text(x, 24, name, is_bold=True, color=color, anchor="middle", size=SMALL)
        rows = sorted(stops)
        drawing.line((x, _middle(rows[0])), (x, _middle(rows[-1])), color=color, wide=3)
        for row, number in stops.items():
            drawing.dot(x, _middle(row), number, color=color, radius=11)
    return drawing


def _middle(row: int) -> float:
    return TOP + ROW * row + (ROW - 6) / 2


def write(folder: Path) -> Iterator[Path]:
    """Write the picture for each theme, and yield the files.

    Args:
        folder: The folder of the files.
    """
    return write_drawing(draw, folder, "rooms")
