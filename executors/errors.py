"""Every error that this package raises on purpose.

    ReplicasError
    ├── BackendError                 the backend cannot be used
    │   ├── UnknownBackendError      also LookupError
    │   ├── MissingDependencyError   also ImportError
    │   └── LaunchError              the backend refused a replica; .rank, .cancelled
    │       └── MaxCostSpentError    ranks have run for as long as max_cost lets them; .ranks
    ├── EntrypointError              cannot be found, imported or shipped
    │   ├── EntrypointImportError    also ImportError
    │   └── EntrypointArgumentsError also TypeError
    ├── ResultError                  a result that is not a JSON value; also TypeError
    ├── RunExistsError / RunNotFoundError / UnknownHandleError
    │   └── RunBeingRemovedError     `replicas rm` has begun to delete the run; a subclass of RunNotFoundError
    ├── AlreadyResumedError          another process is resuming these ranks; nothing was started
    ├── UntrustedTaskError           the task of a run to resume is not trusted
    ├── ReplicaError                 a launched replica gave no result; .rank .attempt .outcome
    │   ├── ReplicaFailedError       its function raised; the message is the remote traceback
    │   ├── ReplicaLostError         vanished: killed, evicted, preempted
    │   ├── ReplicaCancelledError
    │   └── ReplicaTimeoutError      also TimeoutError
    └── StoreError                   .key .url
        ├── UnwritableStoreError     only reading is allowed there, no space is left, or the credentials are dead
        ├── KeyNotFoundError         also FileNotFoundError
        ├── CorruptObjectError
        └── UnsafeStoreError         put_if_absent is not atomic there

    HangError                        raised in a replica that made no progress; a BaseException

Bad values of arguments (`n=0`) raise `ValueError`, wrong types `TypeError`, as everywhere in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

if TYPE_CHECKING:
    from executors.protocol import Outcome


NO_DIRECTORY = "The working directory was deleted. Change to one that exists, as with: cd ~"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that does not exist: `No X 'y'. Did you mean 'z'? Known: …`."""
    known = sorted(known)
    return f"No {kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'z'?` with the most similar known name, or an empty text if no name is similar."""
    import difflib  # imported only here, because few commands need the module

    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def kind_of(value: object) -> str:
    """Name the type of a value in a sentence: `an int`, `a Tensor`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class ReplicasError(Exception):
    """Base of all errors of `executors` and `diloco`.

    Example:
        try:
            results = run.results()
        except ReplicasError as error:
            print(error)
    """

    outcome_reason: ClassVar[str] = "exception"
    """The `reason` of a replica's outcome when its entrypoint ends with this error."""
    was_waited_for = False
    """True if a process has tried again for as long as it tolerates an outage, so that its call was not a mistake."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Make the error picklable, because a pool of processes pickles the errors of its tasks."""
        return _without_fields, (type(self), self.args), vars(self)


