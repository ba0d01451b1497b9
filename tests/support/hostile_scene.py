"""A hostile owner of a bucket, and a victim: a user who reads that bucket and must not be harmed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from servers.s3.server import BUCKET, S3Server

from executors import ReplicasError, attach, list_runs
from executors.run.run import view_of
from executors.store import open_store
from executors.store.s3.store import S3Store
from support.cli import HereInstead, Result
from support.hostile_records import outcome_json, run_json, task_json

VERBS: dict[str, tuple[str, ...]] = {
    "status": (),
    "status --json": ("--json",),
    "logs": (),
    "wait": ("--timeout", "0.1"),
    "collect": ("--timeout", "0.1"),
    "collect --out": ("--timeout", "0.1", "--out", "brought"),
    "cancel": (),
    "resume": (),
    "rm": (),  # this verb comes last, because it removes the run
}
WITH_TRUST = {"resume --trust-bucket": ("--trust-bucket",), **VERBS}
"""The commands that must not start anything, even with --trust-bucket."""


class Owner(Protocol):
    """A hostile user who writes any bytes under any key."""

    url: str

    def write(self, key: str, data: bytes) -> None: ...
    def clear(self) -> None: ...


class OwnsDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def write(self, key: str, data: bytes) -> None:
        (self.path / key).parent.mkdir(parents=True, exist_ok=True)
        (self.path / key).write_bytes(data)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class OwnsBucket:
    def __init__(self, s3: S3Server) -> None:
        self.url, self._server = s3.url("runs"), s3
        store = open_store(self.url)
        assert isinstance(store, S3Store)
        self._client = store._client

    def write(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"runs/{key}", Body=data)

    def clear(self) -> None:
        self._server.empty()


class Victim:
    """A user who looks at the records of a hostile user, and checks that nothing bad happens."""

    def __init__(self, here: HereInstead, folder: Path, state_home: Path, canary: subprocess.Popen[bytes]) -> None:
        self.here = here
        self.folder = folder
        self.state = state_home / "replicas"
        self.canary = canary
        self.secret = folder.parent / "secret"
        self.secret.mkdir()
        (self.secret / "output.log").write_text("the victim's own business\n")

    def uses(self, verb: str, owner: Owner, run: str = "bad", *more: object) -> Result:
        name, arguments = verb.split()[0], WITH_TRUST[verb]
        told = self.here.replicas(name, run, *arguments, "--rendezvous", owner.url, *more)
        self.is_unharmed(told)
        return told

    def lists(self, owner: Owner) -> list[dict[str, Any]]:
        self.is_unharmed(self.here.replicas("ls", "--rendezvous", owner.url))
        told = self.here.replicas("ls", "--rendezvous", owner.url, "--json")
        assert told.code == 0, told
        return list(told.json["runs"])

    def is_unharmed(self, told: Result) -> None:
        assert not (self.folder / "ran").exists(), "code of the hostile user has run"
        assert "own business" not in told.stdout + told.stderr, told
        assert self.canary.poll() is None, "a process was signaled"
        assert sorted(path.name for path in self.folder.iterdir() if path.name != "__pycache__") in (
            ["evil_backend.py", "job.py"],
            ["brought", "evil_backend.py", "job.py"],
        ), "something was written outside of --out"
        assert not [path for path in self.folder.rglob("*") if path.is_file() and b"own business" in path.read_bytes()]
        for text in (told.stdout, told.stderr):
            assert all(char.isprintable() or char == "\n" for char in text), repr(text)


EVIL_BACKEND = """
from pathlib import Path
Path("ran").touch()

class Executor:
    backend_name = "evil"
    supports_inter_replica_network = False

    def __init__(self, **options):
        Path("ran").touch()

    launch_replicas = poll = stream_logs = cancel = collect = __init__
"""


def each_case(owner: Owner, cases: Iterable[str]) -> Iterator[str]:
    """Yield cases. For each case the store contains only a good run. A failure names its case."""
    for case in cases:
        owner.clear()
        write_good_run(owner)
        print(f"the case {case!r}:")  # pytest shows this line if the case fails
        yield case


def write_run(owner: Owner, run_id: str = "bad", **changes: Any) -> None:
    """Write a hostile record of a run, and a hostile task with the same content, so that the two agree."""
    record = run_json(**changes)
    if "task_digest" not in changes:
        task = json.dumps(task_json(record)).encode()
        record["task_digest"] = hashlib.sha256(task).hexdigest()
        owner.write(f"{run_id}/task/task.json", task)
    owner.write(f"{run_id}/run.json", json.dumps(record).encode())


def write_good_run(owner: Owner) -> None:
    write_run(owner, "good")
    for rank in range(2):
        owner.write(f"good/replicas/{rank:04d}/0/outcome.json", json.dumps(outcome_json(rank)).encode())


def is_refused(told: Result, *words: str) -> bool:
    """Check that the command printed one clear error of few lines, without a traceback, and with the exit code of a
    user's mistake.
    """
    assert told.code in (1, 2), told
    lines = [line for line in told.stderr.splitlines() if not line.startswith("replicas: trusting ")]
    assert lines[0].startswith("Error: "), told
    assert len(told.stderr) < 2000, told
    for word in words:
        assert word in "\n".join(lines), told
    return True


def python_api(owner: Owner, run_id: str = "bad") -> None:
    """Call each method of a `Run`. Each must return, or raise an error of this project."""
    calls: list[Callable[[Any], Any]] = [
        repr,
        lambda run: view_of(run).record,
        lambda run: view_of(run).executor,
        lambda run: run.handles,
        lambda run: run.status().to_json(),
        lambda run: run._repr_html_(),
        lambda run: run.outcomes(),
        lambda run: run.wait(timeout=0),
        lambda run: run.logs(),
        lambda run: run.logs(0),
        lambda run: run.artifacts(0),
        lambda run: run.cancel(0),
        lambda run: run.cancel(),
    ]
    for call in calls:
        with contextlib.suppress(ReplicasError):
            call(attach(run_id, rendezvous=owner.url))
    for run in list_runs(owner.url):
        with contextlib.suppress(ReplicasError):
            run.status()
