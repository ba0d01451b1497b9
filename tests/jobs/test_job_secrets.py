"""Secret values reach a replica through a secret of its job, and appear nowhere else."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import traceback
from pathlib import Path

import pytest
from servers.hub.faults import Misconduct
from servers.hub.server import HubServer
from servers.s3.server import CREDENTIALS
from support.cli import Folder

from executors import HFJobsExecutor, attach, launch
from executors.backends.jobs.service import JobKey, JobSpec
from executors.errors import ReplicasError
from executors.launcher import plan_launch
from executors.run.run import view_of
from executors.store.run_key import RUN_KEY, key_file
from executors.task.launch_request import LaunchRequest

MINE = {"BY_OPTION": "s3cret/of+the=executor", "BY_LAUNCH": 's3cret of the launch, "quoted"'}


@pytest.fixture
def secrets(hf: HubServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Every secret by its name, as the launcher's environment has it."""
    for name, value in MINE.items():
        monkeypatch.setenv(name, value)
    aws = {name: value for name, value in CREDENTIALS.items() if name != "AWS_ACCESS_KEY_ID"}
    return {**MINE, **aws, "HF_TOKEN": hf.token}


def assert_nothing_of(secrets: dict[str, str], text: str, where: str) -> None:
    for name, value in secrets.items():
        assert value not in text, f"{name} is in {where}"
        assert json.dumps(value)[1:-1] not in text, f"{name} is in {where}"


def test_a_secret_is_seen_by_the_replica_and_by_no_one_else(
    hf: HubServer,
    secrets: dict[str, str],
    state_home: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)  # at lower levels, botocore itself logs its headers
    caplog.set_level(logging.DEBUG, "executors")
    executor = HFJobsExecutor(secrets=["BY_OPTION"])
    names = [*secrets, RUN_KEY]

    def digests() -> dict[str, str]:
        return {name: hashlib.sha256(os.environ.get(name, "").encode()).hexdigest() for name in names}

    run = launch(executor, digests, 1, secrets=["BY_LAUNCH"], signed=True)
    secrets[RUN_KEY] = key_file(run.run_id).read_text()
    expected = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in secrets.items()}
    expected["HF_TOKEN"] = hashlib.sha256(b"").hexdigest()  # this variable was not requested
    assert run.results() == [expected]

    for name, value in secrets.items():
        assert hf.places_of(value) == [], f"{name} was sent to the Hub outside of the secrets"
    for entry in view_of(run).store.list(""):
        assert_nothing_of(secrets, bytes(view_of(run).store.get(entry.key)).decode(errors="replace"), entry.key)
    for path in state_home.rglob("*"):
        if path.is_file() and path != key_file(run.run_id):
            assert_nothing_of(secrets, path.read_text(errors="replace"), str(path))
    (job,) = hf.jobs.newest_first()
    assert job.spec["secrets"].keys() == {"BY_OPTION", "BY_LAUNCH", RUN_KEY, *CREDENTIALS}
    assert_nothing_of(secrets, repr({**job.spec, "secrets": None}), "the job")
    shown = [
        executor,
        run,
        run.handles,
        view_of(run).record,
        run.outcomes(),
        run.status(),
        attach(run.url),
        view_of(run).store,
    ]
    assert_nothing_of(secrets, repr(shown), "a repr")
    assert_nothing_of(secrets, run.logs(rank=0), "the log")
    assert_nothing_of(secrets, caplog.text, "the launcher's log")
    assert_nothing_of(secrets, "".join(capfd.readouterr()), "what was printed")


def test_a_job_to_be_asked_for_shows_neither_secrets_nor_environment(secrets: dict[str, str]) -> None:
    key = JobKey("s3://bucket/runs", "otter", 0, 0)
    job = JobSpec(key, ("python", "-c", "pass"), (), env={"A": MINE["BY_LAUNCH"]}, credentials=CREDENTIALS)
    assert_nothing_of(secrets, repr(job), "the repr of a job")
    assert_nothing_of(secrets, repr(HFJobsExecutor().service.describe(job)), "the description of a job")


def test_a_plan_and_a_dry_run_show_names_alone(hf: HubServer, secrets: dict[str, str]) -> None:
    dry = ["launch", "job.py:main", "--backend", "hf", "--n", 2, "--dry-run", "--secret", "BY_LAUNCH"]
    told = Folder(Path.cwd()).replicas(*dry, "--option", 'secrets=["BY_OPTION"]', "--env", "MINE=s3cret too")
    assert told.code == 0, told
    assert_nothing_of({**secrets, "MINE": "s3cret too"}, told.stdout + told.stderr, "a dry run")
    first, second = told.json["request"]["jobs"]
    assert first["secrets"] == dict.fromkeys(["BY_OPTION", "BY_LAUNCH", *CREDENTIALS], "***")
    assert first["env"]["MINE"] == "***"
    assert (first["labels"]["replicas-rank"], second["labels"]["replicas-rank"]) == ("0", "1")
    assert first["command"][:2] == ["python", "-c"]
    assert (first["flavor"], first["timeout"], first["namespace"]) == ("cpu-basic", 4500, hf.namespace)
    assert hf.count("create") == 0
    request = LaunchRequest.of("job.py:main", n=1, secrets=["BY_LAUNCH"], env={"MINE": "s3cret too"})
    plan = plan_launch(request, "hf")
    assert_nothing_of(secrets, repr(plan), "the repr of a plan")


@pytest.mark.usefixtures("quick_tries")
def test_an_error_shows_no_secret(hf: HubServer, secrets: dict[str, str]) -> None:
    answers: list[Misconduct] = [400, 401, 403, 500, "reset"]
    for answer in answers:
        hf.fail("create", answer, times=None)
        with pytest.raises(ReplicasError) as caught:
            launch(HFJobsExecutor(secrets=["BY_OPTION"]), "job.py:main", 1, secrets=["BY_LAUNCH"], run_id=f"r-{answer}")
        assert_nothing_of(secrets, "".join(traceback.format_exception(caught.value)), f"an error after {answer}")
        assert_nothing_of(secrets, repr(attach(f"r-{answer}").outcomes()), f"an outcome after {answer}")
        hf.forgive()


def test_a_secret_that_is_not_set_is_refused_by_its_name(hf: HubServer) -> None:
    with pytest.raises(ReplicasError, match="The secret 'NOT_THERE' is not set"):
        launch("hf", "job.py:main", 1, secrets=["NOT_THERE"], run_id="otter")
    with pytest.raises(ReplicasError, match=r"was never started: .*NOT_THERE"):
        attach("otter")
    assert hf.count("create") == 0


def test_no_process_of_a_replica_has_a_secret_in_its_command_line(hf: HubServer, secrets: dict[str, str]) -> None:
    run = launch("hf", "job.py:hang", 1, secrets=["BY_LAUNCH"])
    hf.until(lambda: any("hanging" in line for _, line in hf.jobs.newest_first()[0].lines))
    listed = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
    assert "executors.supervisor" in listed
    assert_nothing_of(secrets, listed, "a command line")
    run.cancel()
