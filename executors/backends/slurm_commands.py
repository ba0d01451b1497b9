"""Runs Slurm's commands with a clean environment, and translates their errors and the states of jobs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executors.backends.jobs.service import JobServiceError, JobState, Kind
from executors.errors import BackendError, MissingDependencyError
from executors.protocol import Reason
from executors.store.run_key import RUN_KEY

CALL_LIMIT_S = 60.0  # without a controller a command fails after 9 s, and with a stopped one after 10 s
OF_OTHER_JOBS = ("SLURM_", "SQUEUE_", "SCANCEL_", "REPLICA_")
"""The beginnings of variables that are not passed on. A job or replica around this process sets them for itself, and
they would change the sizes of new jobs and the output of commands."""
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""The variables that are passed on all the same, because the commands find the cluster with them."""
OPTIONS = ("SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_WAIT")
"""The variables that are not passed on because they are options of `sbatch` that this file sets or forbids."""
CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
BUSY = ("Unable to contact slurm controller", "Connection refused", "temporarily unable")
UNCLEAR = ("Socket timed out", "Zero Bytes were transmitted", "Message receive failure")
TOO_LONG = ("Requested time limit is invalid", "Invalid time-min")
BAD_ARRAY = "Invalid job array specification"
UNKNOWN_JOB = "Invalid job id"
HAS_ENDED = "already completing or completed"
GPU = re.compile(r"(?:[A-Za-z][A-Za-z0-9._-]*|\d+)(?::\d+)?")
OURS = (
    *("--array", "--chdir", "--clusters", "--error", "--export", "--export-file", "--help", "--input", "--job-name"),
    *("--nodes", "--ntasks", "--open-mode", "--output", "--parsable", "--requeue", "--no-requeue", "--test-only"),
    *("--time", "--usage", "--version", "--wait", "--wrap"),
    *("-D", "-J", "-M", "-N", "-V", "-W", "-a", "-e", "-h", "-i", "-n", "-o", "-t"),
)
SCRIPT = """#!/bin/sh
export REPLICA_RANK=$(({first_rank} + SLURM_ARRAY_TASK_ID))
cd "${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}" || cd /tmp
exec {command}
"""
PREFIX = re.compile(r"^(?:\w+: )?(?:error: |fatal: )?(?:allocation failure: |Batch job submission failed: )?")
COLUMNS = ("ArrayJobID", "ArrayTaskID", "State", "Reason", "exit_code", "Name")
NOT_BEGUN = 128 + 53  # the signal that Slurm reports if a node could not start the job
STORES_ENV = (
    "AccountingStoreFlags has job_env: the cluster's database keeps the environment of every job, and with it the "
    "credentials of an s3 rendezvous."
)
NO_FOLDER = "Perhaps its node cannot write to the folder of its log."
FOLDER_ADVICE = "Name a folder that the nodes share with this machine: --option log_dir=…"
ENDED: dict[str, Reason | None] = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "lost",
    "BOOT_FAIL": "start_failed",
}


@dataclass(frozen=True)
class Row:
    """A job as `squeue` lists it.

    Example:
        list_jobs("--me")[0].job_state
    """

    array: str
    """The id of the job's array."""
    task: int
    """The job's task id in the array."""
    state: str
    """The state, such as "RUNNING"."""
    reason: str
    """The reason for the state, such as "Priority". It may be empty or "None"."""
    exit_code: str
    """The status of the process, as `waitpid` returns it."""
    name: str
    """The name of the job."""

    @property
    def job_state(self) -> JobState:
        """The state of the job as a JobState."""
        message = f"{self.state} ({self.reason})" if self.reason not in ("", "None") else self.state
        if self.state not in ENDED:
            doing = message if self.reason in ("", "None") else f"{self.state.lower()}: {self.reason}"
            return JobState(False, message="" if message in ("PENDING", "RUNNING") else doing)
        if self.state == "FAILED" and self._code == NOT_BEGUN:
            return JobState(True, "start_failed", None, f"{message}. {NO_FOLDER} {FOLDER_ADVICE}")
        reason = ENDED[self.state]
        return JobState(True, reason, self._code if reason is None else None, message)

    @property
    def _code(self) -> int | None:
        try:
            code = os.waitstatus_to_exitcode(int(self.exit_code))
        except ValueError:
            return None
        return 128 - code if code < 0 else code


