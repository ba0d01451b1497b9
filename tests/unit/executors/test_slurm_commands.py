"""Tests the commands for Slurm and the reading of their answers, without a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.new_runs import create_run

from executors import ReplicaStatus, SlurmExecutor, attach
from executors.attempt import Attempt
from executors.backends.jobs.executor import INSTALL_S
from executors.backends.jobs.service import UNKNOWN, JobKey, JobServiceError, JobSpec, JobState, retrying
from executors.backends.slurm import SlurmJobs
from executors.backends.slurm_commands import (
    Row,
    ask,
    cancel,
    check_clusters,
    check_sbatch_options,
    command_environment,
    gres_of,
    list_jobs,
)
from executors.errors import BackendError, MissingDependencyError
from executors.store import store_at
from executors.store.run_key import RUN_KEY

NO_LOG = (
    "Perhaps its node cannot write to the folder of its log. Name a folder that the nodes share with this machine: "
    "--option log_dir=…"
)


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fake commands. A command prints the content of its file on stderr and fails."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("sbatch", "squeue", "scancel"):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\ncat {tmp_path}/said\ncat {tmp_path}/failed >&2\nexit $(cat {tmp_path}/code)\n")
        script.chmod(0o755)
    for name, text in (("said", ""), ("failed", ""), ("code", "0")):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ("PENDING|Priority|0", JobState(False, message="pending: Priority")),
        ("PENDING|None|0", JobState(False)),
        ("RUNNING|None|0", JobState(False)),
        ("CONFIGURING|None|0", JobState(False, message="CONFIGURING")),
        ("COMPLETING|None|0", JobState(False, message="COMPLETING")),
        ("SOMETHING_NEW|None|0", JobState(False, message="SOMETHING_NEW")),
        ("COMPLETED|None|0", JobState(True, None, 0, "COMPLETED")),
        ("FAILED|NonZeroExitCode|1792", JobState(True, None, 7, "FAILED (NonZeroExitCode)")),
        ("FAILED|JobLaunchFailure|4021", JobState(True, "start_failed", None, f"FAILED (JobLaunchFailure). {NO_LOG}")),
        ("FAILED|JobLaunchFailure|9", JobState(True, None, 137, "FAILED (JobLaunchFailure)")),
        ("FAILED|None|9", JobState(True, None, 137, "FAILED")),
        ("FAILED|None|", JobState(True, None, None, "FAILED")),
        ("CANCELLED|None|15", JobState(True, "cancelled", None, "CANCELLED")),
        ("TIMEOUT|TimeLimit|0", JobState(True, "timeout", None, "TIMEOUT (TimeLimit)")),
        ("DEADLINE|None|0", JobState(True, "timeout", None, "DEADLINE")),
        ("OUT_OF_MEMORY|OutOfMemory|125", JobState(True, "oom", None, "OUT_OF_MEMORY (OutOfMemory)")),
        ("PREEMPTED|None|15", JobState(True, "preempted", None, "PREEMPTED")),
        ("NODE_FAIL|NodeDown|1", JobState(True, "lost", None, "NODE_FAIL (NodeDown)")),
        ("BOOT_FAIL|None|1", JobState(True, "start_failed", None, "BOOT_FAIL")),
    ],
)
def test_each_state_of_a_job_becomes_a_state_of_this_project(answer: Path, row: str, state: JobState) -> None:
    (answer / "said").write_text(f"184|3|{row}|otter-a0|\n185|N/A|RUNNING|None|0|not an array|\n")
    (found,) = list_jobs("--jobs=184")
    assert (found.array, found.task, found.name) == ("184", 3, "otter-a0")
    assert found.job_state == state


@pytest.mark.parametrize(
    ("failed", "of_sbatch", "of_others", "words"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
         "unavailable", "unavailable", "Slurm: Unable to contact slurm controller (connect failure)."),
        ("error: slurm_persist_conn_open: Connection refused", "unavailable", "unavailable", "Connection refused"),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", "unavailable", "unavailable",
         "temporarily unable"),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", "unknown",
         "unavailable", "Slurm: Socket timed out on send/recv operation."),
        ("sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified",
         "rejected", "rejected", "Slurm: invalid partition specified: x; Invalid partition name specified."),
        ("", "rejected", "rejected", "Slurm: sbatch ended with 1."),
    ],
)  # fmt: skip
def test_each_kind_of_failure_is_distinguished(
    answer: Path, failed: str, of_sbatch: str, of_others: str, words: str
) -> None:
    (answer / "failed").write_text(failed)
    (answer / "code").write_text("1")
    for may_have_acted, kind in ((True, of_sbatch), (False, of_others)):
        with pytest.raises(JobServiceError) as caught:
            ask("sbatch", may_have_acted=may_have_acted)
        assert caught.value.kind == kind
        assert words in str(caught.value)


def test_a_command_that_was_killed_or_gives_no_answer_may_have_acted(
    answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (answer / "sbatch").write_text("#!/bin/sh\nkill -9 $$\n")
    (answer / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("executors.backends.slurm_commands.CALL_LIMIT_S", 0.2)
    for command in ("sbatch", "squeue"):
        for may_have_acted, kind in ((True, "unknown"), (False, "unavailable")):
            with pytest.raises(JobServiceError) as caught:
                ask(command, may_have_acted=may_have_acted)
            assert caught.value.kind == kind, command


def test_a_job_that_is_not_known_is_none_and_is_not_an_error_to_end(answer: Path) -> None:
    (answer / "code").write_text("1")
    for failed in ("slurm_load_jobs error: Invalid job id specified", "scancel: error: Invalid job id 184_3"):
        (answer / "failed").write_text(failed)
        assert list_jobs("--jobs=184_3") == []
        cancel("184", 3)
    (answer / "failed").write_text("scancel: error: Kill job error on job id 184: Access/permission denied")
    with pytest.raises(JobServiceError, match="permission denied"):
        cancel("184", 3)


def test_without_slurm_the_error_names_the_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="no 'sbatch' on the PATH"):
        ask("sbatch")
    from executors import SlurmExecutor

    with pytest.raises(MissingDependencyError, match="such as a login node"):
        SlurmExecutor()


def test_no_variable_of_a_surrounding_job_and_no_default_of_a_command_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_others = ("SLURM_JOB_ID", "SLURM_NTASKS", "SQUEUE_STATES", "SCANCEL_INTERACTIVE", "REPLICA_RANK")
    dropped = (*of_others, "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_WAIT")
    kept = ("SLURM_CONF", "SLURM_JWT", "SBATCH_PARTITION", "REPLICAS_RENDEZVOUS", "MINE")
    for name in (*dropped, *kept):
        monkeypatch.setenv(name, "x")
    found = command_environment()
    assert [name for name in dropped if name in found] == []
    assert [name for name in kept if name not in found] == []


def test_options_that_are_set_here_are_refused_by_name_also_abbreviated() -> None:
    long = ("--requeue", "--array=0-3", "--arr=1", "--time=5", "--wrap=true", "--input=/x", "--help")
    for option in (*long, "-a1", "-a", "-t5", "-Jme", "-W", "-i/x"):
        with pytest.raises(ValueError, match=r"is set by `replicas` itself, got '-"):
            check_sbatch_options([option])
    for option in ("job.sh", "", "--", "-"):
        with pytest.raises(ValueError, match="Write each as one word"):
            check_sbatch_options([option])
    check_sbatch_options(["--exclude=n3", "--time-min=1", "-Cgpu", "--exclusive", "--mem-per-cpu=5"])


def test_gpus_are_written_as_slurm_names_them() -> None:
    assert [gres_of(gpu) for gpu in ("H100:2", "a100", "2")] == ["gpu:h100:2", "gpu:a100", "gpu:2"]
    for gpu in ("", "H100:", "H100,license:1", "H100:two", "-x"):
        with pytest.raises(ValueError, match=f"got gpu='{gpu}'"):
            gres_of(gpu)


def test_a_row_of_another_shape_is_left_out(answer: Path) -> None:
    (answer / "said").write_text("\n184|3|RUNNING\n184|x|RUNNING|None|0|otter|\n184|3|RUNNING|None|0|otter|\n")
    assert list_jobs() == [Row("184", 3, "RUNNING", "None", "0", "otter")]


def test_a_job_whose_number_another_has_by_now_is_lost(answer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmJobs, "_cluster", "here")
    key = JobKey("s3://bucket/runs", "otter", 3, 0)
    job_id = {"id": "184", "task": 3, "cluster": "here"}
    service = SlurmJobs()
    for name, state in ((key.group, JobState(False)), ("another", UNKNOWN)):
        (answer / "said").write_text(f"184|3|RUNNING|None|0|{key.group}|\n")
        service.verify(job_id, key)
        (answer / "said").write_text(f"184|3|RUNNING|None|0|{name}|\n")
        assert service.state(job_id) == state


def test_a_controller_that_falls_silent_after_sbatch_starts_no_second_array(answer: Path) -> None:
    (answer / "sbatch").write_text(f"#!/bin/sh\necho >> {answer}/asked\ntouch {answer}/is-silent\necho 184\n")
    (answer / "scontrol").write_text(
        f"#!/bin/sh\nif mv {answer}/is-silent {answer}/was-silent 2> /dev/null; then\n"
        "echo 'Unable to contact slurm controller' >&2; exit 1; fi\necho 'ClusterName = here'\n"
    )
    for name in ("sbatch", "scontrol"):
        (answer / name).chmod(0o755)
    service = SlurmJobs()
    start = retrying(lambda pause_s: None)
    (job_id,) = start(service.start_jobs, [JobSpec(JobKey("s3://bucket/runs", "otter", 0, 1), ("true",), (), {}, {})])
    assert job_id == {"id": "184", "task": 0, "cluster": "here"}
    assert (answer / "asked").read_text().count("\n") == 1


def test_slurm_is_checked_with_the_requested_time_limit(answer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is asked for half an hour plus the margin of a launch. If it refuses that, it is asked for half an hour."""
    monkeypatch.setattr(SlurmJobs, "_cluster", "here")
    refuses = f'echo "$*" >> {answer}/asked\ncase "$*" in *--time={"{}"}*) echo refused >&2; exit 1; esac\necho 184\n'
    for refused, tested, asked in (("none", ["45"], "45"), ("45", ["45", "30"], "30")):
        (answer / "asked").unlink(missing_ok=True)
        (answer / "sbatch").write_text("#!/bin/sh\n" + refuses.format(refused))
        job = JobSpec(
            JobKey("file:///r", "otter", 0, 0), ("true",), (), {}, {}, limit_s=1800 + INSTALL_S, margin_s=INSTALL_S
        )
        checking = SlurmJobs(log_dir=str(answer))
        checking.check_account(None, 1800, ())
        checking.start_jobs([job])
        lines = (answer / "asked").read_text().splitlines()
        assert [line.partition("--time=")[2].split()[0] for line in lines] == [*tested, asked]
        SlurmJobs(log_dir=str(answer)).start_jobs([job])  # like a resume from another machine
        assert (answer / "asked").read_text().splitlines()[-1] == lines[-1]
        assert f"--time={asked}" in checking.describe(job)["command"]


