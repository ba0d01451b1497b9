"""The faults of the local Hub, and its record of the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote_plus

ROUTES = ("create", "list", "inspect", "logs", "cancel", "hardware", "whoami")

Misconduct = int | Literal["closed", "reset", "cut", "silent"]
"""A kind of fault: an error status, or a fault of the connection.

The connection is closed or reset without an answer, is cut in the middle of an answer, or gets no answer until
`HubServer.forgive`.
"""


@dataclass
class Request:
    """One request, without its token."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    route: str = ""
    """A name in ROUTES. Empty: the server does not have this route."""
    status: int | None = None
    """The status of the answer. None if there was no answer."""

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None

    def texts_beside_secrets(self) -> list[str]:
        """Return every text in the request, decoded, except for the `secrets` of a new job."""
        value = self.json
        if self.route == "create" and isinstance(value, dict):
            value = {name: part for name, part in value.items() if name != "secrets"}
        return [self.path, unquote_plus(self.query), *self.headers.values(), *_texts_in(value)]


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every key in a JSON value, and every leaf as a text."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts_in(part)
    else:
        yield str(value)


@dataclass
class Fault:
    answer: Misconduct
    times: int | None
    """The number of requests that the fault hits. None: all."""
    after_applying: bool
    when: Callable[[Request], bool] | None
    headers: Mapping[str, str]
    after_lines: int | None
    """The number of lines of a log that are sent before the fault. None: not even the beginning is sent."""

    @property
    def begins_a_stream(self) -> bool:
        return self.after_lines is not None or self.answer == "cut"


@dataclass
class Faults:
    """The planned faults, by route."""

    _waiting: dict[str, list[Fault]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, route: str, fault: Fault) -> None:
        assert route in ROUTES, f"no route is named {route!r}; there are {', '.join(ROUTES)}"
        assert route == "logs" or fault.after_lines is None, "`after_lines` is only for the route of logs"
        with self._lock:
            self._waiting.setdefault(route, []).append(fault)

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def take(self, request: Request) -> Fault | None:
        """Return the first fault that hits a request, and count it."""
        with self._lock:
            waiting = list(self._waiting.get(request.route, []))
        for fault in waiting:
            if fault.when is None or fault.when(request):  # the condition may wait, while other requests continue
                with self._lock:
                    if fault.times is None:
                        return fault
                    if fault.times > 0:
                        fault.times -= 1
                        return fault
        return None
