"""Bringing back replicas of a run that have ended: the same task, the same store, new attempts.

What a replica finds there again is its own affair: `diloco` catches up with the log of its run.
"""

from __future__ import annotations

import contextlib
import inspect
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from executors.attempt_records import Intent
from executors.errors import AlreadyResumedError, BackendError, CorruptObjectError, RunNotFoundError, StoreError
from executors.found import read_handle
from executors.protocol import ReplicaStatus
from executors.records import exists, find_record
from executors.replica import replica_key
from executors.run import Run
from executors.task import RunSpec, StoredTask
from executors.trust import vouched_task

MAX_SHOWN = 200  # characters of the name that a record gives somebody


def resume(
    run: Run,
    *,
    ranks: Sequence[int] | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    detach: bool = False,
    task_digest: str | None = None,
    trust_bucket: bool = False,
) -> Run:
    """Start a new attempt of every rank that ended without succeeding.

    Args:
        run: the run; those of its replicas that still run go on undisturbed.
        ranks: start these instead; each must have ended.
        gpu, timeout: None: as the run was launched.
        env, secrets: as for `launch`. Values are not recorded, so those of the launch have to be given again.
        detach: go on when this process ends.
        task_digest: the sha256 of the task, for a run that another machine launched: `Run.task_digest` there.
        trust_bucket: start instead whatever the run's store holds, with the credentials of this machine.

    Returns: the run, with the handles of the new attempts.

    Raises:
        ValueError: no rank can be resumed, one of `ranks` still runs, or a value of the environment is missing, or a
            secret or option that is not taken from a record.
        UntrustedTaskError: another machine launched the run, and nobody vouches for its task.
        BackendError: the backend cannot start single ranks.
        AlreadyResumedError: another process is resuming the same ranks. When it is some of them, the others are
            resumed, and those are named on stderr.
        StoreError: the run was aborted, which is final for its id; or its task is not the one that was launched.
    """
    task = vouched_task(run, task_digest=task_digest, trust_bucket=trust_bucket)
    launched, executor = task.launched_with, run.executor
    verb: Any = executor.launch_replicas
    if "run" not in inspect.signature(verb).parameters:
        raise BackendError(f"Backend {run.backend!r} starts all ranks or none; it cannot resume some of a run.")
    if exists(run.store, f"{run.run_id}/abort.json"):
        raise StoreError(f"Run {run.run_id!r} was aborted, which is final. Launch a new one.", url=run.store.url)
    missing = sorted(set(launched.env) - set(env or {}))
    if missing:
        raise ValueError(
            f"Run {run.run_id!r} was launched with the variable {missing[0]!r}, whose value is not recorded. "
            f"Give it again: --env {missing[0]}=… or env={{{missing[0]!r}: …}}."
        )
    secret_names = _secrets_to_give(run, task, secrets)
    next_attempts = _next_attempts(run, ranks)
    by_attempt: dict[int, list[int]] = {}
    for rank, attempt in next_attempts.items():
        by_attempt.setdefault(attempt, []).append(rank)
    begun: set[int] = set()
    for attempt, group in sorted(by_attempt.items()):
        spec = RunSpec(
            run_id=run.run_id,
            store_url=run.store.url,
            task_digest=task.digest,
            world_size=run.world_size,
            ranks=tuple(group),
            attempt=attempt,
            env=dict(env or {}),
            secret_names=secret_names,
            detach=detach,
            chaos=launched.chaos,
        )
        handles = verb(
            len(group),
            launched.entrypoint,
            {},
            gpu=gpu if gpu is not None else launched.gpu,
            timeout=timeout if timeout is not None else launched.timeout_s,
            run=spec,
        )
        begun.update(handle.rank for handle in handles)
    if overtaken := {rank: attempt for rank, attempt in next_attempts.items() if rank not in begun}:
        told = _who_resumes(run, overtaken)
        if not begun:
            raise AlreadyResumedError(f"{told} Follow it: `replicas wait {shlex.quote(run.url)}`.")
        print(f"replicas: {told}", file=sys.stderr)
    return Run(run.store, run.run_id, executor=executor)


def _secrets_to_give(run: Run, task: StoredTask, secrets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the secrets that the replicas get, after checking that a person named them here.

    The machine that launched this very task has noted them, and the options of its executor. Nothing of this is taken
    from a record.
    """
    if run.noted is not None:
        return tuple(secrets or run.noted.secrets)
    launched = task.launched_with
    if missing := sorted(set(launched.secrets) - set(secrets)):
        raise ValueError(
            f"Run {run.run_id!r} was launched with the secret {missing[0]!r}, and this machine gives no secret away "
            f"because a record names it. Name it again: --secret {missing[0]} or secrets=[{missing[0]!r}]."
        )
    if launched.unrecorded_options and not run.has_given_options:
        option, backend = launched.unrecorded_options[0], run.backend
        raise ValueError(
            f"Run {run.run_id!r} was launched with the option {option!r} of backend {backend!r}, which is not taken "
            f"from a record. Give it again: --backend {backend} --option {option}=…, or attach(…, executor=…)."
        )
    return tuple(secrets)


def _next_attempts(run: Run, ranks: Sequence[int] | None) -> dict[int, int]:
    """Choose the ranks to resume, and number their next attempts: each follows the one whose end was seen.

    Were the numbers asked for later, two who resume at the same time would each have one, and start two copies.
    """
    states = run.status().replicas
    if ranks is None:
        ended = [s for s in states if s.status.is_terminal and s.status is not ReplicaStatus.SUCCEEDED]
        if not ended:
            raise ValueError(f"Run {run.run_id!r} has no replica to resume: {run.status().counts}.")
        return {state.rank: state.attempt + 1 for state in ended}
    for rank in ranks:
        if not 0 <= rank < run.world_size:
            raise RunNotFoundError(f"Run {run.run_id!r} has the ranks 0 to {run.world_size - 1}, got rank {rank}.")
        if not states[rank].status.is_terminal:
            raise ValueError(f"Rank {rank} of run {run.run_id!r} is {states[rank].status}; only what ended is resumed.")
    return {rank: states[rank].attempt + 1 for rank in ranks}


def _who_resumes(run: Run, overtaken: Mapping[int, int]) -> str:
    """Say by whom attempts were begun that this process was to begin."""
    by_whom: dict[tuple[int, str], list[str]] = {}
    for rank, attempt in overtaken.items():
        by_whom.setdefault((attempt, _begun_by(run, rank, attempt)), []).append(str(rank))
    sentences = []
    for (attempt, who), ranks in by_whom.items():
        subject = f"Rank {ranks[0]} of run {run.run_id!r} is"
        if len(ranks) > 1:
            subject = f"Ranks {', '.join(ranks)} of run {run.run_id!r} are"
        sentences.append(f"{subject} being resumed by another process (attempt {attempt}, begun by {who}).")
    return " ".join(sentences)


def _begun_by(run: Run, rank: int, attempt: int) -> str:
    """Name the process that began an attempt, as its first record does."""
    by: Any = None
    with contextlib.suppress(CorruptObjectError):
        if intent := find_record(run.store, replica_key(run.run_id, rank, attempt, "intent.json"), Intent.parse):
            by = intent.by
        elif handle := read_handle(run.store, run.run_id, rank, attempt, run.backend):
            by = handle.metadata.get("by")
    if not isinstance(by, str) or len(by) > MAX_SHOWN:
        return "nobody who says so"
    return by if by.isprintable() else repr(by)