def command_environment() -> dict[str, str]:
    """Return this process's variables that Slurm's commands get. `sbatch` passes them on to the jobs.

    Example:
        subprocess.run(["squeue", "--me"], env=command_environment())
    """
    left_out = (*OPTIONS, RUN_KEY)  # this process may have another run's key; a signed run passes its own
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or (name not in left_out and not name.startswith(OF_OTHER_JOBS))
    }


def ask(*command: str, script: str = "", env: Mapping[str, str] | None = None, may_have_acted: bool = False) -> str:
    """Run one of Slurm's commands, and return its output.

    Args:
        command: the command and its arguments.
        script: the text for the command's stdin. Default: none.
        env: more variables, besides `command_environment()`. Default: none.
        may_have_acted: True if Slurm may have acted when the answer is lost. Default False.

    Raises:
        JobServiceError: the command failed. The message has the command's own text.
        MissingDependencyError: the command is not installed.

    Example:
        ask("squeue", "--me")
    """
    lost: Kind = "unknown" if may_have_acted else "unavailable"
    try:
        done = subprocess.run(
            command,
            input=script,
            env={**command_environment(), **(env or {})},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CALL_LIMIT_S,
            check=False,
            start_new_session=True,  # a Ctrl-C must not kill the command, or it would be unknown whether jobs started
        )
    except subprocess.TimeoutExpired as error:
        raise JobServiceError(f"Slurm: {command[0]} gave no answer in {CALL_LIMIT_S:g} s.", lost) from error
    except FileNotFoundError as error:
        raise not_installed(command[0]) from error
    except OSError as error:
        raise JobServiceError(f"Slurm: {command[0]} cannot be run: {error}", "rejected") from error
    if done.returncode == 0:
        return done.stdout
    kind: Kind = "rejected"
    if any(words in done.stderr for words in BUSY):
        kind = "unavailable"
    elif done.returncode < 0 or any(words in done.stderr for words in UNCLEAR):
        kind = lost
    lines = [PREFIX.sub("", line).rstrip(".") for line in done.stderr.strip().splitlines()]
    if any("configuration source" in line for line in lines):
        # The commands of Slurm are installed here, and no cluster is configured.
        raise JobServiceError(
            f"Slurm has no configuration on this machine ({lines[-1]}). Use a login node of the cluster.",
            kind,
        )
    raise JobServiceError(f"Slurm: {'; '.join(lines[-3:]) or f'{command[0]} ended with {done.returncode}'}.", kind)


def not_installed(command: str) -> MissingDependencyError:
    """Return the error for a command that is not installed.

    Args:
        command: the name of the command.

    Example:
        raise not_installed("sbatch")
    """
    return MissingDependencyError(
        f"Backend 'slurm' needs Slurm's commands, and there is no {command!r} on the PATH. Use it on a machine from "
        "which jobs are submitted, such as a login node."
    )


def list_jobs(*which: str) -> list[Row]:
    """Return the jobs of arrays that Slurm knows. Jobs that have ended some minutes ago are included.

    Args:
        which: options of `squeue` that choose the jobs.

    Raises:
        JobServiceError: Slurm does not answer.

    Example:
        list_jobs("--me", "--name=brave-otter-7f3a-a0")
    """
    columns = ",".join(f"{column}:|" for column in COLUMNS)
    try:
        listed = ask("squeue", "--noheader", "--array", "--all", "--states=all", *which, f"--Format={columns}")
    except JobServiceError as error:
        if UNKNOWN_JOB in str(error):
            return []
        raise
    found = (line.split("|") for line in listed.splitlines())
    return [Row(row[0], int(row[1]), *row[2:6]) for row in found if len(row) > len(COLUMNS) - 1 and row[1].isdecimal()]


def find_job(array: str, task: int) -> Row | None:
    """Return a job of an array. None if Slurm does not know the job, or has forgotten it.

    Args:
        array: the id of the array.
        task: the task id.

    Raises:
        JobServiceError: Slurm does not answer.

    Example:
        find_job("4711", 3)
    """
    return next((row for row in list_jobs(f"--jobs={array}_{task}") if (row.array, row.task) == (array, task)), None)


