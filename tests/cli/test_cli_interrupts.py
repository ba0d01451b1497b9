"""The effect of Ctrl-C and SIGTERM on the command, and the output on a terminal."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli import FAST, Folder, HereInstead, Terminal
from support.fake_jobs import FakeExecutor, Machines
from support.runs import log_of

from executors import LocalProcessExecutor, ReplicaStatus, attach, launch, list_runs
from executors.errors import StoreError
from executors.restarts.decision_log import DecisionLog
from executors.run.canceller import Canceller
from executors.run.run import view_of
from executors.testing import eventually


def is_hanging(run_id: str) -> bool:
    run = attach(run_id)
    return all("hanging" in run.logs(rank) for rank in range(view_of(run).world_size))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: signal.Signals(number).name
)
def test_one_interrupt_cancels_the_run_reports_that_and_waits_for_the_end(folder: Folder, number: int) -> None:
    with folder.started("launch", "job:hang", "--n", 2, "--run-id", "mine", *FAST) as command:
        command.prints("running")
        eventually(lambda: is_hanging("mine"))
        command.interrupt(number)
        assert command.ends() == 130
        assert "Cancelling, and waiting for the replicas to end." in command.output
        assert re.search(r"ranks 0-1 cancelled|rank [01] cancelled", command.output)
    run = attach("mine")
    assert run.status().status is ReplicaStatus.CANCELLED
    kinds = [entry.kind for entry in DecisionLog(view_of(run).store, "mine").read()]
    assert kinds.count("cancel") == 1, "one interrupt writes one cancel order"


def test_a_second_interrupt_exits_at_once_and_running_replicas_are_killed(folder: Folder) -> None:
    options = ("--option", "preload=[]", "--option", "term_grace_s=600")
    with folder.started("launch", "job:hang", "--n", 2, "--arg", "deaf=true", "--run-id", "mine", *options) as command:
        command.prints("running")
        eventually(lambda: is_hanging("mine"))
        command.interrupt()
        command.prints("Cancelling")
        command.interrupt()
        assert command.ends() == 130
        assert "Exiting now. The remaining replicas of mine are killed." in command.output
    eventually(lambda: attach("mine").status().is_terminal)
    assert attach("mine").status().status is ReplicaStatus.CANCELLED


def test_an_interrupt_before_the_run_has_started_leaves_nothing_behind(folder: Folder) -> None:
    (folder.path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\nPath('importing').touch()\ntime.sleep(60)\ndef main(): ...\n"
    )
    with folder.started("launch", "slow.py", "--n", 2, *FAST) as command:
        eventually((folder.path / "importing").exists)
        command.interrupt()
        assert command.ends() == 130
        assert "Cancelled before the run had started." in command.output
    assert list_runs() == []


@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["in time", "when the patience is over"])
def test_an_interrupt_cancels_a_run_whose_service_rejects_every_question(
    machines: Machines, here: HereInstead, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr("executors.backends.jobs.sdk.FIRST_PAUSE_S", 0.0)  # each look asks the service
    monkeypatch.setattr("executors.patience.SCALE", scale)
    struck = threading.Event()

    def strike() -> bool:
        if not struck.is_set():
            struck.set()
            os.kill(os.getpid(), signal.SIGINT)
        return True

    def reject() -> None:
        eventually(lambda: list_runs() and "hanging" in attach("mine", executor=FakeExecutor()).logs(0))
        machines.fail("state", "rejected", times=None, when=strike)

    thread = threading.Thread(target=reject)
    thread.start()
    options = ("--n", 1, "--backend", "support.fake_jobs:FakeExecutor", "--run-id", "mine")
    done = here.replicas("launch", "job:hang", *options)
    thread.join()
    assert done.code == 130, done
    assert "The run continues" not in done.stdout
    assert machines.living() == []
    machines.forgive()
    assert attach("mine", executor=FakeExecutor()).status().status is ReplicaStatus.CANCELLED


def test_an_interrupt_that_could_not_be_noted_at_once_is_noted_and_cancels(
    here: HereInstead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(canceller: Canceller) -> None:
        raise StoreError("gone for a moment")

    def strike() -> None:
        eventually(lambda: list_runs() and is_hanging("mine"))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Canceller, "request", unreachable)
    thread = threading.Thread(target=strike)
    thread.start()
    done = here.launch("job:hang", "--run-id", "mine")
    thread.join()
    assert done.code == 130, done
    kinds = [entry.kind for entry in DecisionLog(view_of(attach("mine")).store, "mine").read()]
    assert kinds.count("cancel") == 1


def test_ctrl_c_of_add_marks_all_it_added_where_the_backend_is_silent(machines: Machines, here: HereInstead) -> None:
    assert here.launch("job:hang", "--detach", "--run-id", "mine", n=1).code == 0

    def strike() -> None:
        eventually(lambda: len(machines.living()) == 2)
        run = attach("mine", executor=FakeExecutor())
        eventually(lambda: all("hanging" in run.logs(rank) for rank in (1, 2)))
        machines.fail("stop", "rejected", times=None)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    done = here.replicas("add", "mine", "--n", 2, "--backend", "support.fake_jobs:FakeExecutor")
    thread.join()
    assert (done.code, "Ranks 1-2 could not be cancelled: These may still run: " in done.stdout) == (
        130,
        True,
    ), done
    run = attach("mine", executor=FakeExecutor())
    assert [view_of(run).newest_attempt(rank).has("cancel.json") for rank in range(3)] == [False, True, True]
    barred = [entry.rank for entry in DecisionLog(view_of(run).store, "mine").read() if entry.kind == "cancel"]
    assert barred == [1, 2]
    machines.forgive()
    run.cancel()


def test_ctrl_c_while_watching_leaves_the_run_alone(folder: Folder) -> None:
    assert folder.launch("job:hang", "--detach", "--run-id", "mine").code == 0
    for verb in (["wait"], ["logs", "-f"], ["collect"]):
        with folder.started(*verb, "mine") as command:
            command.prints("hanging" if "logs" in verb else "running")
            command.interrupt()
            assert command.ends() == 130, verb
            assert "Traceback" not in command.output
            assert "logs" in verb or "Stopped watching. The run continues: replicas wait mine" in command.output
    assert attach("mine").status().status is ReplicaStatus.RUNNING
    attach("mine").cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_collect_leaves_nothing_beside_its_folder(
    folder: Folder, local: LocalProcessExecutor, state_home: Path, number: int
) -> None:
    assert launch(local, "job:main", 1, run_id="mine").wait(60)
    log = log_of(attach("mine").handles[0], state_home)
    log.unlink()
    os.mkfifo(log)  # a process that opens the pipe waits, because no process writes
    with folder.started("collect", "mine", "--out", "deep/out") as command:
        eventually(lambda: bool(list(folder.path.glob("deep/.replicas-collect-*/new/0/output.log"))))
        command.interrupt(number)
        assert command.ends() == 130, command.output
    writer = os.open(log, os.O_RDWR)  # releases the supervisor of the run, which may copy the log before it ends
    log.unlink()
    os.close(writer)
    assert list((folder.path / "deep").iterdir()) == []


def test_an_interrupted_wait_prints_one_document(here: HereInstead, monkeypatch: pytest.MonkeyPatch) -> None:
    assert here.launch("job:hang", "--detach", "--run-id", "mine").code == 0

    def interrupted(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("executors.cli.live.follow", interrupted)
    for verb in ("wait", "collect"):
        done = here.replicas(verb, "mine", "--json")
        assert (done.code, done.json["exit_code"], done.json["error"]) == (130, 130, "interrupted")
        assert here.replicas(verb, "mine").code == 130
    added = here.replicas("add", "mine", "--n", 1, "--option", "preload=[]", "--json")
    assert (added.code, added.json["exit_code"]) == (130, 130)
    monkeypatch.setattr("executors.run.run.Run.events", interrupted)
    assert here.replicas("events", "mine", "-f", "--json").stdout == "", (
        "the interrupted command prints no further document"
    )
    attach("mine").cancel()


@pytest.fixture
def on_terminal(folder: Folder) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: object, **size: int) -> Terminal:
        opened.append(Terminal(folder, *arguments, **size))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.close()


def test_a_terminal_shows_a_live_table_and_gets_its_cursor_back(on_terminal: Callable[..., Terminal]) -> None:
    terminal = on_terminal("launch", "job:report", "--n", 3, *FAST)
    assert terminal.ends() == 0
    rows = [" ".join(line.split()) for line in terminal.lines]  # releases of rich differ in the spaces between columns
    assert "rank status round step loss in rounds" in rows
    assert "1 succeeded 3 7 0.5000 1.2 s" in rows
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")


def test_a_table_higher_than_the_terminal_shows_failed_ranks_and_counts_the_rest(
    folder: Folder, on_terminal: Callable[..., Terminal]
) -> None:
    arguments = ("--n", 14, "--run-id", "many", *FAST)
    (folder.path / "mixed.py").write_text(
        "import job\nfrom executors import current_replica\n"
        "def main():\n    return job.fail([13]) if current_replica().rank == 13 else job.hang()\n"
    )
    terminal = on_terminal("launch", "mixed.py", *arguments, height=12)
    terminal.shows("  13  failed")
    terminal.shows("… and 7 more")
    terminal.type(b"\x03")
    assert terminal.ends() == 130
    assert any(line.startswith("   7  cancelled") for line in terminal.lines)  # the last table shows all


def test_ctrl_c_on_a_terminal_cancels_once_and_forces_twice(on_terminal: Callable[..., Terminal]) -> None:
    options = ("--option", "preload=[]", "--option", "term_grace_s=600")
    terminal = on_terminal("launch", "job:hang", "--n", 2, "--arg", "deaf=true", "--run-id", "mine", *options)
    terminal.shows("2 running")
    terminal.shows("Ctrl-C cancels the run.")
    eventually(lambda: is_hanging("mine"))
    terminal.type(b"\x03")
    terminal.shows("Cancelling, and waiting for the replicas to end. To exit now, press Ctrl-C again.")
    terminal.type(b"\x03")
    assert terminal.ends() == 130
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")
    eventually(lambda: attach("mine").status().is_terminal)


def test_ctrl_c_on_a_terminal_stops_watching_and_leaves_the_run_alone(
    folder: Folder, on_terminal: Callable[..., Terminal]
) -> None:
    assert folder.launch("job:hang", "--detach", "--run-id", "mine").code == 0
    for verb in (["wait"], ["logs", "-f"], ["collect"]):
        for n_times in (1, 2):
            terminal = on_terminal(*verb, "mine")
            terminal.shows("hanging" if "logs" in verb else "Ctrl-C stops watching; the run continues.")
            terminal.type(b"\x03" * n_times)
            assert terminal.ends() == 130, verb
            assert "Traceback" not in terminal.raw
            assert terminal.raw.rfind("\x1b[?25h") >= terminal.raw.rfind("\x1b[?25l"), (
                "the cursor of the terminal is visible again"
            )
    assert attach("mine").status().status is ReplicaStatus.RUNNING
    attach("mine").cancel()


def test_a_long_note_is_cut_where_the_terminal_ends(on_terminal: Callable[..., Terminal]) -> None:
    message = "a long story " * 20
    terminal = on_terminal("launch", "job:fail", "--n", 1, "--arg", "ranks=[0]", "--arg", f"message={message}", *FAST)
    assert terminal.ends() == 1
    row = next(line for line in terminal.lines if line.startswith("   0  failed"))
    assert row.rstrip().endswith("…")
    assert len(row.rstrip()) <= 90


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_ranks_that_were_added_and_the_table_reports_that(
    folder: Folder, on_terminal: Callable[..., Terminal], number: int
) -> None:
    assert folder.launch("job:hang", "--detach", "--run-id", "mine").code == 0
    terminal = on_terminal("add", "mine", "--n", 2, "--option", "preload=[]", "--option", "term_grace_s=0.5")
    terminal.shows("Ctrl-C ends ranks 2-3; the others continue.")
    terminal.send(number)
    assert terminal.ends() == 130
    assert "Cancelling ranks 2-3; the others continue." in terminal.lines
    assert "Stopped watching" not in terminal.raw
    states = [str(replica.status) for replica in attach("mine").status().replicas]
    assert states == ["running"] * 2 + ["cancelled"] * 2
    attach("mine").cancel()
