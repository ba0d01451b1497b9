"""The bootstrap, run as a service would: in an empty directory, by a Python that does not see this project."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from servers.s3.server import CREDENTIALS, S3Server
from support.new_runs import create_run
from support.records import read_json
from support.standalone_replicas import Cloud, ended, outcome_of, running_cloud, ship, write_files

from executors import open_store
from executors.attempt import Attempt, Boot
from executors.settings.run_spec import RunSpec
from executors.shipping.package import bootstrap_command, layer_command, make_package
from executors.store.records import to_bytes
from executors.task.code_package import Package
from executors.testing import eventually

CANNOT_START = 78
TASK = """
import os, sys
import helper_of_user
def main(x):
    import executors, diloco
    print("hello from", os.getcwd())
    return [x * helper_of_user.FACTOR, executors.__file__, diloco.__file__, os.environ["REPLICA_RANK"]]
def light(x):
    return x * helper_of_user.FACTOR
"""
EVIL = "import os, pathlib; pathlib.Path(os.environ['HOME'], 'evil').write_text('ran')"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path) as cloud:
        yield cloud


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return write_files(tmp_path / "work space", train_of_user=TASK, helper_of_user="FACTOR = 3")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory as the rendezvous, which a test can change behind the replica's back."""
    return tmp_path / "shared directory"


@pytest.mark.parametrize(
    ("requirements", "said"),
    [
        ([f"numpy=={version('numpy')}"], "the image has all required packages"),
        (["numpy==0.0.1"], "keeping numpy"),
    ],
    ids=["all is there", "a later version is there"],
)
def test_a_layer_installs_missing_packages_and_keeps_later_versions_of_this_project(
    cloud: Cloud, tmp_path: Path, requirements: list[str], said: str
) -> None:
    command = layer_command(requirements, requirements)
    assert "\n" not in command, "each line of a Dockerfile is a command"
    command = command.replace("python", shlex.quote(str(cloud.python)), 1)
    env = cloud.environ()
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (0, True), done.stderr


def test_the_isolated_python_sees_torch_and_not_this_project(cloud: Cloud) -> None:
    def can_import(name: str) -> bool:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"
        done = subprocess.run([cloud.python, "-c", code], env=cloud.environ(), cwd=cloud.python.parent, check=False)
        return done.returncode == 0

    assert can_import("torch")
    assert can_import("boto3")
    assert not can_import("executors")
    assert not can_import("diloco")


def test_from_a_bucket_a_replica_gets_the_users_code_and_ours(cloud: Cloud, workspace: Path, s3: S3Server) -> None:
    spec = ship(s3.url("runs/deep"), workspace, "train_of_user.py:main", {"x": 2})
    code, out, err = ended(cloud.start(spec))
    assert (code, err) == (0, "")
    result = outcome_of(spec).result
    machine = cloud.folder / "machine of 0"
    assert result[0] == 6
    assert all(Path(path).is_relative_to(machine) and "/packages/" in path for path in result[1:3])
    assert out.startswith(f"hello from {machine}/replica-")


def test_a_pod_gets_its_code_from_a_directory_and_its_rank_from_its_index(
    cloud: Cloud, workspace: Path, shared: Path
) -> None:
    spec = ship(shared, workspace, "train_of_user:light", {"x": 2}, n=4)
    assert ended(cloud.start(spec, environ={"REPLICA_RANKS": "1,3", "JOB_COMPLETION_INDEX": "1"})) == (0, "", "")
    assert outcome_of(spec, rank=3).result == 6


def test_the_workspace_is_not_searched_for_names_of_reserved_modules(cloud: Cloud, shared: Path) -> None:
    trap = "raise RuntimeError('imported in place of another')"
    names = (
        "logging",
        "typing",
        "types",
        "random",
        "json",
        "executors",
        "diloco",
        "numpy",
        "torch",
        "tenacity",
        "site",
    )
    task = (
        "import os, logging, utils, executors\ndef main(): return [utils.NAME, logging.INFO, os.environ['PYTHONPATH']]"
    )
    files = {**dict.fromkeys(names, trap), "utils": "NAME = 'mine'", "train_of_user": task}
    workspace = write_files(shared.parent / "trapped", **files)
    spec = ship(shared, workspace, "train_of_user.py:main", {})
    assert ended(cloud.start(spec)) == (0, "", "")
    name, level, paths = outcome_of(spec).result
    assert (name, level) == ("mine", 20)
    assert [Path(path).name for path in paths.split(":")] == ["packages", "workspace"], (
        "PYTHONPATH names the workspace for Python processes of the user"
    )


