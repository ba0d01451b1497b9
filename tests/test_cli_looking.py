"""`replicas ls`, `status`, `logs`, `wait`, `collect`, `cancel` and `rm` on runs that were launched before."""

from __future__ import annotations

import json
import resource
import subprocess
import time
from pathlib import Path

import pytest
from cli_of_tests import COMMAND, Folder, HereInstead

from diloco.keys import Keys
from diloco.membership import claim
from diloco.patience import PatientStore
from executors import LocalProcessExecutor, ReplicaHandle, ReplicaStatus, Run, attach, launch
from executors.testing import eventually


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")
    return Folder(tmp_path / "work")


def ended(local: LocalProcessExecutor, function: str, n: int = 2, run_id: str = "mine", **args: object) -> Run:
    run = launch(local, f"job:{function}", n, args=args, run_id=run_id)
    assert run.wait(60)
    return run


def hanging(local: LocalProcessExecutor, n: int = 2, run_id: str = "mine", **args: object) -> Run:
    run = launch(local, "job:hang", n, args=args, run_id=run_id)
    eventually(lambda: all("hanging" in run.logs(rank) for rank in args.get("ranks") or range(n)))  # type: ignore[attr-defined]
    return run


# ls


def test_ls_shows_every_run_the_newest_last(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1, "first")
    ended(local, "fail", 1, "second", ranks=[0])
    with hanging(local, 1, "third"):
        told = folder.replicas("ls")
        assert told.stdout.splitlines()[0].split() == ["run", "backend", "n", "entrypoint", "status", "age"]
        rows = [line.split()[:5] for line in told.stdout.splitlines()[1:]]
        assert rows == [
            ["first", "local", "1", "job:main", "succeeded"],
            ["second", "local", "1", "job:fail", "failed"],
            ["third", "local", "1", "job:hang", "running"],
        ]
        assert [row["status"] for row in folder.replicas("ls", "--json").json] == ["succeeded", "failed", "running"]
        assert "2 older" in folder.replicas("ls", "--last", 1).stdout


def test_ls_without_runs_says_how_to_start_one(folder: Folder) -> None:
    assert "replicas launch" in folder.replicas("ls").stdout
    assert folder.replicas("ls", "--json").json == []


def test_ls_of_a_rendezvous_shows_the_runs_there(folder: Folder, local: LocalProcessExecutor, tmp_path: Path) -> None:
    launch(local, "job:main", 1, run_id="away", rendezvous=tmp_path / "there").wait()
    rows = folder.replicas("ls", "--rendezvous", tmp_path / "there", "--json").json
    assert [row["run_id"] for row in rows] == ["away"]


# status


def test_status_shows_what_each_rank_reported_and_why_it_failed(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "report", 2, "fine")
    lines = [line.split() for line in folder.replicas("status", "fine").stdout.splitlines()]
    assert ["0", "succeeded", "3", "7", "0.5000", "1.2", "s"] in lines
    ended(local, "fail", 2, "bad", ranks=[1])
    told = folder.replicas("status", "bad")
    assert told.code == 0
    assert "1 succeeded, 1 failed" in told.stdout
    assert "Rank 1 failed (exception): RuntimeError: it went wrong" in told.stdout
    document = folder.replicas("status", "bad", "--json").json
    assert (document["status"], document["replicas"][1]["reason"]) == ("failed", "exception")


def test_status_counts_the_ranks_that_joined_a_run(folder: Folder, local: LocalProcessExecutor) -> None:
    with hanging(local, 2, "open-to-all") as run:
        store = PatientStore(run.store, clock=time.monotonic, error_patience_s=0.0)
        ranks = [
            claim(store, Keys(run.run_id, "main"), None, 2, nonce, lambda: None).rank for nonce in ("one", "another")
        ]
        assert ranks == [2, 3]
        assert "2 running, 2 joined" in folder.replicas("status", "open-to-all").stdout
        assert folder.replicas("status", "open-to-all", "--json").json["joined"] == 2


