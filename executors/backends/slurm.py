"""SlurmExecutor: runs replicas as jobs of a Slurm cluster, with the commands `sbatch`, `squeue` and `scancel`.

The replicas that a launch or a resume starts are one job array, and their ranks are the task ids. A cluster only takes
task ids below its `MaxArraySize`, by default 1001. So each thousand ranks have an array of their own. Slurm forgets a
job some minutes after its end, so outcomes come from the store.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.attempt import Attempt
from executors.backends import slurm_commands as commands
from executors.backends.jobs.executor import INSTALL_S, JobExecutor, options_of
from executors.backends.jobs.service import (
    RUN_LABEL,
    STORE_LABEL,
    UNKNOWN,
    ForeignJobError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    JobState,
    RunningJob,
    common_env,
    option,
    shortened,
)
from executors.logs.readers import FileLog
from executors.masking import MASK, masked
from executors.registry.run_index import state_dir
from executors.store import store_at
from executors.task.stored import PYTHON
from executors.view.report.text import one_line

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]{0,199}")
SUBMITTED = re.compile(r"(\d+)(?:;\S*)?")
ARRAY = re.compile(r"\d{1,12}")
DIGITS = 3
CORES = ("--cpus-per-task", "-c", "--cpus-per-gpu")  # options of `sbatch` by which the user gives the number of cores
"""The last digits of a rank that are its task id. Ranks 0 to 999 are in one array, and 1000 to 1999 in the next."""
FRESH_S = 0.5  # for this time a list of an array's jobs counts, because all its ranks are searched at the same time


# More than 20 methods: it makes every call of a JobService.
@dataclass(eq=False, kw_only=True)
class SlurmJobs(JobService):
    """The jobs of this user on one cluster. `SlurmExecutor` describes the fields.

    The class has more than 20 methods. Each is one call of `JobService`, or a step of a start: the sizes that
    the cluster accepts, the request, and the file of the log.

    Raises:
        MissingDependencyError: Slurm's commands are not installed on this machine.
        ValueError: an option of `sbatch` is set by this project itself.

    Example:
        SlurmJobs(partition="gpu").check_account("H100", 3600.0, [])
    """

    name = "Slurm"
    log_advice = f"Its node writes it elsewhere. {commands.FOLDER_ADVICE}"
    starts_together = True
    lists_running = True

    partition: str | None = option(None, NAMES)
    account: str | None = option(None, NAMES)
    qos: str | None = option(None, NAMES)
    cpus: int | None = option(None, int)
    memory_mb: int | None = option(None, int)
    sbatch: Sequence[str] = ()
    python: str | None = None
    log_dir: str | None = None

    def __post_init__(self) -> None:
        if shutil.which("sbatch") is None:
            raise commands.not_installed("sbatch")
        commands.check_sbatch_options(self.sbatch)
        if self.log_dir:  # absolute, because a process in another folder may use this option later
            self.log_dir = str(Path(self.log_dir).expanduser().absolute())
        self._keys: dict[tuple[str, int], JobKey] = {}
        """The attempt of each array and task that this process has started, or that Slurm has confirmed."""
        self._found: dict[str, tuple[float, list[commands.Row]]] = {}
        self._granted: dict[tuple[str | None, int | None], int | None] = {}
        """The time limits that the cluster accepts, by GPU and requested limit."""
        self._lock = threading.Lock()

    def command(self) -> tuple[str, ...]:
        _, *rest = super().command()
        return (self.python or sys.executable, *rest)

    @property
    def python_of_replicas(self) -> str | None:
        return PYTHON if self.python is None else None

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        commands.secrets_of(secret_names)
        commands.check_clusters(self._cluster)
        self._fit(gpu, None if timeout_s is None else int(timeout_s + INSTALL_S), INSTALL_S)

    def start_jobs(self, jobs: Sequence[JobSpec]) -> list[JobId]:
        # Asked for before `sbatch`. If this question failed after it, the caller would believe that no job was started.
        self._cluster  # noqa: B018
        for job in jobs:
            self._log_of(job.key).parent.mkdir(parents=True, exist_ok=True)
        job = jobs[0]
        env = {**common_env(jobs), **commands.secrets_of(job.secret_names), **job.credentials}
        if job.margin_s and (job.gpu, job.limit_s) not in self._granted:
            self._fit(job.gpu, job.limit_s, job.margin_s)
        arrays: dict[str, str] = {}
        try:
            for name, ours in _by_array(jobs).items():
                arrays[name] = self._submit(ours, env)
        except JobServiceError as error:
            if error.kind != "unknown":  # after an unknown answer, the caller searches for the jobs instead
                _take_back(arrays.values(), error)
            raise
        finally:
            for each in jobs:
                self._found.pop(_array_name(each.key), None)
        return [self._noted(arrays[_array_name(job.key)], job.key) for job in jobs]

    def _submit(self, jobs: Sequence[JobSpec], env: Mapping[str, str]) -> str:
        """Start jobs as one array, and return its id."""
        script = commands.array_script(jobs[0].command, first_rank=jobs[0].key.rank - _task(jobs[0].key))
        try:
            answer = commands.ask(*self._request(jobs), script=script, env=env, may_have_acted=True)
        except JobServiceError as error:
            if commands.BAD_ARRAY not in str(error):
                raise
            most = commands.configuration("MaxArraySize")
            raise JobServiceError(
                f"{error} The cluster's MaxArraySize is {most}, so it only takes lower ranks.", "rejected"
            ) from error
        submitted = SUBMITTED.fullmatch(answer.strip().rpartition("\n")[2])
        if submitted is None:
            raise JobServiceError(f"Slurm: sbatch printed {one_line(answer)!r} instead of a job id.", "unknown")
        return submitted[1]

    def find(self, key: JobKey) -> list[JobId]:
        name = _array_name(key)
        with self._lock:  # other threads that search in this array wait for the list and use it
            at, rows = self._found.get(name, (-math.inf, []))
            if time.monotonic() > at + FRESH_S:
                rows = commands.list_jobs("--me", f"--name={name}")
                self._found[name] = (time.monotonic(), rows)
        found = sorted(int(row.array) for row in rows if _runs(row, key))
        return [self._noted(str(array), key) for array in found]

    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        array, task = job_id.get("id"), job_id.get("task")
        if not isinstance(array, str) or not ARRAY.fullmatch(array) or type(task) is not int or task != _task(key):
            raise ForeignJobError(self.name, key)
        self._check_cluster(job_id)
        row = commands.find_job(array, task)
        if row is not None and not _runs(row, key):
            raise ForeignJobError(self.name, key)
        return self._noted(array, key)

    def state(self, job_id: JobId) -> JobState:
        self._check_cluster(job_id)
        place = job_id["id"], job_id["task"]
        row, key = commands.find_job(*place), self._keys.get(place)
        # A cluster that lost its state numbers jobs from the start again, so an id may name another job.
        is_another = row is not None and key is not None and not _runs(row, key)
        return UNKNOWN if row is None or is_another else row.job_state

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        asked = {key: str(job_id.get("id")) for key, job_id in jobs.items() if ARRAY.fullmatch(str(job_id.get("id")))}
        if not (asked := {key: array for key, array in asked.items() if jobs[key] == self._job_id(array, key)}):
            return {}
        rows = commands.list_jobs(f"--jobs={','.join(sorted(set(asked.values())))}")
        listed = {(row.array, row.task): row for row in rows}
        found = {}
        for key, array in asked.items():
            row = listed.get((array, _task(key)))
            if row is None or _runs(row, key):
                self._keys[array, _task(key)] = key
                # A task of an array that is cancelled before it starts is forgotten at once.
                found[key] = UNKNOWN if row is None else row.job_state
        return found

    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        run, found = re.escape(labels[RUN_LABEL]), []
        for row in commands.list_jobs("--me"):  # jobs have no labels, but their names begin with the run and its store
            name = re.fullmatch(rf"{run}-([0-9a-f]{{8}})-[as]\d+", row.name)
            if name is not None and labels.get(STORE_LABEL) in (None, name[1]) and not row.job_state.has_ended:
                job_id = {"id": row.array, "task": row.task, "cluster": self._cluster}
                found.append(RunningJob(job_id, {RUN_LABEL: labels[RUN_LABEL], STORE_LABEL: name[1]}))
        return found

    def reports_preemption(self, gpu: str | None) -> bool:
        return True

    def commands_to_end(self, run_id: str, job_ids: Sequence[JobId] = ()) -> str:
        known = {
            key.group for (array, _), key in self._keys.items() if any(array == each.get("id") for each in job_ids)
        }
        if known:
            return f"scancel --me --name={','.join(sorted(known))}"
        listed = f"squeue --me --noheader --format=%j | sort -u | grep ^{run_id}-"
        return f"{listed}; scancel --me --name=NAME for each name that this prints"

    def open_log(self, job_id: JobId) -> FileLog:
        """Return the file that Slurm writes. Its path comes from the key, and never from a record of another user."""
        key = self._keys.get((job_id["id"], job_id["task"]))
        log = FileLog(Path(os.devnull) if key is None else self._log_of(key))
        log.may_lag = True  # a network file system shows late what another machine has written
        return log

    def stop(self, job_id: JobId) -> None:
        self._check_cluster(job_id)
        commands.cancel(job_id["id"], job_id["task"])

    def describe(self, job: JobSpec) -> dict[str, Any]:
        secrets = dict.fromkeys((*job.secret_names, *job.credentials), MASK)
        command = shlex.join(shortened(job.command))
        env = {**masked(job.env), **secrets}
        return {"name": job.key.name, "command": self._request([job]), "runs": command, "env": env}

    def risks(self) -> Iterator[tuple[str, str]]:
        if "job_env" in commands.configuration("AccountingStoreFlags").split(","):
            yield commands.STORES_ENV, "Use a directory that all nodes share, or credentials found on the nodes."

    def folder_of(self, key: JobKey) -> Path:
        """Return the folder with the logs of a job's run.

        Args:
            key: the run, the rank and the attempt.
        """
        return Path(self.log_dir or state_dir().absolute()) / key.run_id / key.nonce

    @functools.cached_property
    def _cluster(self) -> str:
        return commands.configuration("ClusterName")

    def _check_cluster(self, job_id: JobId) -> None:
        """Refuse a job of another cluster, because this cluster may have a job with the same number."""
        if (named := job_id.get("cluster")) != self._cluster:
            raise JobServiceError(
                f"The job runs on the cluster {str(named)[:100]!r}, and Slurm's commands here ask {self._cluster!r}. "
                "Use a machine of that cluster.",
                "rejected",
            )

    def _noted(self, array: str, key: JobKey) -> JobId:
        self._keys[array, _task(key)] = key
        return self._job_id(array, key)

    def _job_id(self, array: str, key: JobKey) -> JobId:
        return {"id": array, "task": _task(key), "cluster": self._cluster}

    def _log_of(self, key: JobKey) -> Path:
        """Return the file of a job's log. The layout is that of local logs, and each run has its own folder."""
        place = Path("spares" if key.is_spare else "replicas", f"{key.rank:04d}", str(key.attempt))
        return self.folder_of(key) / place / "output.log"

    def _request(self, jobs: Sequence[JobSpec]) -> list[str]:
        job, tasks = jobs[0], commands.ranges(sorted(_task(job.key) for job in jobs))
        log, limit_s = self._log_of(job.key), self._granted.get((job.gpu, job.limit_s), job.limit_s)
        folder = f"{log.parents[1].name[:-DIGITS]}%{DIGITS}a"  # Slurm puts the task id in place of `%3a`
        output = f"{str(log.parents[2]).replace('%', '%%')}/{folder}/{log.parent.name}/{log.name}"
        return [
            *("sbatch", "--parsable", *self._sizes(job.gpu, limit_s, job.procs), f"--job-name={_array_name(job.key)}"),
            *(f"--array={tasks}", "--no-requeue", "--open-mode=append", f"--output={output}", "--chdir=/"),
            "--export=ALL",
        ]

    def _fit(self, gpu: str | None, limit_s: int | None, margin_s: int) -> None:
        """Find out whether the cluster accepts a time limit, or else the limit without its margin. Note which.

        Without the margin, Slurm ends the job at the limit. It reports that, so the replica still ends as `timeout`.
        """
        try:
            self._try(gpu, limit_s)
            self._granted[gpu, limit_s] = limit_s
        except JobServiceError as error:
            if limit_s is None or error.kind != "rejected":
                raise
            self._try(gpu, limit_s - margin_s)
            self._granted[gpu, limit_s] = limit_s - margin_s

    def _try(self, gpu: str | None, limit_s: int | None) -> None:
        """Check that the cluster would run a job of this size.

        Raises:
            JobServiceError: the cluster would not run it.
        """
        sizes = self._sizes(gpu, limit_s)
        # Without --time-min, most clusters accept a job that is longer than its partition's limit, and never run it.
        least = [word.replace("--time=", "--time-min=") for word in sizes if word.startswith("--time=")]
        try:
            commands.ask("sbatch", "--test-only", *least, *sizes, script="#!/bin/sh\ntrue\n")
        except JobServiceError as error:
            if limit_s is None or not any(words in str(error) for words in commands.TOO_LONG):
                raise
            asked = f"The time limit of the replicas is {math.ceil(limit_s / 60)} min"
            raise JobServiceError(
                f"{error} {asked}. Choose a shorter one, or another partition.", error.kind
            ) from error

    def _sizes(self, gpu: str | None, limit_s: int | None, procs: int = 1) -> list[str]:
        # The processes of a replica are forks of one task, so Slurm would give them the core of one process.
        cores = procs if procs > 1 and not any(word.startswith(CORES) for word in self.sbatch) else None
        given = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "cpus-per-task": cores if self.cpus is None else self.cpus,
            "mem": self.memory_mb,
            "gres": None if gpu is None else commands.gres_of(gpu),
            "time": None if limit_s is None else math.ceil(limit_s / 60),
        }
        sizes = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [*self.sbatch, *sizes, "--nodes=1", "--ntasks=1"]


