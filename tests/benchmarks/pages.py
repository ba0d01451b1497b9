"""The page of a large run: the time to write and to open it, and its size (M2)."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from .harness import Comparison, Options

sys.path.insert(0, str(Path(__file__).parents[1]))  # the invented runs of the tests

from support.made_up_runs import large

WRITE, OPEN, SIZE = "written", "opened in chromium", "page"


def pages(options: Options) -> list[Comparison]:
    """M2: 64 replicas that reported 10,000 times each."""
    from executors.view.report.document import document
    from executors.view.report.page import write_page

    n_rows, repetitions = (200 if options.quick else 10_000), options.repetitions(3)
    title = f"the page of 64 replicas x {n_rows:,} rows"
    seconds: dict[str, list[float]] = {WRITE: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        subject = large(n_rows)
        for _ in range(repetitions):
            vars(subject.metrics).pop("numbers", None)
            began = time.perf_counter()
            write_page(document(subject), path)
            seconds[WRITE].append(time.perf_counter() - began)
        if opened := opening_s(path, repetitions):
            seconds[OPEN] = opened
        size = {SIZE: [path.stat().st_size / 1e6]}
    return [
        Comparison("M2", title, "s", seconds, goals={WRITE: 5.0, OPEN: 2.0}),
        Comparison("M2", f"{title}: its size", "MB", size, goals={SIZE: 3.0}),
    ]


def opening_s(path: Path, repetitions: int) -> list[float]:
    """Return the seconds until all charts of a page are drawn. None: no browser is available."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    if chromium is None:
        return []
    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(repetitions):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            began = time.perf_counter()
            tab.goto(path.as_uri())
            tab.wait_for_selector("main[data-drawn]", state="attached")
            found.append(time.perf_counter() - began)
            tab.close()
        browser.close()
    return found
