"""Bringing back replicas of a run that have ended: the same task, the same store, new attempts.

What a replica finds there again is its own affair: `diloco` catches up with the log of its run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from executors.errors import BackendError, RunNotFoundError, StoreError
from executors.launching import give_up
from executors.protocol import ReplicaStatus
from executors.records import exists
from executors.replica import replica_key
from executors.run import Run
from executors.task import RunSpec, read_task


def resume(
    run: Run,
    *,
    ranks: Sequence[int] | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    detach: bool = False,
) -> Run:
    """Start a new attempt of every rank that ended without succeeding.

    Args:
        run: the run; those of its replicas that still run go on undisturbed.
        ranks: start these instead; each must have ended.
        gpu, timeout: None: as the run was launched.
        env, secrets: as for `launch`. Values are not recorded, so those of the launch have to be given again.
        detach: go on when this process ends.

    Returns: the run, with the handles of the new attempts.

    Raises:
        ValueError: no rank can be resumed, one of `ranks` still runs, or a value of the environment is missing, or a
            secret or option that is not taken from a record.
        BackendError: the backend cannot start single ranks.
        StoreError: the run was aborted, which is final for its id; or its task is not the one that was launched.
    """
    record, executor = run.record, run.executor
    verb: Any = executor.launch_replicas
    if "run" not in inspect.signature(verb).parameters:
        raise BackendError(f"Backend {run.backend!r} starts all ranks or none; it cannot resume some of a run.")
    if exists(run.store, f"{run.run_id}/abort.json"):
        raise StoreError(f"Run {run.run_id!r} was aborted, which is final. Launch a new one.", url=run.store.url)
    missing = sorted(set(record.env) - set(env or {}))
    if missing:
        raise ValueError(
            f"Run {run.run_id!r} was launched with the variable {missing[0]!r}, whose value is not recorded. "
            f"Give it again: --env {missing[0]}=… or env={{{missing[0]!r}: …}}."
        )
    _check_told_again(run, secrets)
    chosen = _ranks_to_resume(run, ranks)
    digest = record.task_digest
    read_task(run.store, run.run_id, digest)  # each replica would say so, too, but once started
    by_attempt: dict[int, list[int]] = {}
    for rank in chosen:
        by_attempt.setdefault(run.newest_attempt(rank) + 1, []).append(rank)
    for attempt, group in sorted(by_attempt.items()):
        spec = RunSpec(
            run_id=run.run_id,
            store_url=run.store.url,
            task_digest=digest,
            world_size=run.world_size,
            ranks=tuple(group),
            attempt=attempt,
            env=dict(env or {}),
            secret_names=tuple(secrets or run.secrets),
            detach=detach,
            chaos=record.chaos,
        )
        try:
            verb(
                len(group),
                record.entrypoint,
                {},
                gpu=gpu if gpu is not None else record.gpu,
                timeout=timeout if timeout is not None else record.timeout_s,
                run=spec,
            )
        except BaseException as error:  # else the next resume would be given these attempts again, which are cancelled
            with contextlib.suppress(StoreError):
                begun = [r for r in group if any(run.store.list(replica_key(run.run_id, r, attempt, "")))]
                give_up(run.store, run.run_id, begun, attempt, error)
            raise
    return Run(run.store, run.run_id, executor=executor)


def _check_told_again(run: Run, secrets: Sequence[str]) -> None:
    """Refuse to take from a record what decides which code runs, and which secrets it gets.

    The machine that launched the run has its own note of these.
    """
    if run.was_launched_here:
        return
    if missing := sorted(set(run.record.secrets) - set(secrets)):
        raise ValueError(
            f"Run {run.run_id!r} was launched with the secret {missing[0]!r}, and this machine gives no secret away "
            f"because a record names it. Name it again: --secret {missing[0]} or secrets=[{missing[0]!r}]."
        )
    if run.record.unrecorded_options and not run.has_given_executor:
        option, backend = run.record.unrecorded_options[0], run.backend
        raise ValueError(
            f"Run {run.run_id!r} was launched with the option {option!r} of backend {backend!r}, which is not taken "
            f"from a record. Give it again: --backend {backend} --option {option}=…, or attach(…, executor=…)."
        )


def _ranks_to_resume(run: Run, ranks: Sequence[int] | None) -> list[int]:
    states = run.status().replicas
    if ranks is None:
        ended = [s.rank for s in states if s.status.is_terminal and s.status is not ReplicaStatus.SUCCEEDED]
        if not ended:
            raise ValueError(f"Run {run.run_id!r} has no replica to resume: {run.status().counts}.")
        return ended
    for rank in ranks:
        if not 0 <= rank < run.world_size:
            raise RunNotFoundError(f"Run {run.run_id!r} has the ranks 0 to {run.world_size - 1}, got rank {rank}.")
        if not states[rank].status.is_terminal:
            raise ValueError(f"Rank {rank} of run {run.run_id!r} is {states[rank].status}; only what ended is resumed.")
    return list(ranks)
