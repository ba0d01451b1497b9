"""Serves dashboards for tests in this process, and asks them as a browser does."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from executors.dashboard.server import Dashboard, Options
from executors.testing import eventually

NAVIGATION: Mapping[str, str] = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "none"}


@dataclass
class Answer:
    """The answer to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """A browser without windows: it keeps the cookie, and sends the headers that a test names."""

    dashboard: Dashboard
    cookie: str = ""
    proof: str = field(init=False)

    def __post_init__(self) -> None:
        self.proof = self.dashboard.access.proof

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.dashboard.port}"

    def ask(
        self, method: str, path: str, headers: Mapping[str, str | None] | None = None, body: bytes | None = None
    ) -> Answer:
        """Send a request. A header that is None is left out."""
        usual: dict[str, str | None] = {"Host": f"127.0.0.1:{self.dashboard.port}", "Cookie": self.cookie or None}
        sent = {name: value for name, value in {**usual, **(headers or {})}.items() if value is not None}
        connection = http.client.HTTPConnection("127.0.0.1", self.dashboard.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            if body is not None or method == "POST":
                connection.putheader("Content-Length", str(len(body or b"")))
            connection.endheaders(body)
            found = connection.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str | None) -> Answer:
        return self.ask("GET", path, headers)

    def press(self, key: str, verb: str, headers: Mapping[str, str | None] | None = None) -> Answer:
        """Press a button on the page of a run."""
        usual = {"Origin": self.origin, "X-Replicas-Proof": self.proof, "Sec-Fetch-Site": "same-origin"}
        return self.ask("POST", f"/runs/{key}/{verb}", {**usual, **(headers or {})})

    def enter(self) -> Answer:
        """Open the address that the command prints, and keep the cookie."""
        parts = urlsplit(self.dashboard.address())
        answer = self.ask("GET", f"{parts.path}?{parts.query}", NAVIGATION)
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def changes_until(self, path: str, is_right: Any) -> Any:
        """Ask again and again for everything that a page shows, until a condition holds."""

        def look() -> Any:
            found = self.get(f"{path}?since=0").json
            return found if is_right(found) else None

        return eventually(look, path)


@contextlib.contextmanager
def running_dashboard(options: Options | None = None) -> Iterator[Client]:
    """Serve in a thread, and yield a browser that has opened the printed address."""
    dashboard = Dashboard(options or Options(port=0))
    server = threading.Thread(target=dashboard.serve, name="test-dashboard")
    server.start()
    client = Client(dashboard)
    try:
        assert client.enter().status == 303
        yield client
    finally:
        dashboard.stop()
        server.join(30)
        assert not server.is_alive()
