"""Runs each command of the tutorial of the first cloud run, with services on loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from servers.modal.server import ModalServer
from servers.s3.server import S3Server
from support.pages import DOCS, PageRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_reader_with_the_page_alone_gets_through_the_first_cloud_run(
    modal_runs: ModalServer, s3: S3Server, tmp_path: Path
) -> None:
    service = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "MODAL_", "REPLICAS_REN"))}
    path = DOCS / "tutorial/first-cloud-run.md"
    # A sandbox of the stand-in with a GPU has only the parts of torch that the worker uses before the entrypoint.
    page = PageRun(path, tmp_path / "folder", tmp_path / "home", service, lacks=" --gpu T4")
    page.run()
    assert len(modal_runs.sandboxes) == 2, "`--dry-run` starts nothing"
    assert (page.folder / "model.safetensors").is_file()
    assert (page.folder / "results" / "results.json").is_file()
    assert not [each for each in s3.requests("PUT") if each["path"].endswith("/run.json")][1:], (
        "the tutorial launches one run"
    )
