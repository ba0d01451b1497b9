"""A third-party executor: five verbs over `subprocess.Popen`, and nothing imported from this project."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from typing import Any

CALL = """
import importlib, json, sys
name, args, result_file = sys.argv[1:]
module, _, function = name.replace(":", ".").rpartition(".")
sys.path[:0] = [""]
try:
    result = getattr(importlib.import_module(module), function)(**json.loads(args))
except SystemExit as left:
    if left.code not in (None, 0):
        raise
    result = None
with open(result_file, "w") as file:
    json.dump(result, file)
"""


class Ticket:
    """The executor's own type of handle. The only field that it shares with other handles is the rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], folder: str, deadline: float) -> None:
        self.rank = rank
        self.deadline = deadline
        self.process = process
        self.folder = folder


class PopenExecutor:
    backend_name = "popen"
    supports_inter_replica_network = True

    def __init__(self) -> None:
        self.entrypoints: list[tuple[str, dict[str, Any]]] = []

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Any,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
    ) -> list[Any]:
        self.entrypoints.append((entrypoint, dict(entrypoint_args)))
        if n_replicas < 1:
            raise ValueError(f"n_replicas={n_replicas}")
        tickets = []
        for rank in range(n_replicas):
            folder = os.path.join(tempfile.gettempdir(), "popen-executor-" + uuid.uuid4().hex)
            os.mkdir(folder)
            args = json.dumps(dict(entrypoint_args))
            with open(os.path.join(folder, "log"), "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-c", CALL, entrypoint, args, os.path.join(folder, "result")],
                    env={**os.environ, "REPLICA_RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            tickets.append(Ticket(rank, process, folder, time.monotonic() + timeout))
        return tickets

    def poll(self, handle: Any) -> str:
        code = handle.process.poll()
        if code is None and time.monotonic() > handle.deadline:
            with open(os.path.join(handle.folder, "out of time"), "w"):
                handle.process.kill()
            code = handle.process.wait()
        if os.path.exists(os.path.join(handle.folder, "cancelled")):
            return "running" if code is None else "cancelled"
        return {None: "running", 0: "succeeded"}.get(code, "failed")

    def stream_logs(self, handle: Any, *, n_lines: int = 200) -> str:
        with open(os.path.join(handle.folder, "log"), errors="replace") as log:
            return "".join(log.readlines()[-n_lines:])

    def cancel(self, handle: Any) -> None:
        if handle.process.poll() is None:
            with open(os.path.join(handle.folder, "cancelled"), "w"):
                pass
            handle.process.send_signal(signal.SIGTERM)
            try:
                handle.process.wait(1)
            except subprocess.TimeoutExpired:
                handle.process.kill()
                handle.process.wait()

    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        rows = []
        for handle in handles:
            while self.poll(handle) == "running" and time.monotonic() < deadline:
                time.sleep(0.01)
            status = self.poll(handle)
            row: dict[str, Any] = {"rank": handle.rank, "status": status, "result": None, "error": None, "reason": None}
            row["exit_code"] = handle.process.returncode
            if status == "succeeded":
                with open(os.path.join(handle.folder, "result")) as file:
                    row["result"] = json.load(file)
            elif status == "failed":
                row["error"] = self.stream_logs(handle)
                row["reason"] = "signal" if handle.process.returncode < 0 else "exception"
                if os.path.exists(os.path.join(handle.folder, "out of time")):
                    row.update(reason="timeout", error="It ran into its time limit.")
            elif status == "cancelled":
                row["reason"] = "cancelled"
            rows.append(row)
        return rows
