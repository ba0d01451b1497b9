"""The list of `replicas dashboard` in a browser: a run that trains after a kill, and two runs that have ended."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.pictures.report import COLORS, WIDTH
from docs.pictures.sample_run import RUN_ID, run_with_a_kill
from executors import launch
from executors.dashboard.server import Dashboard, Options

MARGIN = 24  # pixels below the table


def write(folder: Path) -> Iterator[Path]:
    """Write the picture for each theme, and yield the files.

    Args:
        folder: The folder of the files.
    """
    from PIL import Image
    from playwright.sync_api import sync_playwright

    paths = []
    with run_with_a_kill() as run:
        for run_id, steps in (("calm-heron-51c0", 100), ("eager-finch-0d4b", 60)):
            launch("local", "diloco.demo:train", 2, args={"steps": steps}, run_id=run_id).wait()
        dashboard = Dashboard(Options(port=0, is_read_only=True))
        server = threading.Thread(target=dashboard.serve)
        server.start()
        try:
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                for theme in ("light", "dark"):
                    tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=theme)
                    tab.goto(dashboard.address())
                    tab.locator(f"tr:has-text('{RUN_ID}') svg.spark").wait_for()
                    tab.wait_for_selector("tbody.rows tr:nth-child(3) svg.spark")
                    box: Any = tab.locator("div.runs").bounding_box()
                    clip: Any = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + MARGIN}
                    image = Image.open(io.BytesIO(tab.screenshot(clip=clip)))
                    path = folder / f"dashboard-{theme}.png"
                    image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
                    paths.append(path)
                    tab.context.close()
                browser.close()
        finally:
            dashboard.stop()
            server.join()
            run.cancel()
    yield from paths