def test_the_command_is_short_carries_no_secret_and_is_the_same_for_every_run() -> None:
    python, option, source = bootstrap_command()
    assert (python, option) == ("python", "-c")
    assert len(source.encode()) < 32 << 10
    assert source.isascii()
    assert len(source.splitlines()) < 300


# Accepted


def test_a_server_that_is_busy_or_cuts_replies_off_is_asked_again(cloud: Cloud, workspace: Path, s3: S3Server) -> None:
    spec = ship(s3.url("runs"), workspace, "train_of_user:light", {"x": 1})
    for fault in ("unavailable", "truncated", "short", "dropped"):
        s3.misbehave_once(fault, "GET", "code.tar.gz")
    s3.misbehave_once("unavailable", "GET", "task.json")
    assert ended(cloud.start(spec)) == (0, "", "")
    assert outcome_of(spec).result == 3
    assert [row["fault"] for row in s3.requests("GET", "code.tar.gz")] == [
        "unavailable", "truncated", "short", "dropped", "",
    ]  # fmt: skip


# Refused


def refusal(cloud: Cloud, spec: RunSpec, within: Sequence[str] = ()) -> str:
    """Return the one line that a replica prints if it cannot start, and check that no code from the bucket has run."""
    code, out, err = ended(cloud.start(spec, within=within))
    assert (code, out) == (CANNOT_START, "")
    assert not list(cloud.folder.glob("*/*")), "a refused bootstrap leaves no file"
    assert not open_store(spec.store_url).put_if_absent(f"{spec.run_id}/run.json", b"")
    assert err.count("\n") == 1
    assert err.startswith("replicas: replica 0 of run otter cannot start: ")
    return err


def test_a_task_that_was_replaced_is_not_looked_at(cloud: Cloud, workspace: Path, shared: Path) -> None:
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1})
    store = open_store(shared)
    record = read_json(store, "otter/task/task.json")
    store.put("otter/task/task.json", to_bytes({**record, "requirements": ["./evil"]}))
    assert "it is not what was launched: its sha256 is not" in refusal(cloud, spec)


def test_code_that_was_replaced_is_not_unpacked(cloud: Cloud, workspace: Path, shared: Path, tmp_path: Path) -> None:
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1})
    evil = make_package("train_of_user:light", root=write_files(tmp_path / "evil workspace", train_of_user=EVIL))
    open_store(shared).put("otter/task/code.tar.gz", evil.archive)
    assert "cannot read task/code.tar.gz" in refusal(cloud, spec)


def test_a_pickle_that_was_replaced_is_not_opened(cloud: Cloud, workspace: Path, shared: Path) -> None:
    spec = ship(shared, workspace, lambda: "ran")
    evil = f"cbuiltins\nexec\n(S{EVIL!r}\ntR.".encode()
    open_store(shared).put("otter/task/callable.pkl", evil)
    code, out, _ = ended(cloud.start(spec))  # the worker writes stdout and stderr into one stream
    outcome = outcome_of(spec)
    assert (code, outcome.status, outcome.reason) == (1, "failed", "exception")
    assert "'otter/task/callable.pkl'" in str(outcome.error)
    assert "is not what was launched" in str(outcome.error)
    assert "is not what was launched" in out
    assert not list(cloud.folder.rglob("evil*"))


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def test_an_archive_with_anything_but_plain_files_below_its_folder_is_refused(cloud: Cloud, tmp_path: Path) -> None:
    for number, hostile in enumerate((
        member("../evil"),
        member("workspace/../../evil"),
        member("/tmp/evil-of-a-test"),
        member("workspace/evil", tarfile.CHRTYPE),
        member("workspace/evil", tarfile.FIFOTYPE),
        member("workspace/evil", tarfile.SYMTYPE, "/etc"),
        member("workspace/evil", tarfile.LNKTYPE, "../../evil"),
    )):  # fmt: skip
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.addfile(member("workspace/evil.py"), io.BytesIO())
            archive.addfile(hostile)
        data = packed.getvalue()
        package = Package(data, hashlib.sha256(data).hexdigest(), 1, 1)
        spec = ship(tmp_path / f"shared {number}", tmp_path, "evil:main", package=package)
        assert "which is not a plain file below its folder" in refusal(cloud, spec), hostile
        assert not Path("/tmp/evil-of-a-test").exists()