class SlurmExecutor(JobExecutor):
    """Runs replicas as jobs of a Slurm cluster.

    Example:
        launch(SlurmExecutor(partition="gpu"), train, n=4)

    Args:
        partition: the partition to run in. Default: $SBATCH_PARTITION, or the cluster's default.
        account: the account that pays. Default: $SBATCH_ACCOUNT, or the cluster's default.
        qos: the quality of service. Default: $SBATCH_QOS, or the cluster's default.
        cpus: the cores of each replica. Default: one for each process of a replica that has several (`procs`), else
            the cluster's default.
        memory_mb: the memory of each replica, in MiB. Default: the cluster's default.
        sbatch: more options of `sbatch`, each as one word, as in ("--constraint=a100", "--exclude=n7"). Default: none.
        python: the path of Python on the nodes. Default: the path of this Python.
        pip: the requirements of the replicas. Default: those in the workspace's requirements.txt or pyproject.toml.
        log_dir: a folder for logs that the nodes share with this machine. Default: the directory of runs, in the home.

    Raises:
        MissingDependencyError: Slurm's commands are not installed on this machine.
        ValueError: an option of `sbatch` is set by this project itself.
    """

    backend_name = "slurm"
    recordable_options = SlurmJobs.recordable_options()
    supports_inter_replica_network = True
    needs_shared_rendezvous = False
    default_timeout_s = None

    @options_of(SlurmJobs)
    def __init__(self, service: SlurmJobs) -> None:
        super().__init__(service)
        self._slurm = service

    def remove_files(self, store_url: str, run_id: str, launched_at: float) -> None:
        """Delete the logs of a run; see `LeavesFiles`."""
        folder = self._slurm.folder_of(JobKey.of(Attempt(store_at(store_url), run_id, 0), launched_at))
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is not empty: another run of this id has logs there
            folder.parent.rmdir()


