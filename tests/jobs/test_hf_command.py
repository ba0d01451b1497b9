"""Tests the command with Hugging Face Jobs: refusals, `doctor` and `backends`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from servers.hub.server import HubServer
from servers.s3.server import BUCKET, S3Server
from support.cli import Folder, HereInstead, Result

from executors.errors import install_command
from executors.registry.run_index import PREPARING
from executors.testing.helpers import environment

LAUNCH = ("launch", "job.py:main", "--backend", "hf", "--n", 8, "--run-id", "otter")
NO_SDK = f"Backend 'hf' needs the Hugging Face Hub client. Install it with: {install_command('hf')}"
NO_RENDEZVOUS = (
    "Error: Backend 'hf' needs a rendezvous that both sides reach.{why} Try: replicas launch job.py:main "
    "--backend hf --n 8 --rendezvous s3://BUCKET/PREFIX (or set REPLICAS_RENDEZVOUS).\n"
)


@pytest.fixture
def here(
    hf: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> HereInstead:
    return HereInstead(Folder(tmp_path / "work"), monkeypatch, capsys)


def nothing_began(hub: HubServer, s3: S3Server, state_home: Path) -> bool:
    kept = [path for path in state_home.rglob("*") if path.is_file() and path.parent.name != PREPARING]
    return hub.count("create") == 0 and kept == [] and s3.requests("PUT", "otter") == []


def test_a_missing_rendezvous_is_reported_with_the_command_that_works(
    hf: HubServer, s3: S3Server, here: HereInstead, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLICAS_RENDEZVOUS")
    told = here.replicas(*LAUNCH)
    assert (told.code, told.stdout, told.stderr) == (2, "", NO_RENDEZVOUS.format(why=""))
    for directory in ("/somewhere/runs", "file:///somewhere/runs"):
        told = here.replicas(*LAUNCH, "--rendezvous", directory)
        why = f" {directory!r} is a directory of this machine."
        assert (told.code, told.stderr) == (2, NO_RENDEZVOUS.format(why=why))
    assert nothing_began(hf, s3, state_home)


def test_a_missing_token_is_reported(
    hf: HubServer, s3: S3Server, here: HereInstead, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    for more in ((), ("--option", "namespace=ada")):
        told = here.replicas(*LAUNCH, *more)
        assert told.code == 2
        assert told.stderr == (
            "Error: Backend 'hf' needs a Hugging Face token. Log in with: hf auth login "
            "(or set HF_TOKEN to a token that may write jobs).\n"
        )
    assert nothing_began(hf, s3, state_home)


def without_sdk(*arguments: object) -> Result:
    """Call the command in a process that cannot import the client."""
    code = "import sys; sys.modules['huggingface_hub'] = None; from executors.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr, *arguments[:1])


def test_a_missing_sdk_is_reported_with_the_command_that_installs_it(
    hf: HubServer, s3: S3Server, state_home: Path
) -> None:
    told = without_sdk(*LAUNCH)
    assert (told.code, told.stdout, told.stderr) == (2, "", f"Error: {NO_SDK}\n")
    assert nothing_began(hf, s3, state_home)
    told = without_sdk("backends", "--json")
    (described,) = [backend for backend in told.json["backends"] if backend["name"] == "hf"]
    assert (described["ready"], described["problem"]) == (False, NO_SDK)
    assert {option["name"] for option in described["options"]} >= {"flavor", "image", "labels"}


def test_the_backends_tell_the_options_of_this_one(here: HereInstead) -> None:
    (described,) = [
        backend for backend in here.replicas("backends", "--json").json["backends"] if backend["name"] == "hf"
    ]
    assert (described["ready"], described["about"]) == (True, "Runs replicas as Hugging Face Jobs.")
    options: dict[str, Any] = {option["name"]: option for option in described["options"]}
    assert options["flavor"]["type"] == "str | None"
    assert options["flavor"]["default"] is None
    assert options["pip"]["type"] == "Sequence[str]"
    assert options["labels"]["help"].startswith("more labels for the jobs")
    assert set(options) == {"namespace", "image", "flavor", "pip", "labels", "secrets", "volumes"}
    assert "hf  ready" in here.replicas("backends").stdout


def test_options_reach_the_request_and_wrong_ones_are_named(hf: HubServer, here: HereInstead, s3: S3Server) -> None:
    told = here.replicas(*LAUNCH, "--dry-run", "--option", "flavour=x")
    assert (told.code, "Did you mean 'flavor'?" in told.stderr) == (2, True)
    told = here.replicas(*LAUNCH, "--dry-run", "--option", 'labels=["a"]')
    assert (told.code, "'labels'" in told.stderr) == (2, True)
    told = here.replicas(
        *LAUNCH, "--dry-run", "--option", "flavor=a100-large", "--option", 'pip=["einops"]', "--timeout", "90"
    )
    assert told.json["url"] == s3.url("runs/otter")
    request = told.json["request"]["jobs"][7]
    assert (request["flavor"], request["timeout"]) == ("a100-large", 990)
    assert request["image"] == "python:{}.{}".format(*sys.version_info)
    assert "einops" in told.json["task_record"]["requirements"]
    Path("trackio.py").touch()
    for pip, users in (("einops", []), ("trackio>=0.1", ["trackio>=0.1"])):
        told = here.replicas(*LAUNCH, "--dry-run", "--tracker", "trackio", "--option", f'pip=["{pip}"]')
        task = told.json["task_record"]
        found = [line for line in task["requirements"] if line.startswith("trackio")]
        assert (len(found), found == users) == (1, users != []), told
        assert (found[0] in task["pins"]) == (users == [])
    assert hf.count("create") == 0


def test_the_price_is_printed_before_the_launch_and_limits_the_time(hf: HubServer, here: HereInstead) -> None:
    # Two T4 at 40 cents an hour each.
    told = here.replicas(*LAUNCH, "--n", 2, "--gpu", "T4", "--max-cost", "0.20", "--dry-run")
    assert (round(told.json["usd_per_hour"], 2), round(told.json["timeout_s"])) == (0.80, 900)
    assert told.json["run_record"]["settings"]["max_cost"] == 0.2
    told = here.replicas(*LAUNCH, "--n", 2, "--gpu", "T4", "--max-cost", "80", "--timeout", "90", "--dry-run")
    assert told.json["timeout_s"] == 90
    told = here.replicas(*LAUNCH, "--n", 2, "--max-cost", "1", "--option", "flavor=of-tomorrow")
    assert (
        told.code,
        "has no price for these replicas, so max_cost=1 (--max-cost) cannot be enforced." in told.stderr,
    ) == (
        2,
        True,
    )
    told = here.replicas("launch", "job.py:main", "--n", 2, "--max-cost", "1")
    assert (told.code, "Backend 'local' has no price for these replicas" in told.stderr) == (2, True)
    assert hf.count("create") == 0
    told = here.replicas("launch", "job.py:main", "--backend", "hf", "--n", 2, "--detach", "--timeout", "1h")
    assert "replicas: $0.02 per hour, $0.02 until the time limit\n" in told.stderr
    here.replicas("cancel", told.stdout.splitlines()[0])


def test_volumes_reach_the_request_and_a_backend_without_them_reports_that(hf: HubServer, here: HereInstead) -> None:
    more = ("--volume", "hf://datasets/org/corpus:/data", "--volume", "hf://buckets/ada/out:/out", "--dry-run")
    (request, *_) = here.replicas(*LAUNCH, *more).json["request"]["jobs"]
    assert request["volumes"] == {"/data": "hf://datasets/org/corpus", "/out": "hf://buckets/ada/out"}
    told = here.replicas("launch", "job.py:main", "--n", 1, "--volume", "corpus:/data")
    assert (told.code, "Backend 'local' has no volumes. Remove --volume." in told.stderr) == (2, True)
    told = here.replicas(*LAUNCH, "--volume", "corpus")
    assert (told.code, "is not of the form NAME:/path" in told.stderr) == (2, True)


def test_a_resume_on_another_machine_needs_the_volumes_and_takes_other_options_from_the_record(
    hf: HubServer, here: HereInstead, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, options = ("--volume", "hf://datasets/org/corpus:/data"), ("--option", "flavor=cpu-upgrade")
    hf.hold("cpu-upgrade")
    here.replicas("launch", "job.py:main", "--backend", "hf", "--n", 1, "--run-id", "otter", *volume, *options, "-d")
    here.replicas("cancel", "otter")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    resume = ("resume", s3.url("runs/otter"), "--trust-bucket", "--detach")
    told = here.replicas(*resume)
    assert (told.code, "--backend hf --volume NAME:/path" in told.stderr) == (2, True)
    told = here.replicas(*resume, *volume)
    assert (told.code, "--volume does not name its backend" in told.stderr) == (2, True)
    told = here.replicas(*resume, "--backend", "hf", *volume)
    assert told.code == 0, told
    again, launched = hf.jobs.newest_first()
    assert again.spec["volumes"] == launched.spec["volumes"]
    assert (again.spec["flavor"], launched.spec["flavor"]) == ("cpu-upgrade", "cpu-upgrade")
    here.replicas("cancel", s3.url("runs/otter"))


def test_a_command_in_a_message_finds_the_run_from_another_machine(
    hf: HubServer, here: HereInstead, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.replicas("launch", "job.py:hang", "--backend", "hf", "--n", 1, "--run-id", "otter", "--timeout", 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    address = s3.url("runs/otter")
    assert "&" in address  # a shell would interpret these characters
    told = here.replicas(*LAUNCH)
    assert (told.code, f"`replicas status '{address}'`" in told.stderr) == (2, True)
    assert f"executors.attach('{address}')" in told.stderr
    assert f"replicas logs '{address}' --rank 0" in here.replicas("status", address).stdout
    hf.hold("cpu-basic")
    assert "replicas cancel otter" in here.replicas("resume", address, "--detach", "--trust-bucket").stdout
    assert here.replicas("cancel", "otter").code == 0, "this machine has noted the store of the run that it resumed"


def test_a_detached_run_continues_without_its_launcher(hf: HubServer, here: HereInstead) -> None:
    told = here.replicas("launch", "job.py:main", "--backend", "hf", "--n", 1, "--run-id", "otter", "--detach")
    assert (told.code, told.stdout.splitlines()[0]) == (0, "otter")
    assert here.replicas("wait", "otter").code == 0
    assert here.replicas("logs", "otter").stdout == "[0] hello 0 of rank 0\n"


# doctor


def doctor(here: HereInstead, *more: object) -> tuple[int, dict[str, tuple[str, str]]]:
    told = here.replicas("doctor", "--backend", "hf", "--json", *more)
    rows = told.json["findings"]
    return told.code, {row["what"]: (row["state"], f"{row['found']} {row['advice']}") for row in rows}


def test_the_doctor_finds_nothing_wrong_and_proves_it_with_a_replica(here: HereInstead, s3: S3Server) -> None:
    code, found = doctor(here, "--probe")
    assert code == 0, found
    assert found["launch"][0] == "ok"
    assert "creates atomically" in found["rendezvous"][1]
    assert found["credentials"][0] == "note"
    assert found["credentials"][1].startswith("temporary")
    assert found["probe"][0] == "ok", found["probe"]
    assert "huggingface_hub " in found["probe"][1]
    left = boto3.client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1").list_objects_v2(Bucket=BUCKET)
    assert left.get("Contents", []) == []


def test_the_doctor_finds_a_token_that_is_not_accepted(hf: HubServer, here: HereInstead) -> None:
    hf.fail("whoami", 401, times=None)
    code, found = doctor(here)
    assert code == 1
    assert found["launch"][0] == "wrong"
    assert "Invalid user token" in found["launch"][1]
    assert "hf auth login" in found["launch"][1]


def test_the_doctor_finds_that_there_is_no_rendezvous_or_names_its_bucket_once(
    here: HereInstead, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = doctor(here, "--rendezvous", moto.url("runs").replace(BUCKET, "nowhere"))
    assert code == 1
    assert "There is no bucket 'nowhere' there." in found["rendezvous"][1]
    assert [what for what, (state, _) in found.items() if state == "wrong"] == ["rendezvous"]
    monkeypatch.delenv("REPLICAS_RENDEZVOUS")
    code, found = doctor(here)
    assert code == 1
    assert "needs a rendezvous that both sides reach" in found["rendezvous"][1]
    assert "Any S3 bucket will do" in found["rendezvous"][1]


def test_the_doctor_finds_a_rendezvous_that_is_not_a_url(here: HereInstead) -> None:
    code, found = doctor(here, "--rendezvous", "s3:/bucket/runs")
    state, words = found["rendezvous"]
    assert (code, state, "two slashes follow its scheme" in words) == (1, "wrong", True)


def test_the_doctor_finds_the_harmful_settings_of_a_bucket(here: HereInstead, moto: S3Server) -> None:
    client = boto3.client("s3", endpoint_url=moto.endpoint_url, region_name="us-east-1")
    client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, "Expiration": {"Days": 3}}
    other = {**rule, "ID": "elsewhere", "Filter": {"Prefix": "scratch/"}}
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": [rule, other]})
    code, found = doctor(here, "--rendezvous", moto.url("runs"))
    assert code == 0, found
    assert found["versioning"][0] == found["lifecycle"][0] == "note"
    assert "rule 'tidy' lets objects here expire" in found["lifecycle"][1]


def test_doctor_prints_the_reason_why_a_probe_fails(hf: HubServer, here: HereInstead) -> None:
    hf.fail("create", 403)
    code, found = doctor(here, "--probe")
    assert code == 1
    assert found["probe"][0] == "wrong"
    assert "HTTP 403" in found["probe"][1]
