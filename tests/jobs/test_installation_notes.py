"""A launch and `doctor` print once that containers install torch, and how to avoid it, if that is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers.hub.server import HubServer
from support.cli import Folder, HereInstead
from support.fake_jobs import FakeExecutor, FakeJobs, Machines

from executors.backends.hf_jobs import HFJobsExecutor
from executors.backends.jobs.service import EACH_INSTALLS, INSTALLS_ONCE, WITH_TORCH

BACKEND = "support.fake_jobs:FakeExecutor"


@pytest.mark.parametrize(
    ("image", "is_pythons"),
    [
        (None, True),
        ("python:3.12-slim", True),
        ("docker.io/library/python:3.13", True),
        ("pytorch/pytorch:2.13", False),
    ],
)
def test_containers_of_pythons_own_image_install_torch_and_of_other_images_no_one_knows(
    hf: HubServer, image: str | None, is_pythons: bool
) -> None:
    executor = HFJobsExecutor(image=image)
    said = f"Hugging Face: {EACH_INSTALLS}. {WITH_TORCH}" if is_pythons else ""
    for requirements in (["numpy==2.2.0", "torch==2.13.0"], ["torch"], ["torch[opt]>=2"]):
        assert executor.installation_note(requirements) == said
    assert executor.installation_note(["torchvision", "./torch"]) == "", (
        "neither requirement is torch, so no note is shown"
    )
    assert executor.check_image() == ((EACH_INSTALLS, WITH_TORCH) if is_pythons else None)


@pytest.mark.usefixtures("machines")
def test_a_launch_prints_no_advice_if_the_service_keeps_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeJobs, "image", "python:3.12", raising=False)
    monkeypatch.setattr(FakeJobs, "keeps_installed", True)
    assert FakeExecutor().check_image() == (INSTALLS_ONCE, "")
    assert FakeExecutor().installation_note(["torch"]) == ""


def test_a_launch_prints_the_advice_once(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeJobs, "image", "python:3.12", raising=False)
    here = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    told = here.replicas("launch", "job.py:main", "--backend", BACKEND, "--run-id", "otter", "--n", 2, "--detach")
    assert told.code == 0, told
    assert told.stderr.count(f"replicas: Fake: {EACH_INSTALLS}. {WITH_TORCH}") == 1
