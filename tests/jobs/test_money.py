"""Users who lose the bucket can still end the jobs that they pay for. If a job cannot be ended, that is reported.

Each row loses the store, or the service, in another way, and then ends a run in another way. Jobs of the stand-in for
Hugging Face wait for their hardware, so a row starts no process. Time limits are shortened. The rows marked `slow` use
the real limits.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from servers.hub.faults import Misconduct, Request
from servers.hub.server import HubServer
from servers.kubernetes.server import ApiServer
from servers.modal.server import ModalServer
from servers.s3.server import S3Server
from support.cli import Folder, HereInstead
from support.modal import alive

from executors import Run, attach, launch
from executors.attempt import Attempt
from executors.backends.jobs import ending, gang_start, job_starter
from executors.cli.live import Interrupts
from executors.errors import LaunchError, StoreError
from executors.patience import PAID_CONTROLLER
from executors.protocol import ReplicaStatus
from executors.run.job_notes import noted_jobs
from executors.run.run import manager_of, view_of
from executors.testing import eventually

pytestmark = pytest.mark.timeout(480)  # the tests really wait for a call that hangs

CPU = "cpu-basic"
STORE_FAULTS: dict[str, dict[str, Any]] = {
    "refuses": {"forbidden": ["GET", "PUT", "POST", "HEAD", "DELETE"]},
    "is unavailable": {"unavailable": 1.0},
    "is silent": {"silent": True},
    "has lost its bucket": {"no_bucket": True},
}
HANG = "import time\ndef main():\n    print('hanging', flush=True)\n    time.sleep(600)\n"


class RUN:
    """The id of the current test's run. Threads of an earlier test may still wait for a store, and write later."""

    id: ClassVar[str] = ""
    numbers: ClassVar[Iterator[int]] = itertools.count()


@pytest.fixture(autouse=True)
def _a_run_of_its_own() -> None:
    RUN.id = f"otter-{next(RUN.numbers)}"


@pytest.fixture(params=STORE_FAULTS)
def lose_the_store(request: pytest.FixtureRequest, s3: S3Server) -> Iterator[Callable[[], None]]:
    """The ways in which the store fails from a given moment on."""
    yield lambda: s3.misbehave(**STORE_FAULTS[request.param])
    s3.misbehave()  # requests that hang end


@pytest.fixture
def in_a_moment(monkeypatch: pytest.MonkeyPatch, quick_tries: None) -> None:
    """Shorten the waits for stores and services."""
    for name, seconds in {
        "executors.run.canceller.HEAD_START_S": 0.5,
        "executors.run.canceller.STORE_S": 0.5,
        "executors.registry.start_together.HEAD_START_S": 0.5,
        "executors.registry.start_together.STORE_S": 1.0,
        "executors.run.start_attempts.STORE_S": 0.5,
        "executors.backends.jobs.executor.HEAD_START_S": 0.5,
        "executors.backends.jobs.executor.STORE_S": 0.5,
        "executors.backends.jobs.job_starter.STORE_S": 1.0,
        "executors.backends.jobs.job_starter.HEAD_START_S": 0.5,
        "executors.backends.jobs.gang_start.HEAD_START_S": 0.5,
        "executors.backends.jobs.gang_start.LAST_STORE_S": 0.5,
        "executors.backends.jobs.ending.REPORT_S": 2.0,
        "executors.backends.jobs.ending.END_S": 8.0,
        "executors.run.start_attempts.HEAD_START_S": 0.5,
        "executors.cli.runs.FIND_S": 1.0,
    }.items():
        monkeypatch.setattr(name, seconds)


@pytest.fixture
def folder(hf: HubServer) -> Folder:
    hf.hold(CPU)
    return Folder(Path.cwd())


