"""Serves an application behind the fault layer, on loopback or at a given address, until stdin ends.

It prints its address in one line of JSON on stdout. It keeps connections open, as every S3 server does. werkzeug's own
server closes them, and would hide how a client uses its connection pool.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote_to_bytes
from wsgiref.util import setup_testing_defaults

from servers.fault_layer import Application, FaultLayer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    application: FaultLayer

    def answer(self) -> None:
        path, _, query = self.path.partition("?")
        environ: dict[str, Any] = {
            "SERVER_PORT": str(self.connection.getsockname()[1]),
            "REMOTE_ADDR": self.client_address[0],
            "REMOTE_PORT": self.client_address[1],
            "REQUEST_METHOD": self.command,
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query,
            "RAW_URI": self.path,
            "REQUEST_URI": self.path,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": self.headers.get("Content-Length", "0"),
            "wsgi.input": self.rfile,
        }
        environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in self.headers.items()}
        setup_testing_defaults(environ)
        reply = self.application.answer(environ)
        if reply.status:
            headers = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
            head = f"HTTP/1.1 {reply.status}\r\n{headers}\r\n".encode("latin-1")
            # A small body is sent with its head; a large one is not copied.
            for part in (head + reply.body,) if len(reply.body) < 65536 else (head, reply.body):
                self.wfile.write(part)
        if reply.hang_up:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        pass  # the client hung up


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def serve(application: Application) -> None:
    logging.disable(logging.CRITICAL)
    Handler.application = FaultLayer(application)
    host = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    server = Server((host, 0), Handler)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    print(json.dumps(f"http://{host}:{server.server_address[1]}"), flush=True)
    server.serve_forever()
