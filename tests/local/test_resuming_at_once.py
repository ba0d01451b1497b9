"""If two processes resume a run at the same time, each rank is started once, and the second process gets an error."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.cli import Folder, HereInstead
from support.overtaken import OvertakenLocally, OvertakenWhileLooking
from support.resumers import resume_at_once, resumers
from support.runs import launcher

from executors import LocalProcessExecutor, Run, attach, current_replica, launch
from executors.attempt import replica_key
from executors.backends.local.zygote_client import zygote
from executors.errors import AlreadyResumedError, LaunchError
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import exists
from executors.testing import eventually

N = 3
ROUNDS = 12
PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def fail_once(folder: str) -> int:
    """Fail in the first attempt. In a later attempt, write a line for each process."""
    replica = current_replica()
    if replica.attempt == 0:
        raise RuntimeError("not yet")
    with open(f"{folder}/{replica.rank}", "a") as file:
        file.write(f"{os.getpid()}\n")
    return replica.attempt


def hang_once(folder: str) -> int:
    """Hang in the first attempt, and behave like `fail_once` in a later one."""
    while current_replica().attempt == 0:
        time.sleep(60)
    return fail_once(folder)


def failed(folder: Path, n: int = N, executor: LocalProcessExecutor = PLAIN, run_id: str | None = None) -> Run:
    """Launch a run all of whose ranks fail in their first attempt."""
    folder.mkdir(exist_ok=True)
    run = launch(executor, fail_once, n, args={"folder": str(folder)}, run_id=run_id)
    eventually(functools.partial(has_ended, run), "all ranks have failed")
    return run


def has_ended(run: Run) -> bool:
    return run.status().is_terminal


def claims(run: Run) -> list[list[int]]:
    """Return for each rank the attempts that a process claimed."""
    return [
        [
            attempt
            for attempt in range(5)
            if exists(view_of(run).store, replica_key(run.run_id, rank, attempt, "started.json"))
        ]
        for rank in range(view_of(run).world_size)
    ]


def processes(folder: Path) -> dict[str, int]:
    """Return for each rank the number of processes that ran a later attempt."""
    return {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}


def test_ranks_that_two_processes_resume_at_once_are_started_once(tmp_path: Path) -> None:
    told = []
    with resumers(2) as started:
        for number in range(ROUNDS):
            folder = tmp_path / str(number)
            run = failed(folder)
            told.append(resume_at_once(started, run))
            again = attach(run.run_id)
            eventually(functools.partial(has_ended, again), "the run ends")
            assert again.results() == [1] * N, told[-1]
            assert claims(run) == [[0, 1]] * N, told[-1]
            assert processes(folder) == {str(rank): 1 for rank in range(N)}, told[-1]
            if number >= 2 and any("AlreadyResumedError" in line for line in told[-1]):
                break  # they met
    assert all("resumed" in said for said in told)
    losers = [line for said in told for line in said if line != "resumed"]
    assert all(
        re.search("is being resumed by another|are being resumed by another|no replica to resume", line)
        for line in losers
    )
    assert any("AlreadyResumedError" in line for line in losers), (
        "the two resumes did not run at the same time, so nothing was tested"
    )


def test_a_second_resume_starts_nothing_and_names_the_first_process(tmp_path: Path) -> None:
    run = failed(tmp_path / "pids", 1, OvertakenLocally(preload=()), run_id="otter")
    said = rf"Rank 0 of run 'otter' is being resumed by another process \(attempt 1, begun by \S+:{os.getpid()}\)"
    with pytest.raises(AlreadyResumedError, match=said):
        resume(run)
    assert attach("otter", executor=PLAIN).results() == [1]
    assert claims(run) == [[0, 1]]
    assert processes(tmp_path / "pids") == {"0": 1}


def test_a_resume_that_is_overtaken_in_part_continues_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OvertakenLocally, "by_ranks", [0, 2])
    run = failed(tmp_path / "pids", 4, OvertakenLocally(preload=(), max_parallel=1), run_id="otter")
    assert resume(run).results() == [1] * 4
    assert "replicas: Ranks 0, 2 of run 'otter' are being resumed by another process" in capsys.readouterr().err
    assert claims(run) == [[0, 1]] * 4
    assert processes(tmp_path / "pids") == {str(rank): 1 for rank in range(4)}


def test_the_command_that_comes_second_reports_that_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    here = HereInstead(Folder(tmp_path / "work"), monkeypatch, capsys)
    failed(tmp_path / "pids", 2, OvertakenLocally(preload=()), run_id="otter")
    told = here.replicas("resume", "otter", "--backend", "support.overtaken:OvertakenLocally")
    assert told.code == 2
    assert told.stderr.startswith("Error: Ranks 0-1 of run 'otter' are being resumed by another process (attempt 1, ")
    assert attach("otter", executor=PLAIN).results() == [1, 1]


def test_a_look_shows_the_attempt_that_was_begun_while_it_asked_the_backend(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    run = launch(PLAIN, hang_once, 1, args={"folder": str(tmp_path / "pids")}, run_id="otter")
    eventually(lambda: run.status().status == "running", "the replica hangs")
    look = Run(view_of(run).store, "otter", executor=OvertakenWhileLooking(preload=()))
    state = look.status().replicas[0]
    assert (state.status, state.attempt) in [("pending", 1), ("running", 1), ("succeeded", 1)]
    assert attach("otter").results() == [1]
    assert processes(tmp_path / "pids") == {"0": 1}


class InterruptedZygote:
    """The state after Ctrl-C during a launch, while the process that forks replicas still imports torch."""

    def request(self, message: object) -> object:
        raise KeyboardInterrupt


def test_a_resume_that_is_overtaken_and_interrupted_leaves_the_others_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, no attempt of the interrupted resume waits forever."""
    run = failed(tmp_path / "pids", 2, run_id="otter")
    monkeypatch.setattr(OvertakenLocally, "by_ranks", [0])
    interrupted = OvertakenLocally(preload=("json",))
    forker = {("json",): InterruptedZygote()}
    monkeypatch.setattr(
        "executors.backends.local.executor.zygote", lambda preload: forker.get(preload) or zygote(preload)
    )
    with pytest.raises(KeyboardInterrupt):
        resume(Run(view_of(run).store, "otter", executor=interrupted))
    again = attach("otter")
    eventually(lambda: again.status().replicas[0].status == "succeeded", "rank 0 of the other resume has succeeded")
    assert [(outcome.status, outcome.attempt) for outcome in again.outcomes()] == [("succeeded", 1), ("cancelled", 1)]
    assert resume(again).results() == [1, 2]


