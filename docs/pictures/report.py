"""The page of `replicas report` in a browser, of a run in which a replica was killed and came back."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.pictures.sample_run import run_with_a_kill

WIDTH = 1200  # pixels
COLORS = 96
"""The number of colors of the picture. The page has few, and the files are a third of the size."""


def write(folder: Path) -> Iterator[Path]:
    """Write the picture for each theme, and yield the files.

    Args:
        folder: The folder of the files.
    """
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with run_with_a_kill() as run:
        run.wait()
        page = run.report(Path("page.html").absolute())
        paths = []
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for theme in ("light", "dark"):
                tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=theme)
                tab.goto(page.as_uri())
                tab.wait_for_selector("main[data-drawn]")
                clip: Any = {"x": 0, "y": 0, "width": WIDTH, "height": _end_of_time_line(tab)}
                image = Image.open(io.BytesIO(tab.screenshot(full_page=True, clip=clip)))
                path = folder / f"report-{theme}.png"
                image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
                paths.append(path)
            browser.close()
    yield from paths


def _end_of_time_line(tab: Any) -> float:
    """Return the position at which the tables below the time line begin."""
    found = (tab.get_by_role("heading", name=name, exact=True) for name in ("Warnings", "Events"))
    # A run without warnings has no table of them.
    return min(float(heading.bounding_box()["y"]) for heading in found if heading.count()) - 10
