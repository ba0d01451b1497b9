"""Logs of jobs are followed with few requests, each line once, through breaks and into further attempts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from support.cli import HereInstead
from support.fake_jobs import FakeJobs, Machines, start, wait_until_hanging

from executors import HFJobsExecutor, ModalExecutor
from executors.backends.jobs.service import JobKey, JobSpec
from executors.backends.jobs.timed_log import MAX_KNOWN, LogEntry, TimedLog
from executors.logs.follower import LogPosition
from executors.logs.log import Log
from executors.logs.readers import FileLog
from executors.run.resume import resume
from executors.testing import eventually
from executors.view.run_logs import RunLogs

JOB = JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), ("python", "-c", "for n in range(5): print(n)"), (), {}, {})
N = 4


def new_lines(log: Log) -> list[str]:
    return [line for part in log.lines(200) for line in part]


def of_ranks(job: JobSpec) -> list[JobSpec]:
    return [replace(job, key=replace(job.key, rank=rank)) for rank in range(N)]


def test_a_stream_that_breaks_off_continues_after_its_last_line(hf: HubServer) -> None:
    service = HFJobsExecutor().service
    job_id = service.start(JOB)
    eventually(lambda: service.state(job_id).has_ended)
    for answer in ("cut", "reset", "closed"):
        hf.fail("logs", answer, after_lines=2)
        log = service.open_log(job_id)
        found: list[str] = []
        eventually(lambda log=log, found=found: found.extend(new_lines(log)) or len(found) >= 5)  # type: ignore[misc]
        found += [line for part in log.lines(200, has_ended=True) for line in part]
        assert "".join(found).split() == list("01234"), answer
        log.close()


def test_streams_stay_open_until_they_are_closed_and_then_end_at_once(hf: HubServer) -> None:
    service = HFJobsExecutor().service
    hang = replace(JOB, command=("python", "-c", "import time; print('hanging', flush=True); time.sleep(600)"))
    ids = [service.start(each) for each in of_ranks(hang)]
    logs = [service.open_log(job_id) for job_id in ids]
    for log in logs:
        eventually(lambda log=log: new_lines(log) == ["hanging\n"])  # type: ignore[misc]
        assert new_lines(log) == []
    assert hf.count("logs") == N
    readers = [thread for thread in threading.enumerate() if thread.name == "replicas-log"]
    assert len(readers) == N
    for log in logs:
        log.close()
    eventually(lambda: not any(reader.is_alive() for reader in readers), "all streams have ended", within_s=20.0)
    for job_id in ids:
        service.stop(job_id)


def test_many_sandboxes_are_asked_for_at_once(
    modal_cloud: ModalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.jobs.timed_log.SHARED_EVERY_S", 0.0)
    monkeypatch.setattr("executors.backends.jobs.timed_log.CHECK_EVERY_S", 1000.0)
    service = ModalExecutor(image="python:3.11").service
    go = tmp_path / "go"
    waits = f"echo hello; while [ ! -e {go} ]; do sleep 0.1; done; echo again; sleep 600"
    ids = [service.start(each) for each in of_ranks(replace(JOB, command=("sh", "-c", waits)))]
    logs = [service.open_log(job_id) for job_id in ids]
    for log in logs:
        eventually(lambda log=log: new_lines(log) == ["hello\n"])  # type: ignore[misc]
    for log in logs:
        assert new_lines(log) == []
    before = len(modal_cloud.calls_of("AppFetchLogs", "AppCountLogs"))
    go.touch()
    for log in logs:
        eventually(lambda log=log: new_lines(log) == ["again\n"])  # type: ignore[misc]
    calls = modal_cloud.calls_of("AppFetchLogs", "AppCountLogs")[before:]
    assert {call.request.task_id for call in calls} == {""}, "no request names a single sandbox"
    for job_id in ids:
        service.stop(job_id)


def test_a_service_that_fails_for_a_while_costs_no_line(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    run = start(2, "hang")
    wait_until_hanging(run)
    machines.fail("logs", "unavailable", times=3)
    lines = run.logs(follow=True)
    assert sorted([next(lines), next(lines)]) == ["[0] hanging\n", "[1] hanging\n"]
    assert 1 <= sum("its log cannot be read at the moment: Fake" in text for text in caplog.messages) <= 2
    run.cancel()
    assert "hanging" not in "".join(lines)


def test_each_attempt_has_the_log_of_its_own_job_and_a_new_one_is_followed_on(machines: Machines) -> None:
    run = start(2, "hang")
    wait_until_hanging(run)
    lines = run.logs(0, follow=True)
    assert next(lines) == "hanging\n"
    run.cancel(1)
    resume(run, ranks=[1])
    eventually(lambda: run.logs(1) == "hanging\n", "the second attempt hangs")
    again = run.logs(1, follow=True, attempt="all")
    shown = [next(again)]
    while shown[-1] != "=== attempt 1 ===\n":
        shown.append(next(again))
    assert shown[:2] == ["=== attempt 0 ===\n", "hanging\n"]
    assert next(again) == "hanging\n"
    assert run.logs(1, attempt=0).startswith("hanging\n")
    machines.job_of(run, 1)
    run.cancel()
    assert "=== attempt" not in "".join(lines)


ENTRY = LogEntry(datetime.now(UTC), "stdout", "", "container")
LONG = b"".join(b"step %06d \xff %s\n" % (number, b"." * 190) for number in range(30_000))  # six mebibytes
COLLECT = ("collect", "otter", "--out", "out", "--backend", "support.fake_jobs:FakeExecutor")


def file_on_a_disk_between(path: Path) -> Log:
    log = FileLog(path)
    log.may_lag = True
    return log


def window_of_entries(path: Path) -> Log:
    def fetch(since: datetime | None, n_entries: int) -> list[LogEntry]:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        return [ENTRY._replace(text=line) for line in lines[-min(n_entries, MAX_KNOWN) :]]

    return TimedLog(fetch, None)


@pytest.fixture
def long_log(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], Log]], bytes]:
    """Let the service return a long log in a given way, for a run of one replica. Return the whole log."""
    assert start(1).wait(60)
    (job,) = machines.jobs
    whole = LONG + job.log.read_bytes()
    job.log.write_bytes(whole)

    def given(opened: Callable[[Path], Log]) -> bytes:
        monkeypatch.setattr(FakeJobs, "open_log", lambda self, job_id: opened(job.log))
        return whole

    return given


def test_collect_brings_a_long_log_whole_where_a_service_has_it_whole(
    long_log: Callable[[Callable[[Path], Log]], bytes], here: HereInstead
) -> None:
    whole = long_log(file_on_a_disk_between)
    told = here.replicas(*COLLECT)
    assert (Path("out/0/output.log").read_bytes() == whole, told.code) == (True, 0), told


def test_collect_names_a_log_if_the_service_keeps_only_its_end(
    long_log: Callable[[Callable[[Path], Log]], bytes], here: HereInstead
) -> None:
    long_log(window_of_entries)
    told = here.replicas(*COLLECT)
    assert told.code == 1
    words = "these are the last 20,000 entries, and its service gives no more"
    assert f"Skipped the log 'output.log' of rank 0: {words}" in told.stdout
    assert Path("out/0/output.log").read_text().count("\n") == MAX_KNOWN


def test_collect_names_a_log_of_which_a_service_gave_only_the_end_before_it_forgot_it(
    machines: Machines, here: HereInstead
) -> None:
    run = start(1, "hang")
    wait_until_hanging(run)
    job = machines.job_of(run, 0)
    with open(job.log, "ab") as log:
        log.writelines(b"step %d\n" % number for number in range(1000))
    machines.end(job, "oom")
    assert run.wait(60)
    job.is_forgotten = True
    told = here.replicas(*COLLECT)
    assert told.code == 1
    assert "Skipped the log 'output.log' of rank 0: " in told.stdout
    assert "has no log of it; this is the end that its outcome kept" in told.stdout
    assert Path("out/0/output.log").read_text() == "".join(f"step {number}\n" for number in range(800, 1000))


def test_a_search_goes_through_the_whole_log_or_reports_that_a_service_gives_only_its_end(
    long_log: Callable[[Callable[[Path], Log]], bytes], here: HereInstead
) -> None:
    search = ("logs", "otter", "-r", 0, "--backend", "support.fake_jobs:FakeExecutor", "--grep")
    long_log(file_on_a_disk_between)
    found = here.replicas(*search, "step 0[012]0000")
    assert (found.stdout.split()[1::4], found.stderr) == (["000000", "010000", "020000"], "")
    long_log(window_of_entries)
    for more in ((), ("--until", "2999-01-01")):
        found = here.replicas(*search, "step 0[012]0000", *more)
        assert found.stdout.split()[1::4] == ["020000"]
        assert found.stderr == "Note: Rank 0: these are the last 20,000 entries, and its service gives no more.\n"


def test_an_attempt_that_no_look_saw_running_is_followed_too(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_look, look = start(1, "hang"), threading.Event(), RunLogs.look

    def held(self: RunLogs, ranks: Sequence[int] | None) -> dict[int, LogPosition]:
        assert may_look.wait(60)
        return look(self, ranks)

    monkeypatch.setattr(RunLogs, "look", held)
    may_look.set()
    wait_until_hanging(run)
    lines = run.logs(0, follow=True)
    assert next(lines) == "hanging\n"
    may_look.clear()
    for _ in range(2):
        run.cancel()
        resume(run)
        eventually(lambda: run.logs(0) == "hanging\n", "the next attempt hangs")
    may_look.set()
    shown = [next(lines)]
    while shown[-1] != "=== attempt 2 ===\n":
        shown.append(next(lines))
    assert shown[shown.index("=== attempt 1 ===\n") + 1] == "hanging\n"
    run.cancel()
    assert "hanging\n" in list(lines)
