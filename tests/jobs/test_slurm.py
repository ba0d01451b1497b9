"""Tests the behavior that only Slurm has, with a real cluster on loopback."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers.slurm.cluster import Cluster
from servers.slurm.commands import Commands
from support.cli import HereInstead

from executors import Run, SlurmExecutor, attach, launch
from executors.attempt import Attempt
from executors.backends.jobs.service import JobId, JobKey, JobServiceError, JobSpec
from executors.backends.slurm import SlurmJobs
from executors.errors import BackendError, LaunchError, RunNotFoundError
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import to_bytes
from executors.store.run_key import RUN_KEY
from executors.testing import eventually

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

HANGING = "executors.testing.tasks:hang"


def started(n: int, entrypoint: str = "job.py:main", **more: Any) -> Run:
    return launch(SlurmExecutor(), entrypoint, n, run_id="otter", **more)


def job_of(run: Run, rank: int) -> str:
    """Return the id of a rank's job for Slurm's commands."""
    job = run.handles[rank].metadata["job"]
    return f"{job['id']}_{job['task']}"


def group_of(run: Run) -> str:
    """Return the names of the jobs that a launch started."""
    return JobKey(view_of(run).store.url, run.run_id, 0, 0, launched_at=view_of(run).record.created_at).group


def states(slurm: Cluster, *which: str) -> list[str]:
    return slurm.run("squeue", "--noheader", "--array", "--states=all", *which, "--format=%T").split()


def recorded_starts(monkeypatch: pytest.MonkeyPatch) -> list[list[JobSpec]]:
    """Return a list to which the groups of jobs that are started from now on are added."""
    asked: list[list[JobSpec]] = []
    start_jobs = SlurmJobs.start_jobs

    def recording(self: SlurmJobs, jobs: list[JobSpec]) -> list[JobId]:
        asked.append(list(jobs))
        return start_jobs(self, jobs)

    monkeypatch.setattr(SlurmJobs, "start_jobs", recording)
    return asked


def test_an_array_is_asked_for_once_and_leaves_no_folder_on_its_nodes(
    slurm: Cluster, slurm_commands: Commands, tmp_path: Path
) -> None:
    run = started(3)
    assert run.results() == [{"rank": rank} for rank in range(3)]
    (call,) = slurm_commands.calls("sbatch")
    assert "--array=0-2" in call
    eventually(lambda: set(states(slurm, "--name=" + group_of(run))) == {"COMPLETED"})
    assert list((tmp_path / "scratch").iterdir()) == []


# --- a controller that does not answer


def test_jobs_that_a_stopped_slurm_controller_accepted_are_started_once(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_jobs, kinds = SlurmJobs.start_jobs, []

    def at_a_stopped_controller(self: SlurmJobs, jobs: list[JobSpec]) -> list[JobId]:
        try:
            with slurm.stopped_controller():
                return start_jobs(self, jobs)
        except JobServiceError as error:
            kinds.append(error.kind)
            raise

    monkeypatch.setattr(SlurmJobs, "start_jobs", at_a_stopped_controller)
    with slurm.configured(MessageTimeout="2"):
        run = started(2)
        assert run.results() == [{"rank": 0}, {"rank": 1}]
    assert kinds == ["unknown"]
    assert len(states(slurm, f"--name={group_of(run)}")) == 2


def test_an_answer_that_is_lost_costs_no_job(slurm: Cluster, slurm_commands: Commands) -> None:
    slurm_commands.lose_reply()
    run = started(2)
    assert run.results() == [{"rank": 0}, {"rank": 1}]
    assert len(slurm_commands.calls("sbatch")) == 1
    assert len(states(slurm, f"--name={group_of(run)}")) == 2


def test_an_unreachable_controller_counts_as_unavailable_and_can_be_asked_again(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SlurmExecutor().service
    job = JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), ("true",), (), {}, {})
    job_id = service.start(job)
    nobody = tmp_path / "slurm.conf"
    lines = (slurm.folder / "slurm.conf").read_text().splitlines()
    nobody.write_text("\n".join("SlurmctldPort=1" if line.startswith("SlurmctldPort=") else line for line in lines))
    monkeypatch.setenv("SLURM_CONF", str(nobody))
    calls = [
        lambda: service.check_account(None, None, ()),
        lambda: service.start(job),
        lambda: service.find(job.key),
        lambda: service.state(job_id),
        lambda: service.states({job.key: job_id}),
        lambda: service.stop(job_id),
    ]

    def kind_of(call: Any) -> str:
        with pytest.raises(JobServiceError, match="Unable to contact slurm controller") as caught:
            call()
        return caught.value.kind

    with ThreadPoolExecutor(len(calls)) as pool:
        assert list(pool.map(kind_of, calls)) == ["unavailable"] * len(calls)


# --- refused launches


def test_a_resource_that_the_cluster_does_not_have_is_refused_before_anything_is_written(
    slurm: Cluster, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    before = slurm.jobs()
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"partition": "nope"}, {}, "invalid partition specified: nope"),
        ({"account": "nobody"}, {}, "Invalid account"),
        ({"cpus": 9}, {}, "node configuration is not available"),
        ({"sbatch": ["--constraint=a100"]}, {}, "Invalid feature"),
        ({"sbatch": ["--no-such-option"]}, {}, "unrecognized option '--no-such-option'"),
        ({}, {"gpu": "A100"}, "node configuration is not available"),
        ({}, {"gpu": "H100:3"}, "node configuration is not available"),
        ({}, {"gpu": "H100,license:1"}, "gpu='H100,license:1'"),
        ({}, {"secrets": ["NOT_SET"]}, "'NOT_SET' is not set"),
    ]
    for options, arguments, words in cases:
        with pytest.raises((BackendError, ValueError), match=words):
            launch(SlurmExecutor(**options), "job.py:main", 2, run_id="otter", **arguments)
    with pytest.raises(RunNotFoundError):
        attach("otter")
    assert set(slurm.jobs()) <= set(before)  # Slurm may have forgotten some of these jobs
    assert launch(SlurmExecutor(account="known"), "job.py:main", 1).results() == [{"rank": 0}]


def test_a_start_that_is_refused_after_the_check_leaves_nothing(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = slurm.jobs()
    monkeypatch.setattr(SlurmJobs, "check_account", lambda *_: None)
    with pytest.raises(LaunchError, match="invalid partition specified: nope"):
        launch(SlurmExecutor(partition="nope"), "job.py:main", 2, run_id="otter")
    assert set(slurm.jobs()) <= set(before)


@pytest.mark.parametrize("enforced", ["NO", "ALL"])
def test_replicas_may_run_for_as_long_as_their_partition_lets_them(
    slurm: Cluster, slurm_commands: Commands, enforced: str
) -> None:
    with slurm.configured(EnforcePartLimits=enforced):
        for timeout_s, asked in ((900, "--time=30"), (1800, "--time=30")):
            run = launch(SlurmExecutor(partition="short"), "job.py:main", 1, timeout=timeout_s)
            assert run.results() == [{"rank": 0}]
            assert asked in slurm_commands.calls("sbatch")[-1]
        with pytest.raises(BackendError, match=r"The time limit of the replicas is 31 min\. Choose a short"):
            launch(SlurmExecutor(partition="short"), "job.py:main", 1, run_id="otter", timeout=1801)
    with pytest.raises(RunNotFoundError):
        attach("otter")


# --- the environment of jobs


def test_a_replica_gets_its_own_variables_and_none_of_a_surrounding_job(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    surrounding = {"SLURM_CPUS_PER_TASK": "7", "SLURM_MEM_PER_NODE": "3999", "SLURM_NTASKS": "6", "SLURM_HINT": "x"}
    defaults = {"SQUEUE_STATES": "PENDING", "SQUEUE_FORMAT2": "name", "SQUEUE_USERS": "nobody", "SBATCH_WAIT": "1"}
    defaults |= {"SBATCH_ARRAY_INX": "5-9", "SBATCH_ERROR": "/nowhere/x", "SBATCH_INPUT": "/nowhere/x"}
    of_a_replica = {"REPLICA_FOLDER": "/nowhere", "REPLICA_SPARE": "1", RUN_KEY: "ab" * 32}
    for name, value in {**surrounding, **defaults, **of_a_replica, "MY_SECRET": "hush", "MINE": "of here"}.items():
        monkeypatch.setenv(name, value)
    names = [*surrounding, "SLURM_CPUS_ON_NODE", "REPLICA_SPARE", RUN_KEY, "MY_SECRET", "GIVEN", "MINE"]
    executor, args = SlurmExecutor(cpus=2, memory_mb=100), {"names": names}
    more: dict[str, Any] = {"env": {"GIVEN": "a\n'ä'"}, "secrets": ["MY_SECRET"]}
    (found,) = launch(executor, "executors.testing.tasks:variables", 1, args=args, **more).results()
    assert (found["SLURM_CPUS_PER_TASK"], found["SLURM_CPUS_ON_NODE"], found["SLURM_MEM_PER_NODE"]) == ("2", "2", "100")
    assert (found["SLURM_HINT"], found["REPLICA_SPARE"], found[RUN_KEY]) == (None, None, None)
    assert found["MINE"] == "of here"
    assert (found["MY_SECRET"], found["GIVEN"]) == ("hush", "a\n'ä'")


def test_each_process_of_a_replica_has_a_core_unless_the_user_gives_another_number(
    slurm: Cluster, tmp_path: Path
) -> None:
    names = ["SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "REPLICA_MEMBERS"]
    run = launch(SlurmExecutor(), "executors.testing.tasks:variables", 1, args={"names": names}, procs=2)
    (found,) = run.results()
    job = slurm.run("scontrol", "show", "job", job_of(run, 0))
    assert "CPUs/Task=2" in job
    assert "NumTasks=1" in job
    assert found["REPLICA_MEMBERS"] == "2"
    spec = JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), ("true",), (), {}, {}, procs=2)
    for options, cores in (({"cpus": 1}, "1"), ({"sbatch": ("--cpus-per-task=1",)}, "1"), ({"sbatch": ("-c1",)}, "1")):
        started_as = SlurmExecutor(**options).service.start(spec)
        assert f"CPUs/Task={cores}" in slurm.run("scontrol", "show", "job", f"{started_as['id']}_{started_as['task']}")


def test_a_job_gets_the_number_of_its_gpus(slurm: Cluster) -> None:
    service = SlurmExecutor().service
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    for gpu, visible in (("H100:2", "0,1"), ("h100", "0"), ("1", "0")):
        job = JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), (sys.executable, "-c", code), (), {}, {}, gpu=gpu)
        job_id = service.start(job)
        eventually(lambda job_id=job_id: service.state(job_id).has_ended)  # type: ignore[misc]
        assert service.logs(job_id, 1) == f"{visible}\n"


def test_no_value_of_the_environment_is_in_the_arguments_of_a_process(
    slurm: Cluster, slurm_commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hush-of-secrets")
    run = started(1, HANGING, env={"GIVEN": "hush-of-env"}, secrets=["MY_SECRET"])
    eventually(lambda: "hanging" in run.logs(rank=0))
    seen = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"executors.supervisor" in b"".join(seen)
    assert b"hush-of" not in b"".join(seen)
    assert "hush-of" not in json.dumps([slurm_commands.calls(name) for name in ("sbatch", "squeue", "scontrol")])
    assert "hush-of" not in slurm.run("scontrol", "show", "job", job_of(run, 0))
    run.cancel()


def test_paths_may_have_spaces_and_percent_signs(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a b%j 'c' %%"
    for name in ("work", "scratch", "bin", "logs"):
        (odd / name).mkdir(parents=True)
    python = odd / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (odd / "work" / "job.py").write_bytes(Path("job.py").read_bytes())
    monkeypatch.chdir(odd / "work")
    monkeypatch.setenv("TMPDIR", str(odd / "scratch"))
    monkeypatch.setenv("XDG_STATE_HOME", str(odd / "state"))
    for executor in (SlurmExecutor(python=str(python), log_dir=str(odd / "logs")), SlurmExecutor()):
        run = launch(executor, "job.py:main", 2)
        assert run.results() == [{"rank": 0}, {"rank": 1}]
        assert "hello 0 of rank 1" in run.logs(rank=1)
    written = sorted(str(path.relative_to(odd)) for path in odd.rglob("output.log"))
    assert [path.rpartition("/replicas/")[2] for path in written] == [f"{rank:04d}/0/output.log" for rank in (0, 1)] * 2
    assert [path.split("/")[0] for path in written] == ["logs", "logs", "state", "state"]


# --- jobs that end


def test_a_node_that_does_not_see_the_folder_of_the_log_is_suspected(slurm: Cluster, here: HereInstead) -> None:
    options = ["--option", 'sbatch=["--hold"]', "--option", "log_dir=logs", "--run-id", "otter", "--detach"]
    told = here.replicas("launch", "job.py:main", "--backend", "slurm", "--n", "1", *options)
    assert "no time limit but the partition's" in told.stdout
    job = job_of(attach("otter"), 0)
    assert f"rank 0: job {job}" in here.replicas("status", "otter", "-v").stdout.splitlines()
    shutil.rmtree("logs")
    slurm.run("scontrol", "release", job)
    run = attach("otter")
    assert run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome.reason == "start_failed"
    assert "Perhaps its node cannot write to the folder of its log. Name a folder that the nodes share" in (
        outcome.error or ""
    )


def test_a_job_is_never_begun_again_by_slurm_nor_by_hand(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recorded_starts(monkeypatch)
    run = started(1, HANGING)
    eventually(lambda: "hanging" in run.logs(rank=0))
    with pytest.raises(RuntimeError, match="requeue"):
        slurm.run("scontrol", "requeue", job_of(run, 0))
    ((job,),) = asked
    service = SlurmExecutor().service
    run.cancel()
    eventually(lambda: states(slurm, f"--jobs={job_of(run, 0)}") == ["CANCELLED"])
    key = Attempt(view_of(run).store, "otter", 0).key("outcome.json")
    before = view_of(run).store.get(key)
    again = service.start(job)
    eventually(lambda: service.state(again).has_ended)
    assert (service.state(again).reason, service.state(again).exit_code) == (None, 0)
    assert "has ended" in service.logs(again, 1)
    assert view_of(run).store.get(key) == before


def test_jobs_that_slurm_has_forgotten_end_by_their_outcomes_and_are_not_lost(slurm: Cluster) -> None:
    with slurm.configured(MinJobAge="2"):
        # so that no request goes to Slurm
        run = started(2, "executors.testing.tasks:hang_on", args={"rank": 1}, detach=True)
        eventually(lambda: "hanging" in run.logs(rank=1))
        slurm.kill_job(job_of(run, 1))
        eventually(lambda: slurm.jobs() == [], "Slurm has forgotten the jobs", within_s=90.0)
        view_of(run).store.put(
            Attempt(view_of(run).store, "otter", 1).key("heartbeat.json"), to_bytes({"at": time.time() - 3600})
        )
        outcomes = attach("otter").outcomes()
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("succeeded", None), ("failed", "lost")]


def test_ranks_that_are_resumed_are_one_array(slurm: Cluster, slurm_commands: Commands) -> None:
    run = started(4, "job.py:fail", args={"ranks": [1, 3]})
    run.wait()
    assert [outcome.status for outcome in run.outcomes()] == ["succeeded", "failed", "succeeded", "failed"]
    run = resume(run)
    run.wait()
    (first, second) = slurm_commands.calls("sbatch")
    assert "--array=0-3" in first
    assert "--array=1,3" in second
    assert [(outcome.rank, outcome.attempt) for outcome in run.outcomes()] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [run.handles[rank].metadata["job"]["task"] for rank in (1, 3)] == [1, 3]


def test_a_preempted_replica_stays_so_and_its_next_attempt_is_ours(slurm: Cluster) -> None:
    run = launch(SlurmExecutor(partition="low"), "executors.testing.tasks:hang_on", 2, args={"rank": 1}, restarts=1)
    keeper = threading.Thread(target=run.wait)
    keeper.start()
    eventually(lambda: "hanging" in run.logs(rank=1))
    slurm.evict(job_of(run, 1))
    eventually(lambda: run.status().replicas[1].attempt == 1, "the next attempt has begun")
    (told,) = [event for event in run.events() if event.kind == "ended" and event.reason != "succeeded"]
    assert (told.rank, told.attempt, told.reason) == (1, 0, "preempted")
    (decided,) = [event for event in run.events() if event.kind == "decided"]
    assert decided.reason == "preempted"
    assert "was preempted: Slurm took its machine back" in told.why
    run.cancel()
    keeper.join()


def test_a_replica_whose_node_died_is_lost(slurm: Cluster) -> None:
    run = launch(SlurmExecutor(sbatch=["--nodelist=n3"]), HANGING, 1)
    eventually(lambda: "hanging" in run.logs(rank=0))
    slurm.kill_node("n3")
    try:
        run.wait(120)
    finally:
        slurm.start_node("n3")
    (outcome,) = run.outcomes()
    assert (outcome.reason, outcome.status) == ("lost", "failed")
    eventually(lambda: "down" not in slurm.run("sinfo", "--noheader", "--format=%T"), "the node is up again")


def test_asking_for_64_replicas_takes_one_request_and_so_does_each_look(
    slurm: Cluster, slurm_commands: Commands
) -> None:
    run = launch(SlurmExecutor(sbatch=["--hold"]), "job.py:main", 64, run_id="otter", detach=True)
    for _ in range(40):
        rows = run.status().replicas
    assert {row.doing for row in rows} == {"pending: JobHeldUser"}
    assert len(slurm_commands.calls("sbatch")) == 1
    assert len(slurm_commands.calls("squeue")) < 20
    run.cancel()
    run.wait()
    assert {(row.status, row.note) for row in run.status().replicas} == {("cancelled", "")}


# --- more ranks than an array has


def test_more_replicas_than_an_array_may_have_are_several_arrays(slurm: Cluster, slurm_commands: Commands) -> None:
    run = launch(SlurmExecutor(sbatch=["--hold"]), "job.py:main", 1200, run_id="otter", detach=True)
    first, second = slurm_commands.calls("sbatch")
    assert "--array=0-999" in first
    assert "--array=0-199" in second
    assert {row.doing for row in run.status().replicas} == {"pending: JobHeldUser"}
    run.cancel()
    run.wait()
    assert {row.status for row in run.status().replicas} == {"cancelled"}
    eventually(lambda: set(states(slurm, f"--name={group_of(run)},{group_of(run)}-1")) <= {"CANCELLED"})


def test_a_cluster_that_takes_shorter_arrays_is_reported_with_its_limit(slurm: Cluster) -> None:
    with slurm.configured(MaxArraySize="3"), pytest.raises(LaunchError, match="MaxArraySize is 3"):
        started(4)


def test_replicas_in_several_arrays_have_their_ranks_and_their_logs(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.slurm.DIGITS", 1)
    run = started(11)
    assert run.results() == [{"rank": rank} for rank in range(11)]
    assert [run.handles[rank].metadata["job"]["task"] for rank in (9, 10)] == [9, 0]
    assert all(f"of rank {rank}\n" in run.logs(rank=rank) for rank in (0, 1, 9, 10))


def test_an_array_that_is_refused_takes_the_earlier_ones_with_it(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.slurm.DIGITS", 1)
    submit, submitted = SlurmJobs._submit, list[str]()

    def second_is_refused(self: SlurmJobs, jobs: list[JobSpec], env: dict[str, str]) -> str:
        if submitted:
            raise JobServiceError("Slurm: Job violates accounting/QOS policy.", "rejected")
        submitted.append(submit(self, jobs, env))
        return submitted[0]

    monkeypatch.setattr(SlurmJobs, "_submit", second_is_refused)
    with pytest.raises(LaunchError, match="QOS policy"):
        launch(SlurmExecutor(sbatch=["--hold"]), HANGING, 11)
    eventually(lambda: set(states(slurm, f"--jobs={submitted[0]}")) <= {"CANCELLED"})


# --- records


def test_a_record_chooses_neither_the_file_that_is_read_nor_a_job_of_another_cluster(
    slurm: Cluster, tmp_path: Path
) -> None:
    service = SlurmExecutor().service
    key = JobKey("s3://bucket/runs", "otter", 0, 0)
    job_id = service.start(JobSpec(key, (sys.executable, "-c", "print('mine')"), (), {}, {}))
    eventually(lambda: service.logs(job_id, 5) == "mine\n")
    assert SlurmExecutor().service.logs(job_id, 5) == "", "the log of a job that was not verified is not read"
    elsewhere = {**job_id, "cluster": "another"}
    for call in (service.state, service.stop, lambda named: service.verify(named, key)):
        with pytest.raises(JobServiceError, match="on the cluster 'another', and Slurm's commands here ask 'replicas'"):
            call(elsewhere)
    assert set(SlurmJobs.recordable_options()) == {"partition", "account", "qos", "cpus", "memory_mb"}


def test_doctor_warns_that_the_cluster_keeps_environments_and_proves_that_logs_arrive(
    slurm: Cluster, here: HereInstead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(*arguments: str) -> list[tuple[str, str]]:
        rows = here.replicas("doctor", "--backend", "slurm", "--json", *arguments).json["findings"]
        return [(row["what"], row["state"]) for row in rows if row["what"] not in ("runs", "disk")]

    assert findings("--option", "partition=nope") == [("launch", "wrong")]
    with slurm.configured(AccountingStoreFlags="job_env"):
        assert findings("--probe") == [("launch", "ok"), ("service", "note"), ("probe", "ok")]
    monkeypatch.setattr(sys.modules["executors.cli.doctor"], "LOG_LIMIT_S", 0.0)
    monkeypatch.setattr(SlurmJobs, "logs", lambda *_: "")  # as if each node wrote into its own folder
    assert findings("--probe") == [("launch", "ok"), ("probe", "wrong")]
