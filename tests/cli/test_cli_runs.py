"""`replicas ls`, `status`, `logs`, `wait`, `collect`, `cancel` and `rm` on runs that were launched before."""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import COMMAND, Folder, HereInstead
from support.patience import lasting

from diloco.rendezvous.claims import claim
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore
from executors import LocalProcessExecutor, ReplicaHandle, ReplicaStatus, Run, attach, launch
from executors.run.resume import resume
from executors.run.run import view_of
from executors.testing import eventually


def ended(local: LocalProcessExecutor, function: str, n: int = 2, run_id: str = "mine", **args: object) -> Run:
    run = launch(local, f"job:{function}", n, args=args, run_id=run_id)
    assert run.wait(60)
    return run


def hanging(local: LocalProcessExecutor, n: int = 2, run_id: str = "mine") -> Run:
    run = launch(local, "job:hang", n, run_id=run_id)
    eventually(lambda: all("hanging" in run.logs(rank) for rank in range(n)))
    return run


TRAINS = """
import torch
from diloco import DiLoCo
from executors import current_replica

def main():
    torch.set_num_threads(1)
    with DiLoCo(torch.nn.Linear(64, 64), inner_steps=1, total_steps=1) as diloco:
        diloco.step()
    current_replica().report(step=1, loss=1.0)
"""


def test_ls_shows_every_run_the_newest_last(here: HereInstead, local: LocalProcessExecutor) -> None:
    assert "replicas launch" in here.replicas("ls").stdout
    assert here.replicas("ls", "--json").json["runs"] == []
    (here.folder.path / "script.py").write_text("print('hello')\n")
    launch(local, "script.py", 1, run_id="first").wait()
    ended(local, "fail", 1, "second", ranks=[0])
    with hanging(local, 1, "third"):
        head, *lines = here.replicas("ls").stdout.splitlines()
        assert head.split() == ["run", "backend", "n", "entrypoint", "status", "age"]
        assert [line.split()[:5] for line in lines] == [
            ["first", "local", "1", "script.py", "succeeded"],
            ["second", "local", "1", "job:fail", "failed"],
            ["third", "local", "1", "job:hang", "running"],
        ]
        assert [row["status"] for row in here.replicas("ls", "--json").json["runs"]] == [
            "succeeded",
            "failed",
            "running",
        ]
        assert "2 older" in here.replicas("ls", "--last", 1).stdout


def test_ls_of_a_rendezvous_shows_the_runs_there(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path
) -> None:
    launch(local, "job:main", 1, run_id="away", rendezvous=tmp_path / "there").wait()
    rows = here.replicas("ls", "--rendezvous", tmp_path / "there", "--json").json["runs"]
    assert [row["run_id"] for row in rows] == ["away"]


