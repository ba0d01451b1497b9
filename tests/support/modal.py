"""Asks the local Modal server directly, without the executor, on both of the SDK's back ends."""

from __future__ import annotations

from servers.modal.sandboxes import Sandbox
from servers.modal.server import ModalServer


def of_backend(rpc: str, gpu: str | None) -> str:
    """Return the name of a call at the back end that has sandboxes with this GPU, or without one."""
    return rpc if gpu else f"{rpc}V2"


def create_of(gpu: str | None) -> str:
    return of_backend("SandboxCreate", gpu)


def alive(server: ModalServer) -> list[Sandbox]:
    """Return the sandboxes that have not ended."""
    return [sandbox for sandbox in server.sandboxes if not sandbox.result]
