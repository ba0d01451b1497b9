"""The logs and metrics of the local Hub's jobs, as the real client reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hub_of_tests import Client
from huggingface_hub import get_session
from servers.hub_server import HubServer

LINES = [str(number) for number in range(5)]
SAY_LINES = "[print(number) for number in range(5)]"


@pytest.fixture
def client(hub: HubServer) -> Client:
    return Client(hub)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe that a job waits at, until the test opens it."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def saying_lines_then_more_behind(gate: Path) -> str:
    return f"{SAY_LINES}; open({str(gate)!r}).read(); print('more')"


def test_the_log_of_a_finished_job_is_replayed(client: Client) -> None:
    job = client.ended(client.run("import sys; print('a'); print('b', file=sys.stderr); print(); print('é\\tü')"))
    assert client.logs(job) == client.logs(job, follow=True) == ["a", "b", "", "é\tü"]


@pytest.mark.parametrize("follow", [False, True])
def test_a_tail_is_the_end_of_the_log(client: Client, follow: bool) -> None:
    job = client.ended(client.run(SAY_LINES))
    assert client.logs(job, tail=2, follow=follow) == ["3", "4"]
    assert client.logs(job, tail=50, follow=follow) == LINES
    assert client.logs(job, tail=0, follow=follow) == []


def test_a_log_is_followed_until_the_job_ends(hub: HubServer, client: Client, gate: Path) -> None:
    job = client.run(saying_lines_then_more_behind(gate))
    lines = iter(client.api.fetch_job_logs(job_id=job.id, namespace=hub.namespace, follow=True))
    assert [next(lines) for _ in LINES] == LINES
    assert client.look(job).status.stage == "RUNNING"
    gate.write_text("")
    assert list(lines) == ["more"]
    assert client.look(job).status.stage == "COMPLETED"
    assert hub.count("logs") == 1


def test_a_log_can_be_followed_before_the_job_starts(hub: HubServer, client: Client) -> None:
    hub.hold("l4x1")
    job = client.run(SAY_LINES, flavor="l4x1")
    url = f"{hub.endpoint}/api/jobs/{hub.namespace}/{job.id}/logs"
    with get_session().stream("GET", url, headers={"authorization": f"Bearer {hub.token}"}) as response:
        hub.release("l4x1")
        text = response.read().decode()
    assert text.count("data: ") == 1 + len(LINES)
    assert text.startswith('data: {"data":"===== Job started at 20')


def test_the_log_of_a_quiet_job_stays_open(hub: HubServer, client: Client, gate: Path) -> None:
    job = client.run(saying_lines_then_more_behind(gate))
    hub.until(lambda: len(hub.job(job.id).lines) == len(LINES))
    assert client.logs(job, tail=2) == ["3", "4"]  # after the client's own five seconds of silence
    assert client.look(job).status.stage == "RUNNING"


def test_a_quiet_stream_is_kept_alive(hub: HubServer, client: Client, gate: Path) -> None:
    hub.keep_alive_s = 0.01
    job = client.run(saying_lines_then_more_behind(gate))
    url = f"{hub.endpoint}/api/jobs/{hub.namespace}/{job.id}/logs"
    with get_session().stream("GET", url, headers={"authorization": f"Bearer {hub.token}"}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        kept_alive = (line for line in response.iter_lines() if line == ": keep-alive")
        assert next(kept_alive) == next(kept_alive)


def test_the_stage_can_lag_behind_the_log(hub: HubServer, client: Client) -> None:
    hub.jobs.stage_lag_s = 600.0
    job = client.run(SAY_LINES)
    hub.until(lambda: hub.job(job.id).log_ended)
    assert client.logs(job) == LINES
    assert client.look(job).status.stage == "RUNNING"


def test_the_log_of_a_job_that_waits_may_end_at_once(hub: HubServer, client: Client) -> None:
    hub.scheduling_ends_logs = True
    hub.hold("l4x1")
    job = client.run(SAY_LINES, flavor="l4x1")
    assert client.logs(job) == []


def test_a_job_that_never_started_has_an_empty_log(hub: HubServer, client: Client) -> None:
    hub.hold("l4x1")
    job = client.run(SAY_LINES, flavor="l4x1")
    client.cancel(job)
    assert client.logs(job) == client.logs(job, follow=True) == []


def test_a_cancelled_job_keeps_its_log_and_its_last_words(hub: HubServer, client: Client) -> None:
    hub.jobs.term_grace_s = 60.0
    code = """
import signal, sys
def leave(*_): print("leaving"); sys.exit()
signal.signal(signal.SIGTERM, leave)
print("ready")
signal.pause()
"""
    job = client.run(code)
    hub.until(lambda: hub.job(job.id).lines)
    client.cancel(job)
    assert client.logs(job) == ["ready", "leaving"]


def test_a_running_job_has_metrics_and_a_finished_one_none(hub: HubServer, client: Client, gate: Path) -> None:
    job = client.run(saying_lines_then_more_behind(gate))
    hub.until(lambda: hub.job(job.id).lines)
    [sample] = client.api.fetch_job_metrics(job_id=job.id, namespace=hub.namespace)
    assert sample["memory_used_bytes"] > 1_000_000
    assert sample["memory_total_bytes"] == 16_000_000_000
    assert sample["cpu_millicores"] == 2000
    gate.write_text("")
    client.ended(job)
    assert list(client.api.fetch_job_metrics(job_id=job.id, namespace=hub.namespace)) == []
