"""Slurm's own commands: what they get of this process's environment, what their errors and the states of jobs mean."""

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

CALL_LIMIT_S = 60.0  # a controller that is gone gives an error after 9 s, a stopped one after 10 s
OF_OTHER_JOBS = ("SLURM_", "SQUEUE_", "SCANCEL_", "REPLICA_")
"""Variables of a surrounding job, which would pass on its sizes, of a surrounding replica, and defaults of commands."""
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
OPTIONS = ("SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_WAIT")
"""Variables that give `sbatch` options which are set here, or must not be given."""
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
NOT_BEGUN = 128 + 53  # the signal that Slurm names where a node could not begin; its reason is a killed job's, too
STORES_ENV = (
    "AccountingStoreFlags has job_env: the cluster's database keeps the environment of every job, and with it the "
    "credentials of an s3 rendezvous."
)
NO_FOLDER = "Perhaps its node has no folder for its log."
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
    """A job as `squeue` lists it."""

    array: str
    task: int
    state: str
    reason: str
    exit_code: str
    name: str

    @property
    def job_state(self) -> JobState:
        said = f"{self.state} ({self.reason})" if self.reason not in ("", "None") else self.state
        if self.state not in ENDED:
            doing = said if self.reason in ("", "None") else f"{self.state.lower()}: {self.reason}"
            return JobState(False, message="" if said in ("PENDING", "RUNNING") else doing)
        if self.state == "FAILED" and self._code == NOT_BEGUN:
            return JobState(True, "start_failed", None, f"{said}. {NO_FOLDER} {FOLDER_ADVICE}")
        reason = ENDED[self.state]
        return JobState(True, reason, self._code if reason is None else None, said)

    @property
    def _code(self) -> int | None:
        try:
            code = os.waitstatus_to_exitcode(int(self.exit_code))
        except ValueError:
            return None
        return 128 - code if code < 0 else code


def environment() -> dict[str, str]:
    """Return this process's variables, as far as they go to Slurm's commands, and with `sbatch` to the jobs."""
    left_out = (*OPTIONS, RUN_KEY)  # a key would be another run's: a signed run's own comes with its jobs
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or (name not in left_out and not name.startswith(OF_OTHER_JOBS))
    }


def ask(*command: str, script: str = "", env: Mapping[str, str] | None = None, may_have_acted: bool = False) -> str:
    """Return what a command prints.

    Args:
        env: its variables besides `environment()`.
        may_have_acted: whether it may have done what was asked when its answer is lost.

    Raises:
        JobServiceError: it failed, in its own words.
    """
    lost: Kind = "unknown" if may_have_acted else "unavailable"
    try:
        done = subprocess.run(
            command,
            input=script,
            env={**environment(), **(env or {})},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CALL_LIMIT_S,
            check=False,
            start_new_session=True,  # a Ctrl-C here is not to leave open whether the jobs were started
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
    raise JobServiceError(f"Slurm: {'; '.join(lines[-3:]) or f'{command[0]} ended with {done.returncode}'}.", kind)


def not_installed(command: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"Backend 'slurm' needs Slurm's commands, and there is no {command!r} on the PATH. Use it on a machine from "
        "which jobs are submitted, such as a login node."
    )


def list_jobs(*which: str) -> list[Row]:
    """Return the jobs of arrays that Slurm still knows, also those that ended. `which` are options of `squeue`."""
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
    """Return a job; None where Slurm does not know it, or not any more."""
    return next((row for row in list_jobs(f"--jobs={array}_{task}") if (row.array, row.task) == (array, task)), None)


def cancel(array: str, task: int | None = None) -> None:
    """End a job; one that has ended, or is not known, is not an error.

    Args:
        task: which of the array's jobs. None: all of them.
    """
    try:
        ask("scancel", array if task is None else f"{array}_{task}")
    except JobServiceError as error:
        if not any(words in str(error) for words in (UNKNOWN_JOB, HAS_ENDED)):
            raise


def configuration(name: str) -> str:
    """Return one setting of the cluster, as `scontrol show config` has it."""
    found = re.search(rf"^{name} *= (.*)$", ask("scontrol", "show", "config"), re.MULTILINE)
    return found[1].strip() if found else ""


def check_clusters(cluster: str) -> None:
    """Refuse an environment that has Slurm's commands ask another cluster than the one that is asked here.

    Raises:
        BackendError: it names another.
    """
    for name in CLUSTERS:
        if (named := os.environ.get(name, "")) not in ("", cluster):
            raise BackendError(
                f"{name} is {named!r}, and replicas start at the cluster of SLURM_CONF alone, {cluster!r}. Unset it, "
                "or set SLURM_CONF to that cluster's file."
            )


def check_options(options: Sequence[str]) -> None:
    """Refuse options of `sbatch` that are not one word each, and those that are set here, also abbreviated.

    Raises:
        ValueError: one of them.
    """
    for option in options:
        if not re.fullmatch(r"--?[A-Za-z].*", option, re.DOTALL):
            raise ValueError(f"{option!r} is not an option of sbatch. Write each as one word, as in '--exclude=n7'.")
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        if owned := next((each for each in OURS if each == name or (name[2:] and each.startswith(name))), None):
            raise ValueError(f"The option {owned} of sbatch is set by `replicas` itself, got {option!r}.")


def gres_of(gpu: str) -> str:
    """Return GPUs as Slurm names them.

    Raises:
        ValueError: they are not a type, a number, or both.
    """
    if not GPU.fullmatch(gpu):
        raise ValueError(f"gpu must be a type and a number, as in 'H100:2', got gpu={gpu!r}.")
    return f"gpu:{gpu.lower()}"


def script_of(command: Sequence[str], *, first_rank: int) -> str:
    """Return the script of an array's jobs. `exec`: signals reach the command, and its exit code is the job's.

    Args:
        first_rank: the rank that the task 0 has, or would have.
    """
    return SCRIPT.format(command=shlex.join(command), first_rank=first_rank)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as `--array` takes them, short however many there are.

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
    """Return variables of this environment.

    Raises:
        BackendError: one is not set.
    """
    if missing := [name for name in names if name not in os.environ]:
        raise BackendError(
            f"The secret {missing[0]!r} is not set. Slurm's jobs get secrets from this environment: set it before the "
            "launch."
        )
    return {name: os.environ[name] for name in names}