def test_logs_are_found_from_another_folder_than_that_of_the_launch(
    answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlurmJobs, "_cluster", "here")
    monkeypatch.setenv("HOME", str(answer))
    job = JobSpec(JobKey("file:///r", "otter", 0, 0), ("true",), (), {}, {})
    (answer / "sbatch").write_text("#!/bin/sh\necho 184\n")
    for named in ("logs", "~/logs"):
        monkeypatch.chdir(answer)
        launching = SlurmJobs(log_dir=named)
        (job_id,) = launching.start_jobs([job])
        (log,) = (answer / "logs").glob("otter/*/replicas/0000/0")
        (log / "output.log").write_text("mine\n")
        monkeypatch.chdir("/")
        reading = SlurmJobs(**launching.options)
        assert reading.logs(reading.verify(job_id, job.key), 5) == "mine\n"
        shutil.rmtree(answer / "logs")


def test_a_run_that_is_removed_leaves_no_log_in_its_log_dir(
    answer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SlurmJobs, "_cluster", "here")
    (answer / "sbatch").write_text("#!/bin/sh\necho 184\n")
    store, executor = store_at(tmp_path / "runs"), SlurmExecutor(log_dir=str(tmp_path / "logs"))
    spec = create_run(store, "otter", "job:main", {}, 1, backend="slurm")
    attempt = Attempt(store, "otter", 0)
    for launched_at in (spec.launched_at, 1.0):  # the second is an earlier run with the same id
        executor.service.start_jobs([JobSpec(JobKey.of(attempt, launched_at), ("true",), (), {}, {})])
    attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))
    assert len([*(tmp_path / "logs" / "otter").iterdir()]) == 2
    attach(f"{tmp_path}/runs/otter", executor=executor).remove()
    (other,) = (tmp_path / "logs" / "otter").iterdir()
    assert other.name == JobKey.of(attempt, 1.0).nonce


