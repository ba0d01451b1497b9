"""A WSGI layer in front of an S3 server that injects faults: at random by a seed, or once at a chosen request.

It also adds two properties that servers for tests do not have. Only one request at a time reaches the application,
because moto checks whether a key is taken and then sets it without a lock. A request whose body was cut off does not
reach the application.

The layer itself answers the requests that control it: `PUT /_faults` with `Faults` as JSON, `POST /_once`, `GET
/_requests`, `GET /_kept`, and `POST /_reset`.
"""

from __future__ import annotations

import base64
import io
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

LINE_FEED = "␊".encode().decode("latin-1")  # the name of the header as WSGI writes it

Environ = dict[str, Any]
Application = Callable[..., Iterable[bytes]]
Headers = list[tuple[str, str]]

ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"
ERRORS = {
    "unavailable": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "lost": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "conflict": ("409 Conflict", "ConditionalRequestConflict", "Another process is creating this key."),
    "no_bucket": ("404 Not Found", "NoSuchBucket", "The specified bucket does not exist."),
    "forbidden": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "checksum": ("400 Bad Request", "InvalidRequest", "Checksums are not supported."),
    "not_implemented": ("501 Not Implemented", "NotImplemented", "A header you provided is not implemented."),
}
ANSWERED = ("", "lost", "dropped", "truncated", "short")  # these faults let the request reach the application


@dataclass
class Faults:
    """The faults of the server. Each rate is a share of the requests that the fault can hit."""

    seed: int = 0
    unavailable: float = 0.0  # share of requests that are answered 503 and have no effect
    conflict: float = 0.0  # share of conditional PUTs that are answered 409 and have no effect
    lost: float = 0.0  # share of requests that have their effect and are then answered 503
    truncated: float = 0.0  # share of answers whose connection ends in the middle of the body
    delay_s: float = 0.0  # each request waits for a random time up to this number of seconds
    latency_s: float = 0.0  # each request waits for exactly this number of seconds
    bytes_per_s: float = 0.0  # the speed of each body, or 0 for no delay
    ignores_condition: bool = False
    knows_no_condition: bool = False
    knows_no_ranges: bool = False
    refuses_checksums: bool = False
    forbidden: list[str] = field(default_factory=list)  # requests with these methods are answered 403
    silent: bool = False  # no request is answered until this is False again; then all connections end
    no_bucket: bool = False  # every request is answered 404, NoSuchBucket
    # a pattern of paths; the server keeps a copy of everything that is written to them, even if it is deleted later
    keeps: str = ""


