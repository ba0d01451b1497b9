"""Local runs whose rendezvous is on a full disk, played by `test_local_disks.py` in a mount namespace of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes_of_tests import is_alive
from scenes_on_odd_disks import mount

from executors import LocalProcessExecutor, launch
from executors.errors import ReplicasError, StoreError
from executors.testing import eventually

LOCAL = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def fill(folder: str) -> str:
    """Write until nothing more fits, and return."""
    path = os.path.join(folder, "junk")
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                os.write(descriptor, bytes(size))
        except OSError:
            continue
    os.close(descriptor)
    print("filled", flush=True)
    return "the result"


def full_for_a_while(root: Path) -> None:
    """Room comes back in time."""
    mount("tmpfs", root, "-o", "size=1m")
    run = launch(LOCAL, fill, 1, args={"folder": str(root)}, rendezvous=str(root))
    eventually(lambda: "filled" in run.logs(rank=0))
    (root / "junk").unlink()
    assert run.results() == ["the result"]


def full_for_good(root: Path) -> None:
    """Room never comes back: the run ends with an error that says so, and nothing is left running."""
    mount("tmpfs", root, "-o", "size=1m")
    run = launch(LOCAL, fill, 1, args={"folder": str(root)}, rendezvous=str(root))
    supervisor = run.handles[0].metadata["supervisor_pid"]
    eventually(lambda: not is_alive(supervisor), "the supervisor gives up")
    with pytest.raises(ReplicasError, match="No space left on device"):
        run.results()


def full_from_the_start(root: Path) -> None:
    """Nothing is started when the run cannot be written."""
    mount("tmpfs", root, "-o", "size=1m")
    fill(str(root))
    with pytest.raises(StoreError, match="No space left on device"):
        launch(LOCAL, fill, 1, args={"folder": str(root)}, rendezvous=str(root))


def full_logs(root: Path) -> None:
    """The logs do not fit; the run ends and says why."""
    mount("tmpfs", root, "-o", "size=1m")
    os.environ["XDG_STATE_HOME"] = str(root)
    store = root.with_name("store")

    def talk() -> str:
        while True:
            print("x" * 10_000)

    run = launch(LOCAL, talk, 1, rendezvous=str(store))
    with pytest.raises(ReplicasError, match="No space left on device"):
        run.results()
    assert len(run.logs(rank=0, tail=10)) > 10_000


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
