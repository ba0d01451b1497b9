"""Tests the local Hub through the real client: jobs, logs and faults, as far as an adapter relies on them."""

from __future__ import annotations

import os

import httpx2
import pytest
from huggingface_hub import HfApi, JobHardware, get_session
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, JobNotFoundError
from support.hub import Client
from support.processes import is_alive

from servers.hub.faults import Misconduct, Request
from servers.hub.server import HubServer, hub_server

GPU = "h200"
BROKEN: list[tuple[Misconduct, type[Exception]]] = [
    ("closed", httpx2.RemoteProtocolError),
    ("reset", httpx2.ReadError),
    ("cut", httpx2.RemoteProtocolError),
]
WAIT = "import signal; signal.pause()"


@pytest.fixture
def client(hub: HubServer) -> Client:
    return Client(hub)


def test_a_job_has_the_variables_of_the_service_and_its_own(client: Client) -> None:
    names = ["JOB_ID", "ACCELERATOR", "CPU_CORES", "MEMORY", "MINE", "HIDDEN", "HF_HOME", "VIRTUAL_ENV"]
    code = f"import os; [print(name, os.environ.get(name)) for name in {names}]"
    job = client.run(code, flavor=GPU, env={"MINE": "a b"}, secrets={"HIDDEN": "c d"})
    client.ended(job)
    expected = [job.id, GPU, "23", "256Gi", "a b", "c d", None, None]
    assert client.logs(job) == [f"{name} {value}" for name, value in zip(names, expected, strict=True)]


def test_a_secret_that_is_sent_outside_of_the_secrets_is_found(hub: HubServer, client: Client) -> None:
    secret = 'a "quoted"\nsecret & more'
    job = client.run(secrets={"KEY": secret})
    assert list(client.look(job).secrets or ()) == ["KEY"]
    assert hub.places_of(secret) == []
    assert hub.token not in repr(hub.requests)
    client.run(env={"KEY": f"before {secret} behind"})
    client.run(labels={"key": "s3cr3t"})
    client.listed(labels={"key": secret})
    path = f"/api/jobs/{hub.namespace}"
    assert hub.places_of(secret) == [f"POST {path}", f"GET {path}"]
    assert hub.places_of("s3cr3t") == [f"POST {path}"]


def test_a_job_may_be_cancelled_twice_and_an_ended_job_does_not_change(hub: HubServer, client: Client) -> None:
    job = client.run(
        "import signal, sys\ndef leave(*_): print('leaving'); sys.exit()\n"
        "signal.signal(15, leave)\nprint('ready')\nsignal.pause()"
    )
    hub.jobs.term_grace_s = 60.0
    hub.until(lambda: hub.job(job.id).lines)
    for _ in range(2):
        client.cancel(job)
        assert client.look(job).status.stage == "CANCELED"
    assert client.logs(job) == ["ready", "leaving"]
    done = client.ended(client.run())
    client.cancel(done)
    assert client.look(done).status.stage == "COMPLETED"


def test_a_job_that_breaks_the_rules_is_refused(client: Client) -> None:
    for labels in ({"a.b": "c"}, {"a": "b/c"}, {"a": "x" * 101}, {"": "x"}, {"a": "b c"}):
        with pytest.raises(BadRequestError, match="label"):
            client.run(labels=labels)
    with pytest.raises(BadRequestError, match="h100"):
        client.run(flavor="h100")
    with pytest.raises(BadRequestError, match="no ssh"):
        client.run(ssh=True)
    assert client.listed() == []


def test_the_hardware_flavors_are_those_that_the_client_knows(client: Client) -> None:
    hardware = {each.name: each for each in client.api.list_jobs_hardware()}
    assert set(hardware) == {flavor.value for flavor in JobHardware}
    assert hardware["a10g-largex4"].accelerator is not None
    assert hardware["a10g-largex4"].accelerator.quantity == "4"
    assert hardware["cpu-basic"].unit_cost_micro_usd == 167


def test_a_log_stays_open_from_before_the_job_starts_until_it_ends(hub: HubServer, client: Client) -> None:
    hub.hold(GPU)
    job = client.run("print(1); print(2)", flavor=GPU)
    url = f"{hub.endpoint}/api/jobs/{hub.namespace}/{job.id}/logs"
    with get_session().stream("GET", url, headers={"authorization": f"Bearer {hub.token}"}) as response:
        hub.release(GPU)
        text = response.read().decode()
    assert text.startswith('data: {"data":"===== Job started at 20')
    assert text.count("data: ") == 1 + 2


