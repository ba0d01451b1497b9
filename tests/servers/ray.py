"""Runs a real Ray head on loopback that asks for a token. Ray is installed in a separate environment.

`make test-ray` installs Ray in `.venv-ray`. The environment variable REPLICAS_RAY may name another command `ray`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import MARK, command_of, is_alive

from executors.process import descendants, die_with_parent
from servers.s3.radosgw import free_port

PROGRAM = Path(os.environ.get("REPLICAS_RAY") or Path(__file__).parents[2] / ".venv-ray/bin/ray")
START_LIMIT_S = 300  # a start takes 10 s on an idle machine
STOP_LIMIT_S = 10.0
LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by the machine's public address
N_CPUS = 16  # the same number of replicas runs at the same time on every machine
WHY_NOT = f"Ray is not installed at {PROGRAM}: make test-ray installs it"


def is_installed() -> bool:
    return PROGRAM.exists()


@dataclass
class RayHead:
    """A running head, and the data that a client needs to use it."""

    address: str
    gcs_address: str
    token_file: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a process uses this head."""
        return {"RAY_API_SERVER_ADDRESS": self.address, "RAY_AUTH_TOKEN_PATH": str(self.token_file)}

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the answer to a request with the token."""
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def jobs(self) -> list[dict[str, Any]]:
        return list(json.loads(self.ask("GET", "/api/jobs/")))

    def end_jobs(self) -> None:
        """End all running jobs, and wait for their ends."""
        while going := [job["submission_id"] for job in self.jobs() if job["status"] == "RUNNING"]:
            for name in going:
                self.ask("POST", f"/api/jobs/{name}/stop")
            time.sleep(0.1)

    def forget_package(self, name: str) -> None:
        """Remove a package, as Ray does some time after the last job has used it."""
        code = "import sys; from ray._raylet import GcsClient; sys.exit(1 - GcsClient(sys.argv[1]).internal_kv_del("
        arguments = [self.gcs_address, f"gcs://{name}"]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file)}
        command = [str(PROGRAM.with_name("python")), "-c", f"{code}sys.argv[2].encode(), False, None))", *arguments]
        subprocess.run(command, env={**os.environ, **token}, check=True)

    def is_ready(self) -> bool:
        """Return True if the head can start jobs. It answers requests some seconds before that."""
        with contextlib.suppress(OSError):
            return bool(self.ask("POST", "/api/jobs/", {"entrypoint": "true"}))
        return False

    def kill(self) -> None:
        """End the head at once, with all of its processes."""
        # collect the processes first, because a process without its parent could not be found any more
        whole = _below(self.process.pid)
        for pid in [self.process.pid, *whole]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        _await_end(whole)

    def stop(self) -> None:
        whole = _below(self.process.pid)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT_S)
        self.process.kill()
        self.process.wait()
        for pid, command in whole.items():
            if command_of(pid) == command:  # check that the pid does not belong to another process now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _await_end(whole)


@contextlib.contextmanager
def ray_head(n_cpus: int = N_CPUS) -> Iterator[RayHead]:
    """Start a head, and end it with all its processes."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        folder = Path(name)  # a short path, because the paths of its sockets may have at most 107 characters
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(secrets.token_hex(32))
        ports = {each: free_port() for each in ("port", "dashboard-port", "dashboard-agent-listen-port")}
        options = {
            "node-ip-address": LOOPBACK,
            "dashboard-host": "127.0.0.1",
            "ray-client-server-port": free_port(),
            "include-log-monitor": "False",
            "num-cpus": n_cpus,
            "temp-dir": folder / "t",
            "object-store-memory": 100_000_000,
            **ports,
        }
        command = [
            "start",
            "--head",
            "--block",
            "--no-monitor",
            "--disable-usage-stats",
            *(f"--{n}={v}" for n, v in options.items()),
        ]
        # Without the mark of the processes of tests, because the head outlives the test that started it.
        kept = {
            name: value for name, value in os.environ.items() if name != MARK and not name.startswith(("RAY_", "AWS_"))
        }
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the `python` that jobs use
        more = {"PATH": path, "HOME": name, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        more |= {"RAY_health_check_failure_threshold": "100"}  # a busy machine needs this
        output, until = folder / "output", time.monotonic() + START_LIMIT_S
        with contextlib.ExitStack() as stack:
            # by default, the parts of Ray give each other up after 30 s, which is too short on a busy machine
            while True:
                with output.open("wb") as file:
                    process = subprocess.Popen(
                        [str(PROGRAM), *command],
                        env={**kept, **more},
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                addresses = f"http://127.0.0.1:{ports['dashboard-port']}", f"{LOOPBACK}:{ports['port']}"
                head = RayHead(*addresses, token_file, process)
                stack.callback(head.stop)
                if _comes_up(head, until):
                    break
                if time.monotonic() > until:
                    raise RuntimeError(f"No Ray head starts here:\n{output.read_text()[-3000:]}")
            yield head


def _comes_up(head: RayHead, until: float) -> bool:
    while not head.is_ready():
        if head.process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _below(pid: int) -> dict[int, str]:
    """Return the pids and commands of all processes below one."""
    return {each: command_of(each) for each in descendants(pid)}


def _await_end(pids: dict[int, str]) -> None:
    deadline = time.monotonic() + STOP_LIMIT_S
    while any(is_alive(pid) and command_of(pid) == command for pid, command in pids.items()):
        if time.monotonic() > deadline:
            raise RuntimeError("Processes of the Ray head cannot be ended.")
        time.sleep(0.05)
