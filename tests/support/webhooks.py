"""A web server on loopback that receives notifications, and misbehaves on request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from executors.testing import eventually


@dataclass
class Webhook:
    """The server, with all messages that it has received."""

    url: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """The method and the path of each request."""
    logins: list[str] = field(default_factory=list)
    """The header `Authorization` of each request that has one."""
    answers: list[str] = field(default_factory=list)
    """How the next requests are answered, in turn: `ok`, `slow`, a status code, `close`, `hang`, or `redirect URL`."""
    always: str = "ok"
    """How further requests are answered."""
    arrived: list[float] = field(default_factory=list)
    """The Unix time at which each message arrived."""
    released: threading.Event = field(default_factory=threading.Event)

    def kinds(self) -> list[str]:
        return [message["kind"] for message in list(self.messages)]

    def of(self, kind: str, limit_s: float = 60.0) -> dict[str, Any]:
        """Wait for the first message of a kind, and return it."""
        found: list[dict[str, Any]] = eventually(
            lambda: [each for each in list(self.messages) if each["kind"] == kind],
            f"a message {kind}",
            within_s=limit_s,
        )
        return found[0]


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Run a server until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.requests.append(("POST", self.path))
            found.logins += self.headers.get_all("Authorization", [])
            how = found.answers.pop(0) if found.answers else found.always
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if how == "slow":
                found.released.wait(0.3)
                how = "ok"
            if how == "ok":
                found.messages.append(json.loads(data))
                found.arrived.append(time.time())
            if how == "close":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if how == "hang":
                found.released.wait(120)
                return
            if how.startswith("redirect "):
                self.send_response(307)
                self.send_header("Location", how.removeprefix("redirect "))
            else:
                self.send_response(200 if how == "ok" else int(how))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            found.requests.append(("GET", self.path))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Webhook(f"http://127.0.0.1:{server.server_address[1]}/hooks/s3cret-path")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