# Faults


def status_of(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


def test_a_missing_job_is_not_found_and_a_deleted_job_is_shown_as_deleted(hub: HubServer, client: Client) -> None:
    deleted, forgotten = client.run(WAIT), client.run(WAIT)
    hub.delete(deleted.id)
    hub.forget(forgotten.id)
    assert client.look(deleted).status.stage == "DELETED"
    assert client.listed() == [deleted.id]
    for name in ("inspect_job", "cancel_job", "fetch_job_logs"):
        with pytest.raises(JobNotFoundError):
            list(getattr(client.api, name)(job_id=forgotten.id, namespace=hub.namespace) or ())


def test_a_wrong_token_a_missing_token_and_another_namespace_are_refused(hub: HubServer, client: Client) -> None:
    tokens: list[str | bool] = ["hf_wrong", False]
    for token in tokens:
        with pytest.raises(HfHubHTTPError) as error:
            list(HfApi(endpoint=hub.endpoint, token=token).list_jobs(namespace=hub.namespace))
        assert status_of(error) == 401
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").whoami()
    with pytest.raises(HfHubHTTPError) as error:
        client.run(namespace="bob")
    assert status_of(error) == 403


def test_the_client_does_not_repeat_a_failed_request_for_a_job(hub: HubServer, client: Client) -> None:
    job = client.run()
    for status in (401, 403, 409, 429, 500, 503):
        hub.fail("inspect", status)
        with pytest.raises(HfHubHTTPError) as error:
            client.look(job)
        assert status_of(error) == status
    for answer, expected in BROKEN:
        hub.fail("inspect", answer)
        with pytest.raises(expected):
            client.look(job)
    assert hub.count("inspect") == 9


def test_a_job_may_be_created_although_its_answer_is_lost(hub: HubServer, client: Client) -> None:
    answers: list[tuple[Misconduct, type[Exception]]] = [*BROKEN[:2], (500, HfHubHTTPError)]
    expected = 0
    for applied in (False, True):
        for answer, error in answers:
            hub.fail("create", answer, after_applying=applied)
            with pytest.raises(error):
                client.run()
            expected += applied
            assert len(client.listed()) == expected, (answer, applied)
    hub.fail("create", "cut")  # cuts the answer, so the job exists
    with pytest.raises(httpx2.RemoteProtocolError):
        client.run()
    assert len(client.listed()) == expected + 1
    assert hub.count("create") == 7


def test_a_fault_hits_only_the_planned_requests_and_their_planned_number(hub: HubServer, client: Client) -> None:
    def is_second(request: Request) -> bool:
        return bool(request.json["labels"].get("rank") == "2")

    hub.fail("create", 500, times=2, when=is_second)
    client.run(labels={"rank": "1"})
    for _ in range(2):
        with pytest.raises(HfHubHTTPError):
            client.run(labels={"rank": "2"})
    client.run(labels={"rank": "2"})
    hub.fail("create", 503, times=None)
    for _ in range(3):
        with pytest.raises(HfHubHTTPError):
            client.run()
    hub.forgive()
    client.run()
    assert len(client.listed()) == 3


def test_a_log_that_breaks_off_is_an_error(hub: HubServer, client: Client) -> None:
    job = client.ended(client.run("print(1); print(2); print(3)"))
    for answer, expected in BROKEN:
        hub.fail("logs", answer, after_lines=2)
        lines = iter(client.api.fetch_job_logs(job_id=job.id, namespace=hub.namespace))
        assert [next(lines), next(lines)] == ["1", "2"]
        with pytest.raises(expected):
            next(lines)


# Its own end


def test_no_process_of_a_job_outlives_the_server() -> None:
    with hub_server() as hub:
        code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
        job = hub.job(Client(hub).run(f"{code}; {WAIT}").id)
        hub.until(lambda: job.lines)
        assert job.process is not None
        pids = [job.process.pid, int(job.lines[0][1])]
        assert all(is_alive(pid) for pid in pids)
        directory = os.readlink(f"/proc/{pids[0]}/cwd")
    assert not any(is_alive(pid) for pid in pids)
    assert not os.path.exists(directory)


def test_a_request_without_a_route_fails_the_test_at_the_end_of_the_server() -> None:
    said = "no such route: GET /api/scheduled-jobs/ada"
    with pytest.raises(AssertionError, match=said), hub_server() as hub, pytest.raises(HfHubHTTPError):
        list(Client(hub).api.list_scheduled_jobs(namespace=hub.namespace))
