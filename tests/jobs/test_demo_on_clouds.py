"""Runs the demo on clouds, from the launch to the trained model. Replicas share only a bucket, and end like local ones.

Everything is real but the clouds, which are servers on loopback: the SDKs, the containers' processes, which start in an
empty folder without this project, and what they fetch and train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from servers.s3.server import S3Server

from executors import Run, attach, launch
from executors.store import memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N = 3
ARGS = {"steps": 24, "inner_steps": 8, "batch": 2, "data": "text.txt", "seed": 7}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # more replicas would add in another order


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with a text, which travels with the code."""
    folder = tmp_path / "of-the-user"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = folder / "text.txt"
    file.write_text(Path(memory.__file__).read_text() * 8)
    return file


def demo(backend: str, **more: Any) -> Run:
    return launch(backend, "diloco.demo:train", N, args=ARGS, env=ONE_THREAD, seed=7, timeout=100, **more)


def check_it_ends_as_at_home(run: Run) -> None:
    results = run.results()
    assert len({result["anchor"] for result in results}) == 1, "every replica holds the same parameters"
    assert [result["rounds"] for result in results] == [3] * N
    assert results[0]["loss"] < results[0]["loss_before"]
    assert [state.reported["step"] for state in attach(run.url).status().replicas] == [24] * N
    at_home = demo("local").results()
    assert (results[0]["anchor"], results[0]["loss"]) == (at_home[0]["anchor"], at_home[0]["loss"])


def test_the_demo_on_modal_ends_with_the_same_parameters_as_at_home(modal_runs: ModalServer, text: Path) -> None:
    run = demo("modal")
    check_it_ends_as_at_home(run)
    assert len(modal_runs.sandboxes) == N


def test_the_demo_on_hugging_face_jobs_ends_with_the_same_parameters_as_at_home(
    hub: HubServer, s3: S3Server, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    run = demo("hf", rendezvous=s3.url("runs"))
    check_it_ends_as_at_home(run)
    assert len([request for request in hub.requests if request.route == "create"]) == N
