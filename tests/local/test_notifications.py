"""Notifications of real local runs: one message for each event, also if replicas, supervisors or senders are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import Folder
from support.ended_attempts import over, supervisor_of
from support.processes import all_pids, command_of, is_alive, is_ours
from support.webhooks import Webhook, webhook

from executors import Run, attach, launch
from executors.errors import ReplicasError
from executors.run.run import view_of
from executors.testing import eventually

SECRET = "s3cret-path"
NAMED = ("--run-id", "otter")
QUICK = "backoff=0.05s:0.1s"
TASK = """
import os, signal, threading
from executors import current_replica

def die(ranks):
    replica = current_replica()
    if replica.rank in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    replica.report(step=1, loss=2.5)
    return [name for name, value in os.environ.items() if "s3cret" in value]

def wait():
    replica = current_replica()
    replica.store.put(replica.key("waits"), b"")
    threading.Event().wait()
"""


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Return a file with the functions that replicas run."""
    (tmp_path / "noticed_job.py").write_text(TASK)
    return str(tmp_path / "noticed_job.py")


def notifiers() -> list[int]:
    """Return the senders that this test has started. Other tests may run at the same time."""
    return [pid for pid in all_pids() if "executors.notices.notifier" in command_of(pid) and is_ours(pid)]


def settled(run: Run, *ids: str) -> None:
    """Wait until the notices of a run have their results."""
    store = view_of(run).store

    def results() -> set[str]:
        return {entry.key.rpartition("/")[2] for entry in store.list(f"{run.run_id}/notices/")}

    eventually(lambda: {f"{each}.sent.json" for each in ids} <= results(), "the notices are sent")


def waits(run: Run) -> None:
    store = view_of(run).store
    eventually(lambda: any(entry.key.endswith("/waits") for entry in store.list(run.run_id)), "a replica waits")


def test_a_rank_that_is_given_up_and_the_end_are_one_message_each(
    hook: Webhook, job: str, state_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = launch("local", f"{job}:die", 2, args={"ranks": [1]}, restarts=f"1,{QUICK}", notify=[hook.url])
    run.wait(60)
    given_up, end = hook.of("given_up"), hook.of("end")
    assert given_up["text"].startswith("rank 1 given up: 1 of 1 restarts are used: signal, SIGKILL.")
    assert (given_up["rank"], given_up["attempt"], given_up["run_id"]) == (1, 1, run.run_id)
    assert re.search(r"The run has failed after .*: 1 failed, 1 succeeded\..* Last loss: 2\.5\.", end["text"])
    settled(run, "end-0")
    eventually(lambda: not notifiers(), "the senders have ended")
    assert len({each["event"] for each in hook.messages}) == len(hook.messages), "each event comes once"
    assert run.outcomes()[0].result == [], "a replica does not see the URL"
    shown = "".join([repr(run), repr(run.handles), repr(run.status()), *capfd.readouterr(), run.logs(rank=0)])
    assert SECRET not in shown
    for path in state_home.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_no_command_line_has_a_url_while_a_run_sends_notifications(hook: Webhook, job: str) -> None:
    run = launch("local", f"{job}:wait", 1, notify=[hook.url], detach=True)
    waits(run)
    assert notifiers()
    listed = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
    assert SECRET not in listed
    run.cancel()
    assert "The run was cancelled after" in hook.of("end")["text"]
    settled(run, "end-0")


def test_only_the_chosen_events_are_sent(hook: Webhook, job: str) -> None:
    run = launch(
        "local", f"{job}:die", 1, args={"ranks": [0]}, restarts=f"1,{QUICK}", notify=[hook.url], notify_on="end"
    )
    run.wait(60)
    hook.of("end")
    settled(run, "end-0")
    eventually(lambda: not notifiers(), "the senders have ended")
    assert hook.kinds() == ["end"]


def test_a_killed_supervisor_of_a_detached_run_is_the_end_of_the_run(hook: Webhook, job: str) -> None:
    run = launch("local", f"{job}:wait", 1, notify=[hook.url], detach=True)
    waits(run)
    eventually(notifiers, "the sender runs")
    os.kill(supervisor_of(run), signal.SIGKILL)
    assert "Replica 0 of 1 was lost" in hook.of("end")["text"]
    settled(run, "end-0")
    assert hook.kinds() == ["end"]


def test_a_killed_sender_is_replaced_and_loses_nothing(hook: Webhook, job: str) -> None:
    run = launch("local", f"{job}:wait", 1, notify=[hook.url], detach=True)
    waits(run)
    (first,) = eventually(notifiers, "the sender runs")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: [pid for pid in notifiers() if pid != first], "another sender runs")
    run.cancel()
    assert hook.of("end")["event"] == "end-0"
    settled(run, "end-0")


def test_a_sender_that_is_killed_while_it_sends_is_followed_by_another_one(hook: Webhook, job: str) -> None:
    hook.answers = ["hang"]
    run = launch("local", f"{job}:die", 2, args={"ranks": [1]}, restarts=f"0,{QUICK}", notify=[hook.url], detach=True)
    eventually(lambda: hook.requests, "the first message is being sent")
    for pid in notifiers():
        os.kill(pid, signal.SIGKILL)
    other = launch_watch(run, hook)
    assert {"given_up", "end"} <= {hook.of("given_up")["kind"], hook.of("end")["kind"]}
    other.wait(60)


def launch_watch(run: Run, hook: Webhook) -> subprocess.Popen[bytes]:
    """Watch a run in another process, with the same URL."""
    from executors.notices.notifier import Notifier, NotifierSpec

    url = view_of(run).store.url
    notifier = Notifier(NotifierSpec(url, run.run_id, (hook.url,)))
    notifier.start()
    notifier.close()

    class Other:
        def wait(self, limit_s: float) -> None:
            notifier.wait(limit_s)

    return Other()  # type: ignore[return-value]


