"""Status of many replicas on a cloud: requests for one status and in a minute (Q1), for a launch (Q3), and more.

Q2 is the time of a log line from the replica to the screen, and Q4 is the time of `replicas status`. The services and
the bucket are those of the tests, on loopback, and they count requests. No replica runs: their jobs never start a
process and are shown as running, and the benchmark writes a replica's first records into the bucket.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from executors.run.run import view_of

from .far import running_bucket
from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers of the tests

from servers.s3.server import S3Server

COMMAND = [sys.executable, "-m", "executors.cli"]
ROOT = str(Path(__file__).parents[2])
PATIENCE_S = 60.0
LATENCY_S = 0.03
STORE, SERVICE = "store", "service"


@dataclass
class Cloud:
    """A service and a bucket that count their requests."""

    backend: str
    bucket: S3Server
    asked: Callable[[], int]
    """The number of requests that the service has had."""
    show_as_running: Callable[[], None]
    """Show all jobs of the service as running."""
    say: Callable[[int, str], None]
    """Let the job that was started as this one print a line."""
    delay: Callable[[float], None]
    """Delays every answer of the service."""

    def counted(self) -> dict[str, int]:
        return {STORE: len(self.bucket.requests()), SERVICE: self.asked()}

    def asked_meanwhile(self, act: Callable[[], object]) -> dict[str, int]:
        before = self.counted()
        act()
        return {who: n - before[who] for who, n in self.counted().items()}


def looking(options: Options) -> list[Comparison]:
    """Q1 to Q4."""
    sizes, seconds, n_lines = ((2,), 2.0, 2) if options.quick else ((1, 8, 64), 20.0, 10)
    found: list[Comparison] = []
    for service in (hub, modal):
        with state_of_its_own(), users_folder(), service() as cloud:
            for n in sizes:
                run, launched = launch(cloud, n)
                what = f"{cloud.backend}, N={n}"
                first, look = cloud.asked_meanwhile(run.status), cloud.asked_meanwhile(run.status)
                goals = {STORE: 2 + n, SERVICE: 1}
                found += [
                    _requests("Q1", f"{what}: requests of a process's first look", [first], goals),
                    _requests("Q1", f"{what}: requests of a look", [look], goals),
                    _requests("Q1", f"{what}: requests of `replicas wait` in a minute", [_minute(cloud, run, seconds)],
                              {STORE: 15 * (2 + n), SERVICE: 15}),
                    _requests("Q3", f"{what}: requests of a launch", [launched], {}),
                ]  # fmt: skip
            title = f"{what}: a printed line is shown by `replicas logs -f`, each of {n_lines}"
            shown = {"logs -f": _line(cloud, run, n, n_lines)}
            found.append(Comparison("Q2", title, "s", shown, goals={"logs -f": 3.0}))
            if cloud.backend == "hf":
                found.append(_status(cloud, run, what, options.repetitions(3)))
    return found


def _requests(name: str, title: str, samples: list[dict[str, int]], goals: Mapping[str, float]) -> Comparison:
    by_whom = {who: [float(each[who]) for each in samples] for who in (STORE, SERVICE)}
    return Comparison(name, title, "requests", by_whom, goals=goals)


# --- the measured actions


def launch(cloud: Cloud, n: int) -> tuple[Any, dict[str, int]]:
    """Launch n replicas whose records show that they have begun. Return the run as another process finds it, and its
    cost."""
    import executors
    from executors.store.records import to_bytes

    run: Any = None

    def act() -> None:
        nonlocal run
        run = executors.launch(cloud.backend, "job.py:main", n, run_id=f"many-{n}", detach=True)

    cost = cloud.asked_meanwhile(act)
    cloud.show_as_running()
    for rank in range(n):
        attempt = view_of(run).newest_attempt(rank)
        attempt.store.put_if_absent(attempt.key("started.json"), to_bytes({"nonce": f"n{rank}", "host": "far"}))
        attempt.store.put(attempt.key("heartbeat.json"), to_bytes({"at": time.time(), "step": 7, "loss": 0.5}))
    found = executors.attach(run.url)
    assert view_of(found).world_size == n
    return found, cost


def _minute(cloud: Cloud, run: Any, seconds: float) -> dict[str, int]:
    """Count requests while a command watches the run, after its first request to the service, and scale them to a
    minute.
    """
    begun = cloud.counted()[SERVICE]
    with command("wait", run.url) as process:
        until(lambda: cloud.counted()[SERVICE] > begun or process.poll() is not None)
        time.sleep(seconds / 4)
        began = time.monotonic()
        asked = cloud.asked_meanwhile(lambda: time.sleep(seconds))
        per_minute = {who: round(n * 60 / (time.monotonic() - began)) for who, n in asked.items()}
        if process.poll() is not None:
            raise RuntimeError(f"`replicas wait` ended with {process.returncode}:\n{process.communicate()[0]}")
    return per_minute


def _line(cloud: Cloud, run: Any, n: int, n_lines: int) -> list[float]:
    """Return the seconds from printing each line until it is shown."""
    shown: dict[str, float] = {}
    seconds = []
    with command("logs", run.url, "-f") as process:
        assert process.stdout is not None
        lines = process.stdout

        def read() -> None:
            for line in lines:
                shown.setdefault(line.rpartition("]")[2].strip(), time.monotonic())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for rank in range(n):
            cloud.say(rank, f"first of {rank}")
        until(lambda: len(shown) >= n)  # every stream is open
        for number in range(n_lines):
            text, began = f"line {number}", time.monotonic()
            cloud.say(number * 7 % n, text)
            until(lambda text=text: text in shown)  # type: ignore[misc]
            seconds.append(shown.get(text, began + PATIENCE_S) - began)
    reader.join()
    return seconds


def _status(cloud: Cloud, run: Any, what: str, repetitions: int) -> Comparison:
    """Q4: the store and the service need 30 ms for each answer."""
    the_command, again = "the command", "run.status() in a process that has looked before"
    samples: dict[str, list[float]] = {the_command: [], again: []}
    cloud.bucket.misbehave(latency_s=LATENCY_S)
    cloud.delay(LATENCY_S)
    for _ in range(repetitions):
        began = time.monotonic()
        with command("status", run.url) as process:
            process.communicate()
        looked = time.monotonic()
        run.status()
        samples[the_command].append(looked - began)
        samples[again].append(time.monotonic() - looked)
    title = f"{what}: `replicas status` at {LATENCY_S * 1000:g} ms a request"
    return Comparison("Q4", title, "s", samples, goals={the_command: 1.5})


@contextlib.contextmanager
def command(verb: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in this context, and kill it at the end."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*COMMAND, verb, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(ready: Callable[[], bool]) -> None:
    """Wait until a condition is true, but at most a minute. The figures show a condition that was too late."""
    deadline = time.monotonic() + PATIENCE_S
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.005)


# Where


@contextlib.contextmanager
def users_folder() -> Iterator[None]:
    with scratch_folder("looking-") as folder, contextlib.chdir(folder):
        Path("job.py").write_text("def main():\n    pass\n")
        yield


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def hub() -> Iterator[Cloud]:
    """Hugging Face Jobs that wait for their hardware forever, and are reported as running."""
    from servers.hub.server import hub_server

    with running_bucket() as bucket, hub_server() as server:
        server.hold("cpu-basic")

        def started() -> list[Any]:
            return server.jobs.newest_first()[::-1]

        def show_as_running() -> None:
            with server.jobs.changed:
                for job in started():
                    job.stage, job.started = "RUNNING", job.started or datetime.now(UTC)
                server.jobs.changed.notify_all()

        def say(number: int, line: str) -> None:
            newest = started()[-1].labels["replicas-run"]
            with server.jobs.changed:
                job = [job for job in started() if job.labels["replicas-run"] == newest][number]
                job.lines.append((datetime.now(UTC), line))
                server.jobs.changed.notify_all()

        def delay(seconds: float) -> None:
            server.latency_s = seconds

        with variables({**server.environment, "REPLICAS_RENDEZVOUS": bucket.url("runs")}):
            yield Cloud("hf", bucket, lambda: len(server.requests), show_as_running, say, delay)


@contextlib.contextmanager
def modal() -> Iterator[Cloud]:
    """Modal's sandboxes, scheduled at once, without a process."""
    os.environ.setdefault("MODAL_CONFIG_PATH", os.devnull)  # read when the SDK is imported
    from servers.modal import control_plane
    from servers.modal.sandboxes import LogEntry, Sandbox
    from servers.modal.server import modal_server

    def start(sandbox: Sandbox, _bin_folder: Path) -> None:
        sandbox.is_scheduled = True

    def not_here(*_: Any) -> None:
        raise NotImplementedError

    def say(number: int, line: str) -> None:
        newest = server.sandboxes[-1].tags["replicas-run"]
        box = [box for box in server.sandboxes if box.tags["replicas-run"] == newest][number]
        box.logs.append(LogEntry(time.time_ns(), 1, f"{line}\n"))

    usual, page = Sandbox.start, control_plane.PAGE
    # a list has one full page and one empty page, because the vendor's size of a page is not known
    control_plane.PAGE = 100
    Sandbox.start = start  # type: ignore[method-assign,assignment]
    try:
        with (
            running_bucket() as bucket,
            modal_server() as server,
            server.used_by_the_sdk(),
            variables({"REPLICAS_RENDEZVOUS": bucket.url("runs")}),
        ):
            yield Cloud("modal", bucket, lambda: len(server.calls_of()), lambda: None, say, not_here)
    finally:
        Sandbox.start, control_plane.PAGE = usual, page  # type: ignore[method-assign]
