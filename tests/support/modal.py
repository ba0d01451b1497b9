"""Looking behind the Modal executor's back, on either of the SDK's back ends."""

from __future__ import annotations

from servers.modal.sandboxes import Sandbox
from servers.modal.server import ModalServer


def of_backend(rpc: str, gpu: str | None) -> str:
    """Name a call as the back end calls it that has sandboxes with such a GPU, or without one."""
    return rpc if gpu else f"{rpc}V2"


def create_of(gpu: str | None) -> str:
    return of_backend("SandboxCreate", gpu)


def alive(server: ModalServer) -> list[Sandbox]:
    """Return the sandboxes that have not ended."""
    return [sandbox for sandbox in server.sandboxes if not sandbox.result]