@pytest.mark.parametrize("verb", ["status", "logs", "wait", "collect", "cancel", "rm"])
def test_a_run_that_is_not_known_is_an_error_that_names_the_nearest(
    folder: Folder, local: LocalProcessExecutor, verb: str
) -> None:
    ended(local, "main", 1, "brave-otter-7f3a")
    told = folder.replicas(verb, "brave-oter-7f3a")
    assert (told.code, told.stdout) == (2, "")
    assert "No run 'brave-oter-7f3a' is known on this machine. Did you mean 'brave-otter-7f3a'?" in told.stderr


def test_a_malformed_run_id_is_an_error(folder: Folder) -> None:
    told = folder.replicas("status", "No Such Run")
    assert told.code == 2
    assert told.stderr.startswith("Error: Bad run id 'No Such Run'")


# logs


def test_logs_of_all_ranks_are_led_by_the_rank_and_those_of_one_are_not(
    folder: Folder, local: LocalProcessExecutor
) -> None:
    ended(local, "main", 3, times=3)
    assert folder.replicas("logs", "mine", "-n", 1).stdout == "".join(
        f"[{rank}] hello 2 of rank {rank}\n" for rank in range(3)
    )
    assert folder.replicas("logs", "mine", "--rank", 1, "-n", 2).stdout == "hello 1 of rank 1\nhello 2 of rank 1\n"
    both = folder.replicas("logs", "mine", "--rank", 0, "--rank", 2, "-n", 1).stdout
    assert both == "[0] hello 2 of rank 0\n[2] hello 2 of rank 2\n"


def test_a_rank_that_is_not_there_is_an_error(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 2)
    for more in ([], ["-f"], ["--rank", "0"]):
        told = folder.replicas("logs", "mine", "--rank", 7, *more)
        assert told.code == 2
        assert "has the ranks 0 to 1, got rank=7." in told.stderr


def test_following_logs_ends_with_the_run(folder: Folder, local: LocalProcessExecutor) -> None:
    run = hanging(local)
    with folder.started("logs", "mine", "-f") as command:
        command.prints("[1] hanging")
        command.prints("[0] hanging")
        run.cancel()
        assert command.ends() == 0


def test_a_closed_pipe_is_silent(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1, times=20_000)
    shell = f"{' '.join(COMMAND)} logs mine -n 20000 2>errors | head -n 1"
    done = subprocess.run(["bash", "-c", shell], cwd=folder.path, capture_output=True, text=True, check=True)
    assert done.stdout == "[0] hello 0 of rank 0\n"
    assert (folder.path / "errors").read_text() == ""