def test_a_variable_that_is_not_set_is_named(cloud: Cloud, workspace: Path, shared: Path) -> None:
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1})
    for missing in ("REPLICA_RENDEZVOUS", "REPLICA_RUN_ID", "REPLICA_TASK_DIGEST"):
        code, _, err = ended(cloud.start(spec, environ={missing: ""}))
        assert code == CANNOT_START
        assert f"cannot start: {missing} is not set." in err


def test_a_run_that_is_gone_or_has_no_code_is_reported(cloud: Cloud, shared: Path) -> None:
    spec = create_run(open_store(shared), "otter", "helper:f", {}, 1, backend="cloud")
    assert "the run was launched without code for other machines" in refusal(cloud, spec)
    gone = dataclasses.replace(spec, store_url=(shared / "nowhere").as_uri())
    code, _, err = ended(cloud.start(gone))
    assert (code, "No such file or directory" in err) == (CANNOT_START, True)


def test_a_bucket_that_refuses_is_reported_at_once_and_without_secrets(
    cloud: Cloud, workspace: Path, s3: S3Server
) -> None:
    spec = ship(s3.url("runs"), workspace, "train_of_user:light", {"x": 1})
    s3.misbehave(forbidden=["GET"])
    code, out, err = ended(cloud.start(spec))
    assert (code, out) == (CANNOT_START, "")
    assert "AccessDenied" in err
    assert len(s3.requests("GET", "task.json")) == 1
    assert not [secret for secret in CREDENTIALS.values() if secret in err]


@pytest.mark.parametrize(
    ("before", "says"),
    [("mkdir gone; cd gone; rmdir ../gone", "No such file or directory"), ("ulimit -f 1", "File too large")],
    ids=["no_folder", "no_room"],
)
def test_a_container_without_a_folder_that_can_be_written_reports_that_in_one_line(
    cloud: Cloud, workspace: Path, shared: Path, before: str, says: str
) -> None:
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1})
    told = refusal(cloud, spec, ["sh", "-c", f'{before}; exec "$@"', "sh"])
    assert "its code cannot be unpacked: " in told
    assert says in told
    assert "Set TMPDIR to a folder with free space that you can write to." in told


def test_an_endpoint_that_is_not_a_url_is_reported_in_one_line(cloud: Cloud, workspace: Path, s3: S3Server) -> None:
    spec = dataclasses.replace(ship(s3.url("runs"), workspace, "train_of_user:light", {"x": 1}), store_url="s3://b/x")
    code, out, err = ended(cloud.start(spec, environ={"AWS_ENDPOINT_URL": "nowhere"}))
    assert (code, out, err.count("\n")) == (CANNOT_START, "", 1)
    assert "cannot start: cannot use s3://b/x: Invalid endpoint: nowhere" in err


# Installed packages


def wheel(folder: Path, name: str, version: str, text: str = "", requires: str = "") -> Path:
    """Make a wheel with one module."""
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", text)
        needs = f"Requires-Dist: {requires}\n" * bool(requires)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def test_requirements_of_the_workspace_are_installed_before_the_entrypoint_is_loaded(
    cloud: Cloud, tmp_path: Path, shared: Path
) -> None:
    text = "import wheel_of_user\ndef main(): return wheel_of_user.VERSION"
    workspace = write_files(tmp_path / "with requirements", main_of_user=text)
    made = wheel(workspace, "wheel_of_user", "1.5", "VERSION = '1.5'")
    (workspace / "requirements.txt").write_text(f"./{made.name}  # found in the workspace itself\n")
    spec = ship(shared, workspace, "main_of_user")
    code, _, err = ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1"}))
    assert (code, err) == (0, f"replicas: installing ./{made.name}\n")
    assert outcome_of(spec).result == "1.5"


def test_a_pin_that_is_installed_costs_no_pip_and_one_that_cannot_be_is_reported(
    cloud: Cloud, workspace: Path, shared: Path
) -> None:
    package = make_package("train_of_user:light", root=workspace, pip=["nowhere-to-be-found==1.0"])
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1}, package=package)
    code, _, err = ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1"}))
    lines = err.splitlines()
    assert code == CANNOT_START
    assert lines[0] == "replicas: installing nowhere-to-be-found==1.0"
    assert lines[-1].endswith("pip could not install its requirements (exit code 1). The error of pip is above.")
    assert "No matching distribution found for nowhere-to-be-found==1.0" in err


