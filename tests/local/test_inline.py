"""The backend `inline`: a run whose one replica is the calling process."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import Folder, HereInstead, Terminal
from support.runs import lose_store

from executors import ReplicasError, attach, current_replica, launch, patience
from executors.attempt import Attempt
from executors.errors import ReplicaFailedError, ReplicaLostError, UnwritableStoreError
from executors.registry.run_index import local_store
from executors.replica import CONTRACT, set_current_replica
from executors.run.run import view_of
from executors.store import Data
from executors.store.file import FileStore
from executors.testing import eventually

BUSY = "    while True:\n        time.sleep(0.05)\n"


def test_the_entrypoint_runs_in_this_process_as_rank_0_of_a_run_that_is_on_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def entrypoint(steps: int) -> dict[str, object]:
        me = current_replica()
        me.report(step=steps, loss=0.5)
        print("printed here")
        return {"pid": os.getpid(), "rank": me.rank, "run": me.run_id, "token": os.environ["TOKEN"]}

    monkeypatch.delenv("TOKEN", raising=False)
    before, paths = dict(os.environ), [*sys.path]
    run = launch("inline", entrypoint, 1, args={"steps": 3}, env={"TOKEN": "secret"})
    assert run.results() == [{"pid": os.getpid(), "rank": 0, "run": run.run_id, "token": "secret"}]
    assert capsys.readouterr().out == "printed here\n"
    assert (dict(os.environ), sys.path) == (before, paths)
    (state,) = attach(run.run_id).status().replicas
    assert (state.status, state.reported) == ("succeeded", {"step": 3, "loss": 0.5})
    assert [row.values for row in run.metrics().numbers] == [{"step": 3, "loss": 0.5}]
    assert current_replica().is_alone, "after the run, this process is no longer a replica"


def test_a_look_from_another_thread_does_not_end_an_inline_run_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    put, found = FileStore.put_if_absent, list[str]()

    def put_and_look(store: FileStore, key: str, data: Data) -> bool:
        is_new = put(store, key, data)
        if key.endswith("/0/handle.json"):
            found.append(str(attach(key.split("/")[0]).status().replicas[0].status))
        return is_new

    monkeypatch.setattr(FileStore, "put_if_absent", put_and_look)
    assert launch("inline", lambda: 1, 1).results() == [1]
    assert found == ["pending"]


def test_an_exception_of_the_entrypoint_becomes_its_outcome_and_reaches_a_debugger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.last_exc", ValueError("an older error"), raising=False)

    def entrypoint() -> None:
        in_the_frame = 42
        raise ValueError(f"boom {in_the_frame}")

    run = launch("inline", entrypoint, 1)
    with pytest.raises(ReplicaFailedError, match="ValueError: boom 42"):
        run.results()
    printed = capsys.readouterr().err
    assert "ValueError: boom 42" in printed
    assert "executors/worker" not in printed, "the user's frames alone"
    assert vars(sys)["last_exc"] is sys.last_value, "sys.last_exc is set, which pdb.pm() reads since Python 3.12"
    trace = sys.last_traceback
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    assert trace.tb_frame.f_locals["in_the_frame"] == 42


def test_ctrl_c_is_passed_on_and_the_run_is_cancelled() -> None:
    def entrypoint() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch("inline", entrypoint, 1, run_id="interrupted")
    (outcome,) = attach("interrupted").outcomes()
    assert outcome.status == "cancelled"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_of_the_entrypoint_is_passed_on_although_its_store_refuses_writes(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def entrypoint() -> None:
        lose_store()
        raise kind("boom")

    monkeypatch.setattr(patience, "SCALE", 0.3 / patience.OUTCOME.seconds)
    monkeypatch.setattr(patience, "FIRST_WORD_S", math.inf)
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            launch("inline", entrypoint, 1, rendezvous=tmp_path)
    else:
        launch("inline", entrypoint, 1, rendezvous=tmp_path)
        assert type(sys.last_value) is kind
    printed = capsys.readouterr().err
    assert "its outcome cannot be recorded: Cannot create" in printed


def test_an_inline_run_whose_outcome_could_not_be_written_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    put_if_absent = FileStore.put_if_absent

    def refuse(store: FileStore, key: str, data: Data) -> bool:
        if key.endswith("outcome.json"):
            raise UnwritableStoreError("no space is left")
        return put_if_absent(store, key, data)

    monkeypatch.setattr(FileStore, "put_if_absent", refuse)
    monkeypatch.setattr(patience, "SCALE", 0.3 / patience.OUTCOME.seconds)
    run = launch("inline", "os:getpid", 1)
    assert run.wait(timeout=5)
    with pytest.raises(ReplicaLostError, match="its call has ended and it left no outcome"):
        run.results()
    run.cancel()


def test_a_run_that_was_left_while_it_wrote_its_last_has_ended_for_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("executors.worker.main._Worker.stop", leave)
    with pytest.raises(KeyboardInterrupt):
        launch("inline", "os:getpid", 1, run_id="left")
    outcome = Attempt(local_store(), "left", 0).outcome()
    assert outcome is not None, "the outcome is in the store, so other processes need not ask this one"
    assert outcome.reason == "lost"


def test_a_file_is_read_again_at_each_launch(tmp_path: Path) -> None:
    file = tmp_path / "edited_between.py"
    for version in (1, 22):
        file.write_text(f"def main():\n    return {version}\n")
        assert launch("inline", str(file), 1).results() == [version]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n must be 1 on the backend 'inline', which runs one replica in this process, got n=2. For more, "),
    ({"timeout": 60}, "Backend 'inline' has no timeout, got timeout=60"),
    ({"gpu": "H100"}, "Backend 'inline' has no gpu, got gpu='H100'"),
    ({"chaos": ["kill:rank=0,round=1"]}, "takes no chaos"),
    ({"secrets": ["NO_SUCH_SECRET_HERE"]}, "The secret 'NO_SUCH_SECRET_HERE' is not set"),
]


def test_unsupported_settings_are_refused_by_name(state_home: Path) -> None:
    for given, message in REFUSED:
        changed: Any = {"n": 1, **given}
        with pytest.raises(ValueError) as caught:
            launch("inline", "job:main", **changed)
        assert message in str(caught.value)
    assert {path.parent.name for path in state_home.rglob("*") if path.is_file()} <= {".preparing"}


def test_an_inline_run_ignores_a_policy_of_restarts_and_reports_that(capsys: pytest.CaptureFixture[str]) -> None:
    run = launch("inline", "os:getpid", 1, restarts=3)
    assert (
        "backend 'inline' restarts no replica: restarts, hang_timeout and start_timeout do not count"
        in capsys.readouterr().err
    )
    assert view_of(run).record.settings.restarts is None


def test_the_command_shows_a_debugger_and_continues(folder: Folder) -> None:
    (folder.path / "debugged.py").write_text("def main():\n    value = 6 * 7\n    breakpoint()\n    return value\n")
    terminal = Terminal(folder, "launch", "debugged.py", "--n", "1", "--backend", "inline", "--run-id", "mine")
    try:
        terminal.shows("(Pdb)")
        assert str(attach("mine").status().status) == "running"
        with pytest.raises(ReplicasError, match=r"runs inside process \d+ on .* Press Ctrl-C"):
            attach("mine").cancel()
        terminal.type(b"p value + 1000\n")
        terminal.shows("1042")
        terminal.type(b"c\n")
        assert terminal.ends() == 0
    finally:
        terminal.close()
    assert attach("mine").results() == [42]


def test_a_replica_whose_process_was_killed_is_lost(folder: Folder) -> None:
    with folder.started("launch", "job:hang", "--n", "1", "--backend", "inline", "--run-id", "mine") as command:
        command.prints("hanging")
        command.interrupt(signal.SIGKILL)
        command.ends()
    run = attach("mine")
    eventually(run.wait)
    assert run.outcomes()[0].reason == "lost"


def test_ctrl_c_in_the_command_cancels_an_inline_run(folder: Folder) -> None:
    # The sleeps are short, because a signal that arrives just before a sleep is handled only at its end.
    (folder.path / "busy.py").write_text("import time\ndef main():\n    print('busy', flush=True)\n" + BUSY)
    with folder.started("launch", "busy.py", "--n", "1", "--backend", "inline", "--run-id", "mine") as command:
        command.prints("busy\n")
        command.interrupt()
        assert command.ends() == 130
        assert "Cancelled." in command.output
    assert attach("mine").outcomes()[0].status == "cancelled"


def test_the_json_of_an_inline_run_is_one_document_although_the_entrypoint_prints(here: HereInstead) -> None:
    result = here.replicas("launch", "job:main", "--n", "1", "--backend", "inline", "--json")
    assert result.json["replicas"][0]["result"] == {"rank": 0}
    assert "hello 0 of rank 0" in result.stderr
    for name in CONTRACT:
        assert name not in os.environ
    set_current_replica(None)
    assert json.loads(result.stdout)["exit_code"] == 0
    (file := here.folder.path / "twice.py").write_text("def main():\n    raise ValueError('not yet')\n")
    here.replicas("launch", "twice.py", "--n", "1", "--backend", "inline", "--run-id", "again")
    file.write_text("def main():\n    print('printed')\n")
    result = here.replicas("resume", "again", "--json")
    assert (result.json["exit_code"], "printed" in result.stderr) == (0, True)


def test_the_command_prints_how_an_inline_run_ended_even_with_detach(here: HereInstead) -> None:
    (here.folder.path / "broken.py").write_text("def main():\n    raise ValueError('x')\n")
    result = here.replicas("launch", "broken.py", "--n", 1, "--backend", "inline", "--detach")
    assert result.code == 1, result
    assert "detached" not in result.stdout
    assert "ValueError: x (rank 0 of 1, broken.py:2)" in result.stdout