def test_status_shows_the_report_of_each_rank_and_the_reason_of_its_failure(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    ended(local, "report", 2, "fine")
    lines = [line.split() for line in here.replicas("status", "fine").stdout.splitlines()]
    assert ["0", "succeeded", "3", "7", "0.5000", "1.2", "s"] in lines
    ended(local, "fail", 2, "bad", ranks=[1])
    result = here.replicas("status", "bad")
    assert result.code == 0
    assert "1 succeeded, 1 failed" in result.stdout
    assert "\nRuntimeError: it went wrong (rank 1 of 2" in result.stdout
    assert result.stdout.count("it went wrong") == 1
    document = here.replicas("status", "bad", "--json").json
    assert (document["status"], document["replicas"][1]["reason"]) == ("failed", "exception")


def test_status_counts_the_ranks_that_joined_a_run(here: HereInstead, local: LocalProcessExecutor) -> None:
    with hanging(local, 2, "open-to-all") as run:
        store = RetryingStore(view_of(run).store, clock=time.monotonic, tolerance=lasting(0.0))
        keys = Keys(run.run_id, "main")
        ranks = [claim(store, keys, None, 2, nonce, lambda: None).rank for nonce in ("one", "another")]
        assert ranks == [2, 3]
        assert "2 running, 2 joined" in here.replicas("status", "open-to-all").stdout
        assert here.replicas("status", "open-to-all", "--json").json["joined"] == 2


def test_the_error_for_a_missing_run_rank_or_file_names_it(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "main", 2, "brave-otter-7f3a")
    nearest = "No run 'brave-oter-7f3a' is known on this machine. Did you mean 'brave-otter-7f3a'?"
    calls = [([verb, "brave-oter-7f3a"], nearest) for verb in ("status", "logs", "wait", "collect", "cancel", "rm")]
    calls += [(["status", "No Such Run"], "Error: Bad run id 'No Such Run'")]
    calls += [
        (
            ["status", "any", "--option", "a=1"],
            "--option a does not name its backend. Add --backend NAME, or write --option NAME.a=….",
        )
    ]
    calls += [(["resume", "any", "--arg", "a=1"], "A run keeps the arguments of its launch.")]
    calls += [(["collect", "brave-otter-7f3a", "--out", "job.py"], "Cannot write to 'job.py'")]
    calls += [(["logs", "brave-otter-7f3a", "-n", "-1"], "--lines must be at least 0, got -1.")]
    calls += [
        ([*verb, "brave-otter-7f3a", "--rank", "7"], "has no rank 7, but ranks 0-1.")
        for verb in (["logs"], ["logs", "-f"], ["logs", "--rank", "0"], ["cancel"])
    ]
    for arguments, message in calls:
        result = here.replicas(*arguments)
        assert (result.code, message in result.stderr) == (2, True), (arguments, result)


def test_logs_of_all_ranks_are_led_by_the_rank_and_those_of_one_are_not(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    ended(local, "main", 3, times=3)
    for arguments, lines in (
        (["-n", 1], "[0] hello 2 of rank 0\n[1] hello 2 of rank 1\n[2] hello 2 of rank 2\n"),
        (["--rank", 1, "-n", 2], "hello 1 of rank 1\nhello 2 of rank 1\n"),
        (["--rank", 0, "--rank", 2, "-n", 1], "[0] hello 2 of rank 0\n[2] hello 2 of rank 2\n"),
    ):
        assert here.replicas("logs", "mine", *arguments).stdout == lines


def test_following_logs_ends_with_the_run(folder: Folder, local: LocalProcessExecutor) -> None:
    run = hanging(local)
    with folder.started("logs", "mine", "-f") as command:
        command.prints("[1] hanging")
        command.prints("[0] hanging")
        run.cancel()
        assert command.ends() == 0


def test_a_closed_pipe_is_silent_and_a_full_disk_under_the_output_is_one_error(
    folder: Folder, local: LocalProcessExecutor
) -> None:
    def in_shell(command: str) -> tuple[int, str, str]:
        # this would hide output that is flushed at exit
        line = f"unset PYTHONUNBUFFERED; {' '.join(COMMAND)} {command}"
        done = subprocess.run(["bash", "-c", line], cwd=folder.path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    ended(local, "main", 1, times=20_000)
    assert in_shell("logs mine -n 20000 | head -n 1") == (0, "[0] hello 0 of rank 0\n", "")
    for verb in ("ls", "ls --json", "status mine", "collect mine --json", "wait mine"):
        assert in_shell(f"{verb} | true; exit ${{PIPESTATUS[0]}}") == (141, "", ""), verb
    code, _, error = in_shell("status never-was --json | true; exit ${PIPESTATUS[0]}")
    assert (code, error.count("\n"), error.startswith("Error: No run 'never-was'")) == (141, 1, True)
    for verb in ("ls", "logs mine", "collect mine --json"):
        assert in_shell(f"{verb} >/dev/full") == (1, "", "Error: [Errno 28] No space left on device\n"), verb
    code, said, _ = in_shell("status never-was --json 2>/dev/full")
    assert (code, json.loads(said)["kind"]) == (2, "RunNotFoundError"), (
        "the error is a document on stdout, and stderr is empty"
    )


@pytest.mark.parametrize(
    ("verb", "most_kib"),
    [("report mine --out mine.html", 1), ("export mine --csv mine.csv", 0), ("model mine --out m", 1)],
)
def test_a_file_that_has_no_room_is_a_failure_and_no_bad_usage(
    folder: Folder, local: LocalProcessExecutor, verb: str, most_kib: int
) -> None:
    (folder.path / "trains.py").write_text(TRAINS)
    launch(local, "trains:main", 1, run_id="mine").results()
    line = f"ulimit -f {most_kib}; {' '.join(COMMAND)} {verb}"
    done = subprocess.run(["bash", "-c", line], cwd=folder.path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert re.fullmatch(r"Error: Cannot write to '.*': File too large\.", done.stderr.splitlines()[-1]), done


def test_a_huge_log_is_printed_in_bounded_memory(folder: Folder, local: LocalProcessExecutor, state_home: Path) -> None:
    ended(local, "main", 2)
    for log in state_home.rglob("output.log"):
        with open(log, "r+b") as file:
            file.truncate(8 << 30)  # without a single newline
    done = subprocess.run(
        [*COMMAND, "logs", "mine"],
        cwd=folder.path,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        check=True,
    )
    assert 4 << 20 <= len(done.stdout) <= 10 << 20
    assert b"these are the last 4 MiB; `replicas collect --out DIR` writes all." in done.stderr


def test_wait_ends_with_the_run_and_its_exit_code(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "fail", 2, "bad", ranks=[1])
    result = here.replicas("wait", "bad")
    assert (result.code, "RuntimeError: it went wrong (rank 1 of 2" in result.stdout) == (1, True)
    ended(local, "report", 2, "fine")
    result = here.replicas("wait", "fine", "--json")
    assert (result.code, result.json["summary"]) == (0, "Summary of rank 0.")


def test_wait_and_collect_give_up_after_their_time_limit_and_the_run_continues(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    with hanging(local) as run:
        for verb in ("wait", "collect"):
            result = here.replicas(verb, "mine", "--timeout", "0.2")
            assert result.code == 124
            assert "Not finished after 0.2 s. The run continues: replicas wait mine" in result.stdout
            assert "More:" not in result.stdout
            assert here.replicas(verb, "mine", "--timeout", "0.2", "--json").json["exit_code"] == 124
        assert run.status().status is ReplicaStatus.RUNNING


def test_collect_prints_a_row_for_each_replica(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "fail", 2, ranks=[1])
    result = here.replicas("collect", "mine")
    assert result.code == 1
    rows = [json.loads(line) for line in result.stdout.splitlines()[:2]]
    assert [(row["status"], row["result"]) for row in rows] == [("succeeded", "fine"), ("failed", None)]
    assert "RuntimeError: it went wrong (rank 1 of 2" in result.stdout


def test_collect_writes_results_logs_and_artifacts_into_a_folder(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    ended(local, "keep", 2)
    out = here.folder.path / "deep" / "out"
    for _ in range(2):  # also over existing files
        result = here.replicas("collect", "mine", "--out", out, "--json")
        assert (result.code, result.json["out"]) == (0, str(out))
    assert result.json["replicas"][0]["result"] == {"loss": None}  # strict JSON has no NaN
    assert json.loads((out / "results.json").read_text())["run_id"] == "mine"
    for rank in ("0", "1"):
        assert (out / rank / "artifacts" / "model" / "weights.txt").read_text() == "kept"
        assert (out / rank / "output.log").read_text() == "saved\n"


def test_collect_keeps_other_files_in_the_folder_and_writes_all_or_nothing(
    folder: Folder, local: LocalProcessExecutor
) -> None:
    ended(local, "keep", 2)
    out = folder.path / "out"
    (out / "0").mkdir(parents=True)
    (out / "0" / "notes.txt").write_text("mine")

    def too_small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    command = [*COMMAND, "collect", "mine", "--out", "out"]
    done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, check=False, preexec_fn=too_small)
    assert done.returncode == 1
    assert done.stderr == f"Error: Cannot write '{out}/results.json': File too large. No file was written to 'out'.\n"
    assert [path.name for path in out.rglob("*")] == ["0", "notes.txt"]
    assert folder.replicas("collect", "mine", "--out", "out").code == 0
    assert (out / "0" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == ["0", "1", "results.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from executors.cli import main
from executors.cli import collect, whole_folder

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv.pop(1) == "while it copies":
    collect._copy_log = die
else:
    replace, moved = Path.replace, []
    def replace_two(path, target):
        moved.append(target)
        die() if len(moved) > 2 else replace(path, target)
    Path.replace = replace_two
sys.exit(main())
"""


@pytest.mark.parametrize("at", ["while it copies", "while it moves"])
def test_a_killed_collect_leaves_no_hidden_files_and_a_file_that_names_the_incomplete_run(
    folder: Folder, local: LocalProcessExecutor, at: str
) -> None:
    ended(local, "main", 2)
    out = folder.path / "out"
    out.mkdir()
    (out / "results.json").write_text("mine")
    command = [sys.executable, "-c", KILLED, at, "collect", "mine", "--out", "out"]
    assert subprocess.run(command, cwd=folder.path, check=False).returncode == -signal.SIGKILL
    assert (out / "results.json").read_text() == "mine"
    assert len([*out.glob(".replicas-collect-*")]) == 1
    assert (out / "INCOMPLETE.txt").exists() == (at == "while it moves")
    if at == "while it moves":
        assert "replicas collect mine" in (out / "INCOMPLETE.txt").read_text()
    assert folder.replicas("collect", "mine", "--out", "out").code == 0
    assert sorted(path.name for path in out.iterdir()) == ["0", "1", "results.json"]


def test_a_file_in_the_way_of_collect_is_named_and_stays(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "keep", 1)
    out = here.folder.path / "out"
    (out / "0" / "output.log").mkdir(parents=True)
    told = here.replicas("collect", "mine", "--out", out)
    assert told.code == 1
    assert (
        f"'{out}/0/output.log': a file or folder of another kind is at this path. No file was written to '{out}'."
        in told.stderr
    )
    assert [path.name for path in out.rglob("*")] == ["0", "output.log"]


def test_collect_names_a_log_that_cannot_be_read_and_reports_that_by_its_exit_code(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path
) -> None:
    ended(local, "keep", 2)
    (log, *_) = sorted(state_home.rglob("output.log"))
    log.unlink()
    log.mkdir()  # a file that no user can read, like a private file of another user
    told = here.replicas("collect", "mine", "--out", here.folder.path / "out")
    assert told.code == 1
    why = f"{log} cannot be read (Is a directory); this is the end that its outcome kept"
    assert f"Skipped the log 'output.log' of rank 0: {why}" in told.stdout
    assert (here.folder.path / "out" / "1" / "output.log").read_text() == "saved\n"


def test_the_exit_code_of_collect_shows_that_an_artifact_cannot_be_read(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path
) -> None:
    ended(local, "keep", 2)
    (kept, *_) = sorted(path for path in state_home.rglob("artifacts/**/*") if path.is_file())
    kept.unlink()
    kept.symlink_to("gone")
    told = here.replicas("collect", "mine", "--out", here.folder.path / "out")
    assert told.code == 1
    assert "Skipped the artifact" in told.stdout


def test_collect_brings_the_logs_of_all_attempts(here: HereInstead, local: LocalProcessExecutor) -> None:
    run = ended(local, "fail", 2, ranks=[1])
    resume(run).wait(60)
    here.replicas("collect", "mine", "--out", "out")
    logs = sorted(path for path in (here.folder.path / "out").rglob("*.log"))
    assert [str(log.relative_to(here.folder.path / "out")) for log in logs] == [
        "0/output.log",
        "1/output-attempt-0.log",
        "1/output.log",
    ]
    assert all("last words" in log.read_text() for log in logs[1:])


def test_numbers_that_json_lacks_are_null_with_a_note_wherever_json_is_printed(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    run = ended(local, "keep", 1)
    assert math.isnan(run.results()[0]["loss"])
    where = "replicas[0].result.loss is null in this document, because JSON has no nan."
    for arguments in (["collect", "mine", "--json"], ["wait", "mine", "--json"]):
        told = here.replicas(*arguments)
        assert told.json["replicas"][0]["result"] == {"loss": None}
        assert told.json["notes"] == [where]
        assert told.stderr.count("is null in this document") == 1
    told = here.replicas("collect", "mine")
    assert json.loads(told.stdout)["result"] == {"loss": None}
    assert told.stderr == f"Note: {where}\n"
    assert here.replicas("collect", "mine", "--out", "out").code == 0
    assert json.loads((here.folder.path / "out" / "results.json").read_text())["notes"] == [where]


def test_letters_are_shown_as_they_are_where_the_terminal_has_them(folder: Folder, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1, result="schön \x9b31m")
    for encoding, text in (("utf-8", "schön"), ("ascii", "sch\\u00f6n")):
        for arguments in (["collect", "mine"], ["collect", "mine", "--json"], ["wait", "mine"]):
            told = folder.replicas(*arguments, environ={"PYTHONIOENCODING": encoding})
            assert f'"{text} \\u009b31m"' in told.stdout, (encoding, told)


def test_other_numbers_that_replicas_report_have_columns(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "report_more", 1)
    for arguments, columns in (
        ([], "lr gnorm mfu"),
        (["--columns", "tokens,lr"], "tokens lr"),
        (["--columns", "nothing"], "nothing"),
        (["--columns", ""], ""),
    ):
        (head,) = [line for line in here.replicas("status", "mine", *arguments).stdout.splitlines() if "rank " in line]
        assert head.split() == ["rank", "status", "step", *columns.split()], arguments
    row = here.replicas("status", "mine", "--json").json["replicas"][0]
    assert row["reported"] == {"step": 1, "lr": 0.0001, "gnorm": None, "mfu": 0.5, "tokens": 3e6}
    assert "<th>tokens</th>" in attach("mine")._repr_html_()


def test_the_attempt_is_shown_as_soon_as_one_rank_has_a_second(here: HereInstead, local: LocalProcessExecutor) -> None:
    run = ended(local, "fail", 2, ranks=[1])
    assert "rank  status\n" in here.replicas("status", "mine").stdout
    resume(run).wait(60)
    lines = [line.split() for line in here.replicas("status", "mine").stdout.splitlines()]
    assert lines[3:6] == [["rank", "attempt", "status"], ["0", "0", "succeeded"], ["1", "1", "failed", "exception"]]


def test_a_resumed_run_is_headed_by_its_own_time_limit(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "fail", 1, ranks=[0])
    assert "on local, time limit 50 s\n" in here.replicas("resume", "mine", "--timeout", "50").stdout


def test_each_distinct_failure_is_reported_once_with_the_users_last_frames(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    told = here.launch("job:fail", "--arg", "ranks=[0, 1, 2]", n=4)
    assert told.code == 1
    lines = told.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("RuntimeError: it went wrong (ranks 0-2")]
    assert re.fullmatch(r'  File ".*/job.py", line \d+, in fail', lines[at + 1])
    assert lines[at + 2].strip() == "raise RuntimeError(message)"
    assert lines[at + 3].startswith("  Log: replicas logs ")
    assert told.stdout.count("raise RuntimeError") == 1
    assert told.stdout.count("it went wrong") <= 2, "the failure is shown when it happens and at the end"


def test_collect_writes_a_whole_log_however_long(here: HereInstead, local: LocalProcessExecutor) -> None:
    ended(local, "main", 1, say="x" * 1000, times=9000)
    assert here.replicas("collect", "mine", "--out", here.folder.path / "out").code == 0
    log = (here.folder.path / "out" / "0" / "output.log").read_text()
    assert (log.count("\n"), len(log) > 9_000_000) == (9000, True)


def test_cancel_ends_one_rank_or_all_and_names_them(here: HereInstead, local: LocalProcessExecutor) -> None:
    run = hanging(local, 3)
    for arguments, line in (
        (["--rank", 1], "Cancelled mine: rank 1. Now 2 running, 1 cancelled.\n"),
        ([], "Cancelled mine: ranks 0, 2. Now 3 cancelled.\n"),
        ([], "Nothing to cancel in mine: 3 cancelled.\n"),
    ):
        result = here.replicas("cancel", "mine", *arguments)
        assert (result.code, result.stdout) == (0, line)
    assert run.status().status is ReplicaStatus.CANCELLED
    assert here.replicas("wait", "mine").code == 130


def test_cancel_names_ranks_that_the_backend_takes_its_time_to_end(
    here: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = LocalProcessExecutor.cancel

    def cancel_but_the_last(self: LocalProcessExecutor, handle: ReplicaHandle) -> None:
        if handle.rank < 2:
            cancel(self, handle)

    with hanging(local, 3), monkeypatch.context() as patch:
        patch.setattr(LocalProcessExecutor, "cancel", cancel_but_the_last)
        told = here.replicas("cancel", "mine", "--rank", 2)
    assert told.stdout == "Cancelled mine: rank 2 (still ending). Now 3 running.\n"


def test_rm_deletes_runs_and_refuses_one_that_still_runs(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path
) -> None:
    ended(local, "main", 1, "first")
    ended(local, "main", 1, "second")
    with hanging(local, 1, "busy"):
        result = here.replicas("rm", "first", "busy", "never-was", "second")
        assert result.code == 2
        assert [line.split()[:2] for line in result.stdout.splitlines()] == [
            ["Removed", "first"],
            ["Removed", "second"],
        ]
        assert "Run 'busy' still runs. Cancel it first" in result.stderr
        assert "No run 'never-was'" in result.stderr
        assert attach("busy").status().status is ReplicaStatus.RUNNING
    assert not (state_home / "replicas" / "first").exists()
    assert here.replicas("rm", "busy").code == 0
    assert here.replicas("ls", "--json").json["runs"] == []


FAILS = """
import os, time
from executors import current_replica

def fail():
    if current_replica().member == 1:
        raise ValueError("no luck")
    time.sleep(60)
"""


def test_the_processes_of_a_failed_replica_are_in_status_and_on_the_page_and_the_first_that_failed_is_named(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    (here.folder.path / "fails.py").write_text(FAILS)
    run = launch(local, "fails:fail", 1, run_id="mine", procs=2)
    assert run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome is not None
    ends = [
        f"member 0 of 2: pid {outcome.members[0].pid}, exit code 143",
        f"member 1 of 2 failed first: pid {outcome.members[1].pid}, exit code 1: ValueError: no luck",
    ]
    lines = here.replicas("status", "mine", "-v").stdout.splitlines()
    assert lines[lines.index("rank 0: 2 processes") :][1:3] == [f"  {end}" for end in ends]
    (row,) = here.replicas("status", "mine", "--json").json["replicas"]
    assert (row["procs"], row["member"]) == (2, 1)
    assert [(each["exit_code"], each["error"]) for each in row["members"]] == [(143, None), (1, "ValueError: no luck")]
    assert here.replicas("report", "mine", "--json").json["failures"][0]["members"] == ends
    assert all(end in run._repr_html_() for end in ends)