def _array_and_task(rank: int) -> tuple[int, int]:
    """Return the number of a rank's array in the launch, and the rank's task id in that array."""
    size = int(10**DIGITS)
    return rank // size, rank % size


def _task(key: JobKey) -> int:
    return _array_and_task(key.rank)[1]


def _array_name(key: JobKey) -> str:
    """Return the name of the jobs of an array: the name of the group, and from the second array on its number."""
    number, _ = _array_and_task(key.rank)
    return f"{key.group}-{number}" if number else key.group


def _by_array(jobs: Sequence[JobSpec]) -> dict[str, list[JobSpec]]:
    found: dict[str, list[JobSpec]] = {}
    for job in jobs:
        found.setdefault(_array_name(job.key), []).append(job)
    return found


def _take_back(arrays: Iterable[str], refused: JobServiceError) -> None:
    """End the arrays that were started before another array was refused, so that none or all of them are started.

    Raises:
        JobServiceError: Slurm did not end an array. Its kind is "unknown".
    """
    for array in arrays:
        try:
            commands.cancel(array)
        except JobServiceError as error:
            raise JobServiceError(f"{refused} Its array {array} was not ended: {error}", "unknown") from error


def _runs(row: commands.Row, key: JobKey) -> bool:
    return row.name == _array_name(key) and row.task == _task(key)