def fake_uv(folder: Path, *, installs: bool) -> dict[str, str]:
    """Put a fake `uv` on the path. It records its arguments and unpacks the last one, a wheel, or it fails."""
    folder.mkdir()
    script = folder / "uv"
    unpack = "zipfile.ZipFile(sys.argv[-1]).extractall(sysconfig.get_path('purelib'))"
    script.write_text(f"""#!/bin/sh
echo "$@" > {folder}/arguments
{"" if installs else "echo 'error: no such wheel' >&2; exit 2"}
while [ "$1" != --python ]; do shift; done
exec "$2" -c "import sys, sysconfig, zipfile; {unpack}" "$@"
""")
    script.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull}


def test_uv_installs_where_it_is_available_and_pip_where_it_cannot(cloud: Cloud, tmp_path: Path, shared: Path) -> None:
    text = "import wheel_of_user\ndef main(): return wheel_of_user.VERSION"
    workspace = write_files(tmp_path / "with requirements", main_of_user=text)
    made = wheel(workspace, "wheel_of_user", "1.5", "VERSION = '1.5'")
    (workspace / "requirements.txt").write_text(f"--extra-index-url https://mine.example.com\n./{made.name}\n")
    spec = ship(shared, workspace, "main_of_user")
    code, _, err = ended(cloud.start(spec, environ=fake_uv(tmp_path / "bin", installs=True)))
    assert (code, err) == (0, f"replicas: installing ./{made.name}\n")
    assert outcome_of(spec).result == "1.5"
    arguments = (tmp_path / "bin" / "arguments").read_text().split()
    assert {"--no-cache", "--break-system-packages", "--extra-index-url=https://mine.example.com"} <= set(arguments)
    again = ship(tmp_path / "other", workspace, "main_of_user")
    code, _, err = ended(cloud.start(again, environ=fake_uv(tmp_path / "broken", installs=False)))
    lines = ["error: no such wheel", "replicas: uv could not install this; pip tries"]
    assert (code, err.splitlines()[1:]) == (0, lines)
    assert "--quiet" not in arguments, "uv runs without --quiet, so that it prints its downloads"


def test_a_later_version_of_a_dependency_in_the_image_is_kept_and_reported(
    cloud: Cloud, workspace: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.shipping.requirements.installed_version", {"torch": "2.0", "numpy": "1.26.4"}.get)
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1})
    code, _, err = ended(cloud.start(spec))
    kept = "replicas: keeping {0} {1} of the image, where the launcher has {2}\n"
    versions = [("torch", version("torch"), "2.0"), ("numpy", version("numpy"), "1.26.4")]
    assert (code, err) == (0, "".join(kept.format(*each) for each in versions))
    assert outcome_of(spec).result == 3


def test_the_users_own_pin_is_not_a_lower_bound(cloud: Cloud, workspace: Path, shared: Path) -> None:
    package = make_package("train_of_user:light", root=workspace, pip=["numpy==1.26.4"])
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1}, package=package)
    code, _, err = ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1"}))
    assert (code, err.splitlines()[0]) == (CANNOT_START, "replicas: installing numpy==1.26.4")


def test_a_replica_that_installs_reports_that_in_the_store_and_can_be_ended(
    cloud: Cloud, tmp_path: Path, workspace: Path, shared: Path
) -> None:
    slow = tmp_path / "bin"
    slow.mkdir()
    # These are uv's lines if its stderr is not a terminal.
    said = ["Downloading torch (502.2MiB)", "Downloading triton (1.5GiB)", " Downloaded torch"]
    (slow / "uv").write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in said) + "exec sleep 600\n")
    (slow / "uv").chmod(0o755)
    package = make_package("train_of_user:light", root=workspace, pip=["nowhere-to-be-found==1.0"])
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1}, package=package)
    path = f"{slow}:{os.environ['PATH']}"

    def noted() -> tuple[str, int | None, int | None] | None:
        boot = attempt.find("boot.json", Boot.parse)
        return None if boot is None else (boot.package, boot.n_bytes, boot.of_bytes)

    process = cloud.start(spec, environ={"PATH": path, "PIP_CONFIG_FILE": os.devnull})
    attempt = Attempt(open_store(shared), "otter", 0, 0)
    torch, triton = int(502.2 * 2**20), int(1.5 * 2**30)
    eventually(
        lambda: noted() == ("nowhere-to-be-found", torch, torch + triton),
        "boot.json has the progress of the installation",
    )
    process.terminate()
    code, _, err = ended(process)
    assert (code, err) == (143, "replicas: installing nowhere-to-be-found==1.0\n")


