"""The local Hub as the real client sees it: jobs that run, wait, end, and are found again."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_of_tests import Client
from huggingface_hub import JobHardware
from huggingface_hub.errors import BadRequestError, HfHubHTTPError
from processes_of_tests import is_alive
from servers.hub_server import HubServer, hub_server

from executors.testing.processes import environment

GPU = "h200"


@pytest.fixture
def client(hub: HubServer) -> Client:
    return Client(hub)


def test_a_job_runs_and_completes(hub: HubServer, client: Client) -> None:
    job = client.run("print('hello')", labels={"team": "ml"}, name="first")
    assert job.status.stage in ("SCHEDULING", "RUNNING")
    assert job.url == f"{hub.endpoint}/jobs/{hub.namespace}/{job.id}"
    done = client.ended(job)
    assert (done.status.stage, done.status.message) == ("COMPLETED", None)
    assert done.labels == {"team": "ml", "name": "first"}
    assert (done.docker_image, done.flavor) == ("python:3.12", "cpu-basic")
    assert done.created_at is not None
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    assert client.logs(job) == ["hello"]
    assert hub.count("create") == 1


def test_a_job_finds_what_the_vendor_gives_it_and_its_own_environment(client: Client) -> None:
    names = ["JOB_ID", "ACCELERATOR", "CPU_CORES", "MEMORY", "MINE", "HIDDEN", "HF_HOME", "VIRTUAL_ENV"]
    code = f"import os; [print(name, os.environ.get(name)) for name in {names}]"
    job = client.run(code, flavor=GPU, env={"MINE": "a b"}, secrets={"HIDDEN": "c d"})
    client.ended(job)
    expected = [job.id, GPU, "23", "256Gi", "a b", "c d", None, None]
    assert client.logs(job) == [f"{name} {value}" for name, value in zip(names, expected, strict=True)]


def test_a_secret_is_shown_by_its_name_alone(hub: HubServer, client: Client) -> None:
    job = client.run(secrets={"KEY": "s3cr3t"})
    assert list(client.look(job).secrets or ()) == ["KEY"]
    assert "s3cr3t" not in repr([client.look(job), *client.api.list_jobs(namespace=hub.namespace)])
    assert hub.places_of("s3cr3t") == []


@pytest.mark.parametrize("leak", [{"env": {"KEY": "s3cr3t"}}, {"labels": {"key": "s3cr3t"}}, {"name": "s3cr3t"}])
def test_a_secret_in_the_wrong_place_is_found(hub: HubServer, client: Client, leak: dict[str, str]) -> None:
    client.run(secrets={"KEY": "s3cr3t"}, **leak)
    assert hub.places_of("s3cr3t") == [f"POST /api/jobs/{hub.namespace}"]


def test_a_secret_is_found_however_it_is_escaped(hub: HubServer, client: Client) -> None:
    secret = 'a "quoted"\nsecret & more'
    client.run(secrets={"KEY": secret})
    assert hub.places_of(secret) == []
    client.run(env={"KEY": f"before {secret} behind"})
    assert hub.places_of(secret) == [f"POST /api/jobs/{hub.namespace}"]
    client.listed(labels={"key": secret})
    assert hub.places_of(secret)[1:] == [f"GET /api/jobs/{hub.namespace}"]


def test_a_client_in_a_process_of_its_own_finds_the_server_by_its_environment(hub: HubServer) -> None:
    code = "import huggingface_hub; print(huggingface_hub.run_job(image='a', command=['true']).id)"
    told = subprocess.run([sys.executable, "-c", code], env=environment(**hub.environment), stdout=subprocess.PIPE)
    assert [told.stdout.decode().strip()] == [job.id for job in hub.jobs.newest_first()]


def test_the_token_is_in_no_recorded_request(hub: HubServer, client: Client) -> None:
    client.ended(client.run())
    assert hub.token not in repr(hub.requests)


def test_a_job_that_fails_says_its_exit_code(hub: HubServer, client: Client) -> None:
    job = client.ended(client.run("print('last words'); raise SystemExit(3)"))
    assert job.status.stage == "ERROR"
    assert job.status.message == "Job failed with exit code: 3. Reason: Error"
    assert client.logs(job) == ["last words"]


def test_a_command_that_does_not_exist_is_an_error_of_the_job(client: Client) -> None:
    job = client.ended(client.run_command(["no-such-command"]))
    assert job.status.message == "Job failed with exit code: 128. Reason: StartError"


def test_a_job_is_attempted_as_often_as_asked(tmp_path: Path, client: Client) -> None:
    code = f"import os; path = {str(tmp_path / 'marks')!r}; open(path, 'a').write('x'); print(os.path.getsize(path))"
    job = client.run(f"{code}; raise SystemExit(os.path.getsize(path) < 2)", attempts=5)
    assert client.ended(job).status.stage == "COMPLETED"
    assert client.logs(job) == ["1", "2"]
    assert client.look(job).retry == 4


def test_a_job_that_takes_too_long_is_stopped(hub: HubServer, client: Client) -> None:
    hub.jobs.term_grace_s = 0.1
    job = client.run("import signal; signal.signal(15, signal.SIG_IGN); signal.pause()", timeout=1, attempts=3)
    assert client.ended(job).status.message == "Job timeout"
    process = hub.job(job.id).process
    assert process is not None
    assert not is_alive(process.pid)


def test_a_job_may_be_cancelled_twice(hub: HubServer, client: Client) -> None:
    job = client.run("import subprocess, sys; subprocess.run(['sleep', '600'])")
    hub.until(lambda: hub.job(job.id).process)
    client.cancel(job)
    assert client.look(job).status.stage == "CANCELED"
    client.cancel(job)
    assert client.look(job).status.stage == "CANCELED"
    hub.until(lambda: hub.job(job.id).log_ended)
    process = hub.job(job.id).process
    assert process is not None
    assert not is_alive(process.pid)


def test_a_job_that_is_over_is_not_changed_by_a_cancel(client: Client) -> None:
    job = client.ended(client.run())
    client.cancel(job)
    assert client.look(job).status.stage == "COMPLETED"


def test_a_job_waits_for_hardware_that_is_not_to_be_had(hub: HubServer, client: Client) -> None:
    hub.hold(GPU)
    first, second = client.run(flavor=GPU), client.run(flavor=GPU)
    assert client.ended(client.run()).status.stage == "COMPLETED"  # other hardware is there
    assert {client.look(job).status.stage for job in (first, second)} == {"SCHEDULING"}
    client.cancel(first)
    hub.release(GPU)
    assert client.ended(second).status.stage == "COMPLETED"
    assert client.look(first).status.stage == "CANCELED"
    assert client.look(first).started_at is None


def test_jobs_beyond_the_capacity_run_when_others_end(hub: HubServer, client: Client) -> None:
    hub.hold(GPU, running=1)
    jobs = [client.run(flavor=GPU) for _ in range(3)]
    done = [client.ended(job) for job in jobs]
    for earlier, later in itertools.pairwise(done):
        assert earlier.finished_at is not None
        assert later.started_at is not None
        assert earlier.finished_at <= later.started_at


def test_jobs_are_listed_by_label_and_stage_page_by_page(hub: HubServer, client: Client) -> None:
    hub.page_size = 2
    hub.hold(GPU)
    wanted = [client.run(flavor=GPU, labels={"run": "a", "rank": str(rank)}).id for rank in range(5)]
    other = client.run(flavor=GPU, labels={"run": "b"})
    client.cancel(other)
    assert client.listed() == [other.id, *reversed(wanted)]
    before = hub.count("list")
    assert client.listed(labels={"run": "a"}) == wanted[::-1]
    assert hub.count("list") - before == 3
    assert client.listed(labels={"run": "a", "rank": "3"}) == [wanted[3]]
    assert client.listed(status="canceled") == [other.id]
    assert client.listed(status=["CANCELED", "SCHEDULING"], labels={"run": "b"}) == [other.id]
    assert client.listed(labels={"run": "c"}) == []


def test_labels_are_replaced_as_a_whole(hub: HubServer, client: Client) -> None:
    job = client.run(labels={"run": "a"}, name="mine")
    changed = client.api.update_job_labels(job_id=job.id, labels={"run": "b"}, namespace=hub.namespace)
    assert changed.labels == {"run": "b"}
    assert client.listed(labels={"run": "a"}) == []


@pytest.mark.parametrize("labels", [{"a.b": "c"}, {"a": "b/c"}, {"a": "x" * 101}, {"": "x"}, {"a": "b c"}])
def test_a_label_that_breaks_the_rules_is_refused(hub: HubServer, client: Client, labels: dict[str, str]) -> None:
    with pytest.raises(BadRequestError, match="label"):
        client.run(labels=labels)
    assert client.listed() == []


def test_a_flavor_that_does_not_exist_is_refused(client: Client) -> None:
    with pytest.raises(BadRequestError, match="h100"):
        client.run(flavor="h100")


def test_a_job_is_run_again_with_its_secrets(hub: HubServer, client: Client) -> None:
    job = client.run("import os; print(os.environ['KEY'])", secrets={"KEY": "s3cr3t"}, labels={"run": "a"})
    again = client.api.rerun_job(job_id=job.id, namespace=hub.namespace)
    assert again.initiator is not None
    assert (again.initiator.type, again.initiator.id) == ("duplicated-job", job.id)
    assert again.labels == client.look(job).labels
    client.ended(again)
    assert client.logs(again) == ["s3cr3t"]


def test_waiting_gives_up_in_time_and_keeps_the_order(hub: HubServer, client: Client) -> None:
    hub.hold(GPU)
    held, done = client.run(flavor=GPU), client.run()
    with pytest.raises(TimeoutError, match="SCHEDULING"):
        client.api.wait_for_job(job_id=held.id, namespace=hub.namespace, timeout=0)
    hub.release(GPU)
    both = client.api.wait_for_job(job_id=[held.id, done.id], namespace=hub.namespace, timeout=60, poll_interval=0.02)
    assert [job.id for job in both] == [held.id, done.id]


def test_a_killed_job_says_why(hub: HubServer, client: Client) -> None:
    job = client.run("import signal; signal.pause()")
    hub.until(lambda: hub.job(job.id).process)
    hub.kill(job.id, "OOMKilled")
    assert client.ended(job).status.message == "Job failed with exit code: 137. Reason: OOMKilled"


def test_the_hardware_is_what_the_client_knows(client: Client) -> None:
    hardware = {each.name: each for each in client.api.list_jobs_hardware()}
    assert set(hardware) == {flavor.value for flavor in JobHardware}
    assert hardware["a10g-largex4"].accelerator is not None
    assert hardware["a10g-largex4"].accelerator.quantity == "4"
    assert hardware["cpu-basic"].unit_cost_micro_usd == 167


def test_the_namespace_is_asked_for_when_it_is_not_given(hub: HubServer, client: Client) -> None:
    assert client.run(namespace=None).owner.name == hub.namespace
    assert hub.count("whoami") == 1


def test_nothing_of_a_job_outlives_the_server() -> None:
    with hub_server() as hub:
        code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
        job = hub.job(Client(hub).run(f"{code}; import signal; signal.pause()").id)
        hub.until(lambda: job.lines)
        assert job.process is not None
        pids = [job.process.pid, int(job.lines[0][1])]
        assert all(is_alive(pid) for pid in pids)
        directory = os.readlink(f"/proc/{pids[0]}/cwd")
    assert not any(is_alive(pid) for pid in pids)
    assert not os.path.exists(directory)


def ask_for_an_unknown_route(client: Client) -> None:
    list(client.api.list_scheduled_jobs(namespace=client.namespace))


def ask_for_ssh(client: Client) -> None:
    client.run(ssh=True)


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [(ask_for_an_unknown_route, "no such route: GET /api/scheduled-jobs/ada"), (ask_for_ssh, "a job asked for ssh")],
)
def test_what_the_server_does_not_have_is_said_at_its_end(ask: Callable[[Client], None], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint), hub_server() as hub, pytest.raises(HfHubHTTPError):
        ask(Client(hub))
