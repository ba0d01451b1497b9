"""A replica that dies in its container is restarted in the same container, without any request to the service."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from servers.s3.server import S3Server

from executors import Run, launch
from executors.attempt import Attempt, Claim
from executors.run.run import view_of
from executors.testing import eventually

TASK = """
import threading
from executors import current_replica

def main(waits_until):
    replica = current_replica()
    print("attempt", replica.attempt, flush=True)
    replica.store.put(replica.key("printed"), b"")
    if replica.attempt < waits_until:
        threading.Event().wait()
    return replica.attempt
"""


@dataclass(frozen=True)
class Service:
    """The stand-in of a service."""

    backend: str
    count: Callable[[], int]
    """Returns the number of requests so far."""
    send: Callable[[Run, int], None]
    """Sends a signal to the first process of a job."""


@pytest.fixture(params=["modal", "hf"])
def service(request: pytest.FixtureRequest, s3: S3Server) -> Service:
    """Modal or Hugging Face, and a folder with `job.py` to launch from."""
    if request.param == "modal":
        modal: ModalServer = request.getfixturevalue("modal_runs")
        found = Service(
            "modal",
            lambda: len(modal.calls_of()),
            lambda run, number: modal.kill(view_of(run).reader.handles.of(0).metadata["job"]["sandbox_id"], number),
        )
    else:
        hub: HubServer = request.getfixturevalue("hf")

        def send(run: Run, number: int) -> None:
            process = hub.job(view_of(run).reader.handles.of(0).metadata["job"]["id"]).process
            assert process is not None
            os.kill(process.pid, number)

        found = Service("hf", lambda: len(hub.requests), send)
    Path("job.py").write_text(TASK)
    return found


def waiting(attempt: Attempt) -> int:
    """Wait until an attempt waits, and return its pid."""
    eventually(lambda: attempt.has("printed"), f"attempt {attempt.number} waits")
    claim = attempt.find("started.json", Claim.parse)
    assert claim is not None
    return claim.pid or 0


def start(backend: str, *, waits_until: int, restarts: str | None = "1,backoff=0s") -> tuple[Run, Attempt]:
    # the notice is as long as the grace of a replica, so the replica gets SIGTERM at once
    env = {"REPLICA_NOTICE_S": "5"}
    args = {"waits_until": waits_until}
    run = launch(backend, "job.py:main", 1, args=args, run_id="otter", restarts=restarts, env=env)
    return run, Attempt(view_of(run).store, "otter", 0)


def test_a_replica_that_is_killed_comes_back_in_its_container_and_the_service_is_asked_nothing(
    service: Service,
) -> None:
    run, first = start(service.backend, waits_until=1)
    pid = waiting(first)
    n_requests = service.count()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: first.at(1).has("outcome.json"), "the second attempt has an outcome")
    assert service.count() == n_requests
    assert run.results() == [1]
    ended = first.outcome()
    assert ended is not None
    assert (ended.reason, ended.signal) == ("signal", "SIGKILL")
    assert view_of(run).executor.poll(view_of(run).reader.handles.of(0)) == "succeeded"
    assert [row["result"] for row in view_of(run).executor.collect([view_of(run).reader.handles.of(0)])] == [1]
    assert [line for line in run.logs(rank=0).splitlines() if line.startswith("attempt")] == ["attempt 0", "attempt 1"]


def test_a_replica_that_came_back_in_its_container_can_be_cancelled(service: Service) -> None:
    run, first = start(service.backend, waits_until=2)
    os.kill(waiting(first), signal.SIGKILL)
    waiting(first.at(1))
    assert view_of(run).executor.poll(view_of(run).reader.handles.of(0)) == "running"
    run.cancel()
    assert run.wait(60)
    outcome = first.at(1).outcome()
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
    assert view_of(run).executor.poll(view_of(run).reader.handles.of(0)) == "cancelled"


def test_a_container_that_gets_a_notice_leaves_an_outcome_with_the_notice(service: Service) -> None:
    number = signal.SIGINT if service.backend == "modal" else signal.SIGTERM
    run, first = start(service.backend, waits_until=1, restarts=None)
    waiting(first)
    service.send(run, number)
    assert run.wait(60)
    (outcome,) = run.outcomes()
    assert (outcome.status, outcome.reason, outcome.notice) == ("failed", "signal", number.name)