def test_links_in_a_shared_directory_lead_nowhere_while_it_installs(
    cloud: Cloud, tmp_path: Path, workspace: Path, shared: Path
) -> None:
    package = make_package("train_of_user:light", root=workspace, pip=["nowhere-to-be-found==1.0"])
    spec = ship(shared, workspace, "train_of_user:light", {"x": 1}, package=package)
    (mine := tmp_path / "mine").mkdir()
    (mine / "notes").write_text("my own")
    attempt = shared / "otter" / "replicas" / "0000" / "0"
    attempt.mkdir(parents=True)
    (attempt / ".boot.json").symlink_to(mine / "notes")
    assert ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1"}))[0] == CANNOT_START
    attempt.rename(mine / "0")
    attempt.symlink_to(mine / "0")
    (mine / "0" / "boot.json").unlink(missing_ok=True)
    assert ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1"}))[0] == CANNOT_START
    assert not (mine / "0" / "boot.json").exists()
    assert (mine / "notes").read_text() == "my own"
    (shared / "otter" / "task" / "task.json").unlink()
    os.mkfifo(shared / "otter" / "task" / "task.json")
    code, _, err = ended(cloud.start(spec))
    assert (code, "it is not a file" in err) == (CANNOT_START, True)


def test_an_installation_is_also_reported_in_a_bucket(cloud: Cloud, workspace: Path, s3: S3Server) -> None:
    package = make_package("train_of_user:light", root=workspace, pip=["nowhere-to-be-found==1.0"])
    spec = ship(s3.url("runs/deep"), workspace, "train_of_user:light", {"x": 1}, package=package)
    assert ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1"}))[0] == CANNOT_START
    assert Attempt(open_store(spec.store_url), "otter", 0, 0).has("boot.json")


def test_without_boto3_the_version_of_the_launcher_is_installed_first(
    tmp_path: Path, cloud: Cloud, workspace: Path, s3: S3Server
) -> None:
    spec = ship(s3.url("runs"), workspace, "train_of_user:light", {"x": 1})
    offered, only_pip = tmp_path / "offered", tmp_path / "only pip"
    for folder in (offered, only_pip):
        folder.mkdir()
    dependencies = next(cloud.python.parent.parent.rglob("dependencies.pth"))
    (only_pip / "pip").symlink_to(Path(dependencies.read_text().splitlines()[0]) / "pip")
    # pip is offline, so it finds the boto3 in this file, which then imports the installed boto3.
    here = f"sys.path[:0] = {dependencies.read_text().splitlines()!r}"
    ours = version("boto3")
    for name, found, requires in (("boto3", ours, "botocore"), ("botocore", "1.0", "")):
        wheel(offered, name, found, f"import sys\n{here}\ndel sys.modules['{name}']\nimport {name}\n", requires)
    wheel(offered, "boto3", "99.0", "raise ImportError('the launcher has another')")
    dependencies.write_text(f"{only_pip}\n")
    code, _, err = ended(cloud.start(spec, environ={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(offered)}))
    assert (code, err) == (0, f"replicas: installing boto3=={ours}\n")
    assert outcome_of(spec).result == 3


INTO_HOME = """
import runpy, site, sys, os
bootstrap = runpy.run_path(sys.argv[1], run_name="bootstrap")
folder = site.getusersitepackages()
assert site.ENABLE_USER_SITE and not os.path.exists(folder)
os.makedirs(folder)
open(os.path.join(folder, "installed_for_a_user.py"), "w").write("FOUND = 'found'")
bootstrap["find_installed"]()
bootstrap["find_installed"]()
import installed_for_a_user
print(installed_for_a_user.FOUND, sys.path.count(folder))
"""


def test_packages_that_pip_installs_into_the_home_folder_are_found_by_the_same_process(tmp_path: Path) -> None:
    """A user who may not write to the image's folder gets a folder in HOME, which did not exist at the start."""
    file = Path(make_package.__code__.co_filename).with_name("bootstrap.py")
    outside = sys._base_executable  # type: ignore[attr-defined]  # of a virtual environment it is off
    command, env = [outside, "-c", INTO_HOME, str(file)], {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("found 1\n", 0), done.stderr
