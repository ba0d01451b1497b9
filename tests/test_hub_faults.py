"""What the real client makes of a Hub that refuses, forgets, breaks off or says nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from hub_of_tests import Client
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError
from servers.hub_faults import Misconduct, Request
from servers.hub_server import HubServer

BROKEN: list[tuple[Misconduct, type[Exception]]] = [
    ("closed", httpx2.RemoteProtocolError),
    ("reset", httpx2.ReadError),
    ("cut", httpx2.RemoteProtocolError),
]


@pytest.fixture
def client(hub: HubServer) -> Client:
    return Client(hub)


def status_of(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


NAMES = ["inspect_job", "cancel_job", "rerun_job", "fetch_job_logs", "fetch_job_metrics", "update_job_labels"]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_does_not_exist_is_not_found(hub: HubServer, client: Client, name: str) -> None:
    labels = {"labels": {"a": "b"}} if name == "update_job_labels" else {}

    def ask() -> None:
        list(getattr(client.api, name)(job_id="0" * 24, namespace=hub.namespace, **labels) or ())

    with pytest.raises(JobNotFoundError) as error:
        ask()
    assert error.value.job_id == "0" * 24
    assert error.value.server_message == "Job not found"


@pytest.mark.parametrize("token", ["hf_wrong", False])
def test_a_token_that_is_wrong_or_missing_is_refused(hub: HubServer, token: str | bool) -> None:
    api = HfApi(endpoint=hub.endpoint, token=token)
    with pytest.raises(HfHubHTTPError) as error:
        api.run_job(image="python:3.12", command=["true"], namespace=hub.namespace)
    assert status_of(error) == 401
    assert not hub.jobs.newest_first()


def test_a_wrong_token_belongs_to_nobody(hub: HubServer) -> None:
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").whoami()


def test_another_namespace_is_forbidden(client: Client) -> None:
    with pytest.raises(HfHubHTTPError) as error:
        client.run(namespace="bob")
    assert status_of(error) == 403


def test_a_deleted_job_is_shown_as_deleted_and_a_forgotten_one_not_at_all(hub: HubServer, client: Client) -> None:
    deleted, forgotten = client.run("import signal; signal.pause()"), client.run("import signal; signal.pause()")
    hub.delete(deleted.id)
    hub.forget(forgotten.id)
    assert client.look(deleted).status.stage == "DELETED"
    with pytest.raises(JobNotFoundError):
        client.look(forgotten)
    assert client.listed() == [deleted.id]


@pytest.mark.parametrize("status", [401, 403, 409, 429, 500, 503])
def test_looking_at_a_job_is_not_tried_again(hub: HubServer, client: Client, status: int) -> None:
    job = client.run()
    hub.fail("inspect", status)
    with pytest.raises(HfHubHTTPError) as error:
        client.look(job)
    assert status_of(error) == status
    assert hub.count("inspect") == 1
    assert client.look(job).id == job.id


@pytest.mark.parametrize(("answer", "expected"), BROKEN)
def test_a_broken_connection_is_not_tried_again(
    hub: HubServer, client: Client, answer: Misconduct, expected: type[Exception]
) -> None:
    job = client.run()
    hub.fail("inspect", answer)
    with pytest.raises(expected):
        client.look(job)
    assert client.look(job).id == job.id
    assert hub.count("inspect") == 2


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("answer", "expected"), [*BROKEN[:2], (500, HfHubHTTPError)])
def test_a_job_may_have_been_created_without_an_answer(
    hub: HubServer, client: Client, answer: Misconduct, expected: type[Exception], applied: bool
) -> None:
    hub.fail("create", answer, after_applying=applied)
    with pytest.raises(expected):
        client.run()
    assert hub.count("create") == 1
    assert len(client.listed()) == applied


def test_an_answer_can_be_cut_after_the_job_was_created(hub: HubServer, client: Client) -> None:
    hub.fail("create", "cut")
    with pytest.raises(httpx2.RemoteProtocolError):
        client.run()
    assert len(client.listed()) == 1


def test_a_cancel_may_be_lost_or_only_its_answer(hub: HubServer, client: Client) -> None:
    job = client.run("import signal; signal.pause()")
    for applied, stages in [(False, ("SCHEDULING", "RUNNING")), (True, ("CANCELED",))]:
        hub.fail("cancel", "reset", after_applying=applied)
        with pytest.raises(httpx2.ReadError):
            client.cancel(job)
        assert client.look(job).status.stage in stages


@pytest.mark.parametrize("answer", [429, "reset"])
def test_a_listing_is_tried_again(hub: HubServer, client: Client, answer: Misconduct) -> None:
    job = client.run()
    hub.fail("list", answer)
    assert client.listed() == [job.id]
    assert hub.count("list") == 2


def test_a_listing_that_is_refused_is_not_tried_again(hub: HubServer, client: Client) -> None:
    hub.fail("list", 401)
    with pytest.raises(HfHubHTTPError):
        client.listed()
    assert hub.count("list") == 1


def test_a_fault_hits_the_requests_it_is_meant_for_as_often_as_said(hub: HubServer, client: Client) -> None:
    def is_second(request: Request) -> bool:
        return bool(request.json["labels"].get("rank") == "2")

    hub.fail("create", 500, times=2, when=is_second)
    client.run(labels={"rank": "1"})
    for _ in range(2):
        with pytest.raises(HfHubHTTPError):
            client.run(labels={"rank": "2"})
    client.run(labels={"rank": "2"})
    assert len(client.listed()) == 2


def test_a_fault_without_end_ends_when_it_is_forgiven(hub: HubServer, client: Client) -> None:
    job = client.run()
    hub.fail("inspect", 503, times=None)
    for _ in range(3):
        with pytest.raises(HfHubHTTPError):
            client.look(job)
    hub.forgive()
    assert client.look(job).id == job.id


def test_a_silent_server_is_waited_for_without_end(hub: HubServer, client: Client) -> None:
    job = client.run()
    hub.fail("inspect", "silent")
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(client.look, job)
        hub.until(lambda: hub.count("inspect") == 1)
        assert not looking.done()
        hub.forgive()
        assert isinstance(looking.exception(60), httpx2.RemoteProtocolError)


@pytest.mark.parametrize(("answer", "expected"), BROKEN)
def test_a_log_that_breaks_off_is_an_error(
    hub: HubServer, client: Client, answer: Misconduct, expected: type[Exception]
) -> None:
    job = client.ended(client.run("print(1); print(2); print(3)"))
    hub.fail("logs", answer, after_lines=2)
    lines = iter(client.api.fetch_job_logs(job_id=job.id, namespace=hub.namespace))
    assert [next(lines), next(lines)] == ["1", "2"]
    with pytest.raises(expected):
        next(lines)


@pytest.mark.parametrize(("answer", "follow"), [("ended", False), ("ended", True), ("cut", True), ("reset", True)])
def test_a_short_log_of_a_finished_job_passes_for_whole(
    hub: HubServer, client: Client, answer: Misconduct, follow: bool
) -> None:
    job = client.ended(client.run("print(1); print(2); print(3)"))
    hub.fail("logs", answer, after_lines=2)
    assert client.logs(job, follow=follow) == ["1", "2"]
    assert client.logs(job, follow=follow) == ["1", "2", "3"]


@pytest.mark.parametrize("answer", ["cut", "ended"])
def test_a_followed_log_of_a_running_job_goes_on_where_it_broke_off(
    hub: HubServer, client: Client, tmp_path: Path, answer: Misconduct
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = client.run(f"print(1); print(2); print(3); open({str(gate)!r}).read(); print(4)")
    hub.until(lambda: len(hub.job(job.id).lines) == 3)
    hub.fail("logs", answer, after_lines=2)
    lines = iter(client.api.fetch_job_logs(job_id=job.id, namespace=hub.namespace, follow=True))
    assert [next(lines) for _ in range(3)] == ["1", "2", "3"]
    gate.write_text("")
    assert list(lines) == ["4"]
    assert hub.count("logs") == 2


def test_following_gives_up_when_a_log_breaks_off_and_the_stage_cannot_be_asked_for(
    hub: HubServer, client: Client
) -> None:
    job = client.run("print(1); import signal; signal.pause()")
    hub.fail("logs", "cut", after_lines=1)
    hub.fail("inspect", 503)
    lines = iter(client.api.fetch_job_logs(job_id=job.id, namespace=hub.namespace, follow=True))
    assert next(lines) == "1"
    with pytest.raises(HfHubHTTPError) as error:
        next(lines)
    assert status_of(error) == 503


def test_every_route_can_fail(hub: HubServer, client: Client) -> None:
    job = client.run()
    one: dict[str, str] = {"job_id": job.id, "namespace": hub.namespace}
    asks: dict[str, Callable[[], object]] = {
        "create": client.run,
        "inspect": lambda: client.look(job),
        "cancel": lambda: client.cancel(job),
        "duplicate": lambda: client.api.rerun_job(**one),
        "labels": lambda: client.api.update_job_labels(**one, labels={}),
        "logs": lambda: client.logs(job),
        "hardware": client.api.list_jobs_hardware,
        "whoami": client.api.whoami,
    }
    for route, ask in asks.items():
        hub.fail(route, 501)
        with pytest.raises(HfHubHTTPError) as error:
            ask()
        assert status_of(error) == 501