def test_a_silent_controller_is_found_out_before_anything_is_asked_for(answer: Path) -> None:
    (answer / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    (answer / "scontrol").chmod(0o755)
    (answer / "sbatch").write_text(f"#!/bin/sh\ntouch {answer}/asked\necho 184\n")
    with pytest.raises(JobServiceError) as caught:
        SlurmJobs().start_jobs([JobSpec(JobKey("s3://bucket/runs", "otter", 0, 1), ("true",), (), {}, {})])
    assert (caught.value.kind, (answer / "asked").exists()) == ("unavailable", False)


def test_jobs_are_asked_for_in_all_partitions(answer: Path) -> None:
    (answer / "squeue").write_text(f"#!/bin/sh\necho $* >> {answer}/asked\n")
    SlurmJobs().find(JobKey("s3://bucket/runs", "otter", 0, 0))
    list_jobs("--jobs=184")
    asked = [line.split() for line in (answer / "asked").read_text().splitlines()]
    assert ["--all" in options for options in asked] == [True, True], (
        "--all is given, because hidden partitions are listed only with it"
    )


def test_the_key_of_another_run_reaches_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_KEY, "ab" * 32)
    assert RUN_KEY not in command_environment()


def test_an_environment_that_names_another_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for named in ("", "here"):
        monkeypatch.setenv("SLURM_CLUSTERS", named)
        check_clusters("here")
    monkeypatch.setenv("SBATCH_CLUSTERS", "there")
    with pytest.raises(BackendError, match=r"SBATCH_CLUSTERS is 'there'.* SLURM_CONF, which is 'here'"):
        check_clusters("here")