def _without_fields(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    """Return a copy of the error with its message only. Its `__init__` may need more arguments, which are set later."""
    error = kind.__new__(kind)
    Exception.__init__(error, *args)
    return error


class HangError(BaseException):
    """Raised in the entrypoint of a replica that made no progress within its limit, so that `finally` blocks run.

    Cause: a step, a call of the network or a lock took longer than the limit, or the code reported no progress.

    Remedy: `with replica.section("evaluate", limit_s=600):` for long work, or a larger `--hang-timeout`. `replicas
    logs RUN --stacks` shows where the replica was.
    """

    outcome_reason: ClassVar[str] = "hang"


class BackendError(ReplicasError):
    """The backend cannot be used.

    Cause: for example a missing account, a refused option, or a service that does not answer.

    Remedy: the message names it. `replicas doctor --backend NAME` checks the backend.
    """


class UnknownBackendError(BackendError, LookupError):
    """No backend has this name.

    Cause: a misspelled name, or a package with the backend that is not installed.

    Remedy: `replicas backends` lists the names. For your own class use `package.module:Class`.
    """


class MissingDependencyError(BackendError, ImportError):
    """A backend or store needs a package that is not installed.

    Cause: the extra of that backend or store was not installed.

    Remedy: the line with `pip install` in the message.
    """


def install_command(extra: str) -> str:
    """Return the command that installs the packages of one of our extras, with the versions that our metadata names.

    The command names the packages themselves, because the name of this project on an index could be another package.

    Args:
        extra: the name of the extra in `pyproject.toml`, such as `modal`.

    Example:
        install_command("modal")  # "pip install 'modal<2,>=1.6.3'"
    """
    import shlex

    return f"pip install {' '.join(map(shlex.quote, packages_of(extra) or [extra]))}"


def packages_of(extra: str) -> list[str]:
    """Return the packages that one of our extras adds, each with the versions that our metadata names.

    Args:
        extra: the name of the extra in `pyproject.toml`, such as `diloco`.

    Returns: the requirements. Empty if the project is not installed as a package, as in a copied folder.

    Example:
        packages_of("s3")  # ["boto3>=1.38.46"]
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("serverless-replicas") or []
    except metadata.PackageNotFoundError:
        return []
    return [
        f"{each.name}{each.specifier}"
        for each in map(Requirement, lines)
        if each.marker
        and each.name != "serverless-replicas"
        and each.marker.evaluate({"extra": extra})
        and not each.marker.evaluate({"extra": ""})
    ]


def raise_missing_package(needed_by: str, error: ImportError, extra: str) -> NoReturn:
    """Raise the error for an import that fails because a package of one of our extras is not installed.

    Args:
        needed_by: the thing that needs the package, as the beginning of a sentence, such as `The demo`.
        error: the error of the import.
        extra: our extra that brings the package, such as `diloco`.

    Raises:
        MissingDependencyError: a package of the extra is missing. The message has the command that installs the extra.
        ImportError: `error` itself, if another module is missing, because that command would not help.

    Example:
        try:
            import torch
        except ImportError as error:
            raise_missing_package("The demo", error, "diloco")
    """
    missing = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or missing not in map(_package_name, packages_of(extra)):
        raise error
    raise MissingDependencyError(
        f"{needed_by} needs the package {missing!r}. Install all that it needs with: {install_command(extra)}"
    ) from error


def _package_name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


class LaunchError(BackendError):
    """The backend refused to start a replica. The replicas that had already started were cancelled.

    Cause: the service has no such GPU or no room, the account lacks a right, or `launch` was cancelled.

    Remedy: the message has the words of the service. `--min-replicas M` starts with fewer replicas.

    Args:
        message: the reason.
        rank: the rank that could not be started. None: no single rank is the reason.
        cancelled: True if the run was cancelled while it was being started. Default False.
    """

    def __init__(self, message: str, *, rank: int | None = None, cancelled: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.cancelled = cancelled
        """True if the run was cancelled while it was being started. Then the refusal is not a problem."""


class MaxCostSpentError(LaunchError):
    """The ranks have already run for the time that the run's `max_cost` pays for. Nothing was started.

    Cause: a `resume` or a restart of ranks whose share of `--max-cost` is used up.

    Remedy: begin a new run with a limit of its own. `replicas resume RUN --from-snapshot` does that.

    Args:
        message: the reason.
        ranks: the ranks whose time is used up.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message, rank=ranks[0])
        self.ranks = tuple(ranks)


class EntrypointError(ReplicasError):
    """The entrypoint cannot be found, imported, called with these arguments, or shipped.

    Cause: a misspelled file or function, or code that does not import.

    Remedy: the message names the entrypoint and the first problem. All errors of entrypoints are subclasses.
    """


class EntrypointImportError(EntrypointError, ImportError):
    """The entrypoint's module or function cannot be found or imported.

    Cause: the file or module does not exist in this folder, has no such function, or raises while it is imported.

    Remedy: run `python FILE` in the same folder. Start the launch in the folder of the code.
    """


class EntrypointArgumentsError(EntrypointError, TypeError):
    """The entrypoint does not take these arguments, or they cannot be sent to replicas.

    Cause: an `--arg` that the function does not have, a missing one, a value of another type, or an object that has
    no JSON form.

    Remedy: compare the names with the signature of the function.
    """


class ResultError(ReplicasError, TypeError):
    """The entrypoint's result is not a JSON value. The message names the path.

    Cause: the function returned a tensor, an object, or a key that is not a text.

    Remedy: return plain numbers, texts, lists and dicts. Save anything else with `replica.save_artifact`.
    """

    outcome_reason = "result_not_serializable"


class RunExistsError(ReplicasError):
    """The chosen run id is taken.

    Cause: an earlier launch used the same `--run-id` in this store.

    Remedy: choose another id, leave `--run-id` out, or delete the old run with `replicas rm RUN`.
    """


class RunNotFoundError(ReplicasError):
    """No run with this id is known here.

    Cause: a misspelled id, another store, or a run that was removed.

    Remedy: `replicas ls` lists the runs. For a run elsewhere give its address, as in `s3://bucket/runs/RUN`.
    """


class RunBeingRemovedError(RunNotFoundError):
    """The removal of the run has begun. Another `replicas rm` finishes a removal that was interrupted.

    Cause: `replicas rm` is at work, or was interrupted.

    Remedy: `replicas rm RUN` again.
    """


