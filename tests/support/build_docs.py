"""Builds the documentation's site as `make docs` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_site(folder: Path) -> Path:
    """Build the site, and return the folder of its pages.

    Args:
        folder: The folder that gets the pages and the intermediate files of the build.

    Raises:
        AssertionError: The build has a warning, or fails.
    """
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", "docs"]
    # An address that refuses each connection: a build that asks another host fails.
    closed = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "PATH": ""}
    done = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(folder / "html")],
        cwd=ROOT,
        env=closed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"
