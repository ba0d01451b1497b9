"""The HTTP server of the local Hub: it keeps connections open, sends streams in chunks, and breaks connections if a
test asks for that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from servers.hub.faults import Fault, Request
from servers.hub.wire import Refusal

if TYPE_CHECKING:
    from servers.hub.server import HubServer, Reply

RESET_WHEN_CLOSED = struct.pack("ii", 1, 0)


class HttpServer(ThreadingHTTPServer):
    """An HTTP server on loopback that keeps a list of its connections and closes all of them when it ends."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.connections: set[socket.socket] = set()
        self.to_be_reset: set[socket.socket] = set()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self.connections.discard(request)
            reset = request in self.to_be_reset
            self.to_be_reset.discard(request)
        if reset:
            request.close()  # close with a reset; a normal end of the connection would not be one
        else:
            super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client hung up
            self.hub.complaints.append(traceback.format_exc())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def answer(self) -> None:
        hub = self.server.hub
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length", 0))
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() != "authorization"}
        body = self.rfile.read(length)
        if len(body) < length:  # the client ended, or was killed, while it sent the request
            self.close_connection = True
            return
        request = Request(self.command, unquote(path), query, headers, body)
        parts = hub.route_of(request)
        hub.requests.append(request)
        time.sleep(hub.latency_s)
        if parts is None:
            self.refuse(request, 404, "Sorry, we can't find the page you are looking for.")
            return
        fault = hub.faults.take(request)
        streams = request.route == "logs" and fault is not None and fault.begins_a_stream
        if fault and not fault.after_applying and fault.answer != "cut" and not streams:
            self.misbehave(request, fault)
            return
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        try:
            reply = hub.apply(request, token if scheme == "Bearer" else None, parts)
        except Refusal as refusal:
            self.refuse(request, refusal.status, str(refusal))
            return
        if reply.events is not None and (fault is None or streams):
            self.stream(request, reply, fault)
        elif fault is None or fault.answer == "cut":
            self.send(request, 200, json.dumps(reply.value).encode(), reply.headers, cut=fault is not None)
        else:
            self.misbehave(request, fault)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = answer

    def misbehave(self, request: Request, fault: Fault) -> None:
        """Apply a fault: answer with an error, or do not answer."""
        if isinstance(fault.answer, int):
            phrases = {401: "Invalid username or password."}
            text = phrases.get(fault.answer, HTTPStatus(fault.answer).phrase)
            self.refuse(request, fault.answer, text, fault.headers)
            return
        if fault.answer == "silent":
            self.server.hub.may_speak.wait()
        self.hang_up(reset=fault.answer == "reset")

    def hang_up(self, *, reset: bool = False) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_WHEN_CLOSED)
            with self.server.lock:
                self.server.to_be_reset.add(self.connection)

    def refuse(self, request: Request, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        """Answer with an error in the format of the Hub."""
        body = json.dumps({"error": text}).encode()
        self.send(request, status, body, {"X-Error-Message": text, **(headers or {})})

    def send(
        self, request: Request, status: int, body: bytes, headers: Mapping[str, str], *, cut: bool = False
    ) -> None:
        head = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body)), **headers}
        self.start(request, status, head)
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.hang_up()

    def stream(self, request: Request, reply: Reply, fault: Fault | None) -> None:
        """Send events in chunks until they end, or until a fault ends them."""
        self.start(request, 200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        assert reply.events is not None
        # the first line is the Hub's own line about the start of the job
        left = 1 + (fault.after_lines or 0) if fault else None
        for event in reply.events:
            data = event.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            if left is not None and "data: " in event:
                left -= 1
                if left == 0:
                    break
        if fault is None:
            self.wfile.write(b"0\r\n\r\n")
        else:
            if fault.answer == "silent":
                self.server.hub.may_speak.wait()
            self.hang_up(reset=fault.answer == "reset")

    def start(self, request: Request, status: int, headers: Mapping[str, str]) -> None:
        request.status = status
        self.send_response(status)
        for name, value in {"X-Request-Id": "local", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass
