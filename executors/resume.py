"""Bringing back replicas of a run that have ended: the same task, the same store, new attempts.

What a replica finds there again is its own affair: `diloco` catches up with the log of its run.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executors.attempt import Attempt, Intent
from executors.errors import (
    AlreadyResumedError,
    BackendError,
    CorruptObjectError,
    LaunchError,
    RunNotFoundError,
    StoreError,
    UntrustedTaskError,
)
from executors.native import KeepsOptions, NativeExecutor, RunSpec, restarts_replicas
from executors.policy import HangLimits, Restarts
from executors.process import this_process
from executors.protocol import ReplicaStatus
from executors.registry import is_given
from executors.run.handles import keep_handles
from executors.run.launch_hands import Recipe
from executors.run.run import Run
from executors.run_index import new_run_id, remember
from executors.store.records import SHA256, exists
from executors.supervision.decisions import DecisionLog, hang_of, policy_of
from executors.supervision.lease import hold_lease, release_lease
from executors.supervision.orders import order_policy, order_resume
from executors.task.create import continue_run
from executors.task.stored import StoredTask, read_task

MAX_NAME = 200  # characters of the name that a record gives somebody
MAX_SHOWN = 100  # characters of what a store says that nobody vouches for


def resume(
    run: Run,
    *,
    ranks: Sequence[int] | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    gather_s: float | None = None,
    restarts: Restarts | int | str | None = None,
    hang_timeout: str | float | None = None,
    detach: bool = False,
    task_digest: str | None = None,
    trust_bucket: bool = False,
    from_snapshot: bool = False,
    tell: Callable[[str], None] = lambda words: None,
) -> Run:
    """Start a new attempt of every rank that ended without succeeding.

    Args:
        run: the run; those of its replicas that still run go on undisturbed.
        ranks: start these instead; each must have ended.
        gpu, timeout, gather_s: None: as the run was launched. `gather_s` goes with its `min_replicas`.
        restarts, hang_timeout: as for `launch`, for all ranks from here on. None: as before.
        env, secrets: as for `launch`. Values are not recorded, so those of the launch have to be given again.
        detach: go on when this process ends.
        task_digest: the sha256 of the task, for a run that another machine launched: `Run.task_digest` there.
        trust_bucket: start instead whatever the run's store holds, with the credentials of this machine.
        from_snapshot: begin a new run of the same task instead, under a new id and with all ranks, where the newest
            whole snapshot of this run is: for one that cannot go on, because something in its store has rotted. Lost
            are the rounds after that snapshot and all work that was in none, artifacts stay with the old run, and ranks
            that joined do not come along. What `DiLoCo.attach_state` kept until that snapshot does. The old run's
            store is needed until the new run has had its first round. An entrypoint without `DiLoCo` begins anew.
        tell: gets a few words on how far the start is, where it takes long.

    Returns: the run, with the handles of the new attempts; from a snapshot, the new run.

    Raises:
        ValueError: no rank can be resumed, one of `ranks` still runs (from a snapshot: any rank does), a value of the
            environment is missing, or a secret or option that is not taken from a record.
        UntrustedTaskError: another machine launched the run, and nobody vouches for its task.
        BackendError: the backend cannot start single ranks.
        AlreadyResumedError: another process is resuming the same ranks. When it is some of them, the others are
            resumed, and those are named on stderr.
        LaunchError: the run was cancelled or stopped meanwhile.
        StoreError: the run was aborted, which is final for its id; or its task is not the one that was launched.
    """
    new_restarts = Restarts.of(restarts)
    new_hang = None if hang_timeout is None else HangLimits.parse(hang_timeout)
    task = vouched_task(run, task_digest=task_digest, trust_bucket=trust_bucket)
    launched = task.launched_with
    recipe = recipe_of(run, task, gpu=gpu, timeout=timeout, env=env, secrets=secrets, detach=detach)
    executor, limits = native_executor(run), recipe.limits
    if (new_restarts or new_hang) and not restarts_replicas(executor):
        raise ValueError(f"Backend {run.backend!r} starts nothing again: leave restarts= and hang_timeout= away.")
    if from_snapshot:
        _check_that_all_ended(run, ranks)
    elif exists(run.store, f"{run.run_id}/abort.json"):
        raise StoreError(f"Run {run.run_id!r} was aborted, which is final. Launch a new one.", url=run.store.url)
    if gather_s is not None:
        if launched.min_replicas is None:
            raise ValueError(
                f"Run {run.run_id!r} was launched without min_replicas, so gather_s= (--gather) says nothing."
            )
        recipe = replace(recipe, spec=replace(recipe.spec, gather_s=gather_s))
    log = DecisionLog(run.store, run.run_id)
    policy = new_restarts or policy_of(log.read(), Restarts.of(launched.restarts))
    hang = new_hang or hang_of(log.entries, HangLimits.parse(launched.hang))
    kept = replace(recipe.spec, restarts=None if policy is None else str(policy), hang=str(hang))
    recipe = replace(recipe, spec=kept)
    if from_snapshot:
        return _begin_from_snapshot(run, task, recipe, tell)
    if new_restarts or new_hang:
        order_policy(log, new_restarts, new_hang)
    n_seen = len(log.read())
    next_attempts = _next_attempts(run, ranks)
    if (barring := order_resume(log, next_attempts, n_seen)) is not None:
        what = "cancelled" if barring.kind == "cancel" else "stopped"
        raise LaunchError(f"Run {run.run_id!r} was {what} meanwhile by {_name(barring.by)}.", cancelled=True)
    if detach and executor.lease_s is not None:
        release_lease(run.store, run.run_id)
    lease = hold_lease(run.store, recipe.spec)
    by_attempt: dict[int, list[int]] = {}
    for rank, attempt in next_attempts.items():
        by_attempt.setdefault(attempt, []).append(rank)
    begun: set[int] = set()
    goes_on = run.world_size - len(next_attempts)
    for attempt, group in sorted(by_attempt.items()):
        needed = launched.min_replicas and max(1, min(launched.min_replicas - goes_on, len(group)))
        spec = replace(recipe.spec, ranks=tuple(group), attempt=attempt, min_replicas=needed)
        handles = executor.launch_replicas(len(group), launched.entrypoint, {}, **limits, run=spec, tell=tell)
        begun.update(handle.rank for handle in handles)
        keep_handles(run.store, run.run_id, attempt, handles)
    if overtaken := {rank: attempt for rank, attempt in next_attempts.items() if rank not in begun}:
        if not begun:
            by_others = _who_resumes(run, overtaken)
            raise AlreadyResumedError(f"{by_others} Follow it: `replicas wait {shlex.quote(run.url)}`.")
        # With `min_replicas` some may be missing that this process itself could not start, or not yet.
        if by_others := _who_resumes(run, overtaken, but=this_process() if launched.min_replicas else None):
            print(f"replicas: {by_others}", file=sys.stderr)
    found = Run(run.store, run.run_id, executor=executor)
    if not detach:
        found.keep_here(recipe, lease)
    return found


def native_executor(run: Run) -> NativeExecutor:
    """Return the executor of a run that can start single ranks.

    Raises:
        BackendError: it cannot.
    """
    if not isinstance(run.executor, NativeExecutor):
        raise BackendError(f"Backend {run.backend!r} starts all ranks or none; it cannot resume some of a run.")
    return run.executor


def recipe_of(
    run: Run,
    task: StoredTask,
    *,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    detach: bool = False,
) -> Recipe:
    """Return what starts attempts of a run, after checking that a person gave here what is never recorded.

    Args:
        task: for which somebody vouched.
        gpu, timeout, env, secrets, detach: as for `resume`.

    Raises:
        ValueError: a value of the environment, a secret or an option is missing.
        BackendError: the backend cannot start single ranks.
    """
    launched, executor = task.launched_with, native_executor(run)
    missing = sorted(set(launched.env) - set(env or {}))
    if missing:
        raise ValueError(
            f"Run {run.run_id!r} was launched with the variable {missing[0]!r}, whose value is not recorded. "
            f"Give it again: --env {missing[0]}=… or env={{{missing[0]!r}: …}}."
        )
    spec = RunSpec(
        run_id=run.run_id,
        store_url=run.store.url,
        task_digest=task.digest,
        world_size=run.world_size,
        ranks=tuple(range(run.world_size)),
        env=dict(env or {}),
        secret_names=_secrets_to_give(run, task, secrets),
        detach=detach,
        chaos=launched.chaos,
        min_replicas=launched.min_replicas,
        gather_s=launched.gather_s,
        fail_fast=launched.fail_fast,
        restarts=launched.restarts,
        hang=launched.hang,
        launched_at=run.record.created_at,
        lease_s=None if detach else executor.lease_s,
    )
    limits = {
        "gpu": gpu if gpu is not None else launched.gpu,
        "timeout": timeout if timeout is not None else launched.timeout_s,
    }
    return Recipe(spec, launched.entrypoint, limits)


def _check_that_all_ended(run: Run, ranks: Sequence[int] | None) -> None:
    if ranks is not None:
        raise ValueError("A new run from a snapshot has all ranks: leave ranks= away.")
    status = run.status()
    if not all(state.status.is_terminal for state in status.replicas):
        raise ValueError(
            f"Run {run.run_id!r} is not over ({status.counts}), and a new one from its snapshot would train beside it. "
            f"End it first: replicas cancel {run.run_id}"
        )


def _begin_from_snapshot(run: Run, task: StoredTask, recipe: Recipe, tell: Callable[[str], None]) -> Run:
    """Write and start a new run of the task, as `launch` does."""
    executor, limits = native_executor(run), recipe.limits
    spec = continue_run(task, replace(recipe.spec, run_id=new_run_id(), chaos=()), run.record, **limits)
    recipe = replace(recipe, spec=spec)
    lease = None
    try:
        options = executor.options_to_keep if isinstance(executor, KeepsOptions) else {}
        remember(spec.run_id, run.store.url, spec.task_digest, options, spec.secret_names)
        lease = hold_lease(run.store, spec)
        handles = executor.launch_replicas(spec.world_size, recipe.entrypoint, {}, **limits, run=spec, tell=tell)
    except BaseException as error:
        if lease is not None:
            lease.end()
        with contextlib.suppress(StoreError):
            for rank in spec.ranks:
                Attempt(run.store, spec.run_id, rank).abandon(error)
        raise
    keep_handles(run.store, spec.run_id, 0, handles)
    begun = Run(run.store, spec.run_id, executor=executor)
    if not spec.detach:
        begun.keep_here(recipe, lease)
    return begun


def _secrets_to_give(run: Run, task: StoredTask, secrets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the secrets that the replicas get, after checking that a person named them here.

    The machine that launched this very task has noted them, and the options of its executor as far as they are JSON.
    Nothing of this is taken from a record.
    """
    launched, noted = task.launched_with, run.noted
    missing = [] if noted else sorted(set(launched.secrets) - set(secrets))
    if missing:
        raise ValueError(
            f"Run {run.run_id!r} was launched with the secret {missing[0]!r}, and this machine gives no secret away "
            f"because a record names it. Name it again: --secret {missing[0]} or secrets=[{missing[0]!r}]."
        )
    given: Collection[str] = noted.executor_options if noted else ()  # an option that is not JSON is not noted either
    if run.has_given_options and isinstance(run.executor, KeepsOptions):
        given = {name for name, value in run.executor.options_to_keep.items() if is_given(value)}
    if missing := sorted(set(launched.unrecorded_options) - set(given)):
        option, backend = missing[0], run.backend
        how = "--volume NAME:/path" if option == "volumes" else f"--option {option}=…"
        raise ValueError(
            f"Run {run.run_id!r} was launched with the option {option!r} of backend {backend!r}, which is not taken "
            f"from a record. Give it again: --backend {backend} {how}, or attach(…, executor=…)."
        )
    return tuple(secrets or (noted.secrets if noted else ()))


def _next_attempts(run: Run, ranks: Sequence[int] | None) -> dict[int, int]:
    """Choose the ranks to resume, and number their next attempts: each follows the one whose end was seen.

    Were the numbers asked for later, two who resume at the same time would each have one, and start two copies.
    """
    states = run.status().replicas
    for state in states if ranks is None else ():
        if not state.is_readable and state.outcome is not None:
            raise CorruptObjectError(str(state.outcome.error), url=run.store.url)
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


def _who_resumes(run: Run, overtaken: Mapping[int, int], but: str | None = None) -> str:
    """Say by whom attempts were begun that this process was to begin."""
    by_whom: dict[tuple[int, str], list[str]] = {}
    for rank, attempt in overtaken.items():
        who = _begun_by(run, Attempt(run.store, run.run_id, rank, attempt))
        if who != but:
            by_whom.setdefault((attempt, who), []).append(str(rank))
    sentences = []
    for (attempt, who), ranks in by_whom.items():
        subject = f"Rank {ranks[0]} of run {run.run_id!r} is"
        if len(ranks) > 1:
            subject = f"Ranks {', '.join(ranks)} of run {run.run_id!r} are"
        sentences.append(f"{subject} being resumed by another process (attempt {attempt}, begun by {who}).")
    return " ".join(sentences)


def _begun_by(run: Run, begun: Attempt) -> str:
    """Name the process that began an attempt, as its first record does."""
    by: Any = None
    with contextlib.suppress(CorruptObjectError):
        if intent := begun.find("intent.json", Intent.parse):
            by = intent.by
        elif handle := begun.handle(run.backend):
            by = handle.metadata.get("by")
    return _name(by)


def _name(by: Any) -> str:
    """Return the name of a process, as a record has it, for people."""
    if not isinstance(by, str) or not 0 < len(by) <= MAX_NAME:
        return "an unnamed process"
    return by if by.isprintable() else repr(by)


def vouched_task(run: Run, *, task_digest: str | None = None, trust_bucket: bool = False) -> StoredTask:
    """Read the task that a resumed run starts again, after somebody vouched for it. Writes and starts nothing.

    Args:
        task_digest: the sha256 of the task, which a person brings along. None: what this machine kept at the launch.
        trust_bucket: take the store's own word for it, and say on stderr what that is.

    Raises:
        ValueError: `task_digest` is not a sha256, or both are given.
        UntrustedTaskError: this machine did not launch the run, and nobody vouches for its task.
        StoreError: the run's task, or its record, is not what was launched.
    """
    kept = run.task_digest
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
            f"Run {run.run_id!r} was not launched from here, at least not under this address, so only its rendezvous "
            f"says what it is. {_what_would_run(run)} To resume it, give the digest that `replicas status {run.run_id} "
            "--json` says as task_digest on the machine that launched it: "
            f"replicas resume {shlex.quote(run.url)} --task-digest SHA256, or task_digest=. "
            "Or trust whoever can write to that rendezvous: --trust-bucket, or trust_bucket=True."
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
        raise ValueError(f"A task's digest is not a sha256: 64 hexadecimal digits, got {text!r}.")
    return text.lower()


def _what_would_run(run: Run) -> str:
    """Say what the store says of a run: nobody vouches for any of it."""
    record = run.record
    entrypoint, by, digest = (_shown(value) for value in (record.entrypoint, record.created_by, record.task_digest))
    return (
        f"Resuming {run.url} runs code with the credentials of this machine: {entrypoint}, launched by {by}, with the "
        f"task digest {digest}, as its rendezvous says."
    )


def _shown(value: Any) -> str:
    """Return what a store says on one line, without control characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
