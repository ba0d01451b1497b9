"""Calls each verb with --json in a small scene of real runs: for a test, and for the examples of the reference.

PYTHONPATH=tests python -m tests.support.json_scene    writes the examples into `docs/json`
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servers.hub.server import hub_server
from servers.s3.server import CREDENTIALS, running_server

TRAIN = """
import torch
from diloco import DiLoCo
from executors import current_replica

def main():
    torch.set_num_threads(1)
    torch.manual_seed(current_replica().rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with DiLoCo(model, inner_steps=5, total_steps=20) as diloco:
        for step in range(20):
            x = torch.randn(8, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            diloco.step()
            current_replica().report(step=step + 1, loss=float(loss))
    return {"loss": round(float(loss), 3)}
"""
JOB = """
import time
from executors import current_replica

def fail():
    if current_replica().rank == 1:
        raise RuntimeError("the data has no column 'text'")
    return "fine"

def wait():
    print("waiting", flush=True)
    time.sleep(600)
"""
PLAN = ("--params", "1.3e9", "--n", "8", "--step", "0.9", "--up", "20MB", "--down", "20MB", "--latency", "50ms")
BOOT_ID = "0b5c1d4e-93f7-4c8a-8a52-6f1e2d3c4b5a"  # a made-up one
DEFAULT_PORT = 8265
ADDRESS = f"127.0.0.1:{DEFAULT_PORT}/?token=6UzXb0cYx3dJQm2rT4vK8pLwN1aSfGhE7iOuZyB5tCk"
"""An address of a dashboard with a made-up token."""
QUICK = ("--option", "preload=[]", "--option", "term_grace_s=0.5")


class Scene:
    """A folder with a home of its own, in which the command is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service: Mapping[str, str] = {}
        """The variables of services on loopback, which later calls use."""
        (folder / "train.py").write_text(TRAIN)
        (folder / "job.py").write_text(JOB)
        (folder / "replicas.toml").write_text("n = 4\ntimeout = '2h'\n")

    def call(self, *arguments: str) -> str:
        """Return the stdout of one call."""
        done = subprocess.run(
            [sys.executable, "-m", "executors.cli", *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "HOME": str(self.folder),
                "XDG_STATE_HOME": str(self.folder / "state"),
                **self.service,
            },
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback (most recent call last)" not in done.stderr, done.stderr
        return done.stdout

    def address_of_dashboard(self) -> Any:
        """Return the document that a dashboard prints before it serves, and end the dashboard."""
        command = [sys.executable, "-m", "executors.cli", "dashboard", "--port", "0", "--json"]
        env = {**os.environ, "HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state")}
        with subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None
                lines = []
                for line in process.stdout:
                    lines.append(line)
                    if line == "}\n":
                        break
                return json.loads("".join(lines))
            finally:
                process.terminate()


def calls(scene: Scene) -> Iterator[tuple[str, str, Any]]:
    """Yield the kind that each document should have, the verb that printed it, and the document.

    Args:
        scene: the folder.
    """

    def one(kind: str, *arguments: str) -> tuple[str, str, Any]:
        return kind, arguments[0], json.loads(scene.call(*arguments, "--json"))

    launch = ("launch", "job.py:wait", "--n", "2", *QUICK)
    yield one("error", "status", "first-tri")
    yield one("dry-run", *launch, "--dry-run", "--run-id", "planned")
    yield one("run", "launch", "train.py:main", "--n", "2", "--run-id", "first-try")
    yield one("status", "status", "first-try")
    yield one("report", "report", "first-try")
    yield one("export", "export", "first-try", "--csv", "run.csv")
    yield one("debug", "debug", "first-try", "--out", "first-try.tar.gz")
    yield one("model", "model", "first-try", "--out", "model.safetensors")
    yield one("logs", "logs", "first-try", "--lines", "3")
    yield one("collect", "collect", "first-try", "--out", "results")
    yield one("state", "stop", "first-try")
    for line in scene.call("events", "first-try", "--json").splitlines()[:1]:
        yield "event", "events", json.loads(line)
    yield one("run", "launch", "job.py:fail", "--n", "2", "--run-id", "second-try", *QUICK)
    yield one("status", "status", "second-try")
    yield one("run", *launch, "--run-id", "third-try", "--detach")
    yield one("status", "status", "third-try")
    yield one("report", "report", "third-try")
    yield one("add", "add", "third-try", "--n", "1", "--detach", *QUICK)
    yield one("cancel", "cancel", "third-try")
    yield one("run", "wait", "third-try")
    yield one("stacks", "logs", "third-try", "--stacks")
    yield one("rm", "rm", "second-try", "fourth-try")
    yield one("ls", "ls")
    yield "dashboard", "dashboard", scene.address_of_dashboard()
    yield one("backends", "backends", "inline")
    yield one("config", "config")
    yield one("doctor", "doctor", "--backend", "inline")
    yield one("plan", "plan", *PLAN)
    scene.call("launch", "job.py:missing", "--n", "2", "--run-id", "fifth-try")
    yield one("unlaunched", "status", "fifth-try")
    with hub_server() as hub:
        with running_server() as bucket:
            scene.service = {**hub.environment, **CREDENTIALS, "REPLICAS_RENDEZVOUS": bucket.url("runs")}
            scene.call("launch", "job.py:wait", "--n", "1", "--backend", "hf", "--run-id", "cloud-try", "--detach")
        # The bucket is gone from here on, and the service still answers.
        yield one("cancel-without-store", "cancel", "cloud-try")


def without_traces(text: str, folder: Path) -> str:
    """Return a document without the names of this machine, its user and its folder."""
    text = text.replace(str(folder), "/home/me/project").replace(str(Path(sys.executable)), "/home/me/.venv/bin/python")
    text = text.replace(str(Path(__file__).parents[2]), "/home/me/replicas")
    text = text.replace(socket.gethostname(), "laptop")
    # The identity of a process has the machine's boot id and the inode of its process namespace.
    text = re.sub(r"laptop [0-9a-f-]{36} pid:\[\d+\]", f"laptop {BOOT_ID} pid:[4026531836]", text)
    text, n = re.subn(r"127\.0\.0\.1:\d+/\?token=[\w-]+", ADDRESS, text)
    text = re.sub(r'"port": \d+', f'"port": {DEFAULT_PORT}', text) if n else text
    text = re.sub(r"http(%3A%2F%2F|://)127\.0\.0\.1(%3A|:)\d+(?!\d|/\?token=)", r"https\1objects.example.com", text)
    return re.sub(r'(Linux \d+\.\d+)[^",\s]*', r"\1", re.sub(r"root@", "me@", text))


def write_examples(to: Path) -> None:
    """Write the first document of each kind into a folder.

    Args:
        to: the folder.
    """
    to.mkdir(exist_ok=True)
    seen = set[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, _, document in calls(Scene(folder)):
            if kind not in seen:
                seen.add(kind)
                text = json.dumps(document, indent=1, ensure_ascii=False)
                (to / f"{kind}.json").write_text(without_traces(text, folder) + "\n", encoding="utf-8")
                print(kind)


if __name__ == "__main__":
    write_examples(Path(__file__).parents[2] / "docs" / "json")
