"""`Run` over the local executor: waiting, results and their errors, attaching, listing, cancelling."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.processes import is_alive
from support.runs import all_gone, folder_of, pid_of

from executors import LocalProcessExecutor, Run, attach, launch, list_runs
from executors.errors import (
    ReplicaCancelledError,
    ReplicaError,
    ReplicaFailedError,
    ReplicaLostError,
    ReplicaTimeoutError,
    RunExistsError,
    RunNotFoundError,
    StoreError,
)
from executors.run.run import view_of
from executors.store import Store
from executors.store.url import impatient_store
from executors.testing import eventually
from executors.testing.executor_contract import task


def test_wait_returns_whether_all_replicas_have_ended(local: LocalProcessExecutor) -> None:
    run = launch(local, task("hang_on"), 2, args={"rank": 1})
    assert run.wait(timeout=0) is False
    assert run.wait(timeout=0.2) is False
    run.cancel()
    assert run.wait() is True
    assert run.wait(timeout=0) is True


def test_one_can_wait_for_some_of_the_replicas_and_for_each_in_turn(local: LocalProcessExecutor) -> None:
    run = launch(local, task("hang_on"), 3, args={"rank": 1})
    assert run.wait(n=2)
    assert not run.wait(0.1, n=3)
    ended = attach(run.run_id).as_completed()
    first = [next(ended), next(ended)]
    assert {(outcome.rank, outcome.result) for outcome in first} == {(0, "done"), (2, "done")}
    assert first == sorted(first, key=lambda outcome: outcome.finished_at)
    run.cancel()
    assert [(outcome.rank, outcome.reason) for outcome in ended] == [(1, "cancelled")]
    assert len(list(run.as_completed())) == 3
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"has 3 replicas, got n={n}"):
            run.wait(n=n)


def test_a_process_that_waits_is_shown_how_far_the_run_is(
    local: LocalProcessExecutor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch(local, tasks.step_on, 2, args={"path": str(tmp_path / "go")}, progress=True)
    eventually(lambda: all("steps_per_s" in state.reported for state in run.status().replicas), "rates are measured")
    for state in run.status().replicas:
        assert state.progress is not None
        assert state.progress.share == state.reported["step"] / 1e6
        assert state.left_s is not None
    assert run.status().left_s is not None
    run.show()
    assert f"or the command `replicas wait {run.run_id}`." in capsys.readouterr().err
    tasks.mark(tmp_path / "go")
    assert [outcome.rank for outcome in run.as_completed()] in ([0, 1], [1, 0])
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"replicas: {run.run_id}: 2 succeeded: step ")


def test_outcomes_never_raises_and_returns_the_known_outcomes(local: LocalProcessExecutor) -> None:
    with launch(local, task("hang_on"), 2, args={"rank": 1}) as run:
        eventually(lambda: [str(outcome.status) for outcome in run.outcomes()] == ["succeeded", "running"])
        done, running = run.outcomes()
        assert (done.result, done.exit_code) == ("done", 0)
        assert (running.result, running.reason, running.exit_code) == (None, None, None)
    assert [str(outcome.status) for outcome in run.outcomes()] == ["succeeded", "cancelled"]


def test_an_outcome_has_the_rank_the_attempt_the_process_and_the_times(local: LocalProcessExecutor) -> None:
    run = launch(local, tasks.rank, 1)
    pid = pid_of(run.handles[0])
    run.wait()
    (outcome,) = run.outcomes()
    assert (outcome.rank, outcome.attempt, outcome.pid) == (0, 0, pid)
    assert outcome.host == os.uname().nodename
    assert outcome.started_at is not None
    assert outcome.started_at <= outcome.finished_at


def test_the_error_is_of_the_earliest_failure_and_notes_the_others(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint(first: str) -> None:
        import os
        import time

        from executors import current_replica

        rank = current_replica().rank
        if rank == 2:
            raise KeyError("the root cause")
        while not os.path.exists(first):
            time.sleep(0.01)
        if rank == 0:
            raise RuntimeError("a follower")
        os._exit(5)

    run = launch(local, entrypoint, 3, args={"first": str(tmp_path / "first")})
    eventually(lambda: run.outcomes()[2].status == "failed")
    (tmp_path / "first").write_text("")
    with pytest.raises(ReplicaFailedError, match=r"KeyError: 'the root cause'") as caught:
        run.results()
    assert (caught.value.rank, caught.value.attempt) == (2, 0)
    assert caught.value.outcome == run.outcomes()[2]
    notes = "\n".join(caught.value.__notes__)
    assert "Rank 0" in notes
    assert "a follower" in notes
    assert "Rank 1" in notes
    assert "no_result" in notes


def test_a_cancelled_replica_is_not_the_root_cause(local: LocalProcessExecutor) -> None:
    run = launch(local, task("hang"), 3)
    pids = [pid_of(handle) for handle in run.handles]
    run.cancel(rank=0)
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: run.outcomes()[1].status == "failed")
    run.cancel()
    with pytest.raises(ReplicaLostError) as caught:
        run.results()
    assert caught.value.rank == 1


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[ReplicaError]]] = {
    "raised": (task("fail"), {"message": "x"}, {}, ReplicaFailedError),
    "no result": (task("leave"), {"code": 0, "how": "os"}, {}, ReplicaFailedError),
    "no JSON": (task("no_json"), {}, {}, ReplicaFailedError),
    "timeout": (task("hang"), {}, {"timeout": 1}, ReplicaTimeoutError),
    "signal": ("support.tasks:die_by", {"signal_number": 9}, {}, ReplicaLostError),
}


@pytest.mark.parametrize(("entrypoint", "args", "options", "kind"), KINDS.values(), ids=KINDS.keys())
def test_every_reason_has_its_error(
    local: LocalProcessExecutor,
    entrypoint: str,
    args: dict[str, Any],
    options: dict[str, Any],
    kind: type[ReplicaError],
) -> None:
    with pytest.raises(ReplicaError) as caught:
        launch(local, entrypoint, 1, args=args, **options).results()
    assert type(caught.value) is kind
    assert caught.value.rank == 0
    if kind is ReplicaTimeoutError:
        assert isinstance(caught.value, TimeoutError)


# --- leaving the block


def test_leaving_the_block_cancels_the_replicas_that_still_run(local: LocalProcessExecutor) -> None:
    with launch(local, task("hang_on"), 2, args={"rank": 1}) as run:
        pid = pid_of(run.handles[1])
        eventually(lambda: run.outcomes()[0].status == "succeeded")
    assert not is_alive(pid)
    assert [(outcome.status, outcome.result) for outcome in run.outcomes()] == [
        ("succeeded", "done"),
        ("cancelled", None),
    ]
    with pytest.raises(ReplicaCancelledError):
        run.results()


def test_an_exception_in_the_block_is_passed_on_after_cancelling(local: LocalProcessExecutor) -> None:
    pids: list[int] = []

    def leave_the_block() -> None:
        with launch(local, task("hang"), 1) as run:
            pids.append(pid_of(run.handles[0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_the_block()
    assert not is_alive(*pids)


# --- finding runs again


def test_a_run_is_found_again_by_id_and_by_address(local: LocalProcessExecutor, tmp_path: Path) -> None:
    here = launch(local, task("echo"), 2, args={"a": 1})
    there = launch(local, task("echo"), 2, args={"a": 2}, rendezvous=str(tmp_path / "it's there, ä 100%"))
    for run, a in ((here, 1), (there, 2)):
        expected = [{"rank": rank, "args": {"a": a}} for rank in range(2)]
        assert run.results() == expected
        for again in (
            attach(run.run_id),
            attach(run.url),
            attach(run.url + "/"),
            attach(run.run_id, rendezvous=view_of(run).store.url),
            attach(str(folder_of(view_of(run).store.url) / run.run_id)),
        ):
            assert again.run_id == run.run_id
            assert again.results() == expected
            assert again.handles == run.handles
            assert again.logs() == run.logs()


def test_two_runs_at_the_same_time_stay_apart(local: LocalProcessExecutor) -> None:
    runs = [launch(local, task("echo"), 2, args={"number": number}) for number in range(4)]
    assert len({run.run_id for run in runs}) == 4
    for number, run in enumerate(runs):
        assert [result["args"]["number"] for result in run.results()] == [number] * 2


def test_exactly_one_of_two_launches_with_the_same_id_wins(local: LocalProcessExecutor) -> None:
    ends: list[Any] = []

    def go(number: int) -> None:
        try:
            ends.append(launch(local, lambda n: n, 1, args={"n": number}, run_id="contested"))
        except RunExistsError as error:
            ends.append(error)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    won = [end for end in ends if isinstance(end, Run)]
    assert len(ends) == 4
    assert len(won) == 1
    assert won[0].wait(timeout=60)
    assert attach("contested").results() == won[0].results()


def test_runs_are_listed_oldest_first_wherever_they_are(local: LocalProcessExecutor, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    places = (None, elsewhere, None, elsewhere)
    ids = [launch(local, tasks.rank, 1, rendezvous=rendezvous).run_id for rendezvous in places]
    assert [run.run_id for run in list_runs()] == ids
    assert [run.run_id for run in list_runs(elsewhere)] == [ids[1], ids[3]]
    (tmp_path / "empty").mkdir()
    assert list_runs(tmp_path / "empty") == []
    for run in list_runs():
        run.wait()


def test_a_run_that_is_not_known_is_named_with_the_nearest_one(local: LocalProcessExecutor, tmp_path: Path) -> None:
    launch(local, tasks.rank, 1, run_id="brave-otter-7f3a").wait()
    with pytest.raises(RunNotFoundError, match=r"brave-otter-7f3b.*Did you mean 'brave-otter-7f3a'\?"):
        attach("brave-otter-7f3b")
    with pytest.raises(RunNotFoundError, match="no-such-run"):
        attach("no-such-run", rendezvous=str(tmp_path))
    with pytest.raises(RunNotFoundError, match="no-such-run"):
        attach(f"{tmp_path.as_uri()}/no-such-run")
    with pytest.raises((ValueError, RunNotFoundError), match="Not An Id"):
        attach("Not An Id")


def test_a_list_continues_when_one_store_is_gone(local: LocalProcessExecutor, tmp_path: Path) -> None:
    import shutil

    kept = launch(local, tasks.rank, 1)
    gone = launch(local, tasks.rank, 1, rendezvous=str(tmp_path / "gone"))
    for run in (kept, gone):
        run.wait()
    shutil.rmtree(tmp_path / "gone")
    assert [run.run_id for run in list_runs()] == [kept.run_id]
    with pytest.raises(RunNotFoundError):
        attach(gone.run_id)


def test_a_run_at_a_store_that_does_not_answer_has_its_place_in_a_list(
    local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [launch(local, tasks.rank, 1, rendezvous=where) for where in (None, str(tmp_path / "away"), None)]
    for run in runs:
        run.wait()

    def opened(url: str, answer_s: float) -> Store:
        if "away" in url:
            raise StoreError("It does not answer.", url=url)
        return impatient_store(url, answer_s)

    monkeypatch.setattr("executors.run.lookup.impatient_store", opened)
    assert [run.run_id for run in list_runs()] == [run.run_id for run in runs]


def test_a_record_that_is_not_json_is_an_error_that_names_it(local: LocalProcessExecutor) -> None:
    run = launch(local, tasks.rank, 1)
    run.wait()
    eventually(lambda: not is_alive(run.handles[0].metadata["supervisor_pid"]))
    view_of(run).store.put(f"{run.run_id}/replicas/0000/0/outcome.json", b"{ half")
    with pytest.raises(ReplicaLostError, match=r"outcome\.json"):
        attach(run.run_id).results()


# --- the texts of a run


def test_the_keys_of_a_run_are_those_of_the_documentation(local: LocalProcessExecutor, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    rendezvous = str(tmp_path / "store")
    run = launch(local, tasks.report_and_keep, 1, args={"path": str(tmp_path / "file")}, rendezvous=rendezvous)
    run.wait()
    assert [entry.key.removeprefix(f"{run.run_id}/") for entry in view_of(run).store.list("")] == [
        "metrics/0000/0/000000.jsonl",
        "replicas/0000/0/artifacts/model/weights.bin",
        "replicas/0000/0/handle.json",
        "replicas/0000/0/heartbeat.json",
        "replicas/0000/0/outcome.json",
        "replicas/0000/0/output.log",
        "replicas/0000/0/started.json",
        "run.json",
        "task/callable.pkl",
        "task/task.json",
    ]


def test_the_record_of_a_run_has_its_user_its_entrypoint_and_its_time(local: LocalProcessExecutor) -> None:
    run = launch(local, task("echo"), 2, args={"a": 1}, env={"TOKEN": "hunter2"}, seed=3)
    run.wait()
    record = view_of(run).record
    assert (record.backend, record.world_size, record.entrypoint) == ("local", 2, task("echo"))
    assert (record.placements[0].env, record.settings.seed, record.launcher_pid) == (("TOKEN",), 3, os.getpid())
    assert "hunter2" not in str(record)


def test_the_table_of_a_run_escapes_the_texts_of_replicas(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        raise ValueError("<script>alert(1)</script>")

    run = launch(local, entrypoint, 1)
    run.wait()
    page = run._repr_html_()
    assert "<table" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


def test_removing_a_run_takes_all_of_it_and_only_when_it_has_ended(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    other = launch(local, tasks.rank, 1)
    run = launch(local, task("hang"), 1)
    with pytest.raises(RunExistsError, match="still runs"):
        run.remove()
    run.cancel()
    other.wait()
    run.remove()
    assert [left.run_id for left in list_runs()] == [other.run_id]
    assert not (state_home / "replicas" / run.run_id).exists()


def test_a_run_that_was_deleted_is_not_written_to_when_its_replica_ends(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    def entrypoint(folder: str) -> None:
        import os
        import shutil

        shutil.rmtree(folder)
        os._exit(3)

    run = launch(local, entrypoint, 1, args={"folder": str(tmp_path / "runs")}, rendezvous=tmp_path / "runs")
    all_gone([run.handles[0].metadata["supervisor_pid"]])
    assert not (tmp_path / "runs").exists()


def test_cancelling_one_rank_names_a_rank_that_is_not_there(local: LocalProcessExecutor) -> None:
    with launch(local, task("hang"), 2) as run:
        for rank in (2, -1):
            with pytest.raises(ValueError, match=f"has no rank {rank}, but ranks 0-1"):
                run.cancel(rank=rank)
        assert not run.status().is_terminal