def test_a_full_disk_under_the_output_is_one_error(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1)
    for verb in ("ls", "logs mine", "collect mine --json"):
        shell = f"{' '.join(COMMAND)} {verb} >/dev/full"
        done = subprocess.run(["bash", "-c", shell], cwd=folder.path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_a_huge_log_is_printed_in_bounded_memory(folder: Folder, local: LocalProcessExecutor, state_home: Path) -> None:
    ended(local, "main", 2)
    for log in state_home.rglob("output.log"):
        with open(log, "r+b") as file:
            file.truncate(8 << 30)  # without a single newline
    done = subprocess.run(
        [*COMMAND, "logs", "mine"],
        cwd=folder.path,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        check=True,
    )
    assert 4 << 20 <= len(done.stdout) <= 10 << 20


# wait


def test_wait_ends_with_the_run_and_its_exit_code(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "fail", 2, "bad", ranks=[1])
    told = folder.replicas("wait", "bad")
    assert told.code == 1
    assert "Rank 1 failed" in told.stdout
    ended(local, "report", 2, "fine")
    told = folder.replicas("wait", "fine", "--json")
    assert told.code == 0
    assert told.json["summary"] == "Summary of rank 0."


def test_wait_gives_up_when_its_time_is_over_and_the_run_goes_on(folder: Folder, local: LocalProcessExecutor) -> None:
    with hanging(local) as run:
        told = folder.replicas("wait", "mine", "--timeout", "0.2")
        assert told.code == 124
        assert "the run goes on: replicas wait mine" in told.stdout
        assert run.status().status is ReplicaStatus.RUNNING


# collect


def test_collect_prints_a_row_for_each_replica(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "fail", 2, ranks=[1])
    told = folder.replicas("collect", "mine")
    assert told.code == 1
    rows = [json.loads(line) for line in told.stdout.splitlines()[:2]]
    assert [row["status"] for row in rows] == ["succeeded", "failed"]
    assert rows[0]["result"] == "fine"


def test_collect_brings_results_logs_and_artifacts_into_a_folder(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "keep", 2)
    out = folder.path / "deep" / "out"
    for _ in range(2):  # also over what is there
        told = folder.replicas("collect", "mine", "--out", out, "--json")
        assert told.code == 0
        assert told.json["out"] == str(out)
    assert told.json["replicas"][0]["result"] == {"loss": None}  # strict JSON has no NaN
    assert json.loads((out / "results.json").read_text())["run_id"] == "mine"
    for rank in ("0", "1"):
        assert (out / rank / "artifacts" / "model" / "weights.txt").read_text() == "kept"
        assert (out / rank / "output.log").read_text() == "saved\n"


def test_collect_brings_a_whole_log_however_long(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1, say="x" * 1000, times=9000)
    assert folder.replicas("collect", "mine", "--out", folder.path / "out").code == 0
    log = (folder.path / "out" / "0" / "output.log").read_text()
    assert log.count("\n") == 9000
    assert len(log) > 9_000_000


def test_collect_says_when_it_cannot_write(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1)
    told = folder.replicas("collect", "mine", "--out", "job.py")
    assert told.code == 2
    assert "Cannot write to 'job.py'" in told.stderr


# cancel and rm


def test_cancel_ends_one_rank_or_all_and_says_which(folder: Folder, local: LocalProcessExecutor) -> None:
    run = hanging(local, 3)
    assert folder.replicas("cancel", "mine", "--rank", 1).stdout == (
        "Cancelled mine: rank 1. Now 2 running, 1 cancelled.\n"
    )
    assert folder.replicas("cancel", "mine").stdout == "Cancelled mine: ranks 0, 2. Now 3 cancelled.\n"
    told = folder.replicas("cancel", "mine")
    assert (told.code, told.stdout) == (0, "Nothing to cancel in mine: 3 cancelled.\n")
    assert run.status().status is ReplicaStatus.CANCELLED
    assert folder.replicas("cancel", "mine", "--rank", 5).code == 2
    assert folder.replicas("wait", "mine").code == 130


def test_cancel_names_ranks_that_the_backend_takes_its_time_to_end(
    folder: Folder, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = HereInstead(folder, monkeypatch, capsys)
    cancel = LocalProcessExecutor.cancel

    def cancel_but_the_last(self: LocalProcessExecutor, handle: ReplicaHandle) -> None:
        if handle.rank < 2:
            cancel(self, handle)

    with hanging(local, 3), monkeypatch.context() as patch:
        patch.setattr(LocalProcessExecutor, "cancel", cancel_but_the_last)
        assert here.replicas("cancel", "mine", "--rank", 2).stdout == (
            "Cancelled mine: rank 2 (still ending). Now 3 running.\n"
        )
        assert here.replicas("cancel", "mine").stdout == (
            "Cancelled mine: ranks 0-1 and rank 2 (still ending). Now 1 running, 2 cancelled.\n"
        )


def test_rm_deletes_runs_and_refuses_one_that_still_runs(
    folder: Folder, local: LocalProcessExecutor, state_home: Path
) -> None:
    ended(local, "main", 1, "first")
    ended(local, "main", 1, "second")
    with hanging(local, 1, "busy"):
        told = folder.replicas("rm", "first", "busy", "never-was", "second")
        assert told.code == 2
        assert [line.split()[:2] for line in told.stdout.splitlines()] == [["Removed", "first"], ["Removed", "second"]]
        assert "Run 'busy' still runs. Cancel it first" in told.stderr
        assert "No run 'never-was'" in told.stderr
        assert attach("busy").status().status is ReplicaStatus.RUNNING
    assert not (state_home / "replicas" / "first").exists()
    assert folder.replicas("rm", "busy").code == 0
    assert folder.replicas("ls", "--json").json == []
