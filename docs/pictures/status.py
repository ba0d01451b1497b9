"""The table of `replicas status`, as a terminal shows it, of a run in which a replica was killed and came back."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from docs.pictures.sample_run import run_with_a_kill
from executors import Run
from executors.cli.table import replica_table, title

WIDTH = 72  # characters: with more, the text is too small on a phone
COLORS = [
    (0, 0, 0),
    (207, 34, 46),
    (17, 99, 41),
    (138, 70, 0),
    (5, 80, 174),
    (130, 80, 223),
    (5, 100, 120),
    (87, 96, 106),
]
BRIGHT = [
    (1, 1, 1),
    (255, 155, 148),
    (126, 231, 135),
    (255, 184, 107),
    (121, 192, 255),
    (210, 168, 255),
    (86, 212, 221),
]
THEMES = {
    "light": TerminalTheme((246, 248, 250), (27, 31, 36), COLORS),
    "dark": TerminalTheme((33, 38, 45), (230, 237, 243), [*BRIGHT, (169, 180, 192)]),
}
TIMEOUT_S = 120.0


def write(folder: Path) -> Iterator[Path]:
    """Write the picture for each theme, and yield the files.

    Args:
        folder: The folder of the files.

    Raises:
        TimeoutError: The killed replica did not come back in time.
    """
    began = time.time()
    with run_with_a_kill() as run:
        _wait_for_the_comeback(run)
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        status = run.status()
        console.print(f"$ replicas status {run.run_id}", style="bold")
        console.print(title(status, time.time() - began))
        console.print(replica_table(status, width=WIDTH))
        for theme, colors in THEMES.items():
            text = console.export_svg(title="", theme=colors, clear=False, unique_id="status")
            path = folder / f"status-{theme}.svg"
            # The export names a font of another host. A page of this documentation loads nothing from other hosts.
            path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.S), encoding="utf-8")
            yield path
        run.cancel()


def _wait_for_the_comeback(run: Run) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        ranks = {replica.rank: replica for replica in run.status().replicas}
        if ranks[1].attempt == 1 and all(each.reported.get("round", 0) >= 60 for each in ranks.values()):
            return
        time.sleep(0.2)
    raise TimeoutError(f"Rank 1 of {run.run_id} did not come back within {TIMEOUT_S:.0f} s.")
