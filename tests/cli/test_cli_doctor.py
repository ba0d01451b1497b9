"""`replicas doctor` and `backends`, and properties of every verb."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers.isolation.gpu import write_torch
from support.cli import Folder, HereInstead

from executors.errors import StoreError
from executors.store.file import FileStore

VERBS = ("launch", "ls", "status", "logs", "wait", "collect", "cancel", "resume", "rm", "plan", "doctor", "backends")


def test_doctor_shows_facts_and_finds_this_machine_well(here: HereInstead, tmp_path: Path) -> None:
    result = here.replicas("doctor", "--rendezvous", tmp_path / "there", "--json")
    assert result.code == 0, result
    assert result.json["ok"] is True
    assert list(result.json["facts"]) == ["system", "python", "packages", "cores", "gpus"]
    checked = [finding["what"] for finding in result.json["findings"]]
    assert checked == ["runs", "disk", "inotify", "launch", "rendezvous"]
    assert not [path for path in (tmp_path / "there").iterdir() if path.name.startswith("doctor")]


def test_doctor_names_each_problem_and_its_remedy(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    result = here.replicas("doctor", "--rendezvous", "/proc/nothing")
    assert result.code == 1
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("wrong")] == [
        "runs",
        "rendezvous",
    ]
    assert "Set XDG_STATE_HOME to a directory that you can write." in result.stdout


def test_doctor_finds_a_store_that_can_only_be_read(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(store: FileStore, key: str, data: object) -> None:
        raise StoreError("you may only read here")

    monkeypatch.setattr(FileStore, "put", put)
    result = here.replicas("doctor", "--rendezvous", tmp_path / "there")
    # this is also the folder of this user's runs
    assert (result.code, result.stdout.count("you may only read here")) == (1, 2)


def test_doctor_starts_a_replica_with_probe_and_leaves_nothing(here: HereInstead) -> None:
    result = here.replicas("doctor", "--probe", "--option", "preload=[]", "--json")
    assert result.code == 0, result
    assert "cores " in result.json["findings"][-1]["found"]
    assert here.replicas("ls", "--json").json["runs"] == []


def test_doctor_with_a_gpu_shows_the_driver_torch_and_the_time_of_each_step(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_torch(tmp_path / "gpu", sees_gpu=True))
    probe = ("doctor", "--probe", "--gpu", "H100", "--option", "preload=[]", "--option", 'gpus=["0"]', "--json")
    result = here.replicas(*probe)
    assert result.code == 0, result
    found = result.json["findings"][-1]["found"]
    assert "driver " in found
    assert "torch 2.13.0, built for CUDA 13.0, sees 1 GPUs" in found
    for step in ("launch", "its worker ran after", "fetching and installing", "importing torch", "in all"):
        assert re.search(rf"{step} [\d.]+ s", found), step
    write_torch(tmp_path / "gpu", sees_gpu=False)
    result = here.replicas(*probe)
    assert result.code == 1
    assert "torch sees no GPU: torch 2.13.0 is built for CUDA 13.0." in result.json["findings"][-1]["found"]


def test_backends_shows_the_type_default_and_meaning_of_every_option(here: HereInstead) -> None:
    local = next(
        backend for backend in here.replicas("backends", "--json").json["backends"] if backend["name"] == "local"
    )
    assert (local["ready"], local["problem"]) == (True, None)
    options = {option["name"]: option for option in local["options"]}
    assert options["max_parallel"]["type"] == "int | None"
    assert options["preload"]["default"] == ["torch", "torch._dynamo"]
    assert options["term_grace_s"]["help"].startswith("the seconds between SIGTERM")
    stdout = here.replicas("backends").stdout
    assert "local  ready" in stdout
    assert "term_grace_s float, default 5.0" in stdout


def test_backends_shows_one_that_is_named_and_refuses_a_name_that_is_invalid(here: HereInstead) -> None:
    shown = here.replicas("backends", "modal").stdout
    assert shown.startswith("modal  ready")
    assert "local  ready" not in shown
    assert here.replicas("backends", "hf", "--json").json["backends"][0]["name"] == "hf"
    told = here.replicas("backends", "modul")
    assert (told.code, "No backend named 'modul'. Did you mean 'modal'?" in told.stderr) == (2, True)


def test_an_option_that_takes_a_text_is_read_as_one(here: HereInstead) -> None:
    told = here.replicas(
        "launch", "job.py", "--n", 1, "--backend", "modal", "--option", "python_version=3.14", "--dry-run"
    )
    assert "takes" not in told.stderr, "3.14 is a version here, and no number"


def test_a_backend_that_cannot_be_loaded_is_listed_with_the_reason(folder: Folder) -> None:
    package = folder.path / "broken_backend-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backend\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[replicas.backends]\nbroken = no_such_module:Thing\n")
    broken = next(b for b in folder.replicas("backends", "--json").json["backends"] if b["name"] == "broken")
    assert (broken["ready"], "no_such_module" in broken["problem"]) == (False, True)


def test_every_verb_explains_itself_and_a_mistyped_one_names_the_nearest(here: HereInstead) -> None:
    for verb in VERBS:
        result = here.replicas(verb, "--help")
        assert (result.code, f"replicas {verb}" in result.stdout) == (0, True), verb
    assert here.replicas("--version").stdout.startswith("replicas ")
    result = here.replicas("lanch")
    assert (result.code, result.stdout, "Did you mean 'launch'" in result.stderr) == (2, "", True)


def test_help_imports_nothing_that_takes_time() -> None:
    code = "import sys; sys.argv = ['replicas', '--help']; from executors.cli import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "numpy",
        "asyncio",
        "tenacity",
        "cloudpickle",
        "rich.live",
        "executors.run.run",
        "executors.launcher",
    }
    assert not heavy & set(done.stdout.splitlines()[-1].split())
    assert "launch" in done.stdout


def test_the_current_directory_is_searched_unless_an_option_of_python_forbids_it(folder: Folder) -> None:
    arguments = ("launch", "job:main", "--n", "1", "--option", "preload=[]", "--dry-run")
    assert folder.replicas(*arguments).code == 0
    code = "import sys; from executors.cli import main; sys.exit(main())"
    safe = subprocess.run([sys.executable, "-P", "-c", code, *arguments], cwd=folder.path, check=False)
    assert safe.returncode == 2


def install_metadata(folder: Path, name: str, version: str) -> None:
    """Write only the metadata of an installed package."""
    record = folder / f"{name}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def findings_of(here: HereInstead, what: str) -> list[dict[str, str]]:
    result = here.replicas("doctor", "--json")
    found = [each for each in result.json["findings"] if each["what"] == what]
    assert result.code == (1 if found else 0), result
    return found


def test_doctor_names_the_other_package_that_uses_our_folder(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings_of(here, "executors") == []
    install_metadata(tmp_path / "others", "executors", "0.6.0")
    monkeypatch.syspath_prepend(tmp_path / "others")
    (finding,) = findings_of(here, "executors")
    assert f"The package executors 0.6.0 is installed at {tmp_path / 'others'}" in finding["found"]
    assert "pip uninstall executors" in finding["advice"]


def test_doctor_names_a_folder_that_python_finds_instead_of_ours(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "executors.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "mine")
    (finding,) = findings_of(here, "executors")
    assert str(tmp_path / "mine" / "executors.py") in finding["found"]


def test_doctor_names_a_package_below_its_bound_with_the_line_that_mends_it(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_metadata(tmp_path / "old", "boto3", "1.20.1")
    install_metadata(tmp_path / "old", "pytest", "1.0")  # tools of developers are not checked for users
    monkeypatch.syspath_prepend(tmp_path / "old")
    (finding,) = findings_of(here, "package")
    assert finding["found"].startswith("boto3 1.20.1; replicas needs boto3>=")
    assert re.fullmatch(r"pip install 'boto3>=[\d.]+'", finding["advice"])
