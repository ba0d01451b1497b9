"""The run in the pictures: four replicas of the demo, of which one is killed and comes back."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from executors import Run, launch

RUN_ID = "proud-tern-78ae"


@contextlib.contextmanager
def run_with_a_kill() -> Iterator[Run]:
    """Start the run in a folder of its own, which is also the current folder, and end it with the block.

    Example:
        with run_with_a_kill() as run:
            run.wait()
    """
    before = os.environ.get("XDG_STATE_HOME")
    # The page of a run shows the folder and the Git commit of the launch. With a checkout, both would differ each time.
    with tempfile.TemporaryDirectory(prefix="demo-") as folder, contextlib.chdir(folder):
        os.environ["XDG_STATE_HOME"] = folder
        try:
            with launch(
                "local",
                "diloco.demo:train",
                4,
                args={"steps": 800},
                run_id=RUN_ID,
                chaos=["kill:rank=1,round=25"],
                restarts=2,
            ) as run:
                yield run
        finally:
            os.environ.pop("XDG_STATE_HOME")
            if before is not None:
                os.environ["XDG_STATE_HOME"] = before