def test_a_resume_that_is_overtaken_and_refused_leaves_the_others_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed(tmp_path / "pids", 1, run_id="otter")
    refused = OvertakenLocally(preload=("no_such_module",))
    with pytest.raises(LaunchError, match="no_such_module"):
        resume(Run(view_of(run).store, "otter", executor=refused))
    assert attach("otter").results() == [1]


@pytest.mark.parametrize(
    ("dies", "found"),
    [
        ("start 1 launcher supervisor", [("failed", "lost", 1)] * 2),
        ("begin 2 launcher supervisor", [("failed", "lost", 1), ("failed", "exception", 0)]),
        ("start 1 launcher", [("cancelled", "cancelled", 1)] * 2),
    ],
)
def test_a_resumer_that_is_killed_before_it_starts_anything_holds_no_rank_up(
    tmp_path: Path, dies: str, found: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.restarts.restart_view.RESUME_S", 3.0)
    run = failed(tmp_path / "pids", 2, run_id="otter")
    with launcher("resume_and_die", run.run_id, dies) as resumer:
        resumer.wait(60)
    assert resumer.returncode == -signal.SIGKILL
    again = attach("otter")
    eventually(lambda: again.status().is_terminal, "no rank waits")
    assert [(str(row.status), row.reason, row.attempt) for row in again.outcomes()] == found
    assert processes(tmp_path / "pids") == {}
    assert resume(again).results() == [attempt + 1 for _, _, attempt in found]
    assert set(processes(tmp_path / "pids").values()) == {1}
