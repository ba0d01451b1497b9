"""Whose word is taken on what a resumed run starts.

Who can write to a run's store can put another task there, with all its digests, and another record beside it: of more
replicas, with larger GPUs. Whoever resumes the run would start that, with credentials of their own. So the digest of
the task, which vouches for all of it, comes from the machine that launched, which keeps it, or from a person.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from executors.errors import StoreError, UntrustedTaskError
from executors.run_record import SHA256
from executors.state import kept_digest
from executors.task import StoredTask, read_task

if TYPE_CHECKING:
    from executors.run import Run

MAX_SHOWN = 100  # characters of what a store says that nobody vouches for


def vouched_task(run: Run, *, task_digest: str | None = None, trust_bucket: bool = False) -> StoredTask:
    """Read the task that a resumed run starts again, after somebody vouched for it. Writes and starts nothing.

    Args:
        task_digest: the sha256 of the task, which a person brings along. None: what this machine kept at the launch.
        trust_bucket: take the store's own word for it, and say on stderr what that is.

    Raises:
        ValueError: `task_digest` is no digest, or both are given.
        UntrustedTaskError: this machine did not launch the run, and nobody vouches for its task.
        StoreError: the run's task, or its record, is not what was launched.
    """
    kept = kept_digest(run.run_id, run.store.url)
    if task_digest is not None:
        if trust_bucket:
            raise ValueError("Give task_digest= or trust_bucket=True, not both: the first needs no trust.")
        digest = _check_digest(task_digest)
    elif trust_bucket:
        digest = run.record.task_digest
    elif kept is not None:
        digest = kept
    else:
        raise UntrustedTaskError(
            f"Run {run.run_id!r} was not launched from here, at least not under this address, so only its store says "
            f"what it is. {_what_would_run(run)} To resume it, give the digest that `replicas status {run.run_id} "
            "--json` says as task_digest on the machine that launched it: "
            f"replicas resume {shlex.quote(run.url)} --task-digest SHA256, or task_digest=. "
            "Or trust whoever can write to that store: --trust-bucket, or trust_bucket=True."
        )
    task = read_task(run.store, run.run_id, digest)
    launched_with = {**vars(task.launched_with), "task_digest": digest}
    for name, launched in launched_with.items():
        if (said := getattr(run.record, name)) != launched:
            key = f"{run.run_id}/run.json"
            raise StoreError(
                f"{key!r} in {run.store.url} is not what was launched: its {name} is {_shown(said)}, the launch's "
                f"{_shown(launched)}.",
                key=key,
                url=run.store.url,
            )
    if trust_bucket:
        other = "" if kept in (None, digest) else f" This machine launched another task there: its digest is {kept}."
        print(f"replicas: trusting {run.store.url}. {_what_would_run(run)}{other}", file=sys.stderr)
    return task


def _check_digest(text: str) -> str:
    if not SHA256.fullmatch(text.lower()):
        raise ValueError(f"A task's digest is no sha256: 64 hexadecimal digits, got {text!r}.")
    return text.lower()


def _what_would_run(run: Run) -> str:
    """Say what the store says of a run: nobody vouches for any of it."""
    record = run.record
    entrypoint, by, digest = (_shown(value) for value in (record.entrypoint, record.created_by, record.task_digest))
    return (
        f"Resuming {run.url} runs code with the credentials of this machine: {entrypoint}, launched by {by}, with the "
        f"task digest {digest}, as the store says."
    )


def _shown(value: Any) -> str:
    """Return what a store says on one line, without control characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
