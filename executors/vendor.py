"""The words between `CloudExecutor` and an adapter: what a vendor is asked to run, and what it tells.

An adapter knows one SDK and nothing of runs, stores or outcomes; `cloud.py` knows these and no SDK.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from executors.errors import BackendError
from executors.outcome import Reason
from executors.task import MASK

JobId = dict[str, Any]
"""What the vendor needs to find a job again: plain JSON, becomes part of the replica's handle."""


@dataclass(frozen=True)
class JobKey:
    """What tells the job of one attempt of one rank from all others of the account."""

    store_url: str
    """Two stores may both hold a run of one id."""
    run_id: str
    rank: int
    attempt: int

    @property
    def name(self) -> str:
        """At most 64 of `[a-z0-9-]`: what every vendor takes as a name."""
        return f"{self.run_id}-{self._place}-r{self.rank:04d}-a{self.attempt}"

    @property
    def labels(self) -> dict[str, str]:
        """The same as labels: names and values of `[A-Za-z0-9_-]`."""
        return {
            "replicas-run": self.run_id,
            "replicas-store": self._place,
            "replicas-rank": str(self.rank),
            "replicas-attempt": str(self.attempt),
        }

    @property
    def _place(self) -> str:
        # Without the options behind the "?": the launcher's and another machine's may differ.
        return hashlib.sha256(self.store_url.partition("?")[0].encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Job:
    """One replica, as a vendor is asked to run it: the same command for every vendor, in an image with Python."""

    key: JobKey
    command: tuple[str, ...] = field(repr=False)
    requirements: tuple[str, ...]
    """What the image should have installed; the command installs what is missing."""
    env: Mapping[str, str] = field(repr=False)
    credentials: Mapping[str, str] = field(repr=False)
    """Variables that reach the replica through a secret object of the vendor, and are seen nowhere else."""
    secret_names: tuple[str, ...] = ()
    """Secrets of the user, by name."""
    gpu: str | None = None
    limit_s: int = 3600
    """Seconds after which the vendor itself ends it."""


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Hide the values of an environment, but for our own variables, which are no secrets."""
    return {name: value if name.startswith("REPLICA_") else MASK for name, value in env.items()}


def shortened(command: Sequence[str]) -> list[str]:
    """Show a command to people: of its last word, a script, only the length."""
    *words, script = command
    return [*words, f"<a script of {len(script)} characters>"]


@dataclass(frozen=True)
class JobState:
    """What a vendor tells of a job. Advisory: an outcome in the store wins."""

    has_ended: bool
    reason: Reason | None = None
    """Why it ended, as far as the vendor knows. None: by itself, with `exit_code`."""
    exit_code: int | None = None
    message: str = ""
    """What the vendor says, in its own words."""


class VendorError(BackendError):
    """The vendor's service refused or failed.

    kind: "refused": nothing was done, and asking again would not help. "busy": nothing was done; ask again later.
        "unclear": it may have been done: the connection broke, or the service failed inside.
    retry_after_s: how long the vendor wants to be left alone; 0: it did not say.
    """

    def __init__(
        self, message: str, kind: Literal["refused", "busy", "unclear"], *, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class ForeignJobError(VendorError):
    """A record names a job that is not of its replica."""

    def __init__(self, vendor: str, key: JobKey) -> None:
        super().__init__(
            f"The handle of rank {key.rank} of run {key.run_id!r} names a job that {vendor} does not know as this "
            "replica's. It is neither looked at nor ended: somebody else may have written that handle.",
            "refused",
        )


class CancelledWhileStartingError(VendorError):
    """Somebody cancelled the replica before the vendor had started it."""

    def __init__(self) -> None:
        super().__init__("it was cancelled while it was being started.", "refused")


class Vendor(abc.ABC):
    """What an adapter does: each method is a call or two of its SDK. All may be called from several threads.

    Every method raises VendorError, with what the vendor said.
    """

    vendor: ClassVar[str]
    """The vendor's name for people, as in "Modal"."""
    sdk: ClassVar[str]
    """The distribution of its SDK."""

    @abc.abstractmethod
    def check_account(self, n: int, gpu: str | None, timeout_s: float, secret_names: Sequence[str]) -> None:
        """Refuse what this vendor cannot do, and an account that cannot be used, before anything is started.

        Raises:
            BackendError: no credentials, an unknown GPU or secret.
            ValueError: a value that the vendor does not take.
        """

    @abc.abstractmethod
    def start_job(self, job: Job) -> JobId:
        """Ask the vendor to run a job; may block until it is scheduled."""

    @abc.abstractmethod
    def find_jobs(self, key: JobKey) -> list[JobId]:
        """Return the jobs of one attempt of one rank that the vendor knows, oldest first, also those that ended."""

    @abc.abstractmethod
    def check_job(self, job_id: JobId, key: JobKey) -> JobId:
        """Return the id of a job that a record names, if it is the one of this attempt; one that is gone passes.

        Whoever can write to a store could else have any job of this account shown or ended.

        Raises:
            VendorError: it is another job, or no id of this vendor's.
        """

    @abc.abstractmethod
    def job_state(self, job_id: JobId) -> JobState:
        """Ask how a job fares, at once; one that the vendor does not know any more has ended, `lost`."""

    @abc.abstractmethod
    def job_logs(self, job_id: JobId, n_lines: int) -> str:
        """Return the last lines that a job wrote, at once."""

    @abc.abstractmethod
    def stop_job(self, job_id: JobId) -> None:
        """Ask the vendor to end a job. One that has ended, or is unknown, is no error."""

    @abc.abstractmethod
    def describe_job(self, job: Job) -> dict[str, Any]:
        """Return the request that `start_job` would make as plain JSON, values of secrets and environment masked."""
