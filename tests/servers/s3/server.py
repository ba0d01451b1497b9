"""Starts the S3 server of the tests in a process, plans its faults, and stops it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from executors.testing.helpers import environment
from servers.fault_layer import Faults

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "never/to/be+seen/secret/of/the/tests/0000",
    "AWS_SESSION_TOKEN": "never-to-be-seen-token",
}


@dataclasses.dataclass(frozen=True)
class S3Server:
    """A server on loopback with one bucket."""

    endpoint_url: str
    pid: int = 0
    """The pid of the server's process. 0: not known."""

    def url(self, prefix: str = "") -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint_url={quote(self.endpoint_url, safe='')}&region=us-east-1"

    def misbehave(self, **faults: Any) -> None:
        """Set the faults of the server from now on."""
        self._ask("PUT", "/_faults", dataclasses.asdict(Faults(**faults)))

    def misbehave_once(self, fault: str, method: str, path: str = "") -> None:
        """Plan one fault for the next request with this method whose path matches."""
        self._ask("POST", "/_once", {"fault": fault, "method": method, "path": path})

    def requests(self, method: str | None = None, path: str = "") -> list[dict[str, str]]:
        """Return the requests since the last call of `empty`."""
        seen: list[dict[str, str]] = self._ask("GET", "/_requests")
        return [row for row in seen if method in (None, row["method"]) and path in row["path"]]

    def kept(self) -> dict[str, list[bytes]]:
        """Return everything that was written to the paths of `Faults.keeps`, by key, in order."""
        found: dict[str, list[str]] = self._ask("GET", "/_kept")
        return {
            path.removeprefix(f"/{BUCKET}/"): [base64.b64decode(text) for text in texts]
            for path, texts in found.items()
        }

    def empty(self) -> None:
        """Delete all objects, and remove all faults."""
        self._ask("POST", "/_reset")
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")

    def _ask(self, method: str, path: str, value: object = None) -> Any:
        connection = http.client.HTTPConnection(urlsplit(self.endpoint_url).netloc, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body=None if value is None else json.dumps(value))
            reply = connection.getresponse()
            text = reply.read()
            assert reply.status == 200, (method, path, reply.status, text)
            return json.loads(text) if path.startswith("/_") else None


@contextlib.contextmanager
def running_server(host: str = "127.0.0.1", module: str = "servers.s3.small") -> Iterator[S3Server]:
    """Start a server in a new process. It ends with the block, or with this process."""
    command = [sys.executable, "-m", module, host]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(**CREDENTIALS)
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait()}"
            yield S3Server(json.loads(line), process.pid)
        finally:
            process.kill()