class AlreadyResumedError(ReplicasError):
    """Another process has already begun the attempts that this process wanted to resume. This process started
    nothing.

    Cause: two processes or users resumed the run at the same time.

    Remedy: none is needed. `replicas status RUN` shows the new attempts.
    """


class UntrustedTaskError(ReplicasError):
    """Another machine launched the run, so only the store describes it. Nothing was started.

    Cause: the run is not signed, and this machine has no record of its code.

    Remedy: copy `task_digest` from `replicas status RUN --json` on the launching machine, and give it as
    `--task-digest`. `--trust-bucket` skips the check.
    """


class UnknownHandleError(ReplicasError):
    """The handle names a replica that was never launched.

    Cause: the handle is damaged, or belongs to another backend or account.

    Remedy: use `run.handles`, or `attach(RUN)` in a new process.
    """


class ReplicaError(ReplicasError):
    """A launched replica gave no result.

    Cause: the subclass names it.

    Remedy: `replicas logs RUN --rank N` shows the output of the replica.

    Args:
        message: the reason, with the traceback of the replica if it has one.
        rank: the rank of the replica.
        attempt: the number of its last attempt, from 0.
        outcome: the recorded end of the attempt. None: nothing is recorded.
    """

    def __init__(self, message: str, *, rank: int, attempt: int, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.attempt = attempt
        self.outcome = outcome


class ReplicaFailedError(ReplicaError):
    """The replica's function raised, or ended without a result.

    Cause: an exception, an exit code other than 0, or a result that is not JSON.

    Remedy: the message has the traceback. Correct the code, then launch again, or use `replicas resume RUN`.
    """


class ReplicaLostError(ReplicaError):
    """The replica vanished: killed, evicted, preempted.

    Cause: the machine or container is gone, or a signal ended the process, as when memory is full.

    Remedy: `replicas resume RUN`, or launch with `--restarts 3`.
    """


class ReplicaCancelledError(ReplicaError):
    """The replica was cancelled.

    Cause: `replicas cancel`, Ctrl-C, or an attached run that no process watches.

    Remedy: `replicas resume RUN` continues it.
    """


class ReplicaTimeoutError(ReplicaError, TimeoutError):
    """The replica ran into its time limit.

    Cause: the replica ran for as long as `--timeout` allows.

    Remedy: `replicas resume RUN` with a larger `--timeout`.
    """


class StoreError(ReplicasError):
    """A request to a store failed.

    Cause: the network, the rights of the credentials, or a service that is away.

    Remedy: `replicas doctor --rendezvous URL` checks the store. Replicas wait for a store that is away.

    Args:
        message: the reason.
        key: the key of the object. None: the request was for no single object.
        url: the address of the store. None: it is not known.
    """

    refusal: Literal["", "permission", "credentials"] = ""
    """The reason why waiting alone does not help. "permission": a user must change something at the store, as with a
    bucket that does not exist. "credentials": the credentials of this process have expired. "": the store is
    unreachable, busy or full, and may recover.
    """
    failing_since: float | None = None
    """The time of the first failure, by `time.monotonic`, if the store has repeated the request since. None: it was not
    repeated.
    """

    def __init__(self, message: str, *, key: str | None = None, url: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.url = url


class UnwritableStoreError(StoreError):
    """The store cannot be written: access is read-only, no space is left, or the credentials have expired.

    Cause: as the message says.

    Remedy: free space, or give rights and credentials that can write.
    """

    outcome: Outcome | None = None
    """The outcome that could not be recorded, if the failed write was the end of an attempt. Otherwise None."""


class KeyNotFoundError(StoreError, FileNotFoundError):
    """No object exists under this key. (`FileNotFoundError`, because the `str` of a `KeyError` is a repr.)

    Cause: the object was never written, or was deleted meanwhile.

    Remedy: none in most cases, because callers expect it. A run whose objects are missing needs `replicas resume RUN
    --from-snapshot`.
    """


class CorruptObjectError(StoreError):
    """An object exists, but its content is damaged or has a wrong form.

    Cause: another program wrote into the store, a disk is damaged, or another version wrote the run.

    Remedy: the message names the key. `replicas resume RUN --from-snapshot` begins at the newest snapshot that is
    whole.
    """


class UnsafeStoreError(StoreError):
    """`put_if_absent` is not atomic in this store, so processes cannot use it to agree on anything.

    Cause: the service ignores `If-None-Match`, or a network file system is mounted without atomic creation.

    Remedy: use another store. `replicas doctor --rendezvous URL` tests one.
    """


class ReplicasWarning(UserWarning):
    """A warning of this category in a replica becomes an event of its run.

    All warnings of `executors` and `diloco` in a replica become events. Use this category for a warning of your own
    code:

        warnings.warn("The data set has 3 unreadable files.", ReplicasWarning)
    """
