"""`replicas launch`: the function that runs, the output, and the exit code."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from support.cli import COMMAND, FAST, Folder, HereInstead

from executors import ReplicaStatus, attach, list_runs
from executors.run.run import view_of


def test_an_attached_launch_runs_a_file_of_the_current_directory_and_prints_the_results(folder: Folder) -> None:
    result = folder.launch("job:main", "--gpu", "H100", n=3, CUDA_VISIBLE_DEVICES="")
    assert result.code == 0, result
    (run,) = list_runs()
    assert "3 replicas of job:main on local, no time limit" in result.stdout
    assert "succeeded" in result.stdout
    assert 'rank 1: {"rank": 1}' in result.stdout
    assert f"replicas status {run.run_id}" in result.stdout
    assert result.stderr == "Warning: gpu='H100': this machine has no GPU, so the replicas run on the CPU.\n"


def test_arguments_are_json_where_they_parse_and_strings_where_not(here: HereInstead) -> None:
    given = ["a=1", "b=[1, 2]", "c=true", "d=word", "e=x=y", "f=", 'g="7"', "h=007", "i=NaN", "compare=True"]
    result = here.launch("job:echo", *(part for text in given for part in ("--arg", text)), "--json", n=1)
    assert result.json["replicas"][0]["result"] == {
        "a": 1, "b": [1, 2], "c": True, "d": "word", "e": "x=y", "f": "", "g": "7", "h": "007", "i": "NaN",
        "compare": "True",
    }  # fmt: skip
    assert "compare=True is a string. For the constant, write compare=true." in result.stderr


def test_an_argument_gets_the_type_of_its_annotation_even_if_only_the_replica_knows_the_type(here: HereInstead) -> None:
    (here.folder.path / "annotated.py").write_text(
        "import enum\nfrom pathlib import Path\nfrom job import echo\n"
        "class Mode(enum.Enum):\n    FAST = 'f'\n"
        "def main(on: bool, lr: float, out: Path, mode: Mode, name: str = ''):\n"
        "    assert isinstance(out, Path) and mode is Mode.FAST\n"
        "    return [on, lr, str(out), mode.name, name]\n"
    )
    given = ["on=no", "lr=.${world_size}5", "out=a/${rank}", "mode=FAST", "name=5"]
    result = here.launch("annotated.py", *(part for text in given for part in ("--arg", text)), "--json", n=1)
    assert result.json["replicas"][0]["result"] == [False, 0.15, "a/0", "FAST", "5"]
    result = here.launch("annotated.py", "--arg", "on=no", "--arg", "lr=abc")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == "Error: --arg lr=abc: main() takes lr as a float.\n"


def test_a_script_runs_with_the_arguments_after_two_hyphens(here: HereInstead) -> None:
    (here.folder.path / "script.py").write_text(
        "import argparse, sys\nfrom executors import current_replica\n"
        "def main():\n    print('main is not called')\n"
        "if __name__ == '__main__':\n"
        "    parser = argparse.ArgumentParser()\n    parser.add_argument('--lr', type=float)\n"
        "    print(sys.argv[0], parser.parse_args().lr, current_replica().rank)\n"
    )
    result = here.launch("script.py", "--run-id", "mine", "--json", "--", "--lr", "1e-3")
    assert [row["result"] for row in result.json["replicas"]] == [None, None]
    assert here.replicas("logs", "mine").stdout.splitlines() == ["[0] script.py 0.001 0", "[1] script.py 0.001 1"]
    (here.folder.path / "flat.py").write_text("import sys\nprint('flat', sys.argv[1:])\n")
    assert here.launch("flat.py", "--run-id", "flat", n=1).code == 0, "a file without a function main runs as a script"
    assert here.replicas("logs", "flat").stdout == "[0] flat []\n"
    assert here.launch("missing.py", "--", "--json").stdout == "", (
        "--json after two hyphens is an argument of the script"
    )


def test_the_summary_of_the_lowest_rank_is_shown_in_place_of_the_results(here: HereInstead) -> None:
    result = here.launch("job:report")
    assert "Summary of rank 0." in result.stdout
    assert "Summary of rank 1." not in result.stdout
    assert "ranks 0" not in result.stdout.partition("Summary")[2]


def test_json_is_one_document_on_stdout_and_progress_goes_to_stderr(here: HereInstead) -> None:
    result = here.launch("job:fail", "--arg", "ranks=[1]", "--timeout", "60", "--json")
    document = result.json
    (run,) = list_runs()
    assert document["run_id"] == run.run_id
    assert (document["exit_code"], document["timeout_s"], document["world_size"]) == (1, 60.0, 2)
    assert [row["status"] for row in document["replicas"]] == ["succeeded", "failed"]
    assert document["replicas"][0]["result"] == "fine"
    assert document["replicas"][1]["error"].endswith("RuntimeError: it went wrong")
    assert "rank 1 failed (exception: RuntimeError: it went wrong)" in result.stderr


def test_failed_ranks_make_exit_code_1_and_the_command_reports_why_and_where_their_logs_are(here: HereInstead) -> None:
    (here.folder.path / "mixed.py").write_text(
        "import job\nfrom executors import current_replica\n"
        "def main():\n    return job.die(2) if current_replica().rank == 2 else job.fail([1])\n"
    )
    result = here.launch("mixed.py", "--run-id", "mine", n=4)
    assert result.code == 1
    assert re.search(
        r"\nRuntimeError: it went wrong \(rank 1 of 4, job.py:\d+\)\n(  File .*\n(    .*\n)+)+"
        r"  Log: replicas logs mine --rank 1\n",
        result.stdout,
    )
    assert "Rank 2 failed (signal): was ended by signal 9 (SIGKILL)." in result.stdout
    assert 'ranks 0, 3: "fine"' in result.stdout
    assert "last words" in here.replicas("logs", "mine", "--rank", 1).stdout


def test_only_time_limits_make_exit_code_124(here: HereInstead) -> None:
    result = here.launch("job:hang", "--timeout", "0.5")
    assert result.code == 124
    assert "time limit 0.5 s" in result.stdout
    assert "failed (timeout)" in result.stdout


def test_a_failure_that_a_new_start_does_not_help_makes_exit_code_93_and_its_reason_is_printed(
    here: HereInstead,
) -> None:
    result = here.launch("job:fail", "--arg", "ranks=[0, 1]", "--restarts", "3", "--run-id", "mine", n=2)
    assert result.code == 93, result
    why = "stopped: ranks 0-1 failed the same way before their first step: RuntimeError: it went wrong"
    assert why in result.stdout
    assert "Starting the run again unchanged does not help (exit code 93)." in result.stdout
    status = here.replicas("status", "mine")
    assert why in status.stdout
    document = here.replicas("status", "mine", "--json").json
    assert (document["exit_code"], document["replicas"][0]["left"]) == (93, 3)


def test_a_full_disk_under_the_output_does_not_end_the_run_that_is_watched(folder: Folder) -> None:
    (folder.path / "patient.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def main():\n    while not Path('go').exists():\n        time.sleep(0.01)\n"
    )
    arguments = [*COMMAND, "launch", "patient.py:main", "--n", "1", "--run-id", "mine", *FAST]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(arguments, cwd=folder.path, stdout=full, stderr=subprocess.PIPE, text=True) as command,
    ):
        assert command.stderr is not None
        told = next(line for line in command.stderr if not line.endswith("…\n"))
        (folder.path / "go").touch()
        error = command.stderr.read()
    why = "No space left on device"
    assert told == f"Note: Lines of output are lost, because they cannot be written ({why}). The run continues.\n"
    assert attach("mine").status().status is ReplicaStatus.SUCCEEDED
    assert (command.returncode, error) == (1, f"Error: [Errno 28] {why}\n"), (
        "the command fails with the error of the full disk"
    )


def test_a_detached_run_continues_by_itself_and_values_of_its_environment_are_recorded_nowhere(
    folder: Folder, state_home: Path
) -> None:
    arguments = ("--arg", "name=TOKEN", "--env", "TOKEN=hunter2=x", "--detach", "--run-id", "by-itself")
    result = folder.launch("job:variable", *arguments)
    assert result.code == 0
    assert result.stdout.splitlines()[0] == "by-itself"
    assert "replicas logs by-itself -f" in result.stdout
    run = attach("by-itself")
    assert run.results() == ["hunter2=x"] * 2
    written = [path for path in state_home.rglob("*") if path.is_file() and path.name != "outcome.json"]
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    assert view_of(run).record.placements[0].env == ("TOKEN",)


def test_a_run_may_live_in_any_directory_and_its_id_alone_finds_it_again(here: HereInstead, tmp_path: Path) -> None:
    assert here.launch("job:main", "--rendezvous", tmp_path / "there", "--run-id", "away").code == 0
    assert (tmp_path / "there" / "away" / "run.json").is_file()
    assert here.replicas("status", "away", "--json").json["status"] == "succeeded"
    assert here.replicas("status", "away", "--rendezvous", tmp_path / "there").code == 0
    assert here.replicas("status", (tmp_path / "there").as_uri() + "/away").code == 0


def test_a_third_partys_class_is_a_backend(here: HereInstead, folder: Folder) -> None:
    launch = ("launch", "job:main", "--n", 2, "--backend", "support.third_party:PopenExecutor")
    planned = here.replicas(*launch, "--dry-run").json
    assert planned["request"] == {
        "n_replicas": 2,
        "entrypoint": "executors.worker.call",
        "entrypoint_args": {"run": planned["url"]},
        "gpu": None,
        "timeout": 3600,
    }
    result = folder.replicas(*launch, "--json", environ={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert result.code == 0, result
    assert [row["result"] for row in result.json["replicas"]] == [{"rank": 0}, {"rank": 1}]
    assert result.json["timeout_s"] == 3600


def test_without_an_entrypoint_the_default_task_of_the_installation_runs(here: HereInstead) -> None:
    planned = here.replicas("launch", "--n", 2, "--dry-run", "--option", "preload=[]")
    assert planned.json["run_record"]["entrypoint"] == "diloco.demo:train"


USAGE = [
    (["--n", "2", "--arg", "foo"], "--arg 'foo' is not of the form NAME=VALUE. Write, for example, --arg steps=500"),
    (["--n", "2", "--arg", "a=1", "--arg", "a=2"], "--arg a=… is given twice. Remove one of them."),
    (["--n", "2", "--env", "=x"], "--env '=x' is not of the form NAME=VALUE"),
    (["--n", "0"], "n must be at least 1, got n=0."),
    (["--n", "two"], "--n"),
    ([], "--n"),
    (["--n", "2", "--backend", "loca"], "'loca'. Did you mean 'local'? Known: "),
    (["--n", "2", "--backend", "no.such:Thing"], "Backend 'no.such:Thing' cannot be loaded"),
    (["--n", "2", "--option", "max_paralel=2"], "option 'max_paralel'. Did you mean 'max_parallel'?"),
    (["--n", "2", "--option", "max_parallel=two"], "takes int | None, got 'two'."),
    (["--n", "2", "--option", "preload=torch"], "preload must be a list of modules such as ['torch'], or 'auto', got"),
    (["--n", "2", "--option", "max_parallel=0"], "max_parallel must be at least 1"),
    (["--n", "2", "--arg", "tims=3"], "main() takes no argument 'tims'. Did you mean 'times'?"),
    (["--n", "2", "--run-id", "Not Good"], "Bad run id 'Not Good'"),
    (["--n", "2", "--timeout", "0"], "timeout must be more than 0 seconds"),
    (["--n", "2", "--timeout", "-1"], "--timeout '-1' is not a duration"),
    (["--n", "2", "--timeout", "5 minutes"], "'5 minutes' is not a duration. Give seconds, or "),
    (["--n", "2", "--secret", "NOT_SET"], "The secret 'NOT_SET' is not set"),
    (["--n", "2", "--rendezvous", "memory://x"], "exists only in this process"),
    (["--n", "2", "--rendezvous", "ftp://x"], "No store has the scheme 'ftp'"),
    (["--n", "2", "--rendezvous", "s3://"], "An S3 store needs a bucket"),
    (["--n", "2", "--rendezvous", "s3:/bucket"], "as in 's3://bucket'"),
    (["--n", "2", "--restarts", "3,oon=1"], "restarts: No reason or setting 'oon'. Did you mean 'oom'?"),
    (["--n", "2", "--start-timeout", "soon"], "start_timeout must be a duration of at least 0.001 s, as in 20m"),
    (["--n", "2", "--hang-timeout", "2m:1m"], "must be at least 0.001 s and at most the hard limit, got '2m:1m'"),
    (["--n", "2", "--gather", "5m"], "(--gather) has an effect only with min_replicas="),
    (["--n", "2", "--rendezvous", "/proc/nothing"], "/proc/nothing"),
    (["--n", "2", "--", "--lr", "1"], "is run as a script, as in 'train.py' or 'pkg.train', got 'job:main'."),
    (["--n", "2", "--restarts", "many"], "restarts must begin with a number, as in 3, 3/1h or 3,oom=0, got 'many'."),
    (["--n", "2", "--max-cost", "3"], "Backend 'local' has no price for these replicas, so max_cost=3 (--max-cost) "),
    (["--n", "2", "--max-cost", "-1"], "max_cost must be a number of US dollars above 0, got max_cost=-1.0."),
    (["--n", "2", "--spares", "1"], "Backend 'local' has no spares. Remove spares (--spares), or use one "),
    (["--n", "2", "--volume", "data:/x"], "Backend 'local' has no volumes. Remove --volume."),
    (["--n", "2", "--volume", "data"], "--volume 'data' is not of the form NAME:/path. Write, for "),
    (["--n", "2", "--min-replicas", "5"], "min_replicas must be from 1 to n=2, got min_replicas=5."),
    (["--n", "2", "--from-step", "3"], "needs from_run (--from), the run with this step: got from_step=3"),
    (["--n", "2", "--tracker", "foo"], "Known: mlflow, trackio, wandb. For your own tracker, give 'pkg.mod:Class'."),
    (["--n", "2", "--backend", "kubernetes"], "No backend named 'kubernetes'. Did you mean 'k8s'?"),
    (["--n", "2", "--backend", "no.such:T"], "Install it, or run the command in the folder that has it."),
    (["--n", "2", "--backend", "local:1,modal"], "must name each of several backends once, with its number"),
    (["--n", "2", "--rendezvous", "job.py"], "/job.py: "),
    (["--n", "2", "--config", "no.toml"], "no.toml' cannot be read: No such file or directory. Check its path."),
    (["--nn", "2"], "--nn"),
    (["--n", "2", "-o", "max_parallel=2"], "-o"),
]  # fmt: skip


def test_a_mistake_is_one_error_with_exit_code_2_and_nothing_is_written(here: HereInstead, state_home: Path) -> None:
    calls = [(["job:main", *arguments], message) for arguments, message in USAGE]
    calls += [(["job:mian", "--n", "2"], "Did you mean 'main'?"), (["no:main", "--n", "2"], "there is no module 'no'")]
    calls += [(["", "--n", "2"], "Bad entrypoint ''"), (["job:main", "--n", "2", "--profile", ""], "No profile ''")]
    for arguments, message in calls:
        for more in ([], ["--dry-run"]):
            options = [] if any("preload" in argument for argument in arguments) else FAST[:2]
            result = here.replicas("launch", *arguments, *options, *more)
            assert (result.code, result.stdout) == (2, ""), arguments
            assert result.stderr.startswith("Error: "), arguments
            assert message in result.stderr, result.stderr
            assert "Preparing" not in result.stderr or not {"ftp://x", "s3://"} & {*arguments}, (
                "the check finds the mistake before the launch is prepared"
            )
            assert not list(state_home.rglob("run.json")), arguments


def test_with_json_a_mistake_is_a_document_as_well(here: HereInstead) -> None:
    result = here.replicas("launch", "job:main", "--n", 2, "--backend", "loca", "--json")
    assert result.code == 2
    assert result.json["kind"] == "UnknownBackendError"
    assert result.stderr == f"Error: {result.json['error']}\n"


def test_a_dry_run_shows_the_exact_request_and_leaves_no_trace(folder: Folder, state_home: Path) -> None:
    rendezvous = folder.path / "rendezvous"
    rendezvous.mkdir()
    before = sorted(folder.path.rglob("*"))
    arguments = ("--arg", "times=3", "--env", "TOKEN=hunter2", "--rendezvous", rendezvous, "--timeout", "90")
    more = (
        "--restarts",
        "3/1h,oom=0",
        "--hang-timeout",
        "2m",
        "--start-timeout",
        "20m",
        "--run-id",
        "planned",
        "--dry-run",
    )
    result = folder.launch("job:main", *arguments, *more, PYTHONDONTWRITEBYTECODE="1")
    assert result.code == 0, result
    request = result.json["request"]
    assert request["spec"]["run_id"] == "planned"
    assert request["spec"]["env"] == {"TOKEN": "***"}
    assert set(request["environ"].values()) == {"***"}
    assert (request["timeout_s"], request["term_grace_s"]) == (90.0, 0.5)
    asked = {"restarts": "3/3600s,oom=0", "hang_timeout": "2m", "start_timeout": "20m"}
    for settings in (request["spec"]["settings"], result.json["run_record"]["settings"]):
        assert {name: settings[name] for name in asked} == asked
    assert result.json["task_record"]["args"] == {"times": 3}
    assert result.json["run_record"]["placements"][0]["env"] == ["TOKEN"]
    assert "hunter2" not in result.stdout + result.stderr
    assert sorted(folder.path.rglob("*")) == before
    assert not state_home.exists()


def test_a_dry_run_shows_the_records_of_a_launch_and_refuses_a_taken_id(here: HereInstead) -> None:
    call = ("job:main", "--run-id", "same", "--arg", "times=2", "--seed", "3")
    planned = here.launch(*call, "--dry-run").json
    assert here.launch(*call).code == 0
    run = attach("same")
    own = {"created_at", "launcher_pid"}
    assert {k: v for k, v in json.loads(bytes(view_of(run).store.get("same/run.json"))).items() if k not in own} == {
        k: v for k, v in planned["run_record"].items() if k not in own
    }
    assert json.loads(bytes(view_of(run).store.get("same/task/task.json"))) == planned["task_record"]
    assert planned["url"] == run.url
    for more in ((), ("--dry-run",)):
        result = here.launch("job:main", "--run-id", "same", *more)
        assert (result.code, "Run 'same' exists" in result.stderr) == (2, True), result
    assert "`replicas status same`" in here.launch("job:main", "--run-id", "same").stderr
