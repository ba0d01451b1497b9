"""A Modal control plane on loopback, for the real SDK. Tests start it, plan faults, and stop it.

    with modal_server() as server, server.used_by_the_sdk():
        modal.App.lookup("app", create_if_missing=True)     # `modal` as ever, here and in child processes

Sandboxes are processes of this machine (`modal_sandboxes`), each with an empty directory, no variables of this process,
and a `python` that has every installed package except this project. Its behavior comes from the released SDK, whose
tables of calls it serves. If a test makes a call that the server does not support, the test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import modal
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2

from executors.testing import eventually
from servers.isolation.python import shared_python
from servers.modal.account import ENVIRONMENT, Account
from servers.modal.control_plane import SandboxCalls
from servers.modal.dispatch import Call, Dispatcher
from servers.modal.faults import Fault, Faults
from servers.modal.logs import LogCalls
from servers.modal.sandboxes import KERNEL_OOM_KILL, TERMINATED, Sandbox

TOKEN_ID = "ak-oftheteststestst"
TOKEN_SECRET = "as-never-to-be-seen-outside"
SECRET_FIELDS = ["secret_sources", "ephemeral_secrets", "cloud_bucket_mount_credentials"]
T = TypeVar("T")


class ModalServer:
    """The controls of the server for a test. Safe to use from any thread but the server's own."""

    def __init__(self, folder: Path) -> None:
        self.account = Account()
        self.secrets = self.account.secrets
        """Named secrets: `server.secrets["my-secret"] = {"KEY": "value"}`."""
        self.calls = SandboxCalls(self.account, folder, shared_python())
        self.token = (TOKEN_ID, TOKEN_SECRET)
        """The credentials that the server accepts. If a test changes them, every later call fails."""
        self._folder = folder
        self._faults = Faults()
        answering = [self.account, self.calls, LogCalls(self.account, self.calls)]
        self._dispatcher = Dispatcher(answering, self._check, self._faults)
        self._loop = asyncio.new_event_loop()
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point the SDK at this server."""
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": TOKEN_ID,
            "MODAL_TOKEN_SECRET": TOKEN_SECRET,
            "MODAL_CONFIG_PATH": str(self._folder / "no-such-file.toml"),
            "MODAL_ENVIRONMENT": ENVIRONMENT,
        }

    @contextlib.contextmanager
    def used_by_the_sdk(self) -> Iterator[None]:
        """Let the SDK of this process, and of its child processes, use this server.

        The SDK reads its settings from `os.environ` when it needs them. It reads the path of its file and the name of
        the profile only once, when it is imported. It keeps one default client with the first address, until that
        client is closed. Handles of a closed client cannot be used.
        """
        others = {name: value for name, value in os.environ.items() if name.startswith("MODAL_")}
        for name in others:
            del os.environ[name]
        os.environ.update(self.environment)
        try:
            yield
        finally:
            # Raised if there was no default client, and no credentials to make one.
            with contextlib.suppress(modal.exception.AuthError):
                client: Any = modal.Client.from_env()
                if hasattr(client, "close"):
                    client.close()
                else:  # before release 1.6.4: the default client is forgotten, and ends with this process
                    type(client).set_env_client(None)
            for name in [name for name in os.environ if name.startswith("MODAL_")]:
                del os.environ[name]
            os.environ.update(others)

    # Planned behavior

    @property
    def capacity(self) -> int | None:
        """The number of GPUs. None: always enough. Sandboxes wait for free GPUs."""
        return self.calls.capacity

    @capacity.setter
    def capacity(self, gpus: int | None) -> None:
        self.calls.capacity = gpus

    @property
    def deduplicates(self) -> bool:
        """True if a create that the SDK repeats, with the same idempotency key, returns the same sandbox."""
        return self._dispatcher.deduplicates

    @deduplicates.setter
    def deduplicates(self, does: bool) -> None:
        self._dispatcher.deduplicates = does

    def fail(self, rpc: str, status: Status | None = None, **details: Any) -> Fault:
        """Plan a `Fault` for the next calls with this name. The SDK itself repeats INTERNAL three times."""
        fault = Fault(rpc=rpc, status=status, **details)
        self._faults.plan(fault)
        return fault

    def answer_together(self, rpc: str, n_calls: int) -> None:
        """Answer no call of a name before `n_calls` calls have arrived."""
        self._dispatcher.together[rpc] = n_calls

    def unused_faults(self) -> list[Fault]:
        return self._faults.unused()

    # Events of sandboxes

    def preempt(self, sandbox_id: str) -> None:
        """End a sandbox because another user needs its machine: TERMINATED, without a request."""
        self._end(sandbox_id, api_pb2.GenericResult(status=TERMINATED))

    def oom_kill(self, sandbox_id: str) -> None:
        """End a sandbox because it took too much memory."""
        self._end(sandbox_id, api_pb2.GenericResult(status=KERNEL_OOM_KILL, exitcode=137))

    def kill(self, sandbox_id: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a sandbox's command."""

        async def send() -> None:
            (await self.calls.find(sandbox_id).running()).send_signal(number)

        self._do(send())

    def pid_of(self, sandbox_id: str) -> int:
        """Return the pid that the process of a sandbox's command has on this machine."""

        async def running() -> int:
            return (await self.calls.find(sandbox_id).running()).pid

        return self._do(running())

    def vanish(self, sandbox_id: str) -> None:
        """End a sandbox and forget it: NOT_FOUND from now on."""

        async def forget() -> None:
            sandbox = self.calls.sandboxes.pop(sandbox_id)
            await sandbox.end(api_pb2.GenericResult(status=TERMINATED))
            await sandbox.gone()

        self._do(forget())

    # Calls and errors so far

    @property
    def sandboxes(self) -> list[Sandbox]:
        """All sandboxes, oldest first, also those that have ended."""
        return list(self.calls.sandboxes.values())

    def calls_of(self, *rpcs: str) -> list[Call]:
        """The calls so far of these names, or all."""
        return [call for call in list(self._dispatcher.calls) if not rpcs or call.rpc in rpcs]

    def wait_for(self, rpc: str, n_calls: int = 1, within_s: float = 30.0) -> None:
        """Wait until there have been `n_calls` calls of a name."""
        eventually(lambda: len(self.calls_of(rpc)) >= n_calls, f"{n_calls} calls of {rpc}", within_s=within_s)

    def requests_carrying(self, value: str) -> list[str]:
        """The names of the calls whose request contains a text. Parts of requests that create secrets do not count.

        On V2, the variables of a sandbox and of its ephemeral secrets arrive together. On V1, both become secrets
        first.
        """
        return [call.rpc for call in list(self._dispatcher.calls) if without_secrets(call).carries(value)]

    @property
    def unimplemented(self) -> set[str]:
        """The names of the calls that the server could not answer."""
        return self._dispatcher.unimplemented

    def _check(self, rpc: str, metadata: Mapping[str, str]) -> None:
        if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != self.token:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID or token secret is invalid.")
        needs_more = rpc.startswith("Sandbox") and rpc.endswith("V2")
        if needs_more and metadata.get("x-modal-auth-token") not in self.account.auth_tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "Auth token is missing or invalid.")

    def _end(self, sandbox_id: str, verdict: api_pb2.GenericResult) -> None:
        async def end() -> None:
            sandbox = self.calls.find(sandbox_id)
            await sandbox.end(verdict)
            await sandbox.gone()

        self._do(end())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _hang_up(self) -> None:
        """End the connections that are still open after the server has closed, such as one that was made while it
        closed.
        """
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for _ in range(3):  # a transport reports its end one turn of the event loop later
            for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]
                transport.abort()
            await asyncio.sleep(0)

    def _serve(self, ready: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        server = Server([self._dispatcher], status_details_codec=custom_detail_codec)
        # asyncio turns Nagle's algorithm off only if the socket's protocol is given. Otherwise every call would take 40
        # ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        try:
            self._loop.run_until_complete(server.start(sock=listener))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            ready.set_result(None)
            self._loop.run_forever()
            server.close()
            self._dispatcher.disconnect()
            self._loop.run_until_complete(server.wait_closed())
            self._loop.run_until_complete(self.calls.close())
            self._loop.run_until_complete(self._hang_up())
        finally:
            self._loop.close()


def without_secrets(call: Call) -> Call:
    """Return a call without the parts of its request that create secrets."""
    request = type(call.request).FromString(call.request.SerializeToString())
    for field in {"SecretGetOrCreate": ["env_dict"], "SandboxCreateV2": SECRET_FIELDS}.get(call.rpc, []):
        request.ClearField(field)
    return dataclasses.replace(call, request=request)


@contextlib.contextmanager
def modal_server() -> Iterator[ModalServer]:
    """Run the server in a thread until the block ends.

    Then end every sandbox, and fail if a call could not be answered.
    """
    with tempfile.TemporaryDirectory(prefix="modal-") as folder:
        server = ModalServer(Path(folder))
        ready: Future[None] = Future()
        thread = threading.Thread(target=server._serve, args=[ready], name="modal-server")
        thread.start()
        try:
            ready.result(timeout=30)
            yield server
        finally:
            server._loop.call_soon_threadsafe(server._loop.stop)
            thread.join(timeout=30)
            with warnings.catch_warnings():  # a connection that was made while the loop ended warns
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
    assert not thread.is_alive(), "the server has not stopped"
    assert not server.unimplemented, f"the SDK made unsupported calls: {sorted(server.unimplemented)}"
