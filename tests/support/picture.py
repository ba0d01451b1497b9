"""The picture of a report in the README: four replicas of the demo, one of which is killed and comes back.

python -m support.picture FILE      (with `tests` in PYTHONPATH; needs chromium and playwright)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from executors import launch
from executors.run.resume import resume

WIDTH = 1200  # pixels


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        os.chdir(folder)
        chaos = ["kill:rank=1,round=25"]
        with launch("local", "diloco.demo:train", 4, args={"steps": 800}, run_id="proud-tern-78ae", chaos=chaos) as run:
            run.wait(n=1)  # the one that is killed
            resume(run)
            run.wait()
            page = run.report(Path(folder, "page.html"))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": WIDTH, "height": 900})
            tab.goto(page.as_uri())
            tab.wait_for_selector("main[data-drawn]")
            below = tab.get_by_role("heading", name="Replicas", exact=True).bounding_box()
            assert below is not None
            tab.screenshot(path=file, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": below["y"] - 10})
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