def cancel(array: str, task: int | None = None) -> None:
    """End a job of an array, or the whole array. A job that has ended, or that Slurm does not know, is not an error.

    Args:
        array: the id of the array.
        task: the task id. Default: all jobs of the array.

    Raises:
        JobServiceError: Slurm refused, or does not answer.

    Example:
        cancel("4711", 3)
    """
    try:
        ask("scancel", array if task is None else f"{array}_{task}")
    except JobServiceError as error:
        if not any(words in str(error) for words in (UNKNOWN_JOB, HAS_ENDED)):
            raise


def configuration(name: str) -> str:
    """Return a setting of the cluster from `scontrol show config`. An empty string if there is no such setting.

    Args:
        name: the name of the setting.

    Raises:
        JobServiceError: Slurm does not answer.

    Example:
        configuration("ClusterName")
    """
    found = re.search(rf"^{name} *= (.*)$", ask("scontrol", "show", "config"), re.MULTILINE)
    return found[1].strip() if found else ""


def check_clusters(cluster: str) -> None:
    """Check that no variable makes Slurm's commands ask another cluster.

    Args:
        cluster: the name of the cluster that is used.

    Raises:
        BackendError: a variable names another cluster.

    Example:
        check_clusters("main")
    """
    for name in CLUSTERS:
        if (named := os.environ.get(name, "")) not in ("", cluster):
            raise BackendError(
                f"{name} is {named!r}, but replicas only start on the cluster of SLURM_CONF, which is {cluster!r}. "
                f"Unset {name}, or set SLURM_CONF to the file of {named!r}."
            )


def check_sbatch_options(options: Sequence[str]) -> None:
    """Check the user's options of `sbatch`. Each must be one word, and must not be set by this project.

    Args:
        options: the options. An abbreviated option is checked as well.

    Raises:
        ValueError: an option is not one word, or is set by this project.

    Example:
        check_sbatch_options(["--constraint=a100"])
    """
    for option in options:
        if not re.fullmatch(r"--?[A-Za-z].*", option, re.DOTALL):
            raise ValueError(f"{option!r} is not an option of sbatch. Write each as one word, as in '--exclude=n7'.")
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        if owned := next((each for each in OURS if each == name or (name[2:] and each.startswith(name))), None):
            raise ValueError(f"The option {owned} of sbatch is set by `replicas` itself, got {option!r}. Remove it.")


def gres_of(gpu: str) -> str:
    """Return GPUs as Slurm's option `--gres` takes them.

    Args:
        gpu: a type, a number, or both, as in "H100:2".

    Raises:
        ValueError: the text is not such a GPU.

    Example:
        gres_of("H100:2")
    """
    if not GPU.fullmatch(gpu):
        raise ValueError(f"gpu must be a type and a number, as in 'H100:2', got gpu={gpu!r}.")
    return f"gpu:{gpu.lower()}"


def array_script(command: Sequence[str], *, first_rank: int) -> str:
    """Return the script of an array's jobs. It replaces its shell by the command, which so gets the job's signals.

    Args:
        command: the program and its arguments.
        first_rank: the rank of task 0.

    Example:
        array_script(["python", "-c", "print('hello')"], first_rank=0)
    """
    return SCRIPT.format(command=shlex.join(command), first_rank=first_rank)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, as `--array` takes them.

    Args:
        numbers: the numbers.

    Example:
        ranges([0, 1, 2, 7])  # "0-2,7"
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, each)) for each in found)


def secrets_of(names: Sequence[str]) -> dict[str, str]:
    """Return the values of variables of this environment that jobs get as secrets.

    Args:
        names: the names of the variables.

    Raises:
        BackendError: a variable is not set.

    Example:
        secrets_of(["WANDB_API_KEY"])
    """
    if missing := [name for name in names if name not in os.environ]:
        raise BackendError(
            f"The secret {missing[0]!r} is not set. Slurm's jobs get secrets from this environment: set it before the "
            "launch."
        )
    return {name: os.environ[name] for name in names}
