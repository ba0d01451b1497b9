"""`replicas launch`: what runs, what is said, and which exit code comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_of_tests import FAST, Folder, HereInstead

from executors import attach, list_runs


@pytest.fixture
def here(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HereInstead:
    return HereInstead(folder, monkeypatch, capsys)


VERBS = ["launch", "ls", "status", "logs", "wait", "collect", "cancel", "rm", "doctor", "backends"]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "work").mkdir()
    return Folder(tmp_path / "work")


def test_help_imports_nothing_that_takes_time() -> None:
    code = "import sys; sys.argv = ['replicas', '--help']; from executors.cli import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {
        "torch",
        "numpy",
        "asyncio",
        "tenacity",
        "cloudpickle",
        "executors.run",
        "executors.launching",
        "rich.live",
    }
    assert not heavy & loaded
    assert "launch" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(here: HereInstead, verb: str) -> None:
    told = here.replicas(verb, "--help")
    assert told.code == 0
    assert f"replicas {verb}" in told.stdout


def test_an_attached_launch_runs_the_file_where_the_user_stands_and_tells_the_results(folder: Folder) -> None:
    told = folder.launch("job:main", n=3)
    assert told.code == 0, told
    (run,) = list_runs()
    assert "3 replicas of job:main on local, no time limit" in told.stdout
    assert "succeeded" in told.stdout
    assert 'rank 1: {"rank": 1}' in told.stdout
    assert f"replicas status {run.run_id}" in told.stdout


def test_arguments_are_json_where_they_parse_and_strings_where_not(folder: Folder) -> None:
    given = ["a=1", "b=[1, 2]", "c=true", "d=word", "e=x=y", "f=", 'g="7"', "h=007", "i=NaN"]
    told = folder.launch("job:echo", *(part for text in given for part in ("--arg", text)), "--json", n=1)
    assert told.json["replicas"][0]["result"] == {
        "a": 1, "b": [1, 2], "c": True, "d": "word", "e": "x=y", "f": "", "g": "7", "h": "007", "i": "NaN",
    }  # fmt: skip


def test_pythons_true_is_a_string_and_the_command_says_so(folder: Folder) -> None:
    told = folder.launch("job:echo", "--arg", "compare=True", "--json", n=1)
    assert told.json["replicas"][0]["result"] == {"compare": "True"}
    assert "compare=true" in told.stderr


def test_the_summary_of_the_lowest_rank_is_shown_in_place_of_the_results(folder: Folder) -> None:
    told = folder.launch("job:report")
    assert "Summary of rank 0." in told.stdout
    assert "Summary of rank 1." not in told.stdout
    assert "ranks 0" not in told.stdout.partition("Summary")[2]


def test_json_is_one_document_on_stdout_and_progress_goes_to_stderr(folder: Folder) -> None:
    told = folder.launch("job:fail", "--arg", "ranks=[1]", "--timeout", "60", "--json")
    document = told.json
    (run,) = list_runs()
    assert document["run_id"] == run.run_id
    assert (document["exit_code"], document["timeout_s"], document["world_size"]) == (1, 60.0, 2)
    assert [row["status"] for row in document["replicas"]] == ["succeeded", "failed"]
    assert document["replicas"][0]["result"] == "fine"
    assert document["replicas"][1]["error"].endswith("RuntimeError: it went wrong")
    assert "rank 1 failed (exception: RuntimeError: it went wrong)" in told.stderr


def test_a_failed_rank_makes_exit_code_1_and_the_command_says_why_and_where_its_log_is(folder: Folder) -> None:
    told = folder.launch("job:fail", "--arg", "ranks=[1]", "--run-id", "mine", n=3)
    assert told.code == 1
    assert "Rank 1 failed (exception): RuntimeError: it went wrong" in told.stdout
    assert "replicas logs mine --rank 1" in told.stdout
    assert 'ranks 0, 2: "fine"' in told.stdout
    assert "last words" in folder.replicas("logs", "mine", "--rank", 1).stdout


def test_a_rank_that_was_killed_while_the_others_finished_makes_exit_code_1(folder: Folder) -> None:
    told = folder.launch("job:die", "--arg", "rank=1")
    assert told.code == 1
    assert "Rank 1 failed (signal): was ended by signal 9 (SIGKILL)." in told.stdout
    assert 'rank 0: "fine"' in told.stdout


def test_only_time_limits_make_exit_code_124(folder: Folder) -> None:
    told = folder.launch("job:hang", "--timeout", "0.5")
    assert told.code == 124
    assert "time limit 0.5 s" in told.stdout
    assert "failed (timeout)" in told.stdout


def test_a_failure_beside_a_time_limit_makes_exit_code_1(folder: Folder) -> None:
    (folder.path / "mixed.py").write_text(
        "import job\nfrom executors import current_replica\n"
        "def main():\n    return job.hang() if current_replica().rank else job.fail([0])\n"
    )
    assert folder.launch("mixed.py", "--timeout", "1").code == 1


def test_values_of_the_environment_reach_the_replicas_and_are_recorded_nowhere(
    folder: Folder, state_home: Path
) -> None:
    told = folder.launch("job:variable", "--arg", "name=TOKEN", "--env", "TOKEN=hunter2=x", "--detach", "--json", n=1)
    run = attach(told.json["run_id"])
    assert run.results() == ["hunter2=x"]
    written = [path for path in state_home.rglob("*") if path.is_file() and path.name != "outcome.json"]
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    assert run.record.env == ("TOKEN",)


def test_a_detached_launch_prints_the_run_id_first_and_the_run_goes_on_without_it(folder: Folder) -> None:
    told = folder.launch("job:main", "--detach", "--run-id", "by-itself")
    assert told.code == 0
    assert told.stdout.splitlines()[0] == "by-itself"
    assert "replicas logs by-itself -f" in told.stdout
    assert attach("by-itself").results() == [{"rank": 0}, {"rank": 1}]


def test_a_run_may_live_in_any_directory_and_its_id_alone_finds_it_again(folder: Folder, tmp_path: Path) -> None:
    told = folder.launch("job:main", "--rendezvous", tmp_path / "there", "--run-id", "away")
    assert told.code == 0
    assert (tmp_path / "there" / "away" / "run.json").is_file()
    assert folder.replicas("status", "away", "--json").json["status"] == "succeeded"
    assert folder.replicas("status", "away", "--rendezvous", tmp_path / "there").code == 0
    assert folder.replicas("status", (tmp_path / "there").as_uri() + "/away").code == 0


def test_a_strangers_class_is_a_backend(folder: Folder) -> None:
    strangers = str(Path(__file__).parent)
    told = folder.replicas(
        "launch", "job:main", "--n", 2, "--backend", "strangers_executor:PopenExecutor", "--json",
        environ={"PYTHONPATH": strangers},
    )  # fmt: skip
    assert told.code == 0, told
    assert [row["result"] for row in told.json["replicas"]] == [{"rank": 0}, {"rank": 1}]
    assert told.json["timeout_s"] == 3600


def test_without_an_entrypoint_the_installations_default_task_is_meant(folder: Folder) -> None:
    planned = folder.replicas("launch", "--n", 2, "--dry-run", "--option", "preload=[]")
    assert planned.json["run.json"]["entrypoint"] == "diloco.demo:train"


def test_a_warning_is_one_line_on_stderr(folder: Folder) -> None:
    told = folder.launch("job:main", "--gpu", "H100", n=1, CUDA_VISIBLE_DEVICES="")
    assert told.code == 0
    assert told.stderr == "Warning: gpu='H100': this machine has no GPU; the replicas run on the CPU.\n"


USAGE = [
    (["job:main", "--n", "2", "--arg", "foo"], "--arg 'foo': the form is --arg NAME=VALUE, as in --arg steps=500"),
    (["job:main", "--n", "2", "--env", "=x"], "the form is --env NAME=VALUE"),
    (["job:main", "--n", "0"], "n must be at least 1, got n=0."),
    (["job:main", "--n", "two"], "--n"),
    (["job:main"], "--n"),
    (["job:main", "--n", "2", "--backend", "loca"], "No backend named 'loca'. Did you mean 'local'? Known: "),
    (["job:main", "--n", "2", "--backend", "no.such:Thing"], "Backend 'no.such:Thing' cannot be loaded"),
    (["job:main", "--n", "2", "--option", "max_paralel=2"], "no option 'max_paralel'. Did you mean 'max_parallel'?"),
    (["job:main", "--n", "2", "--option", "max_parallel=two"], "takes int | None, got 'two'."),
    (["job:main", "--n", "2", "--option", "preload=torch"], "takes Sequence[str], got 'torch'."),
    (["job:main", "--n", "2", "--option", "max_parallel=0"], "max_parallel must be at least 1"),
    (["job:mian", "--n", "2"], "Did you mean 'main'?"),
    (["nothere:main", "--n", "2"], "there is no module 'nothere'"),
    (["job:main", "--n", "2", "--arg", "tims=3"], "main() takes no argument 'tims'. Did you mean 'times'?"),
    (["job:main", "--n", "2", "--run-id", "Not Good"], "Bad run id 'Not Good'"),
    (["job:main", "--n", "2", "--timeout", "-1"], "timeout must be more than 0 seconds"),
    (["job:main", "--n", "2", "--secret", "NOT_SET"], "The secret 'NOT_SET' is not set"),
    (["job:main", "--n", "2", "--rendezvous", "memory://x"], "lives in this process alone"),
    (["job:main", "--n", "2", "--rendezvous", "ftp://x"], "No store serves 'ftp'"),
    (["job:main", "--n", "2", "--rendezvous", "/proc/nothing"], "/proc/nothing"),
    (["job:main", "--nn", "2"], "--nn"),
]  # fmt: skip


@pytest.mark.parametrize("dry", [False, True], ids=["launch", "dry-run"])
@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_error_with_exit_code_2_and_nothing_is_written(
    here: HereInstead, state_home: Path, arguments: list[str], message: str, dry: bool
) -> None:
    options = [] if any("preload" in argument for argument in arguments) else FAST[:2]
    told = here.replicas("launch", *arguments, *options, *(["--dry-run"] if dry else []))
    assert told.code == 2
    assert told.stderr.startswith("Error: ")
    assert message in told.stderr
    assert told.stdout == ""
    assert not list(state_home.rglob("run.json"))


def test_a_mistyped_verb_names_the_nearest(here: HereInstead) -> None:
    told = here.replicas("lanch")
    assert (told.code, told.stdout) == (2, "")
    assert "Did you mean 'launch'?" in told.stderr


def test_with_json_a_mistake_is_a_document_as_well(here: HereInstead) -> None:
    told = here.replicas("launch", "job:main", "--n", 2, "--backend", "loca", "--json")
    assert told.code == 2
    assert told.json["kind"] == "UnknownBackendError"
    assert told.stderr == f"Error: {told.json['error']}\n"


def test_a_chosen_id_that_exists_is_an_error_that_names_it(folder: Folder) -> None:
    assert folder.launch("job:main", "--run-id", "taken").code == 0
    for more in ([], ["--dry-run"]):
        told = folder.launch("job:main", "--run-id", "taken", *more)
        assert told.code == 2
        assert "Run 'taken' exists" in told.stderr


def test_a_dry_run_shows_the_exact_request_and_leaves_no_trace(folder: Folder, state_home: Path) -> None:
    rendezvous = folder.path / "rendezvous"
    rendezvous.mkdir()
    before = sorted(folder.path.rglob("*"))
    told = folder.replicas(
        "launch", "job:main", "--n", 2, "--arg", "times=3", "--env", "TOKEN=hunter2", "--run-id", "planned", *FAST,
        "--rendezvous", rendezvous, "--timeout", "90", "--dry-run", environ={"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert told.code == 0, told
    request = told.json["request"]
    assert request["spec"]["run_id"] == "planned"
    assert request["spec"]["env"] == {"TOKEN": "***"}
    assert set(request["environ"].values()) == {"***"}
    assert (request["timeout_s"], request["term_grace_s"]) == (90.0, 0.5)
    assert told.json["task/task.json"]["args"] == {"times": 3}
    assert told.json["run.json"]["env"] == ["TOKEN"]
    assert "hunter2" not in told.stdout + told.stderr
    assert sorted(folder.path.rglob("*")) == before
    assert not state_home.exists()


def test_a_dry_run_on_a_strangers_class_shows_what_it_would_be_asked_for(folder: Folder) -> None:
    told = folder.replicas(
        "launch", "job:main", "--n", 2, "--backend", "strangers_executor:PopenExecutor", "--dry-run",
        environ={"PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert told.json["request"] == {
        "n_replicas": 2,
        "entrypoint": "executors.worker.call",
        "entrypoint_args": {"run": told.json["url"]},
        "gpu": None,
        "timeout": 3600,
    }


def test_what_a_dry_run_shows_is_what_a_launch_records(folder: Folder) -> None:
    planned = folder.launch("job:main", "--run-id", "same", "--arg", "times=2", "--seed", "3", "--dry-run").json
    assert folder.launch("job:main", "--run-id", "same", "--arg", "times=2", "--seed", "3").code == 0
    run = attach("same")
    own = {"created_at", "launcher_pid"}
    assert {k: v for k, v in json.loads(bytes(run.store.get("same/run.json"))).items() if k not in own} == {
        k: v for k, v in planned["run.json"].items() if k not in own
    }
    assert json.loads(bytes(run.store.get("same/task/task.json"))) == planned["task/task.json"]
    assert planned["url"] == run.url
