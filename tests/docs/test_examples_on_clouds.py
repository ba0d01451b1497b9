"""The examples for clouds run as they are documented, against local servers: without GPUs, and for a few steps."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from servers.s3.server import S3Server

from executors.testing.helpers import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check_it_trains(name: str, folder: Path, rendezvous: str) -> None:
    """Run an example from the folder that holds `examples`, which then travels to the replicas."""
    shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    few = ["--n", "2", "--steps", "60", "--inner-steps", "20", "--rendezvous", rendezvous]
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *few],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    address, *_, results, saved = done.stdout.splitlines()
    assert address.startswith(rendezvous.partition("?")[0])
    rows = ast.literal_eval(results)
    assert [row["rounds"] for row in rows] == [3, 3]
    assert all(row["loss"] < 0.25 for row in rows), "an untrained model has a loss of about 0.25"
    assert saved == f"saved model.pt, {os.path.getsize(folder / 'model.pt')} bytes"


def test_the_example_for_modal_trains(modal_runs: ModalServer, s3: S3Server) -> None:
    check_it_trains("modal_diloco.py", Path.cwd(), s3.url("runs"))
    assert len(modal_runs.sandboxes) == 2


def test_the_example_on_several_backends_trains(modal_runs: ModalServer, s3: S3Server) -> None:
    check_it_trains("several_backends.py", Path.cwd(), s3.url("runs"))
    assert len(modal_runs.sandboxes) == 1


def test_the_example_for_hugging_face_jobs_trains(
    hub: HubServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "workspace"
    folder.mkdir()
    check_it_trains("hf_jobs_diloco.py", folder, s3.url("runs"))