@dataclass
class Reply:
    status: str = ""
    """The status line of the reply. Empty: the server sends no reply."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    hang_up: bool = False
    """Raised to end the connection at this point."""


class FaultLayer:
    def __init__(self, application: Application) -> None:
        self._application = application
        self._one_at_a_time = threading.Lock()
        self._state = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._faults = Faults()
        self._random = random.Random(0)
        self._once: list[dict[str, str]] = []
        self._requests: list[dict[str, str]] = []
        self._kept: dict[str, list[str]] = {}

    def answer(self, environ: Environ) -> Reply:
        """Answer one WSGI request."""
        length = int(environ["CONTENT_LENGTH"])
        body = environ["wsgi.input"].read(length)
        if len(body) < length:  # the client died while it sent the body; S3 would not store half an object
            return Reply(hang_up=True)
        path = environ["PATH_INFO"]
        if path.startswith("/_"):
            return self._control(path, body)
        with self._state:
            faults, delay_s = self._faults, self._random.uniform(0, self._faults.delay_s)
            fault = self._choose(environ)
        time.sleep(delay_s)
        if faults.silent:
            while self._faults is faults:
                time.sleep(0.05)
            return Reply(hang_up=True)
        reply = self._answer(environ, body) if fault in ANSWERED else Reply()
        if fault in ERRORS:
            reply = _error(fault, environ)
        size_bytes = len(body) + len(reply.body)
        time.sleep(faults.latency_s + (size_bytes / faults.bytes_per_s if faults.bytes_per_s else 0.0))
        headers = {"range": "HTTP_RANGE", "expect": "HTTP_EXPECT", "query": "QUERY_STRING", "method": "REQUEST_METHOD"}
        row = {name: environ.get(variable, "") for name, variable in headers.items()}
        row |= {"path": path, "connection": str(environ["REMOTE_PORT"]), "fault": fault, "status": reply.status}
        with self._state:
            self._requests.append(row)
        half = reply.body[: len(reply.body) // 2]
        if fault == "dropped":
            return Reply(hang_up=True)
        if fault == "truncated":
            return Reply(reply.status, reply.headers, half, hang_up=True)
        if fault == "short":  # like a proxy that treats the part that it received as the whole body
            return Reply(reply.status, _with_length(reply.headers, len(half)), half)
        return reply

    def _choose(self, environ: Environ) -> str:
        """Return the name of the fault that hits a request, or "" for none."""
        method, path, faults = environ["REQUEST_METHOD"], environ["PATH_INFO"], self._faults
        conditional = method == "PUT" and "HTTP_IF_NONE_MATCH" in environ
        for rule in self._once:
            if rule["method"] == method and re.search(rule["path"], path):
                self._once.remove(rule)
                return rule["fault"]
        if method in faults.forbidden:
            return "forbidden"
        if faults.no_bucket:
            return "no_bucket"
        if faults.refuses_checksums and any("CHECKSUM" in name or "TRAILER" in name for name in environ):
            return "checksum"
        if faults.knows_no_condition and conditional:
            return "not_implemented"
        rates = {
            "unavailable": faults.unavailable,
            "conflict": faults.conflict if conditional else 0,
            "lost": faults.lost,
            "truncated": faults.truncated if method == "GET" else 0,
        }
        return next((name for name, rate in rates.items() if self._random.random() < rate), "")

    def _answer(self, environ: Environ, body: bytes) -> Reply:
        if self._faults.ignores_condition:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if self._faults.knows_no_ranges:
            environ.pop("HTTP_RANGE", None)
        answered: list[Any] = []
        method, path, keeps = environ["REQUEST_METHOD"], environ["PATH_INFO"], self._faults.keeps
        environ["wsgi.input"] = io.BytesIO(body)
        # moto's routes cannot contain a line feed, so another character stands for it.
        for name in ("PATH_INFO", "RAW_URI", "REQUEST_URI", "QUERY_STRING"):
            environ[name] = environ[name].replace("\n", LINE_FEED).replace("%0A", quote(LINE_FEED.encode("latin-1")))
        with self._one_at_a_time:
            chunks = self._application(environ, lambda status, headers, _=None: answered.extend((status, headers)))
            reply = b"".join(chunks)
            if "list-type=2" in environ["QUERY_STRING"]:
                reply = reply.replace(quote(LINE_FEED.encode("latin-1")).encode(), b"%0A")
                answered[1] = _with_length(answered[1], len(reply))
            if close := getattr(chunks, "close", None):
                close()
        status, headers = answered
        if method == "PUT" and keeps and status.startswith("200") and re.search(keeps, path):
            with self._state:
                self._kept.setdefault(path, []).append(base64.b64encode(body).decode())
        return Reply(status, list(headers), reply)

    def _control(self, path: str, body: bytes) -> Reply:
        with self._state:
            if path == "/_faults":
                self._faults = Faults(**json.loads(body))
                self._random = random.Random(self._faults.seed)
            elif path == "/_once":
                self._once.append(json.loads(body))
            elif path == "/_reset":
                self._reset()
            text = json.dumps({"/_requests": self._requests, "/_kept": self._kept}.get(path)).encode()
        return Reply("200 OK", _with_length([("Content-Type", "application/json")], len(text)), text)


def _error(fault: str, environ: Environ) -> Reply:
    status, code, text = ERRORS[fault]
    reply = b"" if environ["REQUEST_METHOD"] == "HEAD" else ERROR.format(code=code, text=text).encode()
    return Reply(status, _with_length([("Content-Type", "application/xml")], len(reply)), reply)


def _with_length(headers: Iterable[tuple[str, str]], length: int) -> Headers:
    return [row for row in headers if row[0].lower() != "content-length"] + [("Content-Length", str(length))]
