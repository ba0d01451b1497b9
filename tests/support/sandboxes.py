"""Makes sandboxes with the real Modal SDK: without a GPU on the back end V2, and with one on V1."""

from __future__ import annotations

from typing import Any

import modal
import pytest
from servers.modal.server import ModalServer


@pytest.fixture(params=[None, "H100"], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest) -> str | None:
    """The GPU of a sandbox, which decides the back end."""
    kind: str | None = request.param
    return kind


@pytest.fixture
def app(modal_cloud: ModalServer) -> modal.App:
    return modal.App.lookup("an-app", create_if_missing=True)


def create(app: modal.App, *command: str, timeout: int = 60, **options: Any) -> modal.Sandbox:
    return modal.Sandbox.create(*command, app=app, timeout=timeout, **options)


def text_of(sandbox: modal.Sandbox, entries: int = 100) -> str:
    return "".join(entry.message for entry in sandbox.logs.tail(entries))