@pytest.fixture
def command(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HereInstead:
    return HereInstead(folder, monkeypatch, capsys)


def living(hub: HubServer) -> list[str]:
    """Return the ranks of the jobs that run or wait."""
    return sorted(job.labels["replicas-rank"] for job in hub.jobs.newest_first() if not job.is_over)


def started(hub: HubServer, n: int = 2, **more: Any) -> Run:
    run = launch("hf", "job.py:main", n, run_id=RUN.id, **more)
    assert living(hub) == [str(rank) for rank in range(n)]
    return run


# --- the store is lost


@pytest.mark.usefixtures("in_a_moment")
def test_the_process_that_launched_ends_all_jobs_whatever_the_store_does(
    hf: HubServer, folder: Folder, lose_the_store: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(hf)
    lose_the_store()
    run.cancel()
    assert living(hf) == []
    assert manager_of(run).canceller.was_ended_without_store
    assert f"2 jobs of run {RUN.id} ended at the service. The run's records do not say so: " in capsys.readouterr().err


@pytest.mark.usefixtures("in_a_moment")
def test_the_command_on_the_launching_machine_ends_all_jobs_whatever_the_store_does(
    hf: HubServer, command: HereInstead, lose_the_store: Callable[[], None]
) -> None:
    started(hf)
    lose_the_store()
    told = command.replicas("cancel", RUN.id)
    assert (told.code, living(hf)) == (0, []), told
    assert f"Ended 2 jobs of {RUN.id} at the service." in told.stdout


@pytest.mark.usefixtures("in_a_moment")
def test_a_rank_that_is_cancelled_ends_and_no_other_whatever_the_store_does(
    hf: HubServer, command: HereInstead, lose_the_store: Callable[[], None]
) -> None:
    started(hf, 3)
    lose_the_store()
    told = command.replicas("cancel", RUN.id, "--rank", "1")
    assert (told.code, living(hf)) == (0, ["0", "2"]), told


@pytest.mark.usefixtures("in_a_moment")
def test_another_machine_finds_the_jobs_by_their_label_if_the_user_names_the_backend(
    hf: HubServer,
    command: HereInstead,
    lose_the_store: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = started(hf)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    lose_the_store()
    told = command.replicas("cancel", run.url)
    assert (told.code > 0, living(hf)) == (True, ["0", "1"]), (
        "the command fails and ends no job, because this machine does not know the store of the run"
    )
    assert f"replicas cancel {RUN.id} --backend NAME" in told.stderr
    told = command.replicas("cancel", run.url, "--backend", "hf")
    assert (told.code, living(hf)) == (0, []), told


@pytest.mark.usefixtures("in_a_moment")
def test_ctrl_c_ends_all_jobs_and_the_command_whatever_the_store_does(
    hf: HubServer, command: HereInstead, lose_the_store: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    watches, count_on = threading.Event(), Interrupts.count_on

    def counting_on(interrupts: Interrupts, run_id: str) -> None:
        count_on(interrupts, run_id)
        watches.set()  # from here on, Ctrl-C cancels a run; before, it interrupts a launch

    monkeypatch.setattr(Interrupts, "count_on", counting_on)

    def strike() -> None:
        assert watches.wait(60)
        eventually(lambda: len(living(hf)) == 2 and len(noted_jobs(RUN.id)) == 2)
        eventually(lambda: attach(RUN.id).handles.count(None) == 0)
        lose_the_store()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    told = command.replicas("launch", "job.py:main", "--backend", "hf", "--n", 2, "--run-id", RUN.id)
    thread.join()
    assert (told.code, living(hf)) == (130, []), told
    assert f"Cancelled {RUN.id} at its service. The store does not answer." in told.stdout


@pytest.mark.usefixtures("in_a_moment")
def test_a_launch_whose_store_is_lost_half_way_leaves_no_job(
    hf: HubServer, folder: Folder, lose_the_store: Callable[[], None]
) -> None:
    def loses_it(request: Request) -> bool:
        if request.json["labels"]["replicas-rank"] == "1":
            lose_the_store()
        return False

    hf.fail("create", when=loses_it, times=None)
    with pytest.raises((LaunchError, StoreError)):
        launch("hf", "job.py:main", 2, run_id=RUN.id)
    assert hf.count("create") >= 1
    assert living(hf) == []


@pytest.mark.usefixtures("in_a_moment")
def test_ctrl_c_while_replicas_are_started_leaves_no_job_whatever_the_store_does(
    hf: HubServer, command: HereInstead, lose_the_store: Callable[[], None]
) -> None:
    struck = threading.Event()

    def strikes(request: Request) -> bool:
        if request.json["labels"]["replicas-rank"] == "1" and not struck.is_set():
            struck.set()
            lose_the_store()
            os.kill(os.getpid(), signal.SIGINT)
        return False

    hf.fail("create", when=strikes, times=None)
    told = command.replicas("launch", "job.py:main", "--backend", "hf", "--n", 2, "--run-id", RUN.id)
    assert told.code == 130, told
    eventually(lambda: living(hf) == [], "jobs that were requested before Ctrl-C have ended")


@pytest.mark.usefixtures("in_a_moment")
def test_an_addition_whose_store_is_lost_half_way_ends_alone(
    hf: HubServer, folder: Folder, lose_the_store: Callable[[], None]
) -> None:
    run = started(hf)

    def loses_it(request: Request) -> bool:
        lose_the_store()
        return False

    hf.fail("create", when=loses_it, times=None)
    with pytest.raises((LaunchError, StoreError)):
        run.add("hf", 1)
    assert living(hf) == ["0", "1"]


@pytest.mark.usefixtures("in_a_moment")
def test_a_run_is_removed_only_if_its_store_shows_its_end_and_the_error_names_the_command_that_ends_it(
    hf: HubServer, command: HereInstead, s3: S3Server
) -> None:
    started(hf)
    s3.misbehave(**STORE_FAULTS["refuses"])
    told = command.replicas("rm", RUN.id)
    assert (told.code, living(hf)) == (2, ["0", "1"]), told
    assert f"replicas cancel {RUN.id}" in told.stderr
    assert command.replicas("cancel", RUN.id).code == 0
    assert living(hf) == []


@pytest.mark.usefixtures("in_a_moment")
def test_a_run_whose_prefix_was_emptied_is_still_found_and_ended(
    hf: HubServer, command: HereInstead, s3: S3Server
) -> None:
    run = started(hf, detach=True)
    for entry in list(view_of(run).store.list(f"{RUN.id}/")):
        view_of(run).store.delete(entry.key)
    told = command.replicas("cancel", RUN.id)
    assert (told.code, living(hf)) == (0, []), told


@pytest.mark.usefixtures("in_a_moment")
@pytest.mark.parametrize("fault", ["refuses", "has lost its bucket"])
def test_the_launching_command_ends_the_jobs_of_a_run_whose_store_refuses_it_for_good(
    hf: HubServer, command: HereInstead, s3: S3Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("executors.run.run_manager.PAID_CONTROLLER", replace(PAID_CONTROLLER, refused_seconds=0.5))

    def strike() -> None:
        eventually(lambda: len(living(hf)) == 2 and len(noted_jobs(RUN.id)) == 2)
        eventually(lambda: attach(RUN.id).handles.count(None) == 0)
        s3.misbehave(**STORE_FAULTS[fault])

    thread = threading.Thread(target=strike)
    thread.start()
    told = command.replicas("launch", "job.py:main", "--backend", "hf", "--n", 2, "--run-id", RUN.id)
    thread.join()
    assert (told.code, living(hf)) == (1, []), told
    assert "Its 2 jobs were ended at the service" in told.stdout
    assert "15 min" not in told.stdout.partition("cannot be read any more")[2], (
        "the message does not promise 15 minutes, because no container can read the lease"
    )


def test_an_id_that_no_one_launched_is_still_an_error(hf: HubServer, command: HereInstead) -> None:
    told = command.replicas("cancel", "nobody-at-all")
    assert (told.code, "No run 'nobody-at-all' is known on this machine." in told.stderr) == (2, True), told


def test_a_job_is_noted_before_its_handle_is_written(
    hf: HubServer, folder: Folder, s3: S3Server, state_home: Path
) -> None:
    run = started(hf)
    noted = noted_jobs(RUN.id)
    assert sorted(job.rank for job in noted) == [0, 1]
    assert sorted(job.job["id"] for job in noted) == sorted(h.metadata["job"]["id"] for h in run.handles)
    (file,) = state_home.rglob("jobs.jsonl")
    assert file.stat().st_mode & 0o077 == 0, "only this user may read the file"
    with open(file, "ab") as cut_off:
        cut_off.write(b'{"backend": "hf", "ra')
    assert len(noted_jobs(RUN.id)) == 2
    run.cancel()


# Removing a run


def ended_in_its_records_alone(hub: HubServer) -> Run:
    """Return a run whose records say that all replicas have ended, while one job still runs at the service."""
    run = started(hub)
    for rank in range(2):
        attempt = Attempt(view_of(run).store, RUN.id, rank, 0)
        attempt.record(attempt.new_outcome(ReplicaStatus.FAILED, "lost", error="as some process concluded"))
    hub.jobs.cancel(hub.job(run.handles[0].metadata["job"]["id"]))
    assert living(hub) == ["1"]
    return run


@pytest.mark.usefixtures("in_a_moment")
def test_jobs_of_an_ended_run_that_still_run_are_ended_before_its_records_are_deleted(
    hf: HubServer, command: HereInstead
) -> None:
    ended_in_its_records_alone(hf)
    told = command.replicas("rm", RUN.id)
    assert (told.code, living(hf)) == (0, []), told
    assert f"1 job of run {RUN.id} had not ended at Hugging Face: ending them" in told.stderr


@pytest.mark.usefixtures("in_a_moment")
def test_a_run_is_not_removed_while_the_service_does_not_end_a_job_of_it(hf: HubServer, command: HereInstead) -> None:
    run = ended_in_its_records_alone(hf)
    hf.fail("cancel", 403, times=None)
    told = command.replicas("rm", RUN.id)
    hf.forgive()
    assert (told.code, living(hf)) == (2, ["1"]), told
    assert f"hf jobs cancel {hf.namespace}/{run.handles[1].metadata['job']['id']}" in told.stderr
    assert command.replicas("rm", RUN.id).code == 0
    assert living(hf) == []


@pytest.mark.usefixtures("in_a_moment")
@pytest.mark.parametrize("record", ["run.json", "replicas/{rank:04}/0/handle.json"], ids=["run", "handles"])
def test_a_run_whose_records_cannot_be_read_is_not_removed_while_the_service_lists_jobs_of_it(
    hf: HubServer, command: HereInstead, record: str
) -> None:
    run = started(hf)
    for rank in range(2):
        view_of(run).store.put(f"{RUN.id}/{record.format(rank=rank)}", b"{")
    told = command.replicas("rm", RUN.id)
    assert (told.code, living(hf)) == (2, ["0", "1"]), told
    assert f"replicas cancel {RUN.id}" in told.stderr
    command.replicas("cancel", RUN.id)
    assert living(hf) == [], "the jobs end, because this machine has noted them"
    told = command.replicas("rm", RUN.id)
    assert told.code == 0, told


@pytest.mark.usefixtures("in_a_moment")
def test_another_machine_that_is_given_the_backend_does_not_remove_an_unreadable_run_with_jobs_and_ends_these(
    hf: HubServer, command: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(hf)
    view_of(run).store.put(f"{RUN.id}/run.json", b"{")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    told = command.replicas("rm", run.url, "--backend", "hf")
    assert (told.code, living(hf)) == (2, ["0", "1"]), told
    assert f"hf jobs cancel {hf.namespace}/" in told.stderr
    told = command.replicas("cancel", run.url, "--backend", "hf")
    assert (told.code, living(hf)) == (0, []), told
    assert "The run's records do not say so, because they cannot be read." in told.stdout
    assert command.replicas("rm", run.url, "--backend", "hf").code == 0


@pytest.mark.usefixtures("in_a_moment")
def test_a_service_that_cannot_be_asked_about_a_run_that_is_removed_is_named_with_its_commands(
    hf: HubServer, command: HereInstead
) -> None:
    run = started(hf)
    run.cancel()
    eventually(lambda: run.status().is_terminal)
    hf.fail("list", 503, times=None)
    told = command.replicas("rm", RUN.id)
    hf.forgive()
    assert told.code == 0, told
    assert f"it is not known whether jobs of run {RUN.id} still run on 'hf': " in told.stderr
    assert f"hf jobs ls --namespace ada --label replicas-run={RUN.id}" in told.stderr


# The service fails


SERVICE_FAULTS: dict[str, Misconduct] = {
    "refuses": 403,
    "is unavailable": 503,
    "is silent": "silent",
    "hangs up": "closed",
}


@pytest.mark.usefixtures("in_a_moment")
@pytest.mark.parametrize("answer", SERVICE_FAULTS.values(), ids=SERVICE_FAULTS)
@pytest.mark.parametrize("store", ["answers", "refuses"])
def test_a_job_that_a_service_does_not_end_is_named_with_the_command_that_ends_it(
    hf: HubServer, command: HereInstead, s3: S3Server, answer: Misconduct, store: str
) -> None:
    run = started(hf)
    (first, second) = (handle.metadata["job"]["id"] for handle in run.handles)
    hf.fail("cancel", answer, times=None)
    if store == "refuses":
        s3.misbehave(**STORE_FAULTS["refuses"])
    told = command.replicas("cancel", RUN.id)
    hf.forgive()
    assert told.code == 2, told
    for job in (first, second):
        assert f"hf jobs cancel {hf.namespace}/{job}" in told.stderr
    assert f"--label replicas-run={RUN.id}" in told.stderr
    s3.misbehave()
    run.cancel()
    assert living(hf) == []


@pytest.mark.usefixtures("in_a_moment")
@pytest.mark.parametrize("answer", SERVICE_FAULTS.values(), ids=SERVICE_FAULTS)
def test_a_launch_that_cannot_end_its_started_jobs_names_them_with_the_commands_that_end_them(
    hf: HubServer, folder: Folder, answer: Misconduct
) -> None:
    hf.fail("create", 403, times=None, when=lambda request: request.json["labels"]["replicas-rank"] == "1")
    hf.fail("cancel", answer, times=None)
    with pytest.raises(LaunchError, match="could not start replica 1 of 2") as raised:
        launch("hf", "job.py:main", 2, run_id=RUN.id)
    hf.forgive()
    left = [job.id for job in hf.jobs.newest_first() if not job.is_over]
    assert all(f"hf jobs cancel {hf.namespace}/{job}" in str(raised.value) for job in left)
    for job in left:
        hf.jobs.cancel(hf.job(job))


@pytest.mark.usefixtures("in_a_moment")
def test_an_addition_that_loses_its_store_and_cannot_end_its_jobs_names_the_command_that_ends_them(
    hf: HubServer, folder: Folder, s3: S3Server
) -> None:
    run = started(hf)

    def loses_it(request: Request) -> bool:
        s3.misbehave(**STORE_FAULTS["is unavailable"])
        return False

    hf.fail("create", when=loses_it, times=None)
    hf.fail("cancel", 403, times=None)
    with pytest.raises(LaunchError, match="could not start replica 2") as raised:
        run.add("hf", 1)
    hf.forgive()
    (added,) = [job for job in hf.jobs.newest_first() if job.labels["replicas-rank"] == "2"]
    assert f"hf jobs cancel {hf.namespace}/{added.id}" in str(raised.value)
    hf.jobs.cancel(added)


def test_a_start_that_loses_its_store_ends_its_jobs_or_names_them_within_two_minutes() -> None:
    assert job_starter.STORE_S + gang_start.HEAD_START_S + ending.REPORT_S < 120


# Other services


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_moment")
@pytest.mark.parametrize("gpu", [None, "H100"], ids=["cpu", "gpu"])
def test_modals_sandboxes_end_whatever_the_store_does(
    modal_runs: ModalServer,
    lose_the_store: Callable[[], None],
    gpu: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("job.py").write_text(HANG)
    launch("modal", "job.py:main", 2, run_id=RUN.id, gpu=gpu)
    lose_the_store()
    here = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    told = here.replicas("cancel", RUN.id)
    assert told.code == 0, told
    eventually(lambda: alive(modal_runs) == [], "all sandboxes have ended")


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_moment")
def test_pods_of_kubernetes_end_whatever_the_store_does(
    k8s: ApiServer,
    lose_the_store: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    k8s.cluster.kubelet.grace_s = 0.1
    Path("job.py").write_text(HANG)
    launch("k8s", "job.py:main", 2, run_id=RUN.id)
    lose_the_store()
    here = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    told = here.replicas("cancel", RUN.id)
    assert told.code == 0, told
    eventually(lambda: all(pod.is_over for pod in list(k8s.cluster.pods.values())), "the pods have ended")