@pytest.mark.parametrize("answer", ["hang", "500", "close"])
def test_a_service_that_fails_is_a_warning_and_does_not_delay_the_run(hook: Webhook, job: str, answer: str) -> None:
    hook.always = answer
    run = launch("local", f"{job}:die", 1, args={"ranks": []}, notify=[hook.url], detach=True)
    supervisor = supervisor_of(run)
    eventually(lambda: not is_alive(supervisor), "the supervisor ends")
    assert run.outcomes()[0].status == "succeeded"
    settled(run, "end-0")
    (warning,) = attach(run.run_id).warnings()
    assert warning.text.startswith("A notification (end-0) could not be sent. notification URL 1 of 1 (http): ")
    assert SECRET not in warning.text
    assert [event.why for event in attach(run.run_id).events() if event.kind == "warning"] == [warning.text]


def test_a_killed_launcher_of_an_attached_run_is_the_end_of_the_run(hook: Webhook, folder: Folder) -> None:
    (folder.path / "noticed_job.py").write_text(TASK)
    with folder.started(
        "launch", "noticed_job.py:wait", "--n", 1, "--notify", hook.url, "--run-id", "otter"
    ) as command:
        command.prints("otter")
        run = eventually(lambda: attached("otter"), "the run exists")
        waits(run)
        assert len(eventually(lambda: notifiers() if len(notifiers()) == 2 else [], "two senders run")) == 2
        command.interrupt(signal.SIGKILL)
        assert "cancelled" in hook.of("end")["text"]
        settled(run, "end-0")
    assert hook.kinds() == ["end"]


def attached(name: str) -> Any:
    try:
        return attach(name)
    except ReplicasError:
        return None


def test_the_command_hides_a_url_that_it_gets_as_an_argument(hook: Webhook, folder: Folder) -> None:
    (folder.path / "noticed_job.py").write_text(TASK)
    with folder.started(
        "launch", "noticed_job.py:wait", "--n", 1, f"--notify={hook.url}", "--run-id", "otter"
    ) as command:
        command.prints("otter")
        waits(eventually(lambda: attached("otter"), "the run exists"))
        listed = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
        assert "noticed_job.py:wait" in listed
        assert SECRET not in listed
        assert SECRET not in command.output
        command.interrupt()
        command.ends()
    hook.of("end")


def test_bad_urls_and_names_are_refused_before_anything_starts(folder: Folder, state_home: Path) -> None:
    told = folder.launch("job:main", "--notify", f"htps://example.org/{SECRET}")
    assert (told.code, SECRET in told.stderr + told.stdout) == (2, False), told
    assert "Did you mean 'https'?" in told.stderr
    told = folder.launch("job:main", "--notify", "https://example.org/x", "--notify-on", "given-up,ent")
    assert told.code == 2
    assert "No event 'ent'. Did you mean 'end'?" in told.stderr
    (folder.path / "replicas.toml").write_text(f'notify = ["https://example.org/{SECRET}"]\n')
    told = folder.launch("job:main")
    assert (told.code, SECRET in told.stderr) == (2, False)
    assert "notify must be a list of places of URLs" in told.stderr
    assert not (state_home / "replicas").exists() or not [*(state_home / "replicas").glob("*/run.json")]


def test_a_dry_run_and_the_settings_show_no_url(folder: Folder) -> None:
    environ = {"REPLICAS_NOTIFY": f"https://example.org/{SECRET}"}
    for arguments in (["launch", "job:main", "--n", "1", "--dry-run"], ["config"], ["config", "--json"]):
        told = folder.replicas(*arguments, environ=environ)
        assert told.code == 0, told
        assert SECRET not in told.stdout + told.stderr
        assert "***" in told.stdout
    (folder.path / "replicas.toml").write_text('notify = ["env:HOOK"]\n')
    assert 'notify = ["env:HOOK"]' in folder.replicas("config").stdout


def test_doctor_sends_a_test_and_reports_the_answer(hook: Webhook, folder: Folder) -> None:
    told = folder.replicas("doctor", "--notify", hook.url, "--json")
    (finding,) = [each for each in told.json["findings"] if each["what"] == "notify"]
    assert finding["state"] == "ok"
    assert hook.kinds() == ["test"]
    hook.always = "404"
    told = folder.replicas("doctor", "--notify", hook.url)
    assert told.code == 1
    assert "notification URL 1 of 1 (http): it answers HTTP 404" in told.stdout
    assert SECRET not in told.stdout + told.stderr


def test_watch_sends_what_the_run_itself_cannot_send(hook: Webhook, folder: Folder) -> None:
    (folder.path / "noticed_job.py").write_text(TASK)
    assert folder.launch("noticed_job.py:wait", "--detach", "--run-id", "otter", n=1).code == 0
    run = attach("otter")
    waits(run)
    with folder.started("watch", "otter", "--notify", hook.url) as command:
        eventually(notifiers, "the sender runs")
        os.kill(supervisor_of(run), signal.SIGKILL)
        assert "was lost" in hook.of("end")["text"]
        command.ends()
    settled(run, "end-0")


def test_a_resumed_run_ends_a_second_time(hook: Webhook, job: str) -> None:
    from executors.run.resume import resume

    run = over(launch("local", f"{job}:die", 1, args={"ranks": [0]}, notify=[hook.url], detach=True))
    assert hook.of("end")["event"] == "end-0"
    settled(run, "end-0")
    over(resume(run, notify=[hook.url], detach=True))
    settled(run, "end-1")
    eventually(lambda: not notifiers(), "the senders have ended")
    assert [each["event"] for each in hook.messages] == ["end-0", "end-1"]
